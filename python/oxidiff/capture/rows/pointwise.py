"""Pointwise ops.

A composition of several ops stands for one ATen kernel, which computes in the op-math type (f32 for 16-bit floats) and
rounds once: so do the intermediate values here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..dim import Dim
from ..lowering import Lowering, T, opmath, wrapped
from .registry import row

_UNARY = {
    "neg": "neg", "abs": "abs", "sign": "sign", "sgn": "sign", "exp": "exp", "log": "log", "log2": "log2", "log10": "log10",
    "sin": "sin", "cos": "cos", "tanh": "tanh", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal",
    "sigmoid": "sigmoid", "silu": "silu", "relu": "relu", "erf": "erf", "special_erf": "erf", "floor": "floor",
    "ceil": "ceil", "round": "round", "trunc": "trunc", "fix": "trunc", "logical_not": "logical_not",
    "bitwise_not": "bitwise_not", "isnan": "isnan", "isinf": "isinf", "absolute": "abs", "negative": "neg",
    "special_expit": "sigmoid",
}  # fmt: skip

_COMPARISONS = {
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "not_equal": "ne", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip

_BITWISE = {
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
}  # fmt: skip

_SHIFTS = {
    "bitwise_left_shift": "bitwise_left_shift", "bitwise_right_shift": "bitwise_right_shift",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
}  # fmt: skip


def _register_tables() -> None:
    for name, op in _UNARY.items():
        row(f"{name}.default")(_unary_row(op))
    for name, op in _COMPARISONS.items():
        row(f"{name}.Tensor", f"{name}.Scalar")(_comparison_row(op))
    for name, op in _BITWISE.items():
        row(f"{name}.Tensor", f"{name}.Scalar")(_binary_row(op))
    for name, op in _SHIFTS.items():
        row(f"{name}.Tensor", f"{name}.Scalar", f"{name}.Tensor_Scalar")(_shift_row(op))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "remainder"):
        row(f"{name}.Scalar_Tensor")(_binary_row(name))
    for name in ("logical_and", "logical_or", "logical_xor"):
        row(f"{name}.default")(_binary_row(name))
    for name, op in (("maximum", "maximum"), ("minimum", "minimum"), ("atan2", "atan2"), ("arctan2", "atan2")):
        row(f"{name}.default")(_binary_row(op))
    for name, op in (("max.other", "maximum"), ("min.other", "minimum")):
        row(name)(_binary_row(op))
    for name, op in (("floor_divide", "floor_divide"), ("remainder", "remainder")):
        row(f"{name}.default", f"{name}.Tensor", f"{name}.Scalar")(_binary_row(op))


def _unary_row(op: str) -> Callable[..., T]:
    def lower_unary(cx: Lowering, x: T) -> T:
        return cx.unary(op, x, cx.result()[0])

    return lower_unary


def _binary_row(op: str) -> Callable[..., T]:
    def lower_binary(cx: Lowering, x: Any, y: Any) -> T:
        # One of them is a tensor; a number in front is that of `5 % x`.
        dtype = x.dtype if isinstance(x, T) else y.dtype
        return cx.binary(op, cx.scalar(x, dtype), cx.scalar(y, dtype), cx.result()[0])

    return lower_binary


def _shift_row(op: str) -> Callable[..., T]:
    def lower_shift(cx: Lowering, x: T, bits: Any) -> T:
        dtype = cx.result()[0]
        if dtype.is_floating_point:
            raise cx.unsupported("a shift of floats")
        return cx.binary(op, x, cx.scalar(bits, x.dtype), dtype)

    return lower_shift


def _comparison_row(op: str) -> Callable[..., T]:
    def lower_comparison(cx: Lowering, x: T, y: Any) -> T:
        if isinstance(y, T):
            return cx.binary(op, *_narrowed(cx, x, y), torch.bool)
        return cx.binary(op, x, _rounded(cx, y, x.dtype), torch.bool)

    return lower_comparison


def _narrowed(cx: Lowering, x: T, y: T) -> tuple[T, T]:
    """Operands of a comparison, rounded where the type that ATen compares in is narrower: that of tensors which have
    dimensions beside one which has none, that of 16-bit floats beside integers."""
    common = torch.result_type(*(torch.empty([1] * t.rank, dtype=t.dtype, device="meta") for t in (x, y)))
    first, second = (cx.convert(t, common) if common.itemsize < t.dtype.itemsize else t for t in (x, y))
    return first, second


def _rounded(cx: Lowering, y: Any, dtype: torch.dtype) -> T:
    """A scalar converted to the tensor's type, as ATen does where it only compares or selects."""
    if isinstance(y, T):
        return y
    if dtype is torch.bool and not isinstance(y, bool):
        return cx.scalar(y, dtype)
    if isinstance(y, float) and not dtype.is_floating_point:
        return cx.full(y, torch.float32)
    if isinstance(y, Dim):
        number = cx.number(y)
        is_real = number.dtype.is_floating_point and not dtype.is_floating_point
        return cx.convert(number, torch.float32 if is_real else dtype)
    return cx.full(wrapped(y, dtype), dtype)


