"""What diffusers computes a part at a time to save memory: one program for all sizes, with the results of the parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_processor as attention
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeSwiGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.pipelines.free_noise_utils import SplitInferenceModule
from torch import Tensor, nn

import oxidiff
import small_pipes
from families_unets import CROSS, SIMPLE
from nets import assert_close
from oxidiff import testing
from oxidiff.capture.slices import unsliced
from small_pipes import network, random

Call = dict[str, Any]
HEADS = 2
MODEL_ERROR = 2e-5


class Passing(nn.Module):
    """Calls the module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@torch.no_grad()
def assert_one_program(module: nn.Module, calls: Sequence[Call], count: int = 1) -> Any:
    """Checks calls of different sizes against eager, and how many programs they take; gives the compiled module."""
    compiled: Any = oxidiff.compile(copy.deepcopy(module), cache=False)
    for call in calls:
        assert testing.relative_error(first(compiled(**call)), first(module(**call))) <= MODEL_ERROR
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0, report.fallbacks
    assert (report.captures, report.programs) == (count, count)
    return compiled


def unet_calls(width: int, sizes: Sequence[tuple[int, int]]) -> list[Call]:
    return [
        {
            "sample": random(batch, 4, side, side + 2, seed=batch),
            "timestep": torch.tensor(500),
            "encoder_hidden_states": random(batch, 7, width, seed=side),
        }
        for batch, side in sizes
    ]


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["auto", "max", 2])
@pytest.mark.parametrize("config", [CROSS, SIMPLE], ids=["cross", "added keys"])
def test_sliced_attention(config: dict[str, Any], size: Any) -> None:
    unet = network(diffusers.UNet2DConditionModel, **config)
    calls = unet_calls(unet.config.cross_attention_dim, [(2, 8), (4, 8), (3, 10), (1, 12), (6, 8)])
    for call in unet_calls(unet.config.cross_attention_dim, [(2, 10), (3, 8)]):
        mask = torch.arange(7) < torch.arange(3, 3 + call["sample"].shape[0])[:, None]
        calls.append({**call, "encoder_attention_mask": mask})
    unet.set_attention_slice(size)
    kinds = (attention.SlicedAttnProcessor, attention.SlicedAttnAddedKVProcessor)
    assert any(isinstance(one, kinds) for one in unet.attn_processors.values())
    assert_one_program(unet, calls[:5])
    assert_one_program(unet, calls[5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"residual_connection": True, "rescale_output_factor": 1.5, "norm_num_groups": 2},
        {"upcast_attention": True, "upcast_softmax": True, "bias": True},
    ],
    ids=["residual", "upcast"],
)
@torch.no_grad()
def test_attention_as_it_is_set_up(options: dict[str, Any], dtype: torch.dtype) -> None:
    attn = network(attention.Attention, query_dim=8, heads=HEADS, dim_head=4, **options).to(dtype)
    sliced = Passing(copy.deepcopy(attn))
    attn.set_processor(attention.AttnProcessor())
    sliced.inner.set_attention_slice(1)  # type: ignore[operator]
    compiled: Any = oxidiff.compile(sliced, cache=False)
    for batch, side in ((2, 3), (3, 4), (5, 2)):
        x = random(batch, 8, side, side, seed=batch).to(dtype)
        if "norm_num_groups" not in options:
            x = x.flatten(2).transpose(1, 2)
        # As at once, bit for bit in the same ops.
        expected = sliced(x)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        assert testing.relative_error(compiled(x), expected) < tolerance
        assert testing.relative_error(attn(x), expected) < tolerance
    assert oxidiff.report(compiled).captures == 1


