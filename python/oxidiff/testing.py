"""Models to test and measure with: public configurations, random weights, inputs, and how far a result is off.

No weights are downloaded: a model is built from the configuration its publisher ships and filled with random numbers
whose scale keeps every branch alive (layers that training starts at zero, such as a ControlNet's output convolutions,
are filled too, so a wrong branch cannot hide). Each entry has a *tiny* twin of the same structure that runs in
milliseconds.

    module = oxidiff.testing.build("sd15-unet", dtype=torch.bfloat16)
    inputs = oxidiff.testing.example_inputs("sd15-unet", batch=2, dtype=torch.bfloat16)
    reference = oxidiff.testing.reference(module, inputs)
    error = oxidiff.testing.relative_error(module(**inputs), reference)

`python -m oxidiff.testing NAME` builds one model, compiles it and compares it with eager.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = [
    "ZOO",
    "Model",
    "build",
    "example_inputs",
    "fill_weights",
    "flatten_outputs",
    "load_ip_adapter",
    "names",
    "reference",
    "relative_error",
    "relative_errors",
    "typical_error",
    "widen",
]

Config = Mapping[str, Any]
Inputs = dict[str, Any]
MakeInputs = Callable[[Config, int, tuple[int, ...], "Random"], Inputs]


@dataclasses.dataclass(frozen=True)
class Model:
    """One entry of the zoo."""

    name: str
    """What `build` and `example_inputs` call it."""
    type_path: str
    """The class, as `package.Class`; an attribute after a colon is the part of it that is built (`...:decoder`)."""
    config: Config
    """The public configuration."""
    tiny: Config
    """What the tiny twin changes in it."""
    inputs: MakeInputs
    """Makes call arguments from configuration, batch, size and a source of random tensors."""
    size: tuple[int, ...]
    """The size the model is known for: `(height, width)` of its own input, or `(tokens,)` for a text encoder."""
    tiny_sizes: tuple[tuple[int, ...], ...]
    """Sizes to try on the tiny twin; they fall into one validity class."""

    def full_config(self, tiny: bool) -> dict[str, Any]:
        """The constructor's arguments, of the tiny twin or of the real model."""
        return {**self.config, **self.tiny} if tiny else dict(self.config)


