"""Every option takes effect, or is refused with one line that names what is allowed."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import partial, partialmethod
from inspect import get_annotations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # DDP imports it, which takes a second: import it once, before the ranks are forked
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from outputs import lines
from PIL import Image
from project_runs import python
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils import tensorboard  # noqa: F401  for the same reason
from torch.utils.data import TensorDataset, get_worker_info

import data
import main
from config import Config
from ddp.core.errors import SetupError, UsageError
from ddp.core.options import OptionParser, option
from ddp.core.process_exit import ProcessExit
from ddp.core.run_config import RunConfig
from ddp.data.dataset import BatchDataset, Datasets
from ddp.data.loader import TrainLoader
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import seed_everything
from ddp.entrypoint.run_main import launch
from ddp.launcher.launch_node import LaunchOptions
from ddp.training import wrapping
from faults import fault
from needs import need
from processes import Ranks, on_ranks, train

OPTIONS = {item.name: item for item in fields(Config)}
SHOWN: dict[str, list[str]] = {}  # option -> the tests that show its effect


def shows(*options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test as one that shows the effect of these options."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        for name in options:
            SHOWN.setdefault(name, []).append(test.__name__)
        return test

    return mark


def test_every_option_has_a_test_of_its_effect() -> None:
    untested, gone = OPTIONS.keys() - SHOWN.keys(), SHOWN.keys() - OPTIONS.keys()
    assert not untested, f"write a test of the effect of {sorted(untested)}, marked with @shows"
    assert not gone, f"@shows names options that Config does not have: {sorted(gone)}"


# ---- helpers --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """A finished run: its output directory, and what it printed."""

    folder: Path
    output: str

    def lines(self, split: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl for this split."""
        return lines(self.folder, split)

    def rates(self) -> list[float]:
        return [line["lr"] for line in self.lines("train")]

    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        return sorted(int(path.stem.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("*.pt"))

    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint."""
        path = self.folder / "checkpoints" / f"step_{self.steps()[-1]:08d}.pt"
        return torch.load(path, weights_only=True)

    def weights(self) -> Tensor:
        return flat(self.checkpoint()["model"])


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one tensor [n], in float64 so that small differences stay exact."""
    return torch.cat([tensor.double().flatten() for tensor in weights.values()])


def run(folder: Path, *options: Any, world_size: int = 1, code: int = 0) -> Outcome:
    """Train on the synthetic data, on the CPU, in the output directory `folder`. `options` override these."""
    shared = ("--dataset", "synthetic", "--device", "cpu", "--output-dir", folder)
    return Outcome(folder, train(world_size, *shared, *options, code=code))


# Plain gradient descent: one step changes the weights to w - lr * gradient, which arithmetic can check.
PLAIN = ("--lr-schedule", "constant", "--warmup-epochs", 0, "--momentum", 0, "--weight-decay", 0, "--lr", 0.1)
ONE_STEP = (*PLAIN, "--max-steps", 1)


def first_weights(*options: Any) -> Tensor:
    """The weights before the first step."""
    config = Config.parse([str(option) for option in ("--dataset", "synthetic", *options)])
    train_set = main.load_datasets(config).train
    with torch.random.fork_rng():
        seed_everything(config.seed)
        return flat(main.task.build_model(config, train_set).state_dict())


def watch(monkeypatch: pytest.MonkeyPatch, path: Path, look: Callable[..., Any]) -> Callable[[], list[Any]]:
    """Write look(model, inputs, outputs) of each forward pass to `path`. Returns a function that reads the results."""
    build = main.task.build_model

    def build_watched(config: Config, train_set: Any) -> nn.Module:
        def note(model: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            with path.open("a") as file:
                file.write(json.dumps(look(model, inputs[0], outputs)) + "\n")

        model = build(config, train_set)
        model.register_forward_hook(note)
        return model

    monkeypatch.setattr(main.task, "build_model", build_watched)
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: a second thread would only wait for a core of this machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so nothing is refused")


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-6)


# ---- reading the command line ---------------------------------------------------------------------------------------

# For each option, a value that is not its default; None for an option without a value.
VALUES: dict[str, str | None] = {
    **dict(dataset="synthetic", data_dir="some_where/in_here", batch_size="7", workers="3", image_size="48"),
    **dict(eval_batch_size="48"),
    **dict(cache="other_where/in_there", val_fraction="0.2", patience="5", init_from="some_where/best_1.pt"),
    **dict(model="resnet18", epochs="3", max_steps="9", lr="1e-2", momentum="0.5", weight_decay="0", clip_grad="2.5"),
    **dict(ema="0.99"),
    **dict(lr_schedule="constant", warmup_epochs="0.5", scale_lr=None, grad_accum_steps="2", evaluate=None),
    **dict(
        precision="bf16",
        matmul_precision="high",
        compile=None,
        channels_last=None,
        sync_bn=None,
        **dict(shard=None, checkpoint_activations=None, profile=None),
    ),
    **dict(output_dir="other_runs/a_b", resume="never", checkpoint_every="5", keep_checkpoints="2", log_every="1"),
    **dict(mirror="s3://bucket/a_b"),
    **dict(seed="4", deterministic=None, accept_changed_data=None, strict_resume=None, guard="4"),
    **dict(device="cpu", backend="gloo", nproc="2", timeout="30", warn_after="5", local_rank="0"),
    **dict(rank="1", world_size="3", init_method="file:///tmp/a_b"),
}
TOGETHER = ("rank", "world_size", "init_method")
NEEDED = {"cache": ["--dataset=imagefolder"], "evaluate": ["--output-dir=runs"], "guard": ["--deterministic"]}


@pytest.mark.parametrize("name", OPTIONS)
def test_hyphens_and_underscores_and_both_ways_to_pass_a_value_are_equivalent(name: str) -> None:
    value = VALUES[name]
    others = [f"--{other}={VALUES[other]}" for other in TOGETHER if name in TOGETHER and other != name]
    others += NEEDED.get(name, [])
    read = []
    for flag in ("--" + name, "--" + name.replace("_", "-")):
        for arguments in [[flag]] if value is None else [[flag, value], [f"{flag}={value}"]]:
            read.append(getattr(Config.parse([*others, *arguments]), name))
    assert read == [read[0]] * len(read)
    assert read[0] != OPTIONS[name].default


def test_a_new_option_or_default_is_named_here() -> None:
    """Runs that people have started depend on them: name the change in CHANGELOG.md, then in tests/options.json."""
    sources = {"main.py": fields(Config), "launch_node.sh": fields(LaunchOptions)}
    found = {name: {item.name: item.default for item in items} for name, items in sources.items()}
    assert found == json.loads((Path(__file__).parent / "options.json").read_text())


def test_values_keep_their_underscores_and_hyphens() -> None:
    config = Config.parse(["--output_dir", "a_b-c", "--data_dir=d_e-f"])
    assert (config.output_dir, config.data_dir) == ("a_b-c", "d_e-f")


def test_the_defaults_are_those_of_the_dataclass() -> None:
    defaults = {name: item.default for name, item in OPTIONS.items()}
    assert asdict(Config.parse([])) == defaults


@pytest.mark.parametrize(
    ("words", "edited", "folder"),
    [
        ([], False, "runs/synthetic-ToyModel"),
        (["--model=resnet18"], False, "runs/synthetic-resnet18"),
        ([], True, "runs/my-numbers-Sequential"),
    ],
)
def test_the_default_output_dir_is_named_after_what_was_built(
    words: list[str], edited: bool, folder: str, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the defaults of options that an owner's load_datasets and build_model do not read."""
    if edited:
        datasets = Datasets(*(TensorDataset(torch.randn(64, 2), torch.zeros(64, dtype=torch.long)) for _ in range(2)))
        datasets.train.name = "my numbers"
        monkeypatch.setattr(main, "load_datasets", lambda config: datasets)
        monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Sequential(nn.Linear(2, 2)))
    monkeypatch.chdir(tmp_path)
    output = train(1, *words, "--dataset=synthetic", "--device=cpu", "--batch-size=8", "--max-steps=1")
    assert f"a new run, in {folder}\n" in output and list(tmp_path.glob("*/*")) == [tmp_path / folder]
    assert ("my numbers: 64 training, 64 validation samples" in output) == edited


def test_the_last_of_two_values_counts() -> None:
    assert Config.parse(["--epochs", "3", "--epochs", "4"]).epochs == 4
    assert Config.parse(["--nproc-per-node", "2"]).nproc == 2, "the name that torchrun and launch_node.sh have"


HUGE = "9" * 400

# A command line, and what its message must name: the option, and what is allowed.
BAD_VALUES: list[tuple[str, list[str]]] = [
    ("--cache where", ["--cache", "imagefolder", "cifar10 is in memory"]),
    ("--val-fraction 0.95", ["--val-fraction", "'0.95'", "must be a number >= 0 and <= 0.9"]),
    ("--dataset synthetic --val-fraction 0.2", ["--val-fraction", "synthetic has a validation set"]),
    ("--init-from=", ["--init-from", "path"]),
    ("--init-from a.pt --resume b.pt", ["--init-from", "--resume b.pt"]),
    ("--init-from a.pt --evaluate", ["--init-from", "--evaluate"]),
    ("--patience 0", ["--patience", "'0'", "must be an integer >= 1"]),
    ("--data-dir=", ["--data-dir", "path"]),
    ("--batch-size 0", ["--batch-size", "'0'", "must be an integer >= 1"]),
    ("--batch-size 1.5", ["--batch-size", "'1.5'", "must be an integer >= 1"]),
    ("--batch_size -8", ["--batch-size", "'-8'", "must be an integer >= 1"]),
    ("--eval-batch-size 0", ["--eval-batch-size", "'0'", "must be an integer >= 1"]),
    ("--batch-size many", ["--batch-size", "'many'", "must be an integer >= 1"]),
    ("--workers -1", ["--workers", "'-1'", "must be an integer >= 0"]),
    ("--image-size 4", ["--image-size", "'4'", "must be an integer >= 8"]),
    ("--epochs 0", ["--epochs", "'0'", "must be an integer >= 1"]),
    ("--epochs", ["--epochs", "expected one argument"]),
    ("--max-steps 0", ["--max-steps", "'0'", "must be an integer >= 1"]),
    ("--lr 0", ["--lr", "'0'", "must be a number > 0"]),
    ("--lr nan", ["--lr", "'nan'", "must be a number > 0"]),
    ("--lr=-inf", ["--lr", "'-inf'", "must be a number > 0"]),
    ("--lr 1e999", ["--lr", "'1e999'", "must be a number > 0"]),
    ("--lr fast", ["--lr", "'fast'", "must be a number > 0"]),
    ("--momentum 1.1", ["--momentum", "'1.1'", "must be a number >= 0 and <= 1"]),
    ("--weight-decay -0.1", ["--weight-decay", "'-0.1'", "must be a number >= 0"]),
    ("--ema 1.5", ["--ema", "'1.5'", "must be a number >= 0 and <= 1"]),
    ("--lr-schedule linear", ["--lr-schedule", "'linear'", "cosine", "constant"]),
    ("--warmup-epochs -1", ["--warmup-epochs", "'-1'", "must be a number >= 0"]),
    ("--warmup-epochs 11 --epochs 10", ["--warmup-epochs 11", "--epochs 10"]),
    ("--grad-accum-steps 0", ["--grad-accum-steps", "'0'", "must be an integer >= 1"]),
    ("--clip-grad 0", ["--clip-grad", "'0'", "must be a number > 0"]),
    ("--evaluate --resume never", ["--evaluate", "--resume never"]),
    ("--evaluate=yes", ["--evaluate", "'yes'"]),
    ("--evaluate", ["--evaluate", "--resume PATH", "--output-dir"]),
    ("--config=", ["--config", "path"]),
    ("--precision fp8", ["--precision", "'fp8'", "fp32", "bf16", "fp16"]),
    ("--matmul-precision tf32", ["--matmul-precision", "'tf32'", "highest", "high", "medium"]),
    ("--compile=inductor", ["--compile", "'inductor'"]),
    ("--sync-bn --device cpu", ["--sync-bn", "--device cpu"]),
    ("--output-dir=", ["--output-dir", "path"]),
    ("--resume .", ["--resume", "'.'", "auto", "never", "path"]),
    ("--checkpoint-every 0", ["--checkpoint-every", "'0'", "must be an integer >= 1"]),
    ("--keep-checkpoints 1", ["--keep-checkpoints", "'1'", "must be an integer >= 2"]),
    ("--mirror=", ["--mirror", "path"]),
    ("--guard -1", ["--guard", "'-1'", "must be an integer >= 0"]),
    ("--guard 2", ["--guard needs --deterministic"]),
    ("--log-every 0", ["--log-every", "'0'", "must be an integer >= 1"]),
    ("--seed -1", ["--seed", "'-1'", "an integer >= 0 and <= 4294967295"]),
    ("--seed 4294967296", ["--seed", "'4294967296'", "an integer >= 0 and <= 4294967295"]),
    ("--device tpu", ["--device", "'tpu'", "auto", "cuda", "cpu"]),
    ("--backend smddp", ["--backend", "'smddp'", "auto", "nccl", "gloo", "mpi"]),
    ("--backend nccl --device cpu", ["--backend nccl", "--device cuda"]),
    ("--nproc 0", ["--nproc", "'0'", "must be an integer >= 1"]),
    ("--nproc 2 --local-rank 0", ["--nproc", "--local-rank"]),
    ("--rank 0", ["--rank", "--world-size", "--init-method"]),
    ("--world-size 2 --rank 0", ["--rank", "--world-size", "--init-method"]),
    ("--rank 2 --world-size 2 --init-method file:///tmp/x", ["--rank 2", "--world-size 2"]),
    ("--nproc 2 --rank 0 --world-size 2 --init-method file:///tmp/x", ["--nproc", "--rank"]),
    ("--local-rank -1", ["--local-rank", "'-1'", "must be an integer >= 0"]),
    ("--init-method localhost:23456", ["--init-method", "'localhost:23456'", "tcp://HOST:PORT", "file:///PATH"]),
    ("--init-method tcp://host:99999", ["--init-method", "'tcp://host:99999'", "tcp://HOST:PORT"]),
    ("--timeout 1e300", ["--timeout", "'1e300'", "must be a number >= 1"]),
    ("--timeout 0", ["--timeout", "'0'", "must be a number >= 1"]),
    ("--warn-after 0", ["--warn-after", "'0'", "must be a number >= 1"]),
    ("--learning-rate 0.1", ["--learning-rate", "--help"]),
    ("--epoch 3", ["--epoch", "(did you mean --epochs?)", "--help"]),  # abbreviations break when an option is added
    ("--batchsize=3", ["--batchsize=3", "(did you mean --batch-size?)"]),
    ("--nproc-per-node 0", ["--nproc: '0' must be an integer >= 1"]),
    ("train", ["train", "--help"]),
    ("--seed 1 epochs=3 --epochs 4", ["epochs=3", "--help"]),
]


@fault(33)
@pytest.mark.parametrize(
    ("command_line", "named"),
    [
        *BAD_VALUES,
        pytest.param(f"--epochs {HUGE}", ["--epochs"], id="--epochs 10^400"),
    ],
)
def test_a_bad_value_is_refused_with_one_line_that_names_what_is_allowed(command_line: str, named: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Config.parse(command_line.split())
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert "\n" not in message
    assert [part for part in named if part not in message] == [], message


def test_every_option_with_a_value_has_a_bad_value_above() -> None:
    tested = {name.replace("_", "-") for line, _ in BAD_VALUES for name in re.findall(r"--([\w-]+)", line)}
    takes_a_value = {name.replace("_", "-") for name, item in OPTIONS.items() if item.default is not False}
    # config.py knows neither the models of torchvision, which is slow to import, nor the datasets that data.py has.
    assert takes_a_value - tested == {"model"}, "a bad one has its own test below, and so has a bad dataset"


@pytest.mark.slow
def test_the_program_exits_2_with_one_line(template: Path) -> None:
    output = python(template, "main.py", "--momentum", "1.5", "--nproc", 4, code=2)
    assert output == "error: --momentum: '1.5' must be a number >= 0 and <= 1; see --help\n"


def test_a_line_break_in_a_value_does_not_add_a_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Config.parse(["--precision", "a\nb"])
    ProcessExit().handle_exception(raised.value)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_options_are_checked_without_torch(template: Path) -> None:
    check = "from config import Config; Config.parse()"
    command = [sys.executable, "-X", "importtime", "-c", check, "--epochs", "3", "--precision=bf16"]
    result = subprocess.run(command, cwd=template, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stdout == ""
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert {"argparse", "ddp.core.errors"} <= imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "torchvision", "numpy")}


@pytest.mark.slow
def test_only_one_of_many_processes_reports_a_bad_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_like_torchrun(rank_env: RankEnv) -> int:
        os.environ |= {"RANK": str(rank_env.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank_env.rank)}
        return launch(main.main, Config)

    monkeypatch.setattr(sys, "argv", ["main.py", "--epochs", "none"])
    ranks = Ranks(2, start_like_torchrun)
    assert ranks.wait() == [2, 2]
    assert ranks.output() == "error: --epochs: 'none' must be an integer >= 1; see --help\n"


def test_only_one_of_many_processes_reports_an_option_that_cannot_work(tmp_path: Path, small: None) -> None:
    output = run(tmp_path, "--model", "resnet1", world_size=2, code=2).output
    assert output.startswith("error: --model resnet1: ")
    assert output.count("\n") == 1


def test_the_annotation_of_an_option_says_how_its_value_is_read() -> None:
    """Otherwise the value of an option with the default None would silently be read as text."""

    @dataclass
    class Annotated(RunConfig):
        limit: int | None = option(None, "a limit")
        part: float = option(1, "a part")
        title: str | None = option(None, "a title")

    read = Annotated.parse(["--limit", "3", "--part=0.5", "--title", "4"])
    assert (read.limit, read.part, read.title) == (3, 0.5, "4")
    with pytest.raises(UsageError, match=r"--limit: '3\.5' must be an integer"):
        Annotated.parse(["--limit", "3.5"])

    for default, hint in ((None, Path), (("a",), tuple[str, ...]), ([1, 2], list[int]), (None, int | str)):
        unclear = make_dataclass("Unclear", [("where", hint, option(default, "a path"))], bases=(RunConfig,))
        with pytest.raises(UsageError, match=r"where in config.py is no option that a command line has: annotate"):
            unclear.parse([])

    @dataclass
    class Plain(RunConfig):
        alpha: float = 0.5

    with pytest.raises(UsageError, match=r"alpha in config.py is no option: write it as training_option\("):
        Plain.parse([])


def test_an_option_defines_the_run_unless_it_says_otherwise() -> None:
    """Whoever forgets the mark of an option that they add gets a refusal to resume, and not another run."""

    @dataclass
    class Marked(Config):
        width: int = option(8, "a width", section="data")
        pause: int = option(8, "a pause", may_change=True)
        folder: str = option("", "a folder", per_process=True)

    may_change = {item.name for item in fields(Marked) if item.metadata["may_change"]}
    assert "width" not in may_change and {"pause", "folder"} <= may_change
    assert OPTIONS.keys() - may_change == {
        *("dataset", "image_size", "model", "lr", "momentum", "weight_decay"),
        *("lr_schedule", "warmup_epochs", "scale_lr", "clip_grad", "ema"),
        *("precision", "matmul_precision", "sync_bn", "init_from", "seed"),
    }


def test_a_flag_is_off_by_default() -> None:
    """A flag can only set. With a default of True, `--shuffle false` would be the text "false", which is true."""

    @dataclass
    class Shuffling(RunConfig):
        shuffle: bool = option(True, "shuffle")

    with pytest.raises(UsageError, match=r"shuffle in config.py is True by default: name the opposite"):
        Shuffling.parse([])


def test_the_help_of_every_kind_of_option_may_contain_a_percent_sign() -> None:
    @dataclass
    class Percentages(RunConfig):
        flag: bool = option(False, "take 5% of it")
        part: float = option(0.5, "take x% of it")

    parser = OptionParser()
    parser.add_options(Percentages)
    assert "take 5% of it" in parser.format_help() and "take x% of it (default: 0.5)" in parser.format_help()


# ---- help -----------------------------------------------------------------------------------------------------------

SECTIONS = ["data", "training", "speed", "run", "distributed"]
# In each section, the options of config.py, then those of every run, then those of parts, each as they are defined.
DEPTH = {name: depth for depth, each in reversed([*enumerate(Config.__mro__)]) for name in get_annotations(each)}
IN_HELP = sorted(OPTIONS.values(), key=lambda item: (SECTIONS.index(item.metadata["section"]), DEPTH[item.name]))


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        Config.parse(["--help"])
    assert raised.value.code == 0
    return capsys.readouterr().out


def test_help_has_the_options_in_their_sections(help_text: str) -> None:
    section, found = "", {}
    for line in help_text.splitlines():
        if title := re.fullmatch(r"(\w+):", line):
            section = title[1]
        if flag := re.match(r"  --([\w-]+)", line):
            found[flag[1].replace("-", "_")] = section
    assert found.pop("config") == "options"
    assert list(dict.fromkeys(found.values())) == SECTIONS
    assert list(found) == [item.name for item in IN_HELP]
    assert list(found)[:4] == ["dataset", "data_dir", "val_fraction", "cache"]
    assert (found["data_dir"], found["clip_grad"], found["compile"]) == ("data", "training", "speed")
    assert (found["resume"], found["timeout"]) == ("run", "distributed")


def test_help_shows_every_default_and_every_choice(help_text: str) -> None:
    parts = [part for part in re.split(r"\n  (?=--)", help_text)[1:] if not part.startswith("--config ")]
    for part, item in zip(parts, IN_HELP, strict=True):
        words = " ".join(part.split())
        assert words.startswith("--" + item.name.replace("_", "-"))
        if item.default is not None and item.default is not False:
            default = "runs/DATA-MODEL" if item.name == "output_dir" else item.default
            assert f"(default: {default})" in words
        for choice in item.metadata["choices"]:
            assert choice in words


@pytest.mark.parametrize(
    ("flag", "unit"),
    [
        *[("batch-size", "samples"), ("image-size", "pixels"), ("epochs", "passes"), ("max-steps", "optimizer steps")],
        *[("warmup-epochs", "epochs"), ("checkpoint-every", "steps"), ("log-every", "steps"), ("timeout", "seconds")],
        ("warn-after", "seconds"),
    ],
)
def test_help_names_the_unit(help_text: str, flag: str, unit: str) -> None:
    part = next(part for part in re.split(r"\n  (?=--)", help_text) if part.startswith(f"--{flag} "))
    assert unit in part


# ---- data -----------------------------------------------------------------------------------------------------------


@shows("dataset", "data_dir", "cache")
def test_a_run_trains_on_the_images_of_data_dir(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32)).save(tmp_path / "images" / part / name / f"{number}.png")
    options = ("--dataset", "imagefolder", "--data-dir", tmp_path / "images", "--batch-size", 4)
    outcome = run(tmp_path / "out", *options, "--epochs", 1, "--cache", tmp_path / "cache")
    assert "imagefolder: 12 training, 4 validation samples; no test set" in outcome.output
    assert outcome.checkpoint()["model"]["fc3.bias"].shape == (2,)
    assert [path.stat().st_size // 3072 for path in sorted((tmp_path / "cache").glob("*-32-*.npy"))] == [12, 4]


def test_a_dataset_that_does_not_exist_is_refused_with_one_line(tmp_path: Path) -> None:
    output = train(2, "--dataset", "mnist", "--device", "cpu", "--output-dir", tmp_path, code=2)
    names = "cifar10, synthetic, imagefolder"
    assert output == f"error: --dataset mnist: must be one of {names}, or added to data.py\n"


def test_a_dataset_is_added_in_one_place(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its name and its function were in the dictionary of load_datasets."""
    source = inspect.getsource(data.load_datasets)
    edited = source.replace('"synthetic": synthetic', '"mine": synthetic')
    assert edited != source
    scope = {**vars(data)}
    exec(edited, scope)
    monkeypatch.setattr(main, "load_datasets", scope["load_datasets"])
    output = train(1, "--dataset", "mine", "--device", "cpu", "--max-steps", 1, "--output-dir", tmp_path)
    assert "mine: 640 training" in output


def test_a_loss_can_tell_training_from_evaluation(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule in the docstring of compute_loss: smoothed labels have a floor that evaluations do not have."""

    def smoothed(outputs: Tensor, targets: Tensor, config: Config) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.5 if torch.is_grad_enabled() else 0.0)

    monkeypatch.setattr(main.task, "compute_loss", smoothed)
    outcome = run(tmp_path, "--epochs", 8, "--lr", 0.1)
    assert outcome.lines("train")[-1]["loss"] > 1.6 > 1.2 > outcome.lines("val")[-1]["loss"]


@shows("val_fraction")
def test_a_part_of_the_training_images_validates(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
        for number in range(50):
            Image.new("RGB", (32, 32)).save(tmp_path / "images" / "train" / name / f"{number}.png")
    options = ("--dataset", "imagefolder", "--data-dir", tmp_path / "images", "--batch-size", 4, "--epochs", 1)
    outcome = run(tmp_path / "out", *options, "--val-fraction", 0.25)
    (count,) = [line["count"] for line in outcome.lines("val")]
    assert f"imagefolder: {100 - count} training, {count} validation samples; no test set" in outcome.output
    assert 10 < count < 40


@shows("batch_size")
def test_the_batch_size_is_per_process_and_the_global_batch_is_printed(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--batch-size", 20, "--epochs", 1, world_size=2)
    assert "global batch 40 = 2 processes x 20; 16 steps per epoch" in outcome.output
    assert outcome.steps() == [16]


@shows("eval_batch_size")
def test_a_loss_that_compares_the_samples_of_a_batch_depends_on_the_size_of_those_of_an_evaluation(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for any number of processes and any --batch-size, and kept for --evaluate."""

    def spread(outputs: Tensor, targets: Tensor, config: Config) -> Tensor:
        assert torch.is_grad_enabled() or len(targets) <= 10
        return F.cross_entropy(outputs, targets) + (outputs - outputs.mean(0)).square().mean()

    monkeypatch.setattr(main.task, "compute_loss", spread)
    outcome = run(tmp_path, "--epochs", 1, "--batch-size", 20, "--eval-batch-size", 10)
    loss = outcome.lines("val")[-1]["loss"]
    for world_size in (1, 2):
        again = run(tmp_path, "--evaluate", "--batch-size", 40, world_size=world_size)
        assert f"val    loss {loss:.4f}" in again.output


class CountsWorkers(BatchDataset):
    """Eight samples; each is the number of DataLoader workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        worker = get_worker_info()
        return torch.tensor(worker.num_workers if worker else 0), 0


@shows("workers")
def test_workers_is_the_number_of_processes_that_read_data() -> None:
    in_memory, from_files = CountsWorkers(), CountsWorkers()
    in_memory.in_memory = True

    def readers(ctx: DistContext) -> list[set[int]]:
        read = []
        for options, dataset in (((), in_memory), ((), from_files), (("--workers=0",), from_files)):
            loader = TrainLoader(dataset, Config.parse(["--batch-size=2", *options]), ctx)
            read.append({int(number) for batches in loader.steps(0) for numbers, _ in batches for number in numbers})
        three = TrainLoader(in_memory, Config.parse(["--batch-size=2", "--workers=3"]), ctx)
        return [*read, {int(number) for batches in three.steps(0) for numbers, _ in batches for number in numbers}]

    memory, files, none, three = on_ranks(1, readers, "--device", "cpu")[0]
    assert (memory, none, three) == ({0}, {0}, {3})
    assert files == {
        max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    }


@shows("image_size")
def test_images_are_resized_and_the_model_is_sized_to_them(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch, tmp_path / "seen", lambda model, inputs, outputs: list(inputs.shape))
    outcome = run(tmp_path, "--image-size", 48, "--max-steps", 1)
    assert seen()[0] == [64, 3, 48, 48]
    assert outcome.checkpoint()["model"]["fc1.weight"].shape == (120, 16 * 9 * 9)


def test_an_image_size_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--image-size", 15, code=2).output == "error: --image-size 15: ToyModel needs at least 16\n"
    output = run(tmp_path, "--model", "alexnet", code=2).output
    assert output.startswith("error: --model alexnet cannot take --batch-size 64 of --image-size 32: ")
    assert "224" in output
    assert output.count("\n") == 1


# ---- training -------------------------------------------------------------------------------------------------------


@shows("model")
def test_a_model_of_torchvision_is_trained_and_sized_to_the_classes(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--model", "shufflenet_v2_x0_5", "--batch-size", 8, "--max-steps", 2, world_size=2)
    assert "shufflenet_v2_x0_5, 352,042 weights" in outcome.output
    weights = outcome.checkpoint()["model"]
    assert weights["fc.weight"].shape == (10, 1024)
    assert weights["conv1.1.num_batches_tracked"] == 2


@pytest.mark.parametrize(("name", "others"), [("resnet81", 3), ("nothing_alike", 50)])
def test_an_unknown_model_is_refused_with_similar_names_or_with_all_names(
    tmp_path: Path, name: str, others: int
) -> None:
    output = run(tmp_path, "--model", name, code=2).output
    assert output.startswith(f"error: --model {name}: neither ToyModel nor one of torchvision's, such as ")
    named = re.findall(r"\w+", output.partition("such as")[2])
    assert "resnet18" in named and len(named) >= others and ("vit_b_16" in named) == (others > 3)
    assert output.count("\n") == 1


def test_a_batch_too_small_for_batchnorm_is_refused(tmp_path: Path, small: None) -> None:
    output = run(tmp_path, "--model", "shufflenet_v2_x0_5", "--batch-size", 1, "--max-steps", 1, code=2).output
    assert "--batch-size" in output
    assert output.count("\n") == 1


@shows("epochs")
def test_every_epoch_is_trained_and_evaluated(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--epochs", 3)
    assert [(line["epoch"], line["step"]) for line in outcome.lines("val")] == [(1, 10), (2, 20), (3, 30)]
    assert outcome.checkpoint()["epoch"] == 3


@shows("max_steps")
def test_max_steps_ends_the_run_in_mid_epoch_and_does_not_change_the_schedule(tmp_path: Path, small: None) -> None:
    stopped = run(tmp_path / "stopped", "--epochs", 2, "--max-steps", 13, "--log-every", 1)
    whole = run(tmp_path / "whole", "--epochs", 2, "--log-every", 1)
    assert stopped.steps()[-1] == 13
    assert stopped.rates() == whole.rates()[:13]


@shows("lr")
def test_the_length_of_a_step_is_proportional_to_the_learning_rate(tmp_path: Path, small: None) -> None:
    slow = run(tmp_path / "slow", *ONE_STEP, "--lr", 0.02, "--log-every", 1)
    fast = run(tmp_path / "fast", *ONE_STEP, "--lr", 0.06, "--log-every", 1)
    start = first_weights()
    assert (slow.rates(), fast.rates()) == ([0.02], [0.06])
    assert (slow.weights() - start).norm() > 1e-3
    assert close(fast.weights() - start, 3 * (slow.weights() - start))


@shows("momentum")
def test_momentum_adds_a_fraction_of_the_previous_step(tmp_path: Path, small: None) -> None:
    one = run(tmp_path / "one", *ONE_STEP).weights()
    two = run(tmp_path / "two", *PLAIN, "--max-steps", 2).weights()
    with_momentum = run(tmp_path / "with", *PLAIN, "--max-steps", 2, "--momentum", 0.7).weights()
    assert close(with_momentum - two, 0.7 * (one - first_weights()))


@shows("weight_decay")
def test_weight_decay_shrinks_the_weights(tmp_path: Path, small: None) -> None:
    without = run(tmp_path / "without", *ONE_STEP).weights()
    decayed = run(tmp_path / "decayed", *ONE_STEP, "--weight-decay", 0.3).weights()
    assert close(decayed - without, -0.1 * 0.3 * first_weights())


@shows("clip_grad")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_gradient_is_clipped_to_its_norm_after_unscaling(tmp_path: Path, small: None, precision: str) -> None:
    outcome = run(tmp_path, *ONE_STEP, "--clip-grad", 0.01, "--precision", precision)
    assert (outcome.weights() - first_weights()).norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@shows("ema")
def test_an_average_of_the_weights_is_kept(tmp_path: Path, small: None) -> None:
    """After one step: three quarters of the first weights, and a quarter of the new ones."""
    content = run(tmp_path, *ONE_STEP, "--ema", 0.75).checkpoint()
    assert close(flat(content["ema"]), 0.75 * first_weights() + 0.25 * flat(content["model"]))
    assert not torch.equal(flat(content["ema"]), flat(content["model"]))


@shows("init_from")
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, small: None) -> None:
    """A rate of 1e-30 changes no weight. test_init_from.py has more."""
    first = run(tmp_path / "first", "--epochs", 1)
    still = run(tmp_path / "second", *PLAIN, "--lr", 1e-30, "--max-steps", 1, "--init-from", tmp_path / "first/best.pt")
    assert torch.equal(still.weights(), first.weights()) and still.steps() == [1]


@shows("patience")
def test_a_run_without_progress_stops_after_this_many_epochs(tmp_path: Path, small: None) -> None:
    """Nothing is learned at a rate of 1e-12. test_validation.py has more."""
    outcome = run(tmp_path, "--lr", 1e-12, "--epochs", 9, "--patience", 2)
    assert [line["epoch"] for line in outcome.lines("val")] == [1, 2, 3]


@shows("lr_schedule")
def test_after_the_warm_up_the_learning_rate_follows_a_cosine_or_is_constant(tmp_path: Path, small: None) -> None:
    options = ("--epochs", 1, "--warmup-epochs", 0, "--lr", 0.5, "--log-every", 1)
    cosine = run(tmp_path / "cosine", *options, "--lr-schedule", "cosine")
    constant = run(tmp_path / "constant", *options, "--lr-schedule", "constant")
    expected = [0.25 * (1 + math.cos(math.pi * (step + 0.5) / 10)) for step in range(10)]
    assert cosine.rates() == pytest.approx(expected)
    assert constant.rates() == [0.5] * 10


@shows("warmup_epochs")
def test_the_learning_rate_rises_during_the_warm_up(tmp_path: Path, small: None) -> None:
    options = ("--epochs", 1, "--lr-schedule", "constant", "--lr", 0.5, "--log-every", 1)
    rates = run(tmp_path, *options, "--warmup-epochs", 0.5).rates()
    assert rates == pytest.approx([0.05, 0.15, 0.25, 0.35, 0.45, 0.5, 0.5, 0.5, 0.5, 0.5])


@shows("scale_lr")
def test_the_learning_rate_is_scaled_with_the_global_batch(tmp_path: Path, small: None) -> None:
    options = (*ONE_STEP, "--scale-lr", "--lr", 0.02, "--log-every", 1, "--batch-size", 32, "--grad-accum-steps", 3)
    outcome = run(tmp_path, *options, world_size=2)
    assert outcome.rates() == pytest.approx([0.02 * (2 * 32 * 3) / 64])
    assert "learning rate 0.06" in outcome.output


@shows("grad_accum_steps")
def test_accumulation_all_reduces_in_the_last_pass_only(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events"

    def note(event: str, ctx: DistContext) -> None:
        with path.open("a") as file:
            file.write(f"{ctx.rank} {event}\n")

    def wrap_and_count(model: nn.Module, config: Config, ctx: DistContext, task: Any) -> Any:
        def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            if bucket.is_last():
                note("all-reduce", ctx)
            return default_hooks.allreduce_hook(None, bucket)

        ddp_model = wrapping.wrap_model(model, config, ctx, task)
        ddp_model.register_comm_hook(None, reduce)
        ddp_model.register_forward_hook(lambda *_: note("forward", ctx))
        return ddp_model

    monkeypatch.setattr(main, "wrap_model", wrap_and_count)
    run(tmp_path / "out", "--grad-accum-steps", 3, "--batch-size", 8, "--max-steps", 2, world_size=2)
    for rank in range(2):
        events = [line[2:] for line in path.read_text().splitlines() if line[0] == str(rank)]
        assert events == ["forward", "forward", "forward", "all-reduce"] * 2


def test_accumulation_gives_the_step_of_the_whole_batch(tmp_path: Path, small: None) -> None:
    whole = run(tmp_path / "whole", *PLAIN, "--max-steps", 3, "--batch-size", 60)
    parts = run(tmp_path / "parts", *PLAIN, "--max-steps", 3, "--batch-size", 20, "--grad-accum-steps", 3)
    assert close(parts.weights(), whole.weights())
    assert (whole.weights() - first_weights()).norm() > 0.01


@shows("evaluate")
def test_evaluate_reports_the_metrics_of_the_training_and_changes_nothing(tmp_path: Path, small: None) -> None:
    trained = run(tmp_path, "--epochs", 1)
    metrics = trained.lines("val")[-1]

    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}

    before = files()
    output = run(tmp_path, "--evaluate", world_size=2).output
    assert f"loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.4f}" in output
    assert "  train  " not in output
    assert files() == before


@shows("evaluate")
def test_evaluate_takes_the_path_of_a_checkpoint(tmp_path: Path, small: None) -> None:
    trained = run(tmp_path / "trained", "--epochs", 2)
    first, second = ([line[name] for name in ("loss", "accuracy")] for line in trained.lines("val"))
    assert first != second
    path = tmp_path / "trained" / "checkpoints" / "step_00000010.pt"
    output = run(tmp_path / "other", "--evaluate", "--resume", path).output
    assert "\nepoch 1  step 10  val    loss {:.4f}  accuracy {:.4f}".format(*first) in output, (
        "an evaluation does not know the number of epochs"
    )
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_the_run_itself_can_be_evaluated(tmp_path: Path, small: None) -> None:
    run(tmp_path, "--epochs", 1)
    assert "  val    " in run(tmp_path, "--evaluate", "--resume", tmp_path / "best.pt").output


def test_an_evaluation_accepts_a_batch_larger_than_the_training_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 40, "val": 101})
    run(tmp_path, "--batch-size", 20, "--epochs", 1)
    assert "  val    " in run(tmp_path, "--evaluate", "--batch-size", 64).output


def test_a_missing_checkpoint_is_refused(tmp_path: Path, small: None) -> None:
    """Rank 0 checks it: the other machines need not have the file."""
    output = run(tmp_path, "--resume", tmp_path / "nowhere.pt", code=4).output
    assert "nowhere.pt cannot be used: No such file or directory" in output


def test_evaluate_needs_a_checkpoint(tmp_path: Path, small: None) -> None:
    output = run(tmp_path / "new", "--evaluate", code=2).output
    expected = r"^error: --evaluate: there is no checkpoint in .*new/checkpoints.*--resume PATH\n\Z"
    assert re.search(expected, output, re.MULTILINE)
    assert not (tmp_path / "new").exists()


# ---- speed ----------------------------------------------------------------------------------------------------------


@shows("precision")
@pytest.mark.parametrize(
    ("precision", "outputs"), [("fp32", "torch.float32"), ("bf16", "torch.bfloat16"), ("fp16", "torch.float16")]
)
def test_precision_is_the_type_of_the_outputs_and_weights_stay_fp32(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, precision: str, outputs: str
) -> None:
    seen = watch(monkeypatch, tmp_path / "seen", lambda model, inputs, outputs: str(outputs.dtype))
    outcome = run(tmp_path, "--precision", precision, "--max-steps", 2)
    assert set(seen()) == {outputs}  # in training and in evaluation
    checkpoint = outcome.checkpoint()
    assert {tensor.dtype for tensor in checkpoint["model"].values()} == {torch.float32}
    assert ("scale" in checkpoint["scaler"]) is (precision == "fp16")


def test_a_step_in_fp16_that_overflows_is_skipped_and_the_scale_is_halved(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Steep(nn.Module):
        """Its gradient, multiplied by 65536, overflows fp16."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3 * 32 * 32, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(images.flatten(1)) * 4000

    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: Steep())
    checkpoint = run(tmp_path, *ONE_STEP, "--precision", "fp16").checkpoint()
    assert checkpoint["scaler"]["scale"] == 2**15
    with torch.random.fork_rng():
        seed_everything(0)
        assert torch.equal(checkpoint["model"]["last.weight"], Steep().last.weight)


class TwoWays(nn.Module):
    """Uses one layer when it is compiled, the other when it is not. The layer that has learned shows which."""

    def __init__(self) -> None:
        super().__init__()
        self.interpreted = nn.Linear(3 * 32 * 32, 10, bias=False)
        self.compiled = nn.Linear(3 * 32 * 32, 10, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        used, other = (self.compiled, self.interpreted) if compiling else (self.interpreted, self.compiled)
        return used(images.flatten(1)) + 0 * other.weight.sum()  # each weight needs a gradient


@pytest.mark.slow
@shows("compile")
@pytest.mark.parametrize("backend", [None, "eager", pytest.param("inductor", marks=pytest.mark.sample(0))])
def test_compile_keeps_the_names_of_the_weights(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    """`eager` runs the graph that torch has traced. `inductor`, torch's default, compiles it for half a minute."""
    options = [] if backend is None else ["--compile"]
    if options:
        need("g++")
    if backend == "inductor" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("inductor of torch 2.15 writes C++ that does not compile for a processor without AVX2")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: TwoWays())
    with torch._inductor.config.patch(compile_threads=1):  # a pool of compilers would outlive the rank
        after = run(tmp_path, *ONE_STEP, "--weight-decay", 0, *options).checkpoint()["model"]
    with torch.random.fork_rng():
        seed_everything(0)
        before = TwoWays().state_dict()
    learned = {name for name in before if not torch.equal(before[name], after[name])}
    assert learned == {"compiled.weight" if options else "interpreted.weight"}


def test_compile_without_a_compiler_is_refused(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    output = run(tmp_path / "out", "--compile", code=3).output
    line = f"--compile needs a C++ compiler, but found no {tmp_path}/no-such-compiler"
    assert output == f"error: {line}: install g++, set CXX, or remove --compile\n"


@pytest.mark.parametrize(
    ("compilers", "variable", "found"),
    [
        (["g++", "cc"], None, "but found no gcc and no clang: install gcc"),  # what Triton looks for
        (["gcc"], "tcc", "but found no tcc: install gcc"),
        (["gcc"], None, None),
        (["clang"], None, None),
        (["tcc"], "tcc", None),
    ],
)
def test_compile_on_a_gpu_needs_a_c_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilers: list[str], variable: str | None, found: str | None
) -> None:
    for name in compilers:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config.parse(["--compile", "--device", "cuda"])
    if found is None:
        wrapping.check_model(config, nn.Linear(1, 1))
    else:
        with pytest.raises(SetupError, match=re.escape(f"--compile needs a C compiler, {found}, set CC")):
            wrapping.check_model(config, nn.Linear(1, 1))


@shows("channels_last")
@pytest.mark.parametrize("options", [[], ["--image-size", 40]], ids=["as they are", "resized"])
def test_images_and_convolutions_are_in_channels_last_order(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, options: list[Any]
) -> None:
    def order(model: Any, inputs: Tensor, outputs: Tensor) -> list[bool]:
        parts = (inputs, model.conv2.weight)
        return [part.is_contiguous(memory_format=torch.channels_last) and not part.is_contiguous() for part in parts]

    seen = watch(monkeypatch, tmp_path / "seen", order)
    plain = run(tmp_path / "plain", *ONE_STEP, *options)
    assert set(map(tuple, seen())) == {(False, False)}
    (tmp_path / "seen").unlink()
    reordered = run(tmp_path / "reordered", *ONE_STEP, *options, "--channels-last")
    assert set(map(tuple, seen())) == {(True, True)}  # in training and in evaluation
    assert close(reordered.weights(), plain.weights())


@shows("matmul_precision")
def test_the_precision_of_matrix_products_is_torchs_own_switch(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, "high" allows TF32. cudnn may try all algorithms, unless they must be deterministic."""

    def settings(model: Any, inputs: Tensor, outputs: Tensor) -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    seen = watch(monkeypatch, tmp_path / "seen", settings)
    run(tmp_path / "highest", *ONE_STEP)
    assert set(map(tuple, seen())) == {("highest", True)}
    (tmp_path / "seen").unlink()
    run(tmp_path / "high", *ONE_STEP, "--matmul-precision", "high", "--deterministic")
    assert set(map(tuple, seen())) == {("high", False)}
    try:
        torch.set_float32_matmul_precision("medium")  # as model.py may
        for given, counts in (((), "highest"), (("--matmul-precision", "medium"), "medium")):
            (tmp_path / "seen").unlink()
            output = run(tmp_path / f"own {counts}", *ONE_STEP, *given).output
            assert set(map(tuple, seen())) == {(counts, True)}
            told = "sets medium precision of matrix products, but --matmul-precision highest counts\n"
            assert output.count(told) == (not given)
    finally:
        torch.set_float32_matmul_precision("highest")


@shows("sync_bn")
def test_sync_bn_without_a_gpu_is_refused(tmp_path: Path, small: None, no_gpu: None) -> None:
    output = run(tmp_path, "--sync-bn", "--device", "auto", "--model", "resnet18", code=2).output
    assert output == "error: --sync-bn needs a GPU: torch has no SyncBatchNorm for the CPU; remove it\n"


@shows("sync_bn")
def test_sync_bn_converts_the_model() -> None:
    def refusal(ctx: DistContext) -> str:
        config = Config.parse(["--sync-bn"])
        try:
            wrapping.wrap_model(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), config, ctx)
        except ValueError as error:  # DDP refuses SyncBatchNorm on a CPU, so the model was converted
            return str(error)
        return ""

    assert "SyncBatchNorm" in on_ranks(1, refusal, "--device", "cpu")[0]


@shows("shard")
def test_with_shard_each_rank_keeps_a_part_of_each_weight_gradient_and_state() -> None:
    def kept(ctx: DistContext) -> list[float]:
        layer = nn.Linear(8, 8)
        wrapped = wrapping.wrap_model(layer, Config.parse(["--device=cpu", "--shard"]), ctx)
        optimizer = torch.optim.Adam(layer.parameters())
        wrapped(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
        weight: Any = layer.weight
        tensors = (weight, weight.grad, optimizer.state[weight]["exp_avg"])
        return [tensor.to_local().numel() / 64 for tensor in tensors]

    assert on_ranks(2, kept, "--device", "cpu") == [[0.5] * 3] * 2


@shows("checkpoint_activations")
def test_with_checkpoint_activations_a_block_is_computed_again_in_the_backward_pass() -> None:
    """With the same random numbers, and it takes none from those that are drawn later."""

    def draw() -> float:
        return random.random() + numpy.random.rand() + torch.rand(()).item()

    def calls(ctx: DistContext) -> list[int]:
        class Drawing(nn.Linear):
            def forward(self, inputs: Tensor) -> Tensor:
                found.append(draw())
                return super().forward(inputs) * found[-1]

        found: list[float] = []
        model = nn.Sequential(Drawing(4, 4), Drawing(4, 4))
        wrapped = wrapping.wrap_model(model, Config.parse(["--device=cpu", "--checkpoint-activations"]), ctx)
        with torch.no_grad():
            wrapped(torch.zeros(2, 4))
        before = len(found)
        wrapped(torch.zeros(2, 4)).sum().backward()
        assert found[4:] == found[3:1:-1] and draw() not in found
        return [before, len(found)]

    assert on_ranks(1, calls, "--device", "cpu") == [[2, 6]]


@shows("profile")
def test_the_profile_shows_steps_10_to_15(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--batch-size", 16, "--max-steps", 18, "--profile")
    path = tmp_path / "profile" / "trace.json"
    assert f"profile of steps 10 to 15: {path}" in outcome.output
    events = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::conv2d" in events
    assert {int(name.partition("#")[2]) for name in events if str(name).startswith("ProfilerStep#")} == {*range(9, 15)}


def test_a_run_too_short_for_a_profile_warns(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--max-steps", 3, "--profile")
    assert "warning: --profile: no trace, since the run ended before step 10" in outcome.output
    assert not (tmp_path / "profile" / "trace.json").exists()


# ---- run ------------------------------------------------------------------------------------------------------------


@shows("output_dir")
def test_a_run_writes_only_to_its_output_dir(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(tmp_path / "out" / "new", "--max-steps", 1)
    assert list((tmp_path / "here").iterdir()) == []
    written = {path.name for path in (tmp_path / "out" / "new").iterdir() if not path.name.startswith(".")}
    assert written == {"best.pt", "checkpoints", "config.json", "metrics.jsonl", "status.json", "tensorboard"}


@shows("resume")
def test_a_run_resumes_from_its_newest_checkpoint(tmp_path: Path, small: None) -> None:
    run(tmp_path, "--max-steps", 3, "--log-every", 1)
    again = run(tmp_path, "--max-steps", 5, "--log-every", 1)
    assert f"resuming from {tmp_path}/checkpoints/step_00000003.pt" in again.output
    assert [line["step"] for line in again.lines("train")] == [1, 2, 3, 4, 5]


@shows("resume")
def test_resume_never_refuses_a_directory_with_checkpoints_and_accepts_a_new_one(tmp_path: Path, small: None) -> None:
    assert run(tmp_path, "--resume", "never", "--max-steps", 1).steps() == [1]
    output = run(tmp_path, "--resume", "never", "--max-steps", 2, code=2).output
    assert output.startswith("error: --resume never: ")
    assert run(tmp_path, "--max-steps", 1).steps() == [1]


@shows("resume")
def test_resume_takes_the_path_of_a_checkpoint(tmp_path: Path, small: None) -> None:
    first = run(tmp_path / "first", "--max-steps", 2)
    path = tmp_path / "first" / "checkpoints" / "step_00000002.pt"
    other = run(tmp_path / "other", "--max-steps", 3, "--resume", path)
    assert f"resuming from {path}, at step 2" in other.output
    assert (first.steps(), other.steps()) == ([2], [3])
    uninterrupted = run(tmp_path / "uninterrupted", "--max-steps", 3)
    assert torch.equal(other.weights(), uninterrupted.weights())


@shows("checkpoint_every")
def test_checkpoints_are_written_every_few_steps_and_after_every_epoch(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--checkpoint-every", 4, "--keep-checkpoints", 9, "--epochs", 2)
    assert outcome.steps() == [4, 8, 10, 12, 16, 20]


@shows("keep_checkpoints")
def test_the_newest_few_checkpoints_are_kept(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--checkpoint-every", 4, "--keep-checkpoints", 2, "--epochs", 2)
    assert outcome.steps() == [16, 20]
    assert (tmp_path / "best.pt").exists()


@shows("mirror")
def test_a_mirror_holds_what_another_machine_needs_to_resume(tmp_path: Path, small: None) -> None:
    (tmp_path / "mirror").mkdir()
    run(tmp_path / "run", "--mirror", tmp_path / "mirror", "--epochs", 2)
    names = ["best.pt", "metrics.jsonl", *(f"checkpoints/step_{step:08d}.pt" for step in (10, 20))]
    for name in names:
        assert (tmp_path / "mirror" / name).exists()
    other = run(tmp_path / "other", "--mirror", tmp_path / "mirror", "--epochs", 2)
    assert "downloaded step_00000020.pt" in other.output and "already done" in other.output


@shows("log_every")
def test_log_every_is_the_number_of_steps_between_two_lines(tmp_path: Path, small: None) -> None:
    outcome = run(tmp_path, "--log-every", 3, "--epochs", 1)
    assert [line["step"] for line in outcome.lines("train")] == [3, 6, 9, 10]
    assert outcome.output.count("  train  ") == 4
    short = run(tmp_path / "short", "--log-every", 15, "--epochs", 2)
    assert [line["step"] for line in short.lines("train")] == [10, 15, 20]
    assert re.findall(r"step +(\d+)/20  train  .* val(?: \(best\))?  ", short.output) == ["10", "20"]
    assert short.output.count("  train  ") == 2, "one line per epoch, with training and validation side by side"


@shows("seed")
def test_the_seed_determines_the_run(tmp_path: Path, small: None) -> None:
    options = (*ONE_STEP, "--lr", 1e-6)  # a step so small that the weights stay close to the initial ones
    ones = [run(tmp_path / name, *options, "--seed", 1).weights() for name in ("a", "b")]
    two = run(tmp_path / "c", *options, "--seed", 2).weights()
    assert torch.equal(*ones)
    assert close(ones[0], first_weights("--seed", 1))
    assert close(two, first_weights("--seed", 2))
    assert not close(ones[0], two)


@shows("deterministic")
def test_deterministic_refuses_an_operation_without_a_deterministic_algorithm(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unpools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3 * 32 * 32, 10)

        def forward(self, images: Tensor) -> Tensor:
            pooled, indices = F.max_pool2d(images, 2, return_indices=True)
            return self.last(F.max_unpool2d(pooled, indices, [2, 2]).flatten(1))

    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: Unpools())
    run(tmp_path / "free", *ONE_STEP)
    output = run(tmp_path / "strict", *ONE_STEP, "--deterministic", code=2).output
    operation = r"max_unpooling2d_forward_out \(test_options\.py, line \d+\)"
    remedy = "replace this operation, or remove --deterministic"
    line = rf"error: --deterministic: {operation} has no deterministic form on this device: {remedy}"
    assert re.fullmatch(line, output.splitlines()[-1]) and "Traceback" not in output


@shows("guard")
def test_guard_computes_the_gradients_of_every_nth_step_twice(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, compute_loss = [], main.task.compute_loss

    def counted(*arguments: Any) -> Tensor:
        passes.append(torch.is_grad_enabled())
        (tmp_path / "passes").write_text(str(sum(passes)))
        return compute_loss(*arguments)

    monkeypatch.setattr(main.task, "compute_loss", counted)
    run(tmp_path, "--max-steps", 7, "--deterministic", "--guard", 3)
    assert int((tmp_path / "passes").read_text()) == 7 + 3, "steps 0, 3 and 6"


@shows("accept_changed_data")
def test_other_samples_are_accepted_if_the_user_says_so(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--batch-size", 8, "--max-steps")
    run(tmp_path, *options, 2)
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 600, "val": 101})
    assert "training samples were 640, are 600" in run(tmp_path, *options, 3, code=4).output
    assert run(tmp_path, *options, 3, "--accept-changed-data").steps()[-1] == 3


@shows("strict_resume")
def test_strict_resume_refuses_another_number_of_processes(tmp_path: Path, small: None) -> None:
    run(tmp_path, "--batch-size", 8, "--max-steps", 2, world_size=2)
    options = ("--batch-size", 8, "--max-steps", 3)
    output = run(tmp_path, *options, "--strict-resume", code=4).output
    assert "--strict-resume: the number of processes was 2, is 1" in output
    assert "warning: 2 processes wrote this checkpoint, this run has 1: " in run(tmp_path, *options).output
    assert run(tmp_path, *options, "--strict-resume", "--max-steps", 4).steps()[-1] == 4


# ---- distributed ----------------------------------------------------------------------------------------------------


def print_context(config: Config, rank_env: RankEnv) -> None:
    """Replaces main.main: connects to the other processes and prints its DistContext on one line."""
    with init_distributed(config, rank_env) as ctx:
        everyone = ctx.gather(ctx.rank)
        print(json.dumps([ctx.rank, ctx.local_rank, ctx.device.type, ctx.backend, everyone]))


def contexts(world_size: int, *options: Any, code: int = 0) -> list[Any] | str:
    """What print_context prints on each rank. `{rank}` in an option is the number of the process."""

    def target(rank_env: RankEnv) -> int:
        sys.argv = ["main.py", *(str(option).format(rank=rank_env.rank) for option in options)]
        return launch(print_context, Config)

    ranks = Ranks(world_size, target)
    assert ranks.wait() == [code] * world_size, ranks.output()
    return ranks.output() if code else [json.loads(ranks.output(rank)) for rank in range(world_size)]


@shows("rank", "world_size", "init_method", "local_rank")
def test_arguments_set_the_ranks_of_a_process(tmp_path: Path) -> None:
    shared = ("--world-size", 3, "--device", "cpu", "--init-method", f"file://{tmp_path}/rendezvous")
    found = contexts(3, "--rank", "{rank}", "--local-rank", "1{rank}", *shared)
    assert found == [[rank, 10 + rank, "cpu", "gloo", [0, 1, 2]] for rank in range(3)]


@shows("device", "backend")
def test_device_and_backend_are_the_requested_ones() -> None:
    assert contexts(1, "--device", "cpu", "--backend", "gloo") == [[0, 0, "cpu", "gloo", [0]]]
    assert contexts(1, "--device", "cpu") == [[0, 0, "cpu", "gloo", [0]]]


@fault(30)
@shows("device", "backend")
@pytest.mark.parametrize(("flag", "value"), [("--device", "cuda"), ("--backend", "nccl")])
def test_a_missing_gpu_is_reported_at_once(tmp_path: Path, small: None, no_gpu: None, flag: str, value: str) -> None:
    if value == "nccl" and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    output = run(tmp_path, "--device", "auto", flag, value, code=3).output
    assert output.startswith(f"error: {flag} {value}: torch finds no GPU here")
    assert output.count("\n") == 1


@shows("backend")
def test_a_backend_that_torch_lacks_is_refused_with_the_available_ones(tmp_path: Path, small: None) -> None:
    if dist.is_mpi_available():
        pytest.skip("this torch was built with MPI")
    output = run(tmp_path, "--backend", "mpi", code=2).output
    assert re.fullmatch(r"error: --backend mpi: this torch was built with gloo.* only\n", output)


@pytest.mark.slow
@shows("timeout")
def test_timeout_limits_how_long_a_process_waits_for_the_others(tmp_path: Path) -> None:
    took = {}
    for seconds in (1, 9):
        ranks = ("--rank", 0, "--world-size", 2, "--device", "cpu", "--init-method", f"file://{tmp_path}/{seconds}")
        start = time.monotonic()
        output = contexts(1, *ranks, "--timeout", seconds, code=3)
        took[seconds] = time.monotonic() - start
        assert "only 1 of 2 processes joined" in output
        assert f"within {seconds} s (--timeout)" in output
    assert 1 <= took[1] < 60  # the default is 600
    assert took[9] - took[1] > 2


@pytest.mark.slow
@shows("warn_after")
def test_warn_after_says_who_waits_for_whom() -> None:
    def wait(seconds: int, rank_env: RankEnv) -> int:
        logging.getLogger("ddp").addHandler(logging.StreamHandler())  # not pytest's
        with init_distributed(Config.parse(["--device", "cpu", "--warn-after", str(seconds)]), rank_env) as ctx:
            if ctx.rank == 1:
                time.sleep(2.5)
            ctx.gather(None)
        return 0

    for seconds in (1, 60):
        ranks = Ranks(2, partial(wait, seconds))
        assert ranks.wait() == [0, 0], ranks.output()
        warned = re.search(r"rank 0 has waited \d+ s at .*; rank 1 is at test_options\.py:\d+", ranks.output(0))
        assert (warned is not None) == (seconds == 1)


@shows("nproc")
def test_more_processes_than_the_machine_can_run_are_refused(template: Path) -> None:
    command = ["./launch_node.sh", "--nproc-per-node", "100000"]
    environment = {**os.environ, "PYTHON": sys.executable}
    node = subprocess.run(command, cwd=template, env=environment, capture_output=True, text=True, timeout=180)
    assert node.returncode == 2
    cores = os.cpu_count() or 1
    limit = f"this machine has {cores} cores and runs at most {16 * cores} processes, 16 per core"
    alone = python(template, "main.py", "--nproc", 100_000, code=2)
    for output, flag in ((node.stderr, "--nproc-per-node"), (alone, "--nproc")):
        assert output.count("\n") == 1 and f"{flag} 100000: {limit}" in output
