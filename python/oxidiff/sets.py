"""Further weights for one compiled module, all alive: what :func:`oxidiff.bind` and :func:`oxidiff.use` do.

A set is a module of the same architecture with a dispatcher of its own: the one that was given, or a copy of the compiled
module in which the tensors of a state dict take the place of parameters and buffers. No tensor is copied. Both attach to
the compiled module's programs, so a set costs its own weights, in the forms that the device wants, and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import walk
from .errors import ShapeError, UnsupportedError, is_interrupt
from .hooks import is_idle

if TYPE_CHECKING:
    from .dispatch import Dispatcher
    from .watch import Structure

__all__ = ["WeightSet", "check_fit"]

_LISTED = 5


class WeightSet:
    """One further set of weights.

    Args:
        module: The compiled module.
        source: A module of the same architecture, or tensors by name.
        make: Makes a dispatcher for a module.
        structure: What the module looks like.

    Raises:
        ShapeError: A tensor is missing, is one too many, has another dtype, shape or device, or torch's lazy negation or
            conjugation bit.
        UnsupportedError: The module cannot be copied.
    """

    def __init__(
        self,
        module: nn.Module,
        source: nn.Module | Mapping[str, Tensor],
        make: Callable[[nn.Module], Dispatcher],
        structure: Structure,
    ) -> None:
        check_fit(module, source)
        self._module = module
        self._make = make
        self._tensors = None if isinstance(source, nn.Module) else dict(source)
        self._made = structure, make(source if isinstance(source, nn.Module) else self._copy())

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the set's module."""
        return self._made[1]

    def follow(self, structure: Structure) -> Dispatcher:
        """The dispatcher, after the copy was made anew if the module has another structure since."""
        # Read and written as one, so that no thread meets a copy beside a structure that is not its own.
        before, dispatcher = self._made
        if self._tensors is not None and structure is not before:
            if not structure.is_as(before):
                dispatcher = self._make(self._copy())
            self._made = structure, dispatcher
        return dispatcher

    def _copy(self) -> nn.Module:
        assert self._tensors is not None, "a module that was given is not copied"
        for path, child in self._module.named_modules():
            if not is_idle(child.__dict__.get("_diffusers_hook")):
                # What is around the forward of a copy is a function, which holds the module that it was made for.
                place = f"{type(self._module).__name__}{path and '.'}{path}"
                raise UnsupportedError(
                    f"a copy of {place} would not run its hooks of diffusers: bind a module of its own instead of tensors"
                )
        memo: dict[int, Any] = {}
        for name, own in _tensors_of(self._module).items():
            given = self._tensors.get(name, own)
            if given is not own and isinstance(own, nn.Parameter):
                given = nn.Parameter(given, requires_grad=False)
            memo[id(own)] = given
        try:
            return copy.deepcopy(self._module, memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            if is_interrupt(error):
                raise
            what = f"{type(self._module).__name__} cannot be copied ({error}): bind a module of its own instead"
            raise UnsupportedError(what) from error


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, as they are without adapters."""
    found: dict[str, Tensor] = {}
    for path, child, _ in walk(module):
        prefix = f"{path}." if path else ""
        for table in (child._parameters, child._buffers):
            found.update((prefix + name, tensor) for name, tensor in table.items() if tensor is not None)
    return found


def check_fit(module: nn.Module, source: nn.Module | Mapping[str, Any]) -> None:
    """Raises a :class:`ShapeError` that lists the first tensors that do not fit."""
    own = _tensors_of(module)
    given: Mapping[str, Any] = _tensors_of(source) if isinstance(source, nn.Module) else source
    # A state dict need not have buffers: they stay the module's own.
    optional = (
        set() if isinstance(source, nn.Module) else {n for n, t in own.items() if not isinstance(t, nn.Parameter)}
    )
    wrong = [f"{name}: missing" for name in own if name not in given and name not in optional]
    wrong += [f"{name}: not a tensor of the module" for name in given if name not in own]
    for name, tensor in own.items():
        other = given.get(name, tensor)
        if not isinstance(other, Tensor):
            wrong.append(f"{name}: expected a tensor, got {type(other).__name__}")
        elif (other.dtype, other.shape, other.device) != (tensor.dtype, tensor.shape, tensor.device):
            wrong.append(f"{name}: expected {_text(tensor)}, got {_text(other)}")
        elif other.is_neg() or other.is_conj():
            wrong.append(f"{name}: negated or conjugated when it is read; pass resolve_neg() or resolve_conj() of it")
    if not wrong:
        return
    more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    raise ShapeError(f"weights do not fit {type(module).__name__}: {'; '.join(wrong[:_LISTED])}{more}")


def _text(tensor: torch.Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"
