"""rehearse.py finds what an owner's edit makes inexact, such as state that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rehearse
import torch
from project_runs import python
from template_copy import changed_main, copy_template, shrink
from torch import Tensor, nn
from torch.utils.data import Dataset

import data
import main
import model
from config import Config
from ddp.data.dataset import Datasets
from faults import fault
from processes import fork

OPTIONS = ("--dataset=synthetic", "--device=cpu", "--batch-size=16", "--lr=0.1")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 130, "test": 60})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rehearsed(folder: Path, *options: str, nproc: int = 2) -> dict[str, list[str]]:
    """What each check finds."""
    return {name: found for name, found, _ in rehearse.checks(Config.parse([*OPTIONS, *options]), nproc, folder, fork)}


RESUMED, WORKERS = "killed and resumed", "0 and 1 DataLoader workers"
EVALUATED = ["evaluated by 1 new process", "evaluated by 2 new processes"]


class Small(nn.Module):
    """One layer. `shift` is added to its outputs."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.layer(images.flatten(1))
        return outputs + self.shift(outputs)

    def shift(self, outputs: Tensor) -> Tensor | float:
        return 0.0


class WithQueue(Small):
    """The outputs of the last batches as a plain attribute."""

    queue = torch.zeros(32, 10)

    def shift(self, outputs: Tensor) -> Tensor:
        mean = self.queue.mean(0)
        if self.training:
            self.queue = torch.cat([outputs.detach(), self.queue])[: len(self.queue)]
        return -mean


class Running:
    """Running statistics in an object."""

    def __init__(self) -> None:
        self.mean = torch.zeros(10)

    def update(self, values: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * values.mean(0)
        return self.mean


class WithStatistics(Small):
    """An attribute that is no module."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.running = Running()

    def shift(self, outputs: Tensor) -> Tensor:
        return -(self.running.update(outputs.detach()) if self.training else self.running.mean)


GENERATOR = torch.Generator().manual_seed(0)


class WithGenerator(Small):
    """Noise from a generator at module level, in evaluations."""

    def shift(self, outputs: Tensor) -> Tensor | float:
        return 0.0 if self.training else torch.randn(outputs.shape, generator=GENERATOR)


class Wrapping(torch.optim.Optimizer):
    """An optimizer that wraps another one, as the widely copied SAM does: its state_dict() lacks the inner state."""

    def __init__(self, weights: Any, **settings: Any) -> None:
        self.inner = torch.optim.SGD(weights, **settings)
        super().__init__(self.inner.param_groups, settings)
        self.inner.param_groups = self.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Remembering:
    """A sampler that draws each order when an epoch begins, from a generator that it keeps."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch, self.order = samples, -1, torch.empty(0)
        self.generator = torch.Generator().manual_seed(0)

    def length(self, epoch: int) -> int:
        return self.samples

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        if epoch != self.epoch:
            self.epoch, self.order = epoch, torch.randperm(self.samples, generator=self.generator)
        return self.order[start:stop]


class Counting(Dataset):
    """A dataset that counts the epochs: sample 0 comes once in each."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.epoch += index == 0
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator) / (1 + self.epoch), index % 10


def with_model(kind: type[nn.Module]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(model, "build_model", kind)


def with_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "build_optimizer", lambda net, config: Wrapping(net.parameters(), lr=0.1, momentum=0.9))


def with_datasets(change: Callable[[Datasets], Datasets]) -> Callable[[pytest.MonkeyPatch], None]:
    load = data.load_datasets
    return lambda patch: patch.setattr(main, "load_datasets", lambda config: change(load(config)))


def with_forgotten_ema(patch: pytest.MonkeyPatch) -> None:
    line = "                        apply_gradients(training, config)\n"
    edits = {
        line: f"{line}                    ema.update(model)\n",
        "    if training.ema is not None:\n": "    if False:\n",
    }
    field = {"    ema: ModelEma | None\n": "", "task.compute_metrics), ema)": "task.compute_metrics))"}
    patch.setattr(main, "main", changed_main({**edits, **field}))


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str], str]] = {
    "a queue as a plain attribute": (with_model(WithQueue), [RESUMED, *EVALUATED], "model: layer.weight differs by "),
    "an object with statistics": (with_model(WithStatistics), [RESUMED, *EVALUATED], "model: layer.weight differs by "),
    "a generator at module level": (with_model(WithGenerator), EVALUATED, "val loss is "),
    "an optimizer that wraps another": (with_optimizer, [RESUMED], "model: conv1.weight differs by "),
    "state in a sampler": (
        with_datasets(lambda found: replace(found, sampler=Remembering(len(found.train)))),
        [RESUMED],
        "model: conv1.weight differs by ",
    ),
    "an epoch counter in a dataset": (
        with_datasets(lambda found: Datasets(Counting(), found.val, found.test)),
        [WORKERS],
        "model: conv1.weight differs by ",
    ),
    "an average that is no field": (
        with_forgotten_ema,
        [RESUMED, *EVALUATED],
        "metrics.jsonl: val of step 16: loss is ",
    ),
}


@fault(40, 48)
@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected, first = MISTAKES[mistake]
    make(monkeypatch)
    found = rehearsed(tmp_path, *(["--ema=0.9"] if "average" in mistake else []))
    assert set(expected) <= {name for name, each in found.items() if each}
    assert found[expected[0]][0].startswith(first)


@pytest.mark.slow
def test_a_sharded_run_is_rehearsed(tmp_path: Path) -> None:
    assert not any(rehearsed(tmp_path, "--shard").values())


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_mistake_in_a_sharded_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model(WithStatistics)(monkeypatch)
    found = rehearsed(tmp_path, "--shard")
    assert {name for name, each in found.items() if each} == {RESUMED, *EVALUATED}
    assert found[RESUMED][0].startswith("model: layer.weight differs by ")


def test_a_metric_may_be_undefined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the area under a curve without positives: NaN before and after is no difference."""
    compute = model.compute_metrics
    monkeypatch.setattr(model, "compute_metrics", lambda totals: {**compute(totals), "auc": float("nan")})
    assert not any(rehearsed(tmp_path, nproc=1).values())


GIVEN = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 16)


