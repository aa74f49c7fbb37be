"""The examples in a rendered project: two processes train them, are killed and resume; evaluations are exact.

The project's own tests cover most of this, because they hold for any task. These add what is special to each.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest, weights_and_momentum
from PIL import Image
from project_runs import benchmark_of, python, render_defaults, train_in
from template_copy import shrink

from ddp.checkpoint import storage
from ddp.core.errors import UsageError
from ddp.core.files import PROJECT_DIR
from ddp.distributed.tensors import whole_tree
from ddp.training.schedule import Schedule
from images import ImageTransforms

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ["cifar10_speed", "gan", "language_model", "linear_regression", "tar_shards", "voc_segmentation"]
OWN_MODEL = [name for name in NAMES if name not in ("tar_shards", "voc_segmentation")]


def readme(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def options_of(text: str) -> list[str]:
    """The options after --nproc 2 in the first command of a README."""
    found = re.search(r"^    python main\.py --nproc 2\b([^\n#]*)", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


def render(name: str, folder: Path) -> Path:
    """A rendered project with the example `name` in it."""
    project = render_defaults(folder / "project")
    command = [sys.executable, EXAMPLES / "apply.py", name, project]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and (project / "EXAMPLE.md").exists(), done.stderr
    of_images = name not in ("linear_regression", "language_model")
    assert {(project / f"{name}.py").exists() for name in ("images", "image_files", "file_list", "predict")} == {
        of_images
    }
    return project


def train(project: Path, *options: Any, code: int = 0, **variables: str) -> str:
    """What main.py prints there."""
    output = python(project, "main.py", "--device", "cpu", *options, code=code, **variables)
    assert not re.search("ToyModel|cifar10[-:]", output) or (project / "tests/test_toy_model.py").exists()
    return output


def resumes_bit_for_bit(project: Path, folder: Path, *options: Any) -> None:
    """Seven steps, and four of them and then the rest, end with the same checkpoint. tests/ports kills the runs."""
    short = [2, *options, "--device", "cpu", "--checkpoint-every", 2, "--epochs", 9, "--max-steps"]
    parts = folder / "parts"
    train_in(project, [*short, 7, "--output-dir", folder / "7"], *[[*short, n, "--output-dir", parts] for n in (4, 7)])
    assert newest(parts).name == "step_00000007.pt"
    assert weights_and_momentum(parts) == weights_and_momentum(folder / "7")


def an_evaluation_by_one_process_is_the_same(project: Path, output_dir: Path, *options: Any) -> None:
    """Up to rounding: two processes add in another order."""
    two = (lines(output_dir, "val") or lines(output_dir, "test"))[-1]
    output = train(project, "--output-dir", output_dir, "--evaluate", *options)
    for name in two.keys() - {"step", "split", "epoch", "count"}:
        (one,) = re.findall(rf"  {two['split']} .* {re.escape(name)} (\S+)", output)
        assert float(one) == pytest.approx(two[name], abs=1e-3), (name, output)


# ---- the tasks ------------------------------------------------------------------------------------------------------

TRAININGS: dict[str, Callable[[Path], None]] = {}


def training(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Each of these trains a project in a folder, and looks at what it wrote."""
    TRAININGS[function.__name__] = function
    return function


@training
def linear_regression_finds_the_line(tmp_path: Path) -> None:
    """With the command of its README, then the Python code of its README."""
    project, text = render("linear_regression", tmp_path), readme("linear_regression")
    resumes_bit_for_bit(project, tmp_path, *options_of(text))
    train_in(project, [2, *options_of(text)])
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    weight, bias = map(float, python(project, "-c", block).split())
    assert abs(weight - 2) < 0.05 and abs(bias - 3) < 0.05
    output = benchmark_of(project)
    assert output.startswith("Line, fp32, batch 64\n"), "no image, and no ToyModel"


@training
def the_language_model_learns_a_text(tmp_path: Path) -> None:
    project = render("language_model", tmp_path)
    small = ("--width", 64, "--layers", 1)
    resumes_bit_for_bit(project, tmp_path, *options_of(readme("language_model")), *small, "--batch-size", 4)
    options = (*small, "--lr", "3e-3", "--batch-size", 8, "--max-steps", 60, "--warmup-epochs", 0.05)
    train_in(project, [2, *options_of(readme("language_model")), *options])
    last = lines(project / "runs/text-Transformer", "val")[-1]
    assert last["bits"] < 5.5, "an untrained model has 8"
    assert last["perplexity"] == pytest.approx(2 ** last["bits"])
    an_evaluation_by_one_process_is_the_same(project, project / "runs/text-Transformer", *options)
    for text in ("short", "\n" * 9_999):
        (project / "data/text.txt").write_text(text)
        output = train(project, "--output-dir", "new", code=3)
        assert "text.txt is too short: it needs 20 lines" in output and output.count("\n") == 1


