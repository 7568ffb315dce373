"""Keys of calls, and what a call returns."""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from diffusers.utils import BaseOutput
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers.modeling_outputs import BaseModelOutputWithPooling

import oxidiff
from nets import image
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
    return [*single, ((), {}), ((1, 2), {}), ((1,), {"x": 2}), ((), {"x": 1, "y": 2}), ((), {"y": 1, "x": 2})]


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

    for kind in (UNet2DConditionOutput, Pair, Particular, Marked, Counting):
        module = Module(kind)
        compiled: Any = oxidiff.compile(module, strict=True)
        for seed in range(2):
            x = image(3, seed=seed)
            made, expected = compiled(x), module(x)
            assert type(made) is kind
            assert {**vars(made), "first": None, "sample": None} == {**vars(expected), "first": None, "sample": None}
            assert torch.equal(made[0], expected[0])