class Halved(attention.SlicedAttnProcessor):
    """Other code than diffusers has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) / 2


class Doubling(attention.Attention):
    """Looks at how many items a slice has."""

    def get_attention_scores(self, query: Tensor, key: Tensor, attention_mask: Any = None) -> Tensor:
        return super().get_attention_scores(query, key, attention_mask) * query.shape[0]


@torch.no_grad()
def test_attention_of_other_code_is_left_as_it_is() -> None:
    x, cross = random(3, 5, 8), random(3, 4, 8)
    attn: Any = network(attention.Attention, query_dim=8, heads=HEADS, dim_head=4, cross_attention_dim=8)
    assert unsliced(attn, (x, cross), {}) is attn
    attn.set_attention_slice(1)
    before = {**attn.__dict__}
    assert unsliced(attn, (x, cross), {}) is not attn
    assert {**attn.__dict__} == before, "the module itself was written"
    assert unsliced(attn, (x, random(4, 4, 8)), {}) is attn, "parts of more items than there are"
    assert unsliced(attn, (x, cross), {"attention_mask": torch.zeros(1, 1, 4)}) is attn

    other: Any = network(Doubling, query_dim=8, heads=HEADS, dim_head=4)
    for module, processor in ((attn, Halved(1)), (other, attention.SlicedAttnProcessor(1))):
        module.set_processor(processor)
        assert unsliced(module, (x,), {}) is module
    assert_one_program(Passing(other), [{"hidden_states": random(n, 5, 8)} for n in (2, 3)], count=2)

    attn.set_attention_slice(1)
    hook = attn.register_forward_hook(lambda *_: None)
    assert unsliced(attn, (x, cross), {}) is attn
    hook.remove()
    attn.processor.slice_size = 0
    assert unsliced(attn, (x, cross), {}) is attn


@torch.no_grad()
def test_slicing_is_turned_on_and_off() -> None:
    unet: Any = network(diffusers.UNet2DConditionModel, **CROSS)
    compiled: Any = oxidiff.compile(copy.deepcopy(unet), cache=False)
    calls = unet_calls(unet.config.cross_attention_dim, [(2, 8), (3, 8), (4, 10)])
    for size in ("max", None, "auto", 2):
        for net in (unet, compiled):
            net.set_default_attn_processor() if size is None else net.set_attention_slice(size)
        for call in calls:
            assert testing.relative_error(first(compiled(**call)), first(unet(**call))) <= MODEL_ERROR
        if size == "max":
            assert oxidiff.report(compiled).captures == 1
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert report.captures <= 3, "slices of another size are no other program"


def test_attention_that_is_compiled_alone() -> None:
    attn: Any = network(attention.Attention, query_dim=8, heads=HEADS, dim_head=4)
    attn.set_attention_slice(1)
    assert_one_program(attn, [{"hidden_states": random(n, 5, 8)} for n in (2, 3, 4)])


# --- feed-forward layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_chunked_feed_forward_layers(dim: int) -> None:
    unet: Any = small_pipes.tested_net("unet3d")
    unet.enable_forward_chunking(1, dim)
    width = unet.config.cross_attention_dim
    sizes = ((3, 8), (5, 8), (7, 8), (4, 12))
    calls = [
        {
            "sample": random(1, 4, frames, 8, side),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": random(1, 11, width),
        }
        for frames, side in sizes
    ]
    assert_one_program(unet, calls)


def test_chunked_layers_of_pictures_and_prompts() -> None:
    net: Any = testing.build("sd3")
    net.enable_forward_chunking(4, 1)
    config = net.config
    calls = [
        {
            "hidden_states": random(batch, config.in_channels, side, 16),
            "encoder_hidden_states": random(batch, tokens, config.joint_attention_dim),
            "pooled_projections": random(batch, config.pooled_projection_dim),
            "timestep": torch.full((batch,), 500.0),
        }
        for batch, side, tokens in ((1, 16, 76), (2, 24, 76), (3, 8, 20))
    ]
    assert_one_program(net, calls)


def chunked_block(size: int, dim: int = 1) -> Any:
    block: Any = network(BasicTransformerBlock, dim=8, num_attention_heads=2, attention_head_dim=4)
    block.set_chunk_feed_forward(size, dim)
    return block


def test_a_block_that_is_compiled_alone() -> None:
    assert_one_program(chunked_block(2), [{"hidden_states": random(2, n, 8)} for n in (2, 4, 8)])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_chunks_that_cannot_be_made() -> None:
    module = Passing(chunked_block(4))
    compiled: Any = assert_one_program(module, [{"hidden_states": random(2, n, 8)} for n in (4, 8, 12)])
    for run in (module, compiled):
        with pytest.raises(ValueError, match="has to be divisible by chunk size: 4"):
            run(hidden_states=random(2, 6, 8))
    assert_close(compiled(hidden_states=random(2, 16, 8)), module(hidden_states=random(2, 16, 8)))


class Mixing(nn.Module):
    """Gives each token the mean of all there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x) * 2


def _mixing(block: Any) -> None:
    block.ff = Mixing()


def _mixing_inside(block: Any) -> None:
    block.ff.net.append(Mixing())


def _hooked(block: Any) -> None:
    block.ff.net[0].register_forward_hook(lambda module, args, result: result - result.mean(1, keepdim=True))


