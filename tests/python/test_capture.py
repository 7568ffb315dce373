"""Capturing: one graph for every size, what selects a program, and what cannot be captured.

Graphs are judged by *replaying* them: their ATen nodes are run with torch at other sizes and compared with the module.
"""

import contextlib
import copy
import functools
import gc
import inspect
import os
import subprocess
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oxidiff import testing
from oxidiff._native import GraphBuilder
from oxidiff.capture import CaptureError, Capturer, Dim, Ref, UnsupportedError, capture, is_tracing, trials
from oxidiff.capture import following as stand_ins
from oxidiff.capture.graph import number_at


def replay(graph, root, call):
    """Runs the graph's nodes with torch."""
    point = graph.plan.read(call.sizes)
    assert point is not None, "the call does not fit the graph's sizes"
    values = {}

    def resolve(item):
        if isinstance(item, Ref):
            return values[item.value]
        if isinstance(item, Dim):
            return number_at(item, point)
        if isinstance(item, tuple):
            return [resolve(i) for i in item]
        return item

    tensors = iter(call.tensors)
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "input":
                results = next(tensors)
            elif node.op == "weight":
                results = graph.weights[node.args[0]].fetch(root)
            elif node.op == "extern":
                results = graph.externs[node.args[0]]
            elif node.op == "constant":
                value = graph.values[node.outputs[0]]
                elements = [resolve(a) for a in node.args]
                results = torch.tensor(elements, dtype=value.dtype).reshape([resolve(s) for s in value.shape])
            else:
                if node.op is torch.ops.aten.view.default:
                    results = resolve(node.args[0]).reshape(resolve(node.args[1]))
                else:
                    results = node.op(*map(resolve, node.args), **{k: resolve(v) for k, v in node.kwargs.items()})
            for number, result in zip(
                node.outputs, [results] if isinstance(results, torch.Tensor) else results, strict=True
            ):
                declared = graph.values[number]
                assert result.dtype is declared.dtype
                assert list(result.shape) == [resolve(s) for s in declared.shape]
                values[number] = result
    outputs = [values[leaf.value] for leaf in graph.outputs.leaves if leaf.value is not None]
    return graph.outputs.build(outputs, point)


