"""What is written in place, wherever ``forward`` finds it: arrays, slots, attributes of containers, variables of threads and
contexts, generators, iterators. None of it has a version, and no attribute is set."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import importlib
import itertools
import queue
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import oxidiff
from oxidiff.watch import Structure, Watch


class Slotted:
    __slots__ = ("scale", "table", "tensor")

    def __init__(self) -> None:
        self.scale, self.table, self.tensor = 2, {"a": 2}, torch.full((4,), 2.0)


class Below(Slotted):
    """Has slots, and attributes in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 2


class Own:
    """An object like any other."""


class Table(dict[str, Any]):
    """A dictionary with attributes."""


class Ordered(collections.OrderedDict[str, int]):
    """As caches of what was used last are."""


class SlottedTable(dict[str, Any]):
    __slots__ = ("scale",)


class Row(list[Any]):
    """A list with attributes."""


def with_scale(holder: Any) -> Any:
    holder.scale = 2
    return holder


def nested(deep: int) -> Any:
    return [nested(deep - 1)] if deep else [2]


def inmost(holder: Any) -> Any:
    return inmost(holder[0]) if isinstance(holder[0], list) else holder


def function() -> Any:
    def found() -> None:
        raise AssertionError

    return found


def count(holder: Any) -> None:
    holder.scale += 1


def count_in(holder: Any, at: Any) -> None:
    holder[at] += 1


def in_variable() -> Any:
    variable: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("table")
    variable.set({"a": 2})
    return variable


def put(at: Any, value: Any = 5) -> Callable[[Any], Any]:
    return lambda holder: holder.__setitem__(at, value)


def set_to(name: str, value: Any = 5) -> Callable[[Any], Any]:
    return lambda holder: setattr(holder, name, value)


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
"""Makes a holder; reads a number or a tensor of it; changes it in place."""

CASES: dict[str, Case] = {
    "numpy": (lambda: numpy.array([2.0, 3.0]), lambda h: float(h[0]), put(0)),
    "a view of numpy": (lambda: numpy.arange(12).reshape(3, 4)[1:, 1:].T, lambda h: int(h[0, 0]), put((0, 0), 9)),
    "numpy as a tensor": (lambda: numpy.full(4, 2.0, numpy.float32), torch.from_numpy, put(1)),
    "another shape of numpy's": (lambda: numpy.ones((2, 3)), lambda h: h.shape[0], lambda h: setattr(h, "shape", (3, 2))),
    "much of numpy": (lambda: numpy.full(1 << 18, 2.0), lambda h: float(h[-1]), put(slice(None))),
    "numpy in a dictionary of an object": (
        lambda: types.SimpleNamespace(a={"x": numpy.array([2])}), lambda h: int(h.a["x"][0]), lambda h: put(0)(h.a["x"]),
    ),
    "array": (lambda: array.array("d", [2.0]), lambda h: h[0], put(0)),
    "bytearray": (lambda: bytearray(b"\2"), lambda h: h[0], put(0)),
    "memoryview": (lambda: memoryview(bytearray(b"\2")), lambda h: h[0], put(0)),
    "a slot": (Slotted, lambda h: h.scale, set_to("scale")),
    "a slot that is deleted": (Slotted, lambda h: getattr(h, "scale", 7), lambda h: delattr(h, "scale")),
    "a dictionary in a slot": (Slotted, lambda h: h.table["a"], lambda h: put("a")(h.table)),
    "another tensor in a slot": (Slotted, lambda h: h.tensor, set_to("tensor", torch.full((4,), 5.0))),
    "a slot beside attributes": (Below, lambda h: h.scale, set_to("scale")),
    "an attribute beside slots": (Below, lambda h: h.more, set_to("more")),
    "an attribute of a dictionary": (lambda: with_scale(Table(a=1)), lambda h: h.scale, set_to("scale")),
    "an attribute of a list": (lambda: with_scale(Row([1])), lambda h: h.scale, set_to("scale")),
    "a list, six deep": (lambda: nested(5), lambda h: inmost(h)[0], lambda h: put(0)(inmost(h))),
    "the order of a dictionary": (
        lambda: collections.OrderedDict(a=2, b=3), lambda h: next(iter(h.values())), lambda h: h.move_to_end("a"),
    ),
    "the order of a cache": (
        lambda: Ordered(a=2, b=3), lambda h: next(iter(h.values())), lambda h: h.move_to_end("a"),
    ),
    "a slot of a dictionary": (SlottedTable, lambda h: getattr(h, "scale", 2), set_to("scale")),
    "no value in a variable": (
        lambda: contextvars.ContextVar("scale", default=2), lambda h: h.get() or 3, lambda h: h.set(None),
    ),
    "a chain of dictionaries": (
        lambda: collections.ChainMap({"a": 2}), lambda h: h["a"], lambda h: put("a")(h.maps[0]),
    ),
    "a variable of a thread": (lambda: with_scale(threading.local()), lambda h: h.scale, set_to("scale")),
    "a variable of a context": (
        lambda: contextvars.ContextVar("scale", default=2), lambda h: h.get(), lambda h: h.set(5),
    ),
    "an attribute of a function": (lambda: with_scale(function()), lambda h: h.scale, set_to("scale")),
}  # fmt: skip
"""What others write."""

