"""Whose trace runs, in which submodule it is, and what its thread does with modules meanwhile.

Methods of ``nn.Module`` have stand-ins for as long as a capture takes. They are those of all threads: each stand-in asks
whose call it is first. One trace runs at a time, under :data:`LOCK`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import CaptureError, chain_of, is_interrupt
from ..hooks import cast_weights, casting
from .signature import Number
from .slices import unsliced

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = [
    "Adapters",
    "LOCK",
    "at_end",
    "claiming",
    "following",
    "following_modules",
    "is_tracing",
    "passed",
    "twins_here",
]

_C = torch._C


LOCK = threading.RLock()
"""Held by whoever traces, or puts something in the place of methods of ``nn.Module``."""
_current: Recorder | None = None


def passed(place: int, number: Number) -> Number:
    """What a program that is being traced is passed for the number at this place among the sizes of its call."""
    return number if _current is None else _current.trace.ledger.argument(place, number)


def is_tracing() -> bool:
    """True inside a ``forward`` that is being traced, in the tracing thread."""
    return _current is not None and _current.thread == threading.get_ident()


def at_end(check: Callable[[], None]) -> None:
    """Inside of a trace, has ``check`` called with what ``forward`` made once that is through; elsewhere nothing."""
    if is_tracing():
        assert _current is not None, "this thread is tracing"
        _current.checks.append(check)


def twins_here() -> list[Tensor]:
    """Inside of a trace, what stands for the weights that it has met."""
    assert _current is not None, "only a trace has twins"
    return list(_current.weights.twins.values())


class Adapters:
    """The LoRA layers of a module that is traced without them, and a look at whether that is all the same to ``forward``.

    What adapters add is in the weights that programs are bound to, as the layers are between calls. A ``forward`` that
    changes them on its way (a scale that it passes on to a model inside, adapters that it disables for a while), or that
    looks behind them, is not what its trace says.
    """

    _WRITERS = (
        "scale_layer",
        "unscale_layer",
        "set_scale",
        "set_adapter",
        "enable_adapters",
        "delete_adapter",
        "merge",
        "unmerge",
    )

    def __init__(self, recorder: Recorder) -> None:
        self.bases = recorder.weights.bases
        self._recorder = recorder
        self._inside = {id(base) for base in self.bases.values()}
        self._layers = recorder.weights.layers
        self._scaling = {at: dict(layer.scaling) for at, layer in self._layers.items()}
        self._is_written = False
        self.foreign: set[int] = set()
        """Ids of the dictionaries of scales that other threads wrote meanwhile."""

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
        """The module that runs where ``module`` is called."""
        base = self.bases.get(id(module))
        if base is None:
            if id(module) in self._inside:
                raise self._recorder.error("forward calls a layer to which adapters are added without them")
            return module
        if kwargs or len(args) != 1 or module._forward_pre_hooks or module._forward_hooks:
            raise self._recorder.error("forward says which adapters a layer uses in this call")
        if dict(self._layers[id(module)].scaling) != self._scaling[id(module)]:
            self._is_written = True
            raise self._changed("their scaling is written")
        return base

    def _changed(self, what: str) -> CaptureError:
        recorder, advice = self._recorder, "change them, or pass their scale, from outside"
        return recorder.noted(recorder.error(f"forward changes adapters while it runs ({what}); {advice}"))

    def _put_back(self) -> None:
        for at, layer in self._layers.items():
            if layer.scaling != self._scaling[at]:
                layer.scaling.clear()
                layer.scaling.update(self._scaling[at])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Lets no method change the adapters in this thread. What others change is in the weights that are bound next."""
        replaced = []
        owners = {
            (owner, name)
            for kind in {type(layer) for layer in self._layers.values()}
            for name in self._WRITERS
            for owner in [next((cls for cls in kind.__mro__ if name in cls.__dict__), None)]
            if owner is not None
        }
        try:
            for owner, name in owners:
                replaced.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, self._refusing(owner.__dict__[name]))
            # Written before by whoever it was.
            self._scaling = {at: dict(layer.scaling) for at, layer in self._layers.items()}
            yield
        finally:
            for owner, name, write in replaced:
                setattr(owner, name, write)
            if self._is_written:
                # Now, as what `forward` does when it is left by an exception is done.
                self._put_back()

    def _refusing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if id(layer) in self._layers and is_tracing() and _current is self._recorder:
                raise self._changed(f"{write.__name__} of {self._recorder.weights.paths[id(self.bases[id(layer)])]}")
            if id(layer) in self._layers:
                self.foreign.add(id(layer.scaling))
            result = write(layer, *args, **kwargs)
            if id(layer) in self._layers:
                self._scaling[id(layer)] = dict(layer.scaling)
            return result

        return method


