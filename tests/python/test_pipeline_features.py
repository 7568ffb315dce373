"""What users turn on in a pipeline: with every part compiled it makes the images of the eager one, before and after."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor

import oxidiff
from oxidiff import testing
from small_pipes import network
from test_pipelines import GUIDANCE, MODEL_ERROR, STEPS, build_parts, build_pipeline, call_arguments, draw

SD = "StableDiffusionPipeline"
XL = "StableDiffusionXLPipeline"
FLUX_STEPS = 4
Change = Callable[[Any], object]


@functools.cache
def pair(kind: str) -> tuple[Any, Any]:
    """A pipeline in eager, and one of equal weights with every part compiled. Tests leave both as they found them."""
    make = build_flux if kind == "FluxPipeline" else functools.partial(build_pipeline, kind)
    return make(), oxidiff.compile_pipe(make())


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    pair.cache_clear()
    gc.collect()


def build_flux() -> Any:
    pipe = diffusers.FluxPipeline(
        transformer=testing.build("flux"),
        vae=network(diffusers.AutoencoderKL, **testing.ZOO["flux-vae-decoder"].full_config(tiny=True)),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def draw_flux(pipe: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    config = pipe.transformer.config
    return pipe(
        prompt_embeds=torch.randn(1, 12, config.joint_attention_dim, generator=generator),
        pooled_prompt_embeds=torch.randn(1, config.pooled_projection_dim, generator=generator),
        height=64,
        width=64,
        num_inference_steps=FLUX_STEPS,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images


def assert_same(eager: Any, compiled: Any, call: Callable[[Any], Any], steps: int = STEPS) -> torch.Tensor:
    """Checks that two pipelines make the same images, and returns them."""
    expected, actual = torch.as_tensor(call(eager)), torch.as_tensor(call(compiled))
    assert expected.std() > 0.02, "a flat picture would hide every difference"
    tolerance = MODEL_ERROR * ((steps + 1) * (1 + 2 * GUIDANCE) + 1)
    error = testing.relative_error(actual, expected)
    assert error <= tolerance, f"{error:.2e} > {tolerance:.2e}"
    return expected


def eager_calls(pipe: Any) -> dict[str, int]:
    """Of the compiled networks of a pipeline, how many calls of each ran eager."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, oxidiff.CompiledModule)}
    return {name: oxidiff.report(part).eager_calls for name, part in parts.items()}


# --- features that change what is computed, or how --------------------------------------------------------------------


def _tile(pipe: Any) -> None:
    # At 64 pixels nine tiles.
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4
    pipe.vae.enable_tiling()


def _freeu(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)


FEATURES: dict[str, tuple[tuple[Change, ...], Change]] = {
    "tiling": ((_tile,), lambda pipe: pipe.vae.disable_tiling()),
    "slicing": ((lambda pipe: pipe.vae.enable_slicing(),), lambda pipe: pipe.vae.disable_slicing()),
    "attention slicing": (
        (lambda pipe: pipe.enable_attention_slicing("max"), lambda pipe: pipe.enable_attention_slicing()),
        lambda pipe: pipe.disable_attention_slicing(),
    ),
    "freeu": ((_freeu,), lambda pipe: pipe.disable_freeu()),
    "fused projections": (
        (lambda pipe: pipe.fuse_qkv_projections(),),
        lambda pipe: pipe.unfuse_qkv_projections(),
    ),
    "processors": (
        (lambda pipe: pipe.unet.set_attn_processor(AttnProcessor()),),
        lambda pipe: pipe.unet.set_default_attn_processor(),
    ),
    "attention backend": (
        (lambda pipe: pipe.unet.set_attention_backend("_native_math"),),
        # What is set last is every model's in the process.
        lambda pipe: (pipe.unet.set_attention_backend("native"), pipe.unet.reset_attention_backend()),
    ),
    "channels last": (
        (lambda pipe: pipe.unet.to(memory_format=torch.channels_last),),
        lambda pipe: pipe.unet.to(memory_format=torch.contiguous_format),
    ),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_turned_on_and_off(name: str) -> None:
    turn_on, turn_off = FEATURES[name]
    eager, compiled = pair(SD)
    before = eager_calls(compiled)
    call = functools.partial(draw, num_images_per_prompt=2)
    plain = assert_same(eager, compiled, call)
    try:
        for change in turn_on:
            change(eager)
            change(compiled)
            assert_same(eager, compiled, call)
    finally:
        turn_off(eager)
        turn_off(compiled)
    # Attention one way or another is the same to rounding; whatever was turned on is off again.
    assert testing.relative_error(assert_same(eager, compiled, call), plain) < 1e-4
    assert eager_calls(compiled) == before


CACHES: dict[str, Callable[[Any], Any]] = {
    "first block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=10.0),
    "pyramid": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 950),
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "faster": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 981),
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "taylor": lambda pipe: diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, max_order=1),
}