DRAWN: dict[str, Case] = {
    "numpy": (lambda: numpy.array([2, 3]), lambda h: int(h[0]), lambda h: put(0, h[0] + 1)(h)),
    "a generator of numpy": (lambda: numpy.random.default_rng(0), lambda h: float(h.random()), lambda h: None),
    "an older generator of numpy": (lambda: numpy.random.RandomState(0), lambda h: float(h.rand()), lambda h: None),
    "a generator of Python": (lambda: random.Random(0), lambda h: h.random(), lambda h: None),
    "a count": (lambda: itertools.count(2), next, lambda h: None),
    "an iterator": (lambda: iter([2, 3, 4, 5, 6, 7]), next, lambda h: None),
    "a slot": (Slotted, lambda h: h.scale, count),
    "an attribute": (lambda: with_scale(types.SimpleNamespace()), lambda h: h.scale, count),
    "an attribute beside slots": (lambda: with_scale(Below()), lambda h: h.scale, count),
    "an attribute by its name": (lambda: with_scale(Own()), lambda h: h.scale, lambda h: setattr(h, "scale", h.scale + 1)),
    "an attribute of its dictionary": (lambda: with_scale(Own()), lambda h: h.scale, lambda h: count_in(vars(h), "scale")),
    "an attribute of a function": (lambda: with_scale(function()), lambda h: h.scale, count),
    "an item of a list": (lambda: [2, 3], lambda h: h[0], lambda h: count_in(h, 0)),
    "an item of a dictionary": (lambda: {"a": 2}, lambda h: h["a"], lambda h: count_in(h, "a")),
    "an item of an object's": (lambda: collections.UserDict(a=2), lambda h: h["a"], lambda h: count_in(h, "a")),
    "a list": (lambda: [2], lambda h: len(h), lambda h: h.append(1)),
    "an attribute of a dictionary": (lambda: with_scale(Table()), lambda h: h.scale, count),
    "an attribute of a list": (lambda: with_scale(Row()), lambda h: h.scale, count),
    "an array in a tuple": (lambda: (numpy.array([2]),), lambda h: int(h[0][0]), lambda h: count_in(h[0], 0)),
    "a list in a tuple": (lambda: ([2],), lambda h: h[0][0], lambda h: count_in(h[0], 0)),
    "a list in a tuple of an object": (
        lambda: types.SimpleNamespace(a=([2],)), lambda h: h.a[0][0], lambda h: count_in(h.a[0], 0),
    ),
    "an argument of a partial": (
        lambda: functools.partial(max, [2]), lambda h: h.args[0][0], lambda h: count_in(h.args[0], 0),
    ),
    "memoryview": (lambda: memoryview(bytearray(b"\2\3")), lambda h: h[0], lambda h: count_in(h, 0)),
    "numpy of objects": (lambda: numpy.array([2, "a"], object), lambda h: h[0], lambda h: count_in(h, 0)),
    "the shape of numpy's": (
        lambda: numpy.ones((2, 3)), lambda h: h.shape[0], lambda h: setattr(h, "shape", h.shape[::-1]),
    ),
    "a mask of numpy's": (
        lambda: numpy.ma.array([2.0, 3.0], mask=[False, True]), lambda h: float(h.sum()), lambda h: put(1, 3.0)(h),
    ),
    "the order of a dictionary": (
        lambda: {"a": 2, "b": 3}, lambda h: next(iter(h.values())), lambda h: put("a", h.pop("a"))(h),
    ),
    "the order of an OrderedDict": (
        lambda: Ordered(a=2, b=3), lambda h: next(iter(h.values())), lambda h: h.move_to_end(next(iter(h))),
    ),
    "a variable of a thread": (lambda: with_scale(threading.local()), lambda h: h.scale, count),
    "a variable of a context": (
        lambda: contextvars.ContextVar("scale", default=2), lambda h: h.get(), lambda h: h.set(h.get() + 1),
    ),
    "a dictionary in a variable": (in_variable, lambda h: h.get()["a"], lambda h: count_in(h.get(), "a")),
    "bits of numpy": (lambda: numpy.random.PCG64(0), lambda h: h.random_raw() % 1000, lambda h: None),
    "values of a dictionary": (lambda: iter({"a": 2, "b": 3, "c": 4}.values()), next, lambda h: None),
    "an iterator backwards": (lambda: reversed([2, 3, 4]), next, lambda h: None),
    "a call for each": (lambda: iter([2, 3, 4].pop, None), next, lambda h: None),
}  # fmt: skip
"""What `forward` writes itself: each call finds another thing."""

