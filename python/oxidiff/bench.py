"""`oxidiff bench`: a model of the zoo, or a user's script, eager and compiled, in turns.

A script runs as it is, each time in a process of its own: once as it compiles its modules, once with
``OXIDIFF_DISABLE=1``, which leaves them eager. What is compared is the time inside the compiled modules, the outermost
ones; what a script does around them is the same in both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import testing
from .dispatch import Dispatcher
from .errors import Error
from .module import compile, dispatcher_of
from .report import report_of

__all__ = ["of_model", "of_script"]


def of_model(name: str, tiny: bool, dtype: torch.dtype, batch: int, runs: int) -> str:
    """Times a model of the zoo; gives the result as text."""
    module = testing.build(name, dtype=dtype, tiny=tiny)
    inputs = testing.example_inputs(name, batch=batch, dtype=dtype, tiny=tiny)
    compiled: Any = compile(module)
    with torch.inference_mode():
        first = _seconds(lambda: compiled(**inputs))
        module(**inputs)
        times = [(_seconds(lambda: module(**inputs)), _seconds(lambda: compiled(**inputs))) for _ in range(runs)]
    eager, fast = (statistics.median(column) for column in zip(*times, strict=True))
    kind = str(dtype).removeprefix("torch.")
    lines = [f"{name}{' (tiny)' if tiny else ''}, {kind}, batch {batch}"]
    lines.append(f"  eager     {eager * 1e3:9.2f} ms")
    lines.append(f"  compiled  {fast * 1e3:9.2f} ms = {fast / eager:.2f} of eager; first call {first:.2f} s")
    lines += [f"  eager: {fallback['reason']}" for fallback in report_of(dispatcher_of(compiled)).fallbacks]
    return "\n".join(lines)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclasses.dataclass
class _Module:
    """The calls of one compiled module in one run of a script."""

    name: str
    seconds: list[float]
    fallbacks: list[str]


def of_script(path: str, arguments: Sequence[str], runs: int) -> str:
    """Times a script; gives the result as text.

    Args:
        path: The script.
        arguments: Its own.
        runs: How often it runs, eager and compiled each.

    Raises:
        Error: It failed, or called no compiled module.
    """
    found: dict[bool, list[list[_Module]]] = {True: [], False: []}
    for _ in range(runs):
        for is_eager in (True, False):
            found[is_eager].append(_run(path, arguments, is_eager))
    eager, compiled = found[True], found[False]
    if not compiled[0]:
        raise Error(f"{path} calls no module that oxidiff compiled")
    lines = [f"{path}, {runs} runs each, in turns; the first call of a module is apart"]
    for i, module in enumerate(compiled[0]):
        lines.append(f"  {module.name}, {len(module.seconds)} calls")
        times = {kind: [run[i].seconds for run in some if i < len(run)] for kind, some in found.items()}
        if not times[True]:
            lines.append("    not called in the eager runs")
            continue
        steady = {
            kind: [s for run in some for s in run[1:]] or [run[0] for run in some] for kind, some in times.items()
        }
        slow, fast = (statistics.median(steady[kind]) for kind in (True, False))
        firsts = statistics.median(run[0] for run in times[False])
        lines.append(f"    eager     {slow * 1e3:9.2f} ms")
        lines.append(f"    compiled  {fast * 1e3:9.2f} ms = {fast / slow:.2f} of eager; first call {firsts:.2f} s")
        lines += [f"    eager: {reason}" for reason in module.fallbacks]
    total = [statistics.median(sum(sum(m.seconds) for m in run) for run in some) for some in (eager, compiled)]
    lines.append(f"  all calls, the first ones too: {total[0]:.2f} s eager, {total[1]:.2f} s compiled")
    return "\n".join(lines)


def _run(path: str, arguments: Sequence[str], is_eager: bool) -> list[_Module]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "calls.json"
        environment = {**os.environ, "OXIDIFF_DISABLE": "1" if is_eager else "0"}
        command = [sys.executable, "-m", "oxidiff.bench", str(result), path, *arguments]
        # What the script prints is not the answer: it goes to the error stream.
        done = subprocess.run(command, env=environment, stdout=2, check=False)
        if done.returncode or not result.exists():
            raise Error(f"{path} ended with status {done.returncode}")
        return [_Module(**row) for row in json.loads(result.read_text())]


def _watch() -> list[tuple[Dispatcher, list[float]]]:
    """Times every call of a compiled module from now on, those inside of another one not; the list fills as they come."""
    found: list[tuple[Dispatcher, list[float]]] = []
    state = threading.local()
    call = Dispatcher.__call__

    def timed(self: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(state, "is_inside", False):
            return call(self, args, kwargs)
        state.is_inside = True
        start = time.perf_counter()
        try:
            return call(self, args, kwargs)
        finally:
            seconds = time.perf_counter() - start
            state.is_inside = False
            row = next((row for known, row in found if known is self), None)
            if row is None:
                found.append((self, row := []))
            row.append(seconds)

    Dispatcher.__call__ = timed  # type: ignore[method-assign]
    return found


def _main(result: str, path: str, *arguments: str) -> None:
    found = _watch()
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    rows = [
        _Module(dispatcher.name, seconds, [row["reason"] for row in report_of(dispatcher).fallbacks])
        for dispatcher, seconds in found
    ]
    Path(result).write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