class Random:
    """Seeded tensors on the CPU: the same seed gives the same values whatever their dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def tokens(self, vocabulary: int, *shape: int) -> torch.Tensor:
        return torch.randint(vocabulary, shape, generator=self._generator)


# --- inputs -----------------------------------------------------------------------------------------------------------

_PROMPT_TOKENS = 77
_TIMESTEP = 500
"""Exact in bf16, also after a model multiplies a thousandth of it by 1000."""


def _unet_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    inputs: Inputs = {
        "sample": random.normal(batch, config["in_channels"], *size),
        "timestep": torch.tensor(_TIMESTEP),
        "encoder_hidden_states": random.normal(batch, _PROMPT_TOKENS, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        time_ids = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]] * batch, dtype=random.dtype)
        inputs["added_cond_kwargs"] = {"text_embeds": random.normal(batch, pooled), "time_ids": time_ids}
    return inputs


def _controlnet_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    scale = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
    condition = random.normal(batch, 3, *(edge * scale for edge in size)).sigmoid()
    return {**_unet_inputs(config, batch, size, random), "controlnet_cond": condition, "conditioning_scale": 1.0}


def _decoder_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    return {"sample": random.normal(batch, config["latent_channels"], *size)}


def _encoder_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    return {"sample": random.normal(batch, config["in_channels"], *size).tanh()}


def _text_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    return {"input_ids": random.tokens(config["vocab_size"], batch, *size)}


def _flux_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    height, width = (edge // 2 for edge in size)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    tokens = _PROMPT_TOKENS
    inputs: Inputs = {
        "hidden_states": random.normal(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": random.normal(batch, tokens, config["joint_attention_dim"]),
        "pooled_projections": random.normal(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), _TIMESTEP / 1000, dtype=random.dtype),
        "img_ids": positions.to(random.dtype),
        "txt_ids": torch.zeros(tokens, 3, dtype=random.dtype),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.full((batch,), 4.0, dtype=random.dtype)
    return inputs


def _sd3_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    return {
        "hidden_states": random.normal(batch, config["in_channels"], *size),
        "encoder_hidden_states": random.normal(batch, _PROMPT_TOKENS, config["joint_attention_dim"]),
        "pooled_projections": random.normal(batch, config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), float(_TIMESTEP), dtype=random.dtype),
    }


def _pixart_inputs(config: Config, batch: int, size: tuple[int, ...], random: Random) -> Inputs:
    resolution = None
    aspect_ratio = None
    if config["use_additional_conditions"]:
        resolution = torch.tensor([[1024.0, 1024.0]] * batch, dtype=random.dtype)
        aspect_ratio = torch.tensor([[1.0]] * batch, dtype=random.dtype)
    mask = torch.ones(batch, _PROMPT_TOKENS, dtype=random.dtype)
    mask[:, _PROMPT_TOKENS // 2 :] = 0
    return {
        "hidden_states": random.normal(batch, config["in_channels"], *size),
        "encoder_hidden_states": random.normal(batch, _PROMPT_TOKENS, config["caption_channels"]),
        "encoder_attention_mask": mask,
        "timestep": torch.full((batch,), _TIMESTEP),
        "added_cond_kwargs": {"resolution": resolution, "aspect_ratio": aspect_ratio},
    }


# --- configurations ---------------------------------------------------------------------------------------------------

_CROSS_DOWN = "CrossAttnDownBlock2D"
_CROSS_UP = "CrossAttnUpBlock2D"

_SD15_UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (_CROSS_DOWN, _CROSS_DOWN, _CROSS_DOWN, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", _CROSS_UP, _CROSS_UP, _CROSS_UP),
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
_SD15_TINY = {
    "sample_size": 8,
    "block_out_channels": (32, 64, 96, 96),
    "cross_attention_dim": 48,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
_SD21_UNET = {
    **_SD15_UNET,
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
_SD21_TINY = {**_SD15_TINY, "attention_head_dim": (2, 4, 6, 6)}
_SDXL_UNET = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", _CROSS_DOWN, _CROSS_DOWN),
    "up_block_types": (_CROSS_UP, _CROSS_UP, "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SDXL_TINY = {
    "sample_size": 8,
    "block_out_channels": (32, 64, 96),
    "transformer_layers_per_block": (1, 2, 3),
    "cross_attention_dim": 64,
    "attention_head_dim": (2, 4, 6),
    "norm_num_groups": 8,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}


def _controlnet(unet: Config) -> dict[str, Any]:
    """A ControlNet's configuration: the down path of its UNet and an embedding of the condition image."""
    own = {key: value for key, value in unet.items() if key not in ("sample_size", "out_channels", "up_block_types")}
    return {**own, "conditioning_embedding_out_channels": (16, 32, 96, 256)}


_SD15_CONTROLNET_TINY = {
    **{key: value for key, value in _SD15_TINY.items() if key != "sample_size"},
    "conditioning_embedding_out_channels": (8, 16, 24, 32),
}
_SDXL_CONTROLNET_TINY = {
    **{key: value for key, value in _SDXL_TINY.items() if key != "sample_size"},
    "conditioning_embedding_out_channels": (8, 16, 24, 32),
}

