"""RunConfig: the options that every training run has, whatever its task. `Config` in config.py adds those of the task."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from ddp.core.config_file import read_words
from ddp.core.errors import UsageError, report_error
from ddp.core.options import OptionParser, directory, flag_of, non_negative, number, option, path, positive, url

Config = TypeVar("Config", bound="RunConfig")
DEFAULT_PARENT = "runs"  # of output directories; the rest of the default follows from the data and the model
RESTARTS_VARIABLE = "DDP_RESTARTS_LEFT"  # launch_node.sh sets it, if it starts again after the loss of a process
CHECK_VARIABLE = "DDP_CHECK"  # launch_node.sh --check sets it: the ranks then run preflight.check instead of main
MAX_PROCESSES_PER_CORE = 16  # each process takes some hundred MB
_data, _training, _speed, _run, _distributed = (
    partial(option, section=section) for section in ("data", "training", "speed", "run", "distributed")
)


# fmt: off
@dataclasses.dataclass
class RunConfig:
    """The options of a run. A task adds its own, and may override data_status and check."""

    given = frozenset[str]()  # the names of those on the command line

    batch_size: int = _data(64, "training samples per process and forward pass", kind=positive, may_change_on_resume=True)
    workers: int | None = _data(None, "DataLoader workers per process; default: 0 for data in memory, else by cores", kind=non_negative, may_change_on_resume=True, per_process=True)

    epochs: int = _training(10, "passes over the training data", kind=positive, may_change_on_resume=True)
    max_steps: int | None = _training(None, "stop after this many optimizer steps (the schedule still spans --epochs)", kind=positive, may_change_on_resume=True)
    lr_schedule: str = _training("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup_epochs: float = _training(1, "epochs in which the learning rate rises from 0; may be a fraction", kind=number(float, 0))
    scale_lr: bool = _training(False, "multiply --lr by global batch / 64 (linear scaling)")
    grad_accum_steps: int = _training(1, "forward passes per optimizer step, with one all-reduce", kind=positive, may_change_on_resume=True)
    clip_grad: float | None = _training(None, "clip the gradient to this norm", kind=number(float, 0, exclusive=True))
    ema: float | None = _training(None, "evaluate an exponential moving average of the weights with this decay, such as 0.999", kind=number(float, 0, max=1))
    patience: int | None = _training(None, "stop after this many epochs without a better validation metric (metric_for_best_model)", kind=positive, may_change_on_resume=True)
    evaluate: bool = _training(False, "evaluate the newest checkpoint of OUTPUT_DIR, or the one of --resume PATH, with its own options; do not train", may_change_on_resume=True)

    precision: str = _speed("fp32", "number format of the forward and backward pass", choices=("fp32", "bf16", "fp16"))
    matmul_precision: str = _speed("highest", "fp32 matrix products: high allows TF32 on GPUs, and medium bf16 (torch.set_float32_matmul_precision)", choices=("highest", "high", "medium"))
    compile: bool = _speed(False, "compile the model (torch.compile)", may_change_on_resume=True)
    sync_bn: bool = _speed(False, "BatchNorm over the batches of all processes (GPU only)")
    comm_hook: str = _speed("none", "compress gradients on the network", choices=("none", "fp16", "bf16", "powersgd"))
    profile: bool = _speed(False, "write a trace of steps 10 to 15 to OUTPUT_DIR/profile", may_change_on_resume=True)

    output_dir: str = _run("", "directory for everything that the run writes (default: runs/DATA-MODEL)", kind=directory, may_change_on_resume=True, per_process=True)
    resume: str = _run("auto", "auto: from the newest checkpoint of OUTPUT_DIR, if any; never: refuse to resume; or the path of a checkpoint", kind=path, may_change_on_resume=True, per_process=True)
    init_from: str | None = _run(None, "begin a new run with these weights: the path of a checkpoint or of a state_dict; or torchvision: those of --model", kind=path, per_process=True)
    checkpoint_every: int | None = _run(None, "save every N steps as well as after every epoch", kind=positive, may_change_on_resume=True)
    keep_checkpoints: int = _run(3, "number of checkpoints to keep, in addition to best.pt", kind=number(int, 2), may_change_on_resume=True)
    log_every: int = _run(100, "log every N steps, and at the end of each epoch", kind=positive, may_change_on_resume=True)
    seed: int = _run(0, "seed of weights, order, augmentation and dropout", kind=number(int, 0, max=2**32 - 1))
    deterministic: bool = _run(False, "only deterministic algorithms: resumes bit for bit on GPUs and with more than 2 processes; slower", may_change_on_resume=True)
    strict_resume: bool = _run(False, "refuse to resume with another number of processes", may_change_on_resume=True)

    device: str = _distributed("auto", "auto: the GPUs if there are any", choices=("auto", "cuda", "cpu"), may_change_on_resume=True)
    backend: str = _distributed("auto", "auto: nccl if every process has its own GPU, else gloo", choices=("auto", "nccl", "gloo", "mpi"), may_change_on_resume=True)
    nproc: int | None = _distributed(None, "start this many processes, on this machine; launch_node.sh does so on each of several machines", kind=positive, alias="--nproc-per-node", may_change_on_resume=True, per_process=True)
    rank: int | None = _distributed(None, "rank of this process, if no launcher sets it", kind=non_negative, may_change_on_resume=True, per_process=True)
    world_size: int | None = _distributed(None, "number of processes, if no launcher sets it", kind=positive, may_change_on_resume=True)
    local_rank: int | None = _distributed(None, "rank of this process on its machine, if no launcher sets it", kind=non_negative, may_change_on_resume=True, per_process=True)
    init_method: str | None = _distributed(None, "where the processes connect: tcp://HOST:PORT or file:///PATH", kind=url, may_change_on_resume=True, per_process=True)
    warn_after: float = _distributed(30, "print where each rank is when one has waited this many seconds for another", kind=number(float, 1, max=10**7), may_change_on_resume=True, per_process=True)
    timeout: float = _distributed(600, "seconds to wait for another process before giving up", kind=number(float, 1, max=10**7), may_change_on_resume=True, per_process=True)
# fmt: on

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
        parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
        given = vars(parser.parse_args(arguments))
        if file := given.pop("config", None):
            given = _options_of_file(parser, file) | given
        config = cls(**given)
        config.given = frozenset(given)
        if config.evaluate:  # the rest, once the options of the checkpoint are known
            RunConfig.check(config)
        else:
            config.check()
        return config

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        return "-"

    def check(self) -> None:
        """Refuse options that contradict each other. Raises UsageError."""
        by_hand = {"--rank": self.rank, "--world-size": self.world_size, "--init-method": self.init_method}
        missing = [name for name, value in by_hand.items() if value is None]
        given = [name for name in by_hand if name not in missing]
        if given and missing:
            raise UsageError(f"{', '.join(given)} needs {', '.join(missing)} as well: pass all three, or none")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise UsageError(f"--rank {self.rank} must be below --world-size {self.world_size}")
        if self.nproc is not None:
            if given or self.local_rank is not None:
                others = "--rank, --world-size, --local-rank and --init-method"
                raise UsageError(f"--nproc starts the processes itself: remove {others}")
            check_process_count("--nproc", self.nproc)
        is_path = self.resume not in ("auto", "never")
        if not self.resume or (is_path and os.path.isdir(self.resume)):  # rank 0 checks whether the file exists
            raise UsageError(f"--resume: {self.resume!r} is not auto, never or the path of a checkpoint file")
        if self.warmup_epochs > self.epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs} is longer than --epochs {self.epochs}")
        if self.ema == 1:
            raise UsageError("--ema 1 would never follow the weights: pass less than 1, such as 0.999")
        if self.init_from == "":
            raise UsageError("--init-from: '' is neither torchvision nor the path of a file")
        if self.init_from is not None and (self.evaluate or is_path):
            other = "--evaluate" if self.evaluate else f"--resume {self.resume}"
            raise UsageError(f"--init-from begins a new run, and {other} does not: remove one of them")
        if self.evaluate and self.resume == "never":
            raise UsageError("--evaluate needs a checkpoint: remove --resume never")
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError("--backend nccl needs --device cuda: NCCL works between GPUs only")
        if self.sync_bn and self.device == "cpu":
            raise UsageError("--sync-bn needs a GPU: torch has no SyncBatchNorm for --device cpu")

    def shared_options(self) -> dict[str, Any]:
        """The options that must be the same in all processes of a run, as `--name`."""
        names = [item.name for item in dataclasses.fields(self) if not item.metadata["per_process"]]
        return {flag_of(name): getattr(self, name) for name in names}


def _options_of_file(parser: OptionParser, path: str) -> dict[str, Any]:
    try:
        return vars(parser.parse_args(read_words(path)))
    except UsageError as error:
        raise error if str(error).startswith("--config") else UsageError(f"--config {path}: {error}") from error


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """The options that have a value and may change the result of a run."""
    fields = [item for item in dataclasses.fields(config) if item.metadata["section"] in ("data", "training")]
    values = {item.name: getattr(config, item.name) for item in fields if not item.metadata["per_process"]}
    values |= {"seed": config.seed, "precision": config.precision}
    return {name: value for name, value in values.items() if value is not None and name != "evaluate"}


def check_process_count(flag: str, processes: int) -> None:
    """Refuse so many processes that this machine would become unusable."""
    cores = os.cpu_count() or 1
    if processes > MAX_PROCESSES_PER_CORE * cores:
        limit = f"at most {MAX_PROCESSES_PER_CORE * cores} processes, {MAX_PROCESSES_PER_CORE} per core"
        raise UsageError(f"{flag} {processes}: this machine has {cores} cores and runs {limit}")


def check_command_line(config_class: type[RunConfig]) -> None:
    """`python config.py OPTIONS`: exit with 2 and one line if main.py would refuse these options."""
    try:
        config_class.parse()
    except UsageError as error:
        report_error(error)
        sys.exit(error.exit_code)
