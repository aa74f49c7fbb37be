"""What would silently have no effect, lose samples or differ between ranks is repaired, or refused with one line."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outputs import lines, weights_and_momentum
from template_copy import changed_main
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

import compare
import data
import ddp.data.loader
import main
import model
from config import Config
from ddp.checkpoint.reuse import load_weights, read_weights
from ddp.checkpoint.state import TrainState
from ddp.core.errors import UsageError
from ddp.core.signals import stop_signal
from ddp.data.dataset import BatchDataset, Datasets, attributes, hooks_of, set_epoch
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.reader import SeededReader
from ddp.data.samples import check_datasets
from ddp.data.workers import Workers
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.entrypoint.run_main import run_as_rank
from ddp.training.meter import Meter
from ddp.training.schedule import Schedule
from ddp.training.wrapping import check_same_weights, wrap_model
from faults import fault
from processes import Ranks, on_ranks, train
from small_models import build_awkward

OPTIONS = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 16, "--epochs", 2, "--warmup-epochs", 0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 160, "val": 90, "test": 40})
    monkeypatch.setattr(model, "build_model", build_awkward)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def the_error(output: str) -> str:
    (error,) = [line for line in output.splitlines() if "error:" in line.lower()]
    assert error.startswith("error: ") and "Traceback" not in output, output
    return error


# ---- samples --------------------------------------------------------------------------------------------------------


@fault(48)
@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_batches_that_the_dataloader_loses_end_the_run(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before best.pt is chosen by what is left."""

    def lossy(loader: DataLoader) -> Any:
        reader: Any = loader.dataset
        lost = (reader.epoch >= 0) == (part == "training")
        batches = itertools.islice(iter(loader), len(loader.batch_sampler) - lost)  # type: ignore[arg-type]
        return Workers(batches)

    monkeypatch.setattr(ddp.data.loader, "start_workers", lossy)
    output = train(2, *OPTIONS, "--eval-batch-size", 16, "--output-dir", tmp_path, code=8)
    assert "error: the DataLoader of rank " in output and " lost 1 of " in output
    assert not (tmp_path / "best.pt").exists()


def test_a_step_that_leaves_batches_does_not_move_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a `break` after a loss that is not finite."""

    def first_batches(which: str) -> list[str]:
        def compute(ddp_model: Any, training: Any, batches: Any, *_: Any) -> bool:
            found = list(batches) if which == "all" else [next(batches)]
            with (tmp_path / which).open("a") as file:
                file.write(f"{found[0][1].tolist()}\n")
            return False

        monkeypatch.setattr(main, "compute_gradients", compute)
        train(1, *OPTIONS, "--grad-accum-steps", 2, "--output-dir", tmp_path / f"run_{which}")
        return (tmp_path / which).read_text().splitlines()

    assert first_batches("one") == (expected := first_batches("all")) and len(expected) == 10


def test_a_split_without_a_generator_is_the_same_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = data.load_datasets

    def split(config: Config) -> Datasets:
        train_set, val_set = random_split(load(config).train, [128, 32])
        with (tmp_path / "split").open("a") as file:
            file.write(f"{sorted(val_set.indices)}\n")
        return Datasets(train_set, val_set)

    def start(rank_env: RankEnv) -> int:
        torch.manual_seed(os.getpid())  # a new process has a random seed
        words = [*OPTIONS, "--max-steps", 1, "--output-dir", tmp_path / "run"]
        return run_as_rank(main.main, Config.parse([str(word) for word in words]), rank_env)

    monkeypatch.setattr(main, "load_datasets", split)
    monkeypatch.setattr(model, "build_model", lambda config, train_set: Layers())
    for _ in range(2):  # a resume, which has nothing left to do, as well
        ranks = Ranks(2, start)
        assert ranks.wait() == [0, 0], ranks.output()
    splits = (tmp_path / "split").read_text().splitlines()
    assert len(splits) == 4 and len(set(splits)) == 1


class Growing(Dataset):
    """100 samples more in each epoch."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        self.length = 100

    def set_epoch(self, epoch: int) -> None:
        self.length = 100 * (1 + epoch)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 32, 32), index / 400), index % 10


def test_a_part_of_a_data_set_has_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for folds of a cross-validation: build_model asks the training set for them."""
    config = Config.parse([str(word) for word in OPTIONS])
    whole = data.load_datasets(config).train
    parts = random_split(whole, [100, len(whole) - 100])
    assert len(check_datasets(Datasets(*parts), config).train.classes) == 10


class AsLong:
    """As many positions as the data have samples now."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def length(self, epoch: int) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def indices(self, epoch: int, start: int, stop: int) -> range:
        return range(start, stop)


class InOrder:
    def length(self, epoch: int) -> int:
        return 100 * (1 + epoch)

    def indices(self, epoch: int, start: int, stop: int) -> range:
        return range(start, stop)


def test_a_dataset_that_grows_needs_a_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*OPTIONS, "--workers", 0, "--output-dir"]
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Growing()))
    error = the_error(train(1, *options, tmp_path / "refused", code=2))
    assert error.startswith("error: the training set had 100 samples, has 200 after set_epoch(1): ")
    assert "length(epoch)" in error
    grows = Growing()
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(grows, sampler=AsLong(grows)))
    error = the_error(train(1, *options, tmp_path / "as long", code=2))
    assert error.startswith(
        "error: sampler AsLong.length(1) was 100, is 200: let it depend on the epoch only, and not on"
    )
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Growing(), sampler=InOrder()))
    assert "step 18/18" in train(1, *options, tmp_path / "grows")


# ---- the learning rate, and other fields of Training ----------------------------------------------------------------


