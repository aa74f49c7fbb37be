"""docs/recipes.md and docs/state.md are tested: each of their edits is applied to a project, which then trains."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, newest, weights_and_momentum
from project_runs import TESTS, python, train_in
from template_copy import shrink
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp.checkpoint import storage

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
PAGE = "\n".join((TEMPLATE / "docs" / name).read_text(encoding="utf-8") for name in ("recipes.md", "state.md"))
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FSDP = (TEMPLATE / "docs" / "fsdp.md").read_text(encoding="utf-8")
SECTIONS["Blocks"] = FSDP.partition("\n## Blocks\n")[2].partition("\n## ")[0]


def edits(title: str) -> list[tuple[str, str]]:
    """The files and the edits of a section."""
    return re.findall(r"^```diff (\S+)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)


def applied(text: str, edit: str) -> str:
    """`text` after an edit: in each part, the lines without `+` are there once, and become those without `-`."""
    for part in edit.split("@@\n"):
        rows = part.splitlines(keepends=True)
        before, after = ("".join(row[1:] if row.strip() else row for row in rows if row[0] != sign) for sign in "+-")
        before = before.removesuffix("\n")  # so that a line may be given from its start
        after = after.removesuffix("\n")
        assert text.count(before) == 1, (text.count(before), before)
        text = text.replace(before, after)
    return text


def project_with(folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the project with these edits."""
    hidden = shutil.ignore_patterns(".*_cache", "__pycache__", "runs", "tests")
    project = Path(shutil.copytree(TEMPLATE, folder / "project", ignore=hidden))
    return apply(shrink(project, train=256, val=64, test=64), *changes)


def apply(project: Path, *changes: tuple[str, str]) -> Path:
    for file, edit in changes:
        path = project / file
        path.write_text(applied(path.read_text(), edit))
    return project


RECIPES: dict[str, Callable[[Path], None]] = {}


def recipe(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Each of these applies the edits of a section to a project in a folder, which then trains."""
    RECIPES[function.__name__] = function
    return function


SHARED = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", 32, "--epochs", 1, "--warmup-epochs", 0]
SHARED += ["--log-every", 4, "--output-dir", "runs/x"]


def run(project: Path, processes: int, *options: Any, **variables: str) -> str:
    (output,) = train_in(project, [processes, *SHARED, *options], **variables)
    return output


def assert_resumes(project: Path, *options: Any) -> None:
    """A run of two processes, and one that is interrupted in the second epoch, end the same bit for bit."""
    whole = [2, *SHARED, "--batch-size", 16, "--epochs", 2, *options]
    part = [*whole, "--output-dir", "runs/y"]
    _, _, output = train_in(project, whole, [*part, "--max-steps", 11], part)
    assert "resuming from" in output
    runs = [project / "runs/x", project / "runs/y"]
    assert weights_and_momentum(runs[0]) == weights_and_momentum(runs[1])
    # The weights that are tested are the best ones. They may be those at the interruption: there was an evaluation.
    best = [storage.read(each / "best.pt")["step"] for each in runs]
    for split in ("train_epoch", "val", "test")[: 3 if best[0] == best[1] else 2]:
        assert lines(runs[0], split)[-1] == lines(runs[1], split)[-1]
    assert best[0] == best[1] or best[1] == 11


REHEARSAL = """
import json, sys
from pathlib import Path
sys.path[:0] = [".", sys.argv[1]]
import rehearse
from config import Config
from processes import fork
found = rehearse.Rehearsal(Config.parse(sys.argv[2:]), 2, Path("rehearsal").resolve(), fork).checks()
print(json.dumps({name: each for name, each, _ in found}))
"""


def rehearsed(project: Path, *options: Any) -> list[str]:
    """All that rehearse.py finds with two processes."""
    words = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", 16, "--lr", 0.1, *options]
    found = json.loads(python(project, "-c", REHEARSAL, TESTS, *words).splitlines()[-1])
    assert len(found) == 10
    return [each for check in found.values() for each in check]


def distance(project: Path, *names: str) -> float:
    """The largest difference of a weight between the last checkpoints of two runs."""
    first, second = (storage.read(newest(project / "runs" / name))["model"] for name in names)
    return max((weight - second[name]).abs().max().item() for name, weight in first.items())


NORMALISED = """
-        self.fc2 = nn.Linear(120, 84)
+        self.fc2 = nn.Sequential(nn.Linear(120, 84), nn.BatchNorm1d(84), nn.Dropout(0.1))
""".lstrip()


def wandb_records(file: Path) -> list[Any]:
    """What a .wandb file holds: 7 bytes, then blocks of 32 KiB with parts of records, each after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if -place % 32768 < 7:  # the rest of a block is too short for a part
            place += -place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(record))
            record = b""
    return found


