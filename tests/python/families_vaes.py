"""Autoencoders beside the zoo, small: encoded and decoded by their own methods, with the networks inside compiled."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from families import Family, Inputs, Random
from oxidiff import testing

Size = tuple[int, ...]
MakeInputs = Callable[[Random, int, Size], Inputs]


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """An autoencoder in a small configuration, and the calls of its methods."""

    name: str
    """What the test is called by."""
    type_path: str
    """The class, as `package.Class`."""
    config: Mapping[str, Any]
    """The constructor's arguments."""
    pixels: MakeInputs | None
    """Keyword arguments of `encode`; `None` if that is not compiled."""
    latents: MakeInputs | None
    """Keyword arguments of `decode`; `None` if that is not compiled."""
    sizes: tuple[Size, ...]
    """Sizes of the latents; one program of each network serves all of them."""
    batches: tuple[int, ...] = (1, 2)
    """Batches to call it with."""
    programs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Programs of a network, `encoder` or `decoder`, if not one: those that it takes for kinds of calls."""
    programs_by_size: bool = False
    """Whether sizes decide what is computed: it splits what is large."""
    fallbacks: tuple[str, ...] = ()
    """What is said of parts that cannot be captured: words of each reason."""
    dtypes: tuple[str, ...] = ("f32", "bf16")
    """What it is tried in."""
    prepare: Callable[[nn.Module], object] | None = None
    """Done with the autoencoder before it is compiled."""

    def build(self, dtype: torch.dtype) -> nn.Module:
        package, _, name = self.type_path.rpartition(".")
        module: nn.Module = getattr(importlib.import_module(package), name)(**self.config)
        testing.fill_weights(module)
        module = nn.Module.to(module.eval().requires_grad_(False), dtype)
        if self.prepare is not None:
            self.prepare(module)
        return module

    def calls(self) -> list[tuple[str, MakeInputs]]:
        """Methods that are called, and what with."""
        both = (("encode", self.pixels), ("decode", self.latents))
        return [(method, make) for method, make in both if make is not None]


def result(module: Any, method: str, inputs: Inputs) -> torch.Tensor:
    """What a method of an autoencoder gives: an image, latents, or the mean and variance of latents."""
    (value,) = getattr(module, method)(**inputs, return_dict=False)[:1]
    return getattr(value, "parameters", value)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _pixels(scale: int, channels: int = 3) -> MakeInputs:
    """An image of `scale` pixels by latent."""
    return lambda random, batch, size: {"x": random.normal(batch, channels, *(scale * edge for edge in size)).tanh()}


def _latents(channels: int) -> MakeInputs:
    return lambda random, batch, size: {"z": random.normal(batch, channels, *size)}


def _frames(scale: int, each: int, channels: int = 3) -> MakeInputs:
    """A video of `scale` pixels by latent and `each` frames by latent, one for the first."""

    def inputs(random: Random, batch: int, size: Size) -> Inputs:
        frames, height, width = size
        shape = (1 + each * (frames - 1), scale * height, scale * width)
        return {"x": random.normal(batch, channels, *shape).tanh()}

    return inputs


def _video_batch(random: Random, batch: int, size: Size) -> Inputs:
    """Frames one after the other along the batch."""
    frames, height, width = size
    return {"z": random.normal(batch * frames, 4, height, width), "num_frames": frames}


def _masked(random: Random, batch: int, size: Size) -> Inputs:
    edges = [2 * edge for edge in size]
    mask = torch.zeros(batch, 1, *edges, dtype=random.dtype)
    mask[..., : edges[1] // 2] = 1
    image = random.normal(batch, 3, *edges).tanh()
    return {**_latents(4)(random, batch, size), "image": image, "mask": mask}


def _timed(channels: int) -> MakeInputs:
    def inputs(random: Random, batch: int, size: Size) -> Inputs:
        return {
            "z": random.normal(batch, channels, *size),
            "temb": torch.full((batch,), 0.05, dtype=random.dtype),
        }

    return inputs


def _decoded(random: Random, batch: int, size: Size) -> Inputs:
    """A step of the consistency decoder: noise and upsampled latents."""
    return {
        "sample": random.normal(batch, 7, *(4 * edge for edge in size)),
        "timestep": torch.tensor(1008),
        "return_dict": False,
    }


def _image(random: Random, batch: int, size: Size) -> Inputs:
    return {"sample": random.normal(batch, 3, *(4 * edge for edge in size)).tanh()}


def _upsampled(random: Random, batch: int, size: Size) -> Inputs:
    return {"hidden_states": random.normal(batch, 4, *size)}


def _bank(scale: int) -> MakeInputs:
    return lambda random, batch, size: {"latents": random.normal(batch, 4, *size), "scale": scale}


# --- tables -----------------------------------------------------------------------------------------------------------

SIZES = ((8, 12), (16, 4))
VIDEO_SIZES = ((2, 4, 6), (3, 6, 2))
"""Frames of latents, and their edges."""
DOWN = ("DownEncoderBlock2D",) * 2
UP = ("UpDecoderBlock2D",) * 2
IMAGE = {
    "block_out_channels": (8, 16),
    "down_block_types": DOWN,
    "up_block_types": UP,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
"""Two levels of Stable Diffusion's autoencoder: two pixels by latent."""
CONSISTENCY = {
    "encoder_block_out_channels": (8, 16),
    "encoder_down_block_types": DOWN,
    "encoder_layers_per_block": 1,
    "encoder_norm_num_groups": 4,
    "decoder_block_out_channels": (16, 24),
    "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2,
    "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2,
    "decoder_layers_per_block": 1,
    "decoder_norm_num_groups": 4,
}
BANK = {
    "in_channels": 4,
    "stage_channels": (8, 8, 4),
    "num_pre_blocks": 1,
    "num_mid_blocks": 1,
    "num_post_blocks": 1,
    "num_x2_adapter_blocks": 1,
}
LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 8, 16, 16),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
    "patch_size": 1,
}
CACHED = {"decoder": 3, "encoder": 3}
"""A first chunk with an empty cache, a second that knows of the first only, and all others."""

