"""The cache as a whole: what is in it, emptying it, and taking it elsewhere as one file.

A bundle is a tar archive of the files of a cache, each with a checksum of its own: ``graphs/<digest>``,
``cubins/<hash>.cubin`` and ``.plan`` (machine code for GPUs and plans of cuDNN, by a hash of what they were made from),
``tuning`` (the rows of the database), and last ``end``, with how many there are. It can be made where there is time and
unpacked, or merged, where there is none: in a container image, on other machines. What is for other devices does no harm,
it is never found.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Final, NamedTuple

from .. import _native
from ..errors import ArtifactError, CacheError, from_native, is_interrupt
from .artifact import Artifact, Row, as_row, read_artifact
from .cache import LOCK, cache_folder, complain, tidy, update
from .encode import decoding, to_bytes, to_data

__all__ = ["Row", "check", "clear", "database_path", "entries", "export", "list_cache", "merge", "replace"]

_UNIT: Final = re.compile(r"cubins/([0-9a-f]{64}\.(?:cubin|plan))")
"""What machine code and plans are called in a bundle."""
_MAX_UNIT: Final = (64 << 20) + 32
"""Most bytes of one of these: what is read of the folder, with its hash."""
_MAX_ENTRY: Final = 1 << 28
"""Most bytes of an artifact."""
_TEMPORARY: Final = ".oxidiff-tmp"
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Why a file has no second name: the file system knows of none."""


def _folder() -> Path:
    folder = cache_folder()
    if folder is None:
        raise CacheError("this platform has no cache folder; set OXIDIFF_CACHE_DIR")
    return Path(folder)


def database_path() -> Path:
    """Where the tuning database is.

    Raises:
        CacheError: There is no cache folder.
    """
    return _folder() / "tuning.sqlite"


def _graphs() -> list[Path]:
    folder = _folder() / "graphs"
    return sorted(folder.glob("*.oxi")) if folder.is_dir() else []


def _cubins() -> list[Path]:
    """Machine code of kernels for GPUs."""
    return sorted((_folder() / "cubins").glob("*.cubin"))


def _plans() -> list[Path]:
    """Plans of cuDNN."""
    return sorted((_folder() / "cubins").glob("*.plan"))


def _journal() -> Path:
    """What SQLite undoes a write of the database with whose process was killed."""
    return database_path().with_name("tuning.sqlite-journal")


def _files() -> list[Path]:
    """All that the cache is."""
    database = database_path()
    return [*_graphs(), *_cubins(), *_plans(), database, _journal(), database.with_suffix(".damaged")]


