"""The exceptions of this package: one class per cause, all below :class:`Error`."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BackendError",
    "CacheError",
    "CaptureError",
    "CheckError",
    "Error",
    "OutOfMemoryError",
    "ShapeError",
    "UnsupportedError",
]


class Error(RuntimeError):
    """Base of everything this package raises on its own account."""


class CaptureError(Error):
    """A module cannot be traced into a graph: data-dependent control flow, random ops, side effects.

    ``module`` is the path of the submodule and ``op`` the ATen op where it happened, empty if not known.
    """

    def __init__(self, message: str, *, module: str = "", op: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.op = op


class UnsupportedError(CaptureError):
    """An op, or an argument of an op, that the compiler does not know."""


class ShapeError(Error):
    """Sizes that do not fit the program or each other."""


class BackendError(Error):
    """A device backend is missing something or failed."""


class OutOfMemoryError(Error):
    """Device or host memory did not suffice; the message says how many bytes were asked for."""


class ArtifactError(Error):
    """A saved program is damaged, of another version or of another module."""


class CacheError(Error):
    """The on-disk cache cannot be used."""


class CheckError(Error):
    """A compiled result differs from eager by more than the tolerance."""
