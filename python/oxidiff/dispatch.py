"""What happens when a compiled module is called.

:class:`Dispatcher` belongs to one compiled module. A call becomes a key (:mod:`oxidiff.call`); a key that was seen
before leads to a :class:`~oxidiff.engine.Ready` that runs at once, without a lock. A new one is captured and compiled
under the lock, so that two threads calling first compile once. What cannot run compiled runs eager, with a reason
that is counted and said once.

Invariants: whatever eager PyTorch raises for a call, this raises; a call that failed leaves nothing behind that a later
call could trip over; an exception at any point, ``KeyboardInterrupt`` included, leaves a module that works.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from . import _native
from .ambient import ambient_mode, tensor_obstacle
from .call import Leaf, NotAKeyError, key_of
from .check import compare
from .engine import Engine, Ready
from .errors import (
    CaptureError,
    CheckError,
    Error,
    FallbackWarning,
    OutOfMemoryError,
    UnsupportedError,
    from_native,
)
from .options import CompileOptions
from .watch import STRUCTURE, Structure, Watch

__all__ = ["Dispatcher", "Fallback", "find_dispatcher"]

_MAX_KEYS = 4096
_MAX_EPOCHS = 8

Fallback = tuple[str, str, str]
"""``(module path, op, reason)``."""

_Key = tuple[Any, ...]


class _Eager:
    """A key whose calls run eager, and why."""

    __slots__ = ("module", "op", "reason", "type")

    def __init__(self, error: Error) -> None:
        # Not the exception itself: its traceback would keep the call's arguments alive.
        self.type = type(error)
        self.reason = str(error)
        self.module: str = getattr(error, "module", "")
        self.op: str = getattr(error, "op", "")

    def error(self) -> Error:
        """The exception, fresh."""
        if issubclass(self.type, CaptureError):
            return self.type(self.reason, module=self.module, op=self.op)
        return self.type(self.reason)


class _Numbers:
    """A key of which some numbers decide the program: by value, or where they are its arguments, by the values that
    programs treat specially (0, 1 and negative ones)."""

    __slots__ = ("by_value", "entries", "free")

    def __init__(self, by_value: tuple[int, ...], free: tuple[int, ...]) -> None:
        self.by_value = by_value
        self.free = free
        self.entries: dict[tuple[Any, ...], Ready | _Eager] = {}

    def key(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        if not self.free:
            return tuple([leaves[i] for i in self.by_value])
        marks = [(leaves[i] == 0, leaves[i] == 1, leaves[i] < 0) for i in self.free]
        return (*[leaves[i] for i in self.by_value], *marks)


class _Epoch:
    """Everything compiled for one structure of the module."""

    def __init__(self, structure: Structure, engine: Engine) -> None:
        self.structure = structure
        self.engine = engine
        self.watch = Watch(structure, ())
        self.entries: dict[_Key, _Numbers] = {}

    def find(self, key: _Key, leaves: Sequence[Leaf]) -> Ready | _Eager | None:
        numbers = self.entries.get(key)
        return None if numbers is None else numbers.entries.get(numbers.key(leaves))

    def add(self, key: _Key, leaves: Sequence[Leaf], entry: Ready | _Eager) -> None:
        """Remembers ``entry`` for this key, forgetting the oldest ones above a bound."""
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
        numbers.entries[numbers.key(leaves)] = entry

    def retire(self) -> None:
        """Lets go of the module's tensors; the programs stay for when this structure comes back."""
        self.entries.clear()
        self.engine.release()
        self.watch = Watch(Structure(_EMPTY), ())
        self.structure.clear()


_EMPTY = torch.nn.Module()


_threads = 0


def follow_threads() -> None:
    """Gives the CPU backend as many threads as torch has."""
    global _threads
    _threads = torch.get_num_threads()
    _native.set_num_threads(_threads)


