"""A function with other things in the place of some that it finds: in its closure, its defaults and globals, and in objects,
dictionaries and lists there.

Libraries that wrap a model (DeepCache, ParaAttention, scripts with ``block.forward = wrapped``) put a function in the place
of ``forward`` that calls what was there before, which it keeps wherever it likes. :class:`View` is that function with the
former ``forward`` replaced. Nothing of the user's is changed: functions are made anew from their code, with the cells that
lead nowhere as they are; objects share their ``__dict__``, dictionaries and lists are written through to.

Threads: a view only reads; what its function does is as safe as the function is.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, cast

from torch import Tensor, nn

from .capture.weights import is_plain_object
from .hooks import sharing
from .outside import globals_read, is_library, writes_in

__all__ = ["View"]

_DEEP = 5
"""Steps from a function to what is replaced: closure, object, dictionary, method is three."""
_MOST = 10_000
"""Things that are looked at."""
_EMPTY = types.CellType()
_CLOSED = frozenset(("builtins", "numpy", "torch"))

Replace = Callable[[Any], Any]


class View:
    """A function that finds other things.

    Args:
        function: The function, method or partial.
        replace: Says what stands for a method or module; itself if nothing else does.

    Attributes:
        is_other: Whether the function leads to anything that is replaced.
    """

    def __init__(self, function: Callable[..., Any], replace: Replace) -> None:
        self._replace = replace
        self._leads: dict[int, tuple[Any, int, bool]] = {}
        """What was looked at, how deep, and whether it leads to anything; it is kept only while something is looked at."""
        self._made: dict[int, tuple[Any, Any]] = {}
        """Functions, methods and partials, and what stands for them."""
        self._read: list[tuple[types.CellType, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._original = function
        self._function: Callable[..., Any] = self.of(function)
        self.is_other = self._function is not function
        self._leads.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self._function(*args, **kwargs)

    def is_of(self, function: Callable[..., Any]) -> bool:
        """Whether it is a view of this function, and variables around it hold what they held when it was made."""
        if function != self._original:
            return False
        try:
            is_same = all(cell.cell_contents is value for cell, value in self._read)
        except ValueError:
            # It was emptied.
            return False
        return is_same and all(table.get(name, self) is value for table, name, value in self._names)

    def of(self, value: Any, depth: int = _DEEP) -> Any:
        """What a function finds in the place of a value."""
        found = self._replace(value)
        if found is not value:
            return found
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        is_first = not self._leads
        try:
            return self._made_of(value, depth) if self._does_lead(value, depth) else value
        finally:
            if is_first:
                # Nothing of the user's is to live longer for it.
                self._leads.clear()

    def _made_of(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return _Items(self, value, depth - 1)
        if isinstance(value, list):
            return _Sequence(self, value, depth - 1)
        if type(value) is tuple:
            return tuple(self.of(one, depth - 1) for one in value)
        if not isinstance(value, _FUNCTIONS):
            return self._object_of(value, depth)
        if len(self._made) >= _MOST:
            self._made.clear()
        if isinstance(value, types.FunctionType):
            return self._function_of(value, depth)
        made: Any
        if isinstance(value, types.MethodType):
            made = types.MethodType(self.of(value.__func__, depth), self.of(value.__self__, depth))
        else:
            args = [self.of(one, depth - 1) for one in value.args]
            named = {name: self.of(one, depth - 1) for name, one in value.keywords.items()}
            made = functools.partial(self.of(value.func, depth - 1), *args, **named)
        self._made[id(value)] = value, made
        return made

    # -- what leads to something that is replaced ------------------------------------------------------------------------

    def _does_lead(self, value: Any, depth: int) -> bool:
        """Whether a value leads to something that is replaced, in so many steps."""
        if depth <= 0 or isinstance(value, _LEAVES):
            return False
        known = self._leads.get(id(value))
        if known is not None and (known[2] or known[1] >= depth):
            return known[2]
        if len(self._leads) >= _MOST:
            return False
        # Of what leads back to itself it is the rest that says.
        self._leads[id(value)] = value, depth, False
        for held, is_near in self._parts(value):
            if self._is_replaced(held, is_near) or self._does_lead(held, depth - 1):
                self._leads[id(value)] = value, depth, True
                return True
        return False

    def _is_replaced(self, value: Any, is_near: bool) -> bool:
        return (is_near or not isinstance(value, nn.Module)) and self._replace(value) is not value

    def _parts(self, value: Any) -> Iterator[tuple[Any, bool]]:
        """What a value holds, and whether modules there are replaced: those that a function names itself."""
        if isinstance(value, types.FunctionType):
            yield from ((cell.cell_contents, True) for _, cell in _cells(value))
            yield from ((one, True) for one in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
            yield from ((value.__globals__[name], True) for name in _globals(value))
        elif isinstance(value, types.MethodType):
            yield from ((value.__func__, True), (value.__self__, True))
        elif isinstance(value, functools.partial):
            yield from ((one, True) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, dict):
            yield from ((one, False) for one in list(value.values()))
        elif isinstance(value, (list, tuple)):
            yield from ((one, False) for one in list(value))
        elif _is_open(value):
            yield from ((one, False) for one in list(value.__dict__.values()))

    # -- what is made ----------------------------------------------------------------------------------------------------

    def _function_of(self, function: types.FunctionType, depth: int) -> Any:
        table: dict[str, Any] = _Globals(function.__globals__)
        names = _globals(function)
        cells = [types.CellType() if _is_cell_near(self, cell, depth) else cell for cell in function.__closure__ or ()]
        made = types.FunctionType(
            function.__code__, table if names else function.__globals__, function.__name__, None, tuple(cells) or None
        )
        functools.update_wrapper(made, function)
        made.__dict__.pop("__wrapped__", None)
        made.__dict__.update(function.__dict__)
        made.__qualname__ = function.__qualname__
        # It may hold itself.
        self._made[id(function)] = function, made
        made.__defaults__ = tuple(self.of(one, depth - 1) for one in function.__defaults__ or ()) or None
        named = function.__kwdefaults__
        made.__kwdefaults__ = None if named is None else {name: self.of(one, depth - 1) for name, one in named.items()}
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            if cell is not own:
                self._read.append((own, own.cell_contents))
                cell.cell_contents = self.of(own.cell_contents, depth - 1)
        for name in names:
            value = function.__globals__[name]
            self._names.append((function.__globals__, name, value))
            found = self.of(value, depth - 1)
            if found is not value:
                table[name] = found
        return made

    def _leads_at(self, value: Any, depth: int) -> bool:
        return self._is_replaced(value, is_near=True) or self._does_lead(value, depth - 1)

    def _object_of(self, value: Any, depth: int) -> Any:
        table = value.__dict__
        names = [n for n, one in table.items() if self._is_replaced(one, False) or self._does_lead(one, depth - 1)]
        try:
            made = sharing(_class_of(cast(Hashable, type(value)), tuple(names)), value)
        except TypeError:
            # Its class says which subclasses and instances there are.
            return value
        object.__setattr__(made, "_oxidiff_view", (self, depth - 1))
        return made


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_LEAVES = (nn.Module, Tensor, int, float, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def _is_cell_near(view: View, cell: types.CellType, depth: int) -> bool:
    return cell != _EMPTY and view._leads_at(cell.cell_contents, depth)


def _is_open(value: Any) -> bool:
    """Whether an object is what its ``__dict__`` holds, and its class the program's own."""
    kind = type(value)
    return is_plain_object(kind) and kind.__module__.partition(".")[0] not in _CLOSED


