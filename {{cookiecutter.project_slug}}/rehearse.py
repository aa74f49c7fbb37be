"""Prove that this project, with your edits, resumes and evaluates exactly: after an edit, and before a long run.

    python rehearse.py [--steps 8] [--epochs 2] -- OPTIONS of main.py (default: --nproc 2)

In a temporary directory, it trains --epochs epochs of at most --steps steps; does so again, is killed within and after
an epoch, or ended, and resumes; trains with two DataLoader workers instead of none; reads samples in several processes
at once; evaluates checkpoints in new processes; and divides a global batch in three ways: state and loss must be the
same.
"""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P and -I leave it out
import main as project
import model as task
from compare import differences, metric_differences, metrics_lines, newest, update_differences
from config import Config
from ddp.core.errors import ExitCode, Stopped, UserError, one_line, plural
from ddp.core.options import OptionParser, number
from ddp.core.signals import SignalHandler
from ddp.data.dataset import data_name, hooks_of
from ddp.data.inherited import moved_positions
from ddp.data.reader import SeededReader, hand_over, same
from ddp.data.workers import start_workers
from ddp.entrypoint.run_main import SpawnSignals, run_and_exit, spawn
from rehearsal_runs import SAVED_EVERY, divided_run, narrowest, rehearsed_main, whole_run

Start = Callable[[Any, Config, int], int]  # runs a main function on a number of processes, and returns the exit code
Check = tuple[str, list[str], list[str]]  # what is checked, what is wrong with it, and the usual causes
STEPS = 8  # of an epoch, and batches of an evaluation, at most
EPOCHS = 2
READ_AT_ONCE = 64  # samples of each set
# Of their difference, as a part of the update: ReLU has ties in float32; others if a part of the model has few digits.
LIMITS = {"float64": 1e-6, "float32 loss": 1e-3, "float32": 0.02, "float16": 0.1, "bfloat16": 0.1}
# Of the logged loss, and of other metrics: the accuracy jumps where numbers are equal but for rounding.
METRIC_LIMITS = {"float64": (1e-4, 0.02), "float32": (0.002, 0.1), "float16": (0.1, 0.2), "bfloat16": (0.1, 0.2)}
METRIC_LIMITS["float32 loss"] = METRIC_LIMITS["float64"]
KEEP = [
    "state that no checkpoint holds: use a buffer, the optimizer's state_dict(), or a field of Training in main.py",
    "random numbers from a generator of your own: seed it with torch.initial_seed() in each call",
]
RESUME = [
    *KEEP,
    "a sample that the dataset keeps, and changes in place: change a clone",
    "what is made of the weights of --init-from: see 'Fine-tune' in docs/recipes.md",
    "BatchNorm's statistics of one rank, in a pass without ddp_model: write `with ctx.evaluating(model)` around it",
    "a change after run.end_epoch, which saves; or before it, in an epoch that is not complete: see docs/state.md",
    "a schedule that depends on --max-steps, if the run was ended by it",
    "gradients that a step leaves behind: call zero_grad() of each optimizer",
    "a sampler or a dataset that counts: use (epoch, start, stop) and the index, and set_epoch(epoch) for the epoch",
    "rounding, on GPUs and with more than two processes: pass --deterministic",
]
SHARE = ["a file, an archive or a connection that was open before the workers were forked: see Files in docs/data.md"]
EVALUATE = [*KEEP, "a metric that is no sum over samples; a loss that depends on the batch: pass --eval-batch-size"]
DIVIDE = [
    "a loss that is a mean over tokens, nodes or weights, and not over samples: define loss_terms in model.py",
    "a logged loss that is a mean over something else than samples; a metric of the last pass: see batch_totals",
    "a val metric that compares the samples of a batch: pass --eval-batch-size",
    "rows of other processes without their gradient: see AllGather in docs/recipes.md",
    "samples that collate or compute_gradients mixes: use `mix` in data.py, which this check leaves out",
    "a buffer or another state that changes in each forward pass, or on one rank: see 'A queue' in docs/recipes.md",
    "random numbers of random or numpy in the model or the loss: use those of torch",
    "a gradient that is kept over the next backward pass, which overwrites it: clone it",
    "a loss that compares the samples of a batch: LOSS_COMPARES_SAMPLES = True in model.py leaves the passes out",
]


