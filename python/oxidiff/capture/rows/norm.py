"""Normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dim import product_of
from ..lowering import Lowering, T, opmath
from .registry import row


def _with_bias(
    cx: Lowering, weight: T | None, bias: T | None, shape: Sequence[Any], dtype: torch.dtype
) -> tuple[T, ...]:
    """Weight and bias, both or none."""
    if weight is None and bias is None:
        return ()
    if weight is None:
        assert bias is not None
        weight = cx.full(1, bias.dtype, bias.shape)
    if bias is None:
        bias = cx.full(0, weight.dtype, weight.shape)
    return weight, bias


@row("group_norm.default")
def group_norm(
    cx: Lowering, x: T, num_groups: int, weight: T | None = None, bias: T | None = None, eps: float = 1e-5, *_: Any
) -> T:
    dtype, shape = cx.result()
    num_groups = cx.static(num_groups, "the number of groups")
    operands = (x, *_with_bias(cx, weight, bias, x.shape[1:2], x.dtype))
    return cx.emit("group_norm", operands, dtype, shape, num_groups=num_groups, eps=float(eps), channel_dim=1)


@row("instance_norm.default")
def instance_norm(
    cx: Lowering,
    x: T,
    weight: T | None,
    bias: T | None,
    running_mean: T | None,
    running_var: T | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> T:
    if not use_input_stats:
        return batch_norm(cx, x, weight, bias, running_mean, running_var, False, momentum, eps)
    if running_mean is not None:
        raise cx.unsupported("running statistics are written")
    return group_norm(cx, x, cx.static(x.shape[1], "the number of channels"), weight, bias, eps)


@row("layer_norm.default")
def layer_norm(
    cx: Lowering,
    x: T,
    normalized: Sequence[Any],
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> T:
    dtype, shape = cx.result()
    operands: tuple[T, ...] = (x,)
    if weight is not None:
        operands = (x, weight) if bias is None else (x, weight, bias)
    elif bias is not None:
        operands = (x, cx.full(1, bias.dtype, bias.shape), bias)
    return cx.emit("layer_norm", operands, dtype, shape, normalized_ndim=len(normalized), eps=float(eps))


@row("native_layer_norm.default")
def native_layer_norm(cx: Lowering, *_: Any) -> T:
    raise cx.unsupported("statistics of a layer norm are asked for")


@row("rms_norm.default", "_fused_rms_norm.default")
def rms_norm(cx: Lowering, x: T, normalized: Sequence[Any], weight: T | None = None, eps: float | None = None) -> T:
    dtype, shape = cx.result()
    epsilon = float(torch.finfo(opmath(x.dtype)).eps if eps is None else eps)
    fits = weight is None or weight.dtype is x.dtype
    operands = (x, weight) if weight is not None and fits else (x,)
    out = cx.emit("rms_norm", operands, dtype, shape, normalized_ndim=len(normalized), eps=epsilon)
    return out if fits or weight is None else cx.binary("mul", out, weight, dtype)


@row("batch_norm.default")
def batch_norm(
    cx: Lowering,
    x: T,
    weight: T | None,
    bias: T | None,
    running_mean: T | None,
    running_var: T | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> T:
    if running_mean is None or running_var is None:
        return _of_batch(cx, x, weight, bias, eps)
    if training:
        raise cx.unsupported("running statistics are written (training mode)")
    dtype = cx.result()[0]
    wide = opmath(dtype)

    def per_channel(v: T) -> T:
        return cx.reshape(v, (v.shape[0], *([1] * (x.rank - 2))))

    spread = cx.unary("rsqrt", cx.binary("add", running_var, cx.full(float(eps), wide), wide))
    factor = spread if weight is None else cx.binary("mul", spread, weight, wide)
    centred = cx.binary("sub", x, per_channel(running_mean), wide)
    scaled = cx.binary("mul", centred, per_channel(factor), wide)
    return cx.convert(scaled if bias is None else cx.binary("add", scaled, per_channel(bias), wide), dtype)


def _of_batch(cx: Lowering, x: T, weight: T | None, bias: T | None, eps: float) -> T:
    """By the statistics of each channel over the batch, as weights are standardized: a group norm of one image."""
    dtype, _ = cx.result()
    channels = cx.static(x.shape[1], "the number of channels")
    by_channel = (1, channels, product_of(size for i, size in enumerate(x.shape) if i != 1))
    whole = cx.reshape(cx.transpose(x, 0, 1), by_channel)
    operands = (whole, *_with_bias(cx, weight, bias, x.shape[1:2], x.dtype))
    out = cx.emit("group_norm", operands, dtype, by_channel, num_groups=channels, eps=float(eps), channel_dim=1)
    return cx.transpose(cx.reshape(out, (x.shape[1], x.shape[0], *x.shape[2:])), 0, 1)
