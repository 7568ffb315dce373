"""Reports, explanations, profiles: right numbers, and readable in a terminal, a notebook and a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from nets import Net, image
from oxidiff import advice

FIELDS = {
    "captures", "programs", "variants", "specializations", "calls", "eager_calls", "fallbacks", "graph_hash",
    "shared_with", "compile_s", "tune_s", "load_s", "weight_bytes", "derived_bytes", "arena_bytes",
    "arena_lower_bound_bytes", "graph_bytes", "peak_bytes", "pool_bytes", "sizes",
}  # fmt: skip


@pytest.fixture
def compiled() -> Any:
    # Of a size that no other test uses: a program would be shared with what another test left alive.
    compiled: Any = oxidiff.compile(Net(channels=12).eval())
    with torch.no_grad():
        compiled(image())
        compiled(image(1, 3, 40, 24))
    return compiled


@pytest.mark.parametrize(("dtype", "peak"), [("f32", 200.0), ("bf16", 1200.0), ("f16", 400.0), ("i64", 200.0)])
def test_a_peak_is_that_of_what_multiplies(dtype: str, peak: float) -> None:
    tiles = {
        "f32_flops": 100.0,
        "bf16_dot_flops": 50.0,
        "f16_flops": 0.0,
        "bf16_amx_flops": 1200.0,
        "f16_amx_flops": 0.0,
    }
    assert advice.peak_flops(tiles, dtype) == peak
    assert advice.peak_flops({"f32_flops": 100.0, "bf16_dot_flops": 150.0}, dtype) == (
        150.0 if dtype == "bf16" else 100.0
    )


def test_fields(compiled: Any) -> None:
    report = compiled.report()
    fields = report.to_dict()
    assert fields.keys() >= FIELDS
    assert (report.captures, report.programs, report.variants, report.calls, report.eager_calls) == (1, 1, 1, 2, 0)
    assert report.specializations == len(report.sizes) == 2
    assert report.fallbacks == []
    assert report.shared_with == 0
    assert report.compile_s > 0
    assert report.weight_bytes == sum(p.nbytes for p in compiled.parameters())
    assert report.peak_bytes >= report.arena_bytes >= report.arena_lower_bound_bytes > 0
    assert isinstance(report.graph_hash, str)
    json.dumps(fields)


def test_weight_sets_share_the_sizes_of_their_program() -> None:
    compiled: Any = oxidiff.compile(Net(channels=20).eval(), strict=True)
    with torch.no_grad():
        for i in range(3):
            compiled.bind(Net(channels=20).state_dict(), str(i))
            compiled.use(str(i))
            compiled(image())
            compiled(image(1, 3, 8, 8))
        compiled.use(None)
        compiled(image())
    report = compiled.report()
    assert (report.calls, report.specializations) == (7, 2)
    assert [row["dims"] for row in report.sizes] == [[2, 12, 10], [1, 8, 8]]
    assert report.memory(1).dims == [1, 8, 8]


def test_before_the_first_call() -> None:
    compiled: Any = oxidiff.compile(Net())
    report = compiled.report()
    assert (report.captures, report.calls, report.graph_hash, report.sizes) == (0, 0, None, [])
    assert "nothing is compiled yet" in str(compiled.explain())
    for name in ("compile_s", "tune_s", "load_s"):
        assert type(report.to_dict()[name]) is float
        assert re.search(rf"{name}\s+0\.00 s", str(report))


class Checker(HTMLParser):
    """Counts tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_and_html(compiled: Any, tmp_path: Path) -> None:
    compiled.act.register_forward_hook(lambda *_: None)
    with torch.no_grad(), pytest.warns(oxidiff.FallbackWarning):
        compiled(image())
    report = compiled.report()
    text = str(report)
    for word in ("Net", "captures", "fallbacks", "forward hook"):
        assert word in text
    assert max(map(len, text.splitlines())) < 200
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for source in (page.removeprefix("<!DOCTYPE html>"), report._repr_html_()):
        checker = Checker()
        checker.feed(source)
        assert not checker.open
        assert "forward hook" in checker.text


