"""Captured graphs as plain data (what JSON can say) and back.

Encoding refuses, with :class:`UnstorableError`, what has no meaning in another process: tensors held by reference,
classes that cannot be found again by name. Decoding trusts nothing: names are looked up in tables of what this process
already has, never imported or evaluated, and every index is checked against what it points into. Whatever is wrong
raises :class:`~oxidiff.errors.ArtifactError`.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import TreeSpec

from .. import _native
from ..capture.dim import Dim, Real, dim_of
from ..capture.graph import CapturedGraph, GraphInput, OutputLeaf, OutputSpec, Ref, Value, children_of
from ..capture.guards import OPERATIONS, Expression, Guard, is_count, symbols_of
from ..capture.lowering import COMPLEX_PARTS, DTYPES, ArgumentSource, LoweredGraph
from ..capture.objects import Made, fits
from ..capture.parts import Step
from ..capture.record import CLOSE, FALSE, FLOAT, INT, NONE, OPEN, TRUE, Again, Keyword, Trace
from ..capture.signature import ATTRIBUTES, TENSORS, Place
from ..capture.sizes import Area, Computed, Counted, Rounded, SizePlan, Symbol
from ..capture.weights import Member, WeightSlot
from ..errors import ArtifactError, is_interrupt

__all__ = [
    "UnstorableError",
    "as_integer",
    "as_number",
    "as_text",
    "check",
    "decode_argument",
    "decode_calls",
    "decode_graph",
    "decode_literal",
    "decode_program",
    "decode_slot",
    "decode_value",
    "decoding",
    "encode_argument",
    "encode_call_key",
    "encode_calls",
    "encode_graph",
    "encode_literal",
    "encode_program",
    "encode_slot",
    "encode_trace",
    "encode_value",
    "find_op",
    "merge_classes",
    "op_of_trace",
    "to_bytes",
    "to_data",
]

Data = Any
"""What JSON can say."""

_ROLES = frozenset({"batch", "frames", "spatial", "sequence", "int", "float", "attribute"})
_MAX_POWER = 16
_MAX_DEPTH = 32


class UnstorableError(Exception):
    """Something that cannot be written down; the message says what."""


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns whatever malformed data makes Python raise into an :class:`ArtifactError`."""
    try:
        yield
    except ArtifactError:
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        if is_interrupt(error):
            raise
        raise ArtifactError(f"{what} is malformed: {type(error).__name__}: {error}") from error
    except _native.NativeError as error:
        raise ArtifactError(f"{what} is malformed: {error.args[1]}") from error


def check(holds: bool, what: str) -> None:
    """Raises :class:`~oxidiff.errors.ArtifactError` unless something holds."""
    if not holds:
        raise ArtifactError(what)


