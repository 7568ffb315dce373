"""What a compiled module is told to do: :class:`CompileOptions`.

Options belong to the module they were given for, never to the process. Every field is validated when the object is
made, so a wrong value fails where it was typed and not at the first call.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any, Final, TypeAlias

__all__ = ["ONEDIFF_FIELDS", "AnyPath", "CompileOptions", "parse_bytes"]

AnyPath: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]
"""A path as the functions of ``os`` take it."""

_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": ("auto", "eager", "fast"),
    "tune": ("off", "cached", "quick", "full"),
    "memory": ("fast", "balanced", "low"),
}

# OneDiff's names. `None`: has no meaning here and is ignored with a warning.
_ONEDIFF: Final[Mapping[str, str | None]] = {
    "dynamic": "dynamic",
    "max_cached_graph_size": "max_specializations",
    "use_graph": None,
    "debug_level": None,
    "graph_file_device": None,
    "run_graph_by_vm": None,
    "graph_delay_variable_op_execution": None,
    "graph_save_path": None,
    "memory_format": None,
    "mode": None,
    "options": None,
    "conv_allow_half_precision_accumulation": None,
    "matmul_allow_half_precision_accumulation": None,
    "attention_allow_half_precision_accumulation": None,
    "attention_allow_half_precision_score_accumulation_max_m": None,
    "attention_allow_quantization": None,
    "mlp_enable_inference_optimization": None,
    "mlp_enable_nhwc": None,
    "use_layout_optimization": None,
}

ONEDIFF_FIELDS: Final = frozenset((*_ONEDIFF, "graph_file"))
"""Names of OneDiff's options."""


_MAX: Final = 2**63 - 1


