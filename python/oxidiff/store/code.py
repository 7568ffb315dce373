"""What code does as text, and what it finds outside of modules, by following the names in it."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import gc
import hashlib
import math
import os
import random
import re
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _native
from ..adapters import adapter_class
from ..ambient import ASKED
from ..capture import pretence
from ..capture.guards import FUNCTIONS, LEAVING
from ..capture.stateful import ARRAYS, is_stateful, items_of
from ..capture.writes import (
    CONTAINERS,
    IS_HEAP_TYPE,
    Cells,
    ClassTable,
    Outer,
    Slots,
    is_plain_object,
    is_value,
    slots_of,
    tables_of,
)
from ..errors import is_interrupt
from ..outside import Reading, attributes_read, globals_read, modules_imported, variables_set, writes_in, writes_inside
from .origins import (
    CLOSED,
    PACKAGES,
    UNDESCRIBED,
    file_of,
    is_of_platform,
    is_own,
    is_own_module,
    is_platform,
    is_platform_module,
    undescribed,
)
from .tree import (
    BY_TEXT,
    DEPTH,
    HOLDING,
    MAX_ITEMS,
    NAMESPACES,
    OF_DATA,
    OF_TORCH,
    SCALARS,
    Tree,
    attributes_of,
    is_routine,
    name_of,
)

__all__ = ["Code", "Surroundings"]

_OF_CALLERS = (threading.local, contextvars.ContextVar)
"""What holds another thing in each thread or context."""
_MAX_FUNCTIONS = 20_000
_MAX_LOOKED = 20_000
"""Objects that are looked through for dictionaries that are empty."""
_NOT_LOOKED_INTO = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType, Tensor,
    torch.nn.Module, str, bytes, int, float,
)  # fmt: skip
_MAX_WRITTEN = 256
"""Objects that are looked into for what code may write there."""
_MAX_WATCHED = 4096
"""Items of lists and sets in globals that each call compares."""
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


@dataclass(frozen=True)
class Surroundings:
    """What the code of a module finds outside of it.

    Attributes:
        found: All that it finds, to be watched.
        outer: What of it the code may write.
        asked: Says how modes of torch are that it asks for.
        is_of_callers: Whether some of it is another thing in another thread or context.
        classes: The classes of objects that the code may use.
    """

    found: _native.Surroundings
    outer: Outer
    asked: tuple[Callable[[], Any], ...] = ()
    is_of_callers: bool = False
    classes: frozenset[type] = frozenset()


_SPACES: tuple[Any, ...] = (torch, torch.nn.functional, torch.Tensor, torch.linalg, torch.special, torch.fft)
"""Where functions are that people replace for all code that calls them."""
_SET_BY_TRACES = frozenset(
    {
        "__call__", "__delattr__", "__init__", "__setattr__", "add_module", "register_parameter",
        "delete_adapter", "enable_adapters", "merge", "scale_layer", "set_adapter", "set_scale", "unmerge", "unscale_layer",
    }
)  # fmt: skip
"""What a trace replaces for a while, in classes of torch and PEFT."""
_OF_MATH = frozenset((*(name.removeprefix("math.") for name in FUNCTIONS), *LEAVING))
"""The same in :mod:`math`."""
_SET_BY_DYNAMO = frozenset({"initial_seed", "is_inference_mode_enabled", "manual_seed", "seed"})
"""What is replaced in torch when Dynamo is first used, and for a while by traces."""


@functools.lru_cache(maxsize=65536)
def _digest(code: types.CodeType) -> str:
    """What a function does, without where it stands."""
    state = hashlib.blake2b(digest_size=8)
    parts = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags]
    parts.append(getattr(code, "co_exceptiontable", b""))
    state.update(repr(parts).encode("utf-8", "surrogatepass"))
    for constant in code.co_consts:
        text = _digest(constant) if isinstance(constant, types.CodeType) else _constant(constant)
        state.update(text.encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def _constant(value: Any) -> str:
    # The order of a set is not the same in two processes.
    return f"{{{sorted(map(repr, value))}}}" if isinstance(value, frozenset) else repr(value)


_ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names in code that reads variables of the environment, whose names are texts there."""
_OF_GLOBALS = frozenset({"eval", "exec", "globals", "vars"})
"""Names in code that finds globals by texts."""
_BY_NAME = _OF_GLOBALS | {"__dict__", "__import__", "attrgetter", "getattr", "import_module", "modules"}
"""Names in code that finds things by texts."""
_LOOKING = frozenset({"__getattribute__", "attrgetter", "getattr"})
"""Names in code that looks for attributes by texts."""
_LISTING = frozenset(
    {"__dict__", "__slots__", "_get_kwargs", "asdict", "astuple", "dir", "fields", "getmembers", "vars"}
)
"""Names in code that goes through the attributes of objects."""
_WORD = re.compile(r"[^\W\d]\w*")
_NOT_RUN = frozenset(
    {
        "__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__delattr__", "__dir__", "__getstate__",
        "__init_subclass__", "__reduce__", "__reduce_ex__", "__repr__", "__set_name__", "__setstate__", "__sizeof__",
        "__str__",
    }
)  # fmt: skip
"""Special methods that no computation calls."""
_RANDOM = frozenset({"numpy.random", "random"})
"""Names in code that draws from the generators of Python and numpy; others call functions of theirs."""
_SETUP = frozenset({"__init__", "__init_subclass__", "__new__", "__post_init__", "__set_name__"})
_BY_TEXTS = frozenset({"__dict__", "setattr", "vars"})
"""Names in code that may set attributes by texts."""
_SEEDING = frozenset(
    {
        "default_generator", "fork_rng", "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed",
        "manual_seed_all", "seed_all", "set_rng_state", "set_rng_state_all", "set_seed",
    }
)  # fmt: skip
"""Names in code that has to do with the state of PyTorch's generators."""


