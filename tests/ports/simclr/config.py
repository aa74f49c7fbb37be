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
    image_size: int = data_option(24, "height and width of a view, in pixels", min=8)
    jitter: float = data_option(0.25, "strength of the change of colours", min=0, max=1)

    width: int = training_option(32, "length of the features", min=1)
    dim: int = training_option(32, "length of the vectors that the loss compares", min=1)
    temperature: float = training_option(0.1, "divides the cosines in the loss", above=0)
    lr: float = training_option(3e-3, "peak learning rate", above=0)
    weight_decay: float = training_option(1e-6, "weight decay of Adam", min=0)
