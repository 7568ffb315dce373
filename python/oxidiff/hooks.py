"""Hooks around the ``forward`` of a module, run as their libraries run them, with something else in the place of what they
are around: a program, or the parts of a module that hooks lie between (:mod:`oxidiff.regions`).

Those of torch (``register_forward_hook``) belong to the call of a module. Accelerate and diffusers put a function in the
place of ``forward``, which runs a hook and what ``forward`` was before; several of these lie around each other, and a
hook of diffusers may run what is below it when it likes, or not at all (first-block cache, pyramid attention broadcast).

Threads: what is here changes neither modules nor hooks; running hooks is as safe as it is without this package.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from .errors import UnsupportedError

__all__ = [
    "Around",
    "Bare",
    "Wrapped",
    "calls_itself",
    "cast_weights",
    "casting",
    "function_in",
    "is_idle",
    "replaced",
    "replaced_modules",
    "run_around",
    "sharing",
]

_AROUND = ("_diffusers_hook", "_hf_hook", "forward", "_old_forward")
_REPLACED = "its forward was replaced after a hook of accelerate or diffusers was attached"
_Function = Callable[..., Any]


def sharing(cls: type, other: Any) -> Any:
    """An instance of a class that has the ``__dict__`` of another object, without being initialised."""
    made: Any = object.__new__(cls)
    object.__setattr__(made, "__dict__", other.__dict__)
    if sys.version_info >= (3, 13):
        # Its attributes may lie beside its dictionary, where writes to them are not noticed; this moves them into it.
        object.__setattr__(other, "__dict__", other.__dict__)
    return made


def calls_itself(cls: type) -> bool:
    """Whether a class of modules says itself what a call is."""
    return any("__call__" in base.__dict__ for base in cls.__mro__ if base not in (nn.Module, object))


def is_idle(registry: Any) -> bool:
    """Whether a registry of diffusers' hooks has none: ``cache_context`` leaves one on every transformer."""
    return registry is None or not getattr(registry, "hooks", True)


class _Accelerate:
    """A hook of accelerate: it moves weights and arguments between devices."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def run(self, module: nn.Module, inner: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._hook.pre_forward(module, *args, **kwargs)
        mode: AbstractContextManager[Any] = (
            torch.no_grad() if self._hook.no_grad else torch.set_grad_enabled(torch.is_grad_enabled())
        )
        with mode:
            result = inner(*args, **kwargs)
        return self._hook.post_forward(module, result)


class _Diffusers:
    """A hook of diffusers.

    Args:
        hook: The hook.
        module: The module that it was registered on.
        reference: What the registry keeps of it: the functions that are run.
    """

    def __init__(self, hook: Any, module: nn.Module, reference: Any) -> None:
        self._hook = hook
        self._module = module
        self._reference = reference
        forward = reference.forward
        self.is_around = isinstance(forward, functools.partial) and forward.func == getattr(hook, "new_forward", None)
        """Whether the hook itself runs what is below it."""
        self.below: Any = reference.original_forward if self.is_around else forward

    def run(self, _: nn.Module, inner: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._reference.pre_forward(self._module, *args, **kwargs)
        if self.is_around:
            hook = sharing(_class_with_reference(cast(Hashable, type(self._hook))), self._hook)
            hook._oxidiff_reference = copy.copy(self._reference)
            hook._oxidiff_reference.original_forward = inner
            result = hook.new_forward(self._module, *args, **kwargs)
        else:
            result = inner(*args, **kwargs)
        return self._reference.post_forward(self._module, result)


@functools.cache
def _class_with_reference(cls: Hashable) -> type[Any]:
    """A class whose instances are the hook whose ``__dict__`` they share, but for the ``forward`` that it runs."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__slots__"] = ("_oxidiff_reference",)
        namespace["fn_ref"] = property(lambda self: self._oxidiff_reference)

    return types.new_class(cast(type, cls).__name__, (cast(type, cls),), {}, fill)


