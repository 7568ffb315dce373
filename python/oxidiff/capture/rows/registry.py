"""Where rows are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["ROWS", "aten", "row"]

aten = torch.ops.aten

Row = TypeVar("Row", bound=Callable[..., Any])

ROWS: dict[Any, Callable[..., Any]] = {}
"""ATen overload -> row."""


def row(*overloads: str, table: dict[Any, Callable[..., Any]] = ROWS) -> Callable[[Row], Row]:
    """Registers a row for overloads named as in ``"add.Tensor"``; those that this torch does not have are left out."""

    def register(function: Row) -> Row:
        for name in overloads:
            packet, _, overload = name.rpartition(".")
            found = getattr(getattr(aten, packet, None), overload, None)
            if found is not None:
                table[found] = function
        return function

    return register
