"""The runs of a rehearsal, each in patched processes: with few samples, killed, or ended after two epochs."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

import main as project
import model as task
from config import Config
from ddp.checkpoint.state import weights_of_optimizers
from ddp.data.dataset import BatchDataset
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.sampler import ResumableSampler, Shuffled
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.tensors import map_tensors, whole
from ddp.training.run import Run

SAVED_EVERY = 3  # steps from save to save


class Constants(TorchDispatchMode):
    """Torch's random numbers are constants, so that they are the same for each sample in any batch."""

    drawn = off = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.off = True
        yield
        self.off = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, results = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        if self.off or torch.Tag.nondeterministic_seeded not in function.tags or "attention" in name:
            return results
        self.drawn = True
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(results[1])
        if name == "randperm":
            return results.copy_(torch.arange(len(results)))
        return results.fill_(1 if name.startswith("bernoulli") else 0.5 if results.is_floating_point() else 0)


def save_state(models: list[torch.nn.Module], path: Path, ctx: Any) -> None:
    """Write weights and buffers, as `weights.0.NAME` and `buffers.0.NAME` of the first model. Call on every rank.

    Buffers are those of numbers that checkpoints hold, sorted: a queue may hold the samples of a step in another order.
    """
    state: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        state |= {f"weights.{number}.{name}": whole(value).detach() for name, value in model.named_parameters()}
        saved = model.state_dict().keys()
        for name, value in model.named_buffers():
            if name in saved and (value.is_floating_point() or value.is_complex()):
                real = torch.view_as_real(whole(value).resolve_conj()) if value.is_complex() else whole(value)
                state[f"buffers.{number}.{name}"] = real.detach().flatten().sort().values
    ctx.on_main(torch.save, state, path)


