"""Sizes that are padded to multiples of something: one program, whatever the rest."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from nets import assert_close


class Padded(nn.Module):
    """Patches of the image, and larger ones of what it is padded to, as those of a history of frames are."""

    def __init__(self, units: tuple[int, ...] = (4, 8), mode: str = "replicate") -> None:
        super().__init__()
        self.units, self.mode = units, mode
        self.patches = nn.ModuleList([nn.Conv2d(3, 8, unit, stride=unit) for unit in (2, *units)])
        self.last = nn.Linear(8, 8)

    def pad(self, x: Tensor, unit: int) -> Tensor:
        height, width = x.shape[-2:]
        return F.pad(x, (0, (unit - width % unit) % unit, 0, (unit - height % unit) % unit), mode=self.mode)

    def forward(self, x: Tensor) -> Tensor:
        padded = [self.pad(x, unit) if unit > 2 else x for unit in (2, *self.units)]
        rows = [patch(p).flatten(2).transpose(1, 2) for patch, p in zip(self.patches, padded, strict=True)]
        tokens = rows[0]
        for more in rows[1:]:
            tokens = torch.cat([more, tokens], dim=1)
        return self.last(tokens.softmax(1) @ tokens.transpose(1, 2) @ tokens)  # type: ignore[no-any-return]


class Unlike(Padded):
    """Sides that are padded are another program."""

    def pad(self, x: Tensor, unit: int) -> Tensor:
        height, width = x.shape[-2:]
        x = super().pad(x, unit)
        return x * 2 if height % unit or width % unit == 6 else x


class Cut(Padded):
    """Cuts off what a multiple does not hold."""

    def pad(self, x: Tensor, unit: int) -> Tensor:
        height, width = x.shape[-2:]
        return x[..., : height - height % unit, : width - width % unit]


class Odd(Padded):
    """Another thing for what it is padded by."""

    def pad(self, x: Tensor, unit: int) -> Tensor:
        rest = -x.shape[-2] % unit
        return super().pad(x, unit) * (1 if rest < 4 else 3)


SIDES = [(16, 16), (8, 24), (12, 20), (18, 32), (14, 26), (10, 10), (34, 22), (40, 38)]


@torch.no_grad()
def run(module: nn.Module, sides: list[tuple[int, int]], **options: Any) -> oxidiff.Report:
    compiled: Any = oxidiff.compile(module.eval(), cache=False, **options)
    for i, (height, width) in enumerate(sides):
        x = torch.randn(1 + i % 2, 3, height, width)
        assert_close(compiled(x), module(x))
    return oxidiff.report(compiled)


@pytest.mark.parametrize("start", range(0, len(SIDES), 3))
@pytest.mark.parametrize("units", [(4, 8), (8,), (4, 16)])
def test_one_program_for_all_rests(units: tuple[int, ...], start: int) -> None:
    report = run(Padded(units), [*SIDES[start:], *SIDES[:start]], strict=True)
    assert (report.captures, report.programs) == (1, 1)


@pytest.mark.parametrize("kind", [Unlike, Cut, Odd])
def test_what_depends_on_rests_is_right(kind: type[Padded]) -> None:
    run(kind(), [*SIDES, *itertools.product((8, 20, 22), (16, 30))])


@pytest.mark.parametrize("mode", ["constant", "reflect", "circular"])
def test_other_ways_to_pad(mode: str) -> None:
    run(Padded(mode=mode), [*SIDES, (20, 22), (22, 30)])


@torch.no_grad()
def test_a_loaded_graph_pads_too(tmp_path: Path) -> None:
    module = Padded().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    calls = [torch.randn(1, 3, *sides) for sides in SIDES]
    expected = [compiled(x) for x in calls]
    oxidiff.save_graph(compiled, tmp_path / "graph")
    loaded: Any = oxidiff.compile(module, cache=False, strict=True)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    for x, result in zip(calls, expected, strict=True):
        assert_close(loaded(x), result)
    assert oxidiff.report(loaded).captures == 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_rows_are_repeated_as_often_as_sizes_say(dtype: torch.dtype) -> None:
    class Repeats(nn.Module):
        def forward(self, x: Tensor, like: Tensor) -> Tensor:
            more = like.shape[-1]
            padded = F.pad(
                x.to(torch.float32 if dtype is torch.int64 else dtype), (more - 3, 2 * more), mode="replicate"
            )
            return padded.to(dtype)

    compiled: Any = oxidiff.compile(Repeats(), cache=False)
    eager = Repeats()
    make = functools.partial(torch.randn, dtype=torch.float32)
    for more, width in ((4, 5), (7, 9), (3, 6)):
        x = (make(2, 3, width) * 9).to(dtype)
        assert_close(compiled(x, torch.zeros(1, more)), eager(x, torch.zeros(1, more)))


class Controlled(nn.Module):
    """Adds what comes from elsewhere to an image, a text or both in one sequence, each padded to a multiple."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit = unit
        self.layer = nn.Linear(8, 8)
        self.patch = nn.Conv2d(3, 8, 2, stride=2)

    def padded(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, 0, 0, -tokens.shape[1] % self.unit))

    def forward(self, image: Tensor | None, text: Tensor | None, more: Tensor) -> Tensor:
        rows = [] if image is None else [self.padded(self.patch(image).flatten(2).transpose(1, 2))]
        if text is not None:
            rows.append(self.padded(text))
        tokens = self.layer(torch.cat(rows, dim=1)) + more
        return tokens.softmax(1)