@training
def the_language_model_reads_tokens(tmp_path: Path) -> None:
    """101,000 sequences, whose order is computed: exact on two processes, and each once on three after two."""
    project, folder = render("language_model", tmp_path), tmp_path / "tokens"
    folder.mkdir()
    tokens = numpy.random.default_rng(0).integers(0, 500, 128 * 101_000 + 1).astype(numpy.uint16)
    tokens.tofile(folder / "train.bin")
    tokens[: 128 * 40 + 50].tofile(folder / "val.bin")
    options = ["--dataset", "tokens", "--data-dir", folder, "--vocabulary", 500, "--width", 32, "--layers", 1]
    resumes_bit_for_bit(project, tmp_path, *options, "--batch-size", 6)
    more = ["--device", "cpu", "--output-dir", tmp_path / "parts", "--epochs", 9, "--checkpoint-every", 2]
    (output,) = train_in(project, [3, *options, *more, "--batch-size", 4, "--max-steps", 9])
    assert "2 processes wrote this checkpoint" in output and "the global batch is still 12" in output
    options[5] = 499
    assert "train.bin has a token 499: raise --vocabulary, now 499" in train(project, *options, code=3)
    (folder / "val.bin").write_bytes(b"odd")
    assert "val.bin: Size of available data is not a multiple" in train(project, *options, code=3)
    (folder / "val.bin").unlink()
    assert "No such file or directory" in train(project, *options, code=3)


def test_a_billion_tokens_are_read_as_fast_as_a_thousand(tmp_path: Path) -> None:
    data = module("language_model", "data")
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(2 * 10**9)  # zeros that take no space
        for sequence in (0, 3_906_250, 7_812_498):
            file.seek(2 * 128 * sequence)
            file.write(numpy.arange(sequence % 1000, sequence % 1000 + 129).astype(numpy.uint16).tobytes())
    tokens = data.Tokens(path, None, None)
    assert len(tokens) == (10**9 - 1) // 128 == 7_812_499
    inputs, targets = tokens.__getitems__([7_812_498, 5, 0, 3_906_250])
    assert inputs[:, 0].tolist() == [498, 0, 0, 250] and targets[:, -1].tolist() == [626, 0, 128, 378]
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.shape == (4, 128)
    four_bytes = data.Tokens(path, 100_000, "uint32")
    assert len(four_bytes) == (5 * 10**8 - 1) // 128 and four_bytes.tokens.dtype == numpy.uint32
    numpy.arange(1000, dtype=numpy.uint32).tofile(tmp_path / "four.bin")
    with pytest.raises(ValueError, match=r"every second number is 0: pass --token-type, uint32 or uint16"):
        data.Tokens(tmp_path / "four.bin", None, None)
    assert data.Tokens(tmp_path / "four.bin", None, "uint32").__getitems__([1])[0][0, 0] == 128
    with pytest.raises(UsageError, match="--vocabulary and --token-type are for --dataset tokens"):
        module("language_model", "config").Config.parse(["--vocabulary", "9"])


@training
def images_in_tar_files_are_read_by_place(tmp_path: Path) -> None:
    project = render("tar_shards", tmp_path)
    options = options_of(readme("tar_shards"))
    resumes_bit_for_bit(project, tmp_path, *options, "--batch-size", 16)
    more = ("--batch-size", 16, "--epochs", 2, "--output-dir", "learned")
    (output,) = train_in(project, [2, *options, *more, "--device", "cpu"])
    assert lines(project / "learned", "val")[-1]["accuracy"] > 0.5, output
    an_evaluation_by_one_process_is_the_same(project, project / "learned", *options, "--batch-size", 16)

    made, folder = project / "data/synthetic-tar", project / "mine"
    shutil.copytree(made, folder)
    train(project, "--data-dir", folder, "--max-steps", 1, "--output-dir", tmp_path / "one")
    index = folder / "train.index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    train(project, "--data-dir", folder, "--max-steps", 1, "--output-dir", tmp_path / "two")
    assert before == (index.read_bytes(), index.stat().st_mtime_ns), "the index is made once"
    shutil.copy(folder / "train/000000.tar", folder / "train/more.tar")
    index.write_text("damaged")
    output = train(project, "--data-dir", folder, "--max-steps", 1, "--output-dir", tmp_path / "three")
    assert "1,260 training, 100 validation, 50 test samples" in output, "a file that came later"

    def refused(name: str, data: bytes) -> str:
        (folder / "train/more.tar").write_bytes(data)
        return train(project, "--data-dir", folder, "--output-dir", tmp_path / f"refused {name}", code=3)

    original = (made / "train/000000.tar").read_bytes()
    assert "more.tar is no tar file that can be read by place, or is compressed" in refused(
        "4", gzip.compress(original)
    )
    assert "000000 needs an image (jpg, jpeg, png, webp) and a class (cls)" in refused(
        "5", original.replace(b"png", b"gnp")
    )
    at = original.index(b"000007.cls") + 512
    wrong = original[:at] + b"x" + original[at + 1 :]
    assert "000007.cls holds b'x', and not the number of a class" in refused("6", wrong)
    damaged = original.replace(b"IHDR", b"XXXX")
    assert re.search(r"more\.tar: byte \d+ begins no image that can be read", refused("7", damaged))


