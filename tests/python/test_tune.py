"""The tuner: what it measures is right and remembered, it keeps to its budget, and nothing stops it from stopping."""

from __future__ import annotations

import gc
import io
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from files import python
from nets import assert_close
from oxidiff import _native, testing, tune
from oxidiff.__main__ import main
from oxidiff.module import dispatcher_of
from oxidiff.store import bundle, cache, graphs_folder, read_artifact


@pytest.fixture(autouse=True)
def _no_choices() -> Iterator[None]:
    _native.forget_choices()
    tune._held.clear()
    yield
    _native.forget_choices()
    tune._held.clear()


def net(channels: int = 64, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    convs = [nn.Conv2d(channels + 8 * i, channels + 8 * i + 8, 3, padding=1) for i in range(layers)]
    return nn.Sequential(*convs).eval().requires_grad_(False)


def compiled_of(module: nn.Module, **options: Any) -> Any:
    return oxidiff.compile(module, strict=True, **options)


X = torch.randn(1, 64, 24, 24, generator=torch.Generator().manual_seed(1))


def test_choices_are_measured_remembered_and_right() -> None:
    module = net()
    compiled = compiled_of(module)
    assert_close(compiled(X), module(X))
    rows = bundle.entries()
    assert len(rows) == 2 and oxidiff.report(compiled).tune_s > 0
    for op, bucket, device, library, choice, seconds, default_seconds, workspace, measured_at in rows:
        assert "channels" in op and "side 16" in bucket and library == _native.kernel_version
        assert f"{torch.get_num_threads()} threads" in device
        assert choice.split()[0] in ("direct", "winograd2", "winograd4")
        assert 0 < seconds <= default_seconds < 1 and workspace > 0
        assert abs(measured_at - time.time()) < 3600
    # Another process of the same machine reads them: here, the same process without what it knows.
    _native.forget_choices()
    again = compiled_of(net(), tune="cached")
    again(X)
    (site, *_) = _native.tuning_sites(
        dispatcher_of(again).engines()[0].variants[0].program, [1, 24, 24][: _symbols(again)]
    )
    assert site.installed is not None


def _symbols(compiled: Any) -> int:
    return len(dispatcher_of(compiled).engines()[0].variants[0].lowered.symbols)


@pytest.mark.parametrize("mode", ["off", "cached"])
def test_modes_that_measure_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(tune, "_measure", never)
    compiled = compiled_of(net(), tune=mode)
    compiled(X)
    assert bundle.entries() == []


def test_known_choices_of_other_machines_are_not_taken() -> None:
    compiled_of(net())(X)
    rows = bundle.entries()
    bundle.clear()  # the graph too, which has them as well
    database = _native.TuningDatabase(str(bundle.database_path()))
    database.add([(*row[:2], "another processor", *row[3:]) for row in rows])
    database.add([(*row[:3], "0.0.0", *row[4:]) for row in rows])
    _native.forget_choices()
    compiled = compiled_of(net(), tune="cached")
    compiled(X)
    variant = dispatcher_of(compiled).engines()[0].variants[0]
    assert all(
        site.installed is None for site in _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled)])
    )


def test_generations_that_a_virtual_machine_calls_alike_are_two_devices() -> None:
    lines = (
        "processor\t: 0\ncpu family\t: {}\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\ncpu family\t: 6\n"
    )
    older, newer = (tune.processor_of(lines.format(family)) for family in (25, 26))
    assert (older, newer) == ("AMD EPYC (family 25 model 17)", "AMD EPYC (family 26 model 17)")
    assert tune.device_name().startswith(tune._processor())
    assert tune.processor_of("processor\t: 0\nBogoMIPS\t: 50.00\n") == "", "other architectures say other things"
    assert tune.processor_of("model name\t: Some CPU\n") == "Some CPU"


def test_a_choice_decides_and_stays_right() -> None:
    module = net()
    results = {}
    for choice in ("direct direct", "winograd2 winograd2", "winograd4 winograd4"):
        compiled = compiled_of(net(), tune="off", cache=False)
        compiled(X)
        variant = dispatcher_of(compiled).engines()[0].variants[0]
        for site in _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled)]):
            assert site.install(choice)
        variant.program.forget_sizes()
        results[choice] = compiled(X)
        assert_close(results[choice], module(X))
    distinct = {tuple(result.flatten()[:64].tolist()) for result in results.values()}
    assert len(distinct) == 3, "each form rounds in its own way"


def test_a_slow_winner_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {0: [(1.0, 0.1)] * 3, 1: [(0.97, 0.1)] * 3, 2: [(0.5, 2.0)] * 3}
    assert tune._fastest(times, 0, 0.0) == 2
    assert tune._fastest(times, 0, 1.0) == 0, "where packing counts, the third form is slower"
    assert tune._fastest({0: times[0], 1: times[1]}, 0, 0.0) == 0, "three per cent are not clear"
    noisy = {0: [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)], 1: [(0.5, 0.0), (1.2, 0.0), (1.1, 0.0)]}
    assert tune._fastest(noisy, 0, 0.0) == 0, "one lucky turn is not enough"
    assert tune._fastest(times, 7, 0.0) == 7, "without the default's time nothing is compared"


