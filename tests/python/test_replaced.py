"""Functions in the place of a ``forward``, as libraries put them there that cache, patch and look into models: they run as
they are, around parts that are compiled, and what they keep between calls is theirs."""

from __future__ import annotations

import functools
import gc
import linecache
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import patched_forward
from oxidiff import testing
from oxidiff.module import dispatcher_of
from oxidiff.redirect import Redirecting
from oxidiff.split import Split

pytestmark = pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_function_that_is_marked_as_another_one_of_more_arguments() -> None:
    """As cache-dit puts it there."""

    def doubled(self: Block, x: Tensor) -> Tensor:
        return 2 * Block.forward(self, x)

    module = Block(8)
    module.forward = functools.update_wrapper(functools.partial(doubled, module), doubled)  # type: ignore[method-assign]
    compiled = oxidiff.compile(module, strict=True)
    for rows in (2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), 2 * Block.forward(module, x))
        torch.testing.assert_close(compiled(x=x), 2 * Block.forward(module, x))
    assert oxidiff.report(compiled).eager_calls == 0


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        x = self.first(x) + step.to(x.dtype).sin()
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


class DeepCache:
    """Keeps what blocks return, and returns it again at other steps, as ``DeepCacheSDHelper`` does."""

    def __init__(self, net: Any, steps: list[int], interval: int = 2) -> None:
        self.net, self.steps, self.interval = net, torch.tensor(steps), interval
        self.ran = 0

    def enable(self) -> None:
        self.now = 0
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.kept: dict[Any, Any] = {}
        self._wrap_net()
        for i, block in enumerate(self.net.blocks):
            self._wrap(block, i)

    def disable(self) -> None:
        self.net.forward = self.functions["net"]
        for i, block in enumerate(self.net.blocks):
            block.forward = self.functions["block", i]

    def _wrap_net(self) -> None:
        self.functions["net"] = self.net.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.now = list(self.steps).index(args[1].item())
            return self.functions["net"](*args, **kwargs)

        self.net.forward = wrapped

    def _wrap(self, block: nn.Module, i: int) -> None:
        self.functions["block", i] = block.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            skips = self.now % self.interval != 0 and i in (1, 2)
            result = self.kept[i] if skips else self.functions["block", i](*args, **kwargs)
            if not skips:
                self.kept[i] = result
                self.ran += 1
            return result

        block.forward = wrapped  # type: ignore[method-assign]


STEPS = [800, 600, 400, 200]


def steps(net: Any, size: int = 16) -> list[Tensor]:
    random = torch.Generator().manual_seed(size)
    return [net(torch.randn(2, size, 8, generator=random), torch.tensor(step)) for step in STEPS]


def agree(compiled: Any, eager: Any, size: int = 16) -> None:
    for actual, expected in zip(steps(compiled, size), steps(eager, size), strict=True):
        assert testing.relative_error(actual, expected) < 2e-5


def runs_in_parts(compiled: Any) -> bool:
    """Whether the next steps run in parts that are compiled, without a capture."""
    dispatcher = dispatcher_of(compiled)
    before = oxidiff.report(compiled).eager_calls, dispatcher.captures
    steps(compiled)
    parts = dispatcher.pieces()
    is_compiled = bool(parts) and all(part.calls > part.eager_calls for part in parts if part.calls)
    return is_compiled and (oxidiff.report(compiled).eager_calls, dispatcher.captures) == before


@pytest.mark.parametrize("is_first", [True, False], ids=["enabled first", "compiled first"])
def test_outputs_of_blocks_are_kept(is_first: bool) -> None:
    """As DeepCache does: by a function around the model that reads the step, and one around each block."""
    eager, module = build(), build()
    whole = steps(build())
    DeepCache(eager, STEPS).enable()
    if is_first:
        cache = DeepCache(module, STEPS)
        cache.enable()
        compiled: Any = oxidiff.compile(module)
    else:
        compiled = oxidiff.compile(module)
        cache = DeepCache(compiled, STEPS)
        cache.enable()
    agree(compiled, eager)
    assert testing.relative_error(steps(eager)[1], whole[1]) > 1e-3, "the cache matters"
    agree(compiled, eager, size=24)
    assert runs_in_parts(compiled)
    before = cache.ran
    steps(compiled)
    assert cache.ran - before == 12, "two of four blocks are left out at two of four steps"