@training
def the_language_model_trains_alike_however_a_batch_is_divided(tmp_path: Path) -> None:
    """Its sentences have different lengths, so without loss_terms the training depends on the division."""
    project = render("language_model", tmp_path)
    shutil.copytree(PROJECT_DIR / "ddp/parts/fsdp", project / "ddp/parts/fsdp")
    (project / "parts.py").write_text('PARTS = ["fsdp"]\n')
    source = (project / "model.py").read_text()
    source, count = re.subn(r"^(HEAD_WIDTH, .*), 0\.1$", r"\1, 0.0", source, flags=re.MULTILINE)
    assert count == 1, "dropout draws other numbers for each rank and pass"
    divisions = [(1, 8, 1), (2, 4, 1), (2, 2, 2, "--shard")]

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in weights.values()])

    def distances(name: str, source: str) -> tuple[float, float]:
        """How far the weights of all runs are from those of the first, and how far the losses that they log.

        Of all weights together: Adam makes a full step of a gradient that is rounding alone.
        """
        (project / "model.py").write_text(source)
        folders = [tmp_path / name / str(number) for number in range(len(divisions))]
        common = ("--dataset", "synthetic", "--device", "cpu", "--lr", 1e-3, "--warmup-epochs", 0, "--max-steps", 20)
        common += ("--width", 32)
        for (processes, batch_size, passes, *more), folder in zip(divisions, folders, strict=True):
            divided = ("--batch-size", batch_size, "--grad-accum-steps", passes, *more, "--output-dir", folder)
            train_in(project, [processes, *common, "--log-every", 1, *divided])
        weights = [whole_tree(storage.read(newest(folder)))["model"] for folder in folders]
        losses = [torch.tensor([line["loss"] for line in lines(folder) if "loss" in line]) for folder in folders]
        assert len(losses[0]) > 20 and len(weights[0]) > 40
        assert losses[0][19] < losses[0][0] - 0.1, "they train"
        return (
            max((flat(each) - flat(weights[0])).norm().item() for each in weights[1:]),
            max((each - losses[0]).abs().max().item() for each in losses[1:]),
        )

    weights, losses = distances("with", source)
    assert losses < 1e-4, losses
    assert source.count("loss_terms") == 2
    others, losses = distances("without", source.replace("loss_terms", "unused"))
    print(weights, others)
    assert weights < others / 50 and losses > 1e-3, (weights, others, losses)


def test_each_line_of_a_text_is_a_sample_and_each_character_a_target_once() -> None:
    """But for the first one of a line, which nothing precedes. A line of more than `context` is cut."""
    data = module("language_model", "data")
    for end in ("\n", "", "\n\n"):  # the last line may have no newline: then its last character ends it
        lines = [b"", b"ab", b"", b"", b"x" * 127, b"y" * 128, b"z" * 300, b"c", b"def"]
        text = numpy.frombuffer(b"\n".join(lines) + end.encode(), dtype=numpy.uint8)
        pieces = data._pieces(text)
        assert pieces[:, 1].tolist() == [2, 127, 128, 128, 128, 44, 1, 3 if end else 2]
        samples = data.Text(text, pieces, max_samples=None)
        inputs, targets = samples.__getitems__([*range(len(samples))])
        assert inputs.shape == targets.shape == (8, data.CONTEXT) and inputs.dtype == targets.dtype == torch.long
        assert targets[0].tolist() == [*b"b\n", *[-100] * 126] and inputs[0].tolist() == [*b"ab", *[0] * 126]
        found = bytes(targets[targets != -100].tolist())
        assert found == b"".join((line + b"\n")[1:] for line in lines if line)[: None if end else -1]
        assert samples.__getitems__([7, 0])[0].shape == (2, pieces[[7, 0], 1].max())


