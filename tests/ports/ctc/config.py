"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the recordings are made from --seed", choices=("synthetic",))
    batch_size: int = data_option(16, "training samples per process and forward pass", min=1, may_change=True)
    noise: float = data_option(0.3, "standard deviation of the noise; a tone has the amplitude 1", min=0)

    width: int = training_option(64, "channels of the network", min=1)
    layers: int = training_option(3, "convolutions after the first one", min=0)
    lr: float = training_option(3e-3, "peak learning rate", above=0)
    weight_decay: float = training_option(1e-2, "weight decay of AdamW", min=0)
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", above=0)
    warmup_epochs: float = training_option(
        0.5, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )
