"""Keys of calls, and what a call returns."""

from __future__ import annotations

import enum
import itertools
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from diffusers.utils import BaseOutput
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten
from transformers.modeling_outputs import BaseModelOutputWithPooling

import oxidiff
from nets import assert_close, image
from oxidiff import _native, call
from oxidiff.outputs import _record_builder


class Color(enum.Enum):
    RED = 1


PLAIN: list[Any] = [
    None, True, False, 0, 1, 2, 1.0, "", "a", "b", "\u00e9",
    (), (1,), (1, 2), ((1,), 2), [], [1], [[1], 2], {}, {"a": 1}, {"a": 2.0}, {"b": 1}, {"a": {"b": 1}},
    {"a": 1, "b": 1}, {"b": 1, "a": 1},
    torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2), torch.ones(3, 2).T, torch.ones(6), torch.ones(2, 3)[:, :1],
    torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 3, dtype=torch.int64),
    torch.ones(2, 3, dtype=torch.bool), torch.tensor(1.0), torch.ones(0, 3), torch.ones(1, 3).expand(2, 3),
    nn.Parameter(torch.ones(2, 3)), (torch.ones(2, 3),), [torch.ones(2, 3)], {"a": torch.ones(2, 3)},
]  # fmt: skip
"""Arguments that the extension makes keys of."""

OTHER: list[Any] = [
    torch.ones(2, dtype=torch.complex64).conj().imag, torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse(),
    torch.ones(2, device="meta"), torch.Size([1, 2]), torch.float32, torch.device("cpu"), OrderedDict(a=1), {1: 2},
    "\udcff", Color.RED, 1 + 2j, object(), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    (torch.Size([1]),), {"a": torch.float16},
]  # fmt: skip
"""Arguments that it leaves to Python, some of which no program takes."""


