"""docs/recipes.md is tested: each of its edits is applied to a project, which then trains."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from outputs import lines
from project_runs import python, train_in
from template_copy import shrink
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
PAGE = (TEMPLATE / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def edits(title: str) -> list[tuple[str, str]]:
    """The files and the edits of a section."""
    return re.findall(r"^```diff (\S+)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)


def applied(text: str, edit: str) -> str:
    """`text` after an edit: in each part, the lines without `+` are there once, and become those without `-`."""
    for part in edit.split("@@\n"):
        rows = part.splitlines(keepends=True)
        before, after = ("".join(row[1:] if row.strip() else row for row in rows if row[0] != sign) for sign in "+-")
        before = before.removesuffix("\n")  # so that a line may be given from its start
        after = after.removesuffix("\n")
        assert text.count(before) == 1, (text.count(before), before)
        text = text.replace(before, after)
    return text


def project_with(folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the project with these edits."""
    hidden = shutil.ignore_patterns(".*_cache", "__pycache__", "runs", "tests")
    project = Path(shutil.copytree(TEMPLATE, folder / "project", ignore=hidden))
    shrink(project, train=256, val=64, test=64)
    for file, edit in changes:
        path = project / file
        path.write_text(applied(path.read_text(), edit))
    return project


SHARED = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", 32, "--epochs", 1, "--warmup-epochs", 0]
SHARED += ["--log-every", 4, "--output-dir", "runs/x"]


def run(project: Path, processes: int, *options: Any, **variables: str) -> str:
    (output,) = train_in(project, [processes, *SHARED, *options], **variables)
    return output


def test_weights_and_biases(tmp_path: Path) -> None:
    """Offline: its file holds the curves and the options."""
    pytest.importorskip("wandb")
    project = project_with(tmp_path, *edits("Weights & Biases"))
    run(project, 2, WANDB_MODE="offline", WANDB_SILENT="true")
    (file,) = (project / "runs/x").glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"val/accuracy" in content and b"train/samples_per_s" in content and b"ToyModel" in content


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder, which takes the place of a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    project = project_with(tmp_path, *edits("MLflow"))
    uri = (tmp_path / "mlruns").as_uri()
    run(project, 2, MLFLOW_TRACKING_URI=uri)
    client = mlflow.tracking.MlflowClient(uri)
    (experiment,) = (each for each in client.search_experiments() if each.name == "my-project")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["model"] == "ToyModel" and found.data.params["lr"] == "0.03"
    (val,) = lines(project / "runs/x", "val")
    assert found.data.metrics["val/accuracy"] == val["accuracy"]


def test_histograms_and_images(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Histograms and images in TensorBoard"))
    run(project, 2)
    events = EventAccumulator(str(project / "runs/x/tensorboard"))
    events.Reload()
    assert "fc3.weight" in events.Tags()["histograms"] and {"conv1", "train/inputs"} <= set(events.Tags()["images"])


def test_the_norm_of_the_gradient(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("The norm of the gradient"))
    train_in(project, [2, *SHARED, "--clip-grad", 0.01], [1, *SHARED, "--output-dir", "runs/y"])
    assert all(line["grad_norm"] > 0.01 for line in lines(project / "runs/x", "train"))
    assert all("grad_norm" not in line for line in lines(project / "runs/y"))


def test_several_losses(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Several losses"))
    run(project, 1)
    for line in lines(project / "runs/x"):
        assert line["activity"] > 0 and 0 <= line["accuracy"] <= 1


def test_class_weights(tmp_path: Path) -> None:
    """Of equal classes one counts five times, so the model says it more often at first."""
    plain, weighted = project_with(tmp_path / "a"), project_with(tmp_path / "b", *edits("Class weights"))
    for project in (plain, weighted):
        run(project, 1, "--max-steps", 1)
    losses = [lines(project / "runs/x", "val")[0]["loss"] for project in (plain, weighted)]
    assert losses[0] != losses[1]


def test_mixup(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Mixup"))
    options = [2, *SHARED, "--epochs", 3, "--lr", 0.1]
    part = [*options, "--output-dir", "runs/y"]
    _, _, output = train_in(project, options, [*part, "--max-steps", 5], part)
    assert "resuming from" in output
    ends = [lines(project / name, "val")[-1] for name in ("runs/x", "runs/y")]
    assert ends[0] == ends[1], "the same random numbers after a resume"


def test_a_schedule(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("A schedule of your own"))
    run(project, 1, "--epochs", 3, "--log-every", 8)
    assert [line["lr"] for line in lines(project / "runs/x", "train")] == pytest.approx([0.03, 0.003, 0.0003])


def test_without_an_edit(tmp_path: Path) -> None:
    """The average of the weights, and the profile."""
    for title in ("An average of the weights", "A profile"):
        assert edits(title) == [] and re.search(r"`--(ema|profile)", SECTIONS[title])
    project = project_with(tmp_path)
    run(project, 1, "--ema", 0.999, "--profile", "--epochs", 2)
    assert list((project / "runs/x/profile").iterdir())


def test_a_notebook(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS["A notebook"], re.DOTALL)
    project = project_with(tmp_path)
    python(project, "-c", block)
    assert json.loads((project / "runs/notebook/status.json").read_text())["step"] == 5


def test_every_recipe_is_tried_and_none_is_long() -> None:
    source = Path(__file__).read_text()
    elsewhere = {  # the file with the test, and what that test is called or takes from the page
        "Fine-tune": ("test_documentation.py", "_by_the_lines_of_the_recipe"),
        "State of your own": ("test_documentation.py", "(average: .*)"),
        "Stop early": ("test_documentation.py", "(while not run.finished"),
        "Interrupt a run from your code": ("test_faults.py", "request_stop"),
        "An option": ("test_documentation.py", "(smoothing: .*)"),
        "Options in a file": ("test_config_file.py", "--config"),
        "Evaluate a checkpoint": ("test_saved_options.py", "--evaluate"),
        "Classify images": ("test_predict.py", "predict.py"),
        "The metrics of a run": ("test_documentation.py", "test_the_page_names_the_fields_of_metrics_jsonl"),
    }
    for title, (file, words) in elsewhere.items():
        assert title in SECTIONS and words in Path(__file__).with_name(file).read_text(), title
    assert {title for title in SECTIONS if f'"{title}"' not in source} <= set(elsewhere)
    for title, text in SECTIONS.items():
        for block in re.findall(r"^```\S+.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert len(re.findall(r"^[+-]", block, re.MULTILINE)) <= 15, title
