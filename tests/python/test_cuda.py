"""Modules on a GPU, as far as it goes without one: what is refused, and how; what is compiled, behind a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oxidiff
from files import python
from nets import Net, assert_close, image
from oxidiff import device
from oxidiff.store import bundle

_REASON = "cuda:0 cannot be used: backend cuda: no NVIDIA driver"


@pytest.mark.slow
def test_compiled_modules_behind_a_stand_in_for_the_driver() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(here / "on_stand_in.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parents[1], timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    if " passed" not in done.stdout:
        pytest.skip("no g++")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose device, the CPU's tensors standing for those on it, cannot be used."""
    monkeypatch.setitem(device._devices, torch.device("cpu"), _REASON)


@torch.no_grad()
def test_a_device_that_cannot_be_used_is_one_reason(refused: None) -> None:
    net = Net().eval()
    ours = oxidiff.compile(net, cache=False)
    with pytest.warns(oxidiff.FallbackWarning, match="no NVIDIA driver") as caught:
        assert_close(ours(image()), net(image()))
        assert_close(ours(image(1, 3, 6, 6)), net(image(1, 3, 6, 6)))
    assert len(caught) == 1
    report = ours.report()
    assert (report.calls, report.eager_calls, report.captures) == (2, 2, 0)
    assert [(row["reason"], row["count"]) for row in report.fallbacks] == [(_REASON, 2)]


@torch.no_grad()
def test_a_device_that_cannot_be_used_is_an_error_with_strict(refused: None) -> None:
    ours = oxidiff.compile(Net().eval(), cache=False, strict=True)
    with pytest.raises(oxidiff.UnsupportedError, match="no NVIDIA driver"):
        ours(image())


_SWITCHES = """
import torch
import oxidiff
from oxidiff import device

fast = device._precision
assert fast is not None
ours = oxidiff.compile(torch.nn.Linear(4, 4).eval(), cache=False, strict=True)
backends = torch.backends
mixed = 0
for name, value, expected in [
    ("start", None, (False, True)),
    ("backends.cuda.matmul.fp32_precision", "tf32", (True, True)),
    ("backends.mkldnn.matmul.fp32_precision", "bf16", (True, True)),
    ("set_float32_matmul_precision", "highest", (False, True)),
    ("set_float32_matmul_precision", "medium", (True, True)),
    ("backends.cuda.matmul.fp32_precision", "ieee", (False, True)),
    ("backends.cudnn.allow_tf32", False, (False, False)),
    ("backends.cudnn.conv.fp32_precision", "tf32", (False, True)),
    ("backends.cuda.matmul.allow_tf32", True, (True, True)),
    ("backends.cudnn.conv.fp32_precision", "none", (True, False)),
    ("backends.cuda.matmul.fp32_precision", "none", (False, False)),
    ("backends.fp32_precision", "tf32", (True, True)),
    ("backends.fp32_precision", "ieee", (False, False)),
]:
    *path, last = name.split(".")
    at = torch
    for part in path:
        at = getattr(at, part)
    if last.startswith("set_"):
        getattr(at, last)(value)
    elif value is not None:
        setattr(at, last, value)
    with torch.no_grad():
        ours(torch.ones(2, 4))
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        mixed += 1
    for device._precision in (None, fast):
        assert device.tf32() == expected, (name, value, device.tf32())
assert mixed, "nothing that this is about"
print("eager", ours.report().eager_calls)
"""


def test_every_switch_for_tf32_is_understood_also_where_old_and_new_are_mixed() -> None:
    assert python(_SWITCHES) == "eager 0\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_found_once_and_no_panic_crosses() -> None:
    if torch.version.cuda is None:
        assert "not an NVIDIA GPU" in str(device._open(torch.device("cuda", 0)))
        return
    for _ in range(2):
        with pytest.raises(oxidiff.UnsupportedError, match=r"cuda:0 cannot be used: .*driver"):
            device.device_of(torch.device("cuda", 0))
    assert isinstance(device._devices.pop(torch.device("cuda", 0)), str)


def test_other_devices_have_no_backend() -> None:
    with pytest.raises(oxidiff.UnsupportedError, match="no backend for tensors on meta"):
        device.device_of(torch.device("meta"))
    assert device.device_of(torch.device("cpu")) is None


def test_tensors_on_several_devices_are_a_reason() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.other = torch.nn.Parameter(torch.ones(3, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.other

    ours = oxidiff.compile(Mixed().eval(), cache=False)
    with pytest.raises(oxidiff.UnsupportedError, match="on several devices, other on meta and others on cpu"):
        oxidiff.warmup(ours, torch.ones(3))


def test_the_cache_knows_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path))
    (tmp_path / "cubins").mkdir()
    for name in ("a", "b"):
        (tmp_path / "cubins" / f"{name}.cubin").write_bytes(bytes(2**19))
    (tmp_path / "cubins" / "c.plan").write_bytes(bytes(2**20))
    assert "2 units of GPU kernels, 1.00 MiB" in bundle.list_cache()
    assert "1 plans of cuDNN, 1.00 MiB" in bundle.list_cache()
    assert bundle.clear() == 3
    assert "GPU kernels" not in bundle.list_cache() and "cuDNN" not in bundle.list_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["tests/gpu/run.py", "benches/gpu.py"])
def test_scripts_for_a_gpu_say_that_there_is_none(script: str) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=root, env=environment, check=False
    )
    assert (done.returncode, done.stdout.split(":")[0][:11]) == (0, "nothing was"), done.stdout + done.stderr


def test_the_benchmark_says_what_it_had_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches"))
    import gpu

    pair = {"ours_ms": 5.0, "other_ms": 8.0, "ratio": 0.625, "spread": 0.01, "rounds": 50, "peak_ratio": 0.9}
    pair |= {
        "peak_bytes": 2**30,
        "eager_peak_bytes": 2**30,
        "compile_s": 9.0,
        "first_s": 0.2,
        "error": 1e-3,
        "eager_calls": 0,
        "reasons": [],
    }
    pair |= {"computed_by": {"cuDNN": 40, "kernel": 60}, "refused": [], "no_graphs": [], "tune_s": 9.5}
    missing = {"failed": "no time left"}
    first, *_ = gpu.case_rows("sdxl", {"eager": pair, "default": missing})
    assert first[1] == "0.62 ± 0.01"
    assert first[3] == "", "whether the bar is met cannot be said"
    assert "default: no time left" in first[4]
    first, memory, cold = gpu.case_rows("sdxl", {"eager": pair, "default": {**pair, "compile_s": 3.0}})
    assert [row[3] for row in (first, memory, cold)] == ["yes", "yes", "yes"]
    ran_eager = {**pair, "eager_calls": 1, "reasons": ["a reason"]}
    first, *_ = gpu.case_rows("sdxl", {"eager": ran_eager})
    assert first[3] == "no"
    assert "a reason" in first[4]


def test_doctor_says_what_is_there() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "oxidiff", "doctor"]
    text = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    lines = {line[4:].split("  ")[0]: line for line in text.splitlines()}
    if not torch.cuda.is_available():
        assert lines["cuda"].endswith("no device")
    assert torch.version.cuda is None or "cuda driver" in lines
