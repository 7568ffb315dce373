"""Places outside of modules that a ``forward`` may write, and values that say all of what they are."""

from __future__ import annotations

import array
import contextvars
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import numpy
import torch
from torch import Tensor

from .guards import plain
from .signature import PLAIN

__all__ = [
    "ABSENT",
    "ARRAYS",
    "CONTAINERS",
    "ITERATORS",
    "STATEFUL",
    "MAX_NESTED",
    "Cells",
    "ClassTable",
    "Outer",
    "Slots",
    "containers",
    "fill_state",
    "is_same_state",
    "is_as",
    "is_plain_object",
    "is_traced",
    "is_value",
    "slots_of",
    "state_of",
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


_NOT_OWN = frozenset(("torch", "builtins", __name__.partition(".")[0], *sys.stdlib_module_names)) - {
    "argparse",
    "collections",
    "types",
}
"""Packages whose objects keep nothing that a forward would make; namespaces and `UserDict` do."""


def is_plain_object(kind: type) -> bool:
    """Whether things of this type are objects of the program's own, with attributes, and not modules or tensors."""
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, dict, list, tuple, torch.nn.Module, Tensor)):
        return False
    return kind.__module__.partition(".")[0] not in _NOT_OWN


def slots_of(kind: type) -> list[str]:
    """The slots that things of this type have, if it is the program's own; as they are called in the class."""
    if kind.__module__.partition(".")[0] in _NOT_OWN or issubclass(kind, (type, torch.nn.Module, Tensor)):
        return []
    members = (one for cls in kind.__mro__ for one in cls.__dict__.items())
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


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


CONTAINERS = (dict, list, set, deque)
ARRAYS = (numpy.ndarray, array.array, bytearray, memoryview)
"""What holds numbers that are written in place."""
_EMPTY: tuple[Any, ...] = ([], (), {}, set(), "", b"", range(0))
ITERATORS: tuple[type, ...] = (
    types.GeneratorType, enumerate, filter, map, reversed, zip, *(type(iter(empty)) for empty in _EMPTY),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)  # fmt: skip
"""What hands out one thing after another, of which nobody sees how far it is."""
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
STATEFUL: tuple[type, ...] = (*ARRAYS, *_GENERATORS, *ITERATORS, contextvars.ContextVar)
"""What has a state that is in no attribute, and is read and put back as a whole."""
_MAX_BYTES = 1 << 24
"""Larger arrays are not copied to see whether ``forward`` writes them."""


def state_of(holder: Any) -> Any:
    """What one of :data:`STATEFUL` holds now, for :func:`fill_state`. Equal states are equal."""
    if isinstance(holder, numpy.ndarray):
        return (holder.shape, holder.tobytes()) if holder.nbytes <= _MAX_BYTES and not holder.dtype.hasobject else None
    if isinstance(holder, contextvars.ContextVar):
        return holder.get(ABSENT)
    if isinstance(holder, ARRAYS):
        return bytes(holder)
    if isinstance(holder, random.Random):
        return holder.getstate()
    if isinstance(holder, ITERATORS):
        return None
    return pickle.dumps(_numbers_of(holder))


def fill_state(holder: Any, state: Any) -> None:
    """Puts a state back."""
    if isinstance(holder, numpy.ndarray):
        if state is not None:
            holder[...] = numpy.frombuffer(state[1], holder.dtype).reshape(state[0])
    elif isinstance(holder, contextvars.ContextVar):
        holder.set(None if state is ABSENT else state)
    elif isinstance(holder, array.array):
        holder[:] = array.array(holder.typecode, state)
    elif isinstance(holder, bytearray):
        holder[:] = state
    elif isinstance(holder, random.Random):
        holder.setstate(state)
    elif isinstance(holder, numpy.random.Generator):
        holder.bit_generator.state = pickle.loads(state)
    else:
        holder.set_state(pickle.loads(state))


def _numbers_of(generator: Any) -> Any:
    return generator.bit_generator.state if isinstance(generator, numpy.random.Generator) else generator.get_state()


def is_same_state(one: Any, other: Any) -> bool:
    """Whether a holder of two states was not written between them."""
    return one is other or (type(one) is type(other) and type(one) in (bytes, tuple, *PLAIN) and bool(one == other))


def containers(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The lists, deques, dictionaries, sets and what else has a state among these values, and those in them, with the names
    of the values."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = list(values)
    while waiting and len(found) < MAX_NESTED:
        label, holder = waiting.pop()
        if isinstance(holder, STATEFUL):
            found[id(holder)] = label, holder
        elif isinstance(holder, CONTAINERS) and id(holder) not in found:
            found[id(holder)] = label, holder
            if not isinstance(holder, set):
                waiting += [(label, v) for v in (holder.values() if isinstance(holder, dict) else holder)]
    return list(found.values())
