"""Numbers in attributes: lifted out of the program once they were seen to change."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close
from oxidiff import engine
from oxidiff.dispatch import find_dispatcher


class Processor:
    """An object in an attribute, as attention processors are kept."""

    def __init__(self) -> None:
        self.scale = [0.5]
        self.power = {"of": 0.5}
        self.offset = 0.25


class Scaled(nn.Module):
    """Numbers kept in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Linear(8, 8)
        self.gain = 0.5
        self.inner.gain = 0.75
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.gain + self.inner(x) * self.inner.gain
        scale = self.processor.scale[0]
        if scale != 0:
            y = y + x * scale
        return y * (1 + self.processor.power["of"]) + torch.tensor(self.processor.offset)


class Normed(nn.Module):
    """Norms whose `eps`, which the compiler has to know, may change."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x) + x
        return x


@torch.no_grad()
def test_many_numbers_that_are_constants_cost_as_few_traces_as_one() -> None:
    taken = []
    for count in (1, 12):
        module = Normed(count)
        compiled = oxidiff.compile(module, cache=False)
        x = torch.randn(2, 8, 6, 6)
        compiled(x)
        for norm in module.norms:
            norm.eps = 0.5
        assert_close(compiled(x), module(x))
        dispatcher = find_dispatcher(compiled)
        assert dispatcher is not None
        taken.append(sum(each._capturer.traces for each in dispatcher.engines()))
    assert taken[0] == taken[1]


def put_gain(model: Any, value: float) -> None:
    model.gain = value


def put_inner(model: Any, value: float) -> None:
    model.inner.gain = value


def put_scale(model: Any, value: float) -> None:
    model.processor.scale[0] = value


def put_power(model: Any, value: float) -> None:
    model.processor.power["of"] = value


def put_offset(model: Any, value: float) -> None:
    model.processor.offset = value


def compiled_model(model: nn.Module, **options: Any) -> Any:
    # A number that no other test has, so that no other test's programs are found.
    model.no_other = object()
    return oxidiff.compile(model.eval(), **{"strict": True, "cache": False, **options})


def check(compiled: Any, model: nn.Module, rows: int = 3) -> Tensor:
    x = torch.randn(rows, 8)
    with torch.no_grad():
        expected = model(x)
        found: Tensor = compiled(x)
    assert_close(found, expected)
    return found


@pytest.mark.parametrize("put", [put_gain, put_inner, put_scale, put_power, put_offset])
def test_a_number_that_changed_is_an_argument(put: Callable[[Any, float], None]) -> None:
    model = Scaled()
    compiled = compiled_model(model)
    check(compiled, model)
    put(model, 0.625)
    check(compiled, model)
    before = oxidiff.report(compiled)
    assert before.captures == 2
    for value in (0.75, 0.3, 0.2, 0.8, 0.5, 2.5):
        put(model, value)
        check(compiled, model)
        check(compiled, model, rows=7)
    after = oxidiff.report(compiled)
    assert (after.captures, after.programs, after.eager_calls) == (2, before.programs, 0)


def test_special_values_are_checked() -> None:
    """0 is another program here, 1 and negative ones are not, and values that were far off are looked at once."""
    model = Scaled()
    compiled = compiled_model(model)
    for value in (0.5, 0.75, 1.0, -0.5, 1e4, -1e4, 1e-4, 3e3):
        put_scale(model, value)
        check(compiled, model)
    assert oxidiff.report(compiled).captures == 2
    for value in (0.0, 0.4, 0.0):
        put_scale(model, value)
        check(compiled, model)
    assert oxidiff.report(compiled).captures == 3


class Branching(nn.Module):
    """Asks more of its number than arithmetic."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.limit = float(limit)
        self.gain = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.gain if self.gain < self.limit else y - self.gain


