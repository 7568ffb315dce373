"""Whole models against eager PyTorch, side by side: `make bench`.

    python benches/run.py                        # every row, into benches/RESULTS.md
    python benches/run.py --only unet-f32 sizes  # some rows; the others keep their last figures

Each row runs in a process of its own. Steps are timed interleaved with eager in that process; memory is the kernel's
own high-water mark. `benches/results.json` keeps the figures that the table is made of.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import memory
import oxidiff
import tuning
import weights
from measure import (
    DTYPES,
    RESULTS,
    ROOT,
    describe_machine,
    interleave,
    machine_label,
    ratio_with_spread,
    run_in_process,
    table,
    write_section,
)
from oxidiff import testing

FIGURES = ROOT / "benches" / "results.json"
MODEL_FIGURES = ROOT / "benches" / "models.json"
Answer = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    figure: str
    bar: str
    measure: Callable[[argparse.Namespace], Answer]
    """Runs in a process of its own and returns `value` (text), `ok` and optionally `note`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process has besides."""


AVX2 = {"OXIDIFF_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Limits oxidiff, PyTorch and its oneDNN alike."""


def _options(**fields: Any) -> oxidiff.CompileOptions:
    """Nothing from an earlier run: neither a stored program nor a remembered tuning choice."""
    return oxidiff.CompileOptions(cache=False, tune="off", **fields)


@torch.no_grad()
def step_over_eager(
    arguments: argparse.Namespace, *, name: str, dtype: str, size: tuple[int, ...], bar: float
) -> Answer:
    """The time of a call over eager's."""
    module = testing.build(name, tiny=False, dtype=DTYPES[dtype])
    inputs = testing.example_inputs(name, tiny=False, size=size, dtype=DTYPES[dtype])
    compiled = oxidiff.compile(module, options=_options())
    runs = {"eager": lambda: module(**inputs), "compiled": lambda: compiled(**inputs)}
    times = interleave(runs, arguments.rounds)
    ratio, spread = ratio_with_spread(times, "compiled", "eager")
    seconds = ", ".join(f"{key} {value.median:.3f} s ± {value.spread:.0%}" for key, value in times.items())
    return {
        "value": f"{ratio:.2f} ± {spread:.2f}",
        "ok": ratio <= bar and not oxidiff.report(compiled).eager_calls,
        "note": f"{seconds}, {arguments.rounds} interleaved rounds",
    }


@torch.no_grad()
def thread_scaling(arguments: argparse.Namespace, *, name: str, size: tuple[int, ...], bar: float) -> Answer:
    """How much of the threads' number a step gains from them."""
    module = testing.build(name, tiny=False)
    inputs = testing.example_inputs(name, tiny=False, size=size)
    most = torch.get_num_threads()
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most] + [most]
    # A program for each: sizes in use keep their plan.
    compiled = {count: oxidiff.compile(module, options=_options()) for count in counts}

    def run(count: int) -> None:
        torch.set_num_threads(count)
        compiled[count](**inputs)

    times = interleave({str(count): functools.partial(run, count) for count in counts}, arguments.rounds)
    gained = times["1"].median / times[str(most)].median / most
    seconds = ", ".join(f"{count}: {value.median:.3f} s ± {value.spread:.0%}" for count, value in times.items())
    return {
        "value": f"{gained:.2f}",
        "ok": gained >= bar,
        "note": f"threads {seconds}, {arguments.rounds} interleaved rounds",
    }


@torch.no_grad()
def compile_seconds(arguments: argparse.Namespace, *, name: str, dtype: str, bar: float) -> Answer:
    """Capture and compile, cold: nothing cached, nothing tuned."""
    module = testing.build(name, tiny=False, dtype=DTYPES[dtype])
    inputs = testing.example_inputs(name, tiny=False, size=(32, 32), dtype=DTYPES[dtype])
    module(**inputs)
    compiled = oxidiff.compile(module, options=_options())
    started = time.perf_counter()
    oxidiff.warmup(compiled, **inputs)
    seconds = time.perf_counter() - started
    calls = []
    for _ in range(2):
        started = time.perf_counter()
        compiled(**inputs)
        calls.append(time.perf_counter() - started)
    report = oxidiff.report(compiled)
    return {
        "value": f"{seconds:.1f} s",
        "ok": seconds <= bar and not report.eager_calls,
        "note": f"of it {report.compile_s:.1f} s compiling, the rest capture ({report.captures}); the first call takes "
        f"{calls[0] - calls[1]:.1f} s more than the second (weights prepared)",
    }