def _draws(value: Any) -> bool:
    """Whether it is a function of a generator that belongs to all threads."""
    if not isinstance(value, types.BuiltinMethodType | types.MethodType):
        return False
    numpy_random = sys.modules.get("numpy.random.mtrand")
    generators = (getattr(random, "_inst", None), getattr(numpy_random, "_rand", None))
    return any(value.__self__ is one for one in generators if one is not None)


def _encoded(name: str) -> Any:
    """The key of a variable in what ``os.environ`` keeps."""
    encode = getattr(os.environ, "encodekey", None)
    return encode(name) if encode is not None else name


class Code:
    """The functions that a forward may run, by name.

    Methods are reached by their names: every method of a reached class is, if any reached function uses its name.
    """

    def __init__(self, is_tolerant: bool = False) -> None:
        self.is_tolerant = is_tolerant
        """Whether it goes on behind what cannot be described."""
        self._rows: dict[str, set[str]] = {}
        self.tree = Tree(self)
        self._classes: dict[type, str] = {}
        self._functions: dict[int, Any] = {}
        self._names: set[str] = {
            "forward",
            "__call__",
            "__getattr__",
            "__getitem__",
            "__iter__",
            "__len__",
            "__contains__",
        }
        self._attributes: set[str] = set()
        """Names of attributes that are read, and texts that may be such."""
        self._parts: set[str] = set()
        """Parts of names in code that looks for attributes by name."""
        self._read: dict[int, tuple[dict[str, Any], set[str], list[types.FunctionType]]] = {}
        """Tables by id, with what is read of each, and the functions of the file."""
        self._contents: dict[int, tuple[Any, Any]] = {}
        """Dictionaries, lists and sets that are found outside of modules, by id, each after the object whose attributes it
        is; an object with slots after itself."""
        self.is_outside = False
        """Whether what is described was found outside of modules."""
        self.is_of_callers = False
        """Whether variables of threads or contexts were found, wherever."""
        self._roots: dict[int, Any] = {}
        """All that was found there, by id."""
        self._sets: set[str] = set()
        """Names of attributes that code sets."""
        self._passed: dict[int, tuple[str, Any]] = {}
        """What code of the program's own finds outside, by id, with labels: another function of its own may write there."""
        self._own_sets: set[str] = set()
        self._own_texts: set[str] = set()
        self._is_setup = False
        self._of_setup: set[int] = set()
        """Functions, by id, that are seen to be called by what makes objects alone: what these count, they count there."""
        self._has_own_items = False
        """What such code sets, what it may set by a text, and whether it writes items of containers."""
        self._written: dict[tuple[int, str], tuple[str, Any, str]] = {}
        self._written_there: dict[tuple[int, str], tuple[str, Any, str]] = {}
        """The same, of what may be handed on: that nobody reads it there is no reason to look at it at each call."""
        self._altered: dict[int, tuple[str, Any]] = {}
        self._may_draw, self._may_seed = is_tolerant, False
        self._objects: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        """Options and objects of a program's own classes that are found outside of modules, by id: a name for each, and its
        attributes."""
        self._options: dict[str, dict[str, str]] = {}
        """By that name, the attributes that code reads."""
        self._texts: set[str] = set()
        """Texts in code of the program's own."""
        self._is_looking, self._is_listing = False, False
        """Whether that code may look for attributes by texts, and go through all attributes of objects."""
        self._given: set[type] = set()
        """The classes of objects that are passed, with those below them."""
        self._environment: set[str] = set()
        """Names of variables of the environment that are read."""
        self._modes: set[str] = set()
        """Names in code of the program's own of modes of torch."""
        self._waiting: list[types.FunctionType] = []
        self._new_names: set[str] = set()

    def reach(self, function: Any) -> str:
        """Notes that a function may run, and gives its name."""
        is_known = id(function) in self._functions
        if not is_known or (not self._is_setup and id(function) in self._of_setup):
            self._functions[id(function)] = function
            if not (is_platform(file := function.__code__.co_filename) or file.startswith(CLOSED)):
                self._waiting.append(function)
            if self._is_setup:
                self._of_setup.add(id(function))
            else:
                self._of_setup.discard(id(function))
        return name_of(function)

    def reach_class(self, cls: type) -> str:
        """Notes that objects of a class may be used, and gives its name."""
        name = self._classes.get(cls)
        if name is None:
            # Its methods may be called wherever there is an object of it.
            is_setup, self._is_setup = self._is_setup, False
            name = self._classes[cls] = name_of(cls)
            for base in cls.__mro__[1:]:
                if base not in self._classes:
                    self._classes[base] = name_of(base)
                    self._methods(base, self._names | _specials(base))
            self._methods(cls, self._names | _specials(cls))
            self._named_by(cls, self._parts)
            # Members are found by other means than their names: `Mode(2)`, `Mode["A"]`.
            members: list[tuple[str, Any]] = list(cls.__members__.items()) if isinstance(cls, enum.EnumMeta) else []
            for member, value in members[:MAX_ITEMS]:
                self._rows.setdefault(f"{name}.{member}", set()).add(self._found(value, DEPTH))
            if is_own(type(cls)):
                # What is found in the class itself may be computed.
                self.reach_class(type(cls))
            self._is_setup = is_setup
        return name

    def reach_given(self, classes: Iterable[type]) -> None:
        """Notes that objects of classes are used that other code makes."""
        for cls in classes:
            for base in cls.__mro__:
                if base not in self._classes:
                    self._classes[base] = name_of(base)
                    self._methods(base, self._names | (_specials(base) - _MAKING))
            self._given.update(cls.__mro__)

    def finish(self) -> dict[str, str]:
        """Follows all code to its end, and gives what each reached function is."""
        self._replaced()
        self._finish_code()
        while self._read_objects():
            self._finish_code()
        self._note_passed()
        for label, options in self._options.items():
            self._rows[label] = {f"{name}={text}" for name, text in options.items()}
        return {name: " ".join(sorted(found)) for name, found in self._rows.items()}

    def _note_seen(self, label: str, value: Any) -> None:
        """Notes what code of the program's own finds, other than classes, files, and functions without attributes."""
        is_code = self._is_setup or isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
        if not (is_code or (isinstance(value, types.FunctionType) and not value.__dict__)):
            self._passed.setdefault(id(value), (label, value))

    def _note_passed(self) -> None:
        """Notes what code may write that is handed on to it: a function that counts in the object that it is passed."""
        sets = self._own_sets | (self._own_texts if self._has_own_items else set())
        if sets or self._has_own_items:
            for label, value in self._passed.values():
                # What is there now may be a time, or a number of the run.
                self._note_written(label, value, sets, self._has_own_items, None, {})

    def named_of(self, value: Any, table: dict[str, Any]) -> str:
        """The name of an object of which that is described which code reads: a folder for results, a time or a number of the
        run is another one at each start."""
        return self._objects.setdefault(id(value), (f"object {len(self._objects)}", value, table))[0]

    def _read_objects(self) -> bool:
        """Describes the attributes of objects that code has names for; whether there were some that it had none for."""
        is_more = False
        for label, _, table in list(self._objects.values()):
            options = self._options.setdefault(label, {})
            for name in sorted(table.keys() - options.keys()):
                if name in self._attributes or self._is_listing or self._is_of_texts(name):
                    options[name] = self._found(table[name], DEPTH)
                    is_more = True
        return is_more

    def _finish_code(self) -> None:
        while self._waiting or self._new_names:
            while self._waiting:
                function = self._waiting.pop()
                self._is_setup = function.__name__ in _SETUP or id(function) in self._of_setup
                with undescribed() if self.is_tolerant else contextlib.nullcontext():
                    self._function(function)
                if len(self._rows) > _MAX_FUNCTIONS:
                    raise RecursionError("forward reaches too much code to describe")
            self._is_setup = False
            names, self._new_names = self._new_names, set()
            self._names |= names
            for cls in list(self._classes):
                self._methods(cls, names)

    def _is_of_texts(self, name: str) -> bool:
        """Whether code may find an attribute by texts, or by what it puts together from them."""
        parts = self._texts if self._is_looking else self._parts
        return any(len(part) > 2 and (name.startswith(part) or name.endswith(part)) for part in parts)

    def packages(self) -> dict[str, str]:
        """The versions of the installed packages that code was found in."""
        names = {(thing.__module__ or "").partition(".")[0] for thing in (*self._functions.values(), *self._classes)}
        modules = ((name, sys.modules.get(name)) for name in sorted(names))
        return {
            name: version for name, module in modules
            if module is not None and not (is_platform_module(module) or is_own_module(module))
            and isinstance(version := getattr(module, "__version__", None), str)
        }  # fmt: skip

    def surroundings(self, module: torch.nn.Module) -> Surroundings:
        """What all of it finds in files and classes, as it is now, other than what modules inside of ``module`` have."""
        for space in _SPACES:
            self._table(_dict_of(space))[1].update(
                n for n, v in vars(space).items() if callable(v) and n not in _SET_BY_DYNAMO
            )
        for cls in self._classes:
            if cls.__flags__ & IS_HEAP_TYPE:
                names = {n for base in cls.__mro__ for n in base.__dict__.keys() & self._names} | _specials(cls)
                if cls in self._given:
                    # What objects have there is asked of them.
                    names |= self._names
                self._table(_dict_of(cls))[1].update(names - _SET_BY_TRACES if _is_set_by_traces(cls) else names)
        had = {place for child in module.modules() if isinstance(child, Reading) for place in child.places}
        tables: list[tuple[dict[Any, Any], list[Any], list[types.FunctionType]]] = [
            (table, [name for name in names if (id(table), name) not in had], functions)
            for table, names, functions in self._read.values()
        ]
        if self._environment and isinstance(variables := getattr(os.environ, "_data", None), dict):
            tables.append((variables, [_encoded(name) for name in self._environment], []))
        written, left = self._outer(), _MAX_WATCHED
        for key, (owner, held) in list(self._contents.items()):
            if not isinstance(held, dict):
                left -= len(held) if owner is None and isinstance(held, CONTAINERS) else 1
                if left < 0:
                    del self._contents[key]
        tables += [(table, [name], []) for _, table, name in self._written.values() if isinstance(table, dict)]
        contents = [
            (
                owner,
                held,
                None if owner is None else [name for name in self._read_of(owner) if (id(held), name) not in had],
            )
            for owner, held in self._contents.values()
        ]
        asked = tuple(dict.fromkeys(ASKED[name] for name in sorted(self._modes)))
        found = _native.Surroundings(tables, contents)
        return Surroundings(found, written, asked, self.is_of_callers, frozenset(self._classes))

    def _outer(self) -> Outer:
        """What the code may write outside of modules."""
        if self.is_tolerant:
            self._note_passed()
        for cls in [cls for cls in self._classes if not is_of_platform(cls)]:
            for name in self._sets & cls.__dict__.keys():
                self._written[id(cls), name] = f"{cls.__qualname__}.{name}", ClassTable(cls), name
        names = (self._written_there | self._written).values()
        read = None if self._is_listing else frozenset(self._attributes)
        parts = [part for part in (self._texts if self._is_looking else self._parts) if len(part) > 2]
        watched = [owner for owner, _ in self._contents.values() if isinstance(owner, torch.nn.Module)]
        altered, untracked = self._altered.values(), self._untracked()
        return Outer(names, altered, self._may_draw, self._may_seed, untracked, read, parts, watched)

    def _untracked(self) -> list[dict[Any, Any]]:
        """Dictionaries in what was found outside of modules, however deep, that Python's collector does not know."""
        found: list[dict[Any, Any]] = []
        waiting, seen = deque(self._roots.values()), set[int]()
        while waiting and len(seen) < _MAX_LOOKED:
            value = waiting.popleft()
            if id(value) in seen or issubclass(type(value), _NOT_LOOKED_INTO):
                continue
            seen.add(id(value))
            if type(value) is dict and not gc.is_tracked(value):
                found.append(value)
            else:
                # What is another one in each thread is in none of them.
                waiting += [vars(value)] if isinstance(value, threading.local) else gc.get_referents(value)
        return found

    def _note_place(self, label: str, owner: Any, table: Any, name: str, state: list[str] | None) -> None:
        if state is None:
            self._written_there[id(owner), name] = label, table, name
            return
        self._written[id(owner), name] = label, table, name
        # A program is of calls that find there what they would leave there.
        if is_value(value := table.get(name)):
            state.append(f"{label}={value!r}")

    def _note_written(
        self, label: str, value: Any, sets: Set[str], is_item: bool, state: list[str] | None, seen: dict[int, Any]
    ) -> None:
        """Notes what code may write that sets these attributes, and perhaps items, in what it finds; ``state`` gets what is
        there, unless that is no part of the description."""
        if id(value) in seen or len(seen) > _MAX_WRITTEN:
            return
        seen[id(value)] = value
        is_holder = isinstance(value, CONTAINERS) and is_item
        if is_holder or (is_stateful(value) and not self._is_setup):
            self._altered[id(value)] = label, value
        if not isinstance(value, CONTAINERS):
            # What is in containers is looked for there.
            for _, part in items_of(value):
                self._note_written(label, part, sets, is_item, state, seen)
        tables: list[Any] = [table for _, table in tables_of(value)]
        is_object = bool(tables)
        if isinstance(value, type) and not is_of_platform(value):
            tables = [ClassTable(value)]
        elif isinstance(value, types.ModuleType) and not is_platform_module(value):
            tables = [value.__dict__]
        elif self._is_outer_module(value) or (isinstance(value, types.FunctionType) and sets):
            tables, is_object = [value.__dict__], True
        for table in tables:
            names = sets & {*table.names} if isinstance(table, Slots) else sets
            for name in sorted(names):
                self._note_place(f"{label}.{name}", table if isinstance(table, Slots) else value, table, name, state)
            # What the platform's `UserDict` and the like have their items in is read by their own code.
            is_all = isinstance(value, Mapping | MutableSequence)
            for name in [n for n in table if (is_all or n in self._attributes) and not n.startswith("__")]:
                held = table[name]
                is_inner = (is_object and _has_attributes(type(held))) or self._is_outer_module(held)
                if is_inner or isinstance(held, (*CONTAINERS, types.FunctionType)) or is_stateful(held):
                    self._note_written(f"{label}.{name}", held, sets, is_item, state, seen)

    def _is_outer_module(self, value: Any) -> bool:
        """Whether it is a module that is no submodule."""
        return isinstance(value, torch.nn.Module) and id(value) not in self.tree.paths

    def _read_of(self, owner: Any) -> Iterator[str]:
        """The attributes of an object that code may read."""
        if isinstance(owner, types.CellType):
            return iter(("cell_contents",))
        found: set[str] = set()
        if (named := self._objects.get(id(owner))) is not None:
            found.update(self._options.get(named[0], ()))
        if not hasattr(owner, "__dict__"):
            # Slots alone: a property would be computed at each call.
            return iter(found | (self._attributes & {*slots_of(type(owner)), *(attributes_of(owner) or ())}))
        if isinstance(owner, torch.nn.Module):
            # Those, too, that it has not: one that it gets is another module.
            return iter(found | self._attributes)
        for space in (owner, *type(owner).__mro__):
            found |= space.__dict__.keys() & self._attributes
        return iter(found)

    def _table(self, table: dict[str, Any]) -> tuple[dict[str, Any], set[str], list[types.FunctionType]]:
        return self._read.setdefault(id(table), (table, set(), []))

    def _replaced(self) -> None:
        """Reaches functions of torch that somebody put others in the place of: who calls them need not be followed."""
        for space in _SPACES:
            for name, value in vars(space).items():
                function = value
                while isinstance(function, functools.partial | types.MethodType):
                    function = function.func if isinstance(function, functools.partial) else function.__func__
                if isinstance(function, types.FunctionType) and not is_platform(function.__code__.co_filename):
                    self._rows.setdefault(f"{space.__name__}.{name}", set()).add(self._held(value))

    def note_contents(self, value: Any) -> None:
        """Notes what is inside of something that was found outside of modules."""
        if not self.is_outside:
            return
        table = getattr(value, "__dict__", None)
        if isinstance(value, CONTAINERS):
            if len(value) <= MAX_ITEMS:
                self._contents[id(value)] = None, value
                if isinstance(value, OrderedDict):
                    order = OrderedDict.keys(value)
                    self._contents[id(order)] = None, order
            if type(table) is dict and table:
                self._contents[id(table)] = value, table
            if slots_of(type(value)):
                slots = Slots(value)
                self._contents[id(slots)] = value, slots
        elif isinstance(value, (*ARRAYS, *_OF_CALLERS)):
            self._contents[id(value)] = None, value
        elif type(table) is dict:
            self._contents[id(table)] = value, table
            if slots_of(type(value)):
                self._contents[id(value)] = value, value
            for held in list(table.values()) if isinstance(value, Mapping) else ():
                self.note_contents(held)
                # The dictionaries of a ChainMap.
                for inner in held if isinstance(held, list) else ():
                    self.note_contents(inner)
        elif is_own(type(value)):
            self._contents[id(value)] = value, value

    def note_outside(self, value: Any) -> None:
        """Notes what is inside of something that was found outside of modules and is described otherwise."""
        before, self.is_outside = self.is_outside, True
        self.note_contents(value)
        self.is_outside = before

    def _found(self, value: Any, depth: int) -> str:
        """The text of what is outside of modules, the contents of which are followed."""
        before, self.is_outside = self.is_outside, True
        self._roots[id(value)] = value
        try:
            return self.tree.value(value, depth)
        except UNDESCRIBED as error:
            if not self.is_tolerant or is_interrupt(error):
                raise
            return ""
        finally:
            self.is_outside = before

    def note_text(self, text: str) -> None:
        """Notes a text that may be the name of a method."""
        self._attributes.add(text)
        if text not in self._names:
            self._new_names.add(text)

    def _note_part(self, text: str) -> None:
        """Notes a text that names of methods may be put together from, as `f"_run_{mode}"` is."""
        self.note_text(text)
        if len(text) > 2 and "_" in (text[0], text[-1]) and text not in self._parts:
            self._parts.add(text)
            for cls in list(self._classes):
                self._named_by(cls, (text,))

    def _named_by(self, cls: type, parts: Collection[str]) -> None:
        for name in cls.__dict__ if parts else ():
            if not name.startswith("__") and any(name.startswith(part) or name.endswith(part) for part in parts):
                self.note_text(name)

    def _methods(self, cls: type, names: Set[str]) -> None:
        table = cls.__dict__
        # In one order in all processes: which object is met first shows in texts.
        for name in sorted(table.keys() & names):
            value = table[name]
            if isinstance(value, _FUNCTIONS):
                self.reach_value(value)
            elif not name.startswith("__") and type(value) in SCALARS:
                self._rows.setdefault(f"{name_of(cls)}.{name}", set()).add(self.tree.value(value, 1))
            elif not name.startswith("__") and isinstance(value, HOLDING):
                self._rows.setdefault(f"{name_of(cls)}.{name}", set()).add(self._found(value, DEPTH))
            elif not name.startswith("__") and is_own(cls):
                with undescribed():
                    self._rows.setdefault(f"{name_of(cls)}.{name}", set()).add(self._outside(value))

    def reach_value(self, value: Any) -> None:
        """Reaches what a name stands for, if it is code."""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.FunctionType):
            self.reach(value)
            wrapped = getattr(value, "__wrapped__", None)
            if isinstance(wrapped, types.FunctionType):
                self.reach(wrapped)
        elif isinstance(value, type):
            self.reach_class(value)
        else:
            inner = None
            # Whatever code of its class does for names that it has not.
            with contextlib.suppress(Exception):
                inner = object.__getattribute__(value, "__wrapped__")
            if inner is not None:
                self.reach_value(inner)

    def _function(self, function: types.FunctionType) -> None:
        self._table(function.__globals__)[2].append(function)
        code = function.__code__
        state = [_digest(code)]
        if function.__dict__ and not code.co_filename.startswith(PACKAGES):
            state.append(self.named_of(function, function.__dict__))
            self.note_outside(function)
        sets, is_item = writes_inside(code)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            state.append(self._held(default))
            self._note_written(f"a default of {function.__qualname__}", default, sets, is_item, state, {})
        cells, assigned = Cells(function), variables_set(code)
        # A name that nothing was assigned to yet is not among them.
        for name, held in cells.items():
            state.append(self._held(held))
            label, cell = f"the variable {name}", cells.of(name)
            if name in assigned:
                self._note_place(label, cell, cells, name, state)
            self._note_written(label, held, sets, is_item, state, {})
            if not code.co_filename.startswith(PACKAGES) and name != "__class__":
                self._contents[id(cell)] = cell, cell
                self._note_seen(label, held)
        self._follow(code, function.__globals__, state)
        text = "\n".join(state).encode("utf-8", "surrogatepass")
        # A function and what it wraps may have one name.
        self._rows.setdefault(name_of(function), set()).add(hashlib.blake2b(text, digest_size=8).hexdigest())

    def _follow(self, code: types.CodeType, table: dict[str, Any], state: list[str]) -> None:
        """Adds what code finds in files. Of installed packages, which are described by their versions, too, that is followed
        which their own code is written like; of a program's own everything that syntax and texts lead to."""
        is_own, names, missing = not code.co_filename.startswith(PACKAGES), code.co_names, object()
        self._new_names.update(name for name in names if name not in self._names)
        self._attributes |= attributes_read(code)
        # `functional.silu` is none of the file's own names.
        read = globals_read(code)
        texts = list(_texts(code.co_consts)) if is_own and not _BY_NAME.isdisjoint(names) else []
        if is_own:
            self._texts.update(_texts(code.co_consts))
            self._modes.update(name for name in names if name in ASKED)
            self._is_looking = self._is_looking or not _LOOKING.isdisjoint(names)
            self._is_listing = self._is_listing or not _LISTING.isdisjoint(names)
        if not _OF_GLOBALS.isdisjoint(names):
            read += [word for text in texts for word in _WORD.findall(text) if word in table]
        used: list[types.ModuleType] = []
        is_asking = not _ENVIRONMENT.isdisjoint(names)
        assigned, sets, is_item = writes_in(code)
        self._sets |= sets
        if is_own and not self._is_setup:
            self._own_sets |= sets
            self._has_own_items = self._has_own_items or is_item
            if not _BY_TEXTS.isdisjoint(names):
                self._own_texts.update(text for text in _texts(code.co_consts) if text.isidentifier())
        self._may_draw = self._may_draw or not _RANDOM.isdisjoint(names)
        self._may_seed = self._may_seed or not _SEEDING.isdisjoint(names)
        for name in sorted(assigned):
            self._note_place(f"the global {name}", table, table, name, state)
            self._table(table)[1].add(name)
        for name in dict.fromkeys(read):
            value = table.get(name, missing)
            if getattr(value, "__module__", None) == pretence.__name__:
                # Python's own is put in front of by a trace that another thread makes.
                continue
            if value is not missing:
                if not _is_for_traces(table, name):
                    self._table(table)[1].add(name)
                if isinstance(value, types.ModuleType):
                    used.append(value)
                self._may_draw = self._may_draw or _draws(value)
                is_asking = is_asking or value is os.environ or value is os.getenv
                if is_own:
                    self._note_seen(f"the global {name}", value)
                if sets or is_item or (not self._is_setup and (is_stateful(value) or _has_attributes(type(value)))):
                    self._note_written(f"the global {name}", value, sets, is_item, state, {})
                state.append(f"{name}={self._outside(value)}")
        for name in (*modules_imported(code, table), *texts) if is_own else ():
            if (module := sys.modules.get(name)) is not None:
                used.append(module)
            elif name not in texts and (file := file_of(name)) is not None and not is_platform(file):
                # Imported when it runs, and not before.
                with open(file, "rb") as source:
                    state.append(f"{name}={hashlib.blake2b(source.read(), digest_size=8).hexdigest()}")
        self._follow_modules(used, (*names, *texts), state, is_own)
        is_looking = "getattr" in names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._follow(constant, table, state)
            elif is_looking and type(constant) is str:
                self._note_part(constant)
        if is_asking:
            found = (*_texts(code.co_consts), *(table.get(name) for name in read))
            for text in dict.fromkeys(text for text in found if type(text) is str and text.isidentifier()):
                self._environment.add(text)
                state.append(f"{text}={os.environ.get(text)!r}")
        if is_own and "argv" in names:
            state.append(repr(sys.argv))

    def _follow_modules(
        self, used: list[types.ModuleType], names: Sequence[str], state: list[str], is_own: bool
    ) -> None:
        """Notes what code with these names in it finds in modules, and in modules there: ``package.settings.SCALE``."""
        seen: set[int] = set()
        while used:
            module = used.pop(0)
            if id(module) in seen:
                continue
            seen.add(id(module))
            held = dict.fromkeys(name for name in names if name in module.__dict__)
            self._table(module.__dict__)[1].update(n for n in held if not _is_for_traces(module.__dict__, n))
            if is_platform_module(module):
                continue
            for name in held:
                value = module.__dict__[name]
                if is_own and isinstance(value, types.ModuleType) and is_own_module(value):
                    used.append(value)
                state.append(f"{module.__name__}.{name}={self._outside(value)}")

    def _held(self, value: Any) -> str:
        """What one function object holds, and another with the same code may hold another of."""
        self.reach_value(value)
        return self._found(value, DEPTH)

    def _outside(self, value: Any) -> str:
        """What code finds under a name outside of it."""
        kind = type(value)
        if kind in SCALARS or isinstance(value, OF_TORCH):
            return self.tree.value(value, 1)
        if isinstance(value, HOLDING):
            return self._found(value, DEPTH)
        if isinstance(value, type) and issubclass(value, BaseException):
            return name_of(value)
        self.reach_value(value)
        if isinstance(value, types.FunctionType | type):
            return name_of(value)
        # What Python, torch and numpy make at the top of a file serves a program without being part of what it computes:
        # loggers, locks, type variables.
        is_described = isinstance(value, torch.nn.Module) or is_routine(value)
        if is_described or not (isinstance(value, types.ModuleType) or is_of_platform(kind)):
            return self._found(value, DEPTH)
        if kind in NAMESPACES:
            self.note_outside(value)
            return self.named_of(value, value.__dict__)
        if isinstance(value, (*BY_TEXT, *_OF_CALLERS)) or kind.__module__ in OF_DATA:
            with undescribed():
                return self._found(value, DEPTH)
        if not isinstance(value, types.ModuleType):
            self._roots[id(value)] = value
            self.reach_class(kind)
        return kind.__name__


