"""What ``forward`` asks about sizes on its way: the guards of a trace.

While a module is traced, the sizes that it reads and the Python numbers that it is passed are :class:`TracedInt` and
:class:`TracedFloat`: plain numbers that note what is computed with them. Where one is compared, the comparison and its
outcome are a guard. ``forward`` does the same at all sizes at which the guards of one trace have the outcomes that they
had there, so that a graph is known to be right wherever this is so, and nowhere else without another trace.

A number can leave this: through ``int()``, as a key of a dictionary, as text. What becomes of it then is not seen, so that
the number itself is a guard, and another one needs another trace; but for what libraries do whose models are tested at many
sizes, where only is noted that it left (:meth:`Ledger.escapes`): what they compute on with as much is taken to be computed
with it. Not seen at all is what torch asks below ``forward``, and where C reads the number without asking: ``0.5 * n``,
``"%d" % n``, ``range(n)`` but in code of the program's own. Roots, logarithms and most other functions of :mod:`math` are
followed (:data:`FUNCTIONS`).
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

from .dim import Dim, Real, dim_of

if TYPE_CHECKING:
    from .signature import Number

__all__ = [
    "FUNCTIONS",
    "OPERATIONS",
    "Expression",
    "Guard",
    "Ledger",
    "TracedFloat",
    "TracedInt",
    "expression_text",
    "is_count",
    "is_tested",
    "plain",
    "shows_at",
    "symbols_of",
    "value_at",
]

Expression = Any
"""A number as it follows from the sizes of a call: an int, a float, a :class:`~oxidiff.capture.dim.Dim`, or a tuple of the
name of an operation and what it is applied to; ``None`` if it is too long to write down."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "neg": operator.neg,
    "abs": operator.abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "trunc": math.trunc,
    "float": float,
    "invert": operator.invert,
    "max": max,
}
"""What may be computed with traced numbers, by name; the larger of two is found by comparing them."""

FUNCTIONS = {
    f"math.{name}" if name in OPERATIONS else name: getattr(math, name)
    for name in (
        "sqrt", "cbrt", "isqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot", "fabs", "fmod",
        "remainder", "copysign", "ldexp", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh",
        "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma", "degrees", "radians", "gcd", "lcm",
    )
    if hasattr(math, name)
}  # fmt: skip
"""Those of :mod:`math` among them, which would make plain numbers of traced ones: by a name of its own where Python has an
operator of that name."""
OPERATIONS.update(FUNCTIONS)

LEAVING = (
    "fsum",
    "dist",
    "modf",
    "frexp",
    "isclose",
    "nextafter",
    "ulp",
    "comb",
    "perm",
    "factorial",
)
"""Functions of :mod:`math` of which the results are not followed: what they are given leaves."""

_NO_NUMBERS = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype))
"""Types of most arguments of torch functions."""
_JOINING = frozenset({"add", "sub", "mul"})
"""What puts sizes together: what they are divided by is none."""
_TESTED = frozenset({"accelerate", "diffusers", "einops", "oxidiff", "peft", "torch", "transformers"})
"""Libraries in whose code a number may leave without being a guard: they make nothing of it but other sizes."""
_MAX_ROWS = 100_000
"""Numbers of one trace that are followed: what a loop computes beyond them is not."""
_MAX_POWER = 64
"""Exponents in a guard, whoever wrote it, are not larger."""
_MAX_SIZE = 64
"""Operations, or terms, of an expression in a guard: longer ones are not written down."""
_MAX_DEGREE = 8
_MAX_COEFFICIENT = 1 << 62
"""Of a polynomial in a guard: what compares sizes with the largest int there is asks nothing."""


