"""Notices that a module is no longer what it was when it was captured.

A program is right for one structure (which submodules there are, their attributes, hooks) and for one set of weights
(which tensors, where their memory is, how often it was written). All of it can be changed by anybody between two calls:
``load_state_dict``, ``param.data = ...``, an adapter's ``scaling["x"] = 0.5``, a replaced attention processor.
Comparing everything costs milliseconds, so it is done in two steps: :meth:`Watch.poll` asks whether *anything* may
have changed, which is a few microseconds (the extension knows of every write to the dictionaries that hold it all and
reads the version counters of the tensors); only then is what changed looked at.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.weight_norm import WeightNorm

from . import _native
from .adapters import TensorState, adapter_class, base_of, tensor_state
from .capture.classes import held_by_member, of_class
from .capture.signature import PLAIN, PLAIN_TENSORS
from .capture.weights import OBJECTS_DEEP, is_count
from .capture.writes import IS_HEAP_TYPE, is_plain_object, slots_of
from .hooks import Around, casting, is_idle, replaced
from .outside import Reading, functions_held, modules_held

__all__ = ["STRUCTURE", "SURROUNDINGS", "WEIGHTS", "Structure", "Watch", "obstacle_of", "weight_state"]

STRUCTURE = 1
"""Bit of :attr:`Watch.poll`: a dictionary, list or set of the module tree was written, or a module has another class."""
WEIGHTS = 2
"""Bit of :attr:`Watch.poll`: a watched tensor was written or has other memory."""
SURROUNDINGS = 4
"""Bit of :attr:`Watch.poll`: code finds something else outside of the module, in a file or a class."""

RECORDERS = "transformers.utils.output_capturing"
"""The module whose forward hooks transformers installs at the first call that asks for hidden states. They only note
what passes by, for the running call to return: a trace does the same."""
SKIPPED = frozenset(_native.Tree.SKIPPED)
"""Tables of nn.Module that do not change what a call under no_grad computes, or that are handled by name."""
_IS_NATIVE = _native.Watch.is_available()
_C = TypeVar("_C", dict[Any, Any], list[Any])


class Fingerprint:
    """What a module tree computes, as a digest. Some of it is addresses: what they are of is held."""

    __slots__ = ("_kept", "digest")

    def __init__(self, digest: bytes, kept: list[Any]) -> None:
        self.digest = digest
        self._kept = kept

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Fingerprint) and self.digest == other.digest)


class Structure:
    """What one module tree looked like: its dictionaries, a fingerprint, and why its hooks forbid a program.

    Trees with the same fingerprint compute the same function of their tensors and arguments. It is made of values where
    values say it all, so that it is the same for another module of the same class and configuration; of identities
    elsewhere (functions, objects with a state that Python does not show). LoRA layers do not show in it
    (:mod:`oxidiff.adapters`), nor do the values of floats that are arguments of programs (:mod:`oxidiff.lifted`).

    Args:
        module: The module.
        inputs: Gives, for a :attr:`form`, the indices of the floats that are arguments.
    """

    def __init__(self, module: torch.nn.Module, inputs: Callable[[bytes], tuple[int, ...]] = lambda _: ()) -> None:
        self.root = module
        """The module, or one that has it and further ones as submodules: those that it reaches through lists, objects,
        partials or closures, and what its functions read. Paths in the module are the same in either."""
        self.together: torch.nn.Module | None = None
        """The latter, where it is not the module."""
        self.reading: Reading | None = None
        """What functions in its attributes read from outside."""
        tree, beside = _read(module, module), []
        while True:
            found, functions = _modules_beside(tree), _functions_beside(tree, module, self.reading)
            if not found and not functions:
                break
            beside += found
            if functions:
                known = self.reading.functions if self.reading is not None else ()
                self.reading = Reading(*known, *functions)
            self.root = self.together = _together(module, beside, self.reading)
            tree = _read(self.root, module)
        self.tree = tree
        self.form = tree.form
        """A digest of everything but floats."""
        self.floats = tree.floats
        """The floats in its attributes."""
        self.inputs = tuple([i for i in inputs(self.form) if _is_ordinary(self.floats[i]) and not self._is_read(i)])
        """The indices of those that are arguments of programs, as far as their values can be."""
        self.numbers = tuple([self.floats[i] for i in self.inputs])
        """The values of these."""
        self.layers: dict[str, torch.nn.Module] = tree.layers()
        """Its LoRA layers."""
        self.has_other_adapters: bool = tree.has_other_adapters
        """Whether there are adapters that are captured as they are."""
        self.obstacle: tuple[str, str] | None = tree.obstacle
        """``(module path, reason)`` if a hook on a submodule would not be run by a program, or an adapter not be found."""
        digest = tree.fingerprint(list(self.inputs))
        if self.layers and (tied := self._tied()) is not None:
            # An adapter changes the weight of one of them, and a graph has one weight for all.
            self.obstacle = tied, "an adapter is added to a weight that another layer shares"
            digest += b"tied"
        self.counts = [
            (tensor, int(tensor), weakref.ref(owner))
            for owner in self.modules.values()
            for name, tensor in list(owner._buffers.items())
            if tensor is not None and is_count(owner, name, tensor)
        ]
        """Numbers in buffers that are constants of programs, what they were, and whose they are."""
        if self.counts:
            digest += repr([value for _, value, _ in self.counts]).encode()
        marks = _Marks([*self.tensors, *self.attribute_tensors])
        self.marked = marks.tables
        """The attributes that Python code put on tensors of the module, as tables, and what was in them."""
        self._inner = marks.inner
        if marks.found:
            digest += repr(marks.found).encode()
        # Tensors tell by their types alone, and may be what the last call left.
        kept = [value for value in tree.kept if not isinstance(value, Tensor)]
        self.fingerprint = Fingerprint(digest, [*kept, *marks.kept])

    def _is_read(self, index: int) -> bool:
        """Whether a float is one that a function reads from outside: a copy of the module has the same function."""
        return self.reading is not None and self.place(index)[2].startswith(f"{_READ}.")

    def _tied(self) -> str | None:
        """The path of a LoRA layer whose weight another module has, too."""
        owned = {id(self.modules[path]._parameters.get("weight")): path for path in self.layers}
        others = (
            p for path, m in self.modules.items() for name, p in m._parameters.items() if owned.get(id(p)) != path
        )
        return next((owned[id(p)] for p in others if id(p) in owned), None)

    @functools.cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Its modules by path, the layer inside for a LoRA layer."""
        return self.tree.modules()

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """Its parameters and buffers, each once. Trees with the same fingerprint have theirs in the same order."""
        return self.tree.own_tensors

    @functools.cached_property
    def attribute_tensors(self) -> list[Tensor]:
        """Tensors in attributes, as often as they are met. Trees with the same fingerprint have theirs in the same order."""
        return [value for value in self.tree.kept if isinstance(value, Tensor)]

    def is_retyped(self) -> bool:
        """Whether a tensor has another dtype, shape or device now: `module.half()` replaces no object."""
        return self.tree.is_retyped() or any(_form(tensor) != form for tensor, form in self._inner)

    def is_as(self, other: Structure) -> bool:
        """Whether programs of the one compute what the other does, with the same numbers."""
        return self.fingerprint == other.fingerprint and self.numbers == other.numbers

    def place(self, index: int) -> tuple[Any, Any, str]:
        """The dictionary or list that has a float, the key or index there, and the float's name."""
        return self.tree.place(index)

    def memory(self) -> Hashable:
        """How its tensors lie in memory, as far as a trace can see it: orders, kinds and what shares a storage."""
        return self.tree.memory()

    def below(self, dicts: Sequence[int]) -> set[int]:
        """Ids of the tensors of the modules that hang where one of these dictionaries (indices) was written."""
        found: set[int] = set()
        paths = self.tree.parents(dicts)
        if not paths:
            return found
        names = {id(module): path for table in (self.modules, self.layers) for path, module in table.items()}
        for path in paths:
            for child in self.modules[path]._modules.values():
                at = names.get(id(child))
                if at is not None:
                    found.update(map(id, self.modules[at]._parameters.values()))
        return found

    def bare(self) -> Structure:
        """The fingerprint without the module."""
        empty = Structure(torch.nn.Module())
        empty.fingerprint = self.fingerprint
        return empty


