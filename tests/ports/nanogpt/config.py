"""The options of this task, one per line. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial

from ddp.core.errors import UsageError
from ddp.core.options import directory, number, option, positive
from ddp.core.run_config import RunConfig, check_command_line

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


# fmt: off
@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("synthetic", "bin: train.bin and val.bin in DATA_DIR; synthetic: made from the seed", choices=("bin", "synthetic"))
    data_dir: str = data_option("data", "directory of train.bin and val.bin", kind=directory, may_change_on_resume=True, per_process=True)
    batch_size: int = data_option(16, "training samples per process and forward pass", kind=positive, may_change_on_resume=True)
    block_size: int = data_option(32, "tokens that the model sees", kind=positive)

    n_layer: int = training_option(2, "number of blocks", kind=positive)
    n_head: int = training_option(2, "number of attention heads", kind=positive)
    n_embd: int = training_option(64, "width of the embedding", kind=positive)
    dropout: float = training_option(0.1, "dropout", kind=number(float, 0, max=1))
    bias: bool = training_option(False, "use a bias in Linear and LayerNorm layers")
    lr: float = training_option(3e-3, "peak learning rate", kind=number(float, 0, exclusive=True))
    beta1: float = training_option(0.9, "first beta of AdamW", kind=number(float, 0, max=0.9999))
    beta2: float = training_option(0.95, "second beta of AdamW", kind=number(float, 0, max=0.9999))
    weight_decay: float = training_option(0.1, "weight decay of AdamW", kind=number(float, 0))
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", kind=number(float, 0, exclusive=True))
# fmt: on

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.n_embd % self.n_head:
            raise UsageError(f"--n-embd {self.n_embd} is not a multiple of --n-head {self.n_head}")


if __name__ == "__main__":
    check_command_line(Config)