class Rehearsal:
    """The runs of a rehearsal, each in its own folder. `start`: runs a main function on a number of processes."""

    def __init__(
        self, config: Config, nproc: int, folder: Path, start: Start, steps: int = STEPS, epochs: int = EPOCHS
    ) -> None:
        config = replace(config, epochs=epochs, max_steps=None, warmup_epochs=min(config.warmup_epochs, 1), log_every=2)
        config = replace(config, checkpoint_every=SAVED_EVERY, resume="auto", evaluate=False, patience=None, workers=0)
        config.rehearse()
        self.divides_evaluations = config.eval_batch_size is None  # otherwise the metrics may depend on it
        self.eval_batch = config.eval_batch_size or config.batch_size  # several batches, also of data in memory
        config.eval_batch_size = self.eval_batch
        self.config, self.nproc, self.folder, self.start, self.steps = config, nproc, folder, start, steps

    def run(self, name: str, inside: Any, nproc: int = 0, code: int | None = 0, **changes: Any) -> Path:
        """The output directory of a run. Raises UserError unless it ends with `code`; None accepts any."""
        output_dir = self.folder / name
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # what the ranks print goes to a file
            main = partial(rehearsed_main, self.steps, self.eval_batch, inside)
            config = replace(self.config, **changes)
            self.code = self.start(main, replace(config, output_dir=str(output_dir)), nproc or self.nproc)
        if code not in (None, self.code):
            lines = (output_dir / "output").read_text().splitlines()
            print("\n".join([line for line in lines if line.startswith("error: ")] or lines[-30:]))
            raise UserError(f"a run ended with exit code {self.code}; what it printed is in {output_dir}/output")
        return output_dir

    def checks(self) -> Iterator[Check]:
        """Each check, when it is done. Raises UserError if a run ends in another way than it should."""
        whole = self.run("whole", partial(whole_run, None))
        names = json.loads((whole / "names").read_text())
        yield f"trained {self.config.epochs} epochs with {plural(self.nproc, 'process', 'es')}", [], []
        middle_steps, middle = SAVED_EVERY + 2, self.folder / "middle"
        for epoch, steps in ((0, middle_steps), (1, 1), (1, middle_steps)):
            kill = partial(whole_run, (epoch, steps))  # the second time it resumes from the end of an epoch
            killed = self.run("killed", kill, code=ExitCode.PEER_LOST)
            shutil.copytree(killed, middle) if epoch == 0 else None
        resumed = self.run("killed", partial(whole_run, None))
        before, after = (json.loads((each / "unsaved").read_text()) for each in (whole, resumed))
        unsaved = [name for name, value in before.items() if after.get(name) != value]
        name, found = "killed three times and resumed", differences(whole, resumed, names)
        if unsaved and not found:
            name += f" (but {', '.join(unsaved[:3])} differ, which no checkpoint holds: are they used later?)"
        yield name, found, RESUME
        with_workers = self.run("with_workers", partial(whole_run, None), workers=2)
        yield "0 and 2 DataLoader workers", differences(whole, with_workers, names), RESUME
        yield "samples read by 2 DataLoader workers and this process at once", self.shared_files(), SHARE
        best = whole / "best.pt"
        for ranks in sorted({1, self.nproc if torch.cuda.is_available() else max(self.nproc, 2)}):
            found = self.evaluated(whole, best if best.exists() else newest(whole), ranks)
            yield f"evaluated by {plural(ranks, 'new process', 'es')}", found, EVALUATE
        if any(middle.glob("checkpoints/step_*.pt")):  # an epoch may have too few steps
            saved = newest(middle)
            short = self.run("short", partial(whole_run, None), max_steps=torch.load(saved, weights_only=True)["step"])
            yield "evaluated in the middle of an epoch", self.evaluated(short, saved, 1), EVALUATE
            found = differences(whole, self.run("short", partial(whole_run, None)), names)  # it has an evaluation more
            found = [each for each in found if not each.startswith(("metrics.jsonl", "best", "epochs_since"))]
            yield "ended by --max-steps in the middle of an epoch, and resumed", found, RESUME
        yield from self.divisions()

    def shared_files(self) -> list[str]:
        """Files and connections that workers share with this process, which loads data and model as a run does."""
        datasets, found = project.load_datasets(self.config), []
        task.build_model(self.config, datasets.train)
        for dataset in datasets[:]:
            if dataset is None or hooks_of(dataset).in_memory:
                continue
            chunks = [[index] for index in range(min(len(dataset), READ_AT_ONCE))]
            reader, alone = SeededReader(dataset, hooks_of(dataset).collate, self.config.seed, epoch=0), []
            for processes, read_here in ((1, False), (2, False), (2, True)):
                loader = DataLoader(reader, batch_sampler=chunks, num_workers=processes, collate_fn=hand_over)
                with nullcontext() if read_here else moved_positions():
                    workers = start_workers(loader)
                    try:
                        for index, batch in enumerate(workers.batches):
                            alone += [batch] if processes == 1 else []
                            batches = [batch, reader.__getitems__([index])] if read_here else [batch]
                            if not all(same(each, alone[index]) for each in batches):
                                found.append(f"sample {index} of {data_name(dataset)} is another one then")
                    except Stopped:
                        raise
                    except Exception as error:  # what was read is damaged
                        found.append(one_line(error))
                    if not read_here and (path := workers.shared_file()):
                        found.insert(0, f"{path} is shared, with its position")
        return found

    def evaluated(self, trained: Path, checkpoint: Path, nproc: int) -> list[str]:
        """How the metrics of a checkpoint, in new processes, differ from those that the run `trained` has logged."""
        step = torch.load(checkpoint, weights_only=True)["step"]
        logged = {line["split"]: line for line in metrics_lines(trained) if line["step"] == step}
        splits = logged.keys() & {"val", "test"}
        if splits:
            changes: dict[str, Any] = {"evaluate": True, "resume": str(checkpoint), "init_from": None}
            self.run(trained.name, partial(whole_run, None), nproc, **changes)
        return [
            f"{split} {name} is {value:.6g}, and was {was:.6g} in the training"
            for split in sorted(splits, reverse=True)
            for name, value in json.loads((trained / f"evaluated_{split}").read_text()).items()
            if str(value) != str(was := logged[split][name])  # both may be NaN
            and not math.isclose(value, was, rel_tol=1e-4, abs_tol=1e-6)
        ]

    def divisions(self) -> Iterator[Check]:
        """The check of each way to divide a global batch: whether its state is that of the undivided batch."""
        ways: dict[str, Any] = {"2 passes": {"grad_accum_steps": 2}, "2 processes": {"nproc": 2}}
        compares = getattr(task, "LOSS_COMPARES_SAMPLES", False)
        if compares:
            del ways["2 passes"]
            yield "2 passes are not checked: LOSS_COMPARES_SAMPLES in model.py", [], []
        if torch.cuda.is_available() and torch.cuda.device_count() == 1:
            del ways["2 processes"]
        if not ways:
            return
        half, dtype = max(1, self.config.batch_size // 2), "float64"
        one = self.divided("undivided float64", dtype, 2 * half, code=None)
        if self.code != 0:  # a part of the task asks for float32
            one = self.divided("undivided", dtype := "float32", 2 * half)
        digits = narrowest(one, dtype)
        for way, how in ways.items():
            other = self.divided(way, dtype, half, **how)
            if compares and not (other / "gathers").exists():
                reason = "forward and compute_loss call no gather of torch.distributed"
                yield f"2 processes are not checked: {reason}", [], []
                continue
            name = (
                f"{2 * half} samples in {way}: the weights and buffers of 1 pass, up to {LIMITS[digits]:g} ({digits})"
            )
            part, found, others = self.apart(one, other, digits)
            if found:
                plain = self.divided("undivided plain", dtype, 2 * half, True, code=None)
                if self.code != 0:  # a mask of random numbers is empty then, for example
                    yield f"{way} are not checked: the run fails with constants in place of random numbers", [], []
                    continue
                other = self.divided(f"{way} plain", dtype, half, True, **how)
                _, found, others = self.apart(plain, other, digits)
                causes = " and ".join(json.loads((plain / "by_design").read_text()))
                apart = f"{part:.2g} of the update" if part > LIMITS[digits] else "not its metrics"
                name += "" if found else f" (but {apart}, for {causes})"
            name += f" (but the metrics {', '.join(others)} depend on the division)" if others else ""
            yield name, found, DIVIDE

    def apart(self, one: Path, other: Path, digits: str) -> tuple[float, list[str], list[str]]:
        """By which part of its update the state of two runs differs; texts, if it or the loss does; other metrics."""
        kinds = ("weights.", "buffers.", *(["counts."] if "processes" in other.name else []))  # one may be of passes
        part, found = update_differences(one, other, LIMITS[digits], kinds)
        if found or getattr(task, "LOSS_COMPARES_SAMPLES", False):
            return part, found, []
        return part, *metric_differences(one, other, task.metric_for_best_model, METRIC_LIMITS[digits])

    def divided(self, name: str, dtype: str, size: int, plain: bool = False, nproc: int = 1, **changes: Any) -> Path:
        """A run with batches of this size, also in its evaluations."""
        changes |= {"precision": "fp32", "matmul_precision": "highest", "compile": False, "batch_size": size}
        changes |= {"eval_batch_size": size} if self.divides_evaluations else {}
        changes = {"grad_accum_steps": 1, "checkpoint_every": None, "log_every": 1} | changes
        return self.run(name, partial(divided_run, dtype, plain), nproc, **changes)


def stop(*_: Any) -> NoReturn:
    """What a signal does between the runs."""
    raise Stopped("stopped: this rehearsal proves nothing")


def spawn_or_stop(main: Any, config: Config, nproc: int) -> int:
    """`spawn`, which has its own handlers of signals. Raises Stopped if one arrived."""
    arrived, on_first = [], SpawnSignals.on_first

    def note(signals: SpawnSignals) -> None:
        arrived.append(signals.first)
        on_first(signals)

    with patch.object(SpawnSignals, "on_first", note):
        code = spawn(main, config, nproc)
    SignalHandler().install(stop)
    return stop() if arrived else code


def rehearse() -> int:
    """Print a line per check. Returns the exit code."""
    parser = OptionParser(usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("--steps", type=number(int, 1), default=STEPS, help=f"of an epoch, at most (default: {STEPS})")
    parser.add_argument("--epochs", type=number(int, 2), default=EPOCHS, help=f"of a run (default: {EPOCHS})")
    ours, words = parser.parse_known_args()
    config = Config.parse([word for word in words if word != "--"])
    folder, failed = Path(tempfile.mkdtemp(prefix="rehearsal-")), False
    try:
        rehearsal = Rehearsal(config, config.nproc or 2, folder, spawn_or_stop, ours.steps, ours.epochs)
        for name, found, causes in rehearsal.checks():
            failed |= bool(found)
            print(f"{'FAILED' if found else 'ok':6}  {name}", flush=True)
            first_metric = next((each for each in found[1:] if each.startswith("metrics")), None)
            for line in [*found[:1], first_metric, "usual causes:", *causes] if found else ():
                print(f"        {line}" if line else "", flush=True)
    except Stopped:
        shutil.rmtree(folder)
        raise
    if failed:
        print(f"\nnot exact; what the runs printed and wrote is in {folder}")
    else:
        shutil.rmtree(folder)
        print("\nexact: a run of this project resumes and evaluates as if it was never interrupted")
    return int(failed)


if __name__ == "__main__":
    run_and_exit(rehearse)
