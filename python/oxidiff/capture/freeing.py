"""Finding out which sizes of a call are free, by trials.

Where a guess about all of them fails, each is tried alone, with other values, then together with lengths that may follow
from it, as those of position tables do from the edges of an image; lengths, the tokens of an image and its sides also as
padded ones, whose numbers of units are symbols of their own. A size becomes a constant of the program if nothing helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from ..errors import CaptureError
from .conflicts import Conflict
from .dim import Dim
from .failures import ChangedError
from .fit import denominators
from .graph import CapturedGraph
from .members import has_members
from .points import at_residue, at_whole_times, candidates, counts_apart, in_order, next_to
from .record import Trace, Trail
from .roundings import (
    PATCHES,
    SHOWING,
    area_units,
    areas_alike,
    edges_alike,
    halved_alike,
    halvings,
    move_alone,
    padded_alike,
    rounded_plans,
    sides_in_order,
)
from .signature import Number, container_at
from .sizes import FRAMES_STEP, Area, Rounded, Symbol
from .solving import Solving
from .ties import padded_ties, ties
from .trials import Point

__all__ = ["Freeing"]

_MANY_ALIKE = 4
"""So many symbols of one kind are tried together before each is tried alone."""


class Freeing(Solving):
    """A capture that can tell which sizes are free."""

    def agreeing_traces(self, base: Trace) -> tuple[list[Trace], list[Point]]:
        """The base trace and three more at other values of every symbol, all of the same program."""
        ways = [self.try_each_symbol, self.try_all_values, self.try_small_values]
        is_tried = False
        while self.plan.symbols:
            records, points = [base], [self.point()]
            for point in self.rows({s.name: self.chosen[s.name] for s in self.plan.symbols}):
                trail, is_alike = self.trial(base, point)
                if not is_alike:
                    break
                records.append(trail.record)
                points.append(point)
            else:
                crossed = self.crossed_traces(base, points)
                if crossed is not None:
                    return [*records, *crossed[0]], [*points, *crossed[1]]
            if self.plan.areas:
                self.drop_area()
            elif is_tried and (self.tie_meeting(base) or self.move_near()):
                continue
            elif ways:
                ways.pop(0)(base)
                is_tried = True
            else:
                self.fix_all()
        return [base], [self.point()]

    def crossed_traces(self, base: Trace, points: Sequence[Point]) -> tuple[list[Trace], list[Point]] | None:
        """Traces in which one number of places differs from what it is in another: there are too few values in a short text
        for none of them to follow from others. ``None`` if one is of another program."""
        counts = [s.name for s in self.counts() if s.name not in self.plan.compared]
        records, crossed = [], []
        for name in counts if len(counts) > 1 else ():
            point = self.plan.complete({**points[1], name: points[2][name]})
            record = self.try_trace(base, point)
            if record is None:
                return None
            records.append(record)
            crossed.append(point)
        return records, crossed

    def try_each_symbol(self, base: Trace, is_thorough: bool = False) -> None:
        """Finds, for each symbol alone, values at which the program is the same; fixes it if there are none, and if it is
        not free together with others that follow from it."""
        bound = self.bound_symbols(base, self.plan.symbols, is_thorough, is_learning=True)
        if self.pad_lengths(base, _in_one_list(bound)):
            bound = [s for s in bound if all(s.name != r.of for r in self.plan.rounded)]
        while settled := self.try_ties(base, bound) or self.try_padded_ties(base, bound):
            bound = self.bound_symbols(base, [s for s in bound if s.name not in settled], is_thorough)
        for symbol in bound:
            if not self.follows_batch(base, symbol):
                self.fix(symbol)
        self.chosen.update(counts_apart(self.counts(), self.chosen))

    def tie_meeting(self, base: Trace) -> bool:
        """Lets one of two sizes follow from the other where each is free alone, and both together are not: one of them was 1
        then, which fits everything (a batch of 1, and a table with a row more than samples). Where none does, both are
        constants. Says whether there were such sizes."""
        meeting, self.meeting = self.meeting, frozenset()
        bound = [s for s in self.plan.symbols if s.name in meeting]
        if len(bound) < 2:
            return False
        if not self.try_ties(base, bound):
            for symbol in bound:
                self.fix(symbol)
        return True

    def try_all_values(self, base: Trace) -> None:
        """As :meth:`try_each_symbol`, at all values that are chosen."""
        self.try_each_symbol(base, is_thorough=True)

    def try_small_values(self, base: Trace) -> None:
        """Chooses small values: all sizes at once may be so much that a model does it in several goes."""
        for first, *_ in _alike(self.plan.symbols):
            self.is_free(base, [first], is_small=True)

    def move_near(self) -> bool:
        """Chooses ints next to those of the call and lengths above theirs, once: an int may have to be within a length, as
        the end of a text is. Says whether there are such."""
        ints = [s for s in self.plan.ints() if not s.limit]
        lengths = [s for s in self.plan.symbols if s.role == "sequence"]
        if self.is_near or not ints or not lengths:
            return False
        self.is_near = True
        self.chosen.update({s.name: next_to(s, self.order[s.name]) for s in ints})
        self.chosen.update({s.name: at_residue(s, self.order[s.name]) for s in lengths})
        return True

    def bound_symbols(
        self, base: Trace, symbols: Sequence[Symbol], is_thorough: bool, is_learning: bool = False
    ) -> list[Symbol]:
        """Those of these symbols that are not free alone; values for the others are chosen. Where one place of many tensors
        has a symbol each beside the first one's, as in the caches of a video, these are tried together first.

        Args:
            base: The trace of the call.
            symbols: The symbols.
            is_thorough: Whether all values that are chosen are tried, instead of that which decides mostly: where all
                symbols move is traced anyway.
            is_learning: Whether to find out about several by trials where all move, if these end at ops.
        """
        free = self.free_symbols(base, frozenset(), is_thorough) if is_learning else frozenset()
        bound: list[Symbol] = []
        for first, *others in _alike(symbols):
            if is_learning and not free and self.ends_at_op(base, first):
                is_learning = False
                free = self.free_symbols(base, {s.name for s in bound}, is_thorough)
            is_bound = first.name not in free and not self.is_free(base, [first], is_thorough=is_thorough)
            bound += [first] * is_bound
            others = [s for s in others if s.name not in free]
            if len(others) >= _MANY_ALIKE and self.is_free(base, others, is_thorough=is_thorough):
                continue
            # Channels mostly, of which no number but their own is right.
            sets = 1 if is_bound and len(others) >= _MANY_ALIKE else None
            bound += [s for s in others if not self.is_free(base, [s], sets=sets, is_thorough=is_thorough)]
        return sorted(bound, key=symbols.index)

    def free_symbols(self, base: Trace, others: Set[str], is_thorough: bool) -> Set[str]:
        """Names of symbols that are free while these others are what they are in the call. Where all move, trials end at the
        first op that does not allow it; what cannot have its values there is held, and the rest moves on."""
        values = {s.name: self.chosen[s.name] for s in self.plan.symbols if s.name not in others}
        # What does not fit at an op does not whatever the values, so that one row decides later on.
        count = None if is_thorough or not others else 1
        while values and not all(self.trial(base, point)[1] for point in self.rows(values)[:count]):
            held = self.held(base, values)
            if not held:
                return frozenset()
            values = {name: v for name, v in values.items() if name not in held}
            count = None if is_thorough else 1
        return values.keys()

    def held(self, base: Trace, values: Mapping[str, tuple[Number, ...]]) -> Set[str]:
        """Those of some symbols that cannot have their values at the op at which trials end where all of them move, if what
        it is given can be solved. Lengths that are padded there can be where they are at the residues of the call."""
        here = self.point()
        given = [form for form in self.plan.forms if isinstance(form, Dim) and len(form.terms) > 1]
        moving = [s for s in self.plan.symbols if s.name in values]
        lengths = {s.name: at_residue(s, self.order[s.name]) for s in moving if s.role == "sequence"}
        for row in (values, {**values, **lengths}):
            points = self.rows(row)
            trails: list[Trail] = []
            for point in points:
                trail, is_alike = self.trial(base, point)
                is_there = not is_alike and trail.is_at_op_of(base)
                if not is_there or (trails and len(trail.record.nodes) != len(trails[0].record.nodes)):
                    return frozenset()
                trails.append(trail)
            seen = [{s.name: point[s.name] for s in self.plan.symbols} for point in (here, *points)]
            conflict = Conflict.of(base, trails, seen, given)
            if conflict is not None:
                self.conflicts.append(({s.name: s.position for s in self.plan.symbols}, conflict))
                alone = {n: [{**seen[0], n: value} for value in v] for n, v in row.items()}
                held = {name for name, points in alone.items() if any(map(conflict.is_at, points))}
                if not held:
                    numbers = {s.name for s in self.plan.symbols if s.is_number}
                    self.meeting = self.meeting or _pair_at(conflict, seen, numbers)
                return held
            if not lengths:
                break
        return frozenset()

    def is_free(
        self,
        base: Trace,
        symbols: Sequence[Symbol],
        is_small: bool = False,
        sets: int | None = None,
        is_thorough: bool = True,
    ) -> bool:
        """Whether there are values of these symbols, together, at which the program is the same; chooses them.

        Args:
            base: The trace of the call.
            symbols: The symbols.
            is_small: Whether the smallest of those that are halved as often are tried first.
            sets: How many sets of values are tried; all if ``None``.
            is_thorough: Whether all values of the first set are tried, instead of one. Of others all are: where one set has
                failed, a single value may be right by chance.
        """
        here = self.point()
        tried: Iterable[tuple[tuple[Number, ...], ...]]
        tried = zip(*(candidates(s, self.order[s.name]) for s in symbols), strict=False)
        if is_small:
            tried = sorted(tried, key=lambda found: (not _are_halved_alike(symbols, found), max(map(max, found))))
        for i, found in enumerate(itertools.islice(tried, sets)):
            # The extremes decide mostly: a limit that one of them exceeds shows first.
            first, *others, last = zip(*map(sorted, found), strict=True)
            points = [dict(zip([s.name for s in symbols], row, strict=True)) for row in (last, first, *others)]
            if all(self.agrees(base, {**here, **point}) for point in (points if is_thorough or i else points[:1])):
                self.chosen.update(zip([s.name for s in symbols], found, strict=True))
                return True
        return False

    def ends_at_op(self, base: Trace, symbol: Symbol) -> bool:
        """Whether the value of a symbol that decides mostly cannot be had at an op."""
        point = {**self.point(), symbol.name: max(next(candidates(symbol, self.order[symbol.name])))}
        return not self.agrees(base, point) and tuple(self.plan.sizes(point) or ()) in self.at_op

    def try_ties(self, base: Trace, bound: Sequence[Symbol]) -> Set[str]:
        """Lets symbols that are not free alone follow from others, which are free then: all their names, none if there is
        no such way."""
        untied = self.plan
        for tied in ties(bound):
            self.plan = untied.tied(tied)
            names = {name for form in tied.values() for name in form.symbols()}
            drivers = [s for s in bound if s.name in names]
            if not self.is_free(base, drivers):
                continue
            # What cannot be solved for numbers of words, in texts of any length, would take other sizes with it.
            read = [s for s in drivers if s.limit]
            texts = [s for s in self.plan.symbols if s.role == "sequence" and s not in bound] if read else []
            if not read or self.is_solved(base, {s.name: self.chosen[s.name][:3] for s in (*read, *texts)}):
                return names | tied.keys()
        self.plan = untied
        return frozenset()

    def follows_batch(self, base: Trace, symbol: Symbol) -> bool:
        """Lets a length that is not free alone be one more than there are samples, if it is so in the call: rows of a table
        that has one beside those of the samples."""
        batch = next((s for s in self.plan.symbols if s.role == "batch"), None)
        if batch is None or symbol.role != "sequence" or symbol.value != batch.value + 1:
            return False
        untied = self.plan
        self.plan = untied.tied({symbol.name: Dim.symbol(batch.name) + 1})
        if self.is_free(base, [batch]):
            return True
        self.plan = untied
        return False

    def try_padded_ties(self, base: Trace, bound: Sequence[Symbol]) -> Set[str]:
        """As :meth:`try_ties`, for a length that is that of an image or a text with its padding."""
        if self.is_padded or self.is_covered:
            return frozenset()
        untied, conflicts = self.plan, self.conflicts
        # They were solved without padding.
        self.conflicts = []
        free = [s for s in untied.symbols if s not in bound]
        for tie in padded_ties(bound, free, self.order):
            self.plan = untied.tied({tie.name: tie.form})
            self.plan.rounded = tie.rounded
            self.plan.areas = () if tie.area is None else (tie.area,)
            here = self.point()
            lengths = padded_alike(tie.rounded, here)
            images: Iterable[dict[str, tuple[int, ...]]] = [{}]
            if tie.area is not None:
                (one, other) = tie.sides
                images = areas_alike(tie.area, (one, other), tie.patch, here)
            for image in images:
                if self.is_solved(base, {**lengths, **image}):
                    self.before_area = dict(self.chosen)
                    self.chosen.update({**lengths, **image})
                    self.is_padded = self.is_covered = self.is_edged = True
                    return tie.names()
        self.plan, self.conflicts = untied, conflicts
        return frozenset()

    def pad_lengths(self, base: Trace, lengths: Sequence[Symbol], are_all_free: bool = False) -> bool:
        """Lets these lengths be padded to multiples of something, or to the longest of them, if the program is the same and
        can be solved wherever they are padded and compare as they do in the call; chooses values for them.

        Args:
            base: The trace of the call.
            lengths: The lengths.
            are_all_free: Whether all other sizes are known to be.
        """
        if not lengths or self.is_padded:
            return False
        self.is_padded = True
        here = self.point()
        plans = list(rounded_plans(lengths, self.order.keys()))
        shown = self.shown_units(base, plans)
        # Nothing but the longest of them first.
        for rounded in sorted(plans, key=lambda plan: plan[0].unit > 1 and plan[0].unit not in shown):
            self.plan.rounded = rounded
            values = padded_alike(rounded, here)
            if not move_alone(values):
                continue
            if self.is_solved(base, values, are_all_free):
                self.chosen.update(values)
                return True
        self.plan.rounded = ()
        return False

    def shown_units(self, base: Trace, plans: Iterable[Sequence[Rounded]]) -> set[int]:
        """Of units that lengths may be padded to multiples of, those that traces show: wherever the length needs padding, it
        is a number there when rounded up, and not always one that the call has, too."""
        here, own = self.point(), set(base.numbers)
        places = {s.name: s.position for s in self.plan.symbols}
        moved = [
            ({name: sizes[place] for name, place in places.items()}, set(trail.record.numbers))
            for sizes, trail in self.taken.items()
            if trail.is_whole
        ]
        out = set()
        for r in itertools.chain(*plans):
            needed = [(r.at(p) * r.unit, found) for p, found in moved if r.at(p) != r.at(here) and not r.is_full(p)]
            if all(whole in found for whole, found in needed) and not own.issuperset(whole for whole, _ in needed):
                out.add(r.unit)
        return out

    def pad_area(self, base: Trace) -> bool:
        """Lets the tokens of an image be padded to multiples of something, if a trace shows what that is, and the program is
        the same and can be solved wherever they are padded as in the call; chooses values for its sides."""
        sides = [s for s in self.plan.symbols if s.role == "spatial"]
        if len(sides) != 2 or self.is_covered:
            return False
        self.is_covered = True
        here = self.point()
        self.before_area = dict(self.chosen)
        for patch in PATCHES:
            showing = {s.name: count * patch for s, count in zip(sides, SHOWING, strict=True)}
            limit, self.limit = self.limit, None
            try:
                record = self.trace_at(self.plan.complete({**here, **showing}))
            except ChangedError:
                raise
            except CaptureError:
                continue
            finally:
                self.limit = limit
            tokens = Dim.symbol(sides[0].name) * Dim.symbol(sides[1].name) / patch**2
            for unit in area_units(set(record.numbers), set(base.numbers)):
                area = Area("", tokens, unit)
                if not area.is_full(here):
                    area = Area(f"{sides[0].name}{sides[1].name}r", tokens, unit)
                self.plan.areas = (area,)
                for values in areas_alike(area, (sides[0], sides[1]), patch, here):
                    if self.is_solved(base, values, are_all_free=True):
                        self.chosen.update(values)
                        return True
        self.drop_area()
        return False

    def pad_sides(self, base: Trace, graph: CapturedGraph) -> bool:
        """Lets the sides of an image be padded to multiples of what ``forward`` asks the rest by, for torch, or be halved
        again and again, rounded up, if the program is the same and can be solved whether they are padded or not; chooses
        values for them. Without it each rest is another program."""
        sides = [s for s in self.plan.symbols if s.role == "spatial"]
        if self.is_edged or self.plan.areas or len(sides) != 2:
            return False
        units, values = graph.rests(base, {s.name for s in sides}), edges_alike(sides, PATCHES[0])
        # All sides are multiples of a patch.
        units = {(name, unit) for name, unit in units if unit > PATCHES[0]}
        if not units and not self.is_narrow:
            # Not those of the classes, which are larger where products are divided.
            names = [s.name for s in sides]
            lines = [f for f in graph.forms if type(f) is Dim and f.symbols() in [{name} for name in names]]
            moduli = denominators(lines, names)
            units, values = halvings(sides, moduli), halved_alike(sides, moduli)
        if not units:
            return False
        self.is_edged = True
        self.before_area = dict(self.chosen)
        self.plan.areas = tuple([Area(f"{name}r{unit}", Dim.symbol(name), unit) for name, unit in sorted(units)])
        ordered = sides_in_order(sides, values)
        for found in (values,) if ordered == values else (values, ordered):
            if self.is_solved(base, found, are_all_free=True):
                self.chosen.update(found)
                return True
        self.drop_area()
        return False

    def tie_sides(self, base: Trace) -> bool:
        """Lets the width of an image follow from its height, once, where a graph was found wrong at other sizes: what takes
        the root of a number of tokens for a side draws squares only, and is the same at sizes with as many tokens. Says
        whether the program is the same then."""
        sides = [s for s in self.plan.symbols if s.role == "spatial"]
        if self.is_tied or len(sides) != 2 or sides[0].value != sides[1].value:
            return False
        self.is_tied = True
        untied = self.plan
        self.plan = untied.tied({sides[1].name: Dim.symbol(sides[0].name)})
        if self.is_free(base, sides[:1]):
            return True
        self.plan = untied
        return False

    def fix_sides(self) -> bool:
        """Makes the sides of images constants, if there are any and others are free."""
        sides = [s for s in self.plan.symbols if s.role == "spatial"]
        if len(sides) == len(self.plan.symbols):
            return False
        for symbol in sides:
            self.fix(symbol)
        return bool(sides)

    def fix_counters(self, base: Trace) -> None:
        """Fixes the integers in lists and dictionaries that the program writes into: they say where it is. In an object that
        it sets attributes of, a count may be one of these."""
        for path, _, _ in base.places():
            if path[0] in self.call.bound and has_members(container_at(self.call.bound, path)):
                continue
            label = path[0].lstrip("*") + "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in path[1:])
            for symbol in [s for s in self.plan.symbols if s.role == "int"]:
                if symbol.label.startswith((f"{label}[", f"{label}.")):
                    self.fix(symbol)

    def fix_unsolved(self, base: Trace) -> None:
        """Fixes the symbols on which the unsolved numbers depend: Python numbers if any does, else lengths of tensors
        beside the first one, else all. Before, Python ints are tried in one order, and lengths at one residue."""
        if self.plan.areas:
            self.drop_area()
            return
        positions = self.unsolved_positions
        symbols = list(self.plan.symbols)

        def matters(symbol: Symbol) -> bool:
            trail, is_alike = self.trial(base, self.moved_alone(symbol))
            return not is_alike or any(trail.record.numbers[i] != base.numbers[i] for i in positions)

        numbers = []
        for symbol in [s for s in symbols if s.is_number]:
            if not matters(symbol):
                continue
            if symbol.role == "int" and not self.plan.compared:
                self.plan.compared = {s.name: s.value for s in self.plan.ints()}
                self.chosen.update(in_order(self.plan.ints()))
                return
            numbers.append(symbol)
        if self.try_lengths(base, matters) if not numbers else self.move_near():
            return
        suspects = numbers or [s for s in symbols if matters(s)]
        beside = [s for s in suspects if s.role in ("frames", "sequence") and s.label != self.labels[0]]
        for symbol in numbers or beside or suspects or symbols:
            self.fix(symbol)

    def try_lengths(self, base: Trace, matters: Callable[[Symbol], bool]) -> bool:
        """Lets sizes on which unsolved numbers depend be padded ones, or be tried as they are divided in the call."""
        sequences = [s for s in self.plan.symbols if s.role == "sequence" and matters(s)]
        if self.pad_lengths(base, sequences, are_all_free=True) or self.pad_area(base):
            return True
        lengths = [s for s in self.plan.symbols if s in sequences or (s.role == "frames" and matters(s))]
        if lengths and not self.is_rounded:
            self.is_rounded = True
            self.chosen.update({s.name: at_residue(s, self.order[s.name]) for s in lengths})
            return True
        batches = [s for s in self.plan.symbols if s.role == "batch" and s.value > 1 and matters(s)]
        if self.is_divided or not batches:
            return False
        self.is_divided = True
        self.chosen.update({s.name: at_whole_times(s, self.order[s.name]) for s in batches})
        return True


def _pair_at(conflict: Conflict, points: Sequence[Point], others: Set[str]) -> Set[str]:
    """Two of the symbols but ``others`` that move at these points, the first of which is the call, for which an op cannot be
    done where they move and all others do not; none if there are no two."""
    here, *moved = points
    names = [name for name in conflict.least if name not in others and any(p[name] != here[name] for p in moved)]
    for one, other in itertools.combinations(names, 2):
        if all(conflict.is_at({**here, one: p[one], other: p[other]}) for p in moved):
            return {one, other}
    return frozenset()


def _are_halved_alike(symbols: Sequence[Symbol], values: Sequence[Sequence[Number]]) -> bool:
    """Whether the values of sizes of images differ from the symbols' own by multiples of what they are mostly halved by."""
    edges = [(s.value, found) for s, found in zip(symbols, values, strict=True) if s.role == "spatial"]
    return all((v - value) % FRAMES_STEP == 0 for value, found in edges for v in found)


def _alike(symbols: Sequence[Symbol]) -> Iterable[list[Symbol]]:
    """Symbols of one place in tensors, such as the heights of several."""
    places: dict[str, list[Symbol]] = {}
    for symbol in symbols:
        places.setdefault(symbol.name.rstrip("0123456789"), []).append(symbol)
    return places.values()


def _in_one_list(symbols: Sequence[Symbol]) -> list[Symbol]:
    """The lengths among these symbols that are of tensors in one list, if there are several."""
    lists: dict[str, list[Symbol]] = {}
    for symbol in symbols:
        name, bracket, _ = symbol.label.partition("[")
        if bracket and symbol.role == "sequence":
            lists.setdefault(name, []).append(symbol)
    return max(lists.values(), key=len) if any(len(items) > 1 for items in lists.values()) else []
