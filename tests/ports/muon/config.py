"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "the tokens are made from --seed", choices=("synthetic",))
    length: int = data_option(32, "tokens that the model sees", min=2)

    layers: int = training_option(2, "number of blocks", min=1)
    heads: int = training_option(2, "number of attention heads", min=1)
    dim: int = training_option(64, "width of the model", min=1)
    lr: float = training_option(0.02, "peak learning rate of Muon", above=0)
    momentum: float = training_option(0.95, "momentum of Muon", min=0, max=0.9999)
    adamw_lr: float = training_option(3e-3, "peak learning rate of AdamW", above=0)
    weight_decay: float = training_option(0.01, "weight decay of both optimizers", min=0)

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.dim % self.heads:
            raise UsageError(f"--dim {self.dim} is not a multiple of --heads {self.heads}")
