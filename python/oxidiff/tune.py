"""The tuner: which form each convolution gets, decided by timing the forms on this machine, within a budget. On a GPU: which
of a library's ways, or which generated kernels, compute each step that libraries compute.

Sites are taken by what they promise: their share of a step, times what the model of the kernels leaves their rivals to
gain. Each is timed once for all programs and sizes of its bucket, and remembered in the tuning database. A form replaces
the one that the model would choose only if it is clearly faster (:data:`CLEARLY`), measured beside it in turns. Trials run
in the program's own workspace. What is installed holds for every program of the process: a measurement is a fact about
the machine.

``tune="off"`` looks at nothing, ``"cached"`` only reads the database, ``"full"`` measures every site in more turns.
``"quick"`` measures what pays: beyond its first second (:data:`FREE_S`), a site only if the gain that can be hoped for,
judged by the sites before it, repays its trials within :data:`REPAID_CALLS` calls. It looks at a size once: where the
program comes from the cache, not at sizes that an earlier process was done with, and where it comes from an artifact that
the user loaded, at none. Where the budget breaks off, the next process goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from os import fspath
from pathlib import Path
from typing import Any, TypeAlias

import torch

from . import _native
from .advice import this_device
from .background import is_ending
from .errors import CacheError
from .options import CompileOptions
from .store import Tuned, bundle, complain

__all__ = ["CLEARLY", "FREE_S", "REPAID_CALLS", "Budget", "Tuner", "device_name", "is_watched", "processor_of"]

log = logging.getLogger(__name__)

CLEARLY = 0.94
"""A form must take less than this share of the default's time, in the best and in the median turn."""
FREE_S = 1.0
"""Seconds that quick tuning of a module, or of a pipeline, may take whatever comes of it."""
REPAID_CALLS = 50
"""Within so many calls, about one image, the trials beyond that must be repaid."""
_HOPED = 0.1
"""Share of a site's time that a first measurement is expected to gain; weighs as much as :data:`_PRIOR` measured sites."""
_PRIOR = 2
_TURNS = {"quick": 3, "full": 7}
_LEAST_SHARE = {"quick": 0.01, "full": 0.0}
_ROUNDS = 2
"""Turns after which most sites are clear: one that warms up, and one that counts."""
_RUNS_A_FIRST_TRIAL = 2
"""The first trial of a form runs the direct one too, to compare the results."""
_SLOWER = {0: 1.5, 1: 1.3}
"""After the turn that warms up and after the first that counts: forms beyond so many times the best are given up."""
_PACK_SHARES = (0.0, 1.0)
"""Share of its packing in the time of a form: packed once, and packed by every call."""
_DEVICE_TRIAL_S = 0.3
"""Seconds that a trial on a GPU is expected to take before there was one."""
_BUILDING = 0.6
"""Share of what is left of the budget in which plans of a library are built for a site; the rest is for its trials."""
_DOUBT = 1.5
"""The model's times are taken to be right up to this factor: of rivals beyond it nothing is hoped."""


