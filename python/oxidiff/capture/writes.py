"""Places outside of modules that a ``forward`` may write, and values that say all of what they are."""

from __future__ import annotations

import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Set
from typing import Any

import torch
from torch import Tensor

from .guards import plain
from .signature import PLAIN
from .stateful import ABSENT, is_stateful, items_of

__all__ = [
    "ABSENT",
    "CONTAINERS",
    "IS_HEAP_TYPE",
    "MAX_NESTED",
    "Cells",
    "ClassTable",
    "Outer",
    "Slots",
    "containers",
    "is_as",
    "is_plain_object",
    "is_traced",
    "is_value",
    "slots_in",
    "slots_of",
    "tables_of",
]

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
        watched: Modules outside of the module whose attributes are watched, by their ids.

    Args:
        read: The names of attributes that code reads; ``None`` if that is not known.
        parts: What names begin or end with that code may put together.
    """

    def __init__(
        self,
        names: Iterable[tuple[str, Any, str]] = (),
        holders: Iterable[tuple[str, Any]] = (),
        may_draw: bool = True,
        may_seed: bool = False,
        untracked: Iterable[dict[Any, Any]] = (),
        read: Set[str] | None = None,
        parts: Iterable[str] = (),
        watched: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._read = read
        self._parts = tuple(parts)
        self.names = [*names]
        self.holders = containers(holders)
        self.may_draw = may_draw
        self.may_seed = may_seed
        self.untracked = [*untracked]
        self.watched = {id(module): module for module in watched}

    def reads(self, name: str) -> bool:
        """Whether code may read an attribute of this name."""
        # What a compiled function finds outside was found by the names in it.
        is_known = self._read is None or name in self._read or name.startswith("outside.")
        return is_known or any(name.startswith(part) or name.endswith(part) for part in self._parts)


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
_NOT_OWN = frozenset(("torch", "builtins", __name__.partition(".")[0], *sys.stdlib_module_names)) - {
    "argparse",
    "collections",
    "types",
}
"""Packages whose objects keep nothing that a forward would make; namespaces and `UserDict` do."""


IS_HEAP_TYPE = 1 << 9
"""Flag of classes that are made by a class statement."""


def is_plain_object(kind: type) -> bool:
    """Whether things of this type are objects of the program's own, with attributes, and not modules or tensors."""
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, dict, list, tuple, torch.nn.Module, Tensor)):
        return False
    return kind.__module__.partition(".")[0] not in _NOT_OWN


def slots_of(kind: type) -> list[str]:
    """The slots that things of this type have, if it is the program's own; as they are called in the class."""
    if kind.__module__.partition(".")[0] in _NOT_OWN or issubclass(kind, (type, torch.nn.Module, Tensor)):
        return []
    # Classes in C have members, too, which are not to be written.
    return slots_in(cls for cls in kind.__mro__ if cls.__flags__ & IS_HEAP_TYPE and "__slots__" in cls.__dict__)


def slots_in(classes: Iterable[type]) -> list[str]:
    """The slots that these classes define."""
    members = (one for cls in classes for one in cls.__dict__.items())
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


def tables_of(value: Any) -> list[tuple[Any, MutableMapping[str, Any]]]:
    """The attributes of an object or a container of the program's own, and what is in a ``threading.local`` here; those in
    slots apart. Each comes after what it is of."""
    found: list[tuple[Any, MutableMapping[str, Any]]] = []
    kind = type(value)
    if kind.__module__ == "builtins":
        # Nearly all of what attributes hold.
        return found
    is_container = isinstance(value, (*CONTAINERS, tuple)) and kind.__module__.partition(".")[0] not in _NOT_OWN
    if isinstance(value, threading.local):
        found.append((value, vars(value)))
    elif is_plain_object(kind) or is_container:
        try:
            table = object.__getattribute__(value, "__dict__")
        except AttributeError:
            table = None
        if type(table) is dict:
            found.append((value, table))
    slots = Slots(value)
    return [*found, (slots, slots)] if slots.names else found


class Slots(MutableMapping[str, Any]):
    """The attributes of an object that are in no dictionary."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.names = slots_of(type(value))

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._value, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._value, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._value, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_PLAIN = (type(None), bool, int, float, str, bytes, Tensor, torch.nn.Module)


def containers(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The lists, deques, dictionaries, sets and what else has a state among these values, and those in them, with the names
    of the values."""
    found: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting and len(seen) < MAX_NESTED:
        label, holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder
        if isinstance(holder, CONTAINERS) or is_stateful(holder):
            found.append((label, holder))
        if not isinstance(holder, (set, frozenset, types.MethodType)):
            waiting += [(label, part) for _, part in items_of(holder) if not isinstance(part, _PLAIN)]
    return found
