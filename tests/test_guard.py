"""Bits that flip: in the weights or the optimizer state of one rank, and in a gradient that all ranks receive."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import newest, weights_and_momentum
from template_copy import changed_main
from torch import nn

import main
from ddp.parts.monitor.replicas import bit_sum
from ddp.training.run import Run
from faults import fault
from processes import train
from small_models import build_awkward

HOST = platform.node()
OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--max-steps", 8, "--checkpoint-every", 4, "--output-dir"]


def flip(tensor: torch.Tensor, bit: int = 16) -> None:
    """Flip one bit of a number in the middle of a contiguous tensor: less than 1 % of it, and more than rounding."""
    numbers = tensor.detach().view(torch.int32).flatten()
    numbers[len(numbers) // 2] ^= 1 << bit


def flip_state(where: str, run: Run) -> None:
    """On rank 1, a weight after step 6, or its momentum after step 8: another step would change the weight as well."""
    if run.ctx.rank == 1 and run.state.step == {"weight": 6, "momentum": 8, "average": 6}[where]:
        model, optimizer, ema = (run.checkpoints.fields[name] for name in ("model", "optimizer", "ema"))
        weight = model.fc2.weight
        if where == "momentum":
            flip(optimizer.state[weight]["momentum_buffer"])
        else:
            flip(weight if where == "weight" else ema.module.fc2.weight)


def flip_gradient(run: Run) -> None:
    """On rank 1, before an all-reduce, and only once: in step 6, which is the seventh."""
    if run.ctx.rank == 1 and run.state.step == 6:

        def once(gradient: torch.Tensor) -> torch.Tensor:
            hook.remove()
            gradient = gradient.clone()
            flip(gradient)
            return gradient

        hook = run.checkpoints.fields["model"].fc2.weight.register_hook(once)


@fault(45)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("where", "processes", "says"),
    [
        ("weight", 3, f"rank 1 ({HOST}) differs from the others, first in model: fc2.weight: "),
        (
            "momentum",
            2,
            f"rank 0 ({HOST}), rank 1 ({HOST}) differ, first in optimizer: momentum_buffer of model: fc2.weight: ",
        ),
        ("average", 2, f"rank 0 ({HOST}), rank 1 ({HOST}) differ, first in ema: fc2.weight: "),
    ],
)
def test_a_bit_that_flips_on_one_rank_is_found_at_the_next_save(
    where: str, processes: int, says: str, small: None, tmp_path: Path
) -> None:
    options = [*OPTIONS, tmp_path, "--ema", 0.9]
    output = train(processes, *options, code=6, after_step=partial(flip_state, where))
    errors = [line for line in output.splitlines() if "error: " in line]
    assert len(errors) == 1 and "the ranks no longer have the same weights: " in errors[0] and says in errors[0]
    assert "(noticed at step 8; last good checkpoint: " in errors[0]
    assert newest(tmp_path).name == "step_00000004.pt", "nothing was saved"
    train(processes, *options, "--guard", 0, after_step=partial(flip_state, where))
    assert newest(tmp_path).name == "step_00000008.pt"


@fault(46)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_wrong_gradient_is_found_before_it_counts(passes: int, small: None, tmp_path: Path) -> None:
    """Also in the first of two passes, whose gradients are added."""
    options = (*OPTIONS, tmp_path, "--deterministic", "--guard", 3, "--grad-accum-steps", passes)
    output = train(2, *options, code=6, after_step=flip_gradient)
    says = f"error: rank 1 ({HOST}) computed two different gradients of fc2.weight from the same weights and batch: "
    assert output.count(says) == 1 and "(noticed at step 6; " in output
    assert newest(tmp_path).name == "step_00000004.pt"


def test_computing_the_gradients_twice_changes_nothing(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even dropout, noise of numpy, BatchNorm's statistics, metrics, or a run that resumes in between."""
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    options = [
        *OPTIONS[:-1],
        "--deterministic",
        "--grad-accum-steps",
        2,
        "--clip-grad",
        1,
        "--ema",
        0.9,
        "--output-dir",
    ]
    train(2, *options, tmp_path / "plain")
    train(2, *options, tmp_path / "guarded", "--guard", 2, "--max-steps", 5)
    train(2, *options, tmp_path / "guarded", "--guard", 2)
    states = [torch.load(newest(tmp_path / name), weights_only=True) for name in ("plain", "guarded")]
    assert weights_and_momentum(newest(tmp_path / "plain")) == weights_and_momentum(newest(tmp_path / "guarded"))
    for key in ("model", "ema"):
        assert all(torch.equal(value, states[1][key][name]) for name, value in states[0][key].items()), key
    assert states[0]["meter"] == states[1]["meter"]


