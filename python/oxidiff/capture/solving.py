"""Making expressions in the sizes of a call of what numbers were in traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .dim import Dim, Real
from .fit import fit_all, fit_floats
from .graph import Literal, symbols_in
from .guards import shows_at, symbols_of
from .record import Trace
from .signature import Number
from .sizes import Computed, Counted, Rounded
from .trials import Point, Trials

__all__ = ["Solving"]

_MAX_COUNTED = 24
"""So many ints that are made of others are symbols at most."""


class Solving(Trials):
    """A capture that can tell what each number of its traces is."""

    unsolved: list[Any]
    """The numbers, by what they were in each trace, that could not be solved last."""
    unsolved_positions: list[int]
    """Where these are among the numbers of a trace."""

    def solve(self, base: Trace, records: Sequence[Trace], points: Sequence[Point]) -> list[Literal] | None:
        """What each number is as an expression, ``None`` if one cannot be solved."""
        columns = _columns(records)
        distinct = set(columns)
        real = {c for c in distinct if isinstance(c, _Floats)}
        solved: dict[Any, Any] = dict(self.fit(distinct - real, points))
        solved.update(fit_floats(real, points))
        self.unsolved = [c for c, form in solved.items() if form is None]
        if self.unsolved and self.compute(base, columns, solved, points):
            self.unsolved = []
        if self.unsolved:
            self.unsolved_positions = [i for i, c in enumerate(columns) if solved[c] is None]
            return None
        # 0.0 equals -0.0, so that both have one form here.
        return [-0.0 if _is_negative_zero(c) else solved[c] for c in columns]

    def solve_counting(self, base: Trace, records: Sequence[Trace], points: Sequence[Point]) -> list[Literal] | None:
        """What each number is, where ints that the program makes of others may be numbers of their own; they are symbols of
        the points, too, then."""
        ints = {s.name for s in self.plan.ints() if not s.limit}
        counts = base.ledger.counts(self.plan.number_at_place)
        made = [e for e in counts if symbols_of(e) <= ints and shows_at(e, points)][:_MAX_COUNTED]
        free = (name for name in ("m", *(f"m{i}" for i in range(2, 2 + len(made)))) if name not in self.order)
        self.plan.counted = tuple(itertools.starmap(Counted, zip(free, made, strict=False)))
        if not self.plan.counted:
            return None
        unsolved, positions = self.unsolved, self.unsolved_positions
        bare = [{s.name: p[s.name] for s in self.plan.symbols} for p in points]
        forms = self.solve(base, records, [self.plan.complete(p) for p in bare])
        used = symbols_in(forms or ())
        self.plan.counted = tuple(c for c in self.plan.counted if c.name in used)
        if forms is None:
            self.unsolved, self.unsolved_positions = unsolved, positions
        for point, sizes in zip(points, bare, strict=True):
            point.clear()
            point.update(self.plan.complete(sizes))
        return forms

    def without_units(
        self, forms: list[Literal], points: list[Point], moduli: dict[str, int]
    ) -> tuple[list[Literal], list[Point]]:
        """The same without numbers of units that follow from a length: the compiler would not know that sizes over them and
        sizes over the lengths themselves are equal."""
        here = self.point()
        rounded = list(self.plan.rounded)
        for name in dict.fromkeys(r.name for r in rounded if r.is_named()):
            alike = [r for r in rounded if r.name == name]
            (first, *others) = alike
            full = [r for r in rounded if r.is_full(here) and (r.unit, r.at(here)) == (first.unit, first.at(here))]
            if full:
                # As many units as a length that is a multiple.
                of, more = full[0].of, 0
                moduli[of] = math.lcm(moduli[of], first.unit * moduli[name])
            elif not others and moduli[first.of] % first.unit == 0:
                of, more = first.of, first.at(here) * first.unit - int(here[first.of])
            else:
                continue
            count = (Dim.symbol(of) + more) / first.unit
            rounded = [Rounded(r.of, r.of, r.unit) if r in alike else r for r in rounded]
            forms = [f.replace(name, count) if isinstance(f, Dim) else f for f in forms]
            self.plan.forms = [f.replace(name, count) if isinstance(f, Dim) else f for f in self.plan.forms]
            points = [{key: value for key, value in p.items() if key != name} for p in points]
            del moduli[name]
        self.plan.rounded = tuple(rounded)
        return forms, points

    def fit(self, columns: Iterable[Any], points: Sequence[Point]) -> dict[Any, Any]:
        """What whole numbers are that have these values at these points, each ``None`` if it cannot be solved."""
        whole = {name for name in points[0] if all(isinstance(p[name], int) for p in points)}
        sizes = [{name: p[name] for name in whole} for p in points]
        given = [form for form in self.plan.forms if isinstance(form, Dim) and len(form.terms) > 1]
        return dict(fit_all(columns, sizes, given))  # type: ignore[arg-type]

    def is_soluble(self, records: Sequence[Trace], points: Sequence[Point]) -> bool:
        """Whether all whole numbers can be solved."""
        whole = {c for c in _columns(records) if not isinstance(c, _Floats)}
        return None not in self.fit(whole, points).values()

    def compute(
        self,
        base: Trace,
        columns: Sequence[Any],
        solved: dict[Any, Any],
        points: Sequence[Point],
    ) -> bool:
        """Makes floats that were not solved numbers that are computed from sizes, as the trace saw it; whether that solves
        all. They are symbols of the points, too, then."""
        if not all(isinstance(column, _Floats) for column in self.unsolved):
            return False

        def size_of(value: int, dim: int) -> Any:
            return solved[columns[base.number_of(value, dim)]]

        ledger = base.ledger
        found: dict[tuple[float, ...], Computed] = {}
        for expression in ledger.floats(size_of, self.plan.number_at_place):
            name = f"c{len(found) + 1}" if found else "c"
            made = Computed(name, expression)
            if name not in points[0] and symbols_of(expression) <= points[0].keys():
                found.setdefault(tuple(made.at(point) for point in points), made)
        for column in self.unsolved:
            made_for = found.get(tuple(map(float, column)))
            if made_for is None:
                return False
            solved[column] = Real(Dim.symbol(made_for.name).terms)
        used = {solved[column].as_symbol() for column in self.unsolved}
        self.plan.computed = tuple(c for c in found.values() if c.name in used)
        for point in points:
            point.update({c.name: c.at(point) for c in self.plan.computed})
        return True

    def is_solved(self, base: Trace, values: Mapping[str, Sequence[Number]], are_all_free: bool = False) -> bool:
        """Whether the program is the same, and can be solved, where these symbols have these values together.

        Args:
            base: The trace of the call.
            values: The values.
            are_all_free: Whether the others move, too, at the points that are traced for the graph if it is so.
        """
        if are_all_free:
            moving = {s.name: self.chosen[s.name] for s in self.plan.symbols}
            is_solved = self.is_solved_at(base, self.rows({**moving, **values}))
            if is_solved is not None:
                return is_solved
        return bool(self.is_solved_at(base, self.rows(values)))

    def is_solved_at(self, base: Trace, points: Sequence[Point]) -> bool | None:
        """Whether the program can be solved at these points and in the call; ``None`` if it is another one at some."""
        records = [base]
        for count, point in enumerate(points, 1):
            record = None if self.is_refuted(point) else self.try_trace(base, point)
            if record is None:
                return None
            records.append(record)
            # What holds at no four points does not at more.
            if count == 3 < len(points) and not self.is_soluble(records, [self.point(), *points[:3]]):
                return False
        return self.solve(base, records, [self.point(), *points]) is not None


def _columns(records: Sequence[Trace]) -> list[Any]:
    """What each number is in these traces."""
    rows = zip(*(r.numbers for r in records), strict=True)
    return [_Floats(c) if any(isinstance(v, float) for v in c) else c for c in rows]


class _Floats(tuple[Any, ...]):
    """What a number was in each trace, a float in one of them: another number than an int that equals it each time."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Floats) and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((float, super().__hash__()))


def _is_negative_zero(column: Sequence[Number]) -> bool:
    return column[0] == 0 and all(v == 0 and math.copysign(1.0, v) < 0 for v in column)
