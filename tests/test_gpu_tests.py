"""The questions of `make gpu`, without a GPU: they are skipped, or those that a CPU can answer are answered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from project_runs import python

REPOSITORY = Path(__file__).resolve().parent.parent


def run(device: str, *words: str) -> str:
    command = ["-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    return python(REPOSITORY, *command, GPU_TESTS_DEVICE=device, CUDA_VISIBLE_DEVICES="")


def test_without_a_gpu_they_are_skipped_with_a_reason() -> None:
    output = run("cuda")
    assert "needs 1 GPU: this machine has 0; see make gpu" in output
    assert re.search(r"^\d+ skipped in", output, re.MULTILINE), output


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_cpu_answers_some_of_them_and_the_table_has_them_all() -> None:
    chosen = "data_in_memory or sigterm"
    output = run("cpu", "-k", chosen)
    rows = re.findall(r"^\| (.*) \| (.*) \|$", output, re.MULTILINE)
    answers = dict(rows[1:])
    assert len(answers) == 2 and all(text.startswith("yes") for text in answers.values()), output
    assert (REPOSITORY / "build/gpu.md").read_text() in output.replace("\r", "")
