"""Prove that this project, with your edits, resumes and evaluates exactly: after an edit, and before a long run.

    python rehearse.py [--nproc 2] -- OPTIONS of main.py

In a temporary directory, it trains two epochs of at most eight steps; does so again, is killed in the middle of an
epoch, and resumes; trains with a DataLoader worker instead of none; and evaluates the checkpoint in new processes.
"""

import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import main as project
from config import Config
from ddp.checkpoint.compare import differences, metrics_lines, newest
from ddp.core.errors import ExitCode, UserError, plural
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.sampler import Shuffled
from ddp.entrypoint.run_main import run_and_exit, spawn
from ddp.training.run import Run

Start = Callable[[Any, Config, int], int]  # runs a main function on a number of processes, and returns the exit code
Check = tuple[str, list[str], list[str]]  # what is checked, what is wrong with it, and the usual causes
STEPS, SAVED_EVERY = 8, 3  # steps of an epoch, and batches of an evaluation, at most; steps from save to save
KEEP = [
    "state that no checkpoint holds: use a buffer, the optimizer's state_dict(), or a field of Training in main.py",
    "random numbers from a generator of your own: seed it with torch.initial_seed() in each call",
]
RESUME = [
    *KEEP,
    "a sampler or a dataset that counts: use (epoch, start, stop) and the index, and set_epoch(epoch) for the epoch",
    "rounding, on GPUs and with more than two processes: pass --deterministic",
]
EVALUATE = [*KEEP, "a metric that is no sum over samples; a loss that depends on the batch: pass --eval-batch-size"]


def few_steps(kill: bool, config: Config, rank_env: Any) -> None:
    """main.main as one rank, with few steps and batches. kill: with SIGKILL, in the second epoch."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    init_train, init_eval, resume, advance = TrainLoader.__init__, EvalLoader.__init__, Run.resume, Run.advance

    def limit_train(loader: Any, *arguments: Any) -> None:
        init_train(loader, *arguments)
        order, length, limit = loader.order, loader.sampler.length, STEPS * loader.global_batch
        loader.sampler.length = lambda epoch: min(length(epoch), limit)
        if type(order) is Shuffled:  # the same samples in each epoch, from all parts of the data
            few = Shuffled(min(limit, loader.length), order.seed)
            vars(order)["indices"] = lambda *where: few.indices(*where) * (loader.length // few.samples)

    def limit_eval(loader: Any, *arguments: Any) -> None:
        init_eval(loader, *arguments)
        loader.length = min(loader.length, STEPS * loader.chunk_size - 1)

    def resume_and_write_names(run: Any, train_loader: Any, training: Any) -> None:
        resume(run, train_loader, training)
        models = [part for part in vars(training).values() if isinstance(part, torch.nn.Module)]
        names = {id(weight): name for model in models for name, weight in model.named_parameters()}
        groups = {name: part.param_groups for name, part in vars(training).items() if hasattr(part, "param_groups")}
        of = {part: [names.get(id(each)) for group in groups[part] for each in group["params"]] for part in groups}
        run.ctx.on_main((folder / "names").write_text, json.dumps(of))

    def advance_and_die(run: Any) -> None:
        advance(run)
        if kill and run.state.step == run.log.steps_per_epoch + min(SAVED_EVERY - 1, run.log.steps_per_epoch):
            run.checkpoints.writer.done.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def write_metrics(run: Any, metrics: Any, loader: Any) -> None:
        run.ctx.on_main((folder / f"evaluated_{loader.part}").write_text, json.dumps(metrics))

    changed: list[Any] = [(TrainLoader, "__init__", limit_train), (EvalLoader, "__init__", limit_eval)]
    changed += [(Run, "resume", resume_and_write_names), (Run, "advance", advance_and_die)]
    for kind, name, function in [*changed, *[(Run, "log_eval", write_metrics)] * config.evaluate]:
        setattr(kind, name, function)
    project.main(config, rank_env)


def checks(config: Config, nproc: int, folder: Path, start: Start = spawn) -> Iterator[Check]:
    """Each check, when it is done. Raises UserError if a run ends in another way than it should."""
    config = replace(config, epochs=2, max_steps=None, warmup_epochs=min(config.warmup_epochs, 1), log_every=1)
    config = replace(config, checkpoint_every=SAVED_EVERY, resume="auto", evaluate=False, patience=None, workers=0)
    config.mirror = None  # it holds the real run
    config.eval_batch_size = config.eval_batch_size or config.batch_size  # several batches, also of data in memory

    def run(name: str, nproc: int = nproc, kill: bool = False, **changes: Any) -> Path:
        output_dir = folder / name
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # what the ranks print goes to a file
            code = start(partial(few_steps, kill), replace(config, output_dir=str(output_dir), **changes), nproc)
        if code != (ExitCode.PEER_LOST if kill else ExitCode.SUCCESS):
            lines = (output_dir / "output").read_text().splitlines()
            print("\n".join([line for line in lines if line.startswith("error: ")] or lines[-30:]))
            raise UserError(f"a run ended with exit code {code}; what it printed is in {output_dir}/output")
        return output_dir

    whole = run("whole")
    names = json.loads((whole / "names").read_text())
    yield f"trained two epochs with {plural(nproc, 'process', 'es')}", [], []
    run("killed", kill=True)
    yield "killed and resumed", differences(whole, run("killed"), names), RESUME
    yield "0 and 1 DataLoader workers", differences(whole, run("with_worker", workers=1), names), RESUME
    checkpoint = whole / "best.pt" if (whole / "best.pt").exists() else newest(whole)
    step = torch.load(checkpoint, weights_only=True)["step"]
    trained = {line["split"]: line for line in metrics_lines(whole) if line["step"] == step}
    splits = trained.keys() & {"val", "test"}
    for number in {1, nproc if torch.cuda.is_available() else max(nproc, 2)} if splits else ():
        run("whole", number, evaluate=True, resume=str(checkpoint))
        found = [
            f"{split} {name} is {value:.6g}, and was {was:.6g} at the end of the training"
            for split in sorted(splits, reverse=True)
            for name, value in json.loads((whole / f"evaluated_{split}").read_text()).items()
            if str(value) != str(was := trained[split][name])  # both may be NaN
            and not math.isclose(value, was, rel_tol=1e-4, abs_tol=1e-6)
        ]
        yield f"evaluated by {plural(number, 'new process', 'es')}", found, EVALUATE


def rehearse() -> int:
    """Print a line per check. Returns the exit code."""
    config = Config.parse([word for word in sys.argv[1:] if word != "--"])
    folder, failed = Path(tempfile.mkdtemp(prefix="rehearsal-")), False
    for name, found, causes in checks(config, config.nproc or 2, folder):
        failed |= bool(found)
        print(f"{'FAILED' if found else 'ok':6}  {name}", flush=True)
        first_metric = next((each for each in found[1:] if each.startswith("metrics")), None)
        for line in [*found[:1], first_metric, "usual causes:", *causes] if found else ():
            print(f"        {line}" if line else "", flush=True)
    if not failed:
        shutil.rmtree(folder)
    exact = "exact: a run of this project resumes and evaluates as if it was never interrupted"
    print(f"\nnot exact; what the runs printed and wrote is in {folder}" if failed else f"\n{exact}")
    return int(failed)


if __name__ == "__main__":
    run_and_exit(rehearse)
