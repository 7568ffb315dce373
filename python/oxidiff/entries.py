"""What is known of calls: the programs that run them, or why there are none.

A key (:mod:`oxidiff.call`) leads to what stands for a call by way of the numbers of it and of what its program reads out of
tensors. All of it belongs to one :class:`Epoch`, a state in which the module was met.

Threads: entries are only added, under the dispatcher's lock or by one operation of a dictionary; lookups take no lock.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Leaf
from .capture import LeftError
from .capture.reads import Prelude
from .engine import Engine
from .errors import CaptureError, Error, UnsupportedError
from .ready import Reads, Ready
from .regions import Regions
from .split import Split
from .watch import Structure, Watch

__all__ = ["MAX_KEYS", "Eager", "Epoch", "Key", "Refusals", "with_numbers"]

MAX_KEYS = 4096
"""How many keys are remembered, and how many entries of one."""
_MAX_READ = 64
"""Programs for one key that differ by what is read out of tensors; further answers run in pieces."""
_MAX_REFUSED = 4
"""How many calls of a kind are tried in vain before it is known of others, too."""
_WAIT, _MORE, _MAX_WAIT = 16, 4, 256
"""How many calls then run without an attempt, how many times more after each further one, and at most."""
_OTHERS = "what forward reads out of tensors makes another program nearly each time"

Key = tuple[Any, ...]
"""The mode that torch is in, and :func:`oxidiff.call.key_of` the arguments."""


def with_numbers(key: Key, leaves: Sequence[Leaf]) -> Key:
    """A key with the numbers of a call."""
    return key, tuple([leaf for leaf in leaves if not isinstance(leaf, Tensor)])


class Eager:
    """A key whose calls run eager, or in pieces, and why."""

    __slots__ = ("is_split", "module", "op", "open_ids", "reason", "renewals", "type")

    def __init__(self, error: Error) -> None:
        # What cannot be traced may have parts that can; an op that is not supported is not so in any part.
        self.is_split = type(error) in (CaptureError, LeftError)
        self.open_ids: frozenset[int] = frozenset()
        """The ids of the modules, this one and below, that have what its calls change, or of which data decide what they do:
        between these are parts that have programs."""
        self.renewals = 0
        """Calls in which Dynamo found other pieces, of a module that each call changes."""
        # Not the exception itself: its traceback would keep the call's arguments alive.
        self.type = UnsupportedError if isinstance(error, UnsupportedError) else type(error)
        self.reason = str(error)
        self.module: str = getattr(error, "module", "")
        self.op: str = getattr(error, "op", "")

    def copy(self) -> Eager:
        """The same of another call, of which more may become known."""
        return copy.copy(self)

    def error(self) -> Error:
        """The exception, fresh."""
        if issubclass(self.type, CaptureError):
            return self.type(self.reason, module=self.module, op=self.op)
        return self.type(self.reason)


class _Refused:
    """Calls of one kind, none of which could be captured so far, for the same reason."""

    __slots__ = ("count", "entry", "left", "met", "wait")

    def __init__(self, entry: Eager) -> None:
        self.entry = entry
        """What is known of one that was tried, as it was before that ran."""
        self.count = 1
        self.wait = self.left = _WAIT
        """How many calls run without an attempt, once there were enough of these; and how many of them are left."""
        self.met: dict[Key, Eager] = {}
        """What is known of those that were not tried, by their keys with numbers: what ran them changes it."""

    def is_for(self, entry: Eager) -> bool:
        mine, other = ((e.type, e.module, e.op, _DIGITS.sub("0", e.reason)) for e in (self.entry, entry))
        return mine == other


_DIGITS = re.compile(r"\d+")


class Refusals:
    """Which calls are not even tried: an attempt to capture takes as long as many calls in eager PyTorch, and one that fails
    does so mostly at all sizes and numbers. So after some that did, calls of this kind (:func:`oxidiff.call.kind_of`) with
    others run as those, and are tried again seldom. Where any of them has a program, sizes decide, and each is tried.

    Threads: entries are added by one operation of a dictionary; that calls are counted exactly matters to nothing.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Refused | None] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, kind: Hashable, at: Key) -> tuple[Eager, bool] | None:
        """What is known of a call that was never tried, and whether it was met before; ``None`` if it is to be tried.

        Args:
            kind: Its kind.
            at: Its key with its numbers.
        """
        known = self._known.get(kind)
        if known is None or known.count < _MAX_REFUSED:
            return None
        if known.left > 0:
            known.left -= 1
            entry = known.met.get(at)
            return (known.entry.copy(), False) if entry is None else (entry, True)
        known.wait = min(known.wait * _MORE, _MAX_WAIT)
        known.left = known.wait
        return None

    def meet(self, kind: Hashable, at: Key, entry: Eager) -> None:
        """Remembers what ran a call that was not tried."""
        known = self._known.get(kind)
        if known is not None and len(known.met) < MAX_KEYS:
            known.met[at] = entry

    def add(self, kind: Hashable, entry: Eager) -> None:
        """Takes note of an attempt that failed, and of what is known of the call before it runs."""
        known = self._known.get(kind)
        if known is not None and known.is_for(entry):
            known.count += 1
            known.entry = entry
        elif known is not None or (kind not in self._known and len(self._known) < MAX_KEYS):
            self._known[kind] = _Refused(entry)

    def lift(self, kind: Hashable) -> None:
        """Takes note of a call that has a program."""
        if kind in self._known or len(self._known) < MAX_KEYS:
            self._known[kind] = None

    def clear(self) -> None:
        """Forgets all: there are programs that nobody asked for yet."""
        self._known.clear()


