"""Whole diffusers pipelines, every part compiled, against the same pipeline in eager: the images must be the same."""

from __future__ import annotations

import functools
import gc
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import nn

import oxidiff
from families_encoders import ENCODERS
from families_images import IMAGES
from families_vaes import AUTOENCODERS
from nets import assert_close, shallow
from oxidiff import testing

STEPS = 3
GUIDANCE = 5.0
MODEL_ERROR = 2e-5
"""Promised for one call of one model in f32."""
PIXELS = 64
TOKENS = 77

SCHEDULERS = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
SD_PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline",
)
SDXL_PIPELINES = (
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionXLControlNetPipeline",
)
PARTS = ("unet", "vae", "controlnet", "text_encoder", "text_encoder_2")


def build_parts(kind: str) -> dict[str, Any]:
    """The parts of `kind`, in eager, with fixed weights."""
    xl = "XL" in kind
    family = "sdxl" if xl else "sd15"
    vae = diffusers.AutoencoderKL(**testing.ZOO[f"{family}-vae-decoder"].full_config(tiny=True))
    testing.fill_weights(vae)
    width = testing.ZOO[f"{family}-unet"].full_config(tiny=True)["cross_attention_dim"]
    clip = {"hidden_size": width // 2 if xl else width}
    parts: dict[str, Any] = {
        "unet": shallow(f"{family}-unet"),
        "vae": vae.eval().requires_grad_(False),
        "text_encoder": testing.build("clip-l", overrides=clip),
        "tokenizer": None,
        "scheduler": diffusers.DDIMScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, set_alpha_to_one=False
        ),
    }
    if xl:
        parts["text_encoder_2"] = testing.build("clip-g", overrides=clip)
        parts["tokenizer_2"] = None
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if "ControlNet" in kind:
        # Three steps of downsampling lead from pixels to latents, as in the released ControlNets.
        parts["controlnet"] = shallow(f"{family}-controlnet")
    return parts


def build_pipeline(kind: str) -> Any:
    pipe = getattr(diffusers, kind)(**build_parts(kind))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", autouse=True)
def _forget_pipelines() -> Iterator[None]:
    """Compiled pipelines are shared by the tests of this file, and by no others."""
    yield
    pipelines.cache_clear()
    gc.collect()


@functools.cache
def pipelines(kind: str) -> tuple[Any, Any]:
    """The pipeline in eager, and one of equal weights with every part compiled."""
    return build_pipeline(kind), oxidiff.compile_pipe(build_pipeline(kind))


