"""Modules that cannot be captured whole run in the pieces that Dynamo finds."""

from __future__ import annotations

import gc
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close, image
from oxidiff import detours, entries
from oxidiff.capture import trials
from oxidiff.capture.trace import trace
from oxidiff.dispatch import find_dispatcher
from oxidiff.module import dispatcher_of
from oxidiff.split import Split


class Branches(nn.Module):
    """What it does after the first layer depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(x)
        x = x * 2 if x.sum() > 0 else x - 1
        return self.second(x) * scale


def compiled_of(module: nn.Module, **fields: Any) -> Any:
    return oxidiff.compile(module.eval(), **fields)


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Listed(nn.Module):
    """Makes a list of positions in Python, which is another program for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Widened() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tensor([math.sin(i * i) for i in range(x.shape[1])])[:, None]
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_what_is_captured_at_each_size_runs_in_parts_in_the_end() -> None:
    module = Listed().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    sizes = (7, 9, 12, 20, 31, 8, 15)
    captures = []
    with pytest.warns(oxidiff.FallbackWarning, match="runs in 3 parts .* sizes or numbers decide what forward"):
        for size in sizes:
            x = torch.randn(2, size, 8)
            assert_close(compiled(x), module(x))
            captures.append(oxidiff.report(compiled).captures)
    assert captures[3:] == [captures[3]] * 4, "no size is captured any more"
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert_close(compiled(torch.ones(2, 9, 8)), module(torch.ones(2, 9, 8)))
    assert oxidiff.report(compiled).captures == report.captures
    # Who wants a program of the whole gets one, for the size that ran in parts, too.
    compiled.warmup(x, shapes=[(2, 40, 8), (2, 41, 8)])
    oxidiff.profile(compiled, torch.randn(2, 42, 8))
    assert oxidiff.report(compiled).captures == report.captures + 4
    for size in (x.shape[1], 40, 41, 42):
        x = torch.randn(2, size, 8)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == report.captures + 4


@torch.no_grad()
@pytest.mark.parametrize("options", [{"strict": True}, {"dynamic": False}])
def test_where_programs_of_the_whole_are_asked_for_each_size_is_captured(options: dict[str, Any]) -> None:
    module = Listed().eval()
    compiled: Any = oxidiff.compile(module, cache=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", oxidiff.FallbackWarning)
        for count, size in enumerate((7, 9, 12, 20, 31)):
            x = torch.randn(2, size, 8)
            assert_close(compiled(x), module(x))
            assert oxidiff.report(compiled).captures == count + 1


@torch.no_grad()
def test_pieces_are_compiled() -> None:
    module = Branches()
    compiled = compiled_of(module)
    with pytest.warns(oxidiff.FallbackWarning, match=r"Branches runs in \d pieces .*values of a tensor") as seen:
        for seed in range(6):
            for batch in (3, 5, 1):
                x = image(batch, 4, seed=seed)
                assert_close(compiled(x), module(x))
    assert len([w for w in seen if issubclass(w.category, oxidiff.FallbackWarning)]) == 1
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls) == (18, 0)
    assert report.variants >= 2
    (fallback,) = report.fallbacks
    assert fallback["count"] == 18
    assert "piece 0" in str(oxidiff.explain(compiled))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_weights_stay_live() -> None:
    module = Branches()
    compiled = compiled_of(module)
    compiled(image(3, 4))
    module.first.weight.mul_(-1)
    assert_close(compiled(image(3, 4)), module(image(3, 4)))
    module.second.weight = nn.Parameter(torch.randn(4, 4))
    assert_close(compiled(image(3, 4)), module(image(3, 4)))
    module.load_state_dict(Branches().state_dict())
    assert_close(compiled(image(3, 4)), module(image(3, 4)))
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_unload_and_eager() -> None:
    module = Branches()
    compiled = compiled_of(module)
    compiled(image(3, 4))
    with oxidiff.eager(compiled):
        assert_close(compiled(image(3, 4)), module(image(3, 4)))
    assert oxidiff.report(compiled).eager_calls == 1
    oxidiff.unload(compiled)
    assert oxidiff.report(compiled).variants == 0
    assert_close(compiled(image(3, 4)), module(image(3, 4)))
    assert oxidiff.report(compiled).variants >= 2


