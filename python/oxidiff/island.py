"""A graph from Dynamo as a module that can be compiled like any other.

Dynamo hands over an FX graph whose parameters are arguments and whose run-time sizes are ints. Both are undone here:
parameters are put back into a module (:class:`Island`), so that they are weights, and sizes are read off the tensors
that have them, so that they vary together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["Island", "Turns", "reset_turns"]


class Island(nn.Module):
    """One FX graph from Dynamo, with the tensors that do not change from call to call as its own.

    Args:
        graph: The graph module.
        examples: Its arguments at the first call.
    """

    def __init__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        super().__init__()
        # Generated at its first call otherwise, which is an attribute changed in a `forward` that is being captured.
        _LazyGraphModule.force_recompile(graph)  # type: ignore[no-untyped-call]
        self.graph = graph
        # The graph was captured for whichever mode its module was in; only this class's own flag is meaningless.
        self.training = False
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._names: dict[int, str] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._floats: set[int] = set()
        sizes = _sizes_by_symbol(nodes)
        for i, (node, example) in enumerate(zip(nodes, examples, strict=True)):
            if isinstance(example, nn.Parameter) or getattr(example, "_dynamo_static_input_type", None):
                self._names[i] = f"weight{i}"
                self._parameters[f"weight{i}"] = None
            elif _is_float(node):
                self._floats.add(i)
            elif not isinstance(example, Tensor) and (source := sizes.get(_symbol(node))) is not None:
                self._sizes[i] = source
        self._passed = [i for i in range(len(nodes)) if i not in self._names and i not in self._sizes]
        self._weights: list[Any] = [None] * len(self._names)
        self.count = len(nodes)

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the weights among the arguments of a call are those that it holds."""
        return all(map(is_, [args[i] for i in self._names], self._weights))

    def take_weights(self, args: Sequence[Any]) -> None:
        """Holds the weights among the arguments of a call."""
        held = [args[i] for i in self._names]
        for name, tensor in zip(self._names.values(), held, strict=True):
            self._parameters[name] = tensor
        self._weights = held

    def passed(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of a call but for weights and sizes."""
        return [args[i].item() if i in self._floats else args[i] for i in self._passed]

    def forward(self, *passed: Any) -> Any:
        """Calls the graph with the weights and sizes put in."""
        args: list[Any] = [None] * self.count
        for i, value in zip(self._passed, passed, strict=True):
            args[i] = _Float(value) if i in self._floats else value
        for i, name in self._names.items():
            args[i] = self._parameters[name]
        for i, (source, dim) in self._sizes.items():
            args[i] = args[source].shape[dim]
        # Not called as a module: what it raises at sizes that are only tried, it would print.
        return self.graph.forward(*args)


class Turns:
    """Who runs an island. Dynamo has one graph for all modules of a class: calls with the same weights run side by side,
    those with others when these are done.

    It is no part of the island, whose attributes are watched.
    """

    def __init__(self) -> None:
        self._turns: threading.Condition
        """Held by who looks at the weights or exchanges them."""
        self._running: weakref.WeakSet[_Running]
        self._waiting = 0
        """Calls that wait for others to be done."""
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Nobody runs: after a fork, in the child, which has none of the other threads."""
        self._turns, self._running, self._waiting = threading.Condition(), weakref.WeakSet(), 0

    @contextmanager
    def holding(self, island: Island, args: Sequence[Any]) -> Iterator[list[Any]]:
        """Has the island hold the weights among the arguments of a call for as long as it runs; gives the arguments that are
        left."""
        call = _Running()
        try:
            with self._turns:
                if self._waiting:
                    # Who needs other weights would wait for ever where there is always somebody with these.
                    self._turns.wait(_LOOK_AGAIN_S)
                while not island.holds(args):
                    if self._running:
                        self._wait()
                    else:
                        island.take_weights(args)
                self._running.add(call)
            yield island.passed(args)
        finally:
            with self._turns:
                self._running.discard(call)
                self._turns.notify_all()

    def _wait(self) -> None:
        """Waits for a call to be done; not without an end: one that was interrupted goes without a word, with its frame."""
        self._waiting += 1
        try:
            self._turns.wait(_LOOK_AGAIN_S)
        finally:
            self._waiting -= 1


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def reset_turns() -> None:
    """After a fork, in the child."""
    for turns in list(_all):
        turns.reset()


_LOOK_AGAIN_S = 0.05


class _Running:
    """A call that runs."""


class _Float:
    """A Python float that Dynamo passes as a 0-d tensor, of which the graph only asks for the number."""

    def __init__(self, value: float) -> None:
        self._value = value

    def item(self) -> float:
        """The number."""
        return self._value


def _is_float(node: torch.fx.Node) -> bool:
    """Whether an argument of the graph is a float in a tensor's clothes."""
    value = node.meta.get("example_value")
    is_scalar = isinstance(value, Tensor) and value.dim() == 0 and value.dtype is torch.float64
    return is_scalar and all(user.op == "call_method" and user.target == "item" for user in node.users)


def _symbol(node: torch.fx.Node) -> str | None:
    """The name of the size that an argument of the graph is, ``None`` if it is none."""
    value = node.meta.get("example_value")
    return str(value.node.expr) if isinstance(value, torch.SymInt) else None


def _sizes_by_symbol(nodes: Sequence[torch.fx.Node]) -> Mapping[str | None, tuple[int, int]]:
    """For each symbolic size, an argument and a dimension that has it."""
    found: dict[str | None, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if isinstance(value, Tensor):
            sizes: tuple[Any, ...] = tuple(value.shape)
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt):
                    found.setdefault(str(size.node.expr), (i, dim))
    return found
