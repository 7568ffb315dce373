"""Pipelines of images beside Stable Diffusion's, small."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

from small_pipes import (
    TOKENS,
    Call,
    Pipe,
    calls,
    drawing,
    mask,
    network,
    picture,
    prompts,
    random,
    tested_net,
    tested_vae,
)

__all__ = ["IMAGE_PIPES"]

Size = Mapping[str, Any]

# --- calls ------------------------------------------------------------------------------------------------------------

SMALL: tuple[Size, ...] = ({"height": 32, "width": 48}, {"height": 64, "width": 32})
PROMPTS: tuple[Size, ...] = (*SMALL, {**SMALL[0], "prompts": 2})
REPEATED: tuple[Size, ...] = (*SMALL, {**SMALL[0], "num_images_per_prompt": 2})
LARGER: tuple[Size, ...] = ({"height": 64, "width": 128}, {"height": 128, "width": 64})
"""For what is divided by 32."""
LARGER_PROMPTS: tuple[Size, ...] = (*LARGER, {**LARGER[0], "prompts": 2})
WIDE: tuple[Size, ...] = (
    {"height": 32, "width": 64},
    {"height": 64, "width": 96},
    {"height": 32, "width": 64, "num_images_per_prompt": 2},
)
"""For Qwen-Image: which edge is longer, and whether half an edge is whole, decide what is computed."""


def _half(height: int, width: int) -> torch.Tensor:
    """What is drawn again larger."""
    return picture(height // 2, width // 2) * 2 - 1


def _two_pictures(height: int, width: int) -> list[torch.Tensor]:
    return [picture(height, width), 1 - picture(height, width)]


def _masked(height: int, width: int) -> torch.Tensor:
    """Where to paint: the right half."""
    return (torch.arange(width) >= width // 2).float().expand(1, 1, height, width)


def _present(seed: int) -> torch.Tensor:
    return mask(seed).bool()


def _pooled(width: int) -> Callable[[int], torch.Tensor]:
    return lambda seed: random(1, width, seed=seed + 5)


def _pairs(**make: Callable[[int], Any]) -> dict[str, Any]:
    """Arguments, functions of a seed, for a prompt and for a negative one."""
    return {f"{prefix}{name}": of(seed) for seed, prefix in enumerate(("", "negative_")) for name, of in make.items()}


def _rows(given: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Embeddings of several lengths, as lists."""
    return {name: [value[0, : 7 if name.startswith("negative_") else TOKENS]] for name, value in given.items()}


