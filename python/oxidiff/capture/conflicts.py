"""What trials that failed say of others: the op at which they did, and at which sizes it fails.

Of models with many inputs most guesses about sizes are wrong, and most of these for one reason: two lengths that meet in an
op. Where trials ended at one op, what it was given is solved as any sizes are, and the op alone, without all that is before
it, says whether others would get past it. Nothing here has to be right: it decides which guesses are tried, not what a graph
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import ceil, floor
from typing import Any

import torch

from .dim import Dim, Size
from .fit import fit_all
from .graph import Ref, arguments_in, leaves_of
from .meta import META_DEVICE, answered
from .record import Trace, Trail

__all__ = ["Conflict"]

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conflict:
    """An op that cannot be done at some sizes.

    Attributes:
        op: The op.
        tokens: Its arguments, as in a trace.
        numbers: The numbers among them, as expressions.
        operands: For each value among them, its type and sizes.
        least: For each symbol of these, the smallest value that was seen.
        still: What the symbols were that did not move.
    """

    op: Any
    tokens: tuple[Any, ...]
    numbers: tuple[Size | float, ...]
    operands: Mapping[int, tuple[torch.dtype, tuple[Size, ...]]]
    least: Mapping[str, int]
    still: Mapping[str, Any]

    @classmethod
    def of(cls, base: Trace, trails: Sequence[Trail], points: Sequence[Point], given: Iterable[Dim]) -> Conflict | None:
        """The op at which all of these trials ended; ``None`` if what it was given cannot be solved.

        Args:
            base: The trace of the call, which has the op.
            trails: The trials.
            points: The sizes of the call, and of each trial.
            given: See :func:`~oxidiff.capture.fit.fit_all`.
        """
        at = len(trails[0].record.nodes)
        assert all(trail.is_at_op_of(base) and len(trail.record.nodes) == at for trail in trails), "trials of one op"
        ops = [trail.op for trail in trails if trail.op is not None]
        (op, tokens, numbers), start = ops[0], base.starts[at]
        columns = list(zip(base.numbers[:start], *(trail.record.numbers for trail in trails), strict=True))
        own = base.numbers[start : start + len(numbers)]
        arguments = list(zip(own, *(given_numbers for _, _, given_numbers in ops), strict=True))
        whole = [name for name in points[0] if all(type(point[name]) is int for point in points)]
        sizes = [{name: point[name] for name in whole} for point in points]
        solved = fit_all({c for c in (*columns, *arguments) if all(type(v) is int for v in c)}, sizes, given)
        literals = [solved.get(c, number) for c, number in zip(arguments, own, strict=True)]
        results = list(chain.from_iterable(results for _, _, results in base.nodes[:at]))
        operands = {}
        args, kwargs = arguments_in(tokens, iter(numbers))
        for leaf in leaves_of([*args, *kwargs.values()]):
            if isinstance(leaf, Ref):
                dtype, rank = results[leaf.value]
                shape = [solved[columns[base.number_of(leaf.value, d)]] for d in range(rank)]
                operands[leaf.value] = dtype, tuple(shape)
        every = [*literals, *chain.from_iterable(shape for _, shape in operands.values())]
        if not operands or None in every:
            return None
        names = {name for size in every if isinstance(size, Dim) for name in size.symbols()}
        least = {name: min(p[name] for p in sizes) for name in names}
        still = {name: value for name, value in points[0].items() if all(p[name] == value for p in points)}
        return cls(op, tokens, tuple(literals), operands, least, still)  # type: ignore[arg-type]

    def is_at(self, point: Point) -> bool:
        """Whether the op fails at a point, as far as that is known: not for smaller sizes than were seen, which may be those
        that a table is long enough for."""
        if any(point[name] < low for name, low in self.least.items()):
            return False
        if any(point[name] != value for name, value in self.still.items()):
            return False

        # At another residue it is not known whether a length is rounded up or down.
        return self._fails(point, floor) and self._fails(point, ceil)

    def _fails(self, point: Point, rounded: Callable[[Fraction], int]) -> bool:
        def value_of(size: Any) -> Any:
            return rounded(size.exact(point)) if isinstance(size, Dim) else size

        def given(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return [given(item) for item in argument]
            return made[argument.value] if isinstance(argument, Ref) else argument

        shapes = {v: (dtype, [value_of(size) for size in shape]) for v, (dtype, shape) in self.operands.items()}
        if any(size < 0 for _, shape in shapes.values() for size in shape):
            return False
        made = {v: torch.empty(shape, dtype=dtype, device=META_DEVICE) for v, (dtype, shape) in shapes.items()}
        args, kwargs = arguments_in(self.tokens, iter([value_of(number) for number in self.numbers]))
        try:
            answered(self.op, given(args), {name: given(item) for name, item in kwargs.items()})
        except Exception:
            return True
        return False
