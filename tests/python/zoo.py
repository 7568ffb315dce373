"""Models of the zoo as they are compiled for a GPU, without one: the public ones on the meta device, with a layer or two of
each kind."""

from __future__ import annotations

import torch

from oxidiff import _native, testing
from oxidiff.capture import Capturer
from oxidiff.capture.lowering import LoweredGraph

REPEATED = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_hidden_layers": 2,
    "transformer_layers_per_block": (1, 2, 2),
    "dual_attention_layers": (0,),
}
"""Settings that say how often a layer is repeated."""


def lowered(name: str, dtype: torch.dtype, batch: int = 1) -> tuple[LoweredGraph, list[int]]:
    """A model's graph, and its run-time sizes where the model is called at the size that it is known for."""
    overrides = {key: value for key, value in REPEATED.items() if key in testing.ZOO[name].config}
    with torch.device("meta"):
        module = testing.build(name, tiny=False, dtype=dtype, overrides=overrides)
    inputs = testing.example_inputs(name, batch=batch, tiny=False, dtype=dtype, overrides=overrides)
    capturer = Capturer(module)
    call = capturer.call((), inputs)
    captured, graph = capturer.lowered(call, _native.GraphBuilder)
    point = captured.plan.read(call.sizes)
    assert point is not None, "the graph serves the call that it was captured from"
    return graph, graph.sizes(point)
