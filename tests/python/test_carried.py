"""Tensors that a module keeps in attributes from one call to the next: its calls run compiled, and leave what eager's do."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.testing import assert_close

import oxidiff
from oxidiff import testing


class Attention(nn.Module):
    """Keeps the keys and values of all calls, and counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.keys: Any = None
        self.values: Any = None
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).chunk(3, -1)
        if self.keys is not None:
            key, value = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        self.keys, self.values = key, value
        self.count += x.shape[1]
        return self.out(F.scaled_dot_product_attention(query, key, value)) * (1 + 0.01 * self.count)

    def reset(self) -> None:
        self.keys = self.values = None
        self.count = 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def test_a_set_of_tensors_cannot_keep_what_the_module_resets() -> None:
    compiled: Any = oxidiff.compile(Layers().eval(), cache=False)
    other = Layers().eval()
    compiled.use(compiled.bind(other.state_dict(), "other"))
    x = torch.randn(1, 3, 16)
    # What a first call leaves may be set up once.
    with pytest.warns(oxidiff.FallbackWarning, match="in this call"):
        assert_close(compiled(x), copy.deepcopy(other)(x))
    for _ in range(2):
        with pytest.raises(oxidiff.UnsupportedError, match=r"keep tensors in attributes.*'other'.*module of its own"):
            compiled(x)
    # One of its own has its own.
    compiled.use(compiled.bind(copy.deepcopy(other), "own"))
    expected = copy.deepcopy(other)
    for _ in range(3):
        assert_close(compiled(x), expected(x))


@torch.no_grad()
def test_keys_and_values_in_attributes() -> None:
    eager = Layers().eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    counts = []
    for _ in range(3):
        for one in (*eager.layers, *module.layers):
            one.reset()
        for tokens in (5, 1, 1, 1, 7, 1, 3, 1):
            x = torch.randn(2, tokens, 16)
            assert_close(compiled(x), eager(x))
            for mine, theirs in zip(module.layers, eager.layers, strict=True):
                assert mine.count == theirs.count
                assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
        counts.append(oxidiff.report(compiled).captures)
    report = oxidiff.report(compiled)
    # The first call might set up what all others leave as it is.
    assert report.eager_calls == 1
    assert counts[1] == counts[2], "sizes that were met are captured again"
    assert report.programs <= 4, "with nothing kept and with something, a token and several"


