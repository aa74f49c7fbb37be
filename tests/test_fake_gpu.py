"""What a GPU computes with is on the GPU: the template's task and the examples, with fake tensors, without a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from project_runs import python

TESTS = Path(__file__).resolve().parent
TEMPLATE = TESTS.parent / "{{cookiecutter.project_slug}}"
EXAMPLES = TESTS.parent / "examples"
TASKS = [TEMPLATE, *(path.parent for path in sorted(EXAMPLES.glob("*/model.py")))]
OPTIONS = [("--precision", "fp32"), ("--precision", "bf16")]
CHANNELS_LAST = [TEMPLATE, EXAMPLES / "cifar10_speed"]


def run(folder: Path, *all_options: tuple[str, ...], code: int = 0) -> str:
    words: list[str | Path] = [TESTS / "fake_gpu.py", folder, TEMPLATE]
    for options in all_options:
        words += ["--", "--dataset", "synthetic", *options]
    with tempfile.TemporaryDirectory() as cwd:  # language_model writes its text there
        return python(Path(cwd), *words, code=code)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("folder", TASKS, ids=lambda folder: "template" if folder == TEMPLATE else folder.name)
def test_a_batch_stays_on_the_gpu_and_nothing_waits_for_it(folder: Path) -> None:
    """In training and evaluation, with data in memory that fit on the GPU, and with data that do not.

    What needs a value on the host (item, nonzero, a boolean index) raises as well: it would synchronise each step.
    """
    all_options = OPTIONS + [("--channels-last",)] * (folder in CHANNELS_LAST)
    assert run(folder, *all_options).count("done:") == len(all_options)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("F.cross_entropy(outputs, targets.cpu())", "Expected all tensors to be on the same device"),
        ("F.cross_entropy(outputs, targets) * outputs.max().item()", "DataDependentOutputException"),
    ],
)
def test_a_loss_on_two_devices_or_with_a_wait_is_found(loss: str, message: str, tmp_path: Path) -> None:
    text = (TEMPLATE / "model.py").read_text()
    right = "F.cross_entropy(outputs, targets)"
    assert text.count(right) == 1
    (tmp_path / "model.py").write_text(text.replace(right, loss))
    assert message in run(tmp_path, (), code=1)
