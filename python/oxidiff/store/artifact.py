"""Saved programs: a description of what they were captured from, and one graph per call structure.

The file format is in ``src/store/artifact.rs``. An artifact has no weights, no pickle and no machine code: the graph is
parsed, verified and compiled for the device at hand, which takes less time than reading machine code safely would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from .. import _native
from ..capture import CapturedGraph
from ..capture.lowering import LoweredGraph
from ..capture.stages import Stage
from ..errors import ArtifactError, from_native
from .describe import Description
from .encode import (
    as_number,
    decode_graph,
    decoding,
    encode_call_key,
    encode_graph,
    encode_trace,
    merge_classes,
    to_bytes,
    to_data,
)
from .reads import decode_reads, encode_reads
from .stages import decode_stages, encode_stages, programs_text

__all__ = ["Artifact", "Body", "Identity", "Row", "StoredGraph", "Tuned", "as_row", "merge_rows", "read_artifact"]

Row = tuple[str, str, str, str, str, float, float, int, int]
"""A row of the tuning database: see ``_native.TuningDatabase``."""

Tuned = tuple[str, str, str, tuple[int, ...]]
"""Where a program was tuned: its hash, the device and the library as in a row, its sizes."""

Body = LoweredGraph | Sequence[Stage]
"""What runs a graph: one program, or programs and eager ops in turn."""

Identity = tuple[str, str, bytes]
"""Equal for two captures of one graph: see :attr:`StoredGraph.identity`."""

MAX_GRAPHS = 16
"""Most graphs of one artifact: a module with more call structures than this captures the others anew."""
MAX_ROWS = 10_000
"""Most tuning choices of one artifact."""
MAX_TUNED = 1000
"""Most sizes of one artifact at which its programs are known to be tuned."""


class StoredGraph:
    """One captured graph as it is stored.

    Attributes:
        key: The structure of the calls it serves.
        program: The compiler's graph as text, or those of its stages.
        call: See :func:`~oxidiff.store.encode.encode_graph` and :func:`~oxidiff.store.stages.encode_stages`.
        trace: See :func:`~oxidiff.store.encode.encode_trace`; as JSON.
    """

    def __init__(self, key: str, program: str, call: Any, trace: bytes) -> None:
        self.key = key
        self.program = program
        self.call = call
        self.trace = trace

    @classmethod
    def of(cls, graph: CapturedGraph, body: Body, key: str | None = None) -> StoredGraph:
        """The stored form of a graph, with the program that it is or the stages in which it runs.

        Args:
            graph: The graph.
            body: The program or the stages.
            key: The structure of its calls as text, if that says more than the graph's own.

        Raises:
            UnstorableError: It has something that has no meaning in another process.
        """
        key = encode_call_key(graph.call_key) if key is None else key
        program = body.builder.text() if isinstance(body, LoweredGraph) else programs_text(body)
        return cls(key, program, _encoded(graph, body), to_bytes(encode_trace(graph)))

    def extended(self, graph: CapturedGraph, body: Body) -> StoredGraph:
        """The stored form of the same graph, which was found right for more sizes since."""
        return StoredGraph(self.key, self.program, _encoded(graph, body), self.trace)

    @property
    def is_staged(self) -> bool:
        """Whether some of its ops run eager."""
        return "stages" in self.call

    def decode(self) -> tuple[CapturedGraph, Body]:
        """The graph as this process would have captured it; its key is still to be set, by
        :func:`~oxidiff.store.reads.restore_key`.

        Raises:
            ArtifactError: It is malformed.
        """
        found: tuple[CapturedGraph, Body]
        if self.is_staged:
            found = decode_stages(self.program, self.call, to_data(self.trace))
        else:
            found = decode_graph(self.program, self.call, to_data(self.trace))
        if "reads" in self.call:
            decode_reads(found[0], self.call)
        return found

    @property
    def identity(self) -> Identity:
        """Equal for two captures of one graph."""
        return self.key, self.program, to_bytes([self.call.get(name) for name in _IDENTITY])


_IDENTITY = ("sizes", "rounded", "areas", "counted", "computed", "reads", "tail")
"""What a program's symbols and arguments are."""