_register_tables()


def _scaled(cx: Lowering, y: Any, alpha: Any, dtype: torch.dtype) -> T:
    value = cx.scalar(y, dtype)
    if isinstance(alpha, (int, float)) and alpha == 1:
        return value
    return cx.binary("mul", value, cx.scalar(alpha, dtype), opmath(dtype))


@row("add.Tensor", "add.Scalar")
def add(cx: Lowering, x: Any, y: Any, alpha: Any = 1) -> T:
    dtype = cx.result()[0]
    return cx.binary("add", cx.scalar(x, dtype), _scaled(cx, y, alpha, dtype), dtype)


@row("sub.Tensor", "sub.Scalar", "subtract.Tensor", "subtract.Scalar")
def sub(cx: Lowering, x: Any, y: Any, alpha: Any = 1) -> T:
    dtype = cx.result()[0]
    return cx.binary("sub", cx.scalar(x, dtype), _scaled(cx, y, alpha, dtype), dtype)


@row("rsub.Tensor", "rsub.Scalar")
def rsub(cx: Lowering, x: T, y: Any, alpha: Any = 1) -> T:
    if x.dtype is torch.bool or (isinstance(y, T) and y.dtype is torch.bool):
        raise cx.unsupported("truth values are not subtracted")
    dtype = cx.result()[0]
    return cx.binary("sub", cx.scalar(y, dtype), _scaled(cx, x, alpha, dtype), dtype)


@row("mul.Tensor", "mul.Scalar", "multiply.Tensor", "multiply.Scalar")
def mul(cx: Lowering, x: Any, y: Any) -> T:
    dtype = cx.result()[0]
    return cx.binary("mul", cx.scalar(x, dtype), cx.scalar(y, dtype), dtype)


@row("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar", "divide.Tensor", "divide.Scalar")
def div(cx: Lowering, x: Any, y: Any) -> T:
    dtype = cx.result()[0]
    return cx.binary("div", cx.scalar(x, dtype), cx.scalar(y, dtype), dtype)


@row("div.Tensor_mode", "div.Scalar_mode", "divide.Tensor_mode")
def div_mode(cx: Lowering, first: Any, y: Any, rounding_mode: str | None = None) -> T:
    dtype = cx.result()[0]
    x, divisor = cx.scalar(first, dtype), cx.scalar(y, dtype)
    if rounding_mode is None:
        return cx.binary("div", x, divisor, dtype)
    if rounding_mode == "floor":
        return cx.binary("floor_divide", x, divisor, dtype)
    if dtype.is_floating_point:
        return cx.unary("trunc", cx.binary("div", x, divisor, opmath(dtype)), dtype)
    # Toward zero: the floor of the magnitudes, with the sign of the product.
    magnitude = cx.binary("floor_divide", cx.unary("abs", x, dtype), cx.unary("abs", divisor, dtype), dtype)
    sign = cx.binary("mul", cx.unary("sign", x, dtype), cx.unary("sign", divisor, dtype), dtype)
    return cx.binary("mul", magnitude, sign, dtype)


@row("fmod.Tensor", "fmod.Scalar")
def fmod(cx: Lowering, x: T, y: Any) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    divisor = cx.scalar(y, dtype)
    # The sign is the dividend's: the remainder of the magnitudes.
    magnitude = cx.binary("remainder", cx.unary("abs", x, wide), cx.unary("abs", divisor, wide), wide)
    negative = cx.binary("lt", x, cx.full(0, x.dtype), torch.bool)
    signed = cx.where(negative, cx.unary("neg", magnitude), magnitude, wide)
    if not dtype.is_floating_point:
        return cx.convert(signed, dtype)
    # What is its own remainder is kept: the sign of a zero is not seen in comparing it.
    return cx.where(cx.binary("eq", x, signed, torch.bool), x, signed, dtype)


