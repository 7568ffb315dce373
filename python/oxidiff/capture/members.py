"""Objects among the arguments of a call, taken apart into what their attributes hold.

A dataclass is its attributes, and so are a slice and a cache of keys and values that a pipeline of diffusers passes to its
transformer (:func:`~oxidiff.capture.objects.is_kept`). Other objects belong to the code that made them: it may know them by
what they are, count them, or keep more of them elsewhere than in their attributes.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from ..errors import CaptureError
from .objects import found_class, is_kept, name_of, taken_apart

__all__ = ["are_taken_apart", "check_returned", "has_members", "is_settable", "members_of", "with_members"]


class _Plain:
    """An object with attributes and nothing else."""


_GIVEN = ("__new__", "__setattr__", "__delattr__", "__getattribute__", "__eq__", "__hash__")
"""What a class may not do in its own way."""
_ROOM = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
"""What instances have room for: no slots, nothing of C."""
_known: weakref.WeakKeyDictionary[type, tuple[bool, bool]] = weakref.WeakKeyDictionary()
"""Of a class, whether its objects are taken apart, and whether they are written to."""


def are_taken_apart(kind: type) -> bool:
    """Whether objects of a class are, that are no containers and none of Python's own."""
    return kind is not slice and _of(kind)[0]


def has_members(value: Any) -> bool:
    """Whether an argument, no container, can be taken apart."""
    return _of(type(value))[0]


def is_settable(value: Any) -> bool:
    """Whether a program may set attributes of an argument."""
    return _of(type(value))[1]


def members_of(value: Any) -> dict[str, Any]:
    """What the attributes of an object hold, by name."""
    if type(value) is slice:
        return {"start": value.start, "stop": value.stop, "step": value.step}
    members = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    members.update(getattr(value, "__dict__", ()))
    return members


def with_members(value: Any, members: Mapping[str, Any]) -> Any:
    """Another object of the class of one, with these attributes. No constructor is called, which might compute others."""
    if type(value) is slice:
        return slice(*members.values())
    made = object.__new__(type(value))
    for name, item in members.items():
        object.__setattr__(made, name, item)
    return made


def check_returned(result: Any, copies: Collection[int]) -> None:
    """Raises an error if a result has one of these copies of arguments, by their ids, in it: the caller is to get its own
    object.

    Raises:
        CaptureError: It has.
    """
    for leaf in tree_leaves(taken_apart(result, copies)) if copies else ():
        if id(leaf) in copies:
            raise CaptureError(f"forward returns its argument of type {type(leaf).__name__}")


def _of(kind: type) -> tuple[bool, bool]:
    try:
        found = _known.get(kind)
    except TypeError:
        # It cannot be hashed: a call with such an object could not be found again.
        return False, False
    if found is None:
        is_record = is_dataclass(kind) and kind.__new__ is object.__new__ and not issubclass(kind, enum.Enum)
        is_plain = not is_record and _is_plain(kind)
        found = _known[kind] = (is_record or is_plain or kind is slice, is_plain)
    return found


def _is_plain(kind: type) -> bool:
    name = name_of(kind)
    if not is_kept(kind.__module__, kind.__name__) or found_class(name) is not kind or hasattr(kind, "__del__"):
        return False
    as_plain = all(getattr(kind, name) == getattr(_Plain, name) for name in _ROOM)
    return as_plain and all(getattr(kind, name) is getattr(object, name) for name in _GIVEN)


def _slots_of(kind: type) -> list[str]:
    """The names of slots; of most classes there are none."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
