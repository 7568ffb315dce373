"""Where the tensors come from that a traced program uses but was not passed.

Parameters and buffers go by their fully qualified name, tied ones by the first. A plain tensor kept as an attribute of a
module (also inside a list, tuple, dict or object there, or inside of another tensor, as the numbers and the scales of a
quantised weight are) goes by the attribute's path and is bound like a weight. A tensor found nowhere, such as one in a
closure or an ``lru_cache``, is held by reference.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..adapters import adapter_class, named_modules, walk
from .meta import META_DEVICE
from .signature import PLAIN_TENSORS
from .writes import Outer, tables_of

__all__ = ["FLOAT8", "OBJECTS_DEEP", "Member", "WeightIndex", "WeightSlot", "as_stored"]

FLOAT8: dict[torch.dtype, tuple[int, int]] = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}
"""Floats of 8 bits, values of which are bytes in programs: how many bits are the fraction, and the bias of the exponent."""

OBJECTS_DEEP = 6
"""As deep as a module's structure is watched: objects, lists and dictionaries inside of each other."""


@dataclass(frozen=True, slots=True)
class Member:
    """The key of an attribute of an object that is no module."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"

    def of(self, value: Any) -> Any:
        """What an object has there, in its dictionary or in a slot."""
        table = getattr(value, "__dict__", {})
        return table[self.name] if self.name in table else object.__getattribute__(value, self.name)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor a graph is bound to.

    Attributes:
        name: Fully qualified name; with ``[key]`` parts for a tensor in a container, ``.name`` for one in an object.
        kind: ``"parameter"``, ``"buffer"``, ``"attribute"`` or ``"captured"``.
        module: Path of the holding module (``""`` is the root).
        attribute: The name under which the module holds it.
        keys: Indices, keys and members that lead from the attribute to the tensor.
        tensor: The tensor itself, for ``"captured"`` only.
    """

    name: str
    kind: str
    module: str = ""
    attribute: str = ""
    keys: tuple[Any, ...] = ()
    tensor: Tensor | None = None

    def fetch(self, root: torch.nn.Module | None, modules: Mapping[str, torch.nn.Module] | None = None) -> Tensor:
        """The tensor as ``root`` holds it now.

        Args:
            root: The module.
            modules: The modules of it by path, where that is known.

        Raises:
            AttributeError, KeyError, IndexError: If the module no longer has it.
            TypeError: If something else is there.
        """
        if self.tensor is not None:
            return self.tensor
        if root is None:
            raise AttributeError(f"{self.name} needs a module")
        holder = root.get_submodule(self.module) if modules is None else modules[self.module]
        value: Any = getattr(holder, self.attribute)
        for key in self.keys:
            value = key.of(value) if isinstance(key, Member) else value[key]
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name} is no tensor any more but {type(value).__name__}")
        return value


def as_stored(tensor: Tensor) -> Tensor:
    """What a program is bound to for a weight: the tensor, or the same memory as pairs of numbers if that is complex, as
    bytes if it has floats of 8 bits."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.detach().view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


_COUNTS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


VARYING: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules with such numbers that changed again and again: counters, which are no constants."""


