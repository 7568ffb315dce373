"""State that ``forward`` builds outside of the module in its first call, as step caches do: traces leave nothing of it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff


def fresh() -> dict[str, Any]:
    return {"total": 0.0, "previous": None, "residual": None}


@dataclasses.dataclass
class Record:
    total: float = 0.0
    previous: Any = None
    residual: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)


class Holder:
    kept: dict[Any, Any] = {}  # noqa: RUF012 state of the class is what is tested


class Context:
    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}


BY_WIDTH: dict[int, Any] = {}
DEFAULTS: dict[int, Any] = collections.defaultdict(fresh)
LISTED: list[Any] = []
RECORDS: dict[int, Any] = {}
CONTEXT = Context()
NOW: Any = None


def of_dictionary(width: int) -> Any:
    if width not in BY_WIDTH:
        BY_WIDTH[width] = fresh()
    return BY_WIDTH[width]


def of_defaults(width: int) -> Any:
    return DEFAULTS[width]


def of_argument(width: int, kept: dict[str, Any] = {}) -> Any:  # noqa: B006 what is tested
    if not kept:
        kept["now"] = fresh()
    return kept["now"]


def of_list(width: int) -> Any:
    if not LISTED:
        LISTED.append(fresh())
    return LISTED[0]


def of_record(width: int) -> Any:
    if width not in RECORDS:
        RECORDS[width] = Record()
    return RECORDS[width]


def of_class(width: int) -> Any:
    if width not in Holder.kept:
        Holder.kept[width] = fresh()
    return Holder.kept[width]


def of_object(width: int) -> Any:
    if width not in CONTEXT.kept:
        CONTEXT.kept[width] = {"inner": fresh()}
    return CONTEXT.kept[width]["inner"]


def of_global(width: int) -> Any:
    global NOW
    if NOW is None:
        NOW = fresh()
    return NOW


def forget() -> None:
    global NOW
    NOW = None
    for kept in (BY_WIDTH, DEFAULTS, LISTED, RECORDS, Holder.kept, CONTEXT.kept, of_argument.__defaults__[0]):
        kept.clear()


class Caching(nn.Module):
    """Leaves out its layers while little has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def step(self, x: Tensor, now: Any) -> Tensor:
        x = self.first(x)
        is_left_out = False
        if now["previous"] is not None:
            now["total"] += float((x - now["previous"]).abs().mean() / now["previous"].abs().mean())
            is_left_out = now["total"] < 1.0
            now["total"] = now["total"] if is_left_out else 0.0
        now["previous"] = x.clone()
        if is_left_out:
            residual: Tensor = now["residual"]
            return x + residual
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        now["residual"] = y - x
        return y


class OfDictionary(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_dictionary(x.shape[1]))


class OfDefaults(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_defaults(x.shape[1]))


class OfArgument(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_argument(x.shape[1]))


class OfList(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_list(x.shape[1]))


class OfRecord(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_record(x.shape[1]))


class OfClass(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_class(x.shape[1]))


class OfObject(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_object(x.shape[1]))


class OfGlobal(Caching):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, of_global(x.shape[1]))


@pytest.mark.parametrize("kind", [OfDictionary, OfDefaults, OfArgument, OfList, OfRecord, OfClass, OfObject, OfGlobal])
@torch.no_grad()
def test_nested_state_outside_of_the_module(kind: type[Caching]) -> None:
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    eager, compiled = copy.deepcopy(model), oxidiff.compile(model, cache=False)
    # Another width is another state for some only.
    widths = (4, 5, 4) if kind in (OfDictionary, OfDefaults, OfRecord) else (4,)
    calls = [torch.randn(1, width, 8) * 0.5 + 1 for width in widths for _ in range(6)]
    results: list[list[Tensor]] = []
    for each in (eager, compiled):
        forget()
        results.append([each(x).clone() for x in calls])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


MASK = torch.ones(16)
COUNT = 0


class Masked(nn.Module):
    """Replaces a tensor in a global, as StoryDiffusion does with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        global MASK, COUNT
        y: Tensor = self.linear(x) * MASK
        COUNT += 1
        if COUNT % 2:
            MASK = MASK * 0.5 + y.mean()
        return y


@torch.no_grad()
def test_a_tensor_in_a_global_is_replaced() -> None:
    global MASK, COUNT
    torch.manual_seed(0)
    model = Masked().eval().requires_grad_(False)
    compiled = oxidiff.compile(model, cache=False)
    xs = [torch.randn(2 + i // 4, 8) for i in range(8)]
    seen: list[list[tuple[Tensor, Tensor, int]]] = []
    for each in (model, compiled):
        MASK, COUNT = torch.ones(16), 0
        seen.append([(each(x).clone(), MASK.clone(), COUNT) for x in xs])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


class Queued(nn.Module):
    """Keeps its last results, or sizes, in a deque: of its own, or of a closure."""

    def __init__(self, what: str, queue: collections.deque[Any] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.what = what
        own = collections.deque[Any](maxlen=2)
        self.queue = own if queue is None else None
        self.get = lambda: queue if queue is not None else self.queue

    def forward(self, x: Tensor) -> Tensor:
        queue, y = self.get(), self.linear(x)
        if self.what == "tensors":
            queue.append(y)
            return torch.stack(tuple(queue)).sum(0)
        if self.what == "sizes":
            queue.append(x.shape[0])
        out: Tensor = y * sum(queue)
        return out


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_outside", [False, True])
@pytest.mark.parametrize("what", ["tensors", "sizes", "nothing"])
@torch.no_grad()
def test_a_deque_is_followed_as_a_list_is(what: str, is_outside: bool) -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Queued(what, collections.deque(maxlen=2) if is_outside else None).eval())
        if what == "nothing":
            models[-1].get().extend((1, 2))
    eager, module = models
    compiled: Any = oxidiff.compile(module, cache=False)
    for call in range(8):
        x = torch.randn(2 if what == "tensors" else 2 + call % 3, 8)
        torch.testing.assert_close(compiled(x), eager(x))
        assert len(module.get()) == len(eager.get())
        if what == "nothing" and call == 3:
            for model in models:
                model.get().append(5)
    if what == "nothing":
        report = oxidiff.report(compiled)
        assert (report.captures, report.eager_calls) == (2, 0)


class Tabled(nn.Module):
    """Keeps a table of its first call, as rotary embeddings do, or of every call."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: list[Tensor] = []
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        if not self.table or self.every:
            before = self.table[0] if self.table else 0.0
            self.table = [torch.arange(8) * 0.5 + before]
        return torch.tanh(self.linear(x)) + self.table[0]


@pytest.mark.parametrize("every", [False, True])
@torch.no_grad()
def test_a_warning_tells_a_call_from_all(every: bool) -> None:
    compiled: Any = oxidiff.compile(Tabled(every).eval().requires_grad_(False), cache=False)
    x = torch.randn(2, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(x)
    once, *always = [str(one.message) for one in caught if one.category is oxidiff.FallbackWarning]
    assert "runs in eager PyTorch in this call, and is tried again in the next: forward keeps a tensor" in once
    assert len(always) == every and all("runs in eager PyTorch: forward keeps" in text for text in always), always
    assert oxidiff.report(compiled).eager_calls == (3 if every else 1)
