"""Solving observed integers as expressions of sizes."""

from fractions import Fraction

import pytest

from oxidiff.capture.dim import Dim, Real
from oxidiff.capture.fit import denominators, fit_all, fit_floats

POINTS = [
    {"b": 1, "h": 64, "w": 64, "s": 77},
    {"b": 2, "h": 192, "w": 128, "s": 71},
    {"b": 3, "h": 128, "w": 320, "s": 181},
    {"b": 67, "h": 320, "w": 192, "s": 389},
]
B, H, W, S = (Dim.symbol(name) for name in "bhws")


def values(form, points=POINTS):
    return tuple(form.evaluate(p) for p in points)


@pytest.mark.parametrize(
    "form",
    [
        B, H / 8, B * 2, H * W / 64, B * H * W / 16, S + H * W / 4, 96 - H / 32, H + W, S + 256, B * S, B * (S + 1),
        H * W / 4 + S + 3, H / 2 + 1, B * H * W * S, S - 1, H * H,
    ],
    ids=str,
)  # fmt: skip
def test_forms_are_found_from_their_values(form):
    vector = values(form)
    known = [values(f) for f in (H, W, S, B, H * W / 4, S + 1)]
    assert fit_all([*known, vector], POINTS)[vector] == form


def test_given_sizes_are_found_in_sums_and_products():
    """Of three images in one sequence, there are more products than are tried."""
    tokens = H * W + B * S + H * S
    vectors = [values(form) for form in (tokens, tokens + W, tokens * B)]
    assert fit_all(vectors, POINTS)[vectors[0]] is None
    found = fit_all(vectors, POINTS, [tokens, Dim.symbol("other") + 1])
    assert [found[vector] for vector in vectors] == [tokens, tokens + W, tokens * B]


def test_odd_sizes_give_products_of_affine_forms():
    points = [{"b": b, "h": h, "w": w} for b, h, w in ((1, 65, 63), (2, 193, 127), (3, 129, 319), (67, 321, 191))]
    half_h, half_w = H / 2 + Fraction(1, 2), W / 2 + Fraction(1, 2)
    wanted = B * half_h * half_w
    vectors = [values(f, points) for f in (half_h, half_w, wanted)]
    found = fit_all(vectors, points)
    assert found[vectors[2]] == wanted
    held_out = {"b": 5, "h": 17, "w": 33}
    assert found[vectors[2]].evaluate(held_out) == 5 * 9 * 17


def test_constants_stay_ints():
    assert fit_all([(7, 7, 7, 7)], POINTS) == {(7, 7, 7, 7): 7}


def test_what_is_no_form_is_not_found():
    assert fit_all([(3, 1, 4, 1)], POINTS)[(3, 1, 4, 1)] is None
    assert fit_all([(9, 14, 11, 18)], POINTS)[(9, 14, 11, 18)] is None


def test_floats_are_affine_in_one_number():
    points = [{"t": 0.3}, {"t": 0.425}, {"t": 1.425}, {"t": 2.925}]
    column = tuple(1 - p["t"] for p in points)
    found = fit_floats([column, (0.5,) * 4, (0.1, 0.7, 0.2, 0.9)], points)
    assert found[column] == Real((1 - Dim.symbol("t")).terms)
    assert found[(0.5,) * 4] == 0.5
    assert found[(0.1, 0.7, 0.2, 0.9)] is None


def test_denominators_decide_the_classes():
    moduli = denominators([H / 8, W / 2, H * W / 64], "hw")
    assert moduli == {"h": 32, "w": 2}, "what h/8 and w/2 do not cover of h*w/64 is put on a symbol"
    assert denominators([B, S], "bs") == {"b": 1, "s": 1}


class TestDim:
    def test_canonical(self):
        assert H + W == W + H
        assert hash(H + W) == hash(W + H)
        assert H - H == 0
        assert (H + 1) * (H - 1) == H * H - 1
        assert Dim.constant(3) == 3
        assert hash(Dim.constant(3)) == hash(3)

    @pytest.mark.parametrize(
        ("form", "text"),
        [(H / 8, "h/8"), (B * H * W / 64, "b*h*w/64"), (96 - H / 32, "96 - h/32"), (H * H, "h^2"), (-H, "-h"),
         (Dim.constant(0), "0"), (S + 1, "s + 1"), (H * 3 / 2, "3*h/2")],
    )  # fmt: skip
    def test_text(self, form, text):
        assert str(form) == text

    def test_a_size_that_is_not_whole_is_an_error(self):
        with pytest.raises(ValueError, match="not whole"):
            (H / 8).evaluate({"h": 4})

    def test_division(self):
        assert (H * W / 4).divide(W) == H / 4
        assert (H * W).divide(H * W) == 1
        assert H.divide(W) is None

    def test_substitution(self):
        assert (H * W / 8 + S).substitute("h", 16) == W * 2 + S
