"""What `tests/gpu/run.py` says of rows that are slow, that hang and that had no time: with rows made up for it. And that its
own rows start, as far as they do behind the stand-in driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = """
import contextlib, os, sys, time
import torch
sys.path.insert(0, "tests/gpu")
import run

run.GRACE_S, run.HANGS_S = 0.5, 1.5


def quick(row):
    return "done"


def looks(row):
    for count in range(1000):
        row.require_time(f"{count} steps")
        time.sleep(0.05)


def slow(row):
    # A step that was begun in time, and is longer than what is waited for.
    for _ in range(15):
        assert row.has_time()
        time.sleep(0.05)
    time.sleep(30)


def models(row):
    looks(row)


def hangs(row):
    time.sleep(30)


def fails(row):
    raise ValueError("wrong")


def children(row):
    # The child would outlive its parent, and holds its output.
    parent = "import subprocess, time; print(subprocess.Popen(['sleep', '30']).pid, file=open('{}', 'w')); time.sleep(30)"
    row.output_of([sys.executable, "-c", parent.format(os.environ["PID_FILE"])])


names = sys.argv.pop(1).split(",")
run.ROWS = {name: globals()[name.rstrip("2")] for name in names}
run.ANYWHERE = names
run.place = lambda is_stand_in: contextlib.nullcontext(torch.device("cpu"))
sys.argv += ["--stand-in", "--limit", sys.argv.pop(1)]
sys.exit(run.main())
"""


def rows_of(names: str, limit: float, **variables: str) -> tuple[int, list[tuple[str, str]], str]:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, names, str(limit)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=environment,
        check=False,
        timeout=120,
    )
    table = re.findall(r"^\| (\w[\w ]*) \| ([\w ]+) \|", done.stdout, re.MULTILINE)
    assert table and table[0] == ("row", "result"), done.stdout + done.stderr
    return done.returncode, table[1:], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("names", "limit", "status", "results"),
    [
        ("quick,looks,quick2", 0.7, 0, ["passed", "not finished", "not run"]),
        ("fails,looks,quick", 0.7, 1, ["FAILED", "not finished", "not run"]),
        ("quick,slow,quick2", 1.2, 0, ["passed", "not finished", "not run"]),
        ("quick,hangs,quick2", 1.5, 1, ["passed", "FAILED", "not run"]),
    ],
)
def test_the_table_tells_slow_rows_from_those_that_hang(
    names: str, limit: float, status: int, results: list[str]
) -> None:
    code, table, text = rows_of(names, limit)
    assert (code, [result for _, result in table]) == (status, results), text
    assert [name for name, _ in table] == names.split(",")
    if "hangs" in names:
        assert "it hangs: nothing was heard of it for" in text
        assert "in hangs" in text, "where it is"


def test_a_process_ends_with_its_children_where_the_time_does(tmp_path: Path) -> None:
    code, table, text = rows_of("children,quick", 2.0, PID_FILE=str(tmp_path / "pid"))
    assert (code, table) == (0, [("children", "not finished"), ("quick", "not run")]), text
    child = int((tmp_path / "pid").read_text())
    until = time.perf_counter() + 10
    while is_alive(child):
        assert time.perf_counter() < until, "the child runs on"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("row", "match", "done"),
    [
        pytest.param("graphs", "", r"[1-9]\d* sizes", marks=pytest.mark.slow),
        ("tf32", "", r"an error of"),
        ("kernels", "attention of 40, alone", r"2 cases"),
        ("ops", "silu", r"[1-9]\d* cases"),
        ("models", "clip-l", r"[1-9]\d* models and types"),
    ],
)
def test_a_row_starts_behind_the_stand_in_and_what_it_gets_done_passes(row: str, match: str, done: str) -> None:
    """A few cases of each: what has been renamed under it is an error at once."""
    options = ["--stand-in", "--only", row, "--match", match, "--limit", "250"]
    script = [str(_ROOT / "tests/gpu/run.py"), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    text = ran.stdout + ran.stderr
    if "NoCompilerError" in text:
        pytest.skip("no g++")
    assert ran.returncode == 0, text
    (note,) = re.findall(rf"^\| {row} \| passed \| [^|]* \| (.*) \|$", ran.stdout, re.MULTILINE)
    assert re.search(done, note), text


def test_a_long_row_leaves_time_to_those_behind_it() -> None:
    code, table, text = rows_of("models,quick", 4.0)
    assert (code, table) == (0, [("models", "not finished"), ("quick", "passed")]), text


def test_what_eager_cannot_compute_in_16_bits_is_no_bound() -> None:
    code = "import sys; sys.path.insert(0, 'tests/gpu'); import run, torch; half = torch.float16; "
    code += "print(*(run.bound_of(e, half) for e in (1.0, 0.0, float('nan'), float('inf'))))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=True)
    assert done.stdout.split() == ["1.25", str(1.25 * 2.0**-11), "None", "None"]


def test_the_sanitizer_is_found_where_toolkits_are(tmp_path: Path) -> None:
    """On the path first; else where CUDA_HOME or CUDA_PATH says."""
    for name in ("path", "home/bin", "toolkit/bin"):
        tool = tmp_path / name / "compute-sanitizer"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    (tmp_path / "empty").mkdir()
    code = """if True:
        import os, sys
        sys.path.insert(0, "tests/gpu")
        import run
        folder = sys.argv[1]
        for names in ("path home toolkit", "empty home toolkit", "empty empty toolkit", "empty - home", "empty - -"):
            for variable, name in zip(("PATH", "CUDA_HOME", "CUDA_PATH"), names.split()):
                os.environ.pop(variable, None)
                if name != "-":
                    os.environ[variable] = os.path.join(folder, name)
            print(run.sanitizer_found())
        print(run.TOOLKIT)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=True)
    *found, usual, toolkit = done.stdout.splitlines()
    expected = ("path", "home/bin", "toolkit/bin", "home/bin")
    assert found == [str(tmp_path / name / "compute-sanitizer") for name in expected]
    assert toolkit == "/usr/local/cuda"
    assert usual in ("None", "/usr/local/cuda/bin/compute-sanitizer")


