"""loss_terms in model.py: the gradient is that of the mean over all terms of a global batch, however it is divided."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from outputs import lines, newest
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import main
import model
from config import Config
from ddp.checkpoint import storage
from ddp.core.errors import UsageError
from ddp.data.dataset import BatchDataset, Datasets
from ddp.data.loader import Step
from ddp.distributed.tensors import whole_tree
from ddp.training.loss_mean import LossMean
from faults import fault
from processes import on_ranks, train

pytestmark = pytest.mark.slow
VOCAB, LONGEST, PAD = 32, 63, -100


class Sentences(BatchDataset):
    """4 to 63 tokens each, padded: (tokens [63], the next tokens [63], PAD after the end). `empty` have none."""

    in_memory = True

    def __init__(self, samples: int, empty: range = range(0)) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.tokens = torch.randint(VOCAB, (samples, LONGEST + 1), generator=generator)
        self.lengths = torch.randint(4, LONGEST + 1, (samples,), generator=generator)
        self.lengths[empty.start : empty.stop] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, length = self.tokens[index], self.lengths[index]
        return tokens[:-1], tokens[1:].masked_fill(torch.arange(LONGEST) >= length, PAD)


class LanguageModel(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def mean_of_tokens(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """0 / 0 without a token, in the gradient too."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    counts = (targets != PAD).flatten()
    return (losses * counts).sum() / counts.sum()


def loss_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    return (targets != PAD).sum()


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    terms = loss_terms(outputs, targets)
    return {"loss": torch.where(terms > 0, loss.detach(), 0) * terms, "terms": terms}


def compute_metrics(totals: dict[str, Tensor]) -> dict[str, float]:
    return {"loss": totals["loss"].item() / max(1, totals["terms"].item())}


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model with padded sentences, in place of model.py and data.py."""
    own = {"build_model": LanguageModel, "compute_loss": mean_of_tokens, "batch_totals": batch_totals}
    own |= {"compute_metrics": compute_metrics, "metric_for_best_model": lambda metrics: -metrics["loss"]}
    for name, value in own.items():
        monkeypatch.setattr(model, name, value)
    monkeypatch.setattr(model, "loss_terms", loss_terms, raising=False)
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Sentences(320), Sentences(60)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


COMMON = (
    "--device=cpu",
    "--dataset=synthetic",
    "--lr=0.5",
    "--lr-schedule=constant",
    "--warmup-epochs=0",
    "--log-every=1",
)
DIVISIONS = {"1 x 8": (1, 8, 1), "2 x 2 x 2": (2, 2, 2)}  # processes, samples, passes
OTHERS = {"2 x 4": (2, 4, 1), "1 x 2 x 4": (1, 2, 4)}


def trained(folder: Path, *given: Any, divisions: Any = DIVISIONS, code: int = 0) -> dict[str, Any]:
    """The checkpoint and the losses of a run for each way to divide a global batch of 8."""
    found = {}
    for name, (world_size, batch_size, passes) in divisions.items():
        divided = ("--batch-size", batch_size, "--grad-accum-steps", passes, "--output-dir", folder / name)
        train(world_size, *COMMON, *divided, *given, code=code)
        losses = [line["loss"] for line in lines(folder / name) if line["split"] in ("train", "val")]
        found[name] = whole_tree(storage.read(newest(folder / name))), losses
    return found


def distances(runs: dict[str, Any]) -> tuple[float, float]:
    """How far the weights of all runs are from those of the first, and how far their losses."""
    (first, losses), *others = runs.values()
    weights = [
        (content["model"][name] - weight).abs().max().item()
        for content, _ in others
        for name, weight in first["model"].items()
    ]
    return max(weights), max(abs(a - b) for _, each in others for a, b in zip(each, losses, strict=True))


@fault(54)
@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", [(), ("--clip-grad", 0.1)])
def test_a_global_batch_may_be_divided_in_any_way(clip: tuple[Any, ...], tmp_path: Path) -> None:
    weights, losses = distances(trained(tmp_path, "--max-steps", 40, *clip, divisions=DIVISIONS | OTHERS))
    assert weights < 1e-5 and losses < 1e-5


def test_without_loss_terms_the_means_of_the_parts_are_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that loss_terms avoids: it is large enough to see."""
    monkeypatch.delattr(model, "loss_terms")
    weights, losses = distances(trained(tmp_path, "--max-steps", 40))
    assert weights > 0.05 and losses > 0.005


