"""What a drop-in backend has to survive. Where eager returns, the same comes back, compiled or eager with a reason; where
eager raises, its exception arrives; a good call afterwards works."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxidiff
from files import python
from nets import Net, Returns, assert_close, image, shallow
from oxidiff import dispatch, engine, testing
from oxidiff.ambient import collection_paused, reset_pause
from oxidiff.capture import is_tracing
from oxidiff.ready import Ready
from oxidiff.store.encode import decoding

pytestmark = pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")


PACKAGE = os.path.dirname(oxidiff.__file__) + os.sep


@pytest.fixture
def module() -> Net:
    return Net().eval()


@pytest.fixture
def compiled(module: Net) -> Any:
    return oxidiff.compile(module)


def compiled_epoch(compiled: Any) -> Any:
    return oxidiff.module.dispatcher_of(compiled).states.epoch


def assert_works(compiled: Any) -> None:
    """A good call gives what eager gives, compiled."""
    before = oxidiff.report(compiled).eager_calls
    with torch.no_grad():
        assert_close(compiled(image()), compiled._orig_mod(image()))
    assert oxidiff.report(compiled).eager_calls == before


def assert_eager(compiled: Any, *args: Any, reason: str, **kwargs: Any) -> None:
    """The call runs eager for ``reason``, and gives what eager gives."""
    before = oxidiff.report(compiled).eager_calls
    actual, expected = compiled(*args, **kwargs), compiled._orig_mod(*args, **kwargs)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    report = oxidiff.report(compiled)
    assert report.eager_calls == before + 1
    assert any(reason in item["reason"] for item in report.fallbacks), report.fallbacks


# --- arguments --------------------------------------------------------------------------------------------------------

WRONG_CALLS: dict[str, Any] = {
    "channels": lambda call: call(image(2, 4, 12, 10)),
    "rank": lambda call: call(image(2, 12)),
    "double": lambda call: call(image().double()),
    "half": lambda call: call(image().half()),
    "integer": lambda call: call(image().to(torch.int64)),
    "missing": lambda call: call(),
    "extra": lambda call: call(image(), 1.0, 2.0),
    "unknown keyword": lambda call: call(image(), zoom=1.0),
    "twice": lambda call: call(image(), x=image()),
    "None": lambda call: call(None),
    "list": lambda call: call([1.0, 2.0]),
    "numpy": lambda call: call(np.zeros((2, 3, 12, 10), np.float32)),
    "string": lambda call: call("image"),
    "meta": lambda call: call(image(), torch.ones(1, device="meta")),
    "factor": lambda call: call(image(), torch.ones(3)),
    "sparse": lambda call: call(image().to_sparse()),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", WRONG_CALLS)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_wrong_arguments_raise_as_in_eager(module: Net, compiled: Any, kind: str, warm: bool) -> None:
    call = WRONG_CALLS[kind]
    with pytest.raises(Exception) as expected:
        call(module)
    if warm:
        compiled(image())
    for _ in range(2):
        with pytest.raises(expected.type):
            call(compiled)
    assert not oxidiff.report(compiled).fallbacks, "a call that fails in eager too is no fallback"
    assert_works(compiled)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["channels", "missing", "double", "None"])
def test_wrong_arguments_raise_as_in_eager_when_strict(module: Net, kind: str) -> None:
    compiled: Any = oxidiff.compile(module, strict=True)
    with pytest.raises(Exception) as expected:
        WRONG_CALLS[kind](module)
    with pytest.raises(expected.type):
        WRONG_CALLS[kind](compiled)
    assert_works(compiled)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, 3, 12, 10), (2, 3, 0, 10), (2, 3, 12, 0)])
def test_no_elements(compiled: Any, shape: tuple[int, ...]) -> None:
    class Pointwise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1

    pointwise = Pointwise()
    assert_eager(oxidiff.compile(pointwise), torch.empty(shape), reason="no elements")
    try:
        expected = compiled._orig_mod(torch.empty(shape))
    except RuntimeError:
        with pytest.raises(RuntimeError):
            compiled(torch.empty(shape))
    else:
        assert compiled(torch.empty(shape)).shape == expected.shape
    assert_works(compiled)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (1, 3, 3, 3), (2, 3, 7, 9), (1, 3, 13, 1), (7, 3, 31, 17)])
def test_odd_sizes(module: Net, compiled: Any, shape: tuple[int, ...]) -> None:
    compiled(image())
    assert_close(compiled(image(*shape)), module(image(*shape)))
    assert_works(compiled)


LAYOUTS: dict[str, Any] = {
    "transposed": lambda: image(2, 3, 10, 12).transpose(2, 3),
    "channels last": lambda: image().to(memory_format=torch.channels_last),
    "stepped": lambda: image(2, 3, 24, 20)[:, :, ::2, ::2],
    "cropped": lambda: image(2, 3, 20, 20)[:, :, 3:15, 5:15],
    "expanded": lambda: image(1, 3, 12, 10).expand(2, 3, 12, 10),
    "stride 0": lambda: image(2, 3, 1, 1).expand(2, 3, 12, 10),
    "offset": lambda: image(721)[1:].view(2, 3, 12, 10),
    "overlapping": lambda: image(500).as_strided((2, 3, 12, 10), (50, 7, 3, 1)),
    "unaligned": lambda: (
        torch.frombuffer(bytearray(image().numpy().tobytes() + b"0" * 4), dtype=torch.float32, offset=4)
        .view(2, 3, 12, 10)
        .nan_to_num(0, 0, 0)
    ),
    "batch moved": lambda: image(3, 12, 10, 2).permute(3, 0, 1, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(module: Net, compiled: Any, layout: str) -> None:
    x = LAYOUTS[layout]()
    kept = x.clone()
    assert_close(compiled(x), module(x))
    assert torch.equal(x, kept)
    assert_close(compiled(x), module(x))
    assert_works(compiled)


@torch.no_grad()
def test_read_only_memory(compiled: Any, module: Net) -> None:
    array = image().numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.from_numpy(array)
    assert_close(compiled(x), module(x))


@torch.no_grad()
def test_lazy_negation_and_conjugation() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    compiled = oxidiff.compile(Double())
    z = torch.complex(image(6), image(6, seed=1))
    assert z.conj().imag.is_neg()
    assert_eager(compiled, z.conj().imag, reason="negation")
    assert_eager(compiled, z.conj(), reason="conj")
    assert_eager(compiled, z, reason="complex")


class Subclass(Tensor):
    """A tensor with a type of its own."""


@torch.no_grad()
def test_unusual_tensors(module: Net, compiled: Any) -> None:
    assert_eager(compiled, image().as_subclass(Subclass), reason="subclass Subclass")
    assert_eager(compiled, image().to_mkldnn().to_dense().to(torch.float32).as_subclass(Subclass), reason="Subclass")
    assert_close(compiled(nn.Parameter(image())), module(image()))
    meta: Any = oxidiff.compile(nn.ReLU())
    assert meta(torch.ones(3, 4, device="meta")).device.type == "meta"
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert meta(nested).is_nested
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    assert meta(quantized).is_quantized
    assert meta(torch.eye(3).to_sparse()).is_sparse
    assert_works(compiled)


@torch.no_grad()
def test_fake_tensors_and_transforms(module: Net, compiled: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    compiled(image())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert compiled(mode.from_tensor(image())).shape == (2, 12, 10, 8)
    expected = torch.func.vmap(module)(image(4, 2, 3, 12, 10))
    assert_close(torch.func.vmap(compiled)(image(4, 2, 3, 12, 10)), expected)
    with torch.device("cpu"):
        assert_close(torch.func.vmap(compiled)(image(4, 2, 3, 12, 10)), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(image(2, 3, 12, 10), image(2, 3, 12, 10, seed=1))
        tangents = [torch.autograd.forward_ad.unpack_dual(call(dual)).tangent for call in (module, compiled)]
        assert_close(tangents[1], tangents[0])
    counts = {row["reason"]: row["count"] for row in compiled.report().fallbacks}
    assert counts["a torch.func transform is active"] == 2
    assert_works(compiled)


@torch.no_grad()
def test_one_tensor_as_two_arguments() -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 + b * 3

    compiled = oxidiff.compile(Add(), strict=True)
    x, y = image(4, 6), image(4, 6, seed=1)
    assert_close(compiled(x, x), x * 5)
    assert_close(compiled(x, y), x * 2 + y * 3)
    whole = image(6, 6)
    assert_close(compiled(whole[:4], whole[2:]), whole[:4] * 2 + whole[2:] * 3)
    assert_close(compiled(b=x, a=y), y * 2 + x * 3)


@torch.no_grad()
def test_in_place_modules() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x + 1

    class OnItsOwn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            y[:, 1:] *= 3
            y.clamp_(min=0)
            return y

    ours, eager = image(3, 4), image(3, 4)
    assert_close(oxidiff.compile(InPlace())(ours), InPlace()(eager))
    assert torch.equal(ours, eager), "the side effect happened as well"
    assert_close(oxidiff.compile(OnItsOwn())(ours), OnItsOwn()(ours))


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x,
        lambda x, w: (x, x + 1),
        lambda x, w: x[1:],
        lambda x, w: x.view(-1),
        lambda x, w: w,
        lambda x, w: w[:2] + x[:2, :1],
        lambda x, w: None,
        lambda x, w: {"a": x + w, "b": None, "c": 3, "d": [x * 2, "text"]},
        lambda x, w: (x + 1, 2.5, x.shape[0]),
        lambda x, w: [x + w],
        lambda x, w: (),
        lambda x, w: torch.ones(3),
    ],
    ids=[
        "input",
        "tuple",
        "slice",
        "view",
        "weight",
        "weight_slice",
        "none",
        "dict",
        "numbers",
        "list",
        "empty",
        "constant",
    ],
)
def test_results(function: Any) -> None:
    module = Returns(function)
    compiled: Any = oxidiff.compile(module)
    for rows in (3, 5):
        x = image(rows, 4)
        kept, weight = x.clone(), module.weight.clone()
        actual, expected = compiled(x), module(x)
        if not isinstance(expected, Tensor):
            assert type(actual) is type(expected)
        for a, b in zip(*(torch.utils._pytree.tree_leaves(v) for v in (actual, expected)), strict=True):
            if isinstance(b, Tensor):
                assert_close(a.detach(), b.detach())
            else:
                assert (type(a), a) == (type(b), b)
        assert torch.equal(x, kept)
        assert torch.equal(module.weight, weight)


@torch.no_grad()
def test_results_own_their_memory(module: Net) -> None:
    compiled: Any = oxidiff.compile(module, strict=True)
    first = compiled(image())
    kept = first.clone()
    for seed in range(5):
        compiled(image(seed=seed + 1))
    assert torch.equal(first, kept)
    feed = oxidiff.compile(nn.Sequential(nn.Linear(4, 4), nn.SiLU()).eval(), strict=True)
    x = image(3, 4)
    for _ in range(4):
        x = feed(x)
    del compiled, module, feed
    assert torch.equal(first, kept)
    first.add_(1)


@torch.no_grad()
def test_same_bits_and_bounded_sizes(module: Net) -> None:
    compiled: Any = oxidiff.compile(module, strict=True, max_specializations=4)
    first = compiled(image())
    for height in range(3, 40):
        compiled(image(1, 3, height, 11))
    assert torch.equal(compiled(image()), first)
    assert oxidiff.report(compiled).specializations <= 4


# --- gradients and modes ----------------------------------------------------------------------------------------------


def test_gradients(module: Net, compiled: Any) -> None:
    module.train()
    with pytest.warns(oxidiff.FallbackWarning, match="training"):
        compiled(image()).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(image()).square().sum().backward()
    module(image())
    assert_close([p.grad for p in module.parameters()], expected)
    module.eval().requires_grad_(False)
    assert_close(compiled(image()), module(image()))
    assert oxidiff.report(compiled).eager_calls == 2
    x = image().requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert oxidiff.report(compiled).eager_calls == 3


def test_inference_mode(module: Net, compiled: Any) -> None:
    with torch.inference_mode():
        x = image() + 0
        inside = compiled(x)
        assert_close(inside, module(x))
        weights = Net().eval()
    with torch.no_grad():
        assert_close(compiled(x), module(x))
        assert_close(oxidiff.compile(weights)(image()), weights(image()))
    assert oxidiff.report(compiled).eager_calls == 0


class Patches(nn.Module):
    """Vision transformers: a token of its own before those of an image, whose number is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 8, 14, 14)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        if patches.shape[1] != 16:
            patches = patches * 2
        return torch.cat((self.token.expand(x.shape[0], -1, -1), patches), 1) + self.places


