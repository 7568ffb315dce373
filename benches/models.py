"""Every model of the zoo, measured: `make docs-models` rewrites docs/models.md from what this finds.

    python benches/models.py                      # every model
    python benches/models.py --only clip-l flux   # some; the other rows stay

Each model runs in a process of its own, at the public configuration where that and its f64 reference fit into memory;
where not, the row says what was made smaller. `benches/models.json` keeps the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import memory
import oxidiff
from measure import DTYPES, ROOT, cpu_isa, describe_machine, interleave, ratio_with_spread, run_in_process, table
from oxidiff import testing

DOC = ROOT / "docs" / "models.md"
FIGURES = ROOT / "benches" / "models.json"
PARTS = ("errors", "steps", "peaks")
SMALL = 64 << 20
"""Peaks below this vary by a tenth from process to process."""
PROCESSES = 5
"""In which these are taken."""


@dataclass(frozen=True)
class Case:
    """How one model is measured."""

    size: tuple[int, ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    """Changes to the public configuration, where it is too large for an f64 reference."""
    large: tuple[int, ...] | None = None
    """The size at which peak memory is taken, where that is another one."""


CASES = {
    "sd15-unet": Case((16, 16), large=(64, 64)),
    "sd21-unet": Case((16, 16), large=(64, 64)),
    "sdxl-unet": Case((16, 16), {"transformer_layers_per_block": (1, 2, 4)}, large=(64, 64)),
    "sd15-controlnet": Case((16, 16), large=(64, 64)),
    "sdxl-controlnet": Case((16, 16), {"transformer_layers_per_block": (1, 2, 4)}, large=(64, 64)),
    **{f"{family}-vae-decoder": Case((8, 8), large=(64, 64)) for family in ("sd15", "sdxl", "flux")},
    **{f"{family}-vae-encoder": Case((64, 64), large=(512, 512)) for family in ("sd15", "sdxl", "flux")},
    "clip-l": Case((77,)),
    "clip-g": Case((77,)),
    "t5-xxl": Case((128,), {"num_layers": 3}),
    "t5-small": Case((128,)),
    "flux": Case((32, 32), {"num_layers": 1, "num_single_layers": 2}),
    "sd3": Case((32, 32), {"num_layers": 8}),
    "sd35-medium": Case((32, 32), {"num_layers": 8, "dual_attention_layers": (0, 1, 2, 3)}),
    "pixart-alpha": Case((32, 32), {"num_layers": 14}),
    "pixart-sigma": Case((32, 32), {"num_layers": 14}),
}


@torch.no_grad()
def measure(name: str, rounds: int, parts: Sequence[str]) -> dict[str, Any]:
    """Captures, fallbacks, errors (part `"errors"`) and step ratios (part `"steps"`) of one model, in three dtypes."""
    case = CASES[name]
    overrides = case.overrides or None
    answer: dict[str, Any] = {}
    for label, dtype in DTYPES.items():
        module = testing.build(name, tiny=False, dtype=dtype, overrides=overrides)
        inputs = testing.example_inputs(name, tiny=False, size=case.size, dtype=dtype, overrides=overrides)
        exact = testing.reference(module, inputs) if "errors" in parts else None
        gc.collect()
        compiled = oxidiff.compile(module, options=oxidiff.CompileOptions(cache=False, tune="off"))
        found = answer[label] = {"size": list(case.size), "taken": f"{time.strftime('%Y-%m-%d')}, {cpu_isa()}"}
        if exact is not None:
            distance = testing.relative_error if label == "f32" else testing.typical_error
            found["error"] = distance(compiled(**inputs), exact)
            found["own_error"] = distance(module(**inputs), exact)
            del exact
        if "steps" in parts:
            runs = {
                "eager": lambda module=module, inputs=inputs: module(**inputs),
                "compiled": lambda compiled=compiled, inputs=inputs: compiled(**inputs),
            }
            found["ratio"], found["spread"] = ratio_with_spread(interleave(runs, rounds), "compiled", "eager")
            del runs
        report = oxidiff.report(compiled)
        found["captures"], found["variants"], found["eager_calls"] = (
            report.captures,
            report.variants,
            report.eager_calls,
        )
        found["fallbacks"] = [f"{item['module']} {item['op']}: {item['reason']}" for item in report.fallbacks]
        oxidiff.unload(compiled)
        del module, compiled
        gc.collect()
    return answer


@torch.no_grad()
def peak(name: str, what: str) -> dict[str, int]:
    """Peak memory of f32 calls beyond the weights, of eager or of the compiled module (part `"peaks"`)."""
    case = CASES[name]
    overrides = case.overrides or None
    module = testing.build(name, tiny=False, overrides=overrides)
    inputs = testing.example_inputs(name, tiny=False, size=case.large or case.size, overrides=overrides)
    call = module if what == "eager" else oxidiff.compile(module, options=memory.options())
    return memory.growth(lambda: call(**inputs))


def row(name: str, figures: dict[str, Any]) -> list[str]:
    """The line of one model in the table."""
    case = CASES[name]
    size = "x".join(map(str, figures.get("f32", {}).get("size", case.size)))
    changes = ", ".join(f"{key}={value}" for key, value in case.overrides.items())
    if "error" in figures:
        return [f"`{name}`", size, "failed", figures["error"], "", "", "", "", "", "", "", changes, ""]
    reasons = {reason for label in DTYPES for reason in figures[label]["fallbacks"]}
    has_errors, has_steps = "error" in figures["f32"], "ratio" in figures["f32"]
    errors = [f"{figures['f32']['error']:.1e}"] if has_errors else [""]
    for label in ("bf16", "f16"):
        errors.append(f"{figures[label]['error'] / figures[label]['own_error']:.2f}" if has_errors else "")
    ratios = [
        f"{figures[label]['ratio']:.2f} ± {figures[label]['spread']:.2f}" if has_steps else "" for label in DTYPES
    ]
    peaks = figures["f32"].get("peaks")
    over = f"{peaks['compiled']['peak'] / peaks['eager']['peak']:.2f}" if peaks else ""
    if peaks and case.large:
        over += f" at {'x'.join(map(str, case.large))}"
    graphs = str(figures["f32"]["variants"])
    return [
        f"`{name}`",
        size,
        graphs,
        "; ".join(sorted(reasons)) or "none",
        *errors,
        *ratios,
        over,
        changes,
        figures["f32"].get("taken", ""),
    ]


def write_page(figures: dict[str, Any]) -> None:
    """docs/models.md, from every model's last figures."""
    header = [
        "model",
        "size",
        "graphs",
        "fallbacks",
        "f32 error",
        "bf16 error",
        "f16 error",
        "f32 step",
        "bf16 step",
        "f16 step",
        "f32 peak",
        "smaller than public",
        "taken",
    ]
    lines = [
        "# Models",
        "",
        "Written by `make docs-models`. Public configurations with random weights (`oxidiff.testing`), batch 1, inputs "
        "of the size given (latents, pixels for a VAE encoder, tokens for a text encoder).",
        "",
        "- *graphs*: how many graphs the model is captured in; one means that no part of it runs eager.",
        "- *f32 error*: relative to f64 (the promise is 2e-5). *bf16*, *f16 error*: error against f64 over eager's own "
        "(1.25).",
        "- *step*: time of a call over eager's, median of interleaved pairs ± half the distance of the quartiles.",
        "- *peak*: most resident memory beyond the weights in a call, derived weights included, over eager's; each in a "
        f"process of its own, below {SMALL >> 20} MiB the medians of {PROCESSES} each.",
        "- *taken*: when, and with which instructions, errors and steps were; peaks depend little on them.",
        "",
        "Taken last:",
        "",
        *describe_machine(),
        "",
        *table(header, [row(name, figures[name]) for name in CASES if name in figures]),
        "",
    ]
    DOC.write_text("\n".join(lines))
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def peaks_of(name: str) -> dict[str, Any]:
    """Peaks of eager and of the compiled module; of small models the medians of several processes in turn, since the code
    that a process happens to load is counted with the rest."""
    taken: dict[str, list[dict[str, Any]]] = {"eager": [], "compiled": []}
    for turn in range(PROCESSES):
        for what, rows in taken.items():
            found = run_in_process("models.py", "--model", name, "--what", what)
            if "error" in found:
                return found
            rows.append(found)
        if turn == 0 and max(rows[0]["peak"] for rows in taken.values()) >= SMALL:
            break
    return {
        what: {field: statistics.median(row[field] for row in rows) for field in ("peak", "first")}
        for what, rows in taken.items()
    }


