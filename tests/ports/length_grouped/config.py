"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the texts are made from --seed", choices=("synthetic",))
    # Neither follows from --batch-size or from the number of processes: a resumed run may change them.
    group_size: int = data_option(128, "samples of similar length; best the global batch or a multiple of it", min=1)
    groups: int = data_option(16, "number of groups that are sorted by length together", min=1)

    width: int = training_option(32, "width of the embedding and of the GRU", min=1)
    lr: float = training_option(5e-3, "peak learning rate", above=0)
    weight_decay: float = training_option(0.01, "weight decay of AdamW", min=0)
