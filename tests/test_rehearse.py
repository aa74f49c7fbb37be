"""rehearse.py finds what an owner's edit makes inexact, such as state that no checkpoint holds."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rehearse
import torch
import torch.distributed as dist
import torch.nn.functional as F
from project_runs import python
from template_copy import changed_main, copy_template, shrink
from torch import Tensor, nn
from torch.distributed import all_gather  # by name, as owners do
from torch.distributed._functional_collectives import all_gather_tensor
from torch.utils.data import Dataset, Subset

import data
import images
import main
import model
from compare import metrics_lines, newest
from config import Config
from ddp.core.errors import ExitCode, Stopped, UserError
from ddp.core.signals import STOP_SIGNALS
from ddp.data.dataset import Datasets
from ddp.training.schedule import Schedule
from faults import fault
from processes import fork

OPTIONS = ("--dataset=synthetic", "--device=cpu", "--batch-size=16", "--lr=0.1")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 130, "test": 60})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rehearsal(folder: Path, *options: str, nproc: int = 2, **length: int) -> rehearse.Rehearsal:
    return rehearse.Rehearsal(Config.parse([*OPTIONS, *options]), nproc, folder, fork, **length)


def rehearsed(folder: Path, *options: str, nproc: int = 2, **length: int) -> dict[str, list[str]]:
    """What each check finds."""
    return {name: found for name, found, _ in rehearsal(folder, *options, nproc=nproc, **length).checks()}


RESUMED, WORKERS, MIDDLE, ENDED = (
    "killed three times and resumed",
    "0 and 2 DataLoader workers",
    "evaluated in the middle of an epoch",
    "ended by --max-steps in the middle of an epoch, and resumed",
)
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


class WithScale(Small):
    """A buffer that the loop over the epochs changes."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def shift(self, outputs: Tensor) -> Tensor:
        return outputs * (self.scale - 1)