def _only_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without the arguments for what is not to be drawn."""
    return {name: value for name, value in given.items() if not name.startswith("negative_")}


def _fixed(*arguments: Mapping[str, Any]) -> tuple[Call, ...]:
    """Calls with these arguments and no others than all have."""

    def call(_: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"num_inference_steps": 2, "output_type": "np", **given}

    return tuple(functools.partial(call, given=given) for given in arguments)


class Words:
    """In place of a tokenizer: as many tokens for every text, which follow from its letters."""

    model_max_length = TOKENS

    def __call__(self, texts: str | list[str], **_: Any) -> transformers.BatchEncoding:
        rows = [texts] if isinstance(texts, str) else texts
        ids = torch.tensor([[(3 + sum(map(ord, row)) * (at + 7)) % 190 for at in range(TOKENS)] for row in rows])
        ids[:, -1] = 2  # The end of a text, to CLIP.
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


# --- pipelines --------------------------------------------------------------------------------------------------------

_UNSAFE: Mapping[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_CLIP: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 24,
}


def _flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def _steps(**config: Any) -> Any:
    return diffusers.DDIMScheduler(clip_sample=False, **config)


def _vae(**config: Any) -> Any:
    """An autoencoder as Flux has."""
    own = {"shift_factor": 0.1, "scaling_factor": 1.5, "use_quant_conv": False, "use_post_quant_conv": False}
    return tested_vae("kl", **own, **config)


def _make(kind: str, scheduler: Callable[[], Any], /, **parts: Any) -> Any:
    """A pipeline for embeddings instead of prompts."""
    return getattr(diffusers, kind)(scheduler=scheduler(), **{"tokenizer": None, "text_encoder": None, **parts})


def _flux(kind: str, channels: int = 16, /, **parts: Any) -> Any:
    transformer = tested_net("flux", in_channels=channels, out_channels=16)
    return _make(kind, _flow, vae=_vae(), transformer=transformer, text_encoder_2=None, tokenizer_2=None, **parts)


def _sd3(kind: str, transformer: str = "sd35-medium", /, **parts: Any) -> Any:
    absent = {f"{part}_{number}": None for part in ("text_encoder", "tokenizer") for number in (2, 3)}
    net = tested_net(transformer, in_channels=4, out_channels=4)
    return _make(kind, _flow, vae=_vae(), transformer=net, **absent, **parts)


def _qwen(kind: str, /, **parts: Any) -> Any:
    schedule = functools.partial(_flow, use_dynamic_shifting=True)
    return _make(kind, schedule, vae=tested_vae("qwen-image"), transformer=tested_net("qwen-image"), **parts)


def _z_image() -> Any:
    transformer = tested_net("z-image", all_patch_size=(2,), all_f_patch_size=(1,), axes_lens=[256, 32, 32])
    return _make("ZImagePipeline", _flow, vae=_vae(), transformer=transformer)


def _flux2(kind: str, /, **config: Any) -> Any:
    net = tested_net("flux2", in_channels=16, **config)
    return _make(kind, _flow, vae=tested_vae("flux2"), transformer=net)


def _sana(kind: str, transformer: str, scheduler: Callable[[], Any], /, **parts: Any) -> Any:
    return _make(kind, scheduler, vae=tested_vae("dc"), transformer=tested_net(transformer), **parts)


def _pixart(kind: str, transformer: str, /, **config: Any) -> Any:
    return _make(kind, _steps, vae=tested_vae("kl"), transformer=tested_net(transformer, **config))


def _kolors() -> Any:
    unet = network(
        diffusers.UNet2DConditionModel,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=56,
        cross_attention_dim=16,
        encoder_hid_dim=24,
        encoder_hid_dim_type="text_proj",
        norm_num_groups=4,
    )
    return _make("KolorsPipeline", diffusers.EulerDiscreteScheduler, vae=tested_vae("kl"), unet=unet)


def _hunyuan() -> Any:
    levels = {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return _make(
        "HunyuanDiTPipeline",
        diffusers.DDPMScheduler,
        vae=tested_vae("kl", **levels),
        transformer=tested_net("hunyuan-dit"),
        text_encoder_2=None,
        tokenizer_2=None,
        **_UNSAFE,
    )


def _stable(kind: str, unet: str, scheduler: Callable[[], Any] = _steps, /, **parts: Any) -> Any:
    """A pipeline of Stable Diffusion's parts."""
    net = tested_net(unet, **parts.pop("config", {}))
    return _make(kind, scheduler, vae=tested_vae("kl"), unet=net, **{**_UNSAFE, **parts})


def _writing(kind: Any) -> Any:
    """What makes embeddings of the tokens of `Words`."""
    return network(kind, vocab_size=200, bos_token_id=0, eos_token_id=2, **_CLIP)


def _looking(kind: Any, **config: Any) -> Any:
    """What makes an embedding of an image."""
    return network(kind, **_CLIP, image_size=28, patch_size=7, **config)


def _words() -> dict[str, Any]:
    return {"tokenizer": Words(), "text_encoder": _writing(transformers.CLIPTextModel)}


def _floyd(kind: str, unet: str, /, **parts: Any) -> Any:
    schedule = functools.partial(diffusers.DDPMScheduler, variance_type="learned_range", thresholding=True)
    return _make(kind, schedule, unet=tested_net(unet), watermarker=None, **_UNSAFE, **parts)


def _kandinsky() -> Any:
    return diffusers.KandinskyV22Pipeline(
        unet=tested_net("unet-image-embeds", out_channels=8),
        scheduler=diffusers.DDPMScheduler(),
        movq=tested_vae("movq"),
    )


def _kandinsky_prior() -> Any:
    prior = {"num_attention_heads": 2, "attention_head_dim": 8, "embedding_dim": 24, "num_layers": 1}
    return diffusers.KandinskyV22PriorPipeline(
        prior=network(diffusers.PriorTransformer, num_embeddings=TOKENS, additional_embeddings=4, **prior),
        image_encoder=_looking(transformers.CLIPVisionModelWithProjection),
        text_encoder=_writing(transformers.CLIPTextModelWithProjection),
        tokenizer=Words(),
        scheduler=diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
        image_processor=None,
    )


