"""A collective that not all ranks call: each message names the line of the owner's files that has to be changed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config import Config
from ddp.core.call_site import PROJECT, Frame, call_site, format_stack, is_owner_file, names, stack_of, waits_for_work
from ddp.distributed import stop_sync
from ddp.distributed.collective_log import (
    Collective,
    collective_count,
    explain_mismatch,
    explain_other_number,
    first_difference,
    recorded_collectives,
    waiting,
)
from ddp.distributed.liveness import Report
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.terminate_handler import on_gloo_error
from ddp.distributed.wait_notice import describe_wait
from ddp.entrypoint.launch import run_as_rank
from faults import fault
from processes import Ranks, on_ranks

pytestmark = pytest.mark.slow

ADVICE = (
    "all ranks must make the same collective calls, in the same order; check code that depends on the rank: "
    "a condition, a continue, an exception that only one rank catches"
)
SAME_LINE = (
    "all ranks must pass tensors of the same shape, in the same order; check what depends on the rank, or on its data"
)
LOG = "                if run.should_log():\n"
BACKWARD = "scaler.scale(loss / config.grad_accum_steps).backward()"


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
        common = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 2, "--epochs", 1, "--timeout", 4]
        arguments = [str(option) for option in (*common, "--output-dir", self.folder / "out", *options)]

        def target(rank_env: RankEnv) -> int:
            spec = importlib.util.spec_from_file_location("edited", self.path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return run_as_rank(module.main, Config.parse(arguments), rank_env)

        ranks = Ranks(world_size, target)
        codes = ranks.wait(60)
        assert codes == [code] * world_size, ranks.output()
        return [ranks.output(rank) for rank in range(world_size)]


@pytest.fixture
def edited(small: None, template: Path, tmp_path: Path) -> Callable[[str, str], Edited]:
    """A main.py in which a text is replaced by another one."""
    return lambda old, new: Edited(template, tmp_path, old, new)


def verdicts(outputs: list[str]) -> list[str]:
    """The last line of each rank, without who says it."""
    last = [output.strip().splitlines()[-1] for output in outputs]
    return [line.partition("error: ")[2] or line.partition("is exiting because ")[2] for line in last]


def on_rank_0(code: str, step: int = 4) -> str:
    return f"                if ctx.rank == 0 and run.state.step == {step}:\n                    {code}\n"


@fault(37)
def test_a_barrier_on_rank_0_only(edited: Callable[..., Edited]) -> None:
    """While it waits, rank 0 prints where each rank is. At the timeout, there is one verdict, and the stacks."""
    main = edited(LOG, on_rank_0("torch.distributed.barrier()") + LOG)
    outputs = main.run(2, 1, "--warn-after", 1.5, "--timeout", 8)
    barrier, other = main.at("barrier()"), f"{main.at('meter.take()')} (take)"
    line = f"rank 0 called barrier at {barrier}, but rank 1 called all_reduce at {other}: {ADVICE}"
    assert verdicts(outputs) == [line] * 2
    warning = next(line for line in outputs[0].splitlines() if line.startswith("warning: "))
    waits = (f"rank 0 has waited N s at {barrier} (barrier)", f"rank 1 has waited N s at {other}")
    assert re.sub(r"\d s ", "N s ", warning).startswith(f"warning: {'; '.join(waits)}; these are different collectives")
    assert "has waited" not in outputs[1], "only rank 0 prints it"
    for output, code in zip(outputs, ("torch.distributed.barrier()", "meter.take()"), strict=True):
        stack = output.partition("main thread:\n")[2].splitlines()
        first = next(number for number, line in enumerate(stack) if line.startswith("> "))
        assert "/main.py:" in stack[first] and code in stack[first + 1], "taken before the stack unwinds"
        assert "start all ranks again" not in output


# Each: what to replace, by what, and what the ranks called, as (operation, code of the line, the text after it).
MISMATCHES: dict[str, tuple[str, str, tuple[str, str], tuple[str, str]]] = {
    "evaluate": (
        "            metrics = evaluate(evaluated_model, val_loader, config, ctx)\n            train_metrics",
        "            metrics = {'loss': 0.0, 'accuracy': 0.0}\n            if ctx.rank == 0:\n"
        "                metrics = evaluate(evaluated_model, val_loader, config, ctx)\n            train_metrics",
        ("return compute_metrics(meter.take())", " (take), called from {main}"),
        ("run.end_epoch(", " (end_epoch)"),
    ),
    "log_train": (
        LOG,
        "                if run.should_log() and ctx.rank == 0:\n",
        ("meter.take()", " (take)"),
        (BACKWARD, " (backward)"),
    ),
    "one extra batch": (
        "        while not run.finished():",
        "        if ctx.rank == 0:\n            ddp_model(torch.zeros(4, 3, 32, 32)).sum().backward()  # extra\n\n"
        "        while not run.finished():",
        ("sum().backward()  # extra", " (backward) and rank 1"),
        ("run.should_stop():", " (should_stop)"),
    ),
    "an exception swallowed on one rank": (
        f"                        {BACKWARD}\n",
        f"                        try:\n                            if ctx.rank == 1 and run.state.step == 5:\n"
        f"                                raise ValueError\n                            {BACKWARD}\n"
        "                        except ValueError:\n                            continue\n",
        (BACKWARD, " (backward)"),
        ("", ""),
    ),
    "two all-reduces in different order": (
        LOG,
        "                tensors = [torch.zeros(5), torch.zeros(7, 3)]\n"
        "                for tensor in tensors if ctx.rank == 0 else reversed(tensors):\n"
        f"                    torch.distributed.all_reduce(tensor)\n{LOG}",
        ("all_reduce(tensor)", ", but rank 1 called all_reduce of float [7, 3]"),
        ("all_reduce(tensor)", f": {SAME_LINE}"),
    ),
    "different shapes": (
        LOG,
        f"                torch.distributed.all_reduce(torch.zeros(5 + ctx.rank))\n{LOG}",
        ("all_reduce(torch", ", but rank 1 called all_reduce of float [6]"),
        ("all_reduce(torch", f": {SAME_LINE}"),
    ),
    "an all-reduce on one rank": (
        LOG,
        on_rank_0("torch.distributed.all_reduce(loss.detach())") + LOG,
        ("all_reduce(loss", ", but rank 1 called"),
        ("", ""),
    ),
}


@fault(37)
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_different_collectives(edited: Callable[..., Edited], case: str) -> None:
    old, new, *called = MISMATCHES[case]
    main = edited(old, new)
    outputs = main.run(2, 1)
    verdict, again = verdicts(outputs)
    assert verdict == again and verdict.endswith((f": {ADVICE}", f": {SAME_LINE}")) and verdict.startswith("rank 0 "), (
        outputs
    )
    caller = main.at("metrics = evaluate(")
    for code, text in called:
        assert f" at {main.at(code)}{text.format(main=caller)}" in verdict if code else True, verdict
    assert "Abort" not in "".join(outputs) and "start all ranks again" not in "".join(outputs)


def test_three_ranks_of_which_one_calls_something_else(edited: Callable[..., Edited]) -> None:
    main = edited(LOG, f"                torch.distributed.all_reduce(torch.zeros(6 if ctx.rank == 1 else 5))\n{LOG}")
    line = main.at("all_reduce(torch")
    verdict, *others = verdicts(main.run(3, 1))
    assert others == [verdict] * 2
    expected = (
        f"ranks 0 and 2 called all_reduce of float [5] at {line}, but rank 1 called all_reduce of float [6] at {line}"
    )
    assert verdict == f"{expected}: {SAME_LINE}"


@fault(15, 37)
@pytest.mark.parametrize("case", ["a sleeping rank", "an endless loop", "a dataset that hangs"])
def test_a_rank_that_does_not_come(edited: Callable[..., Edited], case: str) -> None:
    """The message names its line, and the line at which the others wait."""
    if case == "a dataset that hangs":
        hang = "        class Hangs(type(datasets.train)):\n            def __getitems__(self, indices):\n"
        hang += "                if ctx.rank == 1:\n                    __import__('time').sleep(3600)\n"
        hang += "                return super().__getitems__(indices)\n\n        datasets.train.__class__ = Hangs\n"
        main = edited("        train_loader = TrainLoader", hang + "        train_loader = TrainLoader")
        site = f"{main.at('sleep(3600)')}, called from {main.at('in enumerate(batches')}"
    else:
        code = "__import__('time').sleep(3600)" if case == "a sleeping rank" else "while True: pass"
        main = edited(LOG, on_rank_0(code).replace("rank == 0", "rank == 1") + LOG)
        site = main.at(code)
    outputs = main.run(2, 8, "--warn-after", 1)
    assert f"; rank 1 is at {site}" in next(line for line in outputs[0].splitlines() if line.startswith("warning: "))
    verdict, again = verdicts(outputs)
    assert verdict.startswith(
        f"rank 1 did not respond for 4 s (--timeout): rank 1 at {site}, while rank 0 waited at main.py"
    )
    assert verdict.startswith(again) and "start all ranks again" not in verdict
    assert f"> {main.path}:{site.partition(':')[2].partition(',')[0]} in " in outputs[1], "its stack"


@pytest.mark.parametrize("slow", [[0], [1], [0, 1]])
def test_a_slow_step_is_no_failure(edited: Callable[..., Edited], slow: list[int]) -> None:
    """If all ranks are slow, nothing is said; if one is, rank 0 prints its line. The run goes on."""
    condition = f"                if run.state.step == 3 and ctx.rank in {slow}:\n"
    main = edited(LOG, f"{condition}                    __import__('time').sleep(2.5)\n{LOG}")
    outputs = main.run(2, 0, "--warn-after", 1)
    said = [line for line in "".join(outputs).splitlines() if "waited" in line]
    assert len(said) == (1 if len(slow) == 1 else 0)
    if said:
        assert said[0].endswith(f"; rank {slow[0]} is at {main.at('sleep(2.5)')}") and said[0] in outputs[0]
        assert said[0].startswith(f"warning: rank {1 - slow[0]} has waited ")


def test_ranks_that_have_called_different_numbers_of_collectives_stop(
    edited: Callable[..., Edited], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, gradients of different steps would be added up without an error. Here, the numbers are made up."""
    monkeypatch.setattr(stop_sync, "collective_count", lambda device: dist.get_rank())
    outputs = edited(LOG, LOG).run(2, 1)
    assert verdicts(outputs) == [f"the ranks are at different steps: {ADVICE}"] * 2


