"""Images of 32 x 32 pixels, shifted at random, flipped in every other epoch. Edit me: main.py needs load_datasets."""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.data.download import downloading
from ddp.data.images import ImagesInMemory, ImageTransforms
from ddp.distributed.seeds import derive_seed

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
PADDING = 2  # pixels on each side
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


class AlternatingFlips(ImagesInMemory):
    """Images that are flipped in every other epoch: half of them in the first, the others in the second, and so on.

    So two epochs show each image both ways. Random flips would show half of the images twice the same way.
    The borders are mirrored, and not black.
    """

    def _cropped(self, copies: Tensor, pad: int, rows: Tensor, samples: Tensor, epoch: int) -> Tensor:
        flipped = draw_flips(self.transforms.seed, len(self), samples.device)[samples] ^ (epoch % 2 == 1)
        return super()._cropped(copies, pad, rows + len(copies) // 2 * flipped, samples, epoch)

    def _padded_and_flipped(self, images: Tensor) -> tuple[Tensor, int]:
        last = images.shape[-1] - 1
        places = last - (last - torch.arange(-PADDING, last + 1 + PADDING, device=images.device).abs()).abs()
        padded = images[:, :, places][:, :, :, places]  # not F.pad: older versions of torch reflect no uint8 on a GPU
        return torch.cat([padded, padded.flip(3)]), PADDING


@lru_cache(maxsize=1)
def draw_flips(seed: int, length: int, device: torch.device) -> Tensor:
    """Whether each sample is flipped in epoch 0: [length] bool, the same in every process."""
    generator = torch.Generator().manual_seed(derive_seed(seed))
    return torch.randint(2, (length,), generator=generator).bool().to(device)


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training set and the test set. Raises SetupError if CIFAR-10 cannot be downloaded or read."""
    parts = cifar10(config) if config.dataset == "cifar10" else synthetic(config)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    transforms = ImageTransforms(mean=MEAN, std=STD, image_size=32, seed=config.seed, memory_format=layout)
    classes = [f"class {number}" for number in range(10)]
    train_set, test_set = (AlternatingFlips(images, targets, classes, transforms) for images, targets in parts)
    train_set.name = config.dataset  # for the log, and for the default --output-dir
    return train_set, test_set


def cifar10(config: Config) -> list[tuple[Tensor, Tensor]]:
    """CIFAR-10: images [n, 3, 32, 32] uint8 and targets [n]. It is downloaded once per machine."""
    from torchvision.datasets import CIFAR10  # slow, and only needed here
    from torchvision.datasets.utils import download_and_extract_archive

    def read() -> list[CIFAR10]:
        return [CIFAR10(config.data_dir, train) for train in (True, False)]  # verifies the MD5 of every file

    try:
        parts = read()
    except RuntimeError:  # a file is missing or damaged
        with downloading(CIFAR10.url, Path(config.data_dir), ", or use --dataset synthetic"):
            try:
                parts = read()  # another process of this machine may have been first
            except RuntimeError:
                # Not download=True, which ignores batches.meta. An intact archive is unpacked without a download.
                archive = {"filename": CIFAR10.filename, "md5": CIFAR10.tgz_md5}
                download_and_extract_archive(CIFAR10.url, config.data_dir, **archive)
                parts = read()
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    return list(zip(images, (torch.tensor(part.targets) for part in parts), strict=True))


def synthetic(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Made from the seed, shaped like CIFAR-10, and easy to learn: each class is a smooth picture, with noise."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    pictures = F.interpolate(torch.randn(10, 3, 6, 6, generator=generator), size=(32, 32), mode="bicubic")
    parts = []
    for length in SYNTHETIC_SIZES.values():
        targets = torch.randint(0, 10, (length,), generator=generator)
        noise = torch.randn(length, 3, 32, 32, generator=generator)
        parts.append(((128 + 30 * pictures[targets] + 40 * noise).clamp(0, 255).to(torch.uint8), targets))
    return parts