@torch.no_grad()
def test_nothing_to_compile_runs_eager() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.randn_like(x)

    module = Noise()
    compiled = compiled_of(module)
    x = image(3, 4)
    with pytest.warns(oxidiff.FallbackWarning, match="random"):
        compiled(x)
    torch.manual_seed(3)
    got = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(got, module(x))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.programs) == (2, 2, 0)


@torch.no_grad()
def test_strict_raises() -> None:
    compiled = compiled_of(Branches(), strict=True)
    for _ in range(2):
        with pytest.raises(oxidiff.CaptureError, match="values of a tensor"):
            compiled(image(3, 4))


@torch.no_grad()
def test_wrong_arguments_raise_what_eager_raises() -> None:
    compiled = compiled_of(Branches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        compiled(image(3, 4))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            compiled(image(3, 5))
        with pytest.raises(TypeError, match="forward"):
            compiled(image(3, 4), 1.0, 2.0)
        assert_close(compiled(image(3, 4), scale=0.5), compiled(image(3, 4)) * 0.5)
    assert oxidiff.report(compiled).eager_calls == 0


class Keeps(Branches):
    """Has something else in an attribute after its first call, as models that keep the offsets of positions."""

    kept: Tensor | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.kept = x[:1] * 2
        return super().forward(x, scale)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_pieces_stay_when_a_call_keeps_something() -> None:
    module = Keeps()
    compiled = compiled_of(module)
    assert_close(compiled(image(3, 4)), module(image(3, 4)))
    captures = oxidiff.report(compiled).captures
    for seed in range(3):
        # Not another branch than the first call's.
        assert_close(compiled(image(3, 4) + 0.01 * seed), module(image(3, 4) + 0.01 * seed))
    report = oxidiff.report(compiled)
    # The module as it is now might have been captured whole.
    assert (report.captures, report.eager_calls) == (captures + 1, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()


class Way(nn.Module):
    """Data decide which of its blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if x.sum() > 0 else self.blocks[2](x)


class Inside(nn.Module):
    """Data decide in a submodule, beside which there is more; the share of it that is in no block of its own is small."""

    def __init__(self, *, own: int) -> None:
        super().__init__()
        self.way, self.last = Way(), Block()
        self.own = nn.Parameter(torch.ones(own))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(x)) * self.own.mean()


@torch.no_grad()
@pytest.mark.parametrize(("own", "has_parts"), [(8, True), (800, False)])
def test_blocks_around_which_data_decide_are_parts(own: int, has_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is much beside them, which Dynamo finds pieces in."""
    if has_parts:
        # It takes long for what is not needed here.
        monkeypatch.delattr(detours, "Split")
    module = Inside(own=own)
    compiled = compiled_of(module)
    ways = set()
    with pytest.warns(oxidiff.FallbackWarning, match="parts" if has_parts else "pieces") as seen:
        for seed in range(8):
            x = image(3 + seed % 2, 8, seed=seed)
            ways.add(bool(module.way.blocks[0](x).sum() > 0))
            assert_close(compiled(x), module(x))
    assert ways == {True, False}
    assert "Inside.way runs in" in str(seen[0].message)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    found = find_dispatcher(compiled)
    assert found is not None and bool(found.states.regions) == has_parts
    if has_parts:
        # Blocks are alike: one capture serves all, at all sizes. The others were attempts at the whole.
        assert (report.programs, len(report.fallbacks)) == (1, 1)
        module.way.blocks[1].layer.weight.mul_(-3)
        module.last.layer.weight = nn.Parameter(torch.randn(8, 8))
        assert_close(compiled(image(3, 8)), module(image(3, 8)))
        assert oxidiff.report(compiled).programs == 1


class Parts(Branches):
    """Does something with each of as many parts as a tensor says."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(x)
        parts = x.split((x[:, 0] * 0 + 1).long().tolist())
        return self.second(torch.cat([part.softmax(1) for part in parts])) * scale


@torch.no_grad()
def test_what_dynamo_compiles_no_more_is_reported() -> None:
    module = Parts()
    compiled = compiled_of(module)
    most = torch._dynamo.config.recompile_limit
    with pytest.warns(oxidiff.FallbackWarning, match="piece that runs in eager PyTorch .* Dynamo has compiled"):
        for batch in [*range(2, most + 4), 2, most + 3]:
            x = image(batch, 4)
            assert_close(compiled(x), module(x))
    reasons = [one["reason"] for one in oxidiff.report(compiled).fallbacks if "recompile_limit" in one["reason"]]
    assert len(reasons) == 1
    assert f"{most} times" in reasons[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_many_modules_of_one_class() -> None:
    """Dynamo compiles a function eight times and then no more; here every module counts for itself and leaves nothing."""
    pieces = []
    for _ in range(12):
        module = Branches()
        compiled = compiled_of(module)
        assert_close(compiled(image(3, 4)), module(image(3, 4)))
        report = oxidiff.report(compiled)
        assert report.eager_calls == 0
        pieces.append(report.variants)
        del module, compiled
        gc.collect()
    assert min(pieces) >= 2


@torch.no_grad()
def test_pieces_of_other_modules_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of code that it compiled too often Dynamo runs whatever it has, also what it compiled for a module that is gone."""
    found = []
    compile_piece = Split._compile

    def remember(self: Split, graph: torch.fx.GraphModule, examples: Any) -> Any:
        found.append((compile_piece(self, graph, examples), [e.clone() if torch.is_tensor(e) else e for e in examples]))
        return found[-1][0]

    monkeypatch.setattr(Split, "_compile", remember)
    module = Branches()
    compiled = compiled_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        compiled(image(3, 4))
    run, arguments = found[0]
    with pytest.raises(oxidiff.CaptureError, match="too many modules of this class"):
        run(*arguments)
    del module, compiled
    gc.collect()
    with pytest.raises(oxidiff.CaptureError, match="too many modules of this class"):
        run(*arguments)


class Counts(nn.Module):
    """A value that is read out of a weight, then layers with numbers in their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(0.5))
        self.norms = nn.ModuleList(nn.GroupNorm(1, 4, eps=10.0**-i) for i in range(2, 8))
        self.scales = [1.0 + i for i in range(6)]

    def forward(self, x: Tensor, strength: float) -> Tensor:
        if self.k.item() > 1:
            x = x * 2
        for norm, scale in zip(self.norms, self.scales, strict=True):
            x = nn.functional.dropout(norm(x) * scale, 0.1 * scale, training=self.training)
        return x * strength


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_numbers_in_attributes_are_no_symbols_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []

    def traced(*args: Any, **named: Any) -> Any:
        traces.append(args)
        return trace(*args, **named)

    monkeypatch.setattr(trials, "trace", traced)
    module = Counts().eval()
    compiled: Any = oxidiff.compile(module)
    x = image(2, 4, 8, 8)
    assert_close(compiled(x, 0.5), module(x, 0.5))
    assert len(traces) < 30
    # One that changes is an input from then on, as is the next.
    assert_close(compiled(x, 0.75), module(x, 0.75))
    del traces[:]
    for strength in (0.3, 0.9, 0.2):
        assert_close(compiled(x, strength), module(x, strength))
    # Of the whole module, that it cannot be captured with these numbers either, until that is known of all.
    assert len(traces) == 2
    module.scales[2] = 7.0
    assert_close(compiled(x, 0.4), module(x, 0.4))


class Steps(nn.Module):
    """Counts its calls, up to a last one."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = last
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step = min(self.step + 1, self.last)
        return self.layer(x) * self.step


class Sums(Steps):
    """Has a number that Dynamo takes for an argument."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = getattr(self, "scale", 0.5) * 1.25
        return self.layer(x) * self.scale


class Turns(Steps):
    """Does two things in turns."""

    def forward(self, x: Tensor) -> Tensor:
        self.is_odd = not getattr(self, "is_odd", False)
        return self.layer(x) * 2 if self.is_odd else self.layer(x) + 1


class Logs(Steps):
    """Dynamo compiles each length of a list anew."""

    def forward(self, x: Tensor) -> Tensor:
        self.log = [*getattr(self, "log", ()), "called"]
        return self.layer(x) * len(self.log)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize(("cls", "is_split"), [(Steps, False), (Logs, False), (Sums, True), (Turns, True)])
def test_module_that_each_call_changes_is_captured_a_few_times(cls: type[Steps], is_split: bool) -> None:
    """What is known of its calls holds of what they make of it."""
    torch.manual_seed(0)
    module = cls(100)
    compiled: Any = oxidiff.compile(module)
    other = cls(100)
    other.load_state_dict(module.state_dict())
    captures = 0
    for call in range(16):
        x = image(3 + call % 2, 4, seed=call)
        assert_close(compiled(x), other(x))
        if call == 9:
            captures = oxidiff.report(compiled).captures
    report = oxidiff.report(compiled)
    assert report.captures == captures
    assert (report.eager_calls == 0) == is_split
    # A change from outside is another matter.
    module.layer.weight = nn.Parameter(torch.ones(4, 4))
    other.layer.weight = nn.Parameter(torch.ones(4, 4))
    assert_close(compiled(image(3, 4)), other(image(3, 4)))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_module_that_changes_no_more_has_a_program() -> None:
    module = Steps(5)
    compiled: Any = oxidiff.compile(module)
    for call in range(9):
        x = image(3, 4, seed=call)
        assert_close(compiled(x), module.layer(x) * min(call + 1, 5))
    report = oxidiff.report(compiled)
    assert (report.programs, report.eager_calls) == (1, 6)


IMPORTED = """
from torch import nn
methods = [nn.Module.__call__, nn.Module.__setattr__, nn.Module.__init__, nn.Module.add_module]
call, set_attribute, init, add = methods
"""


@torch.no_grad()
def test_what_a_forward_imports_gets_the_own_methods_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Dynamo, which an op of torch's imports."""
    (tmp_path / "imported_by_a_forward.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]

    class Imports(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            import imported_by_a_forward  # type: ignore[import-not-found]

            return x * len(imported_by_a_forward.methods)

    compiled = compiled_of(Imports())
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2, 3), 4.0))
    found = sys.modules.pop("imported_by_a_forward")
    assert found.init is nn.Module.__init__
    assert found.call is nn.Module.__call__
    assert found.set_attribute is nn.Module.__setattr__
    assert found.add is nn.Module.add_module


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))


