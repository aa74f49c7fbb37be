"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option(
        "synthetic",
        "bin: train.bin and val.bin in DATA_DIR; synthetic: made from the seed",
        choices=("bin", "synthetic"),
    )
    data_dir: str = path_option("data", "directory of train.bin and val.bin")
    batch_size: int = data_option(16, "training samples per process and forward pass", min=1, may_change=True)
    block_size: int = data_option(32, "tokens that the model sees", min=1)

    n_layer: int = training_option(2, "number of blocks", min=1)
    n_head: int = training_option(2, "number of attention heads", min=1)
    n_embd: int = training_option(64, "width of the embedding", min=1)
    dropout: float = training_option(0.1, "dropout", min=0, max=1)
    bias: bool = training_option(False, "use a bias in Linear and LayerNorm layers")
    lr: float = training_option(3e-3, "peak learning rate", above=0)
    beta1: float = training_option(0.9, "first beta of AdamW", min=0, max=0.9999)
    beta2: float = training_option(0.95, "second beta of AdamW", min=0, max=0.9999)
    weight_decay: float = training_option(0.1, "weight decay of AdamW", min=0)
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", above=0)

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.n_embd % self.n_head:
            raise UsageError(f"--n-embd {self.n_embd} is not a multiple of --n-head {self.n_head}")
