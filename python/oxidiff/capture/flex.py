"""``torch.nn.attention.flex_attention`` in a trace: an operator of functions, which are run for all scores at once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["custom_function", "flex_attention", "is_mapped", "uncompiled"]

_MODULE = "torch.nn.attention.flex_attention"
_SWITCH, _NO_MASK = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "_create_empty_block_mask"
_BLOCKS, _BLOCK_MASK = "_convert_mask_to_block_mask", "_create_sparse_block_from_block_mask"


@contextmanager
def uncompiled(device: torch.device) -> Iterator[None]:
    """Has ``flex_attention`` call its operator. Outside of ``torch.compile`` it has Dynamo compile that call, which gives up
    before the modes of a trace, and then raises wherever the function is called, traced or not. What it makes where it is
    given no mask is made here: that is no work of the program. Nor is which blocks of a mask are empty, which matters to
    nothing there: ``create_block_mask`` does not look for them, and what asks for them has no program."""
    module: Any = sys.modules.get(_MODULE)
    if not all(hasattr(module, name) for name in (_SWITCH, _NO_MASK, _BLOCKS, _BLOCK_MASK)):
        yield
        return
    thread = threading.get_ident()
    no_mask = _no_mask(getattr(module, _NO_MASK), device)

    def here(own: Callable[..., Any], name: str) -> Callable[..., Any]:
        others = getattr(module, name)
        return lambda *args, **kwargs: (own if threading.get_ident() == thread else others)(*args, **kwargs)

    instead = {
        _SWITCH: True,
        _NO_MASK: here(lambda query, key: no_mask, _NO_MASK),
        _BLOCKS: here(lambda mask, *_, **__: (mask, None), _BLOCKS),
        _BLOCK_MASK: here(_block_mask, _BLOCK_MASK),
    }
    before = {name: getattr(module, name) for name in instead}
    try:
        for name, value in instead.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _block_mask(
    masks: tuple[torch.Tensor, Any], mask_mod: Any, seq_lengths: tuple[int, int], q_block: int, kv_block: int
) -> Any:
    """A block mask whose blocks are tensors that no trace knows."""
    module: Any = sys.modules[_MODULE]
    blocks = [-(-int(size) // block) for size, block in zip(seq_lengths, (q_block, kv_block), strict=True)]
    with _disable_current_modes():
        rows = torch.empty((*masks[0].shape[:2], blocks[0]), dtype=torch.int32, device="meta")
        places = torch.empty((*rows.shape, blocks[1]), dtype=torch.int32, device="meta")
    tensors = (rows, places) * 4
    return module.BlockMask(seq_lengths, *tensors, BLOCK_SIZE=(q_block, kv_block), mask_mod=mask_mod)


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


def is_mapped(function: Any) -> bool:
    """Whether a ``torch.autograd.Function`` is called within ``torch.vmap`` alone, which runs its ``forward`` as it is."""
    within = torch._C._functorch.get_interpreter_stack() or []
    is_vmap = all(one.key() == torch._C._functorch.TransformType.Vmap for one in within)
    return is_vmap and getattr(function, "generate_vmap_rule", False)


def custom_function(mode: TorchFunctionMode, function: Any, *operands: Any) -> Any:
    """What a ``torch.autograd.Function`` gives where nothing needs gradients. Functions for ``flex_attention`` index tensors
    by one."""
    with mode:
        return function.forward(*operands)