class Running:
    """Running statistics in an object."""

    def __init__(self) -> None:
        self.mean = torch.zeros(10)

    def update(self, values: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * values.mean(0)
        return self.mean


SEEN: list[int] = []  # since the last log line: a metric that keeps what it has seen


def with_metric_of_its_own(patch: pytest.MonkeyPatch) -> None:
    totals, compute, last = model.batch_totals, model.compute_metrics, 0

    def add(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        SEEN.append(len(targets))
        return totals(loss, outputs, targets)

    def computed(found: Any) -> dict[str, float]:
        nonlocal last
        last = sum(SEEN) or last
        SEEN.clear()
        return compute(found) | {"seen": last}

    patch.setattr(model, "batch_totals", add)
    patch.setattr(model, "compute_metrics", computed)


class WithPeriod(Small):
    """A counter as a plain attribute, which is 0 again after 7 passes."""

    passes = 0

    def shift(self, outputs: Tensor) -> Tensor:
        self.passes = (self.passes + self.training) % 7
        return outputs * self.passes


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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
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
    """A dataset that counts the epochs: sample 150 comes once in each. In a first batch, a run would notice it."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.epoch += index == 150
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


def with_loop(lines: str) -> Callable[[pytest.MonkeyPatch], None]:
    """lines: in place of run.end_epoch(...), as `end`."""

    def make(patch: pytest.MonkeyPatch) -> None:
        with_model(WithScale)(patch)
        end = "            run.end_epoch(evaluate(evaluated_model, val_loader, config, ctx), val_loader)\n"
        patch.setattr(main, "main", changed_main({end: lines.replace("end", end.strip())}))

    return make


SCALE = "model.scale.mul_(0.7)\n"
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str], str]] = {
    "a queue as a plain attribute": (with_model(WithQueue), [RESUMED, *EVALUATED], "model: layer.weight differs by "),
    "an object with statistics": (with_model(WithStatistics), [RESUMED, *EVALUATED], "model: layer.weight differs by "),
    "a state with a period": (with_model(WithPeriod), [RESUMED], "model: layer.weight differs by "),
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
    "a change after the end of an epoch": (with_loop(f"            end\n            {SCALE}"), [RESUMED], "model: "),
    "a change at the end of an epoch that is not complete": (
        with_loop(f"            {SCALE}            end\n"),
        [ENDED],
        "model: ",
    ),
    "a metric in a global list": (with_metric_of_its_own, [RESUMED], "metrics.jsonl: train of step 4: seen is "),
    "an average that is no field": (
        with_forgotten_ema,
        [RESUMED, *EVALUATED],
        "metrics.jsonl: val of step 8: loss is ",
    ),
}


@fault(40, 48)
@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected, first = MISTAKES[mistake]
    make(monkeypatch)
    found: dict[str, list[str]] = {}
    for name, each, _ in rehearsal(tmp_path, *(["--ema=0.9"] if "average" in mistake else [])).checks():
        found |= {name: each} if each else {}
        if found.keys() >= set(expected):
            break  # a divided batch may let the run refuse such a task
    assert found.keys() >= set(expected)
    assert found[expected[0]][0].startswith(first)


@pytest.mark.slow
def test_what_changes_once_per_epoch_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_loop(f"            if run.epoch_is_complete():\n                {SCALE}            end\n")(monkeypatch)
    found = rehearsed(tmp_path, nproc=1)
    assert not any(found.values()) and found.keys() >= {RESUMED, ENDED}


def test_metrics_that_are_reset_when_they_are_computed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As those of an object that adds up the batches by itself: they are asked for twice at the end of an epoch."""
    seen, totals, compute = [0], model.batch_totals, model.compute_metrics

    def add(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        seen[0] += len(targets)
        return totals(loss, outputs, targets)

    def computed(found: Any) -> dict[str, float]:
        own, seen[0] = seen[0], 0
        return compute(found) | {"seen": own}

    monkeypatch.setattr(model, "batch_totals", add)
    monkeypatch.setattr(model, "compute_metrics", computed)
    with pytest.raises(UserError, match="a run ended with exit code 2"):
        rehearsed(tmp_path)
    line = "error: compute_metrics in model.py returns another seen for the same totals: keep nothing but what batch_"
    assert line in capsys.readouterr().out


class Zipped(Dataset):
    """Opens its archive at the first read."""

    classes = tuple(map(str, range(10)))
    archive: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path, "w") as archive:
            for index in range(160):
                archive.writestr(str(index), bytes([index]) * 3000)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.archive = self.archive or zipfile.ZipFile(self.path)
        return torch.tensor([float(self.archive.read(str(index))[-1])]), index % 10


@fault(52)
@pytest.mark.parametrize("reads", [False, True])
def test_an_archive_that_workers_share_is_named(reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none if each worker opens it."""

    def build(config: Config, train_set: Any) -> nn.Module:
        return nn.Linear(len(train_set[0][0]) if reads else 1, 10)

    zipped = Zipped(tmp_path / "numbers.zip")
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(zipped))
    monkeypatch.setattr(model, "build_model", build)
    found = rehearsal(tmp_path).shared_files()
    assert (f"{tmp_path}/numbers.zip (descriptor " in found[0] and "is shared" in found[0]) if reads else found == []


class Rewound(Zipped):
    """Opens one file at the start, and returns to its start after each read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path.open("rb")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.file.seek(3000 * index)
        value = float(self.file.read(10)[-1])
        self.file.seek(0)
        return torch.tensor([value]), index % 10


@fault(52)
def test_a_shared_file_that_is_rewound_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewound = Rewound(tmp_path / "numbers.zip")
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(rewound))
    monkeypatch.setattr(model, "build_model", lambda config, train_set: nn.Linear(1, 10))
    found = rehearsal(tmp_path).shared_files()
    assert f"{tmp_path}/numbers.zip (descriptor " in found[0] and "is shared" in found[0]


@pytest.mark.sample(0)
def test_a_sharded_run_is_rehearsed(tmp_path: Path) -> None:
    assert not any(rehearsed(tmp_path, "--shard").values())


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_mistake_in_a_sharded_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model(WithStatistics)(monkeypatch)
    found = rehearsed(tmp_path, "--shard")
    assert {name for name, each in found.items() if each} >= {RESUMED, MIDDLE, *EVALUATED}
    assert found[RESUMED][0].startswith("model: layer.weight differs by ")


# ---- a divided batch -------------------------------------------------------------------------------------------------


def divisions(folder: Path, *options: str) -> dict[str, list[str]]:
    """What the checks find for 2 passes and for 2 processes, with what they say after the name of the division."""
    found = {name: each for name, each, _ in rehearsal(folder, *options).divisions()}
    return {name.partition("samples in ")[2] or name: each for name, each in found.items()}


PASSES, PROCESSES = (
    f"2 {how}: the weights and buffers of 1 pass, up to 1e-06 (float64)" for how in ("passes", "processes")
)


def with_class_weights(patch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([9.0, *[1.0] * 9])
    patch.setattr(model, "compute_loss", lambda out, y, config: F.cross_entropy(out, y, weight=weights.to(out)))


def with_two_means(patch: pytest.MonkeyPatch) -> None:
    """One over all samples, and one over those of class 0."""

    def loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
        first = targets == 0
        return F.cross_entropy(outputs, targets) + outputs[first].square().sum() / first.count_nonzero().clamp(min=1)

    patch.setattr(model, "compute_loss", loss)


class Recurrent(Small):
    """A state in a buffer, from the last sample of each pass."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("carried", torch.zeros(10))

    def shift(self, outputs: Tensor) -> Tensor:
        carried = self.carried.clone()
        if self.training:
            self.carried.copy_(outputs[-1].detach())
        return carried


class Counted(Small):
    """How often each class was predicted, on this rank."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("predicted", torch.zeros(10, dtype=torch.int64))

    def shift(self, outputs: Tensor) -> float:
        if self.training:
            self.predicted += outputs.argmax(1).bincount(minlength=10)
        return 0.0


class Normalised(Small):
    """Normalises its inputs by what it has seen: no BatchNorm of torch."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.running_mean.lerp_(images.mean(), 0.1)
        return super().forward(images - self.running_mean)


class Seen:
    """The classes of this rank's samples: it lacks before_save()."""

    def __init__(self) -> None:
        self.counts = torch.zeros(10)

    def state_dict(self) -> dict[str, Tensor]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.counts = state["counts"]


class Drawing(Seen):
    """Numbers that no division keeps: the state of a generator, and one that no tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __iadd__(self, counts: Tensor) -> Drawing:
        torch.rand(int(counts.sum()), generator=self.generator)
        return self

    counts = property(lambda self: self, lambda self, value: None)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state(), "seed": 2**64}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


def with_field(patch: pytest.MonkeyPatch, kind: type[Seen] = Seen) -> None:
    totals = "        training.meter.add(task.batch_totals(loss, outputs, targets))\n"
    edits = {
        "    ema: ModelEma | None\n": "    ema: ModelEma | None\n    seen: Any\n",
        "task.compute_metrics), ema)": "task.compute_metrics), ema, task.Seen())",
        totals: f"{totals}        training.seen.counts += targets.bincount(minlength=10)\n",
    }
    patch.setattr(model, "Seen", kind, raising=False)
    patch.setattr(main, "main", changed_main(edits))


class Teacher(Small):
    """It moves in each forward pass."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.slow = nn.Linear(3 * 32 * 32, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.slow.weight.lerp_(self.layer.weight.detach(), 0.1)
        return super().forward(images) - 0.1 * self.slow(images.flatten(1))


class Batchwise(Small):
    def shift(self, outputs: Tensor) -> Tensor:
        return F.batch_norm(outputs, None, None, training=True)  # no module, and so not known


class Weighted:
    """Draws with torch, as the recipe of weighted sampling does."""

    def __init__(self, samples: int) -> None:
        self.weights = torch.ones(samples)

    def length(self, epoch: int) -> int:
        return len(self.weights)

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        generator = torch.Generator().manual_seed(epoch)
        return torch.multinomial(self.weights, len(self.weights), replacement=True, generator=generator)[start:stop]


def with_class_weights_and_a_sampler(patch: pytest.MonkeyPatch) -> None:
    with_class_weights(patch)
    with_datasets(lambda found: replace(found, sampler=Weighted(len(found.train))))(patch)


class Constant(Small):
    """Buffers that are no numbers, are not finite, are not saved, or are NaN, as masks and caches have them."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("causal", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("best", torch.tensor(torch.nan))
        self.register_buffer("rotary", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def shift(self, outputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.last = outputs.detach()
        return torch.zeros_like(outputs)


@fault(48)
def test_buffers_that_do_not_depend_on_a_division_are_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Constant)(monkeypatch)
    (passes,) = [each for name, each, _ in rehearsal(tmp_path).divisions() if "2 passes" in name]
    assert passes == []


class Remembered(Small):
    """A buffer that no training step reads: an evaluation may."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(10))
        self.register_buffer("low", torch.tensor(torch.inf))

    def shift(self, outputs: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(outputs.detach().mean(0), 0.1)
            self.low.copy_(torch.minimum(self.low, outputs.detach().amin()))
        return torch.zeros_like(outputs)


def with_kept_gradients(patch: pytest.MonkeyPatch) -> None:
    """DDP's next backward pass overwrites them, where torch alone makes new ones."""
    compute = main.compute_gradients

    def compute_twice(ddp_model: Any, training: Any, batches: Any, *rest: Any) -> bool:
        batches, weights = list(batches), list(training.model.parameters())
        compute(ddp_model, training, batches, *rest)
        kept = [weight.grad for weight in weights]
        training.optimizer.zero_grad()
        compute(ddp_model, training, [(-inputs, targets) for inputs, targets in batches], *rest)
        for weight, gradient in zip(weights, kept, strict=True):
            weight.grad = gradient
        return True

    patch.setattr(main, "compute_gradients", compute_twice)


def with_the_harder_half(patch: pytest.MonkeyPatch) -> None:
    """From the second epoch on."""
    compute, epoch = main.compute_gradients, 0

    def compute_in_epoch(ddp_model: Any, training: Any, batches: Any, config: Config, ctx: Any) -> bool:
        nonlocal epoch
        epoch = ctx.work.step // 8
        return compute(ddp_model, training, batches, config, ctx)

    def loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return (losses.topk(len(losses) // 2).values if epoch else losses).mean()

    patch.setattr(main, "compute_gradients", compute_in_epoch)
    patch.setattr(model, "compute_loss", loss)


NOT_THE_MEAN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "class weights": (with_class_weights, {PASSES, PROCESSES}),
    "two means": (with_two_means, {PASSES, PROCESSES}),
    "a carried state": (with_model(Recurrent), {PASSES, PROCESSES}),
    "a teacher that moves in each pass": (with_model(Teacher), {PASSES}),
    "statistics of the batch": (with_model(Batchwise), {PASSES, PROCESSES}),
    "class weights and a sampler": (with_class_weights_and_a_sampler, {PASSES, PROCESSES}),
    "a buffer for evaluations": (with_model(Remembered), {PASSES, PROCESSES}),
    "a gradient that is kept": (with_kept_gradients, {PASSES, PROCESSES}),
    "the harder half of a batch": (with_the_harder_half, {PASSES, PROCESSES}),
    "counts of a rank": (with_model(Counted), {PROCESSES}),
    "a running mean that is no BatchNorm": (with_model(Normalised), {PASSES, PROCESSES}),
    "a field of a rank": (with_field, {PROCESSES}),
}


@fault(48)
@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", NOT_THE_MEAN)
def test_a_step_that_is_not_the_mean_over_the_global_batch_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = NOT_THE_MEAN[mistake]
    make(monkeypatch)
    found = divisions(tmp_path)
    assert {name for name, each in found.items() if each} == expected, found
    for name in expected:
        assert re.fullmatch(r".* and others differ by [\d.e-]+ of the update of step (1|8|16)", found[name][0])


class ByDesign(Small):
    """BatchNorm, spectral norm, dropout and noise."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.layer = self.spectral_norm(self.layer)

    spectral_norm = staticmethod(nn.utils.parametrizations.spectral_norm)

    def shift(self, outputs: Tensor) -> Tensor:
        noise = torch.randn_like(outputs) if self.training else torch.zeros_like(outputs)
        return self.norm(F.dropout(outputs, training=self.training)) + 0.1 * noise


class OnlyBatchNorm(Small):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def shift(self, outputs: Tensor) -> Tensor:
        return self.norm(outputs)


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_random_numbers_are_no_cause_if_nothing_draws_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model(OnlyBatchNorm)(monkeypatch)
    assert all(re.search(r"of the update, for BatchNorm\)$", name) for name in divisions(tmp_path))


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
@pytest.mark.parametrize("casts", [False, True])
def test_a_model_of_few_digits_is_compared(casts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more digits, unless it casts its inputs itself."""

    class Narrow(Small):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.to(torch.bfloat16)

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.to(torch.bfloat16 if casts else self.layer.weight.dtype)).double()

    with_model(Narrow)(monkeypatch)
    limit = "0.1 (bfloat16)" if casts else "1e-06 (float64)"
    names = [name.replace("1e-06 (float64)", limit) for name in (PASSES, PROCESSES)]
    found = divisions(tmp_path / "right")
    assert found == {name: [] for name in names}, found
    with_class_weights(monkeypatch)
    found = divisions(tmp_path / "wrong")
    assert found.keys() == {*names} and all(found.values())


@pytest.mark.slow
def test_a_loss_in_float32_is_compared_with_its_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some libraries compute it. Adam makes much of the smallest gradients."""
    monkeypatch.setattr(model, "build_optimizer", lambda net, config: torch.optim.Adam(net.parameters(), lr=0.01))
    with_model(Small)(monkeypatch)
    names = {name.replace("1e-06 (float64)", "0.001 (float32 loss)") for name in (PASSES, PROCESSES)}
    for first_weight, is_right in ((1.0, True), (1.1, False)):
        weights = torch.tensor([first_weight, *[1.0] * 9])
        loss = partial(F.cross_entropy, weight=weights)
        monkeypatch.setattr(model, "compute_loss", lambda out, targets, config, loss=loss: loss(out.float(), targets))
        found = divisions(tmp_path / str(is_right))
        assert found.keys() == names and [not each for each in found.values()] == [is_right] * 2, found


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_the_second_kill_resumes_from_the_end_of_an_epoch(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Small)(monkeypatch)
    checks = rehearsal(tmp_path, nproc=1, steps=steps).checks()
    assert [next(checks)[1], next(checks)[0]] == [[], RESUMED]
    resumed = re.findall(r"resuming from \S*/step_0*(\d+)", (tmp_path / "killed" / "output").read_text())
    assert int(resumed[steps > 3]) == steps and len(resumed) == 2 + (steps > 3), resumed


class Waiting(Schedule):
    """A tenth of the rate from the third epoch on, because it has counted."""

    waited = 0

    def factor(self, epochs_done: float) -> float:
        return 1.0 if self.waited < 2 else 0.1

    def end_epoch(self, metrics: Any) -> None:
        self.waited += 1


@pytest.mark.slow
def test_state_that_a_later_epoch_needs_is_named_and_found_with_more_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Small)(monkeypatch)
    monkeypatch.setattr(main, "Schedule", Waiting)
    names = [name for name, found, _ in rehearsal(tmp_path / "two", nproc=1).checks() if not found]
    assert f"{RESUMED} (but schedule.waited differ, which no checkpoint holds: are they used later?)" in names
    printed = (tmp_path / "two" / "whole" / "output").read_text()
    assert printed.count("warning: Waiting.end_epoch changes waited, which is not saved: write state_dict() and ") == 1
    found = rehearsed(tmp_path / "four", nproc=1, epochs=4)
    assert found[RESUMED][0].startswith("model: layer."), found


class Mixed(images.ImagesInMemory):
    def mix(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (inputs + inputs[torch.randperm(len(inputs))]) / 2, targets


@pytest.mark.slow
@pytest.mark.parametrize("spectral_norm", [ByDesign.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"])
def test_what_treats_a_batch_as_a_whole_by_design_is_named(
    spectral_norm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByDesign, "spectral_norm", staticmethod(spectral_norm))
    with_model(ByDesign)(monkeypatch)
    monkeypatch.setattr(data, "ImagesInMemory", Mixed)
    with_field(monkeypatch, Drawing)
    found = divisions(tmp_path)
    assert not any(found.values()), found
    for name in found:
        assert re.search(
            r"1 pass, up to 1e-06 \(float64\) \(but [\d.]+ of the update, for BatchNorm and spectral norm and mix and "
            r"random numbers\)$",
            name,
        ), name


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_a_model_that_cannot_take_constants_for_random_numbers_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(Small):
        def shift(self, outputs: Tensor) -> Tensor:
            noise = torch.rand(10)
            return outputs * (noise - noise.mean()) / noise.std()

    with_model(Noisy)(monkeypatch)
    reason = "are not checked: the run fails with constants in place of random numbers"
    assert divisions(tmp_path) == {f"2 passes {reason}": [], f"2 processes {reason}": []}


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_a_mask_of_random_numbers_is_neither_empty_nor_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(Small):
        def forward(self, images: Tensor) -> Tensor:
            outputs = super().forward(images)
            return outputs * (torch.rand_like(outputs) < 0.5) if self.training else outputs

    with_model(Masked)(monkeypatch)
    found = divisions(tmp_path / "right")
    assert not any(found.values()), found
    assert any(re.fullmatch(r"2 processes: .* of the update, for random numbers\)", name) for name in found), found
    with_class_weights(monkeypatch)
    assert all(divisions(tmp_path / "wrong").values())


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_a_model_for_float32_alone_is_compared_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(Small):
        def shift(self, outputs: Tensor) -> Tensor:
            return outputs @ torch.eye(10, dtype=torch.float32)

    with_model(Single)(monkeypatch)
    names = [name.replace("1e-06 (float64)", "0.02 (float32)") for name in (PASSES, PROCESSES)]
    assert divisions(tmp_path / "right") == {name: [] for name in names}
    assert (tmp_path / "right/undivided/step_8.pt").exists()
    with monkeypatch.context() as patch:  # the sum of the means of batches
        totals = lambda loss, outputs, targets: {"loss": loss.detach(), "count": len(targets)}  # noqa: E731
        patch.setattr(model, "batch_totals", totals)
        patch.setattr(model, "compute_metrics", lambda sums: {"loss": sums["loss"].item() / sums["count"].item()})
        patch.setattr(model, "metric_for_best_model", lambda metrics: -metrics["loss"])
        assert all(" loss of step " in found[0] for found in divisions(tmp_path / "means").values())
    with_class_weights(monkeypatch)
    assert all(divisions(tmp_path / "wrong").values())


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_an_epoch_may_be_shorter_than_the_steps_that_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Small)(monkeypatch)
    assert [each for _, each, _ in rehearsal(tmp_path, steps=2).divisions()] == [[], []]


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_a_run_that_changes_no_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All divisions of it are equal."""
    with_model(Small)(monkeypatch)
    monkeypatch.setattr(model, "build_optimizer", lambda network, config: torch.optim.SGD(network.parameters(), lr=0.0))
    assert list(divisions(tmp_path).values()) == [["no weight changed in 16 steps"]] * 2


class AllGather(torch.autograd.Function):
    """rows [n, d] -> the rows of all ranks [ranks x n, d]. Its backward pass adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(total := gradient.clone())
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def contrast(gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """A loss that compares each sample with those of all ranks."""

    def loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
        if not (torch.is_grad_enabled() and dist.is_initialized()):
            return F.cross_entropy(outputs, targets)
        first = dist.get_rank() * len(outputs)
        return F.cross_entropy(outputs @ gather(outputs).T, torch.arange(first, first + len(outputs)))

    return loss


def without_gradient(rows: Tensor) -> Tensor:
    """Only this rank's rows have one, as in widely copied code."""
    everyone = list(all_gather_tensor(rows.detach(), 0, dist.group.WORLD).chunk(dist.get_world_size()))
    everyone[dist.get_rank()] = rows
    return torch.cat(everyone)


@pytest.mark.sample(1, "what else depends on a division")
@pytest.mark.slow
def test_a_loss_that_compares_samples_is_the_same_on_two_processes_if_it_gathers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Small)(monkeypatch)
    monkeypatch.setattr(model, "LOSS_COMPARES_SAMPLES", True, raising=False)
    left_out = {"2 passes are not checked: LOSS_COMPARES_SAMPLES in model.py": []}
    alone = {"2 processes are not checked: forward and compute_loss call no gather of torch.distributed": []}
    assert divisions(tmp_path / "alone") == left_out | alone
    monkeypatch.setattr(model, "compute_loss", contrast(AllGather.apply))
    assert divisions(tmp_path / "right") == left_out | {PROCESSES: []}
    monkeypatch.setattr(model, "compute_loss", contrast(without_gradient))
    assert divisions(tmp_path / "wrong")[PROCESSES]
    gather, inside = (lambda rows: without_gradient(rows) if torch.is_grad_enabled() else rows), model.forward
    monkeypatch.setattr(model, "forward", lambda *given: inside(*given) - gather(inside(*given)).mean(0))
    monkeypatch.setattr(model, "compute_loss", lambda outputs, y, config: F.cross_entropy(outputs, y))
    assert divisions(tmp_path / "forward")[PROCESSES]


@pytest.mark.sample(1, "what else depends on a division")
@pytest.mark.slow
def test_metrics_that_depend_on_a_division_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are right: with loss_terms, and a mean over other terms than the samples that batch_totals counts."""
    with_class_weights(monkeypatch)
    weights = torch.tensor([9.0] + [1.0] * 9)
    monkeypatch.setattr(model, "loss_terms", lambda outputs, targets: weights[targets].sum(), raising=False)
    found = divisions(tmp_path / "one")
    assert set(found) == {PASSES, PROCESSES}
    for each in found.values():
        assert re.fullmatch(r"train loss of step \d is [\d.]+, and [\d.]+ if the batch is divided", each[0]), each
        assert any(line.startswith("val loss of step 8 is ") for line in each), each
    for each in divisions(tmp_path / "two", "--eval-batch-size=16").values():
        assert each and not any(line.startswith("val") for line in each), "with batches of one size"


@pytest.mark.sample(1, "what else depends on a division")
@pytest.mark.slow
def test_a_metric_of_batches_is_named_and_is_an_error_only_if_it_chooses_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(Small)(monkeypatch)
    totals, compute = model.batch_totals, model.compute_metrics
    monkeypatch.setattr(model, "batch_totals", lambda loss, out, y: totals(loss, out, y) | {"batches": 1})
    monkeypatch.setattr(model, "compute_metrics", lambda sums: {**compute(sums), "batches": sums["batches"].item()})
    remark = " (but the metrics train batches, train_epoch batches, val batches depend on the division)"
    assert divisions(tmp_path / "one") == {PASSES + remark: [], PROCESSES + remark: []}
    monkeypatch.setattr(model, "metric_for_best_model", lambda metrics: -metrics["batches"])
    for first, *_ in divisions(tmp_path / "two").values():
        assert first.startswith("val metric_for_best_model of step 8 is -")


# ---- more of a run ---------------------------------------------------------------------------------------------------


class CopiedSeldom(Small):
    """A target network as a plain attribute, which is copied every 20 steps."""

    passes, target = 0, 0.0

    def shift(self, outputs: Tensor) -> Tensor | float:
        if self.training:
            self.passes += 1
            if self.passes % 20 == 0:
                self.target = outputs.mean().item()
        return outputs * self.target


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_more_steps_show_what_changes_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 32 * 24, "val": 130, "test": 60})
    with_model(CopiedSeldom)(monkeypatch)
    assert rehearsed(tmp_path, steps=24)[RESUMED]


class Averaging(torch.optim.SGD):
    """Measured weights are another half: as a schedule-free optimizer, it has a mode for evaluations."""

    def eval(self) -> None:
        self._scale(0.5)

    def train(self) -> None:
        self._scale(2.0)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.mul_(factor)


@pytest.mark.sample(1, "rehearsals with other options")
@pytest.mark.slow
def test_a_checkpoint_that_was_saved_in_another_mode_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an epoch is saved in the mode in which it is measured; the middle is not."""
    monkeypatch.setattr(model, "build_optimizer", lambda net, config: Averaging(net.parameters(), lr=0.1))
    epoch = "            ddp_model.train()\n"
    end = "            run.end_epoch("
    edits = {
        epoch: f"{epoch}            if run.state.step: optimizer.train()\n",
        end: f"            optimizer.eval()\n{end}",
    }
    monkeypatch.setattr(main, "main", changed_main(edits))
    found = rehearsed(tmp_path)
    assert found[MIDDLE] and not any(found[name] for name in EVALUATED), found


@pytest.mark.slow
def test_the_samples_of_an_evaluation_are_from_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a set that is sorted by class, the first few would have one class."""
    load = data.load_datasets

    def sorted_by_class(config: Config) -> Datasets:
        found = load(config)
        return replace(found, val=Subset(found.val, found.val.targets.argsort().tolist()))

    monkeypatch.setattr(main, "load_datasets", sorted_by_class)
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 640, "test": 60})
    totals, compute = model.batch_totals, model.compute_metrics
    with_targets = lambda loss, out, y: totals(loss, out, y) | {"targets": y.tolist()}  # noqa: E731
    monkeypatch.setattr(model, "batch_totals", with_targets)
    monkeypatch.setattr(model, "compute_metrics", lambda sums: {**compute(sums), "classes": len({*sums["targets"]})})
    whole = rehearsal(tmp_path).run("whole", partial(rehearse.whole_run, 0))
    (line, _) = (line for line in metrics_lines(whole) if line["split"] == "val")
    assert line["count"] == 8 * 16 - 1 and line["classes"] == 10


def test_a_run_that_begins_with_weights_of_a_file_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_model(Small)(monkeypatch)
    torch.save(Small().state_dict(), tmp_path / "weights.pt")
    one = rehearsal(tmp_path, f"--init-from={tmp_path}/weights.pt", nproc=1, steps=2)
    whole = one.run("whole", partial(rehearse.whole_run, 0))
    assert one.evaluated(whole, newest(whole), 1) == [] and "weights from " in (whole / "output").read_text()


@pytest.mark.sample(1, "rehearsals with other options")
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
    output = python(project, "rehearse.py", "--nproc", 1, "--", *GIVEN, code=1, fork=True, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.glob("rehearsal-*")
    lines = output.splitlines()
    assert lines[:2] == ["ok      trained 2 epochs with 1 process", "FAILED  killed three times and resumed"]
    assert lines[2].startswith("        model: conv1.weight differs by ")
    assert lines[3].startswith("        metrics.jsonl: train of step 4: loss is ")
    assert "usual causes:" in output and "use a buffer, the optimizer's state_dict(), or a field of Training" in output
    assert "ok      0 and 2 DataLoader workers" in lines
    assert "FAILED  evaluated by 1 new process\n        val loss is " in output
    assert lines[-1] == f"not exact; what the runs printed and wrote is in {folder}"
    assert "resuming from" in (folder / "killed/output").read_text()

    wrong = python(project, "rehearse.py", "--", "--batch-size", 0, code=2)
    assert wrong == "error: --batch-size: '0' must be an integer >= 1; see --help\n"
    (project / "model.py").write_text(source.replace("cross_entropy(outputs, targets)", "cross_entropy(outputs, x)"))
    failed = python(project, "rehearse.py", "--", *GIVEN, code=1, fork=True, TMPDIR=str(tmp_path))
    assert "\nNameError: name 'x' is not defined\n" in failed and "Traceback" in failed
    assert failed.splitlines()[-1].startswith("error: a run ended with exit code 1; what it printed is in ")


def test_a_rehearsal_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run, and between two of them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(
        rehearse, "spawn", lambda *_: rehearse.SpawnSignals().receive(signal.SIGINT) or ExitCode.STOPPED
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "--", *OPTIONS])
    try:
        with pytest.raises(Stopped, match="stopped: this rehearsal proves nothing"):
            rehearse.rehearse()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not list(tmp_path.glob("rehearsal*"))


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_command_starts_new_processes(tmp_path: Path) -> None:
    project = shrink(copy_template(tmp_path / "project"), train=320, val=130, test=60)
    output = python(project, "rehearse.py", "--", *GIVEN, TMPDIR=str(tmp_path))
    assert output.count("ok      ") == 10 and output.splitlines()[-1].startswith("exact: "), output
    assert not [*tmp_path.glob("rehearsal-*")]
