"""The cache folder, and where one module's graphs come from and go to.

The folder holds ``graphs/<digest>.oxi``, one artifact for everything that graphs depend on (see
:mod:`~oxidiff.store.describe`), and ``tuning.sqlite``. Its files are only ever replaced whole; a lock is held while one
is read, extended and replaced. Nothing that goes wrong here stops a program: a file that cannot be used is one warning
and a miss, one that cannot be written one warning.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence, Set
from os import PathLike, fspath
from typing import Any, Protocol

import torch

from .. import _native
from ..capture import Call, CapturedGraph
from ..capture.signature import classes_of
from ..errors import ArtifactError, CacheError, CacheWarning, Error, from_native, is_interrupt
from ..options import CompileOptions
from .artifact import Artifact, Body, Identity, Row, StoredGraph, Tuned, merge_rows, read_artifact
from .code import Surroundings
from .describe import Description, Input, describe, surroundings
from .encode import UnstorableError, encode_call_key
from .origins import UNDESCRIBED
from .reads import restore_key, takes

__all__ = ["LOCK", "GraphStore", "cache_folder", "complain", "graphs_folder", "save", "tidy", "update"]

MAX_FOLDER_BYTES = 1 << 30
"""Above this, the graphs that were not used for longest are removed."""
LOCK = ".oxidiff-lock"
"""The file in the graphs' folder, or in that of another artifact, that whoever extends one holds a lock on."""
_SUFFIX = ".oxi"
_CLOSED_SECONDS = 60.0
_PATIENCE_SECONDS = 2.0


def cache_folder() -> str | None:
    """The cache folder, ``None`` where the platform has none and ``OXIDIFF_CACHE_DIR`` is not set."""
    found = _native.cache_dir()
    # Its bytes as Python writes them in this locale, which may have no word for them.
    return None if found is None else os.fsdecode(fspath(found).encode("utf-8", "surrogateescape"))


def graphs_folder() -> str | None:
    """Where the automatic cache keeps artifacts."""
    folder = cache_folder()
    return None if folder is None else os.path.join(folder, "graphs")


_warned: set[str] = set()


def complain(message: str, about: str = "") -> None:
    """Warns about the cache, once for each message, or for each thing that it is ``about``."""
    if (about or message) not in _warned:
        _warned.add(about or message)
        warnings.warn(message, CacheWarning, stacklevel=2)


class _Compiled(Protocol):
    graph: CapturedGraph

    @property
    def body(self) -> Body: ...
    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def tuned(self) -> Sequence[Tuned]: ...


