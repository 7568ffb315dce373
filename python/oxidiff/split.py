"""A module that cannot be captured whole, in the pieces that Dynamo finds between its graph breaks.

Control flow that depends on data, a value read into Python, a result that is no tensor: Python runs these, and what
lies between them is compiled. A piece that cannot be compiled either runs as Dynamo captured it.

Threads: Dynamo compiles under a lock of its own; the list of pieces only grows.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from .errors import CaptureError, Error
from .island import Island, Turns

if TYPE_CHECKING:
    from .dispatch import Dispatcher

__all__ = ["EAGER", "RUNS_EAGER", "RUNS_EAGER_ONCE", "Split"]

RUNS_EAGER = "runs in eager PyTorch"
RUNS_EAGER_ONCE = f"{RUNS_EAGER} in this call, and is tried again in the next"
EAGER = (RUNS_EAGER, RUNS_EAGER_ONCE)
"""What is said of a call of which nothing ran compiled."""


class Split:
    """What stands for a ``forward`` that has no program of its own.

    Args:
        forward: The function.
        dynamic: Whether sizes vary from call to call.
        make: Makes the dispatcher of a piece: ``make(module, report=...)``.

    Attributes:
        pieces: The dispatchers of all pieces found so far.
    """

    def __init__(self, forward: Callable[..., Any], dynamic: bool, make: Callable[..., Dispatcher]) -> None:
        # Dynamo takes longer to import than everything else here together, and most modules are captured whole.
        from torch._dynamo.exc import TorchDynamoException

        _limits.watch()
        _set_device_guard()
        self._failure = TorchDynamoException
        self.pieces: list[Dispatcher] = []
        self._make = make
        self._local = threading.local()
        # Dynamo keeps what it compiled, and the backend, with the code of functions, longer than anyone else keeps the
        # module; hence the weak references here and in `_compile`. What it keeps runs only while this object lives.
        compile_piece = weakref.WeakMethod(self._compile)

        def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            method = compile_piece()
            assert method is not None, "Dynamo compiles during a call"
            return method(graph, examples)

        self._run = torch.compile(_with_own_code(forward), backend=backend, dynamic=True if dynamic else None)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int, list[tuple[Error, str]]]:
        """The result of a call, how many pieces ran compiled, and what ran eager and why.

        Raises:
            CaptureError: Dynamo itself failed, or runs what it compiled for another module; nothing can be said about the
                call.
        """
        local = self._local
        local.compiled, local.problems = 0, []
        outside = getattr(local, "runs", False)
        local.runs = True
        told, _limits.problems = _limits.problems, local.problems
        try:
            return self._run(*args, **kwargs), local.compiled, local.problems
        except self._failure as error:
            raise CaptureError(f"Dynamo cannot split it: {str(error).splitlines()[0]}") from error
        finally:
            local.runs = outside
            # Dynamo keeps what it compiled, and errors hold where they were raised, the module among it.
            local.problems = []
            _limits.problems = told

    def _compile(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        island = Island(graph, examples)
        local = self._local
        piece = self._make(island, report=lambda error, what: local.problems.append((error, what)))
        self.pieces.append(piece)
        held, turns = weakref.ref(piece), Turns()

        def run(*args: Any) -> Any:
            piece = held()
            # Of code that it compiled too often Dynamo runs what it has, whoever's: of another module, which may be gone.
            if piece is None or not getattr(local, "runs", False):
                raise CaptureError(
                    "Dynamo has compiled too many modules of this class: torch._dynamo.reset() forgets them"
                )
            before = len(local.problems)
            with turns.holding(cast(Island, piece.module), args) as passed:
                result = piece(tuple(passed), {})
            local.compiled += not any(what in EAGER for _, what in local.problems[before:])
            return result

        return run


@functools.cache
def _set_device_guard() -> None:
    """Has PyTorch set what stands for CUDA's device guard where there is no device, in a thread that does not end: Dynamo
    does it in whichever comes first, and the next one to do so crashes once that is gone (torch 2.11)."""
    if not torch.cuda._is_compiled() or torch.cuda.is_available():
        return
    is_set = threading.Event()

    def stay() -> None:
        try:
            torch._C._ensureCUDADeviceGuardSet()
        finally:
            is_set.set()
        threading.Event().wait()

    if threading.current_thread() is threading.main_thread():
        torch._C._ensureCUDADeviceGuardSet()
    else:
        threading.Thread(target=stay, name="oxidiff-device-guard", daemon=True).start()
        is_set.wait()


class _Limits(threading.local):
    """Where a call of this thread is told that Dynamo compiled a function so often that it will no more, and runs it eager
    for all else. Dynamo says so in its log alone, once."""

    problems: list[tuple[Error, str]] | None = None

    def watch(self) -> None:
        """Reads Dynamo's log from now on."""
        log = logging.getLogger("torch._dynamo.convert_frame")
        if _log_reader not in log.handlers:
            log.addHandler(_log_reader)


class _LogReader(logging.Handler):
    """Passes on what Dynamo says of such a limit: its name, its value, the function and where that is."""

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args
        if _limits.problems is None or not isinstance(args, tuple) or len(args) < 3 or "limit" not in str(args[0]):
            return
        reason = f"Dynamo has compiled {args[2]} {args[1]} times (torch._dynamo.config.{args[0]})"
        _limits.problems.append((CaptureError(reason), f"{RUNS_EAGER} for what it was not compiled for"))


_limits = _Limits()
_log_reader = _LogReader(logging.WARNING)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same method with a copy of its code: Dynamo compiles a code object a few times only, and all modules of a class
    share one."""
    method = getattr(forward, "__func__", None)
    if not isinstance(method, types.FunctionType):
        return forward
    code = method.__code__.replace()
    copy = types.FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return types.MethodType(copy, cast(types.MethodType, forward).__self__)