@row("pow.Tensor_Scalar")
def pow_scalar(cx: Lowering, x: T, exponent: Any) -> T:
    dtype = cx.result()[0]
    if exponent == 2:
        return cx.binary("mul", x, x, dtype)
    if exponent == 1:
        return cx.convert(x, dtype)
    if dtype.is_floating_point:
        if exponent == 3:
            return cx.binary("mul", cx.binary("mul", x, x, opmath(dtype)), x, dtype)
        for known, op in ((0.5, "sqrt"), (-0.5, "rsqrt"), (-1, "reciprocal")):
            if exponent == known:
                return cx.unary(op, x, dtype)
    return cx.binary("pow", x, cx.scalar(exponent, dtype), dtype)


@row("pow.Tensor_Tensor", "pow.Scalar", "float_power.Tensor_Scalar", "float_power.Tensor_Tensor", "float_power.Scalar")
def power(cx: Lowering, base: Any, exponent: Any) -> T:
    dtype = cx.result()[0]
    return cx.binary("pow", cx.scalar(base, dtype), cx.scalar(exponent, dtype), dtype)


@row("square.default")
def square(cx: Lowering, x: T) -> T:
    return cx.binary("mul", x, x, cx.result()[0])


@row("gelu.default")
def gelu(cx: Lowering, x: T, approximate: str = "none") -> T:
    return cx.unary("gelu" if approximate == "none" else "gelu_tanh", x)


@row("isfinite.default")
def isfinite(cx: Lowering, x: T) -> T:
    bad = cx.binary("logical_or", cx.unary("isnan", x, torch.bool), cx.unary("isinf", x, torch.bool), torch.bool)
    return cx.unary("logical_not", bad, torch.bool)


@row("nan_to_num.default")
def nan_to_num(cx: Lowering, x: T, nan: Any = None, posinf: Any = None, neginf: Any = None) -> T:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    zero = cx.full(0, x.dtype)
    out = cx.where(cx.unary("isnan", x, torch.bool), _rounded(cx, 0.0 if nan is None else nan, x.dtype), x, x.dtype)
    infinite = cx.unary("isinf", x, torch.bool)
    high = cx.full(limits.max if posinf is None else posinf, x.dtype)
    low = cx.full(limits.min if neginf is None else neginf, x.dtype)
    bound = cx.where(cx.binary("gt", x, zero, torch.bool), high, low, x.dtype)
    return cx.where(infinite, bound, out, x.dtype)


@row("tan.default")
def tan(cx: Lowering, x: T) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    return cx.binary("div", cx.unary("sin", x, wide), cx.unary("cos", x, wide), dtype)


@row("log1p.default")
def log1p(cx: Lowering, x: T) -> T:
    # log(1 + x) loses what 1 + x rounds away of x; the quotient gives it back.
    dtype = cx.result()[0]
    wide = opmath(dtype)
    one = cx.full(1, wide)
    u = cx.binary("add", x, one, wide)
    rounded = cx.binary("sub", u, one, wide)
    log = cx.unary("log", u)
    exact = cx.binary("eq", rounded, cx.full(0, wide), torch.bool)
    ratio = cx.binary("mul", log, cx.binary("div", x, rounded, wide), wide)
    finite = cx.where(cx.unary("isinf", u, torch.bool), log, ratio, wide)
    return cx.convert(cx.where(exact, x, finite, wide), dtype)


@row("exp2.default")
def exp2(cx: Lowering, x: T) -> T:
    dtype = cx.result()[0]
    return cx.binary("pow", cx.full(2, opmath(dtype)), x, dtype)


@row("expm1.default")
def expm1(cx: Lowering, x: T) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    large = cx.binary("sub", cx.unary("exp", x, wide), cx.full(1, wide), wide)
    big = cx.binary("gt", cx.unary("abs", x, wide), cx.full(1, wide), torch.bool)
    return cx.where(big, large, _expm1(cx, x, wide), dtype)


def _expm1(cx: Lowering, x: T, wide: torch.dtype) -> T:
    """``exp(x) - 1`` without cancellation near 0: ``2 t / (1 - t)`` with ``t = tanh(x / 2)``; not for large x."""
    t = cx.unary("tanh", cx.binary("mul", x, cx.full(0.5, wide), wide))
    return cx.binary("div", cx.binary("add", t, t, wide), cx.binary("sub", cx.full(1, wide), t, wide), wide)


