"""The faults that a run survives or explains, by number, and the mark of a test that injects some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

FAULTS = {
    1: "kill -9 of a worker in mid-step",
    2: "kill -9 during a save",
    3: "newest checkpoint truncated, empty, garbage",
    4: "one bit flipped in a checkpoint",
    5: "all checkpoints bad",
    6: "hostile pickle",
    7: "disk full",
    8: "output folder not writable",
    9: "SIGTERM or SIGUSR1 to torchrun, or to one rank only",
    10: "a second signal",
    11: "SIGHUP under nohup",
    12: "torchrun killed with -9",
    13: "one rank raises",
    14: "one rank exits early with 0",
    15: "one rank hangs",
    16: "init_process_group hangs past its timeout",
    17: "uneven batches between ranks",
    18: "evaluation set not divisible",
    19: "fewer training samples than one global batch",
    20: "run resumed with another number of processes",
    21: "model or options differ from those of the checkpoint",
    22: "only node 0 has the checkpoint",
    23: "loss not finite",
    24: "two runs in one output folder",
    25: "port taken",
    26: "wrong master address or name",
    27: "two nodes with one node rank, or other NNODES, NPROC, code",
    28: "host name resolves to 127.0.0.1",
    29: "link down in mid-run",
    30: "NCCL without CUDA; more local ranks than GPUs",
    31: "dataset missing, partial, corrupt; no network",
    32: "stale PET_*, half-set RANK/WORLD_SIZE/MASTER_ADDR",
    33: "bad option value",
    34: "WORLD_SIZE is not NNODES x NPROC",
    35: "BatchNorm model evaluated through the DDP wrapper with uneven ranks",
    36: "BatchNorm running statistics drift between ranks",
    37: "a collective that not all ranks call, in another order, or with another shape",
    38: "a rank is killed while the others wait for a GPU",
    39: "device-side assert; GPU out of memory",
    40: "evaluated state that is not loaded, random numbers that do not follow the sample, a stream read by index",
    41: "labels outside of the classes, inputs that are no tensors, a loss that is no scalar",
    42: "a stranger at the rendezvous port; a greeting and a reset; a file that one rank alone has",
    43: "power fails at any moment of a save or a resume",
    44: "a machine vanishes with its disk",
    45: "a bit flips in the weights or the optimizer state of one rank",
    46: "a rank computes a wrong gradient",
    47: "one rank is slower than the others",
    48: "state that is not in state_dict(): a queue, an inner optimizer, a generator, a sampler",
    49: "the same index is another sample on another rank, or after a resume",
    50: "DataLoader workers start again during an evaluation",
    51: "a dataset hangs on all ranks, or on the only one",
    52: "an open file or connection that forked workers share",
    53: "a state whose shapes have changed",
    54: "a mean that depends on how the global batch is divided",
    55: "something else sets the learning rate",
}
# The parts of these rows that the tests cannot show without the hardware.
NOT_SHOWN = {
    15: "a hang inside of NCCL",
    30: "real GPUs: the tests make up what the ranks report",
    38: "NCCL: the main thread is blocked in a C call instead",
    39: "a GPU: the tests raise the errors that torch raises there",
}
# Tests of the generated project that inject some of them: file::test -> rows.
IN_PROJECT = {
    "test_checkpoints.py::test_a_run_resumes_from_the_newest_checkpoint_that_is_not_damaged": (3, 4),
    "test_checkpoints.py::test_if_all_checkpoints_are_damaged_no_new_run_starts": (5,),
    "test_checkpoints.py::test_every_flipped_byte_and_every_truncation_is_detected": (3, 4),
    "test_checkpoints.py::test_a_file_of_another_program_is_refused_and_runs_no_code": (6,),
    "test_checkpoints.py::test_with_another_number_of_processes_the_epoch_continues_where_it_was": (20,),
    "test_checkpoints.py::test_options_that_make_another_run_are_refused_by_name": (21,),
    "test_failures.py::test_a_rank_that_fails_ends_all_with_one_cause_and_one_code": (1, 13, 14, 15, 23, 37),
    "test_failures.py::test_a_second_signal_ends_a_process_that_does_not_reach_the_end_of_its_step": (10,),
    "test_loader.py::test_all_ranks_take_the_same_steps_and_evaluate_each_sample_once": (
        17,
        18,
    ),
    "test_project.py::test_a_rehearsal_finds_nothing": (1,),
    "test_project.py::test_a_stopped_run_resumes_bit_for_bit": (9,),
    "test_start.py::test_a_bad_option_is_refused_with_what_is_allowed": (33,),
    "test_start.py::test_an_incomplete_environment_of_a_launcher_is_refused_with_what_is_missing": (32,),
}


def fault(*rows: int) -> Callable[[Test], Test]:
    """Mark a test that injects the faults with these numbers."""
    assert set(rows) <= set(FAULTS)
    return pytest.mark.fault(*rows)
