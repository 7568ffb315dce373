"""UNets and what goes with them beside the zoo, small: other blocks, other conditions, residuals and adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from families import Family, Inputs, Random

TOKENS = 11
WIDTH = 24
"""Channels of a prompt's embedding."""
SIZES = ((10, 12), (14, 6))
CROSS = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
"""Two levels of Stable Diffusion 1."""
SIMPLE = {
    **CROSS,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "attention_head_dim": 8,
    "resnet_time_scale_shift": "scale_shift",
}
"""Two levels of Kandinsky 2 and DeepFloyd IF."""
MOTION = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    "cross_attention_dim": WIDTH,
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
    "norm_num_groups": 4,
}
VIDEO_SIZES = ((3, 10, 12), (5, 14, 6))
CONDITIONAL = "diffusers.UNet2DConditionModel"


# --- inputs -----------------------------------------------------------------------------------------------------------


def _step() -> torch.Tensor:
    """A timestep as schedulers give it; exact in bf16."""
    return torch.tensor(500)


def _unet(random: Random, batch: int, size: tuple[int, ...], channels: int = 4) -> Inputs:
    return {
        "sample": random.normal(batch, channels, *size),
        "timestep": _step(),
        "encoder_hidden_states": random.normal(batch, TOKENS, WIDTH),
        "return_dict": False,
    }


