"""Images of which few have a label, and two random views of each one."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from config import Config
from ddp.data.dataset import IGNORED_LABEL, BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 2_000, "val": 400}
SYNTHETIC_CLASSES = 10


class Views(BatchDataset):
    """A sample is views of an image, and its label, which is -100 for an unlabelled one.

    In training there are two random views [2, 3, h, w], for the student and for the teacher. In an evaluation there is
    one, the image itself [1, 3, h, w].
    """

    name = "views"
    classes = tuple(f"class {number}" for number in range(SYNTHETIC_CLASSES))
    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, noise: float, train: bool) -> None:
        self.images, self.labels, self.train = images, labels, train
        shift = [v2.RandomCrop(images.shape[-1], padding=2, padding_mode="reflect"), v2.RandomHorizontalFlip()]
        self.view = v2.Compose([*shift, v2.GaussianNoise(sigma=noise, clip=False)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        views = [self.view(image) for _ in range(2)] if self.train else [image]
        return torch.stack(views), self.labels[index]


def load_datasets(config: Config) -> Datasets:
    """A class is a smooth random picture; a sample is that picture with noise. Made from the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    small = torch.randn(SYNTHETIC_CLASSES, 3, 3, 3, generator=generator)
    pictures = F.interpolate(small, size=(24, 24), mode="bilinear")
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        labels = torch.randint(SYNTHETIC_CLASSES, (size,), generator=generator)
        images = pictures[labels] + torch.randn(size, 3, 24, 24, generator=generator)
        if part == "train":
            labels[torch.rand(size, generator=generator) >= config.labelled] = IGNORED_LABEL
        parts[part] = Views(images, labels, config.noise, part == "train")
    return Datasets(**parts)