def updated(name: str, kept: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model, those that were asked for taken anew."""
    figures = dict(kept)
    if set(arguments.parts) - {"peaks"}:
        options = ("--rounds", str(arguments.rounds), "--parts", *arguments.parts)
        found = run_in_process("models.py", "--model", name, *options)
        if "error" in found:
            return found
        figures = {label: {**kept.get(label, {}), **values} for label, values in found.items()}
    if "peaks" in arguments.parts:
        peaks = peaks_of(name)
        if "error" in peaks:
            return peaks
        figures["f32"] = {**figures["f32"], "peaks": peaks}
    return figures


def main() -> None:
    """Measure models, each in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), metavar="MODEL", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved runs of each kind")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure; the rest stays")
    parser.add_argument("--model", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.what:
        print(json.dumps(peak(arguments.model, arguments.what)), flush=True)
        return
    if arguments.model:
        print(json.dumps(measure(arguments.model, arguments.rounds, arguments.parts)), flush=True)
        return
    unknown = [name for name in arguments.only if name not in CASES]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}")
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in arguments.only:
        started = time.perf_counter()
        figures[name] = updated(name, figures.get(name, {}), arguments)
        print(" ".join(row(name, figures[name])), f"({time.perf_counter() - started:.0f} s)", flush=True)
        write_page(figures)
    print(f"wrote {DOC.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
