"""The cost of evaluating, resuming and saving. On the CPU, with made-up images of the size of CIFAR-10's.

    .venv/bin/python benchmarks/beyond_steps.py                 from the repository; about 3 minutes
    .venv/bin/python benchmarks/beyond_steps.py --only saving   one table
    .venv/bin/python benchmarks/beyond_steps.py --quick         tests that it works; the results are not meaningful

Evaluation: main.py's evaluate() compared with the limit: the model and its loss alone, again and again on one batch.
Both take turns in the same processes. Resuming: how long the first batch and the first step take at several positions
of an epoch. Saving: how long a real training waits in run.save(), compared with a bare copy of the same tensors; how
long the write takes in the background; and by how much all of this delays the training.

All measurements take turns, --repetitions times; ratios are computed within a repetition. Each process has one thread.
Prints tables in Markdown with medians, minima and maxima over the repetitions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import machine

from made_up import cifar10, jpegs

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parent / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(TEMPLATE), str(TEMPLATE / "tests"), str(HERE / "loops")]
# Caches in the template folder would be copied into every project rendered from it.
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(HERE.parent / "build/pycache")

from timed import accept  # noqa: E402

from config import Config  # noqa: E402
from data import load_datasets  # noqa: E402
from ddp.checkpoint.manager import BackgroundJob  # noqa: E402
from ddp.data.loader import EvalLoader, TrainLoader  # noqa: E402
from ddp.distributed.process_group import DistContext  # noqa: E402
from ddp.distributed.rank_env import RankEnv  # noqa: E402
from ddp.entrypoint.run_main import run_as_rank  # noqa: E402
from ddp.training.run import Run  # noqa: E402
from main import evaluate  # noqa: E402
from main import main as train_as_rank  # noqa: E402
from model import build_model, compute_loss  # noqa: E402
from processes import Ranks, on_ranks, train  # noqa: E402

KINDS = ("evaluation", "resuming", "saving")
PROCESSES, BATCH = 2, 128  # samples per process; the defaults of all measurements
RUN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Scale:
    """How much is measured in each repetition."""

    images: int = 50_000  # training images; there are a fifth as many test images
    batches: tuple[int, ...] = (16, 128)
    turns: int = 3  # of evaluation and limit
    parts: tuple[float, ...] = (0.0, 0.5, 0.99)  # of an epoch: where to resume; ratios are relative to the first
    starts: int = 5  # of the loader, at each position
    saves: int = 4
    models: tuple[tuple[str, int, int], ...] = (("ToyModel", 128, 20), ("resnet18", 8, 16))  # batch, steps per save


QUICK = Scale(2_560, (128,), 2, (0.0, 0.99), 1, 2, (("ToyModel", 16, 8), ("resnet18", 2, 6)))


class Bench:
    """The data, and the options that all measurements share."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder, self.scale = folder, scale
        cifar10(folder / "cifar10", scale.images)
        accept(folder / "cifar10")
        many_jpegs(folder / "imagefolder", scale.images)
        self.sets = {name: load_datasets(Config.parse(self.options(name))) for name in ("cifar10", "imagefolder")}
        self.steps_per_epoch = scale.images // (PROCESSES * BATCH)

    def options(self, dataset: str = "cifar10", *, batch: int = BATCH, model: str = "ToyModel") -> list[str]:
        options = ["--dataset", dataset, "--data-dir", str(self.folder / dataset), "--device", "cpu"]
        options += ["--val-fraction", "0"] if dataset == "cifar10" else []  # all images are for training
        return [*options, "--batch-size", str(batch), "--model", model]

    def positions(self) -> list[int]:
        """Where to resume, in samples of an epoch."""
        return [int(part * self.steps_per_epoch) * PROCESSES * BATCH for part in self.scale.parts]

    def step_of(self, position: int) -> int:
        """The step at `position` of the second epoch: step 0 of the first epoch has no checkpoint."""
        return self.steps_per_epoch + position // (PROCESSES * BATCH)


def many_jpegs(folder: Path, images: int) -> None:
    """`images` small training files in ten classes: a hundred pictures under many names."""
    jpegs(folder, 100, (64, 48))
    pictures = sorted((folder / "train").glob("*/*"))
    for number in range(images - len(pictures)):
        picture = pictures[number % len(pictures)]
        os.link(picture, picture.with_name(f"link{number}.jpg"))


# ---- evaluation -----------------------------------------------------------------------------------------------------


