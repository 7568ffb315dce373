"""One run of a module on meta tensors, written down op by op.

A dispatch mode sees every ATen call of the running thread. Because autograd's dispatch keys are excluded meanwhile,
composite ops (``linear``, ``conv2d``, ``group_norm``, ``scaled_dot_product_attention``, ...) arrive whole. Nothing is
computed: inputs are meta tensors, and weights are replaced, where they enter an op, by meta twins, so that the module
itself is never touched. A function mode lets the program believe its tensors live on the real device.

The record is made for comparing: everything that must agree between two sizes is in :attr:`Trace.nodes`, a list that is
compared with ``==``; everything that may depend on the size is in :attr:`Trace.numbers`, one flat list.

Invariant: whatever happens inside ``forward``, the module, its caches and the interpreter are afterwards as before.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import inspect
import itertools
import math
import operator
import os
import pickle
import random
import sys
import threading
import traceback
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import CaptureError, Error, is_interrupt
from ..hooks import cast_weights, casting
from .aliasing import Aliases, functional_overload, is_view_op
from .guards import Ledger, plain
from .meta import META_DEVICE, RULES
from .objects import taken_apart
from .signature import PLAIN_TENSORS, Answer, Number, Place, Question, Written
from .weights import OBJECTS_DEEP, WeightIndex, WeightSlot, is_plain_object

__all__ = [
    "CHANGED",
    "CLOSE",
    "FALSE",
    "FLOAT",
    "INT",
    "NONE",
    "OPEN",
    "TRUE",
    "ChangedError",
    "LongerError",
    "NotFiniteError",
    "KeptError",
    "LeftError",
    "StrangerError",
    "Keyword",
    "Trace",
    "first_of",
    "following",
    "is_tracing",
    "leads_to",
    "passed",
    "trace",
]

aten = torch.ops.aten
_C = torch._C


CHANGED = "the module was changed while it was being captured"
"""What a :class:`ChangedError` says."""


class LeftError(CaptureError):
    """``forward`` changes its module, or what that holds, in a way that a trace does not show.

    Attributes:
        changed: The dictionaries, lists and sets that it wrote.
    """

    def __init__(
        self, reason: str, changes: Sequence[_Change | _Content] = (), *, module: str = "", op: str = ""
    ) -> None:
        super().__init__(reason, module=module, op=op)
        self.changed: list[Any] = [c.holder if isinstance(c, _Content) else c.table for c in changes]


class KeptError(LeftError):
    """``forward`` keeps a tensor or a count for later calls: once a call has really run, there is perhaps nothing left to
    keep."""


class ChangedError(CaptureError):
    """Another thread changed the module meanwhile: what was seen of it is of no use."""


class StrangerError(CaptureError):
    """``forward`` runs a module that is not reached from its attributes: nobody would notice a change of it."""


class NotFiniteError(CaptureError):
    """A number that ``forward`` reads out of a tensor is not finite, in this call."""


class LongerError(CaptureError):
    """``forward`` does more than at the size that it was traced at first."""


class _Token:
    """A mark in a node's argument list."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


INT = _Token("int")
FLOAT = _Token("float")
TRUE = _Token("true")
FALSE = _Token("false")
NONE = _Token("none")
OPEN = _Token("[")
CLOSE = _Token("]")


class Keyword(str):
    """The name of a keyword argument; the argument's tokens follow."""

    __slots__ = ()


_WRITES = Keyword("writes")

Node = tuple[Any, tuple[Any, ...], tuple[tuple[torch.dtype, int], ...]]
"""``(op, argument tokens, (dtype, rank) of each result)``.

The op is an ATen overload, or one of ``"input"``, ``"weight"``, ``"constant"``, ``"extern"``, ``"read"``, ``"sized"``,
``"output"``. An int token is the number of a value; values are numbered in the order in which nodes produce them.
"""


@dataclass(slots=True)
class Trace:
    """What one run of a module did.

    Attributes:
        nodes: The structure. Two runs are isomorphic if these lists are equal.
        numbers: Every integer and float of the arguments, and every result's sizes, in order.
        starts: For each node, where its numbers start in ``numbers``.
        paths: For each node, the path of the submodule that was running.
        weights: The tensors of the ``"weight"`` nodes, by name.
        externs: The data of the ``"extern"`` nodes: real tensors that no module holds.
        output_spec: How results are put together, in torch's pytree form.
        output_orders: For each tensor returned, its dimensions from the outermost in memory to the innermost.
        is_copied: For each tensor returned, whether it is another one than all arguments, though it may equal one.
        ledger: What the program asked about sizes on its way.
        is_sized: Whether it read values of tensors that follow from sizes alone: numbers like those that it computes.
    """

    nodes: list[Node] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    weights: dict[str, WeightSlot] = field(default_factory=dict)
    externs: list[Tensor] = field(default_factory=list)
    output_spec: TreeSpec | None = None
    output_orders: list[tuple[int, ...]] = field(default_factory=list)
    is_copied: list[bool] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    is_sized: bool = False
    _shapes: list[int] = field(default_factory=list)

    def places(self) -> tuple[Place, ...]:
        """Where the program writes into lists and dictionaries that it is given."""
        tokens = self.nodes[-1][1]
        found: tuple[Place, ...] = ast.literal_eval(tokens[-1]) if _WRITES in tokens[-2:-1] else ()
        return found

    def number_of(self, value: int, dim: int) -> int:
        """Where in :attr:`numbers` a dimension of a value is."""
        if not self._shapes:
            for i, (_, _, results) in enumerate(self.nodes):
                at = self.end_of(i) - sum(rank for _, rank in results)
                for _, rank in results:
                    self._shapes.append(at)
                    at += rank
        return self._shapes[value] + dim

    def end_of(self, node: int) -> int:
        """Where the numbers of a node end in :attr:`numbers`."""
        return self.starts[node + 1] if node + 1 < len(self.starts) else len(self.numbers)

    def difference(self, other: Trace) -> str | None:
        """Where the structure of ``other`` first differs, ``None`` if the two are isomorphic."""
        if self.nodes == other.nodes:
            # Data made in forward is as many numbers as it has elements.
            # A stored trace has none; there the graph's own forms show it.
            if self.starts and (self.starts != other.starts or len(self.numbers) != len(other.numbers)):
                return "a constant made in forward has a length that depends on the sizes"
            for a, b in zip(self.externs, other.externs, strict=True):
                if a is not b and not (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)):
                    return "a constant made in forward depends on the sizes"
            return None
        for i, (a_node, b_node) in enumerate(zip(self.nodes, other.nodes, strict=False)):
            if a_node != b_node:
                return f"node {i} ({self.paths[i] or 'the module'}): {a_node[0]} and {b_node[0]}"
        return f"{len(self.nodes)} and {len(other.nodes)} nodes"


_lock = threading.RLock()
_current: Recorder | None = None


def passed(place: int, number: Number) -> Number:
    """What a program that is being traced is passed for the number at this place among the sizes of its call."""
    return number if _current is None else _current.trace.ledger.argument(place, number)


def is_tracing() -> bool:
    """True inside a ``forward`` that is being traced, in the tracing thread."""
    return _current is not None and _current.thread == threading.get_ident()


def first_of(value: int, makers: Sequence[int]) -> int:
    """The first result of the node that makes a value; ``makers`` has the number of the node of each."""
    first = value
    while first and makers[first - 1] == makers[value]:
        first -= 1
    return first


