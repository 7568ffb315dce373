"""Methods of a module beside ``forward`` that run its submodules: ``decode``, ``get_text_features``, ``generate``.

Who calls one of them on a compiled module does not call the module, and would have eager PyTorch without a word. Which
methods these are is read off their code: those that read a submodule with weights from the module, themselves or by way of
other methods, and are given a tensor. What reads no submodule computes nothing that is worth a word.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .outside import attributes_read

__all__ = ["beside_forward", "has_networks", "runs_submodules"]

_LIBRARY = ("torch.", "transformers.modeling_", "transformers.generation", "diffusers.models.modeling_", "peft.")
"""Where classes are from that models are made of. What these add converts, loads and saves, or calls the module itself."""


def beside_forward(cls: type[nn.Module]) -> Iterator[str]:
    """The names of the public methods of a class that its authors wrote, without ``forward``."""
    seen = {"forward"}
    for base in cls.__mro__:
        is_library = base in (nn.Module, object) or base.__module__.startswith(_LIBRARY)
        for name, value in base.__dict__.items():
            if name in seen or name.startswith("_"):
                continue
            seen.add(name)
            if not is_library and isinstance(value, types.FunctionType):
                yield name


def runs_submodules(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call of a method may run submodules with weights on tensors that it is given.

    Args:
        module: The module.
        method: The method, as a function.
        args: Positional arguments without the module.
        kwargs: Keyword arguments.
    """
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) and _reads_submodules(module, method)


def has_networks(module: nn.Module) -> bool:
    """Whether a module has a method beside ``forward`` that may run submodules with weights."""
    return any(_reads_submodules(module, getattr(type(module), name)) for name in beside_forward(type(module)))


def _reads_submodules(module: nn.Module, method: Callable[..., Any]) -> bool:
    read = _read.setdefault(type(module), {})
    code = getattr(inspect.unwrap(method), "__code__", None)
    names = read.get(code)
    if names is None:
        names = read[code] = _names_read(method, type(module))
    return any(
        name in names and child is not None and next(child.parameters(), None) is not None
        for name, child in module._modules.items()
    )


_read: weakref.WeakKeyDictionary[type, dict[types.CodeType | None, frozenset[str]]] = weakref.WeakKeyDictionary()
"""By the codes of methods, what they read."""


def _names_read(method: Callable[..., Any], cls: type) -> frozenset[str]:
    """The attributes that a method reads, and the methods of the class that it calls."""
    found: set[str] = set()
    waiting: list[Any] = [method]
    for function in waiting:
        code = getattr(inspect.unwrap(function), "__code__", None)
        for name in (name for one in _codes(code) for name in attributes_read(one) if name not in found):
            found.add(name)
            below = inspect.getattr_static(cls, name, None)
            # A call of the module itself, and all below it, is counted there.
            if name != "forward" and isinstance(below, types.FunctionType):
                waiting.append(below)
    return frozenset(found)


def _codes(code: types.CodeType | None) -> Iterator[types.CodeType]:
    """A code and those of the functions that are defined in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)