@row("elu.default")
def elu(cx: Lowering, x: T, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> T:
    wide = opmath(x.dtype)
    negative = cx.binary(
        "mul", _expm1(cx, _times(cx, x, input_scale, wide), wide), cx.scalar(_product(alpha, scale), wide), wide
    )
    return cx.where(cx.binary("gt", x, cx.full(0, x.dtype), torch.bool), _times(cx, x, scale, wide), negative, x.dtype)


def _product(a: Any, b: Any) -> Any:
    return float(a) * float(b)


def _times(cx: Lowering, x: T, by: Any, wide: torch.dtype) -> T:
    return x if by == 1 else cx.binary("mul", x, cx.scalar(by, wide), wide)


@row("selu.default")
def selu(cx: Lowering, x: T) -> T:
    return elu(cx, x, 1.6732632423543772, 1.0507009873554805)


@row("celu.default")
def celu(cx: Lowering, x: T, alpha: Any = 1.0) -> T:
    return elu(cx, x, alpha, 1, 1 / float(alpha))


@row("leaky_relu.default")
def leaky_relu(cx: Lowering, x: T, negative_slope: Any = 0.01) -> T:
    scaled = cx.binary("mul", x, cx.scalar(negative_slope, x.dtype), x.dtype)
    return cx.where(cx.binary("gt", x, cx.full(0, x.dtype), torch.bool), x, scaled, x.dtype)


@row("_prelu_kernel.default", "prelu.default")
def prelu(cx: Lowering, x: T, weight: T) -> T:
    if weight.rank == 1 and x.rank > 1:
        weight = cx.reshape(weight, [weight.shape[0] if i == 1 else 1 for i in range(x.rank)])
    scaled = cx.binary("mul", x, weight, x.dtype)
    return cx.where(cx.binary("gt", x, cx.full(0, x.dtype), torch.bool), x, scaled, x.dtype)


@row("softplus.default")
def softplus(cx: Lowering, x: T, beta: Any = 1, threshold: Any = 20) -> T:
    if (beta, threshold) == (1, 20):
        return cx.unary("softplus", x)
    wide = opmath(x.dtype)
    scaled = cx.binary("mul", x, cx.scalar(beta, wide), wide)
    curved = cx.binary("div", cx.unary("softplus", scaled), cx.scalar(beta, wide), wide)
    return cx.where(cx.binary("gt", scaled, cx.scalar(threshold, wide), torch.bool), x, curved, x.dtype)


@row("log_sigmoid.default")
def log_sigmoid(cx: Lowering, x: T) -> T:
    wide = opmath(x.dtype)
    return cx.unary("neg", cx.unary("softplus", cx.unary("neg", x, wide)), x.dtype)


@row("mish.default")
def mish(cx: Lowering, x: T) -> T:
    wide = opmath(x.dtype)
    return cx.binary("mul", x, cx.unary("tanh", cx.unary("softplus", x, wide)), x.dtype)


@functools.cache
def _ignores_bounds() -> bool:
    """Whether torch leaves out bounds that the type does not reach, as 2.15 does; 2.11 takes -1 for the byte 255."""
    return torch.zeros(1, dtype=torch.uint8).clamp(min=-1).item() == 0


def _clamped(cx: Lowering, x: T, low: Any, high: Any, dtype: torch.dtype) -> T:
    if not (dtype.is_floating_point or dtype is torch.bool) and _ignores_bounds():
        info = torch.iinfo(dtype)
        if (isinstance(low, int) and low > info.max) or (isinstance(high, int) and high < info.min):
            raise cx.unsupported(f"clamp to a bound outside of {dtype}")
        low = None if isinstance(low, int) and low < info.min else low
        high = None if isinstance(high, int) and high > info.max else high
    if low is not None:
        x = cx.binary("maximum", x, _rounded(cx, low, dtype), dtype)
    if high is not None:
        x = cx.binary("minimum", x, _rounded(cx, high, dtype), dtype)
    return cx.convert(x, dtype)


@row("clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor", "hardtanh.default")
def clamp(cx: Lowering, x: T, low: Any = None, high: Any = None) -> T:
    return _clamped(cx, x, low, high, cx.result()[0])


@row("clamp_min.default", "clamp_min.Tensor")
def clamp_min(cx: Lowering, x: T, low: Any) -> T:
    return _clamped(cx, x, low, None, cx.result()[0])


@row("clamp_max.default", "clamp_max.Tensor")
def clamp_max(cx: Lowering, x: T, high: Any) -> T:
    return _clamped(cx, x, None, high, cx.result()[0])


@row("relu6.default")
def relu6(cx: Lowering, x: T) -> T:
    return _clamped(cx, x, 0, 6, x.dtype)


def _gate(cx: Lowering, x: T, wide: torch.dtype) -> T:
    """``relu6(x + 3) / 6``."""
    return cx.binary(
        "div", _clamped(cx, cx.binary("add", x, cx.full(3, wide), wide), 0, 6, wide), cx.full(6, wide), wide
    )


@row("hardsigmoid.default")
def hardsigmoid(cx: Lowering, x: T) -> T:
    return cx.convert(_gate(cx, x, opmath(x.dtype)), x.dtype)


@row("hardswish.default")
def hardswish(cx: Lowering, x: T) -> T:
    return cx.binary("mul", x, _gate(cx, x, opmath(x.dtype)), x.dtype)


@row("softsign.default")
def softsign(cx: Lowering, x: T) -> T:
    wide = opmath(x.dtype)
    return cx.binary("div", x, cx.binary("add", cx.unary("abs", x, wide), cx.full(1, wide), wide), x.dtype)


@row("glu.default")
def glu(cx: Lowering, x: T, dim: int = -1) -> T:
    dim %= x.rank
    half = cx.result()[1][dim]
    first = cx.slice(x, dim, 0, half)
    second = cx.slice(x, dim, half, half)
    return cx.binary("mul", first, cx.unary("sigmoid", second, opmath(x.dtype)), x.dtype)


@row("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(cx: Lowering, condition: T, x: Any, y: Any) -> T:
    dtype = cx.result()[0]
    return cx.where(condition, _rounded(cx, x, dtype), _rounded(cx, y, dtype), dtype)


@row("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(cx: Lowering, x: T, mask: T, value: Any) -> T:
    return cx.where(mask, cx.convert(_rounded(cx, value, x.dtype), x.dtype), x, x.dtype)


@row("addcmul.default")
def addcmul(cx: Lowering, x: T, a: T, b: T, value: Any = 1) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    return cx.binary("add", x, _times(cx, cx.binary("mul", a, b, wide), value, wide), dtype)


@row("addcdiv.default")
def addcdiv(cx: Lowering, x: T, a: T, b: T, value: Any = 1) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    return cx.binary("add", x, _times(cx, cx.binary("div", a, b, wide), value, wide), dtype)


@row("lerp.Tensor", "lerp.Scalar")
def lerp(cx: Lowering, start: T, end: T, weight: Any) -> T:
    dtype = cx.result()[0]
    wide = opmath(dtype)
    share = cx.scalar(weight, dtype)
    # From the nearer end, as ATen: the whole way from a large one leaves nothing of a small one.
    origin = start
    if isinstance(weight, (T, Dim)):
        is_near = cx.binary("lt", cx.unary("abs", share, wide), cx.full(0.5, wide), torch.bool)
        back = cx.binary("sub", share, cx.full(1, wide), wide)
        origin, share = cx.where(is_near, start, end, wide), cx.where(is_near, share, back, wide)
    elif abs(weight) >= 0.5:
        origin, share = end, cx.binary("sub", share, cx.full(1, wide), wide)
    way = cx.binary("sub", end, start, wide)
    return cx.binary("add", origin, cx.binary("mul", share, way, wide), dtype)


@row("to.dtype", "_to_copy.default")
def to_dtype(cx: Lowering, x: T, dtype: torch.dtype | None = None, *_: Any) -> T:
    return cx.convert(x, cx.result()[0])


@row("copy.default")
def copy(cx: Lowering, x: T, source: T, non_blocking: bool = False) -> T:
    return cx.expand(cx.convert(source, x.dtype), x.shape)


@row("fill.Scalar", "fill.Tensor")
def fill(cx: Lowering, x: T, value: Any) -> T:
    return cx.expand(cx.convert(_rounded(cx, value, x.dtype), x.dtype), x.shape)


@row("zero.default")
def zero(cx: Lowering, x: T) -> T:
    return cx.full(0, x.dtype, x.shape)
