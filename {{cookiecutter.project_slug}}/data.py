"""The datasets and their transforms. Edit this file: main.py calls load_datasets.

The datasets of images.py transform whole batches on the device. To change more than build_transforms offers, override
`augment` or `prepare`, and use your class in place of the original:

    class Darker(ImagesInMemory):
        def augment(self, batch, epoch):
            targets, samples, images = super().augment(batch, epoch)  # images [b, 3, h, w] uint8
            return targets, samples, images // 2

Any other torch Dataset of (input, target) works too; build_model in model.py also needs its list of `classes`. With
torchvision's transforms, the random numbers of a resumed run are the same, because the loader seeds them per sample:

    from torchvision import datasets, transforms
    to_input = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augment = [transforms.RandomResizedCrop(config.image_size), transforms.RandomHorizontalFlip()]
    train_set = datasets.ImageFolder(f"{config.data_dir}/train", transforms.Compose([*augment, *to_input]))
    resize = [transforms.Resize(config.image_size), transforms.CenterCrop(config.image_size)]
    val_set = datasets.ImageFolder(f"{config.data_dir}/val", transforms.Compose([*resize, *to_input]))
    result = Datasets(train_set, val_set)
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from config import Config
from ddp.core.errors import SetupError, UsageError
from ddp.data.dataset import Datasets
from ddp.distributed.seeds import derive_seed
from image_files import DecodedFiles, ImageFiles, load_cifar10
from images import ImageDataset, ImagesInMemory, ImageTransforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, and close to those of CIFAR-10
VAL_FRACTION = 0.1  # of the training samples, unless --val-fraction is given
SYNTHETIC_SIZES = {"train": 10_000, "val": 2_000, "test": 2_000}


def load_datasets(config: Config) -> Datasets:
    """Training, validation and test set, and a sampler if you have one. To add a dataset, add its function here.

    Every rank calls this before it connects to the others. Raises SetupError if data are missing or cannot be read.
    """
    functions = {"cifar10": cifar10, "synthetic": synthetic, "imagefolder": imagefolder}
    if config.dataset not in functions:
        raise UsageError(f"--dataset {config.dataset}: must be one of {', '.join(functions)}, or added to data.py")
    datasets = functions[config.dataset](config)
    datasets.train.name = config.dataset  # for the log, and for the default --output-dir
    return datasets


def build_transforms(config: Config) -> ImageTransforms:
    """What happens to a batch of images, on the device."""
    return ImageTransforms(
        mean=MEAN,
        std=STD,
        image_size=config.image_size,
        padding=1 / 16,  # in training: add 2 of 32 pixels on each side, then crop at a random place; 0: no crop
        flip=0.5,  # in training: flip every other image
        seed=config.seed,
        memory_format=torch.channels_last if config.channels_last else torch.contiguous_format,
    )


def cifar10(config: Config) -> Datasets:
    """CIFAR-10, downloaded once per machine, in memory as uint8. A part of its training set is the validation set."""
    transforms = build_transforms(config)
    train_set, test_set = (ImagesInMemory(*part, transforms, 32) for part in load_cifar10(Path(config.data_dir)))
    return Datasets(*_split(train_set, config), test_set)


def synthetic(config: Config) -> Datasets:
    """Made from the seed, easy to learn: a class is a smooth random picture; a sample is it, fainter or stronger."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    pictures = F.interpolate(torch.randn(10, 3, 6, 6, generator=generator), size=(32, 32), mode="bicubic")
    transforms, classes, parts = build_transforms(config), [f"class {number}" for number in range(10)], {}
    for part, length in SYNTHETIC_SIZES.items():
        targets = torch.randint(0, 10, (length,), generator=generator)
        images = torch.empty(length, 3, 32, 32, dtype=torch.uint8)
        for rows in torch.arange(length).split(1000):
            strength = 15 + 30 * torch.rand(len(rows), 1, 1, 1, generator=generator)
            noise = 40 * torch.randn(len(rows), 3, 32, 32, generator=generator)
            images[rows] = (128 + strength * pictures[targets[rows]] + noise).clamp_(0, 255).to(torch.uint8)
        parts[part] = ImagesInMemory(images, targets, classes, transforms, read_size=32)
    return Datasets(**parts)


def imagefolder(config: Config) -> Datasets:
    """Images in train/CLASS/*, val/CLASS/* and test/CLASS/*; without val/, a part of train/ is the validation set."""
    root, transforms = Path(config.data_dir), build_transforms(config)
    if not (root / "train").is_dir():
        raise SetupError(f"--data-dir {root}: needs train/CLASS/*; val/CLASS/* and test/CLASS/* are optional")
    found = {part: root / part for part in ("train", "val", "test") if (root / part).is_dir()}
    parts = {part: ImageFiles(path, transforms, may_be_empty=part != "train") for part, path in found.items()}
    for part, dataset in parts.items():
        if dataset.classes != parts["train"].classes:
            different = ", ".join(sorted(set(parts["train"].classes) ^ set(dataset.classes)))
            raise SetupError(f"--data-dir {root}: train and {part} differ in their classes: {different}")
    if "val" not in parts:
        train_set, val_set = _split(parts["train"], config)
        parts |= {"train": train_set} if val_set is None else {"train": train_set, "val": val_set}
    elif config.val_fraction is not None:
        raise UsageError(f"--val-fraction: {root}/val has the validation set; remove the option, or move that folder")
    if config.cache is None:
        return Datasets(**parts)
    return Datasets(**{part: DecodedFiles(dataset, Path(config.cache)) for part, dataset in parts.items()})


def _split(train_set: ImageDataset, config: Config) -> tuple[Any, Any]:
    return train_set.split(VAL_FRACTION if config.val_fraction is None else config.val_fraction, config.seed)
