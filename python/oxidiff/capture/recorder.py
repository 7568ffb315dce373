"""Writes a run down op by op.

A dispatch mode sees every ATen call of the running thread. Because autograd's dispatch keys are excluded meanwhile,
composite ops (``linear``, ``conv2d``, ``group_norm``, ``scaled_dot_product_attention``, ...) arrive whole. Nothing is
computed: inputs are meta tensors, and weights are replaced, where they enter an op, by meta twins, so that the module
itself is never touched. What an op's kind asks for is in :mod:`handlers`, the sizes of its result in :mod:`meta`.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..autocast import KINDS
from ..errors import CaptureError
from . import casts
from .aliasing import Aliases
from .failures import LongerError, StrangerError
from .following import Adapters
from .graph import draws
from .guards import TracedInt, plain
from .handlers import HANDLERS, classify, data_dependent
from .leftovers import LeftError
from .meta import META_DEVICE, answered, memory_order
from .objects import taken_apart
from .reads import answer_in
from .record import (
    CLOSE,
    FALSE,
    FLOAT,
    GRADIENTS,
    INT,
    NONE,
    OPEN,
    SPEC,
    STRIDES,
    TRUE,
    WRITES,
    Again,
    Keyword,
    Trace,
    Trail,
    first_of,
)
from .refused import check_types
from .signature import ATTRIBUTES, PLAIN_TENSORS, TENSORS, Answer, Place, Question, Written
from .unread import DRAW, Drawn
from .weights import WeightIndex, WeightSlot
from .writes import Outer

__all__ = ["Reader", "Recorder"]

aten = torch.ops.aten


_E = TypeVar("_E", bound=Exception)


class Reader(Protocol):
    """Who answers what ``forward`` reads out of tensors; see :mod:`~oxidiff.capture.reads`."""

    asks_sizes: bool
    """Whether what follows from sizes alone is an answer, too."""

    def begin(self) -> None:
        """A run begins: its first question is the first again."""

    def answer(self, record: Trace, makers: Sequence[int], question: Question, operands: Sequence[int], /) -> Answer:
        """What the program reads.

        Args:
            record: What it did so far.
            makers: For each value, the number of its node.
            question: What is read.
            operands: The values that it is read out of.
        """
        ...


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
        self.autocast_kind = device.type if device.type in KINDS else "cpu"
        self.cast_to: torch.dtype | None = None
        """What autocast casts to, where it is on, but in an op the arguments of which were cast."""
        self.is_autocast = False
        """Whether it is on for the whole call, other than what ``forward`` itself does."""
        self.is_called = False
        """Whether a function of torch runs that was called from Python."""
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
        self.composing: set[Any] = set()
        """Ops whose parts are recorded in their place just now."""
        self.checks: list[Callable[[], None]] = []
        """Called once ``forward`` is through, before what it made is written down."""
        self.look_outside: Callable[[str], None] | None = None
        """Called with the path of each module that ran until then, to see which one writes outside of modules."""
        self.adapters = Adapters(self)
        self.failure: CaptureError | None = None
        """Why no graph can be made of the program, if that is known: it fails at its end in case that ``forward`` catches
        what is raised, and goes on another way than it would."""
        self.kept_in: dict[WeightSlot, CaptureError] = {}
        """Buffers and attributes that it writes into: for graphs they would have to be passed to it."""
        self.pending: tuple[Any, list[Any], list[int | float]] | None = None
        """The op of which the result is being found, with its tokens and numbers."""
        self.has_doubles = False
        self.drawn = Drawn()
        """What it draws from generators of Python and numpy and does not look at."""
        self._settled: set[tuple[int, tuple[int, ...]]] = set()
        """Storages and strides of what ``forward`` made contiguous: what it asks from then on is true of that."""
        self._uncopied: set[int] = set()
        """Ids of what `contiguous()` gave itself for."""
        self.held: Set[int] = frozenset()
        """Ids of modules and objects that were there before."""
        self._count = 0
        self.constants: dict[int, Tensor] = {}
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
        self.append("input", (), (), (tensor,))
        self.inputs.append(tensor)

    def note_asked(self, tensor: Tensor, what: int) -> None:
        """Notes what the program asks of a tensor that may be an argument or, as to memory, a part of one; see
        :attr:`Trace.asked`."""
        asked, storage = self.trace.asked, None
        if what != GRADIENTS:
            storage = _storage(tensor)
            if storage is not None and (storage, tensor.stride()) in self._settled:
                return
        for i, one in enumerate(self.inputs):
            if one is tensor or (storage is not None and one.untyped_storage()._cdata == storage):
                asked[i] = asked.get(i, 0) | what

    def note_contiguous(self, tensor: Tensor) -> None:
        """Notes that the program makes a tensor contiguous. Where it is that in a trace, an argument is from then on."""
        if (storage := _storage(tensor)) is not None and tensor.is_contiguous():
            self.note_uncopied(tensor)
            self._settled.add((storage, tensor.stride()))

    def note_uncopied(self, tensor: Tensor) -> None:
        """Notes that an op gave what it was given, which is without gaps in a trace, itself."""
        self._uncopied.add(id(tensor))

    def append(
        self, op: Any, tokens: tuple[Any, ...], numbers: tuple[int | float, ...] | list[int | float], results: Any
    ) -> None:
        """Adds a node, and values for its results."""
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

    def bind(self, tensor: Tensor) -> int:
        """Makes a value of a tensor that comes from outside the trace."""
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
            value = self.value(weight)
            self._others[id(tensor)] = tensor, weight, owner
            self.values[id(tensor)] = value
            # Writes into one of them would be the other's.
            self.aliases.protected.update(dict.fromkeys((id(tensor), id(weight)), f"its weight {owner}"))
            return value
        twin = self.weights.twin(tensor)
        if slot is not None and self.weights.is_count(slot, tensor):
            # Whoever holds the program watches that it stays.
            self.append("constant", (), (int(tensor),), (twin,))
            self.constants[id(tensor)] = self.constants[id(twin)] = tensor.detach().clone()
        elif slot is not None:
            self.append("weight", (slot.name,), (), (twin,))
            self.trace.weights[slot.name] = slot
        else:
            self.append("extern", (len(self.trace.externs),), (), (twin,))
            self.trace.externs.append(tensor)
        value = self.values[id(tensor)] = self._count - 1
        return value

    def _check_effective(self, slot: WeightSlot) -> None:
        """What a graph is bound to for this weight has adapters in it, which is right within its layer alone."""
        if slot.module != self.path:
            raise self.error(f"forward uses {slot.name}, to which adapters are added, outside of its layer")

    def value(self, tensor: Tensor) -> int:
        """The number of the value that a tensor has now."""
        value = self.values.get(id(tensor))
        if value is None:
            return self.bind(tensor)
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

    def entered(self, tensor: Tensor) -> Tensor:
        """The meta tensor of one that an op is called with while autocast is on: PyTorch would cast a real one itself, and
        the others not."""
        if tensor.is_meta or type(tensor) not in PLAIN_TENSORS:
            return tensor
        if id(tensor) not in self.values:
            # The tensor that stands for it is no op of the program's.
            with _disable_current_modes():
                self.bind(tensor)
            slot = self.weights.find(tensor)
            name = slot.name if slot is not None else "a tensor from outside"
            self.aliases.protected.setdefault(id(self.stand_in(tensor)), f"its weight {name}")
        elif (slot := self._effective.get(id(tensor))) is not None:
            self._check_effective(slot)
        return self.stand_in(tensor)

    def may_be_passed(self, slot: WeightSlot, error: CaptureError) -> bool:
        """Whether a tensor of the module that is written into could be passed to it. The trace goes on then, to find the
        others, and fails at its end with the first error."""
        # Of what batch norm counts, there is more that it writes.
        is_kept = slot.kind in ("buffer", "attribute") and not slot.keys and slot.attribute != "num_batches_tracked"
        if is_kept:
            self.kept_in.setdefault(slot, error)
        return is_kept

    def _left(self) -> LeftError:
        """What the trace fails with that found such tensors."""
        first = next(iter(self.kept_in.values()))
        error = LeftError(str(first), module=first.module, op=first.op)
        error.stays = True
        modules = dict(self.weights.modules)
        for slot in self.kept_in:
            table = modules[slot.module]._buffers if slot.kind == "buffer" else modules[slot.module].__dict__
            error.attributes.append((table, slot.attribute))
            error.changed.append(table)
        return error

    def error(self, reason: str, op: Any = "") -> CaptureError:
        """The exception that says where tracing failed."""
        where = f"in {self.path}: " if self.path else ""
        return CaptureError(f"{where}{reason}", module=self.path, op=str(op))

    def check_known(self, module: torch.nn.Module) -> None:
        """Raises a :class:`StrangerError` if nobody would notice what becomes of a module that is called."""
        if id(module) in self.made or not self.weights.paths or self.weights.is_known(module):
            return
        kind, is_called_so = type(module), "_call_impl" in module.__dict__ or module._compiled_call_impl is not None
        is_empty = not (module._parameters or module._buffers or module._modules or is_called_so)
        # An activation: it is what its class and its attributes say.
        if is_empty and (kind.__module__.startswith("torch.nn.") or _is_watched(module, self.weights.outer)):
            return
        reason = f"forward runs a {type(module).__name__} that is no submodule; hold it in an attribute of the module"
        raise StrangerError(str(self.error(reason)), module=self.path)

    def noted(self, error: _E, *given: Any) -> _E:
        """An exception that is raised while ``forward`` runs; see :attr:`failure`. Of torch's own, those of meta tensors are
        none that eager raises. Where ``forward`` catches one that eager raises, too, it goes on as it does for these sizes:
        those of what the op is given are guards."""
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and (value := self.values.get(id(leaf))) is not None:
                for size in self.trace.ledger.shape(value, leaf.shape):
                    self.trace.ledger.pin(size)
            elif isinstance(leaf, TracedInt):
                self.trace.ledger.pin(leaf)
        if self.failure is not None:
            pass
        elif isinstance(error, CaptureError):
            # What its traceback holds would stay until the end.
            self.failure = copy.copy(error)
        elif _OF_META.search(str(error)):
            self.failure = self.raised(error)
        return error

    def raised(self, error: BaseException) -> CaptureError:
        """The exception for one that ``forward`` is left by."""
        return self.error(f"tracing failed: {type(error).__name__}: {error}")

    # -- what is read out of tensors -----------------------------------------------------------------------------------

    def read(self, func: Any, name: str, *operands: Tensor) -> Any:
        """What ``forward`` reads out of traced tensors: a tensor, a number or a flag.

        Raises:
            CaptureError: Nobody can tell: it follows from weights, or there is no data.
        """
        values = [self.value(operand) for operand in operands]
        sources = self._sources_of(values)
        if name == "item" and sources is not None and not sources:
            number = self._sized(values[0], operands[0])
            if number is not None:
                return number
        if self._reader is None or sources is None or (name == "item" and operands[0].is_complex()):
            data_dependent(self, func, operands, {})
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
                self.append("read", (name, *values), (), (answer,))
            else:
                self.append("read", (name, *values), (), ())
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
        number = answer_in(self.trace, self.makers, "item", [value], {}, torch.device("cpu"))
        if isinstance(number, Tensor) or number < 0:
            return None
        self.trace.is_sized = True
        self.append("sized", (), (), (torch.empty(int(number), device=META_DEVICE),))
        return self.trace.ledger.shape(self._count - 1, (int(number),))[0]

    def can_read(self, x: Tensor) -> bool:
        """Whether what ``forward`` reads out of a tensor is known."""
        return self._reader is not None and self._sources_of([self.value(x)]) is not None

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
            op = nodes[index][0]
            # What is drawn would be drawn twice.
            if op == "weight" or draws(op) or len(found) >= _MAX_PRELUDE:
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
        try:
            if self.cast_to is not None:
                return casts.recorded(self, func, args, kwargs or {}, self.cast_to)
            if self.is_autocast and not self.is_called:
                casts.check_uncast(self, func, args, kwargs or {})
            return self.handle(func, args, kwargs or {})
        except Exception as error:
            self.noted(error, args, kwargs)
            raise

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records an op as its kind asks for."""
        check_types(func, args, kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            handler = HANDLERS[func] = classify(func)
        return handler(self, func, args, kwargs)

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
        self.pending = func, tokens, numbers
        result = answered(func, meta_args, meta_kwargs)
        self.pending = None
        if isinstance(result, Tensor):
            if not result.is_meta:
                result = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META_DEVICE)
            self.append(func, tuple(tokens), numbers, (result,))
        elif isinstance(result, (tuple, list)) and all(isinstance(r, Tensor) for r in result):
            self.append(func, tuple(tokens), numbers, result)
        else:
            raise self.error(f"{func} gives {type(result).__name__}, no tensor", func)
        return result

    def _argument(self, a: Any, tokens: list[Any], numbers: list[int | float]) -> Any:
        if isinstance(a, Tensor):
            tokens.append(self.value(a))
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
        """Lets go of all tensors; gives references to those made while tracing. Of what outlives that, :meth:`path_of` says
        more until this is closed."""
        inputs = self.kept[: len(self.inputs)]
        own = {id(t) for t in (*self.weights.twins.values(), *inputs)}
        made = [weakref.ref(t) for t in self.kept if id(t) not in own]
        inputs.clear()
        self.kept.clear()
        self.constants.clear()
        self._answers.clear()
        self.aliases = Aliases(self)
        return made

    def path_of(self, tensor: Tensor) -> str:
        """The path of the module that ran when a tensor was made; that of the root if it is not known."""
        value = self.values.get(id(tensor))
        return "" if value is None else self.trace.paths[self.makers[value]]

    def check_others(self) -> None:
        """Raises an error if ``forward`` did not make what it uses in place of a weight: it may be a former one."""
        refs = [(weakref.ref(tensor), owner) for tensor, _, owner in self._others.values()]
        self._others.clear()
        for ref, owner in refs:
            if ref() is not None:
                raise self.error(f"forward uses a part of {owner} that was taken outside of it")

    def trail(self) -> Trail:
        """How far it came."""
        op = self.pending
        return Trail(self.trace, None if op is None else (op[0], tuple(op[1]), tuple(op[2])))

    def close(self) -> None:
        """Lets go of the module: whatever holds the recorder no longer holds that."""
        self.trace.ledger.is_open = False
        self.look_outside = self.failure = None
        self.checks.clear()
        self.values.clear()
        del self.aliases, self.weights, self.adapters

    def finish(self, result: Any) -> Trace:
        """Records what ``forward`` returned and gives the trace."""
        self.trace.ledger.is_open = False
        if self.kept_in:
            raise self._left()
        while self.checks:
            # They hold what `forward` made, which is not to outlive this.
            self.checks.pop()()
        places: tuple[Place, ...] = ()
        result = self._with_written(result)
        if isinstance(result, Written):
            places = result.places
            result = (result.result, result.values)
        for generator, count in self.drawn.counts.items():
            self.append(DRAW, (generator, INT), (count,), (torch.empty((), device=META_DEVICE),))
        leaves, spec = tree_flatten(result)
        if not _is_same(result, tree_unflatten(leaves, spec)):
            raise self.error("forward returns an object that torch's pytree does not make again as it was")
        leaves, spec = tree_flatten(taken_apart(result, self.held))
        tokens: list[Any] = []
        numbers: list[int | float] = []
        self.path = ""
        self._check_apart(leaves, sum(path[0] == ATTRIBUTES for path, _, _ in places))
        self.trace.ledger.use(leaves)
        for i, tensor in enumerate(self.inputs):
            is_returned = any(leaf is tensor for leaf in leaves) or self.aliases.is_written(tensor)
            if (is_returned and id(tensor) in self._uncopied) or id(tensor) in self.aliases.through_copies:
                # Where it has gaps, another tensor is.
                self.trace.asked[i] = self.trace.asked.get(i, 0) | STRIDES
        storages = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        places_of: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (first := places_of.setdefault(id(leaf), i)) != i:
                    tokens.append(Again(first))
                    continue
                tokens.append(self.value(leaf))
                self.trace.output_orders.append(memory_order(leaf))
                self.trace.is_copied.append(leaf.untyped_storage()._cdata not in storages)
            elif leaf is None or isinstance(leaf, (bool, int, float)):
                self._argument(leaf, tokens, numbers)
            elif isinstance(leaf, (str, torch.dtype)):
                tokens.append(leaf)
            else:
                raise self.error(f"forward returns {type(leaf).__name__}")
        if self._lies_unknown():
            self.trace.output_orders = [tuple(range(len(order))) for order in self.trace.output_orders]
        # What is put together otherwise is another program, of whichever tensors.
        tokens += (SPEC, _ADDRESS.sub("", repr(spec)))
        if places:
            tokens += (WRITES, repr(places))
        self.append("output", tuple(tokens), numbers, ())
        self.trace.output_spec = spec
        return self.trace

    def _lies_unknown(self) -> bool:
        """Whether an op's result lies in memory as its number of elements, or the path that PyTorch takes, decides:
        row-major is what any ``view`` of results works with."""
        is_unsure = any(node[0] in _LYING_ANYWHERE for node in self.trace.nodes)
        return is_unsure or any(isinstance(m, torch.nn.MultiheadAttention) for _, m in self.weights.modules)

    def _with_written(self, result: Any) -> Any:
        """What ``forward`` returned, and what it left in tensors that it was given."""
        written = [i for i, tensor in enumerate(self.inputs) if self.aliases.is_written(tensor)]
        if not written:
            return result
        known = result if isinstance(result, Written) else Written(result, (), ())
        values = []
        for i in written:
            value = self.value(self.inputs[i])
            self.trace.written[value] = i
            # The tensor itself may be a result, too.
            left = torch.empty_like(self.inputs[i])
            self.values[id(left)] = value
            self.kept.append(left)
            values.append(left)
        places = [((TENSORS,), i, True) for i in written]
        return Written(known.result, (*places, *known.places), (*values, *known.values))

    def _check_apart(self, leaves: Sequence[Any], count: int) -> None:
        """Raises an error if what ``forward`` leaves in attributes, the last ``count`` leaves of its result, is no tensor of
        its own: whoever has the result, an argument or a weight may write into it."""
        others = (*self.inputs, *self.weights.twins.values(), *leaves[: len(leaves) - count])
        taken = {tensor.untyped_storage()._cdata for tensor in others if isinstance(tensor, Tensor)} if count else set()
        for leaf in leaves[len(leaves) - count :]:
            if type(leaf) is not Tensor or not leaf.is_meta or leaf.untyped_storage()._cdata in taken:
                raise self.error("forward sets an attribute to what others have, too")
            taken.add(leaf.untyped_storage()._cdata)


def _storage(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; those of torch.func have none."""
    is_own = torch._C._functorch.peek_interpreter_stack() is None
    return tensor.untyped_storage()._cdata if is_own else None


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


def _is_watched(module: torch.nn.Module, outer: Outer) -> bool:
    """Whether a module outside of the one that is traced would be noticed to be another: slots are not looked at."""
    return id(module) in outer.watched and not any("__slots__" in cls.__dict__ for cls in type(module).__mro__[:-1])


_OF_META = re.compile(r"\bmeta\b", re.IGNORECASE)
"""What is in the messages of errors that tensors without data give."""
_SOURCES = frozenset(("input", "weight", "constant", "extern", "read"))
_NEGATIONS = frozenset((aten.bitwise_not.default, aten.logical_not.default))
_LYING_ANYWHERE = frozenset((aten.einsum.default, aten.im2col.default, aten.conv3d.default, aten.conv3d.padding))
_MAX_PRELUDE = 256
"""Ops that may lead to what is read."""
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_KEYWORDS: dict[str, Keyword] = {}
