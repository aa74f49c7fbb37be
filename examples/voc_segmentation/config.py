"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option, speed_option = (
    partial(option, section=section) for section in ("data", "training", "speed")
)
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option(
        "voc", "voc: PASCAL VOC 2012; synthetic: generated pictures, for tests", choices=("voc", "synthetic")
    )
    data_dir: str = path_option("data", "directory of VOCdevkit; it is downloaded (2 GB) if it is missing")
    image_size: int | None = data_option(
        None, "height and width of the images, in pixels (default: 480; synthetic: 64)", min=8
    )
    batch_size: int = data_option(4, "training samples per process and forward pass", min=1, may_change=True)

    model: str = training_option(
        "", "a segmentation model of torchvision (default: deeplabv3_resnet101; synthetic: lraspp_mobilenet_v3_large)"
    )
    epochs: int = training_option(50, "passes over the training data", min=1, may_change=True)
    lr: float = training_option(0.02, "peak learning rate of the head; the backbone's is a tenth of it", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(5e-4, "weight decay of SGD", min=0)

    channels_last: bool = speed_option(False, "keep images and convolutions in channels-last order", may_change=True)

    def check(self) -> None:
        """Refuse options that contradict each other, and fill in the defaults that depend on the dataset."""
        super().check()
        # On a CPU, a step of the large model takes minutes.
        small = self.dataset == "synthetic"
        self.model = self.model or ("lraspp_mobilenet_v3_large" if small else "deeplabv3_resnet101")
        self.image_size = self.image_size or (64 if small else 480)

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        if self.dataset == "synthetic" or (Path(self.data_dir) / "VOCdevkit/VOC2012").is_dir():
            return self.dataset
        return f"voc: not in {self.data_dir}, will be downloaded"
