"""At which sizes a call is traced, and at which a graph is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

from .signature import Number
from .sizes import FRAMES_STEP, SizePlan, Symbol

__all__ = [
    "HELD_OUT",
    "MULTIPLE",
    "RESIDUES",
    "at_multiples",
    "at_residue",
    "at_whole_times",
    "candidates",
    "counts_apart",
    "counts_in_order",
    "held_out",
    "held_out_count",
    "in_order",
    "modulus_of",
    "next_to",
    "ranks",
    "ranks_of",
]

RESIDUES = {"spatial": 64, "frames": FRAMES_STEP, "sequence": 64, "int": 8, "batch": 64}
"""Of each kind of size, the modulus at which sizes are told apart where it is not known what decides."""


def modulus_of(symbol: Symbol) -> int:
    """The modulus at which values of a size are told apart where it is not known what decides."""
    return RESIDUES[symbol.role] * symbol.unit


HELD_OUT: tuple[tuple[bool, frozenset[str]], ...] = (
    (True, frozenset()),
    (True, frozenset(("spatial", "frames"))),
    (False, frozenset()),
    (True, frozenset(("spatial", "frames", "sequence"))),
    (True, frozenset(("spatial", "frames", "sequence", "int"))),
    (False, frozenset(("spatial", "frames", "sequence", "int"))),
)
"""Where a graph is checked, until it is right: at batch 1 or not, and for which kinds of sizes at the same residues only."""


def candidates(symbol: Symbol, index: int) -> Iterator[tuple[Number, ...]]:
    """Sets of three values at which to trace, the best guess first.

    Args:
        symbol: The symbol; its own value is not among the candidates.
        index: The number of the symbol, so that no two take the same values.
    """
    found: Iterator[Sequence[Number]]
    if symbol.limit:
        near = ([v for v in values if v > 0] for values in _near_values(symbol.value, index))
        found = chain(_count_values(symbol.limit, index), near)
    elif symbol.role in ("spatial", "sequence"):
        find = _spatial_values if symbol.role == "spatial" else _sequence_values
        found = find(symbol.value, index, symbol.unit)
    elif symbol.is_edge:
        found = chain([next_to(symbol, index)], _int_values(symbol.value, index))
    else:
        found = _CANDIDATES[symbol.role](symbol.value, index)
    for values in found:
        distinct = [v for v in dict.fromkeys(values) if v != symbol.value]
        if len(distinct) >= 3:
            # Height and width take the same values, but never together.
            start = 0 if symbol.role == "int" else index % 3
            yield (*distinct[start:3], *distinct[:start])


def _batch_values(value: Any, index: int) -> Iterator[Sequence[Number]]:
    yield [2, 3, 67, 5]
    yield [value * 2, value * 3, value * 5]


def _frames_values(value: Any, index: int) -> Iterator[Sequence[Number]]:
    # Those that are halved as often. No two numbers of frames move together.
    yield _steps_above(value, FRAMES_STEP, index // 3)
    yield [value + 2, value + 3, value + 7]
    yield [value + 4, value + 8, value + 20]
    # As those above do, but not by as much.
    yield [v for v in (value - 1, value - 2, value - 5, value - 3) if v > 1]


def _sequence_values(value: Any, index: int, unit: int = 1) -> Iterator[Sequence[Number]]:
    if unit > 1:
        yield [value + 64 * unit * k for k in (1, 3, 7)]
        yield [value - 64 * unit * k for k in (1, 2, 3) if value > 64 * unit * k + 1]
    grid = (89, 151, 337, 61, 211, 433, 97, 263, 523, 71, 181, 389)
    at = 3 * index % len(grid)
    yield [*grid[at:], *grid[:at]][:4]
    below = [int(value * share) - index for share in (0.83, 0.57, 0.36, 0.71, 0.23)]
    yield [v for v in below if v > 1]
    yield [value + 64 * k for k in (1, 3, 7)]
    yield [value - 64 * k for k in (1, 2, 3) if value > 64 * k + 1]
    if value < 9:
        # Of at most some dozens, as a table of positions has. Padding to multiples of 32 shows.
        yield [value + index + k for k in (11, 29, 43)]
    if value < _SHORT:
        # Of a model that pads to as many as it takes: so few that none of those above is below.
        yield [v for v in (value - 1, value + 1, value - 2, value - 3, value + 2) if v > 1]


_SHORT = 16
"""Lengths that have hardly any below them."""


def _count_values(limit: int, index: int) -> Iterator[Sequence[Number]]:
    """Values for a number of places in a tensor: whatever its size, then such as it has in the call."""
    for most in (_MANY, limit - 1):
        if most > 4:
            yield [2 + _drawn(index, k) % (most - 1) for k in range(6)]
            yield [2 + _drawn(index, k) % (most - 1) for k in range(6, 24)]


_MANY = 37
"""More places are not tried than any size is at which to trace."""


def counts_apart(symbols: Sequence[Symbol], chosen: Mapping[str, Sequence[Number]]) -> dict[str, tuple[Number, ...]]:
    """Values for numbers of places at which to trace, no two of which are equal at once, where there are enough: a program
    may ask whether all prompts are as long. In the range of those that are chosen."""
    out: dict[str, tuple[Number, ...]] = {}
    is_within = all(max(chosen[s.name]) < s.limit for s in symbols)
    most = min(_MANY, *(s.limit - 1 for s in symbols)) if symbols and is_within else _MANY
    if len(symbols) < most:
        drawn = [sorted(range(2, most + 1), key=lambda v, k=k: _drawn(v, k)) for k in range(3)]  # type: ignore[misc]
        for i, symbol in enumerate(symbols):
            out[symbol.name] = tuple(column[i % len(column)] for column in drawn)
    return out


def _drawn(index: int, k: int) -> int:
    """A number as if drawn at random, so that no column of them follows from others."""
    state = (index * 64 + k) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ (state >> 31)) * 0xBF58476D1CE4E5B9 % 2**64
    return state ^ (state >> 29)


def _spatial_values(value: Any, index: int, unit: int = 1) -> Iterator[Sequence[Number]]:
    steps = [k + index // 3 * more for k, more in ((1, 1), (5, 2), (3, 4), (2, 3))]
    for step in (64,) if unit == 1 else (64 * unit, 16 * unit, 64):
        rest = value % step
        yield [v for v in (rest + step * k for k in steps) if v > 1]
        yield [v for v in (rest + step * k for k in range(value // step + 1)) if 1 < v <= value]
    for step in (16, 8):
        first = value % step or step
        yield [v for v in (first + step * k for k in range(value // step + 1)) if 1 < v < value]
        yield [value + step * k for k in (1, 2, 3, 5)]
    yield [value + 192 * k for k in (1, 2, 3)]
    yield [value + k for k in (1, 2, 4, 6)]


def _int_values(value: Any, index: int) -> Iterator[Sequence[Number]]:
    one, other, last = (_mark(ruler, index) for ruler in _RULERS[:3])
    # Each of two is the larger one in some trace, so that a program that asks which it is shows; and one is even, one odd.
    below, above = max(211 - 5 * other, 3 + index), 42 + 5 * other + 2 * last
    yield [value + 13 + one, below + (below == value), above + (above == value)]
    yield [value + 13 + one, value + 29 + 3 * other, value + 71 + 5 * last]
    yield _next_to(value, index)
    yield from _near_values(value, index)


def _near_values(value: Any, index: int) -> Iterator[Sequence[Number]]:
    """Within what has hardly more room than the call takes: the frames or tokens that a cache holds."""
    steps = [step + index // len(_STEPS) * _BEYOND_STEPS for step in _STEPS[index % len(_STEPS)]]
    yield [value + step for step in steps]
    yield [value - step for step in steps]


def next_to(symbol: Symbol, index: int) -> tuple[Number, ...]:
    """Three values of an int next to that of the call, within a sequence as the end of the text in it is. Of two, the one
    behind stays so."""
    return _next_to(symbol.value, index)


def _next_to(value: Any, index: int) -> tuple[Number, ...]:
    return tuple(value + 1 + _mark(ruler, index) for ruler in _RULERS[:3])


def _mark(ruler: Sequence[int], index: int) -> int:
    turn, at = divmod(index, len(ruler))
    return ruler[at] + turn * _BEYOND


_RULERS = (
    (0, 1, 4, 9, 15, 22, 32, 34),
    (2, 4, 14, 21, 27, 32, 35, 36),
    (7, 8, 12, 19, 32, 34, 42, 48),
    (0, 6, 14, 16, 29, 36, 40, 41),
)
"""Golomb rulers: no two marks are as far apart as two others. Where ints move by the marks of three of them, no sum or
difference of some follows from others; the last is for where a graph is checked."""
_STEPS = ((1, 2, 4), (2, 4, 1), (3, 1, 5), (4, 1, 2), (5, 3, 1), (1, 4, 3))
"""Few steps: no two are in proportion, and no sum or difference of two is the same thrice."""
_BEYOND_STEPS = 5
_BEYOND = 49
"""One more than the last mark of all."""


def at_residue(symbol: Symbol, index: int) -> tuple[Number, ...]:
    """Three values of a symbol at which it is divided and padded as it is in the call."""
    return _steps_above(symbol.value, modulus_of(symbol), index)


def at_whole_times(symbol: Symbol, index: int) -> tuple[Number, ...]:
    """Three multiples of a symbol's value."""
    return _steps_above(symbol.value, int(symbol.value), index)


