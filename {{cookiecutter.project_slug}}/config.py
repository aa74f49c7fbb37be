"""Every option of the command line, one a line: its name, its default, and what it does.

To add an option, add a line to `Config`; it is then `config.your_option` everywhere. This file imports no torch, so that
`launch_node.sh` can check a command line (`python config.py OPTIONS`) before it starts anything.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from ddp.errors import UsageError, report


def _shown_as(metavar: str) -> Callable[[Callable[[str], Any]], Any]:
    """What --help shows in place of the value."""

    def mark(read: Any) -> Any:
        read.metavar = metavar
        return read

    return mark


HUGE = 10**12  # no option can mean more than that
MOST_PER_CORE = 16  # processes: each takes some hundred MB


def number(kind: type, least: float, *, above: bool = False, most: float = HUGE) -> Callable[[str], Any]:
    """A reader of numbers of `kind` from `least` (or above it) to `most`."""
    allowed = f"{'a whole number' if kind is int else 'a number'} {'above' if above else 'from'} {least}"
    allowed += "" if most == HUGE else f" to {most}"  # a bound of its own is worth saying

    @_shown_as("N" if kind is int else "X")
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (above and value == least):  # nan is in no range
            why = "too large" if math.inf > value > HUGE == most else f"not {allowed}"
            raise argparse.ArgumentTypeError(f"{text!r} is {why}")
        return value

    return read


@_shown_as("DIR")
def folder(text: str) -> str:
    """A path; it need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not the path of a folder")
    return text


@_shown_as("NAME")
def name(text: str) -> str:
    """Any word."""
    return text


@_shown_as("{auto,never,PATH}")
def resume_point(text: str) -> str:
    """`auto`, `never`, or the path of a file. Only rank 0 needs to have the file, so that it looks whether it is there."""
    if not text or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, never or the path of a checkpoint file")
    return text


