"""The functions on the package's namespace that look at or steer what :func:`oxidiff.compile` returned.

Each exists also as a method of the compiled object, unless the module has something of that name itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .module import dispatcher_of
from .report import Explanation, Profile, Report, explain_of, profile_of, report_of
from .warmup import warm_up

__all__ = ["eager", "explain", "profile", "report", "unload", "warmup"]


def warmup(compiled: Any, /, *args: Any, shapes: Iterable[Any] | None = None, **kwargs: Any) -> None:
    """Compiles now, for example arguments and optionally further sizes; runs nothing.

    Args:
        compiled: What ``compile`` returned.
        args: Arguments of an example call.
        shapes: Further sizes: each a shape of the first tensor argument (a changed batch is carried over to the other
            tensors), or a mapping from argument name or position to shape. Shows progress on a terminal.
        kwargs: Keyword arguments of the example call.

    Raises:
        Error: Why this call cannot run compiled.
        ValueError: ``shapes`` do not fit the example.
    """
    warm_up(dispatcher_of(compiled), args, kwargs, shapes)


def report(compiled: Any, /) -> Report:
    """Counts, bytes, times and fallbacks so far."""
    return report_of(dispatcher_of(compiled))


def explain(compiled: Any, /) -> Explanation:
    """What was captured, what it was compiled to, and what runs eager for which reason."""
    return explain_of(dispatcher_of(compiled))


def profile(compiled: Any, /, *args: Any, **kwargs: Any) -> Profile:
    """Runs one call and times each step of it.

    Raises:
        Error: Why this call cannot run compiled.
    """
    return profile_of(dispatcher_of(compiled), args, kwargs)


def unload(compiled: Any, /) -> None:
    """Gives back every byte of compiled state; the next call compiles again."""
    dispatcher_of(compiled).unload()


def eager(compiled: Any, /) -> AbstractContextManager[torch.nn.Module]:
    """A context in which ``compiled`` runs in eager PyTorch, in every thread; gives the original module."""
    return dispatcher_of(compiled).eager()
