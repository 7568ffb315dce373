"""Where the bytes of a run are: :class:`Timeline` (the arena, step by step) and :class:`Estimate` (before running).

A timeline prints as a picture made of letters, and draws itself as SVG: steps from left to right, addresses of the
arena from bottom to top, one rectangle per buffer, coloured by the part of the model that it belongs to.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import UnsupportedError, from_native

if TYPE_CHECKING:
    from .dispatch import Dispatcher
    from .nan_guard import Guarded
    from .variant import Variant

__all__ = ["Buffer", "Estimate", "Timeline", "bytes_text", "estimate_of", "page", "timeline_of"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One piece of the arena."""

    module: str
    """Path of the module whose result it holds."""
    what: str
    """Buffer, value and op; or the purpose of a step's scratch memory."""
    bytes: int
    first: int
    """Step that writes it first."""
    last: int
    """Last step that touches it."""
    offset: int
    """Bytes from the arena's start."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The arena of one size of a module, step by step."""

    name: str
    """The module's class."""
    dims: list[int]
    """Values of the program's sizes."""
    arena_bytes: int
    lower_bound_bytes: int
    """The most that is alive at one step: no arena could be smaller."""
    derived_bytes: int
    """Forms of weights that runs of this size keep."""
    output_bytes: int
    steps: list[tuple[str, str, str]]
    """Name, kernel and module path of every step."""
    buffers: list[Buffer]

    def bytes_alive(self) -> list[int]:
        """Bytes alive at every step."""
        change = [0] * (len(self.steps) + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.bytes
            change[buffer.last + 1] -= buffer.bytes
        alive, bytes_now = [], 0
        for step in change[:-1]:
            bytes_now += step
            alive.append(bytes_now)
        return alive

    @property
    def peak_step(self) -> int:
        """The first step with most bytes alive."""
        alive = self.bytes_alive()
        return alive.index(max(alive)) if alive else 0

    def hottest(self, count: int = 10) -> list[Buffer]:
        """The largest buffers that are alive at the peak."""
        step = self.peak_step
        alive = [b for b in self.buffers if b.first <= step <= b.last and b.bytes]
        return sorted(alive, key=lambda b: -b.bytes)[:count]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self._title()}\n{self._bars()}\n\n{self._hottest_text()}"

    def _title(self) -> str:
        ratio = self.arena_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0
        return (
            f"{self.name} at {self.dims}: arena {bytes_text(self.arena_bytes)} "
            f"({ratio:.3f} of the lower bound), {len(self.steps)} steps"
        )

    def _bars(self, columns: int = 72, rows: int = 10) -> str:
        alive = self.bytes_alive()
        if not alive or not max(alive):
            return "  (no workspace)"
        columns = min(columns, len(alive))
        heights = [
            max(alive[i * len(alive) // columns : max((i + 1) * len(alive) // columns, i * len(alive) // columns + 1)])
            for i in range(columns)
        ]
        top = max(heights)
        lines = []
        for row in range(rows, 0, -1):
            label = bytes_text(top * row // rows) if row in (rows, rows // 2) else ""
            lines.append(f"{label:>11} |" + "".join("#" if h * rows >= top * (row - 0.5) else " " for h in heights))
        lines.append(" " * 12 + "+" + "-" * columns)
        lines.append(" " * 13 + f"step 0{f'step {len(alive) - 1}':>{max(columns - 6, 0)}}")
        return "\n".join(line.rstrip() for line in lines)

    def _hottest_text(self) -> str:
        if not self.steps:
            return ""
        lines = [f"alive at the peak, step {self.peak_step} ({self.steps[self.peak_step][0]}):"]
        for b in self.hottest():
            lines.append(
                f"  {bytes_text(b.bytes):>10}  steps {b.first:>4} to {b.last:<4}  {b.module or '-'} ({b.what})"
            )
        return "\n".join(lines)

    def svg(self, width: int = 1100, height: int = 460) -> str:
        """The picture as SVG markup."""
        return _Picture(self, width, height).draw()

    def _repr_html_(self) -> str:
        head = f"<h4>{html.escape(self._title())}</h4>"
        rows = "".join(
            f"<tr><td>{bytes_text(b.bytes)}</td><td>{b.first} to {b.last}</td>"
            f"<td>{html.escape(b.module)}</td><td>{html.escape(b.what)}</td></tr>"
            for b in self.hottest()
        )
        caption = html.escape(f"alive at the peak, step {self.peak_step}")
        table = (
            f"<table><caption>{caption}</caption>"
            f"<tr><th>bytes</th><th>steps</th><th>module</th><th>what</th></tr>{rows}</table>"
        )
        return f"{head}{self.svg()}{table}"

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes the picture and its table to a file that any browser shows."""
        Path(path).write_text(page(self.name, self._repr_html_()), encoding="utf-8")


_COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#72b7b2",
    "#eeca3b",
    "#9d755d",
    "#ff9da6",
    "#79706e",
)


class _Picture:
    """Draws a timeline; coordinates in pixels."""

    def __init__(self, timeline: Timeline, width: int, height: int) -> None:
        self.timeline = timeline
        self.width, self.height = width, height
        self.left, self.right, self.top, self.bottom = 78, 12, 34, 92
        self.steps = max(len(timeline.steps), 1)
        self.bytes = max(timeline.arena_bytes, 1)
        parts = dict.fromkeys(_part(module) for _, _, module in timeline.steps)
        self.colours = {part: _COLOURS[i % len(_COLOURS)] for i, part in enumerate(parts)}

    def x(self, step: float) -> float:
        return self.left + step * (self.width - self.left - self.right) / self.steps

    def y(self, size: float) -> float:
        return self.height - self.bottom - size * (self.height - self.top - self.bottom) / self.bytes

    def draw(self) -> str:
        t = self.timeline
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
            f'<text x="{self.left}" y="18" font-size="14">{html.escape(t._title())}</text>',
            *self._axes(),
            *(self._rectangle(b) for b in sorted(t.buffers, key=lambda b: -b.bytes) if b.bytes),
            *self._labels(),
            *self._peak(),
            *self._bands(),
            "</svg>",
        ]
        return "\n".join(parts)

    def _axes(self) -> list[str]:
        marks = []
        for i in range(5):
            size = self.bytes * i // 4
            y = self.y(size)
            marks.append(
                f'<line x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            marks.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(size)}</text>')
        return marks

    def _rectangle(self, b: Buffer) -> str:
        x, y = self.x(b.first), self.y(b.offset + b.bytes)
        w, h = self.x(b.last + 1) - x, self.y(b.offset) - y
        colour = self.colours.get(_part(b.module), "#bbb")
        tip = html.escape(f"{b.module} ({b.what}): {bytes_text(b.bytes)}, steps {b.first} to {b.last}")
        edge = "white" if w > 2 and h > 2 else "none"
        return (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{colour}" fill-opacity="0.85" '
            f'stroke="{edge}" stroke-width="0.4"><title>{tip}</title></rect>'
        )

    def _labels(self) -> list[str]:
        """Names of the buffers that are large enough to hold them."""
        marks = []
        for b in self.timeline.buffers:
            x, y = self.x(b.first), self.y(b.offset + b.bytes)
            w, h = self.x(b.last + 1) - x, self.y(b.offset) - y
            text = f"{b.module} {bytes_text(b.bytes)}"
            if h > 11 and w > 5.6 * len(text):
                marks.append(f'<text x="{x + 4:.1f}" y="{y + h / 2 + 4:.1f}" fill="white">{html.escape(text)}</text>')
        return marks

    def _peak(self) -> list[str]:
        t = self.timeline
        if not t.steps:
            return []
        x = self.x(t.peak_step + 0.5)
        anchor = "end" if x > self.width * 0.6 else "start"
        text = html.escape(f"peak {bytes_text(t.lower_bound_bytes)} at step {t.peak_step}: {t.steps[t.peak_step][0]}")
        return [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top - 4}" y2="{self.height - self.bottom}" stroke="#222" '
            'stroke-dasharray="3 3"/>',
            f'<text x="{x + (4 if anchor == "start" else -4):.1f}" y="{self.top - 2}" text-anchor="{anchor}" '
            f'fill="#222">{text}</text>',
        ]

    def _bands(self) -> list[str]:
        """Below the steps the part of the model that they belong to."""
        marks: list[str] = []
        base = self.height - self.bottom + 6
        first = 0
        names = [_part(module) for _, _, module in self.timeline.steps]
        for at in range(1, len(names) + 1):
            if at < len(names) and names[at] == names[first]:
                continue
            x, w = self.x(first), self.x(at) - self.x(first)
            name = html.escape(names[first] or "-")
            marks.append(
                f'<rect x="{x:.1f}" y="{base}" width="{max(w - 0.5, 0.5):.1f}" height="8" '
                f'fill="{self.colours[names[first]]}"><title>{name}</title></rect>'
            )
            if w > 11:
                middle = x + w / 2
                marks.append(
                    f'<text x="{middle:.1f}" y="{base + 20}" text-anchor="end" font-size="10" '
                    f'transform="rotate(-35 {middle:.1f} {base + 20})">{name}</text>'
                )
            first = at
        return marks


def _part(module: str) -> str:
    """The part of a model that a module belongs to: its path up to the first number."""
    kept: list[str] = []
    for name in module.split("."):
        kept.append(name)
        if name.isdigit() or len(kept) == 2:
            break
    return ".".join(kept)


def page(title: str, body: str) -> str:
    """A whole HTML file."""
    return (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font-family:sans-serif} table{border-collapse:collapse;margin:1em 0}"
        "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}</style></head><body>"
        f"{body}</body></html>\n"
    )


def bytes_text(count: int) -> str:
    """A size as people write it: ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def timeline_of(name: str, program: _native.Program, dims: Sequence[int]) -> Timeline:
    """The arena of a program at these sizes."""
    found = program.memory(dims)
    return Timeline(
        name=name,
        dims=list(dims),
        arena_bytes=found["arena_bytes"],
        lower_bound_bytes=found["lower_bound_bytes"],
        derived_bytes=found["derived_bytes"],
        output_bytes=found["output_bytes"],
        steps=[(step, kernel, module) for step, kernel, module, *_ in found["steps"]],
        buffers=[Buffer(*item) for item in found["buffers"]],
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a call will need; see :func:`oxidiff.estimate`."""

    name: str
    """The module's class."""
    dims: list[int]
    """Values of the program's sizes."""
    peak_bytes: int
    """Arena and derived weights: what :attr:`Report.peak_bytes` will say of the run."""
    arena_bytes: int
    arena_lower_bound_bytes: int
    derived_bytes: int
    """Weights in another form that are held while it runs."""
    output_bytes: int
    """The results, which belong to the caller."""
    weight_bytes: int
    """The module's own tensors."""
    seconds: float
    """Time of the run; see ``based_on``."""
    based_on: str
    """``"this size"`` (it has run), ``"another size"`` (scaled by operations and bytes), or ``"nominal speed"`` (nothing
    of this program has run yet: good to a factor of two)."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.name} at {self.dims}: {bytes_text(self.peak_bytes)} (arena {bytes_text(self.arena_bytes)}, derived "
            f"weights {bytes_text(self.derived_bytes)}) beside {bytes_text(self.weight_bytes)} of weights and "
            f"{bytes_text(self.output_bytes)} of results; about {self.seconds:.3g} s (from {self.based_on})"
        )


_NOMINAL = {"avx512": 60e9, "avx2": 35e9}
"""Operations a second of one thread."""
_NOMINAL_BYTES = 8e9
"""Bytes a second of one thread."""


def _model_seconds(found: Mapping[str, Any]) -> float:
    """Time by the nominal speed of this machine: each step takes what its operations or its bytes take."""
    target = _native.target()
    flops = _NOMINAL.get(str(target["isa"]), 8e9) * int(target["threads"])
    moved = _NOMINAL_BYTES * int(target["threads"])
    return float(sum(max(step[3] / flops, step[4] / moved) + 1e-6 for step in found["steps"]))


def estimate_of(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
    """See :func:`oxidiff.estimate`."""
    try:
        parts = [_part_estimate(*part) for part in dispatcher.parts_of(args, kwargs)]
    except _native.NativeError as error:
        raise from_native(error) from error
    largest = max(parts, key=lambda part: part["arena_bytes"], default=None)
    if largest is None:
        raise UnsupportedError(f"{dispatcher.name}: every op of it runs in eager PyTorch: there is nothing to estimate")
    derived = sum(part["derived_bytes"] for part in parts) + dispatcher.states.effective.bytes
    return Estimate(
        name=dispatcher.name,
        dims=largest["dims"],
        peak_bytes=largest["arena_bytes"] + derived,
        arena_bytes=largest["arena_bytes"],
        arena_lower_bound_bytes=largest["lower_bound_bytes"],
        derived_bytes=derived,
        output_bytes=parts[-1]["output_bytes"],
        weight_bytes=sum(part["weight_bytes"] for part in parts),
        seconds=sum(part["seconds"] for part in parts),
        based_on=largest["based_on"],
    )


def _part_estimate(variant: Variant, executable: _native.Executable | Guarded, dims: Sequence[int]) -> dict[str, Any]:
    """What one program of a call needs."""
    found = variant.program.memory(dims)
    stats = executable.stats()
    ran = [row for row in stats["sizes"] if row["ms"] > 0]
    same = next((row for row in ran if row["dims"] == list(dims)), None)
    seconds, based_on = _model_seconds(found), "nominal speed"
    if same is not None:
        seconds, based_on = same["ms"] / 1e3, "this size"
    elif ran:
        row = max(ran, key=lambda row: row["arena_bytes"])
        seconds *= row["ms"] / 1e3 / _model_seconds(variant.program.memory(row["dims"]))
        based_on = "another size"
    return {
        **found,
        "derived_bytes": executable.derived_bytes_for(dims),
        "weight_bytes": stats["weight_bytes"],
        "seconds": seconds,
        "based_on": based_on,
    }
