"""What a program asks of its sizes decides which calls a graph serves."""

from __future__ import annotations

import builtins
import contextlib
import copy
import itertools
import math
import operator
import pickle
import sys
import types
from collections.abc import Callable
from math import sqrt as root
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nets
import oxidiff
from oxidiff.capture import Capturer
from oxidiff.capture.dim import Dim
from oxidiff.capture.guards import FUNCTIONS, OPERATIONS, Guard, Ledger, TracedFloat, TracedInt, plain
from oxidiff.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_long_capture")

h, w = Dim.symbol("h"), Dim.symbol("w")


def ledger_of(height: int, width: int) -> tuple[Ledger, TracedInt, TracedInt]:
    ledger = Ledger()
    one, other = ledger.shape(0, (height, width))
    return ledger, one, other


def guards_of(ledger: Ledger, positive: tuple[str, ...] = ("h", "w")) -> dict[str, bool]:
    found = ledger.guards(lambda _, dim: (h, w)[dim], lambda place: ("float", Dim.symbol("t")), set(positive))
    return {str(guard): outcome for guard, outcome in found}


BINARY = ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "and", "or", "xor", "lshift", "rshift")


@pytest.mark.parametrize("name", BINARY)
def test_traced_numbers_compute_as_plain_ones(name: str) -> None:
    function = OPERATIONS[name]
    ledger, one, _ = ledger_of(7, 12)
    for left, right in ((one, 3), (3, one), (one, one)):
        made, expected = function(left, right), function(plain(left), plain(right))
        assert made == expected
        assert type(plain(made)) is type(expected)
        assert isinstance(made, (TracedInt, TracedFloat)), (name, left, right)
    if name not in ("and", "or", "xor", "lshift", "rshift"):
        # A float on the left asks nobody.
        made = function(one, 2.5)
        assert made == function(7, 2.5)
        assert type(made) is TracedFloat
    assert ledger.is_open


def test_roundings_and_the_rest_are_as_of_plain_numbers() -> None:
    ledger, one, other = ledger_of(7, 12)
    for number in (one / 2, -one / 2, one * 1.0):
        for function in (math.ceil, math.floor, round, math.trunc):
            assert type(function(number)) is TracedInt
            assert function(number) == function(plain(number))
        assert round(number, 1) == round(plain(number), 1)
        assert number.is_integer() == plain(number).is_integer()
        assert divmod(number, 2) == divmod(plain(number), 2)
        assert int(number) == int(plain(number))
        assert type(int(number)) is int
    assert (abs(-one), +one, round(one), divmod(one, 4), divmod(40, one)) == (7, 7, 7, (1, 3), (5, 5))
    assert (min(one, other), max(one, other), sorted((other, one))) == (7, 12, [7, 12])
    assert [*range(one)] == [*range(7)]
    assert ("a" * one, [0] * one, f"{one:>3}", str(one), hash(one)) == ("a" * 7, [0] * 7, "  7", "7", hash(7))
    assert one != "7"
    assert one is not None
    assert type(pickle.loads(pickle.dumps(one))) is int
    assert copy.deepcopy(one) is one
    assert ledger.is_open


def test_comparisons_are_guards() -> None:
    ledger, height, width = ledger_of(64, 48)
    assert height > width
    assert height % 8 == 0
    assert not height // 7 > width + 3
    assert not (height * width) ** 0.5 <= 10
    found = guards_of(ledger)
    assert found == {
        "-h + w < 0": True,
        "mod(h, 8) == 0": True,
        "w + 3 < floordiv(h, 7)": False,
        "10 < pow(h*w, 0.5)": True,
    }


def test_what_has_one_answer_is_no_guard() -> None:
    ledger, height, width = ledger_of(64, 48)
    assert height
    assert height + width > 1
    assert height * 8 % 8 == 0
    assert height - height == 0
    assert not height * -1 > 0
    assert guards_of(ledger) == {}
    # Python numbers may be negative.
    assert guards_of(ledger, ()) == {"h == 0": False, "1 - h - w < 0": True, "h < 0": False}


def test_guards_hold_where_python_would_say_so() -> None:
    """Every operation, with plain numbers and as a guard."""
    for height, width in itertools.product((1, 6, 7, 64), repeat=2):
        asked: list[Callable[[Any, Any], bool]] = [
            lambda a, b: a % 6 == 0,
            lambda a, b: -a // 5 < -b,
            lambda a, b: (a / b) * 2 > 3,
            lambda a, b: math.ceil(a / 4) == b // 4,
            lambda a, b: round(a * 0.3) >= b - 2,
            lambda a, b: (a & (a - 1)) == 0,
            lambda a, b: a**2 + b > 4096,
            lambda a, b: abs(a - b) < 3,
            lambda a, b: a >> 2 == 16,
            lambda a, b: (a * b / 3).is_integer(),
        ]
        for ask in asked:
            fresh, one, other = ledger_of(64, 48)
            here = ask(one, other)
            (found,) = fresh.guards(lambda _, dim: (h, w)[dim], lambda _: None, {"h", "w"})
            guard, outcome = found
            same = ask(height, width) == here
            assert (guard.holds({"h": height, "w": width}) is outcome) is same, (str(guard), height, width)


