"""Faults whose handling does not depend on --shard, once more with it."""

from __future__ import annotations

import pytest

# The tests, and the fixtures that they use.
from test_faults import (  # noqa: F401
    test_a_rank_that_exits_early_is_named,
    test_a_rank_that_hangs_ends_all_and_prints_its_stack,
    test_a_second_signal_to_one_rank_ends_all_with_its_code,
    test_all_ranks_exit_with_one_code_even_if_the_store_is_in_rank_0,
    test_the_metrics_of_a_batchnorm_model_are_those_of_the_saved_model,
)
from test_resume import (  # noqa: F401
    test_changed_options_are_refused_by_name_unless_they_may_change,
)
from test_shard_faults import shard  # noqa: F401
from test_storage import (  # noqa: F401
    disk,
    test_a_disk_that_fills_up_between_two_saves_makes_the_run_exit_with_7,
)

pytestmark = pytest.mark.sample(0)
