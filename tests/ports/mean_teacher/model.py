"""Mean Teacher: a student, a teacher whose weights are an average of the student's, the losses and the metrics.

Tarvainen and Valpola, 2017, https://arxiv.org/abs/1703.01780; their code is
https://github.com/CuriousAI/mean-teacher.
"""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MeanTeacher(nn.Module):
    """Two networks of the same form. Gradients train the student alone.

    The teacher is always in evaluation mode: its BatchNorm layers use an average of the student's statistics.
    """

    def __init__(self, width: int, classes: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.student = nn.Sequential(
            *_block(3, width // 2),
            *_block(width // 2, width),
            *_block(width, width),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes)),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def train(self, mode: bool = True) -> "MeanTeacher":
        """Set the mode of the student. The teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """views [b, 1 or 2, 3, h, w] -> logits of the student and of the teacher, each [b, classes].

        The student sees the first view, and the teacher the last one.
        """
        with torch.no_grad():
            of_teacher = self.teacher(views[:, -1])
        return self.student(views[:, 0]), of_teacher

    @torch.no_grad()
    def update_teacher(self) -> None:
        """teacher = decay x teacher + (1 - decay) x student, for each weight and each statistic of BatchNorm."""
        ours, theirs = (chain(part.parameters(), part.buffers()) for part in (self.teacher, self.student))
        for own, of_student in zip(ours, theirs, strict=True):
            if own.is_floating_point():
                own.lerp_(of_student, 1 - self.decay)
            else:  # the number of batches that BatchNorm has seen
                own.copy_(of_student)


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The student and the teacher, on the CPU."""
    return MeanTeacher(config.width, len(train_set.classes), config.teacher_decay)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with Nesterov's momentum, for the student. The teacher follows after each step."""
    student = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(
        student, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.momentum > 0
    )
    optimizer.register_step_post_hook(lambda *_: model.update_teacher())  # type: ignore[operator]
    return optimizer


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """views [b, 1 or 2, 3, h, w] -> logits of the student and of the teacher, each [b, classes]."""
    return model(inputs)


def compute_loss(outputs: tuple[Tensor, Tensor], targets: Tensor, config: Any) -> Tensor:
    """The cross-entropy of the labelled samples, and the mean square difference of all probabilities -> [].

    The sum of the cross-entropy is divided by the number of all samples, as in the original: a batch may have no label.
    """
    student, teacher = outputs
    supervised = F.cross_entropy(student, targets, reduction="sum") / len(targets)
    return supervised + config.consistency * F.mse_loss(student.softmax(1), teacher.softmax(1))


def batch_totals(loss: Tensor, outputs: tuple[Tensor, Tensor], targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch. An unlabelled sample, with target -100, is never correct."""
    student, teacher = ((logits.argmax(1) == targets).count_nonzero() for logits in outputs)
    return {
        "loss": loss.detach() * len(targets),
        "teacher": teacher,
        "student": student,
        "labelled": (targets >= 0).count_nonzero(),
        "count": len(targets),
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss; and of the labelled samples, the accuracy of the teacher and of the student in 0 to 1."""
    labelled = max(1, totals["labelled"].item())
    return {
        "loss": totals["loss"].item() / totals["count"].item(),
        "accuracy": totals["teacher"].item() / labelled,
        "student_accuracy": totals["student"].item() / labelled,
    }


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
