"""The model, its optimizer, its loss and its metrics. Edit me: main.py calls the public functions, as `task`."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ToyModel(nn.Module):
    """The small network of https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html."""

    def __init__(self, classes: int = 10, image_size: int = 32) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2  # after two convolutions and two pools: 5 for images of 32 x 32
        if side < 1:
            raise ModelError(f"--image-size {image_size}: ToyModel needs at least 16")
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [b, 3, 32, 32], normalised -> logits [b, classes]."""
        x = self.pool(F.relu(self.conv1(images)))  # [b, 6, 14, 14]
        x = self.pool(F.relu(self.conv2(x)))  # [b, 16, 5, 5]
        x = x.flatten(1)  # [b, 400]
        x = F.relu(self.fc1(x))  # [b, 120]
        x = F.relu(self.fc2(x))  # [b, 84]
        return self.fc3(x)


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model for --model, sized to the dataset, on the CPU. Raises ModelError if there is no such model."""
    classes = len(train_set.classes)
    if config.model == "ToyModel":
        model: nn.Module = ToyModel(classes, config.image_size)
    else:
        model = _torchvision_model(config, classes)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with momentum. ddp/training/schedule.py then sets the learning rate of each step."""
    # Not fused: fused SGD corrupts momentum when GradScaler skips a step, and fails if parameters get gradients later.
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Any, targets: Any) -> Any:
    """The outputs of `model`. Inputs in a dictionary are keyword arguments. Some models need `targets` too."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of a batch. outputs [b, classes], targets [b] -> []. May be None in an evaluation.

    Smooth labels, and call collectives, only if torch.is_grad_enabled(): evaluating ranks have different batches.
    If a loss, or each of a dictionary, is a mean over tokens or the like, define loss_terms: see docs/concepts.md.
    """
    return F.cross_entropy(outputs, targets)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch, which are added up over batches and ranks. Training needs `loss`.

    A run ends when `loss` is not finite: let it include every loss. A list, with one entry per sample, is gathered in
    the order of the samples: for metrics that need all predictions. Lists of a whole epoch of training are not kept.
    """
    return {
        "loss": loss.detach() * len(targets),
        "correct": (outputs.argmax(1) == targets).sum(),
        "count": len(targets),
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log, from the totals over all samples: the mean loss, and the accuracy in 0 to 1."""
    count = totals["count"].item()
    return {"loss": totals["loss"].item() / count, "accuracy": totals["correct"].item() / count}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]


class ModelError(ValueError):
    """A model that cannot be built. Its exit_code makes it one line without a traceback: see ddp/core/errors.py."""

    exit_code = 2
    on_every_rank = True


def _torchvision_model(config: Any, classes: int) -> nn.Module:
    import torchvision  # slow to import, and only needed here

    name, size, batch = config.model, config.image_size, config.batch_size
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = ", ".join(get_close_matches(name, names) or names)
        raise ModelError(f"--model {name}: neither ToyModel nor one of torchvision's, such as {near}")
    one_output = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, num_classes=classes, **one_output).train(not config.evaluate)
    shapes = {key: tensor.to("meta") for key, tensor in model.state_dict().items()}
    try:  # with shapes only, at no cost: a model that is too deep for small images fails here
        torch.func.functional_call(model, shapes, torch.empty(batch, 3, size, size, device="meta"))
    except Exception as error:
        tried = f"--model {name} cannot take --batch-size {batch} of --image-size {size}"
        raise ModelError(f"{tried}: try larger ones, such as 64 of 224 ({error})") from error
    return model
