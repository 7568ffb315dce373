"""Whole models on an NVIDIA GPU against eager and `torch.compile`: `make gpu-bench`, or on a machine without Rust

    pip install oxidiff-*.whl diffusers && python benches/gpu.py

Random weights, random normal inputs; models with convolutions are channels-last, for everyone. Each model has a process of
its own, where it and the contenders take turns; times are medians of CUDA events. The processes run side by side, since
contenders compile for minutes, and whoever measures is alone in that: the others go on compiling, on processors that it does
not need, and run for the first time, as `torch.compile` does when it compiles. What `max-autotune` measures then takes time
of the device: take it by itself, with `--only sdxl --against max-autotune`. Each answer is told when it is there, with who
computed how many steps. The run ends within nine minutes and prints one table last; what there was no time for says so.
`--write` puts the table into `benches/RESULTS-gpu.md`. Where there is no GPU it says why.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import fcntl
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import oxidiff
from oxidiff import testing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benches" / "RESULTS-gpu.md"
LIMIT_S = 530.0
CONTENDERS = ("eager", "default", "reduce-overhead", "max-autotune")
FIRST = "sdxl"
"""The row that compiles before its contenders do: how long that takes is told of it."""
LOCK = "GPU_BENCH_LOCK"
"""Names the file that whoever measures has locked."""
MOST_REASONS = 5
"""Reasons of libraries that are told."""
L2_BYTES = 256 << 20
"""More than any second-level cache holds."""
WRONG = 0.1
"""Largest difference from eager, over its largest value, that 16 bits explain in models as deep as these; beyond it
something is wrong."""
Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model at a size, and the bar for its time over the best contender's."""

    figure: str
    model: str
    size: tuple[int, int]
    batch: int
    dtype: torch.dtype
    bar: float


CASES = {
    "sd15": Case("SD1.5 UNet, 512x512, batch 2, fp16", "sd15-unet", (64, 64), 2, torch.float16, 0.75),
    "sdxl": Case("SDXL UNet, 1024x1024, batch 2, fp16", "sdxl-unet", (128, 128), 2, torch.float16, 0.8),
    "vae": Case("SDXL VAE decode, 1024x1024, fp16", "sdxl-vae-decoder", (128, 128), 1, torch.float16, 0.75),
    "flux": Case("Flux-dev transformer, 1024x1024, bf16", "flux", (128, 128), 1, torch.bfloat16, 0.92),
}


# --- one process ----------------------------------------------------------------------------------------------------


def on_gpu(value: Any) -> Any:
    """Tensors of a call, on the GPU."""
    if isinstance(value, Tensor):
        return value.cuda()
    return {name: on_gpu(item) for name, item in value.items()} if isinstance(value, dict) else value


