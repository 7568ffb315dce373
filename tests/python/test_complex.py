"""Modules that compute with complex numbers: compiled as pairs of real ones, their complex weights as live as others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from files import python
from nets import assert_close

WIDTH = 8


def _angles(seed: int = 0) -> Tensor:
    return torch.polar(torch.ones(WIDTH // 2), torch.randn(WIDTH // 2, generator=torch.Generator().manual_seed(seed)))


class Rotary(nn.Module):
    """Turns pairs of channels by the angles in a buffer, then by those in a plain attribute."""

    turn: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("turn", _angles(seed))
        self.other = _angles(seed + 1)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.mix(x).float().unflatten(-1, (-1, 2))) * self.turn * self.other
        turned = turned * (1 + 2j)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _tokens(count: int = 5) -> Tensor:
    return torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(count))


def _check(compiled: nn.Module, module: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
    report = oxidiff.report(compiled)
    assert not report.fallbacks
    assert report.eager_calls == 0


@torch.no_grad()
def test_one_program_for_every_size() -> None:
    module = Rotary().eval()
    compiled = oxidiff.compile(module)
    for count in (5, 9, 1):
        _check(compiled, module, _tokens(count))
    assert oxidiff.report(compiled).programs == 1


def _write(module: Rotary) -> None:
    module.turn.mul_(1j)


def _write_attribute(module: Rotary) -> None:
    module.other.copy_(_angles(7))


def _replace(module: Rotary) -> None:
    module.turn = _angles(8)


def _replace_attribute(module: Rotary) -> None:
    module.other = _angles(9)


def _replace_memory(module: Rotary) -> None:
    module.turn.data = _angles(10)


def _replace_memory_of_attribute(module: Rotary) -> None:
    module.other.data = _angles(11)


def _write_unseen(module: Rotary) -> None:
    module.turn.numpy()[:] *= -1


def _load(module: Rotary) -> None:
    module.load_state_dict(Rotary(12).state_dict())


CHANGES = (
    _write,
    _write_attribute,
    _replace,
    _replace_attribute,
    _replace_memory,
    _replace_memory_of_attribute,
    _write_unseen,
    _load,
)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_weights_are_live(change) -> None:  # type: ignore[no-untyped-def]
    module = Rotary().eval()
    compiled = oxidiff.compile(module)
    x = _tokens()
    before = compiled(x)
    change(module)
    _check(compiled, module, x)
    assert not torch.allclose(compiled(x), before, atol=1e-3)
    assert oxidiff.report(compiled).programs == 1


@torch.no_grad()
def test_modules_share_a_program() -> None:
    modules = [Rotary(seed).eval() for seed in (0, 20)]
    compiled = [oxidiff.compile(module) for module in modules]
    for one, module in zip(compiled, modules, strict=True):
        _check(one, module, _tokens())
    assert oxidiff.report(compiled[1]).programs == 0


@torch.no_grad()
def test_saved_and_loaded_in_another_process(tmp_path: Path) -> None:
    module = Rotary(3).eval()
    compiled = oxidiff.compile(module)
    x = _tokens()
    torch.save({"x": x, "y": compiled(x)}, tmp_path / "call.pt")
    oxidiff.save_graph(compiled, tmp_path / "graph")
    python(
        f"""
        import torch, oxidiff
        from test_complex import Rotary
        compiled = oxidiff.compile(Rotary(3).eval())
        oxidiff.load_graph(compiled, {str(tmp_path / "graph")!r})
        call = torch.load({str(tmp_path / "call.pt")!r})
        with torch.no_grad():
            assert torch.equal(compiled(call["x"]), call["y"])
        report = oxidiff.report(compiled)
        assert report.captures == 0 and not report.fallbacks, report
        """
    )


class Squared(Rotary):
    """An op between them that has no form in real numbers here."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.mix(x).unflatten(-1, (-1, 2))) * self.turn
        return self.mix(torch.view_as_real(turned.sinh() * self.other).flatten(-2))


