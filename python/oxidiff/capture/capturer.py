"""Capturing a module: trace at a few sizes, check that the graphs agree, solve their numbers, verify elsewhere.

A capture takes five traces: at the call's own sizes, at three more where every free size differs, and at a held-out one
(batch 1, other residues), which must be predicted. Where a guess about the free sizes fails, each is tried alone, with
other values, then together with lengths that may follow from it, as those of position tables do from the edges of an
image; lengths, the tokens of an image and its sides also as padded ones, whose numbers of units are symbols of their own.
So are ints that ``forward`` makes of others, as the longer of two sides. A size becomes a constant of the program if nothing
helps: the graph then serves that value only. What trials have traced is not traced again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..ambient import of_process
from ..autocast import without_autocast
from ..errors import CaptureError
from .conflicts import Conflict
from .dim import Dim, Real
from .failures import CHANGED, ChangedError, LongerError
from .fit import denominators, fit_all, fit_floats
from .following import following, passed
from .graph import CapturedGraph, Literal, build_graph, symbols_in
from .guards import Guard, Ledger, shows_at, symbols_of
from .lowering import LoweredGraph, SizeDependentError, lower
from .members import check_returned, has_members
from .meta import META_DEVICE, strides_in
from .reads import Asking, Given
from .record import Trace, Trail
from .signature import (
    ANSWERS,
    Binder,
    Call,
    Double,
    Number,
    attributes_of,
    container_at,
    containers,
    first_places,
    items_of,
    labels,
    layout_of,
    rebuild,
    with_answers,
    written,
)
from .sizes import (
    FRAMES_STEP,
    HELD_OUT,
    PATCHES,
    RESIDUES,
    SHOWING,
    Area,
    Computed,
    Counted,
    Rounded,
    Symbol,
    area_aside,
    area_units,
    areas_alike,
    at_multiples,
    at_residue,
    at_whole_times,
    candidates,
    counts_apart,
    counts_in_order,
    edges_alike,
    held_out,
    held_out_count,
    in_order,
    modulus_of,
    move_alone,
    padded_alike,
    padded_aside,
    padded_ties,
    plan_sizes,
    ranks,
    rounded_plans,
    ties,
)
from .stages import Stage, cut
from .trace import trace
from .weights import WeightIndex
from .writes import Outer

if TYPE_CHECKING:
    from .._native import GraphBuilder

__all__ = ["Capturer", "Known", "capture"]

Point = dict[str, Number]
Known = dict[frozenset[str], CapturedGraph]
"""Graphs of a call, by the names of the sizes that they are to have as constants."""
Way = frozenset[tuple[Guard, bool]]
R = TypeVar("R")


def capture(
    module: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool = True,
) -> CapturedGraph:
    """Captures what ``module(*args, **kwargs)`` does, for these and other sizes.

    Args:
        module: A module or a function of tensors.
        args: Positional arguments of an example call.
        kwargs: Keyword arguments of it.
        dynamic: ``False`` fixes all sizes at the example's.

    Raises:
        CaptureError: If it cannot be written down as a graph; the message says where and why.
        TypeError: If the arguments do not fit the signature.
    """
    capturer = Capturer(module, dynamic=dynamic)
    return capturer.capture(capturer.call(args, kwargs or {}))


class Twin(Protocol):
    """A copy of a module for tracing; see :class:`oxidiff.lifted.Twin`."""

    @property
    def root(self) -> torch.nn.Module: ...
    @property
    def forward(self) -> Callable[..., Any]: ...
    def set(self, values: Sequence[float]) -> None: ...


class Lifted(Protocol):
    """Numbers in attributes that are arguments of a graph; see :class:`oxidiff.lifted.Lifted`."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def values(self) -> tuple[float, ...]: ...
    def twin(self) -> Twin: ...


# What is made in inference mode has no version counter, which views below autograd ask for.
_recording = torch.inference_mode(False)


