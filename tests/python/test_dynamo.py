"""`torch.compile(backend="oxidiff")`: Dynamo's graphs run as compiled modules."""

from __future__ import annotations

import copy
import importlib.metadata
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import Net, assert_close, image
from oxidiff import backend, testing
from oxidiff.island import Island, Turns, reset_turns


@pytest.fixture
def islands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The compiled modules that Dynamo's graphs became."""
    found: list[Any] = []
    original = backend.compile_module

    def compile_module(module: nn.Module, options: oxidiff.CompileOptions) -> Any:
        found.append(original(module, options))
        return found[-1]

    monkeypatch.setattr(backend, "compile_module", compile_module)
    yield found


def reports(islands: list[Any]) -> list[oxidiff.Report]:
    return [oxidiff.report(island) for island in islands]


def test_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends", name="oxidiff")
    if not entries:
        pytest.skip("the package is not installed, only on the path")
    assert next(iter(entries)).load() is backend.oxidiff


@torch.no_grad()
def test_module(islands: list[Any]) -> None:
    module = Net().eval()
    compiled = torch.compile(module, backend=backend.oxidiff)
    assert_close(compiled(image()), module(image()))
    (report,) = reports(islands)
    assert (report.calls, report.eager_calls, report.captures) == (1, 0, 1)
    module.linear.weight.mul_(2)
    assert_close(compiled(image()), module(image()))
    module.linear.weight = nn.Parameter(torch.randn(8, 8))
    assert_close(compiled(image()), module(image()))
    assert not any(r.fallbacks for r in reports(islands))


@torch.no_grad()
def test_dynamic_sizes_share_one_program(islands: list[Any]) -> None:
    module = Net().eval()
    compiled = torch.compile(module, backend=backend.oxidiff, dynamic=True)
    for shape in ((2, 3, 32, 24), (4, 3, 40, 16), (5, 3, 64, 48)):
        assert_close(compiled(image(*shape)), module(image(*shape)))
    (report,) = reports(islands)
    assert (report.calls, report.eager_calls, report.captures) == (3, 0, 1)


class Branching(nn.Module):
    """Blocks of one class, whose graphs Dynamo shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return x + (y * 2 if y.sum() > 0 else y)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_threads_that_share_a_graph_have_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    take_weights = Island.take_weights

    def take_and_wait(self: Island, args: Any) -> Any:
        taken = take_weights(self, args)
        # What may happen to any thread at any place.
        time.sleep(0.002)
        return taken

    monkeypatch.setattr(Island, "take_weights", take_and_wait)
    module = Blocks().eval()
    compiled = torch.compile(module, backend=backend.oxidiff)
    inputs = [image(16, 64, seed=seed) for seed in range(4)]
    expected = [module(x) for x in inputs]
    compiled(inputs[0])
    call = torch.no_grad()(compiled)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            for actual, wanted in zip(pool.map(call, inputs), expected, strict=True):
                assert_close(actual, wanted)


@torch.no_grad()
def test_a_thread_that_was_left_behind_by_a_fork_is_not_waited_for() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(4, 4))
    first, second = ([nn.Parameter(torch.randn(2, 4))], [nn.Parameter(torch.randn(2, 4))])
    island, turns = Island(graph, first), Turns()
    with turns.holding(island, first):
        # As in a child, where the thread of this call is none of the threads.
        reset_turns()
        with turns.holding(island, second):
            assert island.holds(second)


@torch.no_grad()
def test_who_needs_other_weights_has_a_turn() -> None:
    """Where two others call without a pause, so that there is always one of them that runs."""
    graph = torch.fx.symbolic_trace(nn.Linear(4, 4))
    first, second = ([nn.Parameter(torch.randn(2, 4))], [nn.Parameter(torch.randn(2, 4))])
    island, turns, is_done = Island(graph, first), Turns(), threading.Event()

    def call() -> None:
        while not is_done.is_set():
            with turns.holding(island, first):
                time.sleep(0.002)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(call) for _ in range(4)]
        try:
            time.sleep(0.05)
            started = time.monotonic()
            with turns.holding(island, second):
                assert time.monotonic() - started < 5
        finally:
            is_done.set()
        for other in others:
            other.result()


@torch.no_grad()
def test_graph_breaks(islands: list[Any]) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.sum() > 0:
                x = x * 2
            return self.second(x)

    module = Breaks().eval()
    compiled = torch.compile(module, backend=backend.oxidiff)
    for seed in range(6):
        assert_close(compiled(image(3, 4, seed=seed)), module(image(3, 4, seed=seed)))
    assert len(islands) >= 2
    assert all(r.eager_calls == 0 for r in reports(islands))


def test_gradients_are_not_lost() -> None:
    module = Net().eval()
    compiled = torch.compile(module, backend=backend.oxidiff)
    with pytest.warns(oxidiff.FallbackWarning, match="gradients"):
        compiled(image()).sum().backward()
    actual = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module(image()).sum().backward()
    assert_close(actual, [p.grad for p in module.parameters()])


@torch.no_grad()
def test_options(islands: list[Any]) -> None:
    torch.compile(Net().eval(), backend=backend.oxidiff, options={"strict": True, "precision": "fast"})(image())
    options = oxidiff.module.dispatcher_of(islands[0]).options
    assert (options.strict, options.precision) == (True, "fast")


@torch.no_grad()
def test_compiled_module_inside_torch_compile() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module)
    outer = torch.compile(lambda x: compiled(x) + 1, backend="eager")
    assert_close(outer(image()), module(image()) + 1)
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_unet(islands: list[Any]) -> None:
    unet = testing.build("sd15-unet")
    inputs = testing.example_inputs("sd15-unet")
    compiled = torch.compile(unet, backend=backend.oxidiff)
    assert testing.relative_error(compiled(**inputs), testing.reference(unet, inputs)) < 2e-5
    assert len(islands) == 1
    assert reports(islands)[0].eager_calls == 0


@torch.no_grad()
@pytest.mark.parametrize("how", ["in place", "around"])
def test_compiled_submodules_are_captured_as_they_are(how: str) -> None:
    module: Any = Net().eval()
    plain = copy.deepcopy(module)
    name, child = next(iter(module.named_children()))
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    if how == "in place":
        child.compile(backend=backend)
    else:
        setattr(module, name, torch.compile(child, backend=backend))
    compiled = oxidiff.compile(module, cache=False, strict=True)
    for x in (image(), image()[:1], torch.cat([image(), image()], -1)):
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)
    # Dynamo was not asked, and is again behind it: of a layer of torch alone it compiles nothing before torch 2.15.
    assert not seen
    module(image())
    assert seen or how == "in place"
    assert (child._compiled_call_impl is not None) == (how == "in place")


SEEN: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    SEEN.append(graph)
    return graph


@torch.compile(backend=counting)
def gated(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * torch.nn.functional.gelu(gate)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(gated(self.first(x)))


@torch.no_grad()
def test_a_function_that_is_compiled_by_torch_is_part_of_the_program() -> None:
    """As it is: Dynamo would compile what traces it."""
    module = Gated().eval()
    compiled = oxidiff.compile(module, cache=False, strict=True)
    SEEN.clear()
    inputs = [torch.randn(shape) for shape in ((1, 8, 8), (1, 12, 8), (3, 9, 8), (2, 20, 8))]
    results = [compiled(x) for x in inputs]
    assert compiled.report().captures == 1 and not SEEN
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, module(x))
    assert SEEN
