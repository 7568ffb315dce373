"""Captured variants of one module structure, their programs and their weights: between capture and the extension.

A :class:`Variant` is one captured graph, compiled and bound to the module's tensors. An :class:`Engine` holds the
variants of one structure of a module and finds, extends or makes the one that a call needs. Nothing here is called
twice for calls of the same key: the result, a :class:`Ready`, is remembered by the dispatcher.

Threads: the dispatcher's lock is held in every method of :class:`Engine`; :attr:`Ready.run` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import _native
from .call import Leaf, replace_leaves
from .capture import Call, CapturedGraph, Capturer, WeightSlot, is_tracing
from .capture.lowering import LoweredGraph
from .errors import CaptureError, UnsupportedError
from .options import CompileOptions
from .watch import weight_state

__all__ = ["Engine", "Ready", "Variant", "is_tracing"]

Number = int | float


class Ready:
    """A call of one key, ready to run.

    Attributes:
        run: Takes the call's leaves and gives what the module would return.
        profile: Takes the call's leaves and gives a timed run's steps.
        free_numbers: Indices of leaves that are numbers and arguments of the program, not part of it.
    """

    __slots__ = ("free_numbers", "profile", "run")

    def __init__(
        self,
        run: Callable[[list[Leaf]], Any],
        profile: Callable[[list[Leaf]], list[dict[str, Any]]],
        free_numbers: frozenset[int] = frozenset(),
    ) -> None:
        self.run = run
        self.profile = profile
        self.free_numbers = free_numbers


class Variant:
    """One captured graph with its program and, while the module has this structure, its weights.

    Attributes:
        graph: The graph.
        lowered: The same for the compiler, and how to call what it is compiled to.
        program: The compiled program, possibly shared with other modules.
        is_own: Whether this module was the one that compiled it.
    """

    def __init__(self, graph: CapturedGraph, lowered: LoweredGraph, options: CompileOptions) -> None:
        self.graph = graph
        self.lowered = lowered
        self.program, self.is_own = _native.compile(
            self.lowered.builder,
            precision=options.precision,
            memory=options.memory,
            max_specializations=options.max_specializations,
        )
        self._executable: _native.Executable | None = None
        self._tensors: list[Tensor] = []
        self._state: list[tuple[int, int, int]] = []

    def bind(self, root: torch.nn.Module, suspects: Collection[int] = ()) -> bool:
        """Binds the weights that ``root`` holds now.

        Args:
            root: The module.
            suspects: Ids of tensors that were written even if torch did not count it.

        Returns:
            Whether anything was bound anew or will be derived again.

        Raises:
            CaptureError: The module does not hold a tensor that the graph needs.
        """
        tensors = [_fetch(slot, root) for slot in self.lowered.weights]
        state = weight_state(tensors)
        if self._executable is None:
            self._executable = _native.Executable(self.program, _aliases(tensors))
        else:
            changed = [
                i
                for i, (now, before) in enumerate(zip(state, self._state, strict=True))
                if now != before or now[0] in suspects
            ]
            if not changed:
                return False
            if any(state[i][:2] != self._state[i][:2] for i in changed):
                self._executable.set_weights(_aliases(tensors))
            self._executable.invalidate(changed)
        self._tensors, self._state = tensors, state
        return True

    def release(self) -> None:
        """Lets go of the module's tensors and of what was derived from them."""
        self._executable = None
        self._tensors, self._state = [], []

    def unload(self) -> None:
        """Drops specializations, derived weights and the arena."""
        if self._executable is not None:
            self._executable.unload()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors it is bound to, by slot."""
        return self._tensors

    @property
    def executable(self) -> _native.Executable:
        """The program with its weights."""
        assert self._executable is not None, "a variant is bound before it runs"
        return self._executable

    def stats(self) -> dict[str, Any]:
        """See ``_native.Executable.stats``; empty while nothing is bound."""
        return {} if self._executable is None else self._executable.stats()

    def explain(self) -> dict[str, Any]:
        """What it was captured from and compiled to."""
        graph = self.graph
        return {
            "inputs": [f"{item.label}: {_type_text(graph, item.value)}" for item in graph.inputs],
            "outputs": [_type_text(graph, leaf.value) for leaf in graph.outputs.leaves if leaf.value is not None],
            "symbols": {symbol.name: f"{symbol.label} ({symbol.role})" for symbol in graph.plan.symbols},
            "fixed": list(graph.fixed),
            "classes": len(graph.classes),
            "hash": self.program.hash,
            **self.program.explain(),
        }


def _aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory without the same objects: what is bound must not keep `torch.utils.swap_tensors` from working."""
    return [tensor.detach() for tensor in tensors]


