"""Captured graphs that all modules of one architecture use.

A module's :class:`~oxidiff.watch.Structure` says what it computes without tracing it. Modules whose structures agree
(same class, configuration, dtypes, memory orders, options) belong to one :class:`Family`: what one of them captured and
compiled, the others bind their weights to. References to families are weak: one goes, with its programs, when the last
module of it does.

Threads: a family's lock is held while one of its modules captures and compiles; a second one then finds the result.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Hashable, Set
from typing import Any, cast

import torch

from . import _native
from .capture import CapturedGraph
from .capture.lowering import LoweredGraph
from .capture.writes import Outer
from .device import Device
from .options import CompileOptions
from .tune import Tuner
from .watch import Structure

__all__ = ["Captured", "Family", "family_of", "reset_locks"]


class Captured:
    """One captured graph and its program; without weights.

    Attributes:
        graph: The graph.
        lowered: The same for the compiler, and how to call what it is compiled to.
        device: Where it runs; ``None`` for the CPU.
        tf32: What libraries may round there: f32 operands of matrix products, and of convolutions.
        program: The compiled program.
        places: By device, for each weight slot its place among the tensors of a module of the family, ``None`` where the
            module does not hold it as a parameter or buffer.
        tuner: Makes the choices that the program leaves open.
        is_new: Whether the program was compiled for it, and not found among the live ones of the process.
    """

    def __init__(
        self, graph: CapturedGraph, lowered: LoweredGraph, options: CompileOptions, device: Device | None
    ) -> None:
        self.graph = graph
        self.lowered = lowered
        self.device = device
        self.tf32 = (False, False) if device is None else device.tf32()
        self._options = options
        self.program, self.is_new = self._compiled()
        self.places: dict[torch.device, list[int | None]] = {}
        self.tuner = Tuner(options, is_on_device=device is not None)

    def of(self, graph: CapturedGraph) -> Captured:
        """The same program for the same graph in another state of the module."""
        other = copy.copy(self)
        other.graph = graph
        # In another state there may be other tensors.
        other.places = {}
        return other

    def _compiled(self, widen: bool = False) -> tuple[_native.Program, bool]:
        options = self._options
        return _native.compile(
            self.lowered.builder,
            precision=options.precision,
            widen=widen,
            memory=options.memory,
            memory_budget=cast("int | None", options.memory_budget),
            max_specializations=options.max_specializations,
            cuda_graphs=options.cuda_graphs,
            device=self.device,
            tf32_products=self.tf32[0],
            tf32_convolutions=self.tf32[1],
        )

    @property
    def may_overflow(self) -> bool:
        """Whether there is an f16 value in it, and somebody is to look whether it overflows."""
        return self._options.nan_guard and any(value.dtype is torch.float16 for value in self.graph.values)

    @property
    def identity(self) -> Hashable:
        """Equal for those with the same program, also where each has an object of its own for it."""
        options, device = self._options, self.device
        kept = (options.precision, options.memory, options.memory_budget, options.max_specializations)
        return self.program.hash, None if device is None else device.backend, self.tf32, *kept, options.cuda_graphs

    def widened(self) -> _native.Program:
        """The same with f32 for every f16 value inside the program. It is not tuned."""
        program, _ = self._compiled(widen=True)
        return program

    @property
    def is_current(self) -> bool:
        """Whether torch allows now what it allowed when this was compiled."""
        return self.device is None or self.tf32 == self.device.tf32()

    @property
    def is_shareable(self) -> bool:
        """Whether its weights are found by name in every module of its family."""
        return all(slot.tensor is None for slot in self.lowered.weights)


class Family:
    """What was captured for modules of one structure.

    Attributes:
        lock: Held while something is captured or extended.
        captured: All that can be shared.
        surroundings: What the code finds outside of the module, once something is captured of it.
        passed: Classes of objects among the arguments of calls: what is in these is part of it.
        outer: What it may write there.
        asked: Says how modes of torch are that it asks for.
        is_of_callers: Whether it finds variables of threads or contexts.
    """

    def __init__(self, structure: Structure) -> None:
        self.lock = threading.RLock()
        self.captured: list[Captured] = []
        self.surroundings: _native.Surroundings | None = None
        self.passed: Set[type] = frozenset()
        self.outer = Outer()
        self.asked: tuple[Callable[[], Any], ...] = ()
        self.is_of_callers = False
        # What is held for the fingerprint may hold the module: not the key of a table that lives as long as the process.
        self._fingerprint = structure.fingerprint

    def is_outdated(self) -> bool:
        """Whether the code finds something else now than what was captured."""
        return self.surroundings is not None and self.surroundings.is_changed()


_families: weakref.WeakValueDictionary[Any, Family] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def family_of(structure: Structure, options: CompileOptions) -> Family:
    """The family of modules with this structure and these options."""
    key = (structure.fingerprint.digest, structure.memory(), options)
    with _lock:
        family = _families.get(key)
        if family is None or family.is_outdated():
            family = _families[key] = Family(structure)
        return family


def reset_locks() -> None:
    """In a child process: another thread of the parent may have held a lock, which nobody would ever release here."""
    global _lock
    _lock = threading.RLock()
    for family in list(_families.values()):
        family.lock = threading.RLock()
