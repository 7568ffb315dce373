"""Every kernel that the models of the zoo need on a GPU compiles, and spills only where it is known to; none has to be there.

The models are the public ones on the meta device, with a layer or two of each kind: kernels depend on the sizes of heads, and on
which sizes are multiples of what is read at once.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oxidiff import _native, testing
from oxidiff.capture import Capturer

TORCH = os.path.dirname(torch.__file__)
TYPES = (torch.float16, torch.bfloat16)
IN_F32 = ("sd15-unet", "sdxl-vae-decoder", "t5-small", "flux")

ARCHS = {75: "T4", 80: "A100", 86: "A10", 89: "L4", 90: "H100", 100: "H100", 120: "H100"}
"""Architectures of the devices that people have, and the profile that is fused for there."""

EVERYTHING = os.environ.get("OXIDIFF_CUDA_ARCHS") == "all"
"""Every model in every type for every profile, every kernel for every architecture: minutes."""

UNIT = 16
"""Kernels of one compilation."""

REPEATED = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_hidden_layers": 2,
    "transformer_layers_per_block": (1, 2, 2),
    "dual_attention_layers": (0,),
}
"""Settings that say how often a layer is repeated."""

SPILLS = Path(__file__).parents[1] / "cuda/data/spills.txt"
"""What may spill: lines of bytes, start of a name, reason."""


@pytest.fixture(scope="module")
def known_archs() -> list[int]:
    try:
        return _native.cuda_archs(TORCH)
    except _native.NativeError as error:
        pytest.skip(f"needs the CUDA build of PyTorch: {error.args[1]}")


def allowed(name: str) -> int:
    rows = (line.split(" ", 2) for line in SPILLS.read_text().splitlines())
    return next((int(most) for most, start, _ in rows if name.startswith(start)), 0)


def models(dtype: torch.dtype) -> list[str]:
    """Those that are compiled in ``dtype``: half of them in each of 16 bits."""
    if dtype is torch.float32:
        return [name for name in testing.names() if EVERYTHING or name in IN_F32]
    return testing.names() if EVERYTHING else testing.names()[TYPES.index(dtype) :: len(TYPES)]


def kernels(name: str, dtype: torch.dtype, profiles: list[str]) -> dict[str, str]:
    """The texts of a model's kernels by name."""
    overrides = {key: value for key, value in REPEATED.items() if key in testing.ZOO[name].config}
    with torch.device("meta"):
        module = testing.build(name, tiny=False, dtype=dtype, overrides=overrides)
    inputs = testing.example_inputs(name, tiny=False, dtype=dtype, overrides=overrides)
    capturer = Capturer(module)
    _, lowered = capturer.lowered(capturer.call((), inputs), _native.GraphBuilder)
    programs = [_native.compile(lowered.builder, backend="null", profile=profile)[0] for profile in profiles]
    return {name: text for program in programs for name, text in _native.cuda_kernels(program)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_every_kernel_of_every_model_compiles(dtype: torch.dtype, known_archs: list[int]) -> None:
    archs, profiles = list(ARCHS), list(dict.fromkeys(ARCHS.values()))
    found: dict[str, str] = {}
    for at, name in enumerate(models(dtype)):
        found |= kernels(name, dtype, profiles if EVERYTHING else [profiles[at % len(profiles)]])
    texts = list(found.values())
    failures = []
    for at in range(0, len(texts), UNIT):
        turn = at // UNIT
        for arch in archs if EVERYTHING else [archs[turn % len(archs)], archs[(turn + 3) % len(archs)]]:
            if arch not in known_archs:
                continue
            try:
                spills = _native.cuda_spills(texts[at : at + UNIT], arch, TORCH)
            except _native.NativeError as error:
                failures.append(str(error.args[1]))
                continue
            failures += [f"{name} for sm_{arch}: {size} bytes" for name, size in spills if size > allowed(name)]
    assert not failures, f"of {len(texts)} kernels:\n" + "\n".join(failures)
    unknown = sorted(set(archs) - set(known_archs))
    if unknown:
        pytest.skip(f"NVRTC does not compile for {unknown}; nothing is wrong with the others")