@dataclass
class Evaluation:
    """Images/s of all processes with evaluate(), with the limit, and their ratio; one value per repetition."""

    speeds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)

    def measure(self, bench: Bench, processes: int, batch: int) -> None:
        """Add a repetition."""
        options = bench.options(batch=batch)
        pairs = on_ranks(processes, lambda ctx: evaluate_in_turns(bench, options, ctx), *options)[0]
        self.speeds.append(statistics.median(speed for speed, _ in pairs))
        self.limits.append(statistics.median(limit for _, limit in pairs))
        self.parts.append(statistics.median(speed / limit for speed, limit in pairs))


def evaluate_in_turns(bench: Bench, options: Sequence[str], ctx: DistContext) -> list[tuple[float, float]]:
    """Images/s of evaluate() and of the limit, in turns without the first one. Call on every rank."""
    config, test_set = Config.parse(options), bench.sets["cifar10"].test
    eval_loader, model = EvalLoader(test_set, config, ctx), build_model(config, test_set)
    inputs, targets = (part[: config.batch_size].clone() for part in next(iter(eval_loader)))
    batches = -(-eval_loader.length // (ctx.world_size * config.batch_size))

    @torch.no_grad()
    def limit() -> None:
        for _ in range(batches):
            compute_loss(model(inputs), targets, config)

    pairs = []
    for _ in range(bench.scale.turns + 1):
        speed = eval_loader.length / seconds(lambda: evaluate(model, eval_loader, config, ctx), ctx)
        pairs.append((speed, batches * len(inputs) * ctx.world_size / seconds(limit, ctx)))
    return pairs[1:]


def seconds(work: Callable[[], Any], ctx: DistContext) -> float:
    """From the start of all ranks until all have done `work`. Call on every rank."""
    ctx.sum(torch.zeros(1))
    start = time.perf_counter()
    work()
    ctx.sum(torch.zeros(1))
    return time.perf_counter() - start


# ---- resuming -------------------------------------------------------------------------------------------------------


def in_turns(measure: Callable[[int], float], positions: Sequence[int], turn: int) -> list[float]:
    """The result at each position. Every second turn goes backwards, so that the order does not matter."""
    found = {position: measure(position) for position in (positions if turn % 2 == 0 else reversed(positions))}
    return [found[position] for position in positions]


def first_batches(bench: Bench, dataset: str) -> list[float]:
    """Median seconds from TrainLoader.steps() to the first batch on the slowest rank, at each position."""
    config, positions = Config.parse(bench.options(dataset)), bench.positions()

    def start_often(ctx: DistContext) -> list[list[float]]:
        loader, epochs = TrainLoader(bench.sets[dataset][0], config, ctx), itertools.count()
        # Every start takes a new epoch, as a resumed run does. The first turn also pads and flips data in memory.
        return [
            in_turns(lambda position: seconds_to_batch(loader, next(epochs), position, ctx), positions, turn)
            for turn in range(bench.scale.starts + 1)
        ][1:]

    by_rank = torch.tensor(on_ranks(PROCESSES, start_often, *bench.options(dataset)))  # [ranks, starts, positions]
    return by_rank.amax(0).median(0).values.tolist()


def seconds_to_batch(loader: TrainLoader, epoch: int, position: int, ctx: DistContext) -> float:
    """From TrainLoader.steps() to its first batch. Call on every rank."""
    ctx.sum(torch.zeros(1))
    start = time.perf_counter()
    steps = loader.steps(epoch, position)
    next(next(steps))
    taken = time.perf_counter() - start
    del steps  # ends the workers
    return taken


def checkpoints(bench: Bench) -> dict[int, Path]:
    """For each position, the output directory of a run that ended there."""
    made = {}
    for position in bench.positions():
        end = ("--max-steps", bench.step_of(position))
        train(PROCESSES, *bench.options(), "--output-dir", bench.folder / "run", *end)
        made[position] = shutil.copytree(bench.folder / "run", bench.folder / f"run at {position}")
    return made


def first_step(bench: Bench, runs: dict[int, Path], position: int) -> float:
    """Seconds from the command to the first step."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        folder = Path(name)
        shutil.copytree(runs[position], folder / "run")
        command = [sys.executable, str(HERE / "loops/timed.py"), "--steps", "1", "--times", str(folder / "times.json")]
        command += ["--cifar10", str(bench.folder / "cifar10"), str(TEMPLATE / "main.py"), *bench.options()]
        command += ["--output-dir", str(folder / "run"), "--world-size", str(PROCESSES)]
        command += ["--init-method", f"file://{folder}/rendezvous", "--rank"]
        environment = {**os.environ, "WORLD_SIZE": str(PROCESSES)}  # timed.py reads it
        with (folder / "log").open("w") as log:
            start = time.perf_counter()
            ranks = [
                subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env=environment)
                for rank in range(PROCESSES)
            ]
            try:
                codes = [rank.wait(RUN_TIMEOUT_S) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        output = (folder / "log").read_text()
        if any(codes) or f"step_{bench.step_of(position):08d}.pt" not in output:
            sys.exit(f"a run did not resume at sample {position:,}, or exited with {codes}:\n{output}")
        return json.loads((folder / "times.json").read_text())["steps"][0] - start  # one clock for all processes


# ---- saving ---------------------------------------------------------------------------------------------------------


@dataclass
class Saving:
    """Milliseconds; one value per repetition."""

    megabytes: float = 0.0  # of a checkpoint
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # in run.save()
    copies: list[float] = field(default_factory=list)  # clone() of weights and momentum
    writes: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # how much longer the training takes because of one save

    def measure(self, bench: Bench, model: str, batch: int, every: int) -> None:
        """Add a repetition: train, and save every `every` steps."""
        with tempfile.TemporaryDirectory(dir=bench.folder) as name:
            options = [*bench.options(batch=batch, model=model), "--output-dir", name, "--checkpoint-every", str(every)]
            noted = watched_training(options, every, bench.scale.saves, Path(name, "noted.json"))
            self.megabytes = max(Path(name, "checkpoints").iterdir()).stat().st_size / 1e6
        busy = [(save, done) for (save, _), (_, done) in zip(noted["saves"], noted["writes"], strict=True)]
        undisturbed: list[float] = []
        delayed: list[float] = []
        for begin, end in itertools.pairwise(noted["steps"]):
            overlaps = any(begin < done and save < end for save, done in busy)
            (delayed if overlaps else undisturbed).append(end - begin)
        step = statistics.median(undisturbed)
        self.steps.append(1000 * step)
        self.delays.append(1000 * (sum(delayed) - step * len(delayed)) / len(busy))
        for what, into in (("saves", self.waits), ("copies", self.copies), ("writes", self.writes)):
            into.append(1000 * statistics.median(end - begin for begin, end in noted[what]))


class Watch:
    """Records the end of each step; and start and end of each save, write and, for comparison, copy of this rank."""

    def __init__(self, every: int, saves: int, rank: int, file: Path) -> None:
        self.every, self.last, self.rank, self.file = every, every * (saves + 1), rank, file
        self.noted: dict[str, list[Any]] = {"steps": [], "saves": [], "writes": [], "copies": []}
        save, start = Run.save, BackgroundJob.start
        Run.save = self.timed("saves", save)  # type: ignore[method-assign]

        def timed_start(job: BackgroundJob, work: Callable[[], None]) -> None:
            start(job, self.timed("writes", work) if job.name == "checkpoint writer" else work)

        BackgroundJob.start = timed_start  # type: ignore[assignment, method-assign]
        register_optimizer_step_post_hook(self.after_step)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with start and end of each call recorded."""

        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            self.noted[name].append((begin, time.perf_counter()))
            return result

        return call

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.noted["steps"].append(time.perf_counter())
        done = len(self.noted["steps"])
        if done % self.every == self.every - 1:  # the previous write is on the disk
            self.timed("copies", copy_state)(optimizer)
        if done == self.last:
            self.end()

    def end(self) -> NoReturn:
        """Write the records of rank 0, and exit. All ranks wait for that."""
        if self.rank == 0:
            while len(self.noted["writes"]) < len(self.noted["saves"]):
                time.sleep(0.01)
            self.file.write_text(json.dumps(self.noted))
        while not self.file.exists():
            time.sleep(0.01)
        os._exit(0)


def copy_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of the weights and the momentum, which are nearly all of a checkpoint."""
    weights = [weight.detach() for group in optimizer.param_groups for weight in group["params"]]
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [tensor.clone() for tensor in weights + momentum]


def watched_training(options: Sequence[str], every: int, saves: int, file: Path) -> dict[str, list[Any]]:
    """Run main.py's main until it has saved `saves` times. Returns the records of rank 0."""

    def target(rank_env: RankEnv) -> int:
        Watch(every, saves, rank_env.rank, file)
        return run_as_rank(train_as_rank, Config.parse(options), rank_env)

    ranks = Ranks(PROCESSES, target)
    if any(ranks.wait(RUN_TIMEOUT_S)) or not file.exists():
        sys.exit(f"a training failed:\n{ranks.output()}")
    return json.loads(file.read_text())


# ---- tables ---------------------------------------------------------------------------------------------------------


def shown(values: Sequence[float], form: str = "{:.1f}") -> str:
    """`median (min to max)`."""
    spread = f" ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else ""
    return form.format(statistics.median(values)) + spread


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(first: str, *others: str) -> list[str]:
    return [row(first, *others), f"|---|{'--:|' * len(others)}"]


def evaluation_table(evaluations: dict[tuple[int, int], Evaluation]) -> list[str]:
    lines = head("evaluation, ToyModel", "images/s", "limit, images/s", "of the limit")
    for (batch, processes), found in evaluations.items():
        who = f"batch {batch}, {processes} process{'es' if processes > 1 else ''}"
        speeds = shown(found.speeds, "{:,.0f}"), shown(found.limits, "{:,.0f}")
        lines.append(row(who, *speeds, shown(found.parts, "{:.1%}")))
    return lines


def resuming_table(parts: Sequence[float], waits: dict[str, list[list[float]]]) -> list[str]:
    """`waits`: for each kind, in each repetition, seconds at each of `parts`."""
    names = [f"{part:.0%}" for part in parts]
    ratios = [f"{name} / {names[0]}" for name in names[1:]]
    lines = head("resuming, ms, at this part of an epoch", *names, *ratios)
    for kind, repetitions in waits.items():
        at = list(zip(*repetitions, strict=True))
        cells = [shown([1000 * value for value in values], "{:,.1f}") for values in at]
        for values in at[1:]:
            cells.append(shown([one / first for one, first in zip(values, at[0], strict=True)], "{:.2f}"))
        lines.append(row(kind, *cells))
    return lines


def saving_table(savings: dict[tuple[str, int, int], Saving]) -> list[str]:
    titles = ("run.save()", "bare copy", "write, in the background", "delay of the training", "one step")
    lines = head("saving, ms", *titles)
    for (model, batch, _), found in savings.items():
        cells = [shown(values) for values in (found.waits, found.copies, found.writes, found.delays, found.steps)]
        cells[1] = shown(found.copies, "{:.3f}")  # a small model is copied in microseconds
        lines.append(row(f"{model}, batch {batch}, {found.megabytes:.1f} MB", *cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of evaluating, resuming and saving.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small, and one repetition: tests that it works")
    parser.add_argument("--only", choices=KINDS)
    arguments = parser.parse_args()
    scale, repetitions = (QUICK, 1) if arguments.quick else (Scale(), arguments.repetitions)
    chosen = [arguments.only] if arguments.only else KINDS
    os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine, threads would wait for each other

    evaluations = {(batch, processes): Evaluation() for batch in scale.batches for processes in (1, PROCESSES)}
    loaders = {"first batch, data in memory": "cifar10", "first batch, image files and workers": "imagefolder"}
    whole = "first step, from the start of the command"
    waits: dict[str, list[list[float]]] = {kind: [] for kind in (*loaders, whole)}
    savings = {case: Saving() for case in scale.models}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="beyond-steps-") as name:
        bench = Bench(Path(name), scale)
        runs = checkpoints(bench) if "resuming" in chosen else {}
        for number in range(repetitions):
            if "evaluation" in chosen:
                for (batch, processes), evaluation in evaluations.items():
                    evaluation.measure(bench, processes, batch)
            if "resuming" in chosen:
                for kind, dataset in loaders.items():
                    waits[kind].append(first_batches(bench, dataset))
                waits[whole].append(in_turns(partial(first_step, bench, runs), bench.positions(), number))
            if "saving" in chosen:
                for case, saving in savings.items():
                    saving.measure(bench, *case)
            print(f"{time.monotonic() - start:4.0f} s  {number + 1}/{repetitions}", file=sys.stderr)
    tables: dict[str, Callable[[], list[str]]] = {
        "evaluation": partial(evaluation_table, evaluations),
        "resuming": partial(resuming_table, scale.parts, waits),
        "saving": partial(saving_table, savings),
    }
    print("\n\n".join("\n".join(tables[kind]()) for kind in chosen))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
