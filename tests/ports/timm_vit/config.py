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

    dataset: str = data_option("synthetic", "what to train on", choices=("imagefolder", "synthetic"))
    data_dir: str = path_option("data", "directory with train/CLASS/* and val/CLASS/*")
    image_size: int = data_option(32, "height and width of the images, in pixels", min=8)
    mixup: float = data_option(0.8, "alpha of Mixup", above=0)
    cutmix: float = data_option(1.0, "alpha of CutMix", above=0)
    smoothing: float = data_option(0.1, "label smoothing", min=0, max=1)

    patch_size: int = training_option(8, "height and width of a patch, in pixels", min=1)
    embed_dim: int = training_option(48, "width of the model", min=1)
    depth: int = training_option(2, "number of blocks", min=1)
    num_heads: int = training_option(3, "number of attention heads", min=1)
    drop_path: float = training_option(
        0.1, "probability of leaving out the last block (stochastic depth)", min=0, max=1
    )
    lr: float = training_option(0.02, "peak learning rate", above=0)
    layer_decay: float = training_option(
        0.75, "the learning rate of a layer, relative to that of the next one", min=0, max=1
    )
    weight_decay: float = training_option(0.02, "weight decay of LAMB", min=0)
    ema: float | None = training_option(
        0.99, "evaluate an exponential moving average of the weights with this decay, such as 0.999", min=0, max=1
    )

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.batch_size % 2:
            raise UsageError(f"--batch-size {self.batch_size} is odd: Mixup mixes pairs")
