"""The runs of a rehearsal, each in patched processes: with few samples, killed, or ended after two epochs."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

import main as project
import model as task
from config import Config
from ddp.checkpoint.state import weights_of_optimizers
from ddp.core.errors import UsageError
from ddp.data import loader, reader
from ddp.data.dataset import BatchDataset
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.sampler import ResumableSampler, Shuffled
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import keep_random_state
from ddp.distributed.tensors import map_tensors, named_leaves, whole
from ddp.training.ema import plain_attributes
from ddp.training.meter import Meter, close
from ddp.training.run import Run

SAVED_EVERY = 3  # steps from save to save
NUMBERS = (torch.Tensor, bool, int, float, complex)


class Constants(TorchDispatchMode):
    """Torch's random numbers are the same for each sample in any batch."""

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
        if name.startswith("bernoulli") or not results.is_floating_point():
            return results.fill_(name.startswith("bernoulli"))
        of_sample = results.shape[1:]  # from 0 to 1, so that a mask is neither empty nor full
        values = (torch.arange(of_sample.numel(), device=results.device) + 0.5) / of_sample.numel()
        return results.copy_(values.view(of_sample).expand_as(results))


def save_state(fields: dict[str, Any], path: Path, ctx: Any) -> None:
    """Write the numbers of what Training holds: `weights.FIELD.NAME`, `buffers...`, `counts...`. Call on every rank.

    Buffers are those that checkpoints hold, sorted: a queue may hold the samples of a step in another order. Of fields
    that are the owner's, and no models, the state_dict() counts.
    """
    state: dict[str, torch.Tensor] = {}
    for key, field in fields.items():
        if isinstance(field, torch.nn.Module):
            state |= {f"weights.{key}.{name}": whole(value).detach() for name, value in field.named_parameters()}
            saved = [name for name in field.state_dict() if not name.endswith("num_batches_tracked")]
            numbers = [(name, value) for name, value in field.named_buffers() if name in saved]
        else:
            getattr(field, "before_save", lambda: None)()
            leaves = [(".".join(map(str, [key, *keys])), value) for keys, value in named_leaves(field.state_dict())]
            found = [(name, value) for name, value in leaves if isinstance(value, NUMBERS)]
            found = [(name, value) for name, value in found if torch.is_tensor(value) or abs(value) < 2**63]
            tensors = [(name, torch.as_tensor(value)) for name, value in found]
            numbers = [(name, value) for name, value in tensors if value.dtype != torch.uint8]  # that of a generator
            key = "own"
        for name, value in numbers:
            if value.layout != torch.strided or value.is_quantized:
                continue
            real = torch.view_as_real(whole(value).resolve_conj()) if value.is_complex() else whole(value)
            kind = "buffers" if real.is_floating_point() else "counts"
            real = real if real.is_floating_point() else real.long()
            state[f"{kind}.{key}.{name}"] = real.detach().flatten().sort().values
    ctx.on_main(torch.save, state, path)


def compared_fields(training: Any) -> dict[str, Any]:
    """The models, and what else the owner has added to Training."""
    fields = {key: field for key, field in vars(training).items() if hasattr(field, "state_dict")}
    own = [key for key in fields if not type(fields[key]).__module__.startswith(("torch.", "ddp."))]
    own = [key for key in own if not isinstance(fields[key], torch.optim.Optimizer)]
    return {key: field for key, field in fields.items() if isinstance(field, torch.nn.Module) or key in own}


def narrowest(folder: Path, dtype: str) -> str:
    """The format with the fewest digits among `dtype` and those of the weights of a run."""
    formats = {value.dtype for name, value in torch.load(folder / "step_0.pt").items() if name.startswith("weights.")}
    noted = folder / "loss"  # which some libraries compute in float32, whatever the model has
    of_loss = noted.read_text() if noted.exists() else dtype
    few = f"{of_loss} loss" if (dtype, of_loss) == ("float64", "float32") else dtype
    return next((name for name in ("bfloat16", "float16") if getattr(torch, name) in formats), few)


