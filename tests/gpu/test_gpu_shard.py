"""The questions about --shard. A docstring's first line is the question; `answer` takes what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_project import DEVICE, Project
from outputs import lines, newest, weights_and_momentum

from ddp.checkpoint import storage
from ddp.distributed.tensors import whole_tree

Answer = Callable[[str], None]
FAST = ("--batch-size", 64, "--log-every", 10, "--max-steps", 30, "--deterministic")
TWO = ("--nproc", 2)
two_gpus = pytest.mark.needs_gpu(count=2 * (DEVICE != "cpu"))


def weights(output_dir: Path) -> dict[str, Any]:
    return whole_tree(storage.read(newest(output_dir)))["model"]


@pytest.mark.parametrize("processes", [(), pytest.param(TWO, marks=two_gpus)], ids=["one", "two"])
def test_the_same_as_ddp(project: Project, tmp_path: Path, processes: tuple[Any, ...], answer: Answer) -> None:
    """Does --shard give the weights of DDP?"""
    given = (*FAST, *processes, "--output-dir")
    output = project.train(*given, tmp_path / "shard", "--shard")
    project.train(*given, tmp_path / "ddp")
    ours, theirs = weights(tmp_path / "shard"), weights(tmp_path / "ddp")
    largest = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert largest < 1e-5, output
    answer(f"yes ({output.splitlines()[2]}): they differ by at most {largest:.1g}")


@pytest.mark.parametrize("more", [(), ("--precision", "bf16"), ("--precision", "fp16"), ("--compile",)], ids=str)
def test_options(project: Project, tmp_path: Path, more: tuple[Any, ...], answer: Answer) -> None:
    """Does --shard train with these options, and resume bit for bit?"""
    given = (*FAST, "--shard", "--model", "resnet18", "--checkpoint-every", 10, *more, "--output-dir")
    project.train(*given, tmp_path / "whole", timeout=400)
    project.train(*given, tmp_path / "parts", "--max-steps", 15, timeout=400)
    project.train(*given, tmp_path / "parts", timeout=400)
    assert weights_and_momentum(tmp_path / "parts") == weights_and_momentum(tmp_path / "whole")
    answer(f"yes: {' '.join(more) or 'fp32'}")


@pytest.mark.needs_gpu
def test_gloo(project: Project, answer: Answer) -> None:
    """Is --shard over gloo refused on a GPU?"""
    assert "--shard on GPUs needs NCCL" in project.train(*FAST, *TWO, "--shard", "--backend", "gloo", code=2)
    answer("yes, with one line: torch 2.11 ends with a segmentation fault")


@two_gpus
@pytest.mark.parametrize("more", [(), ("--shard",), ("--shard", "--checkpoint-activations")], ids=str)
def test_peak_memory(project: Project, tmp_path: Path, more: tuple[Any, ...], answer: Answer) -> None:
    """How much memory of the GPU does each of two processes take at its peak, with vit_b_16 (86 million weights)?"""
    given = ("--model", "vit_b_16", "--image-size", 224, "--batch-size", 2, "--max-steps", 3, "--log-every", 1)
    project.train(*given, *TWO, *more, "--output-dir", tmp_path / "out", timeout=400)
    answer(f"{lines(tmp_path / 'out', 'train')[-1]['memory_mb']:,.0f} MB with {' '.join(more) or 'DDP'} on {DEVICE}")