class Wrapped:
    """The functions that stand around the ``forward`` of a module.

    Args:
        module: The module.

    Attributes:
        layers: They, from the outermost on.
        forward: The module's ``forward`` below all of them.

    Raises:
        UnsupportedError: It has hooks, and something else stands around its ``forward``: that was set since.
    """

    def __init__(self, module: nn.Module) -> None:
        table = module.__dict__
        self.layers: list[_Accelerate | _Diffusers] = []
        registry: Any = table.get("_diffusers_hook")
        hooks = 0 if is_idle(registry) else len(registry.hooks)
        offload = "_hf_hook" in table and "_old_forward" in table
        forward: Any = module.forward
        while offload or hooks:
            if offload and getattr(forward, "__wrapped__", None) is table["_old_forward"]:
                self.layers.append(_Accelerate(table["_hf_hook"]))
                forward, offload = table["_old_forward"], False
                continue
            layer = _layer_of(forward, registry) if hooks else None
            if layer is None:
                raise UnsupportedError(_REPLACED)
            self.layers.append(layer)
            forward, hooks = layer.below, hooks - 1
        self._table = table
        self.forward: _Function = forward
        if isinstance(forward, types.MethodType) and getattr(forward.__self__, "__dict__", None) is table:
            # A compiled module is an object of its own, with the same attributes.
            self.forward = types.MethodType(forward.__func__, module)

    @property
    def is_own(self) -> bool:
        """Whether that is the method of the module's class, called on the module."""
        found = self.forward
        if not isinstance(found, types.MethodType) or getattr(found.__self__, "__dict__", None) is not self._table:
            return False
        return found.__func__ is getattr(type(found.__self__), "forward", None)

    def run(self, module: nn.Module, inner: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the hooks around ``inner``.

        Args:
            module: What they take for the module, as far as they do not know it already.
            inner: What stands for ``forward``.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        for layer in reversed(self.layers):
            inner = _around(layer, module, inner)
        return inner(*args, **kwargs)


def _around(layer: _Accelerate | _Diffusers, module: nn.Module, inner: _Function) -> _Function:
    return lambda *args, **kwargs: layer.run(module, inner, args, kwargs)


def _layer_of(forward: _Function, registry: Any) -> _Diffusers | None:
    """The hook that a registry of diffusers put in the place of ``forward`` with this function."""
    function = getattr(forward, "func", None)
    cells = getattr(function, "__closure__", None) or ()
    for name, reference in zip(registry._hook_order, registry._fn_refs, strict=True):
        if any(cell.cell_contents is reference for cell in cells):
            return _Diffusers(registry.hooks[name], cast("functools.partial[Any]", forward).args[0], reference)
    return None


def casting(module: nn.Module) -> torch.dtype | None:
    """The dtype that weights of a layer of PyTorch's have while it runs, where diffusers' layerwise casting keeps them in
    another; ``None`` unless that is all there is around it. A trace does the same (:func:`cast_weights`)."""
    table: dict[str, Any] = module.__dict__
    registry: Any = table.get("_diffusers_hook")
    if is_idle(registry) or not type(module).__module__.startswith("torch.nn.modules."):
        return None
    hooks = list(registry.hooks.values())
    kind = type(hooks[0])
    if len(hooks) > 1 or (kind.__module__, kind.__name__) != (
        "diffusers.hooks.layerwise_casting",
        "LayerwiseCastingHook",
    ):
        return None
    if "_hf_hook" in table or module._modules:
        return None
    try:
        is_own = Wrapped(module).is_own
    except UnsupportedError:
        return None
    return cast(torch.dtype, hooks[0].compute_dtype) if is_own else None


def cast_weights(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The layer without hooks, as ``module.to(dtype)`` would leave it; the layer itself stays as it is."""
    made = object.__new__(type(module))
    table = _without_around(module.__dict__)
    for name in ("_parameters", "_buffers"):
        table[name] = {
            key: tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
            for key, tensor in table[name].items()
        }
    object.__setattr__(made, "__dict__", table)
    return made


class Bare:
    """A module whose ``forward`` is that of its class, whatever was put in its place.

    It is an object of its own with the same tensors, submodules and attributes; what either sets is taken over by the other
    at calls.

    Args:
        module: The module.

    Attributes:
        module: The module.
        twin: The object.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.twin: nn.Module = object.__new__(type(module))
        object.__setattr__(self.twin, "__dict__", _without_around(module.__dict__))

    def call(self, run: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``run``, which runs the object."""
        table, twin = self.module.__dict__, self.twin.__dict__
        wanted = _without_around(table)
        for name in [name for name in twin if name not in wanted]:
            del twin[name]
        for name, value in wanted.items():
            if name not in twin or twin[name] is not value:
                twin[name] = value
        try:
            return run(*args, **kwargs)
        finally:
            for name in dict.fromkeys((*wanted, *twin)):
                # What somebody else has set meanwhile stays.
                if table.get(name, self) is not wanted.get(name, self):
                    continue
                if name not in twin:
                    table.pop(name, None)
                elif twin[name] is not wanted.get(name, self):
                    table[name] = twin[name]


def _without_around(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in _AROUND}


Around = tuple[tuple[str, ...], list[Any]]


def replaced(module: nn.Module, is_root: bool) -> Around | None:
    """Which attributes of a module are about the hooks of accelerate and diffusers around it, not about what it computes,
    and what says more. ``None`` where it has no such hooks.

    A hook may lead anywhere: accelerate's offloading of models has the model that ran before.

    Of the module that they are run around that is the ``forward`` below them, unless that is its class's. Of one that
    another's ``forward`` calls it is that there are some: no program runs them, whichever they are, and what tells
    structures apart is kept for as long as these are, with all that hooks have kept of earlier steps.
    """
    table = module.__dict__
    if "_hf_hook" not in table and is_idle(table.get("_diffusers_hook")):
        # Hooks that are taken away leave the method of its class behind.
        is_left = "forward" in table and Wrapped(module).is_own
        return (_AROUND, []) if is_left else None
    if is_root:
        try:
            wrapped = Wrapped(module)
            return _AROUND, [] if wrapped.is_own else [wrapped.forward]
        except UnsupportedError:
            # No call of it runs compiled.
            pass
    elif (dtype := casting(module)) is not None:
        return _AROUND, [("layerwise casting", dtype)]
    return _AROUND, ["hooks"]


def replaced_modules(module: nn.Module) -> dict[int, types.CodeType]:
    """The modules of a tree in the place of whose ``forward`` there is a function of the user's: by their ids, its code."""
    found = {}
    for one in module.modules():
        if "forward" in one.__dict__ and type(one).forward is not nn.Module.forward:
            try:
                wrapped = Wrapped(one)
            except UnsupportedError:
                continue
            function = function_in(wrapped.forward)
            if not wrapped.is_own and function is not None:
                found[id(one)] = function.__code__
    return found


def function_in(called: Any) -> types.FunctionType | None:
    """The function that runs when something is called; it gets what it is called on first, if that is no function."""
    while type(called) is functools.partial:
        called = called.func
    if isinstance(called, types.MethodType):
        called = called.__func__
    elif not isinstance(called, (types.FunctionType, types.BuiltinFunctionType, type)):
        called = getattr(type(called), "__call__", None)  # noqa: B004
    return called if isinstance(called, types.FunctionType) else None


def run_around(
    wrapped: Wrapped, module: nn.Module, run: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call with the module's own hooks around it, as ``nn.Module._call_impl`` runs them; without those for gradients.

    Args:
        wrapped: What stands around the module's ``forward``.
        module: What hooks get as the module.
        run: What stands for its ``forward`` without hooks.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    table = module.__dict__
    for number, hook in tuple(table["_forward_pre_hooks"].items()):
        if number in table["_forward_pre_hooks_with_kwargs"]:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = wrapped.run(module, run, args, kwargs)
    for number, hook in tuple(table["_forward_hooks"].items()):
        changed = (
            hook(module, args, kwargs, result)
            if number in table["_forward_hooks_with_kwargs"]
            else hook(module, args, result)
        )
        if changed is not None:
            result = changed
    return result
