"""Small modules that the contract tests share, and the tolerance they are compared with."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oxidiff import testing
from oxidiff.dispatch import find_dispatcher

# The longest reduction in these nets has 72 terms: sqrt(72) roundings of 2^-24, with a margin for three layers.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def shallow(name: str, **options: Any) -> Any:
    """A model of the zoo, UNets and ControlNets with each layer of a block once: for tests of what is around a model, which
    spend most of their time on captures."""
    overrides = {"layers_per_block": 1} if name.endswith(("unet", "controlnet")) else {}
    return testing.build(name, overrides=overrides, **options)


def counting(x: Tensor) -> Tensor:
    """What a program has in a file beside its modules'."""
    for _ in range(x.shape[0] % 4):
        x = x + 1
    return x


def patched_forward(self: Any, x: Tensor, step: Tensor) -> Tensor:
    """What a library puts in the place of a ``forward``, from a file of its own."""
    x = self.first(x) + step.to(x.dtype).cos()
    for block in self.blocks:
        x = block(x)
    return self.last(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Convolution, norm, activation, linear; scales by an attribute and by an argument."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.act = nn.SiLU()
        self.linear = nn.Linear(channels, channels)
        self.scale = 1.5

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return self.linear(x.permute(0, 2, 3, 1)) * self.scale * factor


class Returns(nn.Module):
    """Calls a function of its input and its weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x, self.weight)


def image(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers; a batch of two 12x10 images by default."""
    return torch.randn(shape or (2, 3, 12, 10), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Any, expected: Any) -> None:
    """Same structure, shapes, dtypes, order in memory, and values up to rounding."""
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(theirs, Tensor) and not theirs.is_sparse:
            assert lies_as(mine, theirs), (mine.stride(), theirs.stride())


def lies_as(mine: Tensor, theirs: Tensor) -> bool:
    """Whether the dimensions of two tensors come in the same order in memory, but for those in which the other has one
    place for all."""
    dims = [i for i, (step, size) in enumerate(zip(theirs.stride(), theirs.shape, strict=True)) if step and size > 1]
    orders = [sorted(dims, key=lambda i: (-tensor.stride(i), i)) for tensor in (mine, theirs)]
    return orders[0] == orders[1] or not theirs.numel()


def programs_go_with(held: list[Any]) -> bool:
    """Whether the programs of the compiled module that a list alone holds go with it, without the collector's help."""
    gone = weakref.ref(find_dispatcher(held[0]).engines()[0])  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        held.clear()
        return gone() is None
    finally:
        gc.enable()
