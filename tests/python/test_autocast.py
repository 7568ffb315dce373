"""Calls under `torch.autocast`: a program with eager's casts for each state of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from families_images import IMAGES
from families_unets import UNETS
from families_videos import VIDEOS
from nets import Net, assert_close, image
from oxidiff import testing
from oxidiff.capture import capture, trials
from oxidiff.capture.casts import POLICIES, dispatch_key

HALVES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Half a unit in the last place, relative."""


trace = importlib.import_module("oxidiff.capture.trace")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, BIAS, KERNEL = numbers(6, 8), numbers(6, seed=1), numbers(6, 4, 3, 3, seed=2)


def low(x: Tensor) -> Tensor:
    """In autocast's type."""
    return F.linear(x, WEIGHT, BIAS)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.cat((x * 2, x.sigmoid()), -1)


def without(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x, WEIGHT)


def within(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.float16):
        inner = low(x)
    return inner, low(x)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "linear": low,
    "linear of two": lambda x: F.linear(low(x)[..., :3], WEIGHT[:, :3]),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "a matrix of constants": lambda x: torch.arange(x.shape[-1]).float() @ WEIGHT.T,
    "einsum": lambda x: torch.einsum("bij,kj->bik", x, WEIGHT),
    "einsum of both": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x @ x.transpose(1, 2), x, x.transpose(1, 2)),
    "addmm": lambda x: torch.addmm(BIAS, x[0], WEIGHT.T),
    "tensordot": lambda x: torch.tensordot(x, WEIGHT, ([2], [1])),
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), KERNEL.flatten(1)[:, :24].reshape(6, 8, 3)),
    "conv2d": lambda x: F.conv2d(x[:, None].expand(-1, 4, -1, -1), KERNEL, BIAS, padding=1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[:, None].expand(-1, 6, -1, -1), KERNEL, padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "prelu": lambda x: F.prelu(x, BIAS[:1].abs()),
    "softmax": lambda x: F.softmax(low(x), -1),
    "softmax in float32": lambda x: F.softmax(low(x), -1, dtype=torch.float32),
    "layer_norm": lambda x: F.layer_norm(low(x), (6,)),
    "layer_norm with weights": lambda x: F.layer_norm(low(x), (6,), BIAS, BIAS),
    "group_norm": lambda x: F.group_norm(low(x)[:, None].expand(-1, 6, -1, -1), 2, BIAS, BIAS),
    "rms_norm": lambda x: F.rms_norm(low(x), (6,)),
    "instance_norm": lambda x: F.instance_norm(low(x)),
    "sum of two types": lambda x: low(x) + BIAS,
    "in place": lambda x: low(x).add_(BIAS),
    "cat": lambda x: torch.cat([low(x), low(x)], -1),
    "cat of two types": lambda x: torch.cat([low(x), x], -1),
    "stack": lambda x: torch.stack([low(x), x[..., :6]]),
    "where": lambda x: torch.where(x[..., :6] > 0, low(x), BIAS),
    "gelu": lambda x: F.gelu(low(x)),
    "interpolate": lambda x: F.interpolate(low(x)[None], scale_factor=2),
    "interpolate bilinear": lambda x: F.interpolate(low(x)[None], scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(low(x), (1, 1)),
    "pad by reflection": lambda x: F.pad(low(x), (1, 1), mode="reflect"),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(low(x)[None], (1, 1)),
    "prod": lambda x: low(x).prod(-1),
    "mean": lambda x: low(x).mean(-1),
    "norm": lambda x: low(x).norm(dim=-1),
    "normalize": lambda x: F.normalize(low(x), dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(low(x), BIAS, dim=-1),
    "exp": lambda x: torch.exp(low(x) / 8),
    "pow": lambda x: low(x) ** 2,
    "complex numbers": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones(4), torch.arange(4.0))
    ),
    "doubles": lambda x: x.double() * 2,
    "switched off inside": without,
    "another type inside": within,
    "a function of TorchScript": lambda x: scripted(low(x)),
    "asking for it": lambda x: x * (2 if torch.is_autocast_enabled("cpu") else 3),
}


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@torch.no_grad()
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str) -> None:
    module = Calls(OPS[name])
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    for half in (*HALVES, torch.float32):
        for size in (5, 9):
            x = numbers(3, size, 8, seed=size)
            with torch.autocast("cpu", half, enabled=half in HALVES):
                expected, actual = module(x), compiled(x)
            pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
            for one, other in pairs:
                assert other.dtype is one.dtype
                # A few roundings of what is summed up, whose terms cancel out.
                unit = max(UNIT.get(half, 0), UNIT.get(one.dtype, 0))
                assert testing.relative_error(other, one) < 8 * unit, (half, size)
    assert oxidiff.report(compiled).eager_calls == 0


@contextlib.contextmanager
def on_cuda(dtype: torch.dtype) -> Iterator[None]:
    """As `torch.autocast("cuda")`, which is off where no GPU is."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is told that its tensors live on a GPU, where perhaps is none."""
    monkeypatch.setattr(trials, "_device_of", lambda *_: torch.device("cuda", 0))
    # Makes a tensor there.
    monkeypatch.setattr(trace, "uncompiled", lambda _: contextlib.nullcontext())


