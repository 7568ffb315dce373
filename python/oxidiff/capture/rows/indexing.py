"""Ops that choose elements by index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dim import Size, dim_of, dim_or_int
from ..lowering import Lowering, T
from .registry import row


def _index_type(cx: Lowering, index: T) -> T:
    return index if index.dtype in (torch.int32, torch.int64) else cx.convert(index, torch.int64)


def _index_select(cx: Lowering, x: T, dim: int, index: T) -> T:
    shape = [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]]
    return cx.emit("index_select", (x, _index_type(cx, index)), x.dtype, shape, dim=dim)


def _from_start(cx: Lowering, index: T, size: Size) -> T:
    """Negative indices count from the end."""
    index = _index_type(cx, index)
    negative = cx.binary("lt", index, cx.full(0, index.dtype), torch.bool)
    wrapped = cx.binary("add", index, cx.scalar(size, index.dtype), index.dtype)
    return cx.where(negative, wrapped, index, index.dtype)


@row("embedding.default")
def embedding(cx: Lowering, weight: T, index: T, *_: Any) -> T:
    return _index_select(cx, weight, 0, index)


@row("index_select.default")
def index_select(cx: Lowering, x: T, dim: int, index: T) -> T:
    return _index_select(cx, x, dim % x.rank, cx.reshape(index, cx.result()[1][dim % x.rank : dim % x.rank + 1]))


@row("gather.default", "take_along_dim.default")
def gather(cx: Lowering, x: T, first: Any, second: Any, *_: Any) -> T:
    dim, index = (first, second) if isinstance(second, T) else (second, first)
    if dim is None:
        raise cx.unsupported("take_along_dim without a dimension")
    dim, index = dim % x.rank, _index_type(cx, index)
    if "take_along_dim" in str(cx.node.op):
        # Their other dimensions are broadcast.
        shape = cx.result()[1]
        x = cx.expand(x, (*shape[:dim], x.shape[dim], *shape[dim + 1 :]))
        index = cx.expand(index, (*shape[:dim], index.shape[dim], *shape[dim + 1 :]))
    return cx.emit("gather", (x, index), x.dtype, index.shape, dim=dim)


@row("index.Tensor", "_unsafe_index.Tensor")
def index_tensor(cx: Lowering, x: T, indices: Sequence[T | None]) -> T:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise cx.unsupported("a mask as index makes a result whose size depends on data")
    dims = [dim for dim, _ in given]
    first = dims[0]
    if dims != list(range(first, first + len(dims))):
        return _index_apart(cx, x, given)
    # Neighbouring dimensions become one, and their indices one index into it.
    combined = _from_start(cx, given[0][1], x.shape[first])
    size = dim_of(x.shape[first])
    for dim, index in given[1:]:
        scaled = cx.binary("mul", combined, cx.scalar(x.shape[dim], torch.int64), torch.int64)
        combined = cx.binary("add", scaled, _from_start(cx, index, x.shape[dim]), torch.int64)
        size = size * x.shape[dim]
    flat = cx.reshape(x, (*x.shape[:first], dim_or_int(size), *x.shape[dims[-1] + 1 :]))
    return _index_select(cx, flat, first, combined)


def _index_apart(cx: Lowering, x: T, given: Sequence[tuple[int, T]]) -> T:
    """Indices at dimensions that are not neighbours: those dimensions are brought to the front first."""
    dims = [dim for dim, _ in given]
    moved = cx.permute(x, [*dims, *(d for d in range(x.rank) if d not in dims)])
    return index_tensor(cx, moved, [index for _, index in given])


@row("index_put.default")
def index_put(cx: Lowering, x: T, indices: Sequence[T | None], values: T, accumulate: bool = False) -> T:
    masks = [index for index in indices if index is not None]
    if len(masks) == 1 and masks[0].rank == 1 and not accumulate:
        dim = indices.index(masks[0])
        index = cx.known_operand(1, dim)
        if index is not None and index.dtype is not torch.bool and isinstance(x.shape[dim], int):
            return _put_at(cx, x, dim, index, values)
    is_mask = len(masks) == 1 and masks[0].dtype is torch.bool
    rest = x.rank - indices.index(masks[0]) - masks[0].rank
    # What is written may be one for all places, but not one for each: how many those are depends on data.
    if not is_mask or accumulate or any(size != 1 for size in values.shape[: max(values.rank - rest, 0)]):
        raise cx.unsupported(
            "writing by index, other than at places that are the same in every call, or the same wherever a mask holds"
        )
    mask = cx.reshape(masks[0], (*masks[0].shape, *([1] * rest)))
    values = cx.reshape(values, values.shape[max(values.rank - rest, 0) :])
    return cx.where(mask, cx.convert(values, x.dtype), x, x.dtype)


def _put_at(cx: Lowering, x: T, dim: int, index: torch.Tensor, values: T) -> T:
    """Writes along one dimension at places that are known: each place reads from ``values``, or stays what it is."""
    size = cx.static(x.shape[dim], "the size of a dimension that is written to")
    source = torch.zeros(size, dtype=torch.int64)
    is_written = torch.zeros(size, dtype=torch.bool)
    for at, place in enumerate(index.tolist()):
        source[place] = at
        is_written[place] = True
    values = cx.reshape(values, values.shape[max(values.rank - x.rank, 0) :])
    values = cx.expand(cx.convert(values, x.dtype), (*x.shape[:dim], len(index), *x.shape[dim + 1 :]))
    spread = _index_select(cx, values, dim, cx.constant(source.tolist(), torch.int64, (size,)))
    mask_shape = (size, *([1] * (x.rank - dim - 1)))
    mask = cx.constant([float(written) for written in is_written.tolist()], torch.bool, mask_shape)
    return cx.where(mask, spread, x, x.dtype)


def _known_places(cx: Lowering, x: T, dim: int) -> torch.Tensor:
    """The indices of what is written along one dimension."""
    index = cx.known_operand(2)
    size = x.shape[dim] if x.rank else None
    if index is None or index.dim() != 1 or not isinstance(size, int):
        raise cx.unsupported("writing by index, other than at places that are the same in every call")
    if not all(0 <= place < size for place in index.tolist()):
        raise cx.unsupported("an index out of range, or from the end")
    return index


@row("index_copy.default")
def index_copy(cx: Lowering, x: T, dim: int, index: T, source: T) -> T:
    dim %= max(x.rank, 1)
    return _put_at(cx, x, dim, _known_places(cx, x, dim), source)


@row("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(cx: Lowering, x: T, dim: int, index: T, value: Any) -> T:
    dim %= max(x.rank, 1)
    places = set(_known_places(cx, x, dim).tolist())
    size = cx.static(x.shape[dim], "the size of a dimension that is written to")
    shape = (size, *([1] * (x.rank - dim - 1)))
    mask = cx.constant([float(at in places) for at in range(size)], torch.bool, shape)
    return cx.where(mask, cx.convert(cx.scalar(value, x.dtype), x.dtype), x, x.dtype)