def _is_ordinary(value: float) -> bool:
    """Whether a value equals itself and nothing but itself, and can be reckoned with: not so are infinite ones, NaN, and
    -0.0, which is another number than the 0.0 that it equals."""
    return math.isfinite(value) and (value != 0 or math.copysign(1.0, value) > 0)


class _Marks:
    """What tells tensors from others of the same dtypes, shapes and devices: their classes, and what Python code put on
    them. Quantised weights keep numbers and scales there, tensors that programs are bound to as to other weights; GGUF's
    blocks the type of what they stand for.

    Args:
        tensors: Those of a module.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kept: list[Any] = []
        """What identities are of."""
        self.tables: list[tuple[Any, Any]] = []
        """Every dictionary and list that was read, and what was in it."""
        self.inner: list[tuple[Tensor, Hashable]] = []
        """Tensors that others hold, and what is known of each without its contents."""
        self._places = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.found = [(i, self._attributes(tensor)) for i, tensor in enumerate(tensors) if _is_marked(tensor)]

    def _attributes(self, tensor: Tensor) -> list[Any]:
        named = self._contents(tensor.__dict__, dict(tensor.__dict__)).items()
        marks = [(name, self._mark(value, OBJECTS_DEEP)) for name, value in named if not name.startswith("_dynamo")]
        return [self._mark(type(tensor), 0), marks]

    def _contents(self, table: Any, contents: _C) -> _C:
        """What is in a dictionary or list now, which is noted."""
        self.tables.append((table, contents))
        return contents

    def _mark(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return kind.__name__, repr(value)
        if isinstance(value, enum.Enum):
            if not depth:
                return self._mark(kind, 0), value.name
            self._contents(value.__dict__, dict(value.__dict__))
            return (
                self._mark(kind, 0),
                value.name,
                [(k, self._mark(v, depth - 1)) for k, v in held_by_member(value).items()],
            )
        if isinstance(value, tuple):
            return self._mark(kind, 0), [self._mark(item, depth) for item in value]
        if isinstance(value, Tensor):
            if (place := self._places.get(id(value))) is not None:
                return "tensor", place
            self._places[id(value)] = len(self._places)
            self.inner.append((value, form := _form(value)))
            return "tensor", form, self._attributes(value) if _is_marked(value) else []
        if depth and kind is list:
            return "list", [self._mark(item, depth - 1) for item in self._contents(value, list(value))]
        if depth and (kind is dict or (is_plain_object(kind) and _is_plain(kind))):
            table = value if kind is dict else value.__dict__
            named = self._contents(table, dict(table)).items()
            return self._mark(kind, 0), [(self._mark(k, depth - 1), self._mark(v, depth - 1)) for k, v in named]
        self.kept.append(value)
        return id(value)


def _is_marked(tensor: Tensor) -> bool:
    return type(tensor) not in PLAIN_TENSORS or bool(tensor.__dict__)


def _form(tensor: Tensor) -> Hashable:
    """What is known of a tensor without its contents."""
    is_strided = tensor.layout is torch.strided
    return str((tensor.dtype, tuple(tensor.shape), tensor.stride() if is_strided else tensor.layout, tensor.device))


@of_class
def _is_plain(kind: type) -> bool:
    """Whether the ``__dict__`` of instances is all the state they have. A compiled module's is that of its module."""
    classes = [cls for cls in kind.__mro__ if cls is not object and "_oxidiff" not in cls.__dict__]
    return all(cls.__flags__ & IS_HEAP_TYPE and not cls.__dict__.get("__slots__") for cls in classes)


