"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import directory, number, option
from ddp.core.run_config import RunConfig, check_command_line

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


# fmt: off
@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "tar: the files of DATA_DIR; synthetic: small files made from --seed", choices=("tar", "synthetic"))
    data_dir: str = data_option("data", "directory of train*.tar and test*.tar, with KEY.png and KEY.cls for each sample", kind=directory, may_change_on_resume=True, per_process=True)

    lr: float = training_option(0.05, "peak learning rate", kind=number(float, 0, exclusive=True))
    momentum: float = training_option(0.9, "momentum of SGD", kind=number(float, 0, max=1))
    weight_decay: float = training_option(5e-4, "weight decay of SGD", kind=number(float, 0))
# fmt: on


if __name__ == "__main__":
    check_command_line(Config)
