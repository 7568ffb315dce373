"""Compiled modules in many threads."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from files import python
from nets import Net, assert_close, image
from oxidiff import dispatch, engine
from oxidiff.ambient import collection_paused
from oxidiff.states import States


def in_threads(count: int, work: Callable[[int], None], stack_bytes: int = 0) -> None:
    """Runs ``work(i)`` in ``count`` threads that start together, and raises what any of them raised."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def body(i: int) -> None:
        try:
            barrier.wait(30)
            with torch.no_grad():
                work(i)
        except BaseException as error:
            failures.append(error)

    before = threading.stack_size(stack_bytes)
    try:
        threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_first_calls_together_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A width of its own: a program would be shared with what another test left alive.
    module = Net(channels=14).eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    lowered = engine.Capturer.lowered

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return lowered(*args)

    monkeypatch.setattr(engine.Capturer, "lowered", slowly)
    results: list[torch.Tensor] = []
    in_threads(6, lambda i: results.append(compiled(image())))
    with torch.no_grad():
        expected = module(image())
    for result in results:
        assert_close(result, expected)
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.calls, report.eager_calls) == (1, 1, 6, 0)


def test_own_sizes() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, strict=True)

    def work(i: int) -> None:
        for k in range(20):
            x = image(1 + i % 3, 3, 8 + 2 * i, 9 + k, seed=k)
            assert_close(compiled(x), module(x))

    in_threads(6, work)
    assert oxidiff.report(compiled).eager_calls == 0


def test_two_modules_one_program() -> None:
    modules = [Net(channels=18).eval() for _ in range(4)]
    compiled: list[Any] = [oxidiff.compile(m, strict=True) for m in modules]

    def work(i: int) -> None:
        for k in range(20):
            assert_close(compiled[i](image(seed=k)), modules[i](image(seed=k)))

    in_threads(4, work)
    assert sum(oxidiff.report(c).programs for c in compiled) == 1


def test_short_threads_with_small_stacks() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), strict=True)
    with torch.no_grad():
        expected = compiled(image())
    before = threading.active_count()
    for _ in range(25):
        in_threads(4, lambda i: assert_close(compiled(image()), expected), stack_bytes=512 * 1024)
    assert threading.active_count() == before


def test_pieces_that_first_run_in_a_thread_that_ends() -> None:
    """Dynamo leaves something in the thread that comes first."""
    script = """
        import threading, torch, oxidiff
        torch.set_grad_enabled(False)
        weight = torch.randn(16, 16)
        def forward(x):
            x = x @ weight
            return torch.tanh(x * 2 if x.sum().item() > 1e6 else x)
        compiled = oxidiff.compile(forward, cache=False)
        def call(x):
            torch.testing.assert_close(compiled(x), forward(x))
            print("right")
        for rows in (4, 5, 6):
            torch._dynamo.reset()
            thread = threading.Thread(target=call, args=(torch.randn(rows, 16),))
            thread.start()
            thread.join()
    """
    assert python(script).count("right") == 3


def test_weights_switched_during_calls() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    states = [Net().state_dict() for _ in range(3)]
    stop = threading.Event()

    def work(i: int) -> None:
        if i == 0:
            for k in range(30):
                module.load_state_dict(states[k % 3], assign=bool(k % 2))
                time.sleep(0.002)
            stop.set()
            return
        while not stop.is_set():
            assert compiled(image()).isfinite().all()

    in_threads(3, work)
    with torch.no_grad():
        assert_close(compiled(image()), module(image()))


def test_a_call_after_a_change_waits_for_the_thread_that_binds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    refresh, is_binding, goes_on = engine.Engine.refresh, threading.Event(), threading.Event()

    def slowly(*args: Any) -> bool:
        is_binding.set()
        goes_on.wait(30)
        return refresh(*args)

    def work(i: int) -> None:
        if i:
            assert is_binding.wait(30)
            # Once the call below is on its way.
            threading.Timer(0.3, goes_on.set).start()
        assert_close(compiled(image()), expected)

    with torch.no_grad():
        compiled(image())
        module.linear.weight.add_(1.0)
        expected = module(image())
    monkeypatch.setattr(engine.Engine, "refresh", slowly)
    in_threads(2, work)


