"""Data: where they come from, what is wrong with them, and which process sees which sample, in which order."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import socket
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import benchmark
import numpy
import pytest
import torch
import torch._dynamo  # DDP imports it, in a second: here, once, before the ranks are forked
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils import tensorboard  # noqa: F401  the same
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset, random_split
from torchvision.datasets import CIFAR10
from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

import data
import ddp.workers
import main
from config import Config, parse
from data import MEAN, STD, ImageFiles, ImagesInMemory
from ddp.errors import EnvironmentFailure, UsageError
from ddp.group import Group
from ddp.loader import ResumableSampler, TestLoader, TrainLoader
from ddp.speeds import DATA, SILENT, STRONG, WEAK
from faults import fault
from processes import on_ranks, train


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: a second thread would only wait for a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def options(*words: Any) -> Config:
    return parse([str(word) for word in words])


def the_error(output: str) -> str:
    """The one line of an error; fails if there is more than it, or a traceback."""
    errors = [line for line in output.splitlines() if "error:" in line.lower()]
    assert len(errors) == 1, output
    assert "Traceback" not in output
    assert errors[0].startswith("error: ")
    return errors[0]


def by_rank(world_size: int, function: Callable[[Group], Any]) -> list[Any]:
    """What `function` returns on each rank. None leaves before all are done: others may still be connecting to it."""

    def and_wait(group: Group) -> Any:
        result = function(group)
        group.gather(None)
        return result

    return on_ranks(world_size, and_wait, "--device=cpu", "--timeout=60")


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
@pytest.mark.slow
def test_four_processes_started_together_download_once(
    cifar10: Callable[..., FakeCifar10], template: Path, tmp_path: Path
) -> None:
    fake = cifar10("slow")
    wrapper = (
        "import json, runpy, sys; sys.path.insert(0, sys.argv.pop(1)); known = json.loads(sys.argv.pop(1))\n"
        "from torchvision.datasets import CIFAR10\n"
        "for name, value in known.items(): setattr(CIFAR10, name, value)\n"
        "runpy.run_path(sys.path[0] + '/main.py', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", wrapper, str(template), json.dumps({**fake.knowledge, "url": CIFAR10.url})]
    command += [
        "--data-dir",
        str(fake.root),
        "--batch-size",
        "2",
        "--max-steps",
        "1",
        "--device",
        "cpu",
        "--timeout",
        "60",
    ]
    command += ["--output-dir", str(tmp_path / "out"), "--world-size", "4", "--init-method", f"file://{tmp_path}/meet"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(4)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(outputs)
    assert "cifar10: 40 training samples, 6 test samples" in outputs[0]
    assert fake.downloads() == 1


def test_cifar10_is_read_as_torchvision_reads_it(cifar10: Callable[..., FakeCifar10]) -> None:
    fake = cifar10(None)
    fake.unpack()
    train_set, test_set = data.load_datasets(options("--data-dir", fake.root))
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
    assert "cifar10: 40 training samples, 6 test samples" in fake.train()


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
    train_set, test_set = data.load_datasets(options("--dataset", "synthetic"))
    for dataset, length in ((train_set, 10_000), (test_set, 2_000)):
        assert (dataset.images.shape, dataset.images.dtype) == ((length, 3, 32, 32), torch.uint8)
        assert (dataset.targets.shape, dataset.targets.dtype) == ((length,), torch.int64)
        assert set(dataset.targets.tolist()) == set(range(10))
    assert len(train_set.classes) == 10
    assert not torch.equal(train_set.images[:2000], test_set.images)


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


def from_folder(folder: Path, *more: Any) -> tuple[Any, Any]:
    return data.load_datasets(options("--dataset", "imagefolder", "--data-dir", folder, *more))


def refusal(folder: Path) -> str:
    with pytest.raises(EnvironmentFailure) as raised:
        from_folder(folder)
    assert raised.value.exit_code == 3
    return str(raised.value)


@pytest.mark.parametrize("name", ["val", "test"])
def test_an_image_folder_has_train_and_val_or_test(images: Path, name: str) -> None:
    draw(images / "train" / "cat" / "blue.png", "blue")
    (images / "val").rename(images / name)
    train_set, test_set = from_folder(images)
    assert (len(train_set), len(test_set)) == (5, 4)
    assert train_set.classes == test_set.classes == ["cat", "dog"]
    targets, _, pictures = train_set.__getitems__([0, 2, 4])
    assert targets.tolist() == [0, 0, 1]
    assert pictures[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]


def test_a_run_on_a_folder_that_is_not_there_ends_with_one_line(tmp_path: Path) -> None:
    where = tmp_path / "nowhere"
    shared = ("--dataset", "imagefolder", "--data-dir", where, "--output-dir", tmp_path / "out", "--device", "cpu")
    output = train(1, *shared, code=3)
    assert output == f"error: --data-dir {where}: needs train/CLASS/* and val/CLASS/* or test/CLASS/* in it\n"
    assert not (tmp_path / "out").exists()


@fault(31)
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_folder_without_one_part_is_refused_by_name(images: Path, part: str) -> None:
    (images / part).rename(images / "other")
    assert refusal(images).startswith(f"--data-dir {images}: needs train/CLASS/* and val/CLASS/*")


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
    """A PNG whose header is whole, says its checksum, but of 5 bytes."""
    raw = path.read_bytes()
    header = b"IHDR" + raw[16:21]
    path.write_bytes(raw[:8] + struct.pack(">I", 5) + header + struct.pack(">I", zlib.crc32(header)) + raw[33:])


def claim_a_huge_size(path: Path) -> None:
    """A BMP that says that it has 50000 x 50000 pixels, which Pillow takes for an attack."""
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
        pytest.param("png", lambda path: (path.unlink(), path.symlink_to("nothing")), id="a link to nothing"),
        pytest.param("png", shorten_header, id="PNG with a short header"),
        pytest.param("bmp", claim_a_huge_size, id="BMP of a huge size"),
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


def only(folder: Path, path: Path) -> Tensor:
    """The image at `path` as the dataset gives it: [3, h, w]."""
    train_set, _ = from_folder(folder, "--image-size", 24)
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
    assert "10 training samples, 4 test samples" in output


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
    dataset = ImageFiles(options("--image-size=40", *layout), tmp_path)
    _, _, images = dataset.__getitems__([0])
    expected = pil_to_tensor(center_crop(resize(Image.open(path).convert("RGB"), 40), [40, 40]))
    difference = (images[0].float() - expected.float()).abs()
    assert difference.mean() < 5 and images.shape == (1, 3, 40, 40)
    inputs, _ = dataset.prepare((images, images, images))
    assert inputs.is_contiguous(memory_format=torch.channels_last if layout else torch.contiguous_format)


# ---- the cache of an imagefolder ------------------------------------------------------------------------------------


def cached(images: Path, where: Path) -> tuple[list[Tensor], list[str]]:
    """The images of train and val through --cache `where`; and the names of the files there."""
    parts = [part.prepare(part.__getitems__(range(len(part))))[0] for part in from_folder(images, "--cache", where)]
    return parts, sorted(path.name for path in where.iterdir() if path.name != ".lock")


def test_a_cache_is_written_once_and_anew_when_an_image_changes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, files = cached(images, tmp_path / "cache")
    assert [name.split("-")[:2] for name in files] == [["train", "32"], ["val", "32"]]
    with monkeypatch.context() as patch:
        patch.setattr(ImageFiles, "_read", None)  # nothing is decoded again
        again, same_files = cached(images, tmp_path / "cache")
    assert same_files == files and all(map(torch.equal, first, again))
    draw(images / "train" / "dog" / "1.png", "blue")
    changed, more = cached(images, tmp_path / "cache")
    assert len(more) == 3 and torch.equal(changed[0][:3], first[0][:3]) and torch.equal(changed[1], first[1])
    assert not torch.equal(changed[0][3], first[0][3])


def test_processes_that_start_together_write_one_cache_and_train_from_it(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = data._decode

    def decode_and_note(files: ImageFiles, path: Path) -> None:
        with (tmp_path / "decoded").open("a") as file:
            print(path.name, file=file)
        decode(files, path)

    monkeypatch.setattr(data, "_decode", decode_and_note)
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--device", "cpu", "--batch-size", 2, "--epochs", 2)
    output = train(2, *shared, "--cache", tmp_path / "cache", "--output-dir", tmp_path / "out")
    decoded = (tmp_path / "decoded").read_text().split()
    assert sorted(decoded) == sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock")
    assert len(decoded) == 2, "train and val, each once"
    plain = train(2, *shared, "--output-dir", tmp_path / "plain")
    results = [re.findall(r"test   .*", text) for text in (output, plain)]
    assert results[0] == results[1] and len(results[0]) == 2, "with the cache it trains to the same"


def test_an_image_that_cannot_be_read_leaves_no_cache(images: Path, tmp_path: Path) -> None:
    bad = images / "train" / "dog" / "bad.png"
    bad.write_text("no image")
    shared = ("--dataset", "imagefolder", "--data-dir", images, "--device", "cpu", "--output-dir", tmp_path / "out")
    output = train(1, *shared, "--cache", tmp_path / "cache", code=3)
    assert the_error(output) == f"error: {bad} is not an image that can be read; replace or remove it"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_refused_with_its_folder(images: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EnvironmentFailure, match=f"--cache {tmp_path / 'cache'}: "):
        from_folder(images, "--cache", tmp_path / "cache")


# ---- order and augmentation -----------------------------------------------------------------------------------------

SAMPLES = 24


def numbered(kind: str, config: Config, folder: Path) -> Any:
    """24 different images, in memory, in files or in the cache of files, whose targets are their numbers."""
    generator = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    if kind == "in memory":
        return ImagesInMemory(config, pictures, torch.arange(SAMPLES), ["all"])
    for number, picture in enumerate(pictures):
        path = folder / "all" / f"{number:02}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
    dataset = ImageFiles(config, folder)
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    return data._cached(dataset, folder.with_name("cache"), "train") if kind == "in cache" else dataset


Steps = list[dict[int, Tensor]]  # by step: the prepared image [3, h, w] of each sample number


def seen(folder: Path, kind: str, world_size: int, *more: Any, epochs: tuple[int, ...] = (0,), position: int = 0):
    """What all ranks together train on, for each of these epochs as Steps."""
    config = options("--device=cpu", "--workers=0", "--batch-size", 12 // world_size, *more)

    def steps_of_rank(group: Group) -> list[Steps]:
        loader = TrainLoader(numbered(kind, config, folder), config, group)
        return [
            [
                {
                    int(target): image
                    for inputs, targets in batches
                    for target, image in zip(targets, inputs, strict=True)
                }
                for batches in loader.steps(epoch, position)
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
    monkeypatch.setattr(data, "MOST_FRAMED", 1000)
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
    found = seen(tmp_path, kind, world_size, "--workers", 2, epochs=(1,), position=12)
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

    def batches(group: Group) -> list[tuple[Tensor, Tensor]]:
        dataset = ImagesInMemory(config, pictures, torch.arange(50), ["all"])
        loader = TrainLoader(dataset, config, group)
        assert (dataset.at_once > 100) == together
        found = [(inputs, targets) for step in loader.steps(1) for inputs, targets in step]
        assert all(part.data_ptr() % 64 == 0 for batch in found for part in batch)
        return found

    together = True
    (ours,) = by_rank(1, batches)
    together = False
    monkeypatch.setattr(data, "PIXELS_AT_ONCE", 0)
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
    dataset = ImagesInMemory(config, pictures, torch.zeros(400), ["all"])
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


def test_images_are_normalised_and_evaluation_does_not_augment() -> None:
    config = options("--dataset=synthetic")
    pictures = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8)
    dataset = ImagesInMemory(config, pictures, torch.arange(9), ["all"])

    def evaluated(group: Group) -> dict[int, Tensor]:
        loader = TestLoader(dataset, options("--batch-size=2"), group)
        return {int(t): image for inputs, targets in loader for t, image in zip(targets, inputs, strict=True)}

    parts = by_rank(2, evaluated)
    together = {**parts[0], **parts[1]}
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    for number, picture in enumerate(pictures):
        assert torch.allclose(together[number], (picture / 255 - mean) / std, atol=1e-5)


# ---- the sampler ----------------------------------------------------------------------------------------------------


def sampled(
    samples: int, world_size: int, global_batch: int, epoch: int, position: int, seed: int = 0
) -> list[list[int]]:
    """Which samples each rank is given from `position` on."""
    found = []
    for rank in range(world_size):
        sampler = ResumableSampler(Numbers(samples), rank, world_size, global_batch, seed)
        sampler.set_position(epoch, position)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1]) == sampler.steps_left(position) * global_batch // world_size
    return found


@pytest.mark.parametrize(("samples", "world_size", "batch"), [(96, 1, 8), (96, 2, 8), (96, 3, 4), (60, 4, 5)])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_at_the_start_of_an_epoch_the_order_is_that_of_distributed_sampler(
    samples: int, world_size: int, batch: int, epoch: int
) -> None:
    for rank, ours in enumerate(sampled(samples, world_size, world_size * batch, epoch, 0, seed=3)):
        theirs: Any = DistributedSampler(Numbers(samples), world_size, rank, seed=3, drop_last=True)
        theirs.set_epoch(epoch)
        assert ours == list(theirs)


def test_all_ranks_are_given_the_same_number_of_samples_from_any_position() -> None:
    for samples, world_size, batch in itertools.product((1, 5, 16, 97, 100), (1, 2, 3, 5), (1, 3, 4)):
        global_batch = world_size * batch
        for position in range(0, samples + 1, 3):
            parts = sampled(samples, world_size, global_batch, 1, position)
            assert {len(part) for part in parts} == {(samples - position) // global_batch * batch}


def test_after_any_changes_of_the_number_of_processes_no_sample_comes_twice() -> None:
    choose = random.Random(0)
    for _ in range(100):
        samples, position, used = choose.randrange(1, 200), 0, []
        for world_size in choose.choices((1, 2, 3, 5, 8), k=3):
            batch = choose.randrange(1, 6)
            global_batch = world_size * batch
            parts = sampled(samples, world_size, global_batch, 2, position)
            left = len(parts[0]) // batch
            steps = left if world_size == 1 else choose.randint(0, left)
            used += [index for part in parts for index in part[: steps * batch]]
            position += steps * global_batch
        assert len(used) == len(set(used)) == position
        whole = sampled(samples, 1, 1, 2, 0)[0]
        assert set(used) == set(whole[:position])  # so at the end only the last ones are missing


def test_resumed_from_2_processes_to_3_then_to_1_each_sample_comes_once() -> None:
    """101 samples, 4 a process: 3 steps of 8, 2 of 12, 13 of 4 leave 1, which fills no step."""
    numbers = Numbers(101)

    def part(world_size: int, position: int, steps: int) -> list[int]:
        def trained_on(group: Group) -> list[int]:
            loader = TrainLoader(numbers, options("--batch-size=4", "--workers=0"), group)
            batches = itertools.chain(*itertools.islice(loader.steps(3, position), steps))
            return [int(number) for _, targets in batches for number in targets]

        return [number for rank in by_rank(world_size, trained_on) for number in rank]

    used = part(2, 0, 3) + part(3, 24, 2) + part(1, 48, 1000)
    assert len(used) == len(set(used)) == 100
    assert set(used) <= set(range(101))


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


class WholeTokens(Tokens):
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

    def forward(self, batch: dict[str, Any]) -> Tensor:
        assert all(name.startswith("line ") for name in batch.get("source", []))
        return (self.weights * batch["text"] * batch["mask"]).sum(1)


class TokensAtOnce(WholeTokens):
    """The same, several batches together, which are cut up again."""

    at_once = 16

    def prepare(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        assert len(batch["text"]) == 16
        return super().prepare({name: part for name, part in batch.items() if name != "source"})


@pytest.mark.parametrize("kind", [Tokens, WholeTokens, TokensAtOnce])
def test_inputs_may_be_a_dictionary(kind: type[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        correct = ((outputs - targets).abs() < 1).sum()
        return {"loss": loss.detach() * len(targets), "count": len(targets), "correct": correct}

    for module in (main, benchmark):
        monkeypatch.setattr(module, "load_datasets", lambda config: (kind(), kind()))
        monkeypatch.setattr(module, "build_model", lambda config, train_set: Sum())
        monkeypatch.setattr(module, "compute_loss", lambda outputs, targets, config: F.l1_loss(outputs, targets))
    monkeypatch.setattr(main, "sums", sums)
    options = ("--batch-size", "4", "--lr", "1e-3", "--device", "cpu")
    train(2, *options, "--epochs", 5, "--output-dir", tmp_path)
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["count"] == 64 and last["loss"] < 5, "32 without weights"

    def kinds(group: Group) -> list[str]:
        return [row.kind for row in benchmark._round(benchmark.Task(parse(options)), group, seconds=0.001)]

    assert on_ranks(2, kinds)[0] == [WEAK, SILENT, DATA, STRONG]


# ---- sizes ----------------------------------------------------------------------------------------------------------


class Numbers(Dataset):
    """The plainest dataset: no more than its samples, one at a time: (input [2], its number)."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.classes = ["all"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([float(index), 1.0]), index


