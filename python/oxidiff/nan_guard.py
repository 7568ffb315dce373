"""Running again in f32 where f16 overflows, for ``nan_guard=True``.

The largest f16 is 65504. What a model computes on its way may be larger (SDXL's VAE, some text encoders), and is then
infinite; a norm or a softmax makes NaN of that, and the picture is black. A :class:`Guarded` program looks at its results:
if they are not finite although its arguments are, the call runs again with f32 for every f16 value inside the program,
and so do all calls after it.

What overflows and does not reach a result is not seen. Values between two programs (around an op that runs eager) keep
their type.

Threads: any number may run one; programs and weights are swapped under a lock of the process.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._native import Executable, Program
from .device import is_captured
from .errors import caller_level

if TYPE_CHECKING:
    from .family import Captured

__all__ = ["Guarded", "Notice", "all_finite", "reset_lock"]

_lock = threading.Lock()
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def all_finite(values: Iterable[Any]) -> bool:
    """Whether there is neither NaN nor infinity among the elements of these tensors; what is no tensor of floats is left
    out. Waits for the tensors' device."""
    for value in values:
        if isinstance(value, Tensor) and value.dtype in _FLOATS and value.numel():
            # NaN is the least and the greatest.
            if not all(math.isfinite(bound.item()) for bound in value.detach().aminmax()):
                return False
    return True


class Notice:
    """Says once that a module goes on in f32. It does not hold what holds it: programs go when their module does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_told = False

    def tell(self) -> None:
        """Warns, the first time."""
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{self._name}: a result is not finite in float16; between its float16 arguments and results it computes in "
                "float32 from now on",
                RuntimeWarning,
                stacklevel=caller_level(),
            )


class Guarded:
    """A program with weights, as :class:`~oxidiff._native.Executable`, that goes on in f32 once a result is not finite.

    Args:
        captured: The program.
        tensors: Its weights, one per slot.
        notice: Tells when it begins to.
    """

    def __init__(self, captured: Captured, tensors: Sequence[Tensor], notice: Notice) -> None:
        self._captured = captured
        self._tensors = tensors
        self._notice = notice
        self.is_wide = False
        """Whether it runs in f32."""
        self.program: Program = captured.program
        """What it runs now."""
        self._executable = Executable(self.program, tensors)

    def set_weights(self, tensors: Sequence[Tensor], suspects: Set[int], since: int) -> bool:
        """See ``_native.Executable.set_weights``."""
        with _lock:
            self._tensors = tensors
            return self._executable.set_weights(tensors, suspects, since)

    def run(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[Tensor]:
        """See ``_native.Executable.run``."""
        is_wide, executable = self.is_wide, self._executable
        results = executable.run(inputs, sizes)
        # Nobody can look at what is only recorded now.
        if is_wide or is_captured(results) or all_finite(results) or not all_finite(inputs):
            return results
        self._widen()
        return self._executable.run(inputs, sizes)

    def _widen(self) -> None:
        program = self._captured.widened()
        with _lock:
            if self.is_wide:
                return
            self._executable = Executable(program, self._tensors)
            self.program, self.is_wide = program, True
        self._notice.tell()

    def profile(self, inputs: Sequence[Tensor | int | float], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """See ``_native.Executable.profile``."""
        return self._executable.profile(inputs, sizes)

    def prepare(self, sizes: Sequence[int]) -> None:
        """See ``_native.Executable.prepare``."""
        self._executable.prepare(sizes)

    def derived_bytes_for(self, sizes: Sequence[int]) -> int:
        """See ``_native.Executable.derived_bytes_for``."""
        return self._executable.derived_bytes_for(sizes)

    def stats(self) -> dict[str, Any]:
        """See ``_native.Executable.stats``."""
        return self._executable.stats()

    def unload(self) -> None:
        """See ``_native.Executable.unload``."""
        self._executable.unload()


def reset_lock() -> None:
    """In a child process: another thread of the parent may have held the lock, which nobody would ever release here."""
    global _lock
    _lock = threading.Lock()
