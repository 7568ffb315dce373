"""Where a program stands on the roofline of a device: what bounds it, how fast it can be at most, what would help.

Every step of a program has its operations (those that its form of a convolution leaves) and its bytes at given sizes, so
the least time it can take on a device is plain arithmetic: the larger of operations over the device's rate and bytes over
its bandwidth, and on a GPU what a launch costs. What fits into a processor's caches may never come from its memory, so
there the caches' bandwidth counts, or none. The device need not be there: :data:`DEVICES` has the published figures of
common GPUs, :func:`this_device` measures the processor at hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from . import _native

if TYPE_CHECKING:
    from .capture.lowering import LoweredGraph

__all__ = [
    "DEVICES",
    "Device",
    "Placement",
    "compiled_for",
    "device_of",
    "fast_bytes",
    "gpu_of",
    "place",
    "sentences",
    "this_device",
]


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device does at most.

    Attributes:
        name: As people call it.
        f32_flops: Operations a second in f32.
        half_flops: The same in the faster of f16 and bf16, dense, accumulated in f32.
        bandwidth: Bytes a second from its memory.
        memory_bytes: What fits into it; 0 where that is the host's.
        launch_s: What starting one kernel costs where launches are replayed from a graph.
        tf32_flops: Operations a second in TF32, of which PyTorch makes convolutions of f32; 0 where there is none.
        caches: Bytes that a cache holds, and bytes a second from it, the smallest first.
    """

    name: str
    f32_flops: float
    half_flops: float
    bandwidth: float
    memory_bytes: int = 0
    launch_s: float = 0.0
    tf32_flops: float = 0.0
    caches: tuple[tuple[float, float], ...] = ()

    def bandwidth_of(self, size: float) -> float:
        """Bytes a second at which so many can be moved at most."""
        return next((rate for holds, rate in self.caches if size <= holds), self.bandwidth)


DEVICES: Final[Mapping[str, Device]] = {row[0].lower(): Device(*row) for row in _native.devices()}
"""Published figures of the makers: dense tensor cores for 16 bits, plain cores for f32."""


_INSTRUCTIONS: Final[Mapping[str, Mapping[str, int]]] = {
    "f32": {"f32_flops": 1, "bf16_amx_flops": 6},
    "bf16": {"f32_flops": 1, "bf16_dot_flops": 1, "bf16_amx_flops": 1},
    "f16": {"f32_flops": 1, "f16_flops": 1, "f16_amx_flops": 1, "bf16_amx_flops": 3},
}
"""What multiplies a dtype, by the names of its ceilings, and how many of its products stand for one: f32 and f16 are taken
apart for AMX."""


def peak_flops(ceilings: Mapping[str, Any], dtype: str) -> float:
    """The products of a dtype in a second, two operations each, that the fastest instruction for them allows."""
    ways = _INSTRUCTIONS.get(dtype, _INSTRUCTIONS["f32"])
    return max(float(ceilings.get(name, 0)) / products for name, products in ways.items())


@functools.cache
def _measured(threads: int) -> Device:
    found = _native.ceilings()
    f32 = peak_flops(found, "f32")
    half = max(peak_flops(found, "bf16"), peak_flops(found, "f16"))
    memory, cache = ({name: float(rate) for name, rate in found[at].items()} for at in ("memory", "cache"))
    rates = [max(at["read"], at["copy"], at["stream_copy"]) for at in (memory, cache)]
    # How fast the cores' own caches are is not measured: what they hold takes no time.
    caches = ((threads * float(found["l2_bytes"]), float("inf")), (float(found["l3_bytes"]), rates[1]))
    return Device(f"this CPU ({found['isa']}, {threads} threads)", f32, half, rates[0], caches=caches)


def this_device() -> Device:
    """The processor at hand, measured once for each number of threads, in about 50 ms."""
    return _measured(torch.get_num_threads())


def device_of(name: str | None) -> Device:
    """The device of that name; ``None`` is the processor at hand.

    Raises:
        ValueError: There is no profile of it; the message lists those there are.
    """
    if name is None:
        return this_device()
    found = _native.device_named(name)
    if found is None:
        raise ValueError(f"no profile of a device {name!r}; there are {', '.join(d.name for d in DEVICES.values())}")
    return DEVICES[found.lower()]


