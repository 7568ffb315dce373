"""Tensors in attributes that each ``forward`` sets before it looks at them: a program sets them, too.

A table of a rotary embedding that a module makes anew in every call, and keeps in a buffer, decides nothing of the next one.
What says so is a trace in which a :class:`Hidden` tensor is in the attribute's place, which notes every look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .following import is_tracing, twins_here
from .leftovers import MADE, Change, Content
from .signature import ATTRIBUTES, PLAIN_TENSORS, Place, Written
from .weights import WeightIndex, is_count

__all__ = ["Rewritten", "shared_part"]


class Hidden(Tensor):
    """Stands for the tensor in an attribute while a ``forward`` is traced; for other threads it is that tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if is_tracing() and name not in ("__class__", "__dict__"):
            self.__dict__["is_seen"] = True
        return super().__getattribute__(name)


class Rewritten:
    """The attributes of modules into which a ``forward`` put tensors of its own, and nothing else that it left.

    Args:
        changes: Those attributes.
        ways: For each, what leads to the dictionary that has it, see :data:`~oxidiff.capture.signature.Place`.
    """

    def __init__(self, changes: Sequence[Change], ways: Sequence[tuple[str, ...]]) -> None:
        self._changes = changes
        self._places: tuple[Place, ...] = tuple(
            [(way, change.name, True) for way, change in zip(ways, changes, strict=True)]
        )
        self._hidden: list[Tensor] = []
        self._left: set[tuple[int, Any]] = set()

    @classmethod
    def of(cls, changes: Sequence[Change | Content], weights: WeightIndex) -> Rewritten | None:
        """What a trace left, if it is nothing but tensors in attributes of modules where there were tensors before."""
        found, ways = [], []
        for change in changes:
            if not isinstance(change, Change) or not _is_tensor_for_tensor(change):
                return None
            way = _way_to(change, weights)
            if way is None:
                return None
            found.append(change)
            ways.append(way)
        return cls(found, ways) if found else None

    def hide(self) -> None:
        """Lets the next trace find nothing in the attributes."""
        for change in self._changes:
            self._hidden.append(torch.Tensor._make_subclass(Hidden, change.before.detach()))
            change.table[change.name] = self._hidden[-1]

    def show(self) -> None:
        """Puts the tensors back."""
        for change in self._changes:
            change.undo()

    def added_to(self, result: Any) -> Written:
        """The result of a ``forward`` with what is in the attributes now, which a program gives, too."""
        known = result if isinstance(result, Written) else Written(result, (), ())
        values = [change.table.get(change.name) for change in self._changes]
        return Written(known.result, (*known.places, *self._places), (*known.values, *values))

    def others(self, changes: Sequence[Change | Content]) -> list[Change | Content]:
        """What a trace left but for these."""
        own = {(id(change.table), change.name) for change in self._changes}
        rest = []
        for change in changes:
            at = (id(change.table), change.name) if isinstance(change, Change) else None
            if at is not None and at in own:
                self._left.add(at)
            else:
                rest.append(change)
        return rest

    def is_right(self) -> bool:
        """Whether the trace set every attribute and looked at none before."""
        return len(self._left) == len(self._changes) and not any("is_seen" in one.__dict__ for one in self._hidden)


def shared_part(values: Sequence[Any], others: Sequence[Any]) -> int | None:
    """At the end of a trace: which of these values, that ``forward`` is to find in its next call, shares memory with others,
    with a weight or with another value, and is not the very same tensor; ``None`` if none does. Whoever has the one may
    write into it, which the other would show.

    Args:
        values: The values, tensors or tuples of such.
        others: What a call is given and gives.
    """
    known = {id(tensor) for tensor in others if isinstance(tensor, Tensor)}
    taken = {tensor.untyped_storage()._cdata for tensor in (*others, *twins_here()) if isinstance(tensor, Tensor)}
    alone: list[Tensor] = []
    for i, value in ((i, leaf) for i, kept in enumerate(values) for leaf in tree_leaves(kept)):
        if not isinstance(value, Tensor) or id(value) in known:
            continue
        known.add(id(value))
        if type(value) is not Tensor or not value.is_meta or value.untyped_storage()._cdata in taken:
            return i
        if any(_may_overlap(value, other) for other in alone):
            return i
        alone.append(value)
    return None


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may have a place in common. Parts that were cut out of one, keys and values say, have none."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    if one.stride() != other.stride():
        return True
    counts = map(max, one.shape, other.shape)
    steps = sorted(
        ((stride, count) for stride, count in zip(one.stride(), counts, strict=True) if count > 1), reverse=True
    )
    return _may_meet(abs(int(one.storage_offset() - other.storage_offset())), steps)


def _may_meet(distance: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether two tensors may have a place in common whose first ones are so far apart.

    Args:
        distance: That.
        steps: The stride of each dimension, the largest first, and how many elements there are along it.
    """
    if not steps:
        return distance == 0
    (stride, most), *rest = steps
    if stride <= sum(step * (count - 1) for step, count in rest):
        # Each overlaps itself.
        return True
    down = distance // stride
    return any(count < most and _may_meet(abs(distance - count * stride), rest) for count in (down, down + 1))


def _is_tensor_for_tensor(change: Change) -> bool:
    is_inner = change.is_item or change.is_outside or change.is_sized
    return (
        not is_inner
        and type(change.before) in PLAIN_TENSORS
        and not change.before.requires_grad
        and change.after is MADE
    )


def _way_to(change: Change, weights: WeightIndex) -> tuple[str, ...] | None:
    """The way to the dictionary of a module that has an attribute or a buffer, but for numbers that are constants of
    programs."""
    for path, module in weights.modules:
        if weights.paths.get(id(module)) != path:
            continue
        if change.table is module.__dict__:
            return ATTRIBUTES, path
        if change.table is module._buffers:
            return None if is_count(module, change.name, change.before) else (ATTRIBUTES, path, "_buffers")
    return None
