"""What ``forward`` leaves behind: in attributes of its modules and of objects there, in lists, caches, other places.

A trace must leave nothing, so it is noticed and undone; what a first call sets up once is put back for a second trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import itertools
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import CaptureError
from .guards import plain
from .stateful import fill_state, is_same_state, is_stateful, is_unseen, items_of, state_of
from .weights import OBJECTS_DEEP, WeightIndex
from .writes import (
    ABSENT,
    CONTAINERS,
    MAX_NESTED,
    Cells,
    containers,
    is_as,
    is_plain_object,
    is_traced,
    is_value,
    tables_of,
)

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = [
    "MADE",
    "Before",
    "Change",
    "Content",
    "KeptError",
    "Leaks",
    "LeftError",
    "SharedError",
    "is_passable",
    "leads_to",
]


class LeftError(CaptureError):
    """``forward`` changes its module, or what that holds, in a way that a trace does not show.

    Attributes:
        changed: The dictionaries, lists and sets that it wrote.
        is_outside: Whether any of them is outside of the module.
        leaks: Tensors that it keeps elsewhere.
        attributes: If all that it leaves are tensors and numbers in attributes of modules or objects, and some are tensors:
            the dictionary that has each, and its name.
        stays: Whether these are tensors that it writes into, and no others that it puts there.
    """

    def __init__(
        self,
        reason: str,
        changes: Sequence[Change | Content] = (),
        leaks: Leaks | None = None,
        *,
        module: str = "",
        op: str = "",
    ) -> None:
        super().__init__(reason, module=module, op=op)
        self.leaks = leaks
        self.changed: list[Any] = [c.holder if isinstance(c, Content) else c.table for c in changes]
        self.is_outside = any(change.is_outside for change in changes)
        self.attributes: list[tuple[dict[Any, Any], Any]] = []
        self.stays = False
        if any(c.holds_tensor for c in changes):
            self.pass_on(changes)
        if leaks is not None:
            self.changed += leaks.holders
            self.is_outside = self.is_outside or not leaks.holders

    def pass_on(self, changes: Sequence[Change | Content]) -> None:
        """Fills :attr:`attributes`, if nothing else is left."""
        if self.leaks is None and all(isinstance(c, Change) and c.is_passable for c in changes):
            self.attributes = [(c.table, c.name) for c in changes if isinstance(c, Change)]


class KeptError(LeftError):
    """``forward`` keeps a tensor or a count for later calls: once a call has really run, there is perhaps nothing left to
    keep."""


class SharedError(LeftError):
    """What ``forward`` keeps is a part of what it is given or gives, which its caller may write into."""


@dataclass(slots=True)
class Leaks:
    """Tensors that outlive the trace in which they were made.

    Attributes:
        paths: The paths of the modules that made them.
        holders: The lists, dictionaries and sets of the module that hold some.
    """

    paths: frozenset[str]
    holders: list[Any]

    def __bool__(self) -> bool:
        return bool(self.paths or self.holders)


@dataclass(slots=True)
class Change:
    """An attribute that ``forward`` changed, or an item of a dictionary there."""

    label: str
    table: dict[Any, Any]
    name: Any
    before: Any
    after: Any
    is_item: bool = False
    is_sized: bool = False
    """Whether what is there now follows from sizes."""
    is_outside: bool = False
    module: str = ""
    """The path of the module whose ``forward`` did it, if that is known."""
    holds_tensor: bool = False
    """Whether there is a tensor in what is there now, which may be taken out of it."""

    @property
    def is_inside(self) -> bool:
        """Whether it is a value outside of modules or in a container, where another thread may have put it."""
        return self.is_outside or (self.is_item and is_value(self.after))

    @property
    def is_passable(self) -> bool:
        """Whether it is an attribute of which a call could be given what was there and give what is there now."""
        return is_passable(self.after) and self.before is not ABSENT and not (self.is_item or self.is_outside)

    def undo(self) -> None:
        """Puts back what was there."""
        self._put(self.before)

    def redo(self) -> None:
        """Puts there what was found."""
        self._put(self.after)

    def _put(self, value: Any) -> None:
        if value is ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value


def is_passable(value: Any) -> bool:
    """Whether something is a tensor, a number, a flag or nothing, or a tuple of these. Each text would be a program."""
    if type(value) is tuple:
        return all(map(is_passable, value))
    return isinstance(value, Tensor) or value is None or type(value) in (bool, int, float)


@dataclass(slots=True)
class Content:
    """A list, set, array or generator in an attribute that ``forward`` changed."""

    label: str
    holder: Any
    before: Any
    after: Any
    is_outside: bool = False
    module: str = ""
    holds_tensor: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether these are values, which another thread may have put there."""
        return self.is_outside or is_stateful(self.holder) or all(map(is_value, self.after))

    def undo(self) -> None:
        """Puts back what was in it."""
        _fill(self.holder, self.before)

    def redo(self) -> None:
        """Puts there what was found."""
        _fill(self.holder, self.after)


