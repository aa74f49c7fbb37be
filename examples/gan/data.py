"""Images of 32 x 32 pixels, each with a vector of noise. Edit me: main.py needs load_datasets."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.data.download import downloading
from ddp.data.images import ImagesInMemory, ImageTransforms
from ddp.distributed.seeds import derive_seed

NOISE = 100  # numbers from which an image is generated
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training set and the test set. A batch is images [b, 3, 32, 32] in -1 to 1, and noise [b, NOISE].

    The noise of a sample never changes, so evaluations are comparable. In training, main.py draws new noise.
    """
    parts = cifar10(config) if config.dataset == "cifar10" else synthetic(config)
    transforms = ImageTransforms(mean=(0.5,) * 3, std=(0.5,) * 3, image_size=32, flip=0.5, seed=config.seed)
    datasets = []
    for number, images in enumerate(parts):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, number))
        noise = torch.randn(len(images), NOISE, generator=generator)
        datasets.append(ImagesInMemory(images, noise, (), transforms))  # the noise takes the place of the targets
    train_set, test_set = datasets
    train_set.name = config.dataset  # for the log, and for the default --output-dir
    return train_set, test_set


def cifar10(config: Config) -> list[Tensor]:
    """The images of CIFAR-10, [n, 3, 32, 32] uint8. They are downloaded once per machine."""
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
    return [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]


def synthetic(config: Config) -> list[Tensor]:
    """A disc of a random colour and size at a random place of a dark square, [n, 3, 32, 32] uint8."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    grid = torch.stack(torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij"))  # [2, 32, 32]
    parts = []
    for length in SYNTHETIC_SIZES.values():
        centre, radius, colour = torch.rand(3, length, 3, 1, 1, generator=generator)
        inside = (grid - (8 + 16 * centre[:, :2])).norm(dim=1, keepdim=True) < 4 + 4 * radius[:, :1]
        parts.append((255 * inside * (0.2 + 0.8 * colour)).to(torch.uint8))
    return parts
