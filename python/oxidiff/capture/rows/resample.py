"""Resizing and pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from ..dim import Dim, Size, dim_of, dim_or_int, product_of
from ..graph import symbols_in
from ..lowering import Lowering, T, opmath
from .registry import row


def _nearest(cx: Lowering, x: T, scales: Sequence[float], exact: bool) -> T:
    dtype, shape = cx.result()
    if not exact and x.rank == 4:
        scales = _rounded(cx, x, shape, scales)
    return cx.emit("upsample_nearest", (x,), dtype, shape, first_dim=2, scales=[float(s) for s in scales], exact=exact)


@row(
    "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "_upsample_nearest_exact1d.vec",
    "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec",
)  # fmt: skip
def nearest_vec(cx: Lowering, x: T, output_size: Any, scale_factors: Sequence[float] | None) -> T:
    return _nearest(cx, x, _scales(cx, x, scale_factors), "exact" in str(cx.node.op))


@row(
    "upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default",
    "_upsample_nearest_exact1d.default", "_upsample_nearest_exact2d.default", "_upsample_nearest_exact3d.default",
)  # fmt: skip
def nearest(cx: Lowering, x: T, output_size: Any, *scales: Any) -> T:
    given = None if any(s is None for s in scales) else scales
    return _nearest(cx, x, _scales(cx, x, given), "exact" in str(cx.node.op))


_SMALL = 128
"""Height and width together of the images that PyTorch's vectorized kernel for nearest neighbours makes."""


def _rounded(cx: Lowering, x: T, shape: Sequence[Size], scales: Sequence[float]) -> Sequence[float]:
    """Scale factors of nearest neighbours in an image: PyTorch has two kernels, which ask the sizes different things."""
    of_sizes = _of_sizes(x, shape, scales, (1, 2))
    rows = zip(x.shape[2:], shape[2:], scales, of_sizes, strict=True)
    # Where the factor is exactly as much, both do the same.
    if not any(s and not f and dim_of(before) * Fraction(s) != dim_of(after) for before, after, s, f in rows):
        return scales
    total = dim_of(shape[2]) + shape[3]
    if (size := total.as_int()) is None:
        raise cx.size_dependent("what a scale factor is rounded to depends on the size", total.symbols())
    return of_sizes if size <= _SMALL else scales


def _of_sizes(x: T, shape: Sequence[Size], scales: Sequence[float], factors: Sequence[int] = (1,)) -> list[float]:
    """Scale factors, but for dimensions that become exactly one of ``factors`` times as large: there PyTorch's kernels ask
    the sizes, whatever scale factor led to them."""
    sizes = zip(x.shape[2:], shape[2:], scales, strict=True)
    return [0.0 if any(after == before * f for f in factors) else scale for before, after, scale in sizes]


def _scales(cx: Lowering, x: T, scales: Sequence[Any] | None) -> list[float]:
    """Scale factors; 0 where the ratio is that of the sizes."""
    if scales is None:
        return [0.0] * (x.rank - 2)
    if any(isinstance(s, Dim) for s in scales):
        raise cx.unsupported("a scale factor depends on the input's size")
    return [float(s) for s in scales]


# -- linear and cubic: sums of two or four places, along one dimension after the other ------------------------------------


