"""The Rust core. Tensors cross the border by DLPack or by address; nothing here imports torch at run time."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor
from typing_extensions import Self

__all__ = [
    "Executable",
    "GraphBuilder",
    "NativeError",
    "Program",
    "Watch",
    "__version__",
    "compile",
    "knobs",
    "set_num_threads",
    "target",
]

__version__: str

_AttrValue = bool | int | float | str | Sequence[int | str] | Sequence[float]

class NativeError(Exception):
    """An error of the Rust core: `args == (kind, message, module, op)`; `oxidiff.errors` turns it into a class per cause."""

@final
class GraphBuilder:
    """Builds one graph. Sizes are ints or size expressions over symbols, such as `"s0*s1/64"`."""

    def __new__(cls) -> Self: ...
    def symbol(self, name: str, samples: Sequence[int]) -> str:
        """Declares a run-time size and gives its text form; `samples` are its values at the points that were traced,
        equally many for every symbol."""
    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> int:
        """Declares the next argument and gives its value id."""
    def parameter(self, name: str, dtype: str, shape: Sequence[int]) -> int:
        """Declares a weight slot and gives its value id."""
    def constant(self, dtype: str, shape: Sequence[int], data: bytes) -> int:
        """Adds row-major data made in `forward` and gives its value id."""
    def path(self, path: str) -> None:
        """Sets the module path of the nodes that follow."""
    def node(
        self,
        op: str,
        inputs: Sequence[int],
        dtype: str,
        shape: Sequence[int | str],
        attributes: Mapping[str, _AttrValue] | None = None,
    ) -> int:
        """Appends an op (names and attributes as in `docs/ir.md`) with its result type and gives its value id."""
    def output(self, value: int) -> None:
        """Appends a result."""
    def text(self) -> str:
        """The graph as text."""
    def hash(self) -> str:
        """Identity of the graph, independent of weights and of names of symbols and modules."""
    def verify(self) -> None:
        """Raises `NativeError` if the graph breaks an invariant (types, order, ranges)."""
    def interpret(self, sizes: Sequence[int], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Runs the graph in the reference interpreter (slow); CPU tensors."""

@final
class Program:
    """A compiled graph: immutable, without weights, shared by all modules that capture to the same hash."""

    @property
    def hash(self) -> str: ...
    @property
    def compile_s(self) -> float: ...
    @property
    def shared_with(self) -> int:
        """How many live executables use this program."""
    def text(self, stage: str) -> str:
        """`"captured"`, `"optimized"`, `"groups"`, `"plan"` or `"memory"` as text."""
    def explain(self) -> dict[str, Any]:
        """Counts of groups by kind, ops by name, steps; pass timings in seconds."""

def compile(
    builder: GraphBuilder,
    *,
    precision: str = "auto",
    memory: str = "balanced",
    max_specializations: int = 16,
    backend: str | None = None,
) -> tuple[Program, bool]:
    """Compiles the builder's graph, or finds the live program of the same hash and options: `(program, is_new)`.
    The GIL is released."""

@final
class Executable:
    """A program with a weight set. Any number of threads may run one."""

    def __new__(cls, program: Program, weights: Sequence[Tensor]) -> Self:
        """Binds one tensor per weight slot, in slot order. Raises `NativeError` naming the first mismatches of shape,
        dtype or device."""
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Swaps the weight set; running calls finish with the one they began with."""
    def invalidate(self, slots: Sequence[int]) -> None:
        """The contents of these slots changed in place: derived forms are rebuilt before the next run."""
    def run(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[Tensor]:
        """Runs with these arguments, `sizes` being the values of the symbols in order. Fresh tensors come back. The GIL is
        released while kernels run."""
    def profile(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """One timed run: a dict per step (`step`, `kernel`, `module`, `seconds`, `flops`, `bytes`)."""
    def stats(self) -> dict[str, Any]:
        """`specializations`, `derived_bytes`, `arena_bytes`, `arena_lower_bound_bytes`, `peak_bytes`, `sizes`."""
    def unload(self) -> None:
        """Drops specializations, derived weights and the arena."""

@final
class Watch:
    """What a compiled module depends on, as it was when this object was made: dictionaries and tensors, held."""

    def __new__(cls, dicts: Sequence[dict[Any, Any]], tensors: Sequence[Tensor]) -> Self:
        """Raises `TypeError` where this interpreter or torch cannot be watched; see `is_available`."""
    @staticmethod
    def is_available() -> bool:
        """Whether the interpreter counts versions of dictionaries, and torch's tensors are laid out as expected."""
    def poll(self) -> int:
        """Bits of what may have changed since: 1 a dictionary was written, 2 a tensor was written or has other memory. Never
        0 where something did, except for writes past torch's version counter (through `p.data`) that leave the first,
        middle and last eight bytes of the tensor as they were."""
    def changed_tensors(self) -> list[int]:
        """Indices of the tensors that may have changed."""

def set_num_threads(threads: int) -> None:
    """Threads of the CPU backend; 0 means one per core."""

def target() -> dict[str, Any]:
    """Instruction set, features and caches of this CPU."""

def knobs() -> list[tuple[str, str, str]]:
    """Name, default and meaning of every environment variable that is read."""
