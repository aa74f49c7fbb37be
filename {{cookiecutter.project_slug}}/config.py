"""The options of this task, one per line: name, default, and what --help prints. Edit me.

An option that you add is `config.your_option` in main.py, model.py and data.py, and `--your-option` on the command
line. The options of every run (batch size, precision, checkpoints, processes) are in ddp/core/run_config.py; to change
the default of one, repeat its line here. Do not import torch here: launch_node.sh checks the options before it starts.
"""

from dataclasses import dataclass
from functools import partial

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

# One function for each section of --help: bool, int, float or str, or one of these | None, with min=, above=, max= or
# choices=. --evaluate takes those in data and training from the checkpoint. Another value at a resume is refused,
# unless the option has may_change=True. A path_option may differ between processes, and at a resume.
data_option, training_option, speed_option = (partial(option, section=each) for each in ("data", "training", "speed"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("cifar10", "cifar10, synthetic, imagefolder, or what you add to load_datasets")
    data_dir: str = path_option(
        "data", "directory of cifar10, or the one with train/CLASS/*, val/CLASS/* and test/CLASS/*"
    )
    val_fraction: float | None = data_option(
        None, "part of the training samples that validates (default: 0.1 without val/)", min=0, max=0.9, may_change=True
    )
    cache: str | None = path_option(None, "imagefolder: decode all images once into a file in this directory")
    image_size: int = data_option(32, "height and width of the images, in pixels", min=8)

    model: str = training_option("ToyModel", "ToyModel, or a classification model of torchvision, such as resnet18")
    lr: float = training_option(0.03, "peak learning rate", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(5e-4, "weight decay of SGD", min=0)

    channels_last: bool = speed_option(False, "keep images and convolutions in channels-last order", may_change=True)

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.cache is not None and self.dataset != "imagefolder":
            raise UsageError(f"--cache is for --dataset imagefolder: {self.dataset} is in memory anyway")
        if self.val_fraction is not None and self.dataset == "synthetic":
            raise UsageError("--val-fraction: synthetic has a validation set; remove the option")
