"""Result sizes of the ops that make up most of a model, without running their meta kernels.

torch computes the result's metadata of many ops in Python decompositions, 100 us to 1 ms each, which is nearly all of
what a trace would cost. The rules here take about 2 us. Each returns ``None`` where it does not see through the
arguments at a glance, invalid ones included: then torch's own meta kernel decides, and raises what it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["META_DEVICE", "answered", "is_nhwc", "memory_order", "strides_in"]

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


def answered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op on the meta device."""
    rule = RULES.get(func)
    result = rule(*args, **kwargs) if rule is not None else None
    if result is not None:
        return result
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        # The strides of the rules are those of the common kernels; a view that fits no longer must not fail.
        if func is aten.view.default:
            return aten.reshape.default(*args, **kwargs)
        raise


def strides_in(order: Iterable[int], shape: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps whose dimensions lie in memory in this order, the innermost first."""
    out = [1] * len(shape)
    step = 1
    for i in order:
        out[i] = step
        step *= max(shape[i], 1)
    return out


def memory_order(t: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the innermost; what is expanded lies anywhere."""
    rank = t.dim()
    strides = t.stride()
    order = sorted(range(rank), key=lambda i: (-strides[i] if strides[i] else -math.inf, i))
    lying = [i for i in order if strides[i] and t.shape[i] > 1]
    return tuple(range(rank) if lying == sorted(lying) else order)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _empty_strided(shape, strides_in(range(len(shape) - 1, -1, -1), shape), dtype=dtype, device=META_DEVICE)


def _empty_nhwc(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(tuple(shape), dtype=dtype, device=META_DEVICE, memory_format=order)


def _like(x: Tensor) -> Tensor | None:
    return _pointwise(x.dtype, x)


def _pointwise(dtype: torch.dtype, *given: Any) -> Tensor | None:
    """The result of a pointwise op on tensors and numbers, as torch's ``TensorIterator`` lays it out; ``None`` if the shapes
    do not fit."""
    operands = [x for x in given if isinstance(x, Tensor)]
    first = operands[0]
    shape: Sequence[int] = first.shape
    for x in operands:
        if x.shape != shape:
            broadcast = _broadcast(shape, x.shape)
            if broadcast is None:
                return None
            shape = broadcast
    # Before their strides are looked at: of a dimension of size 1 these say nothing, and those of the result are the usual.
    # Not where a number or another shape is among them: then they say where that dimension goes.
    if len(operands) == len(given) and all(x.shape == shape for x in operands):
        if all(x.is_contiguous() for x in operands):
            return _empty(shape, dtype)
        if len(shape) == 4 and all(x.is_contiguous(memory_format=torch.channels_last) for x in operands):
            return _empty_nhwc(shape, dtype)
        strides = first.stride()
        if all(x.stride() == strides for x in operands) and _is_dense(shape, strides):
            return _empty_strided(shape, strides, dtype=dtype, device=META_DEVICE)
    order = _order_in_memory(shape, [_expanded(shape, x) for x in operands])
    return _empty_strided(shape, strides_in(order, shape), dtype=dtype, device=META_DEVICE)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    if len(a) < len(b):
        a, b = b, a
    out = list(a)
    lead = len(a) - len(b)
    for i, size in enumerate(b, lead):
        if out[i] != size:
            if out[i] == 1:
                out[i] = size
            elif size != 1:
                return None
    return out


def _expanded(shape: Sequence[int], x: Tensor) -> list[int]:
    """The strides of ``x`` in a broadcast shape: 0 where it has one element for many."""
    lead = len(shape) - x.dim()
    own = zip(x.shape, x.stride(), shape[lead:], strict=True)
    return [0] * lead + [stride if size == whole else 0 for size, stride, whole in own]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side, in whatever order of the dimensions."""
    step = 1
    for stride, size in sorted([(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]):
        if stride != step:
            return False
        step *= size
    return True


def _order_in_memory(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions of a pointwise result, the innermost first: as the first operand has any two of them that it does not
    repeat. An insertion sort, as that of ``TensorIterator``, since the relation is none of an order."""
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            outcome = _compared(shape, strides, order[before], order[at])
            if outcome > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif outcome < 0:
                break
    return order


def _compared(shape: Sequence[int], strides: Sequence[Sequence[int]], one: int, other: int) -> int:
    for operand in strides:
        a, b = operand[one], operand[other]
        if a and b:
            if a != b:
                return -1 if a < b else 1
            if shape[one] > shape[other]:
                return 1
    return 0


@_rule(
    aten.silu.default, aten.gelu.default, aten.sigmoid.default, aten.tanh.default, aten.exp.default, aten.sin.default,
    aten.cos.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.log.default, aten.mish.default,
    aten.leaky_relu.default, aten.softplus.default, aten.elu.default, aten.erf.default,
)  # fmt: skip
def _unary(x: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return _like(x) if x.dtype.is_floating_point else None


@_rule(aten.neg.default, aten.abs.default, aten.relu.default, aten.square.default)
def _signed(x: Tensor) -> Tensor | None:
    return None if x.dtype is torch.bool or x.dtype.is_complex else _like(x)


@_rule(aten.clamp.default, aten.clip.default, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(x: Tensor, *limits: Any, **named: Any) -> Tensor | None:
    given = [limit for limit in (*limits, *named.values()) if limit is not None]
    if not given or x.dtype.is_complex or any(not isinstance(limit, (int, float)) for limit in given):
        return None
    if not x.dtype.is_floating_point and (x.dtype is torch.bool or any(isinstance(limit, float) for limit in given)):
        return None
    return _like(x)


@_rule(aten.softmax.int)
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor | None:
    if dtype is not None or not x.dtype.is_floating_point or not -x.dim() <= dim < x.dim():
        return None
    return _empty(x.shape, x.dtype)


@_rule(
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar,
    aten.rsub.Scalar, aten.maximum.default, aten.minimum.default,
)  # fmt: skip
def _binary(x: Any, y: Any, *alpha: Any, **named: Any) -> Tensor | None:
    if not isinstance(x, Tensor):
        return None
    dtype = torch.result_type(x, y)
    if dtype is torch.bool or ((alpha or named) and not dtype.is_floating_point):
        return None
    return _pointwise(dtype, x, y)


@_rule(aten.rsub.Tensor)
def _rsub(x: Tensor, y: Tensor, *alpha: Any, **named: Any) -> Tensor | None:
    return _binary(y, x, *alpha, **named)


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(x: Any, y: Any) -> Tensor | None:
    if not isinstance(x, Tensor):
        return None
    dtype = torch.result_type(x, y)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    return _pointwise(dtype, x, y)


@_rule(aten.pow.Tensor_Scalar)
def _pow(x: Tensor, exponent: Any) -> Tensor | None:
    return _like(x) if x.dtype.is_floating_point and not isinstance(exponent, complex) else None


@_rule(aten.pow.Scalar)
def _scalar_pow(base: Any, exponent: Tensor) -> Tensor | None:
    is_real = isinstance(base, (int, float)) and exponent.dtype.is_floating_point
    return _empty(exponent.shape, exponent.dtype) if is_real else None


@_rule(
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
)  # fmt: skip
def _comparison(x: Tensor, y: Any) -> Tensor | None:
    return None if torch.result_type(x, y).is_complex else _pointwise(torch.bool, x, y)


@_rule(aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor)
def _bits(x: Tensor, y: Tensor) -> Tensor | None:
    dtype = torch.result_type(x, y)
    is_known = x.dtype is y.dtype and not (dtype.is_floating_point or dtype.is_complex)
    return _pointwise(dtype, x, y) if is_known else None


@_rule(aten.bitwise_not.default)
def _bits_not(x: Tensor) -> Tensor | None:
    return None if x.dtype.is_floating_point or x.dtype.is_complex else _like(x)


@_rule(aten.logical_not.default)
def _logical_not(x: Tensor) -> Tensor | None:
    return _pointwise(torch.bool, x)


@_rule(aten.where.self)
def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    return _pointwise(torch.result_type(x, y), condition, x, y) if condition.dtype is torch.bool else None


@_rule(aten.addcmul.default)
def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: float = 1) -> Tensor | None:
    is_alike = x.dtype is y.dtype is z.dtype and x.dtype.is_floating_point and x.shape == y.shape == z.shape
    return _pointwise(x.dtype, x, y, z) if is_alike else None


@_rule(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _made_like(
    x: Tensor, *_: Any, dtype: torch.dtype | None = None, memory_format: torch.memory_format | None = None, **__: Any
) -> Tensor | None:
    if memory_format not in (None, torch.preserve_format):
        return None
    return _pointwise(dtype or x.dtype, x)


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(*bounds: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor | None:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not all(type(bound) is int for bound in (start, end, step)) or step <= 0 or end < start:
        # torch rounds otherwise where there are floats.
        return None
    return _empty_strided(((end - start + step - 1) // step,), (1,), dtype=dtype or torch.int64, device=META_DEVICE)


@_rule(aten.outer.default)
def _outer(x: Tensor, y: Tensor) -> Tensor | None:
    if x.dim() != 1 or y.dim() != 1:
        return None
    return _empty((x.shape[0], y.shape[0]), torch.result_type(x, y))


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


def _grouped(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Products of groups of rows, or of columns, with a matrix each; torch's meta kernel knows those of GPUs alone."""
    ranks = (a.dim(), b.dim())
    count = b.shape[0] if ranks == (2, 3) else a.shape[0]
    if a.dtype is not b.dtype or a.dtype not in _GROUPED or out_dtype not in (None, a.dtype) or bias is not None:
        return None
    if ranks not in ((2, 2), (2, 3), (3, 2), (3, 3)) or (offs is None) is not (ranks == (3, 3)):
        return None
    if a.shape[-1] != b.shape[-2] or not all(map(_is_aligned, (a, b))):
        return None
    if offs is None:
        return _aligned((count, a.shape[1], b.shape[2]), a.dtype) if count == b.shape[0] else None
    if offs.dim() != 1 or offs.dtype is not torch.int32:
        return None
    if ranks == (2, 2):
        return _aligned((offs.shape[0], a.shape[0], b.shape[1]), a.dtype)
    return _aligned((a.shape[-2], b.shape[-1]), a.dtype) if offs.shape[0] == count else None


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor whose rows begin 16 bytes apart."""
    unit = 16 // dtype.itemsize
    whole = _empty((*shape[:-1], -(-shape[-1] // unit) * unit), dtype)
    return whole[..., : shape[-1]]


def _is_aligned(matrix: Tensor) -> bool:
    """Whether matrices lie as the kernels of groups take them: rows or columns side by side, and starts 16 bytes apart."""
    shape, strides = matrix.shape, matrix.stride()
    lines = [(line, at) for line, at in ((-2, -1), (-1, -2)) if strides[at] == 1 and strides[line] >= max(1, shape[at])]
    return bool(lines) and strides[lines[0][0]] * matrix.itemsize % 16 == 0


_GROUPED = frozenset({torch.float32, torch.float16, torch.bfloat16})
if hasattr(aten, "_grouped_mm"):
    _rule(aten._grouped_mm.default)(_grouped)


def _is_usual(x: Tensor) -> bool:
    """Whether it is contiguous, and its strides are the usual also where they say nothing."""
    return list(x.stride()) == strides_in(range(x.dim() - 1, -1, -1), x.shape)


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
    if bias is not None and bias.dtype is not x.dtype:
        return None
    if spatial == 1 and not (_is_usual(x) and _is_usual(weight)):
        return None
    shape = [x.shape[0], weight.shape[0]]
    for i in range(spatial):
        s, p, d = (v[i] if len(v) > 1 else v[0] for v in (stride, padding, dilation))
        rest = x.shape[2 + i] + 2 * p - d * (weight.shape[2 + i] - 1) - 1
        if rest < 0:
            # On meta tensors torch would give a dimension of size 0; no other device takes such sizes.
            raise RuntimeError(f"a kernel of {list(weight.shape[2:])} does not fit an input of {list(x.shape[2:])}")
        shape.append(rest // s + 1)
    # A 1x1 weight is contiguous whichever way it lies; its strides tell that it has its channels innermost.
    return _empty_nhwc(shape, x.dtype) if is_nhwc(x) or is_nhwc(weight) else _empty(shape, x.dtype)


@_rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv_transpose(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    # Of one image, too, without a batch.
    channels = x.shape[1 - weight.dim()]
    if channels != weight.shape[0]:
        # On meta tensors torch would not mind; channels would pass for a size.
        raise RuntimeError(f"a convolution of {weight.shape[0]} channels does not fit {channels}")


@_rule(aten.layer_norm.default)
def _layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Tensor | None:
    n = len(normalized_shape)
    if list(x.shape[x.dim() - n :]) != list(normalized_shape) or (weight is not None and not _goes_with(weight, x)):
        return None
    return _empty(x.shape, x.dtype)


def _goes_with(weight: Tensor, x: Tensor) -> bool:
    """Whether a norm of ``x`` has a weight of this type, and a result of the type of ``x``."""
    return weight.dtype is x.dtype or (weight.dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16))


@_rule(aten.rms_norm.default)
def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Tensor | None:
    if weight is not None and weight.dtype is not x.dtype:
        return None
    return None if _layer_norm(x, normalized_shape) is None else _by_channels(x.shape, x)


@_rule(aten.group_norm.default)
def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None = None, *_: Any) -> Tensor | None:
    if x.dim() < 2 or x.shape[1] % num_groups:
        return None
    if weight is not None and (not _goes_with(weight, x) or weight.shape != (x.shape[1],)):
        return None
    return _by_channels(x.shape, x)


def _by_channels(shape: Sequence[int], x: Tensor) -> Tensor | None:
    """The result of an op on images that has its channels where ``x`` has them: innermost or not."""
    return _empty_nhwc(shape, x.dtype) if is_nhwc(x) else _empty(shape, x.dtype)


def is_nhwc(x: Tensor) -> bool:
    """Whether strides of images say that their channels are innermost, as ``suggest_memory_format`` of torch reads them."""
    shape, strides, rank = x.shape, x.stride(), x.dim()
    if rank not in (4, 5):
        return False
    least = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        if strides[dim] < max(least, dim == 1) or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return x.numel() > 0


@_rule(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec)
def _upsample(x: Tensor, output_size: Sequence[int] | None, *rest: Any) -> Tensor | None:
    if x.dim() != 4 or not x.numel():
        return None
    factors = rest[-1] if rest else None
    if output_size is None:
        if not isinstance(factors, (list, tuple)) or len(factors) != 2:
            return None
        output_size = [int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
    if len(output_size) != 2 or min(output_size) < 1:
        return None
    return _by_channels((*x.shape[:2], *output_size), x)


@_rule(aten.scaled_dot_product_attention.default)
def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> Tensor | None:
    if query.dim() != 4 or key.dim() != 4 or not query.dtype is key.dtype is value.dtype:
        return None
    batch, heads, length, size = query.shape
    if key.shape[0] != batch or key.shape[3] != size or value.shape[:3] != key.shape[:3]:
        return None
    if key.shape[1] != heads and not (named.get("enable_gqa") and key.shape[1] and heads % key.shape[1] == 0):
        return None
    width = value.shape[3]
    # As the flash kernels lay it out: as the queries lie, which is with the heads of a position side by side where they are
    # parts of one projection, and with the positions of a head where something put them together.
    shape = (batch, heads, length, width)
    order = _order_in_memory(query.shape, [query.stride()])
    return _empty_strided(shape, strides_in(order, shape), dtype=query.dtype, device=META_DEVICE)


@_rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    rank = first.dim()
    shape = list(first.shape)
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank:
        return None
    total = 0
    for t in tensors:
        if t.dtype is not first.dtype or t.dim() != rank:
            return None
        other = list(t.shape)
        total += other[dim]
        other[dim] = shape[dim]
        if other != shape:
            return None
    shape[dim] = total
    return _empty_nhwc(shape, first.dtype) if all(map(is_nhwc, tensors)) else _empty(shape, first.dtype)


@_rule(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    rank = first.dim() + 1
    dim = dim + rank if dim < 0 else dim
    if not 0 <= dim < rank or any(t.dtype is not first.dtype or t.shape != first.shape for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors):
        # Images whose channels are innermost may stay so.
        return None
    return _empty((*first.shape[:dim], len(tensors), *first.shape[dim:]), first.dtype)


@_rule(aten.index.Tensor)
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    index = indices[0]
    if len(indices) > 1 or index is None or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        return None
    if not x.dim() or not x.is_contiguous() or not x.numel():
        return None
    return _empty((index.shape[0], *x.shape[1:]), x.dtype)


@_rule(aten.istft.default)
def _istft(
    x: Tensor,
    n_fft: int,
    hop: int | None = None,
    width: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor | None:
    """Signals from their frames (``[..., frequencies, frames]``). PyTorch looks at the sum of the windows: no data."""
    if not x.is_complex() or x.dim() not in (2, 3):
        return None
    count = n_fft + (hop or n_fft // 4) * (x.shape[-1] - 1) - (2 * (n_fft // 2) if center else 0)
    return _empty((*x.shape[:-2], count if length is None else length), x.dtype if return_complex else x.real.dtype)


@_rule(aten._weight_norm.default)
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor | None:
    return _empty(v.shape, v.dtype) if v.is_contiguous() and v.dtype is g.dtype else None


@_rule(aten.sum.dim_IntList)
def _sum(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if dtype is None and not (x.dtype.is_floating_point or x.dtype.is_complex):
        dtype = torch.int64
    return _reduced(x, dim, keepdim, dtype or x.dtype)


@_rule(aten.mean.dim)
def _mean(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    return _reduced(x, dim, keepdim, x.dtype) if dtype is None and x.dtype.is_floating_point else None


def _reduced(x: Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype) -> Tensor | None:
    if not dim:
        return None
    rank = x.dim()
    dims = {d % rank for d in dim} if rank else set()
    if len(dims) != len(dim) or any(not -rank <= d < rank for d in dim):
        return None
    shape = [1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims]
    return _empty(shape, dtype)


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
def _to_dtype(x: Tensor, dtype: torch.dtype, *rest: Any, **named: Any) -> Tensor | None:
    return None if dtype is x.dtype or rest or named else _pointwise(dtype, x)


@_rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _recurrent(x: Tensor, hx: Any, *args: Any) -> Any:
    """Without running a step for each element of a sequence, as torch does."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    is_both, is_batch_first = args[-2:]
    sides = [*x.shape[:-1], states[0].shape[-1] * (2 if is_both else 1)]
    if is_batch_first and len(sides) == 3:
        out = _empty([sides[1], sides[0], sides[2]], x.dtype).transpose(0, 1)
    else:
        out = _empty(sides, x.dtype)
    return [out, *(_empty(state.shape, state.dtype) for state in states)]