def _inpainting(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _unet(random, batch, size, channels=9)


def _pix2pix(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _unet(random, batch, size, channels=8)


def _labels(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_unet(random, batch, size), "class_labels": random.tokens(10, batch)}


def _upscaler(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_unet(random, batch, size, channels=7), "class_labels": random.tokens(50, batch)}


def _lcm(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_unet(random, batch, size), "timestep_cond": random.normal(batch, 20)}


def _image_embeds(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    embeds = random.normal(batch, 20)
    return {**_unet(random, batch, size), "encoder_hidden_states": None, "added_cond_kwargs": {"image_embeds": embeds}}


def _image_hint(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _image_embeds(random, batch, size)
    inputs["added_cond_kwargs"]["hint"] = random.normal(batch, 3, *(8 * edge for edge in size)).sigmoid()
    return inputs


def _text_image(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    added = {"text_embeds": random.normal(batch, WIDTH), "image_embeds": random.normal(batch, WIDTH)}
    return {**_unet(random, batch, size), "added_cond_kwargs": added}


def _floyd(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    states = random.normal(batch, TOKENS, 20)
    return {**_unet(random, batch, size, channels=3), "encoder_hidden_states": states, "cross_attention_kwargs": None}


def _floyd_upscaler(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    states = random.normal(batch, TOKENS, 20)
    levels = torch.full((batch,), 250)
    return {**_unet(random, batch, size, channels=6), "encoder_hidden_states": states, "class_labels": levels}


def _gligen(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    objects = {
        "boxes": random.normal(batch, 5, 4).sigmoid(),
        "positive_embeddings": random.normal(batch, 5, WIDTH),
        "masks": torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]] * batch, dtype=random.dtype),
    }
    return {**_unet(random, batch, size), "cross_attention_kwargs": {"gligen": objects}}


def _gligen_text_image(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    masks = torch.tensor([[1.0, 1.0, 0.0]] * batch, dtype=random.dtype)
    objects = {
        "boxes": random.normal(batch, 3, 4).sigmoid(),
        "masks": masks,
        "phrases_masks": masks,
        "image_masks": masks,
        "phrases_embeddings": random.normal(batch, 3, WIDTH),
        "image_embeddings": random.normal(batch, 3, WIDTH),
    }
    return {**_unet(random, batch, size), "cross_attention_kwargs": {"gligen": objects}}


def _masks(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    mask = torch.tensor([[1] * 7 + [0] * (TOKENS - 7)] * batch)
    return {**_unet(random, batch, size), "encoder_attention_mask": mask}


def _scale(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_unet(random, batch, size), "cross_attention_kwargs": {"scale": 0.5}}


def _residuals(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """What a ControlNet adds to the UNet of :data:`CROSS`."""
    height, width = size
    small = (height // 2, width // 2)
    shapes = ((16, *size), (16, *size), (16, *small), (32, *small))
    return {
        **_unet(random, batch, size),
        "down_block_additional_residuals": [random.normal(batch, *shape) for shape in shapes],
        "mid_block_additional_residual": random.normal(batch, 32, *small),
    }


def _intrablock(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """What a T2I-Adapter adds to the UNet of :data:`CROSS`."""
    height, width = size
    states = [random.normal(batch, 16, *size), random.normal(batch, 32, height // 2, width // 2)]
    return {**_unet(random, batch, size), "down_intrablock_additional_residuals": states}


def _image_prompts(count: int) -> Any:
    """Image embeddings for ``count`` IP-Adapters."""

    def inputs(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
        embeds = [random.normal(batch, 1 + i, 20) for i in range(count)]
        return {**_unet(random, batch, size), "added_cond_kwargs": {"image_embeds": embeds}}

    return inputs


def _everything(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """A ControlNet, two IP-Adapters and a mask of the prompt in one call."""
    return {
        **_residuals(random, batch, size),
        "added_cond_kwargs": _image_prompts(2)(random, batch, size)["added_cond_kwargs"],
        "encoder_attention_mask": _masks(random, batch, size)["encoder_attention_mask"],
    }


def _unconditional(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"sample": random.normal(batch, 3, *size), "timestep": _step()}


def _consistency(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _unconditional(random, batch, size)
    return {**inputs, "class_labels": random.tokens(10, batch), "return_dict": False}


def _sigma(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"sample": random.normal(batch, 3, *size), "timestep": random.normal(batch).exp()}


def _sound(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"sample": random.normal(batch, 2, *size), "timestep": _step()}


def _trajectory(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"sample": random.normal(batch, 14, *size), "timestep": torch.full((batch,), 7)}


def _video(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _unet(random, batch, size)


def _stable_video(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    frames, height, width = size
    return {
        "sample": random.normal(batch, frames, 8, height, width),
        "timestep": torch.tensor(0.25),
        "encoder_hidden_states": random.normal(batch, 1, WIDTH),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * batch, dtype=random.dtype),
        "return_dict": False,
    }


def _animate(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    frames = size[0]
    states = random.normal(batch, TOKENS, WIDTH).repeat_interleave(frames, dim=0)
    return {
        "sample": random.normal(batch, 4, *size),
        "timestep": _step(),
        "encoder_hidden_states": states,
        "cross_attention_kwargs": None,
        "added_cond_kwargs": None,
    }


def _i2vgen(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_unet(random, batch, size),
        "fps": torch.full((batch,), 16),
        "image_latents": random.normal(batch, 4, *size),
        "image_embeddings": random.normal(batch, WIDTH),
    }


def _kandinsky3(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_unet(random, batch, size),
        "encoder_hidden_states": random.normal(batch, TOKENS, 20),
        "encoder_attention_mask": torch.tensor([[1] * 7 + [0] * (TOKENS - 7)] * batch),
    }


def _cascade_prior(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "sample": random.normal(batch, 4, *size),
        "timestep_ratio": torch.full((batch,), 0.5, dtype=random.dtype),
        "clip_text_pooled": random.normal(batch, 1, 12),
        "clip_text": random.normal(batch, TOKENS, 12),
        "clip_img": random.normal(batch, 1, 10),
        "return_dict": False,
    }


def _cascade_decoder(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "sample": random.normal(batch, 4, *size),
        "timestep_ratio": torch.full((batch,), 0.5, dtype=random.dtype),
        "clip_text_pooled": random.normal(batch, 1, 12),
        "effnet": random.normal(batch, 6, *(edge // 2 for edge in size)),
        "return_dict": False,
    }


def _amused(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "input_ids": random.tokens(20, batch, *size),
        "encoder_hidden_states": random.normal(batch, TOKENS, 16),
        "pooled_text_emb": random.normal(batch, 12),
        "micro_conds": torch.tensor([[512.0, 512.0, 0.0, 0.0, 6.0]] * batch, dtype=random.dtype),
    }


def _unidiffuser(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "latent_image_embeds": random.normal(batch, 4, *size),
        "image_embeds": random.normal(batch, 1, 12),
        "prompt_embeds": random.normal(batch, TOKENS, 16),
        "timestep_img": _step(),
        "timestep_text": _step(),
        "data_type": 1,
    }


def _audio(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_unet(random, batch, size),
        "encoder_hidden_states_1": random.normal(batch, 9, 20),
        "encoder_attention_mask_1": torch.tensor([[1] * 7 + [0] * 2] * batch),
    }


def _union(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    pixels = tuple(2 * edge for edge in size)
    return {
        **_unet(random, batch, size),
        "controlnet_cond": [random.normal(batch, 3, *pixels).sigmoid() for _ in range(2)],
        "control_type": torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]] * batch, dtype=random.dtype),
        "control_type_idx": [0, 3],
        "conditioning_scale": [1.0, 0.5],
        "added_cond_kwargs": {
            "text_embeds": random.normal(batch, 8),
            "time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * batch, dtype=random.dtype),
        },
    }


def _controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    condition = random.normal(batch, 3, *(2 * edge for edge in size)).sigmoid()
    return {**_unet(random, batch, size), "controlnet_cond": condition, "conditioning_scale": 1.0}


def _guess(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_controlnet(random, batch, size), "guess_mode": True}


def _multi_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _controlnet(random, batch, size)
    other = random.normal(*inputs["controlnet_cond"].shape)
    return {
        **inputs,
        "controlnet_cond": [inputs["controlnet_cond"], other],
        "conditioning_scale": [1.0, 0.5],
        "guess_mode": False,
    }


def _sparse(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    frames = size[0]
    condition = random.normal(batch, 4, *size)
    mask = torch.zeros(batch, 1, *size, dtype=random.dtype)
    mask[:, :, 0] = 1
    return {
        **_unet(random, batch, size),
        "encoder_hidden_states": random.normal(batch, TOKENS, WIDTH).repeat_interleave(frames, dim=0),
        "controlnet_cond": condition,
        "conditioning_mask": mask,
        "conditioning_scale": 1.0,
        "guess_mode": False,
    }


def _adapter(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"x": random.normal(batch, 3, *size).sigmoid()}


def _adapters(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"xs": random.normal(batch, 6, *size).sigmoid(), "adapter_weights": [0.75, 0.5]}


def _prior(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 16),
        "timestep": _step(),
        "proj_embedding": random.normal(batch, 16),
        "encoder_hidden_states": random.normal(batch, 13, 16),
        "attention_mask": torch.tensor([[True] * 7 + [False] * 6] * batch),
    }


def _dreamlite(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_unet(random, batch, size),
        "timestep": torch.full((batch,), 500.0, dtype=random.dtype),
        "encoder_attention_mask": torch.tensor([[1] * 7 + [0] * (TOKENS - 7)] * batch),
        "added_cond_kwargs": {
            "time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * batch, dtype=random.dtype)
        },
    }


# --- what is done to a module before ---------------------------------------------------------------------------------


def _load_ip_adapters(count: int) -> Any:
    def load(module: nn.Module) -> None:
        from oxidiff import testing

        testing.load_ip_adapter(module)

    return load


def _freeu(module: Any) -> None:
    module.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)


UNETS: tuple[Family, ...] = (
    Family("unet-labels", CONDITIONAL, {**CROSS, "num_class_embeds": 10}, _labels, SIZES),
    Family("unet-inpainting", CONDITIONAL, {**CROSS, "in_channels": 9}, _inpainting, SIZES),
    Family("unet-pix2pix", CONDITIONAL, {**CROSS, "in_channels": 8}, _pix2pix, SIZES),
    Family(
        "unet-upscaler",
        CONDITIONAL,
        {
            **CROSS,
            "in_channels": 7,
            "num_class_embeds": 50,
            "only_cross_attention": (True, False),
            "use_linear_projection": True,
        },
        _upscaler,
        SIZES,
    ),
    Family(
        "unet-rounded",
        CONDITIONAL,
        {
            **CROSS,
            "block_out_channels": (16, 16, 32, 32),
            "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
            "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
        },
        _unet,
        # Halves of all rests by 8 are rounded.
        ((20, 12), (25, 22), (16, 27), (39, 24), (13, 15), (30, 17)),
    ),
    Family("unet-lcm", CONDITIONAL, {**CROSS, "time_cond_proj_dim": 20}, _lcm, SIZES),
    Family(
        "unet-image-embeds",
        CONDITIONAL,
        {**SIMPLE, "addition_embed_type": "image", "encoder_hid_dim_type": "image_proj", "encoder_hid_dim": 20},
        _image_embeds,
        SIZES,
    ),
    Family(
        "unet-image-hint",
        CONDITIONAL,
        {
            **SIMPLE,
            "in_channels": 8,
            "addition_embed_type": "image_hint",
            "encoder_hid_dim_type": "image_proj",
            "encoder_hid_dim": 20,
        },
        _image_hint,
        SIZES,
    ),
    Family(
        "unet-text-image",
        CONDITIONAL,
        {
            **SIMPLE,
            "addition_embed_type": "text_image",
            "encoder_hid_dim_type": "text_image_proj",
            "encoder_hid_dim": WIDTH,
        },
        _text_image,
        SIZES,
    ),
    Family(
        "unet-floyd",
        CONDITIONAL,
        {
            **SIMPLE,
            "in_channels": 3,
            "out_channels": 6,
            "act_fn": "gelu",
            "addition_embed_type": "text",
            "addition_embed_type_num_heads": 4,
            "cross_attention_dim": 32,
            "cross_attention_norm": "group_norm",
            "encoder_hid_dim": 20,
            "encoder_hid_dim_type": "text_proj",
            "resnet_out_scale_factor": 1.414,
            "resnet_skip_time_act": True,
            "time_embedding_act_fn": "gelu",
        },
        _floyd,
        SIZES,
    ),
    Family(
        "unet-floyd-upscaler",
        CONDITIONAL,
        {
            **SIMPLE,
            "in_channels": 6,
            "out_channels": 6,
            "act_fn": "gelu",
            "addition_embed_type": "text",
            "addition_embed_type_num_heads": 4,
            "class_embed_type": "timestep",
            "cross_attention_dim": 32,
            "cross_attention_norm": "group_norm",
            "encoder_hid_dim": 20,
            "encoder_hid_dim_type": "text_proj",
            "mid_block_only_cross_attention": True,
            "only_cross_attention": (True, False),
            "resnet_out_scale_factor": 1.414,
            "resnet_skip_time_act": True,
            "time_embedding_act_fn": "gelu",
        },
        _floyd_upscaler,
        SIZES,
    ),
    Family("unet-gligen", CONDITIONAL, {**CROSS, "attention_type": "gated"}, _gligen, SIZES),
    Family(
        "unet-gligen-text-image",
        CONDITIONAL,
        {**CROSS, "attention_type": "gated-text-image"},
        _gligen_text_image,
        SIZES,
    ),
    Family("unet-mask", CONDITIONAL, CROSS, _masks, SIZES),
    Family("unet-scale", CONDITIONAL, CROSS, _scale, SIZES),
    Family("unet-residuals", CONDITIONAL, CROSS, _residuals, SIZES),
    Family("unet-t2i-adapter", CONDITIONAL, CROSS, _intrablock, SIZES),
    Family(
        "unet-freeu",
        CONDITIONAL,
        CROSS,
        _unet,
        ((10, 12), (14, 20)),
        graphs=2,
        fallbacks=("fft_fftn",),
        prepare=_freeu,
    ),
    Family(
        "unet-uncond",
        "diffusers.UNet2DModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": None,
            "downsample_padding": 0,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "norm_num_groups": 4,
        },
        _unconditional,
        SIZES,
    ),
    Family(
        "unet-consistency",
        "diffusers.UNet2DModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "attention_head_dim": 8,
            "attn_norm_num_groups": 4,
            "downsample_type": "resnet",
            "upsample_type": "resnet",
            "resnet_time_scale_shift": "scale_shift",
            "num_class_embeds": 10,
            "norm_num_groups": 4,
        },
        _consistency,
        SIZES,
    ),
    Family(
        "unet-score",
        "diffusers.UNet2DModel",
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
            "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
            "attention_head_dim": None,
            "center_input_sample": False,
            "mid_block_scale_factor": 1.414,
            "norm_eps": 1e-6,
            "norm_num_groups": None,
            "time_embedding_type": "fourier",
        },
        _sigma,
        ((12, 8), (20, 16)),
    ),
    Family(
        "unet1d-dance",
        "diffusers.UNet1DModel",
        {
            "sample_size": 256,
            "extra_in_channels": 64,
            "block_out_channels": (32, 32, 64),
            "time_embedding_type": "fourier",
            "flip_sin_to_cos": True,
            "use_timestep_embedding": False,
        },
        _sound,
        ((96,), (160,)),
        graphs=7,
        fallbacks=("writing by index",),
    ),
    Family(
        "unet1d-trajectory",
        "diffusers.UNet1DModel",
        {
            "sample_size": 32,
            "in_channels": 14,
            "out_channels": 14,
            "act_fn": "mish",
            "block_out_channels": (16, 32, 48),
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D"),
            "mid_block_type": "MidResTemporalBlock1D",
            "up_block_types": ("UpResnetBlock1D", "UpResnetBlock1D"),
            "out_block_type": "OutConv1DBlock",
            "layers_per_block": 1,
            "time_embedding_type": "positional",
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "use_timestep_embedding": True,
        },
        _trajectory,
        ((20,), (36,)),
    ),
    Family(
        "unet1d-value",
        "diffusers.UNet1DModel",
        {
            "sample_size": 32,
            "in_channels": 14,
            "out_channels": 14,
            "act_fn": "mish",
            "block_out_channels": (16, 32),
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "mid_block_type": "ValueFunctionMidBlock1D",
            "up_block_types": (),
            "out_block_type": "ValueFunction",
            "layers_per_block": 1,
            "downsample_each_block": True,
            "time_embedding_type": "positional",
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "use_timestep_embedding": True,
        },
        _trajectory,
        ((16,),),
    ),
    Family(
        "unet3d",
        "diffusers.UNet3DConditionModel",
        {
            **CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "attention_head_dim": 2,
        },
        _video,
        VIDEO_SIZES,
    ),
    Family(
        "stable-video",
        "diffusers.UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": (2, 4),
            "num_frames": 3,
        },
        _stable_video,
        VIDEO_SIZES,
    ),
    Family("animate", "diffusers.UNetMotionModel", MOTION, _animate, VIDEO_SIZES),
    Family("animate-rounded", "diffusers.UNetMotionModel", MOTION, _animate, ((4, 5, 7), (4, 9, 6), (3, 16, 11))),
    Family(
        "i2vgen",
        "diffusers.I2VGenXLUNet",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": WIDTH,
            "layers_per_block": 1,
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        },
        _i2vgen,
        VIDEO_SIZES,
    ),
    Family(
        "kandinsky3-unet",
        "diffusers.Kandinsky3UNet",
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 8,
            "layers_per_block": 2,
            "block_out_channels": (16, 32),
            "cross_attention_dim": WIDTH,
            "encoder_hid_dim": 20,
        },
        _kandinsky3,
        SIZES,
    ),
    Family(
        "cascade-prior",
        "diffusers.models.StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 16,
            "block_out_channels": (16, 24),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "clip_image_in_channels": 10,
            "clip_text_in_channels": 12,
            "clip_text_pooled_in_channels": 12,
            "switch_level": (False,),
            "timestep_ratio_embedding_dim": 8,
        },
        _cascade_prior,
        SIZES,
    ),
    Family(
        "cascade-decoder",
        "diffusers.models.StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "conditioning_dim": 16,
            "block_out_channels": (16, 24),
            "num_attention_heads": (0, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "up_blocks_repeat_mappers": (2, 1),
            "block_types_per_layer": (
                ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            "clip_text_pooled_in_channels": 12,
            "effnet_in_channels": 6,
            "pixel_mapper_in_channels": 3,
            "timestep_conditioning_type": ("sca",),
            "timestep_ratio_embedding_dim": 8,
        },
        _cascade_decoder,
        ((20, 12), (28, 24)),
    ),
    Family(
        "amused",
        "diffusers.UVit2DModel",
        {
            "hidden_size": 16,
            "cond_embed_dim": 12,
            "micro_cond_encode_dim": 2,
            "micro_cond_embed_dim": 10,
            "encoder_hidden_size": 16,
            "vocab_size": 20,
            "codebook_size": 20,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "downsample": True,
            "upsample": True,
        },
        _amused,
        ((10, 14), (18, 6)),
    ),
    Family(
        "unidiffuser",
        "diffusers.UniDiffuserModel",
        {
            "text_dim": 16,
            "clip_img_dim": 12,
            "num_text_tokens": TOKENS,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "norm_num_groups": 4,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu",
            "num_embeds_ada_norm": 1000,
            "norm_type": "layer_norm",
            "block_type": "unidiffuser",
            "use_patch_pos_embed": False,
            "ff_final_dropout": True,
            "use_data_type_embedding": True,
        },
        _unidiffuser,
        ((16, 16),),
    ),
    Family(
        "audioldm2",
        "diffusers.AudioLDM2UNet2DConditionModel",
        {
            **CROSS,
            "cross_attention_dim": ([None, WIDTH, 20], [None, WIDTH, 20]),
        },
        _audio,
        SIZES,
    ),
    Family(
        "controlnet-union",
        "diffusers.ControlNetUnionModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": WIDTH,
            "attention_head_dim": (2, 4),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 56,
            "norm_num_groups": 4,
            "conditioning_embedding_out_channels": (8, 16),
            "num_trans_channel": 16,
            "num_trans_head": 2,
            "num_proj_channel": 16,
        },
        _union,
        SIZES,
    ),
    Family(
        "controlnet-guess",
        "diffusers.ControlNetModel",
        {
            **{key: value for key, value in CROSS.items() if key != "up_block_types"},
            "conditioning_embedding_out_channels": (8, 16),
        },
        _guess,
        SIZES,
    ),
    Family(
        "controlnet-xs",
        "diffusers.UNetControlNetXSModel",
        {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "cross_attention_dim": WIDTH,
            "num_attention_heads": 2,
            "time_embedding_mix": 0.95,
            "ctrl_learn_time_embedding": True,
            "ctrl_conditioning_embedding_out_channels": (4, 8),
            "ctrl_block_out_channels": (4, 8),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
            "upcast_attention": False,
        },
        _controlnet,
        SIZES,
    ),
    Family(
        "controlnet-sparse",
        "diffusers.SparseControlNetModel",
        {
            **{key: value for key, value in MOTION.items() if key not in ("up_block_types", "num_attention_heads")},
            "attention_head_dim": 2,
            "conditioning_embedding_out_channels": (8, 16),
        },
        _sparse,
        VIDEO_SIZES,
    ),
    Family(
        "t2i-adapter",
        "diffusers.T2IAdapter",
        {
            "in_channels": 3,
            "channels": [8, 12],
            "num_res_blocks": 1,
            "downscale_factor": 4,
            "adapter_type": "full_adapter",
        },
        _adapter,
        ((32, 48), (64, 16)),
    ),
    Family(
        "t2i-adapter-xl",
        "diffusers.T2IAdapter",
        {
            "in_channels": 3,
            "channels": [8, 8, 12, 12],
            "num_res_blocks": 1,
            "downscale_factor": 4,
            "adapter_type": "full_adapter_xl",
        },
        _adapter,
        ((32, 48), (64, 16)),
    ),
    Family(
        "t2i-adapter-light",
        "diffusers.T2IAdapter",
        {
            "in_channels": 3,
            "channels": [8, 12],
            "num_res_blocks": 1,
            "downscale_factor": 4,
            "adapter_type": "light_adapter",
        },
        _adapter,
        ((32, 48), (64, 16)),
    ),
    Family(
        "prior",
        "diffusers.PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "embedding_dim": 16,
            "num_embeddings": 13,
            "additional_embeddings": 4,
        },
        _prior,
        ((),),
    ),
    Family(
        "dreamlite",
        "diffusers.models.DreamLiteUNetModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        },
        _dreamlite,
        SIZES,
    ),
)
