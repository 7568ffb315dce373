"""Integers observed at several sizes, solved as expressions of those sizes.

The forms are tried from simple to complex and only accepted when they hold at *every* point, of which there are always
more than the form has unknowns. Later forms build on earlier ones: a convolution's ``h/2 + 1/2`` is solved on its own
shape, so that ``b*(h/2 + 1/2)*(w/2 + 1/2)`` is found as a product of three known factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from math import gcd, lcm

from .dim import Dim, Real, Size, dim_of

__all__ = ["denominators", "fit_all", "fit_floats"]

Vector = tuple[int, ...]

_MAX_DEGREE = 4
_MAX_DENOMINATOR = 1 << 14
_MAX_SUM_BASIS = 64
_MAX_FACTOR = 64
_MAX_SUM_SYMBOLS = 12


def fit_all(
    vectors: Iterable[Vector], points: Sequence[Mapping[str, int]], given: Iterable[Dim] = ()
) -> dict[Vector, Size | None]:
    """Solves each vector of values (one entry per point); ``None`` where no form holds.

    Args:
        vectors: Observed values; ``vector[i]`` was seen at ``points[i]``.
        points: The symbols' values.
        given: What sizes of the call are known to be: sums of more products than are tried here.
    """
    return _Fitter(points, given).run(vectors)


class _Fitter:
    def __init__(self, points: Sequence[Mapping[str, int]], given: Iterable[Dim] = ()) -> None:
        self.points = points
        names = sorted(points[0]) if points else []
        self.symbols: list[tuple[Dim, Vector]] = [
            (Dim.symbol(name), vector)
            for name in names
            if len(set(vector := tuple(point[name] for point in points))) > 1
        ]
        self.known: dict[Vector, Dim] = {vector: dim for dim, vector in self.symbols}
        # Factors for products: the symbols, and the affine forms found on the way.
        self.factors: list[tuple[Dim, Vector]] = list(self.symbols)
        for form in given:
            values = [form.exact(point) for point in points] if form.symbols() <= set(names) else []
            if len(set(values)) > 1 and all(value.denominator == 1 for value in values):
                self.learn(form, tuple(map(int, values)))

    def run(self, vectors: Iterable[Vector]) -> dict[Vector, Size | None]:
        found: dict[Vector, Size | None] = {}
        rest: list[Vector] = []
        # A length before the end of a slice that counts from behind: that is then known by it.
        for vector in sorted(set(vectors), key=lambda v: (max(map(abs, v)), v[0] < 0, v)):
            if all(value == vector[0] for value in vector):
                found[vector] = vector[0]
            elif (form := self.known.get(vector) or self.affine(vector)) is not None:
                self.learn(form, vector)
                found[vector] = form
            else:
                rest.append(vector)
        for solve in (self.product, self.sum):
            unsolved = []
            for vector in rest:
                form = solve(vector)
                if form is None:
                    unsolved.append(vector)
                else:
                    self.known.setdefault(vector, form)
                    found[vector] = form
            rest = unsolved
        found.update((vector, None) for vector in rest)
        return found

    def learn(self, form: Dim, vector: Vector) -> None:
        if vector in self.known:
            return
        self.known[vector] = form
        if len(form.terms) > 1 and all(v > 0 for v in vector):
            self.factors.append((form, vector))

    def affine(self, vector: Vector) -> Dim | None:
        """``c*s + k`` for one symbol ``s``."""
        for dim, values in self.symbols:
            solved = _line(values, vector)
            if solved is not None:
                slope, offset = solved
                return dim * slope + Dim.constant(offset)
        return None

    def product(self, vector: Vector) -> Dim | None:
        """``c*f1*f2*...`` for known factors, simplest first."""
        if any(v == 0 for v in vector):
            return None
        for degree in range(1, _MAX_DEGREE + 1):
            pool = self.factors if degree <= 2 else self.factors[:24]
            for chosen in combinations_with_replacement(pool, degree):
                ratio = _ratio([v for _, v in chosen], vector)
                if ratio is not None:
                    form = dim_of(1)
                    for dim, _ in chosen:
                        form = form * dim
                    return form * ratio
        return None

    def sum(self, vector: Vector) -> Dim | None:
        """``c1*f1 + c2*f2 + k`` for known forms, ``s1 + s2 + s3 + k`` for symbols, or four."""
        basis = sorted(self.known.items(), key=lambda item: (len(item[1].terms), str(item[1])))[:_MAX_SUM_BASIS]
        for (first, dim1), (second, dim2) in combinations(basis, 2):
            # Whole coefficients of small size first: lengths are concatenated far more often than they are scaled.
            for a, b in ((1, 1), (1, -1), (-1, 1)):
                rest = {v - a * x - b * y for v, x, y in zip(vector, first, second, strict=True)}
                if len(rest) == 1:
                    return dim1 * a + dim2 * b + rest.pop()
        for count in (3, 4) if len(self.symbols) <= _MAX_SUM_SYMBOLS else (3,):
            for chosen in combinations(self.symbols, count):
                # Several sequences in one.
                rest = {v - sum(parts) for v, *parts in zip(vector, *(values for _, values in chosen), strict=True)}
                if len(rest) == 1:
                    return sum((dim for dim, _ in chosen), start=dim_of(rest.pop()))
        for vector1, dim1 in basis:
            solved = _line(vector1, vector)
            if solved is not None:
                return dim1 * solved[0] + Dim.constant(solved[1])
        for (first, dim1), (second, dim2) in combinations(basis, 2):
            plane = _plane(first, second, vector)
            if plane is not None:
                return dim1 * plane[0] + dim2 * plane[1] + Dim.constant(plane[2])
        return None


def _ratio(factors: Sequence[Vector], vector: Vector) -> Fraction | None:
    """``c`` with ``vector == c * product(factors)`` at every point."""
    ratio: Fraction | None = None
    for i, value in enumerate(vector):
        product = 1
        for factor in factors:
            product *= factor[i]
        if product == 0:
            return None
        if ratio is None:
            ratio = Fraction(value, product)
            if not _is_plain(ratio):
                return None
        elif ratio.numerator * product != value * ratio.denominator:
            return None
    return ratio


def _line(xs: Vector, ys: Vector) -> tuple[Fraction, Fraction] | None:
    """``(c, k)`` with ``ys == c * xs + k`` at every point, if there are at least three distinct ``xs``."""
    if len(set(xs)) < min(3, len(xs)):
        return None
    x0, y0 = xs[0], ys[0]
    other = next((i for i, x in enumerate(xs) if x != x0), None)
    if other is None:
        return None
    slope = Fraction(ys[other] - y0, xs[other] - x0)
    if not slope or not _is_plain(slope):
        return None
    offset = y0 - slope * x0
    if all(slope * x + offset == y for x, y in zip(xs, ys, strict=True)):
        return slope, offset
    return None


def _plane(xs: Vector, ys: Vector, zs: Vector) -> tuple[Fraction, Fraction, Fraction] | None:
    """``(a, b, k)`` with ``zs == a*xs + b*ys + k`` at every point; needs a point more than unknowns."""
    if len(zs) < 4:
        return None
    dx, dy, dz = ([v - vector[0] for v in vector[1:]] for vector in (xs, ys, zs))
    for i, j in combinations(range(len(dx)), 2):
        det = dx[i] * dy[j] - dx[j] * dy[i]
        if det:
            a = Fraction(dz[i] * dy[j] - dz[j] * dy[i], det)
            b = Fraction(dx[i] * dz[j] - dx[j] * dz[i], det)
            k = zs[0] - a * xs[0] - b * ys[0]
            holds = all(a * x + b * y + k == z for x, y, z in zip(xs, ys, zs, strict=True))
            is_plain = _is_halved(a) and _is_halved(b) and k.denominator <= max(a.denominator, b.denominator)
            return (a, b, k) if holds and is_plain else None
    return None


def _is_plain(value: Fraction) -> bool:
    """Coefficients of real programs: numerators are channel counts, denominators products of strides."""
    return value.denominator <= _MAX_DENOMINATOR


def _is_halved(value: Fraction) -> bool:
    """Coefficients of sums of known forms, where other factors are in the forms: with any at all, a sum of two forms out of
    many fits whatever four points there are."""
    return (
        value.denominator <= _MAX_FACTOR and abs(value.numerator) <= _MAX_FACTOR and value.denominator.bit_count() == 1
    )


def denominators(forms: Iterable[Dim], symbols: Iterable[str]) -> dict[str, int]:
    """The modulus per symbol whose residues decide whether the forms come out whole.

    Single-symbol forms give each symbol's own modulus. A product such as ``h*w/64`` is covered if the moduli of its
    symbols multiply to a multiple of its denominator; what is missing is put on its first symbol, which can only split
    classes finer than necessary.
    """
    modulus = dict.fromkeys(symbols, 1)
    mixed = []
    for form in forms:
        names = form.symbols()
        if len(names) == 1:
            name = next(iter(names))
            for monomial, coefficient in form.terms:
                if monomial:
                    modulus[name] = lcm(modulus[name], coefficient.denominator)
        else:
            mixed.append(form)
    for form in mixed:
        for monomial, coefficient in form.terms:
            covered = 1
            for name, power in monomial:
                covered *= modulus[name] ** power
            missing = coefficient.denominator // gcd(coefficient.denominator, covered)
            if missing > 1 and monomial:
                modulus[monomial[0][0]] *= missing
    return modulus


def fit_floats(
    vectors: Iterable[tuple[float, ...]], points: Sequence[Mapping[str, float]]
) -> dict[tuple[float, ...], Dim | float | None]:
    """Solves vectors of floats as ``c*s + k`` of one symbol, allowing for the rounding of Python's own arithmetic."""
    names = sorted(points[0]) if points else []
    symbols = [(name, [float(p[name]) for p in points]) for name in names]
    out: dict[tuple[float, ...], Dim | float | None] = {}
    for vector in set(vectors):
        if all(v == vector[0] for v in vector):
            out[vector] = vector[0]
            continue
        out[vector] = None
        for name, values in symbols:
            form = _float_line(name, values, vector)
            if form is not None:
                out[vector] = form
                break
    return out


def _float_line(name: str, xs: Sequence[float], ys: Sequence[float]) -> Dim | None:
    other = next((i for i, x in enumerate(xs) if x != xs[0]), None)
    if other is None:
        return None
    slope = Fraction((ys[other] - ys[0]) / (xs[other] - xs[0])).limit_denominator(10_000)
    offset = Fraction(ys[0] - float(slope) * xs[0]).limit_denominator(10_000)
    for x, y in zip(xs, ys, strict=True):
        # Rounding is in proportion to the terms: next to small ones a small offset is no rounding.
        if abs(float(slope) * x + float(offset) - y) > 1e-12 * max(abs(float(slope) * x), abs(float(offset)), abs(y)):
            return None
    return Real((Dim.symbol(name) * slope + Dim.constant(offset)).terms) if slope else None
