"""--init-from: the weights of a checkpoint, of a file or of torchvision as the first weights of a new run."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import newest
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, random_split
from torchvision.models import get_model, get_model_weights

import data
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.reuse import init_weights
from ddp.core.errors import CheckpointError
from ddp.data.dataset import Datasets
from ddp.distributed.process_group import DistContext
from model import ToyModel
from processes import on_ranks, train

pytestmark = pytest.mark.slow
# A rate of 1e-30 changes no weight: what is saved is what the run began with.
STILL = ("--dataset", "synthetic", "--device", "cpu", "--lr", 1e-30, "--max-steps", 1, "--batch-size", 16)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 64, "val": 20})


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return ToyModel().state_dict()


def began_with(folder: Path) -> dict[str, Tensor]:
    return checkpoint.read(newest(folder))["model"]


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- where weights come from ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [(), ("--ema", 0.5)])
def test_a_checkpoint_gives_its_weights_and_nothing_else(ema: tuple[Any, ...], tmp_path: Path) -> None:
    """Of a run with an average, the average: it is what was evaluated. The new average begins with it, too."""
    options = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 8, "--epochs", 1, *ema)
    train(1, *options, "--output-dir", tmp_path / "first")
    first = checkpoint.read(tmp_path / "first/best.pt")
    output = train(2, *STILL, *ema, "--init-from", tmp_path / "first/best.pt", "--output-dir", tmp_path / "second")
    assert f"weights from {tmp_path}/first/best.pt: 10 of 10\n" in output and "initialised" not in output
    second = checkpoint.read(newest(tmp_path / "second"))
    assert equal(second["model"], first["ema" if ema else "model"]) and second["step"] == 1
    assert not ema or equal(second["ema"], first["ema"])


def test_weights_that_may_know_the_validation_samples_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run on the same data with another split. Another seed alone changes no validation set of its own."""
    whole = TensorDataset(torch.rand(84, 3, 32, 32), torch.arange(84) % 10)
    by_seed, parts = {"split": True}, [range(64), range(64, 84)]

    def load(config: Config) -> Datasets:
        generator = torch.Generator().manual_seed(config.seed)
        split = (
            random_split(whole, [64, 20], generator) if by_seed["split"] else [Subset(whole, part) for part in parts]
        )
        return Datasets(*split)

    monkeypatch.setattr(main, "load_datasets", load)
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: ToyModel())
    numbers = itertools.count()

    def warnings(seed: int, *options: Any) -> list[str]:
        output = train(1, *STILL, "--seed", seed, *options, "--output-dir", tmp_path / str(next(numbers)))
        return [line for line in output.splitlines() if "other validation samples" in line]

    assert warnings(0) == []
    first = tmp_path / "0/best.pt"
    told = f"{first} was trained with --seed 0 (here 1) and other validation samples"
    risk = "the weights of --init-from may have been trained on those of this run"
    assert warnings(0, "--init-from", first) == []
    assert warnings(1, "--init-from", first) == [f"warning: {told}: {risk}"]
    by_seed["split"] = False
    assert warnings(0) == [] == warnings(1, "--init-from", tmp_path / "3/best.pt")


