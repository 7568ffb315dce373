"""oxidiff: a drop-in compile backend for PyTorch diffusion models.

    pipe.unet = oxidiff.compile(pipe.unet)

is all that is needed; :func:`compile_pipe` does it for every part of a diffusers pipeline. What a module gained, and
what it could not compile and why, is in :func:`report` and :func:`explain`.
"""

import warnings as _warnings

from . import _native
from .api import bind, eager, estimate, explain, load_graph, profile, report, save_graph, unbind, unload, use, warmup
from .errors import (
    ArtifactError,
    BackendError,
    CacheError,
    CacheWarning,
    CaptureError,
    CheckError,
    Error,
    FallbackWarning,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from .memory import Estimate, Timeline
from .module import CompiledFunction, CompiledModule, compile
from .options import CompileOptions
from .pipelines import compile_pipe, load_pipe, save_pipe
from .report import Explanation, Profile, Report

oneflow_compile = compile
"""OneDiff's name of :func:`compile`."""

__version__ = _native.__version__

# Before any thread makes its first call: see there.
_native.fill_cells()

for *_, _complaint in _native.knobs():
    if _complaint:
        _warnings.warn(_complaint, stacklevel=2)

__all__ = [
    "ArtifactError",
    "BackendError",
    "CacheError",
    "CacheWarning",
    "CaptureError",
    "CheckError",
    "CompileOptions",
    "CompiledFunction",
    "CompiledModule",
    "Error",
    "Estimate",
    "Explanation",
    "FallbackWarning",
    "OutOfMemoryError",
    "Profile",
    "Report",
    "ShapeError",
    "Timeline",
    "UnsupportedError",
    "bind",
    "compile",
    "compile_pipe",
    "eager",
    "estimate",
    "explain",
    "load_graph",
    "load_pipe",
    "oneflow_compile",
    "profile",
    "report",
    "save_graph",
    "save_pipe",
    "unbind",
    "unload",
    "use",
    "warmup",
]
