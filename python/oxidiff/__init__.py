"""oxidiff: a drop-in compile backend for PyTorch diffusion models.

    pipe.unet = oxidiff.compile(pipe.unet)

is all that is needed; :func:`compile_pipe` does it for every part of a diffusers pipeline. What a module gained, and
what it could not compile and why, is in :func:`report` and :func:`explain`.
"""

from . import _native
from .api import eager, explain, profile, report, unload, warmup
from .errors import (
    ArtifactError,
    BackendError,
    CacheError,
    CaptureError,
    CheckError,
    Error,
    FallbackWarning,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from .module import CompiledFunction, CompiledModule, compile
from .options import CompileOptions
from .pipelines import compile_pipe
from .report import Explanation, Profile, Report

oneflow_compile = compile
"""OneDiff's name of :func:`compile`."""

__version__ = _native.__version__

__all__ = [
    "ArtifactError",
    "BackendError",
    "CacheError",
    "CaptureError",
    "CheckError",
    "CompileOptions",
    "CompiledFunction",
    "CompiledModule",
    "Error",
    "Explanation",
    "FallbackWarning",
    "OutOfMemoryError",
    "Profile",
    "Report",
    "ShapeError",
    "UnsupportedError",
    "compile",
    "compile_pipe",
    "eager",
    "explain",
    "oneflow_compile",
    "profile",
    "report",
    "unload",
    "warmup",
]
