"""A part of a training set as the validation set."""

import torch
from torch import Tensor

from ddp.distributed.seeds import derive_seed


def split_by_class(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the validation samples, in order. targets: the class of each sample, [n].

    The seed draws `fraction` of each class, rounded to whole samples. At least one of each class remains for training.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed))
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique():
        members = (targets == label).nonzero().flatten()
        count = min(round(fraction * len(members)), len(members) - 1)
        chosen[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
