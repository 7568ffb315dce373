"""Modules that are reached without being submodules, and what functions read from outside: all of it is live."""

from __future__ import annotations

import functools
import math
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import assert_close, image
from oxidiff.capture import pretence

Call = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 4)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


class Holder:
    """An object that is no module: a pipeline, a sampler."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.factor = 2.0
        self.steps = 0

    def step(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * self.factor
        return out


class InList(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.held: Any = [net]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.held[0](x)
        return out


class InObject(InList):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.held = Holder(net)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.held.net(x)
        return out


class InCallable(InList):
    def __init__(self, net: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        super().__init__(net)
        self.held = make(net)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.held(x)
        return out


def _closing_over_an_object(net: nn.Module) -> Call:
    pipe = Holder(net)
    return lambda x: pipe.net(x)


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "list": InList,
    "object": InObject,
    "partial in an attribute": lambda net: InCallable(net, functools.partial),
    "closure in an attribute": lambda net: InCallable(net, lambda net: lambda x: net(x)),
    "method in an attribute": lambda net: InCallable(net, lambda net: net.forward),
    "method of an object in an attribute": lambda net: InCallable(net, lambda net: Holder(net).step),
    "function that reads an object": _closing_over_an_object,
    "partial": lambda net: functools.partial(lambda net, x: net(x), net),
    "method of an object": lambda net: Holder(net).step,
}


def _replace_weights(net: Net) -> None:
    net.load_state_dict(Net(7).state_dict(), assign=True)
    net.requires_grad_(False)


def _replace_submodule(net: Net) -> None:
    net.last = Net(5).last


def _set_attribute(net: Net) -> None:
    net.norm.eps = 0.7


def _add_adapter(net: Net) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False), net, "ink")
    net.eval().requires_grad_(False)


def _scale_adapter(net: Net) -> None:
    _add_adapter(net)
    for module in net.modules():
        if hasattr(module, "scaling"):
            module.scaling["ink"] = 0.3


@pytest.mark.parametrize("change", [_replace_weights, _replace_submodule, _set_attribute, _add_adapter, _scale_adapter])
@pytest.mark.parametrize("holder", HOLDERS)
@torch.no_grad()
def test_module_that_is_no_submodule_is_live(holder: str, change: Callable[[Net], None]) -> None:
    nets, x = (Net(), Net()), image(3, 4)
    eager, compiled = HOLDERS[holder](nets[0]), oxidiff.compile(HOLDERS[holder](nets[1]), strict=True)
    assert_close(compiled(x), eager(x))
    for net in nets:
        change(net)
    assert_close(compiled(x), eager(x))
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_object_gets_another_module() -> None:
    for make in (InObject, InList):
        module, x = make(Net()), image(3, 4)
        compiled = oxidiff.compile(module, strict=True)
        assert_close(compiled(x), module(x))
        if isinstance(module, InObject):
            module.held.net = Net(4)
        else:
            module.held[0] = Net(4)
        assert_close(compiled(x), module(x))
        assert oxidiff.report(compiled).programs <= 1


@torch.no_grad()
def test_function_looks_at_what_it_reads_of_an_object() -> None:
    pipe, x = Holder(Net()), image(3, 4)

    def function(x: Tensor) -> Tensor:
        out: Tensor = pipe.net(x) * pipe.factor
        return out

    compiled = oxidiff.compile(function, strict=True)
    assert_close(compiled(x), function(x))
    pipe.net = Net(4)
    assert_close(compiled(x), function(x))
    pipe.factor = 3.0
    assert_close(compiled(x), function(x))
    captures = oxidiff.report(compiled).captures
    for step in range(3):
        pipe.steps = step + 1
        assert_close(compiled(x), function(x))
    assert oxidiff.report(compiled).captures == captures


_net: nn.Module = Net(1)
_shift = torch.ones(4)
_factor = 1.5
_act = nn.SiLU()
_space = types.SimpleNamespace(net=Net(2))


def _helper(x: Tensor) -> Tensor:
    out: Tensor = _act(_net(x)) * _factor + _shift
    return out


def _reads_through_helper(x: Tensor) -> Tensor:
    return _helper(x) * 2


def _reads_in_inner_function(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        out: Tensor = _net(y) * _factor + _shift
        return out

    return inner(x)


@pytest.mark.parametrize("function", [_reads_through_helper, _reads_in_inner_function])
@torch.no_grad()
def test_globals_of_helpers_are_live(function: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x, here = oxidiff.compile(function, strict=True), image(3, 4), globals()
    assert_close(compiled(x), function(x))
    for name, value in (("_net", Net(6)), ("_shift", torch.full((4,), 3.0)), ("_factor", 4.0)):
        monkeypatch.setitem(here, name, value)
        assert_close(compiled(x), function(x))
    if function is _reads_through_helper:
        monkeypatch.setitem(here, "_helper", lambda x: _net(x))
        assert_close(compiled(x), function(x))


@torch.no_grad()
def test_method_called_by_a_function_reads_its_object() -> None:
    pipe, x = Holder(Net()), image(3, 4)
    compiled = oxidiff.compile(lambda x: pipe.step(x), strict=True)
    assert_close(compiled(x), pipe.step(x))
    pipe.factor = 5.0
    pipe.net = Net(3)
    assert_close(compiled(x), pipe.step(x))


class OfMath(nn.Module):
    """Code that finds functions of `math`, the length of a tensor and a range, which a trace replaces for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layer(x) * math.sqrt(math.log(len(x) + 1) + math.comb(3, 1))
        return x


