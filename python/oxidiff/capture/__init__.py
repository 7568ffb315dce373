"""From a module to a graph: tracing, fitting, lowering.

``capture(module, args, kwargs)`` gives a :class:`CapturedGraph`: ATen ops with sizes as expressions. The way of the data:
:mod:`signature` takes the call apart, :mod:`sizes` guesses its free sizes, :mod:`trace` runs the module on meta tensors and
:mod:`recorder` writes down what it does, :mod:`guards` notes what it asks about sizes, :mod:`fit` solves the numbers,
:mod:`graph` holds the result. :mod:`session` is the way through one capture, :mod:`capturer` what makes them.
"""

from ..errors import CaptureError, UnsupportedError
from .capturer import Capturer, Known, capture
from .dim import Dim
from .failures import CHANGED, ChangedError, DrawnError, ElsewhereError, NotFiniteError
from .following import is_tracing
from .graph import CapturedGraph, GraphInput, Node, OutputLeaf, OutputSpec, Ref, Value
from .leftovers import KeptError, LeftError, SharedError, is_passable, leads_to
from .signature import Binder, Call
from .sizes import SizePlan, Symbol
from .weights import WeightSlot

__all__ = [
    "CHANGED",
    "Binder",
    "Call",
    "CaptureError",
    "CapturedGraph",
    "Capturer",
    "ChangedError",
    "DrawnError",
    "ElsewhereError",
    "KeptError",
    "Known",
    "LeftError",
    "NotFiniteError",
    "SharedError",
    "Dim",
    "GraphInput",
    "Node",
    "OutputLeaf",
    "OutputSpec",
    "Ref",
    "SizePlan",
    "Symbol",
    "UnsupportedError",
    "Value",
    "WeightSlot",
    "capture",
    "is_passable",
    "is_tracing",
    "leads_to",
]
