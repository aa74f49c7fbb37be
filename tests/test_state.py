"""Small functions that a whole run shows only now and then."""

from __future__ import annotations

import math
import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from ddp.checkpoint.state import TrainState
from ddp.core.errors import UsageError, differences
from ddp.distributed import rank_reports
from ddp.distributed.rank_reports import Collective, Report
from ddp.distributed.tensors import Streams, check_state, map_tensors, snapshot
from ddp.training.output_dir import _truncate_after


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_a_named_tuple_stays_one_when_its_tensors_are_mapped() -> None:
    mapped = map_tensors({"pair": Pair(torch.ones(2), 3)}, lambda tensor: tensor + 1)
    assert type(mapped["pair"]) is Pair and mapped["pair"].first.tolist() == [2, 2] and mapped["pair"].second == 3


def test_tied_weights_are_one_tensor_in_a_snapshot_and_slices_are_not() -> None:
    weight = torch.arange(4.0)
    copy, _ = snapshot({"a": weight, "b": weight, "half": weight[:2]}, Streams(torch.device("cpu")))
    assert copy["a"] is copy["b"] is not weight and copy["half"].tolist() == [0, 1]


def test_a_mapping_that_a_checkpoint_could_not_load_is_refused_at_the_save() -> None:
    """torch.load(weights_only=True) knows no other mapping than a dict."""
    with pytest.raises(UsageError, match="which no checkpoint can hold"):
        check_state({"queue": UserDict({"keys": torch.ones(2)})})
    with pytest.raises(UsageError, match=r"state\['model'\]\['w'\] is on the device meta, which no"):
        check_state({"model": {"w": torch.ones(2, device="meta")}})


class Names(list[str]):
    """Of a dataset, for example."""


class Own(torch.Tensor):
    """As images of torchvision are."""


REFUSED = [
    defaultdict(int, {"a": 1}),
    Pair(torch.ones(2), 3),
    Names(["a"]),
    {Path("a"): 1},
    {numpy.int64(1): 2},
    {frozenset({1}): 2},
    torch.ones(2).as_subclass(Own),
]
HELD = [
    OrderedDict(a=[1, "b", b"c", None, True, 2.5, 1j]),
    Counter("aab"),
    {(1, ("a", 2)): torch.Size([2, 3])},
    [torch.float16, torch.device("cpu"), torch.nn.Parameter(torch.ones(2))],
    torch.ones(2).to_sparse(),
]


@pytest.mark.parametrize("value", [*REFUSED, *HELD], ids=lambda value: type(value).__name__)
def test_a_checkpoint_is_saved_only_if_torch_can_load_it(value: Any, tmp_path: Path) -> None:
    """What is saved without an error, and cannot be loaded, would be noticed at the resume."""
    refused = any(value is each for each in REFUSED)
    torch.save({"own": value}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError) if refused else nullcontext():
        torch.load(tmp_path / "file.pt", weights_only=True)
    with pytest.raises(UsageError, match=r"own.*no checkpoint can hold") if refused else nullcontext():
        check_state({"own": value})


def test_a_metric_that_is_never_a_number_is_best_once() -> None:
    """--patience counts from there."""
    state, values = TrainState(), [math.nan, math.nan, 0.1, math.nan, 0.1, 0.2]
    assert [state.update_best(value, {}) for value in values] == [True, False, True, False, False, True]


def test_an_equal_metric_is_no_better_one_and_any_is_better_than_nan() -> None:
    state = TrainState(step=1)
    assert state.update_best(0.5, {})
    state.step = 2
    assert not state.update_best(0.5, {}) and state.best_step == 1
    state.best = float("nan")
    assert state.update_best(0.1, {}) and state.best_step == 2


def test_a_name_without_a_value_that_only_one_side_has_is_a_difference() -> None:
    texts = "{name} was {second}, is {first}", "{name} is new", "{name} is gone"
    assert differences({"a": None, "b": 1}, {"b": 1, "c": None}, *texts) == ["a is new", "c is gone"]
    assert differences({"a": None}, {}, texts[0]) == []


def test_other_operations_on_tensors_of_the_same_shape_are_different_calls() -> None:
    reports = {
        rank: Report("", 1.0, [Collective("gloo 0 7", operation, "float [2]", f"main.py:{rank}", 1.0)])
        for rank, operation in enumerate(("all_reduce", "broadcast"))
    }
    found = rank_reports.find_mismatch(reports)
    assert found == "rank 0 called all_reduce at main.py:0, but rank 1 called broadcast at main.py:1"


def test_damaged_lines_of_metrics_are_dropped_at_a_resume(tmp_path: Path) -> None:
    path, good = tmp_path / "metrics.jsonl", ['{"step": 1, "split": "train"}\n', '{"step": 2, "split": "val"}\n']
    path.write_bytes(f'{good[0]}x\n{good[1]}{{"st'.encode().replace(b"x", b"\xff\xfe{"))
    assert _truncate_after(path, last_step=5) == {("val", 2)}
    assert path.read_text() == "".join(good)