def _type_text(graph: CapturedGraph, value: int) -> str:
    found = graph.values[value]
    return f"{str(found.dtype).removeprefix('torch.')}[{', '.join(map(str, found.shape))}]"


def _fetch(slot: WeightSlot, root: torch.nn.Module) -> Tensor:
    try:
        tensor = slot.fetch(root)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise CaptureError(f"the module no longer holds {slot.name}: {error}", module=slot.module) from error
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"there is no backend for weights on {tensor.device} yet ({slot.name})", module=slot.module
        )
    return tensor


class Engine:
    """The variants of one structure of a module.

    Args:
        module: The module.
        forward: What to capture: the module's ``forward``, without hooks around it.
        options: How to compile.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], options: CompileOptions) -> None:
        self.module = module
        self.options = options
        self.variants: list[Variant] = []
        self.captures = 0
        self._capturer = Capturer(module, dynamic=options.dynamic)
        # The hooks of the module itself are run around the program, not captured into it.
        self._capturer.module = forward

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Leaf]) -> Ready:
        """Makes a call ready: finds the variant that is valid for it, or captures and compiles one.

        Raises:
            CaptureError, UnsupportedError: Why no program can stand for this call.
            TypeError: The arguments do not fit the signature.
        """
        # Every leaf an object of its own, so that it can be found again where the capture sorted it to.
        probes = [leaf.detach() if isinstance(leaf, Tensor) else _Number.of(leaf) for leaf in leaves]
        call = self._capturer.call(*replace_leaves(args, kwargs, probes))
        places = {id(probe): i for i, probe in enumerate(probes)}
        # A default of the signature is no leaf: it keeps its value.
        tensors = [places.get(id(t), t) for t in call.tensors]
        numbers = [places.get(id(n)) for n in call.numbers]
        call = self._capturer.call(args, kwargs)
        variant = self._variant(call)
        point = variant.graph.plan.read(call.sizes)
        assert point is not None, "the variant was chosen because it serves these sizes"
        return _Binding(variant, point, call, tensors, numbers, len(leaves)).ready()

    def _variant(self, call: Call) -> Variant:
        rivals = [v for v in self.variants if v.graph.key == call.key]
        for variant in rivals:
            point = variant.graph.plan.read(call.sizes)
            if point is not None and variant.graph.accepts(point):
                return variant
        for variant in rivals:
            if self._capturer.extend(variant.graph, call):
                return variant
        self.captures += 1
        variant = Variant(*self._capturer.lowered(call, _native.GraphBuilder), self.options)
        variant.bind(self.module)
        self.variants.append(variant)
        return variant

    def tensors(self) -> list[Tensor]:
        """Every tensor that a variant is bound to, once."""
        return list({id(t): t for variant in self.variants for t in variant.tensors}.values())

    def weight_bytes(self) -> int:
        """Memory of these tensors; shared memory once."""
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in self.tensors())}
        return sum(storages.values())

    def refresh(self, suspects: Collection[int] = ()) -> bool:
        """Binds the weights as they are now; true if something was bound anew or is derived again.

        Args:
            suspects: See :meth:`Variant.bind`.
        """
        changes = [variant.bind(self.module, suspects) for variant in self.variants]
        return any(changes)

    def release(self) -> None:
        """Lets go of the module's tensors."""
        for variant in self.variants:
            variant.release()

    def unload(self) -> None:
        """Drops arenas and derived weights."""
        for variant in self.variants:
            variant.unload()


