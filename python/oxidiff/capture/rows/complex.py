"""Complex numbers, which the compiler does not have: a value of them is two values of real numbers.

Rotary embeddings are what models use them for: pairs of channels become complex numbers, are multiplied by others of unit
length, and become pairs again. As two values that is what other models write in real numbers, and is compiled alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lowering import Complex, Lowering, T
from . import indexing, movement, pointwise
from .registry import row

__all__ = ["BY_PARTS", "COMPLEX_ROWS"]

COMPLEX_ROWS: dict[Any, Callable[..., Any]] = {}
"""ATen overload -> row, for ops that take or give complex numbers."""

BY_PARTS: dict[Callable[..., Any], tuple[str, ...]] = {
    movement.reshape: ("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "unsqueeze", "squeeze",
                       "squeeze.dim", "squeeze.dims", "view_as", "reshape_as", "ravel", "_reshape_alias", "atleast_1d",
                       "atleast_2d", "atleast_3d"),
    movement.same: ("alias", "detach", "contiguous", "clone", "lift_fresh"),
    movement.transpose: ("transpose.int", "swapaxes", "swapdims"),
    movement.t: ("t", "numpy_T", "mT"),
    movement.permute: ("permute",),
    movement.movedim: ("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist"),
    movement.expand: ("expand", "broadcast_to", "expand_as"),
    movement.broadcast_tensors: ("broadcast_tensors",),
    movement.slice_tensor: ("slice.Tensor",),
    movement.narrow: ("narrow",),
    movement.select: ("select.int",),
    movement.unbind: ("unbind.int",),
    movement.split: ("chunk", "unsafe_chunk", "split.Tensor", "split.sizes", "split_with_sizes", "unsafe_split.Tensor",
                     "unsafe_split_with_sizes", "tensor_split.sections", "tensor_split.indices"),
    movement.cat: ("cat", "concat", "concatenate"),
    movement.stack: ("stack",),
    movement.repeat: ("repeat", "tile"),
    movement.repeat_interleave: ("repeat_interleave.self_int",),
    movement.flip: ("flip", "fliplr", "flipud"),
    movement.roll: ("roll",),
    movement.slice_scatter: ("slice_scatter",),
    movement.select_scatter: ("select_scatter",),
    indexing.index_select: ("index_select",),
    indexing.gather: ("gather",),
    indexing.index_tensor: ("index.Tensor", "_unsafe_index.Tensor"),
}  # fmt: skip
"""Rows that do the same with the real parts as with the imaginary ones."""

_BY_INDEX = (indexing.index_select, indexing.gather, indexing.index_tensor)
"""Those that are told elements by tensors of integers."""


def complex_row(*overloads: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a row for complex numbers; as :func:`~oxidiff.capture.rows.registry.row`, ``.default`` left out."""
    return row(*(name if "." in name else f"{name}.default" for name in overloads), table=COMPLEX_ROWS)


def _by_parts(of_real: Callable[..., Any]) -> Callable[..., Any]:
    def lower(cx: Lowering, *arguments: Any) -> Any:
        real, imag = (
            of_real(cx, *(part(cx, argument, is_real) for argument in arguments)) for is_real in (True, False)
        )
        return Complex(real, imag) if isinstance(real, T) else list(map(Complex, real, imag))

    def part(cx: Lowering, argument: Any, is_real: bool) -> Any:
        if isinstance(argument, Complex):
            return argument.real if is_real else argument.imag
        if isinstance(argument, T) and not is_real and of_real not in _BY_INDEX:
            # Real numbers beside complex ones.
            return cx.full(0, argument.dtype, argument.shape)
        return tuple(part(cx, item, is_real) for item in argument) if isinstance(argument, tuple) else argument

    return lower


for _row, _overloads in BY_PARTS.items():
    complex_row(*_overloads)(_by_parts(_row))


@complex_row("pad_sequence")
def pad_sequence(
    cx: Lowering, sequences: Sequence[Complex], batch_first: bool = False, value: Any = 0.0, side: str = "right"
) -> Complex:
    real = movement.pad_sequence(cx, [x.real for x in sequences], batch_first, value, side)
    # What is padded with is a real number.
    return Complex(real, movement.pad_sequence(cx, [x.imag for x in sequences], batch_first, 0.0, side))


