"""docs/data.md is tested: its blocks of code are taken from its text, and run one after the other."""

from __future__ import annotations

import io
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from config import Config
from ddp.core.errors import UsageError
from ddp.data.dataset import BatchDataset, Datasets
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.reader import SeededReader
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext
from ddp.training.meter import Meter
from processes import on_ranks

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
PAGE = (TEMPLATE / "docs" / "data.md").read_text(encoding="utf-8")
NAMES: dict[str, Any] = {"__name__": "docs_data"}  # what the blocks define
for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    exec(compile(block, "docs/data.md", "exec", dont_inherit=True), NAMES)
TarMembers, Mixed = NAMES["TarMembers"], NAMES["Mixed"]
CLASSES = ["a", "b", "c"]


def options(*words: str) -> Config:
    return Config.parse(["--dataset", "synthetic", "--device", "cpu", *words])


def png(red: int, width: int = 4) -> bytes:
    """An image of this width and of height 3."""
    file = io.BytesIO()
    Image.new("RGB", (width, 3), (red, 0, 255 - red)).save(file, "png")
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes], mode: Any = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_the_page_stays_short_and_has_the_steps_of_a_batch() -> None:
    assert PAGE.count("\n") <= 200 and "{%" not in PAGE and "{{" not in PAGE
    table = re.search(r"\| step \|.*?\n\n", PAGE, re.DOTALL)
    assert table is not None and BatchDataset.__doc__ is not None
    steps = re.findall(r"^\| (\w+) \|", table[0], re.MULTILINE)
    assert steps == ["step", *re.findall(r"^    (\w+) {3,}\S", BatchDataset.__doc__, re.MULTILINE)]


# ---- random numbers -------------------------------------------------------------------------------------------------


class Drawn(Dataset):
    """Numbers that are drawn as the page says: `advice` is a piece of it."""

    def __init__(self, advice: str, draw: Callable[[str], float]) -> None:
        assert f"`{advice}`" in PAGE
        self.advice, self.draw = advice, draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.draw(self.advice)


def assert_depends_on_sample_and_epoch_only(dataset: Dataset) -> None:
    def numbers(epoch: int, batches: list[list[int]], workers: int = 0) -> dict[int, float]:
        reader = SeededReader(dataset, lambda samples: samples, seed=0, epoch=epoch)
        loader = DataLoader(reader, batch_sampler=batches, collate_fn=lambda batch: batch, num_workers=workers)
        drawn = [number for batch in loader for number in batch]
        return dict(zip([index for batch in batches for index in batch], drawn, strict=True))

    first = numbers(0, [[0, 1, 2], [3, 4, 5, 6, 7]])
    assert first == numbers(0, [[7, 3], [5, 1, 0, 2], [4, 6]]) == numbers(0, [[2, 4, 6], [1, 3, 5, 7, 0]], workers=2)
    assert len({*first.values(), *numbers(1, [[*range(8)]]).values()}) == 16


def test_a_generator_can_be_seeded_as_the_page_says() -> None:
    advice = "numpy.random.default_rng(torch.initial_seed())"
    assert_depends_on_sample_and_epoch_only(Drawn(advice, lambda code: eval(code).random()))


def test_albumentations_can_be_seeded_as_the_page_says() -> None:
    albumentations = pytest.importorskip("albumentations")
    steps = [albumentations.RandomBrightnessContrast(p=1), albumentations.GaussNoise(p=1)]
    pipeline = albumentations.Compose([albumentations.OneOf(steps, p=1), albumentations.Rotate(p=1)])
    image = numpy.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=numpy.uint8)

    def draw(advice: str) -> float:
        exec(advice, {"pipeline": pipeline, "seed": torch.initial_seed(), "numpy": numpy, "random": random})
        return float(pipeline(image=image)["image"].sum(dtype=float))

    advice = "pipeline.set_random_state(numpy.random.default_rng(seed), random.Random(seed))"
    assert_depends_on_sample_and_epoch_only(Drawn(advice, draw))


