"""The thread in which modules with ``background=True`` are compiled, one after the other.

It is made when there is something to do, ends when there is not, and does not exist in a forked child until needed there. A
process that ends waits for what the thread is at, which no thread of Python's may be torn from; what comes after that is
dropped, and tuning, which may have minutes before it, stops at the next trial (:func:`is_ending`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["is_ending", "submit"]

log = logging.getLogger(__name__)

_lock = threading.Lock()
_tasks: deque[Callable[[], None]] = deque()
_is_running = False


def is_ending() -> bool:
    """Whether the main thread is done, and the process with it as soon as the others are."""
    return not threading.main_thread().is_alive()


def submit(task: Callable[[], None]) -> bool:
    """Has ``task``, which handles its errors, run in the background; false if the process is ending."""
    global _is_running
    with _lock:
        if is_ending():
            return False
        if not _is_running:
            # Under the lock, for which the thread then waits: whoever comes meanwhile is told what became of it.
            _is_running = True
            try:
                threading.Thread(target=_work, name="oxidiff").start()
            except RuntimeError:
                # The system has no thread left, or the interpreter is on its way out.
                _is_running = False
                return False
        _tasks.append(task)
        return True


def _work() -> None:
    global _is_running
    while True:
        with _lock:
            if is_ending():
                _tasks.clear()
            if not _tasks:
                _is_running = False
                return
            task = _tasks.popleft()
        try:
            task()
        except Exception:
            log.exception("a module is not compiled in the background")


def _after_fork() -> None:
    # Threads are not inherited: the child's tasks need one of its own.
    global _is_running, _lock
    _lock = threading.Lock()
    _tasks.clear()
    _is_running = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