@pytest.mark.parametrize("is_notebook", [False, True])
@pytest.mark.parametrize("is_closed", [False, True])
def test_without_a_stderr(is_closed: bool, is_notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_closed else None)
    compiled = compiled_of(net())
    compiled(X)
    oxidiff.warmup(compiled, X, shapes=[tuple(X.shape)])
    assert bundle.entries()


def test_a_process_that_ends_tunes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "is_ending", lambda: True)
    compiled_of(net(), tune="full")(X)
    assert bundle.entries() == []


def test_an_empty_database_is_one_that_is_begun() -> None:
    bundle.database_path().parent.mkdir(parents=True, exist_ok=True)
    bundle.database_path().touch()
    assert bundle.entries() == []


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = _native.TuningSite.measure

    def slow(site: Any, turns: int, deadline: float) -> Any:
        while time.perf_counter() < min(deadline, started + 60):
            measure(site, 0)
        return None

    monkeypatch.setattr(tune, "_measure", slow)
    started = time.perf_counter()
    compiled = compiled_of(net(layers=6), tune_budget_s=0.5)
    compiled(X)
    assert oxidiff.report(compiled).tune_s == pytest.approx(0.5, rel=0.3)
    # Of one program, whatever the sizes.
    compiled(X.repeat(1, 1, 3, 3))
    assert oxidiff.report(compiled).tune_s < 0.8


class Staged(nn.Module):
    """Two programs, with an op between them that runs eager."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(layers=3), nn.Conv2d(88, 96, 3, padding=1).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.fft.fftn(self.first(x), dim=(-2, -1)).real)


class Split(Staged):
    """Two pieces, with Python between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if float(x.sum()) > -1e9 else x


@pytest.mark.parametrize("kind", [Staged, Split, "pipeline"])
def test_all_parts_share_the_budget(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = _native.TuningSite.measure
    measured: list[str] = []

    def slow(site: Any, turns: int, deadline: float) -> Any:
        measured.append(site.op)
        while time.perf_counter() < min(deadline, started + 60):
            measure(site, 0)
        return None

    monkeypatch.setattr(tune, "_measure", slow)
    started, options = time.perf_counter(), {"tune": "full", "tune_budget_s": 0.5, "cache": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        if kind == "pipeline":
            pipe = types.SimpleNamespace(unet=net(layers=3), vae=net(channels=80))
            oxidiff.compile_pipe(pipe, parts=["unet", "vae"], **options)  # type: ignore[arg-type]
            pipe.unet(X)
            pipe.vae(torch.randn(1, 80, 24, 24))
            compiled = [pipe.unet, pipe.vae]
        else:
            compiled = [oxidiff.compile(kind(), **options)]
            with torch.no_grad():
                compiled[0](X)
    took = sum(oxidiff.report(part).tune_s for part in compiled)
    parts = [
        engine for one in compiled for d in (dispatcher_of(one), *dispatcher_of(one).pieces()) for engine in d.engines()
    ]
    assert sum(len(engine.variants) for engine in parts) == 2, "there are two programs"
    # Looking at what can be tuned takes a little, also where no time is left.
    assert 0.4 < took < 0.75 and len(measured) == 1, (took, measured)


def test_an_interruption_keeps_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune._measure
    seen: list[str] = []

    def interrupted(site: Any, turns: int, deadline: float) -> Any:
        seen.append(site.op)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(site, turns, deadline)

    monkeypatch.setattr(tune, "_measure", interrupted)
    module = net(layers=4)
    compiled = compiled_of(module)
    with pytest.raises(KeyboardInterrupt):
        compiled(X)
    assert len(bundle.entries()) == 2
    assert_close(compiled(X), module(X))
    assert len(bundle.entries()) == 4, "the next call goes on where it stopped"


def test_equal_convolutions_are_tuned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune._measure
    seen: list[tuple[str, str]] = []

    def counted(site: Any, turns: int, deadline: float) -> Any:
        seen.append((site.op, site.bucket))
        return real(site, turns, deadline)

    monkeypatch.setattr(tune, "_measure", counted)
    module = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(5)]).eval()
    compiled = compiled_of(module)
    with torch.no_grad():
        compiled(X)
        compiled(X[:, :, :22])
        compiled_of(nn.Sequential(*module, nn.SiLU()))(X)
    assert len(seen) == 1


def test_a_loaded_program_is_tuned_no_further_but_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_of(net(), tune="off", cache=False)
    compiled(X)
    compiled.save_graph(tmp_path / "net.oxi")
    del compiled
    seen: list[str] = []
    monkeypatch.setattr(tune, "_measure", lambda site, turns, deadline: seen.append(site.op))
    for mode, count in (("quick", 0), ("full", 2)):
        loaded = compiled_of(net(), tune=mode)
        loaded.load_graph(tmp_path / "net.oxi")
        loaded(X)
        assert len(seen) == count, mode
        del loaded