_PACKAGE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _caller() -> int:
    """The stack level of the code that called the module, for a warning raised by the caller of this function."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        frame = frame.f_back
        level += 1
    return level


def _count(counter: itertools.count[int]) -> int:
    """How often ``next`` was called on a counter."""
    return int(counter.__reduce__()[1][0])


class Dispatcher:
    """Compiled state of one module, and the way of a call through it.

    Args:
        module: The module; stays eager itself.
        options: How to compile it.
    """

    def __init__(self, module: torch.nn.Module, options: CompileOptions) -> None:
        self.module = module
        self.options = options
        self.name = type(module).__name__
        self.fallbacks: dict[Fallback, int] = {}
        self.eager_depth = 0
        self.disabled = os.environ.get("OXIDIFF_DISABLE", "0") not in ("", "0")
        self.captures = 0
        self.obstacle: str | None = None
        """Why no call of this module can run compiled."""
        self._calls = itertools.count()
        self._eager_calls = itertools.count()
        self._warned: set[Fallback] = set()
        self._epoch: _Epoch | None = None
        self._epochs: OrderedDict[Any, _Epoch] = OrderedDict()
        self._lock = threading.RLock()
        _alive.add(self)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module with ``args`` and ``kwargs``, compiled where possible. Hooks of the module itself are the
        caller's business."""
        next(self._calls)
        if torch.get_num_threads() != _threads:
            follow_threads()
        if self.disabled or self.eager_depth:
            next(self._eager_calls)
            return self._forward(args, kwargs)
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            return self._fall_back(UnsupportedError(mode), args, kwargs)
        leaves: list[Leaf] = []
        try:
            key = (mode, *key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            return self._fall_back(UnsupportedError(f"{error} is passed to it"), args, kwargs)
        epoch = self._epoch
        if epoch is None or epoch.watch.poll():
            epoch = self._current_epoch()
        if torch.is_grad_enabled() and (reason := self._grad_reason(epoch, leaves)) is not None:
            return self._fall_back(UnsupportedError(reason), args, kwargs)
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
            try:
                return entry.run(leaves)
            except Exception as error:
                return self._rescue(epoch, entry, from_native(error), args, kwargs, leaves)
        if entry is not None:
            return self._fall_back(entry.error(), args, kwargs)
        return self._first_call(key, args, kwargs, leaves)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
        """Captures and compiles for this call without running it.

        Raises:
            Error: Why the call cannot run compiled.
        """
        mode = self.obstacle or ambient_mode()
        if isinstance(mode, str):
            raise UnsupportedError(mode)
        leaves: list[Leaf] = []
        try:
            key = (mode, *key_of(args, kwargs, leaves))
        except NotAKeyError as error:
            raise UnsupportedError(f"{error} is passed to it") from None
        with self._lock:
            return self._ready(key, args, kwargs, leaves)

    def forward(self) -> Callable[..., Any]:
        """What a program stands for: the module's ``forward`` without an accelerate hook around it."""
        table = self.module.__dict__
        function = table["_old_forward"] if "_hf_hook" in table and "_old_forward" in table else self.module.forward
        return cast(Callable[..., Any], function)

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """One timed run of this call; raises as :meth:`prepare`."""
        with torch.no_grad():
            ready = self.prepare(args, kwargs)
            leaves: list[Leaf] = []
            key_of(args, kwargs, leaves)
            return ready.profile(leaves)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward()(*args, **kwargs)

    def _first_call(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Any:
        try:
            with self._lock:
                ready = self._ready(key, args, kwargs, leaves)
        except Error as error:
            # A wrong argument fails in eager as well, with the exception that its caller expects.
            if self.options.strict and isinstance(error, UnsupportedError):
                raise
            result = self._fall_back(error, args, kwargs, is_strict=False)
            epoch = self._epoch
            if epoch is not None:
                epoch.add(key, leaves, _Eager(error))
            if self.options.strict:
                raise
            return result
        try:
            result = ready.run(leaves)
        except Exception as error:
            epoch = self._current_epoch()
            return self._rescue(epoch, ready, from_native(error), args, kwargs, leaves)
        if self.options.check is not None:
            self._check(result, args, kwargs)
        return result

    def _ready(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Ready:
        """The entry of a key, captured and compiled if it is new. The lock is held."""
        epoch = self._current_epoch()
        entry = epoch.find(key, leaves)
        if isinstance(entry, Ready):
            return entry
        if entry is not None:
            raise entry.error()
        if epoch.structure.obstacle is not None:
            path, reason = epoch.structure.obstacle
            raise UnsupportedError(reason, module=path)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (unfit := tensor_obstacle(leaf)) is not None:
                raise UnsupportedError(unfit)
        before = epoch.engine.captures
        try:
            ready = epoch.engine.prepare(args, kwargs, leaves)
        except Error:
            raise
        except _native.NativeError as error:
            raise from_native(error) from error
        except TypeError as error:
            # Arguments that do not fit the signature: eager says so in its own words.
            raise CaptureError(str(error)) from error
        except Exception as error:
            raise CaptureError(f"internal: {type(error).__name__}: {error}") from error
        finally:
            self.captures += epoch.engine.captures - before
        self._watch(epoch)
        epoch.add(key, leaves, ready)
        return ready

    def _rescue(
        self,
        epoch: _Epoch,
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
                return ready.run(leaves)
            except Exception as again:
                raise from_native(again) from None
        return self._fall_back(error, args, kwargs)

    def _check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            expected = self._forward(args, kwargs)
        tolerance = self.options.check
        problem = compare(result, expected, None if tolerance is True else tolerance)
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
                structure = Structure(self.module)
                epoch = self._enter(structure)
            elif bits := epoch.watch.poll():
                suspects = epoch.watch.changed_tensors()
                if bits & STRUCTURE or epoch.structure.is_retyped():
                    structure = Structure(self.module)
                    if structure.fingerprint == epoch.structure.fingerprint:
                        epoch.structure = structure
                    else:
                        epoch = self._enter(structure)
                epoch.engine.refresh(suspects)
                self._watch(epoch)
            return epoch

    def _enter(self, structure: Structure) -> _Epoch:
        old = self._epoch
        epoch = self._epochs.pop(structure.fingerprint, None)
        if epoch is None:
            epoch = _Epoch(structure, Engine(self.module, self.forward(), self.options))
        else:
            epoch.structure = structure
        self._epochs[structure.fingerprint] = epoch
        if old is not None and old is not epoch:
            old.retire()
        while len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)
        epoch.watch = Watch(structure, epoch.engine.tensors())
        self._epoch = epoch
        return epoch

    def _watch(self, epoch: _Epoch) -> None:
        """Watches the module as it is, and makes sure that it is as the engine knows it."""
        structure = Structure(self.module)
        while True:
            watch = Watch(structure, epoch.engine.tensors())
            if not epoch.engine.refresh():
                break
        epoch.watch = watch
        if structure.fingerprint != epoch.structure.fingerprint:
            self._epoch = None
            raise CaptureError("the module changed while it was being captured")
        epoch.structure = structure

    def _grad_reason(self, epoch: _Epoch, leaves: Sequence[Leaf]) -> str | None:
        is_needed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if not is_needed and not any(p.requires_grad for p in self.module.parameters()):
            return None
        if self.module.training:
            return "it is in training mode and needs gradients; call .eval() and use torch.no_grad() for inference"
        return "gradients are needed (grad mode is on and a tensor requires grad); call it under torch.no_grad()"

    def family(self) -> list[tuple[str, Dispatcher]]:
        """This dispatcher and those of compiled submodules, with their paths."""
        found = ((path, find_dispatcher(child)) for path, child in self.module.named_modules() if path)
        return [("", self), *((path, other) for path, other in found if other is not None)]

    def unload(self) -> None:
        """Gives back everything that was compiled; the next call compiles again."""
        for _, member in self.family():
            with member._lock:
                epochs = list(member._epochs.values())
                member._epochs.clear()
                member._epoch = None
            for epoch in epochs:
                epoch.engine.unload()
                epoch.retire()

    @contextmanager
    def eager(self) -> Iterator[torch.nn.Module]:
        """Runs calls in eager PyTorch meanwhile, in every thread."""
        members = [member for _, member in self.family()]
        for member in members:
            member._add_eager(1)
        try:
            yield self.module
        finally:
            for member in members:
                member._add_eager(-1)

    def _add_eager(self, count: int) -> None:
        with self._lock:
            self.eager_depth += count

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
        place: Fallback = (getattr(error, "module", ""), getattr(error, "op", ""), str(error))
        self.fallbacks[place] = self.fallbacks.get(place, 0) + 1
        if place not in self._warned:
            self._warned.add(place)
            path, op, reason = place
            where = f"{self.name}.{path}" if path else self.name
            at = f" (op {op})" if op and op not in reason else ""
            warnings.warn(f"{where} runs in eager PyTorch: {reason}{at}", FallbackWarning, stacklevel=_caller())
        return result

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
        with self._lock:
            return [epoch.engine for epoch in self._epochs.values()]

    def _reset_lock(self) -> None:
        self._lock = threading.RLock()


def find_dispatcher(compiled: object) -> Dispatcher | None:
    """The dispatcher in the slot of a compiled module, ``None`` if it is not one."""
    slot = getattr(type(compiled), "_oxidiff", None)
    return None if slot is None else cast(Dispatcher, slot.__get__(compiled))


_alive: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _after_fork() -> None:
    # Another thread may have held a lock when the process forked; nobody would ever release it in the child.
    for dispatcher in list(_alive):
        dispatcher._reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
