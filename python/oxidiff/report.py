"""What a compiled module did: :class:`Report`, :class:`Explanation`, :class:`Profile`.

All three are plain values taken at one moment; they print as text, and as tables in a notebook.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from .dispatch import Dispatcher

__all__ = ["Explanation", "Profile", "Report", "explain_of", "profile_of", "report_of"]


@dataclasses.dataclass(frozen=True)
class Report:
    """Counts and bytes of one compiled module."""

    name: str
    """The module's class."""
    captures: int
    """Traces taken: one per structure of a call and class of sizes."""
    programs: int
    """Programs compiled for this module; 0 when it shares those of others."""
    variants: int
    """Call structures that have a program."""
    specializations: int
    """Sizes that are kept ready."""
    calls: int
    """Calls so far."""
    eager_calls: int
    """Calls that ran in eager PyTorch."""
    fallbacks: list[dict[str, Any]]
    """Why: dictionaries of ``module`` (path), ``op``, ``reason``, ``count``."""
    graph_hash: str | None
    """Identity of the first variant's graph; independent of weights."""
    shared_with: int
    """How many other live modules use the same program."""
    compile_s: float
    """Seconds spent compiling programs for this module."""
    tune_s: float
    """Seconds spent tuning them."""
    load_s: float
    """Seconds spent loading artifacts."""
    weight_bytes: int
    """The user's tensors that programs are bound to."""
    derived_bytes: int
    """Weights kept in another form (prepacked, transformed)."""
    arena_bytes: int
    """Workspace of the largest size."""
    arena_lower_bound_bytes: int
    """What no plan of that size could do without."""
    graph_bytes: int
    """CUDA graphs."""
    peak_bytes: int
    """Highest sum of arena, derived weights and graphs seen."""
    sizes: list[dict[str, Any]]
    """One row per kept size: dimensions, arena bytes, milliseconds of the last run."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.name}\n" + "\n\n".join(_text_table(title, rows) for title, rows in self._tables())

    def _repr_html_(self) -> str:
        tables = "".join(_html_table(title, rows) for title, rows in self._tables())
        return f"<h4>{html.escape(self.name)}</h4>{tables}"

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes the tables to a file that any browser shows."""
        page = (
            f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{html.escape(self.name)}</title>'
            "<style>body{font-family:sans-serif} table{border-collapse:collapse;margin:1em 0}"
            "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}</style></head><body>"
            f"{self._repr_html_()}</body></html>\n"
        )
        Path(path).write_text(page, encoding="utf-8")

    def _tables(self) -> list[tuple[str, list[Sequence[Any]]]]:
        rows: list[Sequence[Any]] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or isinstance(value, list):
                continue
            rows.append((field.name, _quantity(field.name, value)))
        tables: list[tuple[str, list[Sequence[Any]]]] = [("", rows)]
        if self.fallbacks:
            head = ("count", "module", "op", "reason")
            tables.append(("fallbacks", [head, *([item[name] for name in head] for item in self.fallbacks)]))
        if self.sizes:
            names = list(dict.fromkeys(name for row in self.sizes for name in row))
            body = [[_quantity(name, row.get(name, "")) for name in names] for row in self.sizes]
            tables.append(("sizes", [names, *body]))
        return tables


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What was captured and compiled, part by part."""

    name: str
    """The module's class."""
    variants: list[dict[str, Any]]
    """One per call structure: ``module``, ``inputs``, ``outputs``, ``symbols`` (free sizes), ``classes``, ``hash``, and the
    program's own account (``groups`` by kind, ``ops`` by name, ``steps``, ``passes`` in seconds)."""
    fallbacks: list[dict[str, Any]]
    """See :attr:`Report.fallbacks`."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [self.name]
        if not self.variants:
            lines.append("  nothing is compiled yet: call it, or use warmup()")
        for i, variant in enumerate(self.variants):
            lines.append(f"  variant {i}")
            for name, value in variant.items():
                lines.append(f"    {name}: {_compact(value)}")
        for item in self.fallbacks:
            place = item["module"] or "the whole module"
            lines.append(f"  eager, {item['count']} calls: {place}: {item['reason']}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Profile:
    """One timed run."""

    name: str
    """The module's class."""
    steps: list[dict[str, Any]]
    """One per step: ``step``, ``kernel``, ``module``, ``seconds``, ``flops``, ``bytes``."""

    @property
    def seconds(self) -> float:
        """All steps together."""
        return float(sum(step["seconds"] for step in self.steps))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def by(self, field: str) -> list[tuple[str, float]]:
        """``(value, seconds)`` summed over the steps with the same value of a field such as ``"kernel"``, slowest
        first."""
        sums: dict[str, float] = {}
        for step in self.steps:
            sums[str(step[field])] = sums.get(str(step[field]), 0.0) + step["seconds"]
        return sorted(sums.items(), key=lambda item: -item[1])

    def __str__(self) -> str:
        return "\n\n".join(_text_table(title, rows) for title, rows in self._tables())

    def _repr_html_(self) -> str:
        return "".join(_html_table(title, rows) for title, rows in self._tables())

    def _tables(self) -> list[tuple[str, list[Sequence[Any]]]]:
        total = self.seconds or 1.0
        rows: list[Sequence[Any]] = [("ms", "share", "GFLOP/s", "GB/s", "kernel", "module")]
        for step in sorted(self.steps, key=lambda s: -s["seconds"]):
            seconds = step["seconds"] or float("inf")
            rows.append(
                (
                    f"{step['seconds'] * 1e3:.3f}",
                    f"{step['seconds'] / total:.1%}",
                    f"{step['flops'] / seconds / 1e9:.1f}",
                    f"{step['bytes'] / seconds / 1e9:.1f}",
                    step["kernel"],
                    step["module"],
                )
            )
        return [(f"{self.name}: {total * 1e3:.2f} ms in {len(self.steps)} steps", rows)]