def voc(root: Path, train_images: int = 12, val_images: int = 5) -> None:
    """Write a small data set in VOC's layout: images of many sizes. Red is a cat, with a border of 255 above it."""
    folder = root / "VOCdevkit/VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for part, count in (("train", train_images), ("val", val_images)):
        names = [f"{part}{number}" for number in range(count)]
        (folder / "ImageSets/Segmentation" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            h, w = generator.integers(60, 110, 2)
            classes = numpy.zeros((h, w), dtype=numpy.uint8)
            classes[h // 4 : h // 2 + 10, w // 4 : w // 2 + 10] = 8
            image = numpy.where((classes == 8)[..., None], (220, 30, 30), (40, 90, 160)).astype(numpy.uint8)
            classes[h // 4 - 2 : h // 4, :] = 255
            Image.fromarray(image).save(folder / "JPEGImages" / f"{name}.jpg")
            mask = Image.fromarray(classes, mode="P")
            mask.putpalette([number for number in range(256) for _ in range(3)])
            mask.save(folder / "SegmentationClass" / f"{name}.png")


@training
def voc_segmentation_trains_and_resumes(tmp_path: Path) -> None:
    project = render("voc_segmentation", tmp_path)
    voc(tmp_path / "voc")
    options = ["--data-dir", tmp_path / "voc", "--model", "lraspp_mobilenet_v3_large", "--image-size", 64]
    options += ["--batch-size", 2, "--workers", 1]
    resumes_bit_for_bit(project, tmp_path, *options)
    options += ["--epochs", 1]
    output_dir = tmp_path / "whole"
    train_in(project, [2, *options, "--output-dir", output_dir])
    last = lines(output_dir, "val")[-1]
    assert last["count"] == 5 and 0 <= last["mean_iou"] <= 1
    an_evaluation_by_one_process_is_the_same(project, output_dir, *options)
    (tmp_path / "voc/VOCdevkit/VOC2012/JPEGImages/val4.jpg").unlink()
    offline = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # nothing listens there
    output = train(project, "--data-dir", tmp_path / "voc", "--output-dir", "new", code=3, **offline)
    assert "cannot download http" in output and output.endswith("by hand, or try --dataset synthetic\n")
    output = train(project, "--dataset", "synthetic", "--model", "resnet18", "--output-dir", "new", code=2)
    assert "not one of torchvision's segmentation models" in output and output.count("\n") == 1


@pytest.mark.sample(0)
def test_voc_segmentation_learns_to_classify_pixels(tmp_path: Path) -> None:
    """With the command of its README, and fewer epochs."""
    project = shrink(render("voc_segmentation", tmp_path), train=400, val=30)
    train_in(project, [2, *options_of(readme("voc_segmentation")), "--epochs", 4])
    assert lines(project / "runs/try", "val")[-1]["mean_iou"] > 0.15, "0.054 is background everywhere"


@training
def the_gan_trains_both_networks(tmp_path: Path) -> None:
    """With the command of its README, then the Python code of its README."""
    project, text = render("gan", tmp_path), readme("gan")  # tests/ports runs its own tests
    shrink(project, train=4_000, val=300, test=30)
    train_in(project, [2, *options_of(text), "--epochs", 1])
    (last,) = lines(project / "runs/synthetic-DCGAN", "val")
    assert last["distance"] < 5.5, "untrained it is 6.3"
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    python(project, "-c", block)
    assert Image.open(project / "generated.png").size == (274, 274), "8 x 8 images"
    output = benchmark_of(project, "--dataset", "synthetic", "--batch-size", 8)
    assert output.startswith("DCGAN, 32 x 32, fp32, batch 8\n"), output


@training
def cifar10_speed_learns_and_resumes_bit_for_bit_in_bf16(tmp_path: Path) -> None:
    """With the command of its README, and fewer images."""
    project = render("cifar10_speed", tmp_path)
    options = options_of(readme("cifar10_speed"))
    shrink(project, train=4_096, test=50)
    few = ("--precision", "bf16", "--batch-size", 16)  # a CPU without bf16 needs many times as long as with fp32
    resumes_bit_for_bit(project, tmp_path, *options, *few)
    options += ["--device", "cpu", "--batch-size", "64", "--lr", "1.25"]
    output_dir = project / "whole run"
    train_in(project, [2, *options, "--output-dir", output_dir])
    (last,) = lines(output_dir, "test")
    assert last["accuracy"] > 0.9 and not (output_dir / "best.pt").exists(), last
    an_evaluation_by_one_process_is_the_same(project, output_dir, *options)
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    newest = max(output_dir.glob("checkpoints/step_*.pt"))
    assert "red.png: class " in python(project, "predict.py", newest, tmp_path / "red.png")
    assert "--test-views 3: must be 1, 2 or 6" in train(project, "--test-views", 3, code=2)
    output = benchmark_of(project, "--dataset", "synthetic", "--batch-size", 16)
    assert output.startswith("Airbench, 32 x 32, fp32, batch 16\n"), output


@training
def a_loss_of_the_gan_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """Of the discriminator, for real or generated images; and of the generator."""
    project = render("gan", tmp_path)
    shrink(project, train=64, val=8, test=8)
    with (project / "model.py").open("a") as file:
        file.write(
            "\n\ndef compute_loss(outputs, targets, config, whole=compute_loss):\n"
            "    from math import nan\n"
            "    return whole(outputs, targets, config) * (nan if config.output_dir in outputs else 1)\n"
        )
    options = [2, "--dataset", "synthetic", "--batch-size", 4, "--log-every", 1, "--output-dir"]
    outputs = train_in(project, *([*options, name] for name in ("real", "fake", "fooled")), code=6)
    assert all("the loss is no longer finite" in output for output in outputs)


def compare_gradients() -> None:
    """In a project with the GAN: the first steps of main.py, against those of a loop without DDP."""
    import sys
    import tempfile
    from pathlib import Path

    import torch

    sys.path.append("tests")
    from torch import nn

    import data
    import main
    import model
    from config import Config
    from ddp.checkpoint import storage
    from ddp.data.loader import TrainLoader
    from processes import on_ranks, train

    steps, options = 3, ["--dataset", "synthetic"]
    build = model.build_model

    def build_without_batch_norm(config, train_set):
        """BatchNorm depends on how the batch is divided among processes."""
        built = build(config, train_set)
        for number, part in enumerate(built.generator):
            if isinstance(part, nn.BatchNorm2d):
                built.generator[number] = nn.GroupNorm(8, part.num_features)
        return built

    def plain_loop(ctx):
        """As in pytorch/examples/dcgan."""
        config = Config.parse([*options, "--batch-size", "16"])
        train_set = data.load_datasets(config).train
        torch.manual_seed(config.seed)
        both = build_without_batch_norm(config, train_set)
        generator, discriminator, loss = both.generator, both.discriminator, nn.BCEWithLogitsLoss()
        optimizer_g, optimizer_d = (
            torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999))
            for network in (generator, discriminator)
        )
        batches = TrainLoader(train_set, config, ctx).steps(epoch=0)
        for _ in range(steps):
            images, noise = next(next(batches))
            ones, zeros = torch.ones(16), torch.zeros(16)
            discriminator.zero_grad()
            loss(discriminator(images), ones).backward()
            generated = generator(noise)
            loss(discriminator(generated.detach()), zeros).backward()
            optimizer_d.step()
            generator.zero_grad()
            loss(discriminator(generated), ones).backward()
            optimizer_g.step()
        return averages(optimizer_g.state_dict(), optimizer_d.state_dict())

    def averages(*optimizers):
        """Of the gradients of all steps: Adam's."""
        return [state["exp_avg"] for optimizer in optimizers for state in optimizer["state"].values()]

    main.task.build_model = build_without_batch_norm
    torch.randn_like = lambda noise: noise  # that of the data, which depends on the sample alone
    (expected,) = on_ranks(1, plain_loop)
    assert len(expected) == 18, "all weights of both"
    for world_size, batch_size, passes in ((1, 16, 1), (2, 8, 1), (2, 4, 2)):
        with tempfile.TemporaryDirectory() as folder:
            batch = ("--batch-size", batch_size, "--grad-accum-steps", passes)
            train(world_size, *options, *batch, "--max-steps", steps, "--output-dir", folder)
            saved = storage.read(next(Path(folder).glob("checkpoints/*.pt")))
        found = averages(saved["optimizer_g"], saved["optimizer_d"])
        for one, other in zip(found, expected, strict=True):
            error = ((one - other).norm() / other.norm()).item()
            assert error < 1e-5, (world_size, passes, error)


@training
def the_gradients_of_the_gan_are_those_of_one_process_without_ddp(tmp_path: Path) -> None:
    """With 1 and 2 processes and accumulated gradients. A step would have others if DDP averaged too often or too
    rarely, or if the generator's loss left a gradient in the discriminator."""
    project = render("gan", tmp_path)
    shrink(project, train=64, val=8, test=8)
    python(project, "-c", f"{inspect.getsource(compare_gradients)}\n\ncompare_gradients()")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TRAININGS)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    TRAININGS[name](tmp_path)


