"""What one run of a module did, made for comparing.

Everything that must agree between two sizes is in :attr:`Trace.nodes`, a list that is compared with ``==``; everything
that may depend on the size is in :attr:`Trace.numbers`, one flat list.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from .guards import Ledger
from .signature import Place
from .weights import WeightSlot

__all__ = [
    "Again", "CLOSE", "FALSE", "FLOAT", "GRADIENTS", "INT", "Keyword", "MEMORY", "NONE", "OPEN", "SPEC", "STRIDES", "TRUE",
    "Trace", "Trail", "WRITES", "first_of",
]  # fmt: skip


class _Token:
    """A mark in a node's argument list."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


INT = _Token("int")
FLOAT = _Token("float")
TRUE = _Token("true")
FALSE = _Token("false")
NONE = _Token("none")
OPEN = _Token("[")
CLOSE = _Token("]")


class Keyword(str):
    """The name of a keyword argument; the argument's tokens follow."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Again:
    """A result that is the very tensor that an earlier leaf of the results is, by the number of that."""

    leaf: int


WRITES = Keyword("writes")
SPEC = Keyword("spec")
"""How results are put together, as text."""

STRIDES, MEMORY, GRADIENTS = 1, 2, 4
"""What a program may ask of an argument: its strides, where it starts in which memory, whether gradients lead to it. Some of
these together are their sum."""

Node = tuple[Any, tuple[Any, ...], tuple[tuple[torch.dtype, int], ...]]
"""``(op, argument tokens, (dtype, rank) of each result)``.

The op is an ATen overload, or one of ``"input"``, ``"weight"``, ``"constant"``, ``"extern"``, ``"read"``, ``"sized"``,
``"output"``. An int token is the number of a value; values are numbered in the order in which nodes produce them.
"""


@dataclass(slots=True)
class Trace:
    """What one run of a module did.

    Attributes:
        nodes: The structure. Two runs are isomorphic if these lists are equal.
        numbers: Every integer and float of the arguments, and every result's sizes, in order.
        starts: For each node, where its numbers start in ``numbers``.
        paths: For each node, the path of the submodule that was running.
        weights: The tensors of the ``"weight"`` nodes, by name.
        externs: The data of the ``"extern"`` nodes: real tensors that no module holds.
        output_spec: How results are put together, in torch's pytree form.
        output_orders: For each tensor returned, its dimensions from the outermost in memory to the innermost.
        is_copied: For each tensor returned, whether it is another one than all arguments, though it may equal one.
        written: The values that arguments which it wrote into have at its end, and their numbers among the arguments.
        ledger: What the program asked about sizes on its way.
        asked: What the program asked of arguments (by number) that programs are not told, as :data:`STRIDES` and others.
        is_sized: Whether it read values of tensors that follow from sizes alone: numbers like those that it computes.
    """

    nodes: list[Node] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    weights: dict[str, WeightSlot] = field(default_factory=dict)
    externs: list[Tensor] = field(default_factory=list)
    output_spec: TreeSpec | None = None
    output_orders: list[tuple[int, ...]] = field(default_factory=list)
    is_copied: list[bool] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    asked: dict[int, int] = field(default_factory=dict)
    is_sized: bool = False
    _shapes: list[int] = field(default_factory=list)

    def is_as(self, other: Trace) -> bool:
        """Whether another run, of the same arguments, did the same."""
        mine, theirs = (
            (
                one.nodes,
                one.numbers,
                one.paths,
                one.output_orders,
                one.output_spec,
                [*one.weights],
                [*map(id, one.externs)],
            )
            for one in (self, other)
        )
        return mine == theirs

    def is_exactly(self, other: Trace) -> bool:
        """Whether the run of another state of a module, of the same arguments, put the same together, types and all: what is
        equal need not be the same, as 1 and True are."""
        mine, theirs = ((one.nodes, one.output_orders, one.is_copied) for one in (self, other))
        specs = self.output_spec, other.output_spec
        # Of what results are put together, texts tell types that are equal.
        return specs[0] == specs[1] and repr(specs[0]) == repr(specs[1]) and _is_identical(mine, theirs)

    def share(self, other: Trace) -> None:
        """Lets the two have what is equal in their structure in memory once."""
        pairs = zip(self.nodes, other.nodes, strict=False)
        self.nodes[: len(other.nodes)] = [theirs if mine == theirs else mine for mine, theirs in pairs]
        if self.paths == other.paths:
            self.paths = other.paths
        if self.starts == other.starts:
            self.starts = other.starts

    def places(self) -> tuple[Place, ...]:
        """Where the program writes into lists and dictionaries that it is given."""
        tokens = self.nodes[-1][1]
        found: tuple[Place, ...] = ast.literal_eval(tokens[-1]) if WRITES in tokens[-2:-1] else ()
        return found

    def number_of(self, value: int, dim: int) -> int:
        """Where in :attr:`numbers` a dimension of a value is."""
        if not self._shapes:
            for i, (_, _, results) in enumerate(self.nodes):
                at = self.end_of(i) - sum(rank for _, rank in results)
                for _, rank in results:
                    self._shapes.append(at)
                    at += rank
        return self._shapes[value] + dim

    def end_of(self, node: int) -> int:
        """Where the numbers of a node end in :attr:`numbers`."""
        return self.starts[node + 1] if node + 1 < len(self.starts) else len(self.numbers)

    def difference(self, other: Trace) -> str | None:
        """Where the structure of ``other`` first differs, ``None`` if the two are isomorphic."""
        if self.nodes == other.nodes:
            # Data made in forward is as many numbers as it has elements.
            # A stored trace has none; there the graph's own forms show it.
            if self.starts and (self.starts != other.starts or len(self.numbers) != len(other.numbers)):
                return "a constant made in forward has a length that depends on the sizes"
            for a, b in zip(self.externs, other.externs, strict=True):
                if a is not b and not (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)):
                    return "a constant made in forward depends on the sizes"
            return None
        for i, (a_node, b_node) in enumerate(zip(self.nodes, other.nodes, strict=False)):
            if a_node != b_node:
                return f"node {i} ({self.paths[i] or 'the module'}): {a_node[0]} and {b_node[0]}"
        return f"{len(self.nodes)} and {len(other.nodes)} nodes"


@dataclass(frozen=True, slots=True)
class Trail:
    """How far a run came.

    Attributes:
        record: What it did until it failed, or all of it if it is of another program.
        op: The op at which it failed, with its tokens and numbers; ``None`` if it was at none.
        is_whole: Whether it did not fail.
    """

    record: Trace
    op: tuple[Any, tuple[Any, ...], tuple[int | float, ...]] | None = None
    is_whole: bool = False

    def is_at_op_of(self, base: Trace) -> bool:
        """Whether it did what another run did, and failed at the op that came next there."""
        at = len(self.record.nodes)
        is_there = self.op is not None and at < len(base.nodes) and self.op[:2] == base.nodes[at][:2]
        return is_there and self.record.nodes == base.nodes[:at] and self.record.starts == base.starts[:at]


def _is_identical(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_identical, one, other))
    return type(one) is type(other) and bool(one == other)


def first_of(value: int, makers: Sequence[int]) -> int:
    """The first result of the node that makes a value; ``makers`` has the number of the node of each."""
    first = value
    while first and makers[first - 1] == makers[value]:
        first -= 1
    return first