class GraphStore:
    """Stored graphs for one structure of one module.

    Args:
        module: The module.
        forward: What is captured of it.
        options: ``cache``, ``graph_file``, ``dynamic`` and ``strict`` matter.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], options: CompileOptions) -> None:
        self.inputs: Sequence[Input] = ()
        """Where the numbers in the module's attributes are that are arguments of its graphs."""
        self._module = module
        self.root = module
        """The module, or what has it and whatever else its attributes hold."""
        self._forward = forward
        self._options = options
        self._description: Description | None = None
        self._reason: str | None = None
        self._is_read = False
        self._digests: dict[frozenset[type], str] = {}
        """Of classes of objects that are passed, what they are."""
        self._waiting: dict[str, list[StoredGraph]] = {}
        self._encoded: dict[int, tuple[CapturedGraph, StoredGraph]] = {}
        self._in_file: set[Identity] = set()
        """Those that were found in the graph file."""
        self._filed: dict[int, CapturedGraph] = {}
        """By id, the graphs that the graph file has, or that were to be written to it."""
        self.rows: list[Row] = []
        """Measurements that came with the graphs."""
        self.tuned: set[Tuned] = set()
        """Where their programs were tuned."""
        self.load_s = 0.0
        """Seconds spent finding and reading stored graphs."""

    @property
    def _is_on(self) -> bool:
        return self._options.cache or self._options.graph_file is not None

    def description(self) -> Description:
        """What graphs of the module depend on, as it is when this is first asked for.

        Raises:
            ArtifactError: It cannot be written down.
        """
        if self._description is None:
            self._description = self._described()
        return self._description

    def surroundings(self, passed: Set[type] = frozenset()) -> Surroundings:
        """What the code of the module finds outside of it, and in classes of objects that are passed to it."""
        with contextlib.suppress(ArtifactError):
            found = self.description().surroundings
            assert found is not None, "it was made here"
            if found.classes >= passed:
                return found
            description = self._described(frozenset(passed))
            self._digests[frozenset(passed)] = description.digest
            found = description.surroundings
            assert found is not None, "it was made here"
            return found
        return surroundings(self.root, self._forward, passed)

    def _described(self, passed: frozenset[type] = frozenset()) -> Description:
        """What graphs of the module depend on, with classes of objects that are passed to it.

        Raises:
            ArtifactError: It cannot be written down.
        """
        try:
            return describe(self.root, self._forward, self._options.dynamic, self.inputs, passed)
        except UNDESCRIBED as error:
            if is_interrupt(error):
                raise
            raise ArtifactError(f"the module cannot be described: {type(error).__name__}: {error}") from error

    def _key(self, call_key: tuple[Any, ...]) -> str:
        """The structure of calls as text. A file is found before anything is passed, so that what classes of objects are in
        which its graphs' code finds something is said here.

        Raises:
            UnstorableError: Something in it has no name, or cannot be described.
        """
        text, passed = encode_call_key(call_key), classes_of(call_key)
        here = self.description().surroundings
        if here is None or here.classes >= passed:
            return text
        if passed not in self._digests:
            try:
                self._digests[passed] = self._described(passed).digest
            except ArtifactError as error:
                raise UnstorableError(str(error)) from None
        return f"{text} {self._digests[passed]}"

    def take(self, call: Call) -> list[tuple[CapturedGraph, Body]]:
        """The stored graphs for calls of this structure that were not taken before, ready to be compiled."""
        if not self._is_read:
            # What an interrupt comes in the middle of is done again.
            if self._is_on:
                start = time.perf_counter()
                self._read_all()
                self.load_s += time.perf_counter() - start
            self._is_read = True
        if not self._waiting:
            return []
        try:
            key = self._key(call.key)
        except UnstorableError:
            return []
        waiting = self._waiting.get(key, ())
        start = time.perf_counter()
        taken = []
        for stored in waiting:
            if stored.is_staged and self._options.strict:
                continue
            try:
                graph, body = stored.decode()
            except ArtifactError as error:
                complain(f"a stored graph is not used: {error}")
                continue
            if takes(graph, call):
                restore_key(graph, call.key)
                self._encoded[id(graph)] = (graph, stored)
                if stored.identity in self._in_file:
                    self._filed[id(graph)] = graph
                taken.append((graph, body))
        self._waiting.pop(key, None)
        self.load_s += time.perf_counter() - start
        return taken

    def add(self, artifact: Artifact) -> None:
        """Makes the graphs of an artifact, of this module, available to :meth:`take`."""
        for stored in artifact.graphs:
            self._waiting.setdefault(stored.key, []).append(stored)
        self.rows = merge_rows(self.rows, artifact.rows)
        self.tuned.update(artifact.tuned)

    def forget(self, graph: CapturedGraph) -> None:
        """Lets go of a graph; files keep it."""
        self._encoded.pop(id(graph), None)
        self._filed.pop(id(graph), None)

    def has_filed(self, graph: CapturedGraph) -> bool:
        """Whether nothing is left to do for a graph to be in the graph file: it is there, was to be written, or there is no
        such file."""
        return self._options.graph_file is None or id(graph) in self._filed

    def remember(self, compiled: Sequence[_Compiled]) -> None:
        """Stores graphs in the cache and the graph file, as far as they are not there already."""
        if self._options.graph_file is not None:
            # Also where that fails, which is said once: not at each further size.
            self._filed.update((id(item.graph), item.graph) for item in compiled)
        if not self._is_on or self._reason is not None:
            return
        try:
            artifact = self.artifact(compiled)
        except ArtifactError:
            # Nothing is lost but time at the next start, of which nobody needs to hear at every one.
            return
        for path in self._paths():
            # A full disk is one problem, of however many files, as is a lock that somebody keeps.
            folder = os.path.dirname(path)
            place = folder if folder == graphs_folder() else path
            try:
                update(path, artifact, 0.0 if time.monotonic() < _closed.get(place, 0.0) else _PATIENCE_SECONDS)
            except Error as error:
                _closed[place] = time.monotonic() + _CLOSED_SECONDS
                complain(f"compiled graphs are not kept: {error}", place)

    def artifact(self, compiled: Sequence[_Compiled]) -> Artifact:
        """An artifact with these graphs.

        Raises:
            ArtifactError: None of them can be stored.
        """
        artifact = Artifact(type(self._module).__name__, self.description())
        reason = "nothing is compiled yet"
        for item in compiled:
            graph, stored = self._encoded.get(id(item.graph), (item.graph, None))
            try:
                if stored is None:
                    fresh = StoredGraph.of(graph, item.body, self._key(graph.call_key))
                else:
                    fresh = stored.extended(graph, item.body)
            except UnstorableError as error:
                reason = str(error)
                continue
            self._encoded[id(graph)] = (graph, fresh)
            artifact.add(fresh)
            artifact.rows = merge_rows(artifact.rows, item.rows)
            artifact.tuned = sorted({*artifact.tuned, *item.tuned})
        if not artifact.graphs:
            raise ArtifactError(f"{artifact.name} cannot be saved: {reason}")
        return artifact

    def _paths(self) -> list[str]:
        paths = [] if self._options.graph_file is None else [self._options.graph_file]
        folder = graphs_folder()
        if self._options.cache and folder is not None:
            paths.append(os.path.join(folder, self.description().digest + _SUFFIX))
        return paths

    def _read_all(self) -> None:
        try:
            paths = self._paths()
            here = self.description()
        except ArtifactError as error:
            self._reason = str(error)
            return
        seen: set[Identity] = set()
        found = []
        for path in paths:
            if not os.path.exists(path):
                continue
            try:
                artifact = read_artifact(path)
                artifact.require(here, path)
            except ArtifactError as error:
                if not os.path.exists(path):
                    # Somebody cleared the cache meanwhile.
                    continue
                complain(f"{error}; it is made anew")
                continue
            artifact.graphs = [g for g in artifact.graphs if g.identity not in seen]
            seen.update(g.identity for g in artifact.graphs)
            if path == self._options.graph_file:
                self._in_file.update(g.identity for g in artifact.graphs)
            found.append(artifact)
            with contextlib.suppress(OSError):
                os.utime(path)
        for artifact in found:
            self.add(artifact)


