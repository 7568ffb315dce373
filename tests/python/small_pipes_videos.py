"""Pipelines of videos and sounds, small."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from small_pipes import TOKENS, Pipe, calls, drawing, mask, network, picture, prompts, random, tested_net, tested_vae

__all__ = ["VIDEO_PIPES"]


def _sizes(height: int, width: int, frames: int, other: int) -> tuple[Mapping[str, Any], ...]:
    """A first size; one with the edges exchanged and another number of frames; two prompts."""
    first = {"height": height, "width": width, "num_frames": frames}
    return first, {"height": width, "width": height, "num_frames": other}, {**first, "prompts": 2}


# --- pipelines --------------------------------------------------------------------------------------------------------


def _flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def _steps(**config: Any) -> Any:
    return diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, **config)


def _make(kind: str, transformer: str, vae: str, scheduler: Callable[[], Any] = _flow, /, **parts: Any) -> Any:
    """A pipeline of a transformer, an autoencoder and further parts, for embeddings instead of prompts."""
    made = {"tokenizer": None, "text_encoder": None, "vae": tested_vae(vae), "scheduler": scheduler()}
    return getattr(diffusers, kind)(**{**made, "transformer": tested_net(transformer), **parts})


def _wan(kind: str, transformer: str, **parts: Any) -> Any:
    """Wan's scheduler, and what is given as `config` changed in each transformer."""
    made = {name: tested_net(transformer, **config) for name, config in parts.pop("config", {}).items()}
    schedule = functools.partial(
        diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return _make(kind, transformer, "wan", schedule, **made, **parts)


def _looking(edge: int) -> dict[str, Any]:
    """What looks at an image."""
    config = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = network(
        transformers.CLIPVisionModelWithProjection, **config, image_size=edge, patch_size=edge // 2, projection_dim=24
    )
    size = {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    return {"image_encoder": encoder, "feature_extractor": transformers.CLIPImageProcessor(**size)}


def _animate() -> Any:
    unet = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    motion = {"motion_layers_per_block": 1, "motion_norm_num_groups": 4, "motion_num_attention_heads": 2}
    return diffusers.AnimateDiffPipeline(
        vae=tested_vae("kl"),
        text_encoder=None,
        tokenizer=None,
        unet=network(diffusers.UNet2DConditionModel, **unet),
        motion_adapter=network(diffusers.MotionAdapter, block_out_channels=(16, 32), **motion),
        scheduler=_steps(),
    )


def _stable_video() -> Any:
    return diffusers.StableVideoDiffusionPipeline(
        vae=tested_vae("temporal-decoder"),
        unet=tested_net("stable-video"),
        scheduler=diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction",
            timestep_type="continuous",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
        ),
        **_looking(224),
    )


class _Harmless:
    """In place of Cosmos's guardrail, which is a package with models of its own."""

    def to(self, _: Any) -> None:
        pass

    def check_video_safety(self, video: Any) -> Any:
        return video


def _stable_audio() -> Any:
    return diffusers.StableAudioPipeline(
        vae=tested_vae("oobleck", decoder_input_channels=6),
        text_encoder=None,
        tokenizer=None,
        projection_model=network(
            StableAudioProjectionModel, text_encoder_dim=20, conditioning_dim=20, min_value=0, max_value=32
        ),
        transformer=tested_net("stable-audio", global_states_input_dim=40),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(prediction_type="v_prediction", sigma_data=1.0),
    )


def _upsampler() -> Any:
    net = network(LTXLatentUpsamplerModel, in_channels=8, mid_channels=32, num_blocks_per_stage=1)
    return diffusers.LTXLatentUpsamplePipeline(vae=tested_vae("ltx"), latent_upsampler=net)


def _upsample(_: Any, batch: int, frames: int, height: int, width: int) -> Mapping[str, Any]:
    size = {"height": 4 * height, "width": 4 * width}
    return {"latents": random(batch, 8, frames, height, width), **size, "output_type": "np"}


_WAN = {"guidance_scale": 4.0, **prompts(16)}
# The autoencoder of Wan is Python around a network for single frames: once is enough.
_WAN_LATENTS = {**_WAN, "output_type": "latent"}
_LTX = {"guidance_scale": 3.0, **prompts(20, prompt_attention_mask=mask)}

VIDEO_PIPES: tuple[Pipe, ...] = (
    Pipe(
        "wan",
        lambda: _wan("WanPipeline", "wan"),
        calls(_WAN, *_sizes(32, 48, 5, 5)),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "wan-22",
        lambda: _wan("WanPipeline", "wan", config={"transformer_2": {}}, boundary_ratio=0.9),
        calls({**_WAN_LATENTS, "guidance_scale_2": 3.0}, *_sizes(32, 48, 9, 13)),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        # Each token has a timestep of its own.
        "wan-22-5b",
        lambda: _wan("WanPipeline", "wan", expand_timesteps=True),
        calls(_WAN_LATENTS, *_sizes(32, 48, 9, 13)),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "skyreels-forcing",
        lambda: _wan("SkyReelsV2DiffusionForcingPipeline", "skyreels-v2-df"),
        calls({"prompt": None, **_WAN_LATENTS}, *_sizes(32, 48, 9, 13)[:2]),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "ltx-image",
        lambda: _make(
            "LTXImageToVideoPipeline", "ltx", "ltx", transformer=tested_net("ltx", in_channels=8, out_channels=8)
        ),
        calls({**_LTX, "image": picture}, *_sizes(32, 64, 9, 17)),
        "frames",
        guidance=3.0,
    ),
    Pipe(
        # Without guidance its latents are passed as they are packed, channels first in memory.
        "ltx-condition",
        lambda: _make(
            "LTXConditionPipeline", "ltx", "ltx", transformer=tested_net("ltx", in_channels=8, out_channels=8)
        ),
        calls(
            {**_LTX, "image": picture},
            *_sizes(32, 64, 9, 17),
            {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 1.0},
        ),
        "frames",
        guidance=3.0,
    ),
    Pipe(
        "ltx-upsample",
        _upsampler,
        tuple(
            functools.partial(_upsample, batch=b, frames=f, height=h, width=w)
            for b, f, h, w in ((1, 2, 8, 12), (2, 3, 12, 8))
        ),
        "frames",
        steps=0,
    ),
    Pipe(
        "hunyuan",
        lambda: _make("HunyuanVideoPipeline", "hunyuan-video", "hunyuan-video", text_encoder_2=None, tokenizer_2=None),
        calls(
            {
                "guidance_scale": 6.0,
                **prompts(
                    16,
                    prompt_attention_mask=mask,
                    pooled_prompt_embeds=lambda seed: random(1, 8, seed=seed),
                ),
            },
            *_sizes(32, 48, 5, 9),
        ),
        "frames",
    ),
    Pipe(
        # The autoencoder splits what is longer than two latent frames.
        "cogvideox",
        lambda: _make("CogVideoXPipeline", "cogvideox-5b", "cogvideox", diffusers.CogVideoXDPMScheduler),
        calls({"guidance_scale": 4.0, "output_type": "latent", **prompts(24)}, *_sizes(32, 48, 9, 17)),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "animate",
        _animate,
        calls({"guidance_scale": 4.0, **prompts(24)}, *_sizes(32, 48, 3, 5)),
        "frames",
        guidance=4.0,
        # What it holds has become part of the UNet.
        left=("motion_adapter",),
    ),
    Pipe(
        "stable-video",
        _stable_video,
        calls({"image": drawing, "decode_chunk_size": 2}, *_sizes(32, 48, 4, 6)[:2]),
        "frames",
        guidance=3.0,
    ),
    Pipe(
        "latte",
        lambda: _make("LattePipeline", "latte", "kl", _steps),
        calls(
            {
                "guidance_scale": 4.0,
                "video_length": 3,
                "clean_caption": False,
                "negative_prompt": None,
                **prompts(20),
            },
            {"height": 32, "width": 64},
            {"height": 64, "width": 32, "prompts": 2},
        ),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "cosmos",
        lambda: _make(
            "CosmosTextToWorldPipeline",
            "cosmos",
            "cosmos",
            functools.partial(diffusers.EDMEulerScheduler, final_sigmas_type="sigma_min"),
            transformer=tested_net("cosmos", in_channels=4),
            safety_checker=_Harmless(),
        ),
        calls({"guidance_scale": 4.0, **prompts(16)}, *_sizes(32, 64, 9, 17)[:2]),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        # A square first: its positions along both edges are alike.
        "kandinsky5",
        lambda: _make(
            "Kandinsky5T2VPipeline", "kandinsky5-video", "hunyuan-video", text_encoder_2=None, tokenizer_2=None
        ),
        calls(
            {
                "guidance_scale": 4.0,
                "output_type": "latent",
                **{
                    f"{prefix}{name}": value
                    for seed, prefix in enumerate(("", "negative_"))
                    for name, value in (
                        ("prompt_embeds_qwen", random(1, TOKENS, 20, seed=seed)),
                        ("prompt_embeds_clip", random(1, 14, seed=seed)),
                        ("prompt_cu_seqlens", torch.tensor([0, TOKENS], dtype=torch.int32)),
                    )
                },
            },
            {"height": 64, "width": 64, "num_frames": 17},
            {"height": 64, "width": 96, "num_frames": 13},
        ),
        "frames",
        guidance=4.0,
    ),
    Pipe(
        "stable-audio",
        _stable_audio,
        calls(
            {"guidance_scale": 4.0, **prompts(20), "output_type": "pt"},
            {"audio_end_in_s": 0.005},
            {"audio_end_in_s": 0.003, "prompts": 2},
        ),
        "audios",
        guidance=4.0,
    ),
)
