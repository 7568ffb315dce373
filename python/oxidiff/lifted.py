"""Numbers in a module's attributes that are arguments of its programs: the scale of an image prompt adapter, say.

A float in an attribute belongs to what a module computes, so another value is another program. A float that was seen to
change is expected to do so again: it is *lifted*, from then on an argument of the programs like a number that is passed.
Its values are read whenever the module is looked at anew, which a change of any attribute brings about.

To learn how a program depends on it, the module is traced with other values of it. That is done with a *twin*: a copy of
the module tree with the very same tensors, so that no other thread ever sees a value that nobody set. What cannot be
lifted (the code asks more of it than arithmetic, or the module cannot be copied) is *pinned*: it stays a constant.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import CaptureError, is_interrupt
from .watch import Structure

__all__ = ["Lifted", "Lifting", "Twin"]

_MAX_FORMS = 64
_MAX_INPUTS = 1024


class Lifting:
    """Which floats of a module are lifted. The module and its further weight sets share one.

    Threads: used under the lock of the module's dispatcher; a set's dispatcher only adds to it what is true of both.
    """

    def __init__(self) -> None:
        self._inputs: dict[bytes, frozenset[int]] = {}
        self._pinned: dict[bytes, frozenset[int]] = {}
        self._last: dict[bytes, Sequence[float]] = {}

    def inputs(self, form: bytes) -> tuple[int, ...]:
        """The indices of the lifted floats of trees of this form (:attr:`Structure.form`), ascending."""
        return tuple(sorted(self._inputs.get(form, ())))

    def learn(self, before: Structure, after: Structure) -> bool:
        """Lifts what differs between two states of a module if only floats do; whether that was anything new.

        Args:
            before: The state before. What differs from the last one of the same form is lifted, too: between them the module
                may have been another one, as with an adapter that is taken out and put back.
            after: The state now.
        """
        self._last[before.form] = before.floats
        last = self._last.pop(after.form, None)
        while len(self._last) >= _MAX_FORMS:
            del self._last[next(iter(self._last))]
        self._last[after.form] = after.floats
        if last is None:
            return False
        pairs = zip(last, after.floats, strict=True)
        return self._lift(after.form, {i for i, (old, new) in enumerate(pairs) if old != new})

    def adopt(self, structure: Structure, names: Collection[str]) -> bool:
        """Lifts floats by their names; whether that was anything new."""
        places = (structure.place(i)[2] for i in range(len(structure.floats))) if names else ()
        return self._lift(structure.form, {i for i, name in enumerate(places) if name in names})

    def pin(self, form: bytes, indices: Collection[int]) -> None:
        """Makes floats constants for good."""
        self._pinned[form] = self._pinned.get(form, frozenset()) | set(indices)
        self._inputs[form] = self._inputs.get(form, frozenset()) - self._pinned[form]

    def _lift(self, form: bytes, indices: Collection[int]) -> bool:
        known = self._inputs.get(form, frozenset())
        wanted = (known | set(indices)) - self._pinned.get(form, frozenset())
        if wanted == known or len(wanted) > _MAX_INPUTS:
            return False
        while len(self._inputs) >= _MAX_FORMS:
            oldest = next(iter(self._inputs))
            del self._inputs[oldest]
            self._pinned.pop(oldest, None)
        self._inputs[form] = wanted
        return True


class Twin:
    """A copy of a module tree with the same tensors, in which lifted numbers can be set.

    Attributes:
        root: The copy, and copies of what it reaches beside: see :attr:`Structure.root`.
        forward: What to trace: of the copy what it is of the module.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], structure: Structure) -> None:
        if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
            raise CaptureError(f"the forward of {type(module).__name__} is not its own")
        try:
            with _SharedTensors():
                copied = copy.deepcopy(module, {id(tensor): tensor for tensor in structure.tree.tensors})
        except Exception as error:
            if is_interrupt(error):
                raise
            raise CaptureError(f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}") from error
        self.forward = types.MethodType(forward.__func__, copied)
        seen = Structure(copied)
        self.root = seen.root
        if len(seen.floats) != len(structure.floats):
            raise CaptureError(f"a copy of {type(module).__name__} is another module")
        self._places = []
        for i in structure.inputs:
            (holder, key, name), (original, _, wanted) = seen.place(i), structure.place(i)
            if name != wanted or holder is original:
                raise CaptureError(f"{wanted} cannot be set in a copy of {type(module).__name__}")
            self._places.append((holder, key))

    def set(self, values: Sequence[float]) -> None:
        """Sets the lifted numbers."""
        for (holder, key), value in zip(self._places, values, strict=True):
            holder[key] = value


class Lifted:
    """The lifted numbers of a module as it is now.

    Attributes:
        places: The dictionary or list that has each, the key or index there, and its name.
        names: What each is called.
        values: What each is.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], structure: Structure) -> None:
        self._module = module
        self._forward = forward
        self._structure = structure
        self.places = [structure.place(i) for i in structure.inputs]
        self.names = tuple(name for _, _, name in self.places)
        self.values = structure.numbers

    def twin(self) -> Twin:
        """A copy of the module for tracing.

        Raises:
            CaptureError: The module cannot be copied, or not so that the numbers can be set.
        """
        return Twin(self._module, self._forward, self._structure)


class _SharedTensors(TorchFunctionMode):
    """Lets a copy have the tensors themselves, and stops it before anything is done with one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0]
        if any(isinstance(arg, Tensor) for arg in args):
            raise CaptureError("it would copy tensors")
        return func(*args, **(kwargs or {}))
