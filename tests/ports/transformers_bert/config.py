"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "what to train on", choices=("synthetic",))
    data_dir: str = path_option("data", "not used by synthetic data")
    batch_size: int = data_option(16, "training samples per process and forward pass", min=1, may_change=True)

    epochs: int = training_option(3, "passes over the training data", min=1, may_change=True)
    hidden_size: int = training_option(32, "width of the model", min=1)
    layers: int = training_option(2, "number of layers", min=1)
    heads: int = training_option(2, "number of attention heads", min=1)
    lr: float = training_option(2e-3, "peak learning rate", above=0)
    weight_decay: float = training_option(0.01, "weight decay of AdamW", min=0)
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", above=0)
    warmup_epochs: float = training_option(
        0.5, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )
