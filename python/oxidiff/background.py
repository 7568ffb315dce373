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

__all__ = ["is_ending", "is_here", "submit"]

log = logging.getLogger(__name__)

_lock = threading.Lock()
_tasks: deque[Callable[[], None]] = deque()
_here = threading.local()
_worker: object | None = None
"""Whose turn it is: what the thread at work was given as it was made."""


def is_ending() -> bool:
    """Whether the main thread is done, and the process with it as soon as the others are."""
    return not threading.main_thread().is_alive()


def is_here() -> bool:
    """Whether this is the background thread."""
    return getattr(_here, "is_working", False)


def submit(task: Callable[[], None]) -> bool:
    """Has ``task``, which handles its errors, run in the background; false if the process is ending."""
    global _worker
    with _lock:
        if is_ending():
            return False
        is_first = _worker is None
        try:
            _tasks.append(task)
            if is_first:
                # Under the lock, for which the thread then waits: whoever comes meanwhile is told what became of it.
                _worker = object()
                threading.Thread(target=_work, name="oxidiff", args=(_worker,)).start()
            return True
        except BaseException as error:
            # An interrupt leaves open whether there is a thread: if so, it finds that it is not its turn.
            if is_first:
                _worker = None
            if task in _tasks:
                _tasks.remove(task)
            if not isinstance(error, RuntimeError):
                raise
            # The system has no thread left, or the interpreter is on its way out.
            return False


def _work(own: object) -> None:
    global _worker
    _here.is_working = True
    while True:
        with _lock:
            if _worker is not own:
                return
            if is_ending():
                _tasks.clear()
            if not _tasks:
                _worker = None
                return
            task = _tasks.popleft()
        try:
            task()
        except BaseException:
            # `sys.exit()` in somebody's forward is none of this thread's.
            log.exception("a module is not compiled in the background")
        # What it holds goes before the next one comes.
        del task


def _after_fork() -> None:
    # Threads are not inherited: the child's tasks need one of its own.
    global _worker, _lock
    _lock = threading.Lock()
    _tasks.clear()
    _worker = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
