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

    dataset: str = data_option("synthetic", "what to train on", choices=("imagefolder", "synthetic"))
    data_dir: str = data_option("data", "directory with train/CLASS/* and val/CLASS/*", kind=directory, may_change_on_resume=True, per_process=True)
    image_size: int = data_option(32, "height and width of the images, in pixels", kind=number(int, 8))
    mixup: float = data_option(0.8, "alpha of Mixup", kind=number(float, 0, exclusive=True))
    cutmix: float = data_option(1.0, "alpha of CutMix", kind=number(float, 0, exclusive=True))
    smoothing: float = data_option(0.1, "label smoothing", kind=number(float, 0, max=1))

    patch_size: int = training_option(8, "height and width of a patch, in pixels", kind=positive)
    embed_dim: int = training_option(48, "width of the model", kind=positive)
    depth: int = training_option(2, "number of blocks", kind=positive)
    num_heads: int = training_option(3, "number of attention heads", kind=positive)
    drop_path: float = training_option(0.1, "probability of leaving out the last block (stochastic depth)", kind=number(float, 0, max=1))
    lr: float = training_option(0.02, "peak learning rate", kind=number(float, 0, exclusive=True))
    layer_decay: float = training_option(0.75, "the learning rate of a layer, relative to that of the next one", kind=number(float, 0, max=1))
    weight_decay: float = training_option(0.02, "weight decay of LAMB", kind=number(float, 0))
    ema: float | None = training_option(0.99, "evaluate an exponential moving average of the weights with this decay, such as 0.999", kind=number(float, 0, max=1))
# fmt: on

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.batch_size % 2:
            raise UsageError(f"--batch-size {self.batch_size} is odd: Mixup mixes pairs")


if __name__ == "__main__":
    check_command_line(Config)
