"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option(
        "cifar10", "cifar10; synthetic: generated discs, for tests", choices=("cifar10", "synthetic")
    )
    data_dir: str = path_option("data", "directory of cifar10; it is downloaded (170 MB) if it is missing")

    width: int | None = training_option(
        None,
        "channels of the layers at 16 x 16 pixels; the others have multiples of it (default: 64; synthetic: 16)",
        min=4,
    )
    epochs: int = training_option(25, "passes over the training data", min=1, may_change=True)
    lr: float = training_option(2e-4, "peak learning rate of both networks", above=0)
    beta1: float = training_option(0.5, "first beta of both Adam optimizers", min=0, max=0.9999)
    beta2: float = training_option(0.999, "second beta of both Adam optimizers", min=0, max=0.9999)
    lr_schedule: str = training_option("constant", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup_epochs: float = training_option(
        0, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        if self.dataset == "synthetic" or (Path(self.data_dir) / "cifar-10-batches-py").is_dir():
            return self.dataset
        return f"cifar10: not in {self.data_dir}, will be downloaded"

    def check(self) -> None:
        """Refuse options that contradict each other, and fill in the default that depends on the dataset."""
        super().check()
        self.width = self.width or (16 if self.dataset == "synthetic" else 64)  # 64 takes a CPU hours
        if self.width % 4:
            raise UsageError(f"--width {self.width} is not a multiple of 4")
