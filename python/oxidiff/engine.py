"""Captured variants of one module structure, their programs and their weights: between capture and the extension.

A :class:`Variant` is one captured graph, compiled and bound to the module's tensors. An :class:`Engine` holds the
variants of one structure of a module and finds, extends or makes the one that a call needs. Nothing here is called
twice for calls of the same key: the result, a :class:`Ready`, is remembered by the dispatcher.

Threads: the dispatcher's lock is held in every method of :class:`Engine`; :attr:`Ready.run` needs none.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import operator
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from . import _native, background
from .adapters import EffectiveWeights
from .ambient import collection_paused, of_process
from .call import Leaf, classes_in, replace_leaves
from .capture import (
    CHANGED,
    Call,
    CapturedGraph,
    Capturer,
    ChangedError,
    Dim,
    ElsewhereError,
    Known,
    WeightSlot,
    is_tracing,
)
from .capture.guards import expression_text
from .capture.lowering import LoweredGraph
from .capture.reads import Prelude, answered
from .capture.record import GRADIENTS, MEMORY, STRIDES
from .capture.signature import (
    ATTRIBUTES,
    Answer,
    Place,
    container_at,
    content_of,
    labels,
    memory_orders,
    without_orders,
)
from .capture.stages import Stage
from .capture.weights import as_stored
from .device import Device, device_of
from .errors import CaptureError, Error, UnsupportedError, from_native
from .family import Captured, family_of
from .island import Island
from .lifted import Lifted
from .nan_guard import Guarded, Notice
from .options import CompileOptions
from .outputs import builder
from .staged import Staged, passed_as
from .store import Artifact, Body, Description, GraphStore, Row, Tuned, complain
from .tune import Budget
from .watch import Structure

__all__ = ["BY_SIZE", "Engine", "Part", "Ready", "Variant", "is_tracing"]

Number = int | float

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


Part = tuple["Variant", _native.Executable | Guarded, list[int]]
"""A program of a call, with the weights that it is bound to, and the sizes at which it runs."""


class Ready:
    """A call of one key, ready to run.

    Attributes:
        run: Takes the call's leaves and gives what the module would return.
        profile: Takes the call's leaves and gives a timed run's steps.
        parts: Takes the call's leaves and gives what runs it, each with the sizes at which it does. The programs with their
            weights are those of the call, whatever other threads let go of meanwhile.
        free_numbers: Indices of leaves that are numbers and arguments of the program, not part of it.
        problems: Why some of its ops run in eager PyTorch, once per kind of op.
        writes: Where it writes into lists and dictionaries that it is given, and which attributes it sets; :attr:`run` then
            gives a pair of what the module would return and what to write there.
        bind: Takes the call's arguments and gives them by parameter name, beside what has these attributes.
        reads: What ``forward`` reads out of tensors; the answers are further leaves, behind those of the call.
        asked: Leaves of which ``forward`` asks what programs are not told, with what that is: see :attr:`Trace.asked`.
    """

    __slots__ = ("asked", "bind", "free_numbers", "parts", "problems", "profile", "reads", "run", "writes")

    def __init__(
        self,
        run: Callable[[list[Leaf]], Any],
        profile: Callable[[list[Leaf]], list[dict[str, Any]]],
        parts: Callable[[list[Leaf]], list[Part]],
        free_numbers: frozenset[int] = frozenset(),
        problems: Sequence[UnsupportedError] = (),
    ) -> None:
        self.problems = problems
        self.run = run
        self.profile = profile
        self.parts = parts
        self.free_numbers = free_numbers
        self.writes: tuple[Place, ...] = ()
        self.bind: Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]] = _no_binder
        self.reads: Reads | None = None
        self.asked: Sequence[tuple[int, int]] = ()

    def otherwise(self, leaves: Sequence[Leaf]) -> str | None:
        """Why these tensors make another program, where ``forward`` asks what they are like."""
        tensors = ((tensor, asked) for i, asked in self.asked if isinstance(tensor := leaves[i], Tensor))
        return next((reason for tensor, asked in tensors if (reason := _otherwise(tensor, asked)) is not None), None)

    def complete(self, leaves: list[Leaf]) -> list[Leaf]:
        """The leaves of a call and the answers to what ``forward`` reads."""
        return leaves if self.reads is None else [*leaves, *self.reads.answers_in(leaves)]


def _otherwise(tensor: Tensor, asked: int) -> str | None:
    """Why a tensor is not what a program was told that it is."""
    if asked & GRADIENTS and (tensor.requires_grad or not tensor.is_leaf):
        return "forward asks whether an argument requires gradients, and this one does; pass it detached"
    is_part = asked & MEMORY and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
    if is_part or (asked & STRIDES and not _is_dense(tensor)):
        return "forward asks how an argument lies in memory, and this one has gaps or is part of another; pass a copy of it"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps, in whatever order its dimensions are."""
    if tensor.is_contiguous():
        return True
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense = itertools.accumulate((size for _, size in steps), operator.mul, initial=1)
    return all(step == wanted for (step, _), wanted in zip(steps, dense, strict=False))


