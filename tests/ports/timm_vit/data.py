"""Images with timm's transforms, and batches with its Mixup and CutMix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, create_transform
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image

from config import Config
from ddp.core.errors import SetupError
from ddp.data.dataset import BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 2_000, "val": 400}
SYNTHETIC_CLASSES = 10


class Images(BatchDataset):
    """Pairs of an image and the number of its class. Training batches are mixed: targets [b, classes]."""

    def __init__(
        self, samples: Sequence[tuple[Image.Image, int]], classes: list[str], train: bool, config: Config
    ) -> None:
        self.samples, self.classes = samples, classes
        if train:
            self.transform = create_transform(
                config.image_size, is_training=True, scale=(0.5, 1), auto_augment="rand-m5-mstd0.5-inc1", re_prob=0.1
            )
        else:
            self.transform = create_transform(config.image_size, crop_pct=1.0)
        self.mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=len(classes))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, target = self.samples[index]
        return self.transform(image), target

    def mix(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixup(inputs, targets)


def load_datasets(config: Config) -> Datasets:
    """The training set and the validation set."""
    return {"synthetic": synthetic, "imagefolder": imagefolder}[config.dataset](config)


def imagefolder(config: Config) -> Datasets:
    """Images in train/CLASS/* and val/CLASS/*."""
    try:
        train, val = (ImageFolder(f"{config.data_dir}/{part}") for part in ("train", "val"))
    except OSError as error:
        raise SetupError(f"--data-dir: {error}") from error
    return Datasets(Images(train, train.classes, True, config), Images(val, val.classes, False, config))


def synthetic(config: Config) -> Datasets:
    """A class is a smooth random picture; a sample is that picture with noise."""
    generator = torch.Generator().manual_seed(config.seed)
    small = torch.randn(SYNTHETIC_CLASSES, 3, 4, 4, generator=generator)
    pictures = 128 + 60 * F.interpolate(small, size=(32, 32), mode="bilinear")

    def samples(size: int) -> list[tuple[Image.Image, int]]:
        targets = torch.randint(SYNTHETIC_CLASSES, (size,), generator=generator)
        images = pictures[targets] + 20 * torch.randn(size, 3, 32, 32, generator=generator)
        return list(zip(map(to_pil_image, images.clamp(0, 255).byte()), targets.tolist(), strict=True))

    classes = [f"class {number}" for number in range(SYNTHETIC_CLASSES)]
    sizes = SYNTHETIC_SIZES.items()
    return Datasets(**{part: Images(samples(size), classes, part == "train", config) for part, size in sizes})
