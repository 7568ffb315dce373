"""Code and constants outside of a module, in files and classes, that somebody puts others in the place of."""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import itertools
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import oxidiff
from nets import programs_go_with

_NAMES = itertools.count()

_TOOLS = """
def bent(x, by=0.5):
    return x + by
"""

_NET = """
import torch
import torch.nn.functional as F
from torch import nn
import TOOLS as tools

FACTOR = 2.0
STEPS = {"kept": 1}
count = 0

class Counter:
    calls = 0

counter = Counter()

class Shift:
    def apply(self, x):
        return x + 1

class Base(nn.Module):
    amount = 3

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.eval().requires_grad_(False)

    def scale(self, x):
        return x * self.amount

    def forward(self, x):
        return self.scale(self.linear(x))

class Block(Base):
    pass

def helper(x):
    return deeper(x) * FACTOR

def deeper(x, by=1.5):
    return x - by

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.norm = Block(), nn.GroupNorm(1, 4)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return tools.bent(F.silu(self.norm(helper(self.block(x)))) + Shift().apply(x))
"""


@pytest.fixture
def space() -> Iterator[Any]:
    """A file with a model, as it is when it is imported."""
    name, tools = f"surroundings_{next(_NAMES)}", f"surroundings_{next(_NAMES)}"
    for text, made in ((_TOOLS, tools), (_NET.replace("TOOLS", tools), name)):
        module = types.ModuleType(made)
        module.__file__ = f"/nowhere/{made}.py"
        sys.modules[made] = module
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    yield sys.modules[name]
    del sys.modules[name], sys.modules[tools]