def test_html_is_escaped() -> None:
    module = nn.Sequential()
    module.add_module("<script>", nn.ReLU())
    module[0].register_forward_hook(lambda *_: None)
    compiled: Any = oxidiff.compile(module.eval())
    with torch.no_grad(), pytest.warns(oxidiff.FallbackWarning):
        compiled(image())
    assert "<script>" not in compiled.report()._repr_html_()
    assert "<script>" in str(compiled.report())


def test_explain(compiled: Any) -> None:
    explanation = compiled.explain()
    (variant,) = explanation.variants
    assert variant["inputs"] == ["x: float32[b, 3, h, w]"]
    assert variant["outputs"] == ["float32[b, h, w, 12]"]
    assert sum(variant["steps"].values()) > 0
    assert variant["hash"] == compiled.report().graph_hash
    assert "variant 0" in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["variants"][0]["costs"] == variant["costs"]


def test_what_each_step_costs(compiled: Any) -> None:
    (variant,) = compiled.explain().variants
    costs = variant["costs"]
    assert variant["costs_at"] == [1, 40, 24], "the size that ran last"
    kernels = [row["kernel"] for row in costs]
    assert {name: kernels.count(name) for name in kernels} == variant["steps"]
    assert [row["module"] for row in costs if row["kernel"] == "convolution"] == ["conv"]
    (linear,) = (row for row in costs if row["kernel"] == "linear")
    assert linear["flops"] == 2 * 40 * 24 * 12 * 12
    assert linear["bytes"] >= 4 * (2 * 40 * 24 * 12 + 12 * 12)
    assert all(row["ms"] > 0 and row["bound"] in ("compute", "memory") for row in costs)
    text = str(compiled.explain())
    assert "costs, at least, on this CPU" in text and "at [1, 40, 24]" in text and " others" not in text
    # As that device would run it.
    (asked,) = compiled.explain(device="L4").variants
    assert asked["costs_on"] == "L4"
    launch = advice.device_of("L4").launch_s * 1e3
    assert all(row["ms"] >= launch for row in asked["costs"])


def test_the_dearest_steps_are_printed() -> None:
    deep: Any = oxidiff.compile(nn.Sequential(*(nn.Conv2d(3, 3, 2 * (i % 4) + 1) for i in range(16))).eval())
    with torch.no_grad():
        deep(image(1, 3, 90, 90))
    explanation = deep.explain()
    (variant,) = explanation.variants
    others = len(variant["costs"]) - 10
    assert others > 0
    lines = str(explanation).splitlines()
    (at,) = (i for i, line in enumerate(lines) if f"{others} others" in line)
    shares = [float(line.split()[1].rstrip("%")) for line in lines[at - 10 : at + 1]]
    assert shares[:-1] == sorted(shares[:-1], reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)


def test_what_pieces_cost() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if x.sum() > 0 else x

    compiled: Any = oxidiff.compile(Deciding().eval())
    with torch.no_grad(), pytest.warns(oxidiff.FallbackWarning):
        compiled(torch.ones(4, 8))
    variants = compiled.explain().variants
    assert variants and all(row["flops"] > 0 for variant in variants for row in variant["costs"][:1])


def test_profile_of_an_op_that_the_compiler_does_not_know() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Sorted(), nn.Linear(8, 8)).eval()
    profile = oxidiff.profile(oxidiff.compile(module, cache=False, tune="off"), torch.randn(4, 8))
    assert "eager" in dict(profile.by("kernel"))
    assert "f32" in dict(profile.by("dtype"))
    assert "GFLOP/s" in str(profile)
    assert profile._repr_html_().startswith("<table>")


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real + x