@torch.no_grad()
def test_a_trace_in_another_thread_is_no_change() -> None:
    module = OfMath().eval().requires_grad_(False)
    compiled: Any = oxidiff.compile(module, strict=True, cache=False)
    x = image(3, 4)
    compiled(x)
    captures = compiled.report().captures
    spaces = [globals()]
    for _ in range(20):
        with pretence.following_functions(spaces), pretence.following_lengths(spaces):
            assert_close(compiled(x), module(x))
            # One that is described meanwhile.
            other: Any = oxidiff.compile(OfMath().eval().requires_grad_(False), cache=False)
            other(x)
        assert_close(compiled(x), module(x))
        assert_close(other(x), other._orig_mod(x))
        assert other.report().eager_calls == 0
    assert compiled.report().captures == captures


@torch.no_grad()
def test_function_that_counts_in_an_object_counts_once() -> None:
    pipe, x = Holder(Net()), image(3, 4)

    def function(x: Tensor) -> Tensor:
        pipe.steps += 1
        out: Tensor = pipe.net(x)
        return out

    compiled = oxidiff.compile(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for step in range(3):
            assert_close(compiled(x), pipe.net(x))
            assert pipe.steps == step + 1


class Stranger(nn.Module):
    """Runs a module that nothing leads to from its attributes."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _space.net(x)
        return out


class CatchingStranger(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = _space.net(x)
        except Exception:
            return x
        return out


@pytest.mark.parametrize("cls", [Stranger, CatchingStranger])
@torch.no_grad()
def test_module_that_cannot_be_watched_runs_eager(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "net", Net(2))
    module, x = cls().eval(), image(3, 4)
    with pytest.raises(oxidiff.CaptureError, match=r"runs a Net that is no submodule; hold it in an attribute"):
        oxidiff.compile(module, strict=True)(x)
    compiled = oxidiff.compile(module)
    with pytest.warns(oxidiff.FallbackWarning, match="runs a Net that is no submodule"):
        assert_close(compiled(x), module(x))
    _space.net.norm.eps = 0.7
    assert_close(compiled(x), module(x))


class Activation(nn.Module):
    """Of a program's own, as those of transformers are, which has modules of it in its files."""

    def __init__(self, function: Call, factor: float = 1.0) -> None:
        super().__init__()
        self.function, self.factor = function, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.factor * getattr(self, "other", 1.0)


_in_table: dict[str, nn.Module] = {}


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _in_table["activation"](_space.activation(self.linear(x)))
        return out


_CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a function": lambda own, patch: setattr(own, "function", torch.tanh),
    "a number": lambda own, patch: setattr(own, "factor", 3.0),
    "a hook": lambda own, patch: own.register_forward_hook(lambda *given: given[-1] + 1),
    "a hook before": lambda own, patch: own.register_forward_pre_hook(lambda *given: (given[-1][0] + 1,)),
    "a forward of its own": lambda own, patch: setattr(own, "forward", lambda x: 3 * x),
    "an attribute that it had not": lambda own, patch: setattr(own, "other", 4.0),
    "its class": lambda own, patch: patch.setattr(Activation, "forward", lambda own, x: x * own.factor * 5),
    "another": lambda own, patch: patch.setattr(_space, "activation", Activation(torch.sin)),
    "another in the table": lambda own, patch: patch.setitem(_in_table, "activation", Activation(torch.sin)),
    "in the table": lambda own, patch: setattr(_in_table["activation"], "factor", -1.0),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
@torch.no_grad()
def test_activations_of_a_program_are_watched(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "activation", Activation(torch.relu), raising=False)
    monkeypatch.setitem(_in_table, "activation", Activation(nn.functional.silu, 2.0))
    module = Activated().eval()
    compiled = oxidiff.compile(module, strict=True)
    for size in (2, 3):
        assert_close(compiled(image(size, 4)), module(image(size, 4)))
    assert oxidiff.report(compiled).captures == 1
    before = module(image(3, 4))
    change(_space.activation, monkeypatch)
    assert (module(image(3, 4)) != before).any()
    for size in (3, 2):
        assert_close(compiled(image(size, 4)), module(image(size, 4)))


class Derived(nn.Softmax):
    pass


@pytest.mark.parametrize(
    ("activation", "change"),
    [
        (nn.Softmax(-1), lambda own: setattr(own, "dim", 0)),
        (Derived(-1), lambda own: setattr(own, "dim", 0)),
        (nn.LeakyReLU(), lambda own: setattr(own, "negative_slope", 0.7)),
        (nn.GELU(), lambda own: own.register_forward_hook(lambda *given: given[-1] + 1)),
        (nn.GELU(), lambda own: setattr(own, "approximate", "tanh")),
    ],
    ids=("softmax", "derived", "slope", "hook", "approximation"),
)
@torch.no_grad()
def test_activations_of_torch_are_watched(activation: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "activation", activation, raising=False)
    monkeypatch.setitem(_in_table, "activation", nn.Identity())
    module, x = Activated().eval(), image(3, 4)
    compiled = oxidiff.compile(module, strict=True, cache=False)
    assert_close(compiled(x), module(x))
    before = module(x)
    change(activation)
    assert (module(x) != before).any()
    assert_close(compiled(x), module(x))


class Counting(nn.Module):
    """Keeps something for later calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(x.shape[0])
        return x * self.calls


@torch.no_grad()
def test_an_activation_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "activation", Counting(), raising=False)
    monkeypatch.setitem(_in_table, "activation", nn.Identity())
    module = Activated().eval()
    compiled = oxidiff.compile(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oxidiff.FallbackWarning)
        for call in range(1, 4):
            assert_close(compiled(image(2, 4)), module.linear(image(2, 4)) * call)
    assert (_space.activation.calls, _space.activation.sizes) == (3, [2, 2, 2])


class Unfound(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 4), name

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(sys.modules[__name__], "_" + self.name).activation(self.linear(x))
        return out


@torch.no_grad()
def test_an_activation_that_is_not_found_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "activation", Activation(torch.relu), raising=False)
    module, x = Unfound("space").eval(), image(3, 4)
    compiled = oxidiff.compile(module)
    with pytest.warns(oxidiff.FallbackWarning, match="runs a Activation that is no submodule"):
        assert_close(compiled(x), module(x))
    _space.activation.factor = 3.0
    assert_close(compiled(x), module(x))


@torch.no_grad()
def test_an_activation_that_gets_a_weight_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_space, "activation", Activation(torch.relu), raising=False)
    monkeypatch.setitem(_in_table, "activation", Activation(torch.relu))
    module, x = Activated().eval(), image(3, 4)
    compiled = oxidiff.compile(module)
    assert_close(compiled(x), module(x))
    own = _space.activation
    own.weight = nn.Parameter(torch.full((), 2.0))
    own.forward = lambda x: x * own.weight
    with pytest.warns(oxidiff.FallbackWarning, match="runs a Activation that is no submodule"):
        assert_close(compiled(x), module(x))
    own.weight.fill_(5.0)
    assert_close(compiled(x), module(x))


@torch.no_grad()
def test_activations_are_no_strangers() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = nn.Sequential(nn.GELU(), nn.Flatten())
            out: Tensor = made(_act(self.linear(x)))
            return out

    module, x = Module().eval(), image(3, 4)
    assert_close(oxidiff.compile(module, strict=True)(x), module(x))


@torch.no_grad()
def test_graph_of_a_module_that_holds_another_is_stored(tmp_path: Path) -> None:
    path, x = tmp_path / "held.oxi", image(3, 4)
    first: Any = oxidiff.compile(InList(Net()), strict=True)
    first(x)
    first.save_graph(path)
    module = InList(Net(4))
    second: Any = oxidiff.compile(module, strict=True)
    second.load_graph(path)
    assert_close(second(x), module(x))
    assert oxidiff.report(second).captures == 0
    module = InList(Net())
    module.held[0].norm.eps = 0.7
    with pytest.raises(oxidiff.ArtifactError):
        oxidiff.compile(module).load_graph(path)  # type: ignore[attr-defined]


@torch.no_grad()
def test_modules_that_hold_others_share_a_program() -> None:
    compiled: list[Any] = []
    for seed in (0, 1):
        module, x = InList(nn.Sequential(Net(seed), nn.Linear(4, 5).eval())), image(3, 4)
        compiled.append(oxidiff.compile(module, strict=True))
        assert_close(compiled[-1](x), module(x))
    assert [oxidiff.report(one).programs for one in compiled] == [1, 0]


def _with_attribute(weight: Tensor) -> nn.Module:
    module = InList(Net())
    module.held.append(weight)
    module.forward = lambda x: module.held[0](x) * module.held[1]  # type: ignore[method-assign]
    return module


def _with_buffer(weight: Tensor) -> nn.Module:
    module = nn.Sequential(Net())
    module[0].register_buffer("weight", weight)
    module[0].forward = lambda x: x * module[0].weight
    return module


GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "closure": lambda weight: lambda x: x * weight,
    "closure of a closure": lambda weight: functools.partial(lambda f, x: f(x) + 1, lambda x: x * weight),
    "closure in an attribute": lambda weight: InCallable(Net(), lambda net: lambda x: x * weight),
    "attribute": _with_attribute,
    "buffer": _with_buffer,
}


@pytest.mark.parametrize("holder", GRADIENTS)
def test_gradients_of_tensors_that_are_no_parameters(holder: str) -> None:
    weight, x = torch.ones(4, requires_grad=True), image(3, 4)
    function = GRADIENTS[holder](weight)
    compiled = oxidiff.compile(function)
    with pytest.warns(oxidiff.FallbackWarning, match="gradients"):
        assert compiled(x).requires_grad
    assert compiled(x).requires_grad
    with torch.no_grad():
        assert_close(compiled(x), function(x))
    weight.requires_grad_(False)
    assert not compiled(x).requires_grad
    assert oxidiff.report(compiled).eager_calls == 2
    weight.requires_grad_(True)
    compiled(x).sum().backward()
    assert weight.grad is not None


def test_gradients_of_modules_that_are_no_submodules() -> None:
    net, x = Net(), image(3, 4)
    net.last.weight.requires_grad_(True)
    for make in HOLDERS.values():
        compiled = oxidiff.compile(make(net))
        with pytest.warns(oxidiff.FallbackWarning, match="gradients"):
            assert compiled(x).requires_grad


_settings = {"factor": 1.0}


def _set(key: str, value: Any) -> None:
    _settings[key] = value


def in_dictionary() -> tuple[Call, Callable[[float], Any]]:
    state = {"factors": [1.0]}
    return lambda x: x * sum(state["factors"]), state["factors"].append


def in_variable() -> tuple[Call, Callable[[float], Any]]:
    factor = 1.0

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return lambda x: x * factor, change


def in_object() -> tuple[Call, Callable[[float], Any]]:
    holder = types.SimpleNamespace(factor=1.0)
    return lambda x: x * holder.factor, lambda value: setattr(holder, "factor", value)


def in_default() -> tuple[Call, Callable[[float], Any]]:
    state = {"factor": 1.0}

    def function(x: Tensor, state: dict[str, float] = state) -> Tensor:
        return x * state["factor"]

    return function, functools.partial(state.__setitem__, "factor")


def in_global() -> tuple[Call, Callable[[float], Any]]:
    return lambda x: x * _settings["factor"], functools.partial(_set, "factor")


def in_function() -> tuple[Call, Callable[[float], Any]]:
    def function(x: Tensor) -> Tensor:
        return x * function.factor  # type: ignore[attr-defined, no-any-return]

    function.factor = 1.0  # type: ignore[attr-defined]
    return function, lambda value: setattr(function, "factor", value)


def in_helper() -> tuple[Call, Callable[[float], Any]]:
    inner, change = in_variable()
    return lambda x: inner(x) + 1, change


def in_tensor() -> tuple[Call, Callable[[float], Any]]:
    state = [torch.ones(4)]
    return lambda x: x * state[0], lambda value: state.__setitem__(0, torch.full((4,), value))


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"patches": []}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for patch in self.options["patches"]:
            x = patch(x)
        return x


def as_patch(net: Hooked, function: Call) -> None:
    net.options["patches"].append(function)


def as_forward(net: Hooked, function: Call) -> None:
    forward = net.forward
    net.forward = lambda x: function(forward(x))  # type: ignore[method-assign]


def as_decorated_forward(net: Hooked, function: Call) -> None:
    forward = net.forward
    net.forward = torch.no_grad()(lambda x: function(forward(x)))  # type: ignore[method-assign]


def as_method(net: Hooked, function: Call) -> None:
    net.forward = types.MethodType(lambda self, x: function(Hooked.forward(self, x)), net)  # type: ignore[method-assign]


@pytest.mark.parametrize("put", [as_patch, as_forward, as_decorated_forward, as_method])
@pytest.mark.parametrize(
    "make",
    [in_dictionary, in_variable, in_object, in_default, in_global, in_function, in_helper, in_tensor],
)
@torch.no_grad()
def test_what_a_function_in_an_attribute_reads_is_live(
    put: Callable[[Hooked, Call], None], make: Callable[[], tuple[Call, Callable[[float], Any]]]
) -> None:
    module = Hooked()
    function, change = make()
    put(module, function)
    compiled: Any = oxidiff.compile(module, strict=True)
    x = image(3, 4)
    change(1.0)
    for value in (1.0, 2.0, -0.5, 3.0):
        assert_close(compiled(x), module(x))
        change(value)
        assert_close(compiled(x), module(x))
    captures = oxidiff.report(compiled).captures
    assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == captures


@torch.no_grad()
def test_functions_in_containers_of_a_function_are_live() -> None:
    """Options of a sampler: functions in lists in a dictionary."""
    net, x = Net(), image(3, 4)
    post, change = in_dictionary()
    options: dict[str, Any] = {"post": [post]}

    def function(x: Tensor) -> Tensor:
        x = net(x)
        for after in options["post"]:
            x = after(x)
        return x

    compiled: Any = oxidiff.compile(function, strict=True)
    assert_close(compiled(x), function(x))
    change(2.0)
    assert_close(compiled(x), function(x))
    options["post"].append(lambda x: x + 1)
    assert_close(compiled(x), function(x))


@torch.no_grad()
def test_a_factor_beside_what_a_function_reads_stays_an_argument() -> None:
    class Scaled(Hooked):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    module = Scaled()
    function, change = in_variable()
    as_patch(module, function)
    compiled: Any = oxidiff.compile(module, strict=True)
    x = image(3, 4)
    for factor in (1.5, 0.5, 0.25):
        module.factor = factor
        assert_close(compiled(x), module(x))
    captures = oxidiff.report(compiled).captures
    for factor in (0.7, 0.9, 0.3):
        module.factor = factor
        assert_close(compiled(x), module(x))
    assert oxidiff.report(compiled).captures == captures
    change(2.0)
    assert_close(compiled(x), module(x))


@torch.no_grad()
def test_compiled_functions_in_attributes_are_as_others() -> None:
    weight, holder = torch.ones(10), types.SimpleNamespace(layer=nn.Linear(10, 10), factor=3.0)

    def function(x: Tensor) -> Tensor:
        return holder.layer(x * weight) * holder.factor

    class Net(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x) + 1

    eager = Net(function)
    compiled = oxidiff.compile(Net(oxidiff.compile(function)).eval(), strict=True)

    def check() -> None:
        for x in (image(3, 10), image(5, 10)):
            assert_close(compiled(x), eager(x))

    check()
    weight = torch.full((10,), 2.0)
    check()
    weight.mul_(2)
    check()
    holder.factor = 5.0
    check()
    holder.layer.weight.mul_(2)
    check()
    holder.layer = nn.Linear(10, 10)
    check()
