"""The states that a module was met in, and which of them it is in now.

A program is for one structure of its module: its submodules, hooks and what is in attributes (:mod:`oxidiff.watch`), and
what its code finds outside of it (:mod:`oxidiff.outside`). Each structure has an :class:`~oxidiff.entries.Epoch`, which is
found again when the module returns to it; the current one is watched, and has the module's weights bound.

Threads: everything is written under :attr:`States.lock`. :attr:`States.epoch` may be read without: it is replaced as a
whole, and a call that finds it changed comes here.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Set

import torch

from . import _native
from .adapters import EffectiveWeights
from .ambient import collection_paused
from .capture import CHANGED, ChangedError
from .capture.weights import VARYING
from .engine import Engine
from .entries import Epoch
from .errors import ArtifactError, UnsupportedError
from .hooks import Wrapped
from .lifted import Lifting
from .options import CompileOptions
from .patience import OUTSIDE, STATES, Patience
from .regions import Regions
from .store import read_artifact
from .tune import Budget
from .watch import STRUCTURE, SURROUNDINGS, Structure, Watch

__all__ = ["MAX_CHANGES", "MAX_EPOCHS", "States", "count_of"]

MAX_EPOCHS = 64
"""States of a module that are known: the steps of a picture, where something in the module says which one it is."""
MAX_CHANGES = 3
"""How often in a row another thread may change a module while it is captured or its weights are bound."""
_OF_PARTS = 1.0
"""How many changes outside of it a part bears, of a module that bore no more."""
_MAX_RECOUNTED = 3
_MAX_ROUNDS = 16
"""Looks at a module that is another one at each, until its call runs eager."""


def count_of(counter: itertools.count[int]) -> int:
    """How often ``next`` was called on a counter."""
    # Its text is all that Python 3.14 shows of it.
    return int(repr(counter)[len("count(") : -1])


class States:
    """The states of one module.

    Args:
        module: The module.
        options: How it is compiled.
        lifting: Which numbers in attributes are arguments of programs.
        budget: What tuning may take.
        calls: Counts the module's calls.

    Attributes:
        lock: Held by who changes anything, and by who captures.
        epoch: The state that the module is in, with its weights bound; ``None`` before the first call and where that failed.
        remembered: All states, the current one last, for those who only look and do not wait for a thread that compiles.
        regions: What ran with Python between the submodules of the current state, what was made last at the end.
        effective: The weights of LoRA layers.
        patience: Whether it pays to make programs for new states.
        given_up: What outside of the module changes too often to be followed, and that it does.
        is_blind: Whether nobody looks for this module at what code finds outside of it: it has no program of the whole.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: CompileOptions,
        lifting: Lifting,
        budget: Budget,
        calls: itertools.count[int],
    ) -> None:
        self.module = module
        self.options = options
        self.lifting = lifting
        self.budget = budget
        self._calls = calls
        self.lock = threading.RLock()
        self.epoch: Epoch | None = None
        self.remembered: tuple[Epoch, ...] = ()
        self.regions: tuple[Regions, ...] = ()
        self.effective = EffectiveWeights()
        self.patience = Patience(STATES)
        self.given_up: str | None = None
        self.is_blind = False
        self._patience_outside = Patience(OUTSIDE)
        self._entered: Epoch | None = None
        """The epoch that is the current one, or was until its weights were to be bound anew."""
        self._epochs: dict[bytes, Epoch] = {}
        """By the digest of the fingerprint of their structure, which they hold; what was entered last is the last."""
        self._recounted = 0
        """How often numbers in buffers changed that are constants of programs."""
        self._is_suspected = False
        """Whether something outside was set in the course of the capture that is under way."""
        self._missed: set[int] = set()
        """Ids of tensors that may have been written since their weights were bound."""

    @property
    def is_only_one(self) -> bool:
        """Whether the module was met in no other state."""
        return len(self._epochs) <= 1

    def current(self) -> Epoch:
        """The epoch of the module as it is now, with its weights bound.

        Raises:
            ChangedError: Another thread moves it again and again.
        """
        with self.lock:
            for _ in range(MAX_CHANGES):
                try:
                    return self._found()
                except ChangedError as error:
                    changed = error
            raise changed

    def _found(self) -> Epoch:
        """As :meth:`current`; raises a :class:`ChangedError` if another thread moves the module meanwhile. The lock is
        held."""
        epoch = self.epoch
        if epoch is None:
            with collection_paused():
                epoch = self.enter(self._first_look())
            self.refresh(epoch)
        rounds = 0
        while bits := epoch.watch.poll():
            # A module that another thread changes all the time, or that a look at it changes.
            rounds += 1
            if rounds > _MAX_ROUNDS:
                raise ChangedError(CHANGED)
            suspects = epoch.watch.changed_tensors()
            if bits & SURROUNDINGS:
                epoch = self.leave_outdated(epoch)
                self.refresh(epoch, suspects)
                continue
            is_other = not suspects.isdisjoint(map(id, epoch.structure.attribute_tensors))
            if bits & STRUCTURE or is_other or epoch.structure.is_retyped():
                structure = self.look()
                if structure.fingerprint != epoch.structure.fingerprint:
                    self.patience.note(epoch.watch.changed_modules())
                    if self._is_counting(epoch.structure):
                        structure = self.look()
                    if self.lifting.learn(epoch.structure, structure):
                        structure = self.look()
                    epoch = self.enter(structure)
                    self.refresh(epoch, suspects)
                    continue
                if structure.numbers != epoch.structure.numbers:
                    epoch.renumber()
                epoch.engine.structure = structure
            self._rebind(epoch, suspects)
        return epoch

    def _is_counting(self, before: Structure) -> bool:
        """After a change: whether numbers in buffers changed again and again, which are constants no more."""
        changed = [owner for tensor, value, owner in before.counts if int(tensor) != value]
        self._recounted += bool(changed)
        if not changed or self._recounted <= _MAX_RECOUNTED:
            return False
        VARYING.update(module for owner in changed if (module := owner()) is not None)
        return True

    def leave_outdated(self, epoch: Epoch) -> Epoch:
        """The epoch of the module after its code found something else outside of it."""
        self._patience_outside.spend(count_of(self._calls), captures=1)
        if self._patience_outside.is_out and epoch.engine.surroundings is not None:
            names = ", ".join(epoch.engine.surroundings.changed(with_code=True))
            self.given_up = (
                f"{names} changes again and again outside of it; pass it as an argument, or keep it in an attribute"
            )
            # Other modules of this structure may have programs, and look at the same.
            self.is_blind = True
            self._epochs.clear()
            return self.enter(self.look())
        for fingerprint, one in list(self._epochs.items()):
            if one.engine.is_outdated():
                del self._epochs[fingerprint]
        entered = self.enter(self.look())
        # What is outside may matter to nothing: then the graph is still right.
        entered.engine.before = epoch.engine
        return entered

    def _rebind(self, epoch: Epoch, suspects: Set[int]) -> None:
        """Binds the weights as they are now, and watches them."""
        watch = None
        # A tensor in an attribute may have been replaced by another, and what is watched is held.
        while watch is None or not watch.is_of(epoch.engine.watched(), self._outside_of(epoch)):
            # Watched first, bound then: what changes in between shows.
            watch = Watch(epoch.structure, epoch.engine.watched(), self._outside_of(epoch))
            self.refresh(epoch, suspects)
        # Not before they are bound: until then the old one has other threads, and a call after an interrupt, look again.
        epoch.watch = watch

    def refresh(self, epoch: Epoch, suspects: Set[int] = frozenset()) -> None:
        """Binds the weights as they are now, which makes an epoch the current one. If that fails, whatever with, the next
        call starts over: the changes were seen, and would not be seen again."""
        self.epoch = None
        self._missed |= suspects
        self.effective.note_merged(epoch.structure.layers, self._missed)
        epoch.engine.refresh(self._missed)
        self.epoch = epoch
        self._missed.clear()

    def expect_changes(self) -> None:
        """For a part of a module that gave up what changes outside of it: another one that finds the same does so soon."""
        self._patience_outside = Patience(_OF_PARTS)

    def _outside_of(self, epoch: Epoch) -> _native.Surroundings | None:
        """What is watched of what the code of an epoch finds outside."""
        return None if self.is_blind else epoch.engine.surroundings

    def is_outdated(self, epoch: Epoch) -> bool:
        """Whether the code of an epoch finds something else outside now, as far as anybody looks."""
        return not self.is_blind and epoch.engine.is_outdated()

    def look(self) -> Structure:
        """What the module looks like now."""
        return Structure(self.module, self.lifting.inputs)

    def _first_look(self) -> Structure:
        """As :meth:`look`; numbers that are arguments of what is in the graph file are so here too."""
        structure = self.look()
        path = self.options.graph_file
        if path is None or not os.path.exists(path):
            return structure
        try:
            names = read_artifact(path).inputs
        except ArtifactError:
            # Whoever looks for graphs in it says what is wrong.
            return structure
        return self.look() if self.lifting.adopt(structure, names) else structure

    def enter(self, structure: Structure) -> Epoch:
        """The epoch of a structure, whose weights are to be bound next."""
        # An exception that comes from outside must leave behind none that watches nothing, or is bound to nothing.
        self.epoch = None
        epoch = self._epochs.pop(structure.fingerprint.digest, None)
        if epoch is None:
            engine = Engine(
                self.module, Wrapped(self.module).forward, self.options, structure, self.effective, self.budget
            )
            engine.others = [weakref.ref(other.engine) for other in reversed(self._epochs.values())]
            epoch = Epoch(engine)
        else:
            epoch.engine.structure = structure
            epoch.watch = Watch(structure, epoch.engine.watched(), self._outside_of(epoch))
        self._epochs[structure.fingerprint.digest] = epoch
        self.regions = tuple(one for one in self.regions if one.is_within(structure))
        if self._entered is not None and self._entered is not epoch:
            self._entered.retire()
        self._entered = epoch
        while len(self._epochs) > MAX_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        self.remembered = tuple(self._epochs.values())
        return epoch

    def reentered(self) -> Epoch:
        """The epoch of the module after other numbers of it were found to be arguments."""
        epoch = self.enter(self.look())
        self.refresh(epoch)
        return epoch

    def follow(self, epoch: Epoch) -> None:
        """Makes sure that the module is watched, and that it is as the engine knows it."""
        while (bits := epoch.watch.poll()) or not epoch.watch.covers(epoch.engine.watched(), self._outside_of(epoch)):
            if bits:
                structure = self.look()
                if not structure.is_as(epoch.structure):
                    raise ChangedError(CHANGED)
                epoch.engine.structure = structure
            # Also where a change is raised: what is captured next may take over its graphs.
            self._rebind(epoch, epoch.watch.changed_tensors())
            if bits & SURROUNDINGS and epoch.engine.surroundings is not None:
                # What forward is seen to write was put back. The rest another thread wrote; or forward itself, as a counter
                # or a warning that is given once, by code that is not followed.
                alone = self._is_suspected or threading.active_count() == 1
                if alone:
                    epoch.engine.surroundings.forget_changed(with_code=False, only=epoch.engine.written_outside())
                if self.is_outdated(epoch):
                    self._suspect(epoch.engine.surroundings, alone)
                    raise ChangedError(CHANGED)

    def _suspect(self, surroundings: _native.Surroundings, alone: bool) -> None:
        """After something was set outside of the module while it was captured that its code is not seen to set.

        Args:
            surroundings: What its code finds there.
            alone: Whether it must have been ``forward``: there is no other thread, or it is so once more.

        Raises:
            UnsupportedError: It was ``forward``, by way of ``globals()`` or the like.
        """
        if alone and (names := surroundings.changed(with_code=False)):
            self.given_up = f"forward changes {', '.join(names)} outside of it, which later calls see"
            self.is_blind = True
            raise UnsupportedError(self.given_up)
        self._is_suspected = True

    def confirm(self, epoch: Epoch, holds_others: bool = False) -> None:
        """Raises a :class:`ChangedError` if the module is no longer as the engine knows it.

        Args:
            epoch: What it was.
            holds_others: Whether a graph holds tensors that were found in no module. They may be weights that another
                thread replaced meanwhile.
        """
        if epoch.watch.poll() & STRUCTURE:
            if not self.look().is_as(epoch.structure) or (holds_others and epoch.watch.is_rebound()):
                raise ChangedError(CHANGED)

    def rest(self) -> None:
        """Lets go of the module's tensors until its next call; programs stay."""
        with self.lock:
            epoch, self.epoch, self._entered = self._entered, None, None
            if epoch is not None:
                epoch.retire()

    def rescale(self, scale: float) -> None:
        """Multiplies all adapters by a factor from now on."""
        with self.lock:
            epoch = self.current()
            self.epoch = None
            self.effective.scale = scale
            self.refresh(epoch)

    def begin_capture(self) -> None:
        """Before an attempt to capture, which may be the first of several."""
        self._is_suspected = False

    def forget(self) -> list[Epoch]:
        """Lets go of all states, which are returned; the next call looks at the module anew."""
        with self.lock:
            epochs = list(self._epochs.values())
            self._epochs.clear()
            self.remembered = ()
            self.epoch = self._entered = None
        return epochs

    def reset_lock(self) -> None:
        """After a fork: another thread of the parent may have held it."""
        self.lock = threading.RLock()
