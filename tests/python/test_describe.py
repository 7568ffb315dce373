"""Modules that compute something else must never find each other's stored graphs."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import dis
import functools
import inspect
import json.decoder
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from oxidiff.outside import globals_read

Function = Callable[[Tensor], Tensor]


class Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


silu = Silu()


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


def _times(factor: float, _: Any, x: Tensor) -> Tensor:
    return x * factor


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


def _table(factor: float) -> Function:
    class Registry:
        backends: ClassVar[dict[str, Function]] = {"native": _closure(factor)}

    return lambda x: Registry.backends["native"](x)


def _named(factor: float) -> Function:
    class Processor:
        mode = "eager"

        def run_eager(self, x: Tensor) -> Tensor:
            return x * factor

        def __call__(self, x: Tensor) -> Tensor:
            return getattr(self, f"run_{self.mode}")(x)

    return Processor()


def _named_by_attribute(factor: float) -> Function:
    class Processor:
        def __init__(self) -> None:
            self.runner = "eager"

        def eager(self, x: Tensor) -> Tensor:
            return x * factor

        def __call__(self, x: Tensor) -> Tensor:
            return getattr(self, self.runner)(x)

    return Processor()


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
    "partial as a method": lambda factor: types.MethodType(functools.partial(_times, factor), Scale(1.0)),
    "partial in a closure": lambda factor: _held(functools.partial(torch.mul, other=factor)),
    "routine in a closure": lambda factor: _held(torch.sin if factor == 2 else torch.cos),
    "module in a closure": _module,
    "deep": _nested,
    "named tuple": _tuple,
    "class": _class,
    "table of a class": _table,
    "method by a name that is put together": _named,
    "method by a name in an attribute": _named_by_attribute,
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


@torch.no_grad()
def test_a_method_that_is_no_function_is_stored() -> None:
    for captures in (1, 0):
        compiled: Any = oxidiff.compile(Applies(MAKERS["partial as a method"](2.0)), cache=True)
        compiled(torch.randn(5))
        assert oxidiff.report(compiled).captures == captures
        oxidiff.unload(compiled)


@torch.no_grad()
@pytest.mark.parametrize(
    ("space", "name", "module"),
    [(F, "group_norm", nn.GroupNorm(2, 4)), (torch, "cat", Applies(lambda x: torch.cat([x, x])))],
    ids=("called by torch", "called by a module"),
)
def test_a_replaced_function_of_torch_is_another_graph(
    space: Any, name: str, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library of attention asks for: `F.scaled_dot_product_attention = ...`."""
    x = torch.randn(3, 4, 5)
    original = getattr(space, name)
    for factor in (None, 0.5, 2.0, None):
        function = original if factor is None else lambda *args, factor=factor: original(*args) * factor
        monkeypatch.setattr(space, name, function)
        compiled: Any = oxidiff.compile(module, cache=True)
        torch.testing.assert_close(compiled(x), module(x))
        oxidiff.unload(compiled)


class ActivatesByGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, silu(x))


@torch.no_grad()
def test_an_attribute_named_like_a_global(tmp_path: Path) -> None:
    """What calls `F.silu` does not use the `silu` of its file, a module that is in no tree."""
    compiled: Any = oxidiff.compile(Silu())
    compiled(torch.randn(5))
    compiled.save_graph(tmp_path / "graph")
    compiled = oxidiff.compile(ActivatesByGlobal())
    compiled(torch.randn(5))
    with pytest.raises(oxidiff.ArtifactError, match="Silu is used that is no submodule"):
        compiled.save_graph(tmp_path / "other")


@pytest.mark.parametrize("module", [argparse, inspect, collections, json.decoder])
def test_globals_are_found_as_dis_finds_them(module: types.ModuleType) -> None:
    names = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    assert module.__file__ is not None
    waiting = [compile(Path(module.__file__).read_text(encoding="utf-8"), module.__file__, "exec")]
    for code in waiting:
        expected = {i.argval for i in dis.get_instructions(code) if i.opname in names}
        assert set(globals_read(code)) == expected, code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    assert len(waiting) > 10