@pytest.mark.parametrize("limit", [0.2, 0.55, 0.8, 2.0, 20.0, 1e3, 1e6])
def test_a_branch_on_a_number(limit: float) -> None:
    model = Branching(limit)
    compiled = compiled_model(model)
    for value in (0.5, 0.6, 0.3, 0.1, 1.5, 10.0, 30.0, 0.01, 1e5, 1e7, 0.5, 5.0):
        model.gain = value
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * min(self.gain, 0.75) ** 2


def test_a_number_that_cannot_be_an_argument_is_a_constant() -> None:
    model = Rounding()
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.7, 0.8, 0.5):
        model.gain = value
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


class Filtering(Rounding):
    """The same with an op between that runs in eager PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return torch.fft.ifft(torch.fft.fft(y)).real * min(self.gain, 0.75) ** 2


@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
def test_a_constant_beside_an_op_that_runs_eager() -> None:
    model = Filtering()
    compiled: Any = oxidiff.compile(model)
    for value in (0.5, 0.625, 0.7, 0.8, 0.5):
        model.gain = value
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


def test_a_module_that_cannot_be_copied() -> None:
    model = Scaled()
    model.lock = threading.Lock()
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.7, 0.8, 0.5):
        model.gain = value
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


class Reaching(nn.Module):
    """Reads the number of a module that its tree does not show."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 0.5
        # What a closure holds, a copy holds too.
        self.read = lambda: other.gain

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.read()


def test_a_number_that_a_copy_does_not_lead_to() -> None:
    """The trace of the copy shows no effect of the number: it stays a constant, and each value is another program."""
    holder = Scaled()
    model = Reaching(holder)
    model.holder = holder
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.7, 0.8, 0.5):
        holder.gain = value
        check(compiled, model)


def test_no_other_thread_sees_the_values_of_a_trace() -> None:
    model = Scaled()
    compiled = compiled_model(model)
    check(compiled, model)
    seen: set[float] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.add(model.gain)

    put_gain(model, 0.625)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        check(compiled, model)
        put_gain(model, 0.75)
        check(compiled, model)
    finally:
        is_over.set()
        thread.join()
    assert seen <= {0.625, 0.75}


def test_a_second_module_shares_the_program() -> None:
    models = [Scaled(), Scaled()]
    kept = object()
    for model in models:
        model.no_other = kept
    compiled = [oxidiff.compile(model.eval(), strict=True, cache=False) for model in models]
    for one, model in zip(compiled, models, strict=True):
        for value in (0.5, 0.625, 0.75):
            put_gain(model, value)
            check(one, model)
    assert [oxidiff.report(one).captures for one in compiled] == [2, 0]
    put_gain(models[0], 0.3)
    put_gain(models[1], 0.9)
    for one, model in zip(compiled, models, strict=True):
        check(one, model)


def test_weight_sets_follow() -> None:
    model = Scaled()
    compiled = compiled_model(model)
    check(compiled, model)
    others = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    oxidiff.bind(compiled, others, name="others")
    expected = Scaled().eval()
    expected.load_state_dict(others)
    oxidiff.use(compiled, "others")
    for value in (0.625, 0.75, 0.3, 0.9):
        put_gain(model, value)
        put_gain(expected, value)
        check(compiled, expected)


def test_lora_and_a_number() -> None:
    peft = pytest.importorskip("peft")
    model: Any = Scaled()
    # As models of diffusers and transformers have one: adapters may come and go.
    model.config = {}
    compiled = compiled_model(model)
    check(compiled, model)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False), model)
    for value in (0.625, 0.75, 0.3):
        put_gain(model, value)
        check(compiled, model)
    with torch.no_grad():
        model.linear.lora_A["default"].weight.mul_(3)
    check(compiled, model)
    assert oxidiff.report(compiled).captures == 2


