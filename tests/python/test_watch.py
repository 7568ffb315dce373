"""What a module computes, read off its tree, and what is noticed of changes to it."""

from __future__ import annotations

import collections
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry
from torch import Tensor, nn

import oxidiff
from nets import Net, assert_close, image
from oxidiff.watch import STRUCTURE, WEIGHTS, Structure, Watch


class Processor:
    """An object that a module keeps in an attribute, as attention processors are kept."""

    def __init__(self) -> None:
        self.scale = [1.0]
        self.factor = 0.5


class Wider(nn.Linear):
    """What takes the place of a layer's class, as patches of attention do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Model(Net):
    """Attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()
        self.config = {"channels": [1, 2], "_name_or_path": "here", "deep": {"er": (3, "a")}}
        self.names = {"a", "b"}
        self.flags = {1}
        self.recent = collections.deque([1, 2], maxlen=2)
        self.large = 1 << 70
        self.text = "\udcff"
        self.size = torch.Size([1, 2])
        self.target = torch.device("cpu")
        self.hidden = functools.partial(max, 3)
        self.extra = torch.ones(3)
        self.linear.more = 1


def flip(table: dict[str, Any], key: str, value: Any) -> None:
    table[key] = value


STRUCTURAL: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 7.25),
    "attribute of a child": lambda m: setattr(m.linear, "more", 2),
    "new attribute": lambda m: setattr(m.conv, "more", 2),
    "deleted attribute": lambda m: delattr(m.linear, "more"),
    "through the dictionary": lambda m: flip(m.__dict__, "scale", 9.5),
    "class of a child": lambda m: setattr(m.linear, "__class__", Wider),
    "object": lambda m: setattr(m.processor, "factor", 0.25),
    "list in an object": lambda m: flip(m.processor.scale, 0, 0.25),
    "dictionary": lambda m: flip(m.config, "more", 1),
    "nested dictionary": lambda m: flip(m.config["deep"], "er", (3, "b")),
    "list in a dictionary": lambda m: m.config["channels"].append(3),
    "set": lambda m: m.names.add("c"),
    "equal item of a set": lambda m: (m.flags.clear(), m.flags.add(True)),
    "deque": lambda m: m.recent.append(3),
    "deque of the same length": lambda m: m.recent.rotate(),
    "deque of another length": lambda m: setattr(m, "recent", collections.deque(m.recent, maxlen=3)),
    "large number": lambda m: setattr(m, "large", 1 << 71),
    "text without a meaning": lambda m: setattr(m, "text", "\udcfe"),
    "size": lambda m: setattr(m, "size", torch.Size([2, 2])),
    "device": lambda m: setattr(m, "target", torch.device("meta")),
    "partial": lambda m: setattr(m, "hidden", functools.partial(max, 4)),
    "hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "early hook": lambda m: m.linear.register_forward_pre_hook(lambda *_: None),
    "buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "child": lambda m: setattr(m, "act", nn.ReLU()),
    "new child": lambda m: setattr(m, "act2", nn.ReLU()),
    "another shape": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(2, 2))),
    "another dtype": lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight.double())),
    "tie": lambda m: setattr(m.norm, "weight", m.norm.bias),
    "gone": lambda m: setattr(m.linear, "bias", None),
}


@pytest.mark.parametrize("change", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_a_change_of_structure_is_noticed_and_makes_another_fingerprint(change: Callable[[Any], Any]) -> None:
    model = Model()
    structure = Structure(model)
    watch = Watch(structure, ())
    assert watch.poll() == 0
    change(model)
    assert watch.poll() & STRUCTURE
    again = Structure(model)
    assert again.fingerprint != structure.fingerprint
    assert Watch(again, ()).poll() == 0


SAME: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "other weights": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones_like(m.linear.weight))),
    "where it came from": lambda m: flip(m.config, "_name_or_path", "there"),
    "a path as an attribute": lambda m: setattr(m, "name_or_path", "there"),
    "hooks for gradients": lambda m: m.register_full_backward_hook(lambda *_: None),
    "a registry without hooks": HookRegistry.check_if_exists_or_initialize,
    "of a child": lambda m: HookRegistry.check_if_exists_or_initialize(m.linear),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_modules_that_compute_the_same_have_one_fingerprint(change: Callable[[Any], Any]) -> None:
    one, other = Model(), Model()
    change(other)
    # A partial is an object with a state that its `__dict__` does not show in full, but its parts do.
    first, second = Structure(one), Structure(other)
    assert first.fingerprint == second.fingerprint
    assert [t.shape for t in first.tensors] == [t.shape for t in second.tensors]


def test_values_of_different_types_are_told_apart() -> None:
    fingerprints = set()
    for value in (0, False, 0.0, None, "", b"", (), [], {}, set(), frozenset(), 0j, "0", -1, 1 << 64, float("nan")):
        module = nn.Linear(2, 2)
        module.value = value
        fingerprints.add(Structure(module).fingerprint.digest)
    assert len(fingerprints) == 16


def test_items_of_a_set_have_no_order() -> None:
    def of(names: list[str]) -> Any:
        module = nn.Linear(2, 2)
        module.names = set(names)
        return Structure(module).fingerprint

    names = [f"name{i}" for i in range(40)]
    assert of(names) == of(names[::-1]) != of(names[1:])