def _fill(holder: Any, content: Any) -> None:
    # Never empty in between, for threads that read it.
    if isinstance(holder, dict):
        _reorder(holder, content)
    elif is_stateful(holder):
        fill_state(holder, content)
    elif isinstance(holder, list):
        holder[:] = content
    elif isinstance(holder, deque):
        holder.extend(content)
        while len(holder) > len(content):
            holder.popleft()
    else:
        holder.intersection_update(content)
        holder.update(content)


MADE = torch.empty(0, device="meta")
"""Stands for a tensor of a trace that is over."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Tables of a module that `register_forward_hook` and `register_forward_pre_hook` write into."""


class Before:
    """Notices, and undoes, what ``forward`` leaves behind: attributes, caches of its own methods, other places.

    Attributes:
        keepers: The lists, dictionaries and sets of the module into which it put something that the trace made.
        held: Ids of modules and objects that were there.
    """

    def __init__(self, weights: WeightIndex) -> None:
        self._weights = weights
        self.keepers: list[Any] = []
        self.paths: set[str] = set()
        """The paths of the modules that made what it put there."""
        self._tables = [
            (path, id(module), table, dict(table))
            for path, module in weights.modules
            for table in (module.__dict__, module._buffers)
        ]
        # Objects that are no modules keep what they made, too: the tables of a rotary embedding, the steps of a controller.
        beside = _tables_beside(weights.modules)
        reached, holders = _reached(
            [(path, m.__dict__["forward"]) for path, m in weights.modules if "forward" in m.__dict__]
        )
        self._tables += [(label, id(value), table, dict(table)) for label, value, table in (*beside, *reached)]
        self.held = frozenset(holder for _, holder, *_ in self._tables)
        # What other threads do here need not go through methods: what is not seen to be forward's stays.
        self._members: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
            (path, id(module), table, dict(table) if table else {})
            for path, module in weights.modules
            for table in _members_of(module.__dict__)
        ]
        own: dict[bool, dict[int, tuple[str, Any]]] = {True: {}, False: {}}
        for path, module, _, before in self._tables:
            for name, v in _own_items(before) if module not in weights.shared else ():
                if isinstance(v, _HOLDERS) or is_stateful(v):
                    own[weights.outer.reads(name)][id(v)] = f"{path}.{name}" if path else name, v
        # Of what no code has a name for, others may be writing the numbers.
        named = containers((*own[True].values(), *holders))
        known = {id(holder) for _, holder in named}
        named += [one for one in containers(own[False].values()) if not (id(one[1]) in known or is_stateful(one[1]))]
        self._kept = [(label, holder, _copy_of(holder)) for label, holder in named]
        # Set anew by each call: nobody is to find what it was in the last.
        self._computed = {
            (id(module), hook.name)
            for _, module in weights.modules
            for hook in module._forward_pre_hooks.values()
            if type(hook) is WeightNorm
        }
        self._outer = [(label, table, name, table.get(name, ABSENT)) for label, table, name in weights.outer.names]
        self._outer_kept = [(label, holder, _copy_of(holder)) for label, holder in weights.outer.holders]
        for kept, is_outside in ((self._kept, False), (self._outer_kept, True)):
            for label, holder, _ in kept:
                if is_unseen(holder):
                    what = f"forward may take from {label}, and of a {type(holder).__name__} is not seen how far it is"
                    raise KeptError(what, [Content(label, holder, [], [], is_outside)])
        self._where: str | None = None
        """The path of the module whose ``forward`` was first seen to have written outside of modules."""
        # A cached function would hand out what it made at another size, and keep meta tensors for later callers.
        self._clear_caches()

    def look_outside(self, path: str) -> None:
        """Notes where something outside of modules was first seen to be written: by the module at ``path``."""
        if self._where is None and next(self._changes_outside(), None) is not None:
            self._where = path

    def _changes_outside(self) -> Iterator[Change | Content]:
        for label, table, name, old in self._outer:
            new = table.get(name, ABSENT)
            if not is_as(old, new) and is_value(old) and is_value(new):
                yield Change(label, table, name, old, new, is_outside=True)
        for label, holder, copied in self._outer_kept:
            if isinstance(holder, dict):
                # As it is, and not as its class shows it.
                now = dict(_items(holder))
                if _is_reordered(holder, copied):
                    yield Content(label, holder, copied, now, is_outside=True)
                for name in dict.fromkeys((*copied, *now)):
                    old, new = copied.get(name, ABSENT), now.get(name, ABSENT)
                    if not is_as(old, new) and is_value(old) and is_value(new):
                        yield Change(f"{label}[{name!r}]", holder, name, old, new, is_item=True, is_outside=True)
            elif is_stateful(holder):
                yield from _content_changes(label, holder, copied, is_outside=True)
            elif not is_as(list(holder), copied) and all(map(is_value, (*holder, *copied))):
                yield Content(label, holder, copied, list(holder), is_outside=True)

    def _clear_caches(self) -> None:
        for cache in self._weights.caches:
            cache.cache_clear()

    def restore(self, recorder: Recorder) -> list[Change | Content]:
        """Undoes changes of attributes but those of other threads, and lists them."""
        foreign, own = recorder.foreign, recorder.own
        self._clear_caches()
        changes: list[Change | Content] = []
        for label, holder, copied in self._kept:
            if id(holder) in recorder.adapters.foreign:
                continue
            if made := _restore(holder, copied):
                self.keepers.append(holder)
                self.paths.update(map(recorder.path_of, filter(_is_meta, made)))
            changes += _content_changes(label, holder, copied)
        for change in changes:
            change.undo()
        written = {module for module, _ in own}
        for path, module, table, before in self._members:
            if module not in written:
                continue
            mine = []
            for name in [name for name in dict.fromkeys((*table, *before)) if (module, name) in own]:
                old, new = before.get(name, ABSENT), table.get(name, ABSENT)
                if old is not new:
                    mine.append(Change(f"{path}.{name}" if path else name, table, name, old, new))
                    mine[-1].undo()
            if mine and _is_same_table(table, before) and list(table) != list(before):
                _reorder(table, before)
            changes += mine
        for path, module, table, before in self._tables:
            if len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
                continue
            prefix = f"{path}." if path else ""
            for name in dict.fromkeys((*table, *before)):
                old, left = before.get(name, ABSENT), table.get(name, ABSENT)
                new = plain(left)
                if old is new and new is not left:
                    table[name] = old
                if old is not new and (module, name) not in foreign:
                    change = Change(f"{prefix}{name}", table, name, old, new, is_sized=is_traced(left))
                    change.undo()
                    if (module, name) not in self._computed and not is_as(old, new):
                        changes.append(change)
            if not foreign and list(table) != list(before):
                _reorder(table, before)
        for _, holder, copied in self._outer_kept:
            for value in _restore(holder, copied):
                self.paths.update(map(recorder.path_of, _made_in(value)))
        for label, table, name, old in self._outer:
            new = table.get(name, ABSENT)
            if new is not old and _is_made(new):
                self.paths.update(map(recorder.path_of, _made_in(new)))
                Change(label, table, name, old, new, is_outside=True).undo()
        outside = list(self._changes_outside())
        for change in outside:
            change.module = self._where or ""
            change.undo()
        changes += outside
        for change in changes:
            change.holds_tensor = _holds_tensor(change.after)
            if isinstance(change, Change) and type(change.after) is Tensor and change.after.is_meta:
                # Or it would be looked for, as what outlives the trace.
                change.after = MADE
        return changes

    def forget(self, recorder: Recorder) -> frozenset[str]:
        """Looks for meta tensors that outlive their trace, in caches and containers, and removes them from there.

        Returns:
            The paths of the modules that made them.
        """
        made = recorder.release()
        if not any(ref() is not None for ref in made):
            return frozenset()
        # What the trace made is young, as nothing was collected meanwhile; all that there is takes a quarter of a second.
        young = set(map(id, gc.get_objects(generation=0)))
        young.difference_update(map(id, self._weights.outer.untracked))
        for generation in (0, 2):
            gc.collect(generation)
            if not any(ref() is not None for ref in made):
                return frozenset()
        known = self._weights.caches
        # Objects that were there at `gc.freeze()` are not listed; most caches are found by their names.
        for found in itertools.chain(gc.get_objects(), _globals()):
            if type(found) is functools._lru_cache_wrapper and found not in known and _is_foreign(found):
                known.append(found)
        self._clear_caches()
        alive = [tensor for ref in made if (tensor := ref()) is not None]
        paths = frozenset(map(recorder.path_of, alive))
        _remove_from_containers(alive, young)
        return paths