def _cascade(kind: str, /, **parts: Any) -> Any:
    return _make(kind, diffusers.DDPMWuerstchenScheduler, **parts)


def _cascade_decoder() -> Any:
    codes = {"bottleneck_blocks": 1, "embed_dim": 16, "num_vq_embeddings": 32, "latent_channels": 4, "levels": 2}
    vqgan = network(PaellaVQModel, **codes)
    return _cascade("StableCascadeDecoderPipeline", decoder=tested_net("cascade-decoder"), vqgan=vqgan)


def _variations() -> Any:
    return diffusers.StableUnCLIPImg2ImgPipeline(
        feature_extractor=None,
        image_encoder=_looking(transformers.CLIPVisionModelWithProjection),
        image_normalizer=StableUnCLIPImageNormalizer(embedding_dim=24),
        image_noising_scheduler=diffusers.DDPMScheduler(),
        tokenizer=None,
        text_encoder=_writing(transformers.CLIPTextModel),
        unet=tested_net("unet-mask", class_embed_type="projection", projection_class_embeddings_input_dim=48),
        scheduler=_steps(),
        vae=tested_vae("kl"),
    )


def _adapters() -> Any:
    config = {"in_channels": 3, "channels": [16, 32], "num_res_blocks": 1, "downscale_factor": 2}
    nets = [network(diffusers.T2IAdapter, seed, adapter_type="full_adapter", **config) for seed in (0, 1)]
    return _stable("StableDiffusionAdapterPipeline", "unet-mask", adapter=diffusers.MultiAdapter(nets))


def _upscaler() -> Any:
    return _make(
        "StableDiffusionUpscalePipeline",
        _steps,
        vae=tested_vae("kl"),
        unet=tested_net("unet-upscaler", num_class_embeds=400),
        low_res_scheduler=diffusers.DDPMScheduler(),
    )


def _latent_upscaler() -> Any:
    return _make(
        "StableDiffusionLatentUpscalePipeline",
        diffusers.EulerDiscreteScheduler,
        vae=tested_vae("kl"),
        unet=tested_net("unet-mask", in_channels=8, out_channels=5, time_cond_proj_dim=160),
    )


def _super_resolution() -> Any:
    return diffusers.LDMSuperResolutionPipeline(
        vqvae=tested_vae("vq", latent_channels=3, vq_embed_dim=3),
        unet=tested_net("unet-uncond", in_channels=6, out_channels=3),
        scheduler=_steps(),
    )


_GUIDED_FLUX = {"true_cfg_scale": 2.0, **prompts(48, pooled_prompt_embeds=_pooled(32))}
_FLUX = _only_prompt(prompts(48, pooled_prompt_embeds=_pooled(32)))
_FLUX_CONTROL: Mapping[str, Any] = {"num_attention_heads": 4, "joint_attention_dim": 48, "pooled_projection_dim": 32}
_SD3 = {"guidance_scale": 4.0, **prompts(48, pooled_prompt_embeds=_pooled(32))}
_SD3_CONTROL: Mapping[str, Any] = {**_FLUX_CONTROL, "caption_projection_dim": 64, "pos_embed_max_size": 96}
_QWEN = {"true_cfg_scale": 3.0, **prompts(16, prompt_embeds_mask=mask)}
_AS_GIVEN = {"clean_caption": False, "use_resolution_binning": False}
_PIXART = {"guidance_scale": 4.0, "negative_prompt": None, **_AS_GIVEN, **prompts(48, prompt_attention_mask=mask)}
_SANA = prompts(8, prompt_attention_mask=mask)
_STABLE = {"guidance_scale": 4.0, **prompts(24)}
_HUNYUAN = _pairs(
    prompt_embeds=lambda seed: random(1, 12, 16, seed=seed),
    prompt_attention_mask=lambda seed: mask(seed, 12),
    prompt_embeds_2=lambda seed: random(1, 7, 24, seed=seed + 3),
    prompt_attention_mask_2=lambda seed: mask(seed, 7),
)
_CASCADE = {
    "guidance_scale": 2.0,
    **_pairs(
        prompt_embeds=lambda seed: random(1, TOKENS, 12, seed=seed),
        prompt_embeds_pooled=lambda seed: random(1, 1, 12, seed=seed + 2),
    ),
}

