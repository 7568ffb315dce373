"""Ops that make tensors from numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..dim import Dim
from ..lowering import Lowering, T
from .registry import row


@row(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default",
    "new_empty.default", "empty_strided.default", "new_empty_strided.default", "empty_permuted.default",
)  # fmt: skip
def zeros(cx: Lowering, *_: Any) -> T:
    # What `empty` holds is undefined; zeros keep results the same from run to run.
    dtype, shape = cx.result()
    return cx.full(0, dtype, shape)


@row("ones.default", "ones_like.default", "new_ones.default")
def ones(cx: Lowering, *_: Any) -> T:
    dtype, shape = cx.result()
    return cx.full(1, dtype, shape)


@row("full.default", "full_like.default", "new_full.default")
def full(cx: Lowering, _: Any, value: Any, *more: Any) -> T:
    if "new_full" in str(cx.node.op):
        value = more[0]
    dtype, shape = cx.result()
    if isinstance(value, Dim):
        return cx.expand(cx.convert(cx.number(value), dtype), shape)
    return cx.full(value, dtype, shape)


@row("scalar_tensor.default")
def scalar_tensor(cx: Lowering, value: Any, *_: Any) -> T:
    dtype, _shape = cx.result()
    return cx.convert(cx.number(value), dtype) if isinstance(value, Dim) else cx.full(value, dtype)


@row("arange.default")
def arange(cx: Lowering, end: Any, *_: Any) -> T:
    return _arange(cx, 0, 1)


@row("arange.start")
def arange_start(cx: Lowering, start: Any, end: Any, *_: Any) -> T:
    return _arange(cx, start, 1)


@row("arange.start_step")
def arange_step(cx: Lowering, start: Any, end: Any, step: Any = 1, *_: Any) -> T:
    return _arange(cx, start, step)


def _arange(cx: Lowering, start: Any, step: Any) -> T:
    dtype, shape = cx.result()
    whole_start, whole_step = _whole(start), _whole(step)
    if whole_start is not None and whole_step is not None:
        return cx.arange(shape[0], dtype, whole_start, whole_step)
    return cx.convert(_line(cx, start, step, shape[0]), dtype)


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value


def _line(cx: Lowering, start: Any, step: Any, length: Any) -> T:
    """``start + i * step`` in f64, the type in which ATen computes it."""
    index = cx.arange(length, torch.float64)
    scaled = cx.binary("mul", index, cx.scalar(step, torch.float64), torch.float64)
    return cx.binary("add", scaled, cx.scalar(start, torch.float64), torch.float64)


@row("linspace.default")
def linspace(cx: Lowering, start: Any, end: Any, steps: Any, *_: Any) -> T:
    """As ATen: from both ends to the middle, by a step that f32 ones have rounded to f32, rounded once after that."""
    dtype = cx.result()[0]
    if dtype in (torch.float16, torch.bfloat16):
        return cx.convert(_spaced(cx, start, end, steps, torch.float64), dtype)
    first, last = (cx.convert(cx.scalar(edge, torch.float64), dtype) for edge in (start, end))
    step_type = torch.float32 if dtype is torch.float32 else torch.float64
    return cx.convert(_spaced(cx, first, last, steps, step_type), dtype)


@row("logspace.default")
def logspace(cx: Lowering, start: Any, end: Any, steps: Any, base: Any = 10.0, *_: Any) -> T:
    wide = torch.float64
    return cx.convert(
        cx.binary("pow", cx.scalar(base, wide), _spaced(cx, start, end, steps, wide), wide), cx.result()[0]
    )


def _spaced(cx: Lowering, start: Any, end: Any, steps: Any, step_type: torch.dtype) -> T:
    """Numbers at equal distances, in f64; the distance is computed in ``step_type``."""
    _, shape = cx.result()
    wide = torch.float64
    if steps == 1:
        return cx.reshape(cx.scalar(start, wide), (1,))
    first, last = cx.scalar(start, wide), cx.scalar(end, wide)
    intervals = cx.scalar(steps - 1, wide)
    step = cx.binary("div", cx.binary("sub", last, first, step_type), intervals, step_type)
    index = cx.arange(shape[0], wide)
    ahead = cx.binary("add", first, cx.binary("mul", index, step, wide), wide)
    rest = cx.binary("sub", intervals, index, wide)
    behind = cx.binary("sub", last, cx.binary("mul", rest, step, wide), wide)
    line = cx.where(cx.binary("lt", index, rest, torch.bool), ahead, behind, wide)
    # The first one is the start also where there is but one, and no step.
    is_first = cx.binary("eq", index, cx.scalar(0, wide), torch.bool)
    return cx.where(is_first, first, line, wide)


@row("eye.default", "eye.m")
def eye(cx: Lowering, *_: Any) -> T:
    dtype, shape = cx.result()
    rows = cx.reshape(cx.arange(shape[0], torch.int64), (shape[0], 1))
    return cx.convert(cx.binary("eq", rows, cx.arange(shape[1], torch.int64), torch.bool), dtype)


@row("one_hot.default")
def one_hot(cx: Lowering, index: T, num_classes: Any = -1) -> T:
    dtype, shape = cx.result()
    classes = cx.arange(shape[-1], index.dtype)
    # Which class it is told is looked up: one that there is not is an error.
    known = cx.emit("index_select", (classes, index), index.dtype, index.shape, dim=0)
    hit = cx.binary("eq", cx.reshape(known, (*index.shape, 1)), classes, torch.bool)
    return cx.convert(hit, dtype)
