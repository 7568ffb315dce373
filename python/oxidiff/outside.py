"""What a function reads that it is not passed: its closure, its defaults, globals, and attributes of objects there.

Code is followed by the names in it: from the function into those that it defines, calls by a name, or holds in closures
and partials, as far as they are the program's own. Of an object only attributes are read whose names occur in that code:
of a pipeline in a closure the UNet that is called, not the scheduler, which is another one at each step.

Every place that was looked at is remembered with what was there, so that a call only compares.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import os
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from .capture.stateful import is_stateful

__all__ = [
    "Outside",
    "Reading",
    "attributes_read",
    "functions_held",
    "globals_read",
    "modules_held",
    "modules_imported",
    "variables_set",
    "writes_in",
    "writes_inside",
]

_ABSENT: Any = object()
_MAX_FOLLOWED = 256
"""Functions that are followed, and objects that are looked into."""
_HELD_DEEP = 3

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (
    _PACKAGE,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")),
)
_VALUES: tuple[type, ...] = (
    Tensor, int, float, str, bool, type(None), list, tuple, dict, set, deque, threading.local,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE = (type, types.BuiltinFunctionType, nn.Module)
_CLOSED = frozenset(("builtins", "numpy", "oxidiff", "torch"))
"""Packages whose objects are not looked into."""
_LIFECYCLE = frozenset(
    (
        "__init__", "__new__", "__del__", "__repr__", "__str__", "__setattr__", "__delattr__", "__init_subclass__",
        "__class_getitem__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
        "__dir__", "__post_init__",
    )
)  # fmt: skip
"""Methods that no arithmetic on an object calls."""


class Outside:
    """What functions read from outside, as it is now.

    Args:
        functions: The functions.
        called: The one that is compiled itself: its defaults are arguments.

    Attributes:
        functions: The functions.
        modules: The modules, by what code calls them.
        values: Everything else that may decide what is computed, by what code calls it.
        objects: The objects of which attributes are read, by what code calls them.
    """

    def __init__(self, *functions: Callable[..., Any], called: Callable[..., Any] | None = None) -> None:
        self.functions = functions
        self._called = called
        self.modules: dict[str, nn.Module] = {}
        self.values: dict[str, Any] = {}
        self.objects: list[tuple[str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._unset: list[types.CellType] = []
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._noted: set[tuple[int, str]] = set()
        self._labels: dict[str, int] = {}
        self._names: dict[str, None] = {}
        """Names in the code that may be those of attributes."""
        self._spaces: list[types.ModuleType] = []
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []
        self._most = _MAX_FOLLOWED + len(functions)
        for function in functions:
            self._look_at("self", function, is_root=True)
        looked: set[tuple[int, str]] = set()
        while True:
            while self._waiting:
                self._follow(self._waiting.pop(0))
            holders = [*self.objects, *((space.__name__, space) for space in self._spaces)]
            fresh = [(*at, name) for at in holders for name in self._names if (id(at[1]), name) not in looked]
            if not fresh:
                break
            for label, holder, name in fresh:
                looked.add((id(holder), name))
                self._look_in(label, holder, name)

    def is_same(self) -> bool:
        """Whether every place holds what it held when it was last read."""
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:
            return False
        for table, name, value in self._entries:
            if table.get(name, _ABSENT) is not value:
                return False
        return all(cell == _EMPTY for cell in self._unset)

    @property
    def places(self) -> Set[tuple[int, str]]:
        """The dictionaries, by id, and names in them that are looked at."""
        return self._noted

    def follows(self, function: Any) -> bool:
        """Whether this has what another function reads, too."""
        return id(function) in self._seen

    def _look_in(self, label: str, holder: Any, name: str) -> None:
        """Looks at an attribute of an object or a Python module, if it has one of this name."""
        table = holder.__dict__
        if name in table:
            self._enter(f"{label}.{name}", table, name)
        elif not isinstance(holder, types.ModuleType):
            for cls in type(holder).__mro__:
                if name in cls.__dict__:
                    self._entries.append((table, name, _ABSENT))
                    self._look_at(f"{label}.{name}", _code_of(cls.__dict__[name]))
                    break

    def _enter(self, label: str, table: dict[str, Any], name: str) -> None:
        if (id(table), name) in self._noted:
            return
        self._noted.add((id(table), name))
        value = table.get(name, _ABSENT)
        self._entries.append((table, name, value))
        if value is not _ABSENT:
            self._look_at(label, value)

    def _look_at(self, label: str, value: Any, is_root: bool = False) -> None:
        if isinstance(value, types.ModuleType):
            if not _is_library(getattr(value, "__file__", None) or "<frozen") and value not in self._spaces:
                self._spaces.append(value)
            return
        if isinstance(value, nn.Module):
            self._put(self.modules, label, value)
            return
        if isinstance(value, _VALUES) or is_stateful(value):
            self._put(self.values, label, value)
            return
        if type(value).__module__ == "oxidiff.module":
            # A function that is compiled itself, which runs as it is in a program of another.
            value = value.__wrapped__
        elif isinstance(value, _OPAQUE):
            return
        if id(value) in self._seen or len(self._seen) >= self._most:
            return
        self._seen[id(value)] = value
        if isinstance(value, _FUNCTIONS):
            if not is_root:
                self._put(self.values, label, value)
            if isinstance(value, types.FunctionType) and value.__dict__:
                self.objects.append((label, value))
            self._waiting.append(value)
        elif type(value).__module__.partition(".")[0] not in _CLOSED and type(getattr(value, "__dict__", None)) is dict:
            self.objects.append((label, value))
            methods = ((n, f) for cls in type(value).__mro__ for n, f in cls.__dict__.items() if _is_operator(n))
            for name, method in methods:
                if isinstance(method, types.FunctionType):
                    self._look_at(f"{label}.{name}", method)

    def _put(self, into: dict[str, Any], label: str, value: Any) -> None:
        known = into.get(label, _ABSENT)
        if known is not _ABSENT and known is not value:
            # Another function's variable of the same name.
            self._labels[label] = self._labels.get(label, 1) + 1
            label = f"{label}'{self._labels[label]}"
        into[label] = value

    def _follow(self, function: Any) -> None:
        if isinstance(function, types.MethodType):
            self._look_at("self", function.__self__)
            self._follow(function.__func__)
            return
        if isinstance(function, functools.partial):
            self._look_at("function", function.func)
            for i, value in enumerate(function.args):
                self._look_at(f"args[{i}]", value)
            for name, value in function.keywords.items():
                self._look_at(name, value)
            return
        if not isinstance(function, types.FunctionType):
            # One of a class in C.
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if cell == _EMPTY:
                self._unset.append(cell)
                continue
            self._cells.append((cell, cell.cell_contents))
            self._look_at(name, cell.cell_contents)
        named = (function.__kwdefaults__ or {}).items()
        for name, value in itertools.chain(zip(code.co_varnames, _defaults(function), strict=False), named):
            if value is not _ABSENT and (function is not self._called or not isinstance(value, _VALUES)):
                self._look_at(name, value)
        if _is_library(code.co_filename) and function not in self.functions:
            return
        loaded, others = _names_in(code)
        for name in others:
            self._names.setdefault(name)
        table = function.__globals__
        for name in loaded:
            if name in table or not hasattr(builtins, name):
                self._enter(name, table, name)


class Reading(nn.Module):
    """What functions read from outside, as attributes of a module.

    Args:
        functions: The functions.
    """

    # No attribute, which would be looked into.
    __slots__ = ("_outside",)

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self._take_over(self._look(*functions))

    def sync(self) -> None:
        """Takes over what the functions would read now."""
        if not self._outside.is_same():
            self._take_over(self._look(*self._outside.functions))

    def _look(self, *functions: Callable[..., Any]) -> Outside:
        return Outside(*functions)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The functions."""
        return self._outside.functions

    @property
    def objects_beside(self) -> list[tuple[str, Any]]:
        """Objects of which the functions read attributes, with labels."""
        return self._outside.objects

    @property
    def places(self) -> Set[tuple[int, str]]:
        """The dictionaries, by id, and names in them of which this has the values."""
        return self._outside.places

    def follows(self, function: Any) -> bool:
        """Whether what another function reads is here, too."""
        return self._outside.follows(function)

    def _take_over(self, outside: Outside) -> None:
        self._put(self.__dict__, {f"{_OUTSIDE}{name}": value for name, value in self._attributes(outside).items()})
        self._outside = outside

    def _attributes(self, outside: Outside) -> dict[str, Any]:
        return {**outside.values, **outside.modules}

    def _put(self, table: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name in list(table):
            if name not in wanted and (table is not self.__dict__ or name.startswith(_OUTSIDE)):
                table.pop(name, None)
        for name, value in wanted.items():
            if table.get(name, self) is not value:
                table[name] = value


_OUTSIDE = "outside."
_EMPTY = types.CellType()


def _defaults(function: types.FunctionType) -> list[Any]:
    """The default of each positional parameter."""
    defaults = function.__defaults__ or ()
    return [_ABSENT] * (function.__code__.co_argcount - len(defaults)) + list(defaults)


def _is_operator(name: str) -> bool:
    """Whether Python calls a method of this name where an object is used."""
    return name.startswith("__") and name.endswith("__") and name not in _LIFECYCLE


def _code_of(attribute: Any) -> Any:
    """What runs when an attribute of a class is read or called."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.func if isinstance(attribute, functools.cached_property) else attribute


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith("<frozen") or os.path.abspath(file).startswith(_LIBRARIES)


def globals_read(code: types.CodeType) -> list[str]:
    """The names that code looks up among globals; names of attributes are not among them."""
    # The lowest bit says whether a call follows.
    is_flagged = sys.version_info >= (3, 11)
    found = ((index >> 1 if op == _LOAD_GLOBAL and is_flagged else index) for op, index in _instructions(code, _LOADS))
    return list(dict.fromkeys(code.co_names[index] for index in found))


def attributes_read(code: types.CodeType) -> set[str]:
    """The names of attributes that code reads, other than those that it only sets."""
    found = _instructions(code, _SHIFTS)
    return {code.co_names[index >> _SHIFTS[op]] for op, index in found}


def writes_in(code: types.CodeType) -> tuple[set[str], set[str], bool]:
    """The globals that code assigns to, the attributes that it sets, and whether it writes items of containers."""
    found: dict[int, set[str]] = {op: set() for op in (*_SETS_GLOBALS, *_SETS_ATTRIBUTES)}
    for op, index in _instructions(code, found):
        found[op].add(code.co_names[index])
    is_item = not _CHANGES.isdisjoint(code.co_names) or next(_instructions(code, _SETS_ITEMS), None) is not None
    names, attributes = (set().union(*(found[op] for op in ops)) for ops in (_SETS_GLOBALS, _SETS_ATTRIBUTES))
    return names, attributes, is_item


def writes_inside(code: types.CodeType) -> tuple[set[str], bool]:
    """The attributes that code sets, and whether it writes items of containers; also in functions that it defines."""
    _, attributes, is_item = writes_in(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            sets, has_item = writes_inside(constant)
            attributes, is_item = attributes | sets, is_item or has_item
    return attributes, is_item


def variables_set(code: types.CodeType) -> set[str]:
    """The variables of functions around it that code assigns to, itself or in functions that it defines."""
    if not code.co_freevars:
        return set()
    found = {_variable(code, index) for _, index in _instructions(code, _SETS_VARIABLES)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= variables_set(constant)
    return found & set(code.co_freevars)


def _variable(code: types.CodeType, index: int) -> str:
    """The variable of functions around it, or of its own for functions in it, that code has under a number."""
    named = getattr(code, "_varname_from_oparg", None)
    # Before Python 3.11 arguments and locals of code have numbers of their own.
    return str(named(index)) if named is not None else (*code.co_cellvars, *code.co_freevars)[index]


def modules_imported(code: types.CodeType, table: Mapping[str, Any]) -> list[str]:
    """The full names that modules may have which code imports while it runs, in a file with these globals."""
    imported = [code.co_names[index] for _, index in _instructions(code, (_IMPORT_NAME,))]
    package = (table.get("__package__") or "").split(".") if imported else []
    # As they stand, and relative to each package that the file is in: how many dots there are is not looked at.
    scopes = ["", *(".".join(package[:i]) for i in range(len(package), 0, -1) if package[0])]
    # `import a.b` binds `a`.
    names = [part for name in imported for part in itertools.accumulate(name.split("."), "{}.{}".format)]
    found = (f"{scope}.{name}".strip(".") for scope in scopes for name in names)
    return list(dict.fromkeys(name for name in found if name))


def _instructions(code: types.CodeType, wanted: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The instructions of these kinds, with their arguments. Twenty times as fast as :mod:`dis`, which makes an object of
    each instruction."""
    words = code.co_code
    ops = words[::2]
    for op in wanted:
        at = ops.find(op)
        while at >= 0:
            index, before = words[2 * at + 1], at - 1
            while before >= 0 and ops[before] == dis.EXTENDED_ARG:
                index |= words[2 * before + 1] << 8 * (at - before)
                before -= 1
            yield op, index
            at = ops.find(op, at + 1)


def _ops(*names: str) -> tuple[int, ...]:
    """The instructions of these names that this interpreter has; some stand for others while code is compiled alone."""
    return tuple(dis.opmap[name] for name in names if dis.opmap.get(name, 256) < 256)


_SETS_GLOBALS = _ops("STORE_GLOBAL", "DELETE_GLOBAL")
_SETS_ATTRIBUTES = _ops("STORE_ATTR", "DELETE_ATTR")
_SETS_VARIABLES = _ops("STORE_DEREF", "DELETE_DEREF")
_SETS_ITEMS = _ops("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_CHANGES = frozenset(
    {
        "__delitem__", "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert",
        "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setattr", "setdefault", "sort", "update",
    }
)  # fmt: skip
"""Methods that write into containers, and what sets attributes by texts."""
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
# The lowest bits say what a call needs.
_SHIFTS = {
    op: shift if sys.version_info >= (3, 12) else 0
    for name, shift in (("LOAD_ATTR", 1), ("LOAD_METHOD", 0), ("LOAD_SUPER_ATTR", 2))
    for op in _ops(name)
}
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_LOADS = [dis.opmap[op] for op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS") if op in dis.opmap]


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that code reads, and names in it that may be those of attributes; also in functions that it defines."""
    loaded = [*globals_read(code)]
    others = [*code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            others.append(constant)
        elif isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            loaded += inner[0]
            others += inner[1]
    return tuple(dict.fromkeys(loaded)), tuple(dict.fromkeys(others))


def functions_held(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The program's own functions that are seen in one: itself, or what a decorator of a library put into its closure."""
    waiting = [(function, _HELD_DEEP)]
    for held, depth in waiting:
        if not _is_library(held.__code__.co_filename):
            yield held
        elif depth:
            contents = [cell.cell_contents for cell in held.__closure__ or () if cell != _EMPTY]
            waiting += [(inner, depth - 1) for inner in contents if isinstance(inner, types.FunctionType)]


def modules_held(value: Any) -> Iterator[nn.Module]:
    """The modules that are seen in a value: itself, or what closures, partials, methods and containers hold."""
    seen: set[int] = set()
    waiting = [(value, _HELD_DEEP)]
    for held, depth in waiting:
        if isinstance(held, nn.Module):
            yield held
            continue
        if id(held) in seen or not depth:
            continue
        seen.add(id(held))
        parts: list[Any] = []
        if isinstance(held, types.FunctionType):
            parts += [cell.cell_contents for cell in held.__closure__ or () if cell != _EMPTY]
            parts += [*(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
        elif isinstance(held, types.MethodType):
            parts += [held.__func__, held.__self__]
        elif isinstance(held, functools.partial):
            parts += [held.func, *held.args, *held.keywords.values()]
        elif depth < _HELD_DEEP and isinstance(held, (list, tuple, set, frozenset)):
            parts += held
        elif depth < _HELD_DEEP and isinstance(held, dict):
            parts += held.values()
        waiting += [(part, depth - 1) for part in parts]