def collective(number: int, operation: str = "all_reduce", tensors: str = "float [5]", **named: Any) -> Collective:
    return Collective(
        f"gloo 0 {number}", operation, tensors, named.get("site", "main.py:9"), named.get("waited_s", 0.0)
    )


def test_where_logs_differ() -> None:
    """They hold the last collectives: a rank that is ahead lacks older ones. A scatter has different tensors."""
    same = [collective(1), collective(2, "broadcast")]
    assert first_difference({0: same, 1: same[1:], 2: [*same, collective(3)]}) == {}
    logs = {
        0: [*same, collective(3)],
        1: [*same, collective(3, tensors="float [6]"), collective(4, "barrier")],
        2: same,
    }
    different = first_difference(logs)
    assert set(different) == {0, 1} and different[1].tensors == "float [6]"
    assert first_difference({0: [collective(1, "scatter")], 1: [collective(1, "scatter", "")]}) == {}
    lines = {0: [collective(1, site="main.py:7")], 1: [collective(1)]}
    assert first_difference(lines) == {} and explain_mismatch(lines) == ""
    same_call = "rank 0 at main.py:7 and rank 1 at main.py:9 made the same all_reduce call from different lines"
    assert explain_other_number(lines) == f"{same_call}: {ADVICE}"
    calls = {0: [collective(1, "barrier", "", site="main.py:7 (barrier)")], 1: [collective(1, site="")]}
    line = f"rank 0 called barrier at main.py:7, but rank 1 called all_reduce at ?: {ADVICE}"
    assert explain_mismatch(calls) == line == explain_other_number(calls)
    later = {0: [*lines[0], collective(2, tensors="float [5]")], 1: [*lines[1], collective(2, tensors="float [6]")]}
    line = "rank 0 called all_reduce of float [5] at main.py:9, but rank 1 called all_reduce of float [6] at main.py:9"
    assert explain_mismatch(later) == f"{same_call}; then {line}: {ADVICE}"


