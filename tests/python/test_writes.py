"""Lists and dictionaries that a module writes into: afterwards they hold what they hold after a call in eager."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import oxidiff


class Causal(nn.Module):
    """Two convolutions over time, in chunks: each keeps its last inputs in a list, as those of Wan's autoencoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv3d(3, 3, (3, 1, 1)) for _ in range(2)])

    def forward(self, x: Tensor, cache: list[Any], at: list[int]) -> Tensor:
        for conv in self.convs:
            i = at[0]
            kept = cache[i]
            before = x.new_zeros(x.shape[0], 3, 2, *x.shape[3:]) if kept is None else kept
            whole = torch.cat([before, x], dim=2)
            cache[i] = whole[:, :, -2:]
            at[0] += 1
            x = conv(whole)
        return x


class Notes(nn.Module):
    """Writes into a dictionary, takes from a list, and adds to another."""

    def forward(self, x: Tensor, notes: dict[str, Any], taken: list[Tensor], added: list[Any]) -> Tensor:
        x = x + taken.pop(0)
        notes["inner"]["sum"] = x.sum(-1)
        notes.pop("old", None)
        notes["kind"] = "seen"
        added.append(x * 2)
        return x.sin()


def notes_call(rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    x, first, second = torch.randn(3, rows, 5, generator=generator)
    return {"x": x, "notes": {"inner": {}, "old": 1.5}, "taken": [first, second], "added": []}


@torch.no_grad()
def test_chunks_through_a_cache() -> None:
    module = Causal().eval()
    compiled = oxidiff.compile(module)
    for batch, height, width in ((1, 4, 6), (2, 8, 3)):
        states = [([None, None], [0]), ([None, None], [0])]
        for _ in range(4):
            chunk = torch.randn(batch, 3, 1, height, width)
            results = []
            for run, (cache, at) in zip((module, compiled), states, strict=True):
                at[0] = 0
                results.append(run(chunk, cache, at))
            torch.testing.assert_close(*reversed(results))
            (expected, expected_at), (actual, actual_at) = states
            assert actual_at == expected_at == [2]
            torch.testing.assert_close(actual, expected)
    report = oxidiff.report(compiled)
    assert report.programs == report.captures == 2, "one for an empty cache and one for a full one"
    assert not report.fallbacks
    assert report.eager_calls == 0


@torch.no_grad()
def test_dictionaries_and_lists_of_other_lengths() -> None:
    module = Notes()
    compiled = oxidiff.compile(module)
    for rows in (3, 7):
        expected, actual = notes_call(rows), notes_call(rows)
        inner, notes, taken = actual["notes"]["inner"], actual["notes"], list(actual["taken"])
        torch.testing.assert_close(compiled(**actual), module(**expected))
        torch.testing.assert_close(actual["notes"]["inner"], expected["notes"]["inner"])
        assert list(actual["notes"]) == list(expected["notes"]) == ["inner", "kind"]
        assert actual["notes"] is notes
        assert notes["inner"] is inner, "it writes into what it was given"
        assert len(actual["taken"]) == 1
        assert actual["taken"][0] is taken[1], "the caller's own tensor moved up"
        torch.testing.assert_close(actual["added"], expected["added"])
    assert oxidiff.report(compiled).programs == 1
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_check_compares_what_is_written() -> None:
    call = notes_call(3)
    oxidiff.compile(Notes(), check=True)(**call)
    assert len(call["taken"]) == 1, "written once, not by the program and again by eager"


@torch.no_grad()
def test_a_saved_graph_writes_too(tmp_path: Path) -> None:
    module = Causal().eval()
    first = oxidiff.compile(module)
    chunk = torch.randn(1, 3, 1, 4, 6)
    first(chunk, [None, None], [0])
    oxidiff.save_graph(first, tmp_path / "causal.oxi")
    second = oxidiff.compile(copy.deepcopy(module))
    oxidiff.load_graph(second, tmp_path / "causal.oxi")
    expected, actual = [None, None], [None, None]
    at = [0]
    torch.testing.assert_close(second(chunk, actual, at), module(chunk, expected, [0]))
    torch.testing.assert_close(actual, expected)
    assert at == [2]
    assert oxidiff.report(second).captures == 0


@dataclasses.dataclass
class State:
    count: int


@dataclasses.dataclass(slots=True)
class Slots:
    count: int


class Counting(nn.Module):
    def forward(self, x: Tensor, state: State) -> Tensor:
        state.count += 1
        return x * 2


@torch.no_grad()
def test_what_a_graph_cannot_write_runs_eager() -> None:
    for state in (State(1), Slots(1)):
        compiled = oxidiff.compile(Counting())
        with pytest.warns(oxidiff.FallbackWarning, match="changes an attribute of its argument state"):
            compiled(torch.ones(2, 2), state)
        assert state.count == 2


@torch.no_grad()
def test_one_list_passed_twice_runs_eager() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, one: list[Tensor], other: list[Tensor]) -> Tensor:
            one[0] = x
            return other[0] + 1

    compiled = oxidiff.compile(Both())
    x = torch.ones(2, 2)
    assert torch.equal(compiled(x, [x * 3], [x * 5]), x * 6)
    shared = [x * 3]
    with pytest.warns(oxidiff.FallbackWarning, match="twice"):
        assert torch.equal(compiled(x, shared, shared), x + 1)