def in_python(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(_native, "key_of", lambda *_: None)
        return call.key_of(args, kwargs, leaves)


def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    single = [((value,), {}) for value in PLAIN] + [((), {"x": value}) for value in PLAIN]
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    twice = [((a, [b], c), {"d": d}) for a, b, c, d in itertools.product((x, y), repeat=4)]
    return [*single, *twice, ((), {}), ((1, 2), {}), ((1,), {"x": 2}), ((), {"x": 1, "y": 2}), ((), {"y": 1, "x": 2})]


def test_keys_of_the_extension_tell_apart_what_keys_of_python_do(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for args, kwargs in calls():
        ours: list[Any] = []
        theirs: list[Any] = []
        native = _native.key_of(args, kwargs, ours)
        assert native is not None, (args, kwargs)
        keys.append((native, in_python(args, kwargs, theirs, monkeypatch), args, kwargs))
        assert len(ours) == len(theirs)
        assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert sum(a[0] == b[0] for a, b in itertools.combinations(keys, 2)) > 0
    for a, b in itertools.combinations(keys, 2):
        assert (a[0] == b[0]) == (a[1] == b[1]), (a[2:], b[2:])


def test_keys_say_which_tensors_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = (torch.ones(2, 3) for _ in range(3))
    for key in (lambda *args: _native.key_of(args, {}, []), lambda *args: in_python(args, {}, [], monkeypatch)):
        assert key(x, y) == key(y, x)
        assert key(x, y, z) == key(z, x, y)
        assert len({key(*args) for args in ((x, y, z), (x, x, y), (x, y, x), (x, y, y), (x, x, x))}) == 5
        assert key(x, [y, {"a": x}]) != key(x, [y, {"a": y}])


@pytest.mark.parametrize("value", OTHER, ids=[type(value).__name__ + str(i) for i, value in enumerate(OTHER)])
def test_what_the_extension_leaves_to_python(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.key_of((1, value), {}, []) is None
    assert _native.key_of((), {"a": 1, "b": value}, []) is None
    ours: list[Any] = []
    theirs: list[Any] = []
    try:
        expected = in_python((1, value), {}, theirs, monkeypatch)
    except call.NotAKeyError:
        with pytest.raises(call.NotAKeyError):
            call.key_of((1, value), {}, ours)
    else:
        assert call.key_of((1, value), {}, ours) == expected
        assert ours == theirs


def test_a_very_deep_argument_is_left_to_python() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert _native.key_of((deep,), {}, []) is None
    leaves: list[Any] = []
    call.key_of((deep,), {}, leaves)
    assert leaves == [1]


@dataclass
class Pair(BaseOutput):
    """An output of diffusers' kind with more than one entry."""

    first: Tensor
    second: Tensor | None = None
    third: Tensor | None = None


@dataclass
class Particular(BaseOutput):
    """One with a constructor of its own."""

    first: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["more"] = 1


@dataclass
class Marked(BaseOutput):
    """One with an attribute that is no field."""

    first: Tensor

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["more"] = 1


@dataclass
class Counting(BaseOutput):
    """One whose default is no None."""

    first: Tensor
    count: int = 7


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: UNet2DConditionOutput(sample=a),
        lambda a, b: Pair(first=a, second=b),
        lambda a, b: Pair(first=a, third=b),
        lambda a, b: BaseModelOutputWithPooling(last_hidden_state=a, pooler_output=b),
    ],
)
def test_records_are_made_as_by_their_constructors(make: Any) -> None:
    tensors, spec = tree_flatten(make(torch.ones(1), torch.ones(2)))
    build = _record_builder(spec)
    assert build is not None
    made, expected = build(tensors, ()), make(*tensors, *([None] * (2 - len(tensors))))
    assert type(made) is type(expected)
    assert made.to_tuple() == expected.to_tuple()
    assert list(vars(made)) == list(vars(expected))
    assert made[0] is tensors[0]
    again = torch.ones(3)
    first = next(iter(made))
    setattr(made, first, again)
    assert made[first] is again
    with pytest.raises(Exception, match="pop"):
        made.pop(first)


@dataclass
class Square(BaseOutput):
    """One that looks at its tensor."""

    first: Tensor

    def __post_init__(self) -> None:
        assert self.first.dim() == 2
        super().__post_init__()


@dataclass
class Bare(OrderedDict[str, Tensor]):
    """A record of nobody's."""

    first: Tensor


register_pytree_node(
    Bare,
    lambda record: ([record.first], None),
    lambda values, _: Bare(first=next(iter(values))),
    serialized_type_name="test_call.Bare",
)


@pytest.mark.parametrize("make", [Particular, Marked, lambda a: (a,), lambda a: OrderedDict(first=a)])
def test_other_records_are_left_to_their_constructors(make: Any) -> None:
    assert _record_builder(tree_flatten(make(torch.ones(1)))[1]) is None


@torch.no_grad()
def test_a_module_returns_the_records_of_eager() -> None:
    class Module(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(x * 2)

    for kind in (UNet2DConditionOutput, Pair, Particular, Marked, Counting, Square, Bare):
        module = Module(kind)
        compiled: Any = oxidiff.compile(module, strict=True)
        for seed in range(2):
            x = image(3, 4, seed=seed)
            made, expected = compiled(x), module(x)
            assert type(made) is kind
            assert {**vars(made), "first": None, "sample": None} == {**vars(expected), "first": None, "sample": None}
            assert torch.equal(made.first if kind is Bare else made[0], expected.first if kind is Bare else expected[0])


NESTINGS: list[Callable[[Tensor], Any]] = [
    lambda y: (y,), lambda y: ((y,),), lambda y: (y, ()), lambda y: (y, {}), lambda y: ([y],), lambda y: [y],
    lambda y: [(y,)], lambda y: {"a": (y,)}, lambda y: (y, None), lambda y: (y, 1), lambda y: (y, y),
    lambda y: (y, [y + 1, {"b": y}]), lambda y: (y.shape[0],), lambda y: ((y.shape[0],), y),
    lambda y: (UNet2DConditionOutput(sample=y),), lambda y: Pair(first=(y, y + 1)),
]  # fmt: skip


@pytest.mark.parametrize("nest", NESTINGS, ids=[str(i) for i in range(len(NESTINGS))])
@torch.no_grad()
def test_results_nest_as_in_eager(nest: Callable[[Tensor], Any]) -> None:
    compiled: Any = oxidiff.compile(lambda x: nest(x * 2), strict=True)
    for seed in range(2):
        x = image(3, 4, seed=seed)
        made, expected = tree_flatten(compiled(x)), tree_flatten(nest(x * 2))
        assert made[1] == expected[1]
        for a, b in zip(made[0], expected[0], strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else (type(a), a) == (type(b), b)


@torch.no_grad()
def test_a_record_that_is_not_made_again_as_it_was_runs_eager() -> None:
    compiled: Any = oxidiff.compile(lambda x: Counting(x * 2, None))  # type: ignore[arg-type]
    with pytest.warns(oxidiff.FallbackWarning, match="pytree"):
        assert compiled(image(3)).count is None
    assert compiled(image(3)).count is None


@torch.no_grad()
def test_a_dictionary_that_another_thread_changes_meanwhile() -> None:
    conditions: dict[str, Tensor] = {f"t{i}": image(2, seed=i) for i in range(20)}
    more, stop = image(2), threading.Event()

    def change() -> None:
        while not stop.is_set():
            conditions["more"] = more
            time.sleep(0)
            del conditions["more"]
            time.sleep(0)

    thread = threading.Thread(target=change)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            leaves: list[Any] = []
            assert _native.key_of((), {"conditions": conditions}, leaves) is not None
            assert len(leaves) in (20, 21)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def _scaled(x: Tensor, time: Any, scale: Any = 1.0) -> Tensor:
    return x * scale + (x / time if time > 2 else x - time) * float(scale / 2)


def _made_in_64_bits(x: Tensor, time: Any, scale: Any = 1.0) -> Tensor:
    made: Tensor = torch.tensor([scale], dtype=torch.float64).to(x.dtype) + torch.tensor([time])
    return x * made


@pytest.mark.parametrize("function", [_scaled, _made_in_64_bits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_numbers_of_numpy(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    compiled = oxidiff.compile(function, strict=True, precision="eager")
    x = image(3, 4).to(dtype)
    compiled.warmup(x, numpy.int64(5), scale=numpy.float64(0.7))
    for step, scale in ((5, 0.7), (7, 1.3), (7, 0.1), (9, -2.5)):
        given = numpy.int64(step), numpy.float64(scale)
        result, expected = compiled(x, given[0], scale=given[1]), function(x, given[0], scale=given[1])
        assert result.dtype is expected.dtype
        assert_close(result, expected)
        assert_close(compiled(x, given[0], given[1]), expected)
        assert_close(compiled(x, step, scale), function(x, step, scale))
    assert oxidiff.report(compiled).eager_calls == 0
    compiled.profile(x, numpy.int64(7), numpy.float64(0.5))


@torch.no_grad()
def test_tensor_of_a_number_of_numpy_keeps_its_dtype() -> None:
    def function(x: Tensor, scale: Any) -> Tensor:
        return x * torch.tensor([scale])

    compiled, x = oxidiff.compile(function), image(3, 4)
    assert compiled(x, 0.5).dtype is torch.float32
    with pytest.warns(
        oxidiff.FallbackWarning, match="makes a tensor of a number, which may be numpy's, without a dtype"
    ):
        assert compiled(x, numpy.float64(0.5)).dtype is torch.float64
    assert compiled(x, numpy.float64(0.7)).dtype is torch.float64
    assert compiled(x, 0.7).dtype is torch.float32


@torch.no_grad()
def test_eager_sees_numbers_of_numpy_as_they_are() -> None:
    kinds: list[type] = []

    class Module(nn.Module):
        def forward(self, x: Tensor, time: Any, scale: Any) -> Tensor:
            if not torch.compiler.is_compiling():
                kinds.append(type(time))
            return x * numpy.sort(numpy.array([time, scale]))[0]

    compiled, x = oxidiff.compile(Module().eval()), image(3, 4)
    with oxidiff.eager(compiled):
        compiled(x, numpy.int64(3), numpy.float64(0.5))
    assert kinds == [numpy.int64]
    other = oxidiff.compile(Module().eval())
    with pytest.warns(oxidiff.FallbackWarning, match="numpy.float32 is passed"):
        other(x, numpy.int64(3), numpy.float32(0.5))
    assert kinds == [numpy.int64] * 2
