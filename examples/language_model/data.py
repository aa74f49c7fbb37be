"""The characters of a text file. Edit me: main.py needs load_datasets."""

from pathlib import Path

import numpy
import torch
from filelock import FileLock
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.core.files import atomic_write
from ddp.data.dataset import BatchDataset, Datasets

CONTEXT = 128  # characters that the model sees
STRIDE = 32  # characters from the start of one training sample to the start of the next
VAL_PART = TEST_PART = 0.05  # of the text, at its end
SYNTHETIC_SIZES = {"train": 1_600, "val": 100, "test": 50}  # samples of --dataset synthetic, from the same text


class Text(BatchDataset):
    """Pieces of a text that is mapped into memory: its bytes are read when needed, and shared by all processes.

    A batch is inputs [b, CONTEXT] and targets [b, CONTEXT], which are the same text one character later.
    """

    name = "text"
    in_memory = True
    characters, context = 256, CONTEXT  # a character is a byte

    def __init__(self, text: numpy.ndarray, stride: int, max_samples: int | None) -> None:
        self.text = text
        self.starts = numpy.arange(0, len(text) - CONTEXT, stride)[:max_samples]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = self.starts[indices][:, None] + numpy.arange(CONTEXT + 1)
        pieces = torch.from_numpy(self.text[places]).long()  # [b, CONTEXT + 1]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def load_datasets(config: Config) -> Datasets:
    """Three parts of --data-dir/text.txt, one after the other; without such a file, of this project's own source.

    Raises SetupError if the text is too short or cannot be read.
    """
    path = Path(config.data_dir) / "text.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # one process of this machine writes it, the others find it written
            if not path.exists():
                _write_own_source(path)
        text = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise SetupError(f"cannot read {path}: {error}") from error
    sizes = SYNTHETIC_SIZES if config.dataset == "synthetic" else {}
    end, middle = (int(len(text) * (1 - part)) for part in (TEST_PART, TEST_PART + VAL_PART))
    train = Text(text[:middle], STRIDE, sizes.get("train"))
    val = Text(text[middle:end], CONTEXT, sizes.get("val"))
    test = Text(text[end:], CONTEXT, sizes.get("test"))
    if len(val) == 0 or len(test) == 0:
        raise SetupError(f"{path} is too short: it needs {int(CONTEXT / TEST_PART) + 40} characters or more")
    train.name = config.dataset
    return Datasets(train, val, test)


def _write_own_source(path: Path) -> None:
    project = Path(__file__).resolve().parent
    sources = sorted(file for pattern in ("*.md", "*.py", "ddp/**/*.py") for file in project.glob(pattern))
    with atomic_write(path) as file:
        file.write(b"".join(source.read_bytes() for source in sources))