class Reads:
    """What a program reads out of the tensors of a call before it runs.

    Attributes:
        preludes: The ways to the answers, one after another.
        answers: Those of the call that this was made for.
        free: The numbers of those that are numbers and arguments of the program, not part of it.
    """

    def __init__(
        self,
        preludes: Sequence[Prelude],
        answers: Sequence[Answer],
        places: Mapping[int, int],
        defaults: Sequence[Leaf],
        first: int,
        free: Set[int],
    ) -> None:
        self.preludes = preludes
        self.answers = answers
        self.free = {place - first for place in free if place >= first}
        # Tensors that the signature has as defaults are found behind the leaves and the answers.
        behind = first + len(answers)
        self._places = [(value, at) for value, at in places.items() if at < first]
        self._defaults = {value: cast(Tensor, defaults[at - behind]) for value, at in places.items() if at >= behind}

    def begin(self, leaves: Sequence[Leaf]) -> dict[int, Tensor]:
        """The tensors of a call by value number, for :meth:`Prelude.run`."""
        return {**self._defaults, **{value: cast(Tensor, leaves[at]) for value, at in self._places}}

    def answers_in(self, leaves: Sequence[Leaf]) -> list[Answer]:
        """The answers of a call for which the program is right."""
        values = self.begin(leaves)
        return [prelude.run(values) for prelude in self.preludes]