class Remembering(nn.Linear):
    """Reads a buffer that DDP sends from rank 0 before each pass, and that each rank changes in it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("last", torch.zeros(10))
        self.register_buffer("other", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs.flatten(1)) * (1 + self.last.clone())
        if self.training:
            self.last.copy_(0.1 * outputs.detach().mean(0))
            self.other = torch.full((2,), self.other[0] + 1)
        return outputs


def test_buffers_of_rank_0_reach_the_others_in_the_second_pass_as_well(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", lambda *_: Remembering(3072, 10))
    for name, guard in (("plain", 0), ("guarded", 2)):
        train(2, *OPTIONS, tmp_path / name, "--deterministic", "--guard", guard)
    plain, guarded = (torch.load(newest(tmp_path / name), weights_only=True) for name in ("plain", "guarded"))
    assert all(torch.equal(value, guarded["model"][name]) for name, value in plain["model"].items())


class InPlace(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.mul_(2).flatten(1))


class Counting(nn.Linear):
    """Counts its forward passes, in a state that is saved."""

    passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return super().forward(inputs.flatten(1))

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state


class Seen:
    """As in docs/state.md: a part of each rank, which only a save adds to what is saved."""

    def __init__(self) -> None:
        self.total, self.own = 0, torch.zeros(())

    def before_save(self) -> None:
        self.total, self.own = self.total + int(self.own), torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


COUNTS_SAMPLES = {
    "    ema: ModelEma | None\n": "    ema: ModelEma | None\n    seen: Any\n",
    "task.compute_metrics), ema)": "task.compute_metrics), ema, __import__('test_guard').Seen())",
    "    return mean.finish(": "    training.seen.own += len(targets)\n    return mean.finish(",
}


def test_what_a_second_computation_would_change_is_refused(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*OPTIONS, tmp_path, "--deterministic", "--guard", 2]
    with monkeypatch.context() as patched:
        patched.setattr(Run, "checked", lambda run, compute: compute)
        assert "--guard: main.py does not call run.checked(compute_gradients)" in train(1, *options, code=2)
    refused = "--guard computes the gradients twice, and each time {} changes: "
    for model, what in ((Counting, "model: _extra_state"), (InPlace, "a batch: 0")):
        with monkeypatch.context() as patched:
            patched.setattr(main.task, "build_model", lambda *_, model=model: model(3072, 10))
            assert refused.format(what) in train(1, *options, code=2)
    monkeypatch.setattr(main, "main", changed_main(COUNTS_SAMPLES))
    assert refused.format("seen.own") in train(1, *options, code=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_the_sum_of_the_bits_is_another_one_after_any_flip(dtype: Any) -> None:
    tensor = torch.ones(3, 5, 7).to(dtype).transpose(0, 2)
    for part in (tensor, tensor.contiguous()[1:], tensor.contiguous().flatten()[3:], tensor[0, 0, 0]):
        before, content = bit_sum(part).item(), part.contiguous().clone()
        assert bit_sum(content).item() == before
        numbers = content.flatten().view(torch.uint8)
        for place in range(len(numbers)):
            for bit in range(8):
                numbers[place] ^= 1 << bit
                assert bit_sum(content).item() != before
                numbers[place] ^= 1 << bit
