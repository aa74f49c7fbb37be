"""The characters of a text file. Edit me: main.py needs load_datasets."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.errors import EnvironmentFailure, UsageError

CONTEXT = 128  # characters that the model sees
STRIDE = 32  # from where one training sample begins to where the next does
TEST_PART = 0.1  # of the text, at its end
SYNTHETIC_SIZES = {"train": 1_600, "test": 100}  # samples of --dataset synthetic, which is a little of the same text


class Text(Dataset):
    """Pieces of a text, which is mapped into memory: its bytes are read when they are needed, by all from one place.

    A batch is inputs [b, CONTEXT], and targets [b, CONTEXT], which are one character further on.
    """

    in_memory = True
    name = "text"
    characters, context = 256, CONTEXT  # a character is a byte

    def __init__(self, text: numpy.ndarray, stride: int, most: int | None) -> None:
        self.text = text
        self.starts = numpy.arange(0, len(text) - CONTEXT, stride)[:most]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = self.starts[indices][:, None] + numpy.arange(CONTEXT + 1)
        pieces = torch.from_numpy(self.text[places]).long()  # [b, CONTEXT + 1]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The beginning and the end of --data-dir/text.txt; of the project's own source, if there is no such file.

    Raises EnvironmentFailure if the text is too short or cannot be read; UsageError for another --dataset.
    """
    if config.dataset == "imagefolder":
        raise UsageError("--dataset imagefolder: there is text only; leave it out")
    path = Path(config.data_dir) / "text.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # one process of this machine writes it, the others find it done
            if not path.exists():
                _write_own_source(path)
        text = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise EnvironmentFailure(f"cannot read {path}: {error}") from error
    end = int(len(text) * (1 - TEST_PART))
    most = SYNTHETIC_SIZES if config.dataset == "synthetic" else {}
    train, test = Text(text[:end], STRIDE, most.get("train")), Text(text[end:], CONTEXT, most.get("test"))
    if len(test) == 0:
        raise EnvironmentFailure(f"{path} is too short: it needs {int(CONTEXT / TEST_PART) + 10} characters or more")
    return train, test


def _write_own_source(path: Path) -> None:
    here = Path(__file__).resolve().parent
    files = sorted(file for pattern in ("*.md", "*.py", "ddp/**/*.py") for file in here.glob(pattern))
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(file.read_bytes() for file in files))
    beside.replace(path)
