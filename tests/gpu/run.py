"""What only a GPU shows: `make gpu-test`, or on a machine without Rust

    pip install oxidiff-*.whl pytest && python tests/gpu/run.py

Every op in every float type and every model of the zoo against eager in f64, then streams, threads, captures, memory,
several devices and compute-sanitizer. One table comes last; the exit status is 1 if a row failed. Where there is no GPU it
says why, and passes. `--stand-in` runs graphs, ops and models behind the stand-in driver of `tests/python` instead.

Long rows have a share of the time, so that each gets some of it. What there is no room for says `not run` or `not finished`,
which is no failure: `--only ROW...` runs rows by themselves, `--match TEXT` the cases of them that are called so, `--part
2/3` every third of these, for processes side by side. A row that has not looked at the time for two minutes hangs, which
is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import oxidiff  # noqa: E402
from oxidiff import testing  # noqa: E402

LIMIT_S = 530.0
"""The whole run, so that it ends within nine minutes."""
GRACE_S = 8.0
"""Seconds beyond that for a row that looks at the time itself."""
SHARES = {"tuning": 0.2, "kernels": 0.2, "ops": 0.45, "models": 0.6}
"""What a row that may take long has of the time that is left, where others follow."""
HANGS_S = 120.0
"""Seconds without a look at the time that say that a row hangs: no step between two looks takes so long."""
TOOLKIT = "/usr/local/cuda"
"""Where CUDA's toolkit usually is."""
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MODEL_ERROR = 2e-5
"""Largest error of an f32 model over its largest value."""
Case = TypeVar("Case")


class Skipped(Exception):
    """Why a row did not run."""


class OutOfTimeError(Exception):
    """The time was over: what a row got done until then, without a failure."""


class Run:
    """Where the rows run, and until when.

    Attributes:
        device: The device.
        deadline: When the time is over.
        match: What names of kernels, ops and models that run contain.
        part: Which of these run, and of how many: ``(1, 3)`` is the second, the fifth, and so on.
        looked: When a row began, or last looked at the time.
    """

    def __init__(self, device: torch.device, deadline: float, match: str = "", part: tuple[int, int] = (0, 1)) -> None:
        self.device = device
        self.deadline = deadline
        self.match = match
        self.part = part
        self.looked = time.perf_counter()

    def chosen(self, cases: Sequence[Case], name_of: Callable[[Case], str]) -> list[Case]:
        """The cases that run: those called as :attr:`match` says, of them every one of this part."""
        at, parts = self.part
        return [case for case in cases if self.match in name_of(case)][at::parts]

    def has_time(self) -> bool:
        self.looked = time.perf_counter()
        return self.looked < self.deadline

    def require_time(self, done: str) -> None:
        """Ends the row here if the time is over."""
        if not self.has_time():
            raise OutOfTimeError(f"the time was over after {done}, without a failure")

    def output_of(self, command: list[str], **variables: str) -> tuple[int, str]:
        """Exit status and output of a process, which ends with all of its children where the time does."""
        environment = {**os.environ, **variables}
        with tempfile.TemporaryFile("w+") as output:
            # Children may outlive it and hold its output: that is a file, and they are of its session.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                while process.poll() is None:
                    if not self.has_time():
                        raise OutOfTimeError(f"the time was over during {' '.join(command[-2:])}")
                    time.sleep(0.1)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            output.seek(0)
            return process.returncode, output.read()


def compiled(module: Any, **options: Any) -> Any:
    """Nothing may run eager, and nothing comes from an earlier run."""
    return oxidiff.compile(module, **{"cache": False, "strict": True, "tune": "off", **options})


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Tensors in a nest of dicts and sequences, on a device and in a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {name: moved(item, device, dtype) for name, item in value.items()}
    return type(value)(moved(item, device, dtype) for item in value) if isinstance(value, list | tuple) else value


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