@pytest.mark.parametrize("name", CACHES)
def test_what_hooks_carry_from_step_to_step_is_never_stale(name: str) -> None:
    """Caches are Python between blocks: while one is on, the transformer runs in parts and says so."""
    eager, compiled = pair("FluxPipeline")
    plain = assert_same(eager, compiled, draw_flux, FLUX_STEPS)
    before = eager_calls(compiled)["transformer"]
    for pipe in (eager, compiled):
        pipe.transformer.enable_cache(CACHES[name](pipe))
    try:
        # It warns once, of each place that has a hook.
        cached = assert_same(eager, compiled, draw_flux, FLUX_STEPS)
        assert not torch.equal(cached, plain), "the cache was never used"
        assert eager_calls(compiled)["transformer"] == before
        assert any("caching" in row["reason"] for row in oxidiff.report(compiled.transformer).fallbacks)
    finally:
        for pipe in (eager, compiled):
            pipe.transformer.disable_cache()
    assert torch.equal(assert_same(eager, compiled, draw_flux, FLUX_STEPS), plain)
    assert eager_calls(compiled)["transformer"] == before


# --- further networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_t2i_adapters(count: int) -> None:
    config = {"channels": build_parts(SD)["unet"].config.block_out_channels, "num_res_blocks": 1, "downscale_factor": 8}
    nets = [{"adapter_type": "full_adapter", **config} for _ in range(count)]

    def build() -> Any:
        adapters = [network(diffusers.T2IAdapter, seed, **net) for seed, net in enumerate(nets)]
        parts = {**build_parts(SD), "adapter": adapters if count > 1 else adapters[0]}
        pipe = diffusers.StableDiffusionAdapterPipeline(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(pipe: Any, pixels: int, scale: float, copies: int) -> Any:
        generator = torch.Generator().manual_seed(4)
        images = [torch.rand(1, 3, pixels, pixels, generator=generator) for _ in nets]
        arguments = {**call_arguments(pipe, pixels=pixels), "image": images if count > 1 else images[0]}
        scales = [scale / (i + 1) for i in range(count)]
        return pipe(
            **arguments,
            guidance_scale=GUIDANCE,
            adapter_conditioning_scale=scales if count > 1 else scale,
            num_images_per_prompt=copies,
            generator=torch.Generator().manual_seed(0),
        ).images

    eager, compiled = build(), oxidiff.compile_pipe(build())
    strong = assert_same(eager, compiled, functools.partial(call, pixels=64, scale=0.9, copies=1))
    report = oxidiff.report(compiled.adapter)
    weak = assert_same(eager, compiled, functools.partial(call, pixels=64, scale=0.3, copies=1))
    assert testing.relative_error(strong, weak) > 1e-2, "the adapters have an effect"
    assert_same(eager, compiled, functools.partial(call, pixels=128, scale=0.9, copies=2))
    assert set(eager_calls(compiled).values()) == {0}
    after = oxidiff.report(compiled.adapter)
    assert (after.captures, after.programs, after.calls) == (report.captures, report.programs, 3)


def _load_ip_adapters(unet: Any, count: int) -> None:
    """Adapters of random weights; of one, :func:`testing.load_ip_adapter` makes the file, which all are varied from."""
    files: list[Any] = []
    load = unet._load_ip_adapter_weights
    unet._load_ip_adapter_weights = files.extend
    try:
        for seed in range(count):
            testing.load_ip_adapter(unet, seed=seed)
    finally:
        del unet._load_ip_adapter_weights
    load(files)


def test_ip_adapters_with_masks() -> None:
    count = 2
    eager, compiled = build_pipeline(SD), oxidiff.compile_pipe(build_pipeline(SD))
    for pipe in (eager, compiled):
        _load_ip_adapters(pipe.unet, count)
    embeds = [torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    masks = [torch.zeros(1, 1, 64, 64) for _ in embeds]
    for i, mask in enumerate(masks):
        mask[:, :, 32 * i : 32 * (i + 1)] = 1
    first, second = (
        assert_same(
            eager,
            compiled,
            functools.partial(
                draw, ip_adapter_image_embeds=embeds, cross_attention_kwargs={"ip_adapter_masks": chosen}
            ),
        )
        for chosen in (masks, masks[::-1])
    )
    assert not torch.equal(first, second)
    assert set(eager_calls(compiled).values()) == {0}


def test_perturbed_attention_guidance() -> None:
    """Processors are put in for a call and taken out after it; layers are chosen anew between calls."""

    def build() -> Any:
        pipe = diffusers.StableDiffusionPAGPipeline(**build_parts(SD), pag_applied_layers=["mid"])
        pipe.set_progress_bar_config(disable=True)
        return pipe

    eager, compiled = build(), oxidiff.compile_pipe(build())
    first = assert_same(eager, compiled, functools.partial(draw, pag_scale=3.0))
    assert_same(eager, compiled, functools.partial(draw, pag_scale=0.0))
    for pipe in (eager, compiled):
        pipe.set_pag_applied_layers(["up_blocks.1"])
    other = assert_same(eager, compiled, functools.partial(draw, pag_scale=3.0, num_images_per_prompt=2))
    assert not torch.equal(first, other[:1])
    assert set(eager_calls(compiled).values()) == {0}
    captures = oxidiff.report(compiled.unet).captures
    assert_same(eager, compiled, functools.partial(draw, pag_scale=1.5))
    assert oxidiff.report(compiled.unet).captures == captures


# --- pipelines made of pipelines --------------------------------------------------------------------------------------


def test_parts_are_taken_over_by_other_pipelines() -> None:
    """`from_pipe` compares classes: a compiled part is of the class that the signature names."""
    eager, compiled = pair(SD)
    assert_same(eager, compiled, draw)
    before = eager_calls(compiled)
    counts = oxidiff.report(compiled.unet).captures
    for kind in (diffusers.StableDiffusionImg2ImgPipeline, diffusers.AutoPipelineForText2Image):
        others = [kind.from_pipe(pipe) for pipe in (eager, compiled)]
        for pipe in others:
            pipe.set_progress_bar_config(disable=True)
        assert others[1].unet is compiled.unet
        assert others[1].vae is compiled.vae
        assert_same(*others, draw)
    assert oxidiff.report(compiled.unet).captures == counts, "one compiled UNet serves all"
    assert eager_calls(compiled) == before


def test_copied_and_saved(tmp_path: Path) -> None:
    eager, compiled = build_pipeline(SD), oxidiff.compile_pipe(build_pipeline(SD))
    first = assert_same(eager, compiled, draw)
    twin = copy.deepcopy(compiled)
    assert isinstance(twin.unet, oxidiff.CompiledModule)
    compiled.unet.conv_in.weight.mul_(0.5)
    assert torch.equal(assert_same(eager, twin, draw), first), "a copy has weights of its own"
    eager.unet.conv_in.weight.mul_(0.5)
    assert not torch.equal(assert_same(eager, compiled, draw), first)
    compiled.save_pretrained(tmp_path)
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, tokenizer=None, feature_extractor=None)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.unet) is diffusers.UNet2DConditionModel
    assert_same(loaded, compiled, draw)