@of_class
def _slots(kind: type) -> list[str]:
    """The slots of instances of a class of the program's own."""
    return slots_of(kind)


def _read(root: torch.nn.Module, module: torch.nn.Module) -> _native.Tree:
    def obstacle(child: torch.nn.Module) -> str | None:
        # Its own hooks are run around the program.
        return None if child is module else obstacle_of(child)

    def around(child: torch.nn.Module) -> Around | None:
        return replaced(child, child is module)

    return _native.Tree(root, base_of, obstacle, around, _is_plain, _slots, adapter_class())


def _modules_beside(tree: _native.Tree) -> list[torch.nn.Module]:
    """The modules that are not in a tree and that its attributes hold, in the order in which they are met."""
    held = [value for value in tree.kept if isinstance(value, torch.nn.Module | types.FunctionType)]
    found = {id(module.__dict__): module for value in held for module in modules_held(value)}
    if found:
        # A compiled module is an object of its own, with the same attributes.
        for known in (tree.modules(), tree.layers()):
            for module in known.values():
                found.pop(id(module.__dict__), None)
    return list(found.values())


_READ = "read"


def _functions_beside(tree: _native.Tree, module: torch.nn.Module, reading: Reading | None) -> list[types.FunctionType]:
    """The program's own functions in the attributes of a tree of which it is not there yet what they read."""
    known = [one for one in (module, reading) if isinstance(one, Reading)]
    held = (value for value in tree.kept if isinstance(value, types.FunctionType))
    found = {id(function): function for value in held for function in functions_held(value)}
    return [function for function in found.values() if not any(one.follows(function) for one in known)]