F16, F32 = torch.float16, torch.float32
ON_CUDA: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "linear": (low, F16),
    "matmul": (lambda x: x @ x.transpose(-1, -2), F16),
    "einsum": (lambda x: torch.einsum("bij,kj->bik", x, WEIGHT), F16),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), F16),
    "conv2d": (lambda x: F.conv2d(x[:, None].expand(-1, 4, -1, -1), KERNEL, BIAS, padding=1), F16),
    "softmax": (lambda x: F.softmax(low(x), -1), F32),
    "softmax in float16": (lambda x: F.softmax(x, -1, dtype=F16), F16),
    "sum": (lambda x: low(x).sum(-1), F32),
    "norm": (lambda x: low(x).norm(dim=-1), F32),
    "layer_norm": (lambda x: F.layer_norm(low(x), (6,), BIAS, BIAS), F32),
    "group_norm": (lambda x: F.group_norm(low(x)[:, None].expand(-1, 6, -1, -1), 2, BIAS, BIAS), F32),
    "interpolate": (lambda x: F.interpolate(low(x)[None], scale_factor=2), F32),
    "exp": (lambda x: torch.exp(low(x)), F32),
    "pow": (lambda x: low(x) ** 2, F32),
    "addcmul": (lambda x: torch.addcmul(BIAS, low(x), low(x)), F32),
    "addcmul of one type": (lambda x: torch.addcmul(low(x), low(x), low(x)), F16),
    "mean": (lambda x: low(x).mean(-1), F16),
    "gelu": (lambda x: F.gelu(low(x)), F16),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ON_CUDA)
def test_types_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    function, dtype = ON_CUDA[name]
    with on_cuda(F16):
        graph = capture(Calls(function), (numbers(3, 5, 8),))
    assert graph.values[graph.outputs.leaves[0].value].dtype is dtype
    assert capture(Calls(function), (numbers(3, 5, 8),)).values[0].dtype is F32


@torch.no_grad()
def test_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Wan's own code asks for it: products of what has 16 bits are of 32."""
    as_on_a_gpu(monkeypatch)
    with on_cuda(F32):
        graph = capture(Calls(lambda x: F.linear(x, WEIGHT.half())), (numbers(3, 5, 8).half(),))
    assert graph.values[graph.outputs.leaves[0].value].dtype is F32


@pytest.mark.parametrize("kind", POLICIES)
def test_the_table_is_of_ops_that_autocast_has(kind: str) -> None:
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key(kind))
    }
    assert POLICIES[kind].keys() - known <= {"rms_norm"}, "which newer versions have"
    # What models are made of.
    assert {"linear", "matmul", "conv2d", "scaled_dot_product_attention"} <= known & POLICIES[kind].keys()