def test_a_program_of_the_cache_is_tuned_where_none_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune._measure
    seen: list[str] = []

    def counted(site: Any, turns: int, deadline: float) -> Any:
        seen.append(site.bucket)
        return real(site, turns, deadline)

    def start(x: Any, **options: Any) -> Any:
        """As in a new process, without the database: what an artifact says is enough."""
        _native.forget_choices()
        tune._held.clear()
        bundle.database_path().unlink(missing_ok=True)
        seen.clear()
        compiled = compiled_of(net(), **options)
        compiled(x)
        return compiled

    monkeypatch.setattr(tune, "_measure", counted)
    larger = X.repeat(1, 1, 3, 3)
    start(X, tune="off")
    assert oxidiff.report(start(X)).captures == 0 and len(seen) == 2, "a program that was never tuned"
    start(X)
    assert seen == [], "one that was"
    start(larger)
    assert len(seen) == 2, "at a size that is new to it"
    start(larger)
    assert seen == []
    (path,) = Path(str(graphs_folder())).glob("*.oxi")
    artifact = read_artifact(path)
    assert len(artifact.tuned) == 2 and len(artifact.rows) == 4
    rows, artifact.rows = artifact.rows, []
    path.write_bytes(artifact.to_bytes())
    start(X)
    assert seen == [], "where nothing was worth a trial there is nothing to do either"
    artifact.rows = rows
    # Another machine finds the graph, and measures for itself.
    artifact.tuned = [(program, "another processor", *rest) for program, _, *rest in artifact.tuned]
    artifact.rows = [(*row[:2], "another processor", *row[3:]) for row in artifact.rows]
    path.write_bytes(artifact.to_bytes())
    start(X)
    assert len(seen) == 2


def test_a_convolution_counts_once_per_step() -> None:
    """Whatever its form, and whether its panels are kept: its share of a call decides what is measured."""
    module = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(5)], nn.Conv2d(64, 72, 3, padding=1)).eval()
    for choice in ("direct direct", "winograd4 winograd4", "direct winograd2"):
        for memory in ("low", "balanced", "fast"):
            compiled = compiled_of(module, tune="off", cache=False, memory=memory)
            with torch.no_grad():
                compiled(X)
            (variant,) = dispatcher_of(compiled).engines()[0].variants
            sizes = [1, 24, 24][: _symbols(compiled)]
            for _ in range(2):
                sites = _native.tuning_sites(variant.program, sizes)
                assert sorted(site.count for site in sites) == [1, 5], (choice, memory)
                assert all(site.install(choice) for site in sites)
                variant.program.forget_sizes()
    exact = compiled_of(module, tune="off", cache=False, precision="eager")
    with torch.no_grad():
        exact(X)
    (variant,) = dispatcher_of(exact).engines()[0].variants
    assert _native.tuning_sites(variant.program, sizes) == [], "one form rounds as eager does"


def test_choices_show_in_explain() -> None:
    compiled = compiled_of(net())
    compiled(X)
    (variant,) = oxidiff.explain(compiled).variants
    assert len(variant["choices"]) == 2 and "untuned" in variant["choices"][0]
    assert "choices, measured:" in str(oxidiff.explain(compiled))


def test_trials_stay_in_the_workspace_of_a_run() -> None:
    compiled = compiled_of(net(channels=64, layers=1), tune="off")
    compiled(X)
    before = oxidiff.report(compiled).arena_bytes
    variant = dispatcher_of(compiled).engines()[0].variants[0]
    for site in _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled)]):
        for candidate in site.candidates():
            trial = site.measure(candidate)
            assert trial is not None and trial[2] <= max(before, 16 << 20)
        assert site.measure(9) is None
    assert oxidiff.report(compiled).arena_bytes == before


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"x" * 4096])
def test_a_damaged_database_is_a_warning(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_warned", set())
    path: Path = bundle.database_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    module = net()
    compiled = compiled_of(module)
    with pytest.warns(oxidiff.CacheWarning):
        assert_close(compiled(X), module(X))
    assert len(bundle.entries()) == 2, "it was begun anew"


def test_the_command_fills_the_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "sd15-vae-decoder", "--tiny", "--budget", "2"]) == 0
    assert "choices measured" in capsys.readouterr().out


