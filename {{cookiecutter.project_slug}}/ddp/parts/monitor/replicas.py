"""Whether a fault has changed a bit: sums of the bits of tensors, compared between ranks or between two computations.

A flipped bit of a weight, or of the state of an optimizer, stays on its rank: nothing compares the ranks otherwise.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp.core.errors import Diverged, first_few
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import named_leaves

CAUSE = (
    "a processor or memory is faulty: repeat without that machine. Or your code makes ranks differ, such as numbers of "
    "random or numpy in apply_gradients, where those of torch are the same on all ranks; if it should: --guard 0"
)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of `tensor`, read as integers of 8 bytes: an int64, on its device. Any one bit changes it."""
    data = tensor.detach().to_dense().contiguous()
    if data.storage_offset() * data.element_size() % 8:  # such integers start at multiples of their size
        data = data.clone()
    data = data.flatten().view(torch.uint8)
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


def bit_sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Those of many tensors, by name. Waits for the device."""
    sums = {name: bit_sum(tensor) for name, tensor in tensors.items()}
    found: dict[str, int] = {}
    for device in {tensor.device for tensor in sums.values()}:
        here = {name: tensor for name, tensor in sums.items() if tensor.device == device}
        found |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return {name: found[name] for name in tensors}


PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses may hold another part on each rank


def replicated(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What DDP keeps equal on all ranks: the weights of the modules in `parts`, and the states of the optimizers."""
    tensors: dict[str, torch.Tensor] = {}
    for key, part in parts.items():
        module = part if isinstance(part, torch.nn.Module) else getattr(part, "module", None)  # ModelEma has one
        if isinstance(module, torch.nn.Module):
            tensors |= {f"{key}: {name}": weight for name, weight in module.named_parameters()}
    names = {weight: name for name, weight in tensors.items()}
    for key, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            for number, (weight, state) in enumerate(part.state.items()):
                of = names.get(weight, str(number))
                tensors |= {f"{key}: {name} of {of}": each for name, each in state.items() if torch.is_tensor(each)}
            if not part.state:  # it consists of others
                states = {f"{key}: {keys}": each for keys, each in named_leaves(part.state_dict())}
                tensors |= {name: each for name, each in states.items() if torch.is_tensor(each)}
    return {name: tensor for name, tensor in tensors.items() if type(tensor) in PLAIN}


def check_replicas(parts: Mapping[str, Any], ctx: DistContext) -> None:
    """Raise Diverged, on every rank, unless all have the same weights and optimizer states. Call on every rank.

    parts: the fields of Training, by name.
    """
    if ctx.world_size == 1:
        return
    sums = bit_sums(replicated(parts))
    everyone = ctx.compare(sums)
    if not everyone:
        return
    states = [str(each) for each in everyone]
    most, count = Counter(states).most_common()[0]
    names = dict.fromkeys(name for each in everyone for name in each)
    first = next(name for name in names if len({each.get(name) for each in everyone}) > 1)
    wrong = [rank for rank, state in enumerate(states) if state != most or 2 * count <= ctx.world_size]
    who = rank_hosts(wrong, ctx) + (" differs from the others" if len(wrong) == 1 else " differ")
    raise Diverged(f"the ranks no longer have the same weights: {who}, first in {first}: {CAUSE}")


def rank_hosts(ranks: Sequence[int], ctx: DistContext) -> str:
    """`rank 3 (gpu2)`, or `rank 0 (gpu1), rank 3 (gpu2)`."""
    return first_few([f"rank {rank} ({ctx.hosts[rank]})" for rank in ranks]).replace(";", ",")
