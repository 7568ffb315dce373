"""Floats that ``forward`` computes from sizes by more than sums and products: numbers that are passed to the program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from nets import assert_close
from oxidiff.capture import capture
from oxidiff.capture.lowering import SizeDependentError
from oxidiff.entries import Eager
from oxidiff.errors import UnsupportedError


class Rope(nn.Module):
    """As Mochi's: positions over an image are scaled to an area."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        scale = (1024 / (height * width)) ** 0.5
        rows = torch.linspace(-height * scale / 2, height * scale / 2, height + 1)
        columns = torch.linspace(-width * scale / 2, width * scale / 2, width + 1)
        places = ((rows[:-1] + rows[1:]) / 2)[:, None] + ((columns[:-1] + columns[1:]) / 2)
        return self.layer(x) * (places / 64) + scale


def data(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(batch + height * width))


SIZES = ((2, 8, 12), (1, 8, 12), (2, 30, 7), (3, 64, 48), (2, 5, 5))


@torch.no_grad()
def check(compiled: Any, module: nn.Module, sizes: Any = SIZES) -> None:
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("error", oxidiff.FallbackWarning)
            assert_close(compiled(data(*size)), module(data(*size)))


def test_one_program_for_all_sizes() -> None:
    module = Rope().eval()
    compiled = oxidiff.compile(module)
    check(compiled, module)
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.fallbacks) == (1, 1, [])
    assert "pow(truediv(1024, h*w), 0.5)" in str(oxidiff.explain(compiled))


def test_they_are_those_of_python() -> None:
    """Bit for bit: the expression is what `forward` does, in its order."""
    graph = capture(Rope().eval(), (data(2, 8, 12),))
    assert len(graph.plan.computed) >= 3
    height, width = 31, 77
    point = graph.plan.complete({"b": 2, "h": height, "w": width})
    scale = (1024 / (height * width)) ** 0.5
    values = {point[c.name] for c in graph.plan.computed}
    assert {scale, -height * scale / 2, width * scale / 2} <= values


def test_stored(tmp_path: Path) -> None:
    file = tmp_path / "graph.oxidiff"
    module = Rope().eval()
    for captures in (1, 0):
        compiled = oxidiff.compile(module, graph_file=file, cache=False)
        check(compiled, module, SIZES if captures else SIZES[::-1])
        assert oxidiff.report(compiled).captures == captures


@torch.no_grad()
def test_a_number_that_is_passed_may_be_in_it() -> None:
    """It decides the value then: each is an entry, and none is captured again."""

    class Shifted(nn.Module):
        def forward(self, x: Tensor, shift: float) -> Tensor:
            return x * (x.shape[2] + shift) ** -0.5

    module = Shifted().eval()
    compiled = oxidiff.compile(module)
    for size in ((2, 8, 12), (2, 9, 3)):
        for shift in (0.5, 2.25, 7.0, 0.0):
            assert_close(compiled(data(*size), shift), module(data(*size), shift))
    assert oxidiff.report(compiled).captures <= 2


@torch.no_grad()
def test_where_there_is_no_value_eager_says_so() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x.shape[2] - 6) ** -0.5

    module = Root().eval()
    compiled = oxidiff.compile(module)
    for size in ((2, 8, 12), (2, 40, 12), (2, 7, 3)):
        assert_close(compiled(data(*size)), module(data(*size)))
    with pytest.raises(ZeroDivisionError):
        compiled(data(2, 6, 12))
    with pytest.warns(oxidiff.FallbackWarning):
        # A complex number, in Python.
        assert torch.equal(compiled(data(2, 3, 12)), module(data(2, 3, 12)))
    assert_close(compiled(data(2, 9, 12)), module(data(2, 9, 12)))


class Attention(nn.Module):
    """Attention whose scale follows from how many there are, as where a model was trained at another length."""

    def forward(self, x: Tensor, other: int) -> Tensor:
        scaled = F.scaled_dot_product_attention(x, x, x, scale=x.shape[1] ** -0.5)
        return scaled + F.scaled_dot_product_attention(x, x, x, scale=1 / (other + 1))


@torch.no_grad()
def test_attention_is_scaled_by_what_follows_from_sizes() -> None:
    module = Attention()
    compiled = oxidiff.compile(module, cache=False, tune="off", strict=True)
    for length, other in ((7, 3), (7, 3), (12, 3), (90, 20), (7, 2)):
        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))
        assert_close(compiled(x, other), module(x, other))
    assert oxidiff.report(compiled).captures == 1


def test_a_number_that_cannot_be_left_open_is_said_again() -> None:
    error = SizeDependentError("the scale depends on the call", {"c"}, module="block", op="aten.softmax")
    again = Eager(error).error()
    assert type(again) is UnsupportedError
    assert (str(again), again.module, again.op) == (str(error), "block", "aten.softmax")
