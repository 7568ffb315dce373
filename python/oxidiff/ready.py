"""What a call runs: a program, or several with Python between, bound to what it is passed."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from .call import Leaf
from .capture import Call
from .capture.reads import Prelude
from .capture.record import GRADIENTS, MEMORY, STRIDES
from .capture.signature import TENSORS, Answer, Number, Place, memory_orders
from .errors import CaptureError, UnsupportedError
from .outputs import builder
from .staged import Staged, passed_as
from .variant import Part, Variant

__all__ = ["Binding", "OwnNumber", "Reads", "Ready"]


class Ready:
    """A call of one key, ready to run.

    Attributes:
        run: Takes the call's leaves and gives what the module would return.
        profile: Takes the call's leaves and gives a timed run's steps.
        parts: Takes the call's leaves and gives what runs it, each with the sizes at which it does. The programs with their
            weights are those of the call, whatever other threads let go of meanwhile.
        free_numbers: Indices of leaves that are numbers and arguments of the program, not part of it.
        problems: Why some of its ops run in eager PyTorch, once per kind of op.
        writes: Where it writes into tensors, lists and dictionaries that it is given, and which attributes it sets;
            :attr:`run` then gives a pair of what the module would return and what to write there.
        tensors: Takes the call's leaves and gives the tensors among its arguments, where it writes into some.
        bind: Takes the call's arguments and gives them by parameter name, beside what has these attributes.
        reads: What ``forward`` reads out of tensors; the answers are further leaves, behind those of the call.
        gives_parts: Whether what it gives is a view of an argument in eager, and a copy here.
        asked: Leaves of which ``forward`` asks what programs are not told, with what that is: see :attr:`Trace.asked`.
    """

    __slots__ = (
        "asked",
        "bind",
        "free_numbers",
        "gives_parts",
        "parts",
        "problems",
        "profile",
        "reads",
        "run",
        "tensors",
        "writes",
    )

    def __init__(
        self,
        run: Callable[[list[Leaf]], Any],
        profile: Callable[[list[Leaf]], list[dict[str, Any]]],
        parts: Callable[[list[Leaf]], list[Part]],
        free_numbers: frozenset[int] = frozenset(),
        problems: Sequence[UnsupportedError] = (),
    ) -> None:
        self.problems = problems
        self.run = run
        self.profile = profile
        self.parts = parts
        self.free_numbers = free_numbers
        self.writes: tuple[Place, ...] = ()
        self.tensors: Callable[[list[Leaf]], tuple[Tensor, ...]] = _no_tensors
        self.bind: Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]] = _no_binder
        self.reads: Reads | None = None
        self.gives_parts = False
        self.asked: Sequence[tuple[int, int]] = ()

    def otherwise(self, leaves: Sequence[Leaf]) -> str | None:
        """Why these tensors make another program, where ``forward`` asks what they are like."""
        tensors = ((tensor, asked) for i, asked in self.asked if isinstance(tensor := leaves[i], Tensor))
        return next((reason for tensor, asked in tensors if (reason := _otherwise(tensor, asked)) is not None), None)

    def complete(self, leaves: list[Leaf]) -> list[Leaf]:
        """The leaves of a call and the answers to what ``forward`` reads."""
        return leaves if self.reads is None else [*leaves, *self.reads.answers_in(leaves)]


def _otherwise(tensor: Tensor, asked: int) -> str | None:
    """Why a tensor is not what a program was told that it is."""
    if asked & GRADIENTS and (tensor.requires_grad or not tensor.is_leaf):
        return "forward asks whether an argument requires gradients, and this one does; pass it detached"
    is_part = asked & MEMORY and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
    if is_part or (asked & STRIDES and not _is_dense(tensor)):
        return "forward asks how an argument lies in memory, and this one has gaps or is part of another; pass a copy of it"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps, in whatever order its dimensions are."""
    if tensor.is_contiguous():
        return True
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense = itertools.accumulate((size for _, size in steps), operator.mul, initial=1)
    return all(step == wanted for (step, _), wanted in zip(steps, dense, strict=False))


class Reads:
    """What a program reads out of the tensors of a call before it runs.

    Attributes:
        preludes: The ways to the answers, one after another.
        answers: Those of the call that this was made for.
        free: The numbers of those that are numbers and arguments of the program, not part of it.
    """

    def __init__(
        self,
        preludes: Sequence[Prelude],
        answers: Sequence[Answer],
        places: Mapping[int, int],
        defaults: Sequence[Leaf],
        first: int,
        free: Set[int],
    ) -> None:
        self.preludes = preludes
        self.answers = answers
        self.free = {place - first for place in free if place >= first}
        # Tensors that the signature has as defaults are found behind the leaves and the answers.
        behind = first + len(answers)
        self._places = [(value, at) for value, at in places.items() if at < first]
        self._defaults = {value: cast(Tensor, defaults[at - behind]) for value, at in places.items() if at >= behind}

    def begin(self, leaves: Sequence[Leaf]) -> dict[int, Tensor]:
        """The tensors of a call by value number, for :meth:`Prelude.run`."""
        return {**self._defaults, **{value: cast(Tensor, leaves[at]) for value, at in self._places}}

    def answers_in(self, leaves: Sequence[Leaf]) -> list[Answer]:
        """The answers of a call for which the program is right."""
        values = self.begin(leaves)
        return [prelude.run(values) for prelude in self.preludes]


