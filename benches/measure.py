"""How the benchmarks measure: interleaved runs, peak memory, the machine's description, tables."""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oxidiff import tune

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Times:
    """Seconds of repeated runs of one thing."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """The middle run, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def interleave(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Time each of `runs` in turn, `rounds` times, after one untimed run of each.

    Runs that alternate meet the same disturbances, so that their ratio holds on a machine whose speed varies. Each round
    begins with another one: what follows whom would be part of the figures otherwise.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    order = list(runs.items())
    for start in range(rounds):
        turn = start % len(order)
        for name, run in order[turn:] + order[:turn]:
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: Times(values) for name, values in seconds.items()}


def ratio_with_spread(times: Mapping[str, Times], of: str, over: str) -> tuple[float, float]:
    """The median ratio of paired runs, and half the distance between the quartiles of the pairs' ratios."""
    pairs = [a / b for a, b in zip(times[of].seconds, times[over].seconds, strict=True)]
    return statistics.median(pairs), Times(pairs).spread * statistics.median(pairs)


def status_bytes(field: str) -> int:
    """A size from `/proc/self/status`: `VmRSS`, or `VmHWM`, the highest `VmRSS` since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def reset_peak() -> None:
    """Give freed memory back to the system and start `VmHWM` again at the present size."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def run_in_process(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a benchmark script in a process of its own and return the JSON object that its last line is."""
    command = [sys.executable, str(ROOT / "benches" / script), *arguments]
    env = {**os.environ, **(environment or {})}
    result = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        return {"error": f"exit status {result.returncode}"}
    for line in lines[:-1]:
        print("   ", line, flush=True)
    answer = json.loads(lines[-1])
    if not isinstance(answer, dict):
        raise TypeError(f"{script} answered {lines[-1]}")
    return answer


def cpu_name() -> str:
    """The processor, with its generation: a virtual machine may call all of them alike."""
    return tune.processor_of(Path("/proc/cpuinfo").read_text()) or platform.processor()


def cpu_isa() -> str:
    """The widest instruction set of the processor that decides which kernels run."""
    flags = Path("/proc/cpuinfo").read_text()
    names = [name for name in ("avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "avx2") if f" {name}" in flags]
    return " ".join(names)


def machine_label() -> str:
    """What figures of different runs must have in common to stand in one table."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {cpu_isa()}"


def describe_machine() -> list[str]:
    """Lines that say when, on what and with which versions: a figure without them cannot be judged."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers", "transformers")]
    return [
        f"- {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, oxidiff at commit `{commit}`",
        f"- {machine_label()}, {platform.system()} {platform.machine()}",
        f"- Python {platform.python_version()}, {', '.join(versions)}",
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


RESULTS = ROOT / "benches" / "RESULTS.md"
INTRODUCTION = "# Results\n\n`make bench` and `make bench-kernels` write this file, a section each.\n"


def write_section(title: str, lines: Sequence[str]) -> None:
    """Replace one section of the results file and keep the others."""
    text = RESULTS.read_text() if RESULTS.exists() else INTRODUCTION
    _, *sections = text.split("\n## ")
    kept = {section.split("\n", 1)[0]: section.rstrip() for section in sections}
    kept[title] = "\n".join([title, "", *lines])
    RESULTS.write_text(INTRODUCTION + "".join(f"\n## {section}\n" for section in kept.values()))
