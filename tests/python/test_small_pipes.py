"""Whole pipelines of other families, every part compiled, against the same pipeline in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidiff
from oxidiff import testing
from oxidiff.pipelines.parts import parts_of
from small_pipes import Pipe, as_tensors
from small_pipes_images import IMAGE_PIPES
from small_pipes_videos import VIDEO_PIPES

MODEL_ERROR = 2e-5
"""Promised for one call of one model in f32."""
PIPES: dict[str, Pipe] = {pipe.name: pipe for pipe in (*IMAGE_PIPES, *VIDEO_PIPES)}


def _compiled_parts(pipe: Any) -> dict[str, Any]:
    """The compiled networks of a pipeline by their paths."""
    found = {}
    for path in parts_of(pipe):
        part = pipe
        for step in path.split("."):
            part = getattr(part, step, None)
        if isinstance(part, oxidiff.CompiledModule):
            found[path] = part
    return found


def _made(pipe: Any, case: Pipe, at: int) -> list[torch.Tensor]:
    """What a call makes; some pipelines take noise from torch's own generator, too."""
    torch.manual_seed(at)
    given = case.calls[at](pipe)
    return as_tensors(getattr(pipe(**given, generator=torch.Generator().manual_seed(at)), case.result))


@pytest.mark.parametrize("name", PIPES)
@torch.no_grad()
def test_made_as_in_eager(name: str) -> None:
    case = PIPES[name]
    eager, compiled = case.make(), oxidiff.compile_pipe(case.make())
    parts = _compiled_parts(compiled)
    modules = {path for path, part in compiled.components.items() if isinstance(part, nn.Module)}
    assert modules - {path.partition(".")[0] for path in parts} == set(case.left), "a network is left"
    first: dict[str, tuple[int, int]] = {}
    tolerance = MODEL_ERROR * ((case.steps + 1) * (1 + 2 * case.guidance) + 1)
    for at in range(len(case.calls)):
        for pipe in (eager, compiled):
            pipe.set_progress_bar_config(disable=True)
        expected, actual = (_made(pipe, case, at) for pipe in (eager, compiled))
        assert len(expected) == len(actual)
        for want, have in zip(expected, actual, strict=True):
            assert want.shape == have.shape
            assert want.isfinite().all()
            assert want.double().std() > 0.01, "a flat picture would hide every difference"
            error = testing.relative_error(have, want)
            assert error <= tolerance, f"{name}, call {at}: {error:.2e} > {tolerance:.2e}"
        for path, part in parts.items():
            report = oxidiff.report(part)
            assert report.eager_calls == 0, f"{path}, call {at}: {report.fallbacks}"
            count = first.setdefault(path, (report.captures, report.programs))
            if at and path not in case.captures_by_size and count != (0, 0):
                assert (report.captures, report.programs) == count, f"{path} captured or compiled again in call {at}"
    called = {path: oxidiff.report(part) for path, part in parts.items() if oxidiff.report(part).calls}
    drawing = ("unet", "transformer", "prior", "decoder", "latent_upsampler")
    assert any(path.startswith(drawing) for path in called), called
    reasons = [row["reason"] for report in called.values() for row in report.fallbacks]
    for words in case.fallbacks:
        assert any(words in reason for reason in reasons), f"{words!r} is not among {reasons}"
    assert len(case.fallbacks) == len(reasons), reasons
