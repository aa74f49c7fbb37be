"""The options of this task, one per line. Edit me. The options of every run are in ddp/core/run_config.py."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp.core.options import directory, number, option, positive
from ddp.core.run_config import RunConfig, check_command_line

data_option, training_option = (partial(option, section=section) for section in ("data", "training"))


# fmt: off
@dataclass
class Config(RunConfig):
    """The options of one run."""

    dataset: str = data_option("text", "text: all of DATA_DIR/text.txt; synthetic: a small part of it, for tests", choices=("text", "synthetic"))
    data_dir: str = data_option("data", "directory of text.txt; without one, this project's own source becomes the text", kind=directory, may_change_on_resume=True, per_process=True)
    batch_size: int = data_option(16, "training samples per process and forward pass", kind=positive, may_change_on_resume=True)

    epochs: int = training_option(5, "passes over the training data", kind=positive, may_change_on_resume=True)
    lr: float = training_option(3e-3, "peak learning rate", kind=number(float, 0, exclusive=True))
    beta1: float = training_option(0.9, "first beta of AdamW", kind=number(float, 0, max=0.9999))
    beta2: float = training_option(0.95, "second beta of AdamW", kind=number(float, 0, max=0.9999))
    weight_decay: float = training_option(5e-4, "weight decay of AdamW", kind=number(float, 0))
# fmt: on

    def data_status(self) -> str:
        """What `launch_node.sh --check` prints about this machine's data."""
        path = Path(self.data_dir) / "text.txt"
        return f"{path}, {path.stat().st_size:,} characters" if path.exists() else f"{path}: will be created"


if __name__ == "__main__":
    check_command_line(Config)