def test_only_the_step_in_the_main_of_the_gan_differs_from_that_of_the_project(template: Path) -> None:
    def without_the_step(path: Path) -> str:  # outputs of a GAN are no logits of classes
        text = re.sub(r'^""".*?"""$', "", path.read_text(), count=1, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"^    (\w+: .*\n)+", "", text, flags=re.MULTILINE)  # the fields of Training
        text = re.sub(r" {8}(ddp_model = wrap_model|networks = ).*?(?=        run.resume)", "", text, flags=re.DOTALL)
        return re.sub(r"^def compute_gradients.*?(?=^@torch.no_grad)", "", text, flags=re.MULTILINE | re.DOTALL)

    ours, theirs = without_the_step(EXAMPLES / "gan/main.py"), without_the_step(template / "main.py")
    theirs = theirs.replace(", watch_first_outputs", "").replace("from ddp.training.loss_mean import LossMean\n", "")
    assert ours == theirs and "run.advance()" in ours and "apply_gradients(training, config)" in ours


# ---- the files of an example ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_three_files_and_a_readme(name: str) -> None:
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/README.md")) == sorted([*NAMES, "steps"])
    files = {path.name for path in (EXAMPLES / name).iterdir()} - {"__pycache__"}
    files |= {"model.py"} if name == "tar_shards" else set()  # it keeps that of the project
    assert files - {"main.py"} == {"model.py", "data.py", "config.py", "README.md"}
    assert ("main.py" in files) == (name == "gan"), "several networks and optimizers need another step"


FOREIGN_OPTIONS = [
    *((name, "--dataset", "imagefolder") for name in NAMES),
    *((name, "--cache", "cache") for name in NAMES),
    *((name, "--model", "resnet18") for name in OWN_MODEL),
    *((name, "--image-size", "64") for name in OWN_MODEL),
    ("gan", "--momentum", "0.9"),
    ("language_model", "--momentum", "0.9"),
    ("linear_regression", "--beta1", "0.9"),
    ("linear_regression", "--data-dir", "data"),
]


@pytest.mark.parametrize(("name", "option", "value"), FOREIGN_OPTIONS)
def test_options_of_another_task_are_refused(name: str, option: str, value: str) -> None:
    reason = "invalid choice: 'imagefolder'" if option == "--dataset" else f"unrecognized arguments: {option} {value}"
    with pytest.raises(UsageError, match=reason):
        module(name, "config").Config.parse([option, value])


