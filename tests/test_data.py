"""Data: where they come from, what is wrong with them, and which process sees which sample, in which order."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark
import numpy
import psutil
import pytest
import torch
import torch._dynamo  # DDP imports it, in a second: here, once, before the ranks are forked
import torch.nn.functional as F
from benchmark_report import DATA, NO_SYNC, STRONG, WEAK
from PIL import Image
from test_loader import Noise, Numbers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import tensorboard  # noqa: F401  the same
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import CIFAR10
from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

import data
import ddp.data.workers
import image_files
import images as image_datasets
import main
from config import Config
from data import MEAN, STD, build_transforms
from ddp.core.errors import SetupError, UsageError
from ddp.core.run_config import RunConfig
from ddp.core.signals import stop_signal
from ddp.data.dataset import BatchDataset, Datasets, data_name, hooks_of
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.reader import SeededReader
from ddp.data.workers import start_workers
from ddp.distributed.process_group import DistContext
from ddp.distributed.stop_sync import StopRequested
from faults import fault
from file_list import FileList, list_files
from image_files import DecodedFiles, ImageFiles, find_images
from images import ImagesInMemory
from processes import on_ranks, train


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: a second thread would only wait for a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def options(*words: Any) -> Config:
    return Config.parse([str(word) for word in words])


def the_error(output: str) -> str:
    """The one line of an error; fails if there is more than it, or a traceback."""
    errors = [line for line in output.splitlines() if "error:" in line.lower()]
    assert len(errors) == 1, output
    assert "Traceback" not in output
    assert errors[0].startswith("error: ")
    return errors[0]


def by_rank(world_size: int, function: Callable[[DistContext], Any]) -> list[Any]:
    """What `function` returns on each rank. None leaves before all are done: others may still be connecting to it."""

    def and_wait(ctx: DistContext) -> Any:
        result = function(ctx)
        ctx.gather(None)
        return result

    return on_ranks(world_size, and_wait, "--device=cpu", "--timeout=60")


def documented_examples(names: dict[str, Any], number: int) -> dict[str, Any]:
    """Run an example from the docstring of data.py with these names defined; all names that it leaves."""
    blocks = re.findall(r"\n\n((?:    .*\n|\n(?=    ))+)", data.__doc__ or "")
    exec(textwrap.dedent(blocks[number]), names)
    return names


# ---- cifar10 --------------------------------------------------------------------------------------------------------

SERVER = r"""
import http.server, pathlib, sys, time
folder, answer = pathlib.Path(sys.argv[1]), sys.argv[2]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        # torchvision asks twice: first, with this header, only whether it is redirected.
        probe = self.headers.get("Method") == "HEAD"
        with (folder / "requests").open("a") as log:
            log.write(("probe " if probe else "download ") + self.path + "\n")
        if answer == "nonsense":
            self.wfile.write(b"what?\r\n\r\n")
            return
        if answer == "missing":
            self.send_error(404)
            return
        body = (folder / "archive").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if answer == "drop" and not probe:
            return
        if answer == "slow" and not probe:
            time.sleep(2)  # in which the other processes come by
        self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def fake_cifar10() -> tuple[bytes, dict[str, Any]]:
    """An archive in the layout of CIFAR-10, of 5 x 8 training and 6 test images; and what CIFAR10 must know of it."""
    generator = numpy.random.default_rng(0)
    batches = {f"data_batch_{number}": 8 for number in range(1, 6)} | {"test_batch": 6}
    files = {
        name: {
            "data": generator.integers(0, 256, (length, 3072), dtype=numpy.uint8),
            "labels": generator.integers(0, 10, length).tolist(),
        }
        for name, length in batches.items()
    }
    files["batches.meta"] = {"label_names": [f"name {number}" for number in range(10)]}
    archive, sums = io.BytesIO(), {}
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            raw = pickle.dumps(content, protocol=2)
            sums[name] = hashlib.md5(raw).hexdigest()
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    knowledge = {
        "tgz_md5": hashlib.md5(archive.getvalue()).hexdigest(),
        "train_list": [[name, sums[name]] for name in list(batches)[:5]],
        "test_list": [["test_batch", sums["test_batch"]]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]},
    }
    return archive.getvalue(), knowledge


