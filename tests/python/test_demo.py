"""The shipped checkpoints, the demo script and the notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MAX_CHECKPOINT_BYTES = 4_000_000
MODEL_ERROR = 2e-5


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    return digits


@pytest.mark.parametrize("style", ["chalk", "ink"])
def test_checkpoint_is_small_and_draws_what_it_is_asked_for(digits, style: str) -> None:
    """The digits are recognised by a nearest-neighbour vote over the scans that the model was trained on."""
    weights = list((EXAMPLES / "assets" / style).glob("*.safetensors"))
    assert sum(path.stat().st_size for path in weights) < MAX_CHECKPOINT_BYTES
    from train_digits import load_images

    images, labels = load_images(style)
    wanted = torch.arange(10).repeat(2)
    drawn = torch.from_numpy(digits.DigitsPipeline.load(style)(wanted.tolist(), steps=10)) * 2 - 1
    distance = torch.cdist(drawn.flatten(1), images.flatten(1))
    votes = labels[distance.topk(5, largest=False).indices].mode(dim=1).values
    assert (votes == wanted).float().mean() >= 0.8


@pytest.mark.parametrize("style", ["chalk", "ink"])
def test_compiled_pipeline_draws_the_same_digits(digits, style: str) -> None:
    import oxidiff

    pipe = digits.DigitsPipeline.load(style)
    steps, guidance = 4, 2.0
    eager = pipe([3, 1, 4], steps=steps, guidance=guidance)
    pipe.unet = oxidiff.compile(pipe.unet)
    compiled = pipe([3, 1, 4], steps=steps, guidance=guidance)
    assert oxidiff.report(pipe.unet).eager_calls == 0
    error = np.linalg.norm(compiled - eager) / np.linalg.norm(eager)
    assert error <= MODEL_ERROR * steps * (1 + 2 * guidance)


@pytest.mark.slow
def test_demo_writes_one_picture_and_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "demo.py", "--out", str(tmp_path), "--steps", "2", "--rounds", "1"]
    result = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for line in ("step time", "peak memory", "capture and compile", "largest pixel difference"):
        assert line in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["digits.png"]


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (
            "shared_graph.py",
            ["--steps", "2"],
            ["0 captures, 0 programs compiled", "difference to its own pipeline 0.0e+00"],
        ),
        ("lora_switch.py", [], ["1, 1; same bits as before: True"]),
    ],
)
def test_examples_run(script: str, options: list[str], expected: list[str], tmp_path: Path) -> None:
    if script == "lora_switch.py":
        pytest.importorskip("peft")
    out = ["--out", str(tmp_path)] if "--steps" in options else []
    result = subprocess.run(
        [sys.executable, script, *options, *out], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for text in expected:
        assert text in result.stdout


def test_a_server_restarts_from_its_file() -> None:
    result = subprocess.run(
        [sys.executable, "serve_restart.py"], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    cells = {line[:22].strip(): line[22:].split() for line in result.stdout.splitlines()}
    assert cells["captures"] == ["1.000", "0.000"]
    first, restart = map(float, cells["of that tuning, s"])
    assert restart < first, "what was measured is not measured again"
    assert cells["load the artifact, s"][0] == "-"
    assert float(cells["artifact MB"][1]) < float(cells["weights MB"][1]) / 10


@pytest.mark.slow
def test_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "demo.ipynb", as_version=4)
    # Three of its digits: twenty take a minute.
    every, few = "LABELS = [digit for digit in range(10) for _ in range(2)]", "LABELS = [3, 1, 4]"
    (cell,) = [cell for cell in notebook.cells if every in cell.source]
    cell.source = cell.source.replace(every, few)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert all(not cell.get("outputs") for cell in nbformat.read(EXAMPLES / "demo.ipynb", as_version=4).cells)
