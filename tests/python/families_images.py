"""Transformers that draw images, small."""

from __future__ import annotations

from families import Family, Inputs, Random


def _auraflow(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, 12, 32),
        "timestep": random.normal(batch).sigmoid(),
    }


def _sana(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, 12, 8),
        "timestep": random.tokens(1000, batch),
    }


def _qwen(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {
        "hidden_states": random.normal(batch, height * width, 16),
        "encoder_hidden_states": random.normal(batch, 7, 16),
        "timestep": random.normal(batch).sigmoid(),
        "img_shapes": [(1, height, width)] * batch,
    }


IMAGES: tuple[Family, ...] = (
    Family(
        "auraflow",
        "diffusers.AuraFlowTransformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 256,
        },
        _auraflow,
        ((16, 16), (16, 8)),
    ),
    Family(
        "sana",
        "diffusers.SanaTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 4,
            "num_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "caption_channels": 8,
            "sample_size": 32,
        },
        _sana,
        ((32, 32), (16, 24)),
    ),
    Family(
        "qwen-image",
        "diffusers.QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 16,
            "guidance_embeds": False,
            "axes_dims_rope": (8, 4, 4),
        },
        _qwen,
        ((4, 4), (6, 4)),
        # Where text begins is the larger of two sides; and a call has a list as long as the batch.
        captures_by_size=True,
        programs_by_size=True,
    ),
)
