"""A collective that not all ranks call: each message names the line of the owner's files that has to be changed."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import FrameSummary as Frame
from typing import Any

import pytest
import torch
import torch.distributed as dist
from template_copy import small_template

from config import Config
from ddp.core.errors import numbered
from ddp.core.files import PROJECT_DIR
from ddp.core.threads import call_site, dump_stacks, is_owner_file, main_stack
from ddp.distributed import rank_reports, stop_sync
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.rank_reports import (
    Collective,
    Report,
    certain_mismatch,
    collective_count,
    describe_wait,
    find_mismatch,
    own_report,
    recorded_collectives,
)
from ddp.entrypoint.run_main import run_as_rank
from faults import fault
from processes import Ranks, on_ranks, train

pytestmark = pytest.mark.slow
ALL = partial(pytest.param, marks=pytest.mark.sample(0))  # a case for --all

ADVICE = (
    "all ranks must make the same collective calls, in the same order, with tensors of the same shapes; check code "
    "that depends on the rank or its data: a condition, a continue, an exception that only one rank catches"
)
ADVANCE = "                run.advance()  # counts the step; logs and saves when due\n"
BACKWARD = "backward(mean.weigh(loss, outputs, targets), training.scaler, config.grad_accum_steps)"


class Edited:
    """A main.py with a mistake, and the runs of it."""

    def __init__(self, template: Path, folder: Path, old: str, new: str) -> None:
        text = (template / "main.py").read_text()
        assert text.count(old) == 1
        self.folder, self.path = folder, folder / "main.py"
        self.path.write_text(text.replace(old, new))

    def at(self, code: str, occurrence: int = 0) -> str:
        """`main.py:N` for the line with this code."""
        lines = self.path.read_text().splitlines()
        return f"main.py:{[number for number, line in enumerate(lines, 1) if code in line][occurrence]}"

    def run(self, world_size: int, code: int, *options: Any) -> list[str]:
        """What each rank prints. All exit with `code`."""
        ranks = self.end(world_size, *options)
        assert ranks.codes == [code] * world_size, ranks.output()
        return [ranks.output(rank) for rank in range(world_size)]

    def end(self, world_size: int, *options: Any) -> Ranks:
        """The ranks of a run that has ended."""
        common = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 2, "--epochs", 1, "--timeout", 4]
        arguments = [str(option) for option in (*common, "--output-dir", self.folder / "out", *options)]

        def target(rank_env: RankEnv) -> int:
            spec = importlib.util.spec_from_file_location("edited", self.path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return run_as_rank(module.main, Config.parse(arguments), rank_env)

        ranks = Ranks(world_size, target)
        ranks.wait(240)
        return ranks


@pytest.fixture
def edited(small: None, template: Path, tmp_path: Path) -> Callable[[str, str], Edited]:
    """A main.py in which a text is replaced by another one."""
    return lambda old, new: Edited(template, tmp_path, old, new)


def verdicts(outputs: list[str]) -> list[str]:
    """The last line of each rank, without who says it."""
    last = [output.strip().splitlines()[-1] for output in outputs]
    return [line.partition("error: ")[2] or line.partition("is exiting because ")[2] for line in last]


def on_rank_0(code: str, step: int = 3) -> str:
    """Lines for before ADVANCE, which logs the steps 2, 4 ..."""
    return f"                if ctx.rank == 0 and run.state.step == {step}:\n                    {code}\n"


@fault(37)
def test_a_barrier_on_rank_0_only(edited: Callable[..., Edited]) -> None:
    """The ranks wait for each other in different calls: the run ends long before --timeout, with the stacks."""
    main = edited(ADVANCE, on_rank_0("torch.distributed.barrier()") + ADVANCE)
    outputs = main.run(2, 1, "--warn-after", 1.5, "--timeout", 600)
    barrier, other = main.at("barrier()"), f"{main.at('run.advance()')} (advance)"
    line = f"rank 0 called barrier at {barrier}, but rank 1 called all_reduce at {other}: {ADVICE}"
    assert verdicts(outputs) == [line] * 2
    stack = outputs[0].partition("the stacks of rank 0:\n")[2]
    assert f'/main.py", line {barrier.partition(":")[2].split()[0]} in main' in stack
    assert "start all ranks again" not in "".join(outputs)


@pytest.mark.sample(0)
@fault(37)
def test_a_collective_in_the_loss_of_an_evaluation(edited: Callable[..., Edited]) -> None:
    """The ranks have different numbers of batches, so one of them waits for the others in the loss."""
    loss = "                loss = task.compute_loss(outputs, targets, config)\n            meter.add"
    in_it = loss.replace("\n", "\n                torch.distributed.all_reduce(loss)\n")
    main = edited(loss, in_it)
    verdict, again = verdicts(main.run(2, 1, "--warn-after", 1.5, "--timeout", 600))
    called = (
        f"rank 0 called all_reduce at {main.at('all_reduce(loss)')}, called from {main.at('evaluate(evalua')}, but "
    )
    assert verdict == again and verdict.startswith(f"{called}rank 1 called broadcast at "), verdict


# Each: what to replace, by what, and what the ranks called, as (operation, code of the line, the text after it).
MISMATCHES: dict[str, tuple[str, str, tuple[str, str], tuple[str, str]]] = {
    "evaluate": (
        "            run.end_epoch(evaluate(evaluated_model, val_loader, config, ctx), val_loader)\n",
        "            metrics = {'loss': 0.0, 'accuracy': 0.0}\n            if ctx.rank == 0:\n"
        "                metrics = evaluate(evaluated_model, val_loader, config, ctx)\n"
        "            run.end_epoch(metrics, val_loader)\n",
        ("return meter.take()", " (take), called from {main}"),
        ("run.end_epoch(", " (end_epoch)"),
    ),
    "on_main": (
        ADVANCE,
        on_rank_0("ctx.on_main(print)", 4) + ADVANCE,  # rank 1 logs nothing in this step
        ("ctx.on_main(print)", " (on_main)"),
        (BACKWARD, " (backward), called from"),
    ),
    "an exception swallowed on one rank": (
        f"            {BACKWARD}\n",
        "            try:\n                if ctx.rank == 1 and training.meter.pending:\n"  # in the second step
        f"                    raise ValueError\n                {BACKWARD}\n"
        "            except ValueError:\n                continue\n",
        (BACKWARD, " (backward), called from"),
        ("run.advance()", " (advance)"),
    ),
    "one extra batch": (
        "        while not run.finished():",
        "        if ctx.rank == 0:\n            ddp_model(torch.zeros(4, 3, 32, 32)).sum().backward()  # extra\n\n"
        "        while not run.finished():",
        ("sum().backward()  # extra", " (backward), but rank 1"),
        ("run.advance()  # counts", " (advance)"),
    ),
}


@fault(37)
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_different_collectives(edited: Callable[..., Edited], case: str) -> None:
    old, new, *called = MISMATCHES[case]
    main = edited(old, new)
    outputs = main.run(2, 1)
    verdict, again = verdicts(outputs)
    assert verdict == again and verdict.endswith(f": {ADVICE}") and verdict.startswith("rank 0 "), outputs
    caller = main.at("metrics = evaluate(") if case == "evaluate" else ""
    for code, text in called:
        assert f" at {main.at(code)}{text.format(main=caller)}" in verdict, verdict
    assert "Abort" not in "".join(outputs) and "start all ranks again" not in "".join(outputs)


OTHER_SIZES = {
    "two all-reduces in different order": (
        ADVANCE,
        "                tensors = [torch.zeros(5), torch.zeros(7, 3)]\n"
        "                for tensor in tensors if ctx.rank == 0 else reversed(tensors):\n"
        f"                    torch.distributed.all_reduce(tensor)\n{ADVANCE}",
    ),
    "different shapes": (
        ADVANCE,
        f"                torch.distributed.all_reduce(torch.zeros(5 + ctx.rank))\n{ADVANCE}",
    ),
    "an all-reduce on one rank": (ADVANCE, on_rank_0("torch.distributed.all_reduce(torch.zeros(()))") + ADVANCE),
}


@fault(37)
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", OTHER_SIZES)
def test_tensors_of_other_sizes_abort_a_rank_and_the_others_advise_what_names_them(
    edited: Callable[..., Edited], case: str
) -> None:
    """gloo aborts the process that receives more than it expects, in C++: it can print only gloo's message."""
    ranks = edited(*OTHER_SIZES[case]).end(2)
    assert sorted(ranks.codes) == [-signal.SIGABRT, 8], ranks.output()
    victim = ranks.codes.index(-signal.SIGABRT)
    (line,) = [line for line in ranks.output().splitlines() if "error: " in line]
    expected = rf"rank {victim} was lost \(.*\); if it aborted, TORCH_DISTRIBUTED_DEBUG=DETAIL names tensors of "
    assert re.search(f"{expected}different sizes; nothing was saved yet: start all ranks again with", line)
    assert ranks.output(1 - victim).splitlines()[-1] == line and "Traceback" not in ranks.output()