def test_stored_and_loaded(tmp_path: Path) -> None:
    """A saved program brings along which numbers are its arguments; the cache finds it once the number changed."""
    path = tmp_path / "scaled.oxi"
    model = Scaled()
    compiled: Any = oxidiff.compile(model.eval(), strict=True)
    for value in (0.5, 0.625):
        put_gain(model, value)
        check(compiled, model)
    oxidiff.save_graph(compiled, path)
    del compiled
    fresh = Scaled()
    loaded: Any = oxidiff.compile(fresh.eval(), strict=True, cache=False)
    put_gain(fresh, 0.875)
    oxidiff.load_graph(loaded, path)
    for value in (0.875, 0.4):
        put_gain(fresh, value)
        check(loaded, fresh)
    assert oxidiff.report(loaded).captures == 0
    del loaded
    cached: Any = oxidiff.compile((again := Scaled()).eval(), strict=True)
    for value in (0.5, 0.7, 0.3):
        put_gain(again, value)
        check(cached, again)
    assert oxidiff.report(cached).captures == 0


def test_changes_while_others_run() -> None:
    """Every result is that of one of the values that were set."""
    model = Scaled()
    compiled = compiled_model(model)
    x = torch.randn(3, 8)
    values = [0.5, 0.625, 0.75, 0.875]
    with torch.no_grad():
        expected = []
        for value in values:
            put_gain(model, value)
            expected.append(model(x))
            assert_close(compiled(x), expected[-1])
    wrong: list[str] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            with torch.no_grad():
                found = compiled(x)
            if not any(torch.allclose(found, one, rtol=1e-5, atol=1e-5) for one in expected):
                wrong.append(str(found))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(200):
        put_gain(model, values[i % 4])
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert oxidiff.report(compiled).captures == 2


class Divided(nn.Module):
    """Shows the sign of 0, and numbers that are very small."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.linear.bias).abs() / self.gain


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e300, 1e17, 5e-324, -1e-14])
def test_numbers_at_the_ends(value: float) -> None:
    """What equals another number, or not even itself, stays a constant; next to what is very large none can be tried."""
    for first in (0.625, value):
        model = Divided()
        compiled = compiled_model(model)
        for gain in (0.5, first, value, 0.75, 0.0, -0.0, value, 0.3):
            model.gain = gain
            x = torch.randn(3, 8)
            with torch.no_grad():
                expected, found = model(x), compiled(x)
            torch.testing.assert_close(found, expected, equal_nan=True)
            assert torch.equal(torch.signbit(found), torch.signbit(expected)) or gain != gain
        assert oxidiff.report(compiled).eager_calls == 0


def test_a_small_offset_counts_next_to_a_small_number() -> None:
    class Guarded(Divided):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.linear.bias).abs() / (self.gain + 1e-12)

    for values in ((0.5, 1e-14, 1e-13, 0.75), (0.5, 0.75, 1e-13, 1e-11)):
        model = Guarded()
        compiled = compiled_model(model)
        for value in values:
            model.gain = value
            x = torch.randn(3, 8)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x))


class Twice(nn.Module):
    """Reads its number from where a copy leads, and once more from where it does not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.child = nn.Identity()
        self.child.gain = 0.5
        if way == "closure":
            self.read = lambda: self.child.gain
        elif way == "weakref":
            self.child.self = weakref.ref(self.child)
            self.read = self.by_reference
        else:
            self.child = _shared
            self.read = lambda: _shared.gain

    def by_reference(self) -> float:
        gain: float = self.child.self().gain
        return gain

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.child.gain + x * self.read()


_shared = nn.Identity()


@pytest.mark.parametrize("way", ["closure", "weakref", "global"])
def test_a_number_that_is_read_past_the_copy_too(way: str) -> None:
    _shared.gain = 0.5
    model = Twice(way)
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.75, 0.875, 0.625):
        model.child.gain = value
        check(compiled, model)
    # It is a constant from the third value on.
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == (5, 0)


def test_a_copy_that_is_another_object() -> None:
    class Odd(Processor):
        def __deepcopy__(self, memo: Any) -> Odd:
            other = Odd()
            other.scale[0] = self.scale[0]
            other.offset = 0.75
            return other

    model = Scaled()
    model.processor = Odd()
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.75):
        put_scale(model, value)
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


