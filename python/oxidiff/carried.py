"""What a module keeps in attributes from one call to the next: arguments and results of its programs.

A causal convolution that keeps the last frames of a video for the next ones, or an attention its keys and values, leaves
something behind at each call, so its ``forward`` by itself is no graph's. But the call of a :class:`Carrying` leaves
nothing: it is given what is in these attributes, and gives what is to be there next. So that is what is captured; around
each run the attributes are emptied and filled again.

Tensors that are written into stay in their attributes while a program runs, which writes into them once it is through.

Threads: one call at a time, also in eager PyTorch, and of other modules with the same submodules. Who reads the attributes
meanwhile finds nothing there but what stays, and a stand-in for that while a call is captured.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._pytree import tree_leaves

from .capture import SharedError, is_passable
from .capture.following import at_end, is_tracing
from .capture.rewritten import shared_part
from .errors import Error, UnsupportedError
from .hooks import Wrapped
from .split import EAGER

if TYPE_CHECKING:
    from .dispatch import Dispatcher

__all__ = ["Carried", "Carrying", "Kept", "kept_in"]

Kept = tuple[str, bool, str]
"""The path of a module, whether it is a buffer there, and the name of an attribute."""

Table = tuple[dict[str, Any], str]
"""The dictionary that has an attribute, and its name there."""

_PREFIX = "module"


class Carrying(nn.Module):
    """A module whose calls are given what it keeps, and give what it keeps next.

    Args:
        module: The module.
        places: Where it keeps something.
        stays: Whether these are tensors that are written into, and stay there while a program runs.
    """

    passes_all = True
    """For traces: whatever it changes is to be passed, too; nothing is set up by a first call."""

    def __init__(self, module: nn.Module, places: Sequence[Kept], stays: bool = False) -> None:
        super().__init__()
        self.module = module
        self.places = tuple(places)
        self.stays = stays
        self.training = module.training

    def forward(
        self, kept: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Calls the module.

        Args:
            kept: What it found in each place; they are empty, or hold the same where tensors stay.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            Its result, and what is to be in each place, which are empty again.
        """
        tables = _tables(self.module, self.places)
        before = [table[name] for table, name in tables]
        for (table, name), value in zip(tables, kept, strict=True):
            table[name] = value
        note_filled(self)
        # Hooks of the module itself are run around this.
        result = Wrapped(self.module).forward(*args, **kwargs)
        values = tuple(itertools.starmap(_left if self.stays else _taken, tables))
        if self.stays and is_tracing():
            _put(tables, before)
        at_end(lambda: self._check_kept(tables, values, tree_leaves((result, kept, args, kwargs))))
        return result, values

    def _check_kept(self, tables: Sequence[Table], values: Sequence[Any], others: Sequence[Any]) -> None:
        gone = next((i for i, value in enumerate(values) if value is GONE), None)
        at = shared_part(values, others) if gone is None else gone
        if at is not None:
            path, _, name = self.places[at]
            place = f"the attribute {f'{path}.{name}' if path else name}"
            what = f"keeps a part of what others have in {place}; clone() it" if gone is None else f"takes {place} away"
            error = SharedError(f"forward {what}", module=f"{_PREFIX}.{path}" if path else _PREFIX)
            error.changed = [tables[at][0]]
            raise error


def _tables(module: nn.Module, places: Sequence[Kept]) -> list[Table]:
    """The dictionaries that have the attributes, and their names there.

    Raises:
        KeyError: A module is made of others than it was.
    """
    found = []
    for path, is_buffer, name in places:
        at: Any = module
        for part in path.split(".") if path else ():
            at = at._modules[part]
            if at is None:
                raise KeyError(path)
        found.append((at._buffers if is_buffer else at.__dict__, name))
    return found


class _Gone:
    """Stands for what is in a dictionary no more: it was deleted, or is a parameter now."""


GONE = _Gone()


def _taken(table: dict[str, Any], name: str) -> Any:
    value = table.get(name, GONE)
    if value is not GONE:
        table[name] = None
    return value


def _left(table: dict[str, Any], name: str) -> Any:
    return table.get(name, GONE)


_turns: dict[int, threading.RLock] = {}
"""By the id of a dictionary that has what is kept. Modules that share a submodule take turns, or one would find what a call
of another has put there, or nothing."""
_PATIENCE = 20.0
"""Seconds after which a call runs otherwise."""


_filled = threading.local()


def note_filled(carrying: Carrying) -> None:
    """Notes that what is in the attributes from now on is what ``forward`` sets, if this is a call."""
    ids: set[int] | None = getattr(_filled, "ids", None)
    if ids is not None and not is_tracing():
        ids.add(id(carrying))


def _put(tables: Sequence[Table], values: Sequence[Any]) -> None:
    for (table, name), value in zip(tables, values, strict=True):
        if value is not GONE:
            table[name] = value


