"""Artifacts and the cache: what is loaded is what would be captured, and nothing that a file holds does harm."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import sqlite3
import subprocess
import sys
import tarfile
import textwrap
import time
import tracemalloc
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from files import mutated, python, shuffled
from nets import Net, assert_close, image, shallow
from oxidiff import _native, testing
from oxidiff.__main__ import main
from oxidiff.capture import Capturer
from oxidiff.store import Artifact, bundle, cache, graphs_folder, read_artifact
from oxidiff.store.artifact import StoredGraph
from oxidiff.store.describe import describe
from oxidiff.store.encode import encode_call_key, to_bytes, to_data
from small_pipes import tested_vae as vae_of

MODELS = ("sd15-unet", "sdxl-unet", "sd15-controlnet", "sd15-vae-decoder", "clip-l", "t5-small", "flux", "sd3")


def stored_files() -> list[Path]:
    folder = graphs_folder()
    assert folder is not None
    return sorted(Path(folder).glob("*.oxi")) if Path(folder).exists() else []


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(1)
    return Net().eval()


# --- what is stored -------------------------------------------------------------------------------------------------


class Texts(nn.Module):
    """Lengths that are rounded up."""

    def forward(self, image: torch.Tensor, texts: list[torch.Tensor]) -> torch.Tensor:
        padded = [nn.functional.pad(x, (0, 0, 0, -len(x) % 8)) for x in texts]
        return nn.utils.rnn.pad_sequence(padded, batch_first=True) * image.mean()


class Tokens(nn.Module):
    """An image whose number of pixels is rounded up."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = image.flatten(2).transpose(1, 2)
        return nn.functional.pad(tokens, (0, 0, 0, -len(tokens[0]) % 8)) * 2


OWN: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "texts": (Texts(), {"image": torch.ones(2, 4, 8, 8), "texts": [torch.ones(n, 4) for n in (45, 11)]}),
    "tokens": (Tokens(), {"image": torch.ones(2, 4, 9, 7)}),
}


@pytest.mark.parametrize("name", [*MODELS, *OWN])
def test_a_graph_comes_back_as_it_was_captured(name: str) -> None:
    module, inputs = OWN[name] if name in OWN else (testing.build(name), testing.example_inputs(name))
    capturer = Capturer(module)
    call = capturer.call((), inputs)
    graph, lowered = capturer.lowered(call, _native.GraphBuilder)
    assert bool(graph.plan.rounded) == (name == "texts")
    assert bool(graph.plan.areas) == (name == "tokens")
    stored = StoredGraph.of(graph, lowered)
    file = Artifact("x", describe(module, module.forward), [stored]).to_bytes()
    fresh, relowered = Artifact.from_bytes(file).graphs[0].decode()
    assert relowered.builder.text() == lowered.builder.text()
    for field in ("symbols", "arguments", "weights"):
        assert getattr(relowered, field) == getattr(lowered, field), field
    for field in ("plan", "classes", "marks", "box", "points", "moduli", "forms", "fixed", "traces"):
        assert getattr(fresh, field) == getattr(graph, field), field
    assert fresh.outputs.spec == graph.outputs.spec
    assert [(x.literal, x.order, x.input) for x in fresh.outputs.leaves] == [
        (x.literal, x.order, x.input) for x in graph.outputs.leaves
    ]
    # The trace came along: a new size is compared with it.
    assert fresh.template.difference(graph.template) is None
    assert StoredGraph.of(fresh, relowered).decode()[0].forms == graph.forms


def test_another_process_captures_nothing() -> None:
    code = """
        import sys, torch, oxidiff
        from oxidiff import testing
        for name in sys.argv[1:]:
            module, inputs = testing.build(name), testing.example_inputs(name)
            compiled = oxidiff.compile(module, strict=True)
            with torch.inference_mode():
                out = testing.flatten_outputs(compiled(**inputs))
            report = oxidiff.report(compiled)
            print(report.captures, report.programs, [t.double().abs().sum().item().hex() for t in out])
    """
    models = ("sd15-unet", "flux")
    first, second = ([*python(code, *models, PYTHONHASHSEED=seed).splitlines()] for seed in "12")
    for before, after in zip(first, second, strict=True):
        assert before.split(maxsplit=2)[:2] == ["1", "1"]
        assert after.split(maxsplit=2)[:2] == ["0", "0"]
        assert before.split(maxsplit=2)[2] == after.split(maxsplit=2)[2]
    assert len(first) == len(models)


class AsksWhetherOne(nn.Module):
    """Attention to its own states is not that to others."""

    def forward(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return x * (2 if states is x else 3) + states


class Positions:
    """No module: makes its tables when it is first asked."""

    def __init__(self, base: float) -> None:
        self.base = base
        self.tables: list[torch.Tensor] | None = None

    def __call__(self, length: int) -> torch.Tensor:
        if self.tables is None:
            self.tables = [torch.arange(64.0)[:, None] * self.base, torch.ones(64, 1)]
        return self.tables[0][:length] + self.tables[1][:length]


class AsksPositions(nn.Module):
    def __init__(self, base: float = 2.0) -> None:
        super().__init__()
        self.positions = Positions(base)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.positions(x.shape[1])


@torch.no_grad()
def test_tables_that_an_object_makes_at_the_first_call_are_weights() -> None:
    expected = torch.arange(5.0)[:, None] * 2 + 1 + torch.ones(2, 5, 3)
    # The first call keeps the tables, in eager: what it would be captured as is not what later ones are.
    for captures in (2, 1):
        module = AsksPositions()
        compiled: Any = oxidiff.compile(module)
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(2, 5, 3)), expected)
        report = oxidiff.report(compiled)
        assert (report.captures, report.eager_calls) == (captures, 1)
        assert module.positions.tables is not None
        module.positions.tables[0] = torch.full((64, 1), 7.0)
        torch.testing.assert_close(compiled(torch.ones(2, 5, 3)), torch.full((2, 5, 3), 9.0))
        module.positions.tables[1].zero_()
        torch.testing.assert_close(compiled(torch.ones(2, 4, 3)), torch.full((2, 4, 3), 8.0))
        assert oxidiff.report(compiled).captures == captures, "as weights do"
        del module, compiled, report
        gc.collect()
    module = AsksPositions(3.0)
    other: Any = oxidiff.compile(module)
    for _ in range(2):
        torch.testing.assert_close(other(torch.ones(2, 5, 3)), torch.arange(5.0)[:, None] * 3 + 1 + torch.ones(2, 5, 3))
    assert module.positions.tables is not None and module.positions.tables[0].max() == 189