@torch.no_grad()
def added_by_sizes(arguments: argparse.Namespace, *, name: str) -> Answer:
    """Captures and programs added by further sizes and batches."""
    module = testing.build(name, tiny=False)
    compiled = oxidiff.compile(module, options=_options())

    def call(batch: int, size: tuple[int, int]) -> tuple[int, int]:
        compiled(**testing.example_inputs(name, tiny=False, batch=batch, size=size))
        report = oxidiff.report(compiled)
        return report.captures, report.programs

    captures, programs = call(1, (32, 32))
    added = [call(1, (40, 24)), call(1, (64, 64)), call(3, (32, 32))]
    total = (added[-1][0] - captures, added[-1][1] - programs)
    return {
        "value": f"{total[0]} captures, {total[1]} programs",
        "ok": total == (0, 0) and not oxidiff.report(compiled).eager_calls,
        "note": f"after {captures} captures and {programs} programs for 32x32: 40x24, 64x64, batch 3",
    }


@torch.no_grad()
def call_overhead(arguments: argparse.Namespace, *, name: str, bar: float) -> Answer:
    """What a call costs outside its kernels: a call on the null backend, which does all of it but runs no kernel."""
    os.environ["OXIDIFF_BACKEND"] = "null"
    module = testing.build(name)
    inputs = testing.example_inputs(name, size=(8, 8))
    compiled = oxidiff.compile(module, options=_options())
    if oxidiff.profile(compiled, **inputs).steps:
        return {"error": "the null backend is not in force: it runs no steps"}
    for _ in range(50):
        compiled(**inputs)
    gc.disable()
    walls = []
    for _ in range(200 * arguments.rounds):
        started = time.perf_counter()
        compiled(**inputs)
        walls.append(time.perf_counter() - started)
    gc.enable()
    report = oxidiff.report(compiled)
    low, median, high = (value * 1e6 for value in statistics.quantiles(walls, n=4))
    weights = sum(1 for _ in module.parameters())
    return {
        "value": f"{median:.0f} us",
        "ok": median <= bar and not report.eager_calls,
        "note": f"quartiles {low:.0f} to {high:.0f} us; null backend, a tiny SD1.5 UNet with all its {weights} weights",
    }


ERROR_SIZES = {"unet": (32, 32), "controlnet": (16, 16), "decoder": (16, 16), "encoder": (128, 128)}


def errors_of_models(arguments: argparse.Namespace) -> Answer:
    """The largest errors among the models of docs/models.md, which `benches/models.py` measures one by one."""
    figures = json.loads(MODEL_FIGURES.read_text())
    measured = {name: answer for name, answer in figures.items() if "error" not in answer}
    f32 = {name: answer["f32"]["error"] for name, answer in measured.items()}
    halves = {
        f"{label} {name}": answer[label]["error"] / answer[label]["own_error"]
        for name, answer in measured.items()
        for label in ("bf16", "f16")
    }
    worst, worst_half = max(f32, key=lambda name: f32[name]), max(halves, key=lambda name: halves[name])
    return {
        "value": f"{f32[worst]:.1e}, {halves[worst_half]:.2f}x",
        "ok": len(measured) == len(figures) and f32[worst] <= 2e-5 and halves[worst_half] <= 1.25,
        "note": f"the largest of {len(measured)} models: {worst}, {worst_half}; docs/models.md has each",
    }


def _peak(row: str, figure: str, bar: float) -> Row:
    """A row of :data:`memory.PEAKS`."""
    return Row(figure, str(bar), functools.partial(memory.peak_over_eager, row=row, bar=bar))