@torch.no_grad()
@pytest.mark.parametrize("method", ["refresh", "_add"])
@pytest.mark.parametrize("is_back", [False, True])
def test_a_module_that_is_moved_while_its_weights_are_bound(
    method: str, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fit the program for what it was: the call looks again."""
    module = Net(channels=18).eval()
    compiled: Any = oxidiff.compile(module, cache=False, tune="off")
    bind = getattr(engine.Engine, method)

    def moved(*args: Any) -> Any:
        monkeypatch.setattr(engine.Engine, method, bind)
        in_threads(1, lambda _: module.to(torch.bfloat16))
        try:
            return bind(*args)
        finally:
            if is_back:
                module.to(torch.float32)

    if method == "refresh":
        compiled(image())
        module.linear.weight.add_(1.0)
    monkeypatch.setattr(engine.Engine, method, moved)
    if is_back:
        assert_close(compiled(image()), module(image()))
    else:
        with pytest.raises(RuntimeError, match="should be the same"):
            compiled(image())
        x = image().to(torch.bfloat16)
        torch.testing.assert_close(compiled(x), module(x), rtol=0.05, atol=0.05)
    assert oxidiff.report(compiled).eager_calls == 0


def test_estimates_while_others_unload() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), strict=True)
    parts_of = dispatch.Dispatcher.parts_of

    def found(dispatcher: Any, *args: Any) -> Any:
        parts = parts_of(dispatcher, *args)
        in_threads(1, lambda _: compiled.unload())
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch.Dispatcher, "parts_of", found)
        assert oxidiff.estimate(compiled, image()).peak_bytes > 0
        oxidiff.warmup(compiled, image())


def test_module_deleted_and_unloaded_during_calls() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), strict=True)
    with torch.no_grad():
        expected = compiled(image())

    def work(i: int) -> None:
        mine = compiled
        for _ in range(15):
            if i == 0:
                mine.unload()
            assert_close(mine(image()), expected)

    in_threads(3, work)
    holder = [oxidiff.compile(Net().eval())]
    in_threads(2, lambda i: (holder.clear() if i else None, holder[0](image()) if holder else None))


@pytest.mark.slow
def test_other_threads_run_meanwhile() -> None:
    """The GIL is released while kernels run: another thread's longest gap is far below the length of a call."""
    compiled: Any = oxidiff.compile(
        torch.nn.Sequential(*(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))).eval()
    )
    x = torch.randn(2, 64, 128, 128)
    gaps: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    with torch.no_grad():
        compiled(x)
        thread = threading.Thread(target=watch)
        thread.start()
        started = time.perf_counter()
        compiled(x)
        seconds = time.perf_counter() - started
        stop.set()
        thread.join()
    assert len(gaps) > 5
    assert sorted(gaps)[-2] < 0.4 * seconds


def test_no_garbage_is_collected_while_a_program_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection walks all that torch and diffusers hold: longer than all of a restart."""
    states: list[bool] = []
    variant, structure = engine.Engine._known, oxidiff.states.Structure

    def known(*args: Any) -> Any:
        states.append(gc.isenabled())
        return variant(*args)

    def looked_at(*args: Any) -> Any:
        states.append(gc.isenabled())
        return structure(*args)

    monkeypatch.setattr(engine.Engine, "_known", known)
    monkeypatch.setattr("oxidiff.states.Structure", looked_at)
    with torch.no_grad():
        oxidiff.compile(Net(channels=18).eval(), strict=True)(image())
    assert len(states) >= 2 and not any(states) and gc.isenabled()


def test_the_collector_is_as_it_was_after_pauses_of_many_threads() -> None:
    def work(i: int) -> None:
        for _ in range(200):
            with collection_paused():
                assert not gc.isenabled()
                with pytest.raises(ValueError), collection_paused():
                    raise ValueError
                assert not gc.isenabled()

    in_threads(4, work)
    assert gc.isenabled()
    gc.disable()
    try:
        in_threads(2, work)
        assert not gc.isenabled(), "whoever had turned it off has it off"
    finally:
        gc.enable()


class Interrupted(nn.Module):
    """Another thread does something at two places of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        _meanwhile("before")
        weight = self.linear.weight
        _meanwhile("after")
        return torch.nn.functional.linear(x, weight, self.linear.bias)


# Nobody looks into a queue.
_TASKS: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()


def _meanwhile(place: str) -> None:
    if not _TASKS.empty():
        task = _TASKS.get()
        _TASKS.put(task)
        if task[0] == place:
            thread = threading.Thread(target=task[1])
            thread.start()
            thread.join()


@torch.no_grad()
@pytest.mark.parametrize("place", ["before", "after"])
def test_weights_that_are_replaced_while_it_is_captured(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the module's all the same: what takes their place later is noticed."""
    module, x = Interrupted().eval(), torch.randn(3, 8)
    states: queue.SimpleQueue[dict[str, Tensor]] = queue.SimpleQueue()
    for _ in range(64):
        states.put(Interrupted().state_dict())
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    confirm = States.confirm

    def once(*args: Any) -> None:
        while not _TASKS.empty():
            _TASKS.get()
        confirm(*args)

    monkeypatch.setattr(States, "confirm", once)
    _TASKS.put((place, lambda: module.load_state_dict(states.get_nowait(), assign=True)))
    assert_close(compiled(x), module(x))
    assert _TASKS.empty()
    for _ in range(2):
        module.load_state_dict(states.get_nowait(), assign=True)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).programs == 1


class Reordered(Net):
    """Takes an attribute away and sets it anew, as it was: behind all others."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        # Past `setattr` and `delattr`.
        own = self.__dict__
        own["training"] = own.pop("training")
        return super().forward(x, factor)


def test_attributes_are_never_absent_while_they_are_put_in_their_old_order() -> None:
    module = Reordered().eval()
    before = list(vars(module))
    missing = set()

    def look(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.endswith("trace.py") and event == "line":
            missing.update(set(before) - set(vars(module)))
        return look

    compiled: Any = oxidiff.compile(module, cache=False)
    sys.settrace(look)
    try:
        with torch.no_grad():
            compiled(image())
    finally:
        sys.settrace(None)
    assert list(vars(module)) == before and not missing


def test_submodules_that_come_while_others_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Any = oxidiff.compile(Net().eval())
    names = (f"later{i}" for i in range(100))

    def find(module: Any) -> Any:
        compiled.add_module(next(names), nn.Identity())
        return found(module)

    found = dispatch.find_dispatcher
    monkeypatch.setattr(dispatch, "find_dispatcher", find)
    assert [path for path, _ in oxidiff.module.dispatcher_of(compiled).family()] == [""]