class _Question:
    """What is read out of the tensors of a call, and what then stands for it."""

    __slots__ = ("entries", "is_free", "prelude")

    def __init__(self, prelude: Prelude, is_free: bool) -> None:
        self.prelude = prelude
        self.is_free = is_free
        """Whether a number that is the answer is an argument of the programs."""
        self.entries: dict[Any, _Question | Ready | Eager] = {}

    def key(self, answer: Any) -> Any:
        if isinstance(answer, Tensor):
            return tuple(answer.shape)
        return (answer == 0, answer == 1, answer < 0) if self.is_free else answer


class _Reading:
    """A key of which the values of tensors decide the program: answers are read one after another, on a way that each of
    them may part.

    Threads: entries are only added, under the dispatcher's lock or by one operation of a dictionary.
    """

    def __init__(self, reads: Reads) -> None:
        self.captures = 0
        """How many programs were captured for it."""
        self._begin = reads.begin
        self.first = _Question(reads.preludes[0], 0 in reads.free)

    def find(self, leaves: list[Leaf]) -> Ready | Eager | None:
        """What stands for a call; its answers are leaves then, too, if that is a program."""
        count = len(leaves)
        found, _, _ = self._follow(leaves)
        if not isinstance(found, Ready):
            del leaves[count:]
        # What is read is a key of its own nearly each time: the pieces that Dynamo finds serve all.
        return Eager(CaptureError(_OTHERS)) if found is None and self.captures >= _MAX_READ else found

    def _follow(self, leaves: list[Leaf]) -> tuple[Ready | Eager | None, _Question, Any]:
        """The way of a call: what is at its end, the last question, and the key of its answer."""
        at: _Question | Ready | Eager | None = self.first
        values = self._begin(leaves)
        while isinstance(at, _Question):
            question, answer = at, at.prelude.run(values)
            leaves.append(answer)
            key = question.key(answer)
            at = question.entries.get(key)
        return at, question, key

    def add(self, leaves: Sequence[Leaf], entry: Ready | Eager) -> None:
        """Remembers what stands for a call, forgetting all above a bound."""
        if isinstance(entry, Eager):
            found, question, key = self._follow(list(leaves))
            if found is None:
                question.entries[key] = entry
            return
        assert entry.reads is not None, "a program of this key reads something"
        reads = entry.reads
        at: _Question = self.first
        for i, answer in enumerate(reads.answers):
            if at.is_free and i not in reads.free:
                at.is_free = False
                at.entries.clear()
            key = at.key(answer)
            if len(at.entries) >= MAX_KEYS:
                at.entries.clear()
            if i + 1 == len(reads.answers):
                break
            behind = at.entries.get(key)
            if not isinstance(behind, _Question):
                behind = at.entries[key] = _Question(reads.preludes[i + 1], i + 1 in reads.free)
            at = behind
        at.entries[key] = entry


