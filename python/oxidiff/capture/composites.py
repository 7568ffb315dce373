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
        "cartesian_prod", "chain_matmul", "column_stack", "cosine_similarity", "cumulative_trapezoid", "dsplit",
        "gru_cell", "hsplit", "kron", "l1_loss", "linalg_matrix_norm", "linalg_multi_dot", "linalg_norm",
        "linalg_vecdot", "lstm_cell", "mH", "pairwise_distance", "positive", "rnn_relu_cell", "rnn_tanh_cell",
        "row_stack", "special_exp2", "special_expm1", "special_log1p", "special_log_softmax", "special_logsumexp",
        "special_round", "special_softmax", "sum_to_size", "tensordot", "trapezoid", "trapz", "vsplit",
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
    aten.grid_sampler.default: _grid_sampler,
    aten.grid_sampler_2d.default: _grid_sampler,
    aten.im2col.default: _im2col,
    aten._upsample_bilinear2d_aa.vec: _smooth(cubic=False),
    aten._upsample_bicubic2d_aa.vec: _smooth(cubic=True),
}
"""What stands for an op, by the op; it may say that it is ``NotImplemented`` for some arguments."""