class Block(nn.Module):
    """A residual block: convolutions, norms, a time embedding."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, t: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        hidden = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return x + self.conv2(nn.functional.silu(self.norm2(hidden))) * factor


def block(run: Run, batch: int = 2, size: int = 32, channels: int = 64) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    made = Block(channels).eval().requires_grad_(False).to(run.device)
    image = torch.randn(batch, channels, size, size, device=run.device)
    return made, (image, torch.randn(batch, channels, device=run.device))


def exact_of(module: nn.Module, args: tuple[torch.Tensor, ...], **kwargs: Any) -> torch.Tensor:
    """What the module gives in f64."""
    wide: torch.Tensor = copy.deepcopy(module).double()(*(a.double() for a in args), **kwargs)
    return wide


def require(ours: Any, module: nn.Module, args: tuple[torch.Tensor, ...], **kwargs: Any) -> None:
    got, exact = ours(*args, **kwargs), exact_of(module, args, **kwargs)
    error = error_of(got, exact)
    assert error < MODEL_ERROR, f"an error of {error:.1e}"


# --- rows -----------------------------------------------------------------------------------------------------------


def ops(run: Run) -> str:
    """Every op in f32, bf16 and f16 at two sizes, against f64."""
    try:
        import test_ops
    except ImportError as error:
        raise Skipped(f"pytest is needed ({error})") from None
    failures, count, without, is_cut = [], 0, 0, False
    cases, types = run.chosen(test_ops.CASES, lambda case: case.name), test_ops.DTYPES
    # Every op in one of the types before any is in another, should the time not do for all.
    order = [(case, types[(at + turn) % len(types)]) for turn in range(len(types)) for at, case in enumerate(cases)]
    for case, dtype in order:
        if not run.has_time():
            is_cut = True
            break
        module = moved_module(case.module(dtype), run.device)
        sizes = [moved(args, run.device) for args in test_ops.arguments(case, dtype)]
        try:
            for args in sizes:
                module(*copy.deepcopy(args))
        except RuntimeError:
            without += 1  # Eager cannot do it on this device either.
            continue
        count += 1
        try:
            ours = compiled(module)
            for args in sizes:
                # Launched kernel by kernel, then as a graph, then the graph with other tensors.
                for _ in range(3):
                    test_ops.check(ours(*moved(copy.deepcopy(args), run.device)), case, module, args, dtype)
        except (AssertionError, RuntimeError, TypeError) as error:
            failures.append(f"{case.name} in {str(dtype)[6:]}: {str(error).splitlines()[0][:200]}")
    assert not failures, f"{len(failures)} of {count} failed:\n" + "\n".join(failures)
    if is_cut:
        run.require_time(f"{count} cases")
    return f"{count} cases, {without} that eager cannot do here"


def moved_module(module: Any, device: torch.device) -> Any:
    return module.to(device) if isinstance(module, nn.Module) else module


def models(run: Run) -> str:
    """Every model of the zoo with small widths, at two sizes, against f64; 16 bits against eager's own error."""
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise Skipped(str(error)) from None
    assert diffusers and transformers
    worst, count, without, failures, is_cut = 0.0, 0, 0, [], False
    for name in run.chosen(testing.names(), str):
        # Nothing is built that there is no time to run: building all that is left takes longer than the watchdog waits.
        if is_cut := not run.has_time():
            break
        wide = testing.build(name, dtype=torch.float64).to(run.device)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if is_cut := not run.has_time():
                break
            module = testing.build(name, dtype=dtype).to(run.device)
            ours = compiled(module)
            for size in testing.ZOO[name].tiny_sizes:
                inputs = moved(testing.example_inputs(name, batch=2, size=size, dtype=dtype), run.device)
                exact = testing.flatten_outputs(wide(**moved(inputs, run.device, torch.float64)))[0]
                eager = error_of(testing.flatten_outputs(module(**inputs))[0], exact)
                bound = MODEL_ERROR if dtype is torch.float32 else bound_of(eager, dtype)
                if bound is None:
                    without += 1
                    continue
                for _ in range(3):
                    error = error_of(testing.flatten_outputs(ours(**inputs))[0], exact)
                    if not error <= bound:
                        failures.append(f"{name} in {str(dtype)[6:]} at {size}: {error:.1e}, eager {eager:.1e}")
                        break
                worst = max(worst, error if dtype is torch.float32 else 0.0)
            count += 1
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures)
    if is_cut:
        run.require_time(f"{count} models and types")
    overflown = f", {without} calls whose numbers eager has not in 16 bits" if without else ""
    return f"{count} models and types, f32 within {worst:.1e}{overflown}"