class _Numbers:
    """A key of which some numbers decide the program: by value, or where they are its arguments, by the values that
    programs treat specially (0, 1 and negative ones)."""

    __slots__ = ("by_value", "entries", "free")

    def __init__(self, by_value: tuple[int, ...], free: tuple[int, ...]) -> None:
        self.by_value = by_value
        self.free = free
        self.entries: dict[tuple[Any, ...], Ready | Eager | _Reading] = {}

    def key(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        if not self.free:
            return tuple([leaves[i] for i in self.by_value])
        marks = [(leaves[i] == 0, leaves[i] == 1, leaves[i] < 0) for i in self.free]
        return (*[leaves[i] for i in self.by_value], *marks)

    def without_programs(self) -> _Numbers | None:
        """What is known of calls that have none, if there are any."""
        found = _Numbers(self.by_value, self.free)
        found.entries.update((at, entry) for at, entry in list(self.entries.items()) if isinstance(entry, Eager))
        return found if found.entries else None


class Epoch:
    """Everything compiled for one structure of the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watch = Watch(engine.structure, (), engine.surroundings)
        self.entries: dict[Key, _Numbers] = {}
        self.former: set[Key] = set()
        """Keys of entries that were made for other numbers in attributes."""
        self.changing: dict[Key, Eager] = {}
        """Keys whose calls change the module itself, also into what this is for; shared with the epochs of these."""
        self.split: Split | None = None
        """Set once a call of this structure could not be captured."""
        self.regions: Regions | None = None
        """Set once Python had to run between its submodules."""
        self.refusals = Refusals()
        """Which calls need not be captured to know that they have no program."""
        self.left: dict[Key, int] = {}
        """How often calls of a key and numbers left this state while they were captured."""
        self.waited = 0
        """Calls that ran without a program because states like this one do not last."""

    @property
    def structure(self) -> Structure:
        """What the module looked like when it was last looked at."""
        return self.engine.structure

    def find(self, key: Key, leaves: list[Leaf]) -> Ready | Eager | None:
        """What stands for a call. Where that reads values of tensors, these are leaves then, too."""
        numbers = self.entries.get(key)
        found = None if numbers is None else numbers.entries.get(numbers.key(leaves))
        if found is None:
            return self.changing.get(key)
        return found.find(leaves) if isinstance(found, _Reading) else found

    def add(self, key: Key, leaves: Sequence[Leaf], entry: Ready | Eager, is_new: bool = False) -> None:
        """Remembers ``entry`` for this key, captured just now if ``is_new``, forgetting the oldest ones above a bound. What
        modes the code asks for is known once it is captured: a key without them is not the next call's."""
        if len(key) != 2 + len(self.engine.asked):
            return
        places = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
        free = tuple(i for i in places if isinstance(entry, Ready) and i in entry.free_numbers)
        by_value = tuple(i for i in places if i not in free)
        numbers = self.entries.get(key)
        if numbers is None or numbers.by_value != by_value:
            if numbers is not None and not isinstance(entry, Ready):
                return
            while len(self.entries) >= MAX_KEYS:
                self.entries.pop(next(iter(self.entries)), None)
            numbers = self.entries[key] = _Numbers(by_value, free)
        while len(numbers.entries) >= MAX_KEYS:
            numbers.entries.pop(next(iter(numbers.entries)), None)
        at = numbers.key(leaves)
        known = numbers.entries.get(at)
        if isinstance(entry, Ready) and entry.reads is not None:
            if not isinstance(known, _Reading):
                known = numbers.entries[at] = _Reading(entry.reads)
            known.captures += is_new
            known.add(leaves, entry)
        elif isinstance(known, _Reading):
            known.add(leaves, entry)
        else:
            numbers.entries[at] = entry

    def renumber(self) -> None:
        """Lets go of what is ready to run with the numbers that attributes had; the programs are the same."""
        if len(self.former) >= MAX_KEYS:
            self.former.clear()
        self.former.update(self.entries)
        self.entries.clear()

    def retire(self) -> None:
        """Lets go of the module's tensors; the programs stay for when this structure comes back, and so does what is known
        of calls that have none: to find that again takes an attempt to capture them."""
        kept = {key: numbers.without_programs() for key, numbers in list(self.entries.items())}
        self.entries = {key: numbers for key, numbers in kept.items() if numbers is not None}
        self.former.clear()
        self.changing = {}
        self.split = None
        self.regions = None
        self.engine.release()
        self.watch = Watch(Structure(_EMPTY), ())
        self.engine.structure = self.structure.bare()


_EMPTY = torch.nn.Module()