def _has_attributes(kind: type) -> bool:
    """Whether things of a type are a program's own with attributes, tuples or partials that may hold some, or variables."""
    is_open = issubclass(kind, (tuple, functools.partial, threading.local))
    return is_open or is_plain_object(kind) or bool(slots_of(kind))


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    """The texts among constants of code, and in tuples there."""
    for constant in constants:
        if type(constant) is str:
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from sorted(_texts(constant))


_MAKING = frozenset({"__init__", "__new__", "__post_init__"})


def _specials(cls: type) -> frozenset[str]:
    """The methods of a class of a program's own that syntax calls: operators, and what makes an object."""
    if not is_own(cls):
        return frozenset()
    skipped = _NOT_RUN | {"__init__", "__new__", "__setattr__"} if issubclass(cls, torch.nn.Module) else _NOT_RUN
    return frozenset(
        name for name, value in cls.__dict__.items()
        if name.startswith("__") and isinstance(value, _FUNCTIONS) and name not in skipped
    )  # fmt: skip


def _is_set_by_traces(cls: type) -> bool:
    """Whether it is a class of the platform, or one of PEFT's layers."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return issubclass(cls, adapter_class() or ()) or (file is not None and is_platform(file))


def _is_for_traces(table: dict[str, Any], name: str) -> bool:
    """Whether traces put something else there for a while, which other threads would find."""
    if table is vars(math):
        return name in _OF_MATH
    return name == "is_jit_tracing" and table.get("__name__") == "transformers.utils.import_utils"


def _dict_of(space: Any) -> dict[str, Any]:
    """The dictionary of a file or a class itself, which a class shows only a view of."""
    table = vars(space)
    found: dict[str, Any] = table if isinstance(table, dict) else gc.get_referents(table)[0]
    return found
