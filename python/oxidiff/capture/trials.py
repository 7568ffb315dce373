"""What ``forward`` does at other sizes than those of a call: each is traced once.

Here is what a capture knows: the call, the plan of its sizes, the values that are chosen for each, the traces so far. On top
of it :mod:`solving` makes expressions of the numbers in traces, :mod:`freeing` finds out which sizes are free,
:mod:`checking` where a graph is right, and :mod:`session` is the way through all of it: each is a class on top of the one
before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import CaptureError
from .conflicts import Conflict
from .failures import CHANGED, ChangedError
from .following import passed
from .members import check_returned, has_members
from .meta import META_DEVICE, strides_in
from .reads import Asking, Given
from .record import Trace, Trail
from .signature import (
    ANSWERS,
    Call,
    Double,
    Number,
    attributes_of,
    containers,
    first_places,
    items_of,
    labels,
    layout_of,
    rebuild,
    written,
)
from .sizes import Symbol, plan_sizes
from .slices import unsliced_forward
from .trace import trace
from .weights import WeightIndex

if TYPE_CHECKING:
    from .capturer import Capturer

__all__ = ["Lifted", "Point", "Trials", "Twin"]

Point = dict[str, Number]
"""A value for each symbol."""


class Twin(Protocol):
    """A copy of a module for tracing; see :class:`oxidiff.lifted.Twin`."""

    @property
    def root(self) -> torch.nn.Module:
        """The module that has all of the copy."""

    @property
    def forward(self) -> Callable[..., Any]:
        """What is traced of it."""

    def set(self, values: Sequence[float]) -> None:
        """Gives the numbers in its attributes these values."""


class Lifted(Protocol):
    """Numbers in attributes that are arguments of a graph; see :class:`oxidiff.lifted.Lifted`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of their attributes."""

    @property
    def values(self) -> tuple[float, ...]:
        """What they are in the module."""

    def twin(self) -> Twin:
        """A copy of the module, in which they can be others."""


class Trials:
    """The traces of one capture."""

    def __init__(self, owner: Capturer, call: Call, fixed: Set[str] = frozenset(), asks_sizes: bool = False) -> None:
        self.asks_sizes = asks_sizes
        self.is_sized = False
        """Whether values of tensors were read that follow from sizes alone."""
        self.owner = owner
        self.call = call
        lifted = owner.lifted
        self.weights = WeightIndex(owner.whole, owner.outer)
        self.kept: list[Number] = [] if lifted is None else list(lifted.values)
        self._twin: tuple[Twin, WeightIndex] | None = None
        self.labels = labels(call.bound) + ([] if lifted is None else list(lifted.names))
        self.device = _device_of(call, owner.whole)
        self.plan = plan_sizes(call, self.labels, _channels_of(owner.root), _units_of(owner.root), owner.varied)
        self.order = {s.name: i for i, s in enumerate(self.plan.symbols)}
        """Which values are tried of each: no two take the same."""
        self.chosen: dict[str, tuple[Number, ...]] = {}
        self.traces = 0
        self.limit: int | None = None
        """Nodes of the first trace: one with more of them is of another program."""
        self.fixed: list[str] = []
        self.wanted = fixed
        """Names of sizes that are to be constants."""
        self.asking: Asking | None = None
        """Who answers what is read out of tensors, in the first trace."""
        self.base = Trace()
        """The first trace."""
        self.taken: dict[tuple[Number, ...], Trail] = {}
        """What was done, by the sizes of calls: each is traced once."""
        self.agreed: dict[tuple[Number, ...], bool] = {}
        """Whether these traces are of the program of the first one."""
        self.at_op: set[tuple[Number, ...]] = set()
        """Those of these sizes at which an op cannot be done."""
        self.conflicts: list[tuple[dict[str, int], Conflict]] = []
        """Ops at which trials ended, with the places of their symbols among the sizes of a call."""
        self.meeting: Set[str] = frozenset()
        """Two sizes that seem to be free alone and not together."""
        self.escaped: set[str] = set()
        """Free sizes with which something was computed that could not be followed."""
        self.is_near = False
        """Whether ints were tried next to those of the call."""
        self.is_rounded = False
        """Whether lengths are tried at the residues that they have in the call."""
        self.is_divided = False
        """Whether batches are tried at multiples of what they are in the call: guidance cuts them into so many parts."""
        self.is_padded = False
        """Whether lengths were tried as padded ones."""
        self.is_covered = False
        """Whether the tokens of an image were tried as padded ones."""
        self.is_edged = False
        """Whether the sides of an image were tried as padded ones."""
        self.is_tied = False
        """Whether the width of an image was tried as its height, once a graph was found wrong."""
        self.before_area: dict[str, tuple[Number, ...]] = {}
        """The values that were chosen before they were."""
        self.is_narrow = False
        """Whether the graph was found wrong at other residues of an image's sides."""
        held = {s.name for s in self.plan.symbols if s.role == "float" and s.label in owner.held}
        for symbol in [s for s in self.plan.symbols if s.name in fixed | held]:
            self.fix(symbol)
        # What has no effect is mostly left out by the code: of another program than any other value.
        for symbol in [s for s in self.lifted_symbols() if s.value == 0]:
            self.fix(symbol)

    def point(self) -> Point:
        """The call's own."""
        return self.plan.complete({s.name: s.value for s in self.plan.symbols})

    def lifted_symbols(self) -> list[Symbol]:
        """The lifted numbers that are free."""
        return [s for s in self.plan.symbols if s.role == "attribute"]

    def counts(self) -> list[Symbol]:
        """The symbols that are numbers of places read out of tensors."""
        return [s for s in self.plan.symbols if s.limit]

    def fix(self, symbol: Symbol) -> None:
        """Makes a size a constant of the program."""
        self.plan.fix(symbol.name)
        self.fixed.append(symbol.label)

    def fix_all(self) -> None:
        """Makes all sizes constants of the program."""
        for symbol in list(self.plan.symbols):
            self.fix(symbol)

    def drop_area(self) -> None:
        """Tells images apart by the residues of their sides again."""
        self.plan.drop_areas()
        self.chosen.update(self.before_area)

    def rows(self, values: Mapping[str, Sequence[Number]]) -> list[Point]:
        """The points at which these symbols have their values, and all others those of the call."""
        here = self.point()
        count = max(map(len, values.values()))
        return [self.plan.complete({**here, **{n: v[i % len(v)] for n, v in values.items()}}) for i in range(count)]

    def moved_alone(self, symbol: Symbol) -> Point:
        """A point that differs from the call in one of the values of a symbol; one that was traced, if there is one."""
        here = self.point()
        points = [{**here, symbol.name: value} for value in self.chosen[symbol.name]]
        return next((p for p in points if tuple(self.plan.sizes(p) or ()) in self.taken), points[0])

    def copy(self) -> tuple[Twin, WeightIndex]:
        """A copy of the module, in which other numbers are tried."""
        if self._twin is None:
            assert self.owner.lifted is not None, "only numbers in attributes need a copy"
            twin = self.owner.lifted.twin()
            self._twin = twin, WeightIndex(twin.root, self.owner.outer)
        return self._twin

    def trace_at(self, point: Mapping[str, Number]) -> Trace:
        """The trace at ``point``: of the module itself where its numbers are what they are, else of a copy."""
        sizes = self.plan.sizes(point)
        if sizes is None:
            raise CaptureError("sizes that depend on each other")
        tensors = []
        at = 0
        for tensor in self.call.tensors:
            tensors.append(_meta_tensor(sizes[at : at + tensor.dim()], tensor))
            if tensor.__dict__:
                tensors[-1].__dict__.update({name: value for name, (value, _) in attributes_of(tensor).items()})
            at += tensor.dim()
        # A program may ask whether two arguments are one.
        places = first_places(self.call.tensors)
        numbers = sizes[at:]
        target, weights = self.owner.module, self.weights
        kept = numbers[len(numbers) - self.call.kept :]
        if kept != self.kept:
            twin, weights = self.copy()
            twin.set([float(n) for n in kept])
            target = twin.forward

        answers: list[Any] = []
        reader = self.asking or (Given(self.call, answers, self.asks_sizes) if self.call.questions else None)

        def run() -> Any:
            answers.clear()
            # Lists and dictionaries of its own for each run: a program may write into them.
            leaves = iter([tensors[place] for place in places])
            rest = itertools.starmap(passed, enumerate(numbers, at))

            def replace(old: Any) -> Any:
                return next(leaves) if isinstance(old, Tensor) else next(rest)

            bound = {name: rebuild(value, replace) for name, value in self.call.bound.items()}
            answers.extend(bound.pop(ANSWERS, ()))
            before = [(path, container, items_of(container)) for path, container in containers(bound)]
            args, kwargs = self.owner.binder.arguments(bound)
            copies = {id(container) for _, container, _ in before if has_members(container)}
            result = unsliced_forward(target, args, kwargs)(*args, **kwargs)
            check_returned(result, copies)
            return written(result, before)

        has_doubles = any(type(number) is Double for number in self.call.numbers)
        self.traces += 1
        self.owner.traces += 1
        record = trace(
            run,
            list(zip(tensors[: len(tensors) - self.call.answer_tensors], self.labels, strict=False)),
            weights,
            self.device,
            [n for n in numbers if isinstance(n, float)],
            self.limit,
            reader,
            has_doubles,
            self.call.autocast,
            self.call.thread_modes,
            is_own=tuple(sizes) == self.call.sizes,
        )
        if any(ask() != mode for ask, mode in self.call.process_modes):
            raise ChangedError(CHANGED)
        return record

    def trail_at(self, point: Mapping[str, Number]) -> Trail:
        """What is done at ``point``; each is traced once."""
        sizes = tuple(self.plan.sizes(point) or ())
        if sizes not in self.taken:
            try:
                trail = Trail(self.trace_at(point), is_whole=True)
            except ChangedError:
                raise
            except CaptureError as error:
                trail = error.trail if isinstance(error.trail, Trail) else Trail(Trace())
            trail.record.share(self.base)
            self.taken[sizes] = trail
        return self.taken[sizes]

    def trial(self, base: Trace, point: Point) -> tuple[Trail, bool]:
        """What is done at ``point``, and whether the program is the same."""
        sizes, trail = tuple(self.plan.sizes(point) or ()), self.trail_at(point)
        if sizes not in self.agreed:
            self.agreed[sizes] = trail.is_whole and base.difference(trail.record) is None
        return trail, self.agreed[sizes]

    def try_trace(self, base: Trace, point: Point) -> Trace | None:
        """The trace at ``point`` if it can be taken and agrees with ``base``."""
        trail, is_alike = self.trial(base, point)
        return trail.record if is_alike else None

    def trace_if_any(self, point: Mapping[str, Number]) -> Trace | None:
        """The trace at ``point``; ``None`` if the module does not run there, or does more."""
        trail = self.trail_at(point)
        return trail.record if trail.is_whole else None

    def agrees(self, base: Trace, point: Point) -> bool:
        """Whether the program is the same at ``point``."""
        sizes = tuple(self.plan.sizes(point) or ())
        if sizes not in self.agreed and self.is_refuted(point):
            return False
        trail, is_alike = self.trial(base, point)
        if not is_alike and trail.is_at_op_of(base):
            self.at_op.add(sizes)
        return is_alike

    def is_refuted(self, point: Mapping[str, Number]) -> bool:
        """Whether an op is known that cannot be done at ``point``."""
        sizes = self.plan.sizes(point)
        return sizes is not None and any(
            conflict.is_at({name: sizes[place] for name, place in places.items()})
            for places, conflict in self.conflicts
        )


