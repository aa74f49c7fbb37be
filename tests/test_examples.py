"""The examples, laid over a rendered project: trained by two processes, killed and resumed once, evaluated exactly.

The project's own tests show that, since they hold for any task; and here is what only this task can show.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cookiecutter.main import cookiecutter
from outputs import lines, weights_and_momentum
from PIL import Image

from config import parse
from ddp.errors import UsageError

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parent.parent


def readme(name: str) -> str:
    return (REPOSITORY / "examples" / name / "README.md").read_text(encoding="utf-8")


def options_of(text: str) -> list[str]:
    """Those of the first command that a README shows, after --nproc 2."""
    found = re.search(r"^    python main\.py --nproc 2 ([^\n#]*)", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


def lay(name: str, folder: Path) -> Path:
    """A rendered project with the example `name` in it."""
    project = Path(cookiecutter(str(REPOSITORY), no_input=True, output_dir=str(folder)))
    command = [sys.executable, REPOSITORY / "examples/apply.py", name, project]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and (project / "EXAMPLE.md").exists(), done.stderr
    return project


def run(project: Path, *command: Any, code: int = 0) -> str:
    """What it prints in the project's folder; fails unless it ends with `code`."""
    words = [sys.executable, *map(str, command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(project: Path, *options: Any, code: int = 0) -> str:
    """Run main.py there."""
    said = run(project, "main.py", "--device", "cpu", *options, code=code)
    assert "ToyModel" not in said and "cifar10" not in said
    return said


def own_tests_pass(project: Path, *options: str) -> None:
    """Two processes train, are killed and stopped, and resume bit for bit; 1, 2 and 3 evaluate alike; and so on."""
    said = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options)
    assert re.search(r"^[5-9] passed", said, re.MULTILINE), said


def train_until_killed(project: Path, output: Path, *options: Any) -> None:
    """The same, with -9 to all of it behind the first checkpoint in the middle of an epoch."""
    command = [sys.executable, "main.py", "--device", "cpu", "--output-dir", str(output), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=project, start_new_session=True, env=environment) as run:
        end = time.monotonic() + 120
        while not list(output.glob("checkpoints/step_*.pt")):
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.002)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for pid in (*map(int, children), run.pid):
            os.kill(pid, signal.SIGKILL)


def killed_and_resumed_equals_whole(project: Path, folder: Path, *options: Any) -> Path:
    """Train with two processes, once in one go and once killed in between. Returns the folder of the first."""
    options = ("--nproc", 2, *options)
    train(project, "--output-dir", folder / "whole", *options)
    train_until_killed(project, folder / "killed", *options, "--checkpoint-every", 2)
    assert "going on from" in train(project, "--output-dir", folder / "killed", *options, "--checkpoint-every", 2)
    assert weights_and_momentum(folder / "killed") == weights_and_momentum(folder / "whole")
    assert lines(folder / "killed", "test") == lines(folder / "whole", "test")
    return folder / "whole"


def evaluated_by_one_process_is_the_same(project: Path, output: Path, *options: Any) -> None:
    """To rounding: two processes add up in another order."""
    two = lines(output, "test")[-1]
    said = train(project, "--output-dir", output, "--evaluate", *options)
    for name in two.keys() - {"step", "split", "epoch", "count"}:
        (one,) = re.findall(rf" {re.escape(name)} (\S+)", said)
        assert float(one) == pytest.approx(two[name], abs=1e-3), (name, said)


def test_a_line_is_found(tmp_path: Path) -> None:
    """As its README says it: the command, and then the lines of Python."""
    project, text = lay("linear_regression", tmp_path), readme("linear_regression")
    own_tests_pass(project)
    train(project, "--nproc", 2, *options_of(text))
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    weight, bias = map(float, run(project, "-c", block).split())
    assert abs(weight - 2) < 0.05 and abs(bias - 3) < 0.05
    said = run(project, "benchmark.py", "--device", "cpu", "--nproc", 1, "--seconds", 0.02, "--repeats", 1)
    assert said.startswith("Line, fp32, batch 64\n"), "no image, and no ToyModel"


def test_a_text_is_learned(tmp_path: Path) -> None:
    project, output = lay("language_model", tmp_path), tmp_path / "run"
    own_tests_pass(project)
    options = ("--lr", "3e-3", "--batch-size", 8, "--max-steps", 60, "--warmup-epochs", 0.05)
    train(project, "--nproc", 2, "--output-dir", output, *options)
    last = lines(output, "test")[-1]
    assert last["bits"] < 5.5, "8 is knowing nothing"
    assert last["perplexity"] == pytest.approx(2 ** last["bits"])
    evaluated_by_one_process_is_the_same(project, output, *options)
    (project / "data/text.txt").write_text("short")
    assert "is too short" in train(project, "--output-dir", "new", code=3)


