"""Pipelines of diffusers beside Stable Diffusion's: small ones, with the arguments of a few calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from oxidiff import testing

__all__ = ["Call", "Pipe", "network"]

Call = Callable[[Any], Mapping[str, Any]]
"""Arguments of a call, made for a pipeline: its own text encoders may be asked for embeddings."""


@dataclasses.dataclass(frozen=True)
class Pipe:
    """A pipeline in a small configuration."""

    name: str
    """What the test is called by."""
    make: Callable[[], Any]
    """The pipeline in f32, its weights the same each time."""
    calls: tuple[Call, ...]
    """Calls of several sizes and batches; all but the first must compile nothing."""
    result: str = "images"
    """The field of the pipeline's output that holds what was made."""
    steps: int = 2
    """Steps of each call."""
    guidance: float = 1.0
    """The largest factor that a call multiplies a difference of two model outputs by."""
    fallbacks: tuple[str, ...] = ()
    """What is said of parts that cannot be captured: words of each reason. Empty: there are none."""
    captures_by_size: tuple[str, ...] = ()
    """Parts that compute with sizes on the host, and are captured again for a new one."""


def network(kind: Any, seed: int = 0, /, **config: Any) -> Any:
    """A model of diffusers or transformers in a configuration, with random weights, in inference mode."""
    config_class = getattr(kind, "config_class", None)
    module: nn.Module = kind(**config) if config_class is None else kind(config_class(**config))
    testing.fill_weights(module, seed)
    return module.eval().requires_grad_(False)


def as_tensors(made: Any) -> list[torch.Tensor]:
    """What a pipeline made, as tensors: pictures and frames come as arrays, or lists of them."""
    if isinstance(made, (list, tuple)):
        return [tensor for item in made for tensor in as_tensors(item)]
    return [torch.as_tensor(made)]