def gpu_of(backend: str) -> Device:
    """What programs of a GPU that is here are chosen for, such as ``"cuda:0"``: the published figures if it is one of
    :data:`DEVICES`, else what follows from the clocks that its driver tells."""
    return Device(*_native.profile_of(backend))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A program on a device's roofline.

    Attributes:
        seconds: The least time of one call.
        arithmetic: Share of it in steps that arithmetic bounds.
        bandwidth: Share of it in steps that memory bounds.
        launches: Share of it that starting kernels takes.
        kernels: By kernel family, its share of the time, the largest first.
    """

    seconds: float
    arithmetic: float
    bandwidth: float
    launches: float
    kernels: Mapping[str, float]


def place(
    steps: Sequence[tuple[str, str, str, float, float]], device: Device, is_half: bool, scale: float = 1.0
) -> Placement:
    """Puts the steps of a program, as ``Program.memory`` gives them, on a device's roofline.

    Args:
        steps: ``(name, kernel, module, operations, bytes)`` of each.
        device: The device.
        is_half: Whether products are of 16-bit numbers.
        scale: Factor on the bytes: one half asks about 16-bit numbers for a program in f32.
    """
    rates = {"convolution": device.half_flops if is_half else max(device.f32_flops, device.tf32_flops)}
    rate = device.half_flops if is_half else device.f32_flops
    arithmetic = bandwidth = 0.0
    kernels: dict[str, float] = {}
    for _, kernel, _, flops, size in steps:
        compute, memory = flops / rates.get(kernel, rate), size * scale / device.bandwidth_of(size * scale)
        if compute > memory:
            arithmetic += compute
        else:
            bandwidth += memory
        kernels[kernel] = kernels.get(kernel, 0.0) + max(compute, memory) + device.launch_s
    launches = device.launch_s * len(steps)
    total = max(arithmetic + bandwidth + launches, 1e-12)
    shares = {name: spent / total for name, spent in sorted(kernels.items(), key=lambda item: -item[1])}
    return Placement(total, arithmetic / total, bandwidth / total, launches / total, shares)


def sentences(program: _native.Program, dims: Sequence[int], device: Device, facts: Mapping[str, Any]) -> list[str]:
    """What can be said about a program at these sizes on a device, in plain sentences with the numbers.

    Args:
        program: The program.
        dims: Its run-time sizes.
        device: The device.
        facts: ``is_half``, ``batch_at`` (which of the sizes is the batch, or ``None``), ``spatial_at`` (which are heights
            and widths), ``weight_bytes``, ``took_s`` (a measured time on this device, or ``None``), ``fast_bytes`` (what
            ``memory="fast"`` would keep beside the weights, or ``None``), ``channels_last`` (slots of weights that lie so).
    """
    memory = program.memory(dims)
    steps, is_half = memory["steps"], bool(facts["is_half"])
    here = place(steps, device, is_half)
    took = facts.get("took_s")
    if here.seconds < _NOTHING:
        last = f" The last one took {_seconds(took)}." if took else ""
        return [f"On {device.name} caches hold all that it touches: what bounds it is the call itself.{last}"]
    dearest = ", ".join(f"{name} {share:.0%}" for name, share in list(here.kernels.items())[:3])
    out = [
        f"On {device.name} one call takes at least {_seconds(here.seconds)}: {here.arithmetic:.0%} of that is bound by "
        f"arithmetic, {here.bandwidth:.0%} by memory bandwidth"
        + (f", {here.launches:.0%} by launches" if device.launch_s else "")
        + f" ({dearest})."
    ]
    if took:
        share = min(here.seconds / took, 1.0)
        out.append(
            f"The last one took {_seconds(took)}, {share:.0%} of what the device can do: in this form nothing can make "
            f"it more than {1 / share:.1f} times as fast at these sizes and this type."
        )
    out += _batch(program, dims, device, facts, here)
    out += _size(program, dims, device, facts, here)
    if not is_half and device.half_flops > 1.2 * device.f32_flops:
        half = place(steps, device, True, scale=0.5)
        out.append(
            f"In 16 bits the bound is {_seconds(half.seconds)}, {here.seconds / half.seconds:.1f} times as fast."
        )
    if here.bandwidth > 0.5 and device.launch_s:
        out.append(
            "More than half of it waits for memory: what helps is fewer bytes "
            f"({'larger batches' if is_half else '16 bits, larger batches'}, fused ops), not faster products."
        )
    if here.launches > 0.2:
        out.append("A fifth of it or more is launches: larger sizes or batches cost less than they seem to.")
    if device.memory_bytes:
        out += _memory(memory, device, facts, here)
    more = int(facts.get("fast_bytes") or 0) - memory["derived_bytes"]
    if more > 0:
        # Packing reads a weight and writes its panels.
        spent = 2 * more / device.bandwidth
        out.append(
            f'memory="fast" would keep {more / 1e9:.2f} GB more of packed weights; packing them takes {_seconds(spent)} of '
            f"each call at least, {spent / (took or here.seconds):.0%} of it."
        )
    return out


def compiled_for(
    lowered: LoweredGraph, device: Device, precision: str, backend: str | None = None
) -> tuple[_native.Program, list[str]]:
    """A program as it would be compiled for a device, and what is different about it.

    Args:
        lowered: The graph.
        device: One of :data:`DEVICES`, or what :func:`gpu_of` gave.
        precision: As of the module.
        backend: The backend of the device, if it is here.
    """
    # What panels a processor would keep is nothing to a GPU.
    profile = device.name if backend is None else backend
    program, _ = _native.compile(lowered.builder, precision=precision, profile=profile, memory="low")
    here, _ = _native.compile(lowered.builder, precision=precision)
    there, count = (sum(p.explain()["steps"].values()) for p in (program, here))
    if there >= count:
        return program, []
    return program, [
        f"Compiled for {device.name} it has {there} kernels, {count - there} fewer than for a processor: what these compute "
        "is computed again where it is used, which takes less than a launch and the bytes between."
    ]


def fast_bytes(lowered: LoweredGraph, dims: Sequence[int], precision: str) -> int:
    """What a program would keep beside its weights under ``memory="fast"``."""
    program, _ = _native.compile(lowered.builder, precision=precision, memory="fast")
    return int(program.memory(dims)["derived_bytes"])


def _memory(memory: Mapping[str, Any], device: Device, facts: Mapping[str, Any], here: Placement) -> list[str]:
    """What a program takes of a GPU's memory under each of the memory options, and whether it fits."""
    needed = int(facts["weight_bytes"]) + memory["arena_bytes"] + memory["derived_bytes"] + memory["output_bytes"]
    # Convolutions of libraries read their channels as neighbours: a second form of the weight, or one made in each call.
    lying_so = facts.get("channels_last") or ()
    copies = [size for slot, size in memory["laid_out"] if slot not in lying_so]
    kept, low = needed + sum(copies), needed + max(copies, default=0)
    fits = "fits into" if kept <= device.memory_bytes else "does not fit into"
    out = [f"It needs {_bytes(kept)} and {fits} the {device.memory_bytes / 1e9:.0f} GB of {device.name}."]
    if low < kept:
        # Laying a weight out reads it and writes it.
        spent = 2 * sum(copies) / device.bandwidth
        also = ", and then it fits" if low <= device.memory_bytes < kept else ""
        out.append(
            f'{_bytes(sum(copies))} of that are weights of convolutions that memory="fast" and "balanced" keep a second '
            'time, with channels as neighbours (not for a module in torch.channels_last). memory="low" needs '
            f"{_bytes(low)}{also}; laying them out takes {_seconds(spent)} of each call at least, "
            f"{spent / here.seconds:.0%} of it."
        )
    else:
        out.append('memory="low", "balanced" and "fast" need the same there: no weight is kept a second time.')
    if kept > device.memory_bytes and not facts["is_half"]:
        out.append(f"In 16 bits it would need about {_bytes(kept / 2)}.")
    elif low > device.memory_bytes:
        fewer = low - int(facts["weight_bytes"]) / 2
        also = ", and then it fits" if fewer <= device.memory_bytes else ""
        out.append(
            f"With its weights in 8 bits (GGUF's Q8_0, layerwise casting) it would need about {_bytes(fewer)}{also}."
        )
    return out


