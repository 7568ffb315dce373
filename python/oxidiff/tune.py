"""The tuner: which form each convolution gets, decided by timing the forms on this machine, within a budget.

Sites are taken by what they cost a step, dearest first; each is timed once for all programs and sizes of its bucket, and
remembered in the tuning database. A form replaces the one that the model of the kernels would choose only if it is
clearly faster (:data:`CLEARLY`), measured beside it in turns. Trials run in the program's own workspace. What is
installed holds for every program of the process: a measurement is a fact about the machine.

``tune="off"`` looks at nothing, ``"cached"`` only reads the database, ``"quick"`` leaves out sites that cannot matter and
programs that were loaded, ``"full"`` takes more turns and leaves out none.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from os import fspath
from typing import Any

import torch

from . import _native
from .errors import CacheError
from .options import CompileOptions
from .store import bundle, complain

__all__ = ["CLEARLY", "Tuner", "device_name"]

log = logging.getLogger(__name__)

CLEARLY = 0.94
"""A form must take less than this share of the default's time, in the best and in the median turn."""
_TURNS = {"quick": 3, "full": 7}
_LEAST_SHARE = {"quick": 0.01, "full": 0.0}


def device_name() -> str:
    """What measurements depend on besides the kernels: the processor, its instruction set in use, the threads."""
    target = _native.target()
    return f"{_processor()}, {target['target']}, {torch.get_num_threads()} threads"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Tuner:
    """Tuning of one program.

    Args:
        options: ``tune``, ``tune_budget_s`` and ``cache`` matter.
    """

    def __init__(self, options: CompileOptions) -> None:
        self.options = options
        self.left_s = options.tune_budget_s
        self.is_loaded = False
        """Whether the program comes from an artifact: it is tuned no further then, unless by ``tune="full"``."""
        self._known: dict[tuple[str, str], str] | None = None
        self._seen: set[tuple[int, ...]] = set()
        """Sizes at which every choice was looked at."""

    def tune(self, program: _native.Program, sizes: Sequence[int], name: str) -> float:
        """Makes choices for a program at these sizes hold, measuring those that are not known; gives the seconds it took.

        An interruption keeps what was learned until then.

        Args:
            program: The program.
            sizes: Its run-time sizes.
            name: What is being tuned, for the progress bar.
        """
        if self.options.tune == "off" or tuple(sizes) in self._seen:
            return 0.0
        start = time.perf_counter()
        try:
            sites = [site for site in _native.tuning_sites(program, sizes) if site.installed is None]
            device, library = device_name(), _native.kernel_version
            changed = self._install_known(sites, device, library)
            if self.options.tune == "full" or (self.options.tune == "quick" and not self.is_loaded):
                open_sites = self._worth([site for site in sites if site.installed is None])
                changed |= self._measure_all(open_sites, device, library, name)
            if changed:
                # Other sizes of the same bucket would have made the choice; those of other buckets stay as they are.
                program.forget_size(sizes)
            self._seen.add(tuple(sizes))
        except _native.NativeError as error:
            # A size that cannot be planned, a trial that found no memory: the call itself says so, or works untuned.
            log.debug("%s is not tuned: %s", name, error.args[1])
        finally:
            self.left_s -= time.perf_counter() - start
        return time.perf_counter() - start

    def _install_known(self, sites: Sequence[_native.TuningSite], device: str, library: str) -> bool:
        if not sites or not self.options.cache:
            return False
        if self._known is None:
            try:
                rows = bundle.entries()
            except CacheError as error:
                complain(f"tuning choices are not read: {error}")
                rows = []
            self._known = {(row[0], row[1]): row[4] for row in rows if row[2:4] == (device, library)}
        known = self._known
        changed = False
        for site in sites:
            choice = known.get((site.op, site.bucket))
            changed |= choice is not None and _install(site, choice)
        return changed

    def _worth(self, sites: Sequence[_native.TuningSite]) -> list[_native.TuningSite]:
        total = sum(site.flops * site.count for site in sites)
        least = _LEAST_SHARE[self.options.tune] * total
        dearest = sorted(sites, key=lambda site: site.flops * site.count, reverse=True)
        return [site for site in dearest if site.flops * site.count >= least and len(site.candidates()) > 1]

    def _measure_all(self, sites: Sequence[_native.TuningSite], device: str, library: str, name: str) -> bool:
        rows: list[bundle.Row] = []
        deadline = time.perf_counter() + self.left_s
        changed = False
        try:
            with _progress(name, len(sites)) as bar:
                gained = before = 0.0
                for site in sites:
                    if time.perf_counter() >= deadline:
                        break
                    measured = _measure(site, _TURNS[self.options.tune], deadline)
                    if measured is None:
                        continue
                    choice, seconds, default_seconds, workspace = measured
                    changed |= _install(site, choice)
                    now = int(time.time())
                    rows.append(
                        (site.op, site.bucket, device, library, choice, seconds, default_seconds, workspace, now)
                    )
                    before += default_seconds * site.count
                    gained += (default_seconds - seconds) * site.count
                    bar.advance(gained / before if before else 0.0)
        finally:
            self._keep(rows)
        return changed

    def _keep(self, rows: Sequence[bundle.Row]) -> None:
        if not rows or not self.options.cache:
            return
        try:
            database = _native.TuningDatabase(fspath(bundle.database_path()))
            if database.complaint is not None:
                complain(f"tuning choices: {database.complaint}")
            database.add(rows)
        except (CacheError, _native.NativeError) as error:
            complain(
                f"tuning choices are not kept: {error.args[-1] if isinstance(error, CacheError) else error.args[1]}"
            )


