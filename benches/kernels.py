"""Every kernel of the registry at real layers' sizes, against the machine and PyTorch: `make bench-kernels`.

    python benches/kernels.py                         # every kernel of the best instruction set, into benches/RESULTS.md
    python benches/kernels.py --only conv_f32         # some of them; the others keep their last figures
    python benches/kernels.py --isa avx2              # forces it here, and limits PyTorch to it
    python benches/kernels.py --threads 1             # by processor time: for a machine that does other work too

Runs of the kernel and of PyTorch alternate in one process; the figures are medians. *of peak* is the time that the
ceiling of arithmetic or of memory allows, whichever is longer, over the time taken: above 100 % a Winograd kernel saves
products, or operands stayed in a cache. `benches/kernels.json` keeps the figures that the tables are made of, by machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from measure import DTYPES, ROOT, Times, describe_machine, machine_label, table, write_section
from oxidiff import _native

FIGURES = ROOT / "benches" / "kernels.json"
ABOUT = (
    "`make bench-kernels` writes this section: each kernel of the registry by itself, at the sizes of SD1.5's UNet (latent "
    "64x64) and VAE decoder, alternating with PyTorch (channels-last). *of peak*: the time that arithmetic or memory allows "
    "over the time taken."
)
Sizes = dict[str, int]


def _linear(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x, w, b = make(s["m"], s["k"]), make(s["n"], s["k"]), make(s["n"])
    return lambda: F.linear(x, w, b)


def _conv(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    image = make(1, s["in"], s["size"], s["size"]).contiguous(memory_format=torch.channels_last)
    weight = make(s["out"], s["in"] // s["groups"], s["kernel"], s["kernel"])
    weight, bias = weight.contiguous(memory_format=torch.channels_last), make(s["out"])

    def run() -> object:
        x = F.interpolate(image, scale_factor=float(s["up"])) if s["up"] > 1 else image
        return F.conv2d(x, weight, bias, s["stride"], s["kernel"] // 2, groups=s["groups"])

    return run


def _attention(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    q, k, v = (make(1, s[rows], s["heads"], s["dim"]).transpose(1, 2) for rows in ("queries", "keys", "keys"))
    return lambda: F.scaled_dot_product_attention(q, k, v)


def _group_norm(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = make(1, s["channels"], s["pixels"], 1).contiguous(memory_format=torch.channels_last)
    weight, bias = make(s["channels"]), make(s["channels"])
    return lambda: F.silu(F.group_norm(x, s["groups"], weight, bias))


def _layer_norm(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x, weight, bias = make(s["rows"], s["cols"]), make(s["cols"]), make(s["cols"])
    return lambda: F.layer_norm(x, (s["cols"],), weight, bias)


def _pointwise(f: Callable[..., object], operands: int) -> Callable[..., Callable[[], object]]:
    def start(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
        values = [make(s["rows"], s["cols"]) for _ in range(operands)]
        return lambda: f(*values)

    return start


def _rms_norm(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x, weight = make(s["rows"], s["cols"]), make(s["cols"])
    return lambda: F.rms_norm(x, (s["cols"],), weight)


def _cumsum(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = make(s["outer"], s["scan"], s["inner"])
    return lambda: torch.cumsum(x, 1)


def _to_channels_last(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    image = make(1, s["channels"], s["pixels"], 1)
    out = torch.empty_like(image, memory_format=torch.channels_last)
    return lambda: out.copy_(image)


def _concat(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x, out = make(s["rows"], s["cols"]), make(s["rows"], s["into"])
    return lambda: out[:, : s["cols"]].copy_(x)


def _unpatch(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    side, channels = s["side"], s["channels"]
    tokens = make(side * side, 4 * channels)
    return lambda: tokens.view(side, side, channels, 2, 2).permute(2, 0, 3, 1, 4).reshape(channels, 2 * side, 2 * side)


def _every_second(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = make(s["rows"], 2 * s["cols"])
    return lambda: x[:, ::2].contiguous()


def _embedding(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    table, indices = make(s["of"], s["cols"]), torch.arange(s["rows"]) * 641 % s["of"]
    return lambda: F.embedding(indices, table)


def _gather(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x, indices = make(s["of"], s["cols"]), torch.arange(s["rows"]) * 641 % s["of"]
    indices = indices[:, None].expand(-1, s["cols"])
    return lambda: torch.gather(x, 0, indices)


def _nearest(memory_format: torch.memory_format) -> Callable[..., Callable[[], object]]:
    def start(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
        image = make(1, s["channels"], s["side"], s["side"]).contiguous(memory_format=memory_format)
        return lambda: F.interpolate(image, scale_factor=float(s["factor"]))

    return start


def _upsample_linear(s: Sizes, make: Callable[..., torch.Tensor]) -> Callable[[], object]:
    image = make(1, s["outer"], s["rows"], s["inner"])
    return lambda: F.interpolate(image, (2 * s["rows"], s["inner"]), mode="bilinear", align_corners=False)


def _unpack(s: Sizes, _: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = torch.randint(256, (s["rows"], 1, s["cols"]), dtype=torch.uint8)
    by = torch.tensor([0, 4], dtype=torch.uint8).reshape(1, 2, 1)
    return lambda: (x >> by) & 15


TORCH: dict[str, Callable[[Sizes, Callable[..., torch.Tensor]], Callable[[], object]]] = {
    "linear": _linear,
    "conv": _conv,
    "attention": _attention,
    "group_norm_silu": _group_norm,
    "layer_norm": _layer_norm,
    "softmax": _pointwise(lambda x: F.softmax(x, -1), 1),
    "add": _pointwise(torch.add, 2),
    "silu": _pointwise(F.silu, 1),
    "gelu": _pointwise(F.gelu, 1),
    "gelu_tanh": _pointwise(lambda x: F.gelu(x, approximate="tanh"), 1),
    "geglu": _pointwise(lambda x, y: x * F.gelu(y), 2),
    "unpack": _unpack,
    "rms_norm": _rms_norm,
    "sum_last": _pointwise(lambda x: x.sum(-1), 1),
    "mean_first": _pointwise(lambda x: x.mean(0), 1),
    "argmax_last": _pointwise(lambda x: x.argmax(-1), 1),
    "argmax_first": _pointwise(lambda x: x.argmax(0), 1),
    "cumsum": _cumsum,
    "to_channels_last": _to_channels_last,
    "transpose": _pointwise(lambda x: x.t().contiguous(), 1),
    "concat": _concat,
    "unpatch": _unpatch,
    "every_second": _every_second,
    "embedding": _embedding,
    "gather": _gather,
    "nearest": _nearest(torch.channels_last),
    "nearest_planes": _nearest(torch.contiguous_format),
    "upsample_linear": _upsample_linear,
}
"""PyTorch's counterpart of every op of the registry's benches that it has one for."""


LEVELS = ["portable", "avx2", "avx512"]
"""Instruction sets, a later one a superset of those before."""
OTHER_DTYPES = {"u8": torch.uint8, "i64": torch.int64, "f64": torch.float64}
"""What kernels take beside :data:`DTYPES`."""


def dtype_of(row: dict[str, Any], op: str) -> torch.dtype | None:
    """What PyTorch's counterpart of a row computes in; nothing where it has none."""
    is_bytes_alone = op == "unpack" and row["dtype"] != "u8"
    # Products of bytes are of quantized operands, which `linear` does not take.
    if op not in TORCH or is_bytes_alone or (op == "linear" and row["dtype"] == "u8"):
        return None
    return DTYPES.get(row["dtype"], OTHER_DTYPES.get(row["dtype"]))