class AsksTwo(nn.Module):
    """What it multiplies by and what it adds may be one tensor, in two attributes."""

    def __init__(self, is_one: bool, place: str) -> None:
        super().__init__()
        first = nn.Parameter(torch.rand(4)) if place == "a parameter" else torch.rand(4)
        second = first if is_one else torch.rand(4)
        self.first: Any = first
        self.second: Any = {"a list": [second], "an object": Holder(second)}.get(place, second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.second
        if not isinstance(second, torch.Tensor):
            second = second[0] if isinstance(second, list) else second.held
        return x * self.first + second


class Holder:
    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


@pytest.mark.parametrize("place", ["an attribute", "a list", "an object", "a parameter"])
@torch.no_grad()
def test_graphs_of_one_tensor_in_two_attributes_and_of_two_are_told_apart_in_the_cache(place: str) -> None:
    captures = []
    for is_one in (True, False, True, False):
        module = AsksTwo(is_one, place)
        compiled: Any = oxidiff.compile(module, strict=True)
        x = torch.rand(2, 4)
        torch.testing.assert_close(compiled(x), module(x))
        captures.append(oxidiff.report(compiled).captures)
        del module, compiled
        gc.collect()
    assert captures == [1, 1, 0, 0]


@torch.no_grad()
def test_graphs_of_one_tensor_and_of_two_are_told_apart_in_the_cache() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    for captures in (2, 0):
        compiled: Any = oxidiff.compile(AsksWhetherOne(), strict=True)
        assert [compiled(*args).max().item() for args in ((x, y), (x, x), (y, x), (y, y))] == [4, 3, 4, 3]
        assert oxidiff.report(compiled).captures == captures
        del compiled
        gc.collect()


@torch.no_grad()
def test_a_class_of_sizes_is_checked_once_for_good(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halves(Net):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x[:, :, ::2, ::2], factor)

    module = Halves().eval()
    sizes = [(2, 3, 12, 10), (1, 3, 12, 10), (2, 3, 13, 10)]
    compiled: Any = oxidiff.compile(module, strict=True)
    for size in sizes:
        compiled(image(*size))
    captures = oxidiff.report(compiled).captures

    def no_more(*_: object) -> bool:
        raise AssertionError("a trace was taken")

    monkeypatch.setattr(Capturer, "extend", no_more)
    again: Any = oxidiff.compile(Halves().eval(), strict=True)
    for size in sizes:
        again(image(*size))
    assert captures >= 1 and oxidiff.report(again).captures == 0


@torch.no_grad()
def test_without_cache_nothing_is_read_or_written(net: nn.Module) -> None:
    compiled: Any = oxidiff.compile(net, strict=True, cache=False)
    compiled(image())
    assert stored_files() == []
    cached: Any = oxidiff.compile(net, strict=True)
    cached(image())
    assert len(stored_files()) == 1
    # A live module with the same options would be shared with.
    compiled.unload()
    again: Any = oxidiff.compile(net, strict=True, cache=False)
    again(image())
    assert oxidiff.report(again).captures == 1


# --- what decides whether it fits -----------------------------------------------------------------------------------

SOURCE = """
import torch
LIMIT = {limit}
def helper(x, y={default}):
    return x * {factor} + y
class Mixin:
    slope = {slope}
    def scale(self, x):
        return x * self.slope
class Model(Mixin, torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, {width})
        self.gain = {gain}
        self.config = {{"_name_or_path": {origin!r}, "depth": {depth}}}
    def forward(self, x):
        closure = lambda v: v + {inner}
        return self.scale(helper(closure(self.linear(x)))) * self.gain
    def unused(self):
        return {unused}
"""
BASE: dict[str, Any] = {
    "limit": 1, "default": 0, "factor": 2, "slope": 3, "width": 4, "gain": 5, "origin": "a", "depth": 6, "inner": 7,
    "unused": 8,
}  # fmt: skip


def model(**changes: Any) -> nn.Module:
    table: dict[str, Any] = {"__name__": "somewhere"}
    exec(compile(SOURCE.format(**{**BASE, **changes}), "somewhere.py", "exec"), table)
    made: nn.Module = table["Model"]()
    return made


@pytest.mark.parametrize("field", ["default", "factor", "slope", "width", "gain", "depth", "inner"])
def test_an_edit_anywhere_on_the_way_is_another_program(field: str) -> None:
    before, after = model(), model(**{field: 9})
    ours, theirs = describe(before, before.forward), describe(after, after.forward)
    assert ours.digest != theirs.digest
    assert ours.differences(theirs)


@pytest.mark.parametrize("field", ["origin", "unused", "limit"])
def test_what_no_forward_reads_changes_nothing(field: str) -> None:
    before, after = model(), model(**{field: 9})
    assert describe(before, before.forward).digest == describe(after, after.forward).digest


def test_other_things_that_a_program_depends_on() -> None:
    digests = set()
    variants: list[Any] = [
        lambda m: m,
        lambda m: m.half(),
        lambda m: m.eval(),
        lambda m: nn.Module.register_buffer(m, "extra", torch.zeros(1)),
        lambda m: setattr(m.linear, "bias", None),
        lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x + 1, m)),
        lambda m: m.linear.register_forward_hook(lambda *_: None),
        lambda m: setattr(m, "dtype_of", torch.float16),
        lambda m: setattr(m.linear, "weight", nn.Parameter(torch.zeros(4, 4).t())),
        lambda m: setattr(m, "other", m.linear.weight),
    ]
    for change in variants:
        module = model()
        change(module)
        digest = describe(module, module.forward).digest
        assert digest not in digests, change
        digests.add(digest)
    module = model()
    digests.add(describe(module, module.forward, dynamic=False).digest)
    assert len(digests) == len(variants) + 1


def test_an_edited_class_of_an_argument_is_another_program(tmp_path: Path) -> None:
    code = """
        import sys, torch, oxidiff
        sys.path.insert(0, sys.argv[1])
        from passed import Options
        compiled = oxidiff.compile(lambda x, options: options.scaled(x) + options.offset, strict=True)
        with torch.no_grad():
            print(compiled(torch.ones(1), Options()).item(), oxidiff.report(compiled).captures)
    """
    text = """
        from dataclasses import dataclass
        from typing import ClassVar

        @dataclass
        class Options:
            factor: float = 2.0
            offset: ClassVar[int] = 1

            def scaled(self, x):
                return x * self.factor
    """
    found = []
    for old, new in (("", ""), ("", ""), ("x * self", "2 * x * self"), ("int] = 1", "int] = 30")):
        (tmp_path / "passed.py").write_text(textwrap.dedent(text.replace(old, new)))
        found.append(python(code, tmp_path, PYTHONDONTWRITEBYTECODE="1").split())
    assert found == [["3.0", "1"], ["3.0", "0"], ["5.0", "1"], ["32.0", "1"]]


