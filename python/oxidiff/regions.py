"""A module that runs Python between its layers, with what lies below that compiled, each part by itself.

Hooks on blocks (diffusers' caches, offloading of groups, skipped layers, a ``register_forward_hook``) are Python that has
to run, with values of its own, between the layers they are on; so does a ``forward`` that changes its module, and one that
data decide about. None of these is part of a program. Here ``forward`` runs as it is, on a stand-in for the module: an
object with the same ``__dict__``, whose submodules are found by way of :meth:`Regions._replaced`. The largest submodules
without such Python in them have dispatchers of their own; they are often many of one class and configuration, which are
captured once (:mod:`oxidiff.family`). What contains both is a stand-in too. Layers of PyTorch alone run eager.

A function in the place of a ``forward`` runs as it is, too, but for what it calls (:mod:`oxidiff.redirect`): modules, and
the ``forward`` that was there before, which is a part, or runs on a stand-in.

Threads: stand-ins are made once, under the lock of who owns this, and then only read.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .adapters import adapter_class
from .errors import Error, UnsupportedError
from .hooks import Bare, Wrapped, calls_itself, run_around, sharing
from .redirect import Redirecting
from .split import EAGER, RUNS_EAGER
from .watch import Structure, obstacle_of

if TYPE_CHECKING:
    from .dispatch import Dispatcher

__all__ = ["Regions"]

_MOST = 0.8
"""The share of a module's weights from which on what is not in its parts may run eager."""


