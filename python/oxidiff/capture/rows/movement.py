"""Ops that move elements: views, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dim import Dim, Size, dim_of, dim_or_int
from ..lowering import Lowering, T, is_double
from .registry import row


@row(
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int", "unsqueeze.default",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "view_as.default", "reshape_as.default", "ravel.default",
    "_reshape_alias.default", "atleast_1d.default", "atleast_2d.default", "atleast_3d.default",
)  # fmt: skip
def reshape(cx: Lowering, x: T, *_: Any) -> T:
    return cx.reshape(x, cx.result()[1])


@row("alias.default", "detach.default", "contiguous.default", "clone.default", "lift_fresh.default")
def same(cx: Lowering, x: T, *_: Any) -> T:
    if cx.result()[0] is not x.dtype:
        raise cx.unsupported("bits are read as another type")
    return x


@row("transpose.int", "swapaxes.default", "swapdims.default")
def transpose(cx: Lowering, x: T, a: int, b: int) -> T:
    return cx.transpose(x, a, b)


@row("numpy_T.default")
def numpy_t(cx: Lowering, x: T) -> T:
    return cx.permute(x, range(x.rank)[::-1])


@row("t.default", "mT.default", "matrix_H.default", "adjoint.default")
def t(cx: Lowering, x: T) -> T:
    return cx.transpose(x, -2, -1) if x.rank >= 2 else x


@row("permute.default")
def permute(cx: Lowering, x: T, dims: Sequence[int]) -> T:
    return cx.permute(x, dims)


@row("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def movedim(cx: Lowering, x: T, source: Any, destination: Any) -> T:
    sources = [d % x.rank for d in ([source] if isinstance(source, int) else source)]
    targets = [d % x.rank for d in ([destination] if isinstance(destination, int) else destination)]
    order: list[int | None] = [None] * x.rank
    for s, d in zip(sources, targets, strict=True):
        order[d] = s
    rest = iter(d for d in range(x.rank) if d not in sources)
    return cx.permute(x, [next(rest) if d is None else d for d in order])


@row("expand.default", "broadcast_to.default", "expand_as.default")
def expand(cx: Lowering, x: T, *_: Any) -> T:
    return cx.expand(x, cx.result()[1])


@row("broadcast_tensors.default")
def broadcast_tensors(cx: Lowering, tensors: Sequence[T]) -> list[T]:
    return [cx.expand(x, cx.result(i)[1]) for i, x in enumerate(tensors)]


@row("meshgrid.default", "meshgrid.indexing")
def meshgrid(cx: Lowering, tensors: Sequence[T], indexing: str = "ij") -> list[T]:
    rank = len(tensors)
    out = []
    for i, x in enumerate(tensors):
        axis = 1 - i if indexing == "xy" and i < 2 <= rank else i
        line = cx.reshape(x, [x.shape[0] if x.rank and d == axis else 1 for d in range(rank)])
        out.append(cx.expand(line, cx.result(i)[1]))
    return out


def _from_end(cx: Lowering, index: Size, size: Size) -> Size:
    return dim_or_int(dim_of(index) + size) if cx.is_negative(index) else index


@row("slice.Tensor")
def slice_tensor(cx: Lowering, x: T, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> T:
    dim %= x.rank
    length = cx.result()[1][dim]
    size = x.shape[dim]
    first = _slice_start(cx, size, start)
    if end is not None and not (isinstance(end, int) and end >= _UNBOUNDED):
        last = _from_end(cx, end, size)
        cx.keep_order(last, size)
        cx.keep_order(last, first)
    return cx.slice(x, dim, first, length, step)


_UNBOUNDED = 1 << 31
"""Ends of slices from here on are no ends."""


def _slice_start(cx: Lowering, size: Size, start: Any) -> Size:
    """Where a slice really starts: from the end if negative, not before the first and not after the last element."""
    if start is None:
        return 0
    first = _from_end(cx, start, size)
    if cx.is_negative(first):
        return 0
    if first != 0 and cx.is_negative(dim_or_int(dim_of(size) - first)):
        return size
    return first


@row("narrow.default")
def narrow(cx: Lowering, x: T, dim: int, start: Any, length: Any) -> T:
    dim %= x.rank
    return cx.slice(x, dim, _from_end(cx, start, x.shape[dim]), length)


@row("select.int")
def select(cx: Lowering, x: T, dim: int, index: Any) -> T:
    dim %= x.rank
    one = cx.slice(x, dim, _from_end(cx, index, x.shape[dim]), 1)
    return cx.reshape(one, [s for i, s in enumerate(x.shape) if i != dim])


@row("unfold.default")
def unfold(cx: Lowering, x: T, dim: int, size: Any, step: Any) -> T:
    """Windows along a dimension, which are the last one of the result."""
    width, by = (cx.static(number, "a window's size or step") for number in (size, step))
    if not x.rank or not width:
        raise cx.unsupported("windows of a number, or in which nothing is")
    dim %= x.rank
    count = cx.result()[1][dim]
    last = [d for d in range(x.rank + 1) if d != dim + 1] + [dim + 1]
    lead, rest = x.shape[:dim], x.shape[dim + 1 :]
    if width == by:
        whole = cx.slice(x, dim, 0, dim_or_int(dim_of(count) * by))
        return cx.permute(cx.reshape(whole, (*lead, count, width, *rest)), last)
    blocks = -(-width // by)
    if (width if by < _SHORT else blocks) > _MANY_PARTS:
        raise cx.unsupported(f"windows of {width} elements in steps of {by}")
    if by < _SHORT:
        # Of each place in a window, all windows: long copies, where those of one window are short.
        parts = [cx.reshape(cx.slice(x, dim, at, count, by), (*lead, 1, count, *rest)) for at in range(width)]
        placed = cx.cat(parts, dim)
        return cx.permute(placed, [d for d in range(x.rank + 1) if d != dim] + [dim])
    # Of each window, blocks that are as long as a step.
    short = blocks * by - width
    used = cx.slice(x, dim, 0, dim_or_int(dim_of(count) * by + (width - by)))
    if short:
        shape = (*lead, dim_or_int(dim_of(used.shape[dim]) + short), *rest)
        used = cx.emit("pad", (used,), x.dtype, shape, before=[0] * x.rank, value=0.0)
    size = dim_or_int(dim_of(count) * by)
    parts = [cx.reshape(cx.slice(used, dim, at * by, size), (*lead, count, by, *rest)) for at in range(blocks)]
    return cx.permute(cx.slice(cx.cat(parts, dim + 1), dim + 1, 0, width), last)


_SHORT = 8
"""Steps of fewer elements are too short to be copied one by one."""
_MANY_PARTS = 64
"""Of more, no program is made."""


@row("diagonal.default", "linalg_diagonal.default")
def diagonal(cx: Lowering, x: T, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> T:
    """Of a matrix as one row, places that are one more than its columns apart."""
    if cx.node.op._schema.name == "aten::linalg_diagonal" and len(cx.node.args) < 3:
        dim1, dim2 = (cx.node.kwargs.get(name, at) for name, at in (("dim1", -2), ("dim2", -1)))
    rows, columns = dim1 % x.rank, dim2 % x.rank
    x = cx.permute(x, [*(d for d in range(x.rank) if d not in (rows, columns)), rows, columns])
    length, width = cx.result()[1][-1], x.shape[-1]
    flat = cx.reshape(x, (*x.shape[:-2], dim_or_int(dim_of(x.shape[-2]) * width)))
    offset = cx.static(offset, "which diagonal")
    start = offset if offset >= 0 else dim_or_int(dim_of(width) * -offset)
    index = cx.arange(length, torch.int64, start, dim_or_int(dim_of(width) + 1))
    shape = (*x.shape[:-2], length)
    return cx.emit("index_select", (flat, index), x.dtype, shape, dim=flat.rank - 1)


@row("unbind.int")
def unbind(cx: Lowering, x: T, dim: int = 0) -> list[T]:
    dim %= x.rank
    shape = [s for i, s in enumerate(x.shape) if i != dim]
    return [cx.reshape(cx.slice(x, dim, i, 1), shape) for i in range(len(cx.node.outputs))]


@row("chunk.default", "unsafe_chunk.default", "split.Tensor", "split.sizes", "split_with_sizes.default",
     "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "tensor_split.sections", "tensor_split.indices")  # fmt: skip
def split(cx: Lowering, x: T, parts_or_indices: Any, dim: int = 0) -> list[T]:
    dim %= x.rank
    starts = _split_starts(cx, x.shape[dim], parts_or_indices)
    parts = []
    start: Size = 0
    for i in range(len(cx.node.outputs)):
        length = cx.result(i)[1][dim]
        parts.append(cx.slice(x, dim, start if starts is None else starts[i], length))
        start = dim_or_int(dim_of(start) + length)
    return parts


def _split_starts(cx: Lowering, size: Size, indices: Any) -> list[Size] | None:
    """Where the parts of ``tensor_split`` start, if one does not start where the one before it ends."""
    if "tensor_split.indices" not in str(cx.node.op) or not all(isinstance(i, int) for i in indices):
        return None
    if list(indices) == sorted(indices):
        return None
    return [0, *(_slice_start(cx, size, index) for index in indices)]


@row("cat.default", "concat.default", "concatenate.default")
def cat(cx: Lowering, tensors: Sequence[T], dim: int = 0) -> T:
    dtype, shape = cx.result()
    # ATen takes an empty 1-D tensor beside tensors of any rank.
    parts = [cx.convert(x, dtype) for x in tensors if not (x.shape == (0,) and len(shape) != 1)]
    return cx.cat(parts, dim % len(shape)) if parts else cx.full(0, dtype, shape)


@row("stack.default")
def stack(cx: Lowering, tensors: Sequence[T], dim: int = 0) -> T:
    dtype, shape = cx.result()
    dim %= len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return cx.cat([cx.reshape(cx.convert(x, dtype), one) for x in tensors], dim)


@row("pad_sequence.default")
def pad_sequence(
    cx: Lowering, sequences: Sequence[T], batch_first: bool = False, value: Any = 0.0, side: str = "right"
) -> T:
    dim = 0 if batch_first else 1
    _, shape = cx.result()
    longest = dim_of(shape[1 - dim])
    parts = []
    for x in sequences:
        missing = dim_or_int(longest - x.shape[0])
        ends = [missing, 0] if side == "left" else [0, missing]
        parts.append(x if missing == 0 else _pad(cx, x, [0] * (2 * x.rank - 2) + ends, "constant", value))
    return stack(cx, parts, dim)


@row("hstack.default")
def hstack(cx: Lowering, tensors: Sequence[T]) -> T:
    return cat(cx, [x if x.rank else cx.reshape(x, (1,)) for x in tensors], 0 if tensors[0].rank <= 1 else 1)


@row("vstack.default")
def vstack(cx: Lowering, tensors: Sequence[T]) -> T:
    return cat(cx, [x if x.rank > 1 else cx.reshape(x, (1, *(x.shape or (1,)))) for x in tensors], 0)


@row("repeat.default", "tile.default")
def repeat(cx: Lowering, x: T, repeats: Sequence[Any]) -> T:
    _, shape = cx.result()
    rank = len(shape)
    counts = [1] * (rank - len(repeats)) + list(repeats)
    sizes: list[Size] = [*([1] * (rank - x.rank)), *x.shape]
    # Each dimension as (count, size), the count stretched.
    ones: list[Size] = []
    wide: list[Size] = []
    for count, size in zip(counts, sizes, strict=True):
        ones += [size] if count == 1 else [1, size]
        wide += [size] if count == 1 else [count, size]
    return cx.reshape(cx.expand(cx.reshape(x, ones), wide), shape)


@row("repeat_interleave.self_int")
def repeat_interleave(cx: Lowering, x: T, repeats: Any, dim: int | None = None, output_size: Any = None) -> T:
    _, shape = cx.result()
    if dim is None:
        total: Dim = dim_of(1)
        for size in x.shape:
            total = total * size
        x = cx.reshape(x, (total,))
        dim = 0
    dim %= x.rank
    before, after = x.shape[: dim + 1], x.shape[dim + 1 :]
    return cx.reshape(cx.expand(cx.reshape(x, (*before, 1, *after)), (*before, repeats, *after)), shape)


@row("flip.default", "fliplr.default", "flipud.default")
def flip(cx: Lowering, x: T, dims: Sequence[int] | None = None) -> T:
    if dims is None:
        dims = [1] if "fliplr" in str(cx.node.op) else [0]
    return cx.emit("flip", (x,), x.dtype, x.shape, dims=[d % x.rank for d in dims]) if dims and x.rank else x


@row("roll.default")
def roll(cx: Lowering, x: T, shifts: Sequence[Any], dims: Sequence[int] = ()) -> T:
    shape = x.shape
    if not dims:
        total: Dim = dim_of(1)
        for size in shape:
            total = total * size
        x, dims = cx.reshape(x, (total,)), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= x.rank
        size = x.shape[dim]
        if isinstance(shift, int) and isinstance(size, int):
            shift %= max(size, 1)
        turn = _one_turn(cx, shift, size)
        if turn is None:
            source = cx.binary("sub", cx.arange(size, torch.int64), cx.scalar(shift, torch.int64), torch.int64)
            source = cx.binary("remainder", source, cx.scalar(size, torch.int64), torch.int64)
            x = cx.emit("index_select", (x, source), x.dtype, x.shape, dim=dim)
        elif turn != 0:
            rest = dim_or_int(dim_of(size) - turn)
            x = cx.cat([cx.slice(x, dim, rest, turn), cx.slice(x, dim, 0, rest)], dim)
    return cx.reshape(x, shape)


def _one_turn(cx: Lowering, shift: Size, size: Size) -> Size | None:
    """A shift as one from 0 to ``size``, if that is the same form of both wherever it was traced."""
    for turn in (shift, dim_or_int(dim_of(shift) + size)):
        if cx.take_not_negative(turn, dim_or_int(dim_of(size) - turn)):
            return turn
    return None


@row("pixel_shuffle.default")
def pixel_shuffle(cx: Lowering, x: T, factor: int) -> T:
    _, shape = cx.result()
    *batch, _, height, width = x.shape
    n = len(batch)
    split_shape = (*batch, shape[n], factor, factor, height, width)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return cx.reshape(cx.permute(cx.reshape(x, split_shape), order), shape)


@row("pixel_unshuffle.default")
def pixel_unshuffle(cx: Lowering, x: T, factor: int) -> T:
    _, shape = cx.result()
    *batch, channels, _, _ = x.shape
    n = len(batch)
    split_shape = (*batch, channels, shape[n + 1], factor, shape[n + 2], factor)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return cx.reshape(cx.permute(cx.reshape(x, split_shape), order), shape)


@row("channel_shuffle.default", "native_channel_shuffle.default")
def channel_shuffle(cx: Lowering, x: T, groups: int) -> T:
    batch, channels, *rest = x.shape
    grouped = cx.reshape(x, (batch, groups, cx.static(channels, "the number of channels") // groups, *rest))
    return cx.reshape(cx.transpose(grouped, 1, 2), x.shape)


# -- padding ---------------------------------------------------------------------------------------------------------------


@row("constant_pad_nd.default")
def constant_pad(cx: Lowering, x: T, pad: Sequence[Any], value: Any = 0) -> T:
    return _pad(cx, x, pad, "constant", value)


@row("pad.default")
def pad_default(cx: Lowering, x: T, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> T:
    return _pad(cx, x, pad, mode, 0 if value is None else value)


@row("reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default")
def reflection_pad(cx: Lowering, x: T, pad: Sequence[Any]) -> T:
    return _pad(cx, x, pad, "reflect", 0)


@row("replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default")
def replication_pad(cx: Lowering, x: T, pad: Sequence[Any]) -> T:
    return _pad(cx, x, pad, "replicate", 0)


def _pad(cx: Lowering, x: T, pad: Sequence[Any], mode: str, value: Any) -> T:
    """``pad`` lists (before, after) from the last dimension to the first; negative ones cut off."""
    if isinstance(value, Dim):
        raise cx.unsupported("the padding value depends on the call")
    before: list[Size] = [0] * x.rank
    after: list[Size] = [0] * x.rank
    for i in range(len(pad) // 2):
        before[x.rank - 1 - i], after[x.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    cuts: list[tuple[int, Dim, Dim]] = []
    for dim in range(x.rank):
        cut_before = dim_of(before[dim]) * -1 if cx.is_negative(before[dim]) else dim_of(0)
        cut_after = dim_of(after[dim]) * -1 if cx.is_negative(after[dim]) else dim_of(0)
        if cut_before != 0 or cut_after != 0:
            cuts.append((dim, cut_before, cut_after))
            before[dim] = 0 if cut_before != 0 else before[dim]
            after[dim] = 0 if cut_after != 0 else after[dim]
    if mode == "reflect":
        # The other side may show what is cut off.
        return _cut(cx, _padded(cx, x, before, after, mode), cuts)
    x = _cut(cx, x, cuts)
    if mode == "constant":
        if all(p == 0 for p in (*before, *after)):
            return x
        if not is_double(value):
            raise cx.unsupported("padding with an integer of more than 53 bits")
        shape = [dim_of(s) + b + a for s, b, a in zip(x.shape, before, after, strict=True)]
        return cx.emit("pad", (x,), x.dtype, shape, before=[dim_of(b) for b in before], value=float(value))
    return _padded(cx, x, before, after, mode)


def _cut(cx: Lowering, x: T, cuts: Sequence[tuple[int, Dim, Dim]]) -> T:
    for dim, before, after in cuts:
        x = cx.slice(x, dim, dim_or_int(before), dim_or_int(dim_of(x.shape[dim]) - before - after))
    return x


def _padded(cx: Lowering, x: T, before: Sequence[Size], after: Sequence[Size], mode: str) -> T:
    for dim in range(x.rank):
        if before[dim] != 0 or after[dim] != 0:
            x = _pad_from_itself(cx, x, dim, before[dim], after[dim], mode)
    return x


def _pad_from_itself(cx: Lowering, x: T, dim: int, before: Size, after: Size, mode: str) -> T:
    size = dim_of(x.shape[dim])

    def stretched(start: Size, length: Size) -> T:
        edge = cx.slice(x, dim, start, 1)
        return cx.expand(edge, (*x.shape[:dim], length, *x.shape[dim + 1 :]))

    def reversed_part(start: Size, length: Size) -> T:
        part = cx.slice(x, dim, start, length)
        return cx.emit("flip", (part,), part.dtype, part.shape, dims=[dim])

    if mode == "replicate" and any(isinstance(length, Dim) for length in (before, after)):
        # At some sizes nothing is padded, and no part is empty.
        whole = dim_or_int(size + before + after)
        source = cx.binary("sub", cx.arange(whole, torch.int64), cx.scalar(before, torch.int64), torch.int64)
        source = cx.binary("maximum", source, cx.scalar(0, torch.int64), torch.int64)
        source = cx.binary("minimum", source, cx.scalar(dim_or_int(size - 1), torch.int64), torch.int64)
        shape = (*x.shape[:dim], whole, *x.shape[dim + 1 :])
        return cx.emit("index_select", (x, source), x.dtype, shape, dim=dim)
    parts = [x]
    first: tuple[Size, Size]
    last: tuple[Size, Size]
    if mode == "replicate":
        first, last = (0, before), (dim_or_int(size - 1), after)
        make: Any = stretched
    elif mode == "reflect":
        first, last = (1, before), (dim_or_int(size - after - 1), after)
        make = reversed_part
    elif mode == "circular":
        first, last = (dim_or_int(size - before), before), (0, after)

        def make(start: Size, length: Size) -> T:
            return cx.slice(x, dim, start, length)
    else:
        raise cx.unsupported(f"padding mode {mode}")
    if before != 0:
        parts.insert(0, make(*first))
    if after != 0:
        parts.append(make(*last))
    return cx.cat(parts, dim)


# -- writing into a part ---------------------------------------------------------------------------------------------------


@row("slice_scatter.default")
def slice_scatter(cx: Lowering, x: T, source: T, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> T:
    dim %= x.rank
    return _scatter(cx, x, source, dim, _slice_start(cx, x.shape[dim], start), step)


@row("select_scatter.default")
def select_scatter(cx: Lowering, x: T, source: T, dim: int, index: Any) -> T:
    dim %= x.rank
    row_shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return _scatter(cx, x, cx.reshape(source, row_shape), dim, _from_end(cx, index, x.shape[dim]), 1)


def _scatter(cx: Lowering, x: T, source: T, dim: int, start: Size, step: int) -> T:
    source = cx.convert(source, x.dtype)
    if source.shape[dim] == x.shape[dim] and step == 1:
        return source
    return cx.emit("slice_scatter", (x, source), x.dtype, x.shape, dim=dim, start=dim_of(start), step=step)


@row("tril.default", "triu.default")
def triangle(cx: Lowering, x: T, diagonal: Any = 0) -> T:
    rows, columns = x.shape[-2:]
    lower = "tril" in str(cx.node.op)
    row_index = cx.reshape(cx.arange(rows, torch.int64, diagonal), (rows, 1))
    column_index = cx.arange(columns, torch.int64)
    kept = cx.binary("le" if lower else "ge", column_index, row_index, torch.bool)
    return cx.where(kept, x, cx.full(0, x.dtype), x.dtype)
