"""What ``forward`` reads out of tensors on its way: which words of a prompt count, how many there are, whether any does.

Such a value decides what is computed, and no trace on tensors without data has it. Where it follows from the arguments
alone, as that of a mask does, it is an *answer*: a further argument of the graph, a tensor with a size of its own, a
number, or a flag that belongs to what selects the graph. The ops that lead to it, the *prelude*, run in eager PyTorch
before the graph does. What follows from weights is no answer: half the model would run to find it.

A capture first traces the call with its data at hand (:class:`Asking`) and finds what is read; all further traces are
given answers of other sizes (:class:`Given`). A call of a graph is first completed by :func:`answered`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..autocast import without_autocast
from ..errors import CaptureError, is_interrupt
from .dim import Dim
from .failures import NotFiniteError
from .graph import CapturedGraph, Node, Read, arguments_of, number_at, prelude_of
from .guards import symbols_of
from .record import Trace, first_of
from .signature import Answer, Call, Number, Question, share_of, with_answers
from .stages import run_op

__all__ = ["QUESTIONS", "TENSORS", "Asking", "Given", "Prelude", "answered"]

_OPS: Mapping[str, Callable[..., Any]] = {
    "nonzero": torch.ops.aten.nonzero.default,
    "item": torch.ops.aten.item.default,
    "is_nonzero": torch.ops.aten.is_nonzero.default,
    "equal": torch.ops.aten.equal.default,
    "repeat_interleave": torch.ops.aten.repeat_interleave.Tensor,
}
"""What is read, by the names of questions."""

QUESTIONS: Mapping[str, int] = {name: 2 if name == "equal" else 1 for name in _OPS}
"""The names of questions, and how many tensors each is about."""

TENSORS = frozenset(("nonzero", "repeat_interleave"))
"""The questions of which the answer is a tensor."""


def _ask(name: str, operands: Iterable[Tensor]) -> Answer:
    answer: Answer = _OPS[name](*operands)
    return answer


class Asking:
    """Answers out of the data of a call, for a trace at its own sizes.

    Args:
        tensors: The call's tensors.
        device: Where it runs.
        asks_sizes: Whether what follows from sizes alone is an answer, too.

    Attributes:
        questions: What the last trace asked.
        answers: The answers to that.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, asks_sizes: bool = False) -> None:
        self.asks_sizes = asks_sizes
        self._tensors = tensors
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Starts over, for another run of ``forward``."""
        self.questions: list[Question] = []
        self.answers: list[Answer] = []
        # Arguments are the first values of a trace.
        self._values = dict(enumerate(self._tensors))

    def answer(self, record: Trace, makers: Sequence[int], question: Question, operands: Sequence[int]) -> Answer:
        """The answer to the next question.

        Args:
            record: The trace so far.
            makers: For each value, the number of its node.
            question: The question.
            operands: The values it is about.
        """
        answer = answer_in(record, makers, question.name, operands, self._values, self._device)
        if isinstance(answer, Tensor):
            self._values[len(makers)] = answer
        elif not math.isfinite(answer):
            raise NotFiniteError(f"forward reads {answer} out of a tensor")
        self.questions.append(question)
        self.answers.append(answer)
        return answer


@without_autocast
def answer_in(
    record: Trace,
    makers: Sequence[int],
    name: str,
    operands: Sequence[int],
    values: dict[int, Tensor],
    device: torch.device,
) -> Answer:
    """The answer to a question in a trace, by running the ops that lead there.

    Args:
        record: The trace.
        makers: For each value, the number of its node.
        name: The question.
        operands: The values it is about.
        values: The tensors that are known, by value; gets more.
        device: Where to run.
    """

    def node_of(value: int) -> Node | None:
        if value in values:
            return None
        index = makers[value]
        op, _, results = record.nodes[index]
        args, kwargs = arguments_of(record, index, iter(record.numbers[record.starts[index] :]))
        first = first_of(value, makers)
        outputs = tuple(range(first, first + len(results)))
        if op == "constant":
            dtype, rank = results[0]
            end = record.end_of(index)
            args = (dtype, tuple(record.numbers[end - rank : end]), *args)
        return Node(op, args, kwargs, outputs, record.paths[index])

    with _disable_current_modes(), torch.no_grad():
        for node in prelude_of(operands, node_of):
            _run(node, values, record.externs, device)
        return _ask(name, [values[value] for value in operands])


class Given:
    """Answers that are given, for a trace at any sizes.

    Args:
        call: The call with its answers.
        answers: The answers to give: tensors without data, and numbers.
        asks_sizes: See :class:`Asking`.
    """

    def __init__(self, call: Call, answers: Sequence[Answer], asks_sizes: bool = False) -> None:
        self.asks_sizes = asks_sizes
        self._expected = list(zip(call.questions, call.answers, strict=True))
        self._answers = answers
        self.begin()

    def begin(self) -> None:
        """Starts over, for another run of ``forward``."""
        self._next = 0
        self._rows: list[int] = []

    def answer(self, record: Trace, makers: Sequence[int], question: Question, operands: Sequence[int]) -> Answer:
        """The answer to the next question; see :meth:`Asking.answer`."""
        at = self._next
        self._next += 1
        expected, example = self._expected[at] if at < len(self._expected) else (None, None)
        if expected is None or (expected.name, expected.opposite) != (question.name, question.opposite):
            raise CaptureError("forward reads other values out of tensors than in the call")
        answer = self._answers[at]
        self._rows.append(answer.shape[0] if isinstance(answer, Tensor) else 0)
        if isinstance(answer, Tensor) and isinstance(example, Tensor) and question.name == "nonzero":
            places, rows = math.prod(question.shape), self._rows[at]
            is_all = share_of(example, expected) == "all"
            if question.opposite is not None and rows + self._rows[question.opposite] != places:
                raise CaptureError("two parts of a tensor that do not make the whole")
            if rows > places or (is_all and rows != places):
                raise CaptureError("more places in a tensor than it has")
        return answer


def _run(node: Node, values: dict[int, Tensor], externs: Sequence[Tensor], device: torch.device) -> None:
    """Runs an op of a prelude, its numbers those of the call."""
    if node.op == "extern":
        values[node.outputs[0]] = externs[node.args[0]]
    elif node.op == "constant":
        dtype, shape, *elements = node.args
        values[node.outputs[0]] = torch.tensor(elements, dtype=dtype, device=device).reshape(list(shape))
    else:
        run_op(node, values, {}, device)


class Prelude:
    """The way to one answer, at the sizes of one call.

    Args:
        graph: The graph that takes the answer.
        read: How it is found.
        point: The free sizes of the call, as far as they are known.
        device: Where it runs.
    """

    def __init__(self, graph: CapturedGraph, read: Read, point: Mapping[str, Number], device: torch.device) -> None:
        self._nodes = [_at(node, point) for node in read.prelude]
        self._externs = graph.externs
        self._device = device
        self._question = read.question
        self._operands = read.operands
        self._value = read.value

    @without_autocast
    def run(self, values: dict[int, Tensor]) -> Answer:
        """The answer.

        Args:
            values: The tensors so far by value number; gets more.
        """
        for node in self._nodes:
            _run(node, values, self._externs, self._device)
        answer = _ask(self._question.name, [values[value] for value in self._operands])
        if self._value is not None:
            assert isinstance(answer, Tensor), "the answer to this question was a tensor"
            values[self._value] = answer
        return answer

    def question(self, values: Mapping[int, Tensor]) -> Question:
        """What was asked, and of how large a tensor."""
        return dataclasses.replace(self._question, shape=tuple(values[self._operands[0]].shape))


def _at(node: Node, point: Mapping[str, Number]) -> Node:
    """A node with the numbers that it has at a point."""

    def concrete(argument: Any) -> Any:
        if isinstance(argument, Dim):
            return number_at(argument, point)
        return tuple(map(concrete, argument)) if isinstance(argument, tuple) else argument

    kwargs = {name: concrete(value) for name, value in node.kwargs.items()}
    return Node(node.op, tuple(map(concrete, node.args)), kwargs, node.outputs, node.path)


def answered(graph: CapturedGraph, call: Call, device: torch.device) -> tuple[Call, list[Prelude]] | None:
    """A call with the answers that a graph takes, and how they were found; ``None`` if the graph is not for such calls.

    Args:
        graph: The graph.
        call: The call as it was made.
        device: Where it runs.
    """
    if graph.call_key != call.key:
        return None
    if not graph.reads:
        return call, []
    values = {item.value: tensor for item, tensor in zip(graph.inputs, call.tensors, strict=False)}
    answers: list[Answer] = []
    questions: list[Question] = []
    preludes: list[Prelude] = []
    for read in graph.reads:
        point = _point_of(graph, call, answers)
        if point is None:
            return None
        try:
            preludes.append(Prelude(graph, read, point, device))
            with torch.no_grad():
                answer = preludes[-1].run(values)
            if not isinstance(answer, Tensor) and not math.isfinite(answer):
                return None
            answers.append(answer)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_interrupt(error):
                raise
            # Of another program: eager does something else at these sizes.
            return None
        questions.append(preludes[-1].question(values))
    complete = with_answers(call, questions, answers)
    return (complete, preludes) if complete.key == graph.key else None


def _point_of(graph: CapturedGraph, call: Call, answers: Sequence[Answer]) -> dict[str, Number] | None:
    """The free sizes of a call, as far as it and these answers say; ``None`` if they are not as the graph has them."""
    read = [size for answer in answers if isinstance(answer, Tensor) for size in answer.shape]
    ranks = [len(graph.values[one.value].shape) for one in graph.reads if one.value is not None]
    count = len(call.sizes) - len(call.numbers)
    first_number = count + sum(ranks)
    found: list[Number] = [answer for answer in answers if not isinstance(answer, bool | Tensor)]
    passed, kept = call.numbers[: len(call.numbers) - call.kept], call.numbers[len(call.numbers) - call.kept :]
    known: dict[int, Number] = dict(enumerate([*call.sizes[:count], *read]))
    known |= dict(enumerate([*passed, *found], first_number))
    known |= dict(enumerate(kept, len(graph.plan.forms) - len(kept)))
    forms = [(graph.plan.forms[place], number) for place, number in known.items()]
    point = {s.name: known[s.position] for s in graph.plan.symbols if s.position in known}
    for form, number in forms:
        # A size of the call that follows from an answer says what that will be.
        if isinstance(form, Dim) and (name := form.as_symbol()) is not None:
            point.setdefault(name, number)
    for form, number in forms:
        if not isinstance(form, Dim):
            if form != number:
                return None
        elif form.symbols() <= point.keys() and number_at(form, point) != number:
            return None
    for name, follower in graph.plan.followers().items():
        try:
            point[name] = follower.at(point)
        except KeyError:
            continue
    point.update({c.name: c.at(point) for c in graph.plan.computed if symbols_of(c.expression) <= point.keys()})
    return point