class _Number:
    """Makes numbers with an identity of their own."""

    class Int(int):
        """An int that is no shared object."""

    class Float(float):
        """A float that is no shared object."""

    @classmethod
    def of(cls, number: Number) -> Number:
        return cls.Int(number) if isinstance(number, int) else cls.Float(number)


class _Binding:
    """How the leaves of calls of one key become arguments and sizes of a program, and its results the call's result.

    Args:
        variant: The variant that serves the key.
        point: Its free sizes and numbers at the call it is made for.
        call: That call.
        tensors: For each tensor of the call, the index of its leaf, or the tensor where it is a default.
        numbers: For each number of the call, the index of its leaf, ``None`` where it is a default.
        count: The number of leaves.
    """

    def __init__(
        self,
        variant: Variant,
        point: Mapping[str, Number],
        call: Call,
        tensors: Sequence[int | Tensor],
        numbers: Sequence[int | None],
        count: int,
    ) -> None:
        self.variant = variant
        self.point = point
        self.defaults: list[Leaf] = []
        self.tensors = [t if isinstance(t, int) else self._default(t, count) for t in tensors]
        self.numbers = [self._default(n, count) if i is None else i for i, n in zip(numbers, call.numbers, strict=True)]
        first = len(call.sizes) - len(call.numbers)
        # A symbol that is a Python number changes from call to call.
        self.live = {
            symbol.name: place
            for symbol in variant.graph.plan.symbols
            if symbol.position >= first and (place := numbers[symbol.position - first]) is not None
        }

    def _default(self, value: Leaf, count: int) -> int:
        """A place behind the leaves, where a value that is none of them is found."""
        self.defaults.append(value)
        return count + len(self.defaults) - 1

    def ready(self) -> Ready:
        """The function that runs a call."""
        live, lowered, defaults = self.live, self.variant.lowered, self.defaults
        places = tuple((self.numbers if s.is_number else self.tensors)[s.index] for s in lowered.arguments)
        fixed = [0 if name in live else int(self.point[name]) for name in lowered.symbols]
        moving = [(i, live[name]) for i, name in enumerate(lowered.symbols) if name in live]
        build = _builder(self.variant, self.point, live, self.tensors)
        executable = self.variant.executable
        execute = executable.run
        orders = [s.order for s in lowered.arguments]
        is_row_major = not any(orders)

        def arguments_of(leaves: list[Leaf]) -> list[Any]:
            if is_row_major:
                return [leaves[i] for i in places]
            picked = zip(places, orders, strict=True)
            return [leaves[i] if order is None else cast(Tensor, leaves[i]).permute(order) for i, order in picked]

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

        return Ready(run, profile, frozenset(live.values()))


def _builder(
    variant: Variant, point: Mapping[str, Number], live: Mapping[str, int], tensor_places: Sequence[int]
) -> Callable[[list[Tensor], Sequence[Leaf]], Any]:
    """The function that puts results together as the module would."""
    outputs = variant.graph.outputs
    leaves_out = [leaf for leaf in outputs.leaves if leaf.value is not None]
    # An argument that the module returns as it is: the caller gets its own tensor back.
    returned = [(i, tensor_places[leaf.input]) for i, leaf in enumerate(leaves_out) if leaf.input is not None]
    simple: type | None = None
    if not returned and len(leaves_out) == len(outputs.leaves):
        if outputs.spec.is_leaf():
            return lambda tensors, leaves: tensors[0]
        if all(child.is_leaf() for child in outputs.spec.children()):
            simple = outputs.spec.type
    if simple is list:
        return lambda tensors, leaves: tensors
    if simple is tuple:
        return lambda tensors, leaves: tuple(tensors)

    def build(tensors: list[Tensor], leaves: Sequence[Leaf]) -> Any:
        for i, at in returned:
            tensors[i] = cast(Tensor, leaves[at])
        now = {**point, **{name: leaves[at] for name, at in live.items()}} if live else point
        return outputs.build(tensors, now)  # type: ignore[arg-type]

    return build