def _parts(cx: Lowering, x: Any) -> tuple[T, T | None]:
    """The two parts of an operand, converted to what the result is made of; no imaginary part of real numbers."""
    dtype = cx.result()[0]
    if isinstance(x, Complex):
        return cx.convert(x.real, dtype), cx.convert(x.imag, dtype)
    if isinstance(x, complex):
        return cx.full(x.real, dtype), cx.full(x.imag, dtype)
    return cx.convert(cx.scalar(x, dtype), dtype), None


def _zeros_if_none(cx: Lowering, x: T | None) -> T:
    return cx.full(0, cx.result()[0]) if x is None else x


@complex_row("view_as_complex")
def view_as_complex(cx: Lowering, x: T) -> Complex:
    return cx.pairs(x)


@complex_row("view_as_real")
def view_as_real(cx: Lowering, x: Complex) -> T:
    shape = (*x.shape, 1)
    return cx.cat([cx.reshape(x.real, shape), cx.reshape(x.imag, shape)], len(shape) - 1)


@complex_row("complex")
def join(cx: Lowering, real: T, imag: T) -> Complex:
    shape = cx.result()[1]
    return Complex(cx.expand(real, shape), cx.expand(imag, shape))


@complex_row("polar")
def polar(cx: Lowering, length: T, angle: T) -> Complex:
    dtype = cx.result()[0]
    real, imag = (cx.binary("mul", length, cx.unary(op, angle), dtype) for op in ("cos", "sin"))
    return Complex(real, imag)


@complex_row("real")
def real_part(cx: Lowering, x: Complex) -> T:
    return x.real


@complex_row("imag")
def imaginary_part(cx: Lowering, x: Complex) -> T:
    return x.imag


@complex_row("_conj", "conj", "conj_physical", "_conj_physical")
def conjugate(cx: Lowering, x: Complex) -> Complex:
    return Complex(x.real, cx.unary("neg", x.imag))


@complex_row("resolve_conj", "resolve_neg")
def resolved(cx: Lowering, x: Complex) -> Complex:
    return x


@complex_row("abs", "absolute")
def length(cx: Lowering, x: Complex) -> T:
    dtype = x.real.dtype
    # The larger part times the root of a number from 1 to 2: squares of the parts may be no numbers any more.
    real, imag = cx.unary("abs", x.real), cx.unary("abs", x.imag)
    large, small = cx.binary("maximum", real, imag, dtype), cx.binary("minimum", real, imag, dtype)
    is_nothing = cx.binary("eq", large, cx.full(0, dtype), torch.bool)
    slope = cx.binary("div", small, cx.where(is_nothing, cx.full(1, dtype), large, dtype), dtype)
    square = cx.binary("add", cx.binary("mul", slope, slope, dtype), cx.full(1, dtype), dtype)
    # Infinite parts have no slope, and one that is no number beside them does not matter.
    is_infinite = cx.binary(
        "logical_or", cx.unary("isinf", real, torch.bool), cx.unary("isinf", imag, torch.bool), torch.bool
    )
    finite = cx.binary("mul", large, cx.unary("sqrt", square), dtype)
    return cx.where(is_infinite, cx.full(math.inf, dtype), finite, dtype)


@complex_row("angle")
def angle(cx: Lowering, x: Complex) -> T:
    return cx.binary("atan2", x.imag, x.real, x.real.dtype)


@complex_row("neg", "negative")
def negative(cx: Lowering, x: Complex) -> Complex:
    return Complex(cx.unary("neg", x.real), cx.unary("neg", x.imag))


def _sum(cx: Lowering, x: Any, y: Any, alpha: Any, op: Callable[..., T]) -> Complex:
    (a, b), (c, d) = _parts(cx, x), _parts(cx, y)
    return Complex(op(cx, a, c, alpha), op(cx, _zeros_if_none(cx, b), _zeros_if_none(cx, d), alpha))


