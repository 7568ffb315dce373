"""Places outside of modules that a ``forward`` may write, and values that say all of what they are."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from .guards import plain
from .signature import PLAIN

__all__ = [
    "ABSENT",
    "CONTAINERS",
    "MAX_NESTED",
    "Cells",
    "ClassTable",
    "Outer",
    "containers",
    "is_as",
    "is_traced",
    "is_value",
]

ABSENT = object()
"""Stands for what is not there."""
MAX_NESTED = 10_000
"""Lists and dictionaries in attributes that are looked at."""


def is_as(one: Any, other: Any) -> bool:
    """Whether two values are one, or equal numbers, texts and containers of such: who has the one has the other."""
    if one is other:
        return True
    one, other = plain(one), plain(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_as, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(map(is_as, one.values(), other.values()))
    # Of floats, -0.0 is another than 0.0, and what is not a number as good as any.
    return type(one) in PLAIN and (one == other or one != one) and repr(one) == repr(other)


def is_value(value: Any) -> bool:
    """Whether it is a number, a text or a tuple of such, or nothing at all: a count, a mode or a size."""
    return value is ABSENT or type(plain(value)) in PLAIN or (isinstance(value, tuple) and all(map(is_value, value)))


def is_traced(value: Any) -> bool:
    """Whether it is a number that follows from sizes in a running trace, or there are such in it."""
    if isinstance(value, (tuple, list)):
        return any(map(is_traced, value))
    return plain(value) is not value


class Outer:
    """Places outside of modules that code may write: globals, and what is inside of those.

    Attributes:
        names: A label, the dictionary, and the name in it.
        holders: A label, and the dictionary, list or set.
        may_draw: Whether code may draw from the generators of Python and numpy, which belong to all threads.
        may_seed: Whether code may set, keep or put back the state of PyTorch's generators.
        untracked: Dictionaries that Python's collector does not know, as nothing is in them that it would follow: once
            something is put into them, they look as young as that.
    """

    def __init__(
        self,
        names: Iterable[tuple[str, Any, str]] = (),
        holders: Iterable[tuple[str, Any]] = (),
        may_draw: bool = True,
        may_seed: bool = False,
        untracked: Iterable[dict[Any, Any]] = (),
    ) -> None:
        self.names = [*names]
        self.holders = containers(holders)
        self.may_draw = may_draw
        self.may_seed = may_seed
        self.untracked = [*untracked]


class ClassTable(MutableMapping[str, Any]):
    """The attributes of a class, to be written."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __getitem__(self, name: str) -> Any:
        return self._cls.__dict__[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cls.__dict__)

    def __len__(self) -> int:
        return len(self._cls.__dict__)


class Cells(MutableMapping[str, Any]):
    """What a function finds in variables around it, by their names, to be written."""

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        # An empty one is not assigned to yet.
        self._cells = {name: cell for name, cell in cells if cell != types.CellType()}

    def of(self, name: str) -> types.CellType:
        """The variable itself."""
        return self._cells[name]

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the variable {name} stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


CONTAINERS = (dict, list, set, deque)


def containers(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The lists, deques, dictionaries and sets among these values, and those in them, with the names of the values."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = list(values)
    while waiting and len(found) < MAX_NESTED:
        label, holder = waiting.pop()
        if isinstance(holder, CONTAINERS) and id(holder) not in found:
            found[id(holder)] = label, holder
            if not isinstance(holder, set):
                waiting += [(label, v) for v in (holder.values() if isinstance(holder, dict) else holder)]
    return list(found.values())
