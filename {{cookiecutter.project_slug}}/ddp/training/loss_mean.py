"""The loss of a step: the mean over what counts in its global batch, however that is divided."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from ddp.core.errors import UsageError
from ddp.core.parts import Compute
from ddp.core.run_config import RunConfig
from ddp.data.dataset import check_loss
from ddp.data.loader import Step
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import leaves


class LossMean:
    """Makes each loss of a step the mean over its terms in the global batch, if model.py defines `loss_terms`.

    Without it nothing is added to a step, and a loss is the mean of the means of passes and ranks. That is the same
    unless they have different numbers of terms: of tokens that are not padding, for example.
    """

    def __init__(self, task: Any, batches: Step | list[Any], config: RunConfig, ctx: DistContext) -> None:
        self.count: Any = getattr(task, "loss_terms", None)
        self.batches, self.passes, self.ctx = batches, config.grad_accum_steps, ctx
        self.terms: Any = self.count and torch.zeros(1, dtype=torch.double)  # of each loss, of this rank, in all passes
        self.expected: torch.Tensor | None = None  # of a rank in a pass, on average over those that are known at first

    def weigh(self, loss: Any, outputs: Any, targets: Any) -> Any:
        """The `loss` of one pass, weighted by its terms; the sum, of several. Call on every rank. Raises UsageError."""
        losses = loss if isinstance(loss, Mapping) else {"loss": loss}
        for each in losses.values():
            check_loss(each)
        if len(losses) > 1 and "loss" in losses:  # elsewhere it is the sum of the others
            raise UsageError("compute_loss returned `loss` and others, whose sum is trained: leave it out or rename it")
        if self.count is None:
            return loss if loss is not losses else sum(losses.values())
        terms = self._terms(losses, outputs, targets)
        if self.expected is None:  # so that gradients are about as large as without weights: fp16 has a narrow range
            left = self.batches.rest() if isinstance(self.batches, Step) else self.batches[1:]
            others = left if len(losses) > 1 else []  # each needs a factor; finish() applies only one
            known = torch.stack([terms, *(self._terms(losses, None, targets) for _, targets in others)])
            sums = self.ctx.sum(known.sum(0))
            self.expected = torch.where(sums > 0, sums, 1.0) / self.ctx.world_size / len(known)
        self.terms = self.terms + terms
        weights = zip(losses.values(), (terms / self.expected).tolist(), strict=True)
        weighted = [each * weight for each, weight in weights if weight]
        if len(weighted) == len(losses):
            return sum(weighted[1:], weighted[0])
        # Without terms, a loss may be 0 / 0, but the other ranks wait for this rank's gradient of each weight.
        parts = [part for part in leaves(outputs) if getattr(part, "requires_grad", False)] or losses.values()
        return sum([*weighted, *((0 * part).nan_to_num().sum() for part in parts)])

    def finish(self, model: torch.nn.Module) -> bool:
        """Scale the gradients of `model` after the last pass. False if no rank has a term: then take no step."""
        if self.count is None:
            return True
        totals = self.ctx.sum(self.terms.clone())  # it may be called for several models
        if len(totals) == 1 and self.expected is not None:
            factor = (self.expected * self.ctx.world_size * self.passes).item() / (totals.item() or 1.0)
            for gradient in (weight.grad for weight in model.parameters() if factor != 1 and weight.grad is not None):
                gradient.mul_(factor)
        return totals.sum().item() > 0

    def _terms(self, losses: Mapping[str, Any], outputs: Any, targets: Any) -> torch.Tensor:
        found = self.count(outputs, targets)
        found = found if isinstance(found, Mapping) else dict.fromkeys(losses, found)
        if found.keys() != losses.keys():
            raise UsageError(f"loss_terms returns {sorted(found)}, but compute_loss {sorted(losses)}: use equal names")
        return torch.tensor([_checked_terms(found[name]) for name in losses], dtype=torch.double)


def check_result(compute_gradients: Compute, *given: Any) -> bool:
    """What compute_gradients of main.py returns. Raises UsageError for None, which would leave out each step."""
    result = compute_gradients(*given)
    if result is None:
        raise UsageError("compute_gradients in main.py returned None: return mean.finish(training.model), or True")
    return bool(result)


def _checked_terms(terms: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):
        if 0 <= float(terms) < float("inf"):
            return float(terms)
    raise UsageError(f"loss_terms in model.py returned {terms!r}: return how many terms the loss is a mean of")