_SD15_VAE = {
    "sample_size": 512,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "scaling_factor": 0.18215,
}
_SDXL_VAE = {**_SD15_VAE, "sample_size": 1024, "scaling_factor": 0.13025}
_FLUX_VAE = {
    **_SD15_VAE,
    "sample_size": 1024,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_VAE_TINY = {"sample_size": 64, "block_out_channels": (16, 32, 48, 48), "norm_num_groups": 8}

_CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 768,
}
_CLIP_G = {
    **_CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
_CLIP_TINY = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
}
_T5_SMALL = {**_T5_XXL, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
_T5_TINY = {"vocab_size": 1000, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4}

_FLUX = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
_FLUX_TINY = {
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
_SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
_SD3_TINY = {
    "sample_size": 16,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 96,
}
_SD35_MEDIUM = {
    **_SD3,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "dual_attention_layers": tuple(range(13)),
}
_PIXART_ALPHA = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "attention_head_dim": 72,
    "num_attention_heads": 16,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
    "use_additional_conditions": True,
}
_PIXART_SIGMA = {**_PIXART_ALPHA, "use_additional_conditions": False, "interpolation_scale": 2}
_PIXART_TINY = {
    "sample_size": 16,
    "num_layers": 3,
    "attention_head_dim": 24,
    "num_attention_heads": 3,
    "cross_attention_dim": 72,
    "caption_channels": 48,
}

_UNET = "diffusers.UNet2DConditionModel"
_CONTROLNET = "diffusers.ControlNetModel"
_DECODER = "diffusers.AutoencoderKL:decoder"
_ENCODER = "diffusers.AutoencoderKL:encoder"
_LATENTS = ((8, 8), (16, 24))
_SMALL_LATENTS = ((8, 8), (8, 12))
_PIXELS = ((64, 64), (64, 96))
_TEXTS = ((77,), (50,))
_CLIP_TEXTS = ((50,), (64,))

ZOO: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("sd15-unet", _UNET, _SD15_UNET, _SD15_TINY, _unet_inputs, (64, 64), _LATENTS),
        Model("sd21-unet", _UNET, _SD21_UNET, _SD21_TINY, _unet_inputs, (96, 96), _LATENTS),
        Model("sdxl-unet", _UNET, _SDXL_UNET, _SDXL_TINY, _unet_inputs, (128, 128), _LATENTS),
        Model(
            "sd15-controlnet",
            _CONTROLNET,
            _controlnet(_SD15_UNET),
            _SD15_CONTROLNET_TINY,
            _controlnet_inputs,
            (64, 64),
            _LATENTS,
        ),
        Model(
            "sdxl-controlnet",
            _CONTROLNET,
            _controlnet(_SDXL_UNET),
            _SDXL_CONTROLNET_TINY,
            _controlnet_inputs,
            (128, 128),
            _LATENTS,
        ),
        Model("sd15-vae-decoder", _DECODER, _SD15_VAE, _VAE_TINY, _decoder_inputs, (64, 64), _SMALL_LATENTS),
        Model("sd15-vae-encoder", _ENCODER, _SD15_VAE, _VAE_TINY, _encoder_inputs, (512, 512), _PIXELS),
        Model("sdxl-vae-decoder", _DECODER, _SDXL_VAE, _VAE_TINY, _decoder_inputs, (128, 128), _SMALL_LATENTS),
        Model("sdxl-vae-encoder", _ENCODER, _SDXL_VAE, _VAE_TINY, _encoder_inputs, (1024, 1024), _PIXELS),
        Model("flux-vae-decoder", _DECODER, _FLUX_VAE, _VAE_TINY, _decoder_inputs, (128, 128), _SMALL_LATENTS),
        Model("flux-vae-encoder", _ENCODER, _FLUX_VAE, _VAE_TINY, _encoder_inputs, (1024, 1024), _PIXELS),
        Model("clip-l", "transformers.CLIPTextModel", _CLIP_L, _CLIP_TINY, _text_inputs, (77,), _CLIP_TEXTS),
        Model(
            "clip-g", "transformers.CLIPTextModelWithProjection", _CLIP_G, _CLIP_TINY, _text_inputs, (77,), _CLIP_TEXTS
        ),
        Model("t5-xxl", "transformers.T5EncoderModel", _T5_XXL, _T5_TINY, _text_inputs, (256,), _TEXTS),
        Model("t5-small", "transformers.T5EncoderModel", _T5_SMALL, _T5_TINY, _text_inputs, (256,), _TEXTS),
        Model("flux", "diffusers.FluxTransformer2DModel", _FLUX, _FLUX_TINY, _flux_inputs, (128, 128), _LATENTS),
        Model("sd3", "diffusers.SD3Transformer2DModel", _SD3, _SD3_TINY, _sd3_inputs, (128, 128), _LATENTS),
        Model(
            "sd35-medium",
            "diffusers.SD3Transformer2DModel",
            _SD35_MEDIUM,
            {**_SD3_TINY, "dual_attention_layers": (0, 1)},
            _sd3_inputs,
            (128, 128),
            _LATENTS,
        ),
        Model(
            "pixart-alpha",
            "diffusers.PixArtTransformer2DModel",
            _PIXART_ALPHA,
            _PIXART_TINY,
            _pixart_inputs,
            (128, 128),
            _LATENTS,
        ),
        Model(
            "pixart-sigma",
            "diffusers.PixArtTransformer2DModel",
            _PIXART_SIGMA,
            _PIXART_TINY,
            _pixart_inputs,
            (128, 128),
            _LATENTS,
        ),
    )
}
"""Every model by its name."""


def names() -> list[str]:
    """The names that `build` and `example_inputs` take."""
    return list(ZOO)


# --- building ---------------------------------------------------------------------------------------------------------


