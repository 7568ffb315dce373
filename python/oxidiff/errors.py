"""The exceptions of this package: one class per cause, all below :class:`Error`.

The extension raises one exception, ``_native.NativeError(kind, message, module, op)``; :func:`from_native` turns it
into the class of its cause. Nothing else in the package looks at the kind.
"""

from __future__ import annotations

import dis
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator

import torch

__all__ = [
    "ArtifactError",
    "BackendError",
    "CacheError",
    "CacheWarning",
    "CaptureError",
    "CheckError",
    "Error",
    "FallbackWarning",
    "OutOfMemoryError",
    "ShapeError",
    "UnsupportedError",
    "caller_level",
    "chain_of",
    "from_native",
    "is_interrupt",
    "replaced_interrupt",
    "without_frames",
]


class Error(RuntimeError):
    """Base of everything this package raises on its own account."""


class CaptureError(Error):
    """A module cannot be traced into a graph: data-dependent control flow, random ops, side effects.

    ``module`` is the path of the submodule and ``op`` the ATen op where it happened, empty if not known; ``trail`` is what
    the capture may learn from it.
    """

    trail: object = None

    def __init__(self, message: str, *, module: str = "", op: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.op = op


class UnsupportedError(CaptureError):
    """An op, or an argument of an op, that the compiler does not know."""


class ShapeError(Error):
    """Sizes that do not fit the program or each other."""


class BackendError(Error):
    """A device backend is missing something or failed."""


class OutOfMemoryError(Error):
    """Device or host memory did not suffice; the message says how many bytes were asked for."""


class ArtifactError(Error):
    """A saved program is damaged, of another version or of another module."""


class CacheError(Error):
    """The on-disk cache cannot be used."""


class CheckError(Error):
    """A compiled result differs from eager by more than the tolerance."""


class CacheWarning(UserWarning):
    """A file of the cache cannot be used or written; everything works, but is compiled anew at the next start."""


class FallbackWarning(UserWarning):
    """Something runs in eager PyTorch instead of compiled code; the message says what, where and why."""


_PACKAGE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def caller_level() -> int:
    """The stack level of the code that called the module, for a warning raised by the caller of this function."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        frame = frame.f_back
        level += 1
    return level


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception has nothing to do with what it was raised in: Ctrl-C was pressed, a handler of a signal raised
    it (a limit of time, the end of the process), or another thread did. Such a handler is called with the frame that it
    interrupts."""
    if isinstance(error, KeyboardInterrupt) or _is_of_another_thread(error):
        return True
    if not _can_be_interrupted():
        # The arguments of a frame are all its variables, which it keeps from then on.
        return False
    entry = error.__traceback__
    while entry is not None and (inner := entry.tb_next) is not None:
        names, others, _, held = inspect.getargvalues(inner.tb_frame)
        given = [held.get(name) for name in names] + list(held.get(others, ()) if others else ())
        if any(value is entry.tb_frame for value in given):
            return True
        entry = inner
    return False


def _is_of_another_thread(error: BaseException) -> bool:
    """Whether another thread raised it here, by ``PyThreadState_SetAsyncExc``, as limits of time for threads do: a class
    that Python code defined, raised where no code raises anything. Of other classes nothing tells."""
    kind, entry = type(error), error.__traceback__
    module = sys.modules.get(kind.__module__)
    is_python = module is not None and (getattr(module, "__file__", None) or ".py").endswith(".py")
    if not is_python or kind.__module__.partition(".")[0] in _RAISED_BELOW or entry is None:
        return False
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    if code.co_filename.startswith(_PACKAGE + "capture") or code.co_flags & _CAN_BE_THROWN_INTO:
        return False
    return dis.opname[code.co_code[entry.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


_CAN_BE_THROWN_INTO = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_RAISED_BELOW = frozenset(("builtins", "numpy", "torch", __name__.partition(".")[0], *sys.stdlib_module_names))
"""Packages whose exceptions code that is not Python raises."""


def chain_of(error: BaseException | None, outer: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it took the place of, up to the one that was being handled before all of them."""
    while error is not None and error is not outer:
        yield error
        error = error.__context__


def without_frames(error: BaseException) -> None:
    """Before an exception is kept: it and those that it was raised from forget where that was, which holds all that was
    there."""
    chained: BaseException | None = error
    seen: set[int] = set()
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__


def replaced_interrupt(error: BaseException, outer: BaseException | None) -> BaseException | None:
    """The interrupt in whose stead an exception was raised, as while a ``with`` statement ended.

    Args:
        error: The exception.
        outer: What was being handled before.
    """
    return next((found for found in chain_of(error, outer) if is_interrupt(found)), None)


def _can_be_interrupted() -> bool:
    """Whether a signal has a handler in Python that may raise something in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


_OF_KIND: dict[str, type[Error]] = {
    "invalid": Error,
    "unsupported": UnsupportedError,
    "shape": ShapeError,
    "verify": BackendError,
    "parse": ArtifactError,
    "backend": BackendError,
    "out_of_memory": OutOfMemoryError,
    "artifact": ArtifactError,
    "cache": CacheError,
}


def from_native(error: BaseException) -> Error:
    """The exception of this module for one that the extension raised, with its cause attached.

    Args:
        error: A ``NativeError`` with the arguments ``(kind, message, module, op)``; other exceptions become a plain
            :class:`Error` with their type in the message.
    """
    if isinstance(error, Error):
        return error
    text = [str(part) for part in error.args]
    if isinstance(error, MemoryError):
        translated: Error = OutOfMemoryError(
            str(error) or "out of memory; try a smaller size or batch, or memory='low'"
        )
    elif isinstance(error, OverflowError):
        translated = UnsupportedError(f"a number of more than 64 bits: {error}")
    elif type(error).__name__ != "NativeError" or len(text) < 2:
        translated = Error(f"internal: {type(error).__name__}: {error}")
    else:
        kind, message, module, op = [*text, "", ""][:4]
        cls = _OF_KIND.get(kind, Error)
        translated = cls(message, module=module, op=op) if issubclass(cls, CaptureError) else cls(message)
    translated.__cause__ = error
    return translated
