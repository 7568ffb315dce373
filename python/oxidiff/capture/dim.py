"""Sizes as expressions of the free input sizes: polynomials with rational coefficients.

A :class:`Dim` is immutable, canonical (equal expressions are equal objects in ``==`` and ``hash``) and small: the forms
that occur are like ``h/8``, ``b*h*w/64`` or ``96 - h/32``. Its value is only meaningful where it comes out whole, which
is what the residues of a :class:`~oxidiff.capture.graph.CapturedGraph`'s validity classes ensure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

__all__ = ["Dim", "Monomial", "Real", "Size", "dim_of", "dim_or_int", "product_of"]

Monomial = tuple[tuple[str, int], ...]
"""Symbols with powers, sorted by symbol; empty for the constant term."""


class Dim:
    """A polynomial over named symbols. Supports ``+ - *`` with other dims and ints, and exact division by an int."""

    __slots__ = ("_hash", "terms")

    terms: tuple[tuple[Monomial, Fraction], ...]

    def __init__(self, terms: Iterable[tuple[Monomial, Fraction | int]]) -> None:
        merged: dict[Monomial, Fraction] = {}
        for monomial, coefficient in terms:
            merged[monomial] = merged.get(monomial, Fraction(0)) + coefficient
        self.terms = tuple(sorted((m, c) for m, c in merged.items() if c))
        is_constant = not any(monomial for monomial, _ in self.terms)
        # As of the number that it equals.
        self._hash = hash(sum(c for _, c in self.terms) if is_constant else self.terms)

    @classmethod
    def symbol(cls, name: str) -> Dim:
        """The expression that is just the symbol ``name``."""
        return cls([(((name, 1),), 1)])

    @classmethod
    def constant(cls, value: int | Fraction) -> Dim:
        """The expression without symbols."""
        return cls([((), value)])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            return type(self) is type(other) and self.terms == other.terms
        if isinstance(other, int):
            return self.as_int() == other
        return NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def as_int(self) -> int | None:
        """The value if no symbol occurs and it is whole."""
        if not self.terms:
            return 0
        (monomial, coefficient), *rest = self.terms
        return int(coefficient) if not rest and not monomial and coefficient.denominator == 1 else None

    def as_symbol(self) -> str | None:
        """The symbol's name if the expression is just that symbol."""
        if len(self.terms) == 1 and self.terms[0][1] == 1:
            monomial = self.terms[0][0]
            if len(monomial) == 1 and monomial[0][1] == 1:
                return monomial[0][0]
        return None

    def symbols(self) -> set[str]:
        """The symbols that occur."""
        return {name for monomial, _ in self.terms for name, _ in monomial}

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The value under ``sizes``.

        Raises:
            ValueError: If it is not whole, that is if ``sizes`` lies outside the expression's validity class.
        """
        total = self.exact(sizes)
        if total.denominator != 1:
            raise ValueError(f"{self} is not whole at {dict(sizes)}")
        return total.numerator

    def exact(self, sizes: Mapping[str, int] | Mapping[str, Fraction]) -> Fraction:
        """The value under ``sizes``, whole or not."""
        total = Fraction(0)
        for monomial, coefficient in self.terms:
            product: int | Fraction = 1
            for name, power in monomial:
                product *= sizes[name] ** power
            total += coefficient * product
        return total

    def substitute(self, name: str, value: int | Fraction) -> Dim:
        """The expression with the symbol ``name`` set to ``value``."""
        return self.replace(name, Dim.constant(value))

    def replace(self, name: str, by: Dim) -> Dim:
        """The expression, of the same kind, with the expression ``by`` for the symbol ``name``."""
        if name not in self.symbols():
            return self
        out = Dim(())
        for monomial, coefficient in self.terms:
            factor = Dim([(tuple(f for f in monomial if f[0] != name), coefficient)])
            for _ in range(dict(monomial).get(name, 0)):
                factor = factor * by
            out = out + factor
        return type(self)(out.terms)

    def __add__(self, other: Dim | int) -> Dim:
        return Dim([*self.terms, *_terms(other)])

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return Dim((m, -c) for m, c in self.terms)

    def __sub__(self, other: Dim | int) -> Dim:
        return self + -Dim(_terms(other))

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __mul__(self, other: Dim | int | Fraction) -> Dim:
        right = [((), Fraction(other))] if isinstance(other, Fraction) else _terms(other)
        return Dim((_product(m, n), c * d) for m, c in self.terms for n, d in right)

    __rmul__ = __mul__

    def __truediv__(self, divisor: int) -> Dim:
        return Dim((m, c / divisor) for m, c in self.terms)

    def divide(self, divisor: Dim | int) -> Dim | None:
        """The exact quotient if ``divisor`` is a number or a single term that divides every term, or equals ``self``."""
        divisor = dim_of(divisor)
        if self == divisor:
            return Dim.constant(1)
        if len(divisor.terms) != 1:
            return None
        (monomial, coefficient) = divisor.terms[0]
        out = []
        for m, c in self.terms:
            powers = dict(m)
            for name, power in monomial:
                left = powers.get(name, 0) - power
                if left < 0:
                    return None
                powers[name] = left
            out.append((tuple(sorted((n, p) for n, p in powers.items() if p)), c / coefficient))
        return Dim(out)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        # The constant first reads best when something is taken from it ("96 - h/32"), last otherwise.
        order = sorted(self.terms, key=lambda t: (not t[0], t[0]))
        if len(order) > 1 and order[-1][1] > 0 and all(c < 0 for m, c in order if m):
            order = [order[-1], *order[:-1]]
        text = ""
        for monomial, coefficient in order:
            sign = "-" if coefficient < 0 else "+"
            text += f" {sign} " if text else ("-" if coefficient < 0 else "")
            text += _term_text(monomial, abs(coefficient))
        return text

    __repr__ = __str__


class Real(Dim):
    """A float in a program, as an expression: need not be whole. Never equal to a :class:`Dim`."""

    __slots__ = ()

    __hash__ = Dim.__hash__


Size = Dim | int
"""A size or integer literal: a plain int where it is the same at every size."""


def dim_of(value: Size) -> Dim:
    """``value`` as a :class:`Dim`."""
    return value if isinstance(value, Dim) else Dim.constant(value)


def dim_or_int(value: Size) -> Size:
    """``value``, as a plain int if no symbol occurs."""
    if isinstance(value, Dim):
        constant = value.as_int()
        return value if constant is None else constant
    return value


def _terms(value: Dim | int) -> tuple[tuple[Monomial, Fraction], ...]:
    return value.terms if isinstance(value, Dim) else (((), Fraction(value)),)


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted(powers.items()))


def _term_text(monomial: Monomial, coefficient: Fraction) -> str:
    factors = [name if power == 1 else f"{name}^{power}" for name, power in monomial]
    if coefficient.numerator != 1 or not factors:
        factors.insert(0, str(coefficient.numerator))
    text = "*".join(factors)
    return text if coefficient.denominator == 1 else f"{text}/{coefficient.denominator}"


def product_of(sizes: Iterable[Size]) -> Size:
    """All of them multiplied."""
    total: Dim = dim_of(1)
    for size in sizes:
        total = total * size
    return dim_or_int(total)
