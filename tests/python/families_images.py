"""Transformers that draw images, and their ControlNets, small."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from torch import nn

from families import Family, Inputs, Random

TEXT = 12
"""Words of a prompt."""


def _grid(height: int, width: int, first: int = 0) -> torch.Tensor:
    """Positions of an image's tokens, `[tokens, 3]`, as the pipelines of Flux make them."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, first), rows, columns], dim=-1).reshape(-1, 3).float()


def _mask(batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Whether a word is there: the last third is padding."""
    return (torch.arange(length) < length - length // 3).to(dtype).repeat(batch, 1)


def _uneven_mask(batch: int, length: int, size: tuple[int, ...]) -> torch.Tensor:
    """Whether a word is there, in prompts of unequal lengths, which are others in a call at another size."""
    lengths = length - 1 - size[1] // 4 % 3 - 3 * torch.arange(batch)
    return (torch.arange(length) < lengths[:, None]).to(torch.int64)


def _auraflow(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, TEXT, 32),
        "timestep": random.normal(batch).sigmoid(),
    }


def _sana(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, TEXT, 8),
        "timestep": random.tokens(1000, batch),
    }


def _sana_sprint(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_sana(random, batch, size),
        "timestep": random.normal(batch).sigmoid(),
        "guidance": torch.full((batch,), 0.45, dtype=random.dtype),
        "encoder_attention_mask": _mask(batch, TEXT, torch.int64),
        "return_dict": False,
    }


def _sana_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_sana(random, batch, size),
        "encoder_attention_mask": _mask(batch, TEXT, torch.int64),
        "controlnet_cond": random.normal(batch, 4, *size),
        "conditioning_scale": 0.7,
        "return_dict": False,
    }


def _sana_controlled(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {**_sana(random, batch, size), "controlnet_block_samples": (random.normal(batch, height * width, 32),)}


def _qwen(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {
        "hidden_states": random.normal(batch, height * width, 16),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "timestep": random.normal(batch).sigmoid(),
        "img_shapes": [(1, height, width)] * batch,
    }


def _qwen_layered(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """A picture, two layers of it and what is between, all of one size."""
    height, width = size
    return {
        **_qwen(random, batch, size),
        "hidden_states": random.normal(batch, 4 * height * width, 16),
        "img_shapes": [[(1, height, width)] * 4] * batch,
        "additional_t_cond": torch.zeros(batch, dtype=torch.int64),
        "return_dict": False,
    }


def _qwen_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_qwen(random, batch, size),
        "encoder_hidden_states_mask": _mask(batch, TEXT, torch.int64),
        "controlnet_cond": random.normal(batch, size[0] * size[1], 16),
        "conditioning_scale": 0.7,
        "return_dict": False,
    }


def _qwen21(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """A picture for a prompt, without a cache; its slots are those of patches of 2 by 2 tokens."""
    height, width = size
    slots = torch.cat([torch.zeros(batch, TEXT), torch.ones(batch, height * width // 4)], 1).bool()
    return {
        "hidden_states": random.normal(batch, height * width, 16),
        "encoder_hidden_states": random.normal(batch, TEXT, 24),
        "timestep": random.normal(batch).sigmoid(),
        "img_shapes": [[(1, height, width)]] * batch,
        "img_mask": slots,
        "encoder_hidden_states_mask": _mask(batch, TEXT, torch.bool),
        "return_dict": False,
    }


def _flux(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {
        "hidden_states": random.normal(batch, height * width, 4),
        "encoder_hidden_states": random.normal(batch, TEXT, 32),
        "pooled_projections": random.normal(batch, 24),
        "timestep": random.normal(batch).sigmoid(),
        "guidance": torch.full((batch,), 3.5),
        "txt_ids": torch.zeros(TEXT, 3, dtype=random.dtype),
        "img_ids": _grid(height, width).to(random.dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


def _flux_fill(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _flux(random, batch, size)
    masked = random.normal(batch, size[0] * size[1], 20)
    return {**inputs, "hidden_states": torch.cat([inputs["hidden_states"], masked], dim=2)}


def _flux_kontext(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    reference = random.normal(batch, height * 3, 4)
    inputs = _flux(random, batch, size)
    ids = torch.cat([_grid(height, width), _grid(height, 3, first=1)])
    return {
        **inputs,
        "hidden_states": torch.cat([inputs["hidden_states"], reference], dim=1),
        "img_ids": ids.to(random.dtype),
    }


def _flux_controlled(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    image = size[0] * size[1]
    return {
        **_flux(random, batch, size),
        "controlnet_block_samples": [random.normal(batch, image, 32)],
        "controlnet_single_block_samples": [random.normal(batch, image, 32)],
        "controlnet_blocks_repeat": False,
    }


def _flux_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_flux(random, batch, size),
        "controlnet_cond": random.normal(batch, size[0] * size[1], 4),
        "conditioning_scale": 0.7,
    }


def _flux_union(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_flux_controlnet(random, batch, size), "controlnet_mode": torch.full((batch, 1), 2)}


def _flux_ip_adapter(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _flux(random, batch, size)
    return {**inputs, "joint_attention_kwargs": {"ip_adapter_image_embeds": [random.normal(batch, 1, 16)]}}


def _flux_multi(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    image = size[0] * size[1]
    return {
        **_flux(random, batch, size),
        "controlnet_cond": [random.normal(batch, image, 4) for _ in range(2)],
        "controlnet_mode": [torch.full((batch,), mode) for mode in (0, 2)],
        "conditioning_scale": [0.7, 0.4],
    }


def _without(inputs: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}


def _longcat(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _without(_flux(random, batch, size), "pooled_projections", "guidance", "joint_attention_kwargs")


def _ovis(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _without(_flux(random, batch, size), "pooled_projections", "guidance")


def _chroma(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    mask = torch.cat([_mask(batch, TEXT, torch.bool), torch.ones(batch, size[0] * size[1], dtype=torch.bool)], dim=1)
    return {**_ovis(random, batch, size), "attention_mask": mask}


def _chroma_floats(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """As `ChromaImg2ImgPipeline` makes the mask."""
    inputs = _chroma(random, batch, size)
    return {**inputs, "attention_mask": inputs["attention_mask"].to(random.dtype)}


def _bria(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _without(_flux(random, batch, size), "pooled_projections", "guidance", "joint_attention_kwargs")
    return {**inputs, "timestep": random.normal(batch).sigmoid() * 1000}


def _bria_fibo(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    image = size[0] * size[1]
    present = torch.cat([_mask(batch, TEXT, torch.float32), torch.ones(batch, image)], dim=1)
    pairs = torch.einsum("bi,bj->bij", present, present)
    mask = torch.where(pairs == 1, 0.0, -torch.inf).unsqueeze(1).to(random.dtype)
    return {
        **_bria(random, batch, size),
        "text_encoder_layers": [random.normal(batch, TEXT, 16) for _ in range(2)],
        "joint_attention_kwargs": {"attention_mask": mask},
    }


def _flux2(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    image = torch.cat([_grid(height, width), torch.zeros(height * width, 1)], dim=1)
    text = torch.cat([torch.zeros(TEXT, 3), torch.arange(TEXT)[:, None]], dim=1)
    return {
        "hidden_states": random.normal(batch, height * width, 4),
        "encoder_hidden_states": random.normal(batch, TEXT, 32),
        "timestep": random.normal(batch).sigmoid(),
        "guidance": torch.full((batch,), 3.5),
        "txt_ids": text.long().repeat(batch, 1, 1),
        "img_ids": image.long().repeat(batch, 1, 1),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }


def _flux3(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    inputs = _without(_flux2(random, batch, size), "guidance", "joint_attention_kwargs")
    return {**inputs, "txt_ids": inputs["txt_ids"][0], "img_ids": inputs["img_ids"][0]}


def _cogview(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    pixels = torch.tensor([[float(8 * side) for side in size]]).repeat(batch, 1).to(random.dtype)
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, TEXT, 8),
        "timestep": random.tokens(1000, batch),
        "original_size": pixels,
        "target_size": pixels,
        "crop_coords": torch.zeros(batch, 2, dtype=random.dtype),
        "return_dict": False,
    }


def _dit(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """Squares, as it draws no others; not of its native size, where a table takes the place of what others compute."""
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.tokens(1000, batch),
        "class_labels": random.tokens(1000, batch),
        "return_dict": False,
    }


def _transformer_2d(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 16, *size),
        "encoder_hidden_states": random.normal(batch, TEXT, 8),
        "encoder_attention_mask": _mask(batch, TEXT, torch.bool),
        "return_dict": False,
    }


def _dreamlite(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return _transformer_2d(random, batch, size)


def _ernie(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.normal(batch).sigmoid() * 1000,
        "text_bth": random.normal(batch, TEXT, 16),
        "text_lens": torch.full((batch,), TEXT - 4),
        "return_dict": False,
    }


def _krea2(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {
        "hidden_states": random.normal(batch, height * width, 4),
        "encoder_hidden_states": random.normal(batch, TEXT, 3, 16),
        "timestep": random.normal(batch).sigmoid(),
        "position_ids": torch.cat([torch.zeros(TEXT, 3), _grid(height, width)]),
        "encoder_attention_mask": _mask(batch, TEXT, torch.bool),
        "return_dict": False,
    }


def _ideogram4(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    length = TEXT + height * width
    text = torch.arange(TEXT)[:, None].repeat(1, 3)
    positions = torch.cat([text, _grid(height, width).long() + TEXT])
    is_text = torch.arange(length) < TEXT
    return {
        "hidden_states": random.normal(batch, length, 4),
        "timestep": random.normal(batch).sigmoid(),
        "encoder_hidden_states": random.normal(batch, length, 24),
        "position_ids": positions.repeat(batch, 1, 1),
        "segment_ids": torch.where(torch.arange(length) < 4, 0, 1).repeat(batch, 1),
        "indicator": torch.where(is_text, 3, 2).repeat(batch, 1),
        "return_dict": False,
    }


def _sd3(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, TEXT, 32),
        "pooled_projections": random.normal(batch, 24),
        "timestep": random.tokens(1000, batch),
        "return_dict": False,
    }


def _sd3_skip(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_sd3(random, batch, size), "skip_layers": [1]}


def _sd3_controlled(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    tokens = size[0] * size[1] // 4
    return {**_sd3(random, batch, size), "block_controlnet_hidden_states": [random.normal(batch, tokens, 32)]}


def _sd3_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {**_sd3(random, batch, size), "controlnet_cond": random.normal(batch, 4, *size), "conditioning_scale": 0.7}


def _hunyuan_dit(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    tokens = size[0] * size[1] // 4
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.tokens(1000, batch).to(random.dtype),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "text_embedding_mask": _mask(batch, TEXT, torch.int64),
        "encoder_hidden_states_t5": random.normal(batch, 7, 24),
        "text_embedding_mask_t5": _mask(batch, 7, torch.int64),
        "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]]).repeat(batch, 1).to(random.dtype),
        "style": torch.zeros(batch, dtype=torch.int64),
        "image_rotary_emb": (random.normal(tokens, 16).float(), random.normal(tokens, 16).float()),
        "return_dict": False,
    }


def _hunyuan_dit_controlled(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    tokens = size[0] * size[1] // 4
    return {**_hunyuan_dit(random, batch, size), "controlnet_block_samples": [random.normal(batch, tokens, 32)]}


def _hunyuan_dit_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_hunyuan_dit(random, batch, size),
        "controlnet_cond": random.normal(batch, 4, *size),
        "conditioning_scale": 0.7,
    }


def _hunyuan_image(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.tokens(1000, batch).to(random.dtype),
        "timestep_r": None,
        "guidance": None,
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "encoder_attention_mask": _mask(batch, TEXT, torch.int64),
        "return_dict": False,
    }


def _hunyuan_image_byt5(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """With the text to draw, and its own encoder."""
    return {
        **_hunyuan_image(random, batch, size),
        "encoder_attention_mask": _uneven_mask(batch, TEXT, size),
        "encoder_hidden_states_2": random.normal(batch, 8, 12),
        "encoder_attention_mask_2": _uneven_mask(batch, 8, size),
    }


def _lumina2(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.normal(batch).sigmoid(),
        "encoder_hidden_states": random.normal(batch, 40, 16),
        "encoder_attention_mask": _uneven_mask(batch, 40, size),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _hidream(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timesteps": random.tokens(1000, batch).to(random.dtype),
        "encoder_hidden_states_t5": random.normal(batch, TEXT, 16),
        "encoder_hidden_states_llama3": random.normal(2, batch, TEXT, 24),
        "pooled_embeds": random.normal(batch, 20),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _joy_image(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """An image to edit, and the one to make of it."""
    return {
        "hidden_states": random.normal(batch, 2, 4, 1, *size),
        "timestep": random.tokens(1000, batch).to(random.dtype),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "return_dict": False,
    }


def _joy_image_plus(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """The image to make and one to edit of another size, as patches in one sequence."""
    height, width = size
    images = [(1, height, width), (1, 6, 4)]
    return {
        "hidden_states": random.normal(batch, height * width + 24, 4, 1, 2, 2),
        "timestep": random.tokens(1000, batch).to(random.dtype),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "encoder_hidden_states_mask": torch.ones(batch, TEXT, dtype=random.dtype),
        "shape_list": [images] * batch,
        "return_dict": False,
    }


def _nucleus_moe(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    height, width = size
    return {
        "hidden_states": random.normal(batch, height * width, 16),
        "img_shapes": [(1, height, width)] * batch,
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "encoder_hidden_states_mask": _uneven_mask(batch, TEXT, size),
        "timestep": random.normal(batch).sigmoid(),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _bria_fibo2(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """How many tokens a prompt's gist has depends on its length."""
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.normal(batch).sigmoid(),
        "encoder_hidden_states": random.normal(batch, 2, TEXT, 20),
        "encoder_attention_mask": _uneven_mask(batch, TEXT, size).bool(),
        "context_latents": [random.normal(batch, 4, 6, 10)],
        "return_dict": False,
    }


