"""The data of all tests: `--dataset synthetic`, of which data.py may have fewer samples in SYNTHETIC_SIZES."""

import os

import pytest
from processes import make_synthetic_data_small

# In a shell inside a cluster job, the launcher's variables would set the ranks of the processes that the tests start.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, so that an epoch takes a moment."""
    make_synthetic_data_small(monkeypatch)