@torch.no_grad()
def test_an_edited_module_is_captured_anew() -> None:
    for factor in (2, 3):
        torch.manual_seed(0)
        module = model(factor=factor).eval()
        compiled: Any = oxidiff.compile(module, strict=True)
        x = torch.randn(2, 4)
        assert_close(compiled(x), module(x))
        assert oxidiff.report(compiled).captures == 1


# --- files of the user's own ----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("is_module", [False, True])
def test_what_ran_with_a_weight_set_alone_is_saved(is_module: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.oxi"
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    other = Net().eval()
    compiled.bind(other if is_module else other.state_dict(), "other")
    with pytest.raises(oxidiff.ArtifactError, match="nothing is compiled yet"):
        compiled.save_graph(path)
    compiled.use("other")
    # A number that becomes an argument, too.
    for scale in (1.5, 1.75, 2.5):
        module.scale = other.scale = scale
        compiled(image())
    compiled.use(None)
    compiled(image(), factor=2)
    compiled.save_graph(path)
    del compiled
    gc.collect()
    loaded: Any = oxidiff.compile(module, cache=False, strict=True)
    loaded.load_graph(path)
    for kwargs in ({}, {"factor": 2}):
        assert_close(loaded(image(), **kwargs), module(image(), **kwargs))
    assert oxidiff.report(loaded).captures == 0


@torch.no_grad()
def test_save_and_load(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.oxi"
    compiled: Any = oxidiff.compile(net, strict=True, cache=False)
    with pytest.raises(oxidiff.ArtifactError, match="nothing is compiled yet"):
        compiled.save_graph(path)
    expected = compiled(image())
    compiled.save_graph(path)
    # Other weights: an artifact has none.
    other = Net().eval()
    loaded: Any = oxidiff.compile(other, strict=True, cache=False)
    oxidiff.load_graph(loaded, path, device="cpu")
    assert_close(loaded(image()), other(image()))
    other.load_state_dict(net.state_dict())
    assert torch.equal(loaded(image()), expected)
    report = oxidiff.report(loaded)
    assert (report.captures, report.programs) == (0, 0) and report.load_s > 0
    for device in ("meta", "junk", "cuda:99"):
        with pytest.raises(oxidiff.UnsupportedError, match=device):
            loaded.load_graph(path, device=device)


@torch.no_grad()
def test_a_module_that_does_not_fit_says_what_differs(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.oxi"
    compiled: Any = oxidiff.compile(net, strict=True, cache=False)
    compiled(image())
    compiled.save_graph(path)
    wide: Any = oxidiff.compile(Net(channels=10).eval(), strict=True, cache=False)
    with pytest.raises(oxidiff.ArtifactError) as caught:
        wide.load_graph(path)
    for part in ("conv.weight", "[10, 3, 3, 3]", "[8, 3, 3, 3]", str(path), "Net"):
        assert part in str(caught.value)
    # It works on, and so does one with another attribute.
    assert_close(wide(image()), wide._orig_mod(image()))
    scaled = Net().eval()
    scaled.scale = 2.5
    with pytest.raises(oxidiff.ArtifactError, match=r"2\.5"):
        oxidiff.compile(scaled, cache=False).load_graph(path)  # type: ignore[operator]
    with pytest.raises(oxidiff.ArtifactError, match="no file"):
        compiled.load_graph(tmp_path / "missing.oxi")


@torch.no_grad()
def test_graph_file(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "net.oxi"
    for captures in (1, 0):
        compiled: Any = oxidiff.compile(net, strict=True, cache=False, graph_file=str(path))
        assert_close(compiled(image()), net(image()))
        assert oxidiff.report(compiled).captures == captures
    assert len(read_artifact(path).graphs) == 1
    # Another module's: said once, and replaced.
    wide: Any = oxidiff.compile(Net(channels=10).eval(), strict=True, cache=False, graph_file=str(path))
    with pytest.warns(oxidiff.CacheWarning, match=r"conv\.weight"):
        wide(image())
    assert "10" in read_artifact(path).description.lines["tensors"]["conv.weight"]


class BytesPath:
    """As of `os.scandir(b"...")`."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __fspath__(self) -> bytes:
        return self._path


@torch.no_grad()
@pytest.mark.parametrize("of", [bytes, BytesPath])
def test_paths_of_bytes(net: nn.Module, tmp_path: Path, of: Callable[[bytes], Any]) -> None:
    def path(name: str) -> Any:
        return of(os.fsencode(tmp_path / name))

    first: Any = oxidiff.compile(net, cache=False, graph_file=path("file.oxi"))
    first(image())
    first.save_graph(path("saved.oxi"))
    for name in ("file.oxi", "saved.oxi"):
        second: Any = oxidiff.compile(net, cache=False)
        second.load_graph(path(name))
        second(image())
        assert oxidiff.report(second).captures == 0
    with pytest.raises(oxidiff.ArtifactError, match=f"there is no file {tmp_path}/missing"):
        second.load_graph(path("missing"))
    other: Any = oxidiff.compile(Net(12).eval(), cache=False)
    with pytest.raises(oxidiff.ArtifactError, match=f"{tmp_path}/saved.oxi was saved from another"):
        other.load_graph(path("saved.oxi"))
    pipe = types.SimpleNamespace(unet=first)
    oxidiff.save_pipe(pipe, path("pipe"))
    oxidiff.load_pipe(pipe, path("pipe"))
    assert [p.name for p in (tmp_path / "pipe").iterdir()] == ["unet.oxi"]


@torch.no_grad()
@pytest.mark.parametrize("how", ["called", "warmed up", "background"])
def test_a_graph_file_is_there_after_the_first_call_whatever_the_cache_has(
    net: nn.Module, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "net.oxi"
    oxidiff.compile(net)(image())
    for start in range(2):
        compiled: Any = oxidiff.compile(net, graph_file=str(path), background=how == "background")
        if how == "warmed up":
            oxidiff.warmup(compiled, image())
        else:
            compiled(image())
        until = time.monotonic() + 60
        while how == "background" and oxidiff.report(compiled).calls == oxidiff.report(compiled).eager_calls:
            assert time.monotonic() < until
            time.sleep(0.01)
            compiled(image())
        assert oxidiff.report(compiled).captures == 0
        assert len(read_artifact(path).graphs) == 1
        # A second name keeps the file, should another one take its place.
        if start == 0:
            os.link(path, tmp_path / "first")
    assert path.samefile(tmp_path / "first"), "it had all that there is"
    alone: Any = oxidiff.compile(net, graph_file=str(path), cache=False)
    alone(image())
    assert oxidiff.report(alone).captures == 0, "it has what the cache had"


@torch.no_grad()
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_graph_file_is_written_by_each_module_that_finds_none(tmp_path: Path, has_cache: bool) -> None:
    """Modules that share a program are alive, and the file was removed since the first of them wrote it."""
    path = tmp_path / "net.oxi"
    compiled: list[Any] = []
    for _ in range(2):
        compiled.append(oxidiff.compile(Net().eval(), graph_file=str(path), cache=has_cache))
        compiled[-1](image())
        assert len(read_artifact(path).graphs) == 1
        path.unlink()
    assert [oxidiff.report(one).captures for one in compiled] == [1, 0]


@torch.no_grad()
def test_what_is_loaded_goes_to_the_graph_file(net: nn.Module, tmp_path: Path) -> None:
    first: Any = oxidiff.compile(net, cache=False)
    first(image())
    first.save_graph(tmp_path / "saved.oxi")
    second: Any = oxidiff.compile(net, cache=False, graph_file=str(tmp_path / "net.oxi"))
    second.load_graph(tmp_path / "saved.oxi")
    second(image())
    assert oxidiff.report(second).captures == 0
    assert len(read_artifact(tmp_path / "net.oxi").graphs) == 1


@torch.no_grad()
def test_pipelines(tmp_path: Path) -> None:
    def pipe() -> Any:
        parts = {name: shallow(name) for name in ("sd15-unet", "sd15-vae-decoder")}
        vae = nn.Module()
        vae.decoder = parts["sd15-vae-decoder"]
        made = types.SimpleNamespace(unet=parts["sd15-unet"], vae=vae, text_encoder=Net().eval())
        return oxidiff.compile_pipe(made, cache=False, strict=True, parts=("unet", "vae.decoder", "text_encoder"))

    def call(made: Any) -> None:
        made.unet(**testing.example_inputs("sd15-unet"))
        made.vae.decoder(**testing.example_inputs("sd15-vae-decoder"))

    first = pipe()
    with pytest.raises(oxidiff.ArtifactError, match="no part"):
        oxidiff.save_pipe(first, tmp_path / "pipe")
    call(first)
    oxidiff.save_pipe(first, tmp_path / "pipe", ignores=("vae",))
    assert [p.name for p in sorted((tmp_path / "pipe").iterdir())] == ["unet.oxi"]
    stamp = (tmp_path / "pipe" / "unet.oxi").stat().st_mtime_ns
    oxidiff.save_pipe(first, tmp_path / "pipe", overwrite=False)
    assert (tmp_path / "pipe" / "unet.oxi").stat().st_mtime_ns == stamp
    second = pipe()
    oxidiff.load_pipe(second, tmp_path / "pipe")
    call(second)
    assert oxidiff.report(second.unet).captures == oxidiff.report(second.vae.decoder).captures == 0
    with pytest.raises(oxidiff.ArtifactError, match="no file for any"):
        oxidiff.load_pipe(second, tmp_path)


@torch.no_grad()
def test_a_context_of_diffusers_caches_is_no_part_of_an_artifact(tmp_path: Path) -> None:
    """Pipelines enter it around each step; it leaves a registry of hooks that refers to the compiled module."""
    path = tmp_path / "flux.oxi"
    inputs = testing.example_inputs("flux", tiny=True)

    def compiled() -> Any:
        torch.manual_seed(0)
        return oxidiff.compile(testing.build("flux", tiny=True), tune="off", cache=False)

    def call(module: Any) -> Any:
        with module.cache_context("cond"):
            return module(**inputs)[0]

    first, second, third = compiled(), compiled(), compiled()
    expected = call(first)
    oxidiff.save_graph(first, path)
    oxidiff.load_graph(second, path)
    assert torch.equal(call(second), expected)
    call(third)
    oxidiff.load_graph(third, path)
    assert oxidiff.report(second).captures == 0


def test_what_cannot_be_removed_keeps_nothing_else(net: nn.Module) -> None:
    with torch.no_grad():
        oxidiff.compile(net, tune="off")(image())
    (path,) = stored_files()
    (path.parent / "a.oxi").mkdir()
    (path.parent / "z.oxi").mkdir()
    with pytest.raises(oxidiff.CacheError, match=r"cannot remove .*a\.oxi"):
        bundle.clear()
    assert sorted(p.name for p in stored_files()) == ["a.oxi", "z.oxi"]


@torch.no_grad()
def test_a_part_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    pipe = types.SimpleNamespace(unet=shallow("sd15-unet"), text_encoder=Net().eval())
    # Deeper than modules in attributes are found.
    pipe.text_encoder.other = {"a": {"b": {"c": {"d": {"e": [{"module": nn.Linear(2, 2)}]}}}}}
    oxidiff.compile_pipe(pipe, cache=False)
    pipe.unet(**testing.example_inputs("sd15-unet"))
    pipe.text_encoder(image())
    with pytest.warns(oxidiff.CacheWarning, match="text_encoder is not saved: the module cannot be described"):
        oxidiff.save_pipe(pipe, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["unet.oxi"]


@torch.no_grad()
def test_an_autoencoder_is_saved_by_its_networks(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pipe = types.SimpleNamespace(vae=vae_of("kl"))
    oxidiff.compile_pipe(pipe, cache=False)
    pipe.vae.decode(torch.randn(1, 4, 4, 4))
    oxidiff.save_pipe(pipe, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vae.decoder.oxi"]
    assert not [each for each in recwarn if each.category is oxidiff.CacheWarning]


def test_the_index_of_a_device_is_no_part_of_an_artifact() -> None:
    first, second, other = (encode_call_key((torch.device(name), 1)) for name in ("cuda:0", "cuda:1", "cpu"))
    assert first == second != other


def test_what_cannot_be_stored_says_why(tmp_path: Path) -> None:
    held = torch.randn(4)

    class Closure(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + held

    compiled: Any = oxidiff.compile(Closure().eval(), strict=True)
    compiled(torch.zeros(2, 4))
    with pytest.raises(oxidiff.ArtifactError, match="that no module holds"):
        compiled.save_graph(tmp_path / "x.oxi")
    assert stored_files() == []


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_warned", set())


@torch.no_grad()
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "folder"])
def test_a_damaged_cache_is_a_warning(net: nn.Module, damage: str, fresh_warnings: None) -> None:
    oxidiff.compile(net, strict=True)(image())
    (path,) = stored_files()
    data = bytearray(path.read_bytes())
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes({"empty": b"", "cut": data[:-9], "flipped": data, "other": b"text" * 99}[damage])
    compiled: Any = oxidiff.compile(net, strict=True)
    with pytest.warns(oxidiff.CacheWarning, match=r"anew|not kept"):
        assert_close(compiled(image()), net(image()))
    assert oxidiff.report(compiled).captures == 1
    if damage != "folder":
        assert len(read_artifact(path).graphs) == 1, "the damaged file was replaced"


@torch.no_grad()
def test_a_folder_that_cannot_be_written_is_a_warning(
    net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_warnings: None
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path / "file" / "cache"))
    compiled: Any = oxidiff.compile(net, strict=True)
    with pytest.warns(oxidiff.CacheWarning, match="not kept"):
        assert_close(compiled(image()), net(image()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oxidiff.compile(net, strict=True)(image())


TUNED = """
    import sys, torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 72, 3, padding=1)).eval()
    x = torch.randn(1, 64, 24, 24)
"""
"""A module with two convolutions to tune."""


def test_a_full_disk_is_a_warning() -> None:
    code = """
        import resource, signal, oxidiff, warnings
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        compiled = oxidiff.compile(net, strict=True)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
            # Another file.
            oxidiff.compile(nn.Sequential(*net, nn.SiLU()).eval(), strict=True, tune="off")(x)
        assert oxidiff.report(compiled).tune_s > 0 and all(w.category is oxidiff.CacheWarning for w in caught)
        said = sorted(str(w.message) for w in caught)
        assert said[1].endswith("disk I/O error"), said
        print(*(what.split()[0] for what in said), oxidiff.report(compiled).captures)
    """
    # The graph and the choices are each not kept, and each said so once.
    assert python(TUNED, then=code).split() == ["compiled", "tuning", "1"]
    folder = graphs_folder()
    assert folder is not None and [p.name for p in Path(folder).iterdir()] == [".oxidiff-lock"]


READ_ONLY = """
    import ctypes, oxidiff, warnings
    # Root may write what nobody may: without its capabilities it may not.
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
    if sys.argv[1] == "new":
        net.append(nn.SiLU())
        net.append(nn.Conv2d(72, 80, 3, padding=1))
    compiled = oxidiff.compile(net.eval(), strict=True)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    print(oxidiff.report(compiled).captures, len(oxidiff.tune._held), len(caught))
    print(*[w.message for w in caught])
"""


def test_a_shipped_cache_that_cannot_be_written_is_read() -> None:
    python(TUNED, "known", then=READ_ONLY)
    folder = Path(str(graphs_folder())).parent

    def content() -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    before = content()
    assert "tuning.sqlite" in before and len(before) == 3
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        # What is in it is used, in silence; what is not is made, with a word about the graph and one about the choices.
        assert python(TUNED, "known", then=READ_ONLY).splitlines() == ["0 2 0", ""]
        fresh = python(TUNED, "new", then=READ_ONLY).splitlines()
        assert fresh[0] == "1 3 2" and "graphs are not kept" in fresh[1] and "choices: they are not kept" in fresh[1]
        assert content() == before
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_mutated_artifacts_are_refused_or_decoded(net: nn.Module) -> None:
    """Behind a right checksum too: as if somebody had written the file by hand. Half are mutated as bytes, half as data."""
    capturer = Capturer(net)
    graph, lowered = capturer.lowered(capturer.call((image(),), {}), _native.GraphBuilder)
    file = Artifact(
        "Net", describe(net, net.forward), [StoredGraph.of(graph, lowered)], [ROW, ROW], [TUNED_AT]
    ).to_bytes()
    sections = dict(_native.decode_artifact(file))
    source = random.Random(3)
    decoded = 0
    for i in range(20_000):
        name = source.choice(["about", "description", "choices", "tuned", "0.program", "0.call", "0.call", "0.trace"])
        data = sections[name]
        if i % 2 and name != "0.program":
            data = to_bytes(shuffled(to_data(data), source))
        else:
            data = mutated(data, source)
        sealed = _native.encode_artifact([*{**sections, name: data}.items()])
        try:
            artifact = Artifact.from_bytes(sealed)
            for stored in artifact.graphs:
                fresh, _ = stored.decode()
                fresh.template.difference(graph.template)
                decoded += 1
        except oxidiff.ArtifactError:
            pass
    assert 100 < decoded < 19_000


# --- processes ------------------------------------------------------------------------------------------------------


def test_two_processes_start_on_an_empty_cache() -> None:
    code = """
        import oxidiff
        compiled = oxidiff.compile(net, strict=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
            y = x.repeat(1, 1, 1, 2) if sys.argv[1] == "1" else x[:, :, :5].contiguous()
            torch.testing.assert_close(compiled(y), net(y), rtol=1e-4, atol=1e-5)
    """
    source = textwrap.dedent(TUNED) + textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", source]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen([*command, str(i)], env=environment, stderr=subprocess.PIPE, text=True) for i in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    (path,) = stored_files()
    assert len(read_artifact(path).graphs) == 1
    # Both convolutions at the common size; at its own size a process tunes unless it found the other's graph.
    assert len({row[0] for row in bundle.entries()}) == 2 and len(bundle.entries()) in (2, 4, 6)
    code = """
        import oxidiff
        compiled = oxidiff.compile(net, strict=True)
        with torch.no_grad():
            compiled(x)
        print(oxidiff.report(compiled).captures, len(oxidiff.tune._held), "torch._dynamo" in sys.modules)
    """
    # Importing Dynamo would take longer than all of the restart.
    assert python(TUNED, then=code).strip() == "0 2 False"


@torch.no_grad()
def test_a_lock_that_somebody_keeps_stops_nobody(net: nn.Module, fresh_warnings: None) -> None:
    folder = graphs_folder()
    assert folder is not None
    with _native.FileLock(os.path.join(folder, ".oxidiff-lock")):
        compiled: Any = oxidiff.compile(net, strict=True)
        started = time.monotonic()
        with pytest.warns(oxidiff.CacheWarning, match="not kept.*locked"):
            assert_close(compiled(image()), net(image()))
        assert time.monotonic() - started < 10
        # It is waited for once, not by each module.
        started = time.monotonic()
        for channels in (14, 16, 18):
            more: Any = oxidiff.compile(Net(channels=channels).eval(), strict=True)
            more(image())
        assert time.monotonic() - started < 5
    # Nobody holds it but for a write.
    second: Any = oxidiff.compile(Net(channels=12).eval(), strict=True)
    second(image())
    with _native.FileLock(os.path.join(folder, ".oxidiff-lock")):
        assert len(stored_files()) == 1


def test_killed_while_writing(net: nn.Module) -> None:
    """Fifty times, at a random moment: both files are what one of the writers wrote, and the next start works."""
    compiled: Any = oxidiff.compile(net, strict=True)
    with torch.no_grad():
        compiled(image())
    (path,) = stored_files()
    # Forked from one warm process each, or starting would take minutes.
    children = """
        import os, sys, time, random, signal
        import oxidiff
        from oxidiff.store import bundle, cache, read_artifact
        path, rounds, source = sys.argv[1], int(sys.argv[2]), random.Random(5)
        artifact = read_artifact(path)
        row = ("b", "cpu", "1", "direct", 0.5, 1.0, 0, 7)
        for i in range(rounds):
            child = os.fork()
            if child == 0:
                j = 0
                while True:
                    j += 1
                    if (i + j) % 2:
                        artifact.graphs[0].key = f'"{i} {j}"'
                        cache.update(path, artifact)
                    else:
                        database = oxidiff._native.TuningDatabase(str(bundle.database_path()))
                        database.add([(f"{i} {j}", *row)])
            time.sleep(source.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert read_artifact(path).graphs
            database = oxidiff._native.TuningDatabase(str(bundle.database_path()))
            assert database.complaint is None
            database.add([(f"{i} of the parent", *row)])
        assert {f"{i} of the parent" for i in range(rounds)} <= {entry[0] for entry in database.entries()}
        print(rounds, len(database.entries()) > rounds)
    """
    assert python(children, path, 50).split() == ["50", "True"]
    again: Any = oxidiff.compile(net, strict=True)
    with torch.no_grad():
        assert_close(again(image()), net(image()))


# --- the command line -----------------------------------------------------------------------------------------------

ROW = ("conv", "m", "cpu", "1", "direct", 0.5, 1.0, 0, 7)
TUNED_AT = ("0" * 64, "cpu", "1", (2, 12, 10))


@torch.no_grad()
def test_the_cache_travels(
    net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oxidiff.compile(net, strict=True)(image())
    database = str(bundle.database_path())
    _native.TuningDatabase(database).add([ROW])
    file = str(tmp_path / "all.oxi")
    assert main(["cache", "ls"]) == 0
    assert main(["cache", "export", file]) == 0
    shown = capsys.readouterr().out
    assert "Net, 1 graphs" in shown and "1 choices for cpu, kernels 1 (not these" in shown and "2 entries" in shown
    assert main(["cache", "ls", "--choices"]) == 0
    assert "conv, m: direct, 500 ms, 1e+03 ms untuned" in capsys.readouterr().out
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert main(["cache", "merge", file]) == 0
    compiled: Any = oxidiff.compile(net, strict=True)
    compiled(image())
    assert oxidiff.report(compiled).captures == 0
    assert bundle.entries() == [ROW]
    assert main(["cache", "merge", database]) == 0, "a database too"
    assert main(["cache", "clear"]) == 0
    assert stored_files() == [] and bundle.entries() == []
    assert main(["cache", "import", file]) == 0
    assert len(stored_files()) == 1 and bundle.entries() == [ROW]
    # What cannot be read leaves everything as it is.
    (tmp_path / "bad").write_bytes(b"x" * 100)
    assert main(["cache", "import", str(tmp_path / "bad")]) == 1
    assert len(stored_files()) == 1


def cache_files(folder: Path | None = None) -> dict[str, bytes]:
    """What is in the cache's folder, or a copy of it, but for locks."""
    folder = folder or bundle.database_path().parent
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".oxidiff-lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def two_caches(net: nn.Module, tmp_path: Path) -> tuple[Path, dict[str, bytes], dict[str, bytes]]:
    """A bundle, what an import of it makes of the cache, and what is in that: a graph of both, one of each, machine code."""
    cubins = bundle.database_path().parent / "cubins"

    def fill(channels: int, unit: str, row: Any) -> None:
        for module in (net, Net(channels).eval()):
            with torch.no_grad():
                oxidiff.compile(module, tune="off")(image())
        _native.write_file(str(cubins / f"{unit * 32}.cubin"), kept_file(unit.encode()))
        _native.TuningDatabase(str(bundle.database_path())).add([row])

    fill(10, "0a", ROW)
    bundle.export(tmp_path / "all.tar")
    new = cache_files()
    bundle.clear()
    fill(12, "1b", ("linear", *ROW[1:]))
    return tmp_path / "all.tar", new, cache_files()


def is_like(found: dict[str, bytes], wanted: dict[str, bytes]) -> bool:
    """Whether these are the files; of the database the rows."""
    names = found.keys() == wanted.keys()
    return names and all(name.endswith(".sqlite") or found[name] == data for name, data in wanted.items())


def test_an_import_replaces_all(two_caches: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, new, _ = two_caches
    assert main(["cache", "import", str(path)]) == 0
    assert str(bundle.database_path().parent) in capsys.readouterr().out, "it says in which folder"
    assert is_like(cache_files(), new)
    assert bundle.entries() == [ROW]
    # From a file in the cache's own folder, too.
    inside = bundle.database_path().parent / "all.tar"
    path.rename(inside)
    assert main(["cache", "import", str(inside)]) == 0
    inside.unlink()
    assert is_like(cache_files(), new) and bundle.entries() == [ROW]


@pytest.mark.parametrize("name", ["tuning.sqlite", "other name", "link", "tuning.damaged"])
def test_an_import_of_what_it_would_remove_is_refused(
    name: str, two_caches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundle.database_path().parent
    if name == "tuning.damaged":
        (folder / name).write_bytes(bundle.database_path().read_bytes())
    elif name == "link":
        (folder / name).symlink_to("tuning.sqlite")
    elif name == "other name":
        os.link(folder / "tuning.sqlite", folder / name)
    before = cache_files()
    assert main(["cache", "import", str(folder / name)]) == 1
    assert str(folder / name) in capsys.readouterr().err
    assert cache_files() == before


def test_an_import_that_fails_leaves_what_there_was(two_caches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its steps, which are writes of files and of rows and changes of names."""
    path, new, old = two_caches
    steps = 0

    def count_to(last: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == last:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        return counted

    for last in range(1, 100):
        steps = 0
        with monkeypatch.context() as context:
            for holder, name in ((os, "replace"), (os, "link"), (_native, "write_file"), (bundle, "_add_rows")):
                context.setattr(holder, name, count_to(last, getattr(holder, name)))
            try:
                bundle.replace(path)
            except oxidiff.CacheError as error:
                assert "No space left" in str(error)
                assert cache_files() == old
                continue
        break
    assert last > 10 and is_like(cache_files(), new) and bundle.entries() == [ROW]


def test_an_import_that_is_killed_leaves_nothing_out(two_caches: Any, tmp_path: Path) -> None:
    """At each of its changes of names: every file that was there is, as it was or as it is in the bundle."""
    path, new, old = two_caches
    code = """
        import os, shutil, sys
        import oxidiff
        from oxidiff.store import bundle
        path, folder, out = sys.argv[1:]
        os.mkdir(out)
        def ends(at):
            steps = iter(range(1, at))
            def counted(real):
                return lambda *names: real(*names) if next(steps, None) else os._exit(0)
            os.replace, os.link = counted(os.replace), counted(os.link)
            bundle.replace(path)
            os._exit(1)
        shutil.move(folder, out + "/0")
        for at in range(1, 100):
            shutil.copytree(out + "/0", folder, dirs_exist_ok=True)
            child = os.fork()
            if child == 0:
                ends(at)
            _, status = os.waitpid(child, 0)
            shutil.move(folder, f"{out}/{at}")
            if status:
                break
        print(at)
    """
    # Two names for each graph and database that both have, one for each other file; two are taken away then.
    swaps, steps = 6, 8
    assert int(python(code, path, bundle.database_path().parent, tmp_path / "out")) == steps + 1
    for at in range(1, steps + 1):
        found = cache_files(tmp_path / "out" / str(at))
        for name, data in old.items() if at <= swaps else new.items():
            assert name.endswith(".sqlite") or found[name] in (data, new.get(name)), (at, name)
        assert bundle.entries(tmp_path / "out" / str(at) / "tuning.sqlite")
    assert is_like(cache_files(tmp_path / "out" / str(steps + 1)), new)


def test_an_import_waits_for_who_writes(two_caches: Any) -> None:
    path, _, old = two_caches
    with (
        _native.FileLock(os.path.join(str(graphs_folder()), cache.LOCK)),
        pytest.raises(oxidiff.CacheError, match="locked"),
    ):
        bundle.replace(path)
    assert cache_files() == old


def test_a_command_says_which_folder_it_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty variable is as one that is not set."""
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cache", "clear"]) == 0
    assert str(tmp_path / "oxidiff") in capsys.readouterr().out


def test_an_export_replaces_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link stays one, to the bundle; a pipe, a device or a folder is not taken away from who reads it."""
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(folder / "bundle")
    assert main(["cache", "export", str(link)]) == 0
    assert link.is_symlink() and (folder / "bundle").stat().st_size > 0
    for place in (pipe, folder):
        assert main(["cache", "export", str(place)]) == 1
        assert f"{place} is no file" in capsys.readouterr().err
    assert pipe.is_fifo()
    nowhere = tmp_path / "none" / "bundle"
    assert main(["cache", "export", str(nowhere)]) == 1
    assert capsys.readouterr().err.strip().endswith(f"cannot write {nowhere}: No such file or directory")


@pytest.mark.parametrize("damage", ["schema", "noise"])
def test_an_export_leaves_out_a_database_that_it_cannot_read(
    net: nn.Module, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_warnings: None
) -> None:
    with torch.no_grad():
        oxidiff.compile(net, tune="off")(image())
    database = bundle.database_path()
    _native.TuningDatabase(str(database)).add([ROW])
    if damage == "schema":
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("PRAGMA user_version = 99")
    else:
        database.write_bytes(b"no database" * 1000)
    before = database.read_bytes()
    assert main(["cache", "export", str(tmp_path / "all.tar")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 entries")
    assert "tuning choices are left out" in err and ("schema 99" in err or damage == "noise")
    assert len(err.splitlines()) == 1
    with pytest.warns(oxidiff.CacheWarning, match="left out"):
        assert bundle.export(tmp_path / "all.tar") == 1
    assert database.read_bytes() == before
    bundle.clear()
    assert bundle.merge(tmp_path / "all.tar") == len(stored_files()) == 1


def kept_file(data: bytes) -> bytes:
    """As the cache keeps machine code: a hash of the rest, and the rest. An artifact begins with one, too."""
    artifact = _native.encode_artifact([("code", data)])
    return artifact[16:]


def test_machine_code_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundle.database_path().parent / "cubins"
    folder.mkdir(parents=True)
    files = {f"{'0a' * 32}.cubin": kept_file(b"code"), f"{'1b' * 32}.plan": kept_file(b"plan")}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / f"{'2c' * 32}.cubin").write_bytes(kept_file(b"cut")[:-1])
    whole = tmp_path / "whole"
    assert bundle.export(whole) == 2, "what is damaged is left out"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["whole"]

    def written(change: Callable[[tarfile.TarInfo, bytes], tuple[str, bytes] | None]) -> Path:
        """A bundle with its members changed."""
        path = tmp_path / "changed"
        with tarfile.open(whole) as old, tarfile.open(path, "w") as new:
            for member in old:
                reader = old.extractfile(member)
                assert reader is not None
                changed = change(member, reader.read())
                if changed is not None:
                    member.name, content = changed
                    member.size = len(content)
                    new.addfile(member, io.BytesIO(content))
        return path

    def is_code(name: str) -> bool:
        return name.endswith(".cubin")

    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    flipped = written(lambda m, data: (m.name, data[:-1] + b"?" if is_code(m.name) else data))
    with pytest.raises(oxidiff.ArtifactError, match="cubin is damaged"):
        bundle.merge(flipped)
    monkeypatch.setattr(bundle, "_MAX_UNIT", 40)
    with pytest.raises(oxidiff.ArtifactError, match="more bytes"):
        bundle.merge(whole)
    monkeypatch.undo()
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    for name in ("cubins/../../out.cubin", "cubins/short.cubin", "../out", "/out"):
        foreign = written(lambda m, data, name=name: (name if is_code(m.name) else m.name, data))  # type: ignore[misc]
        with pytest.raises(oxidiff.ArtifactError, match="no such thing"):
            bundle.merge(foreign)
    for lost in ("end", f"cubins/{'1b' * 32}.plan"):
        cut = written(lambda m, data, lost=lost: None if m.name == lost else (m.name, data))  # type: ignore[misc]
        with pytest.raises(oxidiff.ArtifactError, match="cut or damaged"):
            bundle.merge(cut)
    data = whole.read_bytes()
    for end in range(0, data.index(b"end\0") + 512, 173):
        (tmp_path / "cut").write_bytes(data[:end])
        with pytest.raises(oxidiff.ArtifactError):
            bundle.merge(tmp_path / "cut")
    assert not (tmp_path / "elsewhere" / "cubins").exists(), "nothing of a file that is refused is added"
    assert bundle.merge(whole) == 2
    there = {path.name: path.read_bytes() for path in (tmp_path / "elsewhere" / "cubins").iterdir()}
    assert there == files


def refused(path: Path) -> str:
    """What a bundle is refused with; empty if it is not."""
    try:
        bundle.check(path)
    except oxidiff.ArtifactError as error:
        assert str(path) in str(error), "it names the file"
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"GNU.sparse.map": "1,2,x"}, True),
        ({"GNU.sparse.map": "0,1", "GNU.sparse.size": "5"}, True),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, True),
        ({"size": "9" * 30}, True),
        ({"size": "-1024"}, True),
        ({"size": "x"}, True),
        ({"path": "../out"}, True),
        ({"path": "tuning\0"}, True),
        # What says nothing of where something is, or how large, does no harm.
        ({"GNU.sparse.major": "x", "GNU.sparse.minor": "0"}, False),
        ({"mtime": "9" * 400}, False),
        ({"hdrcharset": "nonsense"}, False),
    ],
)
def test_a_bundle_with_made_up_headers_is_refused(headers: dict[str, str], is_refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (("tuning", _native.encode_artifact([("tuning", b"[]")])), ("end", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.pax_headers = headers if name == "tuning" else {}
            tar.addfile(member, io.BytesIO(content))
    assert bool(refused(path)) == is_refused


@torch.no_grad()
def test_mutated_bundles_are_refused(net: nn.Module, tmp_path: Path) -> None:
    """The headers above all, which no checksum of the cache's covers: mutated with and without one of their own."""
    oxidiff.compile(net, tune="off")(image())
    _native.TuningDatabase(str(bundle.database_path())).add([ROW])
    whole, path = tmp_path / "whole.tar", tmp_path / "all.tar"
    bundle.export(whole)
    assert not refused(whole)
    data = whole.read_bytes()
    with tarfile.open(whole) as tar:
        places = [member.offset for member in tar]
    source, count, until = random.Random(7), 0, time.monotonic() + 4
    for _ in range(3000):
        if time.monotonic() > until:
            break
        fresh = bytearray(data)
        if source.random() < 0.2:
            fresh = bytearray(mutated(data, source))
        else:
            at = source.choice(places)
            for _ in range(source.randint(1, 3)):
                first = source.choice([0, 100, 124, 124, 136, 156, 156, 157, 257, 345])
                some = source.choice(
                    [b"\xff" * 12, b"\x80" + bytes(11), b"7" * 11, b"-1", b"x", b"L", b"S", b"g", b"\0"]
                )
                fresh[at + first : at + first + len(some)] = some
            if source.random() < 0.9:
                fresh[at + 148 : at + 156] = b" " * 8
                fresh[at + 148 : at + 156] = b"%06o\0 " % sum(fresh[at : at + 512])
        path.write_bytes(fresh)
        count += bool(refused(path))
    assert count > 50


def test_an_export_holds_one_file_in_memory(tmp_path: Path) -> None:
    """More than an artifact may have in all."""
    folder = bundle.database_path().parent / "cubins"
    folder.mkdir(parents=True)
    each, count = 48 << 20, 6
    content = kept_file(bytes(each))
    for i in range(count):
        (folder / f"{i:064x}.cubin").write_bytes(content)
    del content
    tracemalloc.start()
    try:
        assert bundle.export(tmp_path / "all") == count
        bundle.check(tmp_path / "all")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "all").stat().st_size > count * each > 1 << 28
    assert peak < 3 * each


@torch.no_grad()
def test_inspect(net: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled: Any = oxidiff.compile(net, strict=True)
    compiled(image())
    compiled.save_graph(tmp_path / "net.oxi")
    assert main(["inspect", str(tmp_path / "net.oxi"), "--program"]) == 0
    shown = capsys.readouterr().out
    assert "x: float32[b, 3, h, w]" in shown and "convolution(" in shown and torch.__version__ in shown
    assert main(["inspect", str(tmp_path / "missing")]) == 1
    assert "no file" in capsys.readouterr().err


def test_pieces_that_dynamo_finds_are_stored_too() -> None:
    code = """
        import torch, oxidiff
        from oxidiff.backend import oxidiff as backend
        from oxidiff.engine import Engine
        captures, remember = [], Engine._variant
        def count(self, *args):
            variant = remember(self, *args)
            captures.append(self.captures)
            return variant
        Engine._variant = count
        class Broken(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)
            def forward(self, x):
                y = self.linear(x)
                torch._dynamo.graph_break()
                return self.linear(y) + 1
        with torch.no_grad():
            torch.compile(Broken().eval(), backend=backend)(torch.randn(2, 8))
        print(captures)
    """
    assert python(code, PYTHONHASHSEED="1").strip() == "[1, 1]"
    assert python(code, PYTHONHASHSEED="2").strip() == "[0, 0]"


SIZES = """
    import fcntl, os, time, oxidiff
    compiled = oxidiff.compile(net.eval(), strict=True)
    with torch.no_grad():
        compiled(x)
        with open(os.path.join(os.environ["OXIDIFF_CACHE_DIR"], "graphs", ".oxidiff-lock"), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = time.monotonic()
            for width in range(25, 31):
                compiled(torch.randn(1, 64, 24, width))
            print(time.monotonic() - started < 2)
"""


@torch.no_grad()
def test_an_interrupt_while_a_graph_is_read_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Any, Any]:
        module = AsksPositions()
        module.positions(3)
        compiled: Any = oxidiff.compile(module, strict=True)
        return module, compiled

    x = torch.ones(2, 5, 3)
    module, compiled = run()
    compiled(x)
    del module, compiled
    gc.collect()
    module, compiled = run()
    read = cache.read_artifact

    def interrupted(path: Any) -> Any:
        monkeypatch.setattr(cache, "read_artifact", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "read_artifact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled(x)
    torch.testing.assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 0


def test_a_file_that_goes_while_a_folder_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FOLDER_BYTES", 1000)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.oxi").write_bytes(bytes(900))
    (tmp_path / "0.oxi").symlink_to(tmp_path / "nowhere")
    cache.tidy(str(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.glob("[abc].oxi")) <= 1000


def test_sizes_at_which_nothing_is_learned_are_not_written() -> None:
    """Each of them would wait for whoever keeps the lock, and a server sees thousands."""
    assert python(TUNED, "known", then=SIZES).splitlines() == ["True"]
