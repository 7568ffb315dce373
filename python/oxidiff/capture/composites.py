"""Ops that a trace records as what they are made of.

Composite ops arrive whole, so that those with kernels of their own (a linear layer, attention) are seen as what they are.
Others are their parts: PyTorch's own, where it has an op for several others, or those that are written down here. The sizes
in these are plain numbers, which are solved as those of all traces; what is no polynomial of sizes has to be computed from
tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COMPOSED", "is_composite"]

aten = torch.ops.aten


def is_composite(func: Any) -> bool:
    """Whether PyTorch's own parts of an op are recorded in its place. Those of libraries are, as of torchao's; of PyTorch's
    ops those of which all parts are known to have programs."""
    if func.namespace == "aten" and func._opname not in _OF_PYTORCH:
        return False
    kernel = "CompositeImplicitAutograd"
    return func.namespace not in _INNER and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kernel)


_INNER = frozenset(("prim", "prims", "quantized", "mkldnn", "onednn"))
_OF_PYTORCH = frozenset(
    (
        "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "cartesian_prod", "chain_matmul", "column_stack",
        "cosine_similarity", "cumulative_trapezoid", "dsplit", "gru_cell", "hsplit", "isclose", "kron",
        "l1_loss", "linalg_matrix_norm", "linalg_multi_dot", "linalg_norm", "linalg_vecdot", "lstm_cell", "mH", "nanmean",
        "pairwise_distance", "positive", "rnn_relu_cell", "rnn_tanh_cell", "row_stack", "special_exp2", "special_expm1",
        "special_log1p", "special_log_softmax", "special_logsumexp", "special_round", "special_sinc", "special_softmax",
        "sum_to_size", "tensordot", "trapezoid", "trapz", "vsplit",
    )
)  # fmt: skip


def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """Differences of neighbours, by slices whose ends are no sizes."""
    ends = [part for part in (prepend, x, append) if part is not None]
    x = torch.cat(ends, dim) if len(ends) > 1 else x
    for _ in range(n):
        after, before = aten.slice.Tensor(x, dim, 1), aten.slice.Tensor(x, dim, 0, -1)
        x = torch.logical_xor(after, before) if x.dtype is torch.bool else after - before
    return x


def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = (dim % x.dim() for dim in dims)
    if k % 4 == 2:
        return x.flip((first, second))
    if k % 2:
        return x.transpose(first, second).flip(first if k % 4 == 1 else second)
    return x.clone()


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim())) if dim is None else (dim,)
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _fmax(x: Tensor, other: Tensor) -> Tensor:
    """The larger one, and the other of what is not a number."""
    return torch.where(x.isnan(), other, torch.where(other.isnan(), x, torch.maximum(x, other)))


def _fmin(x: Tensor, other: Tensor) -> Tensor:
    return torch.where(x.isnan(), other, torch.where(other.isnan(), x, torch.minimum(x, other)))


def _logaddexp(x: Tensor, other: Tensor) -> Tensor:
    most, least = torch.maximum(x, other), torch.minimum(x, other)
    # Of two that are infinite the difference is not a number.
    return torch.where(most == least, most + math.log(2), most + torch.log1p(torch.exp(least - most)))


def _xlogy(x: Any, other: Any) -> Tensor:
    x, other = (value if isinstance(value, Tensor) else torch.full((), value) for value in (x, other))
    product = x * torch.log(other)
    return torch.where(other.isnan(), other, torch.where(x == 0, torch.zeros_like(product), product))


def _ldexp(x: Tensor, other: Tensor) -> Any:
    return x * torch.pow(2.0, other) if x.dtype is torch.float32 else NotImplemented


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Compared with each: there are few mostly, the ids of some tokens."""
    each = test_elements.flatten() if isinstance(test_elements, Tensor) else torch.full((1,), test_elements)
    found: Tensor = (elements[..., None] == each).any(-1)
    return ~found if invert else found