def _meta_tensor(shape: Sequence[Any], like: Tensor) -> Tensor:
    layout = layout_of(like)
    if isinstance(layout, int):
        return torch.empty(tuple(shape), dtype=like.dtype, device=META_DEVICE)
    strides = strides_in(reversed(layout), shape)
    return torch.empty_strided(tuple(shape), strides, dtype=like.dtype, device=META_DEVICE)


def _device_of(call: Call, root: torch.nn.Module | None) -> torch.device:
    for tensor in call.tensors:
        if tensor.dim():
            return tensor.device
    parameter = next(root.parameters(), None) if root is not None else None
    if parameter is not None:
        return parameter.device
    return call.tensors[0].device if call.tensors else torch.device("cpu")


def _units_of(root: torch.nn.Module | None) -> dict[str, int]:
    """What a module divides sizes by, other than powers of two: the strides of its convolutions (patches of 14 pixels,
    signals that become shorter), and windows."""
    found: dict[str, set[int]] = {"spatial": set(), "sequence": set()}
    for module in () if root is None else root.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            found["spatial"].update(module.stride[-2:])
        elif isinstance(module, torch.nn.Conv1d):
            found["sequence"].update(module.stride)
        windows = (module.__dict__.get(name) for name in _WINDOWS)
        found["spatial"].update(value for value in windows if type(value) is int and value > 0)
    units = {role: math.lcm(*(step // math.gcd(step, 64) for step in steps)) for role, steps in found.items()}
    return {role: unit for role, unit in units.items() if unit <= _MAX_UNIT}


_WINDOWS = ("patch_size", "window_size")
"""Attributes that say what an image is cut into."""
_MAX_UNIT = 45
"""More is not one patch or window, but the product of several that have nothing to do with each other."""


def _channels_of(root: torch.nn.Module | None) -> int | None:
    config = getattr(root, "config", None)
    value = getattr(config, "in_channels", None) or getattr(config, "io_channels", None)
    if value is None and root is not None:
        # A part of a model has no configuration.
        value = next((m.in_channels for m in root.modules() if isinstance(m, torch.nn.Conv1d)), None)
    return value if isinstance(value, int) else None
