"""Made-up images in the formats of real data sets: their content does not affect the speed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy
from PIL import Image


def cifar10(folder: Path, images: int = 50_000) -> None:
    """Write random pixels to `folder` in the files of CIFAR-10. loops/timed.py lets torchvision accept their MD5."""
    generator = numpy.random.default_rng(0)
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        data = generator.integers(0, 256, (images // 5, 3072), dtype=numpy.uint8)
        labels = generator.integers(0, 10, images // 5).tolist()
        (batches / name).write_bytes(pickle.dumps({"data": data, "labels": labels}))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {number}" for number in range(10)]}))


def jpegs(folder: Path, images: int = 6_000, size: tuple[int, int] = (500, 375)) -> None:
    """Write `folder`/{train,val}/CLASS/*.jpg with ten classes: smooth pictures with some noise, like photographs."""
    generator = numpy.random.default_rng(0)
    for part, count in (("train", images), ("val", images // 10)):
        for number in range(count):
            path = folder / part / f"class{number % 10}" / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = generator.integers(0, 256, (12, 16, 3), dtype=numpy.uint8)
            picture = numpy.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=numpy.int16)
            noise = generator.integers(-12, 13, picture.shape, dtype=numpy.int16)
            Image.fromarray((picture + noise).clip(0, 255).astype(numpy.uint8)).save(path, quality=90)
