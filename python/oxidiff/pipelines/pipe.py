"""`compile_pipe`: the parts of a pipeline, each replaced by its compiled self."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..dispatch import find_dispatcher
from ..errors import ArtifactError, caller_level
from ..module import compile, dispatcher_of
from ..options import AnyPath, CompileOptions
from ..report import report_of
from ..store.cache import complain
from ..tune import Budget
from .parts import PARTS, parts_of

__all__ = ["compile_pipe", "load_pipe", "save_pipe"]

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
    part is a list of networks (several ControlNets), each is compiled. A part that is compiled stays as it is, or is
    compiled anew if options are given. Every component that is a network is a part, whatever its name, and the encoder and
    decoder in an autoencoder; safety checkers are left alone.

    Args:
        pipe: The pipeline.
        options: For all parts; see :class:`oxidiff.CompileOptions`. They share ``tune_budget_s``. Of a ``graph_file`` each
            has one of its own, with its name before the suffix: ``"sd.oxi"`` is ``"sd.unet.oxi"`` for ``pipe.unet``.
        ignores: Parts to leave alone; ``"vae"`` stands for ``"vae.encoder"`` and ``"vae.decoder"`` too. Of a name that is
            none of any pipeline's there is a warning.
        parts: The parts to compile instead of all.
        fields: Single options.

    Raises:
        AttributeError: ``parts`` names something that the pipeline does not have.
        TypeError: ``pipe`` has no part.
        TypeError, ValueError: See :func:`oxidiff.compile`.
    """
    chosen = CompileOptions.of(options, **fields)
    parts = (parts,) if isinstance(parts, str) else parts
    own = parts_of(pipe)
    if parts is None and not own:
        name = type(pipe).__name__
        raise TypeError(f"{name} is no pipeline with a part that can be compiled; oxidiff.compile takes modules")
    ignores = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    for name in ignores:
        if not any(f"{part}.".startswith(f"{name}.") for part in PARTS) and not _has(pipe, name):
            warnings.warn(f"{type(pipe).__name__} has no part {name!r} to ignore", stacklevel=caller_level())
    budget = Budget(chosen.tune_budget_s)
    given = None if options is None and not fields else chosen
    made: dict[int, nn.Module] = {}
    for part in _without(own if parts is None else tuple(parts), ignores):
        found = _find(pipe, part)
        if found is None:
            if parts is not None:
                raise AttributeError(f"{type(pipe).__name__} has no part {part!r}")
            continue
        holder, name, module = found
        compiled = made.get(id(module))
        if compiled is None:
            compiled = made[id(module)] = _compiled(module, given, budget, part)
            # A component may be there under two names.
            made[id(compiled)] = compiled
        setattr(holder, name, compiled)
    for inner in list(getattr(pipe, "__dict__", {}).values()):
        if hasattr(inner, "register_modules"):
            _share(inner, made)
    return pipe


def save_pipe(pipe: Any, dir: AnyPath = "cached_pipe", *, ignores: Iterable[str] = (), overwrite: bool = True) -> None:
    """Saves every compiled part of a pipeline, without weights, as one file in ``dir``; see :func:`oxidiff.save_graph`.

    Args:
        pipe: What :func:`compile_pipe` returned, after it ran.
        dir: The folder; made if it does not exist.
        ignores: Parts to leave out.
        overwrite: ``False`` keeps files that are there.

    Raises:
        ArtifactError: No part is compiled yet.
        CacheError: A file cannot be written.
    """
    reasons = []
    left: dict[str, str] = {}
    saved: list[str] = []
    for name, module in _compiled_parts(pipe, ignores):
        path = Path(os.fsdecode(dir)) / f"{name}.oxi"
        if path.exists() and not overwrite:
            saved.append(name)
            continue
        try:
            dispatcher_of(module).save_graph(path)
            saved.append(name)
        except ArtifactError as error:
            reasons.append(f"{name}: {error}")
            if report_of(dispatcher_of(module)).calls:
                left[name] = str(error)
    for name, reason in left.items():
        # What was called and is left out is compiled again wherever the folder is loaded. Of an autoencoder, encoder and
        # decoder are all that there is.
        if not any(inner.startswith(f"{name}.") for inner in saved):
            complain(f"{name} is not saved: {reason}")
    if not saved:
        raise ArtifactError(
            f"no part of {type(pipe).__name__} can be saved ({'; '.join(reasons) or 'none is compiled'})"
        )


def load_pipe(pipe: Any, dir: AnyPath = "cached_pipe", *, ignores: Iterable[str] = ()) -> None:
    """Loads what :func:`save_pipe` saved into the compiled parts of a pipeline; see :func:`oxidiff.load_graph`.

    Parts without a file in ``dir`` are compiled at their first call as usual.

    Args:
        pipe: What :func:`compile_pipe` returned.
        dir: The folder.
        ignores: Parts to leave alone.

    Raises:
        ArtifactError: ``dir`` has no file for any part, or a file is damaged or was saved from another module.
    """
    folder = Path(os.fsdecode(dir))
    found = [(folder / f"{name}.oxi", module) for name, module in _compiled_parts(pipe, ignores)]
    present = [(path, module) for path, module in found if path.exists()]
    if not present:
        raise ArtifactError(f"{folder} has no file for any compiled part of {type(pipe).__name__}")
    for path, module in present:
        dispatcher_of(module).load_graph(path)


def _compiled_parts(pipe: object, ignores: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """The compiled parts, by names that can be those of files."""
    for part in _without(parts_of(pipe), ignores):
        found = _find(pipe, part)
        if found is None:
            continue
        module = found[2]
        nets = _nets(module)
        for i, net in enumerate([module] if nets is None else nets):
            if find_dispatcher(net) is not None:
                yield part if nets is None else f"{part}.{i}", net


def _without(parts: Iterable[str], ignores: Iterable[str]) -> list[str]:
    skipped = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    return [p for p in parts if not any(p == name or p.startswith(f"{name}.") for name in skipped)]


def _share(inner: object, made: Mapping[int, nn.Module]) -> None:
    """Gives a pipeline that another one is made of, and calls, what its components are now."""
    for name, value in list(vars(inner).items()):
        compiled = made.get(id(value))
        if compiled is not None:
            setattr(inner, name, compiled)


def _has(pipe: object, name: str) -> bool:
    try:
        attrgetter(name)(pipe)
    except AttributeError:
        return False
    return True


def _find(pipe: object, part: str) -> tuple[Any, str, nn.Module] | None:
    *path, name = part.split(".")
    holder: Any = pipe
    for step in path:
        holder = getattr(holder, step, None)
    module = getattr(holder, name, None)
    return (holder, name, module) if isinstance(module, nn.Module) else None


def _compiled(module: nn.Module, options: CompileOptions | None, budget: Budget, part: str) -> nn.Module:
    nets = _nets(module)
    if nets is not None:
        for i, net in enumerate(nets):
            nets[i] = _compiled(net, options, budget, f"{part}.{i}")
        return module
    if options is not None and options.graph_file is not None:
        stem, suffix = os.path.splitext(options.graph_file)
        options = dataclasses.replace(options, graph_file=f"{stem}.{part}{suffix}")
    compiled = compile(module, options=options)
    dispatcher = find_dispatcher(compiled)
    if dispatcher is not None and compiled is not module:
        dispatcher.states.budget = budget
    return compiled


def _nets(module: nn.Module) -> nn.ModuleList | None:
    """The networks of a part that is a list of them."""
    nets = getattr(module, "nets", None)
    is_list = type(module).__name__.startswith("MultiControlNet") and isinstance(nets, nn.ModuleList)
    return nets if is_list else None
