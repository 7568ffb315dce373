"""Which sizes of a call are free, which follow from others, and at which values to trace.

Nothing here has to be right: a guess that does not hold shows as traces that fail or differ, and is then corrected by
trying (see :mod:`~oxidiff.capture.freeing`). Good guesses only save traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, combinations, islice, product
from math import ceil, nan, prod
from typing import Any

import torch

from ..errors import CaptureError
from .dim import Dim, Size, dim_of, dim_or_int
from .guards import Expression, expression_text, symbols_of, value_at
from .signature import ANSWERS, Call, Number, first_places, in_objects, share_of

__all__ = ["Area", "Computed", "Counted", "PaddedTie", "Rounded", "SizePlan", "Symbol", "plan_sizes"]


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
    call: Call, names: Sequence[str], channels: int | None = None, units: Mapping[str, int] | None = None
) -> SizePlan:
    """Guesses the free sizes of a call.

    Args:
        call: The call.
        names: A label per tensor and number of the call.
        channels: The module's number of input channels, if known: tells frames from channels in 5-D tensors.
        units: By the role of a size, what the module divides such by, other than powers of two.
    """
    return _Planner(call, names, channels, units or {}).run()


_MAX_COORDINATES = 4
"""Coordinates of a token: time, height, width, and what is the same for all."""


class _Planner:
    def __init__(self, call: Call, names: Sequence[str], channels: int | None, units: Mapping[str, int]) -> None:
        self.call = call
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
                self.plan.forms.append(self.form(tensor, axis, size))
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
            self.plan = self.plan.tied({symbol.name: sum(map(_product, chosen), start=dim_of(0))})

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


def ties(bound: Sequence[Symbol]) -> Iterator[dict[str, Dim]]:
    """What may follow from what among sizes that are not free alone, the likeliest first: lengths from all other sizes, as
    those of position tables do from the edges of an image; lengths from one size; equal numbers of words; in
    models that draw squares only, the width of an image from its height."""
    # Nothing that is passed follows from what is read.
    sizes = [s for s in bound if not s.limit]
    edges = [s for s in sizes if s.role not in ("sequence", "batch")]
    for drivers in [edges, *([s] for s in sizes if edges != [s])]:
        followers = [s for s in bound if s.role == "sequence" and s not in drivers]
        forms = [[*_following(s, drivers, followers), None] for s in followers]
        for chosen in islice(product(*forms), _MAX_TIES):
            tied = {s.name: form for s, form in zip(followers, chosen, strict=True) if form is not None}
            if tied and not any(form.symbols() & tied.keys() for form in tied.values()):
                yield tied
    # Several images of one prompt have as many words each: a program may ask whether all have.
    reads = [s for s in bound if s.limit]
    batches = [s.value for s in bound if s.role == "batch"]
    if len({s.value for s in reads}) == 1 < len(reads) and batches == [len(reads)]:
        yield {s.name: Dim.symbol(reads[0].name) for s in reads[1:]}
    sides = [s for s in bound if s.role == "spatial"]
    if len(sides) == 2 and sides[0].value == sides[1].value:
        yield {sides[1].name: Dim.symbol(sides[0].name)}


_MAX_TIES = 16
"""How many ways are tried in which several lengths may follow from the same sizes."""
_MAX_PATCH = 32
"""Pixels along an edge that become one token, at most."""


def _product(symbols: Iterable[Symbol]) -> Dim:
    return prod((Dim.symbol(s.name) for s in symbols), start=dim_of(1))


def _following(follower: Symbol, drivers: Sequence[Symbol], others: Sequence[Symbol]) -> list[Dim]:
    """What a length may be that other sizes seem to decide, the likeliest first: one of them; the product of several, in
    patches; one of them and a token beside it; so many per sample of a batch; such a product and another length, of text
    and image in one sequence, with a token of the time beside these or not."""
    length, drivers = int(follower.value), [s for s in drivers if isinstance(s.value, int)]
    found: list[tuple[int, int, Dim]] = []
    texts = [s for s in others if s is not follower]
    for other, more in ((None, 0), *((s, 0) for s in texts), *((s, 1) for s in texts)):
        beside = dim_of(0) if other is None else Dim.symbol(other.name) + more
        rest = length if other is None else length - int(other.value) - more
        for count in (1, 2, 3):
            for chosen in combinations(drivers, count):
                whole = prod(int(s.value) for s in chosen)
                patch = next((1 << log for log in range(count * _MAX_PATCH.bit_length()) if rest << log == whole), None)
                if patch is None or rest <= 0:
                    continue
                rank = 5 + more if other is not None else 0 if count == 1 == patch else 4 - count
                found.append((rank, patch, _product(chosen) * Fraction(1, patch) + beside))
    for symbol in drivers:
        step = length - int(symbol.value)
        if abs(step) == 1:
            found.append((4, 0, Dim.symbol(symbol.name) + step))
        if symbol.role == "batch" and length % symbol.value == 0:
            found.append((4, 1, Dim.symbol(symbol.name) * int(length // symbol.value)))
    return [form for _, _, form in sorted(found, key=lambda item: item[:2])]


# -- where to trace --------------------------------------------------------------------------------------------------------


def candidates(symbol: Symbol, index: int) -> Iterator[tuple[Number, ...]]:
    """Sets of three values at which to trace, the best guess first.

    Args:
        symbol: The symbol; its own value is not among the candidates.
        index: The number of the symbol, so that no two take the same values.
    """
    if symbol.limit:
        found = _count_values(symbol.limit, index)
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
        elif symbol.role in ("spatial", "sequence") and _MULTIPLE % moduli[name] == 0:
            out[name] = -(-int(value) // _MULTIPLE) * _MULTIPLE + int(value) % moduli[name]
    return {name: value for name, value in out.items() if value != here[name]}


_MULTIPLE = 64
"""The largest power of two that programs commonly ask sizes to be a multiple of."""


# -- lengths that are padded -------------------------------------------------------------------------------------------

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
            wide = max(1, _MULTIPLE // r.unit)
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


# -- images whose tokens are padded ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PaddedTie:
    """A length that is that of an image's tokens, of a text, or of both together, each padded to a multiple.

    Attributes:
        name: The length's symbol.
        form: What it is, of symbols and of numbers of units.
        rounded: The text.
        area: The image.
        sides: The symbols of the image's sides.
        patch: Pixels along an edge of the image that are one token.
    """

    name: str
    form: Dim
    rounded: tuple[Rounded, ...] = ()
    area: Area | None = None
    sides: tuple[Symbol, ...] = ()
    patch: int = 1

    def names(self) -> set[str]:
        """The symbols that take part."""
        return {self.name, *(r.of for r in self.rounded), *(s.name for s in self.sides)}


def padded_ties(bound: Sequence[Symbol], free: Sequence[Symbol], used: Iterable[str]) -> Iterator[PaddedTie]:
    """What lengths among sizes that are not free alone may be: an image, a text, or both, padded to multiples of one unit.
    The smallest units come first: a smaller one than the program's shows at once, a larger one serves fewer sizes.

    Args:
        bound: The sizes.
        free: Those that are. A text may be as long as its padding alone.
        used: Names of symbols.
    """
    used = {*used}
    lengths = [s for s in bound if s.role == "sequence" and not s.limit]
    free = [s for s in free if s.role == "sequence" and not s.limit]
    sides = tuple(s for s in bound if s.role == "spatial")
    area_name = "".join(s.name for s in sides) + "r"
    # What is padded to an even number has one token less or as many: a length of its own.
    for unit, follower in product(UNITS[2:], lengths):
        texts = [s for s in (*lengths, *free) if s is not follower and f"{s.name}r" not in used]
        images: list[tuple[int, Area] | None] = [None]
        for patch in PATCHES if len(sides) == 2 and area_name not in used else ():
            area = Area(area_name, _product(sides) / patch**2, unit)
            if all(int(s.value) % patch == 0 for s in sides):
                is_full = area.is_full({s.name: s.value for s in sides})
                images.append((patch, Area("", area.of, unit) if is_full else area))
        for image, text in product(images, [None, *texts]):
            rest, form, rounded = int(follower.value), dim_of(0), None
            if image is not None:
                units = image[1].at({s.name: s.value for s in sides})
                rest -= units * unit
                form += Dim.symbol(image[1].name) * unit if image[1].is_named() else image[1].of
            if text is not None:
                units = -(-int(text.value) // unit)
                rest -= units * unit
                name = text.name if units * unit == text.value else f"{text.name}r"
                rounded = Rounded(name, text.name, unit)
                form += Dim.symbol(name) * (unit if rounded.is_named() else 1)
            if rest or form == dim_of(0):
                continue
            if image is None:
                yield PaddedTie(follower.name, form, (rounded,) if rounded else ())
            else:
                yield PaddedTie(follower.name, form, (rounded,) if rounded else (), image[1], sides, image[0])


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
