"""A captured graph cut at the ops that the compiler does not know.

Such ops run in eager PyTorch, at every size the graph serves; what lies between them becomes graphs of their own.
Stages run in order; a stage is a graph for the compiler, then the eager ops that wait for it. A node's stage is the
number of eager ops' layers before it, so every edge points from a stage to the same or a later one, and within a stage
from the graph to the eager ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .dim import Dim
from .graph import CapturedGraph, GraphInput, Node, OutputLeaf, OutputSpec, Ref, draws, number_at, operands
from .lowering import LoweredGraph, Lowering
from .signature import Number, memory_orders
from .weights import FLOAT8

if TYPE_CHECKING:
    from .._native import GraphBuilder

__all__ = ["IN_MEMORY", "EagerOp", "Stage", "cut", "run_op", "sources_of"]

IN_MEMORY = frozenset((torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype))
"""Ops the results of which depend on how their operand lies in memory."""
_VIEWS = frozenset(
    getattr(torch.ops.aten, name) for name in ("alias", "permute", "select", "slice", "t", "transpose", "unsqueeze")
)
"""Ops that are views of any tensor, however it lies."""
_SOURCES = ("input", "weight", "constant", "extern")


@dataclass(frozen=True)
class EagerOp:
    """An op that runs in eager PyTorch.

    Attributes:
        node: The op, its operands by value number.
        error: Why the compiler does not take it.
    """

    node: Node
    error: UnsupportedError

    def run(self, values: dict[int, Tensor], point: Mapping[str, Number], device: torch.device | None = None) -> None:
        """Runs it, reading and writing tensors by value number.

        Args:
            values: The tensors.
            point: The sizes of the call.
            device: Where an op that reads no tensor makes its result, if not on the CPU.
        """
        run_op(self.node, values, point, device)


def run_op(
    node: Node, values: dict[int, Tensor], point: Mapping[str, Number], device: torch.device | None = None
) -> None:
    """Runs an op in eager PyTorch; see :meth:`EagerOp.run`."""
    kwargs = {name: _concrete(value, values, point) for name, value in node.kwargs.items()}
    args = [_concrete(argument, values, point) for argument in node.args]
    if node.op in IN_MEMORY:
        # As it was when the graph was captured.
        args[0] = args[0].contiguous()
    if device is not None and next(operands(node), None) is None:
        if any(argument.name == "device" for argument in node.op._schema.arguments):
            kwargs["device"] = device
    result = node.op(*args, **kwargs)
    results = (result,) if isinstance(result, Tensor) else result
    values.update(zip(node.outputs, results, strict=True))


@dataclass(frozen=True)
class Stage:
    """A graph for the compiler, and the eager ops after it.

    Attributes:
        part: The graph, and the same for the compiler; ``None`` if nothing but eager ops is left to do.
        inputs: The values that the graph takes, in the order of its inputs.
        outputs: The values that it makes for others.
        eager: The ops, in an order in which they can run.
        dead: Values that nobody needs after this stage.
    """

    part: tuple[CapturedGraph, LoweredGraph] | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    eager: tuple[EagerOp, ...]
    dead: tuple[int, ...]


def cut(graph: CapturedGraph, make_builder: Callable[[], GraphBuilder]) -> list[Stage]:
    """The stages of a graph with ops that the compiler does not know.

    Args:
        graph: The graph.
        make_builder: Makes an empty builder.

    Raises:
        UnsupportedError: Nothing would be left for the compiler.
    """
    errors = _unknown(graph, make_builder())
    _leave_views(graph, errors)
    _keep_foreign_inside(graph, errors)
    levels = _levels(graph, errors)
    needed = {leaf.value for leaf in graph.outputs.leaves if leaf.value is not None}
    last_use = dict.fromkeys(needed, max(levels.values(), default=0) + 1)
    for index, level in levels.items():
        for value in operands(graph.nodes[index]):
            last_use[value] = max(last_use.get(value, 0), level)
    stages = []
    for level in range(max(levels.values(), default=0) + 1):
        mine = [i for i, at in levels.items() if at == level]
        inside = [i for i in mine if i not in errors]
        eager = [EagerOp(graph.nodes[i], errors[i]) for i in mine if i in errors]
        made = {value for i in inside for value in graph.nodes[i].outputs}
        read = {value for op in eager for value in operands(op.node)}
        outputs = tuple(v for v in sorted(made) if v in read or v in needed or last_use.get(v, 0) > level)
        dead = tuple(value for value, at in last_use.items() if at == level)
        if outputs:
            part, inputs = _part(graph, level, inside, outputs)
            lowered = Lowering(part, make_builder(), _orders(graph, inputs), _first_number(graph)).run()
            stages.append(Stage((part, lowered), inputs, outputs, tuple(eager), dead))
        elif eager:
            stages.append(Stage(None, (), (), tuple(eager), dead))
    if all(stage.part is None for stage in stages):
        what = "complex numbers, floats of 8 bits, or nothing but what it is given"
        nothing = UnsupportedError(f"it gives {what}: no program does that")
        raise next(iter(errors.values()), nothing)
    return stages


def sources_of(graph: CapturedGraph, stages: Sequence[Stage]) -> dict[int, Node]:
    """The weights and constants that eager ops read or the graph returns, which no program makes, by value number."""
    read = {value for stage in stages for op in stage.eager for value in operands(op.node)}
    read |= {leaf.value for leaf in graph.outputs.leaves if leaf.value is not None}
    found = ((value, graph.nodes[graph.values[value].node]) for value in sorted(read))
    return {value: node for value, node in found if node.op in _SOURCES and node.op != "input"}


def _unknown(graph: CapturedGraph, builder: GraphBuilder) -> dict[int, UnsupportedError]:
    """The nodes that cannot be lowered, and why."""
    errors: dict[int, UnsupportedError] = {}

    def note(index: int, error: UnsupportedError) -> None:
        errors[index] = error

    Lowering(graph, builder, on_error=note).run()
    return errors


def _readers(graph: CapturedGraph) -> dict[int, list[int]]:
    """The nodes that read each value."""
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for value in operands(node):
            readers.setdefault(value, []).append(index)
    return readers


def _leave_views(graph: CapturedGraph, errors: dict[int, UnsupportedError]) -> None:
    """Gives to eager PyTorch, too, views of weights that nothing else reads: a program would copy them in each call."""
    readers = _readers(graph)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if index in errors or getattr(node.op, "overloadpacket", None) not in _VIEWS:
            continue
        maker = graph.nodes[graph.values[next(operands(node))].node]
        while getattr(maker.op, "overloadpacket", None) in _VIEWS:
            maker = graph.nodes[graph.values[next(operands(maker))].node]
        mine = [reader for value in node.outputs for reader in readers.get(value, ())]
        if maker.op in ("weight", "extern") and mine and all(reader in errors for reader in mine):
            errors[index] = errors[mine[0]]


def _keep_foreign_inside(graph: CapturedGraph, errors: dict[int, UnsupportedError]) -> None:
    """Gives to eager PyTorch, too, what would take numbers that programs do not have from one part to another: complex ones
    and floats of 8 bits."""
    returned = {leaf.value for leaf in graph.outputs.leaves if leaf.value is not None}
    readers = _readers(graph)
    foreign = [v for v, meta in enumerate(graph.values) if meta.dtype.is_complex or meta.dtype in FLOAT8]
    count = -1
    while count < len(errors):
        count, levels = len(errors), _levels(graph, errors)
        for value in foreign:
            maker = graph.values[value].node
            if maker not in levels:
                continue
            mine = readers.get(value, ())
            if maker in errors:
                leaving, reason = [i for i in mine if i not in errors], errors[maker]
            else:
                # An op that the compiler does not know is why what it reads is made beside it.
                reason = next(
                    (errors[i] for i in mine if i in errors),
                    _leaves_part(graph.nodes[maker], graph.values[value].dtype),
                )
                is_apart = any(i in errors or levels[i] != levels[maker] for i in mine)
                leaving = [maker] if is_apart or value in returned else []
            errors.update(dict.fromkeys(leaving, reason))


def _leaves_part(node: Node, dtype: torch.dtype) -> UnsupportedError:
    kind = "floats of 8 bits" if dtype in FLOAT8 else "complex numbers"
    what = f"{node.op}: {kind} leave what is compiled, and programs neither take nor give any"
    return UnsupportedError(f"{node.path}: {what}" if node.path else what, module=node.path, op=str(node.op))


def _levels(graph: CapturedGraph, errors: Mapping[int, UnsupportedError]) -> dict[int, int]:
    """The stage of every node but the sources, which every stage has for itself. Of ops that draw random numbers none comes
    before one that it is after in the graph."""
    levels: dict[int, int] = {}
    drawn = 0
    for index, node in enumerate(graph.nodes):
        if node.op in _SOURCES:
            continue
        level = 0
        for value in operands(node):
            maker = graph.values[value].node
            if maker in levels:
                level = max(level, levels[maker] + (maker in errors and index not in errors))
        if draws(node.op):
            level = drawn = max(level, drawn)
        levels[index] = level
    return levels


def _part(
    graph: CapturedGraph, level: int, inside: Sequence[int], outputs: Sequence[int]
) -> tuple[CapturedGraph, tuple[int, ...]]:
    """The graph of some nodes, and the values it takes from outside."""
    members = set(inside)
    inputs: list[int] = []
    sources: dict[int, Node] = {}
    for index in inside:
        for value in operands(graph.nodes[index]):
            maker = graph.values[value].node
            if maker in members or value in sources:
                continue
            node = graph.nodes[maker]
            if isinstance(node.op, str) and node.op != "input":
                sources[value] = node
            else:
                inputs.append(value)
                sources[value] = Node("input", (), {}, (value,), node.path)
    labels = {item.value: item.label for item in graph.inputs}
    nodes = [*(sources[v] for v in inputs), *(n for v, n in sources.items() if v not in inputs)]
    part = dataclasses.replace(
        graph,
        key=("stage", level, graph.key),
        inputs=[GraphInput(labels.get(value, f"value{value}"), value) for value in inputs],
        nodes=[*nodes, *(graph.nodes[i] for i in inside)],
        outputs=OutputSpec(tuple(OutputLeaf(value) for value in outputs), graph.outputs.spec),
    )
    return part, tuple(inputs)


def _orders(graph: CapturedGraph, inputs: Sequence[int]) -> list[tuple[int, ...] | None]:
    """The memory orders of a part's inputs: those of the call's tensors, row-major for what another stage made."""
    orders = dict(zip((item.value for item in graph.inputs), memory_orders(graph.key), strict=True))
    return [orders.get(value) for value in inputs]


def _first_number(graph: CapturedGraph) -> int:
    return sum(len(graph.values[item.value].shape) for item in graph.inputs)


def _concrete(argument: Any, values: Mapping[int, Tensor], point: Mapping[str, Number]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.value]
    if isinstance(argument, tuple):
        return [_concrete(item, values, point) for item in argument]
    return number_at(argument, point) if isinstance(argument, Dim) else argument