def to_bytes(data: Data) -> bytes:
    """``data`` as JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def to_data(text: bytes) -> Data:
    """What :func:`to_bytes` was given, tuples as lists."""
    with decoding("JSON"):
        return json.loads(text.decode("utf-8", "surrogatepass"))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- call keys ------------------------------------------------------------------------------------------------------


def encode_call_key(key: tuple[Any, ...]) -> str:
    """A call's structure as text: equal for equal keys, in every process.

    Raises:
        UnstorableError: Something in it has no name.
    """
    return to_bytes(_key_part(key)).decode("utf-8", "surrogatepass")


def _key_part(part: Any) -> Data:
    kind = type(part)
    if part is None or kind in (bool, int, float, str):
        return part
    if kind is tuple:
        return [_key_part(item) for item in part]
    if isinstance(part, enum.Enum):
        return {"enum": _name(kind), "is": part.name}
    if isinstance(part, torch.device):
        # The program is for the kind of device; its index is the caller's.
        return {"device": part.type}
    if isinstance(part, torch.dtype | torch.memory_format):
        return {"torch": str(part)}
    if isinstance(part, type):
        if "<locals>" in part.__qualname__:
            raise UnstorableError(f"{_name(part)} is a class made in a function")
        return {"type": _name(part)}
    raise UnstorableError(f"an argument of type {_name(kind)}")


# --- sizes and numbers ----------------------------------------------------------------------------------------------


def encode_number(value: Any) -> Data:
    """A number, or an expression of sizes."""
    if isinstance(value, Dim):
        terms = [[c.numerator, c.denominator, [list(f) for f in m]] for m, c in value.terms]
        return ["real" if isinstance(value, Real) else "dim", terms]
    return value


def as_number(data: Data) -> Any:
    """A number, or an expression of sizes, from plain data."""
    if type(data) in (int, float):
        return data
    kind, terms = data
    check(kind in ("dim", "real"), f"an expression of kind {kind!r}")
    out = []
    for numerator, denominator, factors in terms:
        monomial = tuple((as_text(name), as_integer(power)) for name, power in factors)
        check(all(1 <= p <= _MAX_POWER for _, p in monomial), "a power out of range")
        check(list(monomial) == sorted({n: (n, p) for n, p in monomial}.values()), "a term that is not in order")
        out.append((monomial, Fraction(as_integer(numerator), as_integer(denominator))))
    form = (Real if kind == "real" else Dim)(out)
    check(len(form.terms) == len(out), "terms of one expression that are alike")
    return form


def as_integer(data: Data) -> int:
    """An integer that fits into 62 bits, from plain data."""
    check(type(data) is int and abs(data) < 1 << 62, f"{data!r} is not an integer in range")
    return int(data)


def as_real(data: Data) -> float:
    """A finite float from plain data."""
    check(type(data) in (int, float) and math.isfinite(data), f"{data!r} is not a finite number")
    return float(data)


def as_text(data: Data) -> str:
    """A text from plain data."""
    check(type(data) is str, f"{data!r} is not a text")
    return str(data)


_DTYPE_NAMES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _dtype(data: Data) -> torch.dtype:
    found = _DTYPE_NAMES.get(as_text(data))
    if found is None:
        raise ArtifactError(f"there is no {data} in this torch")
    return found


# --- results --------------------------------------------------------------------------------------------------------


def _encode_spec(spec: TreeSpec) -> Data:
    if spec.is_leaf():
        return None
    context = spec.context
    if isinstance(context, type):
        context = {"type": _name(context)}
    elif isinstance(context, list | tuple) and all(type(item) in (str, int) for item in context):
        context = list(context)
    elif context is not None:
        raise UnstorableError(f"a result of type {_name(spec.type)}")
    if _find_type(_name(spec.type)) is not spec.type:
        raise UnstorableError(f"a result of type {_name(spec.type)}, which no other process could find")
    return [_name(spec.type), context, [_encode_spec(child) for child in children_of(spec)]]


def _decode_spec(data: Data, depth: int = 0) -> TreeSpec:
    if data is None:
        return pytree.tree_structure(0)
    check(depth < _MAX_DEPTH, "results nest too deeply")
    name, context, children = data
    cls = _find_type(as_text(name))
    if isinstance(context, dict):
        context = _find_type(as_text(context["type"]))
        check(issubclass(context, tuple) and hasattr(context, "_fields"), f"{context} is no named tuple")
    else:
        check(context is None or all(type(item) in (str, int) for item in context), "a context of results")
    if cls is Made:
        check(fits(context, len(children)), "a result of a class that is not loaded, or of other attributes")
    return TreeSpec(cls, context, [_decode_spec(child, depth + 1) for child in children])


def _find_type(name: str) -> Any:
    """The class of that name if results can be of it: one that torch knows how to take apart, or a named tuple."""
    for cls in pytree.SUPPORTED_NODES:
        if _name(cls) == name:
            return cls
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return found
    raise ArtifactError(f"results are of the class {name}, which is not loaded or unknown to torch's pytree")


def encode_literal(value: Any) -> Data:
    """A constant result."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, Dim):
        return {"form": encode_number(value)}
    return value


def decode_literal(data: Data) -> Any:
    """A constant result; for use within :func:`decoding`."""
    if isinstance(data, dict):
        return _dtype(data["dtype"]) if "dtype" in data else as_number(data["form"])
    check(data is None or type(data) in (bool, int, float, str), "a constant result")
    return data


