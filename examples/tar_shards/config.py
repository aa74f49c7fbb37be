"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option, speed_option = (partial(option, section=each) for each in ("data", "training", "speed"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("tar", "tar, or synthetic: small files that it makes", choices=("tar", "synthetic"))
    data_dir: str = path_option("data", "directory of train/*.tar, val/*.tar and test/*.tar")
    index_dir: str | None = path_option(None, "directory for the lists of their members (default: beside the files)")
    image_size: int = data_option(32, "height and width of the images, in pixels", min=8)

    model: str = training_option("ToyModel", "ToyModel, or a classification model of torchvision, such as resnet18")
    lr: float = training_option(0.03, "peak learning rate", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(5e-4, "weight decay of SGD", min=0)

    channels_last: bool = speed_option(False, "keep images and convolutions in channels-last order", may_change=True)

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        files = [*(Path(self.data_dir) / "train").glob("*.tar")]
        return f"{len(files)} files in {self.data_dir}/train" if self.dataset == "tar" else self.dataset
