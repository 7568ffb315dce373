"""The parts of arguments that a program writes into.

In a graph a write into a part (``cache[:, start:end] = keys``) makes another whole tensor, by ``slice_scatter``. Where
nothing else was written into an argument, that need not leave the program: what was written is the result, and the
caller's tensor gets it at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dim import Dim

if TYPE_CHECKING:
    from .graph import CapturedGraph, Node

__all__ = ["Left", "Step", "narrowed", "placed", "steps_at"]

aten = torch.ops.aten

Step = tuple[Any, ...]
"""A view of a tensor: ``(dim, index)`` selects, ``(dim, start, end, step)`` slices; as in ATen, numbers of a graph."""

_SELECTS = 2


@dataclass(frozen=True, slots=True)
class Left:
    """What a program leaves in a part of a tensor.

    Attributes:
        tensor: It.
        steps: The way from the whole tensor to the part, in numbers.
    """

    tensor: Tensor
    steps: tuple[Step, ...]


def placed(tensor: Any, value: Any) -> tuple[Any, Any]:
    """Where in a tensor a program leaves something, and what: :class:`Left` in a part, all else in the whole."""
    if not isinstance(value, Left):
        return tensor, value
    for step in value.steps:
        tensor = aten.select.int(tensor, *step) if len(step) == _SELECTS else aten.slice.Tensor(tensor, *step)
    return tensor, value.tensor


def steps_at(steps: Iterable[Step], point: Mapping[str, Any]) -> tuple[Step, ...]:
    """The numbers of a way at these sizes and numbers of a call."""
    return tuple(tuple(int(n.exact(point)) if isinstance(n, Dim) else n for n in step) for step in steps)


def narrowed(graph: CapturedGraph, value: int, before: int) -> tuple[int, tuple[Step, ...]]:
    """What was written into an argument, and where.

    Args:
        graph: The graph.
        value: What the argument is at its end.
        before: What it was.

    Returns:
        The value that is written and the way to its place; ``value`` and no way if it is not one place.
    """
    steps: list[Step] = []
    held = {before}
    while (found := _scattered(graph.nodes[graph.values[value].node])) is not None and found[0] in held:
        whole, value, step = found
        steps.append(step)
        # What is written into is a part of this part.
        held = set(_views(graph.nodes, whole, step))
    return value, tuple(steps)


def _scattered(node: Node) -> tuple[int, int, Step] | None:
    """What an op writes into, what, and where; ``None`` of other ops."""
    if node.op is aten.slice_scatter.default:
        x, source, *rest = node.args
        return x.value, source.value, _slice(rest, node.kwargs)
    if node.op is aten.select_scatter.default:
        x, source, dim, index = node.args
        return x.value, source.value, (dim, index)
    return None


def _slice(rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    given: dict[str, Any] = {"dim": 0, "start": None, "end": None, "step": 1}
    return tuple({**given, **dict(zip(given, rest, strict=False)), **kwargs}.values())


def _views(nodes: Iterable[Node], whole: int, step: Step) -> Iterable[int]:
    """The values that are this part of a value."""
    for node in nodes:
        if node.op is aten.slice.Tensor and node.args[0].value == whole:
            made = _slice(node.args[1:], node.kwargs)
        elif node.op is aten.select.int and node.args[0].value == whole:
            made = tuple(node.args[1:])
        else:
            continue
        if made == step:
            yield node.outputs[0]