@torch.no_grad()
def encode_prompt(pipe: Any, seed: int) -> dict[str, torch.Tensor]:
    """Embeddings of random tokens, by the pipeline's own text encoders."""
    tokens = torch.randint(1000, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    if not hasattr(pipe, "text_encoder_2"):
        return {"prompt_embeds": pipe.text_encoder(tokens)[0]}
    first = pipe.text_encoder(tokens, output_hidden_states=True)
    second = pipe.text_encoder_2(tokens, output_hidden_states=True)
    embeds = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": second[0]}


def call_arguments(pipe: Any, *, pixels: int = PIXELS) -> dict[str, Any]:
    """What a user passes to this kind of pipeline, without size and count."""
    prompt = encode_prompt(pipe, seed=1)
    negative = {f"negative_{name}": value for name, value in encode_prompt(pipe, seed=2).items()}
    takes = inspect.signature(type(pipe).__call__).parameters
    generator = torch.Generator().manual_seed(3)
    picture = torch.rand(1, 3, pixels, pixels, generator=generator)
    arguments: dict[str, Any] = {**prompt, **negative, "num_inference_steps": STEPS, "output_type": "np"}
    kind = type(pipe).__name__
    if "image" in takes:
        arguments["image"] = picture
    if "strength" in takes:
        arguments |= {"strength": 0.99, "num_inference_steps": STEPS + 1}
    if "mask_image" in takes:
        mask = torch.zeros(1, 1, pixels, pixels)
        mask[:, :, : pixels // 2] = 1
        arguments["mask_image"] = mask
    if "ControlNet" in kind:
        arguments["controlnet_conditioning_scale"] = 0.7
    if "Img2Img" not in kind:
        arguments |= {"height": pixels, "width": pixels}
    return arguments


def draw(pipe: Any, **changes: Any) -> np.ndarray:
    pixels = changes.pop("pixels", PIXELS)
    arguments = {"guidance_scale": GUIDANCE, **call_arguments(pipe, pixels=pixels), **changes}
    return pipe(**arguments, generator=torch.Generator().manual_seed(0)).images


def assert_same_images(kind: str, scheduler: str | None = None, **changes: Any) -> None:
    eager, compiled = pipelines(kind)
    before = eager.scheduler, compiled.scheduler
    for pipe in (eager, compiled):
        if scheduler is not None:
            # Only PNDM knows the option: Stable Diffusion's own setting, without which it needs more steps.
            pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, skip_prk_steps=True)
    expected, actual = draw(eager, **changes), draw(compiled, **changes)
    # The pipelines are those of other tests, too.
    eager.scheduler, compiled.scheduler = before
    assert expected.shape == actual.shape
    assert expected.std() > 0.02, "a flat picture would hide every difference"
    # Each step adds one model's error, which guidance multiplies; the decoder adds its own.
    guidance = changes.get("guidance_scale", GUIDANCE)
    tolerance = MODEL_ERROR * ((STEPS + 1) * (1 + 2 * guidance) + 1)
    error = testing.relative_error(torch.from_numpy(actual), torch.from_numpy(expected))
    assert error <= tolerance, f"{kind} {scheduler} {changes}: {error:.2e} > {tolerance:.2e}"


def counts(pipe: Any) -> dict[str, tuple[int, int]]:
    """Captures and programs of every compiled part."""
    reports = {name: oxidiff.report(getattr(pipe, name)) for name in PARTS if getattr(pipe, name, None) is not None}
    return {name: (report.captures, report.programs) for name, report in reports.items()}


@pytest.mark.parametrize("kind", SD_PIPELINES + SDXL_PIPELINES)
def test_pipeline_draws_what_eager_draws(kind: str) -> None:
    assert_same_images(kind)
    _, compiled = pipelines(kind)
    if "ControlNet" in kind:
        # At 64 pixels the deepest level is 1x1, where a residual has no memory order to tell: a structure of its own.
        assert_same_images(kind, pixels=2 * PIXELS)
    before = counts(compiled)
    assert_same_images(kind, num_images_per_prompt=3)
    assert_same_images(kind, pixels=2 * PIXELS)
    assert_same_images(kind, guidance_scale=1.0)
    assert counts(compiled) == before, "another batch or size captured or compiled again"
    for name in PARTS:
        part = getattr(compiled, name, None)
        if part is not None:
            assert not oxidiff.report(part).fallbacks, name


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler(scheduler: str) -> None:
    assert_same_images("StableDiffusionPipeline", scheduler)


@pytest.mark.parametrize("scheduler", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_scheduler_xl(scheduler: str) -> None:
    assert_same_images("StableDiffusionXLPipeline", scheduler)


def test_every_part_is_compiled_and_keeps_its_class() -> None:
    eager, compiled = pipelines("StableDiffusionXLControlNetPipeline")
    for name in PARTS:
        part = getattr(compiled, name)
        assert isinstance(part, oxidiff.CompiledModule), name
        assert isinstance(part, type(getattr(eager, name))), name


@pytest.mark.parametrize("pipe", [None, "sd15", nn.Linear(3, 3)])
def test_what_is_no_pipeline_is_refused(pipe: Any) -> None:
    with pytest.raises(TypeError, match=r"no pipeline.*oxidiff.compile takes modules"):
        oxidiff.compile_pipe(pipe)


def test_what_is_compiled_stays_as_it_is() -> None:
    pipe = build_pipeline("StableDiffusionPipeline")
    unet = pipe.unet = oxidiff.compile(pipe.unet, memory="low", strict=True)
    oxidiff.bind(unet, unet.state_dict(), name="other")
    oxidiff.use(unet, "other")
    oxidiff.compile_pipe(pipe)
    assert pipe.unet is unet and isinstance(pipe.vae.decoder, oxidiff.CompiledModule)
    oxidiff.use(pipe.unet, "other")
    oxidiff.compile_pipe(pipe, memory="fast")
    assert pipe.unet is not unet, "options are given"


def test_one_part_by_its_name() -> None:
    pipe = oxidiff.compile_pipe(build_pipeline("StableDiffusionPipeline"), parts="unet")
    assert isinstance(pipe.unet, oxidiff.CompiledModule)
    assert not isinstance(pipe.vae.decoder, oxidiff.CompiledModule)


def test_each_part_has_a_graph_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "graphs.oxi"
    for captures in (1, 0):
        pipe = build_pipeline("StableDiffusionPipeline")
        oxidiff.compile_pipe(pipe, graph_file=path, cache=False, tune="off")
        pipe(**{"height": PIXELS, "width": PIXELS, **call_arguments(pipe)})
        parts = {"unet": pipe.unet, "vae.decoder": pipe.vae.decoder}
        assert {name: part.report().captures for name, part in parts.items()} == dict.fromkeys(parts, captures)
    assert not path.exists()
    assert {f"graphs.{name}.oxi" for name in parts} <= {file.name for file in tmp_path.iterdir()}


def test_ignored_part_stays_eager() -> None:
    pipe = oxidiff.compile_pipe(build_pipeline("StableDiffusionPipeline"), ignores=("vae",))
    assert not isinstance(pipe.vae, oxidiff.CompiledModule)
    assert isinstance(pipe.unet, oxidiff.CompiledModule)


def test_a_part_to_ignore_that_is_none_is_told() -> None:
    pipe = build_pipeline("StableDiffusionPipeline")
    with pytest.warns(UserWarning, match=r"^StableDiffusionPipeline has no part 'vea' to ignore$") as told:
        oxidiff.compile_pipe(pipe, ignores=("vea", "vae.encoder", "transformer", "scheduler"), parts="unet")
    assert [warning.filename for warning in told] == [__file__]


@torch.no_grad()
def test_parts_that_make_sounds_are_compiled() -> None:
    """An autoencoder of spectrograms by its method, and a vocoder: neither is left to eager PyTorch without a word."""
    audio_vae = next(family for family in AUTOENCODERS if family.name == "ltx2-audio").build(torch.float32)
    vocoder = next(family for family in ENCODERS if family.name == "ltx2-vocoder").build(torch.float32)
    spectrogram = audio_vae.decode(torch.ones(1, 4, 5, 8)).sample
    sound = vocoder(spectrogram[..., :8])
    pipe: Any = oxidiff.compile_pipe(types.SimpleNamespace(audio_vae=audio_vae, vocoder=vocoder))
    assert_close(pipe.audio_vae.decode(torch.ones(1, 4, 5, 8)).sample, spectrogram)
    assert_close(pipe.vocoder(spectrogram[..., :8]), sound)
    for part in (pipe.audio_vae.decoder, pipe.vocoder):
        report = oxidiff.report(part)
        assert (report.programs, report.eager_calls) == (1, 0)


def test_what_sees_images_for_flux_is_compiled() -> None:
    seen = next(family for family in ENCODERS if family.name == "siglip-vision").build(torch.float32)
    embedder = next(family for family in IMAGES if family.name == "redux").build(torch.float32)
    parts = {"image_encoder": seen, "feature_extractor": None, "image_embedder": embedder}
    pipe = oxidiff.compile_pipe(diffusers.FluxPriorReduxPipeline(**parts))
    for name in ("image_encoder", "image_embedder"):
        assert isinstance(getattr(pipe, name), oxidiff.CompiledModule), name


def test_latents_and_callbacks() -> None:
    """A callback sees, and may change, the latents between compiled steps."""
    images = []
    for pipe in pipelines("StableDiffusionPipeline"):
        seen = []

        def halve(
            _pipe: Any, step: int, _timestep: Any, values: dict[str, Any], seen: list[int] = seen
        ) -> dict[str, Any]:
            seen.append(step)
            return {"latents": values["latents"] * 0.5}

        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(4))
        images.append(draw(pipe, latents=latents, callback_on_step_end=halve))
        assert seen == list(range(STEPS))
    tolerance = MODEL_ERROR * ((STEPS + 1) * (1 + 2 * GUIDANCE) + 1)
    assert testing.relative_error(*(torch.from_numpy(image) for image in reversed(images))) <= tolerance
