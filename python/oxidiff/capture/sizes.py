"""Which sizes of a call are free, and which follow from others.

Nothing here has to be right: a guess that does not hold shows as traces that fail or differ, and is then corrected by
trying (see :mod:`~oxidiff.capture.freeing`). Good guesses only save traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import ceil, nan, prod
from typing import Any

import torch

from ..errors import CaptureError
from .dim import Dim, Size, dim_of, dim_or_int
from .guards import Expression, expression_text, symbols_of, value_at
from .signature import ANSWERS, Call, Number, first_places, in_objects, share_of

__all__ = ["Area", "Computed", "Counted", "FRAMES_STEP", "Rounded", "SizePlan", "Symbol", "plan_sizes", "product_of"]


@dataclass(slots=True)
class Symbol:
    """A free size of a graph.

    Attributes:
        name: As it appears in expressions.
        role: ``"batch"``, ``"frames"``, ``"spatial"``, ``"sequence"``; of Python numbers ``"int"``, ``"float"`` where they
            are passed, ``"attribute"`` where they are kept.
        position: Where to read it in a call's flat sizes.
        value: What it was in the captured call.
        label: The argument it was read from, for messages.
        limit: If it is a number of places that were read out of a tensor, or may be one: how many there were at most.
        unit: What its module may divide it by, other than powers of two.
    """

    name: str
    role: str
    position: int
    value: Number
    label: str = ""
    limit: int = 0
    unit: int = field(default=1, compare=False)

    @property
    def is_number(self) -> bool:
        """Whether it is a Python number, not a size."""
        return self.role in ("int", "float", "attribute")

    @property
    def is_edge(self) -> bool:
        """Whether it is where a slice that is passed starts or ends."""
        return self.role == "int" and self.label.endswith((".start", ".stop"))

    @property
    def is_bounded(self) -> bool:
        """Whether a graph is taken to be right only between the smallest and the largest value that was checked. Numbers
        that are passed, such as times, would need a trace at every step."""
        return self.role not in ("int", "float")


@dataclass(frozen=True, slots=True)
class Rounded:
    """A length in units, rounded up: what programs pad it to. In units of one, a length that is compared with others.

    Attributes:
        name: As it appears in expressions; the length's own where the length is a multiple, and so says it all. Lengths of
            as many units share one.
        of: The symbol that is the length.
        unit: How much of the length is one.
    """

    name: str
    of: str
    unit: int

    def is_named(self) -> bool:
        """Whether the number of units is a symbol of its own."""
        return self.name != self.of

    def sizes(self) -> set[str]:
        """The symbols that it follows from."""
        return {self.of}

    def at(self, point: Mapping[str, Any]) -> int:
        """The value where the length is that of ``point``."""
        return -(-int(point[self.of]) // self.unit)

    def is_full(self, point: Mapping[str, Any]) -> bool:
        """Whether the length needs no padding there."""
        return int(point[self.of]) % self.unit == 0


@dataclass(frozen=True, slots=True)
class Area:
    """How many tokens an image has, in units, rounded up: what programs pad them to. Or how much one of its sides has.

    Attributes:
        name: As it appears in expressions; empty where there are as many tokens as units have, and so say it all.
        of: How many tokens there are, over the sides of the image; or the side.
        unit: How many of them are one.
    """

    name: str
    of: Dim
    unit: int

    def is_named(self) -> bool:
        """Whether the number of units is a symbol of its own."""
        return bool(self.name)

    def sizes(self) -> set[str]:
        """The symbols that it follows from."""
        return self.of.symbols()

    def at(self, point: Mapping[str, Any]) -> int:
        """The value where the sides are those of ``point``."""
        return ceil(self.of.exact(point) / self.unit)

    def is_full(self, point: Mapping[str, Any]) -> bool:
        """Whether the tokens need no padding there."""
        return not self.of.exact(point) % self.unit


@dataclass(frozen=True, slots=True)
class Counted:
    """An int that ``forward`` makes of ints that it is passed, and that is no polynomial of them: half of a side, rounded
    down, or the longest of several.

    Attributes:
        name: As it appears in expressions.
        expression: Quotients of the ints, and the largest of such; see :data:`~oxidiff.capture.guards.Expression`.
    """

    name: str
    expression: Expression

    def sizes(self) -> set[str]:
        """The symbols that it follows from."""
        return symbols_of(self.expression)

    def at(self, point: Mapping[str, Any]) -> int:
        """The value where the ints are those of ``point``.

        Raises:
            ValueError: If these are no ints.
        """
        value = value_at(self.expression, point)
        if value is None or value != int(value):
            raise ValueError(f"{self} is not whole")
        return int(value)

    def __str__(self) -> str:
        return expression_text(self.expression)


@dataclass(frozen=True, slots=True)
class Computed:
    """A float that ``forward`` computes from sizes and that is no polynomial of them: the root of an area, say.

    Attributes:
        name: As it appears in expressions.
        expression: How it is computed; see :data:`~oxidiff.capture.guards.Expression`.
    """

    name: str
    expression: Expression

    def at(self, point: Mapping[str, Any]) -> float:
        """The value where the free sizes are those of ``point``; not a number where there is none."""
        value = value_at(self.expression, point)
        return nan if value is None else float(value)


@dataclass(slots=True)
class SizePlan:
    """How a call's flat sizes follow from the free ones.

    Attributes:
        symbols: The free sizes.
        forms: One entry per flat size: what it is as an expression (or a constant that every call must have).
        compared: The Python ints of which the program may ask which is the larger one, by name, and what they were: a graph
            is then right for one order of them. Some may have become constants since.
        rounded: Lengths that are padded to a multiple, or to the longest of them: the program may ask which of them need
            padding, and how they compare.
        ordered: Pairs of sizes of one kind of which the same one was the larger in all traces: the program may ask which is.
        areas: Images whose tokens are padded to a multiple: the program may ask which of them need padding.
        counted: Ints that are made of ints that are passed.
        computed: Floats that are computed from sizes before the program runs.
    """

    symbols: list[Symbol]
    forms: list[Size | float] = field(default_factory=list)
    compared: Mapping[str, Number] = field(default_factory=dict)
    rounded: tuple[Rounded, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()
    areas: tuple[Area, ...] = ()
    computed: tuple[Computed, ...] = ()
    counted: tuple[Counted, ...] = ()

    def names(self) -> list[str]:
        """All symbols that expressions may have: the free sizes, what follows from them, and what is computed."""
        return [*(s.name for s in self.symbols), *self.followers(), *(c.name for c in self.computed)]

    def followers(self) -> dict[str, Rounded | Area | Counted]:
        """The symbols that are whole numbers and follow from others."""
        return {p.name: p for p in (*self.padded(), *self.counted) if isinstance(p, Counted) or p.is_named()}

    def padded(self) -> tuple[Rounded | Area, ...]:
        """What is padded to a multiple."""
        return (*self.rounded, *self.areas)

    def complete(self, point: Mapping[str, Number]) -> dict[str, Number]:
        """A point with the values that lengths and images are rounded to there, and of what is computed."""
        whole = {**point, **{name: p.at(point) for name, p in self.followers().items()}}
        return {**whole, **{c.name: c.at(whole) for c in self.computed}}

    def number_at_place(self, place: int) -> Expression:
        """What a Python number of a call is, by its place among the sizes: floats are not computed with exactly."""
        form = self.forms[place]
        is_whole = all(s.role != "float" for s in self.symbols if s.position == place)
        return form if is_whole or not isinstance(form, Dim) else ("float", form)

    def ints(self) -> list[Symbol]:
        """The free sizes that are Python ints."""
        return [s for s in self.symbols if s.role == "int"]

    def read(self, sizes: Sequence[Number]) -> dict[str, Number] | None:
        """The free sizes of a call; ``None`` if its sizes do not satisfy the plan."""
        point = {s.name: sizes[s.position] for s in self.symbols}
        exact = {name: Fraction(value) for name, value in point.items()}
        try:
            # A length may be that of another one with its padding.
            exact.update((name, Fraction(p.at(point))) for name, p in self.followers().items())
            for form, size in zip(self.forms, sizes, strict=True):
                value = form.exact(exact) if isinstance(form, Dim) else form
                if value != size:
                    return None
            return self.complete(point)
        except ValueError:
            return None

    def sizes(self, point: Mapping[str, Number]) -> list[Number] | None:
        """All flat sizes at ``point``; ``None`` if one is not a positive whole number there."""
        computed = {c.name for c in self.computed}
        exact = {name: Fraction(value) for name, value in point.items() if name not in computed}
        out: list[Number] = []
        for form in self.forms:
            if not isinstance(form, Dim):
                out.append(form)
            elif (name := form.as_symbol()) is not None:
                out.append(point[name])
            else:
                value = form.exact(exact)
                if value.denominator != 1 or value < 1:
                    return None
                out.append(int(value))
        return out

    def tied(self, ties: Mapping[str, Dim]) -> SizePlan:
        """The plan in which these symbols follow from others."""
        forms = list(self.forms)
        for name, to in ties.items():
            forms = [f.replace(name, to) if isinstance(f, Dim) else f for f in forms]
        rounded = tuple(r for r in self.rounded if r.of not in ties)
        areas = tuple(a for a in self.areas if not a.of.symbols() & ties.keys())
        counted = tuple(c for c in self.counted if not ties.keys() & c.sizes())
        symbols = [s for s in self.symbols if s.name not in ties]
        return SizePlan(symbols, forms, self.compared, rounded, areas=areas, counted=counted)

    def drop_areas(self) -> None:
        """No longer takes images for padded ones."""
        self._settle({a.name for a in self.areas})
        self.areas = ()

    def _settle(self, followers: Set[str]) -> None:
        """Makes sizes constants that are computed from these symbols, which will be none."""
        if any(isinstance(form, Dim) and form.symbols() & followers for form in self.forms):
            here = self.complete({s.name: s.value for s in self.symbols})
            exact = {name: Fraction(value) for name, value in here.items()}
            for i, form in enumerate(self.forms):
                if isinstance(form, Dim) and form.symbols() & followers:
                    self.forms[i] = int(form.exact(exact))

    def fix(self, name: str) -> None:
        """Makes a symbol a constant: other values are another program."""
        (symbol,) = (s for s in self.symbols if s.name == name)
        self._settle({follower for follower, p in self.followers().items() if name in p.sizes()})
        self.symbols = [s for s in self.symbols if s is not symbol]
        self.rounded = tuple(r for r in self.rounded if r.of != name)
        self.areas = tuple(a for a in self.areas if name not in a.of.symbols())
        self.counted = tuple(c for c in self.counted if name not in c.sizes())
        self.computed = ()
        exact = Fraction(symbol.value)
        for i, form in enumerate(self.forms):
            if isinstance(form, Dim) and name in form.symbols():
                if form.as_symbol() == name:
                    self.forms[i] = symbol.value
                else:
                    fixed = form.substitute(name, exact)
                    constant = fixed.as_int()
                    self.forms[i] = fixed if constant is None else constant


def plan_sizes(
    call: Call,
    names: Sequence[str],
    channels: int | None = None,
    units: Mapping[str, int] | None = None,
    varied: Set[int] = frozenset(),
) -> SizePlan:
    """Guesses the free sizes of a call.

    Args:
        call: The call.
        names: A label per tensor and number of the call.
        channels: The module's number of input channels, if known: tells frames from channels in 5-D tensors.
        units: By the role of a size, what the module divides such by, other than powers of two.
        varied: Places of sizes that were others in calls before, whatever they look like.
    """
    return _Planner(call, names, channels, units or {}, varied).run()


_MAX_COORDINATES = 4
"""Coordinates of a token: time, height, width, and what is the same for all."""


class _Planner:
    def __init__(
        self, call: Call, names: Sequence[str], channels: int | None, units: Mapping[str, int], varied: Set[int]
    ) -> None:
        self.call = call
        self.varied = varied
        self.names = names
        self.channels = channels
        self.units = units
        self.plan = SizePlan([])
        self.batch: Symbol | None = None
        self.spatial: dict[int, Symbol] = {}
        self.frames: Symbol | None = None
        self.sequences: dict[tuple[str, int], Symbol] = {}
        self.used: set[str] = set()
        self.is_kept = False
        """Whether an object holds the tensor."""

    def run(self) -> SizePlan:
        every = self.call.tensors
        tensors = every[: len(every) - self.call.answer_tensors]
        ranked = [t for t in tensors if t.dim() >= 2] or [t for t in tensors if t.dim()]
        self.batch_size = ranked[0].shape[0] if ranked else 0
        # Sequence lengths are first read from tensors that are sure to have one, so that ambiguous ones can be matched.
        self.lengths = {t.shape[1] for t in tensors if t.dim() == 3 and t.shape[1] > _MAX_COORDINATES}
        self.state_lengths = {t.shape[1] for t in tensors if t.dim() == 3 and t.dtype.is_floating_point}
        self.sequence_sizes = {t.shape[self.sequence_axis(t)] for t in tensors if t.dim() == 3}
        self.mask_sizes = {t.shape[1] for t in tensors if t.dim() == 2 and not t.dtype.is_floating_point}
        self.sequence_sizes |= self.mask_sizes
        self.position_counts = {count for t in tensors if t.dim() == 5 for count in self.counts(t)}
        starts: list[int] = []
        every_place, are_kept = first_places(tensors), in_objects(self.call.bound)
        for tensor, name, place, is_kept in zip(tensors, self.names, every_place, are_kept, strict=False):
            self.is_kept = is_kept
            starts.append(len(self.plan.forms))
            if place < len(starts) - 1:
                self.plan.forms += self.plan.forms[starts[place] : starts[place] + tensor.dim()]
                continue
            for axis, size in enumerate(tensor.shape):
                if size == 0:
                    raise CaptureError(f"{name} has a dimension of size 0")
                self.label = name
                form = self.form(tensor, axis, size)
                if not isinstance(form, Dim) and len(self.plan.forms) in self.varied:
                    form = self.sequence_form(size, f"{name} {axis}")
                self.plan.forms.append(form)
        self.add_answers(tensors)
        numbers = self.names[len(every) :]
        alike = _alike(dict(zip(numbers, self.call.numbers, strict=True)))
        made: dict[str, Symbol] = {}
        for i, (label, number) in enumerate(zip(numbers, self.call.numbers, strict=True)):
            self.label = label
            role = "int" if isinstance(number, int) else "float"
            if i >= len(self.call.numbers) - self.call.kept:
                role = "attribute"
            first = alike.get(label)
            made[label] = self.add(role, "n", number) if first is None else made[first]
            if role == "int" and label.startswith(ANSWERS):
                # Mostly a length, at most the longest there is.
                made[label].limit = max((size for tensor in tensors for size in tensor.shape), default=0)
            self.plan.forms.append(Dim.symbol(made[label].name))
        self.tie_sequences_to_counts(Counter(alike.values()))
        return self.plan

    def add_answers(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sizes of what is read out of tensors: how many places there are. All of them are as many as the tensor has,
        all others the rest; what else they are follows from nothing."""
        sizes = [size for tensor in tensors for size in tensor.shape]
        lengths = {symbol.name for symbol in self.plan.symbols if symbol.role == "sequence"}
        forms: dict[int, Size] = {}
        for of_length in (True, False):
            # Masks are over words, mostly, where the side of an image happens to be as long.
            for size, form in zip(sizes, self.plan.forms, strict=True):
                if isinstance(form, Dim) and (form.symbols() <= lengths) is of_length:
                    forms.setdefault(size, form)
        labels = iter(self.names[len(tensors) :])
        rows: dict[int, Size] = {}
        for i, (question, answer) in enumerate(zip(self.call.questions, self.call.answers, strict=True)):
            if not isinstance(answer, torch.Tensor):
                continue
            self.label = next(labels)
            share = share_of(answer, question)
            whole = prod((dim_of(forms.get(size, size)) for size in question.shape), start=dim_of(1))
            if share == "none":
                rows[i] = 0
            elif share == "all":
                rows[i] = dim_or_int(whole)
            elif question.opposite is not None:
                rows[i] = dim_or_int(whole - rows[question.opposite])
            else:
                symbol = self.add("sequence", "r", answer.shape[0])
                symbol.limit = prod(question.shape) if question.name == "nonzero" else 0
                rows[i] = Dim.symbol(symbol.name)
            self.plan.forms += [rows[i], *answer.shape[1:]]

    def tie_sequences_to_counts(self, others: Mapping[str, int]) -> None:
        """A length that is the product of neighbouring Python ints (frames, height, width), or the sum of such products of
        several tuples of them, follows from them.

        Args:
            others: By the label of an int, how many others are taken to equal it in every call.
        """
        counts = [count for count in self.plan.ints() if not (count.limit or count.is_edge)]
        products = [
            [counts[i] for i in range(first, last)]
            for first, last in combinations(range(len(counts) + 1), 2)
            if last - first > 1
        ]
        images: dict[str, list[Symbol]] = {}
        for count in counts:
            images.setdefault(count.label.rpartition("[")[0], []).append(count)
        rows = [row for name, row in images.items() if name]
        sums = [[product] for product in products]
        sums += [rows[first:last] for first, last in combinations(range(len(rows) + 1), 2) if last - first > 1]
        sums += [[row] * count for row in rows for count in range(2, others.get(row[0].label, 0) + 2)]
        for symbol in [s for s in self.plan.symbols if s.role == "sequence"]:
            chosen = next((c for c in sums if sum(prod(s.value for s in row) for row in c) == symbol.value), None)
            if chosen is None:
                continue
            self.plan = self.plan.tied({symbol.name: sum(map(product_of, chosen), start=dim_of(0))})

    def add(self, role: str, stem: str, value: Number) -> Symbol:
        name = stem
        count = 1
        while name in self.used:
            count += 1
            name = f"{stem}{count}"
        self.used.add(name)
        symbol = Symbol(name, role, len(self.plan.forms), value, self.label, unit=self.units.get(role, 1))
        self.plan.symbols.append(symbol)
        return symbol

    def form(self, tensor: torch.Tensor, axis: int, size: int) -> Size:
        rank = tensor.dim()
        if axis == 0 and (rank >= 2 or size == self.batch_size):
            return self.batch_form(tensor, size)
        if rank == 1:
            # In a list, mostly positions along each edge of an image: two are alike in a square, not in every call.
            return self.sequence_form(size, self.label if "[" in self.label else "")
        if rank == 2:
            is_sequence = not tensor.dtype.is_floating_point or size in self.sequence_sizes | self.position_counts
            # A mask of floats is over text and image, too; what is pooled has as many channels by chance.
            is_sequence = is_sequence or ("mask" in self.label and self.is_length(size))
            return self.sequence_form(size) if is_sequence and tensor.shape[0] in (1, self.batch_size) else size
        if rank == 6 and max(tensor.shape[4:]) <= _MAX_COORDINATES:
            # Patches of images in one sequence.
            return self.sequence_form(size) if axis == 1 else size
        if rank == 3 and not tensor.dtype.is_floating_point:
            if tensor.shape[2] <= _MAX_COORDINATES and tensor.shape[1] in self.state_lengths:
                # Where each token is.
                return self.sequence_form(size) if axis == 1 else size
            # An image of tokens.
            return self.spatial_form(axis - rank, size)
        if rank == 3 and axis == 2 and size == tensor.shape[1] and size in self.mask_sizes:
            # Which words and patches see which, or channels that are as many by chance.
            return self.sequence_form(size, "columns")
        if rank == 3 and self.channels not in (None, *tensor.shape[1:]) and len(self.call.tensors) == 1:
            # A sound whose channels are not those of the first layer: which axis is its length shows.
            return self.sequence_form(size, "" if axis == 1 else "sound")
        if rank == 3:
            return self.sequence_form(size) if axis == self.sequence_axis(tensor) else size
        if rank == 4 and self.is_kept:
            # Keys and values, of each token and head or of each head and token. Which is which shows by not being free.
            return size if axis == 3 else self.sequence_form(size, f"kept {axis}")
        if rank == 4 and tensor.shape[2] in self.sequence_sizes and tensor.shape[3] <= _MAX_COORDINATES:
            return self.sequence_form(size) if axis == 2 else size
        if rank == 5 and self.channels is None:
            # Where the channels are is not known; they show by not being free.
            return self.spatial_form(axis - rank, size)
        if axis >= rank - 2:
            if rank == 4 and tensor.shape[1] == 1 and (self.is_length(size) or 1 in (size, tensor.shape[2])):
                # A mask; of one row, over all keys.
                return self.sequence_form(size)
            return self.spatial_form(axis - rank, size)
        if rank == 4 and axis == 1 and size in self.mask_sizes and size != self.channels:
            # Words, each as several layers of a text encoder see it.
            return self.sequence_form(size)
        if rank == 5 and axis == self.frames_axis(tensor):
            return self.frames_form(size)
        return size

    def counts(self, video: torch.Tensor) -> tuple[int, ...]:
        """Of a video, how many frames, positions and patches of 2 by 2 there are: each may have a timestep of its own."""
        frames, positions = video.shape[self.frames_axis(video)], prod(video.shape[2:])
        return frames, positions, positions // 4

    def is_length(self, size: int) -> bool:
        """Whether a sequence has this length, or two together do: in a mask over text and image."""
        return size in self.sequence_sizes or any(a + b == size for a, b in combinations(self.sequence_sizes, 2))

    def batch_form(self, tensor: torch.Tensor, size: int) -> Size:
        if size == self.batch_size:
            if self.batch is None:
                self.batch = self.add("batch", "b", size)
            return Dim.symbol(self.batch.name)
        if self.batch is not None and self.frames is not None and size == self.batch_size * self.frames.value:
            return Dim.symbol(self.batch.name) * Dim.symbol(self.frames.name)
        return self.sequence_form(size)

    def sequence_form(self, size: int, place: str = "") -> Size:
        """A length; those that are equal are one, at the same place."""
        if size == 1:
            return 1
        found = self.sequences.get((place, size))
        if found is None:
            found = self.sequences[place, size] = self.add("sequence", "s", size)
        return Dim.symbol(found.name)

    def sequence_axis(self, tensor: torch.Tensor) -> int:
        """Of a 3-D tensor: 1, but for sounds with channels first, and for one row of coordinates per axis."""
        is_sound = tensor.shape[1] == self.channels != tensor.shape[2]
        is_coordinates = 1 < tensor.shape[1] <= _MAX_COORDINATES and tensor.shape[2] in self.lengths
        return 2 if is_sound or is_coordinates else 1

    def frames_axis(self, tensor: torch.Tensor) -> int:
        return 1 if self.channels is not None and tensor.shape[2] == self.channels != tensor.shape[1] else 2

    def frames_form(self, size: int) -> Size:
        # An image among videos takes a path of its own.
        if size == 1:
            return 1
        # In a list or dictionary of tensors, mostly what causal convolutions keep for their next call: the last frame or
        # two, however many there are.
        is_kept = "[" in self.label or "." in self.label
        if is_kept and (size == 2 or self.frames is None or self.frames.value != size):
            return size
        if self.frames is None:
            self.frames = self.add("frames", "f", size)
        if self.frames.value == size:
            return Dim.symbol(self.frames.name)
        return Dim.symbol(self.add("frames", "f", size).name)

    def spatial_form(self, axis: int, size: int) -> Size:
        reference = self.spatial.get(axis)
        stem = {-4: "c", -3: "f", -2: "h", -1: "w"}[axis]
        if reference is None:
            reference = self.spatial[axis] = self.add("spatial", stem, size)
            return Dim.symbol(reference.name)
        base = Dim.symbol(reference.name)
        value = int(reference.value)
        if size == value:
            return base
        if size == 1:
            return 1
        for factor in (2, 4, 8, 16, 32, 64):
            if size == value * factor:
                return base * factor
            # Halved so many times, rounding up: the same form for every size of that residue.
            if size == -(-value // factor):
                return base * Fraction(1, factor) + Dim.constant(size - Fraction(value, factor))
        for factor in (1, 2, 4, 8, 16) if "[" in self.label else ():
            # What a convolution keeps of an image to which a row and a column were added, before it is halved.
            if size == -(-value // factor) + 1:
                return base * Fraction(1, factor) + Dim.constant(size - Fraction(value, factor))
        return Dim.symbol(self.add("spatial", stem, size).name)


def _alike(numbers: Mapping[str, Number]) -> dict[str, str]:
    """Of each int in a list whose items are all equal, one for every sample of a batch or every layer of a picture say, the
    int in the first item that it equals: a program that takes such a list will mostly get others of this kind."""
    lists: dict[str, dict[str, dict[str, Number]]] = {}
    for label, number in numbers.items():
        if type(number) is not int:
            continue
        start = label.find("[")
        while start >= 0:
            end = label.index("]", start)
            lists.setdefault(label[:start], {}).setdefault(label[start + 1 : end], {})[label[end + 1 :]] = number
            start = label.find("[", end)
    out: dict[str, str] = {}
    for name, items in lists.items():
        first, *others = items.items()
        # Numbers alone are sizes of different things.
        if "" not in first[1] and all(item == first[1] for _, item in others):
            for index, item in others:
                for rest in item:
                    out.setdefault(f"{name}[{index}]{rest}", f"{name}[{first[0]}]{rest}")
    # The first of a list may be one of a list of these.
    for label, one in out.items():
        while one in out:
            one = out[one]
        out[label] = one
    return out


FRAMES_STEP = 8
"""Most frames that become one on their way through a model."""


def product_of(symbols: Iterable[Symbol]) -> Dim:
    """The product of sizes."""
    return prod((Dim.symbol(s.name) for s in symbols), start=dim_of(1))
