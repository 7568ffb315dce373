"""Many sizes in random order, one program and one arena: prints the memory after each.

    python examples/sizes.py                 # the tiny twin of the SD1.5 UNet: seconds
    python examples/sizes.py --real          # the SD1.5 UNet itself: 3.3 GiB of weights, minutes on a small CPU

The sizes are those that made users of other compilers sort their work from large to small.
"""

from __future__ import annotations

import argparse
import random

import torch

import oxidiff
from oxidiff import testing
from oxidiff.memory import bytes_text

SIZES = [(1024, 1024), (1024, 1152), (1152, 1360), (1360, 1536)]
"""Pixels; a latent has an eighth of them along each side."""


@torch.no_grad()
def main() -> None:
    """Walk the sizes there and back in random order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the public configuration instead of its tiny twin")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    arguments = parser.parse_args()

    tiny = not arguments.real
    unet = oxidiff.compile(testing.build("sd15-unet", tiny=tiny), memory="low")
    walk = SIZES + SIZES
    random.Random(arguments.seed).shuffle(walk)
    for height, width in walk:
        inputs = testing.example_inputs("sd15-unet", tiny=tiny, size=(height // 8, width // 8))
        estimate = oxidiff.estimate(unet, **inputs)
        unet(**inputs)
        report = oxidiff.report(unet)
        print(
            f"{height}x{width}: needs {bytes_text(estimate.arena_bytes):>9}, arena now {bytes_text(report.pool_bytes):>9}, "
            f"derived weights {bytes_text(report.derived_bytes)}, programs {report.programs}, captures {report.captures}"
        )
    largest = max(row["arena_bytes"] for row in oxidiff.report(unet).sizes)
    print(f"\nthe largest size alone needs {bytes_text(largest)}\n")
    print(oxidiff.report(unet).memory())


if __name__ == "__main__":
    main()
