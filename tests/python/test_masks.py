"""Masks that code draws row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as hunyuan
from torch import Tensor, nn

import oxidiff
from nets import TOLERANCE
from oxidiff.capture.masks import drawn_at_once

BY_ROWS = hunyuan.HunyuanVideo15AttnBlock.prepare_causal_attention_mask


class Strict(hunyuan.HunyuanVideo15AttnBlock):
    """A frame is not seen by itself, but for its first tokens: other code of the same name."""

    @staticmethod
    def prepare_causal_attention_mask(
        n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None
    ) -> Tensor:
        seq_len = n_frame * n_hw
        mask = torch.full((seq_len, seq_len), float("-inf"), dtype=dtype, device=device)
        for i in range(seq_len):
            i_frame = i // n_hw
            mask[i, : i_frame * n_hw + 1] = 0
        if batch_size is not None:
            mask = mask.unsqueeze(0).expand(batch_size, -1, -1)
        return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize(("frames", "tokens"), [(1, 5), (3, 4), (4, 1), (1, 1)])
def test_the_same_mask_at_once(frames: int, tokens: int, batch: int | None, dtype: torch.dtype) -> None:
    quick = drawn_at_once(BY_ROWS)
    assert quick is not None, "the code of diffusers is another one than was known"
    expected = BY_ROWS(frames, tokens, dtype, torch.device("cpu"), batch_size=batch)
    actual = quick(frames, tokens, dtype, torch.device("cpu"), batch_size=batch)
    assert torch.equal(actual, expected)
    assert actual.dtype == expected.dtype
    assert actual.stride() == expected.stride()


def test_other_code_is_not_known() -> None:
    assert drawn_at_once(Strict.prepare_causal_attention_mask) is None
    assert drawn_at_once(torch.relu) is None


@pytest.mark.parametrize("kind", [hunyuan.HunyuanVideo15AttnBlock, Strict])
@torch.no_grad()
def test_attention_of_a_video(kind: Any) -> None:
    module: nn.Module = kind(8).eval()
    slow = vars(kind)["prepare_causal_attention_mask"]
    compiled: Any = oxidiff.compile(module, cache=False)
    for frames, height, width in ((3, 2, 4), (2, 3, 5), (4, 2, 2)):
        x = torch.randn(1, 8, frames, height, width)
        # Of few places PyTorch's convolution takes another way, whose results lie otherwise.
        torch.testing.assert_close(compiled(x), module(x), **TOLERANCE)
    assert vars(kind)["prepare_causal_attention_mask"] is slow
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert report.programs == (3 if kind is Strict else 1)
