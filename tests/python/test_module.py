"""The module contract: a compiled module stands where the module stood."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
import queue
import random
import re
import threading
import uuid
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import oxidiff
from nets import Net, assert_close, image, shallow
from oxidiff import testing
from oxidiff.capture import freeing
from oxidiff.capture.trials import Trials


@pytest.fixture
def module() -> Net:
    return Net().eval()


@pytest.fixture
def compiled(module: Net) -> Any:
    return oxidiff.compile(module, strict=True)


def count(compiled: Any) -> tuple[int, int]:
    report = oxidiff.report(compiled)
    return report.captures, report.eager_calls


@torch.no_grad()
def test_same_values_and_module_stays_eager(module: Net, compiled: Any) -> None:
    expected = module(image())
    assert_close(compiled(image()), expected)
    assert type(module) is Net
    assert count(compiled) == (1, 0)


def test_is_the_module(module: Net, compiled: Any) -> None:
    assert isinstance(compiled, Net)
    assert isinstance(compiled, oxidiff.CompiledModule)
    assert not isinstance(module, oxidiff.CompiledModule)
    assert compiled._orig_mod is module
    assert type(compiled).__name__ == "Net"
    assert repr(compiled) == repr(module)
    assert list(compiled.state_dict()) == list(module.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in module.parameters()]
    assert compiled.conv is module.conv
    assert dict(compiled.named_modules()).keys() == dict(module.named_modules()).keys()


def test_attributes_both_ways(module: Net, compiled: Any) -> None:
    compiled.scale = 3.0
    assert module.scale == 3.0
    module.extra = "x"
    assert compiled.extra == "x"
    del compiled.extra
    assert not hasattr(module, "extra")
    compiled.more = nn.Linear(2, 2)
    assert "more.weight" in module.state_dict()
    compiled.train()
    assert module.training
    with pytest.raises(AttributeError, match="missing"):
        _ = compiled.missing


def test_own_names_win_over_methods() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.report = nn.Linear(2, 2)
            self.eager = "attribute"

        def warmup(self) -> str:
            return "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.report(x)

    compiled: Any = oxidiff.compile(Clash().eval())
    assert isinstance(compiled.report, nn.Linear)
    assert compiled.eager == "attribute"
    assert compiled.warmup() == "mine"
    with torch.no_grad():
        oxidiff.warmup(compiled, torch.ones(3, 2))
    assert oxidiff.report(compiled).captures == 1
    with oxidiff.eager(compiled) as original:
        assert type(original) is Clash


@torch.no_grad()
def test_attribute_that_forward_reads_is_noticed(module: Net, compiled: Any) -> None:
    compiled(image())
    module.scale = 4.0
    assert_close(compiled(image()), module(image()))
    captures = count(compiled)[0]
    module.scale = 1.5
    assert_close(compiled(image()), module(image()))
    assert count(compiled)[0] == captures, "a structure that was seen before is remembered"


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.conv.weight.mul_(1.25),
        lambda m: m.conv.weight.data.mul_(1.25),
        lambda m: setattr(m.conv.weight, "data", torch.randn_like(m.conv.weight)),
        lambda m: setattr(m.linear, "weight", nn.Parameter(torch.randn_like(m.linear.weight))),
        lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
        lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True),
        lambda m: m.norm.bias.numpy(force=True).__setitem__(slice(None), 0.5),
        lambda m: m.linear.bias.fill_(3),
        lambda m: torch.utils.swap_tensors(m.linear.bias, nn.Parameter(torch.ones(8))),
    ],
    ids=["in place", "data in place", "data", "parameter", "load", "assign", "numpy", "fill", "swap"],
)
def test_weights_are_followed_without_compiling(module: Net, compiled: Any, change: Any) -> None:
    module.requires_grad_(False)
    compiled(image())
    change(compiled)
    assert_close(compiled(image()), module(image()))
    assert count(compiled) == (1, 0)


@torch.no_grad()
def test_failed_load_keeps_the_weights(module: Net, compiled: Any) -> None:
    expected = compiled(image())
    with pytest.raises(RuntimeError, match="size mismatch"):
        compiled.load_state_dict({**module.state_dict(), "linear.bias": torch.ones(3)})
    assert torch.equal(compiled(image()), expected)


@torch.no_grad()
def test_submodule_replaced(module: Net, compiled: Any) -> None:
    compiled(image())
    compiled.linear = nn.Linear(8, 5).eval()
    assert_close(compiled(image()), module(image()))
    compiled.act = nn.ReLU().eval()
    assert_close(compiled(image()), module(image()))
    module.forward = lambda x: x * 2
    assert_close(compiled(image()), image() * 2)


@torch.no_grad()
def test_to_and_half(module: Net) -> None:
    compiled: Any = oxidiff.compile(module)
    compiled(image())
    assert compiled.to(torch.bfloat16) is compiled
    x = image().to(torch.bfloat16)
    # One rounding of bf16 after each of the four ops.
    torch.testing.assert_close(compiled(x), module(x), rtol=4 * 2**-8, atol=4 * 2**-8)
    compiled.float()
    assert_close(compiled(image()), module(image()))
    compiled.double()
    torch.testing.assert_close(compiled(image().double()), module(image().double()))


def test_its_class_is_equal_to_that_of_the_module(module: Net, compiled: Any) -> None:
    cls = type(compiled)
    assert cls is not Net and cls == Net and Net == cls and hash(cls) == hash(Net)
    assert cls in (nn.Conv2d, Net) and {Net: 1}[cls] == 1
    other = type(oxidiff.compile(nn.Linear(1, 1)))
    assert cls not in (nn.Module, other, "Net")
    assert type(compiled._orig_mod) is Net


@torch.no_grad()
def test_an_expanded_argument_is_as_a_full_one() -> None:
    """Pipelines expand a timestep to the batch: with one sample it is a row like any other."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, time: Tensor, times: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * time[:, None] + times.view(-1, 4)
            return out

    module = Timed().eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    time, times = torch.tensor(0.75), torch.arange(4.0)[None]
    for batch in (1, 3, 2):
        arguments = (torch.rand(batch, 4), time.expand(batch), times.expand(batch, -1))
        assert_close(compiled(*arguments), module(*arguments))
    assert count(compiled)[0] == 1


@torch.no_grad()
def test_hooks_of_the_module_run(module: Net, compiled: Any) -> None:
    seen: list[Any] = []
    before = module.register_forward_pre_hook(lambda m, args: seen.append(m) or (args[0] * 2,))
    compiled(image())
    after = compiled.register_forward_hook(lambda m, args, out: out + 1)
    keyword = compiled.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "factor": 2.0}), with_kwargs=True
    )
    assert_close(compiled(image()), module(image()))
    assert seen[0] is compiled
    for handle in (before, after, keyword):
        handle.remove()
    assert_close(compiled(image()), module(image()))
    assert count(compiled)[1] == 0


@torch.no_grad()
def test_hook_on_a_submodule_runs_eager(module: Net) -> None:
    compiled: Any = oxidiff.compile(module)
    compiled(image())
    seen: list[Any] = []
    handle = module.act.register_forward_hook(lambda m, args, out: seen.append(out) or out * 2)
    with pytest.warns(oxidiff.FallbackWarning, match=r"Net\.act .*forward hook"):
        assert_close(compiled(image()), module(image()))
    assert len(seen) == 2
    assert oxidiff.report(compiled).fallbacks[0]["module"] == "act"
    handle.remove()
    assert_close(compiled(image()), module(image()))
    assert oxidiff.report(compiled).eager_calls == 1


@torch.no_grad()
def test_accelerate_hook(module: Net, compiled: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    calls: list[str] = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("before")
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            calls.append("after")
            return output + 1

    expected = module(image())
    hooks.add_hook_to_module(compiled, Hook())
    assert_close(compiled(image()), expected + 1)
    assert calls == ["before", "after"]
    assert_close(module(image()), expected + 1)
    hooks.remove_hook_from_module(compiled)
    assert_close(compiled(image()), expected)
    assert count(compiled)[1] == 0


@torch.no_grad()
def test_forward_that_is_replaced_over_an_accelerate_hook_runs(module: Net) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    compiled: Any = oxidiff.compile(module)

    class Hook(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + 1

    expected = module(image())
    hooks.add_hook_to_module(compiled, Hook())
    assert_close(compiled(image()), expected + 1)
    hooked = compiled.forward
    compiled.forward = functools.wraps(hooked)(lambda x: hooked(x) * 2)
    with pytest.raises(oxidiff.UnsupportedError, match="forward was replaced after a hook of accelerate"):
        compiled.warmup(image())
    with pytest.warns(oxidiff.FallbackWarning, match="forward was replaced after a hook of accelerate"):
        assert_close(compiled(image()), (expected + 1) * 2)
    hooks.add_hook_to_module(compiled, Hook())
    assert_close(compiled(image()), expected + 1)
    hooks.remove_hook_from_module(compiled)
    assert_close(compiled(image()), expected)
    # The other way around it is the hook that is outside.
    own = compiled.forward
    compiled.forward = lambda x: own(x) * 2
    hooks.add_hook_to_module(compiled, Hook())
    assert_close(compiled(image()), expected * 2 + 1)
    assert count(compiled)[1] == 1


@torch.no_grad()
def test_copies_are_independent(module: Net, compiled: Any) -> None:
    compiled(image())
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled)), torch.load(buffer, weights_only=False)):
        assert isinstance(twin, oxidiff.CompiledModule)
        assert isinstance(twin, Net)
        assert_close(twin(image()), module(image()))
        twin.conv.weight.zero_()
        assert not torch.equal(twin(image()), compiled(image()))
    shallow = copy.copy(compiled)
    assert shallow.conv is compiled.conv
    assert_close(shallow(image()), module(image()))
    assert_close(compiled(image()), module(image()))


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_module_that_leads_to_what_was_compiled_of_it(compiled: Any, duplicate: Callable[[Any], Any]) -> None:
    compiled.owners = [compiled]
    twin = duplicate(compiled)
    assert twin.owners[0] is twin
    twin.conv.weight.mul_(2)
    assert_close(twin(image()), twin._orig_mod(image()))
    assert not torch.equal(twin(image()), compiled(image()))


