"""Values above the largest f16, with ``nan_guard=True``."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import programs_go_with
from oxidiff.testing import build, example_inputs, reference, relative_error


class Overflowing(nn.Module):
    """Hidden values up to about 1e6, which a norm brings back, as in SDXL's VAE."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen = nn.Linear(32, 64)
        self.deepen = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.narrow = nn.Linear(64, 16)
        with torch.no_grad():
            self.widen.weight.mul_(1000)
        self.gain = nn.Parameter(torch.tensor(gain))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.widen(x * 1000 * self.gain)
        return self.narrow(self.norm(hidden + self.deepen(hidden)))


def _inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def _exact(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(module).double()(x.double())


@pytest.mark.parametrize("precision", ["eager", "fast"])
def test_what_overflows_is_computed_in_f32(precision: str) -> None:
    module = Overflowing().half()
    x = _inputs(7, 32)
    with torch.no_grad():
        assert not module(x).isfinite().any()
    compiled = oxidiff.compile(module, nan_guard=True, precision=precision)
    with pytest.warns(RuntimeWarning, match="Overflowing: a result is not finite in float16"):
        got = compiled(x)
    assert got.dtype == torch.float16
    # One rounding of the result, and the products' own in f32.
    assert relative_error(got, _exact(module, x)) < 2**-10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Two dimensions more or fewer are another program.
        for shape in ((7, 32), (3, 5, 32), (64, 32), (1, 1, 32)):
            x = _inputs(*shape, seed=2)
            assert relative_error(compiled(x), _exact(module, x)) < 2**-10
    assert oxidiff.report(compiled).eager_calls == 0
    assert [variant["in_float32"] for variant in oxidiff.explain(compiled).variants] == [True, True]


def test_what_does_not_overflow_stays_f16() -> None:
    module = Overflowing(gain=1e-3).half()
    guarded, plain = oxidiff.compile(module, nan_guard=True), oxidiff.compile(module)
    x = _inputs(7, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(guarded(x), plain(x))
    assert oxidiff.report(plain).shared_with == 1


def test_weights_stay_live() -> None:
    module = Overflowing().half()
    compiled = oxidiff.compile(module, nan_guard=True)
    x = _inputs(7, 32)
    with pytest.warns(RuntimeWarning):
        compiled(x)
    with torch.no_grad():
        module.narrow.weight.mul_(0.5)
        module.narrow.bias.copy_(torch.arange(16))
    assert relative_error(compiled(x), _exact(module, x)) < 2**-10
    module.narrow.weight = nn.Parameter(torch.ones(16, 64).half(), requires_grad=False)
    assert relative_error(compiled(x), _exact(module, x)) < 2**-10


def test_arguments_that_are_not_finite_say_nothing() -> None:
    module = Overflowing(gain=1e-3).half()
    compiled = oxidiff.compile(module, nan_guard=True)
    x = _inputs(7, 32)
    x[3, 4] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = compiled(x)
    assert got.isnan().any(-1).tolist() == [row == 3 for row in range(7)]


def test_a_result_beyond_f16_is_infinite() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 60000

    compiled = oxidiff.compile(Large(), nan_guard=True)
    x = torch.tensor([0.5, 2.0, -3.0]).half()
    with pytest.warns(RuntimeWarning):
        got = compiled(x)
    assert got.tolist() == [30000.0, float("inf"), float("-inf")]


def test_bf16_and_f32_are_not_looked_at() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        module = Overflowing().to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert oxidiff.compile(module, nan_guard=True)(_inputs(7, 32).to(dtype)).isfinite().all()


def test_a_warning_that_is_an_error_reaches_the_caller() -> None:
    module = Overflowing().half()
    compiled = oxidiff.compile(module, nan_guard=True)
    x = _inputs(7, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="not finite"):
            compiled(x)
        assert relative_error(compiled(x), _exact(module, x)) < 2**-10


def test_with_check() -> None:
    module = Overflowing().half()
    compiled = oxidiff.compile(module, nan_guard=True, check=True)
    with pytest.warns(RuntimeWarning):
        assert compiled(_inputs(7, 32)).isfinite().all()
    assert compiled(_inputs(9, 32)).isfinite().all()


def test_ops_that_run_eager_between_programs() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Overflowing(), nn.Linear(16, 16)
            self.eval().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).cumprod(-1))

    module = Cut().half()
    compiled = oxidiff.compile(module, nan_guard=True)
    x = _inputs(7, 32)
    with pytest.warns() as caught:
        got = compiled(x)
    assert any(w.category is RuntimeWarning for w in caught)
    between = _exact(module.first, x).half().cumprod(-1).double()
    assert relative_error(got, _exact(module.second, between)) < 2**-9


def test_programs_go_with_their_module() -> None:
    compiled = oxidiff.compile(Overflowing().half(), nan_guard=True)
    with pytest.warns(RuntimeWarning):
        compiled(_inputs(7, 32))
    held = [compiled]
    del compiled
    assert programs_go_with(held)


def test_threads_find_it_at_once() -> None:
    module = Overflowing().half()
    compiled = oxidiff.compile(module, nan_guard=True)
    results: list[Tensor | BaseException] = []

    def call(seed: int) -> None:
        x = _inputs(7, 32, seed=seed)
        try:
            for _ in range(10):
                results.append(compiled(x) - _exact(module, x))
        except BaseException as error:
            results.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 40
    for difference in results:
        assert isinstance(difference, Tensor)
        assert difference.abs().max() < 0.01


def test_a_vae_whose_residuals_overflow() -> None:
    decoder = build("sdxl-vae-decoder", dtype=torch.float16)
    with torch.no_grad():
        decoder.get_parameter("conv_in.weight").mul_(1e4 / decoder.get_parameter("conv_in.weight").abs().max())
    compiled = oxidiff.compile(decoder, nan_guard=True)
    for size in ((8, 8), (6, 10)):
        inputs = example_inputs("sdxl-vae-decoder", size=size, dtype=torch.float16)
        inputs = {name: value * 100 for name, value in inputs.items()}
        with torch.no_grad():
            assert not decoder(**inputs).isfinite().all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = compiled(**inputs)
        (want,) = reference(decoder, inputs)
        assert relative_error(got, want) < 2**-10
    assert oxidiff.report(compiled).eager_calls == 0