def _is_same_table(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects under the same names, in whatever order."""
    return one.keys() == other.keys() and all(one[name] is value for name, value in other.items())


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor)


def _reorder(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Puts the items of a dictionary in their old order, others behind them. Threads that read it miss none of them."""
    names = [*before, *(name for name in list(table) if name not in before)]
    # One call into C: nobody else runs between an item's leaving its place and its coming back.
    with contextlib.suppress(KeyError):
        deque(map(table.__setitem__, names, map(table.pop, names)), maxlen=0)


_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What every module has in its `__dict__`."""
_SCALARS = (str, type(None), bool, int, float)
"""Types of what attributes hold mostly, and in which nothing is kept. No set: not every class can be hashed."""
_members_of = operator.itemgetter("_parameters", "_modules", *_HOOKS)
"""Tables of a module that its methods write."""


def _own_items(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that not every module has, and in which something may be kept. Of a large model there are
    ten thousand others. Threads may write there meanwhile."""
    for name in tuple(itertools.filterfalse(_OF_MODULES.__contains__, table)):
        value = table.get(name)
        if type(value) not in _SCALARS:
            yield name, value


_HOLDERS = (*CONTAINERS, tuple, functools.partial)


def _copy_of(holder: Any) -> Any:
    if is_stateful(holder):
        return state_of(holder)
    return dict(_items(holder)) if isinstance(holder, dict) else list(holder)


def _items(table: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """What is in a dictionary as it is, in its order, and not as its class shows it."""
    kind: type[dict[Any, Any]] = OrderedDict if isinstance(table, OrderedDict) else dict
    return kind.items(table)


def _is_reordered(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether a dictionary has the same names in another order."""
    names = [name for name, _ in _items(table)]
    return names != [*before] and table.keys() == before.keys()


def _content_changes(label: str, holder: Any, before: Any, is_outside: bool = False) -> list[Change | Content]:
    """What is otherwise in a list, dictionary or set than before, but for numbers in the place of others: nothing shows who
    writes there, and a factor is more likely set by another thread than by ``forward``. Where that does it, the module
    never stays as it was and runs eager, but the factor is changed by the attempts to capture it, too."""
    if is_stateful(holder):
        state = state_of(holder)
        return [] if is_same_state(state, before) else [Content(label, holder, before, state, is_outside)]
    if isinstance(holder, dict):
        names = [n for n in dict.fromkeys((*before, *holder)) if before.get(n, ABSENT) is not holder.get(n, ABSENT)]
        items = ((n, before.get(n, ABSENT), plain(holder.get(n, ABSENT))) for n in names)
        changed = ((n, old, new) for n, old, new in items if not type(old) is type(new) is float)
        if not names and _is_reordered(holder, before):
            return [Content(label, holder, before, list(holder), is_outside)]
        return [Change(f"{label}[{n!r}]", holder, n, old, new, is_item=True) for n, old, new in changed]
    now = list(holder)
    if isinstance(holder, set) and holder == set(before):
        return []
    pairs = zip(now, before, strict=False)
    if len(now) == len(before) and all(a is b or type(a) is type(b) is float for a, b in pairs):
        return []
    return [Content(label, holder, before, list(map(plain, now)))]


def _restore(holder: Any, before: Any) -> list[Any]:
    """Undoes what put something of a trace into a list, dictionary or set; gives what that was."""
    if isinstance(holder, dict):
        items = list(holder.items())
        made = {key: value for key, value in items if value is not before.get(key, ABSENT) and _is_made(value)}
        for key in made:
            if key in before:
                holder[key] = before[key]
            else:
                del holder[key]
        return list(made.values())
    if is_stateful(holder):
        # Others hold numbers alone, of which a copy is taken once, where changes are looked for.
        value = state_of(holder) if isinstance(holder, contextvars.ContextVar) else before
        if value is before or not _is_made(value):
            return []
        _fill(holder, before)
        return [value]
    known = set(map(id, before))
    found = [value for value in list(holder) if id(value) not in known and _is_made(value)]
    if found:
        _fill(holder, before)
    return found


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _is_made(value: Any) -> bool:
    """Whether there is something of a trace in a value."""
    return next(_made_in(value), None) is not None


def _made_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors of a trace in a value."""
    if isinstance(value, Tensor):
        if value.is_meta:
            yield value
        return
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set, deque)):
        inner = value
    elif is_plain_object(type(value)):
        inner = vars(value).values()
    else:
        return
    # Records may hold each other.
    for item in list(inner) if depth else ():
        yield from _made_in(item, depth - 1)


def _reached(functions: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any, Any]], list[tuple[str, Any]]]:
    """What functions in the place of a ``forward`` may keep something in, wherever they lead: tables as of
    :func:`_tables_beside`; lists, dictionaries and sets, with labels."""
    tables: list[tuple[str, Any, Any]] = []
    holders: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting = [(f"{path}.forward" if path else "forward", value) for path, value in functions]
    for label, value in waiting:
        if isinstance(value, (*_PLAIN, torch.nn.Module, type, types.ModuleType)) or id(value) in seen:
            continue
        seen.add(id(value))
        if len(waiting) >= MAX_NESTED:
            break
        parts: Iterable[tuple[str, Any]] = ()
        if isinstance(value, types.FunctionType):
            cells = Cells(value)
            tables += [(label, cells, cells), (label, value, value.__dict__)]
            named = enumerate(value.__defaults__ or ())
            parts = (*cells.items(), *((str(i), v) for i, v in named), *(value.__kwdefaults__ or {}).items())
        elif isinstance(value, types.MethodType):
            parts = (("__self__", value.__self__), ("__func__", value.__func__))
        elif isinstance(value, functools.partial):
            named = enumerate(value.args)
            parts = (("func", value.func), *((str(i), v) for i, v in named), *value.keywords.items())
        elif isinstance(value, CONTAINERS):
            holders.append((label, value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = ((repr(key), item) for key, item in items if not isinstance(item, _PLAIN))
        elif isinstance(value, tuple):
            parts = ((str(i), v) for i, v in enumerate(value))
        elif own := tables_of(value):
            tables += [(label, owner, table) for owner, table in own]
            parts = [one for _, table in own for one in table.items()]
        waiting += [(f"{label}.{name}", part) for name, part in parts]
    return tables, holders


_PLAIN = (type(None), bool, int, float, str, Tensor)


def _tables_beside(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Any, Any]]:
    """The attributes of objects that are no modules and that modules hold, or that such objects hold, and the variables of
    functions that modules hold: a label, what they are of, and the table."""
    seen: set[int] = set()
    waiting = [
        (f"{path}.{name}" if path else name, value, OBJECTS_DEEP)
        for path, module in modules
        for name, value in _own_items(module.__dict__)
    ]
    for label, value, depth in waiting:
        if id(value) in seen:
            continue
        if isinstance(value, types.FunctionType):
            if value.__closure__:
                seen.add(id(value))
                yield label, value, Cells(value)
            continue
        if isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        for owner, table in tables_of(value):
            yield label, owner, table
            if depth > 1:
                waiting += [(f"{label}.{name}", inner, depth - 1) for name, inner in table.items()]
        if depth > 1 and len(waiting) < MAX_NESTED and not isinstance(value, types.MethodType):
            held = ((key, item) for key, item in items_of(value) if not isinstance(item, _PLAIN))
            waiting += [(f"{label}[{key!r}]", item, depth - 1) for key, item in held]
    for _, module in modules:
        for label, value in getattr(module, "objects_beside", ()):
            if id(value) not in seen:
                seen.add(id(value))
                yield label, value, value.__dict__


def leads_to(module: torch.nn.Module, tables: Set[int]) -> bool:
    """Whether a module itself, or what is in its attributes, has one of these dictionaries, lists and sets (ids)."""
    own = (module.__dict__, module._buffers, module._parameters, module._modules)
    if any(id(table) in tables for table in (*own, *(module.__dict__[name] for name in _HOOKS))):
        return True
    seen: set[int] = set()
    waiting = [value for _, value in _own_items(module.__dict__)]
    for value in waiting:
        if isinstance(value, torch.nn.Module):
            if id(value.__dict__) in tables:
                return True
            continue
        if id(value) in tables:
            return True
        if is_plain_object(type(value)):
            value = value.__dict__
        if not isinstance(value, (*CONTAINERS, tuple)) or id(value) in seen:
            continue
        if id(value) in tables:
            return True
        seen.add(id(value))
        if len(waiting) < MAX_NESTED:
            waiting += [v for v in (value.values() if isinstance(value, dict) else value) if not isinstance(v, _PLAIN)]
    return False


def _is_foreign(cache: Any) -> bool:
    """A cache of the program's own, of which one may forget the contents."""
    module = str(getattr(cache, "__module__", "") or "")
    return module.partition(".")[0] not in {"torch", "torchgen", *sys.stdlib_module_names}


def _remove_from_containers(values: list[Any], young: Set[int], depth: int = 6) -> None:
    """Takes what a trace made out of the lists, dictionaries and sets that hold it, or a tuple or a record of it. One that
    is as young (ids) was made by the trace, too: an entry of a cache goes as a whole, and the next call makes it again."""
    ids = set(map(id, values))
    inner: list[Any] = []
    # All at once: each look goes through all objects that there are, but for those that were there at `gc.freeze()`.
    holders = gc.get_referrers(*values)
    if gc.get_freeze_count():
        # By their types: what another class is asked for may warn that it is deprecated.
        found = (holder for holder in _globals() if issubclass(type(holder), CONTAINERS))
        holders += [holder for holder in found if _has_any(holder, ids)]
    for holder in holders:
        if holder is values:
            continue
        if isinstance(holder, tuple) or (id(holder) in young and _is_record(holder) and not _is_old(holder, young)):
            inner.append(holder)
        elif type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in ids]
        elif isinstance(holder, deque):
            _fill(holder, [item for item in list(holder) if id(item) not in ids])
        elif isinstance(holder, set):
            holder.difference_update([item for item in holder if id(item) in ids])
        elif isinstance(holder, dict) and "__builtins__" not in holder:
            # Not by its class, which may not allow it: model outputs of diffusers do not.
            kind: type[dict[Any, Any]] = OrderedDict if isinstance(holder, OrderedDict) else dict
            for name in [k for k, v in kind.items(holder) if id(v) in ids]:
                kind.__delitem__(holder, name)
    if inner and depth:
        _remove_from_containers(inner, young, depth - 1)