@fault(17)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whatever_the_sizes_no_rank_waits_for_another_in_vain(world_size: int) -> None:
    """Every rank takes part in a sum after each batch: one batch more on one of them, and it would wait for ever."""

    def train_on_all(group: Group) -> list[tuple[int, ...]]:
        taken: list[tuple[int, ...]] = []
        for samples, batch, passes in itertools.product((1, 2, 5, 12, 31), (1, 2, 5), (1, 2)):
            config = options("--workers=0", "--batch-size", batch, "--grad-accum-steps", passes)
            try:
                loader = TrainLoader(Numbers(samples), config, group)
            except UsageError:
                taken.append((samples, batch, passes, 0))
                continue
            steps = 0
            for batches in loader.steps(0):
                for number, (_, targets) in enumerate(batches, start=1):
                    total = group.sum(torch.tensor([len(targets), number]))
                    assert total.tolist() == [batch * world_size, number * world_size]
                assert number == passes
                steps += 1
            assert steps == loader.steps_per_epoch
            taken.append((samples, batch, passes, steps))
        return taken

    ranks = by_rank(world_size, train_on_all)
    assert ranks == [ranks[0]] * world_size
    for samples, batch, passes, steps in ranks[0]:
        assert steps == samples // (world_size * batch * passes)


@pytest.mark.parametrize(
    ("samples", "tests", "world_size", "batch"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (3, 1, 3, 1), (7, 2, 3, 2), (9, 7, 2, 4), (10, 3, 2, 5), (11, 100, 3, 3)],
)
def test_a_run_ends_well_with_any_numbers_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, tests: int, world_size: int, batch: int
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": samples, "test": tests})
    shared = ("--dataset=synthetic", "--device=cpu", "--output-dir", tmp_path, "--timeout=20", "--log-every=1")
    train(world_size, *shared, "--batch-size", batch, "--epochs", 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["count"] for line in lines if line["split"] == "test"] == [tests, tests]
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert steps == list(range(1, 2 * (samples // (world_size * batch)) + 1))


@fault(19)
@pytest.mark.parametrize(("world_size", "batch", "passes"), [(1, 8, 1), (1, 4, 2), (2, 4, 1)])
def test_a_run_that_would_take_no_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, batch: int, passes: int
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 7, "test": 5})
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

    def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
        return Numbers(100 if next(machine) == 0 else 50), Numbers(7)

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
    monkeypatch.setattr(main, "build_model", lambda config, train_set: nn.Linear(2, 100))
    output = train(2, "--device=cpu", "--workers=0", "--timeout=2", "--output-dir", tmp_path / "out", code=3)
    message = the_error(output)
    assert "100" in message
    assert "50" in message


# ---- other datasets -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_stands_still_in_its_fork_is_killed_and_all_are_started_again(tmp_path: Path) -> None:
    """As Python before 3.10.15 and 3.11.10 may; torch alone would wait for it for ever."""

    def stand_still_once() -> None:
        if len(multiprocessing.active_children()) == 1 and not (tmp_path / "stuck").exists():
            (tmp_path / "stuck").write_text(str(os.getpid()))
            time.sleep(600)

    def result(group: Group) -> Any:
        ddp.workers.PATIENCE_S = (1.0, 60.0)
        os.register_at_fork(after_in_child=stand_still_once)
        loader = TrainLoader(Numbers(17), options("--batch-size=4", "--workers", 2), group)
        without = TrainLoader(Numbers(17), options("--batch-size=4", "--workers", 0), group)
        return [[batch[1].tolist() for step in each.steps(0) for batch in step] for each in (loader, without)]

    [(found, expected)] = on_ranks(1, result, "--device=cpu")
    assert found == expected and len(found) == 4
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "stuck").read_text()), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_has_only_getitem_is_batched(workers: int) -> None:
    def batches_of_rank(group: Group) -> list[tuple[Tensor, Tensor]]:
        loader = TrainLoader(Numbers(17), options("--batch-size=4", "--workers", workers), group)
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
    def batches_of_rank(group: Group) -> list[list[int]]:
        loader = TrainLoader(make(), options("--batch-size=4", "--workers=0"), group)
        return [list(targets.shape) for batches in loader.steps(0) for _, targets in batches]

    assert by_rank(1, batches_of_rank) == [[[4], [4]]]


