"""One process, DataParallel and DDP compared: samples/s, and what limits them.

    python benchmark.py                                  ToyModel on 1, 2, 4 ... of this machine's GPUs
    python benchmark.py --nproc 4 --device cpu           on 1, 2 and 4 processes
    python benchmark.py --model resnet50 --image-size 224 --dataset synthetic --precision bf16
    python benchmark.py --model deeplabv3_resnet101 --image-size 224 --batch-size 4
    torchrun ... benchmark.py                            DDP on all processes of a launcher, on many machines too

It takes the options of main.py (--grad-accum-steps and --clip-grad have no effect here), and trains the model of
model.py on the data of data.py for a few seconds. In each of --repeats rounds, every number of processes is measured
once. The table shows medians over the rounds, and their spread.

Weak scaling: each process has a batch of --batch-size, so more processes train more samples in a step.
Strong scaling: the processes share one batch of --batch-size.
"""

import argparse
import copy
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P and -I leave it out
import model as model_file
from benchmark_report import DATA, NO_SYNC, NO_TERMS, ONE, PARALLEL, STRONG, WEAK, Row, show
from config import Config
from data import load_datasets
from ddp.core.errors import UsageError
from ddp.core.host import available_cores
from ddp.core.options import OptionParser, flag_of, number
from ddp.core.parts import of_parts
from ddp.data.loader import Step, TrainLoader
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import RankEnv, find_rank_env
from ddp.distributed.seeds import seed_everything
from ddp.distributed.tensors import map_tensors
from ddp.entrypoint.run_main import run, run_and_exit
from ddp.training.loss_mean import LossMean
from ddp.training.run import prepare
from ddp.training.run_log import memory_mb
from ddp.training.wrapping import accumulate, autocast, check_model, grad_scaler, model_name, wrap_model
from model import build_model, build_optimizer, compute_loss, forward

MAX_ON_CPU = 8  # processes, unless --nproc asks for more
WARM_UP_STEPS = 5  # unless one takes longer than --seconds; libraries choose their algorithms in them
SEGMENTATION = ("deeplabv3", "fcn_", "lraspp")


# ---- what is measured, on every rank --------------------------------------------------------------------------------


