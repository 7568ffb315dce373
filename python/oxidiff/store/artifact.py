"""Saved programs: a description of what they were captured from, and one graph per call structure.

The file format is in ``src/store/artifact.rs``. An artifact has no weights, no pickle and no machine code: the graph is
parsed, verified and compiled for the device at hand, which takes less time than reading machine code safely would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from .. import _native
from ..capture import CapturedGraph
from ..capture.lowering import LoweredGraph
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

__all__ = ["Artifact", "StoredGraph", "read_artifact"]

MAX_GRAPHS = 16
"""Most graphs of one artifact: a module with more call structures than this captures the others anew."""


class StoredGraph:
    """One captured graph as it is stored.

    Attributes:
        key: The structure of the calls it serves.
        program: The compiler's graph as text.
        call: See :func:`~oxidiff.store.encode.encode_graph`.
        trace: See :func:`~oxidiff.store.encode.encode_trace`; as JSON.
    """

    def __init__(self, key: str, program: str, call: Any, trace: bytes) -> None:
        self.key = key
        self.program = program
        self.call = call
        self.trace = trace

    @classmethod
    def of(cls, graph: CapturedGraph, lowered: LoweredGraph) -> StoredGraph:
        """The stored form of a graph.

        Raises:
            UnstorableError: It has something that has no meaning in another process.
        """
        call = to_data(to_bytes(encode_graph(graph, lowered)))
        return cls(encode_call_key(graph.key), lowered.builder.text(), call, to_bytes(encode_trace(graph)))

    def extended(self, graph: CapturedGraph, lowered: LoweredGraph) -> StoredGraph:
        """The stored form of the same graph, which was found right for more sizes since."""
        call = to_data(to_bytes(encode_graph(graph, lowered)))
        return StoredGraph(self.key, self.program, call, self.trace)

    def decode(self) -> tuple[CapturedGraph, LoweredGraph]:
        """The graph as this process would have captured it; its key is still to be set.

        Raises:
            ArtifactError: It is malformed.
        """
        return decode_graph(self.program, self.call, to_data(self.trace))

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for two captures of one graph."""
        return self.key, self.program


class Artifact:
    """What one file holds.

    Attributes:
        name: The class of the module.
        description: What the graphs depend on.
        graphs: The graphs, the newest last.
    """

    def __init__(self, name: str, description: Description, graphs: Sequence[StoredGraph] = ()) -> None:
        self.name = name
        self.description = description
        self.graphs = list(graphs)

    def add(self, graph: StoredGraph) -> None:
        """Adds a graph, or what is new about one that is there already; the oldest makes room."""
        for held in self.graphs:
            if held.identity == graph.identity:
                held.call = merge_classes(held.call, graph.call)
                return
        self.graphs = [*self.graphs[-(MAX_GRAPHS - 1) :], graph]

    def to_bytes(self) -> bytes:
        """The file.

        Raises:
            ArtifactError: It would be too large to be read again.
        """
        about = {"name": self.name, "digest": self.description.digest, "graphs": [g.key for g in self.graphs]}
        sections = [("about", to_bytes(about)), ("description", to_bytes(self.description.lines))]
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
            return cls(str(about["name"]), Description(lines), graphs)

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
                lines.append(f"  graph {i}: {nodes} nodes, {len(call['weights'])} weights")
                lines += [f"    {label}: {_type_text(item)}" for label, item in call["inputs"]]
                for name, role, _, _, label in call["symbols"]:
                    low, high = call["box"].get(name, ("any", "any"))
                    lines.append(f"    {name} = {label} ({role}), seen from {low} to {high}")
                lines.append(f"    {len(call['classes'])} classes of sizes verified at {len(call['points'])} points")
        return "\n".join(lines)


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