def _no_binder(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """That of a call that writes into no argument."""
    return {}


class Variant:
    """One captured graph and, while the module has this structure, the module's weights bound to its program.

    Attributes:
        graph: The graph.
        lowered: The same for the compiler, and how to call what it is compiled to.
        is_own: Whether this module was the one that compiled it, from a graph that was not stored.
        notice: Tells that it goes on in f32, see ``nan_guard``.
    """

    def __init__(self, captured: Captured, is_own: bool, notice: Notice) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.lowered = captured.lowered
        self.is_own = is_own
        self._notice = notice
        self._executable: _native.Executable | Guarded | None = None
        self._tensors: list[Tensor] = []

    def bind(self, tensors: list[Tensor], suspects: Set[int] = frozenset(), since: int = 0) -> bool:
        """Binds weights.

        Args:
            tensors: One per weight slot.
            suspects: Ids of tensors that were written even if torch did not count it.
            since: A ``stamp`` from before that was seen.

        Returns:
            Whether anything was bound anew or will be derived again.

        Raises:
            ChangedError: They do not fit: another thread moved the module once it was looked at.
        """
        try:
            return self._bind(tensors, suspects, since)
        except _native.NativeError as error:
            found = from_native(error)
            raise (ChangedError(CHANGED) if type(found) is Error else found) from error

    def _bind(self, tensors: list[Tensor], suspects: Set[int], since: int) -> bool:
        is_new = self._executable is None
        if self._executable is None:
            if self.captured.may_overflow:
                self._executable = Guarded(self.captured, tensors, self._notice)
            else:
                self._executable = _native.Executable(self.captured.program, tensors)
            if suspects:
                # Another module may still hold what was derived from them before they were written.
                self._executable.set_weights(tensors, suspects, since)
        else:
            is_new = self._executable.set_weights(tensors, suspects, since)
        self._tensors = tensors
        return is_new

    def release(self) -> None:
        """Lets go of the module's tensors and of what was derived from them."""
        self._executable = None
        self._tensors = []

    def unload(self) -> None:
        """Drops specializations, derived weights and idle workspace."""
        executable = self._executable
        if executable is not None:
            executable.unload()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors it is bound to, by slot."""
        return self._tensors

    @property
    def program(self) -> _native.Program:
        """The compiled program, possibly shared with other modules."""
        return self._executable.program if isinstance(self._executable, Guarded) else self.captured.program

    @property
    def is_wide(self) -> bool:
        """Whether f16 overflowed, so that it runs in f32; see ``nan_guard``."""
        return isinstance(self._executable, Guarded) and self._executable.is_wide

    @property
    def executable(self) -> _native.Executable | Guarded:
        """The program with its weights."""
        executable = self._executable
        assert executable is not None, "a variant is bound before it runs"
        return executable

    @property
    def body(self) -> Body:
        """What is stored of it beside the graph."""
        return self.lowered

    @property
    def rows(self) -> list[Row]:
        """The measurements behind its tuning choices."""
        return list(self.captured.tuner.rows.values())

    @property
    def tuned(self) -> list[Tuned]:
        """Where its program was tuned."""
        return list(self.captured.tuner.tuned)

    def stats(self) -> dict[str, Any]:
        """See ``_native.Executable.stats``; empty while nothing is bound."""
        executable = self._executable
        return {} if executable is None else executable.stats()

    def explain(self) -> dict[str, Any]:
        """What it was captured from and compiled to."""
        graph = self.graph
        return {
            "inputs": [f"{item.label}: {_type_text(graph, item.value)}" for item in graph.inputs],
            "outputs": [_type_text(graph, leaf.value) for leaf in graph.outputs.leaves if leaf.value is not None],
            "symbols": {
                **{symbol.name: f"{symbol.label} ({symbol.role})" for symbol in graph.plan.symbols},
                **{p.name: f"{p.of} in units of {p.unit}, rounded up" for p in graph.plan.padded() if p.is_named()},
                **{c.name: str(c) for c in graph.plan.counted},
                **{c.name: expression_text(c.expression) for c in graph.plan.computed},
            },
            "fixed": list(graph.fixed),
            "classes": len(graph.classes),
            "hash": self.program.hash,
            "in_float32": self.is_wide,
            "choices": [_choice_text(row) for row in self.rows],
            **self.program.explain(),
        }


def _choice_text(row: Row) -> str:
    op, bucket, _, _, choice, seconds, default_seconds, *_ = row
    return f"{op}, {bucket}: {choice}, {seconds * 1e3:.3g} ms, {default_seconds * 1e3:.3g} ms untuned"


def _type_text(graph: CapturedGraph, value: int) -> str:
    found = graph.values[value]
    return f"{str(found.dtype).removeprefix('torch.')}[{', '.join(map(str, found.shape))}]"


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
        probes = [leaf.detach() if isinstance(leaf, Tensor) else _Number.of(leaf) for leaf in leaves]
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
                    self.tune_s += tuner.tune(part.program, sizes, type(self.module).__name__, self._budget)
                    has_news, tuner.has_news = has_news or tuner.has_news, False
            # A file of the user's also has what the cache knew of it before.
            if has_news or (self.options.graph_file is not None and len(variant.rows) > known):
                self.store.remember(self.whole())
        count = len(leaves)
        binding = _Binding(variant, point, call, tensors, numbers, count, self._at)
        ready = binding.ready()
        if preludes:
            inputs = zip(variant.graph.inputs, binding.tensors, strict=True)
            places = {item.value: at for item, at in inputs}
            ready.reads = Reads(preludes, call.answers, places, binding.defaults, count, ready.free_numbers)
        asked = zip(binding.tensors, (item.asked for item in variant.graph.inputs), strict=True)
        ready.asked = [(at, what) for at, what in asked if what and at < count]
        ready.writes = variant.graph.outputs.writes
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

    def artifact(self) -> Artifact:
        """Everything that is compiled, to be saved; see :meth:`GraphStore.artifact`."""
        self._lift()
        return self.store.artifact(self.whole())

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
        self._effective.keep(self.structure.layers)
        return any(changes)

    def release(self) -> None:
        """Lets go of the module's tensors."""
        self.store.inputs, self._capturer.lifted = (), None
        self.store.root = self._capturer.whole = self.module
        self._stored = _Stored()
        for variant in self.variants:
            variant.release()

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

    def among(self, ids: Set[int]) -> Set[int]:
        """The ids of what programs are bound to for those of them that are among these."""
        return {id(view) for tensor, view in self._known.values() if id(tensor) in ids}


class _Number:
    """Makes numbers with an identity of their own."""

    class Int(int):
        """An int that is no shared object."""

    class Float(float):
        """A float that is no shared object."""

    @classmethod
    def of(cls, number: Number) -> Number:
        return cls.Int(number) if isinstance(number, int) else cls.Float(number)


class _Binding:
    """How the leaves of calls of one key become arguments and sizes of a program, and its results the call's result.

    Args:
        variant: The variant that serves the key.
        point: Its free sizes and numbers at the call it is made for.
        call: That call.
        tensors: For each tensor of the call as it was made, the index of its leaf, or the tensor where it is a default.
        numbers: For each number of that, the index of its leaf, ``None`` where it is a default.
        count: The number of leaves; behind them come the answers to what ``forward`` reads out of tensors.
        device: Where the program runs.
    """

    def __init__(
        self,
        variant: Variant | Staged,
        point: Mapping[str, Number],
        call: Call,
        tensors: Sequence[int | Tensor],
        numbers: Sequence[int | None],
        count: int,
        device: torch.device,
    ) -> None:
        self.variant = variant
        self.device = device
        self.point = point
        self.defaults: list[Leaf] = []
        answers = list(enumerate(call.answers, count))
        passed = len(numbers) - call.kept
        tensors = [*tensors, *(at for at, answer in answers if isinstance(answer, Tensor))]
        read = [at for at, answer in answers if not isinstance(answer, bool | Tensor)]
        numbers = [*numbers[:passed], *read, *numbers[passed:]]
        count += len(answers)
        self.tensors = [t if isinstance(t, int) else self._default(t, count) for t in tensors]
        self.numbers = [self._default(n, count) if i is None else i for i, n in zip(numbers, call.numbers, strict=True)]
        self.numbers += [self._default(c.at(point), count) for c in variant.graph.plan.computed]
        self.foreign = {at for at, t in zip(self.tensors, call.tensors, strict=True) if t.device != device}
        """Places of tensors that are on the CPU and are to be on the device."""
        self.complex = {at for at, t in zip(self.tensors, call.tensors, strict=True) if t.is_complex()}
        self.orders = memory_orders(call.key)
        """How the tensors of the call lie in memory."""
        first = len(call.sizes) - len(call.numbers)
        # What changes from call to call.
        loose = variant.graph.loose_numbers()
        self.live = {
            symbol.name: place
            for symbol in variant.graph.plan.symbols
            if symbol.name in loose and (place := numbers[symbol.position - first]) is not None
        }

    def _default(self, value: Leaf, count: int) -> int:
        """A place behind the leaves, where a value that is none of them is found."""
        self.defaults.append(value)
        return count + len(self.defaults) - 1

    def _moved(self, at: int, leaf: Any) -> Any:
        return leaf.to(self.device) if at in self.foreign else leaf

    def ready(self) -> Ready:
        """The function that runs a call."""
        return self._staged(self.variant) if isinstance(self.variant, Staged) else self._whole(self.variant)

    def _staged(self, staged: Staged) -> Ready:
        live, defaults = self.live, self.defaults
        build = builder(staged.graph.outputs, self.point, live, self.tensors)
        executables = staged.executables()

        def execute(leaves: list[Leaf], steps: list[dict[str, Any]] | None = None) -> Any:
            leaves = leaves + defaults
            point = {**self.point, **{name: cast(Number, leaves[at]) for name, at in live.items()}}
            numbers = {i: cast(Number, leaves[at]) for i, at in enumerate(self.numbers)}
            given = [self._moved(at, cast(Tensor, leaves[at])) for at in self.tensors]
            tensors = staged.run(executables, given, numbers, point, steps)
            return build(tensors, leaves)

        def profile(leaves: list[Leaf]) -> list[dict[str, Any]]:
            steps: list[dict[str, Any]] = []
            execute(leaves, steps)
            return steps

        def parts(leaves: list[Leaf]) -> list[Part]:
            leaves = leaves + defaults
            point = {**self.point, **{name: cast(Number, leaves[at]) for name, at in live.items()}}
            held = [executable for executable in executables if executable is not None]
            pairs = zip(staged.variants, held, strict=True)
            return [(variant, executable, variant.lowered.sizes(point)) for variant, executable in pairs]

        return Ready(execute, profile, parts, frozenset(live.values()), staged.problems)

    def _whole(self, variant: Variant) -> Ready:
        live, lowered, defaults = self.live, variant.lowered, self.defaults
        places = tuple((self.numbers if s.is_number else self.tensors)[s.index] for s in lowered.arguments)
        fixed = [0 if name in live else int(self.point[name]) for name in lowered.symbols]
        moving = [(i, live[name]) for i, name in enumerate(lowered.symbols) if name in live]
        build = builder(variant.graph.outputs, self.point, live, self.tensors)
        executable = variant.executable
        execute = executable.run
        orders = [s.order for s in lowered.arguments]
        copied = [i for i, s in enumerate(lowered.arguments) if not s.is_number and s.order != self.orders[s.index]]
        is_plain = not any(orders) and not copied
        is_plain = is_plain and self.foreign.isdisjoint(places) and self.complex.isdisjoint(places)

        def arguments_of(leaves: list[Leaf]) -> list[Any]:
            if is_plain:
                return [leaves[i] for i in places]
            given = [passed_as(self._moved(i, leaves[i]), order) for i, order in zip(places, orders, strict=True)]
            for i in copied:
                given[i] = given[i].contiguous()
            return given

        def sizes_of(leaves: Sequence[Leaf]) -> list[int]:
            sizes = fixed.copy()
            for i, place in moving:
                sizes[i] = int(leaves[place])
            return sizes

        def run(leaves: list[Leaf]) -> Any:
            if defaults:
                leaves = leaves + defaults
            return build(execute(arguments_of(leaves), sizes_of(leaves) if moving else fixed), leaves)

        def profile(leaves: list[Leaf]) -> list[dict[str, Any]]:
            leaves = leaves + defaults
            return executable.profile(arguments_of(leaves), sizes_of(leaves))

        def parts(leaves: list[Leaf]) -> list[Part]:
            return [(variant, executable, sizes_of(leaves + defaults))]

        return Ready(run, profile, parts, frozenset(live.values()))