def build(case: Case, size: tuple[int, int] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model, filled on the GPU, and a call's arguments."""
    module = testing.build(case.model, tiny=False, dtype=case.dtype, device=torch.device("cuda"))
    if any(isinstance(child, nn.Conv2d) for child in module.modules()):
        module = module.to(memory_format=torch.channels_last)
    return module, arguments_of(case, size)


def arguments_of(case: Case, size: tuple[int, int] | None = None) -> dict[str, Any]:
    made = testing.example_inputs(case.model, tiny=False, batch=case.batch, size=size or case.size, dtype=case.dtype)
    return on_gpu(made)


def contender(name: str, module: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    """The model as a user of the contender would run it."""
    if any(isinstance(child, nn.Conv2d) for child in module.modules()):
        inputs = {
            key: value.contiguous(memory_format=torch.channels_last)
            if isinstance(value, Tensor) and value.dim() == 4
            else value
            for key, value in inputs.items()
        }
    if name != "eager":
        module = torch.compile(module, mode=name)
    return lambda: module(**inputs)


def seconds_of(run: Callable[[], Any]) -> float:
    """The device's time of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def interleaved(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of calls that take turns: a second's worth of each, at least 7 and at most 50."""
    for run in runs.values():
        for _ in range(3):
            run()
    once = max(seconds_of(run) for run in runs.values())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(min(50, max(7, round(1 / once)))):
        for name, run in runs.items():
            times[name].append(seconds_of(run))
    return times


def peak_of(run: Callable[[], Any], before: int) -> int:
    """The most that a call allocates, over `before`."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def first(result: Any) -> Tensor:
    tensor: Tensor = testing.flatten_outputs(result)[0]
    return tensor


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nobody else of this run measures meanwhile."""
    with open(os.environ[LOCK], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


@torch.no_grad()
def model(row: str, against: list[str]) -> None:
    """Tells of ours and of each contender, one after the other."""
    case = CASES[row]
    module, inputs = build(case)
    others = {"eager": contender("eager", module, inputs)}
    waiting = [name for name in against if name != "eager"]
    compile_seconds: dict[str, float] = {"eager": 0.0}

    def compile_next() -> str:
        """Compiles the next contender, and calls it; one that fails is told of."""
        name = waiting.pop(0)
        started = time.perf_counter()
        run = contender(name, module, inputs)
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            tell(row=row, against=name, failed=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
        else:
            others[name] = run
            compile_seconds[name] = time.perf_counter() - started
        return name

    if row != FIRST and waiting:
        compile_next()
    with alone():
        ours, about = compiled(case, module, inputs)
        measured(row, ours, inputs, others, compile_seconds, about)
        if row == FIRST:
            tell(extra="new-size", **new_size(ours))
    # What another process of the user finds, beside contenders that compile.
    again = subprocess.Popen([sys.executable, __file__, "--child", "again", row]) if row == FIRST else None
    while waiting:
        name = compile_next()
        if name in others:
            with alone():
                now = {"eager": others["eager"], name: others[name]}
                measured(row, ours, inputs, now, compile_seconds, about)
    if again is not None and (status := again.wait()):
        tell(extra="again", failed=f"exit status {status}")


def compiled(case: Case, module: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Answer]:
    """Ours, and what compiling it and its memory take beside eager's."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # The first call sets libraries up.
    _, eager_peak = (peak_of(lambda: module(**inputs), before) for _ in range(2))
    expected = first(module(**inputs)).float()
    before = torch.cuda.memory_allocated()
    ours = oxidiff.compile(module)
    started = time.perf_counter()
    oxidiff.warmup(ours, **inputs)
    compile_s = time.perf_counter() - started
    started = time.perf_counter()
    ours(**inputs)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    ours(**inputs)
    report = ours.report()
    peak = peak_of(lambda: ours(**inputs), before) + report.graph_bytes
    got = first(ours(**inputs)).float()
    return ours, {
        "peak_ratio": peak / eager_peak,
        "peak_bytes": peak,
        "eager_peak_bytes": eager_peak,
        "compile_s": compile_s,
        "first_s": first_s,
        "error": float((got - expected).abs().max() / expected.abs().max()),
        **who_computes(ours),
    }


@torch.no_grad()
def load_again(row: str) -> None:
    """Tells how long it takes to have a program that an earlier process has compiled and remembered."""
    module, inputs = build(CASES[row])
    ours = oxidiff.compile(module)
    with alone():
        started = time.perf_counter()
        oxidiff.warmup(ours, **inputs)
        tell(extra="again", s=time.perf_counter() - started)


def measured(
    row: str,
    ours: Any,
    inputs: dict[str, Any],
    others: dict[str, Callable[[], Any]],
    compile_seconds: dict[str, float],
    about: Answer,
) -> None:
    """Takes turns, and tells of each contender."""
    times = interleaved({"ours": lambda: ours(**inputs), **others})
    report = ours.report()
    for name in others:
        ratios = [a / b for a, b in zip(times["ours"], times[name], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        tell(
            row=row,
            against=name,
            ours_ms=statistics.median(times["ours"]) * 1e3,
            other_ms=statistics.median(times[name]) * 1e3,
            ratio=statistics.median(ratios),
            spread=(quarters[2] - quarters[0]) / 2,
            rounds=len(ratios),
            other_compile_s=compile_seconds[name],
            eager_calls=report.eager_calls,
            reasons=[item["reason"] for item in report.fallbacks],
            **about,
        )


def who_computes(ours: Any) -> Answer:
    """How many steps who computes, what of them libraries refuse most often, why there is no graph, and what tuning took."""
    report = ours.report()
    computed_by: collections.Counter[str] = collections.Counter()
    for row in report.sizes:
        computed_by.update(row.get("computed_by", {}))
    variants = ours.explain().variants
    refused = collections.Counter(why for variant in variants for _, why in variant.get("not_by_libraries", []))
    return {
        "computed_by": dict(computed_by.most_common()),
        "refused": [f"{count} x {why}" for why, count in refused.most_common(MOST_REASONS)],
        "no_graphs": [why for variant in variants for _, why in variant.get("no_graphs", [])],
        "tune_s": report.tune_s,
    }


@torch.no_grad()
def overhead() -> Answer:
    """The host's time of a call: a small model, the device idle at every call."""
    module = testing.build("sd15-unet", dtype=torch.float16).cuda()
    inputs = on_gpu(testing.example_inputs("sd15-unet", dtype=torch.float16))
    ours = oxidiff.compile(module)
    times = []
    for _ in range(300):
        torch.cuda.synchronize()
        started = time.perf_counter()
        ours(**inputs)
        times.append(time.perf_counter() - started)
    report = ours.report()
    return {"us": statistics.median(times[50:]) * 1e6, "eager_calls": report.eager_calls}


def new_size(ours: Any) -> Answer:
    """SDXL at a size that was not seen, after 1024x1024."""
    before = ours.report()
    other = arguments_of(CASES["sdxl"], (96, 128))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    times = []
    for _ in range(4):
        started = time.perf_counter()
        ours(**other)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    after = ours.report()
    return {
        "added_ms": (times[0] - min(times)) * 1e3,
        "second_added_ms": (times[1] - min(times)) * 1e3,
        "added_bytes": torch.cuda.memory_allocated() - held,
        "graph_bytes": after.graph_bytes - before.graph_bytes,
        "captures": after.captures - before.captures,
        "eager_calls": after.eager_calls,
    }


class Modulate(nn.Module):
    """A norm with scale and shift from outside, as transformers have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Normalises tokens and gives each channel of each sample its scale and shift."""
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class ActivatedNorm(nn.Module):
    """Group norm and SiLU of an image whose channels are neighbours, as between two convolutions of a compiled model."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[batch, height, width, channels]`."""
        return nn.functional.silu(self.norm(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


def replayed_seconds(run: Callable[[int], Any], count: int) -> float:
    """The device's time of one of `count` calls, without the host's."""
    for at in range(count):
        run(at)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.extend(run(at) for at in range(count))
    times = [seconds_of(graph.replay) for _ in range(9)]
    return statistics.median(times[2:]) / count


@torch.no_grad()
def bandwidth() -> Answer:
    """Norms at SDXL's sizes: bytes read and written once, over what a copy of the same bytes reaches."""
    rows: Answer = {}
    cases: list[tuple[str, nn.Module, tuple[int, ...]]] = [
        ("GroupNorm+SiLU", ActivatedNorm(320).half().cuda().eval(), (2, 128, 128, 320)),
        # A block has room for a group of these.
        ("GroupNorm+SiLU at 64x64", ActivatedNorm(640).half().cuda().eval(), (2, 64, 64, 640)),
        ("GroupNorm+SiLU at 32x32", ActivatedNorm(640).half().cuda().eval(), (2, 32, 32, 640)),
        ("LayerNorm+modulate", Modulate(640).eval(), (2, 4096, 640)),
    ]
    for name, module, shape in cases:
        ours = oxidiff.compile(module)
        size = torch.Size(shape).numel() * 2
        count = max(4, L2_BYTES // size)
        given = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(count)]
        rest = [torch.randn(shape[0], shape[-1], dtype=torch.float16, device="cuda") for _ in range(2)]
        extra = () if len(shape) == 4 else tuple(rest)
        taken = replayed_seconds(lambda at, ours=ours, given=given, extra=extra: ours(given[at], *extra), count)
        copied = replayed_seconds(lambda at, given=given: given[at].clone(), count)
        rows[name] = {"share": copied / taken, "us": taken * 1e6, "eager_calls": ours.report().eager_calls}
    return rows


EXTRAS = ("overhead", "bandwidth", "new-size")


@torch.no_grad()
def extras(names: list[str]) -> None:
    """What is measured without a contender; `new-size` is by the process of SDXL."""
    measures: dict[str, Callable[[], Answer]] = {"overhead": overhead, "bandwidth": bandwidth}
    for name in names:
        with alone():
            tell(extra=name, **measures[name]())


# --- all of them ----------------------------------------------------------------------------------------------------


class Process:
    """A child whose answers are read while it runs. It and what it starts end with it."""

    def __init__(self, words: list[str], note: Callable[[Answer], None]) -> None:
        command = [sys.executable, __file__, "--child", *words]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._reader = threading.Thread(target=self._read, args=(note,), daemon=True)
        self._reader.start()

    def _read(self, note: Callable[[Answer], None]) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                note(json.loads(line))

    def wait(self, deadline: float) -> str:
        """Why it has not told everything, if it has not."""
        try:
            status = self._child.wait(max(0.0, deadline - time.perf_counter()))
            why = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = "no time left"
        self.end()
        return why

    def end(self) -> None:
        """Kills what is left of it, and reads what that has told: a child of its own may hold the pipe."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._reader.join(10)


def told(answer: Answer) -> str:
    """An answer about a pair in a line."""
    if "failed" in answer:
        return str(answer["failed"])
    by = ", ".join(f"{name} {count}" for name, count in answer["computed_by"].items())
    line = (
        f"{answer['ratio']:.3f} of its time, {answer['ours_ms']:.2f} against {answer['other_ms']:.2f} ms; steps by {by}"
    )
    notes = [f"eager: {answer['reasons'][0]}"] if answer["reasons"] else []
    notes += [f"launched, not replayed: {why}" for why in answer["no_graphs"][:1]]
    notes += [f"refused: {'; '.join(answer['refused'])}"] if answer["refused"] else []
    return "; ".join([line, f"tuned for {answer['tune_s']:.1f} s", *notes])


def mark(is_met: bool) -> str:
    return "yes" if is_met else "no"


def case_rows(row: str, answers: dict[str, Answer]) -> Iterator[tuple[str, str, str, str, str]]:
    """Lines of the table about one model."""
    case = CASES[row]
    good = {name: answer for name, answer in answers.items() if "failed" not in answer}
    missing = ", ".join(f"{name}: {answer['failed']}" for name, answer in answers.items() if "failed" in answer)
    if not good:
        yield case.figure, "not run", f"{case.bar}", "", missing
        return
    is_ours = all(not answer["eager_calls"] for answer in good.values())
    # NaN is not below anything.
    is_right = all(answer["error"] <= WRONG for answer in good.values())
    reasons = next((answer["reasons"] for answer in good.values() if answer["reasons"]), [])
    best = min(good, key=lambda name: float(good[name]["other_ms"]))
    at = good[best]
    note = ", ".join(f"{name} {answer['other_ms']:.2f} ms" for name, answer in good.items())
    note = f"ours {at['ours_ms']:.2f} ms, {note}; {at['rounds']} rounds; error {at['error']:.1e} of eager's largest"
    note += "; steps by " + ", ".join(f"{name} {count}" for name, count in at["computed_by"].items())
    note += f"; launched, not replayed: {at['no_graphs'][0]}" if at["no_graphs"] else ""
    note += f"; eager: {reasons[0]}" if reasons else ""
    note += f"; {missing}" if missing else ""
    whole = len(good) == len(answers)
    note += "" if is_right else "; wrong results: no time counts"
    met = mark(is_ours and is_right and at["ratio"] <= case.bar) if whole or not is_right else ""
    yield (
        f"{case.figure}: over the best contender ({best})",
        f"{at['ratio']:.2f} ± {at['spread']:.2f}",
        f"{case.bar}",
        met,
        note,
    )
    # The same in every answer.
    note = f"{at['peak_bytes'] >> 20} MiB beyond the weights, graphs included; eager {at['eager_peak_bytes'] >> 20}"
    met = mark(is_ours and is_right and at["peak_ratio"] <= 1.0)
    yield "the same: peak memory over eager", f"{at['peak_ratio']:.2f}", "1.0", met, note
    bar = "25 s" if row == FIRST else ""
    met = mark(is_ours and is_right and at["compile_s"] <= 25) if bar else ""
    note = f"first call {at['first_s']:.2f} s, of it tuned {at['tune_s']:.1f} s"
    yield "the same: compiled cold", f"{at['compile_s']:.1f} s", bar, met, note


def extra_rows(name: str, answer: Answer) -> Iterator[tuple[str, str, str, str, str]]:
    """Lines of the table about everything else."""

    def line(
        what: str, text: str, bar: str, is_met: bool, note: str, of: Answer = answer
    ) -> tuple[str, str, str, str, str]:
        eager = of.get("eager_calls", 0)
        return what, text, bar, mark(is_met and not eager), note + ("; it ran eager" if eager else "")

    if "failed" in answer:
        yield name, "not run", "", "", answer["failed"]
    elif name == "overhead":
        us = answer["us"]
        yield line("host time of a call", f"{us:.0f} us", "60 us", us <= 60, "small SD1.5 UNet, device idle")
    elif name == "again":
        yield line("SDXL in another process, from the cache", f"{answer['s']:.2f} s", "2 s", answer["s"] <= 2, "")
    elif name == "new-size":
        added, beyond = answer["added_ms"], answer["added_bytes"]
        note = f"the second call {answer['second_added_ms']:.0f} ms; captures {answer['captures']}"
        yield line("new size on SDXL: added to the first call", f"{added:.0f} ms", "150 ms", added <= 150, note)
        note = f"graphs {answer['graph_bytes']} bytes"
        yield line("the same: memory added in torch's allocator", f"{beyond} bytes", "0", beyond <= 0, note)
    else:
        for what, row in answer.items():
            share = row["share"]
            text, note = f"{share:.0%}", f"{row['us']:.1f} us"
            yield line(f"{what}: share of a copy's bandwidth", text, "85 %", share >= 0.85, note, row)


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """A cache of this run's own, so that everything is compiled cold, and a lock for who measures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OXIDIFF_CACHE_DIR"] = folder
        os.environ.setdefault(LOCK, os.path.join(folder, "alone"))
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, *EXTRAS], default=[*CASES, *EXTRAS])
    parser.add_argument("--against", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kind, *words = given.child
        {
            "model": lambda: model(words[0], words[1:]),
            "extras": lambda: extras(words),
            "again": lambda: load_again(*words),
        }[kind]()
        return 0
    if (reason := oxidiff.device.no_gpu()) is not None:
        print(f"nothing was measured: {reason}")
        return 0
    deadline = time.perf_counter() + given.limit
    # New sizes are the first row's to measure.
    only = [*given.only, FIRST] if "new-size" in given.only else given.only
    cases: dict[str, dict[str, Answer]] = {name: {} for name in CASES if name in only}
    extra_answers: dict[str, Answer] = {}

    def note(answer: Answer) -> None:
        if "extra" in answer:
            extra_answers[answer.pop("extra")] = answer
            print(answer, flush=True)
            return
        row, against = answer.pop("row"), answer.pop("against")
        cases[row][against] = answer
        print(f"{row} over {against}: {told(answer)}\n  {json.dumps(answer)}", flush=True)

    with own_cache():
        own = [name for name in given.only if name in EXTRAS and name != "new-size"]
        started: dict[str, Process] = {}
        # As Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            if own:
                started["extras"] = Process(["extras", *own], note)
            for name in sorted(cases, key=lambda name: name != FIRST):
                started[name] = Process(["model", name, *given.against], note)
            for name, process in started.items():
                why = process.wait(deadline)
                for missing in given.against if name in cases else own:
                    answers = cases.get(name, extra_answers)
                    if why and missing not in answers:
                        answers[missing] = {"failed": why}
                for missing in ("new-size", "again") if why and name == FIRST else ():
                    extra_answers.setdefault(missing, {"failed": why})
        finally:
            for process in started.values():
                process.end()
    rows = [row for name, answers in cases.items() for row in case_rows(name, answers)]
    rows += [row for name, answer in extra_answers.items() for row in extra_rows(name, answer)]
    lines = [
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, oxidiff {oxidiff.__version__}, "
        f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}",
        "",
        "| figure | measured | bar | met | how |",
        "| --- | --- | --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    print("\n" + "\n".join(lines))
    if given.write:
        before = RESULTS.read_text() if RESULTS.exists() else "# Results on GPUs\n\n`make gpu-bench` adds a table.\n"
        RESULTS.write_text(before + "\n## " + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