@pytest.mark.slow
def test_the_command_prints_what_it_found_and_the_usual_causes(tmp_path: Path) -> None:
    project = shrink(copy_template(tmp_path / "project"), train=320, val=130, test=60)
    source = (project / "model.py").read_text()
    remember = "        x, q = self.fc3(x), Q.clone()\n        Q[:] = x[:4].detach() if self.training else q\n"
    remember += "        return x - q.mean(0)\n"
    edited = source.replace("        return self.fc3(x)\n", remember) + "\n\nQ = torch.zeros(4, 10)\n"
    (project / "model.py").write_text(edited)
    output = python(project, "rehearse.py", "--nproc", 2, "--", *GIVEN, code=1, fork=True, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.glob("rehearsal-*")
    lines = output.splitlines()
    assert lines[:2] == ["ok      trained two epochs with 2 processes", "FAILED  killed and resumed"]
    assert lines[2].startswith("        model: conv1.weight differs by ")
    assert lines[3].startswith("        metrics.jsonl: train of step 10: loss is ")
    assert "usual causes:" in output and "use a buffer, the optimizer's state_dict(), or a field of Training" in output
    assert "ok      0 and 1 DataLoader workers" in lines
    assert "FAILED  evaluated by 1 new process\n        val loss is " in output
    assert lines[-1] == f"not exact; what the runs printed and wrote is in {folder}"
    assert "resuming from" in (folder / "killed/output").read_text()

    wrong = python(project, "rehearse.py", "--", "--batch-size", 0, code=2)
    assert wrong == "error: --batch-size: '0' must be an integer >= 1; see --help\n"
    (project / "model.py").write_text(source.replace("cross_entropy(outputs, targets)", "cross_entropy(outputs, x)"))
    failed = python(project, "rehearse.py", "--", *GIVEN, code=1, fork=True, TMPDIR=str(tmp_path))
    assert "\nNameError: name 'x' is not defined\n" in failed and "Traceback" in failed
    assert failed.splitlines()[-1].startswith("error: a run ended with exit code 1; what it printed is in ")


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_command_starts_new_processes(tmp_path: Path) -> None:
    project = shrink(copy_template(tmp_path / "project"), train=320, val=130, test=60)
    output = python(project, "rehearse.py", "--", *GIVEN, TMPDIR=str(tmp_path))
    assert output.count("ok      ") == 5 and output.splitlines()[-1].startswith("exact: "), output
    assert not [*tmp_path.glob("rehearsal-*")]
