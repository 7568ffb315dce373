"""What a compiled module did: :class:`Report`, :class:`Explanation`, :class:`Profile`.

All three are plain values taken at one moment; they print as text, and as tables in a notebook.
"""

from __future__ import annotations

import copy
import dataclasses
import html
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _native
from .advice import Device, compiled_for, device_of, fast_bytes, gpu_of, peak_flops, place, sentences, this_device
from .dispatch import DISABLED, Dispatcher
from .memory import Timeline, bytes_text, page, timeline_of
from .variant import Variant

__all__ = ["Explanation", "Profile", "Report", "explain_of", "profile_of", "report_of"]

_DEAREST = 10
"""Steps of a variant that are printed one by one."""


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
    """Workspace of the largest kept size; all modules share one arena, as large as the largest of them needs."""
    arena_lower_bound_bytes: int
    """What no plan of that size could do without."""
    graph_bytes: int
    """CUDA graphs."""
    peak_bytes: int
    """Highest sum of arena, derived weights and graphs seen."""
    pool_bytes: int
    """Workspace that this process holds for all its modules together."""
    sizes: list[dict[str, Any]]
    """One row per kept size: dimensions, arena bytes, milliseconds of the last run. On a GPU also how many steps who
    computes (``computed_by``) and, where runs are not replayed because making a graph failed, why (``no_graphs``)."""
    _places: list[tuple[str, _native.Program]] = dataclasses.field(default_factory=list, repr=False, compare=False)
    """Module and program of each of the rows of ``sizes``."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        names = [field.name for field in dataclasses.fields(self) if not field.name.startswith("_")]
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def memory(self, row: int | None = None) -> Timeline:
        """The arena of one size, step by step: which buffer lies where, from when to when.

        Args:
            row: Index into :attr:`sizes`; the size with the largest arena if ``None``.

        Raises:
            ValueError: No size is kept yet.
            IndexError: There is no such row.
        """
        if not self.sizes:
            raise ValueError(f"{self.name}: no size is kept yet; call it, or use warmup()")
        if row is None:
            row = max(range(len(self.sizes)), key=lambda i: self.sizes[i]["arena_bytes"])
        try:
            name, program = self._places[row]
        except IndexError:
            raise IndexError(f"{self.name}: no row {row} among the {len(self.sizes)} of `sizes`") from None
        return timeline_of(name, program, self.sizes[row]["dims"])

    def advice(self) -> list[str]:
        """What to do when memory is short, in the order of what it gives back."""
        lines = []
        if self.derived_bytes:
            lines.append(
                f'memory="low" gives back the {bytes_text(self.derived_bytes)} of derived weights for a slower step'
            )
        if self.sizes:
            largest = max(self.sizes, key=lambda size: size["arena_bytes"])
            lines.append(
                f"the arena is that of the largest kept size, {largest['dims']}; smaller sizes or batches, or "
                "sliced and tiled decoding, need less; report().memory() shows what fills it"
            )
        lines.append('memory_budget="2GiB" bounds arena and derived weights, and fails with a clear error beyond')
        lines.append("unload() gives everything back until the next call")
        return lines

    def __str__(self) -> str:
        tables = "\n\n".join(_text_table(title, rows) for title, rows in self._tables())
        return f"{self.name}\n{tables}\n\nwhen memory is short\n" + "\n".join(f"  - {line}" for line in self.advice())

    def _repr_html_(self) -> str:
        tables = "".join(_html_table(title, rows) for title, rows in self._tables())
        picture = self.memory()._repr_html_() if self.sizes else ""
        advice = "".join(f"<li>{html.escape(line)}</li>" for line in self.advice())
        return f"<h4>{html.escape(self.name)}</h4>{tables}{picture}<p>When memory is short:</p><ul>{advice}</ul>"

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes the tables and the picture of :meth:`memory` to a file that any browser shows."""
        Path(path).write_text(page(self.name, self._repr_html_()), encoding="utf-8")

    def _tables(self) -> list[tuple[str, list[Sequence[Any]]]]:
        rows: list[Sequence[Any]] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or field.name.startswith("_") or isinstance(value, list):
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
    """One per call structure: ``module``, ``inputs``, ``outputs``, ``symbols`` (free sizes), ``classes``, ``hash``,
    ``choices`` (what the tuner decided, with the times), the program's own account (``groups`` by kind, ``ops`` by name,
    ``steps``, ``timings`` of its compilation in seconds), and what each of its steps costs: ``costs``, rows of ``step``,
    ``kernel``, ``module``, ``flops`` (those that its form leaves), ``bytes``, ``ms`` (the least that the device allows) and
    ``bound`` (``"compute"`` or ``"memory"``), in the order in which they run, ``costs_on`` (the device) and ``costs_at``
    (the sizes: those that ran last, else those that it was captured at)."""
    fallbacks: list[dict[str, Any]]
    """See :attr:`Report.fallbacks`."""
    advice: list[str] = dataclasses.field(default_factory=list)
    """What bounds each variant on the device, how fast it can be at most, what would help."""

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
                if name == "choices" and value:
                    lines += ["    choices, measured:", *(f"      {choice}" for choice in value)]
                elif name == "costs" and value:
                    title = f"costs, at least, on {variant['costs_on']} at {variant['costs_at']}"
                    lines += [f"    {line}" for line in _text_table(title, _dearest(value)).splitlines()]
                elif name not in ("choices", "costs", "costs_on", "costs_at"):
                    lines.append(f"    {name}: {_compact(value)}")
        for item in self.fallbacks:
            place = item["module"] or "the whole module"
            lines.append(f"  eager, {item['count']} calls: {place}: {item['reason']}")
        lines += [f"  {sentence}" for sentence in self.advice]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Profile:
    """One timed run."""

    name: str
    """The module's class."""
    steps: list[dict[str, Any]]
    """One per step: ``step``, ``kernel``, ``module``, ``dtype``, ``seconds``, ``flops``, ``work``, ``bytes``, and where it
    is on the roofline: ``of_peak``, the share of what the machine's ceilings allow (``None`` without these), and ``bound``,
    which of them binds (``""``). Of a convolution ``flops`` counts each product, and ``work`` what its form leaves of them
    (Winograd's save some)."""
    ceilings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the machine does at most, measured once per process in about 50 ms: operations and bytes per second. Empty for
    a module on a GPU."""

    @property
    def seconds(self) -> float:
        """All steps together."""
        return float(sum(step["seconds"] for step in self.steps))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def floor(self, step: dict[str, Any]) -> tuple[float, str]:
        """The seconds that the machine's ceilings allow a step, and which of them binds: ``"compute"`` or ``"memory"``.

        A step that takes less found its operands in a cache of a core.
        """
        at = self.ceilings
        if not at.get("f32_flops"):
            return 0.0, ""
        compute = step["work"] / peak_flops(at, step["dtype"])
        level = at["cache"] if step["bytes"] <= at["cache"]["working_set"] else at["memory"]
        memory = step["bytes"] / max(level["copy"], level["stream_copy"])
        return (compute, "compute") if compute >= memory else (memory, "memory")

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
        rows: list[Sequence[Any]] = [("ms", "share", "GFLOP/s", "GB/s", "of peak", "bound", "kernel", "module")]
        for step in sorted(self.steps, key=lambda s: -s["seconds"]):
            seconds = step["seconds"] or float("inf")
            rows.append(
                (
                    f"{step['seconds'] * 1e3:.3f}",
                    f"{step['seconds'] / total:.1%}",
                    f"{step['flops'] / seconds / 1e9:.1f}",
                    f"{step['bytes'] / seconds / 1e9:.1f}",
                    f"{step['of_peak']:.0%}" if step["bound"] else "",
                    step["bound"],
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
    rows += [
        {"module": prefix, "op": "", "reason": DISABLED, "count": member.eager_calls}
        for prefix, member in dispatcher.family()
        if member.disabled and (member is dispatcher or member.eager_calls)
    ]
    return sorted(rows, key=lambda row: -row["count"])


def report_of(dispatcher: Dispatcher) -> Report:
    """The report of one module and the compiled modules inside of it; see :func:`oxidiff.report`."""
    members = [member for _, member in dispatcher.family()]
    parts = [*members, *(piece for member in members for piece in member.pieces())]
    every = [member.engines() for member in parts]
    current = [variant for engines in every for variant in (engines[-1].variants if engines else [])]
    variants = [variant for engines in every for engine in engines for variant in engine.variants]
    stats = [variant.stats() for variant in variants]
    # Sizes are those of a program, which weight sets share.
    programs = {(v.captured.identity, v.is_wide): (v, s) for v, s in zip(variants, stats, strict=True) if s}

    def total(name: str) -> int:
        return sum(int(s.get(name, 0)) for _, s in programs.values())

    def largest(name: str) -> int:
        return max((int(s.get(name, 0)) for s in stats), default=0)

    # Programs share what they derive of one tensor.
    derived = {place: held for s in stats for place, held in s.get("derived", {}).items()}
    return Report(
        name=dispatcher.name,
        captures=sum(member.captures for member in parts),
        programs=sum(variant.is_own for variant in variants),
        variants=len(current),
        specializations=total("specializations"),
        calls=sum(member.calls for member in members),
        eager_calls=sum(member.eager_calls for member in members),
        fallbacks=_fallbacks(dispatcher),
        graph_hash=current[0].program.hash if current else None,
        shared_with=max((variant.program.shared_with - 1 for variant in current), default=0),
        compile_s=sum((variant.program.compile_s for variant in variants if variant.is_own), 0.0),
        tune_s=sum((engine.tune_s for engines in every for engine in engines), 0.0),
        load_s=sum((engine.store.load_s for engines in every for engine in engines), 0.0),
        weight_bytes=sum(engines[-1].weight_bytes() for engines in every if engines),
        derived_bytes=sum(derived.values()) + sum(member.states.effective.bytes for member in parts),
        arena_bytes=largest("arena_bytes"),
        arena_lower_bound_bytes=largest("arena_lower_bound_bytes"),
        graph_bytes=total("graph_bytes"),
        peak_bytes=largest("peak_bytes") + sum(member.states.effective.peak_bytes for member in parts),
        pool_bytes=largest("pool_bytes"),
        sizes=[row for _, s in programs.values() for row in s.get("sizes", [])],
        _places=[(dispatcher.name, v.program) for v, s in programs.values() for _ in s.get("sizes", [])],
    )


def explain_of(dispatcher: Dispatcher, device: str | None = None) -> Explanation:
    """What was compiled for one module; see :func:`oxidiff.explain`."""
    if not isinstance(device, str | None):
        raise TypeError(f"explain: a device is asked about by its name, such as 'L4', not by {device!r}")
    target = None if device is None else device_of(device)
    advice: list[str] = []
    variants = []
    for path, member in dispatcher.family():
        engines = member.engines()
        for variant in engines[-1].variants if engines else []:
            looked = _look(variant, target)
            variants.append({"module": path or member.name, **variant.explain(), **_costs(looked)})
            advice += _advice(variant, looked)
        for i, piece in enumerate(member.pieces()):
            held = piece.engines()
            for variant in held[-1].variants if held else []:
                name = ".".join(filter(None, (path, piece.path))) if piece.path else f"{path or member.name}, piece {i}"
                variants.append({"module": name, **variant.explain(), **_costs(_look(variant, target))})
    # Weight sets share a program, of which the same can be said.
    return Explanation(dispatcher.name, variants, _fallbacks(dispatcher), list(dict.fromkeys(advice)))


@dataclasses.dataclass(frozen=True)
class _Look:
    """A variant at the sizes that ran last, or that it was captured at, on the device asked about or its own."""

    program: _native.Program
    """As it is, or as it would be compiled for a device."""
    dims: list[int]
    device: Device
    is_here: bool
    """Whether that is the processor that it runs on."""
    is_half: bool
    took_s: float | None
    """The time of its last run; on a GPU that is the host's alone."""
    differences: list[str]
    """What is different about a program for another device."""


