"""What other threads do while a module is captured stays, and the call that captures it gives what they made of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from oxidiff.capture import leftovers

FACTOR: Any = 1.5
OFFSET: Any = torch.tensor(0.5)


class Rated(nn.Module):
    rate = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mode = "plain"
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        _let_others()
        x = self.second(x) * type(self).rate * FACTOR + OFFSET + self.shift
        return x.tanh() if self.mode == "bent" else x


_meanwhile: list[Callable[[], Any]] = []


def _elsewhere(action: Callable[[], Any]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def _let_others() -> None:
    if _meanwhile:
        _elsewhere(_meanwhile.pop())


def halved(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 0.5


def set_factor(module: Any) -> None:
    global FACTOR
    FACTOR = 7.0


def set_offset(module: Any) -> None:
    global OFFSET
    OFFSET = torch.tensor(9.0)


def set_rate(module: Any) -> None:
    type(module).rate = 3.0


def set_mode(module: Any) -> None:
    module.mode = "bent"


def hook(module: Any) -> None:
    module.first.register_forward_hook(halved)


def hook_before(module: Any) -> None:
    module.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.25,))


def hook_root(module: Any) -> None:
    module.register_forward_hook(halved)


def set_buffer(module: Any) -> None:
    module.register_buffer("shift", torch.full((8,), 4.0))


ACTIONS = [set_factor, set_offset, set_rate, set_mode, hook, hook_before, hook_root, set_buffer]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    global FACTOR, OFFSET
    FACTOR, OFFSET, Rated.rate = 1.5, torch.tensor(0.5), 2.0
    _meanwhile.clear()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("act", ACTIONS)
def test_in_the_middle_of_a_trace(act: Callable[[Any], None]) -> None:
    check(act, lambda action: _meanwhile.append(action))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("act", ACTIONS)
@pytest.mark.parametrize("moment", ["__init__", "restore"])
def test_before_and_behind_a_trace(act: Callable[[Any], None], moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When what the module was is looked at, or put back."""

    check(act, lambda action: at(moment, monkeypatch, action))


def at(moment: str, monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Has another thread do something at a moment of the next trace."""
    name = "restore" if moment == "restored" else moment
    original, pending = getattr(leftovers.Before, name), [action]

    def method(self: Any, *args: Any) -> Any:
        # Behind the look, and before anything is put back, or behind that.
        if moment == "restore" and pending:
            _elsewhere(pending.pop())
        result = original(self, *args)
        if pending:
            _elsewhere(pending.pop())
        return result

    monkeypatch.setattr(leftovers.Before, name, method)


def check(act: Callable[[Any], None], begin: Callable[[Callable[[], Any]], None]) -> None:
    torch.manual_seed(0)
    module: Any = Rated()
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.randn(3, 8)
    plain = module(x)
    begin(lambda: act(module))
    compiled(x)
    # As it was set, in the module that is the user's, too.
    wanted: Any = Rated()
    wanted.load_state_dict(module.state_dict())
    wanted.shift.zero_()
    act(wanted)
    expected = wanted(x)
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(module(x), expected)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), wanted(x))
    # And is followed from then on.
    global FACTOR
    FACTOR = 20.0
    torch.testing.assert_close(compiled(x), wanted(x))
    module.mode = wanted.mode = "bent"
    torch.testing.assert_close(compiled(x), wanted(x))


@torch.no_grad()
@pytest.mark.parametrize("moment", ["trace", "__init__", "restore"])
def test_adapters_that_are_switched(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        module: Any = Rated()
        for i, name in enumerate("ab"):
            config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["first", "second"], init_lora_weights=False)
            torch.manual_seed(1 + i)
            peft.inject_adapter_in_model(config, module, name)
        for layer in (module.first, module.second):
            layer.set_adapter(["a"])
        return module

    def switch(module: Any) -> None:
        for layer in (module.first, module.second):
            layer.set_adapter(["b"])
            layer.set_scale("b", 0.25)

    module, wanted = adapted(), adapted()
    compiled: Any = oxidiff.compile(module, cache=False)
    if moment == "trace":
        _meanwhile.append(lambda: switch(module))
    else:
        at(moment, monkeypatch, lambda: switch(module))
    x = torch.randn(3, 8)
    compiled(x)
    switch(wanted)
    for one in (module, compiled, compiled):
        torch.testing.assert_close(one(x), wanted(x))


class Options:
    """What a program keeps for all of its modules."""

    def __init__(self) -> None:
        self.gain, self.tables = 2.0, {"bias": 1.0}


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0


OPTIONS, SLOTTED = Options(), Slotted()
SCALES = {"of": 3.0}
STEPS = [0.5]


class Configured(nn.Module):
    """Reads what is inside of objects."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * OPTIONS.gain * SLOTTED.gain
        _let_others()
        return x * SCALES["of"] + OPTIONS.tables["bias"] + STEPS[0]


SET_INSIDE: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
    "attribute": (lambda: setattr(OPTIONS, "gain", 5.0), lambda: OPTIONS.gain),
    "slot": (lambda: setattr(SLOTTED, "gain", 5.0), lambda: SLOTTED.gain),
    "item": (lambda: SCALES.update(of=5.0), lambda: SCALES["of"]),
    "nested": (lambda: OPTIONS.tables.update(bias=5.0), lambda: OPTIONS.tables["bias"]),
    "list": (lambda: STEPS.__setitem__(0, 5.0), lambda: STEPS[0]),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("moment", ["trace", "__init__", "restore", "restored"])
@pytest.mark.parametrize("what", SET_INSIDE)
def test_what_is_set_inside_of_objects(what: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``forward`` is not seen to write is looked at again."""
    monkeypatch.setattr(OPTIONS, "gain", 2.0)
    monkeypatch.setattr(SLOTTED, "gain", 2.0)
    monkeypatch.setitem(SCALES, "of", 3.0)
    monkeypatch.setitem(OPTIONS.tables, "bias", 1.0)
    STEPS[0] = 0.5
    compiled, x = oxidiff.compile(Configured(), cache=False), torch.randn(3, 8)
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    try:
        write, read = SET_INSIDE[what]
        if moment == "trace":
            _meanwhile.append(write)
        else:
            at(moment, monkeypatch, write)
        compiled(x)
        assert read() == 5.0
        for rows in (3, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), Configured()(x))
    finally:
        end.set()
    assert moment != "restored" or not compiled.report().eager_calls
