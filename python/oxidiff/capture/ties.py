"""What may follow from what among sizes that are not free alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, islice, product
from math import prod

from .dim import Dim, dim_of
from .roundings import PATCHES, UNITS
from .sizes import Area, Rounded, Symbol, product_of

__all__ = ["PaddedTie", "padded_ties", "ties"]


def ties(bound: Sequence[Symbol]) -> Iterator[dict[str, Dim]]:
    """What may follow from what among sizes that are not free alone, the likeliest first: lengths from all other sizes, as
    those of position tables do from the edges of an image; lengths from one size; equal numbers of words; in
    models that draw squares only, the width of an image from its height."""
    # Nothing that is passed follows from what is read.
    sizes = [s for s in bound if not s.limit]
    edges = [s for s in sizes if s.role not in ("sequence", "batch")]
    for drivers in [edges, *([s] for s in sizes if edges != [s])]:
        followers = [s for s in bound if s.role == "sequence" and s not in drivers]
        forms = [[*_following(s, drivers, followers), None] for s in followers]
        for chosen in islice(product(*forms), _MAX_TIES):
            tied = {s.name: form for s, form in zip(followers, chosen, strict=True) if form is not None}
            if tied and not any(form.symbols() & tied.keys() for form in tied.values()):
                yield tied
    # Several images of one prompt have as many words each: a program may ask whether all have.
    reads = [s for s in bound if s.limit]
    batches = [s.value for s in bound if s.role == "batch"]
    if len({s.value for s in reads}) == 1 < len(reads) and batches == [len(reads)]:
        yield {s.name: Dim.symbol(reads[0].name) for s in reads[1:]}
    sides = [s for s in bound if s.role == "spatial"]
    if len(sides) == 2 and sides[0].value == sides[1].value:
        yield {sides[1].name: Dim.symbol(sides[0].name)}


_MAX_TIES = 16
"""How many ways are tried in which several lengths may follow from the same sizes."""
_MAX_PATCH = 32
"""Pixels along an edge that become one token, at most."""


def _following(follower: Symbol, drivers: Sequence[Symbol], others: Sequence[Symbol]) -> list[Dim]:
    """What a length may be that other sizes seem to decide, the likeliest first: one of them; the product of several, in
    patches; one of them and a token beside it; so many per sample of a batch; such a product and another length, of text
    and image in one sequence, with a token of the time beside these or not."""
    length, drivers = int(follower.value), [s for s in drivers if isinstance(s.value, int)]
    found: list[tuple[int, int, Dim]] = []
    texts = [s for s in others if s is not follower]
    for other, more in ((None, 0), *((s, 0) for s in texts), *((s, 1) for s in texts)):
        beside = dim_of(0) if other is None else Dim.symbol(other.name) + more
        rest = length if other is None else length - int(other.value) - more
        for count in (1, 2, 3):
            for chosen in combinations(drivers, count):
                whole = prod(int(s.value) for s in chosen)
                patch = next((1 << log for log in range(count * _MAX_PATCH.bit_length()) if rest << log == whole), None)
                if patch is None or rest <= 0:
                    continue
                rank = 5 + more if other is not None else 0 if count == 1 == patch else 4 - count
                found.append((rank, patch, product_of(chosen) * Fraction(1, patch) + beside))
    for symbol in drivers:
        step = length - int(symbol.value)
        if abs(step) == 1:
            found.append((4, 0, Dim.symbol(symbol.name) + step))
        if symbol.role == "batch" and length % symbol.value == 0:
            found.append((4, 1, Dim.symbol(symbol.name) * int(length // symbol.value)))
    return [form for _, _, form in sorted(found, key=lambda item: item[:2])]


@dataclass(frozen=True, slots=True)
class PaddedTie:
    """A length that is that of an image's tokens, of a text, or of both together, each padded to a multiple.

    Attributes:
        name: The length's symbol.
        form: What it is, of symbols and of numbers of units.
        rounded: The text.
        area: The image.
        sides: The symbols of the image's sides.
        patch: Pixels along an edge of the image that are one token.
    """

    name: str
    form: Dim
    rounded: tuple[Rounded, ...] = ()
    area: Area | None = None
    sides: tuple[Symbol, ...] = ()
    patch: int = 1

    def names(self) -> set[str]:
        """The symbols that take part."""
        return {self.name, *(r.of for r in self.rounded), *(s.name for s in self.sides)}


def padded_ties(bound: Sequence[Symbol], free: Sequence[Symbol], used: Iterable[str]) -> Iterator[PaddedTie]:
    """What lengths among sizes that are not free alone may be: an image, a text, or both, padded to multiples of one unit.
    The smallest units come first: a smaller one than the program's shows at once, a larger one serves fewer sizes.

    Args:
        bound: The sizes.
        free: Those that are. A text may be as long as its padding alone.
        used: Names of symbols.
    """
    used = {*used}
    lengths = [s for s in bound if s.role == "sequence" and not s.limit]
    free = [s for s in free if s.role == "sequence" and not s.limit]
    sides = tuple(s for s in bound if s.role == "spatial")
    area_name = "".join(s.name for s in sides) + "r"
    # What is padded to an even number has one token less or as many: a length of its own.
    for unit, follower in product(UNITS[2:], lengths):
        texts = [s for s in (*lengths, *free) if s is not follower and f"{s.name}r" not in used]
        images: list[tuple[int, Area] | None] = [None]
        for patch in PATCHES if len(sides) == 2 and area_name not in used else ():
            area = Area(area_name, product_of(sides) / patch**2, unit)
            if all(int(s.value) % patch == 0 for s in sides):
                is_full = area.is_full({s.name: s.value for s in sides})
                images.append((patch, Area("", area.of, unit) if is_full else area))
        for image, text in product(images, [None, *texts]):
            rest, form, rounded = int(follower.value), dim_of(0), None
            if image is not None:
                units = image[1].at({s.name: s.value for s in sides})
                rest -= units * unit
                form += Dim.symbol(image[1].name) * unit if image[1].is_named() else image[1].of
            if text is not None:
                units = -(-int(text.value) // unit)
                rest -= units * unit
                name = text.name if units * unit == text.value else f"{text.name}r"
                rounded = Rounded(name, text.name, unit)
                form += Dim.symbol(name) * (unit if rounded.is_named() else 1)
            if rest or form == dim_of(0):
                continue
            if image is None:
                yield PaddedTie(follower.name, form, (rounded,) if rounded else ())
            else:
                yield PaddedTie(follower.name, form, (rounded,) if rounded else (), image[1], sides, image[0])