def voc(root: Path, train_images: int = 12, val_images: int = 5) -> None:
    """A tiny folder in VOC's layout: pictures of many sizes; red is a cat, with a border of 255 above it."""
    folder = root / "VOCdevkit/VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for part, count in (("train", train_images), ("val", val_images)):
        names = [f"{part}{number}" for number in range(count)]
        (folder / "ImageSets/Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            h, w = generator.integers(60, 110, 2)
            classes = numpy.zeros((h, w), dtype=numpy.uint8)
            classes[h // 4 : h // 2 + 10, w // 4 : w // 2 + 10] = 8
            image = numpy.where((classes == 8)[..., None], (220, 30, 30), (40, 90, 160)).astype(numpy.uint8)
            classes[h // 4 - 2 : h // 4, :] = 255
            Image.fromarray(image).save(folder / "JPEGImages" / f"{name}.jpg")
            mask = Image.fromarray(classes, mode="P")
            mask.putpalette([number for number in range(256) for _ in range(3)])
            mask.save(folder / "SegmentationClass" / f"{name}.png")


def test_pixels_are_classified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = lay("voc_segmentation", tmp_path)
    voc(tmp_path / "voc")
    options = ["--data-dir", tmp_path / "voc", "--model", "lraspp_mobilenet_v3_large", "--image-size", 64]
    options += ["--batch-size", 2, "--epochs", 2, "--workers", 1]
    output = killed_and_resumed_equals_whole(project, tmp_path, *options)
    last = lines(output, "test")[-1]
    assert last["count"] == 5 and 0 <= last["mean_iou"] <= 1
    evaluated_by_one_process_is_the_same(project, output, *options)
    (tmp_path / "voc/VOCdevkit/VOC2012/JPEGImages/val4.jpg").unlink()
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    said = train(project, "--data-dir", tmp_path / "voc", "--output-dir", "new", code=3)
    assert "cannot download http" in said and said.endswith("by hand, or try --dataset synthetic\n")
    said = train(project, "--dataset", "synthetic", "--model", "resnet18", "--output-dir", "new", code=2)
    assert "not one of torchvision's segmentation models" in said
    train(project, "--nproc", 2, *options_of(readme("voc_segmentation")), "--epochs", 4)
    assert lines(project / "runs/try", "test")[-1]["mean_iou"] > 0.1, "0.04 is background everywhere"
    own_tests_pass(project, "-k", "not killed")  # seen above, with these files


def module(example: str, name: str) -> Any:
    """A file of an example, which need not lie over a project for that."""
    path = REPOSITORY / "examples" / example / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"{example}_{name}", path)
    assert specification is not None and specification.loader is not None
    found = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(found)
    return found


def test_mean_iou_is_of_one_confusion_matrix() -> None:
    model = module("voc_segmentation", "model")
    targets = torch.tensor([[[0, 0], [1, 255]]])
    outputs = {"out": torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).permute(0, 3, 1, 2).float()}
    found = model.sums(torch.tensor(2.0), outputs, targets)
    assert found["confusion"].tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]] and found["count"] == 3
    result = model.scores({name: torch.as_tensor(value).double() for name, value in found.items()})
    assert result == {"loss": 2.0, "accuracy": pytest.approx(2 / 3), "mean_iou": 0.5}


def test_a_picture_is_evaluated_whole_and_trained_in_squares_out_of_it() -> None:
    """Its left half is 1, its right half 2; it is twice as wide as it is high."""
    data = module("voc_segmentation", "data")
    mask = Image.fromarray(numpy.repeat([[1, 2]], 50, axis=1).repeat(50, axis=0).astype(numpy.uint8))
    pairs = [(mask.convert("RGB"), mask)]
    _, whole = data.Pictures("one", pairs, 40, training=False)[0]
    assert [(whole == part).sum().item() for part in (1, 2, 255)] == [400, 400, 800], "the rest does not count"
    cuts = [data.Pictures("one", pairs, 40, training=True)[0] for _ in range(20)]
    assert all((image[0] == mask).all() and 255 not in mask for image, mask in cuts), "image and mask alike"
    assert len({(mask == 1).sum().item() for _, mask in cuts}) > 5, "each time another one"


def test_a_character_is_predicted_from_those_before_it() -> None:
    model = module("language_model", "model").Transformer(characters=256, context=16).eval()
    text = torch.arange(16)[None]
    changed = torch.where(torch.arange(16) >= 9, 7, text)
    same = (model(text) == model(changed)).all(2)[0]
    assert same.tolist() == [True] * 9 + [False] * 7


@pytest.mark.parametrize("example", ["linear_regression", "language_model", "voc_segmentation"])
def test_a_dataset_that_is_not_there_is_refused(example: str) -> None:
    with pytest.raises(UsageError, match=r"--dataset imagefolder: .* leave it out"):
        module(example, "data").load_datasets(parse(["--dataset", "imagefolder"]))


@pytest.mark.parametrize("example", ["linear_regression", "language_model"])
def test_a_model_that_is_not_there_is_refused(example: str) -> None:
    model = module(example, "model")
    with pytest.raises(model.BadModel, match=r"--model resnet18: .* leave it out"):
        model.build_model(parse(["--model", "resnet18"]), None)