def test_the_first_gradient_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Computed here by one backward pass, without any of ddp/."""
    runs = trained(tmp_path, "--max-steps=1", "--momentum=0", "--weight-decay=0", divisions={"2 x 4": (2, 4, 1)})
    (content, _), sentences = runs["2 x 4"], Sentences(320)
    config = replace(Config.parse([]), batch_size=8)

    def whole(ctx: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        plain = LanguageModel()
        loader = main.TrainLoader(sentences, config, ctx)
        inputs, targets = next(next(loader.steps(0)))
        mean_of_tokens(plain(inputs), targets, config).backward()
        return {
            name: weight.detach() - 0.5 * weight.grad
            for name, weight in plain.named_parameters()
            if weight.grad is not None
        }

    (expected,) = on_ranks(1, whole)
    for name, weight in expected.items():
        torch.testing.assert_close(content["model"][name], weight, rtol=0, atol=1e-6)


def test_in_fp16_as_well_as_two_ways_to_accumulate(tmp_path: Path) -> None:
    """And gradients of thousands of terms do not overflow, neither in the backward pass nor on the network."""
    given = ("--max-steps", 20, "--precision", "fp16")
    alone = distances(trained(tmp_path / "alone", *given, divisions={"8": (1, 8, 1), "4 x 2": (1, 4, 2)}))
    runs = trained(tmp_path / "all", *given)
    weights, losses = distances(runs)
    assert weights < 3 * alone[0] + 1e-4 and losses < 3 * alone[1] + 1e-4
    scales = {content["scaler"]["scale"] for content, _ in runs.values()}
    assert scales == {65536.0}, "a step was skipped: its gradient has overflowed"


def many_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1_000_000 * loss_terms(outputs, targets)


def test_compressed_gradients_do_not_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "loss_terms", many_terms)
    exact = trained(tmp_path / "exact", "--max-steps", 20, divisions={"2 x 4": (2, 4, 1)})
    wrap_model = main.wrap_model

    def wrap_and_compress(*arguments: Any) -> Any:
        ddp_model = wrap_model(*arguments)
        ddp_model.register_comm_hook(None, fp16_compress_hook)
        return ddp_model

    monkeypatch.setattr(main, "wrap_model", wrap_and_compress)
    divisions = {"2 x 4": (2, 4, 1), "2 x 2 x 2": (2, 2, 2)}
    compressed = trained(tmp_path / "fp16", "--max-steps", 20, divisions=divisions)
    weights, losses = distances({**exact, **{f"{name} fp16": run for name, run in compressed.items()}})
    assert weights < 0.01 and losses < 0.001


def test_passes_ranks_and_steps_without_a_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part without a term adds nothing. A step without any changes nothing: no momentum, no decay, no average."""
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Sentences(320, empty=range(0, 240))))
    runs = trained(tmp_path / "sparse", "--max-steps", 40, "--ema", 0.9)
    assert all(math.isfinite(loss) for _, losses in runs.values() for loss in losses)
    assert distances(runs)[0] < 1e-5

    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Sentences(320, empty=range(0, 320))))
    for precision in ("fp32", "fp16"):
        given = ("--max-steps", 3, "--ema", 0.9, "--clip-grad", 1, "--precision", precision)
        for content, losses in trained(tmp_path / precision, *given).values():
            torch.manual_seed(0)
            initial = LanguageModel().state_dict()
            for part in ("model", "ema"):
                assert all(torch.equal(content[part][name], weight) for name, weight in initial.items())
            assert content["optimizer"]["state"] == {} and content["step"] == 3 and set(losses) == {0.0}


@pytest.mark.parametrize("terms", [-1, math.nan, "many", torch.ones(2)])
def test_a_wrong_number_of_terms_is_refused(terms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "loss_terms", lambda outputs, targets: terms)

    def raised(ctx: Any) -> str:
        with pytest.raises(UsageError) as error:
            LossMean(model, Step([]), Config.parse([]), ctx).weigh(torch.ones((), requires_grad=True), None, None)
        return str(error.value)

    (text,) = on_ranks(1, raised)
    assert text.startswith("loss_terms in model.py returned ") and text.endswith(
        ": return how many terms the loss is a mean of"
    )