@recipe
def weights_and_biases(tmp_path: Path) -> None:
    """Offline: its file holds the options, and each point at its step, although the run is killed and resumed."""
    pytest.importorskip("wandb")
    project = project_with(tmp_path, *edits("Weights & Biases"))
    main = (project / "main.py").read_text()
    place = "                run.advance()"
    kill = "import os; run.state.step == 6 and 'KILL' in os.environ and os.kill(os.getpid(), 9)"
    (project / "main.py").write_text(main.replace(place, f"                {kill}\n{place}"))
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    options = ["main.py", *SHARED, "--log-every", 1, "--checkpoint-every", 4]
    python(project, *options, code=-9, KILL="1", **variables)
    killed = next((project / "runs/x").glob("wandb/offline-run-*"))
    python(project, *options, **variables)
    (file,) = (file for file in (project / "runs/x").glob("wandb/offline-run-*/*.wandb") if file.parent != killed)
    records = wandb_records(file)
    assert any(b"ToyModel" in record.SerializeToString() for record in records if record.HasField("run"))
    axes = [(record.metric.glob_name, record.metric.step_metric) for record in records if record.HasField("metric")]
    assert ("*", "step") in axes
    points = set()
    for record in records:
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        points |= {(values["step"], name, value) for name, value in values.items() if "/" in name}
    logged = [json.loads(line) for line in (project / "runs/x/metrics.jsonl").read_text().splitlines()]
    expected = {(line["step"], f"{line['split']}/loss", line["loss"]) for line in logged}
    assert len(expected) > 8 and expected <= points