def test_options_of_another_task_are_refused_before_any_process_starts(
    tmp_path: Path, sample: Callable[[Sequence[Any], int], list[Any]]
) -> None:
    name = "linear_regression"
    project = render(name, tmp_path)
    with (project / "model.py").open("a") as file:  # each process imports it
        file.write("\nwith open('processes', 'a') as file:\n    file.write('one ')\n")
    for option, value in sample([pair[1:] for pair in FOREIGN_OPTIONS if pair[0] == name], 1):
        output = train(project, "--nproc", 2, option, value, code=2)
        assert output.startswith("error: ") and output.count("\n") == 1 and option in output, output
        assert (project / "processes").read_text() == "one ", "main.py has started other processes"
        (project / "processes").unlink()
        command = ["bash", project / "launch_node.sh", "--nproc-per-node", "2", "--", option, value]
        done = subprocess.run(list(map(str, command)), cwd=project, capture_output=True, text=True, timeout=180)
        assert done.returncode == 2 and done.stdout == "" and option in done.stderr, done.stdout + done.stderr
        assert done.stderr.count("\n") == 1 and not (project / "processes").exists(), done.stderr
    assert not (project / "runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_readme_has_valid_options(name: str) -> None:
    command_line = re.compile(r"^    (?:python main\.py|\./launch_node\.sh(?: --(?= ))?)(?= |$)([^\n#]*)", re.MULTILINE)
    commands = command_line.findall(readme(name))
    assert commands
    for command in commands:
        module(name, "config").Config.parse(command.split())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("cifar10_speed", [], {"dataset": "cifar10", "width": 64, "batch_size": 1024}),
        ("cifar10_speed", ["--dataset", "synthetic"], {"width": 16}),
        ("gan", [], {"dataset": "cifar10", "width": 64}),
        ("gan", ["--dataset", "synthetic"], {"width": 16}),
        ("linear_regression", [], {"dataset": "synthetic"}),
        ("language_model", [], {"dataset": "text"}),
        (
            *("voc_segmentation", []),
            {"model": "deeplabv3_resnet101", "image_size": 480},
        ),
        (
            *("voc_segmentation", ["--dataset", "synthetic"]),
            {"image_size": 64},
        ),
        (
            *("voc_segmentation", ["--dataset", "synthetic", "--model", "fcn_resnet50", "--image-size", "96"]),
            {"model": "fcn_resnet50", "image_size": 96},
        ),
        ("voc_segmentation", ["--output-dir", "here"], {"output_dir": "here"}),
    ],
)
def test_the_defaults_follow_from_the_task(name: str, options: list[str], expected: dict[str, Any]) -> None:
    config = module(name, "config").Config.parse(options)
    assert {option: getattr(config, option) for option in expected} == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_that_is_longer_than_the_training_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--warmup-epochs 3\.0 is longer than --epochs 2"):
        module(name, "config").Config.parse(["--warmup-epochs", "3", "--epochs", "2"])


def test_a_beta_of_1_is_refused() -> None:
    """torch would raise a ValueError in every process."""
    for name, option in itertools.product(("gan", "language_model"), ("--beta1", "--beta2")):
        with pytest.raises(UsageError, match=f"{option}: '1' must be a number >= 0 and <= "):
            module(name, "config").Config.parse([option, "1"])


def module(example: str, name: str) -> Any:
    """A file of an example, without a project."""
    path = EXAMPLES / example / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"{example}_{name}", path)
    assert specification is not None and specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[loaded.__name__] = loaded  # dataclasses look for it there
    specification.loader.exec_module(loaded)
    return loaded


# ---- single functions -----------------------------------------------------------------------------------------------


def test_mean_iou_comes_from_one_confusion_matrix() -> None:
    model = module("voc_segmentation", "model")
    targets = torch.tensor([[[0, 0], [1, 255]]])
    outputs = {"out": torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).permute(0, 3, 1, 2).float()}
    totals = model.batch_totals(torch.tensor(2.0), outputs, targets)
    assert totals["confusion"].tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]] and totals["count"] == 3
    metrics = model.compute_metrics({name: torch.as_tensor(value).double() for name, value in totals.items()})
    assert metrics == {"loss": 2.0, "accuracy": pytest.approx(2 / 3), "mean_iou": 0.5}


def test_a_picture_is_evaluated_whole_and_trained_in_squares_out_of_it() -> None:
    """Its left half is 1, its right half 2; it is twice as wide as it is high."""
    data = module("voc_segmentation", "data")
    mask = Image.fromarray(numpy.repeat([[1, 2]], 50, axis=1).repeat(50, axis=0).astype(numpy.uint8))
    pairs = [(mask.convert("RGB"), mask)]
    _, whole = data.Pictures("one", pairs, 40, training=False)[0]
    assert [(whole == part).sum().item() for part in (1, 2, 255)] == [400, 400, 800], "the rest does not count"
    cuts = [data.Pictures("one", pairs, 40, training=True)[0] for _ in range(20)]
    assert all((image[0] == mask).all() and 255 not in mask for image, mask in cuts), "image and mask alike"
    assert len({(mask == 1).sum().item() for _, mask in cuts}) > 5, "each time another one"


