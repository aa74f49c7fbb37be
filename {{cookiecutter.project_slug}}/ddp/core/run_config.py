"""RunConfig: the options of every training run, whatever its task. `Config` in config.py adds those of the task."""

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddp.core.errors import UsageError
from ddp.core.options import OptionParser, file_arguments, flag_of, option, path
from ddp.core.parts import of_parts

Config = TypeVar("Config", bound="RunConfig")
RESUME_WORDS = ("auto", "must", "never")  # of --resume; anything else is a path
DEFAULT_PARENT = "runs"  # of output directories; the rest of the default follows from the data and the model
RESTARTS_VARIABLE = "DDP_RESTARTS_LEFT"  # launch_node.sh sets it while a restart is left
ELASTIC_VARIABLE = "DDP_ELASTIC"  # launch_node.sh sets it with --nnodes MIN:MAX: the number of processes with MAX nodes
ROUND_VARIABLE = "DDP_ROUND"  # launch_node.sh sets it: the prefix of what the ranks write to its store
NOTICED_VARIABLE = "DDP_NOTICED_AT"  # launch_node.sh sets it at a restart: when it noticed that a process was lost
MAX_PROCESSES_PER_CORE = 16  # each process takes a few hundred MB
MAX_WAIT_S = 10**7
BACKENDS = ("auto", "nccl", "gloo", "mpi")
# The sections of --help. A resumed run may change the options of the last two, and those with may_change=True.
_data, _training, _speed = (partial(option, section=section) for section in ("data", "training", "speed"))
_run, _distributed = (partial(option, section=section, may_change=True) for section in ("run", "distributed"))
_path = partial(_run, metavar="PATH", per_process=True)
_process = partial(_distributed, per_process=True)


