"""Rows of `run.py` about weights: what a second checkpoint costs, switching between live sets, LoRA adapters."""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import oxidiff
from memory import unfilled
from oxidiff import testing
from oxidiff.watch import Structure, Watch

Answer = dict[str, Any]
NAME = "sd15-unet"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
RANK = 16


def _options() -> oxidiff.CompileOptions:
    return oxidiff.CompileOptions(cache=False, tune="off")


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.no_grad()
def attach(arguments: argparse.Namespace) -> Answer:
    """Making a second UNet of other weights ready, over what the first took; reading the weights is no part of it."""
    modules = [unfilled(NAME) for _ in range(2 + arguments.rounds)]
    inputs = testing.example_inputs(NAME, tiny=False, dtype=torch.bfloat16)
    compiled = [oxidiff.compile(module, options=_options()) for module in modules]
    first = _seconds(lambda: oxidiff.warmup(compiled[0], **inputs))
    gc.collect()
    others = [_seconds(lambda one=one: oxidiff.warmup(one, **inputs)) for one in compiled[1:]]
    second = statistics.median(others)
    reports = [oxidiff.report(one) for one in compiled]
    shared = all(r.captures == r.programs == 0 for r in reports[1:])
    return {
        "value": f"{second * 1e3:.0f} ms, {second / first:.1%}",
        "ok": shared and second <= 0.05 and second <= 0.02 * first,
        "note": f"the first: {first:.2f} s; {len(others)} others, median; captures and programs of the others: 0",
    }


@torch.no_grad()
def live_modules(arguments: argparse.Namespace) -> Answer:
    """Eight live UNets with different weights."""
    modules = [testing.build(NAME, seed=seed) for seed in range(8)]
    inputs = testing.example_inputs(NAME)
    compiled = [oxidiff.compile(module, options=_options()) for module in modules]
    compiled[0](**inputs)
    one = oxidiff.report(compiled[0]).arena_bytes
    worst = max(
        testing.relative_error(c(**inputs).sample, m(**inputs).sample) for c, m in zip(compiled, modules, strict=True)
    )
    reports = [oxidiff.report(c) for c in compiled]
    programs, arena = sum(r.programs for r in reports), reports[-1].arena_bytes / one
    return {
        "value": f"{programs} program, arena {arena:.2f}",
        "ok": programs == 1 and arena <= 1 and worst <= 2e-5,
        "note": f"SD1.5's structure, small; largest error against eager {worst:.1e}",
    }


@torch.no_grad()
def switch(arguments: argparse.Namespace) -> Answer:
    """What `use` adds to the next call."""
    module, other = testing.build(NAME, seed=0), testing.build(NAME, seed=1)
    inputs = testing.example_inputs(NAME, size=(8, 8))
    compiled: Any = oxidiff.compile(module, options=_options())
    compiled.bind(other.state_dict(), name="other")
    for name in ("other", None) * 3:
        compiled.use(name)
        compiled(**inputs)
    names: tuple[str | None, ...] = ("other", None)
    plain, switched = [], []
    for k in range(20 * arguments.rounds):
        plain.append(_seconds(lambda: compiled(**inputs)))
        compiled.use(names[k % 2])
        switched.append(_seconds(lambda: compiled(**inputs)))
    added = (statistics.median(switched) - statistics.median(plain)) * 1e3
    return {
        "value": f"{added:.2f} ms",
        "ok": added <= 1,
        "note": f"calls of {statistics.median(plain) * 1e3:.1f} ms with and without a switch before them, in turn",
    }