def test_padding_counts_neither_in_the_loss_of_the_language_model_nor_in_its_totals() -> None:
    model = module("language_model", "model")
    outputs, targets = torch.randn(2, 5, 256), torch.tensor([[1, 2, 3, 4, 5], [6, 7, -100, -100, -100]])
    each = torch.nn.functional.cross_entropy(outputs[targets >= 0], targets[targets >= 0], reduction="none")
    loss = model.compute_loss(outputs, targets, None)
    assert len(each) == model.loss_terms(outputs, targets) == 7
    assert torch.allclose(loss, each.mean())
    totals = model.batch_totals(loss, outputs, targets)
    assert totals["loss"].item() == pytest.approx(each.sum().item()) and totals["count"] == 7
    nothing = torch.full((2, 5), -100)
    totals = model.batch_totals(model.compute_loss(outputs, nothing, None), outputs, nothing)
    assert totals["loss"] == 0 and totals["count"] == 0, "0 / 0 would end the run"


def test_a_character_is_predicted_from_those_before_it() -> None:
    model = module("language_model", "model").Transformer(characters=256, context=16).eval()
    text = torch.arange(16)[None]
    changed = torch.where(torch.arange(16) >= 9, 7, text)
    same = (model(text) == model(changed)).all(2)[0]
    assert same.tolist() == [True] * 9 + [False] * 7


# ---- cifar10_speed: each of its parts -------------------------------------------------------------------------------


def airbench(width: int = 8, views: int = 1) -> Any:
    """The network of cifar10_speed with a whitening layer for random images."""
    model = module("cifar10_speed", "model")
    torch.manual_seed(0)
    return model.Airbench(model.whitening_filters(torch.randn(4, 3, 32, 32)), 10, width, views)


def alternating(images: torch.Tensor, seed: int = 7) -> Any:
    """The training set of cifar10_speed, of these images."""
    shift = {"padding": 1 / 16, "padding_mode": "reflect"}
    transforms = ImageTransforms(mean=(0.5,) * 3, std=(0.5,) * 3, image_size=32, seed=seed, **shift)
    return module("cifar10_speed", "data").AlternatingFlips(images, torch.arange(len(images)), "0123456789", transforms)


def shown(dataset: Any, samples: list[int], epoch: int) -> torch.Tensor:
    """The images that the training sees in an epoch."""
    return dataset.augment(dataset.__getitems__(samples), epoch)[2]


def test_the_first_layer_whitens_patches() -> None:
    """Of smooth images, in which neighbouring pixels and colours are correlated, with a mean that is not 0."""
    model = module("cifar10_speed", "model")
    torch.manual_seed(0)
    images = torch.nn.functional.interpolate(torch.randn(300, 3, 12, 12), size=(32, 32), mode="bilinear")
    images = images + 0.5 * images.mean(1, keepdim=True) + 0.3 + 0.2 * torch.randn_like(images)
    filters = model.whitening_filters(images)
    assert filters.shape == (24, 3, 2, 2) and torch.equal(filters[:12], -filters[12:])

    def distance_from_white(outputs: torch.Tensor) -> float:
        covariance = torch.einsum("bnhw,bmhw->nm", outputs, outputs) / outputs[:, 0].numel()
        return (covariance - torch.eye(12)).abs().max().item()

    assert distance_from_white(torch.nn.functional.conv2d(images, filters[:12])) < 0.02
    assert distance_from_white(torch.nn.functional.unfold(images, 2).unflatten(2, (31, 31))) > 0.5


def test_the_first_layer_is_made_from_the_training_images_and_frozen() -> None:
    """The scales of BatchNorm are frozen as well. A block begins with a copy of its inputs."""
    model, dataset = module("cifar10_speed", "model"), alternating(torch.randint(256, (20, 3, 32, 32)).byte())
    network = model.build_model(SimpleNamespace(width=32, test_views=1, channels_last=True), dataset)
    images, _ = dataset.prepare(dataset.__getitems__(list(range(20))))
    assert torch.equal(network[0].weight, model.whitening_filters(images)) and not network[0].bias.any()
    norms = [f"{number}.weight" for number, layer in enumerate(network) if isinstance(layer, torch.nn.BatchNorm2d)]
    frozen = {name for name, weight in network.named_parameters() if not weight.requires_grad}
    assert frozen == {"0.weight", *norms} and len(norms) == 6
    x = torch.randn(2, 24, 8, 8)
    assert network[2](x).shape == (2, 32, 8, 8)
    assert torch.allclose(network[2](x)[:, :24], x, atol=1e-6)