def _fallbacks(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    rows = [
        {"module": ".".join(filter(None, (prefix, path))), "op": op, "reason": reason, "count": count}
        for prefix, member in dispatcher.family()
        for (path, op, reason), count in member.fallbacks.copy().items()
    ]
    return sorted(rows, key=lambda row: -row["count"])


def report_of(dispatcher: Dispatcher) -> Report:
    """The report of one module and the compiled modules inside of it; see :func:`oxidiff.report`."""
    members = [member for _, member in dispatcher.family()]
    every = [member.engines() for member in members]
    current = [variant for engines in every for variant in (engines[-1].variants if engines else [])]
    variants = [variant for engines in every for engine in engines for variant in engine.variants]
    stats = [variant.stats() for variant in variants]

    def total(name: str) -> int:
        return sum(int(s.get(name, 0)) for s in stats)

    def largest(name: str) -> int:
        return max((int(s.get(name, 0)) for s in stats), default=0)

    return Report(
        name=dispatcher.name,
        captures=sum(member.captures for member in members),
        programs=sum(variant.is_own for variant in variants),
        variants=len(current),
        specializations=total("specializations"),
        calls=sum(member.calls for member in members),
        eager_calls=sum(member.eager_calls for member in members),
        fallbacks=_fallbacks(dispatcher),
        graph_hash=current[0].program.hash if current else None,
        shared_with=max((variant.program.shared_with - 1 for variant in current), default=0),
        compile_s=sum(variant.program.compile_s for variant in variants if variant.is_own),
        tune_s=0.0,
        load_s=0.0,
        weight_bytes=sum(engines[-1].weight_bytes() for engines in every if engines),
        derived_bytes=total("derived_bytes"),
        arena_bytes=largest("arena_bytes"),
        arena_lower_bound_bytes=largest("arena_lower_bound_bytes"),
        graph_bytes=0,
        peak_bytes=largest("peak_bytes"),
        sizes=[row for s in stats for row in s.get("sizes", [])],
    )


def explain_of(dispatcher: Dispatcher) -> Explanation:
    """What was compiled for one module; see :func:`oxidiff.explain`."""
    variants = []
    for path, member in dispatcher.family():
        engines = member.engines()
        for variant in engines[-1].variants if engines else []:
            variants.append({"module": path or member.name, **variant.explain()})
    return Explanation(dispatcher.name, variants, _fallbacks(dispatcher))


def profile_of(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
    """One timed run; see :func:`oxidiff.profile`."""
    return Profile(dispatcher.name, dispatcher.profile(args, kwargs))


# --- text -----------------------------------------------------------------------------------------------------------


def _quantity(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:.1f} {unit}"
        return f"{value} B"
    if isinstance(value, float):
        return f"{value:.2f} s" if name.endswith("_s") else f"{value:.2f}"
    return _compact(value)


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_compact(item)}" for name, item in value.items())
    if isinstance(value, list | tuple | set):
        return ", ".join(_compact(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _text_table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*([title] if title else []), *(line.rstrip() for line in lines)])


def _html_table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    head = f"<caption>{html.escape(title)}</caption>" if title else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"