@pytest.mark.parametrize("measured", [0, 2])
def test_an_interrupted_command_says_what_it_kept(
    measured: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tune._measure
    seen: list[str] = []

    def interrupted(site: Any, turns: int, deadline: float) -> Any:
        if len(seen) == measured:
            raise KeyboardInterrupt
        found = real(site, turns, deadline)
        if found is not None:
            seen.append(site.op)
        return found

    monkeypatch.setattr(tune, "_measure", interrupted)
    monkeypatch.setattr(testing, "build", lambda *_, **__: net(layers=4))
    monkeypatch.setattr(testing, "example_inputs", lambda *_, **__: {"input": X})
    assert main(["tune", "sd15-vae-decoder", "--tiny", "--budget", "60"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"oxidiff: interrupted: {measured} choices measured until then are kept in {bundle.database_path()}\n"
    assert len(bundle.entries()) == measured


def test_other_commands_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "list_cache", interrupted)
    assert main(["cache", "ls"]) == 130
    assert capsys.readouterr().err == "oxidiff: interrupted\n"


def test_a_new_size_leaves_the_others_ready() -> None:
    compiled = compiled_of(net())
    compiled(X)
    compiled(X.repeat(1, 1, 3, 3))
    assert len(bundle.entries()) == 4, "both sizes were tuned: they are of two buckets"
    assert len(oxidiff.report(compiled).sizes) == 2


def test_choices_are_looked_for_once_per_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _native.tuning_sites
    seen: list[tuple[int, ...]] = []

    def counted(program: Any, sizes: Any, weights: Any) -> Any:
        seen.append(tuple(sizes))
        return real(program, sizes, weights)

    monkeypatch.setattr(_native, "tuning_sites", counted)
    first, second = compiled_of(net()), compiled_of(net())
    for compiled in (first, second):
        compiled(X)
        compiled(X[:, :, :22])
    assert len(seen) == len(set(seen)) == 2
    assert oxidiff.report(second).programs == 0


class Site:
    """A site whose forms take given seconds, without taking any."""

    def __init__(self, *seconds: float, name: str = "a", count: int = 1, flops: float = 1e9) -> None:
        self.seconds = seconds
        self.op, self.bucket = f"convolution {name} groups 1", "rows"
        self.count, self.flops, self.kept = count, flops, count
        expected = [flops, *[1.1 * flops] * (len(seconds) - 1)]
        self.expected = (expected, expected)
        self.chosen, self.installed = (0, 0), None
        self.trials: list[int] = []

    def candidates(self) -> list[int]:
        return list(range(len(self.seconds)))

    def measure(self, candidate: int) -> tuple[float, float, int]:
        self.trials.append(candidate)
        return self.seconds[candidate], 0.0, 8

    def name(self, packed: int, per_call: int) -> str:
        return f"{packed} {per_call}"

    def install(self, choice: str) -> bool:
        return True


def test_hopeless_forms_are_given_up_early() -> None:
    for seconds, trials in (
        ((1.0, 1.6, 9.0), 4),  # clear after the turn that warms up
        ((1.0, 1.4, 9.0), 5),  # and after the first that counts
        ((1.0, 1.2, 9.0), 3 + 2 * 3),  # close, and so timed to the end
        ((1.0, 0.5, 0.72), 3 + 3 + 2 * 2),  # the default stays beside its rival
    ):
        site: Any = Site(*seconds)
        measured = tune._measure(site, 3, time.perf_counter() + 60)
        assert measured is not None and measured[4] == len(site.trials) == trials, seconds
        assert measured[0] == ("1 1" if seconds[1] < 0.9 else "0 0")


def test_a_wrong_form_is_never_chosen() -> None:
    class Wrong(Site):
        def measure(self, candidate: int) -> Any:
            trial = super().measure(candidate)
            return None if candidate == 1 else trial

    site: Any = Wrong(1.0, 0.1, 0.5)
    measured = tune._measure(site, 3, time.perf_counter() + 60)
    assert measured is not None and measured[0] == "2 2", "the fastest one gave other numbers than the direct form"
    assert site.trials.count(1) == 1
    site = Wrong(1.0, 0.1, 2.0)
    measured = tune._measure(site, 3, time.perf_counter() + 60)
    assert measured is not None and measured[0] == "0 0"


def test_trials_before_the_first_run_use_what_runs_will_keep() -> None:
    """The weight of a deep convolution is larger than the arena of a small image. What linear layers keep has room for it,
    and for 12 MiB of its panels, which are packed at a time where a thread's L2 has 2 MiB."""
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1024, 1024, 3, padding=1)
            self.linears = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linears(self.conv(x).flatten(1)[:, :2048])

    def candidates(compiled: Any) -> list[int]:
        (variant,) = dispatcher_of(compiled).engines()[0].variants
        (site,) = _native.tuning_sites(variant.program, [4, 8, 8][: _symbols(compiled)])
        trials = [site.measure(candidate) for candidate in site.candidates()]
        kept = variant.program.memory([4, 8, 8][: _symbols(compiled)])["derived_bytes"]
        assert all(trial is not None and trial[2] <= kept for trial in trials)
        return [candidate for candidate, _ in enumerate(trials)]

    x = torch.randn(4, 1024, 8, 8)
    for memory, count in (("fast", 3), ("low", 0)):
        compiled = compiled_of(Deep().eval(), tune="off", cache=False, memory=memory)
        with torch.no_grad():
            compiled.warmup(x)
            assert len(candidates(compiled)) == count, memory
            compiled(x)
            assert candidates(compiled) == [], "now they are kept: a trial would be on top"


def test_what_promises_most_comes_first() -> None:
    def site(name: str, count: int, *expected: float) -> Any:
        made = Site(*expected, name=name, count=count, flops=1.0)
        made.expected = (list(expected), list(expected))
        return made

    tuner = tune.Tuner(oxidiff.CompileOptions(tune="full"))
    sites = [
        site("dear, but its rivals are far behind", 90, 1.0, 2.0, 2.0),
        site("half as dear", 4, 1.0, 1.1, 2.0),
        site("dear, and its rivals are close", 8, 1.0, 1.1, 2.0),
        site("as dear, closer", 8, 1.0, 1.0, 2.0),
        site("as far behind, less dear", 2, 1.0, 2.0, 2.0),
    ]
    assert [sites.index(found) for found in tuner._worth(sites)] == [3, 2, 1, 0, 4]
    # Where every call packs the weight, the direct form costs that too, and its rivals, which pack nothing, promise more.
    for packing in (sites[4], sites[0]):
        packing.kept = 0
        packing.expected = ([1.0, 2.0, 2.0], [4.0, 2.0, 2.0])
    assert [sites.index(found) for found in tuner._worth(sites)] == [0, 4, 3, 2, 1]
    assert (tune._share(sites[0]), tune._promise(sites[0])) == (90 * 4.0, pytest.approx(90 * (4 - 2 / 1.5)))
    sites[0].kept, sites[0].chosen = 30, (0, 1)
    assert tune._share(sites[0]) == 30 * 1.0 + 60 * 2.0, "some steps of a site read kept panels, others do not"


def test_what_runs_do_is_what_is_told_of_them() -> None:
    """The direct form, packed by every call, takes 1.7 s; its rival, which packs nothing, 1.55 s."""

    class Packing(Site):
        def measure(self, candidate: int) -> tuple[float, float, int]:
            super().measure(candidate)
            return self.seconds[candidate], 0.7 if candidate == 0 else 0.0, 8

    for kept, before, now in ((4, 1.0, 1.0), (0, 1.7, 1.55), (1, (1.0 + 3 * 1.7) / 4, (1.0 + 3 * 1.55) / 4)):
        site: Any = Packing(1.0, 1.55, 9.0, count=4)
        site.kept = kept
        measured = tune._measure(site, 3, time.perf_counter() + 60)
        assert measured is not None and measured[0] == "0 1", "what is slower than kept panels is not given up for that"
        assert measured[1:3] == pytest.approx((now, before)), kept


def test_what_is_kept_is_known() -> None:
    torch.manual_seed(0)
    deep = nn.Conv2d(512, 512, 3, padding=1).eval().requires_grad_(False)
    x = torch.randn(1, 512, 8, 8)
    for memory, kept in (("fast", 1), ("low", 0)):
        compiled = compiled_of(deep, tune="off", cache=False, memory=memory)
        compiled(x)
        (variant,) = dispatcher_of(compiled).engines()[0].variants
        (site,) = _native.tuning_sites(variant.program, [1, 8, 8][: _symbols(compiled)])
        site.install("direct direct")
        variant.program.forget_sizes()
        (site,) = _native.tuning_sites(variant.program, [1, 8, 8][: _symbols(compiled)])
        assert (site.kept, site.count) == (kept, 1), memory
        packed, per_call = site.expected
        assert per_call[0] > 1.2 * packed[0] and per_call[1:] == packed[1:], "only the direct form packs"


class Clock:
    """A clock that only trials move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("off_by", [0.3, 1.0, 3.0])
def test_the_budget_is_kept_within_a_tenth(mode: str, off_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pace that the tuner expected at first was off by."""
    clock = Clock()
    monkeypatch.setattr(tune, "time", clock)
    monkeypatch.setattr(tune, "_held", {})
    monkeypatch.setattr(tune, "this_device", lambda: types.SimpleNamespace(f32_flops=2e11))

    class Slow(Site):
        def measure(self, candidate: int) -> tuple[float, float, int]:
            seconds = self.seconds[candidate] * (1.0 if candidate in self.trials else 2.0)
            clock.now += seconds
            return super().measure(candidate)

    for budget in (2.0, 10.0, 20.0):
        clock.now = 0.0
        tune._held.clear()
        # Trials of 50 to 80 ms, as of the convolutions of a UNet: together more than there is time for.
        times = [0.05 + 0.01 * (i % 4) for i in range(60)]
        sites: list[Any] = [
            Slow(t, 0.95 * t, 1.2 * t, name=str(i), count=16, flops=1e11 * t / off_by) for i, t in enumerate(times)
        ]
        tuner = tune.Tuner(oxidiff.CompileOptions(tune=mode, cache=False))
        tuner._measure_all(sites, clock.now, ("device", "library"), "net", tune.Budget(budget))
        assert 0.9 * budget <= clock.now <= 1.1 * budget, budget


def test_a_trial_longer_than_the_budget_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "this_device", lambda: types.SimpleNamespace(f32_flops=2e11))
    assert measured_sites([Site(1.0, 0.5, flops=3e11)], "full", tune_budget_s=2.0) == []
    assert len(measured_sites([Site(1.0, 0.5, flops=0.9e11)], "full", tune_budget_s=2.0)) == 1


