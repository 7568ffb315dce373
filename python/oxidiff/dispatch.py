"""What happens when a compiled module is called.

:class:`Dispatcher` belongs to one compiled module. A call becomes a key (:mod:`oxidiff.call`); a key that was seen
before leads to a :class:`~oxidiff.ready.Ready` that runs at once, without a lock. A new one is captured and compiled
under the lock, so that two threads calling first compile once. What cannot run compiled runs eager, with a reason
that is counted and said once.

Invariants: whatever eager PyTorch raises for a call, this raises; a call that failed leaves nothing behind that a later
call could trip over; an exception at any point, ``KeyboardInterrupt`` included, leaves a module that works.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from . import _native
from .adapters import disabled_while_merged, named_modules, split_scale
from .ambient import ambient_mode, collection_paused, reset_pause, tensor_obstacle, thread_modes_as
from .autocast import autocast_as, autocast_state
from .background import submit
from .call import Leaf, NotAKeyError, key_of, kind_of, plain_numbers, replace_leaves
from .capture import CHANGED, ChangedError, DrawnError, ElsewhereError, LeftError, NotFiniteError, SharedError
from .capture.parts import placed
from .capture.signature import ATTRIBUTES, TENSORS, container_at, containers, item_in, write
from .check import compare
from .detours import Detours
from .device import device_of, is_captured, named
from .engine import BY_SIZE, Engine
from .entries import MAX_KEYS, Epoch, Key, with_numbers
from .errors import (
    ArtifactError,
    CacheWarning,
    CaptureError,
    CheckError,
    Error,
    FallbackWarning,
    OutOfMemoryError,
    UnsupportedError,
    caller_level,
    from_native,
    is_interrupt,
)
from .family import reset_locks
from .hooks import Wrapped
from .island import reset_turns
from .lifted import Lifting
from .nan_guard import reset_lock
from .options import AnyPath, CompileOptions
from .ready import Ready
from .regions import Regions
from .sets import WeightSet
from .split import RUNS_EAGER, RUNS_EAGER_ONCE
from .staged import drawing_states
from .states import MAX_CHANGES, States, count_of
from .store import read_artifact, save
from .tune import Budget
from .variant import Part

__all__ = ["DISABLED", "Dispatcher", "Fallback", "find_dispatcher"]

_COLD = (
    "a CUDA graph is being captured, which allows no compiling; call it once before, with these weights and arguments"
)
DISABLED = "the environment variable OXIDIFF_DISABLE is set, with which everything runs eager"
"""Why calls of a module run eager that nothing else keeps from it."""
_LEAVING = "forward sets attributes of the module to something else, which the next calls find as it is"
_NO_ARGUMENTS = (ATTRIBUTES, TENSORS)
_NUMBER = re.compile(r"\d+")
_MAX_ALIKE = 3
"""Warnings of one kind, one for each of a model's blocks."""
_MORE = "; what else is so in modules like this one is in report().fallbacks, and not said here"
_PASSING = (ChangedError, NotFiniteError, OutOfMemoryError)
"""Errors of a call that say nothing of the next."""

Fallback = tuple[str, str, str]
"""``(module path, op, reason)``."""

_threads = 0


def follow_threads() -> None:
    """Gives the CPU backend as many threads as torch has."""
    global _threads
    _threads = torch.get_num_threads()
    _native.set_num_threads(_threads)


