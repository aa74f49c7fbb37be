"""The lines of a text file. Edit me: main.py needs load_datasets."""

from pathlib import Path

import numpy
import torch
from filelock import FileLock
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.core.files import atomic_write
from ddp.data.dataset import IGNORED_LABEL, BatchDataset, Datasets

CONTEXT = 128  # characters that the model sees: a longer line becomes several samples
VAL_PART = TEST_PART = 0.05  # of the samples, at the end of the text
SYNTHETIC_SIZES = {"train": 1_600, "val": 100, "test": 50}  # samples of --dataset synthetic, from the same text


class Text(BatchDataset):
    """Lines of a text that is mapped into memory: its bytes are read when needed, and shared by all processes.

    A batch is inputs [b, t] and targets [b, t], which are the same text one character later. t is the longest length of
    the batch. After the end of a line, inputs are 0 and targets IGNORED_LABEL.
    """

    name = "text"
    in_memory = True
    characters, context = 256, CONTEXT  # a character is a byte

    def __init__(self, text: numpy.ndarray, pieces: numpy.ndarray, max_samples: int | None) -> None:
        self.text, self.pieces = text, pieces[:max_samples]  # pieces [samples, 2]: the start and length of each

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        starts, lengths = self.pieces[indices, :, None].swapaxes(0, 1)  # each [b, 1]
        numbers = numpy.arange(lengths.max() + 1)
        characters = torch.from_numpy(self.text[starts + numpy.minimum(numbers, lengths)]).long()  # [b, t + 1]
        padding = torch.from_numpy(numbers[:-1] >= lengths)
        return characters[:, :-1].masked_fill(padding, 0), characters[:, 1:].masked_fill(padding, IGNORED_LABEL)


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
    pieces, sizes = _pieces(text), SYNTHETIC_SIZES if config.dataset == "synthetic" else {}
    end, middle = (int(len(pieces) * (1 - part)) for part in (TEST_PART, TEST_PART + VAL_PART))
    if not middle < end < len(pieces):
        raise SetupError(f"{path} is too short: it needs {int(1 / TEST_PART)} lines or more that are not empty")
    train = Text(text, pieces[:middle], sizes.get("train"))
    val = Text(text, pieces[middle:end], sizes.get("val"))
    test = Text(text, pieces[end:], sizes.get("test"))
    train.name = config.dataset
    return Datasets(train, val, test)


def _pieces(text: numpy.ndarray) -> numpy.ndarray:
    """The start and length of each line that is not empty: [pieces, 2]. A line of more than CONTEXT is several pieces.

    The length is the number of targets: the characters after the first of the piece, and the one that follows it.
    """
    ends = numpy.union1d(numpy.flatnonzero(text == ord("\n")), len(text) - 1)  # the last line may have no newline
    begins = numpy.append(0, ends[:-1] + 1)
    counts = -((begins - ends) // CONTEXT)  # of pieces: the length / CONTEXT, rounded up
    numbers = numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)  # of each piece in its line
    starts = numpy.repeat(begins, counts) + CONTEXT * numbers
    return numpy.stack([starts, numpy.minimum(numpy.repeat(ends, counts) - starts, CONTEXT)], axis=1)


def _write_own_source(path: Path) -> None:
    project = Path(__file__).resolve().parent
    sources = sorted(file for pattern in ("*.md", "*.py", "ddp/**/*.py") for file in project.glob(pattern))
    with atomic_write(path) as file:
        file.write(b"".join(source.read_bytes() for source in sources))
