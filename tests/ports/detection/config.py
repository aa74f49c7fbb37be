"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import number, option, positive
from ddp.core.run_config import RunConfig, check_command_line

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


# fmt: off
@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the pictures are made from --seed", choices=("synthetic",))
    batch_size: int = data_option(8, "training samples per process and forward pass", kind=positive, may_change_on_resume=True)
    min_size: int = data_option(48, "pixels of the shorter side of an image in the model", kind=number(int, 32))

    lr: float = training_option(5e-3, "peak learning rate", kind=number(float, 0, exclusive=True))
    weight_decay: float = training_option(1e-2, "weight decay of AdamW", kind=number(float, 0))
    warmup_epochs: float = training_option(0.1, "epochs in which the learning rate rises from 0; may be a fraction", kind=number(float, 0))
# fmt: on


if __name__ == "__main__":
    check_command_line(Config)