def is_count(module: torch.nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether a buffer is one number that code decides by: the width of a convolution, whether a codebook was set up. It is
    a constant of programs; batch norm counts batches in one, and never reads it."""
    return (
        tensor.dtype in _COUNTS
        and tensor.numel() == 1
        and name != "num_batches_tracked"
        and tensor.device.type == "cpu"
        and type(tensor) in PLAIN_TENSORS
        and module not in VARYING
    )


class WeightIndex:
    """The tensors of one module by identity, with their twins on the meta device."""

    def __init__(self, root: torch.nn.Module | None, outer: Outer) -> None:
        self.outer = outer
        self.hides_draws = False
        """Whether traces draw no numbers of Python's and numpy's, since nobody looks at them; see ``unread``."""
        """What code may write outside of the module."""
        self.slots: dict[int, WeightSlot] = {}
        self.twins: dict[int, Tensor] = {}
        self.paths: dict[int, str] = {}
        self.caches: list[Any] = []
        """Cached functions elsewhere that were seen to keep what a trace made."""
        self.cached: list[tuple[Callable[[Any], None], Any]] | None = None
        """Those of the modules' own code, each with what puts another one in its place; once they were looked for."""
        self.modules: list[tuple[str, torch.nn.Module]] = list(named_modules(root)) if root is not None else []
        adapter = adapter_class()
        self.shared = {id(module) for _, module in self.modules if adapter is not None and isinstance(module, adapter)}
        """Ids of layers of adapters, whose lists and dictionaries other threads write: ``set_adapters``."""
        self.bases: dict[int, torch.nn.Module] = {}
        """The layer inside of each LoRA layer, by the LoRA layer's id: a graph is that of the module without adapters."""
        self.layers: dict[int, Any] = {}
        """The LoRA layers by id."""
        self._storages: dict[int, str] | None = None
        self._attributes: dict[int, WeightSlot] | None = None
        self._held: list[Tensor] = []
        self._effective: set[str] = set()
        self._tables: set[int] | None = None
        self._walked: list[tuple[str, torch.nn.Module]] = []
        for path, module, layer in walk(root) if root is not None else ():
            self._walked.append((path, module))
            self.paths[id(module)] = path
            if layer is not None:
                self.bases[id(layer)] = module
                self.layers[id(layer)] = layer
                self._effective.add(path)
        self._read_tables()

    def _read_tables(self) -> None:
        """Gives all parameters and buffers that have none yet their slots."""
        for path, module in self._walked:
            prefix = f"{path}." if path else ""
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in list(table.items()):
                    if tensor is not None and id(tensor) not in self.slots:
                        self.slots[id(tensor)] = WeightSlot(f"{prefix}{key}", kind, path, key)
                        self._held.append(tensor)

    def is_count(self, slot: WeightSlot, tensor: Tensor) -> bool:
        """Whether it is a number that is a constant of programs."""
        if slot.kind != "buffer" or slot.keys or tensor.numel() != 1:
            return False
        owner = next((module for path, module in self._walked if path == slot.module), None)
        return owner is not None and is_count(owner, slot.attribute, tensor)

    def find(self, tensor: Tensor) -> WeightSlot | None:
        """The slot of ``tensor``, ``None`` if no module holds it."""
        slot = self.slots.get(id(tensor))
        if slot is not None:
            return slot
        # Another thread may have put it in the place of what was there at first.
        if any(one is tensor for _, m in self._walked for t in (m._parameters, m._buffers) for one in list(t.values())):
            self._read_tables()
            return self.slots[id(tensor)]
        if self._attributes is None:
            self._attributes = dict(self._scan_attributes())
        return self._attributes.get(id(tensor))

    def is_known(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of these, if under another class: a compiled one has the attributes of its module."""
        if self._tables is None:
            self._tables = {id(one.__dict__) for one in (*(m for _, m in self.modules), *(m for _, m in self._walked))}
        return id(module.__dict__) in self._tables

    def is_effective(self, slot: WeightSlot) -> bool:
        """Whether what a graph is bound to is the weight with adapters, which only the layer itself may use."""
        return slot.module in self._effective and slot.attribute == "weight" and not slot.keys

    def owner_of_memory(self, tensor: Tensor) -> str | None:
        """The name of a weight that shares memory with ``tensor``."""
        if self._storages is None:
            slots = ((t, self.find(t)) for t in tuple(self._held))
            self._storages = {t.untyped_storage()._cdata: slot.name for t, slot in slots if slot is not None}
        return self._storages.get(tensor.untyped_storage()._cdata)

    def whole(self, tensor: Tensor) -> Tensor | None:
        """The weight that ``tensor`` is another object for: all of its memory in the same order."""

        def layout(t: Tensor) -> tuple[Any, ...]:
            return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype

        wanted = layout(tensor)
        return next((t for t in tuple(self._held) if self.find(t) is not None and layout(t) == wanted), None)

    def twin(self, tensor: Tensor) -> Tensor:
        """A meta tensor of the same sizes, strides and dtype."""
        twin = self.twins.get(id(tensor))
        if twin is None:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META_DEVICE)
            self.twins[id(tensor)] = twin
            self._held.append(tensor)
        return twin

    def _scan_attributes(self) -> Iterator[tuple[int, WeightSlot]]:
        seen: set[int] = set()
        for path, module in self._walked:
            prefix = f"{path}." if path else ""
            held = [one for table in (module._parameters, module._buffers) for one in list(table.items())]
            own = len(held)
            held += [(k, v) for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")]
            for i, (key, value) in enumerate(held):
                for keys, tensor in _tensors_in(value, OBJECTS_DEEP):
                    if id(tensor) in seen or (i < own and not keys):
                        continue
                    seen.add(id(tensor))
                    self._held.append(tensor)
                    name = prefix + key + "".join(map(str, (k if isinstance(k, Member) else [k] for k in keys)))
                    yield id(tensor), WeightSlot(name, "attribute", path, key, keys)


def _tensors_in(value: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield (), value
        for name, item in list(value.__dict__.items()) if depth else ():
            for keys, tensor in _tensors_in(item, depth - 1):
                yield (Member(name), *keys), tensor
    elif depth and isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            for keys, tensor in _tensors_in(item, depth - 1):
                yield (i, *keys), tensor
    elif depth and isinstance(value, dict):
        for k, item in value.items():
            for keys, tensor in _tensors_in(item, depth - 1):
                yield (k, *keys), tensor
    elif depth:
        for name, item in [one for _, table in tables_of(value) for one in table.items()]:
            for keys, tensor in _tensors_in(item, depth - 1):
                yield (Member(name), *keys), tensor
