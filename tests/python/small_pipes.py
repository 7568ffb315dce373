"""Pipelines of diffusers beside Stable Diffusion's: small ones, with the arguments of a few calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import PIL.Image
import torch
from torch import nn

from families import Family
from families_encoders import ENCODERS
from families_images import IMAGES
from families_unets import UNETS
from families_vaes import AUTOENCODERS, Autoencoder
from families_videos import VIDEOS
from oxidiff import testing

__all__ = [
    "TOKENS",
    "Call",
    "Pipe",
    "as_tensors",
    "calls",
    "drawing",
    "mask",
    "network",
    "picture",
    "prompts",
    "random",
    "tested_net",
    "tested_vae",
]

Call = Callable[[Any], Mapping[str, Any]]
"""Arguments of a call, made for a pipeline: its own text encoders may be asked for embeddings."""

TOKENS = 11
"""Of a prompt."""
_NETS: Mapping[str, Family] = {family.name: family for family in (*IMAGES, *VIDEOS, *UNETS, *ENCODERS)}
_VAES: Mapping[str, Autoencoder] = {vae.name: vae for vae in AUTOENCODERS}


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
    left: tuple[str, ...] = ()
    """Modules that the pipeline does not call as such."""


def network(kind: Any, seed: int = 0, /, **config: Any) -> Any:
    """A model of diffusers or transformers in a configuration, with random weights, in inference mode."""
    config_class = getattr(kind, "config_class", None)
    module: nn.Module = kind(**config) if config_class is None else kind(config_class(**config))
    testing.fill_weights(module, seed)
    return module.eval().requires_grad_(False)


def tested_net(name: str, **changes: Any) -> nn.Module:
    """The model that is tested by this name, with some entries of its configuration changed."""
    if name in testing.ZOO:
        return testing.build(name, overrides=changes)
    known = _NETS[name]
    return dataclasses.replace(known, config={**known.config, **changes}).build(torch.float32)


def tested_vae(name: str, **changes: Any) -> nn.Module:
    """The autoencoder that is tested by this name, with some entries of its configuration changed."""
    known = _VAES[name]
    return dataclasses.replace(known, config={**known.config, **changes}).build(torch.float32)


def as_tensors(made: Any) -> list[torch.Tensor]:
    """What a pipeline made, as tensors: pictures and frames come as arrays, or lists of them."""
    if isinstance(made, (list, tuple)):
        return [tensor for item in made for tensor in as_tensors(item)]
    return [torch.as_tensor(made)]


# --- calls ------------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picture(height: int, width: int) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(7))


def drawing(height: int, width: int) -> PIL.Image.Image:
    """The same for pipelines that take no tensors."""
    return PIL.Image.fromarray((picture(height, width)[0].permute(1, 2, 0) * 255).byte().numpy())


def prompts(width: int, tokens: int = TOKENS, **others: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embeddings of a prompt and of a negative one; of `others`, functions of a seed, too."""
    found: dict[str, torch.Tensor] = {}
    for seed, prefix in enumerate(("", "negative_")):
        found[f"{prefix}prompt_embeds"] = random(1, tokens, width, seed=seed)
        for name, make in others.items():
            found[f"{prefix}{name}"] = make(seed)
    return found


def mask(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Of a prompt that is shorter than the longest one."""
    return (torch.arange(tokens) < tokens - 2 - seed).long()[None]


def calls(arguments: Mapping[str, Any], *changes: Mapping[str, Any]) -> tuple[Call, ...]:
    """Calls with the same arguments but for some; what is a function makes its argument of height and width. `prompts` is
    how many there are, all alike: a pipeline repeats for several results what it encodes itself, not what it is given."""

    def call(_: Any, change: Mapping[str, Any]) -> Mapping[str, Any]:
        given = {"num_inference_steps": 2, "output_type": "np", **arguments, **change}
        count = given.pop("prompts", 1)
        found = {}
        for name, value in given.items():
            value = value(given["height"], given["width"]) if callable(value) else value
            if "prompt" in name and isinstance(value, torch.Tensor):
                value = value.repeat(count, *[1] * (value.dim() - 1))
            found[name] = value * count if "prompt" in name and isinstance(value, list) else value
        return found

    return tuple(functools.partial(call, change=change) for change in changes)
