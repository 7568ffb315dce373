"""``torch.nn.attention.flex_attention`` in a trace: an operator of functions, which are run for all scores at once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["flex_attention", "indexed", "is_index", "uncompiled"]

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
    mode: TorchFunctionMode,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator gives outside of ``torch.compile``, where the function of a mask says all of it: which blocks are
    left out matters to nothing.

    Args:
        mode: That of the trace, in which the functions run.
        query: ``[batch, heads, rows, size]``.
        key: ``[batch, heads or fewer, keys, size]``.
        value: As ``key``, of any size.
        score_mod: What is done to scores.
        block_mask: Its last part is the function of the mask.
        scale: Of the scores.
        kernel_options: Which other results are asked for, among others.
        score_buffers: Further arguments of ``score_mod``.
        mask_buffers: Further arguments of the function of the mask.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import math_attention

    module: Any = sys.modules[_MODULE]
    asks_more = kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX")
    with mode:
        out = logsumexp = top = query.new_empty(0)
        if score_mod is not module._identity or asks_more:
            out, logsumexp, top = math_attention(
                query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )
        if score_mod is module._identity:
            mask = None
            if (mask_mod := block_mask[-1]) is not module.noop_mask:
                places = [torch.arange(size, device=query.device) for size in (*query.shape[:3], key.shape[2])]
                of_all = module._vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(mask_buffers))
                with TransformGetItemToIndex():
                    mask = of_all(*places, *mask_buffers)
            is_grouped = query.shape[-3] != key.shape[-3]
            # Not what these scores give, which are asked for wherever gradients may be.
            out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=is_grouped)
        return out, logsumexp, top


def is_index(function: Any) -> bool:
    """Whether a ``torch.autograd.Function`` is that by which functions for ``flex_attention`` index tensors, and is called
    within ``torch.vmap`` alone, which runs its ``forward`` as it is."""
    within = torch._C._functorch.get_interpreter_stack() or []
    is_mapped = all(one.key() == torch._C._functorch.TransformType.Vmap for one in within)
    return is_mapped and function.__module__ == "torch._dynamo._trace_wrapped_higher_order_op"


def indexed(mode: TorchFunctionMode, function: Any, *operands: Any) -> Any:
    """What that function gives."""
    with mode:
        return function.forward(*operands)