class Task:
    """A model, its loss and its data: those of model.py and data.py, or a segmentation model of torchvision."""

    def __init__(self, config: Config) -> None:
        self.config = config
        # A task that has no images lacks these options.
        self.architecture: str = getattr(config, "model", "")
        self.image_size: int = getattr(config, "image_size", 224)
        channels_last: bool = getattr(config, "channels_last", False)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.segmentation = self.architecture.startswith(SEGMENTATION)
        self.train_set = self.sampler = None
        if not self.segmentation:
            datasets = check_datasets(load_datasets(config), config)
            self.train_set, self.sampler = datasets.train, datasets.sampler
        seed_everything(config.seed)
        self.model = self._build()  # on the CPU; the same on every rank
        self.image: torch.Size | None = None  # height and width of the inputs, if they are images

    def title(self) -> str:
        """What was measured."""
        image = f", {self.image[0]} x {self.image[1]}" if self.image else ""
        return f"{model_name(self.model, self.config)}{image}, {self.config.precision}, batch {self.config.batch_size}"

    def _build(self) -> nn.Module:
        if not self.segmentation:
            return build_model(self.config, self.train_set)
        import torchvision

        try:
            model = torchvision.models.get_model(self.architecture, weights=None, weights_backbone=None)
        except ValueError as error:
            raise UsageError(f"--model {self.architecture}: torchvision has no such model") from error
        return model.to(memory_format=self.memory_format)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean loss of a batch; of segmentation, over pixels."""
        if self.segmentation:
            return nn.functional.cross_entropy(outputs["out"], targets)
        return compute_loss(outputs, targets, self.config)

    def forward(self, model: Any, inputs: Any, targets: Any) -> Any:
        """The outputs of `model`, or of its wrapper."""
        return model(inputs) if self.segmentation else forward(model, inputs, targets)

    def batches(self, ctx: DistContext) -> Iterator[Any]:
        """Batches (inputs, targets) on the device, without end: of the real data, or random ones for segmentation."""
        if self.segmentation:
            b, size = self.config.batch_size, self.image_size
            images = torch.randn(b, 3, size, size, device=ctx.device).to(memory_format=self.memory_format)
            yield from itertools.repeat((images, torch.randint(21, (b, size, size), device=ctx.device)))
        loader = TrainLoader(self.train_set, self.config, ctx, self.sampler)
        for epoch in itertools.count():
            for step in loader.steps(epoch):
                yield from step


class Trainer:
    """One optimizer step of main.py, on `trained`: a model, or its wrapper. terms: with loss_terms of model.py."""

    def __init__(self, task: Task, ctx: DistContext, config: Config, wrap: Any = None, terms: bool = True) -> None:
        self.task, self.config, self.ctx = task, config, ctx
        self.mean_of = model_file if terms and not task.segmentation else None
        model = copy.deepcopy(task.model).train()
        self.trained = wrap_model(model, config, ctx, model_file) if wrap is None else wrap(model.to(ctx.device))
        self.optimizer = build_optimizer(model, replace(self.config, lr=1e-6))  # small: the weights must stay finite
        self.scaler = grad_scaler(self.config, ctx)

    def step(self, batch: Any, all_reduce: bool = True) -> None:
        inputs, targets = batch
        mean = LossMean(self.mean_of, Step([batch]), self.config, self.ctx)
        with accumulate(self.trained, last=all_reduce):
            with autocast(self.config, self.ctx):
                outputs = self.task.forward(self.trained, inputs, targets)
                loss = self.task.loss(outputs, targets)
            self.scaler.scale(mean.weigh(loss, outputs, targets)).backward()
        mean.finish(self.trained)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def speed(self, batches: Iterator[Any], seconds: float, all_reduce: bool = True) -> float:
        """Samples/s of all processes, over steps that take about `seconds` in total. Call on every rank."""
        slow = self.ctx.on_main(lambda took: took > seconds, self._time(1, batches, all_reduce))
        warm_up, least = (0, 1) if slow else (WARM_UP_STEPS, 3)
        self._time(warm_up, batches, all_reduce)
        took = self._time(least, batches, all_reduce) / least
        steps = self.ctx.on_main(lambda: max(least, int(seconds / took)))
        return steps * self.config.batch_size * self.ctx.world_size / self._time(steps, batches, all_reduce)

    def _time(self, steps: int, batches: Iterator[Any], all_reduce: bool) -> float:
        """Seconds from the start of all ranks until all have done `steps`."""
        self._wait_for_all()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(next(batches), all_reduce)
        self._wait_for_all()
        return time.perf_counter() - start

    def _wait_for_all(self) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
        dist.all_reduce(torch.zeros(1))


class Replica(nn.Module):
    """What DataParallel runs on each GPU: `model` with --precision."""

    def __init__(self, model: nn.Module, config: Config, ctx: DistContext) -> None:
        super().__init__()
        self.model, self.config, self.ctx = model, config, ctx

    def forward(self, *args: Any, **named: Any) -> Any:
        # DataParallel's threads know that autocast is on, but not its dtype, which is local to a thread: fp16 if unset.
        with autocast(self.config, self.ctx):
            return self.model(*args, **named)


def measure(
    finish: Callable[[str, list[Row]], None], rounds: int, seconds: float, config: Config, env: RankEnv
) -> None:
    """Measure this number of processes; pass a title and the rows to `finish`, once. Call on every rank."""
    config = prepare(config, env)
    task = Task(config)
    check_model(config, task.model)
    with init_distributed(config, env) as ctx:
        rows = [row for _ in range(rounds) for row in _round(task, ctx, seconds)]
        ctx.on_main(finish, task.title(), rows)


def _round(task: Task, ctx: DistContext, seconds: float) -> Iterator[Row]:
    config, world_size = task.config, ctx.world_size
    batches = task.batches(ctx)
    resident = next(batches)
    inputs = resident[0]
    task.image = inputs.shape[2:] if isinstance(inputs, Tensor) and inputs.dim() == 4 else None
    gpus = torch.cuda.device_count() if ctx.device.type == "cuda" else 0
    tensors: list[Tensor] = []
    map_tensors(resident, tensors.append)
    # Lists of samples of different sizes cannot be divided, nor repeated.
    has_rows = all(tensor.dim() > 0 and len(tensor) == config.batch_size for tensor in tensors)

    before = memory_mb(ctx.device)

    def row(kind: str, speed: float, processes: int = world_size, batch: int = config.batch_size) -> Row:
        return Row(kind, processes, batch, speed, max(ctx.gather(memory_mb(ctx.device) - before)))

    for name in filter(partial(getattr, config), of_parts("INSTEAD_OF_DDP")):  # before DDP, whose peak is higher
        yield row(flag_of(name), Trainer(task, ctx, config).speed(itertools.repeat(resident), seconds))
        config = replace(config, **{name: False})  # type: ignore[arg-type]
    if world_size == 1:
        alone = Trainer(task, ctx, config, partial(_compiled, config))
        yield row(ONE, alone.speed(itertools.repeat(resident), seconds))
        del alone
    if world_size == 1 and gpus > 1 and has_rows:
        parallel = Trainer(task, ctx, config, partial(_data_parallel, config, ctx))
        everything = map_tensors(resident, lambda part: torch.cat([part] * gpus))  # DataParallel splits it again
        yield row(PARALLEL, gpus * parallel.speed(itertools.repeat(everything), seconds), gpus)
        del parallel
    trainer = Trainer(task, ctx, config)
    yield row(WEAK, trainer.speed(itertools.repeat(resident), seconds))
    yield row(NO_SYNC, trainer.speed(itertools.repeat(resident), seconds, all_reduce=False))
    if hasattr(model_file, "loss_terms") and not task.segmentation:
        plain = Trainer(task, ctx, config, terms=False)
        yield row(NO_TERMS, plain.speed(itertools.repeat(resident), seconds))
    if not task.segmentation:
        yield row(DATA, trainer.speed(batches, seconds))
    share = config.batch_size // world_size
    if world_size > 1 and share > 1 and has_rows:  # BatchNorm refuses a single sample
        part = map_tensors(resident, lambda part: part[:share])
        yield row(STRONG, trainer.speed(itertools.repeat(part), seconds) * share / config.batch_size, batch=share)


def _data_parallel(config: Config, ctx: DistContext, model: nn.Module) -> nn.Module:
    return nn.DataParallel(Replica(model, config, ctx))


def _compiled(config: Config, model: nn.Module) -> nn.Module:
    if config.compile:
        model.compile()
    return model


# ---- the command ----------------------------------------------------------------------------------------------------


def keep(report: Path, title: str, rows: Sequence[Row]) -> None:
    """Write what one start has measured, for `sweep`."""
    report.write_text(json.dumps({"title": title, "rows": [vars(row) for row in rows]}))


def sweep(options: argparse.Namespace, config: Config) -> int:
    """Measure 1, 2, 4 ... processes on this machine in turn. Returns the exit code."""
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    most = config.nproc or gpus or min(available_cores(), MAX_ON_CPU)
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
    """Do what the command line asks for. Returns the exit code."""
    parser = OptionParser(
        usage="python benchmark.py [--seconds X] [--repeats N] [--output DIR] [OPTIONS of main.py]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    above_0 = number(float, above=0)
    parser.add_argument("--seconds", type=above_0, default=2.0, help="duration of a measurement (default: 2)")
    parser.add_argument("--repeats", type=number(int, 1), default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--output", type=Path, default="runs/benchmark", help="directory of CSV and plot (default: runs/benchmark)"
    )
    options, others = parser.parse_known_args()
    config = replace(Config.parse(others), grad_accum_steps=1)
    if find_rank_env(config, os.environ) == RankEnv():
        return sweep(options, config)
    return run(partial(measure, partial(show, config, options.output), options.repeats, options.seconds), config)


if __name__ == "__main__":
    run_and_exit(command)