def _look(variant: Variant, asked: Device | None) -> _Look | None:
    own = variant.captured.device
    rows = [row for row in variant.stats().get("sizes", []) if row["ms"] > 0]
    at = variant.graph.plan.complete({symbol.name: symbol.value for symbol in variant.graph.plan.symbols})
    values = {name: int(value) for name, value in at.items()}
    names = variant.lowered.symbols
    if not rows and not values.keys() >= set(names):
        return None
    device = asked or (this_device() if own is None else gpu_of(own.backend))
    is_here = asked is None and own is None
    program = variant.program
    differences: list[str] = []
    if not is_here:
        backend = None if asked is not None or own is None else own.backend
        program, differences = compiled_for(variant.lowered, device, variant.captured.tuner.options.precision, backend)
    return _Look(
        program,
        rows[-1]["dims"] if rows else [values[name] for name in names],
        device,
        is_here,
        any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in variant.tensors),
        rows[-1]["ms"] / 1e3 if rows and is_here else None,
        differences,
    )


def _costs(looked: _Look | None) -> dict[str, Any]:
    """What the steps of a variant cost, see :attr:`Explanation.variants`."""
    if looked is None:
        return {"costs": [], "costs_on": "", "costs_at": []}
    rows = []
    for step in looked.program.memory(looked.dims)["steps"]:
        name, kernel, module, flops, size = step
        least = place([step], looked.device, looked.is_half)
        bound = "compute" if least.arithmetic > least.bandwidth else "memory"
        row = {"step": name, "kernel": kernel, "module": module, "flops": flops, "bytes": size}
        rows.append({**row, "ms": least.seconds * 1e3, "bound": bound})
    return {"costs": rows, "costs_on": looked.device.name, "costs_at": looked.dims}


