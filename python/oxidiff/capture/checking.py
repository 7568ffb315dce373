"""Where a graph that was solved is right: at sizes that it was not solved at, on other ways through ``forward``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set

from ..errors import CaptureError
from .dim import Dim
from .failures import ChangedError, LongerError
from .freeing import Freeing
from .graph import CapturedGraph
from .guards import Guard
from .points import (
    HELD_OUT,
    RESIDUES,
    at_multiples,
    counts_in_order,
    held_out,
    held_out_count,
    modulus_of,
    next_to,
    ranks,
)
from .record import Trace
from .roundings import area_aside, padded_aside, rounded_aside
from .signature import Number
from .trials import Point

__all__ = ["Checking"]

Way = frozenset[tuple[Guard, bool]]


class Checking(Freeing):
    """A capture that can tell where a graph is right."""

    def confirm(self, graph: CapturedGraph, point: Point, record: Trace) -> None:
        """Notes that a trace found the graph right at a point."""
        self.escaped |= graph.accept(point, record, of_copy=True)

    def hold_out(self, graph: CapturedGraph, points: Sequence[Point]) -> bool:
        """Checks the graph where it was not solved, and narrows its classes if it is wrong there; says whether it can be
        right in any."""
        if not self.plan.symbols:
            return True
        is_wrong = False
        rank_of = ranks(self.plan.ints()) if self.plan.compared else {}
        of_ints = math.lcm(*(graph.moduli[name] for name in rank_of))
        for batch_one, kept in HELD_OUT:
            point: Point = {}
            for i, symbol in enumerate(self.counts()):
                rank = rank_of.get(symbol.name)
                in_turn = held_out_count(symbol, i, point, points) if rank is None else counts_in_order(rank)[3]
                point[symbol.name] = in_turn
            for i, symbol in enumerate(self.plan.symbols):
                if symbol.limit:
                    continue
                seen = [p[symbol.name] for p in points]
                modulus = graph.moduli[symbol.name]
                if symbol.name in rank_of:
                    i, modulus = rank_of[symbol.name], of_ints
                if symbol.role in kept:
                    modulus = math.lcm(modulus_of(symbol), modulus)
                point[symbol.name] = held_out(symbol, i, modulus, seen)
                if symbol.role == "batch" and not batch_one:
                    point[symbol.name] = 4
            if "sequence" not in kept:
                point |= padded_aside(self.plan.rounded, self.point())
            if "spatial" not in kept:
                for area in [area for area in self.plan.areas if len(area.of.symbols()) > 1]:
                    point |= area_aside(area, graph.moduli, self.point(), points)
            point = self.plan.complete(point | rounded_aside(self.plan.areas, graph.moduli, self.point(), point))
            try:
                record = self.trace_at(point)
            except ChangedError:
                raise
            except CaptureError:
                is_wrong = False
                continue
            is_wrong = graph.differs_from(record, point) is not None
            if not is_wrong and self.holds_at_multiples(graph, kept):
                self.confirm(graph, point, record)
                if kept:
                    self.is_narrow = "spatial" in kept
                    self.split_residues(graph, [*points, point], kept)
                return True
        if is_wrong:
            # Even at the same residues of everything.
            return False
        # Right at the points it was solved at, and nothing more is known: classes as narrow as those points.
        self.is_narrow = True
        self.split_residues(graph, points, RESIDUES.keys())
        return True

    def holds_at_multiples(self, graph: CapturedGraph, kept: Set[str]) -> bool:
        """Checks a graph where its sizes are multiples of much, if they are not in the call; but for those ``kept``."""
        here = self.point()
        values = at_multiples(self.plan, here, graph.moduli, kept)
        if not values:
            return True
        point = self.plan.complete({**here, **values})
        try:
            record = self.trace_at(point)
        except ChangedError:
            raise
        except LongerError:
            return False
        except CaptureError:
            # Not a model of such sizes.
            return True
        if graph.differs_from(record, point) is not None:
            return False
        self.confirm(graph, point, record)
        return True

    def keep_order(self, graph: CapturedGraph) -> None:
        """Makes it part of the classes which of two sizes is larger, where the same one was in all traces and what is done
        with them could not be followed."""
        ordered = []
        for role in ("spatial", "sequence"):
            names = [s.name for s in self.plan.symbols if s.role == role and s.name in self.escaped]
            for one, other in itertools.combinations(names, 2):
                if len({p[one] > p[other] for p in graph.points if p[one] != p[other]}) < 2:
                    ordered.append((one, other))
        if ordered:
            self.plan.ordered = tuple(ordered)
            points = list(graph.points)
            graph.classes.clear()
            for point in points:
                graph.accept(point, None, of_copy=True)

    def try_ways(self, graph: CapturedGraph) -> None:
        """Traces ways through ``forward`` that were seen at one point at another one: what is a constant there, or another
        number than the graph's, may be the same by chance."""
        for way, seen in list(graph.lone.items()):
            point = self.beside(graph, way, seen)
            record = None if point is None else self.trace_if_any(point)
            if point is None or record is None:
                continue
            graph.traces += 1
            if graph.differs_from(record, point) is None:
                self.confirm(graph, point, record)
            else:
                graph.narrow(way, [s.name for s in self.plan.symbols if point[s.name] != seen[s.name]])

    def beside(self, graph: CapturedGraph, way: Way, seen: Point) -> Point | None:
        """A point of the same class and on the same way as another one, where as many symbols as can differ."""
        here = point = self.plan.complete({s.name: seen[s.name] for s in self.plan.symbols})
        for symbol in [s for s in self.plan.symbols if s.role != "attribute"]:
            step = 1 if symbol.role == "float" else graph.moduli[symbol.name]
            for count in (3 + 2 * self.order.get(symbol.name, 0), 1, 2, 3, 4, -1, -2):
                value = seen[symbol.name] + count * step
                moved = self.plan.complete({**point, symbol.name: value})
                is_alike = graph.class_of(moved) == graph.class_of(here)
                if value > 1 and is_alike and all(guard.holds(moved) is outcome for guard, outcome in way):
                    point = moved
                    break
        return None if point == here else point

    def bound_ints(self, graph: CapturedGraph) -> None:
        """Checks a graph where the ints that are passed are smaller than in any trace. What takes all that there is from a
        limit on, as the end of a slice, looks like a constant beyond it, and who reads it in C does not ask. If the graph is
        not seen to be right there, it is so between the smallest and the largest ints that were tried."""
        near = self.near_ints()
        names = {s.name: s for s in self.plan.ints() if not s.limit and s.name not in near}
        # Apart, so that there is something between two ends.
        rank_of = ranks(self.plan.ints())
        steps = {
            name: math.lcm(*(graph.moduli[n] for n in (rank_of if self.plan.compared else (name,)))) for name in names
        }
        least = {name: min(p[name] for p in graph.points) for name in names}
        here = self.point()
        small: dict[str, Number] = {}
        below: dict[str, Number] = {}
        for name, symbol in names.items():
            residue, step = int(symbol.value) % steps[name], steps[name]
            value = residue + step * (max(0, -(-(2 - residue) // step)) + 3 * rank_of[name])
            if value < least[name]:
                small[name] = value
                below[name] = max(value, residue + (int(least[name]) - residue - 1) // step * step)
        for values in (small, below) if small else ():
            point = self.plan.complete({**here, **values})
            record = self.trace_if_any(point)
            if record is None:
                continue
            if graph.differs_from(record, point) is None:
                self.confirm(graph, point, record)
                return
            break
        graph.box.update({name: (least[name], max(p[name] for p in graph.points)) for name in small})

    def near_ints(self) -> list[str]:
        """Names of the ints that were tried next to those of the call alone, and of edges of slices."""
        ints = [s for s in self.plan.ints() if not s.limit]
        return [s.name for s in ints if s.is_edge or self.chosen.get(s.name) == next_to(s, self.order[s.name])]

    def bound_near(self, graph: CapturedGraph) -> None:
        """Where ints were tried next to those of the call alone, the graph is right for such: between the smallest and the
        largest that were tried, and where they are on the same side of each other and of lengths. So it is with slices that
        are passed: where a list of Python's ends that one cuts, nobody asks."""
        near = self.near_ints()
        lengths = [s.name for s in self.plan.symbols if s.role in ("sequence", "spatial", "frames")]
        for name in near:
            graph.box[name] = (min(p[name] for p in graph.points), max(p[name] for p in graph.points))
        for one, other in (*itertools.combinations(near, 2), *itertools.product(near, lengths)):
            for low, high in ((one, other), (other, one)):
                if all(p[low] <= p[high] for p in graph.points):
                    graph.conditions.add((Guard("lt", Dim.symbol(high) - Dim.symbol(low), 0), False))
                    break

    def split_residues(self, graph: CapturedGraph, points: Sequence[Point], roles: Set[str]) -> None:
        """Makes the residues of sizes of these roles part of the classes; the graph is right at these points."""
        for symbol in self.plan.symbols:
            if symbol.role in roles:
                graph.moduli[symbol.name] = math.lcm(modulus_of(symbol), graph.moduli[symbol.name])
        graph.classes.clear()
        graph.marks.clear()
        for point in points:
            graph.accept(point, None, of_copy=True)
