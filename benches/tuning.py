"""Rows of `run.py` about tuning and restarts: what a start takes, what tuning gains and needs, how large artifacts are."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import oxidiff
from measure import DTYPES, interleave, ratio_with_spread, reset_peak, run_in_process, status_bytes
from memory import unfilled
from oxidiff import _native, testing
from oxidiff.module import dispatcher_of

Answer = dict[str, Any]

MODELS: dict[str, tuple[str, str, tuple[int, int]]] = {
    "sd15": ("sd15-unet", "f32", (64, 64)),
    "sdxl": ("sdxl-unet", "bf16", (64, 64)),
}
"""Model, dtype and latent size of the rows about starts. SDXL in f32 is more than half of a small machine's memory, and at
128x128 a call takes so long that its variation hides a start."""


@torch.no_grad()
def start(row: str, what: str) -> Answer:
    """One start, in a process of its own: the first call of a module whose weights are in memory, and later ones."""
    name, dtype, size = MODELS[row.partition("-")[2]]
    module = testing.build(name, tiny=False, dtype=DTYPES[dtype])
    inputs = testing.example_inputs(name, tiny=False, size=size, dtype=DTYPES[dtype])
    call: Any = torch.compile(module) if what.startswith("inductor") else oxidiff.compile(module)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        call(**inputs)
        seconds.append(time.perf_counter() - started)
    step = statistics.median(seconds[1:])
    answer: Answer = {"ready": seconds[0] - step, "step": step}
    if not what.startswith("inductor"):
        report = oxidiff.report(call)
        answer |= {"tune": report.tune_s, "load": report.load_s}
        answer |= {"captures": report.captures, "eager": report.eager_calls}
    return answer


def _starts(row: str, kinds: tuple[str, str], rounds: int) -> list[list[Answer]] | Answer:
    """The two starts of a row, so many times, with caches that are empty at each first; an error in place of them."""
    pairs: list[list[Answer]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["OXIDIFF_CACHE_DIR"] = str(Path(folder) / "oxidiff")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
            pairs.append([run_in_process("run.py", "--row", row, "--what", kind) for kind in kinds])
        if error := next((part for part in pairs[-1] if "error" in part), None):
            return error
    return pairs


def starts(arguments: argparse.Namespace, *, row: str, bars: tuple[float, float]) -> Answer:
    """Cold starts with quick tuning, and restarts from the cache."""
    pairs = _starts(row, ("cold", "restart"), arguments.rounds)
    if not isinstance(pairs, list):
        return pairs

    def of(which: int, field: str) -> list[float]:
        return [pair[which][field] for pair in pairs]

    cold, restart = of(0, "ready"), of(1, "ready")
    medians = statistics.median(cold), statistics.median(restart)
    is_whole = sum(of(0, "eager") + of(1, "eager") + of(1, "captures")) == 0
    _, dtype, size = MODELS[row.partition("-")[2]]
    return {
        "value": f"{medians[0]:.1f} s, {medians[1]:.2f} s",
        "ok": medians[0] <= bars[0] and medians[1] <= bars[1] and is_whole,
        "note": f"{dtype}, latent {size[0]}x{size[1]}; what a first call takes beyond the median of five later ones of "
        f"{statistics.median(of(0, 'step')):.2f} s, after a restart {statistics.median(of(1, 'step')):.2f} s; medians of "
        f"{len(pairs)}: {min(cold):.1f} to {max(cold):.1f} s, {min(restart):.2f} to {max(restart):.2f} s; "
        f"tuning {statistics.median(of(0, 'tune')):.1f} s of it; reading the graph "
        f"{statistics.median(of(1, 'load')):.2f} s; imports and making the weights are not in it",
    }


def inductor_starts(arguments: argparse.Namespace, *, row: str) -> Answer:
    """The same of `torch.compile`, with its cache on disk."""
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return {"value": "-", "ok": True, "note": "no C++ compiler here, without which Inductor compiles nothing"}
    pairs = _starts(row, ("inductor-cold", "inductor-restart"), 1)
    if not isinstance(pairs, list):
        return pairs
    cold, restart = pairs[0]
    return {
        "value": f"{cold['ready']:.1f} s, {restart['ready']:.1f} s",
        "ok": True,
        "note": f"its default mode, for comparison: steps of {cold['step']:.2f} s",
    }


@torch.no_grad()
def tuned_steps(arguments: argparse.Namespace, *, name: str, dtype: str, size: tuple[int, int]) -> Answer:
    """Steps tuned quickly, in full and not at all, in turns."""
    module = testing.build(name, tiny=False, dtype=DTYPES[dtype])
    inputs = testing.example_inputs(name, tiny=False, size=size, dtype=DTYPES[dtype])
    runs: dict[str, Any] = {}
    # Another bound on its sizes makes each a program of its own: those that agree in all that decides share one.
    for i, mode in enumerate(("off", "quick", "full")):
        _native.forget_choices()
        options = oxidiff.CompileOptions(cache=False, tune=mode, tune_budget_s=10 if mode == "quick" else 120)
        runs[mode] = oxidiff.compile(module, options=options.replace(max_specializations=14 + i))
        runs[mode](**inputs)
    spent = {mode: oxidiff.report(run).tune_s for mode, run in runs.items()}
    times = interleave({mode: lambda run=run: run(**inputs) for mode, run in runs.items()}, arguments.rounds)
    over_full, spread = ratio_with_spread(times, "quick", "full")
    over_off, off_spread = ratio_with_spread(times, "quick", "off")
    full_over_off, _ = ratio_with_spread(times, "full", "off")
    full = [choice for variant in oxidiff.explain(runs["full"]).variants for choice in variant["choices"]]
    others = sum(not re.search(r": (.*), (.*), \2 untuned$", choice) for choice in full)
    seconds = ", ".join(f"{mode} {value.median:.3f} s ± {value.spread:.0%}" for mode, value in times.items())
    return {
        "value": f"{over_full:.2f} ± {spread:.2f}, {over_off:.2f} ± {off_spread:.2f}",
        "ok": over_full <= 1.05 and over_off <= 0.97,
        "note": f"{dtype}, latent {size[0]}x{size[1]}; {seconds}, {arguments.rounds} interleaved rounds; full over off "
        f"{full_over_off:.2f}; tuned for {spent['quick']:.1f} s and {spent['full']:.1f} s; all forms of {len(full)} "
        f"convolutions were measured in full, {others} got another form than the model's",
    }


@torch.no_grad()
def tuning_peak(arguments: argparse.Namespace, *, name: str, size: tuple[int, int], bar: float) -> Answer:
    """The highest memory while compiling and tuning, over that of running, both beyond the module's weights."""
    module = testing.build(name, tiny=False)
    inputs = testing.example_inputs(name, tiny=False, size=size)
    compiled = oxidiff.compile(module, cache=False, tune="full", tune_budget_s=60)
    reset_peak()
    before = status_bytes("VmRSS")
    oxidiff.warmup(compiled, **inputs)
    tuning = status_bytes("VmHWM") - before
    compiled(**inputs)
    reset_peak()
    compiled(**inputs)
    running = status_bytes("VmHWM") - before
    report = oxidiff.report(compiled)
    return {
        "value": f"{tuning / running:.2f}",
        "ok": tuning <= bar * running and not report.eager_calls and report.tune_s > 0,
        "note": f"f32, latent {size[0]}x{size[1]}; growth of resident memory beyond the weights: {tuning / 2**20:.0f} MiB "
        f"while {report.tune_s:.1f} s were spent on tuning in full, {running / 2**20:.0f} MiB while running",
    }


@torch.no_grad()
def artifact_size(arguments: argparse.Namespace, *, name: str, bar: float) -> Answer:
    """Megabytes of a saved program, and what reading it takes. Made without weights: it has none."""
    module = unfilled(name)
    options = oxidiff.CompileOptions(cache=False, tune="off")
    inputs = testing.example_inputs(name, tiny=False, dtype=torch.bfloat16)
    compiled: Any = oxidiff.compile(module, options=options)
    dispatcher_of(compiled).prepare((), inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.oxi"
        compiled.save_graph(path)
        size = path.stat().st_size / 1e6
        compiled.unload()
        started = time.perf_counter()
        compiled.load_graph(path)
        seconds = time.perf_counter() - started
    return {
        "value": f"{size:.1f} MB",
        "ok": size <= bar,
        "note": f"one graph with its trace, bf16; loaded, described and compiled again in {seconds:.2f} s",
    }