@row("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def linear_vec(cx: Lowering, x: T, output_size: Any, align_corners: bool, scale_factors: Any) -> T:
    scales = _of_sizes(x, cx.result()[1], _scales(cx, x, scale_factors))
    return _separable(cx, x, align_corners, scales, cubic=False)


@row("upsample_linear1d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default")
def linear(cx: Lowering, x: T, output_size: Any, align_corners: bool, *scales: Any) -> T:
    given = None if any(s is None for s in scales) else scales
    factors = _of_sizes(x, cx.result()[1], _scales(cx, x, given))
    return _separable(cx, x, align_corners, factors, cubic=False)


@row("upsample_bicubic2d.vec")
def bicubic_vec(cx: Lowering, x: T, output_size: Any, align_corners: bool, scale_factors: Any) -> T:
    return _separable(cx, x, align_corners, _scales(cx, x, scale_factors), cubic=True)


@row("upsample_bicubic2d.default")
def bicubic(cx: Lowering, x: T, output_size: Any, align_corners: bool, *scales: Any) -> T:
    given = None if any(s is None for s in scales) else scales
    return _separable(cx, x, align_corners, _scales(cx, x, given), cubic=True)


def _separable(cx: Lowering, x: T, align_corners: bool, scales: Sequence[float], cubic: bool) -> T:
    dtype, shape = cx.result()
    if not cx.take_not_negative(*(dim_or_int(dim_of(size) - 1) for size in (*x.shape[2:], *shape[2:]))):
        raise cx.size_dependent("an image of no pixels", symbols_in((x.shape, shape)))
    wide = opmath(dtype)
    out = cx.convert(x, wide)
    for i, scale in enumerate(scales):
        dim = 2 + i
        index, weight = _taps(cx, x.shape[dim], shape[dim], align_corners, scale, cubic, wide)
        sizes = (*out.shape[:dim], shape[dim], *out.shape[dim + 1 :])
        out = cx.emit("interpolate", (out, index, weight), wide, sizes, dim=dim)
    return cx.convert(out, dtype)


def _taps(
    cx: Lowering, size: Size, out_size: Size, align_corners: bool, scale: float, cubic: bool, wide: torch.dtype
) -> tuple[T, T]:
    """``[out, taps]`` each: which places along a dimension make one of the result's, and by which weights."""
    sizes, outs = cx.scalar(size, torch.int64), cx.scalar(out_size, torch.int64)
    index = cx.arange(out_size, wide)
    if align_corners:
        gaps = cx.binary(
            "maximum",
            cx.binary("sub", outs, cx.full(1, torch.int64), torch.int64),
            cx.full(1, torch.int64),
            torch.int64,
        )
        ratio = cx.binary("div", cx.binary("sub", sizes, cx.full(1, torch.int64), torch.int64), gaps, wide)
        source = cx.binary("mul", index, ratio, wide)
    else:
        ratio = cx.full(1 / scale, wide) if scale else cx.binary("div", sizes, outs, wide)
        centre = cx.binary("mul", cx.binary("add", index, cx.full(0.5, wide), wide), ratio, wide)
        source = cx.binary("sub", centre, cx.full(0.5, wide), wide)
        if not cubic:
            source = cx.binary("maximum", source, cx.full(0, wide), wide)
    below = cx.unary("floor", source)
    part = cx.binary("sub", source, below, wide)
    taps = _cubic_taps(cx, part, wide) if cubic else [(0, cx.binary("sub", cx.full(1, wide), part, wide)), (1, part)]
    last = cx.scalar(dim_of(size) - 1 if isinstance(size, Dim) else size - 1, torch.int64)
    places, weights = [], []
    for offset, weight in taps:
        at = cx.binary("add", below, cx.full(offset, wide), wide)
        at = cx.binary("minimum", cx.binary("maximum", at, cx.full(0, wide), wide), last, wide)
        places.append(cx.reshape(cx.convert(at, torch.int64), (out_size, 1)))
        weights.append(cx.reshape(weight, (out_size, 1)))
    pairs = (out_size, len(taps))
    return cx.emit("cat", places, torch.int64, pairs, dim=1), cx.emit("cat", weights, wide, pairs, dim=1)


def _cubic_taps(cx: Lowering, t: T, wide: torch.dtype) -> list[tuple[int, T]]:
    """Keys' kernel with a = -0.75, as ATen."""
    a = -0.75

    def polynomial(x: T, coefficients: Sequence[float]) -> T:
        out = cx.full(coefficients[0], wide)
        for c in coefficients[1:]:
            out = cx.binary("add", cx.binary("mul", out, x, wide), cx.full(c, wide), wide)
        return out

    near = (a + 2, -(a + 3), 0, 1)
    far = (a, -5 * a, 8 * a, -4 * a)
    one = cx.full(1, wide)
    rest = cx.binary("sub", one, t, wide)
    return [
        (-1, polynomial(cx.binary("add", t, one, wide), far)),
        (0, polynomial(t, near)),
        (1, polynomial(rest, near)),
        (2, polynomial(cx.binary("add", rest, one, wide), far)),
    ]


# -- pooling ---------------------------------------------------------------------------------------------------------------


def _each(values: Any, count: int) -> list[int]:
    each = [values] if isinstance(values, int) else [int(v) for v in values]
    return each * count if len(each) == 1 else each


def _pool(
    cx: Lowering,
    op: str,
    x: T,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    include: bool,
    dilation: Any = 1,
) -> T:
    dtype, shape = cx.result()
    rank = int(cx.node.op._schema.name[-2]) if cx.node.op._schema.name[-1] == "d" else 2
    kernels = _each(kernel, rank)
    strides = _each(stride, rank) if stride else kernels
    paddings = _each(padding, rank)
    first = x.rank - rank
    dilations = _each(dilation, rank)
    is_by_taps = op == "max_pool" and dtype.is_floating_point
    if any(d != 1 for d in dilations) and not is_by_taps:
        raise cx.unsupported("dilated windows of integers")
    behind = [*paddings]
    if ceil_mode:
        for i in range(rank):
            span = dilations[i] * (kernels[i] - 1) + 1
            room = dim_of(x.shape[first + i]) + dim_of(2 * paddings[i] - span)
            # Where the windows fit, the size that was seen is the one without ceil_mode.
            if room * Fraction(1, strides[i]) + dim_of(1) == dim_of(shape[first + i]):
                continue
            size = cx.static(x.shape[first + i], "a size with ceil_mode")
            count = cx.static(shape[first + i], "a size with ceil_mode")
            over = (count - 1) * strides[i] + span - (size + 2 * paddings[i])
            if over > 0 and not is_by_taps:
                raise cx.unsupported("ceil_mode with a window that overhangs")
            behind[i] += max(0, over)
    if is_by_taps:
        x = _padded(cx, x, paddings, behind, -math.inf)
        return _max_pool_by_taps(cx, x, kernels, strides, dilations)
    if dtype.is_floating_point and max(kernels) <= _FEW_TAPS:
        padded = _padded(cx, x, paddings, behind, 0.0)
        counted = None if include or not any(paddings) else paddings
        return _avg_pool_by_taps(cx, padded, kernels, strides, x.shape[first:], counted)
    return cx.emit(
        op,
        (x,),
        dtype,
        shape,
        first_dim=first,
        kernel=kernels,
        stride=strides,
        padding=paddings,
        count_include_pad=include,
    )


_FEW_TAPS = 16
"""A window of at most so many elements along each dimension is a loop over strided views for each, which is a kernel with
what is beside it."""


def _padded(cx: Lowering, x: T, before: list[int], behind: list[int], value: float) -> T:
    """With so many more of a value on both sides of the last dimensions."""
    if not any((*before, *behind)):
        return x
    first = [0] * (x.rank - len(before))
    ends = zip(x.shape, first + before, first + behind, strict=True)
    sizes = [dim_or_int(dim_of(size) + b + a) for size, b, a in ends]
    return cx.emit("pad", (x,), x.dtype, sizes, before=first + before, value=value)


def _avg_pool_by_taps(
    cx: Lowering,
    x: T,
    kernels: Sequence[int],
    strides: Sequence[int],
    sizes: Sequence[Size] = (),
    paddings: Sequence[int] | None = None,
) -> T:
    """The sum of a slice for each place in the window, along one dimension after the other.

    Args:
        cx: The lowering.
        x: What is pooled, with its padding.
        kernels: The window.
        strides: Its steps.
        sizes: What the last dimensions of ``x`` are without padding.
        paddings: The padding before them, if it does not count.
    """
    dtype, shape = cx.result()
    first = x.rank - len(kernels)
    wide = opmath(dtype)
    total = cx.convert(x, wide)
    count = cx.full(1 if paddings is not None else math.prod(kernels), wide)
    for i, (kernel, stride) in enumerate(zip(kernels, strides, strict=True)):
        dim = first + i
        taps = [cx.slice(total, dim, at, shape[dim], stride) for at in range(kernel)]
        total = taps[0]
        for tap in taps[1:]:
            total = cx.binary("add", total, tap, wide)
        if paddings is not None:
            inside = _inside(cx, sizes[i], shape[dim], kernel, stride, paddings[i])
            here = [shape[dim] if d == dim else 1 for d in range(x.rank)]
            count = cx.binary("mul", count, cx.reshape(cx.convert(inside, wide), here), wide)
    return cx.convert(cx.binary("div", total, count, wide), dtype)


def _inside(cx: Lowering, size: Size, count: Size, kernel: int, stride: int, padding: int) -> T:
    """``[count]``: how many places of each window along a dimension of so many are no padding."""
    whole = torch.int64
    begins = cx.binary("mul", cx.arange(count, whole), cx.full(stride, whole), whole)
    begins = cx.binary("sub", begins, cx.full(padding, whole), whole)
    ends = cx.binary("minimum", cx.binary("add", begins, cx.full(kernel, whole), whole), cx.scalar(size, whole), whole)
    return cx.binary("sub", ends, cx.binary("maximum", begins, cx.full(0, whole), whole), whole)


def _max_pool_by_taps(cx: Lowering, x: T, kernels: list[int], strides: list[int], dilations: list[int]) -> T:
    """The maximum of slices, along one dimension after the other."""
    _, shape = cx.result()
    first = x.rank - len(kernels)
    for i, (width, stride, step) in enumerate(zip(kernels, strides, dilations, strict=True)):
        parts = [cx.slice(x, first + i, at * step, shape[first + i], stride) for at in range(width)]
        x = parts[0]
        for part in parts[1:]:
            x = cx.binary("maximum", x, part, x.dtype)
    return x


@row("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(
    cx: Lowering,
    x: T,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> T:
    if divisor_override is not None:
        raise cx.unsupported("divisor_override")
    return _pool(cx, "avg_pool", x, kernel, stride, padding, ceil_mode, count_include_pad)


@row("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def max_pool(
    cx: Lowering, x: T, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> T:
    return _pool(cx, "max_pool", x, kernel, stride, padding, ceil_mode, False, dilation)


@row("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default")
def adaptive_avg_pool(cx: Lowering, x: T, output_size: Sequence[Any]) -> T:
    dtype, shape = cx.result()
    count = len(output_size)
    first = x.rank - count
    if all(s == 1 for s in shape[first:]):
        return cx.reduce("mean", x, range(first, x.rank), True, dtype)
    kernel = []
    for have, want in zip(x.shape[first:], shape[first:], strict=True):
        window = dim_of(have).divide(want)
        value = window.as_int() if window is not None else None
        if value is None:
            return _adaptive(cx, x, first)
        kernel.append(value)
    if max(kernel) <= _FEW_TAPS:
        return _avg_pool_by_taps(cx, x, kernel, kernel)
    return cx.emit(
        "avg_pool", (x,), dtype, shape, first_dim=first, kernel=kernel, stride=kernel, padding=[0] * count,
        count_include_pad=True,
    )  # fmt: skip


@row("adaptive_max_pool1d.default", "adaptive_max_pool2d.default")
def adaptive_max_pool(cx: Lowering, x: T, output_size: Sequence[Any]) -> tuple[T, T]:
    """Largest elements of windows of one size, and where they are in their image."""
    whole = torch.int64
    first = x.rank - len(output_size)
    sides, counts = x.shape[first:], cx.result()[1][first:]
    windows = [_window(cx, have, want) for have, want in zip(sides, counts, strict=True)]
    # The windows side by side, behind them what is in each.
    parts = cx.reshape(x, (*x.shape[:first], *itertools.chain(*zip(counts, windows, strict=True))))
    order = [*range(first), *range(first, parts.rank, 2), *range(first + 1, parts.rank, 2)]
    each = cx.reshape(cx.permute(parts, order), (*x.shape[:first], *counts, product_of(windows)))
    values = cx.reduce("amax", each, [-1], False, x.dtype)
    # The last of those that are no numbers, else the first of equals.
    none = cx.full(-1, whole)
    odd = cx.where(cx.unary("isnan", each, torch.bool), cx.arange(each.shape[-1], whole), none, whole)
    last = cx.reduce("amax", odd, [-1], False, whole)
    is_odd = cx.binary("gt", last, none, torch.bool)
    rest = cx.where(is_odd, last, cx.reduce("argmax", each, [-1], False, whole), whole)
    stride: Size
    place, stride = cx.full(0, whole), 1
    for axis in range(len(counts) - 1, -1, -1):
        width = cx.scalar(windows[axis], whole)
        inside = cx.binary("remainder", rest, width, whole)
        rest = cx.binary("floor_divide", rest, width, whole)
        start = cx.arange(counts[axis], whole, 0, windows[axis])
        start = cx.reshape(start, (counts[axis], *([1] * (len(counts) - 1 - axis))))
        at = cx.binary("mul", cx.binary("add", inside, start, whole), cx.scalar(stride, whole), whole)
        place = cx.binary("add", at, place, whole)
        stride = dim_or_int(dim_of(stride) * sides[axis])
    return values, place


def _window(cx: Lowering, have: Size, want: Size) -> Size:
    """How many places each of so many takes."""
    if want == 1:
        return have
    width = dim_of(have).divide(want)
    if width is None or width.as_int() is None:
        raise cx.unsupported("windows of different sizes")
    return dim_or_int(width)


def _adaptive(cx: Lowering, x: T, first: int) -> T:
    """Means over windows of different sizes: a matrix product per dimension."""
    dtype, shape = cx.result()
    wide = opmath(dtype)
    out = cx.convert(x, wide)
    last = x.rank - 1
    for dim in range(first, x.rank):
        matrix = _windows(cx, x.shape[dim], shape[dim], wide)
        out = cx.transpose(out, dim, last)
        out = cx.emit("matmul", (out, matrix), wide, (*out.shape[:-1], shape[dim]))
        out = cx.transpose(out, dim, last)
    return cx.convert(out, dtype)


def _windows(cx: Lowering, size: Size, count: Size, wide: torch.dtype) -> T:
    """The [in, out] matrix that takes the mean from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``."""
    whole = torch.int64
    sizes, counts, one = cx.scalar(size, whole), cx.scalar(count, whole), cx.full(1, whole)
    begins = cx.binary("mul", cx.arange(count, whole), sizes, whole)
    ends = cx.binary("sub", cx.binary("add", cx.binary("add", begins, sizes, whole), counts, whole), one, whole)
    begins, ends = (cx.binary("floor_divide", edge, counts, whole) for edge in (begins, ends))
    rows = cx.reshape(cx.arange(size, whole), (size, 1))
    is_in = cx.binary(
        "logical_and", cx.binary("ge", rows, begins, torch.bool), cx.binary("lt", rows, ends, torch.bool), torch.bool
    )
    share = cx.binary("div", cx.full(1, wide), cx.binary("sub", ends, begins, whole), wide)
    return cx.where(is_in, share, cx.full(0, wide), wide)