class Ledger:
    """What a running ``forward`` computes with sizes, and what it asks.

    Attributes:
        is_open: Whether it is still written into. Traced numbers that outlive their trace are plain ones.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._rows: list[tuple[Any, ...]] = []
        self._index: dict[tuple[Any, ...], int] = {}
        self._outcomes: dict[tuple[str, int, int], bool] = {}
        self._escaped: dict[int, Number | None] = {}
        self._pinned: dict[int, Number] = {}
        self._used: set[int] = set()
        self._used_floats: dict[int, None] = {}
        self._shapes: dict[int, tuple[TracedInt, ...]] = {}

    def shape(self, value: int, sizes: Iterable[int]) -> tuple[TracedInt, ...]:
        """The sizes of a traced value."""
        found = self._shapes.get(value)
        if found is None:
            found = tuple([TracedInt(n, self, self._row(("size", value, i))) for i, n in enumerate(sizes)])
            self._shapes[value] = found
        return found

    def argument(self, place: int, number: Number) -> Number:
        """A Python number that is passed to ``forward``, at this place among the sizes of the call."""
        row = self._row(("argument", place))
        kind: Any = TracedInt if isinstance(number, int) else TracedFloat
        return cast("Number", kind(number, self, row))

    def computed(self, result: Any, name: str, *operands: Number) -> Any:
        """The result of an operation on traced numbers."""
        if not self.is_open or len(self._rows) > _MAX_ROWS:
            return result
        kind = _TRACED.get(type(result))
        if kind is None:
            return result
        rows = []
        for operand in operands:
            row = self._row_of(operand)
            if row is None:
                return result
            rows.append(row)
        return kind(result, self, self._row((name, *rows)))

    def ask(self, relation: str, left: Number, right: Number, outcome: bool) -> None:
        """Notes a comparison, ``"eq"`` or ``"lt"``."""
        if self.is_open and len(self._outcomes) < _MAX_ROWS:
            one, other = self._row_of(left), self._row_of(right)
            if one is not None and other is not None:
                self._outcomes[relation, one, other] = outcome
                if relation == "lt" and plain(left) == plain(right):
                    # Where two are equal, what follows from the one and from the other is: it shows no difference.
                    self._outcomes["eq", one, other] = True

    def escape(self, number: _Traced, *, is_text: bool = False) -> None:
        """Notes that the caller's caller takes a number where it cannot be followed."""
        if not self.is_open:
            return
        module = sys._getframe(2).f_globals.get("__name__", "")
        if not (is_text and is_tested(module)):
            self.escape_to(number, module)

    def escape_to(self, number: Any, module: str) -> None:
        """Notes that code of a Python module takes a number where it cannot be followed."""
        if not is_tested(module):
            self.pin(number)
        elif self.is_open and isinstance(number, _Traced):
            self._escaped[number.row] = plain(number)

    def pin(self, number: Any) -> None:
        """Makes it a guard that a number is what it is, if a size or an int is in it. Of floats alone, as times, each would
        be another one: it is noted that they leave."""
        row = self._row_of(number) if self.is_open else None
        if row is not None:
            self._escaped.setdefault(row, None)
            self._pinned[row] = plain(number)

    def use(self, argument: Any) -> None:
        """Notes the numbers in an argument of a torch function: they become numbers of the graph."""
        kind = type(argument)
        if kind is TracedInt:
            if argument.ledger is self:
                self._used.add(argument.row)
        elif kind is TracedFloat:
            if argument.ledger is self:
                self._used_floats[argument.row] = None
        elif kind is slice:
            for edge in (argument.start, argument.stop, argument.step):
                self.use(edge)
        elif isinstance(argument, (tuple, list)):
            for item in argument:
                if type(item) not in _NO_NUMBERS:
                    self.use(item)

    def is_quotient(self, number: Any) -> bool:
        """Whether an int is so much over a size, as what fits into a budget is, or is made of such: no polynomial."""
        if type(number) is not TracedInt or number.ledger is not self:
            return False
        waiting = {number.row}
        while waiting:
            name, *operands = self._rows[waiting.pop()]
            if name in ("literal", "size", "argument"):
                continue
            if name == "floordiv" and self._rows[operands[1]][0] != "literal":
                return True
            # What was noted before, so that this ends.
            waiting.update(operands)
        return False

    def _row(self, row: tuple[Any, ...]) -> int:
        at = self._index.get(row)
        if at is None:
            at = self._index[row] = len(self._rows)
            self._rows.append(row)
        return at

    def _row_of(self, number: Any) -> int | None:
        if isinstance(number, _Traced):
            # One of another trace, out of a cache, may be of any size.
            return number.row if number.ledger is self else None
        if isinstance(number, float) and not math.isfinite(number):
            return None
        # An int and the float that equals it are not the same; flags and numpy's floats are as plain ones.
        kind = int if isinstance(number, int) else float
        return self._row(("literal", kind, kind(number)))

    def guards(
        self,
        size_of: Callable[[int, int], Any],
        argument_of: Callable[[int], Any],
        positive: Set[str],
        floats: Set[str] = frozenset(),
    ) -> frozenset[tuple[Guard, bool]]:
        """All that was asked and depends on the call's sizes, with the outcomes.

        Args:
            size_of: What a dimension of a traced value is in the graph.
            argument_of: What a number of the call is.
            positive: The symbols that are never less than 1.
            floats: The symbols that are floats.
        """
        known: dict[int, Expression] = {}
        found: dict[Guard, bool] = {}
        for (relation, left, right), outcome in self._outcomes.items():
            one, other = (self._expression(row, known, size_of, argument_of) for row in (left, right))
            guard = _guard(relation, one, other, positive)
            if guard is not None:
                found[guard] = outcome
        for row, number in self._pinned.items():
            expression = self._expression(row, known, size_of, argument_of)
            guard = None if symbols_of(expression) <= floats else _guard("eq", expression, number, positive)
            if guard is not None:
                found[guard] = True
        return frozenset(found.items())

    def uses(
        self,
        size_of: Callable[[int, int], Any],
        argument_of: Callable[[int], Any],
        solved: Collection[Expression] | None = None,
    ) -> set[Expression]:
        """The numbers that went into torch functions and depend on the call's sizes. A plain int that a library adds to one
        or multiplies it by may be the number that left as so much, if there is only one.

        Args:
            size_of: What a dimension of a traced value is in the graph.
            argument_of: What a number of the call is.
            solved: Numbers that are known as they were computed: none of these is another one. If ``None``, both are given.
        """
        known: dict[int, Expression] = {}
        left: dict[int, set[Expression]] = {}
        for row, number in self._escaped.items():
            literal = self._index.get(("literal", int, number)) if type(number) is int else None
            if literal is not None:
                left.setdefault(literal, set()).add(self._expression(row, known, size_of, argument_of))
        again = {literal: expression for literal, (expression, *others) in left.items() if not others}
        known = {}
        instead: dict[int, Expression] = {}
        found: set[Expression] = set()
        for row in self._used:
            written = self._expression(row, known, size_of, argument_of)
            if solved is None or written in solved or not again:
                found.add(written)
            if again and (solved is None or written not in solved):
                found.add(self._expression(row, instead, size_of, argument_of, again))
        return {e for e in found if isinstance(e, (Dim, tuple))}

    def floats(self, size_of: Callable[[int, int], Any], argument_of: Callable[[int], Any]) -> list[Expression]:
        """The floats that went into torch functions and depend on the call's sizes, in the order in which they did."""
        known: dict[int, Expression] = {}
        found = [self._expression(row, known, size_of, argument_of) for row in self._used_floats]
        return [e for e in dict.fromkeys(found) if isinstance(e, tuple)]

    def counts(self, argument_of: Callable[[int], Any]) -> list[Expression]:
        """What is made of ints of the call and is no polynomial of them: quotients, and of such numbers of which was asked
        which is the larger one, the largest."""
        known: dict[int, Expression] = {}

        def expression(row: int) -> Expression:
            return self._expression(row, known, lambda *_: None, argument_of)

        found: dict[Expression, None] = {}
        for row, (name, *operands) in enumerate(self._rows):
            if name == "floordiv" and self._rows[operands[1]][0] == "literal" and is_count(quotient := expression(row)):
                found[quotient] = None
        groups: list[set[Expression]] = []
        for relation, *rows in self._outcomes:
            sides = {expression(row) for row in rows} if relation == "lt" else set()
            if len(sides) == 2 and all(isinstance(side, Dim) or is_count(side) for side in sides):
                joined = set().union(sides, *(g for g in groups if not g.isdisjoint(sides)))
                groups = [joined, *(g for g in groups if g.isdisjoint(joined))]
        for group in groups:
            first, *others = sorted(group, key=expression_text)
            largest = functools.reduce(lambda one, other: ("max", one, other), others, first)
            if is_count(largest):
                found[largest] = None
        return [*found]

    def escapes(self, size_of: Callable[[int, int], Any], argument_of: Callable[[int], Any]) -> set[str]:
        """The symbols on which the numbers depend that could not be followed."""
        known: dict[int, Expression] = {}
        found: set[str] = set()
        for row in self._escaped:
            found |= symbols_of(self._expression(row, known, size_of, argument_of))
        return found

    def _expression(
        self,
        row: int,
        known: dict[int, Expression],
        size_of: Callable[[int, int], Any],
        argument_of: Callable[[int], Any],
        again: Mapping[int, Expression] = MappingProxyType({}),
    ) -> Expression:
        """What a row is, with ``again`` in the place of literals that something is added to or multiplied by."""
        # Not recursive: a sum over a loop is as deep as the loop is long.
        waiting = [row]
        while waiting:
            at = waiting[-1]
            if at in known:
                waiting.pop()
                continue
            name, *operands = self._rows[at]
            if name == "literal":
                known[at] = operands[1]
            elif name == "size":
                known[at] = size_of(*operands)
            elif name == "argument":
                known[at] = argument_of(*operands)
            elif missing := [o for o in operands if o not in known]:
                waiting += missing
                continue
            else:
                instead = again if name in _JOINING else {}
                made = _simplified(name, [instead.get(o, known[o]) for o in operands])
                known[at] = made if _is_short(made) else None
            waiting.pop()
        return known[row]