@recipe
def mlflow(tmp_path: Path) -> None:
    """In a folder, which takes the place of a server."""
    project = project_with(tmp_path, *edits("MLflow"))
    uri = (tmp_path / "mlruns").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = pytest.importorskip("mlflow")
        run(project, 2, MLFLOW_TRACKING_URI=uri)
        client = mlflow.tracking.MlflowClient(uri)
        (experiment,) = (each for each in client.search_experiments() if each.name == "my-project")
        (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["model"] == "ToyModel" and found.data.params["lr"] == "0.03"
    (val,) = lines(project / "runs/x", "val")
    assert found.data.metrics["val/accuracy"] == val["accuracy"]


@recipe
def histograms_and_images(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Histograms and images in TensorBoard"))
    train_in(project, [2, *SHARED], [2, *SHARED, "--shard", "--output-dir", "runs/y"])
    found = []
    for name in ("x", "y"):
        events = EventAccumulator(str(project / f"runs/{name}/tensorboard"))
        events.Reload()
        assert {"conv1", "train/inputs"} <= set(events.Tags()["images"])
        found.append([each.histogram_value for each in events.Histograms("fc3.weight")])
    assert found[0] and found[0] == found[1], "all rows, with --shard as well"


@recipe
def the_norm_of_the_gradient(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("The norm of the gradient"))
    clipped = [2, *SHARED, "--clip-grad", 0.01]
    train_in(project, clipped, [1, *SHARED, "--output-dir", "runs/y"], [*clipped, "--shard", "--output-dir", "runs/z"])
    found = [[line["grad_norm"] for line in lines(project / f"runs/{name}", "train")] for name in "xz"]
    # A sum in another order: the default tolerance, 1e-6, is ten roundings.
    assert found[0] and min(found[0]) > 0.01 and found[0] == pytest.approx(found[1], rel=1e-4), "with --shard as well"
    assert all("grad_norm" not in line for line in lines(project / "runs/y"))


@recipe
def several_losses(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Several losses"))
    run(project, 1)
    for line in lines(project / "runs/x"):
        assert line["activity"] > 0 and 0 <= line["accuracy"] <= 1
    assert rehearsed(project) == []


@recipe
def class_weights(tmp_path: Path) -> None:
    """Of equal classes one counts five times, so the model says it more often. Any number of ranks trains alike."""
    plain, weighted = project_with(tmp_path / "a"), project_with(tmp_path / "b", *edits("Class weights"))
    for project in (plain, weighted):
        run(project, 1, "--max-steps", 1)
    losses = [lines(project / "runs/x", "val")[0]["loss"] for project in (plain, weighted)]
    assert losses[0] != losses[1]
    assert rehearsed(weighted) == []


@recipe
def mixup(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Mixup"))
    options = [2, *SHARED, "--epochs", 3, "--lr", 0.1]
    part = [*options, "--output-dir", "runs/y"]
    _, _, output = train_in(project, options, [*part, "--max-steps", 5], part)
    assert "resuming from" in output
    ends = [lines(project / name, "val")[-1] for name in ("runs/x", "runs/y")]
    assert ends[0] == ends[1], "the same random numbers after a resume"


@recipe
def a_schedule(tmp_path: Path) -> None:
    """A plateau resumes exactly; one cycle rises and falls; a group of weights rests in the first epoch."""
    only_first_is_better = ("model.py", '-metrics["loss"] < self.best\n+False\n')
    project = project_with(tmp_path, *edits("A schedule of your own"), only_first_is_better)
    apply(project, ("model.py", "-self.waited == 2\n+self.waited == 1\n"))
    assert_resumes(project, "--epochs", 3)
    assert [line["lr"] for line in lines(project / "runs/y", "train")][-3:] == pytest.approx([0.03, 0.003, 0.003])
    apply(project, ("main.py", "-task.Plateau\n+task.OneCycle\n"))
    run(project, 1, "--epochs", 3, "--log-every", 6, "--output-dir", "runs/z")  # and at the end of each epoch of 8
    rates = {line["step"]: line["lr"] / 0.03 for line in lines(project / "runs/z", "train")}
    assert rates[6] == pytest.approx(5.5 / 24 / 0.3) and rates[24] == pytest.approx(0.5 / 24 / 0.7)
    apply(project, ("main.py", "-task.OneCycle\n+task.RestFirst\n"))
    for lr in (0.03, 0.3):
        run(project, 1, "--epochs", 2, "--lr", lr, "--output-dir", f"runs/{lr}")
    (first, second), (also, other) = (lines(project / f"runs/{lr}", "val") for lr in (0.03, 0.3))
    assert first["loss"] == also["loss"] and second["loss"] != other["loss"]


@recipe
def the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Of seven samples six have no label. A global batch may be divided in any way, also into parts without a label."""
    place = "         parts[part] = ImagesInMemory(images, targets, classes, transforms, read_size=32)\n"
    unlabelled = "+        targets = targets.where(torch.rand(length, generator=generator) < 0.15, -100)\n"
    project = project_with(tmp_path, *edits("The mean over all tokens"), ("data.py", unlabelled + place))
    ways = {"x": (1, 16, 1), "y": (2, 2, 4), "z": (2, 8, 1)}
    given = [[n, *SHARED, "--batch-size", b, "--grad-accum-steps", k] for n, b, k in ways.values()]
    train_in(project, *([*each, "--output-dir", f"runs/{name}"] for name, each in zip(ways, given, strict=True)))
    for name in ("y", "z"):
        assert distance(project, "x", name) < 1e-5
        for one, other in zip(lines(project / "runs/x"), lines(project / f"runs/{name}"), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5) and one["accuracy"] == other["accuracy"]


@recipe
def compressed_gradients(tmp_path: Path) -> None:
    """bf16 rounds the gradients. PowerSGD sends the first ones whole; it works with a model of several buckets."""
    bf16, powersgd = edits("Compressed gradients")
    early = ("main.py", "-iter=100)\n+iter=2)\n")
    plain, rounded, projected = (
        project_with(tmp_path / name, *changes) for name, *changes in (["a"], ["b", bf16], ["c", powersgd, early])
    )
    for project in (plain, rounded, projected):
        run(project, 2, "--lr", 0.1, "--max-steps", 2, "--output-dir", "runs/2")
        run(project, 2, "--lr", 0.1, "--max-steps", 3, "--output-dir", "runs/3")
    step = distance(plain, "2", "3")
    for name in "23":
        shutil.copytree(rounded / "runs" / name, plain / "runs" / f"rounded{name}")
        shutil.copytree(projected / "runs" / name, plain / "runs" / f"projected{name}")
    assert 0 < distance(plain, "2", "rounded2") < 0.1 * step
    assert distance(plain, "2", "projected2") == 0 < distance(plain, "3", "projected3") < step
    run(projected, 2, "--model", "mobilenet_v3_small", "--batch-size", 4, "--max-steps", 40, "--output-dir", "runs/m")


@recipe
def sam(tmp_path: Path) -> None:
    """A step of two processes is that of the formula; and a run resumes, with BatchNorm and dropout."""
    project = project_with(tmp_path, *edits("SAM"))
    exact = ["--momentum", 0, "--weight-decay", 0, "--lr", 0.5, "--lr-schedule", "constant", "--max-steps", 1]
    run(project, 2, *exact, "--output-dir", "runs/one-step", "--grad-accum-steps", 2)
    (path,) = (project / "runs/one-step/checkpoints").glob("*.pt")
    output = python(project, "-c", SAM_BY_HAND, TESTS, path)
    assert float(output) < 1e-6
    apply(project, ("model.py", NORMALISED), ("model.py", DRAWS))
    assert_resumes(project)
    saved = storage.read(newest(project / "runs/x"))["model"]
    assert saved["fc2.1.num_batches_tracked"] == 16, "the second pass does not count"
    assert saved["draws"][0] == saved["draws"][1] > 0, "both passes draw the same numbers"


DRAWS = """
         self.fc3 = nn.Linear(84, classes)
+        self.register_buffer("draws", torch.zeros(2))
@@
         x = x.flatten(1)
+        if self.training:
+            self.draws.copy_(torch.stack([torch.rand(()), self.draws[0]]))
""".lstrip()


SAM_BY_HAND = """
import sys
sys.path[:0] = [".", sys.argv[1]]
import torch
import main, model
from config import Config
from data import load_datasets
from processes import on_ranks

def step(ctx):
    config = Config.parse(["--dataset=synthetic", "--batch-size=128"])
    train_set = load_datasets(config).train
    torch.manual_seed(0)
    net = model.build_model(config, train_set)
    ((inputs, targets),) = next(main.TrainLoader(train_set, config, ctx).steps(0))
    weights = list(net.parameters())
    before = [weight.detach().clone() for weight in weights]
    for rho in (0.05, 0):
        gradients = torch.autograd.grad(model.compute_loss(net(inputs), targets, config), weights)
        norm = sum(each.square().sum() for each in gradients).sqrt()
        with torch.no_grad():
            for weight, value, gradient in zip(weights, before, gradients):
                weight.copy_(value + rho * gradient / norm if rho else value - 0.5 * gradient)
    return net.state_dict()

(expected,) = on_ranks(1, step, "--device=cpu")
found = torch.load(sys.argv[2], weights_only=True)["model"]
print(max((found[name] - weight).abs().max().item() for name, weight in expected.items()))
"""


@recipe
def muon_with_adamw(tmp_path: Path) -> None:
    """Both parts are saved, and both follow the schedule after a resume."""
    project = project_with(tmp_path, *edits("Muon with AdamW"))
    assert_resumes(project)
    muon, adamw = storage.read(newest(project / "runs/y"))["optimizer"].values()
    assert len(muon["state"]) == 2 and len(adamw["state"]) == 8
    rates = [part["param_groups"][0]["lr"] for part in (muon, adamw)]
    assert rates[0] == pytest.approx(10 * rates[1]) and rates[0] < 0.001


@recipe
def lora(tmp_path: Path) -> None:
    """The first outputs are those of the base. A checkpoint holds the adapters alone, which is enough to go on.

    With --shard as well, although most weights are frozen.
    """
    project = project_with(tmp_path)
    run(project, 1, "--output-dir", "runs/base")
    shutil.copy(project / "runs/base/best.pt", project / "base.pt")
    apply(project, *edits("LoRA"))
    run(project, 2, "--lr", 1e-9, "--max-steps", 1, "--output-dir", "runs/first")
    before, after = (lines(project / f"runs/{name}", "test")[0]["loss"] for name in ("base", "first"))
    assert after == pytest.approx(before, rel=1e-5)  # one process and two add in different orders
    assert_resumes(project, "--ema", 0.9)
    saved = storage.read(newest(project / "runs/y"))
    names = {f"fc{number}.{part}.weight" for number in (1, 2, 3) for part in ("up", "down")}
    assert set(saved["model"]) == set(saved["ema"]) == names
    run(project, 2, "--batch-size", 16, "--epochs", 2, "--shard", "--output-dir", "runs/s")
    assert weights_and_momentum(project / "runs/s") == weights_and_momentum(project / "runs/y")
    output = run(project, 1, "--max-steps", 1, "--init-from", "runs/y/best.pt", "--output-dir", "runs/z")
    assert "weights from runs/y/best.pt: 6 of 6" in output
    hook = (
        "-    model.register_state_dict_post_hook(leave_out)\n",
        "-    model.register_load_state_dict_pre_hook(fill_in)\n",
    )
    apply(project, *(("model.py", each) for each in hook))
    output = run(project, 1, "--max-steps", 1, "--init-from", "runs/y/best.pt", "--output-dir", "runs/w")
    assert "weights from runs/y/best.pt: 6 of 16" in output
    load = '-    model.load_state_dict(torch.load("base.pt", weights_only=True)["model"])  # best.pt of another run\n'
    apply(project, ("model.py", load))
    given = [1, *SHARED, "--max-steps", 1, "--init-from", "runs/y/best.pt", "--output-dir", "runs/v"]
    (output,) = train_in(project, given, code=4)
    assert "frozen, and not in the file, so random" in output


@recipe
def blocks(tmp_path: Path) -> None:
    """They are gathered one at a time, and trained as with DDP."""
    plain, divided = project_with(tmp_path / "a"), project_with(tmp_path / "b", *edits("Blocks"))
    run(plain, 2, "--batch-size", 8)
    run(divided, 2, "--batch-size", 8, "--shard", "--checkpoint-activations", "--profile")
    assert weights_and_momentum(plain / "runs/x") == weights_and_momentum(divided / "runs/x")
    (trace,) = (divided / "runs/x").rglob("*trace*")
    assert set(re.findall(r"FSDP::pre_forward \((\w+)\)", trace.read_text())) == {"fc1", "fc2"}


EXTRA_STATE = """
         self.fc3 = nn.Linear(84, classes)
+        self.seen = {"steps": 0}
@@
+    def get_extra_state(self) -> Any:
+        return self.seen
+
+    def set_extra_state(self, state: Any) -> None:
+        self.seen = state
+
     def forward(self, images: Tensor) -> Tensor:
@@
-        return self.fc3(x) - self.queue.mean(0)
+        return (self.fc3(x) - self.queue.mean(0)) * (1 + 0.01 * self.seen["steps"])
@@
+        self.seen["steps"] += 1
         for outputs in passes:
""".lstrip()


@recipe
def a_queue(tmp_path: Path) -> None:
    """And a dictionary as extra state."""
    project = project_with(tmp_path, *edits("A queue"), ("model.py", EXTRA_STATE))
    assert rehearsed(project, "--ema", 0.9) == []
    saved = storage.read(newest(project / "rehearsal/killed"))
    for part in ("model", "ema"):
        assert saved[part]["_extra_state"] == {"steps": 16} and saved[part]["queue"].count_nonzero() == 2560


@recipe
def a_center(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Equal on all ranks, by a sum or a gather"))
    assert rehearsed(project) == []
    assert storage.read(newest(project / "rehearsal/killed"))["model"]["center"].count_nonzero() == 10


@recipe
def a_count_of_each_rank(tmp_path: Path) -> None:
    """All that was seen counts once, if a run goes on with another number of processes as well."""
    project = project_with(tmp_path, *edits("A part of each rank, added up for a checkpoint"))
    assert rehearsed(project) == []
    run(project, 2, "--batch-size", 16, "--max-steps", 3)
    run(project, 1)
    assert storage.read(newest(project / "runs/x"))["seen"]["total"].sum() == 256


@recipe
def a_stream(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("One stream per sample"))
    assert rehearsed(project) == []


AVERAGING = """
+class Averaging(torch.optim.SGD):
+    evaluating = False
+
+    def before_save(self) -> None:
+        self.eval()
+
+    @torch.no_grad()
+    def eval(self, sign: float = 1.0) -> None:
+        if self.evaluating != (sign > 0):
+            for weight in self.param_groups[0]["params"]:
+                weight.mul_(3.0**sign)
+            self.evaluating = sign > 0
+
+    def train(self) -> None:
+        self.eval(-1.0)
+
+    def state_dict(self) -> dict[str, Any]:
+        return {**super().state_dict(), "evaluating": self.evaluating}
+
+    def load_state_dict(self, state: dict[str, Any]) -> None:
+        self.evaluating = state.pop("evaluating")
+        super().load_state_dict(state)
+
+
 def build_optimizer(
@@
-torch.optim.SGD(model.parameters()
+Averaging(model.parameters()
""".lstrip()


@recipe
def an_optimizer_with_modes(tmp_path: Path) -> None:
    """Its weights are three times as large in an evaluation; there and back rounds."""
    (edit,) = edits("An optimizer with a mode for training and one for evaluations")
    project = project_with(tmp_path, edit, ("model.py", AVERAGING))
    assert rehearsed(project) == []
    shutil.rmtree(project / "rehearsal")
    (found, *_) = rehearsed(apply(project, ("model.py", "-        self.eval()\n+        pass\n")))
    assert "in the training" in found, "a checkpoint in the middle of an epoch"


@recipe
def unused_weights(tmp_path: Path) -> None:
    """One of two layers in each step."""
    assert "`FIND_UNUSED_PARAMETERS = True`" in SECTIONS["Weights that some steps do not use"]
    experts = """
+FIND_UNUSED_PARAMETERS = True
+
+
 class ToyModel(nn.Module):
@@
-        return self.fc3(x)
+        return self.fc3(x) if len(x) != 16 or self.fc3.bias[0] > 0 else self.fc4(x)
@@
         self.fc3 = nn.Linear(84, classes)
+        self.fc4 = nn.Linear(84, classes)
""".lstrip()
    project = project_with(tmp_path, ("model.py", experts))
    run(project, 2, "--batch-size", 16)
    plain = apply(project, ("model.py", "-FIND_UNUSED_PARAMETERS = True\n+\n"))
    assert (
        "write FIND_UNUSED_PARAMETERS = True in model.py"
        in train_in(plain, [2, *SHARED, "--batch-size", 16, "--output-dir", "runs/z"], code=2)[0]
    )


@recipe
def a_mean_teacher(tmp_path: Path) -> None:
    """With BatchNorm, whose statistics differ between the ranks until they are copied."""
    project = project_with(tmp_path, *edits("A mean teacher"), ("model.py", NORMALISED))
    assert rehearsed(project) == []
    saved = storage.read(newest(project / "rehearsal/killed"))["model"]
    assert saved["teacher.n_averaged"] == 16
    assert not torch.equal(saved["teacher.module.fc1.weight"], saved["student.fc1.weight"])
    counts = [saved[f"{part}.fc2.1.num_batches_tracked"] for part in ("student", "teacher.module")]
    assert counts == [16, 16], "the teacher's BatchNorm counts no batch of its own: it is in evaluation mode"


ORDER = """
import json, sys
sys.path[:0] = ["."]
from config import Config
from data import load_datasets
found = load_datasets(Config.parse(["--dataset=synthetic"]))
orders = [found.sampler.indices(epoch, 0, found.sampler.length(epoch)) for epoch in (0, 1)]
values = found.train.targets, found.train.images.float().mean((1, 2, 3))
print(json.dumps([[order.tolist() for order in orders], *(each.tolist() for each in values)]))
"""


@recipe
def weighted_sampling(tmp_path: Path) -> None:
    """Half of the samples are of class 0, but a tenth of those that are drawn."""
    rare = "-(0, 10, (length,), generator=generator)\n"
    rare += "+(0, 10, (length,), generator=generator) * torch.randint(0, 2, (length,), generator=generator)\n"
    project = project_with(tmp_path, *edits("Weighted sampling"), ("data.py", rare))
    orders, targets, _ = json.loads(python(project, "-c", ORDER))
    assert targets.count(0) > 128 and orders[0] != orders[1]
    for order in orders:
        drawn = [targets[sample] for sample in order]
        assert all(10 < drawn.count(number) < 45 for number in range(10))
    assert_resumes(project)


@recipe
def batches_of_similar_length(tmp_path: Path) -> None:
    project = project_with(tmp_path, *edits("Batches of similar length"))
    orders, _, lengths = json.loads(python(project, "-c", ORDER))
    assert orders[0] != orders[1] and all(sorted(order) == list(range(256)) for order in orders)
    for order in torch.tensor(orders):
        groups = torch.tensor(lengths)[order].view(4, 64)
        assert groups.std(1).mean() < 0.5 * groups.std(), "a group has samples of similar length"
    assert_resumes(project)


@recipe
def a_contrastive_loss_with_negatives_of_all_ranks(tmp_path: Path) -> None:
    """Two processes train as one with the whole batch does. Of the three batches of an evaluation, they get 2 and 1."""
    project = project_with(tmp_path, *edits("A contrastive loss with negatives of all ranks"))
    given = [*SHARED, "--eval-batch-size", 24, "--lr", 0.05]
    train_in(project, [1, *given], [2, *given, "--batch-size", 16, "--output-dir", "runs/y"])
    assert distance(project, "x", "y") < 1e-5
    for one, other in zip(*(lines(project / f"runs/{name}") for name in "xy"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


BRIGHTER = """
+class Brighter(ImagesInMemory):
+    share = 1.0
+
+    def set_epoch(self, epoch: int) -> None:
+        self.share = (1 + epoch) / 4
+
+    def prepare(self, batch: Any) -> Any:
+        inputs, targets = super().prepare(batch)
+        return self.share * inputs, targets
+
+
 def synthetic(config: Config) -> Datasets:
@@
-        parts[part] = ImagesInMemory(images, targets, classes, transforms, read_size=32)
+        parts[part] = Brighter(images, targets, classes, transforms)
""".lstrip()


@recipe
def a_curriculum_by_epoch(tmp_path: Path) -> None:
    """By a sampler, and by set_epoch of a dataset."""
    project = project_with(tmp_path, *edits("A curriculum by epoch"), ("data.py", BRIGHTER))
    assert_resumes(project, "--epochs", 4, "--log-every", 1)
    epochs = [line["epoch"] for line in lines(project / "runs/x", "train")]
    assert epochs == [1] * 2 + [2] * 4 + [3] * 6 + [4] * 8


@recipe
def without_an_edit(tmp_path: Path) -> None:
    title = "An average of the weights"
    assert edits(title) == [] and "`--ema" in SECTIONS[title]
    project = project_with(tmp_path)
    run(project, 1, "--ema", 0.999, "--epochs", 2)
    assert "ema" in storage.read(newest(project / "runs/x"))


@recipe
def a_notebook(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS["A notebook"], re.DOTALL)
    project = project_with(tmp_path)
    python(project, "-c", block)
    assert json.loads((project / "runs/notebook/status.json").read_text())["step"] == 5


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works(name: str, tmp_path: Path) -> None:
    RECIPES[name](tmp_path)


def test_every_recipe_is_tried_and_none_is_long() -> None:
    source = Path(__file__).read_text()
    elsewhere = {  # the file with the test, and what that test is called or takes from the page
        "Fine-tune": ("test_documentation.py", "_by_the_lines_of_the_recipe"),
        "State of your own": ("test_documentation.py", "(average: .*)"),
        "Stop early": ("test_documentation.py", "(while not run.finished"),
        "Interrupt a run from your code": ("test_faults.py", "request_stop"),
        "An option": ("test_documentation.py", "(smoothing: .*)"),
        "Options in a file": ("test_config_file.py", "--config"),
        "Evaluate a checkpoint": ("test_saved_options.py", "--evaluate"),
        "Classify images": ("test_predict.py", "predict.py"),
        "The metrics of a run": ("test_documentation.py", "test_the_page_names_the_fields_of_metrics_jsonl"),
    }
    for title, (file, words) in elsewhere.items():
        assert title in SECTIONS and words in Path(__file__).with_name(file).read_text(), title
    assert {title for title in SECTIONS if f'"{title}"' not in source} <= set(elsewhere)
    # These have no shorter form: two passes, two optimizers, hooks of a checkpoint, an order, and three schedules.
    long = ("SAM", "Muon with AdamW", "LoRA", "Batches of similar length", "A schedule of your own")
    for title, text in SECTIONS.items():
        for block in re.findall(r"^```\S+.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert len(re.findall(r"^[+-]", block, re.MULTILINE)) <= (40 if title in long else 15), title
