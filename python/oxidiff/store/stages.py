"""Captured graphs some ops of which run eager, as plain data and back.

Such a graph is stored as the programs between its eager ops, and these ops by name. A name is looked up among the ops
that this process has (:func:`~oxidiff.store.encode.find_op`), and what every step reads is checked to be there before
anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch._ops import OpOverload

from ..capture import CapturedGraph, WeightSlot
from ..capture.dim import Dim
from ..capture.graph import GraphInput, Node, OutputLeaf, OutputSpec
from ..capture.stages import EagerOp, Stage, sources_of
from ..errors import UnsupportedError
from .encode import (
    UnstorableError,
    as_integer,
    as_text,
    check,
    decode_argument,
    decode_calls,
    decode_literal,
    decode_program,
    decode_slot,
    decode_value,
    decoding,
    encode_argument,
    encode_calls,
    encode_literal,
    encode_program,
    encode_slot,
    encode_value,
    find_op,
)

__all__ = ["SEPARATOR", "decode_stages", "encode_stages", "programs_text"]

SEPARATOR = "// stage\n"
"""Between the programs of one graph."""
_MAX_DEPTH = 8
_SOURCES = ("weight", "constant")

Data = Any


def programs_text(stages: Sequence[Stage]) -> str:
    """The programs of a graph, one behind the other."""
    return SEPARATOR.join("" if stage.part is None else stage.part[1].builder.text() for stage in stages)


class _Numbers(dict[int, int]):
    """Values by number, in the order in which they are first asked for."""

    def __missing__(self, value: int) -> int:
        self[value] = len(self)
        return self[value]


def encode_stages(graph: CapturedGraph, stages: Sequence[Stage]) -> dict[str, Data]:
    """How a graph runs in stages; not their programs.

    Raises:
        UnstorableError: It has something that cannot be written down.
    """
    results = [leaf.value for leaf in graph.outputs.leaves if leaf.value is not None]
    number = _Numbers()

    def numbers(values: Iterable[int]) -> list[int]:
        return [number[value] for value in values]

    data = {
        **encode_calls(graph),
        "input_values": numbers(item.value for item in graph.inputs),
        "sources": [[*numbers([v]), *_encode_source(graph, node)] for v, node in sources_of(graph, stages).items()],
        "stages": [
            {
                "program": None if stage.part is None else encode_program(stage.part[1]),
                "inputs": numbers(stage.inputs),
                "outputs": numbers(stage.outputs),
                "eager": [_encode_eager(op, number) for op in stage.eager],
                # Of what no stage made there is nothing to let go.
                "dead": [number[value] for value in stage.dead if value in number],
            }
            for stage in stages
        ],
        "result_values": numbers(results),
    }
    return {**data, "values": [encode_value(graph.values[value]) for value in number]}


def _encode_source(graph: CapturedGraph, node: Node) -> list[Data]:
    if node.op == "weight":
        return ["weight", encode_slot(graph.weights[node.args[0]])]
    return ["constant", [encode_literal(element) for element in node.args]]


def _encode_eager(op: EagerOp, number: _Numbers) -> Data:
    node, error = op.node, op.error
    if not isinstance(node.op, OpOverload):
        raise UnstorableError(f"the op {node.op}")

    return {
        "op": str(node.op),
        "args": [encode_argument(value, number) for value in node.args],
        "kwargs": {name: encode_argument(value, number) for name, value in node.kwargs.items()},
        "outputs": [number[value] for value in node.outputs],
        "module": node.path,
        "error": [str(error), error.module, error.op],
    }


def decode_stages(text: str, data: Data, trace: Data) -> tuple[CapturedGraph, list[Stage]]:
    """A graph in stages as this process would have captured it.

    Args:
        text: What :func:`programs_text` gave.
        data: What :func:`encode_stages` gave.
        trace: What :func:`~oxidiff.store.encode.encode_trace` gave.

    Raises:
        ArtifactError: They do not fit each other or make no sense.
    """
    with decoding("a stored graph"):
        return _decode(text.split(SEPARATOR), data, trace)


def _decode(programs: Sequence[str], data: Data, trace: Data) -> tuple[CapturedGraph, list[Stage]]:
    graph = decode_calls(data, trace)
    names = set(graph.plan.names())
    # The first node stands for whatever has none of its own.
    graph.nodes = [Node("input", (), {}, (), "")]
    nodes = {as_integer(source[0]): i for i, source in enumerate(data["sources"], 1)}
    graph.values = [decode_value(item, names, nodes.get(i, 0)) for i, item in enumerate(data["values"])]
    places = [as_integer(value) for value in data["input_values"]]
    graph.inputs = [dataclasses.replace(item, value=v) for item, v in zip(graph.inputs, places, strict=True)]
    slots: dict[str, WeightSlot] = {}
    for value, kind, content in data["sources"]:
        graph.nodes.append(_decode_source(value, kind, content, slots, names))
        check(not any(isinstance(size, Dim) for size in graph.values[value].shape), "a weight without a fixed size")
    results = iter([as_integer(value) for value in data["result_values"]])
    leaves = tuple(
        leaf if leaf.value is None else dataclasses.replace(leaf, value=next(results)) for leaf in graph.outputs.leaves
    )
    check(next(results, None) is None, "results that do not fit their structure")
    graph.outputs = dataclasses.replace(graph.outputs, leaves=leaves)
    _check_order(graph, data)
    stages = []
    for level, (stage, program) in enumerate(zip(data["stages"], programs, strict=True)):
        part = None
        if stage["program"] is not None:
            inner = _part(graph, level, stage)
            part = inner, decode_program(program, stage["program"], inner, _first_number(graph))
            slots.update((slot.name, slot) for slot in part[1].weights)
        eager = tuple(_decode_eager(item, names) for item in stage["eager"])
        stages.append(Stage(part, tuple(stage["inputs"]), tuple(stage["outputs"]), eager, tuple(stage["dead"])))
    graph.weights.update(slots)
    return graph, stages


def _decode_source(value: int, kind: str, content: Data, slots: dict[str, WeightSlot], names: Set[str]) -> Node:
    check(kind in _SOURCES, f"a tensor of kind {kind!r}")
    if kind == "weight":
        slot = decode_slot(content)
        slots[slot.name] = slot
        return Node("weight", (slot.name,), {}, (value,), "")
    elements = tuple(_element(item, names) for item in content)
    check(all(isinstance(e, int | float | Dim) for e in elements), "an element that is no number")
    return Node("constant", elements, {}, (value,), "")


def _part(graph: CapturedGraph, level: int, stage: Mapping[str, Data]) -> CapturedGraph:
    """The graph of one stage, as far as its program needs it."""
    labels = {item.value: item.label for item in graph.inputs}
    inputs = [GraphInput(labels.get(value, f"value{value}"), value) for value in stage["inputs"]]
    leaves = tuple(OutputLeaf(value) for value in stage["outputs"])
    outputs = OutputSpec(leaves, graph.outputs.spec)
    return dataclasses.replace(graph, key=("stage", level), inputs=inputs, nodes=[], outputs=outputs)


def _first_number(graph: CapturedGraph) -> int:
    return sum(len(graph.values[item.value].shape) for item in graph.inputs)


class _Any(dict[int, int]):
    """Values that keep their numbers; whether they are there is seen before."""

    def __contains__(self, value: object) -> bool:
        return True

    def __missing__(self, value: int) -> int:
        return value


_ANY = _Any()


def _decode_eager(data: Data, names: Set[str]) -> EagerOp:
    op = find_op(as_text(data["op"]))
    args = tuple(decode_argument(item, names, _ANY) for item in data["args"])
    kwargs = {as_text(name): decode_argument(item, names, _ANY) for name, item in data["kwargs"].items()}
    node = Node(op, args, kwargs, tuple(data["outputs"]), as_text(data["module"]))
    message, module, name = map(as_text, data["error"])
    return EagerOp(node, UnsupportedError(message, module=module, op=name))


def _element(data: Data, names: Set[str]) -> Any:
    found = decode_literal(data)
    check(not isinstance(found, Dim) or found.symbols() <= names, "a number over unknown symbols")
    return found


def _check_order(graph: CapturedGraph, data: Data) -> None:
    """Every step reads what was there before it, and what is returned is there in the end."""
    count = len(graph.values)

    def known(values: Iterable[Any]) -> set[int]:
        found = [as_integer(value) for value in values]
        check(all(0 <= value < count for value in found), "a value that does not exist")
        return set(found)

    here = known(item.value for item in graph.inputs) | known(source[0] for source in data["sources"])
    for stage in data["stages"]:
        check(known(stage["inputs"]) <= here, "a stage that reads what is not there")
        here |= known(stage["outputs"])
        for item in stage["eager"]:
            read = known(_references([*item["args"], *item["kwargs"].values()]))
            check(read <= here, "an op that reads what is not there")
            here |= known(item["outputs"])
        here -= known(stage["dead"])
    check(
        known(leaf.value for leaf in graph.outputs.leaves if leaf.value is not None) <= here, "a result that is missing"
    )


def _references(items: Sequence[Data], depth: int = 0) -> Iterable[Data]:
    check(depth < _MAX_DEPTH, "arguments nest too deeply")
    for item in items:
        if isinstance(item, list):
            yield from _references(item, depth + 1)
        elif isinstance(item, dict) and "value" in item:
            yield item["value"]
