"""Models of diffusers beside the zoo: small ones of every family, with the inputs of a call."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from oxidiff import testing
from oxidiff.testing import Inputs, Random

__all__ = ["Family", "Inputs", "Random"]


def _make(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """Models of diffusers take a configuration's entries, those of transformers the configuration."""
    config_class = getattr(kind, "config_class", None)
    module: nn.Module = kind(**config) if config_class is None else kind(config_class(**config))
    return module


def _load_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts what a checkpoint holds, as `from_pretrained` does: some modules stay in f32, and so do computed buffers."""
    kept = (
        set(getattr(type(module), "_keep_in_fp32_modules", None) or ())
        if hasattr(module, "register_to_config")
        else set()
    )
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model class in a small configuration."""

    name: str
    """What the test is called by."""
    type_path: str
    """The class, as `package.Class`; an attribute after a colon is the part of it that is called (`...:decoder`)."""
    config: Mapping[str, Any]
    """The constructor's arguments."""
    inputs: Callable[[Random, int, tuple[int, ...]], Inputs]
    """Keyword arguments of a call, from a source of random tensors, a batch and a size."""
    sizes: tuple[tuple[int, ...], ...]
    """Sizes to call it at; one program serves all of them."""
    batches: tuple[int, ...] = (1, 2)
    """Batches to call it with."""
    graphs: int = 1
    """Graphs that a call runs; more than one where a part cannot be captured."""
    fallbacks: tuple[str, ...] = ()
    """What is said of parts that cannot be captured: words of each reason. Empty: there are none."""
    captures_by_size: bool = False
    """Whether a new size is traced again, because the model computes with sizes on the host."""
    programs_by_size: bool = False
    """Whether it is compiled again, too: sizes decide what is computed."""
    exact_in: torch.dtype = torch.float64
    """What the exact result is computed in: f32 where parts of the model ask for it by name and take nothing wider."""
    prepare: Callable[[nn.Module], object] | None = None
    """Done with the module before it is compiled."""

    def build(self, dtype: torch.dtype) -> nn.Module:
        path, _, part = self.type_path.partition(":")
        package, _, name = path.rpartition(".")
        module = _make(getattr(importlib.import_module(package), name), self.config)
        module = getattr(module, part) if part else module
        testing.fill_weights(module)
        _load_as(module.eval().requires_grad_(False), dtype)
        if self.prepare is not None:
            self.prepare(module)
        return module

    def exact(self, module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
        """What `module`, built in any dtype, should give."""
        return testing.reference(module, inputs, self.exact_in)

    def example(self, batch: int, size: tuple[int, ...], dtype: torch.dtype) -> Inputs:
        return self.inputs(Random(1, dtype), batch, size)
