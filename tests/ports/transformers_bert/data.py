"""Texts of different lengths, as numbers of tokens, with a label each."""

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

from config import Config
from ddp.data.dataset import BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}
PAD, CLS, SEP = range(3)
WORDS = range(3, 203)


class Texts(BatchDataset):
    """Tokenized texts. A batch is as long as its longest text."""

    in_memory = True
    vocab_size, max_length = WORDS.stop, 32

    def __init__(self, texts: list[list[int]], labels: list[int]) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor(self.texts[index]), "label": self.labels[index]}

    def collate(self, samples: list[dict[str, Any]]) -> BatchEncoding:
        texts = [sample["input_ids"] for sample in samples]
        return BatchEncoding(
            {
                "input_ids": pad_sequence(texts, batch_first=True, padding_value=PAD),
                "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
                "labels": torch.tensor([sample["label"] for sample in samples]),
            }
        )

    def prepare(self, batch: BatchEncoding) -> tuple[BatchEncoding, Tensor]:
        return batch, batch["labels"]


def load_datasets(config: Config) -> Datasets:
    """Texts of label 1 have more words of the second half of the vocabulary."""
    rng = random.Random(config.seed)
    half = len(WORDS) // 2

    def texts(size: int) -> Texts:
        labels = [rng.randrange(2) for _ in range(size)]
        weights = [[0.8] * half + [0.2] * half, [0.2] * half + [0.8] * half]
        bodies = [rng.choices(WORDS, weights[label], k=rng.randint(5, Texts.max_length - 2)) for label in labels]
        return Texts([[CLS, *body, SEP] for body in bodies], labels)

    return Datasets(**{part: texts(size) for part, size in SYNTHETIC_SIZES.items()})