def is_tested(module: str) -> bool:
    """Whether a Python module is of a library in whose code a number may leave."""
    return module.partition(".")[0] in _TESTED


def plain(value: Any) -> Any:
    """The value as code outside of a trace is to see it."""
    if type(value) is TracedInt:
        return int.__int__(value)
    return float.__float__(value) if type(value) is TracedFloat else value


def _binary(name: str) -> Callable[[Any, Any], Any]:
    function = OPERATIONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            _note_repeated(name, self, other)
            return NotImplemented
        return self.ledger.computed(function(plain(self), plain(other)), name, self, other)

    return method


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    function = OPERATIONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            _note_repeated(name, self, other)
            return NotImplemented
        return self.ledger.computed(function(plain(other), plain(self)), name, other, self)

    return method


def _note_repeated(name: str, number: Any, other: Any) -> None:
    """Makes it a guard how often a list is repeated (`[x] * number`), which Python does by itself; not in libraries."""
    if name == "mul" and isinstance(other, (list, tuple, str, bytes, bytearray)):
        if not is_tested(sys._getframe(2).f_globals.get("__name__", "")):
            number.ledger.pin(number)


def _unary(name: str) -> Callable[[Any], Any]:
    function = OPERATIONS[name]

    def method(self: Any) -> Any:
        return self.ledger.computed(function(plain(self)), name, self)

    return method