def measured_sites(sites: list[Any], mode: str = "quick", **fields: Any) -> list[Any]:
    options = oxidiff.CompileOptions(tune=mode, cache=False, **fields)
    budget = tune.Budget(options.tune_budget_s)
    tune.Tuner(options)._measure_all(sites, time.perf_counter(), ("device", "library"), "net", budget)
    return [site for site in sites if site.trials]


def test_quick_tuning_stops_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_held", {})
    slow = 1e13  # beyond what may be tried for nothing

    def sites(*seconds: float) -> list[Any]:
        return [Site(*seconds, name=str(count), count=count, flops=slow / count) for count in (16, 8, 4, 2, 1)]

    monkeypatch.setattr(tune._Pace, "expect", lambda self, flops: flops / 1e12)
    none = measured_sites(sites(1.0, 2.0, 2.0), tune_budget_s=60.0)
    assert [site.count for site in none] == [16, 8, 4], "nothing was gained: a rare site is not worth its trials"
    tune._held.clear()
    some = measured_sites(sites(1.0, 0.9, 2.0), tune_budget_s=60.0)
    assert [site.count for site in some] == [16, 8, 4, 2], "a tenth was gained each time"
    tune._held.clear()
    much = measured_sites(sites(1.0, 0.5, 2.0), tune_budget_s=60.0)
    assert len(much) == 5, "much was gained: as much is expected of the others"
    tune._held.clear()
    assert len(measured_sites(sites(1.0, 2.0, 2.0), "full", tune_budget_s=60.0)) == 5
    tune._held.clear()
    monkeypatch.setattr(tune._Pace, "expect", lambda self, flops: 1e-3)
    assert len(measured_sites(sites(1.0, 2.0, 2.0))) == 5, "what costs nothing is always measured"


