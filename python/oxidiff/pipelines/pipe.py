"""`compile_pipe`: the parts of a pipeline, each replaced by its compiled self."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from ..module import compile
from ..options import CompileOptions
from .parts import PARTS

__all__ = ["compile_pipe"]

P = TypeVar("P")


def compile_pipe(
    pipe: P,
    *,
    options: CompileOptions | Mapping[str, Any] | None = None,
    ignores: Iterable[str] = (),
    parts: Iterable[str] | None = None,
    **fields: Any,
) -> P:
    """Compiles every part of a diffusers pipeline in place, and returns the pipeline.

    The pipeline keeps its schedulers, offloading, tiling and slicing; parts it does not have are passed over. Where a
    part is a list of networks (several ControlNets), each is compiled.

    Args:
        pipe: The pipeline.
        options: For all parts; see :class:`oxidiff.CompileOptions`.
        ignores: Parts to leave alone; ``"vae"`` stands for ``"vae.encoder"`` and ``"vae.decoder"`` too.
        parts: The parts to compile instead of those of :data:`oxidiff.pipelines.PARTS`.
        fields: Single options.

    Raises:
        AttributeError: ``parts`` names something that the pipeline does not have.
        TypeError, ValueError: See :func:`oxidiff.compile`.
    """
    chosen = CompileOptions.of(options, **fields)
    skipped = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    for part in PARTS if parts is None else tuple(parts):
        if any(part == name or part.startswith(f"{name}.") for name in skipped):
            continue
        found = _find(pipe, part)
        if found is None:
            if parts is not None:
                raise AttributeError(f"{type(pipe).__name__} has no part {part!r}")
            continue
        holder, name, module = found
        setattr(holder, name, _compiled(module, chosen))
    return pipe


def _find(pipe: object, part: str) -> tuple[Any, str, nn.Module] | None:
    *path, name = part.split(".")
    holder: Any = pipe
    for step in path:
        holder = getattr(holder, step, None)
    module = getattr(holder, name, None)
    return (holder, name, module) if isinstance(module, nn.Module) else None


def _compiled(module: nn.Module, options: CompileOptions) -> nn.Module:
    nets = getattr(module, "nets", None)
    if type(module).__name__.startswith("MultiControlNet") and isinstance(nets, nn.ModuleList):
        for i, net in enumerate(nets):
            nets[i] = compile(net, options=options)
        return module
    return compile(module, options=options)