class Regions:
    """What stands for a ``forward`` between whose layers Python has to run.

    Args:
        structure: What the module looks like.
        module: The module.
        forward: Its ``forward`` without hooks around it.
        open_ids: The ids of modules whose ``forward`` has to run in Python.
        make: Makes the dispatcher of a part: ``make(module, report=...)``.
        bare: Modules without the functions that were put in the place of their ``forward``, as far as there are any already.

    Attributes:
        parts: The dispatchers of the parts, by path.
        bare: The same, of all modules that are parts in such a way.
    """

    def __init__(
        self,
        structure: Structure,
        module: nn.Module,
        forward: Callable[..., Any],
        open_ids: frozenset[int],
        make: Callable[..., Dispatcher],
        bare: Mapping[int, Bare],
        local: threading.local,
    ) -> None:
        self.parts: dict[str, Dispatcher] = {}
        self.bare: dict[int, Bare] = {}
        self._bare_before = bare
        self._make = make
        self._local = local
        self._known: dict[int, nn.Module | None] = {}
        self._paths: dict[int, str] = {}
        self._whole = forward
        self.open_ids = open_ids
        self._held = structure.modules
        self._ids = _ids(structure)
        self._hooked = _hooked(structure)
        self._opaque = self._hooked | open_ids
        self._by_table = {id(one.__dict__): one for one in (*structure.modules.values(), module)}
        """The modules by what they share with those that are compiled of them, which somebody may hold instead."""
        self._inner: dict[int, Callable[..., Any]] = {}
        """By the ids of modules with a function in the place of their ``forward``, what runs that."""
        self._redirecting = Redirecting(self._found)
        self._bare_parts: list[nn.Module] = []
        """Modules that are parts without the function in the place of their ``forward``, if that calls them."""
        self._lock = threading.Lock()
        self._forward: Callable[..., Any] | None = None
        stand_in = self._known[id(module)] = self._root = _stand_in(self, module, None)
        is_found = self._with_others(structure)
        if isinstance(forward, types.MethodType) and forward.__func__ is getattr(type(module), "forward", None):
            if self._with_children(module, "") or is_found:
                self._forward = types.MethodType(forward.__func__, stand_in)
        elif type(module).forward is not nn.Module.forward and self._is_replaced_part(module, "", forward, stand_in):
            self._forward = functools.partial(self._run_replaced, forward)

    def __bool__(self) -> bool:
        """Whether there is anything to compile."""
        return self._forward is not None

    def have_most(self, module: nn.Module) -> bool:
        """Whether of each module that runs in Python most weights are in parts, but for tables that rows are looked up in.

        Args:
            module: The module that this is for.
        """
        parts = [*(part.module for part in self.parts.values()), *self._bare_parts]
        compiled = {id(weight) for part in parts for weight in part.parameters()}
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        for one in module.modules():
            if id(one) in self.open_ids:
                sizes = {id(weight): weight.numel() for weight in one.parameters() if id(weight) not in tables}
                if sum(size for key, size in sizes.items() if key in compiled) < _MOST * sum(sizes.values()):
                    return False
        return bool(self)

    def fits(self, structure: Structure, forward: Callable[..., Any], open_ids: frozenset[int]) -> bool:
        """Whether the module is made of the same submodules still, with hooks in the same places."""
        is_same = forward == self._whole and open_ids == self.open_ids and _ids(structure) == self._ids
        return is_same and _hooked(structure) == self._hooked

    def is_within(self, structure: Structure) -> bool:
        """Whether all that it is made of is part of the module still."""
        return self._ids <= _ids(structure)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int, list[tuple[Error, str]]]:
        """The result of a call, how many parts ran compiled, and what ran eager and why."""
        assert self._forward is not None, "only what has parts is called"
        return self._counted(self._forward, args, kwargs)

    def call_method(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int, list[tuple[Error, str]]]:
        """The same for another method of the module's class."""
        return self._counted(types.MethodType(method, self._root), args, kwargs)

    def is_own(self, result: Any) -> bool:
        """Whether that is what methods run on in the place of the module."""
        return result is self._root

    def _counted(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int, list[tuple[Error, str]]]:
        local = self._local
        outer = getattr(local, "compiled", 0), getattr(local, "problems", None)
        local.compiled, local.problems = 0, []
        try:
            return function(*args, **kwargs), local.compiled, local.problems
        finally:
            local.compiled, local.problems = outer

    def _replaced(self, child: Any) -> Any:
        """What runs in the place of a submodule: itself, if nothing else does. There may be none under a name."""
        if child is None:
            return None
        found = self._known.get(id(child)) or self._known.get(id(self._own(child)))
        return child if found is None else found

    def _own(self, module: nn.Module) -> nn.Module:
        """The module that a compiled one is of; any other one itself."""
        return self._by_table.get(id(module.__dict__), module)

    def _with_children(self, module: nn.Module, path: str) -> bool:
        """Whether one of its children is run otherwise than as it is."""
        found = False
        for name, child in module._modules.items():
            if child is not None:
                below = f"{path}.{name}" if path else name
                if id(child) not in self._known:
                    self._known[id(child)] = None
                    self._paths[id(child)] = below
                    self._known[id(child)] = self._part(child, below)
                found = found or self._known[id(child)] is not None
        return found

    def _with_others(self, structure: Structure) -> bool:
        """As :meth:`_with_children`, of modules that attributes and functions hold and that are no submodules."""
        found = False
        for name, other in structure.together._modules.items() if structure.together is not None else ():
            if other is not None and other is not structure.reading and id(other) not in self._known:
                self._known[id(other)] = None
                self._paths[id(other)] = name
                self._known[id(other)] = self._part(other, name)
                found = found or self._known[id(other)] is not None
        return found

    def _part(self, child: nn.Module, path: str) -> nn.Module | None:
        """What runs in the place of a submodule; ``None`` if that is itself."""
        cls = type(child)
        if isinstance(child, torch.jit.ScriptModule) or calls_itself(cls) or isinstance(child, adapter_class() or ()):
            return None
        try:
            wrapped = Wrapped(child)
        except UnsupportedError:
            return None
        is_container = cls.forward is nn.Module.forward
        below = (module for module in child.modules() if module is not child)
        is_whole = id(child) not in self.open_ids and not any(id(self._own(m)) in self._opaque for m in below)
        if is_whole and not is_container:
            if not child._modules and (_is_of_torch(child) or not child._parameters):
                return None
            part = self._make(child, report=functools.partial(self._report, path))
            part.path, part.is_within = path, True
            self.parts[path] = part
            return _stand_in(self, child, part)
        if not is_container and "_hf_hook" in child.__dict__:
            return None
        # Before its children are known, which may have it for theirs.
        stand_in = self._known[id(child)] = _stand_in(self, child, None)
        if is_container or wrapped.is_own:
            is_found = self._with_children(child, path)
        else:
            is_found = self._is_replaced_part(child, path, wrapped.forward, stand_in)
        return stand_in if is_found else None

    def _is_replaced_part(self, module: nn.Module, path: str, forward: Callable[..., Any], stand_in: nn.Module) -> bool:
        """Whether a function in the place of the ``forward`` of a module may call anything that is compiled."""
        is_found = self._with_children(module, path)
        if not self._redirecting.can(forward):
            return False
        is_layer = not module._modules and (_is_of_torch(module) or not module._parameters)
        if is_layer or any(id(below) in self._opaque for below in module.modules() if below is not module):
            self._inner[id(module)] = types.MethodType(type(module).forward, stand_in)
        else:
            # Whether the function calls it, only calls show.
            self._bare_parts.append(module)
            self._inner[id(module)] = functools.partial(self._run_bare, module, path)
            is_found = True
        return is_found

    def _found(self, called: Any) -> Any:
        """What is called where a function in the place of a ``forward`` calls something."""
        if getattr(self._local, "problems", None) is None:
            # A function that it made, and that somebody kept.
            return called
        if isinstance(called, nn.Module):
            return self._replaced(called)
        if isinstance(called, types.MethodType) and isinstance(called.__self__, nn.Module):
            # Of a compiled module, too: it is an object of its own with the same attributes.
            module = self._by_table.get(id(called.__self__.__dict__))
            if module is not None and called.__func__ is getattr(type(module), "forward", None):
                return self._inner.get(id(module), called)
            stand_in = self._known.get(id(module))
            if stand_in is not None and not _is_of_class(called.__func__, type(module)):
                # What was in the place of `forward` before.
                return types.MethodType(called.__func__, stand_in)
        return called

    def _run_replaced(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function that is in the place of the ``forward`` of a module."""
        return self._redirecting.of(forward)(*args, **kwargs)

    def _run_bare(self, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a module without the function in the place of its ``forward``, as a part."""
        bare = self.bare.get(id(module))
        if bare is None:
            with self._lock:
                bare = self.bare.get(id(module))
                if bare is None:
                    bare = self._bare_before.get(id(module)) or Bare(module)
                    part = self._make(bare.twin, report=functools.partial(self._report, path))
                    part.path, part.is_within = path, True
                    # Others look through them meanwhile.
                    self.parts = {**self.parts, path: part}
                    self.bare = {**self.bare, id(module): bare}
        return bare.call(functools.partial(self._run_part, self.parts[path]), args, kwargs)

    def _run_part(self, part: Dispatcher, *args: Any, **kwargs: Any) -> Any:
        problems = getattr(self._local, "problems", None)
        if problems is None:
            # Kept by somebody, and called from elsewhere.
            return part.forward()(*args, **kwargs)
        known = len(problems)
        result = part(args, kwargs)
        self._local.compiled += not any(what in EAGER for _, what in problems[known:])
        return result

    def _report(self, path: str, error: Error, what: str) -> None:
        place = ".".join(filter(None, (path, getattr(error, "module", ""))))
        moved = UnsupportedError(str(error), module=place, op=getattr(error, "op", ""))
        self._local.problems.append((moved, what))

    def run(self, module: nn.Module, stand_in: nn.Module, part: Dispatcher | None, args: Any, kwargs: Any) -> Any:
        """A call of a submodule.

        Args:
            module: The submodule.
            stand_in: What stands for it.
            part: Its dispatcher; ``None`` if its ``forward`` runs as it is.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            if part is None:
                if not wrapped.is_own:
                    return self._run_replaced(wrapped.forward, *args, **kwargs)
                return types.MethodType(type(module).forward, stand_in)(*args, **kwargs)
            return self._run_part(part, *args, **kwargs)

        table = module.__dict__
        if table["_backward_hooks"] or table["_backward_pre_hooks"] or table["_forward_hooks_always_called"]:
            return module(*args, **kwargs)
        try:
            wrapped = Wrapped(module)
        except UnsupportedError as error:
            # It was set after hooks of the same module were found.
            if getattr(self._local, "problems", None) is not None:
                self._report(self._paths[id(module)], error, RUNS_EAGER)
            return module(*args, **kwargs)
        return run_around(wrapped, module, forward, args, kwargs)


def _is_of_class(function: Any, kind: type) -> bool:
    """Whether a function is a method of a class."""
    name = getattr(function, "__name__", "")
    return any(function is vars(base).get(name) for base in kind.__mro__)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _ids(structure: Structure) -> frozenset[int]:
    """The ids of all modules of a tree; not of those that a look at it makes anew."""
    modules = (*structure.modules.values(), *structure.layers.values())
    return frozenset(id(one) for one in modules if one is not structure.together and one is not structure.reading)


def _hooked(structure: Structure) -> frozenset[int]:
    """The ids of the modules with Python around them that no program runs; the root's own is run around the program."""
    if structure.obstacle is None:
        return frozenset()
    modules = (*structure.modules.values(), *structure.layers.values())
    return frozenset(id(module) for module in modules if obstacle_of(module) is not None)


# --- stand-ins ------------------------------------------------------------------------------------------------------


class _Children(MutableMapping[str, Any]):
    """The submodules of a module, with what runs in their place."""

    def __init__(self, regions: Regions, modules: dict[str, nn.Module | None]) -> None:
        self._regions = regions
        self._modules = modules

    def __getitem__(self, name: str) -> Any:
        return self._regions._replaced(self._modules[name])

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        self._modules[name] = _itself(module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _itself(value: Any) -> Any:
    """The module that a stand-in stands for; anything else as it is."""
    place = type(value).__dict__.get("_oxidiff_place")
    return value if place is None else place.__get__(value)[1]


def _stand_in(regions: Regions, module: nn.Module, part: Dispatcher | None) -> nn.Module:
    """An object that is called in the place of a module, and is it in all else."""
    made = sharing(_class_of(type(module)), module)
    object.__setattr__(made, "_oxidiff_place", (regions, module, part))
    return cast(nn.Module, made)


_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _class_of(cls: type[nn.Module]) -> Any:
    """The class of stand-ins for modules of a class."""
    made = _classes.get(cls)
    if made is not None:
        return made

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        regions, module, part = place(self)
        return regions.run(module, self, part, args, kwargs)

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        found = cls.__getattr__(self, name)
        return place(self)[0]._replaced(found) if isinstance(found, nn.Module) else found

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        # What forward keeps outlives the call, and is the module's.
        cls.__setattr__(self, name, _itself(value))

    def children(self: Any) -> _Children:
        return _Children(place(self)[0], self.__dict__["_modules"])

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(
            __slots__=("_oxidiff_place",),
            __module__=cls.__module__,
            __qualname__=cls.__qualname__,
            __doc__=cls.__doc__,
            __call__=__call__,
            __getattr__=__getattr__,
            __setattr__=__setattr__,
            # A list of modules makes slices of itself with its class.
            __class__=property(lambda _: cls),
            _modules=property(children),
            __reduce_ex__=lambda self, protocol: place(self)[1].__reduce_ex__(protocol),
            __copy__=lambda self: copy.copy(place(self)[1]),
            __deepcopy__=lambda self, memo: copy.deepcopy(place(self)[1], memo),
        )

    made = types.new_class(cls.__name__, (cls,), {}, fill)
    place = made.__dict__["_oxidiff_place"].__get__
    _classes[cls] = made
    return made
