"""Comparing a compiled result with eager's, for ``check=...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .capture.objects import taken_apart

__all__ = ["compare"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def compare(result: Any, expected: Any, tolerance: float | None = None, is_guarded: bool = False) -> str | None:
    """How ``result`` differs from ``expected``, ``None`` if it does not.

    Args:
        result: Tensors, possibly nested.
        expected: The same, as eager computed it.
        tolerance: Bound of ``norm(result - expected) / norm(expected)``; by default 1e-4 for f32, about ten roundings
            for 16-bit types.
        is_guarded: Whether ``result`` may be finite where ``expected`` is not.
    """
    got, got_spec = tree_flatten(taken_apart(result))
    want, want_spec = tree_flatten(taken_apart(expected))
    if got_spec != want_spec:
        return f"its structure is {got_spec} instead of {want_spec}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                return f"output {i} is {a!r} instead of {b!r}"
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i} is {_kind(a)} instead of {_kind(b)}"
        if not b.dtype.is_floating_point:
            if not torch.equal(a, b):
                return f"output {i} ({_kind(b)}) is not equal"
            continue
        x, y = a.double(), b.double()
        if is_guarded:
            x = torch.where(y.isfinite(), x, y)
        if not torch.equal(x.isfinite(), y.isfinite()):
            return f"output {i} ({_kind(b)}) has NaN or infinity at other places"
        x, y = x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)
        error = float((x - y).norm() / y.norm().clamp_min(1e-30))
        bound = _TOLERANCE[b.dtype] if tolerance is None else tolerance
        if error > bound:
            return f"output {i} ({_kind(b)}) has a relative error of {error:.2e}, more than {bound:.2e}"
    return None


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value).__name__)