_CHILD = """#!/bin/sh
# What gpu.py starts: its name, --child, what to do.
echo "a line that is no answer"
echo "{\\"row\\": \\"$3\\"}"
# What it has started holds the pipe.
if [ "$3" = failing ]; then sleep 60 & exit 3; fi
sleep 60
"""
_BENCH = """
import os, sys
sys.path.insert(0, "benches")
import gpu

import time
told = []
started, python = time.perf_counter(), sys.executable
sys.executable = os.environ["CHILD"]
slow, failing = gpu.Process(["slow"], told.append), gpu.Process(["failing"], told.append)
sys.executable = python
assert failing.wait(started + 60) == "exit status 3"
assert slow.wait(time.perf_counter() + 1) == "no time left" and time.perf_counter() - started < 30
assert sorted(told, key=str) == [{"row": "failing"}, {"row": "slow"}], told

import torch
import oxidiff
import stand_in
with stand_in.in_use(stand_in.stand_in()), torch.no_grad():
    ours = oxidiff.compile(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU()).eval(), cache=False, strict=True)
    ours(torch.ones(20, 16))
    who = gpu.who_computes(ours)
assert who["computed_by"] == {"kernel": 1} and len(who["refused"]) == 1 and who["no_graphs"] == [], who
answer = {"ratio": 0.5, "ours_ms": 1.0, "other_ms": 2.0, "reasons": [], **who, "no_graphs": ["no memory"]}
print(gpu.told(answer))
answer |= {"spread": 0.1, "rounds": 7, "error": 0.0, "eager_calls": 0}
answer |= {"peak_ratio": 1.0, "peak_bytes": 1, "eager_peak_bytes": 1, "compile_s": 1.0, "first_s": 1.0}
print(next(gpu.case_rows("sdxl", {"eager": answer}))[-1])
for error in (float("nan"), 0.5):
    wrong = next(gpu.case_rows("sdxl", {"eager": {**answer, "error": error}}))
    assert wrong[3] == "no" and "wrong results" in wrong[4], wrong
print(gpu.told({"failed": "no time left"}))
"""


def test_the_benchmark_reads_what_processes_tell_and_says_who_computes(tmp_path: Path) -> None:
    child = tmp_path / "child"
    child.write_text(_CHILD)
    child.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CHILD": str(child)}
    command = [sys.executable, "-c", _BENCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=False)
    if "NoCompilerError" in done.stderr:
        pytest.skip("no g++")
    assert done.returncode == 0, done.stderr
    line, row, failed = done.stdout.splitlines()
    assert "steps by kernel 1" in line and "launched, not replayed: no memory" in line and "refused: 1 x " in line
    assert "steps by kernel 1" in row and failed == "no time left"


def is_alive(process: int) -> bool:
    """Whether it runs; one that ended may not have been waited for yet."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
