"""What a captured graph reads out of tensors before it runs, as plain data and back.

The ops that lead there are stored by name and looked up among those that this process has
(:func:`~oxidiff.store.encode.find_op`, and the ops that programs are made of); what each reads is checked to be there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch._ops import OpOverload

from ..capture import Call, CapturedGraph, Dim
from ..capture.graph import Node, Read
from ..capture.reads import QUESTIONS, TENSORS
from ..capture.signature import Question
from .encode import (
    UnstorableError,
    as_integer,
    as_text,
    check,
    decode_argument,
    decode_literal,
    decoding,
    encode_argument,
    encode_literal,
    op_of_trace,
)

__all__ = ["decode_reads", "encode_reads", "restore_key", "takes"]

_MAX_READS = 10_000
_MAX_ELEMENTS = 64

Data = Any


def encode_reads(graph: CapturedGraph) -> Data:
    """How a graph's answers are found. Values are numbered anew: the graph's inputs first, answers among them.

    Raises:
        UnstorableError: An op has something that cannot be written down.
    """
    number = {item.value: i for i, item in enumerate(graph.inputs)}

    def node(item: Node) -> Data:
        if item.op == "constant":
            kind: Data = "constant"
        elif isinstance(item.op, OpOverload):
            kind = str(item.op)
        else:
            raise UnstorableError(f"{item.op} before what forward reads")
        # In the order of the arguments, so that what is read has a number by then.
        args = [encode_argument(value, number) for value in item.args]
        kwargs = {name: encode_argument(value, number) for name, value in item.kwargs.items()}
        outputs = [number.setdefault(value, len(number)) for value in item.outputs]
        return [kind, args, kwargs, outputs, item.path]

    reads = []
    for read in graph.reads:
        prelude = [node(item) for item in read.prelude]
        question = read.question
        asked = [question.name, question.shape, question.opposite]
        value = None if read.value is None else number[read.value]
        reads.append([asked, prelude, [number[v] for v in read.operands], value])
    return {
        "reads": reads,
        "asks_sizes": graph.asks_sizes,
        "tail": [_encode_part(part) for part in graph.key[len(graph.plain_key) :]],
    }


def _encode_part(part: Any) -> Data:
    return [encode_literal(item) for item in part] if isinstance(part, tuple) else part


def _decode_part(data: Data) -> Any:
    if not isinstance(data, list):
        return as_text(data)
    items = [tuple(map(as_integer, item)) if isinstance(item, list) else decode_literal(item) for item in data]
    check(len(items) == 2 and isinstance(items[0], str | torch.dtype), "an answer of an unknown kind")
    return tuple(items)


def decode_reads(graph: CapturedGraph, data: Data) -> None:
    """Puts what :func:`encode_reads` gave into a graph; its key is only what comes behind that of a call.

    Raises:
        ArtifactError: It does not fit the graph or makes no sense.
    """
    with decoding("what a stored graph reads"):
        names = set(graph.plan.names())
        check(0 < len(data["reads"]) <= _MAX_READS, "too much that is read")
        count = len(graph.inputs)
        answers = {as_integer(value) for *_, value in data["reads"] if value is not None}
        check(answers == set(range(count - len(answers), count)), "answers that are not the last arguments")
        number = {i: item.value for i, item in enumerate(graph.inputs)}
        there = set(range(count - len(answers)))
        reads: list[Read] = []
        for (name, shape, opposite), prelude, operands, value in data["reads"]:
            check(name in QUESTIONS, f"a question {name!r}")
            check(opposite is None or 0 <= as_integer(opposite) < len(reads), "the opposite of nothing")
            nodes = [_decode_node(item, number, there, names) for item in prelude]
            check(len(operands) == QUESTIONS[name] and set(operands) <= there, "a question about nothing")
            check((value is not None) == (name in TENSORS), "an answer of another kind")
            question = Question(name, tuple(map(as_integer, shape)), opposite)
            asked = tuple(number[as_integer(v)] for v in operands)
            reads.append(Read(question, asked, tuple(nodes), None if value is None else number[value]))
            if value is not None:
                there.add(value)
        check(type(data["asks_sizes"]) is bool, "whether sizes are asked for")
        graph.reads, graph.asks_sizes = tuple(reads), data["asks_sizes"]
        graph.key = tuple(_decode_part(part) for part in data["tail"])


def _decode_node(data: Data, number: dict[int, int], there: set[int], names: Set[str]) -> Node:
    kind, args, kwargs, outputs, path = data
    op = "constant" if kind == "constant" else op_of_trace(as_text(kind))
    known: Mapping[int, int] = {i: number[i] for i in there}
    decoded = tuple(decode_argument(item, names, known) for item in args)
    named = {as_text(name): decode_argument(item, names, known) for name, item in kwargs.items()}
    if op == "constant":
        check(len(decoded) > 1 and not named and isinstance(decoded[0], torch.dtype), "a constant")
        check(isinstance(decoded[1], tuple) and all(type(size) is int for size in decoded[1]), "a constant's shape")
        elements = decoded[2:]
        check(len(elements) == math.prod(decoded[1]) <= _MAX_ELEMENTS and len(outputs) == 1, "a constant's elements")
        check(all(isinstance(e, int | float | Dim) for e in elements), "an element that is no number")
    for output in outputs:
        check(as_integer(output) not in number, "a value that is made twice")
        # One that no value of the graph has.
        number[output] = -1 - output
        there.add(output)
    return Node(op, decoded, named, tuple(number[output] for output in outputs), as_text(path))


def takes(graph: CapturedGraph, call: Call) -> bool:
    """Whether a decoded graph has as many arguments as a call, and answers besides."""
    ranks = [len(graph.values[read.value].shape) for read in graph.reads if read.value is not None]
    numbers = sum(part in ("int", "float") for part in graph.key)
    tensors, sizes = len(graph.inputs) - len(ranks), len(graph.plan.forms) - sum(ranks) - numbers
    return (tensors, sizes) == (len(call.tensors), len(call.sizes))


def restore_key(graph: CapturedGraph, plain_key: tuple[Any, ...]) -> None:
    """Gives a decoded graph the key of the calls that it serves."""
    graph.key = (*plain_key, *graph.key) if graph.reads else plain_key
    graph.plain_key = plain_key if graph.reads else ()