ROWS = {
    "unet-f32": Row(
        "SD1.5 UNet, f32, latent 64x64, batch 1: step over eager",
        "1.0",
        functools.partial(step_over_eager, name="sd15-unet", dtype="f32", size=(64, 64), bar=1.0),
    ),
    "unet-f32-avx2": Row(
        "the same, both limited to AVX2",
        "0.9",
        functools.partial(step_over_eager, name="sd15-unet", dtype="f32", size=(64, 64), bar=0.9),
        AVX2,
    ),
    "unet-bf16": Row(
        "SD1.5 UNet, bf16, latent 64x64, batch 1: step over eager bf16",
        "0.45",
        functools.partial(step_over_eager, name="sd15-unet", dtype="bf16", size=(64, 64), bar=0.45),
    ),
    "threads-sd15": Row(
        "SD1.5 UNet, f32, latent 64x64: step of one thread over that of all, by their number",
        ">= 0.9",
        functools.partial(thread_scaling, name="sd15-unet", size=(64, 64), bar=0.9),
    ),
    "vae-f32": Row(
        "VAE decoder, f32, latent 64x64: over eager",
        "1.0",
        functools.partial(step_over_eager, name="sd15-vae-decoder", dtype="f32", size=(64, 64), bar=1.0),
    ),
    "vae-memory": _peak("vae-memory", "VAE decoder, f32, latent 64x64: peak memory over eager's", 0.8),
    "vae-memory-low": _peak("vae-memory-low", 'the same, memory="low"', 0.8),
    "vae-memory-2048": _peak("vae-memory-2048", "VAE decoder, f32, image 2048x2048: peak memory over eager's", 0.8),
    "unet-memory": _peak("unet-memory", "SD1.5 UNet, f32, latent 64x64: peak memory over eager's", 1.0),
    "unet-memory-low": _peak(
        "unet-memory-low", 'SD1.5 UNet, f32, latent 64x64, memory="low": peak memory over eager\'s', 1.0
    ),
    "unet-memory-bf16": _peak("unet-memory-bf16", "SD1.5 UNet, bf16, latent 64x64: peak memory over eager's", 1.0),
    "dit-memory": _peak("dit-memory", "Flux-like DiT, f32, hidden 768, 1024 tokens: peak memory over eager's", 1.15),
    "dit-memory-low": _peak("dit-memory-low", 'the same, memory="low"', 1.0),
    "clip-memory": _peak("clip-memory", "CLIP's text encoder (L), f32, 77 tokens: peak memory over eager's", 1.15),
    "clip-memory-low": _peak("clip-memory-low", 'the same, memory="low"', 1.0),
    "forty-sizes": Row(
        "40 random sizes and batches, SD1.5 UNet: added; arena over the largest alone; resident growth",
        "0, 0, 1.00, 1 %",
        functools.partial(memory.forty_sizes, name="sd15-unet"),
    ),
    "first-call": Row(
        "first call of a new size over its steady state, SD1.5 UNet",
        "1.1",
        functools.partial(memory.first_call, name="sd15-unet", bar=1.1),
    ),
    "plan-time": Row(
        "plan for a new size, SDXL UNet", "5 ms", functools.partial(memory.plan_time, name="sdxl-unet", bar=5.0)
    ),
    "arena-bound": Row(
        "arena over its lower bound, every model", "1.05", functools.partial(memory.arena_over_bound, bar=1.05)
    ),
    "estimates": Row("estimated peak bytes over measured", "0.98 to 1.02", memory.estimates),
    "compile-sd15": Row(
        "capture and compile, SD1.5 UNet, no tuning",
        "4 s",
        functools.partial(compile_seconds, name="sd15-unet", dtype="f32", bar=4.0),
    ),
    "compile-sdxl": Row(
        "capture and compile, SDXL UNet, no tuning",
        "6 s",
        functools.partial(compile_seconds, name="sdxl-unet", dtype="bf16", bar=6.0),
    ),
    "sizes": Row(
        "second size, third size, batch 3: captures and programs added",
        "0",
        functools.partial(added_by_sizes, name="sd15-unet"),
    ),
    "overhead": Row(
        "a call's time outside its kernels, SD1.5 UNet",
        "60 us",
        functools.partial(call_overhead, name="sd15-unet", bar=60.0),
    ),
    "attach": Row("second SD1.5 UNet: made ready in, over the first one", "50 ms, 2 %", weights.attach),
    "live-modules": Row("8 live UNets: programs, arena over that of one", "1, 1.0", weights.live_modules),
    "switch": Row("switching between live weight sets: added to the next call", "1 ms", weights.switch),
    "ip-adapter": Row(
        "another scale of an IP-Adapter, SD1.5 UNet: added to the next call", "0 captures", weights.ip_adapter
    ),
    "watch": Row("noticing that nothing changed, SDXL UNet", "120 us", weights.watch),
    "lora": Row(
        "LoRA rank 16, SD1.5 UNet, all attention layers: switch, step over no LoRA, recompiles",
        "1.5 s, 1.01, 0, 0",
        weights.lora,
    ),
    "start-sd15": Row(
        "SD1.5 UNet: start to first fast step, quick tuning; restart from the cache",
        "15 s, 1.0 s",
        functools.partial(tuning.starts, row="start-sd15", bars=(15.0, 1.0)),
    ),
    "inductor-sd15": Row(
        "the same of torch.compile, cold; warm", "-", functools.partial(tuning.inductor_starts, row="inductor-sd15")
    ),
    "start-sdxl": Row(
        "SDXL UNet: start to first fast step, quick tuning; restart from the cache",
        "25 s, 1.5 s",
        functools.partial(tuning.starts, row="start-sdxl", bars=(25.0, 1.5)),
    ),
    "inductor-sdxl": Row(
        "the same of torch.compile, cold; warm", "-", functools.partial(tuning.inductor_starts, row="inductor-sdxl")
    ),
    "tuned-sd15": Row(
        "SD1.5 UNet: step tuned quickly over in full; over not at all",
        "1.05, 0.97",
        functools.partial(tuning.tuned_steps, name="sd15-unet", dtype="f32", size=(64, 64)),
    ),
    "tuned-sdxl": Row(
        "SDXL UNet: step tuned quickly over in full; over not at all",
        "1.05, 0.97",
        functools.partial(tuning.tuned_steps, name="sdxl-unet", dtype="bf16", size=(64, 64)),
    ),
    "tuning-peak": Row(
        "SD1.5 UNet: peak memory while tuning over while running",
        "1.0",
        functools.partial(tuning.tuning_peak, name="sd15-unet", size=(64, 64), bar=1.0),
    ),
    "artifact-sdxl": Row(
        "size of an artifact, SDXL UNet", "10 MB", functools.partial(tuning.artifact_size, name="sdxl-unet", bar=10.0)
    ),
    "errors": Row(
        "error against f64, every model: f32 relative, 16-bit over eager's own", "2e-5, 1.25x", errors_of_models
    ),
}


