"""From a captured graph of ATen ops to the compiler's graph.

:class:`Lowering` walks the nodes and looks each op up in the table of :mod:`~oxidiff.capture.aten`; a *row* there is a
function from the op's arguments to :class:`T` handles, written with the methods of this class. Result types come from
the trace, so rows rarely compute shapes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedError, is_interrupt
from .dim import Dim, Real, Size, dim_of, dim_or_int
from .graph import CapturedGraph, Literal, Node, OutputSpec, Ref, Value, draws, leaves_of, symbols_in
from .guards import Guard
from .signature import Number, memory_orders
from .weights import FLOAT8, WeightSlot

if TYPE_CHECKING:
    from .._native import GraphBuilder

__all__ = [
    "COMPLEX_PARTS",
    "DTYPES",
    "ArgumentSource",
    "Complex",
    "LoweredGraph",
    "Lowering",
    "SizeDependentError",
    "T",
    "is_double",
    "lower",
    "opmath",
]

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
"""The element types of the compiler's graph."""

COMPLEX_PARTS: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""What complex numbers are two of."""

Shape = tuple[Size, ...]

KNOWN_BYTES = 64 << 10
"""Most bytes of a value that is computed while lowering: what the compiler's own folding of constants takes, too."""


class SizeDependentError(UnsupportedError):
    """A number that the compiler needs to know depends on the call. ``symbols``: the sizes to fix, so that it does not."""

    def __init__(self, message: str, symbols: set[str], *, module: str = "", op: str = "") -> None:
        super().__init__(message, module=module, op=op)
        self.symbols = symbols

    def with_symbols(self, others: set[str]) -> SizeDependentError:
        """The same, on which these depend, too."""
        return SizeDependentError(str(self), self.symbols | others, module=self.module, op=self.op)


@dataclass(frozen=True, slots=True)
class T:
    """A value of the graph under construction."""

    id: int
    dtype: torch.dtype
    shape: Shape

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Complex:
    """A value of complex numbers, which the compiler's graph does not have: two of the same shape."""

    real: T
    imag: T

    @property
    def shape(self) -> Shape:
        """The shape of both."""
        return self.real.shape


@dataclass(frozen=True, slots=True)
class ArgumentSource:
    """What to pass as one argument of the program: ``call.tensors[index]``, its dimensions permuted by ``order`` unless that
    is ``None``, complex numbers as pairs of real ones; or ``call.numbers[index]``, behind which are the floats that the plan
    computes."""

    is_number: bool
    index: int
    label: str
    order: tuple[int, ...] | None = None


@dataclass(slots=True)
class LoweredGraph:
    """A graph for the compiler, and how to call what it is compiled to.

    Attributes:
        builder: The graph.
        symbols: The run-time sizes by name, in the order in which ``Executable.run`` takes them.
        arguments: Where each argument comes from.
        weights: The tensor of each weight slot.
        outputs: How the results are put together; tensors come in the order of its leaves.
    """

    builder: GraphBuilder
    symbols: list[str]
    arguments: list[ArgumentSource]
    weights: list[WeightSlot]
    outputs: OutputSpec

    def sizes(self, point: Mapping[str, Number]) -> list[int]:
        """The run-time sizes at a point that the captured graph accepts."""
        return [int(point[name]) for name in self.symbols]


def lower(graph: CapturedGraph, builder: GraphBuilder) -> LoweredGraph:
    """Lowers ``graph`` into ``builder``, which must be empty.

    Raises:
        UnsupportedError: If the graph has an op, or an argument of one, that is not supported; it names the submodule.
    """
    return Lowering(graph, builder).run()


