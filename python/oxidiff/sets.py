"""Further weights for one compiled module, all alive: what :func:`oxidiff.bind` and :func:`oxidiff.use` do.

A set is a module of the same architecture with a dispatcher of its own: the one that was given, or a copy of the compiled
module in which the tensors of a state dict take the place of parameters and buffers. No tensor is copied. Both attach to
the compiled module's programs, so a set costs its own weights, in the forms that the device wants, and nothing else.

A copy follows the module: what a state dict does not name is the module's own, adapters of PEFT above all, and so are their
factors, which of them are active, and whether they are disabled or merged. Merged ones are in the module's weights, which a
set does not have: in the copy they are active instead. Where the module has another dtype, or is on another device, than
when the set was bound, the set's tensors are converted.

Threads: a copy is made anew under the lock of the compiled module's states, and takes the place of the one before in the
same module: its dispatcher finds it changed, as it does when somebody changes a module.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import adapter_class
from .errors import ShapeError, UnsupportedError, is_interrupt
from .hooks import is_idle
from .watch import Structure, Watch

if TYPE_CHECKING:
    from .dispatch import Dispatcher

__all__ = ["WeightSet", "check_fit"]

_LISTED = 5
_BASE = "base_layer"
"""The name under which a layer of PEFT has the one that it is around."""
_PROTOCOL = frozenset(("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"))


class WeightSet:
    """One further set of weights.

    Args:
        name: Its name.
        module: The compiled module.
        source: A module of the same architecture, or tensors by name.
        make: Makes a dispatcher for a module.
        structure: What the module looks like.

    Attributes:
        dispatcher: The dispatcher of the set's module.

    Raises:
        ShapeError: A tensor is missing, is one too many, has another dtype, shape or device, or torch's lazy negation or
            conjugation bit.
        UnsupportedError: The module cannot be copied.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        source: nn.Module | Mapping[str, Tensor],
        make: Callable[[nn.Module], Dispatcher],
        structure: Structure,
    ) -> None:
        check_fit(module, source)
        self._name = name
        self._module = module
        self._source = source if isinstance(source, nn.Module) else None
        self._tensors: dict[str, Tensor] = {}
        if not isinstance(source, nn.Module):
            self._tensors = dict(zip(_plain_names(source, module), source.values(), strict=True))
        self._bound: dict[str, tuple[Tensor, Tensor]] = {}
        """By name, a tensor of the set and what is in the copy for it: the same object in each copy."""
        self._originals: Watch | None = None
        """Watches the tensors of the set that were converted."""
        self._structure = structure
        self._seen = _Seen(structure, module, self._tensors)
        self.dispatcher = make(source if isinstance(source, nn.Module) else self._copy(structure, None))

    def follow(self, structure: Structure, lock: AbstractContextManager[Any]) -> Dispatcher:
        """The dispatcher, after the copy was made anew if the module is not what it was.

        Args:
            structure: What the module looks like now.
            lock: That of who changes the module's states.

        Raises:
            ShapeError: A parameter of the module has another shape than the set's.
            UnsupportedError: The module can be copied no more.
        """
        if self._source is not None:
            return self.dispatcher
        # Last what others wait for: a thread that finds the new structure finds the new copy.
        if structure is not self._structure:
            with lock:
                if structure is not self._structure:
                    seen = _Seen(structure, self._module, self._tensors)
                    if not structure.is_as(self._structure) or seen != self._seen:
                        with self.dispatcher.states.lock:
                            self._copy(structure, self.dispatcher.module)
                    self._structure, self._seen = structure, seen
        originals = self._originals
        if originals is not None and originals.poll():
            with lock:
                # Unless another thread was faster, or the module was converted back.
                if self._originals is originals:
                    self._convert_again(originals)
        return self.dispatcher

    def require_stateless(self) -> None:
        """Raises an :class:`UnsupportedError` if calls were seen to keep tensors in attributes: those of the copy, where the
        module's methods neither find nor reset them."""
        if self._source is None and self.dispatcher.detours.carried is not None:
            what = f"calls of {type(self._module).__name__} keep tensors in attributes"
            why = f"a copy with the tensors of {self._name!r} would keep its own"
            raise UnsupportedError(f"{what}, and {why}: bind a module of its own instead")

    def explain(self, error: Exception) -> None:
        """After a call that failed: raises what is wrong with the module that was bound, if it is that.

        Raises:
            ShapeError: It does not fit the compiled module any more.
        """
        # Torch's errors and those of programs; what else forward raises is its own.
        if self._source is not None and isinstance(error, RuntimeError) and not isinstance(error, ShapeError):
            try:
                check_fit(self._module, self._source)
            except ShapeError as misfit:
                what = f"the module that is bound as {self._name!r} was converted or changed, or this one was: {misfit}"
                raise ShapeError(f"{what}; convert both alike, as with .to(...), or use(None)") from error

    def _copy(self, structure: Structure, into: nn.Module | None) -> nn.Module:
        """A copy of the module with the set's tensors.

        Args:
            structure: What the module looks like.
            into: A copy from before, which becomes this one.
        """
        module = self._module
        for path, child in module.named_modules():
            if not is_idle(child.__dict__.get("_diffusers_hook")):
                # What is around the forward of a copy is a function, which holds the module that it was made for.
                place = f"{type(module).__name__}{path and '.'}{path}"
                raise UnsupportedError(
                    f"a copy of {place} would not run its hooks of diffusers: bind a module of its own instead of tensors"
                )
        memo: dict[int, Any] = {}
        # Tensors in attributes are the module's own, and live.
        for held in structure.attribute_tensors:
            memo[id(held)] = held
        for name, own, is_adapter in _tensors_of(module):
            memo[id(own)] = self._tensor(name, own, is_adapter)
        try:
            if into is None:
                made = copy.deepcopy(module, memo)
            elif _is_copied_as_usual(type(module)):
                memo[id(module)] = made = into
                _replace(into, type(module), copy.deepcopy(module.__dict__, memo))
            else:
                made = into
                _replace(into, type(module), copy.deepcopy(module, memo).__dict__)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            if is_interrupt(error):
                raise
            what = f"{type(module).__name__} cannot be copied ({error}): bind a module of its own instead"
            raise UnsupportedError(what) from error
        for layer in _adapter_layers(module):
            _unmerge(layer, memo[id(layer)])
        self._originals = _watch_of(self._converted())
        return made

    def _tensor(self, name: str, own: Tensor, is_adapter: bool) -> Tensor:
        """What the copy has in the place of a tensor of the module."""
        given = self._tensors.get(name)
        if given is None or given is own or (is_adapter and given.shape != own.shape):
            return own
        if given.shape != own.shape:
            what = f"{name} is {_text(given)} in what is bound as {self._name!r} and {_text(own)} in the module by now"
            raise ShapeError(f"{what}: bind weights that fit {type(self._module).__name__} as it is")
        known = self._bound.get(name)
        if known is not None and known[0] is given and _is_of_kind(known[1], own):
            return known[1]
        # Whatever mode this call is made in, writes to it are to be counted.
        with torch.inference_mode(False), torch.no_grad():
            used = given.to(own.device, own.dtype) if _is_converted(given, own) else given
            if isinstance(own, nn.Parameter):
                used = nn.Parameter(used, requires_grad=False)
        self._bound[name] = given, used
        return used

    def _converted(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors of the set that the copy has in another dtype or on another device, and what it has."""
        return [(given, used) for given, used in self._bound.values() if _is_converted(given, used)]

    def _convert_again(self, originals: Watch) -> None:
        """After tensors were written that the copy has converted."""
        changed = originals.changed_tensors()
        converted = self._converted()
        # Watched first, converted then, and shown last: what another thread finds watched is converted.
        watch = _watch_of(converted)
        with torch.inference_mode(False), torch.no_grad():
            for given, used in converted:
                if id(given) in changed:
                    used.copy_(given)
        self._originals = watch


def _watch_of(converted: Sequence[tuple[Tensor, Tensor]]) -> Watch | None:
    """Watches tensors that are used in another form."""
    return Watch(Structure(nn.Module()), [given for given, _ in converted]) if converted else None


class _Seen:
    """What of a module its copies have that does not show in the fingerprint of its :class:`Structure`: tensors that a set
    does not name, those in attributes among them, and how adapters are set.

    Args:
        structure: What the module looks like.
        module: The module.
        tensors: Those of the set.
    """

    def __init__(self, structure: Structure, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        named = _tensors_of(module)
        self._shared = [tensor for name, tensor, is_adapter in named if is_adapter or name not in tensors]
        self._shared += structure.attribute_tensors
        self._settings = [
            (
                layer.disable_adapters,
                list(layer.merged_adapters),
                list(layer.active_adapters),
                dict(getattr(layer, "scaling", {})),
            )
            for layer in _adapter_layers(module)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or self._settings != other._settings:
            return False
        pairs = zip(self._shared, other._shared, strict=False)
        return len(self._shared) == len(other._shared) and all(mine is theirs for mine, theirs in pairs)


def _is_copied_as_usual(kind: type[nn.Module]) -> bool:
    """Whether a copy of a module is what a copy of its ``__dict__`` makes it."""
    own = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    return not any(_PROTOCOL & vars(base).keys() for base in own)


def _replace(module: nn.Module, kind: type[nn.Module], table: dict[str, Any]) -> None:
    """Makes a module one of a class with these attributes. Who looks at it meanwhile finds old and new ones, never none."""
    if type(module) is not kind:
        module.__class__ = kind
    held = module.__dict__
    held.update(table)
    for name in held.keys() - table.keys():
        del held[name]


def _adapter_layers(module: nn.Module) -> list[Any]:
    """The layers of a module that PEFT put around others."""
    kind = adapter_class()
    return [] if kind is None else [layer for layer in module.modules() if isinstance(layer, kind)]


def _unmerge(layer: Any, copied: Any) -> None:
    """Makes adapters that are merged into a layer's weights active ones of its copy, whose weights are others."""
    if not layer.merged_adapters or _place(copied) == _place(layer):
        return
    if not layer.disable_adapters:
        copied._active_adapter = list(layer.merged_adapters)
    copied.merged_adapters = []


def _place(layer: Any) -> int | None:
    """Where the weight is that a layer of PEFT is for."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) else None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Parameters and buffers by names as they are without adapters, and whether they are of adapters."""
    kind = adapter_class()
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module, bool]] = [("", module, False)]
    while stack:
        prefix, one, is_adapter = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        for table in (one._parameters, one._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield prefix + name, tensor, is_adapter
        is_layer = kind is not None and isinstance(one, kind)
        for name, child in reversed(list(one._modules.items())):
            if child is not None:
                is_base = is_layer and name == _BASE
                stack.append(
                    (prefix if is_base else f"{prefix}{name}.", child, is_adapter or (is_layer and not is_base))
                )


def _plain_names(source: Mapping[str, Any], module: nn.Module) -> list[str]:
    """The names of a state dict, as :func:`_tensors_of` has them."""
    own = {name for name, _, _ in _tensors_of(module)}
    return [name if name in own else _plain_name(name) for name in source]


def _plain_name(name: Any) -> Any:
    return ".".join(part for part in name.split(".") if part != _BASE) if isinstance(name, str) else name


def check_fit(module: nn.Module, source: nn.Module | Mapping[str, Any]) -> None:
    """Raises a :class:`ShapeError` that lists the first tensors that do not fit."""
    own = {name: (tensor, is_adapter) for name, tensor, is_adapter in _tensors_of(module)}
    given: Mapping[str, Any]
    if isinstance(source, nn.Module):
        # It has adapters of its own, or none.
        own = {name: one for name, one in own.items() if not one[1]}
        given = {name: tensor for name, tensor, is_adapter in _tensors_of(source) if not is_adapter}
        optional = set()
    else:
        given = dict(zip(_plain_names(source, module), source.values(), strict=True))
        # A state dict need not have adapters and buffers: they stay the module's own.
        optional = {name for name, (t, is_adapter) in own.items() if is_adapter or not isinstance(t, nn.Parameter)}
    wrong = [f"{name}: missing" for name in own if name not in given and name not in optional]
    wrong += [f"{name}: not a tensor of the module" for name in given if name not in own]
    for name, (tensor, _) in own.items():
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


def _is_converted(given: Tensor, used: Tensor) -> bool:
    return (given.dtype, given.device) != (used.dtype, used.device)


def _is_of_kind(used: Tensor, own: Tensor) -> bool:
    """Whether a tensor is what a copy may have in the place of another."""
    return not _is_converted(used, own) and isinstance(used, nn.Parameter) == isinstance(own, nn.Parameter)


def _text(tensor: torch.Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"