@complex_row("add.Tensor", "add.Scalar")
def add(cx: Lowering, x: Any, y: Any, alpha: Any = 1) -> Complex:
    return _stretched(cx, _sum(cx, x, y, alpha, pointwise.add))


@complex_row("sub.Tensor", "sub.Scalar", "subtract.Tensor", "subtract.Scalar")
def subtract(cx: Lowering, x: Any, y: Any, alpha: Any = 1) -> Complex:
    return _stretched(cx, _sum(cx, x, y, alpha, pointwise.sub))


def _stretched(cx: Lowering, x: Complex) -> Complex:
    """Both parts in the shape of the result: an operand of real numbers leaves one as it was."""
    shape = cx.result()[1]
    return Complex(cx.expand(x.real, shape), cx.expand(x.imag, shape))


@complex_row("mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar")
def multiply(cx: Lowering, x: Any, y: Any) -> Complex:
    dtype = cx.result()[0]
    (a, b), (c, d) = _parts(cx, x), _parts(cx, y)

    def product(p: T, q: T) -> T:
        return cx.binary("mul", p, q, dtype)

    if b is None or d is None:
        scale, (real, imag) = (a, (c, d)) if b is None else (c, (a, b))
        assert imag is not None, "one of them is complex"
        return Complex(product(scale, real), product(scale, imag))
    real = cx.binary("sub", product(a, c), product(b, d), dtype)
    return Complex(real, cx.binary("add", product(a, d), product(b, c), dtype))


@complex_row("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar", "divide.Tensor", "divide.Scalar")
def divide(cx: Lowering, x: Any, y: Any) -> Complex:
    dtype = cx.result()[0]
    (a, b), (c, d) = _parts(cx, x), _parts(cx, y)
    if d is not None:
        raise cx.unsupported("dividing by complex numbers is not supported")
    return Complex(cx.binary("div", a, c, dtype), cx.binary("div", _zeros_if_none(cx, b), c, dtype))


@complex_row("exp")
def exponential(cx: Lowering, x: Complex) -> Complex:
    return polar(cx, cx.unary("exp", x.real), x.imag)  # type: ignore[no-any-return]


@complex_row("where.self")
def where(cx: Lowering, condition: T, x: Any, y: Any) -> Complex:
    dtype = cx.result()[0]
    (a, b), (c, d) = _parts(cx, x), _parts(cx, y)
    imag = cx.where(condition, _zeros_if_none(cx, b), _zeros_if_none(cx, d), dtype)
    return _stretched(cx, Complex(cx.where(condition, a, c, dtype), imag))


@complex_row("to.dtype", "_to_copy")
def convert(cx: Lowering, x: Any, *_: Any) -> Complex:
    real, imag = _parts(cx, x)
    return Complex(real, cx.full(0, real.dtype, real.shape) if imag is None else imag)


@complex_row("constant_pad_nd")
def constant_pad(cx: Lowering, x: Complex, pad: Sequence[Any], value: Any = 0) -> Complex:
    return pad_default(cx, x, pad, "constant", value)  # type: ignore[no-any-return]


@complex_row("pad")
def pad_default(cx: Lowering, x: Complex, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Complex:
    if isinstance(value, complex):
        raise cx.unsupported("padding with a complex number is not supported")
    return Complex(movement.pad_default(cx, x.real, pad, mode, value), movement.pad_default(cx, x.imag, pad, mode))


@complex_row("copy")
def copy(cx: Lowering, x: Complex, source: Any, *_: Any) -> Complex:
    return _stretched(cx, convert(cx, source))


@complex_row("zeros", "zeros_like", "new_zeros")
def zeros(cx: Lowering, *_: Any) -> Complex:
    dtype, shape = cx.result()
    return Complex(cx.full(0, dtype, shape), cx.full(0, dtype, shape))


@complex_row("ones", "ones_like", "new_ones")
def ones(cx: Lowering, *_: Any) -> Complex:
    dtype, shape = cx.result()
    return Complex(cx.full(1, dtype, shape), cx.full(0, dtype, shape))