@_shown_as("URL")
def init_method(text: str) -> str:
    """`tcp://HOST:PORT` or `file:///PATH`."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if text.startswith("tcp://") and host and port.isdigit() and 0 < int(port) < 65536:
        return text
    if text.startswith("file:///") and len(text) > len("file:///"):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not tcp://HOST:PORT or file:///PATH")


count = number(int, 0)
positive = number(int, 1)


def _section(title: str) -> Callable[..., Any]:
    """A maker of options that `--help` shows under `title`.

    free=True marks what a resumed run may change; with any other option changed, it would be another run.
    """

    def option(default: Any, help: str, *, kind: Any = name, choices: Sequence[str] = (), free: bool = False) -> Any:
        if kind is name and isinstance(default, int | float) and not isinstance(default, bool):
            kind = number(type(default), -HUGE)
        return field(default=default, metadata=dict(title=title, help=help, kind=kind, choices=choices, free=free))

    return option


_data, _training, _speed, _run, _dist = map(_section, ("data", "training", "speed", "run", "distributed"))

# What may differ between the processes of one run.
OF_A_PROCESS = (
    *("data_dir", "cache", "output_dir", "workers", "resume"),
    *("nproc", "rank", "local_rank", "init_method", "timeout"),
)


# fmt: off
@dataclass
class Config:
    """The options of one run."""

    dataset: str = _data("cifar10", "what to train on", choices=("cifar10", "synthetic", "imagefolder"))
    data_dir: str = _data("data", "where cifar10 is kept, or the folder with train/CLASS/* and val/CLASS/* or test/CLASS/*", kind=folder, free=True)
    batch_size: int = _data(64, "samples per process and forward pass of the training", kind=positive, free=True)
    workers: int | None = _data(None, "DataLoader processes per process; default: 0 for data held in memory, else by cores", kind=count, free=True)
    cache: str | None = _data(None, "imagefolder: decode all images once, into a file in this folder, and read them from there", kind=folder, free=True)
    image_size: int = _data(32, "height and width of the images, in pixels", kind=number(int, 8))

    model: str = _training("ToyModel", "ToyModel, or a classification model of torchvision, such as resnet18")
    epochs: int = _training(10, "passes over the training data", kind=positive, free=True)
    max_steps: int | None = _training(None, "stop after this many optimizer steps (the schedule still spans --epochs)", kind=positive, free=True)
    lr: float = _training(0.03, "peak learning rate", kind=number(float, 0, above=True))
    momentum: float = _training(0.9, "momentum of SGD", kind=number(float, 0, most=1))
    weight_decay: float = _training(5e-4, "weight decay of SGD", kind=number(float, 0))
    lr_schedule: str = _training("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup_epochs: float = _training(1, "epochs in which the learning rate rises from 0; may be a fraction", kind=number(float, 0))
    scale_lr: bool = _training(False, "multiply --lr by global batch / 64 (linear scaling)")
    grad_accum_steps: int = _training(1, "forward passes per optimizer step, with one all-reduce", kind=positive, free=True)
    clip_grad: float | None = _training(None, "clip the gradient to this norm", kind=number(float, 0, above=True))
    evaluate: bool = _training(False, "evaluate the newest checkpoint, or the one of --resume PATH, and do not train", free=True)

    precision: str = _speed("fp32", "arithmetic of the forward and backward pass", choices=("fp32", "bf16", "fp16"))
    compile: bool = _speed(False, "compile the model (torch.compile)", free=True)
    channels_last: bool = _speed(False, "keep images and convolutions in channels-last order", free=True)
    sync_bn: bool = _speed(False, "BatchNorm over the batches of all processes (GPU only)")
    comm_hook: str = _speed("none", "compress gradients on the network", choices=("none", "fp16", "bf16", "powersgd"))
    profile: bool = _speed(False, "write a trace of steps 10 to 15 to OUTPUT_DIR/profile", free=True)

    output_dir: str = _run("", "everything that the run writes goes here (default: runs/DATASET-MODEL)", kind=folder, free=True)
    resume: str = _run("auto", "auto: from the newest checkpoint of OUTPUT_DIR, if any; never: refuse to; or the path of a checkpoint to start from", kind=resume_point, free=True)
    checkpoint_every: int | None = _run(None, "save every N steps as well as after every epoch", kind=positive, free=True)
    keep_checkpoints: int = _run(3, "how many checkpoints to keep, best.pt aside", kind=number(int, 2), free=True)
    log_every: int = _run(100, "log every N steps, and where an epoch ends", kind=positive, free=True)
    seed: int = _run(0, "of weights, order, augmentation and dropout", kind=number(int, 0, most=2**32 - 1))
    deterministic: bool = _run(False, "only deterministic algorithms: resumes bit for bit on GPUs and with more than 2 processes; slower", free=True)
    strict_resume: bool = _run(False, "refuse to resume with another number of processes", free=True)

    device: str = _dist("auto", "auto takes the GPUs if there are any", choices=("auto", "cuda", "cpu"), free=True)
    backend: str = _dist("auto", "auto takes nccl where every process has a GPU of its own, else gloo", choices=("auto", "nccl", "gloo", "mpi"), free=True)
    nproc: int | None = _dist(None, "start this many processes on this machine", kind=positive, free=True)
    rank: int | None = _dist(None, "of this process, when no launcher says it", kind=count, free=True)
    world_size: int | None = _dist(None, "how many processes there are, when no launcher says it", kind=positive, free=True)
    local_rank: int | None = _dist(None, "of this process on its machine, when no launcher says it", kind=count, free=True)
    init_method: str | None = _dist(None, "where the processes meet: tcp://HOST:PORT or file:///PATH", kind=init_method, free=True)
    timeout: float = _dist(600, "seconds to wait for another process before giving up", kind=number(float, 1, most=10**7), free=True)
# fmt: on

    def shared(self) -> dict[str, Any]:
        """The options that must be the same for all processes of a run, as `--name`."""
        names = [item.name for item in fields(self) if item.name not in OF_A_PROCESS]
        return {"--" + name.replace("_", "-"): getattr(self, name) for name in names}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, once, and not once a process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see --help")


def _parser() -> Parser:
    parser = Parser(
        prog="main.py",
        usage="python main.py [OPTIONS]",
        description="Train a model on one or many processes.",
        epilog="Hyphens and underscores are both accepted in option names. Exit codes are in README.md.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {}
    for item in fields(Config):
        title, help, kind, choices = (item.metadata[key] for key in ("title", "help", "kind", "choices"))
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        flag = "--" + item.name.replace("_", "-")
        if item.default is False:
            group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=help)
            continue
        shown = help if item.default in (None, "") else f"{help} (default: {item.default})"
        metavar = None if choices else kind.metavar
        allowed = choices or None
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, choices=allowed, metavar=metavar, help=shown)
    return parser


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Read a command line. Raises UsageError with one line that names the option and what is allowed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parser().parse_args([_hyphens(argument) for argument in arguments])
    config = Config(**vars(given))  # the defaults are the dataclass's
    _check_together(config)
    config.output_dir = config.output_dir or f"runs/{config.dataset}-{config.model}"
    return config


def _hyphens(argument: str) -> str:
    """`--batch_size=8` as `--batch-size=8`; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _check_together(config: Config) -> None:
    """Refuse options that contradict each other."""
    by_hand = {"--rank": config.rank, "--world-size": config.world_size, "--init-method": config.init_method}
    missing = [name for name, value in by_hand.items() if value is None]
    if 0 < len(missing) < len(by_hand):
        given = [name for name in by_hand if name not in missing]
        raise UsageError(f"{', '.join(given)} given without {', '.join(missing)}: give all three, or none")
    if config.rank is not None and config.world_size is not None and config.rank >= config.world_size:
        raise UsageError(f"--rank {config.rank} must be below --world-size {config.world_size}")
    if config.nproc is not None and (not missing or config.local_rank is not None):
        raise UsageError(
            "--nproc starts the processes itself: leave out --rank, --world-size, --local-rank and --init-method"
        )
    if config.nproc is not None:
        check_processes("--nproc", config.nproc)
    if config.evaluate and config.resume == "never":
        raise UsageError("--evaluate needs a checkpoint: leave out --resume never")
    if config.cache is not None and config.dataset != "imagefolder":
        raise UsageError(f"--cache is for --dataset imagefolder: {config.dataset} is in memory anyway")
    if config.warmup_epochs > config.epochs:
        raise UsageError(f"--warmup-epochs {config.warmup_epochs} is longer than --epochs {config.epochs}")
    if config.backend == "nccl" and config.device == "cpu":
        raise UsageError("--backend nccl needs --device cuda: NCCL works between GPUs only")
    if config.sync_bn and config.device == "cpu":
        raise UsageError("--sync-bn needs a GPU: torch has no SyncBatchNorm for --device cpu")


def check_processes(option: str, processes: int) -> None:
    """Refuse so many processes that this machine would stand still."""
    cores = os.cpu_count() or 1
    if processes > MOST_PER_CORE * cores:
        most = f"at most {MOST_PER_CORE * cores} processes, {MOST_PER_CORE} for each of its {cores} cores"
        raise UsageError(f"{option} {processes}: on this machine, {most}")


if __name__ == "__main__":
    try:
        parse()
    except UsageError as error:
        report(error)
        sys.exit(error.exit_code)