def _together(module: torch.nn.Module, beside: Sequence[torch.nn.Module], reading: Reading | None) -> torch.nn.Module:
    root = torch.nn.Module()
    root._modules[""] = module
    for i, other in enumerate(beside):
        root._modules[f"outside:{i}"] = other
    if reading is not None:
        root._modules[_READ] = reading
    return root


def obstacle_of(child: torch.nn.Module) -> str | None:
    """Why a module that another one calls is Python that no program runs."""
    for hooks in (child._forward_hooks, child._forward_pre_hooks):
        # Both are run when it is traced: one that notes hidden states, and one that computes a weight from two others.
        if any(getattr(h, "__module__", None) != RECORDERS and type(h) is not WeightNorm for h in hooks.values()):
            return "a forward hook is registered on it"
    table = child.__dict__
    if "_hf_hook" in table:
        return "an accelerate hook (offloading, device placement) is attached to it"
    if "_diffusers_hook" in table and not is_idle(table["_diffusers_hook"]) and casting(child) is None:
        return "a diffusers hook (caching, offloading) is attached to it"
    return None


def weight_state(tensors: Sequence[Tensor]) -> list[TensorState]:
    """``(id, data_ptr, version, strides)`` per tensor: equal states mean equal tensors with equal memory and contents."""
    return list(map(tensor_state, tensors))


