"""In-place ops made functional while they are traced.

Values of a trace are immutable. A tensor object of the traced program *names* a value, and an in-place op makes it name
another one. Views complicate this: writing through ``x[..., 0::2]`` must also change what ``x``, and every other view of
it, names. So each view remembers its parent and the op that made it. A write goes up the chain of parents, scattering
the new value into each; other views of the same root are derived again, from their parents, when they are next read.
A program that never writes in place pays one dictionary entry per view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CaptureError

__all__ = ["Aliases", "functional_overload", "is_view_op"]

aten = torch.ops.aten


class Emitter(Protocol):
    """What aliasing needs of the recorder."""

    values: dict[int, int]

    def emit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records ``func`` on tensors and returns its result."""

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The meta tensor that ops see for ``tensor``."""


@dataclass(slots=True)
class _View:
    out: Tensor
    parent: Tensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    is_of_first: bool = True
    """Whether the first argument is what it is a view of, so that it can be made again."""


class Aliases:
    """Which tensor objects of a running trace are views of which, and which of them are out of date."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._views: dict[int, _View] = {}
        # Per root: how often it was written. Per tensor: at which count it was last right.
        self._writes: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self.protected: dict[int, str] = {}
        self.through_copies: set[int] = set()
        """Ids of what was written into through that which, of a tensor with gaps, is a copy."""

    @property
    def is_active(self) -> bool:
        """True once something was written in place, so that tensors can be out of date."""
        return bool(self._writes)

    def add_view(
        self, out: Tensor, parent: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None
    ) -> None:
        """Notes that ``out`` is result ``index`` (``None``: the only one) of a view op on ``parent`` (``args[0]``)."""
        self._views[id(out)] = _View(out, parent, func, args, kwargs, index)
        if self._writes:
            self._seen[id(out)] = self._writes.get(id(self.root(out)), 0)

    def note_shared(self, out: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what a result shares its memory with, of an op that is none of views: nothing can be written through it."""
        storage = _storage(out)
        for parent in _tensors_in((*args, *kwargs.values())):
            if parent is not out and _storage(self._emitter.stand_in(parent)) == storage:
                self.add_view(out, parent, func, args, kwargs, None)
                self._views[id(out)].is_of_first = bool(args) and parent is args[0]
                return

    def root(self, t: Tensor) -> Tensor:
        """The tensor ``t`` is, through any number of views, a part of."""
        while (view := self._view(t)) is not None:
            t = view.parent
        return t

    def _view(self, t: Tensor) -> _View | None:
        view = self._views.get(id(t))
        # Ops such as `reshape` and `contiguous` copy where they must: then the result stands alone. `view` never does.
        if view is None or view.func is aten.view.default:
            return view
        if _storage(self._emitter.stand_in(t)) != _storage(self._emitter.stand_in(view.parent)):
            return None
        return view

    def is_written(self, t: Tensor) -> bool:
        """Whether something was written into a tensor that is no view, or into a view of it."""
        return id(t) in self._writes

    def is_alone(self, t: Tensor) -> bool:
        """Whether ``t`` is no view, and nothing is a view of it."""
        storage = _storage(t)
        seen_by = (view.out for view in self._views.values() if view.parent is t)
        return self._view(t) is None and not any(_storage(out) == storage for out in seen_by)

    def refresh(self, t: Tensor) -> None:
        """Derives ``t`` again if what it is a view of was written since."""
        root = self.root(t)
        writes = self._writes.get(id(root), 0)
        if root is t or self._seen.get(id(t), 0) == writes:
            return
        view = self._views[id(t)]
        if not view.is_of_first:
            raise CaptureError(f"forward writes into a tensor of which {view.func} made a view", op=str(view.func))
        self.refresh(view.parent)
        result = self._emitter.emit(view.func, (view.parent, *view.args[1:]), view.kwargs)
        fresh = result if view.index is None else result[view.index]
        self._emitter.values[id(t)] = self._emitter.values[id(fresh)]
        self._seen[id(t)] = writes

    def write(self, t: Tensor, new: Tensor) -> None:
        """Makes ``t``, and what it is a view of, name the value of ``new``."""
        root = self.root(t)
        if id(root) in self.protected:
            raise CaptureError(f"forward writes into {self.protected[id(root)]}")
        chain = [t]
        may_copy = False
        values = self._emitter.values
        values[id(t)] = values[id(new)]
        while (view := self._view(t)) is not None:
            self.refresh(view.parent)
            scatter = _SCATTERS.get(view.func)
            if scatter is None:
                raise CaptureError(f"forward writes in place through {view.func}", op=str(view.func))
            may_copy = may_copy or view.func in _MAY_COPY
            merged = scatter(self._emitter.emit, view, t)
            t = view.parent
            values[id(t)] = values[id(merged)]
            chain.append(t)
        writes = self._writes[id(root)] = self._writes.get(id(root), 0) + 1
        for member in chain:
            self._seen[id(member)] = writes
        if may_copy:
            self.through_copies.add(id(root))


def _tensors_in(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an op, in lists too."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_in(argument)


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def is_view_op(func: Any) -> bool:
    """True if a result may share its memory with the first argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def functional_overload(func: Any) -> Any | None:
    """The overload computing what the in-place overload ``func`` writes, ``None`` if there is none."""
    special = _FUNCTIONAL.get(func)
    if special is not None:
        return special
    name = func._schema.name.split("::")[1]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


_FUNCTIONAL: dict[Any, Any] = {
    aten.copy_.default: aten.copy.default,
    aten.zero_.default: aten.zero.default,
    aten.transpose_.default: aten.transpose.int,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    **{
        getattr(getattr(aten, f"__i{name}__"), kind): getattr(getattr(aten, f"__{name}__"), kind)
        for name in ("and", "or", "xor", "lshift", "rshift")
        for kind in ("Tensor", "Scalar")
    },
}

_MAY_COPY = frozenset((aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default))
"""Ops that give views of tensors without gaps, and of others copies, or raise."""

Emit = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _argument(view: _View, index: int, name: str, default: Any) -> Any:
    return view.args[index] if len(view.args) > index else view.kwargs.get(name, default)


def _reshape_back(emit: Emit, view: _View, new: Tensor) -> Any:
    return emit(aten.reshape.default, (new, list(view.parent.shape)), {})


def _slice(emit: Emit, view: _View, new: Tensor) -> Any:
    return emit(aten.slice_scatter.default, (view.parent, new, *view.args[1:]), view.kwargs)


def _select(emit: Emit, view: _View, new: Tensor) -> Any:
    return emit(aten.select_scatter.default, (view.parent, new, *view.args[1:]), view.kwargs)


def _narrow(emit: Emit, view: _View, new: Tensor) -> Any:
    dim, start, length = view.args[1:4]
    return emit(aten.slice_scatter.default, (view.parent, new, dim, start, start + length), {})


def _transpose(emit: Emit, view: _View, new: Tensor) -> Any:
    return emit(aten.transpose.int, (new, *view.args[1:]), view.kwargs)


def _permute(emit: Emit, view: _View, new: Tensor) -> Any:
    dims = [d % new.dim() for d in view.args[1]]
    return emit(aten.permute.default, (new, [dims.index(i) for i in range(new.dim())]), {})


def _same(emit: Emit, view: _View, new: Tensor) -> Any:
    return new


def _part(emit: Emit, view: _View, new: Tensor) -> Any:
    dim = _argument(view, 2, "dim", 0)
    siblings = view.func(view.parent, *view.args[1:], **view.kwargs)
    assert view.index is not None
    start = sum(s.shape[dim] for s in siblings[: view.index])
    return emit(aten.slice_scatter.default, (view.parent, new, dim, start, start + new.shape[dim]), {})


def _unbind(emit: Emit, view: _View, new: Tensor) -> Any:
    return emit(aten.select_scatter.default, (view.parent, new, _argument(view, 1, "dim", 0), view.index), {})


_SCATTERS: dict[Any, Callable[[Emit, _View, Tensor], Any]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.narrow.default: _narrow,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.t.default: lambda emit, view, new: emit(aten.t.default, (new,), {}),
    aten.chunk.default: _part,
    aten.unsafe_chunk.default: _part,
    aten.unsafe_split.Tensor: _part,
    aten.unsafe_split_with_sizes.default: _part,
    aten.split.Tensor: _part,
    aten.split_with_sizes.default: _part,
    aten.unbind.int: _unbind,
    aten.view_as_real.default: lambda emit, view, new: emit(aten.view_as_complex.default, (new,), {}),
    aten.view_as_complex.default: lambda emit, view, new: emit(aten.view_as_real.default, (new,), {}),
    **dict.fromkeys(
        (
            aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
            aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default,
        ),
        _reshape_back,
    ),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.contiguous.default), _same),
}  # fmt: skip
