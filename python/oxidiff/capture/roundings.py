"""Sizes that programs round, and where to trace them: padded lengths, areas of patches, sides that are halved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import combinations, product
from math import prod
from typing import Any

from .points import MULTIPLE, ranks_of
from .sizes import Area, Rounded, Symbol

__all__ = [
    "PATCHES",
    "SHOWING",
    "UNITS",
    "area_aside",
    "area_units",
    "areas_alike",
    "edges_alike",
    "halved_alike",
    "halvings",
    "move_alone",
    "padded_alike",
    "padded_aside",
    "rounded_aside",
    "rounded_plans",
    "sides_in_order",
]

UNITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What lengths are padded to multiples of: nothing but each other first."""
_STEPS = ((1, 1, 0, 1, 3), (2, 3, 2, 5, 1), (5, 4, 1, 3, 4), (8, 9, 5, 7, 2), (14, 11, 3, 2, 3))
"""Of each point at which padded lengths are solved: how many units are added to all, how many more for each length that is
larger, and for its square, so that no length follows from two others; how many eighths of a unit are padding, and between
lengths of as many units. Odd and even, little and much of it: another unit, half or double, would show. Five, as forms must
hold at more points than they have unknowns."""


def rounded_plans(lengths: Sequence[Symbol], used: Iterable[str]) -> Iterator[tuple[Rounded, ...]]:
    """These lengths in each of the units that programs pad to, the simplest first."""
    names = [next(n for n in (f"{s.name}r", *(f"{s.name}r{i}" for i in range(99))) if n not in used) for s in lengths]
    for unit in UNITS:
        shared: dict[int, str] = {}
        rounded = []
        for s, name in zip(lengths, names, strict=True):
            count = -(-int(s.value) // unit)
            is_full = count * unit == s.value
            rounded.append(Rounded(s.name if is_full else shared.setdefault(count, name), s.name, unit))
        if unit > 1 or len(lengths) > 1:
            yield tuple(rounded)


def padded_alike(rounded: Sequence[Rounded], here: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Values for each of these lengths at which to trace: padded where they are padded at ``here``, and so many units that
    they compare as they do there, and the lengths too; otherwise unlike each other."""
    counts = [r.at(here) for r in rounded]
    out: dict[str, tuple[int, ...]] = {}
    for r, count, rank in zip(rounded, counts, ranks_of(counts), strict=True):
        most = r.unit - 1
        # Lengths of as many units: the longest of them has the least padding.
        among = sorted(
            {-int(here[o.of]) for o, n in zip(rounded, counts, strict=True) if n == count and o.unit == r.unit}
        )
        among = [length for length in among if length % r.unit]
        values = []
        for i, (step, more, bend, _, apart) in enumerate(_STEPS):
            padding = 0
            # No two lengths are padded alike.
            eighths = _STEPS[(i + rank) % len(_STEPS)][3]
            if not r.is_full(here):
                place = among.index(-int(here[r.of]))
                gap = max(1, most * apart // (8 * len(among)))
                padding = min(1 + most * eighths // (8 if len(among) == 1 else 16) + place * gap, most)
            # Far apart, whatever the unit: what larger units decide shows too.
            wide = max(1, MULTIPLE // r.unit)
            units = count + (step + rank * more + rank**2 * bend) * wide + (i % 3 if wide > 1 else 0)
            values.append(units * r.unit - padding)
        out[r.of] = tuple(values)
    return out


def move_alone(values: Mapping[str, Sequence[int]]) -> bool:
    """Whether no two of these lengths always differ by as much: sums of lengths would be taken for others."""
    return all(
        len({a - b for a, b in zip(one, other, strict=True)}) > 1 for one, other in combinations(values.values(), 2)
    )


def padded_aside(rounded: Sequence[Rounded], here: Mapping[str, Any]) -> dict[str, int]:
    """Values of these lengths unlike those of :func:`padded_alike`: all a unit longer than ``here``, with one less or one
    more of padding, where any other modulus shows."""
    out = {}
    for r in rounded:
        value, count = int(here[r.of]) + r.unit, r.at(here) + 1
        near = () if r.is_full(here) else (value - 1, value + 1)
        out[r.of] = next((v for v in near if (count - 1) * r.unit < v < count * r.unit), value)
    if ranks_of(list(out.values())) != ranks_of([int(here[r.of]) for r in rounded]):
        # One more of padding made two of them equal.
        out = {r.of: int(here[r.of]) + r.unit for r in rounded}
    return out


PATCHES = (2, 1, 4)
"""Pixels along an edge that are one token, of models that pad them; the likeliest first."""
SHOWING = (27, 19)
"""Sides of an image in tokens, one more than a multiple of all units: what it is padded to shows the unit."""
_AREA_POINTS = 5
"""At how many points areas are solved: forms must hold at more points than they have unknowns."""
_AREA_SPREAD = 96
"""Among how many values of a side these are looked for."""


def area_units(numbers: Set[Any], here: Set[Any]) -> Iterator[int]:
    """What the tokens of an image may be padded to multiples of, by the numbers of a trace where its sides are
    :data:`SHOWING` and those of the call."""
    tokens = prod(SHOWING)
    if tokens in numbers:
        yield from (unit for unit in UNITS if unit > 1 and tokens - 1 + unit in numbers - here)


def areas_alike(
    area: Area, sides: tuple[Symbol, Symbol], patch: int, here: Mapping[str, Any]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Sets of values for the sides of an image at which to trace, the best guess first: padded where it is padded at
    ``here``, otherwise unlike each other."""
    values = [int(s.value) // patch for s in sides]
    for low, high in ((0.5, 4), (0, 1)):
        chosen: list[tuple[int, int]] = []
        counts = {area.at(here)}
        starts = [max(2, int(value * low)) for value in values]
        ends = [min(int(value * high) + 1, start + _AREA_SPREAD) for value, start in zip(values, starts, strict=True)]
        spread = product(*map(range, starts, ends))
        # In an order without order: neighbours have sides in common.
        for a, b in sorted(spread, key=lambda pair: ((pair[0] * 37 + pair[1] * 101) % 211, pair)):
            point = {sides[0].name: a * patch, sides[1].name: b * patch}
            is_alike = area.is_full(point) == area.is_full(here) and area.at(point) not in counts
            if is_alike and a != b and all(a != x and b != y for x, y in (values, *chosen)):
                chosen.append((a, b))
                counts.add(area.at(point))
            if len(chosen) == _AREA_POINTS:
                rows = zip(*chosen, strict=True)
                yield {s.name: tuple(v * patch for v in row) for s, row in zip(sides, rows, strict=True)}
                break


def halvings(sides: Sequence[Symbol], moduli: Mapping[str, int]) -> set[tuple[str, int]]:
    """What the sides of an image are divided by on their way through levels that halve them, if a half is rounded in the
    call. Those of which all are whole are told apart from others by what programs do with them: they upsample by two."""
    units = {s.name: moduli[s.name] for s in sides}
    is_whole = all(int(s.value) % units[s.name] == 0 for s in sides)
    # Where one side is halved once, all others have the same rest.
    if is_whole or prod(units.values()) <= 2 or any(unit.bit_count() > 1 for unit in units.values()):
        return set()
    return {(name, 1 << k) for name, unit in units.items() for k in range(1, unit.bit_length())}


_EDGES = ((1, 6, 11, 16, 23, 28, 34), (2, 5, 15, 8, 21, 12, 31))
"""How many patches or pixels are added to each side of an image at points at which padded ones are solved: with all rests by
4, most of those by 8, and none."""


def edges_alike(sides: Sequence[Symbol], step: int) -> dict[str, tuple[int, ...]]:
    """Values for the sides of an image at which to trace, padded or not, unlike each other, in steps of so many pixels."""
    return {s.name: tuple([int(s.value) + step * k for k in row]) for s, row in zip(sides, _EDGES, strict=True)}


def halved_alike(sides: Sequence[Symbol], moduli: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """As :func:`edges_alike`, for sides that are halved: at none of the points all halves are whole, and which halves of one
    side are odd is not as it is with halves of the other, or a number that follows from the one may seem to follow from
    the other."""
    values = edges_alike(sides, 1)
    names = list(values)
    last = max(names, key=moduli.__getitem__)
    found: list[dict[str, tuple[int, ...]]] = []
    for turn in range(len(values[last])):
        turned = {**values, last: values[last][turn:] + values[last][:turn]}
        rows = [dict(zip(names, row, strict=True)) for row in zip(*turned.values(), strict=True)]
        for row in rows:
            row[last] += all(row[name] % moduli[name] == 0 for name in names)
        found.append({name: tuple([row[name] for row in rows]) for name in names})
        halves = [_odd_halves((s.value, *found[-1][s.name]), moduli[s.name]) for s in sides]
        if not any(one & other for one, other in combinations(halves, 2)):
            return found[-1]
    return found[0]


def sides_in_order(sides: Sequence[Symbol], values: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same values, but of the larger side of the image so much more that it is the larger one at all points: for what
    decides by that. What is added leaves it halved as often as it is."""
    smaller, larger = sorted(sides, key=lambda s: s.value)
    reach = max(values[smaller.name]) - min(values[larger.name])
    more = (reach // MULTIPLE + 1) * MULTIPLE if larger.value > smaller.value and reach >= 0 else 0
    return {**values, larger.name: tuple([value + more for value in values[larger.name]])}


def _odd_halves(sides: Sequence[Any], modulus: int) -> set[tuple[bool, ...]]:
    """At which of these points a side is odd, at which its half, rounded up, and so on; and at which each is not."""
    odd = [tuple([-(-side // (1 << k)) % 2 == 1 for side in sides]) for k in range(modulus.bit_length() - 1)]
    return {*odd, *(tuple([not is_odd for is_odd in points]) for points in odd)}


def rounded_aside(
    areas: Sequence[Area], moduli: Mapping[str, int], here: Mapping[str, Any], point: Mapping[str, Any]
) -> dict[str, Any]:
    """A side of an image as at ``point``, or the next one, so that not all sides come out whole, if they do not ``here``: a
    program may be another one where they do."""
    sides = [a for a in areas if a.of.as_symbol() is not None]
    if all(a.is_full(here) for a in sides) or not all(a.is_full(point) for a in sides):
        return {}
    (name,) = sides[0].sizes()
    return {name: point[name] + moduli[name]}


def area_aside(
    area: Area, moduli: Mapping[str, int], here: Mapping[str, Any], seen: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Values of an image's sides unlike those traced so far, near those of ``here``, padded as it is there."""
    (one, other) = sorted(area.of.symbols())
    steps = sorted(product(range(-12, 13), repeat=2), key=lambda pair: (abs(pair[0]) + abs(pair[1]), pair))
    for a, b in steps:
        point = {one: here[one] + a * moduli[one], other: here[other] + b * moduli[other]}
        is_new = all(p[one] != point[one] and p[other] != point[other] for p in (here, *seen))
        if is_new and min(point.values()) > 1 and area.is_full(point) == area.is_full(here):
            return point
    return {one: here[one], other: here[other]}
