"""Sizes and memory: any size without a new program, one arena, budgets, estimates and pictures of the arena."""

from __future__ import annotations

import gc
import json
import random
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from nets import Net, assert_close, image
from oxidiff import _native, testing


def unet(**fields: Any) -> tuple[nn.Module, Any]:
    module = testing.build("sd15-unet", seed=7)
    # Options make a program of its own: what other tests keep alive is not counted here. Tuning plans sizes anew.
    return module, oxidiff.compile(module, cache=False, tune="off", max_specializations=61, **fields)


def call(module: Any, batch: int, size: tuple[int, int]) -> torch.Tensor:
    inputs = testing.example_inputs("sd15-unet", batch=batch, size=size)
    with torch.no_grad():
        result: torch.Tensor = module(**inputs).sample
    return result


def test_forty_sizes_in_any_order() -> None:
    pick = random.Random(11)
    sizes = [(pick.randint(1, 3), (8 * pick.randint(1, 4), 8 * pick.randint(1, 4))) for _ in range(40)]
    module, compiled = unet()
    call(compiled, 1, (8, 8))
    before = compiled.report()
    for batch, size in sizes:
        call(compiled, batch, size)
    after = compiled.report()
    assert (after.captures, after.programs, after.eager_calls) == (before.captures, before.programs, 0)
    assert after.specializations == len({(b, s) for b, s in [(1, (8, 8)), *sizes]})
    largest = max(sizes, key=lambda s: s[0] * s[1][0] * s[1][1])
    torch.testing.assert_close(call(compiled, *largest), call(module, *largest), rtol=1e-4, atol=1e-4)

    compiled.unload()
    _, alone = unet(memory="balanced")
    call(alone, *largest)
    assert after.arena_bytes == alone.report().arena_bytes
    assert after.derived_bytes <= after.weight_bytes


def test_the_pool_is_as_large_as_the_largest_live_size() -> None:
    oxidiff.unload(other := oxidiff.compile(Net(channels=20).eval(), cache=False))
    _, compiled = unet(memory="low")
    call(compiled, 1, (8, 8))
    small = compiled.report()
    call(compiled, 2, (32, 32))
    large = compiled.report()
    call(compiled, 1, (8, 8))
    assert compiled.report().pool_bytes == large.pool_bytes >= large.arena_bytes > small.arena_bytes
    compiled.unload()
    assert compiled.report().arena_bytes == 0
    call(compiled, 1, (8, 8))
    assert compiled.report().arena_bytes == small.arena_bytes
    assert other.report().sizes == []


def test_least_recently_used_sizes_go() -> None:
    compiled: Any = oxidiff.compile(Net(channels=14).eval(), cache=False, max_specializations=2)
    with torch.no_grad():
        for width in (16, 24, 32, 24):
            compiled(image(1, 3, 16, width))
    report = compiled.report()
    assert report.specializations == 2
    assert sorted(row["dims"][-1] for row in report.sizes) == [24, 32]


@pytest.mark.parametrize("memory", ["fast", "balanced", "low"])
def test_estimates_are_what_runs_take(memory: str) -> None:
    _, compiled = unet(memory=memory)
    for batch, size in [(1, (8, 8)), (2, (24, 16)), (1, (32, 32))]:
        inputs = testing.example_inputs("sd15-unet", batch=batch, size=size)
        estimate = oxidiff.estimate(compiled, **inputs)
        calls = compiled.report().calls
        result = call(compiled, batch, size)
        report = compiled.report()
        assert report.calls == calls + 1, "an estimate runs nothing"
        assert 0.98 <= estimate.peak_bytes / report.peak_bytes <= 1.02, (size, str(estimate))
        assert estimate.output_bytes == result.nbytes
        assert estimate.weight_bytes == report.weight_bytes
        assert estimate.arena_lower_bound_bytes <= estimate.arena_bytes <= 1.05 * estimate.arena_lower_bound_bytes
        assert estimate.seconds > 0
        assert oxidiff.estimate(compiled, **inputs).based_on == "this size"
    assert memory != "low" or compiled.report().derived_bytes == 0
    assert "derived weights" in str(oxidiff.estimate(compiled, **inputs))
    json.dumps(estimate.to_dict())