def _set(table: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute, and gives what undoes it."""
    is_there = name in vars(table)
    before = vars(table).get(name)
    setattr(table, name, value)
    return lambda: setattr(table, name, before) if is_there else delattr(table, name)


def _times(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    def changed(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs) * factor

    return changed


def _shifted(self: Any, x: Tensor) -> Tensor:
    return x - 7


CHANGES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "method of a submodule's base": lambda m: _set(m.Base, "forward", lambda self, x: self.linear(x) * 5),
    "method that its class had from a base": lambda m: _set(m.Block, "scale", lambda self, x: x * 9),
    "forward": lambda m: _set(m.Net, "forward", lambda self, x: self.block(x)),
    "class attribute": lambda m: _set(m.Base, "amount", 4),
    "function": lambda m: _set(m, "helper", lambda x: x * 11),
    "function that a function calls": lambda m: _set(m, "deeper", lambda x: x + 13),
    "number": lambda m: _set(m, "FACTOR", 2.5),
    "class": lambda m: _set(m, "Shift", type("Shift", (), {"apply": _shifted})),
    "method of another class": lambda m: _set(m.Shift, "apply", _shifted),
    "function of another file": lambda m: _set(m.tools, "bent", lambda x: x * 3),
    "function of torch": lambda m: _set(F, "silu", _times(F.silu, 2)),
    "function that torch calls": lambda m: _set(F, "group_norm", _times(F.group_norm, 2)),
    "method of torch": lambda m: _set(nn.Linear, "forward", _times(nn.Linear.forward, 2)),
}


def _check(*pairs: tuple[nn.Module, Any]) -> None:
    for seed, (module, compiled) in enumerate(pairs):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_is_noticed(space: Any, change: str, cache: bool) -> None:
    first = space.Net()
    pairs = [(first, oxidiff.compile(first, cache=cache, strict=True))]
    _check(*pairs)
    undo = CHANGES[change](space)
    try:
        second = space.Net()
        pairs.append((second, oxidiff.compile(second, cache=cache, strict=True)))
        _check(*pairs)
        _check(*reversed(pairs))
        assert oxidiff.report(pairs[0][1]).shared_with == 1
    finally:
        undo()
    _check(*pairs)
    for _, compiled in pairs:
        assert oxidiff.report(compiled).eager_calls == 0


_SETTINGS = """
import types
import os
from torch import nn

class Settings:
    shift = 1.0
    def __init__(self):
        self.scale, self.inner, self.steps = 2.0, types.SimpleNamespace(power=1.0), 0

settings = Settings()
table = {"scale": 2.0, "inner": {"shift": [1.0, 2.0]}, ("a", "key"): 3.0}
kinds, listed = {"plain"}, [1.0, 2.0]

class Net(nn.Module):
    registry = {"scale": 2.0}
    def forward(self, x):
        x = x * settings.scale ** settings.inner.power + settings.shift
        x = x * table["scale"] + table["inner"]["shift"][0] - table[("a", "key")] + table.get("more", 0.0)
        x = x * listed[0] + len(listed) + ("shifted" in kinds) * 5 + self.registry["scale"]
        return x + float(os.environ.get("TESTED_SHIFT", 0))
"""

INSIDE: dict[str, Callable[[Any], object]] = {
    "attribute of an object": lambda m: setattr(m.settings, "scale", 3.0),
    "attribute that its class had": lambda m: setattr(m.settings, "shift", 4.0),
    "attribute of an object in an object": lambda m: setattr(m.settings.inner, "power", 2.0),
    "item of a dictionary": lambda m: m.table.update(scale=5.0),
    "item of a list in dictionaries": lambda m: m.table["inner"]["shift"].__setitem__(0, 6.0),
    "item under a tuple": lambda m: m.table.update({("a", "key"): 7.0}),
    "new item": lambda m: m.table.update(more=8.0),
    "item that goes": lambda m: m.table.pop("more"),
    "item of a list": lambda m: m.listed.__setitem__(0, 9.0),
    "length of a list": lambda m: m.listed.append(1.0),
    "element of a set": lambda m: m.kinds.add("shifted"),
    "item of a dictionary of a class": lambda m: m.Net.registry.update(scale=10.0),
    "variable of the environment": lambda m: os.environ.update(TESTED_SHIFT="11"),
}


@torch.no_grad()
@pytest.mark.parametrize("cache", [False, True])
def test_what_changes_inside_of_globals_is_noticed(cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTED_SHIFT", "0")
    space = types.ModuleType(f"settings_{next(_NAMES)}")
    exec(_SETTINGS, space.__dict__)
    module, other = space.Net(), space.Net()
    pairs = [(one, oxidiff.compile(one, cache=cache, strict=True)) for one in (module, other)]
    _check(*pairs)
    for name, change in INSIDE.items():
        before = module(torch.ones(2))
        change(space)
        assert not torch.equal(module(torch.ones(2)), before), name
        _check(*pairs)
        captures = oxidiff.report(pairs[0][1]).captures
        # What nobody reads, and what is set to what it was.
        space.settings.steps += 1
        space.table.update({"scale": space.table["scale"] + 0.0, name: torch.ones(1)})
        os.environ["TESTED_OTHER"] = name
        _check(*pairs)
        assert oxidiff.report(pairs[0][1]).captures == captures, name
    monkeypatch.delenv("TESTED_OTHER")


_LOOKS = """
import argparse, operator
from torch import nn

class Own:
    def __init__(self): self.scale, self.note = 2.0, 0
class Slotted:
    __slots__ = ("scale", "note")
    def __init__(self): self.scale, self.note = 2.0, 0
    @property
    def twice(self): return self.scale * 2

found = {KIND}
def get(name): return getattr(found, name)

class Net(nn.Module):
    def forward(self, x): return x * {WAY}
"""


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Own()", "Slotted()", "argparse.Namespace(scale=2.0, note=0)"])
@pytest.mark.parametrize(
    "way",
    [
        "found.scale", "getattr(found, 'scale')", "[getattr(found, name) for name in ('scale',)][0]", "get('scale')",
        "operator.attrgetter('scale')(found)", "vars(found)['scale']", "found.__dict__['scale']", "found.twice",
    ],
)  # fmt: skip
def test_however_code_looks_for_an_attribute_its_changes_are_noticed(way: str, kind: str) -> None:
    space = types.ModuleType(f"looks_{next(_NAMES)}")
    exec(_LOOKS.replace("{KIND}", kind).replace("{WAY}", way), space.__dict__)
    if kind == "Slotted()" and ("vars" in way or "__dict__" in way):
        pytest.skip("has no dictionary")
    if kind != "Slotted()" and "twice" in way:
        pytest.skip("has no such property")
    module = space.Net()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    _check((module, compiled))
    captures = oxidiff.report(compiled).captures
    if "__dict__" not in way and "vars" not in way:
        space.found.note = 1
        _check((module, compiled))
        assert oxidiff.report(compiled).captures == captures
    space.found.scale = 3.0
    _check((module, compiled))
    assert oxidiff.report(compiled).captures > captures
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_what_is_not_read_changes_nothing(space: Any) -> None:
    module = space.Net()
    compiled: Any = oxidiff.compile(module, cache=False)
    _check((module, compiled))
    captures = oxidiff.report(compiled).captures
    for i in range(40):
        space.other = i
        space.FACTOR = float("2.0")
        space.tools.more = lambda: None
        space.Block.note = i
        space.Shift.seen = object()
        _check((module, compiled))
    assert oxidiff.report(compiled).captures == captures


@torch.no_grad()
def test_a_file_that_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's autoreload does: objects stay, their functions get the new code."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"reloaded_{next(_NAMES)}"
    file = tmp_path / f"{name}.py"
    text = (
        "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x * FACTOR\nFACTOR = "
    )
    file.write_text(text + "2\n")
    space = importlib.import_module(name)
    module = space.Net()
    old = space.Net.forward
    compiled: Any = oxidiff.compile(module, cache=False)
    _check((module, compiled))
    file.write_text(text.replace("x * FACTOR", "x - FACTOR") + "333\n")
    importlib.reload(space)
    old.__code__ = space.Net.forward.__code__
    _check((module, compiled))
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), -333.0))


WRITERS = {
    "a global": ("global count\n    count += 1", lambda m: m.count),
    "an item of a global": ("STEPS['kept'] += 1", lambda m: m.STEPS["kept"]),
    "a class": ("Counter.calls += 1", lambda m: m.Counter.calls),
    "an object": ("counter.calls += 1", lambda m: m.counter.calls),
    "a function": (
        "tools.bent.calls = getattr(tools.bent, 'calls', 0) + 1",
        lambda m: getattr(m.tools.bent, "calls", 0),
    ),
    "a global by the size": ("global count\n    count = x.shape[0]", lambda m: m.count),
}


@torch.no_grad()
@pytest.mark.parametrize("writer", WRITERS)
def test_what_forward_writes_outside_is_eagers(space: Any, writer: str) -> None:
    """Not a call more, and none less, of those that count: traces leave nothing behind, and calls run in Python."""
    text, read = WRITERS[writer]
    exec(
        f"def counting(self, x):\n    {text}\n    return self.block(x) * count\nNet.forward = counting", space.__dict__
    )
    start = copy.deepcopy((space.count, space.STEPS, 0))
    seen = []
    for is_compiled in (False, True):
        space.count, space.STEPS, space.Counter.calls = copy.deepcopy(start)
        space.counter.__dict__.clear()
        space.tools.bent.__dict__.clear()
        module = space.Net()
        run: Any = oxidiff.compile(module, cache=False) if is_compiled else module
        seen.append([])
        for i in range(12):
            x = torch.randn(2 + i % 3, 4, generator=torch.Generator().manual_seed(i))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", oxidiff.FallbackWarning)
                seen[-1].append((run(x), read(space)))
    for (expected, before), (actual, now) in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected)
        assert now == before
    report = oxidiff.report(run)
    assert report.captures <= 8
    assert "changes" in report.fallbacks[-1]["reason"]


@torch.no_grad()
def test_what_changes_at_each_call_is_said_once(space: Any) -> None:
    module = space.Net()
    compiled: Any = oxidiff.compile(module, cache=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(40):
            space.FACTOR = float(i + 2)
            torch.testing.assert_close(compiled(torch.ones(3, 4)), module(torch.ones(3, 4)))
    (warning,) = [w for w in caught if "changes again and again" in str(w.message)]
    # What is inside of it and finds something else need not be.
    assert "Net runs in one part with Python around it: FACTOR" in str(warning.message)
    assert warning.filename == __file__
    report = oxidiff.report(compiled)
    assert report.captures < 20 and report.eager_calls == 0
    assert "FACTOR changes again and again" in report.fallbacks[-1]["reason"]


_SCALE = 1.0


class _Factored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * _SCALE


@torch.no_grad()
def test_a_module_that_is_given_up_leaves_others_of_its_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same program, and look at the same."""
    x = torch.ones(3, 4)
    modules = [_Factored().eval() for _ in range(2)]
    first, second = [oxidiff.compile(module, cache=False) for module in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for i in range(40):
            monkeypatch.setattr(sys.modules[__name__], "_SCALE", float(i + 2))
            torch.testing.assert_close(first(x), modules[0](x))
            if oxidiff.report(first).fallbacks:
                break
            torch.testing.assert_close(second(x), modules[1](x))
    assert oxidiff.report(first).fallbacks and not oxidiff.report(second).fallbacks, "the test itself"
    torch.testing.assert_close(second(x), modules[1](x))


class _Scaled(nn.Module):
    """Of two layers, one of which is scaled by what changes outside of it."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.net = space.Net()

    def forward(self, x: Tensor) -> Any:
        return self.first(x) + self.net(x)


@torch.no_grad()
def test_what_is_around_what_changes_outside_stays_compiled(space: Any) -> None:
    module = _Scaled(space).eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    captures = []
    for i in range(60):
        space.FACTOR = float(i + 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oxidiff.FallbackWarning)
            torch.testing.assert_close(compiled(torch.ones(3, 4)), module(torch.ones(3, 4)))
        captures.append(oxidiff.report(compiled).captures)
    assert oxidiff.report(compiled).eager_calls == 0
    assert captures[-1] == captures[30], "a part is captured for what another one finds"


@torch.no_grad()
def test_programs_go_with_their_module(space: Any) -> None:
    module = space.Net()
    compiled = oxidiff.compile(module, cache=False)
    _check((module, compiled))
    held = [compiled]
    del compiled
    assert programs_go_with(held)


@torch.no_grad()
def test_compiled_functions(space: Any) -> None:
    module = space.Net()
    compiled: Any = oxidiff.compile(lambda x: module(x) * space.FACTOR, cache=False)

    def eager(x: Tensor) -> Any:
        return module(x) * space.FACTOR

    for change in ("number", "function", "function of torch"):
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), eager(x))
        undo = CHANGES[change](space)
        torch.testing.assert_close(compiled(x), eager(x))
        undo()


_factor = 2.0


@torch.no_grad()
def test_a_number_that_a_compiled_function_reads_is_followed_without_end() -> None:
    """It is there as an attribute is, and not looked for a second time."""
    global _factor
    linear = nn.Linear(4, 4).eval()
    compiled: Any = oxidiff.compile(lambda x: linear(x) * _factor, cache=False, strict=True)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(40):
            _factor = i + 0.5
            torch.testing.assert_close(compiled(x), linear(x) * _factor)


class _Doubled:
    """A function that is an object, as wrappers of attention are."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs) * 2


@torch.no_grad()
@pytest.mark.parametrize("wrap", [_Doubled, lambda f: functools.partial(_times(f, 2)), lambda f: _times(f, 2)])
@pytest.mark.parametrize("name", ["silu", "layer_norm", "softmax", "scaled_dot_product_attention", "interpolate"])
def test_a_wrapper_in_the_place_of_a_function_of_torch_runs_once(
    name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return calls[name](x)

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: F.silu(x),
        "layer_norm": lambda x: F.layer_norm(x, (8,)),
        "softmax": lambda x: F.softmax(x, dim=1),
        "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    }
    monkeypatch.setattr(F, name, wrap(getattr(F, name)))
    x = torch.randn(2, 3, 8)
    compiled: Any = oxidiff.compile(Model(), cache=False, strict=True)
    torch.testing.assert_close(compiled(x), Model()(x))


_KEEPS = """
import torch
from torch import nn
count, tables, made = 0, {}, []

class Node:
    pass

first, second = Node(), Node()
first.other, second.other, first.value = second, first, 1.0
factors = {"scale": 1.0}

def scale():
    return factors["scale"]

class Net(nn.Module):
    def forward(self, x, is_set=False):
        global count
        count += 1
        if 4 not in tables:
            tables[4] = torch.arange(4).float()
        if is_set:
            first.other.other.value = 3.0
        return (x + tables[4]) * scale()
"""


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_tables_in_globals_are_never_those_of_a_trace() -> None:
    """Beside a count, and objects that lead to each other."""
    space = types.ModuleType(f"keeps_{next(_NAMES)}")
    exec(_KEEPS, space.__dict__)
    module = space.Net()
    compiled: Any = oxidiff.compile(module, cache=False)
    for call in range(1, 5):
        torch.testing.assert_close(compiled(torch.ones(3, 4)), 1 + torch.arange(4.0).expand(3, 4))
        assert space.count == call
        assert not space.tables[4].is_meta
    space.factors["scale"] = 5.0
    torch.testing.assert_close(compiled(torch.ones(3, 4)), 5 * (1 + torch.arange(4.0)).expand(3, 4))


def _table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)[:, None].sin()


class _Tables:
    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}

    def get(self, size: int) -> Tensor:
        if size not in self.made:
            self.made[size] = _table(size)
        return self.made[size]


class _SlottedTables(_Tables):
    __slots__ = ("made",)


def _keeping(where: str) -> tuple[nn.Module, dict[int, Tensor]]:
    """A module that adds a table for each size, kept where no module is, and the dictionary for it: empty at first, so that
    Python's collector does not know it."""
    made: dict[int, Tensor] = {}
    add: Callable[[Any, Tensor], Tensor]
    if where == "closure":

        def add(_: Any, x: Tensor) -> Tensor:
            if x.shape[1] not in made:
                made[x.shape[1]] = _table(x.shape[1])
            return x + made[x.shape[1]]

    elif where == "default":

        def add(_: Any, x: Tensor, made: dict[int, Tensor] = made) -> Tensor:
            if x.shape[1] not in made:
                made[x.shape[1]] = _table(x.shape[1])
            return x + made[x.shape[1]]

    elif where == "dictionary":
        outer = {"kept": made}

        def add(_: Any, x: Tensor) -> Tensor:
            if x.shape[1] not in outer["kept"]:
                outer["kept"][x.shape[1]] = _table(x.shape[1])
            return x + outer["kept"][x.shape[1]]

    elif where in ("ChainMap", "list", "thread"):
        chained, listed, local = collections.ChainMap[int, Tensor]({}), [made], threading.local()
        local.made = made
        made = cast(dict[int, Tensor], chained.maps[0]) if where == "ChainMap" else made

        def add(_: Any, x: Tensor) -> Tensor:
            tables = chained if where == "ChainMap" else listed[0] if where == "list" else local.made
            if x.shape[1] not in tables:
                tables[x.shape[1]] = _table(x.shape[1])
            out: Tensor = x + tables[x.shape[1]]
            return out

    elif where == "function":

        def get(size: int) -> Tensor:
            tables: dict[int, Tensor] = get.made  # type: ignore[attr-defined]
            if size not in tables:
                tables[size] = _table(size)
            return tables[size]

        get.made = made  # type: ignore[attr-defined]

        def add(_: Any, x: Tensor) -> Tensor:
            return x + get(x.shape[1])

    elif where == "class":

        class Kept:
            tables = made

            @classmethod
            def get(cls, size: int) -> Tensor:
                if size not in cls.tables:
                    cls.tables[size] = _table(size)
                return cls.tables[size]

        def add(_: Any, x: Tensor) -> Tensor:
            return x + Kept.get(x.shape[1])

    else:
        tables = _Tables() if where == "object" else _SlottedTables()
        made = tables.made

        def add(_: Any, x: Tensor) -> Tensor:
            return x + tables.get(x.shape[1])

    return nn.Sequential(nn.Linear(8, 8), type("Positions", (nn.Module,), {"forward": add})(), nn.Linear(8, 8)), made


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("where", [
        "closure", "default", "dictionary", "list", "ChainMap", "thread", "function", "class", "object", "slots",
    ])  # fmt: skip
@torch.no_grad()
def test_what_keeps_tables_for_each_size_stays_what_it_was(where: str) -> None:
    """The dictionary is where it was, and never has a table of a trace."""
    net, made = _keeping(where)
    compiled: Any = oxidiff.compile(net, cache=False)
    for size in (4, 7, 4, 7, 9):
        x = torch.randn(2, size, 8)
        for _ in range(2):
            actual = compiled(x)
            assert [table.device.type for table in made.values()] == ["cpu"] * len(made)
            assert size in made
            first, _, last = net
            torch.testing.assert_close(actual, last(first(x) + _table(size)))
    assert oxidiff.report(compiled).captures


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("what", ["number", "function", "tensor", "nothing"])
@torch.no_grad()
def test_variables_around_a_forward_are_noticed(what: str) -> None:
    """Another value of a variable that a function has around it, of no module's own."""
    factor, wave, shift = 2.0, torch.sin, torch.ones(8)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return wave(x * factor) + shift

    def change() -> None:
        nonlocal factor, wave, shift
        if what == "number":
            factor = 3.0
        elif what == "function":
            wave = torch.cos
        elif what == "tensor":
            shift = torch.full((8,), 5.0)
        else:
            del shift

    net = Net()
    compiled: Any = oxidiff.compile(net, cache=False, strict=what != "nothing")
    x = torch.randn(2, 8)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), torch.sin(x * 2) + 1)
    change()
    if what == "nothing":
        with pytest.raises(NameError, match="shift"):
            compiled(x)
        return
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_a_variable_that_forward_assigns_to_is_eagers() -> None:
    """A table for the last size, and a count, in variables around a class's ``forward``."""
    table: Tensor | None = None
    count = 0

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal table, count
            count += 1
            if table is None or len(table) != x.shape[0]:
                table = _table(x.shape[0])
            return x + table

    compiled: Any = oxidiff.compile(Net(), cache=False)
    for call, size in enumerate((4, 4, 7, 4, 7, 7), start=1):
        x = torch.randn(size, 8)
        torch.testing.assert_close(compiled(x), x + _table(size))
        assert count == call
        assert table is not None
        assert not table.is_meta