class Carried:
    """A module that keeps something in attributes, and the program of its calls.

    Args:
        module: The module.
        places: Where it keeps something.
        make: Makes the dispatcher of what is captured: ``make(module, report=...)``.
        turn: Held by whoever calls the module.
        stays: As of :class:`Carrying`.

    Attributes:
        part: That dispatcher.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[Kept],
        make: Callable[..., Dispatcher],
        turn: threading.RLock,
        stays: bool = False,
    ) -> None:
        self._module = module
        self._places = tuple(places)
        self._local = local = threading.local()
        self._turn = turn
        self._carrying = Carrying(module, places, stays)

        def report(error: Error, what: str) -> None:
            # A module goes with its last reference: nothing here refers to what refers to this.
            own = getattr(error, "module", "").removeprefix(_PREFIX).removeprefix(".")
            problem = UnsupportedError(str(error), module=own, op=getattr(error, "op", ""))
            local.problems.append((problem, what))

        self.part = make(self._carrying, report=report)
        self.part.name = type(module).__name__

    @contextmanager
    def _in_turn(self) -> Iterator[bool]:
        """Holds the turn at the module, and those at the dictionaries. Gives whether these were had: where two threads wait
        for each other's, in modules inside of modules, one lets go."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._turn)
            try:
                tables = _tables(self._module, self._places)
            except KeyError:
                tables = []
            is_had = True
            for at in sorted({id(table) for table, _ in tables}):
                turn = _turns.setdefault(at, threading.RLock())
                is_had = is_had and turn.acquire(timeout=_PATIENCE)
                if is_had:
                    stack.callback(turn.release)
            yield is_had

    def fits(self) -> bool:
        """Whether it is the module's own ``forward`` that is called, and what it keeps can be passed."""
        with self._in_turn() as is_had:
            return is_had and self._found() is not None

    def _found(self) -> tuple[list[Table], tuple[Any, ...]] | None:
        """Where it keeps what, and that; ``None`` if it does not fit. Called by who holds the turn."""
        try:
            if "forward" in self._module.__dict__ and not Wrapped(self._module).is_own:
                return None
            tables = _tables(self._module, self._places)
            kept = tuple([table[name] for table, name in tables])
        except (UnsupportedError, KeyError):
            return None
        # Two places are one where the module has a submodule twice by now.
        is_apart = len({(id(table), name) for table, name in tables}) == len(tables)
        return (tables, kept) if is_apart and all(map(is_passable, kept)) else None

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool, list[tuple[Error, str]]] | None:
        """The result of a call, whether it ran compiled, and what ran eager and why; ``None`` if it has to run otherwise."""
        with self._in_turn() as is_had:
            found = self._found() if is_had else None
            if found is None:
                return None
            tables, kept = found
            outer = getattr(self._local, "problems", None), getattr(_filled, "ids", None)
            problems: list[tuple[Error, str]] = []
            # Those of what is around it belong to this call, too.
            ids: set[int] = set() if outer[1] is None else outer[1]
            ids.discard(id(self._carrying))
            try:
                self._local.problems, _filled.ids = problems, ids
                if self._carrying.stays:
                    result, values = self.part((kept, args, kwargs), {})
                    changed = [i for i, value in enumerate(values) if value is not kept[i]]
                    _put([tables[i] for i in changed], [values[i] for i in changed])
                else:
                    _put(tables, (None,) * len(tables))
                    result, values = self.part((kept, args, kwargs), {})
                    _put(tables, values)
            except BaseException:
                # What `forward` had set by then stays, as it does in eager.
                if id(self._carrying) not in ids and not self._carrying.stays:
                    _put(tables, kept)
                raise
            finally:
                self._local.problems, _filled.ids = outer
            return result, not any(what in EAGER for _, what in problems), problems

    def reset(self, turn: threading.RLock) -> None:
        """After a fork."""
        self._turn = turn
        _turns.clear()

    @contextmanager
    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """A call as :attr:`part` knows it, for those who only look at it; ``None`` if it has to run otherwise."""
        with self._in_turn() as is_had:
            found = self._found() if is_had else None
            if found is None:
                yield None
                return
            tables, kept = found
            if self._carrying.stays:
                yield (kept, args, kwargs), {}
                return
            try:
                _put(tables, (None,) * len(tables))
                yield (kept, args, kwargs), {}
            finally:
                _put(tables, kept)


def kept_in(module: nn.Module, attributes: Sequence[tuple[dict[Any, Any], Any]]) -> list[Kept] | None:
    """Where these attributes are, each told by the dictionary that has it and its name; ``None`` if some are in no module.

    Args:
        module: The module whose submodules they are looked for in.
        attributes: They.
    """
    known: dict[int, tuple[str, bool]] = {}
    for path, one in module.named_modules():
        known[id(one.__dict__)] = path, False
        known[id(one._buffers)] = path, True
    places = [(known.get(id(table)), name) for table, name in attributes]
    if any(place is None or not isinstance(name, str) for place, name in places):
        return None
    return [(*place, name) for place, name in places if place is not None]