class FakeCifar10:
    """A real server on this machine with a small archive, and a folder to put it in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes, self.knowledge = fake_cifar10()
        (folder / "archive").write_bytes(self.bytes)
        self.root = folder / "root"
        self.archive = self.root / "cifar-10-python.tar.gz"
        self.unpacked = self.root / "cifar-10-batches-py"
        self.servers: list[subprocess.Popen[str]] = []

    def serve(self, answer: str = "well") -> str:
        """Start the server; the URL of the archive on it."""
        command = [sys.executable, "-c", SERVER, str(self.folder), answer]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        return f"http://127.0.0.1:{int(server.stdout.readline())}/cifar-10-python.tar.gz"

    def downloads(self) -> int:
        """How often the archive was asked for."""
        log = self.folder / "requests"
        return log.read_text().count("download ") if log.exists() else 0

    def unpack(self) -> None:
        self.unpacked.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(self.bytes)) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                assert content is not None
                (self.root / entry.name).write_bytes(content.read())

    def train(self, code: int = 0) -> str:
        """Two steps on it; what was printed."""
        shared = ("--dataset", "cifar10", "--data-dir", self.root, "--device", "cpu", "--batch-size", 4)
        return train(1, *shared, "--max-steps", 2, "--output-dir", self.folder / "out", code=code)


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], FakeCifar10]]:
    """Makes torchvision take the small archive, from a server that answers so; None: there is no server."""
    fake = FakeCifar10(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def make(answer: str | None) -> FakeCifar10:
        url = f"http://127.0.0.1:{closed_port()}/cifar-10-python.tar.gz" if answer is None else fake.serve(answer)
        for name, value in {**fake.knowledge, "url": url}.items():
            monkeypatch.setattr(CIFAR10, name, value)
        return fake

    yield make
    for server in fake.servers:
        server.kill()
        server.communicate()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@fault(31)
@pytest.mark.slow
def test_four_processes_started_together_download_once(cifar10: Callable[..., FakeCifar10], tmp_path: Path) -> None:
    fake = cifar10("slow")
    few = ("--batch-size", 2, "--max-steps", 1, "--device", "cpu", "--output-dir", tmp_path / "out")
    output = train(4, "--dataset", "cifar10", "--data-dir", fake.root, *few)
    assert "cifar10: 37 training, 3 validation, 6 test samples" in output
    assert fake.downloads() == 1


def test_cifar10_is_read_as_torchvision_reads_it(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10(None)
    fake.unpack()
    train_set, _, test_set = data.load_datasets(options("--data-dir", fake.root, "--val-fraction", 0))
    for ours, theirs in ((train_set, CIFAR10(fake.root)), (test_set, CIFAR10(fake.root, train=False))):
        targets, _ = ours.__getitems__(list(range(len(theirs))))
        assert torch.equal(ours.images, torch.from_numpy(theirs.data).permute(0, 3, 1, 2))
        assert targets.tolist() == theirs.targets
    assert train_set.classes == [f"name {number}" for number in range(10)]


def test_what_is_there_already_is_not_downloaded(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10("well")
    fake.train()
    fake.train()
    assert fake.downloads() == 1


@fault(31)
def test_a_truncated_archive_is_fetched_again(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10("well")
    fake.root.mkdir()
    fake.archive.write_bytes(fake.bytes[: len(fake.bytes) // 2])
    fake.train()
    assert fake.downloads() == 1
    assert fake.archive.read_bytes() == fake.bytes


def test_an_archive_put_into_the_folder_by_hand_needs_no_network(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10(None)
    fake.root.mkdir()
    fake.archive.write_bytes(fake.bytes)
    assert "cifar10: 37 training, 3 validation, 6 test samples" in fake.train()


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "one bit"])
def test_a_damaged_file_is_unpacked_again(cifar10: Callable[..., FakeCifar10], name: str, damage: str) -> None:
    fake = cifar10(None)
    fake.unpack()
    fake.archive.write_bytes(fake.bytes)
    path = fake.unpacked / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        os.truncate(path, len(whole) // 2)
    else:
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    fake.train()
    assert path.read_bytes() == whole


def test_a_damaged_file_without_its_archive_is_fetched_again(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10("well")
    fake.unpack()
    (fake.unpacked / "data_batch_5").write_bytes(b"")
    fake.train()
    assert fake.downloads() == 1


@fault(31)
def test_without_network_one_line_says_what_to_do(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10(None)
    message = the_error(fake.train(code=3))
    assert CIFAR10.url in message
    assert f"put cifar-10-python.tar.gz into {fake.root}" in message
    assert "--dataset synthetic" in message


@pytest.mark.parametrize("answer", ["missing", "drop", "nonsense"])
def test_a_server_that_fails_is_as_good_as_none(cifar10: Callable[..., FakeCifar10], answer: str) -> None:
    fake = cifar10(answer)
    message = the_error(fake.train(code=3))
    assert CIFAR10.url in message
    assert "--dataset synthetic" in message


def test_another_archive_than_that_of_cifar10_is_refused(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10("well")
    (fake.folder / "archive").write_bytes(fake.bytes[:-1] + b"!")
    message = the_error(fake.train(code=3))
    assert CIFAR10.url in message
    assert "--dataset synthetic" in message
    assert not fake.unpacked.exists()


def test_a_download_that_was_cut_off_is_finished_by_the_next_run(cifar10: Callable[..., FakeCifar10]) -> None:
    cifar10("drop").train(code=3)
    fake = cifar10("well")
    fake.train()
    assert fake.archive.read_bytes() == fake.bytes


# ---- synthetic ------------------------------------------------------------------------------------------------------


def test_synthetic_images_are_shaped_like_those_of_cifar10() -> None:
    train_set, val_set, test_set = data.load_datasets(options("--dataset", "synthetic"))
    for dataset, length in ((train_set, 10_000), (val_set, 2_000), (test_set, 2_000)):
        assert (dataset.images.shape, dataset.images.dtype) == ((length, 3, 32, 32), torch.uint8)
        assert (dataset.targets.shape, dataset.targets.dtype) == ((length,), torch.int64)
        assert set(dataset.targets.tolist()) == set(range(10))
    assert len(train_set.classes) == 10
    assert not torch.equal(train_set.images[:2000], test_set.images)
    assert not torch.equal(val_set.images, test_set.images)


def test_synthetic_images_follow_from_the_seed_alone(small: None) -> None:
    one, again, two = (data.load_datasets(options("--dataset=synthetic", "--seed", seed)) for seed in (1, 1, 2))
    for part in range(2):
        assert torch.equal(one[part].images, again[part].images)
        assert torch.equal(one[part].targets, again[part].targets)
        assert not torch.equal(one[part].images, two[part].images)
        assert not torch.equal(one[part].targets, two[part].targets)


def test_synthetic_images_need_no_files_and_leave_none(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data.load_datasets(options("--dataset=synthetic"))
    assert list(tmp_path.iterdir()) == []


# ---- imagefolder ----------------------------------------------------------------------------------------------------


def draw(path: Path, color: Any = "red", size: tuple[int, int] = (32, 32), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).convert(mode).save(path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """train and val, each with two images of cat and two of dog."""
    for part, name, number in itertools.product(("train", "val"), ("cat", "dog"), range(2)):
        draw(tmp_path / "images" / part / name / f"{number}.png")
    return tmp_path / "images"


def from_folder(folder: Path, *more: Any) -> Datasets:
    return data.load_datasets(options("--dataset", "imagefolder", "--data-dir", folder, *more))


def refusal(folder: Path) -> str:
    with pytest.raises(SetupError) as raised:
        from_folder(folder)
    assert raised.value.exit_code == 3
    return str(raised.value)


def test_an_image_folder_has_train_val_and_test(images: Path) -> None:
    draw(images / "train" / "cat" / "blue.png", "blue")
    for name in ("cat", "dog"):
        draw(images / "test" / name / "0.png")
    train_set, val_set, test_set = from_folder(images)
    assert (len(train_set), len(val_set), len(test_set)) == (5, 4, 2)
    assert train_set.classes == val_set.classes == test_set.classes == ["cat", "dog"]
    targets, _, pictures = train_set.__getitems__([0, 2, 4])
    assert targets.tolist() == [0, 0, 1]
    assert pictures[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]


@pytest.mark.parametrize("cache", [False, True])
def test_without_val_a_part_of_the_training_images_validates(images: Path, tmp_path: Path, cache: bool) -> None:
    """About as many of each class as wanted; and never an image of the test set, nor one that is trained on."""
    shutil.rmtree(images / "val")
    for name, number in itertools.product(("cat", "dog"), range(50)):
        draw(images / "train" / name / f"{number}.png", (number, 0, 0))
    more = ("--cache", tmp_path / "cache") if cache else ()
    train_set, val_set, test_set = from_folder(images, "--val-fraction", 0.2, *more)
    assert (len(train_set) + len(val_set), test_set) == (100, None) and 10 <= len(val_set) <= 30

    def samples(dataset: Any) -> set[tuple[int, int]]:
        targets, _, *pictures = dataset.__getitems__(list(range(len(dataset))))
        pictures = pictures[0] if pictures else dataset.images
        return {(int(target), int(each[0, 0, 0])) for target, each in zip(targets, pictures, strict=True)}

    trained, validates = samples(train_set), samples(val_set)
    assert trained | validates == set(itertools.product((0, 1), range(50))) and not trained & validates
    assert all(3 <= sum(target == label for target, _ in validates) <= 17 for label in (0, 1))
    assert samples(from_folder(images, "--val-fraction", 0.2, *more).val) == validates
    assert samples(from_folder(images, "--val-fraction", 0.2, "--seed", 1, *more).val) != validates
    assert from_folder(images, "--val-fraction", 0, *more).val is None
    assert 2 <= len(from_folder(images, *more).val) <= 20, "a tenth"


@pytest.mark.parametrize("targets", [torch.eye(20).repeat(50, 1), torch.zeros(1000, 4, 4), torch.rand(1000)])
def test_targets_that_are_no_classes_are_split_as_one(targets: Tensor) -> None:
    """Of several labels, of masks, and of numbers to predict."""
    pictures = torch.zeros(1000, 3, 4, 4, dtype=torch.uint8)
    train_set, val_set = ImagesInMemory(pictures, targets, [], build_transforms(options())).split(0.1, seed=0)
    assert (len(train_set), len(val_set)) == (900, 100)


def test_images_in_memory_that_would_be_misread_are_refused() -> None:
    transforms, targets = build_transforms(options()), torch.zeros(4, dtype=torch.int64)
    pictures = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    for wrong in (pictures.float(), pictures[0], pictures[:3]):
        with pytest.raises(
            UsageError, match=r"ImagesInMemory needs images \[n, c, h, w\] uint8, and a target for each"
        ):
            ImagesInMemory(wrong, targets, [], transforms)
    masks = ImagesInMemory(pictures, torch.zeros(4, 8, 8), [], transforms)
    with pytest.raises(UsageError, match=r"targets of shape \[2, 8, 8\] would stay as they are, unlike their images"):
        masks.augment(masks.__getitems__([0, 1]), 0)
    masks.transforms = replace(transforms, padding=0, flip=0)
    masks.augment(masks.__getitems__([0, 1]), 0)

    grey = ImagesInMemory(pictures[:, :1], targets, [], transforms)
    with pytest.raises(UsageError, match=r"images have 1 channels, but `mean` has 3 numbers, and `std` 3: see build"):
        grey.prepare(grey.__getitems__([0, 1]))


def test_images_in_memory_may_be_extended_or_filtered() -> None:
    black = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    dataset = ImagesInMemory(black, torch.zeros(4, dtype=torch.int64), ["a"], build_transforms(options()))
    dataset.images, dataset.targets = torch.cat([black, black]), torch.arange(8)
    assert len(dataset) == 8 and dataset.__getitems__([7])[0].tolist() == [7]
    assert len(dataset._part(torch.arange(3))) == 3
    dataset.length = 5
    assert len(dataset) == 5, "as an owner may set it"
    dataset.images = dataset.images[:2]
    with pytest.raises(UsageError, match=r"ImagesInMemory has 2 images and 8 targets: replace both"):
        len(dataset)


def test_the_samples_of_image_files_may_be_replaced(images: Path) -> None:
    files = ImageFiles(images / "train", build_transforms(options()))
    files.samples = [*files.samples, *files.samples]
    assert len(files) == len(files.samples) == len(files.keys())
    several: Any = [(path, [0, 1]) for path, _ in files.samples]
    files.samples = several
    with pytest.raises(UsageError, match=r"samples has \[0, 1\] as the class of .*: give a number; for several"):
        files.keys()


class Brighter(ImagesInMemory):
    def set_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.images = torch.full_like(self.images, 50)
        if epoch == 2:
            self.images += 1
        if epoch == 3:
            self.transforms = replace(self.transforms, std=[2.0 * value for value in self.transforms.std])


def test_images_in_memory_may_change_with_the_epoch() -> None:
    white = replace(build_transforms(options()), mean=(0, 0, 0), std=(1, 1, 1), padding=0, flip=0, image_size=8)
    dataset = Brighter(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long), [], white)

    def first(ctx: DistContext) -> list[float]:
        loader = TrainLoader(dataset, options("--batch-size=4"), ctx)
        batches = [next(next(loader.steps(epoch)))[0].mean().item() for epoch in range(4)]
        return [round(value, 5) for value in batches]

    assert by_rank(1, first) == [[0.0, round(50 / 255, 5), round(51 / 255, 5), round(51 / 255 / 2, 5)]]


class OfNoBase:
    """As many write it: a class of its own, which random_split takes."""

    epoch = 0

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1,), float(self.epoch)), 0


def test_what_a_subset_holds_may_be_of_any_class() -> None:
    dataset = Subset(OfNoBase(), range(4))  # type: ignore[arg-type]
    several = ConcatDataset([OfNoBase(), OfNoBase()])  # type: ignore[list-item]

    def firsts(ctx: DistContext) -> list[float]:
        loaders = [TrainLoader(each, options("--batch-size=4"), ctx) for each in (dataset, several)]
        return [next(next(each.steps(epoch)))[0][0].item() for each in loaders for epoch in range(3)]

    assert by_rank(1, firsts) == [[0.0, 1.0, 2.0] * 2]
    dataset.dataset.collate = list  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"^dataset OfNoBase has collate: subclass ddp.data.dataset.BatchDataset"):
        hooks_of(dataset)


def test_a_val_fraction_that_cannot_be_had_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--val-fraction: {images}/val has the validation set"):
        from_folder(images, "--val-fraction", 0.2)
    with pytest.raises(UsageError, match="synthetic has a validation set"):
        options("--dataset=synthetic", "--val-fraction=0.2")
    (images / "val").rename(images / "test")
    with pytest.raises(SetupError, match=r"--val-fraction 0\.001 leaves no sample for validation: "):
        from_folder(images, "--val-fraction", 0.001)


def test_one_process_of_a_machine_lists_the_files_and_all_map_its_table(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run lists them again: a file may have come, or gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    odd = images / "train" / "cat" / "a\udcff b.png"
    draw(odd)
    listed = tmp_path / "listed"

    def find_slowly(folder: Path) -> list[str]:
        with listed.open("a") as file:
            print(os.getpid(), file=file)
        time.sleep(0.5)  # the others wait meanwhile
        return find_images(folder)

    def list_samples() -> Any:
        return list_files(images / "train", ["cat", "dog"], lambda name: find_slowly(images / "train" / name))

    def list_on(ctx: DistContext) -> tuple[list[tuple[str, int]], str, bool]:
        ctx.gather(None)
        samples = list_samples()
        (table,) = (tmp_path / f"ddp-{os.getuid()}").glob("*.pt")
        return list(samples), samples.digest(), str(table) in Path("/proc/self/maps").read_text()

    found = on_ranks(3, list_on)
    samples = [(str(path), target) for target, name in enumerate(("cat", "dog")) for path in in_class(images, name)]
    assert [each[0] for each in found] == [samples] * 3 and str(odd) in dict(samples)
    assert len({each[1] for each in found}) == 1 and all(each[2] for each in found)
    assert len(set(listed.read_text().split())) == 1 and len(listed.read_text().split()) == 2, "once for each class"
    listed.unlink()

    def list_as_another_run(ctx: DistContext) -> None:
        monkeypatch.setattr(os, "getppid", lambda: 1 + ctx.rank)
        list_on(ctx)

    on_ranks(2, list_as_another_run)
    assert len(set(listed.read_text().split())) == 2, "another run may see other files"
    assert len(list_samples()) == len(samples)
    if os.geteuid() == 0:  # others cannot give a folder away
        os.chown(tmp_path / "ddp-0", 12345, -1)
        with pytest.raises(SetupError, match=r"/ddp-0 belongs to another user: set TMPDIR "):
            list_samples()
        os.chown(tmp_path / "ddp-0", 0, -1)
    odd.unlink()
    again = list_files(images / "train", ["cat", "dog"], lambda name: find_images(images / "train" / name))
    assert len(again) == len(samples) - 1 and again.digest() != found[0][1]
    assert list(again.part(torch.tensor([2, 0]))) == [again[2], again[0]]
    assert again[1:] == list(again)[1:] and again[-1] == list(again)[-1]
    assert FileList.of(list(again)).digest() == again.digest() and len(FileList.of([])) == 0
    assert again.part(torch.tensor([2, 0])).digest() != again.part(torch.tensor([0, 2])).digest()


def in_class(images: Path, name: str) -> list[Path]:
    return sorted((images / "train" / name).iterdir())


def test_a_run_on_a_folder_that_is_not_there_ends_with_one_line(tmp_path: Path) -> None:
    where = tmp_path / "nowhere"
    shared = ("--dataset", "imagefolder", "--data-dir", where, "--output-dir", tmp_path / "out", "--device", "cpu")
    output = train(1, *shared, code=3)
    needs = "needs train/CLASS/*; val/CLASS/* and test/CLASS/* are optional"
    assert output == f"error: --data-dir {where}: {needs}\n"
    assert not (tmp_path / "out").exists()


@fault(31)
def test_a_folder_without_training_images_is_refused_by_name(images: Path) -> None:
    (images / "train").rename(images / "other")
    assert refusal(images).startswith(f"--data-dir {images}: needs train/CLASS/*; val/CLASS/*")


def test_classes_that_differ_are_named(images: Path) -> None:
    draw(images / "train" / "bird" / "0.png")
    draw(images / "val" / "fish" / "0.png")
    assert refusal(images) == f"--data-dir {images}: train and val differ in their classes: bird, fish"


def test_a_class_without_images_is_named(images: Path) -> None:
    (images / "train" / "empty").mkdir()
    assert "empty" in refusal(images)


def test_a_folder_without_classes_is_named(images: Path) -> None:
    for name in ("cat", "dog"):
        (images / "val" / name).rename(images / name)
    assert str(images / "val") in refusal(images)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def shorten_header(path: Path) -> None:
    """A PNG whose header has a correct checksum, but only 5 bytes."""
    raw = path.read_bytes()
    header = b"IHDR" + raw[16:21]
    path.write_bytes(raw[:8] + struct.pack(">I", 5) + header + struct.pack(">I", zlib.crc32(header)) + raw[33:])


def claim_a_huge_size(path: Path) -> None:
    """A BMP whose header claims 50000 x 50000 pixels, which Pillow takes for an attack."""
    raw = path.read_bytes()
    path.write_bytes(raw[:18] + struct.pack("<II", 50_000, 50_000) + raw[26:])


@fault(31)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        pytest.param("png", lambda path: path.write_bytes(b""), id="empty"),
        pytest.param("png", lambda path: path.write_text("no image"), id="text"),
        pytest.param("png", cut, id="PNG cut short"),
        pytest.param("jpg", cut, id="JPEG cut short"),
        pytest.param("png", shorten_header, id="PNG with a short header"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_in_one_line(
    images: Path, tmp_path: Path, ending: str, damage: Callable[[Path], Any], workers: int
) -> None:
    path = draw(images / "train" / "dog" / f"bad.{ending}", size=(200, 200))
    damage(path)
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--output-dir", tmp_path / "out", "--device", "cpu")
    output = train(1, *shared, "--batch-size", 5, "--workers", workers, "--epochs", 1, code=3)
    assert the_error(output) == f"error: {path} is not an image that can be read; replace or remove it"


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def link_to_a_failing_disk(path: Path) -> None:
    """The kernel refuses to read there, with EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@fault(31)