_closed: dict[str, float] = {}
"""Files and folders that could not be written, and until when nobody waits for them again: whoever keeps a lock would be
waited for by each module of the process."""


def update(path: str, artifact: Artifact, patience_s: float = _PATIENCE_SECONDS) -> None:
    """Adds what an artifact has to the file at ``path``, which another process may be extending too: that is waited for.

    Raises:
        CacheError: The file cannot be locked or written.
    """
    folder = os.path.dirname(path) or "."
    try:
        with _native.FileLock(os.path.join(folder, LOCK), patience_s):
            data = _native.read_file(path)
            merged = artifact
            if data is not None:
                with contextlib.suppress(ArtifactError):
                    held = Artifact.from_bytes(data)
                    if held.description.digest == artifact.description.digest:
                        held.merge(artifact)
                        merged = held
            fresh = merged.to_bytes()
            if fresh != data:
                _native.write_file(path, fresh)
                if folder == graphs_folder():
                    tidy(folder)
    except _native.NativeError as error:
        translated = from_native(error)
        raise translated if isinstance(translated, CacheError) else CacheError(str(translated)) from error


def tidy(folder: str) -> None:
    """Removes what killed writers left, and the oldest graphs above a bound."""
    _native.sweep_folder(folder)
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            # Some may go while they are listed.
            with contextlib.suppress(OSError):
                if entry.name.endswith(_SUFFIX):
                    state = entry.stat()
                    found.append((state.st_mtime, state.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MAX_FOLDER_BYTES:
            break
        with contextlib.suppress(OSError):
            os.remove(path)
        total -= size


def save(path: str | PathLike[str], artifact: Artifact) -> None:
    """Writes an artifact to a file of the user's, replacing what is there.

    Raises:
        CacheError: The file cannot be written.
    """
    try:
        _native.write_file(fspath(path), artifact.to_bytes())
    except _native.NativeError as error:
        raise from_native(error) from error