def _comparison(function: Callable[[Any, Any], bool], relation: str, is_swapped: bool, is_negated: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = function(plain(self), plain(other))
        left, right = (other, self) if is_swapped else (self, other)
        self.ledger.ask(relation, left, right, outcome is not is_negated)
        return outcome

    return method


_power = _binary("pow")


class _Traced:
    """What ints and floats have in common while they are followed."""

    ledger: Ledger
    row: int

    __add__ = _binary("add")
    __radd__ = _reflected("add")
    __sub__ = _binary("sub")
    __rsub__ = _reflected("sub")
    __mul__ = _binary("mul")
    __rmul__ = _reflected("mul")
    __floordiv__ = _binary("floordiv")
    __rfloordiv__ = _reflected("floordiv")
    __mod__ = _binary("mod")
    __rmod__ = _reflected("mod")
    __truediv__ = _binary("truediv")
    __rtruediv__ = _reflected("truediv")
    __rpow__ = _reflected("pow")
    __neg__ = _unary("neg")
    __abs__ = _unary("abs")

    __eq__ = _comparison(operator.eq, "eq", is_swapped=False, is_negated=False)
    __ne__ = _comparison(operator.ne, "eq", is_swapped=False, is_negated=True)
    __lt__ = _comparison(operator.lt, "lt", is_swapped=False, is_negated=False)
    __gt__ = _comparison(operator.gt, "lt", is_swapped=True, is_negated=False)
    __le__ = _comparison(operator.le, "lt", is_swapped=True, is_negated=True)
    __ge__ = _comparison(operator.ge, "lt", is_swapped=False, is_negated=True)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None:
            return _power(self, other)
        for number in (self, other, modulus):
            if isinstance(number, _Traced):
                number.ledger.escape(number)
        return pow(plain(self), plain(other), plain(modulus))

    def __bool__(self) -> bool:
        outcome = bool(plain(self))
        self.ledger.ask("eq", self, 0, not outcome)  # type: ignore[arg-type]
        return outcome

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if isinstance(other, (int, float)) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if isinstance(other, (int, float)) else NotImplemented

    def __pos__(self) -> Any:
        return self

    def __int__(self) -> int:
        self.ledger.escape(self)
        return int(plain(self))

    def __float__(self) -> float:
        self.ledger.escape(self)
        return float(plain(self))

    def __hash__(self) -> int:
        self.ledger.escape(self)
        return hash(plain(self))

    def __repr__(self) -> str:
        self.ledger.escape(self, is_text=True)
        return repr(plain(self))

    def __str__(self) -> str:
        self.ledger.escape(self, is_text=True)
        return str(plain(self))

    def __format__(self, spec: str) -> str:
        self.ledger.escape(self, is_text=True)
        return format(plain(self), spec)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        number = plain(self)
        return type(number), (number,)


class TracedInt(_Traced, int):  # type: ignore[misc]
    """A size, or an int that is passed to ``forward`` or computed there, while a module is traced."""

    def __new__(cls, value: Any = 0, ledger: Ledger | None = None, row: int = -1) -> Any:
        """``value`` as this row of ``ledger``; a plain int where code makes one of the type of another."""
        if ledger is None:
            return int(value)
        self = int.__new__(cls, value)
        self.ledger = ledger
        self.row = row
        return self

    __and__ = _binary("and")
    __rand__ = _reflected("and")
    __or__ = _binary("or")
    __ror__ = _reflected("or")
    __xor__ = _binary("xor")
    __rxor__ = _reflected("xor")
    __lshift__ = _binary("lshift")
    __rlshift__ = _reflected("lshift")
    __rshift__ = _binary("rshift")
    __rrshift__ = _reflected("rshift")

    def __trunc__(self) -> Any:
        return self

    __ceil__ = __floor__ = __trunc__
    __invert__ = _unary("invert")

    # What code asks by `isinstance` is answered by what it is; this is for `x.__class__ is int`.
    __class__ = property(lambda self: int)

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            return self
        self.ledger.escape(self)
        return round(plain(self), digits)


class TracedFloat(_Traced, float):  # type: ignore[misc]
    """A float that is passed to ``forward`` or computed there, while a module is traced."""

    def __new__(cls, value: Any = 0.0, ledger: Ledger | None = None, row: int = -1) -> Any:
        """``value`` as this row of ``ledger``; a plain float where code makes one of the type of another."""
        if ledger is None:
            return float(value)
        self = float.__new__(cls, value)
        self.ledger = ledger
        self.row = row
        return self

    __ceil__ = _unary("ceil")
    __floor__ = _unary("floor")
    __trunc__ = _unary("trunc")

    __class__ = property(lambda self: float)

    def __round__(self, digits: Any = None) -> Any:
        number = plain(self)
        if digits is None:
            return self.ledger.computed(round(number), "round", self)
        return self.ledger.computed(round(number, plain(digits)), "round", self, digits)

    def __int__(self) -> int:
        # A plain int from here on. Roots of numbers of tokens, and the like: sizes with another are looked at again.
        whole = int(plain(self))
        self.ledger.pin(self.ledger.computed(whole, "trunc", self))
        return whole

    def is_integer(self) -> bool:
        """As of any float."""
        outcome = bool(plain(self).is_integer())
        self.ledger.ask("eq", self % 1, 0, outcome)
        return outcome


_TRACED: dict[type, Any] = {int: TracedInt, float: TracedFloat}


def _untraced(name: str) -> property:
    def of(self: Any) -> Any:
        self.ledger.escape(self)
        return getattr(plain(self), name)

    return property(of)


# What numbers have besides: `bit_length`, `real`, `hex`.
for _plain, _followed in _TRACED.items():
    for _name in vars(_plain).keys() - vars(_followed).keys() - vars(_Traced).keys():
        if not _name.startswith("_"):
            setattr(_followed, _name, _untraced(_name))


# -- guards of a graph ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison that decides what ``forward`` does.

    Attributes:
        relation: ``"eq"`` or ``"lt"``.
        left: One side.
        right: The other.
    """

    relation: str
    left: Expression
    right: Expression

    def holds(self, point: Mapping[str, Number]) -> bool | None:
        """Its outcome where the free sizes are these; ``None`` where it has none."""
        left, right = value_at(self.left, point), value_at(self.right, point)
        if left is None or right is None:
            return None
        return bool(left == right if self.relation == "eq" else left < right)

    def symbols(self) -> set[str]:
        """The free sizes that it is about."""
        return symbols_of(self.left) | symbols_of(self.right)

    def is_mark(self) -> bool:
        """Whether it only asks if a number that is passed is 0, 1 or negative."""
        sides = [e[1] if isinstance(e, tuple) and e[0] == "float" else e for e in (self.left, self.right)]
        if not all(isinstance(e, Dim) or e in (0, 1) for e in sides):
            return False
        difference = dim_of(sides[0]) - dim_of(sides[1])
        return any(
            d.as_symbol() is not None or (self.relation == "eq" and (d + 1).as_symbol() is not None)
            for d in (difference, -difference)
        )

    def __str__(self) -> str:
        return f"{expression_text(self.left)} {'==' if self.relation == 'eq' else '<'} {expression_text(self.right)}"


def value_at(expression: Expression, point: Mapping[str, Number]) -> Any:
    """The value of an expression; ``None`` where it has none."""
    try:
        return _value_at(expression, point)
    except (ArithmeticError, TypeError, ValueError):
        return None


def symbols_of(expression: Expression) -> set[str]:
    """The free sizes in an expression."""
    if isinstance(expression, Dim):
        return expression.symbols()
    if isinstance(expression, tuple):
        return set().union(*map(symbols_of, expression[1:]))
    return set()


def is_count(expression: Expression) -> bool:
    """Whether it is made of ints as :class:`~oxidiff.capture.sizes.Counted` is: divided by a number, the larger of two."""
    if not isinstance(expression, tuple) or len(expression) != 3 or not _is_short(expression):
        return False
    name, one, other = expression
    if name == "floordiv":
        return _is_whole(one) and type(other) is int and other > 0
    return name == "max" and all(type(side) is int or _is_whole(side) for side in (one, other))


def shows_at(expression: Expression, points: Sequence[Mapping[str, Number]]) -> bool:
    """Whether these points tell what is made of ints from what it is made of: rests differ, and either of two is larger."""
    if not isinstance(expression, tuple):
        return True
    name, one, other = expression
    seen = [(value_at(one, point), value_at(other, point)) for point in points]
    if name == "floordiv":
        is_seen = len({number % divisor for number, divisor in seen}) > 1
    else:
        is_seen = any(a > b for a, b in seen) and any(a < b for a, b in seen)
    return is_seen and shows_at(one, points) and shows_at(other, points)


def _is_whole(expression: Expression) -> bool:
    if isinstance(expression, Dim) and not isinstance(expression, Real):
        return all(coefficient.denominator == 1 for _, coefficient in expression.terms)
    return is_count(expression)


def _size_of(expression: Expression) -> int:
    if isinstance(expression, tuple):
        return 1 + sum(map(_size_of, expression[1:]))
    return len(expression.terms) if isinstance(expression, Dim) else 1


def _is_short(expression: Expression) -> bool:
    """Whether an expression can be written down."""
    if isinstance(expression, Dim) and any(
        max(abs(c.numerator), c.denominator) >= _MAX_COEFFICIENT or any(power > _MAX_DEGREE for _, power in m)
        for m, c in expression.terms
    ):
        return False
    return _size_of(expression) <= _MAX_SIZE


def _value_at(expression: Expression, point: Mapping[str, Number]) -> Any:
    if isinstance(expression, Dim):
        return expression.exact({name: Fraction(point[name]) for name in expression.symbols()})
    if isinstance(expression, tuple):
        values = [_value_at(e, point) for e in expression[1:]]
        # Python's own arithmetic from here on: a `Fraction` would never be rounded.
        values = [v.numerator if isinstance(v, Fraction) and v.denominator == 1 else v for v in values]
        if any(isinstance(v, Fraction) for v in values):
            if expression[0] != "float":
                raise ValueError("a size that is not whole")
            values = list(map(float, values))
        if expression[0] in ("pow", "lshift") and isinstance(values[1], int) and abs(values[1]) > _MAX_POWER:
            raise ValueError("a number without bounds")
        return OPERATIONS[expression[0]](*values)
    return expression


def _simplified(name: str, operands: list[Expression]) -> Expression:
    """An operation on expressions: a polynomial where it is one, a number where nothing in it is free."""
    if any(o is None for o in operands):
        return None
    try:
        if not any(isinstance(o, (Dim, tuple)) for o in operands):
            return OPERATIONS[name](*operands)
        if all(isinstance(o, (Dim, int)) for o in operands):
            if name in ("add", "sub", "mul", "neg"):
                return _folded(OPERATIONS[name](*operands))
            if name == "pow" and isinstance(operands[1], int) and 0 <= operands[1] <= 4:
                return _folded(math.prod([operands[0]] * operands[1], start=Dim.constant(1)))
            if name in ("floordiv", "mod") and isinstance(operands[1], int) and operands[1] and _divides(*operands):
                return _folded(operands[0] / operands[1]) if name == "floordiv" else 0
    except (ArithmeticError, TypeError, ValueError):
        # As in Python, it has no value there.
        pass
    return (name, *operands)


def _divides(form: Dim, divisor: int) -> bool:
    return all((c / divisor).denominator == 1 for _, c in form.terms)


def _folded(form: Any) -> Expression:
    constant = form.as_int() if isinstance(form, Dim) else None
    return form if constant is None else constant


def _guard(relation: str, left: Expression, right: Expression, positive: Set[str]) -> Guard | None:
    """The guard, ``None`` if its outcome is always the same, or it is too much to write down."""
    if left is None or right is None:
        return None
    if all(isinstance(e, (Dim, int)) and not isinstance(e, Real) for e in (left, right)):
        left, right = _folded(left - right), 0
    if not isinstance(left, (Dim, tuple)) and not isinstance(right, (Dim, tuple)):
        return None
    if isinstance(left, Dim) and right == 0 and left.symbols() <= positive:
        # Sizes are at least 1, so that much of what is asked is no question.
        slopes = [c for m, c in left.terms if m]
        at_one = sum(c for _, c in left.terms)
        if (at_one > 0 and min(slopes) >= 0) or (at_one < 0 and max(slopes) <= 0):
            return None
        if relation == "eq" and left.terms[0][1] < 0:
            left = -left
    if not _is_short(left):
        return None
    return Guard(relation, left, right)


def expression_text(expression: Expression) -> str:
    """An expression to be read."""
    if isinstance(expression, tuple):
        return f"{expression[0]}({', '.join(map(expression_text, expression[1:]))})"
    return str(expression)