def _lumina(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.normal(batch).sigmoid(),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "encoder_mask": _uneven_mask(batch, TEXT, size),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 24, 24),
        "cross_attention_kwargs": {"base_sequence_length": 64},
        "return_dict": False,
    }


def _omnigen(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """Prompts and what they are not to be, as the pipeline puts them together: padding before the words, a token of the
    time, and then an image."""
    height, width, words = size
    tokens = words + 1 + height * width // 4
    padding = torch.arange(batch) % 2 * 3
    positions = (torch.arange(tokens) - padding[:, None]).clamp(min=0)
    places = torch.arange(tokens)
    seen = (places[:, None] >= places) | (places[:, None] > words)
    return {
        "hidden_states": random.normal(batch, 4, height, width),
        "timestep": random.normal(batch).sigmoid(),
        "input_ids": random.tokens(50, batch, words),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": (seen & (places >= padding[:, None, None])).float(),
        "position_ids": positions,
        "return_dict": False,
    }


def _z_image(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "x": list(random.normal(batch, 4, 1, *size).unbind()),
        "t": random.normal(batch).sigmoid(),
        "cap_feats": list(random.normal(batch, TEXT, 16).unbind()),
        "return_dict": False,
    }


def _z_image_guided(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """With guidance: a prompt and what it is not to be, of as many tokens as ``size`` says."""
    return {
        **_z_image(random, len(size), (16, 16)),
        "cap_feats": [random.normal(tokens, 16) for tokens in size],
    }


def _z_image_controlled(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    """With what a ControlNet makes: as long as image and prompt together, each padded to a multiple of 32."""
    tokens = sum(-(-count // 32) * 32 for count in (size[0] * size[1] // 4, TEXT))
    samples = {0: random.normal(batch, tokens, 32), 1: random.normal(batch, tokens, 32)}
    return {**_z_image(random, batch, size), "controlnet_block_samples": samples}


def _z_image_controlnet(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        **_without(_z_image(random, batch, size), "return_dict"),
        "control_context": list(random.normal(batch, 4, 1, *size).unbind()),
        "conditioning_scale": 0.7,
    }


def _prx(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": random.normal(batch).sigmoid(),
        "encoder_hidden_states": random.normal(batch, TEXT, 16),
        "attention_mask": _mask(batch, TEXT, torch.bool),
        "return_dict": False,
    }


def _redux(random: Random, batch: int, size: tuple[int, ...]) -> Inputs:
    return {"x": random.normal(batch, size[0], 16)}


_FLUX_SIZES: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
FLUX: dict[str, Any] = {**_FLUX_SIZES, "pooled_projection_dim": 24, "guidance_embeds": True}
_WITHOUT_POOL: dict[str, Any] = {**_FLUX_SIZES, "pooled_projection_dim": None}
_JOY: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 16,
    "mlp_width_ratio": 2.0,
    "num_layers": 1,
    "rope_dim_list": [4, 6, 6],
}
_SANA: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 32,
    "caption_channels": 8,
    "sample_size": 32,
}
_SD3: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 24,
    "pos_embed_max_size": 24,
}
_QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 16,
    "axes_dims_rope": (8, 4, 4),
}
_Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [4, 6, 6],
    "axes_lens": [64, 32, 32],
}


