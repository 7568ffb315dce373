"""Notices that a module is no longer what it was when it was captured.

A program is right for one structure (which submodules there are, their attributes, hooks) and for one set of weights
(which tensors, where their memory is, how often it was written). All of it can be changed by anybody between two calls:
``load_state_dict``, ``param.data = ...``, an adapter's ``scaling["x"] = 0.5``, a replaced attention processor.
Comparing everything costs milliseconds, so it is done in two steps: :meth:`Watch.poll` asks whether *anything* may
have changed, which is a few microseconds (the extension reads the version tags of the dictionaries that hold it all
and the version counters of the tensors); only then is what changed looked at.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from . import _native

__all__ = ["STRUCTURE", "WEIGHTS", "Structure", "Watch", "weight_state"]

STRUCTURE = 1
"""Bit of :meth:`Watch.poll`: a dictionary of the module tree was written."""
WEIGHTS = 2
"""Bit of :meth:`Watch.poll`: a watched tensor was written or has other memory."""

_version = attrgetter("_version")
_data_ptr = Tensor.data_ptr

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
_SCALARS = (int, float, str, bool, type(None), bytes, complex, torch.dtype, torch.device)
_OPAQUE = (
    Tensor,
    torch.nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
_DEPTH = 3


class Structure:
    """What one module tree looked like: its dictionaries, a fingerprint, and why its hooks forbid a program."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[list[Any] | set[Any]] = []
        self.tensors: list[Tensor] = []
        """Its parameters and buffers."""
        self.obstacle: tuple[str, str] | None = None
        """``(module path, reason)`` if a hook on a submodule would not be run by a program."""
        # Objects whose identity is part of the fingerprint: kept, so that an id is not used again.
        self._kept: list[Any] = []
        self._seen: set[int] = set()
        entries: list[Any] = []
        for path, child in module.named_modules():
            self._add(child)
            entries.append((path, type(child), self._attributes(child)))
            if path and self.obstacle is None and (reason := _obstacle(child)) is not None:
                self.obstacle = (path, reason)
        self.tensors = list({id(t): t for t in self.tensors}.values())
        self._types = self._types_now()
        self.fingerprint = (*entries, self.obstacle)

    def _types_now(self) -> list[tuple[Any, ...]]:
        return [(t.dtype, t.shape, t.device) for t in self.tensors]

    def is_retyped(self) -> bool:
        """Whether a tensor has another dtype, shape or device now: `module.half()` replaces no object."""
        return self._types_now() != self._types

    def clear(self) -> None:
        """Lets go of everything but the fingerprint."""
        self.dicts.clear()
        self.lists.clear()
        self.tensors.clear()
        self._types.clear()

    def _add(self, child: torch.nn.Module) -> None:
        self.dicts.extend((child.__dict__, child._parameters, child._buffers, child._modules))
        self.dicts.extend((child._forward_hooks, child._forward_pre_hooks))
        for table in (child._parameters, child._buffers):
            self.tensors.extend(tensor for tensor in table.values() if tensor is not None)

    def _attributes(self, child: torch.nn.Module) -> tuple[Any, ...]:
        out: list[Any] = []
        for name, value in child.__dict__.items():
            if name in _SKIPPED:
                continue
            if type(value) in _SCALARS:
                out.append((name, type(value), value))
            else:
                out.append((name, self._token(value, _DEPTH)))
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                out.append((name, None if tensor is None else (tensor.dtype, tensor.shape, tensor.device)))
        return tuple(out)

    def _token(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return kind, value
        if isinstance(value, Tensor):
            return kind, value.dtype, value.shape, value.device
        if isinstance(value, torch.nn.Module):
            return kind
        if isinstance(value, (dict, list, tuple, set, frozenset)) and depth:
            if not isinstance(value, (tuple, frozenset)):
                if id(value) in self._seen:
                    return kind, "seen"
                self._seen.add(id(value))
            if isinstance(value, dict):
                self.dicts.append(value)
                return kind, tuple((_hashable(k), self._token(v, depth - 1)) for k, v in value.items())
            if isinstance(value, (list, set)):
                self.lists.append(value)
            if isinstance(value, (set, frozenset)):
                return kind, frozenset(_hashable(v) for v in value)
            return kind, tuple(self._token(v, depth - 1) for v in value)
        self._kept.append(value)
        attributes = None
        if depth and not isinstance(value, _OPAQUE) and id(value) not in self._seen:
            table = getattr(value, "__dict__", None)
            if type(table) is dict:
                self._seen.add(id(value))
                self.dicts.append(table)
                attributes = tuple((k, self._token(v, depth - 1)) for k, v in table.items())
        return kind, id(value), attributes


def _hashable(value: Any) -> Any:
    return value if isinstance(value, _SCALARS) else (type(value), id(value))


def _obstacle(child: torch.nn.Module) -> str | None:
    hooks = (*child._forward_hooks.values(), *child._forward_pre_hooks.values())
    if any(getattr(hook, "__module__", None) != _RECORDERS for hook in hooks):
        return "a forward hook is registered on it"
    table = child.__dict__
    if "_hf_hook" in table:
        return "an accelerate hook (offloading, device placement) is attached to it"
    registry = table.get("_diffusers_hook")
    if registry is not None and getattr(registry, "hooks", True):
        return "a diffusers hook (offloading, caching, layerwise casting) is attached to it"
    return None


def weight_state(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """``(id, data_ptr, version)`` per tensor: equal states mean equal tensors with equal memory and contents."""
    return list(zip(map(id, tensors), map(_data_ptr, tensors), map(_tensor_version, tensors), strict=True))


def _tensor_version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else _version(tensor)


class Watch:
    """Watches the dictionaries and tensors of one :class:`Structure`, and further tensors.

    ``poll`` may say that something changed when nothing did; never the reverse, except for a class that was changed,
    and for writes that PyTorch itself does not count (through ``tensor.data`` or numpy) and that happen to leave the
    first, middle and last bytes of the tensor as they were.
    """

    def __init__(self, structure: Structure, tensors: Sequence[Tensor]) -> None:
        self.tensors = list({id(t): t for t in (*structure.tensors, *tensors)}.values())
        self._lists = [(value, value.copy()) for value in structure.lists]
        self._watch: _native.Watch | _Slow
        if _native.Watch.is_available():
            self._watch = _native.Watch(structure.dicts, self.tensors)
        else:
            self._watch = _Slow(structure.dicts, self.tensors)

    def poll(self) -> int:
        """Bits of what may have changed since this object was made: ``STRUCTURE``, ``WEIGHTS``, or 0."""
        bits = self._watch.poll()
        for value, before in self._lists:
            if value != before:
                return bits | STRUCTURE
        return bits

    def changed_tensors(self) -> frozenset[int]:
        """The ids of the tensors that may have changed."""
        return frozenset(id(self.tensors[i]) for i in self._watch.changed_tensors())


class _Slow:
    """The same by comparing everything: milliseconds, for interpreters whose dictionaries have no version."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], tensors: Sequence[Tensor]) -> None:
        self._dicts = [(table, table.copy()) for table in dicts]
        self._tensors = tensors
        self._state = weight_state(tensors)

    def poll(self) -> int:
        bits = 0
        for table, before in self._dicts:
            if len(table) != len(before) or not all(map(is_, table.values(), before.values())):
                bits = STRUCTURE
                break
        return bits | (WEIGHTS if weight_state(self._tensors) != self._state else 0)

    def changed_tensors(self) -> list[int]:
        state = weight_state(self._tensors)
        return [i for i, (now, before) in enumerate(zip(state, self._state, strict=True)) if now != before]