class _Following:
    """What stands in for methods of ``nn.Module`` so that a trace notices what its thread does with modules; other threads,
    and everybody between traces, get the methods themselves.

    A method stays the function that it is, and gets other code: an attribute that is written goes through all classes of
    modules there are, ten milliseconds where all of diffusers is imported, and every method of every module is looked up
    anew by everybody. Where something else is in the place of a method (:func:`_are_plain`), the attributes are written.
    Either stays while someone holds it, as a capture of many traces does. Written under the lock of traces.
    """

    def __init__(self) -> None:
        self.holders: set[object] = set()
        self.before: tuple[Sequence[Any], Sequence[str], Sequence[Any]] | None = None
        """What puts all back, while something is in its place: objects, their attributes and what these were."""
        self._stand_ins: tuple[Any, ...] = ()
        """What is in their place, if attributes were written."""
        self._made: tuple[tuple[Any, ...], tuple[CodeType, ...]] = (), ()
        """Methods and their code, and the other code that was last made for these."""
        self._imported = 0

    def begin(self) -> None:
        """Puts everything in its place, if it is not there."""
        if self.before is not None:
            return
        kind: Any = torch.nn.Module
        own = tuple([getattr(kind, name) for name in _METHODS])
        self._imported = len(sys.modules)
        if _are_plain(own):
            names = ("__code__",) * len(own)
            codes = tuple([method.__code__ for method in own])
            found = (*own, *codes)
            known, others = self._made
            if len(found) != len(known) or not all(map(operator.is_, found, known)):
                others = tuple(map(_calling, _METHODS, own, _stand_ins_of(*map(_copy_of, own))))
                self._made = found, others
            self._stand_ins = ()
            self.before = own, names, codes
            _write(own, names, others)
        else:
            kinds = (kind,) * len(own)
            self._stand_ins = _stand_ins_of(*own)
            self.before = kinds, _METHODS, own
            _write(kinds, _METHODS, self._stand_ins)

    def take_back(self) -> None:
        """Gives the modules that were imported meanwhile nn.Module's own methods where they took these for them: an op of
        torch's imports Dynamo, which could compile nothing that makes a module from then on."""
        if len(sys.modules) == self._imported or self.before is not None or not self._stand_ins:
            return
        # Those that were there before have none: to tell which they are, each trace would list thousands of names.
        self._imported = len(sys.modules)
        names = {id(stand_in): name for stand_in, name in zip(self._stand_ins, _METHODS, strict=False)}
        for space in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]:
            for name, value in list(space.items()):
                if id(value) in names:
                    space[name] = getattr(torch.nn.Module, names[id(value)])


_METHODS = (
    "__call__",
    "__setattr__",
    "__init__",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_parameter",
    "register_buffer",
    "add_module",
    "__delattr__",
)
_following = _Following()


