"""Which components of a diffusers pipeline are worth compiling.

A part is named by its path from the pipeline, e.g. ``"unet"`` or ``"vae.decoder"``. An autoencoder is called by its
methods ``encode`` and ``decode``, which decide about tiling, slicing and scaling, and keep doing so: what is compiled
are the networks inside, and the class around them for who calls it as a whole.

Every network of a pipeline is a part, whatever its name: what is left alone is listed here, with the reason.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from ..methods import has_networks

__all__ = ["PARTS", "parts_of"]

_LEFT: Final = {
    "safety_checker": "blacks out finished pictures one by one, as what it finds in each says",
    "motion_adapter": "is weights for a UNet, which are copied into it; its forward does nothing",
    "watermarker": "draws on finished pictures, on the host",
}
"""Components that are not compiled, and why. Without a ``forward`` or a method that runs submodules (the mean and deviation
of an ``image_normalizer``, learned embeddings) a component runs no network; what has no weights is no model."""

PARTS: Final = (
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "text_encoder_4",
    "projection_model",
    "condition_encoder",
    "connectors",
    "image_encoder",
    "image_embedder",
    "unet",
    "unet_2",
    "transformer",
    "transformer_2",
    "unconditional_transformer",
    "controlnet",
    "adapter",
    "prior",
    "prior_prior",
    "prior_text_encoder",
    "prior_image_encoder",
    "decoder",
    "diffusion_decoder",
    "latent_upsampler",
    "temporal_latent_upsampler",
    "latent_upscaler",
    "vae.encoder",
    "vae.decoder",
    "vae",
    "vqvae.encoder",
    "vqvae.decoder",
    "vqvae",
    "vqgan.encoder",
    "vqgan.decoder",
    "vqgan",
    "movq.encoder",
    "movq.decoder",
    "movq",
    "audio_vae.encoder",
    "audio_vae.decoder",
    "audio_vae",
    "vocoder",
)
"""Names that components of many pipelines have, in the order in which they are compiled."""


def parts_of(pipe: object) -> list[str]:
    """The paths of all parts that a pipeline has, those of :data:`PARTS` first."""
    table: dict[str, Any] = {} if isinstance(pipe, nn.Module) else getattr(pipe, "__dict__", {})
    roots = dict.fromkeys(path.partition(".")[0] for path in PARTS)
    roots |= dict.fromkeys(name for name, value in table.items() if not name.startswith("_") and _is_network(value))
    found: list[str] = []
    for root in roots:
        module = getattr(pipe, root, None)
        if isinstance(module, nn.Module) and root not in _LEFT:
            found += (f"{root}.{name}" for name in _within(module))
            found.append(root)
        elif module is not None and not isinstance(module, nn.Module):
            # An object of somebody's around the networks.
            below = (path for path in PARTS if path.startswith(f"{root}."))
            found += (path for path in below if _has_forward(getattr(module, path.partition(".")[2], None)))
    return found


def _is_network(value: object) -> bool:
    """Whether a component computes anything with weights."""
    if not isinstance(value, nn.Module) or next(value.parameters(), None) is None:
        return False
    return type(value).forward is not nn.Module.forward or has_networks(value)


def _within(module: nn.Module) -> list[str]:
    """The networks in an autoencoder, which its methods call."""
    if not any(callable(getattr(type(module), name, None)) for name in ("encode", "decode")):
        return []
    coders = (name for name in module._modules if "encoder" in name or "decoder" in name)
    return [name for name in coders if _has_forward(getattr(module, name))]


def _has_forward(module: object) -> bool:
    return isinstance(module, nn.Module) and type(module).forward is not nn.Module.forward