@torch.no_grad()
def lora(arguments: argparse.Namespace, *, tiny: bool = False) -> Answer:
    """Rank-16 adapters on all attention layers: switching, and steps with and without them, in turns. The steps without
    are those of a twin that has the same tensors and no adapters."""
    module = testing.build(NAME, tiny=tiny)
    inputs = testing.example_inputs(NAME, tiny=tiny, size=(32, 32))
    compiled: Any = oxidiff.compile(module, options=_options())
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin: Any = oxidiff.compile(copy.deepcopy(module, dict(shared)), options=_options())
    generator = torch.Generator().manual_seed(0)
    compiled(**inputs)
    twin(**inputs)
    for name in ("ink", "pastel"):
        state = {}
        for path, layer in module.named_modules():
            path = path.replace(".base_layer", "")
            if path.endswith(ATTENTION) and isinstance(layer, torch.nn.Linear):
                scale = (layer.in_features * RANK) ** -0.5
                state[f"unet.{path}.lora_A.weight"] = torch.randn(RANK, layer.in_features, generator=generator) * scale
                state[f"unet.{path}.lora_B.weight"] = torch.randn(layer.out_features, RANK, generator=generator)
        compiled.load_lora_adapter(state, prefix="unet", adapter_name=name)
    compiled.set_adapters("ink")
    first = compiled(**inputs).sample
    switches, before, after = [], [], []
    for k in range(2 * max(1, arguments.rounds // 2)):
        name = ("pastel", "ink")[k % 2]
        seconds = _seconds(lambda name=name: (compiled.set_adapters(name), compiled(**inputs)))
        steps = [(_seconds(lambda: twin(**inputs)), _seconds(lambda: compiled(**inputs))) for _ in range(3)]
        before += [plain for plain, _ in steps]
        after += [adapted for _, adapted in steps]
        switches.append(seconds - min(adapted for _, adapted in steps))
    difference = float((compiled(**inputs).sample - first).abs().max())
    report = oxidiff.report(compiled)
    seconds = statistics.median(switches)
    ratio = statistics.median(adapted / plain for plain, adapted in zip(before, after, strict=True))
    recompiles = report.captures - 1 + report.programs - 1 + oxidiff.report(twin).programs
    return {
        "value": f"{seconds:.2f} s, step {ratio:.2f}, {recompiles} recompiles, A-B-A {difference:.0e}",
        "ok": seconds <= 1.5 and ratio <= 1.01 and recompiles == 0 and difference == 0 and not report.eager_calls,
        "note": f"f32, latent 32x32, {len(state) // 2} layers; {len(switches)} switches, each with the call after it, less "
        f"a call; {len(before)} pairs of steps, {statistics.median(before):.2f} s without adapters",
    }


@torch.no_grad()
def ip_adapter(arguments: argparse.Namespace) -> Answer:
    """Image prompt adapter on SD1.5's UNet: what another scale costs once a first change was seen."""
    module: Any = testing.build(NAME, tiny=False)
    testing.load_ip_adapter(module)
    inputs = testing.example_inputs(NAME, tiny=False, size=(16, 16))
    inputs["added_cond_kwargs"] = {"image_embeds": [torch.randn(inputs["sample"].shape[0], 1, 16)]}
    compiled: Any = oxidiff.compile(module, options=_options())

    def set_scale(value: float) -> None:
        for processor in module.attn_processors.values():
            if hasattr(processor, "scale"):
                processor.scale[:] = [value]

    def call(scale: float) -> float:
        set_scale(scale)
        return _seconds(lambda: compiled(**inputs))

    call(0.6)
    first = call(0.8)
    captures = oxidiff.report(compiled).captures
    added, steps = [], []
    for k in range(2 * max(2, arguments.rounds)):
        scale = 0.3 + 0.05 * k
        another, same = call(scale), call(scale)
        added.append(another - same)
        steps.append(same)
    found, expected = compiled(**inputs).sample, module(**inputs).sample
    report = oxidiff.report(compiled)
    error = testing.relative_error(found, expected)
    seconds = statistics.median(added)
    is_right = report.captures == captures and not report.eager_calls and error < 2e-5
    return {
        "value": f"{seconds * 1e3:.0f} ms, {report.captures - captures} captures",
        "ok": is_right,
        "note": f"f32, latent 16x16; {len(added)} scales, each with its first call less a second one; the first change, "
        f"which captures: {first - statistics.median(steps):.1f} s",
    }


def watch(arguments: argparse.Namespace) -> Answer:
    """What a call spends on noticing that nothing changed, for a model of many tensors."""
    module = unfilled("sdxl-unet")
    for tensor in module.parameters():
        # Memory of its own: untouched pages would all be the same page of zeros.
        tensor.data.zero_()
    watch = Watch(Structure(module), ())
    # The module is looked at once more if it was written meanwhile.
    assert not watch.poll(), "nothing changed"
    large = torch.zeros(64 << 20)
    warm, cold = [], []
    for _ in range(10 * arguments.rounds):
        warm.append(min(_seconds(watch.poll) for _ in range(20)))
        large.add_(1)
        cold.append(_seconds(watch.poll))
    seconds = statistics.median(warm)
    return {
        "value": f"{seconds * 1e6:.0f} us",
        "ok": seconds <= 120e-6,
        "note": f"{sum(1 for _ in module.parameters())} parameters; {statistics.median(cold) * 1e6:.0f} us after 256 MiB of "
        "other memory were written",
    }