def _encoded(graph: CapturedGraph, body: Body) -> Any:
    data = encode_graph(graph, body) if isinstance(body, LoweredGraph) else encode_stages(graph, body)
    if graph.reads:
        data = {**data, **encode_reads(graph)}
    return to_data(to_bytes(data))


class Artifact:
    """What one file holds.

    Attributes:
        name: The class of the module.
        description: What the graphs depend on.
        graphs: The graphs, the newest last.
        rows: The measurements behind their tuning choices.
        tuned: Where their programs were tuned, whether or not there was a choice to make.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        graphs: Sequence[StoredGraph] = (),
        rows: Sequence[Row] = (),
        tuned: Sequence[Tuned] = (),
    ) -> None:
        self.name = name
        self.description = description
        self.graphs = list(graphs)
        self.rows = list(rows)
        self.tuned = list(tuned)

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the numbers in the module's attributes that are arguments of its graphs."""
        return frozenset(self.description.lines.get("inputs", ()))

    def add(self, graph: StoredGraph) -> None:
        """Adds a graph, or what is new about one that is there already; the oldest makes room."""
        for held in self.graphs:
            if held.identity == graph.identity:
                held.call = merge_classes(held.call, graph.call)
                return
        self.graphs = [*self.graphs[-(MAX_GRAPHS - 1) :], graph]

    def merge(self, other: Artifact) -> None:
        """Adds what another artifact, of the same description, has."""
        for graph in other.graphs:
            self.add(graph)
        self.rows = merge_rows(self.rows, other.rows)
        self.tuned = sorted({*self.tuned, *other.tuned})

    def to_bytes(self) -> bytes:
        """The file.

        Raises:
            ArtifactError: It would be too large to be read again.
        """
        about = {"name": self.name, "digest": self.description.digest, "graphs": [g.key for g in self.graphs]}
        sections = [("about", to_bytes(about)), ("description", to_bytes(self.description.lines))]
        sections.append(("choices", to_bytes(self.rows[:MAX_ROWS])))
        sections.append(("tuned", to_bytes(self.tuned[:MAX_TUNED])))
        for i, graph in enumerate(self.graphs):
            sections.append((f"{i}.program", graph.program.encode("utf-8", "surrogatepass")))
            sections.append((f"{i}.call", to_bytes(graph.call)))
            sections.append((f"{i}.trace", graph.trace))
        try:
            return _native.encode_artifact(sections)
        except _native.NativeError as error:
            raise from_native(error) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """The content of a file.

        Raises:
            ArtifactError: It is no artifact, of another version, or damaged.
        """
        try:
            sections: Mapping[str, bytes] = _native.decode_artifact(data)
        except _native.NativeError as error:
            raise from_native(error) from error
        with decoding("the artifact"):
            about = to_data(sections["about"])
            lines = to_data(sections["description"])
            texts = (text for rows in lines.values() for item in rows.items() for text in item)
            if not all(type(text) is str for text in texts):
                raise ArtifactError("its description is malformed")
            graphs = [
                StoredGraph(
                    str(key),
                    sections[f"{i}.program"].decode("utf-8", "surrogatepass"),
                    to_data(sections[f"{i}.call"]),
                    sections[f"{i}.trace"],
                )
                for i, key in enumerate(about["graphs"][:MAX_GRAPHS])
            ]
            if not all(type(graph.call) is dict for graph in graphs):
                raise ArtifactError("how it is called is malformed")
            rows = [as_row(row) for row in to_data(sections.get("choices", b"[]"))[:MAX_ROWS]]
            tuned = [_as_tuned(item) for item in to_data(sections.get("tuned", b"[]"))[:MAX_TUNED]]
            return cls(str(about["name"]), Description(lines), graphs, rows, tuned)

    def require(self, here: Description, path: str) -> None:
        """Raises an :class:`ArtifactError` that says how a module differs from the one that was saved."""
        differences = here.differences(self.description)
        if differences:
            some = "; ".join(differences[:5])
            more = f"; and {len(differences) - 5} more differences" if len(differences) > 5 else ""
            raise ArtifactError(f"{path} was saved from another {self.name}: {some}{more}")

    def text(self) -> str:
        """What is in it, for people."""
        lines = [f"{self.name}, {self.description.digest}"]
        lines += [f"  {name} {value}" for name, value in self.description.lines.get("environment", {}).items()]
        counts = {subject: len(rows) for subject, rows in self.description.lines.items()}
        lines.append(
            f"  {counts.get('module', 0)} modules, {counts.get('tensors', 0)} tensors, {counts.get('code', 0)} functions"
        )
        with decoding("the artifact"):
            for i, stored in enumerate(self.graphs):
                call = stored.call
                nodes = stored.program.count("\n%")
                about = f"{len(call['stages'])} stages" if stored.is_staged else f"{len(call['weights'])} weights"
                lines.append(f"  graph {i}: {nodes} nodes, {about}")
                lines += [f"    {label}: {_type_text(item)}" for label, item, *_ in call["inputs"]]
                for name, role, _, _, label in call["symbols"]:
                    low, high = call["box"].get(name, ("any", "any"))
                    lines.append(f"    {name} = {label} ({role}), seen from {low} to {high}")
                lines.append(f"    {len(call['classes'])} classes of sizes verified at {len(call['points'])} points")
        lines += [f"  {len(self.rows)} tuning choices"] if self.rows else []
        return "\n".join(lines)


