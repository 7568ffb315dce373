"""The CUDA backend without a GPU, from Python: a driver that runs kernels on this processor, kernels compiled by g++, and
a device whose tensors are torch's CPU tensors. The same as `tests/cuda/emulator.rs` has for Rust.

Only for a process of its own: the driver found first is the process's driver.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from oxidiff import _native, device

_ROOT = Path(__file__).parents[2]
_COUNTS = ("launches", "graphs", "graph_launches", "updates", "allocations", "frees", "waits", "writes", "unloads")
_COLLECTIVES = re.compile(r"__sync|__shfl|block_sum|block_max|row_sum|row_max|warp_sum|warp_max")


class NoCompilerError(Exception):
    """There is no g++, or it does not compile what it is given."""


_INFO = Path("/proc/cpuinfo")
_HAS_FMA = _INFO.exists() and " fma " in _INFO.read_text()
_KERNEL = ("-O1", "-fno-gnu-unique", *(("-mfma", "-ffp-contract=off") if _HAS_FMA else ()))
"""How kernels are compiled: as `tests/cuda/emulator.rs` does it."""


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompilerError(f"no g++: {error}") from None
    if done.returncode:
        raise NoCompilerError(done.stderr[:4000])


@functools.cache
def _kept() -> Path:
    """Where g++'s results are kept for the next process: a folder for each state of the sources, which `cargo clean`
    removes."""
    state = hashlib.sha256(Path(__file__).read_bytes() + " ".join(_KERNEL).encode())
    for file in sorted((_ROOT / "tests/cuda").iterdir()):
        if file.is_file():
            state.update(file.read_bytes())
    target = Path(os.environ.get("CARGO_TARGET_DIR") or _ROOT / "target")
    folder = target / "tmp/emulator" / f"python-{state.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(made: Path, source: Path, *options: str) -> Path:
    """What g++ makes of ``source``, unless an earlier process has made it. Several may make it at once: it comes by a
    rename."""
    if not made.exists():
        making = made.with_name(f"{made.name}.{os.getpid()}-{threading.get_ident()}")
        _run(["g++", "-std=c++17", "-fPIC", "-fwrapv", "-w", "-o", str(making), str(source), *options])
        making.rename(made)
    return made


def driver(folder: Path, *options: str) -> Path:
    """The stand-in driver, under the name that the driver has."""
    name = hashlib.sha256(repr(options).encode()).hexdigest()[:16]
    options = ("-shared", "-O1", "-Wl,-soname,libcuda.so.1", "-ldl", *options)
    made = _build(_kept() / f"driver-{name}.so", _ROOT / "tests/cuda/fake_driver.cpp", *options)
    library = folder / "libcuda.so.1"
    shutil.copy(made, library)
    return library


@functools.cache
def _shim() -> tuple[str, str]:
    """What to include for `shim.h`, beside which lies what g++ made of it before and reads instead, and the library that
    runs the threads."""
    compiled = _build(_kept() / "shim.h.gch", _ROOT / "tests/cuda/shim.h", *_KERNEL)
    library = _build(_kept() / "libshim.so", _ROOT / "tests/cuda/shim.cpp", "-shared", "-O2")
    return str(compiled.with_suffix("")), str(library)


_folder = tempfile.TemporaryDirectory()


@functools.cache
def _driver_of_this_process() -> Path:
    """A library once opened stays, and its devices know of each other."""
    return driver(Path(_folder.name))


class StandIn:
    """A device as :class:`oxidiff.device.Device` is one, whose memory is this process's.

    Attributes:
        captured: Whether its streams are being captured.
        waits: How often all of it was waited for.
    """

    device = torch.device("cpu")
    dlpack = (1, 0)
    name = "a stand-in"

    def __init__(self, index: int = 0) -> None:
        self.backend = f"cuda:{index}"
        self._index = index
        self._folder = tempfile.TemporaryDirectory()
        self._thread = threading.local()
        self.captured = False
        self.waits = 0
        library = _driver_of_this_process()
        self.driver = ctypes.CDLL(str(library))
        self.driver.fake_count.restype = self.driver.fake_launched.restype = ctypes.c_long
        self.driver.fake_waited.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.driver.fake_own.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
        self.driver.fake_disown.argtypes = [ctypes.c_uint64]
        prelude = (_ROOT / "src/codegen/cuda/prelude.cuh").read_text()
        self._device_part = prelude.split("// OX_DEVICE\n")[1].split("// OX_END_DEVICE")[0]
        _native.cuda_emulate(str(library), self._compile, index)

    def stream(self) -> int:
        return getattr(self._thread, "stream", 0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def is_capturing(self) -> bool:
        return self.captured

    def tf32(self) -> tuple[bool, bool]:
        return device.tf32()

    def synchronize(self) -> None:
        self.waits += 1

    @contextmanager
    def on_stream(self, handle: int) -> Iterator[None]:
        before, self._thread.stream = self.stream(), handle
        try:
            yield
        finally:
            self._thread.stream = before

    @contextmanager
    def capture(self, handle: int = 0xC0) -> Iterator[None]:
        """Calls are on this stream, which is captured as ``torch.cuda.graph`` does it. What was captured never runs: memory
        of the CPU does not stay for a graph, as that of torch's GPU allocator does."""
        graph = ctypes.c_void_p()
        stream = ctypes.c_void_p(handle)
        with self._entered():
            assert self.driver.cuStreamBeginCapture_v2(stream, 0) == 0
        self.captured = True
        try:
            with self.on_stream(handle):
                yield
        finally:
            self.captured = False
            with self._entered():
                ended = self.driver.cuStreamEndCapture(stream, ctypes.byref(graph))
                if graph.value is not None:
                    self.driver.cuGraphDestroy(graph)
        assert ended == 0, "something ended the capture"

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Its context is current meanwhile."""
        before = ctypes.c_void_p(self.context())
        self.driver.fake_enter(self._index)
        try:
            yield
        finally:
            self.driver.cuCtxSetCurrent(before)

    @contextmanager
    def owning(self, *tensors: Tensor) -> Iterator[None]:
        """The tensors' memory is this device's alone meanwhile."""
        for tensor in tensors:
            self.driver.fake_own(tensor.data_ptr(), tensor.nbytes, self._index)
        try:
            yield
        finally:
            for tensor in tensors:
                self.driver.fake_disown(tensor.data_ptr())

    def launched(self) -> int:
        """Launches of kernels and graphs on this device."""
        return int(self.driver.fake_launched(self._index))

    def count(self, what: str) -> int:
        return int(self.driver.fake_count(_COUNTS.index(what)))

    def has_waited(self, before: int, after: int) -> bool:
        """Whether stream ``after`` was made to wait for stream ``before``."""
        return bool(self.driver.fake_waited(before, after))

    def context(self) -> int | None:
        """What is current in this thread."""
        current = ctypes.c_void_p()
        self.driver.cuCtxGetCurrent(ctypes.byref(current))
        return current.value

    def _compile(self, source: str, arch: int) -> bytes:
        text = self._host_source(source)
        made = _kept() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            file = Path(folder, "kernels.cpp")
            file.write_text(text)
            header, library = _shim()
            options = ("-shared", "-nodefaultlibs", *_KERNEL, "-include", header, library)
            return _build(made, file, *options).read_bytes()

    def _host_source(self, source: str) -> str:
        """Kernel text as C++: the shim in place of the prelude's device part, and a door to each entry point."""
        text = [source.replace(self._device_part, "")]
        for line in re.findall(r'^extern "C" __global__ .*', source, re.MULTILINE):
            head, params = line.split(") {")[0].rsplit("(", 1)
            name = head.rsplit(" ", 1)[1]
            start = source.find(f" {name}(")
            body = source.find(f"{name.removesuffix('_v')}_body(")
            end = source.find('\nextern "C"', start)
            text_of = source[min(start, body if body >= 0 else start) : end if end >= 0 else None]
            is_collective = "true" if _COLLECTIVES.search(text_of) else "false"
            types = [param.rsplit(" ", 1)[0] for param in params.split(", ")]
            sizes = "".join("4" if kind == "float" else "8" for kind in types)
            arguments = ", ".join(f"*({kind}*)args[{i}]" for i, kind in enumerate(types))
            text.append(
                f"static void door_{name}(void** args) {{ {name}({arguments}); }}\n"
                f'extern "C" const char parameters_{name}[] = "{sizes}";\n'
                f'extern "C" void emulate_{name}(const unsigned* g, const unsigned* b, unsigned s, void** args,'
                " unsigned seed) {\n    dim3 grid, block;\n    grid.x = g[0], grid.y = g[1], grid.z = g[2];\n"
                "    block.x = b[0], block.y = b[1], block.z = b[2];\n"
                f"    device::run(door_{name}, {is_collective}, grid, block, s, args, seed);\n}}"
            )
        return "\n".join(text)


_made: dict[int, StandIn | NoCompilerError] = {}


def stand_in(index: int = 0) -> StandIn:
    """The stand-in of this process for device ``index``, of two."""
    if index not in _made:
        try:
            _made[index] = StandIn(index)
        except NoCompilerError as error:
            _made[index] = error
    made = _made[index]
    if isinstance(made, NoCompilerError):
        raise made
    return made


@contextmanager
def in_use(made: StandIn) -> Iterator[None]:
    """Programs for CPU tensors are compiled for the stand-in meanwhile."""
    with mock.patch.dict(device._devices, {made.device: made}):
        yield