def check_equal(got, wanted):
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    elif isinstance(wanted, dict):
        assert type(got) is type(wanted)
        assert list(got) == list(wanted)
        for key in wanted:
            check_equal(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert type(got) is type(wanted)
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            check_equal(a, b)
    else:
        assert got == wanted


def check_serves(module, *calls):
    """Captures at the first call; the same graph must serve the others, as the module does."""
    capturer = Capturer(module)
    graph = None
    for args, kwargs in calls:
        call = capturer.call(args, kwargs)
        if graph is None:
            graph = capturer.capture(call)
        point = graph.plan.read(call.sizes)
        assert point is not None
        assert graph.accepts(point) or capturer.extend(graph, call)
        with torch.no_grad():
            wanted = module(*args, **kwargs)
        check_equal(replay(graph, capturer.root, call), wanted)
    return graph


def image(b=2, c=4, h=8, w=8):
    return torch.randn(b, c, h, w)


class Net(nn.Module):
    """Down, attention over positions, up: what a UNet does to sizes."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.qkv = nn.Linear(8, 24)
        self.up = nn.Conv2d(8, 4, 3, padding=1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale=1.0, *, return_dict=True):
        size = x.shape[-2:]
        y = F.silu(self.norm(self.down(x)))
        b, c, h, w = y.shape
        q, k, v = self.qkv(y.permute(0, 2, 3, 1).reshape(b, h * w, c)).chunk(3, dim=-1)
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, c, h, w)
        y = self.drop(self.up(F.interpolate(y, size=size, mode="nearest"))) * scale
        return {"sample": y} if return_dict else (y,)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


# -- sizes -----------------------------------------------------------------------------------------------------------------


def test_one_graph_serves_every_size(net):
    graph = check_serves(net, ((image(1),), {}), ((image(3, h=32, w=16),), {}), ((image(1, h=128, w=6),), {}))
    assert graph.traces <= 6
    assert not graph.fixed
    assert {s.role for s in graph.plan.symbols} == {"batch", "spatial", "float"}


@pytest.mark.parametrize("size", [(9, 7), (1, 1), (8, 5), (2, 2), (65, 63)])
def test_odd_and_small_sizes(net, size):
    check_serves(net, ((image(1, 4, *size),), {}), ((image(2, 4, *size),), {}))


def test_another_residue_is_another_class(net):
    capturer = Capturer(net)
    graph = capturer.capture(capturer.call((image(2, h=8, w=8),), {}))
    call = capturer.call((image(2, h=9, w=8),), {})
    point = graph.plan.read(call.sizes)
    assert point is not None
    assert not graph.accepts(point)
    assert not capturer.extend(graph, call), "9 rows give 5, which h/2 does not say"


def test_a_class_is_checked_once(net):
    capturer = Capturer(net)
    graph = capturer.capture(capturer.call((image(2, h=64, w=64),), {}))
    call = capturer.call((image(90, h=640, w=64),), {})
    point = graph.plan.read(call.sizes)
    assert not graph.accepts(point), "beyond all sizes that were traced"
    assert capturer.extend(graph, call)
    assert graph.accepts(point)


def test_a_size_that_selects_the_program_is_fixed():
    def function(x):
        return x * 2 if x.shape[1] == 5 else x * 3

    capturer = Capturer(function)
    graph = capturer.capture(capturer.call((torch.randn(2, 5, 8),), {}))
    assert graph.fixed == ("x",)
    assert graph.plan.read(capturer.call((torch.randn(3, 6, 8),), {}).sizes) is None
    assert graph.plan.read(capturer.call((torch.randn(3, 5, 8),), {}).sizes) is not None


def test_batch_one_does_not_specialise():
    check_serves(lambda x: x.transpose(0, 1).contiguous().view(-1, 8) * 2,
                 ((torch.randn(1, 5, 8),), {}), ((torch.randn(4, 5, 8),), {}))  # fmt: skip


def test_sizes_that_follow_from_others():
    def function(sample, half, cond):
        return F.interpolate(half, scale_factor=2.0) + sample + F.avg_pool2d(cond, 8)

    def args(b, h, w):
        return (image(b, 4, h, w), image(b, 4, h // 2, w // 2), image(b, 4, 8 * h, 8 * w))

    graph = check_serves(function, (args(2, 8, 8), {}), (args(3, 16, 24), {}))
    assert [s.name for s in graph.plan.symbols] == ["b", "h", "w"]


def test_a_slice_that_happens_to_take_all_is_no_other_program():
    table = nn.Embedding(77, 8)

    def function(x):
        return table.weight[None, : x.shape[1]] + x

    graph = check_serves(function, ((torch.randn(2, 77, 8),), {}), ((torch.randn(2, 50, 8),), {}))
    assert not graph.fixed


def test_floats_of_sizes_need_not_be_whole():
    graph = check_serves(lambda x: x * (x.shape[2] / 16), ((image(),), {}), ((image(h=11, w=5),), {}))
    assert set(graph.moduli.values()) == {1}


def test_a_length_that_is_a_product_of_counts():
    def function(tokens, frames, height, width):
        b, _, c = tokens.shape
        return tokens.view(b, frames, height, width, c).mean(dim=1).flatten(1, 2)

    calls = [((torch.randn(2, f * h * w, 5), f, h, w), {}) for f, h, w in ((2, 3, 4), (3, 5, 2))]
    graph = check_serves(function, *calls)
    assert not graph.fixed


@pytest.mark.parametrize("patch", [1, 2], ids=["pixels", "patches"])
def test_lengths_that_follow_from_the_edges_of_an_image(patch):
    """As position tables do that the caller makes: nothing but their length says so."""

    def function(image, table, rows):
        h, w = image.shape[-2:]
        tokens = image.unflatten(2, (h // patch, patch)).unflatten(4, (w // patch, patch)).mean(dim=(3, 5)).flatten(2)
        return tokens.transpose(1, 2) + table + rows.mean()

    calls = []
    for b, h, w in ((2, 12, 20), (3, 8, 28)):
        table = torch.randn(h * w // patch**2, 4)
        calls.append(((image(b, 4, h, w), table, torch.randn(h // patch, 4)), {}))
    graph = check_serves(function, *calls)
    assert not graph.fixed
    assert [s.name for s in graph.plan.symbols][:3] == ["b", "h", "w"]


def test_a_length_with_a_token_more():
    def function(tokens, table):
        return torch.cat([tokens.mean(dim=1, keepdim=True), tokens], dim=1) + table

    calls = [((torch.randn(b, n, 4), torch.randn(n + 1, 4)), {}) for b, n in ((2, 17), (3, 29))]
    assert not check_serves(function, *calls).fixed


def test_tokens_of_several_images_per_sample():
    calls = [((torch.randn(b, 5, 8), torch.randn(2 * b, 3, 8)), {}) for b in (2, 3)]
    graph = check_serves(lambda x, y: torch.cat([x, y.view(-1, 6, 8)], dim=1), *calls)
    assert [s.name for s in graph.plan.symbols] == ["b", "s"]


def beside_the_longest_side(x, sides, words):
    """Words are placed behind the longest of all sides, halved, as text in a sequence with images."""
    longest = 0
    for h, w in sides:
        longest = max(h // 2, w // 2, longest)
    rows = torch.arange(4096.0)
    return x * rows[: sides[0][0]].sum(), words + rows[longest : longest + words.shape[1], None]


@pytest.mark.parametrize("first", [[(4, 4)], [(6, 4)], [(4, 6)], [(30, 77)], [(4, 4), (12, 6)], [(40, 10), (12, 60)]])
def test_the_longest_side_may_be_any(first):
    def call(words, sides):
        return (torch.randn(2, 3), sides, torch.randn(2, words, 4)), {}

    others = [[(20, 8), (6, 4)], [(7, 20), (6, 4)], [(8, 9), (31, 4)], [(9, 9), (2, 37)], [(11, 11), (10, 11)]]
    calls = [call(words, sides[: len(first)]) for words, sides in zip((7, 9, 31, 8, 40), others, strict=True)]
    graph = check_serves(beside_the_longest_side, call(7, first), *calls)
    assert not graph.fixed
    assert graph.traces <= 20


def test_what_must_be_known_is_what_it_is_made_of():
    """Half of an int is a number of its own, and none that the compiler can have as one."""

    def padded(x, y, n):
        return F.conv2d(x, torch.ones(2, 2, 1, 1), padding=n // 2), torch.arange(90.0)[n // 4 : n // 4 + y.shape[1]]

    for n in (4, 7):
        args = torch.randn(1, 2, 4, 6), torch.randn(2, 9), n
        module = Capturer(padded)
        graph, _ = module.lowered(module.call(args, {}), GraphBuilder)
        assert graph.fixed == ("n",)
        check_equal(replay(graph, None, module.call(args, {})), padded(*args))


@pytest.mark.parametrize("first", [(6, 4), (4, 6), (5, 5), (300, 20), (20, 300), (50, 199)])
@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("rows", [4096, 600])
def test_which_of_two_numbers_is_larger_is_seen(first, between, rows):
    """Whatever the first call's are, its graph does not serve those of the other order; nor where there are not rows enough
    to find out about all, so that a number becomes a constant."""
    table = torch.randn(rows, 4)
    capturer = Capturer(lambda x, h, others, w: x + table[max(h, w)])
    x = torch.randn(2, 4)
    others = [2] * between
    graph = capturer.capture(capturer.call((x, first[0], others, first[1]), {}))
    for sides in (
        (9, 7),
        (7, 9),
        (31, 8),
        (8, 31),
        (12, 12),
        (first[0], 400),
        (first[0], 3),
        (400, first[1]),
        (3, first[1]),
    ):
        call = capturer.call((x, sides[0], others, sides[1]), {})
        point = graph.plan.read(call.sizes)
        if point is None:
            assert rows == 600, "the sides are free"
            continue
        is_right = max(sides) in graph.numbers_at(point)
        assert is_right or not (graph.accepts(point) or capturer.extend(graph, call))
        assert is_right or rows == 600 or (first[0] > first[1]) != (sides[0] > sides[1])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_table_has_a_row_more_than_samples(batch, is_cut):
    """At batch 1 either fits whatever the other is: both together show that they do not."""

    def function(x, table, fixed):
        # What another size that is not free has to do with it is found out first.
        x = torch.cat([x, fixed], 1) if is_cut else x
        return x * table[:-1].unsqueeze(1) + table[-1:].unsqueeze(0)

    def call(batch, length):
        return capturer.call((torch.randn(batch, length, 8), torch.randn(batch + 1, 8), torch.randn(batch, 9, 8)), {})

    capturer = Capturer(function)
    graph = capturer.capture(call(batch, 20))
    assert graph.fixed == ()
    for sizes in ((1, 30), (5, 20), (3, 17)):
        given = call(*sizes)
        point = graph.plan.read(given.sizes)
        assert point is not None and (graph.accepts(point) or capturer.extend(graph, given)), sizes
        check_equal(replay(graph, None, given), function(*given.tensors))
    one, other = call(3, 7).tensors[0], call(4, 7).tensors[1:]
    assert graph.plan.read(capturer.call((one, *other), {}).sizes) is None, "as many rows as samples and another"


def test_numbers_of_several_images_in_one_sequence():
    """Their tokens are as many as the patches of all."""

    def function(tokens, shapes):
        grids = [torch.arange(h * w) / w for h, w in shapes]
        return tokens + torch.cat(grids)[:, None]

    calls = []
    for shapes in ([(4, 6), (2, 8)], [(6, 12), (4, 10)]):
        calls.append(((torch.randn(2, sum(h * w for h, w in shapes), 4), shapes), {}))
    assert not check_serves(function, *calls).fixed


@pytest.mark.parametrize("patch", [0, 2], ids=["tokens", "patches"])
def test_a_mask_over_text_and_image(patch):
    """Its length is the sum of two that are not free alone either."""

    def function(text, image, mask):
        tokens = image[:, :, ::patch, ::patch].flatten(2).transpose(1, 2) if patch else image
        return torch.cat([text, tokens], dim=1) * mask.unsqueeze(-1)

    calls = []
    for b, n, h, w in ((2, 17, 12, 20), (3, 29, 8, 28)):
        x = image(b, 4, h, w) if patch else torch.randn(b, h * w, 4)
        tokens = h * w // patch**2 if patch else h * w
        calls.append(((torch.randn(b, n, 4), x, torch.randint(2, (b, n + tokens))), {}))
    assert not check_serves(function, *calls).fixed


def test_coordinates_have_a_column_per_token():
    def function(tokens, coordinates):
        return tokens + coordinates.sum(dim=1).unsqueeze(-1)

    calls = [((torch.randn(b, n, 8), torch.randn(b, 3, n)), {}) for b, n in ((2, 17), (3, 29))]
    assert not check_serves(function, *calls).fixed


class Clips(nn.Module):
    """Clips and the indices of their frames, which meet once all are in one sequence."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(in_channels=4)
        self.out = nn.Linear(4, 6)

    def forward(self, one, other, third, of_one, of_other, of_third):
        h, w = one.shape[-2:]
        x, angles = one.flatten(2), of_one[:, None].expand(-1, h * w).flatten()
        for clip, indices in ((other, of_other), (third, of_third)):
            x = torch.cat([x, clip.flatten(2)], dim=2)
            angles = torch.cat([angles, indices[:, None].expand(-1, h * w).flatten()])
        return self.out(x.transpose(1, 2) * angles.to(x.dtype)[:, None].cos())


def padded_words(x, words):
    """The words are padded to a multiple of 16, which shows as a number."""
    words = F.pad(words, (0, 0, 0, -words.shape[1] % 16))
    return x.mean((2, 3))[:, None] + words[..., :1].cumsum(1)


def counted_tokens(x, words, frames):
    """Half of an int, and the larger of it and a constant."""
    grid = torch.arange(max(frames, 3), dtype=torch.float32).cos()
    return x.mean() + words.sum(2), grid[: frames // 2], words[:, :1] * frames


@pytest.mark.parametrize(
    ("function", "args", "most"),
    [
        pytest.param(padded_words, (torch.randn(2, 4, 12, 20), torch.randn(2, 7, 8)), 12, id="padded"),
        pytest.param(counted_tokens, (torch.randn(2, 4, 12, 20), torch.randn(2, 7, 8), 9), 12, id="counted"),
    ],
)
def test_each_size_is_traced_once(function, args, most, monkeypatch):
    """What decides a number that cannot be solved is looked for with what is traced anyway."""
    taken = []
    trace_at = trials.Trials.trace_at

    def noted(self, point):
        taken.append(tuple(self.plan.sizes(point)))
        return trace_at(self, point)

    monkeypatch.setattr(trials.Trials, "trace_at", noted)
    graph = capture(function, args)
    assert not graph.fixed
    assert len(set(taken)) == len(taken) <= most


def test_a_graph_that_is_cut_is_not_captured_again(monkeypatch):
    """Known are the graphs of a call that were captured, whatever is made of them."""
    traces = []
    trace = trials.trace
    monkeypatch.setattr(trials, "trace", lambda *args, **given: traces.append(args) or trace(*args, **given))
    module = Capturer(lambda x: torch.linalg.qr(x * 2).Q + 1)
    call, known = module.call((torch.randn(2, 5, 5),), {}), {}
    with pytest.raises(UnsupportedError, match="qr"):
        module.lowered(call, GraphBuilder, known)
    count = len(traces)
    graph, stages = module.staged(call, GraphBuilder, known)
    assert len(traces) == count > 0
    assert any(stage.eager for stage in stages)
    assert [*known.values()] == [graph]


def test_a_failed_trial_says_where_others_fail():
    """All guesses of which number of frames goes with which fail in one op: which of them do is known after a few."""

    def call(b, frames, h, w):
        return (*(torch.randn(b, 4, f, h, w) for f in frames), *(torch.arange(f) for f in frames)), {}

    module = Clips()
    graph = check_serves(module, call(2, (3, 5, 9), 6, 10), call(1, (2, 4, 7), 5, 3), call(3, (6, 3, 11), 8, 6))
    assert graph.traces <= 20
    assert not graph.fixed


def test_a_table_that_is_long_enough_for_the_call_is_for_less():
    """An op at which longer texts fail says nothing of shorter ones."""
    table = torch.randn(77, 8)

    def function(other, x):
        return other * 2, x + table[: x.shape[1]]

    calls = [((torch.randn(b, m, 8), torch.randn(b, n, 8)), {}) for b, n, m in ((1, 77, 19), (2, 40, 33), (3, 5, 100))]
    graph = check_serves(function, *calls)
    assert not graph.fixed


def test_static_when_asked(net):
    graph = capture(net, (image(2),), dynamic=False)
    assert graph.traces == 1
    assert not graph.plan.symbols


def test_tables_that_depend_on_the_size_are_recomputed():
    def function(x):
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.arange(x.shape[2])
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1)[:, : x.shape[2]]

    check_serves(function, ((torch.randn(2, 5, 8),), {}), ((torch.randn(2, 11, 8),), {}))


# -- numbers ---------------------------------------------------------------------------------------------------------------


def test_numbers_that_are_computed_with_are_free():
    def function(x, timestep, scale):
        t = torch.tensor([timestep], dtype=torch.float32)
        return x * scale + (1 - scale) * t

    calls = [((image(), t, s), {}) for t, s in ((5, 0.3), (981, 0.7), (0, 1.0))]
    graph = check_serves(function, *calls)
    assert {s.role for s in graph.plan.symbols} >= {"int", "float"}


def test_a_number_that_selects_the_program_is_fixed():
    graph = capture(lambda x, n: x * 2 if n > 10 else x * n, (image(), 3))
    assert graph.fixed == ("n",)


def test_a_count_may_be_a_size():
    check_serves(lambda x, n: x.repeat(n, 1, 1, 1), ((image(), 2), {}), ((image(), 5), {}))


def test_flags_select(net):
    capturer = Capturer(net)
    x = image()
    keys = {capturer.call((x,), {"return_dict": flag}).key for flag in (True, False)}
    assert len(keys) == 2
    assert capturer.call((x,), {}).key == capturer.call((), {"x": x, "return_dict": True}).key
    assert capturer.call((x, 1.0), {}).key == capturer.call((x,), {"scale": 2.0}).key


def test_what_is_part_of_the_key():
    capturer = Capturer(lambda x, extra=None, mode="a": x)
    x = image()
    keys = [
        capturer.call(args, {}).key
        for args in [(x,), (x, x), (x, {"k": x}), (x, {"j": x}), (x, [x]), (x, (x,)), (x, None, "b"), (x.half(),),
                     (x[0],), (x.to(memory_format=torch.channels_last),), (x, 1), (x, 1.0), (x, True)]
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_arguments_that_do_not_fit_raise_type_error(net):
    capturer = Capturer(net)
    for args, kwargs in (((), {}), ((image(), 1.0, 3), {}), ((image(),), {"x": image()}), ((image(),), {"nope": 1})):
        with pytest.raises(TypeError):
            capturer.call(args, kwargs)


# -- weights and constants -------------------------------------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 1))
        self.tied = self.weight
        self.register_buffer("table", torch.randn(4, 1, 1), persistent=False)
        self.plain = torch.randn(4, 1, 1)
        self.nested = {"k": [torch.randn(4, 1, 1)]}

    def forward(self, x):
        return x * self.weight + self.tied * self.table + self.plain + self.nested["k"][0]


def test_weights_go_by_name_and_once():
    module = Held()
    graph = check_serves(module, ((image(),), {}))
    assert list(graph.weights) == ["weight", "table", "plain", "nested['k'][0]"]
    assert [slot.kind for slot in graph.weights.values()] == ["parameter", "buffer", "attribute", "attribute"]
    assert graph.weights["nested['k'][0]"].fetch(module) is module.nested["k"][0]
    module.weight = nn.Parameter(torch.zeros(4, 1, 1))
    assert graph.weights["weight"].fetch(module) is module.weight


def test_tensors_of_closures_are_held_by_reference():
    table = torch.randn(8)
    graph = check_serves(lambda x: x * table, ((torch.randn(2, 3, 8),), {}))
    assert graph.externs[0] is table


def test_same_graph_for_other_weights(net):
    other = Net().eval()
    assert str(capture(net, (image(),))) == str(capture(other, (image(),)))


def test_paths_name_the_submodule(net):
    graph = capture(net, (image(),))
    assert {"", "down", "norm", "qkv", "up"} == {node.path for node in graph.nodes if not isinstance(node.op, str)}


# -- results ---------------------------------------------------------------------------------------------------------------


def test_structures_of_results():
    check_serves(lambda x: x * 2, ((image(),), {}))
    check_serves(lambda x: {"a": x * 2, "b": None, "c": [x + 1, "text", 3, 2.5, True]}, ((image(),), {}))
    check_serves(lambda x: (x * 2, x.shape[2], x.shape[3] // 2), ((image(),), {}), ((image(h=16, w=32),), {}))
    check_serves(lambda x: (x, x[0]), ((image(),), {}))


def test_a_returned_argument_is_known():
    graph = capture(lambda x, y: (y, x * 1), (image(), image()))
    assert [leaf.input for leaf in graph.outputs.leaves] == [1, None]


def test_ops_that_give_their_argument_back():
    check_serves(lambda x, t: x * t.flatten()[:, None], ((torch.randn(2, 3), torch.randn(2)), {}))


def test_memory_order_of_results():
    graph = capture(lambda x: (x.permute(0, 2, 3, 1), x * 2), (image(),))
    assert [leaf.order for leaf in graph.outputs.leaves] == [(0, 3, 1, 2), (0, 1, 2, 3)]


# -- in place --------------------------------------------------------------------------------------------------------------


def write_slices(x):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 1::2]
    out[..., 1::2] = -x[..., 0::2]
    return out


def write_views(x):
    y = x * 1
    before = y * 1
    row, flat = y[:, 1], y.view(y.shape[0], -1)
    row.add_(1)
    flat[:, :3].mul_(2)
    y.transpose(2, 3)[:, 0].fill_(0.5)
    y.chunk(2, dim=1)[1].sub_(3)
    y += 1
    return before, y, row, flat, y.unbind(1)[2]


def write_copies(x):
    kept = x.clone()
    kept.zero_()
    detached = (x * 2).detach()
    detached.add_(1)
    return kept, detached, x


def write_by_index(x):
    y = x * 1
    y[:, :4] = 5
    y[..., 0] = x[..., 1]
    y[0, None, 1:3] = x[1, 1:3]
    y[:] = y + 1
    y[-1, ..., ::2] = 7
    y[x > 0] = 0.5
    return y, y[...], y[1], y[None, :, 1:100], y[:, None, ..., 1:-1, -2], y[:, [1, 0]]


def change_shapes(x):
    y = x * 2
    y.unsqueeze_(1)
    z = y + 1
    z.transpose_(0, 1)
    w = z[0].clone()
    w.squeeze_(0)
    return y, z, w, y.shape[2] * x


@pytest.mark.parametrize("function", [write_slices, write_views, write_copies, write_by_index, change_shapes])
def test_in_place(function):
    check_serves(function, ((image(),), {}), ((image(3, h=16, w=6),), {}))


# -- what cannot be captured -----------------------------------------------------------------------------------------------


class Cache(nn.Module):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = x * 2
        return x + self.kept


class Counter(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


class Appender(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        y = x * 2
        self.seen.append(y)
        return y


class WritesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        self.weight.data.add_(1)
        return x * self.weight


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x if (x * self.weight).sum() > 0 else -x


class Failing(nn.Module):
    def forward(self, x):
        raise KeyError("own error")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            lambda x: x + torch.randn(3, generator=torch.Generator().manual_seed(0)).sum(),
            "a generator that it is given",
        ),
        (lambda x: x if torch.rand(1) < 0.5 else -x, "depends on the values"),
        (lambda x: x.transpose(1, 2).exp().as_strided((2, 2), (2, 1)), "not contiguous"),
        (lambda x: torch.dropout(x, 0.5, True), "random in training"),
        (Routed(), "depends on the values"),
        (lambda x: x if torch.allclose(x, -x) else -x, "depends on the values"),
        (lambda x: torch.from_numpy(x.numpy()), "numpy"),
        (lambda x: x.unsqueeze_(0), "a tensor that others see"),
        (lambda x: [y := x * 2, y[0], y.unsqueeze_(0)][1:], "a tensor that others see"),
        (nn.BatchNorm2d(4), "writes into num_batches_tracked"),
        (WritesWeight(), "writes into weight"),
        (Cache(), "keeps a tensor in the attribute kept"),
        (Counter(), "changes the attribute calls"),
        (Appender(), "keeps state"),
        (Failing(), "KeyError"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals_say_why(module, reason):
    with pytest.raises(CaptureError, match=reason):
        capture(module, (image(),))


def _set_data(module, x):
    z = torch.ones(4)
    z.data = x[0] * 3
    return z


class Catching(nn.Module):
    """Goes on another way after whatever is raised."""

    def __init__(self, function, way="except"):
        super().__init__()
        self.function, self.way, self.calls = function, way, 0
        self.weight = nn.Parameter(torch.ones(4))
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("buffer", torch.ones(4))

    def forward(self, x):
        if self.way == "none":
            return x * self.function(self, x)
        if self.way == "suppress":
            with contextlib.suppress(RuntimeError):
                return x * self.function(self, x)
            return x - 1
        try:
            return x * self.function(self, x)
        except RuntimeError as error:
            if self.way == "another":
                raise ValueError("forward's own") from error
            if self.way == "inside":
                return x * self.function(self, x)
            return x - 1


REFUSED = {
    "a value": lambda module, x: float(module.weight.sum()),
    "a flag": lambda module, x: 2 if (module.weight > 0).all() else 3,
    "a list": lambda module, x: sum(module.inner.weight.tolist()[0]),
    "an address": lambda module, x: 2 if x.data_ptr() else 3,
    "a seed": lambda module, x: torch.initial_seed() % 2,
    "data": _set_data,
    "a weight": lambda module, x: module.weight.add_(1),
    "a view": lambda module, x: x.clone().unfold(0, 2, 1).add_(1).sum(),
    "a generator": lambda module, x: torch.rand(4, generator=torch.Generator().manual_seed(1)),
    "a random op in a submodule": lambda module, x: module.drop(x),
    "numpy": lambda module, x: float(module.weight.detach().numpy().mean()),
}


OF_META = {
    "numpy": lambda module, x: float(x.numpy().mean()),
    "a copy": lambda module, x: copy.deepcopy(module.buffer) * 2,
    "a sparse tensor": lambda module, x: module.weight.to_sparse().to_dense() * 2,
    "memory": lambda module, x: torch.from_dlpack(x) * 2,
}


@pytest.mark.parametrize("name", OF_META)
@pytest.mark.parametrize("way", ["none", "except", "another"])
def test_what_torch_raises_of_meta_tensors_is_refused_where_forward_catches_it(name, way):
    def function(module, x):
        try:
            return OF_META[name](module, x)
        except (TypeError, ValueError) as error:
            raise RuntimeError("another") from error

    with pytest.raises(CaptureError, match=r"tracing failed: \w+: "):
        capture(Catching(OF_META[name] if way == "none" else function, way), (image(2, 3, 4, 4),))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["except", "suppress", "another", "inside"])
def test_what_forward_catches_is_refused_all_the_same(name, way):
    reasons = []
    for module in (Catching(REFUSED[name], "none"), Catching(REFUSED[name], way)):
        with pytest.raises(CaptureError) as caught:
            capture(module, (image(2, 3, 4, 4),))
        reasons.append((str(caught.value), caught.value.module, caught.value.op, type(caught.value)))
    assert reasons[0] == reasons[1]


def test_what_forward_catches_leaves_nothing_to_collect(monkeypatch):
    collected = {}
    for way in ("none", "except", "another"):
        with monkeypatch.context() as patch:
            collected[way] = []
            patch.setattr("oxidiff.capture.trace.gc.collect", lambda *which, way=way: collected[way].append(which))
            with pytest.raises(CaptureError):
                capture(Catching(REFUSED["a value"], way), (image(2, 3, 4, 4),))
    assert collected["none"] == collected["except"] == collected["another"]


def test_refusals_name_the_place():
    module = nn.Sequential(nn.Identity(), nn.ModuleDict({"inner": nn.Identity()}), nn.Dropout(0.5))
    module[1].forward = lambda x: x
    with pytest.raises(CaptureError, match=r"^in 2: aten.dropout") as caught:
        capture(module, (image(),))
    assert caught.value.module == "2"
    assert "dropout" in caught.value.op


def test_empty_tensors_are_refused(net):
    with pytest.raises(CaptureError, match="size 0"):
        capture(net, (image(0),))


# -- nothing is left behind ------------------------------------------------------------------------------------------------


def test_refused_modules_are_as_before():
    cache, counter, appender, writes = Cache(), Counter(), Appender(), WritesWeight()
    for module in (cache, counter, appender, writes):
        with pytest.raises(CaptureError):
            capture(module, (image(),))
    assert cache.kept is None
    assert counter.calls == 0
    assert appender.seen == []
    assert torch.equal(writes.weight, torch.ones(4, 1, 1))


def test_lazy_set_up_is_no_state():
    class Lazy(nn.Module):
        ready = False

        def forward(self, x):
            self.ready = True
            return x * 2

    module = Lazy()
    check_serves(module, ((image(),), {}))


class Box:
    """What no graph can return."""


class Listening(nn.Module):
    """Installs a hook at its first call, as models of transformers do that give their hidden states."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.listens = False

    def forward(self, x):
        if not self.listens:
            self.inner.register_forward_hook(lambda module, args, result: result + 1)
            self.listens = True
        self.inner(x)
        return Box()


def test_a_refused_module_has_no_hook_twice():
    module = Listening()
    for _ in range(2):
        with pytest.raises(CaptureError):
            capture(module, (image(),))
    assert not module.listens
    assert not module.inner._forward_hooks
    module(image())
    assert len(module.inner._forward_hooks) == 1


@functools.lru_cache
def cached_table(n):
    return torch.arange(n) * 2


class CachedMethod(nn.Module):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, n):
        return torch.arange(n) * 2

    def forward(self, x):
        return x * self.table(x.shape[-1])


def cached_by_a_wrapper(function):
    """As diffusers wraps ``lru_cache``, to pass it by where it compiles."""
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def asked(*args):
        return cached(*args)

    return asked


class WrappedCache(nn.Module):
    """Keeps parts of a tensor in an attribute."""

    def __init__(self):
        super().__init__()
        self.numbers = torch.arange(64) * 2

    @cached_by_a_wrapper
    def table(self, n):
        return self.numbers[:n]

    def forward(self, x):
        return x * self.table(x.shape[-1])


@pytest.mark.parametrize(
    "module",
    [CachedMethod(), WrappedCache(), lambda x: x * cached_table(x.shape[-1])],
    ids=["method", "wrapped", "function"],
)
def test_caches_do_not_keep_meta_tensors(module):
    x = torch.randn(2, 3, 8)
    module(x)
    check_serves(module, ((x,), {}), ((torch.randn(5, 3, 8),), {}))
    assert not module(x).is_meta


def test_other_threads_find_nothing_of_a_trace_in_a_cache():
    """Nor does a trace empty a cache."""
    kept = []

    class Asking(CachedMethod):
        def forward(self, x):
            asked = threading.Thread(target=lambda: kept.append((self.table(8), cached_table(8))))
            asked.start()
            asked.join()
            return super().forward(x) + cached_table(x.shape[-1])

    module = Asking()
    before = module.table(8), cached_table(8)
    capture(module, (torch.randn(2, 3, 8),))
    assert len(kept) > 3
    assert all(tables[0] is before[0] and tables[1] is before[1] for tables in kept)
    assert module.table(8) is before[0]
    assert isinstance(vars(CachedMethod)["table"], functools._lru_cache_wrapper)
    assert isinstance(cached_table, functools._lru_cache_wrapper)


def test_a_part_of_an_attribute_taken_elsewhere():
    module = WrappedCache()
    part = module.numbers[:8]
    with pytest.raises(CaptureError, match=r"a part of inner\.numbers that was taken outside"):
        capture(CallsFunction(module, lambda x: x * part), (torch.randn(3, 8),))


class CallsFunction(nn.Module):
    def __init__(self, inner, function):
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, x):
        return self.inner(self.function(x))


def test_global_state_is_as_before(net):
    call, enabled, grad = nn.Module.__call__, gc.isenabled(), torch.is_grad_enabled()
    capture(net, (image(),))
    with pytest.raises(CaptureError):
        capture(Failing(), (image(),))
    assert nn.Module.__call__ is call
    assert gc.isenabled() is enabled
    assert torch.is_grad_enabled() is grad
    assert not is_tracing()
    assert not any(p.is_meta for p in net.parameters())
    assert not any(p.grad_fn for p in net.parameters())


METHODS = stand_ins._METHODS


def methods_of_modules():
    return [(method, method.__code__) for method in (getattr(nn.Module, name) for name in METHODS)]


def patched_with_variables_around_it():
    make, made = nn.Module.__init__, []

    def initialize(self, *args, **kwargs):
        made.append(self)
        make(self, *args, **kwargs)

    return "__init__", initialize


SET = nn.Module.__setattr__


def patched():
    return "__setattr__", lambda self, name, value: SET(self, name, value)


def patched_with_another():
    return "add_module", nn.Module.register_parameter


@pytest.mark.parametrize("patch", [None, patched, patched_with_variables_around_it, patched_with_another])
def test_methods_of_modules_are_replaced_once_for_a_capture(patch, net, monkeypatch):
    """Where attributes are written for it, each time goes through all classes of modules there are."""
    if patch is not None:
        monkeypatch.setattr(nn.Module, *patch())
    own, made, begun = methods_of_modules(), [], []
    make, begin = stand_ins._stand_ins_of, stand_ins._following.begin
    monkeypatch.setattr(stand_ins._following, "_made", ((), ()))
    monkeypatch.setattr(stand_ins, "_stand_ins_of", lambda *methods: made.append(methods) or make(*methods))
    monkeypatch.setattr(stand_ins._following, "begin", lambda: begun.append(begin()))
    first = capture(net, (image(),))
    assert [[method.__qualname__ for method in methods] for methods in made] == [[m.__qualname__ for m, _ in own]]
    assert len(begun) > 3
    assert methods_of_modules() == own
    with pytest.raises(CaptureError):
        capture(Failing(), (image(),))
    assert methods_of_modules() == own
    assert capture(net, (image(),)).template.is_as(first.template)
    assert len(made) == (1 if patch in (None, patched) else 3), "other code is kept for the next capture"


def test_no_class_of_modules_changes_while_methods_are_followed(net):
    """What looks methods up need not do it anew."""
    watched = []

    class Watching(nn.Module):
        def forward(self, x):
            watched.append([getattr(nn.Module, name) for name in METHODS])
            return x + 1

    own = [getattr(nn.Module, name) for name in METHODS]
    capture(Watching(), (image(),))
    assert watched and all(found == own for found in watched)


class Counting(nn.Module):
    def forward(self, x):
        self.calls = 1
        return x + 1


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_dynamo_follows_methods_of_modules_at_any_time(first):
    """It keeps what parameters a function has for good."""
    dynamo = "import torch; from torch import nn; from test_capture import Counting, stand_ins\n"
    run = "torch._dynamo.reset(); torch.compile(Counting(), backend='eager', fullgraph=True)(torch.ones(2))\n"
    inside = f"with stand_ins.following():\n    stand_ins._following.begin()\n    {run}"
    program = dynamo + (inside + run if first == "inside" else run + inside + run)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_methods_of_modules_keep_their_parameters():
    own = [inspect.signature(getattr(nn.Module, name)) for name in METHODS]
    with stand_ins.following():
        stand_ins._following.begin()
        assert [inspect.signature(getattr(nn.Module, name)) for name in METHODS] == own
        module = nn.Linear(2, 2)
        module.register_buffer("kept", torch.ones(2), persistent=False)
        module.register_forward_hook(lambda *args: None, prepend=True)
    assert "kept" not in module.state_dict()


def test_captures_of_two_threads_keep_what_stands_in_for_methods(net):
    own, seen = methods_of_modules(), []
    inner, outer = stand_ins.following(), stand_ins.following()
    with outer:
        with inner:
            capture(net, (image(),))
            assert methods_of_modules() != own
        # Whoever began last is not who needs it last.
        seen.append(methods_of_modules())
        assert nn.Linear(2, 3)(torch.ones(1, 2)).shape == (1, 3)
    assert seen[0] != own and methods_of_modules() == own


def test_an_interrupt_at_the_end_of_a_capture_leaves_nothing(net, monkeypatch):
    own = methods_of_modules()

    class Interrupted:
        """A lock that is taken at the second attempt."""

        def __init__(self):
            self.lock, self.count = stand_ins.LOCK, 0

        def __enter__(self):
            self.count += 1
            if self.count == 1:
                raise KeyboardInterrupt
            return self.lock.__enter__()

        def __exit__(self, *args):
            return self.lock.__exit__(*args)

    with pytest.raises(KeyboardInterrupt), stand_ins.following():
        capture(net, (image(),))
        monkeypatch.setattr(stand_ins, "LOCK", interrupted := Interrupted())
    assert interrupted.count == 2
    assert methods_of_modules() == own and not stand_ins._following.holders


def test_other_threads_are_not_traced(net):
    other = Net().eval()
    x = image()
    with torch.no_grad():
        wanted = other(x)["sample"]
    stop, wrong = threading.Event(), []

    def work():
        while not stop.is_set():
            with torch.no_grad():
                got = other(x)["sample"]
            if is_tracing() or got.is_meta or not torch.allclose(got, wanted):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        graphs = [capture(net, (x,)) for _ in range(4)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len({str(g) for g in graphs}) == 1


def test_threads_capture_one_after_the_other(net):
    results = []
    threads = [threading.Thread(target=lambda: results.append(str(capture(net, (image(),))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


def test_the_real_device_is_seen():
    def function(x):
        assert x.device.type == "cpu"
        assert x.is_cpu and not x.is_meta and not x.is_cuda
        return x.to("cpu") + torch.zeros(1, device=x.device) + x.new_tensor([1.0])

    check_serves(function, ((image(),), {}))


@pytest.mark.parametrize("layout", [
    lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(2, 3), lambda x: x[:, :, ::2]])  # fmt: skip
def test_layouts_of_arguments(net, layout):
    check_serves(net, ((layout(image()),), {}), ((layout(image(3, h=16, w=16)),), {}))


def test_a_text_encoder_in_inference_mode():
    """It takes a view of its position ids, below autograd: that asks for a version counter, which nothing made in inference
    mode has."""
    module = testing.build("clip-l")
    with torch.inference_mode():
        graph = capture(module, (), testing.example_inputs("clip-l"))
    assert graph.nodes


def test_inference_mode(net):
    with torch.inference_mode():
        check_serves(net, ((image(),), {}))
