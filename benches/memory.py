"""Rows of `run.py` about sizes and memory."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import oxidiff
from measure import DTYPES, reset_peak, run_in_process, status_bytes
from oxidiff import testing
from oxidiff.module import dispatcher_of

Answer = dict[str, Any]


@dataclass(frozen=True)
class Peak:
    """What a row about peak memory calls."""

    model: str
    size: tuple[int, ...]
    memory: str = "balanced"
    dtype: str = "f32"
    overrides: dict[str, Any] = field(default_factory=dict)


DIT = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 6, "joint_attention_dim": 768}
"""Flux of hidden width 768 and a few layers."""
PEAKS = {
    "vae-memory": Peak("sd15-vae-decoder", (64, 64)),
    "vae-memory-low": Peak("sd15-vae-decoder", (64, 64), "low"),
    "vae-memory-2048": Peak("sd15-vae-decoder", (256, 256)),
    "unet-memory": Peak("sd15-unet", (64, 64)),
    "unet-memory-low": Peak("sd15-unet", (64, 64), "low"),
    "unet-memory-bf16": Peak("sd15-unet", (64, 64), dtype="bf16"),
    "dit-memory": Peak("flux", (64, 64), overrides=DIT),
    "dit-memory-low": Peak("flux", (64, 64), "low", overrides=DIT),
    "clip-memory": Peak("clip-l", (77,)),
    "clip-memory-low": Peak("clip-l", (77,), "low"),
}
"""The rows about peak memory."""
CALLED_ONCE = frozenset({"vae-memory-2048"})
"""Rows whose calls take minutes: the first one counts, with what compiling takes."""


def options(**fields: Any) -> oxidiff.CompileOptions:
    """Nothing from an earlier run: neither a stored program nor a remembered tuning choice."""
    return oxidiff.CompileOptions(cache=False, tune="off", **fields)


@torch.no_grad()
def peak_of(row: str, what: str) -> Answer:
    """Peak memory of a call beyond the module's weights: of eager or of the compiled module."""
    peak = PEAKS[row]
    how: dict[str, Any] = {"tiny": False, "dtype": DTYPES[peak.dtype], "overrides": peak.overrides}
    module = testing.build(peak.model, **how)
    inputs = testing.example_inputs(peak.model, size=peak.size, **how)
    call = module if what == "eager" else oxidiff.compile(module, options=options(memory=peak.memory))
    return growth(lambda: call(**inputs), is_called_once=row in CALLED_ONCE)


def growth(call: Callable[[], object], is_called_once: bool = False) -> dict[str, int]:
    """Bytes by which resident memory grows at most: in the second call (`"peak"`), and in the first."""
    reset_peak()
    before = status_bytes("VmRSS")
    call()
    first = status_bytes("VmHWM") - before
    if is_called_once:
        return {"peak": first, "first": first}
    reset_peak()
    call()
    return {"peak": status_bytes("VmHWM") - before, "first": first}


def peak_over_eager(arguments: argparse.Namespace, *, row: str, bar: float) -> Answer:
    """Peak memory over eager's, each measured in a process of its own; derived weights count."""
    parts = {what: run_in_process("run.py", "--row", row, "--what", what) for what in ("eager", "compiled")}
    for part in parts.values():
        if "error" in part:
            return part
    ratio = parts["compiled"]["peak"] / parts["eager"]["peak"]
    first = parts["compiled"]["first"] / parts["eager"]["first"]
    sizes = ", ".join(f"{what} {part['peak'] / 2**20:.0f} MiB" for what, part in parts.items())
    note = f"growth of resident memory beyond the weights: {sizes}; first call, compile included: {first:.2f}"
    return {"value": f"{ratio:.2f}", "ok": ratio <= bar, "note": note}


@torch.no_grad()
def forty_sizes(arguments: argparse.Namespace, *, name: str) -> Answer:
    """Random sizes and batches, shuffled: what they add, and what the arena is afterwards."""
    pick = random.Random(4)
    cells = [(batch, (8 * h, 8 * w)) for batch in (1, 2, 3) for h in range(1, 13) for w in range(1, 13)]
    walk = pick.sample(cells, 40)
    module = testing.build(name, tiny=False)
    compiled = oxidiff.compile(module, options=options(max_specializations=64))

    def call(batch: int, size: tuple[int, int]) -> None:
        compiled(**testing.example_inputs(name, tiny=False, batch=batch, size=size))

    call(1, (64, 64))
    before = oxidiff.report(compiled)
    resident = []
    for batch, size in walk:
        call(batch, size)
        gc.collect()
        resident.append(status_bytes("VmRSS") - oxidiff.report(compiled).pool_bytes)
    after = oxidiff.report(compiled)
    largest = max(row["arena_bytes"] for row in after.sizes)
    added = (after.captures - before.captures, after.programs - before.programs)
    growth = resident[-1] / resident[9] - 1
    arena = after.pool_bytes / largest
    return {
        "value": f"{added[0]} captures, {added[1]} programs, arena {arena:.2f}, growth {growth:+.2%}",
        "ok": added == (0, 0) and arena <= 1.0 and growth < 0.01 and not after.eager_calls,
        "note": f"40 of {len(cells)} sizes up to 768x768 by batch 1 to 3; arena {largest / 2**20:.0f} MiB; growth of "
        "resident memory beside the arena from the 10th to the 40th size",
    }


