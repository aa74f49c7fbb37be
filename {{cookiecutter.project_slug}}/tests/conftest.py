"""The data of all tests: `--dataset synthetic`, of which data.py may have fewer samples in SYNTHETIC_SIZES."""

import os

import pytest

import data

# In a shell inside a cluster job, the launcher's variables would set the ranks of the processes that the tests start.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, so that an epoch takes a moment."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 51, "test": 50}, raising=False)
