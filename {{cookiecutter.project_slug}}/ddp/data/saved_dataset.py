"""What a checkpoint knows of its data, and what predict.py makes of it: the classes, and how images are prepared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp.data.dataset import data_name, hooks_of
from ddp.data.first_batch import classes_of
from ddp.data.images import ImageDataset, ImageFiles, ImagesInMemory, ImageTransforms, read_square


def describe(dataset: Any) -> dict[str, Any]:
    """The name of a dataset, its classes, and how its images are prepared; None if an owner's class does that."""
    hooks, images = hooks_of(dataset), None
    ours = (ImageDataset.prepare, ImagesInMemory.prepare)
    own_reader = getattr(type(hooks), "read", ImageFiles.read) is not ImageFiles.read
    if isinstance(hooks, ImageDataset) and type(hooks).prepare in ours and not own_reader:
        chosen = hooks.transforms
        images = {"mean": list(chosen.mean), "std": list(chosen.std), "image_size": chosen.image_size}
        # Images in memory are resized after they were read.
        images["read_size"] = hooks.images.shape[-1] if isinstance(hooks, ImagesInMemory) else chosen.image_size
    return {"name": data_name(dataset), "classes": [str(name) for name in classes_of(dataset)], "images": images}


class SavedImages(ImagesInMemory):
    """Takes the place of the training set of a checkpoint: its classes and preparation, with two black images.

    description: of `describe`, with `images`.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        images = dict(description["images"])
        self.read_size = images.pop("read_size")
        black = torch.zeros(2, 3, self.read_size, self.read_size, dtype=torch.uint8)
        super().__init__(black, torch.zeros(2, dtype=torch.int64), description["classes"], ImageTransforms(**images))

    def read(self, paths: Sequence[Path]) -> Tensor:
        """Inputs of the model, prepared as in an evaluation: [b, 3, image_size, image_size]. Raises SetupError."""
        images = torch.stack([read_square(path, self.read_size) for path in paths])
        inputs, _ = self.prepare((torch.zeros(len(images)), torch.arange(len(images)), images))
        return inputs