def test_compile_of_compiled(compiled: Any) -> None:
    assert oxidiff.compile(compiled) is compiled
    assert oxidiff.compile(compiled, strict=True) is compiled
    other: Any = oxidiff.compile(compiled, strict=False)
    assert other is not compiled
    assert other._orig_mod is compiled._orig_mod


@torch.no_grad()
def test_compiled_inside_compiled(module: Net) -> None:
    outer = nn.Sequential(oxidiff.compile(module), nn.ReLU()).eval()
    compiled: Any = oxidiff.compile(outer, strict=True)
    assert_close(compiled(image()), module(image()).relu())
    assert oxidiff.report(compiled).captures == 1
    assert next(iter(outer.state_dict())) == "0.conv.weight"


def test_structure_of_a_class() -> None:
    assert type(oxidiff.compile(Net())) is type(oxidiff.compile(Net()))
    with pytest.raises(TypeError, match="class Net"):
        oxidiff.compile(Net)
    with pytest.raises(TypeError, match="int"):
        oxidiff.compile(3)  # type: ignore[call-overload]
    compiled: Any = oxidiff.compile(nn.Module())
    with pytest.raises(NotImplementedError):
        compiled(1)


@torch.no_grad()
def test_nothing_is_kept_alive() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module)
    x = image()
    compiled(x)
    watched = [weakref.ref(o) for o in (module, compiled, module.conv.weight, x)]
    gc.disable()
    try:
        del module, compiled, x
        gc.collect()
    finally:
        gc.enable()
    assert [ref() for ref in watched] == [None] * 4


@torch.no_grad()
def test_old_weights_are_let_go(module: Net, compiled: Any) -> None:
    compiled(image())
    old = [weakref.ref(p) for p in module.parameters()]
    compiled.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()}, assign=True)
    compiled(image())
    gc.collect()
    assert not any(ref() is not None for ref in old)


@torch.no_grad()
def test_unload(module: Net, compiled: Any) -> None:
    compiled(image())
    compiled.unload()
    report = oxidiff.report(compiled)
    assert (report.variants, report.derived_bytes, report.arena_bytes, report.weight_bytes) == (0, 0, 0, 0)
    assert_close(compiled(image()), module(image()))


@torch.no_grad()
def test_eager_context(module: Net, compiled: Any) -> None:
    with compiled.eager() as original:
        assert original is module
        assert torch.equal(compiled(image()), module(image()))
    assert count(compiled) == (0, 1)
    compiled(image())
    assert count(compiled) == (1, 1)
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_diffusers_model(tmp_path: Path) -> None:
    unet = shallow("sd15-unet")
    compiled: Any = oxidiff.compile(unet, strict=True)
    inputs = testing.example_inputs("sd15-unet")
    assert compiled.config is unet.config
    assert compiled.dtype is torch.float32
    assert compiled.device.type == "cpu"
    first = compiled(**inputs)
    assert type(first) is type(unet(**inputs))
    compiled.save_pretrained(tmp_path)
    again = type(unet).from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(compiled.state_dict())
    assert torch.equal(again.conv_in.weight, unet.conv_in.weight)
    from diffusers.models.attention_processor import AttnProcessor

    compiled.set_attn_processor(AttnProcessor())
    assert testing.relative_error(compiled(**inputs), testing.reference(unet, inputs)) < 2e-5
    assert isinstance(next(iter(unet.attn_processors.values())), AttnProcessor)
    compiled.set_default_attn_processor()
    assert testing.relative_error(compiled(**inputs), first) < 2e-5


@torch.no_grad()
def test_lora_adapters() -> None:
    peft = pytest.importorskip("peft")
    unet = shallow("sd15-unet")
    compiled: Any = oxidiff.compile(unet, strict=True)
    inputs = testing.example_inputs("sd15-unet")
    base = compiled(**inputs).sample

    def check(is_base: bool = False) -> None:
        ours, eager = compiled(**inputs).sample, unet(**inputs).sample
        assert testing.relative_error(ours, eager) < 2e-5
        assert (testing.relative_error(ours, base) < 2e-5) == is_base

    for name, rank in (("one", 4), ("two", 2)):
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_v"], init_lora_weights=False)
        compiled.add_adapter(config, adapter_name=name)
        compiled.eval()
        check()
    compiled.set_adapters(["one", "two"], [0.7, 0.2])
    check()
    compiled.set_adapters("one", 0.3)
    check()
    compiled.disable_adapters()
    check(is_base=True)
    compiled.enable_adapters()
    compiled.fuse_lora(lora_scale=0.5)
    check()
    compiled.unfuse_lora()
    compiled.delete_adapters(["one", "two"])
    check(is_base=True)


@torch.no_grad()
def test_channels_last_arguments_are_read_where_they_lie() -> None:
    module = nn.Conv2d(8, 16, 3, padding=1).eval()
    compiled = oxidiff.compile(module, strict=True)
    row_major = torch.randn(2, 8, 12, 10)
    channels_last = row_major.to(memory_format=torch.channels_last)
    assert_close(compiled(channels_last), module(channels_last))
    kernels = [step["kernel"] for step in oxidiff.profile(compiled, channels_last).steps]
    assert kernels == ["convolution"]


class Table:
    """What is no module, and makes a table when it is first asked."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            self.rows = [torch.arange(float(x.shape[-1]))]
        return x + self.rows[0]


class LazyTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def test_table_made_by_the_first_call_is_found_by_the_next():
    module = LazyTable()
    compiled = oxidiff.compile(module)
    x = torch.randn(2, 3)
    with pytest.warns(oxidiff.FallbackWarning, match="keeps a tensor in the attribute table.rows"):
        first = compiled(x)
    assert oxidiff.report(compiled).eager_calls == 1
    second = compiled(x)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 1
    assert report.programs == 1
    assert torch.equal(first, x + torch.arange(3.0))
    assert torch.equal(second, first)


class Doubling(nn.Linear):
    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


@torch.no_grad()
def test_the_class_of_a_compiled_module_stands_for_the_modules_own() -> None:
    compiled: Any = oxidiff.compile(Doubling(4, 4), strict=True)
    module = compiled._orig_mod
    x = torch.randn(2, 4)
    assert_close(compiled(x), module(x))
    # Made of it is what the class makes.
    other = type(compiled)(4, 3)
    assert type(other) is Doubling
    assert other(x).shape == (2, 3)
    replica = compiled._replicate_for_data_parallel()
    replica._parameters = dict(module._parameters)
    assert_close(replica(x), module(x))
    # What is written to it is written there, and shows at the next call.
    original = Doubling.forward
    try:
        compiled.__class__.factor = 3.0
        assert Doubling.factor == 3.0
        assert_close(compiled(x), nn.Linear.forward(module, x) * 3)
        compiled.__class__.forward = lambda self, x: original(self, x) * self.scale
        compiled.__class__.scale = 0.5
        assert_close(compiled(x), nn.Linear.forward(module, x) * 1.5)
        del type(compiled).scale
        with pytest.raises(AttributeError, match="scale"):
            compiled(x)
    finally:
        Doubling.forward, Doubling.factor = original, 2.0
    # A class that somebody derives is none of this.
    derived = type("Derived", (type(compiled),), {})
    derived.factor = 5.0  # type: ignore[attr-defined]
    assert Doubling.factor == 2.0


class Controller:
    """As one that edits prompts: it counts the calls of attention, or keeps what the last step had."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: torch.Tensor | None = None


class Counts:
    def __init__(self) -> None:
        self.controller = Controller()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.controller.calls += 1
        return x * self.controller.calls


class Keeps(Counts):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        before, self.controller.last = self.controller.last, x
        return x if before is None else x + before


class Controlled(nn.Module):
    def __init__(self, processor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.processor = processor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self.layer(x))


def closure(is_kept: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    calls, last = 0, None

    def processor(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls, last
        calls += 1
        before, last = last, x if is_kept else None
        return x * calls if before is None else x + before

    return processor


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counts, "changes the attribute processor.controller.calls"),
        (Keeps, "keeps a tensor in the attribute processor.controller.last"),
        (lambda: closure(False), "changes processor.calls, which later calls see"),
        (lambda: closure(True), "processor"),
    ],
    ids=("a counter", "a tensor", "a counter in a closure", "a tensor in a closure"),
)
@torch.no_grad()
def test_what_objects_of_objects_and_closures_remember_is_eagers(make: Callable[[], Any], reason: str) -> None:
    module, other = Controlled(make()), Controlled(make())
    compiled = oxidiff.compile(other)
    with pytest.warns(oxidiff.FallbackWarning, match=reason):
        for _ in range(4):
            x = torch.randn(2, 4)
            assert_close(compiled(x), module(x))
    if isinstance(other.processor, Counts):
        assert other.processor.controller.calls == module.processor.controller.calls