def test_what_a_function_kept_before_is_let_go_of() -> None:
    """A module that is another at each call, for what functions keep, is remembered without what they kept."""
    compiled: Any = oxidiff.compile(build())
    cache = DeepCache(compiled, STEPS)
    cache.enable()
    kept: dict[int, weakref.ref[Tensor]] = {}
    for size in (16, 16, 24, 16):
        steps(compiled, size)
        kept.update((id(value), weakref.ref(value)) for value in cache.kept.values())
    gc.collect()
    alive = {id(value) for ref in kept.values() if (value := ref()) is not None}
    assert alive == {id(value) for value in cache.kept.values()}


def test_functions_come_and_go() -> None:
    compiled: Any = oxidiff.compile(build())
    eager = build()
    agree(compiled, eager)
    caches = [DeepCache(net, STEPS) for net in (compiled, eager)]
    for _ in range(2):
        for cache in caches:
            cache.enable()
        agree(compiled, eager)
        for cache in caches:
            cache.disable()
        agree(compiled, eager)
    captures = oxidiff.report(compiled).captures
    agree(compiled, eager)
    assert oxidiff.report(compiled).captures == captures
    assert captures < 8


def test_weights_and_attributes_of_parts_are_live() -> None:
    """A part stands for a block without the function around it, which is the block in all else."""
    compiled: Any = oxidiff.compile(build())
    eager = build()
    for net in (compiled, eager):
        DeepCache(net, STEPS).enable()
    agree(compiled, eager)
    for net in (compiled, eager):
        net.blocks[0].gain = 0.5
        net.blocks[3].up.weight.mul_(1.5)
    agree(compiled, eager)
    for net in (compiled, eager):
        torch.manual_seed(1)
        net.blocks[0].up = nn.Linear(32, 64)
    agree(compiled, eager)


class Counted(Block):
    """Sets an attribute at each call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_what_forward_sets_is_the_modules() -> None:
    nets = []
    for _ in range(2):
        net = build()
        torch.manual_seed(0)
        net.blocks[1] = Counted(32)
        nets.append(net)
    compiled: Any = oxidiff.compile(nets[0])
    for net in (compiled, nets[1]):
        DeepCache(net, STEPS).enable()
    agree(compiled, nets[1])
    assert nets[0].blocks[1].count == nets[1].blocks[1].count == 2


def test_references_are_banked() -> None:
    """Reference-only control: a call with a picture fills lists, which the next call attends to."""

    def prepare(net: Any) -> Callable[[int], Tensor]:
        mode = "write"

        def banked(self: Any, x: Tensor) -> Tensor:
            normed = self.norm(x)
            if mode == "write":
                self.bank.append(normed.clone())
            else:
                normed = normed + torch.cat(self.bank).mean()
                self.bank.clear()
            return x + self.down(nn.functional.gelu(self.up(normed)))

        for block in net.blocks:
            block.bank = []
            block.forward = banked.__get__(block)

        def run(size: int) -> Tensor:
            nonlocal mode
            random = torch.Generator().manual_seed(size)
            reference, x = torch.randn(2, 2, size, 8, generator=random)
            mode = "write"
            net(reference, torch.tensor(1))
            mode = "read"
            return net(x, torch.tensor(1))

        return run

    module = build()
    compiled: Any = oxidiff.compile(module)
    actual, expected = prepare(compiled), prepare(build())
    for size in (16, 16, 24, 16):
        assert testing.relative_error(actual(size), expected(size)) < 2e-5
    report = oxidiff.report(compiled)
    assert not any(block.bank for block in module.blocks)
    assert testing.relative_error(actual(16), expected(16)) < 2e-5
    # Nothing is tried again.
    assert oxidiff.report(compiled).captures == report.captures


def test_blocks_are_swapped_while_it_runs() -> None:
    """As ParaAttention does: for the time of a call other blocks are in the place of the model's."""

    class First(nn.Module):
        def __init__(self, blocks: nn.ModuleList) -> None:
            super().__init__()
            self.blocks = blocks
            self.kept: Tensor | None = None
            self.residual = torch.zeros(())
            self.ran = 0

        def forward(self, x: Tensor) -> Tensor:
            before, x = x, self.blocks[0](x)
            change = x - before
            if self.kept is not None and ((self.kept - change).abs().mean() / change.abs().mean()).item() < 10.0:
                return x + self.residual
            self.kept, start = change, x
            self.ran += 1
            for block in self.blocks[1:]:
                x = block(x)
            self.residual = x - start
            return x

    def apply(net: Any) -> First:
        first = First(net.blocks)
        cached = nn.ModuleList([first])
        original = net.forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with unittest.mock.patch.object(self, "blocks", cached):
                return original(*args, **kwargs)

        net.forward = forward.__get__(net)
        return first

    module, eager = build(), build()
    compiled: Any = oxidiff.compile(module)
    blocks = module.blocks
    mine, theirs = apply(compiled), apply(eager)
    agree(compiled, eager)
    agree(compiled, eager)
    assert mine.ran == theirs.ran < 8, "some steps leave blocks out"
    assert runs_in_parts(compiled)
    assert module.blocks is blocks