def test_what_is_said_about_a_wait() -> None:
    waits = {"waited_s": 31.2, "site": "main.py:79 (barrier)"}
    barrier = Report("", [collective(1), collective(2, "barrier", "", **waits)])
    elsewhere = Report("main.py:65", [collective(1)])
    assert (
        describe_wait({0: barrier, 1: elsewhere}, 30)
        == "rank 0 has waited 31 s at main.py:79 (barrier); rank 1 is at main.py:65"
    )
    many = describe_wait({0: elsewhere, 1: elsewhere, **dict.fromkeys(range(2, 9), barrier)}, 30)
    assert (
        many == "ranks 2, 3, 4 and 4 others have waited 31 s at main.py:79 (barrier); ranks 0 and 1 are at main.py:65"
    )
    together = describe_wait({0: barrier, 1: barrier}, 30)
    assert together == "all ranks have waited 31 s at main.py:79 (barrier): the network between them may be down"
    on_gpu = Report("", [collective(2, waited_s=40.0)._replace(key="nccl 0 2")])
    assert describe_wait({0: on_gpu, 1: on_gpu}, 30) == "", "a step that is slow on all GPUs"
    assert (
        describe_wait({0: on_gpu, 1: elsewhere}, 30) == "rank 0 has waited 40 s at main.py:9; rank 1 is at main.py:65"
    )
    assert describe_wait({0: barrier, 1: elsewhere}, 40) == "" == describe_wait({0: elsewhere, 1: elsewhere}, 30)
    reduces = Report("", [collective(1), collective(2, waited_s=40.0)])
    assert describe_wait({0: barrier, 1: reduces}, 30).endswith(
        "; these are different collectives (barrier, all_reduce)"
    )
    parted = [collective(1, site="main.py:7"), collective(2, "barrier", "", **waits)]
    assert describe_wait({0: Report("", parted), 1: reduces}, 30).endswith(
        "; before, rank 0 at main.py:7 and rank 1 at main.py:9 made the same all_reduce call from different lines"
    )