def unsaved_state(training: Any) -> dict[str, str]:
    """Digests of what no checkpoint holds, by name: plain attributes of the models, and of what the owner wrote."""
    fields = {key: field for key, field in vars(training).items() if hasattr(field, "state_dict")}
    own = [key for key in fields if not type(fields[key]).__module__.startswith(("torch.", "ddp."))]
    chosen = {key: field for key, field in fields.items() if isinstance(field, torch.nn.Module) or key in own}
    return {f"{key}.{name}": one for key, field in chosen.items() for name, one in plain_attributes(field).items()}


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
    resume, advance, log_eval, end_epoch = Run.resume, Run.advance, Run.log_eval, Run.end_epoch

    def resume_and_write_names(run: Any, train_loader: Any, training: Any) -> None:
        resume(run, train_loader, training)
        run.rehearsed = training
        names = {key: [name for name, _ in each] for key, each in weights_of_optimizers(vars(training)).items()}
        run.ctx.on_main((folder / "names").write_text, json.dumps(names))

    def advance_and_die(run: Any) -> None:
        (epoch, steps), length = killed_at or (0, 0), run.run_log.steps_per_epoch
        if run.state.step + 1 == epoch * length + min(steps, length):  # before `advance` saves it
            run.checkpoints.writer.done.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        advance(run)

    def metrics_again(meter: Any, totals: Any) -> Any:
        with keep_random_state():
            again = metrics_of(meter, map_tensors(totals, torch.Tensor.clone))
        metrics = metrics_of(meter, totals)
        names = metrics if isinstance(metrics, Mapping) else ()
        if differ := [name for name in names if not close(metrics[name], again.get(name))]:
            what = f"compute_metrics in model.py returns another {differ[0]} for the same totals"
            raise UsageError(f"{what}: keep nothing but what batch_totals returns, and draw with a fixed seed")
        return metrics

    def log_and_write_metrics(run: Any, metrics: Any, loader: Any) -> None:
        log_eval(run, metrics, loader)
        run.ctx.on_main((folder / f"evaluated_{loader.part}").write_text, json.dumps(metrics, default=float))

    def end_epoch_and_write(run: Any, *arguments: Any) -> None:
        end_epoch(run, *arguments)
        run.ctx.on_main((folder / "unsaved").write_text, json.dumps(unsaved_state(run.rehearsed)))

    metrics_of = Meter._metrics_of
    patch.multiple(Meter, _metrics_of=metrics_again).start()
    patch.multiple(Run, resume=resume_and_write_names, advance=advance_and_die).start()
    patch.multiple(Run, log_eval=log_and_write_metrics, end_epoch=end_epoch_and_write).start()


def build_in_float64(build_model: Callable[..., torch.nn.Module], *arguments: Any) -> torch.nn.Module:
    """The model, also if it was made in another format."""
    model = build_model(*arguments)
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.to(torch.float64) if tensor.is_floating_point() else tensor.data
    return model


def norms_in(fields: Mapping[str, Any]) -> dict[str, list[torch.nn.Module]]:
    """The parts of the models whose state changes in each pass in training mode, by what they are."""
    models = [field for field in fields.values() if isinstance(field, torch.nn.Module)]
    parts = [part for model in models for part in model.modules()]
    old = [part for part in parts if any(isinstance(each, SpectralNorm) for each in part._forward_pre_hooks.values())]
    return {
        "BatchNorm": [part for part in parts if isinstance(part, _NormBase)],
        "spectral norm": [part for part in parts if isinstance(part, _SpectralNorm)] + old,
    }


def note_dtype_of_loss(path: Path) -> None:
    """Write the dtype of the loss to this file, unless main.py has a loss of its own."""
    compute_loss: Any = getattr(task, "compute_loss", None)

    def compute(*arguments: Any, **named: Any) -> Any:
        loss = compute_loss(*arguments, **named)
        path.write_text(str(getattr(loss, "dtype", "")).removeprefix("torch."))
        return loss

    if compute_loss is not None:
        patch.multiple(task, compute_loss=compute).start()


def divided_run(dtype: str, plain: bool, folder: Path) -> None:
    """Patch a run that saves its state at the start, after a step, and after each of two epochs, and ends.

    plain: without what depends on the division by design: state of BatchNorm and spectral norm, random numbers, `mix`.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    if dtype == "float64":
        patch.multiple(task, build_model=partial(build_in_float64, task.build_model)).start()
    resume, advance, constants, by_design = Run.resume, Run.advance, Constants(), dict[str, bool]()

    def write(run: Any) -> None:
        save_state(run.compared, folder / f"step_{run.state.step}.pt", run.ctx)
        run.ctx.on_main((folder / "by_design").write_text, json.dumps([text for text in by_design if by_design[text]]))

    def resume_and_write(run: Any, train_loader: Any, training: Any) -> None:
        resume(run, train_loader, training)
        run.compared = compared_fields(training)
        norms = norms_in(run.compared)
        by_design.update({name: bool(found) for name, found in norms.items()})
        by_design.update(mix=type(train_loader.hooks).mix is not BatchDataset.mix)
        write(run)
        if plain:
            patch.multiple(type(train_loader.hooks), mix=BatchDataset.mix).start()
            for norm in chain(*norms.values()):
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
    note_dtype_of_loss(folder / "loss")
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

    def draw() -> Any:
        with constants.paused():
            return draw_numbers()

    def start(*arguments: Any) -> Any:
        with constants.paused():
            return start_workers(*arguments)

    read, draw_numbers, start_workers = ResumableSampler.read, reader._draw, loader.start_workers
    patch.object(reader, "_draw", draw).start()
    patch.object(loader, "start_workers", start).start()
    patch.multiple(ResumableSampler, read=read_order).start()
    patch.multiple(TrainLoader, _batches=with_cast(TrainLoader._batches)).start()
    patch.multiple(EvalLoader, __iter__=with_cast(EvalLoader.__iter__)).start()