def test_a_part_of_the_images_is_still_prepared(small: None) -> None:
    def batches_of_rank(group: Group) -> list[torch.dtype]:
        whole, _ = data.load_datasets(options("--dataset=synthetic"))
        loader = TrainLoader(Subset(whole, range(64)), options("--batch-size=32", "--workers=0"), group)
        return [inputs.dtype for batches in loader.steps(0) for inputs, targets in batches]

    assert by_rank(1, batches_of_rank) == [[torch.float32] * 2]


def test_another_dataset_and_model_are_trained_without_a_change_to_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: (Numbers(16), Numbers(7)))
    monkeypatch.setattr(main, "build_model", lambda config, train_set: nn.Linear(2, 16))
    output = train(2, "--device=cpu", "--workers=0", "--batch-size=4", "--epochs=2", "--output-dir", tmp_path)
    assert "16 training samples, 7 test samples" in output


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once(world_size: int, workers: int) -> None:
    def read(group: Group) -> list[list[int]]:
        config = options("--batch-size=8", "--workers", workers)
        loaders = [TestLoader(Numbers(samples), config, group) for samples in (1, 7, 100, 101)]
        return [[int(number) for _, targets in loader for number in targets] for loader in loaders]

    ranks = by_rank(world_size, read)
    for case, samples in enumerate((1, 7, 100, 101)):
        assert sorted(number for rank in ranks for number in rank[case]) == list(range(samples))


def test_evaluation_takes_images_in_memory_as_they_are_made_many_at_once() -> None:
    config = options("--dataset=synthetic", "--batch-size=16")
    dataset = ImagesInMemory(config, torch.zeros(600, 3, 32, 32, dtype=torch.uint8), torch.arange(600), ["all"])

    def sizes(group: Group) -> tuple[list[int], list[int]]:
        training = next(TrainLoader(dataset, config, group).steps(0))
        return [len(targets) for _, targets in TestLoader(dataset, config, group)], [len(t) for _, t in training]

    assert by_rank(1, sizes) == [([256, 256, 88], [16])]
    assert by_rank(2, sizes) == [([256, 44], [16])] * 2