@pytest.mark.parametrize("is_first", [True, False], ids=["enabled first", "compiled first"])
def test_blocks_are_swapped_behind_another_function(is_first: bool) -> None:
    """As cache-dit does: `forward` was replaced once before, and what is in the place of the blocks holds the model, too."""

    class Context:
        step = 0

    class Cached(nn.Module):
        def __init__(self, net: nn.Module, context: Context) -> None:
            super().__init__()
            self.net, self.blocks, self.context = net, net.blocks, context
            self.kept = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.context.step += 1
            if self.context.step % 2 == 0:
                return x + self.kept
            start = x
            for block in self.blocks:
                x = block(x)
            self.kept = x - start
            return x

    def apply(net: Any) -> None:
        net.forward = types.MethodType(patched_forward, net)
        original = net.forward
        cached = nn.ModuleList([Cached(net, Context())])

        def around(self: Any, *args: Any, **kwargs: Any) -> Any:
            with unittest.mock.patch.object(self, "blocks", cached):
                return original(*args, **kwargs)

        net.forward = functools.update_wrapper(functools.partial(around, net), around)

    module, eager = build(), build()
    if is_first:
        apply(module)
    compiled: Any = oxidiff.compile(module)
    if not is_first:
        apply(compiled)
    apply(eager)
    agree(compiled, eager)
    agree(compiled, eager, 24)
    parts = dispatcher_of(compiled).pieces()
    assert len(parts) == 4 and all(part.calls and not part.eager_calls for part in parts)


def traced(compiled: Any) -> int:
    """How often a model and its parts were traced."""
    return sum(engine._capturer.traces for engine in dispatcher_of(compiled).engines())


def test_other_functions_take_their_place() -> None:
    """As T-GATE does: in each phase of a loop there are other functions around the same modules."""

    calls = []

    def put(net: Any, is_kept: bool) -> None:
        def around(block: Any, former: Callable[..., Any]) -> Callable[..., Any]:
            def forward(x: Tensor) -> Tensor:
                calls.append(is_kept)
                if is_kept:
                    return x + block.kept
                block.kept = former(x)
                return block.kept

            return forward

        for block in net.blocks:
            block.forward = around(block, types.MethodType(type(block).forward, block))

    compiled: Any = oxidiff.compile(build())
    eager = build()
    for is_kept in (False, True, False, True):
        for net in (compiled, eager):
            put(net, is_kept)
        agree(compiled, eager)
    captures, traces = oxidiff.report(compiled).captures, traced(compiled)
    put(compiled, True)
    put(eager, True)
    agree(compiled, eager)
    assert (oxidiff.report(compiled).captures, traced(compiled)) == (captures, traces)
    assert len(calls) == 5 * 2 * len(STEPS) * 4


def test_former_forward_in_a_global() -> None:
    """A notebook keeps what was there before in a variable of its own."""
    source = """
original = net.forward
seen = []
def wrapped(x, step):
    seen.append(step.item())
    return helper(x, step)
def helper(x, step):
    return original(x, step) * len(seen)
net.forward = wrapped
"""
    # Where notebooks put the text of a cell.
    name = "<cell 1>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    spaces: list[dict[str, Any]] = []
    for net in (oxidiff.compile(build()), build()):
        space: dict[str, Any] = {"net": net, "torch": torch}
        exec(compile(source, name, "exec"), space)
        spaces.append(space)
    agree(spaces[0]["net"], spaces[1]["net"])
    assert spaces[0]["seen"] == spaces[1]["seen"] == STEPS
    assert runs_in_parts(spaces[0]["net"])


