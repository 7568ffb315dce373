"""Matrix products, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dim import Dim, Size, dim_of, dim_or_int, product_of
from ..lowering import Lowering, T, opmath
from .registry import row


@row("linear.default")
def linear(cx: Lowering, x: T, weight: T, bias: T | None = None) -> T:
    dtype, shape = cx.result()
    if weight.rank == 1:
        # One result per row, and no dimension for it.
        weight = cx.reshape(weight, (1, *weight.shape))
        rows = x if x.rank > 1 else cx.reshape(x, (1, *x.shape))
        bias = cx.reshape(bias, (1,)) if bias is not None else None
        given = (rows, weight) if bias is None else (rows, weight, bias)
        return cx.reshape(cx.emit("linear", given, dtype, (*rows.shape[:-1], 1)), shape)
    return cx.emit("linear", (x, weight) if bias is None else (x, weight, bias), dtype, shape)


def _matmul(cx: Lowering, a: T, b: T, dtype: torch.dtype) -> T:
    if not dtype.is_floating_point:
        raise cx.unsupported("a product of integer matrices")
    batch = cx.broadcast(a.shape[:-2], b.shape[:-2])
    return cx.emit("matmul", (a, b), dtype, (*batch, a.shape[-2], b.shape[-1]))


@row(
    "matmul.default", "mm.default", "bmm.default", "linalg_matmul.default", "mv.default", "dot.default", "inner.default"
)
def matmul(cx: Lowering, a: T, b: T) -> T:
    dtype, shape = cx.result()
    if "inner" in str(cx.node.op) and b.rank > 1:
        # Of the last dimensions; every row of the one with every row of the other.
        b = cx.transpose(cx.reshape(b, (product_of(b.shape[:-1]), b.shape[-1])), 0, 1)
    if a.rank == 1:
        a = cx.reshape(a, (1, *a.shape))
    if b.rank == 1:
        b = cx.reshape(b, (*b.shape, 1))
    return cx.reshape(_matmul(cx, a, b, dtype), shape)


@row("addmm.default", "baddbmm.default", "addbmm.default", "addmv.default")
def addmm(cx: Lowering, x: T, a: T, b: T, beta: Any = 1, alpha: Any = 1) -> T:
    if "addbmm" in str(cx.node.op) and "baddbmm" not in str(cx.node.op):
        raise cx.unsupported("a sum of matrix products")
    dtype, shape = cx.result()
    wide = opmath(dtype)
    product = cx.reshape(_matmul(cx, a, cx.reshape(b, (*b.shape, 1)) if b.rank == 1 else b, dtype), shape)
    if alpha != 1:
        product = cx.binary("mul", product, cx.scalar(alpha, wide), wide)
    if beta == 0:
        return product
    added = x if beta == 1 else cx.binary("mul", x, cx.scalar(beta, wide), wide)
    return cx.binary("add", product, added, dtype)


@row("outer.default", "ger.default")
def outer(cx: Lowering, a: T, b: T) -> T:
    dtype, _ = cx.result()
    return cx.binary("mul", cx.reshape(a, (*a.shape, 1)), b, dtype)


@row("einsum.default")
def einsum(cx: Lowering, equation: str, operands: Sequence[T], path: Any = None) -> T:
    dtype, shape = cx.result()
    equation = equation.replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if "..." in equation:
        terms, out = _spell_ellipsis(cx, terms, out, bool(arrow), operands)
    elif not arrow:
        letters = "".join(terms)
        out = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    value, term = operands[0], terms[0]
    if len(set(term)) != len(term) or any(len(set(t)) != len(t) for t in terms):
        raise cx.unsupported("an einsum with a repeated index")
    for i in range(1, len(operands)):
        later = set("".join(terms[i + 1 :])) | set(out)
        value, term = _einsum_pair(cx, value, term, operands[i], terms[i], later, dtype)
    summed = [i for i, c in enumerate(term) if c not in out]
    if summed:
        value = cx.reduce("sum", value, summed, False, dtype)
        term = "".join(c for c in term if c in out)
    return cx.reshape(cx.permute(value, [term.index(c) for c in out]), shape)


def _spell_ellipsis(
    cx: Lowering, terms: list[str], out: str, has_arrow: bool, operands: Sequence[T]
) -> tuple[list[str], str]:
    used = set("".join(terms) + out)
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in used]
    spelled = []
    longest = ""
    for term, operand in zip(terms, operands, strict=True):
        count = operand.rank - len(term.replace("...", ""))
        letters = "".join(free[max(0, 8 - count) : 8])
        longest = max(longest, letters, key=len)
        spelled.append(term.replace("...", letters))
    if not has_arrow:
        letters = "".join(spelled)
        out = longest + "".join(sorted(c for c in set(letters) - set(longest) if letters.count(c) == 1))
    return spelled, out.replace("...", longest)


def _einsum_pair(
    cx: Lowering, a: T, a_term: str, b: T, b_term: str, later: set[str], dtype: torch.dtype
) -> tuple[T, str]:
    """One product: shared indices that live on are batch, those that do not are summed."""
    a, a_term = _without_lone(cx, a, a_term, set(b_term) | later)
    b, b_term = _without_lone(cx, b, b_term, set(a_term) | later)
    for c in [c for c in a_term if c in b_term and c not in later]:
        # A size of 1 is broadcast, in sums too.
        i, k = a_term.index(c), b_term.index(c)
        if a.shape[i] == 1 or b.shape[k] == 1:
            size = a.shape[i] if b.shape[k] == 1 else b.shape[k]
            a = cx.expand(a, (*a.shape[:i], size, *a.shape[i + 1 :]))
            b = cx.expand(b, (*b.shape[:k], size, *b.shape[k + 1 :]))
    batch = [c for c in a_term if c in b_term and c in later]
    summed = [c for c in a_term if c in b_term and c not in later]
    a_only = [c for c in a_term if c not in b_term]
    b_only = [c for c in b_term if c not in a_term]
    sizes: dict[str, Size] = dict(zip(b_term, b.shape, strict=True))
    for c, size in zip(a_term, a.shape, strict=True):
        sizes[c] = size if size != 1 or c not in sizes else sizes[c]

    def arranged(x: T, term: str, groups: Sequence[Sequence[str]]) -> T:
        order = [term.index(c) for group in groups for c in group]
        x = cx.permute(x, order)
        return cx.reshape(x, [*(x.shape[i] for i in range(len(batch))), *(_size(g, sizes) for g in groups[1:])])

    if not summed:
        a = cx.permute(a, [a_term.index(c) for c in (*batch, *a_only)])
        b = cx.permute(b, [b_term.index(c) for c in (*batch, *b_only)])
        a = cx.reshape(a, (*a.shape, *([1] * len(b_only))))
        b = cx.reshape(b, (*b.shape[: len(batch)], *([1] * len(a_only)), *b.shape[len(batch) :]))
        return cx.binary("mul", a, b, dtype), "".join((*batch, *a_only, *b_only))
    left = arranged(a, a_term, (batch, a_only, summed))
    right = arranged(b, b_term, (batch, summed, b_only))
    product = _matmul(cx, left, right, dtype)
    term = "".join((*batch, *a_only, *b_only))
    return cx.reshape(product, [sizes[c] for c in term]), term


def _without_lone(cx: Lowering, x: T, term: str, needed: set[str]) -> tuple[T, str]:
    """The sum over indices that nothing else has."""
    lone = [i for i, c in enumerate(term) if c not in needed]
    if not lone:
        return x, term
    return cx.reduce("sum", x, lone, False, x.dtype), "".join(c for c in term if c in needed)


def _size(letters: Sequence[str], sizes: dict[str, Size]) -> Size:
    return product_of(sizes[c] for c in letters)


@row("scaled_dot_product_attention.default")
def attention(
    cx: Lowering,
    query: T,
    key: T,
    value: T,
    mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> T:
    dtype, shape = cx.result()
    if mask is not None and mask.rank < 2:
        raise cx.unsupported("a mask of less than two dimensions")
    if enable_gqa:
        key, value = (_repeat_heads(cx, x, query.shape[-3]) for x in (key, value))
    if scale is None:
        scale = 1 / math.sqrt(cx.static(query.shape[-1], "the head size"))
    elif isinstance(scale, Dim):
        # The op's own is a constant.
        query = cx.convert(cx.binary("mul", query, cx.scalar(scale, query.dtype), query.dtype), query.dtype)
        scale = 1.0
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    return cx.emit(
        "scaled_dot_product_attention", operands, dtype, shape, is_causal=bool(is_causal), scale=float(scale)
    )


def _repeat_heads(cx: Lowering, x: T, heads: Size) -> T:
    have, want = cx.static(x.shape[-3], "the number of heads"), cx.static(heads, "the number of heads")
    if have == want:
        return x
    *batch, _, length, size = x.shape
    wide = (*batch, have, want // have, length, size)
    x = cx.expand(cx.reshape(x, (*batch, have, 1, length, size)), wide)
    return cx.reshape(x, (*batch, want, length, size))


# -- convolutions ----------------------------------------------------------------------------------------------------------


def _each(values: Any, count: int) -> list[int]:
    each = [values] if isinstance(values, int) else [int(v) for v in values]
    return each * count if len(each) == 1 else each


@row("conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv(
    cx: Lowering,
    x: T,
    weight: T,
    bias: T | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> T:
    dtype, shape = cx.result()
    groups = cx.static(groups, "the number of groups")
    spatial = weight.rank - 2
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    if x.rank == spatial + 1:
        x = cx.reshape(x, (1, *x.shape))
    if isinstance(padding, str):
        x, paddings = _string_padding(cx, x, weight, padding, dilations)
    else:
        paddings = _each(padding, spatial)
    full_shape = shape if len(shape) == spatial + 2 else (1, *shape)
    out = _convolution(cx, x, weight, bias, strides, paddings, dilations, groups, dtype, full_shape)
    return cx.reshape(out, shape)


def _string_padding(cx: Lowering, x: T, weight: T, padding: str, dilations: Sequence[int]) -> tuple[T, list[int]]:
    if padding == "valid":
        return x, [0] * len(dilations)
    kernel = [cx.static(k, "the kernel") for k in weight.shape[2:]]
    totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    if all(t % 2 == 0 for t in totals):
        return x, [t // 2 for t in totals]
    # An odd total: the extra element goes behind.
    before = [0, 0, *(t // 2 for t in totals)]
    shape = [*x.shape[:2], *(dim_of(s) + t for s, t in zip(x.shape[2:], totals, strict=True))]
    return cx.emit("pad", (x,), x.dtype, shape, before=before, value=0.0), [0] * len(dilations)


def _convolution(
    cx: Lowering,
    x: T,
    weight: T,
    bias: T | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: torch.dtype,
    shape: Sequence[Size],
) -> T:
    if groups != 1:
        # What is not a multiple of the groups is no convolution.
        for channels in (x.shape[1], weight.shape[0]):
            cx.static(channels, "the number of channels of a convolution in groups")
    operands = (x, weight) if bias is None else (x, weight, bias)
    return cx.emit(
        "convolution", operands, dtype, shape, stride=list(stride), padding=list(padding), dilation=list(dilation),
        groups=groups, channels_last=False,
    )  # fmt: skip


@row("convolution.default")
def convolution(
    cx: Lowering,
    x: T,
    weight: T,
    bias: T | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> T:
    if transposed:
        return conv_transpose(cx, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(cx, x, weight, bias, stride, padding, dilation, groups)


@row("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    cx: Lowering,
    x: T,
    weight: T,
    bias: T | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> T:
    """A convolution of x with zeros between its elements, and the kernel reversed; or one for all phases of the stride."""
    dtype, shape = cx.result()
    groups = cx.static(groups, "the number of groups")
    n = weight.rank - 2
    strides, paddings, dilations = (_each(v, n) for v in (stride, padding, dilation))
    extra = _each(output_padding, n)
    if x.rank == n + 1:
        x = cx.reshape(x, (1, *x.shape))
    if groups == 1 and dilations == [1] * n and strides != [1] * n:
        return cx.reshape(_by_phases(cx, x, weight, bias, strides, paddings, extra, dtype), shape)
    kernel = [cx.static(k, "the kernel") for k in weight.shape[2:]]
    for axis in range(n):
        x = _spread(cx, x, 2 + axis, strides[axis])
    reach = [dilations[i] * (kernel[i] - 1) - paddings[i] for i in range(n)]
    before = [0, 0, *(max(r, 0) for r in reach)]
    sizes = [dim_of(x.shape[2 + i]) + max(reach[i], 0) + max(reach[i] + extra[i], 0) for i in range(n)]
    x = cx.emit("pad", (x,), x.dtype, (*x.shape[:2], *sizes), before=before, value=0.0)
    for i in range(n):
        cut = max(-reach[i], 0)
        cut_end = max(-(reach[i] + extra[i]), 0)
        if cut or cut_end:
            x = cx.slice(x, 2 + i, cut, dim_of(x.shape[2 + i]) - cut - cut_end)
    flipped = cx.emit("flip", (weight,), weight.dtype, weight.shape, dims=list(range(2, 2 + n)))
    inputs = cx.static(weight.shape[0], "the weight") // groups
    outputs = cx.static(weight.shape[1], "the weight")
    # [I, O/g, *k] -> [O, I/g, *k]
    flipped = cx.transpose(cx.reshape(flipped, (groups, inputs, outputs, *kernel)), 1, 2)
    flipped = cx.reshape(flipped, (groups * outputs, inputs, *kernel))
    full_shape = shape if len(shape) == n + 2 else (1, *shape)
    out = _convolution(cx, x, flipped, bias, [1] * n, [0] * n, dilations, groups, dtype, full_shape)
    return cx.reshape(out, shape)


def _by_phases(
    cx: Lowering,
    x: T,
    weight: T,
    bias: T | None,
    strides: Sequence[int],
    paddings: Sequence[int],
    extra: Sequence[int],
    dtype: torch.dtype,
) -> T:
    """Results whose places are equal modulo the stride see the same taps of the kernel: channels of one convolution over x.

    Place ``m`` of what is not cut off at its edges is ``sum over t of x[m // s - t] w[m % s + t s]``.
    """
    n = len(strides)
    inputs, outputs, *kernel = (cx.static(size, "the weight") for size in weight.shape)
    taps = [-(-k // s) for k, s in zip(kernel, strides, strict=True)]
    axes = range(2, 2 + n)
    whole = [k * s for k, s in zip(taps, strides, strict=True)]
    if whole != kernel:
        weight = cx.emit("pad", (weight,), weight.dtype, (inputs, outputs, *whole), before=[0] * (n + 2), value=0.0)
    split = [size for pair in zip(taps, strides, strict=True) for size in pair]
    weight = cx.reshape(weight, (inputs, outputs, *split))
    weight = cx.emit("flip", (weight,), weight.dtype, weight.shape, dims=[2 + 2 * i for i in range(n)])
    # [I, O, taps and phases in turn] -> [phases, O, I, taps]
    weight = cx.permute(weight, [*(3 + 2 * i for i in range(n)), 1, 0, *(2 + 2 * i for i in range(n))])
    phases = math.prod(strides)
    weight = cx.reshape(weight, (phases * outputs, inputs, *taps))
    if bias is not None:
        bias = cx.reshape(cx.expand(cx.reshape(bias, (1, outputs)), (phases, outputs)), (phases * outputs,))
    # The first and the last place that are kept, by the element of x that they begin at.
    first = [p // s for p, s in zip(paddings, strides, strict=True)]
    beyond = [(k + e - p - 1) // s for k, e, p, s in zip(kernel, extra, paddings, strides, strict=True)]
    before = [k - 1 - f for k, f in zip(taps, first, strict=True)]
    lengths = [cx.result()[1][i - n] for i in range(n)]
    counts = [dim_of(x.shape[axis]) + beyond[axis - 2] - first[axis - 2] for axis in axes]
    if before != beyond or min(before) < 0:
        for i, axis in enumerate(axes):
            cut = dim_of(x.shape[axis]) + min(before[i], 0) + min(beyond[i], 0)
            x = cx.slice(x, axis, max(-before[i], 0), cut)
        sizes = [dim_of(x.shape[axis]) + max(before[axis - 2], 0) + max(beyond[axis - 2], 0) for axis in axes]
        at = [0, 0, *(max(b, 0) for b in before)]
        x = cx.emit("pad", (x,), x.dtype, (*x.shape[:2], *map(dim_or_int, sizes)), before=at, value=0.0)
        before = [0] * n
    batch = x.shape[0]
    out_shape = (batch, phases * outputs, *map(dim_or_int, counts))
    out = _convolution(cx, x, weight, bias, [1] * n, before, [1] * n, 1, dtype, out_shape)
    out = cx.reshape(out, (batch, *strides, outputs, *counts))
    # [batch, phases, O, places] -> [batch, O, places and phases in turn]
    out = cx.permute(out, [0, 1 + n, *(d for i in range(n) for d in (2 + n + i, 1 + i))])
    out = cx.reshape(out, (batch, outputs, *(dim_of(c) * s for c, s in zip(counts, strides, strict=True))))
    for i, axis in enumerate(axes):
        out = cx.slice(out, axis, paddings[i] - first[i] * strides[i], lengths[i])
    return out


def _spread(cx: Lowering, x: T, dim: int, stride: int) -> T:
    """``stride - 1`` zeros between the elements of ``dim``."""
    if stride == 1:
        return x
    size = x.shape[dim]
    column = cx.reshape(x, (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]))
    wide = (*x.shape[: dim + 1], stride, *x.shape[dim + 1 :])
    padded = cx.emit("pad", (column,), x.dtype, wide, before=[0] * (x.rank + 1), value=0.0)
    total = dim_or_int(dim_of(size) * stride)
    flat = cx.reshape(padded, (*x.shape[:dim], total, *x.shape[dim + 1 :]))
    return cx.slice(flat, dim, 0, dim_or_int(dim_of(total) - (stride - 1)))
