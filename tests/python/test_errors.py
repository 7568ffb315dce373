"""Exceptions: one class per cause, translated from the extension, with module, op and advice."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidiff
from oxidiff import _native
from oxidiff.errors import from_native


def test_hierarchy() -> None:
    names = (
        "CaptureError", "UnsupportedError", "ShapeError", "BackendError", "OutOfMemoryError", "ArtifactError",
        "CacheError", "CheckError",
    )  # fmt: skip
    for name in names:
        assert issubclass(getattr(oxidiff, name), oxidiff.Error)
    assert issubclass(oxidiff.Error, Exception)
    assert issubclass(oxidiff.FallbackWarning, UserWarning)


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("invalid", oxidiff.Error),
        ("unsupported", oxidiff.UnsupportedError),
        ("shape", oxidiff.ShapeError),
        ("backend", oxidiff.BackendError),
        ("out_of_memory", oxidiff.OutOfMemoryError),
        ("never heard of", oxidiff.Error),
    ],
)
def test_translation(kind: str, cls: type[oxidiff.Error]) -> None:
    native = _native.NativeError(kind, "what happened", "down.0", "linear")
    error = from_native(native)
    assert type(error) is cls
    assert str(error) == "what happened"
    assert error.__cause__ is native
    if isinstance(error, oxidiff.CaptureError):
        assert (error.module, error.op) == ("down.0", "linear")


def test_translation_of_other_exceptions() -> None:
    assert isinstance(from_native(MemoryError("no 9 bytes")), oxidiff.OutOfMemoryError)
    assert "TypeError" in str(from_native(TypeError("odd")))
    own = oxidiff.ShapeError("mine")
    assert from_native(own) is own


def test_extension_errors_have_four_arguments() -> None:
    with pytest.raises(_native.NativeError) as caught:
        _native.compile(_native.GraphBuilder(), precision="no such")
    assert len(caught.value.args) == 4
    assert "no such" in str(from_native(caught.value))


def test_errors_can_be_pickled() -> None:
    for error in (oxidiff.CheckError("a"), oxidiff.UnsupportedError("b", module="m", op="o")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c, x: oxidiff.report(c).memory(5), IndexError, "Linear: no row 5 among the 1"),
        (lambda c, x: oxidiff.bind(c, 3), TypeError, "takes a state_dict or a module, not int"),
        (lambda c, x: oxidiff.bind(c, c.state_dict(), name=""), ValueError, "'' is no name"),
        (lambda c, x: oxidiff.bind(c, c.state_dict(), name=3), ValueError, "3 is no name"),
        (lambda c, x: oxidiff.warmup(c, x, shapes=3), TypeError, "not 3"),
        (lambda c, x: oxidiff.warmup(c, x, shapes=[3]), TypeError, "3 is no shape of 0"),
        (lambda c, x: oxidiff.explain(c, device=3), TypeError, "by its name, such as 'L4', not by 3"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    x = torch.ones(2, 4)
    with torch.no_grad():
        compiled = oxidiff.compile(torch.nn.Linear(4, 4), cache=False, tune="off")
        compiled(x)
        with pytest.raises(error, match=re.escape(words)):
            call(compiled, x)


class Scattered(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return self.write(x, source)


@pytest.mark.parametrize(
    ("write", "length", "sizes"),
    [
        (lambda x, y: x.slice_scatter(y, 1, 3, 4), lambda n: (2, 1, 512), (8, 5, 3)),
        (lambda x, y: x.slice_scatter(y, 1, 0, None, 2), lambda n: (2, n // 2, 512), (4, 6, 5)),
        (lambda x, y: x.select_scatter(y, 1, 3), lambda n: (2, 512), (4, 6, 3)),
    ],
    ids=("a slice", "every other one", "one"),
)
@torch.no_grad()
def test_what_is_written_behind_the_end_is_an_error(write: Any, length: Any, sizes: tuple[int, ...]) -> None:
    """No trace asks whether a slice lies inside its tensor: the program does, at each of its sizes."""
    compiled = oxidiff.compile(Scattered(write), cache=False, tune="off")
    *inside, outside = sizes
    for n in inside:
        x, source = torch.zeros(2, n, 512), torch.ones(length(n))
        assert torch.equal(compiled(x, source), write(x, source))
    for _ in range(3):
        with pytest.raises((RuntimeError, IndexError), match=r"size equal to the slice|out of range"):
            compiled(torch.zeros(2, outside, 512), torch.ones(length(outside)))


def test_batches_without_elements_are_told_of_once() -> None:
    compiled: Any = oxidiff.compile(nn.Linear(8, 8))
    with pytest.warns(oxidiff.FallbackWarning, match="has no elements") as caught, torch.no_grad():
        for length in range(1, 6):
            assert compiled(torch.zeros(0, length, 8)).shape == (0, length, 8)
    assert len(caught) == len(oxidiff.report(compiled).fallbacks) == 1


_BOOLS, _INTS, _FLOATS = torch.tensor([[True, False], [True, True]]), torch.tensor([[1, 2], [3, 4]]), torch.rand(2, 2)
_PIXELS = torch.ones(1, 3, 4, 4, dtype=torch.int64)

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a flag subtracted": (lambda x, y: x - y, (_INTS, _BOOLS)),
    "True subtracted": (lambda x: x - True, (_FLOATS,)),
    "of a flag": (lambda x: 1 - x, (_BOOLS,)),
    "argmax of flags": (lambda x: x.argmax(-1), (_BOOLS,)),
    "addcmul of flags": (lambda x: torch.addcmul(x, x, x), (_BOOLS,)),
    "max_pool2d of flags": (lambda x: F.max_pool2d(x, 2), (_PIXELS.bool(),)),
    "integers to a negative power": (lambda x: x**-1, (_INTS,)),
    "integers enlarged": (lambda x: F.interpolate(x, scale_factor=2), (_PIXELS,)),
    "flags looked up": (lambda x, y: F.embedding(x, y), (_BOOLS, _FLOATS)),
    "floats looked up": (lambda x, y: F.embedding(x, y), (_FLOATS, _FLOATS)),
    "bytes selected": (lambda x, y: x.index_select(0, y), (_FLOATS, torch.zeros(1, dtype=torch.uint8))),
    "logaddexp of integers": (lambda x: torch.logaddexp(x, x), (_INTS,)),
    "max_pool1d of integers": (lambda x: F.max_pool1d(x[0], 2), (_PIXELS,)),
    "silu of integers": (lambda x: (F.silu(x), x + 1)[1], (_INTS,)),
    "gelu of integers": (lambda x: F.gelu(x), (_INTS,)),
    "bits of floats": (lambda x: (x ^ x, x + 1)[1], (_FLOATS,)),
    "a product of two types": (lambda x, y: torch.addmm(x.half(), y, y), (_FLOATS, _FLOATS)),
    "prelu of integers": (lambda x: F.prelu(x, x[0, :1]), (_INTS,)),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::oxidiff.FallbackWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_types_that_eager_refuses(what: str) -> None:
    function, args = REFUSED[what]
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        function(*args)
    with pytest.raises(type(eager.value)) as ours:
        oxidiff.compile(function, cache=False)(*args)
    assert str(ours.value) == str(eager.value)
