"""Two checkpoints, one program: both styles of digits from pipelines that are alive at the same time.

    python examples/shared_graph.py --out demo-out

Writes `shared_graph.png` and prints what the second checkpoint cost. The program holds no weights: a second model of the
same architecture attaches to it without a trace, and `bind`/`use` switch one model between both checkpoints.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import oxidiff
from demo import COLUMNS, LABELS, example_step
from digits import DigitsPipeline, draw_grid, side_by_side


def main() -> None:
    """Draw with both checkpoints, twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for shared_graph.png")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    step = example_step()

    pipes = {style: DigitsPipeline.load(style) for style in ("chalk", "ink")}
    weights = {style: pipe.unet.state_dict() for style, pipe in pipes.items()}
    grids = []
    images = {}
    for style, pipe in pipes.items():
        started = time.perf_counter()
        pipe.unet = oxidiff.compile(pipe.unet, cache=False)
        oxidiff.warmup(pipe.unet, *step)
        seconds = time.perf_counter() - started
        images[style] = pipe(LABELS, steps=arguments.steps)
        report = oxidiff.report(pipe.unet)
        print(
            f"{style}: ready after {seconds * 1e3:.0f} ms; {report.captures} captures, {report.programs} programs compiled, "
            f"shared with {report.shared_with} other model(s)"
        )
        grids.append((f"{style}: its own pipeline", draw_grid(images[style], COLUMNS)))

    # One pipeline, both checkpoints: the second set is bound where it is, nothing is copied.
    pipe = pipes["chalk"]
    oxidiff.bind(pipe.unet, weights["ink"], name="ink")
    for style, name in (("ink", "ink"), ("chalk", None)):
        oxidiff.use(pipe.unet, name)
        with torch.no_grad():
            pipe.unet(*step)
            started = time.perf_counter()
            pipe.unet(*step)
            plain = time.perf_counter() - started
            oxidiff.use(pipe.unet, "ink" if name is None else None)
            oxidiff.use(pipe.unet, name)
            started = time.perf_counter()
            pipe.unet(*step)
            switched = time.perf_counter() - started
        again = pipe(LABELS, steps=arguments.steps)
        difference = float(np.abs(again - images[style]).max())
        print(
            f"switched to {style}: a step takes {switched * 1e3:.1f} ms, without a switch {plain * 1e3:.1f} ms; "
            f"difference to its own pipeline {difference:.1e}"
        )
        grids.append((f"{style}: the chalk pipeline, switched", draw_grid(again, COLUMNS)))

    picture = arguments.out / "shared_graph.png"
    side_by_side(grids).save(picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