VAES: tuple[Family, ...] = (
    Family("consistency-decoder", "diffusers.ConsistencyDecoderVAE:decoder_unet", CONSISTENCY, _decoded, SIZES),
    Family("consistency-encoder", "diffusers.ConsistencyDecoderVAE:encoder", CONSISTENCY, _image, SIZES),
    Family(
        "ltx-upsampler",
        "diffusers.pipelines.ltx.modeling_latent_upsampler.LTXLatentUpsamplerModel",
        {"in_channels": 4, "mid_channels": 32, "num_blocks_per_stage": 1},
        _upsampled,
        VIDEO_SIZES,
    ),
    Family(
        "ltx-upsampler-temporal",
        "diffusers.pipelines.ltx.modeling_latent_upsampler.LTXLatentUpsamplerModel",
        {
            "in_channels": 4,
            "mid_channels": 32,
            "num_blocks_per_stage": 1,
            "spatial_upsample": False,
            "temporal_upsample": True,
        },
        _upsampled,
        VIDEO_SIZES,
    ),
    Family(
        "ltx2-upsampler",
        "diffusers.pipelines.ltx2.latent_upsampler.LTX2LatentUpsamplerModel",
        {"in_channels": 4, "mid_channels": 32, "num_blocks_per_stage": 1},
        _upsampled,
        VIDEO_SIZES,
    ),
    Family(
        "ltx2-upsampler-rational",
        "diffusers.pipelines.ltx2.latent_upsampler.LTX2LatentUpsamplerModel",
        {"in_channels": 4, "mid_channels": 32, "num_blocks_per_stage": 1, "rational_spatial_scale": 1.5},
        _upsampled,
        VIDEO_SIZES,
    ),
    Family("kandinsky-upscaler-x2", "diffusers.Kandinsky6SRLatentUpscalerBank", BANK, _bank(2), VIDEO_SIZES),
    Family("kandinsky-upscaler-x4", "diffusers.Kandinsky6SRLatentUpscalerBank", BANK, _bank(4), VIDEO_SIZES),
)

