"""Where lengths that are padded are traced: alike in what a program may ask of them, unlike in everything else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from oxidiff.capture.dim import Dim
from oxidiff.capture.points import ranks_of
from oxidiff.capture.roundings import (
    UNITS,
    area_aside,
    areas_alike,
    halved_alike,
    halvings,
    padded_alike,
    padded_aside,
    rounded_aside,
    rounded_plans,
)
from oxidiff.capture.sizes import Area, Rounded, Symbol

Here = dict[str, int]


def _heres(unit: int, count: int) -> list[Here]:
    """Lengths of calls: any, full ones, and some of as many units."""
    source = random.Random(unit * 10 + count)
    rows = [[source.randint(2, 5 * unit) for _ in range(count)] for _ in range(20)]
    rows += [[unit * source.randint(1, 3) for _ in range(count)] for _ in range(10)]
    rows += [[2 * unit - source.randint(0, unit - 1) for _ in range(count)] for _ in range(10)]
    return [{f"s{i}": value for i, value in enumerate(row)} for row in rows]


def _asked(rounded: tuple[Rounded, ...], here: Here) -> tuple[list[bool], list[int]]:
    return [r.is_full(here) for r in rounded], ranks_of([r.at(here) for r in rounded])


def _order(here: Here) -> list[int]:
    return ranks_of(list(here.values()))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("unit", UNITS)
def test_padded_lengths_are_alike_in_what_is_asked(unit: int, count: int) -> None:
    rounded = tuple(Rounded(f"r{i}", f"s{i}", unit) for i in range(count))
    for here in _heres(unit, count):
        values = padded_alike(rounded, here)
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        for row in (*rows, padded_aside(rounded, here)):
            assert _asked(rounded, row) == _asked(rounded, here), (here, row)
            # Three lengths of as many units have no room in a small one to be in order.
            assert _order(row) == _order(here) or (count == 3 and unit < 32), (here, row)
            assert all(value > 1 for value in row.values()), (here, row)


@pytest.mark.parametrize("unit", UNITS[2:])
def test_other_units_show(unit: int) -> None:
    """Where lengths are taken to be padded to half or twice the unit, no sum of multiples of what is known there gives what
    they are padded to: a wrong unit does not fit by chance."""
    mine = Rounded("r", "s0", unit)
    for here in _heres(unit, 1):
        for other in (Rounded("r", "s0", unit // 2), Rounded("r", "s0", unit * 2)):
            if other.unit > unit and other.is_full(here):
                continue
            rows = [here, *({"s0": value} for value in padded_alike((other,), here)["s0"])]
            known = torch.tensor([[1, row["s0"], other.at(row)] for row in rows], dtype=torch.float64)
            padded = torch.tensor([[mine.at(row)] for row in rows], dtype=torch.float64)
            ranks = [int(torch.linalg.matrix_rank(matrix)) for matrix in (known, torch.cat([known, padded], dim=1))]
            assert ranks[0] < ranks[1], (here, other)


@pytest.mark.parametrize("patch", [1, 2, 4])
@pytest.mark.parametrize("unit", UNITS[1:])
def test_padded_images_are_alike_in_what_is_asked(unit: int, patch: int) -> None:
    """And no two sides or numbers of units are equal, so that none of them is taken for another."""
    source = random.Random(unit * 10 + patch)
    tokens = Dim.symbol("h") * Dim.symbol("w") / patch**2
    for _ in range(6):
        here = {"h": source.randint(8, 64) * patch, "w": source.randint(8, 64) * patch}
        if source.randrange(2):
            here["w"] = -(-here["w"] // unit) * unit
        sides = (Symbol("h", "spatial", 0, here["h"]), Symbol("w", "spatial", 1, here["w"]))
        area = Area("hwr", tokens, unit)
        tried = 0
        for values in areas_alike(area, sides, patch, here):
            rows = [here, *(dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))]
            aside = area_aside(area, {"h": patch, "w": patch}, here, rows)
            assert aside == {"h": here["h"], "w": here["w"]} or area.is_full(aside) == area.is_full(here)
            assert [area.is_full(row) for row in rows] == [area.is_full(here)] * len(rows)
            assert all(tokens.exact(row).denominator == 1 for row in rows)
            for kind in ([row["h"] for row in rows], [row["w"] for row in rows], [area.at(row) for row in rows]):
                assert len(set(kind)) == len(rows), rows
            tried += 1
        assert tried, here


def test_plans_are_named_unlike_other_sizes() -> None:
    lengths = [Symbol(name, "sequence", i, 10 + i) for i, name in enumerate(("s", "s2"))]
    first, second, *_ = rounded_plans(lengths, ["s", "s2", "sr", "b"])
    assert [(r.name, r.of, r.unit) for r in first] == [("s", "s", 1), ("s2", "s2", 1)]
    names = [r.name for r in second]
    assert names == ["s", "s2r"]
    assert all(r.unit == 2 for r in second)
    # A length that is a multiple says itself how many units it has.
    assert [r.name == r.of for r in second] == [True, False]


@pytest.mark.parametrize("unit", [2, 4, 8, 16])
def test_halved_sides_are_rounded_somewhere_at_each_point(unit: int) -> None:
    moduli = {"h": unit, "w": unit}
    for height in range(unit, 2 * unit):
        for width in range(3 * unit, 4 * unit):
            sides = [Symbol("h", "spatial", 0, height), Symbol("w", "spatial", 1, width)]
            is_whole = height % unit == width % unit == 0
            expected = {(name, 1 << k) for name in moduli for k in range(1, unit.bit_length())}
            assert halvings(sides, moduli) == (set() if is_whole else expected)
            values = halved_alike(sides, moduli)
            points = [(height, width), *zip(values["h"], values["w"], strict=True)]
            assert is_whole or all(h % unit or w % unit for h, w in points), (height, width)
            # No form of a side and one of its halves is that of another half.
            for of, name in enumerate("hw"):
                columns = [[-(-point[of] // (1 << k)) for point in points] for k in range(unit.bit_length())]
                for one, other in itertools.pairwise(columns):
                    assert len({one[i] - 2 * other[i] for i in range(len(points))}) > 1, (name, height, width)
            # Nor is whether one is odd, of which padding follows, what it is of a half of the other side.
            odd = [
                [[-(-point[of] // (1 << k)) % 2 for point in points] for k in range(unit.bit_length() - 1)]
                for of in (0, 1)
            ]
            for one, other in itertools.product(*odd):
                assert len({a ^ b for a, b in zip(one, other, strict=True)}) > 1 or is_whole, (height, width)


@pytest.mark.parametrize("unit", [2, 8])
def test_a_graph_of_rounded_halves_is_not_checked_where_all_are_whole(unit: int) -> None:
    areas = [Area(f"{name}r{1 << k}", Dim.symbol(name), 1 << k) for name in "hw" for k in range(1, unit.bit_length())]
    for height, width in itertools.product(range(unit, 2 * unit), repeat=2):
        here = {"h": height, "w": width}
        for h, w in itertools.product((-1, 0, 1), repeat=2):
            point = {"h": height + h, "w": width + w}
            aside = point | rounded_aside(areas, {"h": 1, "w": 1}, here, point)
            assert not (aside["h"] % unit == aside["w"] % unit == 0) or height % unit == width % unit == 0, (
                here,
                point,
            )
            assert aside == point or point["h"] % unit == point["w"] % unit == 0, (here, point)


def test_sides_that_are_divided_by_three_are_not_halved() -> None:
    sides = [Symbol("h", "spatial", 0, 7), Symbol("w", "spatial", 1, 9)]
    assert halvings(sides, {"h": 6, "w": 2}) == set()
    assert halvings(sides, {"h": 1, "w": 4}) == {("w", 2), ("w", 4)}


def test_a_side_that_is_halved_once_is_of_one_rest() -> None:
    sides = [Symbol("h", "spatial", 0, 7), Symbol("w", "spatial", 1, 8)]
    assert halvings(sides, {"h": 2, "w": 1}) == set()

    def function(x: Tensor) -> Tensor:
        return F.pad(F.pad(x, (0, 0, 1, 1))[:, :, 0:-1:2], (0, 0, 0, 1))

    compiled: Any = oxidiff.compile(function, strict=True, cache=False)
    for height, width in ((7, 5), (9, 6), (8, 5), (12, 9), (31, 4)):
        x = torch.randn(1, 2, height, width)
        assert torch.equal(compiled(x), function(x))
    assert oxidiff.report(compiled).captures <= 2


class Padded(nn.Module):
    """Pads a text to as many words as it takes, and cuts off what is more."""

    def __init__(self, most: int, kind: str) -> None:
        super().__init__()
        self.layer, self.most, self.kind = nn.Linear(8, 8), most, kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        missing = self.most - x.shape[1]
        if self.kind == "pad":
            return F.pad(x, (0, 0, 0, missing)).tanh()
        if self.kind == "front":
            return F.pad(x, pad=[0, 0, missing, 0], value=1.5).tanh()
        return torch.stack([torch.cat([one, one.new_zeros(missing, 8)]) for one in x]).tanh()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pad", "front", "zeros"])
@pytest.mark.parametrize(("most", "lengths"), [(12, (7, 9, 5, 11)), (512, (77, 60, 200, 511, 8))])
def test_lengths_that_are_padded_to_a_number(kind: str, most: int, lengths: tuple[int, ...]) -> None:
    module = Padded(most, kind).eval()
    compiled = oxidiff.compile(module, cache=False)
    for batch, length in itertools.product((1, 2), lengths):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(compiled(x), module(x))
    assert compiled.report().captures == 1 + (kind == "zeros")
    if kind != "zeros":
        # A longer one is another program, as it is cut off.
        for length in (most + 3, most + 40):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(compiled(x), module(x))
        assert compiled.report().captures == 2


LAST = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
WAVE = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 8, 7, padding=3), nn.SiLU())


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (LAST, [(1, 10, 12, 8), (2, 14, 10, 8), (1, 7, 7, 8), (3, 64, 9, 8)]),
        (WAVE, [(1, 800), (2, 1203), (1, 1600), (3, 77)]),
    ],
    ids=["channels at the end", "a sound"],
)
def test_a_size_that_was_taken_for_channels(module: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Its second value shows that it is none."""
    compiled = oxidiff.compile(module.eval(), cache=False)
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), module(x))
    assert compiled.report().captures == 2