@pytest.mark.parametrize(
    ("ending", "damage", "reason"),
    [
        ("png", link_to_nothing, "cannot be read: No such file or directory; restore or remove it"),
        ("png", link_to_a_failing_disk, "cannot be read: Input/output error; start again when its file system works"),
        ("bmp", claim_a_huge_size, "is too large: Image size (2500000000 pixels) exceeds limit of "),
    ],
)
def test_what_a_decoder_is_not_to_blame_for_has_its_own_reason(
    images: Path, tmp_path: Path, ending: str, damage: Callable[[Path], Any], reason: str
) -> None:
    path = draw(images / "train" / "dog" / f"bad.{ending}", size=(200, 200))
    damage(path)
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--output-dir", tmp_path / "out", "--device", "cpu")
    output = train(1, *shared, "--batch-size", 5, "--workers", 2, "--epochs", 1, code=3)
    assert the_error(output).startswith(f"error: {path} {reason}") and "or remove it" not in reason.partition(";")[0]


def only(folder: Path, path: Path) -> Tensor:
    """The image at `path` as the dataset gives it: [3, h, w]."""
    train_set = from_folder(folder, "--image-size", 24).train
    index = [sample for sample, _ in train_set.samples].index(str(path))
    return train_set.__getitems__([index])[2][0]