IMAGE_PIPES: tuple[Pipe, ...] = (
    Pipe("flux", lambda: _flux("FluxPipeline"), calls(_GUIDED_FLUX, *PROMPTS), guidance=2.0),
    Pipe(
        "flux-image",
        lambda: _flux("FluxImg2ImgPipeline"),
        calls({**_FLUX, "image": picture, "strength": 1.0}, *PROMPTS),
    ),
    Pipe(
        "flux-fill",
        lambda: _flux("FluxFillPipeline", 48),
        calls({**_FLUX, "image": picture, "mask_image": _masked}, *PROMPTS),
    ),
    Pipe(
        "flux-kontext",
        lambda: _flux("FluxKontextPipeline"),
        calls({**_FLUX, "image": picture, "_auto_resize": False, "max_area": 32 * 48}, *PROMPTS),
    ),
    Pipe(
        "flux-controlnet",
        lambda: _flux(
            "FluxControlNetPipeline", controlnet=tested_net("flux-controlnet", in_channels=16, **_FLUX_CONTROL)
        ),
        calls({**_FLUX, "control_image": picture, "controlnet_conditioning_scale": 0.7}, *PROMPTS),
    ),
    Pipe(
        "flux2-image",
        lambda: _flux2("Flux2Pipeline"),
        calls({**_only_prompt(prompts(32)), "image": lambda height, width: drawing(64, 96)}, *PROMPTS),
    ),
    Pipe(
        "flux2-klein",
        lambda: _flux2("Flux2KleinPipeline", guidance_embeds=False),
        calls({"guidance_scale": 4.0, **prompts(32)}, *PROMPTS),
        guidance=4.0,
    ),
    # The first step fills an object with keys and values of the picture, which all others read.
    Pipe(
        "flux2-klein-kept",
        lambda: _flux2("Flux2KleinKVPipeline", guidance_embeds=False),
        calls({**_only_prompt(prompts(32)), "image": lambda height, width: drawing(2 * height, 96)}, *PROMPTS),
    ),
    Pipe(
        "sd3-controlnet",
        lambda: _sd3("StableDiffusion3ControlNetPipeline", controlnet=tested_net("sd3-controlnet", **_SD3_CONTROL)),
        calls({**_SD3, "control_image": picture, "controlnet_conditioning_scale": 0.7}, *PROMPTS),
        guidance=4.0,
    ),
    Pipe(
        "sd3-perturbed",
        lambda: _sd3("StableDiffusion3PAGPipeline", "sd3"),
        calls({**_SD3, "pag_scale": 2.0}, *PROMPTS),
        guidance=6.0,
    ),
    Pipe(
        "qwen-controlnet",
        lambda: _qwen("QwenImageControlNetPipeline", controlnet=tested_net("qwen-image-controlnet")),
        calls(
            {**_QWEN, "output_type": "latent", "control_image": picture, "controlnet_conditioning_scale": 0.7}, *WIDE
        ),
        guidance=3.0,
    ),
    # Two sizes: of two images it is given two lists twice as long, which is another structure.
    Pipe("z-image", _z_image, calls({"guidance_scale": 3.0, **_rows(prompts(16))}, *SMALL), guidance=3.0),
    Pipe(
        "sana-sprint",
        lambda: _sana("SanaSprintPipeline", "sana-sprint", diffusers.SCMScheduler),
        calls({**_AS_GIVEN, **_only_prompt(_SANA)}, *LARGER_PROMPTS),
    ),
    Pipe(
        "sana-controlnet",
        lambda: _sana("SanaControlNetPipeline", "sana", _flow, controlnet=tested_net("sana-controlnet")),
        calls({**_AS_GIVEN, **_SANA, "negative_prompt": None, "control_image": picture}, *LARGER_PROMPTS),
        guidance=4.5,
    ),
    Pipe(
        "pixart-alpha",
        lambda: _pixart("PixArtAlphaPipeline", "pixart-alpha", sample_size=128),
        calls(_PIXART, *PROMPTS),
        guidance=4.0,
    ),
    Pipe(
        "pixart-sigma", lambda: _pixart("PixArtSigmaPipeline", "pixart-sigma"), calls(_PIXART, *PROMPTS), guidance=4.0
    ),
    Pipe(
        "kolors",
        _kolors,
        calls({"guidance_scale": 4.0, **prompts(24, pooled_prompt_embeds=_pooled(8))}, *PROMPTS),
        guidance=4.0,
    ),
    Pipe(
        "chroma",
        lambda: _make("ChromaPipeline", _flow, vae=_vae(), transformer=tested_net("chroma", in_channels=16)),
        calls({"guidance_scale": 4.0, **prompts(32, prompt_attention_mask=_present)}, *PROMPTS),
        guidance=4.0,
    ),
    Pipe(
        "aura",
        lambda: _make("AuraFlowPipeline", _flow, vae=tested_vae("kl"), transformer=tested_net("auraflow")),
        calls({"guidance_scale": 3.0, **prompts(32, prompt_attention_mask=mask)}, *PROMPTS),
        guidance=3.0,
    ),
    Pipe(
        "cogview4-control",
        lambda: _make(
            "CogView4ControlPipeline", _flow, vae=tested_vae("kl"), transformer=tested_net("cogview4", in_channels=8)
        ),
        calls({"guidance_scale": 3.0, **prompts(8), "control_image": picture}, *PROMPTS),
        guidance=3.0,
    ),
    Pipe(
        "hunyuan-dit",
        _hunyuan,
        calls({"guidance_scale": 3.0, "use_resolution_binning": False, **_HUNYUAN}, *LARGER_PROMPTS),
        guidance=3.0,
    ),
    Pipe(
        "kandinsky22",
        _kandinsky,
        calls({"guidance_scale": 3.0, **_pairs(image_embeds=lambda seed: random(1, 20, seed=seed))}, *REPEATED),
        guidance=3.0,
    ),
    Pipe(
        "kandinsky22-prior",
        _kandinsky_prior,
        _fixed({"prompt": "a cat", "guidance_scale": 3.0}, {"prompt": ["a cat", "a dog"], "guidance_scale": 3.0}),
        "image_embeds",
        guidance=3.0,
    ),
    Pipe(
        "cascade-prior",
        lambda: _cascade(
            "StableCascadePriorPipeline",
            text_encoder=_writing(transformers.CLIPTextModel),
            prior=tested_net("cascade-prior"),
        ),
        calls(_CASCADE, {"height": 512, "width": 700}, {"height": 800, "width": 512}),
        "image_embeddings",
        guidance=2.0,
    ),
    Pipe(
        # Each latent of the prior is 10.67 of the decoder: edges that are multiples of four there.
        "cascade-decoder",
        _cascade_decoder,
        _fixed(*({**_CASCADE, "image_embeddings": random(1, 6, *size)} for size in ((6, 12), (12, 6)))),
        guidance=2.0,
    ),
    Pipe(
        "floyd-upscaler",
        lambda: _floyd(
            "IFSuperResolutionPipeline", "unet-floyd-upscaler", image_noising_scheduler=diffusers.DDPMScheduler()
        ),
        calls({"guidance_scale": 3.0, "clean_caption": False, **prompts(20), "image": _half}, *REPEATED),
        guidance=3.0,
    ),
    Pipe(
        "lcm",
        lambda: _stable("LatentConsistencyModelPipeline", "unet-lcm", diffusers.LCMScheduler),
        calls(_only_prompt(_STABLE), *PROMPTS),
    ),
    Pipe(
        "perturbed",
        lambda: _stable("StableDiffusionPAGPipeline", "unet-mask", config={"sample_size": 64}),
        calls({**_STABLE, "pag_scale": 2.0, "pag_adaptive_scale": 0.1}, *PROMPTS),
        guidance=6.0,
    ),
    Pipe(
        # Every image beside the first is one more in the batch.
        "marigold",
        lambda: diffusers.MarigoldDepthPipeline(
            unet=tested_net("unet-pix2pix"), vae=tested_vae("kl"), scheduler=_steps(), **_words()
        ),
        _fixed(
            *(
                {"image": picture(*size).repeat(count, 1, 1, 1), "processing_resolution": 0, "batch_size": count}
                for *size, count in ((32, 48, 1), (64, 32, 1), (32, 48, 2))
            )
        ),
        "prediction",
    ),
    Pipe(
        "variations",
        _variations,
        calls({**_STABLE, "image_embeds": random(1, 24)}, *SMALL),
        guidance=4.0,
        left=("image_normalizer",),
    ),
    Pipe(
        "dit",
        lambda: diffusers.DiTPipeline(transformer=tested_net("dit"), vae=tested_vae("kl"), scheduler=_steps()),
        _fixed(*({"class_labels": labels, "guidance_scale": 3.0} for labels in ([3], [3, 5]))),
        guidance=3.0,
    ),
    Pipe(
        "consistency",
        lambda: diffusers.ConsistencyModelPipeline(
            unet=tested_net("unet-consistency", sample_size=16), scheduler=diffusers.CMStochasticIterativeScheduler()
        ),
        _fixed(*({"class_labels": labels, "batch_size": len(labels)} for labels in ([3], [3, 5]))),
    ),
    Pipe("super-resolution", _super_resolution, _fixed({"image": picture(32, 48)}, {"image": picture(64, 32)})),
    Pipe(
        "upscale",
        _upscaler,
        _fixed(
            {**_STABLE, "image": picture(16, 24)},
            {**_STABLE, "image": picture(32, 16)},
            {**_STABLE, "image": picture(16, 24), "num_images_per_prompt": 2},
        ),
        guidance=4.0,
    ),
    Pipe(
        "latent-upscale",
        _latent_upscaler,
        _fixed(
            *(
                {**_STABLE, **_pairs(pooled_prompt_embeds=_pooled(32)), "image": random(1, 4, *size)}
                for size in ((8, 12), (16, 8))
            )
        ),
        guidance=4.0,
    ),
    Pipe(
        "instructed",
        lambda: _stable("StableDiffusionInstructPix2PixPipeline", "unet-pix2pix"),
        _fixed(
            {**_STABLE, "image": picture(32, 48)},
            {**_STABLE, "image": picture(64, 32)},
            {**_STABLE, "image": picture(32, 48), "num_images_per_prompt": 2},
        ),
        guidance=6.0,
    ),
    Pipe(
        "adapters",
        _adapters,
        calls({**_STABLE, "image": _two_pictures, "adapter_conditioning_scale": [0.7, 0.3]}, *REPEATED),
        guidance=4.0,
    ),
    Pipe(
        "bria",
        lambda: _make("BriaPipeline", _flow, vae=_vae(), transformer=tested_net("bria", in_channels=16)),
        calls({"guidance_scale": 3.0, **prompts(32)}, *PROMPTS),
        guidance=3.0,
    ),
    Pipe(
        "ovis",
        lambda: _make(
            "OvisImagePipeline",
            _flow,
            vae=_vae(latent_channels=16),
            transformer=tested_net("ovis-image", in_channels=64),
        ),
        calls({"guidance_scale": 3.0, "negative_prompt": None, **prompts(32)}, *PROMPTS),
        guidance=3.0,
    ),
    Pipe(
        "prx",
        lambda: _make("PRXPipeline", _flow, vae=_vae(), transformer=tested_net("prx")),
        calls(
            {
                "guidance_scale": 3.0,
                "use_resolution_binning": False,
                "negative_prompt": None,
                **prompts(16, prompt_attention_mask=_present),
            },
            *SMALL,
        ),
        guidance=3.0,
    ),
    Pipe(
        "krea2",
        lambda: _make(
            "Krea2Pipeline", _flow, vae=tested_vae("qwen-image"), transformer=tested_net("krea2", in_channels=16)
        ),
        calls(
            {
                "guidance_scale": 3.0,
                **_pairs(prompt_embeds=lambda seed: random(1, TOKENS, 3, 16, seed=seed), prompt_embeds_mask=_present),
            },
            *PROMPTS,
        ),
        guidance=3.0,
    ),
    Pipe(
        "ernie",
        lambda: _make(
            "ErnieImagePipeline",
            _flow,
            vae=tested_vae("flux2"),
            transformer=tested_net("ernie-image", in_channels=16, out_channels=16),
        ),
        calls({"guidance_scale": 3.0, "negative_prompt": None, "use_pe": False, **_rows(prompts(16))}, *PROMPTS),
        guidance=3.0,
    ),
)