def test_the_table_is_pytorchs() -> None:
    """Its own for GPUs is in a header that it comes with."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    policies = {
        "LOWER_PRECISION_FP": "to autocast's type",
        "FP32": "to float32",
        "FP32_SET_OPT_DTYPE": "to float32, by the argument dtype if none is given",
        "PROMOTE": "to the widest of their types",
    }
    found = {}
    for macro, policy in policies.items():
        text = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
        assert text is not None
        for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", text[1]):
            found[f"{op}.{overload}" if overload else op] = policy
    assert len(found) > 100
    others = {"asin", "norm.Scalar", "norm.ScalarOpt_dim", "rms_norm"}
    assert {n: p for n, p in POLICIES["cuda"].items() if found.get(n) != p}.keys() <= others


MODELS = {family.name: family for family in (*UNETS, *IMAGES, *VIDEOS)}


@torch.no_grad()
@pytest.mark.parametrize("name", ["unet-image-hint", "unet-uncond", "sd3-controlled", "wan", "bria-fibo2"])
def test_models(name: str) -> None:
    family = MODELS[name]
    module = family.build(torch.float32)
    compiled: Any = oxidiff.compile(module, cache=False)
    for size, batch in zip(family.sizes[:2], family.batches[:2], strict=False):
        inputs = family.example(batch, size, torch.float32)
        exact = family.exact(module, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            own = testing.typical_error(module(**family.example(batch, size, torch.float32)), exact)
            error = testing.typical_error(compiled(**inputs), exact)
        assert error <= 1.25 * own, (size, error, own)
    report = oxidiff.report(compiled)
    assert report.eager_calls == 0
    assert not report.fallbacks
    assert report.captures == 1


@torch.no_grad()
def test_each_state_has_a_program_of_its_own() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, cache=False, strict=True)
    states = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
    for _ in range(2):
        for size in (12, 20):
            for half, enabled in states:
                with torch.autocast("cpu", half, enabled=enabled):
                    expected, actual = module(image(2, 3, size, 10)), compiled(image(2, 3, size, 10))
                assert actual.dtype is expected.dtype
                assert testing.relative_error(actual, expected) < 8 * UNIT[expected.dtype]
    report = oxidiff.report(compiled)
    assert report.captures == len(states)
    assert report.eager_calls == 0


@torch.no_grad()
def test_weights_are_live() -> None:
    module = Net().eval()
    for memory in ("fast", "balanced", "low"):
        compiled: Any = oxidiff.compile(module, cache=False, strict=True, memory=memory)
        for factor in (1.0, 2.0, 0.5):
            module.linear.weight.mul_(factor)
            with torch.autocast("cpu", torch.bfloat16):
                expected, actual = module(image()), compiled(image())
            assert testing.relative_error(actual, expected) < 8 * UNIT[torch.bfloat16]


@torch.no_grad()
def test_stored(tmp_path: Path) -> None:
    module = Net().eval()
    first: Any = oxidiff.compile(module, cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = first(image())
    oxidiff.save_graph(first, tmp_path / "graph")
    second: Any = oxidiff.compile(module, cache=False)
    oxidiff.load_graph(second, tmp_path / "graph")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(second(image()), expected)
    assert oxidiff.report(second).captures == 0
    assert_close(second(image()), module(image()))
    assert oxidiff.report(second).captures == 1


@torch.no_grad()
def test_in_the_background() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, cache=False, background=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(image())
        compiled(image())
        oxidiff.warmup(compiled, image())
        before = oxidiff.report(compiled).eager_calls
        actual = compiled(image())
    assert actual.dtype is expected.dtype is torch.bfloat16
    assert oxidiff.report(compiled).eager_calls == before
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_adapters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
    model.eval()
    compiled: Any = oxidiff.compile(model, cache=False, strict=True)
    exact = model(numbers(3, 8))
    with torch.autocast("cpu", torch.bfloat16):
        own, actual = model(numbers(3, 8)), compiled(numbers(3, 8))
    assert actual.dtype is own.dtype
    assert testing.relative_error(actual, exact) < 8 * UNIT[torch.bfloat16]
    # Weights with adapters in them are of the whole type, as they were without.
    assert_close(compiled(numbers(3, 8)), exact)


@torch.no_grad()
def test_through_torch_compile() -> None:
    module = Net().eval()
    compiled = torch.compile(module, backend="oxidiff")
    for half, enabled in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.bfloat16, True)):
        with torch.autocast("cpu", half, enabled=enabled):
            expected, actual = module(image()), compiled(image())
        assert actual.dtype is expected.dtype
        assert testing.relative_error(actual, expected) < 8 * UNIT[expected.dtype]
    torch._dynamo.reset()


@torch.jit.script
def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.t())


@torch.no_grad()
@pytest.mark.parametrize("half", HALVES)
def test_torchscript_that_is_cast(half: torch.dtype) -> None:
    """Where it has the casts of another type in it, it runs eager."""
    module = Calls(lambda x: scripted_product(x, WEIGHT))
    compiled: Any = oxidiff.compile(module, cache=False)
    for other in (half, *HALVES):
        with torch.autocast("cpu", other):
            expected, actual = module(numbers(3, 5, 8)), compiled(numbers(3, 5, 8))
        assert actual.dtype is expected.dtype is other
        assert testing.relative_error(actual, expected) < 8 * UNIT[other]


@torch.no_grad()
def test_what_is_not_known_runs_eager() -> None:
    # Not an LSTM, which oneDNN has no bf16 for on processors without AVX-512.
    module = nn.GRU(8, 8).eval()
    compiled: Any = oxidiff.compile(module, cache=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(oxidiff.FallbackWarning, match="autocast makes of"):
        actual = compiled(numbers(3, 2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(numbers(3, 2, 8))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(compiled(numbers(3, 2, 8)), module(numbers(3, 2, 8)))


class Writes(nn.Module):
    """Into its own buffers and parameters, at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.mul_(0.5).add_(x.mean(0).float())
        self.weight[0] = 2
        nn.init.ones_(self.weight[1:])
        self.weight.requires_grad_(False)
        return x + self.mean + self.weight


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_writes_into_weights_are_eagers() -> None:
    module = Writes()
    other = copy.deepcopy(module)
    compiled: Any = oxidiff.compile(module, cache=False)
    for i in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = compiled(numbers(3, 4, seed=i)), other(numbers(3, 4, seed=i))
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(module.mean, other.mean, rtol=2**-6, atol=2**-6)
        assert torch.equal(module.weight, other.weight)
        assert module.weight.requires_grad == other.weight.requires_grad


@torch.no_grad()
def test_ops_whose_parts_depend_on_an_exponent() -> None:
    for exponent in (1, 3, 2):
        module = Calls(functools.partial(torch.linalg.matrix_power, n=exponent))
        compiled: Any = oxidiff.compile(module, cache=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(numbers(4, 4)).dtype is module(numbers(4, 4)).dtype


@torch.no_grad()
def test_what_leaves_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    x = (numbers(3, 5, 8),)
    for leaves in (lambda x: x.cpu() * 2, lambda x: x.to("cpu", F16)):
        with pytest.raises(oxidiff.CaptureError, match=r"a tensor is moved to c.*, from cuda:0"):
            capture(Calls(leaves), x)
