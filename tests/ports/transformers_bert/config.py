"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import directory, number, option, positive
from ddp.core.run_config import RunConfig, check_command_line

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


# fmt: off
@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "what to train on", choices=("synthetic",))
    data_dir: str = data_option("data", "not used by synthetic data", kind=directory, may_change_on_resume=True, per_process=True)
    batch_size: int = data_option(16, "training samples per process and forward pass", kind=positive, may_change_on_resume=True)

    epochs: int = training_option(3, "passes over the training data", kind=positive, may_change_on_resume=True)
    hidden_size: int = training_option(32, "width of the model", kind=positive)
    layers: int = training_option(2, "number of layers", kind=positive)
    heads: int = training_option(2, "number of attention heads", kind=positive)
    lr: float = training_option(2e-3, "peak learning rate", kind=number(float, 0, exclusive=True))
    weight_decay: float = training_option(0.01, "weight decay of AdamW", kind=number(float, 0))
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", kind=number(float, 0, exclusive=True))
    warmup_epochs: float = training_option(0.5, "epochs in which the learning rate rises from 0; may be a fraction", kind=number(float, 0))
# fmt: on


if __name__ == "__main__":
    check_command_line(Config)
