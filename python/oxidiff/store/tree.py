"""The attributes and tensors of modules as text, and what these hold."""

from __future__ import annotations

import argparse
import array
import contextlib
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import operator
import pathlib
import re
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from ..capture.classes import held_by_member
from ..capture.signature import PLAIN_TENSORS
from ..capture.stateful import ARRAYS, items_of
from ..capture.writes import IS_HEAP_TYPE, slots_of, tables_of
from ..hooks import replaced
from ..watch import RECORDERS, SKIPPED
from .origins import is_of_platform, is_own

if TYPE_CHECKING:
    from .code import Code

__all__ = [
    "BY_TEXT",
    "DEPTH",
    "HOLDING",
    "MAX_ITEMS",
    "NAMESPACES",
    "OF_DATA",
    "OF_TORCH",
    "READ_BY_CALLS",
    "SCALARS",
    "Tree",
    "attributes_of",
    "is_routine",
    "name_of",
]

SCALARS = (int, float, str, bool, type(None), bytes, complex)
OF_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
BY_TEXT = (
    range, slice, re.Pattern, numpy.generic, numpy.dtype, type(...), type(NotImplemented), bytearray, array.array,
    fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath,
    operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
NAMESPACES = frozenset((argparse.Namespace, types.SimpleNamespace))
OF_DATA = frozenset({"argparse", "builtins", "collections", "configparser", "functools", "numpy", "types"})
"""Modules of the platform whose objects at the top of a file may be what a program is configured by."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
HOLDING = (enum.Enum, list, tuple, dict, set, frozenset, deque)
"""What is described by what is in it where code finds it under a name."""
DEPTH = 6
MAX_ITEMS = 4096
READ_BY_CALLS = (
    "forward", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_parameters", "_buffers", "_modules", "_compiled_call_impl",
)  # fmt: skip
"""Attributes of ``nn.Module`` that decide what a call of one does."""
# Where a model came from and who saved it: read by no forward.
_ORIGINS = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version", "transformers_version",
        "_use_default_values",
    }
)  # fmt: skip


class Tree:
    """Attributes and tensors of modules as text."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.paths: dict[int, str] = {}
        """The modules of the tree by id."""
        self.inputs: dict[int, set[Any]] = {}
        """By the id of a dictionary or list, the keys or indices of numbers whose values do not matter."""
        self._tensors: dict[int, str] = {}
        """By id, the name of each that was met."""
        # By id, and held so that no id is used twice.
        self._seen: dict[int, Any] = {}
        self._classes: dict[type, str] = {}

    def module(self, child: torch.nn.Module) -> str:
        """The class and the attributes of one module."""
        cls = type(child)
        name = self._classes.get(cls)
        if name is None:
            name = self._classes[cls] = self.code.reach_class(cls)
        parts: list[Any] = [name]
        skipped = SKIPPED | {"meta"} if isinstance(child, torch.fx.GraphModule) else SKIPPED
        # One that was hooked keeps its forward as an attribute.
        if not child.__dict__.keys().isdisjoint(("_diffusers_hook", "_hf_hook", "forward")):
            hidden, kept = replaced(child, self.paths.get(id(child)) == "") or (("_diffusers_hook",), [])
            skipped = skipped | {*hidden}
            parts.extend(_Raw(self.value(value, DEPTH)) for value in kept)
        inputs = self.inputs.get(id(child.__dict__), ())
        for key, value in child.__dict__.items():
            if key not in skipped:
                parts.append(key)
                is_plain = type(value) in SCALARS and key not in inputs
                parts.append(value if is_plain else _Raw(self._item(child.__dict__, key, value, DEPTH)))
        parts.extend(key for key, value in child._modules.items() if value is None)
        for hooks in (child._forward_hooks, child._forward_pre_hooks):
            for hook in hooks.values():
                if getattr(hook, "__module__", None) != RECORDERS:
                    parts.append(_Raw(self.value(hook, DEPTH)))
        return repr(parts)

    def _item(self, holder: Any, key: Any, value: Any, depth: int) -> str:
        """What a container has under a key."""
        return "an input" if key in self.inputs.get(id(holder), ()) else self.value(value, depth)

    def tensor(self, tensor: Tensor | None, name: str) -> str:
        """Kind, sizes and layout of a tensor, or which earlier one it is."""
        if tensor is None:
            return "nothing"
        return self._tensor(tensor, name.lstrip("."), DEPTH)

    def _tensor(self, tensor: Tensor, name: str, depth: int) -> str:
        """Sizes and layout of a tensor, and what Python code put on it, or which earlier one it is: a graph in which two
        are one has one weight for both."""
        if (first := self._tensors.setdefault(id(tensor), name)) != name:
            return f"the same tensor as {first}"
        text = _tensor_text(tensor)
        if type(tensor) not in PLAIN_TENSORS:
            text = f"{self.code.reach_class(type(tensor))} {text}"
        marks = [f"{name}={self._inner(value, depth)}" for name, value in tensor.__dict__.items()]
        return f"{text} with {', '.join(marks)}" if marks else text

    def value(self, value: Any, depth: int) -> str:
        """An attribute's value."""
        kind = type(value)
        if kind in SCALARS:
            if kind is str:
                self.code.note_text(value)
            return repr(value)
        if isinstance(value, enum.Enum):
            name = f"{self.code.reach_class(kind)}.{value.name}"
            self.code.note_contents(value)
            if not depth or id(value) in self._seen:
                return name
            self._seen[id(value)] = value
            return f"{name}({self._inner(held_by_member(value), depth)})"
        if isinstance(value, OF_TORCH):
            return value.type if isinstance(value, torch.device) else str(value)
        if isinstance(value, Tensor):
            return self._tensor(value, f"tensor {len(self._tensors)} of those in attributes", depth)
        if isinstance(value, (numpy.ndarray, memoryview)):
            self.code.note_contents(value)
            dtype = value.format if isinstance(value, memoryview) else value.dtype
            return f"array {dtype}{value.shape} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"
        if isinstance(value, type):
            return self.code.reach_class(value)
        if isinstance(value, torch.nn.Module):
            if (path := self.paths.get(id(value))) is not None:
                return f"submodule {path}"
            if value._parameters or value._buffers or value._modules:
                raise ValueError(f"a {name_of(kind)} is used that is no submodule")
            # An activation: an object like others, of which a call reads this besides what code names.
            for attribute in READ_BY_CALLS:
                self.code.note_text(attribute)
            bases = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
            if any(is_of_platform(base) for base in bases):
                # Code of torch is not followed: any of them may be read.
                for attribute in value.__dict__:
                    self.code.note_text(attribute)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, types.MethodType):
            self.code.reach_value(value)
            function = value.__func__
            name = function.__name__ if hasattr(function, "__name__") else self._inner(function, depth)
            return f"method {name} of {self._inner(value.__self__, depth)}"
        if isinstance(value, types.FunctionType):
            return f"function {self.code.reach(value)}"
        if isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
            return f"partial({', '.join(self._inner(part, depth) for part in inner)})"
        if is_routine(value):
            return self._routine(value, depth)
        if isinstance(value, contextvars.ContextVar):
            self.code.is_of_callers = True
            self.code.note_contents(value)
            here = [self._inner(part, depth) for _, part in items_of(value)]
            return f"context variable {value.name} {here}"
        if isinstance(value, threading.local):
            self.code.is_of_callers = True
            self.code.note_contents(value)
            return f"{self.code.reach_class(kind)} {self._inner(vars(value), depth)}"
        name = self.code.reach_class(kind)
        # A graph of torch.fx is notes about the code that was made from it; a lock says nothing about a graph.
        if kind.__module__.startswith(("torch.fx", "torch._dynamo", "_thread")):
            return name
        if isinstance(value, ARRAYS):
            self.code.note_contents(value)
        if isinstance(value, BY_TEXT) or kind.__module__.startswith("packaging."):
            return f"{name} {value!r}"
        self.code.note_contents(value)
        # Two things that differ must never have one text: what cannot be told apart cannot be described.
        if not depth or (isinstance(value, _CONTAINERS) and len(value) > MAX_ITEMS):
            raise ValueError(f"there is too much in a {name}")
        if isinstance(value, Mapping):
            # Of a dictionary what it has, not what its class makes of that.
            ordered = OrderedDict if isinstance(value, OrderedDict) else dict
            held = ordered.items(value) if isinstance(value, dict) else value.items()
            items = ((k, v) for k, v in held if k not in _ORIGINS)
            inside = ", ".join(f"{self.value(k, depth - 1)}: {self._item(value, k, v, depth - 1)}" for k, v in items)
            return f"{name}{{{inside}}}{self._beside(value, depth)}"
        if isinstance(value, list | tuple | deque):
            inside = ", ".join(self._item(value, i, item, depth - 1) for i, item in enumerate(value))
            return f"{name}[{inside}]{self._beside(value, depth)}"
        if isinstance(value, set | frozenset):
            inside = ", ".join(sorted(self.value(item, depth - 1) for item in value))
            return f"{name}{{{inside}}}{self._beside(value, depth)}"
        table = attributes_of(value)
        if table is None:
            raise ValueError(f"the state of a {name} cannot be seen")
        if id(value) in self._seen:
            return f"{name} seen"
        if self.code.is_outside and is_own(kind):
            return f"{name} {self.code.named_of(value, table)}"
        self._seen[id(value)] = value
        items = ((k, v) for k, v in table.items() if k not in _ORIGINS)
        inside = ", ".join(f"{k}={self._item(table, k, v, depth - 1)}" for k, v in items)
        return f"{name}({inside})"

    def _beside(self, container: Any, depth: int) -> str:
        """The attributes of a container, other than what is in it."""
        if type(container) in (dict, list, tuple, set, frozenset):
            return ""
        held = [(table, name, value) for _, table in tables_of(container) for name, value in table.items()]
        is_item = container.get if isinstance(container, dict) else lambda _: self
        own = [
            (table, name, value) for table, name, value in held if is_item(name) is not value and name not in _ORIGINS
        ]
        inside = ", ".join(f"{name}={self._item(table, name, value, depth - 1)}" for table, name, value in own)
        return f"({inside})" if inside else ""

    def _inner(self, value: Any, depth: int) -> str:
        if not depth:
            raise ValueError(f"there is too much in a {name_of(type(value))}")
        return self.value(value, depth - 1)

    def _routine(self, value: Any, depth: int) -> str:
        """A function that is not written in Python."""
        owner = getattr(value, "__self__", None)
        self.code.reach_value(value)
        bound = "" if owner is None or isinstance(owner, types.ModuleType) else f" of {self._inner(owner, depth)}"
        return f"routine {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}{bound}"


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, if they are all of its state."""
    table = getattr(value, "__dict__", None)
    if type(table) is dict:
        return (
            {name: held for _, own in tables_of(value) for name, held in own.items()}
            if slots_of(type(value))
            else table
        )
    slots: dict[str, Any] = {}
    for cls in type(value).__mro__[:-1]:
        names = cls.__dict__.get("__slots__")
        if names is None or not cls.__flags__ & IS_HEAP_TYPE:
            return None
        for name in (names,) if isinstance(names, str) else names:
            own = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            with contextlib.suppress(AttributeError):
                slots[own] = object.__getattribute__(value, own)
    return slots


class _Raw:
    """A text whose ``repr`` is itself."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _tensor_text(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}{strides}"


def is_routine(value: Any) -> bool:
    """Whether it is a function that is not written in Python, and not an object whose class has a ``__get__``."""
    return inspect.isroutine(value) and isinstance(getattr(value, "__qualname__", None), str)


def name_of(thing: Any) -> str:
    """The full name of a class or function."""
    return f"{thing.__module__}.{thing.__qualname__}"