def test_writes_to_tensors() -> None:
    model, more = Model(), torch.zeros(3)
    watch = Watch(Structure(model), (more,))
    assert watch.covers([more, model.linear.weight]) and not watch.covers([torch.zeros(1)])
    with torch.no_grad():
        for tensor in (model.linear.weight, more):
            before = Watch(Structure(model), (more,))
            tensor.add_(1)
            assert before.poll() == WEIGHTS
            assert before.changed_tensors() == {id(tensor)}
    assert watch.changed_tensors() == {id(model.linear.weight), id(more)}


def test_memory_is_apart_from_structure() -> None:
    base, shared, last = Model(), Model(), Model()
    shared.norm.weight.data = shared.norm.bias.data
    last.conv.to(memory_format=torch.channels_last)
    structures = [Structure(module) for module in (base, Model(), shared, last)]
    assert len({s.fingerprint.digest for s in structures}) == 1
    assert len({s.memory() for s in structures}) == 3
    assert not structures[0].is_retyped()
    base.half()
    assert structures[0].is_retyped()


def test_watches_of_one_module_do_without_each_other() -> None:
    model = Model()
    watches = [Watch(Structure(model), ()) for _ in range(3)]
    del watches[1]
    model.scale = 3.5
    assert [watch.poll() for watch in watches] == [STRUCTURE] * 2
    watches[0] = Watch(Structure(model), ())
    assert watches[0].poll() == 0
    del watches
    gc.collect()
    fresh = Watch(Structure(model), ())
    model.scale = 4.5
    assert fresh.poll() == STRUCTURE


def test_dictionaries_come_and_go() -> None:
    """A dictionary at the address of one that was watched is another one."""
    for i in range(200):
        module = nn.Linear(2, 2)
        watch = Watch(Structure(module), ())
        assert watch.poll() == 0
        module.value = i
        assert watch.poll() == STRUCTURE
        del module, watch


def test_a_compiled_child_and_its_original_are_one() -> None:
    """Written through either, the parent notices."""
    parent = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    original = parent[0]
    parent[0] = oxidiff.compile(original)
    for target in (original, parent[0]):
        watch = Watch(Structure(parent), ())
        target.value = object()
        assert watch.poll() == STRUCTURE


def test_a_module_that_holds_its_compiled_self_is_collected() -> None:
    module: Any = Net().eval()
    module.compiled = [oxidiff.compile(module)]
    with torch.no_grad():
        assert_close(module.compiled[0](image()), module(image()))
    held = weakref.ref(module)
    del module
    gc.collect()
    assert held() is None


def test_what_is_no_tensor_among_parameters_is_refused() -> None:
    module = nn.Linear(2, 2)
    module._parameters["weight"] = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="something else than a tensor"):
        Structure(module)


def test_modules_by_path() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.b = self.a[0]
            self.none = None

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    module = Shared()
    assert Structure(module).modules == dict(module.named_modules())


@pytest.mark.parametrize("values", [(1, 1.0, True, 1), (0.0, -0.0, 0, False), (torch.ones(3), torch.zeros(3), 2.0)])
def test_items_of_a_list_are_told_apart(values: tuple[Any, ...]) -> None:
    """Equal numbers of other types, and tensors, which have no truth value."""

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = [values[0]]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x * self.factors[0]
            return y

    model = Times().eval()
    compiled: Any = oxidiff.compile(model, strict=True, cache=False)
    x = torch.arange(-3, 3).reshape(2, 3)
    for value in values:
        model.factors[0] = value
        expected, found = model(x), compiled(x)
        assert torch.equal(found, expected) and found.dtype == expected.dtype
        assert torch.equal(torch.signbit(found), torch.signbit(expected))


def test_a_tensor_of_an_object_is_replaced() -> None:
    """It is no parameter, buffer or attribute of a module, so a graph holds it as it is."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.processor: Any = Processor()
            self.processor.mask = torch.ones(8)
            self.processor.offset = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.processor.mask + self.processor.offset
            return y

    model = Masked().eval()
    compiled: Any = oxidiff.compile(model, strict=True, cache=False)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for name in (None, "mask", "offset", "mask"):
            if name is not None:
                setattr(model.processor, name, torch.randn(8))
            assert_close(compiled(x), model(x))
        model.processor.mask.mul_(2)
        assert_close(compiled(x), model(x))
        assert_close(compiled(x.repeat(2, 1, 1)), model(x.repeat(2, 1, 1)))
        model.processor.offset = torch.randn(8)
        assert_close(compiled(x), model(x))
        assert_close(compiled(x.repeat(2, 1, 1)), model(x.repeat(2, 1, 1)))
    assert oxidiff.report(compiled).eager_calls == 0


class Touchy:
    """Compares to nothing."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")


def test_items_of_sets_are_not_compared() -> None:
    model = Model()
    held: set[Any] = {Touchy()}
    model.touchy = held
    watch = Watch(Structure(model), ())
    assert watch.poll() == 0
    held.clear()
    held.add(Touchy())
    assert watch.poll() == STRUCTURE


@torch.no_grad()
def test_another_class_is_another_program() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    compiled = oxidiff.compile(module, strict=True)
    x = torch.randn(2, 4)
    assert_close(compiled(x), module(x))
    module[0].__class__ = Wider
    assert_close(compiled(x), module(x))
