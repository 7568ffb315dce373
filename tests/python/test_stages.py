"""Ops that the compiler does not know run in eager PyTorch between programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from files import mutated, python, shuffled
from nets import assert_close, image
from oxidiff.capture.stages import operands
from oxidiff.store import read_artifact
from oxidiff.store.artifact import StoredGraph
from oxidiff.store.encode import find_op


class Fourier(nn.Module):
    """A filter in the frequency domain between convolutions, as FreeU has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        x = self.first(x)
        spectrum = torch.fft.fftn(x, dim=(-2, -1))
        spectrum = spectrum * scale * self.gain
        x = torch.fft.ifftn(spectrum, dim=(-2, -1)).real
        return self.second(torch.nn.functional.silu(x)) * scale


class Rotation(nn.Module):
    """Rotary positions by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.query(x)
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        turns = torch.polar(torch.ones_like(angles), angles)
        rotated = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (4, 2))) * turns).flatten(-2)
        return self.out(rotated), q


@torch.no_grad()
def test_fourier_filter() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    with pytest.warns(oxidiff.FallbackWarning, match=r"runs an op in eager PyTorch: aten\._?fft"):
        compiled(image())
    for shape in ((2, 3, 16, 16), (1, 3, 24, 8), (3, 3, 10, 12)):
        for scale in (0.5, 2.0):
            x = image(*shape)
            assert_close(compiled(x, scale=scale), module(x, scale=scale))
    report = oxidiff.report(compiled)
    assert (report.calls, report.eager_calls, report.captures) == (7, 0, 1)
    assert report.programs == 2
    assert {item["count"] for item in report.fallbacks} == {7}
    assert any("fft" in item["op"] for item in report.fallbacks)
    kernels = [step["kernel"] for step in oxidiff.profile(compiled, image()).steps]
    assert "eager" in kernels and "convolution" in kernels


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_weights_of_programs_and_of_eager_ops_stay_live() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    compiled(image())
    for parameter in (module.first.weight, module.second.bias, module.gain):
        parameter.mul_(-1.5)
        assert_close(compiled(image()), module(image()))
    module.gain = nn.Parameter(torch.rand(4, 1, 1))
    assert_close(compiled(image()), module(image()))
    assert oxidiff.report(compiled).captures == 1


@torch.no_grad()
def test_complex_numbers_are_compiled() -> None:
    module = Rotation().eval()
    compiled: Any = oxidiff.compile(module)
    for length in (4, 7, 12):
        x = torch.randn(2, length, 8)
        assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.captures, report.programs) == (0, 1, 1)
    assert not report.fallbacks


class FromConstants(nn.Module):
    """A linear layer, and a factor made of constants by ops of which the compiler knows some."""

    def __init__(self, factor: Callable[[], Tensor]) -> None:
        super().__init__()
        self.factor, self.out = factor, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.factor()


FACTORS: dict[str, Callable[[], Tensor]] = {
    "integers of 16 bits": lambda: torch.arange(8, dtype=torch.int16).float(),
    "data of 16 bits": lambda: torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int16).float(),
    "a complex exponential": lambda: torch.exp(1j * torch.arange(8.0)).real,
    "bits": lambda: (torch.arange(8.0).exp().view(torch.int32) + 1).view(torch.float32),
    "float8": lambda: torch.arange(8.0).to(torch.float8_e4m3fn).float(),
    "a grid": lambda: torch.meshgrid(torch.arange(2.0).exp(), torch.arange(4.0).sin(), indexing="ij")[0].flatten(),
    "chunks": lambda: torch.arange(16.0).cos().chunk(2)[1] * torch.linspace(0, 1, 8),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_constants_of_types_that_the_compiler_lacks(name: str) -> None:
    """Constants are computed while a graph is lowered, whether an op of them runs eager or not."""
    module = FromConstants(FACTORS[name]).eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for length in (3, 5):
        x = torch.randn(length, 8)
        assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.captures) == (0, 1)
    assert report.programs >= 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_channels_last_argument() -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module)
    x = image().to(memory_format=torch.channels_last)
    assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 0


def test_strict_raises() -> None:
    compiled: Any = oxidiff.compile(Fourier().eval(), strict=True)
    with torch.no_grad(), pytest.raises(oxidiff.UnsupportedError, match="fft"):
        compiled(image())


@torch.no_grad()
def test_nothing_left_for_the_compiler_runs_eager() -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(x)

    compiled: Any = oxidiff.compile(Only())
    with pytest.warns(oxidiff.FallbackWarning, match="runs in eager PyTorch"):
        compiled(image(4, 4))
    assert oxidiff.report(compiled).eager_calls == 1


FOURIER = """
    import sys, warnings, torch, oxidiff
    sys.path.insert(0, sys.argv[1])
    from nets import image
    from test_stages import Fourier, Rotation
    warnings.simplefilter("ignore", oxidiff.FallbackWarning)
    torch.manual_seed(0)
    fourier, rotation = Fourier().eval(), Rotation().eval()
    first, second = oxidiff.compile(fourier), oxidiff.compile(rotation)
    with torch.no_grad():
        for shape in ((2, 3, 16, 16), (1, 3, 24, 8)):
            for scale in (0.5, 2.0):
                x = image(*shape)
                torch.testing.assert_close(first(x, scale=scale), fourier(x, scale=scale), rtol=1e-5, atol=1e-5)
        x = torch.randn(2, 6, 8)
        for ours, theirs in zip(second(x), rotation(x)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for compiled in (first, second):
        report = oxidiff.report(compiled)
        print(report.captures, report.programs, report.eager_calls, sorted(item["op"] for item in report.fallbacks))
"""


def test_another_process_captures_nothing() -> None:
    here = Path(__file__).parent
    before, after = (python(FOURIER, here).splitlines() for _ in range(2))
    assert before[0].startswith("1 2 0 ['aten.fft_fftn") and before[1].startswith("1 ")
    assert [line.split(maxsplit=2)[2] for line in before] == [line.removeprefix("0 0 ") for line in after]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_stages_are_saved_extended_and_loaded(tmp_path: Path) -> None:
    module = Fourier().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    compiled(image())
    compiled.save_graph(tmp_path / "net.oxi")
    assert "2 stages" in read_artifact(tmp_path / "net.oxi").text()
    other = Fourier().eval()
    loaded: Any = oxidiff.compile(other, cache=False)
    loaded.load_graph(tmp_path / "net.oxi")
    # Other weights, another class of sizes: checked by one trace, and stored again as the same graph.
    for shape in ((2, 3, 16, 16), (1, 3, 8, 340)):
        assert_close(loaded(image(*shape)), other(image(*shape)))
    assert oxidiff.report(loaded).captures == 0
    loaded.save_graph(tmp_path / "more.oxi")
    (before,), (after,) = (read_artifact(tmp_path / name).graphs for name in ("net.oxi", "more.oxi"))
    assert before.identity == after.identity and len(after.call["points"]) > len(before.call["points"])
    with pytest.raises(oxidiff.UnsupportedError, match="fft"):
        strict: Any = oxidiff.compile(Fourier().eval(), cache=False, strict=True)
        strict.load_graph(tmp_path / "net.oxi")
        strict(image())


def assert_runs(graph: Any, stages: Any) -> None:
    """What every step reads was made before it and not dropped."""
    here = {item.value for item in graph.inputs} | {v for node in graph.nodes for v in node.outputs}
    for stage in stages:
        assert here.issuperset(stage.inputs)
        here.update(stage.outputs)
        for op in stage.eager:
            assert here.issuperset(operands(op.node))
            here.update(op.node.outputs)
        here.difference_update(stage.dead)
    assert here.issuperset(leaf.value for leaf in graph.outputs.leaves if leaf.value is not None)
    assert all(0 <= value < len(graph.values) for value in here)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_mutated_stages_are_refused_or_decoded(tmp_path: Path) -> None:
    compiled: Any = oxidiff.compile(Fourier().eval(), cache=False)
    compiled(image())
    compiled.save_graph(tmp_path / "net.oxi")
    artifact = read_artifact(tmp_path / "net.oxi")
    (whole,) = artifact.graphs
    source = random.Random(9)
    decoded = 0
    for i in range(5_000):
        call, program = whole.call, whole.program
        if i % 4:
            call = shuffled(call, source)
        else:
            program = mutated(program.encode(), source).decode("utf-8", "replace")
        if not isinstance(call, dict):
            continue
        try:
            graph, stages = StoredGraph(whole.key, program, call, whole.trace).decode()
        except oxidiff.ArtifactError:
            continue
        decoded += 1
        if "stages" in call:
            assert_runs(graph, stages)
    assert 100 < decoded < 4_500


@pytest.mark.parametrize(
    "name", ["aten.from_file.default", "aten.add_.Tensor", "aten.nothing.default", "os.system.x", "x"]
)
def test_only_ops_on_tensors_are_taken_from_a_file(name: str) -> None:
    with pytest.raises(oxidiff.ArtifactError, match=r"op"):
        find_op(name)
    assert find_op("aten._fft_c2c.default") is torch.ops.aten._fft_c2c.default


class Draws(nn.Module):
    """Noise between layers: of what depends on the input, of what does not, in place, and some that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        x = x + torch.randn_like(x.sort(-1)[0])
        torch.rand(3)
        x = self.convs[1](x) * torch.rand(x.shape[-1])
        x = x + x.new_empty(x.shape[0], 1, *x.shape[2:]).normal_()
        x = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.empty(4).uniform_().sum()
        return self.convs[2](x)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("check", [None, True])
def test_random_numbers_are_drawn_in_order(check: bool | None, tmp_path: Path) -> None:
    module = Draws().eval()
    first: Any = oxidiff.compile(module, cache=False, check=check)
    states = []
    for compiled in (first, oxidiff.compile(module, cache=False)):
        if compiled is not first:
            oxidiff.save_graph(first, tmp_path / "graph")
            oxidiff.load_graph(compiled, tmp_path / "graph")
        for size in (12, 12, 20):
            torch.manual_seed(size)
            expected = module(image(2, 3, size, 10))
            states.append(torch.get_rng_state())
            torch.manual_seed(size)
            assert_close(compiled(image(2, 3, size, 10)), expected)
            assert torch.equal(torch.get_rng_state(), states[-1])
        report = oxidiff.report(compiled)
        assert report.eager_calls == 0
        assert report.captures == (compiled is first)
        assert any("draws random numbers" in row["reason"] for row in report.fallbacks)


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda x: (x.clone(), x.sort(-1)[0] * 2),
    "contiguous": lambda x: (x.contiguous(), x.sort(-1)[0] * 2),
    "of an eager op": lambda x: [y := x.contiguous().sort(-1)[0], y.clone(), x.contiguous() * 2],
    "to": lambda x: (x.to(torch.float32, copy=True), x.sort(-1)[0] * 2),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("name", COPIES)
def test_what_forward_copied_is_the_callers(name: str) -> None:
    class Copies(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return COPIES[name](x)

    for x in (torch.randn(4, 6), torch.randn(6, 4).T):
        module = Copies()
        expected = [result.clone() for result in module(x)]
        compiled: Any = oxidiff.compile(module, cache=False)
        before = x.clone()
        results = compiled(x)
        again = module(x)
        assert results[-2].is_contiguous() == again[-2].is_contiguous()
        if results[0] is x:
            assert again[0] is x
            continue
        for i, result in enumerate(results):
            assert torch.equal(result, expected[i]), "nothing written below is seen here"
            result.zero_()
        assert torch.equal(x, before)
        assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_ops_on_memory_see_it_as_forward_left_it() -> None:
    class OnMemory(nn.Module):
        def forward(self, x: Tensor) -> Any:
            x = x.contiguous()
            return x.as_strided((2, 3), (2, 1)) + 0, x.view(torch.int16) + 0, x.amax()

    for x in (torch.arange(16.0).reshape(2, 8)[:, ::2], torch.arange(8.0).reshape(4, 2).T):
        compiled: Any = oxidiff.compile(OnMemory(), cache=False)
        assert_close(compiled(x), OnMemory()(x))
        assert oxidiff.report(compiled).eager_calls == 0


class Vocoder(nn.Module):
    """A spectrum made by layers, and the signal that has it: as Vocos."""

    def __init__(self, center: bool) -> None:
        super().__init__()
        self.center = center
        self.first, self.last = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(1, 1)
        self.register_buffer("window", torch.hann_window(15) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        size, phase = self.first(x).chunk(2, 1)
        spectrum = torch.polar(size.exp(), phase)
        signal = torch.istft(spectrum, 15, 4, 15, self.window, center=self.center)
        return self.last(signal[..., None]) * 2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("center", [False, True])
def test_signals_from_spectra(center: bool) -> None:
    module = Vocoder(center).eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for batch, frames in ((1, 12), (2, 12), (1, 31)):
        x = image(batch, 8, frames)
        assert_close(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert report.captures == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_numbers_for_what_lies_otherwise_are_eagers() -> None:
    """PyTorch draws them in the order in memory."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return x + torch.randn_like(x) * torch.rand_like(x.transpose(2, 3)).transpose(2, 3)

    for order in (torch.contiguous_format, torch.channels_last):
        module = Noisy().to(memory_format=order)
        compiled: Any = oxidiff.compile(module, cache=False)
        x = image(2, 4, 8, 9)
        for _ in range(2):
            torch.manual_seed(4)
            expected, state = module(x), torch.get_rng_state()
            torch.manual_seed(4)
            assert_close(compiled(x), expected)
            assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_weights_that_are_returned_beside_eager_ops() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Any:
            return x + torch.rand(4), self.weight

    module = Returns()
    compiled: Any = oxidiff.compile(module, cache=False)
    for _ in range(2):
        torch.manual_seed(4)
        expected, state = module(image(3, 4)), torch.get_rng_state()
        torch.manual_seed(4)
        assert_close(compiled(image(3, 4)), expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert oxidiff.report(compiled).eager_calls == 0


class Keeps(nn.Module):
    """Gives what it holds and constants beside the results of an op that the compiler does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return (x * 2).sort(-1)[0] + self.bias, self.table, self.bias, torch.tensor([x.shape[0], 2])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_no_program_makes_is_returned_by_a_stored_graph(tmp_path: Path) -> None:
    first: Any = oxidiff.compile(Keeps(), cache=False)
    first(image(3, 4))
    first.save_graph(tmp_path / "graph")
    module = Keeps()
    loaded: Any = oxidiff.compile(module, cache=False)
    loaded.load_graph(tmp_path / "graph")
    for rows in (3, 5):
        x = image(rows, 4)
        assert_close(loaded(x), module(x))
        module.table.add_(1)
    report = oxidiff.report(loaded)
    assert (report.captures, report.eager_calls) == (0, 0)


class Idle(nn.Module):
    """Computes what nobody needs: by ops that the compiler does not know, of sizes that no program has."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(-(-x.shape[0] // 4) * 4, 3)
        order = torch.cat([x, rows]).argsort(0)
        x.index_put((order[: x.shape[0], 0] % x.shape[0],), x)
        return x * 2


@torch.no_grad()
def test_what_nobody_needs_is_no_part_of_a_program() -> None:
    module = Idle()
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    for count in (8, 5, 12, 7):
        x = torch.randn(count, 3)
        assert torch.equal(compiled(x), module(x))


class Parts(nn.Module):
    """How many parts there are decides, and whether there may be some."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        try:
            return x * len(self.function(x))
        except RuntimeError:
            return x - 1


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(4),
        lambda x: x.view(-1, 4, 3)[:1],
        lambda x: x.unflatten(0, (-1, 4))[:1],
        lambda x: torch.meshgrid(*x[:, 0].chunk(4), indexing="ij"),
    ],
    ids=["chunks", "view", "unflatten", "grid"],
)
def test_how_many_there_are_of_what_nobody_needs_is_seen(function: Callable[[Tensor], Any]) -> None:
    module = Parts(function)
    compiled: Any = oxidiff.compile(module, cache=False)
    for count in (8, 5, 12, 7, 6, 9):
        x = torch.randn(count, 3)
        assert torch.equal(compiled(x), module(x)), count


@torch.no_grad()
def test_dropout_by_its_op_draws_though_nobody_needs_it() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.native_dropout(x, 0.5, True)
            return x + torch.rand(3)

    module = Dropping()
    compiled: Any = oxidiff.compile(module, cache=False)
    results = []
    for called in (module, compiled):
        torch.manual_seed(3)
        results.append((called(torch.ones(4, 3)), torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@torch.no_grad()
def test_what_an_op_of_a_library_does_is_done_though_nobody_needs_its_result() -> None:
    seen: list[int] = []

    @torch.library.custom_op("oxidiff_tests::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.clone()

    @noted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noted(x + 1)
            return x * 2

    compiled: Any = oxidiff.compile(Noting(), cache=False)
    for count in (8, 5):
        assert torch.equal(compiled(torch.ones(count, 3)), torch.full((count, 3), 2.0))
    assert seen == [8, 5]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.silu(torch._grouped_mm(self.scale(x), self.weight.transpose(1, 2), offs=ends))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_weights_that_eager_ops_read_are_not_copied(dtype: torch.dtype) -> None:
    module = Experts().to(dtype).eval()
    compiled: Any = oxidiff.compile(module)
    for count in (9, 14):
        x, ends = torch.randn(count, 16).to(dtype), torch.tensor([2, 2, 7, count], dtype=torch.int32)
        assert_close(compiled(x, ends), module(x, ends))
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (1, 0)
    assert {item["op"] for item in report.fallbacks} == {"aten._grouped_mm.default"}
    steps = oxidiff.profile(compiled, x, ends).steps
    assert {"aten.transpose.int", "aten._grouped_mm.default"} <= {s["step"] for s in steps if s["kernel"] == "eager"}
    module.weight.mul_(-2)
    assert_close(compiled(x, ends), module(x, ends))
