"""The result of capturing: one graph of ATen ops whose sizes are expressions of the call's free sizes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from .dim import Dim, Real, Size
from .guards import Guard, symbols_of, value_at
from .parts import Left, Step, narrowed, steps_at
from .points import ranks_of
from .record import CLOSE, FALSE, FLOAT, INT, NONE, OPEN, TRUE, Again, Keyword, Trace
from .signature import Call, Number, Place, Question
from .sizes import SizePlan
from .weights import WeightSlot
from .writes import is_as

__all__ = ["CapturedGraph", "GraphInput", "Literal", "Node", "OutputLeaf", "OutputSpec", "Read", "Ref", "Value"]

Literal = Dim | int | float
"""A number in a graph; a :class:`Dim` where it depends on the call's free sizes or numbers."""

Cut = tuple[Any, Any, Any, Any, Any]
"""A slice: its start, end and step, the size that it is of and its own, each a number of a graph or ``None``."""

_LENGTHS = ("spatial", "frames", "sequence")
_MOVED = "moved"
"""Marks a number in an attribute at which the module itself was traced again, after it was changed."""


def children_of(spec: TreeSpec) -> list[TreeSpec]:
    """The parts of a structure of results; torch before 2.10 has no method for them."""
    if hasattr(spec, "children"):
        return list(spec.children())
    return list(spec.children_specs)


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument of a node: the value of that number."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """What a node produces.

    Attributes:
        dtype: Its element type.
        shape: Its sizes.
        node: The number of the node that makes it.
    """

    dtype: torch.dtype
    shape: tuple[Size, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Node:
    """One op.

    ``args`` and ``kwargs`` hold :class:`Ref`, :data:`Literal`, bools, strings, dtypes, ``None`` and tuples of these, as in
    the overload's schema, trailing defaults left out, devices and memory formats too.

    Attributes:
        op: The ATen overload; or ``"input"``; ``"weight"`` (``args[0]``: its name); ``"constant"`` (``args``: the elements);
            ``"extern"`` (``args[0]``: index into :attr:`CapturedGraph.externs`).
        args: Positional arguments.
        kwargs: Keyword arguments.
        outputs: The values it makes.
        path: The submodule in whose ``forward`` it was called, ``""`` for the module itself.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    path: str


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor argument of the call.

    Attributes:
        label: The argument's name, with ``[i]`` and ``.key`` for what is inside of one.
        value: The value it is in the graph.
        asked: What the program asks of it and was told of a copy without gaps to which no gradients lead, see
            :attr:`~oxidiff.capture.record.Trace.asked`. It is another program where that is not true of a call's own.
    """

    label: str
    value: int
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """What ``forward`` reads out of tensors before the graph runs; see :mod:`~oxidiff.capture.reads`.

    Attributes:
        question: What it wants to know, and of how large a tensor in the captured call.
        operands: The values it is read from.
        prelude: The ops that lead to these and to no earlier ones, in an order in which they can run. A ``"constant"`` has
            its dtype and its shape before its elements.
        value: The value that the answer is in the graph, if it is a tensor.
    """

    question: Question
    operands: tuple[int, ...]
    prelude: tuple[Node, ...]
    value: int | None


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A leaf of what ``forward`` returns: a tensor (``value``), or else a number or another constant (``literal``).

    Attributes:
        value: The value returned, ``None`` if no tensor.
        literal: The number, string, flag, dtype or ``None`` returned, or which leaf before it is the same tensor.
        order: The tensor's dimensions from the outermost in memory to the innermost.
        input: The index of the tensor argument if that is returned as it is.
        is_part: Whether it is a view of a tensor argument: who writes into the one writes into the other.
        steps: The way to the part of a tensor argument that it is written into, where it is no whole one.
    """

    value: int | None = None
    literal: Any = None
    order: tuple[int, ...] = ()
    input: int | None = None
    is_part: bool = False
    steps: tuple[Step, ...] = ()

    def laid(self) -> tuple[int, ...] | None:
        """The order of the dimensions in the program's tensor, which has no gaps; ``None`` if that is row-major."""
        is_usual = self.input is not None or self.order == tuple(range(len(self.order)))
        return None if is_usual else self.order


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How the results are put together. Where the program writes into lists and dictionaries that it is given, the result is
    a pair: what ``forward`` returns, and a tuple of what it leaves at these places."""

    leaves: tuple[OutputLeaf, ...]
    spec: TreeSpec
    writes: tuple[Place, ...] = ()

    def build(self, tensors: Sequence[Tensor], point: Mapping[str, Number]) -> Any:
        """What ``forward`` returns, from its tensors (one per leaf that has a value, in order)."""
        rest = iter(tensors)
        built: list[Any] = []
        for leaf in self.leaves:
            if leaf.value is not None:
                tensor = next(rest)
                built.append(Left(tensor, steps_at(leaf.steps, point)) if leaf.steps else tensor)
            elif type(leaf.literal) is Again:
                built.append(built[leaf.literal.leaf])
            else:
                built.append(_literal(leaf.literal, point))
        return tree_unflatten(built, self.spec)


def _bounds_in(way: Iterable[tuple[Guard, bool]]) -> dict[Any, set[Any]]:
    """The numbers that one thing is compared with, by what that is."""
    found: dict[Any, set[Any]] = {}
    for guard, outcome in way:
        left, right = guard.left, guard.right
        if guard.relation == "eq" and outcome:
            # A number that left is itself.
            continue
        if isinstance(left, Dim) and right == 0:
            bound = next((c for monomial, c in left.terms if not monomial), 0)
            left, right = left + Dim.constant(-bound), bound
        if isinstance(left, int | float):
            left, right = right, left
        if isinstance(right, int | float | Fraction):
            found.setdefault((guard.relation, left, guard.left is left), set()).add(right)
    return found


def _sign(one: Any, other: Any) -> int:
    return int(one > other) - int(one < other)


def _literal(literal: Any, point: Mapping[str, Number]) -> Any:
    return number_at(literal, point) if isinstance(literal, Dim) else literal


def number_at(form: Dim, point: Mapping[str, Any]) -> Number:
    """The value of a form whose symbols may be floats: an int where it is whole and all symbols are ints."""
    from fractions import Fraction

    value = form.exact({name: Fraction(point[name]) for name in form.symbols()})
    if (
        not isinstance(form, Real)
        and all(isinstance(point[name], int) for name in form.symbols())
        and value.denominator == 1
    ):
        return value.numerator
    return float(value)


@dataclass(slots=True)
class CapturedGraph:
    """A module's program for one call structure, at every size of its validity classes.

    Attributes:
        key: The structure of the calls it serves (:attr:`~oxidiff.capture.signature.Call.key`).
        plan: How the free sizes are read from a call.
        inputs: The tensor arguments, in the order of :attr:`~oxidiff.capture.signature.Call.tensors`.
        nodes: The ops, in an order in which they can run.
        values: What the nodes produce.
        weights: The tensors of ``"weight"`` nodes by name.
        externs: The tensors of ``"extern"`` nodes: made or found in ``forward``, held by no module.
        outputs: What is returned.
        moduli: Per symbol, the modulus whose residue decides the class.
        classes: The validity classes that were checked.
        marks: The special values, symbol by symbol, that were checked.
        box: Per bounded symbol, the smallest and the largest value that was checked; also per float that ``forward`` took
            where it could not be followed.
        points: The values of the free sizes at which it was traced and found right.
        ways: The ways through ``forward`` that were traced and found right: what was asked of sizes, and the outcomes.
        lone: Those of them that were traced at one point only, and that point; of a graph that is loaded not known.
        solved: What numbers that ``forward`` computes are in the graph, where that is not what they are by computing.
        conditions: What its program takes for granted about sizes and no trace asks: on which side of an end a slice ends.
        cuts: What it takes slices for, also those that are no part of it but for their sizes.
        parts: Sizes of several symbols that are whole at some points of a class only, once they were looked for.
        traces: How many traces were taken for it.
        fixed: Labels of sizes and numbers that were found to select the program, and so are constants of it.
        template: The trace at the first call, for comparing.
        forms: What each of the trace's numbers is.
        plain_key: The structure of the calls as they are made, where the graph takes answers as further arguments.
        reads: How these are found.
        asks_sizes: Whether what follows from sizes alone is among them.
    """

    key: tuple[Any, ...]
    plan: SizePlan
    inputs: list[GraphInput]
    nodes: list[Node]
    values: list[Value]
    weights: dict[str, WeightSlot]
    externs: list[Tensor]
    outputs: OutputSpec
    moduli: dict[str, int]
    template: Trace
    forms: list[Literal]
    classes: set[tuple[int, ...]] = field(default_factory=set)
    marks: set[tuple[str, Any]] = field(default_factory=set)
    box: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    points: list[dict[str, Number]] = field(default_factory=list)
    ways: set[frozenset[tuple[Guard, bool]]] = field(default_factory=set)
    lone: dict[frozenset[tuple[Guard, bool]], dict[str, Number]] = field(default_factory=dict)
    solved: dict[Any, Literal] = field(default_factory=dict)
    conditions: set[tuple[Guard, bool]] = field(default_factory=set)
    cuts: frozenset[Cut] = frozenset()
    parts: list[Dim] | None = None
    traces: int = 0
    fixed: tuple[str, ...] = ()
    plain_key: tuple[Any, ...] = ()
    reads: tuple[Read, ...] = ()
    asks_sizes: bool = False
    # Found from so many ways; a copy of the graph may have others.
    _asked: tuple[int, bool] = field(default=(0, False), init=False, repr=False, compare=False)

    @property
    def call_key(self) -> tuple[Any, ...]:
        """The structure of the calls it serves, as they are made."""
        return self.plain_key or self.key

    def unchecked(self) -> CapturedGraph:
        """The same graph, of which it is not known where it is right: for a module that may compute something else."""
        plan = copy.copy(self.plan)
        fresh: dict[str, Any] = {"classes": set(), "marks": set(), "box": {}, "points": [], "ways": set(), "lone": {}}
        return dataclasses.replace(
            self,
            plan=plan,
            inputs=[*self.inputs],
            solved=self.solved.copy(),
            conditions=self.conditions.copy(),
            traces=0,
            **fresh,
        )

    def class_of(self, point: Mapping[str, Any]) -> tuple[int, ...]:
        """The validity class of a point: the residues of its sizes, and of Python ints that are divided, and the order of
        the ints if it matters."""
        residues = (
            int(point[s.name]) % self.moduli[s.name]
            for s in self.plan.symbols
            if not s.is_number or (s.role == "int" and self.moduli[s.name] > 1)
        )
        ints = [point.get(name, value) for name, value in self.plan.compared.items()]
        return (*residues, *sorted(range(len(ints)), key=ints.__getitem__), *self._padding_of(point))

    def _padding_of(self, point: Mapping[str, Any]) -> Iterator[int]:
        """Which lengths and images need padding, how they and their numbers of units compare, and the residues of these;
        of other sizes, which is larger if that was never tried otherwise."""
        padded = self.plan.padded()
        yield from (int(p.is_full(point)) for p in padded)
        yield from ranks_of([p.at(point) for p in padded])
        yield from ranks_of([int(point[r.of]) for r in self.plan.rounded])
        yield from (p.at(point) % self.moduli[name] for name, p in self.plan.followers().items())
        yield from (_sign(point[one], point[other]) for one, other in self.plan.ordered)

    def loose_numbers(self) -> set[str]:
        """The Python numbers, as times, whose values decide nothing: neither their residues nor their order, and nothing in
        a call follows from them."""
        tied = [f.symbols() for f in self.plan.forms if isinstance(f, Dim)]
        tied += [symbols_of(c.expression) for c in self.plan.computed]
        tied += [c.sizes() for c in self.plan.counted]
        guards = (guard for asked in (tuple(self.conditions), *tuple(self.ways)) for guard, _ in asked)
        asked = {name for guard in guards if not guard.is_mark() for name in guard.symbols()}
        asked |= {name for cut in self.cuts for name in symbols_in(cut)}
        # What is read with them is another thing for each.
        asked |= {
            name
            for read in self.reads
            for node in read.prelude
            for name in symbols_in([*node.args, *node.kwargs.values()])
        }
        return {
            s.name
            for s in self.plan.symbols
            if s.is_number
            and s.name not in asked
            and s.name not in self.box
            and not (s.role == "int" and (s.name in self.plan.compared or self.moduli[s.name] > 1))
            and sum(s.name in names for names in tied) == 1
        }

    def marks_of(self, point: Mapping[str, Any]) -> set[tuple[str, Any]]:
        """Per symbol, which of the values that programs treat specially it has; of a number in an attribute, whether it is
        another than it was."""
        out: set[tuple[str, Any]] = set()
        for symbol in self.plan.symbols:
            value = point[symbol.name]
            out.add((symbol.name, (value == 0, value == 1, value < 0) if symbol.is_number else value == 1))
            if symbol.role == "attribute" and value != symbol.value:
                out.add((symbol.name, _MOVED))
        # An image of one pixel, which torch has no norm of.
        ones = [s.name for s in self.plan.symbols if s.role in _LENGTHS and point[s.name] == 1]
        if len(ones) > 1:
            out.add((" ".join(ones), True))
        return out

    def accepts(self, point: Mapping[str, Any], *, of_copy: bool = False) -> bool:
        """True if the graph is known to be right at ``point``; with ``of_copy``, of copies of the module."""
        for name, (low, high) in self.box.items():
            if not low <= point[name] <= high:
                return False
        missing = self.marks_of(point) - self.marks
        if self.class_of(point) not in self.classes or not all(of_copy and mark == _MOVED for _, mark in missing):
            return False
        if not self.meets(point) or not self._is_whole(point):
            return False
        if self._strays() and all(any(at[name] != point[name] for name in at) for at in self.points):
            return False
        known: dict[Guard, bool | None] = {}

        def holds(guard: Guard) -> bool | None:
            if guard not in known:
                known[guard] = guard.holds(point)
            return known[guard]

        return any(all(holds(guard) is outcome for guard, outcome in way) for way in tuple(self.ways))

    def _strays(self) -> bool:
        """Whether ``forward`` compares with numbers that follow from sizes where nobody sees it (``h > 1.5 * w``): they were
        other ones in each trace. Which way it goes at further sizes only a trace tells then."""
        ways = tuple(self.ways)
        if len(ways) != self._asked[0]:
            bounds = [_bounds_in(way) for way in ways]
            pairs = itertools.combinations(bounds, 2)
            strays = any(not one[key] & other[key] for one, other in pairs for key in one.keys() & other.keys())
            self._asked = len(ways), strays
        return self._asked[1]

    def _is_whole(self, point: Mapping[str, Any]) -> bool:
        """Whether all sizes come out whole, and all floats are some: residues of the symbols one by one do not tell of
        products."""
        if self.parts is None:
            wholes = {s.name for s in self.plan.symbols if s.role not in ("float", "attribute")}
            wholes |= self.plan.followers().keys()
            forms = {f for f in self.forms if isinstance(f, Dim) and not isinstance(f, Real) and f.symbols() <= wholes}
            self.parts = [f for f in forms if len(f.symbols()) > 1 and any(c.denominator > 1 for _, c in f.terms)]
        # Nor of the root of what is negative, say.
        has_values = all(math.isfinite(point[c.name]) for c in self.plan.computed)
        return has_values and all(form.exact(point).denominator == 1 for form in self.parts)

    def meets(self, point: Mapping[str, Any]) -> bool:
        """Whether what the program takes for granted is so at ``point``."""
        is_met = all(guard.holds(point) is outcome for guard, outcome in tuple(self.conditions))
        return is_met and all(_is_cut(cut, point) for cut in self.cuts)

    def accept(self, point: Mapping[str, Any], record: Trace | None, *, of_copy: bool = False) -> set[str]:
        """Notes that the graph was checked at ``point``, where the way of ``record`` was taken, ``None`` if that is known;
        with ``of_copy``, by a trace of a copy of the module. What reads a number past the copy is then still to be seen.

        Returns:
            The free sizes of which the trace could not follow all that was computed with them.
        """
        escaped: set[str] = set()
        if record is not None:
            readers = self._readers(record)
            escaped = record.ledger.escapes(*readers)
            floats = {s.name for s in self.plan.symbols if s.role in ("float", "attribute")}
            way = record.ledger.guards(*readers, self._positive(), floats)
            uses = record.ledger.uses(*readers, self._solved_numbers().keys() | set(self.forms))
            numbers = [guard for guard in self._numbers_in(uses) if guard.holds(point)]
            numbers += self._coincidences(uses, point)
            way |= {(guard, True) for guard in numbers}
            for i, what in record.asked.items():
                if what & ~self.inputs[i].asked:
                    self.inputs[i] = dataclasses.replace(self.inputs[i], asked=self.inputs[i].asked | what)
            if way not in self.ways:
                self.ways.add(way)
                self.lone[way] = dict(point)
            elif self.lone.get(way, point) != point:
                del self.lone[way]
        self.classes.add(self.class_of(point))
        self.marks |= {mark for mark in self.marks_of(point) if not (of_copy and mark[1] == _MOVED)}
        if point not in self.points:
            self.points.append(dict(point))
        for symbol in self.plan.symbols:
            name = symbol.name
            if symbol.is_bounded or name in self.box or (symbol.role == "float" and name in escaped):
                seen = self.box.get(name) or [p[name] for p in self.points]
                self.box[name] = (min(*seen, point[name]), max(*seen, point[name]))
        return escaped

    def solve_uses(self, records: Sequence[Trace], points: Sequence[Mapping[str, Any]]) -> None:
        """Finds what each number that ``forward`` computed for torch is in the graph. Where a form was solved that is the
        number at these points only, the guard shows elsewhere that it is not."""
        known = set(self.forms)
        numbers: set[Any] = set().union(*(r.ledger.uses(*self._readers(r)) for r in records)) - known
        if not numbers:
            return
        columns = zip(*(r.numbers for r in records), strict=True)
        forms = dict(zip(columns, self.forms, strict=True))
        for number in numbers:
            form = forms.get(tuple(value_at(number, point) for point in points))
            if form is not None and form != number:
                self.solved[number] = form

    def rests(self, record: Trace, names: Set[str]) -> set[tuple[str, int]]:
        """The sizes, among these symbols, of which a trace took the rest by a number for torch, and these numbers."""
        waiting: list[Any] = list(record.ledger.uses(*self._readers(record)))
        found: set[tuple[str, int]] = set()
        while waiting:
            expression = waiting.pop()
            if not isinstance(expression, tuple):
                continue
            name, *operands = expression
            of = operands[0].as_symbol() if name == "mod" and isinstance(operands[0], Dim) else None
            if of is not None and of in names and type(operands[1]) is int:
                found.add((of, operands[1]))
            waiting += operands
        return found

    def _solved_numbers(self) -> dict[Any, Literal]:
        if not self.solved:
            # Those of another process are in the ways that were traced there.
            ways = (guard for way in self.ways for guard, outcome in way if outcome and guard.relation == "eq")
            self.solved.update((guard.left, guard.right) for guard in ways)
        return self.solved

    def _numbers_in(self, numbers: Set[Any]) -> list[Guard]:
        solved = self._solved_numbers()
        return [Guard("eq", number, solved[number]) for number in numbers if number in solved]

    def narrow(self, way: frozenset[tuple[Guard, bool]], names: Iterable[str]) -> None:
        """Takes a way that was traced at one point to be right only where these symbols are what they are there."""
        point = self.lone.pop(way)
        self.ways.discard(way)
        self.ways.add(way | {(Guard("eq", Dim.symbol(name), point[name]), True) for name in names})

    def _coincidences(self, numbers: Set[Any], point: Mapping[str, Any]) -> list[Guard]:
        """Of numbers that ``forward`` computed for torch at ``point`` alone: that they are what the graph may have in their
        place."""
        distinct = set(self.forms)
        unknown = [n for n in numbers if n not in self.solved and n not in distinct]
        if not unknown:
            return []
        forms: dict[Any, set[Literal]] = {}
        for form in distinct:
            forms.setdefault(_literal(form, point), set()).add(form)
        return [Guard("eq", n, form) for n in unknown for form in forms.get(value_at(n, point), ())]

    def beyond(self, point: Mapping[str, Any]) -> dict[str, Number]:
        """For the floats that are bounded, and not so far at ``point``, values further out."""
        out: dict[str, Number] = {}
        for symbol in self.plan.symbols:
            if symbol.role == "float" and symbol.name in self.box:
                value, (low, high) = point[symbol.name], self.box[symbol.name]
                if value < low:
                    out[symbol.name] = value / 4 if value > 0 else 2 * value - high
                elif value > high:
                    out[symbol.name] = 2 * value - low
        return out

    def _readers(self, record: Trace) -> tuple[Callable[[int, int], Any], Callable[[int], Any]]:
        """What the sizes and the numbers of the call in a trace's ledger are in this graph."""
        return lambda value, dim: self.forms[record.number_of(value, dim)], self.plan.number_at_place

    def _positive(self) -> set[str]:
        units = {p.name for p in self.plan.padded() if p.is_named()}
        return {s.name for s in self.plan.symbols if not s.is_number} | units

    def numbers_at(self, point: Mapping[str, Any]) -> list[Number]:
        """Every number of the trace at ``point``, in its order.

        Raises:
            ValueError: If a size does not come out whole there.
        """
        sizes = {name: value for name, value in point.items() if isinstance(value, int)}
        known: dict[Dim, Number] = {}
        for form in {f for f in self.forms if isinstance(f, Dim)}:
            whole = form.symbols() <= sizes.keys() and not isinstance(form, Real)
            known[form] = form.evaluate(sizes) if whole else number_at(form, point)
        return [known[f] if isinstance(f, Dim) else f for f in self.forms]

    def differs_from(self, record: Trace, point: Mapping[str, Any]) -> str | None:
        """How a trace taken at ``point`` contradicts the graph, ``None`` if it confirms it."""
        structural = self.template.difference(record)
        if structural is not None:
            return structural
        try:
            mine = self.numbers_at(point)
        except ValueError as error:
            return str(error)
        if mine == record.numbers:
            return None
        if len(mine) != len(record.numbers):
            return "a constant made in forward has a length that depends on the sizes"
        for i, (a, b) in enumerate(zip(mine, record.numbers, strict=True)):
            if a != b and not (isinstance(b, float) and abs(a - b) <= 1e-12 * max(abs(a), abs(b))):
                return f"number {i} is {b}, and {self.forms[i]} gives {a}"
        return None

    def lay_out(self, records: Sequence[Trace], points: Sequence[Mapping[str, Any]]) -> None:
        """Lets results lie in memory as in traces at these points: as in that which tells most, since a dimension of size 1
        may be anywhere; row-major where they do not agree, as the order may depend on which sizes are 1."""
        leaves = list(self.outputs.leaves)
        at = (i for i, leaf in enumerate(leaves) if leaf.value is not None)
        for i, *orders in zip(at, *(record.output_orders for record in records), strict=True):
            if leaves[i].steps or not orders:
                continue
            shape = self.values[leaves[i].value].shape
            sizes = [[number_at(n, point) if isinstance(n, Dim) else n for n in shape] for point in points]
            counts = [sum(size > 1 for size in found) for found in sizes]
            order = orders[counts.index(max(counts))]
            for found, other in zip(sizes, orders, strict=True):
                if [d for d in order if found[d] > 1] != [d for d in other if found[d] > 1]:
                    order = tuple(range(len(shape)))
                    break
            leaves[i] = dataclasses.replace(leaves[i], order=order)
        self.outputs = dataclasses.replace(self.outputs, leaves=tuple(leaves))

    def has_constants_of(self, record: Trace) -> bool:
        """Whether the numbers that are none of sizes are those of a trace to the last bit, and of the same types. In one
        state of a module they always are."""
        pairs = zip(self.forms, record.numbers, strict=True)
        return all(isinstance(mine, Dim) or is_as(mine, number) for mine, number in pairs)

    def __str__(self) -> str:
        lines = [f"symbols: {', '.join(f'{s.name} = {s.label}' for s in self.plan.symbols)}"]
        for node in self.nodes:
            outs = ", ".join(
                f"%{v}: {str(self.values[v].dtype).removeprefix('torch.')}{list(self.values[v].shape)}"
                for v in node.outputs
            )
            args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{outs} = {node.op}({', '.join(args)})" + (f"  // {node.path}" if node.path else ""))
        lines.append(
            "return " + ", ".join(f"%{x.value}" if x.value is not None else str(x.literal) for x in self.outputs.leaves)
        )
        return "\n".join(lines)