def _wide(x: Tensor) -> Tensor:
    """In f32 instead of 16 bits: what is made of several ops is rounded once."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _of_float(formula: Callable[..., Tensor], *, has_integers: bool = False) -> Callable[..., Any]:
    """An op on one tensor by a formula, which is computed in f32 at least; integers are floats first, or are left alone."""

    def compute(x: Tensor, *numbers: float) -> Any:
        if x.dtype.is_complex or not (x.dtype.is_floating_point or has_integers):
            return NotImplemented
        x = x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())
        return formula(_wide(x), *numbers).to(x.dtype)

    return compute


def _atan(x: Tensor) -> Tensor:
    return torch.atan2(x, torch.ones((), dtype=x.dtype, device=x.device))


def _sinh(x: Tensor) -> Tensor:
    away = x.abs()
    # Of half of it, so that none overflows too early; of what is small, the difference would be nothing.
    root, small = torch.exp(away / 2), torch.expm1(away.clamp(max=1))
    found = torch.where(away < 1, (small + small / (small + 1)) / 2, root / 2 * root - 0.5 / root / root)
    return torch.where(x < 0, -found, torch.where(x == 0, x, found))


def _cosh(x: Tensor) -> Tensor:
    root = torch.exp(x.abs() / 2)
    return root / 2 * root + 0.5 / root / root


def _asinh(x: Tensor) -> Tensor:
    away = x.abs()
    square = away.clamp(max=_LARGE) ** 2
    found = torch.log1p(away + square / (1 + torch.sqrt(square + 1)))
    found = torch.where(away < _LARGE, found, torch.log(away) + math.log(2))
    return torch.where(x < 0, -found, torch.where(x == 0, x, found))


def _acosh(x: Tensor) -> Tensor:
    above = x - 1
    near = torch.log1p(above + torch.sqrt(above * (above.clamp(max=_LARGE) + 2)))
    return torch.where(x < 1, math.nan, torch.where(x < _LARGE, near, torch.log(x) + math.log(2)))


def _atanh(x: Tensor) -> Tensor:
    away = x.abs()
    found = torch.log1p(2 * away / (1 - away)) / 2
    return torch.where(x < 0, -found, torch.where(x == 0, x, found))


_LARGE = 1e9
"""From here on, ``x * x + 1`` is ``x * x`` in f32 and f64."""


def _sinc(x: Tensor) -> Tensor:
    product = x * math.pi
    return torch.where(x == 0, torch.ones_like(x), torch.sin(product) / product)


def _softshrink(x: Tensor, limit: float = 0.5) -> Tensor:
    return torch.where(x > limit, x - limit, torch.where(x < -limit, x + limit, x * 0))


def _hardshrink(x: Tensor, limit: float = 0.5) -> Tensor:
    return torch.where((x >= -limit) & (x <= limit), torch.zeros_like(x), x)


def _hypot(x: Tensor, other: Tensor) -> Any:
    dtype = torch.result_type(x, other)
    if not dtype.is_floating_point:
        return NotImplemented
    x, other = (_wide(side.to(dtype)).abs() for side in (x, other))
    most, least = torch.maximum(x, other), torch.minimum(x, other)
    ratio = torch.where(most == 0, most, least / most)
    found = most * torch.sqrt(ratio * ratio + 1)
    # Whatever the other one is, be it no number.
    return torch.where(x.isinf() | other.isinf(), math.inf, found).to(dtype)


def _heaviside(x: Tensor, values: Tensor) -> Any:
    return torch.where(x == 0, values, (x > 0).to(x.dtype)) if x.dtype is values.dtype else NotImplemented


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Any:
    if x.dtype is not target.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    loss = torch.square(_wide(x) - _wide(target))
    return (loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss).to(x.dtype)


def _vdot(x: Tensor, other: Tensor) -> Any:
    return NotImplemented if x.dtype.is_complex else torch.dot(x, other)


def _trace(x: Tensor) -> Any:
    is_known = x.dim() == 2 and x.dtype not in (torch.bool, torch.float16, torch.bfloat16)
    return x.diagonal().sum() if is_known else NotImplemented


def _count_nonzero(x: Tensor, dim: Any = None) -> Tensor:
    return (x != 0).sum(dim)


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if x.dtype.is_complex:
        return NotImplemented
    x = torch.where(x.isnan(), torch.zeros_like(x), x) if x.dtype.is_floating_point else x
    return x.sum(dim, keepdim, dtype=dtype)


def _linalg_cross(x: Tensor, other: Tensor, dim: int | None = -1) -> Any:
    if dim is None:
        # The first of size 3, which a batch may have.
        return NotImplemented
    if x.dim() != other.dim() or x.shape[dim] != 3 or other.shape[dim] != 3 or x.dtype is not other.dtype:
        return NotImplemented
    one, two = _wide(x), _wide(other)
    ahead = one.roll(-1, dim) * two.roll(-2, dim)
    return (ahead - one.roll(-2, dim) * two.roll(-1, dim)).to(x.dtype)


def _dstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.atleast_3d(x) for x in tensors], 2)  # type: ignore[no-untyped-call]


def _take(x: Tensor, index: Tensor) -> Any:
    return aten.index.Tensor(x.flatten(), [index]) if index.dtype is torch.int64 and x.numel() else NotImplemented


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    rank = x.dim() + 1
    if not x.dim() or dim1 % rank == dim2 % rank:
        return NotImplemented
    x = F.pad(x, (0, abs(offset))) if offset else x
    place = torch.arange(x.shape[-1])
    # An element is in its own row above the diagonal, and in its own column below.
    spread = x[..., :, None] if offset >= 0 else x[..., None, :]
    found = torch.where(place[:, None] + offset == place, spread, torch.zeros_like(spread))
    return found.movedim((-2, -1), (dim1 % rank, dim2 % rank))


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Any:
    if len(size) != 4 or theta.shape != (size[0], 2, 3) or theta.dtype not in (torch.float32, torch.float64):
        return NotImplemented

    def line(count: int) -> Tensor:
        if count == 1:
            return torch.zeros(1, dtype=theta.dtype)
        if align_corners:
            return torch.linspace(-1, 1, count, dtype=theta.dtype)
        return (torch.arange(count, dtype=theta.dtype) * 2 + 1) / torch.full((), count, dtype=theta.dtype) - 1

    along, down, start = theta[:, None, None].unbind(-1)
    return line(size[3])[:, None] * along + line(size[2])[:, None, None] * down + start


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """``x`` with the elements of ``source``, one after the other, where ``mask`` holds. The one behind the last is an index
    out of range, an error of the program, where eager has one."""
    if mask.dtype is not torch.bool or x.dtype is not source.dtype or not source.numel():
        return NotImplemented
    shape = list(torch.broadcast_shapes(x.shape, mask.shape))  # type: ignore[no-untyped-call]
    # Vectors for tokens that stand for images are whole rows: a place for each, not for each of its elements.
    is_of_rows = mask.dim() > 0 and mask.shape[-1] == 1 and source.dim() > 0 and source.shape[-1] == shape[-1]
    rows = source.reshape(-1, shape[-1]) if is_of_rows else source.flatten()
    flags = mask[..., 0].expand(shape[:-1]) if is_of_rows else mask.expand(shape)
    place = (flags.flatten().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, rows.index_select(0, place).reshape(shape), x)


def _im2col(
    x: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Windows of images (``[..., C, H, W]``) as columns (``[..., C * taps, windows]``)."""
    images = x if x.dim() == 4 else x[None]
    images = F.pad(images, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else images
    sides = images.shape[2:]
    counts = [
        (side - step * (width - 1) - 1) // by + 1
        for side, width, step, by in zip(sides, kernel_size, dilation, stride, strict=True)
    ]
    taps = []
    for places in itertools.product(*map(range, kernel_size)):
        tap: Tensor = images
        for axis, place in enumerate(places):
            start, by = place * dilation[axis], stride[axis]
            # From the end where that is no size.
            rest = (kernel_size[axis] - 1 - place) * dilation[axis]
            end = (-rest if rest else 2**62) if by == 1 else start + by * (counts[axis] - 1) + 1
            tap = aten.slice.Tensor(tap, 2 + axis, start, end, by)
        taps.append(tap)
    columns = torch.stack(taps, 2).reshape(images.shape[0], images.shape[1] * len(taps), counts[0] * counts[1])
    return columns if x.dim() == 4 else columns[0]


def _col2im(
    x: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Images of columns: sums of the windows where they lie."""
    columns = x if x.dim() == 3 else x[None]
    taps = kernel_size[0] * kernel_size[1]
    counts = [
        (side + 2 * pad - step * (width - 1) - 1) // by + 1
        for side, pad, step, width, by in zip(output_size, padding, dilation, kernel_size, stride, strict=True)
    ]
    if not x.dtype.is_floating_point or columns.shape[1] % taps or counts[0] * counts[1] != columns.shape[2]:
        return NotImplemented
    shape = (columns.shape[0], columns.shape[1] // taps, *kernel_size, *counts)
    windows = _wide(columns).reshape(shape)
    if list(kernel_size) == list(stride) and max(dilation) == 1 and not any(padding):
        # Side by side.
        sides = [count * by for count, by in zip(counts, stride, strict=True)]
        image = windows.permute(0, 1, 4, 2, 5, 3).reshape(*shape[:2], *sides)
        rest = [have - side for have, side in zip(output_size, sides, strict=True)]
        image = F.pad(image, (0, rest[1], 0, rest[0])) if any(rest) else image
    else:
        image = _sum_of_taps(windows, output_size, dilation, padding, stride)
    return (image if x.dim() == 3 else image[0]).to(x.dtype)


def _sum_of_taps(
    windows: Tensor, sides: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The image (``[N, C, H, W]``) of windows (``[N, C, height, width, rows, columns]``). Places that are a step apart are
    an image of their own, to which each element of a window adds one, moved by whole steps."""
    batch, channels, *kernel = windows.shape[:4]
    counts = windows.shape[4:]
    moved = [(by * (size - 1) + step - 1) // step for size, by, step in zip(kernel, dilation, stride, strict=True)]
    sums: dict[tuple[int, ...], Tensor] = {}
    for places in itertools.product(*map(range, kernel)):
        pads: list[int] = []
        for axis in (1, 0):
            whole = places[axis] * dilation[axis] // stride[axis]
            pads += [whole, moved[axis] - whole]
        tap = windows[:, :, places[0], places[1]]
        tap = F.pad(tap, pads) if any(pads) else tap
        phase = tuple(place * by % step for place, by, step in zip(places, dilation, stride, strict=True))
        sums[phase] = sums[phase] + tap if phase in sums else tap
    sizes = [count + more for count, more in zip(counts, moved, strict=True)]
    if max(stride) == 1:
        (image,) = sums.values()
    else:
        nothing = torch.zeros(batch, channels, *sizes, dtype=windows.dtype)
        phases = [sums.get(phase, nothing) for phase in itertools.product(*map(range, stride))]
        each = torch.stack(phases, 2).reshape(batch, channels, *stride, *sizes).permute(0, 1, 4, 2, 5, 3)
        sizes = [size * step for size, step in zip(sizes, stride, strict=True)]
        image = each.reshape(batch, channels, *sizes)
    for axis, (side, pad, size) in enumerate(zip(sides, padding, sizes, strict=True), 2):
        if side != size:
            image = aten.slice.Tensor(image, axis, pad, pad + side)
    return image


_MANY_CHANNELS = 16
"""Of fewer, finding the places takes longer than PyTorch's kernel takes for all."""


def _grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    """An image (``[N, C, H, W]``) at places (``[N, h, w, 2]``, from -1 to 1)."""
    if x.dim() != 4 or mode not in (0, 1) or x.shape[1] < _MANY_CHANNELS:
        return NotImplemented
    (count, channels, height, width), (rows, columns) = x.shape, grid.shape[1:3]
    places = []
    for axis, size in ((0, width), (1, height)):
        at = grid[..., axis]
        at = (at + 1) * ((size - 1) / 2) if align_corners else ((at + 1) * size - 1) / 2
        places.append(_inside(at, size, padding, align_corners))
    flat = x.reshape(count, channels, height * width)

    def read(at: Tensor, row: Tensor) -> Tensor:
        """The image where it is, 0 elsewhere."""
        is_inside = (at >= 0) & (at < width) & (row >= 0) & (row < height)
        # What is not a number leads nowhere.
        row, at = (place.nan_to_num(nan=-1.0) for place in (row, at))
        index = row.clamp(0, height - 1).long() * width + at.clamp(0, width - 1).long()
        index = index.reshape(count, 1, rows * columns).expand(count, channels, rows * columns)
        found = torch.gather(flat, 2, index).reshape(count, channels, rows, columns)
        return torch.where(is_inside[:, None], found, 0.0)

    if mode == 1:
        return read(*(at.round() for at in places))
    low = [at.floor() for at in places]
    parts = []
    for far, below in itertools.product((0, 1), (0, 1)):
        (right, down) = (at - edge for at, edge in zip(places, low, strict=True))
        weight = (right if far else 1 - right) * (down if below else 1 - down)
        parts.append(read(low[0] + far, low[1] + below) * weight[:, None])
    return parts[0] + parts[1] + parts[2] + parts[3]


def _inside(at: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """Where a place outside of an image is read: nowhere, at its border, or mirrored there."""
    if padding == 2:
        # There and back again.
        start, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if not span:
            return torch.zeros_like(at)
        away = (at - start).abs()
        turns = torch.floor(away / span)
        rest = away - turns * span
        is_back = torch.floor(turns / 2) * 2 != turns
        at = torch.where(is_back, span - rest, rest) + start
    return at.clamp(0, size - 1) if padding else at


def _smooth(cubic: bool) -> Callable[..., Any]:
    def resize(
        x: Tensor, output_size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
    ) -> Any:
        """Images (``[N, C, H, W]``) as they are seen from farther away: a product with weights per axis."""
        if not x.dtype.is_floating_point:
            return NotImplemented
        given: Sequence[float | None] = (None, None) if factors is None else factors
        sides = x.shape[2:]
        sizes = output_size if output_size is not None else [int(s * f) for s, f in zip(sides, given, strict=True) if f]
        rows, columns = (
            _weights(x, side, size, align_corners, factor, cubic)
            for side, size, factor in zip(sides, sizes, given, strict=True)
        )
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (rows @ (wide @ columns.T)).to(x.dtype)

    return resize


def _weights(x: Tensor, size: int, out: int, align_corners: bool, factor: float | None, cubic: bool) -> Tensor:
    """``[out, size]``: how much of each place is in each result."""
    like: Any = {"dtype": torch.float64 if x.dtype is torch.float64 else torch.float32, "device": x.device}
    if align_corners:
        scale = torch.full((), size - 1, **like) / torch.full((), out - 1, **like).clamp(min=1)
        scale = torch.where(torch.full((), out, **like) > 1, scale, 0.0)
    elif factor:
        scale = torch.full((), 1 / factor, **like)
    else:
        # A tensor: a ratio of sizes is no polynomial of them.
        scale = torch.full((), size, **like) / torch.full((), out, **like)
    reach = scale.clamp(min=1)
    support = reach * (2 if cubic else 1)
    centre = ((torch.arange(out, **like) + 0.5) * scale)[:, None]
    place = torch.arange(size, **like)
    first, last = torch.floor((centre - support + 0.5).clamp(min=0)), torch.floor(centre + support + 0.5)
    away = ((place + 0.5 - centre) / reach).abs()
    if cubic:
        near = (1.5 * away - 2.5) * away * away + 1
        far = ((-0.5 * away + 2.5) * away - 4) * away + 2
        weight = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    else:
        weight = (1 - away).clamp(min=0)
    weight = torch.where((place >= first) & (place < last), weight, 0.0)
    return weight / weight.sum(1, keepdim=True)


COMPOSED: Mapping[Any, Callable[..., Any]] = {
    aten.diff.default: _diff,
    aten.rot90.default: _rot90,
    aten.aminmax.default: _aminmax,
    aten.fmax.default: _fmax,
    aten.fmin.default: _fmin,
    aten.logaddexp.default: _logaddexp,
    aten.xlogy.Tensor: _xlogy,
    aten.xlogy.Scalar_Self: _xlogy,
    aten.xlogy.Scalar_Other: _xlogy,
    aten.special_xlogy.default: _xlogy,
    aten.ldexp.Tensor: _ldexp,
    aten.logit.default: _logit,
    aten.special_logit.default: _logit,
    aten.isin.Tensor_Tensor: _isin,
    aten.isin.Tensor_Scalar: _isin,
    **{
        op.default: _of_float(formula, has_integers=True)
        for op, formula in {
            aten.acos: lambda x: 2 * _atan(torch.sqrt((1 - x) / (1 + x))),
            aten.acosh: _acosh,
            aten.asin: lambda x: _atan(x / torch.sqrt((1 - x) * (1 + x))),
            aten.asinh: _asinh,
            aten.atan: _atan,
            aten.atanh: _atanh,
            aten.cosh: _cosh,
            aten.sinc: _sinc,
            aten.sinh: _sinh,
        }.items()
    },
    aten.frac.default: _of_float(lambda x: x - torch.trunc(x)),
    aten.hardshrink.default: _of_float(_hardshrink),
    aten.softshrink.default: lambda x, limit=0.5: NotImplemented if limit < 0 else _of_float(_softshrink)(x, limit),
    aten.hypot.default: _hypot,
    aten.heaviside.default: _heaviside,
    aten.mse_loss.default: _mse_loss,
    aten.vdot.default: _vdot,
    aten.trace.default: _trace,
    aten.masked_scatter.default: _masked_scatter,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.nansum.default: _nansum,
    aten.cross.default: lambda x, other, dim=None: _linalg_cross(x, other, dim),
    aten.linalg_cross.default: _linalg_cross,
    aten.dstack.default: _dstack,
    aten.take.default: _take,
    aten.diag_embed.default: _diag_embed,
    aten.affine_grid_generator.default: _affine_grid,
    aten.col2im.default: _col2im,
    aten.grid_sampler.default: _grid_sampler,
    aten.grid_sampler_2d.default: _grid_sampler,
    aten.im2col.default: _im2col,
    aten._upsample_bilinear2d_aa.vec: _smooth(cubic=False),
    aten._upsample_bicubic2d_aa.vec: _smooth(cubic=True),
}
"""What stands for an op, by the op; it may say that it is ``NotImplemented`` for some arguments."""
