"""``torch.nn.attention.flex_attention`` in a trace: an operator that takes functions, of which trivial ones are known."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["flex_attention", "uncompiled"]

_MODULE = "torch.nn.attention.flex_attention"
_SWITCH, _NO_MASK = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "_create_empty_block_mask"


@contextmanager
def uncompiled(device: torch.device) -> Iterator[None]:
    """Has ``flex_attention`` call its operator. Outside of ``torch.compile`` it has Dynamo compile that call, which gives up
    before the modes of a trace, and then raises wherever the function is called, traced or not. What it makes where it is
    given no mask is made here: that is no work of the program."""
    module: Any = sys.modules.get(_MODULE)
    if not (hasattr(module, _SWITCH) and hasattr(module, _NO_MASK)):
        yield
        return
    is_compiled, make, thread = getattr(module, _SWITCH), getattr(module, _NO_MASK), threading.get_ident()
    no_mask = _no_mask(make, device)

    def make_here(query: torch.Tensor, key: torch.Tensor) -> Any:
        return no_mask if threading.get_ident() == thread else make(query, key)

    try:
        setattr(module, _SWITCH, True)
        setattr(module, _NO_MASK, make_here)
        yield
    finally:
        setattr(module, _SWITCH, is_compiled)
        setattr(module, _NO_MASK, make)


@functools.cache
def _no_mask(make: Any, device: torch.device) -> Any:
    """What ``flex_attention`` takes for no mask, whatever the sizes: made once, for diffusers imports the function for every
    model."""
    like = torch.empty(1, 1, 1, 1, device=device)
    return make(like, like)


def flex_attention(
    rec: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator gives: attention, and what nobody asks for.

    Args:
        rec: The trace.
        query: ``[batch, heads, rows, size]``.
        key: ``[batch, heads or fewer, keys, size]``.
        value: As ``key``, of any size.
        score_mod: What is done to scores.
        block_mask: Sizes of blocks and the function of the mask are the last three.
        scale: Of the scores.
        kernel_options: Which other results are asked for, among others.

    Raises:
        CaptureError: There is a mask, or something is done to the scores, or other results are asked for.
    """
    module: Any = sys.modules[_MODULE]
    whole = module._LARGE_SPARSE_BLOCK_SIZE
    is_masked = block_mask[-3:-1] != (whole, whole) or block_mask[-1] is not module.noop_mask
    if is_masked or score_mod is not module._identity:
        raise rec.error("functions for scores and masks of flex_attention have no lowering", "flex_attention")
    if kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX"):
        raise rec.error("other results of flex_attention than attention have no lowering", "flex_attention")
    is_grouped = query.shape[-3] != key.shape[-3]
    out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=is_grouped)
    nothing = query.new_empty(0)
    return out, nothing, nothing
