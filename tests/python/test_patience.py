"""Modules that are something else at nearly every call: what is captured of them stays in proportion to what it saves."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from oxidiff import _native
from oxidiff.adapters import base_of
from oxidiff.patience import OUTSIDE, STATES, WAIT, Patience


class Guide:
    """A guidance that replaces what a layer computes by something with a float."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale - 0.5 * x.mean()


class Plain:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Guided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.guide: Any = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.guide(self.inner(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Counted(nn.Module):
    """A block computes with a number that is set before each call; one keeps it, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Block(), Block()
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.time = 0
        self.keeps = False
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) * (1 + self.time / 1024)
        if self.keeps:
            self.kept = y
        return y


class Noting(nn.Module):
    """Notes how many of its layers ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.count = 0

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        count = 0
        for layer in self.layers:
            x = layer(x)
            if extra is not None:
                x, count = x + extra, count + 1
        self.count = count
        return x


SETTINGS: Any = [None]


class Settled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if SETTINGS[0] is None else x


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        yield


def compiled(module: nn.Module) -> tuple[Any, Any]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module, oxidiff.compile(module, cache=False)


def check(module: Any, program: Any, *args: Any) -> None:
    torch.testing.assert_close(program(*args), module(*args))


def test_numbers_are_lifted_though_the_module_was_another_in_between() -> None:
    module, program = compiled(Guided())
    captures = []
    for picture in range(8):
        module.guide = Guide(2.0 + picture)
        for _ in range(2):
            check(module, program, torch.randn(3, 8))
        module.guide = Plain()
        check(module, program, torch.randn(3, 8))
        captures.append(oxidiff.report(program).captures)
    # The plain one, the first guide, and one with the number as an argument.
    assert captures[-1] == captures[2] <= 4


@pytest.mark.parametrize("keeps", [False, True])
def test_states_that_do_not_last_are_no_longer_captured(keeps: bool) -> None:
    module, program = compiled(Counted())
    module.middle.keeps = keeps
    captures = []
    for call in range(120):
        module.middle.time = call
        x = torch.randn(3, 8)
        check(module, program, x)
        if keeps:
            assert not module.middle.kept.is_meta
        captures.append(oxidiff.report(program).captures)
    assert captures[-1] == captures[80]
    report = oxidiff.report(program)
    if not keeps:
        # What is before and behind the part that changes has programs.
        assert "attributes of middle are others in nearly every call" in report.fallbacks[-1]["reason"]
    assert report.eager_calls <= 5


def test_a_state_that_lasts_after_all_is_captured() -> None:
    module, program = compiled(Counted())
    for call in range(80):
        module.middle.time = call
        check(module, program, torch.randn(3, 8))
    before = oxidiff.report(program)
    module.middle.time = 1000
    for _ in range(WAIT + 1):
        check(module, program, torch.randn(3, 8))
    after = oxidiff.report(program)
    assert after.captures == before.captures + 1
    for _ in range(5):
        check(module, program, torch.randn(5, 8))
    assert oxidiff.report(program).fallbacks == after.fallbacks


def test_a_state_that_a_call_leaves_is_not_captured_again_and_again() -> None:
    module, program = compiled(Noting())
    captures = []
    for _ in range(12):
        for extra in (None, None, torch.randn(3, 8), torch.randn(3, 8)):
            check(module, program, torch.randn(3, 8), extra)
            assert module.count == (0 if extra is None else 3)
        captures.append(oxidiff.report(program).captures)
    # Tried again once in a while, as another thread may have changed it.
    assert captures[-1] - captures[3] <= 2
    assert "forward sets attributes of the module" in oxidiff.report(program).fallbacks[-1]["reason"]


def test_a_global_may_be_another_for_each_picture() -> None:
    global SETTINGS
    module, program = compiled(Settled())
    for _ in range(40):
        SETTINGS = [None]
        for _ in range(5):
            check(module, program, torch.randn(3, 8))
    report = oxidiff.report(program)
    assert report.eager_calls == 0 and report.captures == 1


def test_a_call_with_gradients_does_not_look_at_what_the_module_became(monkeypatch: pytest.MonkeyPatch) -> None:
    module, program = compiled(Counted())
    module.requires_grad_(False)
    check(module, program, torch.randn(3, 8))
    looks = 0

    def look(self: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(self)

    original = oxidiff.states.States.look  # type: ignore[attr-defined]
    monkeypatch.setattr(oxidiff.states.States, "look", look)  # type: ignore[attr-defined]
    with torch.enable_grad():
        for call in range(3):
            module.middle.time = call + 5
            x = torch.randn(3, 8, requires_grad=True)
            check(module, program, x)
            program(x).sum().backward()
    assert looks == 0
    check(module, program, torch.randn(3, 8))
    assert looks > 0


def test_weights_on_meta_are_read_as_fast_as_others() -> None:
    def seconds(module: nn.Module) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            tree = _native.Tree(module, base_of, lambda _: None, lambda _: None, lambda _: True, lambda _: [], None)
            _native.Watch(tree, [], None)
            best = min(best, time.perf_counter() - start)
        return best

    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    here = seconds(layers)
    # An exception in C++ for each would take a thousand times as long as reading one.
    assert seconds(layers.to("meta")) < 20 * here


def test_patience_is_that_of_the_calls_between() -> None:
    each = Patience(STATES)
    for i in range(1000):
        each.spend(4 * i, 1, 0, is_lost=False)
    assert not each.is_out
    for i in range(60):
        each.spend(4000 + i, 1, 0, is_lost=False)
    assert each.is_out
    lost = Patience(OUTSIDE)
    for i in range(5):
        # What led to no program saves nothing, however often the module is called.
        lost.spend(100 * i, 1, 0, is_lost=True)
    assert lost.is_out


def test_what_seldom_changes_may_stay_in_programs() -> None:
    patience = Patience(STATES)
    patience.note(["rare", "often"])
    for _ in range(20):
        patience.note(["often", "often"])
    assert patience.changing == ["often"]


class Late(nn.Module):
    """Notes whether a step is one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.is_late = False

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.is_late = step > 5
        return self.layer(x) * step


def test_only_the_call_that_leaves_a_state_is_eager() -> None:
    module, program = compiled(Late())
    eager = []
    for _ in range(8):
        for step in range(8):
            check(module, program, torch.randn(3, 8), step)
            assert module.is_late == (step > 5)
        eager.append(oxidiff.report(program).eager_calls)
    # One to the last steps, and one back.
    assert all(after - before <= 2 for before, after in itertools.pairwise(eager))


COUNT = 0


class Reflecting(nn.Module):
    """Counts in a global that no instruction names as one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        globals()["COUNT"] = COUNT + 1
        return self.layer(x)


def test_a_global_that_forward_counts_in_behind_its_code() -> None:
    program: Any = oxidiff.compile(Reflecting(), cache=False)
    x = torch.randn(3, 8)
    program(x)
    before = COUNT
    for _ in range(5):
        program(x)
    assert before + 5 == COUNT
    assert "forward changes COUNT outside of it" in oxidiff.report(program).fallbacks[-1]["reason"]