def encode_argument(value: Any, number: Mapping[int, int]) -> Data:
    """An argument of an op that runs eager; values by their numbers.

    Raises:
        UnstorableError: It cannot be written down.
    """
    if isinstance(value, Ref):
        return {"value": number[value.value]}
    if isinstance(value, tuple):
        return [encode_argument(item, number) for item in value]
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Dim | torch.dtype):
        return encode_literal(value)
    raise UnstorableError(f"an op's argument of type {type(value).__name__}")


def decode_argument(data: Data, names: Set[str], number: Mapping[int, int], depth: int = 0) -> Any:
    """An argument of an op that runs eager; for use within :func:`decoding`.

    Args:
        data: What :func:`encode_argument` gave.
        names: The sizes that numbers may be over.
        number: The values that there are, by their numbers.
        depth: How deeply it is nested.
    """
    check(depth < _MAX_DEPTH, "arguments nest too deeply")
    if isinstance(data, list):
        return tuple(decode_argument(item, names, number, depth + 1) for item in data)
    if isinstance(data, dict) and "value" in data:
        check(as_integer(data["value"]) in number, "an op that reads what is not there")
        return Ref(number[data["value"]])
    found = decode_literal(data)
    check(not isinstance(found, Dim) or found.symbols() <= names, "a number over unknown symbols")
    return found


# --- traces ---------------------------------------------------------------------------------------------------------

_MARKS = {"i": INT, "f": FLOAT, "t": TRUE, "n": FALSE, "-": NONE, "[": OPEN, "]": CLOSE}
_MARK_NAMES = {id(mark): name for name, mark in _MARKS.items()}


def _encode_token(token: Any) -> Data:
    kind = type(token)
    if kind is int:
        return token
    name = _MARK_NAMES.get(id(token))
    if name is not None:
        return name
    if kind is Keyword:
        return "k" + token
    if kind is str:
        return "s" + token
    if kind is torch.dtype:
        return "d" + str(token)
    if kind is Again:
        return f"a{token.leaf}"
    if kind is complex:
        return f"c{token.real!r} {token.imag!r}"
    raise UnstorableError(f"an op's argument of type {_name(kind)}")


def _decode_token(data: Data) -> Any:
    if type(data) is int:
        return data
    mark = _MARKS.get(data)
    if mark is not None:
        return mark
    kind, rest = as_text(data)[:1], data[1:]
    if kind == "k":
        return Keyword(rest)
    if kind == "a":
        check(rest.isdecimal(), f"a token {data!r}")
        return Again(int(rest))
    if kind == "c":
        real, _, imag = rest.partition(" ")
        return complex(float(real), float(imag))
    check(kind in ("s", "d"), f"a token {data!r}")
    return rest if kind == "s" else _dtype(rest)


def encode_trace(graph: CapturedGraph) -> Data:
    """The trace behind a graph, with which the traces of further sizes are compared.

    Raises:
        UnstorableError: It has something that cannot be written down.
    """
    if isinstance(graph.template, _StoredTrace):
        return graph.template.data
    nodes: dict[Data, int] = {}
    order = []
    for op, tokens, results in graph.template.nodes:
        node = (
            op if isinstance(op, str) else f"{op}()",
            tuple(map(_encode_token, tokens)),
            tuple((str(dtype), rank) for dtype, rank in results),
        )
        order.append(nodes.setdefault(node, len(nodes)))
    forms: dict[Any, int] = {}
    numbers = [forms.setdefault((type(f), f), len(forms)) for f in graph.forms]
    distinct = [encode_number(f) for _, f in forms]
    return {"nodes": list(nodes), "order": order, "forms": distinct, "numbers": numbers}