SOURCE = """
import torch
from torch import nn

HELD = READ = WRITE = None

class Box:
    pass

BOX = Box()

class OfGlobal(nn.Module):
    def forward(self, x):
        found = x * READ(HELD)
        WRITE(HELD)
        return found

class OfObject(nn.Module):
    def forward(self, x):
        found = x * READ(BOX.held)
        WRITE(BOX.held)
        return found

class OfAttribute(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        found = x * READ(self.held)
        WRITE(self.held)
        return found

def of_closure(held):
    class OfClosure(nn.Module):
        def forward(self, x):
            found = x * READ(held)
            WRITE(held)
            return found
    return OfClosure()
"""


def written(name: str, folder: Path, held: Any, read: Any, write: Any) -> Any:
    """A file of its own, so that all its code is read for this case alone."""
    (folder / f"{name}.py").write_text(SOURCE)
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    module.HELD, module.READ, module.WRITE = held, read, write
    module.BOX.held = held
    return module


PLACES: dict[str, Callable[[Any, Any], nn.Module]] = {
    "an attribute": lambda file, held: file.OfAttribute(held),
    "a global": lambda file, held: file.OfGlobal(),
    "an object in a global": lambda file, held: file.OfObject(),
    "a closure": lambda file, held: file.of_closure(held),
}


