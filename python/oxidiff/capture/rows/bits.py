"""Numbers from their bits: floats of 8 bits, which the compiler does not have, and memory read as another type.

A value of floats of 8 bits is one of bytes. Checkpoints are stored in them, and in blocks of bytes that hold the scales of
the block: what reads such a weight turns bytes into numbers and goes on with these. They are computed from the bits by
ops on f32, exactly, in the loop that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..graph import Ref
from ..lowering import Lowering, T
from ..weights import FLOAT8
from .complex import BY_PARTS
from .registry import row

__all__ = ["FLOAT8_ROWS"]

FLOAT8_ROWS: dict[Any, Callable[..., Any]] = {}
"""ATen overload -> row, for ops that take or give floats of 8 bits."""

_F32 = torch.float32

for _row, _overloads in BY_PARTS.items():
    row(*(name if "." in name else f"{name}.default" for name in _overloads), table=FLOAT8_ROWS)(_row)


@row("to.dtype", "_to_copy.default", table=FLOAT8_ROWS)
def convert(cx: Lowering, x: T, *_: Any) -> T:
    source, result = _types(cx)
    if result is source:
        return x
    if result in FLOAT8:
        raise cx.unsupported(f"it rounds to {result}")
    return _of_bytes(cx, x, source)


@row("view.dtype", table=FLOAT8_ROWS)
def view(cx: Lowering, x: T, _: Any) -> T:
    source, result = _types(cx)
    if {source, result} - FLOAT8.keys() - {torch.uint8}:
        raise cx.unsupported("bits are read as another type")
    return x


@row("view.dtype")
def view_bits(cx: Lowering, x: T, dtype: torch.dtype) -> T:
    if dtype is x.dtype:
        return x
    if {dtype, x.dtype} == {torch.uint8, torch.int8}:
        # A conversion wraps.
        return cx.convert(x, dtype)
    if (x.dtype, dtype) == (torch.uint8, torch.float16):
        return _of_pairs(cx, x)
    raise cx.unsupported("bits are read as another type")


def _types(cx: Lowering) -> tuple[torch.dtype, torch.dtype]:
    """What the node being lowered reads and what it makes."""
    (operand,) = (a for a in cx.node.args[:1] if isinstance(a, Ref))
    return cx.graph.values[operand.value].dtype, cx.graph.values[cx.node.outputs[0]].dtype


def _of_bytes(cx: Lowering, x: T, dtype: torch.dtype) -> T:
    """The numbers of floats of 8 bits."""
    bits, bias = FLOAT8[dtype]
    sign, rest = _sign(cx, cx.convert(x, _F32))
    exponent, fraction = _divided(cx, rest, 2**bits)
    has_infinity = dtype is torch.float8_e5m2
    # Of e4m3fn the last number alone is NaN, and none is infinite.
    special = cx.binary("ge", rest, cx.full(0x7C if has_infinity else 0x7F, _F32), torch.bool)
    return _number(cx, sign, exponent, fraction, special, bits, bias, has_infinity)


def _of_pairs(cx: Lowering, x: T) -> T:
    """The numbers of 16 bits whose bytes are neighbours, the lower one first."""
    last = x.rank - 1
    low, high = (cx.convert(cx.slice(x, last, at, cx.result()[1][last], 2), _F32) for at in (0, 1))
    sign, rest = _sign(cx, high)
    exponent, upper = _divided(cx, rest, 4)
    fraction = cx.binary("add", cx.binary("mul", upper, cx.full(256, _F32), _F32), low, _F32)
    special = cx.binary("ge", rest, cx.full(0x7C, _F32), torch.bool)
    return _number(cx, sign, exponent, fraction, special, 10, 15, True)


def _sign(cx: Lowering, byte: T) -> tuple[T, T]:
    """Whether the upper bit is set, and the others."""
    is_negative = cx.binary("ge", byte, cx.full(128, _F32), torch.bool)
    upper = cx.where(is_negative, cx.full(128, _F32), cx.full(0, _F32), _F32)
    return is_negative, cx.binary("sub", byte, upper, _F32)


def _divided(cx: Lowering, x: T, by: int) -> tuple[T, T]:
    """Quotient and remainder by a power of two."""
    quotient = cx.unary("floor", cx.binary("mul", x, cx.full(1 / by, _F32), _F32))
    return quotient, cx.binary("sub", x, cx.binary("mul", quotient, cx.full(by, _F32), _F32), _F32)


def _number(cx: Lowering, sign: T, exponent: T, fraction: T, special: T, bits: int, bias: int, has_infinity: bool) -> T:
    """The float of a sign, an exponent and a fraction of so many bits."""

    def number(value: float) -> T:
        return cx.full(value, _F32)

    def times(x: T, y: T) -> T:
        return cx.binary("mul", x, y, _F32)

    def power_of_two(x: T) -> T:
        """Exact up to 2**15: exp is within 1e-6 of it, and takes a tenth of pow."""
        return cx.unary("round", cx.unary("exp", times(x, number(math.log(2)))))

    if bias < 8:
        power = power_of_two(exponent)
    else:
        is_large = cx.binary("ge", exponent, number(16), torch.bool)
        low = cx.binary("sub", exponent, cx.where(is_large, number(16), number(0), _F32), _F32)
        power = times(power_of_two(low), cx.where(is_large, number(2**16), number(1), _F32))
    whole = cx.binary("add", fraction, number(2**bits), _F32)
    normal = times(times(whole, power), number(2.0 ** -(bias + bits)))
    is_zero = cx.binary("eq", exponent, number(0), torch.bool)
    value = cx.where(is_zero, times(fraction, number(2.0 ** (1 - bias - bits))), normal, _F32)
    other = number(math.nan)
    if has_infinity:
        is_infinite = cx.binary("eq", fraction, number(0), torch.bool)
        other = cx.where(is_infinite, number(math.inf), other, _F32)
    value = cx.where(special, other, value, _F32)
    return cx.where(sign, cx.unary("neg", value), value, _F32)
