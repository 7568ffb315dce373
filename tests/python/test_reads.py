"""What ``forward`` reads out of tensors: masks decide sizes and branches, and the module stays one program."""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from files import shuffled
from nets import assert_close
from oxidiff import _native
from oxidiff.capture import Capturer, capture
from oxidiff.capture.reads import answered
from oxidiff.store.artifact import StoredGraph
from oxidiff.store.reads import restore_key, takes

WORDS = 12


def mask_of(*counts: int, words: int = WORDS) -> Tensor:
    """Which words of each prompt count: the first ones."""
    return (torch.arange(words)[None] < torch.tensor(counts)[:, None]).long()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Reorder(nn.Module):
    """Words that count go before padding, by each prompt's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, image: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        rows = [
            torch.cat([words[which], torch.zeros_like(words[~which])])
            for words, which in zip(text, mask.bool(), strict=True)
        ]
        return self.layer(torch.cat([image, torch.stack(rows)], dim=1))


class Attend(nn.Module):
    """Each prompt's own words are attended to, in every layer anew."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            rows = []
            for i in range(x.shape[0]):
                places = torch.nonzero(mask[i][None].flatten(), as_tuple=False).flatten()
                key = torch.cat([x[i : i + 1], text[i : i + 1, places]], dim=1)[:, None]
                out = F.scaled_dot_product_attention(key, key, key)[:, 0]
                rows.append(F.pad(out, (0, 0, 0, text.shape[1] - len(places))))
            x = x + torch.cat(rows)[:, : x.shape[1]]
        return x


def lengths(x: Tensor, mask: Tensor) -> Tensor:
    """As Lumina does it: positions of words, then of the image, row by row."""
    counts = mask.sum(dim=1).tolist()
    positions = torch.zeros(x.shape[0], max(counts) + 3)
    for i, count in enumerate(counts):
        positions[i, :count] = torch.arange(count).float()
        positions[i, count : count + 3] = count
    return positions[:, :, None] * x[:, :1]


def masked_if_uneven(x: Tensor, mask: Tensor) -> Tensor:
    """As Lumina 2 does it: prompts of one length need no mask."""
    counts = mask.sum(dim=1).tolist()
    x = x[:, : max(counts)] * 2
    return x * mask[:, : max(counts), None] if len(set(counts)) > 1 else x


def up_to(x: Tensor, mask: Tensor) -> Tensor:
    return x[:, : mask.sum(dim=1, dtype=torch.int)[0]] * 2


def branch(x: Tensor, mask: Tensor) -> Tensor:
    return x * 3 if (mask == 1).all() else x * mask[..., None]


def factor(x: Tensor, mask: Tensor) -> Tensor:
    share = mask.float().mean().item()
    return x * share if share > 0.5 else x - share


def same(x: Tensor, mask: Tensor) -> Tensor:
    return x + 1 if torch.equal(mask[0], mask[-1]) else x * 2


def places(x: Tensor, mask: Tensor) -> Tensor:
    """A mask over two dimensions at once."""
    return x[mask.bool()] * 2


def as_tuple(x: Tensor, mask: Tensor) -> Tensor:
    rows, columns = mask.nonzero(as_tuple=True)
    return x[rows, columns] + x[torch.where(mask == 1)].mean(dim=0)