def _text(argument: Any) -> str:
    if isinstance(argument, Ref):
        return f"%{argument.value}"
    if isinstance(argument, tuple):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


def build_graph(
    call: Call,
    plan: SizePlan,
    labels: Sequence[str],
    record: Trace,
    forms: list[Literal],
    moduli: dict[str, int],
) -> CapturedGraph:
    """Decodes a trace, its numbers replaced by ``forms``, into a graph."""
    values: list[Value] = []
    nodes: list[Node] = []
    inputs: list[GraphInput] = []
    leaves: list[OutputLeaf] = []
    writes: tuple[Place, ...] = ()
    reads: list[Node] = []
    for index, (op, _, results) in enumerate(record.nodes):
        numbers = iter(forms[record.starts[index] :])
        args, kwargs = arguments_of(record, index, numbers)
        if op == "output":
            leaves = _output_leaves(args, record, inputs)
            writes = ast.literal_eval(kwargs.get("writes", "()"))
            continue
        outputs = []
        for dtype, rank in results:
            value = Value(dtype, tuple(_whole(next(numbers)) for _ in range(rank)), len(nodes))
            outputs.append(len(values))
            values.append(value)
        if op == "sized":
            # Only its size is of interest.
            continue
        node = Node(op, args, kwargs, tuple(outputs), record.paths[index])
        if op == "read":
            reads.append(node)
            # What is read is passed to the graph.
            node = Node("input", (), {}, node.outputs, node.path)
        if node.op == "input" and outputs:
            inputs.append(GraphInput(labels[len(inputs)], outputs[0], record.asked.get(len(inputs), 0)))
        nodes.append(node)
    assert record.output_spec is not None, "a finished trace has an output"
    outputs_spec = OutputSpec(tuple(leaves), record.output_spec, writes)
    graph = CapturedGraph(
        call.key, plan, inputs, nodes, values, record.weights, record.externs, outputs_spec, moduli, record, forms
    )
    graph.cuts = frozenset(_cuts_of(nodes, values))
    # A size is as it is solved unless that is below zero: there eager gives nothing, or raises.
    sizes = {size for value in values for size in value.shape if isinstance(size, Dim)}
    graph.conditions.update((Guard("lt", s, 0), False) for s in sizes if any(c < 0 and m for m, c in s.terms))
    if reads:
        _take_out_reads(graph, call, reads)
    if record.written:
        _narrow_writes(graph, record)
    _leave_out_dead(graph)
    return graph