def pair(
    place: str, case: Case, write: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Any, Any]:
    """A module and a compiled one of the same kind, each with a holder of its own."""
    monkeypatch.syspath_prepend(str(folder))
    made = []
    for which in ("first", "second"):
        name, held = f"in_place_{which}", case[0]()
        monkeypatch.delitem(sys.modules, name, raising=False)
        made += [PLACES[place](written(name, folder, held, case[1], write), held), held]
    return made[0], oxidiff.compile(made[2]), made[1], made[3]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_others_write_in_place_is_noticed(
    case: Case, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, compiled, mine, theirs = pair(place, case, lambda held: None, tmp_path, monkeypatch)
    x, change = torch.randn(2, 4), case[2]
    before = eager(x)
    assert torch.equal(compiled(x), before)
    change(mine)
    after = eager(x)
    assert not torch.equal(before, after), "the test itself"
    change(theirs)
    assert torch.equal(compiled(x), after)
    assert oxidiff.report(compiled).eager_calls == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", DRAWN.values(), ids=DRAWN)
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_forward_writes_in_place_is_eagers(
    case: Case, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, compiled, *_ = pair(place, case, case[2], tmp_path, monkeypatch)
    x = torch.randn(2, 4)
    wanted = [eager(x) for _ in range(3)]
    assert not torch.equal(wanted[0], wanted[1]), "the test itself"
    found = [compiled(x) for _ in range(3)]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.filterwarnings("error::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", ["a variable of a thread", "a variable of a context"])
def test_variables_of_a_thread_are_those_of_the_call_in_background(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "in_place_first", raising=False)
    make, read, change = CASES[kind]
    held = make()
    # The thread that captures in the background has not set it.
    change(held)
    net = written("in_place_first", tmp_path, held, read, lambda held: None).OfGlobal()
    compiled, x = oxidiff.compile(net, background=True), torch.randn(2, 4)
    end = time.monotonic() + 20
    while oxidiff.report(compiled).captures == 0 and time.monotonic() < end:
        assert torch.equal(compiled(x), x * 5)
    eager = oxidiff.report(compiled).eager_calls
    for _ in range(3):
        assert torch.equal(compiled(x), x * 5)
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (1, eager), "it is captured in a call"


class Counted:
    """Numbered by a count of its class."""

    ids = itertools.count()

    def __init__(self) -> None:
        self.id, self.scale = next(self.ids), 2


IDS = itertools.count()


@dataclasses.dataclass
class Numbered:
    """Numbered by a global count."""

    scale: int = 2
    id: int = dataclasses.field(default_factory=lambda: next(IDS))


HELD: dict[str, Callable[[], Any]] = {
    "an iterator": lambda: itertools.count(),
    "a generator": lambda: (i for i in range(3)),
    "a generator of numbers": lambda: random.SystemRandom(),
    "what a count has numbered": Counted,
    "what a global count has numbered": Numbered,
    "the same thing again and again": lambda: itertools.repeat(2),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_what_forward_does_not_take_from_may_be_held(held: Callable[[], Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beside, self.config, self.numbered = held(), Counted(), Numbered()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.config.scale * self.numbered.scale

    compiled, x = oxidiff.compile(Net(), strict=True), torch.randn(2, 4)
    assert torch.equal(compiled(x), x * 4)


FRAMES: queue.SimpleQueue[Any] = queue.SimpleQueue()
"""Nobody looks into a queue."""


def another_thread_writes() -> None:
    def write() -> None:
        FRAMES.get_nowait()[0] += 1

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def test_what_others_write_during_a_capture_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn_upon = numpy.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            another_thread_writes()
            return x * 2

    net, x = Net(), torch.randn(2, 4)
    for _ in range(100):
        FRAMES.put(net.drawn_upon)
    assert torch.equal(oxidiff.compile(net)(x), x * 2)
    assert net.drawn_upon[0] == 100 - FRAMES.qsize() > 1


class Looked:
    """Counts what it is asked for and has not."""

    __slots__ = ("asked", "table", "unset")

    def __init__(self) -> None:
        self.asked, self.table = 0, {"scale": 2}

    def __getattr__(self, name: str) -> int:
        self.asked += 1
        return 7


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_call_runs_no_code_of_an_object_to_see_whether_it_changed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.looked = Looked()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.looked.table["scale"]

    net, x = Net(), torch.randn(2, 4)
    watch = Watch(Structure(net), ())
    assert [watch.poll() for _ in range(3)] == [0, 0, 0] and net.looked.asked == 0
    assert torch.equal(oxidiff.compile(net)(x), x * 2)


def test_an_array_that_nobody_writes_costs_nothing() -> None:
    """Equal arrays of two modules are one program."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = numpy.arange(4)

        def forward(self, x: Tensor) -> Tensor:
            return x * int(self.table[2])

    x = torch.randn(2, 4)
    nets = [oxidiff.compile(Net()) for _ in range(2)]
    for net in nets:
        for _ in range(2):
            assert torch.equal(net(x), x * 2)
    assert [oxidiff.report(net).captures for net in nets] == [1, 0]