def parse_bytes(text: object) -> int:
    """A number of bytes, from an int or a string such as ``"2GiB"``, ``"500 MB"`` or ``"1.5g"``.

    Raises:
        ValueError: The text is not a size, or not a positive one.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise TypeError(f"a size is an int or a string such as '2GiB', not {type(text).__name__}")
    if isinstance(text, int):
        count = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", text)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"not a size in bytes: {text!r}; write an int or a string such as '2GiB' or '500MB'")
        count = int(float(match[1]) * unit)
    if not 0 < count <= _MAX:
        raise ValueError(f"a size in bytes must be positive and less than 8 EiB, not {text!r}")
    return count


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How a module is compiled. Immutable; :meth:`replace` makes a changed copy.

    Raises:
        ValueError: A field has a value outside its choices or range.
        TypeError: A field has a value of another type.
    """

    dynamic: bool = True
    """Sizes are run-time values: one program for all of them. ``False`` fixes the sizes of each call."""
    precision: str = "auto"
    """``"eager"`` rounds where eager rounds, ``"fast"`` keeps f32 inside a fused kernel; ``"auto"`` is eager for f32
    and fast for 16-bit modules."""
    tune: str = "quick"
    """``"off"``, ``"cached"`` (only what was measured before), ``"quick"`` or ``"full"``."""
    tune_budget_s: float = 10.0
    """Wall-clock cap in seconds for tuning all that one ``compile`` makes, or one ``compile_pipe``: every size and piece."""
    memory_budget: int | str | None = None
    """Bytes (an int or ``"2GiB"``) for the arena, derived weights and graphs of this module; kept as an int."""
    memory: str = "balanced"
    """``"fast"``, ``"balanced"`` or ``"low"``: how much derived state may be kept for speed."""
    max_specializations: int = 16
    """How many sizes are kept ready at once; the least recently used one goes first."""
    graph_file: str | None = None
    """Load the compiled artifact from this path if it is there, else save it there after the first compile."""
    cache: bool = True
    """Use the user-wide cache directory."""
    background: bool = False
    """Run eager until the program is ready, which is compiled by a thread of its own. Not with ``check``, which needs
    both results at once."""
    strict: bool = False
    """Make any fallback to eager an error."""
    check: bool | float | None = None
    """``True`` or a tolerance: compare the first call of each size with eager, raise ``CheckError`` on a mismatch.
    A tolerance bounds ``norm(compiled - eager) / norm(eager)``."""
    nan_guard: bool = False
    """Look whether the results of f16 programs are finite. If they are not although the arguments are, run again, and all
    later calls, with f32 for every f16 value inside the program."""
    cuda_graphs: bool = True
    """One CUDA graph per specialization."""

    def __post_init__(self) -> None:
        for field in ("dynamic", "cache", "background", "strict", "nan_guard", "cuda_graphs"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field} must be True or False, not {getattr(self, field)!r}")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, not {getattr(self, field)!r}")
        object.__setattr__(self, "tune_budget_s", _number("tune_budget_s", self.tune_budget_s))
        if isinstance(self.max_specializations, bool) or not isinstance(self.max_specializations, int):
            raise TypeError(f"max_specializations must be an int, not {self.max_specializations!r}")
        if not 1 <= self.max_specializations <= _MAX:
            raise ValueError(
                f"max_specializations must be at least 1 and less than 2**63, not {self.max_specializations}"
            )
        if self.memory_budget is not None:
            try:
                object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget))
            except (TypeError, ValueError) as error:
                raise type(error)(f"memory_budget: {error}") from None
        if self.check is False:
            object.__setattr__(self, "check", None)
        elif self.check is not None and self.check is not True:
            object.__setattr__(self, "check", _number("check", self.check))
        if self.background and self.check is not None:
            raise ValueError(
                "background=True runs eager alone until the program is ready: check needs both results at once"
            )
        if self.graph_file is not None:
            if not isinstance(self.graph_file, str | bytes | os.PathLike):
                raise TypeError(f"graph_file must be a path, not {self.graph_file!r}")
            if not (path := os.fsdecode(self.graph_file)):
                raise ValueError("graph_file must be a path, not empty")
            object.__setattr__(self, "graph_file", os.path.expanduser(path))

    @classmethod
    def of(cls, options: object = None, **fields: Any) -> CompileOptions:
        """Options from an object, a mapping or OneDiff's options object, with single fields changed.

        OneDiff's field names are translated where they mean something and ignored with one warning where they do not.

        Args:
            options: What to start from, a ``CompileOptions``, a mapping or OneDiff's; the defaults if ``None``.
            fields: Fields to change.

        Raises:
            TypeError: A name is no field; the message names the closest one.
        """
        if options is None or isinstance(options, CompileOptions):
            base = options or cls()
        elif isinstance(options, Mapping):
            base = cls.of(**{str(name): value for name, value in options.items()})
        else:
            base = cls.of(**_onediff_fields(options))  # an object of OneDiff's own class
        changes: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            if name in _FIELDS:
                changes[name] = value
            elif name not in _ONEDIFF:
                close = difflib.get_close_matches(name, _FIELDS, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; the options are {', '.join(_FIELDS)}"
                raise TypeError(f"unknown option {name!r}{hint}")
            elif (translated := _ONEDIFF[name]) is not None:
                changes.setdefault(translated, value)
            else:
                ignored.append(name)
        if ignored:
            warnings.warn(f"OneDiff options without a meaning here are ignored: {', '.join(ignored)}", stacklevel=3)
        return base.replace(**changes)

    def replace(self, **changes: Any) -> CompileOptions:
        """A copy with ``changes``."""
        return dataclasses.replace(self, **changes) if changes else self

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; sizes in bytes."""
        return dataclasses.asdict(self)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(CompileOptions))


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field} must be a number, not {value!r}")
    if not value >= 0 or value == float("inf"):
        raise ValueError(f"{field} must be a finite number of at least 0, not {value!r}")
    return float(value)


def _onediff_fields(options: object) -> dict[str, Any]:
    """The set fields of OneDiff's option object, which nests the engine's own under ``oneflow`` or ``nexfort``."""
    values = getattr(options, "__dict__", None)
    if not isinstance(values, dict):
        raise TypeError(f"options must be a CompileOptions or a mapping, not {type(options).__name__}")
    nested = getattr(values.get("oneflow"), "__dict__", {})
    return {
        name: value
        for name, value in {**values, **nested}.items()
        if not name.startswith("_") and name not in ("oneflow", "nexfort") and value is not None
    }
