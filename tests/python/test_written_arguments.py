"""Tensors that `forward` is given, or finds in buffers and attributes, and writes into: caches of keys and values, means
that follow what passes by, images that are changed in place."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close


class Writes(nn.Module):
    """A layer around something that writes."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.write = write

    def forward(self, x: Tensor, y: Tensor) -> Any:
        before = self.layer(x)
        returned = self.write(x, y)
        return before, self.layer(x), returned


def _some(x: Tensor, y: Tensor) -> None:
    x[:, 1:3] = y[:, 1:3]


def _two_parts(x: Tensor, y: Tensor) -> None:
    x[:, 0] = y[:, 1]
    x[:, 1:, 2:4] += 1


def _parts_of_parts(x: Tensor, y: Tensor) -> None:
    x[1:, :, 1:5][:, 2] = y[1:, 0, 1:5] * 2


def _through_views(x: Tensor, y: Tensor) -> None:
    x.transpose(1, 2).unsqueeze(0)[:, :, 1::2].mul_(y.sum())


def _where(x: Tensor, y: Tensor) -> None:
    x[x > 0] = 0.5


def _swapped(x: Tensor, y: Tensor) -> Tensor:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return kept


def _itself(x: Tensor, y: Tensor) -> Tensor:
    return x.mul_(y)


def _read_again(x: Tensor, y: Tensor) -> Tensor:
    part = x[:, :2]
    x += 1
    return part * 2


def _many(x: Tensor, y: Tensor) -> Any:
    x.clamp_(-0.5, 0.5).add_(y)
    y.zero_()
    return [x, y, x + y]


WRITES = (_some, _two_parts, _parts_of_parts, _through_views, _where, _swapped, _itself, _read_again, _many)
SIZES = ((2, 4), (3, 7), (2, 9), (5, 4))


def _plain(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 6)


def _with_gaps(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length + 3, 8)[:, 1:-2, :6]


def _turned(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 6, length).transpose(1, 2)


def _half(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 6, dtype=torch.bfloat16)


def _same_as_eager(module: nn.Module, compiled: Any, *given: Any, **named: Any) -> None:
    """Results and arguments afterwards; which of the results are arguments, too."""
    mine, my_names = copy.deepcopy((given, named))
    expected, actual = module(*given, **named), compiled(*mine, **my_names)
    assert_close(actual, expected)
    assert_close([mine, my_names], [given, named])
    theirs = [t for t in given if isinstance(t, Tensor)]
    ours = [t for t in mine if isinstance(t, Tensor)]
    found = [[r is t for t in theirs] for r in _tensors(expected)]
    assert [[r is t for t in ours] for r in _tensors(actual)] == found


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)] if isinstance(result, tuple | list) else []


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("make", [_plain, _with_gaps, _turned, _half])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_arguments_are_written_as_in_eager(
    write: Callable[[Tensor, Tensor], Any],
    make: Callable[[int, int], Tensor],
    is_loaded: bool,
    tmp_path: Path,
) -> None:
    module = Writes(write).to(make(1, 1).dtype).eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True, tune="off")
    for again in range(1 + is_loaded):
        for size in SIZES:
            if make is _half:
                # Rounded once where eager rounds after each op.
                x, y = make(*size), make(*size)
                mine, ours = x.clone(), y.clone()
                module(x, y), compiled(mine, ours)
                torch.testing.assert_close(mine, x, rtol=2**-7, atol=2**-7)
                torch.testing.assert_close(ours, y, rtol=2**-7, atol=2**-7)
            else:
                _same_as_eager(module, compiled, make(*size), make(*size))
        report = oxidiff.report(compiled)
        assert report.eager_calls == 0
        assert report.captures <= 1
        if is_loaded and not again:
            oxidiff.save_graph(compiled, tmp_path / "graph")
            compiled = oxidiff.compile(module, cache=False, strict=True, tune="off")
            oxidiff.load_graph(compiled, tmp_path / "graph")


