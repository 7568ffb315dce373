"""A call's arguments as a key and a flat list of leaves.

The key has everything of a call that decides which program runs and which sizes it runs at: how the arguments nest,
types, tensors' dtypes, sizes and strides, which of them are one object, flags and strings. It does not have the values of
tensors and of numbers: these are the leaves, in the order of the walk. Two calls with equal keys have
leaves that fit the same program.

Making a key is on the path of every call: the extension makes it for arguments of the common kinds. For all others there
is one function per type here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from . import _native
from .capture.members import are_taken_apart, has_members, members_of, with_members
from .capture.signature import Double, attributes_of, dict_like, is_constant, key_text, text_of_member
from .errors import CaptureError, is_interrupt

__all__ = ["Leaf", "NotAKeyError", "classes_in", "key_of", "kind_of", "plain_numbers", "replace_leaves"]

Leaf = Tensor | int | float
"""What varies between calls of one key."""

_strided = torch.strided
_Tensor = Tensor
_Parameter = torch.nn.Parameter


class NotAKeyError(Exception):
    """An argument that a program cannot take; the message says which and why."""


def _tensor(value: Any, leaves: list[Leaf]) -> Any:
    if value.layout is not _strided or value.is_nested:
        raise NotAKeyError("a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}")
    for place, leaf in enumerate(leaves):
        if leaf is value:
            leaves.append(value)
            return "same", place
    leaves.append(value)
    shape = value.shape
    if value.is_neg() or value.is_conj():
        raise NotAKeyError("a tensor with torch's lazy negation or conjugation bit")
    if value.__dict__:
        try:
            attributes = attributes_of(value)
        except CaptureError as error:
            raise NotAKeyError(str(error).removesuffix(" is passed")) from None
        return value.dtype, shape, value.stride(), value.device, *[text for _, text in attributes.values()]
    return value.dtype, shape, value.stride(), value.device


def _number(value: Any, leaves: list[Leaf]) -> Any:
    leaves.append(value)
    return type(value)


def _itself(value: Any, leaves: list[Leaf]) -> Any:
    return value


def _flag(value: Any, leaves: list[Leaf]) -> Any:
    # Not the bool itself: True and 1 are the same key to a dict.
    return "true" if value else "false"


def _text(value: Any, leaves: list[Leaf]) -> Any:
    return str, value


def _tuple(value: Any, leaves: list[Leaf]) -> Any:
    return tuple, *[_DESCRIBE.get(type(item), _other)(item, leaves) for item in value]


def _list(value: Any, leaves: list[Leaf]) -> Any:
    return list, *[_DESCRIBE.get(type(item), _other)(item, leaves) for item in value]


def _dict(value: Any, leaves: list[Leaf]) -> Any:
    return (
        type(value),
        tuple(map(key_text, value)),
        *[_DESCRIBE.get(type(item), _other)(item, leaves) for item in value.values()],
    )


def _other(value: Any, leaves: list[Leaf]) -> Any:
    kind = type(value)
    if has_members(value):
        return _object(value, leaves)
    if isinstance(value, Tensor):
        raise NotAKeyError(f"a tensor of the subclass {kind.__name__}")
    if isinstance(value, enum.Enum):
        return kind, value.name, text_of_member(value)
    if isinstance(value, type):
        hash(value)
        return kind, value
    if is_constant(value):
        # Equal ones of two kinds, as `1+0j` and 1, are not one.
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, *[_DESCRIBE.get(type(item), _other)(item, leaves) for item in value]
    if isinstance(value, dict):
        return _dict(value, leaves)
    raise NotAKeyError(f"an argument of type {kind.__module__}.{kind.__qualname__}")


def _object(value: Any, leaves: list[Leaf]) -> Any:
    members = members_of(value)
    return type(value), tuple(members), *[_DESCRIBE.get(type(item), _other)(item, leaves) for item in members.values()]


_DESCRIBE: Mapping[type, Callable[[Any, list[Leaf]], Any]] = {
    Tensor: _tensor,
    _Parameter: _tensor,
    torch.nn.Buffer: _tensor,
    int: _number,
    float: _number,
    Double: _number,
    bool: _flag,
    type(None): _itself,
    str: _text,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    torch.Size: _tuple,
    torch.dtype: _itself,
    torch.device: _itself,
}


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf]) -> Hashable:
    """The key of a call; appends its leaves to ``leaves``, which is empty.

    Raises:
        NotAKeyError: An argument is of a kind that no program takes.
    """
    native = _native.key_of(args, kwargs, leaves)
    if native is not None:
        return native
    leaves.clear()
    find = _DESCRIBE.get
    try:
        key: list[Any] = [find(type(value), _other)(value, leaves) for value in args]
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                key.append(find(type(value), _other)(value, leaves))
    except RecursionError:
        raise NotAKeyError("an argument that holds itself") from None
    except NotAKeyError:
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        # Of a class that cannot be hashed, or whose methods refuse.
        raise NotAKeyError(f"an argument that cannot be taken apart ({type(error).__name__}: {error})") from None
    return tuple(key)


def kind_of(value: Any) -> Any:
    """What calls of all sizes and numbers have in common in an argument: how it nests, dtypes and dimensions of tensors,
    types of numbers, and constants as they are."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.device
    if kind in _NUMBERS:
        return kind
    if isinstance(value, (tuple, list)):
        return kind, *map(kind_of, value)
    if isinstance(value, dict):
        return kind, tuple(value), *map(kind_of, value.values())
    if has_members(value):
        members = members_of(value)
        return kind, tuple(members), *map(kind_of, members.values())
    return _DESCRIBE.get(kind, _other)(value, [])


def classes_in(value: Any) -> frozenset[type]:
    """The classes of the objects in an argument that are taken apart."""
    if isinstance(value, dict):
        return frozenset().union(*map(classes_in, value.values()))
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(classes_in, value))
    if has_members(value):
        own = {type(value)} if are_taken_apart(type(value)) else ()
        return frozenset(own).union(*map(classes_in, members_of(value).values()))
    return frozenset()


_NUMBERS = (int, float, Double)


def plain_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same call with Python's numbers for those arguments that are numpy's 64-bit ones; ``None`` if there are none.
    Others (``numpy.float32`` is no ``float``) may take another way through a ``forward``, or give tensors another dtype."""
    # By identity: not every class can be hashed.
    if not any(type(value) is numpy.int64 or type(value) is numpy.float64 for value in (*args, *kwargs.values())):
        return None
    return tuple(map(_plain_number, args)), {name: _plain_number(value) for name, value in kwargs.items()}


def _plain_number(value: Any) -> Any:
    kind = type(value)
    return int(value) if kind is numpy.int64 else Double(value) if kind is numpy.float64 else value


def replace_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other leaves, in the order of :func:`key_of`."""
    rest = iter(leaves)

    def replace(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor) or kind is int or kind is float or kind is Double:
            return next(rest)
        if isinstance(value, dict):
            return _rebuilt(value, ((name, replace(item)) for name, item in value.items()))
        if isinstance(value, tuple):
            items = [replace(item) for item in value]
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        if isinstance(value, list):
            return [replace(item) for item in value]
        if has_members(value):
            return with_members(value, {name: replace(item) for name, item in members_of(value).items()})
        return value

    return tuple(replace(value) for value in args), {name: replace(value) for name, value in kwargs.items()}


def _rebuilt(value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A dict of the same class; dataclass-like output classes of diffusers and transformers take keywords."""
    make = dict_like(value)
    return make(**dict(items)) if dataclasses.is_dataclass(value) else make(items)
