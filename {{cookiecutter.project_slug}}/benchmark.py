"""One process against DataParallel against DDP: how many samples a second, and what limits.

    python benchmark.py                                  ToyModel on 1, 2, 4 ... of this machine's GPUs
    python benchmark.py --nproc 4 --device cpu           on 1, 2 and 4 processes
    python benchmark.py --model resnet50 --image-size 224 --dataset synthetic --precision bf16
    python benchmark.py --model deeplabv3_resnet101 --image-size 224 --batch-size 4
    torchrun ... benchmark.py                            DDP on all processes of a launcher, on many machines too

It takes the options of main.py (--grad-accum-steps and --clip-grad change nothing here), and trains the model and the
data of model.py and data.py, for a moment only. In each of --repeats rounds every number of processes takes its turn;
shown are medians over the rounds, and the spread.

Weak scaling: each process has a batch of --batch-size, so more processes train more samples in a step.
Strong scaling: the processes share one batch of --batch-size.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from config import Config, Parser, number, parse, positive
from data import load_datasets
from ddp.errors import UsageError
from ddp.group import Group, check_backend, cores, join
from ddp.launch import Placement, conduct, find_placement, run
from ddp.loader import TrainLoader
from ddp.speeds import DATA, ONE, PARALLEL, SILENT, STRONG, WEAK, Row, doubts, limits, plot, summary, table, write_csv
from ddp.state import map_tensors
from ddp.step import accumulate, autocast, check_step, make_deterministic, name_of, seed_everything, wrap
from model import build_model, build_optimizer, compute_loss

MOST_ON_CPU = 8  # processes, unless --nproc says more
WARM_UP = 5  # steps, unless one takes longer than --seconds; the choice of algorithms is behind them
SEGMENTATION = ("deeplabv3", "fcn_", "lraspp")


# ---- what is measured, on every rank --------------------------------------------------------------------------------


class Task:
    """A model, its loss and its data: those of model.py and data.py, or a segmentation model of torchvision."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.segmentation = config.model.startswith(SEGMENTATION)
        self.train_set = None if self.segmentation else load_datasets(config)[0]
        seed_everything(config.seed)
        self.model = self._build()  # on the CPU; the same on every rank
        self.image: torch.Size | None = None  # height and width of the inputs, if they are images

    def title(self) -> str:
        """What was measured, once it was."""
        image = f", {self.image[0]} x {self.image[1]}" if self.image else ""
        return f"{name_of(self.model, self.config)}{image}, {self.config.precision}, batch {self.config.batch_size}"

    def _build(self) -> nn.Module:
        if not self.segmentation:
            return build_model(self.config, self.train_set)
        import torchvision

        try:
            model = torchvision.models.get_model(self.config.model, weights=None, weights_backbone=None)
        except ValueError as error:
            raise UsageError(f"--model {self.config.model}: torchvision has no such model") from error
        return model.to(memory_format=torch.channels_last) if self.config.channels_last else model

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean loss of a batch; of segmentation, over pixels."""
        if self.segmentation:
            return F.cross_entropy(outputs["out"], targets)
        return compute_loss(outputs, targets, self.config)

    def batches(self, group: Group) -> Iterator[Any]:
        """Batches (inputs, targets) on the device, without end: of the real data, or random ones for segmentation."""
        b, size = self.config.batch_size, self.config.image_size
        if self.segmentation:
            images = torch.randn(b, 3, size, size, device=group.device)
            layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
            inputs = images.to(memory_format=layout)
            yield from itertools.repeat((inputs, torch.randint(21, (b, size, size), device=group.device)))
        loader = TrainLoader(self.train_set, self.config, group)  # type: ignore[arg-type]
        for epoch in itertools.count():
            for step in loader.steps(epoch):
                yield from step


class Trainer:
    """One optimizer step of main.py, on `trained`: a model, or its wrapper."""

    def __init__(self, task: Task, group: Group, wrapper: Callable[[nn.Module], Any]) -> None:
        self.task, self.config, self.group = task, task.config, group
        model = copy.deepcopy(task.model).to(group.device).train()
        self.trained = wrapper(model)
        self.optimizer = build_optimizer(model, replace(self.config, lr=1e-6))  # what is trained does not matter
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=self.config.precision == "fp16")

    def step(self, batch: Any, all_reduce: bool = True) -> None:
        inputs, targets = batch
        with accumulate(self.trained, last=all_reduce):
            with autocast(self.config, self.group):
                loss = self.task.loss(self.trained(inputs), targets)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def speed(self, batches: Iterator[Any], seconds: float, all_reduce: bool = True) -> float:
        """Samples a second of all processes, in steps that take about `seconds` together. Call on every rank."""
        slow = self.group.on_main(lambda took: took > seconds, self._time(1, batches, all_reduce))
        warm_up, least = (0, 1) if slow else (WARM_UP, 3)
        self._time(warm_up, batches, all_reduce)
        took = self._time(least, batches, all_reduce) / least
        steps = self.group.on_main(lambda: max(least, int(seconds / took)))
        return steps * self.config.batch_size * self.group.world_size / self._time(steps, batches, all_reduce)

    def _time(self, steps: int, batches: Iterator[Any], all_reduce: bool) -> float:
        """Seconds from when all ranks begin until all have done `steps`."""
        self._wait_for_all()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(next(batches), all_reduce)
        self._wait_for_all()
        return time.perf_counter() - start

    def _wait_for_all(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        dist.all_reduce(torch.zeros(1))


def measure(
    finish: Callable[[str, list[Row]], None], rounds: int, seconds: float, config: Config, placement: Placement
) -> None:
    """Measure whatever this number of processes can show; `finish` gets a title and it, once. Call on every rank."""
    check_backend(config)
    if config.deterministic:
        make_deterministic()
    task = Task(config)
    check_step(config, task.model)
    with join(config, placement) as group:
        rows = [row for _ in range(rounds) for row in _round(task, group, seconds)]
        group.on_main(finish, task.title(), rows)


def _round(task: Task, group: Group, seconds: float) -> Iterator[Row]:
    config, world_size = task.config, group.world_size
    batches = task.batches(group)
    resident = next(batches)
    inputs = resident[0]
    task.image = inputs.shape[2:] if isinstance(inputs, Tensor) and inputs.dim() == 4 else None
    gpus = torch.cuda.device_count() if group.device.type == "cuda" else 0

    def row(kind: str, speed: float, processes: int = world_size, batch: int = config.batch_size) -> Row:
        return Row(kind, processes, batch, speed)

    if world_size == 1:
        alone = Trainer(task, group, partial(_compiled, config))
        yield row(ONE, alone.speed(itertools.repeat(resident), seconds))
        del alone
    if world_size == 1 and gpus > 1:
        parallel = Trainer(task, group, nn.DataParallel)
        everything = map_tensors(resident, lambda part: torch.cat([part] * gpus))  # DataParallel cuts it up again
        yield row(PARALLEL, gpus * parallel.speed(itertools.repeat(everything), seconds), gpus)
        del parallel
    trainer = Trainer(task, group, lambda model: wrap(model, config, group))
    yield row(WEAK, trainer.speed(itertools.repeat(resident), seconds))
    yield row(SILENT, trainer.speed(itertools.repeat(resident), seconds, all_reduce=False))
    if not task.segmentation:
        yield row(DATA, trainer.speed(batches, seconds))
    share = config.batch_size // world_size
    if world_size > 1 and share > 1:  # of one sample, some models cannot take the BatchNorm
        part = map_tensors(resident, lambda part: part[:share])
        yield row(STRONG, trainer.speed(itertools.repeat(part), seconds) * share / config.batch_size, batch=share)


def _compiled(config: Config, model: nn.Module) -> nn.Module:
    if config.compile:
        model.compile()
    return model


# ---- the command ----------------------------------------------------------------------------------------------------


def show(config: Config, output: Path, title: str, rows: Sequence[Row]) -> None:
    """Print the tables; write benchmark.csv and, with matplotlib, benchmark.png."""
    lines = summary(rows)
    print(f"{title}\n\n{table(lines)}")
    print("spread: between the rounds. weak: each process has the whole batch; strong: they share one.")
    if not any(line.kind == PARALLEL for line in lines) and any(line.kind == ONE for line in lines):
        print("DataParallel needs two GPUs.")
    if config.device == "cpu" or not torch.cuda.is_available():
        print("Processes on CPUs share the cores of their machine: one process uses all of them by itself.")
    print(
        f"\nWhere the time of a step of DDP goes, with a batch of {config.batch_size} on each process:\n{limits(lines)}"
    )
    if doubts(lines):
        print(f"\n{doubts(lines)}")
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "benchmark.csv", lines)
    print(f"\n{output / 'benchmark.csv'}")
    try:
        plot(output / "benchmark.png", title, lines)
        print(output / "benchmark.png")
    except ImportError:
        print("for a plot as well: pip install matplotlib")


def keep(report: Path, title: str, rows: Sequence[Row]) -> None:
    """Write what one start has measured, for `sweep`."""
    report.write_text(json.dumps({"title": title, "rows": [vars(row) for row in rows]}))


def sweep(options: argparse.Namespace, config: Config) -> int:
    """Measure 1, 2, 4 ... processes on this machine, in turns. Returns the exit code."""
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    most = config.nproc or gpus or min(cores(), MOST_ON_CPU)
    counts = sorted({2**power for power in range(most.bit_length())} | {most})
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
        tqdm(total=options.repeats * len(counts), desc="measuring", unit="start", leave=False, disable=None) as bar,
    ):
        report = Path(folder) / "report.json"
        for _, processes in itertools.product(range(options.repeats), counts):
            code = run(partial(measure, partial(keep, report), 1, options.seconds), replace(config, nproc=processes))
            if code != 0:
                return code
            found = json.loads(report.read_text())
            rows += [Row(**row) for row in found["rows"]]
            bar.update()
    show(config, options.output, found["title"], rows)
    return 0


def command() -> int:
    """What the command line asks for. Returns the exit code."""
    parser = Parser(
        usage="python benchmark.py [--seconds X] [--repeats N] [--output DIR] [OPTIONS of main.py]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    above_0 = number(float, 0, above=True)
    parser.add_argument("--seconds", type=above_0, default=2.0, help="that a measurement takes (default: 2)")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--output", type=Path, default="runs/benchmark", help="folder of CSV and plot (default: runs/benchmark)"
    )
    options, others = parser.parse_known_args()
    config = replace(parse(others), grad_accum_steps=1)
    if find_placement(config, os.environ) == Placement():
        return sweep(options, config)
    return run(partial(measure, partial(show, config, options.output), options.repeats, options.seconds), config)


if __name__ == "__main__":
    conduct(command)