class Attention(nn.Module):
    """Keys and values of former calls are in tensors of the caller's, with room for more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 18)

    def forward(self, x: Tensor, cache: Any, start: int) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        end = start + x.shape[1]
        cache["k"][:, start:end] = key
        cache["v"][:, start:end] = value
        kept = cache["k"][:, None, :end], cache["v"][:, None, :end]
        return torch.nn.functional.scaled_dot_product_attention(query[:, None], *kept)[:, 0]


def _cache(length: int = 40) -> dict[str, Tensor]:
    return {name: torch.zeros(2, length, 6) for name in "kv"}


@pytest.mark.parametrize("check", [None, True])
@torch.no_grad()
def test_a_cache_is_filled_by_one_program(check: bool | None) -> None:
    module = Attention().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True, check=check)
    mine, theirs, start = _cache(), _cache(), 0
    for length in (4, 4, 1, 7, 1, 1):
        x = torch.randn(2, length, 6)
        expected = module(x, theirs, start)
        if check:
            # Eager writes, too, and is what is compared with: into the same places.
            before = {name: tensor.clone() for name, tensor in mine.items()}
            compiled(x, mine, start)
            mine = before
        assert_close(compiled(x, mine, start), expected)
        assert_close(mine, theirs)
        start += length
    assert oxidiff.report(compiled).captures == 1


class Counting(nn.Module):
    """Its caller counts in a tensor how much of a small cache is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: Any, step: int = 0) -> Tensor:
        key = self.layer(x)
        start = cache["filled"].item()
        end = start + x.shape[1]
        cache["k"][:, start:end] = key
        kept = cache["k"][:, :end]
        return torch.nn.functional.scaled_dot_product_attention(x, kept, kept)


@torch.no_grad()
def test_places_in_a_small_cache_are_one_program() -> None:
    """Of which hardly any are free that sizes are mostly tried at."""
    module, passed = Counting().eval(), Attention().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    other: Any = oxidiff.compile(passed, cache=False, strict=True)
    caches = [{"k": torch.zeros(1, 20, 32), "filled": torch.tensor([0])} for _ in range(2)]
    mine, theirs = _cache(20), _cache(20)
    for start in (0, 4, 8, 12, 16):
        x = torch.randn(1, 4, 32)
        assert_close(compiled(x, caches[0]), module(x, caches[1]))
        assert_close(caches[0], caches[1])
        for cache in caches:
            cache["filled"].fill_(start + 4)
        x = torch.randn(2, 4, 6)
        assert_close(other(x, mine, start), passed(x, theirs, start))
        assert_close(mine, theirs)
    assert oxidiff.report(compiled).captures == oxidiff.report(other).captures == 1


@torch.no_grad()
def test_only_what_is_written_leaves_the_program() -> None:
    """A cache of a hundred times the size is no result: memory would be its own again, and each call copy it."""
    compiled: Any = oxidiff.compile(Attention().eval(), cache=False, strict=True)
    compiled(torch.randn(2, 4, 6), _cache(), 0)
    text = str(oxidiff.explain(compiled))
    outputs = next(line for line in text.splitlines() if "outputs:" in line)
    assert outputs.split(":", 1)[1].count("[b, s, 6]") == 3, outputs


@dataclasses.dataclass
class Held:
    frames: list[Tensor]


class InObjects(nn.Module):
    def forward(self, x: Tensor, held: Held, last: Tensor | None = None) -> Tensor:
        held.frames[1].add_(x)
        if last is not None:
            last[:] = x
        return held.frames[0] + held.frames[1]


@torch.no_grad()
def test_tensors_in_objects_and_lists_are_written() -> None:
    module = InObjects().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for n in (3, 5):
        frames = [torch.randn(n, 4), torch.randn(n, 4)]
        theirs, mine = Held([t.clone() for t in frames]), Held([t.clone() for t in frames])
        x, a, b = torch.randn(n, 4), torch.zeros(n, 4), torch.zeros(n, 4)
        assert_close(compiled(x, mine, last=b), module(x, theirs, last=a))
        assert_close([*mine.frames, b], [*theirs.frames, a])
        assert_close(compiled(x, mine), module(x, theirs))
        assert_close(mine.frames, theirs.frames)