@contextmanager
def following() -> Iterator[None]:
    """Keeps what traces need in its place from one to the next; for a capture."""
    holder = object()
    interrupt: BaseException | None = None
    is_held = True
    try:
        with LOCK:
            _following.holders.add(holder)
        yield
    finally:
        while is_held:
            try:
                with LOCK:
                    _following.holders.discard(holder)
                    if not _following.holders and _current is None:
                        _put_back_methods()
                    is_held = False
                _following.take_back()
            except BaseException as error:
                if not is_interrupt(error):
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _write(objects: Sequence[Any], names: Sequence[str], values: Sequence[Any]) -> None:
    """Sets an attribute of each object. One call into C: an interrupt comes before or after it."""
    deque(map(setattr, objects, names, values), maxlen=0)


def _put_back_methods() -> None:
    if _following.before is not None:
        _write(*_following.before)
        _following.before = None


def _are_plain(methods: Sequence[Any]) -> bool:
    """Whether other code can be given to each of these alone: they are functions of Python, with no variables around them
    but the class that ``super()`` means, and no thread runs them while another writes them."""
    are_functions = all(type(method) is FunctionType and len(method.__closure__ or ()) <= 1 for method in methods)
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return are_functions and len(set(map(id, methods))) == len(methods) and has_lock


def _copy_of(method: FunctionType) -> FunctionType:
    """A function that does what ``method`` does now."""
    copied = FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__, copied.__qualname__, copied.__doc__ = (
        method.__kwdefaults__,
        method.__qualname__,
        method.__doc__,
    )
    return copied


def _calling(name: str, method: FunctionType, stand_in: Callable[..., Any]) -> CodeType:
    """Code for a method that calls what stands in for it, which it finds in the module that the method is from. Its
    parameters are the method's: Dynamo reads those of a function once, ``inspect`` whenever it is asked."""
    name = f"_oxidiff_{name}"
    # It stays: a thread that runs the code when it is put back has yet to look there.
    method.__globals__[name] = stand_in
    own = inspect.signature(_copy_of(method)).parameters.values()
    taken = inspect.Signature([parameter.replace(default=_NONE, annotation=_NONE) for parameter in own])
    passed = [_PASSED.get(parameter.kind, "{0}").format(parameter.name) for parameter in own]
    # As many variables around it as the method has.
    around = method.__code__.co_freevars
    lines = [*around, f"return {name}({', '.join(passed)})"]
    source = f"def around({', '.join(around)}):\n def calling{taken}:\n  " + "\n  ".join(lines)
    space: dict[str, Any] = {}
    exec(compile(source + "\n return calling", __file__, "exec"), space)
    code: CodeType = space["around"](*around).__code__
    return code.replace(co_name=method.__code__.co_name, co_firstlineno=_calling.__code__.co_firstlineno)


_NONE = inspect.Parameter.empty
_PASSED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _forked() -> None:
    """In a child no other thread captures anything."""
    _put_back_methods()
    _following.holders.clear()
    LOCK.release()


if hasattr(os, "register_at_fork"):
    # A process forks between traces: what they replace meanwhile, and the garbage collector, are as always in the child.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_forked)