def test_a_size_that_a_trace_shows_in_inference_mode() -> None:
    module = Patches().eval()
    compiled = oxidiff.compile(module, strict=True, cache=False)
    with torch.inference_mode():
        for batch in (2, 3):
            x = torch.randn(batch, 3, 56, 56)
            assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == 1


@torch.no_grad()
def test_modes_switched_after_compiling(module: Net, compiled: Any) -> None:
    compiled(image())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(image()).dtype == module(image()).dtype == torch.bfloat16
    assert compiled(image()).dtype == torch.float32
    assert oxidiff.report(compiled).eager_calls == 0

    class Ones(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(3) * x.shape[0]

    ones: Any = oxidiff.compile(Ones())
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert ones(image()).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert_works(compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.device("cpu"):
        assert_works(compiled)


@torch.no_grad()
def test_train_and_eval() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    twin.load_state_dict(module.state_dict())
    compiled: Any = oxidiff.compile(module)
    for seed in range(2):
        torch.manual_seed(seed)
        actual = compiled(image(seed=seed))
        torch.manual_seed(seed)
        assert_close(actual, twin(image(seed=seed)))
    assert_close(module[1].running_mean, twin[1].running_mean)
    assert module[1].num_batches_tracked == 2
    compiled.eval(), twin.eval()
    assert_close(compiled(image()), twin(image()))
    assert oxidiff.report(compiled).eager_calls == 2


class TimedOutError(Exception):
    """What a limit of time for threads raises in them."""


class Waits(nn.Module):
    """Stops once, in another thread, where something may be raised in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread() and not _inside.is_set():
            _inside.set()
            _go_on.wait()
        return self.layer(x).relu()


_inside, _go_on = threading.Event(), threading.Event()


@torch.no_grad()
def test_what_another_thread_raises_reaches_the_caller() -> None:
    compiled: Any = oxidiff.compile(Waits().eval(), cache=False)
    raised: list[type[BaseException]] = []

    def run() -> None:
        try:
            with torch.no_grad():
                compiled(image(2, 4))
        except TimedOutError as error:
            raised.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    _inside.wait()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TimedOutError))
    _go_on.set()
    thread.join()
    assert raised == [TimedOutError]
    assert_close(compiled(image(2, 4)), compiled.layer(image(2, 4)).relu())
    report = oxidiff.report(compiled)
    assert (report.eager_calls, report.fallbacks) == (0, [])


@torch.no_grad()
def test_random_numbers_are_not_frozen() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    compiled = oxidiff.compile(Noise())
    x = torch.zeros(3, 4)
    torch.manual_seed(1)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, Noise()(x))


@torch.no_grad()
def test_process_state_is_left_alone(module: Net, compiled: Any) -> None:
    def state() -> Any:
        return (
            torch.get_num_threads(), torch.get_rng_state().sum().item(), dict(os.environ), os.getcwd(),
            [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)], np.geterr(),
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            float(torch.tensor([1e-40]) * 1), sys.getrecursionlimit(), nn.Module.__call__,
        )  # fmt: skip

    before = state()
    compiled(image())
    compiled(image(1, 3, 9, 9))
    assert state() == before


# --- values that change -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_numbers_change_per_call(module: Net, compiled: Any) -> None:
    for factor in (1.0, 0.5, 2, -3.25, 0.0, 7, True):
        assert_close(compiled(image(), factor), module(image(), factor))
    assert_close(compiled(image(), factor=torch.tensor(0.25)), module(image(), torch.tensor(0.25)))
    for factor in np.linspace(0.1, 0.9, 20):
        assert_close(compiled(image(), float(factor)), module(image(), float(factor)))
    assert oxidiff.report(compiled).eager_calls == 0
    captures = oxidiff.report(compiled).captures
    compiled(image(), 0.123)
    assert oxidiff.report(compiled).captures == captures


@torch.no_grad()
def test_timesteps() -> None:
    unet = shallow("sd15-unet")
    compiled: Any = oxidiff.compile(unet)
    inputs = testing.example_inputs("sd15-unet")
    for timestep in (
        500,
        3,
        981,
        3.0,
        500.5,
        torch.tensor(7),
        torch.tensor([7]),
        torch.tensor(7.5),
        torch.tensor([1.5]),
    ):
        inputs["timestep"] = timestep
        assert testing.relative_error(compiled(**inputs), testing.reference(unet, inputs)) < 2e-5, timestep
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_flags_select() -> None:
    class Flags(nn.Module):
        def forward(self, x: Tensor, mode: str = "a", flag: bool = False, other: Tensor | None = None) -> Tensor:
            x = x + 1 if mode == "a" else x - 1
            if flag:
                x = x * 2
            return x if other is None else x + other

    module = Flags()
    compiled = oxidiff.compile(module, strict=True)
    x = image(3, 4)
    calls: list[dict[str, Any]] = [{}, {"mode": "b"}, {"flag": True}, {"other": x}, {"other": None}, {"flag": False}]
    for kwargs in calls * 2:
        assert_close(compiled(x, **kwargs), module(x, **kwargs))
    assert oxidiff.report(compiled).captures == 4


@torch.no_grad()
def test_nan_and_infinity(module: Net) -> None:
    compiled: Any = oxidiff.compile(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU()).eval(), strict=True)
    x = image()
    x[0, 0, 0, 0], x[0, 1, 5, 5], x[1, 2, 3, 3], x[1, 0, 0, 0] = float("nan"), float("inf"), -float("inf"), -0.0
    actual, expected = compiled(x), compiled._orig_mod(x)
    assert torch.equal(actual.isfinite(), expected.isfinite())
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


# --- what forward does ------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Decides by values that follow from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if x.sum() > 0:
            return x * 2
        return x - x.max().item()


class Counts(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class ThroughNumpy(nn.Module):
    """Leaves torch in between."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)) + 1


class Custom(nn.Module):
    """Calls an op that no compiler knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.inner[0].forward = lambda x: torch.linalg.matrix_exp(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@torch.no_grad()
@pytest.mark.parametrize(("make", "eager_calls"), [(Branches, 0), (Counts, 4), (ThroughNumpy, 1), (Custom, 0)])
def test_what_cannot_be_captured_is_split_or_runs_eager(make: Any, eager_calls: int) -> None:
    module, twin = make().eval(), make().eval()
    compiled: Any = oxidiff.compile(module)
    for seed in range(4):
        x = image(4, 4, seed=seed) * (1 if seed % 2 else -1)
        assert_close(compiled(x), twin(x))
    report = oxidiff.report(compiled)
    assert report.eager_calls == eager_calls
    assert report.fallbacks[0]["count"] == 4
    strict: Any = oxidiff.compile(make().eval(), strict=True)
    with pytest.raises(oxidiff.CaptureError):
        strict(image(4, 4))


@torch.no_grad()
def test_unsupported_op_is_named_once() -> None:
    compiled: Any = oxidiff.compile(Custom().eval())
    with pytest.warns(oxidiff.FallbackWarning) as caught:
        for _ in range(3):
            compiled(image(4, 4))
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the user's line"
    text = str(caught[0].message)
    assert "Custom.inner.0" in text
    assert "matrix_exp" in text
    (fallback,) = oxidiff.report(compiled).fallbacks
    assert (fallback["module"], fallback["count"]) == ("inner.0", 3)
    assert "matrix_exp" in fallback["op"]
    assert "matrix_exp" in str(oxidiff.explain(compiled))
    with pytest.raises(oxidiff.UnsupportedError, match="matrix_exp"):
        oxidiff.compile(Custom().eval(), strict=True)(image(4, 4))


@torch.no_grad()
def test_exception_of_forward() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_angry = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_angry or x.shape[0] == 3:
                raise ZeroDivisionError("three")
            return x + 1

    compiled: Any = oxidiff.compile(Picky().eval())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="three"):
            compiled(image(3, 4))
    assert_close(compiled(image(4, 4)), image(4, 4) + 1)
    compiled.is_angry = True
    with pytest.raises(ZeroDivisionError):
        compiled(image(4, 4))
    compiled.is_angry = False
    assert_close(compiled(image(4, 4)), image(4, 4) + 1)


@torch.no_grad()
def test_deep_long_and_wide() -> None:
    deep: nn.Module = nn.Linear(4, 4)
    for _ in range(150):
        deep = nn.Sequential(deep)
    long = nn.Sequential(*(nn.Linear(4, 4) for _ in range(750)))

    class Wide(nn.Module):
        def forward(self, *parts: Tensor) -> Tensor:
            return torch.stack(parts).sum(0)

    for module, args in (
        (deep, (image(3, 4),)),
        (long, (image(3, 4),)),
        (Wide(), tuple(image(3, 4, seed=i) for i in range(300))),
    ):
        compiled = oxidiff.compile(module.eval())
        torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-3, atol=1e-4)


# --- interruption -----------------------------------------------------------------------------------------------------


def interrupted_at(n: int, run: Any, is_counted: Any) -> bool:
    """Runs ``run`` with a `KeyboardInterrupt` at the n-th event of those that count (`sys.settrace`); false if it had fewer.
    Python raises one as a function begins, after a call and as a loop begins again."""
    left = n

    def follow(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if is_counted(frame.f_code, event):
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return follow

    sys.settrace(follow)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def is_function_of(*places: str) -> Any:
    """Whether an event is that a function of a file with one of these in its path begins."""
    return lambda code, event: event == "call" and any(place in code.co_filename for place in places)


@torch.no_grad()
@pytest.mark.parametrize("change", ["written", "replaced", "another structure"])
def test_interrupt_while_changes_are_noticed(module: Net, compiled: Any, change: str) -> None:
    structures = [nn.GELU(), nn.SiLU()] if change == "another structure" else [module.act]
    for module.act in structures:
        compiled(image())
    for n in itertools.count(1):
        module.act = structures[n % len(structures)]
        if change == "replaced":
            module.conv.weight = nn.Parameter(module.conv.weight + 0.5)
        else:
            module.conv.weight.add_(0.5)
        if not interrupted_at(n, functools.partial(compiled, image()), is_function_of(PACKAGE)):
            break
        assert_works(compiled)
    assert n > 10 and not oxidiff.report(compiled).fallbacks


def test_interrupt_leaves_a_process_that_works() -> None:
    """A capture has much of torch look elsewhere meanwhile."""
    before = {name: vars(nn.Module).get(name) for name in ("__call__", "__setattr__", "__init__", "add_module")}
    traced = [f"capture/{name}.py" for name in ("trace", "recorder", "handlers", "pretence", "following", "leftovers")]
    is_counted = is_function_of(*traced, "contextlib.py", "_python_dispatch.py", "torch/overrides.py")
    latest: dict[Any, int] = {}

    def noted(code: Any, event: str) -> bool:
        if is_counted(code, event):
            latest[code] = count[0] = count[0] + 1
        return False

    count = [0]
    compiled = oxidiff.compile(Net().eval(), cache=False)
    with torch.no_grad():
        interrupted_at(0, functools.partial(compiled, image()), noted)
    assert len(latest) > 30
    for n in latest.values():
        compiled = oxidiff.compile(Net().eval(), cache=False)
        with torch.no_grad():
            interrupted_at(n, functools.partial(compiled, image()), is_counted)
        assert {name: vars(nn.Module).get(name) for name in before} == before
        assert not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
        assert gc.isenabled() and torch.is_grad_enabled() and not is_tracing()
    assert_works(compiled)


def test_interrupt_as_a_context_is_entered(compiled: Any) -> None:
    def enter(make: Any) -> None:
        with make():
            sys.settrace(None)

    def is_line(code: Any, event: str) -> bool:
        return (
            event == "line" and code.co_filename.startswith(PACKAGE) and code.co_name in ("eager", "collection_paused")
        )

    for make in (compiled.eager, collection_paused):
        n = next(n for n in itertools.count(1) if not interrupted_at(n, functools.partial(enter, make), is_line))
        assert n > 3 and gc.isenabled()
    # A signal never comes where a line event does, between the end of a block and what gives its lock back.
    reset_pause()
    assert_works(compiled)


@torch.no_grad()
def test_interrupt_while_torch_has_put_a_mode_away(compiled: Any) -> None:
    """It puts it back when it is collected, which is after the call."""
    sent = []

    def send(frame: Any, event: str, argument: Any) -> None:
        if event == "c_return" and argument is next and frame.f_back.f_code.co_name == "handle_torch_function":
            sent.append(event)
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            sys.setprofile(send)
            compiled(image())
    finally:
        sys.setprofile(None)
    assert sent
    gc.collect()
    assert not torch._C._len_torch_function_stack()
    assert_works(compiled)
    assert not oxidiff.report(compiled).fallbacks


@torch.no_grad()
def test_a_call_while_an_interrupt_is_handled(compiled: Any) -> None:
    """What goes wrong then was not interrupted."""
    branches: Any = oxidiff.compile(Branches())
    x = torch.ones(2, 3)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert_works(compiled)
        assert_close(branches(x), branches._orig_mod(x))
        with pytest.raises(oxidiff.CaptureError):
            oxidiff.compile(Branches(), strict=True)(x)


@contextmanager
def raised_by_a_handler(kind: type[BaseException]) -> Iterator[Callable[[], None]]:
    """A function that sends this process a signal, whose handler raises an exception."""

    def handle(*_: Any) -> None:
        raise kind("a signal")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield functools.partial(signal.raise_signal, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@torch.no_grad()
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError, TypeError])
@pytest.mark.parametrize("where", ["describe", "capture", "compile", "run"])
def test_interrupt_leaves_a_module_that_works(
    compiled: Any, where: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with raised_by_a_handler(kind) as send, monkeypatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> Any:
            send()
            raise AssertionError("it was not interrupted")

        if where == "describe":
            patch.setattr("oxidiff.store.cache.describe", interrupt)
        elif where == "capture":
            patch.setattr(engine.Capturer, "lowered", interrupt)
        elif where == "compile":
            patch.setattr(engine._native, "compile", interrupt)
        else:
            compiled(image())
            (numbers,) = compiled_epoch(compiled).entries.values()
            ((key, ready),) = numbers.entries.items()
            patch.setitem(numbers.entries, key, Ready(interrupt, ready.profile, ready.free_numbers))
        with pytest.raises(kind):
            compiled(image())
    assert_works(compiled)
    assert not oxidiff.report(compiled).fallbacks


def test_an_exception_of_a_handler_is_no_malformed_file() -> None:
    with raised_by_a_handler(ValueError) as send, pytest.raises(ValueError, match="a signal"), decoding("a file"):
        send()


def picky(leave: Callable[[], None]) -> nn.Module:
    """A module that leaves by an exception at all sizes but one."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] != 3:
                leave()
            return x + 1

    return Picky().eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", [SystemExit, TimeoutError])
def test_interrupt_of_a_trial_reaches_the_caller(kind: type[BaseException]) -> None:
    """Of another size, which may fail."""
    with raised_by_a_handler(kind) as send, pytest.raises(kind, match="a signal"):
        oxidiff.compile(picky(send))(image(3, 4))


@torch.no_grad()
@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_forward_that_exits_at_another_size(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind("not three")

    compiled: Any = oxidiff.compile(picky(leave))
    assert_close(compiled(image(3, 4)), image(3, 4) + 1)
    assert not oxidiff.report(compiled).eager_calls
    with pytest.raises(kind, match="not three"):
        compiled(image(4, 4))


@torch.no_grad()
@pytest.mark.parametrize("where", ["capture", "compile"])
def test_internal_failure_is_a_fallback(
    module: Net, compiled: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError("a bug")

    with monkeypatch.context() as patch:
        if where == "capture":
            patch.setattr(engine.Capturer, "lowered", fail)
        else:
            patch.setattr(engine._native, "compile", fail)
        assert_eager(compiled, image(), reason="a bug")
        with pytest.raises(oxidiff.CaptureError, match="a bug"):
            oxidiff.compile(module, strict=True)(image())
    assert_close(compiled(image(3, 3, 9, 9)), module(image(3, 3, 9, 9)))


@torch.no_grad()
def test_memory_that_is_short_during_one_capture(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("oxidiff.capture.trace.following_modules", fail)
        with pytest.raises(oxidiff.OutOfMemoryError):
            compiled(image())
    assert_works(compiled)
    assert not oxidiff.report(compiled).fallbacks


def test_calls_look_nothing_up_for_the_first_time() -> None:
    """A process that is forked meanwhile would wait for whoever does."""
    script = """
        import builtins, torch, oxidiff
        from oxidiff import _native
        imported = []
        own = builtins.__import__
        builtins.__import__ = lambda name, *rest: imported.append(name) or own(name, *rest)
        _native.key_of((torch.ones(2),), {"x": 3}, [])
        builtins.__import__ = own
        print(imported)
    """
    assert python(script) == "[]\n"


def test_a_cache_whose_name_the_locale_has_no_word_for(tmp_path: Path) -> None:
    script = """
        import torch, oxidiff
        with torch.no_grad():
            compiled = oxidiff.compile(torch.nn.Linear(3, 3))
            compiled(torch.ones(2, 3))
        print(oxidiff.report(compiled).eager_calls, oxidiff.report(compiled).captures)
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    cache = str(tmp_path / "für")
    assert [python(script, OXIDIFF_CACHE_DIR=cache, **locale) for _ in range(2)] == ["0 1\n", "0 0\n"]


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory(module: Net, compiled: Any, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure frees what can be freed and tries again; the second is the caller's."""
    expected = compiled(image())
    native = engine._native.NativeError("out_of_memory", "asked for 99999 bytes", "", "")
    (numbers,) = compiled_epoch(compiled).entries.values()
    ((key, ready),) = numbers.entries.items()
    failures = [native] * times

    def run(leaves: Any) -> Any:
        if failures:
            raise failures.pop()
        return ready.run(leaves)

    numbers.entries[key] = Ready(run, ready.profile, ready.free_numbers)
    if times == 1:
        assert torch.equal(compiled(image()), expected)
    else:
        with pytest.raises(oxidiff.OutOfMemoryError, match="99999 bytes"):
            compiled(image())
        assert torch.equal(compiled(image()), expected)
    assert oxidiff.report(compiled).eager_calls == 0


def test_warnings_that_are_errors(compiled: Any) -> None:
    """They are the caller's, not a reason to run eager from then on."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", oxidiff.CacheWarning)
        os.environ["OXIDIFF_CACHE_DIR"] += "/file"
        with open(os.environ["OXIDIFF_CACHE_DIR"], "w") as file:
            file.write("no folder")
        with pytest.raises(oxidiff.CacheWarning):
            compiled(image())
    assert_works(compiled)


@torch.no_grad()
def test_index_out_of_range() -> None:
    module = nn.Embedding(5, 4).eval()
    compiled: Any = oxidiff.compile(module)
    good = torch.tensor([[1, 4], [0, 2]])
    assert_close(compiled(good), module(good))
    for bad in (torch.tensor([[1, 5]]), torch.tensor([[-1, 0], [0, 0]])):
        with pytest.raises(IndexError):
            module(bad)
        with pytest.raises(IndexError):
            compiled(bad)
    assert_close(compiled(good), module(good))


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("used_before", [False, True])
def test_fork(used_before: bool) -> None:
    """In a process of its own: what a test runner's threads do in a forked child is not this package's business."""
    program = f"""
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from nets import Net, image
import oxidiff
torch.set_grad_enabled(False)
compiled = oxidiff.compile(Net().eval(), strict=True)
expected = compiled._orig_mod(image()) if not {used_before} else compiled(image())
child = os.fork()
if child == 0:
    torch.testing.assert_close(compiled(image()), expected, rtol=1e-5, atol=1e-5)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
torch.testing.assert_close(compiled(image()), expected, rtol=1e-5, atol=1e-5)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_fork_while_another_thread_captures() -> None:
    program = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import oxidiff

class Slow(nn.Module):
    def forward(self, x):
        captures.set()
        time.sleep(0.3)
        return x + 1

def compile_slow():
    with torch.no_grad():
        oxidiff.compile(Slow(), strict=True, cache=False)(torch.ones(4, 4))

torch.set_grad_enabled(False)
captures = threading.Event()
thread = threading.Thread(target=compile_slow)
thread.start()
captures.wait()
child = os.fork()
if child == 0:
    linear = nn.Linear(8, 8)
    x = torch.ones(3, 8)
    compiled = oxidiff.compile(linear, strict=True, cache=False)
    torch.testing.assert_close(compiled(x), linear(x), rtol=1e-5, atol=1e-5)
    # Nothing of the capture is left.
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_fork_while_other_threads_run() -> None:
    """The core's locks are held for microseconds: of a hundred forks of a busy process some would meet one."""
    program = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import oxidiff

torch.set_grad_enabled(False)
module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
compiled = oxidiff.compile(module, strict=True, cache=False, tune="off")
x = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)
expected = module(x)
# What torch imports to compare is imported once, and not in each child.
torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
is_over = threading.Event()

def loop():
    torch.set_grad_enabled(False)
    rows = 0
    while not is_over.is_set():
        rows = rows % 64 + 1
        compiled(x[:rows])

threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for n in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for rows in (128, 65 + n % 60):
            torch.testing.assert_close(compiled(x[:rows]), expected[:rows], rtol=1e-5, atol=1e-5)
        os._exit(7)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
is_over.set()
for thread in threads:
    thread.join()
assert codes == [7] * 100, codes
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_fork_is_not_held_up_by_handlers_of_others() -> None:
    """Handlers that were registered before run last, and let go of the GIL, as `logging`'s do in a busy process."""
    program = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
os.register_at_fork(before=lambda: time.sleep(0.05), after_in_parent=lambda: time.sleep(0.05))
import torch
from torch import nn
import oxidiff

torch.set_grad_enabled(False)
module = nn.Linear(64, 64).eval()
compiled = oxidiff.compile(module, strict=True, cache=False, tune="off")
x = torch.ones(128, 64)
compiled(x)
is_over = threading.Event()

def loop():
    torch.set_grad_enabled(False)
    while not is_over.is_set():
        # Weights are bound with the GIL held.
        module.weight.add_(0.0)
        compiled(x)

threads = [threading.Thread(target=loop) for _ in range(2)]
for thread in threads:
    thread.start()
started = time.monotonic()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
seconds = time.monotonic() - started
is_over.set()
for thread in threads:
    thread.join()
# Those who wait for each other give up after five.
assert seconds < 5, seconds
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lock_held_while_forking(compiled: Any) -> None:
    """A child gets fresh locks: the thread that held one does not exist there."""
    dispatcher = oxidiff.module.dispatcher_of(compiled)
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with dispatcher.states.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    old = dispatcher.states.lock
    dispatch._after_fork()
    assert dispatcher.states.lock is not old
    with torch.no_grad():
        compiled(image())
    done.set()
    thread.join()


def test_interpreter_exit_during_a_call() -> None:
    program = f"""
import sys, threading, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from nets import Net, image
import oxidiff
compiled = oxidiff.compile(Net().eval())
with torch.no_grad():
    compiled(image())
def loop():
    with torch.no_grad():
        while True:
            compiled(image())
threading.Thread(target=loop, daemon=True).start()
time.sleep(0.3)
"""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], timeout=100, capture_output=True, check=False)
    assert time.monotonic() - started < 90