@torch.no_grad()
def first_call(arguments: argparse.Namespace, *, name: str, bar: float) -> Answer:
    """The first call of a new size over its steady state."""
    module = testing.build(name, tiny=False)
    compiled = oxidiff.compile(module, options=options())
    compiled(**testing.example_inputs(name, tiny=False, size=(64, 64)))
    ratios = []
    for size in [(56, 56), (64, 48), (72, 64)]:
        inputs = testing.example_inputs(name, tiny=False, size=size)
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            compiled(**inputs)
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / statistics.median(seconds[1:]))
    worst = max(ratios)
    return {"value": f"{worst:.2f}", "ok": worst <= bar, "note": f"worst of {len(ratios)} sizes after 64x64"}


@torch.no_grad()
def unfilled(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model at its public configuration whose weights take address space and no memory: for planning, which reads none."""
    fill = testing.fill_weights
    testing.fill_weights = lambda *_args, **_fields: None
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            module = testing.build(name, tiny=False, dtype=dtype)
    finally:
        testing.fill_weights = fill
        torch.set_default_dtype(torch.float32)
    return module.to_empty(device="cpu")


def _planned(name: str, sizes: list[tuple[int, ...]], **fields: Any) -> Iterator[tuple[Any, oxidiff.Report]]:
    compiled = oxidiff.compile(unfilled(name), options=options(**fields))
    for size in sizes:
        oxidiff.warmup(compiled, **testing.example_inputs(name, tiny=False, size=size, dtype=torch.bfloat16))
        yield compiled, oxidiff.report(compiled)


@torch.no_grad()
def plan_time(arguments: argparse.Namespace, *, name: str, bar: float) -> Answer:
    """Milliseconds to plan a new size: sizes, kernel arguments and the arena."""
    sizes: list[tuple[int, ...]] = [(8 * h, 8 * w) for h in range(8, 20, 4) for w in range(8, 20, 3)]
    dispatcher = dispatcher_of(oxidiff.compile(unfilled(name), options=options(max_specializations=64)))
    times = []
    for size in sizes:
        inputs = testing.example_inputs(name, tiny=False, size=size, dtype=torch.bfloat16)
        for variant, dims in dispatcher.parts_of((), inputs):
            # Time of this thread alone: planning uses no other.
            started = time.thread_time()
            variant.executable.prepare(dims)
            times.append((time.thread_time() - started) * 1e3)
    median = statistics.median(times)
    note = f"{len(times)} sizes, {min(times):.1f} to {max(times):.1f} ms of CPU time"
    return {"value": f"{median:.1f} ms", "ok": median <= bar, "note": note}


@torch.no_grad()
def arena_over_bound(arguments: argparse.Namespace, *, bar: float) -> Answer:
    """Arena over its lower bound, every model of the zoo at three sizes, planned without running."""
    worst: dict[str, float] = {}
    for name in testing.names():
        own = testing.ZOO[name].size
        if len(own) == 2:
            step = 64 if "encoder" in name else 8
            sizes = [own, tuple(max(edge // 2 // step, 1) * step for edge in own), (own[0], own[1] + 2 * step)]
        else:
            sizes = [own]
        for memory in ("balanced", "low"):
            for _, report in _planned(name, sizes, memory=memory):
                row = report.sizes[-1]
                ratio = row["arena_bytes"] / max(row["lower_bound_bytes"], 1)
                worst[name] = max(worst.get(name, 0.0), ratio)
        gc.collect()
    highest = max(worst, key=lambda name: worst[name])
    return {
        "value": f"{worst[highest]:.3f}",
        "ok": worst[highest] <= bar,
        "note": f"worst of {len(worst)} models, three sizes each, balanced and low: {highest}; median "
        f"{statistics.median(worst.values()):.3f}",
    }


@torch.no_grad()
def estimates(arguments: argparse.Namespace) -> Answer:
    """Estimated peak bytes over what the run took."""
    ratios = []
    for name, sizes in [("sd15-unet", [(32, 32), (64, 48)]), ("sd15-vae-decoder", [(24, 24), (32, 40)])]:
        module = testing.build(name, tiny=False)
        for memory in ("balanced", "low"):
            for size in sizes:
                compiled = oxidiff.compile(module, options=options(memory=memory))
                inputs = testing.example_inputs(name, tiny=False, size=size)
                estimated = oxidiff.estimate(compiled, **inputs).peak_bytes
                compiled(**inputs)
                ratios.append(estimated / oxidiff.report(compiled).peak_bytes)
                oxidiff.unload(compiled)
                del compiled
                gc.collect()
    low, high = min(ratios), max(ratios)
    return {
        "value": f"{low:.3f} to {high:.3f}",
        "ok": 0.98 <= low <= high <= 1.02,
        "note": f"{len(ratios)} cases: SD1.5 UNet and VAE decoder, two sizes, balanced and low",
    }