@dataclasses.dataclass
class RunConfig(*of_parts("Options")):  # type: ignore[misc]
    """The options of a run. A task adds its own, and may override check."""

    given = frozenset[str]()  # the names of those on the command line or in the file of --config
    passes_given = 0  # --grad-accum-steps as given, where fewer nodes than MAX make more passes

    batch_size: int = _data(64, "training samples per process and forward pass", min=1, may_change=True)
    eval_batch_size: int | None = _data(
        None, "samples per batch of an evaluation (default: --batch-size, or many in memory)", min=1, may_change=True
    )
    workers: int | None = _data(
        None, "DataLoader workers per process (default: 0 for data in memory, else by cores)", min=0, per_process=True
    )

    epochs: int = _training(10, "passes over the training data", min=1, may_change=True)
    max_steps: int | None = _training(None, "N optimizer steps; the schedule spans --epochs", min=1, may_change=True)
    lr_schedule: str = _training("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup_epochs: float = _training(1, "epochs in which the learning rate rises from 0; may be a fraction", min=0)
    scale_lr: bool = _training(False, "multiply --lr by global batch / 64 (linear scaling)")
    grad_accum_steps: int = _training(1, "forward passes per step, with one all-reduce", min=1, may_change=True)
    clip_grad: float | None = _training(None, "clip the gradient to this norm", above=0)
    ema: float | None = _training(None, "evaluate a moving average of the weights, decay such as 0.999", min=0, max=1)
    patience: int | None = _training(None, "stop after N epochs without a better validation", min=1, may_change=True)
    evaluate: bool = _training(
        False, "no training: evaluate --resume PATH, or the newest checkpoint in --output-dir", may_change=True
    )

    precision: str = _speed("fp32", "number format of the forward and backward pass", choices=("fp32", "bf16", "fp16"))
    matmul_precision: str = _speed(
        "highest", "fp32 matrix products on GPUs: high allows TF32, medium bf16", choices=("highest", "high", "medium")
    )
    compile: bool = _speed(False, "compile the model (torch.compile)", may_change=True)
    sync_bn: bool = _speed(False, "BatchNorm over the batches of all processes (GPU only)")

    output_dir: str = _path("", "directory for everything that the run writes (default: runs/DATA-MODEL)")
    resume: str = _path(
        "auto", "auto: from the newest checkpoint, if any; must: exit with 4 if there is none; never; or a checkpoint"
    )
    init_from: str | None = _path(None, "initial weights: a checkpoint, a state_dict, or torchvision", may_change=False)
    checkpoint_every: int | None = _run(None, "save every N steps as well as after every epoch", min=1)
    keep_checkpoints: int = _run(3, "number of checkpoints to keep, in addition to best.pt", min=2)
    log_every: int = _run(100, "log every N steps, and at the end of each epoch", min=1)
    seed: int = _run(0, "seed of weights, order, augmentation and dropout", min=0, max=2**32 - 1, may_change=False)
    deterministic: bool = _run(False, "deterministic algorithms: exact resume on GPUs and 3+ processes; slower")
    accept_changed_data: bool = _run(False, "resume although the samples are others than in the checkpoint")
    strict_resume: bool = _run(False, "refuse to resume with another number of processes")

    device: str = _distributed("auto", "auto: the GPUs if there are any", choices=("auto", "cuda", "cpu"))
    backend: str = _distributed("auto", "auto: nccl on GPUs, which needs one per process, else gloo", choices=BACKENDS)
    nproc: int | None = _process(None, "start N processes on this machine", min=1, alias="--nproc-per-node")
    rank: int | None = _process(None, "rank of this process, if no launcher sets it", min=0)
    world_size: int | None = _distributed(None, "number of processes, if no launcher sets it", min=1)
    local_rank: int | None = _process(None, "rank of this process on its machine, if no launcher sets it", min=0)
    init_method: str | None = _process(None, "where processes connect: tcp://HOST:PORT or file:///PATH", metavar="URL")
    warn_after: float = _process(30, "print where each rank is once one has waited X seconds", min=1, max=MAX_WAIT_S)
    timeout: float = _process(600, "seconds to wait for another process before giving up", min=1, max=MAX_WAIT_S)

    @classmethod
    def parse(cls: type[Config], arguments: Sequence[str] | None = None) -> Config:
        """Read a command line, sys.argv by default. Raises UsageError with one line that names the option."""
        parser = OptionParser(
            usage="python main.py [OPTIONS]",
            description="Train a model on one or many processes.",
            epilog="Hyphens and underscores are both accepted in option names. README.md lists the exit codes.",
        )
        parser.add_options(cls)
        text = "read options from a TOML file, or from the config.json of a run; the command line wins"
        parser.add_argument("--config", metavar="FILE", type=path, default=argparse.SUPPRESS, help=text)
        given = vars(parser.parse_args(arguments))
        if file := given.pop("config", None):
            try:
                given = vars(parser.parse_args(file_arguments(file))) | given
            except UsageError as error:
                raise UsageError(f"--config {file}: {error}") from error
        config = cls(**given)
        config.given = frozenset(given)
        check = RunConfig.check if config.evaluate else cls.check  # the rest, once the checkpoint's options are known
        check(config)
        return config

    def check(self) -> None:
        """Refuse options that contradict each other. Raises UsageError."""
        url = re.fullmatch(r"tcp://.+:([0-9]+)|file:///.+", self.init_method or "")
        if self.init_method is not None and (url is None or not 0 < int(url[1] or 1) < 65536):
            raise UsageError(f"--init-method: {self.init_method!r} is not tcp://HOST:PORT or file:///PATH")
        by_hand = {"--rank": self.rank, "--world-size": self.world_size, "--init-method": self.init_method}
        given = [name for name, value in by_hand.items() if value is not None]
        if given and len(given) < len(by_hand):
            raise UsageError(f"{', '.join(given)}: pass all of {', '.join(by_hand)}, or none of them")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise UsageError(f"--rank {self.rank} must be below --world-size {self.world_size}")
        if self.nproc is not None:
            if given or self.local_rank is not None:
                others = ", ".join([*by_hand, "--local-rank"])
                raise UsageError(f"--nproc starts the processes itself: remove {others}")
            check_process_count("--nproc", self.nproc)
        is_path = self.resume not in RESUME_WORDS
        if is_path and os.path.isdir(self.resume):  # rank 0 checks whether the file exists
            raise UsageError(f"--resume: {self.resume!r} is not auto, must, never or the path of a checkpoint file")
        if self.warmup_epochs > self.epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs} is longer than --epochs {self.epochs}")
        if self.ema == 1:
            raise UsageError("--ema 1 would never follow the weights: pass less than 1, such as 0.999")
        if self.init_from is not None and (self.evaluate or is_path):
            other = "--evaluate" if self.evaluate else f"--resume {self.resume}"
            raise UsageError(f"--init-from begins a new run, and {other} does not: remove one of them")
        if self.evaluate and self.resume == "never":
            raise UsageError("--evaluate needs a checkpoint: remove --resume never")
        if self.evaluate and not (is_path or self.output_dir):  # the default one depends on options of the checkpoint
            raise UsageError("--evaluate: pass --resume PATH of a checkpoint, or --output-dir of its run")
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError("--backend nccl needs --device cuda: NCCL works between GPUs only")
        if self.sync_bn and self.device == "cpu":
            raise UsageError("--sync-bn needs a GPU: torch has no SyncBatchNorm for --device cpu")
        for options in of_parts("Options"):
            if hasattr(options, "check"):
                options.check(self)

    def rehearse(self) -> None:
        """Unset what a rehearsal must not use."""
        for options in of_parts("Options"):
            if hasattr(options, "rehearse"):
                options.rehearse(self)

    def shared_options(self) -> dict[str, Any]:
        """The options that must be the same in all processes of a run, as `--name`."""
        shared = (item.name for item in dataclasses.fields(self) if not item.metadata["per_process"])
        return {flag_of(name): getattr(self, name) for name in shared}

    def output_dirs(self) -> list[Path]:
        """--output-dir; or every directory that may be the default one, which only the workers know."""
        return [Path(self.output_dir)] if self.output_dir else sorted(Path(DEFAULT_PARENT).glob("*"))


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """The options that have a value and may change the result of a run."""
    fields = [item for item in dataclasses.fields(config) if item.metadata["section"] in ("data", "training")]
    names = [item.name for item in fields if not item.metadata["per_process"] and item.name != "evaluate"]
    values = {name: getattr(config, name) for name in (*names, "seed", "precision")}
    return {name: value for name, value in values.items() if value is not None}


def check_process_count(flag: str, processes: int) -> None:
    """Refuse so many processes that this machine would become unusable."""
    cores = os.cpu_count() or 1
    if processes > MAX_PROCESSES_PER_CORE * cores:
        limit = f"at most {MAX_PROCESSES_PER_CORE * cores} processes, {MAX_PROCESSES_PER_CORE} per core"
        raise UsageError(f"{flag} {processes}: this machine has {cores} cores and runs {limit}")
