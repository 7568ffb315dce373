"""A server that starts twice: the first start captures, compiles and tunes, the second takes all of it from a file.

    python examples/serve_restart.py                       # a small UNet, seconds
    python examples/serve_restart.py --model sd15-unet     # the real size
    python examples/serve_restart.py --model sdxl-unet --size 64 64

Each start is a process of its own: it builds the network, makes it ready, answers two requests of different sizes, and
prints what each step took. The artifact has no weights and is far smaller than they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import oxidiff
from oxidiff import testing


def timed(call: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def serve(arguments: argparse.Namespace) -> dict[str, float]:
    """One start: the server's own part, in its process."""
    path = Path(arguments.artifact)
    tiny = not arguments.real
    unet = testing.build(arguments.model, tiny=tiny)
    size = tuple(arguments.size) if arguments.size else None
    request = testing.example_inputs(arguments.model, tiny=tiny, size=size)
    # The weights' pages are there before anything is timed, as after reading a checkpoint.
    weight_bytes = sum(p.numel() * p.element_size() for p in unet.parameters())
    options = {"tune": arguments.tune, "cache": True}
    took: dict[str, float] = {"weights MB": weight_bytes / 1e6}

    compiled: Any = oxidiff.compile(unet, **options)
    if path.exists():
        took["load the artifact, s"] = timed(lambda: compiled.load_graph(path))
    took["get ready, s"] = timed(lambda: compiled.warmup(**request))
    took["first answer, s"] = timed(lambda: compiled(**request))
    took["second answer, s"] = timed(lambda: compiled(**request))
    report = oxidiff.report(compiled)
    took |= {"of that tuning, s": report.tune_s, "captures": report.captures}
    if not path.exists():
        took["save the artifact, s"] = timed(lambda: compiled.save_graph(path))
    took["artifact MB"] = path.stat().st_size / 1e6
    return took


def main() -> None:
    """Starts the server twice and shows both starts side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=testing.names(), help="at its real size")
    parser.add_argument("--size", type=int, nargs="+", help="height and width of the latents")
    parser.add_argument("--tune", default="quick", choices=("off", "cached", "quick", "full"))
    parser.add_argument("--artifact", help=argparse.SUPPRESS)
    parser.add_argument("--real", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.real = arguments.model is not None if arguments.artifact is None else arguments.real
    arguments.model = arguments.model or "sd15-unet"
    if arguments.artifact:
        print(json.dumps(serve(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OXIDIFF_CACHE_DIR": str(Path(folder) / "cache")}
        command = [sys.executable, __file__, "--artifact", str(Path(folder) / "unet.oxi"), "--model", arguments.model]
        command += ["--tune", arguments.tune, *(["--real"] if arguments.real else [])]
        command += ["--size", *map(str, arguments.size)] if arguments.size else []
        starts = []
        for name in ("first start", "restart"):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            starts.append((name, json.loads(done.stdout.splitlines()[-1])))
    rows = dict.fromkeys(key for _, took in starts for key in took)
    print(f"{'':22}" + "".join(f"{name:>14}" for name, _ in starts))
    for row in rows:
        cells = (f"{took[row]:14.3f}" if row in took else f"{'-':>14}" for _, took in starts)
        print(f"{row:22}" + "".join(cells))


if __name__ == "__main__":
    main()
