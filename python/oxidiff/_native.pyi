"""The Rust core. Tensors cross the border by DLPack or by address; nothing here imports torch at run time."""

from collections.abc import Callable, Mapping, Sequence, Set
from os import PathLike
from types import FunctionType
from typing import Any, ClassVar, Protocol, final

from torch import Tensor, dtype
from torch.nn import Module
from typing_extensions import Self

__all__ = [
    "Executable",
    "FileLock",
    "GraphBuilder",
    "KernelBench",
    "NativeError",
    "Program",
    "Tree",
    "Surroundings",
    "TuningDatabase",
    "DeviceSite",
    "TuningSite",
    "Watch",
    "__version__",
    "cache_dir",
    "ceilings",
    "compile",
    "cuda_archs",
    "cuda_emulate",
    "cuda_findings",
    "cuda_graphs",
    "cuda_kernels",
    "cuda_open",
    "cuda_plans",
    "cuda_spills",
    "decode_artifact",
    "derived_bytes",
    "device_sites",
    "device_named",
    "devices",
    "encode_artifact",
    "forget_choices",
    "is_whole",
    "kernel_version",
    "fill_cells",
    "is_on",
    "kernels",
    "key_of",
    "knobs",
    "profile_of",
    "read_file",
    "set_num_threads",
    "stamp",
    "sweep_folder",
    "target",
    "tuning_sites",
    "write_file",
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
    @staticmethod
    def from_text(text: str) -> GraphBuilder:
        """The graph of a text that `text` gave, verified; raises `NativeError` if it is malformed or breaks an invariant."""
    def signature(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str], int]:
        """Arguments and weight slots as names and types, names of the run-time sizes, number of results."""
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
    def memory(self, sizes: Sequence[int]) -> dict[str, Any]:
        """What a run at these sizes needs, without running: `arena_bytes`, `lower_bound_bytes`, `derived_bytes` (forms of
        weights that it keeps), `output_bytes`, `steps` as `(name, kernel, module, work, bytes)`, `buffers` of the arena
        as `(module, what, bytes, first step, last step, offset)`, and `laid_out`, weights that libraries of GPUs want with
        their channels as neighbours and that do not lie so in a dense tensor, as `(slot or None, bytes)`."""
    def forget_sizes(self) -> None:
        """Drops every specialization; the next run makes its own anew, with the choices that hold then."""
    def forget_size(self, sizes: Sequence[int]) -> None:
        """Drops the specialization for these sizes, if there is one."""
    def explain(self) -> dict[str, Any]:
        """Counts of groups by kind, ops by name, steps; pass timings in seconds; on a GPU, `not_by_libraries`: steps that
        libraries might compute and do not, with the reason, and `no_graphs`: sizes that are not replayed as a CUDA graph
        because making one failed, with the reason."""

def compile(
    builder: GraphBuilder,
    *,
    precision: str = "auto",
    widen: bool = False,
    memory: str = "balanced",
    memory_budget: int | None = None,
    max_specializations: int = 16,
    cuda_graphs: bool = True,
    backend: str | None = None,
    device: _Device | None = None,
    profile: str | None = None,
    tf32_products: bool = False,
    tf32_convolutions: bool = False,
) -> tuple[Program, bool]:
    """Compiles the builder's graph, or finds the live program of the same hash and options: `(program, is_new)`.
    The GIL is released. With `widen` f16 is f32 between inputs and outputs. With `device` its tensors are there, and so
    are those of its executables. With the name of one of `devices`, or of a backend, as `profile`, fusion is chosen for
    that one. `tf32_products` and `tf32_convolutions` let libraries round f32 operands to TF32."""

class _Device(Protocol):
    """Where tensors are if not on the CPU; `oxidiff.device.Device` is one."""

    @property
    def backend(self) -> str:
        """The backend's name for it, such as `"cuda:0"`."""
    @property
    def dlpack(self) -> tuple[int, int]:
        """DLPack's kind and index of it."""
    def stream(self) -> int:
        """The handle of the stream that work is put on now."""
    def empty(self, shape: tuple[int, ...], dtype: dtype) -> Tensor:
        """A fresh tensor there."""

_Figures = tuple[str, float, float, float, int, float, float]

def devices() -> list[_Figures]:
    """GPUs of which figures are published: name, operations a second in f32 and in 16 bits, bytes a second, bytes of memory,
    seconds of a launch, operations a second in TF32."""

def device_named(name: str) -> str | None:
    """The name in `devices` of a GPU that people or its driver call so; `None` if there is none."""