class TextAndImage(nn.Module):
    def forward(self, image: torch.Tensor, text: torch.Tensor, extra: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        patches = nn.functional.pixel_unshuffle(image, 2).flatten(2).transpose(1, 2) + extra
        return torch.cat([text, patches], dim=1) * mask


def text_and_image(batch: int, height: int, width: int, words: int) -> tuple[torch.Tensor, ...]:
    patches = height * width // 4
    image, text = torch.randn(batch, 4, height, width), torch.randn(batch, words, 16)
    return image, text, torch.randn(batch, patches, 16), torch.rand(batch, words + patches, 1)


def test_lengths_that_follow_from_others_are_found():
    """Of a residual per patch, and of a mask over text and image: no length of its own, so one program for all."""
    module = TextAndImage()
    compiled = oxidiff.compile(module)
    for sizes in ((1, 16, 16, 12), (2, 16, 16, 12), (1, 8, 24, 12), (2, 24, 16, 7)):
        inputs = text_and_image(*sizes)
        assert_close(compiled(*inputs), module(*inputs))
    report = oxidiff.report(compiled)
    assert (report.programs, report.captures) == (1, 1)


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        side = int(tokens.shape[1] ** 0.5)
        return tokens.reshape(-1, side, side, 4).transpose(1, 2)


class Patches(nn.Module):
    """A vision transformer's: edges that are multiples of its patches, and a table of positions for any number of them."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch, self.embed = patch, nn.Conv2d(3, 16, patch, patch)
        self.linear, self.places = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        assert height % self.patch == 0 and width % self.patch == 0
        places = nn.functional.interpolate(
            self.places, size=(height // self.patch, width // self.patch), mode="bicubic", align_corners=False
        )
        return self.linear((self.embed(x) + places).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("patch", [12, 14, 20, 28])
def test_patches_that_are_no_power_of_two_have_one_program(patch: int) -> None:
    module = Patches(patch).eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    with torch.no_grad():
        for batch, rows, columns in ((1, 8, 8), (2, 8, 10), (1, 10, 10), (1, 9, 13), (2, 12, 12)):
            x = torch.randn(batch, 3, rows * patch, columns * patch)
            assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1


def test_model_that_draws_squares_only_has_one_program():
    module = Squares()
    compiled = oxidiff.compile(module)
    for side in (12, 24, 20):
        x = torch.randn(1, 4, side, side)
        assert torch.equal(compiled(x), module(x))
    report = oxidiff.report(compiled)
    assert (report.programs, report.captures) == (1, 1)


class LargerSide(nn.Module):
    """Places of an image's tokens, and behind the larger of its sides those of the text, as in Qwen-Image."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)))

    def forward(
        self, tokens: torch.Tensor, text: torch.Tensor, shapes: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, height, width = shapes[0]
        rows = torch.cat([self.table[-(height - height // 2) :], self.table[: height // 2]])
        grid = (rows[:, None] + self.table[:width]).flatten(0, 1)
        start = max(height // 2, width // 2)
        return tokens + grid, text + self.table[start : start + text.shape[1]]


def test_order_of_two_numbers_is_a_program_each():
    """Portraits and landscapes, even and odd sides, not every size; also where as many tokens make another image."""
    module = LargerSide()
    compiled = oxidiff.compile(module)
    sides = ((4, 4), (6, 4), (4, 6), (12, 8), (8, 12), (3, 8), (8, 3), (64, 64), (5, 5), (7, 9), (9, 7), (4, 9), (9, 4))
    for height, width in (*sides, *reversed(sides)):
        for batch in (2, 1):
            tokens, text = torch.randn(batch, height * width, 4), torch.randn(batch, 7, 4)
            inputs = (tokens, text, [(1, height, width)] * batch)
            for output, expected in zip(compiled(*inputs), module(*inputs), strict=True):
                assert torch.equal(output, expected), (height, width, batch)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    # Two orders, and four pairs of residues.
    assert report.programs <= 8


class ImagesInOneSequence(nn.Module):
    """Places of the tokens of several images, one after the other, as in Qwen-Image's edits."""

    def forward(self, tokens: torch.Tensor, shapes: list[list[tuple[int, int]]]) -> torch.Tensor:
        grids = [torch.arange(h)[:, None] * 0.5 + torch.arange(w) for h, w in shapes[0]]
        return tokens * torch.cat([grid.flatten() for grid in grids])[:, None]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_images_in_one_sequence_are_one_program(count: int):
    module = ImagesInOneSequence()
    compiled = oxidiff.compile(module)
    for batch, side in ((1, 4), (1, 6), (2, 5), (2, 9)):
        shapes = [(side, side + 3), (3, 4 * side), (side + 5, 7), (2 * side, 11)][:count]
        tokens = torch.randn(batch, sum(h * w for h, w in shapes), 4)
        assert torch.equal(compiled(tokens, [shapes] * batch), module(tokens, [shapes] * batch))
    report = oxidiff.report(compiled)
    # As many lists as samples are of another call.
    assert (report.programs, report.captures, report.eager_calls) == (1, 2, 0)


def test_what_is_done_to_landscapes_alone():
    """A graph made of sizes of which the same one was always the larger serves no others unseen."""

    class Landscapes(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.transpose(2, 3) * 2 if image.shape[2] > image.shape[3] else image - 1

    module = Landscapes()
    for sizes in (((40, 47), (40, 33), (47, 40), (46, 47)), ((39, 31), (39, 95), (103, 95), (64, 64), (40, 41))):
        compiled = oxidiff.compile(module, cache=False)
        for size in sizes:
            image = torch.randn(2, 4, *size)
            output, expected = compiled(image), module(image)
            assert output.shape == expected.shape, size
            assert torch.equal(output, expected), size
        assert oxidiff.report(compiled).eager_calls == 0


class Padded(nn.Module):
    """A sequence padded to a multiple, as Z-Image's; nothing of the multiple shows where it is one already."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = -x.shape[1] % self.multiple
        return torch.cat([x, x[:, -1:].repeat(1, more, 1)], dim=1) * 2 if more else x * 2


@pytest.mark.parametrize("multiple", [2, 8, 32, 7])
def test_sequences_that_are_padded_to_a_multiple(multiple):
    module = Padded(multiple)
    for lengths in ((64, 45, 300, 50, 128, 301, 77, 13), (45, 77, 64, 46), (256, 255, 128, 33)):
        compiled = oxidiff.compile(module)
        for length in lengths:
            x = torch.randn(2, length, 4)
            output, expected = compiled(x), module(x)
            assert output.shape == expected.shape, (lengths, length)
            assert torch.equal(output, expected)
        report = oxidiff.report(compiled)
        assert report.eager_calls == 0
        # One for lengths that are padded and one for those that are not, if the multiple is a power of two.
        assert report.programs <= (2 if multiple != 7 else len(lengths))


class PaddedImage(nn.Module):
    """An image whose tokens are padded to a multiple, as Z-Image's."""

    def __init__(self, multiple: int, patch: int) -> None:
        super().__init__()
        self.multiple, self.patch = multiple, patch

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = nn.functional.pixel_unshuffle(image, self.patch).flatten(2).transpose(1, 2)
        more = -len(tokens[0]) % self.multiple
        return torch.cat([tokens, tokens[:, -1:].repeat(1, more, 1)], dim=1) * 2 if more else tokens * 2


@pytest.mark.parametrize(("multiple", "patch"), [(32, 2), (8, 1), (64, 4), (7, 2)])
def test_images_whose_tokens_are_padded_to_a_multiple(multiple, patch):
    module = PaddedImage(multiple, patch)
    sides = [(16, 16), (9, 7), (8, 24), (24, 16), (11, 13), (40, 8), (17, 29), (5, 64), (13, 48), (33, 31), (12, 12)]
    for first in (0, 1, 4, 7):
        compiled = oxidiff.compile(module)
        for a, b in (sides[first], *sides):
            image = torch.randn(2, 3, a * patch, b * patch)
            output, expected = compiled(image), module(image)
            assert output.shape == expected.shape, (first, a, b)
            assert torch.equal(output, expected), (first, a, b)
        report = oxidiff.report(compiled)
        assert report.eager_calls == 0
        # One for images that are padded and one for those that are not, if the multiple is a power of two.
        assert report.programs <= (2 if multiple != 7 else len(sides)), first


class PaddedTogether(nn.Module):
    """Texts of several lengths, each padded to a multiple and all to the longest of them, and a mask if one is shorter."""

    def forward(self, image: torch.Tensor, texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        padded = [nn.functional.pad(x * image.mean(), (0, 0, 0, -len(x) % 32)) for x in texts]
        together = nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=2.0)
        longest = together.shape[1]
        if all(len(x) == longest for x in padded):
            return together * 2, None
        mask = torch.zeros(len(texts), longest, dtype=torch.bool)
        for i, x in enumerate(padded):
            mask[i, : len(x)] = True
        return together * 2, mask


@pytest.mark.parametrize(
    "lengths",
    [
        [(45, 11), (60, 20), (40, 7), (500, 99), (65, 31)],
        [(11, 45), (20, 60), (7, 40), (99, 500)],
        [(45, 50), (33, 60), (7, 31), (99, 98), (100, 127)],
        [(64, 20), (96, 3), (32, 7), (33, 7), (64, 32), (32, 32), (64, 64), (7, 64)],
        [(45, 11, 90), (60, 20, 70), (40, 7, 300), (11, 45, 90)],
        [(1, 1), (2, 1), (33, 1), (1, 33)],
    ],
    ids=str,
)
def test_texts_of_several_lengths(lengths):
    """A program for each way in which they need padding and in which their padded lengths compare, not for each length."""
    module = PaddedTogether()
    compiled = oxidiff.compile(module)
    ways = set()
    for row in (*lengths, *reversed(lengths)):
        texts = [torch.randn(n, 4) for n in row]
        image = torch.randn(len(row), 4, 8, 8)
        (output, mask), (expected, expected_mask) = compiled(image, texts), module(image, texts)
        assert output.shape == expected.shape, row
        assert_close(output, expected)
        assert (mask is None) == (expected_mask is None), row
        assert mask is None or torch.equal(mask, expected_mask), row
        units = [-(-n // 32) for n in row]
        # A size of 1 says nothing of how it is meant: another program.
        ways.add((*(n % 32 == 0 for n in row), *(n == 1 for n in row), *(a < b for a in units for b in units)))
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert report.programs <= len(ways)


@pytest.mark.parametrize(
    "shorter",
    [lambda n: int(n**0.5), lambda n: n * n % 61 + 1, lambda n: n - n % 77 + 1, lambda n: (n & 21) + 1],
    ids=["root", "square", "multiple", "bits"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_lengths_that_no_expression_gives(count, shorter):
    """A graph that is wrong wherever it is checked serves no size but its own, whatever residues others have."""

    class Shorter(nn.Module):
        def forward(self, image: torch.Tensor, texts: list[torch.Tensor]) -> list[torch.Tensor]:
            return [x[: shorter(len(x))] * image.mean() for x in texts]

    module = Shorter()
    compiled = oxidiff.compile(module)
    for first in (100, 164, 228, 101, 36, 356, 292, 100):
        texts = [torch.randn(first + 64 * i, 4) for i in range(count)]
        image = torch.randn(1, 4, 8, 8)
        for output, expected in zip(compiled(image, texts), module(image, texts), strict=True):
            assert output.shape == expected.shape, first
            assert_close(output, expected)
    assert oxidiff.report(compiled).eager_calls == 0


def test_a_graph_that_is_wrong_wherever_it_is_checked_serves_its_own_size():
    """Sums of other sizes that happen to fit at the traced ones are not taken for what a length is."""

    class Sixes(nn.Module):
        def forward(self, image: torch.Tensor, texts: list[torch.Tensor]) -> list[torch.Tensor]:
            padded = [nn.functional.pad(x, (0, 0, 0, -len(x) % 6)) for x in texts]
            longest = max(len(x) for x in texts)
            together = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x in texts])
            return [
                together * image.mean(),
                *(x[: len(x) // 2] * 2 for x in padded),
                torch.cat([x[:6] for x in padded]) + 1,
            ]

    module = Sixes()
    compiled = oxidiff.compile(module)
    for lengths in ((34, 79, 61), (36, 80, 61), (128, 11, 174), (128, 13, 172)):
        texts = [torch.randn(n, 4) for n in lengths]
        image = torch.randn(3, 4, 8, 8)
        for output, expected in zip(compiled(image, texts), module(image, texts), strict=True):
            assert output.shape == expected.shape, lengths
            assert_close(output, expected)
    assert oxidiff.report(compiled).eager_calls == 0


@pytest.mark.parametrize("multiple", [4, 8, 64])
@pytest.mark.parametrize("of", ["length", "side", "padded length"])
def test_what_is_done_at_multiples_alone(multiple, of):
    """A program that was captured where a length is no multiple is not used where it is one."""

    class AtMultiples(nn.Module):
        def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            length = text.shape[1]
            if of == "padded length":
                text = nn.functional.pad(text, (0, 0, 0, -length % 128))
            size = image.shape[-1] if of == "side" else length
            return text * image.mean() if size % multiple else text.cos() - image.mean()

    module = AtMultiples()
    for sizes in (((45, 9), (46, 9), (48, 9), (64, 9), (192, 9), (45, 64), (45, 9)), ((77, 30), (128, 30), (77, 64))):
        compiled = oxidiff.compile(module)
        for length, side in sizes:
            inputs = torch.randn(2, 4, side, side), torch.randn(2, length, 4)
            output, expected = compiled(*inputs), module(*inputs)
            assert output.shape == expected.shape, (length, side)
            assert_close(output, expected)
        assert oxidiff.report(compiled).eager_calls == 0


@pytest.mark.parametrize("multiple", [2, 4, 16])
def test_images_that_are_padded_to_a_multiple(multiple):
    class PaddedImage(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            height, width = x.shape[-2:]
            return nn.functional.pad(x, (0, -width % multiple, 0, -height % multiple), mode="replicate") * 2

    module = PaddedImage()
    for sizes in (((64, 64), (63, 64), (60, 61), (62, 64), (8, 8)), ((32, 48), (30, 46), (24, 40)), ((9, 9), (16, 16))):
        compiled = oxidiff.compile(module)
        for size in sizes:
            x = torch.randn(1, 4, *size)
            output, expected = compiled(x), module(x)
            assert output.shape == expected.shape, (sizes, size)
            assert torch.equal(output, expected)
        assert oxidiff.report(compiled).eager_calls == 0


def test_halves_of_a_sequence_are_a_program_for_even_and_odd():
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : x.shape[1] // 2] * 2

    module = Half()
    compiled = oxidiff.compile(module)
    for length in (45, 77, 64, 50, 7, 1000, 8, 301):
        x = torch.randn(2, length, 4)
        assert torch.equal(compiled(x), module(x))
    assert oxidiff.report(compiled).programs <= 2


def test_numbers_of_samples_that_differ_are_another_program():
    """They were alike, and their tensors stay as large."""

    class Second(nn.Module):
        def forward(self, x: torch.Tensor, shapes: list[tuple[int, int]]) -> torch.Tensor:
            return x.reshape(2, *shapes[1])

    module = Second()
    compiled = oxidiff.compile(module)
    x = torch.randn(2, 24)
    for shapes in ([(4, 6)] * 2, [(6, 4)] * 2, [(4, 6), (6, 4)], [(4, 6), (2, 12)], [(4, 6)] * 2):
        output, expected = compiled(x, shapes), module(x, shapes)
        assert output.shape == expected.shape
        assert torch.equal(output, expected)
    assert oxidiff.report(compiled).eager_calls == 0


class Lengths(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(list(range(1, x.shape[0] + 1))).sum()


def test_data_as_long_as_the_batch_is_a_program_per_batch():
    module = Lengths()
    compiled = oxidiff.compile(module)
    for batch in (1, 2, 3):
        x = torch.randn(batch, 5)
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).eager_calls == 0


class Does(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@torch.no_grad()
def test_a_copy_of_an_argument_is_another_tensor() -> None:
    x = torch.randn(2, 4, 3, 5)
    for function in (
        lambda x: x.clone(),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1).contiguous(),
    ):
        result = oxidiff.compile(Does(function), strict=True)(x)
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    itself = oxidiff.compile(Does(lambda x: (x, x.contiguous(), x.float(), x * 2)), strict=True)(x)
    assert [result is x for result in itself] == [True, True, True, False]


@torch.no_grad()
def test_a_copy_that_is_written_into_after_a_break_is_no_argument() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        # Nobody knows it before.
        y += 1 if torch.allclose(x, x) else 2
        return y - x

    x = torch.ones(2, 3)
    with pytest.warns(oxidiff.FallbackWarning, match="pieces"):
        result = oxidiff.compile(Does(function))(x)
    assert torch.equal(result, torch.ones(2, 3))
    assert torch.equal(x, torch.ones(2, 3))


def tagged(**attributes: Any) -> Tensor:
    x = torch.ones(2, 3)
    for name, value in attributes.items():
        setattr(x, name, value)
    return x


@torch.no_grad()
def test_attributes_of_tensors_that_are_passed_are_seen() -> None:
    def function(x: Tensor) -> Tensor:
        return x * (2 if hasattr(x, "is_mask") else 3) + getattr(x, "shift", 7.0)

    compiled = oxidiff.compile(Does(function), strict=True)
    for attributes in (
        {}, {"is_mask": True}, {"shift": 1.0}, {"shift": 1}, {"is_mask": None, "shift": 2.0}, {"other": ("a", 1)}, {},
        {"_dynamo_dynamic_indices": {0}},
    ):  # fmt: skip
        assert torch.equal(compiled(tagged(**attributes)), function(tagged(**attributes))), attributes
    assert oxidiff.report(compiled).captures == 6
    # Of what is no plain value nobody knows when it is another.
    patient = oxidiff.compile(Does(function))
    with pytest.warns(oxidiff.FallbackWarning, match="attribute 'shift', of type Tensor"):
        assert torch.equal(patient(tagged(shift=torch.tensor(1.0))), torch.full((2, 3), 4.0))
    with pytest.warns(oxidiff.FallbackWarning, match="another program nearly each time"):
        for step in range(20):
            assert torch.equal(patient(tagged(shift=step)), torch.full((2, 3), 3.0 + step))
    assert oxidiff.report(patient).captures == 16


@torch.no_grad()
def test_what_grows_at_each_call_is_not_captured_for_ever() -> None:
    def function(x: Tensor, history: dict[str, list[Tensor]]) -> Tensor:
        history["seen"].append(x * 2)
        return x + sum(history["seen"])

    compiled, module = oxidiff.compile(Does(function)), Does(function)
    ours, theirs = ({"seen": [torch.zeros(3)]} for _ in range(2))
    with pytest.warns(oxidiff.FallbackWarning, match="lists or dictionaries that are passed are of another length"):
        for step in range(40):
            x = torch.full((3,), float(step))
            assert torch.equal(compiled(x, ours), module(x, theirs))
    report = oxidiff.report(compiled)
    assert report.captures == 32
    # What has a program keeps it.
    assert torch.equal(compiled(x, {"seen": [x, x]}), module(x, {"seen": [x, x]}))
    assert oxidiff.report(compiled).eager_calls == report.eager_calls == 8


@torch.no_grad()
def test_flags_of_one_length_are_all_captured() -> None:
    def function(x: Tensor, flags: list[bool]) -> Tensor:
        return x + sum(2**at for at, flag in enumerate(flags) if flag)

    compiled = oxidiff.compile(Does(function), strict=True, cache=False)
    for number in range(40):
        flags = [bool(number >> at & 1) for at in range(6)]
        assert torch.equal(compiled(torch.zeros(2), flags), torch.full((2,), float(number)))


def coin(x: Tensor) -> Tensor:
    return x * 2 if random.uniform(0, 1) < 0.5 else x * 3


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor": lambda x: x * random.random(),
    "a branch": coin,
    "numpy": lambda x: x * np.random.rand(),
    "of both": lambda x: x * random.choice([1, 2, 3, 4]) + np.random.randint(9),
    "before an error of the trace": lambda x: x * random.random() if x.dim() and torch.allclose(x, x) else x,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
@torch.no_grad()
def test_numbers_of_python_and_numpy_are_drawn_by_each_call(draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3)
    results = []
    for function in (Does(draw), oxidiff.compile(Does(draw))):
        random.seed(3)
        np.random.seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oxidiff.FallbackWarning)
            results.append([function(x)[0].item() for _ in range(12)])
    assert results[0] == results[1]
    assert len(set(results[0])) > 1
    if draw is coin:
        with pytest.raises(oxidiff.CaptureError, match="Python's random module"):
            oxidiff.compile(Does(draw), strict=True)(x)


class Layered(nn.Module):
    """Layers that are left out at random in training, as transformers' are."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            number = self.draw()
            if self.training and number < 0.1:
                continue
            x = torch.tanh(layer(x))
        return x


UNREAD: dict[str, Callable[[], Any]] = {
    "uniform": lambda: random.uniform(0, 1),
    "random": lambda: random.random(),
    "numpy's": lambda: np.random.uniform(0, 1),
    "rand": lambda: np.random.rand(),
    "both": lambda: (random.random(), np.random.uniform())[0],
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("draw", UNREAD.values(), ids=UNREAD.keys())
@torch.no_grad()
def test_numbers_that_nobody_looks_at_are_drawn_beside_the_program(draw: Callable[[], Any]) -> None:
    module = Layered(draw).eval()
    compiled: Any = oxidiff.compile(module)
    for size in (3, 5, 8):
        ends = []
        for function in (module, compiled):
            random.seed(size)
            np.random.seed(size)
            ends.append((function(torch.ones(size, 8)), random.random(), np.random.rand()))
        assert_close(ends[1][0], ends[0][0])
        assert ends[0][1:] == ends[1][1:]
    assert count(compiled) == (1, 0)
    assert oxidiff.report(compiled).programs == 1


def taken_back(x: Tensor) -> Tensor:
    random.random()
    state = random.getstate()
    random.random()
    random.setstate(state)
    return x * 2


LOOKING: dict[str, Callable[[Tensor], Any]] = {
    "its class": lambda x: x * 2 if isinstance(random.random(), float) else x * 3,
    "in C": lambda x: x * math.sin(random.random()),
    "compared": lambda x: x * 2 if random.random() < 0.5 else x * 3,
    "behind a number": lambda x: x * (1.0 - random.uniform(0, 1)),
    "the largest": lambda x: x * max(0.5, random.random()),
    "a tensor": lambda x: x + torch.full((1,), random.random()),
    "among others": lambda x: x * 2 if random.random() in (1, 2) else x * 3,
    "returned": lambda x: (x * 2, random.random()),
    "in a list": lambda x: (x * 2, [random.random()]),
    "taken back": taken_back,
}


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("look", LOOKING.values(), ids=LOOKING.keys())
@torch.no_grad()
def test_numbers_that_are_looked_at_are_those_of_each_call(look: Callable[[Tensor], Any]) -> None:
    results = []
    for function in (Does(look), oxidiff.compile(Does(look))):
        random.seed(3)
        results.append([*(function(torch.ones(2)) for _ in range(4)), random.random()])
    torch.testing.assert_close(results[0], results[1])


@torch.no_grad()
def test_what_another_thread_draws_meanwhile_is_its_own() -> None:
    # Of a kind in which nobody looks for what was changed.
    drawn = queue.SimpleQueue[float]()

    def function(x: Tensor) -> Tensor:
        if drawn.empty():
            thread = threading.Thread(target=lambda: drawn.put(random.random()))
            thread.start()
            thread.join()
        return x * 2

    random.seed(3)
    compiled = oxidiff.compile(Does(function), strict=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    expected = random.Random(3)
    assert [drawn.get(), random.random()] == [expected.random(), expected.random()]


@torch.no_grad()
def test_a_thread_that_always_draws_gets_each_number_once() -> None:
    """As a server does for seeds: no code of the module can draw, so that nothing is to be put back."""
    drawn: list[int] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(0.001):
            drawn.append(random.getrandbits(62) + np.random.randint(2))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            module = Net().eval()
            compiled: Any = oxidiff.compile(module, strict=True, cache=False)
            assert_close(compiled(image()), module(image()))
            oxidiff.unload(compiled)
    finally:
        stop.set()
        thread.join()
    assert len(drawn) > 5
    assert len({number >> 1 for number in drawn}) == len(drawn)


class Patched(nn.Module):
    """Blocks, between which functions of the caller's run, as those of ComfyUI do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            for patch in options.get("patches", ()):
                x = patch(x, i)
        constant = options.get("constant")
        if isinstance(constant, slice):
            return x[:, constant]
        if isinstance(constant, type):
            return x.to(torch.float64) if constant is float else x + 1
        return x * (len(constant) if isinstance(constant, bytes | range) else complex(constant or 1).imag + 1)


_factor = [2.0]
OPAQUE: dict[str, Callable[[], Any]] = {
    "nothing that is read": lambda: {"ids": [uuid.uuid4()], "generator": torch.Generator(), "set": {1}},
    "a function": lambda: {"patches": [lambda x, i: x * _factor[0] + i]},
    "a partial": lambda: {"patches": [functools.partial(torch.add, alpha=2)]},
}


@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE.keys())
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_submodules_of_a_call_with_an_argument_that_no_program_takes_are_compiled(make: Callable[[], Any]) -> None:
    module = Patched().eval()
    compiled: Any = oxidiff.compile(module)
    for n in (2, 3, 2):
        options = make()
        assert_close(compiled(image(n, 8), options), module(image(n, 8), options))
        _factor[0] += 1
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.programs <= 1, report.captures <= 1) == (0, True, True)
    assert "is passed to it" in report.fallbacks[0]["reason"]
    with pytest.raises(oxidiff.UnsupportedError, match="is passed to it"):
        oxidiff.compile(module, strict=True)(image(2, 8), make())


@torch.no_grad()
def test_arguments_that_are_constants_of_programs() -> None:
    module = Patched().eval()
    compiled: Any = oxidiff.compile(module, strict=True)
    constants = slice(0, 3), slice(2, 4), range(3), range(5), b"two", b"three", 1j, 2j, 2 + 0j, int, float
    for constant in (*constants, *constants):
        options = {"constant": constant}
        assert_close(compiled(image(2, 8), options), module(image(2, 8), options))
    assert oxidiff.report(compiled).captures <= len(constants)


class TakesAny(nn.Module):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x * given.stop.sum() if isinstance(given, slice) else x + 1


class ByName(type):
    def __eq__(cls, other: object) -> bool:
        return repr(cls) == repr(other)


class Named(metaclass=ByName):
    """Of a class of classes that cannot be hashed."""


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_constants_are_told_apart_by_all_that_they_are() -> None:
    module = TakesAny()
    compiled: Any = oxidiff.compile(module)
    long = torch.zeros(2000)
    for place in (7, 1000, 1001):
        long = long.clone()
        long[place] += place
        assert_close(compiled(image(2, 3), slice(0, long)), module(image(2, 3), slice(0, long)))
    assert_close(compiled(image(2, 3), Named), module(image(2, 3), Named))


class Cuts(nn.Module):
    """Takes what a slice says, or several do."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        cuts = given if isinstance(given, list) else [given]
        return torch.cat([x[:, one] for one in cuts], 1) * 2 + x.amax(1, keepdim=True)


@torch.no_grad()
def test_edges_of_slices_are_sizes() -> None:
    compiled: Any = oxidiff.compile(Cuts(), strict=True, cache=False)
    for at, (width, start, stop) in enumerate(((40, 0, 9), (40, 0, 12), (57, 3, 30), (29, 2, 28), (33, 5, 6))):
        x = image(2, width, 3)
        assert torch.equal(compiled(x, slice(start, stop)), Cuts()(x, slice(start, stop))), at
        assert oxidiff.report(compiled).captures == 1, at


@torch.no_grad()
def test_slices_of_any_kind() -> None:
    """Beyond either end, from behind, with steps, one before the other, with nothing in them."""
    edges: list[Any] = [(1, 5), (1, 20), (0, 13), (5, 25), (25, 5), (25, 25), (27, 35), (-3, 29), (-3, None), (3, -2)]
    edges += [(None, 4), (None, None), (0, -1), (0, 8, 2), (1, 11, 3), (-30, None), (None, -2)]
    compiled: Any = oxidiff.compile(Cuts(), strict=True, cache=False)
    for width, edge in itertools.product((8, 30), edges):
        x = image(2, width, 3)
        assert torch.equal(compiled(x, slice(*edge)), Cuts()(x, slice(*edge))), (width, edge)


@torch.no_grad()
def test_several_slices_are_not_taken_for_each_other() -> None:
    compiled: Any = oxidiff.compile(Cuts(), strict=True, cache=False)
    for width, *edges in ((8, (1, 5), (5, 8)), (20, (1, 15), (15, 18)), (10, (1, 15), (9, 10)), (30, (9, 5), (1, 30))):
        x, cuts = image(2, width, 3), [slice(*edge) for edge in edges]
        assert torch.equal(compiled(x, cuts), Cuts()(x, cuts)), (width, edges)


class Gated(nn.Module):
    """What raises nothing but in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        try:
            return x * float(self.linear.weight.abs().max())
        except RuntimeError:
            return x - 1


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_what_only_a_trace_raises_decides_nothing() -> None:
    module = Gated().eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    for rows in (3, 3, 5):
        assert_close(compiled(image(rows, 4)), module(image(rows, 4)))
    assert "depends on the values of a tensor" in oxidiff.report(compiled).fallbacks[0]["reason"]


class HoldsNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named: Any = Named()
        self.named.factor = 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.named.factor  # type: ignore[no-any-return]


@torch.no_grad()
def test_an_attribute_of_a_class_without_a_hash_is_followed() -> None:
    module = HoldsNamed()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for factor in (2, 5):
        module.named.factor = factor
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), float(factor)))


class OfPython(nn.Module):
    """Cuts what is Python's own with a slice that is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"layer {i}" for i in range(60)]

    def forward(self, x: Tensor, given: slice) -> Tensor:
        return x * len(self.names[given]) + len(range(x.shape[1])[given])


@torch.no_grad()
@pytest.mark.parametrize("first", [slice(0, 5), slice(3, 9), slice(50, 58), slice(9, 3)])
def test_sequences_that_slices_cut_end_somewhere(first: slice) -> None:
    compiled: Any = oxidiff.compile(OfPython(), strict=True, cache=False)
    others = [slice(0, 50), slice(0, 70), slice(50, 70), slice(60, 70), slice(7, 3), slice(10, 14), slice(-5, None)]
    for given, width in itertools.product((first, *others), (20, 12)):
        x = image(2, width, 3)
        assert torch.equal(compiled(x, given), OfPython()(x, given)), (given, width)


@torch.no_grad()
def test_slices_from_behind_are_compiled() -> None:
    compiled: Any = oxidiff.compile(Cuts(), strict=True, cache=False)
    for width, edges in ((17, (4, 9)), (17, (-9, -5)), (40, (-2, 38)), (5, (-8, -8))):
        x = image(2, width, 3)
        assert torch.equal(compiled(x, slice(*edges)), Cuts()(x, slice(*edges))), (width, edges)
    assert oxidiff.report(compiled).eager_calls == 0


class ByLength(nn.Module):
    """Takes as many rows of a table as a slice has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, 3), requires_grad=False)

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x.sum(1, keepdim=True) + self.table[: x[:, start:stop].shape[1]]


@torch.no_grad()
def test_slices_that_are_needed_for_their_size_alone() -> None:
    table = nn.Parameter(torch.randn(512, 3), requires_grad=False)

    def function(x: Tensor, count: int) -> Tensor:
        return x.sum(1, keepdim=True) + table[: x[:, :count].shape[1]]

    compiled: Any = oxidiff.compile(function, strict=True, cache=False)
    for width, count in ((64, 2), (33, 66), (77, 5), (16, 8), (16, 64), (9, 64)):
        x = image(2, width, 3)
        assert_close(compiled(x, count), function(x, count))


class Apart(nn.Module):
    """Three parts of a sequence, of which one may be empty."""

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        return torch.cat([x[:, :start], x[:, start:stop] * 2, x[:, stop:] * 3], 1)


class Divided(nn.Module):
    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        one, other, rest = x.split([start, stop, x.shape[1] - start - stop], 1)
        return torch.cat([one * 2, other * 3, rest * 4], 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", [ByLength, Apart, Divided])
@pytest.mark.parametrize("first", [(33, 64, 64), (17, 17, 18), (64, 0, 2), (40, 3, 9), (17, 0, 1)])
def test_ends_of_slices_against_sizes(kind: type[nn.Module], first: tuple[int, int, int]) -> None:
    """What is clamped in one call is not in another, whether or not the slice itself is needed."""
    module = kind()
    compiled: Any = oxidiff.compile(module, cache=False)
    for width, start, stop in (first, (17, 17, 18), (64, 64, 32), (16, 0, 64), (9, 3, 64), (77, 0, 5), (64, 60, 70)):
        x = image(2, width, 3)
        try:
            expected = module(x, start, stop)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                compiled(x, start, stop)
            continue
        assert_close(compiled(x, start, stop), expected)


class Tenfold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, nn.Linear.forward(cast(Any, self), x)) * 10


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@torch.no_grad()
def test_a_compiled_module_that_is_given_another_class() -> None:
    x = image(3, 4)
    for is_parametrized in (False, True):
        eager = nn.Linear(4, 4).eval()
        compiled: Any = oxidiff.compile(copy.deepcopy(eager))
        assert_close(compiled(x), eager(x))
        for module in (eager, compiled):
            if is_parametrized:
                register_parametrization(module, "weight", Doubled())
            else:
                module.__class__ = type("Mine", (type(module),), {"forward": Tenfold.forward})
        assert_close(compiled(x), eager(x))
        assert "given another class" in oxidiff.report(compiled).fallbacks[-1]["reason"]


@torch.no_grad()
def test_a_compiled_module_can_be_scripted() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    scripted: Any = torch.jit.script(oxidiff.compile(module))
    assert_close(scripted(image(3, 4)), module(image(3, 4)))


class Attends(nn.Module):
    """As attention of diffusers, which projects its own states otherwise than others."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, h: Tensor, e: Tensor | None = None, residuals: tuple[Tensor, ...] = ()) -> Tensor:
        states = self.own(h) if e is h else self.other(h if e is None else e)
        out = h @ states.mT
        for residual in residuals:
            out = out + (residual if residual is h else residual * 2).mean()
        return out


@torch.no_grad()
def test_tensors_that_are_one_are_one_to_forward() -> None:
    module = Attends().eval()

    def check(compiled: Any, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            x, y, z = (torch.randn(2, size, 4) for _ in range(3))
            for args in ((x, y), (x, x), (x,), (x, y, (x, z)), (x, y, (z, z)), (x, x, (x, x)), (x, y, (z, y)), (y, y)):
                assert_close(compiled(*args), module(*args))

    compiled = oxidiff.compile(module, strict=True)
    check(compiled, (3, 5))
    captures = oxidiff.report(compiled).captures
    check(compiled, (4, 7))
    assert oxidiff.report(compiled).captures == captures
    for ask in (lambda a, b: a * len({id(a), id(b)}), lambda a, b: a * 2 if any(a is t for t in [b]) else a * 3):
        asking = oxidiff.compile(Does(ask), strict=True)
        a, b = torch.randn(2, 3), torch.randn(2, 3)
        for args in ((a, a), (a, b), (b, b)):
            assert torch.equal(asking(*args), ask(*args))


def test_what_is_warmed_up_for_one_tensor_is_for_one_at_all_sizes() -> None:
    compiled = oxidiff.compile(Does(lambda a, b: a * 2 if a is b else a * 4), strict=True)
    x = image()
    oxidiff.warmup(compiled, x, x, shapes=[{0: (2, 3, 16, 12), 1: (2, 3, 16, 12)}, (4, 3, 12, 10)])
    assert oxidiff.report(compiled).captures == 1


@torch.no_grad()
def test_names_that_the_signature_does_not_list_keep_their_order() -> None:
    module = Does(lambda **tensors: torch.cat(list(tensors.values())))
    compiled = oxidiff.compile(module, strict=True)
    a, b = torch.ones(2), torch.zeros(2)
    inner = Does(lambda tensors: torch.cat(list(tensors.values())))
    of_dict = oxidiff.compile(inner, strict=True)
    for given in ({"b": a, "a": b}, {"a": a, "b": b}, {"b": b, "a": a}):
        assert torch.equal(compiled(**given), module(**given))
        assert torch.equal(of_dict(given), inner(given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_softmax_in_another_type(dtype: torch.dtype) -> None:
    for wide in (torch.float32, torch.float64):
        for function in (
            lambda x, wide=wide: torch.softmax(x * 8 - 30, -1, dtype=wide),
            lambda x, wide=wide: nn.functional.softmax(x @ x.mT, dim=-1, dtype=wide) @ x.to(wide),
        ):
            x = torch.randn(1, 2, 6, 8, dtype=dtype)
            compiled = oxidiff.compile(Does(function), strict=True, precision="eager")
            result, expected = compiled(x), function(x)
            assert result.dtype is expected.dtype is wide
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_spread_of_too_few_is_not_a_number() -> None:
    for function in (lambda x: x[:, 3:].std(1), lambda x: x[:, 3:].var(1)):
        compiled = oxidiff.compile(Does(function))
        for count in (6, 4, 3, 2, 5):
            x = torch.randn(2, count, 5)
            torch.testing.assert_close(compiled(x), function(x), equal_nan=True)


@torch.no_grad()
def test_powers_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        y.pow_(2)
        y **= x
        return y

    x = torch.rand(3, 4)
    assert_close(oxidiff.compile(Does(function), strict=True)(x), function(x))


class Record:
    def __init__(self, sin: Tensor) -> None:
        self.sin = sin


@pytest.mark.parametrize(
    "kept",
    [
        lambda sin: sin,
        lambda sin: (sin, 1),
        lambda sin: [sin],
        lambda sin: {"sin": sin},
        lambda sin: {"sin": [(sin,)]},
        Record,
    ],
    ids=["tensor", "tuple", "list", "dict", "nested", "record"],
)
@torch.no_grad()
def test_tables_that_a_module_keeps_by_size_are_real(kept: Any) -> None:
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[str, dict[int, Any]] = {"tables": {}}

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            tables = self.tables["tables"]
            if length not in tables:
                tables[length] = kept(torch.arange(length).float()[:, None].sin())
            found = tables[length]
            while not isinstance(found, Tensor):
                found = (
                    found.sin if isinstance(found, Record) else found["sin"] if isinstance(found, dict) else found[0]
                )
            return x * found

    module = Rope().eval()
    compiled = oxidiff.compile(module)
    for length in (5, 6, 5, 1, 9):
        x = torch.randn(2, length, 8)
        expected = x * torch.arange(length).float()[:, None].sin()
        assert_close(compiled(x), expected)
        assert_close(module(x), expected)


class Writer(nn.Module):
    """What its forward leaves behind is the argument's doing."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state: dict[str, Any] = {"calls": 0}
        self.history: list[Any] = []
        self.met: set[int] = set()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (1 + self.state["calls"])
        self.write(self, x)
        return y


def write_once(module: Any, x: Tensor) -> None:
    if "done" not in module.state:
        module.state["done"] = True
        module.linear.weight.data.mul_(0.5)


def register(module: Any, x: Tensor) -> None:
    if not hasattr(module, "extra"):
        module.register_parameter("extra", nn.Parameter(torch.ones(8)))


def count_calls(module: Any, x: Tensor) -> None:
    module.state["calls"] += 1


@pytest.mark.parametrize(
    "write",
    [
        count_calls,
        write_once,
        register,
        lambda module, x: module.history.append(x.shape[0]),
        lambda module, x: module.met.add(x.shape[0]),
        lambda module, x: setattr(module.linear.weight, "data", module.linear.weight.data.clamp(-0.2, 0.2)),
        lambda module, x: setattr(module.linear, "weight", nn.Parameter(module.linear.weight * 0.5)),
        lambda module, x: setattr(module, "linear", nn.Identity()),
        lambda module, x: module.linear.register_buffer("more", x.mean()),
    ],
    ids=["count", "once", "register", "list", "set", "data", "parameter", "submodule", "buffer"],
)
@torch.no_grad()
def test_what_forward_leaves_in_its_module_is_as_in_eager(write: Any) -> None:
    module = Writer(write).eval()
    eager = copy.deepcopy(module)
    compiled = oxidiff.compile(module)
    for rows in (3, 3, 5, 4):
        x = torch.randn(rows, 8)
        assert_close(compiled(x), eager(x))
        assert (module.state, module.history, module.met) == (eager.state, eager.history, eager.met)
        assert [type(item) for item in (*module.history, *module.met)] == [int] * len((*eager.history, *eager.met))
        assert {n: type(m) for n, m in module.named_modules()} == {n: type(m) for n, m in eager.named_modules()}
        assert_close(dict(module.state_dict()), dict(eager.state_dict()))


@pytest.mark.parametrize("rank", [1, 2, 3])
@torch.no_grad()
def test_transposed_convolutions_of_all_ranks(rank: int) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    module = kind(8, 6, 5, stride=3, padding=1).eval()
    compiled = oxidiff.compile(module, strict=True)
    for batch, size in ((2, 20), (2, 9), (1, 13), (3, 21)):
        x = torch.randn(batch, 8, *range(size - rank + 1, size + 1))
        assert_close(compiled(x), module(x))


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "T5"])
@torch.no_grad()
def test_cache_of_keys_and_values_is_returned(kind: str, tmp_path: Path) -> None:
    """By every language model that is not told to make none; what goes on with it finds what eager would have made."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": 50, "pad_token_id": 0, "head_dim": 8}
    if kind == "Gemma2":
        more["sliding_window"] = 6
    if kind == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        more = {"vocab_size": 50, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes, **more)).eval()
    path = tmp_path / "graphs.oxi"
    for start in range(2):
        compiled = oxidiff.compile(module, strict=True, cache=False, graph_file=path)
        for batch, length in ((2, 9), (1, 5)):
            ids = torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(length))
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if kind == "T5":
                inputs["decoder_input_ids"] = ids[:, :3]
            result, expected = compiled(**inputs), module(**inputs)
            assert_close(result.last_hidden_state, expected.last_hidden_state)
            # Its name is "cache" from transformers 5.24 on.
            name = "cache" if hasattr(expected, "cache") else "past_key_values"
            cache, wanted = getattr(result, name), getattr(expected, name)
            assert type(cache) is type(wanted)
            assert cache.get_seq_length() == wanted.get_seq_length()
            if kind == "T5":
                assert cache.is_updated == wanted.is_updated
                cache, wanted = cache.self_attention_cache, wanted.self_attention_cache
            for layer, other in zip(cache.layers, wanted.layers, strict=True):
                assert type(layer) is type(other)
                assert vars(layer).keys() == vars(other).keys()
                for key, value in vars(other).items():
                    assert_close(getattr(layer, key), value) if torch.is_tensor(value) else None
                    assert torch.is_tensor(value) or getattr(layer, key) == value
            if kind != "T5":
                step = {"input_ids": ids[:, :1], "attention_mask": torch.ones(batch, length + 1, dtype=torch.long)}
                after = module(**step, **{name: cache}).last_hidden_state
                assert_close(after, module(**step, **{name: wanted}).last_hidden_state)
        assert oxidiff.report(compiled).captures == 1 - start


class CacheKeeping(nn.Module):
    def __init__(self, cache: Any, is_returned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.cache = cache
        self.is_returned = is_returned

    def forward(self, x: torch.Tensor) -> Any:
        keys, values = self.cache.update(self.layer(x)[:, None], x[:, None], 0)
        result = (keys * values).sum(dim=2)
        return (result, self.cache) if self.is_returned else result


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("is_returned", [False, True])
@torch.no_grad()
def test_objects_in_lists_of_objects_keep_what_they_had(is_returned: bool) -> None:
    """A cache of keys and values has a list of layers: an attempt to capture what writes there took their keys away."""
    transformers = pytest.importorskip("transformers")
    module = CacheKeeping(transformers.DynamicCache(), is_returned)
    other = CacheKeeping(transformers.DynamicCache(), is_returned)
    compiled: Any = oxidiff.compile(other)
    for length in (3, 2, 2, 4):
        x = torch.randn(2, length, 4)
        result, expected = compiled(x), module(x)
        if is_returned:
            assert result[1] is other.cache
            result, expected = result[0], expected[0]
        assert_close(result, expected)
        assert other.cache.get_seq_length() == module.cache.get_seq_length()


@torch.no_grad()
def test_cache_without_a_configuration_is_returned() -> None:
    transformers = pytest.importorskip("transformers")

    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            cache = transformers.DynamicCache()
            cache.update(x, x * 2, 0)
            return {"caches": [cache, transformers.DynamicCache()], "twice": x * 2}

    compiled = oxidiff.compile(Makes(), strict=True)
    for length in (3, 5):
        x = torch.randn(2, 1, length, 4)
        (cache, empty), expected = compiled(x)["caches"], Makes()(x)["caches"]
        assert list(vars(cache)) == list(vars(expected[0]))
        assert list(vars(cache.layers[0])) == list(vars(expected[0].layers[0]))
        assert cache.layer_class_to_replicate is expected[0].layer_class_to_replicate
        assert_close(cache.layers[0].values, x * 2)
        assert cache.layers[0].device == x.device
        assert not empty.layers


class NamedPair(NamedTuple):
    whole: Tensor
    mean: Tensor


@pytest.mark.parametrize("kind", [namedtuple("Pair", "whole mean"), NamedPair])
def test_namedtuples_are_returned(kind: Any) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return kind(x * 2, x.mean())

    compiled: Any = oxidiff.compile(Returns(), cache=False, strict=True)
    for size in (3, 5):
        result = compiled(torch.ones(size, 2))
        assert type(result) is kind
        assert_close(tuple(result), tuple(Returns()(torch.ones(size, 2))))
    assert oxidiff.report(compiled).eager_calls == 0


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "memory_format": lambda y: y.to(memory_format=torch.channels_last),
    "memory_format that it has": lambda y: y.to(memory_format=torch.contiguous_format),
    "dtype and memory_format": lambda y: y.to(torch.float32, memory_format=torch.channels_last),
    "dtype": lambda y: y.to(torch.float32),
    "another dtype": lambda y: y.to(torch.float64),
    "copy": lambda y: y.to("cpu", torch.float32, False, True),
    "copy of a dtype": lambda y: y.to(torch.float32, copy=True),
    "as another, copied": lambda y: y.to(y, copy=True),
    "as another": lambda y: y.to(y),
    "non_blocking": lambda y: y.to("cpu", torch.float32, True),
    "float": lambda y: y.float(memory_format=torch.channels_last),
    "contiguous": lambda y: y.contiguous(memory_format=torch.channels_last),
    "cpu": lambda y: y.cpu(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("way", LAST)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_what_to_copies_is_written_alone(way: str, order: torch.memory_format) -> None:
    class Converts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            converted = LAST[way](y)
            converted += 100
            return y + 0

    x = torch.randn(2, 4, 3, 5).contiguous(memory_format=order)
    compiled: Any = oxidiff.compile(Converts(), cache=False, strict=True)
    assert_close(compiled(x), Converts()(x))


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda y: y.view(y.shape[0], -1),
    "contiguous": lambda y: y.contiguous().view(y.shape[0], -1),
    "heads together": lambda y: y.transpose(0, 1).reshape(y.shape[1], -1),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_writes_after_a_call_with_an_expanded_tensor(way: str) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            WRITTEN[way](y)[:, :2] = 7
            return y + 0

    whole = torch.arange(12.0).reshape(2, 2, 3)
    compiled: Any = oxidiff.compile(Writes(), cache=False, strict=True)
    for x in (whole[:, :1].expand(2, 2, 3), whole):
        assert_close(compiled(x), Writes()(x))


@pytest.mark.parametrize("turned", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_writes_into_what_attention_gives(turned: tuple[int, ...], masked: bool) -> None:
    """A part of it, or a copy, by how its queries lie."""

    class Attends(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            given = tuple(
                x.transpose(1, 2) if i in turned else x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
                for i, x in enumerate(given)
            )
            mask = torch.zeros(given[0].shape[2], given[1].shape[2]) if masked else None
            y = nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
            y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1).add_(100)
            return y + 0

    given = [torch.randn(2, 10, 3, 8) for _ in range(3)]
    compiled: Any = oxidiff.compile(Attends(), cache=False, strict=True)
    torch.testing.assert_close(compiled(*given), Attends()(*given), rtol=1e-5, atol=1e-4)


UNFIT: dict[str, Callable[[Tensor], Tensor]] = {
    "integers by a float": lambda x: x.mul_(0.5),
    "flags": lambda x: (x > 0).add_(1),
    "division": lambda x: x.div_(2),
    "a tensor of floats": lambda x: x.sub_(torch.ones(4)),
    "items": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_results_that_do_not_fit_where_they_are_written_raise(name: str) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return UNFIT[name](x + 1)

    compiled: Any = oxidiff.compile(Writes(), cache=False)
    with pytest.raises(RuntimeError) as expected:
        Writes()(torch.arange(4))
    with pytest.raises(RuntimeError) as caught:
        compiled(torch.arange(4))
    assert str(caught.value) == str(expected.value)


class Seeds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(4)
        return x * noise + torch.rand(4)


class Restores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        noise = torch.rand(4)
        torch.set_rng_state(state)
        return x + noise - torch.rand(4)


class SeedsGenerator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)
        return x + torch.rand(4)


class Guides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(self.linear(z).square().sum(), z)[0]


class Transforms(Guides):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: self.linear(z).square().sum())(x)


class Scripted(Guides):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scripted(x))


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", [Seeds, Restores, SeedsGenerator, Guides, Transforms, Scripted])
@pytest.mark.parametrize("half", [False, True])
def test_what_no_program_does_is_eagers(kind: type[nn.Module], half: bool) -> None:
    module = kind()
    compiled: Any = oxidiff.compile(module, cache=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        for i in range(3):
            x = image(3, 4, seed=i)
            torch.manual_seed(i)
            expected, state = module(x), torch.get_rng_state()
            torch.manual_seed(i)
            torch.testing.assert_close(compiled(x), expected)
            assert torch.equal(torch.get_rng_state(), state)
    torch._dynamo.reset()


@pytest.mark.parametrize("named", [False, True])
def test_a_wrapper_that_holds_the_old_forward_in_a_default(named: bool) -> None:
    module = Net().eval()
    expected = module(image()) * 2
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    old = compiled.forward

    def positional(x: Tensor, old: Any = old) -> Tensor:
        return old(x) * 2

    def by_name(*args: Any, old: Any = old, **named: Any) -> Tensor:
        return old(*args, **named) * 2

    compiled.forward = by_name if named else positional
    with torch.no_grad():
        assert_close(compiled(image()), expected)
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_a_size_is_traced_once_for_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = Trials.trace_at
    monkeypatch.setattr(Trials, "trace_at", lambda self, point: taken.append(point) or real(self, point))
    # Each rest of a side is then a program.
    monkeypatch.setattr(freeing, "halvings", lambda sides, moduli: set())

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 3, 3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.up(self.down(x)), size=x.shape[2:])

    compiled: Any = oxidiff.compile(Halved(), cache=False, strict=True)
    counts = []
    for height, width in [(a, b) for a in range(16, 20) for b in range(16, 20)]:
        taken.clear()
        x = torch.randn(1, 3, height, width)
        assert_close(compiled(x), compiled._orig_mod(x))
        counts.append(len(taken))
    assert max(counts) <= 12, counts


class Guided(nn.Module):
    """The frames of three predictions behind each other, cut apart again, as guidance by perturbed attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, video: Tensor) -> Tensor:
        b, c, f, h, w = video.shape
        y = self.conv(video.transpose(1, 2).reshape(b * f, c, h, w))
        first, second, third = y.chunk(3)
        y = torch.cat([first, second * 2, third * 0.5])
        return y.reshape(b, f, c, h, w).transpose(1, 2)


@torch.no_grad()
def test_batches_that_are_cut_into_parts_leave_frames_free() -> None:
    module = Guided().eval()
    compiled = oxidiff.compile(module)
    for b, f, h, w in [(3, 4, 16, 24), (3, 6, 8, 16), (6, 5, 16, 24), (3, 7, 24, 8)]:
        video = torch.randn(b, 3, f, h, w)
        assert_close(compiled(video), module(video))
    assert oxidiff.report(compiled).captures == 1
    # Not three to a group: another program.
    video = torch.randn(4, 3, 6, 16, 24)
    assert_close(compiled(video), module(video))


class Tripled(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 3


class Shifting:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1  # type: ignore[misc]


class Shifted(Shifting, nn.Linear):
    pass


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("kind", [Tripled, Shifted])
def test_a_call_that_the_class_defines_itself_is_that_call(kind: Any) -> None:
    module, x = kind(8, 8), torch.randn(3, 8)
    compiled, expected = oxidiff.compile(module), module(x)
    torch.testing.assert_close(compiled(x), expected)
    with oxidiff.eager(compiled):
        torch.testing.assert_close(compiled(x), expected)
    around = nn.Sequential(compiled, nn.ReLU())
    torch.testing.assert_close(around(x), expected.relu())
    compiled.register_forward_hook(lambda module, args, result: result * 2)
    torch.testing.assert_close(compiled(x), module(x))
    assert compiled.report().eager_calls == 4


REGISTERED: list[type] = []


class Registered(nn.Module):
    """Keeps a list of its subclasses, of which no two may have one name."""

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        if any(cls.__name__ == known.__name__ for known in REGISTERED):
            raise ValueError(f"{cls.__name__} is registered already")
        REGISTERED.append(cls)


class Architecture(Registered, kind="small"):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@torch.no_grad()
def test_a_class_that_keeps_a_list_of_its_subclasses_is_not_told() -> None:
    compiled, x = oxidiff.compile(Architecture(), strict=True), torch.randn(3)
    assert torch.equal(compiled(x), x * 2)
    assert isinstance(compiled, oxidiff.CompiledModule)
    assert [Architecture] == REGISTERED
    assert type(compiled).__bases__ == (Architecture, oxidiff.CompiledModule)


class Pipeline:
    """As diffusers' are."""

    components: ClassVar[dict[str, Any]] = {}

    def register_modules(self, **modules: Any) -> None:
        pass

    def __call__(self, prompt: str) -> Any:
        raise NotImplementedError


def test_a_pipeline_is_no_module() -> None:
    with pytest.raises(TypeError, match="compile_pipe compiles the parts of a Pipeline"):
        oxidiff.compile(Pipeline())  # type: ignore[call-overload]


class Slotted(nn.Module):
    __slots__ = ("rate",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(8, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.rate


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_attributes_in_slots_are_those_of_the_module() -> None:
    module, x = Slotted(), torch.randn(3, 8)
    compiled = oxidiff.compile(module)
    assert compiled.rate == 2.0
    for holder, rate in ((module, 5.0), (compiled, 7.0), (module, 3.0)):
        holder.rate = rate
        assert module.rate == compiled.rate == rate
        torch.testing.assert_close(compiled(x), module(x))
    inside = oxidiff.compile(nn.Sequential(module))
    inside(x)
    module.rate = 9.0
    torch.testing.assert_close(inside(x), module(x))
    with pytest.raises(oxidiff.UnsupportedError, match="Slotted keeps rate in slots"):
        oxidiff.compile(module, strict=True)(x)