@pytest.mark.parametrize("size", [(24, 24), (60, 30), (30, 60), (7, 7), (3, 90), (25, 24)])
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_an_image_of_any_size_becomes_a_square(images: Path, size: tuple[int, int], ending: str) -> None:
    path = draw(images / "train" / "cat" / f"odd.{ending}", (250, 100, 50), size)
    image = only(images, path)
    assert (image.shape, image.dtype) == ((3, 24, 24), torch.uint8)
    assert (image.float().mean((1, 2)) - torch.tensor([250.0, 100, 50])).abs().max() < 4


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_an_image_in_any_mode_becomes_rgb(images: Path, mode: str) -> None:
    ending = "tiff" if mode == "CMYK" else "png"
    path = images / "train" / "cat" / f"odd.{ending}"
    draw(path, "white", (32, 32), mode)
    assert torch.equal(only(images, path), torch.full((3, 24, 24), 255, dtype=torch.uint8))


def test_of_an_image_that_is_not_square_the_middle_is_taken(images: Path) -> None:
    stripes = Image.new("RGB", (72, 24), "red")
    stripes.paste("lime", (24, 0, 48, 24))
    path = images / "train" / "cat" / "stripes.png"
    stripes.save(path)
    lime = torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1)
    assert torch.equal(only(images, path), lime.expand(3, 24, 24))
    stripes.rotate(90, expand=True).save(path)
    assert torch.equal(only(images, path), lime.expand(3, 24, 24))


def test_odd_images_are_trained_on_by_two_processes_with_two_workers(images: Path, tmp_path: Path) -> None:
    for number, (size, mode) in enumerate(itertools.product([(40, 20), (9, 70)], ["L", "P", "RGBA"])):
        draw(images / "train" / "cat" / f"odd{number}.png", "green", size, mode)
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--output-dir", tmp_path / "out", "--device", "cpu")
    output = train(2, *shared, "--batch-size", 2, "--workers", 2, "--epochs", 2)
    assert "10 training, 4 validation samples; no test set" in output


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize(("w", "h"), [(120, 90), (75, 160), (48, 48), (20, 30)])
@pytest.mark.parametrize("layout", [(), ("--channels-last",)])
def test_an_image_file_is_read_as_torchvision_resizes_and_crops_it(
    tmp_path: Path, ending: str, w: int, h: int, layout: tuple[str, ...]
) -> None:
    """To half a pixel: it cuts out before it resizes, and a large JPEG is decoded at half of its size."""
    coarse = torch.randint(0, 256, (1, 3, 6, 5), generator=torch.Generator().manual_seed(1)).float()
    picture = F.interpolate(coarse, size=(h, w), mode="bicubic").clamp(0, 255).to(torch.uint8)[0]
    (tmp_path / "all").mkdir()
    path = tmp_path / "all" / f"one.{ending}"
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path, quality=95)
    dataset = ImageFiles(tmp_path, build_transforms(options("--image-size=40", *layout)))
    _, _, images = dataset.__getitems__([0])
    expected = pil_to_tensor(center_crop(resize(Image.open(path).convert("RGB"), 40), [40, 40]))
    difference = (images[0].float() - expected.float()).abs()
    assert difference.mean() < 5 and images.shape == (1, 3, 40, 40)
    inputs, _ = dataset.prepare((images, images, images))
    assert inputs.is_contiguous(memory_format=torch.channels_last if layout else torch.contiguous_format)


# ---- the cache of an imagefolder ------------------------------------------------------------------------------------


def cached(images: Path, where: Path) -> tuple[list[Tensor], list[str]]:
    """The images of train and val through --cache `where`; and the names of the files there."""
    train_set, val_set, _ = from_folder(images, "--cache", where)
    parts = [part.prepare(part.__getitems__(range(len(part))))[0] for part in (train_set, val_set)]
    return parts, sorted(path.name for path in where.iterdir() if path.name != ".lock")


def test_a_cache_is_written_once_and_anew_when_an_image_changes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, files = cached(images, tmp_path / "cache")
    assert [name.split("-")[:2] for name in files] == [["train", "32"], ["val", "32"]]
    with monkeypatch.context() as patch:
        patch.setattr(ImageFiles, "read", None)  # nothing is decoded again
        again, same_files = cached(images, tmp_path / "cache")
    assert same_files == files and all(map(torch.equal, first, again))
    draw(images / "train" / "dog" / "1.png", "blue")
    changed, more = cached(images, tmp_path / "cache")
    assert len(more) == 3 and torch.equal(changed[0][:3], first[0][:3]) and torch.equal(changed[1], first[1])
    assert not torch.equal(changed[0][3], first[0][3])


