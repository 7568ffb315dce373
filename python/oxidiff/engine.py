"""Captured variants of one module structure, their programs and their weights: between capture and the extension.

An :class:`Engine` holds the variants (:mod:`~oxidiff.variant`) of one structure of a module and finds, extends or makes the
one that a call needs. Nothing here is called twice for calls of the same key: the result, a
:class:`~oxidiff.ready.Ready`, is remembered by the dispatcher.

Threads: the dispatcher's lock is held in every method of :class:`Engine`; what it gives is run without.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from . import _native, background
from .adapters import EffectiveWeights
from .ambient import collection_paused, of_process
from .call import Leaf, classes_in, replace_leaves
from .capture import CHANGED, Call, CapturedGraph, Capturer, ChangedError, Dim, ElsewhereError, Known, WeightSlot
from .capture.lowering import LoweredGraph
from .capture.reads import Prelude, answered
from .capture.signature import ATTRIBUTES, Number, container_at, content_of, labels, memory_orders, without_orders
from .capture.stages import Stage
from .capture.weights import as_stored
from .device import Device, device_of
from .errors import CaptureError, Error, UnsupportedError, from_native
from .family import Captured, family_of
from .island import Island
from .lifted import Lifted
from .nan_guard import Notice
from .options import CompileOptions
from .ready import Binding, OwnNumber, Reads, Ready
from .staged import Staged
from .store import Artifact, Description, GraphStore, complain
from .tune import Budget
from .variant import Variant
from .watch import Structure

__all__ = ["BY_SIZE", "Engine"]

_MAX_FOREIGN = 32
"""How many graphs an engine keeps that are for other numbers in attributes than the module has: a graph where some are 0."""
_MAX_ADOPTED = 4
"""How many graphs of other states of a module a trace is compared with."""
_MAX_COPIED = 8 << 20
"""Bytes of tensors that are copied, rather than that a program is made for how they lie in memory."""
_MAX_ATTRIBUTED = 16
"""How many programs differ by attributes of tensors that are passed; further ones run eager."""
BY_SIZE = "sizes or numbers decide what forward computes: each makes another program of it"
"""Why calls of a further size or number have no program."""
_MAX_BY_SIZE = 3
"""So many sizes are captured each by itself before calls of others run in parts, if they can."""
_MAX_NESTED = 32
"""How many lengths of the lists and dictionaries that are passed have programs: one that grows at each call is never met
again."""


_Found = tuple[Variant | Staged, Call, list[Prelude]]
"""What stands for a call; the call as that takes it; and the ways to what ``forward`` reads out of tensors."""


class Engine:
    """The variants of one structure of a module.

    Args:
        module: The module.
        forward: What to capture: the module's ``forward``, without hooks around it.
        options: How to compile.
        structure: The structure; replaced by the caller whenever the module is looked at anew.
        effective: The weights of the module's LoRA layers.
        budget: What tuning may take.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        options: CompileOptions,
        structure: Structure,
        effective: EffectiveWeights,
        budget: Budget,
    ) -> None:
        self.module = module
        self.options = options
        self.structure = structure
        self.variants: list[Variant] = []
        self._staged: list[Staged] = []
        self.device: Device | None = None
        """Where it runs; ``None`` for the CPU."""
        self._at = torch.device("cpu")
        self.asked: tuple[Callable[[], Any], ...] = ()
        """Says how modes of torch are that the code asks for, once something is prepared."""
        self.captures = 0
        self.adoptions = 0
        """How often a graph of another state of the module was found to be right for this one."""
        self.tune_s = 0.0
        self._budget = budget
        self.others: Sequence[weakref.ref[Engine]] = ()
        """Those of other states of the module, the last one first."""
        self.before: Engine | None = None
        """That of the same state, but for what is outside of the module, until something is captured."""
        self.store = GraphStore(module, forward, options)
        self._held: list[Captured] = []
        self._held_at: dict[int, tuple[int, Tensor]] = {}
        self._attributed = 0
        """Captures of calls with tensors that have attributes."""
        self._nested: defaultdict[Set[Any], set[int]] = defaultdict(set)
        """How many items were in lists and dictionaries of the calls that were captured, by what these were."""
        self._passed: dict[Any, tuple[list[Number], set[int]]] = {}
        """Of each structure of calls, the numbers of the first that was captured, and which of them were others since."""
        self._stored = _Stored()
        """By id of a tensor that a graph holds, its place among those in attributes; -1 if it is elsewhere. Also the tensor,
        so that no id is used twice."""
        self._effective = effective
        # Ids of tensors that were written even if torch did not count it, and a stamp from before the last of it was seen:
        # for what is bound later.
        self._written: tuple[Set[int], int] = frozenset(), 0
        self._family = family_of(structure, options)
        self._capturer = Capturer(module, dynamic=options.dynamic)
        # The hooks of the module itself are run around the program, not captured into it.
        self._capturer.module = forward
        self._notice = Notice("a piece of a module" if isinstance(module, Island) else type(module).__name__)
        self.pinned: set[int] = set()
        """Indices of lifted floats that turned out to be constants of a program."""

    def _lift(self) -> None:
        """Makes what the module reaches, and numbers there that are arguments, known to what captures and what stores."""
        structure = self.structure
        lifted = Lifted(self.module, self._capturer.module, structure) if structure.inputs else None
        self.store.inputs = () if lifted is None else lifted.places
        self._capturer.lifted = lifted
        self.store.root = self._capturer.whole = structure.root

    def _note_pinned(self, graph: CapturedGraph) -> None:
        inputs = self.structure.inputs
        forms = zip(inputs, self._kept(graph), strict=True)
        self.pinned.update(i for i, form in forms if not isinstance(form, Dim) and form != 0)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Leaf],
        confirm: Callable[[bool], None],
        runs_in_parts: Callable[[], bool],
    ) -> Ready:
        """Makes a call ready: finds the variant that is valid for it, or captures and compiles one.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            leaves: The leaves of both.
            confirm: Raises an exception if the module is no longer what the structure says; a graph is kept only then. It is
                told whether the graph holds tensors that are none of the module's.
            runs_in_parts: Whether the module can run in Python instead, with submodules that are compiled.

        Raises:
            CaptureError, UnsupportedError: Why no program can stand for this call.
            ElsewhereError: It is to be captured in the thread of a call.
            TypeError: The arguments do not fit the signature.
        """
        self._lift()
        self._look_outside(classes_in(self._capturer.binder.bind(args, kwargs)))
        if self.asks_process and background.is_here():
            raise ElsewhereError("forward asks for modes or variables that are as they should be in calls alone")
        # Every leaf an object of its own, so that it can be found again where the capture sorted it to.
        probes = [leaf.detach() if isinstance(leaf, Tensor) else OwnNumber.of(leaf) for leaf in leaves]
        call = self._capturer.call(*replace_leaves(args, kwargs, probes))
        places = {id(probe): i for i, probe in enumerate(probes)}
        # A default of the signature is no leaf: it keeps its value.
        tensors = [places.get(id(t), t) for t in call.tensors]
        numbers = [places.get(id(n)) for n in call.numbers]
        call = self._capturer.call(args, kwargs)
        self._place(call.tensors)
        variant, call, preludes = self._variant(call, confirm, runs_in_parts)
        self._note_pinned(variant.graph)
        point = variant.graph.plan.read(call.sizes)
        assert point is not None, "the variant was chosen because it serves these sizes"
        with self._family.lock:
            known, has_news = len(variant.rows), False
            for part in variant.variants if isinstance(variant, Staged) else [variant]:
                if point.keys() >= set(part.lowered.symbols) and not part.is_wide:
                    sizes = part.lowered.sizes(point)
                    tuner = part.captured.tuner
                    name = type(self.module).__name__
                    self.tune_s += tuner.tune(part.program, sizes, name, self._budget, part.tensors)
                    has_news, tuner.has_news = has_news or tuner.has_news, False
            # A file of the user's also has what the cache, or a live module of the family, knew of it before.
            is_more = self.options.graph_file is not None and len(variant.rows) > known
            if has_news or is_more or not self.store.has_filed(variant.graph):
                self.store.remember(self.whole())
        count = len(leaves)
        binding = Binding(variant, point, call, tensors, numbers, count, self._at)
        ready = binding.ready()
        if preludes:
            inputs = zip(variant.graph.inputs, binding.tensors, strict=True)
            places = {item.value: at for item, at in inputs}
            ready.reads = Reads(preludes, call.answers, places, binding.defaults, count, ready.free_numbers)
        asked = zip(binding.tensors, (item.asked for item in variant.graph.inputs), strict=True)
        ready.asked = [(at, what) for at, what in asked if what and at < count]
        setting = [(path, key) for path, key, _ in ready.writes if path[0] == ATTRIBUTES]
        bind = self._capturer.binder.bind
        ready.bind = functools.partial(self._bind, setting) if setting else bind
        return ready

    def _bind(
        self, setting: Sequence[tuple[Any, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a call by name, and the attributes that its program sets: the ways to these and their names.

        Raises:
            CaptureError: There is no tensor there, as there was when it was captured.
        """
        bound = self._capturer.binder.bind(args, kwargs)
        modules = self.structure.modules
        tables = {path[1]: modules[path[1]].__dict__ for path, _ in setting if path[1] in modules}
        # No dictionary, which would be one that is passed.
        bound[ATTRIBUTES] = types.MappingProxyType(tables)
        for path, key in setting:
            if path[1] not in tables or not isinstance(container_at(bound, path).get(key), Tensor):
                raise CaptureError(f"the module no longer holds a tensor in its attribute {key}", module=path[1])
        return bound

    def _place(self, tensors: Sequence[Tensor]) -> None:
        """Finds out where this runs: where the module is, else where the tensors of the call are.

        Raises:
            UnsupportedError: Nowhere, or the tensors are somewhere else.
        """
        devices = [tensor.device for tensor in (*self.structure.tensors[:1], *tensors)]
        sized = [tensor.device for tensor in (*self.structure.tensors[:1], *tensors) if tensor.dim()]
        self._at = (sized or devices or [torch.device("cpu")])[0]
        self.device = device_of(self._at)
        for tensor in tensors:
            # As in eager, a tensor without dimensions may be on the CPU.
            if tensor.device != self._at and (tensor.dim() or tensor.device.type != "cpu"):
                raise UnsupportedError(f"an argument is on {tensor.device}, the module on {self._at}")

    @property
    def asks_process(self) -> bool:
        """Whether the code is known to ask for modes of the whole process, or for variables of its thread or context."""
        return self._family.is_of_callers or bool(of_process(self.asked))

    def _look_outside(self, passed: Set[type]) -> None:
        """Notes what the code finds outside of the module and in classes of objects that are passed to it, and which modes
        it asks for: these are part of calls.

        Raises:
            ChangedError: It finds something else already than what was captured.
        """
        with self._family.lock, collection_paused():
            if self._family.surroundings is None or not passed <= self._family.passed:
                passed |= self._family.passed
                noted = self.store.surroundings(passed)
                if self._family.is_outdated():
                    raise ChangedError(CHANGED)
                self._family.passed = passed
                self._family.outer, self._family.asked = noted.outer, noted.asked
                self._family.is_of_callers = noted.is_of_callers
                self._family.surroundings = noted.found
            self._capturer.outer = self._family.outer
            self.asked = self._capturer.asked = self._family.asked

    def _variant(self, call: Call, confirm: Callable[[bool], None], runs_in_parts: Callable[[], bool]) -> _Found:
        """The variant that is valid for a call, captured and compiled if there is none."""
        with self._family.lock, collection_paused():
            found = self._known(call)
            if found is not None:
                return found
            for graph, body in self.store.take(call):
                start = time.perf_counter()
                try:
                    if isinstance(body, LoweredGraph):
                        self._add(self._loaded(graph, body), is_own=False)
                    else:
                        parts = [None if stage.part is None else self._loaded(*stage.part) for stage in body]
                        self._add_stages(graph, body, parts, is_own=False)
                except (Error, _native.NativeError) as error:
                    complain(f"a stored graph is not used: {from_native(error)}")
                self.store.load_s += time.perf_counter() - start
            found = self._known(call)
            if found is None:
                # What is young from here on was made by a trace, see `Before.forget`.
                gc.collect(0)
                self._capturer.varied = self._varied(call)
                found = self._extended(call) or self._relaid(call, confirm) or self._adopted(call, confirm)
                if found is None and self._is_by_size(call) and runs_in_parts():
                    raise CaptureError(BY_SIZE)
                found = found or self._answered(self._capture(call, confirm), call)
                self.before = None
                self.store.remember(self.whole())
            return found

    def _loaded(self, graph: CapturedGraph, lowered: LoweredGraph) -> Captured:
        captured = Captured(graph, lowered, self.options, self.device)
        captured.tuner.is_given = bool(self._held)
        captured.tuner.given = self.store.rows
        hash = captured.program.hash
        captured.tuner.tuned = {item: None for item in self.store.tuned if item[0] == hash}
        return captured

    def _held_floats(self, call: Call) -> Set[str]:
        """Labels of the floats of a call that are the same in all that were captured. To its pieces Dynamo passes what is in
        attributes (each epsilon, each probability of a dropout), which would be dozens of symbols: a float becomes an input
        when it first changes."""
        if not isinstance(self.module, Island):
            return frozenset()
        first, changed = self._passed.setdefault(call.key, (list(call.numbers), set()))
        changed.update(i for i, (a, b) in enumerate(zip(first, call.numbers, strict=True)) if a != b)
        names = labels(call.bound)[len(call.tensors) :]
        return {name for i, name in enumerate(names) if type(first[i]) is float and i not in changed}

    def _capture(self, call: Call, confirm: Callable[[bool], None]) -> Variant | Staged:
        if any(isinstance(part, tuple) and part[:1] == ("attributes",) for part in call.key):
            self._attributed += 1
            if self._attributed > _MAX_ATTRIBUTED:
                raise UnsupportedError(
                    "attributes of the tensors that are passed make another program nearly each time"
                )
        content, items = content_of(call.key)
        nested = self._nested[content]
        if items not in nested and len(nested) >= _MAX_NESTED:
            raise UnsupportedError(
                "lists or dictionaries that are passed are of another length nearly each time, which makes another program"
            )
        nested.add(items)
        self.captures += 1
        self._capturer.held = self._held_floats(call)
        known: Known = {}
        try:
            graph, lowered = self._capturer.lowered(call, _native.GraphBuilder, known)
            confirm(bool(graph.externs))
            captured = Captured(graph, lowered, self.options, self.device)
        except UnsupportedError:
            if self.options.strict:
                raise
            return self._stage(call, confirm, known)
        return self._add(captured, captured.is_new)

    def _varied(self, call: Call) -> Set[int]:
        """Places of sizes that are constants of graphs of calls like this one, and others in it: they are free."""
        graphs = [one.graph for one in self.whole() if one.graph.call_key == call.key]
        # Behind the sizes of tensors that are passed are those of what is read out of these, if the graph has that.
        sizes = call.sizes[: sum(tensor.dim() for tensor in call.tensors)]
        pairs = (enumerate(zip(graph.plan.forms, sizes, strict=False)) for graph in graphs)
        return {i for each in pairs for i, (form, size) in each if not isinstance(form, Dim) and form != size}

    def _is_by_size(self, call: Call) -> bool:
        """Whether calls like this one were captured at some sizes, each with constants that are others in this call."""
        graphs = (one.graph for one in self.whole() if one.graph.call_key == call.key and not one.graph.reads)
        return sum(graph.plan.read(call.sizes) is None for graph in graphs) >= _MAX_BY_SIZE

    def _stage(self, call: Call, confirm: Callable[[bool], None], known: Known) -> Staged:
        """Compiles what the compiler knows of a call's graph."""
        graph, stages = self._capturer.staged(call, _native.GraphBuilder, known)
        confirm(bool(graph.externs))
        parts = [None if stage.part is None else Captured(*stage.part, self.options, self.device) for stage in stages]
        return self._add_stages(graph, stages, parts, is_own=True)

    def _add_stages(
        self, graph: CapturedGraph, stages: Sequence[Stage], parts: Sequence[Captured | None], is_own: bool
    ) -> Staged:
        variants = [None if part is None else Variant(part, is_own and part.is_new, self._notice) for part in parts]
        staged = Staged(graph, stages, variants, None if self.device is None else self._at)
        for variant in staged.variants:
            variant.bind(self._weights(variant), *self._written)
        staged.bind(self._fetch)
        self._forget()
        self.variants += staged.variants
        self._staged.append(staged)
        return staged

    def whole(self) -> list[Variant | Staged]:
        """What stands for whole calls, each graph once."""
        parts = {id(part) for staged in self._staged for part in staged.variants}
        every: dict[int, Variant | Staged] = {}
        for variant in self.variants:
            if id(variant) not in parts:
                every.setdefault(id(variant.graph), variant)
        for staged in self._staged:
            every.setdefault(id(staged.graph), staged)
        return list(every.values())

    def _rivals(self, call: Call) -> list[Captured]:
        every = dict.fromkeys((*(variant.captured for variant in self.variants), *self._family.captured))
        rivals = [captured for captured in every if captured.graph.call_key == call.key]
        return sorted(rivals, key=lambda captured: not captured.is_current)

    def _current(self, captured: Captured) -> Captured:
        """The same graph compiled for what torch allows now."""
        if captured.is_current:
            return captured
        return Captured(captured.graph, captured.lowered, self.options, self.device)

    def _answered(self, variant: Variant | Staged, call: Call) -> _Found:
        """What a call is to a graph that was captured from it."""
        found = answered(variant.graph, call, self._at)
        if found is None:
            raise CaptureError("what forward reads out of tensors is another thing each time")
        return variant, *found

    def _known(self, call: Call) -> _Found | None:
        """The variant of a graph of the family that is known to be right for a call."""
        for staged in self._rival_stages(call):
            found = self._accepted(staged.graph, call)
            if found is not None:
                return staged, *found
        for captured in self._rivals(call):
            found = self._accepted(captured.graph, call)
            if found is not None:
                return self._variant_of(self._current(captured)), *found
        return None

    def _accepted(self, graph: CapturedGraph, call: Call) -> tuple[Call, list[Prelude]] | None:
        """What a call is to a graph, if that is known to be right for it."""
        found = answered(graph, call, self._at)
        point = None if found is None else graph.plan.read(found[0].sizes)
        return found if point is not None and graph.accepts(point) else None

    def knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a graph is known to be right for a call; false where another thread would have to be waited for."""
        self._lift()
        if not self._family.lock.acquire(blocking=False):
            return False
        try:
            call = self._capturer.call(args, kwargs)
            graphs = [staged.graph for staged in self._rival_stages(call)]
            graphs += [captured.graph for captured in self._rivals(call)]
            return any(self._accepted(graph, call) is not None for graph in graphs)
        except (Error, TypeError):
            return False
        finally:
            self._family.lock.release()

    def _rival_stages(self, call: Call) -> list[Staged]:
        return [
            staged
            for staged in self._staged
            if staged.graph.call_key == call.key and all(part.captured.is_current for part in staged.variants)
        ]

    def _extended(self, call: Call) -> _Found | None:
        """The variant of a graph of the family that a trace shows to be right for a call too."""
        traced: dict[Any, Any] = {}
        for staged in self._rival_stages(call):
            found = answered(staged.graph, call, self._at)
            if found is not None and self._capturer.extend(staged.graph, found[0], traced):
                return staged, *found
        for captured in self._rivals(call):
            found = answered(captured.graph, call, self._at)
            if found is not None and self._capturer.extend(captured.graph, found[0], traced):
                return self._variant_of(self._current(captured)), *found
        return None

    def _relaid(self, call: Call, confirm: Callable[[bool], None]) -> _Found | None:
        """A graph of calls in which small tensors lie otherwise in memory, if traces show that it gives the same for this
        one, results in the same orders: its program is given copies."""
        bare, orders = without_orders(call.key), memory_orders(call.key)
        traced: dict[Any, Any] = {}
        for captured in dict.fromkeys((*(variant.captured for variant in self.variants), *self._family.captured)):
            graph = captured.graph
            is_plain = not graph.reads and captured.is_current and captured.device == self.device
            if not is_plain or without_orders(graph.key) != bare or graph.key == call.key:
                continue
            pairs = zip(call.tensors, orders, memory_orders(graph.key), strict=True)
            if sum(tensor.nbytes for tensor, order, other in pairs if order != other) > _MAX_COPIED:
                continue
            adopted = self._capturer.adopt(dataclasses.replace(graph, key=call.key), call, traced, is_relaid=True)
            if adopted is not None:
                confirm(bool(graph.externs))
                self.adoptions += 1
                return self._answered(self._add(captured.of(adopted), is_own=False), call)
        return None

    def _adopted(self, call: Call, confirm: Callable[[bool], None]) -> _Found | None:
        """A graph of another state of the module that a trace shows to be right for a call in this one too: what changed
        (the number of a step, say) may matter to nothing, or only to which way ``forward`` takes."""
        if isinstance(self.module, Island):
            return None
        engines = [self.before, *(one() for one in self.others)]
        every: dict[str, Captured] = {}
        for captured in (v.captured for engine in engines if engine is not None for v in engine.variants):
            graph = captured.graph
            is_plain = graph.key == call.key and not graph.reads and not graph.externs and captured.is_shareable
            if is_plain and captured.is_current and captured.device == self.device:
                every.setdefault(captured.program.hash, captured)
        traced: dict[Any, Any] = {}
        for captured in list(every.values())[:_MAX_ADOPTED]:
            adopted = self._capturer.adopt(captured.graph, call, traced)
            if adopted is not None:
                confirm(False)
                self.adoptions += 1
                return self._answered(self._add(captured.of(adopted), is_own=False), call)
        return None

    def _variant_of(self, captured: Captured) -> Variant:
        for variant in self.variants:
            if variant.captured is captured:
                return variant
        return self._add(captured, captured.is_new and captured not in self._family.captured)

    def _add(self, captured: Captured, is_own: bool) -> Variant:
        variant = Variant(captured, is_own, self._notice)
        variant.bind(self._weights(variant), *self._written)
        self._forget()
        self.variants.append(variant)
        if captured.is_shareable and captured not in self._family.captured:
            self._family.captured.append(captured)
        return variant

    def _forget(self) -> None:
        """Drops the oldest graphs that are for other numbers in attributes, above a bound; no ready call runs them."""
        if not self.structure.inputs:
            return
        foreign = [item for item in self.whole() if not self._serves(item.graph)]
        for item in foreign[: max(0, len(foreign) - _MAX_FOREIGN)]:
            parts = item.variants if isinstance(item, Staged) else [item]
            self.variants = [variant for variant in self.variants if variant not in parts]
            self._staged = [staged for staged in self._staged if staged is not item]
            gone = {id(part.captured) for part in parts}
            self._family.captured[:] = [one for one in self._family.captured if id(one) not in gone]
            self.store.forget(item.graph)

    def _serves(self, graph: CapturedGraph) -> bool:
        """Whether a graph may be right for the numbers that are in attributes now."""
        for form, number in zip(self._kept(graph), self.structure.numbers, strict=True):
            if not isinstance(form, Dim):
                if form != number:
                    return False
            elif number == 0 and (form.as_symbol(), (True, False, False)) not in graph.marks:
                return False
        return True

    def _kept(self, graph: CapturedGraph) -> Sequence[Dim | Number]:
        """What the numbers in attributes are in a graph."""
        return graph.plan.forms[len(graph.plan.forms) - len(self.structure.inputs) :]

    def description(self) -> Description:
        """What the graphs of the module depend on; see :meth:`GraphStore.description`."""
        self._lift()
        return self.store.description()

    def artifact(self, compiled: Iterable[Variant | Staged]) -> Artifact:
        """What is compiled of modules like this one, to be saved; see :meth:`GraphStore.artifact`."""
        self._lift()
        return self.store.artifact(list(compiled))

    def load(self, artifact: Artifact) -> None:
        """Compiles the graphs of an artifact of this module, for the calls to come.

        Raises:
            Error: A graph is malformed or does not compile. Nothing is loaded then.
        """
        start = time.perf_counter()
        self._place(())
        self._lift()
        loaded = []
        for stored in artifact.graphs:
            # Compiled to see that it can be: the program is found again when a call asks for it.
            graph, body = stored.decode()
            parts = [(graph, body)] if isinstance(body, LoweredGraph) else [s.part for s in body if s.part is not None]
            loaded += [Captured(*part, self.options, self.device) for part in parts]
        self._held = loaded
        self.store.add(artifact)
        self.store.load_s += time.perf_counter() - start

    def _weights(self, variant: Variant) -> list[Tensor]:
        return list(map(self._stored.of, self._weights_held(variant)))

    def _weights_held(self, variant: Variant) -> list[Tensor]:
        slots, structure, known = variant.lowered.weights, self.structure, variant.captured.places
        if structure.layers:
            return [self._fetch(slot) for slot in slots]
        held = structure.tensors
        if self._at in known:
            pairs = zip(known[self._at], slots, strict=True)
            return [self._fetch(slot) if place is None else held[place] for place, slot in pairs]
        tensors = [self._fetch(slot) for slot in slots]
        # The same for every module of the family: names of tensors, devices and which are one belong to the structure.
        places = {id(tensor): place for place, tensor in enumerate(held)}
        known[self._at] = [places.get(id(tensor)) for tensor in tensors]
        return tensors

    def _fetch(self, slot: WeightSlot) -> Tensor:
        structure = self.structure
        layer = structure.layers.get(slot.module) if structure.layers and slot.attribute == "weight" else None
        try:
            if layer is not None:
                tensor = self._effective.weight(slot.module, layer)
            elif slot.tensor is not None:
                tensor = self._held_now(slot.tensor)
            else:
                tensor = slot.fetch(self.module, structure.modules)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise CaptureError(f"the module no longer holds {slot.name}: {error}", module=slot.module) from error
        if tensor.device != self._at:
            reason = f"its weights are on several devices, {slot.name} on {tensor.device} and others on {self._at}"
            raise UnsupportedError(reason, module=slot.module)
        return tensor

    def _held_now(self, captured: Tensor) -> Tensor:
        """What is now where a tensor was that was captured as it is: an object in an attribute may hold another one."""
        held = self.structure.attribute_tensors
        if id(captured) not in self._held_at:
            at = next((i for i, one in enumerate(held) if one is captured), -1)
            self._held_at[id(captured)] = at, captured
        at, _ = self._held_at[id(captured)]
        return captured if at < 0 else held[at]

    def watched(self) -> list[Tensor]:
        """The tensors that variants are bound to and that are neither parameters nor buffers."""
        bound = [
            tensor
            for variant in self.variants
            for slot, tensor in zip(variant.lowered.weights, variant.tensors, strict=False)
            if slot.kind not in ("parameter", "buffer")
        ]
        return [*bound, *self._stored.tensors()]

    @property
    def surroundings(self) -> _native.Surroundings | None:
        """What the code finds outside of the module, once something is captured."""
        return self._family.surroundings

    def written_outside(self) -> list[str]:
        """Names in files and classes that the code may write."""
        return [name for _, _, name in self._family.outer.names]

    def is_outdated(self) -> bool:
        """Whether the code finds something else now than what was captured."""
        return self._family.is_outdated()

    def tensors(self) -> list[Tensor]:
        """Every tensor that a variant is bound to, once."""
        return list({id(t): t for variant in self.variants for t in variant.tensors}.values())

    def weight_bytes(self) -> int:
        """Memory of these tensors; shared memory once."""
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in self.tensors())}
        return sum(storages.values())

    def refresh(self, suspects: Set[int] = frozenset()) -> bool:
        """Binds the weights as they are now; true if something was bound anew or is derived again.

        Args:
            suspects: See :meth:`Variant.bind`.

        Raises:
            CaptureError: The module does not hold a tensor that a graph needs.
        """
        since = _native.stamp()
        device = self.device if self.structure.layers else None
        if device is not None:
            # Effective weights of LoRA layers are made on this stream and read on others, also while they are replaced.
            device.synchronize()
        self._effective.forget_written(suspects)
        weights = [self._weights(variant) for variant in self.variants]
        suspects = suspects | self._stored.among(suspects)
        if suspects:
            self._written = self._written[0] | suspects, since
        if device is not None:
            device.synchronize()
        changes = [v.bind(tensors, suspects, since) for v, tensors in zip(self.variants, weights, strict=True)]
        for staged in self._staged:
            staged.bind(self._fetch)
        self._stored.keep({id(tensor) for tensors in weights for tensor in tensors})
        self._effective.keep(self.structure.layers)
        return any(changes)

    def release(self) -> None:
        """Lets go of the module's tensors."""
        self.store.inputs, self._capturer.lifted = (), None
        self.store.root = self._capturer.whole = self.module
        self._stored = _Stored()
        for variant in self.variants:
            variant.release()
        for staged in self._staged:
            staged.release()

    def unload(self) -> None:
        """Drops arenas and derived weights."""
        for variant in self.variants:
            variant.unload()


class _Stored:
    """Weights of types that programs do not have, and the same memory as what programs are bound to: pairs of real numbers
    for complex ones, bytes for floats of 8 bits."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """What a program is bound to for a weight: the same object for as long as the weight's memory is the same."""
        fresh = as_stored(tensor)
        if fresh is tensor:
            return tensor
        known = self._known.get(id(tensor), (None, fresh))
        if known[0] is not tensor or not known[1].is_set_to(fresh):
            known = self._known[id(tensor)] = tensor, fresh
        return known[1]

    def tensors(self) -> list[Tensor]:
        """Those weights."""
        return [tensor for tensor, _ in self._known.values()]

    def keep(self, bound: Set[int]) -> None:
        """Lets go of weights that programs are bound to no more: all but those of these ids are stored as."""
        self._known = {key: pair for key, pair in self._known.items() if id(pair[1]) in bound}

    def among(self, ids: Set[int]) -> Set[int]:
        """The ids of what programs are bound to for those of them that are among these."""
        return {id(view) for tensor, view in self._known.values() if id(tensor) in ids}