@torch.no_grad()
def test_numbers_that_go_between_parts_are_eager_and_told() -> None:
    module = Squared().eval()
    compiled = oxidiff.compile(module)
    x = _tokens()
    with pytest.warns(oxidiff.FallbackWarning):
        torch.testing.assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert any("sinh" in row["op"] for row in report.fallbacks)
    module.turn.mul_(1j)
    torch.testing.assert_close(compiled(x), module(x))


class Tables(Rotary):
    """Turns texts of several lengths, padded together, and the padding too."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.mix(x).unflatten(-1, (-1, 2))) * self.turn
        together = nn.utils.rnn.pad_sequence([turned[0], turned[1, 2:]], batch_first=True, padding_value=3.0)
        return torch.view_as_real(together * self.other).flatten(-2)


@torch.no_grad()
def test_shorter_sequences_are_padded_with_a_real_number() -> None:
    module = Tables().eval()
    compiled = oxidiff.compile(module)
    for count in (5, 9):
        _check(compiled, module, _tokens(count))


class Spectrum(Rotary):
    """Gives complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.mix(x).unflatten(-1, (-1, 2))) * self.turn


@torch.no_grad()
def test_results_of_complex_numbers() -> None:
    module = Spectrum().eval()
    compiled = oxidiff.compile(module)
    x = _tokens()
    with pytest.warns(oxidiff.FallbackWarning, match="complex"):
        result = compiled(x)
    assert result.dtype is torch.complex64
    torch.testing.assert_close(result, module(x))
    with pytest.raises(oxidiff.UnsupportedError, match="complex"):
        oxidiff.compile(module, options=oxidiff.CompileOptions(strict=True))(x)


def _table(count: int) -> Tensor:
    """Angles for each of some tokens."""
    return torch.stack([_angles(seed) for seed in range(count)])


class Turn(nn.Module):
    """Takes complex numbers."""

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


@torch.no_grad()
def test_arguments_of_complex_numbers(tmp_path: Path) -> None:
    """As rotary embeddings that a pipeline makes: pairs of real numbers, however they lie in memory."""
    module = Turn().eval()
    file = tmp_path / "turn.oxidiff"
    for captures in (1, 0):
        compiled = oxidiff.compile(module, strict=True, cache=False, graph_file=file)
        for count in (6, 11, 3):
            x, turn = _tokens(count), _table(count)
            torch.testing.assert_close(compiled(x, turn), module(x, turn))
            torch.testing.assert_close(compiled(x, turn[:1].expand(count, -1)), module(x, turn[:1].expand(count, -1)))
        assert oxidiff.report(compiled).captures == captures
    # Transposed, with gaps, in double precision.
    compiled = oxidiff.compile(module, strict=True, cache=False)
    x, turn = _tokens(6), _table(6)
    for other in (turn.t().contiguous().t(), turn.repeat_interleave(2, dim=1)[:, ::2], turn.to(torch.complex128)):
        torch.testing.assert_close(compiled(x, other), module(x, other))


@torch.no_grad()
def test_what_is_returned_as_it_was_given() -> None:
    class Both(Turn):
        def forward(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, turn), turn

    module = Both().eval()
    x, turn = _tokens(6), _table(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        result = oxidiff.compile(module)(x, turn)
    torch.testing.assert_close(result, module(x, turn))


@pytest.mark.parametrize("lazily", [lambda t: t.conj().imag, lambda t: t.conj()], ids=["negated", "conjugated"])
@torch.no_grad()
def test_tensors_whose_memory_holds_something_else(lazily: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", lazily(torch.randn(8, dtype=torch.complex64)))

        def forward(self, x: Tensor) -> Any:
            return (x * self.factor).real if self.factor.is_complex() else x * self.factor

    module = Scaled()
    compiled = oxidiff.compile(module)
    x = torch.randn(3, 8)
    assert_close(compiled(x), module(x))
