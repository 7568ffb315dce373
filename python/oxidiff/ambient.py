"""What surrounds a call: modes of the process that a program depends on, and inputs that no program takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from .autocast import autocast_state
from .device import device_of, tf32
from .errors import UnsupportedError

__all__ = [
    "ASKED",
    "ambient_mode",
    "collection_paused",
    "of_process",
    "reset_pause",
    "tensor_obstacle",
    "thread_modes_as",
]

_C = torch._C
_len_dispatch_stack = _C._len_torch_dispatch_stack
_len_function_stack = _C._len_torch_function_stack
_is_any_autocast_enabled = _C._is_any_autocast_enabled


def ambient_mode() -> tuple[Any, ...] | str:
    """The ambient state that a program depends on, or why no program may run under it."""
    is_usual = not (_len_dispatch_stack() or _len_function_stack() or _is_any_autocast_enabled())
    if not is_usual and (reason := _obstacle()) is not None:
        return reason
    if _C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if _C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    mode = torch.get_default_dtype(), *tf32()
    return mode if is_usual else (*mode, *autocast_state(), _len_function_stack() > 0)


def _sdp_kernels() -> tuple[bool, ...]:
    return (
        _C._get_flash_sdp_enabled(), _C._get_mem_efficient_sdp_enabled(), _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
    )  # fmt: skip


def _backends_enabled() -> tuple[bool, ...]:
    return _C._get_cudnn_enabled(), _C._get_mkldnn_enabled()


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(map(torch.get_autocast_dtype, ("cpu", "cuda")))


ASKED: Mapping[str, Callable[[], Any]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "fill_uninitialized_memory": _C._get_deterministic_fill_uninitialized_memory,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "allow_tf32": tf32,
    "fp32_precision": tf32,
    "flash_sdp_enabled": _sdp_kernels,
    "mem_efficient_sdp_enabled": _sdp_kernels,
    "math_sdp_enabled": _sdp_kernels,
    "cudnn_sdp_enabled": _sdp_kernels,
    "deterministic": _C._get_cudnn_deterministic,
    "benchmark": _C._get_cudnn_benchmark,
    "enabled": _backends_enabled,
    "get_num_threads": torch.get_num_threads,
    "get_autocast_dtype": _autocast_dtypes,
    "get_autocast_cpu_dtype": _autocast_dtypes,
    "get_autocast_gpu_dtype": _autocast_dtypes,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
}
"""By the name in code that asks, modes of torch that change nothing of what a program computes but where ``forward`` asks,
with what says how they are. They are part of the key of the calls of modules whose own code has that name."""


_OF_THREADS = (torch.is_grad_enabled, torch.is_inference_mode_enabled)
"""What :func:`thread_modes_as` has as it was in another thread."""


def of_process(asked: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Those of these modes that are of the whole process: another thread would find them as they are by then."""
    return [ask for ask in asked if ask not in _OF_THREADS]


@contextmanager
def thread_modes_as(is_grad_enabled: bool, is_inference: bool) -> Iterator[None]:
    """What is computed for gradients, as it was in another thread."""
    with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad_enabled):
        yield


def _obstacle() -> str | None:
    if _len_dispatch_stack():
        return "a torch dispatch mode is active"
    for i in range(_len_function_stack()):
        mode = _C._get_function_stack_at(i)
        if type(mode) is not DeviceContext or mode.device.type != "cpu":
            return f"a torch function mode is active ({type(mode).__name__})"
    return None


_SUPPORTED = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.complex64, torch.complex128, torch.complex32,
    }
)  # fmt: skip


def tensor_obstacle(tensor: Tensor) -> str | None:
    """Why no program takes this argument."""
    try:
        device_of(tensor.device)
    except UnsupportedError as error:
        return str(error)
    if tensor.is_quantized or tensor.dtype not in _SUPPORTED:
        return f"there is no kernel for arguments of {tensor.dtype}"
    if tensor.numel() == 0:
        return "an argument has no elements"
    return None


class _Paused:
    """Who is in :func:`collection_paused`, and whether the first of them found the collector on."""

    lock = threading.RLock()
    inside: set[object] = set()  # noqa: RUF012
    was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python's cyclic garbage collector from running meanwhile.

    Looking at a module and reading or capturing a graph make tens of thousands of objects that stay. They would set off
    full collections, each of which walks everything that torch and diffusers hold: a quarter of a second that a restart
    has not got.
    """
    own = object()
    try:
        with _Paused.lock:
            if not _Paused.inside:
                _Paused.was_enabled = gc.isenabled()
            _Paused.inside.add(own)
            gc.disable()
        yield
    finally:
        with _Paused.lock:
            # No call until the collector is on: an interrupt comes after one.
            _Paused.inside -= {own}
            if not _Paused.inside and _Paused.was_enabled:
                _Paused.was_enabled = False
                gc.enable()


def reset_pause() -> None:
    """In a child process: threads of the parent that paused the collector are not there to go on."""
    _Paused.lock = threading.RLock()
    _Paused.inside.clear()
    if _Paused.was_enabled:
        _Paused.was_enabled = False
        gc.enable()