def _install(site: _native.TuningSite, choice: str) -> bool:
    """Makes a choice hold; whether that is another form than would be chosen without."""
    before = site.chosen
    return site.install(choice) and site.chosen != before


def _measure(site: _native.TuningSite, turns: int, deadline: float) -> tuple[str, float, float, int] | None:
    """The choice for a site with its seconds, the default's, and its bytes; ``None`` if time ran out before it was clear.

    Every turn times each form once. The seconds are those of the packed form.
    """
    times: dict[int, list[tuple[float, float]]] = {}
    bytes_of: dict[int, int] = {}
    candidates = site.candidates()
    packed, per_call = site.chosen
    # The forms that hold now are the yardstick: without them in the memory of a run nothing can be compared.
    if packed not in candidates or per_call not in candidates:
        return None
    for turn in range(turns + 1):
        for candidate in list(candidates):
            if time.perf_counter() >= deadline:
                return None
            trial = site.measure(candidate)
            if trial is None:
                candidates.remove(candidate)
                times.pop(candidate, None)
                continue
            # The first turn warms up.
            if turn:
                times.setdefault(candidate, []).append(trial[:2])
            bytes_of[candidate] = trial[2]
        if packed not in times and turn:
            return None
        if turn == 1:
            # Hopeless ones are not timed again.
            best = min(run for [(run, _)] in times.values())
            kept = {packed, per_call}
            candidates = [c for c in candidates if c in kept or times[c][0][0] < 1.3 * best]
    chosen = _fastest(times, packed, 0.0)
    each_call = _fastest(times, per_call, 1.0)
    name = site.name(chosen, each_call)
    if name is None:
        return None
    return name, _median(times[chosen], 0.0), _median(times[packed], 0.0), bytes_of[chosen]


def _fastest(times: dict[int, list[tuple[float, float]]], default: int, pack_share: float) -> int:
    """The form that is clearly faster than the default one, else the default."""
    if default not in times:
        return default

    def best(candidate: int) -> float:
        return min(run + pack_share * pack for run, pack in times[candidate])

    winner = min(times, key=best)
    is_clear = best(winner) < CLEARLY * best(default)
    is_clear &= _median(times[winner], pack_share) < CLEARLY * _median(times[default], pack_share)
    return winner if is_clear else default


def _median(trials: Sequence[tuple[float, float]], pack_share: float) -> float:
    ordered = sorted(run + pack_share * pack for run, pack in trials)
    return ordered[len(ordered) // 2]


class _Bar:
    """A progress bar, or nothing."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def advance(self, gain: float) -> None:
        """One site is done; so much of the time of those done so far was gained."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{gain:.0%} gained")
            self._bar.update()


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[_Bar]:
    """A bar on a terminal or in a notebook, if tqdm is installed."""
    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    tqdm: Any = None
    if total and is_seen:
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm.auto").tqdm
    if tqdm is None:
        yield _Bar()
        return
    with tqdm(total=total, desc=f"tuning {name}", unit="op", leave=False) as bar:
        yield _Bar(bar)
