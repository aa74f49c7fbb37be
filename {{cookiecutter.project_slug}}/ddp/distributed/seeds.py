"""Random numbers as functions of (seed, step, rank) or (seed, epoch, sample), and the states of the generators."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import torch

STEP_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the seeds of neighbouring steps are far apart


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from numbers such as (seed, epoch): the same everywhere, unrelated for neighbours."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


_cached_seed = cache(derive_seed)  # a digest in every step would cost a percent of a small one


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, so that all ranks build the same model."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Let the generators of Python and numpy differ between ranks. Checkpoints hold their states."""
    derived = derive_seed(seed, rank)
    random.seed(derived)
    numpy.random.seed(derived % 2**32)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a function of (seed, step, rank), so that a resumed run draws what an uninterrupted one draws."""
    derived = (_cached_seed(seed, rank, 0) + step * STEP_SEED_STRIDE) % 2**63
    torch.default_generator.manual_seed(derived)  # 40 times cheaper than torch.manual_seed
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(derived)


@contextmanager
def same_on_all_ranks(seed: int, step: int) -> Iterator[None]:
    """Let torch draw the same numbers on every rank within the block: noise of an optimizer, for example."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        seed_step(seed, step, rank=-1)
        yield


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators, in types that torch.load(weights_only=True) accepts."""
    version, numbers, next_gauss = random.getstate()
    name, words, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        # As tensors: as lists of numbers they would take longer to copy and send than a small model's weights.
        "python": (version, torch.tensor(numbers), next_gauss),
        "numpy": (str(name), torch.tensor(numpy.asarray(words, numpy.int64)), int(place), int(has_gauss), float(gauss)),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned; the GPU's generator only if there was one, and is one now."""
    version, numbers, next_gauss = state["python"]
    name, keys, *others = state["numpy"]
    torch.set_rng_state(state["torch"])
    random.setstate((version, tuple(numbers.tolist()), next_gauss))
    numpy.random.set_state((name, keys.numpy(), *others))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
