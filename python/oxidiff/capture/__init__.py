"""From a module to a graph: tracing, fitting, lowering.

``capture(module, args, kwargs)`` gives a :class:`CapturedGraph`: ATen ops with sizes as expressions. The way of the data:
:mod:`signature` takes the call apart, :mod:`sizes` guesses its free sizes, :mod:`trace` runs the module on meta tensors,
:mod:`guards` notes what it asks about sizes, :mod:`fit` solves the numbers, :mod:`graph` holds the result.
"""

from ..errors import CaptureError, UnsupportedError
from .capturer import Capturer, capture
from .dim import Dim
from .graph import CapturedGraph, GraphInput, Node, OutputLeaf, OutputSpec, Ref, Value
from .signature import Binder, Call
from .sizes import SizePlan, Symbol
from .trace import CHANGED, ChangedError, KeptError, LeftError, NotFiniteError, is_tracing, leads_to
from .weights import WeightSlot

__all__ = [
    "CHANGED",
    "Binder",
    "Call",
    "CaptureError",
    "CapturedGraph",
    "Capturer",
    "ChangedError",
    "KeptError",
    "LeftError",
    "NotFiniteError",
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
    "is_tracing",
    "leads_to",
]
