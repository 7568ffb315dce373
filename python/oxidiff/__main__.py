"""The command line: ``oxidiff doctor``, ``oxidiff bench MODEL``."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import oxidiff
from oxidiff import doctor, testing

__all__ = ["main"]

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="oxidiff", description=oxidiff.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("doctor", help="what was found on this machine, what is missing")
    check.set_defaults(run=_doctor)
    bench = commands.add_parser("bench", help="a model, eager and compiled, in turns")
    bench.add_argument("model", metavar="MODEL", choices=testing.names(), help=", ".join(testing.names()))
    bench.add_argument("--tiny", action="store_true", help="the small model of the same structure")
    bench.add_argument("--dtype", choices=_DTYPES, default="f32")
    bench.add_argument("--batch", type=int, default=1)
    bench.add_argument("--runs", type=int, default=5, help="timed runs of each (%(default)s)")
    bench.set_defaults(run=_bench)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _doctor(_: argparse.Namespace) -> int:
    lines, is_fine = doctor.text()
    print(lines)
    return 0 if is_fine else 1


def _bench(chosen: argparse.Namespace) -> int:
    dtype = _DTYPES[chosen.dtype]
    module = testing.build(chosen.model, dtype=dtype, tiny=chosen.tiny)
    inputs = testing.example_inputs(chosen.model, batch=chosen.batch, dtype=dtype, tiny=chosen.tiny)
    compiled = oxidiff.compile(module)
    with torch.inference_mode():
        first = _seconds(compiled, inputs)
        module(**inputs)
        times = [(_seconds(module, inputs), _seconds(compiled, inputs)) for _ in range(chosen.runs)]
    eager, fast = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{chosen.model}{' (tiny)' if chosen.tiny else ''}, {chosen.dtype}, batch {chosen.batch}")
    print(f"  eager     {eager * 1e3:9.2f} ms")
    print(f"  compiled  {fast * 1e3:9.2f} ms = {fast / eager:.2f} of eager; first call {first:.2f} s")
    for fallback in oxidiff.report(compiled).fallbacks:
        print(f"  eager: {fallback['reason']}")
    return 0


def _seconds(call: Callable[..., Any], inputs: dict[str, Any]) -> float:
    start = time.perf_counter()
    call(**inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
