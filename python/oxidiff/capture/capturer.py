"""Capturing the calls of a module: as one graph, lowered for the compiler, or cut at ops that it does not know.

What one capture does is in :mod:`session`. Here is what is captured, and whether a graph of before serves another call, or
another state of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..ambient import of_process
from ..autocast import without_autocast
from ..errors import CaptureError
from .failures import ChangedError
from .following import following
from .graph import CapturedGraph
from .lowering import LoweredGraph, SizeDependentError, lower
from .record import Trace
from .session import Session
from .signature import Binder, Call
from .stages import Stage, cut
from .trials import Lifted
from .writes import Outer

if TYPE_CHECKING:
    from .._native import GraphBuilder

__all__ = ["Capturer", "Known", "capture"]

Known = dict[frozenset[str], CapturedGraph]
"""Graphs of a call, by the names of the sizes that they are to have as constants."""
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


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


def _capturing(method: F) -> F:
    """What takes traces: in no mode of its caller other than what a trace is told of, and with what traces need in its
    place from one to the next."""
    # What is made in inference mode has no version counter, which views below autograd ask for.
    return torch.inference_mode(False)(without_autocast(following()(method)))


class Capturer:
    """Captures the calls of one module. Cheap to make; holds no tensors between captures.

    Attributes:
        module: What is traced: the module, or a function of it.
        root: The module.
        whole: The module that has the root and whatever else its attributes hold, by whose paths weights are named.
        lifted: Numbers in its attributes that are arguments of its graphs, after those that are passed.
        held: Labels of floats that are passed and are constants of the next graph, as they are of it in all calls so far.
        varied: Places of sizes of the next call that are constants of graphs, and others in it.
        outer: What its code may write outside of it.
        asked: Says how modes of torch are that its code asks for.
        traces: How many traces were taken.
    """

    def __init__(self, module: Callable[..., Any], *, dynamic: bool = True) -> None:
        self.module = module
        self.lifted: Lifted | None = None
        self.held: Set[str] = frozenset()
        self.varied: Set[int] = frozenset()
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

    @_capturing
    def capture(self, call: Call) -> CapturedGraph:
        """Captures the program of ``call``; see :func:`capture`."""
        return self._captured(call)

    @_capturing
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

    @_capturing
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
        session = Session(self, call, fixed)
        graph = session.run()
        if session.is_sized and graph.fixed:
            other = Session(self, call, fixed, asks_sizes=True).run()
            if len(other.fixed) < len(graph.fixed):
                return other
        return graph

    @_capturing
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
        session = Session(self, call)
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

    @_capturing
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
        session = Session(self, call, asks_sizes=graph.asks_sizes)
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


_MOVES = 2
"""So many values of numbers in attributes are tried before a graph of another state of a module is taken over."""
_RELAYS = 4
"""So many sizes are tried before a graph serves calls whose tensors lie otherwise in memory."""
