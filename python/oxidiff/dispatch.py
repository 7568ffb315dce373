"""What happens when a compiled module is called.

:class:`Dispatcher` belongs to one compiled module. A call becomes a key (:mod:`oxidiff.call`); a key that was seen
before leads to a :class:`~oxidiff.engine.Ready` that runs at once, without a lock. A new one is captured and compiled
under the lock, so that two threads calling first compile once. What cannot run compiled runs eager, with a reason
that is counted and said once.

Invariants: whatever eager PyTorch raises for a call, this raises; a call that failed leaves nothing behind that a later
call could trip over; an exception at any point, ``KeyboardInterrupt`` included, leaves a module that works.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from . import _native
from .adapters import EffectiveWeights, disabled_while_merged, named_modules, split_scale
from .ambient import ambient_mode, collection_paused, reset_pause, tensor_obstacle
from .autocast import autocast_as, autocast_state
from .background import submit
from .call import Leaf, NotAKeyError, key_of, plain_numbers
from .capture import CHANGED, ChangedError, KeptError, LeftError, NotFiniteError, leads_to
from .capture.reads import Prelude
from .capture.signature import container_at, containers, write
from .capture.weights import VARYING
from .check import compare
from .device import device_of, is_captured, named
from .engine import Engine, Part, Reads, Ready
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
from .hooks import Wrapped, replaced_modules
from .island import Island
from .lifted import Lifting
from .nan_guard import reset_lock
from .options import CompileOptions
from .patience import OUTSIDE, STATES, WAIT, Patience
from .regions import Regions
from .sets import WeightSet
from .split import RUNS_EAGER, Split
from .staged import drawing_states
from .store import read_artifact, save
from .tune import Budget
from .watch import STRUCTURE, SURROUNDINGS, Structure, Watch

__all__ = ["Dispatcher", "Fallback", "find_dispatcher"]

_COLD = (
    "a CUDA graph is being captured, which allows no compiling; call it once before, with these weights and arguments"
)
_MAX_CHANGES = 3
_MAX_KEYS = 4096
_MAX_EPOCHS = 64
"""States of a module that are known: the steps of a picture, where something in the module says which one it is."""
_MAX_LEFT = 2
"""How often a call may be captured that leaves the state of the module that it is captured in."""
_LEAVING = "forward sets attributes of the module to something else, which the next calls find as it is"
_MAX_READ = 64
"""Programs for one key that differ by what is read out of tensors; further answers run in pieces."""
_MAX_RECOUNTED = 3
_OF_GRADIENTS = ("does not require grad", "a torch.func transform")
"""What errors say of a ``forward`` that computes gradients itself."""
_PASSING = (ChangedError, NotFiniteError, OutOfMemoryError)
"""Errors of a call that say nothing of the next."""
_MAX_RENEWALS = 2
"""Calls that change the module and make Dynamo compile other pieces; further ones run eager."""
_MAX_REGIONS = 4
"""Ways in which Python may lie between the submodules of a module, as its hooks come and go, for which what is compiled is
kept."""
_MAX_SETTLED = 8
"""How often a module may seem to be done with changing itself."""
_OTHERS = "what forward reads out of tensors makes another program nearly each time"

Fallback = tuple[str, str, str]
"""``(module path, op, reason)``."""

_Key = tuple[Any, ...]


class _Eager:
    """A key whose calls run eager, or in pieces, and why."""

    __slots__ = ("is_split", "module", "op", "open_ids", "reason", "renewals", "type")

    def __init__(self, error: Error) -> None:
        # What cannot be traced may have parts that can; an op that is not supported is not so in any part.
        self.is_split = type(error) in (CaptureError, LeftError)
        self.open_ids: frozenset[int] = frozenset()
        """The ids of the modules, this one and below, that have what its calls change, or of which data decide what they do:
        between these are parts that have programs."""
        self.renewals = 0
        """Calls in which Dynamo found other pieces, of a module that each call changes."""
        # Not the exception itself: its traceback would keep the call's arguments alive.
        self.type = UnsupportedError if isinstance(error, UnsupportedError) else type(error)
        self.reason = str(error)
        self.module: str = getattr(error, "module", "")
        self.op: str = getattr(error, "op", "")

    def error(self) -> Error:
        """The exception, fresh."""
        if issubclass(self.type, CaptureError):
            return self.type(self.reason, module=self.module, op=self.op)
        return self.type(self.reason)


class _Question:
    """What is read out of the tensors of a call, and what then stands for it."""

    __slots__ = ("entries", "is_free", "prelude")

    def __init__(self, prelude: Prelude, is_free: bool) -> None:
        self.prelude = prelude
        self.is_free = is_free
        """Whether a number that is the answer is an argument of the programs."""
        self.entries: dict[Any, _Question | Ready | _Eager] = {}

    def key(self, answer: Any) -> Any:
        if isinstance(answer, Tensor):
            return tuple(answer.shape)
        return (answer == 0, answer == 1, answer < 0) if self.is_free else answer


class _Reading:
    """A key of which the values of tensors decide the program: answers are read one after another, on a way that each of
    them may part.

    Threads: entries are only added, under the dispatcher's lock or by one operation of a dictionary.
    """

    def __init__(self, reads: Reads) -> None:
        self.captures = 0
        """How many programs were captured for it."""
        self._begin = reads.begin
        self.first = _Question(reads.preludes[0], 0 in reads.free)

    def find(self, leaves: list[Leaf]) -> Ready | _Eager | None:
        """What stands for a call; its answers are leaves then, too, if that is a program."""
        count = len(leaves)
        found, _, _ = self._follow(leaves)
        if not isinstance(found, Ready):
            del leaves[count:]
        # What is read is a key of its own nearly each time: the pieces that Dynamo finds serve all.
        return _Eager(CaptureError(_OTHERS)) if found is None and self.captures >= _MAX_READ else found

    def _follow(self, leaves: list[Leaf]) -> tuple[Ready | _Eager | None, _Question, Any]:
        """The way of a call: what is at its end, the last question, and the key of its answer."""
        at: _Question | Ready | _Eager | None = self.first
        values = self._begin(leaves)
        while isinstance(at, _Question):
            question, answer = at, at.prelude.run(values)
            leaves.append(answer)
            key = question.key(answer)
            at = question.entries.get(key)
        return at, question, key

    def add(self, leaves: Sequence[Leaf], entry: Ready | _Eager) -> None:
        """Remembers what stands for a call, forgetting all above a bound."""
        if isinstance(entry, _Eager):
            found, question, key = self._follow(list(leaves))
            if found is None:
                question.entries[key] = entry
            return
        assert entry.reads is not None, "a program of this key reads something"
        reads = entry.reads
        at: _Question = self.first
        for i, answer in enumerate(reads.answers):
            if at.is_free and i not in reads.free:
                at.is_free = False
                at.entries.clear()
            key = at.key(answer)
            if len(at.entries) >= _MAX_KEYS:
                at.entries.clear()
            if i + 1 == len(reads.answers):
                break
            behind = at.entries.get(key)
            if not isinstance(behind, _Question):
                behind = at.entries[key] = _Question(reads.preludes[i + 1], i + 1 in reads.free)
            at = behind
        at.entries[key] = entry


class _Numbers:
    """A key of which some numbers decide the program: by value, or where they are its arguments, by the values that
    programs treat specially (0, 1 and negative ones)."""

    __slots__ = ("by_value", "entries", "free")

    def __init__(self, by_value: tuple[int, ...], free: tuple[int, ...]) -> None:
        self.by_value = by_value
        self.free = free
        self.entries: dict[tuple[Any, ...], Ready | _Eager | _Reading] = {}

    def key(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        if not self.free:
            return tuple([leaves[i] for i in self.by_value])
        marks = [(leaves[i] == 0, leaves[i] == 1, leaves[i] < 0) for i in self.free]
        return (*[leaves[i] for i in self.by_value], *marks)

    def without_programs(self) -> _Numbers | None:
        """What is known of calls that have none, if there are any."""
        found = _Numbers(self.by_value, self.free)
        found.entries.update((at, entry) for at, entry in list(self.entries.items()) if isinstance(entry, _Eager))
        return found if found.entries else None


class _Epoch:
    """Everything compiled for one structure of the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watch = Watch(engine.structure, (), engine.surroundings)
        self.entries: dict[_Key, _Numbers] = {}
        self.former: set[_Key] = set()
        """Keys of entries that were made for other numbers in attributes."""
        self.changing: dict[_Key, _Eager] = {}
        """Keys whose calls change the module itself, also into what this is for; shared with the epochs of these."""
        self.split: Split | None = None
        """Set once a call of this structure could not be captured."""
        self.regions: Regions | None = None
        """Set once Python had to run between its submodules."""
        self.left: dict[_Key, int] = {}
        """How often calls of a key and numbers left this state while they were captured."""
        self.waited = 0
        """Calls that ran without a program because states like this one do not last."""

    @property
    def structure(self) -> Structure:
        """What the module looked like when it was last looked at."""
        return self.engine.structure

    def find(self, key: _Key, leaves: list[Leaf]) -> Ready | _Eager | None:
        """What stands for a call. Where that reads values of tensors, these are leaves then, too."""
        numbers = self.entries.get(key)
        found = None if numbers is None else numbers.entries.get(numbers.key(leaves))
        if found is None:
            return self.changing.get(key)
        return found.find(leaves) if isinstance(found, _Reading) else found

    def add(self, key: _Key, leaves: Sequence[Leaf], entry: Ready | _Eager, is_new: bool = False) -> None:
        """Remembers ``entry`` for this key, captured just now if ``is_new``, forgetting the oldest ones above a bound."""
        places = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
        free = tuple(i for i in places if isinstance(entry, Ready) and i in entry.free_numbers)
        by_value = tuple(i for i in places if i not in free)
        numbers = self.entries.get(key)
        if numbers is None or numbers.by_value != by_value:
            if numbers is not None and not isinstance(entry, Ready):
                return
            while len(self.entries) >= _MAX_KEYS:
                self.entries.pop(next(iter(self.entries)), None)
            numbers = self.entries[key] = _Numbers(by_value, free)
        while len(numbers.entries) >= _MAX_KEYS:
            numbers.entries.pop(next(iter(numbers.entries)), None)
        at = numbers.key(leaves)
        known = numbers.entries.get(at)
        if isinstance(entry, Ready) and entry.reads is not None:
            if not isinstance(known, _Reading):
                known = numbers.entries[at] = _Reading(entry.reads)
            known.captures += is_new
            known.add(leaves, entry)
        elif isinstance(known, _Reading):
            known.add(leaves, entry)
        else:
            numbers.entries[at] = entry

    def renumber(self) -> None:
        """Lets go of what is ready to run with the numbers that attributes had; the programs are the same."""
        if len(self.former) >= _MAX_KEYS:
            self.former.clear()
        self.former.update(self.entries)
        self.entries.clear()

    def retire(self) -> None:
        """Lets go of the module's tensors; the programs stay for when this structure comes back, and so does what is known
        of calls that have none: to find that again takes an attempt to capture them."""
        kept = {key: numbers.without_programs() for key, numbers in list(self.entries.items())}
        self.entries = {key: numbers for key, numbers in kept.items() if numbers is not None}
        self.former.clear()
        self.changing = {}
        self.split = None
        self.regions = None
        self.engine.release()
        self.watch = Watch(Structure(_EMPTY), ())
        self.engine.structure = self.structure.bare()


