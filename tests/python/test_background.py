"""`background=True`: eager until the program is ready, then compiled; errors are reported, not raised."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from nets import Net, Returns, assert_close, image
from oxidiff import _native, background, tune
from oxidiff.background import submit
from oxidiff.capture import Capturer
from oxidiff.store import bundle


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the background thread does not finish"
        time.sleep(0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Captures wait until it is set."""
    event = threading.Event()
    lowered = Capturer.lowered

    def late(self: Capturer, *args: Any) -> Any:
        assert event.wait(60)
        return lowered(self, *args)

    monkeypatch.setattr(Capturer, "lowered", late)
    return event


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Eager PyTorch does not survive a fork with more: OpenMP's threads are gone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Settings:
    mode: str
    kept: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Modes(nn.Module):
    """Fills what it is given in one mode, and reads it in another."""

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        mode, kept = (given["mode"], given["kept"]) if isinstance(given, dict) else (given.mode, given.kept)
        if mode == "write":
            kept.append(x * 2)
            return x * 3
        return x + kept[0]


@pytest.mark.parametrize(
    "make", [Settings, lambda mode: {"mode": mode, "kept": []}], ids=["a dataclass", "a dictionary"]
)
@torch.no_grad()
def test_what_is_passed_changes_meanwhile(gate: threading.Event, make: Any) -> None:
    compiled = oxidiff.compile(Modes().eval(), background=True, cache=False)
    x = torch.randn(3)
    for _ in range(2):
        given = make("write")
        assert torch.equal(compiled(x, given), x * 3)
        # Before it is captured.
        (given if isinstance(given, dict) else vars(given))["mode"] = "read"
        gate.set()
        wait_for(lambda: oxidiff.report(compiled).captures)
        assert torch.equal(compiled(x, given), x * 3)
        wait_for(lambda: oxidiff.report(compiled).captures == 2)
    assert oxidiff.report(compiled).eager_calls == 2, "the first call in each mode"
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_calls_are_served_meanwhile(gate: threading.Event) -> None:
    net = Net().eval()
    # A structure of its own: nobody else's program serves it.
    net.own = nn.Identity()
    compiled: Any = oxidiff.compile(net, background=True, strict=True, cache=False)
    for _ in range(3):
        assert torch.equal(compiled(image()), net(image()))
    # While it compiles, weights may change too.
    net.conv.weight.mul_(2)
    assert torch.equal(compiled(image()), net(image()))
    gate.set()
    # There is a variant some time before a call would find it.
    wait_for(lambda: not oxidiff.module.dispatcher_of(compiled)._pending)
    report = oxidiff.report(compiled)
    assert (report.variants, report.calls, report.eager_calls, report.fallbacks) == (1, 4, 4, [])
    assert_close(compiled(image()), net(image()))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.captures) == (5, 4, 1)


@torch.no_grad()
def test_warmup_waits() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), background=True, strict=True, cache=False)
    oxidiff.warmup(compiled, image())
    compiled(image())
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_errors_surface_in_the_report() -> None:
    module = Returns(lambda x, w: x * w if float((x * w).sum()) > 0 else x - w)
    compiled: Any = oxidiff.compile(module, background=True, cache=False)
    x = torch.ones(2, 4)
    assert_close(compiled(x), module(x))
    wait_for(lambda: oxidiff.report(compiled).fallbacks)
    with pytest.warns(oxidiff.FallbackWarning):
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).fallbacks[0]["count"] >= 1


@torch.no_grad()
def test_a_wrong_call_raises_what_eager_raises() -> None:
    compiled: Any = oxidiff.compile(Net().eval(), background=True, cache=False)
    with pytest.raises(RuntimeError, match="channels"):
        compiled(image(2, 5, 12, 10))
    wait_for(lambda: not oxidiff.module.dispatcher_of(compiled)._pending)
    assert_close(compiled(image()), compiled._orig_mod(image()))


@torch.no_grad()
def test_a_module_that_is_gone_is_not_compiled(gate: threading.Event) -> None:
    compiled: Any = oxidiff.compile(Net().eval(), background=True, cache=False)
    compiled(image())
    second: Any = oxidiff.compile(Net(channels=12).eval(), background=True, cache=False)
    second(image())
    del second
    gate.set()
    wait_for(lambda: oxidiff.report(compiled).variants == 1)


@torch.no_grad()
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_compiles_for_itself(gate: threading.Event, one_thread: None) -> None:
    net: nn.Module = Net().eval()
    compiled: Any = oxidiff.compile(net, background=True, strict=True, cache=False)
    compiled(image())
    child = os.fork()
    if child == 0:
        gate.set()
        compiled(image())
        for _ in range(2000):
            if oxidiff.report(compiled).variants:
                os._exit(0)
            time.sleep(0.01)
        os._exit(1)
    gate.set()
    deadline = time.monotonic() + 60
    status: int | None = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.02)
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == 0