class Beside(nn.Module):
    """Reads a tensor before and behind a write into another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = y * 2 + self.table
        x += 1
        x[1:].mul_(2)
        return before + y + self.table


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize(
    "kind", ["the same", "a part", "beside", "a weight", "expanded", "of inference", "windows", "an array"]
)
@torch.no_grad()
def test_what_shares_memory_is_seen_as_in_eager(kind: str) -> None:
    def given(module: Any) -> tuple[Tensor, Tensor]:
        whole = torch.arange(72.0).view(3, 4, 6)
        if kind == "the same":
            return (one := whole[0]), one
        if kind == "a part":
            return whole[0], whole[0][:1]
        if kind == "a weight":
            return module.table, whole[1]
        if kind == "windows":
            return torch.arange(15.0).unfold(0, 6, 3), whole[1]
        if kind == "an array":
            array = whole.flatten().numpy()
            return torch.from_numpy(array[:24]).view(4, 6), torch.from_numpy(array[12:36]).view(4, 6)
        if kind == "expanded":
            return whole[0, :1].expand(4, 6), whole[1]
        if kind == "of inference":
            with torch.inference_mode():
                return torch.ones(4, 6), torch.ones(4, 6)
        return whole[0], whole[1]

    module = Beside().eval()
    other = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(other, cache=False)
    compiled(torch.randn(4, 6), torch.randn(4, 6))
    for _ in range(2):
        theirs, mine = given(module), given(other)
        if kind in ("expanded", "of inference"):
            for call, arguments in ((module, theirs), (compiled, mine)):
                with pytest.raises(RuntimeError):
                    call(*arguments)
            continue
        assert_close(compiled(*mine), module(*theirs))
        assert_close(mine, theirs)
        assert_close(other.table, module.table)
    if kind not in ("expanded", "of inference"):
        assert oxidiff.report(compiled).eager_calls == (0 if kind in ("the same", "beside") else 2)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_a_part_of_a_module_writes_into_what_it_is_given() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x: Tensor, caches: Any, start: int) -> Tensor:
            x = self.first(x, caches[0], start)
            if x.sum() > 1e9:
                x = x * 2
            return self.second(x, caches[1], start)

    module = Around().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    mine, theirs = [_cache(), _cache()], [_cache(), _cache()]
    for start, length in ((0, 4), (4, 5), (9, 1)):
        x = torch.randn(2, length, 6)
        assert_close(compiled(x, mine, start), module(x, theirs, start))
        assert_close(mine, theirs)
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_nothing_is_written_where_a_call_fails() -> None:
    """Eager runs the call once more, which would write twice."""

    class Fails(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            x += 1
            return x[index]

    compiled: Any = oxidiff.compile(Fails().eval(), cache=False)
    for index, is_inside in ((torch.tensor([1]), True), (torch.tensor([9]), False)):
        x = torch.zeros(3, 2)
        if is_inside:
            assert_close(compiled(x, index), torch.ones(1, 2))
        else:
            with pytest.raises(IndexError):
                compiled(x, index)
        # Eager adds before it looks for the row.
        assert_close(x, torch.ones(3, 2))


class OwnCache(nn.Module):
    """Keys and values of former calls are in the layer."""

    def __init__(self, is_buffer: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 18)
        for name, tensor in _cache().items():
            if is_buffer:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, tensor)

    def forward(self, x: Tensor, start: int) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        end = start + x.shape[1]
        self.k[:, start:end] = key
        self.v[:, start:end] = value
        return torch.nn.functional.scaled_dot_product_attention(query, self.k[:, :end], self.v[:, :end])


class Layers(nn.Module):
    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnCache(is_buffer) for _ in range(3))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, start)
        self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x - self.mean


@pytest.mark.parametrize("is_buffer", [True, False])
@torch.no_grad()
def test_buffers_and_attributes_are_written_as_in_eager(is_buffer: bool) -> None:
    module = Layers(is_buffer).eval()
    own = copy.deepcopy(module)
    held = [own.mean, *(layer.k for layer in own.layers)]
    compiled: Any = oxidiff.compile(own, cache=False, strict=True)

    def check(x: Tensor, start: int) -> None:
        assert_close(compiled(x, start), module(x, start))
        for mine, theirs in zip(own.layers, module.layers, strict=True):
            assert_close([mine.k, mine.v], [theirs.k, theirs.v])
        assert_close(dict(own.state_dict()), dict(module.state_dict()))

    start = 0
    for length in (4, 4, 1, 7, 1):
        check(torch.randn(2, length, 6), start)
        start += length
    # They are the tensors that they were.
    assert all(one is other for one, other in zip(held, [own.mean, *(x.k for x in own.layers)], strict=True))
    for one in (own, module):
        for layer in one.layers:
            layer.k.zero_()
        one.mean.fill_(2.0)
    check(torch.randn(2, 3, 6), 5)
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.fallbacks) == (0, [])
    assert report.captures <= 2


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", ["a parameter", "batch norm", "a buffer in a list"])
@torch.no_grad()
def test_what_else_is_written_runs_eager(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.norm = nn.BatchNorm2d(4)
            self.tables = [torch.zeros(4)]

        def forward(self, x: Tensor) -> Tensor:
            if kind == "a parameter":
                self.scale.mul_(2)
            elif kind == "batch norm":
                x = self.norm(x)
            else:
                self.tables[0].add_(1)
            return x * self.scale[:, None, None] + self.tables[0][:, None, None]

    module = Net().train(kind == "batch norm")
    own = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(own, cache=False)
    for n in (2, 3, 2):
        x = torch.randn(n, 4, 5, 5)
        assert_close(compiled(x), module(x))
        assert_close(dict(own.state_dict()), dict(module.state_dict()))
        assert_close(own.tables, module.tables)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "atleast_3d": torch.atleast_3d,
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2)[1],
    "meshgrid": lambda x: torch.meshgrid(x[0], x[:, 0], indexing="ij")[0].select(-1, 0),
    "reshape": lambda x: x.reshape(2, -1),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("name", VIEWS)
@torch.no_grad()
def test_what_is_written_through_views_of_all_kinds(name: str, is_argument: bool) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x if is_argument else x * 3
            view = VIEWS[name](y)
            view.mul_(2)
            return y + 1, view + 1

    compiled: Any = oxidiff.compile(Net(), cache=False)
    for make in (torch.ones, lambda *shape: torch.ones(shape[0], 2 * shape[1])[:, ::2], torch.ones):
        x = make(4, 4)
        y = x.clone() if x.is_contiguous() else make(4, 4)
        assert_close(compiled(x), Net()(y))
        assert_close(x, y)


@torch.no_grad()
def test_buffers_that_are_written_are_there_all_the_time() -> None:
    """Another thread may read the module's state while calls run."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    module = Counts().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    compiled(torch.zeros(3))
    ends, missing = threading.Event(), []

    def read() -> None:
        while not ends.is_set():
            if module.count is None or "count" not in module.state_dict():
                missing.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(300):
            compiled(torch.zeros(3))
    finally:
        ends.set()
        reader.join()
    assert not missing
    assert module.count.item() == 301


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_replaced", [False, True])
@torch.no_grad()
def test_modules_that_share_what_they_keep_take_turns(is_replaced: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            if is_replaced:
                self.count = self.count + 1
            else:
                self.count += 1
            return x + self.count

    class Top(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2  # type: ignore[no-any-return]

    inner = Counts()
    errors: list[BaseException] = []

    def run(compiled: Any) -> None:
        try:
            with torch.no_grad():
                for _ in range(100):
                    compiled(torch.zeros(3))
        except BaseException as error:
            errors.append(error)

    tops: list[Any] = [oxidiff.compile(Top(inner).eval(), cache=False) for _ in range(2)]
    for top in tops:
        # What is captured is in the attributes meanwhile.
        top(torch.zeros(3)), top(torch.zeros(3)), top(torch.zeros(3))
    threads = [threading.Thread(target=run, args=(top,)) for top in tops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert inner.count.item() == 206