def _sibling(net: Any) -> dict[str, Any]:
    original = chosen = net.forward

    def doubled(x: Tensor, step: Tensor) -> Tensor:
        return original(x, step) * 2

    def choose(step: Tensor) -> None:
        nonlocal chosen
        chosen = doubled if step.item() % 400 == 0 else original

    def forward(x: Tensor, step: Tensor) -> Tensor:
        choose(step)
        return chosen(x, step)

    net.forward = forward
    return {}


class _Helper:
    count = 0

    def __init__(self, net: Any) -> None:
        self.functions = {"net": net.forward}
        self.seen: dict[Any, int] = {}
        self.itself: Any = None
        self.alias: Any = None

    @classmethod
    def bump(cls) -> None:
        cls.count += 1

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        self.seen[self] = self.seen.get(self, 0) + 1
        self.itself, self.alias = self, self.functions
        self.bump()
        return self.functions["net"](x, step) * (1 + step.item() / 1000) * len(self.seen)


def _identity(net: Any) -> dict[str, Any]:
    kind = type("Helper", (_Helper,), {"count": 0})
    helper = kind(net)

    def forward(x: Tensor, step: Tensor) -> Tensor:
        return helper.forward(x, step)

    net.forward = forward
    return {"helper": helper, "kind": kind}