# --- around a call ----------------------------------------------------------------------------------------------------


def test_converted_after_it_was_compiled() -> None:
    eager, compiled = build_pipeline(SD), oxidiff.compile_pipe(build_pipeline(SD))
    assert_same(eager, compiled, draw)
    for pipe in (eager, compiled):
        pipe.to(torch.bfloat16)
        assert (pipe.dtype, pipe.unet.dtype) == (torch.bfloat16, torch.bfloat16)
    expected, actual = (torch.as_tensor(draw(pipe)) for pipe in (eager, compiled))
    # Both round by some units of bfloat16's last place, 2**-8, which guidance multiplies.
    assert testing.relative_error(actual, expected) < 2**-8 * (1 + 2 * GUIDANCE)
    for pipe in (eager, compiled):
        pipe.to(torch.float32)
    assert_same(eager, compiled, draw)
    assert set(eager_calls(compiled).values()) == {0}


def test_modes() -> None:
    eager, compiled = pair(SD)
    with torch.inference_mode():
        expected = assert_same(eager, compiled, draw)
    before = eager_calls(compiled)
    assert torch.equal(assert_same(eager, compiled, draw), expected)
    assert eager_calls(compiled) == before
    with torch.autocast("cpu", torch.bfloat16):
        cast, actual = (torch.as_tensor(draw(pipe)) for pipe in (eager, compiled))
    # Both round by some units of bfloat16's last place, 2**-8, which guidance multiplies.
    assert testing.relative_error(actual, cast) < 2**-8 * (1 + 2 * GUIDANCE)
    assert eager_calls(compiled) == before
    assert torch.equal(assert_same(eager, compiled, draw), expected)


def test_callbacks_change_the_batch_and_stop() -> None:
    eager, compiled = pair(SD)

    def without_guidance(pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe._guidance_scale = 0.0
            values["prompt_embeds"] = values["prompt_embeds"].chunk(2)[-1]
        return values

    def stop(pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return values

    before = eager_calls(compiled)
    plain = assert_same(eager, compiled, draw)
    inputs = ["latents", "prompt_embeds"]
    changes: list[dict[str, Any]] = [
        {"callback_on_step_end": without_guidance, "callback_on_step_end_tensor_inputs": inputs},
        {"callback_on_step_end": stop},
    ]
    for change in changes:
        assert not torch.equal(assert_same(eager, compiled, functools.partial(draw, **change)), plain)
    assert torch.equal(assert_same(eager, compiled, draw), plain)
    assert eager_calls(compiled) == before


def test_a_list_of_generators() -> None:
    def call(pipe: Any) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        return pipe(**call_arguments(pipe), num_images_per_prompt=2, generator=generators).images

    assert_same(*pair(SD), call)