def write_results(figures: dict[str, dict[str, Answer]]) -> None:
    """The tables, one for each machine, from every row's last figures there."""
    lines = [
        "`make bench` writes this section: whole models with random weights and public configurations, against eager "
        "PyTorch in the same process. Ratios below 1 are faster or smaller than eager. A row stays until it is taken "
        "again on the same kind of machine; what changed since its date, the changelog says.",
        "",
        "Taken last with:",
        "",
        *describe_machine(),
    ]
    header = ["row", "figure", "measured", "bar", "met", "how", "taken"]
    for machine, answers in sorted(figures.items()):
        rows = []
        for name, row in ROWS.items():
            answer = answers.get(name)
            if answer is None:
                continue
            verdict = "failed" if "error" in answer else ("yes" if answer["ok"] else "no")
            note = answer.get("note", answer.get("error", ""))
            rows.append([f"`{name}`", row.figure, answer.get("value", "-"), row.bar, verdict, note, answer["at"]])
        lines += ["", f"### {machine}", "", *table(header, rows)]
    write_section("Whole models", lines)
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Run rows, each in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved runs of each kind")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.row:
        measure = ROWS[arguments.row].measure
        if arguments.what:
            part = memory.peak_of if arguments.row in memory.PEAKS else tuning.start
            print(json.dumps(part(arguments.row, arguments.what)), flush=True)
        else:
            print(json.dumps(measure(arguments)), flush=True)
        return

    unknown = [name for name in arguments.only if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}")
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    here = figures.setdefault(machine_label(), {})
    for name in arguments.only:
        print(f"{name}: {ROWS[name].figure}", flush=True)
        process = ("run.py", "--row", name, "--rounds", str(arguments.rounds))
        answer = run_in_process(*process, environment=ROWS[name].environment)
        here[name] = {**answer, "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
        print(
            f"    {answer.get('value', '-')} (bar {ROWS[name].bar}) {answer.get('note', answer.get('error', ''))}",
            flush=True,
        )
        write_results(figures)
    print(f"wrote {Path(RESULTS).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