class Refused(nn.Module):
    """Has no program as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(), layers()

    def forward(self, x: Tensor, strength: float = 1.0, is_short: bool = False) -> Any:
        x = self.first(x) * strength
        return self.last(x) if is_short else self.rest(x)

    def rest(self, x: Tensor) -> Any:
        raise NotImplementedError


class Result:
    def __init__(self, sample: Tensor) -> None:
        self.sample = sample


class ReturnsObject(Refused):
    def rest(self, x: Tensor) -> Any:
        return Result(self.last(x))


class AsksData(Refused):
    def rest(self, x: Tensor) -> Any:
        return self.last(x + 1 if x.sum().item() > 0 else x)


class LeavesTorch(Refused):
    def rest(self, x: Tensor) -> Any:
        return self.last(torch.from_numpy(x.numpy() * 2))


def sample_of(result: Any) -> Tensor:
    return result.sample if isinstance(result, Result) else result


@pytest.mark.parametrize("kind", [ReturnsObject, AsksData, LeavesTorch])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_attempts_in_vain_end(kind: type[Refused]) -> None:
    """Whatever comes next, a size or a number, an attempt takes as long as many calls do."""
    module = kind().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    whole = dispatcher_of(compiled)
    attempts = []
    for i in range(24):
        x = torch.randn(1, 3 + i // 2, 16)
        assert_close(sample_of(compiled(x, 0.5 + i)), sample_of(module(x, 0.5 + i)))
        attempts.append(whole.captures)
    assert attempts[:8] == [1, 2, 3, 4, 4, 4, 4, 4], attempts
    # Now and then one more, which those in between get longer.
    assert attempts[-1] == 5, attempts
    report = oxidiff.report(compiled)
    assert len(report.fallbacks) == 1
    # What forward raised once, eager is asked for; all others run in pieces.
    assert report.eager_calls == (5 if kind is LeavesTorch else 0)
    # Other calls are another matter.
    for i in range(5):
        x = torch.randn(1, 3 + i, 16)
        assert_close(compiled(x, 0.5 + i, True), module(x, 0.5 + i, True))
    assert whole.captures == 6


class AsksDataOfFew(Refused):
    def rest(self, x: Tensor) -> Any:
        return self.last(x + 1 if x.shape[1] < 9 and x.sum().item() > 0 else x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_calls_that_have_a_program_after_all_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_WAIT", 3)
    module = AsksDataOfFew().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    whole = dispatcher_of(compiled)
    for size in (*range(3, 7), 9, 10, 9, 11, 12, 10):
        x = torch.randn(1, size, 16)
        assert_close(compiled(x), module(x))
    engine = whole.engines()[0]
    assert len(engine.variants) == 1 and whole.captures == 5
    # Sizes decide, so each is tried.
    for size in (7, 8):
        traces = engine._capturer.traces
        compiled(torch.randn(1, size, 16))
        assert engine._capturer.traces > traces


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_call_that_goes_wrong_says_nothing_of_those_like_it() -> None:
    module = ReturnsObject().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for size in range(3, 7):
        compiled(torch.randn(1, size, 16))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        compiled(torch.randn(1, 9, 8))
    assert compiled(torch.randn(1, 0, 16)).sample.shape == (1, 0, 16)
    reasons = {row["reason"]: row["count"] for row in oxidiff.report(compiled).fallbacks}
    assert reasons == {"forward returns Result": 4, "an argument has no elements": 1}
    for size in (7, 8, 3, 7):
        x = torch.randn(1, size, 16)
        assert_close(compiled(x).sample, module(x).sample)
    assert oxidiff.report(compiled).eager_calls == 1


IS_ASKED = True


class AsksDataByGlobal(Refused):
    def rest(self, x: Tensor) -> Any:
        return self.last(x + 1 if IS_ASKED and x.sum().item() > 0 else x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_was_refused_is_tried_once_the_reason_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = AsksDataByGlobal().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for size in range(3, 9):
        compiled(torch.randn(1, size, 16))
    assert dispatcher_of(compiled).captures == 4
    monkeypatch.setitem(globals(), "IS_ASKED", False)
    compiled(torch.randn(1, 9, 16))
    assert len(dispatcher_of(compiled).engines()[-1].variants) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_program_that_is_made_ahead_lifts_what_was_refused() -> None:
    module = AsksDataOfFew().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for size in range(3, 7):
        compiled(torch.randn(1, size, 16))
    oxidiff.warmup(compiled, torch.randn(1, 20, 16))
    count = oxidiff.report(compiled).fallbacks[0]["count"]
    for size in (21, 22, 21):
        compiled(torch.randn(1, size, 16))
    assert oxidiff.report(compiled).fallbacks[0]["count"] == count


class FillsTable(Refused):
    """Of which data decide what it does until there is a table."""

    def forward(self, x: Tensor, table: dict[str, Any]) -> Any:  # type: ignore[override]
        x = self.first(x)
        if not table:
            table["shift"] = 1.0 if x.sum().item() > 0 else -1.0
        return self.last(x + table["shift"])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_arguments_are_looked_at_before_they_are_filled() -> None:
    module = FillsTable().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for size in range(3, 9):
        x, table = torch.randn(1, size, 16), {}
        compiled(x, table)
        wanted: dict[str, Any] = {}
        module(x, wanted)
        assert table == wanted
    assert dispatcher_of(compiled).captures == 4
    compiled(torch.randn(1, 10, 16), {"shift": 1.0})
    assert len(dispatcher_of(compiled).engines()[-1].variants) == 1
