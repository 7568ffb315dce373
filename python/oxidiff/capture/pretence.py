"""What a program is led to believe while it is traced.

Its tensors live on the real device and tell their sizes as numbers that are followed; an index means what it means in
eager, whatever sizes it happens to name; no function of its own has a cache; transformers knows the tracer.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from ..errors import CaptureError
from .casts import mapped
from .flex import flex_attention, indexed, is_index
from .following import is_tracing
from .guards import FUNCTIONS, LEAVING, TracedFloat, TracedInt, is_tested, plain
from .handlers import MAX_CONSTANT, data_dependent
from .masks import drawn_at_once
from .record import GRADIENTS, MEMORY, STRIDES
from .weights import WeightIndex

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = [
    "RealDevice",
    "following_functions",
    "following_lengths",
    "own_spaces",
    "past_caches",
    "past_dynamo",
    "reached_spaces",
    "refusing_seeds",
    "telling_inference",
    "telling_transformers",
]

aten = torch.ops.aten


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NEW_TENSOR = torch.Tensor.new_tensor
_MAKING = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor))


_EVAL_FRAME = "torch._dynamo.eval_frame"
_CALLBACK = "_callback_from_stance"
"""What says, in each call of a function that ``torch.compile`` made, what compiles its frames: nothing for ``None``."""


@contextmanager
def past_dynamo() -> Iterator[None]:
    """Has functions that ``torch.compile`` made run as they are, in this thread: Dynamo would compile what traces."""
    module: Any = sys.modules.get(_EVAL_FRAME)
    if not hasattr(module, _CALLBACK):
        yield
        return
    original, thread = getattr(module, _CALLBACK), threading.get_ident()
    setattr(module, _CALLBACK, lambda found: None if threading.get_ident() == thread else original(found))
    try:
        yield
    finally:
        setattr(module, _CALLBACK, original)


class RealDevice(TorchFunctionMode):
    """Answers questions about the device of traced tensors with the real one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        device = recorder.device
        kind = device.type
        self._answers: dict[Any, Any] = {
            torch.Tensor.device.__get__: device,
            torch.Tensor.is_meta.__get__: kind == "meta",  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: kind == "cpu",  # type: ignore[attr-defined]
            torch.Tensor.is_cuda.__get__: kind == "cuda",  # type: ignore[attr-defined]
            torch.Tensor.is_mps.__get__: kind == "mps",  # type: ignore[attr-defined]
            torch.Tensor.is_xpu.__get__: kind == "xpu",  # type: ignore[attr-defined]
            torch.Tensor.get_device: -1 if device.index is None else device.index,
        }
        ledger, values = recorder.trace.ledger, recorder.values
        self._ledger = ledger

        def shape(x: Tensor) -> torch.Size:
            value = values.get(id(x))
            return x.shape if value is None else torch.Size(ledger.shape(value, x.shape))

        def size(x: Tensor, dim: int | None = None) -> Any:
            return shape(x) if dim is None else shape(x)[dim]

        def numel(x: Tensor) -> int:
            return math.prod(shape(x))

        def length(x: Tensor) -> int:
            if not x.dim():
                raise TypeError("len() of a 0-d tensor")
            # Python makes a plain int of it.
            ledger.pin(shape(x)[0])
            return x.shape[0]

        def stride(x: Tensor, dim: int | None = None) -> Any:
            strides = list(itertools.accumulate(shape(x)[:0:-1], operator.mul, initial=1))[::-1]
            found = x.stride() if x.dim() else ()
            if found != tuple(strides):
                for n in shape(x):
                    ledger.pin(n)
                strides = list(found)
            return tuple(strides) if dim is None else strides[dim]

        def nbytes(x: Tensor) -> int:
            return numel(x) * x.itemsize

        self._sizes: dict[Any, Callable[..., Any]] = {
            torch.Tensor.shape.__get__: shape,  # type: ignore[attr-defined]
            torch.Tensor.size: size,
            torch.Tensor.numel: numel,
            torch.Tensor.nelement: numel,
            torch.numel: numel,
            torch.Tensor.__len__: length,
            torch.Tensor.stride: stride,
            torch.Tensor.nbytes.__get__: nbytes,  # type: ignore[attr-defined]
        }
        self._told = {func: tell for func, tell in self._sizes.items() if func not in _ASKED}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rec = self._recorder
        try:
            if not rec.is_autocast and not _is_any_autocast_enabled():
                if func not in _ORDINARY:
                    told = self._told.get(func)
                    if told is not None and args and args[0].is_meta:
                        return told(*args, **(kwargs or {}))
                    return self._call(func, args, kwargs)
                self._ledger.use(args)
                if not kwargs:
                    return func(*args)
                self._ledger.use(tuple(kwargs.values()))
                return func(*args, **kwargs)
            if torch.is_autocast_enabled(rec.autocast_kind):
                if torch._C._functorch.peek_interpreter_stack() is not None:
                    raise rec.error("a torch.func transform runs under autocast", func)
                # What a dispatch mode sees of it is that it is off.
                rec.cast_to = torch.get_autocast_dtype(rec.autocast_kind)
            rec.is_called = True
            try:
                return self._call(func, args, kwargs)
            finally:
                rec.cast_to, rec.is_called = None, False
        except Exception as error:
            rec.noted(error, args, kwargs)
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator):
            if str(func) == "flex_attention":
                if self._recorder.cast_to is not None:
                    raise self._recorder.error(f"what autocast makes of {func} is not known", func)
                return flex_attention(self, *args, **(kwargs or {}))
            if str(func) == "custom_function_call" and is_index(args[0]):
                return indexed(self, *args)
            raise self._recorder.error(f"{func} takes functions, which have no lowering", func)
        is_own = not _is_torchs(func)
        if is_own:
            func = _asking(func)
        if func in _ASKED and args and isinstance(args[0], Tensor) and args[0].is_meta:
            self._recorder.note_asked(args[0], _ASKED[func])
        if func is torch.Tensor.contiguous and args[0].is_meta and not kwargs and len(args) == 1:
            self._recorder.note_contiguous(args[0])
        if func in self._answers and args[0].is_meta:
            return self._answers[func]
        if func is torch.numel and not args:
            args, kwargs = (kwargs["input"],), {}
        if func in self._sizes and args and args[0].is_meta:
            return self._sizes[func](*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr and args[0].is_meta:
            raise self._recorder.error("forward asks where a tensor is in memory", func)
        if func is torch.Tensor.is_inference and args[0].is_meta:
            raise self._recorder.error(
                "forward asks whether a tensor was made in inference mode", "Tensor.is_inference"
            )
        if func in _READING_MEMORY and isinstance(args[0], Tensor) and not args[0].is_meta:
            known = self._recorder.constants.get(id(args[0]))
            if func is torch.Tensor.tolist and known is not None:
                return known.tolist()
            # What it would give is of a meta tensor.
            raise self._recorder.error("forward reads the memory of a tensor, as numpy does", func)
        # What is written into is left as it is: a weight is noticed.
        if self._recorder.cast_to is not None and not _is_writing(getattr(func, "__name__", "")):
            args, kwargs = mapped(self._recorder.entered, args), mapped(self._recorder.entered, kwargs)
        if func in _SETTING_DATA:
            raise self._recorder.error("forward sets the data of a tensor", "Tensor.data")
        if func in _CUTTING and len(args) > 1:
            args = self._within(func, args, kwargs or {})
        if func in _PADDING and args and isinstance(args[0], Tensor) and args[0].is_meta:
            args, kwargs = self._cut_first(*args, **(kwargs or {}))
        if func in _MAKING and args and isinstance(args[0], (list, tuple)):
            args = (self._with_items(args[0]), *args[1:])
        self._ledger.use(args)
        if kwargs:
            self._ledger.use(tuple(kwargs.values()))
        if func in _MAKING and self._recorder.has_doubles and len(args) < 2 and not (kwargs and kwargs.get("dtype")):
            data = args[0] if args else kwargs.get("data")
            if any(isinstance(number, float) for number in tree_flatten(data)[0]):
                raise self._recorder.error(
                    "forward makes a tensor of a number, which may be numpy's, without a dtype", func
                )
        if func is _NEW_TENSOR and args[0].is_meta:
            # On the meta device it would not keep the data.
            wanted = dict(kwargs) if kwargs else {}
            data = wanted.pop("data") if "data" in wanted else args[1]
            wanted.setdefault("dtype", args[0].dtype)
            return torch.tensor(data, **wanted)
        if func is torch.Tensor.tolist and args[0].is_meta:
            constant = self._recorder.constants.get(id(args[0]))
            return constant.tolist() if constant is not None else _listed(self._recorder, args[0])
        if func is torch.Tensor.item and args[0].is_meta and id(args[0]) not in self._recorder.constants:
            return self._recorder.read("item", "item", args[0])
        if func is _GETITEM or func is _SETITEM:
            index = self._with_numbers(_without_lists(args[1]))
            view = _basic_index(args[0], index)
            if view is not None:
                return view if func is _GETITEM else _assign(view, args[2])
            if func is _SETITEM and isinstance(args[2], Tensor) and (places := _places(args[0], index)) is not None:
                # torch's own way strips leading ones off the shape of what is written: another program at batch 1.
                if args[2].dtype is not args[0].dtype:
                    raise RuntimeError("Index put requires the source and destination dtypes match")
                aten.index_put_.default(args[0], places, args[2])
                return None
            return func(args[0], index, *args[2:])
        if not (is_own or func in _OTHERS or func in self._answers or func in self._sizes):
            _ORDINARY.add(func)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _with_items(self, data: Any) -> Any:
        """Data of a tensor with numbers for the tensors in it, which torch reads without asking."""
        if isinstance(data, (list, tuple)):
            return [self._with_items(item) for item in data]
        is_read = isinstance(data, Tensor) and data.is_meta and not data.dim()
        return self._recorder.read("item", "item", data) if is_read else data

    def _cut_first(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``pad``, in the place of which what is below zero is cut off first: where a size decides whether
        something is, the program is another one. Of other modes the other side may show what is cut off."""
        given = dict(zip(("pad", "mode", "value"), args, strict=False), **kwargs)
        pad = [*given["pad"]]
        for i, amount in enumerate(pad):
            if isinstance(amount, TracedInt) and plain(amount) < 0 and given.get("mode", "constant") == "constant":
                dim = x.dim() - 1 - i // 2
                size = self._sizes[torch.Tensor.size](x, dim)
                start, end = (0, size + amount) if i % 2 else (-amount, None)
                self._ledger.use((start, end))
                x, pad[i] = aten.slice.Tensor(x, dim, start, end), 0
        return (x, pad), {name: value for name, value in given.items() if name != "pad"}

    def _within(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of what cuts a tensor, with no ends beyond it that are quotients: as many rows as fit into a budget,
        which would be another number of each size. Where an end lies is asked, so that the graph is for where it is so."""
        x, given, *rest = args
        if func in _SPLITTING:
            dim = rest[0] if rest else kwargs.get("dim", 0)
            if self._ledger.is_quotient(given) and type(plain(dim)) is int:
                size = self._sizes[torch.Tensor.size](x, dim)
                return (x, size if given > size else given, *rest)
            return args
        items = given if isinstance(given, tuple) else (given,)
        if not any(isinstance(item, slice) and self._ledger.is_quotient(item.stop) for item in items):
            return args
        if not all(item is None or item is Ellipsis or type(plain(item)) in (int, slice) for item in items):
            return args
        sizes, dim = self._sizes[torch.Tensor.size](x), 0
        found: list[Any] = []
        for at, item in enumerate(items):
            if item is None:
                found.append(item)
                continue
            if item is Ellipsis:
                dim = x.dim() - _consumed(items[at + 1 :])
            elif isinstance(item, slice) and self._ledger.is_quotient(item.stop) and item.stop > sizes[dim]:
                item = slice(item.start, None, item.step)
            found.append(item)
            dim += item is not Ellipsis
        return (x, tuple(found), *rest)

    def _with_numbers(self, index: Any) -> Any:
        """``index`` with numbers for the tensors that are edges of slices."""
        if isinstance(index, tuple):
            return tuple(map(self._with_numbers, index))
        if not isinstance(index, slice):
            return index
        edges = (index.start, index.stop, index.step)
        read = self._recorder.read
        return slice(*(read("item", "item", e) if isinstance(e, Tensor) and e.is_meta else e for e in edges))


def _is_writing(name: str) -> bool:
    """Whether a function of this name may write into its arguments, or asks for an attribute."""
    return name in ("__get__", "__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _is_torchs(func: Any) -> bool:
    """Whether what torch says is called is a function of torch's."""
    if type(func) is types.FunctionType:
        return func.__code__.co_filename.startswith(_TORCH)
    return inspect.isroutine(func)


def _asking(func: Any) -> Any:
    """What asks, where somebody put ``func`` in the place of a function of torch's and it calls that. torch's finds ``func``
    under its own name, and says that this is called."""
    frame = sys._getframe(3)
    asking = frame.f_back if frame.f_code.co_name == "handle_torch_function" else None
    if asking is None or asking.f_code is getattr(func, "__code__", None):
        return func
    # All its arguments are passed on, so that it needs no defaults.
    return types.FunctionType(asking.f_code, asking.f_globals)


def _listed(rec: Recorder, x: Tensor) -> Any:
    """``tolist()`` of a traced tensor, each number an answer of its own."""
    if not x.dim():
        return rec.read("tolist", "item", x)
    if x.numel() > MAX_CONSTANT:
        data_dependent(rec, "tolist", (x,), {})
    return [_listed(rec, row) for row in aten.unbind.int(x, 0)]


_ASKED: dict[Any, int] = {
    torch.Tensor.is_contiguous: STRIDES,
    torch.Tensor.stride: STRIDES,
    torch.Tensor.dim_order: STRIDES,
    torch.Tensor.storage_offset: STRIDES | MEMORY,
    torch.Tensor.as_strided: STRIDES | MEMORY,
    torch.as_strided: STRIDES | MEMORY,
    torch.Tensor.storage: STRIDES | MEMORY,
    torch.Tensor.untyped_storage: STRIDES | MEMORY,
    **{getattr(torch.Tensor, name).__get__: GRADIENTS for name in ("grad", "grad_fn", "is_leaf", "requires_grad")},
}
"""What is asked of tensors that is not in a trace."""
_READING_MEMORY = frozenset(
    {
        torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.tolist, torch.Tensor.__reduce_ex__,
    }
)  # fmt: skip
_SETTING_DATA = frozenset({torch.Tensor.data.__set__})  # type: ignore[attr-defined]
_GETITEM = torch.Tensor.__getitem__
_SETITEM = torch.Tensor.__setitem__
_SPLITTING = (torch.split, torch.Tensor.split)
_PADDING = frozenset((torch.nn.functional.pad, torch.constant_pad_nd))
_CUTTING = frozenset({_GETITEM, _SETITEM, *_SPLITTING})


_OTHERS = frozenset(
    {
        *_ASKED, *_READING_MEMORY, *_SETTING_DATA, *_CUTTING, *_PADDING, *_MAKING, _NEW_TENSOR, torch.Tensor.contiguous,
        torch.Tensor.data_ptr, torch.Tensor.is_inference, torch.Tensor.item,
    }
)  # fmt: skip
"""Functions that are answered in a way of their own, or may be."""
_ORDINARY: set[Any] = set()
"""Functions of torch's that are called as they are, of those that were called so far."""


def _without_lists(index: Any) -> Any:
    """``index`` with lists of numbers as tensors: torch would make them on the meta device, without their data."""
    if isinstance(index, list):
        return torch.tensor(index)
    if isinstance(index, tuple):
        return tuple(torch.tensor(item) if isinstance(item, list) else item for item in index)
    return index


def _basic_index(x: Tensor, index: Any) -> Tensor | None:
    """``x[index]`` for ints, slices, ``None`` and ``...``; ``None`` for other indices.

    torch leaves out slices that take everything, so that ``x[:, :n]`` would be another program where ``n`` happens to
    be the size. Here a slice with bounds is always an op.
    """
    items = index if isinstance(index, tuple) else (index,)
    taken = 0
    for item in items:
        if item is None or item is Ellipsis:
            continue
        if not isinstance(item, slice) and type(plain(item)) is not int:
            return None
        if isinstance(item, slice) and any(isinstance(edge, Tensor) for edge in (item.start, item.stop, item.step)):
            return None
        taken += 1
    if taken > x.dim() or items.count(Ellipsis) > 1:
        return None
    dim = 0
    for item in items:
        if item is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif item is Ellipsis:
            dim += x.dim() - dim - _consumed(items[items.index(Ellipsis) + 1 :])
        elif isinstance(item, slice):
            if not (item.start is None and item.stop is None and item.step is None):
                x = aten.slice.Tensor(x, dim, item.start, item.stop, 1 if item.step is None else item.step)
            dim += 1
        else:
            x = x.select(dim, item)
    return aten.alias.default(x) if all(item is Ellipsis or item == slice(None) for item in items) else x


def _places(x: Tensor, index: Any) -> list[Tensor | None] | None:
    """An index of tensors of integers, and of whole dimensions, as ``index_put_`` takes it; ``None`` if it is another."""
    items = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    places: list[Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            places += [None] * (x.dim() - len(items) + 1)
        elif isinstance(item, Tensor) and item.dim() and item.dtype in (torch.int32, torch.int64):
            places.append(item)
        elif isinstance(item, slice) and item == whole:
            places.append(None)
        else:
            return None
    return places


def _consumed(items: Sequence[Any]) -> int:
    """How many dimensions indices take."""
    return sum(item is not None for item in items)


def _assign(view: Tensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
        return
    while value.dim() > view.dim() and value.shape[0] == 1:
        value = value.squeeze(0)
    view.copy_(value)


def own_spaces(modules: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """The global names of the code of the modules' classes, but for torch's."""
    names = {kind.__module__ for module in modules for kind in type(module).__mro__}
    return [vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] != "torch"]


def reached_spaces(own: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """These global names, and those that the functions, classes and modules among them have: helpers in files of their own.
    Libraries whose code is known, torch's and Python's are not gone into."""
    spaces = {id(space): space for space in own}
    waiting = [space for space in spaces.values() if not is_tested(space.get("__name__", ""))]
    while waiting:
        for value in [*waiting.pop().values()]:
            # By what they are and no attribute: what stands for something that is imported when it is asked would be.
            kind = type(value)
            if issubclass(kind, types.ModuleType):
                name = object.__getattribute__(value, "__dict__").get("__name__")
            elif kind is types.FunctionType:
                name = value.__module__
            elif issubclass(kind, type):
                name = _names_in(value).get("__module__")
            else:
                continue
            module = sys.modules.get(name) if _is_helper(name) else None
            space = object.__getattribute__(module, "__dict__") if isinstance(module, types.ModuleType) else None
            if type(space) is dict and id(space) not in spaces:
                spaces[id(space)] = space
                waiting.append(space)
    return [*spaces.values()]


_names_in = type.__dict__["__dict__"].__get__


def _is_helper(module: Any) -> bool:
    if type(module) is not str or is_tested(module):
        return False
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in _UNFOLLOWED


_UNFOLLOWED = frozenset({"PIL", "cv2", "matplotlib", "numpy", "pandas", "scipy", "sklearn", "tqdm"})
"""Large libraries that compute with no tensors."""


def _caches_of(modules: Sequence[torch.nn.Module]) -> list[tuple[Callable[[Any], None], Any]]:
    """The cached functions of the code of modules, each with what puts another one in its place: methods, those that a
    method asks, and those with a global name where they are written. Also static methods that draw masks row by row."""
    found: list[tuple[Callable[[Any], None], Any]] = []
    types = {cls for module in modules for cls in type(module).__mro__}
    methods = [(functools.partial(setattr, cls, name), value) for cls in types for name, value in vars(cls).items()]
    for space in own_spaces(modules):
        own = ((n, v) for n, v in space.items() if getattr(v, "__module__", None) == space.get("__name__"))
        methods += [(functools.partial(space.__setitem__, name), value) for name, value in own]
    for put, value in methods:
        is_slow = isinstance(value, staticmethod) and drawn_at_once(value.__func__) is not None
        if is_slow or isinstance(value, functools._lru_cache_wrapper):
            found.append((put, value))
        for cell in getattr(value, "__closure__", None) or ():
            try:
                held = cell.cell_contents
            except ValueError:
                # Nothing is in it yet.
                continue
            if isinstance(held, functools._lru_cache_wrapper):
                found.append((functools.partial(setattr, cell, "cell_contents"), held))
    return found


@contextmanager
def past_caches(weights: WeightIndex) -> Iterator[None]:
    """Lets the tracing thread compute what the module's cached functions have in their caches, or would put there: it would
    be of another size, and calls of other threads would find meta tensors. Masks that are drawn row by row it draws at
    once."""
    if weights.cached is None:
        weights.cached = _caches_of([module for _, module in weights.modules])
    try:
        for put, cached in weights.cached:
            put(_past(cached))
        yield
    finally:
        for put, cached in weights.cached:
            put(cached)


def _past(cached: Any) -> Any:
    if isinstance(cached, staticmethod):
        return staticmethod(_at_once(cached.__func__))

    @functools.wraps(cached)
    def function(*args: Any, **kwargs: Any) -> Any:
        return cached.__wrapped__(*args, **kwargs) if is_tracing() else cached(*args, **kwargs)

    function.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    function.cache_info = cached.cache_info  # type: ignore[attr-defined]
    function.cache_parameters = cached.cache_parameters  # type: ignore[attr-defined]
    return function


def _at_once(slow: Any) -> Any:
    quick = drawn_at_once(slow)

    @functools.wraps(slow)
    def function(*args: Any, **kwargs: Any) -> Any:
        return quick(*args, **kwargs) if quick is not None and is_tracing() else slow(*args, **kwargs)

    return function


_SEEDS = ("manual_seed", "seed", "initial_seed")


@contextmanager
def refusing_seeds(recorder: Recorder) -> Iterator[None]:
    """Lets no program set, or ask for, the seed of PyTorch's generator: it would once for all calls."""
    places = [(space, name) for space in (torch, torch.random) for name in _SEEDS]
    before = [getattr(space, name) for space, name in places]

    def refused(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                raise recorder.noted(CaptureError(f"forward calls torch.{function.__name__}"))
            return function(*args, **kwargs)

        return call

    try:
        for (space, name), function in zip(places, before, strict=True):
            setattr(space, name, refused(function))
        yield
    finally:
        for (space, name), function in zip(places, before, strict=True):
            setattr(space, name, function)


@contextmanager
def telling_inference(is_inference: bool) -> Iterator[None]:
    """Says whether inference mode is on for the caller: a trace is taken without."""
    original = torch.is_inference_mode_enabled

    def is_inference_mode_enabled() -> bool:
        return is_inference if is_tracing() else original()

    if not is_inference:
        yield
        return
    torch.is_inference_mode_enabled = is_inference_mode_enabled
    try:
        yield
    finally:
        torch.is_inference_mode_enabled = original


@contextmanager
def telling_transformers() -> Iterator[None]:
    """Lets transformers build masks without looking at their values, as it does for every tracer it knows."""
    library = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_jit_tracing", None)
    if library is None or original is None:
        yield
        return

    def is_jit_tracing() -> Any:
        return is_tracing() or original()

    library.is_jit_tracing = is_jit_tracing  # type: ignore[attr-defined]
    try:
        yield
    finally:
        library.is_jit_tracing = original  # type: ignore[attr-defined]


@contextmanager
def following_functions(spaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Lets roots and logarithms of sizes be followed, of which those of :mod:`math` make plain numbers: there, and where the
    code of the modules' classes, whose global names these are, has one under a name of its own."""
    own = {name: getattr(math, name.removeprefix("math.")) for name in FUNCTIONS}
    instead = {function: _followed(name, function) for name, function in own.items()}
    leaving = (getattr(math, name) for name in LEAVING if hasattr(math, name))
    instead |= {function: _left_by(function) for function in leaving}
    places: list[tuple[dict[str, Any], str, Any]] = [(vars(math), f.__name__, f) for f in instead]
    for space in spaces:
        places += [(space, name, value) for name, value in [*space.items()] if _is_function(value) and value in instead]
    with _named((space, name, instead[value]) for space, name, value in places):
        yield


@contextmanager
def _named(places: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Puts values under names for so long, but where others are put meanwhile: (global names, name, value) of each."""
    replaced = [(space, name, value, space.get(name, _NOTHING)) for space, name, value in places]
    try:
        for space, name, value, _ in replaced:
            space[name] = value
        yield
    finally:
        for space, name, value, before in replaced:
            if space.get(name) is value:
                if before is _NOTHING:
                    del space[name]
                else:
                    space[name] = before


_NOTHING = object()


def _is_function(value: Any) -> bool:
    return type(value) is types.BuiltinFunctionType


def _followed(name: str, function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def call(*numbers: Any) -> Any:
        for number in numbers:
            if isinstance(number, (TracedInt, TracedFloat)):
                return number.ledger.computed(function(*map(plain, numbers)), name, *numbers)
        return function(*numbers)

    return call


def _left_by(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes numbers where nobody sees what becomes of them."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for number in tree_leaves((given, named)):
            if isinstance(number, (TracedInt, TracedFloat)):
                number.ledger.escape(number)
        return function(*given, **named)

    return call


def _length(value: Any, /) -> int:
    """``len()``, of a tensor the size itself."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


class _Ranges(type):
    """The class of what stands for the class of ranges."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, range)


class _Range(metaclass=_Ranges):
    """``range()``, which reads the numbers that it is given where nobody sees that: each is a guard."""

    def __new__(cls, *numbers: Any) -> Any:
        for number in numbers:
            if isinstance(number, TracedInt):
                number.ledger.pin(number)
        return range(*numbers)


@contextmanager
def following_lengths(spaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Lets the code of the modules' classes, and its helpers, see the length of a tensor as a size, where Python makes a
    plain int of what ``__len__`` returns: for so long their ``len`` is :func:`_length`, as :func:`torch.fx.wrap` does it.
    So is what a loop of theirs counts to seen, where they are of no library: it may be 0 at the sizes of a trace, as a
    remainder is."""
    spaces = [*spaces]
    places: list[tuple[dict[str, Any], str, Any]] = [(space, "len", _length) for space in spaces if "len" not in space]
    own = [space for space in spaces if "range" not in space and not is_tested(space.get("__name__", ""))]
    places += [(space, "range", _Range) for space in own]
    with _named(places):
        yield