def _removed(net: Any) -> dict[str, Any]:
    calls = 0
    for block in net.blocks:

        def wrap(block: Any, former: Callable[..., Any]) -> Callable[..., Any]:
            def forward(x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                if calls > 9:
                    block.forward = former
                return former(x) * 2

            return forward

        block.forward = wrap(block, block.forward)
    return {"net": net}


def _later(net: Any) -> dict[str, Any]:
    functions: dict[str, Any] = {"net": net.forward}

    def forward(x: Tensor, step: Tensor) -> Tensor:
        former = functions["net"]
        later = functions.get("later", former)
        functions["later"] = lambda x, step: former(x, step) + len(functions)
        functions["count"] = functions.get("count", 0) + 1
        return later(x, step) * functions["count"]

    net.forward = forward
    return {"functions": functions}


class _Slotted:
    __slots__ = ("count", "former")

    def __init__(self, former: Callable[..., Any]) -> None:
        self.former, self.count = former, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.former(x) * (1 + self.count % 3)


class _Hidden(_Slotted):
    """Has a dictionary, too, and attributes behind properties."""

    def __init__(self, former: Callable[..., Any]) -> None:
        super().__init__(former)
        self._more = 0

    @property
    def more(self) -> int:
        return self._more

    @more.setter
    def more(self, value: int) -> None:
        self._more = value

    def __getattr__(self, name: str) -> Any:
        if name == "most":
            return self._more
        raise AttributeError(name)

    def forward(self, x: Tensor) -> Tensor:
        self.more += 1
        return super().forward(x) + self.most % 2


def _methods(kind: Any, net: Any) -> dict[str, Any]:
    helpers = [kind(block.forward) for block in net.blocks]
    for block, helper in zip(net.blocks, helpers, strict=True):
        block.forward = helper.forward
    return {"counts": lambda: [helper.count for helper in helpers]}


def _partials(net: Any) -> dict[str, Any]:
    state = {"count": 0}

    def forward(former: Callable[..., Any], kept: dict[str, int], x: Tensor) -> Tensor:
        kept["count"] += 1
        return former(x) + kept["count"] % 3

    for block in net.blocks:
        block.forward = functools.partial(forward, block.forward, state)
    return {"counts": lambda: state["count"]}


def _attributes(net: Any) -> dict[str, Any]:
    def wrap(former: Callable[..., Any]) -> Any:
        def forward(x: Tensor) -> Tensor:
            made.count += 1
            return former(x) + made.count % 3

        made: Any = forward
        made.count = 0
        return forward

    for block in net.blocks:
        block.forward = wrap(block.forward)
    return {"counts": lambda: [block.forward.count for block in net.blocks]}


@pytest.mark.parametrize(
    "wrap",
    [functools.partial(_methods, _Slotted), functools.partial(_methods, _Hidden), _partials, _attributes],
    ids=["slots", "properties", "partials", "attributes of functions"],
)
def test_attempts_to_capture_leave_no_count(wrap: Callable[[Any], dict[str, Any]]) -> None:
    """Wherever a function in the place of a ``forward`` counts its calls."""
    compiled: Any = oxidiff.compile(build())
    eager = build()
    mine, theirs = wrap(compiled), wrap(eager)
    for size in (16, 24, 16):
        agree(compiled, eager, size)
        assert mine["counts"]() == theirs["counts"]()
    assert runs_in_parts(compiled)


@pytest.mark.parametrize("wrap", [_sibling, _identity, _removed, _later])
def test_what_a_function_sees_and_sets_is_eager_s(wrap: Callable[[Any], dict[str, Any]]) -> None:
    """Variables that others set meanwhile, its object as a key, that one's class, functions that it puts back or keeps."""
    compiled: Any = oxidiff.compile(build())
    eager = build()
    mine, theirs = wrap(compiled), wrap(eager)
    for _ in range(3):
        agree(compiled, eager)
    if "helper" in mine:
        for held in (mine, theirs):
            helper = held["helper"]
            assert helper.itself is helper
            assert helper.alias is helper.functions
            assert list(helper.seen) == [helper]
        assert mine["kind"].count == theirs["kind"].count == 3 * len(STEPS)
        assert list(mine["helper"].seen.values()) == list(theirs["helper"].seen.values())
    if "net" in mine:
        assert all(block.forward.__func__ is Block.forward for block in mine["net"].blocks)
    if "functions" in mine:
        assert mine["functions"]["count"] == theirs["functions"]["count"]
        x, step = torch.randn(2, 16, 8), torch.tensor(1)
        functions = mine["functions"]["later"], theirs["functions"]["later"]
        assert testing.relative_error(functions[0](x, step), functions[1](x, step)) < 2e-5


# -- maps that are kept ----------------------------------------------------------------------------------------------------

MAPS: list[Tensor] = []
BY_NAME: dict[str, Tensor] = {}


class Looked(nn.Module):
    """Attention of which the maps are looked at: kept in a list or dictionary that belongs to no module."""

    def __init__(self, width: int, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
        self.keep(weights)
        return x + weights @ self.v(x)


def _keeps(kind: str, kept: list[Tensor]) -> Callable[[Tensor], None]:
    if kind == "global list":
        return lambda weights: MAPS.append(weights)
    if kind == "global dictionary":
        return lambda weights: BY_NAME.update(last=weights)
    return lambda weights: kept.append(weights)


@pytest.mark.parametrize("kind", ["global list", "global dictionary", "closure"])
def test_maps_are_kept_outside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One attempt shows which modules do it, and what lies beside them is compiled; Dynamo would take half a minute."""
    monkeypatch.setattr(Split, "__init__", lambda *_: pytest.fail("Dynamo is asked"))
    kept: list[Tensor] = []
    nets = []
    for _ in range(2):
        net = build()
        torch.manual_seed(3)
        net.blocks.insert(2, Looked(32, _keeps(kind, kept)))
        nets.append(net)
    compiled: Any = oxidiff.compile(nets[0])
    agree(compiled, nets[1])
    agree(compiled, nets[1])
    MAPS.clear()
    kept.clear()
    expected = [*steps(nets[1], 24)]
    theirs = [*(kept if kind == "closure" else MAPS), *BY_NAME.values()]
    MAPS.clear()
    kept.clear()
    actual = [*steps(compiled, 24)]
    mine = [*(kept if kind == "closure" else MAPS), *BY_NAME.values()]
    for one, other in zip((*actual, *mine), (*expected, *theirs), strict=True):
        assert testing.relative_error(one, other) < 2e-5
    assert mine
    assert not any(one.is_meta for one in mine)
    assert runs_in_parts(compiled)


def test_tables_for_each_size_are_set_up() -> None:
    """A global that is filled once for each size is no state: each size has a program from its second call on."""
    tables: dict[int, Tensor] = {}

    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] not in tables:
                tables[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float32)[:, None].sin()
            return x + tables[x.shape[1]]

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Positions(), nn.Linear(8, 8)).eval()

    compiled: Any = oxidiff.compile(make())
    eager = make()
    for size in (4, 7, 4, 7):
        x = torch.randn(2, size, 8)
        for _ in range(3):
            assert testing.relative_error(compiled(x), eager(x)) < 2e-5
    report = oxidiff.report(compiled)
    before = report.eager_calls
    for size in (4, 7):
        compiled(torch.randn(2, size, 8))
    assert oxidiff.report(compiled).eager_calls == before
    assert report.captures >= 1


# -- what functions call -------------------------------------------------------------------------------------------------


def _instead(old: Any, new: Any) -> Redirecting:
    return Redirecting(lambda called: new if called == old else called)


def old(x: Any) -> Any:
    return "old", x


def new(x: Any) -> Any:
    return "new", x


def listed(x: Any, *more: Any, function: Callable[..., Any] = old, **named: Any) -> Any:
    def inner() -> Any:
        """A text of
        several lines.
        """
        return [function(x) for _ in more], (lambda: function(named))()

    return inner()


def helped(x: Any, y: Any) -> Any:
    return listed(x, y, y)


class Holder:
    def __init__(self) -> None:
        self.methods = {"a": old}
        self.count = self.__private = 0
        self.named = ""

    def run(self, x: Any) -> Any:
        """A text of
        several lines.
        """
        self.count += 1
        self.__private += 1

        class Inner:
            found = self.methods["a"](x)

        self.methods["b"] = self.methods["a"]
        self.named = Inner.__qualname__
        return Inner.found

    def __call__(self, x: Any) -> Any:
        return self.run(x)


@pytest.mark.parametrize("function", [listed, helped, functools.partial(listed, 1)], ids=["plain", "helped", "partial"])
def test_calls_go_elsewhere(function: Callable[..., Any]) -> None:
    assert repr(function(2, 3)).replace("old", "new") == repr(_instead(old, new).of(function)(2, 3))


def test_a_partial_of_what_is_replaced() -> None:
    def apply(x: Any) -> Any:
        return functools.partial(old, x)()

    assert _instead(old, new).of(functools.partial(old, 1))() == ("new", 1)
    assert _instead(old, new).of(apply)(1) == ("new", 1)


def test_a_partial_of_the_users_own_kind_stays_as_it_is() -> None:
    class Own(functools.partial):  # type: ignore[type-arg]
        pass

    assert not _instead(old, new).can(Own(helped, 1))
    assert _instead(old, new).of(Own(helped, 1))(2) == helped(1, 2)


def test_calls_of_objects_leave_them_as_they_are() -> None:
    holder = Holder()
    for function in (holder, holder.run, Holder.run.__get__(holder)):
        assert _instead(old, new).of(function)(1) == ("new", 1)
        assert holder.methods == {"a": old, "b": old}
    assert holder.count == 3
    assert holder.named == "Holder.run.<locals>.Inner"


def test_variables_are_those_of_the_function() -> None:
    """Who sets one meanwhile, and what the function sets, are seen by all."""
    count, function = 0, len

    def choose() -> None:
        nonlocal function
        function = old

    def counted(x: Any) -> Any:
        nonlocal count
        count += 1
        counted.calls = count
        choose()
        return function(x)

    assert _instead(old, new).of(counted)(1) == ("new", 1)
    assert (count, counted.calls, function) == (1, 1, old)


def test_lines_of_errors_are_those_of_the_source() -> None:
    def failing(x: Any) -> Any:
        if x:
            raise ValueError(old(x))

    with pytest.raises(ValueError, match="new") as caught:
        _instead(old, new).of(failing)(1)
    assert caught.traceback[-1].lineno == failing.__code__.co_firstlineno + 1


def test_a_function_without_its_source_stays_as_it_is(tmp_path: Path) -> None:
    """Nor is one taken from a file that says something else by now."""
    functions: list[Any] = [lambda x: old(x), functools.partial(eval("lambda x: old(x)", {"old": old})), len, print]
    assert not any(map(_instead(old, new).can, functions))
    for name, now, is_there in (("same", "old(x)", True), ("other", "old(x + 1)", False)):
        file = tmp_path / f"{name}.py"
        file.write_text(f"def {name}(x): return {now}")
        space: dict[str, Any] = {"old": old}
        exec(compile(f"def {name}(x): return old(x)", str(file), "exec"), space)
        assert _instead(old, new).can(space[name]) == is_there
        assert _instead(old, new).of(space[name])(1) == ("new" if is_there else "old", 1)
