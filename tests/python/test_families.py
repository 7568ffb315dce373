"""Models of diffusers beside the zoo, compiled, against their own f64 run: at several sizes and batches."""

from __future__ import annotations

import pytest
import torch

import oxidiff
from families_images import IMAGES
from oxidiff import testing

F32_ERROR = 2e-5
"""Promised for a whole model in f32, relative to f64."""
HALF_ERROR_RATIO = 1.25
"""Promised for 16-bit models: the error against f64, over eager's own."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
FAMILIES = {family.name: family for family in IMAGES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_close_to_f64_at_every_size(name: str, dtype: str) -> None:
    family = FAMILIES[name]
    module = family.build(DTYPES[dtype])
    compiled = oxidiff.compile(module)
    first = None
    for size in family.sizes:
        for batch in family.batches:
            case = f"{name} {dtype} size {size} batch {batch}"
            inputs = family.example(batch, size, DTYPES[dtype])
            exact = testing.reference(module, inputs)
            output = compiled(**inputs)
            if dtype == "f32":
                error = testing.relative_error(output, exact)
                assert error <= F32_ERROR, f"{case}: {error:.2e}"
            else:
                error = testing.typical_error(output, exact)
                own = testing.typical_error(module(**inputs), exact)
                assert error <= HALF_ERROR_RATIO * own, f"{case}: {error:.2e}, eager {own:.2e}"
            report = oxidiff.report(compiled)
            first = first or report
            if not family.fallbacks:
                assert not report.fallbacks, case
            assert report.eager_calls == 0, case
            assert report.programs == first.programs or family.programs_by_size, f"{case} compiled again"
            assert report.captures == first.captures or family.captures_by_size, f"{case} captured again"
    assert report.programs == family.graphs or family.programs_by_size
    reasons = [row["reason"] for row in report.fallbacks]
    for words in family.fallbacks:
        assert any(words in reason for reason in reasons), f"{words!r} is not among {reasons}"
    assert len(family.fallbacks) == len(reasons), reasons