def profile_of(backend: str) -> _Figures:
    """The figures that programs of a backend are chosen for: of a GPU those of `devices` if it is one of them, else what
    follows from the clocks and counts that its driver tells. Raises `NativeError` where the backend cannot be used."""

@final
class Executable:
    """A program with a weight set. Any number of threads may run one."""

    def __new__(cls, program: Program, weights: Sequence[Tensor]) -> Self:
        """Binds one tensor per weight slot, in slot order. Raises `NativeError` naming the first mismatches of shape,
        dtype or device."""
    def set_weights(self, weights: Sequence[Tensor], suspects: Set[int], since: int) -> bool:
        """Swaps the weight set, unless these are the same tensors with the same memory and content: false then. Running
        calls finish with the set they began with. Derived forms of tensors that did not change stay, and are shared with
        whoever else holds these tensors.

        `suspects` are ids of tensors that were written even if torch's version counter does not show it; `since` is a
        `stamp()` from before the changes were looked for."""
    def run(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[Tensor]:
        """Runs with these arguments, `sizes` being the values of the symbols in order. Fresh tensors come back. The GIL is
        released while kernels run."""
    def profile(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """One timed run: a dict per step (`step`, `kernel`, `module`, `dtype`, `seconds`, `flops`, `work`, `bytes`)."""
    def prepare(self, sizes: Sequence[int]) -> None:
        """Plans for these sizes, so that the next run at them starts at once. Raises as `run`."""
    def derived_bytes_for(self, sizes: Sequence[int]) -> int:
        """Bytes of derived weights that are held while these sizes run."""
    def stats(self) -> dict[str, Any]:
        """`specializations`, `derived_bytes`, `derived` (these bytes by an address of where they are kept, which programs
        may share), `arena_bytes` (of the largest live size), `arena_lower_bound_bytes`,
        `pool_bytes` (workspace of the process), `peak_bytes`, `graph_bytes`, `sizes`."""
    def unload(self) -> None:
        """Drops specializations, derived weights and the arena."""

def encode_artifact(sections: Sequence[tuple[str, bytes]]) -> bytes:
    """A file of named sections behind a checksum; see `src/store/artifact.rs`."""

def decode_artifact(data: bytes) -> dict[str, bytes]:
    """Its sections; raises `NativeError` if it is damaged or of another version."""

def read_file(path: str) -> bytes | None:
    """The content of a file, `None` if there is none; raises `NativeError` if it is too large or cannot be read."""

def write_file(path: str, data: bytes) -> None:
    """Replaces a file so that readers see the old content or the new one; raises `NativeError`."""

def is_whole(data: bytes) -> bool:
    """Whether these are the bytes of a whole file of machine code or of a plan of cuDNN, as the cache keeps them."""

def sweep_folder(folder: str) -> None:
    """Removes what killed writers left behind long ago."""

def cache_dir() -> PathLike[str] | None:
    """The folder of everything that is remembered between processes."""

@final
class FileLock:
    """A lock between processes, held from its making until `release` or the end of a `with` block."""

    def __new__(cls, path: str, patience_s: float = 2.0) -> Self:
        """Raises `NativeError` if somebody else keeps it."""
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class TuningSite:
    """A choice that a program leaves open: the form of a convolution, for a bucket of sizes. Forms are numbers; 0 is the
    direct one."""

    @property
    def op(self) -> str:
        """What is computed."""
    @property
    def bucket(self) -> str:
        """For which sizes."""
    @property
    def count(self) -> int:
        """How many steps of the program it is."""
    @property
    def kept(self) -> int:
        """How many of these read panels that are kept between runs; the others pack or transform the weight each time."""
    @property
    def flops(self) -> float:
        """Floating point operations of the direct form, once."""
    @property
    def expected(self) -> tuple[list[float], list[float]]:
        """By form, the time that the model expects where the weight is kept packed, and where every call packs it, in
        multiply-adds; infinite where a form does not apply."""
    @property
    def chosen(self) -> tuple[int, int]:
        """The forms that hold now, where the weight is kept packed and where every call packs it."""
    @property
    def installed(self) -> str | None:
        """The choice that was installed, `None` if the model decides."""
    def candidates(self) -> list[int]:
        """The forms that can be tried in the memory of one run."""
    def measure(self, candidate: int) -> tuple[float, float, int] | None:
        """Seconds of the run and of packing, and bytes used; `None` if its result is not right. The GIL is released."""
    @staticmethod
    def name(packed: int, per_call: int) -> str | None:
        """The text of a choice."""
    def install(self, choice: str) -> bool:
        """Makes a choice hold for this process; false if the text is none."""

def tuning_sites(program: Program, sizes: Sequence[int], weights: Sequence[Tensor] | None = None) -> list[TuningSite]:
    """What can be tuned at these sizes, each once. They are planned, and stay so for the next run. Of `weights`, the
    program's in slot order, trials read those for which they have no room of their own."""

@final
class DeviceSite:
    """A choice that a program on a GPU leaves open: the way to compute the steps that ask the same of a library. Ways are
    numbers; the last one is that of generated kernels."""

    @property
    def op(self) -> str:
        """What is computed, with a hash of everything that its time depends on."""
    @property
    def bucket(self) -> str:
        """For which sizes: those in `op`."""
    @property
    def key(self) -> tuple[str, str]:
        """The device with its driver, and the libraries: what a measurement depends on besides."""
    @property
    def count(self) -> int:
        """How many steps of the program it is."""
    @property
    def kept(self) -> int:
        """As `count`: weights are packed by nobody there."""
    @property
    def expected(self) -> tuple[list[float], list[float]]:
        """By way, its operations, twice: nothing else is known before it is tried."""
    @property
    def chosen(self) -> tuple[int, int]:
        """The way that holds now, twice."""
    @property
    def installed(self) -> str | None:
        """The choice that was installed, `None` if the library decides."""
    def candidates(self) -> list[int]:
        """The ways that are worth trying."""
    def ready(self, seconds: float) -> tuple[list[int], bool]:
        """The ways that can be tried, and whether that is all that work. Plans of libraries that they need are built first,
        by several threads; none is begun that is not expected to be done in so many seconds. The GIL is released."""
    def measure(self, candidate: int) -> tuple[float, float, int] | None:
        """Seconds of a run on random numbers, zero, and bytes used; `None` if the way does not work, needs too much memory
        or does not give what the library's own choice gives. The GIL is released."""
    def name(self, packed: int, per_call: int) -> str | None:
        """The text of a choice; the second way does not matter."""
    def install(self, choice: str) -> bool:
        """Makes a choice hold for specializations of this process to come; false if the text is none."""

def device_sites(program: Program, sizes: Sequence[int]) -> list[DeviceSite]:
    """What can be tuned at these sizes of a program on a GPU, each once. They are planned, and stay so for the next run."""

def forget_choices() -> None:
    """Forgets every installed choice."""

kernel_version: str

_Row = tuple[str, str, str, str, str, float, float, int, int]

@final
class TuningDatabase:
    """Measured choices in one SQLite file. A row is `(op, bucket, device, library, choice, seconds, default_seconds,
    workspace_bytes, measured_at)`."""

    def __new__(cls, path: str, *, read_only: bool = False) -> Self:
        """Opens or makes it; a damaged file is moved aside. Raises `NativeError`."""
    @property
    def complaint(self) -> str | None:
        """What was wrong with the file, if it was replaced or can only be read."""
    def entries(self) -> list[_Row]:
        """Every row, in the order of the keys."""
    def add(self, entries: Sequence[_Row]) -> None:
        """Adds rows in one transaction; of two for one key the later measurement stays."""
    def clear(self) -> None:
        """Removes every row."""

@final
class Tree:
    """What a module computes, read off its tree of submodules, and all that it was read from, held.

    Trees with the same fingerprint compute the same function of their tensors and arguments; tensors are then in the same
    order."""

    SKIPPED: ClassVar[list[str]]
    """Tables of `nn.Module` that do not change what a call under no_grad computes, or that are handled apart."""

    def __new__(
        cls,
        module: Module,
        base_of: Callable[[Module], Module | None],
        obstacle: Callable[[Module], str | None],
        around: Callable[[Module], tuple[Sequence[str], list[Any]] | None],
        is_plain: Callable[[type], bool],
        slots: Callable[[type], list[str]],
        adapter: type | None,
    ) -> Self:
        """Reads the tree. `base_of` gives the layer inside a LoRA layer and is asked of instances of `adapter`; `obstacle`
        says why the hooks of a module forbid a program; `around`, of a module with a registry of diffusers' hooks, which of
        its attributes are about what is around it, and what stands for them; `is_plain` whether the `__dict__` of
        instances is all the state they have; `slots` the names of slots of theirs that are read."""
    @property
    def form(self) -> bytes:
        """A digest of all but the values of its floats; some of it is addresses of what `kept` holds."""
    @property
    def floats(self) -> list[float]:
        """The floats in attributes, and in containers and objects there. Trees of the same form have as many."""
    def fingerprint(self, inputs: list[int]) -> bytes:
        """A digest of everything but the values of some floats, given by their indices in ascending order."""
    def place(self, at: int) -> tuple[Any, Any, str]:
        """The dictionary or list that has the float of this index, the key or index there, and its name."""
    @property
    def kept(self) -> list[Any]:
        """Objects whose identity is part of the fingerprint."""
    def is_listed_changed(self) -> bool:
        """Whether a list, set, array or slot in an attribute holds something else than when the tree was read."""
    def is_reclassed(self) -> bool:
        """Whether a module is of another class than when the tree was read."""
    @property
    def has_other_adapters(self) -> bool:
        """Whether there are adapters that are no plain LoRA."""
    @property
    def obstacle(self) -> tuple[str, str] | None:
        """Module path and reason if a hook on a submodule forbids a program."""
    @property
    def dicts(self) -> list[dict[Any, Any]]:
        """The dictionaries that were read."""
    @property
    def copies(self) -> list[dict[Any, Any]]:
        """What they held, where nothing else shows writes to them; else empty."""
    @property
    def own_tensors(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
    @property
    def tensors(self) -> list[Tensor]:
        """The same, then those of its adapters."""
    def modules(self) -> dict[str, Module]:
        """Modules by path, as if no LoRA was loaded: the layer inside for a LoRA layer."""
    def layers(self) -> dict[str, Module]:
        """LoRA layers by path."""
    def parents(self, dicts: Sequence[int]) -> list[str]:
        """Paths of the modules whose submodules are in one of these dictionaries (indices)."""
    def owners(self, dicts: Sequence[int]) -> list[str]:
        """Paths of the modules that one of these dictionaries (indices) is of, or in whose attributes it was met first."""
    def is_retyped(self) -> bool:
        """Whether one of its own tensors has another dtype, shape or device now."""
    def memory(self) -> tuple[bytes, tuple[tuple[int, type], ...]]:
        """How its own tensors lie in memory now: a digest of their orders and of what shares a storage, and the classes of
        those that are no plain tensors."""

@final
class Surroundings:
    """What code finds under names in files and classes, and in what it finds there, as it was when this object was made."""

    def __new__(
        cls,
        tables: Sequence[tuple[dict[Any, Any], Sequence[Any], Sequence[FunctionType]]],
        contents: Sequence[tuple[object | None, dict[Any, Any] | list[Any] | set[Any], Sequence[Any] | None]],
    ) -> Self:
        """Tables, each with the names that are read of it, whether they are there or not, and functions of the file, whose
        code may be changed in place when the file is loaded again. `contents` are dictionaries, lists and sets that are
        found there, a dictionary with the object of which it is the attributes, if it is, and the names that are read of
        it, if not all."""
    def is_changed(self) -> bool:
        """Whether something else is found now: another object that is no equal number or text."""
    def changed(self, with_code: bool) -> list[str]:
        """The names under which something else is found now, other than functions and classes unless `with_code`."""
    def forget_changed(self, with_code: bool, only: Sequence[str] | None = None) -> list[str]:
        """As `changed`, and of the names in files and classes `only` these. They are not looked at any more, by nobody who
        has this object: modules of one structure share it."""

@final
class Watch:
    """What a compiled module depends on, as it was when this object was made: dictionaries and tensors, held."""

    def __new__(cls, tree: Tree, tensors: Sequence[Tensor], surroundings: Surroundings | None = None) -> Self:
        """Of dictionaries, what they were when the tree was read; `tensors` are further ones. Raises `TypeError` where this
        interpreter or torch cannot be watched; see `is_available`."""
    @staticmethod
    def is_available() -> bool:
        """Whether the interpreter shows writes to dictionaries, and torch's tensors are laid out as expected."""
    def poll(self) -> int:
        """Bits of what may have changed since: 1 a dictionary, list or set was written, 2 a tensor was written or has other
        memory, 4 code finds something else outside of the module. Never 0 where something did, except for writes past
        torch's version counter (through `p.data`) that leave its first, middle and last eight bytes as they were."""
    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all of these are watched."""
    def changed_dicts(self) -> list[int]:
        """Indices of the dictionaries of the tree that were written."""
    def changed_tensors(self) -> list[int]:
        """Ids of the tensors that may have changed."""

def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> bytes | None:
    """The key of a call whose arguments are plain tensors, numbers, flags, strings, `None`, and tuples, lists and
    dictionaries of these; appends its tensors and numbers to `leaves`. Equal keys: the same nesting, types and flags, and
    tensors of the same dtypes, devices, sizes and strides, of which the same are one object. `None` for other arguments;
    then `leaves` holds some of them."""

def stamp() -> int:
    """A number larger than every one given before."""

def derived_bytes() -> int:
    """Bytes of all derived weights of this process."""

def set_num_threads(threads: int) -> None:
    """Threads of the CPU backend; 0 means one per core."""

def target() -> dict[str, Any]:
    """Instruction set, features and caches of this CPU."""

def cuda_findings(torch: str) -> list[tuple[str, bool, str]]:
    """Subject, whether it is there, and what was found or why not, for each NVIDIA library beside PyTorch and the device.

    `torch` is the folder of the `torch` package; the first call of a process decides where libraries are looked for.
    """

def cuda_open(index: int, torch: str) -> str:
    """Makes GPU `index` ready, with memory from torch's allocator, and says what it is; raises `NativeError` with the reason
    where it cannot be used. `torch` is as for `cuda_findings`."""

def cuda_emulate(driver: str, compile: Callable[[str, int], bytes], index: int) -> None:
    """For tests without a GPU: device `index` is what the stand-in `driver` says, `compile` makes of kernel text and compute
    capability what it loads, memory is the CPU's."""

def cuda_archs(torch: str) -> list[int]:
    """Compute capabilities (`80`, `90`, ...) that NVRTC compiles for; raises `NativeError` with the reason where it is not
    found. `torch` is as for `cuda_findings`."""

def cuda_kernels(program: Program) -> list[tuple[str, str]]:
    """Names and texts of the kernels that a GPU would run the program's plan with; none has to be there."""

def cuda_spills(texts: Sequence[str], arch: int, torch: str) -> list[tuple[str, int]]:
    """Compiles kernels' texts for a compute capability and gives each entry point with the bytes of registers that it
    spills; raises `NativeError` with the compiler's messages. The GIL is released. `torch` is as for `cuda_findings`."""

def cuda_graphs(
    program: Program, sizes: Sequence[int], arch: int
) -> list[tuple[int, list[tuple[str, list[int], list[int], bool]], list[str]]]:
    """The graphs that cuDNN is asked for first, of the program's steps at `sizes` for compute capability `arch`: number of
    the step, tensors (element type, sizes, strides, whether in memory), operations as text. No library has to be there."""

def cuda_plans(
    program: Program, sizes: Sequence[int], arch: int, steps: Sequence[int], device: str, driver: str, torch: str
) -> list[tuple[int, int | None, str]]:
    """For tests without a GPU: what cuDNN makes of steps of the program on a `device` that is described (as JSON), behind a
    stand-in for the `driver`: number of the step, which of its forms (0 is all of it) and the library; or nothing, and why.
    The GIL is released. `torch` is as for `cuda_findings`."""

def fill_cells() -> None:
    """Looks up in Python what is looked up once, before any thread makes a call: a process that is forked while one does
    would wait for it for ever."""

def is_on(name: str) -> bool:
    """Whether that flag of the environment is on now."""

def knobs() -> list[tuple[str, str, str, str | None]]:
    """Name, default and meaning of every environment variable that is read, and what is wrong with its value."""

def kernels() -> list[dict[str, Any]]:
    """Every kernel of the registry: `name`, `family`, `isa`, `dtype`, `is_available`, and `benches`, what it is measured on:
    `op`, `sizes`, `flops`, `bytes`."""

@final
class KernelBench:
    """A kernel with operands of the sizes of one of its benches."""

    def __new__(cls, kernel: str, bench: int) -> Self:
        """Raises `NativeError` if there is no such kernel or bench here."""
    def run(self) -> float:
        """Calls the kernel once and gives the seconds it took. The GIL is released."""

def ceilings() -> dict[str, Any]:
    """What this machine does at most at the present number of threads, measured once in about 50 ms: `isa`, `threads`,
    `f32_flops`, `bf16_dot_flops`, `f16_flops`, `int8_ops` and, with AMX, `bf16_amx_flops`, `f16_amx_flops`, `int8_amx_ops`
    (0 where there is no such instruction), `memory` and `cache` with `working_set`, `read`, `copy` and `stream_copy` in
    bytes per second, and `l2_bytes` (of a core) and `l3_bytes` (that it has a part of)."""
