"""Random numbers as functions of (seed, step, rank) or (seed, epoch, sample): no checkpoint holds a generator."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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


def random_bits(seed: int, numbers: Any) -> Any:
    """64 random bits for each of `numbers`, as a function of it and `seed`: an int64 tensor or array, as `numbers` is.

    The 64-bit finaliser of MurmurHash3, by Austin Appleby: https://github.com/aappleby/smhasher.
    """
    bits = numbers + seed
    for factor in (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64, 1):
        bits ^= bits >> 33 & 0x7FFFFFFF  # a shift without the sign
        bits *= factor  # modulo 2^64
    return bits


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, so that all ranks build the same model."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators as a function of (seed, step, rank): a resumed run draws what an uninterrupted one draws."""
    derived = _seed_torch(seed, step, rank)
    random.seed(derived)
    numpy.random.seed(derived % 2**32)


def _seed_torch(seed: int, step: int, rank: int) -> int:
    derived = (_cached_seed(seed, rank, 0) + step * STEP_SEED_STRIDE) % 2**63
    torch.default_generator.manual_seed(derived)  # 40 times cheaper than torch.manual_seed
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(derived)
    return derived


@contextmanager
def same_on_all_ranks(seed: int, step: int) -> Iterator[None]:
    """Let torch draw the same numbers on every rank within the block: noise of an optimizer, for example."""
    with _fork_torch():
        _seed_torch(seed, step, rank=-1)
        yield


def random_states() -> list[Any]:
    """Those of all generators, to compare them: any number that is drawn changes one."""
    of_numpy: Any = numpy.random.get_state()
    states = [random.getstate(), of_numpy[1].tobytes(), of_numpy[2:], torch.get_rng_state().tolist()]
    return states + ([torch.cuda.get_rng_state().tolist()] if torch.cuda.is_initialized() else [])


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore all generators when the block ends."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with _fork_torch():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _fork_torch() -> AbstractContextManager[None]:
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
