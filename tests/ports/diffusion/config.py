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

    dataset: str = data_option("synthetic", "the images are made from --seed", choices=("synthetic",))
    batch_size: int = data_option(32, "training samples per process and forward pass", min=1, may_change=True)

    width: int = training_option(16, "channels of the U-Net at full resolution; a multiple of 8", min=8)
    noise_steps: int = training_option(1000, "steps from an image to pure noise", min=2)
    lr: float = training_option(3e-3, "peak learning rate", above=0)
    clip_grad: float | None = training_option(1.0, "clip the gradient to this norm", above=0)
    ema: float | None = training_option(
        0.99, "evaluate a moving average of the weights, decay such as 0.999", min=0, max=1
    )
    warmup_epochs: float = training_option(
        0.2, "epochs in which the learning rate rises from 0; may be a fraction", min=0
    )

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.width % 8:
            raise UsageError(f"--width {self.width} is not a multiple of 8")