FORMS: dict[str, Any] = {
    "a state_dict": lambda weights: weights,
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 3, "arch": "toy"},
    "model_state_dict": lambda weights: {"model_state_dict": weights, "optimizer": {"state": {}}},
    "of DistributedDataParallel": lambda weights: {f"module.{name}": weight for name, weight in weights.items()},
    "of torch.compile": lambda weights: {"model": {f"_orig_mod.{name}": weight for name, weight in weights.items()}},
    "of torch.compile of DistributedDataParallel": lambda weights: {
        f"_orig_mod.module.{name}": weight for name, weight in weights.items()
    },
    "half precision": lambda weights: {name: weight.bfloat16() for name, weight in weights.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_other_programs(form: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(FORMS[form](weights), tmp_path / "weights.pth")
    output = train(1, *STILL, "--init-from", tmp_path / "weights.pth", "--output-dir", tmp_path / "run")
    assert "weights.pth: 10 of 10\n" in output
    expected = {name: weight.bfloat16().float() for name, weight in weights.items()} if "half" in form else weights
    assert equal(began_with(tmp_path / "run"), expected)


def test_torchvision_gives_the_pretrained_weights_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its cache: here is no network. The classifier has other classes."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    name = get_model_weights("squeezenet1_1").DEFAULT.url.rpartition("/")[2]
    torch.manual_seed(7)
    pretrained = get_model("squeezenet1_1").state_dict()
    (tmp_path / "cache/hub/checkpoints").mkdir(parents=True)
    torch.save(pretrained, tmp_path / "cache/hub/checkpoints" / name)
    options = (*STILL, "--model", "squeezenet1_1", "--init-from", "torchvision")
    output = train(2, *options, "--output-dir", tmp_path / "run")
    assert "weights from torchvision: 50 of 52\n" in output
    again = "  of another size, so initialised anew: classifier.1.weight [1000, 512, 1, 1]; classifier.1.bias [1000]\n"
    assert again in output
    began = began_with(tmp_path / "run")
    body = [key for key in pretrained if "classifier" not in key]
    assert all(torch.allclose(began[key], pretrained[key], rtol=0, atol=1e-20) for key in body)

    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    output = train(2, *options, "--output-dir", tmp_path / "other", code=3)
    assert output.count("error:") == 1 and f"/{name}: " in output and "pass its path to --init-from" in output
    output = train(1, *STILL, "--init-from", "torchvision", "--output-dir", tmp_path / "other", code=2)
    assert output.endswith("error: --init-from torchvision: it has no weights for ToyModel; pass a file\n")


# ---- what does not fit ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed_and_a_head_is_initialised_anew(weights: dict[str, Tensor], tmp_path: Path) -> None:
    train(1, *STILL, "--output-dir", tmp_path / "fresh")
    other = {**weights, "fc3.weight": torch.ones(5, 84), "fc3.bias": torch.ones(5), "extra.weight": torch.ones(2)}
    del other["conv2.bias"]
    torch.save(other, tmp_path / "weights.pth")
    output = train(2, *STILL, "--init-from", tmp_path / "weights.pth", "--output-dir", tmp_path / "run")
    assert "weights.pth: 7 of 10\n" in output and "warning" not in output
    assert "  of another size, so initialised anew: fc3.weight [5, 84]; fc3.bias [5]\n" in output
    assert "  missing, so initialised anew: conv2.bias\n" in output
    assert "  not in this model: extra.weight\n" in output
    began, fresh = began_with(tmp_path / "run"), began_with(tmp_path / "fresh")
    assert all(torch.equal(began[name], fresh[name]) for name in ("fc3.weight", "fc3.bias", "conv2.bias"))
    loaded = began.keys() - {"fc3.weight", "fc3.bias", "conv2.bias"}
    assert all(torch.equal(began[name], weights[name]) for name in loaded)

    torch.save({name: weights[name] for name in ("conv1.weight", "conv1.bias")}, tmp_path / "few.pth")
    output = train(1, *STILL, "--init-from", tmp_path / "few.pth", "--output-dir", tmp_path / "few")
    assert f"warning: most weights of this model are not from {tmp_path}/few.pth: is that another model?\n" in output


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_cannot_be_used_is_refused_with_one_line(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"

    def refusal() -> str:
        output = train(2, *STILL, "--init-from", path, "--output-dir", tmp_path / "run", code=4)
        assert output.count("\n") == 1 and output.startswith(f"error: --init-from {path}"), output
        return output

    assert "cannot be used: No such file or directory" in refusal()
    torch.save({"epoch": 3}, path)
    assert "holds no weights: it needs a state_dict, or a checkpoint of a run" in refusal()
    torch.save({"other.weight": torch.ones(3)}, path)
    assert "none of its weights fits this model; its first weight is other.weight [3]" in refusal()
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    assert "holds no weights that torch can load safely" in refusal() and not (tmp_path / "executed").exists()
    train(1, *STILL, "--output-dir", tmp_path / "first")
    saved = newest(tmp_path / "first")
    damaged, weight = bytearray(saved.read_bytes()), checkpoint.read(saved)["model"]["fc1.weight"]
    damaged[damaged.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(damaged)
    assert "cannot be used: its digest does not match" in refusal()


# ---- with a checkpoint of its own -----------------------------------------------------------------------------------


def test_a_run_that_resumes_keeps_its_own_weights(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """The file may be gone by then."""
    torch.save(weights, tmp_path / "weights.pth")
    options = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 8, "--init-from", tmp_path / "weights.pth")
    train(2, *options, "--epochs", 2, "--output-dir", tmp_path / "whole")
    train(2, *options, "--epochs", 2, "--max-steps", 3, "--output-dir", tmp_path / "parts")
    (tmp_path / "weights.pth").unlink()
    output = train(2, *options, "--epochs", 2, "--resume", "must", "--output-dir", tmp_path / "parts")
    assert "resuming from" in output and "weights from" not in output
    assert equal(began_with(tmp_path / "whole"), began_with(tmp_path / "parts"))


def test_a_refused_resume_names_this_option(tmp_path: Path) -> None:
    train(1, *STILL, "--output-dir", tmp_path)
    output = train(1, *STILL, "--momentum", 0.5, "--output-dir", tmp_path, code=4)
    remedy = f"--init-from {newest(tmp_path)} gives it these weights\n"
    assert "--momentum was 0.9, is 0.5" in output and output.endswith(remedy)


class Adapted(nn.Module):
    """A frozen base with an adapter that trains. `pretrained`: build_model loads the base, so no seed changes it."""

    def __init__(self, pretrained: bool = False) -> None:
        super().__init__()
        self.base, self.adapter, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(1))
        self.scale.requires_grad_(False)
        self.base.requires_grad_(False)
        if pretrained:
            self.base.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})


def test_a_frozen_weight_that_the_file_lacks_is_refused_unless_build_model_loads_it(tmp_path: Path) -> None:
    """It would stay random. A constant, such as `scale`, does not depend on the seed."""

    def load(pretrained: bool, with_build: bool = True) -> str:
        def refused(ctx: DistContext) -> str:
            given = ["--output-dir", str(tmp_path / "run"), "--init-from", str(tmp_path / "weights.pt")]
            config = Config.parse([*given, "--seed", str(2**32 - 1)])  # the largest one
            torch.manual_seed(config.seed)
            network, drawn = Adapted(pretrained), torch.get_rng_state()
            build = (lambda: Adapted(pretrained)) if with_build else None
            try:
                init_weights(network, config, ctx, build=build)
            except CheckpointError as error:
                return str(error)
            assert torch.equal(torch.get_rng_state(), drawn), "the random numbers that follow are the same"
            assert torch.equal(network.adapter.weight, torch.full((4, 4), 3.0))
            return ""

        return on_ranks(1, refused)[0]

    torch.save({"adapter.weight": torch.full((4, 4), 3.0), "adapter.bias": torch.zeros(4)}, tmp_path / "weights.pt")
    names = "base.weight; base.bias: frozen, and not in the file, so random"
    remedy = "load it in build_model, train it, or take another file"
    assert load(pretrained=False) == f"--init-from {tmp_path}/weights.pt: {names}: {remedy}"
    assert load(pretrained=True) == ""
    assert "base.weight; base.bias" in load(pretrained=True, with_build=False), "nothing shows that they were loaded"


def test_a_frozen_weight_may_be_in_the_file_under_the_name_of_one_that_it_is_tied_to(tmp_path: Path) -> None:
    torch.save({"1.weight": torch.full((4, 4), 3.0)}, tmp_path / "weights.pt")

    def loaded(ctx: DistContext) -> bool:
        network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
        network[1].weight = network[0].weight
        config = Config.parse(["--output-dir", str(tmp_path / "run"), "--init-from", str(tmp_path / "weights.pt")])
        init_weights(network, config, ctx)
        return bool((network[0].weight == 3).all())

    assert on_ranks(1, loaded) == [True]


def test_the_option_of_rank_0_counts(tmp_path: Path) -> None:
    """The path may be another one on each machine, or missing where it is not read."""
    torch.save({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, tmp_path / "weights.pt")

    def initial(ctx: DistContext) -> list[float]:
        given = ["--init-from", str(tmp_path / "weights.pt")] if ctx.rank == 0 else []
        model = torch.nn.Linear(2, 2)
        init_weights(model, Config.parse(["--output-dir", str(tmp_path / "run"), *given]), ctx)
        return model.weight.flatten().tolist()

    assert on_ranks(2, initial) == [[3.0] * 4] * 2