def as_row(data: Any) -> Row:
    """A row of the tuning database from plain data.

    Raises:
        ArtifactError: It is none.
    """
    kinds = (str, str, str, str, str, float, float, int, int)
    if len(data) != len(kinds) or not all(type(value) is kind for value, kind in zip(data, kinds, strict=True)):
        raise ArtifactError(f"a row of the tuning database is malformed: {data!r:.200}")
    op, bucket, device, library, choice, seconds, default_seconds, workspace, measured = data
    if not (0 < seconds < math.inf and 0 < default_seconds < math.inf and max(workspace, measured) < 1 << 62):
        raise ArtifactError(f"a row of the tuning database has impossible numbers: {data!r:.200}")
    return op, bucket, device, library, choice, seconds, default_seconds, workspace, measured


def _as_tuned(data: Any) -> Tuned:
    program, device, library, sizes = data
    if not all(type(text) is str for text in (program, device, library)) or not all(type(s) is int for s in sizes):
        raise ArtifactError(f"where it was tuned is malformed: {data!r:.200}")
    return program, device, library, tuple(sizes)


def merge_rows(*several: Sequence[Row]) -> list[Row]:
    """Rows of one database: of two measurements of one choice the later."""
    ordered = sorted((row for rows in several for row in rows), key=lambda row: row[8])
    return sorted({row[:4]: row for row in ordered}.values())


def _type_text(item: Any) -> str:
    dtype, shape = item
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(str(as_number(size)) for size in shape)}]"


def read_artifact(path: str | PathLike[str]) -> Artifact:
    """The artifact in a file.

    Raises:
        ArtifactError: There is none, or it is damaged.
    """
    try:
        data = _native.read_file(fspath(path))
    except _native.NativeError as error:
        raise ArtifactError(str(error.args[1])) from error
    if data is None:
        raise ArtifactError(f"there is no file {fspath(path)}")
    try:
        return Artifact.from_bytes(data)
    except ArtifactError as error:
        raise ArtifactError(f"{fspath(path)}: {error}") from error