def selected(x: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(x, mask.bool()[..., None]) * 2


def repeated(x: Tensor, mask: Tensor) -> Tensor:
    """Every word that counts twice."""
    return x.repeat_interleave(mask[0] + 1, dim=1)


def put(x: Tensor, mask: Tensor) -> Tensor:
    """Rows for the words that count: as images are put into a prompt."""
    y = x * 1
    y[mask.bool()] = x[mask.bool()] @ x[0].T[:, :8] if x.shape[1] >= 8 else x[mask.bool()]
    y[:, mask[0] == 1] = y[:, mask[0] == 1].flip(-1)
    y[:, mask[1] == 0] = 0.5
    return y


def of_sizes(x: Tensor, mask: Tensor) -> Tensor:
    """What follows from sizes alone is no question."""
    words, parts = torch.tensor([x.shape[1], x.shape[1] // 2]).tolist()
    return x[:, :parts] * torch.full((3,), words).tolist()[1]


def asked_of_sizes(x: Tensor, mask: Tensor) -> Tensor:
    """What is asked of such numbers is a guard, and what is asked of such tensors an answer."""
    half = (torch.tensor([x.shape[1]]) // 2).sum().item()
    x = x * 2 if half > 9 else x - 1
    return x + 3 if (torch.arange(x.shape[1]) > 15).any() else x * half


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (lengths, up_to, branch, factor, same, places, as_tuple, selected, repeated, put, of_sizes, asked_of_sizes)
}


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.function(x, mask)


def run(compiled: Any, module: Any, *arguments: Tensor) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", oxidiff.FallbackWarning)
        assert_close(compiled(*arguments), module(*arguments))


def reorder_call(*counts: int, words: int = WORDS, tokens: int = 20) -> tuple[Tensor, ...]:
    return data(len(counts), tokens, 8), data(len(counts), words, 8), mask_of(*counts, words=words)


@pytest.mark.parametrize("make", [Reorder, Attend])
def test_masks_that_decide_sizes_are_one_program(make: Callable[[], nn.Module]) -> None:
    """Prompts of other lengths, texts of another length, images of other sizes: the program of the first call."""
    module = make().eval()
    compiled = oxidiff.compile(module)
    for arguments in (
        reorder_call(5, 9),
        reorder_call(9, 5),
        reorder_call(4, 4),
        reorder_call(3, 30, words=40, tokens=33),
        reorder_call(39, 2, words=40, tokens=7),
    ):
        run(compiled, module, *arguments)
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.eager_calls, report.fallbacks) == (1, 1, 0, [])
    # All words, or none: parts that are empty or whole are not there, so that it is another program, and a right one.
    for counts in ((12, 12), (0, 7), (12, 3), (1, 1), (0, 0)):
        run(compiled, module, *reorder_call(*counts))
    assert oxidiff.report(compiled).eager_calls == 0 and oxidiff.report(compiled).fallbacks == []


def test_prompts_of_one_length_are_one_program() -> None:
    """Several images of one prompt, whatever its length."""
    module = Calls(masked_if_uneven).eval()
    compiled = oxidiff.compile(module)
    for words, count in ((WORDS, 9), (WORDS, 5), (40, 7), (40, 30)):
        run(compiled, module, data(2, words, 8), mask_of(count, count, words=words))
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.eager_calls) == (1, 1, 0)
    run(compiled, module, data(2, WORDS, 8), mask_of(9, 5))


def test_what_a_length_is_rounded_up_to_keeps_other_sizes_free() -> None:
    """Where that makes each length a program of its own, images of any size are still one."""

    class Rounding(nn.Module):
        def forward(self, image: Tensor, x: Tensor, mask: Tensor) -> Tensor:
            counts = mask.sum(dim=1).tolist()
            words = x[:, : math.ceil(max(counts) / 4) * 4].sum(dim=1)
            words = words * 2 if len(set(counts)) > 1 else words
            return image * words[:, :, None, None]

    module = Rounding().eval()
    compiled = oxidiff.compile(module)
    for height, width in ((16, 16), (24, 40), (32, 18)):
        run(compiled, module, data(2, 8, height, width), data(2, 40, 8), mask_of(6, 6, words=40))
    assert oxidiff.report(compiled).captures == 1
    run(compiled, module, data(2, 8, 16, 16), data(2, 40, 8), mask_of(14, 14, words=40))


@pytest.mark.parametrize("name", CASES)
def test_reads(name: str) -> None:
    module = Calls(CASES[name]).eval()
    compiled = oxidiff.compile(module)
    for words in (WORDS, 40, 17, 18, 20):
        for counts in ((5, 9), (9, 5), (7, 7), (words, words), (1, 2), (2, 1), (words, 3)):
            run(compiled, module, data(2, words, 8), mask_of(*counts, words=words))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    # Halves of odd sizes are a class of their own.
    assert report.captures <= 2 or name != "of_sizes"


@torch.no_grad()
def test_rows_that_do_not_fit_a_mask_are_an_error() -> None:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        y = torch.zeros(2, WORDS, 8)
        y[mask.bool()] = x
        return y

    module = Calls(function).eval()
    compiled = oxidiff.compile(module)
    run(compiled, module, data(14, 8), mask_of(5, 9))
    run(compiled, module, data(9, 8), mask_of(2, 7))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        compiled(data(14, 8), mask_of(5, 8))
    run(compiled, module, data(13, 8), mask_of(5, 8))


def test_the_same_is_read_once() -> None:
    """However many layers read it; and what is opposite follows."""
    module = Attend(layers=4).eval()
    graph = capture(module, reorder_call(5, 9))
    assert [read.question.name for read in graph.reads] == ["nonzero", "nonzero"]
    graph = capture(Reorder().eval(), reorder_call(5, 9))
    assert [read.question.opposite for read in graph.reads] == [None, 0, None, 2]
    # Nothing that only leads there is left to be compiled.
    assert not any("bitwise_not" in str(node.op) for node in graph.nodes)
    assert len([s for s in graph.plan.symbols if s.limit]) == 2


def test_a_number_that_is_read_is_an_argument() -> None:
    """A value seen for the first time is no new entry, and makes no trace."""
    module = Calls(lambda x, y: x * y.sum().item()).eval()
    compiled = oxidiff.compile(module)
    for i in range(20):
        run(compiled, module, data(3, 4), torch.full((2,), 2.5 + i))
    assert oxidiff.report(compiled).captures == 1
    graph = capture(module, (data(3, 4), torch.full((2,), 2.5)))
    assert graph.loose_numbers() == {s.name for s in graph.plan.symbols if s.is_number}


class Routed(nn.Module):
    """What is read follows from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(self.gate(x)[:, 0] > 0).flatten()
        return self.layer(x[rows]).sum(dim=0)


def test_what_follows_from_weights_is_not_read_beforehand() -> None:
    module = Routed().eval()
    compiled = oxidiff.compile(module)
    with torch.no_grad(), pytest.warns(oxidiff.FallbackWarning, match="depends on the values of a tensor"):
        for seed in range(3):
            x = torch.randn(9, 8, generator=torch.Generator().manual_seed(seed))
            assert_close(compiled(x), module(x))


def test_weights_stay_live_and_other_modules_share_the_program() -> None:
    module, other = Reorder().eval(), Reorder().eval()
    compiled, second = oxidiff.compile(module), oxidiff.compile(other)
    run(compiled, module, *reorder_call(5, 9))
    run(second, other, *reorder_call(2, 11))
    assert oxidiff.report(second).captures == 0
    with torch.no_grad():
        module.layer.weight.mul_(-1)
    run(compiled, module, *reorder_call(5, 9))


def test_stored_graphs_read_the_same(tmp_path: Path) -> None:
    file = tmp_path / "graph.oxidiff"
    module = Reorder().eval()
    calls = [reorder_call(5, 9), reorder_call(12, 12), reorder_call(0, 3), reorder_call(6, 30, words=40)]
    first = oxidiff.compile(module, graph_file=file, cache=False)
    for arguments in calls:
        run(first, module, *arguments)
    assert oxidiff.report(first).captures == 3
    loaded = oxidiff.compile(module, graph_file=file, cache=False)
    # What they are told apart by is stored, too: no order of calls is better.
    for arguments in reversed(calls):
        run(loaded, module, *arguments)
    assert oxidiff.report(loaded).captures == 0
    run(loaded, module, *reorder_call(3, 4, words=17, tokens=5))
    assert oxidiff.report(loaded).captures == 0


def test_stored_graphs_of_numbers_that_decide(tmp_path: Path) -> None:
    """Programs that are equal but for the numbers they are right for are not taken for one."""
    file = tmp_path / "graph.oxidiff"
    module = Calls(lambda x, mask: x[:, : max(mask.sum(dim=1).tolist())] * 2).eval()
    calls = [(data(2, words, 8), mask_of(*c, words=words)) for words, c in ((12, (5, 9)), (12, (9, 5)), (40, (7, 7)))]
    for expected in (None, 0):
        compiled = oxidiff.compile(module, graph_file=file, cache=False)
        for arguments in calls:
            run(compiled, module, *arguments)
        assert expected is None or oxidiff.report(compiled).captures == expected


@torch.no_grad()
def test_mutated_files_are_refused_or_read_the_same_way() -> None:
    """As if somebody had written the file by hand: an error, or a graph that finds answers, or is for other calls."""
    module = Reorder().eval()
    capturer = Capturer(module)
    call = capturer.call(reorder_call(5, 9), {})
    graph, lowered = capturer.lowered(call, _native.GraphBuilder)
    stored = StoredGraph.of(graph, lowered)
    source = random.Random(4)
    decoded = refused = 0
    for _ in range(3000):
        name = source.choice(["reads", "reads", "reads", "tail", *stored.call])
        call_data = {**stored.call, name: shuffled(stored.call[name], source)}
        mutated = StoredGraph(stored.key, stored.program, call_data, stored.trace)
        try:
            fresh, _ = mutated.decode()
        except oxidiff.ArtifactError:
            refused += 1
            continue
        if takes(fresh, call):
            restore_key(fresh, call.key)
            decoded += answered(fresh, call, torch.device("cpu")) is not None
    assert refused > 300 and decoded > 30


def test_threads_read_their_own_masks() -> None:
    module = Reorder().eval()
    compiled = oxidiff.compile(module)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(12):
                run(compiled, module, *reorder_call(1 + (seed + i) % 11, 1 + (seed * 3 + i) % 11))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_wrong_call_fails_as_in_eager() -> None:
    module = Reorder().eval()
    compiled = oxidiff.compile(module)
    run(compiled, module, *reorder_call(5, 9))
    image, text, _ = reorder_call(5, 9)
    with torch.no_grad(), pytest.raises(IndexError, match="mask"):
        compiled(image, text, mask_of(5, 9, words=15))
    run(compiled, module, *reorder_call(5, 9))


class Anything(nn.Module):
    """Calls a function of whatever it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


def same_as_eager(function: Callable[..., Any], *calls: tuple[Any, ...]) -> Any:
    """The report after calls, each of which gives what eager does."""
    module = Anything(function).eval()
    compiled = oxidiff.compile(module, cache=False)
    with torch.no_grad():
        for arguments in calls:
            actual, expected = compiled(*arguments), module(*arguments)
            torch.testing.assert_close(actual, expected, equal_nan=True)
            assert type(actual) is type(expected)
    return oxidiff.report(compiled)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m, n: x[:, (m[0].cumsum(0) > n).nonzero().flatten()],
        lambda x, m, n: x * (m.float() * n).sum().item(),
        lambda x, m, n: x * (m.cumsum(1) // n).sum().item(),
        lambda x, m, n: x * (m > m.sum().item() / (50 * n)).sum().item() + n,
    ],
    ids=["compared", "scaled", "divided", "by_answer"],
)
@pytest.mark.parametrize("numbers", [(3, 5, 2, 1), (3.5, 5.5, 1.0, 2.25)], ids=["ints", "floats"])
def test_numbers_on_the_way_to_an_answer(function: Callable[..., Tensor], numbers: tuple[float, ...]) -> None:
    x = data(2, WORDS, 8)
    calls = [(x, mask_of(7 + i, 9 - i), n) for n in numbers for i in (0, 2)]
    assert same_as_eager(function, *calls).eager_calls == 0


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor], ids=["tensor", "as_tensor"])
def test_tensors_are_made_of_numbers_in_others(make: Callable[..., Tensor]) -> None:
    def function(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        counts = mask.sum(1)
        return x * make([counts[0], 2 * counts[1]]).sum(), make([[counts[0]], [3]])

    x = data(2, WORDS, 8)
    report = same_as_eager(function, *((x, mask_of(*c)) for c in ((3, 5), (3, 3), (6, 2))))
    assert (report.eager_calls, report.captures) == (0, 1)


def test_an_answer_on_the_way_to_another() -> None:
    def function(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        one, other = mask.sum(1).tolist()
        ids = torch.arange(x.shape[1])
        return x[:, (ids >= one).nonzero().flatten()], x[:, (ids >= other).nonzero().flatten()] * 3

    x = data(2, WORDS, 8)
    counts = ((3, 5), (3, 3), (5, 3), (6, 6), (3, 5))
    assert same_as_eager(function, *((x, mask_of(*c)) for c in counts)).eager_calls == 0


def test_questions_that_differ_in_a_dtype_are_two() -> None:
    def function(x: Tensor, m: Tensor) -> Any:
        small = (m[0, :3].to(torch.int8) + torch.tensor([1, 2, 3], dtype=torch.int8) * 100).sum().item()
        large = (m[0, :3].to(torch.int8) + torch.tensor([1, 2, 3], dtype=torch.int64) * 100).sum().item()
        whole, real = (m[0, :1] * torch.tensor(2)).sum().item(), (m[0, :1] * torch.tensor(2.0)).sum().item()
        return x * small, x * large, small, large, whole, real

    same_as_eager(function, (data(3), torch.ones(2, 4, dtype=torch.long)))


def test_rows_where_no_place_holds() -> None:
    def copy(x: Tensor, m: Tensor) -> Any:
        z = x * 1
        y = torch.index_put(z, (m,), x[m] * 2)
        y += 1
        return y, z

    x, none = data(2, WORDS, 8), mask_of(0, 0).bool()
    assert same_as_eager(copy, (x, none), (x, mask_of(3, 4).bool()), (x, none)).eager_calls == 0

    def put(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        y = x * 1
        y[m] = v
        return y

    compiled = oxidiff.compile(Anything(put).eval(), cache=False)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shape mismatch"):
                compiled(x, none, data(5, 8))
            compiled(x, mask_of(3, 2).bool(), data(5, 8))


@torch.no_grad()
def test_empty_parts_of_another_shape_are_an_error() -> None:
    for other in ((2, 0, 5), (0, 5, 8)):
        compiled = oxidiff.compile(Anything(lambda x, other=other: torch.cat([x, x.new_zeros(other)], 1)).eval())
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            compiled(data(2, WORDS, 8))


def test_the_bits_of_integers_are_no_opposite() -> None:
    whole = torch.tensor([[0, 1, -1, 2, -1, 0, 0, 1]])
    report = same_as_eager(lambda x, m: (m.nonzero(), (~m).nonzero(), x * 2), (data(2), whole), (data(2), whole - 1))
    assert report.fallbacks == []


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_numbers_that_are_not_finite() -> None:
    """Such a call runs eager; others do not."""

    def function(x: Tensor, m: Tensor) -> Tensor:
        share = (m.float().sum() / m[:, 0].float().sum()).item()
        return x * share if share > 3 else x - share

    x, none, some = data(2, WORDS, 8), mask_of(0, 0), mask_of(9, 5)
    report = same_as_eager(function, (x, none), (x, some), (x, none), (x, some), (x, mask_of(1, 1)))
    assert not any("internal" in f["reason"] for f in report.fallbacks)
    assert report.captures >= 1 and report.programs >= 1
    passed = same_as_eager(lambda x, n: x * n, (x, float("nan")), (x, float("inf")), (x, 2.0))
    assert not any("internal" in f["reason"] for f in passed.fallbacks)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_numbers_that_are_complex_are_none() -> None:
    report = same_as_eager(
        lambda x, m: x * torch.complex(m.float(), m.float()).sum().item().real, (data(3), mask_of(3, 4))
    )
    assert not any("internal" in f["reason"] for f in report.fallbacks)


def test_computed_numbers_on_the_way_to_an_answer() -> None:
    def function(x: Tensor, m: Tensor) -> Tensor:
        return x[:, (m[0].cumsum(0).float() > (x.shape[1] * 2) ** 0.5).nonzero().flatten()]

    calls = [(data(2, words, 8), mask_of(words, 3, words=words)) for words in (12, 20, 33)]
    report = same_as_eager(function, *calls)
    assert (report.captures, report.fallbacks) == (1, [])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_what_is_another_program_each_time_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxidiff.entries._MAX_READ", 4)
    monkeypatch.setattr("oxidiff.entries.MAX_KEYS", 8)
    module = Anything(lambda x, m: x * (int(m.float().mean().item() * 1000) % 3) * m.sum().item()).eval()
    compiled = oxidiff.compile(module, cache=False)
    for i in range(30):
        mask = mask_of(i % 11, i % 7, words=WORDS + 1)
        torch.testing.assert_close(compiled(data(3), mask), module(data(3), mask))
    report = oxidiff.report(compiled)
    assert any("another program nearly each time" in f["reason"] for f in report.fallbacks)
    assert report.eager_calls == 0


def test_answers_are_arguments_that_are_named() -> None:
    graph = capture(Reorder().eval(), reorder_call(5, 9))
    assert [item.label for item in graph.inputs][:4] == ["image", "text", "mask", "what forward reads[0]"]
    capturer = Capturer(Reorder().eval())
    call = capturer.call(reorder_call(5, 9), {})
    assert graph.call_key == call.key != graph.key


@torch.no_grad()
def test_warmup_of_other_batches_has_masks_as_the_example() -> None:
    module = Attend().eval()
    compiled = oxidiff.compile(module)
    oxidiff.warmup(compiled, *reorder_call(5), shapes=[(3, 20, 8)])
    captures = oxidiff.report(compiled).captures
    for counts in ((6,), (4, 7, 9)):
        run(compiled, module, *reorder_call(*counts))
    assert oxidiff.report(compiled).captures == captures == 2


def test_profile_and_explain() -> None:
    module = Attend().eval()
    compiled = oxidiff.compile(module)
    run(compiled, module, *reorder_call(5, 9))
    image, text, mask = reorder_call(3, 8)
    with torch.no_grad():
        profile = oxidiff.profile(compiled, image, text, mask)
    assert sum(step["flops"] for step in profile.to_dict()["steps"]) > 0
    assert "what forward reads[0]" in str(oxidiff.explain(compiled))
