"""What is known of a class, which is looked at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["of_class"]

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
