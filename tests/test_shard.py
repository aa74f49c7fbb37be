"""--shard: the same weights, checkpoints and metrics as DDP, each rank with a part of the memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outputs import newest
from template_copy import changed_main
from torch import Tensor, nn

import compare
import data
import main
from config import Config
from ddp.checkpoint import storage
from ddp.checkpoint.reuse import init_weights
from ddp.core.errors import CheckpointError, UsageError
from ddp.core.process_exit import translate_exception
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.tensors import is_split, local, whole, whole_tree
from ddp.entrypoint.run_main import run_as_rank
from ddp.parts.fsdp.blocks import find_blocks, group_blocks
from ddp.parts.fsdp.building import build_in_turn
from ddp.parts.fsdp.sharding import shard_model
from ddp.training.wrapping import autocast, wrap_model
from model import ToyModel
from processes import Ranks, on_ranks, train
from small_models import build_awkward

SYNTHETIC = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--log-every", 3)


def options(*words: Any) -> Config:
    return Config.parse([str(word) for word in words])


def ddp_and_sharded(ctx: DistContext, make: Any, *words: str) -> Iterator[tuple[Any, Any]]:
    """A model of `make`, and its wrapper: with DDP, then with --shard, from the same weights."""
    for shard in ([], ["--shard"]):
        torch.manual_seed(0)
        model = make()
        yield model, wrap_model(model, options("--device=cpu", *shard, *words), ctx)


def stop_at(step: int) -> Any:
    return lambda run: run.request_stop() if run.state.step == step else None


# ---- blocks ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers that share a weight, between two that do not; the head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[2].weight = self.layers[1].weight
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def test_blocks_that_share_a_weight_are_one_and_those_of_the_rest_none() -> None:
    model = Tied()
    assert [*find_blocks(model)] == [*model.layers]
    groups = group_blocks(model, find_blocks(model), warn=False)
    assert groups == [[model.layers[0]], [model.layers[1], model.layers[2]], [model.layers[3]]]
    assert group_blocks(model, [model.layers[0], model.head], warn=False) == [[model.layers[0]]]
    with pytest.raises(UsageError, match="Linear is inside of another block"):
        group_blocks(model, [model.layers, model.layers[0]], warn=False)


# ---- the same as DDP ------------------------------------------------------------------------------------------------


def test_sharded_training_equals_ddp_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, BatchNorm, accumulation, momentum; weights whose rows do not divide by 3, and a rank without rows."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 240, "val": 51})
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    given = (*SYNTHETIC, "--epochs", 2)
    train(2, *given, "--output-dir", tmp_path / "ddp")
    train(2, *given, "--output-dir", tmp_path / "sharded", "--shard")
    assert compare.differences(tmp_path / "ddp", tmp_path / "sharded") == []
    # Exact on three processes, and with accumulation, which reduces each pass, where DDP reduces their sum.
    given = (*given, "--shard", "--grad-accum-steps", 2)
    train(3, *given, "--output-dir", tmp_path / "whole")
    train(3, *given, "--output-dir", tmp_path / "parts", code=75, after_step=stop_at(3))
    train(3, *given, "--output-dir", tmp_path / "parts")
    assert compare.differences(tmp_path / "whole", tmp_path / "parts") == []


def test_tied_weights_stay_one_in_a_checkpoint() -> None:
    def snapshot_of(ctx: DistContext) -> Any:
        from ddp.distributed.tensors import snapshot

        torch.manual_seed(0)
        model = Tied()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrap_model(model, options("--device=cpu", "--shard"), ctx)
        assert all(map(is_split, model.parameters()))
        copy, _ = snapshot(model.state_dict(), ctx.streams, keep=ctx.rank == 0)
        with torch.no_grad():
            for weight in model.parameters():  # a file is written in the background: of a copy, also by one process
                weight.add_(1)
        if ctx.rank > 0:
            return len(local(model.layers[0].weight))
        assert all(torch.equal(copy[name], before[name]) for name in before)
        assert copy["head.weight"] is copy["embedding.weight"] and copy["layers.1.weight"] is copy["layers.2.weight"]
        assert copy["layers.0.weight"] is not copy["layers.3.weight"]
        return None

    assert on_ranks(3, snapshot_of, "--device=cpu")[1:] == [2, 0]
    assert on_ranks(1, snapshot_of, "--device=cpu") == [None]


class Watched(nn.Linear):
    """Remembers in which format its weight was, and whether autocast was on, which keeps copies of weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.found = self.weight.dtype, len(self.weight), torch.is_autocast_enabled("cpu")
        return super().forward(x)


