"""CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels, in 10 classes."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ddp.data.download import downloading

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10


class LabelledImages(NamedTuple):
    """images [n, 3, 32, 32] uint8, targets [n] int64, and the names of the classes."""

    images: Tensor
    targets: Tensor
    classes: list[str]


def load_cifar10(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """The training part and the test part. They are downloaded into `folder` once per machine.

    Raises SetupError if they cannot be downloaded. https://www.cs.toronto.edu/~kriz/cifar.html
    """
    from torchvision.datasets import CIFAR10  # slow, and only needed here
    from torchvision.datasets.utils import download_and_extract_archive

    def read() -> tuple[LabelledImages, LabelledImages]:
        train, test = (CIFAR10(folder, train) for train in (True, False))  # verifies the MD5 of every file
        return _to_tensors(train), _to_tensors(test)

    try:
        return read()
    except RuntimeError:  # a file is missing or damaged
        with downloading(CIFAR10.url, folder, ", or use --dataset synthetic"):
            try:
                return read()  # another process of this machine may have been first
            except RuntimeError:
                # Not download=True, which ignores batches.meta. An intact archive is unpacked without a download.
                archive = {"filename": CIFAR10.filename, "md5": CIFAR10.tgz_md5}
                download_and_extract_archive(CIFAR10.url, folder, **archive)
                return read()


def _to_tensors(part: "CIFAR10") -> LabelledImages:
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return LabelledImages(images, torch.tensor(part.targets), part.classes)
