"""Random pieces of one long array of tokens, as nanoGPT's get_batch draws them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.data.dataset import BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}  # pieces of --block-size tokens
SYNTHETIC_VOCAB = 64
GPT2_VOCAB = 50304  # 50257, rounded up to a multiple of 64


class Tokens(BatchDataset):
    """As many random pieces as fit into the tokens. A batch is x [b, block_size], and y, the same one token later."""

    in_memory = True

    def __init__(self, data: np.ndarray, block_size: int, vocab_size: int) -> None:
        self.data, self.block_size, self.vocab_size = data, block_size, vocab_size

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A random piece: the loader seeds torch for each sample and epoch."""
        x, y = self.get_batch(1)
        return x[0], y[0]

    def get_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        data, block_size = self.data, self.block_size
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
        return x, y


def load_datasets(config: Config) -> Datasets:
    """The training set and the validation set."""
    return synthetic(config) if config.dataset == "synthetic" else bin_files(config)


def bin_files(config: Config) -> Datasets:
    """train.bin and val.bin, which nanoGPT's prepare.py writes. They stay on the disk, mapped into memory."""
    try:
        data = [np.memmap(Path(config.data_dir) / name, np.uint16, "r") for name in ("train.bin", "val.bin")]
    except OSError as error:
        raise SetupError(f"--data-dir {config.data_dir}: {error}") from error
    return Datasets(*(Tokens(part, config.block_size, GPT2_VOCAB) for part in data))


def synthetic(config: Config) -> Datasets:
    """A token determines the next one, nine times out of ten."""
    rng = np.random.default_rng(config.seed)
    follower = rng.permutation(SYNTHETIC_VOCAB)
    lengths = [size * config.block_size + 1 for size in SYNTHETIC_SIZES.values()]
    tokens = rng.integers(SYNTHETIC_VOCAB, size=sum(lengths))
    for place in np.flatnonzero(rng.random(len(tokens) - 1) < 0.9):
        tokens[place + 1] = follower[tokens[place]]
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    return Datasets(*(Tokens(part, config.block_size, SYNTHETIC_VOCAB) for part in parts))
