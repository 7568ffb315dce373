"""Whether it pays to make programs for what a module has become.

A program is for one state of a module, and what is in attributes belongs to that: the step, the seed, features that another
call left there. To capture a state takes as long as many calls in eager PyTorch, so where nearly every call finds a new one,
programs take more than they save. Patience runs out then: a new state first has to be met again and again, and its calls
meanwhile run in Python, with submodules that are compiled, as far as those stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["OUTSIDE", "STATES", "WAIT", "Patience"]

WAIT = 8
"""How many calls a new state has to serve without a program, once patience ran out."""
STATES = 40.0
"""How many captures of new states are borne beyond those that their calls make up for: a picture of 50 steps may have a
state for each, which the next picture finds again."""
OUTSIDE = 12.0
"""The same, where what changes is outside of the module, of which states are not kept."""
_REFUND = 0.25
"""What of a capture each call makes up for."""
_ADOPTION = 0.5
"""What of a capture it takes to find that a graph of another state is right."""
_LOST = 3
"""How many captures one counts for that leads to no program."""
_SELDOM = 16
"""A module that changes this many times less often than another one may be part of a program."""


class Patience:
    """How often states of one module were captured lately, and what they differ by.

    Threads: written under the lock of the module's dispatcher.

    Args:
        most: How many captures are borne.
    """

    def __init__(self, most: float) -> None:
        self._most = self._left = most
        self._calls = 0
        self._changes: dict[str, int] = {}

    @property
    def is_out(self) -> bool:
        """Whether new states have to wait for a program."""
        return self._left < 0

    @property
    def changing(self) -> list[str]:
        """The paths of the modules that change most often."""
        # Copied by one operation: other threads only read.
        changes = list(self._changes.items())
        most = max((count for _, count in changes), default=0)
        return [path for path, count in changes if count * _SELDOM >= most]

    def note(self, paths: Iterable[str]) -> None:
        """Takes note of a change.

        Args:
            paths: The modules that were written.
        """
        for path in set(paths):
            self._changes[path] = self._changes.get(path, 0) + 1

    def spend(self, calls: int, captures: int, adoptions: int = 0, is_lost: bool = False) -> None:
        """Takes note of what was made for the first call of a new state.

        Args:
            calls: How often the module was called so far, but for calls that waited.
            captures: How often it was captured, with success or without.
            adoptions: How often a graph of another state was found to be right.
            is_lost: Whether that led to no program: then no calls run faster for it.
        """
        if is_lost:
            self._left -= captures * _LOST
            return
        left = self._left + (calls - self._calls) * _REFUND
        if left >= self._most and not self.is_out:
            self._changes.clear()
        self._left = min(self._most, left) - captures - adoptions * _ADOPTION
        self._calls = calls
