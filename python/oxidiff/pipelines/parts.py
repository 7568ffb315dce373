"""Which components of a diffusers pipeline are worth compiling.

A part is named by its path from the pipeline, e.g. ``"unet"`` or ``"vae.decoder"``. Of an autoencoder only the two
networks are compiled: the class around them decides about tiling, slicing and scaling and keeps doing so.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PARTS"]

PARTS: Final = (
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "image_encoder",
    "unet",
    "unet_2",
    "transformer",
    "transformer_2",
    "controlnet",
    "adapter",
    "prior",
    "prior_prior",
    "prior_text_encoder",
    "decoder",
    "vae.encoder",
    "vae.decoder",
    "vqgan.encoder",
    "vqgan.decoder",
    "movq.encoder",
    "movq.decoder",
)
