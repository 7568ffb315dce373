"""Every model of the zoo, compiled, against its own f64 run: in f32 at two sizes in two batches, in 16 bits at one."""

from __future__ import annotations

import pytest
import torch

import oxidiff
from oxidiff import testing

F32_ERROR = 2e-5
"""Promised for a whole model in f32, relative to f64: far below what TF32 costs, enough for Winograd."""
HALF_ERROR_RATIO = 1.25
"""Promised for 16-bit models: the error against f64, over eager's own."""
CHECKED_BY_SIZE = ("pixart-alpha", "pixart-sigma")
"""Their position table is computed on the host from the size: every new size is checked by a trace of its own, which
finds the same program."""
BATCHES = (1, 3)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", testing.names())
@torch.no_grad()
def test_close_to_f64_at_every_size_with_one_program(name: str, dtype: str) -> None:
    module = testing.build(name, dtype=DTYPES[dtype])
    # That one program serves all sizes does not depend on the type, and takes most of a capture.
    is_dynamic = dtype == "f32"
    sizes = testing.ZOO[name].tiny_sizes if is_dynamic else testing.ZOO[name].tiny_sizes[-1:]
    batches = BATCHES if is_dynamic else BATCHES[-1:]
    compiled = oxidiff.compile(module, dynamic=is_dynamic)
    first = None
    for size in sizes:
        for batch in batches:
            case = f"{name} {dtype} size {size} batch {batch}"
            inputs = testing.example_inputs(name, batch=batch, size=size, dtype=DTYPES[dtype])
            exact = testing.reference(module, inputs)
            output = compiled(**inputs)
            if dtype == "f32":
                assert testing.relative_error(output, exact) <= F32_ERROR, case
            else:
                error = testing.typical_error(output, exact)
                own = testing.typical_error(module(**inputs), exact)
                assert error <= HALF_ERROR_RATIO * own, f"{case}: {error:.2e}, eager {own:.2e}"
            report = oxidiff.report(compiled)
            first = first or (report.captures, report.programs)
            assert report.programs == first[1], f"{case} compiled again"
            assert report.captures == first[0] or name in CHECKED_BY_SIZE, f"{case} captured again"
    assert not report.fallbacks
    assert report.eager_calls == 0
    assert report.calls == len(sizes) * len(batches)


@pytest.mark.parametrize("name", ["sd15-unet", "sdxl-unet", "sd15-vae-decoder"])
@torch.no_grad()
def test_any_size_equals_eager(name: str) -> None:
    """Odd sizes and sizes that the UNet's levels do not divide take other paths in the model."""
    module = testing.build(name)
    compiled = oxidiff.compile(module)
    compiled(**testing.example_inputs(name, size=(16, 16)))
    for size in (1, 1), (7, 9), (12, 8), (13, 16):
        inputs = testing.example_inputs(name, batch=2, size=size)
        try:
            expected = testing.reference(module, inputs)
        except RuntimeError as eager_error:
            with pytest.raises(type(eager_error)):
                compiled(**inputs)
            continue
        assert testing.relative_error(compiled(**inputs), expected) <= F32_ERROR, size


@torch.no_grad()
def test_output_classes_and_tuples() -> None:
    """`return_dict` changes the structure of the call, not its values."""
    module = testing.build("sd15-unet")
    compiled = oxidiff.compile(module)
    inputs = testing.example_inputs("sd15-unet")
    wrapped = compiled(**inputs)
    plain = compiled(**inputs, return_dict=False)
    assert type(wrapped) is type(module(**inputs))
    assert isinstance(plain, tuple)
    assert torch.equal(wrapped.sample, plain[0])


@torch.no_grad()
def test_the_same_call_twice_gives_the_same_bits() -> None:
    compiled = oxidiff.compile(testing.build("sd15-unet"))
    small, large = (testing.example_inputs("sd15-unet", size=size) for size in ((8, 8), (16, 24)))
    before = compiled(**small).sample.clone()
    compiled(**large)
    assert torch.equal(compiled(**small).sample, before)


def test_builds_differ_by_rounding_only() -> None:
    wide, narrow = (testing.build("clip-l", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for (name, kept), rounded in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(kept.to(torch.bfloat16), rounded), name


def test_relative_error_sees_nan_shape_and_count() -> None:
    one = torch.ones(3)
    assert testing.relative_error(one, one) == 0
    assert testing.relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert testing.relative_error(torch.tensor([1, torch.nan, 1]), one) == float("inf")
    assert testing.relative_error([one, one], [one]) == float("inf")
    assert testing.relative_error(torch.ones(4), one) == float("inf")
