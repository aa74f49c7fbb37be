"""Recordings of different lengths, and their texts: each character is a tone of its own frequency."""

import math

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 2_000, "val": 200}
CHARACTERS = "abcdefgh"
SAMPLE_RATE = 1000  # Hz
LOWEST = 50  # Hz, of the tone of the first character; the others are its multiples
TEXT, TONE, PAUSE = (3, 8), (40, 80), (10, 30)  # shortest and longest: of texts in characters; else in samples
Batch = tuple[dict[str, Tensor], dict[str, Tensor]]


class Recordings(BatchDataset):
    """A sample is a waveform [t] and its text [n], which has the numbers of the characters from 1 on."""

    name = "recordings"
    in_memory = True
    characters = CHARACTERS

    def __init__(self, recordings: list[tuple[Tensor, Tensor]], noise: float) -> None:
        self.recordings, self.noise = recordings, noise

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """With new noise in each epoch: the loader seeds torch for each sample."""
        waveform, text = self.recordings[index]
        return waveform + self.noise * torch.randn_like(waveform), text

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> Batch:
        """Waveforms [b, t] and texts [b, n], padded with 0 at the end, and their lengths [b]."""
        waveforms, texts = map(list, zip(*samples, strict=True))
        return (
            {"waveforms": pad_sequence(waveforms, batch_first=True), "lengths": torch.tensor([*map(len, waveforms)])},
            {"texts": pad_sequence(texts, batch_first=True), "lengths": torch.tensor([*map(len, texts)])},
        )


def load_datasets(config: Config) -> Datasets:
    """Made from the seed, and the same on every rank."""
    parts = {}
    for number, (part, size) in enumerate(SYNTHETIC_SIZES.items()):
        seeds = (derive_seed(config.seed, number, index) for index in range(size))
        parts[part] = Recordings([_recording(torch.Generator().manual_seed(seed)) for seed in seeds], config.noise)
    return Datasets(**parts)


def _recording(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A waveform without noise, and its text. Tones and pauses have random lengths."""

    def draw(shortest: int, longest: int) -> int:
        return int(torch.randint(shortest, longest + 1, (), generator=generator))

    text = torch.randint(1, len(CHARACTERS) + 1, (draw(*TEXT),), generator=generator)
    pieces = [torch.zeros(draw(*PAUSE))]
    for character in text.tolist():
        phase = 2 * math.pi * torch.rand((), generator=generator)
        steps = torch.arange(draw(*TONE)) / SAMPLE_RATE
        pieces += [torch.sin(2 * math.pi * LOWEST * character * steps + phase), torch.zeros(draw(*PAUSE))]
    return torch.cat(pieces), text