def test_profile(compiled: Any) -> None:
    profile = compiled.profile(image())
    assert profile.seconds > 0
    assert {"step", "kernel", "module", "seconds", "flops", "work", "bytes"} <= profile.steps[0].keys()
    by_module = profile.by("module")
    assert sum(seconds for _, seconds in by_module) == pytest.approx(profile.seconds)
    assert by_module[0][1] >= by_module[-1][1]
    assert "GFLOP/s" in str(profile)
    assert "of peak" in str(profile)
    assert all(profile.floor(step)[1] in {"compute", "memory"} for step in profile.steps)
    for step in profile.to_dict()["steps"]:
        floor, bound = profile.floor(step)
        assert (step["of_peak"], step["bound"]) == (pytest.approx(floor / step["seconds"]), bound)
    peak = advice.peak_flops(profile.ceilings, "f32")
    heavy = {"dtype": "f32", "flops": 4 * peak, "work": peak, "bytes": 1, "seconds": 2.0}
    assert profile.floor(heavy) == (pytest.approx(1.0), "compute")
    assert profile._repr_html_().startswith("<table>")
    with pytest.raises(oxidiff.Error):
        compiled.profile(image().to_sparse())


def test_nested_modules_are_counted() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = oxidiff.compile(Net())

        def forward(self, x: Any) -> Any:
            return x

        def decode(self, x: Any) -> Any:
            return self.net(x)

    holder: Any = oxidiff.compile(Holder().eval())
    with torch.no_grad():
        holder.decode(image())
    report = oxidiff.report(holder)
    assert (report.captures, report.calls) == (1, 1)
    assert oxidiff.explain(holder).variants[0]["module"] == "net"
    with oxidiff.eager(holder), torch.no_grad():
        holder.decode(image())
    assert oxidiff.report(holder).eager_calls == 1
    oxidiff.unload(holder)
    assert oxidiff.report(holder).variants == 0


class Locked(nn.Module):
    """A block that is given what no program takes, and gives it to its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Takes()
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Any, lock: Any) -> Any:
        return self.rest(self.first(x, lock))


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any, lock: Any) -> Any:
        with lock:
            return self.layer(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Locked() for _ in range(12))

    def forward(self, x: Any, lock: Any) -> Any:
        for block in self.blocks:
            x = block(x, lock)
        return x


@torch.no_grad()
def test_a_few_of_many_blocks_warn() -> None:
    compiled = oxidiff.compile(Blocks().eval(), cache=False)
    with pytest.warns(oxidiff.FallbackWarning) as warned:
        for rows in (2, 3):
            compiled(torch.randn(rows, 4), threading.Lock())
    said = [str(warning.message) for warning in warned]
    assert len(said) == 1 + 2 * 3, said
    assert sum("what else is so in modules like this one is in report().fallbacks" in text for text in said) == 2
    rows_of = {row["module"]: row["count"] for row in oxidiff.report(compiled).fallbacks}
    assert len(rows_of) == 1 + 2 * 12
    assert {*rows_of.values()} == {2}, "each call of each is counted"


def test_plain_instructions_have_a_ceiling() -> None:
    """Whatever the processor: convolutions are compared with it."""
    script = """
    import torch, oxidiff
    from torch import nn
    torch.set_grad_enabled(False)
    module = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1)).eval()
    compiled, x = oxidiff.compile(module, cache=False, strict=True), torch.randn(1, 64, 32, 32)
    torch.testing.assert_close(compiled(x), module(x), atol=1e-4, rtol=1e-4)
    assert "portable" in str(oxidiff.explain(compiled))
    assert oxidiff.profile(compiled, x).ceilings["f32_flops"] > 1e8
    """
    environment = {**os.environ, "OXIDIFF_ISA": "portable"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)


class Deciding(nn.Module):
    """What values decide about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y * 2) if y.sum() > 0 else self.second(y)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_runs_in_parts_is_told_apart(tmp_path: Path) -> None:
    compiled, x = oxidiff.compile(nn.Sequential(nn.Linear(8, 8), Deciding()), tune="off"), torch.randn(2, 8)
    compiled(x)
    for ask in (compiled.profile, compiled.estimate, compiled.warmup):
        with pytest.raises(oxidiff.CaptureError, match="Sequential has no program of the whole") as told:
            ask(x)
        assert type(told.value) is oxidiff.CaptureError and told.value.module == "1"
    with pytest.raises(oxidiff.ArtifactError, match="Sequential cannot be saved: it runs in parts"):
        compiled.save_graph(tmp_path / "graph.oxi")
