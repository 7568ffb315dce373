"""One captured graph, compiled and bound to the module's tensors."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from . import _native
from .capture import CHANGED, CapturedGraph, ChangedError
from .capture.guards import expression_text
from .errors import Error, from_native
from .family import Captured
from .nan_guard import Guarded, Notice
from .store import Body, Row, Tuned

__all__ = ["Part", "Variant"]

Part = tuple["Variant", _native.Executable | Guarded, list[int]]
"""A program of a call, with the weights that it is bound to, and the sizes at which it runs."""


class Variant:
    """One captured graph and, while the module has this structure, the module's weights bound to its program.

    Attributes:
        graph: The graph.
        lowered: The same for the compiler, and how to call what it is compiled to.
        is_own: Whether this module was the one that compiled it, from a graph that was not stored.
        notice: Tells that it goes on in f32, see ``nan_guard``.
    """

    def __init__(self, captured: Captured, is_own: bool, notice: Notice) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.lowered = captured.lowered
        self.is_own = is_own
        self._notice = notice
        self._executable: _native.Executable | Guarded | None = None
        self._tensors: list[Tensor] = []

    def bind(self, tensors: list[Tensor], suspects: Set[int] = frozenset(), since: int = 0) -> bool:
        """Binds weights.

        Args:
            tensors: One per weight slot.
            suspects: Ids of tensors that were written even if torch did not count it.
            since: A ``stamp`` from before that was seen.

        Returns:
            Whether anything was bound anew or will be derived again.

        Raises:
            ChangedError: They do not fit: another thread moved the module once it was looked at.
        """
        try:
            return self._bind(tensors, suspects, since)
        except _native.NativeError as error:
            found = from_native(error)
            raise (ChangedError(CHANGED) if type(found) is Error else found) from error

    def _bind(self, tensors: list[Tensor], suspects: Set[int], since: int) -> bool:
        is_new = self._executable is None
        if self._executable is None:
            if self.captured.may_overflow:
                self._executable = Guarded(self.captured, tensors, self._notice)
            else:
                self._executable = _native.Executable(self.captured.program, tensors)
            if suspects:
                # Another module may still hold what was derived from them before they were written.
                self._executable.set_weights(tensors, suspects, since)
        else:
            is_new = self._executable.set_weights(tensors, suspects, since)
        self._tensors = tensors
        return is_new

    def release(self) -> None:
        """Lets go of the module's tensors and of what was derived from them."""
        self._executable = None
        self._tensors = []

    def unload(self) -> None:
        """Drops specializations, derived weights and idle workspace."""
        executable = self._executable
        if executable is not None:
            executable.unload()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors it is bound to, by slot."""
        return self._tensors

    @property
    def program(self) -> _native.Program:
        """The compiled program, possibly shared with other modules."""
        return self._executable.program if isinstance(self._executable, Guarded) else self.captured.program

    @property
    def is_wide(self) -> bool:
        """Whether f16 overflowed, so that it runs in f32; see ``nan_guard``."""
        return isinstance(self._executable, Guarded) and self._executable.is_wide

    @property
    def executable(self) -> _native.Executable | Guarded:
        """The program with its weights."""
        executable = self._executable
        assert executable is not None, "a variant is bound before it runs"
        return executable

    @property
    def body(self) -> Body:
        """What is stored of it beside the graph."""
        return self.lowered

    @property
    def rows(self) -> list[Row]:
        """The measurements behind its tuning choices."""
        return list(self.captured.tuner.rows.values())

    @property
    def tuned(self) -> list[Tuned]:
        """Where its program was tuned."""
        return list(self.captured.tuner.tuned)

    def stats(self) -> dict[str, Any]:
        """See ``_native.Executable.stats``; empty while nothing is bound."""
        executable = self._executable
        return {} if executable is None else executable.stats()

    def explain(self) -> dict[str, Any]:
        """What it was captured from and compiled to."""
        graph = self.graph
        return {
            "inputs": [f"{item.label}: {_type_text(graph, item.value)}" for item in graph.inputs],
            "outputs": [_type_text(graph, leaf.value) for leaf in graph.outputs.leaves if leaf.value is not None],
            "symbols": {
                **{symbol.name: f"{symbol.label} ({symbol.role})" for symbol in graph.plan.symbols},
                **{p.name: f"{p.of} in units of {p.unit}, rounded up" for p in graph.plan.padded() if p.is_named()},
                **{c.name: str(c) for c in graph.plan.counted},
                **{c.name: expression_text(c.expression) for c in graph.plan.computed},
            },
            "fixed": list(graph.fixed),
            "classes": len(graph.classes),
            "hash": self.program.hash,
            "in_float32": self.is_wide,
            "choices": [_choice_text(row) for row in self.rows],
            **self.program.explain(),
        }


def _choice_text(row: Row) -> str:
    op, bucket, _, _, choice, seconds, default_seconds, *_ = row
    return f"{op}, {bucket}: {choice}, {seconds * 1e3:.3g} ms, {default_seconds * 1e3:.3g} ms untuned"


def _type_text(graph: CapturedGraph, value: int) -> str:
    found = graph.values[value]
    return f"{str(found.dtype).removeprefix('torch.')}[{', '.join(map(str, found.shape))}]"
