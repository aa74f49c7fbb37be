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
    image_size: int = data_option(24, "height and width of a crop, in pixels", min=8)

    width: int = training_option(32, "length of the features", min=1)
    dim: int = training_option(32, "length of the vectors that the loss compares", min=1)
    queue_size: int = training_option(128, "keys of earlier batches, which are the negatives", min=1)
    key_momentum: float = training_option(0.99, "decay of the moving average in the key encoder", min=0, max=1)
    temperature: float = training_option(0.2, "divides the cosines in the loss", above=0)
    lr: float = training_option(0.03, "peak learning rate", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(1e-4, "weight decay of SGD", min=0)