def _beside(path: Path) -> Path:
    """A name in the same folder that nobody else has, and that is swept after an hour."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")


def entries(path: str | PathLike[str] | None = None) -> list[Row]:
    """The rows of a tuning database, by default of the cache's; none if there is no such file.

    Raises:
        CacheError: The file cannot be read or is damaged.
    """
    file = database_path() if path is None else Path(path)
    try:
        # One that another process is about to begin is empty.
        if not file.stat().st_size:
            return []
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"cannot read {file}: {error.strerror}") from error
    try:
        return _native.TuningDatabase(fspath(file), read_only=True).entries()
    except _native.NativeError as error:
        raise from_native(error) from error


def list_cache(with_choices: bool = False) -> str:
    """What is in the cache, for people.

    Args:
        with_choices: A line for each tuning choice too.
    """
    folder = _folder()
    lines = [str(folder)]
    total = 0
    for path in _graphs():
        state = path.stat()
        total += state.st_size
        days = (time.time() - state.st_mtime) / 86400
        try:
            artifact = read_artifact(path)
            about = f"{artifact.name}, {len(artifact.graphs)} graphs"
        except ArtifactError as error:
            about = f"not usable: {error}"
        lines.append(f"  graphs/{path.name}  {state.st_size / 2**20:6.2f} MiB  used {days:.1f} days ago  {about}")
    try:
        rows = entries()
        lines.append(f"  tuning.sqlite  {len(rows)} choices")
        for device, library in sorted({row[2:4] for row in rows}):
            held = [row for row in rows if row[2:4] == (device, library)]
            is_gpu = "cuDNN" in library
            is_old = not is_gpu and library != _native.kernel_version
            with_what = library if is_gpu else f"kernels {library}"
            lines.append(
                f"    {len(held)} choices for {device}, {with_what}{' (not these: they are not used)' if is_old else ''}"
            )
            for op, bucket, _, _, choice, seconds, default_seconds, *_ in held if with_choices else ():
                times = f"{seconds * 1e3:.3g} ms, {default_seconds * 1e3:.3g} ms untuned"
                lines.append(f"      {op}, {bucket}: {choice}, {times}")
    except CacheError as error:
        lines.append(f"  tuning.sqlite  not usable: {error}")
    lines.append(f"  {len(_graphs())} artifacts, {total / 2**20:.2f} MiB")
    if units := _cubins():
        lines.append(f"  {len(units)} units of GPU kernels, {sum(u.stat().st_size for u in units) / 2**20:.2f} MiB")
    if plans := _plans():
        lines.append(f"  {len(plans)} plans of cuDNN, {sum(p.stat().st_size for p in plans) / 2**20:.2f} MiB")
    return "\n".join(lines)


def clear() -> int:
    """Empties the cache; gives how many files were removed. Programs in use are not affected.

    Raises:
        CacheError: A file cannot be removed; all others are.
    """
    removed = 0
    left: list[tuple[Path, OSError]] = []
    for path in _files():
        try:
            path.unlink()
            removed += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append((path, error))
    if left:
        first, reason = left[0]
        raise CacheError(f"cannot remove {first}: {reason}") from reason
    return removed


def export(path: str | PathLike[str], say: Callable[[str], None] = complain) -> int:
    """Writes the cache as one file; gives how many artifacts, kernels, plans and rows are in it.

    One file of the cache is in memory at a time. What is damaged is left out. The file takes its place when it is complete;
    a link stays, and leads to it.

    Args:
        path: The file.
        say: Told why the tuning choices are left out, where their database cannot be read.

    Raises:
        CacheError: The cache cannot be read or the file not written, or there is something that is no file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheError(f"{fspath(path)} is no file")
    rows: list[Row] = []
    count = 0
    try:
        rows = entries()
    except CacheError as error:
        # Of another version, say, whose choices are not for these kernels; its graphs say themselves what they are for.
        say(f"the tuning choices are left out: {error}")
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with tarfile.open(temporary, "w") as tar:

            def add(name: str, content: bytes) -> None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

            for graph in _graphs():
                with contextlib.suppress(ArtifactError):
                    add(f"graphs/{graph.stem}", read_artifact(graph).to_bytes())
                    count += 1
            for unit in (*_cubins(), *_plans()):
                # Another process may have removed it.
                with contextlib.suppress(FileNotFoundError):
                    content = unit.read_bytes()
                    if _native.is_whole(content):
                        add(f"cubins/{unit.name}", content)
                        count += 1
            add("tuning", _native.encode_artifact([("tuning", to_bytes(rows))]))
            add("end", str(count).encode())
        os.replace(temporary, target)
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror or error}") from error
    except _native.NativeError as error:
        raise from_native(error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return count + len(rows)


def merge(path: str | PathLike[str]) -> int:
    """Adds what a bundle, or a tuning database, has to the cache; gives how many files and rows that are.

    Of two measurements of one choice the later stays.

    Raises:
        ArtifactError: The file is neither, or damaged. Nothing is added then.
        CacheError: The cache cannot be written.
    """
    check(path)
    folder, count = _folder(), 0
    try:
        for item in _contents(Path(path)):
            if isinstance(item, Artifact):
                # By what it says it is, never by a name that could lead out of the folder.
                update(os.path.join(folder, "graphs", f"{item.description.digest}.oxi"), item)
                count += 1
            elif isinstance(item, _Unit):
                _native.write_file(os.path.join(folder, "cubins", item.name), item.content)
                count += 1
            elif item:
                _add_rows(database_path(), item)
                count += len(item)
    except _native.NativeError as error:
        raise from_native(error) from error
    return count


def replace(path: str | PathLike[str]) -> int:
    """Replaces the cache by what a bundle, or a tuning database, has; gives how many files and rows that are.

    What is new is written beside what there is, and takes its place once all of it was read: where anything fails, all is as
    it was. Where the process is killed while names change, each file is the old one or the new one.

    Raises:
        ArtifactError: The file is neither, or damaged.
        CacheError: It is a part of the cache, or the cache cannot be written.
    """
    file = Path(path)
    if any(own.exists() and file.exists() and own.samefile(file) for own in _files()):
        raise CacheError(
            f"{file} is a part of the cache, all of which would be replaced: export the cache, or merge it"
        )
    folder = _folder()
    graphs = folder / "graphs"
    for each in (folder, graphs, folder / "cubins"):
        _native.sweep_folder(fspath(each))
    staged: dict[Path, Path] = {}
    count = 0

    def stage(target: Path) -> Path:
        return staged.setdefault(target, _beside(target))

    try:
        for item in _contents(file):
            count += len(item) if isinstance(item, list) else 1
            if isinstance(item, Artifact):
                target = graphs / f"{item.description.digest}.oxi"
                if target in staged:
                    held = read_artifact(staged[target])
                    held.merge(item)
                    item = held
                _native.write_file(fspath(stage(target)), item.to_bytes())
            elif isinstance(item, _Unit):
                _native.write_file(fspath(stage(folder / "cubins" / item.name)), item.content)
            elif item:
                _add_rows(stage(database_path()), item)
        with _native.FileLock(fspath(graphs / LOCK)):
            _swap(staged)
            tidy(fspath(graphs))
    except _native.NativeError as error:
        raise from_native(error) from error
    except OSError as error:
        raise CacheError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        for each in staged.values():
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)
    return count