HUNYUAN: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": (8, 16, 16),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 4,
}

AUTOENCODERS: tuple[Autoencoder, ...] = (
    Autoencoder("kl", "diffusers.AutoencoderKL", IMAGE, _pixels(2), _latents(4), SIZES),
    Autoencoder(
        "tiny",
        "diffusers.AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        _pixels(2),
        lambda random, batch, size: {"x": random.normal(batch, 4, *size)},
        SIZES,
    ),
    Autoencoder(
        "asymmetric",
        "diffusers.AsymmetricAutoencoderKL",
        {
            "down_block_types": DOWN,
            "down_block_out_channels": (8, 16),
            "layers_per_down_block": 1,
            "up_block_types": UP,
            "up_block_out_channels": (8, 16),
            "layers_per_up_block": 1,
            "norm_num_groups": 4,
        },
        _pixels(2),
        _masked,
        SIZES,
    ),
    Autoencoder(
        "vq",
        "diffusers.VQModel",
        {**IMAGE, "num_vq_embeddings": 32, "vq_embed_dim": 4, "latent_channels": 4},
        _pixels(2),
        lambda random, batch, size: {"h": random.normal(batch, 4, *size), "force_not_quantize": True},
        SIZES,
    ),
    Autoencoder(
        "movq",
        "diffusers.VQModel",
        {
            **IMAGE,
            "block_out_channels": (32, 32),
            "norm_num_groups": 32,
            "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
            "up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
            "num_vq_embeddings": 32,
            "vq_embed_dim": 4,
            "latent_channels": 4,
            "norm_type": "spatial",
        },
        _pixels(2),
        lambda random, batch, size: {"h": random.normal(batch, 4, *size), "force_not_quantize": True},
        SIZES,
    ),
    Autoencoder(
        "dc",
        "diffusers.AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "upsample_block_type": "interpolate",
        },
        _pixels(2),
        _latents(4),
        SIZES,
    ),
    Autoencoder(
        "flux2",
        "diffusers.AutoencoderKLFlux2",
        {**IMAGE, "latent_channels": 4},
        _pixels(2),
        _latents(4),
        SIZES,
    ),
    Autoencoder(
        "hunyuan-image",
        "diffusers.AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32, 32),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 32,
        },
        _pixels(2),
        _latents(4),
        SIZES,
    ),
    Autoencoder(
        "hunyuan-refiner",
        "diffusers.AutoencoderKLHunyuanImageRefiner",
        HUNYUAN,
        _frames(4, 4),
        _latents(4),
        VIDEO_SIZES,
    ),
    Autoencoder(
        "temporal-decoder",
        "diffusers.AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 64), "down_block_types": DOWN, "layers_per_block": 1},
        lambda random, batch, size: _pixels(2)(random, batch, size[1:]),
        _video_batch,
        ((3, 4, 6), (3, 6, 2)),
        batches=(1,),
    ),
    Autoencoder(
        "wan",
        "diffusers.AutoencoderKLWan",
        {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        _frames(8, 4),
        _latents(4),
        # One size: a frame or four at a time, with a program for the first, the second and the others, take seconds.
        ((4, 4, 2),),
        batches=(1,),
        programs=CACHED,
        dtypes=("f32",),
    ),
    Autoencoder(
        "qwen-image",
        "diffusers.AutoencoderKLQwenImage",
        {
            "base_dim": 8,
            "z_dim": 4,
            "dim_mult": [1, 1, 2, 2],
            "num_res_blocks": 1,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        _frames(8, 4),
        _latents(4),
        ((1, 4, 2), (1, 2, 6)),
    ),
    Autoencoder(
        "qwen-image21",
        "diffusers.AutoencoderKLQwenImage21",
        {
            "base_dim": 4,
            "decoder_base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1, 1, 1, 1],
            "num_res_blocks": 1,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        _frames(16, 8, channels=4),
        _latents(4),
        ((1, 4, 2), (1, 2, 6)),
    ),
    Autoencoder(
        "cogvideox",
        "diffusers.AutoencoderKLCogVideoX",
        {
            "block_out_channels": (8, 8, 16, 16),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        _frames(8, 4),
        _latents(4),
        ((5, 4, 2), (5, 6, 4)),
        # A chunk with an empty cache, and the next.
        programs={"decoder": 2, "encoder": 2},
        dtypes=("f32",),
    ),
    Autoencoder("ltx", "diffusers.AutoencoderKLLTXVideo", LTX, _frames(4, 4), _latents(8), VIDEO_SIZES),
    Autoencoder(
        "ltx-timestep",
        "diffusers.AutoencoderKLLTXVideo",
        {
            **LTX,
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "decoder_inject_noise": (False, False, False, False),
            "upsample_residual": (True, True, True),
            "upsample_factor": (2, 2, 2),
            "timestep_conditioning": True,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
        },
        None,
        _timed(8),
        VIDEO_SIZES,
    ),
    Autoencoder(
        "ltx2",
        "diffusers.AutoencoderKLLTX2Video",
        {
            "latent_channels": 8,
            "block_out_channels": (8, 16, 32, 32),
            "decoder_block_out_channels": (8, 16, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1),
            "patch_size": 1,
        },
        _frames(8, 8),
        _latents(8),
        VIDEO_SIZES,
    ),
    Autoencoder(
        "hunyuan-video",
        "diffusers.AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 8, 16, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        _frames(8, 4),
        _latents(4),
        VIDEO_SIZES,
    ),
    Autoencoder(
        # Its attention draws a mask row by row, of tokens of all frames. Of two videos eager says that it does not fit.
        "hunyuan-video-15",
        "diffusers.AutoencoderKLHunyuanVideo15",
        HUNYUAN,
        _frames(4, 4),
        _latents(4),
        VIDEO_SIZES,
        batches=(1,),
    ),
    Autoencoder(
        "mochi",
        "diffusers.AutoencoderKLMochi",
        {
            "in_channels": 15,
            "out_channels": 3,
            "latent_channels": 4,
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        _frames(8, 6),
        _latents(4),
        # In 16 bits the first size and the last batch alone, of few pixels: eager takes seconds for each.
        ((2, 3, 4), (3, 6, 2)),
        batches=(2, 1),
        programs_by_size=True,
    ),
    Autoencoder(
        "cosmos",
        "diffusers.AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 8, 8),
            "decode_block_out_channels": (8, 8, 8, 8),
            "attention_resolutions": (8,),
            "resolution": 64,
            "num_layers": 1,
            "patch_size": 4,
            "patch_type": "haar",
            "latents_mean": [0.0] * 16,
            "latents_std": [1.0] * 16,
        },
        None,
        _latents(4),
        VIDEO_SIZES,
    ),
    Autoencoder(
        "rae",
        "diffusers.AutoencoderRAE",
        {
            "encoder_type": "dinov2",
            "encoder_hidden_size": 64,
            "encoder_patch_size": 14,
            "encoder_num_hidden_layers": 1,
            "encoder_input_size": 56,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 48,
            "patch_size": 4,
        },
        None,
        lambda random, batch, size: {"z": random.normal(batch, 64, 4, 4)},
        ((),),
    ),
    Autoencoder(
        "ltx2-audio",
        "diffusers.AutoencoderKLLTX2Audio",
        {
            "base_channels": 8,
            "ch_mult": (1, 2),
            "num_res_blocks": 1,
            "latent_channels": 4,
            "resolution": 32,
            "mel_bins": 16,
        },
        lambda random, batch, size: {"x": random.normal(batch, 2, 4 * size[0], 16)},
        lambda random, batch, size: {"z": random.normal(batch, 4, size[0], 8)},
        ((4,), (7,)),
    ),
    Autoencoder(
        "oobleck",
        "diffusers.AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        lambda random, batch, size: {"x": random.normal(batch, 2, 8 * size[0])},
        lambda random, batch, size: {"z": random.normal(batch, 4, *size)},
        ((16,), (33,)),
    ),
)