class Reader(Protocol):
    """Who answers what ``forward`` reads out of tensors; see :mod:`~oxidiff.capture.reads`."""

    asks_sizes: bool
    """Whether what follows from sizes alone is an answer, too."""

    def begin(self) -> None: ...
    def answer(
        self, record: Trace, makers: Sequence[int], question: Question, operands: Sequence[int], /
    ) -> Answer: ...


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every ATen call and answers with meta tensors."""

    def __init__(
        self,
        weights: WeightIndex,
        device: torch.device,
        scalars: Sequence[float] = (),
        limit: int | None = None,
        reader: Reader | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.makers: list[int] = []
        """For each value, the number of its node."""
        self._reader = reader
        self._forms: dict[int, int] = {}
        self._known_forms: dict[tuple[Any, ...], int] = {}
        self._answers: dict[tuple[str | int, ...], tuple[int, Any]] = {}
        self.scalars = scalars
        self.is_trial = limit is not None
        self.limit = sys.maxsize if limit is None else limit
        self.weights = weights
        self.device = device
        self.thread = threading.get_ident()
        self.path = ""
        self.values: dict[int, int] = {}
        self.aliases = Aliases(self)
        self.kept: list[Any] = []
        self.inputs: list[Tensor] = []
        self.foreign: set[tuple[int, str]] = set()
        """Ids of modules and names of attributes that other threads set meanwhile."""
        self.own: set[tuple[int, str]] = set()
        """The same, of parameters and submodules that `forward` sets."""
        self.is_disturbed = False
        """Whether the program may be another since."""
        self.made: set[int] = set()
        """Ids of modules that `forward` makes."""
        self.adapters = _Adapters(self)
        self.stranger: StrangerError | None = None
        self.has_doubles = False
        self.held: Set[int] = frozenset()
        """Ids of modules and objects that were there before."""
        self._count = 0
        self._constants: dict[int, Tensor] = {}
        self._effective: dict[int, WeightSlot] = {}
        """Of weights that are bound with adapters in them, by the weight's id."""
        self._others: dict[int, tuple[Tensor, Tensor, str]] = {}
        """Tensors that are all of a weight's memory, as `torch.Tensor._make_subclass` makes them, with the weight and its
        name, by their id."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Only adds a wrapper to every call that keeps Dynamo out, which does not run here.
        return False

    # -- values --------------------------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor, label: str) -> None:
        """Makes ``tensor`` the next argument of the graph."""
        self._append("input", (), (), (tensor,))
        self.inputs.append(tensor)
        self.aliases.protected[id(tensor)] = f"its input {label}"

    def _append(
        self, op: Any, tokens: tuple[Any, ...], numbers: tuple[int | float, ...] | list[int | float], results: Any
    ) -> None:
        record = self.trace
        if len(record.nodes) >= self.limit:
            raise LongerError(str(self.error("forward does more at another size", op)))
        record.starts.append(len(record.numbers))
        record.paths.append(self.path)
        record.numbers.extend(numbers)
        metas = []
        for result in results:
            shape = result.shape
            metas.append((result.dtype, len(shape)))
            record.numbers.extend(shape)
            self.values[id(result)] = self._count
            self._count += 1
            self.makers.append(len(record.nodes))
        self.kept.extend(results)
        record.nodes.append((op, tokens, tuple(metas)))

    def _bind(self, tensor: Tensor) -> int:
        """The value of a tensor that comes from outside the trace."""
        if type(tensor) not in PLAIN_TENSORS:
            if not isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, "__tensor_flatten__"):
                raise self.error(f"forward uses a tensor subclass, {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise self.error("forward uses a sparse or quantized tensor")
        if tensor.is_neg() or tensor.is_conj():
            # Their memory holds something else than they say: `x.conj().imag`.
            raise self.error("forward uses a tensor that is negated or conjugated when it is read")
        slot = self.weights.find(tensor)
        if slot is not None and self.weights.is_effective(slot):
            self._effective[id(tensor)] = slot
            self._check_effective(slot)
        if slot is None and tensor.is_meta:
            raise self.error("forward uses a tensor that was made where tracing cannot see it")
        if slot is None and (owner := self.weights.owner_of_memory(tensor)) is not None:
            weight = self.weights.whole(tensor)
            if weight is None:
                raise self.error(f"forward uses a part of {owner} that was taken outside of it")
            value = self._value(weight)
            self._others[id(tensor)] = tensor, weight, owner
            self.values[id(tensor)] = value
            # Writes into one of them would be the other's.
            self.aliases.protected.update(dict.fromkeys((id(tensor), id(weight)), f"its weight {owner}"))
            return value
        twin = self.weights.twin(tensor)
        if slot is not None:
            self._append("weight", (slot.name,), (), (twin,))
            self.trace.weights[slot.name] = slot
        else:
            self._append("extern", (len(self.trace.externs),), (), (twin,))
            self.trace.externs.append(tensor)
        value = self.values[id(tensor)] = self._count - 1
        return value

    def _check_effective(self, slot: WeightSlot) -> None:
        """What a graph is bound to for this weight has adapters in it, which is right within its layer alone."""
        if slot.module != self.path:
            raise self.error(f"forward uses {slot.name}, to which adapters are added, outside of its layer")

    def _value(self, tensor: Tensor) -> int:
        value = self.values.get(id(tensor))
        if value is None:
            return self._bind(tensor)
        if self._effective and (slot := self._effective.get(id(tensor))) is not None:
            self._check_effective(slot)
        if self.aliases.is_active:
            self.aliases.refresh(tensor)
            return self.values[id(tensor)]
        return value

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The meta tensor that ops see for ``tensor``."""
        if id(tensor) in self._others:
            tensor = self._others[id(tensor)][1]
        return self.weights.twins.get(id(tensor), tensor)

    def error(self, reason: str, op: Any = "") -> CaptureError:
        """The exception that says where tracing failed."""
        where = f"in {self.path}: " if self.path else ""
        return CaptureError(f"{where}{reason}", module=self.path, op=str(op))

    def check_known(self, module: torch.nn.Module) -> None:
        """Raises a :class:`StrangerError` if nobody would notice what becomes of a module that is called."""
        if id(module) in self.made or not self.weights.paths or self.weights.is_known(module):
            return
        if not (module._parameters or module._buffers or module._modules) and _is_of_torch(type(module)):
            # It is what its class says: an activation.
            return
        reason = f"forward runs a {type(module).__name__} that is no submodule; hold it in an attribute of the module"
        # In case that `forward` catches it.
        self.stranger = StrangerError(str(self.error(reason)), module=self.path)
        raise self.stranger

    # -- what is read out of tensors -----------------------------------------------------------------------------------

    def read(self, func: Any, name: str, *operands: Tensor) -> Any:
        """What ``forward`` reads out of traced tensors: a tensor, a number or a flag.

        Raises:
            CaptureError: Nobody can tell: it follows from weights, or there is no data.
        """
        values = [self._value(operand) for operand in operands]
        sources = self._sources_of(values)
        if name == "item" and sources is not None and not sources:
            number = self._sized(values[0], operands[0])
            if number is not None:
                return number
        if self._reader is None or sources is None or (name == "item" and operands[0].is_complex()):
            _data_dependent(self, func, operands, {})
        key: tuple[str | int, ...] = (name, *map(self._form_of, values))
        at, answer = self._answers.get(key, (-1, None))
        if answer is None:
            at = len(self._answers)
            opposite = None
            if name == "nonzero":
                asked = ((name, form) for form in self._opposites(values[0]))
                opposite = next((self._answers[one][0] for one in asked if one in self._answers), None)
            question = Question(name, tuple(operands[0].shape), opposite)
            answer = self._reader.answer(self.trace, self.makers, question, values)
            if isinstance(answer, Tensor):
                answer = torch.empty(answer.shape, dtype=answer.dtype, device=META_DEVICE)
                self._append("read", (name, *values), (), (answer,))
            else:
                self._append("read", (name, *values), (), ())
            self._answers[key] = at, answer
        if not isinstance(answer, Tensor):
            return answer
        # Of its own each time: a program may write into one.
        twin = torch.empty_like(answer)
        self.values[id(twin)] = self.values[id(answer)]
        self.kept.append(twin)
        return twin

    def _sized(self, value: int, x: Tensor) -> int | None:
        """An integer that is read out of a tensor and follows from sizes alone: a size like others, of a value that nobody
        has. ``None`` if it is none, or is to be an answer."""
        if x.dtype not in (torch.int32, torch.int64) or (self._reader is not None and self._reader.asks_sizes):
            return None
        from .reads import answer_in

        number = answer_in(self.trace, self.makers, "item", [value], {}, torch.device("cpu"))
        if isinstance(number, Tensor) or number < 0:
            return None
        self.trace.is_sized = True
        self._append("sized", (), (), (torch.empty(int(number), device=META_DEVICE),))
        return self.trace.ledger.shape(self._count - 1, (int(number),))[0]

    def can_read(self, x: Tensor) -> bool:
        """Whether what ``forward`` reads out of a tensor is known."""
        return self._reader is not None and self._sources_of([self._value(x)]) is not None

    def leave(self, number: Any) -> Any:
        """A number that was read as C is to have it, which does not say what becomes of it."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("oxidiff.", "torch.")):
            frame = frame.f_back
        self.trace.ledger.escape_to(number, frame.f_globals.get("__name__", ""))
        return plain(number)

    def _sources_of(self, values: Sequence[int]) -> set[str] | None:
        """What values follow from, but for sizes: arguments, and what was read. ``None`` if from weights, or by many ops."""
        nodes, makers = self.trace.nodes, self.makers
        found: set[int] = set()
        waiting = [makers[value] for value in values]
        while waiting:
            index = waiting.pop()
            if index in found:
                continue
            if nodes[index][0] == "weight" or len(found) >= _MAX_PRELUDE:
                return None
            found.add(index)
            waiting += [makers[value] for value in self._operands(index)]
        return {nodes[index][0] for index in found} & {"input", "extern", "read"}

    def _operands(self, index: int) -> list[int]:
        """The values that a node reads for its result."""
        op, tokens, _ = self.trace.nodes[index]
        return [] if op in _SOURCES else [token for token in tokens if type(token) is int]

    def _form_of(self, value: int) -> int:
        """A number for how a value is made, the same for all that are made alike."""
        if value not in self._forms:
            record, index = self.trace, self.makers[value]
            op, tokens, results = record.nodes[index]
            if op in _SOURCES and op != "constant":
                made: tuple[Any, ...] = (op, value)
            else:
                alike = tuple(self._form_of(t) if type(t) is int else t for t in tokens)
                numbers = tuple(record.numbers[record.starts[index] : record.end_of(index)])
                made = (op, value - first_of(value, self.makers), alike, numbers, results)
            self._forms[value] = self._known_forms.setdefault(made, len(self._known_forms))
        return self._forms[value]

    def _opposites(self, value: int) -> list[int]:
        """The forms of what is true where a value is not: what it is the negation of, and its negation."""
        own, index = self._form_of(value), self.makers[value]

        def is_negation(op: Any, results: tuple[tuple[torch.dtype, int], ...]) -> bool:
            # The bits of an integer are another thing.
            return op in _NEGATIONS and results[0][0] is torch.bool

        op, _, results = self.trace.nodes[index]
        negated = [self._form_of(v) for v in self._operands(index)] if is_negation(op, results) else []
        known = self._known_forms.items()
        return negated + [
            f for made, f in known if len(made) == 5 and made[2] == (own,) and is_negation(made[0], made[4])
        ]

    # -- ops -----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _classify(func)
        return handler(self, func, args, kwargs or {})

    def emit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records one op and returns its result on the meta device."""
        tokens: list[Any] = []
        numbers: list[int | float] = []
        meta_args = [self._argument(a, tokens, numbers) for a in args]
        if kwargs:
            meta_kwargs = {}
            for name, value in kwargs.items():
                if name in _PLACEMENT:
                    meta_kwargs[name] = META_DEVICE if name == "device" and value is not None else value
                    continue
                tokens.append(_KEYWORDS.setdefault(name, Keyword(name)))
                meta_kwargs[name] = self._argument(value, tokens, numbers)
            if "pin_memory" in meta_kwargs:
                meta_kwargs["pin_memory"] = False
        else:
            meta_kwargs = kwargs
        rule = RULES.get(func)
        result = rule(*meta_args, **meta_kwargs) if rule is not None else None
        if result is None:
            result = _run_meta(func, meta_args, meta_kwargs)
        if isinstance(result, Tensor):
            if not result.is_meta:
                result = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META_DEVICE)
            self._append(func, tuple(tokens), numbers, (result,))
        elif isinstance(result, (tuple, list)) and all(isinstance(r, Tensor) for r in result):
            self._append(func, tuple(tokens), numbers, result)
        else:
            raise self.error(f"{func} gives {type(result).__name__}, no tensor", func)
        return result

    def _argument(self, a: Any, tokens: list[Any], numbers: list[int | float]) -> Any:
        if isinstance(a, Tensor):
            tokens.append(self._value(a))
            return self.stand_in(a)
        a = plain(a)
        kind = type(a)
        if kind is int:
            tokens.append(INT)
            numbers.append(a)
        elif kind is float:
            if math.isfinite(a):
                tokens.append(FLOAT)
                numbers.append(a)
            else:
                tokens.append(repr(a))
        elif kind is bool:
            tokens.append(TRUE if a else FALSE)
        elif a is None:
            tokens.append(NONE)
        elif isinstance(a, (list, tuple)):
            tokens.append(OPEN)
            out = [self._argument(item, tokens, numbers) for item in a]
            tokens.append(CLOSE)
            return out
        elif kind is torch.device:
            tokens.append(NONE)
            return META_DEVICE
        else:
            tokens.append(a)
        return a

    def release(self) -> list[weakref.ref[Tensor]]:
        """Lets go of all tensors; gives references to those made while tracing."""
        inputs = self.kept[: len(self.inputs)]
        own = {id(t) for t in (*self.weights.twins.values(), *inputs)}
        made = [weakref.ref(t) for t in self.kept if id(t) not in own]
        inputs.clear()
        self.kept.clear()
        self.values.clear()
        self._constants.clear()
        self._answers.clear()
        self.aliases = Aliases(self)
        return made

    def check_others(self) -> None:
        """Raises an error if ``forward`` did not make what it uses in place of a weight: it may be a former one."""
        refs = [(weakref.ref(tensor), owner) for tensor, _, owner in self._others.values()]
        self._others.clear()
        for ref, owner in refs:
            if ref() is not None:
                raise self.error(f"forward uses a part of {owner} that was taken outside of it")

    def close(self) -> None:
        """Lets go of the module: whatever holds the recorder no longer holds that."""
        self.trace.ledger.is_open = False
        del self.aliases, self.weights, self.adapters

    def finish(self, result: Any) -> Trace:
        """Records what ``forward`` returned and gives the trace."""
        self.trace.ledger.is_open = False
        places: tuple[Place, ...] = ()
        if isinstance(result, Written):
            places = result.places
            result = (result.result, result.values)
        leaves, spec = tree_flatten(result)
        if not _is_same(result, tree_unflatten(leaves, spec)):
            raise self.error("forward returns an object that torch's pytree does not make again as it was")
        leaves, spec = tree_flatten(taken_apart(result, self.held))
        tokens: list[Any] = []
        numbers: list[int | float] = []
        self.path = ""
        self.trace.ledger.use(leaves)
        storages = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tokens.append(self._value(leaf))
                self.trace.output_orders.append(_memory_order(leaf))
                self.trace.is_copied.append(leaf.untyped_storage()._cdata not in storages)
            elif leaf is None or isinstance(leaf, (bool, int, float)):
                self._argument(leaf, tokens, numbers)
            elif isinstance(leaf, (str, torch.dtype)):
                tokens.append(leaf)
            else:
                raise self.error(f"forward returns {type(leaf).__name__}")
        if places:
            tokens += (_WRITES, repr(places))
        self._append("output", tuple(tokens), numbers, ())
        self.trace.output_spec = spec
        return self.trace


