"""Loss curves of 20 steps, stored in curves.json: a refactoring that changes the training is noticed.

The models of small_models.py agree on all processors and versions of torch, but for rounding. If a change is intended,
copy build/curves.json to tests/curves.json, and name it in CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outputs import lines
from template_copy import copy_template

import main
from processes import train
from small_models import build_awkward, build_smooth

HERE = Path(__file__).parent
STORED = json.loads((HERE / "curves.json").read_text())
SHARED = ("--dataset", "synthetic", "--device", "cpu", "--max-steps", 20, "--log-every", 1, "--output-dir")
TASKS: dict[str, list[Any]] = {
    "smooth": ["--batch-size", 16, "--epochs", 2, "--ema", 0.9, "--clip-grad", 0.1, "--scale-lr"],
    "dropout, BatchNorm and random numbers": ["--batch-size", 4, "--grad-accum-steps", 2, "--workers", 2, "--seed", 3],
    "a line": ["--batch-size", 8],
}


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("task", TASKS)
def test_the_losses_are_those_that_are_stored(
    task: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    if task == "a line":
        project = copy_template(tmp_path / "project")
        subprocess.run([sys.executable, HERE.parent / "examples/apply.py", "linear_regression", project], check=True)
        command = [sys.executable, "main.py", *SHARED, output, *TASKS[task]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in command], cwd=project, check=True, env=environment, capture_output=True)
    else:
        monkeypatch.setattr(main.task, "build_model", build_smooth if task == "smooth" else build_awkward)
        train(2, *SHARED, output, *TASKS[task])
    found = {split: [line["loss"] for line in lines(output, split)] for split in ("train", "val")}
    assert len(found["train"]) == 20 and len(set(found["train"])) == 20

    measured = HERE.parent / "build" / "curves.json"
    known = json.loads(measured.read_text()) if measured.exists() else {}
    measured.parent.mkdir(exist_ok=True)
    measured.write_text(json.dumps({**known, task: found}, indent=1) + "\n")
    for split in ("train", "val"):
        assert found[split] == pytest.approx(STORED[task][split], rel=1e-5)