# ---- tar files, streams ---------------------------------------------------------------------------------------------


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Samples 0 to 19, of classes 0 to 2, in four tar files. One looks as if made by `tar cf 2.tar .`."""
    for shard, parent in enumerate(("", "part.1/", "./", "a/b/")):
        numbers = range(5 * shard, 5 * shard + 5)
        members = {f"{parent}{number:04d}.png": png(number) for number in numbers}
        members |= {f"{parent}{number:04d}.cls": str(number % 3).encode() for number in reversed(numbers)}
        write_tar(tmp_path / f"{shard}.tar", {**members, f"{parent}{numbers[0]:04d}.seg.png": b"of another kind"})
    return tmp_path


def test_tar_members_are_read_by_index_in_any_order(tars: Path) -> None:
    samples = TarMembers(tars, CLASSES)
    assert len(samples) == 20
    indices = [*range(20)] * 2
    random.Random(0).shuffle(indices)
    for index in indices:
        image, target = samples[index]
        assert image.shape == (3, 3, 4) and target == index % 3
        assert (255 * image[:, 1, 2]).round().tolist() == [index, 0, 255 - index]


@pytest.mark.parametrize("opened", [False, True])
def test_two_workers_read_tar_members(opened: bool, tars: Path) -> None:
    """Also if the files are open when the workers are forked."""
    samples = TarMembers(tars, CLASSES)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    if opened:
        assert [samples[index][1] for index in order] == [index % 3 for index in order]

    def members(loader: Any) -> list[tuple[int, int]]:
        batches = [(255 * images[:, 0, 0, 0], targets) for images, targets in loader]
        return [(round(red.item()), int(target)) for batch in batches for red, target in zip(*batch, strict=True)]

    def read(ctx: DistContext) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        config = options("--batch-size", "4", "--workers", "2")
        plain = DataLoader(samples, batch_size=3, sampler=order, num_workers=2)
        return members(plain), members(EvalLoader(samples, config, ctx))

    ranks = on_ranks(2, read)
    for plain, _ in ranks:
        assert plain == [(index, index % 3) for index in order]
    assert sorted(ranks[0][1] + ranks[1][1]) == [(index, index % 3) for index in range(20)]


def test_a_compressed_tar_file_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"0.png": png(0), "0.cls": b"0"}, "w:gz")
    with pytest.raises(tarfile.ReadError):
        TarMembers(tmp_path, CLASSES)


def test_the_messages_about_streams_lead_to_this_page() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(UsageError, match=r"a stream, .* as docs/data\.md does for tar files"):
        check_datasets(Datasets(Endless()), Config())
    generator = numpy.random.default_rng(0)
    reader = SeededReader(Drawn("mix", lambda _: generator.random()), list, seed=0, epoch=0)
    with pytest.raises(UsageError, match=r"(returned two different samples) .* as docs/data\.md does") as refused:
        reader.__getitems__([0])
    assert "`returned two different samples`" in PAGE and "`IterableDataset`" in PAGE and refused.value.exit_code == 2


# ---- samples of different sizes, Mixup ------------------------------------------------------------------------------


@pytest.fixture
def of_two_sizes(tmp_path: Path) -> Path:
    """24 samples of classes 0 and 1. Those of class 1 are red, and wider."""
    members = {f"{number:02d}.png": png(255 * (number % 2), 4 + 3 * (number % 2)) for number in range(24)}
    members |= {f"{number:02d}.cls": str(number % 2).encode() for number in range(24)}
    write_tar(tmp_path / "0.tar", members)
    return tmp_path


def test_samples_of_different_sizes_are_padded(of_two_sizes: Path) -> None:
    def batches(ctx: DistContext) -> list[tuple[Tensor, Tensor]]:
        return list(EvalLoader(Mixed(of_two_sizes, CLASSES[:2]), options("--batch-size", "5", "--workers", "1"), ctx))

    (found,) = on_ranks(1, batches)
    assert [len(images) for images, _ in found] == [5, 5, 5, 5, 4]
    for images, targets in found:
        assert images.shape[1:] == (3, 3, 7) and (images[:, 0, 0, 0] == targets).all()  # and not mixed
        assert (images[targets == 0, :, :, 4:] == 0).all() and (images[targets == 0, 2, :, :4] == 1).all()


def test_mixup_mixes_images_and_targets_alike(of_two_sizes: Path) -> None:
    def batches(ctx: DistContext) -> list[list[tuple[Tensor, Tensor]]]:
        loader = TrainLoader(Mixed(of_two_sizes, CLASSES[:2]), options("--batch-size", "8", "--workers", "1"), ctx)
        return [[batch for step in loader.steps(0, consumed) for batch in step] for consumed in (0, 8)]

    ((whole, resumed),) = on_ranks(1, batches)
    for images, shares in whole:
        assert torch.allclose(images[:, 0, 0, 0], shares[:, 1], atol=1e-6)  # the red part of the mixed image
        assert torch.allclose(shares.sum(1), torch.ones(8))
        assert nn.functional.cross_entropy(torch.randn(8, 2), shares).isfinite()
    assert any(((shares > 0) & (shares < 1)).any() for _, shares in whole)
    assert len(resumed) == 2
    for batch, again in zip(whole[1:], resumed, strict=True):
        assert all(torch.equal(*pair) for pair in zip(batch, again, strict=True))


# ---- metrics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_area_under_the_curve_is_that_of_all_samples(world_size: int) -> None:
    outputs = torch.randn(11, generator=torch.Generator().manual_seed(0))
    outputs[3] = outputs[0]
    targets = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1])

    def metrics(ctx: DistContext) -> list[dict[str, float]]:
        found = []
        for training in (True, False):
            meter = Meter(ctx)
            for first in range(2 * ctx.rank, 11, 2 * ctx.world_size):
                batch, truth = outputs[first : first + 2].clone().requires_grad_(training), targets[first : first + 2]
                loss = nn.functional.binary_cross_entropy_with_logits(batch, truth.float())
                meter.add(NAMES["batch_totals"](loss, batch, truth))
            found.append(NAMES["compute_metrics"](meter.take()))
        return found

    pairs = [(one, other) for one in outputs[targets == 1].tolist() for other in outputs[targets == 0].tolist()]
    area = sum((one > other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)
    mean = nn.functional.binary_cross_entropy_with_logits(outputs, targets.float()).item()
    for in_training, in_evaluation in on_ranks(world_size, metrics):
        assert in_training == {"loss": pytest.approx(mean)}
        assert in_evaluation == {"loss": pytest.approx(mean), "roc_auc": pytest.approx(area)}