def _steps_above(value: Any, step: int, index: int) -> tuple[Number, ...]:
    """Three values, by so many steps larger; those of an index do not follow from those of two others."""
    return tuple(
        value + step * (k + index * more + index**2 * bend) for k, more, bend in ((1, 1, 0), (2, 3, 2), (3, 5, 1))
    )


def in_order(symbols: Sequence[Symbol]) -> dict[str, tuple[Number, ...]]:
    """Three values for each of these symbols at which to trace, larger where the symbol itself is larger, and halved as
    often as it."""
    out: dict[str, tuple[Number, ...]] = {}
    rank_of = ranks(symbols)
    are_read = all(symbol.limit for symbol in symbols)
    for symbol in symbols:
        rank = rank_of[symbol.name]
        if are_read:
            out[symbol.name] = counts_in_order(rank)[:3]
            continue
        steps = _next_to(0, rank)
        out[symbol.name] = tuple(symbol.value + _INT_STEP * step for step in steps)
    return out


def counts_in_order(rank: int) -> tuple[int, ...]:
    """Four values for a number of places of which as many others are smaller: no more than lengths at which to trace."""
    square = rank * rank
    return (
        5 + 4 * rank + square % 3,
        2 + 7 * rank + square % 5,
        11 + 3 * rank + square % 4,
        8 + 5 * rank + square % 7 // 2,
    )


