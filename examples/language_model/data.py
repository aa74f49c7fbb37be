"""The lines of a text file, or files of tokens. Edit me: main.py needs load_datasets."""

from pathlib import Path
from typing import Any

import numpy
import torch
from filelock import FileLock
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.core.files import atomic_write
from ddp.data.dataset import IGNORED_LABEL, BatchDataset, Datasets

CONTEXT = 128  # characters or tokens that the model sees: a longer line becomes several samples
VOCABULARY = 50_304  # tokens, unless --vocabulary is given
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


class Tokens(BatchDataset):
    """Sequences of a file of token numbers, which is mapped into memory: token i x CONTEXT is the first of sequence i.

    A batch is inputs [b, CONTEXT] and targets [b, CONTEXT], which are the same tokens one later. The last target of a
    sequence is the first input of the next one. Tokens at the end that fill no sequence are not used.
    """

    name = "tokens"
    in_memory = True  # False: DataLoader workers read, which helps where the file is slow and not in memory

    def __init__(self, path: Path, vocabulary: int | None, token_type: str | None) -> None:
        self.path, self.characters, self.context = path, vocabulary or VOCABULARY, CONTEXT
        self.tokens = numpy.memmap(path, dtype=token_type or "uint16", mode="r")
        if len(self) < 1:
            raise ValueError(f"it needs more than {CONTEXT} tokens, and has {len(self.tokens)}")
        first, second = self.tokens[:2000:2], self.tokens[1:2000:2]
        if token_type is None and first.any() and not second.any():  # small numbers of four bytes
            raise ValueError("every second number is 0: pass --token-type, uint32 or uint16")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        starts = CONTEXT * numpy.array(indices, dtype=numpy.int64)[:, None]
        tokens = torch.from_numpy(self.tokens[starts + numpy.arange(CONTEXT + 1)].astype(numpy.int64))
        if (largest := int(tokens.max())) >= self.characters:
            raise SetupError(f"{self.path} has a token {largest}: raise --vocabulary, now {self.characters}")
        return tokens[:, :-1], tokens[:, 1:]


def _load_tokens(config: Config) -> Datasets:
    """DATA_DIR/train.bin and val.bin; and test.bin, if it exists. Raises SetupError."""
    found: list[Any] = []
    kind = config.vocabulary, config.token_type
    for name in ("train", "val", "test"):
        path = Path(config.data_dir) / f"{name}.bin"
        try:
            found.append(Tokens(path, *kind) if name != "test" or path.exists() else None)
        except (OSError, ValueError) as error:  # ValueError: an empty file, or half of a token
            raise SetupError(f"cannot read {path}: {error}") from error
    return Datasets(*found)


def load_datasets(config: Config) -> Datasets:
    """The files of --dataset tokens; or three parts of text.txt, which becomes this project's source if there is none.

    Raises SetupError if the text is too short or cannot be read.
    """
    if config.dataset == "tokens":
        return _load_tokens(config)
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
