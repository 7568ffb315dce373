"""Text and image encoders of diffusers' pipelines, and vocoders, small."""

from __future__ import annotations

import functools
from typing import Any

import torch

from families import Family, Inputs, Random

Size = tuple[int, ...]

_VOCABULARY = 200
_IMAGE_TOKEN = _VOCABULARY
_TEXTS = ((19,), (31,))
"""Tokens of a padded prompt."""


def _text(random: Random, batch: int, size: Size, **extra: Any) -> Inputs:
    return {"input_ids": random.tokens(_VOCABULARY, batch, *size), **extra}


def _masked(random: Random, batch: int, size: Size, *, is_left: bool = False, **extra: Any) -> Inputs:
    """With padding: two tokens of the first prompt, three of the second, after or before the others."""
    (length,) = size
    places = torch.arange(length)
    mask = (places.flip(0) if is_left else places) < (length - 2 - torch.arange(batch))[:, None]
    return {**_text(random, batch, size, **extra), "attention_mask": mask.long()}


def _image(random: Random, batch: int, size: Size, **extra: Any) -> Inputs:
    return {"pixel_values": random.normal(batch, 3, *size), **extra}


def _text_with_image(random: Random, batch: int, size: Size) -> Inputs:
    """Prompts around an image of `size` patches, of which four are one token: the prompt of an edit."""
    height, width = size
    text = random.tokens(_VOCABULARY, batch, 7)
    places = torch.full((batch, height * width // 4), _IMAGE_TOKEN)
    start, end = (torch.full((batch, 1), token) for token in (_IMAGE_TOKEN + 1, _IMAGE_TOKEN + 2))
    tokens = torch.cat((text[:, :3], start, places, end, text[:, 3:]), dim=1)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": random.normal(batch * height * width, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, height, width]] * batch),
        "output_hidden_states": True,
    }


def _spectrogram(random: Random, batch: int, size: Size) -> Inputs:
    return {"spectrogram": random.normal(batch, *size, 8)}


def _channels_of_spectrogram(random: Random, batch: int, size: Size) -> Inputs:
    return {"hidden_states": random.normal(batch, 2, *size, 8)}


def _sound_latents(random: Random, batch: int, size: Size) -> Inputs:
    return {"latents": random.normal(batch, 8, *size)}


def _layers_of_states(random: Random, batch: int, size: Size) -> Inputs:
    """All hidden states of a text encoder, with padding before the prompts."""
    (length,) = size
    mask = _masked(random, batch, size, is_left=True)["attention_mask"]
    return {"text_encoder_hidden_states": random.normal(batch, length, 16, 3), "attention_mask": mask}


_with_states = functools.partial(_text, output_hidden_states=True)
_masked_states = functools.partial(_masked, output_hidden_states=True)
_right_states = functools.partial(_masked, output_hidden_states=True, use_cache=False)
_left_states = functools.partial(_masked, is_left=True, output_hidden_states=True, use_cache=False)

_CLIP: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "projection_dim": 24,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
_T5: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
_DECODER: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_GEMMA = {**_DECODER, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
_BERT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}


ENCODERS: tuple[Family, ...] = (
    Family("clip-text-projection", "transformers.CLIPTextModelWithProjection", _CLIP, _with_states, _TEXTS),
    Family("clip-model-text", "transformers.CLIPModel:text_model", {"text_config": _CLIP}, _masked, _TEXTS),
    Family("t5-masked", "transformers.T5EncoderModel", _T5, _masked, _TEXTS),
    Family("umt5", "transformers.UMT5EncoderModel", _T5, _masked, _TEXTS),
    Family("bert", "transformers.BertModel", _BERT, _masked_states, _TEXTS),
    Family("xlm-roberta", "transformers.XLMRobertaModel", _BERT, _masked, _TEXTS),
    Family("gemma2", "transformers.Gemma2Model", _GEMMA, _right_states, _TEXTS),
    Family("gemma3-text", "transformers.Gemma3TextModel", {**_GEMMA, "num_hidden_layers": 6}, _left_states, _TEXTS),
    Family("llama", "transformers.LlamaModel", _DECODER, _right_states, _TEXTS),
    # They return a cache of keys and values that nobody reads.
    Family("llama-cache", "transformers.LlamaModel", _DECODER, _masked_states, _TEXTS),
    Family("gemma2-cache", "transformers.Gemma2Model", _GEMMA, _masked_states, _TEXTS),
    Family("mistral", "transformers.MistralModel", {**_DECODER, "head_dim": 8}, _left_states, _TEXTS),
    Family("qwen2", "transformers.Qwen2Model", _DECODER, _right_states, _TEXTS),
    Family(
        "qwen25-vl-text",
        "transformers.Qwen2_5_VLTextModel",
        {**_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}},
        _right_states,
        _TEXTS,
    ),
    Family(
        "qwen25-vl",
        "transformers.Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **_DECODER,
                "vocab_size": _VOCABULARY + 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_heads": 4,
                "out_hidden_size": 32,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": _IMAGE_TOKEN,
            "vision_start_token_id": _IMAGE_TOKEN + 1,
            "vision_end_token_id": _IMAGE_TOKEN + 2,
            "video_token_id": _IMAGE_TOKEN + 3,
        },
        _text_with_image,
        ((8, 8), (8, 12)),
        batches=(1,),
        # The values of a tensor are the sizes of the images; windows of the image are attended to one by one.
        fallbacks=("depends on the values of a tensor",),
        captures_by_size=True,
        programs_by_size=True,
    ),
    Family("qwen3", "transformers.Qwen3Model", {**_DECODER, "head_dim": 8}, _left_states, _TEXTS),
    Family(
        "gpt2",
        "transformers.GPT2Model",
        {"vocab_size": _VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
        functools.partial(_masked, use_cache=False),
        _TEXTS,
    ),
    Family(
        "chatglm",
        "diffusers.pipelines.kolors.text_encoder.ChatGLMModel",
        {
            "num_layers": 2,
            "padded_vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "ffn_hidden_size": 40,
            "kv_channels": 8,
            "num_attention_heads": 4,
            "seq_length": 64,
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "rmsnorm": True,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "post_layer_norm": True,
            "original_rope": True,
        },
        _left_states,
        ((19,), (23,), (7,)),
    ),
    Family(
        "clip-vision-projection",
        "transformers.CLIPVisionModelWithProjection",
        {**_VISION, "projection_dim": 24},
        functools.partial(_image, output_hidden_states=True),
        ((28, 28),),
    ),
    Family(
        "dinov2",
        "transformers.Dinov2Model",
        {**_VISION, "mlp_ratio": 2},
        functools.partial(_image, output_hidden_states=True),
        ((28, 28),),
    ),
    Family("siglip-vision", "transformers.SiglipVisionModel", _VISION, _image, ((28, 28),)),
    Family(
        "ltx2-connectors",
        "diffusers.pipelines.ltx2.connectors.LTX2TextConnectors",
        {
            "caption_channels": 16,
            "text_proj_in_factor": 3,
            **{
                f"{kind}_connector_{name}": value
                for kind in ("video", "audio")
                for name, value in (
                    ("num_attention_heads", 2),
                    ("attention_head_dim", 8),
                    ("num_layers", 1),
                    ("num_learnable_registers", 8),
                )
            },
        },
        _layers_of_states,
        ((16,),),
        graphs=2,
        fallbacks=("argsort",),
    ),
    Family(
        "hifigan",
        "transformers.SpeechT5HifiGan",
        {
            "model_in_dim": 8,
            "upsample_initial_channel": 16,
            "upsample_rates": [4, 4],
            "upsample_kernel_sizes": [8, 8],
            "resblock_kernel_sizes": [3, 7],
            "resblock_dilation_sizes": [[1, 3], [1, 3]],
        },
        _spectrogram,
        ((20,), (33,)),
    ),
    Family(
        "ltx2-vocoder",
        "diffusers.pipelines.ltx2.vocoder.LTX2Vocoder",
        {
            "in_channels": 16,
            "hidden_channels": 32,
            "upsample_kernel_sizes": [8, 4],
            "upsample_factors": [4, 2],
            "resnet_kernel_sizes": [3, 7],
            "resnet_dilations": [[1, 3], [1, 3]],
        },
        _channels_of_spectrogram,
        ((20,), (33,)),
    ),
    Family(
        "music3-vocoder",
        "diffusers.models.autoencoders.minimax_music3_vocoder.MiniMaxMusic3Vocoder",
        {
            "latent_channels": 8,
            "decoder_input_dim": 16,
            "decoder_hidden_dim": 16,
            "upsampling_ratios": (2, 2),
        },
        _sound_latents,
        ((20,), (33,)),
    ),
)
