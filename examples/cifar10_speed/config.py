"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option, speed_option = (
    partial(option, section=section) for section in ("data", "training", "speed")
)
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run. Optimizer and schedule are for a global batch of 1024."""

    dataset: str = data_option(
        "cifar10", "cifar10; synthetic: generated images, for tests", choices=("cifar10", "synthetic")
    )
    data_dir: str = path_option("data", "directory of cifar10; it is downloaded (170 MB) if it is missing")
    batch_size: int = data_option(1024, "training samples per process and forward pass", min=1, may_change=True)

    width: int | None = training_option(
        None, "channels of the first block; the others have 4 times as many (default: 64; synthetic: 16)", min=1
    )
    epochs: int = training_option(10, "passes over the training data", min=1, may_change=True)
    lr: float = training_option(10, "peak learning rate; independent of --momentum", above=0)
    warmup_epochs: float = training_option(
        2, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )
    momentum: float = training_option(0.85, "Nesterov momentum of SGD", above=0, max=0.9999)
    weight_decay: float = training_option(0.0133, "weight decay of SGD; independent of --lr", min=0)
    label_smoothing: float = training_option(0.2, "part of a label that is spread over all classes", min=0, max=1)
    test_views: int = training_option(
        6, "views of a test image to average: 1; 2: flipped too; 6: shifted too", may_change=True
    )

    channels_last: bool = speed_option(False, "keep images and convolutions in channels-last order", may_change=True)

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        if self.dataset == "synthetic" or (Path(self.data_dir) / "cifar-10-batches-py").is_dir():
            return self.dataset
        return f"cifar10: not in {self.data_dir}, will be downloaded"

    def check(self) -> None:
        """Refuse options that contradict each other, and fill in the default that depends on the dataset."""
        super().check()
        if self.test_views not in (1, 2, 6):
            raise UsageError(f"--test-views {self.test_views}: must be 1, 2 or 6")
        self.width = self.width or (16 if self.dataset == "synthetic" else 64)