class Dispatcher:
    """Compiled state of one module, and the way of a call through it.

    Args:
        module: The module; stays eager itself.
        options: How to compile it.
        report: Told what ran eager, and why, in place of counting and warning: this module is a piece of another.
        lifting: Which numbers in attributes are arguments of programs, where another module knows it already.
        budget: What tuning may take, where others share it.

    Attributes:
        states: What the module was and is, and the lock.
        detours: What runs calls that have no program.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: CompileOptions,
        report: Callable[[Error, str], None] | None = None,
        lifting: Lifting | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.module = module
        self.options = options
        self.report = report
        self.name = type(module).__name__
        self.path = ""
        """Where it is in the module that this is a part of."""
        self.is_within = False
        """Whether Python runs around it, in the module that this is a part of."""
        self.fallbacks: dict[Fallback, int] = {}
        self.disabled = _native.is_on("OXIDIFF_DISABLE")
        self.captures = 0
        self.obstacle: str | None = None
        """Why no call of this module can run compiled."""
        self._calls = itertools.count()
        self._eager_calls = itertools.count()
        budget = budget or Budget(options.tune_budget_s)
        self.states = States(module, options, lifting or Lifting(), budget, self._calls)
        self.detours = Detours(self)
        self._eager: set[object] = set()
        """Contexts in which its calls run eager."""
        self._is_scripted: bool | None = None
        """Whether it has a submodule that is TorchScript, once that was looked for."""
        self._pending: set[Key] = set()
        self._warned: set[tuple[str, ...]] = set()
        self._alike: Counter[tuple[str, ...]] = Counter()
        """Warnings of modules whose paths differ in numbers alone."""
        self._scaled: dict[int, dict[str, Any]] = {}
        """Running calls from which a factor for adapters was taken, as they were; eager needs it."""
        self._given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Running calls in which numbers of numpy's were replaced, as they were; eager needs them."""
        self._is_rescaled = False
        """Whether a call had a factor for its adapters."""
        self._sets: dict[str, WeightSet] = {}
        self._used: WeightSet | None = None
        _alive.add(self)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module with ``args`` and ``kwargs``, compiled where possible. Hooks of the module itself are the
        caller's business."""
        used = self._used
        if used is not None:
            return self._call_with(used, args, kwargs)
        next(self._calls)
        if torch.get_num_threads() != _threads:
            follow_threads()
        if self.disabled or self._eager:
            next(self._eager_calls)
            return self._forward(args, kwargs)
        if kwargs:
            plain, scale = split_scale(self.module, kwargs)
            if plain is not kwargs:
                return self._call_scaled(args, kwargs, plain, scale)
        if not self._is_rescaled:
            result = self._call(args, kwargs)
            if not self._is_rescaled:
                return result
            # Another thread was the first with a factor, perhaps before this call took its weights.
        return self._call_unscaled(args, kwargs)

    def _call_with(self, used: WeightSet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with a weight set."""
        member = self._following(used)
        try:
            result = member(args, kwargs)
        except Exception as error:
            if not is_interrupt(error):
                used.explain(error)
            raise
        used.require_stateless()
        return result

    def _following(self, used: WeightSet) -> Dispatcher:
        """The dispatcher of a weight set, once that is as the module is now."""
        epoch = self.states.epoch
        if epoch is None or epoch.watch.poll():
            epoch = self.states.current()
        return used.follow(epoch.structure, self.states.lock)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_scripted is None:
            self._look_for_scripts()
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            return self.fall_back(UnsupportedError(mode), args, kwargs)
        if self.detours.carried is not None and id(kwargs) not in self._scaled:
            done = self.detours.run_carried(args, kwargs)
            if done is not None:
                return done[0]
        leaves: list[Leaf] = []
        try:
            key = (mode, key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            plain = plain_numbers(args, kwargs)
            if plain is not None:
                return self._call_plain(args, kwargs, *plain)
            return self.detours.run_beside(UnsupportedError(f"{error} is passed to it"), args, kwargs)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            # Whatever the module has become.
            return self.fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
        epoch = self.states.epoch
        if epoch is None or epoch.watch.poll():
            if is_captured(leaves):
                return self.fall_back(UnsupportedError(_COLD), args, kwargs)
            try:
                epoch = self.idle_epoch()
            except ChangedError as error:
                return self.fall_back(error, args, kwargs)
            if epoch is None:
                return self._run_meanwhile(args, kwargs)
        if torch.is_grad_enabled() and epoch.watch.needs_grad():
            return self.fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
        if asked := epoch.engine.asked:
            key = (*key, *[ask() for ask in asked])
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
            if entry.asked and (reason := entry.otherwise(leaves)) is not None:
                return self.fall_back(UnsupportedError(reason), args, kwargs)
            if entry.problems:
                self._record_problems(entry)
            try:
                return self._run_writing(entry, args, kwargs, leaves) if entry.writes else entry.run(leaves)
            except Warning:
                raise
            except Exception as error:
                if is_interrupt(error):
                    raise
                return self._rescue(epoch, key, entry, from_native(error), args, kwargs, leaves)
        if entry is None:
            if is_captured(leaves):
                return self.fall_back(UnsupportedError(_COLD), args, kwargs)
            return self._first_call(key, args, kwargs, leaves)
        if entry.is_split and not self.options.strict:
            result = self.detours.run_split(epoch, entry, args, kwargs)
        else:
            result = self.detours.run_regions(epoch, entry, args, kwargs)
        self.detours.follow(epoch, key, entry, leaves)
        return result

    def _look_for_scripts(self) -> None:
        """Before the first call: a copy has no submodules yet when this object is made."""
        scripts = (n for n, child in self.module.named_modules() if isinstance(child, torch.jit.ScriptModule))
        script = next(scripts, None)
        self._is_scripted = script is not None
        if script is not None:
            self.obstacle = f"its submodule {script} is TorchScript"

    def _call_plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: tuple[Any, ...], plain_kwargs: dict[str, Any]
    ) -> Any:
        """A call with numbers of numpy's, which is captured with Python's."""
        self._given[id(plain_kwargs)] = args, kwargs
        if (scaled := self._scaled.get(id(kwargs))) is not None:
            self._scaled[id(plain_kwargs)] = scaled
        try:
            return self._call(plain, plain_kwargs)
        finally:
            del self._given[id(plain_kwargs)]
            self._scaled.pop(id(plain_kwargs), None)

    def _call_scaled(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: dict[str, Any], scale: float) -> Any:
        """A call with a factor for all adapters: it belongs to the weights, so nobody else changes them meanwhile.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            plain: The same without the factor.
            scale: The factor.
        """
        epoch = self.states.epoch
        if epoch is not None and self.is_captured() and (scale != self.states.effective.scale or epoch.watch.poll()):
            return self.fall_back(UnsupportedError(_COLD), args, kwargs)
        structure = self.states.current().structure
        if structure.has_other_adapters and scale != 1.0:
            reason = "a scale is passed for adapters that are not plain LoRA on layers of plain weights"
            return self.fall_back(UnsupportedError(reason), args, kwargs)
        if not structure.layers or scale == 1.0:
            return self._call_unscaled(args, plain)
        with self.states.lock:
            self._is_rescaled = True
            if scale != self.states.effective.scale:
                self.states.rescale(scale)
            self._scaled[id(plain)] = kwargs
            try:
                return self._call(args, plain)
            finally:
                del self._scaled[id(plain)]

    def _call_unscaled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without such a factor, where others may have had one: nobody puts theirs in the weights meanwhile."""
        if self.states.effective.scale != 1.0 and self.is_captured():
            return self.fall_back(UnsupportedError(_COLD), args, kwargs)
        if not self.options.background:
            # An interrupt cannot come between taking the lock and being ready to give it back.
            with self.states.lock:
                return self._call_at_one(args, kwargs)
        if not self.states.lock.acquire(blocking=False):
            return self._run_meanwhile(args, kwargs)
        try:
            return self._call_at_one(args, kwargs)
        finally:
            self.states.lock.release()

    def _call_at_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.states.effective.scale != 1.0:
            self.states.rescale(1.0)
        return self._call(args, kwargs)

    def is_captured(self) -> bool:
        """Whether work on the module's device is only recorded now."""
        epoch = self.states.epoch
        device = None if epoch is None else epoch.engine.device
        return device is not None and device.is_capturing()

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
        """Captures and compiles for this call without running it.

        Raises:
            Error: Why the call cannot run compiled.
        """
        # A module may be prepared before anything was called; choices are those of a number of threads.
        follow_threads()
        if self._used is not None:
            return self._following(self._used).prepare(args, kwargs)
        if self._is_scripted is None:
            self._look_for_scripts()
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            raise UnsupportedError(mode)
        args, kwargs = self._as_captured(args, kwargs)
        if (carried := self.detours.ask_carried(Dispatcher.prepare, args, kwargs)) is not None:
            return carried[0]
        leaves: list[Leaf] = []
        try:
            key = (mode, key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            raise UnsupportedError(f"{error} is passed to it") from None
        with self.states.lock:
            key = (*key, *[ask() for ask in self.states.current().engine.asked])
            return self._ready(key, _kind(key, args, kwargs), args, kwargs, leaves, is_call=False)

    def _as_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as programs know it: without the factor for adapters, with Python's numbers."""
        kwargs, _ = split_scale(self.module, kwargs)
        return plain_numbers(args, kwargs) or (args, kwargs)

    def forward(self) -> Callable[..., Any]:
        """What a program stands for: the module's ``forward`` without the hooks of accelerate and diffusers around it.

        Raises:
            UnsupportedError: Something else is around these.
        """
        return Wrapped(self.module).forward

    def parts_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
        """What would run this call, see :attr:`Ready.parts`; raises as :meth:`prepare`."""
        if self._used is not None:
            return self._following(self._used).parts_of(args, kwargs)
        args, kwargs = self._as_captured(args, kwargs)
        if (carried := self.detours.ask_carried(Dispatcher.parts_of, args, kwargs)) is not None:
            return carried[0]
        with torch.no_grad(), self._as_a_whole():
            ready = self.prepare(args, kwargs)
        leaves: list[Leaf] = []
        key_of(args, kwargs, leaves)
        return ready.parts(ready.complete(leaves))

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """One timed run of this call; raises as :meth:`prepare`."""
        if self.disabled:
            raise UnsupportedError(f"{self.name} has no program to time: {DISABLED}")
        if self._used is not None:
            return self._following(self._used).profile(args, kwargs)
        args, kwargs = self._as_captured(args, kwargs)
        if (carried := self.detours.ask_carried(Dispatcher.profile, args, kwargs)) is not None:
            return carried[0]
        with torch.no_grad(), self._as_a_whole():
            ready = self.prepare(args, kwargs)
            leaves: list[Leaf] = []
            key_of(args, kwargs, leaves)
            return ready.profile(ready.complete(leaves))

    def note_disabled(self) -> None:
        """Says, once, that what was asked for is not done."""
        if (DISABLED,) not in self._warned:
            self._warned.add((DISABLED,))
            warnings.warn(f"{self.name}: nothing is compiled: {DISABLED}", FallbackWarning, stacklevel=caller_level())

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        """Says of a module that has no program of the whole what there is, and what its user can do."""
        try:
            yield
        except CaptureError as error:
            hint = "what can be compiled of it is when it is called"
            if self.pieces():
                hint = "its calls run in parts, each with a program: compile the parts one by one to look at them"
            kind = UnsupportedError if isinstance(error, UnsupportedError) else CaptureError
            what = f"{self.name} has no program of the whole: {error}; {hint}"
            raise kind(what, module=error.module, op=error.op) from error

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.as_given(args, kwargs)
        with self.detours.turn if self.detours.is_keeping else nullcontext():
            return self.forward()(*args, **kwargs)

    def as_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A running call as its caller made it: with numpy's numbers, and the factor for adapters."""
        args, kwargs = self._given.get(id(kwargs), (args, kwargs))
        return args, self._scaled.get(id(kwargs), kwargs)

    def _first_call(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Any:
        epoch = self.states.epoch
        # Before it runs: it may fill what it is given.
        kind = _kind(key, args, kwargs)
        if epoch is not None and not self.options.strict:
            if (done := self.detours.run_restless(epoch, args, kwargs)) is not None:
                return done[0]
            if self.detours.leaves_state(epoch, key, leaves):
                return self.fall_back(UnsupportedError(_LEAVING), args, kwargs)
            if epoch.refusals and (done := self.detours.run_refused(epoch, key, kind, args, kwargs, leaves)):
                return done[0]
        is_patient = self.options.background and self.options.check is None and not self._is_at_hand(key, args, kwargs)
        is_patient = is_patient and not (epoch is not None and epoch.engine.asks_process)
        if is_patient and self._start_background(key, kind, args, kwargs, leaves):
            return self._run_meanwhile(args, kwargs)
        if (done := self.detours.run_known(key, args, kwargs, leaves)) is not None:
            return done[0]
        captures = self.captures
        try:
            with self.states.lock:
                ready = self._ready(key, kind, args, kwargs, leaves)
        except Error as error:
            # Eager would need more memory, not less.
            if isinstance(error, OutOfMemoryError) or (self.options.strict and isinstance(error, UnsupportedError)):
                raise
            # A wrong argument fails in eager as well, with the exception that its caller expects.
            entry = self.detours.entry_without_program(error, key)
            known = entry.copy()
            # An exception that `forward` itself raised is eager's to raise, or to do without.
            is_set_up = self.detours.may_be_set_up(error, key)
            if not is_set_up and id(kwargs) not in self._scaled and self.detours.carry(error):
                done = self.detours.run_carried(args, kwargs)
                if done is not None:
                    return done[0]
            is_for_now = is_set_up or isinstance(error, _PASSING) or error.__cause__ is not None
            if self.options.strict or is_for_now:
                what = RUNS_EAGER_ONCE if is_set_up else RUNS_EAGER
                result = self.fall_back(error, args, kwargs, is_strict=False, what=what)
            else:
                result = self.detours.run(self.states.current(), entry, args, kwargs)
            epoch = self.states.epoch
            self.detours.settle_writing(epoch, entry)
            # What another thread did is nothing to remember, nor is a number that is not finite this time.
            if epoch is not None and not isinstance(error, _PASSING) and not is_set_up:
                epoch.add(key, leaves, entry)
                if _is_tried(error, self.captures > captures):
                    epoch.refusals.add(kind, known)
                self.detours.follow(epoch, key, entry, leaves)
            if self.options.strict:
                raise
            return result
        epoch = self.states.epoch
        # What a closure holds is known once it is captured.
        if epoch is not None and torch.is_grad_enabled() and epoch.watch.needs_grad():
            return self.fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
        if (reason := ready.otherwise(leaves)) is not None:
            return self.fall_back(UnsupportedError(reason), args, kwargs)
        self._record_problems(ready)
        is_checked = self.options.check is not None
        states = drawing_states() if is_checked else ()
        try:
            if ready.writes and not is_checked:
                return self._run_writing(ready, args, kwargs, leaves)
            result = ready.run(leaves)
        except Warning:
            raise
        except Exception as error:
            if is_interrupt(error):
                raise
            epoch = self.states.current()
            return self._rescue(epoch, key, ready, from_native(error), args, kwargs, leaves)
        if is_checked:
            # Eager draws the random numbers that the program drew.
            for put, state in states:
                put(state)
            self._check(ready, result, args, kwargs, leaves)
        return result[0] if ready.writes else result

    def _run_writing(self, ready: Ready, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Any:
        """A call that writes into tensors, lists, dictionaries and objects that are passed to it: once the program is
        through."""
        bound = self._bound(ready, args, kwargs, leaves)
        places = Counter(id(container) for _, container in containers(bound))
        written = {id(container_at(bound, path)) for path, _, _ in ready.writes if path[0] not in _NO_ARGUMENTS}
        if any(places[at] > 1 for at in written):
            raise CaptureError("a list, dictionary or object that it writes into is passed to it twice")
        if written and self._holds(written):
            # What the program reads there is what was there before.
            raise CaptureError(
                "a list, dictionary or object that it writes into is passed to it, and is an attribute too"
            )
        result, values = ready.run(leaves)
        write(bound, ready.writes, values)
        return result

    def _bound(self, ready: Ready, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> dict[str, Any]:
        """The arguments of a call by name, and beside them what else it writes into."""
        return {**ready.bind(args, kwargs), TENSORS: ready.tensors(leaves)}

    def _holds(self, ids: Set[int]) -> bool:
        """Whether one of these objects, by their ids, is an attribute of a module."""
        epoch = self.states.epoch
        modules = self.module.modules() if epoch is None else epoch.structure.modules.values()
        return any(id(value) in ids for module in modules for value in module.__dict__.values())

    # -- other methods -------------------------------------------------------------------------------------------------

    def call_method(
        self, instance: torch.nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a method beside ``forward`` that runs submodules: in Python, with these compiled. Where some are compiled
        by themselves, or the method calls the module again and again, nothing else is.

        Args:
            instance: The compiled module.
            method: The method, as a function.
            args: Positional arguments without the module.
            kwargs: Keyword arguments.
        """
        others = [member for _, member in self.family() if member is not self]
        if self.disabled or self._eager:
            return method(instance, *args, **kwargs)
        name = method.__name__
        reason = f"its method {name} is called; only calls of a module and of compiled submodules are compiled"
        if self._used is not None:
            reason = (
                f"its method {name} is called, with the module's own weights: a weight set is for calls of the module"
            )
        if not others and not name.startswith("generate"):
            found = self._regions_for_method(args, kwargs)
            if isinstance(found, Regions):
                next(self._calls)
                result, compiled, problems = found.call_method(method, args, kwargs)
                if not compiled:
                    next(self._eager_calls)
                    self.record(UnsupportedError(reason))
                for problem, what in problems:
                    self.record(problem, what)
                return instance if found.is_own(result) else result
            reason = found or reason
            if self.options.strict:
                raise UnsupportedError(reason)
        before = self.calls + sum(other.calls for other in others)
        result = method(instance, *args, **kwargs)
        if self.calls + sum(other.calls for other in others) == before:
            next(self._calls)
            next(self._eager_calls)
            self.record(UnsupportedError(reason))
        return result

    def _regions_for_method(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Regions | str | None:
        """The submodules that have programs of their own where another method than ``forward`` calls them; why there are
        none, if that is known."""
        if self._is_scripted is None:
            self._look_for_scripts()
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            return mode
        if is_captured([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]):
            return _COLD
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self.module.parameters()):
            return self._grad_reason()
        epoch = self.idle_epoch()
        if epoch is None:
            return "its submodules are compiled in the background"
        try:
            return self.detours.regions_of(epoch, frozenset((id(self.module),))) or None
        except UnsupportedError as error:
            return str(error)

    # -- in the background ---------------------------------------------------------------------------------------------

    def _start_background(
        self, key: Key, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]
    ) -> bool:
        """Has the entry of a key made by the background thread; false if there can be none."""
        if key in self._pending:
            return True
        this = weakref.ref(self)
        autocast, modes = autocast_state(), (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        # Lists, dictionaries and objects as they are: the caller, and this call, may fill them before they are looked at.
        try:
            given = replace_leaves(args, kwargs, leaves)
        except Exception as error:
            if is_interrupt(error):
                raise
            # It raises in the background again, which says why.
            given = args, kwargs

        def task() -> None:
            dispatcher = this()
            if dispatcher is not None:
                with autocast_as(autocast), thread_modes_as(*modes):
                    dispatcher._prepare_in_background(key, kind, *given, leaves)

        is_submitted = False
        try:
            self._pending.add(key)
            is_submitted = submit(task)
        finally:
            # After an interrupt, too: the next call starts over.
            if not is_submitted:
                self._pending.discard(key)
        return is_submitted

    def _is_at_hand(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call was ready until numbers in attributes changed, and has a program for the new ones."""
        epoch = self.states.epoch
        if epoch is None or key not in epoch.former or not self.states.lock.acquire(blocking=False):
            return False
        try:
            return epoch is self.states.epoch and epoch.engine.knows(args, kwargs)
        finally:
            self.states.lock.release()

    def _prepare_in_background(
        self, key: Key, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]
    ) -> None:
        captures = self.captures
        try:
            with self.states.lock:
                asked = self.states.current().engine.asked
                if key[2:] == tuple([ask() for ask in asked]) or len(key) == 2:
                    self._ready(key, kind, args, kwargs, leaves)
        except ElsewhereError:
            # The next call sees that it is to do so itself.
            pass
        except Error as error:
            entry = self.detours.entry_without_program(error, key)
            epoch = self.states.epoch
            if epoch is not None and not (isinstance(error, _PASSING) or self.detours.may_be_set_up(error, key)):
                epoch.add(key, leaves, entry)
                # What `forward` raised, eager may raise as well.
                if _is_tried(error, self.captures > captures) and error.__cause__ is None:
                    epoch.refusals.add(kind, entry.copy())
            # Last: whoever reads the reason in the report finds calls running as it says.
            self.fallbacks.setdefault((entry.module, entry.op, entry.reason), 0)
        finally:
            self._pending.discard(key)

    def _run_meanwhile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call in eager PyTorch while its program is being made: no fallback, nothing to warn of."""
        next(self._eager_calls)
        return self._forward(args, kwargs)

    def idle_epoch(self) -> Epoch | None:
        """The current epoch; ``None`` where that would have to wait for the background thread."""
        if not self.options.background:
            return self.states.current()
        if not self.states.lock.acquire(blocking=False):
            return None
        try:
            return self.states.current()
        finally:
            self.states.lock.release()

    def _ready(
        self,
        key: Key,
        kind: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Leaf],
        *,
        is_call: bool = True,
    ) -> Ready:
        """The entry of a key, captured and compiled if it is new; ``leaves`` get what it reads out of tensors. The lock is
        held."""
        at = with_numbers(key, leaves)
        self.states.begin_capture()
        for _ in range(MAX_CHANGES):
            before = self.states.current()
            try:
                ready = self._made_ready(key, kind, args, kwargs, leaves, is_call=is_call)
            except ChangedError as error:
                changed = error
                if len(before.left) < MAX_KEYS:
                    before.left[at] = before.left.get(at, 0) + 1
            else:
                # Where data decide, calls of one key may leave a state or not.
                before.left.pop(at, None)
                return ready
        raise changed

    def _made_ready(
        self,
        key: Key,
        kind: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Leaf],
        *,
        is_call: bool,
    ) -> Ready:
        """As :meth:`_ready`; raises a :class:`ChangedError` if another thread changes the module meanwhile."""
        epoch = self.states.current()
        if self.states.is_outdated(epoch):
            # Nobody watches that before there is a program: an attempt before this one failed.
            epoch = self.states.leave_outdated(epoch)
            self.states.refresh(epoch)
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
            return entry
        if entry is not None and (is_call or entry.reason != BY_SIZE):
            raise entry.error()
        if epoch.structure.obstacle is not None:
            path, reason = epoch.structure.obstacle
            raise UnsupportedError(reason, module=path)
        if self.states.given_up is not None:
            raise UnsupportedError(self.states.given_up)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (unfit := tensor_obstacle(leaf)) is not None:
                raise UnsupportedError(unfit)
        if epoch.structure.has_other_adapters and (layers := disabled_while_merged(self.module)):
            if self.options.background:
                raise UnsupportedError("adapters that are merged were disabled: PEFT takes them out in this call")
            for layer in layers:
                layer.unmerge()
            raise ChangedError(CHANGED)
        engine, is_new_state, is_lost = epoch.engine, not (self.states.is_only_one or epoch.entries), True
        before, adopted = engine.captures, engine.adoptions
        try:
            confirm = functools.partial(self.states.confirm, epoch)
            # Who asks for a program of the whole gets one.
            runs_in_parts = self.detours.runs_in_parts if is_call else _never
            ready = epoch.engine.prepare(args, kwargs, leaves, confirm, runs_in_parts)
            is_lost = False
            if ready.gives_parts and self.is_within:
                raise UnsupportedError("it returns a view of an argument, into which what it is part of may write")
        except (ChangedError, ElsewhereError, CacheWarning, FallbackWarning):
            is_lost = False
            raise
        except Error:
            self.states.confirm(epoch)
            if not epoch.structure.inputs:
                raise
            # Perhaps only because of the numbers that are to be arguments.
            self.states.lifting.pin(epoch.structure.form, epoch.structure.inputs)
            self.states.reentered()
            return self._made_ready(key, kind, args, kwargs, leaves, is_call=is_call)
        except _native.NativeError as error:
            raise from_native(error) from error
        except Exception as error:
            if is_interrupt(error):
                raise
            if isinstance(error, TypeError):
                # Arguments that do not fit the signature: eager says so in its own words.
                raise CaptureError(str(error)) from error
            # A table that another thread changed while it was read.
            self.states.confirm(epoch)
            raise CaptureError(f"internal: {type(error).__name__}: {error}") from error
        finally:
            self.captures += engine.captures - before
            if is_new_state:
                made = engine.captures - before, engine.adoptions - adopted
                self.states.patience.spend(self.calls - self.detours.waited, *made, is_lost=is_lost)
        for part in (part for regions in self.states.regions for part in regions.parts.values()):
            # What is bound to weights is the whole again.
            part.states.rest()
        self.states.follow(epoch)
        # As another thread changed them meanwhile, this may be none of the key's programs.
        if len(key) == 2 or key[2:] == tuple([ask() for ask in engine.asked]):
            epoch.add(key, leaves, ready, is_new=epoch.engine.captures > before)
            epoch.refusals.lift(kind)
        if epoch.engine.pinned:
            self.states.lifting.pin(epoch.structure.form, epoch.engine.pinned)
            self.states.reentered()
        if ready.reads is not None:
            leaves += ready.reads.answers
        return ready

    def _rescue(
        self,
        epoch: Epoch,
        key: Key,
        ready: Ready,
        error: Error,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Leaf],
    ) -> Any:
        """After a compiled run failed: eager says whether the call itself is wrong."""
        if isinstance(error, OutOfMemoryError):
            epoch.engine.unload()
            try:
                return self._run_writing(ready, args, kwargs, leaves) if ready.writes else ready.run(leaves)
            except Warning:
                raise
            except Exception as again:
                if is_interrupt(again):
                    raise
                raise from_native(again) from None
        if isinstance(error, LeftError) and error.is_outside:
            # At another size than those that there is a program for.
            entry = self.detours.entry_without_program(error, key)
            self.detours.may_be_set_up(error, key)
            result = self.detours.run_regions(epoch, entry, args, kwargs)
            self.detours.settle_writing(epoch, entry)
            return result
        return self.fall_back(error, args, kwargs)

    def _check(
        self, ready: Ready, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]
    ) -> None:
        with torch.no_grad():
            expected = self._forward(args, kwargs)
        if ready.writes:
            # What eager wrote into the arguments stays there.
            given = self._bound(ready, args, kwargs, leaves)
            places = [(container_at(given, path), key) for path, key, is_kept in ready.writes if is_kept]
            pairs = [placed(item_in(*place), value) for place, value in zip(places, result[1], strict=True)]
            expected = (expected, tuple(held for held, _ in pairs))
            result = (result[0], tuple(value for _, value in pairs))
        tolerance = self.options.check
        bound = None if tolerance is True else tolerance
        problem = compare(result, expected, bound, is_guarded=self.options.nan_guard)
        if problem is not None:
            raise CheckError(
                f"{self.name}: the compiled result differs from eager: {problem}; "
                "raise the tolerance (check=...) if this is rounding, else please report it"
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def _grad_reason(self) -> str:
        if self.module.training:
            return "it is in training mode and needs gradients; call .eval() and use torch.no_grad() for inference"
        return "gradients are needed (grad mode is on and a tensor requires grad); call it under torch.no_grad()"

    def family(self) -> list[tuple[str, Dispatcher]]:
        """This dispatcher, those of its further weight sets and those of compiled submodules, with names and paths."""
        sets = [(name, one.dispatcher) for name, one in self._sets.copy().items()]
        found = ((path, find_dispatcher(child)) for path, child in named_modules(self.module) if path)
        return [("", self), *sets, *((path, other) for path, other in found if other is not None)]

    def bind(self, source: torch.nn.Module | Mapping[str, Tensor], name: str | None = None) -> str:
        """Adds a weight set; see :func:`oxidiff.bind`."""
        if not isinstance(source, torch.nn.Module | Mapping):
            raise TypeError(f"bind: {self.name} takes a state_dict or a module, not {type(source).__name__}")
        if name is not None and not (isinstance(name, str) and name):
            raise ValueError(f"bind: {name!r} is no name for a weight set of {self.name}")

        def make(module: torch.nn.Module) -> Dispatcher:
            found = find_dispatcher(module)
            if found is not None and found is not self:
                return found
            # Of this module itself as it is, not as it is compiled.
            source = self.module if found is self else module
            return Dispatcher(source, self.options, lifting=self.states.lifting, budget=self.states.budget)

        with self.states.lock:
            if name is None:
                name = next(f"weights{i}" for i in itertools.count(1) if f"weights{i}" not in self._sets)
            made = WeightSet(name, self.module, source, make, self.states.current().structure)
            replaced = self._sets.get(name)
            self._sets[name] = made
            if replaced is not None and self._used is replaced:
                self._used = made
        return name

    def use(self, name: str | None = None) -> None:
        """Switches to a weight set; see :func:`oxidiff.use`."""
        with self.states.lock:
            if name is not None and name not in self._sets:
                known = ", ".join(map(repr, self._sets)) or "none"
                raise ValueError(f"no weights are bound as {name!r}; there are: {known}")
            chosen = None if name is None else self._sets[name]
            following = chosen
            while following is not None:
                if following.dispatcher is self:
                    raise ValueError(f"what is bound as {name!r} uses the weights of this module itself")
                following = following.dispatcher._used
            self._used = chosen

    def unbind(self, name: str) -> None:
        """Drops a weight set; see :func:`oxidiff.unbind`."""
        with self.states.lock:
            if self._used is self._sets.get(name):
                self.use(None)
            self._sets.pop(name, None)

    def pieces(self) -> list[Dispatcher]:
        """The dispatchers of the pieces and parts that this module runs in where it cannot be captured whole, and of their
        own."""
        splits = [split for epoch in self.states.remembered if (split := epoch.split) is not None]
        found = [piece for split in splits for piece in list(split.pieces)]
        parts = {id(part): part for regions in self.states.regions for part in regions.parts.values()}
        if (carried := self.detours.carried) is not None:
            parts[id(carried.part)] = carried.part
        return [*found, *parts.values(), *(piece for part in parts.values() for piece in part.pieces())]

    def save_graph(self, path: AnyPath) -> None:
        """Saves what is compiled; see :func:`oxidiff.save_graph`."""
        with self.states.lock:
            engine = self.states.current().engine
            others = [other for used in self._sets.values() if (other := self._engine_like(engine, used)) is not None]
            compiled = [item for one in (engine, *others) for item in one.whole()]
            if not compiled and any(one.pieces() for one in (self, *(used.dispatcher for used in self._sets.values()))):
                what = "it runs in parts, each with a program; the cache keeps these, and a part that is compiled by itself"
                raise ArtifactError(f"{self.name} cannot be saved: {what} can be saved")
            save(os.fsdecode(path), engine.artifact({id(item.graph): item for item in compiled}.values()))

    def _engine_like(self, engine: Engine, used: WeightSet) -> Engine | None:
        """The engine of a weight set, if what was captured of that may be taken for the module's own."""
        try:
            other = self._following(used).states.current().engine
            is_like = other.structure.inputs == engine.structure.inputs
            return other if is_like and other.description().digest == engine.description().digest else None
        except Error:
            # It no longer fits, or nothing of it can be stored.
            return None

    def load_graph(self, path: AnyPath, device: torch.device | str | int | None = None) -> None:
        """Loads what was saved; see :func:`oxidiff.load_graph`."""
        if device is not None:
            device_of(named(device))
        path = os.fsdecode(path)
        with self.states.lock, collection_paused():
            artifact = read_artifact(path)
            engine = self.states.current().engine
            if self.states.lifting.adopt(engine.structure, artifact.inputs):
                engine = self.states.reentered().engine
            artifact.require(engine.description(), path)
            try:
                engine.load(artifact)
                self.states.current().refusals.clear()
            except _native.NativeError as error:
                raise from_native(error) from error

    def unload(self) -> None:
        """Gives back everything that was compiled; the next call compiles again."""
        for _, member in self.family():
            for piece in member.pieces():
                piece.unload()
            with member.states.lock:
                epochs = member.states.forget()
                member.states.regions = ()
                member.states.effective.clear()
                member.detours.forget()
            for epoch in epochs:
                epoch.retire()

    @contextmanager
    def eager(self) -> Iterator[torch.nn.Module]:
        """Runs calls in eager PyTorch meanwhile, in every thread."""
        members = [member for _, member in self.family()]
        own = object()
        try:
            for member in members:
                member._eager.add(own)
            yield self.module
        finally:
            for member in members:
                member._eager.discard(own)

    # -- eager ---------------------------------------------------------------------------------------------------------

    def fall_back(
        self,
        error: Error,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_strict: bool = True,
        what: str = RUNS_EAGER,
    ) -> Any:
        """Runs a call of the module in eager PyTorch; see :meth:`run_eager`."""
        return self.run_eager(error, lambda: self._forward(args, kwargs), is_strict, what)

    def run_eager(self, error: Error, run: Callable[[], Any], is_strict: bool = True, what: str = RUNS_EAGER) -> Any:
        """Runs a call in eager PyTorch, and only if that works counts and reports the reason.

        Args:
            error: The reason.
            run: The call.
            is_strict: Whether ``strict=True`` raises ``error`` before running.
            what: What a warning says of it.
        """
        if self.options.strict and is_strict:
            raise error
        result = run()
        next(self._eager_calls)
        if self.options.strict:
            return result
        self.record(error, what)
        return result

    def count_eager(self) -> None:
        """Counts a call that ran eager."""
        next(self._eager_calls)

    def _record_problems(self, ready: Ready) -> None:
        for problem in ready.problems:
            self.record(problem, "runs an op in eager PyTorch")

    def record(self, error: Error, what: str = RUNS_EAGER) -> None:
        """Counts a call that did not run as one program, and says so once."""
        if self.report is not None:
            self.report(error, what)
            return
        place: Fallback = (getattr(error, "module", ""), getattr(error, "op", ""), str(error))
        self.fallbacks[place] = self.fallbacks.get(place, 0) + 1
        path, op, reason = place
        # The same op at another size is no news.
        known: tuple[str, ...] = (path, op, "") if op else place
        if what == RUNS_EAGER_ONCE:
            # Should it be so in each call after all, that is news.
            known = (*known, what)
        if known not in self._warned:
            self._warned.add(known)
            # Of the blocks of a model, which mostly are alike, a few say so for all.
            alike = (_NUMBER.sub("", path), *known[1:])
            self._alike[alike] += 1
            if self._alike[alike] > _MAX_ALIKE:
                return
            where = f"{self.name}.{path}" if path else self.name
            at = f" (op {op})" if op and op not in reason else ""
            more = _MORE if self._alike[alike] == _MAX_ALIKE else ""
            warnings.warn(f"{where} {what}: {reason}{at}{more}", FallbackWarning, stacklevel=caller_level())

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How often the module was called."""
        return count_of(self._calls)

    @property
    def eager_calls(self) -> int:
        """How many of the calls ran eager."""
        return count_of(self._eager_calls)

    def engines(self) -> list[Engine]:
        """The engines of all structures that are remembered, the current one last."""
        return [epoch.engine for epoch in self.states.remembered]

    def _reset_lock(self) -> None:
        self.states.reset_lock()
        self.detours.reset_lock()
        self._pending.clear()


def _never() -> bool:
    return False


def _kind(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What calls of a key have in common with those of other sizes and numbers."""
    return key[0], *key[2:], kind_of((args, kwargs))


def _is_tried(error: Error, is_captured: bool) -> bool:
    """Whether an attempt failed that would at most calls like it. What ``forward`` leaves behind is followed by itself."""
    is_left = isinstance(error, LeftError) and not isinstance(error, SharedError)
    return not is_left and (is_captured or type(error) in (CaptureError, DrawnError))


def find_dispatcher(compiled: object) -> Dispatcher | None:
    """The dispatcher in the slot of a compiled module, ``None`` if it is not one."""
    slot = getattr(type(compiled), "_oxidiff", None)
    return None if slot is None else cast(Dispatcher, slot.__get__(compiled))


_alive: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _after_fork() -> None:
    # Another thread may have held a lock when the process forked; nobody would ever release it in the child.
    reset_locks()
    reset_lock()
    reset_pause()
    reset_turns()
    for dispatcher in list(_alive):
        dispatcher._reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