def test_a_number_of_another_trace_is_none_of_this() -> None:
    ledger, height, _ = ledger_of(64, 48)
    _, stale, _ = ledger_of(64, 48)
    assert not height < stale
    assert type(height + stale) is int
    assert guards_of(ledger) == {}
    ledger.is_open = False
    assert height > 3
    assert type(height + 3) is int
    assert guards_of(ledger) == {}


def test_a_long_sum_is_left_out() -> None:
    ledger, height, _ = ledger_of(64, 48)
    total: Any = 0
    for i in range(5000):
        total = total + height // (i + 2)
    assert total > 3
    assert guards_of(ledger) == {}


def test_what_no_size_can_be_is_left_out() -> None:
    ledger, height, width = ledger_of(64, 48)
    assert height < sys.maxsize
    assert math.prod([height] * 9) > width
    assert height * True > 63
    assert height > np.float64(1.5)
    assert guards_of(ledger) == {"63 - h < 0": True, "1.5 < h": True}
    assert all(type(e) in (int, float, Dim) for g in ledger_guards(ledger) for e in (g.left, g.right))


def ledger_guards(ledger: Ledger) -> list[Guard]:
    return [guard for guard, _ in ledger.guards(lambda _, dim: (h, w)[dim], lambda _: None, {"h", "w"})]


def test_a_guard_of_nobody_knows_whom_is_bounded() -> None:
    for operation in ("pow", "lshift"):
        assert Guard("lt", (operation, h, 1 << 40), 3).holds({"h": 3}) is None
    assert Guard("lt", ("floordiv", h, 0), 3).holds({"h": 3}) is None


# -- modules ---------------------------------------------------------------------------------------------------------------


class Asks(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.function(x, *rest)


def most_rows(x: Tensor, count: int) -> Tensor:
    return x[:, :, : min(count, x.shape[2])] * 2


def rows_up_to(x: Tensor, count: int) -> Tensor:
    # Nobody asks, but torch does not go beyond the end.
    return x[:, :, :count] * 2


def of_one_shape(x: Tensor, other: Tensor) -> Tensor:
    return x + 1 if x.shape[2] == other.shape[3] else x - other.mean()


def at_multiples_of_77(x: Tensor) -> Tensor:
    return x.flip(3) if x.shape[3] % 77 == 0 else x + 1


def wide_ones(x: Tensor) -> Tensor:
    return x * 2 if x.shape[3] / x.shape[2] > 2.5 else x


def squares(x: Tensor) -> Tensor:
    side = int((x.shape[2] * x.shape[3]) ** 0.5)
    return x.reshape(*x.shape[:2], side, side) if side * side == x.shape[2] * x.shape[3] else x.flatten(2)


def turned(x: Tensor) -> Tensor:
    return x.transpose(2, 3) * 2 if int(x.shape[2]) > int(x.shape[3]) else x - 1


def late(x: Tensor, time: float) -> Tensor:
    return x * time if time > 0.65 else x - time


def plain_late(x: Tensor, time: float) -> Tensor:
    time = float(time)
    return x * time if time > 120 else x - time


def padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, -(rows * x.shape[3]) % 6))


def wholes(x: Tensor) -> Tensor:
    return x.flip(3) if int(x.shape[3]) % 13 == 4 else x + 1


def members(x: Tensor) -> Tensor:
    return x.flip(3) if x.shape[3] in {17, 30, 43} else x + 1


def texts(x: Tensor) -> Tensor:
    return x.flip(3) if f"{x.shape[3]}".endswith("7") or repr(x.shape[3])[0] == "4" or str(x.shape[3])[-1] == "1" else x


def attributes(x: Tensor) -> Tensor:
    return x.flip(3) if x.shape[3].real % 13 == 4 or round(x.shape[3], -1) == 60 else x + 1


def of_numpy(x: Tensor) -> Tensor:
    return x.flip(3) if np.array(x.shape)[3] % 13 == 4 else x + 1


def strides(x: Tensor) -> Tensor:
    return x.flip(3) if x.stride(2) % 13 == 4 or x.transpose(2, 3).stride()[2] % 17 == 9 else x + 1


def bytes_of(x: Tensor) -> Tensor:
    return x.flip(3) if x.nbytes % 13 == 10 else x + 1


def lengths(x: Tensor) -> Tensor:
    return x.flip(2) if len(x[0, 0]) % 13 == 4 else x + 1


def plain_lengths(x: Tensor) -> Tensor:
    # What ``__len__`` returns, Python itself makes a plain int.
    return x.flip(2) if operator.length_hint(x[0, 0]) % 13 == 4 else x + 1


def grid(x: Tensor) -> Tensor:
    rows, columns = (torch.linspace(-1, 1, n) for n in x.shape[2:])
    return x + rows[:, None] * columns


def placed(x: Tensor) -> Tensor:
    start, count = x.shape[3] // 2, int(x.shape[2])
    return x + POSITIONS[start : start + count, None]