@pytest.mark.parametrize("make", [torch.zeros, lambda size: nn.Parameter(torch.zeros(size))])
def test_no_tensor_is_copied(make: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """What a model may refer to: the pipeline it belongs to, say."""

    made: list[Tensor] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **options: made.append(clone(self, **options)) or made[-1])
    model: Any = Scaled()
    model.pipe = Elsewhere()
    model.pipe.unet = Elsewhere()
    model.pipe.unet.weight = make(1000)
    compiled = compiled_model(model)
    for value in (0.5, 0.625, 0.75):
        put_gain(model, value)
        check(compiled, model)
    assert not [tensor for tensor in made if tensor.numel() == 1000]


class Interrupted(Scaled):
    """Lets another thread do something in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        if _meanwhile:
            thread = threading.Thread(target=_meanwhile.pop())
            thread.start()
            thread.join()
        return super().forward(x)


_meanwhile: list[Callable[[], None]] = []


@pytest.mark.parametrize("put", [put_gain, put_scale, put_offset])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_changes_in_the_middle_of_a_capture(put: Callable[[Any, float], None], calls: int) -> None:
    """They stay, no program is kept that was captured meanwhile, and the call runs compiled."""
    model = Interrupted()
    compiled = compiled_model(model)
    values = (0.5, 0.625, 0.75)
    for value in values[:calls]:
        put(model, value)
        check(compiled, model)
    put(model, values[calls])
    _meanwhile.append(lambda: put(model, 0.875))
    x = torch.randn(3, 8)
    with torch.no_grad():
        found = compiled(x)
        assert not _meanwhile
        assert_close(found, model(x))
    expected = Interrupted()
    expected.load_state_dict(model.state_dict())
    put(expected, 0.875)
    assert_close(found, expected.eval()(x).detach())
    for value in (*values, 0.875):
        put(model, value)
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == 0


def test_in_the_background_a_known_program_is_not_waited_for() -> None:
    model = Scaled()
    compiled = compiled_model(model, background=True)
    for value in (0.5, 0.625, 0.75):
        put_gain(model, value)
        before = oxidiff.report(compiled).eager_calls
        deadline = time.monotonic() + 60
        while True:
            check(compiled, model)
            after = oxidiff.report(compiled).eager_calls
            if after == before or time.monotonic() > deadline:
                break
            before = after
            time.sleep(0.01)
    before = oxidiff.report(compiled).eager_calls
    for value in (0.3, 0.4, 0.7):
        put_gain(model, value)
        check(compiled, model)
    assert oxidiff.report(compiled).eager_calls == before


def test_graphs_without_some_of_the_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scales = [0.5] * 4

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            for i, scale in enumerate(self.scales):
                if scale != 0:
                    y = y + x * scale * (i + 1)
            return y

    monkeypatch.setattr(engine, "_MAX_FOREIGN", 3)
    model = Many()
    compiled = compiled_model(model)
    for pattern in [*range(16), 15, 0, 1]:
        model.scales[:] = [0.25 + i / 8 if pattern & 1 << i else 0.0 for i in range(4)]
        check(compiled, model)
        check(compiled, model, rows=5)
    dispatcher = find_dispatcher(compiled)
    assert dispatcher is not None
    assert max(len(one.variants) for one in dispatcher.engines()) == 4
    assert oxidiff.report(compiled).eager_calls == 0


def test_a_graph_file_says_which_numbers_are_arguments(tmp_path: Path) -> None:
    path = tmp_path / "scaled.oxi"
    captures = []
    for _ in range(2):
        model = Scaled()
        compiled: Any = oxidiff.compile(model.eval(), strict=True, cache=False, graph_file=path)
        for value in (0.5, 0.625, 0.75, 0.3):
            put_gain(model, value)
            check(compiled, model)
        captures.append(oxidiff.report(compiled).captures)
        del compiled, model
        gc.collect()
    assert captures == [2, 0]
