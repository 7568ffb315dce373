"""The functions on the package's namespace, and options."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidiff
from nets import Net, assert_close, image
from oxidiff import CompileOptions
from oxidiff.__main__ import main
from oxidiff.options import parse_bytes


def test_public_names_are_documented() -> None:
    assert sorted(oxidiff.__all__) == list(oxidiff.__all__)
    for name in oxidiff.__all__:
        assert inspect.getdoc(getattr(oxidiff, name)), name
    assert oxidiff.oneflow_compile is oxidiff.compile


@torch.no_grad()
def test_decorator() -> None:
    @oxidiff.compile
    def plain(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)

    @oxidiff.compile(precision="eager", strict=True)
    def with_options(x: Tensor) -> Tensor:
        """Doubles."""
        return x * 2

    x, y = image(5, 7), image(5, 7, seed=1)
    assert_close(plain(x, y), (x * y).sum(-1))
    assert_close(plain(x[:2], y[:2]), (x[:2] * y[:2]).sum(-1))
    assert_close(with_options(x), x * 2)
    assert with_options.__doc__ == "Doubles."
    assert oxidiff.report(plain).calls == 2
    assert with_options.report().eager_calls == 0


@oxidiff.compile
def doubled(x: Tensor) -> Tensor:
    """Found by its name."""
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_functions_are_copied_as_functions_are(duplicate: Callable[[Any], Any]) -> None:
    assert duplicate(doubled) is doubled
    other: Any = oxidiff.compile(tripled, strict=True)
    assert_close(duplicate(other)(image()), image() * 3)
    assert duplicate(other).__wrapped__ is tripled

    net = Net().eval()
    net.function = doubled
    assert duplicate(net).function is doubled
    method = duplicate(oxidiff.compile(net.forward, strict=True))
    assert_close(method(image()), net(image()))
    if duplicate is not copy.copy:
        assert_close(oxidiff.compile(duplicate(net))(image()), net(image()))
        net.linear.weight.zero_()
        assert not torch.equal(method(image()), net(image()))


@torch.no_grad()
def test_function_follows_what_it_reads_from_outside() -> None:
    linear, shift, power = nn.Linear(4, 4).eval(), torch.ones(4), 2

    def function(x: Tensor) -> Tensor:
        return linear(x) ** power + shift

    compiled = oxidiff.compile(function)
    x = image(3, 4)
    assert_close(compiled(x), function(x))
    linear.weight.mul_(3)
    assert_close(compiled(x), function(x))
    shift.add_(1)
    assert_close(compiled(x), function(x))
    shift = torch.zeros(4)
    assert_close(compiled(x), function(x))
    power = 3
    assert_close(compiled(x), function(x))
    linear = nn.Linear(4, 4).eval()
    assert_close(compiled(x), function(x))


@torch.no_grad()
def test_bound_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def decode(self, x: Tensor) -> Tensor:
            return self.linear(x) * 2

    model = Model().eval()
    decode = oxidiff.compile(model.decode, strict=True)
    x = image(3, 4)
    assert_close(decode(x), model.decode(x))
    model.linear.weight.zero_()
    assert_close(decode(x), model.decode(x))


@torch.no_grad()
def test_new_sizes_need_nothing_new() -> None:
    module = Net().eval()
    compiled = oxidiff.compile(module, strict=True)
    compiled(image(2, 3, 32, 32))
    before = oxidiff.report(compiled)
    for shape in ((2, 3, 40, 24), (1, 3, 64, 64), (5, 3, 16, 48), (2, 3, 32, 32)):
        assert_close(compiled(image(*shape)), module(image(*shape)))
    after = oxidiff.report(compiled)
    assert (after.captures, after.programs, after.variants) == (before.captures, before.programs, before.variants)
    assert after.eager_calls == 0


@torch.no_grad()
def test_two_modules_share_a_program() -> None:
    # A width of their own: a program would be shared with what another test left alive.
    modules = [Net(channels=10).eval() for _ in range(3)]
    compiled: list[Any] = [oxidiff.compile(m, strict=True) for m in modules]
    for module, fast in zip(modules, compiled, strict=True):
        assert_close(fast(image()), module(image()))
    reports = [oxidiff.report(c) for c in compiled]
    assert [r.programs for r in reports] == [1, 0, 0]
    assert len({r.graph_hash for r in reports}) == 1
    assert [r.shared_with for r in reports] == [2, 2, 2]
    other = oxidiff.compile(modules[0], precision="fast", cache=False)
    other(image())
    assert oxidiff.report(other).programs == 1


@torch.no_grad()
def test_warmup() -> None:
    module = Net().eval()
    compiled = oxidiff.compile(module, strict=True)
    oxidiff.warmup(compiled, image(), shapes=[(3, 3, 16, 16), {0: (1, 3, 20, 12)}])
    report = oxidiff.report(compiled)
    assert (report.captures, report.calls) == (1, 0)
    assert_close(compiled(image(3, 3, 16, 16)), module(image(3, 3, 16, 16)))
    with pytest.raises(ValueError, match="4 dimensions"):
        oxidiff.warmup(compiled, image(), shapes=[(3, 16)])
    with pytest.raises(ValueError, match="'y'"):
        oxidiff.warmup(compiled, image(), shapes=[{"y": (3, 16)}])
    for size in (-1, 0, 1.5, True):
        with pytest.raises(ValueError, match="ints of at least 1"):
            oxidiff.warmup(compiled, image(), shapes=[(size, 3, 16, 16)])
    for ask in (oxidiff.warmup, oxidiff.estimate):
        with pytest.raises(oxidiff.CaptureError, match=r"in conv: .* of 3 channels.* an input of \[2, 5, 12, 10\]"):
            ask(oxidiff.compile(module), image(2, 5, 12, 10))


@torch.no_grad()
def test_shapes_of_warmup_by_the_names_of_parameters() -> None:
    """Whether an argument is passed by its name or not."""

    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, *rest: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return sum(rest, x) if scale is None else x * scale

    for args, kwargs in (((image(),), {}), ((), {"x": image()})):
        compiled: Any = oxidiff.compile(Net().eval(), strict=True)
        oxidiff.warmup(compiled, *args, **kwargs, shapes=[{"x": (1, 3, 8, 8)}])
        assert len(oxidiff.report(compiled).sizes) == 2
        with pytest.raises(ValueError, match="no tensor is passed as 'factor'"):
            oxidiff.warmup(compiled, *args, **kwargs, shapes=[{"factor": (1, 3, 8, 8)}])
    one = torch.ones(2, 4)
    compiled = oxidiff.compile(Takes().eval(), strict=True)
    oxidiff.warmup(compiled, one, scale=one, shapes=[{"x": (3, 4), "scale": (3, 4)}])
    assert len(oxidiff.report(compiled).sizes) == 2
    for name in ("rest", "self", "args", "scale"):
        with pytest.raises(ValueError, match=f"no tensor is passed as '{name}'"):
            oxidiff.warmup(compiled, one, one, shapes=[{name: (3, 4)}])
    with pytest.raises(ValueError, match="'x' and 0 are one argument"):
        oxidiff.warmup(compiled, one, shapes=[{"x": (3, 4), 0: (4, 4)}])


def test_warmup_without_no_grad() -> None:
    compiled = oxidiff.compile(Net().eval())
    compiled.warmup(image())  # type: ignore[operator]
    with torch.no_grad():
        compiled(image())
    assert oxidiff.report(compiled).eager_calls == 0


@torch.no_grad()
def test_not_dynamic() -> None:
    module = Net().eval()
    compiled = oxidiff.compile(module, dynamic=False, strict=True)
    for shape in ((2, 3, 12, 10), (2, 3, 12, 12)):
        assert_close(compiled(image(*shape)), module(image(*shape)))
    assert oxidiff.report(compiled).captures == 2
    assert not oxidiff.explain(compiled).variants[0]["symbols"]


@torch.no_grad()
def test_check() -> None:
    module = Net().eval()
    compiled: Any = oxidiff.compile(module, check=True)
    assert_close(compiled(image()), module(image()))
    strict: Any = oxidiff.compile(module, check=1e-30)
    module.linear.weight.mul_(1.0001)
    with pytest.raises(oxidiff.CheckError, match="relative error"):
        strict(image())
        raise oxidiff.CheckError("a relative error of exactly 0 is fine as well")


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("precision", "high", ValueError),
        ("tune", True, ValueError),
        ("memory", "huge", ValueError),
        ("dynamic", 1, TypeError),
        ("strict", None, TypeError),
        ("max_specializations", 0, ValueError),
        ("max_specializations", 2.5, TypeError),
        ("max_specializations", 2**80, ValueError),
        ("tune_budget_s", -1, ValueError),
        ("tune_budget_s", float("nan"), ValueError),
        ("memory_budget", "2 parsecs", ValueError),
        ("memory_budget", -5, ValueError),
        ("memory_budget", 1.5, TypeError),
        ("memory_budget", "9999999999TB", ValueError),
        ("memory_budget", 2**63, ValueError),
        ("graph_file", 3, TypeError),
        ("graph_file", "", ValueError),
        ("graph_file", b"", ValueError),
        ("check", "yes", TypeError),
        ("check", -1.0, ValueError),
        ("nan_guard", 1, TypeError),
    ],
)
def test_wrong_options_name_the_field(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        CompileOptions(**{field: value})
    with pytest.raises(error):
        oxidiff.compile(Net(), **{field: value})


def test_option_objects() -> None:
    assert CompileOptions(memory_budget="2GiB").memory_budget == 2**31
    assert CompileOptions(check=False).check is None
    assert CompileOptions().replace(tune="off").tune == "off"
    assert copy.deepcopy(CompileOptions(check=0.1)) == CompileOptions(check=0.1)
    assert CompileOptions.of({"strict": True}, tune="off") == CompileOptions(strict=True, tune="off")
    assert hash(CompileOptions()) == hash(CompileOptions())
    with pytest.raises(AttributeError):
        CompileOptions().tune = "off"  # type: ignore[misc]
    with pytest.raises(TypeError, match="did you mean 'precision'"):
        oxidiff.compile(Net(), precison="fast")
    with pytest.raises(TypeError, match="options are"):
        CompileOptions.of(zzz=1)
    with pytest.raises(TypeError, match="CompileOptions or a mapping"):
        CompileOptions.of(3)


@pytest.mark.parametrize(
    ("text", "count"), [("2GiB", 2**31), ("500 MB", 5 * 10**8), ("1.5k", 1500), (".5kib", 512), (7, 7), ("7", 7)]
)
def test_parse_bytes(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


def test_onediff_options() -> None:
    with pytest.warns(UserWarning, match="use_graph"):
        options = CompileOptions.of(use_graph=True, max_cached_graph_size=3)
    assert options.max_specializations == 3


def test_onediff_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("onediff", "onediffx")]:
        monkeypatch.delitem(sys.modules, name)
    import oxidiff.compat.onediff as compat

    if not compat.install():
        pytest.skip("the real OneDiff is installed")
    from onediff.infer_compiler import OneflowCompileOptions, oneflow_compile
    from onediff.torch_utils import TensorInplaceAssign
    from onediffx import compile_pipe
    from onediffx.lora import load_and_fuse_lora, update_graph_with_constant_folding_info

    assert callable(compile_pipe)
    assert callable(load_and_fuse_lora)
    compiled = oneflow_compile(Net(), use_graph=True, dynamic=False, options={})
    assert not oxidiff.module.dispatcher_of(compiled).options.dynamic
    with TensorInplaceAssign(compiled):
        update_graph_with_constant_folding_info(compiled)
    options = OneflowCompileOptions(max_cached_graph_size=5, run_graph_by_vm=True)
    with pytest.warns(UserWarning, match="run_graph_by_vm"):
        compiled = oneflow_compile(Net(), options=options)
    assert oxidiff.module.dispatcher_of(compiled).options.max_specializations == 5
    with pytest.raises(TypeError, match="unknown option"):
        OneflowCompileOptions(zzz=1)
    # What was not set reads as it does there, and changes nothing.
    options = OneflowCompileOptions()
    assert (options.max_cached_graph_size, options.use_graph, options.debug_level, options.dynamic) == (
        9,
        True,
        -1,
        True,
    )
    assert options.graph_file is None and options.graph_file_device is None and options.run_graph_by_vm is None
    with pytest.raises(AttributeError, match="zzz"):
        _ = options.zzz
    assert CompileOptions.of(options) == CompileOptions()
    options.oneflow.max_cached_graph_size = 4
    assert CompileOptions.of(copy.deepcopy(options)).max_specializations == options.max_cached_graph_size == 4


@torch.no_grad()
def test_onediff_methods_and_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("onediff", "onediffx")]:
        monkeypatch.delitem(sys.modules, name)
    import oxidiff.compat.onediff as compat

    if not compat.install():
        pytest.skip("the real OneDiff is installed")
    from onediff.infer_compiler import oneflow_backend, oneflow_compile

    net = Net().eval()
    compiled, path = oneflow_compile(net), str(tmp_path / "unet.graph")
    expected = compiled(image())
    with pytest.warns(UserWarning, match="process_state_dict has no meaning here"):
        compiled.save_graph(path, process_state_dict=lambda state: state)
    compiled.save_graph(path)
    loaded = oneflow_compile(net)
    loaded.load_graph(path, "cpu", True)
    loaded.load_graph(path, device="cpu", run_warmup=False)
    with pytest.warns(UserWarning, match="state_dict has no meaning here"):
        loaded.load_graph(path, None, state_dict={"graph": b""})
    assert torch.equal(loaded(image()), expected)
    torch.testing.assert_close(torch.compile(net, mode="reduce-overhead", backend=oneflow_backend)(image()), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("said", "is_off"),
    [("1", True), ("true", True), ("maybe", True), ("0", False), ("no", False), ("Off", False), ("", False)],
)
def test_disabled_by_the_environment(said: str, is_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDIFF_DISABLE", said)
    compiled = oxidiff.compile(Net().eval(), strict=True)
    compiled(image())
    report = oxidiff.report(compiled)
    assert (report.captures, report.eager_calls) == ((0, 1) if is_off else (1, 0))


@torch.no_grad()
def test_what_is_disabled_compiles_nothing_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDIFF_DISABLE", "1")
    compiled: Any = oxidiff.compile(Net().eval(), strict=True)
    with pytest.warns(oxidiff.FallbackWarning, match="nothing is compiled: .*OXIDIFF_DISABLE") as seen:
        oxidiff.warmup(compiled, image(), shapes=[(1, 3, 8, 8)])
        oxidiff.warmup(compiled, image())
    assert len(seen) == 1, "it is said once"
    with pytest.raises(oxidiff.UnsupportedError, match="OXIDIFF_DISABLE"):
        oxidiff.profile(compiled, image())
    compiled(image())
    report = oxidiff.report(compiled)
    assert (report.captures, report.programs, report.eager_calls) == (0, 0, 1)
    (row,) = report.fallbacks
    assert "OXIDIFF_DISABLE" in row["reason"] and row["count"] == 1
    assert "OXIDIFF_DISABLE" in str(report) and "OXIDIFF_DISABLE" in str(oxidiff.explain(compiled))
    assert oxidiff.estimate(compiled, image()).peak_bytes > 0, "a question that runs nothing has its answer"


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"background.*check"):
        CompileOptions(background=True, check=True)
    assert CompileOptions(background=True, check=False).check is None
    assert CompileOptions(graph_file="~/net.oxi").graph_file == str(Path.home() / "net.oxi")
    assert CompileOptions(graph_file=b"~/net.oxi").graph_file == str(Path.home() / "net.oxi")


_TRIES = """
import os, sys, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import oxidiff
from oxidiff import _native, doctor
print(*[str(w.message) for w in seen if "OXIDIFF" in str(w.message)], sep="\\n")
print(*[f"{name}: {found}" for fine, name, found in doctor.examine() if not fine and "OXIDIFF" in name], sep="\\n")
os.chdir("/")
print("cache in", _native.cache_dir())
"""


def test_variables_that_are_not_understood_are_named(tmp_path: Path) -> None:
    wrong = {
        "OXIDIFF_NUM_THREADS": "two",
        "OXIDIFF_ISA": "sse2",
        "OXIDIFF_DISABLE_PASS": "canonicalise",
        "OXIDIFF_DISABLE": "?",
        "OXIDIFF_BACKEND": "tpu",
    }
    right = {"OXIDIFF_VERIFY": "on", "OXIDIFF_DEBUG": "0", "OXIDIFF_CACHE_DIR": "here", "OXIDIFF_NUM_THREAD": "1"}
    environment = {**os.environ, **wrong, **right}
    done = subprocess.run(
        [sys.executable, "-c", _TRIES], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "OXIDIFF_NUM_THREADS=two is not a number of threads, 1 or more: PyTorch's number holds"
    assert [re.split("[=:]", line)[0] for line in lines[:5]] == [
        "OXIDIFF_NUM_THREADS", "OXIDIFF_DISABLE", "OXIDIFF_ISA", "OXIDIFF_DISABLE_PASS", "OXIDIFF_BACKEND",
    ]  # fmt: skip
    assert "OXIDIFF_NUM_THREAD: there is no such variable: is OXIDIFF_NUM_THREADS meant?" in lines[5:]
    assert sum(line.startswith("OXIDIFF") for line in lines) == 5 + 6
    assert lines[-1] == f"cache in {tmp_path / 'here'}"


def test_times_of_steps_are_printed() -> None:
    script = """
    import torch, oxidiff
    compiled = oxidiff.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), cache=False)
    with torch.no_grad():
        compiled(torch.randn(3, 8))
        compiled(torch.randn(3, 8))
    """
    environment = {**os.environ, "OXIDIFF_DEBUG": "2"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line = re.compile(r"^oxidiff: 0\.linear \(linear, f32\): \d+\.\d+ ms, \d+\.\d+ GFLOP/s, \d+\.\d+ GB/s$", re.M)
    assert len(line.findall(done.stderr)) == 2


def test_variables_hold_from_their_first_use_on() -> None:
    """A notebook may set them after the import, whose look at them settles nothing."""
    late = 'import os, oxidiff; os.environ["OXIDIFF_ISA"] = "portable"; print(oxidiff._native.target()["isa"])'
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=True)
    assert done.stdout == "portable\n"
    threads = "from oxidiff import doctor; print(*[found for _, name, found in doctor.examine() if name == 'cpu'])"
    for given in "31":
        set_to = {**os.environ, "OXIDIFF_NUM_THREADS": given}
        done = subprocess.run([sys.executable, "-c", threads], capture_output=True, text=True, check=True, env=set_to)
        assert f"threads {given};" in done.stdout


def test_doctor_and_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    shown = capsys.readouterr().out
    for word in ("torch", "cpu", "changes of a module", "OXIDIFF_DEBUG"):
        assert word in shown
    assert all(line[:2] in ("ok", "!!") for line in shown.splitlines())
    assert main(["bench", "sd15-vae-decoder", "--tiny", "--runs", "1"]) == 0
    assert "compiled" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["bench", "no-such-model"])


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_model_that_does_not_fit_into_memory_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Petabytes: more than an address space has.
    assert main([command, "sd15-unet", "--tiny", "--batch", str(10**12)]) == 1
    assert "there is not enough memory for it" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_an_error_of_a_model_is_no_lack_of_memory(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise RuntimeError("another one")

    monkeypatch.setattr("oxidiff.testing.example_inputs", fails)
    with pytest.raises(RuntimeError, match="another one"):
        main([command, "sd15-unet", "--tiny"])


@pytest.mark.parametrize(
    "arguments",
    [
        "bench clip-l --tiny --runs -1",
        "bench clip-l --tiny --runs 0",
        "bench clip-l --tiny --batch 0",
        "tune clip-l --tiny --size 5 -5",
        "tune clip-l --tiny --budget nan",
        "tune clip-l --tiny --size 5 5",
    ],
)
def test_a_wrong_argument_is_named(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments.split())
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status in (1, 2)
    said = capsys.readouterr().err
    assert any(word in said for word in ("--runs", "--batch", "--size", "--budget", "takes sizes like (77,)"))


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m oxidiff doctor"
    ended = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    full = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
    assert full.returncode == 1
    assert full.stderr.startswith("oxidiff: ") and "Traceback" not in full.stderr


def test_bench_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, oxidiff\n"
        "net = oxidiff.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()).eval(), tune='off')\n"
        "with torch.no_grad():\n"
        "    for _ in range(int(sys.argv[1])):\n"
        "        net(torch.zeros(2, 8))\n"
        "print('eager' if oxidiff.report(net).captures == 0 else 'compiled')\n"
    )
    assert main(["bench", str(script), "--runs", "1", "--", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Sequential, 3 calls" in shown and "of eager; first call" in shown and "all calls" in shown
    script.write_text("import sys; sys.exit(3)")
    assert main(["bench", str(script), "--runs", "1"]) == 1
    assert "status 3" in capsys.readouterr().err


def test_not_compiled() -> None:
    with pytest.raises(TypeError, match="Linear"):
        oxidiff.report(nn.Linear(1, 1))