class Holds(nn.Module):
    """Reads in an attribute what it writes into an argument, which may be one object."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"kept": torch.ones(3)}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["kept"] = x * 2
        return self.state["kept"] + x


@torch.no_grad()
def test_what_the_module_holds_too_is_written_by_eager() -> None:
    module, eager = Holds(), Holds()
    compiled = oxidiff.compile(module)
    other = {"kept": torch.zeros(3)}
    assert torch.equal(compiled(torch.ones(3), other), torch.full((3,), 2.0))
    assert torch.equal(other["kept"], torch.full((3,), 2.0))
    with pytest.warns(oxidiff.FallbackWarning, match="is passed to it, and is an attribute too"):
        for factor in (3, 5):
            x = torch.full((3,), float(factor))
            assert torch.equal(compiled(x, module.state), eager(x, eager.state))
    assert torch.equal(compiled(torch.ones(3), other), torch.full((3,), 11.0))


class Collects(nn.Module):
    def forward(self, x: Tensor, found: dict[str, list[Tensor]]) -> Tensor:
        found["twice"].append(x * 2)
        return x + found["given"][0]


@torch.no_grad()
def test_dictionaries_with_defaults_are_passed() -> None:
    x = torch.ones(3)
    found: list[Any] = []
    for module in (Collects(), oxidiff.compile(Collects(), strict=True)):
        given: Any = defaultdict(list, given=[torch.full((3,), 4.0)], twice=[])
        torch.testing.assert_close(module(x, given), torch.full((3,), 5.0))
        found.append((type(given), given.default_factory, dict(given)))
    assert found[0][:2] == found[1][:2] == (defaultdict, list)
    torch.testing.assert_close(found[0][2], found[1][2])


# --- attributes that forward writes -----------------------------------------------------------------------------------


class Keeps(nn.Module):
    """A layer, between what is read of an attribute and what is left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.kept: Any = None