def _is_same(one: Any, other: Any) -> bool:
    """Whether two results, one made of the leaves of the other, are the same in all that a caller can see."""
    if one is other:
        return True
    if type(one) is not type(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    items: list[tuple[Any, Any]] = []
    if isinstance(one, (tuple, list)):
        items += zip(one, other, strict=False)
        if len(one) != len(other):
            return False
    elif isinstance(one, dict):
        items += zip(one.values(), other.values(), strict=True)
    elif not hasattr(one, "__dict__"):
        return isinstance(one, (int, float, str, torch.dtype, torch.device)) and one == other
    mine, theirs = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    return mine.keys() == theirs.keys() and all(
        _is_same(a, b) for a, b in (*items, *((value, theirs[name]) for name, value in mine.items()))
    )


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


_SOURCES = frozenset(("input", "weight", "constant", "extern", "read"))
_NEGATIONS = frozenset((aten.bitwise_not.default, aten.logical_not.default))
_MAX_PRELUDE = 256
"""Ops that may lead to what is read."""
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_KEYWORDS: dict[str, Keyword] = {}


def _run_meta(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        # The strides of the rules in `meta` are those of the common kernels; a view that fits no longer must not fail.
        if func is aten.view.default:
            return aten.reshape.default(*args, **kwargs)
        raise


def _memory_order(t: Tensor) -> tuple[int, ...]:
    rank = t.dim()
    if t.is_contiguous():
        return tuple(range(rank))
    strides = t.stride()
    return tuple(sorted(range(rank), key=lambda i: (-strides[i], i)))


# -- handlers: how one kind of op is recorded ----------------------------------------------------------------------------

Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]


def _plain(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.emit(func, args, kwargs)


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


def _in_place(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    functional = functional_overload(func)
    if functional is None or not isinstance(target, Tensor):
        raise rec.error(f"{func} works in place in a way that is not supported", func)
    _check_target(rec, func, target)
    return _written(rec, func, target, rec.emit(functional, args, kwargs))


def _check_target(rec: Recorder, func: Any, target: Tensor) -> None:
    """Raises an exception where a tensor may not be written into."""
    root = rec.aliases.root(target)
    if id(root) not in rec.values or id(root) in rec.weights.twins:
        rec._value(root)
        slot = rec.weights.find(root)
        raise rec.error(f"{func} writes into {slot.name if slot else 'a tensor from outside'}", func)
    rec._value(target)


def _written(rec: Recorder, func: Any, target: Tensor, result: Tensor) -> Tensor:
    """``target`` after ``result`` was written into it."""
    if result.dtype is not target.dtype:
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
    if id(target) not in rec.values or id(target) in rec.aliases.protected or not rec.aliases.is_alone(target):
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
    value = rec._value(x)
    source = rec.stand_in(x)
    result = func(source, *args[1:], **kwargs)
    if result is source:
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
    if x.numel() > _MAX_CONSTANT or x.dtype.is_complex:
        rec._bind(x)
        return rec.weights.twin(x)
    flat = x.flatten().tolist()
    if x.dim() and not x.dtype.is_floating_point and not any(flat):
        # As many zeros as the batch has items: a tensor whose size depends on the call, not data.
        twin = rec.emit(aten.zeros.default, (list(x.shape),), {"dtype": x.dtype})
        rec._constants[id(twin)] = x
        return twin
    numbers = [int(e) if isinstance(e, bool) else e for e in flat]
    if x.dtype.is_floating_point and rec.scalars:
        # An argument that became an element is known by its value before it was rounded.
        rounded = {torch.tensor(s, dtype=x.dtype).item(): s for s in rec.scalars}
        numbers = [rounded.get(n, n) for n in numbers]
    twin = torch.empty(x.shape, dtype=x.dtype, device=META_DEVICE)
    if all(math.isfinite(n) for n in numbers):
        rec._append("constant", (), numbers, (twin,))
    else:
        rec._append("constant", tuple(map(repr, numbers)), (), (twin,))
    rec._constants[id(twin)] = x
    return twin


_MAX_CONSTANT = 64


def _convert(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every ``to``: devices do not matter here, so it is a conversion of dtype or nothing."""
    x = args[0]
    dtype = kwargs.get("dtype")
    for a in args[1:]:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, Tensor):
            dtype = a.dtype
    if dtype is not None and dtype is not x.dtype:
        return rec.emit(aten.to.dtype, (x, dtype), {})
    copies = func is aten._to_copy.default or kwargs.get("copy", False) or True in args[3:4]
    return _same_value(rec, aten.clone.default, (x,), {}) if copies else x


def _item(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    constant = rec._constants.get(id(args[0])) if args else None
    if constant is not None and constant.numel() == 1:
        return constant.item()
    name = "is_nonzero" if func is aten.is_nonzero.default else "item"
    return rec.leave(rec.read(func, name, args[0]))


def _nonzero(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.read(func, "nonzero", args[0])


def _nonzero_parts(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As indices, one per dimension: ``nonzero(as_tuple=True)``, ``where`` of a condition alone."""
    if not args[0].dim():
        return _data_dependent(rec, func, args, kwargs)
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
        return _data_dependent(rec, func, args, kwargs)
    return rec.emit(aten.index_select.default, (x, dim, rec.read(func, "repeat_interleave", repeats)), {})


def _equal(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rec.read(func, "equal", *args)


def _data_dependent(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    raise rec.error(f"{func}: what forward does depends on the values of a tensor", func)


def _random(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise rec.error(f"{func} draws random numbers", func)


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
            return _data_dependent(rec, func, args, kwargs)
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
        return _data_dependent(rec, func, args, kwargs)
    return rec.emit(func, args, kwargs)


def _unsupported(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise rec.error(f"{func} writes into its arguments", func)


def _diff(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differences of neighbours, by slices whose ends are no sizes."""

    def diff(
        x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
    ) -> Tensor:
        ends = [part for part in (prepend, x, append) if part is not None]
        x = torch.cat(ends, dim) if len(ends) > 1 else x
        for _ in range(n):
            after, before = aten.slice.Tensor(x, dim, 1), aten.slice.Tensor(x, dim, 0, -1)
            x = torch.logical_xor(after, before) if x.dtype is torch.bool else after - before
        return x

    with rec:
        return diff(*args, **kwargs)


def _query(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that ask about metadata and give no tensor."""
    return func(*map(rec.stand_in, args), **kwargs)


def _classify(func: Any) -> Handler:
    schema = func._schema
    tags = func.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return _random
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return _data_dependent
    if schema.is_mutable:
        return _in_place if functional_overload(func) is not None else _unsupported
    if not any("Tensor" in str(r.type) for r in schema.returns):
        return _query
    return _view if is_view_op(func) else _plain


_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(
        (aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, aten.alpha_dropout.default), _dropout
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
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeats,
    aten.repeat_interleave.self_Tensor: _repeated,
    aten.equal.default: _equal,
    aten.allclose.default: _data_dependent,
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
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _put),
    aten.cat.default: _cat,
    aten.one_hot.default: _one_hot,
    aten.diff.default: _diff,
}  # fmt: skip


# -- what the program is told ---------------------------------------------------------------------------------------------


_TORCH = os.path.dirname(torch.__file__) + os.sep
_NEW_TENSOR = torch.Tensor.new_tensor
_MAKING = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor))


class _RealDevice(TorchFunctionMode):
    """Answers questions about the device of traced tensors with the real one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        device = recorder.device
        kind = device.type
        self._autocast_type = kind if kind != "meta" else "cpu"
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_torchs(func):
            func = _asking(func)
        if torch.is_autocast_enabled(self._autocast_type):
            # Meta tensors are not cast, so the trace would not show what eager does.
            raise self._recorder.error("autocast is on; convert the module to the lower precision instead", func)
        if func in self._answers and args[0].is_meta:
            return self._answers[func]
        if func in self._sizes and args and args[0].is_meta:
            return self._sizes[func](*args, **(kwargs or {}))
        if func in _SETTING_DATA:
            raise self._recorder.error("forward sets the data of a tensor", "Tensor.data")
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
            constant = self._recorder._constants.get(id(args[0]))
            return constant.tolist() if constant is not None else _listed(self._recorder, args[0])
        if func is torch.Tensor.item and args[0].is_meta and id(args[0]) not in self._recorder._constants:
            return self._recorder.read("item", "item", args[0])
        if func is _GETITEM or func is _SETITEM:
            index = self._with_numbers(_without_lists(args[1]))
            view = _basic_index(args[0], index)
            if view is not None:
                return view if func is _GETITEM else _assign(view, args[2])
            if func is _SETITEM and isinstance(args[2], Tensor) and (places := _places(args[0], index)) is not None:
                # torch's own way strips leading ones off the shape of what is written: another program at batch 1.
                aten.index_put_.default(args[0], places, args[2].to(args[0].dtype))
                return None
            return func(args[0], index, *args[2:])
        return func(*args, **kwargs) if kwargs else func(*args)

    def _with_numbers(self, index: Any) -> Any:
        """``index`` with numbers for the tensors that are edges of slices."""
        if isinstance(index, tuple):
            return tuple(map(self._with_numbers, index))
        if not isinstance(index, slice):
            return index
        edges = (index.start, index.stop, index.step)
        read = self._recorder.read
        return slice(*(read("item", "item", e) if isinstance(e, Tensor) and e.is_meta else e for e in edges))


def _is_torchs(func: Any) -> bool:
    """Whether what torch says is called is a function of torch's."""
    if type(func) is types.FunctionType:
        return func.__code__.co_filename.startswith(_TORCH)
    return inspect.isroutine(func)


def _asking(func: Any) -> Any:
    """What asks, where somebody put ``func`` in the place of a function of torch's and it calls that. torch's finds ``func``
    under its own name, and says that this is called."""
    frame = sys._getframe(2)
    asking = frame.f_back if frame.f_code.co_name == "handle_torch_function" else None
    if asking is None or asking.f_code is getattr(func, "__code__", None):
        return func
    # All its arguments are passed on, so that it needs no defaults.
    return types.FunctionType(asking.f_code, asking.f_globals)


def _listed(rec: Recorder, x: Tensor) -> Any:
    """``tolist()`` of a traced tensor, each number an answer of its own."""
    if not x.dim():
        return rec.read("tolist", "item", x)
    if x.numel() > _MAX_CONSTANT:
        _data_dependent(rec, "tolist", (x,), {})
    return [_listed(rec, row) for row in aten.unbind.int(x, 0)]


_SETTING_DATA = frozenset({torch.Tensor.data.__set__})  # type: ignore[attr-defined]
_GETITEM = torch.Tensor.__getitem__
_SETITEM = torch.Tensor.__setitem__


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


class _Adapters:
    """The LoRA layers of a module that is traced without them, and a look at whether that is all the same to ``forward``.

    What adapters add is in the weights that programs are bound to, as the layers are between calls. A ``forward`` that
    changes them on its way (a scale that it passes on to a model inside, adapters that it disables for a while), or that
    looks behind them, is not what its trace says.
    """

    _WRITERS = (
        "scale_layer",
        "unscale_layer",
        "set_scale",
        "set_adapter",
        "enable_adapters",
        "delete_adapter",
        "merge",
        "unmerge",
    )

    def __init__(self, recorder: Recorder) -> None:
        self.bases = recorder.weights.bases
        self._recorder = recorder
        self._inside = {id(base) for base in self.bases.values()}
        self._layers = recorder.weights.layers
        self._scaling = {at: dict(layer.scaling) for at, layer in self._layers.items()}
        self._is_written = False

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
        """The module that runs where ``module`` is called."""
        base = self.bases.get(id(module))
        if base is None:
            if id(module) in self._inside:
                raise self._recorder.error("forward calls a layer to which adapters are added without them")
            return module
        if kwargs or len(args) != 1 or module._forward_pre_hooks or module._forward_hooks:
            raise self._recorder.error("forward says which adapters a layer uses in this call")
        if dict(self._layers[id(module)].scaling) != self._scaling[id(module)]:
            self._is_written = True
            raise self._changed("their scaling is written")
        return base

    def _changed(self, what: str) -> CaptureError:
        return self._recorder.error(
            f"forward changes adapters while it runs ({what}); change them, or pass their scale, from outside"
        )

    def _put_back(self) -> None:
        for at, layer in self._layers.items():
            if layer.scaling != self._scaling[at]:
                layer.scaling.clear()
                layer.scaling.update(self._scaling[at])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Lets no method change the adapters in this thread. What others change is in the weights that are bound next."""
        replaced = []
        owners = {
            (owner, name)
            for kind in {type(layer) for layer in self._layers.values()}
            for name in self._WRITERS
            for owner in [next((cls for cls in kind.__mro__ if name in cls.__dict__), None)]
            if owner is not None
        }
        try:
            for owner, name in owners:
                replaced.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, self._refusing(owner.__dict__[name]))
            yield
        finally:
            for owner, name, write in replaced:
                setattr(owner, name, write)
            if self._is_written:
                # Now, as what `forward` does when it is left by an exception is done.
                self._put_back()

    def _refusing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if id(layer) in self._layers and is_tracing() and _current is self._recorder:
                raise self._changed(f"{write.__name__} of {self._recorder.weights.paths[id(self.bases[id(layer)])]}")
            result = write(layer, *args, **kwargs)
            if id(layer) in self._layers:
                self._scaling[id(layer)] = dict(layer.scaling)
            return result

        return method


class _Following:
    """What stands in for methods of ``nn.Module`` so that a trace notices what its thread does with modules; other threads,
    and everybody between traces, get the methods themselves.

    To put something in their place goes through all classes of modules there are: ten milliseconds where all of diffusers is
    imported. So it stays while someone holds it, as a capture of many traces does. Written under the lock of traces.
    """

    def __init__(self) -> None:
        self.holders: set[object] = set()
        self.own: tuple[Any, ...] | None = None
        """The methods that are stood in for: ``_METHODS``, in this order."""
        self._stand_ins: tuple[Any, ...] = ()
        self._imported = 0

    def begin(self) -> None:
        """Puts everything in its place, if it is not there."""
        if self.own is not None:
            return
        kind: Any = torch.nn.Module
        own = tuple([getattr(kind, name) for name in _METHODS])
        self._stand_ins = stand_ins = _stand_ins_of(*own)
        self._imported = len(sys.modules)
        self.own = own
        kind.__call__, kind.__setattr__, kind.__init__ = stand_ins[:3]
        kind.register_parameter, kind.add_module, kind.__delattr__ = stand_ins[3:]

    def take_back(self) -> None:
        """Gives the modules that were imported meanwhile nn.Module's own methods where they took these for them: an op of
        torch's imports Dynamo, which could compile nothing that makes a module from then on."""
        if len(sys.modules) == self._imported or self.own is not None:
            return
        # Those that were there before have none: to tell which they are, each trace would list thousands of names.
        self._imported = len(sys.modules)
        names = {id(stand_in): name for stand_in, name in zip(self._stand_ins, _METHODS, strict=False)}
        for space in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]:
            for name, value in list(space.items()):
                if id(value) in names:
                    space[name] = getattr(torch.nn.Module, names[id(value)])


_METHODS = ("__call__", "__setattr__", "__init__", "register_parameter", "add_module", "__delattr__")
_following = _Following()


@contextmanager
def following() -> Iterator[None]:
    """Keeps what traces need in its place from one to the next; for a capture."""
    holder, kind = object(), torch.nn.Module
    interrupt: KeyboardInterrupt | None = None
    is_held = True
    try:
        with _lock:
            _following.holders.add(holder)
        yield
    finally:
        while is_held:
            try:
                with _lock:
                    _following.holders.discard(holder)
                    if not _following.holders and _following.own is not None and _current is None:
                        _put_back_methods(kind)
                    is_held = False
                _following.take_back()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _put_back_methods(kind: Any) -> None:
    own = _following.own
    if own is not None:
        kind.__call__, kind.__setattr__, kind.__init__ = own[:3]
        kind.register_parameter, kind.add_module, kind.__delattr__ = own[3:]
        _following.own = None


def _forked() -> None:
    """In a child no other thread captures anything."""
    _put_back_methods(torch.nn.Module)
    _following.holders.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):
    # A process forks between traces: what they replace meanwhile, and the garbage collector, are as always in the child.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)


def _stand_ins_of(own: Any, set_own: Any, make: Any, *writes: Any) -> tuple[Any, ...]:
    """What stands in for methods of ``nn.Module``."""

    @functools.wraps(own)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _current
        if recorder is None or threading.get_ident() != recorder.thread:
            return own(self, *args, **kwargs)
        before = recorder.path
        if recorder.adapters.bases:
            self = recorder.adapters.called(self, args, kwargs)
        paths = recorder.weights.paths
        if id(self) not in paths:
            recorder.check_known(self)
        recorder.path = paths.get(id(self), before)
        if "_diffusers_hook" in self.__dict__ and (dtype := casting(self)) is not None:
            self = cast_weights(self, dtype)
        result = own(self, *args, **kwargs)
        # Not in a `finally`: after an exception the path says where it was raised.
        recorder.path = before
        return result

    @functools.wraps(set_own)
    def set_attribute(self: torch.nn.Module, name: str, value: Any) -> None:
        recorder = _current
        if recorder is None:
            pass
        elif threading.get_ident() != recorder.thread:
            recorder.foreign.add((id(self), name))
            # Tensors change no program.
            recorder.is_disturbed |= not isinstance(value, Tensor)
        else:
            recorder.own.add((id(self), name))
        set_own(self, name, value)

    @functools.wraps(make)
    def initialize(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder = _current
        if recorder is not None and threading.get_ident() == recorder.thread:
            recorder.made.add(id(self))
        make(self, *args, **kwargs)

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(write)
        def method(self: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            recorder = _current
            if recorder is not None and threading.get_ident() == recorder.thread:
                recorder.own.add((id(self), name))
            write(self, name, *args, **kwargs)

        return method

    return (call, set_attribute, initialize, *map(noting, writes))


def _following_modules(recorder: Recorder, run: Callable[[], Any]) -> Any:
    """What ``run`` gives, with ``recorder.path`` kept at the submodule that is running."""
    global _current
    kind: Any = torch.nn.Module
    outer, modes = _current, _Modes()
    try:
        _following.begin()
        _current = recorder
        with recorder.adapters.watched():
            return run()
    finally:
        # No call before all is back: an interrupt comes after one.
        _current = outer
        if not _following.holders and outer is None:
            if (own := _following.own) is not None:
                kind.__call__, kind.__setattr__, kind.__init__ = own[:3]
                kind.register_parameter, kind.add_module, kind.__delattr__ = own[3:]
                _following.own = None
        modes.put_back(recorder)
        _following.take_back()


class _Modes:
    """The modes of this thread, as they were: an interrupt that comes as the ``__exit__`` of one of torch's begins leaves
    it as it is."""

    def __init__(self) -> None:
        self._dispatch, self._function = _C._len_torch_dispatch_stack(), _C._len_torch_function_stack()
        self._is_grad_enabled = torch.is_grad_enabled()

    def put_back(self, recorder: Recorder) -> None:
        while _C._len_torch_function_stack() > self._function:
            _C._pop_torch_function_stack()
        while _C._len_torch_dispatch_stack() > self._dispatch:
            if recorder.old_dispatch_mode_flags:
                recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                _C._pop_torch_dispatch_stack(None)
        _C._set_grad_enabled(self._is_grad_enabled)


_ABSENT = object()


@dataclass(slots=True)
class _Change:
    """An attribute that ``forward`` changed, or an item of a dictionary there."""

    label: str
    table: dict[Any, Any]
    name: Any
    before: Any
    after: Any
    is_item: bool = False

    def undo(self) -> None:
        self._put(self.before)

    def redo(self) -> None:
        self._put(self.after)

    def _put(self, value: Any) -> None:
        if value is _ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value


@dataclass(slots=True)
class _Content:
    """A list or set in an attribute that ``forward`` changed."""

    label: str
    holder: Any
    before: list[Any]
    after: list[Any]

    def undo(self) -> None:
        _fill(self.holder, self.before)

    def redo(self) -> None:
        _fill(self.holder, self.after)


def _fill(holder: list[Any] | set[Any], content: list[Any]) -> None:
    # Never empty in between, for threads that read it.
    if isinstance(holder, list):
        holder[:] = content
    else:
        holder.intersection_update(content)
        holder.update(content)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Tables of a module that `register_forward_hook` and `register_forward_pre_hook` write into."""


class _Before:
    """Notices, and undoes, what ``forward`` leaves behind: attributes, caches of its own methods, other places.

    Attributes:
        is_kept: Whether it put something that the trace made into a list or a dictionary.
        held: Ids of modules and objects that were there.
    """

    def __init__(self, weights: WeightIndex) -> None:
        self._weights = weights
        self.is_kept = False
        self._tables = [
            (path, id(module), table, dict(table))
            for path, module in weights.modules
            for table in (module.__dict__, module._buffers, *(module.__dict__[name] for name in _HOOKS))
        ]
        # Objects that are no modules keep what they made, too: the tables of a rotary embedding, the steps of a controller.
        self._tables += [
            (label, id(value), table, dict(table)) for label, value, table in _tables_beside(weights.modules)
        ]
        self.held = frozenset(holder for _, holder, *_ in self._tables)
        # What other threads do here need not go through methods: what is not seen to be forward's stays.
        self._members: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
            (path, id(module), table, dict(table))
            for path, module in weights.modules
            for table in (module.__dict__["_parameters"], module.__dict__["_modules"])
        ]
        own = {
            id(v): (f"{path}.{name}" if path else name, v)
            for path, module, _, before in self._tables
            for name, v in before.items()
            if name not in _OF_MODULES and isinstance(v, _CONTAINERS) and module not in weights.shared
        }
        self._kept = [(label, holder, _copy_of(holder)) for label, holder in _containers(own.values())]
        # Set anew by each call: nobody is to find what it was in the last.
        self._computed = {
            (id(module), hook.name)
            for _, module in weights.modules
            for hook in module._forward_pre_hooks.values()
            if type(hook) is WeightNorm
        }
        # A cached function would hand out what it made at another size, and keep meta tensors for later callers.
        self._clear_caches()

    def _clear_caches(self) -> None:
        for cache in self._weights.caches:
            cache.cache_clear()

    def restore(self, foreign: Set[tuple[int, str]], own: Set[tuple[int, str]]) -> list[_Change | _Content]:
        """Undoes changes of attributes but those of other threads, and lists them."""
        self._clear_caches()
        changes: list[_Change | _Content] = []
        for label, holder, copied in self._kept:
            if _restore(holder, copied):
                self.is_kept = True
            changes += _content_changes(label, holder, copied)
        for change in changes:
            change.undo()
        for path, module, table, before in self._members:
            mine = []
            for name in [name for name in dict.fromkeys((*table, *before)) if (module, name) in own]:
                old, new = before.get(name, _ABSENT), table.get(name, _ABSENT)
                if old is not new:
                    mine.append(_Change(f"{path}.{name}" if path else name, table, name, old, new))
                    mine[-1].undo()
            if mine and _is_same_table(table, before) and list(table) != list(before):
                _reorder(table, before)
            changes += mine
        for path, module, table, before in self._tables:
            if len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
                continue
            prefix = f"{path}." if path else ""
            for name in dict.fromkeys((*table, *before)):
                old, left = before.get(name, _ABSENT), table.get(name, _ABSENT)
                new = plain(left)
                if old is new and new is not left:
                    table[name] = old
                if old is not new and (module, name) not in foreign:
                    change = _Change(f"{prefix}{name}", table, name, old, new)
                    change.undo()
                    if (module, name) not in self._computed and not _has_same_items(old, new):
                        changes.append(change)
            if not foreign and list(table) != list(before):
                _reorder(table, before)
        return changes

    def forget(self, recorder: Recorder) -> bool:
        """Looks for meta tensors that outlive their trace, in caches and containers, and removes them from there.

        Returns:
            True if there were some.
        """
        made = recorder.release()
        if not any(ref() is not None for ref in made):
            return False
        # What the trace made is young, as nothing was collected meanwhile; all that there is takes a quarter of a second.
        for generation in (0, 2):
            gc.collect(generation)
            if not any(ref() is not None for ref in made):
                return False
        known = self._weights.caches
        # Objects that were there at `gc.freeze()` are not listed; most caches are found by their names.
        named = (
            value for module in list(sys.modules.values()) for value in list(getattr(module, "__dict__", {}).values())
        )
        for found in itertools.chain(gc.get_objects(), named):
            if type(found) is functools._lru_cache_wrapper and found not in known and _is_foreign(found):
                known.append(found)
        self._clear_caches()
        for ref in made:
            tensor = ref()
            if tensor is not None:
                _remove_from_containers(tensor)
        return True


def _is_same_table(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects under the same names, in whatever order."""
    return one.keys() == other.keys() and all(one[name] is value for name, value in other.items())


def _reorder(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Puts the items of a dictionary in their old order, others behind them. Threads that read it miss none of them."""
    names = [*before, *(name for name in list(table) if name not in before)]
    # One call into C: nobody else runs between an item's leaving its place and its coming back.
    with contextlib.suppress(KeyError):
        deque(map(table.__setitem__, names, map(table.pop, names)), maxlen=0)


def _has_same_items(one: Any, other: Any) -> bool:
    """Whether a list was replaced by another one of the very same objects: tables that are moved to where they are."""
    if type(one) is not type(other) or not isinstance(one, (list, tuple)) or len(one) != len(other):
        return False
    return all(map(operator.is_, one, other))


def _own_spaces(modules: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """The global names of the code of the modules' classes, but for torch's."""
    names = {kind.__module__ for module in modules for kind in type(module).__mro__}
    return [vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] != "torch"]


def _caches_of(modules: Sequence[torch.nn.Module]) -> list[tuple[Callable[[Any], None], Any]]:
    """The cached functions of the code of modules, each with what puts another one in its place: methods, those that a
    method asks, and those with a global name where they are written."""
    found: list[tuple[Callable[[Any], None], Any]] = []
    types = {cls for module in modules for cls in type(module).__mro__}
    methods = [(functools.partial(setattr, cls, name), value) for cls in types for name, value in vars(cls).items()]
    for space in _own_spaces(modules):
        own = ((n, v) for n, v in space.items() if getattr(v, "__module__", None) == space.get("__name__"))
        methods += [(functools.partial(space.__setitem__, name), value) for name, value in own]
    for put, value in methods:
        if isinstance(value, functools._lru_cache_wrapper):
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
def _past_caches(weights: WeightIndex) -> Iterator[None]:
    """Lets the tracing thread compute what the module's cached functions have in their caches, or would put there: it would
    be of another size, and calls of other threads would find meta tensors."""
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
    @functools.wraps(cached)
    def function(*args: Any, **kwargs: Any) -> Any:
        return cached.__wrapped__(*args, **kwargs) if is_tracing() else cached(*args, **kwargs)

    function.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    function.cache_info = cached.cache_info  # type: ignore[attr-defined]
    function.cache_parameters = cached.cache_parameters  # type: ignore[attr-defined]
    return function


_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What every module has in its `__dict__`."""
_MAX_NESTED = 10_000
"""Lists and dictionaries in attributes that are looked at."""


_CONTAINERS = (dict, list, set)


def _containers(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The lists, dictionaries and sets among these values, and those in them, with the names of the values."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = list(values)
    while waiting and len(found) < _MAX_NESTED:
        label, holder = waiting.pop()
        if isinstance(holder, _CONTAINERS) and id(holder) not in found:
            found[id(holder)] = label, holder
            if not isinstance(holder, set):
                waiting += [(label, v) for v in (holder.values() if isinstance(holder, dict) else holder)]
    return list(found.values())


def _copy_of(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _content_changes(label: str, holder: Any, before: Any) -> list[_Change | _Content]:
    """What is otherwise in a list, dictionary or set than before, but for numbers in the place of others: nothing shows who
    writes there, and a factor is more likely set by another thread than by ``forward``. Where that does it, the module
    never stays as it was and runs eager, but the factor is changed by the attempts to capture it, too."""
    if isinstance(holder, dict):
        names = [n for n in dict.fromkeys((*before, *holder)) if before.get(n, _ABSENT) is not holder.get(n, _ABSENT)]
        items = ((n, before.get(n, _ABSENT), plain(holder.get(n, _ABSENT))) for n in names)
        changed = ((n, old, new) for n, old, new in items if not type(old) is type(new) is float)
        return [_Change(f"{label}[{n!r}]", holder, n, old, new, is_item=True) for n, old, new in changed]
    now = list(holder)
    if isinstance(holder, set) and holder == set(before):
        return []
    pairs = zip(now, before, strict=False)
    if len(now) == len(before) and all(a is b or type(a) is type(b) is float for a, b in pairs):
        return []
    return [_Content(label, holder, before, list(map(plain, now)))]


def _restore(holder: Any, before: Any) -> bool:
    """Undoes what put something of a trace into a list, dictionary or set; says whether there was any."""
    if isinstance(holder, dict):
        made = [key for key, value in list(holder.items()) if value is not before.get(key, _ABSENT) and _is_made(value)]
        for key in made:
            if key in before:
                holder[key] = before[key]
            else:
                del holder[key]
        return bool(made)
    known = set(map(id, before))
    if all(id(value) in known or not _is_made(value) for value in list(holder)):
        return False
    _fill(holder, before)
    return True


def _is_made(value: Any, depth: int = 6) -> bool:
    """Whether there is something of a trace in a value."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set)):
        inner = value
    elif is_plain_object(type(value)):
        inner = vars(value).values()
    else:
        return False
    # Records may hold each other.
    return depth > 0 and any(_is_made(item, depth - 1) for item in list(inner))


class _Cells(MutableMapping[str, Any]):
    """What a function that replaces a module's own remembers in variables around it, by their names."""

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        # An empty one is not assigned to yet.
        self._cells = {name: cell for name, cell in cells if cell != types.CellType()}

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the variable {name} stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


_PLAIN = (type(None), bool, int, float, str, Tensor)


def _tables_beside(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Any, Any]]:
    """The attributes of objects that are no modules and that modules hold, or that such objects hold, and the variables of
    functions that modules hold: a label, what they are of, and the table."""
    seen: set[int] = set()
    waiting = [
        (f"{path}.{name}" if path else name, value, OBJECTS_DEEP)
        for path, module in modules
        for name, value in module.__dict__.items()
        if name not in _OF_MODULES
    ]
    for label, value, depth in waiting:
        if id(value) in seen:
            continue
        if isinstance(value, types.FunctionType):
            if value.__closure__:
                seen.add(id(value))
                yield label, value, _Cells(value)
        elif is_plain_object(type(value)):
            seen.add(id(value))
            yield label, value, value.__dict__
            if depth > 1:
                waiting += [(f"{label}.{name}", inner, depth - 1) for name, inner in value.__dict__.items()]
        elif isinstance(value, (list, tuple, dict)) and depth > 1 and len(waiting) < _MAX_NESTED:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            held = ((key, item) for key, item in items if not isinstance(item, _PLAIN))
            waiting += [(f"{label}[{key!r}]", item, depth - 1) for key, item in held]
    for _, module in modules:
        for label, value in getattr(module, "objects_beside", ()):
            if id(value) not in seen:
                seen.add(id(value))
                yield label, value, value.__dict__


def leads_to(module: torch.nn.Module, tables: Set[int]) -> bool:
    """Whether a module itself, or what is in its attributes, has one of these dictionaries, lists and sets (ids)."""
    own = (module.__dict__, module._buffers, module._parameters, module._modules)
    if any(id(table) in tables for table in (*own, *(module.__dict__[name] for name in _HOOKS))):
        return True
    seen: set[int] = set()
    waiting = [value for name, value in module.__dict__.items() if name not in _OF_MODULES]
    for value in waiting:
        if isinstance(value, torch.nn.Module):
            if id(value.__dict__) in tables:
                return True
            continue
        if is_plain_object(type(value)):
            value = value.__dict__
        if not isinstance(value, (*_CONTAINERS, tuple)) or id(value) in seen:
            continue
        if id(value) in tables:
            return True
        seen.add(id(value))
        if len(waiting) < _MAX_NESTED:
            waiting += [v for v in (value.values() if isinstance(value, dict) else value) if not isinstance(v, _PLAIN)]
    return False


def _is_foreign(cache: Any) -> bool:
    """A cache of the program's own, of which one may forget the contents."""
    module = str(getattr(cache, "__module__", "") or "")
    return module.partition(".")[0] not in {"torch", "torchgen", *sys.stdlib_module_names}


def _remove_from_containers(value: Any, depth: int = 3) -> None:
    """Takes what a trace made out of the lists and dictionaries that hold it, or a tuple or a record of it."""
    for holder in gc.get_referrers(value):
        if type(holder) is list:
            holder[:] = [item for item in holder if item is not value]
        elif isinstance(holder, dict) and "__builtins__" not in holder:
            # Not by its class, which may not allow it: model outputs of diffusers do not.
            kind: type[dict[Any, Any]] = OrderedDict if isinstance(holder, OrderedDict) else dict
            for name in [k for k, v in kind.items(holder) if v is value]:
                kind.__delitem__(holder, name)
        elif isinstance(holder, tuple) and depth:
            _remove_from_containers(holder, depth - 1)


@contextmanager
def _telling_transformers() -> Iterator[None]:
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


def _length(value: Any, /) -> int:
    """``len()``, of a tensor the size itself."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


@contextmanager
def _following_lengths(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Lets the code of the modules' classes see the length of a tensor as a size, where Python makes a plain int of what
    ``__len__`` returns: for so long their ``len`` is :func:`_length`, as :func:`torch.fx.wrap` does it."""
    spaces = [space for space in _own_spaces(modules) if "len" not in space]
    try:
        for space in spaces:
            space["len"] = _length
        yield
    finally:
        for space in spaces:
            if space.get("len") is _length:
                del space["len"]


def trace(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    weights: WeightIndex,
    device: torch.device,
    scalars: Sequence[float] = (),
    limit: int | None = None,
    reader: Reader | None = None,
    has_doubles: bool = False,
) -> Trace:
    """Runs ``call`` once and records it.

    Args:
        call: Calls the module on ``inputs``.
        inputs: The meta tensors that are the graph's arguments, in order, with a label for messages.
        weights: The module's tensors.
        device: What the program is to believe its tensors live on.
        scalars: The Python floats among the arguments.
        limit: Of a trial, which may fail: most nodes of a trace that can be of use. A program that makes more, of each
            token one say, is stopped.
        reader: Who answers what the program reads out of tensors, if anyone can.
        has_doubles: Whether a number stands for one of numpy's, of which torch makes tensors of another dtype.

    Raises:
        CaptureError: If the program cannot be written down as a graph, or raised an exception itself.
    """
    with _lock:
        collecting = gc.isenabled()
        try:
            gc.disable()
            run = functools.partial(_run, call, inputs, weights, device, scalars, limit, reader, has_doubles)
            return _without_draws(lambda: _settled(run))
        finally:
            if collecting:
                gc.enable()


def _without_draws(run: Callable[[], Trace]) -> Trace:
    """A run in which nothing is drawn from the generators of Python and numpy: what it drew would be a constant.

    They belong to all threads. What another one drew meanwhile is mostly not drawn in a second run as well.
    """
    first = before = _generators()
    try:
        for _ in range(_DRAWN):
            record = run()
            after = _generators()
            known = {name: state for name, state, _, _ in before}
            # One that was imported meanwhile may have been made for this run.
            drawn = [name for name, state, _, _ in after if known.get(name, state) != state]
            if not drawn:
                return record
            before = after
    except BaseException:
        _put_back(first)
        raise
    _put_back(first)
    raise CaptureError(
        f"forward draws numbers from the generator of {drawn[0]}, which a program would draw once for all calls; pass them "
        "as arguments"
    )


_DRAWN = 3
"""Runs until draws are taken for those of ``forward``."""

_Generator = tuple[str, Any, Callable[[Any], Any], Any]
"""Whose it is, its state in a form that can be compared, what sets it, and the state."""


def _generators() -> list[_Generator]:
    """The generators that are nobody's own, as they are now."""
    state: Any = random.getstate()
    found: list[_Generator] = [("Python's random module", state, random.setstate, state)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state"):
        state = numpy.get_state()
        found.append(("numpy.random", pickle.dumps(state), numpy.set_state, state))
    return found


def _put_back(generators: Sequence[_Generator]) -> None:
    """Sets generators to what they were, if they are not: eager draws the numbers then that it would have drawn."""
    now = {name: state for name, state, _, _ in _generators()}
    for name, before, put, state in generators:
        if now.get(name) != before:
            put(state)


def _settled(run: Callable[[], tuple[Trace, list[_Change | _Content], bool]]) -> Trace:
    record, changes, leaked = run()
    return _run_again(run, changes) if changes or leaked else record


def _run_again(
    run: Callable[[], tuple[Trace, list[_Change | _Content], bool]], changes: list[_Change | _Content]
) -> Trace:
    """A second run: what a first call sets up once (lazily installed hooks, say) it finds as it is."""
    for change in changes:
        if _holds_tensor(change.after):
            raise KeptError(f"forward keeps a tensor in the attribute {change.label}", changes)
        if isinstance(change, _Content) or change.is_item or isinstance(change.table, _Cells):
            # What it holds may be another thing at each size. And Dynamo, which would find the parts of such a forward,
            # loses what functions that are attributes write into variables around them.
            raise KeptError(f"forward changes {change.label}, which later calls see", changes)
    for change in changes:
        change.redo()
    settled = False
    try:
        record, again, leaked = run()
        for change in again:
            if type(change.after) is int:
                # Of which Dynamo compiles each value anew.
                raise KeptError(f"forward changes the attribute {change.label}", again)
        if again:
            raise LeftError(f"forward changes the attribute {again[0].label}", again)
        if leaked:
            raise CaptureError("a tensor made in forward outlived it, so forward keeps state between calls")
        settled = True
        return record
    finally:
        if not settled:
            for change in changes:
                change.undo()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor)


def _run(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    weights: WeightIndex,
    device: torch.device,
    scalars: Sequence[float],
    limit: int | None,
    reader: Reader | None,
    has_doubles: bool,
) -> tuple[Trace, list[_Change | _Content], bool]:
    """One run; also the attributes that it changed, and whether it left tensors elsewhere: both are undone."""
    before = _Before(weights)
    recorder = Recorder(weights, device, scalars, limit, reader)
    recorder.has_doubles = has_doubles
    recorder.held = before.held
    if reader is not None:
        reader.begin()
    try:
        return _recorded(call, inputs, before, recorder)
    except BaseException as error:
        if not isinstance(error, Error):
            # An interrupt, perhaps in the middle of this.
            before.restore(recorder.foreign, recorder.own)
        raise
    finally:
        recorder.close()


def _called(call: Callable[[], Any], inputs: list[tuple[Tensor, str]], recorder: Recorder) -> Any:
    with (
        torch.no_grad(),
        _C._AutoDispatchBelowAutograd(),
        _telling_transformers(),
        _past_caches(recorder.weights),
        _following_lengths(module for _, module in recorder.weights.modules),
        recorder,
        _RealDevice(recorder),
    ):
        for tensor, label in inputs:
            recorder.add_input(tensor, label)
        return call()


def _finished(call: Callable[[], Any], inputs: list[tuple[Tensor, str]], recorder: Recorder) -> Trace:
    """The trace. Results are of this frame alone, of which an error is cleared: nothing else would hold them."""
    result = _following_modules(recorder, functools.partial(_called, call, inputs, recorder))
    if recorder.stranger is not None:
        raise recorder.stranger
    return recorder.finish(result)


def _recorded(
    call: Callable[[], Any], inputs: list[tuple[Tensor, str]], before: _Before, recorder: Recorder
) -> tuple[Trace, list[_Change | _Content], bool]:
    try:
        record = _finished(call, inputs, recorder)
    except BaseException as error:
        if is_interrupt(error):
            raise
        # `sys.exit()` in forward, too: eager may never get there, at another size.
        before.restore(recorder.foreign, recorder.own)
        # The frames of the tracebacks hold what forward made, also of what the error was raised from.
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            if recorder.is_trial:
                # Nobody sees where it failed, and what closures hold, no frame can be cleared of.
                chained.__traceback__ = None
            chained = chained.__cause__ or chained.__context__
        before.forget(recorder)
        if recorder.is_disturbed:
            raise ChangedError(CHANGED) from None
        if isinstance(error, Error):
            raise
        raise recorder.error(f"tracing failed: {type(error).__name__}: {error}") from error
    changes = before.restore(recorder.foreign, recorder.own)
    if recorder.is_disturbed:
        before.forget(recorder)
        raise ChangedError(CHANGED)
    # Tensors that changed attributes hold are not leaks: they went with the attributes.
    leaked = before.is_kept or (not changes and before.forget(recorder))
    if not (changes or leaked):
        recorder.check_others()
    return record, changes, leaked
