"""Which components of a diffusers pipeline are worth compiling.

A part is named by its path from the pipeline, e.g. ``"unet"`` or ``"vae.decoder"``. An autoencoder is called by its
methods ``encode`` and ``decode``, which decide about tiling, slicing and scaling, and keep doing so: what is compiled
are the two networks inside, and the class around them for who calls it as a whole.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PARTS"]

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
