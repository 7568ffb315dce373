"""Whole models against everyone else, each in its best setting: `make bench-contenders`.

    python benches/contenders.py                              # every row, into benches/RESULTS-contenders.md
    python benches/contenders.py --only vae --against openvino

Each pair (a row and a contender) runs in a process of its own, where the contender and oxidiff take turns. OpenVINO and
onnxruntime get the sizes of the row as constants, which they are fastest with; oxidiff has one program for all sizes.
`benches/contenders.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import oxidiff
from measure import DTYPES, ROOT, cpu_name, describe_machine, interleave, ratio_with_spread, run_in_process, table
from oxidiff import testing

RESULTS = ROOT / "benches" / "RESULTS-contenders.md"
FIGURES = ROOT / "benches" / "contenders.json"
Run = Callable[[], Any]
Build = Callable[[str], tuple[nn.Module, dict[str, Any]]]
"""Makes a row's model of a type, and an example call."""


@dataclass(frozen=True)
class Case:
    """One row: a model at one size and dtype, and who it is compared with."""

    figure: str
    model: str
    size: tuple[int, ...]
    bar: float
    dtype: str = "f32"
    batch: int = 1
    memory: str = "balanced"
    overrides: dict[str, Any] = field(default_factory=dict)
    against: tuple[str, ...] = ("eager", "inductor", "openvino", "onnxruntime")


def _dit(hidden: int, tokens: int) -> Case:
    edge = round(tokens**0.5) * 2
    heads = hidden // 128
    layers = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": heads}
    return Case(
        f"Flux-like DiT f32, hidden {hidden}, {tokens} tokens",
        "flux",
        (edge, edge),
        0.85,
        overrides={**layers, "joint_attention_dim": 768},
    )


CASES = {
    "unet": Case("SD1.5 UNet f32, latent 64x64, batch 1", "sd15-unet", (64, 64), 0.58),
    "unet-batch2": Case("SD1.5 UNet f32, latent 64x64, batch 2", "sd15-unet", (64, 64), 0.58, batch=2),
    "unet-bf16": Case("SD1.5 UNet bf16, latent 64x64", "sd15-unet", (64, 64), 0.45, "bf16", against=("eager",)),
    "unet-bf16-fast": Case(
        'SD1.5 UNet bf16, memory="fast"', "sd15-unet", (64, 64), 0.45, "bf16", memory="fast", against=("eager",)
    ),
    "unet-bf16-own": Case(
        "SD1.5 UNet bf16 over our own f32", "sd15-unet", (64, 64), 1.0, "bf16", against=("oxidiff f32",)
    ),
    # Eager has no fast way for f16: a step at 64x64 is minutes.
    "unet-f16": Case("SD1.5 UNet f16, latent 16x16", "sd15-unet", (16, 16), 0.6, "f16", against=("eager",)),
    "unet-f16-own": Case(
        "SD1.5 UNet f16 over our own f32", "sd15-unet", (64, 64), 0.8, "f16", against=("oxidiff f32",)
    ),
    "unet-bf16-all": Case(
        "SD1.5 UNet bf16 over everyone", "sd15-unet", (64, 64), 1.0, "bf16", against=("eager", "inductor", "openvino")
    ),
    "vae": Case("SD1.5 VAE decode f32, latent 64x64", "sd15-vae-decoder", (64, 64), 0.45),
    "vae-bf16": Case(
        "SD1.5 VAE decode bf16", "sd15-vae-decoder", (64, 64), 1.0, "bf16", against=("eager", "inductor", "openvino")
    ),
    "dit-768-1024": _dit(768, 1024),
    "dit-768-4096": _dit(768, 4096),
    "dit-1536-1024": _dit(1536, 1024),
    "dit-1536-4096": _dit(1536, 4096),
}


