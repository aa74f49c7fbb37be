"""Classify image files with a trained model.

python predict.py runs/cifar10-ToyModel/best.pt cat.jpg dog.jpg
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P and -I leave it out
from config import Config
from ddp.checkpoint.reuse import load_checkpoint
from ddp.core.errors import UsageError
from ddp.core.options import OptionParser, number
from ddp.entrypoint.run_main import run_and_exit
from image_files import read_square
from images import ImageDataset, ImageTransforms
from model import build_model, forward

BATCH_SIZE = 64


class SavedImages(ImageDataset):
    """The classes and the preparation of the training set of a checkpoint, without its images.

    description: content["dataset"] of the checkpoint, with what ImageDataset.describe in images.py adds.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        images = dict(description["images"])
        self.size = images.pop("read_size")
        super().__init__(0, description["classes"], ImageTransforms(**images), self.size)

    def __len__(self) -> int:
        raise NotImplementedError("its length")

    def read(self, paths: Sequence[Path]) -> Tensor:
        """Inputs of the model, prepared as in an evaluation: [b, 3, image_size, image_size]. Raises SetupError."""
        images = torch.stack([read_square(path, self.size, self.transforms.value_range) for path in paths])
        inputs, _ = self.prepare((torch.zeros(len(images)), torch.arange(len(images)), images))
        return inputs


def main(words: Sequence[str] | None = None) -> int:
    """Print the most likely classes of each image. Returns the exit code."""
    parser = OptionParser(usage="python predict.py CHECKPOINT IMAGE [IMAGE ...] [--top N]", description=__doc__)
    parser.add_argument("checkpoint", help="such as runs/cifar10-ToyModel/best.pt", type=Path)
    parser.add_argument("images", help="image files", nargs="+", type=Path)
    parser.add_argument("--top", help="classes to print for each image", type=number(int, 1), default=3)
    given = parser.parse_args(words)

    content, config = load_checkpoint(given.checkpoint, Config)
    description = content["dataset"]
    what = ""
    if not description["classes"] or not description.get("images") or "model" not in content:
        what = "holds no classes, or does not know how its images were prepared"
    elif wrappers := description.get("wrappers"):
        what = f"is of data in a {wrappers[0]}, which may change images"
    if what:
        raise UsageError(f"{given.checkpoint} {what}: edit predict.py, so that your own dataset prepares them")
    if missing := [str(path) for path in given.images if not os.path.exists(path)]:
        raise UsageError(f"there is no file {missing[0]}")
    dataset = SavedImages(description)
    try:
        model = build_model(config, dataset)
    except (AttributeError, NotImplementedError) as error:
        if getattr(error, "obj", dataset) is not dataset:
            raise
        remedy = "a checkpoint holds only its classes and how images are prepared: edit SavedImages in predict.py"
        raise UsageError(f"build_model in model.py needs more of the training set ({error}): {remedy}") from error
    model.load_state_dict(content.get("ema", content["model"]))  # what was evaluated
    model.eval()

    for start in range(0, len(given.images), BATCH_SIZE):
        paths = given.images[start : start + BATCH_SIZE]
        for path, probabilities in zip(paths, predict(model, dataset.read(paths)), strict=True):
            values, places = probabilities.topk(min(given.top, len(dataset.classes)))
            found = [f"{dataset.classes[place]} {value:.1%}" for place, value in zip(places, values, strict=True)]
            print(f"{path}: {', '.join(found)}")
    return 0


@torch.no_grad()
def predict(model: torch.nn.Module, inputs: Tensor) -> Tensor:
    """The probabilities of the classes: [b, classes]. Raises UsageError for outputs of another shape."""
    outputs = forward(model, inputs, None)
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        raise UsageError("the outputs of the model are no logits [b, classes]: edit predict in predict.py")
    if outputs.shape[1] == 1:  # one logit, of the second of two classes
        outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
    return outputs.float().softmax(1)


if __name__ == "__main__":
    run_and_exit(main)