def rehearsed_main(
    steps: int, eval_batch: int, inside: Callable[[Path], None], config: Config, rank_env: RankEnv
) -> None:
    """main.main as one rank, with the samples of so many steps, and of so many batches of an evaluation.

    `inside` is called first, with the output directory: it patches more.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    init_train, init_eval = TrainLoader.__init__, EvalLoader.__init__

    def limit_train(loader: Any, *arguments: Any) -> None:
        init_train(loader, *arguments)
        order, length, limit = loader.order, loader.sampler.length, steps * loader.global_batch
        loader.sampler.length = lambda epoch: min(length(epoch), limit)
        if type(order) is Shuffled:  # the same samples in each epoch, from all parts of the data
            few = Shuffled(min(limit, loader.length), order.seed)
            vars(order)["indices"] = lambda *where: few.indices(*where) * (loader.length // few.samples)

    def limit_eval(loader: Any, *arguments: Any) -> None:
        init_eval(loader, *arguments)
        limit = min(loader.length, steps * eval_batch)  # from all parts of the data
        limit -= limit > 1 and limit % max(1, eval_batch // 2) == 0  # so that the last batch is smaller
        loader.dataset = Subset(loader.dataset, [number * loader.length // limit for number in range(limit)])
        loader.length = limit

    patch.multiple(TrainLoader, __init__=limit_train).start()
    patch.multiple(EvalLoader, __init__=limit_eval).start()
    inside(folder)
    project.main(config, rank_env)


def whole_run(killed_at: tuple[int, int] | None, folder: Path) -> None:
    """Patch a run: killed with SIGKILL in this epoch, counted from 0, after so many of its steps; None: not at all."""
    resume, advance, log_eval = Run.resume, Run.advance, Run.log_eval

    def resume_and_write_names(run: Any, train_loader: Any, training: Any) -> None:
        resume(run, train_loader, training)
        names = {key: [name for name, _ in each] for key, each in weights_of_optimizers(vars(training)).items()}
        run.ctx.on_main((folder / "names").write_text, json.dumps(names))

    def advance_and_die(run: Any) -> None:
        advance(run)
        (epoch, steps), length = killed_at or (0, 0), run.run_log.steps_per_epoch
        if run.state.step == epoch * length + min(steps, length):
            run.checkpoints.writer.done.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def log_and_write_metrics(run: Any, metrics: Any, loader: Any) -> None:
        log_eval(run, metrics, loader)
        run.ctx.on_main((folder / f"evaluated_{loader.part}").write_text, json.dumps(metrics, default=float))

    patch.multiple(Run, resume=resume_and_write_names, advance=advance_and_die, log_eval=log_and_write_metrics).start()


def divided_run(dtype: str, plain: bool, folder: Path) -> None:
    """Patch a run that saves its state at the start, after a step, and after each of two epochs, and ends.

    plain: without what treats a batch as a whole by design: statistics of BatchNorm, random numbers, `mix`.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    resume, advance, constants, by_design = Run.resume, Run.advance, Constants(), dict[str, bool]()

    def write(run: Any) -> None:
        save_state(run.models, folder / f"step_{run.state.step}.pt", run.ctx)
        run.ctx.on_main((folder / "by_design").write_text, json.dumps([text for text in by_design if by_design[text]]))

    def resume_and_write(run: Any, train_loader: Any, training: Any) -> None:
        resume(run, train_loader, training)
        run.models = [part for part in vars(training).values() if isinstance(part, torch.nn.Module)]
        parts = [part for model in run.models for part in model.modules()]
        norms = [part for part in parts if hasattr(part, "running_mean") and not [*part.children()]]
        by_design.update({"BatchNorm": bool(norms), "mix": type(train_loader.hooks).mix is not BatchDataset.mix})
        write(run)
        if plain:
            patch.multiple(type(train_loader.hooks), mix=BatchDataset.mix).start()
            for norm in norms:
                patch.object(norm.eval(), "train", lambda mode=True, norm=norm: norm).start()
            constants.__enter__()

    def advance_and_write(run: Any) -> None:
        by_design["random numbers"] = constants.drawn
        advance(run)
        complete = run.epoch_is_complete()
        if complete or run.state.step == 1:
            write(run)
        if complete and run.state.epoch == 1:
            os._exit(0)

    patch.multiple(Run, resume=resume_and_write, advance=advance_and_write).start()
    patch_reading(getattr(torch, dtype), constants)
    if getattr(task, "LOSS_COMPARES_SAMPLES", False):
        note_gathers(folder / "gathers")
    init_ddp, views = DistributedDataParallel.__init__, "undivided" not in folder.name  # which a later pass overwrites

    def init_ddp_and_copy(ddp_model: Any, *arguments: Any, **options: Any) -> None:
        init_ddp(ddp_model, *arguments, **options | {"gradient_as_bucket_view": views})

    patch.multiple(DistributedDataParallel, __init__=init_ddp_and_copy).start()


class NoteGathers(TorchDispatchMode):
    """Makes the file `mark` if the block receives what other ranks have, by a gather of torch or a message."""

    supports_higher_order_operators = True

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace and re.search("gather|all_?to_?all|recv", function.overloadpacket.__name__):
            self.mark.touch()
        return function(*args, **(kwargs or {}))


def note_gathers(mark: Path) -> None:
    """Make this file if the forward pass or the loss gathers samples of all ranks."""

    def within(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            with NoteGathers(mark):
                return function(*arguments, **named)

        return call

    patch.multiple(task, forward=within(task.forward), compute_loss=within(task.compute_loss)).start()


def patch_reading(dtype: torch.dtype, constants: Constants) -> None:
    """Inputs have this dtype. A sampler draws which samples there are, and no constants."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def with_cast(read: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        return lambda *where: (map_tensors(batch, cast) for batch in read(*where))

    def read_order(sampler: Any, *where: int) -> Any:
        with constants.paused():
            return read(sampler, *where)

    read = ResumableSampler.read
    patch.multiple(ResumableSampler, read=read_order).start()
    patch.multiple(TrainLoader, _batches=with_cast(TrainLoader._batches)).start()
    patch.multiple(EvalLoader, __iter__=with_cast(EvalLoader.__iter__)).start()
