"""The cache as a whole: what is in it, emptying it, and taking it elsewhere as one file.

A bundle is an artifact file whose sections are the files of a cache: ``graphs/<digest>`` and the rows of the tuning
database. It can be made where there is time and unpacked, or merged, where there is none: in a container image, on other
machines. Rows of other devices do no harm, they are never found.
"""

from __future__ import annotations

import contextlib
import os
import time
from os import PathLike, fspath
from pathlib import Path

from .. import _native
from ..errors import ArtifactError, CacheError, from_native
from .artifact import Artifact, Row, as_row, read_artifact
from .cache import cache_folder, update
from .encode import decoding, to_bytes, to_data

__all__ = ["Row", "check", "clear", "database_path", "entries", "export", "list_cache", "merge"]


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


def entries(path: str | PathLike[str] | None = None) -> list[Row]:
    """The rows of a tuning database, by default of the cache's; none if there is no such file.

    Raises:
        CacheError: The file cannot be read or is damaged.
    """
    file = database_path() if path is None else Path(path)
    # One that another process is about to begin is empty.
    if not file.exists() or not file.stat().st_size:
        return []
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
        CacheError: A file cannot be removed.
    """
    removed = 0
    for path in (*_graphs(), *_cubins(), *_plans(), database_path(), database_path().with_suffix(".damaged")):
        try:
            path.unlink()
            removed += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CacheError(f"cannot remove {path}: {error}") from error
    return removed


def export(path: str | PathLike[str]) -> int:
    """Writes the cache as one file; gives how many artifacts and rows are in it.

    Raises:
        CacheError: The cache cannot be read or the file not written.
    """
    sections: list[tuple[str, bytes]] = []
    for graph in _graphs():
        with contextlib.suppress(ArtifactError):
            sections.append((f"graphs/{graph.stem}", read_artifact(graph).to_bytes()))
    rows = entries()
    sections.append(("tuning", to_bytes(rows)))
    try:
        _native.write_file(fspath(path), _native.encode_artifact(sections))
    except _native.NativeError as error:
        raise from_native(error) from error
    return len(sections) - 1 + len(rows)


def merge(path: str | PathLike[str]) -> int:
    """Adds what a bundle, or a tuning database, has to the cache; gives how many artifacts and rows that are.

    Of two measurements of one choice the later stays.

    Raises:
        ArtifactError: The file is neither, or damaged.
        CacheError: The cache cannot be written.
    """
    graphs, rows = check(path)
    for name, artifact in graphs:
        update(os.path.join(_folder(), "graphs", f"{name}.oxi"), artifact)
    if rows:
        try:
            _native.TuningDatabase(fspath(database_path())).add(rows)
        except _native.NativeError as error:
            raise from_native(error) from error
    return len(graphs) + len(rows)


def check(path: str | PathLike[str]) -> tuple[list[tuple[str, Artifact]], list[Row]]:
    """The artifacts, by digest, and the rows of a bundle or a tuning database.

    Raises:
        ArtifactError: The file is neither, or damaged.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            is_database = opened.read(6) == b"SQLite"
    except OSError as error:
        raise ArtifactError(f"cannot read {file}: {error}") from error
    if is_database:
        return [], entries(file)
    graphs: list[tuple[str, Artifact]] = []
    return graphs, _read_bundle(file, graphs)


def _read_bundle(file: Path, graphs: list[tuple[str, Artifact]]) -> list[Row]:
    try:
        data = _native.read_file(fspath(file))
        sections = _native.decode_artifact(data or b"")
    except _native.NativeError as error:
        raise ArtifactError(f"{file}: {error.args[1]}") from error
    with decoding(str(file)):
        if "tuning" not in sections:
            raise ArtifactError(f"{file} is an artifact of one module, not a cache; use load_graph")
        for name, content in sections.items():
            if name.startswith("graphs/"):
                artifact = Artifact.from_bytes(content)
                # By what it says it is, never by a name that could lead out of the folder.
                graphs.append((artifact.description.digest, artifact))
        return [as_row(row) for row in to_data(sections["tuning"])]
