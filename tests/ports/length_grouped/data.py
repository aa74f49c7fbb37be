"""Texts of very different lengths, in an order like that of LengthGroupedSampler.

That is in https://github.com/huggingface/transformers, in src/transformers/trainer_pt_utils.py.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 8_000, "val": 400}
PAD, CLASSES, LONGEST = 0, 4, 100
TOPIC = 25  # words of each class


class Texts(BatchDataset):
    """A sample is tokens [t], and its label. A batch is as long as its longest text."""

    name = "texts"
    in_memory = True
    classes, vocab_size = range(CLASSES), 1 + CLASSES * TOPIC

    def __init__(self, texts: list[Tensor], labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index], self.labels[index]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        texts, labels = map(list, zip(*samples, strict=True))
        return pad_sequence(texts, batch_first=True, padding_value=PAD), torch.stack(labels)


class LengthGrouped:
    """Shuffles the samples, sorts blocks of them by length, cuts these into groups, and shuffles the groups."""

    def __init__(self, lengths: list[int], group_size: int, groups: int, seed: int) -> None:
        self.lengths, self.group_size, self.groups, self.seed = torch.tensor(lengths), group_size, groups, seed
        self.epoch, self.order = -1, torch.empty(0)  # of the last epoch that was asked for

    def length(self, epoch: int) -> int:
        return len(self.lengths)

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self._order(epoch)
        return self.order[start:stop]

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        blocks = torch.randperm(len(self.lengths), generator=generator).split(self.groups * self.group_size)
        by_length = torch.cat([block[self.lengths[block].argsort(stable=True)] for block in blocks])
        *groups, last = by_length.split(self.group_size)  # the last may be smaller, and stays where it is
        return torch.cat([*(groups[each] for each in torch.randperm(len(groups), generator=generator)), last])


def load_datasets(config: Config) -> Datasets:
    """Most texts are short. More than half of the words of a text belong to its class."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        labels, texts = torch.randint(CLASSES, (size,), generator=generator), []
        lengths = (LONGEST ** torch.rand(size, generator=generator)).long().clamp(min=4)
        for label, length in zip(labels, lengths.tolist(), strict=True):
            topics = torch.randint(CLASSES, (length,), generator=generator)
            topics[torch.rand(length, generator=generator) < 0.4] = label
            texts.append(1 + TOPIC * topics + torch.randint(TOPIC, (length,), generator=generator))
        parts[part] = Texts(texts, labels)
    sampler = LengthGrouped(list(map(len, parts["train"].texts)), config.group_size, config.groups, config.seed)
    return Datasets(**parts, sampler=sampler)
