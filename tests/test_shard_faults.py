"""The faults that concern training, resuming and saving, once more with --shard: the tests are those of DDP."""

from __future__ import annotations

from typing import Any

import pytest

# The tests, and the fixtures that they use. test_shard_more_faults.py has others.
from test_faults import (  # noqa: F401
    test_a_killed_rank_is_named_and_nothing_is_saved_after,
    test_a_stop_in_the_evaluation_repeats_it_after_a_resume,
)
from test_resume import (  # noqa: F401
    test_another_number_of_processes_uses_each_sample_once,
    test_only_rank_0_needs_the_checkpoint,
)
from test_storage import (  # noqa: F401
    test_a_run_falls_back_wherever_its_newest_checkpoint_is_damaged,
    trained,
)
from test_training import (  # noqa: F401
    test_a_loss_that_is_not_finite_stops_every_rank_and_saves_nothing,
)

from config import Config

pytestmark = pytest.mark.sample(1, "faults with --shard")


@pytest.fixture(autouse=True)
def shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of these tests has --shard."""
    parse = Config.parse

    def parse_and_shard(arguments: Any = None) -> Config:
        return parse([*arguments, "--shard"])

    monkeypatch.setattr(Config, "parse", parse_and_shard)