class Positional(nn.Module):
    """A model with its tensor arguments by position and its first result alone: what exporters take.

    Args:
        module: The model.
        inputs: An example call.
    """

    def __init__(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        self.rest = {name: value for name, value in inputs.items() if name not in self.names}

    def forward(self, *tensors: Tensor) -> Tensor:
        """The first tensor of what the model returns."""
        return testing.flatten_outputs(self.module(**dict(zip(self.names, tensors, strict=True)), **self.rest))[0]


def _eager(build: Build, dtype: str) -> Run:
    module, inputs = build(dtype)
    return lambda: testing.flatten_outputs(module(**inputs))[0]


def _inductor(build: Build, dtype: str) -> Run:
    import torch._inductor.config as config

    module, inputs = build(dtype)
    config.freezing = True
    run = torch.compile(module, mode="max-autotune-no-cudagraphs")
    return lambda: testing.flatten_outputs(run(**inputs))[0]


def _openvino(build: Build, dtype: str) -> Run:
    import openvino

    # It takes the model in f32, and the type that it computes in as a hint.
    module, inputs = build("f32")
    wrapped = Positional(module, inputs)
    tensors = tuple(inputs[name] for name in wrapped.names)
    model = openvino.convert_model(wrapped, example_input=tensors, input=[tuple(t.shape) for t in tensors])
    hints = {"INFERENCE_PRECISION_HINT": dtype, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", hints)
    arrays = [t.numpy() for t in tensors]
    return lambda: torch.from_numpy(compiled(arrays, share_inputs=True, share_outputs=True)[0])


def _onnxruntime(build: Build, dtype: str) -> Run:
    import onnxruntime

    module, inputs = build(dtype)
    wrapped = Positional(module, inputs)
    tensors = tuple(inputs[name] for name in wrapped.names)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(wrapped, tensors, path, dynamo=True, external_data=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    if len(names) != len(tensors):
        raise RuntimeError(f"the export takes {names}, the call has {wrapped.names}")
    arrays = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
    return lambda: torch.from_numpy(session.run(None, arrays)[0])


CONTENDERS = {"eager": _eager, "inductor": _inductor, "openvino": _openvino, "onnxruntime": _onnxruntime}


@torch.no_grad()
def measure(case: Case, against: str, rounds: int) -> dict[str, Any]:
    """Times of oxidiff and of one contender, taken in turns; how far their results are apart."""
    overrides = case.overrides or None

    def build(dtype: str) -> tuple[nn.Module, dict[str, Any]]:
        module = testing.build(case.model, tiny=False, dtype=DTYPES[dtype], overrides=overrides)
        shape = {"batch": case.batch, "size": case.size, "dtype": DTYPES[dtype], "overrides": overrides}
        return module, testing.example_inputs(case.model, tiny=False, **shape)

    def ours(dtype: str) -> Run:
        module, inputs = build(dtype)
        compiled = oxidiff.compile(module, cache=False, tune="off", strict=True, memory=case.memory)
        return lambda: testing.flatten_outputs(compiled(**inputs))[0]

    started = time.perf_counter()
    theirs = ours("f32") if against == "oxidiff f32" else CONTENDERS[against](build, case.dtype)
    theirs()
    prepare_s = time.perf_counter() - started
    started = time.perf_counter()
    mine = ours(case.dtype)
    mine()
    own_prepare_s = time.perf_counter() - started
    error = testing.relative_error(mine(), theirs())
    times = interleave({"oxidiff": mine, against: theirs}, rounds)
    ratio, spread = ratio_with_spread(times, "oxidiff", against)
    return {
        "ratio": ratio,
        "spread": spread,
        "oxidiff_s": times["oxidiff"].median,
        "contender_s": times[against].median,
        "contender_spread": times[against].spread,
        "prepare_s": prepare_s,
        "own_prepare_s": own_prepare_s,
        "apart": error,
        "rounds": rounds,
    }


def _row(name: str, against: str, answer: dict[str, Any]) -> list[str]:
    """A line of a machine's table of contenders."""
    if "error" in answer:
        return [f"`{name}`", against, f"failed: {answer['error']}", "", "", "", "", answer["at"]]
    return [
        f"`{name}`",
        against,
        f"{answer['contender_s']:.3f} s ± {answer['contender_spread']:.0%}",
        f"{answer['oxidiff_s']:.3f} s",
        f"{answer['ratio']:.2f} ± {answer['spread']:.2f}",
        f"{answer['prepare_s']:.0f} s / {answer['own_prepare_s']:.1f} s",
        f"{answer['apart']:.0e}",
        answer["at"],
    ]


def _tables(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The closest contender of every row, and all of them, from a machine's last figures."""
    closest_rows, rows = [], []
    for name, case in CASES.items():
        answers = {against: figures[f"{name}/{against}"] for against in case.against if f"{name}/{against}" in figures}
        rows += [_row(name, against, answer) for against, answer in answers.items()]
        measured = {against: answer for against, answer in answers.items() if "error" not in answer}
        if measured:
            closest = max(measured, key=lambda against: measured[against]["ratio"])
            ratio, spread = measured[closest]["ratio"], measured[closest]["spread"]
            verdict = "yes" if ratio <= case.bar else "no"
            closest_rows.append(
                [f"`{name}`", case.figure, closest, f"{ratio:.2f} ± {spread:.2f}", str(case.bar), verdict]
            )
    return [
        *table(["row", "figure", "closest contender", "oxidiff over it", "bar", "met"], closest_rows),
        "",
        *table(["row", "contender", "its step", "oxidiff's", "ratio", "ready", "apart", "taken"], rows),
    ]


def write_results(figures: dict[str, dict[str, dict[str, Any]]]) -> None:
    """The tables of every machine, from every pair's last figures there."""
    versions = []
    for package in ("openvino", "onnxruntime", "onnx"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = [
        "# Against the contenders",
        "",
        "`make bench-contenders` writes this file: whole models with random weights, oxidiff and one contender at a time "
        "in one process, in turns. A ratio is oxidiff's time over the contender's. Contenders: eager PyTorch; "
        "`torch.compile` with freezing and max-autotune; OpenVINO for latency, in the type of the row, sizes constant; "
        "onnxruntime with all optimisations, sizes constant. *Ready* is the time from the model to the first result: "
        "theirs / ours. *Apart* is how far the two results are from each other, relative. The closest contender is the one "
        "with the largest ratio. Bars are the same for all machines.",
        "",
        "Taken last with:",
        "",
        *describe_machine(),
        f"- {', '.join(versions)}",
        "",
    ]
    for machine, own in sorted(figures.items()):
        lines += [f"## {machine}", "", *_tables(own), ""]
    RESULTS.write_text("\n".join(lines))
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Measure pairs, each in a process of its own, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="ROW")
    parser.add_argument("--against", nargs="+", default=[*CONTENDERS, "oxidiff f32"], metavar="CONTENDER")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved runs of each")
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pair:
        name, against = arguments.pair
        try:
            answer = measure(CASES[name], against, arguments.rounds)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
        print(json.dumps(answer), flush=True)
        return
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in arguments.only:
        for against in CASES[name].against:
            if against not in arguments.against:
                continue
            answer = run_in_process("contenders.py", "--pair", name, against, "--rounds", str(arguments.rounds))
            at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            figures.setdefault(cpu_name(), {})[f"{name}/{against}"] = {**answer, "at": at}
            print(f"{name} / {against}: {answer.get('error') or round(answer['ratio'], 3)}", flush=True)
            write_results(figures)
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
