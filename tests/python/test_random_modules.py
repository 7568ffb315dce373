"""Random modules that compute with sizes, at random sizes, against eager: a graph serves no call that it is not for."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch

import oxidiff
from nets import lies_as
from oxidiff import testing
from random_modules import Chain, arguments, random_chain, reading_chain, sizes

pytestmark = pytest.mark.usefixtures("one_long_capture")

CALLS = 10
SEEDS = (*range(24), 78, 118, 147, 290, 299, 364, 381, 444, 746, 806, 1198)
"""The first ones, and those with which sizes were once served that a graph was not for."""


def leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in leaves(value)]
    if isinstance(result, (list, tuple)):
        return [leaf for value in result for leaf in leaves(value)]
    return [torch.tensor(float(result))]


def error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return float((output.double() - exact.double()).abs().max()) if exact.numel() else 0.0


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_as_eager_at_all_sizes(seed: int) -> None:
    draw = random.Random(seed)
    check_calls(random_chain(draw), draw)


@pytest.mark.parametrize("seed", range(24))
@torch.no_grad()
def test_as_eager_whatever_is_read(seed: int) -> None:
    draw = random.Random(seed)
    check_calls(reading_chain(draw), draw)


def check_calls(module: Chain, draw: random.Random) -> None:
    is_nested = draw.random() < 0.2
    exact_module = copy.deepcopy(module).double()
    compiled = oxidiff.compile(module, cache=False, tune="off")
    served = 0
    for at in sizes(draw, CALLS):
        inputs = arguments(module, at, is_nested)
        try:
            expected = leaves(module(**inputs))
        except (RuntimeError, ValueError, IndexError):
            # Not a size of this module.
            continue
        exact = leaves(exact_module(**testing.widen(inputs, torch.float64)))
        with warnings.catch_warnings():
            # Steps that look at values run in pieces, and say so.
            warnings.simplefilter("ignore", oxidiff.FallbackWarning)
            outputs = leaves(compiled(**inputs))
        assert [o.shape for o in outputs] == [e.shape for e in expected], (module.steps, at)
        for output, eager, wanted in zip(outputs, expected, exact, strict=True):
            assert lies_as(output, eager), (module.steps, at, output.stride(), eager.stride())
            largest = float(wanted.double().abs().max()) if wanted.numel() else 0.0
            assert error(output, wanted) <= max(2e-5 * largest, 2 * error(eager, wanted)), (module.steps, at)
        served += 1
    assert served
    assert not any("internal" in f["reason"] for f in oxidiff.report(compiled).fallbacks), module.steps
