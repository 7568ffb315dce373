"""Whether sums in f16 keep the error contract: what processors with AVX512-FP16 would do at twice the rate of f32.

    python benches/f16_sums.py

Products are added up in f16 by fused multiply-adds, in chains of so many terms, and each chain is added to a sum in f32.
The arithmetic is emulated, one rounding to f16 per term, so that it needs no such processor. A row is a product of
matrices, or a small model: every linear layer and convolution of a run in f32 whose products' operands are rounded to f16 is
computed by chains. `oxidiff` is what a compiled f16 module is off today; a chain's errors come on top:
`sqrt(oxidiff**2 + chains**2 - exact sums**2)`. All errors are over those of eager PyTorch in f16, against f64.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import oxidiff
from measure import table
from oxidiff import testing

CHAINS = (2, 4, 8)
MODELS = ("sd15-unet", "sdxl-unet", "sd15-vae-decoder", "flux", "sd3", "clip-l")
SEEDS = 3


def chained(x: Tensor, weight: Tensor, length: int) -> Tensor:
    """``x @ weight.T`` of values that f16 has, summed in chains of `length` terms; f32."""
    left, right = x.double().numpy(), weight.double().numpy().T
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for first in range(0, left.shape[1], length):
        chain = np.zeros(total.shape)
        for k in range(first, min(first + length, left.shape[1])):
            # A product of two f16 and a sum with a third are exact in f64, or nearly: one rounding.
            chain = (chain + left[:, k, None] * right[k]).astype(np.float16).astype(np.float64)
        total += chain.astype(np.float32)
    return torch.from_numpy(total)


def rounded(x: Tensor) -> Tensor:
    """To f16 and back."""
    return x.half().to(x.dtype)


class Products(TorchFunctionMode):
    """Linear layers and convolutions of rounded operands: by chains of `length` terms, or exact without one."""

    def __init__(self, length: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.length is None:
            return (rows.double() @ weight.double().T).float()
        return chained(rows, weight, self.length)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            bias = rest[0] if rest else (kwargs or {}).get("bias")
            out = self._product(rounded(x).reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        elif func is torch.conv2d:
            x, weight, bias, stride, padding, dilation, groups = (*args, None, 1, 0, 1, 1)[:7]
            if groups != 1:
                return func(*args, **(kwargs or {}))
            windows = F.unfold(rounded(x), weight.shape[2:], dilation, padding, stride)
            out = self._product(windows.transpose(1, 2).reshape(-1, windows.shape[1]), weight.flatten(1))
            high = (x.shape[2] + 2 * padding[0] - weight.shape[2]) // stride[0] + 1
            out = out.reshape(x.shape[0], high, -1, weight.shape[0]).permute(0, 3, 1, 2)
            bias = None if bias is None else bias[:, None, None]
        else:
            return func(*args, **(kwargs or {}))
        return out if bias is None else out + bias


@torch.no_grad()
def of_product(terms: int) -> list[float]:
    """The errors of one product of random numbers."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, terms).half(), (torch.randn(320, terms) / terms**0.5).half()
    exact = x.double() @ weight.double().T
    own = testing.relative_error(F.linear(x, weight), exact)
    once = testing.relative_error((x.double() @ weight.double().T).half(), exact)
    sums = [testing.relative_error(chained(x, weight, length).half(), exact) for length in CHAINS]
    return [error / own for error in (once, *sums)]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors in a nest of dicts and sequences, in a dtype."""
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, value)


@torch.no_grad()
def of_model(name: str) -> list[float]:
    """The errors of a model with small widths, means over weights."""
    ratios: list[list[float]] = []
    for seed in range(SEEDS):
        half, inputs = (
            testing.build(name, dtype=torch.float16, seed=seed),
            testing.example_inputs(name, dtype=torch.float16),
        )
        exact = copy.deepcopy(half).double()(**cast(inputs, torch.float64))
        own = testing.typical_error(half(**inputs), exact)
        now = testing.typical_error(oxidiff.compile(half, cache=False, strict=True)(**inputs), exact)
        wide, arguments = copy.deepcopy(half).float(), cast(inputs, torch.float32)
        errors = []
        for length in (None, *CHAINS):
            with Products(length):
                result = wide(**arguments)
            errors.append(testing.typical_error(result, exact))
        least = errors[0]
        added = [math.sqrt(max(now**2 + error**2 - least**2, 0.0)) for error in errors]
        ratios.append([error / own for error in added])
    return [statistics.mean(column) for column in zip(*ratios, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    rows = [(f"64x{terms} by {terms}x320", of_product(terms)) for terms in (320, 1280, 5120)]
    for name in arguments.only:
        rows.append((f"{name}, small", of_model(name)))
        print(name, flush=True)
    header = ["error over eager's", "sums in f32", *(f"chains of {length}" for length in CHAINS)]
    print("\n".join(table(header, [[what, *(f"{ratio:.2f}" for ratio in ratios)] for what, ratios in rows])))


if __name__ == "__main__":
    main()
