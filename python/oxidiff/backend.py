"""`torch.compile(module, backend="oxidiff")`: the parts that Dynamo finds between graph breaks, compiled as modules
are (:mod:`oxidiff.island`), with the same programs, the same fallbacks and the same answer to gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from .island import Island, Turns
from .module import compile_module
from .options import CompileOptions

__all__ = ["oxidiff"]


def oxidiff(
    graph: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: CompileOptions | Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The Dynamo backend: compiles ``graph`` lazily, at its first call.

    Args:
        graph: What Dynamo captured.
        examples: Its arguments at this call.
        options: ``torch.compile(..., options={...})``: fields of :class:`oxidiff.CompileOptions`.
    """
    island = Island(graph, examples)
    compiled = compile_module(island, CompileOptions.of(options))
    turns = Turns()

    def run(*args: Any) -> Any:
        with turns.holding(island, args) as passed:
            return compiled(*passed)

    return cast(Callable[..., Any], run)
