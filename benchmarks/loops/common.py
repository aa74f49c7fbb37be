"""The options, the model and the data, which all loops share. Code that is specific to a library is in its loop.

No loop evaluates or augments. Each trains, reports its loss, and saves once per epoch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchvision
from torchvision import transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
SGD_OPTIONS: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4}


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of the model and of the step."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--project", required=True, help="the rendered project, which has the ToyModel")
    parser.add_argument("--model", default="ToyModel", help="ToyModel, or one of torchvision's")
    parser.add_argument("--batch-size", type=int, required=True, help="per process")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser


def parse_options(description: str | None) -> argparse.Namespace:
    """The options of a loop. Creates the directory of --output."""
    parser = model_parser(description)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--dataset", choices=("cifar10", "imagefolder"), default="cifar10")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2, help="per process")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "loops"), help="for checkpoints")
    options = parser.parse_args()
    if options.dataset == "cifar10" and options.image_size != 32:
        parser.error(f"--image-size {options.image_size}: CIFAR-10's images are not resized; remove it")
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def memory_format(options: argparse.Namespace) -> torch.memory_format:
    return torch.channels_last if options.channels_last else torch.contiguous_format


def build_model(options: argparse.Namespace, classes: int) -> torch.nn.Module:
    """The model of --model, on the CPU, neither compiled nor wrapped."""
    sys.path.insert(0, options.project)
    from model import ToyModel

    if options.model == "ToyModel":
        model: torch.nn.Module = ToyModel(classes, options.image_size)
    else:
        model = torchvision.models.get_model(options.model, num_classes=classes)
    return model.to(memory_format=memory_format(options))


def build_dataset(options: argparse.Namespace, normalize: bool = True) -> torchvision.datasets.VisionDataset:
    """The training images, read as in torchvision's examples: one PIL image at a time, to float [3, h, w]."""
    steps: list[Any] = [transforms.ToTensor()]
    if normalize:
        steps.append(transforms.Normalize(MEAN, STD))
    if options.dataset == "cifar10":
        return torchvision.datasets.CIFAR10(options.data_dir, train=True, transform=transforms.Compose(steps))
    steps = [transforms.Resize(options.image_size), transforms.CenterCrop(options.image_size), *steps]
    return torchvision.datasets.ImageFolder(options.data_dir / "train", transform=transforms.Compose(steps))


def loader_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of every DataLoader. Steps are timed, so all batches have the same size."""
    return {
        "batch_size": options.batch_size,
        "num_workers": options.workers,
        "pin_memory": torch.cuda.is_available(),
        "drop_last": True,
    }
