"""``flex_attention``: its functions are part of a program, which is what it is outside of ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

import oxidiff
from nets import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def block_mask(
    x: Tensor, function: Callable[..., Tensor], batch: int | None = None, heads: int | None = None
) -> BlockMask:
    rows = x.shape[2]
    return create_block_mask(function, batch, heads, rows, rows, x.device)


def plain(x: Tensor) -> Any:
    return flex_attention(x, x, x + 1)


def grouped(x: Tensor) -> Any:
    return flex_attention(x, x[:, :2], x[:, :2] + 1, block_mask=block_mask(x, causal), scale=0.4, enable_gqa=True)


def masked(x: Tensor) -> Any:
    return flex_attention(x, x, x + 1, block_mask=block_mask(x, causal))


def by_frame(x: Tensor) -> Any:
    frame = torch.arange(x.shape[2], device=x.device) // 7
    return flex_attention(x, x, x + 1, block_mask=block_mask(x, lambda b, h, q, k: frame[q] >= frame[k]))


def by_document(x: Tensor) -> Any:
    """A table with rows for each of the batch, and a window that grows with the head."""
    document = (x[:, 0, :, 0].cumsum(-1) * 0.3).long()

    def together(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[b, q] == document[b, k]) | ((q - k).abs() <= 2 * h)

    return flex_attention(x, x, x + 1, block_mask=block_mask(x, together, x.shape[0], x.shape[1]))


def by_rows_of_a_table(x: Tensor) -> Any:
    table = x[0, 0] @ x[0, 1].T > 0
    return flex_attention(x, x, x + 1, block_mask=block_mask(x, lambda b, h, q, k: table[q][k] | (q == k)))


def nothing_seen(x: Tensor) -> Any:
    """The first rows see nothing, and are 0."""
    return flex_attention(x, x, x + 1, block_mask=block_mask(x, lambda b, h, q, k: q - 3 > k))


def by_blocks(x: Tensor) -> Any:
    """Without a function of its own: outside of ``torch.compile`` all blocks are seen."""
    count = x.shape[2] // 16
    mask = (x.unflatten(2, (count, 16)).mean((3, 4))[..., None] > 0).expand(-1, -1, -1, count)
    number, places = mask.sum(-1).to(torch.int32), mask.int().argsort(-1, descending=True).to(torch.int32)
    blocks = BlockMask.from_kv_blocks(torch.zeros_like(number), places, number, places, BLOCK_SIZE=16)
    return flex_attention(x, x, x + 1, block_mask=blocks)


def biased(x: Tensor) -> Any:
    return flex_attention(x, x, x + 1, score_mod=lambda score, b, h, q, k: score + (q - k) * 0.1)


def by_head(x: Tensor) -> Any:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=x.device)

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 20 * torch.tanh(score / 20) - slopes[h] * (q - k).abs()

    return flex_attention(x, x, x + 1, score_mod=mod, block_mask=block_mask(x, lambda b, h, q, k: q > k))


def with_sums(x: Tensor) -> Any:
    return flex_attention(x, x, x + 1, block_mask=block_mask(x, causal), return_lse=True)


def with_sums_of_others(x: Tensor) -> Any:
    out, more = flex_attention(x, x, x + 1, score_mod=lambda s, b, h, q, k: s * 0.5, return_aux=AuxRequest(lse=True))
    return out, more.lse


def dense(x: Tensor) -> Any:
    return create_mask(causal, None, None, x.shape[2], x.shape[2], x.device) * x.mean()


KINDS = (
    plain, grouped, masked, by_frame, by_document, by_rows_of_a_table, nothing_seen, by_blocks, biased, by_head, with_sums,
    with_sums_of_others, dense,
)  # fmt: skip
OF_ANY_SIZE = (plain, biased, with_sums_of_others, dense)
"""Which count no blocks, whose number is another one at each size."""


class Flexible(nn.Module):
    """Attention of some kind."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of ``torch.compile``, Dynamo compiles each call by itself, to the same."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@torch.no_grad()
@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_functions_are_part_of_programs(function: Callable[[Tensor], Any]) -> None:
    module = Flexible(function)
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    for batch, rows in ((2, 48), (1, 144), (3, 128), (2, 256)):
        x = torch.randn(batch, 4, rows, 16)
        assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0 and not report.fallbacks
    if function in OF_ANY_SIZE:
        assert report.captures == 1


@torch.no_grad()
@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.parametrize("function", [masked, by_head], ids=lambda f: f.__name__)
def test_in_bf16(function: Callable[[Tensor], Any]) -> None:
    module = Flexible(function)
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    x = torch.randn(2, 4, 40, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.usefixtures("without_dynamo")
def test_a_mask_that_the_module_holds() -> None:
    x = torch.randn(1, 4, 48, 16)
    module = Flexible(lambda x: flex_attention(x, x, x + 1, block_mask=module.mask))
    module.mask = block_mask(x, causal)
    compiled: Any = oxidiff.compile(module, cache=False)
    assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 0
    module.mask = block_mask(x, lambda b, h, q, k: q <= k)
    assert_close(compiled(x), module(x))


@torch.no_grad()
@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_asks_for_blocks_gets_them() -> None:
    def shares(x: Tensor) -> Tensor:
        rows = x.shape[2]
        mask = create_block_mask(causal, None, None, rows, 2 * rows, x.device, BLOCK_SIZE=(32, 16))
        assert mask.q_indices is not None
        return x * mask.sparsity() + mask.q_indices.shape[-1] * mask.kv_num_blocks.sum()

    compiled: Any = oxidiff.compile(Flexible(shares), cache=False)
    for rows in (128, 384):
        x = torch.randn(1, 4, rows, 16)
        assert_close(compiled(x), shares(x))


@functools.lru_cache
def kept_mask(rows: int) -> BlockMask:
    return create_block_mask(causal, None, None, rows, rows, "cpu")


@torch.no_grad()
@pytest.mark.usefixtures("without_dynamo")
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_mask_that_a_function_keeps_is_none_of_a_trace() -> None:
    def by_kept(x: Tensor) -> Any:
        return flex_attention(x, x, x + 1, block_mask=kept_mask(x.shape[2]))

    compiled: Any = oxidiff.compile(Flexible(by_kept), cache=False)
    for rows in (32, 48):
        x = torch.randn(1, 4, rows, 16)
        result = compiled(x)
        assert_close(by_kept(x), result)
        assert kept_mask(rows).kv_indices.device.type == "cpu"


@torch.no_grad()
def test_flex_attention_is_left_as_it_is() -> None:
    """Where Dynamo gives up before the modes of a trace, it would raise from then on."""
    compiled: Any = oxidiff.compile(Flexible(masked), strict=True, cache=False)
    x = torch.randn(1, 4, 32, 16)
    expected = masked(x)
    compiled(x)
    assert_close(masked(x), expected)
    assert block_mask(x, causal).kv_indices.device.type == "cpu"
