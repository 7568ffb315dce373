"""Autocast of the calling thread: what it is on for, as it was elsewhere, and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

__all__ = ["KINDS", "State", "autocast_as", "autocast_state", "without_autocast"]

_C = torch._C

State = tuple[tuple[str, torch.dtype], ...]
"""The kinds of devices that autocast is on for, each with the type it casts to."""
KINDS = ("cpu", "cuda")
F = TypeVar("F", bound=Callable[..., Any])


def autocast_state() -> State:
    """What autocast is on for in this thread."""
    if not _C._is_any_autocast_enabled():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind))


@contextmanager
def autocast_as(state: State) -> Iterator[None]:
    """Autocast as it was elsewhere, and for nothing else."""
    # Not `torch.autocast`, which looks for a GPU: it was there when that was entered.
    before = [(kind, torch.get_autocast_dtype(kind)) for kind, _ in state]
    is_cached = torch.is_autocast_cache_enabled()
    with _C._DisableAutocast():
        try:
            # Whoever switches it off for good is elsewhere.
            torch.set_autocast_cache_enabled(False)
            for kind, dtype in state:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
            yield
        finally:
            for kind, dtype in before:
                torch.set_autocast_enabled(kind, False)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(is_cached)


def without_autocast(function: F) -> F:
    """A function in which nothing is cast: it computes what a program, or one that is made, says."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with _C._DisableAutocast():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
