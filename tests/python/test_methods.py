"""Methods of a compiled module beside ``forward``: compiled, or counted as eager with a reason, and never without a word."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel
from diffusers.pipelines.shap_e.renderer import ShapERenderer
from torch import Tensor, nn

import oxidiff
from families_vaes import AUTOENCODERS
from nets import assert_close
from small_pipes import network, random

_BLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_WORDS = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}


def _paella() -> nn.Module:
    codes = {"bottleneck_blocks": 1, "embed_dim": 16, "num_vq_embeddings": 32, "latent_channels": 4, "levels": 2}
    return network(PaellaVQModel, **codes)  # type: ignore[no-any-return]


def _consistency() -> nn.Module:
    pair = {"layers_per_block": 1, "norm_num_groups": 4}
    config = {f"{coder}_{name}": value for coder in ("encoder", "decoder") for name, value in pair.items()}
    return network(  # type: ignore[no-any-return]
        diffusers.ConsistencyDecoderVAE,
        encoder_block_out_channels=(8, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        decoder_block_out_channels=(16, 24),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        **config,
    )


def _sound() -> nn.Module:
    config = {"mel_bins": 8, "latent_channels": 4, "hidden_channels": 16, "channel_multipliers": (1, 1, 2)}
    return network(diffusers.MMAudioVAE, **config, layers_per_block=1, n_fft=64, hop_length=16)  # type: ignore[no-any-return]


def _clap() -> nn.Module:
    sizes = {"depths": [2, 2], "num_attention_heads": [2, 2], "window_size": 4, "patch_embeds_hidden_size": 16}
    return network(  # type: ignore[no-any-return]
        transformers.ClapModel,
        text_config={**_BLIP, **_WORDS},
        audio_config={"spec_size": 64, "hidden_size": 32, "num_mel_bins": 64, **sizes},
        projection_dim=16,
    )


def _renderer() -> nn.Module:
    names = tuple(f"nerstf.mlp.{i}.weight" for i in range(4))
    shapes = ((8, 93), (8, 8), (8, 8), (8, 8))
    config = {"d_latent": 16, "d_hidden": 8, "n_output": 12, "background": (255.0, 255.0, 255.0)}
    return network(ShapERenderer, param_names=names, param_shapes=shapes, **config)  # type: ignore[no-any-return]


def _drawn(renderer: Any) -> Tensor:
    torch.manual_seed(3)
    counts = {"size": 4, "ray_batch_size": 16, "n_coarse_samples": 4, "n_fine_samples": 4}
    return renderer.decode_to_image(torch.full((1, 32, 16), 0.1), "cpu", **counts)  # type: ignore[no-any-return]


def _decoded(length: int) -> Callable[[Any], Tensor]:
    def call(vae: Any) -> Tensor:
        torch.manual_seed(2)
        return vae.decode(random(1, 4, length, 8)).sample  # type: ignore[no-any-return]

    return call


METHODS: dict[str, tuple[str, Callable[[], nn.Module], tuple[Callable[[Any], Tensor], ...]]] = {
    "paella": ("vqgan", _paella, (_decoded(8), _decoded(12))),
    "consistency": ("vae", _consistency, (_decoded(8), _decoded(16))),
    "sounds": ("vae", _sound, tuple(lambda vae, n=n: vae.decode(random(1, 4, n)).sample for n in (8, 12))),
    "clap": (
        "text_encoder",
        _clap,
        tuple(lambda net, n=n: net.get_text_features(torch.arange(3, n)[None]).pooler_output for n in (9, 13)),
    ),
    "shap-e": ("shap_e_renderer", _renderer, (_drawn, _drawn)),
}


@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "module"])
@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_a_method_runs_compiled_networks(name: str, is_pipe: bool) -> None:
    part, make, calls = METHODS[name]
    eager, module = make(), make()
    if is_pipe:
        compiled: Any = getattr(oxidiff.compile_pipe(types.SimpleNamespace(**{part: module})), part)
    else:
        compiled = oxidiff.compile(module)
    programs = 0
    for i, call in enumerate(calls):
        assert_close(call(compiled), call(eager))
        report = oxidiff.report(compiled)
        assert report.calls > i, report.calls
        assert (report.eager_calls, report.fallbacks) == (0, [])
        programs = programs or report.programs
        assert report.programs == programs > 0
    with oxidiff.eager(compiled):
        assert_close(calls[0](compiled), calls[0](eager))
    oxidiff.unload(compiled)
    assert_close(calls[0](compiled), calls[0](eager))


@torch.no_grad()
def test_generating_text_is_counted() -> None:
    """Where it calls parts of the module one by one, with a cache: nothing of it is compiled, and the report says so."""
    config = {"text_config": {**_BLIP, **_WORDS, "encoder_hidden_size": 16}, "projection_dim": 16}
    vision = {**_BLIP, "image_size": 16, "patch_size": 4}
    blip = network(transformers.BlipForConditionalGeneration, vision_config=vision, **config)
    image = random(1, 3, 16, 16)
    expected = blip.generate(image, max_new_tokens=5)
    pipe: Any = oxidiff.compile_pipe(types.SimpleNamespace(caption_generator=blip))
    with pytest.warns(oxidiff.FallbackWarning, match="its method generate is called"):
        assert torch.equal(pipe.caption_generator.generate(image, max_new_tokens=5), expected)
    report = oxidiff.report(pipe.caption_generator)
    assert (report.calls, report.eager_calls) == (1, 1)


class Halves(nn.Module):
    """Two methods of plain layers, one of which calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.encode(x))  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.lower(x).relu()  # type: ignore[no-any-return]

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))  # type: ignore[no-any-return]

    def lower_of(self, x: Tensor) -> Tensor:
        return self.encode(x) + x

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