class Watch:
    """Watches the dictionaries and tensors of one :class:`Structure`, and further tensors.

    ``poll`` may say that something changed when nothing did; never the reverse, except for writes that PyTorch itself
    does not count (through ``tensor.data`` or numpy) and that happen to leave the first, middle and last bytes of the tensor
    as they were.

    Args:
        structure: The structure.
        tensors: The further tensors.
        surroundings: What code finds outside of the module.
    """

    def __init__(
        self, structure: Structure, tensors: Sequence[Tensor], surroundings: _native.Surroundings | None = None
    ) -> None:
        self.structure = structure
        make: type[_native.Watch] | type[_Slow] = _native.Watch if _IS_NATIVE else _Slow
        self._watch = make(structure.tree, tensors, surroundings)
        is_plain = structure.reading is None and not structure.marked and not structure.counts
        # No method of its own: it and all that it watches go with the last reference.
        more = functools.partial(_poll_more, self._watch, structure)
        self.poll: Callable[[], int] = self._watch.poll if is_plain else more
        """Bits of what may have changed since this object was made: ``STRUCTURE``, ``WEIGHTS``, ``SURROUNDINGS``, or 0."""
        self._others = tensors
        self._surroundings = surroundings

    @functools.cached_property
    def _every(self) -> list[Tensor]:
        return [*self.structure.tree.tensors, *self.structure.attribute_tensors, *self._others]

    def needs_grad(self) -> bool:
        """Whether a tensor that is watched or in an attribute requires grad: 20 us for the 686 of the SD1.5 UNet."""
        return any(tensor.requires_grad for tensor in self._every)

    def covers(self, tensors: Sequence[Tensor], surroundings: _native.Surroundings | None = None) -> bool:
        """Whether all of these are watched."""
        return self._surroundings is surroundings and self._watch.covers(tensors)

    def is_of(self, tensors: Sequence[Tensor], surroundings: _native.Surroundings | None = None) -> bool:
        """Whether these are the further tensors that are watched, and no others."""
        return self._surroundings is surroundings and set(map(id, self._others)) == set(map(id, tensors))

    def is_rebound(self) -> bool:
        """Whether a table of parameters or buffers was written, so that a tensor may be another one."""
        tables = {id(t) for module in self.structure.modules.values() for t in (module._parameters, module._buffers)}
        dicts = self.structure.tree.dicts
        return any(id(dicts[i]) in tables for i in self._watch.changed_dicts())

    def changed_modules(self) -> list[str]:
        """The paths of the modules that were written, or objects in whose attributes were."""
        return self.structure.tree.owners(self._watch.changed_dicts())

    def changed_tensors(self) -> frozenset[int]:
        """The ids of the tensors that may have changed: those that were written, and those of modules that were taken out
        and put back, which an adapter may have written meanwhile where torch does not count."""
        return frozenset((*self._watch.changed_tensors(), *self.structure.below(self._watch.changed_dicts())))


def _poll_more(watch: _native.Watch | _Slow, structure: Structure) -> int:
    """What a watch says, and whether what it does not look at is as it was."""
    if structure.reading is not None:
        structure.reading.sync()
    is_same = all(_is_same(table, before) for table, before in structure.marked)
    # By their values: writes that torch does not count are noticed, too.
    is_same = is_same and all(int(tensor) == value for tensor, value, _ in structure.counts)
    return int(watch.poll()) | (0 if is_same else STRUCTURE)


class _Slow:
    """The same by comparing everything: milliseconds, for interpreters that do not show writes to dictionaries."""

    def __init__(
        self, tree: _native.Tree, tensors: Sequence[Tensor], surroundings: _native.Surroundings | None = None
    ) -> None:
        self._tree = tree
        self._surroundings = surroundings
        self._dicts = list(zip(tree.dicts, tree.copies, strict=True))
        self._tensors = list({id(t): t for t in (*tree.tensors, *tensors)}.values())
        self._state = weight_state(self._tensors)

    def poll(self) -> int:
        bits = 0
        is_written = self._tree.is_listed_changed() or self._tree.is_reclassed()
        if is_written or not all(_is_same(table, before) for table, before in self._dicts):
            bits = STRUCTURE
        if self._surroundings is not None and self._surroundings.is_changed():
            bits |= SURROUNDINGS
        return bits | (WEIGHTS if weight_state(self._tensors) != self._state else 0)

    def changed_dicts(self) -> list[int]:
        return [i for i, (table, before) in enumerate(self._dicts) if not _is_same(table, before)]

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        return {id(t) for t in self._tensors}.issuperset(map(id, tensors))

    def changed_tensors(self) -> list[int]:
        state = weight_state(self._tensors)
        return [now[0] for now, before in zip(state, self._state, strict=True) if now != before]


def _is_same(table: Any, before: Any) -> bool:
    """Whether a dictionary, or a list, has the values that it had."""
    if isinstance(table, dict):
        table, before = table.values(), before.values()
    return len(table) == len(before) and all(map(is_, table, before))
