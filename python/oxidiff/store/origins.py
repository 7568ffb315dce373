"""Whose files, classes and modules are: the platform's, an installed package's, or a program's own."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from importlib.machinery import PathFinder

import numpy
import torch

from ..errors import is_interrupt

__all__ = [
    "CLOSED",
    "PACKAGES",
    "UNDESCRIBED",
    "file_of",
    "is_of_platform",
    "is_own",
    "is_own_module",
    "is_platform",
    "is_platform_module",
    "undescribed",
]

UNDESCRIBED = (AttributeError, ImportError, LookupError, OSError, RecursionError, RuntimeError, TypeError, ValueError)
"""What is raised where something cannot be described."""


@contextlib.contextmanager
def undescribed() -> Iterator[None]:
    """Passes over what cannot be described."""
    try:
        yield
    except UNDESCRIBED as error:
        if is_interrupt(error):
            raise


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Parts of the platform, and this package: described by versions. A package installed in a folder below one of them is
# none of them.
_PLATFORM = tuple(
    {
        os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
        os.path.dirname(os.path.abspath(numpy.__file__)) + os.sep,
        os.path.abspath(sysconfig.get_path("stdlib")) + os.sep,
    }
)


def _has_packages(folder: str) -> bool:
    """Whether packages are installed in a folder, as ``pip install --target`` does, and the program is not there, too."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if os.path.abspath(folder) in (os.getcwd(), os.path.dirname(os.path.abspath(main))):
        return False
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


PACKAGES = tuple(
    {os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")}
    | {os.path.abspath(folder) + os.sep for folder in sys.path if folder and _has_packages(folder)}
)
CLOSED = tuple(
    f"{folder}{name}{os.sep}"
    for folder in PACKAGES
    for name in ("PIL", "einops", "einx", "huggingface_hub", "jinja2", "mpmath", "networkx", "scipy", "sympy", "tqdm")
)
"""Packages that other packages are made with, of much code that decides nothing: their versions say enough."""
_NAMES_OF_PLATFORM = frozenset({"torch", "numpy", *sys.stdlib_module_names, *sys.builtin_module_names})
_TORCH_AND_NUMPY = tuple(p for p in _PLATFORM if os.path.basename(p[:-1]) in ("torch", "numpy"))


@functools.cache
def is_platform(file: str) -> bool:
    """Whether a file is one of Python's, torch's or numpy's, or of this package."""
    if file.startswith((*_TORCH_AND_NUMPY, _OWN)):
        return True
    if file.startswith(PACKAGES):
        return False
    return file.startswith(_PLATFORM) or file.startswith("<frozen")


def is_of_platform(kind: type) -> bool:
    """Whether a class is one of Python's, torch's or numpy's."""
    module = sys.modules.get(kind.__module__)
    return _is_platform_name(kind.__module__) if module is None else is_platform_module(module)


def is_own(kind: type) -> bool:
    """Whether a class is a program's own, and neither of the platform nor of an installed package."""
    module = sys.modules.get(kind.__module__)
    return not is_of_platform(kind) and (module is None or is_own_module(module))


def is_own_module(module: types.ModuleType) -> bool:
    """Whether a module is a program's own, and neither of the platform nor of an installed package."""
    file = module.__dict__.get("__file__") or ""
    return not (is_platform_module(module) or file.startswith(PACKAGES))


def is_platform_module(module: types.ModuleType) -> bool:
    """Whether a module is one of Python's, torch's or numpy's, or of this package."""
    # Without a file are modules that are built in, parts of extensions, notebooks and folders without an `__init__.py`.
    file = module.__dict__.get("__file__")
    return is_platform(file) if isinstance(file, str) else _is_platform_name(module.__name__)


def _is_platform_name(name: str) -> bool:
    return name != "__main__" and name.partition(".")[0] in _NAMES_OF_PLATFORM


def file_of(name: str) -> str | None:
    """The file of a module that is not imported yet, without importing what it is in."""
    parts, path, spec = name.split("."), None, None
    for i in range(len(parts)):
        with undescribed():
            spec = PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return origin if origin is not None and os.path.isfile(origin) else None
