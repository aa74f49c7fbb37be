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
    labelled: float = data_option(0.2, "part of the training samples that keep their label", above=0, max=1)
    noise: float = data_option(0.1, "standard deviation of the noise on a view", min=0)

    width: int = training_option(32, "length of the features", min=2)
    teacher_decay: float = training_option(0.98, "decay of the moving average in the teacher", min=0, max=1)
    consistency: float = training_option(5.0, "weight of the difference between student and teacher", min=0)
    lr: float = training_option(0.03, "peak learning rate", above=0)
    momentum: float = training_option(0.9, "momentum of SGD", min=0, max=1)
    weight_decay: float = training_option(2e-4, "weight decay of SGD", min=0)
