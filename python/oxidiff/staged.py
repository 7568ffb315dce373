"""A captured graph some ops of which run in eager PyTorch: programs and ops in turn, at every size the graph serves.

Threads: :meth:`Staged.run` may be called from any; a running call keeps the weights it began with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .autocast import without_autocast
from .capture import CapturedGraph, Dim, Node, WeightSlot
from .capture.graph import draws, number_at, operands
from .capture.lowering import DTYPES
from .capture.signature import Number
from .capture.stages import Stage, sources_of
from .capture.trace import generator_states
from .capture.unread import DRAW
from .errors import UnsupportedError, without_frames
from .store import Row, Tuned

if TYPE_CHECKING:
    from ._native import Executable
    from .nan_guard import Guarded
    from .variant import Variant

__all__ = ["Staged", "drawing_states", "passed_as"]


def drawing_states(has_others: bool = True) -> list[tuple[Callable[[Any], None], Any]]:
    """PyTorch's generators, each as what sets its state and that; also Python's and numpy's."""
    states: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if has_others:
        states += [(put, state) for _, _, put, state in generator_states()]
    return states


def passed_as(value: Any, order: Sequence[int] | None) -> Any:
    """An argument of a program: a number, or a tensor as it lies in memory, complex numbers as pairs of real ones."""
    if order is not None:
        value = value.permute(order)
    return torch.view_as_real(value) if isinstance(value, Tensor) and value.is_complex() else value


@dataclass(frozen=True)
class Bound:
    """What a graph runs with: who holds it can run it when the module has become another.

    Attributes:
        executables: The programs of the stages.
        weights: One mapping, of what eager ops read by value number: the newest for as long as the module is the same.
    """

    executables: Sequence[Executable | Guarded | None]
    weights: Sequence[Mapping[int, Tensor]]


