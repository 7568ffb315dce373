"""Plans of PyTorch's own cuDNN for GPUs that are not there, for the convolutions and attentions of every model of the zoo.
`test_cuda_plans.py` runs this file in processes of their own, behind a driver that has no device.

Which engines there are follows from types, taps, strides, from what comes after the sums, the width of heads, masks, and
from what is a multiple of what; not from how large an image is. So the steps of all models, at public sizes, are of kinds:

- a *sort* is the graph's operations with their settings, and the taps of a convolution or the widths of its heads;
- a *kind* is a sort, and of each tensor in memory its type, the order of its dimensions, whether it has gaps, and which
  powers of two up to 8 divide its sizes.

In f16 every kind is planned, and every sort on every device: a sort's kinds take turns with the devices. In f32 every kind
is planned on one device in turn; in bf16, whose engines are those of f16, one kind of every sort.
`OXIDIFF_CUDNN_DEVICES=all` plans every kind on every device in every type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import zoo
from oxidiff import _native, testing

TORCH = os.path.dirname(torch.__file__)
DRIVER = os.environ["LD_PRELOAD"]
"""There before torch is: cuDNN looks for a driver when it is loaded."""
EVERYTHING = os.environ.get("OXIDIFF_CUDNN_DEVICES") == "all"

DESCRIPTIONS = Path(__file__).parents[1] / "cuda/data/devices"
ARCHS = {"T4": 75, "A100": 80, "L4": 89, "H100": 90}
"""Profiles that are fused for, and compute capabilities."""

OLDEST_ARCH = 80
"""Compute capability from which on cuDNN has attention, and anything of bf16."""

Tensor = tuple[str, list[int], list[int], bool]
Key = tuple[object, ...]


class Step(NamedTuple):
    """A step of a model, compiled for a device."""

    model: str
    program: _native.Program
    sizes: list[int]
    number: int
    tensors: list[Tensor]
    operations: list[str]

    @property
    def is_attention(self) -> bool:
        return self.operations[0].startswith("Matmul")

    def sort(self) -> Key:
        first, second, third = (dims for _, dims, _, _ in self.tensors[:3])
        return (*self.operations, (first[3], third[3]) if self.is_attention else tuple(second[2:]))

    def kind(self) -> Key:
        rows: list[object] = []
        for dtype, dims, strides, is_in_memory in self.tensors:
            if is_in_memory:
                order = sorted((at for at, size in enumerate(dims) if size > 1), key=lambda at: -strides[at])
                has_gaps = any(strides[outer] != strides[inner] * dims[inner] for outer, inner in pairwise(order))
                rows.append((dtype, *order, has_gaps, *(math.gcd(size, 8) for size in dims)))
        return (self.sort(), *rows)

    def __str__(self) -> str:
        rows = [f"{dtype}{dims} by {strides}" for dtype, dims, strides, is_in_memory in self.tensors if is_in_memory]
        return f"{self.model}, step {self.number}: {self.operations} of {rows}"


Sort = dict[Key, dict[str, Step]]
"""The kinds of a sort, and the first step of each on each device."""


def sorts(dtype: torch.dtype) -> list[Sort]:
    """Those of all models."""
    found: dict[Key, Sort] = {}
    for name in testing.names():
        graph, sizes = zoo.lowered(name, dtype, batch=2)
        for device, arch in ARCHS.items():
            program, _ = _native.compile(graph.builder, backend="null", profile=device, tf32_convolutions=True)
            for row in _native.cuda_graphs(program, sizes, arch):
                step = Step(name, program, sizes, *row)
                found.setdefault(step.sort(), {}).setdefault(step.kind(), {}).setdefault(device, step)
    return list(found.values())


def turns(found: list[Sort], dtype: torch.dtype) -> Iterator[tuple[str, Step]]:
    """What is planned, and where."""
    for first, sort in enumerate(found):
        left = dict.fromkeys(device for kind in sort.values() for device in kind)
        for at, kind in enumerate(sort.values()):
            if dtype == torch.bfloat16 and at and not EVERYTHING:
                break
            devices = list(kind) if EVERYTHING else [list(kind)[(first + at) % len(kind)]]
            for device in devices:
                left.pop(device, None)
                yield device, kind[device]
        if dtype == torch.float16:
            for device in left:
                yield device, next(kind[device] for kind in sort.values() if device in kind)


def problem(device: str, step: Step, dtype: torch.dtype) -> str | None:
    """What is wrong with cuDNN's plan of a step."""
    arch, description = ARCHS[device], (DESCRIPTIONS / f"{device.lower()}.json").read_text()
    planned = _native.cuda_plans(step.program, step.sizes, arch, [step.number], description, DRIVER, TORCH)
    ((_, form, text),) = planned
    if arch < OLDEST_ARCH and dtype == torch.bfloat16:
        return None if form is None else f"{text} takes bf16"
    # What is part of the graph is for tests/cuda_cudnn.rs to say.
    return text if form is None else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_kind_has_a_plan(dtype: torch.dtype) -> None:
    found = sorts(dtype)
    planned = list(turns(found, dtype))
    failures = [f"{device}, {step}: {why}" for device, step in planned if (why := problem(device, step, dtype))]
    print(f"{dtype}: {len(found)} sorts of {sum(map(len, found))} kinds, {len(planned)} plans")
    assert not failures, f"{len(failures)} of {len(planned)} plans:\n" + "\n".join(failures)
    devices = {device for device, _ in planned}
    assert devices == ARCHS.keys(), "every device has its turn"
    if dtype == torch.float16:
        assert {device for device, step in planned if step.is_attention} == ARCHS.keys() - {"T4"}
