"""Numbers that ``forward`` draws from the generators of Python and numpy and never looks at.

Models that leave out layers at random draw a number for each of them, also where none is left out and nothing asks for it.
In a trace an object stands for it that refuses to be looked at, and an op of the graph draws as many in each call, so that
the generators go on from where eager leaves them.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..errors import CaptureError
from .failures import DrawnError
from .following import is_tracing
from .guards import plain

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["DRAW", "NUMPYS", "PYTHONS", "Drawn", "drawn_and_unread", "refusal"]

PYTHONS, NUMPYS = "Python's random module", "numpy.random"
"""What the generators are called."""

_LIBRARY = torch.library.Library("oxidiff", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA = "draw(str generator, int count) -> Tensor"
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]


def _draw(generator: str, count: int) -> Tensor:
    draw = random.random if generator == PYTHONS else sys.modules["numpy.random"].random_sample
    for _ in range(count):
        draw()
    return torch.empty(())


_LIBRARY.impl("draw", _draw, "BackendSelect")  # type: ignore[no-untyped-call]
DRAW = torch.ops.oxidiff.draw.default
"""Draws a number of numbers from a generator, and gives none."""


def refusal(generator: str) -> DrawnError:
    """The exception for numbers that are looked at."""
    return DrawnError(
        f"forward draws numbers from the generator of {generator}, which a program would draw once for all calls; pass them "
        "as arguments"
    )


class Drawn:
    """What a trace drew.

    Attributes:
        counts: How many numbers, by the name of their generator.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._unread: list[tuple[weakref.ref[Any], str]] = []

    def draw(self, generator: str, noted: Callable[[CaptureError], CaptureError]) -> Any:
        """Stands for the next number."""
        self.counts[generator] = self.counts.get(generator, 0) + 1

        def refuse() -> NoReturn:
            raise noted(refusal(generator))

        number = _Unread(refuse)
        self._unread.append((weakref.ref(number), generator))
        return number

    def check(self) -> None:
        """Raises an exception if one is left after ``forward``, in its result or elsewhere: somebody may look at it yet."""
        for ref, generator in self._unread:
            if ref() is not None:
                raise refusal(generator)

    def close(self) -> None:
        """From here on they are objects like others, for whoever looks for what ``forward`` changed."""
        for ref, _ in self._unread:
            if (number := ref()) is not None:
                object.__setattr__(number, "refuse", None)


_NEVER = -1
"""In place of how many numbers a function may be given: it does not draw."""


@contextmanager
def drawn_and_unread(recorder: Recorder) -> Iterator[None]:
    """Lets a trace draw single numbers without the generators: see the module."""
    numpys: Any = sys.modules.get("numpy.random")
    places: list[tuple[Any, str, str, int]] = [(random, PYTHONS, "random", 0), (random, PYTHONS, "uniform", 2)]
    names = (("rand", 0), ("random", 0), ("random_sample", 0), ("uniform", 2))
    places += [(numpys, NUMPYS, name, most) for name, most in names if hasattr(numpys, name)]
    # Who takes it back, or keeps where it is, asks how many were drawn before.
    places += [(random, PYTHONS, name, _NEVER) for name in ("getstate", "seed", "setstate")]
    places += [(numpys, NUMPYS, name, _NEVER) for name in ("get_state", "seed", "set_state") if hasattr(numpys, name)]
    before = [getattr(space, name) for space, _, name, _ in places]
    try:
        for (space, generator, name, most), function in zip(places, before, strict=True):
            setattr(space, name, _unread(recorder, generator, most, function))
        yield
    finally:
        recorder.drawn.close()
        for (space, _, name, _), function in zip(places, before, strict=True):
            setattr(space, name, function)


def _unread(recorder: Recorder, generator: str, most: int, function: Callable[..., Any]) -> Callable[..., Any]:
    least = 2 if generator == PYTHONS and most else 0

    @functools.wraps(function)
    def draw(*numbers: Any, **named: Any) -> Any:
        if most == _NEVER and is_tracing():
            raise recorder.noted(refusal(generator))
        is_one = not named and least <= len(numbers) <= most and all(map(_is_finite, numbers))
        return (
            recorder.drawn.draw(generator, recorder.noted) if is_one and is_tracing() else function(*numbers, **named)
        )

    return draw


def _is_finite(number: Any) -> bool:
    number = plain(number)
    return type(number) in (int, float) and math.isfinite(number)


class _Unread:
    """A number that nobody has: whatever it is asked, also for its class, it refuses."""

    __slots__ = ("__weakref__", "refuse")

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        object.__setattr__(self, "refuse", refuse)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        refuse = object.__getattribute__(self, "refuse")
        return _Unread if refuse is None else refuse()


def _refusing(name: str) -> Callable[..., Any]:
    own = getattr(object, name, None)

    def method(self: _Unread, *given: Any) -> Any:
        refuse = object.__getattribute__(self, "refuse")
        if refuse is not None:
            refuse()
        if own is None:
            raise AttributeError(name)
        return own(self, *given)

    return method


_ASKING = (
    "abs", "add", "and", "bool", "bytes", "call", "ceil", "complex", "contains", "copy", "deepcopy", "dir", "divmod", "eq",
    "float", "floor", "floordiv", "format", "ge", "getattribute", "getitem", "gt", "hash", "index", "int", "invert",
    "iter", "le", "len", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "next", "or", "pos", "pow", "radd", "rand",
    "rdivmod", "reduce_ex", "repr", "rfloordiv", "rlshift", "rmatmul", "rmod", "rmul", "ror", "round", "rpow", "rrshift",
    "rshift", "rsub", "rtruediv", "rxor", "setattr", "str", "sub", "truediv", "trunc", "xor",
)  # fmt: skip
for _name in _ASKING:
    setattr(_Unread, f"__{_name}__", _refusing(f"__{_name}__"))