def controlled(unit: int, sides: tuple[int, int] | None, length: int | None) -> tuple[Any, ...]:
    """A call of :class:`Controlled`."""
    image = None if sides is None else torch.randn(1, 3, *sides)
    text = None if length is None else torch.randn(1, length, 8)
    counts = (0 if sides is None else sides[0] * sides[1] // 4, length or 0)
    return image, text, torch.randn(1, sum(-(-count // unit) * unit for count in counts), 8)


CONTROLLED = {
    "a text": [(None, length) for length in (45, 101, 41, 303, 75)],
    "an image": [(sides, None) for sides in ((10, 14), (18, 22), (6, 10), (34, 18))],
    "both": [((10, 14), 45), ((18, 22), 19), ((6, 10), 75), ((34, 18), 3)],
    "both, one full": [((16, 16), 45), ((32, 48), 19), ((16, 64), 75), ((64, 16), 3)],
}


@torch.no_grad()
def test_what_is_padded_to_an_even_number_is_right() -> None:
    module = Controlled(2).eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for sides, length in (((18, 14), 33), ((10, 14), 7), ((18, 22), 8), ((6, 10), None), (None, 9)):
        call = controlled(2, sides, length)
        assert_close(compiled(*call), module(*call))


@pytest.mark.parametrize("unit", [8, 32])
@pytest.mark.parametrize("sizes", CONTROLLED.values(), ids=CONTROLLED)
@torch.no_grad()
def test_lengths_follow_from_padded_ones(sizes: list[Any], unit: int, tmp_path: Path) -> None:
    module = Controlled(unit).eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    calls = [controlled(unit, *size) for size in sizes]
    for call in calls:
        assert_close(compiled(*call), module(*call))
    assert oxidiff.report(compiled).captures == 1
    oxidiff.save_graph(compiled, tmp_path / "graph")
    loaded: Any = oxidiff.compile(module, cache=False, strict=True)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    for call in reversed(calls):
        assert_close(loaded(*call), module(*call))
    assert oxidiff.report(loaded).captures == 0


class HalvedByOrder(nn.Module):
    """Halves an image, and does another thing with one that is higher than wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        y = self.second(self.first(x).relu())
        return y.flip(2) if height > width else y + 1


@torch.no_grad()
def test_sides_that_are_halved_may_be_compared() -> None:
    module = HalvedByOrder().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    sizes = [
        (29, 31),
        (37, 36),
        (30, 24),
        (35, 27),
        (18, 37),
        (13, 23),
        (21, 39),
        (14, 24),
        (40, 11),
        (27, 32),
        (10, 31),
    ]
    for height, width in sizes:
        x = torch.randn(2, 3, height, width)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 2
