"""Texts of random tokens with two marks. The label tells which of them comes first."""

import torch
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}
LENGTH, WORDS = 16, 30
MARKS = (WORDS, WORDS + 1)


class Texts(BatchDataset):
    """A sample is a text [16] and its label."""

    name = "marked texts"
    in_memory = True
    classes = ("first mark first", "second mark first")
    vocab_size, length = WORDS + len(MARKS), LENGTH

    def __init__(self, texts: Tensor, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index], self.labels[index]


def load_datasets(config: Config) -> Datasets:
    """Made from the seed, and the same on every rank."""
    parts = {}
    for number, (part, size) in enumerate(SYNTHETIC_SIZES.items()):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, number))
        texts = torch.randint(WORDS, (size, LENGTH), generator=generator)
        places = torch.rand(size, LENGTH, generator=generator).argsort(1)[:, :2]  # [size, 2], of the two marks
        texts.scatter_(1, places, torch.tensor(MARKS).expand(size, 2))
        parts[part] = Texts(texts, (places[:, 0] > places[:, 1]).long())
    return Datasets(**parts)