def test_the_line_of_the_owner() -> None:
    launch = str(PROJECT / "ddp/entrypoint/launch.py")
    package, torch_file = str(PROJECT / "ddp/training/meter.py"), torch.__file__
    main, model, elsewhere = str(PROJECT / "main.py"), str(PROJECT / "models/net.py"), "/srv/lab/losses.py"
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
    here = format_stack(stack_of(threading.get_ident())).splitlines()
    assert any(line.startswith("> ") and "test_the_line_of_the_owner" in line for line in here)
    assert any("here = format_stack(stack_of(" in line for line in here)
    assert format_stack([Frame(package, 3, "take"), *base[:1]]) == f"  {package}:3 in take", "nothing from before main"
    outer = [Frame(package, 3, "init_distributed"), *base]
    assert format_stack([Frame(elsewhere, 7, "loss"), *outer]) == f"> {elsewhere}:7 in loss", "ends with an own line"
    assert [names(list(range(count))) for count in (1, 2, 4, 9)] == [
        "rank 0",
        "ranks 0 and 1",
        "ranks 0, 1, 2 and 3",
        "ranks 0, 1, 2 and 6 others",
    ]


def test_stacks_leave_out_threads_that_wait_for_work() -> None:
    """But not one that saves, or that the owner started."""
    wait, save = Frame(threading.__file__, 5, "wait"), Frame(str(PROJECT / "ddp/core/files.py"), 9, "write")
    main, pin = Frame(str(PROJECT / "main.py"), 7, "upload"), Frame(torch.__file__, 3, "do_one_step")
    stacks = [[wait], [Frame(save.file, 1, "_watch"), wait], [wait, main], [save, wait], [pin, wait], []]
    assert [waits_for_work(stack) for stack in stacks] == [True, True, False, False, False, False]


def test_the_log_of_a_rank_knows_what_it_waits_for() -> None:
    """And its number of collectives grows with each."""

    def measure(ctx: Any) -> Any:
        before = collective_count(), collective_count(torch.device("cpu"))
        dist.all_reduce(torch.zeros(3))
        after = collective_count(), collective_count(torch.device("cpu"))
        time.sleep(0.3)  # a thread of gloo marks it as done a moment later
        done = recorded_collectives()
        if ctx.rank == 0:
            time.sleep(3)
            dist.barrier()
            return [after[0] - before[0], after[1] - before[1], done[-1], None]
        threading.Timer(0.7, lambda: found.append(waiting(recorded_collectives()))).start()
        found: list[Collective | None] = []
        dist.barrier()
        return [after[0] - before[0], after[1] - before[1], done[-1], found[0]]

    (*first, _), (*second, pending) = on_ranks(2, measure)
    assert first == second and first[:2] == [1, 1]
    assert first[2][1:3] == ("all_reduce", "float [3]") and first[2].waited_s == 0 and "(all_reduce)" in first[2].site
    assert pending.operation == "barrier" and 0.5 < pending.waited_s < 5
    assert pending.site.startswith(f"{Path(__file__).name}:")


@pytest.mark.parametrize("of_gloo", [True, False])
def test_other_errors_of_cpp_abort_as_before(tmp_path: Path, of_gloo: bool) -> None:
    """Here C++ ends the process because of an error of gloo, which is explained, or without an exception."""

    def target(rank_env: RankEnv) -> int:
        on_gloo_error(lambda: os._exit(42))
        if not of_gloo:
            ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank_env.rank, world_size=2, timeout=timedelta(seconds=9))
        dist.all_reduce(torch.zeros(5 + rank_env.rank))
        time.sleep(9)
        return 0

    ranks = Ranks(2 if of_gloo else 1, target)
    codes = ranks.wait(60)
    assert 42 in codes if of_gloo else codes == [-signal.SIGABRT], ranks.output()


def test_reports_pass_through_the_store() -> None:
    report = Report("main.py:7", [collective(1), collective(2, waited_s=3.5)])
    assert Report.load(report.dump().encode()) == report
    assert SimpleNamespace(**Report.now()._asdict()).site.startswith("test_collectives.py:")