def test_what_was_learned_before_decides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune._Pace, "expect", lambda self, flops: flops / 1e12)
    sites: list[Any] = [Site(1.0, 2.0, name=str(i), count=3, flops=1e13) for i in range(9)]
    key, row = ("device", "library"), ("0 0", 1.0, 1.0, 8, 1)
    monkeypatch.setattr(tune, "_held", {tune._key(s, key): (*tune._key(s, key), *row) for s in sites[:8]})
    for site in sites[:8]:
        site.installed = "0 0"
    assert measured_sites(sites, tune_budget_s=60.0) == [], "eight of nine gained nothing"


def test_the_budget_is_kept_by_real_trials() -> None:
    x = torch.randn(1, 64, 48, 48)
    full = compiled_of(net(channels=64, layers=10), tune="full", tune_budget_s=60.0, cache=False)
    full(x)
    needed = oxidiff.report(full).tune_s
    _native.forget_choices()
    options: dict[str, Any] = {"tune": "full", "cache": False, "max_specializations": 3}
    compiled = compiled_of(net(channels=64, layers=10), tune_budget_s=needed / 3, **options)
    compiled(x)
    # Trials are started only if they should end in time; another process may hold one up.
    assert 0 < oxidiff.report(compiled).tune_s < needed / 2


def test_a_bar_shows_what_is_tuned_and_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Bar:
        def __init__(self, **fields: Any) -> None:
            shown.append(f"{fields['desc']} {fields['total']}")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            shown.append("closed")

        def set_postfix_str(self, text: str) -> None:
            shown.append(text)

        def update(self) -> None:
            shown.append("+")

    monkeypatch.setattr(tune, "_held", {})
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # an earlier test may have run a notebook
    monkeypatch.setattr(tune.importlib, "import_module", lambda name: types.SimpleNamespace(tqdm=Bar))
    for is_terminal in (False, True):
        tune._held.clear()
        monkeypatch.setattr(tune.sys.stderr, "isatty", lambda seen=is_terminal: seen, raising=False)
        measured_sites([Site(1.0, 0.5, name="a"), Site(1.0, 2.0, name="b")])
    steps = ["convolution a, rows", "+", "convolution b, rows, 50% gained", "+"]
    assert shown == ["tuning net 2", *steps, "closed"], "once: no bar where nobody looks"


class DeviceSite:
    """A choice on a GPU: two ways of a library and the generated kernels, of which the second does not work."""

    op, bucket, count, kept = "product f16 [64, 64] x [64, 64] 0123", "these sizes", 3, 3
    expected = ([1e6, 1e6, 1e6], [1e6, 1e6, 1e6])
    key = ("a GPU, driver for CUDA 13.0", "cuBLASLt 13.1, cuDNN 91900, oxidiff 0.1.0")

    def __init__(self) -> None:
        self.installed: str | None = None
        self.trials: list[int] = []

    @property
    def chosen(self) -> tuple[int, int]:
        way = ["library 0", "library 1", "kernel"].index(self.installed or "library 0")
        return way, way

    def candidates(self) -> list[int]:
        return [0, 1, 2]

    def ready(self, seconds: float) -> tuple[list[int], bool]:
        return [0, 1, 2], True

    def measure(self, candidate: int) -> tuple[float, float, int] | None:
        self.trials.append(candidate)
        return None if candidate == 1 else ((3e-3, 0.0, 64) if candidate == 0 else (1e-3, 0.0, 64))

    def name(self, packed: int, per_call: int) -> str:
        return ["library 0", "library 1", "kernel"][packed]

    def install(self, choice: str) -> bool:
        self.installed = choice
        return True


def test_choices_on_a_device_are_measured_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Any] = []
    program = types.SimpleNamespace(hash="a program", forget_size=forgotten.append)
    monkeypatch.setattr(_native, "DeviceSite", DeviceSite)

    def tuned(mode: str = "quick", **fields: Any) -> tuple[DeviceSite, tune.Tuner]:
        tune._held.clear()
        site = DeviceSite()
        monkeypatch.setattr(_native, "device_sites", lambda program, sizes: [site], raising=True)
        options = oxidiff.CompileOptions(tune=mode, **fields)
        tuner = tune.Tuner(options, is_on_device=True)
        tuner.tune(program, [2, 64], "a test", tune.Budget(options.tune_budget_s))  # type: ignore[arg-type]
        return site, tuner

    site, tuner = tuned()
    assert (site.installed, forgotten, tuner.has_news) == ("kernel", [[2, 64]], True)
    assert site.trials.count(1) == 1, "a way that does not work is not tried again"
    (row,) = bundle.entries()
    assert row[:5] == (DeviceSite.op, DeviceSite.bucket, *DeviceSite.key, "kernel")
    assert row[5:8] == pytest.approx((1e-3, 3e-3, 64))
    assert "1 choices for a GPU, driver for CUDA 13.0, cuBLASLt 13.1" in bundle.list_cache()
    # The next process knows it; with another driver or library nothing is known.
    site, _ = tuned("cached")
    assert (site.installed, site.trials) == ("kernel", [])
    monkeypatch.setattr(DeviceSite, "key", ("a GPU, driver for CUDA 13.1", DeviceSite.key[1]))
    assert tuned("cached")[0].installed is None
    assert tuned("off")[0].installed is None
    assert tuned(tune_budget_s=0.1)[0].trials == [], "no trial is begun that is not expected to end in time"


