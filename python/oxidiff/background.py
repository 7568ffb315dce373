"""The thread in which modules with ``background=True`` are compiled, one after the other.

It is made when it is first needed, lives as long as the process, and does not exist in a forked child until needed there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["submit"]

_executor: ThreadPoolExecutor | None = None


def submit(task: Callable[[], None]) -> bool:
    """Has ``task``, which handles its errors, run in the background; false if the process is ending."""
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oxidiff")
    try:
        _executor.submit(task)
    except RuntimeError:
        return False
    return True


def _after_fork() -> None:
    # Threads are not inherited: the child's tasks need one of its own.
    global _executor
    _executor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