@functools.cache
def find_op(name: str) -> OpOverload:
    """The op of that name, such as ``aten.silu.default``: one that this process has, changes nothing, and makes tensors
    from tensors. The name may be anybody's: others could open files.

    Raises:
        ArtifactError: There is none.
    """
    parts = name.split(".")
    check(len(parts) == 3 and all(part.isidentifier() for part in parts), f"{name!r} is no op")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    op = getattr(packet, parts[2], None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(op, OpOverload):
        raise ArtifactError(f"there is no op {name}")
    schema = op._schema
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    # What draws random numbers may make them of nothing.
    takes = takes or (op.namespace in ("aten", "oxidiff") and torch.Tag.nondeterministic_seeded in op.tags)
    gives = bool(schema.returns) and all("Tensor" in str(value.type) for value in schema.returns)
    check(takes and gives and not schema.is_mutable, f"{name} is not an op on tensors alone")
    return op


@functools.cache
def op_of_trace(name: str) -> Any:
    """As :func:`find_op`; ops that make tensors of nothing, as programs have them, are among those of a trace, too."""
    from ..capture.aten import ROWS

    return next((op for op in ROWS if str(op) == name), None) or find_op(name)


class _StoredTrace(Trace):
    """A trace of another process: decoded when it is first compared with one of this."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def difference(self, other: Trace) -> str | None:
        if not self.nodes:
            with decoding("the trace"):
                known = []
                for op, tokens, results in self.data["nodes"]:
                    found = op_of_trace(op[:-2]) if as_text(op).endswith("()") else op
                    metas = tuple((_dtype(dtype), as_integer(rank)) for dtype, rank in results)
                    known.append((found, tuple(map(_decode_token, tokens)), metas))
                self.nodes = [known[i] for i in self.data["order"]]
                self.paths = [""] * len(self.nodes)
        return super().difference(other)


# --- graphs ---------------------------------------------------------------------------------------------------------


def encode_graph(graph: CapturedGraph, lowered: LoweredGraph) -> Data:
    """How calls become calls of the program and its results theirs; not the program itself, not its trace.

    Raises:
        UnstorableError: It has something that cannot be written down.
    """
    return {**encode_calls(graph), **encode_program(lowered)}


def encode_calls(graph: CapturedGraph) -> dict[str, Data]:
    """Which calls a graph serves, what it takes of them and what it returns.

    Raises:
        UnstorableError: It has something that cannot be written down.
    """
    if graph.externs:
        raise UnstorableError("forward uses a tensor that no module holds")
    values, computed, counted = graph.values, graph.plan.computed, graph.plan.counted
    return {
        "symbols": [[s.name, s.role, s.position, s.value, s.label] for s in graph.plan.symbols],
        "sizes": [encode_number(form) for form in graph.plan.forms],
        **({"compared": list(graph.plan.compared.items())} if graph.plan.compared else {}),
        **({"rounded": [[r.name, r.of, r.unit] for r in graph.plan.rounded]} if graph.plan.rounded else {}),
        **({"areas": [[a.name, encode_number(a.of), a.unit] for a in graph.plan.areas]} if graph.plan.areas else {}),
        **({"counted": [[c.name, encode_expression(c.expression)] for c in counted]} if counted else {}),
        **({"computed": [[c.name, encode_expression(c.expression)] for c in computed]} if computed else {}),
        **({"ordered": [list(pair) for pair in graph.plan.ordered]} if graph.plan.ordered else {}),
        **({"conditions": _encode_guards(graph.conditions)} if graph.conditions else {}),
        **({"cuts": sorted((list(map(_encode_edge, cut)) for cut in graph.cuts), key=to_bytes)} if graph.cuts else {}),
        "inputs": [[i.label, encode_value(values[i.value]), i.asked] for i in graph.inputs],
        "results": [
            [
                None if leaf.value is None else encode_value(values[leaf.value]),
                {"again": leaf.literal.leaf} if isinstance(leaf.literal, Again) else encode_literal(leaf.literal),
                leaf.order,
                leaf.input,
                *([True] if leaf.is_part else []),
                *([[list(map(encode_number, step)) for step in leaf.steps]] if leaf.steps else []),
            ]
            for leaf in graph.outputs.leaves
        ],
        "spec": _encode_spec(graph.outputs.spec),
        **({"writes": [list(place) for place in graph.outputs.writes]} if graph.outputs.writes else {}),
        "fixed": graph.fixed,
        "moduli": graph.moduli,
        "traces": graph.traces,
        **_encode_classes(graph),
    }


def encode_program(lowered: LoweredGraph) -> dict[str, Data]:
    """How the arguments of a program are found.

    Raises:
        UnstorableError: It has something that cannot be written down.
    """
    return {
        "program_symbols": lowered.symbols,
        "arguments": [[a.is_number, a.index, a.label, a.order] for a in lowered.arguments],
        "weights": [encode_slot(slot) for slot in lowered.weights],
    }


def encode_slot(slot: WeightSlot) -> Data:
    """Where a weight is found.

    Raises:
        UnstorableError: Only this process can find it.
    """
    if not all(type(key) in (int, str, Member) for key in slot.keys):
        raise UnstorableError(f"{slot.name} is found by a key that is neither text nor number")
    keys = [[key.name] if isinstance(key, Member) else key for key in slot.keys]
    return [slot.name, slot.kind, slot.module, slot.attribute, keys]


def _encode_classes(graph: CapturedGraph) -> dict[str, Data]:
    return {
        "classes": sorted(graph.classes),
        "marks": sorted(([name, mark] for name, mark in graph.marks), key=repr),
        "box": graph.box,
        "points": graph.points,
        "ways": sorted((_encode_guards(way) for way in graph.ways), key=to_bytes),
    }


def _encode_edge(edge: Any) -> Data:
    return None if edge is None else encode_number(edge)


def _decode_edge(data: Data, names: Set[str]) -> Any:
    edge = None if data is None else as_number(data)
    check(not isinstance(edge, Dim) or edge.symbols() <= names, "a slice over unknown symbols")
    return edge


def _encode_guards(guards: Set[tuple[Guard, bool]]) -> Data:
    """What was asked of sizes, and the outcomes."""
    return sorted(
        ([g.relation, encode_expression(g.left), encode_expression(g.right), outcome] for g, outcome in guards),
        key=to_bytes,
    )


def _decode_guards(data: Data, names: Set[str]) -> frozenset[tuple[Guard, bool]]:
    guards = []
    for relation, left, right, outcome in data:
        check(relation in ("eq", "lt") and type(outcome) is bool, "a comparison of sizes")
        guard = Guard(relation, as_expression(left), as_expression(right))
        check(guard.symbols() <= names, "a comparison of unknown sizes")
        guards.append((guard, outcome))
    return frozenset(guards)


def encode_expression(expression: Expression) -> Data:
    """A number that follows from sizes, with the operations that lead to it."""
    if isinstance(expression, tuple):
        return [expression[0], *map(encode_expression, expression[1:])]
    return encode_number(expression)


def as_expression(data: Data, depth: int = 0) -> Expression:
    """A number that follows from sizes, from plain data."""
    if type(data) is not list or (data and data[0] in ("dim", "real")):
        return as_number(data)
    name, *operands = data
    check(name in OPERATIONS and len(operands) in (1, 2) and depth < _MAX_DEPTH, f"an operation {name!r}")
    return (name, *(as_expression(operand, depth + 1) for operand in operands))


_MAX_DEPTH = 64
"""Operations on top of each other."""


def merge_classes(data: Data, other: Data) -> Data:
    """``data`` of a graph, extended by what ``other``, of the same graph, was found right for."""
    if data["moduli"] != other["moduli"]:
        return data

    def union(name: str) -> list[Data]:
        found = {to_bytes(item): item for item in (*data[name], *other[name])}
        return [found[key] for key in sorted(found)]

    box = {
        name: [min(low, other["box"][name][0]), max(high, other["box"][name][1])]
        for name, (low, high) in data["box"].items()
    }
    return {**data, **{name: union(name) for name in ("classes", "marks", "points", "ways")}, "box": box}


def encode_value(value: Value) -> Data:
    """A tensor's type and shape."""
    return [str(value.dtype), [encode_number(size) for size in value.shape]]


def decode_value(data: Data, names: Set[str], node: int = 0) -> Value:
    """A tensor's type and shape, over the sizes of these names."""
    dtype, shape = data
    sizes = tuple(as_number(size) for size in shape)
    for size in sizes:
        check(not isinstance(size, Dim) or size.symbols() <= names, "a size over unknown symbols")
        check(not isinstance(size, float), "a size that is a float")
    return Value(_dtype(dtype), sizes, node)


def decode_graph(text: str, data: Data, trace: Data) -> tuple[CapturedGraph, LoweredGraph]:
    """A graph as this process would have captured it.

    Args:
        text: The compiler's graph.
        data: What :func:`encode_graph` gave.
        trace: What :func:`encode_trace` gave.

    Raises:
        ArtifactError: They do not fit each other or make no sense.
    """
    with decoding("a stored graph"):
        graph = decode_calls(data, trace)
        lowered = decode_program(text, data, graph)
        graph.weights.update((slot.name, slot) for slot in lowered.weights)
        return graph, lowered


def decode_calls(data: Data, trace: Data) -> CapturedGraph:
    """A graph without nodes and weights, from what :func:`encode_calls` gave; for use within :func:`decoding`."""
    plan = _decode_plan(data)
    names = set(plan.names())
    values: list[Value] = []

    def value(item: Data) -> int:
        values.append(decode_value(item, names))
        return len(values) - 1

    inputs = [GraphInput(as_text(label), value(item), as_integer(asked)) for label, item, asked in data["inputs"]]
    leaves: list[OutputLeaf] = []
    for item, literal, order, source, *more in data["results"]:
        is_part, *more = more if more[:1] == [True] else [False, *more]
        check(len(more) <= 1, "a result that is more than a part")
        steps = _decode_steps(more[0], names) if more else ()
        check(source is None or 0 <= as_integer(source) < len(inputs), "a result that is no argument")
        dims = tuple(map(as_integer, order))
        is_again = type(literal) is dict and "again" in literal
        kept = Again(as_integer(literal["again"])) if is_again else decode_literal(literal)
        check(not isinstance(kept, Dim) or kept.symbols() <= names, "a result over unknown symbols")
        if isinstance(kept, Again):
            is_earlier = 0 <= kept.leaf < len(leaves) and leaves[kept.leaf].value is not None and item is None
            check(is_earlier, "a result that is no earlier one")
        leaf = OutputLeaf(None if item is None else value(item), kept, dims, source, is_part, steps)
        rank = 0 if leaf.value is None else len(values[leaf.value].shape)
        check(sorted(dims) == list(range(rank)), "the order of a result")
        leaves.append(leaf)
    spec = _decode_spec(data["spec"])
    check(spec.num_leaves == len(leaves), "results that do not fit their structure")
    writes = tuple(_decode_place(item, len(inputs)) for item in data.get("writes", ()))
    check(not writes or (spec.type is tuple and len(children_of(spec)) == 2), "writes without their values")
    check(sum(kept for *_, kept in writes) == (children_of(spec)[1].num_children if writes else 0), "values of writes")
    # Tensors come first among what is written into.
    first, count = children_of(spec)[0].num_leaves if writes else 0, sum(path[0] == TENSORS for path, *_ in writes)
    check(all(path[0] == TENSORS for path, *_ in writes[:count]), "the order of writes")
    into = range(first, first + count)
    check(all(not leaf.steps or i in into for i, leaf in enumerate(leaves)), "a part of what is no argument")
    check(all(leaves[i].value is not None for i in into), "a write of no tensor")
    distinct = [as_number(form) for form in trace["forms"]]
    for form in distinct:
        check(not isinstance(form, Dim) or form.symbols() <= names, "a number over unknown symbols")
    forms = [distinct[i] for i in trace["numbers"]]
    moduli = {as_text(name): as_integer(modulus) for name, modulus in data["moduli"].items()}
    check(moduli.keys() == names and all(m > 0 for m in moduli.values()), "moduli that are not those of the symbols")
    graph = CapturedGraph(
        (), plan, inputs, [], values, {}, [], OutputSpec(tuple(leaves), spec, writes), moduli, _StoredTrace(trace), forms,
        traces=as_integer(data["traces"]), fixed=tuple(map(as_text, data["fixed"])),
    )  # fmt: skip
    for point in data["points"]:
        check(point.keys() == names and all(type(v) in (int, float) for v in point.values()), "a point")
        graph.points.append(point)
    graph.classes = {tuple(map(as_integer, residues)) for residues in data["classes"]}
    graph.marks = {(as_text(name), tuple(mark) if isinstance(mark, list) else mark) for name, mark in data["marks"]}
    symbols = {s.name: s for s in plan.symbols}
    bounded = {name for name, symbol in symbols.items() if symbol.is_bounded}
    check(bounded <= data["box"].keys() <= symbols.keys() or not graph.points, "the ranges of the sizes")
    for name, (low, high) in data["box"].items():
        of = as_real if name in symbols and symbols[name].is_number else as_integer
        graph.box[as_text(name)] = (of(low), of(high))
    graph.ways = {_decode_guards(way, names) for way in data["ways"]}
    graph.conditions = set(_decode_guards(data.get("conditions", ()), names))
    graph.cuts = frozenset(tuple(_decode_edge(edge, names) for edge in cut) for cut in data.get("cuts", ()))
    check(all(len(cut) == 5 and None not in cut[2:] for cut in graph.cuts), "a slice")
    return graph


def _decode_place(data: Data, inputs: int) -> Place:
    """Where a program writes into one of the arguments, so many of which are tensors, or which attribute it sets."""
    path, key, is_kept = data
    for step in (*path, key):
        check(type(step) in (str, int), "a way into an argument")
    check(bool(path) and type(path[0]) is str and type(is_kept) is bool, "a way into an argument")
    if path[0] == TENSORS:
        check(len(path) == 1 and 0 <= as_integer(key) < inputs and is_kept, "a tensor that is no argument")
    if path[0] == ATTRIBUTES:
        is_whole = len(path) == 2 or (len(path) == 3 and path[2] == "_buffers")
        check(is_whole and type(path[1]) is type(key) is str and is_kept, "a way to an attribute")
    return tuple(path), key, is_kept


def _decode_steps(data: Data, names: Set[str]) -> tuple[Step, ...]:
    """The way to a part of an argument, over the sizes of these names."""
    steps = []
    for item in data:
        check(len(item) in (2, 4), "a way that neither selects nor slices")
        step = tuple(None if number is None else as_number(number) for number in item)
        for number in step:
            check(not isinstance(number, float), "a place that is a float")
            check(not isinstance(number, Dim) or number.symbols() <= names, "a place over unknown symbols")
        check(type(step[0]) is int and step[1 if len(step) == 2 else 3] is not None, "a way without its numbers")
        steps.append(step)
    return tuple(steps)


def decode_program(text: str, data: Data, graph: CapturedGraph, first_number: int | None = None) -> LoweredGraph:
    """A program of a graph, from what :func:`encode_program` gave; for use within :func:`decoding`.

    Args:
        text: The compiler's graph.
        data: How its arguments are found.
        graph: What it computes: its inputs and outputs.
        first_number: Where Python numbers start in the flat sizes of a call, if not behind those of the inputs.
    """
    builder = _native.GraphBuilder.from_text(text)
    arguments, parameters, program_symbols, results = builder.signature()
    leaves = graph.outputs.leaves
    check(sum(leaf.value is not None for leaf in leaves) == results, "results that the program does not give")
    if first_number is None:
        first_number = sum(len(graph.values[item.value].shape) for item in graph.inputs)
    numbers = len(graph.plan.forms) - first_number + len(graph.plan.computed)
    sources = []
    for (is_number, index, label, order), (_, declared) in zip(data["arguments"], arguments, strict=True):
        check(type(is_number) is bool, "the kind of an argument")
        count = numbers if is_number else len(graph.inputs)
        check(0 <= as_integer(index) < count, "an argument that the call does not have")
        if not is_number:
            given = graph.values[graph.inputs[index].value]
            real = COMPLEX_PARTS.get(given.dtype, given.dtype)
            check(declared.startswith(f"{DTYPES[real]}["), f"argument {label} is {given.dtype}, not {declared}")
            check(order is None or sorted(order) == list(range(len(given.shape))), f"the order of argument {label}")
        sources.append(ArgumentSource(is_number, index, as_text(label), None if order is None else tuple(order)))
    slots = []
    for item, (declared_name, _) in zip(data["weights"], parameters, strict=True):
        slots.append(decode_slot(item))
        check(slots[-1].name == declared_name, f"weight {slots[-1].name} is called {declared_name} by the program")
    symbols = [as_text(name) for name in data["program_symbols"]]
    names = set(graph.plan.names())
    check(symbols == program_symbols and set(symbols) <= names, "symbols that are not those of the program")
    return LoweredGraph(builder, symbols, sources, slots, graph.outputs)


def decode_slot(data: Data) -> WeightSlot:
    """Where a weight is found; for use within :func:`decoding`."""
    name, kind, module, attribute, keys = data
    check(kind in ("parameter", "buffer", "attribute"), f"a weight of kind {kind!r}")
    found = [Member(as_text(*key)) if type(key) is list else key for key in keys]
    check(all(type(key) in (int, str, Member) for key in found), f"the keys of weight {name}")
    return WeightSlot(as_text(name), kind, as_text(module), as_text(attribute), tuple(found))


def _decode_plan(data: Data) -> SizePlan:
    forms = [as_number(form) for form in data["sizes"]]
    symbols = []
    for name, role, position, value, label in data["symbols"]:
        check(role in _ROLES, f"a size of role {role!r}")
        check(0 <= as_integer(position) < len(forms), "a size that no call has")
        check(type(value) in (int, float), "the value of a size")
        symbols.append(Symbol(as_text(name), role, position, value, as_text(label)))
    names = {s.name for s in symbols}
    check(len(names) == len(symbols), "two sizes of one name")
    compared = {as_text(name): as_integer(value) for name, value in data.get("compared", ())}
    rounded = tuple(Rounded(as_text(name), as_text(of), as_integer(unit)) for name, of, unit in data.get("rounded", ()))
    lengths = {s.name for s in symbols if s.role == "sequence"}
    for r in rounded:
        check(r.of in lengths and r.unit > 0, "a rounded size that is no length")
        check(r.name == r.of or (r.unit > 1 and r.name not in names), "the name of a rounded size")
    check(len({r.of for r in rounded}) == len(rounded), "a size that is rounded twice")
    areas = []
    for name, of, unit in data.get("areas", ()):
        tokens = as_number(of)
        check(isinstance(tokens, Dim) and tokens.symbols() <= names and as_integer(unit) > 0, "an area that is none")
        check(name not in names | {r.name for r in rounded}, "the name of an area")
        areas.append(Area(as_text(name), dim_of(tokens), unit))
    ordered = tuple((as_text(one), as_text(other)) for one, other in data.get("ordered", ()))
    check(all(name in names for pair in ordered for name in pair), "the order of unknown sizes")
    ints = {s.name for s in symbols if s.role == "int"}
    counted = tuple(Counted(as_text(name), as_expression(made)) for name, made in data.get("counted", ()))
    taken = {*names, *(r.name for r in rounded), *(a.name for a in areas)}
    for c in counted:
        check(is_count(c.expression) and c.sizes() <= ints, "what is not made of ints")
        check(c.name not in taken, "two numbers of one name")
        taken.add(c.name)
    plan = SizePlan(symbols, forms, compared, rounded, ordered, tuple(areas), counted=counted)
    read = names | plan.followers().keys()
    check(all(f.symbols() <= read for f in forms if isinstance(f, Dim)), "a size over unknown symbols")
    known = set(plan.names())
    for name, expression in data.get("computed", ()):
        made = Computed(as_text(name), as_expression(expression))
        check(symbols_of(made.expression) <= known and name not in plan.names(), "a number over unknown symbols")
        plan.computed += (made,)
    return plan
