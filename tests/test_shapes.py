"""Buffers whose shape is known after the first pass only, and averages of weights that are not float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import newest
from torch import nn

import data
import model
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.reuse import load_weights
from ddp.checkpoint.state import FixedShapes
from ddp.distributed.tensors import digest
from ddp.training.ema import ModelEma
from faults import fault
from processes import train

RUN = ("--dataset=synthetic", "--device=cpu", "--batch-size=16", "--log-every=1", "--epochs=2", "--ema=0.5")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 128, "val": 21})


def states(output_dir: Path) -> dict[str, str]:
    content = checkpoint.read(newest(output_dir))
    return {name: digest(content[name]) for name in ("model", "ema", "optimizer")}


# ---- states that change shape ---------------------------------------------------------------------------------------


class Observed(nn.Module):
    """Remembers the range of its inputs per channel, as torch.ao's observers do: empty at first, then one each."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            low, high = x.detach().amin((0, 2, 3)), x.detach().amax((0, 2, 3))
            if self.low.numel():
                low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
            for buffer, value in ((self.low, low), (self.high, high)):
                buffer.resize_(value.shape).copy_(value)
        if not self.low.numel():
            return x
        low, high = (each.view(1, -1, 1, 1) for each in (self.low, self.high))
        return x + (x.clamp(low, high).mul(16).round().div(16) - x).detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("low", "high"):
            getattr(self, name).resize_(state[prefix + name].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Forgetful(nn.Module):
    """A buffer that grows, and that no load_state_dict accepts."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        if first:
            self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("seen", torch.zeros(5))
        return x


def build(middle: nn.Module, classes: int) -> nn.Module:
    rest = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 4, classes))
    return nn.Sequential(nn.Conv2d(3, 4, 3), middle, nn.Tanh(), *rest)


@fault(53)
def test_buffers_that_a_module_loads_in_its_own_way_may_change_their_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "build_model", lambda config, train_set: build(Observed(), len(train_set.classes)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(2, *RUN, "--output-dir", whole)
    train(2, *RUN, "--output-dir", parts, "--max-steps=3")
    train(2, *RUN, "--output-dir", parts)
    assert states(whole) == states(parts)
    content = checkpoint.read(newest(whole))
    assert content["model"]["1.low"].shape == content["ema"]["1.low"].shape == (4,)
    assert "val    loss" in train(1, "--evaluate", "--output-dir", whole)
    fresh = build(Observed(), 10)
    assert len(load_weights(fresh, content["model"], "here")) == 6, "--init-from takes them as well"
    assert torch.equal(fresh[1].low, content["model"]["1.low"])  # type: ignore[index,union-attr,arg-type]


@fault(53)
@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_that_could_not_be_loaded_is_refused_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    monkeypatch.setattr(model, "build_model", lambda config, train_set: build(Forgetful(first), 10))
    output = train(2, *RUN, "--checkpoint-every=2", "--output-dir", tmp_path, code=2)
    how = "1.seen was [0] at the start, is [5]" if first else "1.seen was not there at the start"
    assert f"error: no run could resume from this checkpoint: {how}: give it its shape in __init__" in output
    assert not list(tmp_path.glob("checkpoints/*.pt"))


# ---- averages of weights in other formats ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64, torch.complex128])
def test_an_average_follows_small_changes_of_weights_in_any_format(dtype: torch.dtype) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(3, dtype=dtype))
            self.other = self.one

    network, decay, exact = Tied(), 0.999, torch.ones(3, dtype=torch.complex128)
    average = ModelEma(network, decay)
    for step in range(1000):
        with torch.no_grad():
            network.one.fill_(complex(1 + step / 1000, step / 500) if dtype.is_complex else 1 + step / 1000)
        average.update(network)
        exact = decay * exact + (1 - decay) * network.one.detach().to(exact.dtype)
    state, rounding = average.state_dict(), torch.finfo(dtype).eps
    assert torch.allclose(state["one"].to(exact.dtype), exact, rtol=1e-5)
    assert torch.allclose(average.module.one.to(exact.dtype), exact, rtol=max(rounding, 1e-5))
    assert average.module.one.dtype == dtype and torch.equal(state["other"], state["one"])
    network.load_state_dict(state)  # as anyone may
    assert torch.equal(network.one, average.module.one)  # type: ignore[arg-type]
    again = ModelEma(Tied(), decay)
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["one"], state["one"]) and torch.equal(again.module.one, network.one)  # type: ignore[arg-type]


def test_a_run_with_an_average_of_bfloat16_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_half(config: Config, train_set: Any) -> nn.Module:
        layers = build(nn.Identity(), len(train_set.classes)).to(torch.bfloat16)
        layers.register_forward_pre_hook(lambda module, images: (images[0].to(torch.bfloat16),))
        layers.register_forward_hook(lambda module, images, outputs: outputs.float())
        return layers

    monkeypatch.setattr(model, "build_model", build_half)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(1, *RUN, "--output-dir", whole)
    train(1, *RUN, "--output-dir", parts, "--max-steps=3")
    train(1, *RUN, "--output-dir", parts)
    assert states(whole) == states(parts)
    content = checkpoint.read(newest(whole))
    assert content["ema"]["0.weight"].dtype == torch.float32 and content["model"]["0.weight"].dtype == torch.bfloat16


class Queue(nn.Module):
    """A buffer that its parent makes as large as that of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("items", torch.empty(0))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        module.queue.items.resize_(state[f"{prefix}queue.items"].shape)  # type: ignore[union-attr, operator]

    def get_extra_state(self) -> torch.Tensor:
        return self.queue.items.clone()  # type: ignore[operator]

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class Overridden(Queue):
    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("torch calls it of the root only")


def test_shapes_are_free_in_what_loads_in_its_own_way_and_below_it() -> None:
    model = nn.Sequential(Holder(), Overridden())
    assert set(FixedShapes({"model": model}).of({"model": model.state_dict()})) == {"1.items"}
    assert FixedShapes({"model": model[1]}).of({"model": model[1].state_dict()}) == {}
