"""Sequences that count in steps: a model must find the step of a sequence to predict its next token."""

import torch
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}
VOCAB = 32
STEPS = (1, 5, 11)
NOISE = 0.05  # part of the tokens that are random


class Sequences(BatchDataset):
    """A sample is x [length], and y [length], the same one token later."""

    name = "sequences"
    in_memory = True
    vocab_size = VOCAB

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens  # [n, length + 1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def load_datasets(config: Config) -> Datasets:
    """A sequence begins with any token, and has one of three steps. A few of its tokens are random."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        first = torch.randint(VOCAB, (size, 1), generator=generator)
        step = torch.tensor(STEPS)[torch.randint(len(STEPS), (size, 1), generator=generator)]
        tokens = (first + step * torch.arange(config.length + 1)) % VOCAB
        random = torch.randint(VOCAB, tokens.shape, generator=generator)
        parts[part] = Sequences(torch.where(torch.rand(tokens.shape, generator=generator) < NOISE, random, tokens))
    return Datasets(**parts)
