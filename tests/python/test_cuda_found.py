"""Which driver and which of NVIDIA's libraries are found and accepted, in processes that have stand-ins for them: an old
driver, an old device, the wheels of CUDA 12, torch without the DLPack C exchange API. Nothing of it is a panic, and nothing
silent."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stand_in
from files import python
from oxidiff import _native

_HERE = Path(__file__).parent
_LISTS = dict(
    re.findall(
        r"^const (\w+): Wanted.*?symbols: &\[(.*?)\]",
        (_HERE.parents[1] / "src/backend/cuda/library.rs").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
"""By library, the symbols that are asked of it."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a driver."""
    folder = tmp_path_factory.mktemp("driver")
    try:
        stand_in.driver(folder)
    except stand_in.NoCompilerError as error:
        pytest.skip(str(error))
    yield folder


def run(script: str, *arguments: str, driver: Path | None = None, **variables: str) -> str:
    """What a process prints that finds the driver there by its name."""
    return python(script, *arguments, **variables, **({} if driver is None else {"LD_LIBRARY_PATH": str(driver)}))


_FINDINGS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
print(json.dumps({name: (is_there, found) for name, is_there, found in native.cuda_findings(sys.argv[2])}))
"""
"""Without torch, whose libraries would be in the process already."""


def findings(torch_folder: Path, **options: Any) -> dict[str, tuple[bool, str]]:
    found = json.loads(run(_FINDINGS, str(_native.__file__), str(torch_folder), **options))
    return {name: (is_there, text) for name, (is_there, text) in found.items()}


def wheel(site: Path, folder: str, soname: str, version: str, library: str, without: str = "") -> Path:
    """A library of one of NVIDIA's wheels: it has every function that is asked for, and says its version."""
    path = site / "nvidia" / folder / "lib" / soname
    path.parent.mkdir(parents=True, exist_ok=True)
    functions = [
        name for name in re.findall(r'"(\w+)"', _LISTS[library]) if name not in (without, version.split("(")[0])
    ]
    text = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in functions)
    source = path.with_suffix(".cpp")
    source.write_text(f'{text}extern "C" unsigned long {version}\n')
    command = ["g++", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-o", str(path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    source.unlink()
    return path


def wheels_of_cuda_12(site: Path, nvrtc: str = "12, *minor = 8", without: str = "") -> dict[str, Path]:
    ask_nvrtc = f"nvrtcVersion(int* major, int* minor) {{ *major = {nvrtc}; return 0; }}"
    return {
        "nvrtc": wheel(site, "cuda_nvrtc", "libnvrtc.so.12", ask_nvrtc, "NVRTC"),
        "cublasLt": wheel(
            site, "cublas", "libcublasLt.so.12", "cublasLtGetVersion() { return 120803; }", "CUBLASLT", without
        ),
        "cudnn": wheel(site, "cudnn", "libcudnn.so.9", "cudnnGetVersion() { return 90800; }", "CUDNN"),
    }


def test_the_wheels_of_cuda_12_are_found_by_path(driver: Path, tmp_path: Path) -> None:
    paths = wheels_of_cuda_12(tmp_path)
    found = findings(tmp_path / "torch", driver=driver, FAKE_VERSION="12080")
    versions = {"nvrtc": "12.8", "cublasLt": "12.8", "cudnn": "9.8"}
    for name, path in paths.items():
        assert found[name] == (True, f"{versions[name]} at {path}")
    assert found["cuda driver"] == (True, "12.8 at libcuda.so.1")
    assert found["cuda device"] == (True, "this processor (sm_80)")


def system_copies(site: Path, folder: str, soname: str, version: str, library: str) -> Path:
    """A library as a system's CUDA toolkit has it: also by the name without a version."""
    path = wheel(site, folder, soname, version, library)
    named = path.with_name(soname.split(".so")[0] + ".so")
    if named != path:
        named.symlink_to(path)
    return path


def toolkit(site: Path, suffix: str, cuda: int = 12) -> Path:
    """The folder of a CUDA toolkit with cuDNN, of other versions than PyTorch's."""
    ask_nvrtc = f"nvrtcVersion(int* major, int* minor) {{ *major = {cuda}; *minor = 9; return 0; }}"
    system_copies(site, "all", f"libnvrtc.so{suffix}", ask_nvrtc, "NVRTC")
    ask_cublaslt = f"cublasLtGetVersion() {{ return {cuda}0900; }}"
    system_copies(site, "all", f"libcublasLt.so{suffix}", ask_cublaslt, "CUBLASLT")
    return system_copies(site, "all", f"libcudnn.so{suffix}", "cudnnGetVersion() { return 91200; }", "CUDNN").parent


def test_a_toolkit_of_the_system_does_not_come_before_pytorch_s_libraries(driver: Path, tmp_path: Path) -> None:
    paths = wheels_of_cuda_12(tmp_path)
    other = toolkit(tmp_path / "system", ".12")
    # The stubs of a toolkit, too.
    (other / "libcuda.so").symlink_to(other / "libcudnn.so")
    found = json.loads(
        run(_FINDINGS, str(_native.__file__), str(tmp_path / "torch"), LD_LIBRARY_PATH=f"{other}:{driver}")
    )
    versions = {"nvrtc": "12.8", "cublasLt": "12.8", "cudnn": "9.8"}
    for name, path in paths.items():
        assert found[name] == [True, f"{versions[name]} at {path}"]
    assert found["cuda driver"][0], found["cuda driver"]
    assert found["cuda device"] == [True, "this processor (sm_80)"]


@pytest.mark.parametrize("cuda", [12, 11])
def test_another_copy_that_is_loaded_first_does_where_one_file_is_all_of_it(
    driver: Path, tmp_path: Path, cuda: int
) -> None:
    paths = wheels_of_cuda_12(tmp_path)
    # Whoever has loaded it has given it the name: no other library gets it any more.
    other = toolkit(tmp_path / "system", "", cuda)
    names = [other / f"lib{name}.so" for name in ("nvrtc", "cublasLt", "cudnn")]
    found = findings(tmp_path / "torch", driver=driver, LD_PRELOAD=" ".join(map(str, names)))
    for name in ("nvrtc", "cublasLt"):
        at = other / f"lib{name}.so"
        if cuda == 12:
            assert found[name] == (True, f"12.9 at {at}, loaded before {paths[name]}")
        else:
            assert found[name][0] is False and f"{at} comes before {paths[name]}" in found[name][1]
    assert found["cudnn"][0] is False and f"{other / 'libcudnn.so'} comes before" in found["cudnn"][1]


def test_libraries_that_are_too_old_say_so(driver: Path, tmp_path: Path) -> None:
    paths = wheels_of_cuda_12(tmp_path, nvrtc="11, *minor = 8", without="cublasLtMatmul")
    found = findings(tmp_path / "torch", driver=driver)
    assert found["nvrtc"] == (False, f"NVRTC is 11.8 at {paths['nvrtc']}; 12.0 is needed")
    assert found["cublasLt"] == (False, f"{paths['cublasLt']} has no `cublasLtMatmul`: a newer one is needed")
    assert found["cudnn"][0], "one library does not stand for another"


def test_an_old_driver_and_an_old_device_are_reasons(driver: Path, tmp_path: Path) -> None:
    wheels_of_cuda_12(tmp_path)
    torch_folder = tmp_path / "torch"
    old = findings(torch_folder, driver=driver, FAKE_VERSION="11080")
    assert old["cuda driver"] == (False, "the NVIDIA driver is for CUDA 11.8; 12.0 is needed: update the driver")
    assert "cuda device" not in old
    device = findings(torch_folder, driver=driver, FAKE_ARCH="61")["cuda device"]
    assert device[0] is False
    assert "this processor has compute capability 6.1; 7.5 is the oldest that is supported" in device[1]

    stand_in.driver(tmp_path, "-DcuGraphUpload=gone")
    older = findings(torch_folder, driver=tmp_path)["cuda driver"]
    assert older == (False, "the NVIDIA driver has no `cuGraphUpload`: a newer driver is needed")


def test_a_gpu_that_is_newer_than_the_compiler(driver: Path) -> None:
    """One of a generation that it knows runs code for an older one; of the next generation it does not."""
    torch_folder = Path(torch.__file__).parent
    if not findings(torch_folder, driver=driver)["nvrtc"][0]:
        pytest.skip("this PyTorch has no NVRTC")
    is_there, text = findings(torch_folder, driver=driver, FAKE_ARCH="130")["cuda device"][:2]
    assert not is_there and "has compute capability 13.0, for which NVRTC" in text and "a newer PyTorch" in text
    assert findings(torch_folder, driver=driver, FAKE_ARCH="89")["cuda device"][0]
    assert findings(torch_folder, driver=driver, FAKE_ARCH="129")["cuda device"][0]


_MODULE = """
import json, sys, warnings
import torch
import oxidiff
from nets import Net, assert_close, image
from oxidiff import device, doctor

reasons = []
for index in range(3):
    try:
        device.device_of(torch.device("cuda", index))
        reasons.append(None)
    except oxidiff.UnsupportedError as error:
        reasons.append(str(error))
if reasons[0] is not None:
    # A module whose tensors are on such a device.
    device._devices[torch.device("cpu")] = reasons[0]
    net, x = Net().eval(), image()
    ours = oxidiff.compile(net, cache=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_close(ours(x), net(x))
        ours(x)
    assert [reasons[0] in str(w.message) for w in caught] == [True], caught
    assert ours.report().eager_calls == 2
    del device._devices[torch.device("cpu")]
bad = [text for is_good, subject, text in doctor.examine() if not is_good and "cuda" in subject]
print(json.dumps([reasons, bad]))
"""


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs torch for CUDA and no GPU")
def test_modules_behind_a_driver_older_than_torch_run_eager(driver: Path) -> None:
    reasons, bad = json.loads(run(_MODULE, driver=driver, FAKE_VERSION="12040").splitlines()[-1])
    why = f"the driver is for CUDA 12.4, PyTorch's libraries for {torch.version.cuda}: update the driver"
    assert reasons == [f"cuda:{index} cannot be used: backend cuda: {why}" for index in range(3)]
    assert bad == [f"backend cuda: {why}"], "the doctor says that it is a problem"
    reasons, bad = json.loads(run(_MODULE, driver=driver).splitlines()[-1])
    assert reasons == [None, None, "cuda:2 cannot be used: backend cuda: no device 2: there are 2"]
    assert bad == []


_WITHOUT_EXCHANGE = """
import sys
import pytest
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_tensors_are_read_by_attributes_where_torch_is_older() -> None:
    """torch 2.9 has no DLPack C exchange API: addresses come from `data_ptr`, workspace from the driver."""
    names = (
        "numbers_reach or second_call or weights_change or second_device or two_devices or loaded_on_the_other"
        " or inference_mode or without_memory_that_torch_lends"
    )
    text = run(_WITHOUT_EXCHANGE, str(_HERE / "on_stand_in.py"), "-k", names)
    if "no g++" in text:
        pytest.skip("no g++")
    assert int(re.findall(r"(\d+) passed", text)[0]) >= 8, text