def _cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """The variables around a function that have a value and that it does not write itself."""
    named = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    written = _written(function.__code__)
    return [(name, cell) for name, cell in named if name not in written and cell != _EMPTY]


@functools.lru_cache(maxsize=1024)
def _written(code: types.CodeType) -> frozenset[str]:
    """The variables around a function that its code, or that of functions in it, sets."""
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(found.union(*map(_written, inner)))


def _globals(function: types.FunctionType) -> list[str]:
    """The globals that a function of the program's own reads, other than modules; none if it writes any."""
    code = function.__code__
    if is_library(code.co_filename):
        return []
    read, is_written = _global_names(code)
    return [] if is_written else [name for name in read if name in function.__globals__]


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """The globals that code reads, and whether it writes some; also in functions that it defines."""
    read, is_written = globals_read(code), bool(writes_in(code)[0])
    for inner in (one for one in code.co_consts if isinstance(one, types.CodeType)):
        names, is_inner = _global_names(inner)
        read += names
        is_written = is_written or is_inner
    return tuple(dict.fromkeys(read)), is_written


class _Globals(dict[str, Any]):
    """Globals of which some are others. The interpreter asks :meth:`__missing__` for those that are not here."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__()
        if "__builtins__" in table:
            self["__builtins__"] = table["__builtins__"]
        self._table = table

    def __missing__(self, name: str) -> Any:
        return self._table[name]


class _Items(MutableMapping[Any, Any]):
    """A dictionary of which some values are others; writes go to the dictionary."""

    def __init__(self, view: View, items: dict[Any, Any], depth: int) -> None:
        self._view = view
        self._items = items
        self._depth = depth

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._items)

    def __getitem__(self, key: Any) -> Any:
        return self._view.of(self._items[key], self._depth)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._items[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


class _Sequence(MutableSequence[Any]):
    """A list of which some items are others; writes go to the list."""

    def __init__(self, view: View, items: list[Any], depth: int) -> None:
        self._view = view
        self._items = items
        self._depth = depth

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._items)

    def __getitem__(self, index: Any) -> Any:
        found = self._items[index]
        if isinstance(index, slice):
            return [self._view.of(one, self._depth) for one in found]
        return self._view.of(found, self._depth)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def insert(self, index: int, value: Any) -> None:
        """See ``list.insert``."""
        self._items.insert(index, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


@functools.lru_cache(maxsize=256)
def _class_of(cls: Any, names: tuple[str, ...]) -> type[Any]:
    """A class whose instances share the ``__dict__`` of an object of a class, and find other things under some names."""

    def attribute(name: str) -> property:
        def get(self: Any) -> Any:
            table: Mapping[str, Any] = self.__dict__
            if name not in table:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            view, depth = self._oxidiff_view
            return cast(View, view).of(table[name], depth)

        def put(self: Any, value: Any) -> None:
            self.__dict__[name] = value

        def remove(self: Any) -> None:
            del self.__dict__[name]

        return property(get, put, remove)

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: attribute(name) for name in names})
        namespace.update(
            __slots__=("_oxidiff_view",),
            __module__=cls.__module__,
            __qualname__=cls.__qualname__,
            __doc__=cls.__doc__,
            __class__=property(lambda _: cls),
        )

    return types.new_class(cls.__name__, (cls,), {}, fill)
