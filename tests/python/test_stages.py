"""Ops that the compiler does not know run in eager PyTorch between programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close, image


class Fourier(nn.Module):
    """A filter in the frequency domain between convolutions, as FreeU has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        x = self.first(x)
        spectrum = torch.fft.fftn(x, dim=(-2, -1))
        spectrum = spectrum * scale * self.gain
        x = torch.fft.ifftn(spectrum, dim=(-2, -1)).real
        return self.second(torch.nn.functional.silu(x)) * scale


class Rotation(nn.Module):
    """Rotary positions by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.query(x)
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        turns = torch.polar(torch.ones_like(angles), angles)
        rotated = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (4, 2))) * turns).flatten(-2)
        return self.out(rotated), q


@torch.no_grad()
def test_fourier_filter() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    with pytest.warns(oxidiff.FallbackWarning, match=r"runs an op in eager PyTorch: aten\._?fft"):
        compiled(image())
    for shape in ((2, 3, 16, 16), (1, 3, 24, 8), (3, 3, 10, 12)):
        for scale in (0.5, 2.0):
            x = image(*shape)
            assert_close(compiled(x, scale=scale), module(x, scale=scale))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.captures) == (7, 0, 1)
    assert report.programs == 2
    assert {item["count"] for item in report.fallbacks} == {7}
    assert any("fft" in item["op"] for item in report.fallbacks)
    kernels = [step["kernel"] for step in oxidiff.profile(compiled, image()).steps]
    assert "eager" in kernels and "convolution" in kernels


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_weights_of_programs_and_of_eager_ops_stay_live() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    compiled(image())
    for parameter in (module.first.weight, module.second.bias, module.gain):
        parameter.mul_(-1.5)
        assert_close(compiled(image()), module(image()))
    module.gain = nn.Parameter(torch.rand(4, 1, 1))
    assert_close(compiled(image()), module(image()))
    assert oxidiff.report(compiled).captures == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_complex_numbers_stay_eager() -> None:
    module = Rotation().eval()
    compiled: Any = oxidiff.compile(module)
    for length in (4, 7, 12):
        x = torch.randn(2, length, 8)
        assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.captures) == (0, 1)
    assert report.programs >= 2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_channels_last_argument() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    x = image().to(memory_format=torch.channels_last)
    assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 0


def test_strict_raises() -> None:
    compiled: Any = oxidiff.compile(Fourier().eval(), strict=True)
    with torch.no_grad(), pytest.raises(oxidiff.UnsupportedError, match="fft"):
        compiled(image())


@torch.no_grad()
def test_nothing_left_for_the_compiler_runs_eager() -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(x)

    compiled: Any = oxidiff.compile(Only())
    with pytest.warns(oxidiff.FallbackWarning, match="runs in eager PyTorch"):
        compiled(image(4, 4))
    assert oxidiff.report(compiled).eager_calls == 1
