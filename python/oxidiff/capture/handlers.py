"""How each kind of ATen op is recorded: a function for each, and a table of the ops whose kind is not in their schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .aliasing import functional_overload, is_view_op
from .composites import COMPOSED, is_composite
from .failures import LongerError
from .meta import META_DEVICE, is_nhwc

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["HANDLERS", "MAX_CONSTANT", "classify", "data_dependent"]

aten = torch.ops.aten


Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]


def _plain(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = rec.emit(func, args, kwargs)
    # Some give views that their schemas do not tell of: `torch.atleast_3d`, `torch.einsum("ij->ji", x)`.
    for part in (result,) if isinstance(result, Tensor) else result:
        rec.aliases.note_shared(part, func, args, kwargs)
    return result


def _view(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = rec.emit(func, args, kwargs)
    parent = args[0]
    if isinstance(result, Tensor):
        if result is not parent and isinstance(parent, Tensor):
            rec.aliases.add_view(result, parent, func, args, kwargs, None)
    else:
        for i, part in enumerate(result):
            rec.aliases.add_view(part, parent, func, args, kwargs, i)
    return result


def _unbind(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view for each place, which are no more than ops are, where a trace is only tried."""
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if rec.is_trial and x.shape[dim] > max(_MANY_PARTS, rec.limit):
        raise LongerError(str(rec.error("forward does more at another size", func)))
    return _view(rec, func, args, kwargs)


_MANY_PARTS = 4096