def best_rows(rows: list[dict[str, Any]], isa: str) -> list[dict[str, Any]]:
    """What runs at a level: of each kernel the row of the highest level up to it, as some have no code of their own for it.

    Tiles of a kernel differ between levels, and are the end of its name.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        kernel = re.sub(r"_\d+x\d+$", "", row["name"].split("__")[0])
        level = LEVELS.index(row["isa"])
        if row["is_available"] and level <= LEVELS.index(isa):
            if kernel not in best or level > LEVELS.index(best[kernel]["isa"]):
                best[kernel] = row
    return sorted(best.values(), key=lambda row: row["name"])


def floor_seconds(row: dict[str, Any], bench: dict[str, Any], ceilings: dict[str, Any]) -> tuple[float, str]:
    """What the ceilings allow, and which of them binds."""
    plain = {"u8": "int8_ops"}.get(row["dtype"], "f32_flops")
    amx = {"u8": "int8_amx_ops", "bf16": "bf16_amx_flops", "f16": "f16_amx_flops"}.get(row["dtype"], plain)
    name = "bf16_dot_flops" if "_dot_" in row["name"] else amx if "_amx_" in row["name"] else plain
    # Operands in three and two parts: six and three products of bf16 for one.
    products = next((n for parts, n in (("_x3_", 6), ("_x2_", 3)) if parts in row["name"]), 1)
    name = "bf16_amx_flops" if products > 1 else name
    compute = bench["flops"] * products / ceilings[name] if ceilings[name] else 0.0
    where = ceilings["cache" if bench["bytes"] <= ceilings["cache"]["working_set"] else "memory"]
    memory = bench["bytes"] / max(where["copy"], where["stream_copy"])
    return (compute, "compute") if compute >= memory else (memory, "memory")


def layer_of(row: dict[str, Any], bench: dict[str, Any]) -> str:
    """A line of the table, by name."""
    return f"{row['name']} {bench['op']} {' '.join(f'{name}={size}' for name, size in bench['sizes'].items())}"


@torch.no_grad()
def measure(row: dict[str, Any], index: int, seconds: float, ceilings: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    bench = row["benches"][index]
    ours: list[float] = []
    theirs: list[float] = []
    # One thread is charged for its own work only, whatever else the machine does.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run = _native.KernelBench(row["name"], index)
    dtype = dtype_of(row, bench["op"])
    reference = None
    if dtype is not None:
        reference = TORCH[bench["op"]](bench["sizes"], lambda *shape: torch.rand(*shape).to(dtype) * 2 - 1)
        reference()
    run.run()
    begin = time.perf_counter()
    while len(ours) < 3 or (time.perf_counter() - begin < seconds and len(ours) < 500):
        for times, call in ((ours, run.run), (theirs, reference)):
            if call is not None:
                started = clock()
                call()
                times.append(clock() - started)
    floor, bound = floor_seconds(row, bench, ceilings)
    median = Times(ours).median
    return {
        "kernel": row["name"],
        "layer": layer_of(row, bench).split(" ", 1)[1],
        "ms": median * 1e3,
        "spread": Times(ours).spread,
        "rate": (bench["flops"] or bench["bytes"]) / median / 1e9,
        "unit": "GFLOP/s" if bench["flops"] else "GB/s",
        "of_peak": floor / median,
        "bound": bound,
        "over_torch": median / Times(theirs).median if theirs else None,
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def lines_of(machines: dict[str, dict[str, Any]]) -> list[str]:
    """The section of the results."""
    header = ["kernel", "layer", "ms", "rate", "of peak", "bound", "over torch", "taken"]
    lines = [ABOUT]
    for machine, figures in sorted(machines.items()):
        rows = []
        for f in figures["rows"].values():
            over = "-" if f["over_torch"] is None else f"{f['over_torch']:.2f}"
            rate = f"{f['rate']:.0f} {f['unit']}"
            shown = f"{f['ms']:.3f} ± {f['spread']:.0%}"
            rows.append([f"`{f['kernel']}`", f["layer"], shown, rate, f"{f['of_peak']:.0%}", f["bound"], over, f["at"]])
        lines += ["", f"### {machine}", "", "Taken last with:", "", *figures["about"], "", *table(header, rows)]
    return lines


def about(ceilings: dict[str, Any]) -> list[str]:
    """When, where, and what the machine does at most."""
    giga = {name: value / 1e9 for name, value in ceilings.items() if isinstance(value, float) and value}
    parts = [f"{name.replace('_', ' ')} {value:.0f} G/s" for name, value in giga.items()]
    for name in ("memory", "cache"):
        at = ceilings[name]
        rates = ", ".join(f"{kind.replace('_', ' ')} {at[kind] / 1e9:.0f}" for kind in ("read", "copy", "stream_copy"))
        parts.append(f"{at['working_set'] >> 20} MiB: {rates} GB/s")
    return [
        *describe_machine(),
        f"- ceilings, {ceilings['threads']} threads: {'; '.join(parts)}",
        *(["- times are processor time of one thread"] if ceilings["threads"] == 1 else []),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels and layers whose name contains it")
    parser.add_argument("--isa", choices=["avx512", "avx2", "portable"], help="instruction set of both sides")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1: processor time is measured")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one line")
    parser.add_argument("--print", action="store_true", help="leave the results alone")
    arguments = parser.parse_args()
    if arguments.isa and os.environ.get("OXIDIFF_ISA") != arguments.isa:
        limits = {} if arguments.isa == "avx512" else {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **limits, "OXIDIFF_ISA": arguments.isa})
    torch.set_num_threads(arguments.threads)
    _native.set_num_threads(arguments.threads)
    ceilings = _native.ceilings()
    machines: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    # The number of threads too: processor time of one, or the time that all take.
    where = f"{machine_label()}, kernels for {ceilings['isa']}"
    known = machines.get(where, {"rows": {}})["rows"]
    rows = _native.kernels()
    layers = {layer_of(row, bench) for row in rows for bench in row["benches"]}
    known = {layer: figure for layer, figure in known.items() if layer in layers}
    figures: dict[str, Any] = {"about": about(ceilings), "rows": known}
    machines[where] = figures
    print("\n".join(figures["about"]))
    for row in best_rows(rows, ceilings["isa"]):
        for index, bench in enumerate(row["benches"]):
            layer = layer_of(row, bench)
            if arguments.only not in layer:
                continue
            f = measure(row, index, arguments.seconds, ceilings)
            figures["rows"][layer] = f
            over = "" if f["over_torch"] is None else f"{f['over_torch']:5.2f} of torch"
            peak = f"{f['of_peak']:5.0%} of {f['bound']} peak"
            print(f"{layer:100} {f['ms']:9.3f} ms {f['rate']:6.0f} {f['unit']:7} {peak} {over}", flush=True)
            if not arguments.print:
                # Row by row, in the registry's order: a run that is cut short keeps what it measured.
                figures["rows"] = dict(sorted(figures["rows"].items()))
                FIGURES.write_text(json.dumps(machines, indent=1, sort_keys=True) + "\n")
                write_section("Kernels", lines_of(machines))


if __name__ == "__main__":
    main()
