"""Draw digits with an eager and with a compiled pipeline, and compare: what `make demo` runs.

    python examples/demo.py --out demo-out

Writes `digits.png` (both styles, eager beside compiled) and prints times, memory and the largest difference. The only
line that differs between the two columns is `pipe.unet = oxidiff.compile(pipe.unet)`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import oxidiff
from digits import NO_DIGIT, DigitsPipeline, draw_grid, encode_labels, side_by_side

STYLES = ("chalk", "ink")
LABELS = [digit for digit in range(10) for _ in range(2)]
COLUMNS = 5


def measure_peak(kind: str) -> int | None:
    """Bytes that `kind` (`"eager"` or `"compiled"`) needs on top of the loaded model, in a process of its own: everything
    from compiling to the third step, workspace, packed weights and results included; None where unknown."""
    result = subprocess.run([sys.executable, __file__, "--peak", kind], capture_output=True, text=True, check=False)
    return int(result.stdout) if result.returncode == 0 else None


def print_peak(kind: str) -> None:
    """What `measure_peak` runs."""
    unet = DigitsPipeline.load(STYLES[0]).unet
    step = example_step()
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run = oxidiff.compile(unet) if kind == "compiled" else unet
    with torch.no_grad():
        for _ in range(3):
            run(*step)
    print(max(0, _status_bytes("VmHWM") - before))


def example_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of one denoising step as the pipeline calls it: sample, timestep, labels."""
    labels = torch.tensor(LABELS)
    sample = torch.randn(2 * len(LABELS), 1, 24, 24, generator=torch.Generator().manual_seed(0))
    return sample, torch.tensor(500), encode_labels(torch.cat([torch.full_like(labels, NO_DIGIT), labels]))


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def time_interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each of `runs`, taken in turn so that a busy machine slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Draw, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for digits.png")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each kind")
    parser.add_argument("--peak", choices=["eager", "compiled"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.peak)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)

    grids: list[tuple[str, Image.Image]] = []
    difference = 0.0
    reports = {}
    step = example_step()
    # A program lives as long as a module that uses it: with both pipelines alive the second one compiles nothing.
    pipes = [DigitsPipeline.load(style) for style in STYLES]
    for style, pipe in zip(STYLES, pipes, strict=True):
        eager_unet = pipe.unet
        eager = pipe(LABELS, steps=arguments.steps)

        started = time.perf_counter()
        pipe.unet = oxidiff.compile(pipe.unet)  # the one line
        oxidiff.warmup(pipe.unet, *step)  # optional: the first call would do it
        compile_s = time.perf_counter() - started
        compiled = pipe(LABELS, steps=arguments.steps)

        reports[style] = (oxidiff.report(pipe.unet), compile_s)
        difference = max(difference, float(np.abs(eager - compiled).max()))
        grids += [(f"{style}: eager", draw_grid(eager, COLUMNS)), (f"{style}: compiled", draw_grid(compiled, COLUMNS))]
    picture = arguments.out / "digits.png"
    side_by_side(grids).save(picture)

    with torch.no_grad():
        runs = {"eager": lambda: eager_unet(*step), "compiled": lambda: pipe.unet(*step)}
        for run in runs.values():
            run()
        seconds = time_interleaved(runs, arguments.rounds)
    peaks = {name: measure_peak(name) for name in runs}

    report, compile_s = reports[STYLES[0]]
    second_report, second_s = reports[STYLES[1]]
    ratio = seconds["compiled"] / seconds["eager"]
    rows = [
        ("", "eager", "compiled"),
        ("step time, 40 images 24x24", f"{seconds['eager'] * 1e3:.1f} ms", f"{seconds['compiled'] * 1e3:.1f} ms"),
        ("  relative", "1.00", f"{ratio:.2f}"),
        ("peak memory beyond the model", *(_megabytes(peaks[name]) for name in ("eager", "compiled"))),
        ("capture and compile", "", f"{compile_s:.2f} s"),
        ("  second checkpoint", "", f"{second_s:.2f} s, {second_report.programs} programs compiled"),
        ("largest pixel difference", "", f"{difference:.1e} of 1.0"),
        ("calls that ran eager", "", f"{report.eager_calls + second_report.eager_calls}"),
    ]
    for name, eager_value, compiled_value in rows:
        print(f"{name:<30}{eager_value:>12}  {compiled_value}")
    for reason in [*report.fallbacks, *second_report.fallbacks]:
        print("ran eager:", reason)
    print(f"\nwrote {picture}")


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