@pytest.mark.sample(0)
@fault(37)
def test_tensors_of_another_size_on_one_of_three_ranks(edited: Callable[..., Edited]) -> None:
    """The ranks that are left explain it together, with one exit code."""
    main = edited(
        ADVANCE, f"                torch.distributed.all_reduce(torch.zeros(6 if ctx.rank == 1 else 5))\n{ADVANCE}"
    )
    ranks = main.end(3)
    left = [rank for rank, code in enumerate(ranks.codes) if code != -signal.SIGABRT]
    assert left and len({ranks.codes[rank] for rank in left}) == 1, ranks.output()
    for line in verdicts([ranks.output(rank) for rank in left]):
        if ranks.codes[left[0]] == 8:
            assert re.match(r"ranks? .* lost .*TORCH_DISTRIBUTED_DEBUG=DETAIL names tensors of different sizes", line)
        else:  # no rank received more than it expected, or ranks with different sizes are left
            assert "called all_reduce of float [5] at" in line and "called all_reduce of float [6] at" in line, line


@pytest.mark.sample(0)
@fault(37)
@pytest.mark.parametrize("detail", [True, False])
def test_torch_names_the_shapes_as_advised(template: Path, tmp_path: Path, detail: bool) -> None:
    shapes = f"                torch.distributed.all_reduce(torch.zeros(5 + ctx.rank))\n{ADVANCE}"
    main = Edited(template, shutil.copytree(small_template(), tmp_path / "copy"), ADVANCE, shapes)
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if detail else "OFF"}
    command = [sys.executable, main.path, "--nproc", 2, "--dataset", "synthetic", "--batch-size", 16, "--timeout", 60]
    command = [str(part) for part in (*command, "--max-steps", 4, "--output-dir", tmp_path / "out")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    last = ended.stderr.splitlines()[-1]
    if detail:
        assert ended.returncode == 1 and "mismatch between collectives" in last, ended.stderr
        assert "TensorShape=[5]" in last and "TensorShape=[6]" in last, ended.stderr
    else:
        assert ended.returncode == 8, ended.stderr
        killed = r"rank \d: its process \d+ was killed by SIGABRT; if ranks passed tensors of different sizes, "
        assert re.fullmatch(killed + "TORCH_DISTRIBUTED_DEBUG=DETAIL names them", last), ended.stderr


@fault(15, 37)
@pytest.mark.parametrize("case", ["a dataset that hangs", ALL("an endless loop")])  # the project's own tests: sleep
def test_a_rank_that_does_not_come(edited: Callable[..., Edited], case: str) -> None:
    """The message names its line, and the line at which the others wait."""
    if case == "a dataset that hangs":
        hang = "        class Hangs(type(datasets.train)):\n            def __getitems__(self, indices):\n"
        hang += "                if ctx.rank == 1:\n                    __import__('time').sleep(3600)\n"
        hang += "                return super().__getitems__(indices)\n\n        datasets.train.__class__ = Hangs\n"
        main = edited("        train_loader = TrainLoader", hang + "        train_loader = TrainLoader")
        site = f"{main.at('sleep(3600)')}, called from {main.at('in enumerate(batches')}"
    else:
        code = "while True: pass"
        main = edited(ADVANCE, on_rank_0(code).replace("rank == 0", "rank == 1") + ADVANCE)
        site = main.at(code)
    outputs = main.run(2, 8, "--warn-after", 1)
    assert f"; rank 1 is at {site}" in next(line for line in outputs[0].splitlines() if line.startswith("warning: "))
    verdict, again = verdicts(outputs)
    expected = r"rank 1 did not respond for 4 s \(--timeout\): rank 0 has waited (\d+) s at main\.py:.*; "
    found = re.match(f"{expected}rank 1 is at {re.escape(site)}; see the stacks of rank 1; ", verdict)
    itself = f"rank 1 has waited 4 s (--timeout) for a sample, which it reads at {site}; nothing was read or computed"
    if case != "a dataset that hangs" or not verdict.startswith(itself):  # either rank may be first
        assert found and int(found[1]) >= 3, verdict  # it is measured to a second, and longer on a busy machine
    assert min(verdict, again, key=len) in max(verdict, again, key=len) and "start all ranks again" not in verdict
    assert f'File "{main.path}", line {site.partition(":")[2].partition(",")[0]} in ' in outputs[1], "its stack"


@pytest.mark.parametrize("slow", [1, ALL(0)])
def test_a_slow_step_is_no_failure(edited: Callable[..., Edited], slow: int) -> None:
    """If all ranks are slow, as in step 3, nothing is said; if one is, rank 0 prints its line. The run goes on."""
    printed = "open(__import__('os').readlink('/proc/self/fd/1').replace('/1.log', '/0.log')).read()"  # by rank 0
    waits = f"run.state.step == 5 and ctx.rank == {slow} and 'waited' not in {printed}"
    lines = ["if run.state.step == 3: __import__('time').sleep(5)", f"while {waits}: __import__('time').sleep(0.1)"]
    main = edited(ADVANCE, "".join(f"{' ' * 16}{line}\n" for line in lines) + ADVANCE)
    outputs = main.run(2, 0, "--warn-after", 3, "--timeout", 60)
    (said,) = [line for line in "".join(outputs).splitlines() if "waited" in line]
    assert said.endswith(f"; rank {slow} is at {main.at('sleep(0.1)')}") and said in outputs[0]
    assert said.startswith(f"warning: rank {1 - slow} has waited ")


def test_ranks_that_have_called_different_numbers_of_collectives_stop(
    edited: Callable[..., Edited], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, gradients of different steps would be added up without an error. Here, the numbers are made up."""
    monkeypatch.setattr(stop_sync, "collective_count", lambda device: dist.get_rank())
    outputs = edited(ADVANCE, ADVANCE).run(2, 1)
    assert verdicts(outputs) == [f"the ranks are at different steps: {ADVICE}"] * 2


def collective(number: int, operation: str = "all_reduce", tensors: str = "float [5]", **named: Any) -> Collective:
    return Collective(
        f"gloo 0 {number}", operation, tensors, named.get("site", "main.py:9"), named.get("waited_s", 0.0)
    )


def reports(*logs: list[Collective]) -> dict[int, Report]:
    return {rank: Report("", 0.0, log) for rank, log in enumerate(logs)}


def test_where_logs_differ() -> None:
    """They hold the last collectives: a rank that is ahead lacks older ones."""
    same = [collective(1), collective(2, "broadcast")]
    assert find_mismatch(reports(same, same[1:], [*same, collective(3)])) == ""
    longer = [*same, collective(3, tensors="float [6]"), collective(4, "barrier")]
    sizes = "rank 0 called all_reduce of float [5] at main.py:9, but rank 1 called all_reduce of float [6] at main.py:9"
    assert find_mismatch(reports([*same, collective(3)], longer, same)) == sizes
    lines = [collective(1, site="main.py:7")], [collective(1)]
    assert find_mismatch(reports(*lines)) == ""
    same_call = (
        "rank 0 called all_reduce of float [5] at main.py:7, but rank 1 called all_reduce of float [5] at main.py:9"
    )
    assert find_mismatch(reports(*lines), in_number=True) == same_call
    calls = reports([collective(1, "barrier", "", site="main.py:7 (barrier)")], [collective(1, site="")])
    line = "rank 0 called barrier at main.py:7, but rank 1 called all_reduce at ?"
    assert find_mismatch(calls) == line == find_mismatch(calls, in_number=True)
    later = reports([*lines[0], collective(2)], [*lines[1], collective(2, tensors="float [6]")])
    assert find_mismatch(later) == f"{same_call}; then {sizes}"


def test_the_collectives_of_every_recorder_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gloo's, of NCCL's, and of nccl2's, which torch 2.15 uses for NCCL; before, recorders took no name."""
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "is_p2p": False, "time_created_ns": 0}
    entry |= {"input_dtypes": ["Float"], "input_sizes": [[5]], "frames": [], "retired": True, "state": "completed"}

    def dump(name: str) -> bytes:
        return pickle.dumps({"entries": [{**entry, "profiling_name": f"{name}:all_reduce"}]})

    recorders = {
        "_dump_fr_trace": lambda _all, _stacks, _active, backend="gloo": dump(backend),
        "_dump_nccl_trace": lambda _all, _stacks, _active: dump("nccl"),
    }
    monkeypatch.setattr(rank_reports, "_recorder", recorders.get)
    assert [each.key for each in recorded_collectives()] == ["gloo 0 1", "nccl 0 1", "nccl2 0 1"]
    recorders["_dump_fr_trace"] = lambda _all, _stacks, _active: dump("gloo")
    assert [each.key for each in recorded_collectives()] == ["gloo 0 1", "nccl 0 1"]
    del recorders["_dump_fr_trace"]
    assert [each.key for each in recorded_collectives()] == ["nccl 0 1"]


def test_a_mismatch_is_certain_if_two_ranks_wait_in_different_calls_of_the_same_number() -> None:
    waits = collective(2, "barrier", "", waited_s=31.2), collective(2, waited_s=0.1)
    assert certain_mismatch(reports([waits[0]], [collective(1), waits[1]])).startswith("rank 0 called barrier at")
    sizes = collective(2, tensors="float [6]", waited_s=5)
    assert "of float [5] at main.py:9, but rank 1" in certain_mismatch(reports([waits[1]], [sizes]))
    for other in ([collective(2)], [collective(3, waited_s=1)], [], [waits[0]]):  # done, later, unknown, the same
        assert certain_mismatch(reports([waits[0]], other)) == ""


def test_what_is_said_about_a_wait() -> None:
    wait = collective(2, "barrier", "", waited_s=31.2, site="main.py:79 (barrier)")
    barrier = Report(wait.site, 31.2, [collective(1), wait])
    elsewhere = Report("main.py:65", 0.0, [collective(1)])
    expected = "rank 0 has waited 31 s at main.py:79 (barrier); rank 1 is at main.py:65"
    assert describe_wait({0: barrier, 1: elsewhere}, 30) == expected
    many = describe_wait({0: elsewhere, 1: elsewhere, **dict.fromkeys(range(2, 9), barrier)}, 30)
    expected = "ranks 2, 3, 4 and 4 others have waited 31 s at main.py:79 (barrier); ranks 0 and 1 are at main.py:65"
    assert many == expected
    together = describe_wait({0: barrier, 1: barrier}, 30)
    expected = "ranks 0 and 1 have waited 31 s at main.py:79 (barrier); the network between them may be down"
    assert together == expected
    on_gpu = Report("main.py:9", 40.0, [collective(2, waited_s=40.0)._replace(key="nccl 0 2")])
    assert describe_wait({0: on_gpu, 1: on_gpu}, 30) == "", "a step that is slow on all GPUs"
    expected = "rank 0 has waited 40 s at main.py:9; rank 1 is at main.py:65"
    assert describe_wait({0: on_gpu, 1: elsewhere}, 30) == expected
    assert describe_wait({0: barrier, 1: elsewhere}, 40) == "" == describe_wait({0: elsewhere, 1: elsewhere}, 30)
    reduces = Report("main.py:9", 40.0, [collective(1), collective(2, waited_s=40.0)])
    assert describe_wait({0: barrier, 1: reduces}, 30).endswith(
        "; these are different collectives: rank 0 called barrier at main.py:79, but rank 1 called all_reduce at "
        "main.py:9"
    )
    parted = Report(wait.site, 31.2, [collective(1, site="main.py:7"), wait])
    assert (
        "collectives: rank 0 called all_reduce of float [5] at main.py:7, but rank 1 called all_reduce of float [5] at "
        "main.py:9; then rank 0 called barrier at" in describe_wait({0: parted, 1: reduces}, 30)
    )


def test_the_line_of_the_owner_through_a_link_to_the_project(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(PROJECT_DIR)
    meter, main = (str(tmp_path / "link" / file) for file in ("ddp/training/meter.py", "main.py"))
    assert call_site([Frame(meter, 3, "take"), Frame(main, 7, "main")]) == "main.py:7 (take)"


def test_the_line_of_the_owner() -> None:
    launch = str(PROJECT_DIR / "ddp/entrypoint/run_main.py")
    package, torch_file = str(PROJECT_DIR / "ddp/training/meter.py"), torch.__file__
    main, model, elsewhere = str(PROJECT_DIR / "main.py"), str(PROJECT_DIR / "models/net.py"), "/srv/lab/losses.py"
    assert [is_owner_file(file) for file in (package, torch_file, threading.__file__, "<string>", main, elsewhere)] == [
        *(False,) * 4,
        *(True,) * 2,
    ]
    base = [Frame(main, 150, "<module>"), Frame(launch, 2, "launch")][::-1]
    assert call_site([Frame(torch_file, 1, "wrapper"), Frame(main, 7, "main"), *base]) == "main.py:7"
    inner = [Frame(torch_file, 1, "all_reduce"), Frame(package, 3, "take"), Frame(torch_file, 1, "_call")]
    assert call_site([*inner, Frame(main, 7, "main"), *base]) == "main.py:7 (take)"
    assert (
        call_site([*inner, Frame(model, 4, "forward"), Frame(main, 7, "main"), *base])
        == "models/net.py:4 (take), called from main.py:7"
    )
    assert call_site([Frame(elsewhere, 4, "loss")]) == "losses.py:4" and call_site(inner) == "" == call_site([])
    assert call_site(main_stack()).startswith("test_collectives.py:")
    assert [numbered("rank", list(range(count))) for count in (1, 2, 4, 9)] == [
        "rank 0",
        "ranks 0 and 1",
        "ranks 0, 1, 2 and 3",
        "ranks 0, 1, 2 and 6 others",
    ]


def test_the_stacks_of_all_threads_and_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    waiting, done = threading.Event(), threading.Event()

    def wait_here() -> None:
        waiting.set()
        done.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    waiting.wait()
    try:
        raise ValueError
    except ValueError as error:
        dump_stacks(3, error)
    done.set()
    thread.join()
    said = capsys.readouterr().err
    assert said.startswith("[rank 3] the stacks of rank 3:\n") and "in wait_here" in said
    assert said.count("in test_the_stacks_of_all_threads_and_of_an_error") == 2, "where it was raised, and now"


def test_stacks_are_printed_even_if_no_file_can_be_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called while a run ends: an error would replace the exit code, or end the thread that has to exit."""

    def fail(*_: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    dump_stacks(0)
    assert "in test_stacks_are_printed_even_if_no_file_can_be_opened" in capsys.readouterr().err


def test_a_gather_may_have_other_tensors_on_another_rank() -> None:
    def gather(ctx: Any) -> Report:
        dist.gather(torch.zeros(2), [torch.zeros(2), torch.zeros(2)] if ctx.rank == 0 else None)
        return own_report()

    found = dict(enumerate(on_ranks(2, gather)))
    assert found[0].collectives[-1].operation == found[1].collectives[-1].operation == "gather"
    assert find_mismatch(found) == ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("missing", ["_get_sequence_number_for_group", "_get_backend", "_dump_fr_trace"])
def test_training_continues_without_a_private_name_of_torch(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Another version of torch may not have it: then only the advice is missing."""
    c10d = torch._C._distributed_c10d  # type: ignore[attr-defined]
    for owner in (c10d, c10d.Backend, c10d.ProcessGroup):
        monkeypatch.delattr(owner, missing, raising=False)
    if missing == "_dump_fr_trace":
        monkeypatch.delattr(c10d, "_dump_nccl_trace")
    assert not hasattr(c10d.ProcessGroupGloo, missing)
    output = train(2, "--dataset", "synthetic", "--max-steps", 20, "--batch-size", 16, "--output-dir", tmp_path)
    assert "done" in output and "Traceback" not in output


def test_the_log_of_a_rank_knows_what_it_waits_for(tmp_path: Path) -> None:
    """And its number of collectives grows with each."""

    def measure(ctx: Any) -> Any:
        before = collective_count(), collective_count(torch.device("cpu"))
        dist.all_reduce(torch.zeros(3))
        after = collective_count(), collective_count(torch.device("cpu"))
        while (done := recorded_collectives())[-1].waited_s:  # a thread of gloo marks it as done a moment later
            time.sleep(0.01)
        reported = tmp_path / "reported"
        if ctx.rank == 0:
            while not reported.exists():
                time.sleep(0.01)
            dist.barrier()
            return [after[0] - before[0], after[1] - before[1], done[-1], None]

        def report() -> None:
            while (own := own_report()).waited_s < 0.5:
                time.sleep(0.01)
            found.append(own)
            reported.touch()

        threading.Thread(target=report).start()
        found: list[Report] = []
        dist.barrier()
        return [after[0] - before[0], after[1] - before[1], done[-1], found[0]]

    (*first, _), (*second, pending) = on_ranks(2, measure)
    assert first == second and first[:2] == [1, 1]
    assert first[2][1:3] == ("all_reduce", "float [3]") and first[2].waited_s == 0 and "(all_reduce)" in first[2].site
    assert pending.collectives[-1].operation == "barrier" and pending.collectives[-1].waited_s >= 0.5
    assert pending.site.startswith(f"{Path(__file__).name}:") and " (barrier)" in pending.site