def test_without_loss_terms_nothing_is_added_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a collective nor a copy of the gradients."""

    def collectives(ctx: Any) -> list[int]:
        calls: list[int] = []
        monkeypatch.setattr(type(ctx), "sum", lambda ctx, tensor: calls.append(1) or tensor)
        monkeypatch.setattr(Tensor, "mul_", lambda *_: calls.append(1))
        found = []
        for task in (model, object()):
            calls.clear()
            mean = LossMean(task, Step([]), Config.parse(["--grad-accum-steps=2"]), ctx)
            loss = torch.ones((), requires_grad=True)
            weighed = [mean.weigh(loss, torch.zeros(1), torch.zeros(1)) for _ in range(2)]
            assert mean.finish(LanguageModel()) and (task is model or weighed == [loss, loss])
            found.append(len(calls))
        return found

    assert on_ranks(1, collectives) == [[2, 0]]


# ---- several losses -------------------------------------------------------------------------------------------------


def two_losses(outputs: Tensor, targets: Tensor, config: Any) -> dict[str, Tensor]:
    """The mean over all tokens, and a mean over those of one kind, of which a part may have none."""
    few = targets.flatten() < 4
    large = outputs.flatten(0, 1).square().mean(1)
    kinds = few & (targets.flatten() != PAD)
    return {"tokens": mean_of_tokens(outputs, targets, config), "few": (large * kinds).sum() / kinds.sum().clamp(min=1)}


def two_terms(outputs: Any, targets: Tensor) -> dict[str, Any]:
    return {"tokens": (targets != PAD).sum(), "few": ((targets < 4) & (targets != PAD)).sum().item()}


def totals_of_two(loss: dict[str, Tensor], outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return batch_totals(loss["tokens"], outputs, targets)


def test_several_losses_have_denominators_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "compute_loss", two_losses)
    monkeypatch.setattr(model, "batch_totals", totals_of_two)
    monkeypatch.setattr(model, "loss_terms", two_terms)
    weights, losses = distances(trained(tmp_path / "terms", "--max-steps", 20))
    assert weights < 1e-5 and losses < 1e-5
    monkeypatch.delattr(model, "loss_terms")
    weights, _ = distances(trained(tmp_path / "without", "--max-steps", 20))
    assert weights > 0.03


class TwoHeads(LanguageModel):
    """The second head has a loss of its own, over few tokens: over none in most batches."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.length = nn.Linear(16, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embedding(tokens)
        return self.head(found), self.length(found)


def rare(targets: Tensor) -> Tensor:
    return (targets[:, :2] == 0).flatten()


def losses_of_two_heads(outputs: Any, targets: Tensor, config: Any) -> dict[str, Tensor]:
    chosen = rare(targets)
    values = (outputs[1][:, :2].flatten().tanh() * chosen).square()
    return {"tokens": mean_of_tokens(outputs[0], targets, config), "rare": values.sum() / chosen.sum()}


def test_a_loss_without_terms_on_one_rank_or_on_all_gives_its_weights_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "build_model", TwoHeads)
    monkeypatch.setattr(model, "compute_loss", losses_of_two_heads)
    monkeypatch.setattr(
        model, "batch_totals", lambda loss, outputs, targets: batch_totals(loss["tokens"], outputs[0], targets)
    )
    terms = lambda outputs, targets: {"tokens": (targets != PAD).sum(), "rare": rare(targets).sum()}  # noqa: E731
    monkeypatch.setattr(model, "loss_terms", terms)
    weights, losses = distances(trained(tmp_path, "--max-steps", 20))
    assert weights < 1e-5 and losses < 1e-5


def test_several_losses_must_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones((), requires_grad=True)

    def refused(ctx: Any) -> str:
        mean = LossMean(model, Step([]), Config.parse([]), ctx)
        with pytest.raises(UsageError) as error:
            mean.weigh({"a": one, "b": one}, None, None)
        return str(error.value)

    monkeypatch.setattr(model, "loss_terms", lambda outputs, targets: {"a": 1})
    assert on_ranks(1, refused) == ["loss_terms returns ['a'], but compute_loss ['a', 'b']: use equal names"]


def test_class_weights_are_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of terms need not be an integer."""
    kinds = torch.linspace(0.1, 3.0, VOCAB)

    def weighted(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weight=kinds, ignore_index=PAD)

    monkeypatch.setattr(model, "compute_loss", weighted)
    monkeypatch.setattr(model, "loss_terms", lambda outputs, targets: kinds[targets[targets != PAD]].sum())
    weights, _ = distances(trained(tmp_path, "--max-steps", 20))
    assert weights < 1e-5
