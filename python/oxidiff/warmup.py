"""Compiling ahead of the first call."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _native
from .capture import Binder
from .dispatch import Dispatcher
from .errors import from_native
from .tune import is_watched

__all__ = ["warm_up"]


def warm_up(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Iterable[Any] | None = None
) -> None:
    """Compiles for these example arguments and for further sizes; see :func:`oxidiff.warmup`."""
    if not isinstance(shapes, Iterable | None):
        raise TypeError(f"warmup: shapes are a list of shapes, or of mappings from argument to shape, not {shapes!r}")
    if dispatcher.disabled:
        dispatcher.note_disabled()
        return
    shapes = list(shapes or ())
    names = Binder(dispatcher.forward()).positional if any(isinstance(shape, Mapping) for shape in shapes) else ()
    calls = [(args, kwargs)]
    calls += [_resized(args, kwargs, shape, names) for shape in shapes]
    with _progress(dispatcher.name, len(calls)) as done:
        for some_args, some_kwargs in calls:
            try:
                for _, executable, dims in dispatcher.parts_of(some_args, some_kwargs):
                    executable.prepare(dims)
            except _native.NativeError as error:
                raise from_native(error) from error
            done()


@contextmanager
def _progress(name: str, count: int) -> Iterator[Callable[[], None]]:
    """A progress bar over ``count`` sizes on a terminal or in a notebook; nothing elsewhere or for one size."""
    is_shown = count > 1 and is_watched()
    if is_shown and importlib.util.find_spec("tqdm") is not None:
        with importlib.import_module("tqdm.auto").tqdm(total=count, desc=f"{name}: sizes ready", unit="size") as bar:
            yield lambda: bar.update()
        return
    ready = itertools.count(1)

    def done() -> None:
        at = next(ready)
        if is_shown:
            end = "\n" if at == count else ""
            print(f"\r{name}: {at} of {count} sizes ready", end=end, file=sys.stderr, flush=True)

    yield done


def _resized(
    args: tuple[Any, ...], kwargs: dict[str, Any], shape: Any, names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call with other sizes: a shape of the first tensor, or a mapping from argument to shape.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        shape: The shape or the mapping.
        names: What positional arguments are called.
    """
    by_name: dict[int | str, Sequence[int]] = {}
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(place, value) for place, value in places if isinstance(value, Tensor)]
    if isinstance(shape, Mapping):
        by_parameter = {name: i for i, name in enumerate(names[: len(args)]) if name not in kwargs}
        said: dict[int | str, Any] = {}
        for place, wanted in shape.items():
            found = by_parameter.get(place, place)
            if found not in dict(tensors):
                raise ValueError(f"warmup: no tensor is passed as {place!r}")
            if found in said:
                raise ValueError(f"warmup: {said[found]!r} and {place!r} are one argument")
            said[found], by_name[found] = place, wanted
    else:
        if not tensors:
            raise ValueError("warmup: shapes need an example call with a tensor")
        if not isinstance(shape, Iterable):
            raise TypeError(f"warmup: {shape!r} is no shape of {tensors[0][0]!r}")
        by_name[tensors[0][0]] = tuple(shape)
    batch = None
    for place, tensor in tensors:
        if place in by_name:
            wanted = by_name[place]
            if not all(type(size) is int and size > 0 for size in wanted):
                what = f"shape {tuple(wanted)} for {place!r}"
                raise ValueError(f"warmup: {what}: sizes are ints of at least 1; nothing is compiled for empty tensors")
            if len(wanted) != tensor.dim():
                raise ValueError(f"warmup: shape {tuple(wanted)} for a tensor of {tensor.dim()} dimensions ({place!r})")
            if batch is None and wanted:
                batch = (tensor.shape[0], wanted[0])

    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def resize(place: int | str | None, value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((name, resize(None, item)) for name, item in value.items())
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(resize(None, item) for item in value)
        if not isinstance(value, Tensor):
            return value
        wanted = by_name.get(place) if place is not None else None
        if wanted is None and batch is not None and value.dim() and value.shape[0] == batch[0]:
            wanted = (batch[1], *value.shape[1:])
        if wanted is None:
            return value
        # What is passed twice is one tensor at every size.
        at = id(value), tuple(wanted)
        if at not in made:
            made[at] = _stretched(value, wanted)
        return made[at]

    new_args = tuple(resize(i, value) for i, value in enumerate(args))
    return new_args, {name: resize(name, value) for name, value in kwargs.items()}


def _stretched(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another shape with the same values, over and over: a mask among them says what is compiled."""
    if not value.numel():
        return value.new_zeros(tuple(shape))
    for dim, size in enumerate(shape):
        if size != value.shape[dim]:
            value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return value
