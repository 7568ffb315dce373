"""Modules that compute something else must never find each other's stored graphs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff

Function = Callable[[Tensor], Tensor]


class Applies(nn.Module):
    """Calls a function that it was given."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Scale:
    """Multiplies by a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    apply = __call__


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclasses.dataclass(slots=True)
class Data:
    """The same as a dataclass."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def _closure(factor: float) -> Function:
    def inner(x: Tensor) -> Tensor:
        return x * factor

    return lambda x: inner(x)


def _held(held: Any) -> Function:
    return lambda x: held(x)


def _nested(factor: float) -> Function:
    outermost = box = {}
    for _ in range(12):
        box["box"] = {}
        box = box["box"]
    box["factor"] = factor

    def function(x: Tensor) -> Tensor:
        box = outermost
        while "box" in box:
            box = box["box"]
        return x * box["factor"]

    return function


def _tuple(factor: float) -> Function:
    pair = collections.namedtuple("pair", "factor")(factor)
    return lambda x: x * pair.factor


def _class(factor: float) -> Function:
    class Holder:
        held = factor

    return lambda x: x * Holder.held


def _module(factor: float) -> Function:
    module = nn.LeakyReLU(factor)
    return lambda x: module(-x)


MAKERS: dict[str, Callable[[float], Any]] = {
    "routine": lambda factor: torch.sin if factor == 2 else torch.cos,
    "partial": lambda factor: functools.partial(torch.mul, other=factor),
    "object": Scale,
    "method": lambda factor: Scale(factor).apply,
    "slots": Slotted,
    "method of slots": lambda factor: Slotted(factor).__call__,
    "dataclass": Data,
    "default": lambda factor: lambda x, held=factor: x * held,
    "closure": _closure,
    "object in a closure": lambda factor: _held(Scale(factor)),
    "method in a closure": lambda factor: _held(Scale(factor).apply),
    "partial in a closure": lambda factor: _held(functools.partial(torch.mul, other=factor)),
    "routine in a closure": lambda factor: _held(torch.sin if factor == 2 else torch.cos),
    "module in a closure": _module,
    "deep": _nested,
    "named tuple": _tuple,
    "class": _class,
    "tensor": lambda factor: _held(functools.partial(torch.mul, other=torch.tensor([factor]))),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MAKERS)
def test_another_function_is_another_graph(name: str) -> None:
    x = torch.randn(5)
    for factor in (2.0, 3.0, 2.0):
        function = MAKERS[name](factor)
        compiled: Any = oxidiff.compile(Applies(function), cache=True)
        torch.testing.assert_close(compiled(x), function(x))
        oxidiff.unload(compiled)
