"""Throughput in units that people compare: tokens/s, and the part of a GPU's FLOP/s that a model uses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import main
from ddp.parts.monitor import flops
from ddp.parts.monitor.flops import flops_of, peak_flops
from model import ToyModel
from processes import train
from small_models import Awkward

OPTIONS = ["--dataset", "synthetic", "--max-steps", 4, "--log-every", 2, "--output-dir"]


class Noisy(ToyModel):
    """Draws numbers from each generator."""

    def forward(self, images: Tensor) -> Tensor:
        noise = random.random() + numpy.random.rand() + torch.rand((), device="cpu").item()
        return super().forward(images + noise)


def random_states() -> list[Any]:
    return [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]


def test_flops_are_those_of_the_operations_and_counting_them_changes_nothing() -> None:
    for model in (ToyModel(), Awkward(10), Noisy()):
        inputs = torch.randn(3, 3, 32, 32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(inputs)
        model.train()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        before = random_states()
        assert (
            flops_of(model, (), {"images": inputs}) == flops_of(model, (inputs,), {}) == counter.get_total_flops() / 3
        )
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert random_states() == before
    assert peak_flops(torch.device("cpu")) is None


def with_tokens(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {
        "loss": loss.detach() * len(targets),
        "correct": torch.ones(()),
        "count": len(targets),
        "tokens": 7 * len(targets),
    }


def test_a_run_logs_tokens_and_mfu_and_its_weights_stay_the_same(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(2, *OPTIONS, tmp_path / "plain")
    monkeypatch.setattr(flops, "peak_flops", lambda device: 1e9)
    monkeypatch.setattr(main.task, "batch_totals", with_tokens)
    output = train(2, *OPTIONS, tmp_path / "counted")
    per_sample = 3 * flops_of(ToyModel(), (torch.zeros(5, 3, 32, 32),), {})
    for line in lines(tmp_path / "counted", "train"):
        assert line["tokens_per_s"] == pytest.approx(7 * line["samples_per_s"], rel=0.01)
        assert line["mfu"] == pytest.approx(line["samples_per_s"] * per_sample / 2e9, rel=0.01)
        assert f"  {line['tokens_per_s']:,.0f} tokens/s  {line['mfu']:.1%} MFU" in output or line["step"] == 4
    plain, counted = (torch.load(newest(tmp_path / name), weights_only=True) for name in ("plain", "counted"))
    assert all(torch.equal(tensor, counted["model"][name]) for name, tensor in plain["model"].items())
    assert "mfu" not in json.dumps(lines(tmp_path / "plain", "train"))


class ReadsValues(nn.Linear):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1) * (1 if images.sum().item() else 2))


def test_model_py_may_say_how_many_flops_a_sample_takes(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a model whose forward pass depends on values cannot be counted by shapes alone."""
    monkeypatch.setattr(flops, "peak_flops", lambda device: 1e9)
    monkeypatch.setattr(main.task, "build_model", lambda *_: ReadsValues(3072, 10))
    train(1, *OPTIONS, tmp_path / "unknown")
    assert not any("mfu" in line for line in lines(tmp_path / "unknown", "train"))
    monkeypatch.setattr(main.task, "flops_per_sample", lambda model: 1e6, raising=False)
    train(1, *OPTIONS, tmp_path / "known")
    for line in lines(tmp_path / "known", "train"):
        assert line["mfu"] == pytest.approx(line["samples_per_s"] / 1e3, rel=0.01)
