"""States of a module: attributes that are others at each call, and the graphs that one state takes over from another."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff


class Stepped(nn.Module):
    """A model that is told from outside which step it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.step: Any = 0
        self.gain: Any = 1.0
        self.limit: Any = 1.0
        self.is_on = False


class Unread(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Compared(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if self.step > 5 else torch.relu(self.conv(x))


class Computing(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.step


class Telling(Stepped):
    """Numbers and names among the results."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.conv(x), self.step, f"step {self.step}", {"of": [self.gain]}, self.is_on


class Mode(str, enum.Enum):
    """Equal to its text, and another type."""

    A = "a"


class Pair(NamedTuple):
    """Equal to a tuple, and another type."""

    x: int
    y: int


class Returning(Stepped):
    """Results that are put together as an attribute says."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        if self.is_on:
            return {self.step: y, "sample": y + 1}
        return (y,) if self.step == "tuple" else [y, self.step]


class Passing(Stepped):
    """The argument itself, or another tensor that equals it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x if self.is_on else x.clone()


class Pooling(Stepped):
    """10 // 4 and 10 // 5 are one size, 20 // 4 and 20 // 5 are not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.conv(x), x.shape[-1] // (self.step + 1))


class Limited(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[..., : min(x.shape[-1], self.step)])


class Asking(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.shape[-1] > self.step else torch.relu(self.conv(x))


class Least(Stepped):
    """The smaller of two floats."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * min(self.gain, self.limit)


class Switched(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.gain + (self.conv(x) * self.limit if self.is_on else 0)


def compiled(kind: type[Stepped]) -> tuple[Stepped, Callable[..., Any]]:
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    return model, oxidiff.compile(model)


def check(model: Stepped, program: Callable[..., Any], size: int) -> int:
    """Compares a call with eager; how often it captured."""
    x = torch.randn(1, 3, size, size)
    before = oxidiff.report(program).captures
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    report = oxidiff.report(program)
    assert not report.fallbacks
    return report.captures - before


def test_what_is_not_read_costs_no_capture() -> None:
    model, program = compiled(Unread)
    counts = []
    for step in range(20):
        model.step = step
        counts.append(check(model, program, 12))
    assert sum(counts) == 1, counts


def test_what_is_compared_costs_one_for_each_way() -> None:
    model, program = compiled(Compared)
    counts = []
    for step in [*range(12), *range(12)]:
        model.step = step
        counts.append(check(model, program, 12))
    assert sum(counts) == 2, counts


def test_what_is_computed_with_is_another_program() -> None:
    model, program = compiled(Computing)
    for step in (3, 4, 3, 5):
        model.step = step
        check(model, program, 12)
    assert oxidiff.report(program).captures == 3


def test_numbers_among_the_results() -> None:
    model, program = compiled(Telling)
    x = torch.randn(1, 3, 12, 12)
    for step, gain, is_on in [
        (0, 0.0, False),
        (1, 0.0, False),
        (1.0, -0.0, False),
        (True, 0.0, True),
        (2, 1.0, 1),
        (2, 1, True),
    ]:
        model.step, model.gain, model.is_on = step, gain, is_on
        with torch.no_grad():
            (found, *rest), (expected, *of_eager) = program(x), model(x)
        torch.testing.assert_close(found, expected)
        assert repr(rest) == repr(of_eager)


@pytest.mark.parametrize("is_on", [False, True])
def test_results_are_put_together_as_the_state_has_it(is_on: bool) -> None:
    model, program = compiled(Returning)
    model.is_on = is_on
    x = torch.randn(1, 3, 12, 12)
    steps: list[Any] = ["a", Mode.A, "tuple", "b", 1, True, 1.0, 1]
    for step in steps if is_on else [*steps, [1], [[1]], (1, 2), [1, 2], Pair(1, 2), ["a"], {"a": 1}, {"b": 1}]:
        model.step = step
        with torch.no_grad():
            found, expected = program(x), model(x)
        assert type(found) is type(expected) and len(found) == len(expected)
        ours, theirs = (
            (list(each), [*each.values()]) if is_on else ([*each[1:]], each[:1]) for each in (found, expected)
        )
        assert repr(ours[0]) == repr(theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])


def test_a_result_that_is_an_argument() -> None:
    model, program = compiled(Passing)
    for is_on in (False, True, False, True):
        model.is_on = is_on
        x = torch.randn(1, 3, 12, 12)
        with torch.no_grad():
            assert (program(x)[1] is x) is is_on


@pytest.mark.parametrize("kind", [Pooling, Limited, Asking])
def test_what_is_the_same_at_one_size_alone(kind: type[Stepped]) -> None:
    model, program = compiled(kind)
    for step, sizes in [(3, (10, 20, 30, 12)), (4, (10, 14, 30, 20, 11)), (64, (10, 70, 128)), (15, (10, 16, 14, 32))]:
        model.step = step
        for size in sizes:
            check(model, program, size)


_ANY = ((0.5, 2.0), (0.6, 2.0), (0.7, 2.1), (0.8, 2.2), (0.9, 0.4), (3.0, 0.5), (0.1, 7.0), (0.2, 0.15))
_FROM_SOME_ON = ((0.5, 1e6), (0.6, 1e6), (0.7, 2e6), (0.8, 0.85), (0.9, 0.85), (0.2, 0.85), (0.8, 0.81), (0.805, 0.81))
"""The limit matters from the fourth on."""


@pytest.mark.parametrize(
    ("kind", "is_on", "values"),
    [
        *((kind, is_on, _ANY) for kind in (Least, Switched) for is_on in (False, True)),
        (Least, False, _FROM_SOME_ON),
    ],
)
def test_floats_one_of_which_may_not_matter(
    kind: type[Stepped], is_on: bool, values: tuple[tuple[float, float], ...]
) -> None:
    model, program = compiled(kind)
    model.is_on = is_on
    for gain, limit in values:
        model.gain, model.limit = gain, limit
        check(model, program, 12)


def test_a_float_that_is_not_read_beside_one_that_is() -> None:
    model, program = compiled(Switched)
    counts = []
    for i in range(12):
        model.gain, model.limit = 0.3 + i / 20, 0.4 + i / 20
        counts.append(check(model, program, 12))
    assert not any(counts[4:]), counts


def test_weights_of_a_state_that_took_a_graph_over() -> None:
    model, program = compiled(Unread)
    check(model, program, 12)
    for step in range(1, 4):
        model.step = step
        model.conv.weight.data.mul_(1.5)
        check(model, program, 12)
        with torch.no_grad():
            model.conv.weight.add_(0.1)
        check(model, program, 12)
    model.conv = nn.Conv2d(3, 4, 1).eval().requires_grad_(False)
    assert check(model, program, 12) == 1


def test_tensors_that_come_and_go_between_states() -> None:
    model, program = compiled(Unread)
    for step in range(4):
        model.step = step
        check(model, program, 12)
        # Before the weights, in the order in which modules are walked.
        model.register_buffer(f"more{step}", torch.full((4, 3, 3, 3), 7.0))
        check(model, program, 12)
        model.extra = nn.ParameterList([nn.Parameter(torch.zeros(4, 3, 3, 3)) for _ in range(step)])
        model.conv = model._modules.pop("conv")
        check(model, program, 12)
    assert oxidiff.report(program).captures == 1


def test_the_steps_of_a_second_picture_are_known() -> None:
    model, program = compiled(Computing)
    for picture in range(2):
        for step in range(1, 41):
            model.step = step
            assert check(model, program, 12) == (picture == 0)
