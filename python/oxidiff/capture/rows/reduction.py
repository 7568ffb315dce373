"""Reductions, running sums, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dim import Dim, Size, dim_of, dim_or_int
from ..lowering import Lowering, T, opmath
from .registry import row


def _dims(x: T, dim: Any) -> list[int]:
    if dim is None or (not isinstance(dim, int) and not dim):
        return list(range(x.rank))
    return [d % max(x.rank, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: T, dims: Sequence[int]) -> Size:
    total: Dim = dim_of(1)
    for d in dims:
        total = total * x.shape[d]
    return dim_or_int(total)


def _reduce(cx: Lowering, op: str, x: T, dim: Any, keepdim: bool, dtype: torch.dtype) -> T:
    dims = _dims(x, dim)
    if not x.rank:
        return cx.convert(x, dtype)
    return cx.reduce(op, x, dims, keepdim, dtype)


def _two_forms(name: str, op: str) -> None:
    @row(f"{name}.default", f"{name}.dim", f"{name}.dims", f"{name}.dim_IntList", f"{name}.dim_int")
    def lower_reduction(cx: Lowering, x: T, *rest: Any) -> T:
        takes_dims = "dim" in cx.node.op._overloadname
        dim, keepdim = (rest[0], bool(rest[1])) if takes_dims else (None, False)
        dtype = cx.result()[0]
        if op in ("any", "all"):
            # Of bytes, bytes.
            return cx.convert(_reduce(cx, op, x, dim, keepdim, torch.bool), dtype)
        if not dtype.is_floating_point and x.dtype.is_floating_point:
            x = cx.convert(x, dtype)
        if dtype is torch.bool:
            # Flags that are added, and multiplied.
            return _reduce(cx, "all" if op == "prod" else "any", cx.convert(x, dtype), dim, keepdim, dtype)
        return _reduce(cx, op, x, dim, keepdim, dtype)


for _name, _op in (("sum", "sum"), ("mean", "mean"), ("prod", "prod"), ("any", "any"), ("all", "all")):
    _two_forms(_name, _op)


@row("amax.default")
def amax(cx: Lowering, x: T, dim: Any = (), keepdim: bool = False) -> T:
    return _reduce(cx, "amax", x, dim, keepdim, x.dtype)


@row("amin.default")
def amin(cx: Lowering, x: T, dim: Any = (), keepdim: bool = False) -> T:
    return _reduce(cx, "amin", x, dim, keepdim, x.dtype)


@row("max.default")
def max_all(cx: Lowering, x: T) -> T:
    return _reduce(cx, "amax", x, None, False, x.dtype)


@row("min.default")
def min_all(cx: Lowering, x: T) -> T:
    return _reduce(cx, "amin", x, None, False, x.dtype)


@row("max.dim", "min.dim")
def extreme_dim(cx: Lowering, x: T, dim: int, keepdim: bool = False) -> tuple[T, T]:
    value, index = ("amax", "argmax") if cx.node.op._schema.name == "aten::max" else ("amin", "argmin")
    return _reduce(cx, value, x, dim, keepdim, x.dtype), _argument(cx, index, x, dim, keepdim)


@row("argmax.default")
def argmax(cx: Lowering, x: T, dim: int | None = None, keepdim: bool = False) -> T:
    return _argument(cx, "argmax", x, dim, keepdim)


@row("argmin.default")
def argmin(cx: Lowering, x: T, dim: int | None = None, keepdim: bool = False) -> T:
    return _argument(cx, "argmin", x, dim, keepdim)


def _argument(cx: Lowering, op: str, x: T, dim: int | None, keepdim: bool) -> T:
    x = cx.convert(x, torch.uint8) if x.dtype is torch.bool else x
    if dim is None:
        flat = cx.reshape(x, (_count(x, range(x.rank)),))
        return cx.reshape(cx.reduce(op, flat, [0], False, torch.int64), [1] * x.rank if keepdim else ())
    if not x.rank:
        return cx.full(0, torch.int64)
    return cx.reduce(op, x, [dim], keepdim, torch.int64)


@row("cumsum.default")
def cumsum(cx: Lowering, x: T, dim: int, dtype: torch.dtype | None = None) -> T:
    result = cx.result()[0]
    x = cx.convert(x, result) if x.dtype.is_floating_point and not result.is_floating_point else x
    return cx.emit("cumsum", (x,), result, x.shape, dim=dim % x.rank) if x.rank else cx.convert(x, result)


_LONG = 4096
"""Elements from which on nothing is computed along them in steps of doubled length."""

Running = Sequence[T]
"""What a running result is made of."""


def _running(cx: Lowering, parts: Running, dim: int, combined: Callable[[Running, Running], Running]) -> Running:
    """A result for each place and those before it: of one, two, four, ... at a time. ``combined`` takes that of some places
    and of those right behind them."""
    size = parts[0].shape[dim]
    if not isinstance(size, int) or not 0 < size <= _LONG:
        raise cx.unsupported(
            f"running products and extremes of {size} elements, other than a known number up to {_LONG}"
        )
    step = 1
    while step < size:
        before = [cx.slice(part, dim, 0, size - step) for part in parts]
        behind = [cx.slice(part, dim, step, size - step) for part in parts]
        found = combined(before, behind)
        parts = [cx.cat([cx.slice(a, dim, 0, step), b], dim) for a, b in zip(parts, found, strict=True)]
        step *= 2
    return parts


@row("cumprod.default")
def cumprod(cx: Lowering, x: T, dim: int, dtype: torch.dtype | None = None) -> T:
    result = cx.result()[0]
    wide = opmath(result)
    x = cx.convert(cx.convert(x, result), wide)
    if not x.rank:
        return cx.convert(x, result)
    (found,) = _running(cx, [x], dim % x.rank, lambda a, b: [cx.binary("mul", a[0], b[0], wide)])
    return cx.convert(found, result)


@row("cummax.default", "cummin.default")
def cumulative_extreme(cx: Lowering, x: T, dim: int) -> tuple[T, T]:
    """With the place of the last of equals, as which all count that are no numbers."""
    if not x.rank:
        return x, cx.full(0, torch.int64)
    if x.dtype is torch.bool:
        raise cx.unsupported("running extremes of flags")
    dim %= x.rank
    is_farther = "ge" if cx.node.op._schema.name == "aten::cummax" else "le"

    def later(before: Running, behind: Running) -> Running:
        is_it = cx.binary(is_farther, behind[0], before[0], torch.bool)
        if x.dtype.is_floating_point:
            a, b = (cx.unary("isnan", part[0], torch.bool) for part in (before, behind))
            is_it = cx.binary("logical_or", cx.where(a, cx.full(0, torch.bool), is_it, torch.bool), b, torch.bool)
        return [cx.where(is_it, b, a, a.dtype) for a, b in zip(before, behind, strict=True)]

    place = cx.reshape(cx.arange(x.shape[dim], torch.int64), [x.shape[dim] if d == dim else 1 for d in range(x.rank)])
    values, places = _running(cx, [x, cx.expand(place, x.shape)], dim, later)
    return values, places


@row("bucketize.Tensor")
def bucketize(cx: Lowering, x: T, edges: T, out_int32: bool = False, right: bool = False) -> T:
    return _bucket(cx, x, edges, right)


@row("searchsorted.Tensor")
def searchsorted(
    cx: Lowering, edges: T, x: T, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> T:
    if sorter is not None:
        raise cx.unsupported("a sorter")
    return _bucket(cx, x, edges, right or side == "right")


def _bucket(cx: Lowering, x: T, edges: T, right: bool) -> T:
    """How many of sorted edges are below: behind all of them what is no number. Bits of that are found one by one."""
    size, whole = edges.shape[-1], torch.int64
    if edges.rank != 1 or not isinstance(size, int) or not size or torch.bool in (x.dtype, edges.dtype):
        raise cx.unsupported(f"a search among {size} edges, other than a row of a known number")
    found = cx.full(0, whole, x.shape)
    for bit in range(size.bit_length() - 1, -1, -1):
        more = cx.binary("add", found, cx.full(1 << bit, whole), whole)
        last = cx.binary("sub", cx.binary("minimum", more, cx.full(size, whole), whole), cx.full(1, whole), whole)
        edge = cx.emit("index_select", (edges, last), edges.dtype, x.shape, dim=0)
        is_behind = cx.unary("logical_not", cx.binary("gt" if right else "ge", edge, x, torch.bool), torch.bool)
        is_there = cx.binary("le", more, cx.full(size, whole), torch.bool)
        found = cx.where(cx.binary("logical_and", is_behind, is_there, torch.bool), more, found, whole)
    return found


@row("softmax.int", "_softmax.default")
def softmax(cx: Lowering, x: T, dim: int, dtype: Any = None) -> T:
    result = cx.result()[0]
    if x.rank == 0:
        return cx.full(1, result)
    # As torch, which converts first.
    x = cx.convert(x, result)
    return cx.emit("softmax", (x,), result, x.shape, dim=dim % x.rank)


@row("_safe_softmax.default")
def safe_softmax(cx: Lowering, x: T, dim: int, dtype: Any = None) -> T:
    found, result = softmax(cx, x, dim, dtype), cx.result()[0]
    top = cx.reduce("amax", x, [dim % x.rank], True, x.dtype) if x.rank else x
    is_nothing = cx.binary("eq", top, cx.full(-math.inf, x.dtype), torch.bool)
    return cx.where(is_nothing, cx.full(0, result), found, result)


@row("log_softmax.int", "_log_softmax.default")
def log_softmax(cx: Lowering, x: T, dim: int, dtype: Any = None) -> T:
    result = cx.result()[0]
    wide = opmath(result)
    top = cx.reduce("amax", x, [dim], True, x.dtype)
    shifted = cx.binary("sub", x, top, wide)
    total = cx.unary("log", cx.reduce("sum", cx.unary("exp", shifted), [dim], True, wide))
    return cx.binary("sub", shifted, total, result)


@row("logsumexp.default")
def logsumexp(cx: Lowering, x: T, dim: Any, keepdim: bool = False) -> T:
    dtype, shape = cx.result()
    wide = opmath(dtype)
    dims = _dims(x, dim)
    top = cx.reduce("amax", x, dims, True, x.dtype)
    # Where all are infinite, the difference must not be.
    finite = cx.where(cx.unary("isinf", top, torch.bool), cx.full(0, x.dtype), top, x.dtype)
    total = cx.reduce("sum", cx.unary("exp", cx.binary("sub", x, finite, wide)), dims, True, wide)
    return cx.reshape(cx.binary("add", cx.unary("log", total), finite, dtype), shape)


# -- moments ---------------------------------------------------------------------------------------------------------------


def _moments(cx: Lowering, x: T, dim: Any, correction: Any, keepdim: bool, dtype: torch.dtype) -> tuple[T, T]:
    """Variance and mean, in the op-math type."""
    wide = opmath(dtype)
    dims = _dims(x, dim)
    mean = cx.reduce("mean", x, dims, True, wide)
    centred = cx.binary("sub", x, mean, wide)
    total = cx.reduce("sum", cx.binary("mul", centred, centred, wide), dims, keepdim, wide)
    count, correction = _count(x, dims), 1 if correction is None else correction
    if isinstance(correction, Dim) or correction != int(correction):
        exact = torch.float64
        freedom = cx.binary("sub", cx.scalar(count, torch.int64), cx.scalar(correction, exact), exact)
        freedom = cx.binary("maximum", freedom, cx.full(0, exact), exact)
    else:
        whole = cx.scalar(dim_or_int(dim_of(count) - int(correction)), torch.int64)
        freedom = cx.binary("maximum", whole, cx.full(0, torch.int64), torch.int64)
    variance = cx.binary("div", total, freedom, wide)
    if not keepdim:
        mean = cx.reshape(mean, variance.shape)
    return variance, mean


def _correction(unbiased: Any) -> int:
    return 1 if unbiased is None or unbiased is True else 0


@row("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def var_correction(cx: Lowering, x: T, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return _variance(cx, x, dim, 1 if correction is None else correction, keepdim)


@row("var.dim", "std.dim", "var_mean.dim", "std_mean.dim")
def var_dim(cx: Lowering, x: T, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _variance(cx, x, dim, _correction(unbiased), keepdim)


@row("var.default", "std.default", "var_mean.default", "std_mean.default")
def var_all(cx: Lowering, x: T, unbiased: bool = True) -> Any:
    return _variance(cx, x, None, _correction(unbiased), False)


def _variance(cx: Lowering, x: T, dim: Any, correction: Any, keepdim: bool) -> Any:
    dtype = cx.result()[0]
    name = cx.node.op._schema.name
    variance, mean = _moments(cx, x, dim, correction, keepdim, dtype)
    spread = cx.unary("sqrt", variance) if "std" in name else variance
    spread = cx.convert(spread, dtype)
    return (spread, cx.convert(mean, dtype)) if "_mean" in name else spread


@row("linalg_vector_norm.default")
def vector_norm(cx: Lowering, x: T, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> T:
    return _norm(cx, x, order, dim, keepdim)


@row("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar")
def norm(cx: Lowering, x: T, order: Any = 2, dim: Any = None, keepdim: bool = False, *_: Any) -> T:
    return _norm(cx, x, 2 if order is None else order, dim, keepdim)


@row("_weight_norm.default")
def weight_norm(cx: Lowering, v: T, g: T, dim: int = 0) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    # -1 stands for none: one norm of the whole tensor.
    dims = [i for i in range(v.rank) if dim == -1 or i != dim % v.rank]
    return cx.binary("mul", v, cx.binary("div", g, _euclidean(cx, v, dims, True, wide), wide), dtype)


def _euclidean(cx: Lowering, x: T, dim: Any, keepdim: bool, dtype: torch.dtype) -> T:
    """The root of the sum of squares."""
    wide = opmath(dtype)
    total = _reduce(cx, "sum", cx.binary("mul", x, x, wide), dim, keepdim, wide)
    return cx.unary("sqrt", total, dtype)


def _norm(cx: Lowering, x: T, order: Any, dim: Any, keepdim: bool) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    if order == 2:
        return _euclidean(cx, x, dim, keepdim, dtype)
    if order == 0:
        return _reduce(cx, "sum", cx.binary("ne", x, cx.full(0, x.dtype), torch.bool), dim, keepdim, dtype)
    magnitude = cx.unary("abs", x)
    if order == 1:
        return _reduce(cx, "sum", magnitude, dim, keepdim, dtype)
    if order in (float("inf"), float("-inf")):
        return cx.convert(_reduce(cx, "amax" if order > 0 else "amin", magnitude, dim, keepdim, x.dtype), dtype)
    power = cx.binary("pow", cx.convert(magnitude, wide), cx.scalar(order, wide), wide)
    total = _reduce(cx, "sum", power, dim, keepdim, wide)
    return cx.binary("pow", total, cx.scalar(1 / order, wide), dtype)