class Capturer:
    """Captures the calls of one module. Cheap to make; holds no tensors between captures.

    Attributes:
        module: What is traced: the module, or a function of it.
        root: The module.
        whole: The module that has the root and whatever else its attributes hold, by whose paths weights are named.
        lifted: Numbers in its attributes that are arguments of its graphs, after those that are passed.
        held: Labels of floats that are passed and are constants of the next graph, as they are of it in all calls so far.
        outer: What its code may write outside of it.
        asked: Says how modes of torch are that its code asks for.
        traces: How many traces were taken.
    """

    def __init__(self, module: Callable[..., Any], *, dynamic: bool = True) -> None:
        self.module = module
        self.lifted: Lifted | None = None
        self.held: Set[str] = frozenset()
        self.outer = Outer()
        self.asked: tuple[Callable[[], Any], ...] = ()
        self.root = self.whole = module if isinstance(module, torch.nn.Module) else None
        self.dynamic = dynamic
        self.binder = Binder(self.root.forward if self.root is not None else module)
        self.traces = 0

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart; see :meth:`~oxidiff.capture.signature.Binder.call`."""
        call = self.binder.call(args, kwargs)
        if self.asked:
            modes = {ask: ask() for ask in self.asked}
            call.key = (*call.key, ("modes", *modes.values()))
            call.thread_modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            call.process_modes = [(ask, modes[ask]) for ask in of_process(self.asked)]
        if self.lifted is not None:
            call.key = (*call.key, ("lifted", *self.lifted.names))
            call.numbers += self.lifted.values
            call.sizes = (*call.sizes, *self.lifted.values)
            call.kept = len(self.lifted.values)
        return call

    @_recording
    @without_autocast
    @following()
    def capture(self, call: Call) -> CapturedGraph:
        """Captures the program of ``call``; see :func:`capture`."""
        return self._captured(call)

    @_recording
    @without_autocast
    @following()
    def lowered(
        self, call: Call, make_builder: Callable[[], GraphBuilder], known: Known | None = None
    ) -> tuple[CapturedGraph, LoweredGraph]:
        """Captures the program of ``call`` and lowers it. A size that the compiler must know becomes a constant.

        Args:
            call: The call.
            make_builder: Makes an empty builder, ``oxidiff._native.GraphBuilder``.
            known: The graphs of this call that were captured before; gets more.

        Raises:
            CaptureError: As :func:`capture`.
            UnsupportedError: As :func:`~oxidiff.capture.lowering.lower`.
        """
        return self._fixing(call, lambda graph: lower(graph, make_builder()), known)

    @_recording
    @without_autocast
    @following()
    def staged(
        self, call: Call, make_builder: Callable[[], GraphBuilder], known: Known | None = None
    ) -> tuple[CapturedGraph, list[Stage]]:
        """As :meth:`lowered`, for a graph with ops that the compiler does not know: cut at these.

        Raises:
            CaptureError: As :func:`capture`.
            UnsupportedError: As :func:`~oxidiff.capture.stages.cut`.
        """
        return self._fixing(call, lambda graph: cut(graph, make_builder), known)

    def _fixing(self, call: Call, use: Callable[[CapturedGraph], R], known: Known | None) -> tuple[CapturedGraph, R]:
        """A graph and what ``use`` makes of it, with the sizes constant that it needs to know."""
        known = {} if known is None else known
        fixed: frozenset[str] = frozenset()
        while True:
            if fixed not in known:
                known[fixed] = self._captured(call, fixed)
            graph = known[fixed]
            try:
                return graph, use(graph)
            except SizeDependentError as error:
                followers = graph.plan.followers()
                symbols = {
                    s for name in error.symbols for s in (followers[name].sizes() if name in followers else {name})
                }
                if symbols <= fixed:
                    raise
                # What follows from an int may be known by then.
                fixed |= (symbols & {s.name for s in graph.plan.ints()}) or symbols

    def _captured(self, call: Call, fixed: Set[str] = frozenset()) -> CapturedGraph:
        """A graph of a call. Values of tensors that follow from sizes alone are numbers like others, first; where sizes are
        constants for it (the larger side of an image is no polynomial), they are answers."""
        session = _Session(self, call, fixed)
        graph = session.run()
        if session.is_sized and graph.fixed:
            other = _Session(self, call, fixed, asks_sizes=True).run()
            if len(other.fixed) < len(graph.fixed):
                return other
        return graph

    @_recording
    @without_autocast
    @following()
    def adopt(
        self,
        graph: CapturedGraph,
        call: Call,
        traced: dict[Any, Trace | CaptureError] | None = None,
        *,
        is_relaid: bool = False,
    ) -> CapturedGraph | None:
        """The graph of another state of the module for this one, if a trace shows that it is right at the sizes of ``call``
        and all that it computed with sizes could be followed; ``None`` if not. Numbers in attributes cannot be followed:
        where they are free, further traces try those that the graph was tried with.

        Args:
            graph: The graph, without answers to what ``forward`` reads out of tensors. One that was stored is none to
                compare with: how its results are put together is not all in the trace that it has.
            call: The call.
            traced: The traces of this call that were taken for other graphs; gets more.
            is_relaid: Whether the graph is of this state, and of calls whose tensors lie otherwise in memory. Strides cannot
                be followed either: further traces are taken at sizes that the graph was tried at.
        """
        point = graph.plan.read(call.sizes) if graph.key == call.key else None
        if point is None or not graph.meets(point) or type(graph.template) is not Trace:
            return None
        own = graph.unchecked()
        session = _Session(self, call)
        session.plan = own.plan
        known = {} if traced is None else traced
        kept = [s.name for s in own.plan.symbols if s.role == "attribute"]
        tried = {tuple(p[name] for name in kept): p for p in reversed(graph.points)} if kept else {}
        moved = [{**point, **{name: p[name] for name in kept}} for p in list(tried.values())[:_MOVES]]
        if is_relaid:
            names = [s.name for s in own.plan.symbols if s.name not in kept]
            here = {name: point[name] for name in kept}
            moved = [own.plan.complete({**here, **{name: p[name] for name in names}}) for p in graph.points[:_RELAYS]]
        for at in [point, *(p for p in moved if p != point)]:
            sizes = tuple(own.plan.sizes(at) or ())
            if sizes not in known:
                try:
                    known[sizes] = session.trace_at(at)
                except ChangedError:
                    raise
                except CaptureError as error:
                    known[sizes] = error
                own.traces += 1
            record = known[sizes]
            if isinstance(record, CaptureError) or own.differs_from(record, at) is not None:
                return None
            if not (own.template.is_exactly(record) and own.has_constants_of(record)):
                return None
            if own.accept(at, record, of_copy=at is not point and not is_relaid) - set(kept):
                return None
        session.try_ways(own)
        return own

    def extend(self, graph: CapturedGraph, call: Call, traced: dict[Any, Trace | CaptureError] | None = None) -> bool:
        """Checks by one trace whether ``graph`` is right at the sizes of ``call`` too, and remembers it if so.

        Args:
            graph: The graph.
            call: The call.
            traced: The traces of this call that were taken for other graphs; gets more.

        Raises:
            CaptureError: If the call cannot be traced at all, or shows that numbers in attributes cannot be arguments.
        """
        point = graph.plan.read(call.sizes) if graph.key == call.key else None
        if point is None or not graph.meets(point):
            return False
        is_assumed = graph.accepts(point, of_copy=True)
        # A trace says by its questions what it takes for one.
        session = _Session(self, call, asks_sizes=graph.asks_sizes)
        session.plan = graph.plan
        known = {} if traced is None else traced
        given = (call.key, call.sizes, graph.asks_sizes, tuple(a for a in call.answers if not isinstance(a, Tensor)))
        record = known.get(given)
        if record is None:
            try:
                record = session.trace_at(point)
                graph.traces += 1
            except ChangedError:
                raise
            except CaptureError as error:
                record = error
            known[given] = record
        if isinstance(record, CaptureError):
            if not graph.reads:
                raise record
            # Another program, which reads something else.
            return False
        if graph.differs_from(record, point) is not None:
            if is_assumed:
                raise CaptureError("numbers in attributes do more in the module than in a copy of it")
            return False
        beyond = graph.beyond(point)
        graph.accept(point, record)
        session.try_ways(graph)
        if beyond:
            # Times that fall or rise from call to call: not each of them is to be traced.
            point = {**point, **beyond}
            try:
                record = session.trace_at(point)
            except ChangedError:
                raise
            except CaptureError:
                return True
            graph.traces += 1
            if graph.differs_from(record, point) is None:
                graph.accept(point, record)
        return True


class _Disagreement(Exception):
    """Traces at two points are not of the same program."""


_MOVES = 2
"""So many values of numbers in attributes are tried before a graph of another state of a module is taken over."""
_RELAYS = 4
"""So many sizes are tried before a graph serves calls whose tensors lie otherwise in memory."""
_MAX_COUNTED = 24
"""So many ints that are made of others are symbols at most."""
_MANY_ALIKE = 4
"""So many symbols of one kind are tried together before each is tried alone."""


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


class _Session:
    """One capture."""

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
        self.plan = plan_sizes(call, self.labels, _channels_of(owner.root), _units_of(owner.root))
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
        self.escaped: set[str] = set()
        """Free sizes with which something was computed that could not be followed."""
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

    def run(self) -> CapturedGraph:
        if not self.owner.dynamic:
            self.fix_all()
        for symbol in list(self.plan.symbols):
            values = next(candidates(symbol, self.order[symbol.name]), None)
            if values is None:
                # Next to a float as large as that there is nothing to try.
                self.fix(symbol)
            else:
                self.chosen[symbol.name] = values
        self.chosen.update(counts_apart(self.counts(), self.chosen))
        if not self.call.questions:
            self.asking = Asking(self.call.tensors, self.device, self.asks_sizes)
        base = self.base = self.trace_at(self.point())
        self.is_sized = base.is_sized
        if self.asking is not None and self.asking.questions:
            call = with_answers(self.call, self.asking.questions, self.asking.answers)
            return _Session(self.owner, call, self.wanted, self.asks_sizes).run()
        self.asking = None
        self.limit = len(base.nodes)
        self.fix_counters(base)
        if self.lifted_symbols():
            self.copy()
        while True:
            self.plan.ordered = ()
            graph, points = self.solved_graph(base)
            is_right = self.hold_out(graph, points)
            if self.plan.areas and (self.is_narrow or not is_right):
                # Not that, or not that alone.
                self.drop_area()
            elif not is_right:
                self.fix_all()
            elif not self.pad_sides(base, graph) and (not self.is_narrow or not self.pad_area(base)):
                self.keep_order(graph)
                self.bound_ints(graph)
                self.try_ways(graph)
                break
        # Read by now, and longer than the rest of the trace.
        graph.template.ledger = Ledger()
        graph.traces = self.traces
        graph.fixed = tuple(self.fixed)
        graph.asks_sizes = self.asks_sizes
        return graph

    def solved_graph(self, base: Trace) -> tuple[CapturedGraph, list[Point]]:
        """A graph that is right at a few points, and these."""
        self.is_narrow = False
        records, points = self.agreeing_traces(base)
        forms = self.solve(base, records, points)
        while forms is None and (forms := self.solve_counting(base, records, points)) is None:
            self.fix_unsolved(base)
            records, points = self.agreeing_traces(base)
            forms = self.solve(base, records, points)
        used = {name for form in set(forms) if isinstance(form, Dim) for name in form.symbols()}
        for symbol in [s for s in self.lifted_symbols() if s.name not in used]:
            # No trace shows that it matters, or where: the graph is right for this value.
            self.fix(symbol)
            points = [{name: value for name, value in p.items() if name != symbol.name} for p in points]
        # A float need not come out whole, so it decides no residues.
        dims = [f for f in set(forms) if isinstance(f, Dim) and not isinstance(f, Real)]
        moduli = denominators(dims, self.plan.names())
        forms, points = self.without_units(forms, points, moduli)
        graph = build_graph(self.call, self.plan, self.labels, base, forms, moduli)
        graph.solve_uses(records, points)
        self.escaped = set()
        for point, record in zip(points, records, strict=True):
            self.confirm(graph, point, record)
        return graph, points

    def confirm(self, graph: CapturedGraph, point: Point, record: Trace) -> None:
        """Notes that a trace found the graph right at a point."""
        self.escaped |= graph.accept(point, record, of_copy=True)

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

    # -- tracing -------------------------------------------------------------------------------------------------------

    def point(self) -> Point:
        return self.plan.complete({s.name: s.value for s in self.plan.symbols})

    def lifted_symbols(self) -> list[Symbol]:
        """The lifted numbers that are free."""
        return [s for s in self.plan.symbols if s.role == "attribute"]

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
            result = target(*args, **kwargs)
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

    def try_trace(self, base: Trace, point: Point) -> Trace | None:
        """The trace at ``point`` if it can be taken and agrees with ``base``."""
        trail, is_alike = self.trial(base, point)
        return trail.record if is_alike else None

    def trace_if_any(self, point: Mapping[str, Number]) -> Trace | None:
        """The trace at ``point``; ``None`` if the module does not run there, or does more."""
        trail = self.trail_at(point)
        return trail.record if trail.is_whole else None

    def agreeing_traces(self, base: Trace) -> tuple[list[Trace], list[Point]]:
        """The base trace and three more at other values of every symbol, all of the same program."""
        for attempt in range(5):
            if not self.plan.symbols:
                break
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
            elif attempt == 0:
                self.try_each_symbol(base)
            elif attempt == 1:
                self.try_each_symbol(base, is_thorough=True)
            elif attempt == 2:
                # All of them at once may be so much that a model does it in several goes.
                for first, *_ in _alike(self.plan.symbols):
                    self.is_free(base, [first], is_small=True)
            else:
                self.fix_all()
        return [base], [self.point()]

    def rows(self, values: Mapping[str, Sequence[Number]]) -> list[Point]:
        """The points at which these symbols have their values, and all others those of the call."""
        here = self.point()
        count = max(map(len, values.values()))
        return [self.plan.complete({**here, **{n: v[i % len(v)] for n, v in values.items()}}) for i in range(count)]

    def trial(self, base: Trace, point: Point) -> tuple[Trail, bool]:
        """What is done at ``point``, and whether the program is the same."""
        sizes, trail = tuple(self.plan.sizes(point) or ()), self.trail_at(point)
        if sizes not in self.agreed:
            self.agreed[sizes] = trail.is_whole and base.difference(trail.record) is None
        return trail, self.agreed[sizes]

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
                return {name for name, points in alone.items() if any(map(conflict.is_at, points))}
            if not lengths:
                break
        return frozenset()

    def is_refuted(self, point: Mapping[str, Number]) -> bool:
        """Whether an op is known that cannot be done at ``point``."""
        sizes = self.plan.sizes(point)
        return sizes is not None and any(
            conflict.is_at({name: sizes[place] for name, place in places.items()})
            for places, conflict in self.conflicts
        )

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
            self.fix(symbol)
        self.chosen.update(counts_apart(self.counts(), self.chosen))

    def counts(self) -> list[Symbol]:
        """The symbols that are numbers of places read out of tensors."""
        return [s for s in self.plan.symbols if s.limit]

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

    def agrees(self, base: Trace, point: Point) -> bool:
        """Whether the program is the same at ``point``."""
        sizes = tuple(self.plan.sizes(point) or ())
        if sizes not in self.agreed and self.is_refuted(point):
            return False
        trail, is_alike = self.trial(base, point)
        if not is_alike and trail.is_at_op_of(base):
            self.at_op.add(sizes)
        return is_alike

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
        """Lets the sides of an image be padded to multiples of what ``forward`` asks the rest by, for torch, if the program
        is the same and can be solved whether they are padded or not; chooses values for them. Without it each rest is
        another program."""
        sides = [s for s in self.plan.symbols if s.role == "spatial"]
        units = graph.rests(base, {s.name for s in sides})
        if self.is_edged or self.plan.areas or not units or len(sides) != 2:
            return False
        self.is_edged = True
        self.before_area = dict(self.chosen)
        self.plan.areas = tuple(
            [Area(f"{name}r{unit}", Dim.symbol(name), unit) for name, unit in sorted(units) if unit > PATCHES[0]]
        )
        values = edges_alike(sides, PATCHES[0])
        if self.plan.areas and self.is_solved(base, values, are_all_free=True):
            self.chosen.update(values)
            return True
        self.drop_area()
        return False

    def drop_area(self) -> None:
        """Tells images apart by the residues of their sides again."""
        self.plan.drop_areas()
        self.chosen.update(self.before_area)

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

    def fix(self, symbol: Symbol) -> None:
        self.plan.fix(symbol.name)
        self.fixed.append(symbol.label)

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

    def fix_all(self) -> None:
        for symbol in list(self.plan.symbols):
            self.fix(symbol)

    # -- solving -------------------------------------------------------------------------------------------------------

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
        if not numbers and self.try_lengths(base, matters):
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

    def moved_alone(self, symbol: Symbol) -> Point:
        """A point that differs from the call in one of the values of a symbol; one that was traced, if there is one."""
        here = self.point()
        points = [{**here, symbol.name: value} for value in self.chosen[symbol.name]]
        return next((p for p in points if tuple(self.plan.sizes(p) or ()) in self.taken), points[0])

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
            point = self.plan.complete(point)
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
        names = {s.name: s for s in self.plan.symbols if s.role == "int" and not s.limit}
        rank_of = ranks(self.plan.ints()) if self.plan.compared else {}
        steps = {name: math.lcm(*(graph.moduli[n] for n in rank_of or (name,))) for name in names}
        least = {name: min(p[name] for p in graph.points) for name in names}
        here = self.point()
        small: dict[str, Number] = {}
        below: dict[str, Number] = {}
        for name, symbol in names.items():
            residue, step = int(symbol.value) % steps[name], steps[name]
            value = residue + step * (max(0, -(-(2 - residue) // step)) + rank_of.get(name, 0))
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

    def split_residues(self, graph: CapturedGraph, points: Sequence[Point], roles: Set[str]) -> None:
        for symbol in self.plan.symbols:
            if symbol.role in roles:
                graph.moduli[symbol.name] = math.lcm(modulus_of(symbol), graph.moduli[symbol.name])
        graph.classes.clear()
        graph.marks.clear()
        for point in points:
            graph.accept(point, None, of_copy=True)


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


def _in_one_list(symbols: Sequence[Symbol]) -> list[Symbol]:
    """The lengths among these symbols that are of tensors in one list, if there are several."""
    lists: dict[str, list[Symbol]] = {}
    for symbol in symbols:
        name, bracket, _ = symbol.label.partition("[")
        if bracket and symbol.role == "sequence":
            lists.setdefault(name, []).append(symbol)
    return max(lists.values(), key=len) if any(len(items) > 1 for items in lists.values()) else []


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
