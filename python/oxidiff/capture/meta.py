"""Result sizes of the ops that make up most of a model, without running their meta kernels.

torch computes the result's metadata of many ops in Python decompositions, 100 us to 1 ms each, which is nearly all of
what a trace would cost. The rules here take about 2 us. Each returns ``None`` where it does not see through the
arguments at a glance, invalid ones included: then torch's own meta kernel decides, and raises what it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["META_DEVICE", "RULES"]

META_DEVICE = torch.device("meta")

Rule = Callable[..., Tensor | None]
RULES: dict[Any, Rule] = {}
"""ATen overload -> function of its arguments giving the result on the meta device, or ``None``."""

aten = torch.ops.aten
_empty_strided = torch.empty_strided


def _rule(*overloads: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads, rule))
        return rule

    return register


def _strides(shape: Sequence[int]) -> list[int]:
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * max(shape[i + 1], 1)
    return out


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _empty_strided(shape, _strides(shape), dtype=dtype, device=META_DEVICE)


def _like(x: Tensor) -> Tensor | None:
    if x.is_contiguous():
        return _empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META_DEVICE)
    strides = _dense_strides(x)
    return None if strides is None else _empty_strided(x.shape, strides, dtype=x.dtype, device=META_DEVICE)


def _dense_strides(x: Tensor) -> list[int] | None:
    """Strides of a pointwise result: no gaps, dimensions in the order in which ``x`` has them in memory."""
    shape, strides = x.shape, x.stride()
    if len(set(strides)) != len(strides) or 0 in strides:
        return None
    out = [1] * len(shape)
    step = 1
    for i in sorted(range(len(shape)), key=strides.__getitem__):
        out[i] = step
        step *= max(shape[i], 1)
    return out


@_rule(
    aten.silu.default, aten.gelu.default, aten.sigmoid.default, aten.tanh.default, aten.exp.default, aten.sin.default,
    aten.cos.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.neg.default,
    aten.relu.default, aten.abs.default, aten.softmax.int, aten.log.default,
)  # fmt: skip
def _unary(x: Tensor, *rest: Any, **kwargs: Any) -> Tensor | None:
    # That of softmax, which may have no name.
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in rest)
    if has_dtype or not x.dtype.is_floating_point:
        return None
    return _like(x)


@_rule(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
def _binary(x: Any, y: Any, **_: Any) -> Tensor | None:
    if not isinstance(y, Tensor):
        floating = x.dtype.is_floating_point
        return _like(x) if floating and not isinstance(y, complex) else None
    if not isinstance(x, Tensor):
        return None
    if x.dtype is y.dtype:
        dtype = x.dtype
        if not dtype.is_floating_point:
            return None
    else:
        dtype = torch.result_type(x, y)
        if not dtype.is_floating_point:
            return None
    if x.shape == y.shape:
        shape: Sequence[int] = x.shape
        if x.stride() == y.stride() and not x.is_contiguous():
            strides = _dense_strides(x)
            return None if strides is None else _empty_strided(shape, strides, dtype=dtype, device=META_DEVICE)
    else:
        broadcast = _broadcast(x.shape, y.shape)
        if broadcast is None:
            return None
        shape = broadcast
    if not (x.is_contiguous() and y.is_contiguous()):
        return None
    return _empty(shape, dtype)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    if len(a) < len(b):
        a, b = b, a
    out = list(a)
    lead = len(a) - len(b)
    for i, size in enumerate(b):
        have = out[lead + i]
        if have != size:
            if have == 1:
                out[lead + i] = size
            elif size != 1:
                return None
    return out


@_rule(aten.pow.Tensor_Scalar, aten.rsub.Scalar, aten.add.Scalar, aten.mul.Scalar, aten.sub.Scalar, aten.div.Scalar)
def _with_scalar(x: Tensor, other: Any, *_: Any) -> Tensor | None:
    return _like(x) if x.dtype.is_floating_point and not isinstance(other, complex) else None


@_rule(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if x.dtype is not weight.dtype or weight.dim() != 2 or x.dim() == 0:
        return None
    out_features, in_features = weight.shape
    shape = list(x.shape)
    if shape[-1] != in_features:
        return None
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (out_features,)):
        return None
    shape[-1] = out_features
    return _empty(shape, x.dtype)


@_rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor | None:
    spatial = weight.dim() - 2
    if x.dim() != spatial + 2 or x.dtype is not weight.dtype:
        return None
    if x.shape[1] != weight.shape[1] * groups:
        # torch does not say which, on meta tensors.
        raise RuntimeError(
            f"a convolution of {weight.shape[1] * groups} channels (weight {list(weight.shape)}, groups {groups}) does not "
            f"fit an input of {list(x.shape)}"
        )
    if not (x.is_contiguous() and weight.is_contiguous()):
        return None
    if bias is not None and bias.dtype is not x.dtype:
        return None
    shape = [x.shape[0], weight.shape[0]]
    for i in range(spatial):
        s, p, d = (v[i] if len(v) > 1 else v[0] for v in (stride, padding, dilation))
        rest = x.shape[2 + i] + 2 * p - d * (weight.shape[2 + i] - 1) - 1
        if rest < 0:
            # On meta tensors torch would give a dimension of size 0; no other device takes such sizes.
            raise RuntimeError(f"a kernel of {list(weight.shape[2:])} does not fit an input of {list(x.shape[2:])}")
        shape.append(rest // s + 1)
    return _empty(shape, x.dtype)


@_rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv_transpose(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    if x.dim() == weight.dim() and x.shape[1] != weight.shape[0]:
        # On meta tensors torch would not mind; channels would pass for a size.
        raise RuntimeError(f"a convolution of {weight.shape[0]} channels does not fit {x.shape[1]}")


@_rule(aten.layer_norm.default)
def _layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Tensor | None:
    n = len(normalized_shape)
    if list(x.shape[x.dim() - n :]) != list(normalized_shape) or (weight is not None and weight.dtype is not x.dtype):
        return None
    return _like(x)


@_rule(aten.rms_norm.default)
def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Tensor | None:
    return _layer_norm(x, normalized_shape, weight)


@_rule(aten.group_norm.default)
def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None = None, *_: Any) -> Tensor | None:
    if x.dim() < 2 or x.shape[1] % num_groups:
        return None
    if weight is not None and (weight.dtype is not x.dtype or weight.shape != (x.shape[1],)):
        return None
    return _like(x)


@_rule(aten.scaled_dot_product_attention.default)
def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor | None:
    if query.dim() != 4 or key.dim() != 4 or kwargs.get("enable_gqa") or not query.dtype is key.dtype is value.dtype:
        return None
    batch, heads, length, size = query.shape
    if key.shape[:2] != query.shape[:2] or key.shape[3] != size or value.shape[:3] != key.shape[:3]:
        return None
    width = value.shape[3]
    # As the flash kernels of every device lay it out: the heads of a position side by side.
    strides = (length * heads * width, width, heads * width, 1)
    return _empty_strided((batch, heads, length, width), strides, dtype=query.dtype, device=META_DEVICE)


@_rule(aten.cat.default, aten.concat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    rank = first.dim()
    shape = list(first.shape)
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        return None
    total = 0
    for t in tensors:
        if t.dtype is not first.dtype or t.dim() != rank or not t.is_contiguous():
            return None
        other = list(t.shape)
        total += other[dim]
        other[dim] = shape[dim]
        if other != shape:
            return None
    shape[dim] = total
    return _empty(shape, first.dtype)


@_rule(aten.mean.dim)
def _mean(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if dim is None or not dim or dtype is not None or not x.dtype.is_floating_point:
        return None
    rank = x.dim()
    dims = {d % rank for d in dim} if rank else set()
    if len(dims) != len(dim):
        return None
    shape = [1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims]
    return _empty(shape, x.dtype)


@_rule(aten.linalg_vector_norm.default)
def _norm(
    x: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    # Of no elements, some orders have no norm.
    return _mean(x, dim, keepdim, dtype=dtype) if x.numel() else None


@_rule(aten.to.dtype)
def _to_dtype(x: Tensor, dtype: torch.dtype, *_: Any) -> Tensor | None:
    if dtype is x.dtype or not x.is_contiguous():
        return None
    return _empty_strided(x.shape, x.stride(), dtype=dtype, device=META_DEVICE)