@pytest.mark.parametrize(("momentum", "lr"), [(0.5, 0.1), (0.9, 0.1), (0.9, 0.4)])
def test_learning_rate_momentum_and_weight_decay_are_independent(momentum: float, lr: float) -> None:
    """With a gradient of 1 a step is the learning rate, for any momentum. Without one, a weight loses the same part."""
    model, network = module("cifar10_speed", "model"), airbench().double()
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    biases = {id(layer.bias) for layer in network if isinstance(layer, torch.nn.BatchNorm2d)}

    def last_step(gradient: float, weight_decay: float) -> tuple[list[float], list[float]]:
        """The part that a step takes from each weight, and from each bias of BatchNorm."""
        options = SimpleNamespace(lr=lr, momentum=momentum, weight_decay=weight_decay)
        optimizer = model.build_optimizer(network, options)
        for weight in trained:
            weight.data.fill_(1e3 if gradient else 1.0)
            weight.grad = torch.full_like(weight, gradient)
        for _ in range(100):
            before = [weight.detach().clone() for weight in trained]
            optimizer.step()
        steps = [((b - w) / (1 if gradient else b)).mean().item() for b, w in zip(before, trained, strict=True)]
        others = [step for step, weight in zip(steps, trained, strict=True) if id(weight) not in biases]
        return others, [step for step, weight in zip(steps, trained, strict=True) if id(weight) in biases]

    others, of_biases = last_step(gradient=1.0, weight_decay=0)
    assert others == pytest.approx([lr] * 8, rel=1e-3) and of_biases == pytest.approx([64 * lr] * 6, rel=1e-3)
    for part in last_step(gradient=0.0, weight_decay=1e-4):
        assert part == pytest.approx([1e-4] * len(part), rel=1e-2)


def test_the_rates_are_those_of_airbench94() -> None:
    """For the same global batch of 1024."""
    config = module("cifar10_speed", "config").Config.parse([])
    optimizer = module("cifar10_speed", "model").build_optimizer(airbench(), config)
    Schedule(optimizer, config, global_batch=1024).set(config.warmup_epochs)
    rate = 11.5 / (1 + 1 / (1 - 0.85))
    others, biases = optimizer.param_groups
    assert others["nesterov"] and biases["nesterov"]
    assert others["lr"] == pytest.approx(rate) and biases["lr"] == pytest.approx(64 * rate)
    for group in (others, biases):
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.0153 / 11.5 * rate, rel=1e-3)


def test_flips_alternate_between_epochs_and_depend_on_seed_and_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.arange(32).byte().expand(200, 3, 32, 32).contiguous()
    dataset, everything = alternating(columns), list(range(200))

    def flips(epoch: int, samples: list[int] = everything, of: Any = dataset) -> list[bool]:
        images = shown(of, samples, epoch)
        return (images[:, 0, 0, 0] > images[:, 0, 0, -1]).tolist()

    first = flips(0)
    assert 60 < sum(first) < 140
    assert flips(1) == flips(3) == [not flip for flip in first] and flips(2) == flips(4) == first
    assert flips(0, [5, 199, 3]) == [first[5], first[199], first[3]]
    assert flips(0, of=alternating(columns)) == first != flips(0, of=alternating(columns, seed=8))
    inputs, _ = dataset.prepare(dataset.__getitems__(everything))
    assert (inputs[:, 0, 0, 0] < inputs[:, 0, 0, -1]).all(), "an evaluation flips nothing"
    expected = [shown(dataset, everything, epoch) for epoch in (0, 1)]
    monkeypatch.setattr("images.MAX_COPIED_BYTES", 0)
    for epoch, images in enumerate(expected):
        assert torch.equal(shown(alternating(columns), everything, epoch), images), "without copies of all images"


def test_images_are_shifted_by_up_to_two_pixels_and_their_borders_mirrored() -> None:
    images = torch.randint(256, (300, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    padded = numpy.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    found: set[tuple[int, int, int]] = set()
    for number, image in enumerate(shown(alternating(images), list(range(300)), epoch=0).numpy()):
        found |= {
            (down, right, flip)
            for down, right, flip in itertools.product(range(5), range(5), (1, -1))
            if (padded[number, :, down : down + 32, right : right + 32][..., ::flip] == image).all()
        }
        assert len(found) <= number + 1, "each image matches at most one"
    assert len(found) == 50, "every shift, and every shift flipped"


def test_a_test_image_is_shown_in_one_two_or_six_views() -> None:
    """The views of airbench94: half of the weight is on the image itself, and a quarter on each shifted one; each of
    them is split between the image and its flip."""
    images = torch.randn(5, 3, 32, 32)
    padded = torch.from_numpy(numpy.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect"))
    shifted = (images, images, padded[..., :32, :32], padded[..., 2:, 2:])
    networks = {views: airbench(views=views).eval() for views in (1, 2, 6)}
    with torch.no_grad():
        one, two, six = (network(images) for network in networks.values())
        plain = networks[1]
        assert torch.equal(one, plain.logits(images))
        assert torch.allclose(two, (one + plain(images.flip(3))) / 2, atol=1e-6)
        every = [(plain(view) + plain(view.flip(3))) / 2 for view in shifted]
        assert torch.allclose(six, torch.stack(every).mean(0), atol=1e-6)
        assert not torch.allclose(six, two, atol=1e-4) and not torch.allclose(two, one, atol=1e-4)
    for network in networks.values():
        assert torch.equal(network.train()(images), networks[1].train()(images)), "training uses the image alone"