class SlowSite(DeviceSite):
    """Five ways of a library whose plans take 1.5 s each to build, two at a time, and trials of 0.1 s."""

    clock: Clock
    seconds = (3e-3, 2.9e-3, 1e-3, 2.5e-3, 2e-3)
    expected = ([1e6] * 5, [1e6] * 5)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, self.built = f"convolution {name}", {0}

    @property
    def chosen(self) -> tuple[int, int]:
        way = int((self.installed or "library 0")[-1])
        return way, way

    def candidates(self) -> list[int]:
        return [0, 1, 2, 3, 4]

    def ready(self, seconds: float) -> tuple[list[int], bool]:
        until = self.clock.now + seconds
        for pair in ((1, 2), (3, 4)):
            if not self.built.issuperset(pair) and self.clock.now + 1.5 <= until:
                self.clock.now += 1.5
                self.built.update(pair)
        return sorted(self.built), len(self.built) == 5

    def measure(self, candidate: int) -> tuple[float, float, int]:
        assert candidate in self.built, "a trial would build it"
        self.trials.append(candidate)
        self.clock.now += 0.1
        return self.seconds[candidate], 0.0, 64

    def name(self, packed: int, per_call: int) -> str:
        return f"library {packed}"


def test_a_budget_that_breaks_off_on_a_gpu_leaves_what_was_learned_and_is_spent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SlowSite.clock = Clock()
    monkeypatch.setattr(tune, "time", clock)
    monkeypatch.setattr(_native, "DeviceSite", DeviceSite)
    program = types.SimpleNamespace(hash="a program", forget_size=lambda sizes: None)
    known: dict[str, str] = {}

    def process(budget: float, tuned: dict[Any, None]) -> tuple[list[SlowSite], tune.Tuner]:
        """One that knows what those before it have installed and were done with."""
        tune._held.clear()
        clock.now = 0.0
        sites = [SlowSite(name) for name in "abcdef"]
        for site in sites:
            site.installed = known.get(site.op)
        monkeypatch.setattr(_native, "device_sites", lambda program, sizes: sites, raising=True)
        tuner = tune.Tuner(oxidiff.CompileOptions(cache=False), is_on_device=True)
        tuner.tuned = tuned
        tuner.tune(program, [2, 64], "a test", tune.Budget(budget))  # type: ignore[arg-type]
        assert clock.now <= 1.1 * budget
        known.update({site.op: site.installed for site in sites if site.installed is not None})
        return sites, tuner

    tuned: dict[Any, None] = {}
    with monkeypatch.context() as ending:
        ending.setattr(tune, "is_ending", lambda: True)
        assert not process(10.0, tuned)[1].has_news and not tuned, "a process that ends has not spent it"
    assert not process(0.0, tuned)[1].has_news and not tuned, "others have spent it"
    _, tuner = process(10.0, tuned)
    assert tuner.has_news and set(known.values()) == {"library 2"}
    assert 2 <= len(known) < 6 and len(tuned) == 1, "what promises most was measured"
    assert [site.trials for site in process(10.0, tuned)[0]] == [[]] * 6, "no start after it takes as long again"


def test_what_was_timed_before_the_budget_was_over_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowSite.clock = Clock()
    monkeypatch.setattr(tune, "time", clock)
    monkeypatch.setattr(_native, "DeviceSite", DeviceSite)
    # In the first turn: the third way was timed, the fifth was not.
    site: Any = SlowSite("a")
    site.built = {0, 1, 2, 3, 4}
    measured = tune._measure(site, 3, 0.35)
    assert measured is not None and (site.trials, measured[0], measured[5]) == ([0, 1, 2], "library 2", False)
    # Nothing was clearly faster yet.
    clock.now, site.trials = 0.0, []
    with pytest.raises(tune._OutOfTimeError):
        tune._measure(site, 3, 0.25)
    assert site.trials == [0, 1]
    # On a processor the first turn tells nothing, and one that counts may be noise.
    for deadline, choice in ((0.55, None), (0.75, None), (0.95, "1 1")):
        clock.now = 0.0

        class Slow(Site):
            def measure(self, candidate: int) -> tuple[float, float, int]:
                clock.now += 0.1
                return super().measure(candidate)

        form: Any = Slow(1.0, 0.5, 0.6)
        if choice is None:
            with pytest.raises(tune._OutOfTimeError):
                tune._measure(form, 3, deadline)
        else:
            cut = tune._measure(form, 3, deadline)
            assert cut is not None and (cut[0], cut[5]) == (choice, False)