def build(
    name: str,
    *,
    tiny: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    overrides: Config | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """The model called `name` with random weights, in inference mode (`eval`, no gradients) and `dtype`.

    `overrides` changes constructor arguments. Weights depend on `seed` and on the parameters' names and shapes alone:
    two builds are equal, and builds in two dtypes differ by rounding only. With `device` they are made there, in `dtype`
    from the start: as large models are built fastest, with other numbers.
    """
    entry = ZOO[name]
    config = {**entry.full_config(tiny), **(overrides or {})}
    if device is not None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                module = _construct(entry.type_path, config)
        finally:
            torch.set_default_dtype(before)
        module = nn.Module.to(module.eval().requires_grad_(False), dtype)
        fill_weights(module, seed)
        return module
    module = _construct(entry.type_path, config)
    fill_weights(module, seed)
    # diffusers' own `to` warns about modules kept in f32 when a checkpoint is loaded; there is no checkpoint here.
    return nn.Module.to(module.eval().requires_grad_(False), dtype)


def _construct(type_path: str, config: Config) -> nn.Module:
    path, _, part = type_path.partition(":")
    package_name, _, class_name = path.rpartition(".")
    package = importlib.import_module(package_name)
    # Imported first: both libraries note torch's initialisers when they are imported, to put them back later.
    cls = getattr(package, class_name)
    with _without_init():
        if package_name == "transformers":
            config_class = getattr(package, "T5Config" if class_name.startswith("T5") else "CLIPTextConfig")
            module = cls(config_class(**config))
        else:
            module = cls(**config)
    result = getattr(module, part) if part else module
    if not isinstance(result, nn.Module):
        raise TypeError(f"{type_path} is not a module")
    return result


_INITIALISERS = (
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
)


@contextlib.contextmanager
def _without_init() -> Iterator[None]:
    """Construct modules without spending time on weights that `fill_weights` replaces."""
    kept = {name: getattr(nn.init, name) for name in _INITIALISERS}

    def leave(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return tensor

    for name in _INITIALISERS:
        setattr(nn.init, name, leave)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(nn.init, name, function)


_NORMS = ("LayerNorm", "GroupNorm", "RMSNorm", "T5LayerNorm")


@torch.no_grad()
def fill_weights(module: nn.Module, seed: int = 0) -> None:
    """Fill every parameter of `module` with random numbers, in place.

    Matrices and convolutions get a standard deviation of `fan_in ** -0.5`, which passes variance on; norms are near
    one, biases near zero, embeddings of unit variance. T5's queries are divided by `sqrt(d_kv)`, the factor that T5
    leaves out of its attention.
    """
    devices = (p.device for p in module.parameters() if p.is_cuda)
    generator = torch.Generator(next(devices, torch.device("cpu"))).manual_seed(seed)
    for owner_name, owner in module.named_modules():
        is_norm = type(owner).__name__.endswith(_NORMS)
        for name, parameter in owner.named_parameters(recurse=False):
            if is_norm or parameter.ndim < 2:
                parameter.normal_(1.0 if is_norm and name == "weight" else 0.0, 0.1, generator=generator)
            elif isinstance(owner, nn.Embedding):
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                parameter.normal_(0.0, math.prod(parameter.shape[1:]) ** -0.5, generator=generator)
        if owner_name.endswith("SelfAttention.q") and isinstance(owner, nn.Linear):
            head_dim = getattr(module.get_submodule(owner_name.rpartition(".")[0]), "key_value_proj_dim", 1)
            owner.weight.mul_(head_dim**-0.5)


def example_inputs(
    name: str,
    *,
    batch: int = 1,
    size: Sequence[int] | None = None,
    tiny: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    overrides: Config | None = None,
) -> Inputs:
    """Keyword arguments for a call of the model called `name`.

    `size` is `(height, width)` of the model's own input (latents, or pixels for a VAE encoder), or `(tokens,)` for a
    text encoder. Default: the size the model is known for, or the first one of the tiny twin.
    """
    entry = ZOO[name]
    chosen = tuple(size) if size is not None else (entry.tiny_sizes[0] if tiny else entry.size)
    if len(chosen) != len(entry.size):
        raise ValueError(f"{name} takes sizes like {entry.size}, not {chosen}")
    return entry.inputs({**entry.full_config(tiny), **(overrides or {})}, batch, chosen, Random(seed, dtype))


# --- comparing --------------------------------------------------------------------------------------------------------


def flatten_outputs(output: object) -> list[torch.Tensor]:
    """The tensors of a model's output, in order: of a tensor, a sequence, a mapping or a diffusers output class."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in flatten_outputs(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in flatten_outputs(value)]
    return []


def widen(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with every tensor of floats, in mappings and sequences too, in another `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: widen(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(widen(item, dtype) for item in value)
    return value


@torch.no_grad()
def reference(module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """What `module` gives in f64, or another `dtype`: its own weights and `inputs`, widened. `module` itself stays as it
    is."""
    return flatten_outputs(nn.Module.to(copy.deepcopy(module), dtype)(**widen(inputs, dtype)))


def relative_errors(actual: object, expected: object) -> list[float]:
    """For each tensor of the output, `|actual - expected| / |expected|` in the Euclidean norm.

    Infinite where one has a NaN and the other does not, where infinities differ, or where shapes differ; tensors
    without floating point values must be equal. One infinity where the outputs have different numbers of tensors.
    """
    actual_tensors, expected_tensors = flatten_outputs(actual), flatten_outputs(expected)
    if len(actual_tensors) != len(expected_tensors):
        return [math.inf]
    return list(map(_tensor_error, actual_tensors, expected_tensors))


def relative_error(actual: object, expected: object) -> float:
    """The largest of `relative_errors`: what must stay below a fixed bound."""
    return max(relative_errors(actual, expected), default=0.0)


def typical_error(actual: object, expected: object) -> float:
    """The root of the mean square of `relative_errors`: what two ways of computing the same are compared by.

    Rounding errors are random, and the largest of a dozen small tensors' errors is more random still: a ratio of two
    such maxima says little about the two ways.
    """
    errors = relative_errors(actual, expected)
    return math.sqrt(sum(error * error for error in errors) / len(errors)) if errors else 0.0


def _tensor_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide, target = actual.detach().double(), expected.detach().double()
    finite = target.isfinite()
    if not torch.equal(wide.isfinite(), finite) or not torch.equal(wide.isnan(), target.isnan()):
        return math.inf
    if not torch.equal(wide.isposinf(), target.isposinf()):
        return math.inf
    scale = target[finite].norm().item()
    distance = (wide[finite] - target[finite]).norm().item()
    return distance / scale if scale else (0.0 if distance == 0 else math.inf)


def load_ip_adapter(unet: nn.Module, *, width: int = 16, seed: int = 0) -> None:
    """Puts an image prompt adapter of random weights on a UNet of diffusers, as its `load_ip_adapter` does with a file.

    Args:
        unet: The UNet. Its calls then take ``added_cond_kwargs={"image_embeds": [tensor]}``, a tensor of shape
            ``[batch, 1, width]``.
        width: Elements of an image embedding.
        seed: Of the weights.
    """
    model: Any = unet
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    dim = model.config.cross_attention_dim
    names = [name.removesuffix(".processor") for name in model.attn_processors if name.endswith("attn2.processor")]
    attention = {}
    for i, name in enumerate(names):
        hidden = model.get_submodule(name).to_q.out_features
        for part in ("to_k_ip", "to_v_ip"):
            attention[f"{2 * i + 1}.{part}.weight"] = random(hidden, dim)
    projection = {"proj.weight": random(4 * dim, width), "proj.bias": random(4 * dim)}
    norm = {"norm.weight": random(dim), "norm.bias": random(dim)}
    model._load_ip_adapter_weights([{"image_proj": {**projection, **norm}, "ip_adapter": attention}])


def main() -> None:
    """Build one model, compile it, and print how far it and eager are from f64."""
    import argparse

    import oxidiff

    parser = argparse.ArgumentParser(prog="python -m oxidiff.testing", description=main.__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--real", action="store_true", help="the public configuration instead of the tiny twin")
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    tiny = not arguments.real
    module = build(arguments.name, tiny=tiny, dtype=dtype)
    inputs = example_inputs(arguments.name, tiny=tiny, dtype=dtype)
    exact = reference(module, inputs)
    compiled = oxidiff.compile(module)
    with torch.no_grad():
        print(f"eager    {relative_error(module(**inputs), exact):.3e}")
        print(f"compiled {relative_error(compiled(**inputs), exact):.3e}")
    print(oxidiff.report(compiled))


if __name__ == "__main__":
    main()
