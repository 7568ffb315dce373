"""Notices that a module is no longer what it was when it was captured.

A program is right for one structure (which submodules there are, their attributes, hooks) and for one set of weights
(which tensors, where their memory is, how often it was written). All of it can be changed by anybody between two calls:
``load_state_dict``, ``param.data = ...``, an adapter's ``scaling["x"] = 0.5``, a replaced attention processor.
Comparing everything costs milliseconds, so it is done in two steps: :meth:`Watch.poll` asks whether *anything* may
have changed, which is a few microseconds (the extension reads the version tags of the dictionaries that hold it all
and the version counters of the tensors); only then is what changed looked at.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from enum import Enum
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor

from . import _native
from .adapters import TensorState, is_adapter, tensor_state, walk

__all__ = ["STRUCTURE", "WEIGHTS", "Structure", "Watch", "weight_state"]

STRUCTURE = 1
"""Bit of :meth:`Watch.poll`: a dictionary of the module tree was written."""
WEIGHTS = 2
"""Bit of :meth:`Watch.poll`: a watched tensor was written or has other memory."""

# Tables of nn.Module that do not change what a call under no_grad computes, or that are handled by name.
_SKIPPED = frozenset(
    {
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
        "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_compiled_call_impl",
        "_output_capturing_hooks_installed",
    }
)  # fmt: skip
_RECORDERS = "transformers.utils.output_capturing"
"""The module whose forward hooks transformers installs at the first call that asks for hidden states. They only note
what passes by, for the running call to return: a trace does the same."""
_IS_NATIVE = _native.Watch.is_available()
_dict_state: Any = _native.Watch.dict_version if _IS_NATIVE else dict.copy

_INT = frozenset({int})
_SCALARS = (int, float, str, bool, type(None), bytes, complex, torch.dtype, torch.device, torch.Size)
_SCALAR_TYPES = frozenset(_SCALARS)
_UNREAD = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version", "transformers_version"})
"""Attributes and entries of configurations that say where a checkpoint came from, not what it computes."""
_ADAPTERS = frozenset(
    {"peft_config", "_hf_peft_config_loaded", "lora_scale", "_adapter_names", "_safe_fusing", "_weight_conversions"}
)
"""Attributes of a diffusers or transformers model that come and go with adapters, whose effect is seen in their layers."""
_DEPTH = 3


class Fingerprint:
    """A value that is hashed once: that of a large module takes a millisecond."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Fingerprint) and self._hash == other._hash and self.parts == other.parts


