"""What a captured graph depends on, as text that is equal in two processes if and only if the graph would be.

A graph follows from the classes of a module tree, the attributes of its submodules, the kinds and sizes of its tensors
and the code that runs. :func:`describe` writes all of it down, line by line, so that two descriptions can be compared and
the difference named. Values of weights do not belong to it, nor does where a model was loaded from.

Code is described by following it: from ``forward`` through every method and every function that it may reach by name,
down to torch, numpy and Python itself, which are described by their versions. An edit anywhere on that way, also of an
installed package, gives another description.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from .. import _native
from ..adapters import named_modules
from ..capture.weights import is_count
from .code import Code, Surroundings
from .origins import undescribed
from .tree import DEPTH

__all__ = ["Description", "Input", "describe", "surroundings"]

Input = tuple[Any, Any, str]
"""The dictionary or list that has a number, the key or index there, and the number's name."""


class Description:
    """What a graph depends on.

    Attributes:
        lines: By subject (``"environment"``, ``"module"``, ``"tensors"``, ``"code"``), by name, what it is.
        digest: A short text that is equal for equal lines.
    """

    def __init__(self, lines: Mapping[str, Mapping[str, str]]) -> None:
        self.lines = {subject: dict(rows) for subject, rows in lines.items()}
        self.surroundings: Surroundings | None = None
        """What the code finds outside of the module, of a description that was made here."""
        total = hashlib.blake2b(digest_size=16)
        for subject in sorted(self.lines):
            rows = self.lines[subject]
            for name in sorted(rows):
                total.update(f"{subject}\0{name}\0{rows[name]}\n".encode("utf-8", "surrogatepass"))
        self.digest = total.hexdigest()

    def differences(self, stored: Description) -> list[str]:
        """How ``self`` differs from one that was stored, a sentence each."""
        found = []
        for subject in sorted(self.lines.keys() | stored.lines.keys()):
            mine, theirs = self.lines.get(subject, {}), stored.lines.get(subject, {})
            for name in sorted(mine.keys() | theirs.keys()):
                here, there = mine.get(name), theirs.get(name)
                if here == there:
                    continue
                if subject == "code":
                    found.append(f"the code of {name} is another")
                elif here is None:
                    found.append(f"{name} is missing here")
                elif there is None:
                    found.append(f"{name} is only here")
                else:
                    found.append(f"{name} is {_short(here, there)} here and {_short(there, here)} in the file")
        return found


def _short(text: str, other: str) -> str:
    """The part of a long text that differs from another one."""
    if len(text) <= 120:
        return text
    start = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 40)
    start = max(0, start - 40)
    return f"…{text[start : start + 100]}…"


@functools.cache
def _environment() -> Mapping[str, str]:
    """What every graph of this process depends on."""
    folder = os.path.join(os.path.dirname(os.path.dirname(__file__)), "capture")
    ours = hashlib.blake2b(digest_size=8)
    for path, _, files in sorted(os.walk(folder)):
        for name in sorted(files):
            if name.endswith(".py"):
                with open(os.path.join(path, name), "rb") as file:
                    ours.update(file.read())
    return {
        "oxidiff": f"{_native.__version__} ({ours.hexdigest()})",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def describe(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    dynamic: bool = True,
    inputs: Sequence[Input] = (),
    passed: Iterable[type] = (),
) -> Description:
    """The description of what ``forward``, of ``module``, would be captured as.

    Args:
        module: The module.
        forward: What is captured.
        dynamic: Whether sizes are run-time values.
        inputs: Numbers in attributes that are arguments of what is captured: their values do not matter.
        passed: Classes of objects that are passed to it.
    """
    code = Code()
    tree = code.tree
    for holder, key, _ in inputs:
        tree.inputs.setdefault(id(holder), set()).add(key)
    tree.paths = {id(child): path for path, child in named_modules(module)}
    rows: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for path, child in named_modules(module):
        rows[path or "the module"] = tree.module(child)
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                text = tree.tensor(tensor, f"{path}.{name}")
                if table is child._buffers and tensor is not None and is_count(child, name, tensor):
                    text = f"{text} of {int(tensor)}"
                tensors[f"{path}.{name}" if path else name] = text
    code.reach_value(forward)
    code.reach_given(passed)
    lines = {"module": rows, "tensors": tensors, "code": code.finish()}
    lines["environment"] = {**_environment(), **code.packages(), "dynamic": str(dynamic)}
    if inputs:
        lines["inputs"] = {name: "a number" for _, _, name in inputs}
    description = Description(lines)
    description.surroundings = code.surroundings(module)
    return description


def surroundings(module: torch.nn.Module, forward: Callable[..., Any], passed: Iterable[type] = ()) -> Surroundings:
    """What the code of ``forward`` finds outside of ``module``, and in classes of objects that are passed to it, also where
    that cannot be described: as far as it can be followed then."""
    code = Code(is_tolerant=True)
    code.tree.paths = {id(child): path for path, child in named_modules(module)}
    for child in module.modules():
        code.reach_class(type(child))
        for value in child.__dict__.values():
            with undescribed():
                code.tree.value(value, DEPTH)
    with undescribed():
        code.reach_value(forward)
        code.reach_given(passed)
        code.finish()
    return code.surroundings(module)