class FirstCall(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if self.kept is None else 1
        self.kept = False
        return cast(Tensor, self.block(x)) * factor


class WasMasked(Keeps):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = cast(Tensor, self.block(x)) * (2 if self.kept else 1)
        self.kept = mask is not None
        return y if mask is None else y * mask


class AnotherLength(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, self.block(x))
        if self.kept != x.shape[0]:
            y = y + 1
        self.kept = x.shape[0]
        return y


class Shapes(Keeps):
    """As a decoder notes the sizes of its latents, and an embedding of patches how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows, self.kept, self.is_large = x.shape[0], x.shape, x.shape[0] > 5
        self.ratio = x.shape[0] / x.shape[1]
        return cast(Tensor, self.block(x))


_MASK = torch.rand(8)
_SIZES = (4, 4, 6, 6, 4, 7, 4, 4, 6)
CALLS: dict[type[Keeps], list[tuple[Any, ...]]] = {
    FirstCall: [(torch.randn(n, 8),) for n in _SIZES],
    WasMasked: [(torch.randn(n, 8), *((_MASK,) if i % 4 > 1 else ())) for i, n in enumerate(2 * _SIZES)],
    AnotherLength: [(torch.randn(n, 8),) for n in _SIZES],
    Shapes: [(torch.randn(n, 8),) for n in _SIZES],
}


@pytest.mark.parametrize("cls", CALLS)
@torch.no_grad()
def test_each_call_finds_and_leaves_attributes_as_in_eager(cls: type[Keeps]) -> None:
    module = cls().eval()
    eager = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(module)
    for call in CALLS[cls]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oxidiff.FallbackWarning)
            torch.testing.assert_close(compiled(*call), eager(*call))
        expected = {name: value for name, value in vars(eager).items() if not name.startswith("_")}
        assert {name: vars(module)[name] for name in expected} == expected
    # Where sizes alternate, what is known of them is known.
    captures = oxidiff.report(compiled).captures
    for call in 2 * CALLS[cls][-4:]:
        compiled(*call)
    assert oxidiff.report(compiled).captures <= captures + 2


class Sets(Keeps):
    """Keeps in an attribute or a buffer what it computes first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.kept = torch.zeros(1)


class Table(Sets):
    """As the embedding of positions of OmniGen: the buffer is the same after each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.table = 1.0 / 100.0 ** (torch.arange(8).float() / 8)
        return cast(Tensor, self.block(x)) * self.table


class Last(Sets):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.mean(0)
        self.kept += 1
        return cast(Tensor, self.block(x - self.kept))


class Grown(Sets):
    """What is there is looked at, if not read."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.shape[0] < x.shape[0]:
            self.kept = torch.arange(x.shape[0]).float()
        return cast(Tensor, self.block(x)) + self.kept[: x.shape[0], None]


class Previous(Sets):
    def forward(self, x: Tensor) -> Tensor:
        before = self.kept
        self.kept = x.mean(0)
        return cast(Tensor, self.block(x)) + before


class Tried(Sets):
    """Looks at what is there, and does without."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            self.was_long = len(self.kept) > 5
        self.kept = x.mean(1) * 2
        return cast(Tensor, self.block(x))


class Shared(Sets):
    """What is kept is part of what is returned."""

    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, self.block(x))
        self.kept = y[:2]
        return y


class Own(Sets):
    """What is kept is a part of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.block[0].bias[: 4 if x.shape[0] > 5 else 8]
        return cast(Tensor, self.block(x))


SEEN: list[Tensor] = []


class Elsewhere(Sets):
    """Keeps a tensor elsewhere, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.mean(0)
        SEEN[:] = [self.kept * 2]
        return cast(Tensor, self.block(x))


def _kept_in(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("table", "kept", "was_long") if hasattr(module, name)}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("cls", [Table, Last, Grown, Previous, Tried, Shared, Own, Elsewhere])
@torch.no_grad()
def test_tensors_in_attributes_are_those_of_eager(cls: type[Sets], is_whole: bool) -> None:
    module: nn.Module = cls().eval()
    module = module if is_whole else nn.Sequential(nn.Identity(), module, nn.Linear(8, 8)).eval()
    eager = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(module, cache=False)
    setting, expected_setting = [one if is_whole else one[1] for one in (module, eager)]
    for n in 2 * _SIZES:
        x = torch.randn(n, 8)
        before = _kept_in(setting)
        contents = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oxidiff.FallbackWarning)
            result, expected = compiled(x), eager(x)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(_kept_in(setting), _kept_in(expected_setting))
        torch.testing.assert_close({name: before[name] for name in contents}, contents)
        # Whoever writes into the result, or a weight, writes into what is kept where eager does.
        for one in (result, expected):
            one.add_(1)
        torch.testing.assert_close(_kept_in(setting), _kept_in(expected_setting))
    is_one = cls in (Table, Last)
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.eager_calls) == (1, 1, 0) or not is_one, report
    if cls is Elsewhere:
        assert not SEEN[0].is_meta


@torch.no_grad()
def test_a_table_that_is_set_is_one_program() -> None:
    module = Table().eval()
    compiled: Any = oxidiff.compile(module, strict=True, check=True)
    for n in _SIZES:
        old = module.table
        compiled(torch.randn(n, 8))
        assert module.table is not old, "eager makes another one"
        assert "table" in module._buffers
        assert "table" not in module.state_dict()
    assert oxidiff.report(compiled).captures == 1


@torch.no_grad()
def test_a_saved_graph_sets_attributes_too(tmp_path: Path) -> None:
    module = Table().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.randn(4, 8)
    expected = compiled(x)
    oxidiff.save_graph(compiled, tmp_path / "graph")
    other = copy.deepcopy(module)
    other.table = torch.zeros(8)
    loaded: Any = oxidiff.compile(other, cache=False, strict=True)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    torch.testing.assert_close(loaded(x), expected)
    torch.testing.assert_close(other.table, module.table)
    assert oxidiff.report(loaded).captures == 0


class Constants(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = (len(self.block) * 500, 8**-0.5, f"of {x.dim()}", {"a key": [1.5, None]})
        return cast(Tensor, self.block(x))


@torch.no_grad()
def test_what_is_set_to_what_it_was_is_no_change() -> None:
    module = Constants().eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    for n in _SIZES:
        x = torch.randn(n, 8)
        torch.testing.assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 0
    assert module.kept == (1500, 8**-0.5, "of 2", {"a key": [1.5, None]})


class Narrow(nn.Module):
    """Gives up shifting where an image is no larger than its window, for good: as transformers' Swin does."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.conv, self.shift, self.window = nn.Conv2d(3, 8, 3, padding=1), 2, window

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) <= self.window:
            self.shift = 0
        x = self.conv(x)
        return torch.roll(x, (self.shift, self.shift), (2, 3)) if self.shift > 0 else x


@torch.no_grad()
@pytest.mark.parametrize("window", [4, 16, 64])
def test_sizes_that_nobody_called_with_set_nothing(window: int) -> None:
    for size in (24, 32, 128):
        module = Narrow(window)
        expected = copy.deepcopy(module)
        compiled: Any = oxidiff.compile(module, cache=False)
        for edge in (size, size + 8, window, size):
            x = torch.randn(1, 3, edge, edge)
            torch.testing.assert_close(compiled(x), expected(x))
            assert module.shift == expected.shift, (size, edge)