def with_field(monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Give Training one more field, `extra`."""
    kind = make_dataclass("Training", [("extra", Any)], bases=(main.Training,))
    monkeypatch.setattr(main, "Training", lambda net, optimizer, *rest: kind(net, optimizer, *rest, make(optimizer)))


@fault(55)
def test_a_scheduler_of_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_field(monkeypatch, ReduceLROnPlateau)
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: Training.extra in main.py (ReduceLROnPlateau) would have no effect, ")
    assert "'A schedule of your own' in docs/recipes.md" in error


@fault(55)
@pytest.mark.parametrize("field", [True, False])
def test_a_second_optimizer_may_have_a_scheduler_of_torch(
    field: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a field of Training, so that a checkpoint holds it: a run that resumes goes on with the same rate."""
    kind = make_dataclass("Training", [("second", Any), ("halving", Any)], bases=(main.Training,))

    def build(network: nn.Module, optimizer: torch.optim.Optimizer, *rest: Any) -> Any:
        second = torch.optim.SGD(list(network.parameters())[:1], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
        optimizer.register_step_post_hook(lambda *_: (second.step(), scheduler.step()))
        return kind(network, optimizer, *rest, second, scheduler if field else None)

    monkeypatch.setattr(main, "Training", build)
    options = [*OPTIONS, "--output-dir", tmp_path, "--max-steps"]
    if not field:
        error = the_error(train(1, *options, 2, code=2))
        assert error.startswith("error: a scheduler of torch sets the rate of Training.second in main.py, and no chec")
        return
    for steps in (2, 4):
        train(1, *options, steps)
    saved = torch.load(tmp_path / "checkpoints/step_00000004.pt", weights_only=True)
    assert saved["second"]["param_groups"][0]["lr"] == 1e-3 * 0.5**4


def test_a_field_without_a_state_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_field(monkeypatch, lambda optimizer: [1])
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: Training.extra in main.py (list) cannot be saved: give it state_dict() and ")


STEP = "                        apply_gradients(training, config)\n"
SET = "                    training.optimizer.param_groups[0]['lr'] = 0.5\n"


TRAIN_MODE = "            ddp_model.train()\n"
BUILT = "        schedule = Schedule(optimizer, config, train_loader.global_batch)\n"
CASES = [("before", True), ("after", False), ("for one step", True), ("before the first", False), ("at first", False)]


@pytest.mark.parametrize(("place", "works"), CASES)
def test_a_rate_that_no_step_would_use_is_refused(
    place: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"before": "    " + SET + STEP, "after": STEP + SET}
    back = SET.replace("0.5", "training.schedule.lr")
    lines["for one step"] = "    " + SET + STEP + back
    edits = {"before the first": {TRAIN_MODE: TRAIN_MODE + SET[8:]}}
    edits["at first"] = {BUILT: BUILT + SET[12:].replace("training.", "")}
    monkeypatch.setattr(main, "main", changed_main(edits.get(place, {STEP: lines.get(place, "")})))
    output = train(1, *OPTIONS, "--output-dir", tmp_path, code=0 if works else 2)
    if not works:
        assert the_error(output).startswith("error: the learning rate was set between two steps, and ")


class Keeping(Schedule):
    """Keeps the rates that the end of an epoch sets."""

    def set(self, epochs_done: float) -> None:
        self.lr = self.optimizer.param_groups[0]["lr"]

    def end_epoch(self, metrics: Any) -> None:
        self.inner = "a name that Schedule might have used"
        self.optimizer.param_groups[0]["lr"] *= 0.5


def test_a_schedule_may_keep_the_rates_that_it_sets_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "Schedule", Keeping)
    output = train(1, *OPTIONS, "--epochs", 2, "--output-dir", tmp_path)
    assert output.count("warning: Keeping.end_epoch changes inner, which is not saved: ") == 1
    train(1, *OPTIONS, "--epochs", 3, "--output-dir", tmp_path)
    assert [line["lr"] for line in lines(tmp_path, "train")] == [0.03, 0.015, 0.0075]


class OneChange(Schedule):
    """`end_epoch` does what `change` does."""

    change: Any = None

    def __init__(self, *given: Any) -> None:
        self._early, self.kind = 0, ReduceLROnPlateau  # before the attributes of Schedule
        super().__init__(*given)
        self.plateaus = [ReduceLROnPlateau(self.optimizer)]
        self.own, self.array = SimpleNamespace(best=0), np.zeros(2000)

    def end_epoch(self, metrics: Any) -> None:
        type(self).change(self)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "": lambda schedule: None,
    "_early": lambda schedule: vars(schedule).update(_early=1),
    "peak": lambda schedule: vars(schedule).update(peak=schedule.peak / 2),
    "plateaus": lambda schedule: schedule.plateaus[0].step(1.0),
    "own": lambda schedule: vars(schedule.own).update(best=1),
    "array": lambda schedule: schedule.array.__setitem__(1000, 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_end_of_an_epoch_changes_is_named_if_no_checkpoint_holds_it(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OneChange, "change", CHANGES[name])
    schedule = OneChange(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.03), Config.parse([]), 64)
    with caplog.at_level("INFO"):
        schedule.finish_epoch({"loss": 1.0})
        schedule.finish_epoch({"loss": 1.0})
    expected = [f"warning: OneChange.end_epoch changes {name}, which is not saved: "] if name else []
    assert [line[: len(expected[0])] for line in caplog.messages] == expected


def test_a_step_without_a_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None would mean that there are no gradients: no step would be taken."""
    last = "    return mean.finish(training.model)\n"
    monkeypatch.setattr(main, "main", changed_main({last: last.replace("return ", "")}))
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error == "error: compute_gradients in main.py returned None: return mean.finish(training.model), or True"


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_no_optimizer_trains_are_named_once(
    frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight for name, weight in network.named_parameters() if "s.0." not in name], config.lr)

    def build_model(config: Any, train_set: Any) -> nn.Module:
        network = build_awkward(config, train_set)
        network.layers[0].requires_grad_(not frozen)
        return network

    monkeypatch.setattr(model, "build_optimizer", build_optimizer)
    monkeypatch.setattr(model, "build_model", build_model)
    output = train(2, *OPTIONS, "--max-steps", 2, "--output-dir", tmp_path)
    names = "layers.0.weight; layers.0.bias: add them in build_optimizer, or freeze them with requires_grad_(False)"
    assert output.count(f"warning: no optimizer trains {names}") == (not frozen)


def test_a_rate_and_a_factor_of_one_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
        group = {"params": network.parameters(), "lr": config.lr * scale, "lr_scale": 0.5}
        return torch.optim.SGD([group], config.lr)

    monkeypatch.setattr(model, "build_optimizer", build_optimizer)
    for scale, code in ((1, 0), (0.5, 2)):
        output = train(1, *OPTIONS, "--max-steps", 2, "--output-dir", tmp_path / str(scale), code=code)
        assert ("own `lr` and an `lr_scale`, which multiplies it: give it one" in output) == (code == 2)


def test_a_schedule_hears_of_each_whole_epoch_and_its_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Schedule):
        epochs = 0

        def end_epoch(self, metrics: Any) -> None:
            self.epochs += metrics["loss"] > 0

        def factor(self, epochs_done: float) -> float:
            assert int(epochs_done) == self.epochs
            return 1.0

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    monkeypatch.setattr(main, "Schedule", Counting)
    options = [*OPTIONS, "--epochs", 3, "--output-dir", tmp_path]
    train(2, *options, "--max-steps", 7)  # in the second epoch
    assert "resuming from" in train(2, *options)


# ---- gradients, and states of optimizers ----------------------------------------------------------------------------

CALL = "run.checked(compute_gradients)(ddp_model, training, batches, config, ctx)"
BACKWARD = "            backward(mean.weigh(loss, outputs, targets), training.scaler, config.grad_accum_steps)\n"
AROUND_DDP = {
    "gradients by hand": {
        BACKWARD: "            weights = [*training.model.parameters()]\n"
        "            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):\n"
        "                weight.grad = gradient\n"
    },
    "two backward passes": {
        BACKWARD: "            (0.5 * loss).backward(retain_graph=True)\n            (0.5 * loss).backward()\n"
    },
    "the model without its wrapper": {
        "outputs = task.forward(ddp_model, inputs, targets)": "outputs = task.forward(training.model, inputs, targets)"
    },
    "random numbers of Python": {
        "    training.scaler.update()\n": "    import random\n    training.scaler.update()\n    with torch.no_grad():\n"
        "        for weight in training.model.parameters():\n            weight.mul_(random.uniform(0.9, 1.1))\n"
    },
}


@fault(54)
@pytest.mark.sample(1, "gradients that go around DDP")
@pytest.mark.parametrize("mistake", AROUND_DDP)
def test_ranks_with_different_weights_end_the_run_after_the_first_step(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "main", changed_main(AROUND_DDP[mistake]))
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path / "two", code=2))
    assert error.startswith("error: after step 1 the ranks have different weights, first model."), error
    train(1, *OPTIONS, "--max-steps", 1, "--output-dir", tmp_path / "one")


@fault(54)
@pytest.mark.parametrize("own", [False, True])
def test_a_weight_outside_of_the_model_is_refused(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, if nothing can save it; an optimizer of the owner may, so there the ranks are compared."""
    temperature = nn.Parameter(torch.ones(()))
    kind = type("Own", (torch.optim.SGD,), {}) if own else torch.optim.SGD

    def build_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
        return kind([*network.parameters(), temperature], lr=0.1)

    monkeypatch.setattr(model, "build_optimizer", build_optimizer)
    loss = lambda outputs, targets, config: F.cross_entropy(outputs * temperature, targets)  # noqa: E731
    monkeypatch.setattr(model, "compute_loss", loss)
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    alone = "error: Training.optimizer in main.py trains a weight that no checkpoint would hold: "
    differs = "error: after step 1 the ranks have different weights, first a weight of optimizer, "
    assert error.startswith(differs if own else alone), error


@fault(54)
@pytest.mark.parametrize("values", [((0.0,), (1.0,)), ((0.3, 0.4, 0.3), (0.4, 0.2, 0.4))])
def test_a_weight_of_another_module_is_named(values: tuple[Any, Any]) -> None:
    """Both the module and the optimizer have it. Also if the sum of its numbers is the same on all ranks."""

    def raised(ctx: DistContext) -> str:
        ctx.work.sharded = False
        network, other = nn.Linear(1, 1), nn.Linear(1, len(values[0]))
        other.weight.data.fill_(1)
        other.bias.data = torch.tensor(values[ctx.rank])
        optimizer = torch.optim.SGD([*network.parameters(), *other.parameters()])
        with pytest.raises(UsageError) as error:
            check_same_weights({"model": network, "optimizer": optimizer, "loss": other}, 1, ctx)
        return str(error.value)

    text = "after step 1 the ranks have different weights, first loss.bias: "
    assert all(each.startswith(text) and "into the model" in each for each in on_ranks(2, raised))


@fault(54)
def test_weights_of_few_digits_and_complex_ones_are_compared_and_a_unit_of_rounding_is_not_refused() -> None:
    def found(ctx: DistContext) -> list[str]:
        ctx.work.sharded, found = False, []
        for dtype in (torch.bfloat16, torch.float16, torch.complex64):
            network = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(dtype)
            network[0].weight = nn.Parameter(network[0].weight.data.conj())
            for noise, numbers in ((torch.finfo(dtype).eps * ctx.rank, 1), (0.2 * ctx.rank, 1024)):
                for weight in network.parameters():
                    part = weight.data.flatten()[:numbers]
                    part *= 1 + noise * torch.randn(len(part)).sign()
                try:
                    check_same_weights({"model": network}, 100, ctx)
                except UsageError:
                    found.append(f"{dtype} {numbers}")
        return found

    assert on_ranks(2, found) == [["torch.bfloat16 1024", "torch.float16 1024", "torch.complex64 1024"]] * 2


@fault(54)
def test_ranks_whose_softmax_layers_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of such a layer add up to 0, so that the sum of its weights stays."""
    layer = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    monkeypatch.setattr(model, "build_model", lambda config, train_set: layer)
    monkeypatch.setattr(main, "main", changed_main(AROUND_DDP["the model without its wrapper"]))
    error = the_error(train(2, *OPTIONS, "--guard", 0, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: after step 1 the ranks have different weights, first model."), error


@fault(54)
def test_ranks_that_differ_later_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone leaves out a step: after the first one, so the next save notices it."""
    monkeypatch.setattr(main, "main", changed_main({CALL: f"{CALL} and (run.state.step != 2 or ctx.rank != 1)"}))
    error = the_error(train(2, *OPTIONS, "--guard", 0, "--checkpoint-every", 2, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: after step 4 the ranks have different weights, first model."), error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if "step" in path.name] == ["step_00000002.pt"]


OTHER = "training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"


@fault(53)
@pytest.mark.parametrize("edit", [OTHER, "training.ema = ModelEma(model, 0.9)"])
def test_a_field_of_training_that_is_replaced_is_refused(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints would hold the old one, and the schedule would drive it."""
    line = "            ddp_model.train()\n"
    monkeypatch.setattr(main, "main", changed_main({line: f"{line}            {edit}\n"}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    name = edit.split()[0].capitalize()
    assert error == f"error: {name} in main.py was replaced after run.resume(), and not saved: " + (
        "make it before, or change it in place"
    )


def test_a_batch_size_that_changes_during_the_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of an epoch had steps without a batch."""
    line = "            ddp_model.train()\n"
    edit = f"{line}            config.batch_size *= 1 + run.state.epoch\n"
    monkeypatch.setattr(main, "main", changed_main({line: edit}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: config.batch_size or config.grad_accum_steps changed during the training: ")


@fault(53)
def test_a_stop_in_an_evaluation_within_an_epoch_waits_for_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before run.advance() the weights have a step that is not counted: a resumed run would take it again."""
    advance = "                run.advance()  # counts"
    evaluate = "run.log_eval(evaluate(evaluated_model, val_loader, config, ctx), val_loader)"
    edit = f"                if run.state.step == 3:\n                    {evaluate}\n"
    monkeypatch.setattr(main, "main", changed_main({advance: edit + advance}))
    train(1, *OPTIONS, "--eval-batch-size", 16, "--output-dir", tmp_path / "whole")
    rows = EvalLoader.__iter__

    def stopping(loader: EvalLoader) -> Any:
        for number, batch in enumerate(rows(loader)):
            if number == 1 and loader.ctx.work.step == 3:
                stop_signal.mark_requested(signal.SIGTERM)
            yield batch

    options = [*OPTIONS, "--eval-batch-size", 16, "--output-dir", tmp_path / "stopped"]
    with monkeypatch.context() as patch:
        patch.setattr(EvalLoader, "__iter__", stopping)
        train(1, *options, code=75)
    assert "resuming from" in train(1, *options)
    assert lines(tmp_path / "stopped", "val") == lines(tmp_path / "whole", "val")
    assert lines(tmp_path / "whole", "val")[0]["step"] == 4, "its weights have four steps"
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


@fault(9)
@pytest.mark.parametrize("guard", ["True", "run.epoch_is_complete()"])
def test_what_is_changed_before_the_end_of_an_epoch_is_changed_once_if_the_evaluation_is_stopped(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, and the totals of a Meter: a resumed run computes them again, from what the last step has left."""
    end = "            run.end_epoch(evaluate"
    changes = "next(model.parameters()).data.mul_(0.7)\n                training.extra.take()['x'].item()\n"
    edits = {
        end: f"            if {guard}:\n                {changes}{end}",
        "    ema: ModelEma | None\n": "    ema: ModelEma | None\n    extra: Meter\n",
        "task.compute_metrics), ema)": "task.compute_metrics), ema, Meter(ctx))",
        "    return mean.finish(": "    training.extra.add({'x': torch.ones(())})\n    return mean.finish(",
    }
    monkeypatch.setattr(main, "main", changed_main(edits))
    options = [*OPTIONS, "--eval-batch-size", 8, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    rows = EvalLoader.__iter__

    def stopping(loader: EvalLoader) -> Any:
        stop_signal.mark_requested(signal.SIGTERM)
        return rows(loader)

    with monkeypatch.context() as patch:
        patch.setattr(EvalLoader, "__iter__", stopping)
        train(2, *options, tmp_path / "stopped", code=75)
    assert not lines(tmp_path / "stopped", "val"), "it was stopped in the evaluation"
    assert "resuming from" in train(2, *options, tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


@fault(54)
def test_batches_that_are_read_twice_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time there are none, so there is no gradient, and nothing is trained."""
    twice = f"compute_gradients(ddp_model, training, batches, config, ctx) and ddp_model.zero_grad() is None and {CALL}"
    monkeypatch.setattr(main, "main", changed_main({CALL: twice}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path / "out", code=2))
    assert error == "error: the batches of a step were read already: write batches = list(batches) to use them twice"
    listed = twice.replace("batches, config, ctx) and", "(batches := list(batches)), config, ctx) and", 1)
    monkeypatch.setattr(main, "main", changed_main({CALL: listed}))
    train(1, *OPTIONS, "--max-steps", 2, "--output-dir", tmp_path / "listed")


@fault(53)
def test_a_state_does_not_go_to_another_weight_of_the_same_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if two lines of __init__ were exchanged, or a set of names has another order in the next process."""
    layers = lambda *names: nn.ModuleDict({name: nn.Linear(3 * 32 * 32, 10) for name in names})  # noqa: E731

    def built(*names: str) -> Any:
        network = layers(*names)
        network.forward = lambda images: network["a"](images.flatten(1)) + network["b"](images.flatten(1))
        return network

    options = [*OPTIONS, "--output-dir", tmp_path, "--max-steps"]
    monkeypatch.setattr(model, "build_model", lambda config, train_set: built("a", "b"))
    train(1, *options, 3)
    monkeypatch.setattr(model, "build_model", lambda config, train_set: built("b", "a"))
    error = the_error(train(1, *options, 6, code=4))
    assert "the optimizer has model.b.weight in the place of model.a.weight, whose state it would get" in error
    monkeypatch.setattr(model, "build_model", lambda config, train_set: built("a", "b"))
    assert "resuming from" in train(1, *options, 6)


def test_a_field_of_training_may_not_have_the_name_of_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = make_dataclass("Training", [("weights_of", Any)], bases=(main.Training,))
    monkeypatch.setattr(main, "Training", lambda net, optimizer, *rest: kind(net, optimizer, *rest, nn.Linear(1, 1)))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error == "error: Training.weights_of in main.py: checkpoints use that name; rename the field"


def test_an_optimizer_for_a_model_that_has_become_narrower_loads_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Any_(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1).to(self.weight.dtype)).float()

    monkeypatch.setattr(model, "build_optimizer", lambda network, config: torch.optim.AdamW(network.parameters()))
    for steps, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        monkeypatch.setattr(model, "build_model", lambda *_, dtype=dtype: Any_(3 * 32 * 32, 10).to(dtype))
        train(1, *OPTIONS, "--max-steps", steps, "--output-dir", tmp_path)


class Wide(torch.optim.Optimizer):
    """Sums in float64 and integers, for weights in float32 or less."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(network.parameters(), {"lr": 0.1})
        self.dtype = dtype

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if "sum" not in self.state[weight]:
                self.state[weight] = {
                    "sum": weight.detach().to(self.dtype),
                    "steps": torch.zeros((), dtype=torch.int64),
                }
            state = self.state[weight]
            assert (state["sum"].dtype, state["steps"].dtype) == (self.dtype, torch.int64)
            state["steps"] += 1
            state["sum"] -= 0.1 * weight.grad.to(self.dtype)
            weight.data.copy_(state["sum"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_state_of_an_optimizer_keeps_its_dtype_in_a_resume(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch casts it to that of the weights."""
    width = {torch.float64: torch.float32, torch.float32: torch.bfloat16}[dtype]

    class Narrow(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1).to(width)).float()

    monkeypatch.setattr(model, "build_model", lambda config, train_set: Narrow(3 * 32 * 32, 10).to(width))
    monkeypatch.setattr(model, "build_optimizer", lambda network, config: Wide(network, dtype))
    options = [*OPTIONS, "--output-dir"]
    train(1, *options, tmp_path / "whole")
    train(1, *options, tmp_path / "parts", "--max-steps", 3)
    train(1, *options, tmp_path / "parts")
    assert weights_and_momentum(tmp_path / "whole") == weights_and_momentum(tmp_path / "parts")


def test_an_evaluation_within_an_epoch_leaves_each_module_in_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there would be no dropout until the epoch ends."""
    advance = "                run.advance()  # counts"
    within = (
        "                if run.state.step % 2 == 1:\n                    evaluate(model, val_loader, config, ctx)\n"
    )
    train(1, *OPTIONS, "--output-dir", tmp_path / "without")
    monkeypatch.setattr(main, "main", changed_main({advance: within + advance}))
    train(1, *OPTIONS, "--output-dir", tmp_path / "within")
    assert compare.differences(tmp_path / "without", tmp_path / "within") == []


def test_a_weight_that_no_optimizer_has_does_not_change_how_others_are_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing clears its gradient, which grows, and is not in a checkpoint."""
    layers = lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 10))  # noqa: E731
    monkeypatch.setattr(model, "build_model", layers)
    monkeypatch.setattr(model, "build_optimizer", lambda net, config: torch.optim.SGD(net[2].parameters(), lr=0.1))
    options = [*OPTIONS, "--clip-grad", 0.1, "--output-dir"]
    train(1, *options, tmp_path / "whole")
    train(1, *options, tmp_path / "parts", "--max-steps", 3)
    train(1, *options, tmp_path / "parts")
    assert weights_and_momentum(tmp_path / "whole") == weights_and_momentum(tmp_path / "parts")


def test_a_group_that_is_added_later_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = "                    training.optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})\n"
    monkeypatch.setattr(main, "main", changed_main({STEP: STEP + later}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: the optimizer had 1 groups of weights, has 2: add all groups in build_optimizer")


HEAD = "model.layers[-1] = torch.nn.Linear(32, 10)\n"
BEFORE, LATER = "        ema = None if config.ema", "            ddp_model.train()"


@pytest.mark.parametrize(
    "edit",
    [
        {BEFORE: f"        {HEAD}{BEFORE}"},
        {LATER: f"            if run.state.epoch == 1:\n                {HEAD}{LATER}"},
    ],
)
def test_a_layer_that_is_replaced_after_wrap_model_is_named(
    edit: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the optimizer is made, or in the middle of a run."""
    monkeypatch.setattr(main, "main", changed_main(edit))
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert re.match(r"error: layers\.\d+\.weight was replaced after wrap_model, so no rank averages it: do", error), (
        error
    )


@fault(53)
def test_a_group_that_no_run_could_load_is_refused_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here after the last step of an epoch. The schedule does not see those of an optimizer that it does not have."""
    end = "            run.end_epoch(evaluate("
    more = "            training.optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})\n"
    monkeypatch.setattr(main, "main", changed_main({end: more + end}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    told = "no run could resume from this checkpoint: the groups of the optimizer had [12] weights, have [12, 1]"
    assert error.startswith(f"error: {told}: add all groups"), error
    assert not list(tmp_path.glob("checkpoints/*.pt"))


@pytest.mark.parametrize("value", [[0.5, 0.5], None, torch.ones(2), {"a": 1.0}])
def test_a_metric_that_is_no_number_is_one_line(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = model.compute_metrics
    monkeypatch.setattr(model, "compute_metrics", lambda totals: compute(totals) | {"per_class": value})
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: compute_metrics in model.py returned per_class="), error


def test_a_metric_may_be_a_tensor_or_a_number_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = model.compute_metrics
    more = {"tensor": torch.tensor(0.5), "half": np.float32(0.25)}
    monkeypatch.setattr(model, "compute_metrics", lambda totals: compute(totals) | more)
    train(1, *OPTIONS, "--max-steps", 1, "--log-every", 1, "--output-dir", tmp_path)
    assert [(line["tensor"], line["half"]) for line in lines(tmp_path, "val")] == [(0.5, 0.25)]


# ---- hooks, metrics and rates that would have no effect, or another one ---------------------------------------------


class Hooked(BatchDataset):
    classes = tuple("0123456789")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 32, 32), float(index)), index % 10

    def prepare(self, batch: Any) -> Any:
        return batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]


class Held(Dataset):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_hooks_of_data_that_another_data_set_holds_are_not_ignored() -> None:
    own = Hooked()
    folds = random_split(own, [20, 20])
    for holder in (
        ConcatDataset(folds),
        Held(base=own),
        Held(parts=[own]),
        Held(dataset=Held(base=Held(dataset=own))),
        Held(named={"n": 3, "a": own}),
        Held(parts=[("first", own), ("second", own)]),
    ):
        with pytest.raises(UsageError, match="holds a BatchDataset, whose hooks would be ignored: name what it wraps"):
            hooks_of(holder)
    assert hooks_of(folds[0]) is own and hooks_of(Held(dataset=Held(dataset=own), other=own)) is own
    assert type(hooks_of(Held(raw=type("Raw", (BatchDataset,), {})()))) is BatchDataset, "there is no hook to ignore"
    many = [Held() for _ in range(60)]
    for each in many:
        each.others = many
    assert type(hooks_of(many[0])) is BatchDataset
    own.augment = None  # type: ignore[assignment,method-assign]
    assert hooks_of(own) is own, "an evaluation does not call it"
    with pytest.raises(UsageError, match=r"Hooked.augment is a hook of BatchDataset: give it another name"):
        own.augment = True  # type: ignore[assignment,method-assign]
        hooks_of(own)
    circle = Held()
    circle.other = circle
    assert type(hooks_of(circle)) is BatchDataset


def test_mix_may_be_an_attribute() -> None:
    def targets(ctx: DistContext) -> list[int]:
        own = Hooked()
        own.prepare = lambda batch: batch  # type: ignore[method-assign]
        own.mix = lambda inputs, targets: (inputs, torch.full_like(targets, 7))  # type: ignore[method-assign]
        config = Config.parse(["--device=cpu", "--workers=0", "--batch-size=4"])
        ((_, found),) = next(TrainLoader(own, config, ctx).steps(0))
        return list(found.tolist())

    assert on_ranks(1, targets, "--device=cpu") == [[7] * 4]


def test_random_numbers_in_prepare_are_those_of_the_batch_in_an_evaluation() -> None:
    def sums(ctx: DistContext) -> list[float]:
        torch.rand(ctx.world_size)
        config = Config.parse(["--device=cpu", "--workers=0", "--batch-size=4"])
        return [inputs.sum().item() for inputs, _ in EvalLoader(Hooked(), config, ctx)]

    (alone,), both = on_ranks(1, sums, "--device=cpu"), on_ranks(2, sums, "--device=cpu")
    assert [both[number % 2][number // 2] for number in range(10)] == alone


@pytest.mark.parametrize("numbers", [3, 300])
def test_totals_of_other_shapes_are_refused_whenever_they_are_added_up(numbers: int) -> None:
    """Many numbers are added up at once, few after some batches: a single one was added to all others."""

    def refusals(ctx: DistContext) -> list[str]:
        found = []
        for other, taken in itertools.product(([numbers + 1], [1], [numbers, 1]), (False, True)):
            meter = Meter(ctx)
            with pytest.raises(UsageError) as error:
                meter.add({"values": torch.ones(numbers)})
                meter.take() if taken else None
                meter.add({"values": torch.ones(other)})
                meter.take()
            found.append(str(error.value))
        return found

    (found,) = on_ranks(1, refusals)
    assert {*found} == {"batch_totals in model.py: values has another shape in another batch: return a sum"}


ANOTHER = "has another shape than before the first log line, or than on rank 0: return the same shape from the start"


@pytest.mark.parametrize(
    ("of_0", "of_1", "total"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), None),
        (torch.ones(3), 5, None),
        (torch.ones(3), 0, [1, 1, 1]),
        (torch.ones(3), torch.zeros(()), [1, 1, 1]),
        (1, torch.ones(1), 2),
        (torch.ones(1), 1, [2]),
    ],
)
def test_totals_whose_shapes_differ_between_ranks_are_refused_unless_they_are_one_number(
    of_0: Any, of_1: Any, total: Any
) -> None:
    def added(ctx: DistContext) -> Any:
        meter = Meter(ctx)
        meter.add({"values": of_1 if ctx.rank else of_0})
        if total is not None or ctx.rank == 0:
            return meter.take()["values"].tolist()
        with pytest.raises(UsageError) as error:
            meter.take()
        ctx.sum(torch.zeros(1 + of_0.numel(), dtype=torch.double))  # for which rank 0 waits
        ctx.gather(None)
        return str(error.value)

    found = on_ranks(2, added)
    assert found[1] == total if total is not None else found[1] == f"batch_totals in model.py: values {ANOTHER}"


@pytest.mark.parametrize("first", [[torch.ones(3), 5], [5, torch.ones(3)], [torch.ones(300), 5], [5, torch.ones(300)]])
def test_a_number_is_not_added_to_each_entry_of_a_tensor(first: list[Any]) -> None:
    def added(ctx: DistContext) -> str:
        meter = Meter(ctx)
        with pytest.raises(UsageError) as error:
            for value in first:
                meter.add({"values": value})
            meter.take()
        none = Meter(ctx)
        for value in first:
            none.add({"values": value if isinstance(value, Tensor) else 0})
        assert none.take()["values"].sum() in (3, 300)
        return str(error.value)

    assert on_ranks(1, added) == ["batch_totals in model.py: values has another shape in another batch: return a sum"]


def test_what_a_meter_has_added_stays_as_it_was() -> None:
    """A weight and a buffer change in place before batches are added up; compute_metrics may change its totals."""

    def taken(ctx: DistContext) -> tuple[Any, Any]:
        def in_place(totals: Any) -> Any:
            totals["weight"] /= 2
            return dict(totals)

        meter, weight, buffer = Meter(ctx, in_place), nn.Parameter(torch.ones(())), torch.zeros(())
        for _ in range(4):
            buffer += 1
            meter.add({"weight": weight, "buffer": buffer, "half": weight / 2})
            with torch.no_grad():
                weight += 1
        found = [meter.take(), meter.take_epoch(complete=True)]
        return [{name: value.item() for name, value in each.items()} for each in found]

    assert on_ranks(1, taken, "--device=cpu") == [[{"weight": 5, "buffer": 10, "half": 5}] * 2]


def test_weights_that_each_rank_has_in_another_order_are_refused() -> None:
    """As those in the order of a set, which differs between processes: DDP would average different weights."""

    def wrapped(ctx: DistContext) -> str:
        names = ["color", "shape"][:: 1 - 2 * ctx.rank]
        try:
            wrap_model(
                nn.ModuleDict({name: nn.Linear(2, 2) for name in names}), Config.parse(["--device=cpu"]), ctx, model
            )
        except UsageError as error:
            return str(error)
        return "accepted"

    line = "the ranks have the weights or buffers of the model in another order: sort names from a set"
    assert on_ranks(2, wrapped, "--device=cpu") == [line, line]


class Scaled(nn.Linear):
    """Doubles weights of its first version when it loads them."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_init_from_knows_the_versions_of_modules(prefix: str, tmp_path: Path) -> None:
    model_of = lambda: nn.ModuleDict({"a": Scaled(2, 2)})  # noqa: E731
    outer = saved = model_of()
    for name in prefix.split(".")[:-1][::-1]:
        outer = nn.ModuleDict({name: outer})
    torch.save(outer.state_dict(), tmp_path / "weights.pt")
    config, loaded = Config.parse(["--init-from", str(tmp_path / "weights.pt")]), model_of()
    load_weights(loaded, read_weights(config, "model", loaded.state_dict()), "a file")
    assert torch.equal(loaded["a"].weight, saved["a"].weight)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_a_model_may_have_such_a_prefix_itself(prefix: str, tmp_path: Path) -> None:
    def model_of(prefix: str) -> nn.ModuleDict:
        built = nn.ModuleDict({"a": Scaled(2, 2)})
        for name in prefix.split(".")[:-1][::-1]:
            built = nn.ModuleDict({name: built})
        return built

    for other in ("", "module.", prefix):
        saved, loaded = model_of(other), model_of(prefix)
        torch.save(saved.state_dict(), tmp_path / "weights.pt")
        config = Config.parse(["--init-from", str(tmp_path / "weights.pt")])
        names = load_weights(loaded, read_weights(config, "model", loaded.state_dict()), "a file")
        assert names == [f"{prefix}a.weight", f"{prefix}a.bias"]
        assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))


def test_a_schedule_may_use_one_of_torch_and_add_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Schedule):
        def __init__(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
            super().__init__(optimizer, *rest)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            self.inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def set(self, epochs_done: float) -> None:
            self.optimizer.param_groups[0]["lr"] = 0.1 * self.inner.gamma**epochs_done

    monkeypatch.setattr(main, "Schedule", Own)
    train(1, *OPTIONS, "--max-steps", 2, "--output-dir", tmp_path)


def test_a_scheduler_of_torch_that_is_no_field_of_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(network.parameters(), lr=config.lr)
        optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # type: ignore[attr-defined]
        return optimizer

    monkeypatch.setattr(model, "build_optimizer", build_optimizer)
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith(
        "error: a scheduler of torch would have no effect, because run.steps() sets the rate: subcl"
    )


class Wrapper(torch.optim.Optimizer):
    """An optimizer around SGD, as SAM or Lookahead. `how`: what the two have, after a resume too."""

    def __init__(self, how: str) -> None:
        self.inner, self.how = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), how
        groups = self.inner.param_groups
        super().__init__([dict(each) for each in groups] if "own groups" in how else groups, self.inner.defaults)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for own, inner in zip(self.param_groups, self.inner.param_groups if "copied" in self.how else (), strict=False):
            inner["lr"] = own["lr"]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if "inner" in self.how else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state) if "inner" in self.how else super().load_state_dict(state)
        if self.how == "inner, then shared":
            self.param_groups = self.inner.param_groups
        elif self.how == "outer, then shared":
            self.inner.param_groups = self.param_groups


REACHED = ["inner, then shared", "outer, then shared", "inner, copied", "outer, copied", "own groups, copied"]


@fault(55)
@pytest.mark.parametrize("how", [*REACHED, "inner", "outer", "own groups"])
def test_an_optimizer_that_is_wrapped_keeps_the_rates_of_the_schedule(how: str) -> None:
    optimizer = Wrapper(how)
    schedule = Schedule(optimizer, Config.parse(["--warmup-epochs", "0"]), 64)
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.resume()
    for epochs_done, expected in ((0.0, 0.1), (5.0, 0.05)):  # half of it in the middle of the run
        schedule.start_step(epochs_done)
        if how not in REACHED and epochs_done:
            line = r"^the schedule does not reach the SGD in Wrapper: let both have the same param_groups, "
            with pytest.raises(UsageError, match=line):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(expected)


def test_an_optimizer_within_another_one_may_have_rates_of_its_own() -> None:
    """Another rate at first, other weights, a factor that changes, and a class without torch's __init__."""
    weight, slow = (nn.Parameter(torch.ones(1)) for _ in range(2))
    outer = torch.optim.SGD([weight], lr=0.1)
    outer.direction, outer.slow = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([slow], lr=0.7)
    outer.corrected = torch.optim.SGD([weight], lr=0.1)
    outer.incomplete = torch.optim.Optimizer.__new__(torch.optim.SGD)
    outer.incomplete.param_groups = outer.param_groups
    schedule = Schedule(outer, Config.parse(["--warmup-epochs", "0"]), 64)
    forgotten = torch.optim.SGD([slow], lr=0.1)
    forgotten.register_step_pre_hook(partial(schedule._check_reaches, schedule._same_rates(forgotten)))
    for epochs_done, correction in ((0.0, 0.9), (5.0, 0.99)):
        schedule.start_step(epochs_done)
        outer.corrected.param_groups[0]["lr"] = outer.param_groups[0]["lr"] * correction
        for each in (outer.direction, outer.slow, outer.corrected, outer):
            each.step()


def test_the_logged_rate_is_that_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Schedule):
        def set(self, epochs_done: float) -> None:
            self.optimizer.param_groups[0]["lr"] = 0.25

    monkeypatch.setattr(main, "Schedule", Own)
    train(1, *OPTIONS, "--max-steps", 1, "--log-every", 1, "--output-dir", tmp_path / "own")
    monkeypatch.setattr(main, "Schedule", Schedule)
    monkeypatch.setattr(
        model, "build_optimizer", lambda network, config: torch.optim.SGD(network.parameters(), lr=1e-3)
    )
    constant = ["--lr-schedule", "constant", "--max-steps", 1, "--log-every", 1]
    train(1, *OPTIONS, *constant, "--output-dir", tmp_path / "fixed")
    assert [lines(tmp_path / name, "train")[0]["lr"] for name in ("own", "fixed")] == [0.25, pytest.approx(1e-3)]


@pytest.mark.parametrize(("option", "dynamic"), [([], None), (["--deterministic"], False)])
def test_compiled_kernels_do_not_depend_on_earlier_sizes_with_deterministic(
    option: list[str], dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiles for all sizes once it has seen two: in a resumed run perhaps at another time."""

    def wrapped(ctx: DistContext) -> list[Any]:
        seen: list[Any] = []
        monkeypatch.setattr(nn.Module, "compile", lambda module, **given: seen.append(given["dynamic"]))
        wrap_model(nn.Linear(2, 2), Config.parse(["--device=cpu", "--compile", *option]), ctx, model)
        return seen

    assert on_ranks(1, wrapped, "--device=cpu") == [[dynamic]]


def test_a_step_that_is_not_counted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples would be used again, and an epoch end too early."""
    skip = "                if run.state.step == 2:\n                    continue\n"
    advance = "                run.advance()  # counts"
    monkeypatch.setattr(main, "main", changed_main({advance: skip + advance}))
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error == "error: call run.advance() once for each step, also for one that changes nothing"


def test_an_optimizer_without_a_rate_and_totals_without_a_sum_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, weights: Any) -> None:
            super().__init__(weights, lr=0.1)
            self.param_groups[0]["lr"] = None

    with monkeypatch.context() as patch:
        patch.setattr(model, "build_optimizer", lambda network, config: Own(network.parameters()))
        error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path / "a", code=2))
        assert error == "error: Own has no learning rate: pass lr=config.lr in build_optimizer"

        class Lookahead(torch.optim.Optimizer):
            def __init__(self, optimizer: Any) -> None:
                self.param_groups, self.state = optimizer.param_groups, optimizer.state

        patch.setattr(model, "build_optimizer", lambda *given: Lookahead(torch.optim.SGD(given[0].parameters())))
        error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path / "c", code=2))
        remedy = "call super().__init__(params, defaults) in its __init__"
        assert error == f"error: Lookahead is no complete torch.optim.Optimizer: {remedy}"
    totals = model.batch_totals
    right = lambda outputs, targets: outputs.argmax(1) == targets  # noqa: E731
    monkeypatch.setattr(model, "batch_totals", lambda *given: totals(*given) | {"right": right(*given[1:])})
    error = the_error(train(1, *OPTIONS, "--eval-batch-size", 7, "--output-dir", tmp_path / "b", code=2))
    assert error.startswith("error: batch_totals in model.py: right has another shape in another batch: return a sum")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda targets: targets.numpy(), "values has another shape in another batch: return a sum"),
        (lambda targets: (targets, 1), "values is a tuple with 2 parts: return numbers, tensors or lists"),
    ],
)
def test_arrays_and_tuples_in_totals_are_refused(
    value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of numpy were added up sample by sample, and a last batch of one sample to all of them."""
    totals = model.batch_totals
    monkeypatch.setattr(model, "batch_totals", lambda *given: totals(*given) | {"values": value(given[2])})
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 160, "val": 17, "test": 1})
    error = the_error(train(1, *OPTIONS, "--eval-batch-size", 16, "--output-dir", tmp_path, code=2))
    assert error == f"error: batch_totals in model.py: {message}"


def test_a_total_that_changes_before_it_is_added_up_is_refused() -> None:
    def add(ctx: DistContext) -> str:
        meter, weight = Meter(ctx), nn.Parameter(torch.zeros(()))
        for _ in range(3):
            meter.add({"weight": weight.detach()})
            with torch.no_grad():
                weight += 1
        assert meter.take() == {"weight": 3}
        late = nn.Parameter(torch.zeros(()))
        meter.add({"weight": late.detach()})
        with torch.no_grad():
            late += 1
        with pytest.raises(UsageError) as caught:
            meter.take()
        return str(caught.value)

    assert on_ranks(1, add, "--device=cpu") == [
        "batch_totals in model.py: weight was changed afterwards: return a clone()"
    ]


def test_metrics_that_depend_on_the_rank_are_those_of_rank_0_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Of a bootstrap, or of what batch_totals keeps elsewhere: ranks with other numbers would decide differently."""

    def take(ctx: DistContext) -> Any:
        meter = Meter(ctx, lambda totals: {"metric": totals["count"].item() + ctx.rank, "loss": 1 + 1e-6 * ctx.rank})
        found = []
        for _ in range(2):
            meter.add({"count": 1})
            found.append(meter.take())
        meter.compute_metrics = lambda totals: None
        meter.add({"count": 1})
        return found, meter.take(), [record.getMessage() for record in caplog.records]

    (found, nothing, said), (others, _, silent) = on_ranks(2, take, "--device=cpu")
    assert found == others == [{"metric": 2, "loss": 1}] * 2 and nothing is None and not silent
    assert [line.partition(": use")[0] for line in said] == [
        "warning: compute_metrics in model.py returns another metric on another rank"
    ]


def test_metrics_of_one_rank_are_refused_if_they_choose_the_best_and_rounding_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best.pt followed the samples of rank 0; a resumed run ended where the ranks had different best steps."""
    evaluate, score = main.evaluate, 0.0

    def with_score(model: Any, loader: Any, config: Any, ctx: DistContext) -> dict[str, float]:
        return {**evaluate(model, loader, config, ctx), "score": 1 + ctx.rank * score, "none": math.nan, "n": 3}

    monkeypatch.setattr(main, "evaluate", with_score)
    seen, update_best = tmp_path / "seen", TrainState.update_best
    seen.mkdir()

    def note(state: TrainState, value: float, metrics: Any) -> bool:
        (seen / str(os.getpid())).write_text(str(metrics["score"]))
        return update_best(state, value, metrics)

    monkeypatch.setattr(TrainState, "update_best", note)
    score = 1e-6
    assert "warning" not in train(2, *OPTIONS, "--output-dir", tmp_path / "rounded")
    assert [file.read_text() for file in seen.iterdir()] == ["1.0"] * 2, "both ranks decide by that of rank 0"
    (line, *_) = lines(tmp_path / "rounded", "val")
    assert line["score"] == 1 and type(line["n"]) is int
    score = 0.5
    output = train(2, *OPTIONS, "--output-dir", tmp_path / "other")
    start = "evaluate() in main.py returned score=1.0 on rank 0 and 1.5 on rank 1"
    assert output.count(f"warning: {start}, and that of rank 0 is logged; add it up") == 1, output
    monkeypatch.setattr(model, "metric_for_best_model", lambda metrics: -metrics["score"])
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path / "best", code=2))
    assert error.startswith(f"error: {start}: add it up over the ranks with a Meter, or return ctx.on_main(lambda: it)")


def test_metrics_of_rank_0_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = main.evaluate

    def on_rank_0(model: Any, loader: Any, config: Any, ctx: DistContext) -> dict[str, float]:
        metrics = evaluate(model, loader, config, ctx) | {"accuracy": 0.5}
        return metrics if ctx.rank == 0 else {}

    monkeypatch.setattr(main, "evaluate", on_rank_0)
    error = the_error(train(2, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: evaluate() in main.py returned loss=") and "on rank 1: " in error


def test_a_loss_next_to_its_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is trained, which would be twice the loss."""
    compute = model.compute_loss
    both = lambda *given: {"loss": compute(*given), "part": compute(*given)}  # noqa: E731
    monkeypatch.setattr(model, "compute_loss", both)
    error = the_error(train(1, *OPTIONS, "--output-dir", tmp_path, code=2))
    assert error.startswith("error: compute_loss returned `loss` and others, whose sum is trained: ")


class Overrides(Hooked):
    def __getitems__(self, indices: list[int]) -> Any:
        return [super(Overrides, self).__getitem__(index) for index in indices]


class OverridesOne(Overrides):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class WithBoth(Overrides):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_methods_that_would_not_be_called_are_refused() -> None:
    collate = staticmethod(lambda samples: samples)
    with pytest.raises(UsageError, match="has collate_fn: subclass "):
        hooks_of(type("Own", (Held,), {"collate_fn": collate})())
    with pytest.raises(UsageError, match="OverridesOne: __getitem__ of OverridesOne would be ignored: "):
        SeededReader(OverridesOne(), list, 0, 0)
    for kind in (Hooked, Overrides, WithBoth):
        SeededReader(kind(), list, 0, 0)
    SeededReader(type("Part", (BatchDataset, Subset), {"__getitem__": lambda self, i: i})(Overrides(), [0]), list, 0, 0)
    changed = Subset(Hooked(), [0])
    changed.__class__ = type("Changed", (Subset,), {"__getitem__": lambda self, index: None})  # as torch 2.9 has it
    SeededReader(changed, list, 0, 0)  # it is read one by one
    changed.dataset = Overrides()
    with pytest.raises(UsageError, match="Overrides: __getitem__ of Changed would be ignored: "):
        SeededReader(changed, list, 0, 0)


def test_set_epoch_reaches_data_that_another_data_set_holds() -> None:
    class Inner(Dataset):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Inner()
    with_slots = dataclass(slots=True)(type("Slots", (), {"__annotations__": {"base": Any}}))(inner)
    for holder in (
        Held(base=inner),
        Held(dataset=Held(parts=[inner])),
        Held(datasets=[Held(base=inner)]),
        Held(parts=[(inner, 0.5)]),
        Held(parts={"first": [inner]}),
        Held(parts=[None, make_dataclass("Source", ["data"])(inner)]),
        Held(parts=(1.0, with_slots)),
        Held(parts=[(inner,)] * 2000),
    ):
        set_epoch(holder, 3)
        assert inner.epoch == 3
        inner.epoch = -1
    set_epoch(Held(module=SimpleNamespace(train=inner)), 3)
    assert inner.epoch == -1, "what an object holds may be another set"


class Unset:
    __slots__ = "inner"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a closed connection")


def test_attributes_that_cannot_be_read_do_not_end_a_search() -> None:
    unset = Unset()
    assert attributes(unset) == {} and attributes(make_dataclass("Kept", ["inner"], bases=(Unset,))(3)) == {"inner": 3}
    unset.inner = 3
    assert attributes(unset) == {"inner": 3}
    assert hooks_of(Held(parts=[Unset()])).chunk_size == 1


# ---- what torch reports with a traceback ----------------------------------------------------------------------------


def test_totals_may_be_numbers_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals, calls = model.batch_totals, itertools.count()

    def mixed(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        three = torch.tensor(3) if next(calls) % 2 else 3
        return totals(loss, outputs, targets) | {"threes": three, "batches": 1}

    compute = model.compute_metrics

    def metrics(found: Any) -> dict[str, float]:
        assert found["threes"] == 3 * found["batches"]
        return compute(found)

    monkeypatch.setattr(model, "batch_totals", mixed)
    monkeypatch.setattr(model, "compute_metrics", metrics)
    train(2, *OPTIONS, "--log-every", 5, "--output-dir", tmp_path)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * 32 * 32, 10), nn.Linear(10, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(F.relu(self.first(images.flatten(1))))


class UnusedLater(Layers):
    passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        return self.first(images.flatten(1)) if self.passes > 2 else super().forward(images)


class Reentrant(Layers):
    def forward(self, images: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(images.flatten(1)), use_reentrant=True)


class ReentrantFirst(Layers):
    """The inputs of its checkpoint need no gradient, so torch computes none of its weights."""

    def forward(self, images: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, images.flatten(1), use_reentrant=True))


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(10)


class LazyStatistics(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d(affine=False)


class Synchronized(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(10)


class OldWeightNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.second)


class Sparse(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.table(images.argmax(1).flatten(1)[:, 0])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "options", "starts", "has"),
    [
        (UnusedLater, [], "the loss does not depend on second.weight, second.bias: ", "FIND_UNUSED_PARAMETERS"),
        (ReentrantFirst, [], "the loss does not depend on first.weight, first.bias: ", "use_reentrant=False"),
        (Reentrant, ["--deterministic"], "one backward pass gave a weight its gradient twice", "use_reentrant=False"),
        (Reentrant, ["--deterministic", "--guard", 2], "one backward pass gave a weight ", "use_reentrant=False"),
        (Lazy, [], "first.weight has no shape before the first batch: ", "build_model"),
        (LazyStatistics, [], "norm.running_mean has no shape before the first batch: ", "build_model"),
        (Synchronized, [], "the model has SyncBatchNorm, which needs a GPU: ", "--sync-bn"),
        (Lazy, ["--shard"], "first.weight has no shape before the first batch: ", "build_model"),
        (OldWeightNorm, ["--ema", 0.9], "the model holds a computed tensor", "parametrizations.weight_norm"),
        (Sparse, ["--shard"], "--shard: the gradient of table is sparse", "remove sparse=True"),
    ],
)
def test_what_torch_cannot_do_is_one_line(
    kind: type[nn.Module],
    options: list[Any],
    starts: str,
    has: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "build_model", lambda config, train_set: kind())
    error = the_error(train(2, *OPTIONS, *options, "--output-dir", tmp_path, code=2))
    assert error.startswith(f"error: {starts}") and has in error


def test_a_gradient_penalty_of_a_sharded_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = "                loss = task.compute_loss(outputs, targets, config)\n            backward("
    penalty = "torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0].square().mean()"
    forward = "                outputs = task.forward(ddp_model, inputs, targets)\n"
    edits = {
        loss: loss.replace("config)", f"config) + {penalty}"),
        forward: f"{' ' * 16}inputs.requires_grad_()\n{forward}",
    }
    monkeypatch.setattr(main, "main", changed_main(edits))
    train(2, *OPTIONS, "--output-dir", tmp_path / "whole")
    error = the_error(train(2, *OPTIONS, "--shard", "--output-dir", tmp_path / "sharded", code=2))
    assert error.startswith("error: --shard: torch cannot compute this") and "no gradient of a gradient" in error


# ---- frozen BatchNorm -----------------------------------------------------------------------------------------------


class HalfFrozen(Layers):
    """`norm` has frozen weights; its statistics follow each batch."""

    kind: type[nn.BatchNorm1d] = nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.kind(10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.norm(self.first(images.flatten(1))))


class Kept(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Kept:
        return super().train(False)


class WellFrozen(HalfFrozen):
    kind = Kept


class WithoutWeights(HalfFrozen):
    kind = partial(nn.BatchNorm1d, affine=False)  # type: ignore[assignment]


class KeyEncoder(Layers):
    """`key` follows `query`, and trains statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.BatchNorm1d(10), nn.BatchNorm1d(10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        pairs = zip(self.key.parameters(), self.query.parameters(), strict=True)
        for own, other in pairs if self.training else ():
            own.data.lerp_(other.data, 0.01)
        hidden = self.first(images.flatten(1))
        return self.second(self.query(hidden) - 0.1 * self.key(hidden))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "options", "warned"),
    [
        (HalfFrozen, [], True),
        (HalfFrozen, ["--shard"], True),
        (WellFrozen, [], False),
        (WithoutWeights, [], False),
        (KeyEncoder, [], False),
    ],
)
def test_statistics_of_a_frozen_layer_are_worth_one_warning(
    kind: type[nn.Module], options: list[Any], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "build_model", lambda config, train_set: kind())
    output = train(2, *OPTIONS, *options, "--output-dir", tmp_path)
    line = "warning: norm is frozen, but its statistics follow each batch: keep it in evaluation mode"
    assert output.count("warning: ") == output.count(line) == warned, output
