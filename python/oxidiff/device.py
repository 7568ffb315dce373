"""Where a module's tensors are, and what programs there ask torch for.

On the CPU that is nothing. On an NVIDIA GPU a :class:`Device` answers: torch's current stream, to which every call's work
goes; tensors of torch's own for results; whether the stream is being captured. Workspace and derived weights come from
torch's allocator too, through the DLPack C exchange API (``src/python/memory.rs``), so that they show in
``torch.cuda.memory_allocated``. Tests register a stand-in with the same methods.

A device that cannot be used (no driver, an old one, an old GPU, a library that is missing) is a reason, found out once
per process; its modules run eager.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _native
from .errors import UnsupportedError, from_native

__all__ = ["Device", "device_of", "is_captured", "named", "no_gpu", "tf32"]

_DLPACK_CUDA = 2
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
"""What ``fp32_precision`` of torch's backends asks, four times as fast."""


def tf32() -> tuple[bool, bool]:
    """Whether eager may round f32 operands of matrix products on a GPU, and of convolutions, to TF32.

    All switches of torch end there: ``fp32_precision`` of a backend or of all, ``allow_tf32``,
    ``set_float32_matmul_precision``. What the last two say themselves is no answer: it raises once both kinds were used.
    """
    if _precision is not None:
        return _precision("cuda", "matmul") == "tf32", _precision("cuda", "conv") == "tf32"
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision == "tf32", backends.cudnn.conv.fp32_precision == "tf32"


class Device:
    """What programs on one NVIDIA GPU ask of torch.

    Attributes:
        device: The device.
        backend: The backend's name for it.
        dlpack: DLPack's kind and index of it.
        name: What it is.

    Raises:
        NativeError: It cannot be used; says why.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.backend = f"cuda:{index}"
        self.dlpack = (_DLPACK_CUDA, index)
        self.name = _native.cuda_open(index, os.path.dirname(torch.__file__))
        self._index = index

    def stream(self) -> int:
        """The handle of torch's current stream there."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        return handle

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fresh tensor of torch's own, allocated for that stream.

        Raises:
            MemoryError: There is no room for it.
        """
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def is_capturing(self) -> bool:
        """Whether that stream is being captured into a CUDA graph."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def tf32(self) -> tuple[bool, bool]:
        """As :func:`tf32`."""
        return tf32()

    def synchronize(self) -> None:
        """Waits for everything on the device."""
        torch.cuda.synchronize(self.device)


_devices: dict[torch.device, Device | str] = {}
"""The devices that were asked for, or why they cannot be used. Guarded by the lock; read without."""
_lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def device_of(device: torch.device) -> Device | None:
    """What programs on a device ask; ``None`` for the CPU.

    Raises:
        UnsupportedError: No program runs there; says why.
    """
    found = _devices.get(device)
    if found is None:
        if device.type == "cpu":
            return None
        with _lock:
            found = _devices.get(device)
            if found is None:
                found = _devices[device] = _open(device)
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def _open(device: torch.device) -> Device | str:
    if device.type != "cuda":
        return f"there is no backend for tensors on {device}"
    if torch.version.cuda is None:
        return f"{device} is not an NVIDIA GPU"
    try:
        return Device(torch.cuda.current_device() if device.index is None else device.index)
    except _native.NativeError as error:
        return f"{device} cannot be used: {from_native(error)}"
    except (AssertionError, RuntimeError) as error:
        return f"{device} cannot be used: {str(error).partition(chr(10))[0]}"


def named(device: torch.device | str | int) -> torch.device:
    """A device by its name.

    Raises:
        UnsupportedError: There is none of this name.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(f"there is no device {device!r}: {str(error).partition(chr(10))[0]}") from None


def is_captured(leaves: Iterable[Any]) -> bool:
    """Whether work on these tensors' device is recorded into a CUDA graph now, and done later."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found = _devices.get(leaf.device)
            if found is not None and not isinstance(found, str):
                return found.is_capturing()
            if leaf.is_cuda:
                with torch.cuda.device(leaf.device):
                    return torch.cuda.is_current_stream_capturing()
    return False


def no_gpu() -> str | None:
    """Why no program can run on the first NVIDIA GPU; ``None`` if one can."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is false: no NVIDIA GPU, or no driver for it"
    try:
        device_of(torch.device("cuda", 0))
    except UnsupportedError as error:
        return str(error)
    return None
