"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.errors import UsageError
from ddp.core.options import option
from ddp.core.run_config import RunConfig

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))
path_option = partial(data_option, metavar="PATH", per_process=True)


@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option(
        "text",
        "text: all of DATA_DIR/text.txt; synthetic: a small part of it, for tests; tokens: train.bin and val.bin",
        choices=("text", "synthetic", "tokens"),
    )
    data_dir: str = path_option(
        "data", "directory of text.txt; without one, this project's own source becomes the text"
    )
    vocabulary: int | None = data_option(None, "tokens: how many there are (default: 50,304)", min=2)
    token_type: str | None = data_option(
        None, "tokens: how the files store each (default: uint16)", choices=("uint16", "uint32")
    )
    batch_size: int = data_option(16, "training samples per process and forward pass", min=1, may_change=True)

    epochs: int = training_option(5, "passes over the training data", min=1, may_change=True)
    width: int = training_option(128, "width of the model, a multiple of 32", min=32)
    layers: int = training_option(3, "number of blocks", min=1)
    lr: float = training_option(3e-3, "peak learning rate", above=0)
    beta1: float = training_option(0.9, "first beta of AdamW", min=0, max=0.9999)
    beta2: float = training_option(0.95, "second beta of AdamW", min=0, max=0.9999)
    weight_decay: float = training_option(5e-4, "weight decay of AdamW", min=0)

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        name, unit, missing = "text.txt", "characters", "will be created"
        if self.dataset == "tokens":
            name, unit, missing = "train.bin", "bytes", "missing"
        path = Path(self.data_dir) / name
        return f"{path}, {path.stat().st_size:,} {unit}" if path.exists() else f"{path}: {missing}"

    def check(self) -> None:
        """Refuse options that contradict each other, with one line."""
        super().check()
        if self.dataset != "tokens" and (self.vocabulary or self.token_type):
            raise UsageError("--vocabulary and --token-type are for --dataset tokens: remove them")