def _dearest(costs: Sequence[dict[str, Any]]) -> list[Sequence[Any]]:
    """The rows of a table of the steps that cost most, with all others as one."""
    total = sum(row["ms"] for row in costs) or 1.0
    ordered = sorted(costs, key=lambda row: -row["ms"])
    rest = ordered[_DEAREST:]
    shown = ordered[:_DEAREST]
    if rest:
        sums = {name: sum(row[name] for row in rest) for name in ("ms", "flops", "bytes")}
        shown.append({**sums, "bound": "", "kernel": f"{len(rest)} others", "module": ""})
    rows: list[Sequence[Any]] = [("ms", "share", "GFLOP", "MB", "bound", "kernel", "module")]
    for row in shown:
        figures = (
            f"{row['ms']:.3g}",
            f"{row['ms'] / total:.1%}",
            f"{row['flops'] / 1e9:.3g}",
            f"{row['bytes'] / 1e6:.3g}",
        )
        rows.append((*figures, row["bound"], row["kernel"], row["module"]))
    return rows


def _advice(variant: Variant, looked: _Look | None) -> list[str]:
    if looked is None:
        return []
    point, names = variant.graph.plan.symbols, variant.lowered.symbols
    batches = [names.index(symbol.name) for symbol in point if symbol.role == "batch" and symbol.name in names]
    precision = variant.captured.tuner.options.precision
    facts = {
        "is_half": looked.is_half,
        "batch_at": batches[0] if batches else None,
        "spatial_at": [
            names.index(symbol.name) for symbol in point if symbol.role == "spatial" and symbol.name in names
        ],
        "fast_bytes": fast_bytes(variant.lowered, looked.dims, precision) if looked.is_here else None,
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in variant.tensors),
        "channels_last": [slot for slot, tensor in enumerate(variant.tensors) if _is_channels_last(tensor)],
        "took_s": looked.took_s,
    }
    return [*sentences(looked.program, looked.dims, looked.device, facts), *looked.differences]


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def profile_of(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
    """One timed run; see :func:`oxidiff.profile`."""
    steps = dispatcher.profile(args, kwargs)
    is_here = all(e.device is None for e in dispatcher.engines())
    found = Profile(dispatcher.name, steps, _native.ceilings() if is_here else {})
    for step in steps:
        floor, bound = found.floor(step)
        step["of_peak"] = floor / (step["seconds"] or float("inf")) if bound else None
        step["bound"] = bound
    return found


# --- text -----------------------------------------------------------------------------------------------------------


def _quantity(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return bytes_text(value)
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
