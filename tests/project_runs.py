"""Several runs of a project in one Python process, whose ranks are forked: torch is imported once, not by each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}" / "tests"
PROGRAM = """
import json, sys
sys.path[:0] = [".", sys.argv[2]]
import torchvision
from processes import start
outputs = []
for world_size, *options in json.loads(sys.argv[1]):
    ranks = start(world_size, *options)
    outputs.append([ranks.wait(240), ranks.output()])
print(json.dumps(outputs))
"""


def train_in(project: Path, *runs: list[Any], code: int = 0, **variables: str) -> list[str]:
    """What main.py prints in `project` for each of `runs`: a number of processes, then its options; one after another.

    Fails unless all ranks exit with `code`.
    """
    words = json.dumps([[run[0], *map(str, run[1:])] for run in runs])
    command = [sys.executable, "-c", PROGRAM, words, str(TESTS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    for run, (codes, output) in zip(runs, outputs, strict=True):
        assert codes == [code] * run[0], f"{run}: exit codes {codes}, expected {code}:\n{output}"
    return [output for _, output in outputs]