@pytest.mark.parametrize("change", [_mixing, _mixing_inside, _hooked])
@torch.no_grad()
def test_layers_that_see_their_chunk_have_it(change: Callable[[Any], None]) -> None:
    block = chunked_block(2)
    assert unsliced(block, (), {}) is not block
    change(block)
    assert unsliced(block, (), {}) is block
    if change is not _hooked:
        compiled: Any = oxidiff.compile(Passing(copy.deepcopy(block)), cache=False)
        for n in (4, 6):
            assert_close(compiled(random(2, n, 8)), block(random(2, n, 8)))


@torch.no_grad()
def test_chunks_of_channels_are_left() -> None:
    block = chunked_block(8, 2)
    compiled: Any = oxidiff.compile(Passing(copy.deepcopy(block)), cache=False)
    for n in (4, 6):
        assert_close(compiled(random(2, n, 8)), block(random(2, n, 8)))
    block.set_chunk_feed_forward(4, 2)
    with pytest.raises((RuntimeError, ValueError)):
        block(random(2, 4, 8))
    other: Any = oxidiff.compile(Passing(copy.deepcopy(block)), cache=False)
    with pytest.raises((RuntimeError, ValueError)):
        other(random(2, 4, 8))


def test_dropout_of_chunks_is_drawn_for_each() -> None:
    layer = FeedForward(8, dropout=0.5)
    block = chunked_block(2)
    block.ff = layer.train()
    assert unsliced(block, (), {}) is block
    layer.eval()
    assert unsliced(block, (), {}) is not block


# --- autoencoders -----------------------------------------------------------------------------------------------------


def test_norms_of_some_frames_at_a_time() -> None:
    norm = network(MochiChunkedGroupNorm3D, num_channels=8, num_groups=2)
    calls = [{"x": random(batch, 8, frames, 3, 4)} for batch, frames in ((1, 3), (1, 9), (2, 12), (1, 17), (3, 8))]
    assert_one_program(Passing(norm), calls)
    norm.norm_layer = nn.BatchNorm2d(8)
    assert unsliced(norm, (), {}) is norm


def test_mochi_decodes_any_number_of_frames() -> None:
    vae: Any = small_pipes.tested_vae("mochi")
    latents = [{"hidden_states": random(1, 4, frames, 3, 4)} for frames in (2, 3, 5, 1)]
    assert_one_program(vae.decoder, latents)


def test_gated_layers_of_some_tokens_at_a_time() -> None:
    layer = network(LTX2VideoVaeSwiGLU, dim=2, hidden_dim=3)
    # Of 16384 tokens there are more tiles than one.
    calls = [{"hidden_states": random(1, frames, 64, 64, 2)} for frames in (3, 5, 9)]
    assert_one_program(Passing(layer), calls)


# --- split inference --------------------------------------------------------------------------------------------------


def test_split_inference() -> None:
    resnet = network(ResnetBlock2D, in_channels=8, out_channels=8, temb_channels=6, groups=2)
    split = SplitInferenceModule(resnet, 1, 0, ["input_tensor", "temb"]).eval()
    sizes = ((2, 4), (3, 5), (5, 4))
    assert_one_program(
        Passing(split), [{"input_tensor": random(n, 8, side, side), "temb": random(n, 6)} for n, side in sizes]
    )
    net: Any = network(
        Transformer2DModel,
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=8,
        norm_num_groups=2,
        cross_attention_dim=6,
    )
    split = SplitInferenceModule(net, 2, 0, ["hidden_states", "encoder_hidden_states"]).eval()
    calls = [
        {
            "hidden_states": random(n, 8, side, side),
            "encoder_hidden_states": random(n, 7, 6),
            "return_dict": False,
        }
        for n, side in sizes
    ]
    assert_one_program(Passing(split), calls)
    call = calls[0]
    assert unsliced(split, (), call) is not split
    assert unsliced(split, (), {**call, "encoder_attention_mask": torch.ones(2, 7)}) is split
    assert unsliced(split, (), {**call, "encoder_hidden_states": random(4, 7, 6)}) is split
    net.transformer_blocks[0].attn1.set_processor(attention.PAGCFGIdentitySelfAttnProcessor2_0())
    assert unsliced(split, (), call) is split


class Attention(nn.Module):
    """Of the same name as diffusers', and called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return self.linear(x) * scale


@torch.no_grad()
def test_classes_of_the_same_name_are_left() -> None:
    module = Attention().eval()
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x=x, scale=2.0), module(x=x, scale=2.0))