def test_processes_that_start_together_write_one_cache_and_train_from_it(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = image_files._decode

    def decode_and_note(files: ImageFiles, path: Path) -> None:
        with (tmp_path / "decoded").open("a") as file:
            print(path.name, file=file)
        decode(files, path)

    monkeypatch.setattr(image_files, "_decode", decode_and_note)
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--device", "cpu", "--batch-size", 2, "--epochs", 2)
    output = train(2, *shared, "--cache", tmp_path / "cache", "--output-dir", tmp_path / "out")
    decoded = (tmp_path / "decoded").read_text().split()
    assert sorted(decoded) == sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock")
    assert len(decoded) == 2, "train and val, each once"
    plain = train(2, *shared, "--output-dir", tmp_path / "plain")
    results = [re.findall(r"train  .* val(?: \(best\))?  loss \S+  accuracy \S+", text) for text in (output, plain)]
    assert results[0] == results[1] and len(results[0]) == 2, "with the cache it trains to the same"


class Inverted(ImageFiles):
    """Reads images in another way."""

    white = 255

    def read(self, path: str) -> Tensor:
        return self.white - super().read(path)


class Halved(ImageFiles):
    def read(self, path: str) -> Tensor:
        return super().read(path) // 2


class Third(ImageFiles):
    def read(self, path: str) -> Tensor:
        return super().read(path) // 3


def test_a_cache_depends_on_the_class_that_reads_the_images_and_on_their_size(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(kind: type[ImageFiles], size: int, **attributes: int) -> Tensor:
        files = kind(images / "train", build_transforms(options("--image-size", size)))
        vars(files).update(attributes)
        return DecodedFiles(files, tmp_path / "cache").images

    # A subclass is in another file, whose source counts as well; the same image size, the same files.
    plain, inverted, larger = decoded(ImageFiles, 16), decoded(Inverted, 16), decoded(ImageFiles, 17)
    assert torch.equal(inverted, 255 - plain) and larger.shape[2:] == (17, 17)
    assert torch.equal(decoded(Inverted, 16, white=254), 254 - plain), "an attribute counts"
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 4
    monkeypatch.setattr(Inverted, "white", 253)
    assert torch.equal(decoded(Inverted, 16), 253 - plain), "one of the class as well"
    assert torch.equal(decoded(Halved, 16), plain // 2)
    assert torch.equal(decoded(Third, 16), plain // 3), "another class of the same file"


class Mixing(ImageFiles):
    def mix(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.flip(0), targets


class Larger(ImageFiles):
    def read(self, path: str) -> Tensor:
        return super().read(path).repeat(1, 2, 2)


class AtRandom(ImageFiles):
    def read(self, path: str) -> Tensor:
        return torch.randint(0, 255, (3, 16, 16), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Mixing, "--cache would ignore mix of Mixing: define it in a subclass of DecodedFiles"),
        (Larger, r"--cache holds images \[3, 16, 16\] uint8, but Larger.read\(\) returned torch.uint8 \[3, 32, 32\]"),
        (AtRandom, "dataset AtRandom draws random numbers in __getitems__"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused(kind: type[ImageFiles], text: str, images: Path, tmp_path: Path) -> None:
    files = kind(images / "train", build_transforms(options("--image-size", 16)))
    with pytest.raises(UsageError, match=text):
        DecodedFiles(files, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.npy*"))


def test_a_cache_that_is_too_short_is_named(images: Path, tmp_path: Path) -> None:
    cached(images, tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SetupError, match=r"--cache: .*\.npy is damaged \(mmap length .*\): delete it"):
        from_folder(images, "--cache", tmp_path / "cache")


def test_a_cache_depends_on_the_value_range(images: Path, tmp_path: Path) -> None:
    numpy_image = numpy.full((16, 16), 2048, numpy.uint16)
    Image.fromarray(numpy_image).save(images / "train" / "dog" / "1.png")
    chosen = build_transforms(options("--image-size", 16))

    def darkest(value_range: tuple[float, float] | None) -> int:
        files = ImageFiles(images / "train", replace(chosen, value_range=value_range))
        return DecodedFiles(files, tmp_path / "cache").images[3].amax().item()

    assert [darkest(None), darkest((0, 4095)), darkest(None)] == [8, 128, 8]


def test_a_cache_that_exists_is_only_read(images: Path, tmp_path: Path) -> None:
    """It may be on a file system that is read-only: there is nothing to lock."""
    first, _ = cached(images, tmp_path / "cache")
    (tmp_path / "cache" / ".lock").unlink()
    (tmp_path / "cache" / ".lock").mkdir()
    again, _ = cached(images, tmp_path / "cache")
    assert all(map(torch.equal, first, again))


def test_a_cache_is_written_whole_and_what_a_killed_process_left_is_deleted(images: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "train-32-0123456789abcdef.npy.12345-6.ddp.tmp").write_bytes(b"half an arr")
    (cache / "of another program.tmp").write_bytes(b"")
    _, files = cached(images, cache)
    assert [name for name in files if name.endswith(".tmp")] == ["of another program.tmp"] and len(files) == 3


def test_an_image_that_cannot_be_read_leaves_no_cache(images: Path, tmp_path: Path) -> None:
    bad = images / "train" / "dog" / "bad.png"
    bad.write_text("no image")
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--device", "cpu", "--output-dir", tmp_path / "out")
    output = train(1, *shared, "--cache", tmp_path / "cache", code=3)
    assert the_error(output) == f"error: {bad} is not an image that can be read; replace or remove it"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_refused_with_its_folder(images: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SetupError, match=f"--cache {tmp_path / 'cache'}: "):
        from_folder(images, "--cache", tmp_path / "cache")


# ---- order and augmentation -----------------------------------------------------------------------------------------

SAMPLES = 24
NAMES = [str(number) for number in range(600)]  # of classes: each sample has one of its own


def numbered(kind: str, config: Config, folder: Path) -> Any:
    """24 different images, in memory, in files or in the cache of files, whose targets are their numbers."""
    generator = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    if kind == "in memory":
        return ImagesInMemory(pictures, torch.arange(SAMPLES), NAMES, build_transforms(config))
    for number, picture in enumerate(pictures):
        path = folder / "all" / f"{number:02}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
    dataset = ImageFiles(folder, build_transforms(config))
    dataset.classes = NAMES
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    return DecodedFiles(dataset, folder.with_name("cache")) if kind == "in cache" else dataset


Steps = list[dict[int, Tensor]]  # by step: the prepared image [3, h, w] of each sample number


def seen(
    folder: Path, kind: str, world_size: int, *more: Any, epochs: tuple[int, ...] = (0,), samples_consumed: int = 0
):
    """What all ranks together train on, for each of these epochs as Steps."""
    config = options("--device=cpu", "--workers=0", "--batch-size", 12 // world_size, *more)

    def steps_of_rank(ctx: DistContext) -> list[Steps]:
        loader = TrainLoader(numbered(kind, config, folder), config, ctx)
        return [
            [
                {
                    int(target): image
                    for inputs, targets in batches
                    for target, image in zip(targets, inputs, strict=True)
                }
                for batches in loader.steps(epoch, samples_consumed)
            ]
            for epoch in epochs
        ]

    if kind != "in memory":
        numbered(kind, config, folder)  # written once, before the ranks
    ranks = by_rank(world_size, steps_of_rank)
    lengths = [[len(steps) for steps in rank] for rank in ranks]
    assert lengths == [lengths[0]] * world_size
    together: list[Steps] = []
    for epoch in range(len(epochs)):
        together.append([])
        for parts in zip(*(rank[epoch] for rank in ranks), strict=True):
            step = {number: image for part in parts for number, image in part.items()}
            assert len(step) == sum(map(len, parts)) == 12, "a sample is used twice"
            together[-1].append(step)
    return together


def same(ours: Steps, theirs: Steps) -> bool:
    """Whether the same samples are in the same steps, and are the same to the bit."""
    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(torch.equal(one[number], other[number]) for number in one)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Steps]:
    """Epochs 0 and 1, of one process, from memory."""
    return seen(tmp_path_factory.mktemp("none"), "in memory", 1, epochs=(0, 1))


class Standardised(Dataset):
    """A sum of so many numbers depends on the threads that add them up."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        image = torch.rand(3, 224, 224)
        return (image - image.mean()) / image.std()


def test_a_sample_does_not_depend_on_the_number_of_threads() -> None:
    """A worker has one, and a rank that reads by itself has more."""

    def read(_: Any) -> list[bool]:
        torch.set_num_threads(1)
        reader = SeededReader(Standardised(), list, seed=0, epoch=0)
        expected = reader.__getitems__(range(16))
        torch.set_num_threads(4)
        found = SeededReader(Standardised(), list, seed=0, epoch=0).__getitems__(range(16))
        return [torch.equal(*each) for each in zip(expected, found, strict=True)] + [torch.get_num_threads() == 4]

    assert on_ranks(1, read) == [[True] * 17]


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", ["in memory", "in files", "in cache"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_augmentation_do_not_depend_on_processes_or_workers(
    expected: list[Steps], tmp_path: Path, kind: str, world_size: int, workers: int
) -> None:
    found = seen(tmp_path / "images", kind, world_size, "--workers", workers, epochs=(0, 1))
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def test_many_images_are_augmented_alike_without_a_second_form_of_them_in_memory(
    expected: list[Steps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_datasets, "MAX_COPIED_BYTES", 1000)
    found = seen(tmp_path / "images", "in cache", 2, epochs=(0, 1))
    assert same(found[0], expected[0]) and same(found[1], expected[1])


def test_order_and_augmentation_do_not_depend_on_accumulation(expected: list[Steps], tmp_path: Path) -> None:
    found = seen(tmp_path, "in memory", 2, "--batch-size", 2, "--grad-accum-steps", 3)
    assert same(found[0], expected[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["in memory", "in files"])
def test_order_and_augmentation_go_on_after_a_resume(
    expected: list[Steps], tmp_path: Path, kind: str, world_size: int
) -> None:
    found = seen(tmp_path, kind, world_size, "--workers", 2, epochs=(1,), samples_consumed=12)
    assert same(found[0], expected[1][1:])


def test_two_epochs_differ_and_a_repeated_epoch_repeats(tmp_path: Path) -> None:
    zero, one, again = seen(tmp_path, "in memory", 2, epochs=(0, 1, 0))
    assert same(zero, again)
    assert [set(step) for step in zero] != [set(step) for step in one]
    first, second = ({number: image for step in steps for number, image in step.items()} for steps in (zero, one))
    assert first.keys() == second.keys() == set(range(SAMPLES))
    changed = sum(not torch.equal(first[number], second[number]) for number in first)
    assert changed > 0.8 * SAMPLES


def test_batches_made_together_are_those_made_one_by_one_to_the_bit_and_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an awkward size: at a place where no tensor begins, a sum over it might be rounded differently."""
    pictures = torch.randint(0, 256, (50, 3, 31, 31), dtype=torch.uint8)
    config = options("--batch-size=3", "--image-size=31", "--workers=0")

    def batches(ctx: DistContext) -> list[tuple[Tensor, Tensor]]:
        dataset = ImagesInMemory(pictures, torch.arange(50), NAMES, build_transforms(config))
        loader = TrainLoader(dataset, config, ctx)
        assert (dataset.chunk_size > 100) == together
        found = [(inputs, targets) for step in loader.steps(1) for inputs, targets in step]
        assert all(part.data_ptr() % 64 == 0 for batch in found for part in batch)
        return found

    together = True
    (ours,) = by_rank(1, batches)
    together = False
    monkeypatch.setattr(image_datasets, "CHUNK_PIXELS", 0)
    (theirs,) = by_rank(1, batches)
    assert len(ours) == len(theirs) == 16
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_another_seed_gives_another_order_and_another_augmentation(expected: list[Steps], tmp_path: Path) -> None:
    found = seen(tmp_path, "in memory", 1, "--seed", 3)[0]
    assert [set(step) for step in found] != [set(step) for step in expected[0]]
    ours, theirs = (
        {number: image for step in steps for number, image in step.items()} for steps in (found, expected[0])
    )
    assert sum(not torch.equal(ours[number], theirs[number]) for number in ours) > 0.8 * SAMPLES


def test_augmentation_shifts_and_mirrors_and_does_nothing_else() -> None:
    config = options("--dataset=synthetic")
    pictures = torch.randint(0, 256, (400, 3, 32, 32), dtype=torch.uint8)
    dataset = ImagesInMemory(pictures, torch.zeros(400), ["all"], build_transforms(config))
    batch = dataset.__getitems__(list(range(400)))
    plain, _ = dataset.prepare(batch)
    augmented, _ = dataset.prepare(dataset.augment(batch, 4))

    black = (torch.zeros(1, 3, 1, 1) - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    framed = black.expand(400, 3, 36, 36).clone()
    framed[:, :, 2:34, 2:34] = plain
    ways = set()
    explained = torch.zeros(400, dtype=torch.bool)
    for down, right, mirror in itertools.product(range(5), range(5), (False, True)):
        shifted = framed[:, :, down : down + 32, right : right + 32]
        fits = (augmented - (shifted.flip(3) if mirror else shifted)).abs().amax((1, 2, 3)) < 1e-5
        explained |= fits
        ways |= {(down, right, mirror)} if fits.any() else set()
    assert explained.all()
    assert len(ways) == 50


def test_crops_flips_and_normalisation_may_be_changed() -> None:
    pictures = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8)
    plain = replace(build_transforms(options()), mean=(0, 0, 0), std=(1, 1, 1), padding=0, flip=0)

    def seen_in_training(kind: type[ImagesInMemory], **changes: Any) -> Tensor:
        dataset = kind(pictures, torch.arange(50), ["all"], replace(plain, **changes))
        return dataset.prepare(dataset.augment(dataset.__getitems__(list(range(50))), 1))[0]

    Darker = documented_examples({"ImagesInMemory": ImagesInMemory}, 0)["Darker"]

    images = pictures / 255
    assert torch.allclose(seen_in_training(ImagesInMemory), images)
    assert torch.allclose(seen_in_training(ImagesInMemory, flip=1), images.flip(3))
    assert torch.allclose(seen_in_training(Darker, flip=1), (pictures // 2).flip(3) / 255)
    assert torch.allclose(
        seen_in_training(ImagesInMemory, mean=(0.5, 0, 1), std=(2, 3, 4))[:, 0], (images[:, 0] - 0.5) / 2
    )
    padded = seen_in_training(ImagesInMemory, padding=1 / 4)
    assert 0 < (padded[:, :, 0] == 0).all(2).all(1).sum() < 50, "black rows, where an image was moved down"


def test_images_are_normalised_and_evaluation_does_not_augment() -> None:
    config = options("--dataset=synthetic")
    pictures = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8)
    dataset = ImagesInMemory(pictures, torch.arange(9), NAMES, build_transforms(config))

    def evaluated(ctx: DistContext) -> dict[int, Tensor]:
        loader = EvalLoader(dataset, options("--batch-size=2"), ctx)
        return {int(t): image for inputs, targets in loader for t, image in zip(targets, inputs, strict=True)}

    parts = by_rank(2, evaluated)
    together = {**parts[0], **parts[1]}
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    for number, picture in enumerate(pictures):
        assert torch.allclose(together[number], (picture / 255 - mean) / std, atol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("place", ["on the GPU", "too many for it", "in a worker"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_on_the_gpu_also_if_the_images_stay_in_host_memory(
    place: str, copied: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fake tensors, which have a device and no content: they need no GPU, and refuse to mix devices."""
    monkeypatch.setattr(image_datasets, "MAX_COPIED_BYTES", 1 << 30 if copied else 0)
    free = 1 << 40 if place == "on the GPU" else 100
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    transforms = build_transforms(options("--image-size=40", *(["--channels-last"] if channels_last else [])))

    def check(ctx: DistContext) -> None:
        with FakeTensorMode():
            dataset = ImagesInMemory(torch.zeros(9, 3, 32, 32).to(torch.uint8), torch.zeros(9), ["all"], transforms)
            if place == "in a worker":  # which does not know the device
                monkeypatch.setattr(image_datasets, "get_worker_info", object)
            else:
                dataset.to(torch.device("cuda"))
            assert dataset.images.device.type == ("cuda" if place == "on the GPU" else "cpu")
            batch = dataset.__getitems__([3, 1])
            assert {part.device.type for part in batch} == {"cpu"}, "the loader copies them, without a synchronisation"
            batch = [part.to("cuda") for part in batch]
            for prepared in (dataset.prepare(batch), dataset.prepare(dataset.augment(batch, 0))):
                assert [part.device.type for part in prepared] == ["cuda", "cuda"]
                assert [part.shape for part in prepared] == [(2, 3, 40, 40), (2,)]

    by_rank(1, check)  # in a process of its own: torch then believes that there are GPUs


# ---- the sampler ----------------------------------------------------------------------------------------------------


# ---- dictionaries ---------------------------------------------------------------------------------------------------


class Tokens(Dataset):
    """As tokenizers give them: dictionaries, with something in them that is no tensor; the target is the sum."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Tensor]:
        text = torch.tensor([float(index), 1.0, 5.0])
        return {"text": text, "mask": torch.tensor([1.0, 1.0, 0.0]), "source": f"line {index}"}, text[:2].sum()


class Graph:
    """No tensor, but it can follow one."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        self.device = device
        return self


class WholeTokens(Tokens, BatchDataset):
    """The same, by whole batches, which become inputs and targets on the device."""

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        pairs = [self[index] for index in indices]
        parts = {name: torch.stack([inputs[name] for inputs, _ in pairs]) for name in ("text", "mask")}
        others = {"source": [inputs["source"] for inputs, _ in pairs], "graph": Graph()}
        return {**parts, **others, "sum": torch.stack([y for _, y in pairs])}

    def prepare(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        assert batch.pop("graph").device.type == "cpu"
        return batch, batch.pop("sum")


class Sum(nn.Module):
    """A sum with weights, over what the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3))

    def forward(self, text: Tensor, mask: Tensor, source: Sequence[str] = ()) -> Tensor:
        assert all(name.startswith("line ") for name in source)
        return (self.weights * text * mask).sum(1)


class TokensInChunks(WholeTokens):
    """The same, several batches together, which are cut up again."""

    chunk_size = 16

    def prepare(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        assert len(batch["text"]) == 16
        return super().prepare({name: part for name, part in batch.items() if name != "source"})


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Tokens, WholeTokens, TokensInChunks])
def test_a_dictionary_of_inputs_becomes_keyword_arguments(
    kind: type[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        correct = ((outputs - targets).abs() < 1).sum()
        return {"loss": loss.detach() * len(targets), "count": len(targets), "correct": correct}

    for module in (main, benchmark):
        monkeypatch.setattr(module, "load_datasets", lambda config: Datasets(kind(), kind()))
    for module in (main.task, benchmark):
        monkeypatch.setattr(module, "build_model", lambda config, train_set: Sum())
        monkeypatch.setattr(module, "compute_loss", lambda outputs, targets, config: F.l1_loss(outputs, targets))
    monkeypatch.setattr(main.task, "batch_totals", batch_totals)
    options = ("--batch-size", "4", "--lr", "1e-3", "--device", "cpu")
    train(2, *options, "--epochs", 5, "--output-dir", tmp_path)
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["count"] == 64 and last["loss"] < 5, "32 without weights"

    def kinds(ctx: DistContext) -> list[str]:
        return [row.kind for row in benchmark._round(benchmark.Task(Config.parse(options)), ctx, seconds=0.001)]

    assert on_ranks(2, kinds)[0] == [WEAK, NO_SYNC, DATA, STRONG]


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("samples", "tests", "world_size", "batch"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (3, 1, 3, 1), (7, 2, 3, 2), (9, 7, 2, 4), (10, 3, 2, 5), (11, 100, 3, 3)],
)
def test_a_run_ends_well_with_any_numbers_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, tests: int, world_size: int, batch: int
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": samples, "val": tests})
    shared = ("--dataset=synthetic", "--device=cpu", "--output-dir", tmp_path, "--timeout=60", "--log-every=1")
    train(world_size, *shared, "--batch-size", batch, "--epochs", 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["count"] for line in lines if line["split"] == "val"] == [tests, tests]
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert steps == list(range(1, 2 * (samples // (world_size * batch)) + 1))


@fault(19)
@pytest.mark.parametrize(("world_size", "batch", "passes"), [(1, 8, 1), (1, 4, 2), (2, 4, 1)])
def test_a_run_that_would_take_no_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, batch: int, passes: int
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 7, "val": 5})
    shared = ("--dataset=synthetic", "--device=cpu", "--output-dir", tmp_path)
    output = train(world_size, *shared, "--batch-size", batch, "--grad-accum-steps", passes, code=2)
    message = the_error(output)
    assert "7 training samples do not fill one step of 8" in message
    assert f"--batch-size {batch} x --grad-accum-steps {passes}" in message


@fault(17)
def test_processes_that_find_different_data_are_told_at_once(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two machines do, when one has the whole dataset and the other a part."""

    def load_datasets(config: Config) -> Datasets:
        return Datasets(Numbers(100 if next(machine) == 0 else 50), Numbers(7))

    class Machine:
        """0 in the process that comes first, 1 in the other."""

        def __next__(self) -> int:
            try:
                (tmp_path / "first").touch(exist_ok=False)
                return 0
            except FileExistsError:
                return 1

    machine = Machine()
    monkeypatch.setattr(main, "load_datasets", load_datasets)
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(2, 100))
    output = train(2, "--device=cpu", "--workers=0", "--timeout=60", "--output-dir", tmp_path / "out", code=3)
    message = the_error(output)
    assert "100" in message
    assert "50" in message


# ---- other datasets -------------------------------------------------------------------------------------------------


@fault(50)
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_worker_that_stands_still_in_its_fork_is_killed_and_all_are_started_again(
    tmp_path: Path, evaluates: bool
) -> None:
    """As Python before 3.10.15 and 3.11.10 may; torch alone would wait for it without end.

    An evaluation lost the batches that were to be read by then, and the ranks called different collectives.
    """

    before = len(multiprocessing.active_children())  # of this process; its ranks count them as well

    def stand_still_once() -> None:
        if len(multiprocessing.active_children()) == before + 1 and not (tmp_path / "stuck").exists():
            (tmp_path / "stuck").write_text(str(os.getpid()))
            time.sleep(600)

    def result(ctx: DistContext) -> Any:
        ddp.data.workers.START_TIMEOUT_S = 3.0
        os.register_at_fork(after_in_child=stand_still_once)
        found = []
        for workers in (2, 0):
            arguments = Numbers(17), options("--batch-size=4", "--workers", workers), ctx
            batches = (
                EvalLoader(*arguments) if evaluates else itertools.chain.from_iterable(TrainLoader(*arguments).steps(0))
            )
            found.append([batch[1].tolist() for batch in batches])
        return found

    [(found, expected)] = on_ranks(1, result, "--device=cpu")
    assert found == expected and len(found) == 4 + evaluates
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "stuck").read_text()), 0)


def test_a_program_may_leave_an_epoch_before_its_end() -> None:
    """Workers ignore SIGTERM, by which multiprocessing ends them when a program exits, and then waits."""
    kept = []

    def leave_an_epoch() -> None:
        kept.append(start_workers(DataLoader(Numbers(17), 4, num_workers=2)))
        next(kept[0].batches)

    program = multiprocessing.get_context("fork").Process(target=leave_an_epoch)
    program.start()
    program.join(60)
    ended, left = program.exitcode, psutil.Process(program.pid).children() if program.is_alive() else []
    for process in [*left, program]:
        process.kill()
    program.join()
    assert ended == 0


class Unsendable(Numbers):
    """A sample holds what no process can send to another one."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return (lambda: index), index


def test_a_batch_that_a_worker_cannot_send_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch alone prints a traceback in the worker, and waits for that batch without end."""
    dataset = type("Listed", (Unsendable, BatchDataset), {"collate": lambda self, samples: (samples, [0])})(8)
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(dataset))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(2, 16))
    output = train(1, "--device=cpu", "--batch-size=4", "--workers=1", "--output-dir", tmp_path / "out", code=1)
    assert "in DataLoader worker process 0" in output and "pickle" in output


class Traced(BatchDataset):
    """Eight samples; notes what happens to their batches. Something in them is no tensor, and can be moved."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> tuple[Any, ...]:
        self.events.append(("read", len(indices)))
        return torch.tensor(indices), self

    def to(self, device: torch.device, non_blocking: bool = False) -> Traced:  # type: ignore[override]
        self.events.append("move")
        return self

    def augment(self, batch: Any, epoch: int) -> Any:
        self.events.append(("augment", epoch))
        return batch

    def prepare(self, batch: Any) -> Any:
        self.events.append("prepare")
        return batch[0].float(), batch[0]


class TracedInChunks(Traced):
    chunk_size = 5


def test_a_batch_is_read_moved_augmented_prepared_and_split() -> None:
    def traced(ctx: DistContext) -> list[Any]:
        found: list[Any] = []
        for dataset in (Traced(), Subset(Traced(), range(8)), TracedInChunks()):
            inner = dataset.dataset if isinstance(dataset, Subset) else dataset
            config = options("--batch-size=2", "--workers=0")
            for _, targets in next(TrainLoader(dataset, config, ctx).steps(epoch=3)):
                found.append([*inner.events, len(targets)])
            inner.events.clear()
            for _, targets in EvalLoader(dataset, config, ctx):
                found.append([*inner.events, len(targets)])
                break
        return found

    (found,) = by_rank(1, traced)
    checks = [("read", 1)] * 2  # whether it returns the same
    train_step = [*checks, ("read", 2), "move", ("augment", 3), "prepare", 2]
    eval_step = [*checks, ("read", 2), "move", "prepare", 2]
    chunks = (
        [*checks, ("read", 4), "move", ("augment", 3), "prepare", 2],
        [*checks, ("read", 4), "move", "prepare", 4],
    )
    assert found == [train_step, eval_step, train_step, eval_step, *chunks]


SUBCLASS = "subclass ddp.data.dataset.BatchDataset, or give it another name if it is no hook"


class Hook(Dataset):
    """A plain dataset, to which a test adds one of the hooks."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), index


@pytest.mark.parametrize("name", ["augment", "prepare", "chunk_size", "train_chunk_size", "in_memory", "to"])
@pytest.mark.parametrize("loader", [TrainLoader, EvalLoader])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_plain_dataset_with_a_hook_is_refused(name: str, loader: Any, wrapped: bool) -> None:
    dataset = type("Mine", (Hook,), {name: None})()
    with pytest.raises(UsageError) as raised:
        loader(Subset(dataset, range(4)) if wrapped else dataset, options("--batch-size=2"), ctx=None)
    assert str(raised.value) == f"dataset Mine has {name}: {SUBCLASS}"


def test_a_run_on_a_plain_dataset_with_a_hook_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = type("Mine", (Numbers,), {"prepare": lambda self, batch: batch})(8)
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(dataset, Numbers(7)))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(2, 16))
    output = train(2, "--device=cpu", "--batch-size=4", "--output-dir", tmp_path / "out", code=2)
    assert the_error(output) == f"error: dataset Mine has prepare: {SUBCLASS}"


class PreparedNoise(Noise, BatchDataset):
    """A BatchDataset that has no __getitems__ of its own: read sample by sample, and then prepared as a batch."""

    def augment(self, batch: Any, epoch: int) -> Any:
        return batch[0] + epoch, batch[1]

    def prepare(self, batch: Any) -> Any:
        return 10 * batch[0], batch[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_with_random_numbers_are_seeded_by_sample_and_epoch(workers: int) -> None:
    """Also those of a BatchDataset. `test_loader.py` has those of plain datasets, with other ranks and workers."""

    def samples(dataset: Dataset) -> Callable[[DistContext], dict[int, list[float]]]:
        def of_rank(ctx: DistContext) -> dict[int, list[float]]:
            loader = TrainLoader(dataset, options("--batch-size=2", "--workers", workers), ctx)
            return {
                int(i): x.tolist() for step in loader.steps(2) for xs, ys in step for x, i in zip(xs, ys, strict=True)
            }

        return of_rank

    (alone,) = by_rank(1, samples(Noise(16)))
    (prepared,) = by_rank(1, samples(PreparedNoise(16)))
    assert prepared == {number: pytest.approx([10 * (x + 2) for x in values]) for number, values in alone.items()}
    (part,) = by_rank(1, samples(Subset(PreparedNoise(16), range(16))))
    assert part == prepared


def test_torchvisions_own_transforms_work_as_data_py_shows_them(images: Path) -> None:
    """The same for any number of processes and workers."""
    config = options("--data-dir", images, "--image-size=24", "--batch-size=1", "--device=cpu")
    names = documented_examples({"config": config, "MEAN": MEAN, "STD": STD, "Datasets": Datasets}, 1)

    def samples(workers: int) -> Callable[[DistContext], list[Any]]:
        def of_rank(ctx: DistContext) -> list[Any]:
            loader = TrainLoader(names["train_set"], replace(config, workers=workers), ctx)
            return [(inputs.shape, inputs.sum().item()) for step in loader.steps(1) for inputs, _ in step]

        return of_rank

    for number in range(4):
        colors = numpy.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        Image.fromarray(colors).save(sorted((images / "train").rglob("*.png"))[number])
    (alone,) = by_rank(1, samples(0))
    assert len(set(alone)) == 4 and {shape for shape, _ in alone} == {(1, 3, 24, 24)}
    assert sorted(sample for rank in by_rank(2, samples(2)) for sample in rank) == sorted(alone)
    inputs, targets = next(iter(names["val_set"]))
    assert inputs.shape == (3, 24, 24) and targets == 0 and names["train_set"].classes == ["cat", "dog"]


def test_the_name_of_the_data_is_that_of_the_dataset_or_its_class() -> None:
    class Named(Numbers):
        name = "my numbers"

    class NamedBatches(Tokens, BatchDataset):
        name = "my batches"

    datasets = Named(8), NamedBatches(), Subset(NamedBatches(), range(8)), Numbers(8)
    assert [*map(data_name, datasets)] == ["my numbers", "my batches", "my batches", "Numbers"]


def test_a_loader_needs_the_options_of_every_run_alone() -> None:
    read = lambda ctx: len(TrainLoader(Numbers(8), RunConfig(batch_size=2, workers=0), ctx).sampler)  # noqa: E731
    assert by_rank(1, read) == [8]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_has_only_getitem_is_batched(workers: int) -> None:
    def batches_of_rank(ctx: DistContext) -> list[tuple[Tensor, Tensor]]:
        loader = TrainLoader(Numbers(17), options("--batch-size=4", "--workers", workers), ctx)
        return [batch for batches in loader.steps(0) for batch in batches]

    ranks = by_rank(2, batches_of_rank)
    for inputs, targets in itertools.chain(*ranks):
        assert (inputs.shape, inputs.dtype, targets.dtype) == ((4, 2), torch.float32, torch.int64)
        assert torch.equal(inputs[:, 0], targets.float())
    numbers = [int(number) for rank in ranks for _, targets in rank for number in targets]
    assert len(numbers) == len(set(numbers)) == 16


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8)), id="TensorDataset"),
        pytest.param(lambda: Subset(Numbers(20), range(8)), id="Subset"),
        pytest.param(lambda: random_split(Numbers(20), [8, 12])[0], id="random_split"),
        pytest.param(lambda: Subset(TensorDataset(torch.zeros(9, 2), torch.zeros(9)), range(8)), id="both"),
    ],
)
def test_the_datasets_of_torch_are_batched(make: Callable[[], Dataset]) -> None:
    def batches_of_rank(ctx: DistContext) -> list[list[int]]:
        loader = TrainLoader(make(), options("--batch-size=4", "--workers=0"), ctx)
        return [list(targets.shape) for batches in loader.steps(0) for _, targets in batches]

    assert by_rank(1, batches_of_rank) == [[[4], [4]]]


def test_a_part_of_the_images_is_still_prepared(small: None) -> None:
    def batches_of_rank(ctx: DistContext) -> list[torch.dtype]:
        whole, *_ = data.load_datasets(options("--dataset=synthetic"))
        loader = TrainLoader(Subset(whole, range(64)), options("--batch-size=32", "--workers=0"), ctx)
        return [inputs.dtype for batches in loader.steps(0) for inputs, targets in batches]

    assert by_rank(1, batches_of_rank) == [[torch.float32] * 2]


def test_another_dataset_and_model_are_trained_without_a_change_to_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Numbers(16), Numbers(7)))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(2, 16))
    output = train(2, "--device=cpu", "--workers=0", "--batch-size=4", "--epochs=2", "--output-dir", tmp_path)
    assert "16 training, 7 validation samples; no test set" in output


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_takes_images_in_memory_as_they_are_made_many_at_once() -> None:
    config = options("--dataset=synthetic", "--batch-size=16")
    images = torch.zeros(600, 3, 32, 32, dtype=torch.uint8)
    dataset = ImagesInMemory(images, torch.arange(600), NAMES, build_transforms(config))

    def sizes(ctx: DistContext) -> tuple[list[int], list[int]]:
        training = next(TrainLoader(dataset, config, ctx).steps(0))
        return [len(targets) for _, targets in EvalLoader(dataset, config, ctx)], [len(t) for _, t in training]

    assert by_rank(1, sizes) == [([256, 256, 88], [16])]
    assert by_rank(2, sizes) == [([256, 88], [16]), ([256], [16])], "the same batches, which the ranks share"


def test_a_stop_is_raised_in_an_evaluation_on_every_rank_after_the_same_batch() -> None:
    def evaluated(ctx: DistContext) -> tuple[int, int | None]:
        batches = 0
        if ctx.rank == 1:
            stop_signal.mark_requested(signal.SIGTERM)
        try:
            for _ in EvalLoader(Numbers(101), options("--batch-size=2", "--workers=0"), ctx):
                batches += 1
        except StopRequested as request:
            return batches, request.decision.reason
        return batches, None

    assert by_rank(2, evaluated) == [(1, signal.SIGTERM)] * 2


def test_images_on_a_gpu_are_prepared_in_larger_chunks_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has no content takes the place of one: an evaluation runs the model on whole chunks.

    Its chunks are the same on a rank whose GPU has less free memory, also if one object is two sets.
    """
    config = options("--batch-size=16", "--workers=0")
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)

    def chunks(ctx: DistContext) -> list[int]:
        free = (1 << 40, 100)[ctx.rank]
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        pictures, targets = torch.zeros(500, 3, 32, 32, dtype=torch.uint8), torch.zeros(500, dtype=torch.long)
        both = ImagesInMemory(pictures, targets, NAMES, build_transforms(config))
        on_gpu: Any = SimpleNamespace(**vars(ctx) | {"device": torch.device("cuda")}, check_same=ctx.check_same)
        sizes = [TrainLoader(both, config, each).chunk_size for each in (ctx, on_gpu)]
        return [*sizes, *(EvalLoader(both, config, on_gpu).chunk_size for _ in range(2))]

    assert by_rank(2, chunks) == [[256, 4096, 256, 256], [256, 256, 256, 256]]


class BatchNumbers(Numbers, BatchDataset): ...


def test_evaluating_ranks_with_batches_of_different_sizes_are_refused() -> None:
    """They take turns with batches: some samples would count twice."""

    def evaluated(ctx: DistContext) -> str:
        dataset = BatchNumbers(100)
        dataset.chunk_size = 8 * (1 + ctx.rank)
        try:
            EvalLoader(dataset, options("--batch-size=2", "--workers=0"), ctx)
        except SetupError as error:
            return str(error)
        return "not refused"

    line = "the number of validation samples in a batch is 8 on rank 0 and 16 on rank 1: start all ranks with the same"
    assert [text.startswith(line) for text in by_rank(2, evaluated)] == [True, True]
