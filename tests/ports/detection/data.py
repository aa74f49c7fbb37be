"""Pictures of many sizes with red and blue rectangles, and the boxes to find. Edit me: main.py needs load_datasets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 2_000, "val": 200}
CLASSES = ("background", "red", "blue")
CHANNEL = {1: 0, 2: 2}


class Pictures(BatchDataset):
    """A sample is an image [3, h, w] and its target: boxes [n, 4] and labels [n]. Images differ in size."""

    name = "pictures"
    classes = CLASSES

    def __init__(self, pictures: Sequence[tuple[Tensor, Tensor, Tensor]], training: bool) -> None:
        self.pictures = pictures
        flip = [v2.RandomHorizontalFlip(0.5)] if training else []
        self.transforms = v2.Compose([*flip, v2.ToDtype(torch.float, scale=True), v2.ToPureTensor()])

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        image, corners, labels = self.pictures[index]
        size: Any = image.shape[1:]
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)  # type: ignore[call-overload]
        return self.transforms(tv_tensors.Image(image), {"boxes": boxes, "labels": labels})

    def collate(self, samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """The model pads the images itself."""
        images, targets = zip(*samples, strict=True)
        return list(images), list(targets)


def load_datasets(config: Config) -> Datasets:
    """Made from the seed, and the same on every rank."""
    parts = {
        part: [
            _picture(torch.Generator().manual_seed(derive_seed(config.seed, number, index))) for index in range(length)
        ]
        for number, (part, length) in enumerate(SYNTHETIC_SIZES.items())
    }
    return Datasets(**{part: Pictures(pictures, part == "train") for part, pictures in parts.items()})


def _picture(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An image [3, h, w] uint8 with one rectangle in its left half, and often another in its right half."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    height, width = draw(40, 64), draw(40, 64)
    image = torch.randint(0, 60, (3, height, width), dtype=torch.uint8, generator=generator)
    boxes, labels = [], []
    for left in (0, width // 2)[: draw(1, 2)]:
        w, h, label = draw(9, width // 2 - 3), draw(9, height // 2), draw(1, 2)
        x, y = left + draw(0, width // 2 - w - 1), draw(0, height - h)
        image[CHANNEL[label], y : y + h, x : x + w] += 150
        boxes.append([x, y, x + w, y + h])
        labels.append(label)
    return image, torch.tensor(boxes, dtype=torch.float), torch.tensor(labels)
