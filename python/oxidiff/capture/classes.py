"""What is known of a class, which is looked at once, and of members of enumerations."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["held_by_member", "of_class"]

_T = TypeVar("_T")


def of_class(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """A function of a class that remembers what it gave, but for classes that cannot be hashed: those of a metaclass with an
    ``__eq__`` of its own."""
    known: Any = functools.cache(function)

    @functools.wraps(function)
    def look(kind: type) -> _T:
        try:
            found: _T = known(kind)
        except TypeError:
            return function(kind)
        return found

    return look


_OF_ENUM = frozenset(("_name_", "_sort_order_", "__objclass__", "_inverted_", "_hashable_values_"))
"""What Python itself notes in members of enumerations beside their values, some of it when it is first asked for."""


def held_by_member(member: enum.Enum) -> dict[str, Any]:
    """The value of an enumeration's member, and the attributes that its class gave it."""
    return {name: value for name, value in member.__dict__.items() if name not in _OF_ENUM}
