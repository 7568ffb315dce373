"""The table of supported ATen ops: one row per overload, grouped by family in :mod:`oxidiff.capture.rows`.

A row is a function ``row(cx, *arguments)``: the lowering context and the overload's arguments in the order of its schema,
defaults filled in. It returns a :class:`~oxidiff.capture.lowering.T` per result. Ops that read or make complex numbers
have rows of their own (:mod:`oxidiff.capture.rows.complex`), as have those that read or make floats of 8 bits
(:mod:`oxidiff.capture.rows.bits`).
"""

from __future__ import annotations

from .rows import bits, contraction, creation, indexing, movement, norm, pointwise, reduction, resample
from .rows.bits import FLOAT8_ROWS
from .rows.complex import COMPLEX_ROWS
from .rows.registry import ROWS

__all__ = ["COMPLEX_ROWS", "FAMILIES", "FLOAT8_ROWS", "ROWS"]

FAMILIES = (pointwise, movement, bits, creation, indexing, reduction, contraction, norm, resample)
"""The modules that hold the rows."""