def ranks_of(values: Sequence[int]) -> list[int]:
    """The place of each value among the distinct ones: equal for equal values."""
    distinct = sorted(set(values))
    return [distinct.index(value) for value in values]


def ranks(symbols: Sequence[Symbol]) -> dict[str, int]:
    """The place of each symbol's value among all of theirs."""
    return {s.name: rank for rank, s in enumerate(sorted(symbols, key=lambda s: s.value))}


_INT_STEP = 8
"""Of ints in order: most parts that programs divide them into."""


def _float_values(value: Any, index: int) -> Iterator[Sequence[Number]]:
    # Sums with multiples of 1/8 stay exact in every dtype a program may convert them to, if the value itself is. One lies
    # on the other side of the value, where a program that asks how large it is would show.
    nearer = value * (0.25 + index / 1024) if value else (1 + index) / 8
    above = [value + (first + step * index) / 8 for first, step in ((9, 1), (21, 3), (37, 5))]
    yield [nearer, *above[:2]]
    yield above
    yield [value * (share + index / 1024) for share in (0.75, 0.5, 0.25)]


_CANDIDATES: dict[str, Callable[[Any, int], Iterator[Sequence[Number]]]] = {
    "batch": _batch_values,
    "frames": _frames_values,
    "int": _int_values,
    "float": _float_values,
    "attribute": _float_values,
}


def held_out(symbol: Symbol, index: int, modulus: int, seen: Sequence[Number]) -> Number:
    """A value unlike those traced so far: batch 1; of sizes, the nearest that is the same modulo ``modulus``, where padding
    to a multiple of any other number shows."""
    value = symbol.value
    if symbol.role == "batch":
        return 1 if value != 1 else 4
    if symbol.is_number:
        if symbol.role == "int":
            return value + (3 + _mark(_RULERS[3], index)) * modulus
        # Far away, unless the program was found to ask how large it is.
        reach = max(seen) - min(seen)
        return value + 3.5 if max(seen) > value + 1 else min(seen) + reach * 0.40625
    near = (value + step * modulus for step in (-1, 1, -3, 3, -5, 5, 7, 11))
    return next((v for v in near if v > 1 and v not in seen), value)


def held_out_count(
    symbol: Symbol, index: int, others: Mapping[str, Number], seen: Sequence[Mapping[str, Number]]
) -> Number:
    """As :func:`held_out`, for a number of places: one that differs from other such numbers by what it never did."""
    for k in range(24, 64):
        value = 2 + _drawn(index, k) % max(1, symbol.limit - 3)
        apart = (({p[symbol.name] - p[name] for p in seen}, value - other) for name, other in others.items())
        if value not in [p[symbol.name] for p in seen] and all(now not in before for before, now in apart):
            return value
    return symbol.value


def at_multiples(
    plan: SizePlan, here: Mapping[str, Number], moduli: Mapping[str, int], kept: Set[str]
) -> dict[str, Number]:
    """Values of sizes that are multiples of as much as their classes allow, where they are not ``here``: a program that does
    something else at multiples shows. The residues of kinds ``kept`` are part of the classes."""
    out: dict[str, Number] = {}
    counts = [(r.unit, r.at(here)) for r in plan.rounded]
    padded = {r.of: r for r in plan.rounded}
    sides = {name for a in plan.areas for name in a.of.symbols()}
    for symbol in plan.symbols:
        name, value = symbol.name, symbol.value
        if symbol.role in kept or name in sides:
            continue
        r = padded.get(name)
        if r is not None:
            # Half a unit of padding; all a unit longer, so that they compare as before.
            is_alone = counts.count((r.unit, r.at(here))) == 1 and not r.is_full(here)
            out[name] = r.at(here) * r.unit + r.unit // 2 if is_alone else int(value) + r.unit
        elif symbol.role in ("spatial", "sequence") and MULTIPLE % moduli[name] == 0:
            multiple = -(-int(value) // MULTIPLE) * MULTIPLE + int(value) % moduli[name]
            # Where two are equal, which of them is taken does not show.
            while multiple in out.values():
                multiple += MULTIPLE
            out[name] = multiple
    return {name: value for name, value in out.items() if value != here[name]}


MULTIPLE = 64
"""The largest power of two that programs commonly ask sizes to be a multiple of."""