def bound_of(eager: float, dtype: torch.dtype) -> float | None:
    """The largest error of a model in 16 bits; none where there is nothing to compare with, as eager's is no number."""
    return 1.25 * max(eager, UNIT[dtype]) if math.isfinite(eager) else None


def graphs(run: Run) -> str:
    """Replays with other tensors, numbers, sizes and weights."""
    module, args = block(run)
    ours = compiled(module)
    for factor in (1.0, 0.5, 0.5, -2.0):
        require(ours, module, args, factor=factor)
    for size in (16, 32, 48, 32):
        module_args = block(run, size=size)[1]
        for _ in range(3):
            require(ours, module, module_args)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.normal_(0.1, 0.1)
        require(ours, module, args)
    report = ours.report()
    assert report.specializations >= 3
    return f"{report.specializations} sizes, graphs of {report.graph_bytes} bytes"


def streams(run: Run) -> str:
    """Calls on several streams at once, each with what came before on its own."""
    module, args = block(run, size=128)
    ours, exact = compiled(module), exact_of(module, args)
    ours(*args)
    torch.cuda.synchronize()
    pool = [torch.cuda.Stream() for _ in range(3)]
    results: list[list[torch.Tensor]] = [[] for _ in pool]
    for _ in range(20):
        for stream, kept in zip(pool, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(ours(*args))
    torch.cuda.synchronize()
    assert max(error_of(r, exact) for kept in results for r in kept) < MODEL_ERROR
    # Weights that were derived on one stream go while others read them.
    ours.unload()
    return "3 streams, 20 calls each"


def threads(run: Run) -> str:
    """Five threads on streams of their own, at two sizes, that plan, run and record for the first time side by side: of four
    programs, one after the other."""
    return "; ".join(in_threads(run, channels) for channels in (64, 96, 128, 160))


def in_threads(run: Run, channels: int) -> str:
    run.require_time(f"blocks of fewer than {channels} channels")
    module, _ = block(run, channels=channels)
    ours = compiled(module)
    cases = [block(run, size=size, channels=channels)[1] for size in (16, 40)]
    exact = [exact_of(module, args) for args in cases]
    problems: list[str] = []

    def work() -> None:
        try:
            with torch.no_grad(), torch.cuda.device(run.device), torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(16):
                    got = ours(*cases[turn % 2])
                    if error_of(got, exact[turn % 2]) >= MODEL_ERROR:
                        problems.append(f"a wrong result at turn {turn}")
        except Exception:
            problems.append(traceback.format_exc())

    made = [threading.Thread(target=work) for _ in range(5)]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    assert not problems, problems[0]
    return f"5 threads, {ours.report().programs} program"


def capture(run: Run) -> str:
    """A call inside of `torch.cuda.graph`, replayed beside other calls; a cold one runs eager."""
    module, args = block(run)
    ours, exact = compiled(module, strict=False), exact_of(module, args)
    ours(*args)
    static = tuple(a.clone() for a in args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours(*static)
    for seed in range(3):
        torch.manual_seed(seed)
        for a in static:
            a.copy_(torch.randn_like(a))
        ours(*args)
        graph.replay()
        ours(*args)
        assert error_of(result, exact_of(module, static)) < MODEL_ERROR
        assert error_of(ours(*args), exact) < MODEL_ERROR
    assert ours.report().eager_calls == 0
    cold = compiled(block(run)[0], strict=False)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Libraries that eager uses set themselves up outside of captures.
        module(*static)
        with torch.cuda.graph(graph):
            result = cold(*static)
    graph.replay()
    assert error_of(result, exact_of(module, static)) < 1e-2
    assert cold.report().eager_calls == 1
    return "captured, replayed; a cold call ran eager"


def modes(run: Run) -> str:
    """`inference_mode`, tensors made in it, 0-d CPU tensors, autocast, tensors on another device."""
    with torch.inference_mode():
        module, args = block(run)
        ours = compiled(module)
        assert error_of(ours(*args), exact_of(module, args)) < MODEL_ERROR
        module.conv1.weight.mul_(0.5)  # type: ignore[operator, union-attr]
        assert error_of(ours(*args), exact_of(module, args)) < MODEL_ERROR
    scale = oxidiff.compile(lambda x, s: x * s + 1, cache=False, strict=True)
    x = torch.randn(8, 8, device=run.device)
    assert torch.allclose(scale(x, torch.tensor(3.0)), x * 3 + 1)
    exact = exact_of(module, args)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            error, eager = (error_of(f(*args), exact) for f in (compiled(module), module))
        assert error <= 1.25 * max(eager, UNIT[dtype]), f"autocast: an error of {error:.1e}, eager's is {eager:.1e}"
    return "as eager"


def memory(run: Run) -> str:
    """Workspace shows in `memory_allocated`, and all of it goes."""
    module, args = block(run, size=256)
    module(*args)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(run.device)
    torch.cuda.reset_peak_memory_stats(run.device)
    module(*args)
    torch.cuda.synchronize()
    eager = torch.cuda.max_memory_allocated(run.device) - before
    ours = compiled(module)
    for _ in range(3):
        ours(*args)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated(run.device) - before
    report = ours.report()
    assert held >= report.arena_bytes > 0, f"{held} bytes show of a workspace of {report.arena_bytes}"
    torch.cuda.reset_peak_memory_stats(run.device)
    ours(*args)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(run.device) - before
    ours.unload()
    del ours
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated(run.device) - before
    assert left <= 1 << 20, f"{left} bytes are left"
    return f"peak {peak / eager:.2f} of eager's, {left} bytes left"


def tf32(run: Run) -> str:
    """Where torch allows TF32, an error of no more than eager's; after it is forbidden again, f32 is f32."""
    module, args = block(run)
    ours, exact = compiled(module), exact_of(module, args)
    require(ours, module, args)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        eager = error_of(module(*args), exact)
        for _ in range(3):
            error = error_of(ours(*args), exact)
            assert error <= 1.25 * max(eager, UNIT[torch.float16]), f"an error of {error:.1e}, eager's is {eager:.1e}"
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    require(ours, module, args)
    return f"an error of {error:.1e}, eager's is {eager:.1e}"


def tuning(run: Run) -> str:
    """Ways of libraries are timed and chosen, and what is chosen is right."""
    results = []
    for dtype in (torch.float32, torch.float16):
        run.require_time(f"{len(results)} of two types")
        module, args = block(run, size=64)
        module, args = module.to(dtype), tuple(a.to(dtype) for a in args)
        ours, exact = compiled(module, tune="full", tune_budget_s=30.0), exact_of(module, args)
        for _ in range(3):
            error = error_of(ours(*args), exact)
            assert error <= (MODEL_ERROR if dtype is torch.float32 else 8 * UNIT[dtype]), f"an error of {error:.1e}"
        report = ours.report()
        results.append(f"{report.tune_s:.1f} s for {report.sizes[0]['computed_by']}")
    return "; ".join(results)


class Attention(nn.Module):
    """Attention as models have it: alone, causal, with a mask of bool or one that is added."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mask = {"bool": bias > 0, "added": bias}.get(self.kind)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.kind == "causal")


def kernels(run: Run) -> str:
    """What libraries compute otherwise, on generated kernels: attention on tensor cores, products, convolutions."""

    def own(site: Any, turns: int, deadline: float) -> tuple[str, float, float, int, int, bool]:
        return "kernel", 1.0, 2.0, 0, 1, True

    cases: list[tuple[str, nn.Module, tuple[torch.Tensor, ...]]] = [("a block", *block(run))]
    for size in (40, 64, 128, 160):
        q, bias = torch.randn(2, 3, 150, size, device=run.device), torch.randn(150, 200, device=run.device)
        k, v = (torch.randn(2, 3, 200, size, device=run.device) for _ in range(2))
        for kind in ("alone", "causal", "bool", "added"):
            cases.append((f"attention of {size}, {kind}", Attention(kind), (q, k, v, bias)))
    worst, count = 0.0, 0
    with mock.patch.object(oxidiff.tune, "_measure", own):
        for what, module, args in run.chosen(cases, lambda case: case[0]):
            for dtype in (torch.float16, torch.bfloat16):
                run.require_time(f"{count} cases")
                module, args = module.to(dtype), tuple(a.to(dtype) for a in args)
                ours, exact = compiled(module, tune="full", tune_budget_s=60.0), exact_of(module, args)
                for _ in range(3):
                    error = error_of(ours(*args), exact) / UNIT[dtype]
                    assert error <= 8, f"{what} in {dtype}: an error of {error:.1f} roundings"
                computed_by = ours.report().sizes[0]["computed_by"]
                assert set(computed_by) <= {"kernel"}, f"{what} in {dtype} is computed by {computed_by}"
                worst, count = max(worst, error), count + 1
    return f"{count} cases, an error of {worst:.1f} roundings at most"


def devices(run: Run) -> str:
    """The same module on two GPUs, from a thread whose current device is the first."""
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one GPU")
    torch.cuda.set_device(0)
    for index in (1, 0):
        module, args = block(Run(torch.device("cuda", index), run.deadline))
        ours = compiled(module)
        for _ in range(3):
            require(ours, module, args)
        assert torch.cuda.current_device() == 0
    return "two GPUs"


def sanitizer_found() -> str | None:
    """Where compute-sanitizer is: on the path, else in a toolkit, which nothing puts on the path by itself."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT]
    folders = [os.environ.get("PATH", os.defpath), *(os.path.join(each, "bin") for each in toolkits if each)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitizer(run: Run) -> str:
    """compute-sanitizer's memcheck and racecheck: a small model, launched and replayed, and attention's kernels."""
    tool = sanitizer_found()
    if tool is None:
        raise Skipped(f"compute-sanitizer is neither on the path nor in CUDA_HOME, CUDA_PATH or {TOOLKIT}")
    rows = {"graphs": "kns=_f32_", "kernels": "kns=attention_"}
    # What cuGetProcAddress does not find is an error of the API, and none of ours.
    options = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
    for check, row in itertools.product(("memcheck", "racecheck"), rows):
        if run.deadline - time.perf_counter() < 60:
            raise OutOfTimeError(f"no time was left for {check} of {row}")
        command = [tool, "--tool", check, *options[check], "--error-exitcode", "9", "--kernel-regex", rows[row]]
        # Each tensor is an allocation of the driver's then: what is read behind its end is seen.
        status, output = run.output_of(
            [*command, sys.executable, __file__, "--only", row], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )
        assert status == 0, f"{check} of {row}:\n{output[-3000:]}"
    return "memcheck and racecheck found nothing"


ROWS: dict[str, Callable[[Run], str]] = {
    f.__name__: f
    for f in (graphs, streams, threads, capture, modes, memory, tf32, tuning, kernels, devices, ops, models, sanitizer)
}
ANYWHERE = ("graphs", "tf32", "kernels", "ops", "models")


# --- the run --------------------------------------------------------------------------------------------------------


def part(text: str) -> tuple[int, int]:
    """``2/3`` as the place among that many, from 0.

    Raises:
        ValueError: It is no such text; argparse says so.
    """
    at, parts = (int(word) for word in text.split("/"))
    if not 1 <= at <= parts:
        raise ValueError(text)
    return at - 1, parts


@contextlib.contextmanager
def place(is_stand_in: bool) -> Iterator[torch.device]:
    if not is_stand_in:
        yield torch.device("cuda", 0)
        return
    import stand_in

    with stand_in.in_use(stand_in.stand_in()):
        yield torch.device("cpu")


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--stand-in", action="store_true", help="run what can be behind the stand-in driver")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all rows")
    parser.add_argument("--match", default="", help="of kernels, ops and models only those whose names contain this")
    parser.add_argument(
        "--part", type=part, default=(0, 1), help="of these every N-th: 2/3 is the second, the fifth, ..."
    )
    arguments = parser.parse_args()
    names = [name for name in arguments.only if not arguments.stand_in or name in ANYWHERE]
    if not arguments.stand_in and (reason := oxidiff.device.no_gpu()) is not None:
        print(f"nothing was run: {reason}")
        return 0
    # What is compared with f64 is f32: eager's convolutions are not by default.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    table: list[tuple[str, str, str, str]] = []
    has_failed = False
    # Held by the watchdog for good: the table is then what it was.
    closing = threading.Lock()
    end = time.perf_counter() + arguments.limit
    run = Run(torch.device("cpu"), end, arguments.match, arguments.part)

    def show(what: str) -> None:
        print(f"\noxidiff {oxidiff.__version__}, torch {torch.__version__} on {what}\n")
        print("| row | result | took | what |\n| --- | --- | --- | --- |")
        for row in table:
            print("| " + " | ".join(row) + " |")

    def give_up() -> None:
        """The time is over and a row is not: it is slow, or it hangs, as kernels and waiting threads may."""
        closing.acquire()
        idle = time.perf_counter() - run.looked
        is_hanging, rest = idle >= HANGS_S, names[len(table) :] or ["the end"]
        if is_hanging:
            faulthandler.dump_traceback()
            table.append((rest[0], "FAILED", "", f"it hangs: nothing was heard of it for {idle:.0f} s"))
        else:
            table.append((rest[0], "not finished", "", f"the time was over, {idle:.0f} s after its last look at it"))
        table.extend((name, "not run", "", "no time was left") for name in rest[1:])
        show("a device that hangs" if is_hanging else "a device that was given too little time")
        sys.stdout.flush()
        os._exit(int(is_hanging or has_failed))

    watchdog = threading.Timer(arguments.limit + GRACE_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    with place(arguments.stand_in) as device:
        what = "the stand-in driver" if arguments.stand_in else torch.cuda.get_device_name(device)
        run.device = device
        for name in names:
            started = time.perf_counter()
            share = 1.0 if name == names[-1] else SHARES.get(name, 1.0)
            run.deadline = started + share * (end - started)
            try:
                if run.has_time():
                    result, note = "passed", ROWS[name](run)
                else:
                    result, note = "not run", "no time was left"
            except Skipped as error:
                result, note = "skipped", str(error)
            except OutOfTimeError as error:
                result, note = "not finished", str(error)
            except Exception as error:
                result, note = "FAILED", f"{type(error).__name__}: {error}"
                traceback.print_exc()
            took, first = f"{time.perf_counter() - started:.1f} s", note.splitlines()[0] if note else ""
            with closing:
                has_failed |= result == "FAILED"
                table.append((name, result, took, first))
            print(f"{name}: {result}", flush=True)
    watchdog.cancel()
    show(what)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
