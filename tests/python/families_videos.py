"""Transformers that draw videos or make sounds, small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed, get_3d_rotary_pos_embed

from families import Family, Inputs, Random

Size = tuple[int, ...]
MakeInputs = Callable[[Random, int, Size], Inputs]

_VIDEOS = ((3, 12, 20), (5, 8, 28))
"""Frames, height and width of latents."""


def _timestep(random: Random, batch: int) -> torch.Tensor:
    return random.tokens(1000, batch)


def _mask(random: Random, batch: int, tokens: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of a prompt that is shorter than the longest one, by a token in the first sample, by two in the second."""
    lengths = tokens - 1 - torch.arange(batch)
    return (torch.arange(tokens) < lengths[:, None]).to(dtype or random.dtype)


def _uneven_mask(batch: int, tokens: int, size: Size) -> torch.Tensor:
    """Of prompts of unequal lengths, which are others in a call with another number of frames."""
    lengths = tokens - size[0] - 2 * torch.arange(batch)
    return (torch.arange(tokens) < lengths[:, None]).long()


# --- Wan and what was made from it ------------------------------------------------------------------------------------

_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 40,
    "num_layers": 2,
}
_WAN_TOKENS = 512
"""Of a prompt, for models that tell an image's tokens from it by this count."""
_WAN_IMAGE = {**_WAN, "in_channels": 9, "image_dim": 18, "added_kv_proj_dim": 24}


