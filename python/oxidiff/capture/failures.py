"""Why a trace fails, where what is done about it is not the same for all :class:`~oxidiff.errors.CaptureError`."""

from __future__ import annotations

from ..errors import CaptureError

__all__ = ["CHANGED", "ChangedError", "DrawnError", "ElsewhereError", "LongerError", "NotFiniteError", "StrangerError"]


CHANGED = "the module was changed while it was being captured"
"""What a :class:`ChangedError` says."""


class ChangedError(CaptureError):
    """Another thread changed the module meanwhile: what was seen of it is of no use."""


class DrawnError(CaptureError):
    """``forward`` looks at numbers that it draws from generators of Python or numpy."""


class ElsewhereError(CaptureError):
    """It is to be captured in the thread of a call: ``forward`` asks for modes or variables that are a call's."""


class StrangerError(CaptureError):
    """``forward`` runs a module that is not reached from its attributes: nobody would notice a change of it."""


class NotFiniteError(CaptureError):
    """A number that ``forward`` reads out of a tensor is not finite, in this call."""


class LongerError(CaptureError):
    """``forward`` does more than at the size that it was traced at first."""