def _cuts_of(nodes: Iterable[Node], values: Sequence[Value]) -> Iterator[Cut]:
    """The slices whose edges or sizes depend on the call."""
    for node in nodes:
        if node.op is torch.ops.aten.slice.Tensor:
            left_out: tuple[Any, ...] = (0, None, None, 1)
            x, dim, start, end, step = (*node.args, *left_out[len(node.args) - 1 :])
            shape = values[x.value].shape
            cut = (start, end, step, shape[dim], values[node.outputs[0]].shape[dim])
            if any(isinstance(number, Dim) for number in cut):
                yield cut


def _is_cut(cut: Cut, point: Mapping[str, Any]) -> bool:
    """Whether a slice has the size at ``point`` that it has in the graph."""
    start, end, step, size, length = (n.exact(point) if isinstance(n, Dim) else n for n in cut)

    def inside(edge: Any) -> Any:
        return min(max(edge + size if edge < 0 else edge, 0), size)

    taken = inside(size if end is None else end) - inside(0 if start is None else start)
    return bool(max(0, -(-taken // step)) == length)


def arguments_of(record: Trace, index: int, numbers: Iterator[Literal]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a traced node, its numbers from ``numbers``, which is at the first after them afterwards."""
    op, tokens, results = record.nodes[index]
    if op in ("weight", "extern"):
        return tokens, {}
    if op != "constant":
        return arguments_in(tokens, numbers)
    if tokens:
        return tuple(map(float, tokens)), {}
    return tuple([next(numbers) for _ in range(record.end_of(index) - record.starts[index] - results[0][1])]), {}


def draws(op: Any) -> bool:
    """Whether an op draws random numbers: recurrent layers do in training mode alone, in which they are not captured."""
    if isinstance(op, str) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return all(argument.name != "train" for argument in op._schema.arguments)


def does_more(op: Any) -> bool:
    """Whether an op does more than to give its results: it draws random numbers, so that others would draw other ones, or is
    of a library, of which that is not known."""
    return not isinstance(op, str) and (op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags)


def prelude_of(needed: Iterable[int], node_of: Callable[[int], Node | None]) -> list[Node]:
    """The ops that lead to values, in an order in which they can run.

    Args:
        needed: The values.
        node_of: The op that makes a value; ``None`` of one that is there.
    """
    found: dict[tuple[int, ...], Node] = {}
    waiting = list(needed)
    while waiting:
        node = node_of(waiting.pop())
        if node is not None and node.outputs not in found:
            found[node.outputs] = node
            waiting += operands(node)
    # Values are numbered in the order in which they are made.
    return [found[outputs] for outputs in sorted(found)]


def leaves_of(arguments: Any) -> Iterator[Any]:
    """What is in lists and tuples, however deep."""
    if isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from leaves_of(argument)
    else:
        yield arguments


def symbols_in(arguments: Any) -> set[str]:
    """The symbols on which numbers among arguments depend."""
    return set().union(*(leaf.symbols() for leaf in leaves_of(arguments) if isinstance(leaf, Dim)))


def operands(node: Node) -> Iterator[int]:
    """The values that a node reads."""
    return (leaf.value for leaf in leaves_of([*node.args, *node.kwargs.values()]) if isinstance(leaf, Ref))


def _take_out_reads(graph: CapturedGraph, call: Call, reads: Sequence[Node]) -> None:
    """Parts a graph from the ops that only lead to what is read."""
    nodes, values = graph.nodes, graph.values
    there = {item.value for item in graph.inputs}

    def node_of(value: int) -> Node | None:
        node = nodes[values[value].node]
        if value in there:
            return None
        if node.op == "constant":
            meta = values[value]
            return Node(node.op, (meta.dtype, meta.shape, *node.args), {}, node.outputs, node.path)
        return node

    found = []
    for question, node in zip(call.questions, reads, strict=True):
        asked = tuple(operands(node))
        prelude = prelude_of(asked, node_of)
        there.update(value for one in prelude for value in one.outputs)
        found.append(Read(question, asked, tuple(prelude), node.outputs[0] if node.outputs else None))
    graph.reads, graph.plain_key = tuple(found), call.plain_key


def _narrow_writes(graph: CapturedGraph, record: Trace) -> None:
    """Lets the graph give, of arguments that it writes into, the part that it writes."""
    leaves = []
    for leaf in graph.outputs.leaves:
        # Of what is an argument itself nothing is written.
        if leaf.value in record.written and leaf.input is None:
            before = graph.inputs[record.written[leaf.value]].value
            value, steps = narrowed(graph, leaf.value, before)
            if steps:
                order = tuple(range(len(graph.values[value].shape)))
                leaf = dataclasses.replace(leaf, value=value, order=order, steps=steps)
        leaves.append(leaf)
    graph.outputs = dataclasses.replace(graph.outputs, leaves=tuple(leaves))


def _leave_out_dead(graph: CapturedGraph) -> None:
    """Leaves out ops whose results nobody needs, but for those that do something else, too. Their sizes stay a part of what
    the graph serves: where these are others, they may raise, or be more of them."""
    nodes, values = graph.nodes, graph.values
    needed = [leaf.value for leaf in graph.outputs.leaves if leaf.value is not None]
    needed += [item.value for item in graph.inputs]
    needed += [value for node in nodes if does_more(node.op) for value in node.outputs]
    live = {node.outputs for node in prelude_of(needed, lambda value: nodes[values[value].node])}
    graph.nodes = [node for node in nodes if node.outputs in live]
    at = {value: i for i, node in enumerate(graph.nodes) for value in node.outputs}
    graph.values = [dataclasses.replace(value, node=at.get(i, -1)) for i, value in enumerate(values)]


def _whole(form: Literal) -> Size:
    return int(form) if isinstance(form, float) else form


def arguments_in(tokens: Sequence[Any], numbers: Iterator[Literal]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that tokens stand for, the numbers among them from ``numbers``."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    stack: list[list[Any]] = [args]
    keyword: str | None = None
    for token in tokens:
        if isinstance(token, Keyword):
            keyword = str(token)
            continue
        if token is OPEN:
            stack.append([])
            continue
        item: Any
        if token is CLOSE:
            item = tuple(stack.pop())
        elif token is INT:
            item = _whole(next(numbers))
        elif token is FLOAT:
            number = next(numbers)
            item = number if isinstance(number, Dim) else float(number)
        elif token is TRUE or token is FALSE:
            item = token is TRUE
        elif token is NONE:
            item = None
        elif type(token) is int:
            item = Ref(token)
        elif token in ("inf", "-inf", "nan"):
            item = float(token)
        else:
            item = token
        if keyword is not None and len(stack) == 1:
            kwargs[keyword] = item
            keyword = None
        else:
            stack[-1].append(item)
    return tuple(args), kwargs


def _output_leaves(args: tuple[Any, ...], record: Trace, inputs: Sequence[GraphInput]) -> list[OutputLeaf]:
    orders, copied = iter(record.output_orders), iter(record.is_copied)
    by_value = {graph_input.value: i for i, graph_input in enumerate(inputs)} | record.written
    out = []
    for item in args:
        if isinstance(item, Ref):
            at, is_copied = by_value.get(item.value), next(copied)
            is_part = at is None and not is_copied
            out.append(OutputLeaf(item.value, None, next(orders), None if is_copied else at, is_part))
        else:
            out.append(OutputLeaf(literal=item))
    return out