def flux_with_ip_adapter() -> nn.Module:
    """A Flux transformer with an IP-Adapter, as its loader leaves it."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model = FluxTransformer2DModel(**FLUX)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=[0.6]))
    projection = ImageProjection(image_embed_dim=16, cross_attention_dim=32, num_image_text_embeds=4)
    model.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    model.config.encoder_hid_dim_type = "ip_image_proj"
    return model


def two_flux_controlnets() -> nn.Module:
    """Two ControlNets as one."""
    from diffusers import FluxControlNetModel, FluxMultiControlNetModel

    return FluxMultiControlNetModel([FluxControlNetModel(**FLUX, num_mode=4) for _ in range(2)])


def _make_tables(module: nn.Module) -> None:
    """What a first call would leave in an object that is no module."""
    module.rope_embedder(torch.zeros(1, 3, dtype=torch.int64))


def z_image_controlnet() -> nn.Module:
    """A ControlNet of Z-Image, which uses its transformer's embedders."""
    from diffusers import ZImageControlNetModel, ZImageTransformer2DModel

    controlnet = ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return ZImageControlNetModel.from_transformer(controlnet, ZImageTransformer2DModel(**_Z_IMAGE))


_HUNYUAN_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": (1, 1),
    "text_embed_dim": 16,
    "rope_axes_dim": (8, 8),
}
_BRIA_FIBO2: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "cap_feat_dim": 20,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 2,
    "max_num_gist_tokens": 62,
    "gist_step": 1,
    "gist_min_text_len": 2,
    "gist_max_text_len": 62,
    "axes_dims": (4, 6, 6),
    "axes_lens": (80, 32, 32),
}
_HIDREAM: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [16, 24],
    "text_emb_dim": 20,
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 6, 6),
    "max_resolution": (16, 16),
    "llama_layers": [0, 1],
}
_LUMINA2: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 2,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 16,
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
        "bria",
        "diffusers.BriaTransformer2DModel",
        {**_WITHOUT_POOL, "rope_theta": 10000, "time_theta": 10000},
        _bria,
        ((4, 4), (6, 8)),
    ),
    Family(
        "bria-fibo",
        "diffusers.BriaFiboTransformer2DModel",
        {**_WITHOUT_POOL, "text_encoder_dim": 16},
        _bria_fibo,
        ((4, 4), (6, 8)),
    ),
    Family(
        "bria-fibo2",
        "diffusers.BriaFibo2Transformer2DModel",
        _BRIA_FIBO2,
        _bria_fibo2,
        ((16, 16), (8, 24)),
        batches=(2,),
        prepare=_make_tables,
    ),
    Family(
        "bria-fibo2-steps",
        "diffusers.BriaFibo2Transformer2DModel",
        {**_BRIA_FIBO2, "gist_step": 4},
        _bria_fibo2,
        ((16, 16), (8, 24)),
        batches=(2,),
        # Lengths are rounded up in Python, after a detour over floats.
        captures_by_size=True,
        programs_by_size=True,
        prepare=_make_tables,
    ),
    Family(
        "chroma",
        "diffusers.ChromaTransformer2DModel",
        {
            **_FLUX_SIZES,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _chroma,
        ((4, 4), (6, 8)),
    ),
    Family(
        "chroma-float-mask",
        "diffusers.ChromaTransformer2DModel",
        {
            **_FLUX_SIZES,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _chroma_floats,
        ((4, 4), (6, 8)),
    ),
    Family(
        "cogview3-plus",
        "diffusers.CogView3PlusTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "out_channels": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "pos_embed_max_size": 32,
            "sample_size": 16,
        },
        _cogview,
        ((16, 16), (8, 24)),
    ),
    Family(
        "cogview4",
        "diffusers.CogView4Transformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "out_channels": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "sample_size": 16,
            "rope_axes_dim": (8, 8),
        },
        _cogview,
        ((16, 16), (8, 24)),
    ),
    Family(
        "dit",
        "diffusers.DiTTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 1,
            "sample_size": 16,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
        },
        _dit,
        ((12, 12), (24, 24)),
    ),
    Family(
        "dreamlite",
        "diffusers.models.transformers.transformer_2d_dreamlite.DreamLiteTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "num_layers": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 8,
            "use_linear_projection": True,
            "qk_norm": "rms_norm",
            "use_self_attention": False,
        },
        _dreamlite,
        ((16, 16), (8, 24)),
    ),
    Family(
        "ernie-image",
        "diffusers.ErnieImageTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 1,
            "ffn_hidden_size": 48,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 1,
            "text_in_dim": 16,
            "rope_axes_dim": (4, 6, 6),
        },
        _ernie,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-controlled",
        "diffusers.FluxTransformer2DModel",
        FLUX,
        _flux_controlled,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-fill",
        "diffusers.FluxTransformer2DModel",
        {**FLUX, "in_channels": 24, "out_channels": 4},
        _flux_fill,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-kontext",
        "diffusers.FluxTransformer2DModel",
        FLUX,
        _flux_kontext,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-ip-adapter",
        "families_images.flux_with_ip_adapter",
        {},
        _flux_ip_adapter,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-controlnet",
        "diffusers.FluxControlNetModel",
        FLUX,
        _flux_controlnet,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-controlnet-union",
        "diffusers.FluxControlNetModel",
        {**FLUX, "num_mode": 4},
        _flux_union,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux-controlnet-multi",
        "families_images.two_flux_controlnets",
        {},
        _flux_multi,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux2",
        "diffusers.Flux2Transformer2DModel",
        {
            **_FLUX_SIZES,
            "axes_dims_rope": (4, 4, 4, 4),
            "timestep_guidance_channels": 16,
            "mlp_ratio": 3.0,
            "guidance_embeds": True,
        },
        _flux2,
        ((4, 4), (6, 8)),
    ),
    Family(
        "flux3",
        "diffusers.Flux3Transformer2DModel",
        {
            "in_channels": 4,
            "cond_in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "timestep_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        _flux3,
        ((4, 4), (6, 8)),
    ),
    Family(
        "hidream-dense",
        "diffusers.HiDreamImageTransformer2DModel",
        {**_HIDREAM, "num_routed_experts": 0},
        _hidream,
        ((16, 16), (8, 24)),
        # An image that is not square is padded to the longest sequence there is; sizes go through a tensor.
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "hidream",
        "diffusers.HiDreamImageTransformer2DModel",
        {**_HIDREAM, "num_single_layers": 0, "llama_layers": [0]},
        _hidream,
        ((16, 16),),
        batches=(2,),
        # How many tokens an expert takes follows from weights, and is looked at.
        fallbacks=("aten.topk", "depends on the values of a tensor"),
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "hunyuan-dit",
        "diffusers.HunyuanDiT2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 8,
            "text_len": 12,
            "text_len_t5": 7,
            "num_layers": 4,
        },
        _hunyuan_dit,
        ((16, 16), (8, 24)),
    ),
    Family(
        "hunyuan-dit-controlled",
        "diffusers.HunyuanDiT2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 8,
            "text_len": 12,
            "text_len_t5": 7,
            "num_layers": 4,
            "use_style_cond_and_image_meta_size": False,
        },
        _hunyuan_dit_controlled,
        ((16, 16), (8, 24)),
    ),
    Family(
        "hunyuan-dit-controlnet",
        "diffusers.HunyuanDiT2DControlNetModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 8,
            "text_len": 12,
            "text_len_t5": 7,
            "conditioning_channels": 4,
            "transformer_num_layers": 4,
        },
        _hunyuan_dit_controlnet,
        ((16, 16), (8, 24)),
    ),
    Family(
        "hunyuan-image",
        "diffusers.HunyuanImageTransformer2DModel",
        _HUNYUAN_IMAGE,
        _hunyuan_image,
        ((4, 4), (6, 8)),
    ),
    Family(
        "hunyuan-image-byt5",
        "diffusers.HunyuanImageTransformer2DModel",
        {**_HUNYUAN_IMAGE, "text_embed_2_dim": 12},
        _hunyuan_image_byt5,
        ((4, 4), (6, 8)),
        batches=(2,),
    ),
    Family(
        # Its table of frequencies is made anew, and kept, in each call.
        "omnigen",
        "diffusers.OmniGenTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 40,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 50,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]},
            "time_step_dim": 16,
        },
        _omnigen,
        ((16, 16, 12), (8, 24, 9)),
    ),
    Family(
        "lumina",
        "diffusers.LuminaNextDiT2DModel",
        {
            "sample_size": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "cross_attention_dim": 16,
        },
        _lumina,
        ((16, 16), (8, 24)),
        # The logarithm of how many tokens there are scales the attention.
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "ideogram4",
        "diffusers.Ideogram4Transformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "adaln_dim": 16,
            "llm_features_dim": 24,
            "mrope_section": (4, 2, 2),
        },
        _ideogram4,
        ((4, 4), (6, 8)),
    ),
    Family(
        "joy-image",
        "diffusers.JoyImageEditTransformer3DModel",
        {**_JOY, "rope_type": "mrope"},
        _joy_image,
        ((16, 16), (8, 24)),
    ),
    Family(
        "joy-image-plus",
        "diffusers.models.transformers.transformer_joyimage_edit_plus.JoyImageEditPlusTransformer3DModel",
        _JOY,
        _joy_image_plus,
        ((4, 6), (8, 10)),
        batches=(1,),
    ),
    Family(
        "krea2",
        "diffusers.Krea2Transformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 16,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 24,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 6, 6),
        },
        _krea2,
        ((4, 4), (6, 8)),
    ),
    Family(
        "longcat-image",
        "diffusers.LongCatImageTransformer2DModel",
        {**_FLUX_SIZES, "pooled_projection_dim": 24},
        _longcat,
        ((4, 4), (6, 8)),
    ),
    Family(
        "lumina2",
        "diffusers.Lumina2Transformer2DModel",
        _LUMINA2,
        _lumina2,
        ((16, 16), (8, 24)),
        batches=(2,),
    ),
    Family(
        "lumina2-one-prompt",
        "diffusers.Lumina2Transformer2DModel",
        _LUMINA2,
        _lumina2,
        ((16, 16), (8, 24)),
        batches=(1,),
    ),
    Family(
        "nucleus-moe",
        "diffusers.NucleusMoEImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
            "dense_moe_strategy": "leave_first_block_dense",
            "num_experts": 4,
            "moe_intermediate_dim": 24,
            "capacity_factors": 2.0,
        },
        _nucleus_moe,
        ((4, 4), (6, 8)),
        # A call has a list as long as the batch.
        batches=(2,),
        graphs=4,
        fallbacks=("aten.topk", "aten.scatter_add"),
    ),
    Family(
        "ovis-image",
        "diffusers.OvisImageTransformer2DModel",
        _FLUX_SIZES,
        _ovis,
        ((4, 4), (6, 8)),
    ),
    Family(
        "prx",
        "diffusers.PRXTransformer2DModel",
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 1,
            "axes_dim": [8, 8],
        },
        _prx,
        ((16, 16), (8, 24)),
    ),
    Family(
        "prx-pixel",
        "diffusers.PRXTransformer2DModel",
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 1,
            "axes_dim": [8, 8],
            "bottleneck_size": 8,
            "resolution_embeds": True,
        },
        _prx,
        ((16, 16), (8, 24)),
    ),
    Family(
        "qwen-image-layered",
        "diffusers.QwenImageTransformer2DModel",
        {**_QWEN, "use_additional_t_cond": True, "use_layer3d_rope": True},
        _qwen_layered,
        ((14, 14), (10, 16), (18, 8)),
        batches=(1,),
    ),
    Family(
        "qwen-image-21",
        "diffusers.QwenImage21Transformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "context_in_dim": 24,
            "axes_dims_rope": (4, 6, 6),
        },
        _qwen21,
        ((8, 8), (12, 8), (10, 14)),
        # It makes lists of the positions of tokens; its layers have one program. The whole is tried again at other sizes.
        graphs=5,
        fallbacks=("depends on the values of a tensor",),
        captures_by_size=True,
    ),
    Family(
        "qwen-image",
        "diffusers.QwenImageTransformer2DModel",
        _QWEN,
        _qwen,
        # Where text begins is the larger of two sides.
        ((4, 4), (7, 4), (5, 10), (12, 6)),
        batches=(1,),
    ),
    Family(
        "qwen-image-controlnet",
        "diffusers.QwenImageControlNetModel",
        _QWEN,
        _qwen_controlnet,
        ((4, 4), (6, 4)),
        # A call has a list as long as the batch.
        captures_by_size=True,
    ),
    Family(
        "redux",
        "diffusers.pipelines.flux.modeling_flux.ReduxImageEncoder",
        {
            "redux_dim": 16,
            "txt_in_features": 24,
        },
        _redux,
        ((9,), (13,)),
    ),
    Family(
        "sana",
        "diffusers.SanaTransformer2DModel",
        _SANA,
        _sana,
        ((32, 32), (16, 24)),
    ),
    Family(
        "sana-controlled",
        "diffusers.SanaTransformer2DModel",
        _SANA,
        _sana_controlled,
        ((32, 32), (16, 24)),
    ),
    Family(
        "sana-controlnet",
        "diffusers.SanaControlNetModel",
        _SANA,
        _sana_controlnet,
        ((32, 32), (16, 24)),
    ),
    Family(
        "sana-sprint",
        "diffusers.SanaTransformer2DModel",
        {**_SANA, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads", "timestep_scale": 1000.0},
        _sana_sprint,
        ((32, 32), (16, 24)),
    ),
    Family(
        "sd3-skip-layers",
        "diffusers.SD3Transformer2DModel",
        {**_SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        _sd3_skip,
        ((16, 16), (8, 24)),
    ),
    Family(
        "sd3-controlled",
        "diffusers.SD3Transformer2DModel",
        _SD3,
        _sd3_controlled,
        ((16, 16), (8, 24)),
    ),
    Family(
        "sd3-controlnet",
        "diffusers.SD3ControlNetModel",
        _SD3,
        _sd3_controlnet,
        ((16, 16), (8, 24)),
    ),
    Family(
        "transformer-2d",
        "diffusers.Transformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "num_layers": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 8,
            "use_linear_projection": True,
        },
        _transformer_2d,
        ((16, 16), (8, 24)),
    ),
    Family(
        "z-image",
        "diffusers.ZImageTransformer2DModel",
        _Z_IMAGE,
        _z_image,
        ((16, 16), (24, 16), (32, 8), (16, 40)),
        batches=(1,),
        prepare=_make_tables,
    ),
    # Its tokens are padded to a multiple of 32.
    Family(
        "z-image-padded",
        "diffusers.ZImageTransformer2DModel",
        _Z_IMAGE,
        _z_image,
        ((10, 14), (18, 22), (6, 10), (26, 12)),
        batches=(2,),
        prepare=_make_tables,
    ),
    Family(
        "z-image-guided",
        "diffusers.ZImageTransformer2DModel",
        _Z_IMAGE | {"axes_lens": [256, 32, 32]},
        _z_image_guided,
        ((45, 11), (70, 30), (33, 12), (150, 99)),
        batches=(1,),
        prepare=_make_tables,
    ),
    Family(
        "z-image-controlled",
        "diffusers.ZImageTransformer2DModel",
        _Z_IMAGE | {"n_layers": 2},
        _z_image_controlled,
        ((10, 14), (18, 22), (6, 10)),
        batches=(1,),
        prepare=_make_tables,
    ),
    Family(
        "z-image-controlnet",
        "families_images.z_image_controlnet",
        {},
        _z_image_controlnet,
        ((10, 14), (8, 24), (30, 18)),
        batches=(1,),
        prepare=_make_tables,
    ),
)