_EMPTY = torch.nn.Module()


_threads = 0


def follow_threads() -> None:
    """Gives the CPU backend as many threads as torch has."""
    global _threads
    _threads = torch.get_num_threads()
    _native.set_num_threads(_threads)


def _count(counter: itertools.count[int]) -> int:
    """How often ``next`` was called on a counter."""
    # Its text is all that Python 3.14 shows of it.
    return int(repr(counter)[len("count(") : -1])


class Dispatcher:
    """Compiled state of one module, and the way of a call through it.

    Args:
        module: The module; stays eager itself.
        options: How to compile it.
        report: Told what ran eager, and why, in place of counting and warning: this module is a piece of another.
        lifting: Which numbers in attributes are arguments of programs, where another module knows it already.
        budget: What tuning may take, where others share it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: CompileOptions,
        report: Callable[[Error, str], None] | None = None,
        lifting: Lifting | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.lifting = lifting or Lifting()
        self.budget = budget or Budget(options.tune_budget_s)
        """What tuning may still take: of this module, its pieces and weight sets, and of the pipeline around it."""
        self.module = module
        self.options = options
        self._report = report
        self.name = type(module).__name__
        self.fallbacks: dict[Fallback, int] = {}
        self._eager: set[object] = set()
        """Contexts in which its calls run eager."""
        self.disabled = _native.is_on("OXIDIFF_DISABLE")
        self.captures = 0
        self.obstacle: str | None = None
        """Why no call of this module can run compiled."""
        self._is_scripted: bool | None = None
        """Whether it has a submodule that is TorchScript, once that was looked for."""
        self._recounted = 0
        """How often numbers in buffers changed that are constants of programs."""
        self._calls = itertools.count()
        self._eager_calls = itertools.count()
        self._pending: set[_Key] = set()
        self._warned: set[Fallback] = set()
        self._kept: set[tuple[str, _Key]] = set()
        self._beside: dict[str, _Eager] = {}
        """What is known of calls with arguments that no program takes, by why."""
        self._writing: _Eager | None = None
        """What is known of all calls, once they were seen to write outside of the module."""
        self._changing: set[_Key] = set()
        """Keys whose last call changed the module itself."""
        self._alike: dict[Any, _Eager] = {}
        """For calls with leaves of the same sorts as those that change the module, what is known of these."""
        self._stateful: dict[frozenset[types.CodeType], _Eager] = {}
        """What is known of all calls, where functions of such code are in the place of a ``forward``."""
        self._settled = 0
        self._patience = Patience(STATES)
        self._waited = 0
        """Calls in states that were not given a program."""
        self._restless: _Eager | None = None
        """What is known of calls in states that do not last."""
        self.effective = EffectiveWeights()
        """The weights of its LoRA layers."""
        self._scaled: dict[int, dict[str, Any]] = {}
        """Running calls from which a factor for adapters was taken, as they were; eager needs it."""
        self._given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Running calls in which numbers of numpy's were replaced, as they were; eager needs them."""
        self._sets: dict[str, WeightSet] = {}
        self._used: WeightSet | None = None
        self._is_rescaled = False
        """Whether a call had a factor for its adapters."""
        self._patience_outside = Patience(OUTSIDE)
        """Of what its code finds outside of it."""
        self._given_up: str | None = None
        """What of that changes too often to be followed."""
        self._is_suspected = False
        """Whether something outside was set in the course of the capture that is under way."""
        self._missed: set[int] = set()
        """Ids of tensors that may have been written since their weights were bound."""
        self._epoch: _Epoch | None = None
        self._entered: _Epoch | None = None
        """The epoch that is the current one, or was until its weights were to be bound anew."""
        self._epochs: dict[bytes, _Epoch] = {}
        """By the digest of the fingerprint of their structure, which they hold; what was entered last is the last."""
        self._regions: tuple[Regions, ...] = ()
        """What ran with Python between its submodules, what was made last at the end."""
        self.path = ""
        """Where it is in the module that this is a part of."""
        self._remembered: tuple[_Epoch, ...] = ()
        """The same, for those who only look and do not wait for a thread that compiles."""
        self._lock = threading.RLock()
        _alive.add(self)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module with ``args`` and ``kwargs``, compiled where possible. Hooks of the module itself are the
        caller's business."""
        used = self._used
        if used is not None:
            epoch = self._epoch
            if epoch is None or epoch.watch.poll():
                epoch = self._current_epoch()
            return used.follow(epoch.structure)(args, kwargs)
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

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_scripted is None:
            self._look_for_scripts()
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            return self._fall_back(UnsupportedError(mode), args, kwargs)
        leaves: list[Leaf] = []
        try:
            key = (mode, key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            plain = plain_numbers(args, kwargs)
            if plain is not None:
                return self._call_plain(args, kwargs, *plain)
            return self._call_beside(UnsupportedError(f"{error} is passed to it"), args, kwargs)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            # Whatever the module has become.
            return self._fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
        epoch = self._epoch
        if epoch is None or epoch.watch.poll():
            if is_captured(leaves):
                return self._fall_back(UnsupportedError(_COLD), args, kwargs)
            epoch = self._idle_epoch()
            if epoch is None:
                return self._run_meanwhile(args, kwargs)
        if torch.is_grad_enabled() and epoch.watch.needs_grad():
            return self._fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
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
                return self._fall_back(UnsupportedError(_COLD), args, kwargs)
            return self._first_call(key, args, kwargs, leaves)
        if entry.is_split and not self.options.strict:
            result = self._run_split(epoch, entry, args, kwargs)
        else:
            result = self._run_regions(epoch, entry, args, kwargs)
        self._follow(epoch, key, entry, leaves)
        return result

    def _look_for_scripts(self) -> None:
        """Before the first call: a copy has no submodules yet when this object is made."""
        scripts = (n for n, child in self.module.named_modules() if isinstance(child, torch.jit.ScriptModule))
        script = next(scripts, None)
        self._is_scripted = script is not None
        if script is not None:
            self.obstacle = f"its submodule {script} is TorchScript"

    def _call_beside(self, error: UnsupportedError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with an argument that no program takes, a function or an object of the caller's: its submodules are perhaps
        not given that, and have programs."""
        epoch = None if self.options.strict else self._idle_epoch()
        if epoch is None or self._is_captured():
            return self._fall_back(error, args, kwargs)
        entry = self._beside.get(str(error))
        if entry is None:
            entry = _Eager(error)
            entry.open_ids = frozenset((id(self.module),))
            self._beside[str(error)] = entry
        result = self._run_regions(epoch, entry, args, kwargs)
        self._follow(epoch, (str(error),), entry, [])
        return result

    def _call_plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: tuple[Any, ...], plain_kwargs: dict[str, Any]
    ) -> Any:
        """A call with numbers of numpy's, which is captured with Python's."""
        self._given[id(plain_kwargs)] = args, kwargs
        try:
            return self._call(plain, plain_kwargs)
        finally:
            del self._given[id(plain_kwargs)]

    def _call_scaled(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: dict[str, Any], scale: float) -> Any:
        """A call with a factor for all adapters: it belongs to the weights, so nobody else changes them meanwhile.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            plain: The same without the factor.
            scale: The factor.
        """
        epoch = self._epoch
        if epoch is not None and self._is_captured() and (scale != self.effective.scale or epoch.watch.poll()):
            return self._fall_back(UnsupportedError(_COLD), args, kwargs)
        structure = self._current_epoch().structure
        if structure.has_other_adapters and scale != 1.0:
            reason = "a scale is passed for adapters that are not plain LoRA on layers of plain weights"
            return self._fall_back(UnsupportedError(reason), args, kwargs)
        if not structure.layers or scale == 1.0:
            return self._call_unscaled(args, plain)
        with self._lock:
            self._is_rescaled = True
            if scale != self.effective.scale:
                self._rescale(scale)
            self._scaled[id(plain)] = kwargs
            try:
                return self._call(args, plain)
            finally:
                del self._scaled[id(plain)]

    def _call_unscaled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without such a factor, where others may have had one: nobody puts theirs in the weights meanwhile."""
        if self.effective.scale != 1.0 and self._is_captured():
            return self._fall_back(UnsupportedError(_COLD), args, kwargs)
        if not self.options.background:
            # An interrupt cannot come between taking the lock and being ready to give it back.
            with self._lock:
                return self._call_at_one(args, kwargs)
        if not self._lock.acquire(blocking=False):
            return self._run_meanwhile(args, kwargs)
        try:
            return self._call_at_one(args, kwargs)
        finally:
            self._lock.release()

    def _call_at_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.effective.scale != 1.0:
            self._rescale(1.0)
        return self._call(args, kwargs)

    def _is_captured(self) -> bool:
        """Whether work on the module's device is only recorded now."""
        epoch = self._epoch
        device = None if epoch is None else epoch.engine.device
        return device is not None and device.is_capturing()

    def _rescale(self, scale: float) -> None:
        with self._lock:
            epoch = self._current_epoch()
            self._epoch = None
            self.effective.scale = scale
            self._refresh(epoch)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
        """Captures and compiles for this call without running it.

        Raises:
            Error: Why the call cannot run compiled.
        """
        if self._used is not None:
            used = self._used.follow(self._current_epoch().structure)
            return used.prepare(args, kwargs)
        if self._is_scripted is None:
            self._look_for_scripts()
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            raise UnsupportedError(mode)
        args, kwargs = self._as_captured(args, kwargs)
        leaves: list[Leaf] = []
        try:
            key = (mode, key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            raise UnsupportedError(f"{error} is passed to it") from None
        with self._lock:
            return self._ready(key, args, kwargs, leaves)

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
        args, kwargs = self._as_captured(args, kwargs)
        with torch.no_grad():
            ready = self.prepare(args, kwargs)
        leaves: list[Leaf] = []
        key_of(args, kwargs, leaves)
        return ready.parts(ready.complete(leaves))

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """One timed run of this call; raises as :meth:`prepare`."""
        with torch.no_grad():
            args, kwargs = self._as_captured(args, kwargs)
            ready = self.prepare(args, kwargs)
            leaves: list[Leaf] = []
            key_of(args, kwargs, leaves)
            return ready.profile(ready.complete(leaves))

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._as_given(args, kwargs)
        return self.forward()(*args, **kwargs)

    def _as_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A running call as its caller made it: with numpy's numbers, and the factor for adapters."""
        args, kwargs = self._given.get(id(kwargs), (args, kwargs))
        return args, self._scaled.get(id(kwargs), kwargs)

    def _first_call(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Any:
        epoch = self._epoch
        if epoch is not None and not self.options.strict:
            if self._patience.is_out and self._has_to_wait(epoch):
                return self._run_regions(epoch, self._restless_in(epoch), args, kwargs)
            if epoch.left and self._leaves(epoch, _with_numbers(key, leaves)):
                return self._fall_back(UnsupportedError(_LEAVING), args, kwargs)
        is_patient = self.options.background and self.options.check is None and not self._is_at_hand(key, args, kwargs)
        if is_patient and self._start_background(key, args, kwargs, leaves):
            return self._run_meanwhile(args, kwargs)
        if self._alike and (known := self._alike.get(_sorts_of(leaves))) is not None:
            now = self._current_epoch()
            if now.changing:
                # Another size of calls that change the module.
                result = self._run_regions(now, known, args, kwargs)
                self._changing.add(key)
                self._follow(now, key, known, leaves)
                return result
        if self._writing is not None:
            now = self._current_epoch()
            now.add(key, leaves, self._writing)
            return self._run_regions(now, self._writing, args, kwargs)
        if (stateful := self._find_stateful()) is not None:
            now = self._current_epoch()
            now.add(key, leaves, stateful)
            result = self._run_regions(now, stateful, args, kwargs)
            self._follow(now, key, stateful, leaves)
            return result
        try:
            with self._lock:
                ready = self._ready(key, args, kwargs, leaves)
        except Error as error:
            # Eager would need more memory, not less.
            if isinstance(error, OutOfMemoryError) or (self.options.strict and isinstance(error, UnsupportedError)):
                raise
            # A wrong argument fails in eager as well, with the exception that its caller expects.
            entry = self._entry_without_program(error, key)
            # An exception that `forward` itself raised is eager's to raise, or to do without.
            is_set_up = self._may_be_set_up(error, key)
            is_for_now = is_set_up or isinstance(error, _PASSING) or error.__cause__ is not None
            if self.options.strict or is_for_now:
                result = self._fall_back(error, args, kwargs, is_strict=False)
            elif entry.is_split and not (entry.open_ids and any(self._regions)):
                result = self._run_split(self._current_epoch(), entry, args, kwargs)
            else:
                result = self._run_regions(self._current_epoch(), entry, args, kwargs)
            epoch = self._epoch
            self._settle_writing(epoch, entry)
            # What another thread did is nothing to remember, nor is a number that is not finite this time.
            if epoch is not None and not isinstance(error, _PASSING) and not is_set_up:
                epoch.add(key, leaves, entry)
                self._follow(epoch, key, entry, leaves)
            if self.options.strict:
                raise
            return result
        epoch = self._epoch
        # What a closure holds is known once it is captured.
        if epoch is not None and torch.is_grad_enabled() and epoch.watch.needs_grad():
            return self._fall_back(UnsupportedError(self._grad_reason()), args, kwargs)
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
            epoch = self._current_epoch()
            return self._rescue(epoch, key, ready, from_native(error), args, kwargs, leaves)
        if is_checked:
            # Eager draws the random numbers that the program drew.
            for put, state in states:
                put(state)
            self._check(ready, result, args, kwargs)
        return result[0] if ready.writes else result

    def _settle_writing(self, epoch: _Epoch | None, entry: _Eager) -> None:
        """After a call, if all calls turned out to write outside of the module: nobody looks there any more, and what was
        found to have a program has none."""
        if entry is not self._writing or epoch is None:
            return
        if epoch.engine.surroundings is not None:
            epoch.engine.surroundings.forget_changed(with_code=False)
        with self._lock:
            self._epochs.clear()
            self._epoch = self._entered = None
            self._remembered = ()

    def _run_writing(self, ready: Ready, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Any:
        """A call that writes into lists and dictionaries that are passed to it: once the program is through."""
        bound = ready.bind(args, kwargs)
        every = [id(container) for _, container in containers(bound)]
        if len(set(every)) != len(every):
            raise CaptureError("a list or dictionary that it writes into is passed to it twice")
        result, values = ready.run(leaves)
        write(bound, ready.writes, values)
        return result

    def _may_be_set_up(self, error: Error, key: _Key) -> bool:
        """Whether the module kept something for the first time, and may not the next: a table that it makes when called. So
        may an exception be, which perhaps came from another thread."""
        cause = type(error.__cause__).__module__.partition(".")[0]
        is_raised = isinstance(error, CaptureError) and cause not in ("builtins", "torch", __name__.partition(".")[0])
        what = _kept_by(error, key)
        if not (isinstance(error, KeptError) or is_raised) or what in self._kept:
            return False
        self._kept.add(what)
        return True

    def _follow(self, epoch: _Epoch, key: _Key, entry: _Eager, leaves: Sequence[Leaf]) -> None:
        """After a call without a program: where such calls change the module, as one that counts its steps, what is known of
        them holds of what it has become."""
        if not epoch.watch.poll() & STRUCTURE:
            if key in self._changing:
                self._changing.discard(key)
                # Perhaps it has a program now.
                if self._settled < _MAX_SETTLED and epoch.changing.pop(key, None) is not None:
                    self._settled += 1
                    self._alike.clear()
            return
        if is_captured(leaves) or not self._lock.acquire(blocking=not self.options.background):
            return
        try:
            if self._epoch is not epoch:
                return
            split, changing = epoch.split, epoch.changing
            after = self._current_epoch()
            if after is epoch:
                return
            is_as_hooked = (after.structure.obstacle is None) == (epoch.structure.obstacle is None)
            if is_as_hooked and after.split is None:
                # Dynamo checks what its pieces depend on; to find them again takes as long as the first time.
                after.split = split
            # What a first call sets up, later ones leave as it is.
            if key in self._changing and is_as_hooked and len(changing) < _MAX_KEYS:
                changing[key] = entry
                if entry.open_ids and not entry.is_split and len(self._alike) < _MAX_KEYS:
                    self._alike[_sorts_of(leaves)] = entry
                after.split, after.changing = split, changing
            elif len(self._changing) < _MAX_KEYS:
                self._changing.add(key)
        finally:
            self._lock.release()

    def _run_split(self, epoch: _Epoch, entry: _Eager, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that cannot be captured whole, in pieces."""
        with self._lock:
            split = epoch.split
            if split is None:
                # A piece is Dynamo's, not the user's: it is never stored.
                options = self.options.replace(cache=False, graph_file=None)
                make = functools.partial(Dispatcher, options=options, budget=self.budget)
                split = epoch.split = Split(self.forward(), self.options.dynamic, make)
        known = len(split.pieces)
        try:
            result, compiled, problems = split(*self._as_given(args, kwargs))
        except CaptureError as error:
            entry.is_split, entry.reason = False, f"{entry.reason}; {error}"
            return self._run_regions(epoch, entry, args, kwargs)
        if compiled:
            self._record(entry.error(), f"runs in {len(split.pieces)} pieces with Python between them")
            for problem, what in problems:
                self._record(problem, f"has a piece that {what}")
            if entry in epoch.changing.values() and len(split.pieces) > known:
                entry.renewals += 1
                if entry.renewals == _MAX_RENEWALS:
                    entry.is_split = False
                    entry.reason += "; each call makes other pieces of it"
        else:
            # Dynamo's bookkeeping gains nothing here.
            entry.is_split = False
            next(self._eager_calls)
            self._record(entry.error())
        return result

    def _run_regions(self, epoch: _Epoch, entry: _Eager, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call for which there is no program and no piece: in Python, with submodules that are compiled."""
        regions = None
        if not self.options.strict and (entry.open_ids or epoch.structure.obstacle is not None):
            regions = self._regions_of(epoch, entry.open_ids)
        if not regions:
            return self._fall_back(entry.error(), args, kwargs)
        result, compiled, problems = regions(*self._as_given(args, kwargs))
        if compiled:
            self._record(entry.error(), f"runs in {len(regions.parts)} parts with Python between them")
        else:
            next(self._eager_calls)
            self._record(entry.error())
        for problem, what in problems:
            self._record(problem, what)
        return result

    def _entry_without_program(self, error: Error, key: _Key) -> _Eager:
        """What is known of calls after an attempt to capture one, with this key, failed."""
        entry = _Eager(error)
        replaced = (
            frozenset(replaced_modules(self.module)) if entry.is_split or isinstance(error, LeftError) else frozenset()
        )
        if isinstance(self.module, Island) or any(what in str(error) for what in _OF_GRADIENTS):
            # A piece is not split again, and where `forward` itself asks for gradients, pieces have none.
            entry.is_split = False
        elif isinstance(error, LeftError):
            tables = frozenset(map(id, error.changed))
            entry.open_ids = frozenset(id(child) for child in self.module.modules() if leads_to(child, tables))
            if error.leaks is not None:
                entry.open_ids = entry.open_ids.union(*map(self._way_down, error.leaks.paths))
            if error.is_outside:
                entry.open_ids |= self._way_to(error)
                if _kept_by(error, key) in self._kept:
                    # Of what is outside of it nothing shows which calls leave it as it is.
                    self._writing = entry
            if replaced and self._have_most(entry.open_ids | replaced):
                self._settle_stateful(entry, entry.open_ids | replaced)
        elif entry.is_split:
            # Dynamo takes half a minute for what its own parts are captured in within a second.
            way = self._way_to(error)
            if replaced and self._have_most(way | replaced):
                self._settle_stateful(entry, way | replaced)
            elif way and self._have_most(way):
                entry.open_ids, entry.is_split = way, False
        return entry

    def _settle_stateful(self, entry: _Eager, open_ids: frozenset[int]) -> None:
        """What is known of calls with functions in the place of a ``forward``: they run as they are. It holds of other
        functions of the same code, which some libraries put there anew for each picture."""
        entry.open_ids, entry.is_split = open_ids, False
        if len(self._stateful) < _MAX_EPOCHS:
            self._stateful[frozenset(replaced_modules(self.module).values())] = entry

    def _has_to_wait(self, epoch: _Epoch) -> bool:
        """Whether the state of the module is one that does not last, as far as is known: nothing is made for its calls."""
        if epoch.entries or epoch.changing or epoch.waited >= WAIT:
            return False
        epoch.waited += 1
        self._waited += 1
        return True

    def _leaves(self, epoch: _Epoch, at: _Key) -> bool:
        """Whether a call makes another state of the module, for which there are programs: eager makes that without a trace.
        Another thread may have made it, so this is tried again now and then."""
        count = epoch.left.get(at, 0)
        if count < _MAX_LEFT:
            return False
        epoch.left[at] = count + 1 if count < _MAX_LEFT + WAIT else 1
        return True

    def _restless_in(self, epoch: _Epoch) -> _Eager:
        """What is known of calls in states that do not last: what changes runs as it is."""
        paths = self._patience.changing
        ways = list(map(self._way_down, paths))
        open_ids = frozenset((id(self.module),)).union(*ways)
        if not all(ways):
            # What functions in the place of a `forward` hold, and modules beside.
            open_ids |= frozenset(replaced_modules(self.module))
        known = self._restless
        if known is None or known.open_ids != open_ids:
            names = ", ".join(filter(None, paths[:2])) or "the module itself"
            others = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
            reason = f"attributes of {names}{others} are others in nearly every call; pass what changes as an argument"
            known = self._restless = _Eager(UnsupportedError(reason if known is None else known.reason))
            known.open_ids = open_ids
        return known

    def _find_stateful(self) -> _Eager | None:
        """What is known of all calls, for the functions that are in the place of a ``forward`` now."""
        if not self._stateful:
            return None
        replaced = replaced_modules(self.module)
        found = self._stateful.get(frozenset(replaced.values())) if replaced else None
        if found is not None and not found.open_ids.issuperset(replaced):
            found.open_ids |= frozenset(replaced)
        return found

    def _have_most(self, open_ids: frozenset[int]) -> bool:
        """Whether the submodules below and beside these have most of the module; if not, nothing is kept of them."""
        with self._lock:
            epoch = self._current_epoch()
            before = self._regions, epoch.regions
            is_most = self._regions_of(epoch, open_ids).have_most(self.module)
            if not is_most:
                self._regions, epoch.regions = before
            return is_most

    def _way_to(self, error: Error) -> frozenset[int]:
        """The ids of the modules from this one down to where an attempt to capture it failed; none if that is not known."""
        return self._way_down(getattr(error, "module", ""))

    def _way_down(self, path: str) -> frozenset[int]:
        """The ids of the modules from this one down to that at a path; none if there is no such."""
        module: torch.nn.Module | None = self.module
        found = {id(module)}
        for name in filter(None, path.split(".")):
            module = module._modules.get(name) if module is not None else None
            found.add(id(module))
        return frozenset(found) if module is not None else frozenset()

    def _regions_of(self, epoch: _Epoch, open_ids: frozenset[int]) -> Regions:
        """The submodules of an epoch that have programs of their own."""
        if epoch.regions is not None and epoch.regions.open_ids == open_ids:
            return epoch.regions
        with self._lock:
            forward = self.forward()
            structure = epoch.structure
            regions = next((one for one in self._regions if one.fits(structure, forward, open_ids)), None)
            if regions is None:
                known = {id(part.module): part for one in self._regions for part in one.parts.values()}
                options = self.options.replace(graph_file=None)

                def make(module: torch.nn.Module, report: Callable[[Error, str], None]) -> Dispatcher:
                    part = known.get(id(module))
                    if part is None:
                        return Dispatcher(module, options, report=report, budget=self.budget)
                    part._report = report
                    return part

                bare = {key: one for regions in self._regions for key, one in regions.bare.items()}
                regions = Regions(structure, self.module, forward, open_ids, make, bare)
                self._regions = (*self._regions, regions)[-_MAX_REGIONS:]
            epoch.regions = regions
            return regions

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
        if self.disabled or self._eager or self._used is not None:
            return method(instance, *args, **kwargs)
        name = method.__name__
        reason = f"its method {name} is called; only calls of a module and of compiled submodules are compiled"
        if not others and not name.startswith("generate"):
            found = self._regions_for_method(args, kwargs)
            if isinstance(found, Regions):
                next(self._calls)
                result, compiled, problems = found.call_method(method, args, kwargs)
                if not compiled:
                    next(self._eager_calls)
                    self._record(UnsupportedError(reason))
                for problem, what in problems:
                    self._record(problem, what)
                return instance if found.is_own(result) else result
            reason = found or reason
            if self.options.strict:
                raise UnsupportedError(reason)
        before = self.calls + sum(other.calls for other in others)
        result = method(instance, *args, **kwargs)
        if self.calls + sum(other.calls for other in others) == before:
            next(self._calls)
            next(self._eager_calls)
            self._record(UnsupportedError(reason))
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
        epoch = self._idle_epoch()
        if epoch is None:
            return "its submodules are compiled in the background"
        try:
            return self._regions_of(epoch, frozenset((id(self.module),))) or None
        except UnsupportedError as error:
            return str(error)

    # -- in the background ---------------------------------------------------------------------------------------------

    def _start_background(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> bool:
        """Has the entry of a key made by the background thread; false if there can be none."""
        if key in self._pending:
            return True
        this = weakref.ref(self)
        autocast = autocast_state()

        def task() -> None:
            dispatcher = this()
            if dispatcher is not None:
                with autocast_as(autocast):
                    dispatcher._prepare_in_background(key, args, kwargs, leaves)

        is_submitted = False
        try:
            self._pending.add(key)
            is_submitted = submit(task)
        finally:
            # After an interrupt, too: the next call starts over.
            if not is_submitted:
                self._pending.discard(key)
        return is_submitted

    def _is_at_hand(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call was ready until numbers in attributes changed, and has a program for the new ones."""
        epoch = self._epoch
        if epoch is None or key not in epoch.former or not self._lock.acquire(blocking=False):
            return False
        try:
            return epoch is self._epoch and epoch.engine.knows(args, kwargs)
        finally:
            self._lock.release()

    def _prepare_in_background(
        self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]
    ) -> None:
        try:
            with self._lock, torch.no_grad():
                self._ready(key, args, kwargs, leaves)
        except Error as error:
            entry = self._entry_without_program(error, key)
            epoch = self._epoch
            if epoch is not None and not (isinstance(error, _PASSING) or self._may_be_set_up(error, key)):
                epoch.add(key, leaves, entry)
            # Last: whoever reads the reason in the report finds calls running as it says.
            self.fallbacks.setdefault((entry.module, entry.op, entry.reason), 0)
        finally:
            self._pending.discard(key)

    def _run_meanwhile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call in eager PyTorch while its program is being made: no fallback, nothing to warn of."""
        next(self._eager_calls)
        return self._forward(args, kwargs)

    def _idle_epoch(self) -> _Epoch | None:
        """The current epoch; ``None`` where that would have to wait for the background thread."""
        if not self.options.background:
            return self._current_epoch()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._current_epoch()
        finally:
            self._lock.release()

    def _ready(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Ready:
        """The entry of a key, captured and compiled if it is new; ``leaves`` get what it reads out of tensors. The lock is
        held."""
        at = _with_numbers(key, leaves)
        self._is_suspected = False
        for _ in range(_MAX_CHANGES):
            before = self._current_epoch()
            try:
                ready = self._made_ready(key, args, kwargs, leaves)
            except ChangedError as error:
                changed = error
                if len(before.left) < _MAX_KEYS:
                    before.left[at] = before.left.get(at, 0) + 1
            else:
                # Where data decide, calls of one key may leave a state or not.
                before.left.pop(at, None)
                return ready
        raise changed

    def _made_ready(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Ready:
        """As :meth:`_ready`; raises a :class:`ChangedError` if another thread changes the module meanwhile."""
        epoch = self._current_epoch()
        if epoch.engine.is_outdated():
            # Nobody watches that before there is a program: an attempt before this one failed.
            epoch = self._leave_outdated(epoch)
            self._refresh(epoch)
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
            return entry
        if entry is not None:
            raise entry.error()
        if epoch.structure.obstacle is not None:
            path, reason = epoch.structure.obstacle
            raise UnsupportedError(reason, module=path)
        if self._given_up is not None:
            raise UnsupportedError(self._given_up)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (unfit := tensor_obstacle(leaf)) is not None:
                raise UnsupportedError(unfit)
        if epoch.structure.has_other_adapters and (layers := disabled_while_merged(self.module)):
            if self.options.background:
                raise UnsupportedError("adapters that are merged were disabled: PEFT takes them out in this call")
            for layer in layers:
                layer.unmerge()
            raise ChangedError(CHANGED)
        engine, is_new_state, is_lost = epoch.engine, len(self._epochs) > 1 and not epoch.entries, True
        before, adopted = engine.captures, engine.adoptions
        try:
            ready = epoch.engine.prepare(args, kwargs, leaves, functools.partial(self._confirm, epoch))
            is_lost = False
        except (ChangedError, CacheWarning, FallbackWarning):
            is_lost = False
            raise
        except Error:
            self._confirm(epoch)
            if not epoch.structure.inputs:
                raise
            # Perhaps only because of the numbers that are to be arguments.
            self.lifting.pin(epoch.structure.form, epoch.structure.inputs)
            self._reentered()
            return self._made_ready(key, args, kwargs, leaves)
        except _native.NativeError as error:
            raise from_native(error) from error
        except Exception as error:
            if is_interrupt(error):
                raise
            if isinstance(error, TypeError):
                # Arguments that do not fit the signature: eager says so in its own words.
                raise CaptureError(str(error)) from error
            # A table that another thread changed while it was read.
            self._confirm(epoch)
            raise CaptureError(f"internal: {type(error).__name__}: {error}") from error
        finally:
            self.captures += engine.captures - before
            if is_new_state:
                made = engine.captures - before, engine.adoptions - adopted
                self._patience.spend(self.calls - self._waited, *made, is_lost=is_lost)
        for part in (part for regions in self._regions for part in regions.parts.values()):
            # What is bound to weights is the whole again.
            part.rest()
        self._watch(epoch)
        epoch.add(key, leaves, ready, is_new=epoch.engine.captures > before)
        if epoch.engine.pinned:
            self.lifting.pin(epoch.structure.form, epoch.engine.pinned)
            self._reentered()
        if ready.reads is not None:
            leaves += ready.reads.answers
        return ready

    def _confirm(self, epoch: _Epoch, holds_others: bool = False) -> None:
        """Raises a :class:`ChangedError` if the module is no longer as the engine knows it.

        Args:
            epoch: What it was.
            holds_others: Whether a graph holds tensors that were found in no module. They may be weights that another
                thread replaced meanwhile.
        """
        if epoch.watch.poll() & STRUCTURE:
            if not self._look().is_as(epoch.structure) or (holds_others and epoch.watch.is_rebound()):
                raise ChangedError(CHANGED)

    def _rescue(
        self,
        epoch: _Epoch,
        key: _Key,
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
            entry = self._entry_without_program(error, key)
            self._may_be_set_up(error, key)
            result = self._run_regions(epoch, entry, args, kwargs)
            self._settle_writing(epoch, entry)
            return result
        return self._fall_back(error, args, kwargs)

    def _check(self, ready: Ready, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            expected = self._forward(args, kwargs)
        if ready.writes:
            # What eager wrote into the arguments stays there.
            given = ready.bind(args, kwargs)
            places = [(container_at(given, path), key) for path, key, is_kept in ready.writes if is_kept]
            expected = (expected, tuple(container[key] for container, key in places))
        tolerance = self.options.check
        bound = None if tolerance is True else tolerance
        problem = compare(result, expected, bound, is_guarded=self.options.nan_guard)
        if problem is not None:
            raise CheckError(
                f"{self.name}: the compiled result differs from eager: {problem}; "
                "raise the tolerance (check=...) if this is rounding, else please report it"
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def _current_epoch(self) -> _Epoch:
        """The epoch of the module as it is now, with its weights bound."""
        with self._lock:
            epoch = self._epoch
            if epoch is None:
                with collection_paused():
                    epoch = self._enter(self._first_look())
                self._refresh(epoch)
            while bits := epoch.watch.poll():
                suspects = epoch.watch.changed_tensors()
                if bits & SURROUNDINGS:
                    epoch = self._leave_outdated(epoch)
                    self._refresh(epoch, suspects)
                    continue
                is_other = not suspects.isdisjoint(map(id, epoch.structure.attribute_tensors))
                if bits & STRUCTURE or is_other or epoch.structure.is_retyped():
                    structure = self._look()
                    if structure.fingerprint != epoch.structure.fingerprint:
                        self._patience.note(epoch.watch.changed_modules())
                        if self._is_counting(epoch.structure):
                            structure = self._look()
                        if self.lifting.learn(epoch.structure, structure):
                            structure = self._look()
                        epoch = self._enter(structure)
                        self._refresh(epoch, suspects)
                        continue
                    if structure.numbers != epoch.structure.numbers:
                        epoch.renumber()
                    epoch.engine.structure = structure
                self._rebind(epoch, suspects)
            return epoch

    def _is_counting(self, before: Structure) -> bool:
        """After a change: whether numbers in buffers changed again and again, which are constants no more."""
        changed = [owner for tensor, value, owner in before.counts if int(tensor) != value]
        self._recounted += bool(changed)
        if not changed or self._recounted <= _MAX_RECOUNTED:
            return False
        VARYING.update(module for owner in changed if (module := owner()) is not None)
        return True

    def _leave_outdated(self, epoch: _Epoch) -> _Epoch:
        """The epoch of the module after its code found something else outside of it."""
        self._patience_outside.spend(self.calls, captures=1)
        if self._patience_outside.is_out and epoch.engine.surroundings is not None:
            names = ", ".join(epoch.engine.surroundings.forget_changed(with_code=True))
            self._given_up = (
                f"{names} changes again and again outside of it; pass it as an argument, or keep it in an attribute"
            )
            self._epochs.clear()
            return self._enter(self._look())
        for fingerprint, one in list(self._epochs.items()):
            if one.engine.is_outdated():
                del self._epochs[fingerprint]
        entered = self._enter(self._look())
        # What is outside may matter to nothing: then the graph is still right.
        entered.engine.before = epoch.engine
        return entered

    def _rebind(self, epoch: _Epoch, suspects: Set[int]) -> None:
        """Binds the weights as they are now, and watches them."""
        watch = None
        # A tensor in an attribute may have been replaced by another.
        while watch is None or not watch.covers(epoch.engine.watched(), epoch.engine.surroundings):
            # Watched first, bound then: what changes in between shows.
            watch = Watch(epoch.structure, epoch.engine.watched(), epoch.engine.surroundings)
            self._refresh(epoch, suspects)
        # Not before they are bound: until then the old one has other threads, and a call after an interrupt, look again.
        epoch.watch = watch

    def _refresh(self, epoch: _Epoch, suspects: Set[int] = frozenset()) -> None:
        """Binds the weights as they are now, which makes an epoch the current one. If that fails, whatever with, the next
        call starts over: the changes were seen, and would not be seen again."""
        self._epoch = None
        self._missed |= suspects
        self.effective.note_merged(epoch.structure.layers, self._missed)
        epoch.engine.refresh(self._missed)
        self._epoch = epoch
        self._missed.clear()

    def _look(self) -> Structure:
        return Structure(self.module, self.lifting.inputs)

    def _first_look(self) -> Structure:
        """As :meth:`_look`; numbers that are arguments of what is in the graph file are so here too."""
        structure = self._look()
        path = self.options.graph_file
        if path is None or not os.path.exists(path):
            return structure
        try:
            names = read_artifact(path).inputs
        except ArtifactError:
            # Whoever looks for graphs in it says what is wrong.
            return structure
        return self._look() if self.lifting.adopt(structure, names) else structure

    def _enter(self, structure: Structure) -> _Epoch:
        """The epoch of a structure, whose weights are to be bound next."""
        # An exception that comes from outside must leave behind none that watches nothing, or is bound to nothing.
        self._epoch = None
        epoch = self._epochs.pop(structure.fingerprint.digest, None)
        if epoch is None:
            engine = Engine(self.module, self.forward(), self.options, structure, self.effective, self.budget)
            engine.others = [weakref.ref(other.engine) for other in reversed(self._epochs.values())]
            epoch = _Epoch(engine)
        else:
            epoch.engine.structure = structure
            epoch.watch = Watch(structure, epoch.engine.watched(), epoch.engine.surroundings)
        self._epochs[structure.fingerprint.digest] = epoch
        self._regions = tuple(one for one in self._regions if one.is_within(structure))
        if self._entered is not None and self._entered is not epoch:
            self._entered.retire()
        self._entered = epoch
        while len(self._epochs) > _MAX_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        self._remembered = tuple(self._epochs.values())
        return epoch

    def _reentered(self) -> _Epoch:
        """The epoch of the module after other numbers of it were found to be arguments."""
        epoch = self._enter(self._look())
        self._refresh(epoch)
        return epoch

    def _watch(self, epoch: _Epoch) -> None:
        """Makes sure that the module is watched, and that it is as the engine knows it."""
        while (bits := epoch.watch.poll()) or not epoch.watch.covers(epoch.engine.watched(), epoch.engine.surroundings):
            if bits:
                structure = self._look()
                if not structure.is_as(epoch.structure):
                    raise ChangedError(CHANGED)
                epoch.engine.structure = structure
            if bits & SURROUNDINGS and epoch.engine.surroundings is not None:
                # A counter, or a warning that is given once: forward itself wrote it. What that does not write, another
                # thread did.
                epoch.engine.surroundings.forget_changed(with_code=False, only=epoch.engine.written_outside())
                if epoch.engine.is_outdated():
                    self._suspect(epoch.engine.surroundings)
                    raise ChangedError(CHANGED)
            self._rebind(epoch, epoch.watch.changed_tensors())

    def _suspect(self, surroundings: _native.Surroundings) -> None:
        """After something was set outside of the module while it was captured that its code is not seen to set.

        Raises:
            UnsupportedError: It was ``forward``, by way of ``globals()`` or the like: there is no other thread, or it is so
                once more.
        """
        if (self._is_suspected or threading.active_count() == 1) and (
            names := surroundings.forget_changed(with_code=False)
        ):
            self._given_up = f"forward changes {', '.join(names)} outside of it, which later calls see"
            raise UnsupportedError(self._given_up)
        self._is_suspected = True

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
            return find_dispatcher(module) or Dispatcher(module, self.options, lifting=self.lifting, budget=self.budget)

        made = WeightSet(self.module, source, make, self._current_epoch().structure)
        with self._lock:
            if name is None:
                name = next(f"weights{i}" for i in itertools.count(1) if f"weights{i}" not in self._sets)
            replaced = self._sets.get(name)
            self._sets[name] = made
            if replaced is not None and self._used is replaced:
                self._used = made
        return name

    def use(self, name: str | None = None) -> None:
        """Switches to a weight set; see :func:`oxidiff.use`."""
        with self._lock:
            if name is not None and name not in self._sets:
                known = ", ".join(map(repr, self._sets)) or "none"
                raise ValueError(f"no weights are bound as {name!r}; there are: {known}")
            self._used = None if name is None else self._sets[name]

    def unbind(self, name: str) -> None:
        """Drops a weight set; see :func:`oxidiff.unbind`."""
        with self._lock:
            if self._used is self._sets.get(name):
                self.use(None)
            self._sets.pop(name, None)

    def pieces(self) -> list[Dispatcher]:
        """The dispatchers of the pieces and parts that this module runs in where it cannot be captured whole, and of their
        own."""
        splits = [split for epoch in self._remembered if (split := epoch.split) is not None]
        found = [piece for split in splits for piece in list(split.pieces)]
        parts = {id(part): part for regions in self._regions for part in regions.parts.values()}
        return [*found, *parts.values(), *(piece for part in parts.values() for piece in part.pieces())]

    def rest(self) -> None:
        """Lets go of the module's tensors until its next call; programs stay."""
        with self._lock:
            epoch, self._epoch, self._entered = self._entered, None, None
            if epoch is not None:
                epoch.retire()

    def save_graph(self, path: str | os.PathLike[str]) -> None:
        """Saves what is compiled; see :func:`oxidiff.save_graph`."""
        with self._lock:
            engine = self._current_epoch().engine
            save(path, engine.artifact())

    def load_graph(self, path: str | os.PathLike[str], device: torch.device | str | int | None = None) -> None:
        """Loads what was saved; see :func:`oxidiff.load_graph`."""
        if device is not None:
            device_of(named(device))
        with self._lock, collection_paused():
            artifact = read_artifact(path)
            engine = self._current_epoch().engine
            if self.lifting.adopt(engine.structure, artifact.inputs):
                engine = self._reentered().engine
            artifact.require(engine.description(), os.fspath(path))
            try:
                engine.load(artifact)
            except _native.NativeError as error:
                raise from_native(error) from error

    def unload(self) -> None:
        """Gives back everything that was compiled; the next call compiles again."""
        for _, member in self.family():
            for piece in member.pieces():
                piece.unload()
            with member._lock:
                epochs = list(member._epochs.values())
                member._epochs.clear()
                member._remembered = ()
                member._epoch = member._entered = None
                member._regions = ()
                member._stateful.clear()
                member.effective.clear()
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

    def _fall_back(self, error: Error, args: tuple[Any, ...], kwargs: dict[str, Any], is_strict: bool = True) -> Any:
        return self.run_eager(error, lambda: self._forward(args, kwargs), is_strict)

    def run_eager(self, error: Error, run: Callable[[], Any], is_strict: bool = True) -> Any:
        """Runs a call in eager PyTorch, and only if that works counts and reports the reason.

        Args:
            error: The reason.
            run: The call.
            is_strict: Whether ``strict=True`` raises ``error`` before running.
        """
        if self.options.strict and is_strict:
            raise error
        result = run()
        next(self._eager_calls)
        if self.options.strict:
            return result
        self._record(error)
        return result

    def _record_problems(self, ready: Ready) -> None:
        for problem in ready.problems:
            self._record(problem, "runs an op in eager PyTorch")

    def _record(self, error: Error, what: str = RUNS_EAGER) -> None:
        """Counts a call that did not run as one program, and says so once."""
        if self._report is not None:
            self._report(error, what)
            return
        place: Fallback = (getattr(error, "module", ""), getattr(error, "op", ""), str(error))
        self.fallbacks[place] = self.fallbacks.get(place, 0) + 1
        path, op, reason = place
        # The same op at another size is no news.
        known = (path, op, "") if op else place
        if known not in self._warned:
            self._warned.add(known)
            where = f"{self.name}.{path}" if path else self.name
            at = f" (op {op})" if op and op not in reason else ""
            warnings.warn(f"{where} {what}: {reason}{at}", FallbackWarning, stacklevel=caller_level())

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How often the module was called."""
        return _count(self._calls)

    @property
    def eager_calls(self) -> int:
        """How many of the calls ran eager."""
        return _count(self._eager_calls)

    def engines(self) -> list[Engine]:
        """The engines of all structures that are remembered, the current one last."""
        return [epoch.engine for epoch in self._remembered]

    def _reset_lock(self) -> None:
        self._lock = threading.RLock()
        self._pending.clear()


def _with_numbers(key: _Key, leaves: Sequence[Leaf]) -> _Key:
    """A key with the numbers of a call."""
    return key, tuple([leaf for leaf in leaves if not isinstance(leaf, Tensor)])


def _kept_by(error: Error, key: _Key) -> tuple[str, _Key]:
    """What a call keeps. Tensors in a global may be a table for each size."""
    return str(error), key if isinstance(error, LeftError) and error.leaks is not None and error.is_outside else ()


def _sorts_of(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Dtypes and dimensions of tensors, types of numbers."""
    return tuple([(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves])


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
    for dispatcher in list(_alive):
        dispatcher._reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