def _is_around(module: torch.nn.Module) -> bool:
    """Whether it is what ``torch.compile`` makes of a module."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"


def _stand_ins_of(own: Any, set_own: Any, make: Any, hook: Any, pre_hook: Any, *writes: Any) -> tuple[Any, ...]:
    """What stands in for methods of ``nn.Module``."""

    @functools.wraps(own)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _current
        if recorder is None or threading.get_ident() != recorder.thread:
            return own(self, *args, **kwargs)
        before = recorder.path
        if _is_around(self):
            self = cast(torch.nn.Module, self._orig_mod)
        try:
            if recorder.adapters.bases:
                self = recorder.adapters.called(self, args, kwargs)
            paths = recorder.weights.paths
            if id(self) not in paths:
                recorder.check_known(self)
        except CaptureError as error:
            recorder.noted(error)
            raise
        recorder.path = paths.get(id(self), before)
        if "_diffusers_hook" in self.__dict__ and (dtype := casting(self)) is not None:
            self = cast_weights(self, dtype)
        self = unsliced(self, args, kwargs)
        if (look := recorder.look_outside) is not None:
            look(before)
        # What `torch.compile` was applied to runs as it is: Dynamo would follow the trace itself into this package.
        is_compiled = self._compiled_call_impl is not None
        run: Any = self._call_impl if is_compiled else functools.partial(own, self)
        result = run(*args, **kwargs)
        if look is not None:
            look(recorder.path)
        # Not in a `finally`: after an exception the path says where it was raised.
        recorder.path = before
        return result

    @functools.wraps(set_own)
    def set_attribute(self: torch.nn.Module, name: str, value: Any) -> None:
        recorder = _current
        if recorder is None:
            pass
        elif threading.get_ident() != recorder.thread:
            recorder.foreign.add((id(self), name))
            # Tensors change no program.
            recorder.is_disturbed |= not isinstance(value, Tensor)
        else:
            recorder.own.add((id(self), name))
        set_own(self, name, value)

    @functools.wraps(make)
    def initialize(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder = _current
        if recorder is not None and threading.get_ident() == recorder.thread:
            recorder.made.add(id(self))
        make(self, *args, **kwargs)

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(write)
        def method(self: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            recorder = _current
            if recorder is not None:
                is_own = threading.get_ident() == recorder.thread
                (recorder.own if is_own else recorder.foreign).add((id(self), name))
            write(self, name, *args, **kwargs)

        return method

    def hooking(register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            handle = register(self, *args, **kwargs)
            recorder = _current
            if recorder is not None and threading.get_ident() == recorder.thread:
                recorder.own.add((id(self), handle.id))
            return handle

        return method

    return (call, set_attribute, initialize, hooking(hook), hooking(pre_hook), *map(noting, writes))


def claiming(recorder: Recorder, run: Callable[[], Any]) -> Any:
    """What ``run`` gives, with what threads do to modules meanwhile noted as this one's or as others'. It holds a trace, and
    the looks at what the module was before and behind it."""
    global _current
    outer = _current
    try:
        _following.begin()
        _current = recorder
        with recorder.adapters.watched():
            return run()
    finally:
        _current = outer
        if not _following.holders and outer is None:
            _put_back_methods()
        _following.take_back()


def following_modules(recorder: Recorder, run: Callable[[], Any]) -> Any:
    """What ``run`` gives inside of :func:`claiming`, with ``recorder.path`` kept at the submodule that is running."""
    modes = _Modes()
    try:
        return run()
    finally:
        modes.put_back(recorder)


def _end_generators(outer: BaseException | None) -> None:
    """Ends what an interrupt left halfway in functions of torch: some would put a mode back when they are collected.

    Args:
        outer: What was being handled before.
    """
    for error in chain_of(sys.exc_info()[1], outer):
        entry = error.__traceback__ if is_interrupt(error) else None
        while entry is not None:
            if str(entry.tb_frame.f_globals.get("__name__")).startswith(("torch.", "contextlib")):
                with suppress(RuntimeError):
                    entry.tb_frame.clear()
            entry = entry.tb_next


class _Modes:
    """The modes of this thread, as they were: an interrupt that comes as the ``__exit__`` of one of torch's begins leaves
    it as it is."""

    def __init__(self) -> None:
        self._dispatch, self._function = _C._len_torch_dispatch_stack(), _C._len_torch_function_stack()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._outer = sys.exc_info()[1]

    def put_back(self, recorder: Recorder) -> None:
        _end_generators(self._outer)
        while _C._len_torch_function_stack() > self._function:
            _C._pop_torch_function_stack()
        while _C._len_torch_dispatch_stack() > self._dispatch:
            if recorder.old_dispatch_mode_flags:
                recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                _C._pop_torch_dispatch_stack(None)
        _C._set_grad_enabled(self._is_grad_enabled)
