"""What holds something that no attribute shows: arrays, generators of random numbers, iterators, variables of contexts.

A trace must leave all of it as it was, and a ``forward`` that writes there is no graph's. So it is copied before a trace and
compared after it; where nobody can see how far something is, no trace runs that may take from it.
"""

from __future__ import annotations

import array
import contextvars
import functools
import io
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy

from .classes import of_class
from .signature import PLAIN

__all__ = [
    "ABSENT",
    "ARRAYS",
    "fill_state",
    "is_iterator",
    "is_same_state",
    "is_stateful",
    "is_unseen",
    "items_of",
    "state_of",
]

ABSENT = object()
"""Stands for what is not there."""
ARRAYS = (numpy.ndarray, array.array, bytearray, memoryview)
"""What holds numbers that are written in place."""

_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
_STATEFUL = (*ARRAYS, *_GENERATORS, contextvars.ContextVar)
_PLATFORM = frozenset(("builtins", "numpy", *sys.stdlib_module_names))
_MAX_BYTES = 1 << 28
"""Of a larger array is not seen whether ``forward`` writes it, so no trace runs that may."""


def is_stateful(value: Any) -> bool:
    """Whether something has a state that is read and put back as a whole, or that nobody sees."""
    return isinstance(value, _STATEFUL) or is_iterator(value)


@of_class
def _is_iterator(kind: Any) -> bool:
    is_own = kind.__module__.partition(".")[0] not in _PLATFORM
    has_position = hasattr(kind, "__next__") and not issubclass(kind, (io.IOBase, itertools.repeat))
    return has_position and not is_own and hasattr(kind, "__iter__")


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's or numpy's, which hands out one thing after another: of one of a class of the
    program's own its attributes are seen."""
    kind: Any = type(value)
    return _is_iterator(kind)


def is_unseen(value: Any) -> bool:
    """Whether something has a state that nobody sees, or that would take too long to copy."""
    if isinstance(value, random.SystemRandom) or is_iterator(value):
        return True
    return isinstance(value, (numpy.ndarray, memoryview)) and _bytes_of(value) > _MAX_BYTES


def _bytes_of(value: Any) -> int:
    try:
        return int(value.nbytes)
    except ValueError:
        # A view that was released.
        return 0


def state_of(holder: Any) -> Any:
    """What something stateful holds now, for :func:`fill_state`; nothing of what is not seen. Equal states are equal."""
    if isinstance(holder, contextvars.ContextVar):
        try:
            return holder.get()
        except LookupError:
            return ABSENT
    if is_unseen(holder):
        return None
    if isinstance(holder, numpy.ma.MaskedArray):
        mask = numpy.ma.getmaskarray(holder)
        return holder.shape, holder.data.tobytes(), mask.tobytes()
    if isinstance(holder, numpy.ndarray):
        is_of_objects = holder.dtype.hasobject
        return holder.shape, tuple(map(_Same, holder.flat)) if is_of_objects else holder.tobytes()
    if isinstance(holder, ARRAYS):
        try:
            return bytes(holder)
        except ValueError:
            return None
    if isinstance(holder, random.Random):
        return holder.getstate()
    return pickle.dumps(_numbers_of(holder))


class _Same:
    """Something that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fill_state(holder: Any, state: Any) -> None:
    """Puts a state back. Traces run in a context of their own, whose variables go with it."""
    if isinstance(holder, contextvars.ContextVar):
        if state is not ABSENT:
            holder.set(state)
    elif state is None:
        return
    elif isinstance(holder, numpy.ndarray):
        _fill_array(holder, *state)
    elif isinstance(holder, array.array):
        holder[:] = array.array(holder.typecode, state)
    elif isinstance(holder, bytearray):
        holder[:] = state
    elif isinstance(holder, memoryview):
        holder.cast("B")[:] = state
    elif isinstance(holder, random.Random):
        holder.setstate(state)
    elif isinstance(holder, numpy.random.RandomState):
        holder.set_state(pickle.loads(state))
    else:
        bits = holder.bit_generator if isinstance(holder, numpy.random.Generator) else holder
        bits.state = pickle.loads(state)


def _fill_array(holder: Any, shape: tuple[int, ...], contents: Any, mask: bytes | None = None) -> None:
    if holder.shape != shape:
        holder.shape = shape
    if isinstance(contents, tuple):
        for at, one in enumerate(contents):
            holder.flat[at] = one.value
        return
    own = holder.data if isinstance(holder, numpy.ma.MaskedArray) else holder
    own[...] = numpy.frombuffer(contents, holder.dtype).reshape(shape)
    if mask is not None:
        holder.mask = numpy.frombuffer(mask, bool).reshape(shape)


def _numbers_of(generator: Any) -> Any:
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    return (generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator).state


def is_same_state(one: Any, other: Any) -> bool:
    """Whether a holder of two states was not written between them."""
    return one is other or (type(one) is type(other) and type(one) in (bytes, tuple, *PLAIN) and bool(one == other))


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What is in a container, a partial, a bound method or a variable, each after where it is there."""
    if isinstance(value, dict):
        # As it is, and not as its class shows it.
        return list(dict.items(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return enumerate(list(value))
    if isinstance(value, functools.partial):
        return ("func", value.func), ("args", value.args), ("keywords", value.keywords)
    if isinstance(value, types.MethodType):
        return (("__self__", value.__self__),)
    if isinstance(value, contextvars.ContextVar):
        held = state_of(value)
        return () if held is ABSENT else (("get()", held),)
    return ()
