"""Calls that have no program of their own: in pieces, with Python between submodules, or eager.

A module that Dynamo has to split (:mod:`oxidiff.split`), or one between whose layers Python has to run
(:mod:`oxidiff.regions`), is still compiled for the most part. Which of both serves a call follows from why there is no
program for it; what one call showed is remembered here for those that are like it: with other sizes, in other states of the
module, with other functions of the same code in the place of a ``forward``.

Threads: what is remembered is only added, or replaced as a whole; where the states of the module change with it, under their
lock.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .ambient import tensor_obstacle
from .call import Leaf
from .capture import DrawnError, KeptError, LeftError, leads_to
from .carried import Carried, Carrying, kept_in
from .device import is_captured
from .entries import MAX_KEYS, Eager, Epoch, Key, with_numbers
from .errors import CaptureError, Error, UnsupportedError
from .hooks import Wrapped, replaced_modules
from .island import Island
from .options import CompileOptions
from .patience import WAIT
from .regions import Regions
from .split import Split
from .states import MAX_EPOCHS, States
from .watch import STRUCTURE

if TYPE_CHECKING:
    from .dispatch import Dispatcher

__all__ = ["Detours"]

T = TypeVar("T")

_MAX_LEFT = 2
"""How often a call may be captured that leaves the state of the module that it is captured in."""
_OF_GRADIENTS = ("does not require grad", "a torch.func transform")
"""What errors say of a ``forward`` that computes gradients itself."""
_MAX_RENEWALS = 2
"""Calls that change the module and make Dynamo compile other pieces; further ones run eager."""
_MAX_REGIONS = 4
"""Ways in which Python may lie between the submodules of a module, as its hooks come and go, for which what is compiled is
kept."""
_MAX_CARRYING = 3
"""How often a call may turn out to keep something more."""
_MAX_SETTLED = 8
"""How often a module may seem to be done with changing itself."""


class Detours:
    """What runs the calls of one module that have no program, and what is known of them.

    Args:
        owner: The module's dispatcher, which owns this.

    Attributes:
        waited: How many calls ran without a program because states of the module do not last.
        carried: What runs all calls, once they were seen to keep tensors in attributes.
        turn: Held by calls of such a module: they take turns.
        is_keeping: Whether calls were seen to keep tensors, so that those in eager PyTorch take turns, too.
    """

    def __init__(self, owner: Dispatcher) -> None:
        # A module goes with its last reference: nothing here refers to what refers to this.
        self._owner_ref = weakref.ref(owner)
        self._module = owner.module
        self._options = owner.options
        self._states: States = owner.states
        self.waited = 0
        self.carried: Carried | None = None
        self.turn = threading.RLock()
        self.is_keeping = False
        self._kept: set[tuple[str, Key]] = set()
        self._beside: dict[str, Eager] = {}
        """What is known of calls with arguments that no program takes, by why."""
        self._writing: Eager | None = None
        """What is known of all calls, once they were seen to write outside of the module."""
        self._changing: set[Key] = set()
        """Keys whose last call changed the module itself."""
        self._alike: dict[Any, Eager] = {}
        """For calls with leaves of the same sorts as those that change the module, what is known of these."""
        self._stateful: dict[frozenset[types.CodeType], Eager] = {}
        """What is known of all calls, where functions of such code are in the place of a ``forward``."""
        self._settled = 0
        self._restless: Eager | None = None
        """What is known of calls in states that do not last."""
        self._running = threading.local()
        """What a running call in parts is told: of the module, as other regions of it have the same parts."""

    @property
    def _owner(self) -> Dispatcher:
        owner = self._owner_ref()
        assert owner is not None, "this is called by its owner"
        return owner

    def _maker(self, options: CompileOptions) -> Callable[..., Dispatcher]:
        """What makes the dispatchers of pieces and parts, which share what tuning may take."""
        return functools.partial(type(self._owner), options=options, budget=self._states.budget)

    # -- ways of a call ------------------------------------------------------------------------------------------------

    def run(self, epoch: Epoch, entry: Eager, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without a program."""
        if entry.is_split and not (entry.open_ids and any(self._states.regions)):
            return self.run_split(epoch, entry, args, kwargs)
        return self.run_regions(epoch, entry, args, kwargs)

    def run_refused(
        self,
        epoch: Epoch,
        key: Key,
        kind: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Leaf],
    ) -> tuple[Any] | None:
        """Runs a call that was never tried, where those of its kind have no program: its result, in a tuple."""
        if any(isinstance(leaf, Tensor) and tensor_obstacle(leaf) for leaf in leaves):
            return None
        at = with_numbers(key, leaves)
        if (found := epoch.refusals.find(kind, at)) is None:
            return None
        entry, is_known = found
        if not is_known and self._states.is_outdated(epoch):
            # What the code finds outside of the module is another thing now, and perhaps no obstacle.
            return None
        result = self.run(epoch, entry, args, kwargs)
        epoch.refusals.meet(kind, at, entry)
        self.follow(epoch, key, entry, leaves)
        return (result,)

    def run_split(self, epoch: Epoch, entry: Eager, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that cannot be captured whole, in pieces."""
        with self._states.lock:
            split = epoch.split
            if split is None:
                # A piece is Dynamo's, not the user's: it is never stored.
                options = self._options.replace(cache=False, graph_file=None)
                forward = Wrapped(self._module).forward
                split = epoch.split = Split(forward, self._options.dynamic, self._maker(options))
        known = len(split.pieces)
        try:
            result, compiled, problems = split(*self._owner.as_given(args, kwargs))
        except CaptureError as error:
            entry.is_split, entry.reason = False, f"{entry.reason}; {error}"
            return self.run_regions(epoch, entry, args, kwargs)
        if compiled:
            self._owner.record(entry.error(), f"runs in {_several(len(split.pieces), 'piece')}")
            for problem, what in problems:
                self._owner.record(problem, f"has a piece that {what}")
            if entry in epoch.changing.values() and len(split.pieces) > known:
                entry.renewals += 1
                if entry.renewals == _MAX_RENEWALS:
                    entry.is_split = False
                    entry.reason += "; each call makes other pieces of it"
        else:
            # Dynamo's bookkeeping gains nothing here.
            entry.is_split = False
            self._owner.count_eager()
            self._owner.record(entry.error())
        return result

    def run_regions(self, epoch: Epoch, entry: Eager, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call for which there is no program and no piece: in Python, with submodules that are compiled."""
        regions = None
        if not self._options.strict and (entry.open_ids or epoch.structure.obstacle is not None):
            regions = self.regions_of(epoch, entry.open_ids)
        if not regions:
            return self._owner.fall_back(entry.error(), args, kwargs)
        result, compiled, problems = regions(*self._owner.as_given(args, kwargs))
        if compiled:
            self._owner.record(entry.error(), f"runs in {_several(len(regions.parts), 'part')}")
        else:
            self._owner.count_eager()
            self._owner.record(entry.error())
        for problem, what in problems:
            self._owner.record(problem, what)
        return result

    def carry(self, error: Error) -> bool:
        """Whether from now on calls are given what they keep, after one could not be captured because it keeps something."""
        if not isinstance(error, LeftError) or not error.attributes or self._options.background:
            # In the background a trace would put what it makes where calls look meanwhile.
            return False
        places = kept_in(self._module, error.attributes)
        if places is None or self._depth() >= _MAX_CARRYING:
            return False
        options = self._options.replace(graph_file=None)
        carried = Carried(self._module, places, self._maker(options), self.turn, error.stays)
        if not carried.fits():
            return False
        self.carried = carried
        return True

    def _depth(self) -> int:
        """How many times what the module keeps is passed already."""
        depth, module = 0, self._module
        while isinstance(module, Carrying):
            depth, module = depth + 1, module.module
        return depth

    def ask_carried(
        self,
        ask: Callable[[Dispatcher, tuple[Any, ...], dict[str, Any]], T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[T] | None:
        """What the dispatcher of calls that are given what the module keeps says of a call, in a tuple; ``None`` if this is
        none of them."""
        if self.carried is None:
            return None
        with self.carried.given(args, kwargs) as given:
            return None if given is None else (ask(self.carried.part, *given),)

    def run_carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Runs a call that is given what the module keeps: its result, in a tuple."""
        done = None if self.carried is None else self.carried(args, kwargs)
        if done is None:
            return None
        result, is_compiled, problems = done
        if not is_compiled:
            self._owner.count_eager()
        for problem, what in problems:
            self._owner.record(problem, what)
        return (result,)

    def run_beside(self, error: UnsupportedError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with an argument that no program takes, a function or an object of the caller's: its submodules are perhaps
        not given that, and have programs."""
        epoch = None if self._options.strict else self._owner.idle_epoch()
        if epoch is None or self._owner.is_captured():
            return self._owner.fall_back(error, args, kwargs)
        entry = self._beside.get(str(error))
        if entry is None:
            entry = Eager(error)
            entry.open_ids = frozenset((id(self._module),))
            self._beside[str(error)] = entry
        result = self.run_regions(epoch, entry, args, kwargs)
        self.follow(epoch, (str(error),), entry, [])
        return result

    def run_known(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Leaf]
    ) -> tuple[Any] | None:
        """Runs a call with a key that is new, where other calls show that it has no program: its result, in a tuple."""
        now = self._states.current() if self._alike or self._writing or self._stateful else None
        if now is None:
            return None
        known = self._alike.get(_sorts_of(leaves)) if now.changing else None
        if known is not None:
            # Another size of calls that change the module.
            result = self.run_regions(now, known, args, kwargs)
            self._changing.add(key)
        else:
            known = self._writing or self._find_stateful()
            if known is None:
                return None
            now.add(key, leaves, known)
            result = self.run_regions(now, known, args, kwargs)
        if known is not self._writing:
            self.follow(now, key, known, leaves)
        return (result,)

    def run_restless(self, epoch: Epoch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Runs a call in a state of the module that does not last, as far as is known, and gets no program: its result, in a
        tuple."""
        if not self._states.patience.is_out or epoch.entries or epoch.changing or epoch.waited >= WAIT:
            return None
        epoch.waited += 1
        self.waited += 1
        return (self.run_regions(epoch, self._restless_entry(), args, kwargs),)

    def regions_of(self, epoch: Epoch, open_ids: frozenset[int]) -> Regions:
        """The submodules of an epoch that have programs of their own."""
        if epoch.regions is not None and epoch.regions.open_ids == open_ids:
            return epoch.regions
        with self._states.lock:
            forward = Wrapped(self._module).forward
            structure = epoch.structure
            regions = next((one for one in self._states.regions if one.fits(structure, forward, open_ids)), None)
            if regions is None:
                known = {id(part.module): part for one in self._states.regions for part in one.parts.values()}
                make_part = self._maker(self._options.replace(graph_file=None))

                def make(module: torch.nn.Module, report: Callable[[Error, str], None]) -> Dispatcher:
                    part = known.get(id(module))
                    if part is None:
                        part = make_part(module)
                    if self._states.given_up is not None:
                        part.states.expect_changes()
                    part.report = report
                    return part

                bare = {key: one for regions in self._states.regions for key, one in regions.bare.items()}
                regions = Regions(structure, self._module, forward, open_ids, make, bare, self._running)
                self._states.regions = (*self._states.regions, regions)[-_MAX_REGIONS:]
            epoch.regions = regions
            return regions

    # -- what calls show -----------------------------------------------------------------------------------------------

    def follow(self, epoch: Epoch, key: Key, entry: Eager, leaves: Sequence[Leaf]) -> None:
        """After a call without a program: where such calls change the module, as one that counts its steps, what is known of
        them holds of what it has become."""
        if not epoch.watch.poll() & STRUCTURE:
            if key in self._changing:
                self._changing.discard(key)
                # Perhaps it has a program now.
                if self._settled < _MAX_SETTLED and epoch.changing.pop(key, None) is not None:
                    self._settled += 1
                    self._alike.clear()
            return
        if is_captured(leaves) or not self._states.lock.acquire(blocking=not self._options.background):
            return
        try:
            if self._states.epoch is not epoch:
                return
            split, changing = epoch.split, epoch.changing
            after = self._states.current()
            if after is epoch:
                return
            is_as_hooked = (after.structure.obstacle is None) == (epoch.structure.obstacle is None)
            if is_as_hooked and after.split is None:
                # Dynamo checks what its pieces depend on; to find them again takes as long as the first time.
                after.split = split
            # What a first call sets up, later ones leave as it is.
            if key in self._changing and is_as_hooked and len(changing) < MAX_KEYS:
                changing[key] = entry
                if entry.open_ids and not entry.is_split and len(self._alike) < MAX_KEYS:
                    self._alike[_sorts_of(leaves)] = entry
                after.split, after.changing = split, changing
            elif len(self._changing) < MAX_KEYS:
                self._changing.add(key)
        finally:
            self._states.lock.release()

    def entry_without_program(self, error: Error, key: Key) -> Eager:
        """What is known of calls after an attempt to capture one, with this key, failed."""
        entry = Eager(error)
        self.is_keeping |= isinstance(error, LeftError) and bool(error.attributes)
        replaced = (
            frozenset(replaced_modules(self._module))
            if entry.is_split or isinstance(error, LeftError | DrawnError)
            else frozenset()
        )
        if isinstance(self._module, Island) or any(what in str(error) for what in _OF_GRADIENTS):
            # A piece is not split again, and where `forward` itself asks for gradients, pieces have none.
            entry.is_split = False
        elif isinstance(error, LeftError):
            tables = frozenset(map(id, error.changed))
            entry.open_ids = frozenset(id(child) for child in self._module.modules() if leads_to(child, tables))
            if error.leaks is not None:
                entry.open_ids = entry.open_ids.union(*map(self._way_down, error.leaks.paths))
            if error.is_outside:
                entry.open_ids |= self._way_to(error)
                if _kept_by(error, key) in self._kept:
                    # Of what is outside of it nothing shows which calls leave it as it is.
                    self._writing = entry
            if replaced and self._have_most(entry.open_ids | replaced):
                self._settle_stateful(entry, entry.open_ids | replaced)
        elif isinstance(error, DrawnError):
            # Dynamo's pieces draw at another place, and torch 2.15's take what they drew for no float.
            way = self._way_to(error) or frozenset((id(self._module),))
            entry.open_ids = way
            if replaced and self._have_most(way | replaced):
                self._settle_stateful(entry, way | replaced)
        elif isinstance(error, UnsupportedError) and str(error) == self._states.given_up:
            # What changes outside is read in some submodules, mostly; others have programs.
            entry.open_ids = frozenset((id(self._module),))
        elif entry.is_split:
            # Dynamo takes half a minute for what its own parts are captured in within a second.
            way = self._way_to(error)
            if replaced and self._have_most(way | replaced):
                self._settle_stateful(entry, way | replaced)
            elif way and self._have_most(way):
                entry.open_ids, entry.is_split = way, False
        return entry

    def _settle_stateful(self, entry: Eager, open_ids: frozenset[int]) -> None:
        """What is known of calls with functions in the place of a ``forward``: they run as they are. It holds of other
        functions of the same code, which some libraries put there anew for each picture."""
        entry.open_ids, entry.is_split = open_ids, False
        if len(self._stateful) < MAX_EPOCHS:
            self._stateful[frozenset(replaced_modules(self._module).values())] = entry

    def _find_stateful(self) -> Eager | None:
        """What is known of all calls, for the functions that are in the place of a ``forward`` now."""
        if not self._stateful:
            return None
        replaced = replaced_modules(self._module)
        found = self._stateful.get(frozenset(replaced.values())) if replaced else None
        if found is not None and not found.open_ids.issuperset(replaced):
            found.open_ids |= frozenset(replaced)
        return found

    def may_be_set_up(self, error: Error, key: Key) -> bool:
        """Whether the module kept something for the first time, and may not the next: a table that it makes when called. So
        may an exception be, which perhaps came from another thread."""
        cause = type(error.__cause__).__module__.partition(".")[0]
        is_raised = isinstance(error, CaptureError) and cause not in ("builtins", "torch", __name__.partition(".")[0])
        what = _kept_by(error, key)
        # Of a module that keeps something in each call, nothing more need be seen twice.
        is_kept = isinstance(error, KeptError) and not (isinstance(self._module, Carrying) and error.attributes)
        if not (is_kept or is_raised) or what in self._kept:
            return False
        self._kept.add(what)
        return True

    def settle_writing(self, epoch: Epoch | None, entry: Eager) -> None:
        """After a call, if all calls turned out to write outside of the module: nobody looks there any more, and what was
        found to have a program has none."""
        if entry is not self._writing or epoch is None:
            return
        self._states.is_blind = True
        # Nobody makes one either.
        self._states.given_up = self._states.given_up or entry.reason
        self._states.forget()

    def leaves_state(self, epoch: Epoch, key: Key, leaves: Sequence[Leaf]) -> bool:
        """Whether a call makes another state of the module, for which there are programs: eager makes that without a trace.
        Another thread may have made it, so this is tried again now and then."""
        if not epoch.left:
            return False
        at = with_numbers(key, leaves)
        count = epoch.left.get(at, 0)
        if count < _MAX_LEFT:
            return False
        epoch.left[at] = count + 1 if count < _MAX_LEFT + WAIT else 1
        return True

    def _restless_entry(self) -> Eager:
        """What is known of calls in states that do not last: what changes runs as it is."""
        paths = self._states.patience.changing
        ways = list(map(self._way_down, paths))
        open_ids = frozenset((id(self._module),)).union(*ways)
        if not all(ways):
            # What functions in the place of a `forward` hold, and modules beside.
            open_ids |= frozenset(replaced_modules(self._module))
        known = self._restless
        if known is None or known.open_ids != open_ids:
            names = ", ".join(filter(None, paths[:2])) or "the module itself"
            others = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
            reason = f"attributes of {names}{others} are others in nearly every call; pass what changes as an argument"
            known = self._restless = Eager(UnsupportedError(reason if known is None else known.reason))
            known.open_ids = open_ids
        return known

    def reset_lock(self) -> None:
        """After a fork: another thread of the parent may have held it."""
        self.turn = threading.RLock()
        if self.carried is not None:
            self.carried.reset(self.turn)

    def forget(self) -> None:
        """After everything that was compiled was given back."""
        self._stateful.clear()

    # -- where Python has to run ---------------------------------------------------------------------------------------

    def runs_in_parts(self) -> bool:
        """Whether the module can run as it is, with most of it in submodules that are compiled."""
        options = self._options
        if options.strict or options.graph_file is not None or not options.dynamic or isinstance(self._module, Island):
            # A program of the whole is asked for, or one for each size, or there are no submodules to run.
            return False
        return self._have_most(frozenset((id(self._module),)))

    def _have_most(self, open_ids: frozenset[int]) -> bool:
        """Whether the submodules below and beside these have most of the module; if not, nothing is kept of them."""
        with self._states.lock:
            epoch = self._states.current()
            before = self._states.regions, epoch.regions
            is_most = self.regions_of(epoch, open_ids).have_most(self._module)
            if not is_most:
                self._states.regions, epoch.regions = before
            return is_most

    def _way_to(self, error: Error) -> frozenset[int]:
        """The ids of the modules from this one down to where an attempt to capture it failed; none if that is not known."""
        return self._way_down(getattr(error, "module", ""))

    def _way_down(self, path: str) -> frozenset[int]:
        """The ids of the modules from this one down to that at a path; none if there is no such."""
        module: torch.nn.Module | None = self._module
        found = {id(module)}
        for name in filter(None, path.split(".")):
            module = module._modules.get(name) if module is not None else None
            found.add(id(module))
        return frozenset(found) if module is not None else frozenset()


def _kept_by(error: Error, key: Key) -> tuple[str, Key]:
    """What a call keeps. Tensors in a global may be a table for each size."""
    return str(error), key if isinstance(error, LeftError) and error.leaks is not None and error.is_outside else ()


def _sorts_of(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Dtypes and dimensions of tensors, types of numbers."""
    return tuple([(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves])


def _several(count: int, what: str) -> str:
    return f"one {what} with Python around it" if count == 1 else f"{count} {what}s with Python between them"