def _wan(random: Random, batch: int, size: Size, *, channels: int = 4, tokens: int = 11) -> Inputs:
    return {
        "hidden_states": random.normal(batch, channels, *size),
        "timestep": _timestep(random, batch),
        "encoder_hidden_states": random.normal(batch, tokens, 16),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _wan_image(random: Random, batch: int, size: Size, *, images: int = 1) -> Inputs:
    return {
        **_wan(random, batch, size, channels=9, tokens=_WAN_TOKENS),
        "encoder_hidden_states_image": random.normal(images * batch, 7, 18),
    }


def _wan_by_token(random: Random, batch: int, size: Size) -> Inputs:
    """Wan 2.2's smaller model: each token has a timestep, zero in the frame that is given."""
    frames, height, width = size
    timestep = _timestep(random, batch)[:, None, None].expand(-1, frames, height * width // 4).clone()
    timestep[:, 0] = 0
    return {**_wan(random, batch, size), "timestep": timestep.flatten(1)}


def _vace(random: Random, batch: int, size: Size) -> Inputs:
    return {
        **_wan(random, batch, size),
        "control_hidden_states": random.normal(batch, 12, *size),
        "control_hidden_states_scale": torch.tensor([0.75, 1.5, 1.0], dtype=random.dtype),
    }


def _animate(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    return {
        **_wan(random, batch, (frames + 1, height, width), channels=12, tokens=_WAN_TOKENS),
        "encoder_hidden_states_image": random.normal(batch, 7, 18),
        "pose_hidden_states": random.normal(batch, 4, *size),
        "face_pixel_values": random.normal(batch, 3, 4 * frames - 3, 16, 16).tanh(),
        "motion_encode_batch_size": None,
    }


def _forcing(random: Random, batch: int, size: Size) -> Inputs:
    """Diffusion forcing: each frame has a timestep."""
    return {
        **_wan(random, batch, size),
        "timestep": random.tokens(1000, batch, size[0]),
        "enable_diffusion_forcing": True,
        "fps": [1] * batch,
    }


def _helios(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    long, middle, short, own = torch.arange(1 + 4 + 2 + 1 + frames).split([5, 2, 1, frames])
    return {
        **_wan(random, batch, size),
        "indices_hidden_states": own[None],
        "indices_latents_history_short": torch.cat([long[:1], short])[None],
        "indices_latents_history_mid": middle[None],
        "indices_latents_history_long": long[None, 1:],
        "latents_history_short": random.normal(batch, 4, 2, height, width),
        "latents_history_mid": random.normal(batch, 4, 2, height, width),
        "latents_history_long": random.normal(batch, 4, 4, height, width),
    }


# --- LTX --------------------------------------------------------------------------------------------------------------

_LTX: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 20,
}
_LTX2: dict[str, Any] = {
    **_LTX,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "rope_type": "split",
}
_LTX23 = {
    **_LTX2,
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}


def _ltx(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    return {
        "hidden_states": random.normal(batch, frames * height * width, 4),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "timestep": _timestep(random, batch).float(),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _ltx_conditions(random: Random, batch: int, size: Size) -> Inputs:
    """With conditions: the caller gives each token its place and its timestep."""
    frames, height, width = size
    axes = [torch.arange(edge) for edge in size]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1).float() * torch.tensor(
        [[0.32], [32], [32]]
    )
    tokens = frames * height * width
    return {
        "hidden_states": random.normal(batch, tokens, 4),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "timestep": random.tokens(1000, batch, tokens).float(),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "video_coords": coordinates.repeat(batch, 1, 1),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _ltx2(random: Random, batch: int, size: Size, *, prompt: tuple[int, int] = (20, 20)) -> Inputs:
    frames, height, width = size
    audio = 4 * frames + 1
    timestep = _timestep(random, batch).float()
    mask = _mask(random, batch, 11)
    return {
        "hidden_states": random.normal(batch, frames * height * width, 4),
        "audio_hidden_states": random.normal(batch, audio, 6),
        "encoder_hidden_states": random.normal(batch, 11, prompt[0]),
        "audio_encoder_hidden_states": random.normal(batch, 11, prompt[1]),
        "timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 24.0,
        "audio_num_frames": audio,
        "isolate_modalities": False,
        "spatio_temporal_guidance_blocks": None,
        "perturbation_mask": None,
        "use_cross_timestep": prompt != (20, 20),
        "attention_kwargs": None,
        "return_dict": False,
    }


# --- CogVideoX --------------------------------------------------------------------------------------------------------

_COG: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 24,
    "num_layers": 2,
    "sample_width": 20,
    "sample_height": 12,
    "sample_frames": 49,
    "max_text_seq_length": 11,
}
_COG_ROTARY = {**_COG, "use_rotary_positional_embeddings": True}
_COG_15 = {**_COG_ROTARY, "patch_size_t": 2, "patch_bias": False, "sample_width": 28}


def _rotary(size: Size, patch: Size, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frames, height, width = (edge // part for edge, part in zip(size, patch, strict=True))
    rotary: tuple[torch.Tensor, torch.Tensor] = get_3d_rotary_pos_embed(
        embed_dim=dim,
        crops_coords=None,
        grid_size=(height, width),
        temporal_size=frames,
        grid_type="slice",
        max_size=(height, width),
    )
    return rotary


def _cog(random: Random, batch: int, size: Size, *, channels: int = 4, patch: Size | None = None) -> Inputs:
    frames, *edges = size
    return {
        "hidden_states": random.normal(batch, frames, channels, *edges),
        "encoder_hidden_states": random.normal(batch, 11, 24),
        "timestep": _timestep(random, batch),
        "image_rotary_emb": _rotary(size, patch, 16) if patch else None,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _cog_image(random: Random, batch: int, size: Size) -> Inputs:
    return {**_cog(random, batch, size, channels=8, patch=(2, 2, 2)), "ofs": torch.full((1,), 2.0, dtype=random.dtype)}


def _consisid(random: Random, batch: int, size: Size) -> Inputs:
    return {
        **_cog(random, batch, size, channels=8, patch=(1, 2, 2)),
        "id_vit_hidden": [random.normal(batch, 9, 10) for _ in range(2)],
        "id_cond": random.normal(batch, 14),
    }


# --- HunyuanVideo -----------------------------------------------------------------------------------------------------

_HUNYUAN: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
_FRAMEPACK: dict[str, Any] = {
    **_HUNYUAN,
    "mlp_ratio": 2.0,
    "has_image_proj": True,
    "image_proj_dim": 14,
    "has_clean_x_embedder": True,
}


def _hunyuan(random: Random, batch: int, size: Size, *, channels: int = 4) -> Inputs:
    return {
        "hidden_states": random.normal(batch, channels, *size),
        "timestep": _timestep(random, batch),
        "encoder_hidden_states": random.normal(batch, 11, 16),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "pooled_projections": random.normal(batch, 8),
        "guidance": torch.full((batch,), 6000.0, dtype=random.dtype),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _hunyuan15(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 9, *size),
        "timestep": _timestep(random, batch).to(random.dtype),
        "encoder_hidden_states": random.normal(batch, 11, 16),
        "encoder_attention_mask": _mask(random, batch, 11),
        "encoder_hidden_states_2": random.normal(batch, 6, 12),
        "encoder_attention_mask_2": _mask(random, batch, 6),
        "image_embeds": random.normal(batch, 5, 14),
        "timestep_r": None,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _framepack(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    first, far, middle, last, own = torch.arange(1 + 16 + 2 + 1 + frames).split([1, 16, 2, 1, frames])
    return {
        **_hunyuan(random, batch, size),
        "encoder_attention_mask": _uneven_mask(batch, 11, size),
        "image_embeds": random.normal(batch, 7, 14),
        "indices_latents": own,
        "latents_clean": random.normal(batch, 4, 2, height, width),
        "indices_latents_clean": torch.cat([first, last]),
        "latents_history_2x": random.normal(batch, 4, 2, height, width),
        "indices_latents_history_2x": middle,
        "latents_history_4x": random.normal(batch, 4, 16, height, width),
        "indices_latents_history_4x": far,
    }


# --- other videos -----------------------------------------------------------------------------------------------------


def _mochi(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, 11, 24),
        "timestep": _timestep(random, batch),
        "encoder_attention_mask": _mask(random, batch, 11, torch.bool),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _allegro(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    lengths = (frames, height // 2, width // 2)
    freqs = tuple(
        get_1d_rotary_pos_embed(8, torch.arange(edge) / 2, use_real=True, repeat_interleave_real=False)
        for edge in lengths
    )
    positions = torch.cartesian_prod(*map(torch.arange, lengths)).reshape(-1, 3).transpose(0, 1).reshape(3, 1, -1)
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "timestep": _timestep(random, batch),
        "image_rotary_emb": (freqs, positions.contiguous().unbind()),
        "return_dict": False,
    }


def _easyanimate(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": _timestep(random, batch),
        "encoder_hidden_states": random.normal(batch, 11, 16),
        "return_dict": False,
    }


def _easyanimate_inpaint(random: Random, batch: int, size: Size) -> Inputs:
    return {**_easyanimate(random, batch, size), "inpaint_latents": random.normal(batch, 5, *size)}


def _latte(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, 3, *size),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "timestep": _timestep(random, batch),
        "enable_temporal_attentions": True,
        "return_dict": False,
    }


def _cosmos(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "timestep": _timestep(random, batch).float(),
        "encoder_hidden_states": random.normal(batch, 11, 16),
        "fps": 30,
        "condition_mask": random.normal(batch, 1, *size).sign().relu(),
        "return_dict": False,
    }


_COSMOS3: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 40,
    "latent_channel": 4,
    "patch_latent_dim": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_axes_dim": (4, 2, 2),
    "sound_gen": True,
    "sound_dim": 6,
    "vocab_size": 40,
}


def _cosmos3(random: Random, batch: int, size: Size) -> Inputs:
    """A prompt, a video that goes on from its first frame, and its sound, in one sequence."""
    frames, height, width = size
    patches = height // 2 * (width // 2)
    text, video, sound = 7, frames * patches, 2 * frames + 1
    grid = torch.cartesian_prod(*map(torch.arange, (frames, height // 2, width // 2))).T
    heard = torch.stack([torch.arange(sound), torch.zeros(sound), torch.zeros(sound)])
    places = torch.arange(text + video + sound)
    return {
        "input_ids": random.tokens(40, text),
        "text_indexes": places[:text],
        "position_ids": torch.cat([torch.arange(text).expand(3, -1), 107.0 + grid, 107.0 + heard], dim=1),
        "und_len": text,
        "sequence_length": text + video + sound,
        "vision_tokens": [random.normal(1, 4, *size)],
        "vision_token_shapes": [(frames, height // 2, width // 2)],
        "vision_sequence_indexes": places[text : text + video],
        "vision_mse_loss_indexes": places[text + patches : text + video],
        "vision_timesteps": torch.full((video - patches,), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(1, frames)],
        "sound_tokens": [random.normal(6, sound)],
        "sound_token_shapes": [(sound, 1, 1)],
        "sound_sequence_indexes": places[text + video :],
        "sound_mse_loss_indexes": places[text + video :].clone(),
        "sound_timesteps": torch.full((sound,), 700.0),
        "sound_noisy_frame_indexes": [torch.arange(sound)],
        "return_dict": False,
    }


def _cosmos3_action(random: Random, batch: int, size: Size) -> Inputs:
    """And what a robot does: which robot decides the weights, and is looked at."""
    inputs = _cosmos3(random, batch, size)
    first, actions = inputs["sequence_length"], 2 * size[0]
    positions = torch.stack([torch.arange(actions), torch.zeros(actions), torch.zeros(actions)])
    places = torch.arange(first, first + actions)
    return {
        **inputs,
        "position_ids": torch.cat([inputs["position_ids"], 107.0 + positions], dim=1),
        "sequence_length": first + actions,
        "action_tokens": [random.normal(actions, 5)],
        "action_token_shapes": [(actions, 1, 1)],
        "action_sequence_indexes": places,
        "action_mse_loss_indexes": places[1:],
        "action_timesteps": torch.full((actions - 1,), 700.0),
        "action_noisy_frame_indexes": [torch.arange(1, actions)],
        "action_domain_ids": [torch.tensor(2)],
    }


def _cosmos_frames(random: Random, batch: int, size: Size) -> Inputs:
    """Cosmos 2: each frame has a timestep."""
    inputs = _cosmos(random, batch, size)
    return {**inputs, "timestep": random.tokens(1000, batch, 1, size[0], 1, 1).float(), "fps": 16}


def _sana_video(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 4, *size),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "timestep": _timestep(random, batch),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _kandinsky5(random: Random, batch: int, size: Size) -> Inputs:
    frames, height, width = size
    return {
        "hidden_states": random.normal(batch, *size, 9),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "pooled_projections": random.normal(batch, 14),
        "timestep": _timestep(random, batch).to(random.dtype),
        "visual_rope_pos": [torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        "text_rope_pos": torch.arange(11),
        "scale_factor": (1.0, 2.0, 2.0),
        "sparse_params": None,
        "return_dict": True,
    }


def _kandinsky6(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, *size, 9),
        "audio_hidden_states": random.normal(batch, 4 * size[0] + 1, 6),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "pooled_projections": random.normal(batch, 14),
        "timestep": _timestep(random, batch),
        "visual_rope_pos": None,
        "encoder_attention_mask": _mask(random, batch, 11, torch.bool),
        "visual_token_type_ids": None,
        "return_dict": False,
    }


def _motif(random: Random, batch: int, size: Size) -> Inputs:
    return {
        "hidden_states": random.normal(batch, 9, *size),
        "timestep": _timestep(random, batch),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "encoder_attention_mask": _mask(random, batch, 11, torch.long),
        "image_embeds": random.normal(batch, 7, 14),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _temporal(random: Random, batch: int, size: Size) -> Inputs:
    frames, *edges = size
    return {
        "hidden_states": random.normal(batch * frames, 32, *edges),
        "num_frames": frames,
        "return_dict": False,
    }


# --- sounds -----------------------------------------------------------------------------------------------------------


def _stable_audio(random: Random, batch: int, size: Size) -> Inputs:
    (length,) = size
    return {
        "hidden_states": random.normal(batch, 6, length),
        "timestep": torch.tensor([0.71], dtype=random.dtype),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "global_hidden_states": random.normal(batch, 1, 14),
        "rotary_embedding": get_1d_rotary_pos_embed(8, length + 1, use_real=True, repeat_interleave_real=False),
        "return_dict": False,
    }


def _stable_audio3(random: Random, batch: int, size: Size) -> Inputs:
    (length,) = size
    return {
        "hidden_states": random.normal(batch, 6, length),
        "timestep": torch.full((batch,), 0.71),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "global_hidden_states": random.normal(batch, 14),
        "encoder_attention_mask": _mask(random, batch, 11, torch.bool),
        "return_dict": False,
    }


def _ace_step(random: Random, batch: int, size: Size) -> Inputs:
    (length,) = size
    timestep = random.normal(batch).sigmoid()
    return {
        "hidden_states": random.normal(batch, length, 6),
        "timestep": timestep,
        "timestep_r": timestep,
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "context_latents": random.normal(batch, length, 12),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _longcat(random: Random, batch: int, size: Size) -> Inputs:
    (length,) = size
    return {
        "hidden_states": random.normal(batch, length, 6),
        "encoder_hidden_states": random.normal(batch, 11, 20),
        "encoder_attention_mask": _mask(random, batch, 11, torch.bool),
        "timestep": random.normal(batch).sigmoid(),
        "attention_mask": _mask(random, batch, length, torch.bool),
        "latent_cond": random.normal(batch, length, 6),
    }


_SOUNDS = ((34,), (58,))


VIDEOS: tuple[Family, ...] = (
    Family("wan", "diffusers.WanTransformer3DModel", _WAN, _wan, _VIDEOS),
    Family("wan-22-5b", "diffusers.WanTransformer3DModel", _WAN, _wan_by_token, _VIDEOS),
    Family("wan-i2v", "diffusers.WanTransformer3DModel", _WAN_IMAGE, _wan_image, _VIDEOS),
    Family(
        "wan-flf2v",
        "diffusers.WanTransformer3DModel",
        {**_WAN_IMAGE, "pos_embed_seq_len": 14},
        functools.partial(_wan_image, images=2),
        _VIDEOS,
    ),
    Family(
        "wan-vace",
        "diffusers.WanVACETransformer3DModel",
        {**_WAN, "num_layers": 3, "vace_layers": [0, 1, 2], "vace_in_channels": 12},
        _vace,
        _VIDEOS,
    ),
    Family(
        "wan-animate",
        "diffusers.WanAnimateTransformer3DModel",
        {
            **_WAN_IMAGE,
            "in_channels": 12,
            "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 12, "8": 12, "16": 10},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 14,
            "face_encoder_hidden_dim": 20,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        _animate,
        ((2, 12, 20),),
        batches=(1,),
        fallbacks=("linalg_qr",),
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family("skyreels-v2", "diffusers.SkyReelsV2Transformer3DModel", _WAN, _wan, _VIDEOS),
    Family(
        "skyreels-v2-df",
        "diffusers.SkyReelsV2Transformer3DModel",
        {**_WAN, "inject_sample_info": True},
        _forcing,
        _VIDEOS,
        batches=(1,),
    ),
    Family(
        "chronoedit",
        "diffusers.ChronoEditTransformer3DModel",
        {**_WAN_IMAGE, "rope_temporal_skip_len": 8},
        _wan_image,
        _VIDEOS,
    ),
    Family(
        "helios",
        "diffusers.HeliosTransformer3DModel",
        {**_WAN, "rope_dim": (4, 4, 4)},
        _helios,
        ((3, 12, 20), (5, 20, 28)),
        # With one sample only, positions that are given once for all samples look like its own.
        batches=(2, 1),
    ),
    Family("ltx", "diffusers.LTXVideoTransformer3DModel", _LTX, _ltx, _VIDEOS),
    Family(
        "ltx-conditions",
        "diffusers.LTXVideoTransformer3DModel",
        _LTX,
        _ltx_conditions,
        _VIDEOS,
        # Its angles are so large that what f32 leaves of them is eager's error too.
        exact_in=torch.float32,
    ),
    Family("ltx2", "diffusers.LTX2VideoTransformer3DModel", _LTX2, _ltx2, _VIDEOS),
    Family(
        "ltx23",
        "diffusers.LTX2VideoTransformer3DModel",
        _LTX23,
        functools.partial(_ltx2, prompt=(16, 8)),
        _VIDEOS,
    ),
    Family("cogvideox-2b", "diffusers.CogVideoXTransformer3DModel", _COG, _cog, _VIDEOS),
    Family(
        "cogvideox-5b",
        "diffusers.CogVideoXTransformer3DModel",
        _COG_ROTARY,
        functools.partial(_cog, patch=(1, 2, 2)),
        _VIDEOS,
    ),
    Family(
        "cogvideox-5b-i2v",
        "diffusers.CogVideoXTransformer3DModel",
        {**_COG_ROTARY, "in_channels": 8, "use_learned_positional_embeddings": True},
        functools.partial(_cog, channels=8, patch=(1, 2, 2)),
        ((13, 12, 20),),
    ),
    Family(
        "cogvideox-15",
        "diffusers.CogVideoXTransformer3DModel",
        _COG_15,
        functools.partial(_cog, patch=(2, 2, 2)),
        ((6, 12, 20), (8, 20, 28)),
    ),
    Family(
        "cogvideox-15-i2v",
        "diffusers.CogVideoXTransformer3DModel",
        {**_COG_15, "in_channels": 8, "ofs_embed_dim": 8},
        _cog_image,
        ((6, 12, 20), (8, 20, 28)),
        # With one sample only, a value that is given once for all samples looks like its own.
        batches=(2, 1),
    ),
    Family(
        "consisid",
        "diffusers.ConsisIDTransformer3DModel",
        {
            **_COG_ROTARY,
            "in_channels": 8,
            "is_train_face": True,
            "cross_attn_interval": 2,
            "cross_attn_dim_head": 6,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 14,
            "LFE_vit_dim": 10,
            "LFE_depth": 2,
            "LFE_dim_head": 5,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 3,
            "LFE_num_querie": 4,
            "LFE_output_dim": 21,
            "LFE_ff_mult": 2,
            "LFE_num_scale": 2,
        },
        _consisid,
        _VIDEOS,
    ),
    Family("hunyuan-video", "diffusers.HunyuanVideoTransformer3DModel", _HUNYUAN, _hunyuan, _VIDEOS),
    Family(
        "hunyuan-video-i2v",
        "diffusers.HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "image_condition_type": "token_replace"},
        _hunyuan,
        _VIDEOS,
    ),
    Family(
        "hunyuan-video-15",
        "diffusers.HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "text_embed_2_dim": 12,
            "image_embed_dim": 14,
            "rope_axes_dim": (2, 4, 4),
            "target_size": 16,
        },
        _hunyuan15,
        ((3, 6, 10), (5, 8, 6)),
        # Valid tokens go before padding, by each prompt's mask: another batch is another program.
        batches=(2,),
    ),
    Family(
        "framepack",
        "diffusers.HunyuanVideoFramepackTransformer3DModel",
        _FRAMEPACK,
        _framepack,
        # Its history is padded to multiples of 4 and 8.
        ((3, 16, 16), (5, 8, 24), (3, 12, 18), (3, 14, 16), (3, 34, 10)),
        # Of a single prompt, the words that count are taken; of several, the others are masked.
        batches=(2,),
    ),
    Family(
        "framepack-one-prompt",
        "diffusers.HunyuanVideoFramepackTransformer3DModel",
        _FRAMEPACK,
        _framepack,
        ((3, 16, 16), (5, 8, 24)),
        batches=(1,),
    ),
    Family(
        "mochi",
        "diffusers.MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "pooled_projection_dim": 24,
            "in_channels": 4,
            "text_embed_dim": 24,
            "time_embed_dim": 12,
            "max_sequence_length": 11,
        },
        _mochi,
        ((3, 12, 20), (2, 16, 12)),
        # Each prompt's own tokens are picked out of the batch: another one is another program.
        batches=(2,),
    ),
    Family(
        "allegro",
        "diffusers.AllegroTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "sample_width": 20,
            "sample_height": 12,
            "sample_frames": 3,
            "caption_channels": 20,
        },
        _allegro,
        ((3, 16, 20), (11, 8, 28)),
        # With one sample only, positions that are given once for all samples look like its own.
        batches=(2, 1),
    ),
    Family(
        "easyanimate",
        "diffusers.EasyAnimateTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "add_norm_text_encoder": True,
        },
        _easyanimate,
        _VIDEOS,
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "easyanimate-inpaint",
        "diffusers.EasyAnimateTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 9,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 1,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
        },
        _easyanimate_inpaint,
        _VIDEOS,
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "latte",
        "diffusers.LatteTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "norm_eps": 1e-6,
            "caption_channels": 20,
            "video_length": 3,
        },
        _latte,
        ((12, 20), (8, 28)),
    ),
    Family(
        "cosmos",
        "diffusers.CosmosTransformer3DModel",
        {
            "in_channels": 5,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (128, 240, 240),
            "concat_padding_mask": False,
        },
        _cosmos,
        _VIDEOS,
        exact_in=torch.float32,
    ),
    Family(
        "cosmos-2",
        "diffusers.CosmosTransformer3DModel",
        {
            "in_channels": 5,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (128, 240, 240),
            "rope_scale": (1.0, 4.0, 4.0),
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
        },
        _cosmos_frames,
        _VIDEOS,
    ),
    Family(
        "cosmos3",
        "diffusers.Cosmos3OmniTransformer",
        _COSMOS3,
        _cosmos3,
        ((3, 4, 6), (5, 6, 4)),
        batches=(1,),
        fallbacks=("writing by index", "aten.scatter_add") * 2,
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family(
        "cosmos3-action",
        "diffusers.Cosmos3OmniTransformer",
        {**_COSMOS3, "action_gen": True, "action_dim": 5, "num_embodiment_domains": 3},
        _cosmos3_action,
        ((3, 4, 6),),
        batches=(1,),
        graphs=3,
        fallbacks=("writing by index", "aten.scatter_add"),
    ),
    Family(
        "sana-video",
        "diffusers.SanaVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 20,
            "sample_size": 8,
            "patch_size": (1, 2, 2),
            "qk_norm": "rms_norm_across_heads",
        },
        _sana_video,
        _VIDEOS,
    ),
    Family(
        "kandinsky5-video",
        "diffusers.Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4,
            "in_text_dim": 20,
            "in_text_dim2": 14,
            "time_dim": 18,
            "out_visual_dim": 4,
            "model_dim": 24,
            "ff_dim": 40,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
            "visual_cond": True,
        },
        _kandinsky5,
        _VIDEOS,
        exact_in=torch.float32,
    ),
    Family(
        "kandinsky6",
        "diffusers.Kandinsky6Transformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 20,
            "in_text_dim2": 14,
            "time_dim": 18,
            "model_dim": 24,
            "ff_dim": 40,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
            "in_audio_dim": 6,
            "out_audio_dim": 6,
            "text_token_padding": True,
            "ca_rope": True,
            "cross_gates": True,
            "fix_modulation": True,
        },
        _kandinsky6,
        _VIDEOS,
    ),
    Family(
        "motif-video",
        "diffusers.MotifVideoTransformer3DModel",
        {
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_decoder_layers": 1,
            "text_embed_dim": 20,
            "image_embed_dim": 14,
            "rope_axes_dim": (4, 4, 4),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        _motif,
        _VIDEOS,
        exact_in=torch.float32,
    ),
    Family(
        "transformer-temporal",
        "diffusers.TransformerTemporalModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 32, "norm_num_groups": 8},
        _temporal,
        ((3, 12, 20), (3, 8, 14)),
    ),
    Family(
        "stable-audio",
        "diffusers.StableAudioDiTModel",
        {
            "sample_size": 34,
            "in_channels": 6,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "out_channels": 6,
            "cross_attention_dim": 32,
            "time_proj_dim": 10,
            "global_states_input_dim": 14,
            "cross_attention_input_dim": 20,
        },
        _stable_audio,
        _SOUNDS,
        # With one sample only, a value that is given once for all samples looks like its own.
        batches=(2, 1),
    ),
    Family(
        "stable-audio-3",
        "diffusers.StableAudio3DiTModel",
        {
            "io_channels": 6,
            "embed_dim": 40,
            "depth": 2,
            "num_heads": 2,
            "cond_token_dim": 20,
            "global_cond_dim": 14,
            "local_add_cond_dim": 7,
            "timestep_features_dim": 16,
            "num_memory_tokens": 3,
        },
        _stable_audio3,
        _SOUNDS,
    ),
    Family(
        "ace-step",
        "diffusers.AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 18,
            "audio_acoustic_hidden_dim": 6,
            "sliding_window": 8,
            "encoder_hidden_size": 20,
        },
        _ace_step,
        _SOUNDS,
    ),
    Family(
        "longcat-audio",
        "diffusers.LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 20, "latent_dim": 6},
        _longcat,
        _SOUNDS,
    ),
)