def _add_rows(database: Path, rows: list[Row]) -> None:
    _native.TuningDatabase(fspath(database)).add(rows)


def _swap(staged: Mapping[Path, Path]) -> None:
    """Gives files their names, and takes away whatever else the cache has: all of it or, if that fails, nothing."""
    with contextlib.suppress(CacheError):
        # What a writer that was killed has begun is undone: it must not be in the new database.
        entries()
    done: list[tuple[Path, Path | None]] = []

    def put_aside(path: Path) -> None:
        aside = _beside(path)
        done.append((path, aside))
        os.replace(path, aside)

    try:
        if _journal().exists():
            put_aside(_journal())
        # The database last, as graphs without choices are worth more than choices without graphs.
        for target, fresh in sorted(staged.items(), key=lambda item: item[0] == database_path()):
            aside = _beside(target) if target.exists() else None
            done.append((target, aside))
            if aside is not None:
                try:
                    # A second name: there is no moment without a file.
                    os.link(target, aside)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    os.replace(target, aside)
            os.replace(fresh, target)
        for old in _files():
            if old not in staged and old.is_file():
                put_aside(old)
    except BaseException:
        for target, aside in reversed(done):
            # What cannot be put back stays where it is.
            with contextlib.suppress(OSError):
                if aside is None:
                    target.unlink(missing_ok=True)
                elif aside.exists():
                    os.replace(aside, target)
                    # Two names of one file stay two.
                    aside.unlink(missing_ok=True)
        raise
    for _, aside in done:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink()


def check(path: str | PathLike[str]) -> None:
    """Reads all of a bundle or of a tuning database.

    Raises:
        ArtifactError: The file is neither, or damaged.
        CacheError: The database cannot be read.
    """
    for _ in _contents(Path(path)):
        pass


class _Unit(NamedTuple):
    """A file of the folder of machine code and plans."""

    name: str
    content: bytes


def _contents(file: Path) -> Iterator[Artifact | _Unit | list[Row]]:
    """What a bundle or a tuning database has, one after the other, each checked.

    Raises:
        ArtifactError: As :func:`check`; it names the file.
        CacheError: The database cannot be read.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(8)
    except OSError as error:
        raise ArtifactError(f"cannot read {file}: {error}") from error
    if head.startswith(b"SQLite"):
        yield entries(file)
        return
    if head == b"oxidiff\n":
        raise ArtifactError(f"{file} is an artifact of one module, not a cache; use load_graph")
    count, told = 0, None
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                name, is_unit = member.name, _UNIT.fullmatch(member.name)
                is_file = member.isreg() and not member.issparse() and member.size >= 0
                if not is_file or member.size > (_MAX_UNIT if is_unit else _MAX_ENTRY):
                    raise ArtifactError(f"{name!r} is no file, or has more bytes than any can have")
                reader = tar.extractfile(member)
                content = b"" if reader is None else reader.read()
                if name == "end":
                    told = content
                elif is_unit:
                    if not _native.is_whole(content):
                        raise ArtifactError(f"{name} is damaged")
                    count += 1
                    yield _Unit(is_unit[1], content)
                elif name.startswith("graphs/"):
                    count += 1
                    yield Artifact.from_bytes(content)
                elif name == "tuning":
                    yield _rows(content)
                else:
                    raise ArtifactError(f"there is no such thing as {name!r} in a cache")
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error
    except Exception as error:
        # Of numbers in headers that are none, or that are beyond all bounds, tarfile lets through what Python says.
        if is_interrupt(error):
            raise
        raise ArtifactError(f"{file} is not a cache that was exported: {str(error) or type(error).__name__}") from error
    if told != str(count).encode():
        raise ArtifactError(f"{file} is cut or damaged: it has {count} files and no end that says so")


def _rows(content: bytes) -> list[Row]:
    with decoding("what was tuned"):
        return [as_row(row) for row in to_data(_native.decode_artifact(content)["tuning"])]
