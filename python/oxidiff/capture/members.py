"""Objects among the arguments of a call, taken apart into what their attributes hold.

A dataclass is its fields. An object of a class in Python whose ``__dict__`` is all that it is, and that has tensors, lists
or dictionaries, is its attributes: a cache of keys and values that a pipeline passes to its transformer. Others belong to
the code that made them: a lock, a file, a module, what has a slot or a finalizer; and one of texts and numbers alone may be
one of a few that ``forward`` knows, and asks which it is.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import CaptureError
from .objects import found_class, name_of

__all__ = ["are_all", "check_returned", "has_members", "is_settable", "members_of", "told_apart", "with_members"]


class _Plain:
    """An object with attributes and nothing else."""


_GIVEN = ("__new__", "__setattr__", "__delattr__", "__getattribute__")
"""What a class may not do in its own way."""
_ROOM = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
"""What instances have room for: no slots, nothing of C."""


def has_members(value: Any) -> bool:
    """Whether an argument, no container, can be taken apart."""
    if isinstance(value, type):
        return False
    return is_dataclass(value) or _is_plain(type(value))


def are_all(value: Any, members: Mapping[str, Any], leaves: Iterable[Any]) -> bool:
    """Whether an argument is no more than its members, which have these tensors and numbers in them."""
    has_containers = any(isinstance(item, (list, dict)) for item in members.values())
    return is_dataclass(value) or has_containers or any(isinstance(leaf, Tensor) for leaf in leaves)


def is_settable(value: Any) -> bool:
    """Whether to set an attribute of an argument is to put it into its ``__dict__``."""
    return _is_plain(type(value))


def members_of(value: Any) -> dict[str, Any]:
    """What :func:`has_members`, by name."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(vars(value))


def with_members(value: Any, members: Mapping[str, Any]) -> Any:
    """Another object of the class of one, with these members."""
    kind: Any = type(value)
    if is_dataclass(value):
        return kind(**members)
    made = kind.__new__(kind)
    vars(made).update(members)
    return made


def _is_plain(kind: type) -> bool:
    if kind is types.SimpleNamespace:
        return True
    if any(getattr(kind, name) != getattr(_Plain, name) for name in _ROOM) or hasattr(kind, "__del__"):
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in _GIVEN):
        return False
    # Caches of language models are filled by every call, and their classes ask each other what they hold.
    return not (kind.__module__ == "transformers.cache_utils" and found_class(name_of(kind)) is kind)


def check_returned(result: Any, copies: Mapping[int, Any]) -> None:
    """Raises an error if a result has one of these copies of arguments in it: the caller is to get its own object.

    Raises:
        CaptureError: It has.
    """
    for leaf in tree_leaves(result) if copies else ():
        if id(leaf) in copies:
            raise CaptureError(f"forward returns its argument of type {type(leaf).__name__}")
        if found_class(name_of(type(leaf))) is type(leaf):
            check_returned(members_of(leaf), copies)


@contextmanager
def told_apart(copies: Mapping[int, Any]) -> Iterator[None]:
    """Lets nobody take these copies of arguments for others of their class: a program that looks an object up in a
    dictionary, or compares it with one that it knows, would not find it. What is asked of all others is answered as ever, in
    every thread."""
    kinds: set[Any] = {
        kind for kind in map(type, copies.values()) if getattr(kind, "__hash__", None) is object.__hash__
    }
    own = [(kind, name, vars(kind).get(name)) for kind in kinds for name in ("__hash__", "__eq__")]

    def refused(one: Any) -> CaptureError:
        return CaptureError(f"forward asks which object its argument of type {type(one).__name__} is")

    def hashed(self: Any) -> int:
        if id(self) in copies:
            raise refused(self)
        return object.__hash__(self)

    def equals(self: Any, other: Any) -> Any:
        if self is not other and type(self) is type(other) and not copies.keys().isdisjoint((id(self), id(other))):
            raise refused(self)
        return object.__eq__(self, other)

    try:
        for kind in kinds:
            kind.__hash__, kind.__eq__ = hashed, equals
        yield
    finally:
        for kind, name, before in own:
            if before is not None:
                setattr(kind, name, before)
            elif name in vars(kind):
                delattr(kind, name)