class Staged:
    """One captured graph whose unknown ops run in eager PyTorch, with a variant for what lies between them.

    Attributes:
        graph: The whole graph.
        stages: Its stages, each with its variant, ``None`` where only eager ops are left.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        stages: Sequence[Stage],
        variants: Sequence[Variant | None],
        device: torch.device | None = None,
    ) -> None:
        self.graph = graph
        self._device = device
        self.stages = list(zip(stages, variants, strict=True))
        self._draws = any(draws(op.node.op) for stage in stages for op in stage.eager)
        self._draws_others = any(op.node.op is DRAW for stage in stages for op in stage.eager)
        self._sources = sources_of(graph, stages)
        for stage in stages:
            for op in stage.eager:
                without_frames(op.error)
        self._weights: list[Mapping[int, Tensor]] = [{}]
        """One mapping, the newest, by value: who runs keeps the list, also when the module has become another."""

    @property
    def variants(self) -> list[Variant]:
        """The variants of its stages."""
        return [variant for _, variant in self.stages if variant is not None]

    @property
    def body(self) -> list[Stage]:
        """Its stages, for storing them."""
        return [stage for stage, _ in self.stages]

    @property
    def rows(self) -> list[Row]:
        """The measurements behind its tuning choices."""
        return [row for variant in self.variants for row in variant.rows]

    @property
    def tuned(self) -> list[Tuned]:
        """Where its programs were tuned."""
        return [item for variant in self.variants for item in variant.tuned]

    def bind(self, fetch: Callable[[WeightSlot], Tensor]) -> None:
        """Takes the weights that eager ops read from where ``fetch`` finds them."""
        slots = {v: self.graph.weights[node.args[0]] for v, node in self._sources.items() if node.op == "weight"}
        self._weights[0] = {value: fetch(slot) for value, slot in slots.items()}

    def release(self) -> None:
        """Lets go of these weights; calls that run have them still."""
        self._weights = [{}]

    @property
    def problems(self) -> list[UnsupportedError]:
        """Why ops run eager: one reason per kind of op, at its first place. What follows from another op is not told."""
        errors = []
        for stage, _ in self.stages:
            made = {value for op in stage.eager for value in op.node.outputs}
            errors += [op.error for op in stage.eager if made.isdisjoint(operands(op.node))]
        first = {error.op: error for error in reversed(errors)}
        counts = Counter(error.op for error in errors)
        return [
            error
            if counts[op] == 1
            else UnsupportedError(f"{error}; the same at {counts[op] - 1} other places", module=error.module, op=op)
            for op, error in first.items()
        ]

    def bound(self) -> Bound:
        """Its programs and eager ops with their weights."""
        return Bound([None if variant is None else variant.executable for _, variant in self.stages], self._weights)

    @without_autocast
    def run(
        self,
        bound: Bound,
        arguments: Sequence[Tensor],
        numbers: Mapping[int, Number],
        point: Mapping[str, Number],
        steps: list[dict[str, Any]] | None = None,
    ) -> list[Tensor]:
        """The tensors that the graph returns.

        Args:
            bound: What :meth:`bound` gave.
            arguments: The call's tensors.
            numbers: The call's Python numbers, by index.
            point: The call's free sizes and numbers.
            steps: Gets a row per step, timed.
        """
        if not self._draws:
            return self._run(bound, arguments, numbers, point, steps)
        states = drawing_states(self._draws_others)
        try:
            return self._run(bound, arguments, numbers, point, steps)
        except BaseException:
            # Eager, which runs then, draws what was drawn.
            for put, state in states:
                put(state)
            raise

    def _run(
        self,
        bound: Bound,
        arguments: Sequence[Tensor],
        numbers: Mapping[int, Number],
        point: Mapping[str, Number],
        steps: list[dict[str, Any]] | None,
    ) -> list[Tensor]:
        values = {item.value: tensor for item, tensor in zip(self.graph.inputs, arguments, strict=True)}
        weights = bound.weights[0]
        values |= weights
        values |= {v: self._made(v, n, point) for v, n in self._sources.items() if n.op != "weight"}
        for (stage, variant), executable in zip(self.stages, bound.executables, strict=True):
            if variant is not None and executable is not None:
                given: list[Any] = []
                for source in variant.lowered.arguments:
                    value: Any = numbers[source.index] if source.is_number else values[stage.inputs[source.index]]
                    given.append(passed_as(value, source.order))
                sizes = variant.lowered.sizes(point)
                values.update(zip(stage.outputs, executable.run(given, sizes), strict=True))
                if steps is not None:
                    steps += executable.profile(given, sizes)
            for op in stage.eager:
                started = time.perf_counter()
                op.run(values, point, self._device)
                if steps is not None:
                    seconds = time.perf_counter() - started
                    row = {"step": str(op.node.op), "kernel": "eager", "module": op.node.path, "seconds": seconds}
                    made = [self.graph.values[v].dtype for v in op.node.outputs]
                    dtype = DTYPES.get(made[0], str(made[0])) if made else ""
                    steps.append({**row, "dtype": dtype, "flops": 0, "work": 0, "bytes": 0})
            for value_id in stage.dead:
                values.pop(value_id, None)
        return self._results(values, [*arguments, *weights.values()])

    def _results(self, values: Mapping[int, Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """What the graph returns: what ``forward`` copied is nobody else's."""
        taken = {tensor.untyped_storage()._cdata for tensor in others}
        results: list[Tensor] = []
        for leaf in self.graph.outputs.leaves:
            if leaf.value is None:
                continue
            tensor = values[leaf.value]
            is_another = tensor.untyped_storage()._cdata in taken or any(tensor is other for other in results)
            if leaf.input is None and is_another:
                tensor = tensor.permute(leaf.order).clone(memory_format=torch.contiguous_format)
            elif (order := leaf.laid()) is not None:
                tensor = tensor.permute(order).contiguous()
            results.append(tensor)
        return results

    def _made(self, value: int, node: Node, point: Mapping[str, Number]) -> Tensor:
        """A tensor that ``forward`` makes or finds."""
        if node.op == "extern":
            index: int = node.args[0]
            return self.graph.externs[index]
        meta = self.graph.values[value]
        elements = [number_at(e, point) if isinstance(e, Dim) else e for e in node.args]
        made = torch.tensor(elements, dtype=meta.dtype, device=self._device)
        return made.reshape([int(size) for size in meta.shape])  # type: ignore[arg-type]