def test_a_process_that_ends_does_not_wait_for_what_is_left() -> None:
    script = """
        import threading, time
        from oxidiff.background import submit
        begun = threading.Event()
        def task():
            print("a task", flush=True)
            begun.set()
            time.sleep(0.5)
        assert all(submit(task) for _ in range(100)) and begun.wait(20)
    """
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert 1 <= done.stdout.count("a task") < 20, done.stderr
    assert time.monotonic() - started < 40


def test_a_thread_that_cannot_start_drops_no_other_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one caller finds that the system has no thread left, another one comes with a task of its own."""
    wait_for(lambda: background._worker is None)
    done, answers = threading.Event(), []
    other = threading.Thread(target=lambda: answers.append(submit(done.set)))

    class Refused(threading.Thread):
        def start(self) -> None:
            monkeypatch.setattr(background.threading, "Thread", thread)
            other.start()
            other.join(0.5)
            raise RuntimeError("can't start new thread")

    thread = threading.Thread
    monkeypatch.setattr(background.threading, "Thread", Refused)
    assert not submit(lambda: pytest.fail("nobody was told that this would run"))
    other.join(10)
    assert answers == [True] and done.wait(10)


@torch.no_grad()
def test_tuning_is_done_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are eager until the trials are done too, then run what was chosen; a restart knows it."""
    _native.forget_choices()
    tune._held.clear()
    trial, threads = threading.Event(), []
    real = tune._measure

    def late(*args: Any) -> Any:
        threads.append(threading.current_thread())
        assert trial.wait(60)
        return real(*args)

    monkeypatch.setattr(tune, "_measure", late)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, 72, 3, padding=1), nn.SiLU(), nn.Conv2d(72, 64, 3, padding=1)).eval()
    compiled: Any = oxidiff.compile(module, background=True, strict=True, tune="full", tune_budget_s=120.0)
    x = image(1, 64, 24, 24)
    for _ in range(3):
        assert torch.equal(compiled(x), module(x))
        wait_for(lambda: threads)
    assert oxidiff.report(compiled).eager_calls == 3
    trial.set()
    dispatcher = oxidiff.module.dispatcher_of(compiled)
    wait_for(lambda: not dispatcher._pending)
    assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.fallbacks) == (4, 3, []) and report.tune_s > 0
    assert len(threads) == 2 and threading.main_thread() not in threads
    assert len(bundle.entries()) == 2, "what was measured is remembered"
    (variant,) = oxidiff.explain(compiled).variants
    assert len(variant["choices"]) == 2


@torch.no_grad()
def test_a_tuner_that_fails_surfaces_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise oxidiff.CacheError("the disk is gone")

    monkeypatch.setattr(tune.Tuner, "tune", broken)
    compiled: Any = oxidiff.compile(Net().eval(), background=True, cache=False)
    compiled(image())
    wait_for(lambda: oxidiff.report(compiled).fallbacks)
    (fallback,) = oxidiff.report(compiled).fallbacks
    assert "the disk is gone" in fallback["reason"]
    with pytest.warns(oxidiff.FallbackWarning, match="the disk is gone"):
        assert_close(compiled(image()), compiled._orig_mod(image()))


def test_a_task_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    assert submit(lambda: 1 // 0) and submit(done.set)  # type: ignore[arg-type, func-returns-value]
    assert done.wait(10)
    assert "ZeroDivisionError" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
def test_an_interrupt_as_the_thread_starts(is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call starts over, whether there is a thread by then or not."""
    wait_for(lambda: background._worker is None)

    class Interrupted(threading.Thread):
        def start(self) -> None:
            monkeypatch.setattr(background.threading, "Thread", thread)
            if is_started:
                super().start()
            raise KeyboardInterrupt

    thread = threading.Thread
    monkeypatch.setattr(background.threading, "Thread", Interrupted)
    compiled: Any = oxidiff.compile(Net().eval(), background=True, cache=False)
    with pytest.raises(KeyboardInterrupt):
        compiled(image())
    compiled(image())
    wait_for(lambda: background._worker is None)
    eager = oxidiff.report(compiled).eager_calls
    assert_close(compiled(image()), compiled._orig_mod(image()))
    assert oxidiff.report(compiled).eager_calls == eager


def test_a_task_that_exits_leaves_the_thread_at_work(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    assert submit(sys.exit)
    assert submit(done.set) and done.wait(20)
    assert "SystemExit" in caplog.text
    wait_for(lambda: background._worker is None)