class Lowering:
    """One graph being lowered. The methods are the vocabulary of the rows.

    Args:
        graph: The graph.
        builder: Where to; must be empty.
        orders: For each input, its dimensions from the outermost in memory to the innermost, ``None`` if row-major; those
            of the call's key if left out.
        first_number: Where Python numbers start in the flat sizes of a call, if not behind those of the inputs.
        on_error: Called with each node that cannot be lowered; its results are then taken for inputs. Raises if left out.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        builder: GraphBuilder,
        orders: Sequence[tuple[int, ...] | None] | None = None,
        first_number: int | None = None,
        on_error: Callable[[int, UnsupportedError], None] | None = None,
    ) -> None:
        self.graph = graph
        self.first_number = first_number
        self.on_error = on_error
        self.builder = builder
        self.node: Node = graph.nodes[0] if graph.nodes else Node("input", (), {}, (), "")
        self.lowered: dict[int, T | Complex] = {}
        self.known: dict[int, Tensor] = {}
        self.texts: dict[str, str] = {}
        self.symbol_names: list[str] = []
        self.numbers: dict[str, T] = {}
        self.arguments: list[ArgumentSource] = []
        self.weights: list[WeightSlot] = []
        self.sizes: dict[Dim, str] = {}
        self.orders = memory_orders(graph.key) if orders is None else orders
        self.last_path: str | None = None
        self.scalars: dict[tuple[float, float, torch.dtype], T] = {}

    def run(self) -> LoweredGraph:
        """Lowers the whole graph."""
        self.declare_symbols()
        for node in self.graph.nodes:
            if node.op == "input":
                self.declare_input(node)
        self.declare_numbers()
        attributes = {symbol.name for symbol in self.graph.plan.symbols if symbol.role == "attribute"}
        fixing: SizeDependentError | None = None
        for index, node in enumerate(self.graph.nodes):
            self.node = node
            if node.path != self.last_path:
                self.builder.path(node.path)
                self.last_path = node.path
            try:
                self.lower_node(node)
            except SizeDependentError as error:
                if not error.symbols <= attributes:
                    raise
                # All numbers in attributes that it is so with are found at once: each alone would take another capture.
                fixing = error if fixing is None else fixing.with_symbols(error.symbols)
                self.stand_in(node)
            except (UnsupportedError, KeyError) as error:
                if fixing is not None:
                    # Perhaps of what stands in.
                    raise fixing from None
                if self.on_error is None or not isinstance(error, UnsupportedError):
                    raise
                self.on_error(index, error)
                self.stand_in(node)
        if fixing is not None:
            raise fixing
        for leaf in self.graph.outputs.leaves:
            if leaf.value is not None:
                self.output(leaf.value, leaf.laid())
        return LoweredGraph(self.builder, self.symbol_names, self.arguments, self.weights, self.graph.outputs)

    def lower_node(self, node: Node) -> None:
        """Lowers one op by its row, or a source."""
        if isinstance(node.op, str):
            self.lower_source(node)
            return
        row = self.row(node)
        if row is None:
            raise self.unsupported("it draws random numbers" if draws(node.op) else "the op is not supported")
        if self.compute(node):
            return
        arguments = self.bind(node)
        try:
            results = row(self, *arguments)
        except (TypeError, KeyError) as error:
            # A row that computes with a number it takes to be known.
            why = f"a number that depends on the call is one of its arguments ({type(error).__name__}: {error})"
            raise self.size_dependent(why, symbols_in(arguments)) from error
        if isinstance(results, (T, Complex)):
            results = (results,)
        for value, result in zip(node.outputs, results, strict=True):
            declared = self.graph.values[value]
            if isinstance(result, Complex):
                part = COMPLEX_PARTS[declared.dtype]
                result = Complex(self.convert(result.real, part), self.convert(result.imag, part))
            elif result.dtype is not (dtype := stored(declared.dtype)):
                result = self.convert(result, dtype)
            if isinstance(result, T) and result.shape != declared.shape:
                # As large wherever the graph is right, by other sizes: operands of one op must have the same ones.
                result = self.reshape(result, declared.shape)
            self.lowered[value] = result

    def row(self, node: Node) -> Callable[..., Any] | None:
        """The row of an op, by whether it has to do with numbers that the compiler does not have."""
        from .aten import COMPLEX_ROWS, FLOAT8_ROWS, ROWS

        values = (
            *node.outputs,
            *(leaf.value for leaf in leaves_of([*node.args, *node.kwargs.values()]) if isinstance(leaf, Ref)),
        )
        dtypes = {self.graph.values[value].dtype for value in values}
        rows = FLOAT8_ROWS if dtypes & FLOAT8.keys() else COMPLEX_ROWS if dtypes & COMPLEX_PARTS.keys() else ROWS
        return rows.get(node.op)

    def compute(self, node: Node) -> bool:
        """Computes an op over constants, if it is small, and says whether that stands for it in the graph.

        By PyTorch itself, on the CPU, so that the bits are eager's there: the frequencies of a time embedding are
        exponentials, and one that is off by its last bit is off by 1e-4 in the sine of a thousand times it. Integers, and
        what is made of numbers alone without rounding, stay ops.
        """
        metas = [self.graph.values[value] for value in node.outputs]
        is_small = all(
            (meta.dtype in DTYPES or meta.dtype in COMPLEX_PARTS) and _bytes(meta) <= KNOWN_BYTES for meta in metas
        )
        if not is_small or not self._is_computable(node):
            return False
        args = [self._argument(argument) for argument in node.args]
        kwargs = {name: self._argument(value) for name, value in node.kwargs.items()}
        has_operands = any(isinstance(leaf, Tensor) for leaf in leaves_of([args, *kwargs.values()]))
        if not has_operands and any(argument.name == "device" for argument in node.op._schema.arguments):
            kwargs["device"] = torch.device("cpu")
        try:
            with _disable_current_modes(), torch.no_grad():
                made = node.op(*args, **kwargs)
        except Exception as error:
            if is_interrupt(error):
                raise
            # Not on a CPU, or not at all: its row says what it means.
            return False
        results = [made] if isinstance(made, Tensor) else list(made)
        types = [(result.dtype, tuple(result.shape)) for result in results]
        if types != [(meta.dtype, meta.shape) for meta in metas]:
            return False
        self.known.update(zip(node.outputs, results, strict=True))
        rounds = has_operands or "linspace" in str(node.op)
        return rounds and bool(metas) and all(meta.dtype.is_floating_point or meta.dtype.is_complex for meta in metas)

    def _is_computable(self, node: Node) -> bool:
        """Whether an op reads nothing but constants and gives the same each time; what ``empty`` makes may differ."""
        if torch.Tag.nondeterministic_seeded in node.op.tags or "empty" in str(node.op):
            return False
        leaves = list(leaves_of([*node.args, *node.kwargs.values()]))
        if any(isinstance(leaf, Ref) and leaf.value not in self.known for leaf in leaves):
            return False
        return not any(isinstance(leaf, Dim) for leaf in leaves)

    def _argument(self, argument: Any) -> Any:
        """An argument of an op over constants."""
        if isinstance(argument, Ref):
            return self.known[argument.value]
        return [self._argument(item) for item in argument] if isinstance(argument, tuple) else argument

    def value(self, index: int) -> T | Complex:
        """A value of the captured graph; one that was computed becomes a constant when it is first read."""
        if index not in self.lowered and index in self.known:
            tensor = self.known[index]
            self.lowered[index] = (
                Complex(self._known(tensor.real), self._known(tensor.imag))
                if tensor.is_complex()
                else self._known(tensor)
            )
        return self.lowered[index]

    def _known(self, tensor: Tensor) -> T:
        elements = tensor.flatten().tolist()
        # Bits of floats, since 0.0 equals -0.0; what is not finite has no short form.
        distinct = {struct.pack("d", e) if isinstance(e, float) else e for e in elements}
        is_uniform = len(distinct) == 1 and math.isfinite(elements[0])
        return self.constant(elements[:1] if is_uniform else elements, tensor.dtype, tensor.shape)

    def output(self, index: int, order: Sequence[int] | None = None) -> None:
        """Makes a value, its dimensions in another order, a result of the graph; what could not be lowered is left out."""
        if self.on_error is not None and index not in self.lowered and index not in self.known:
            return
        value = self.value(index)
        if isinstance(value, T) and self.graph.values[index].dtype not in FLOAT8:
            self.builder.output(value.id if order is None else self.permute(value, order).id)
        elif self.on_error is None:
            self.node = self.graph.nodes[self.graph.values[index].node]
            what = "floats of 8 bits" if isinstance(value, T) else "complex numbers"
            raise self.unsupported(f"{what} are no results of a program")

    def stand_in(self, node: Node) -> None:
        """Takes the results of a node that was not lowered for inputs, where the compiler has their type at all: what reads
        others cannot be lowered either."""
        for value in node.outputs:
            self.known.pop(value, None)
            meta = self.graph.values[value]
            if (name := DTYPES.get(meta.dtype)) is not None:
                self.lowered[value] = T(
                    self.builder.input("", name, self.shape_text(meta.shape)), meta.dtype, meta.shape
                )

    def unsupported(self, why: str) -> UnsupportedError:
        """The exception for the node being lowered."""
        where = f" in {self.node.path}" if self.node.path else ""
        shapes = ", ".join(
            f"{str(self.graph.values[a.value].dtype).removeprefix('torch.')}{list(self.graph.values[a.value].shape)}"
            for a in self.node.args
            if isinstance(a, Ref)
        )
        return UnsupportedError(
            f"{self.node.op}{where}: {why} (operands: {shapes or 'none'})", module=self.node.path, op=str(self.node.op)
        )

    def size_dependent(self, why: str, symbols: set[str]) -> UnsupportedError:
        """The exception for a number of the node being lowered that depends on ``symbols``."""
        error = self.unsupported(why)
        return SizeDependentError(str(error), symbols, module=error.module, op=error.op) if symbols else error

    # -- sources -------------------------------------------------------------------------------------------------------

    def declare_symbols(self) -> None:
        """Declares the run-time sizes: a Python number only where a size depends on it."""
        in_shapes: set[str] = set()
        for value in self.graph.values:
            in_shapes |= symbols_in(value.shape)
        for symbol in self.graph.plan.symbols:
            if symbol.is_number and symbol.name not in in_shapes:
                continue
            self.declare_symbol(symbol.name)
        if followers := self.graph.plan.followers():
            used = self.used_symbols()
            for name in followers:
                if name in used:
                    self.declare_symbol(name)

    def used_symbols(self) -> set[str]:
        """The symbols on which any number of the graph depends."""
        return symbols_in([*set(self.graph.forms)])

    def declare_symbol(self, name: str) -> None:
        """Declares a run-time size, with its values at the points that were checked."""
        samples = [int(point[name]) for point in self.graph.points]
        self.texts[name] = self.builder.symbol(name, samples)
        self.symbol_names.append(name)

    def declare_input(self, node: Node) -> None:
        """Declares a tensor argument, in the order in which its dimensions lie in memory: a channels-last tensor is a dense
        input and a permutation, which costs nothing, where a row-major input would be a copy."""
        index = len(self.arguments)
        value = self.graph.values[node.outputs[0]]
        label = self.graph.inputs[index].label
        self.node = node
        order = self.orders[index]
        shape = value.shape if order is None else tuple(value.shape[d] for d in order)
        part = COMPLEX_PARTS.get(value.dtype)
        dtype, dense_shape = (value.dtype, shape) if part is None else (part, (*shape, 2))
        dense = T(self.builder.input(label, self.dtype_name(dtype), self.shape_text(dense_shape)), dtype, dense_shape)
        back = None if order is None else [order.index(d) for d in range(len(order))]
        if part is None:
            self.lowered[node.outputs[0]] = dense if back is None else self.permute(dense, back)
        else:
            # Pairs of real numbers.
            both = self.pairs(dense)
            self.lowered[node.outputs[0]] = (
                both if back is None else Complex(self.permute(both.real, back), self.permute(both.imag, back))
            )
        self.arguments.append(ArgumentSource(False, index, label, order))

    def declare_numbers(self) -> None:
        """Declares the Python numbers that are computed with as 0-d arguments."""
        used = self.used_symbols()
        base = self.first_number
        if base is None:
            base = sum(len(self.graph.values[i.value].shape) for i in self.graph.inputs)
        for symbol in self.graph.plan.symbols:
            if symbol.is_number and symbol.name in used and symbol.name not in self.texts:
                dtype = torch.int64 if symbol.role == "int" else torch.float64
                self.numbers[symbol.name] = T(self.builder.input(symbol.label, DTYPES[dtype], []), dtype, ())
                self.arguments.append(ArgumentSource(True, symbol.position - base, symbol.label))
        passed = len(self.graph.plan.forms) - base
        for i, computed in enumerate(self.graph.plan.computed):
            if computed.name in used:
                label = f"computed {computed.name}"
                self.numbers[computed.name] = T(self.builder.input(label, DTYPES[torch.float64], []), torch.float64, ())
                self.arguments.append(ArgumentSource(True, passed + i, label))

    def lower_source(self, node: Node) -> None:
        """Lowers a node without operands."""
        if node.op == "input":
            return
        (value,) = node.outputs
        meta = self.graph.values[value]
        shape = tuple(self.static(size, "a weight's size") for size in meta.shape)
        if node.op == "weight":
            self.lowered[value] = self.parameter(self.graph.weights[node.args[0]], meta.dtype, shape)
        elif node.op == "extern":
            tensor = self.graph.externs[node.args[0]]
            slot = WeightSlot(f"captured{node.args[0]}", "captured", tensor=tensor)
            self.lowered[value] = self.parameter(slot, meta.dtype, shape)
        else:
            self.lowered[value] = self.lower_constant(node.args, meta.dtype, shape)
            if not any(isinstance(element, Dim) for element in node.args):
                self.known[value] = torch.tensor(list(node.args), dtype=meta.dtype, device="cpu").reshape(shape)

    def parameter(self, slot: WeightSlot, dtype: torch.dtype, shape: tuple[int, ...]) -> T | Complex:
        """The next weight that the graph is bound to: complex numbers as pairs of real ones, floats of 8 bits as bytes."""
        self.weights.append(slot)
        part = COMPLEX_PARTS.get(dtype)
        if part is None:
            dtype = stored(dtype)
            return T(self.builder.parameter(slot.name, self.dtype_name(dtype), shape), dtype, shape)
        pairs = T(self.builder.parameter(slot.name, self.dtype_name(part), (*shape, 2)), part, (*shape, 2))
        return self.pairs(pairs)

    def pairs(self, x: T) -> Complex:
        """Complex numbers whose two parts are neighbours."""
        real, imag = (self.reshape(self.slice(x, x.rank - 1, at, 1), x.shape[:-1]) for at in (0, 1))
        return Complex(real, imag)

    def lower_constant(self, elements: Sequence[Literal], dtype: torch.dtype, shape: tuple[int, ...]) -> T:
        """Lowers data made in ``forward``, elements of which may depend on the call."""
        if not any(isinstance(e, Dim) for e in elements):
            return self.constant([e for e in elements if not isinstance(e, Dim)], dtype, shape)
        parts = [self.reshape(self.convert(self.scalar(e, dtype), dtype), (1,)) for e in elements]
        return self.reshape(self.cat(parts, 0) if len(parts) > 1 else parts[0], shape)

    def constant(self, elements: Sequence[float], dtype: torch.dtype, shape: Sequence[int]) -> T:
        """Data that is the same at every size."""
        if len(elements) == 1 and math.isfinite(elements[0]):
            return self.full(elements[0], dtype, tuple(shape))
        return self._data(elements, dtype, shape)

    def _data(self, elements: Sequence[float], dtype: torch.dtype, shape: Sequence[int]) -> T:
        data = torch.tensor(list(elements), dtype=dtype).contiguous().view(torch.uint8).numpy().tobytes()
        return T(self.builder.constant(self.dtype_name(dtype), list(shape), data), dtype, tuple(shape))

    # -- arguments -----------------------------------------------------------------------------------------------------

    def bind(self, node: Node) -> list[Any]:
        """The arguments in the order of the schema, references resolved, defaults filled in."""
        names = _schema(node.op)
        out = [self.resolve(a) for a in node.args]
        for name, default in names[len(out) :]:
            out.append(self.resolve(node.kwargs[name]) if name in node.kwargs else default)
        return out

    def resolve(self, argument: Any) -> Any:
        """An argument with its references resolved."""
        if isinstance(argument, Ref):
            if argument.value not in self.lowered and argument.value not in self.known:
                dtype = self.graph.values[argument.value].dtype
                raise self.unsupported(f"it reads values of type {dtype}")
            return self.value(argument.value)
        if isinstance(argument, tuple):
            return tuple(self.resolve(a) for a in argument)
        return argument

    def known_operand(self, *path: int) -> Tensor | None:
        """An operand of the node being lowered, by its place among the arguments, if it is the same in every call."""
        argument: Any = self.node.args
        for index in path:
            argument = argument[index]
        return self.known.get(argument.value) if isinstance(argument, Ref) else None

    def result(self, index: int = 0) -> tuple[torch.dtype, Shape]:
        """Dtype and shape that the trace saw as result ``index`` of the node being lowered: of complex numbers, those of
        each part, of floats of 8 bits those of their bytes."""
        value = self.graph.values[self.node.outputs[index]]
        return stored(value.dtype), value.shape

    def static(self, size: Any, what: str) -> int:
        """``size`` as a plain int; it must not depend on the call."""
        if isinstance(size, Dim):
            raise self.size_dependent(f"{what} depends on the input's size: {size}", size.symbols())
        return int(size)

    def is_negative(self, size: Size) -> bool:
        """Whether a number is below zero: the same at every point that was traced, and a condition of the program."""
        if not isinstance(size, Dim):
            return size < 0
        found = self._signs(size)
        if len(found) > 1:
            raise self.size_dependent(f"{size} changes its sign with the input's size", size.symbols())
        self._take_for_granted(size, *found)
        return found.pop()

    def take_not_negative(self, *sizes: Size) -> bool:
        """Makes it a condition of the program that none of these is below zero, if none is at any point that was traced."""
        if any(self._signs(dim_of(size)) != {False} for size in sizes):
            return False
        for size in sizes:
            if isinstance(size, Dim):
                self._take_for_granted(size, False)
        return True

    def keep_order(self, one: Size, other: Size) -> None:
        """Makes it a condition of the program which of two numbers is the larger, where it is the same one at every point
        that was traced."""
        for more in (dim_or_int(dim_of(a) - b) for a, b in ((one, other), (other, one))):
            if isinstance(more, Dim) and self._signs(more) == {False}:
                self._take_for_granted(more, False)
                return

    def _signs(self, size: Dim) -> set[bool]:
        return {size.exact({n: Fraction(point[n]) for n in size.symbols()}) < 0 for point in self.graph.points}

    def _take_for_granted(self, size: Dim, is_negative: bool) -> None:
        slopes = [c for m, c in size.terms if m]
        is_ever = min(slopes) < 0 or size.exact(dict.fromkeys(size.symbols(), 1)) < 0
        # Sizes never are by themselves, numbers may be.
        numbers = {s.name for s in self.graph.plan.symbols if s.is_number}
        if is_negative or is_ever or not size.symbols().isdisjoint(numbers):
            self.graph.conditions.add((Guard("lt", size, 0), is_negative))

    def dtype_name(self, dtype: torch.dtype) -> str:
        """The compiler's name of an element type."""
        name = DTYPES.get(dtype)
        if name is None:
            raise self.unsupported(f"values of type {dtype}")
        return name

    def shape_text(self, shape: Sequence[Size]) -> list[int | str]:
        """A shape as the builder takes it."""
        return [self.size_text(size) if isinstance(size, Dim) else size for size in shape]

    def size_text(self, size: Dim) -> str:
        """A size as the builder takes it: over ``s0``, ``s1``, ..."""
        text = self.sizes.get(size)
        if text is None:
            text = self.sizes[size] = self._size_text(size)
        return text

    def _size_text(self, size: Dim) -> str:
        out = ""
        for monomial, coefficient in size.terms:
            sign = "-" if coefficient < 0 else "+" if out else ""
            factors = [self.texts[name] for name, power in monomial for _ in range(power)]
            if abs(coefficient.numerator) != 1 or not factors:
                factors.insert(0, str(abs(coefficient.numerator)))
            out += sign + "*".join(factors)
            if coefficient.denominator != 1:
                out += f"/{coefficient.denominator}"
        return out or "0"

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def emit(self, op: str, inputs: Sequence[T], dtype: torch.dtype, shape: Sequence[Size], **attributes: Any) -> T:
        """Appends a node; attributes are numbers, flags, :class:`Dim` or lists of these."""
        attrs = {name: self._attribute(value) for name, value in attributes.items()} if attributes else None
        shape = tuple(map(dim_or_int, shape))
        result = self.builder.node(op, [t.id for t in inputs], self.dtype_name(dtype), self.shape_text(shape), attrs)
        return T(result, dtype, shape)

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, Dim):
            constant = value.as_int()
            return self.size_text(value) if constant is None else constant
        if isinstance(value, (list, tuple)):
            return [self._attribute(item) for item in value]
        return value

    def full(self, value: float, dtype: torch.dtype, shape: Sequence[Size] = ()) -> T:
        """Every element is ``value``."""
        if shape:
            return self._full(value, dtype, shape)
        key = (value, math.copysign(1.0, value), dtype)
        if key not in self.scalars:
            self.scalars[key] = self._full(value, dtype, ())
        return self.scalars[key]

    def _full(self, value: float, dtype: torch.dtype, shape: Sequence[Size]) -> T:
        if not is_double(value):
            if dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
                return self.expand(self._data([wrapped(value, dtype)], dtype, ()), shape)
            if dtype is not torch.float64 and abs(value) < 1 << 63:
                # Rounded once, not to f64 first.
                value = torch.tensor(value).float().item()
        return self.emit("full", (), dtype, shape, value=float(value))

    def scalar(self, value: Any, like: torch.dtype) -> T:
        """A number as a 0-d value for arithmetic with values of type ``like``: not rounded to a 16-bit type."""
        if isinstance(value, T):
            return value
        if isinstance(value, Dim):
            return self.number(value)
        if isinstance(value, bool):
            return self.full(value, torch.bool)
        if like.is_floating_point:
            return self.full(value, opmath(like))
        return self.full(wrapped(value, like), torch.int64 if isinstance(value, int) else torch.float32)

    def number(self, form: Dim) -> T:
        """A number that depends on the call's sizes or numbers."""
        if form.symbols() <= self.texts.keys():
            # A size always comes out whole; a float need not.
            scale = math.lcm(*(c.denominator for _, c in form.terms)) if isinstance(form, Real) else 1
            size = self.emit("size_of", (), torch.int64, (), size=Dim((form * scale).terms))
            return size if scale == 1 else self.binary("div", size, self.full(scale, torch.float64), torch.float64)
        real = any(c.denominator != 1 for _, c in form.terms)
        real = real or any(self.numbers[n].dtype is torch.float64 for n in form.symbols() if n in self.numbers)
        dtype = torch.float64 if real else torch.int64
        total: T | None = None
        for monomial, coefficient in form.terms:
            term: T | None = None
            for name, power in monomial:
                symbol = self.numbers[name] if name in self.numbers else self.number(Dim.symbol(name))
                for _ in range(power):
                    term = symbol if term is None else self.binary("mul", term, symbol, dtype)
            factor = int(coefficient) if coefficient.denominator == 1 else float(coefficient)
            if term is None:
                term = self.full(factor, dtype)
            elif coefficient != 1:
                term = self.binary("mul", term, self.full(factor, dtype), dtype)
            total = term if total is None else self.binary("add", total, term, dtype)
        return total if total is not None else self.full(0, dtype)

    def unary(self, op: str, x: T, dtype: torch.dtype | None = None) -> T:
        """A pointwise op of one operand."""
        return self.emit(op, (x,), dtype or x.dtype, x.shape)

    def binary(self, op: str, x: T, y: T, dtype: torch.dtype) -> T:
        """A pointwise op of two operands, broadcast."""
        return self.emit(op, (x, y), dtype, self.broadcast(x.shape, y.shape))

    def broadcast(self, *shapes: Sequence[Size]) -> Shape:
        """The shape that operands of these shapes are stretched to."""
        rank = max(map(len, shapes))
        out: list[Size] = [1] * rank
        for shape in shapes:
            for i, size in enumerate(shape, rank - len(shape)):
                if out[i] == 1:
                    out[i] = size
        return tuple(out)

    def where(self, condition: T, x: T, y: T, dtype: torch.dtype) -> T:
        """``x`` where ``condition`` holds, else ``y``."""
        return self.emit("where", (condition, x, y), dtype, self.broadcast(condition.shape, x.shape, y.shape))

    def convert(self, x: T, dtype: torch.dtype) -> T:
        """``x`` in another element type."""
        return x if x.dtype is dtype else self.emit("convert", (x,), dtype, x.shape)

    def reshape(self, x: T, shape: Sequence[Size]) -> T:
        """The same elements in another shape."""
        shape = tuple(map(dim_or_int, shape))
        return x if x.shape == shape else self.emit("reshape", (x,), x.dtype, shape)

    def permute(self, x: T, dims: Sequence[int]) -> T:
        """Dimensions in another order."""
        dims = [d % x.rank for d in dims]
        if dims == list(range(x.rank)):
            return x
        return self.emit("permute", (x,), x.dtype, [x.shape[d] for d in dims], dims=dims)

    def transpose(self, x: T, a: int, b: int) -> T:
        """Two dimensions swapped."""
        dims = list(range(x.rank))
        if dims:
            dims[a], dims[b] = dims[b], dims[a]
        return self.permute(x, dims)

    def expand(self, x: T, shape: Sequence[Size]) -> T:
        """Stretched to ``shape``."""
        shape = tuple(map(dim_or_int, shape))
        return x if x.shape == shape else self.emit("expand", (x,), x.dtype, shape)

    def slice(self, x: T, dim: int, start: Size, length: Size, step: int = 1) -> T:
        """``length`` elements from ``start``, ``step`` apart."""
        length = dim_or_int(length)
        if length == x.shape[dim] and step == 1:
            return x
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        return self.emit("slice", (x,), x.dtype, shape, dim=dim, start=dim_of(start), step=step)

    def cat(self, parts: Sequence[T], dim: int) -> T:
        """Parts one after the other along ``dim``."""
        if len(parts) == 1:
            return parts[0]
        total: Size = 0
        for part in parts:
            total = dim_of(part.shape[dim]) + total
        shape = [*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :]]
        return self.emit("cat", parts, parts[0].dtype, shape, dim=dim)

    def arange(self, length: Size, dtype: torch.dtype, start: Size = 0, step: Size = 1) -> T:
        """``start``, ``start + step``, ..."""
        return self.emit("arange", (), dtype, [length], start=dim_of(start), step=dim_of(step))

    def reduce(self, op: str, x: T, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> T:
        """A reduction over ``dims``."""
        dims = sorted({d % x.rank for d in dims}) if x.rank else []
        shape = [1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims]
        return self.emit(op, (x,), dtype, shape, dims=dims, keepdim=keepdim)


def _bytes(meta: Value) -> int:
    """Bytes of a value, too many of one whose size depends on the call."""
    return math.prod(size if isinstance(size, int) else KNOWN_BYTES + 1 for size in meta.shape) * meta.dtype.itemsize


def wrapped(number: Any, dtype: torch.dtype) -> Any:
    """An int as PyTorch converts it to a type of integers: what does not fit is taken modulo its number of values."""
    if dtype.is_floating_point or dtype is torch.bool or not isinstance(number, int):
        return number
    limits = torch.iinfo(dtype)
    return (number - limits.min) % (limits.max - limits.min + 1) + limits.min


def is_double(number: int | float) -> bool:
    """Whether a number is an f64, as attributes of the compiler's ops are: all but integers of more than 53 bits."""
    return isinstance(number, float) or int(float(number)) == number


def stored(dtype: torch.dtype) -> torch.dtype:
    """The type of what stands for a value of this type in the compiler's graph."""
    return torch.uint8 if dtype in FLOAT8 else COMPLEX_PARTS.get(dtype, dtype)


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The type arithmetic is done in."""
    return torch.float64 if dtype is torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64


_schemas: dict[Any, list[tuple[str, Any]]] = {}


def _schema(op: Any) -> list[tuple[str, Any]]:
    known = _schemas.get(op)
    if known is None:
        known = _schemas[op] = [
            (a.name, a.default_value if a.has_default_value() else None) for a in op._schema.arguments
        ]
    return known


Row = Callable[..., Any]