def _batch(
    program: _native.Program, dims: Sequence[int], device: Device, facts: Mapping[str, Any], here: Placement
) -> list[str]:
    """What a larger batch would do to the time of each of its items."""
    at = facts.get("batch_at")
    if at is None:
        return []
    larger = [4 * size if i == at else size for i, size in enumerate(dims)]
    each = place(program.memory(larger)["steps"], device, bool(facts["is_half"])).seconds / 4
    gain = here.seconds / each
    if gain < 1.05:
        return [
            f"A larger batch does not help: four times the batch leaves the bound of each item at {_seconds(each)}."
        ]
    return [
        f"A larger batch helps: four times the batch lowers the bound of each item to {_seconds(each)} ({gain:.2f} times)."
    ]


def _size(
    program: _native.Program, dims: Sequence[int], device: Device, facts: Mapping[str, Any], here: Placement
) -> list[str]:
    """What larger images would do."""
    spatial = facts.get("spatial_at") or ()
    if not spatial:
        return []
    for factor in _FACTORS:
        larger = [factor * size if i in spatial else size for i, size in enumerate(dims)]
        try:
            steps = program.memory(larger)["steps"]
            break
        except _native.NativeError:
            # The program is not for that size: an odd one that is doubled is even.
            continue
    else:
        return []
    there = place(steps, device, bool(facts["is_half"])).seconds
    times, area = there / here.seconds, float(factor) ** len(spatial)
    if times > 1.1 * area:
        why = "more than their pixels, since attention looks at every pair of them"
    elif times < 0.9 * area:
        why = "less than their pixels: at this size there is too little to do"
    else:
        why = "what their pixels cost"
    return [
        f"Larger images cost {why}: at {_FACTORS[factor]} the size in each direction the bound is {_seconds(there)}, "
        f"{times:.1f} times."
    ]


_NOTHING: Final = 1e-6
"""Seconds that are less than a call takes beside its kernels."""

_FACTORS = {2: "twice", 3: "three times", 5: "five times"}


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