def test_weights_are_gathered_in_bf16_and_freed_after_a_step_and_after_an_evaluation() -> None:
    def formats(ctx: DistContext) -> Any:
        torch.manual_seed(0)
        config = options("--device=cpu", "--shard", "--precision=bf16")
        model = nn.Module()
        model.layers = nn.Sequential(Watched(4, 4), Watched(4, 4))
        model.top = Watched(4, 4)  # of the root, which torch keeps gathered after a forward pass
        model.forward = lambda x: model.top(model.layers(x))
        wrapped = wrap_model(model, config, ctx)
        with autocast(config, ctx):
            outputs = wrapped(torch.ones(2, 4))
        outputs.sum().backward()
        freed = [all(map(is_split, model.parameters()))]
        with torch.no_grad(), autocast(config, ctx):
            wrapped(torch.ones(2, 4))
        freed.append(all(map(is_split, model.parameters())))
        return freed, {module.found for module in model.modules() if isinstance(module, Watched)}, outputs.dtype

    expected = [True, True], {(torch.bfloat16, 4, False)}, torch.float32
    assert on_ranks(2, formats, "--device=cpu") == [expected] * 2


@pytest.mark.sample(1, "what is trained with --shard")
def test_each_option_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    given = (*SYNTHETIC, "--max-steps", 4)

    def run(name: str, *more: Any) -> dict[str, Any]:
        train(2, *given, "--output-dir", tmp_path / name, *more)
        return whole_tree(storage.read(newest(tmp_path / name)))

    plain = run("plain", "--clip-grad", 0.1)["model"]
    clipped = run("clip", "--shard", "--clip-grad", 0.1)["model"]
    assert all(torch.allclose(plain[name], clipped[name], atol=1e-6) for name in plain)
    again = run("again", "--checkpoint-activations", "--clip-grad", 0.1)["model"]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    both = run("both", "--shard", "--checkpoint-activations", "--clip-grad", 0.1)["model"]
    assert all(torch.equal(clipped[name], both[name]) for name in plain)
    for precision in ("bf16", "fp16"):
        wrapped = run(f"ddp-{precision}", "--precision", precision)["model"]
        sharded = run(precision, "--precision", precision, "--shard")["model"]
        assert {tensor.dtype for tensor in sharded.values()} == {torch.float32, torch.int64}
        assert all(torch.allclose(wrapped[name], sharded[name], atol=1e-3) for name in wrapped)