class _Asking(nn.Module):
    """Does something else as modes of torch are."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ask = ask
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (2 if self.ask() else 3)
        return out


def _flags(space: Any, name: str) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def changed() -> Iterator[None]:
        before = getattr(space, name)
        setattr(space, name, not before)
        try:
            yield
        finally:
            setattr(space, name, before)

    return changed


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_MODES: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "grad": (lambda: torch.is_grad_enabled(), torch.enable_grad),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "deterministic": (lambda: torch.are_deterministic_algorithms_enabled(), _deterministic),
    "cudnn": (lambda: torch.backends.cudnn.benchmark, _flags(torch.backends.cudnn, "benchmark")),
    "tf32": (lambda: torch.backends.cudnn.allow_tf32, _flags(torch.backends.cudnn, "allow_tf32")),
    "math": (lambda: torch.backends.cuda.math_sdp_enabled(), lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "threads": (lambda: torch.get_num_threads() % 2, _threads),
}


@pytest.mark.parametrize(
    ("name", "background"), [*((name, False) for name in _MODES), ("grad", True), ("inference", True), ("math", True)]
)
def test_modes_that_forward_asks_for_select_the_program(name: str, background: bool) -> None:
    ask, mode = _MODES[name]
    module = _Asking(ask)
    compiled: Any = oxidiff.compile(module, cache=False, background=background)
    x = torch.randn(3, 4)
    for captures, change in ((1, torch.no_grad), (2, mode), (2, torch.no_grad), (2, mode)):
        calls, end = 0, time.monotonic() + 20
        while calls < 3 or (oxidiff.report(compiled).captures < captures and time.monotonic() < end):
            with torch.no_grad(), change():
                torch.testing.assert_close(compiled(x), module(x))
            calls += 1
    report = oxidiff.report(compiled)
    assert (report.captures, report.fallbacks) == (2, [])


@torch.no_grad()
def test_stored_graphs_are_of_the_modes_that_forward_asked_for(tmp_path: Path) -> None:
    module = _Asking(_MODES["grad"][0])
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.randn(3, 4)
    compiled(x)
    oxidiff.save_graph(compiled, tmp_path / "graph")
    loaded: Any = oxidiff.compile(copy.deepcopy(module), cache=False)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    torch.testing.assert_close(loaded(x), module(x))
    assert oxidiff.report(loaded).captures == 0
    with torch.enable_grad():
        torch.testing.assert_close(loaded(x), module(x))
    assert oxidiff.report(loaded).captures == 1


@torch.no_grad()
def test_modes_that_no_code_asks_for_select_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4)).eval().requires_grad_(False)
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    x = torch.randn(3, 4)
    for _, mode in _MODES.values():
        with mode():
            torch.testing.assert_close(compiled(x), module(x))
    # That changes the numbers of f32 on a GPU, and is part of every key.
    assert oxidiff.report(compiled).programs == 1


@torch.no_grad()
def test_whether_an_argument_was_made_in_inference_mode_is_asked_in_eager() -> None:
    class Net(_Asking):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * (2 if x.is_inference() else 3)
            return out

    module = Net(lambda: True)
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.randn(3, 4)
    with torch.inference_mode():
        y = x.clone()
    with pytest.warns(oxidiff.FallbackWarning, match="made in inference mode"):
        torch.testing.assert_close(compiled(x), module(x))
    for given in (y, x):
        torch.testing.assert_close(compiled(given), module(given))