@pytest.mark.parametrize("tune", ["off", "quick"])
def test_a_budget_is_honoured_down_to_a_clear_error(tune: str) -> None:
    module, free = unet()
    size = (16, 16)
    expected = call(module, 1, size)
    inputs = testing.example_inputs("sd15-unet", size=size)
    whole = oxidiff.estimate(free, **inputs)
    for budget in (whole.peak_bytes - 1, whole.arena_bytes * 3, whole.arena_bytes * 3 // 2):
        compiled: Any = oxidiff.compile(module, cache=False, tune=tune, memory_budget=budget)
        torch.testing.assert_close(call(compiled, 1, size), expected, rtol=1e-4, atol=1e-4)
        report = compiled.report()
        assert report.peak_bytes <= budget
        assert report.eager_calls == 0
        # Another size keeps other forms; both together stay below the budget.
        call(compiled, 1, (8, 8))
        assert compiled.report().derived_bytes + compiled.report().arena_bytes <= budget

    large = testing.example_inputs("sd15-unet", size=(48, 48))
    allowed = oxidiff.estimate(free, **large).arena_bytes // 4
    tight: Any = oxidiff.compile(module, cache=False, tune=tune, memory_budget=allowed)
    with pytest.raises(oxidiff.OutOfMemoryError, match=f"allowed are {allowed} .*memory_budget") as error:
        call(tight, 1, (48, 48))
    assert "asked for" in str(error.value) and "up_blocks" in str(error.value)
    with pytest.raises(oxidiff.OutOfMemoryError):
        oxidiff.estimate(tight, **large)
    torch.testing.assert_close(call(tight, 1, (8, 8)), call(module, 1, (8, 8)), rtol=1e-4, atol=1e-4)


def test_far_too_large_is_an_error_and_the_module_works_on() -> None:
    compiled: Any = oxidiff.compile(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.SiLU()).eval(), cache=False)
    with torch.no_grad():
        compiled(torch.zeros(1, 3, 8, 8))
        # One pixel in memory, a petabyte of results.
        with pytest.raises((oxidiff.OutOfMemoryError, RuntimeError)):
            compiled(torch.zeros(1, 3, 1, 1).expand(1, 3, 2**23, 2**23))
        assert compiled(torch.zeros(1, 3, 8, 8)).shape == (1, 5, 8, 8)
    assert compiled.report().eager_calls == 0


def test_two_threads_two_arenas() -> None:
    module, compiled = unet(memory="low")
    expected = [call(module, 1, (8, 8)), call(module, 2, (16, 16))]
    wrong: list[str] = []

    def work(at: int) -> None:
        for _ in range(5):
            got = call(compiled, *[(1, (8, 8)), (2, (16, 16))][at])
            if not torch.allclose(got, expected[at], rtol=1e-4, atol=1e-4):
                wrong.append(f"thread {at}")

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_timeline() -> None:
    _, compiled = unet()
    with pytest.raises(ValueError, match="no size is kept"):
        compiled.report().memory()
    call(compiled, 1, (8, 8))
    call(compiled, 1, (16, 16))
    report = compiled.report()
    timeline = report.memory()
    assert timeline.arena_bytes == report.arena_bytes
    alive = timeline.bytes_alive()
    assert len(alive) == len(timeline.steps)
    assert timeline.lower_bound_bytes >= max(alive) == alive[timeline.peak_step]
    assert all(b.offset + b.bytes <= timeline.arena_bytes for b in timeline.buffers)
    assert any(b.module.startswith("up_blocks.") for b in timeline.hottest())
    assert report.memory(0).dims == report.sizes[0]["dims"]
    with pytest.raises(IndexError):
        report.memory(5)
    text = str(timeline)
    assert "alive at the peak" in text and "up_blocks" in text and "#" in text
    json.dumps(timeline.to_dict())


def test_pictures(tmp_path: Path) -> None:
    _, compiled = unet()
    call(compiled, 1, (8, 8))
    timeline = compiled.report().memory()
    root = ET.fromstring(timeline.svg())
    shapes = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert shapes.count("rect") > len([b for b in timeline.buffers if b.bytes])
    assert any(title.text and "up_blocks" in title.text for title in root.iter("{http://www.w3.org/2000/svg}title"))
    for name, thing in (("timeline.html", timeline), ("report.html", compiled.report())):
        thing.save_html(tmp_path / name)
        page = (tmp_path / name).read_text()
        assert "<svg" in page and "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"
    html = compiled.report()._repr_html_()
    assert "<svg" in html and "memory_budget" in html
    assert "memory_budget" in str(compiled.report())


def test_warmup_plans_every_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Any = oxidiff.compile(Net(channels=18).eval(), cache=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    compiled.warmup(image(1, 3, 16, 16), shapes=[(1, 3, 24, 16), (2, 3, 32, 32)])
    report = compiled.report()
    assert (report.captures, report.specializations, report.calls) == (1, 3, 0)
    assert "3/3" in (text := capsys.readouterr().err) or "3 of 3" in text
    tight: Any = oxidiff.compile(Net(channels=18).eval(), cache=False, memory_budget=1000)
    with pytest.raises(oxidiff.OutOfMemoryError, match="allowed are 1000"):
        tight.warmup(image(1, 3, 16, 16))


class OfEightBits(nn.Module):
    """A linear layer with a weight in 8 bits that is taken apart by dozens of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(512, 512).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(torch.rand(512, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale)


@torch.no_grad()
def test_what_only_leads_to_kept_values_is_not_kept() -> None:
    module = OfEightBits()
    compiled: Any = oxidiff.compile(module, memory="fast", cache=False)
    assert_close(compiled(torch.ones(3, 512)), module(torch.ones(3, 512)))
    # The weight as a float, and packed.
    assert oxidiff.report(compiled).derived_bytes <= 2 * 4 * 512 * 512 + 4096


@torch.no_grad()
def test_what_programs_share_is_counted_once() -> None:
    """Sizes of which a level halves an odd number are another program, with the same weights."""
    compiled = oxidiff.compile(testing.build("sd15-unet", tiny=True), tune="off", cache=False, memory="fast")
    gc.collect()
    before = _native.derived_bytes()
    for size in ((64, 64), (60, 64)):
        compiled(**testing.example_inputs("sd15-unet", tiny=True, size=size))
    report = compiled.report()
    assert report.programs == 2 and report.derived_bytes > 0
    assert report.derived_bytes == _native.derived_bytes() - before