@pytest.mark.sample(1, "what is trained with --shard")
def test_a_checkpoint_resumes_on_any_number_of_processes_with_and_without_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """2 -> 3 -> 1 -> DDP; the evaluation counts each of 101 samples once."""
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    monkeypatch.setattr(main.task, "build_optimizer", lambda model, config: torch.optim.AdamW(model.parameters(), 1e-3))
    given = ("--dataset=synthetic", "--device=cpu", "--epochs", 3, "--log-every", 1, "--output-dir", tmp_path)
    train(2, *given, "--batch-size", 6, "--shard", code=75, after_step=stop_at(3))
    train(3, *given, "--batch-size", 4, "--shard", code=75, after_step=stop_at(7))
    train(1, *given, "--batch-size", 12, "--shard", code=75, after_step=stop_at(12))
    train(2, *given, "--batch-size", 6)
    lines = compare.metrics_lines(tmp_path)
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert steps == [*range(1, 3 * (640 // 12) + 1)]
    assert all(line["count"] == 101 for line in lines if line["split"] == "val")
    content = storage.read(newest(tmp_path))
    states = content["optimizer"]["state"]
    assert len(states) == len([name for name in content["model"] if name.endswith(("weight", "bias"))])
    assert all(state["step"] == len(steps) for state in states.values())
    found = []
    for processes, more in ((1, ()), (2, ("--shard",)), (3, ("--shard",))):
        output = train(processes, *given, "--evaluate", *more)
        found.append(output[output.index("val  ") :].splitlines()[0])
    assert found[0] == found[1] == found[2]


@pytest.mark.sample(1, "what is trained with --shard")
def test_adamw_with_other_options_and_weights_that_are_loaded_trains_as_with_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    monkeypatch.setattr(main.task, "build_optimizer", lambda model, config: torch.optim.AdamW(model.parameters(), 1e-3))
    train(1, *SYNTHETIC, "--max-steps", 2, "--output-dir", tmp_path / "base")
    given = (*SYNTHETIC, "--init-from", tmp_path / "base" / "best.pt", "--deterministic", "--profile", "--epochs", 1)
    output = train(2, *given, "--output-dir", tmp_path / "ddp")
    sharded = train(2, *given, "--output-dir", tmp_path / "sharded", "--shard")
    assert f"weights from {tmp_path / 'base' / 'best.pt'}: 18 of 18" in output and "18 of 18" in sharded
    assert compare.differences(tmp_path / "ddp", tmp_path / "sharded") == []
    (trace,) = (tmp_path / "sharded").rglob("*trace*")
    assert "all_gather" in trace.read_text() and [*(tmp_path / "ddp").rglob(trace.name)]


def test_a_number_that_is_read_from_rows_is_refused_and_whole_reads_it() -> None:
    """torch gives each rank the sum or the maximum of its own rows, so the ranks would decide differently."""

    def read(ctx: DistContext) -> Any:
        found: list[Any] = []
        for model, wrapped in ddp_and_sharded(ctx, counted):
            (wrapped(torch.ones(1, 4)) * torch.arange(4.0)).sum().backward()
            weight, gradient = model.weight.detach(), model.weight.grad
            found.append([whole(weight.sum()).item(), float(whole(weight.max())), whole(gradient.norm()).item()])
        for read in (lambda tensor: tensor.item(), float, int, bool):
            with pytest.raises(UsageError, match=r"^--shard: (item|__\w+__)\(\) of a tensor of weights: .*write whole"):
                read(weight.sum())
        assert weight[0, 1].item() == 1, "it was sent to all"
        return found

    def counted() -> nn.Module:
        model = nn.Linear(4, 4, bias=False)
        model.weight.data.copy_(torch.arange(16.0).view(4, 4))
        return model

    ddp, sharded = on_ranks(2, read, "--device=cpu")[1]
    assert sharded == pytest.approx(ddp) and ddp[:2] == [120, 15]


def test_an_evaluation_that_counts_a_repeated_batch_is_refused(tmp_path: Path, small: None) -> None:
    """101 samples are 13 batches, so one of two ranks repeats a batch, which a Meter leaves out."""
    count = "            meter.add(task.batch_totals(loss, outputs, targets))\n    return meter.take()"
    by_hand = "            ctx.count = getattr(ctx.work, 'n', 0) + len(targets)\n"
    by_hand += "    return {'loss': 0.0, 'accuracy': 0.0}"
    config = options(*SYNTHETIC, "--max-steps", 1, "--shard", "--output-dir", tmp_path / "out")
    own = changed_main({count: by_hand.replace("ctx.count", "ctx.work.n")})
    ranks = Ranks(2, lambda rank_env: run_as_rank(own, config, rank_env))
    assert ranks.wait() == [2, 2], ranks.output()
    assert "this rank repeats a batch of another one, and evaluate() in main.py counts it: add up" in ranks.output()
    skips = by_hand.replace("ctx.count =", "ctx.work.n = 0 if ctx.work.skip() else")
    ranks = Ranks(2, lambda rank_env: run_as_rank(changed_main({count: skips}), config, rank_env))
    assert ranks.wait() == [0, 0], ranks.output()


def test_muon_orthogonalizes_the_whole_matrix_and_not_the_rows_of_a_rank() -> None:
    """It computes in bf16, so up to its rounding."""

    def updates(ctx: DistContext) -> Any:
        found = []
        for model, wrapped in ddp_and_sharded(ctx, lambda: nn.Linear(40, 20, bias=False)):
            before = whole(model.weight).detach().clone()
            optimizer = torch.optim.Muon(model.parameters(), lr=1.0, weight_decay=0)
            torch.manual_seed(1 + ctx.rank)
            wrapped(torch.randn(32, 40)).square().sum().backward()
            optimizer.step()
            found.append(whole(model.weight).detach() - before)
        return (found[0] - found[1]).norm() / found[0].norm()

    assert max(on_ranks(2, updates, "--device=cpu")) < 0.05


class Branches(nn.Module):
    """Rank 1 does not use the second layer, or one of its weights."""

    def __init__(self, rank: int, block: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.uses_block, self.uses_scale = block or rank == 0, not block or rank == 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x) if self.uses_block else x
        return x * self.scale if self.uses_scale else x


def test_weights_that_one_rank_does_not_use_are_named() -> None:
    def messages(ctx: DistContext) -> list[str]:
        torch.manual_seed(0)
        found = []
        for block in (True, False):
            model = Branches(ctx.rank, block)
            wrap_model(model, options("--device=cpu", "--shard"), ctx)
            with pytest.raises(UsageError) as caught:
                model(torch.zeros(2, 4))
            found.append(str(caught.value))
        return found

    first, second = on_ranks(2, messages, "--device=cpu")
    assert first == second
    assert first[0].startswith("--shard: rank 0 uses all weights, rank 1 uses all weights but scale: ")
    assert first[1].startswith("--shard: rank 0 uses layers.1, rank 1 uses no more: ")


def test_ranks_that_build_other_weights_are_refused() -> None:
    def message(ctx: DistContext) -> str:
        torch.manual_seed(ctx.rank)
        with pytest.raises(UsageError) as caught:
            wrap_model(Tied(), options("--device=cpu", "--shard"), ctx)
        return str(caught.value)

    first, second = on_ranks(2, message, "--device=cpu")
    assert first == second and first.startswith("--shard: build_model made other weights on rank 1 (embedding.weight; ")


# ---- refusals, and traps that FSDP2 does not report ------------------------------------------------------------------


class Number(nn.Linear):
    """A layer with a weight that is a single number."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def half_of_it() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (Number, "--shard: scale is a single number, which cannot be split: give it the shape [1]"),
    "channels-last": (
        lambda: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last),
        "--shard: weight is not contiguous: remove --channels-last, or call contiguous()",
    ),
    "two formats": (
        half_of_it,
        "--shard: 0.bias is float32 and 1.bias is bfloat16: build all weights in one number format",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_cannot_be_split_are_refused_before_any_rank_waits(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        build_in_turn(make, RankEnv(1, 2))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ema", "0.9"], "--ema with --shard: torch cannot copy a sharded model; remove one of them"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        options("--shard", *words)
    assert str(caught.value) == message


def test_gloo_on_a_gpu_is_refused() -> None:
    ctx: Any = SimpleNamespace(device=torch.device("cuda", 0), backend="gloo")
    with pytest.raises(UsageError, match=r"^--shard on GPUs needs NCCL: remove --backend gloo"):
        shard_model(nn.Linear(2, 2), options("--shard"), ctx, [])


@pytest.mark.parametrize(
    "make", [partial(torch.optim.SGD, fused=True), torch.optim.Adafactor], ids=["SGD", "Adafactor"]
)
def test_an_optimizer_that_mixes_rows_is_refused_with_one_line(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    monkeypatch.setattr(main.task, "build_optimizer", lambda model, config: make(model.parameters(), lr=config.lr))
    output = train(1, *SYNTHETIC, "--shard", "--output-dir", tmp_path, code=2)
    assert "error: --shard: torch cannot compute this with the rows of a weight (main.py, line " in output
    assert "Traceback" not in output


def test_what_torch_cannot_compute_with_rows_is_refused_with_one_line() -> None:
    def refused(ctx: DistContext) -> list[str]:
        model = nn.Linear(5, 5)
        wrap_model(model, options("--device=cpu", "--shard"), ctx)
        found = []
        for compute in (torch.unique, lambda weight: weight.view(-1).sort(), lambda weight: weight + torch.ones(5)):
            with pytest.raises((RuntimeError, NotImplementedError)) as caught:
                compute(model.weight.detach())
            found.append(translate_exception(caught.value))
        return [str(error) for error in found if isinstance(error, UsageError)]

    torch.manual_seed(0)
    for messages in on_ranks(2, refused, "--device=cpu"):
        assert len(messages) == 3
        assert all(each.startswith("--shard: torch cannot compute this with the rows of a weight") for each in messages)


class Views(nn.Module):
    """Each block returns a view, which is then changed in place; a buffer is read, and written, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Flat() for _ in range(2))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.centre += x.mean(0)  # type: ignore[operator,misc]
        for block in self.blocks:
            x = block(x - self.centre)  # type: ignore[operator]
            x += 1
            x = x.relu()
        return x


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, 4)


def test_views_and_buffers_that_are_read_give_the_gradients_of_ddp() -> None:
    def gradients(ctx: DistContext) -> Any:
        found = []
        again = ddp_and_sharded(ctx, Views, "--checkpoint-activations")
        for model, wrapped in chain(ddp_and_sharded(ctx, Views), again):
            for step in range(2):
                model.zero_grad()
                torch.manual_seed(10 * step + ctx.rank)
                wrapped(torch.randn(3, 4)).square().sum().backward()
            found.append([whole(weight.grad).clone() for weight in model.parameters()] + [model.centre.clone()])
        assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
        return None

    assert on_ranks(2, gradients, "--device=cpu") == [None, None]


def test_weights_keep_what_the_owner_stored_there_and_may_not_be_frozen_later() -> None:
    def message(ctx: DistContext) -> str:
        torch.manual_seed(0)
        model = build_in_turn(marked, RankEnv(ctx.rank, 2))
        assert all(weight.untyped_storage().nbytes() == 0 for weight in model.parameters())
        wrapped = wrap_model(model, options("--device=cpu", "--shard"), ctx)
        assert model[0].weight.decay == 0.5 and "to_local" not in vars(model[0].weight)
        model[0].weight.requires_grad_(False)
        with pytest.raises(UsageError) as caught:
            wrapped(torch.zeros(2, 4))
        return str(caught.value)

    def marked() -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.decay = 0.5
        return model

    expected = "--shard: 0.weight was frozen after wrap_model: set its learning rate to 0 instead"
    assert on_ranks(2, message, "--device=cpu") == [expected] * 2


def test_the_weights_are_those_of_the_seed_and_of_a_file_for_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """A frozen weight that the file lacks is refused on all ranks, though one rank alone may have rows of it."""
    torch.save({f"0.{name}": tensor for name, tensor in nn.Linear(4, 4).state_dict().items()}, tmp_path / "weights.pt")

    def loaded(ctx: DistContext) -> str:
        config = options("--device=cpu", "--shard", "--init-from", tmp_path / "weights.pt", "--output-dir", tmp_path)
        env = RankEnv(ctx.rank, ctx.world_size)

        def make() -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            model[1].requires_grad_(False)
            return model

        torch.manual_seed(0)
        model = build_in_turn(make, env)
        wrap_model(model, config, ctx)
        with pytest.raises(CheckpointError) as caught:
            init_weights(model, config, ctx, build=lambda: build_in_turn(make, env))
        first = torch.load(tmp_path / "weights.pt", weights_only=True)["0.weight"]
        assert torch.equal(whole(model[0].weight), first)
        torch.manual_seed(0)
        assert torch.equal(whole(model[1].weight), make()[1].weight)
        return str(caught.value)

    for processes in (1, 3):
        messages = on_ranks(processes, loaded, "--device=cpu")
        assert all("1.weight; 1.bias: frozen, and not in the file, so random" in message for message in messages)


def test_rows_that_change_on_their_way_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    given = (*SYNTHETIC, "--output-dir", tmp_path, "--shard", "--max-steps")
    train(2, *given, 2)
    broadcast = DistContext.broadcast

    def damaged(ctx: DistContext, tensor: Tensor) -> Tensor:
        broadcast(ctx, tensor)
        if ctx.rank == 1 and tensor.dim() > 1:
            tensor.flatten().view(torch.uint8)[-1] ^= 1
        return tensor

    monkeypatch.setattr(DistContext, "broadcast", damaged)
    assert "error: rank 1 loaded another state than rank 0: check the memory" in train(2, *given, 4, code=4)


def test_a_pass_with_weights_that_are_not_those_of_the_model_is_refused() -> None:
    """FSDP2 puts its own in their place without a word, and adds to their gradients."""

    def messages(ctx: DistContext) -> list[str]:
        torch.manual_seed(0)
        model, other = Tied(), Tied()
        wrapped = wrap_model(model, options("--device=cpu", "--shard", "--precision=bf16"), ctx)
        tokens = torch.zeros(2, 3, dtype=torch.long)
        for _ in range(2):  # the second time, the root is still gathered
            wrapped(tokens).sum().backward()
        found = []
        held = {name: weight.detach() for name, weight in model.named_parameters()}
        for constants in (held, dict(other.named_parameters())):
            with pytest.raises(UsageError) as caught:
                torch.func.functional_call(model, constants, tokens)
            found.append(str(caught.value))
        model(tokens).sum().backward()
        return found

    message = "--shard: weight of Embedding was replaced, as by torch.func.functional_call: remove --shard"
    assert on_ranks(2, messages, "--device=cpu") == [[message] * 2] * 2


def test_an_optimizer_that_was_built_before_the_model_was_sharded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """It would train nothing."""
    early: list[Any] = []

    def build(config: Any, train_set: Any) -> nn.Module:
        model = ToyModel()
        early.append(torch.optim.SGD(model.parameters(), lr=config.lr))
        return model

    monkeypatch.setattr(main.task, "build_model", build)
    monkeypatch.setattr(main.task, "build_optimizer", lambda model, config: early[0])
    output = train(1, *SYNTHETIC, "--shard", "--output-dir", tmp_path, code=2)
    assert "error: --shard: build optimizer after wrap_model, which replaces the weights of the model\n" in output
