"""PyTorch's own cuDNN has plans for what the models of the zoo hand it, on GPUs that are not there: see
`on_described_devices.py`, which runs in processes of its own, as what cuDNN takes for the driver is the process's driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def no_device(folder: Path) -> Path:
    """Builds a driver without a device (`tests/cuda/no_device.cpp`); skips where something is missing.

    Functions of the driver that cuDNN names, and that the file does not have, say that there is no device.
    """
    cudnn = Path(torch.__file__).parents[1] / "nvidia/cudnn/lib/libcudnn_graph.so.9"
    if not cudnn.is_file():
        pytest.skip(f"no {cudnn}")
    own = (HERE.parent / "cuda/no_device.cpp").read_text()
    names = {name.decode() for name in re.findall(rb"\bcu[A-Z]\w+\b", cudnn.read_bytes(), re.ASCII)} - {"cuDNN"}
    others = [f'extern "C" int {name}() {{ return 100; }}' for name in sorted(names) if f"int {name}(" not in own]
    source, library = folder / "no_device.cpp", folder / "libcuda.so.1"
    source.write_text("\n".join([own, *others, ""]))
    options = ["-std=c++17", "-shared", "-fPIC", "-fno-builtin", "-w", "-Wl,-soname,libcuda.so.1"]
    try:
        done = subprocess.run(
            ["g++", *options, "-o", library, source, "-ldl"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        pytest.skip(f"no g++: {error}")
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16", "torch.float32"])
def test_cudnn_has_plans_for_every_model(dtype: str, tmp_path: Path) -> None:
    """A process for each type: after it has refused bf16 on a T4, cuDNN has no fused engines of f32 for other devices."""
    driver = no_device(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    environment = {**os.environ, "LD_PRELOAD": str(driver)}
    done = subprocess.run(
        [*command, f"{HERE / 'on_described_devices.py'}::test_every_kind_has_a_plan[{dtype}]"],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
        env=environment,
        timeout=900,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