def test_choices_travel_with_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, held = tmp_path / "net.oxi", tmp_path / "held.oxi"
    compiled = compiled_of(net(), cache=False, graph_file=str(held))
    compiled(X)
    compiled.save_graph(path)
    rows = read_artifact(path).rows
    assert len(rows) == 2 and read_artifact(held).rows == rows, "the graph file has them too"
    del compiled
    # Of two choices the file's is taken, without a database and without a trial.
    other = {"direct direct": "winograd2 winograd2"}
    artifact = read_artifact(path)
    artifact.rows = [(*row[:4], other.get(row[4], "direct direct"), *row[5:]) for row in rows]
    path.write_bytes(artifact.to_bytes())
    _native.forget_choices()
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("something was measured"))
    loaded = compiled_of(net(), cache=False)
    loaded.load_graph(path)
    assert_close(loaded(X), net()(X))
    (variant,) = dispatcher_of(loaded).engines()[0].variants
    installed = {s.installed for s in _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(loaded)])}
    assert installed == {row[4] for row in artifact.rows}
    loaded.save_graph(held)
    assert read_artifact(held).rows == artifact.rows, "and given on"


def test_a_convolution_whose_weight_fits_no_trial_reads_the_modules() -> None:
    """It has more bytes than the workspace of the whole program, and is read as it lies, also channels-last."""
    for form in (torch.contiguous_format, torch.channels_last):
        module = nn.Sequential(nn.Conv2d(768, 768, 3, padding=1)).eval().to(memory_format=form).requires_grad_(False)
        compiled = compiled_of(module, tune="full")
        result = compiled(torch.randn(1, 768, 12, 12))
        (variant,) = dispatcher_of(compiled).engines()[0].variants
        sizes = [1, 12, 12][: _symbols(compiled)]
        (bare,) = _native.tuning_sites(variant.program, sizes)
        assert bare.candidates() == [], "a weight of its own does not fit"
        (site,) = _native.tuning_sites(variant.program, sizes, variant.tensors)
        assert site.candidates() == [0, 1, 2]
        assert site.installed is not None, "it was measured"
        trial = site.measure(2)
        assert trial is not None and trial[2] < module[0].weight.nbytes
        assert result.shape == (1, 768, 12, 12)
        bundle.clear()
        _native.forget_choices()


def test_choices_are_those_of_a_number_of_threads() -> None:
    """Measured with one, they are neither taken nor shown for two, by another module with the same program."""
    threads = torch.get_num_threads()
    compiled = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            compiled.append(compiled_of(net(), tune="full"))
            compiled[-1](X)
            (variant,) = dispatcher_of(compiled[-1]).engines()[0].variants
            assert [f"{count} threads" in row[2] for row in variant.rows] == [True, True]
            sites = _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled[-1])])
            assert {s.installed for s in sites} == {row[4] for row in variant.rows}
        assert sorted(row[2].rpartition(", ")[2] for row in bundle.entries()) == ["1 threads"] * 2 + ["2 threads"] * 2
        assert oxidiff.report(compiled[-1]).shared_with == 1
    finally:
        torch.set_num_threads(threads)


def test_what_is_measured_before_a_first_call_is_of_torchs_threads() -> None:
    """`warmup`, and `oxidiff tune`, which has no other call: the pool had all processors until one came."""
    threads = torch.get_num_threads()
    script = (
        "import sys, torch\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "import oxidiff\n"
        "from oxidiff import _native, dispatch\n"
        "from test_tune import X, dispatcher_of, net, _symbols\n"
        "compiled = oxidiff.compile(net(), tune='full', cache=False)\n"
        "oxidiff.warmup(compiled, X)\n"
        "print(_native.target()['threads'])\n"
        "compiled(X)\n"
        "(variant,) = dispatcher_of(compiled).engines()[0].variants\n"
        "sites = _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled)])\n"
        "print(all(site.installed for site in sites), len(sites))\n"
    )
    for count in {1, threads + 1}:
        assert python(script, str(count)).split() == [str(count), "True", "2"]


def test_one_database_one_result() -> None:
    compiled_of(net())(X)
    other = {"direct direct": "winograd2 winograd2"}
    rows = [(*row[:4], other.get(row[4], "direct direct"), *row[5:]) for row in bundle.entries()]
    database = _native.TuningDatabase(str(bundle.database_path()))
    database.clear()
    database.add(rows)
    results = []
    for _ in range(2):
        _native.forget_choices()
        compiled = compiled_of(net())
        results.append(compiled(X))
        (variant,) = dispatcher_of(compiled).engines()[0].variants
        sites = _native.tuning_sites(variant.program, [1, 24, 24][: _symbols(compiled)])
        assert {(s.op, s.installed) for s in sites} == {(row[0], row[4]) for row in rows}
        del compiled
        gc.collect()
    assert torch.equal(*results) and bundle.entries() == rows


def test_a_database_that_cannot_be_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that somebody else's rights are needed for: one warning each, and a program."""
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path / ("long" * 100)))
    module = net()
    with pytest.warns(oxidiff.CacheWarning, match="are not read: cannot read .*tuning.sqlite"):
        compiled = compiled_of(module)
        assert_close(compiled(X), module(X))
    assert not oxidiff.report(compiled).eager_calls


def test_a_damaged_database_is_begun_anew_when_it_is_read() -> None:
    """One warning, and no other at the next start."""
    compiled_of(net())(X)
    path = bundle.database_path()
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(b"no database" * 400)
    module = net()
    for is_damaged in (True, False):
        _native.forget_choices()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiled = compiled_of(module)
            assert_close(compiled(X), module(X))
        told = [str(one.message) for one in seen if one.category is oxidiff.CacheWarning]
        assert len(told) == is_damaged and all("begun anew" in text for text in told)
    assert path.with_suffix(".damaged").exists()
    assert isinstance(bundle.entries(), list), "it can be read"