@torch.no_grad()
def test_what_is_not_compiled_is_told_once_per_call() -> None:
    compiled, x = oxidiff.compile(Halves().eval()), torch.ones(2, 4)
    eager = compiled._orig_mod
    assert_close(compiled.twice(x), eager.twice(x))
    assert_close(compiled.scaled(x), eager.scaled(x))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.fallbacks) == (2, 0, [])
    with pytest.warns(oxidiff.FallbackWarning, match="its method lower_of is called"):
        assert_close(compiled.lower_of(x), eager.lower_of(x))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, len(report.fallbacks)) == (3, 1, 1)


@torch.no_grad()
def test_a_weight_set_is_for_calls_of_the_module() -> None:
    compiled, other, x = oxidiff.compile(Halves().eval()), Halves().eval(), torch.ones(2, 4)
    oxidiff.use(compiled, oxidiff.bind(compiled, other.state_dict()))
    assert_close(compiled.twice(x), other.twice(x))
    assert oxidiff.report(compiled).fallbacks == []
    with pytest.warns(oxidiff.FallbackWarning, match="its method encode is called, with the module's own weights"):
        assert_close(compiled.encode(x), compiled._orig_mod.encode(x))


def test_strict_raises_for_a_method() -> None:
    compiled = oxidiff.compile(Halves().eval().requires_grad_(False), strict=True)
    with pytest.raises(oxidiff.UnsupportedError, match="its method encode is called"):
        compiled.encode(torch.ones(2, 4))


@torch.no_grad()
def test_a_method_that_is_replaced_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = oxidiff.compile(Halves().eval()), torch.ones(2, 4)
    monkeypatch.setattr(Halves, "scaled", lambda self, x: x * 3)
    assert_close(compiled.scaled(x), x * 3)
    compiled.scaled = lambda x: x * 4
    assert_close(compiled.scaled(x), x * 4)


def test_gradients_pass_through_a_method() -> None:
    vae = _paella().requires_grad_(True)
    compiled, x = oxidiff.compile(vae), random(1, 4, 8, 8).requires_grad_()
    with pytest.warns(oxidiff.FallbackWarning, match="gradients are needed"):
        compiled.decode(x).sample.sum().backward()
    (expected,) = torch.autograd.grad(vae.decode(x).sample.sum(), x)
    assert_close(x.grad, expected)