class Structure:
    """What one module tree looked like: its dictionaries, a fingerprint, and why its hooks forbid a program.

    Trees with the same fingerprint compute the same function of their tensors and arguments. It is made of values where
    values say it all, so that it is the same for another module of the same class and configuration; of identities
    elsewhere (functions, objects with a state that Python does not show). LoRA layers do not show in it
    (:mod:`oxidiff.adapters`).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.versions: list[Any] = []
        """A state of each dictionary from before it was read."""
        self.lists: list[tuple[list[Any] | set[Any], list[Any] | set[Any]]] = []
        """Lists and sets, each with a copy."""
        self.tensors: list[Tensor] = []
        """Its parameters and buffers, and those of its adapters."""
        self.modules: dict[str, torch.nn.Module] = {}
        """Its modules by path, the layer inside for a LoRA layer."""
        self.layers: dict[str, torch.nn.Module] = {}
        """Its LoRA layers."""
        self.has_other_adapters = False
        """Whether there are adapters that are captured as they are."""
        self.obstacle: tuple[str, str] | None = None
        """``(module path, reason)`` if a hook on a submodule would not be run by a program."""
        # Objects whose identity is part of the fingerprint: kept, so that an id is not used again.
        self.kept: list[Any] = []
        self._seen: dict[int, int] = {}
        self._names: dict[int, Any] = {}
        self._owners: list[tuple[int, str]] = []
        for path, child, layer in walk(module):
            self.modules[path] = child
            self._names[id(child)] = path
            if layer is not None:
                self.layers[path] = layer
                self._names[id(layer)] = path
            elif is_adapter(child):
                self.has_other_adapters = True
        entries: list[Any] = []
        for path, child in self.modules.items():
            self._owners.append((len(self.dicts), path))
            self._add(child)
            entries.append((path, type(child), self._attributes(child, _ADAPTERS if _is_model(child) else frozenset())))
            if path and self.obstacle is None and (reason := _obstacle(child)) is not None:
                self.obstacle = (path, reason)
        count = len(self.tensors)
        for layer in self.layers.values():
            self._add_adapters(layer)
        self._own = list({id(t): t for t in self.tensors[:count]}.values())
        self.tensors = list({id(t): t for t in self.tensors}.values())
        self._types = self._types_now()
        self.fingerprint = Fingerprint((*entries, self.obstacle))

    def _types_now(self) -> list[tuple[Any, ...]]:
        return [(t.dtype, t.shape, t.device) for t in self._own]

    def is_retyped(self) -> bool:
        """Whether a tensor has another dtype, shape or device now: `module.half()` replaces no object."""
        return self._types_now() != self._types

    def memory(self) -> tuple[Any, ...]:
        """How its tensors lie in memory, as far as a trace can see it: orders, kinds and what shares a storage."""
        storages: dict[int, int] = {}
        out: list[Any] = []
        for i, tensor in enumerate(self._own):
            order = None if tensor.is_contiguous() else tensor.stride()
            kind = type(tensor) if type(tensor) not in _PLAIN else None
            out.append((order, kind, storages.setdefault(tensor.untyped_storage()._cdata, i) - i))
        return tuple(out)

    def below(self, dicts: Sequence[int]) -> set[int]:
        """Ids of the tensors of the modules that hang where one of these dictionaries (indices) was written."""
        found: set[int] = set()
        paths = {path for first, path in self._owners if first + 3 in dicts}
        for path in paths:
            for child in self.modules[path]._modules.values():
                at = self._names.get(id(child))
                if at is not None:
                    found.update(map(id, self.modules[at]._parameters.values()))
        return found

    def bare(self) -> Structure:
        """The fingerprint without the module."""
        empty = Structure(torch.nn.Module())
        empty.fingerprint, empty.kept = self.fingerprint, self.kept
        return empty

    def _add(self, child: torch.nn.Module) -> None:
        parameters, buffers = child._parameters, child._buffers
        hooks = child._forward_hooks, child._forward_pre_hooks
        self._read(child.__dict__, parameters, buffers, child._modules, *hooks)
        for tensors in (parameters, buffers):
            if tensors:
                self.tensors += [tensor for tensor in tensors.values() if tensor is not None]

    def _read(self, *tables: dict[Any, Any]) -> None:
        self.dicts.extend(tables)
        self.versions.extend(map(_dict_state, tables))

    def _add_adapters(self, layer: torch.nn.Module) -> None:
        """Watches what a LoRA layer reads; what it is at the moment is no part of the structure."""
        self._attributes(layer, frozenset())
        base = layer._modules["base_layer"]
        for child in layer.modules():
            if child is not base:
                self._add(child)

    def _attributes(self, child: torch.nn.Module, skipped: frozenset[str]) -> tuple[Any, ...]:
        attributes = child.__dict__
        names, of_origin = _read_names(tuple(attributes), skipped)
        values = [attributes[name] for name in names]
        kinds = tuple(map(type, values))
        if not _SCALAR_TYPES.issuperset(kinds):
            for i, kind in enumerate(kinds):
                if kind not in _SCALAR_TYPES:
                    values[i] = self._token(values[i], _DEPTH)
        out: list[Any] = [names, kinds, tuple(values)]
        for name in of_origin:
            if type(attributes[name]) not in _SCALAR_TYPES:
                out.append((name, self._token(attributes[name], _DEPTH)))
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                out.append((name, None if tensor is None else self._tensor(tensor)))
        if child._modules:
            paths = self._names
            out.append(tuple((name, paths.get(id(value))) for name, value in child._modules.items()))
        return tuple(out)

    def _tensor(self, tensor: Tensor) -> Any:
        # Which of them are one and the same is structure too.
        return tensor.dtype, tensor.shape, tensor.device, self._seen.setdefault(id(tensor), len(self._seen))

    def _token(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALAR_TYPES:
            return kind, value
        if kind is tuple and _INT.issuperset(map(type, value)):
            return kind, value
        if isinstance(value, Tensor):
            self.kept.append(value)
            return kind, self._tensor(value)
        if isinstance(value, torch.nn.Module):
            return kind, self._names.get(id(value), self._identity(value))
        if isinstance(value, type):
            return value
        if isinstance(value, Enum):
            return kind, value.name
        known = self._seen.get(id(value))
        if known is not None:
            return kind, "seen", known
        if isinstance(value, (dict, list, tuple, set, frozenset)) and depth:
            return self._container(value, depth)
        if isinstance(value, types.MethodType):
            return kind, self._identity(value.__func__), self._token(value.__self__, depth)
        if isinstance(value, functools.partial) and depth:
            parts = (value.func, value.args, value.keywords)
            return kind, *[self._token(part, depth - 1) for part in parts]
        table = getattr(value, "__dict__", None)
        if not depth or type(table) is not dict or isinstance(value, (types.FunctionType, types.ModuleType)):
            return kind, self._identity(value)
        self._note(value)
        self._read(table)
        attributes = tuple((k, self._token(v, depth - 1)) for k, v in table.items() if k not in _UNREAD)
        return kind, None if _is_plain(cast(Hashable, kind)) else self._identity(value), attributes

    def _container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if not isinstance(value, (tuple, frozenset)):
            self._note(value)
        if isinstance(value, dict):
            self._read(value)
            items = ((_hashable(k), self._token(v, depth - 1)) for k, v in value.items() if k not in _UNREAD)
            return kind, tuple(items)
        if isinstance(value, (list, set)):
            self.lists.append((value, value.copy()))
        if isinstance(value, (set, frozenset)):
            self.kept.append(value)
            return kind, frozenset(_hashable(v) for v in value)
        return kind, tuple(self._token(v, depth - 1) for v in value)

    def _note(self, value: Any) -> None:
        self.kept.append(value)
        self._seen[id(value)] = len(self._seen)

    def _identity(self, value: Any) -> int:
        self.kept.append(value)
        return id(value)


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


_IS_HEAP_TYPE = 1 << 9
"""Flag of classes that are made by a class statement."""


@functools.cache
def _is_plain(kind: Hashable) -> bool:
    """Whether the ``__dict__`` of instances is all the state they have."""
    classes = [cls for cls in cast(type, kind).__mro__ if cls is not object]
    return all(cls.__flags__ & _IS_HEAP_TYPE and not cls.__dict__.get("__slots__") for cls in classes)


@functools.lru_cache(4096)
def _read_names(names: tuple[str, ...], skipped: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The attributes of a module that say what it computes, of all those that it has; apart, those of them that say so
    only if they are no scalars."""
    read = [name for name in names if name not in _SKIPPED and name not in skipped]
    return tuple(n for n in read if n not in _UNREAD), tuple(n for n in read if n in _UNREAD)