def _as_strided(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of memory as it lies, which programs know of what is row-major alone."""
    if not rec.stand_in(args[0]).is_contiguous():
        raise rec.error(f"{func} of a tensor that is not contiguous", func)
    return _view(rec, func, args, kwargs)


def _in_place(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    functional = functional_overload(func)
    if functional is None or not isinstance(target, Tensor):
        raise rec.error(f"{func} works in place in a way that is not supported", func)
    _check_target(rec, func, target)
    if functional in COMPOSED:
        return _written(rec, func, target, _composite(rec, functional, args, kwargs))
    return _written(rec, func, target, rec.emit(functional, args, kwargs))


def _check_target(rec: Recorder, func: Any, target: Tensor) -> None:
    """Raises an exception where a tensor may not be written into."""
    root = rec.aliases.root(target)
    if id(root) not in rec.values or id(root) in rec.weights.twins:
        rec.value(root)
        slot = rec.weights.find(root)
        error = rec.error(f"{func} writes into {slot.name if slot else 'a tensor from outside'}", func)
        if slot is None or not rec.may_be_passed(slot, error):
            raise error
    rec.value(target)


def _written(rec: Recorder, func: Any, target: Tensor, result: Tensor) -> Tensor:
    """``target`` after ``result`` was written into it."""
    if result.dtype is not target.dtype:
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
        result = rec.emit(aten.to.dtype, (result, target.dtype), {})
    if result.shape != target.shape:
        raise rec.error(f"{func} broadcasts what it writes into", func)
    rec.aliases.write(target, result)
    return target


def _put(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = rows``: each place where the mask holds takes the next row."""
    x, indices, values, *rest = args
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    is_in_place = func is aten.index_put_.default
    _check_values(x, indices, values)
    if len(given) == 1 and not (rest and rest[0]) and not kwargs.get("accumulate"):
        at, mask = given[0]
        behind = x.dim() - at - mask.dim()
        is_mask = mask.dtype is torch.bool and mask.dim() > 0 and values.dtype is x.dtype
        is_rows = any(size != 1 for size in values.shape[: max(0, values.dim() - behind)])
        if is_mask and is_rows and rec.can_read(mask):
            _check_mask(x, at, mask)
            if is_in_place:
                _check_target(rec, func, x)
            result = _put_rows(rec, func, x, at, mask, values)
            return _written(rec, func, x, result) if is_in_place else result
    return _in_place(rec, func, args, kwargs) if is_in_place else rec.emit(func, args, kwargs)


def _check_mask(x: Tensor, at: int, mask: Tensor) -> None:
    """As torch does for a mask as an index: nobody would look, once there are places for it."""
    if mask.shape != x.shape[at : at + mask.dim()]:
        raise IndexError(f"a mask of {list(mask.shape)} for {list(x.shape)}, from dimension {at} on")


def _check_values(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """As torch does for what is written by index, but on meta tensors: a size that has to be 1 there would seem free."""
    places: list[int] = []
    sizes: list[Sequence[int | None]] = []
    at = 0
    for index in indices:
        if index is None:
            at += 1
        elif index.dtype in (torch.bool, torch.uint8):
            # Where it holds is one index for each of its dimensions.
            places += range(at, at + index.dim())
            sizes.append((None,) * min(index.dim(), 1))
            at += index.dim()
        else:
            places.append(at)
            sizes.append(index.shape)
            at += 1
    rank = max(map(len, sizes), default=0)
    chosen: list[int | None] = [1] * rank
    for shape in sizes:
        for i, size in enumerate(shape, rank - len(shape)):
            chosen[i] = size if chosen[i] == 1 else chosen[i]
    first = places[0] if places and places == list(range(places[0], places[0] + len(places))) else 0
    kept = [size for i, size in enumerate(x.shape) if i not in places]
    result = [*kept[:first], *chosen, *kept[first:]]
    lead = values.dim() - len(result)
    fits = all(
        size == 1 or whole is None or size == whole
        for size, whole in zip(values.shape[max(lead, 0) :], result[max(-lead, 0) :], strict=True)
    )
    if not fits or any(size != 1 for size in values.shape[: max(lead, 0)]):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape "
            f"{result}"
        )


def _put_rows(rec: Recorder, func: Any, x: Tensor, at: int, mask: Tensor, values: Tensor) -> Tensor:
    shape, behind = list(x.shape), list(x.shape[at + mask.dim() :])
    rows = rec.read(func, "nonzero", mask).shape[0]
    if not rows:
        rec.stand_in(values).expand([*shape[:at], 0, *behind])
        same: Tensor = _same_value(rec, aten.clone.default, (x,), {})
        return same
    places = rec.emit(aten.to.dtype, (rec.emit(aten.reshape.default, (mask, [-1]), {}), torch.int64), {})
    places = rec.emit(aten.sub.Tensor, (rec.emit(aten.cumsum.default, (places, 0), {}), 1), {})
    places = rec.emit(aten.clamp.default, (places, 0), {})
    every = rec.emit(aten.expand.default, (values, [*shape[:at], rows, *behind]), {})
    spread = rec.emit(aten.reshape.default, (rec.emit(aten.index_select.default, (every, at, places), {}), shape), {})
    holds = rec.emit(aten.reshape.default, (mask, [*mask.shape, *(1 for _ in behind)]), {})
    result: Tensor = rec.emit(aten.where.self, (holds, spread, x), {})
    return result


def _shape_changing(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.unsqueeze_()`` and its like: the same memory, and another shape from here on."""
    target = args[0]
    is_given = any(target is tensor for tensor in rec.inputs) or id(target) in rec.aliases.protected
    if id(target) not in rec.values or is_given or not rec.aliases.is_alone(target):
        raise rec.error(f"{func} changes the shape of a tensor that others see, too", func)
    result = rec.emit(functional_overload(func), args, kwargs)
    func(*args, **kwargs)
    rec.values[id(target)] = rec.values[id(result)]
    return target


def _fill_diagonal(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No op gives what it writes."""
    target, value, *wrap = args
    if target.dim() != 2 or any(wrap) or kwargs.get("wrap"):
        raise rec.error(f"{func} is supported for matrices, and without wrap", func)
    place = rec.emit(aten.eye.m, tuple(target.shape), {"dtype": torch.bool, "device": target.device})
    return _in_place(rec, aten.masked_fill_.Scalar, (target, place, value), {})


def _unchanged(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _dropout(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train = args
    if train and p > 0:
        raise rec.error(f"{func} is random in training mode", func)
    return x


def _same_value(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``contiguous``, ``clone``, ``detach``: another tensor object, or the same, with the same elements."""
    x = args[0]
    value = rec.value(x)
    source = rec.stand_in(x)
    result = func(source, *args[1:], **kwargs)
    if result is source:
        rec.note_uncopied(x)
        return x
    rec.values[id(result)] = value
    rec.kept.append(result)
    rec.aliases.add_view(result, x, func, args, kwargs, None)
    return result


def _fresh_constant(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.tensor(...)`` in forward: small ones go in by their elements, which may depend on the sizes."""
    x = args[0]
    if id(x) in rec.values:
        return x
    if x.is_meta:
        raise rec.error("forward uses a tensor that was made where tracing cannot see it")
    if x.numel() > MAX_CONSTANT or x.dtype.is_complex:
        rec.bind(x)
        return rec.weights.twin(x)
    # Of a legacy constructor, of which no function of torch's is told.
    with torch._C.DisableTorchFunction():
        flat = x.flatten().tolist()
    if x.dim() and not x.dtype.is_floating_point and not any(flat):
        # As many zeros as the batch has items: a tensor whose size depends on the call, not data.
        twin = rec.emit(aten.zeros.default, (list(x.shape),), {"dtype": x.dtype})
        rec.constants[id(twin)] = x
        return twin
    numbers = [int(e) if isinstance(e, bool) else e for e in flat]
    if x.dtype.is_floating_point and rec.scalars:
        # An argument that became an element is known by its value before it was rounded.
        rounded = {torch.tensor(s, dtype=x.dtype).item(): s for s in rec.scalars}
        numbers = [rounded.get(n, n) for n in numbers]
    twin = torch.empty(x.shape, dtype=x.dtype, device=META_DEVICE)
    if all(math.isfinite(n) for n in numbers):
        rec.append("constant", (), numbers, (twin,))
    else:
        rec.append("constant", tuple(map(repr, numbers)), (), (twin,))
    rec.constants[id(twin)] = x
    return twin


MAX_CONSTANT = 64


def _convert(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every ``to``: all tensors are on one device and stay there, so it is a conversion of dtype, a copy or nothing."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, dtype, device = given["self"], given.get("dtype"), given.get("device")
    if (other := given.get("other")) is not None:
        dtype, device = other.dtype, other.device
    if not isinstance(x, Tensor):
        # A number that an op within `torch.vmap` makes a tensor of.
        return rec.emit(aten.full.default, ((), x), {"dtype": dtype, "device": META_DEVICE})
    if device is not None and not _is_there(rec, torch.device(device)):
        raise rec.error(f"a tensor is moved to {device}, from {rec.device}", func)
    order: torch.memory_format = given.get("memory_format") or torch.preserve_format
    is_ordered = order is torch.preserve_format
    if dtype is not None and dtype is not x.dtype:
        x = rec.emit(aten.to.dtype, (x, dtype), {})
        if is_ordered or _is_suggested(rec.stand_in(x), order):
            return x
    elif not (func is aten._to_copy.default or given.get("copy")):
        # What PyTorch asks is how the channels lie, not whether the memory is without gaps.
        if is_ordered or _is_suggested(rec.stand_in(x), order):
            return x
    return _same_value(rec, aten.clone.default, (x,), {} if is_ordered else {"memory_format": order})


def _is_there(rec: Recorder, device: torch.device) -> bool:
    """Whether a device is the one of the call, or what its tensors are traced on."""
    own: torch.device = rec.device
    # None where the code says "cuda"; torch's types do not have it.
    index: int | None = device.index
    if index is None and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
    is_own = device.type == own.type and (index is None or own.index is None or index == own.index)
    return is_own or device.type == "meta"


def _is_suggested(x: Tensor, order: torch.memory_format) -> bool:
    """Whether PyTorch takes a tensor for one that lies in this order."""
    if order is torch.contiguous_format:
        return not is_nhwc(x)
    return is_nhwc(x) and x.dim() == (4 if order is torch.channels_last else 5)


def _to_full_precision(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What TorchScript writes into a function that runs under autocast."""
    x, on_cuda, on_cpu = args
    is_low = x.dtype in (torch.float16, torch.bfloat16) and (on_cuda if rec.autocast_kind == "cuda" else on_cpu)
    return _convert(rec, aten.to.dtype, (x, torch.float32), {}) if is_low else x


def _to_reduced_precision(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As :func:`_to_full_precision`."""
    x, on_cuda, on_cpu, cuda_dtype, cpu_dtype = args
    is_on, dtype = (on_cuda, cuda_dtype) if rec.autocast_kind == "cuda" else (on_cpu, cpu_dtype)
    return _convert(rec, aten.to.dtype, (x, dtype), {}) if is_on and x.dtype is torch.float32 else x


def _item(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    constant = rec.constants.get(id(args[0])) if args else None
    if constant is not None and constant.numel() == 1:
        return constant.item()
    name = "is_nonzero" if func is aten.is_nonzero.default else "item"
    return rec.leave(rec.read(func, name, args[0]))


def _nonzero(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.read(func, "nonzero", args[0])


def _nonzero_parts(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As indices, one per dimension: ``nonzero(as_tuple=True)``, ``where`` of a condition alone."""
    if not args[0].dim():
        return data_dependent(rec, func, args, kwargs)
    found = rec.read(func, "nonzero", args[0])
    return [rec.emit(aten.select.int, (found, 1, dim), {}) for dim in range(args[0].dim())]


def _masked_select(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    x, mask = (t if t.shape == shape else _view(rec, aten.expand.default, (t, list(shape)), {}) for t in args)
    return _index(rec, aten.index.Tensor, (x, [mask]), {})


def _repeats(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.read(func, "repeat_interleave", args[0])


def _repeated(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, repeats, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    if dim is None:
        x, dim = _view(rec, aten.flatten.using_ints, (x,), {}), 0
    if repeats.dim() != 1 or repeats.shape[0] != x.shape[dim]:
        return data_dependent(rec, func, args, kwargs)
    return rec.emit(aten.index_select.default, (x, dim, rec.read(func, "repeat_interleave", repeats)), {})


def _equal(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.read(func, "equal", *args)


def data_dependent(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    """The handler of what depends on data that nobody has."""
    raise rec.error(f"{func}: what forward does depends on the values of a tensor", func)


def _random(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise rec.error(f"{func} draws random numbers", func)


def _drawn(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that draws from PyTorch's own generator runs in eager PyTorch, after those before it."""
    if any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())):
        raise rec.error(f"{func} draws random numbers from a generator that it is given", func)
    if rec.weights.outer.may_seed:
        raise rec.error(f"{func} draws random numbers, and forward sets or keeps the state of the generator", func)
    if not all(rec.stand_in(argument).is_contiguous() for argument in args if isinstance(argument, Tensor)):
        # PyTorch draws in the order in memory, and by another method.
        raise rec.error(f"{func} draws random numbers for a tensor that is not contiguous", func)
    if not func._schema.is_mutable:
        return rec.emit(func, args, kwargs)
    functional, target = _DRAWS.get(func) or functional_overload(func), args[0]
    if functional is None or not isinstance(target, Tensor):
        return _random(rec, func, args, kwargs)
    _check_target(rec, func, target)
    return _written(rec, func, target, rec.emit(functional, args, kwargs))


_DRAWS = {aten.normal_.default: aten.normal_functional.default, aten.bernoulli_.float: aten.bernoulli.p}


def _recurrent(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random in training mode alone, by dropout between layers."""
    if rec.cast_to is not None:
        raise rec.error(f"what autocast makes of {func} is not known", func)
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return _random(rec, func, args, kwargs) if given["train"] and given["dropout"] else rec.emit(func, args, kwargs)


def _attention(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0:
        return _random(rec, func, args, kwargs)
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None:
        # On meta tensors nobody looks whether its rows are the queries': sizes that are tied would seem free.
        query, key = args[:2]
        scores = (key.shape[-2], query.shape[-2])
        others = reversed(query.shape[:-2])
        if any(own not in (1, size) for own, size in zip(reversed(mask.shape), (*scores, *others), strict=False)):
            raise RuntimeError(f"a mask of {list(mask.shape)} for {scores[1]} queries and {scores[0]} keys")
    return rec.emit(func, args, kwargs)


def _index(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
        elif not index.dim():
            return data_dependent(rec, func, args, kwargs)
        else:
            _check_mask(args[0], len(places), index)
            # Where it is true, along each of its dimensions.
            found = rec.read(func, "nonzero", index)
            places += [rec.emit(aten.select.int, (found, 1, dim), {}) for dim in range(index.dim())]
    return rec.emit(func, (args[0], places), kwargs)


def _cat(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without parts in which nothing is, which the compiler does not have."""
    tensors, *rest = args
    filled = [t for t in tensors if t.numel()]
    if 0 < len(filled) < len(tensors) and len({t.dtype for t in tensors}) == 1:
        # Their shapes are to fit all the same.
        func([rec.stand_in(t) for t in tensors], *rest, **kwargs)
        return rec.emit(func, (filled, *rest), kwargs)
    return rec.emit(func, args, kwargs)


def _one_hot(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) < 2 or args[1] < 0:
        return data_dependent(rec, func, args, kwargs)
    return rec.emit(func, args, kwargs)


def _unsupported(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    error = rec.error(f"{func} writes into its arguments", func)
    written = kwargs.get("out")
    if isinstance(written, Tensor) and not written.numel():
        # It gets another size, which Dynamo's pieces cannot give it: they raise.
        raise UnsupportedError(str(error), module=error.module, op=error.op)
    raise error


def _composite(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parts of an op in its place."""
    if func in rec.composing:
        # Its parts are itself again, by another way.
        return rec.emit(func, args, kwargs)
    composed = COMPOSED.get(func, func.decompose)
    rec.composing.add(func)
    # Of formulas that are not PyTorch's the parts are cast as little as the op is.
    before, rec.cast_to = rec.cast_to, None if func in COMPOSED else rec.cast_to
    try:
        with rec:
            result = composed(*args, **kwargs)
    finally:
        rec.composing.discard(func)
        rec.cast_to = before
    return rec.emit(func, args, kwargs) if result is NotImplemented else result


def _query(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that ask about metadata and give no tensor."""
    return func(*map(rec.stand_in, args), **kwargs)


def classify(func: Any) -> Handler:
    """The handler of an op that is not in :data:`HANDLERS`, by its schema."""
    schema = func._schema
    tags = func.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return _drawn
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return data_dependent
    if schema.is_mutable:
        return _in_place if functional_overload(func) is not None else _unsupported
    if not any("Tensor" in str(r.type) for r in schema.returns):
        return _query
    if is_composite(func):
        return _composite
    return _view if is_view_op(func) else _plain


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(
        (
            aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, aten.feature_dropout_.default,
            aten.alpha_dropout.default, aten.alpha_dropout_.default, aten.feature_alpha_dropout.default,
            aten.feature_alpha_dropout_.default,
        ),
        _dropout,
    ),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default), _same_value),
    **dict.fromkeys((aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default), _fresh_constant),
    **dict.fromkeys(
        (
            aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
            aten.type_as.default,
        ),
        _convert,
    ),
    **dict.fromkeys((aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default), _item),
    **dict.fromkeys((aten.nonzero.default, aten.argwhere.default), _nonzero),
    **dict.fromkeys((aten.nonzero_numpy.default, aten.where.default), _nonzero_parts),
    aten.unbind.int: _unbind,
    # Views, though they say otherwise.
    **dict.fromkeys(
        (aten.unsafe_chunk.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default), _view
    ),
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeats,
    aten.repeat_interleave.self_Tensor: _repeated,
    aten.equal.default: _equal,
    aten.allclose.default: data_dependent,
    **dict.fromkeys((aten.detach_.default, aten.requires_grad_.default), _unchanged),
    **dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), _unchanged),
    aten._assert_tensor_metadata.default: _nothing,
    aten.fill_diagonal_.default: _fill_diagonal,
    **dict.fromkeys(
        (
            aten.unsqueeze_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims,
            aten.transpose_.default, aten.t_.default,
        ),
        _shape_changing,
    ),
    aten.scaled_dot_product_attention.default: _attention,
    aten.index.Tensor: _index,
    aten.as_strided.default: _as_strided,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _put),
    aten.cat.default: _cat,
    aten.one_hot.default: _one_hot,
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), _recurrent),
    **dict.fromkeys(COMPOSED, _composite),
    aten._autocast_to_full_precision.default: _to_full_precision,
    aten._autocast_to_reduced_precision.default: _to_reduced_precision,
}  # fmt: skip
