"""OneDiff's import names: after ``import oxidiff.compat.onediff``, scripts written for OneDiff run unchanged.

``onediff.infer_compiler`` gives ``compile``, ``oneflow_compile``, ``oneflow_backend``, ``OneflowCompileOptions``,
``CompileOptions``, ``compile_options`` and ``DeployableModule``; ``onediff.torch_utils`` gives ``TensorInplaceAssign``;
``onediffx`` gives ``compile_pipe``, ``save_pipe`` and ``load_pipe``; ``onediffx.lora`` the functions that load, fuse and
delete adapters, which are plain diffusers calls here because weights may change at any time. Where the real OneDiff is
installed nothing happens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import pipelines
from ..backend import oxidiff as _backend
from ..module import CompiledModule
from ..module import compile as _compile
from ..options import ONEDIFF_FIELDS

__all__ = [
    "DeployableModule",
    "OneflowCompileOptions",
    "TensorInplaceAssign",
    "compile",
    "compile_options",
    "compile_pipe",
    "delete_adapters",
    "get_active_adapters",
    "install",
    "load_and_fuse_lora",
    "load_lora_and_optionally_fuse",
    "load_pipe",
    "oneflow_backend",
    "oneflow_compile",
    "save_pipe",
    "set_and_fuse_adapters",
    "unfuse_lora",
    "update_graph_with_constant_folding_info",
]

DeployableModule = CompiledModule
"""OneDiff's name of a compiled module."""


class OneflowCompileOptions(types.SimpleNamespace):
    """OneDiff's options by their names; which have a meaning here is decided where they are used. Those that were not set
    read as OneDiff's defaults, and mean nothing: :class:`oxidiff.CompileOptions` has the defaults here.

    Raises:
        TypeError: A name is not one of OneDiff's.
    """

    def __getattr__(self, name: str) -> Any:
        if name in ONEDIFF_FIELDS:
            return _DEFAULTS.get(name)
        raise AttributeError(f"OneDiff has no option {name!r}")

    @property
    def oneflow(self) -> OneflowCompileOptions:
        """The options themselves: ``compile_options.oneflow.name`` and ``compile_options.name`` are one here."""
        return self

    def __init__(self, **fields: Any) -> None:
        unknown = [name for name in fields if name not in ONEDIFF_FIELDS]
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; OneDiff has {', '.join(sorted(ONEDIFF_FIELDS))}")
        super().__init__(**fields)


_DEFAULTS = {"dynamic": True, "use_graph": True, "debug_level": -1, "max_cached_graph_size": 9}
"""Of OneDiff's options; that of all others is ``None``."""

compile_options = OneflowCompileOptions()
"""OneDiff's global options: what is set here holds for every compile without options of its own."""


def _options(options: Any) -> Any:
    if isinstance(options, str):
        options = json.loads(options)
    return compile_options if options is None else options


def compile(torch_module: nn.Module, *, backend: str = "oneflow", options: Any = None) -> Any:
    """OneDiff's ``compile``; the choice of a backend has no meaning here. See :func:`oxidiff.compile`."""
    return _compile(torch_module, options=_options(options))


def oneflow_compile(
    torch_module: nn.Module, *, use_graph: bool = True, dynamic: bool = True, options: Any = None
) -> Any:
    """OneDiff's ``oneflow_compile``; see :func:`oxidiff.compile`.

    Args:
        torch_module: The module.
        use_graph: Has no meaning here: nothing else is compiled but graphs.
        dynamic: Whether sizes vary from call to call.
        options: See :func:`oxidiff.compile`.
    """
    return _compile(torch_module, dynamic=dynamic, options=_options(options))


def oneflow_backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """OneDiff's backend for ``torch.compile(module, backend=oneflow_backend)``: that of the name ``"oxidiff"``."""
    return _backend(graph, example_inputs, **options)


def compile_pipe(
    pipe: Any,
    *,
    backend: str = "oneflow",
    options: Any = None,
    ignores: Iterable[str] = (),
    fuse_qkv_projections: bool = False,
) -> Any:
    """OneDiff's ``compile_pipe``; see :func:`oxidiff.compile_pipe`.

    Args:
        pipe: The pipeline.
        backend: Has no meaning here.
        options: See :func:`oxidiff.compile`.
        ignores: Parts to leave alone.
        fuse_qkv_projections: Has no meaning here: projections of the same input are merged while compiling.
    """
    return pipelines.compile_pipe(pipe, options=_options(options), ignores=ignores)