def _is_old(holder: Any, young: Set[int]) -> bool:
    """Whether a dictionary that looks young was there before, as one that nothing tracked was in does: a variable, or an
    attribute of what is old, seldom gets a dictionary of tensors, and mostly was an empty one."""
    if type(holder) is not dict:
        return False
    for owner in gc.get_referrers(holder):
        if isinstance(owner, dict):
            # A class is no plain holder of its table, and a file neither.
            owners = [one for one in gc.get_referrers(owner) if _is_table_of(owner, one)]
        else:
            owners = [owner] if not isinstance(owner, (*CONTAINERS, tuple, types.FrameType)) else []
        if any(id(one) not in young for one in owners):
            return True
    return False


def _is_table_of(table: dict[Any, Any], owner: Any) -> bool:
    """Whether a dictionary has the attributes of an object, a class or a file."""
    if isinstance(owner, type):
        return table.keys() == owner.__dict__.keys() and "__module__" in table
    try:
        return not isinstance(owner, CONTAINERS) and object.__getattribute__(owner, "__dict__") is table
    except AttributeError:
        return False


def _globals() -> Iterator[Any]:
    """What all files have under names."""
    return (value for module in list(sys.modules.values()) for value in list(getattr(module, "__dict__", {}).values()))


def _has_any(holder: Any, ids: Set[int]) -> bool:
    """Whether one of these objects is in a list, dictionary or set, in which other threads may put something meanwhile."""
    if isinstance(holder, dict):
        items = list(dict.values(holder))
    else:
        # As it is, and not as its class shows it.
        kind = next(kind for kind in CONTAINERS if isinstance(holder, kind))
        items = list(kind.__iter__(holder))
    return not ids.isdisjoint(map(id, items))


def _is_record(value: Any) -> bool:
    """Whether it is a container, or an object that one might be kept in."""
    return isinstance(value, CONTAINERS) or is_plain_object(type(value))