@torch.no_grad()
def test_every_network_is_a_part_whatever_its_name() -> None:
    known = next(vae for vae in AUTOENCODERS if vae.name == "kl").build(torch.float32)
    depth = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16}
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 37}
    dpt = network(transformers.DPTForDepthEstimation, **sizes, **depth, image_size=32, patch_size=8, is_hybrid=False)
    gpt = network(transformers.GPT2LMHeadModel, vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    image, ids = random(1, 3, 32, 32), torch.arange(4, 9)[None]
    wanted = dpt(image).predicted_depth, gpt.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    parts = {"depth_estimator": dpt, "language_model": gpt, "coder_of_tomorrow": known, "same_again": dpt}
    left = {"safety_checker": nn.Linear(2, 2), "shape": nn.ReLU(), "scheduler": object(), "held": nn.ModuleList()}
    pipe: Any = oxidiff.compile_pipe(types.SimpleNamespace(**parts, **left))
    for name in (*parts, "coder_of_tomorrow.encoder", "coder_of_tomorrow.decoder"):
        part = pipe
        for step in name.split("."):
            part = getattr(part, step)
        assert isinstance(part, oxidiff.CompiledModule), name
    assert pipe.same_again is pipe.depth_estimator
    for name, value in left.items():
        assert getattr(pipe, name) is value and not isinstance(value, oxidiff.CompiledModule), name
    assert_close(pipe.depth_estimator(image).predicted_depth, wanted[0])
    assert oxidiff.report(pipe.depth_estimator).eager_calls == 0
    # Calls with a cache run eager, and are counted.
    assert torch.equal(pipe.language_model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), wanted[1])
    report = oxidiff.report(pipe.language_model)
    assert report.calls == 6 and "Cache is passed" in report.fallbacks[0]["reason"]


def test_pipelines_inside_of_a_pipeline_call_what_is_compiled() -> None:
    unet, movq = nn.Linear(3, 3), nn.Linear(2, 2)
    inner = types.SimpleNamespace(unet=unet, register_modules=None)
    pipe: Any = oxidiff.compile_pipe(types.SimpleNamespace(unet=unet, movq=movq, decoder_pipe=inner))
    assert inner.unet is pipe.unet and isinstance(inner.unet, oxidiff.CompiledModule)


class _Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)  # type: ignore[no-any-return]

    def begin(self, x: Tensor) -> _Chained:
        self.state = self.first(x)
        return self


@torch.no_grad()
def test_a_method_that_gives_its_module_gives_the_compiled_one() -> None:
    module, x = _Chained(), random(2, 8)
    compiled = oxidiff.compile(module)
    assert compiled.begin(x) is compiled
    assert_close(compiled.state, module.first(x))


class Draws(nn.Module):
    """What code does with a generator that is passed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x: torch.Tensor, generator: Any = None, how: str = "nothing") -> Any:
        x = x * 2
        if how == "draw":
            return x + torch.randn(x.shape, generator=generator)
        if how == "draw from the first":
            return x + torch.randn(x.shape, generator=generator[0])
        if how == "seed":
            return x + generator.initial_seed()
        if how == "set":
            generator.manual_seed(3)
            return x
        if how == "device":
            return x if generator is not None and generator.device.type == "cpu" else -x
        if how == "return":
            return x, generator
        return x


@pytest.mark.parametrize("how", ["nothing", "draw", "draw from the first", "seed", "set", "device", "return"])
def test_generators_that_are_passed(how: str) -> None:
    """Each draws what it would have drawn."""
    module = Draws().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.ones(2, 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for seed in (1, 2, 3):
            ours, eagers = (torch.Generator().manual_seed(seed) for _ in range(2))
            is_list = how == "draw from the first"
            result = compiled(x, [ours] if is_list else ours, how)
            expected = module(x, [eagers] if is_list else eagers, how)
            if how == "return":
                assert result[1] is ours
                result, expected = result[0], expected[0]
            assert torch.equal(result, expected)
            assert torch.equal(ours.get_state(), eagers.get_state())


def _known(generator: Any) -> Any:
    return lambda x, g: x * (3 if g is generator else 5)


def _same(x: torch.Tensor, pair: Any) -> torch.Tensor:
    return x * (3 if pair[0] is pair[1] else 5) * pair.count(pair[0])


def test_which_generator_is_passed_is_never_frozen() -> None:
    """Code may ask which one it is, whether two are one, and for its state: none of it is the same for another."""
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    cases = [
        (_known(one), [(one,), (other,), (one,)]),
        (_same, [([one, one],), ([one, other],)]),
        (lambda x, g: x * (3 if type(g) is torch.Generator else 5), [(one,)]),
        (lambda x, g: x * {one: 3.0, other: 5.0}[g], [(one,), (other,)]),
        (lambda x, g: x + torch.Generator.initial_seed(g), [(one,), (other,)]),
    ]
    x = torch.ones(2, 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for function, calls in cases:
            compiled: Any = oxidiff.compile(function, cache=False)
            for given in calls:
                assert torch.equal(compiled(x, *given), function(x, *given))