def save_pipe(pipe: Any, dir: str = "cached_pipe", *, ignores: Iterable[str] = (), overwrite: bool = True) -> None:
    """OneDiff's ``save_pipe``; see :func:`oxidiff.save_pipe`."""
    pipelines.save_pipe(pipe, dir, ignores=ignores, overwrite=overwrite)


def load_pipe(pipe: Any, dir: str = "cached_pipe", *, ignores: Iterable[str] = ()) -> None:
    """OneDiff's ``load_pipe``; see :func:`oxidiff.load_pipe`."""
    pipelines.load_pipe(pipe, dir, ignores=ignores)


_OF_LOADING = ("offload_device", "use_cache", "memory_efficient", "device")
"""How OneDiff is to load an adapter: of no meaning here."""


def load_lora_and_optionally_fuse(
    pipeline: Any,
    lora: Any,
    adapter_name: str | None = None,
    *,
    fuse: bool,
    lora_scale: float | None = None,
    **kwargs: Any,
) -> None:
    """Loads an adapter into a pipeline and merges it into the weights if wanted; nothing is compiled again."""
    others = {name: value for name, value in kwargs.items() if name not in _OF_LOADING}
    pipeline.load_lora_weights(lora, adapter_name=adapter_name, **others)
    if fuse:
        pipeline.fuse_lora(lora_scale=1.0 if lora_scale is None else lora_scale)


def load_and_fuse_lora(
    pipeline: Any, lora: Any, adapter_name: str | None = None, *, lora_scale: float = 1.0, **kwargs: Any
) -> None:
    """Loads an adapter into a pipeline and merges it into the weights; nothing is compiled again."""
    load_lora_and_optionally_fuse(pipeline, lora, adapter_name, fuse=True, lora_scale=lora_scale, **kwargs)


def set_and_fuse_adapters(
    pipeline: Any, adapter_names: str | Sequence[str], adapter_weights: Sequence[float] | None = None
) -> None:
    """Merges other adapters, among those that are loaded, into the weights of a pipeline."""
    names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
    pipeline.unfuse_lora()
    pipeline.set_adapters(names, adapter_weights)
    pipeline.fuse_lora(adapter_names=names)


def unfuse_lora(pipeline: Any) -> None:
    """Takes merged adapters out of the weights of a pipeline again."""
    pipeline.unfuse_lora()


def delete_adapters(pipeline: Any, adapter_names: str | Sequence[str] | None = None, **_: Any) -> None:
    """Takes adapters out of a pipeline, all of them if none is named; merged ones are taken out of the weights first."""
    if pipeline.num_fused_loras:
        pipeline.unfuse_lora()
    if adapter_names is None:
        pipeline.unload_lora_weights()
    else:
        pipeline.delete_adapters(adapter_names)


def get_active_adapters(pipeline: Any) -> list[str]:
    """Names of the adapters that a pipeline uses."""
    return list(pipeline.get_active_adapters())


def update_graph_with_constant_folding_info(module: Any, info: Any = None) -> None:
    """Does nothing: programs read the weights as they are."""


class TensorInplaceAssign(contextlib.nullcontext[None]):
    """OneDiff keeps weights in their place within it; here they may lie anywhere, and nothing is done.

    Args:
        modules: Modules whose weights are going to change.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__()


def install() -> bool:
    """Makes the names importable; false, and nothing done, where the real OneDiff is installed."""
    if "onediff" in sys.modules:
        return getattr(sys.modules["onediff"], "__oxidiff__", False)
    if importlib.util.find_spec("onediff") is not None:
        return False
    served: dict[str, list[Any]] = {
        "onediff": [],
        "onediff.infer_compiler": [
            compile,
            oneflow_compile,
            oneflow_backend,
            OneflowCompileOptions,
            DeployableModule,
        ],
        "onediffx": [compile_pipe, save_pipe, load_pipe, OneflowCompileOptions],
        "onediff.torch_utils": [TensorInplaceAssign],
        "onediffx.lora": [
            load_and_fuse_lora,
            load_lora_and_optionally_fuse,
            set_and_fuse_adapters,
            unfuse_lora,
            delete_adapters,
            get_active_adapters,
            update_graph_with_constant_folding_info,
        ],
    }
    for name, members in served.items():
        module = types.ModuleType(name, f"Served by oxidiff; see {__name__}.")
        module.__dict__["__oxidiff__"] = True
        module.__dict__["__path__"] = []
        for member in members:
            setattr(module, "DeployableModule" if member is DeployableModule else member.__name__, member)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    infer_compiler = sys.modules["onediff.infer_compiler"]
    infer_compiler.__dict__.update(compile_options=compile_options, CompileOptions=OneflowCompileOptions)
    return True


install()
