"""Models of diffusers beside the zoo, compiled, against their own f64 run: several sizes and batches, with one program."""

from __future__ import annotations

import copy
import itertools
import statistics
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import families_images
import oxidiff
from families import Family
from families_encoders import ENCODERS
from families_images import IMAGES
from families_unets import UNETS
from families_vaes import AUTOENCODERS, VAES, Autoencoder, result
from families_videos import VIDEOS
from oxidiff import testing
from oxidiff.module import dispatcher_of

F32_ERROR = 2e-5
"""Promised for a whole model in f32, relative to f64."""
HALF_ERROR_RATIO = 1.25
"""Promised for 16-bit models: the error against f64, over eager's own."""
HALF_INPUTS = 5
"""Inputs of an autoencoder in 16 bits: of the few pixels of one, both errors are as random as rounding is."""
UNSTORED = ("hidream",)
"""What is captured anew at each start: pieces."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
VAE_FAMILIES = {family.name: family for family in AUTOENCODERS}
FAMILIES = {family.name: family for family in (*UNETS, *VAES, *IMAGES, *VIDEOS, *ENCODERS)}


def _cases() -> Iterator[tuple[str, str]]:
    """Names and dtypes: each class once in bf16, if it is not run in pieces, which say nothing more of it."""
    seen: set[str] = set()
    for family in FAMILIES.values():
        yield family.name, "f32"
        if family.type_path not in seen and not family.fallbacks:
            yield family.name, "bf16"
        seen.add(family.type_path)


def _is_dynamic(dtype: str) -> bool:
    """Whether sizes vary. That one program serves all does not depend on the type, and takes most of a capture."""
    return dtype == "f32"


def _calls(family: Family | Autoencoder, dtype: str) -> list[tuple[tuple[int, ...], int]]:
    """Sizes and batches to call it with, every one of them once."""
    sizes, batches = family.sizes, family.batches
    if not _is_dynamic(dtype):
        return [(sizes[0], batches[-1])]
    count = max(len(sizes), len(batches))
    return [(sizes[i % len(sizes)], batches[i % len(batches)]) for i in range(count)]


@pytest.mark.parametrize(("name", "dtype"), list(_cases()))
@torch.no_grad()
def test_close_to_f64_at_every_size(name: str, dtype: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    module = family.build(DTYPES[dtype])
    compiled = oxidiff.compile(module, dynamic=_is_dynamic(dtype))
    first = None
    for size, batch in _calls(family, dtype):
        case = f"{name} {dtype} size {size} batch {batch}"
        inputs = family.example(batch, size, DTYPES[dtype])
        exact = family.exact(module, inputs)
        output = compiled(**inputs)
        if dtype == "f32":
            error = testing.relative_error(output, exact)
            assert error <= F32_ERROR, f"{case}: {error:.2e}"
        else:
            error = testing.typical_error(output, exact)
            # Afresh: some take what they are given apart.
            own = testing.typical_error(module(**family.example(batch, size, DTYPES[dtype])), exact)
            assert error <= HALF_ERROR_RATIO * own, f"{case}: {error:.2e}, eager {own:.2e}"
        report = oxidiff.report(compiled)
        first = first or report
        if not family.fallbacks:
            assert not report.fallbacks, case
        assert report.eager_calls == 0, case
        assert report.programs == first.programs or family.programs_by_size, f"{case} compiled again"
        assert report.captures == first.captures or family.captures_by_size, f"{case} captured again"
    assert report.programs == family.graphs or family.programs_by_size
    if dtype == "f32" and not family.fallbacks and not name.startswith(UNSTORED):
        # What cannot be told from something else could not be loaded at the next start.
        oxidiff.save_graph(compiled, tmp_path / "graph")
    reasons = [row["reason"] for row in report.fallbacks]
    for words in family.fallbacks:
        assert any(words in reason for reason in reasons), f"{words!r} is not among {reasons}"
    assert len(family.fallbacks) == len(reasons), reasons


UNTRACED = ("bria", "chroma", "flux-kontext", "flux2", "hunyuan-image", "longcat-image", "qwen-image", "z-image")
"""Models whose prompts and pictures may be of any length and size: no call takes a trace but the first."""


@pytest.mark.parametrize("name", UNTRACED)
@torch.no_grad()
def test_new_sizes_take_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    compiled = oxidiff.compile(family.build(torch.float32), cache=False, tune="off")
    (size, *others), batch = family.sizes, family.batches[0]
    compiled(**family.example(batch, size, torch.float32))
    (engine,) = dispatcher_of(compiled).engines()
    traces = engine._capturer.traces
    for other, text in zip(itertools.cycle((*others, size)), (20, 31, 14, 13), strict=False):
        monkeypatch.setattr(families_images, "TEXT", text)
        compiled(**family.example(batch, other, torch.float32))
        assert engine._capturer.traces == traces, (other, text)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VAE_FAMILIES)
@torch.no_grad()
def test_autoencoder_by_its_methods(name: str, dtype: str) -> None:
    """As pipelines call it, with the two networks inside compiled."""
    family = VAE_FAMILIES[name]
    if dtype not in family.dtypes:
        pytest.skip(f"in {dtype} it takes as long again, and says nothing more")
    module = family.build(DTYPES[dtype])
    exact_module = copy.deepcopy(module).double()
    eager = copy.deepcopy(module)
    compiled: Any = oxidiff.compile_pipe(types.SimpleNamespace(vae=module), dynamic=_is_dynamic(dtype)).vae
    first = None
    for size, batch in _calls(family, dtype):
        for method, make in family.calls():
            case = f"{name} {dtype} {method} size {size} batch {batch}"
            ratios = []
            for seed in [1] if dtype == "f32" else range(1, 1 + HALF_INPUTS):
                inputs = make(testing.Random(seed, DTYPES[dtype]), batch, size)
                wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
                exact = result(exact_module, method, wide)
                output = result(compiled, method, inputs)
                if dtype == "f32":
                    error = testing.relative_error(output, exact)
                    assert error <= F32_ERROR, f"{case}: {error:.2e}"
                else:
                    own = testing.typical_error(result(eager, method, inputs), exact)
                    ratios.append(testing.typical_error(output, exact) / own)
            if ratios:
                assert statistics.median(ratios) <= HALF_ERROR_RATIO, f"{case}: over eager's errors {ratios}"
        reports = [oxidiff.report(compiled.encoder), oxidiff.report(compiled.decoder)]
        assert all(report.eager_calls == 0 for report in reports), case
        counts = [(report.captures, report.programs) for report in reports]
        first = first or counts
        assert counts == first or family.programs_by_size, f"{case} captured or compiled again"
    found = [row["reason"] for report in reports for row in report.fallbacks]
    assert len(found) == len(family.fallbacks), found
    for words in family.fallbacks:
        assert any(words in reason for reason in found), f"{words!r} is not among {found}"
    if not family.programs_by_size:
        called = {"encode" if part == "encoder" else "decode": part for part in ("encoder", "decoder")}
        for method, _ in family.calls():
            part = called[method]
            report = oxidiff.report(getattr(compiled, part))
            assert report.programs == family.programs.get(part, 1), f"{name} {part}"