class Keeping(nn.Module):
    """Does ``step`` with what it kept."""

    def __init__(self, step: Callable[[Keeping, Tensor], Tensor], kept: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.step = step
        self.kept = kept
        self.other: Any = None
        self.register_buffer("mean", torch.zeros(8))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def _added(module: Keeping, x: Tensor) -> Tensor:
    return module.linear(x) if module.kept is None else module.linear(x) + module.kept.mean()


def keeps_result(module: Keeping, x: Tensor) -> Tensor:
    module.kept = _added(module, x)
    return module.kept


def keeps_argument(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.kept = x
    return y


def keeps_part_of_argument(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.kept = x[:, -2:]
    return y


def keeps_part_of_result(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.kept = y[:, :2]
    return y


def keeps_copy(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.kept = x[:, -2:].clone()
    return y


def keeps_parts_of_one(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x) + (0.0 if module.other is None else module.other.sum())
    module.kept, module.other = torch.relu(x).chunk(2, -1)
    return y


def keeps_overlapping_parts(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x) + (0.0 if module.other is None else module.other.sum())
    z = torch.relu(x)
    module.kept, module.other = z[..., :5], z[..., 3:]
    return y


def keeps_pair(module: Keeping, x: Tensor) -> Tensor:
    hidden, cell = module.kept or (torch.zeros(8), torch.ones(8))
    module.kept = torch.tanh(hidden + x.mean((0, 1))), torch.sigmoid(cell - x.mean((0, 1)))
    return module.linear(x) * cell + hidden


def keeps_mean(module: Keeping, x: Tensor) -> Tensor:
    module.mean = module.mean * 0.9 + x.mean((0, 1)) * 0.1
    return module.linear(x) + module.mean


def compares_shapes(module: Keeping, x: Tensor) -> Tensor:
    is_alike = module.kept is not None and module.kept.shape == x.shape
    y = module.linear(x - module.kept if is_alike else x)
    module.kept = x.clone()
    return y


def keeps_every_second(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.count += 1
    if module.count % 2:
        module.kept = x * 2
    return y


KEPT = [
    keeps_result,
    keeps_argument,
    keeps_copy,
    keeps_parts_of_one,
    keeps_pair,
    keeps_mean,
    compares_shapes,
    keeps_every_second,
]
SHARED = [keeps_part_of_argument, keeps_part_of_result, keeps_overlapping_parts]


@pytest.mark.parametrize("step", [*KEPT, *SHARED])
@torch.no_grad()
def test_what_is_kept_is_as_in_eager(step: Callable[[Keeping, Tensor], Tensor]) -> None:
    """Also where callers write into arguments and results, and modules into what they kept."""
    eager = Keeping(step).eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    calls = 0
    for tokens in (4, 4, 5, 6, 4, 4):
        x = torch.randn(2, tokens, 8)
        pairs = [(one, x.clone()) for one in (eager, compiled)]
        results = [one(x) for one, x in pairs]
        calls += 1
        assert_close(results[1], results[0])
        for (one, given), y in zip(pairs, results, strict=True):
            given.mul_(0.5)
            y.add_(1.0)
            if calls == 4 and isinstance(one.kept, Tensor):
                one.kept.mul_(2.0)
        for name in ("kept", "other", "mean", "count"):
            assert_close(getattr(module, name), getattr(eager, name))
    eager_calls = oxidiff.report(compiled).eager_calls
    assert eager_calls == (calls if step in SHARED else 2 if step is keeps_every_second else 1)


@pytest.mark.parametrize("sets", [False, True])
@torch.no_grad()
def test_what_an_exception_leaves(sets: bool) -> None:
    def step(module: Keeping, x: Tensor) -> Tensor:
        module.count += 1
        y = _added(module, x)
        if x.shape[1] == 3:
            module.kept = None if sets else module.kept
            raise ValueError("three tokens")
        module.kept = y + 1
        return y

    eager = Keeping(step).eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    for tokens in (4, 4, 5, 3, 4, 3, 5):
        x = torch.randn(2, tokens, 8)
        results = []
        for one in (eager, compiled):
            try:
                results.append(one(x))
            except ValueError as error:
                results.append(str(error))
        assert_close(results[1], results[0]) if tokens != 3 else None
        assert tokens != 3 or results == ["three tokens"] * 2
        assert_close((module.kept, module.count), (eager.kept, eager.count))


@torch.no_grad()
def test_calls_of_threads_take_turns() -> None:
    """No call finds an attribute that another one emptied, and none is lost."""

    def step(module: Keeping, x: Tensor) -> Tensor:
        module.kept = module.kept + x.sum()
        return module.linear(x) + module.kept

    module = Keeping(step, torch.zeros(())).eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for i in range(50):
                compiled(torch.ones(1, 2 + i % 5, 8) / (2 + i % 5))
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        compiled(torch.ones(1, 1, 8))
    threads = [threading.Thread(target=torch.no_grad()(run)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert float(module.kept) == pytest.approx(8 * (2 + 4 * 50), rel=1e-5)


def deletes(module: Keeping, x: Tensor) -> Tensor:
    y = module.linear(x) + (module.kept.mean() if getattr(module, "kept", None) is not None else 0.0)
    module.kept = x * 2
    if x.shape[1] == 5:
        del module.kept
    return y


def keeps_weight(module: Keeping, x: Tensor) -> Tensor:
    y = _added(module, x)
    module.kept = module.linear.weight if x.shape[1] == 5 else x * 2
    return y


@pytest.mark.parametrize("step", [deletes, keeps_weight])
@torch.no_grad()
def test_attributes_that_are_taken_away(step: Callable[[Keeping, Tensor], Tensor]) -> None:
    eager = Keeping(step).eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    # A parameter stays one: torch refuses to put a tensor there.
    for tokens in (4, 4, 6, 4, 5) if step is keeps_weight else (4, 4, 6, 5, 4, 4, 5, 5, 6, 4):
        x = torch.randn(2, tokens, 8)
        assert_close(compiled(x), eager(x))
        assert ("kept" in module.__dict__, "kept" in module._parameters) == (
            "kept" in eager.__dict__,
            "kept" in eager._parameters,
        )
        assert_close(getattr(module, "kept", None), getattr(eager, "kept", None))


@torch.no_grad()
def test_a_module_that_keeps_something_goes_with_its_last_reference() -> None:
    module = Attention().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for _ in range(4):
        compiled(torch.randn(2, 4, 16))
    assert oxidiff.report(compiled).programs
    gone = weakref.ref(module), weakref.ref(module.keys)
    gc.collect()
    gc.disable()
    try:
        del module, compiled
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@torch.no_grad()
def test_a_module_that_is_made_of_others_later() -> None:
    eager = Layers().eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    for step in range(12):
        other: nn.Module
        if step in (4, 6):
            other = Attention().eval() if step == 4 else nn.Linear(16, 16)
            eager.layers[1], module.layers[1] = other, copy.deepcopy(other)
        if step == 9:
            for one in (eager, module):
                one.forward = functools.partial(one.layers[0].forward)  # type: ignore[method-assign]
        x = torch.randn(2, 2, 16)
        assert_close(compiled(x), eager(x))
        for mine, theirs in zip(module.layers, eager.layers, strict=True):
            assert_close(getattr(mine, "keys", None), getattr(theirs, "keys", None))


class Doubling(ModelHook):  # type: ignore[misc]
    """Runs around a module's ``forward``, as those that move weights do."""

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output * 2


def _changed_between_calls(change: Callable[[Layers], Any]) -> None:
    eager = Layers().eval()
    module = copy.deepcopy(eager)
    compiled: Any = oxidiff.compile(module, cache=False)
    for step in range(8):
        if step == 4:
            for one in (eager, module):
                change(one)
        x = torch.randn(2, 2, 16)
        assert_close(compiled(x), eager(x))
        assert_close(module.layers[1].keys, eager.layers[1].keys)


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("of_child", [False, True])
@torch.no_grad()
def test_hooks_run_once(of_child: bool) -> None:
    _changed_between_calls(lambda one: add_hook_to_module(one.layers[1] if of_child else one, Doubling()))


@torch.no_grad()
def test_a_layer_that_is_there_twice_later() -> None:
    def share(one: Layers) -> None:
        one.layers[1] = one.layers[0]

    _changed_between_calls(share)


@torch.no_grad()
def test_looking_at_calls_leaves_what_is_kept() -> None:
    module = Layers().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    x = torch.randn(2, 3, 16)
    for _ in range(3):
        compiled(x)
    keys = module.layers[1].keys
    assert "attention" in str(oxidiff.explain(compiled))
    assert oxidiff.profile(compiled, x) is not None
    assert module.layers[1].keys is keys and keys.shape[1] == 9


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"last": y, "all": [x, torch.relu(y), y]}, x


@torch.no_grad()
def test_a_tensor_that_is_returned_twice_is_one(tmp_path: Path) -> None:
    module = Twice().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for tokens in (4, 4, 5):
        x = torch.randn(2, tokens, 8)
        found, again = compiled(x)
        assert found["last"] is found["all"][2] and found["all"][0] is again is x
        assert_close(found["all"][1], torch.relu(found["last"]))
    oxidiff.save_graph(compiled, tmp_path / "graph")
    loaded: Any = oxidiff.compile(copy.deepcopy(module), cache=False)
    oxidiff.load_graph(loaded, tmp_path / "graph")
    found, again = loaded(x)
    assert found["last"] is found["all"][2] and found["all"][0] is again is x
    assert oxidiff.report(loaded).captures == 0


@torch.no_grad()
def test_an_autoencoder_that_keeps_frames() -> None:
    """EasyAnimate's: each causal convolution keeps the last frames of a chunk for the next one."""
    kinds = ("Spatial", *["SpatialTemporal"] * 3)
    vae = diffusers.AutoencoderKLMagvit(
        block_out_channels=(8, 16, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
        down_block_types=tuple(f"{kind}DownBlock3D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpBlock3D" for kind in kinds),
    )
    testing.fill_weights(vae)
    vae = vae.eval().requires_grad_(False)
    eager = copy.deepcopy(vae)
    compiled: Any = oxidiff.compile(vae, cache=False)
    captures = []
    for batch, frames, height, width in ((1, 9, 32, 32), (1, 9, 32, 32), (1, 13, 48, 32), (2, 9, 32, 64)):
        x = torch.randn(batch, 3, frames, height, width)
        latents = eager.encode(x).latent_dist.mean
        assert testing.relative_error(compiled.encode(x).latent_dist.mean, latents) < 2e-5
        assert testing.relative_error(compiled.decode(latents).sample, eager.decode(latents).sample) < 2e-5
        captures.append(oxidiff.report(compiled).captures)
    assert captures[1:] == captures[1:2] * 3, "a size is captured again"
    assert oxidiff.report(compiled).eager_calls == 0