def device_name() -> str:
    """What measurements depend on besides the kernels: the processor, its instruction set in use, the threads."""
    target = _native.target()
    return f"{_processor()}, {target['target']}, {torch.get_num_threads()} threads"


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        if name := processor_of(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return name
    return platform.processor() or platform.machine()


def processor_of(cpuinfo: str) -> str:
    """The processor that ``/proc/cpuinfo`` tells of, empty if it does not: its name, family and model, as a virtual
    machine may call processors of different generations alike.

    Args:
        cpuinfo: The file's text.
    """
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        field, _, value = line.partition(":")
        found.setdefault(field.strip(), value.strip())
    name, family, model = (found.get(field, "") for field in ("model name", "cpu family", "model"))
    return f"{name} (family {family} model {model})" if name and family else name


_held: dict[tuple[str, str, str, str], bundle.Row] = {}
"""The measurements behind what is installed in this process, by op and bucket, and what the times depend on: a choice for
one thread is none for two."""


_Site: TypeAlias = _native.TuningSite | _native.DeviceSite


class Budget:
    """What tuning may take, in all: of one compiled module with all its pieces and sizes, or of one pipeline's parts.

    Args:
        seconds: ``tune_budget_s``.
    """

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self.free_s = FREE_S
        """Seconds that quick tuning may still take whatever comes of it."""


class Tuner:
    """Tuning of one program.

    Args:
        options: ``tune`` and ``cache`` matter.
        is_on_device: Whether the program runs on a GPU.
    """

    def __init__(self, options: CompileOptions, is_on_device: bool = False) -> None:
        self.options = options
        self._is_on_device = is_on_device
        self.is_given = False
        """Whether the user loaded the program from an artifact: it is tuned no further then, unless by ``tune="full"``."""
        self.given: Sequence[bundle.Row] = ()
        """Measurements that came with the program's artifact."""
        self.tuned: dict[Tuned, None] = {}
        """Where quick tuning has nothing left to do, here or in an earlier process."""
        self.rows: dict[tuple[str, str], bundle.Row] = {}
        """The measurements behind the program's choices, by op and bucket."""
        self.has_news = False
        """Whether something was learned since this was last cleared."""
        self._is_stale = False
        self._known: dict[tuple[str, str, str, str], bundle.Row] = {}
        self._asked: set[tuple[str, str]] = set()
        """What the times depend on, where the measurements that are known were looked up."""
        self._seen: set[tuple[int, ...]] = set()
        """Sizes at which every choice was looked at."""

    def tune(
        self,
        program: _native.Program,
        sizes: Sequence[int],
        name: str,
        budget: Budget,
        weights: Sequence[torch.Tensor] = (),
    ) -> float:
        """Makes choices for a program at these sizes hold, measuring those that are not known; gives the seconds it took.

        An interruption keeps what was learned until then.

        Args:
            program: The program.
            sizes: Its run-time sizes.
            name: What is being tuned, for the progress bar.
            budget: What it may take; less is left of it afterwards.
            weights: The program's, in slot order: a trial reads them where it has no room for one of its own.
        """
        # A processor's choices hold for a number of threads.
        at = (*sizes, 0 if self._is_on_device else torch.get_num_threads())
        if self.options.tune == "off" or at in self._seen:
            return 0.0
        start = time.perf_counter()
        try:
            sites, key = self._sites(program, sizes, weights)
            if self._is_on_device and not sites:
                self._seen.add(at)
                return 0.0
            here = (program.hash, *key, tuple(sizes))
            is_open = self.options.tune == "quick" and not self.is_given and here not in self.tuned
            try:
                self._install_known(sites, key)
                if is_open or self.options.tune == "full":
                    known = len(_held)
                    is_done = self._measure_all(sites, start, key, name, budget)
                    # On a GPU the budget is spent once, not at every start: what promises most has been measured. Where
                    # others have left nothing of it, nothing has.
                    is_done |= self._is_on_device and not is_ending() and len(_held) > known
                    # A size at which nothing was learned is not worth writing down: servers see thousands.
                    self.has_news |= len(_held) > known or (is_done and not self.tuned)
                    if is_done:
                        self.tuned[here] = None
            finally:
                held = (_held.get(_key(site, key)) for site in sites)
                self.rows |= {row[:2]: row for row in held if row is not None}
                if self._is_stale:
                    self._is_stale = False
                    # Other sizes of the same bucket would have made the choice; those of other buckets stay as they are.
                    program.forget_size(sizes)
            self._seen.add(at)
        except _native.NativeError as error:
            # A size that cannot be planned, a trial that found no memory: the call itself says so, or works untuned.
            log.debug("%s is not tuned: %s", name, error.args[1])
        finally:
            budget.left_s -= time.perf_counter() - start
        return time.perf_counter() - start

    def _sites(
        self, program: _native.Program, sizes: Sequence[int], weights: Sequence[torch.Tensor]
    ) -> tuple[Sequence[_Site], tuple[str, str]]:
        """What is to be chosen, and what the times depend on: the device, and the kernels or libraries."""
        if not self._is_on_device:
            return _native.tuning_sites(program, sizes, weights), (device_name(), _native.kernel_version)
        found = _native.device_sites(program, sizes)
        return found, found[0].key if found else ("", "")

    def _install(self, site: _Site, row: bundle.Row) -> bool:
        before = site.chosen
        if not site.install(row[4]):
            return False
        _held[row[:4]] = row
        self._is_stale |= site.chosen != before
        return True

    def _install_known(self, sites: Sequence[_Site], key: tuple[str, str]) -> None:
        sites = [site for site in sites if site.installed is None]
        if not sites:
            return
        if key not in self._asked:
            rows = list(self.given)
            if self.options.cache:
                try:
                    rows += bundle.entries()
                except CacheError as error:
                    moved = _moved_aside()
                    complain(f"tuning choices are not read: {error}" if moved is None else f"tuning choices: {moved}")
            # Of two measurements of one choice the later holds.
            rows = sorted((row for row in rows if row[2:4] == key), key=lambda row: row[8])
            self._known |= {row[:4]: row for row in rows}
            self._asked.add(key)
        for site in sites:
            row = self._known.get(_key(site, key))
            if row is not None:
                self._install(site, row)

    def _worth(self, sites: Sequence[_Site]) -> list[_Site]:
        """The sites that are still open and matter, those that promise most first."""
        sites = [site for site in sites if site.installed is None]
        least = _LEAST_SHARE[self.options.tune] * sum(map(_share, sites))
        worth = [site for site in sites if _share(site) >= least and len(site.candidates()) > 1]
        return sorted(worth, key=lambda site: (_promise(site), _share(site)), reverse=True)

    def _measure_all(
        self, sites: Sequence[_Site], start: float, key: tuple[str, str], name: str, budget: Budget
    ) -> bool:
        """Measures what is worth it in what was left of the budget at ``start``; false if that, or the end of the process,
        left something to do."""
        deadline = start + budget.left_s
        wanted = self._worth(sites)
        if not wanted:
            return True
        is_done = True
        rows: list[bundle.Row] = []
        gains = [1 - row[5] / row[6] for site in sites if (row := _held.get(_key(site, key))) is not None]
        pace = _Pace(is_on_device=self._is_on_device)
        try:
            with _progress(name, len(wanted)) as bar:
                for site in wanted:
                    bar.show(site)
                    # One trial beyond the deadline is a trial too much.
                    if is_ending() or time.perf_counter() + pace.expect(_effort(site)) > deadline:
                        is_done = False
                        break
                    if self.options.tune == "quick" and not self._pays(site, gains, pace, budget):
                        bar.skip()
                        continue
                    begun = time.perf_counter()
                    try:
                        measured = _measure(site, _TURNS[self.options.tune], deadline)
                    except _OutOfTimeError:
                        measured, is_done = None, False
                    took = time.perf_counter() - begun
                    budget.free_s -= took
                    if measured is None:
                        bar.skip()
                        continue
                    choice, seconds, default_seconds, workspace, trials, is_whole = measured
                    is_done &= is_whole
                    pace.note(_effort(site) * trials, took)
                    row = (*_key(site, key), choice, seconds, default_seconds, workspace, int(time.time()))
                    if self._install(site, row):
                        rows.append(row)
                        gains.append(1 - seconds / default_seconds)
                    bar.advance(site, seconds, default_seconds)
        finally:
            self._keep(rows)
        return is_done

    def _pays(self, site: _Site, gains: Sequence[float], pace: _Pace, budget: Budget) -> bool:
        """Whether quick tuning measures a site: it costs next to nothing, or is expected to repay what it costs."""
        forms = len(site.candidates())
        # On a GPU a trial takes much longer than a run: the budget alone bounds what is spent.
        if isinstance(site, _native.DeviceSite) or _ROUNDS * forms * pace.expect(site.flops) <= budget.free_s:
            return True
        hoped = (_HOPED * _PRIOR + sum(gains)) / (_PRIOR + len(gains))
        runs = _ROUNDS * forms + (_RUNS_A_FIRST_TRIAL - 1) * (forms - 1)
        return REPAID_CALLS * hoped * site.count >= runs

    def _keep(self, rows: Sequence[bundle.Row]) -> None:
        if not rows or not self.options.cache:
            return
        complaint = None
        try:
            database = _native.TuningDatabase(fspath(bundle.database_path()))
            complaint = database.complaint
            database.add(rows)
        except (CacheError, _native.NativeError) as error:
            why = error.args[-1] if isinstance(error, CacheError) else error.args[1]
            complaint = f"they are not kept: {complaint or why}"
        if complaint is not None:
            complain(f"tuning choices: {complaint}")


def _moved_aside() -> str | None:
    """Has a database that cannot be read begun anew if it is damaged, and says so; ``None`` if that is not it."""
    try:
        return _native.TuningDatabase(fspath(bundle.database_path())).complaint
    except (CacheError, _native.NativeError):
        return None


def _key(site: _Site, key: tuple[str, str]) -> tuple[str, str, str, str]:
    """Of a measurement: what was measured, and what the times depend on."""
    return site.op, site.bucket, *key


def _effort(site: _Site) -> float:
    """What the time of a trial follows: operations; on a GPU it is building plans and filling memory, the same for all."""
    return 1.0 if isinstance(site, _native.DeviceSite) else site.flops


def _steps(site: _Site) -> tuple[int, int]:
    """Steps of a site whose weight is kept packed, and those that pack it, or transform it, in every call."""
    return site.kept, site.count - site.kept


def _share(site: _Site) -> float:
    """What a site costs each call, by the model of the kernels."""
    parts = zip(_steps(site), site.expected, site.chosen, strict=True)
    return sum(steps * expected[chosen] for steps, expected, chosen in parts)


def _promise(site: _Site) -> float:
    """What measuring a site may gain each call: the most that a rival of the default can gain in each of its steps."""
    forms, promise = site.candidates(), 0.0
    for steps, expected, chosen in zip(_steps(site), site.expected, site.chosen, strict=True):
        rival = min((expected[form] for form in forms if form != chosen), default=float("inf"))
        promise += steps * max(expected[chosen] - rival / _DOUBT, 0.0)
    return promise


class _Pace:
    """How long a trial takes: by the measured rate of this device at first, then by the trials before."""

    def __init__(self, is_on_device: bool) -> None:
        self._is_on_device = is_on_device
        self._flops = 0.0
        self._seconds = 0.0

    def note(self, flops: float, seconds: float) -> None:
        """Trials of so many operations took so long."""
        self._flops += flops
        self._seconds += seconds

    def expect(self, flops: float) -> float:
        """Seconds of a trial of a form with so many operations."""
        if self._flops:
            return flops / self._flops * self._seconds
        if self._is_on_device:
            return flops * _DEVICE_TRIAL_S
        # Half of the ceiling, once for the form and once for what it is compared with.
        return _RUNS_A_FIRST_TRIAL * flops / (0.5 * this_device().f32_flops)


class _OutOfTimeError(Exception):
    """The budget was over before a choice was clear."""


def _measure(site: _Site, turns: int, deadline: float) -> tuple[str, float, float, int, int, bool] | None:
    """The choice for a site with its seconds, the default's, its bytes, how many trials were made, and whether those are
    all that were wanted; ``None`` if there is nothing to compare.

    Every turn times each form once, the first one warms up. The seconds are those of a step as runs do it: with the packing
    where runs pack, without where they read kept panels; the mean where some steps do this and some that. Where time runs
    out, what was timed decides if one of the forms is clearly faster by then.

    Raises:
        _OutOfTimeError: Time ran out before one was.
    """
    times: dict[int, list[tuple[float, float]]] = {}
    latest: dict[int, tuple[float, float]] = {}
    took: dict[int, float] = {}
    bytes_of: dict[int, int] = {}
    trials = 0
    candidates, is_whole = site.candidates(), True
    is_on_device = isinstance(site, _native.DeviceSite)
    if isinstance(site, _native.DeviceSite):
        # A trial that builds a plan of a library first takes seconds, one after the other.
        ready, is_whole = site.ready(_BUILDING * max(deadline - time.perf_counter(), 0.0))
        candidates = [candidate for candidate in candidates if candidate in ready]
        if not is_whole and len(candidates) < 2:
            raise _OutOfTimeError
    packed, per_call = site.chosen
    kept = {packed, per_call}
    # The forms that hold now are the yardstick: without them in the memory of a run nothing can be compared.
    if not kept <= set(candidates):
        return None
    is_cut = False
    for turn in range(turns + 1):
        latest = {}
        for candidate in list(candidates):
            start = time.perf_counter()
            is_cut = start + took.get(candidate, max(took.values(), default=0.0)) > deadline
            if is_cut:
                break
            trial = site.measure(candidate)
            took[candidate] = time.perf_counter() - start
            trials += 1
            if trial is None:
                candidates.remove(candidate)
                times.pop(candidate, None)
                continue
            latest[candidate] = trial[:2]
            if turn:
                times.setdefault(candidate, []).append(trial[:2])
            bytes_of[candidate] = trial[2]
        if is_cut:
            break
        if not kept <= latest.keys():
            return None
        if turn in _SLOWER:
            # Those that are hopeless, packed once and packed by every call, are not timed again.
            best = [min(_seconds(trial, share) for trial in latest.values()) for share in _PACK_SHARES]
            near = [_SLOWER[turn] * seconds for seconds in best]
            candidates = [c for c in candidates if c in kept or _is_near(latest[c], near)]
        if turn and set(candidates) == {packed}:
            break
    if is_cut:
        if is_on_device and not times:
            # A device's clock tells one turn as well as another, and a trial there has run once before it is timed.
            times = {candidate: [trial] for candidate, trial in latest.items()}
        least = 1 if is_on_device else 2
        times = {candidate: timed for candidate, timed in times.items() if len(timed) >= least}
        if not kept <= times.keys():
            raise _OutOfTimeError
    chosen, each_call = (_fastest(times, *of) for of in zip((packed, per_call), _PACK_SHARES, strict=True))
    is_whole &= not is_cut
    if not is_whole and (chosen, each_call) == (packed, per_call):
        raise _OutOfTimeError
    name = site.name(chosen, each_call)
    if name is None:
        return None
    now, before = _each_step(site, times, (chosen, each_call)), _each_step(site, times, (packed, per_call))
    return name, now, before, max(bytes_of[chosen], bytes_of[each_call]), trials, is_whole


def _each_step(site: _Site, times: dict[int, list[tuple[float, float]]], forms: tuple[int, int]) -> float:
    """Seconds of a step with these forms where the weight is kept packed and where it is not, by how many steps do which."""
    parts = zip(_steps(site), forms, _PACK_SHARES, strict=True)
    return sum(steps * _median(times[form], share) for steps, form, share in parts) / site.count


def _is_near(trial: tuple[float, float], near: Sequence[float]) -> bool:
    """Whether a trial took less than one of these times, without and with packing."""
    return any(_seconds(trial, share) < most for share, most in zip(_PACK_SHARES, near, strict=True))


def _seconds(trial: tuple[float, float], pack_share: float) -> float:
    run, pack = trial
    return run + pack_share * pack


def _fastest(times: dict[int, list[tuple[float, float]]], default: int, pack_share: float) -> int:
    """The form that is clearly faster than the default one, else the default."""
    if default not in times:
        return default

    def best(candidate: int) -> float:
        return min(_seconds(trial, pack_share) for trial in times[candidate])

    winner = min(times, key=best)
    is_clear = best(winner) < CLEARLY * best(default)
    is_clear &= _median(times[winner], pack_share) < CLEARLY * _median(times[default], pack_share)
    return winner if is_clear else default


def _median(trials: Sequence[tuple[float, float]], pack_share: float) -> float:
    ordered = sorted(_seconds(trial, pack_share) for trial in trials)
    return ordered[len(ordered) // 2]


class _Bar:
    """A progress bar, or nothing."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar
        self._gained = self._before = 0.0

    def show(self, site: _Site) -> None:
        """This site is next."""
        if self._bar is not None:
            gain = f", {self._gained / self._before:.0%} gained" if self._before else ""
            self._bar.set_postfix_str(f"{site.op.partition(' groups')[0]}, {site.bucket}{gain}")

    def skip(self) -> None:
        """It was left as it is."""
        if self._bar is not None:
            self._bar.update()

    def advance(self, site: _Site, seconds: float, default_seconds: float) -> None:
        """It takes so long now, and took so long before."""
        self._gained += (default_seconds - seconds) * site.count
        self._before += default_seconds * site.count
        self.skip()


def is_watched() -> bool:
    """Whether progress is seen: stderr is a terminal's or a notebook's. There may be none, or a closed one."""
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stderr.isatty() or "ipykernel" in sys.modules
    return False


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[_Bar]:
    """A bar on a terminal or in a notebook, if tqdm is installed."""
    tqdm: Any = None
    if total and is_watched():
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm.auto").tqdm
    if tqdm is None:
        yield _Bar()
        return
    with tqdm(total=total, desc=f"tuning {name}", unit="op", leave=False) as bar:
        yield _Bar(bar)