def _no_tensors(leaves: list[Leaf]) -> tuple[Tensor, ...]:
    """Those of a call that writes into no tensor."""
    return ()


def _no_binder(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """That of a call that writes into no argument."""
    return {}


_SHARES = "it writes into an argument that shares memory with another or with a weight; pass a clone()"


def check_written(tensor: Tensor, weights: Sequence[tuple[int, int]]) -> None:
    """Raises an error where a tensor is not for a program to write into.

    Args:
        tensor: The tensor.
        weights: Where the memory of weights begins and ends, in order.

    Raises:
        CaptureError: It has elements that are one in memory or a weight's, or was made in inference mode.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CaptureError("it writes into an argument that was made in inference mode")
    if not tensor.numel():
        return
    extent = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < extent:
                raise CaptureError("it writes into an argument with elements that are one in memory; pass a clone()")
            extent += step * (size - 1)
    start, end = _span(tensor)
    at = bisect.bisect_left(weights, (end,))
    if at and weights[at - 1][1] > start:
        raise CaptureError(_SHARES)


def check_apart(tensors: Sequence[Tensor], spans: Sequence[tuple[int, int, int]], written: Set[int]) -> None:
    """Raises an error where one of the tensors that are written, by their ids, reaches into another. Where one is passed
    twice, the program knows.

    Args:
        tensors: All tensors that are passed.
        spans: Where the memory of each begins and ends, with its number, in order.
        written: The ids.

    Raises:
        CaptureError: One does.
    """
    reach, of, reach_written = 0, 0, 0
    for start, end, i in spans:
        own = id(tensors[i])
        if own == of:
            continue
        if start < reach_written or (own in written and start < reach):
            raise CaptureError(_SHARES)
        if own in written:
            reach_written = max(reach_written, end)
        reach, of = max(reach, end), own


def _span(tensor: Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    start, length = tensor.data_ptr(), sum((size - 1) * step for size, step in steps) + 1
    return start, start + length * tensor.itemsize


class OwnNumber:
    """Makes numbers with an identity of their own."""

    class Int(int):
        """An int that is no shared object."""

    class Float(float):
        """A float that is no shared object."""

    @classmethod
    def of(cls, number: Number) -> Number:
        """A number like this one that no other is."""
        return cls.Int(number) if isinstance(number, int) else cls.Float(number)


class Binding:
    """How the leaves of calls of one key become arguments and sizes of a program, and its results the call's result.

    Args:
        variant: The variant that serves the key.
        point: Its free sizes and numbers at the call it is made for.
        call: That call.
        tensors: For each tensor of the call as it was made, the index of its leaf, or the tensor where it is a default.
        numbers: For each number of that, the index of its leaf, ``None`` where it is a default.
        count: The number of leaves; behind them come the answers to what ``forward`` reads out of tensors.
        device: Where the program runs.
    """

    def __init__(
        self,
        variant: Variant | Staged,
        point: Mapping[str, Number],
        call: Call,
        tensors: Sequence[int | Tensor],
        numbers: Sequence[int | None],
        count: int,
        device: torch.device,
    ) -> None:
        self.variant = variant
        self.device = device
        self.point = point
        self.defaults: list[Leaf] = []
        answers = list(enumerate(call.answers, count))
        passed = len(numbers) - call.kept
        tensors = [*tensors, *(at for at, answer in answers if isinstance(answer, Tensor))]
        read = [at for at, answer in answers if not isinstance(answer, bool | Tensor)]
        numbers = [*numbers[:passed], *read, *numbers[passed:]]
        count += len(answers)
        self.tensors = [t if isinstance(t, int) else self._default(t, count) for t in tensors]
        self.numbers = [self._default(n, count) if i is None else i for i, n in zip(numbers, call.numbers, strict=True)]
        self.numbers += [self._default(c.at(point), count) for c in variant.graph.plan.computed]
        self._bound: tuple[list[list[Tensor]], Sequence[tuple[int, int]]] = [], ()
        self.foreign = {at for at, t in zip(self.tensors, call.tensors, strict=True) if t.device != device}
        """Places of tensors that are on the CPU and are to be on the device."""
        self.complex = {at for at, t in zip(self.tensors, call.tensors, strict=True) if t.is_complex()}
        self.orders = memory_orders(call.key)
        """How the tensors of the call lie in memory."""
        first = len(call.sizes) - len(call.numbers)
        # What changes from call to call.
        loose = variant.graph.loose_numbers()
        self.live = {
            symbol.name: place
            for symbol in variant.graph.plan.symbols
            if symbol.name in loose and (place := numbers[symbol.position - first]) is not None
        }

    def _default(self, value: Leaf, count: int) -> int:
        """A place behind the leaves, where a value that is none of them is found."""
        self.defaults.append(value)
        return count + len(self.defaults) - 1

    def _moved(self, at: int, leaf: Any) -> Any:
        return leaf.to(self.device) if at in self.foreign else leaf

    def ready(self) -> Ready:
        """The function that runs a call."""
        made = self._staged(self.variant) if isinstance(self.variant, Staged) else self._whole(self.variant)
        made.writes = self.variant.graph.outputs.writes
        written = [key for path, key, _ in made.writes if path[0] == TENSORS]
        if written:
            made.tensors = functools.partial(self._written_into, written)
        made.gives_parts = any(leaf.is_part for leaf in self.variant.graph.outputs.leaves)
        return made

    def _written_into(self, written: Sequence[int], leaves: list[Leaf]) -> tuple[Tensor, ...]:
        """The tensors of a call of which it writes into some, by their numbers.

        Raises:
            CaptureError: What is written would be seen elsewhere, or eager refuses it.
        """
        leaves = leaves + self.defaults
        tensors = tuple([cast(Tensor, leaves[at]) for at in self.tensors])
        weights = self._memory_of_weights()
        spans = sorted((*_span(tensor), i) for i, tensor in enumerate(tensors) if tensor.numel())
        for i in written:
            check_written(tensors[i], weights)
        check_apart(tensors, spans, {id(tensors[i]) for i in written})
        return tensors

    def _memory_of_weights(self) -> Sequence[tuple[int, int]]:
        """Where the memory of what the programs read beside what they are given begins and ends, in order."""
        parts = self.variant.variants if isinstance(self.variant, Staged) else [self.variant]
        bound = [part.tensors for part in parts]
        if len(bound) != len(self._bound[0]) or any(map(operator.is_not, bound, self._bound[0])):
            storages = (t.untyped_storage() for t in [*itertools.chain(*bound), *self.variant.graph.externs])
            self._bound = bound, sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        return self._bound[1]

    def _staged(self, staged: Staged) -> Ready:
        live, defaults = self.live, self.defaults
        build = builder(staged.graph.outputs, self.point, live, self.tensors)
        bound = staged.bound()

        def execute(leaves: list[Leaf], steps: list[dict[str, Any]] | None = None) -> Any:
            leaves = leaves + defaults
            point = {**self.point, **{name: cast(Number, leaves[at]) for name, at in live.items()}}
            numbers = {i: cast(Number, leaves[at]) for i, at in enumerate(self.numbers)}
            given = [self._moved(at, cast(Tensor, leaves[at])) for at in self.tensors]
            tensors = staged.run(bound, given, numbers, point, steps)
            return build(tensors, leaves)

        def profile(leaves: list[Leaf]) -> list[dict[str, Any]]:
            steps: list[dict[str, Any]] = []
            execute(leaves, steps)
            return steps

        def parts(leaves: list[Leaf]) -> list[Part]:
            leaves = leaves + defaults
            point = {**self.point, **{name: cast(Number, leaves[at]) for name, at in live.items()}}
            held = [executable for executable in bound.executables if executable is not None]
            pairs = zip(staged.variants, held, strict=True)
            return [(variant, executable, variant.lowered.sizes(point)) for variant, executable in pairs]

        return Ready(execute, profile, parts, frozenset(live.values()), staged.problems)

    def _whole(self, variant: Variant) -> Ready:
        live, lowered, defaults = self.live, variant.lowered, self.defaults
        places = tuple((self.numbers if s.is_number else self.tensors)[s.index] for s in lowered.arguments)
        fixed = [0 if name in live else int(self.point[name]) for name in lowered.symbols]
        moving = [(i, live[name]) for i, name in enumerate(lowered.symbols) if name in live]
        build = builder(variant.graph.outputs, self.point, live, self.tensors)
        executable = variant.executable
        execute = executable.run
        orders = [s.order for s in lowered.arguments]
        copied = [i for i, s in enumerate(lowered.arguments) if not s.is_number and s.order != self.orders[s.index]]
        is_plain = not any(orders) and not copied
        is_plain = is_plain and self.foreign.isdisjoint(places) and self.complex.isdisjoint(places)

        def arguments_of(leaves: list[Leaf]) -> list[Any]:
            if is_plain:
                return [leaves[i] for i in places]
            given = [passed_as(self._moved(i, leaves[i]), order) for i, order in zip(places, orders, strict=True)]
            for i in copied:
                given[i] = given[i].contiguous()
            return given

        def sizes_of(leaves: Sequence[Leaf]) -> list[int]:
            sizes = fixed.copy()
            for i, place in moving:
                sizes[i] = int(leaves[place])
            return sizes

        def run(leaves: list[Leaf]) -> Any:
            if defaults:
                leaves = leaves + defaults
            return build(execute(arguments_of(leaves), sizes_of(leaves) if moving else fixed), leaves)

        def profile(leaves: list[Leaf]) -> list[dict[str, Any]]:
            leaves = leaves + defaults
            return executable.profile(arguments_of(leaves), sizes_of(leaves))

        def parts(leaves: list[Leaf]) -> list[Part]:
            return [(variant, executable, sizes_of(leaves + defaults))]

        return Ready(run, profile, parts, frozenset(live.values()))
