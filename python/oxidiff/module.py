"""`oxidiff.compile` and what it returns.

A compiled module stands where the module stood. It is an instance of a subclass, made on the fly, of the module's own
class, and *its `__dict__` is the module's `__dict__`*: parameters, buffers, submodules, hooks, flags and attributes
are not forwarded but shared, so there is nothing that could be forgotten or go stale. Only the call is replaced. What
belongs to the compiled side lives in one slot. The module itself keeps its class and with it its eager call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from .capture import is_tracing
from .capture.writes import slots_in
from .dispatch import Dispatcher, find_dispatcher
from .errors import FallbackWarning, UnsupportedError, is_interrupt
from .hooks import Wrapped, calls_itself, is_idle, run_around, sharing
from .memory import Estimate, estimate_of
from .methods import beside_forward, runs_submodules
from .options import AnyPath, CompileOptions
from .outside import Outside, Reading
from .report import Explanation, Profile, Report, explain_of, profile_of, report_of
from .warmup import warm_up

__all__ = ["CompiledFunction", "CompiledModule", "compile", "dispatcher_of"]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])

_TABLES = ("_parameters", "_buffers", "_modules")


class _Method(Generic[P, R]):
    """A method that steps back where the module has a parameter, buffer, submodule or attribute of the same name.

    Methods of the module's class win because that class comes first in the method resolution order; plain attributes
    win because this is not a data descriptor.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._name = function.__name__
        functools.update_wrapper(cast(Any, self), function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        for table in _TABLES:
            held = instance.__dict__.get(table, {})
            if self._name in held:
                return held[self._name]
        return types.MethodType(self._function, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)


class CompiledModule(nn.Module):
    """What :func:`compile` makes of a module; see there. Not to be instantiated.

    Where the module has something of the name of a method listed here, the module's is what ``compiled.name`` gives,
    and ``oxidiff.name(compiled, ...)`` is the method.
    """

    __jit_unused_properties__: ClassVar = ["_orig_mod"]

    @property
    def _orig_mod(self) -> nn.Module:
        """The module that was compiled; it runs eager."""
        return dispatcher_of(self).module

    def warmup(self, *args: Any, shapes: Iterable[Any] | None = None, **kwargs: Any) -> None:
        """See :func:`oxidiff.warmup`."""
        warm_up(dispatcher_of(self), args, kwargs, shapes)

    def report(self) -> Report:
        """See :func:`oxidiff.report`."""
        return report_of(dispatcher_of(self))

    def explain(self, device: str | None = None) -> Explanation:
        """See :func:`oxidiff.explain`."""
        return explain_of(dispatcher_of(self), device)

    def estimate(self, *args: Any, **kwargs: Any) -> Estimate:
        """See :func:`oxidiff.estimate`."""
        return estimate_of(dispatcher_of(self), args, kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """See :func:`oxidiff.profile`."""
        return profile_of(dispatcher_of(self), args, kwargs)

    def save_graph(self, path: AnyPath, *, process_state_dict: object = None) -> None:
        """See :func:`oxidiff.save_graph`; what else OneDiff takes has no meaning here, and a warning says so."""
        _ignore("save_graph", process_state_dict=process_state_dict)
        dispatcher_of(self).save_graph(path)

    def load_graph(
        self,
        path: AnyPath,
        device: torch.device | str | int | None = None,
        run_warmup: bool = True,
        *,
        state_dict: object = None,
    ) -> None:
        """See :func:`oxidiff.load_graph`; what else OneDiff takes has no meaning here: there is nothing to warm up, and the
        file is read, whatever of it was read before."""
        _ignore("load_graph", state_dict=state_dict)
        dispatcher_of(self).load_graph(path, device)

    def bind(self, weights: nn.Module | Mapping[str, Tensor], name: str | None = None) -> str:
        """See :func:`oxidiff.bind`."""
        return dispatcher_of(self).bind(weights, name)

    def use(self, name: str | None = None) -> None:
        """See :func:`oxidiff.use`."""
        dispatcher_of(self).use(name)

    def unbind(self, name: str) -> None:
        """See :func:`oxidiff.unbind`."""
        dispatcher_of(self).unbind(name)

    def unload(self) -> None:
        """See :func:`oxidiff.unload`."""
        dispatcher_of(self).unload()

    def eager(self) -> AbstractContextManager[nn.Module]:
        """See :func:`oxidiff.eager`."""
        return dispatcher_of(self).eager()


for _name in (
    "bind",
    "use",
    "unbind",
    "warmup",
    "estimate",
    "report",
    "explain",
    "profile",
    "save_graph",
    "load_graph",
    "unload",
    "eager",
):
    setattr(CompiledModule, _name, _Method(getattr(CompiledModule, _name)))


def _ignore(method: str, **given: object) -> None:
    """Says of OneDiff's arguments without a meaning here that they are ignored, once for each place of a call."""
    for name, value in given.items():
        if value is not None:
            warnings.warn(f"{method}: OneDiff's {name} has no meaning here and is ignored", stacklevel=3)


def _is_followed() -> bool:
    """Whether a tracer follows this call, Dynamo's or ours: what was compiled runs as it is, as a part of what is traced."""
    return torch.compiler.is_compiling() or bool(_C._len_torch_dispatch_stack() and is_tracing())


class CompiledFunction(Generic[P, R]):
    """What :func:`compile` makes of a plain function: call it like the function.

    Modules, tensors and numbers that the function reads from its closure, from globals or from objects there are noticed
    when they change, also those that its own helpers read.
    """

    # Who looks into an object that holds it finds the function alone, in ``__wrapped__``: it is one like any other there.
    __slots__ = ("__dict__", "__weakref__", "_compiled", "_holder")

    def __init__(self, function: Callable[P, R], options: CompileOptions) -> None:
        self._holder = _Function(function)
        self._compiled = compile_module(self._holder, options)
        self.__wrapped__ = function
        functools.update_wrapper(cast(Any, self), function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, compiled where possible."""
        if _is_followed():
            return self.__wrapped__(*args, **kwargs)
        self._holder.sync()
        return cast(R, self._compiled(*args, **kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction[P, R]:
        """Of a function that is a method or holds objects; others are their own copies."""
        copied = copy.deepcopy(self.__wrapped__, memo)
        return self if copied is self.__wrapped__ else CompiledFunction(copied, dispatcher_of(self).options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Its name, as of any function, where that leads here; else what it was made of."""
        name: str = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (CompiledFunction, (self.__wrapped__, dispatcher_of(self).options))

    def warmup(self, *args: Any, shapes: Iterable[Any] | None = None, **kwargs: Any) -> None:
        """See :func:`oxidiff.warmup`."""
        self._holder.sync()
        warm_up(dispatcher_of(self), args, kwargs, shapes)

    def report(self) -> Report:
        """See :func:`oxidiff.report`."""
        return report_of(dispatcher_of(self))

    def explain(self, device: str | None = None) -> Explanation:
        """See :func:`oxidiff.explain`."""
        return explain_of(dispatcher_of(self), device)

    def estimate(self, *args: Any, **kwargs: Any) -> Estimate:
        """See :func:`oxidiff.estimate`."""
        self._holder.sync()
        return estimate_of(dispatcher_of(self), args, kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """See :func:`oxidiff.profile`."""
        self._holder.sync()
        return profile_of(dispatcher_of(self), args, kwargs)

    def save_graph(self, path: AnyPath) -> None:
        """See :func:`oxidiff.save_graph`."""
        dispatcher_of(self).save_graph(path)

    def load_graph(self, path: AnyPath, device: torch.device | str | int | None = None) -> None:
        """See :func:`oxidiff.load_graph`."""
        dispatcher_of(self).load_graph(path, device)

    def unload(self) -> None:
        """See :func:`oxidiff.unload`."""
        dispatcher_of(self).unload()

    def eager(self) -> AbstractContextManager[nn.Module]:
        """See :func:`oxidiff.eager`."""
        return dispatcher_of(self).eager()


class _Function(Reading):
    """Holds a function, and what it reads from outside, as a module would."""

    __slots__ = ()

    forward: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.function = function
        self.forward = function
        self.__class__ = type(getattr(function, "__name__", "function"), (_Function,), {})

    def _look(self, *functions: Callable[..., Any]) -> Outside:
        return Outside(*functions, called=functions[0])

    def _take_over(self, outside: Outside) -> None:
        super()._take_over(outside)
        self._put(cast(dict[str, Any], self._modules), outside.modules)

    def _attributes(self, outside: Outside) -> dict[str, Any]:
        return outside.values


# --- the subclass ---------------------------------------------------------------------------------------------------

_subclasses: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
_live: weakref.WeakKeyDictionary[type, weakref.WeakSet[Dispatcher]] = weakref.WeakKeyDictionary()
"""Of each class that was made, the states of its instances."""
_global_hooks = tuple(
    getattr(nn.modules.module, name)
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    )
)  # fmt: skip
_C = torch._C
_ON_THE_MODULE = {"load_lora_adapter": "diffusers.", "load_adapter": "transformers."}
"""Methods, and whose they are, that never call the module and take what has an ``_orig_mod`` for ``torch.compile``'s
wrapper, whose ``state_dict`` has other keys (PEFT's hotswap): they are called on the module itself."""


@functools.cache
def _metaclass(base: Hashable) -> type[type]:
    """The class of classes of compiled instances, of those whose own class is ``base``.

    Such a class stands for the class below. It is equal to it: pipelines of diffusers look ``type(component)`` up among the
    classes of their signature before they take a part over (``from_pipe``). Called, it makes an instance of that class. What
    is written to it is written there, where ``forward`` looks for it (``pipe.transformer.__class__.forward = ...``), and
    programs that were made before are let go of.
    """

    def __eq__(self: Any, other: object) -> Any:  # noqa: N807
        return getattr(other, "_oxidiff_class", other) is self._oxidiff_class

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(self._oxidiff_class)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return self._oxidiff_class(*args, **kwargs) if _stands(self) else kind.__call__(self, *args, **kwargs)

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if _is_of_python(name) or not _stands(self):
            kind.__setattr__(self, name, value)
        else:
            setattr(self._oxidiff_class, name, value)
            _forget_programs(self)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807
        if _is_of_python(name) or not _stands(self):
            kind.__delattr__(self, name)
        else:
            delattr(self._oxidiff_class, name)
            _forget_programs(self)

    kind = cast(type[type], base)
    methods = (__eq__, __hash__, __call__, __setattr__, __delattr__)
    return type(kind.__name__, (kind,), {method.__name__: method for method in methods})


def _stands(made: type) -> bool:
    """Whether a class was made here, and is not somebody's subclass of such a one."""
    return "_oxidiff_class" in made.__dict__


def _is_of_python(name: str) -> bool:
    """Whether Python itself, or `abc`, keeps an attribute of this name in each class."""
    return name.startswith(("__", "_abc_"))


def _forget_programs(made: type) -> None:
    for other, dispatchers in list(_live.items()):
        if issubclass(other._oxidiff_class, made._oxidiff_class):  # type: ignore[attr-defined]
            for dispatcher in list(dispatchers):
                dispatcher.unload()


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of the compiled instances of ``cls``: the same name, another call."""
    made = _subclasses.get(cls)
    if made is not None:
        return made

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if _is_followed():
            return cls.__call__(self, *args, **kwargs)
        if is_own_call:
            dispatcher = find_dispatcher(self)
            run = functools.partial(cls.__call__, self, *args, **kwargs)
            return run() if dispatcher is None else dispatcher.run_eager(UnsupportedError(_OWN_CALL), run)
        table = self.__dict__
        if (
            table["_forward_hooks"]
            or table["_forward_pre_hooks"]
            or table["_backward_hooks"]
            or table["_backward_pre_hooks"]
            or "_hf_hook" in table
            or ("_diffusers_hook" in table and not is_idle(table["_diffusers_hook"]))
            or any(_global_hooks)
        ):
            return _call_with_hooks(self, cls, args, kwargs)
        try:
            dispatcher = get(self)
        except AttributeError:
            # A replica that was made around it, as `DataParallel` does.
            return cls.__call__(self, *args, **kwargs)
        if type(self) is not made and _is_altered(type(self), cast(type, made)):
            error = UnsupportedError(f"it was given another class, {type(self).__qualname__}")
            return dispatcher.run_eager(error, lambda: cls.__call__(self, *args, **kwargs))
        return dispatcher(args, kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(
            __slots__=("_oxidiff",),
            _oxidiff_class=cls,
            __module__=cls.__module__,
            __qualname__=cls.__qualname__,
            __doc__=cls.__doc__,
            __call__=__call__,
            __copy__=_copy,
            __deepcopy__=_deepcopy,
            __reduce_ex__=_reduce_ex,
        )
        for name, library in _ON_THE_MODULE.items():
            method = getattr(cls, name, None)
            if getattr(method, "__module__", "").startswith(library):
                namespace[name] = _on_the_module(cast(Callable[..., Any], method))
        for name in _slots_of(cls):
            namespace[name] = _in_slot(getattr(cls, name))
        for name in beside_forward(cls):
            if name not in namespace and not hasattr(CompiledModule, name):
                namespace[name] = _counted(cls, name)

    bases = (CompiledModule,) if cls is nn.Module else (cls, CompiledModule)
    metaclass = _metaclass(cast(Hashable, type(cls)))
    made = types.new_class(cls.__name__, (_Unannounced, *bases), {"metaclass": metaclass}, fill)
    with contextlib.suppress(TypeError):
        made.__bases__ = bases
    is_own_call = calls_itself(cls)
    get = made.__dict__["_oxidiff"].__get__
    _subclasses[cls] = made
    return made


class _Unannounced:
    """The first base of a class while it is made: classes that keep a list of their subclasses are not told. It can leave,
    as its objects have a dictionary like modules."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing, in the place of what the other bases do."""


_OWN_CALL = "its class defines __call__ itself"


def _is_altered(cls: type, made: type) -> bool:
    """Whether a class that a compiled instance was given computes something else than the one that was made for it."""
    # By identity: classes that were made are equal to those that they were made of.
    own = itertools.takewhile(lambda base: base is not made, cls.__mro__)
    items = (item for base in own for item in base.__dict__.items())
    return any(name == "forward" or isinstance(value, property) for name, value in items)


def _slots_of(cls: type) -> list[str]:
    """The attributes that modules of a class keep beside their dictionary."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("oxidiff", "torch", "builtins")]
    return slots_in(base for base in own if "_oxidiff_class" not in vars(base))


def _in_slot(slot: Any) -> property:
    """An attribute that is in no dictionary: that of the module."""
    return property(
        lambda self: slot.__get__(self._orig_mod),
        lambda self, value: slot.__set__(self._orig_mod, value),
        lambda self: slot.__delete__(self._orig_mod),
    )


def _on_the_module(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a compiled instance that the module itself runs."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self._orig_mod, *args, **kwargs)

    return call


def _counted(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """A method beside ``forward`` of compiled instances, of which is known whether it runs what is not compiled."""

    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What is set on the class later is what counts.
        method = getattr(cls, name)
        if _is_followed():
            return method(self, *args, **kwargs)
        running: set[int] = _local.__dict__.setdefault("running", set())
        dispatcher = None if id(self) in running else find_dispatcher(self)
        if dispatcher is None or not runs_submodules(dispatcher.module, method, args, kwargs):
            return method(self, *args, **kwargs)
        running.add(id(self))
        try:
            return dispatcher.call_method(self, method, args, kwargs)
        finally:
            running.discard(id(self))

    return call


_local = threading.local()
"""The ids of the compiled modules of which a thread runs such a method."""


def _copy(self: Any) -> Any:
    dispatcher = dispatcher_of(self)
    return compile_module(copy.copy(dispatcher.module), dispatcher.options)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    dispatcher = dispatcher_of(self)
    copied = copy.deepcopy(dispatcher.module, memo)
    # What the module holds may lead back here (a registry of hooks, a list), and was then copied on the way.
    made = memo.get(id(self))
    return compile_module(copied, dispatcher.options) if made is None else made


def _reduce_ex(self: Any, protocol: int) -> Any:
    dispatcher = dispatcher_of(self)
    return compile_module, (dispatcher.module, dispatcher.options)


def _call_with_hooks(self: Any, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with the hooks of the module itself around it."""
    table = self.__dict__
    dispatcher = find_dispatcher(self)
    if dispatcher is None:
        return cls.__call__(self, *args, **kwargs)
    needs_autograd = torch.is_grad_enabled() and (table["_backward_hooks"] or table["_backward_pre_hooks"])
    if needs_autograd or table["_forward_hooks_always_called"] or any(_global_hooks):
        reason = "a global, backward or always-called hook is registered"
        return dispatcher.run_eager(UnsupportedError(reason), lambda: cls.__call__(self, *args, **kwargs))
    try:
        wrapped = Wrapped(dispatcher.module)
    except UnsupportedError as error:
        return dispatcher.run_eager(error, lambda: cls.__call__(self, *args, **kwargs))
    return run_around(wrapped, self, lambda *args, **kwargs: dispatcher(args, kwargs), args, kwargs)


# --- compile --------------------------------------------------------------------------------------------------------


def dispatcher_of(compiled: object) -> Dispatcher:
    """The compiled state behind what :func:`compile` returned.

    Raises:
        TypeError: It is not compiled.
    """
    if isinstance(compiled, CompiledFunction):
        compiled = compiled._compiled
    found = find_dispatcher(compiled)
    if found is None:
        raise TypeError(f"not compiled: {type(compiled).__name__}; pass what oxidiff.compile returned")
    return found


def compile_module(module: M, options: CompileOptions) -> M:
    """The compiled instance of one module."""
    cls = type(module)
    reason = None
    if isinstance(module, torch.jit.ScriptModule):
        reason = "it is a TorchScript module"
    else:
        try:
            made = _subclass(cls)
        except Exception as error:
            if is_interrupt(error):
                raise
            reason = f"its class cannot be subclassed ({type(error).__name__}: {error})"
    if reason is not None:
        if options.strict:
            raise UnsupportedError(f"{cls.__name__} cannot be compiled: {reason}")
        warnings.warn(f"{cls.__name__} runs in eager PyTorch: {reason}", FallbackWarning, stacklevel=3)
        return module
    compiled = sharing(made, module)
    dispatcher = Dispatcher(module, options)
    # One that is being copied has no submodules yet.
    kinds = {type(one) for one in module.modules()} if "_modules" in module.__dict__ else {cls}
    if calls_itself(cls):
        dispatcher.obstacle = _OWN_CALL
    elif (slotted := next((kind for kind in kinds if _slots_of(kind)), None)) is not None:
        names = ", ".join(_slots_of(slotted))
        dispatcher.obstacle = f"{slotted.__name__} keeps {names} in slots, where changes are not noticed"
    made.__dict__["_oxidiff"].__set__(compiled, dispatcher)
    _live.setdefault(made, weakref.WeakSet()).add(dispatcher)
    return cast(M, compiled)


@overload
def compile(module: M, *, options: CompileOptions | Mapping[str, Any] | None = None, **fields: Any) -> M: ...
@overload
def compile(
    module: Callable[P, R], *, options: CompileOptions | Mapping[str, Any] | None = None, **fields: Any
) -> CompiledFunction[P, R]: ...
@overload
def compile(
    module: None = None, *, options: CompileOptions | Mapping[str, Any] | None = None, **fields: Any
) -> Callable[[F], F]: ...
def compile(module: Any = None, *, options: Any = None, **fields: Any) -> Any:
    """Compiles a module, or a function of tensors, lazily: at its first call, or by ``warmup``.

    The result is an instance of the module's class and of :class:`CompiledModule`. It shares everything with ``module``
    (parameters, buffers, submodules, hooks, attributes; ``state_dict`` keys are unchanged), which itself stays eager:
    ``compiled._orig_mod is module``. One program serves all sizes. Weights may change in place or be replaced at any
    time. What cannot be compiled runs in eager PyTorch with one warning that says why, or raises with ``strict=True``;
    so does a call that needs gradients.

    Used as a decorator, with or without options, it takes the module or function below.

    Args:
        module: The module or function. A compiled one is returned as it is, or compiled anew if options are given.
        options: A :class:`CompileOptions`, a mapping or OneDiff's options.
        fields: Single options, see :class:`CompileOptions`.

    Raises:
        TypeError: ``module`` is neither a module nor a function, or an option does not exist.
        ValueError: An option has a wrong value.
    """
    chosen = CompileOptions.of(options, **fields)
    if module is None:
        return functools.partial(compile, options=chosen)
    if isinstance(module, CompiledModule | CompiledFunction):
        dispatcher = dispatcher_of(module)
        if (options is None and not fields) or chosen == dispatcher.options:
            return module
        if isinstance(module, CompiledFunction):
            return CompiledFunction(module.__wrapped__, chosen)
        return compile_module(dispatcher.module, chosen)
    if isinstance(module, nn.Module):
        return compile_module(module, chosen)
    if isinstance(module, type) or not callable(module):
        what = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"compile takes a torch.nn.Module or a function of tensors, not {what}")
    if isinstance(getattr(module, "components", None), dict) and hasattr(module, "register_modules"):
        raise TypeError(
            f"compile takes a module, not a pipeline: oxidiff.compile_pipe compiles the parts of a {type(module).__name__}"
        )
    return CompiledFunction(module, chosen)
