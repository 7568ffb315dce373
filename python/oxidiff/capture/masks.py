"""Masks that code draws row by row, an op for each: as many as there are tokens, so that each size would be another program.

What draws one is known by its code, and does in a trace at once what it does in so many steps.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["drawn_at_once"]


def _causal_by_rows(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: Any = None) -> Tensor:
    """Which tokens of a video see which: those of a frame see all of it and of those before it.

    Never called: it is what is looked for, and so written as in diffusers (Apache License 2.0,
    ``HunyuanVideo15AttnBlock.prepare_causal_attention_mask``), from which the same code is compiled."""
    seq_len = n_frame * n_hw
    mask = torch.full((seq_len, seq_len), float("-inf"), dtype=dtype, device=device)
    for i in range(seq_len):
        i_frame = i // n_hw
        mask[i, : (i_frame + 1) * n_hw] = 0
    if batch_size is not None:
        mask = mask.unsqueeze(0).expand(batch_size, -1, -1)
    return mask


def _causal_at_once(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: Any = None) -> Tensor:
    frames = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    seq_len = n_frame * n_hw
    mask = torch.zeros((seq_len, seq_len), dtype=dtype, device=device)
    mask = mask.masked_fill(frames[:, None] < frames, float("-inf"))
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)


_KNOWN: tuple[tuple[Any, Callable[..., Tensor]], ...] = ((_causal_by_rows, _causal_at_once),)


def drawn_at_once(function: Any) -> Callable[..., Tensor] | None:
    """What gives the same mask as a function in a number of steps that does not depend on its size; ``None`` if the function
    is none that is known."""
    if not isinstance(function, types.FunctionType):
        return None
    return next((quick for slow, quick in _KNOWN if _is_alike(function, slow)), None)


def _is_alike(one: types.FunctionType, known: types.FunctionType) -> bool:
    """Whether a function is another one, compiled elsewhere."""
    mine, theirs = one.__code__, known.__code__
    if (mine.co_code, mine.co_names, mine.co_varnames) != (theirs.co_code, theirs.co_names, theirs.co_varnames):
        return False
    if (one.__defaults__, one.__kwdefaults__, one.__closure__) != (known.__defaults__, None, None):
        return False
    # Names are found in the function's own file first, and then among Python's.
    names = (one.__globals__.get(name) is known.__globals__.get(name) for name in theirs.co_names)
    return all(names) and _constants(one) == _constants(known)


def _constants(function: types.FunctionType) -> list[str]:
    """The constants of a function but for what it says of itself; as texts, since 1 and True are equal."""
    return [repr(c) for c in function.__code__.co_consts if not isinstance(c, str) or c == "-inf"]
