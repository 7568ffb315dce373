"""`precision="eager"` in f32: errors of eager's own size, for each op at a layer's size and for each model of the zoo.

The other precisions allow Winograd's convolutions, which are ten times as far from f64 as direct ones; see docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from oxidiff import testing

OP_RATIO = 4.0
"""Promised for one op: its error against f64, over eager's own."""
MODEL_RATIO = 1.25
"""The same for a model, whose errors average out."""


class _Applied(nn.Module):
    """A function of some inputs and a weight."""

    def __init__(self, run: Callable[..., Tensor], weight: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(weight, generator=generator) / max(weight[-1], 1) ** 0.5)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self.weight, *inputs)


IMAGE = (1, 320, 24, 24)
ROWS = (2, 512, 640)
HEADS = (1, 8, 512, 40)
OPS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], list[tuple[int, ...]]]] = {
    "linear": (lambda w, x: F.linear(x, w), (1280, 640), [ROWS]),
    "linear of two rows": (lambda w, x: F.linear(x, w), (1280, 640), [(2, 640)]),
    "linear with gelu": (lambda w, x: F.gelu(F.linear(x, w)), (1280, 640), [ROWS]),
    "linear of many terms": (lambda w, x: F.linear(x, w), (320, 5120), [(1, 256, 5120)]),
    "matmul": (lambda w, x, y: (x @ y.transpose(-1, -2)) * w.mean(), (8,), [HEADS, HEADS]),
    "conv 3x3": (lambda w, x: F.conv2d(x, w, padding=1), (320, 320, 3, 3), [IMAGE]),
    "conv 3x3 stride 2": (lambda w, x: F.conv2d(x, w, padding=1, stride=2), (320, 320, 3, 3), [IMAGE]),
    "conv 1x1": (lambda w, x: F.conv2d(x, w), (640, 320, 1, 1), [IMAGE]),
    "conv from 4 channels": (lambda w, x: F.conv2d(x, w, padding=1), (320, 4, 3, 3), [(1, 4, 24, 24)]),
    "upsample and conv": (
        lambda w, x: F.conv2d(F.interpolate(x, scale_factor=2.0), w, padding=1),
        (320, 320, 3, 3),
        [(1, 320, 12, 12)],
    ),
    "attention": (lambda w, *qkv: F.scaled_dot_product_attention(*qkv) * w.mean(), (8,), [HEADS] * 3),
    "attention to 77 keys": (
        lambda w, *qkv: F.scaled_dot_product_attention(*qkv) * w.mean(),
        (8,),
        [HEADS, (1, 8, 77, 40), (1, 8, 77, 40)],
    ),
    "causal attention": (
        lambda w, *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True) * w.mean(),
        (8,),
        [(1, 8, 77, 64)] * 3,
    ),
    "group norm with silu": (lambda w, x: F.silu(F.group_norm(x, 32, w)), (320,), [IMAGE]),
    "layer norm": (lambda w, x: F.layer_norm(x, (640,), w), (640,), [ROWS]),
    "rms norm": (lambda w, x: F.rms_norm(x, (640,), w), (640,), [ROWS]),
    "softmax": (lambda w, x: F.softmax(x, -1) * w, (640,), [ROWS]),
    "silu": (lambda w, x: F.silu(x) * w, (640,), [ROWS]),
    "gelu": (lambda w, x: F.gelu(x) * w, (640,), [ROWS]),
    "gelu of tanh": (lambda w, x: F.gelu(x, approximate="tanh") * w, (640,), [ROWS]),
    "geglu": (lambda w, x, y: x * F.gelu(y) * w, (640,), [ROWS, ROWS]),
    "sigmoid": (lambda w, x: torch.sigmoid(x) * w, (640,), [ROWS]),
    "exponential": (lambda w, x: torch.exp(x) * w, (640,), [ROWS]),
    "sine and cosine": (lambda w, x: torch.sin(x * 20) + torch.cos(x * 20) * w, (640,), [ROWS]),
    "mean": (lambda w, x: x.mean(-1, keepdim=True) * w, (640,), [ROWS]),
    "variance": (lambda w, x: x.var(-1, keepdim=True) * w, (640,), [ROWS]),
}


def _exact(module: nn.Module) -> nn.Module:
    return oxidiff.compile(module, precision="eager", tune="off", cache=False, strict=True)


@pytest.mark.parametrize("name", OPS)
@torch.no_grad()
def test_an_op_is_within_four_times_eagers_error(name: str) -> None:
    run, weight, shapes = OPS[name]
    module = _Applied(run, weight)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    eager = module(*inputs)
    got = _exact(module)(*inputs)
    exact = module.double()(*(x.double() for x in inputs))
    error, own = testing.relative_error(got, exact), testing.relative_error(eager, exact)
    assert 0 < own < 1e-5
    assert error <= OP_RATIO * own, f"{error:.2e}, eager {own:.2e}"


@pytest.mark.parametrize("name", testing.names())
@torch.no_grad()
def test_a_model_is_within_five_quarters_of_eagers_error(name: str) -> None:
    module = testing.build(name)
    compiled = _exact(module)
    errors, own = [], []
    for batch in (1, 2, 3):
        inputs = testing.example_inputs(name, batch=batch)
        exact = testing.reference(module, inputs)
        errors.append(testing.typical_error(compiled(**inputs), exact))
        own.append(testing.typical_error(module(**inputs), exact))
    assert math.hypot(*errors) <= MODEL_RATIO * math.hypot(*own), f"{errors}, eager {own}"


@torch.no_grad()
def test_time_embeddings_have_the_bits_of_eagers_frequencies() -> None:
    """A frequency off by its last bit would be off by 1e-4 in the sine of a thousand times it."""

    class Embedding(nn.Module):
        def forward(self, timestep: Tensor) -> Tensor:
            frequencies = torch.exp(-math.log(10_000) * torch.arange(160, dtype=torch.float32) / 160)
            angles = timestep[:, None].float() * frequencies[None]
            return torch.cat([angles.sin(), angles.cos()], -1)

    module = Embedding()
    timesteps = torch.tensor([999, 981, 1])
    got = oxidiff.compile(module, tune="off", cache=False, strict=True)(timesteps)
    assert (got - module(timesteps)).abs().max() <= 2**-23


@torch.no_grad()
def test_constants_that_are_not_finite_or_signed_zeros_keep_their_values() -> None:
    class Constants(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            mask = torch.full((4, 4), float("-inf")) * torch.ones(4)
            signed = torch.cat([torch.zeros(2), -torch.zeros(2)]) * 1.0
            rows = [mask[0], -mask[1], torch.log(torch.zeros(4) - 1.0), signed, -torch.zeros(4) * 1.0]
            inverse = 1 / (torch.stack([signed, -torch.zeros(4) * 1.0]) * x)
            zeros = x * -torch.zeros(()), 1 / (x * torch.zeros(()))
            return torch.stack(rows) + x * 0, inverse, mask + x, 1 / (-torch.zeros(4) * 1.0 * x), *zeros

    module, x = Constants(), torch.ones(4)
    for got, want in zip(oxidiff.compile(module, cache=False, strict=True)(x), module(x), strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(got.isnan(), want.isnan())
