"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the images are made from --seed", choices=("synthetic",))

    width: int = training_option(16, "channels of the first convolution", min=1)
    dropout: float = training_option(0.1, "dropout before the last layer", min=0, max=1)
    lr: float = training_option(0.05, "peak learning rate", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(5e-4, "weight decay of SGD", min=0)
    rho: float = training_option(0.05, "distance of the second gradient's weights from the weights", min=0)