def _is_model(module: torch.nn.Module) -> bool:
    return "config" in module.__dict__ or "_internal_dict" in module.__dict__


def _hashable(value: Any) -> Any:
    return value if isinstance(value, _SCALARS) else (type(value), id(value))


def _obstacle(child: torch.nn.Module) -> str | None:
    for hooks in (child._forward_hooks, child._forward_pre_hooks):
        if hooks and any(getattr(hook, "__module__", None) != _RECORDERS for hook in hooks.values()):
            return "a forward hook is registered on it"
    table = child.__dict__
    if "_hf_hook" in table:
        return "an accelerate hook (offloading, device placement) is attached to it"
    registry = table.get("_diffusers_hook")
    if registry is not None and getattr(registry, "hooks", True):
        return "a diffusers hook (offloading, caching, layerwise casting) is attached to it"
    return None


def weight_state(tensors: Sequence[Tensor]) -> list[TensorState]:
    """``(id, data_ptr, version)`` per tensor: equal states mean equal tensors with equal memory and contents."""
    return list(map(tensor_state, tensors))


class Watch:
    """Watches the dictionaries and tensors of one :class:`Structure`, and further tensors.

    ``poll`` may say that something changed when nothing did; never the reverse, except for a class that was changed,
    and for writes that PyTorch itself does not count (through ``tensor.data`` or numpy) and that happen to leave the
    first, middle and last bytes of the tensor as they were.
    """

    def __init__(self, structure: Structure, tensors: Sequence[Tensor]) -> None:
        self.structure = structure
        self.tensors = list({id(t): t for t in (*structure.tensors, *tensors)}.values())
        self._ids = {id(t) for t in self.tensors}
        make: type[_native.Watch] | type[_Slow] = _native.Watch if _IS_NATIVE else _Slow
        self._watch = make(structure.dicts, structure.versions, self.tensors)
        self._lists = tuple(structure.lists)

    def poll(self) -> int:
        """Bits of what may have changed since this object was made: ``STRUCTURE``, ``WEIGHTS``, or 0."""
        bits = self._watch.poll()
        for value, before in self._lists:
            if value != before:
                return bits | STRUCTURE
        return bits

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all of these are watched."""
        return self._ids.issuperset(map(id, tensors))

    def changed_tensors(self) -> frozenset[int]:
        """The ids of the tensors that may have changed: those that were written, and those of modules that were taken out
        and put back, which an adapter may have written meanwhile where torch does not count."""
        written = {id(self.tensors[i]) for i in self._watch.changed_tensors()}
        return frozenset(written | self.structure.below(self._watch.changed_dicts()))


class _Slow:
    """The same by comparing everything: milliseconds, for interpreters whose dictionaries have no version."""

    def __init__(
        self, dicts: Sequence[dict[Any, Any]], versions: Sequence[dict[Any, Any]], tensors: Sequence[Tensor]
    ) -> None:
        self._dicts = list(zip(dicts, versions, strict=True))
        self._tensors = tensors
        self._state = weight_state(tensors)

    def poll(self) -> int:
        bits = 0
        if not all(_is_same(table, before) for table, before in self._dicts):
            bits = STRUCTURE
        return bits | (WEIGHTS if weight_state(self._tensors) != self._state else 0)

    def changed_dicts(self) -> list[int]:
        return [i for i, (table, before) in enumerate(self._dicts) if not _is_same(table, before)]

    def changed_tensors(self) -> list[int]:
        state = weight_state(self._tensors)
        return [i for i, (now, before) in enumerate(zip(state, self._state, strict=True)) if now != before]


def _is_same(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(table) == len(before) and all(map(is_, table.values(), before.values()))
