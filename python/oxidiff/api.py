"""The functions on the package's namespace that look at or steer what :func:`oxidiff.compile` returned.

Each exists also as a method of the compiled object, unless the module has something of that name itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from .memory import Estimate, estimate_of
from .module import dispatcher_of
from .options import AnyPath
from .report import Explanation, Profile, Report, explain_of, profile_of, report_of
from .warmup import warm_up

__all__ = [
    "bind",
    "eager",
    "estimate",
    "explain",
    "load_graph",
    "profile",
    "report",
    "save_graph",
    "unbind",
    "unload",
    "use",
    "warmup",
]


def warmup(compiled: Any, /, *args: Any, shapes: Iterable[Any] | None = None, **kwargs: Any) -> None:
    """Compiles now, for example arguments and optionally further sizes; runs nothing. With ``OXIDIFF_DISABLE=1`` it compiles
    nothing either, and says so.

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


def explain(compiled: Any, /, device: str | None = None) -> Explanation:
    """What was captured, what it was compiled to, what runs eager for which reason, and what would make it faster.

    Args:
        compiled: What ``compile`` returned.
        device: A GPU by name, such as ``"L4"``, to ask about; the device at hand by default.

    Raises:
        ValueError: There is no profile of that device.
    """
    return explain_of(dispatcher_of(compiled), device)


def estimate(compiled: Any, /, *args: Any, **kwargs: Any) -> Estimate:
    """Peak bytes and time of a call with these arguments, without running it; compiles if that has not happened yet.

    Bytes are exact: sizes are planned by arithmetic. The tensors may be empty; only their shapes matter.

    Raises:
        OutOfMemoryError: The call would not fit the module's ``memory_budget``; says what it would need.
        Error: Why this call cannot run compiled.
    """
    return estimate_of(dispatcher_of(compiled), args, kwargs)


def profile(compiled: Any, /, *args: Any, **kwargs: Any) -> Profile:
    """Runs one call and times each step of it.

    Raises:
        Error: Why this call cannot run compiled.
    """
    return profile_of(dispatcher_of(compiled), args, kwargs)


def save_graph(compiled: Any, /, path: AnyPath) -> None:
    """Saves what was compiled so far, without weights, for :func:`load_graph` in another process.

    Args:
        compiled: What ``compile`` returned.
        path: The file; replaced if it exists.

    Raises:
        ArtifactError: Nothing is compiled yet, or it depends on something that has no meaning in another process.
        CacheError: The file cannot be written.
    """
    dispatcher_of(compiled).save_graph(path)


def load_graph(compiled: Any, /, path: AnyPath, device: torch.device | str | int | None = None) -> None:
    """Loads what :func:`save_graph` saved: calls of these structures and classes of sizes are not captured again.

    Args:
        compiled: What ``compile`` returned; a module of the same code, structure and dtypes. Weights may differ.
        path: The file.
        device: Where it will run; the module's own device by default.

    Raises:
        ArtifactError: There is no such file, it is damaged, or it was saved from another module; says what differs.
        UnsupportedError: There is no backend for the device.
    """
    dispatcher_of(compiled).load_graph(path, device)


def bind(compiled: Any, /, weights: torch.nn.Module | Mapping[str, torch.Tensor], name: str | None = None) -> str:
    """Adds a weight set of the same architecture, for :func:`use` to switch to. Nothing is copied or compiled.

    Args:
        compiled: What ``compile`` returned for a module.
        weights: A state dict (buffers and adapters may be missing: these are the module's), or a module. Its tensors are
            used where they are, so in-place changes are noticed, and converted where the module has another dtype by then.
        name: A name for it; a set of this name is replaced.

    Returns:
        The name.

    Raises:
        ShapeError: A tensor is missing, is one too many, or has another dtype, shape or device; lists the first.
        TypeError, ValueError: ``weights`` are neither of the two; the name is none.
        UnsupportedError: The module cannot be copied; bind a module then.
    """
    return dispatcher_of(compiled).bind(weights, name)


def use(compiled: Any, /, name: str | None = None) -> None:
    """Switches to a weight set; running calls finish with the one they began with.

    Args:
        compiled: What ``compile`` returned for a module.
        name: What :func:`bind` returned; ``None`` for the module's own weights.

    Raises:
        ValueError: There is no such set.
    """
    dispatcher_of(compiled).use(name)


def unbind(compiled: Any, /, name: str) -> None:
    """Drops a weight set and what was derived from it; if it is in use, the module's own weights are from now on."""
    dispatcher_of(compiled).unbind(name)


def unload(compiled: Any, /) -> None:
    """Gives back every byte of compiled state; the next call compiles again."""
    dispatcher_of(compiled).unload()


def eager(compiled: Any, /) -> AbstractContextManager[torch.nn.Module]:
    """A context in which ``compiled`` runs in eager PyTorch, in every thread; gives the original module."""
    return dispatcher_of(compiled).eager()