def far(x: Tensor, n: int) -> Tensor:
    count, start = int(x.shape[2]), n // 256
    return x * start + POSITIONS[start : start + count, None]


def longest(x: Tensor, height: int, width: int) -> Tensor:
    start, count = max(height // 2, width // 3), int(x.shape[2])
    return x[..., :width] + POSITIONS[start : start + count, None]


def other_side(x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    return x * (width if height % 4 == 0 else height)


def either_side(x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    return x.flatten(2)[:, :, : width if (height + width) % 2 == 0 else height]


def wider_by_half(x: Tensor) -> Tensor:
    # Python computes the number on the right without asking the size.
    return x.flip(3) if x.shape[3] > 1.5 * x.shape[2] else x + 1


def common(x: Tensor) -> Tensor:
    return x.flip(3) if math.gcd(x.shape[2], x.shape[3]) == 8 else x + 1


def by_class(x: Tensor, n: int) -> Tensor:
    return x * 2 if n.__class__ is int and x.shape[0].__class__ is int else x + 1


def inverted(x: Tensor) -> Tensor:
    return x.flip(3) if ~x.shape[3] == -9 else x + 1


def modular(x: Tensor) -> Tensor:
    return x.flip(3) if pow(x.shape[3], 3, 7) == 1 else x + type(x.shape[3])(8)


def of_sine(x: Tensor, t: float) -> Tensor:
    return x.flip(3) if math.sin(t) > 0.5 else x + 1


def rounded(x: Tensor, t: float) -> Tensor:
    return x.flip(3) if round(t, 1) == 0.2 else x + 1


def saturated(x: Tensor, t: float) -> Tensor:
    return x * math.tanh(t)


POSITIONS = torch.arange(1000.0)

UNSEEN = (wholes, members, texts, attributes, of_numpy, strides, bytes_of)


def of_library(function: Any) -> Callable[..., Tensor]:
    """The same function in a library of models."""
    return types.FunctionType(
        function.__code__, {**globals(), "__name__": "diffusers.models"}, f"library_{function.__name__}"
    )


CASES: dict[Callable[..., Tensor], list[tuple[Any, ...]]] = {
    most_rows: [((20, 30), 7), ((20, 30), 40), ((8, 30), 7), ((8, 30), 9), ((7, 9), 7), ((30, 8), 13)],
    rows_up_to: [((20, 30), 7), ((20, 30), 40), ((8, 30), 7), ((8, 30), 9), ((7, 9), 7), ((30, 8), 13)],
    of_one_shape: [((20, 30), (9, 7)), ((20, 30), (9, 20)), ((7, 40), (8, 7)), ((40, 7), (8, 8)), ((8, 8), (8, 8))],
    at_multiples_of_77: [((8, 40),), ((8, 77),), ((9, 154),), ((77, 76),), ((8, 385),)],
    wide_ones: [((20, 20),), ((20, 51),), ((20, 50),), ((10, 24),), ((10, 26),), ((8, 64),)],
    squares: [((4, 6),), ((4, 9),), ((8, 8),), ((2, 18),), ((5, 20),), ((7, 9),)],
    turned: [((40, 47),), ((40, 33),), ((47, 40),), ((39, 31),), ((39, 95),), ((103, 95),)],
    of_library(turned): [((40, 47),), ((40, 33),), ((47, 40),), ((39, 31),), ((39, 95),), ((103, 95),)],
    late: [((8, 8), 0.9), ((8, 8), 0.5), ((9, 8), 0.7), ((8, 8), 0.65), ((9, 8), 0.1), ((8, 8), 0.66)],
    plain_late: [((8, 8), 999.0), ((8, 8), 800.0), ((8, 8), 90.0), ((9, 8), 121.0), ((9, 8), 0.5), ((8, 8), 3000.0)],
    padded: [((8, 8), 2), ((8, 9), 3), ((9, 8), 3), ((8, 10), 5), ((7, 7), 7), ((7, 5), 4), ((8, 8), 5)],
    **{f: [((8, w),) for w in (16, 17, 26, 30, 43, 61, 44, 81, 121, 122)] for f in UNSEEN},
    lengths: [((16, 8),), ((17, 8),), ((29, 8),), ((30, 9),), ((43, 8),), ((44, 8),)],
    plain_lengths: [((16, 8),), ((17, 8),), ((29, 8),), ((30, 9),), ((43, 8),), ((44, 8),)],
    placed: [((40, 48),), ((24, 48),), ((48, 48),), ((30, 60),), ((7, 14),), ((7, 13),), ((80, 40),), ((41, 81),)],
    of_library(placed): [((40, 80),), ((24, 48),), ((48, 48),), ((30, 60),), ((7, 14),), ((7, 13),), ((20, 40),)],
    far: [((256, 4), 5), ((320, 4), 5), ((320, 4), 300), ((300, 4), 260), ((256, 4), 257), ((256, 4), 520)],
    of_library(far): [((256, 4), 5), ((320, 4), 5), ((320, 4), 300), ((300, 4), 260), ((256, 4), 257), ((256, 4), 520)],
    longest: [((8, 300), *s) for s in ((4, 9), (30, 9), (31, 9), (7, 50), (60, 90), (61, 92), (12, 18), (40, 40))],
    of_library(longest): [((8, 300), *s) for s in ((4, 9), (30, 9), (31, 9), (7, 50), (60, 90), (61, 92), (2, 3))],
    other_side: [((9, 9),), ((16, 24),), ((24, 16),), ((9, 11),), ((16, 16),), ((8, 24),)],
    either_side: [((9, 9),), ((16, 24),), ((24, 16),), ((4, 7),), ((6, 8),), ((5, 9),)],
    wider_by_half: [((8, 6),), ((8, 16),), ((8, 8),), ((40, 64),), ((8, 10),), ((16, 16),), ((30, 46),)],
    common: [((6, 8),), ((16, 8),), ((8, 8),), ((64, 40),), ((10, 8),), ((16, 16),)],
    by_class: [((4, 6), 3), ((4, 6), 4), ((5, 7), 4)],
    inverted: [((4, 6),), ((4, 8),), ((4, 9),)],
    modular: [((4, n),) for n in (6, 8, 9, 11, 15)],
    of_sine: [((4, 6), t) for t in (0.5, 1.5, 3.0, 0.6, 7.0)],
    rounded: [((4, 6), t) for t in (0.5, 0.2, 0.24, 0.26, 0.16)],
    saturated: [((4, 6), t) for t in (0.7, 0.5, 30.0, 100.0, 0.5)],
    grid: [((4, 6),), ((1, 5),), ((5, 1),), ((1, 1),), ((3, 3),)],
}


@pytest.mark.parametrize("function", CASES, ids=[f.__name__ for f in CASES])
@torch.no_grad()
def test_a_call_that_goes_another_way_is_not_served(function: Callable[..., Tensor]) -> None:
    module = Asks(function)
    sizes = CASES[function]
    for order in (sizes, sizes[::-1], sizes[2:] + sizes[:2]):
        compiled = oxidiff.compile(module, cache=False, tune="off")
        for size, *rest in order:
            inputs = [torch.randn(2, 4, *size), *(torch.randn(2, 4, *r) if isinstance(r, tuple) else r for r in rest)]
            output, expected = compiled(*inputs), module(*inputs)
            assert output.shape == expected.shape, (size, rest)
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_a_trace_that_fails_at_its_results_leaves_nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frame held on to would be looked for in all that Python has, after each of the traces."""
    collected: list[int] = []
    compiled = oxidiff.compile(Asks(strides), cache=False, tune="off")
    monkeypatch.setattr("oxidiff.capture.trace.gc.collect", collected.append)
    for width in (16, 17, 30):
        compiled(torch.randn(2, 4, 8, width))
    assert oxidiff.report(compiled).captures == 3
    # What is young is told apart at each capture, and no more.
    assert collected == [0, 0, 0]


class Positioned(nn.Module):
    """Learned positions of at most 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("first", [2, 4, 5, 6, 9, 40])
@torch.no_grad()
def test_texts_of_few_tokens_are_one_program_with_those_of_a_whole_table(first: int) -> None:
    module = Positioned().eval()
    compiled = oxidiff.compile(module, cache=False, tune="off", strict=True)
    for length in (first, 3, 6, 17, 63, 64):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1
    with pytest.raises(RuntimeError, match="size of tensor"):
        compiled(torch.randn(2, 65, 3))


def middle(x: Tensor, n: int) -> Tensor:
    return x * sorted([3, n, 8])[1]


def ends(x: Tensor, n: int) -> Tensor:
    return torch.cat([x.flatten(1).split(n, 1)[0], x[:, :, max(x.shape[2] - n, 0) :].flatten(1)], 1)


def kept_or_not(x: Tensor, n: int) -> Tensor:
    return x * (n if x.shape[2] > 5 else 8)


def odd_ones(x: Tensor, n: int) -> Tensor:
    return torch.ones(max((x.shape[2] - n) % 2 or n or min(8, x.shape[2]), 1), 2).tril().sum() * x


def of_layers(x: Tensor, n: int) -> Tensor:
    for factor in [1.5, 2.5, 0.5, 3.0][:n]:
        x = x * factor
    return x


def zipped(x: Tensor, n: int) -> Tensor:
    return torch.stack([x * k for k, _ in zip((1.0, 2.0, 3.0), range(n), strict=False)])


INTS: dict[Callable[..., Any], list[tuple[int, int]]] = {
    # Where n is 8, both are the same number.
    (lambda x, n: x * min(n, 8)): [(4, 8), (4, 7), (4, 12), (4, 9), (4, 3)],
    (lambda x, n: x * min(n, 8) + n): [(4, 8), (4, 9), (4, 7), (4, 20), (4, 2)],
    (lambda x, n: x * min(n / 10, 1.0)): [(4, 10), (4, 9), (4, 11)],
    (lambda x, n: x * (n if n <= 8 else 8)): [(4, 8), (4, 9), (4, 7)],
    (lambda x, n: x[:, :, : min(n, 4)]): [(6, 4), (6, 3), (6, 5), (7, 4), (6, 2)],
    middle: [(4, 8), (4, 9), (4, 5), (4, 2), (4, 3)],
    kept_or_not: [(4, 8), (4, 9), (9, 8), (9, 3), (3, 11), (5, 2)],
    odd_ones: [(5, 1), (5, 16), (6, 16), (6, 8), (2, 3), (3, 1), (3, 2), (6, 6), (6, 5)],
    # What C reads: the end of a slice, how many parts there are.
    of_layers: [(4, 4), (4, 3), (4, 2), (4, 5), (4, 1)],
    ends: [(9, 90), (9, 12), (9, 8), (9, 3), (12, 9)],
    zipped: [(4, 4), (4, 3), (4, 2), (4, 9)],
    (lambda x, n: x * round(n, -1)): [(4, 12), (4, 14), (4, 3), (4, 99)],
}


@pytest.mark.parametrize("function", INTS, ids=range(len(INTS)))
@torch.no_grad()
def test_ints_below_and_beside_those_that_were_traced(function: Callable[..., Any]) -> None:
    calls = INTS[function]
    for order in (calls, calls[::-1], calls[2:] + calls[:2]):
        compiled = oxidiff.compile(Asks(function), cache=False, tune="off")
        for height, n in order:
            x = torch.randn(2, 3, height, 5)
            output, expected = compiled(x, n), function(x, n)
            assert output.shape == expected.shape, (height, n)
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def test_ints_that_count_down_need_no_trace_each() -> None:
    capturer = Capturer(lambda x, step: x * step + 1)
    graph = capturer.capture(capturer.call((torch.zeros(2, 4), 999), {}))
    assert graph.loose_numbers() == {"n"}
    # What a limit might be found in is bounded, as sizes are.
    capturer = Capturer(lambda x, n: of_layers(x, n) * n)
    graph = capturer.capture(capturer.call((torch.zeros(2, 4), 4), {}))
    assert graph.loose_numbers() == set()
    assert not graph.accepts({**graph.points[0], "n": 3})
    assert graph.accepts({**graph.points[0], "n": 30})


@torch.no_grad()
def test_numbers_that_are_returned_are_whole() -> None:
    """Half of a product is whole or not by both of its factors."""
    module = Asks(lambda x: (x * 2, x.shape[2] * x.shape[3] // 2))
    compiled = oxidiff.compile(module, cache=False, tune="off")
    for size in ((16, 16), (32, 31), (31, 32), (63, 20), (19, 63), (17, 8), (31, 31)):
        output, count = compiled(torch.ones(2, 4, *size))
        assert (count, type(count)) == (size[0] * size[1] // 2, int), size
        assert output.shape == (2, 4, *size)
    assert oxidiff.report(compiled).eager_calls == 0


def test_numbers_that_decide_nothing_stay_free() -> None:
    """A time that is compared with 1 alone needs no entry of its own for each of its values."""

    def scaled(x: Tensor, scale: float) -> Tensor:
        return x if scale == 1.0 else x * scale

    capturer = Capturer(scaled)
    graph = capturer.capture(capturer.call((torch.zeros(2, 4), 0.5), {}))
    assert graph.loose_numbers() == {"n"}
    capturer = Capturer(lambda x, time: x * time if time > 0.65 else x - time)
    graph = capturer.capture(capturer.call((torch.zeros(2, 4), 0.5), {}))
    assert graph.loose_numbers() == set()


@torch.no_grad()
def test_floats_that_leave_are_checked_further_and_further_out() -> None:
    def scaled(x: Tensor, time: float) -> Tensor:
        if time < 0:
            raise ValueError("a time is not negative")
        return x * float(time)

    module = Asks(scaled)
    compiled = oxidiff.compile(module, cache=False, tune="off")
    x = torch.randn(2, 4)
    taken = []
    for time in (*range(999, 0, -13), 0, *range(1000, 30_000, 501)):
        assert torch.equal(compiled(x, float(time)), module(x, float(time)))
        (variant,) = compiled._oxidiff.engines()[-1].variants
        taken.append(variant.graph.traces)
    assert taken[-1] - taken[0] <= 2 * (math.log(999, 4) + math.log2(30) + 3)
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (1, 0)


def test_order_of_sizes_is_no_part_of_a_class_where_nobody_asks() -> None:
    for size in ((40, 47), (39, 31)):
        capturer = Capturer(lambda x: x * 2)
        graph = capturer.capture(capturer.call((torch.zeros(2, 4, *size),), {}))
        assert graph.plan.ordered == ()
        assert graph.accepts(graph.plan.read((2, 4, 90, 80)) or {})
        assert graph.accepts(graph.plan.read((2, 4, 80, 90)) or {})


@pytest.mark.parametrize("is_library", [False, True])
def test_what_libraries_of_models_do_with_whole_numbers_is_no_guard(is_library: bool) -> None:
    """What is tested at many sizes needs no trace at each of them."""

    def shifted(x: Tensor) -> Tensor:
        return x[:, :, : int(x.shape[2]) // 2] * 2

    for function in (shifted, placed):
        capturer = Capturer(of_library(function) if is_library else function)
        graph = capturer.capture(capturer.call((torch.zeros(2, 4, 40, 48),), {}))
        assert graph.accepts(graph.plan.read((2, 4, 66, 56)) or {}) is is_library


def test_a_plain_int_is_the_number_that_left_as_so_much() -> None:
    def uses(height: int, width: int, solved: Any = ()) -> set[Any]:
        ledger, one, other = ledger_of(height, width)
        for number in (one, other):
            ledger.escape_to(number, "diffusers.models")
        ledger.use(one // 2 + 7)
        return ledger.uses(lambda _, dim: (h, w)[dim], lambda place: None, solved)

    half = ("floordiv", h, 2)
    assert uses(9, 7) == {("add", half, w)}
    # One that is as much by chance, or either of two; and what is divided by is no size.
    assert uses(9, 8) == uses(7, 7) == {("add", half, 7)}
    assert uses(9, 2) == {("add", half, 7)}
    # Nor is one that is solved as it was computed.
    assert uses(9, 7, {("add", half, 7)}) == {("add", half, 7)}
    assert uses(9, 7, None) == {("add", half, 7), ("add", half, w)}


def test_a_cached_program_serves_the_same_ways(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways and conditions are saved with a graph: another process is not to serve what this one would not."""
    path = tmp_path / "wide.oxg"
    for function in (wide_ones, rows_up_to, padded, plain_late, longest):
        module = Asks(function)
        first, *others = CASES[function]

        def inputs(case: tuple[Any, ...]) -> list[Any]:
            return [torch.randn(2, 4, *case[0]), *case[1:]]

        compiled = oxidiff.compile(module, cache=False, tune="off")
        compiled(*inputs(first))
        oxidiff.save_graph(compiled, path)
        loaded = oxidiff.compile(module, cache=False, tune="off")
        oxidiff.load_graph(loaded, path)
        for case in (first, *others):
            given = inputs(case)
            output, expected = loaded(*given), module(*given)
            assert output.shape == expected.shape, case
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def test_bounds_that_moved_are_those_of_the_graph_itself() -> None:
    """A copy that has other ways, if as many, asks anew."""
    capturer = Capturer(Asks(wider_by_half))
    graph = capturer.capture(capturer.call((torch.randn(2, 4, 8, 6),), {}))
    assert graph._strays()
    other = graph.unchecked()
    below = Guard("lt", h, 8)
    other.ways = {frozenset({(below, True), (Guard("lt", h * (k + 2), 8), True)}) for k in range(len(graph.ways))}
    assert len(other.ways) == len(graph.ways)
    assert not other._strays()


def test_operators_of_all_names_exist() -> None:
    others = {"neg", "invert", "abs", "ceil", "floor", "round", "trunc", "float", "max", *FUNCTIONS}
    assert others | {*BINARY} == OPERATIONS.keys()
    assert operator.index(ledger_of(3, 4)[1]) == 3


SEEN: list[Any] = []
"""Of a function, a list of its own would be state that it keeps."""


def test_len_is_another_one_while_a_module_is_traced_only() -> None:
    seen = SEEN

    def function(x: Tensor) -> Tensor:
        SEEN.append((len, len([1, 2]), len(x.shape)))
        with pytest.raises(TypeError, match="0-d"):
            len(x.sum())
        if x.shape[1] == 5:
            raise RuntimeError("five")
        return x * 2

    for columns, expected in ((4, contextlib.nullcontext()), (5, pytest.raises(CaptureError, match="five"))):
        capturer = Capturer(Asks(function))
        with expected:
            capturer.capture(capturer.call((torch.zeros(2, columns),), {}))
    assert all(row[0] is not builtins.len and row[1:] == (2, 2) for row in seen)
    assert seen
    assert len is builtins.len
    assert "len" not in globals()


# -- ends that are quotients ---------------------------------------------------------------------------------------------


class Budget(nn.Module):
    """Takes as many rows at once as fit into a budget."""

    def __init__(self, cut: Callable[[Tensor, int], list[Tensor]], budget: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cut, self.budget = nn.Conv2d(3, 3, 1), cut, budget

    def forward(self, x: Tensor) -> Tensor:
        rows = max(1, self.budget // (x.shape[-2] * x.shape[-1]))
        return torch.cat([self.layer(part) for part in self.cut(x, rows)])


CUTS: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
    "a slice": lambda x, rows: [x[:rows]],
    "a slice of a dimension": lambda x, rows: [x[..., : 9 * rows], x[:, :, None, :, : 9 * rows].squeeze(2)],
    "beside flags": lambda x, rows: [x[True, :rows, True].squeeze(0)],
    "beside others": lambda x, rows: [x[None, ..., : 9 * rows].squeeze(0)],
    "slices": lambda x, rows: [x[i : i + rows] for i in range(0, x.shape[0], rows)],
    "split": lambda x, rows: [*x.split(rows)],
    "torch.split": lambda x, rows: [*torch.split(x, rows, dim=0)],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@torch.no_grad()
def test_ends_beyond_a_size_are_no_program_each(cut: Callable[[Tensor, int], list[Tensor]]) -> None:
    sizes = ((8, 12), (10, 6), (16, 20), (14, 14), (32, 8))
    module = Budget(cut, 1 << 30).eval()
    compiled = oxidiff.compile(module, strict=True, cache=False)
    for height, width in sizes:
        x = torch.randn(3, 3, height, width)
        torch.testing.assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1
    # Four rows and more fit at the first size, three at another, two at the largest.
    module.budget = 640
    for height, width in sizes:
        x = torch.randn(3, 3, height, width)
        torch.testing.assert_close(compiled(x), module(x))


@torch.no_grad()
def test_what_is_written_before_an_end_beyond_a_size() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[: 4096 // x.shape[1]] = 1.0
            return x * 2

    compiled = oxidiff.compile(Writes(), strict=True, cache=False)
    for tokens in (5, 9, 30, 64, 65, 100, 5000):
        x = torch.randn(2, tokens, 4)
        torch.testing.assert_close(compiled(x), Writes()(x))
        if tokens <= 30:
            assert oxidiff.report(compiled).captures == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda n: 1 / math.sqrt(n),
        lambda n: math.log(n) + math.log(n, 3),
        lambda n: math.log2(n) * math.log10(n),
        lambda n: math.exp(-n / 100),
        lambda n: root(n) ** 0.5,
    ],
    ids=["sqrt", "log", "log2", "exp", "a name of its own"],
)
@torch.no_grad()
def test_functions_of_sizes_are_no_program_each(function: Callable[[int], float]) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * function(x.shape[-2] * x.shape[-1])

    compiled = oxidiff.compile(Scales(), strict=True, cache=False)
    before = [math.sqrt, math.log, math.log2, math.log10, math.exp, root]
    for height, width in ((8, 12), (10, 6), (16, 20), (14, 14), (7, 9)):
        x = torch.randn(1, 3, height, width)
        torch.testing.assert_close(compiled(x), Scales()(x), rtol=1e-6, atol=0)
    assert oxidiff.report(compiled).captures == 1
    assert before == [math.sqrt, math.log, math.log2, math.log10, math.exp, root]


@torch.no_grad()
def test_a_root_that_becomes_a_size_is_right() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            side = int(math.sqrt(x.shape[1]))
            return x.unflatten(1, (side, -1)).softmax(1)

    compiled = oxidiff.compile(Squares(), strict=True, cache=False)
    for tokens in (16, 64, 30, 36, 15):
        x = torch.randn(2, tokens, 4)
        torch.testing.assert_close(compiled(x), Squares()(x))


@torch.no_grad()
def test_the_number_of_elements_of_what_is_named() -> None:
    compiled = oxidiff.compile(Asks(lambda x: x * 2 if torch.numel(input=x) > 20 else x * 3), strict=True, cache=False)
    for count in (4, 8, 12, 5):
        assert torch.equal(compiled(torch.ones(count, 3)), torch.full((count, 3), 2.0 if count * 3 > 20 else 3.0))


@torch.no_grad()
@pytest.mark.parametrize(
    "count", [lambda n: n % 4, lambda n: -n % 4, lambda n: n // 8], ids=["rest", "missing", "eights"]
)
def test_what_a_loop_counts_to_is_a_guard(count: Callable[[int], int]) -> None:
    """It counts to 0 at the first size, and at those that are tried beside it."""

    def looping(x: Tensor) -> Tensor:
        for _ in range(count(x.shape[0])):
            x = x + 1
        return x if isinstance(range(2), range) else x * 0

    compiled = oxidiff.compile(Asks(looping), strict=True, cache=False)
    for rows in (8, 5, 12, 7, 4, 16):
        assert torch.equal(compiled(torch.ones(rows, 3)), looping(torch.ones(rows, 3))), rows


@torch.no_grad()
@pytest.mark.parametrize(
    "repeat",
    [lambda n, x: [x] * n, lambda n, x: n * [x], lambda n, x: (x,) * n, lambda n, x: [x.add(1) for _ in "x" * n]],
    ids=["list", "reflected", "tuple", "text"],
)
def test_how_often_something_is_repeated_is_a_guard(repeat: Callable[[int, Tensor], list[Tensor]]) -> None:
    def repeated(x: Tensor) -> Tensor:
        return torch.cat([x, *repeat(x.shape[0] % 4, x)])

    compiled = oxidiff.compile(Asks(repeated), strict=True, cache=False)
    for rows in (8, 5, 12, 7, 4, 16):
        assert torch.equal(compiled(torch.ones(rows, 3)), repeated(torch.ones(rows, 3))), rows


def joined(x: Tensor, *ends: int) -> Tensor:
    pieces = [x[:, start:end] for start, end in zip(ends[::2], ends[1::2], strict=True)]
    return torch.cat([*pieces, torch.ones(x.shape[0], ends[1] - ends[0] + ends[5] - ends[4], 3)], 1)


@torch.no_grad()
@pytest.mark.parametrize("first", [(1, 5, 1, 5, 1, 6), (1, 5, 2, 6, 3, 7), (0, 3, 3, 7, 7, 15), (2, 4, 2, 4, 2, 4)])
def test_lengths_are_not_taken_for_sums_of_others(first: tuple[int, ...]) -> None:
    """Ends that are evenly apart in all traces would say that three pieces are as long as the middle one three times."""
    compiled = oxidiff.compile(Asks(joined), strict=True, cache=False)
    for ends in (first, (1, 5, 1, 5, 1, 6), (0, 9, 4, 6, 1, 20), (3, 4, 10, 29, 2, 7), (5, 6, 7, 8, 9, 30)):
        x = torch.rand(2, 30, 3)
        assert torch.equal(compiled(x, *ends), joined(x, *ends)), ends


@torch.no_grad()
def test_numbers_are_not_taken_for_multiples_of_others() -> None:
    compiled = oxidiff.compile(Asks(lambda x, *n: x * sum(n) + torch.arange(sum(n)).sum()), strict=True, cache=False)
    for numbers in ((1, 1, 1), (1, 2, 3), (5, 2, 9), (7, 7, 30), (100, 8, 8)):
        expected = torch.ones(4) * sum(numbers) + sum(range(sum(numbers)))
        assert torch.equal(compiled(torch.ones(4), *numbers), expected), numbers


def resized(x: Tensor) -> Tensor:
    try:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")
    except NotImplementedError:
        return F.interpolate(x, scale_factor=2.0) * 2


@torch.no_grad()
def test_what_eager_raises_and_forward_catches_is_compiled() -> None:
    compiled = oxidiff.compile(Asks(resized), strict=True, cache=False)
    for length in (6, 9):
        x = torch.rand(2, 3, length)
        assert torch.equal(compiled(x), resized(x))
    assert oxidiff.report(compiled).eager_calls == 0


def viewed(x: Tensor) -> Tensor:
    try:
        return x.view(7, -1) * 2
    except RuntimeError:
        return x * 3


def in_heads(x: Tensor) -> Tensor:
    try:
        return x.unflatten(0, (4, -1)).mean(1)
    except RuntimeError:
        return x.mean(0, keepdim=True)


def with_table(x: Tensor) -> Tensor:
    table = torch.ones(128, 3)
    try:
        return x + table
    except RuntimeError:
        return x - table[:1]


@torch.no_grad()
@pytest.mark.parametrize("function", [viewed, in_heads, with_table])
@pytest.mark.parametrize("rows", [(2, 7, 5, 14), (17, 20, 64, 81, 16), (20, 128, 30, 1), (128, 20, 7)])
def test_what_torch_raises_and_forward_catches_is_a_guard(
    function: Callable[[Tensor], Tensor], rows: tuple[int, ...]
) -> None:
    compiled = oxidiff.compile(Asks(function), strict=True, cache=False)
    for count in rows:
        x = torch.rand(count, 3)
        torch.testing.assert_close(compiled(x), function(x))


@torch.no_grad()
@pytest.mark.parametrize("function", [nets.counting, lambda x: nets.counting(x)], ids=["imported", "of its module"])
def test_so_it_is_in_a_file_of_its_own(function: Callable[[Tensor], Tensor]) -> None:
    compiled = oxidiff.compile(Asks(function), strict=True, cache=False)
    for rows in (8, 5, 12, 7, 4, 16):
        assert torch.equal(compiled(torch.ones(rows, 3)), nets.counting(torch.ones(rows, 3))), rows


class Squared(nn.Module):
    """Takes the tokens of an image for those of a square, as models for depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 8, 8)
        self.out = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        batch, count, channels = tokens.shape
        side = int(count**0.5)
        return self.out(tokens.reshape(batch, side, side, channels).permute(0, 3, 1, 2).contiguous())


@torch.no_grad()
def test_roots_of_numbers_of_tokens_are_one_program() -> None:
    module = Squared().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for batch, side in ((1, 32), (2, 32), (3, 64), (1, 96), (2, 40)):
        x = torch.randn(batch, 3, side, side)
        torch.testing.assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1
    # As many patches at sizes that are not divided: whether there is one program or more.
    for height, width in ((33, 33), (39, 39), (38, 33), (71, 70), (70, 71)):
        x = torch.randn(2, 3, height, width)
        torch.testing.assert_close(compiled(x), module(x))


_STRUCTURES: list[Callable[[Tensor], Any]] = [
    lambda y: [y],
    lambda y: (y,),
    lambda y: {"a": y},
    lambda y: {"b": y},
    lambda y: (y, None),
]


@torch.no_grad()
@pytest.mark.parametrize("structure", _STRUCTURES)
def test_how_results_are_put_together_is_part_of_a_program(structure: Callable[[Tensor], Any]) -> None:
    def function(x: Tensor) -> Any:
        y = torch.relu(x)
        return structure(y) if x.shape[1] == 5 else {"a": y}

    compiled: Any = oxidiff.compile(function, strict=True, cache=False)
    for count in (4, 7, 5, 6, 5, 4):
        x = torch.randn(2, count)
        found, expected = compiled(x), function(x)
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected)
