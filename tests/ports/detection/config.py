"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the pictures are made from --seed", choices=("synthetic",))
    batch_size: int = data_option(8, "training samples per process and forward pass", min=1, may_change=True)
    image_size: int = data_option(48, "height and width of an image in the model, in pixels", min=32)

    lr: float = training_option(5e-3, "peak learning rate", above=0)
    weight_decay: float = training_option(1e-2, "weight decay of AdamW", min=0)
    warmup_epochs: float = training_option(
        0.1, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )
