"""Every kernel that the models of the zoo need on a GPU compiles, and spills only where it is known to; without a GPU.

The models are those of `zoo.py`: kernels depend on the sizes of heads, and on which sizes are multiples of what is read at
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import zoo
from oxidiff import _native, testing

TORCH = os.path.dirname(torch.__file__)

TYPES = {
    torch.float16: ("UNet", "ControlNet", "SD3", "T5"),
    torch.bfloat16: ("Autoencoder", "CLIP", "Flux", "PixArt"),
    torch.float32: ("AutoencoderKL:decoder", "T5"),
}
"""Words in the classes of the models that are compiled in a type: models of one family share most kernels."""

ARCHS = {75: "T4", 80: "A100", 86: "A10", 89: "L4", 90: "H100", 100: "H100", 120: "H100"}
"""Architectures of the devices that people have, and the profile that is fused for there."""

EVERYTHING = os.environ.get("OXIDIFF_CUDA_ARCHS") == "all"
"""Every model in every type for every profile, every kernel for every architecture: minutes."""

UNIT = 16
"""Kernels of one compilation."""

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
    """Those that are compiled in ``dtype``."""
    paths = {name: model.type_path for name, model in testing.ZOO.items()}
    return [name for name, path in paths.items() if EVERYTHING or any(word in path for word in TYPES[dtype])]


def kernels(name: str, dtype: torch.dtype, profiles: list[str]) -> dict[str, str]:
    """The texts of a model's kernels by name."""
    graph, _ = zoo.lowered(name, dtype)
    programs = [_native.compile(graph.builder, backend="null", profile=profile)[0] for profile in profiles]
    return {name: text for program in programs for name, text in _native.cuda_kernels(program)}


def units(texts: Mapping[str, str]) -> Iterator[tuple[list[str], int]]:
    """What is compiled at once, for one architecture in turn: attention alone, as it takes as long as a dozen others.
    `tests/cuda_kernels.rs` has attention of every head size for three."""
    archs = list(ARCHS)
    attention = [[text] for name, text in texts.items() if name.startswith("attention_")]
    others = [text for name, text in texts.items() if not name.startswith("attention_")]
    chunks = [others[at : at + UNIT] for at in range(0, len(others), UNIT)]
    for parts in attention, chunks:
        for at, part in enumerate(parts):
            yield from ((part, arch) for arch in (archs if EVERYTHING else [archs[at % len(archs)]]))


def test_every_model_has_a_type() -> None:
    assert {name for dtype in TYPES for name in models(dtype)} == set(testing.names())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_kernel_of_every_model_compiles(dtype: torch.dtype, known_archs: list[int]) -> None:
    profiles = list(dict.fromkeys(ARCHS.values()))
    texts: dict[str, str] = {}
    for at, name in enumerate(models(dtype)):
        texts |= kernels(name, dtype, profiles if EVERYTHING else [profiles[at % len(profiles)]])
    failures, left_out = [], set()
    for unit, arch in units(texts):
        if arch not in known_archs:
            left_out.add(arch)
            continue
        try:
            spills = _native.cuda_spills(unit, arch, TORCH)
        except _native.NativeError as error:
            failures.append(str(error.args[1]))
            continue
        failures += [f"{name} for sm_{arch}: {size} bytes" for name, size in spills if size > allowed(name)]
    assert not failures, f"of {len(texts)} kernels:\n" + "\n".join(failures)
    if left_out:
        pytest.skip(f"NVRTC does not know {sorted(left_out)}; for the others all is fine")
