"""launch_node.sh on one and on several machines: they meet, agree, start again, stop, and leave nothing behind.

Machines are network namespaces; launcher, torchrun and signals are real. Where training itself is not the matter, a
stub replaces main.py: it writes the files that `tell_launcher` of ddp/core/process_exit.py writes, without torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from template_copy import TEMPLATE, copy_template

from faults import fault
from machines import CONNECTED, Machine, Program, machines
from needs import need, need_root

pytestmark = pytest.mark.slow
ALL = partial(pytest.param, marks=pytest.mark.sample(0))  # a case for --all
STUB = """
import ctypes, json, os, pathlib, signal, time
ctypes.CDLL(None).prctl(1, 15)  # as die_with_parent: SIGTERM when the launcher is gone
folder = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
rank, started = int(os.environ["RANK"]), pathlib.Path(os.environ["STUB"])
with (started / f"rounds-{rank}").open("a") as file: file.write("x")
turn = (started / f"rounds-{rank}").stat().st_size
def end(code, saved=None, **info):
    if saved is not None: (folder / "saved").write_text(str(saved))
    info = {"timestamp": str(int(time.time())), "cause": True, **info}
    message = {"message": f"rank {rank} has ended with {code}", "errorCode": code, "extraInfo": info}
    (folder / ("error.json" if code else "done")).write_text(json.dumps({"message": message}))
    os._exit(code)
def meet():
    others = [started / f"pid-{other}-{turn}" for other in range(int(os.environ["WORLD_SIZE"]))]
    while not all(other.exists() for other in others): time.sleep(0.01)
def die(number=9):
    meet()
    os.kill(os.getpid(), number)
def stop(number, frame):
    print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
    time.sleep(float(os.environ.get("SAVING", "0.5")))
    print(f"rank {rank} has saved", flush=True)
    end(75, saved=os.environ.get("SAVED", "7"))
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"): signal.signal(getattr(signal, name), stop)
(folder / "pid.tmp").write_text(str(os.getpid()))
(folder / "pid.tmp").replace(folder / "pid")
(started / f"pid-{rank}-{turn}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, turn {turn}", flush=True)
exec(os.environ["DO"])
end(0)
"""
FOR_EVER = "time.sleep(600)"
UNTIL_RELEASED = "while not (started / 'released').exists(): time.sleep(0.02)"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """The project with a stub in the place of main.py; whatever of it a failed test has left running is killed."""
    copy = copy_template(tmp_path / "my project")
    (copy / "main.py").write_text(STUB)
    yield copy
    for pid in running(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def replace(file: Path, before: str, after: str) -> None:
    """Change a line of the project's code."""
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))


def running(folder: Path) -> list[int]:
    """Processes with this folder in their command line."""
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [int(path.parent.name) for path in found if os.fsencode(folder) in _read(path)]


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    with machines(2) as made:
        yield made


def alone(project: Path, do: str, *arguments: Any, **environ: str) -> Program:
    """launch_node.sh with the stub, on this machine."""
    environ = {"STUB": str(project.parent), "DO": do, "TMPDIR": str(_temporary(project)), **environ}
    return Program(["bash", project / "launch_node.sh", *arguments], environ)


def node(machine: Machine, rank: int, project: Path, do: str = "", *arguments: Any, **environ: str) -> Program:
    """launch_node.sh with the stub, as node `rank` of 2 at gpu1's address; one process."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1", "DO": do}
    variables |= {"STUB": str(project.parent), "START_GRACE": "300", "TMPDIR": str(_temporary(project)), **environ}
    return machine.start("bash", project / "launch_node.sh", *arguments, **variables)


def _temporary(project: Path) -> Path:
    folder = project.parent / "temporary"
    folder.mkdir(exist_ok=True)
    return folder


def assert_nothing_left(project: Path) -> None:
    """No process of any round, no temporary file."""
    time.sleep(0.2)
    pids = [int(file.read_text()) for file in project.parent.glob("pid-*")]
    assert not [pid for pid in pids if _runs(pid)]
    assert running(project.parent) == []
    assert list(_temporary(project).iterdir()) == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    return bool(_read(Path(f"/proc/{pid}/cmdline")))


def refused_alike(programs: list[Program], *says: str) -> str:
    """All end with 3 and the same one line; before that, they may have printed that they wait for another."""
    codes = [program.wait() for program in programs]  # less than START_GRACE
    lines = [re.sub(r"^node \d: waiting .*\n", "", program.output()) for program in programs]
    assert codes == [3] * len(programs), lines
    assert len(set(lines)) == 1 and lines[0].count("\n") == 1, lines
    assert all(text in lines[0] for text in says), lines[0]
    return lines[0]


# ---- meeting --------------------------------------------------------------------------------------------------------


@fault(26, 28, 34)
@pytest.mark.parametrize("address", ["gpu1", ALL("10.77.0.1")])
def test_two_machines_meet_and_their_workers_know_the_world_size(
    two: list[Machine], project: Path, address: str
) -> None:
    """Even if node 1 is early. To gpu1 itself, gpu1 is 127.0.0.1. Their --data-dir may differ."""

    def start(rank: int) -> Program:
        do = "print(os.environ['MASTER_ADDR'])"  # what connects, also if the name has other addresses
        return node(two[rank], rank, project, do, "--", "--data-dir", rank, MASTER_ADDR=address)

    later = start(1)
    waiting = f"node 1: waiting for node 0 at {address}:29500 (up to 300 s; Connection refused)"
    assert later.until("waiting") == f"{waiting}\n"
    nodes = [start(0), later]
    assert [program.wait() for program in nodes] == [0, 0], [program.output() for program in nodes]
    assert nodes[0].output() == "rank 0 of 2, turn 1\n10.77.0.1\n"
    _, connected, *worker, done = nodes[1].output().splitlines()
    assert worker == ["rank 1 of 2, turn 1", "10.77.0.1"] and done == "node 1: done"
    assert connected == "node 1: all nodes are connected; 1 process here; node 0 prints the progress"
    assert_nothing_left(project)


@pytest.mark.sample(2, "refusals of nodes")
@fault(25)
def test_a_port_that_is_taken_is_named_with_its_holder(two: list[Machine], project: Path) -> None:
    serve = "import socket, time; s = socket.create_server(('', 29500)); print('up'); time.sleep(600)"
    other = two[0].start(sys.executable, "-c", serve)
    other.until("up")
    line = refused_alike([node(two[0], 0, project)], "port 29500 of gpu1", f"pid {other.process.pid}", "--master-port")
    assert "socket.create_server" in line


@pytest.mark.sample(2, "refusals of nodes")
@fault(25)
def test_another_program_at_the_port_of_node_0_is_recognised(two: list[Machine], project: Path) -> None:
    replace(project / "ddp" / "launcher" / "node_rendezvous.py", "_GRACE_S = 10.0", "_GRACE_S = 1.0")
    serve = "import socket; s = socket.create_server(('', 29500)); print('up')\n"
    serve += "while True: s.accept()[0].sendall(b'SSH-2.0-OpenSSH\\r\\n')"
    two[0].start(sys.executable, "-c", serve).until("up")
    visitor = node(two[1], 1, project)
    assert visitor.wait() == 3
    waiting, line = visitor.output().splitlines()
    assert waiting.endswith("(up to 300 s; another program uses that port)")
    assert "node 1 (gpu2) finds another program than node 0 at 10.77.0.1:29500" in line and "--master-port" in line


@pytest.mark.sample(2, "refusals of nodes")
@fault(26)
def test_a_name_that_does_not_resolve_is_refused_at_once(two: list[Machine], project: Path) -> None:
    nodes = [node(machine, rank, project, MASTER_ADDR="gpu77") for rank, machine in enumerate(two)]
    for program, name in zip(nodes, ("gpu1", "gpu2"), strict=True):
        refused_alike([program], "--master-addr gpu77", f"{name} cannot find its address")


@pytest.mark.sample(1, "nodes that do not meet")
@fault(26)
def test_nodes_meet_although_no_name_server_responds(
    two: list[Machine], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's store asks it for the name of each address that connects. The workers' own lookups stay as they are."""
    monkeypatch.delenv("RES_OPTIONS")
    for machine in two:
        machine.lose_name_server()
    do = "meet(); assert 'RES_OPTIONS' not in os.environ"
    nodes = [node(machine, rank, project, do) for rank, machine in enumerate(two)]
    assert [program.wait() for program in nodes] == [0, 0], "".join(program.output() for program in nodes)


@pytest.mark.sample(2, "refusals of nodes")
@fault(26)
def test_node_0_refuses_an_address_that_is_not_its_own(two: list[Machine], project: Path) -> None:
    programs = {wrong: node(two[0], 0, project, MASTER_ADDR=wrong) for wrong in ("10.77.0.9", "8.8.8.8")}
    for wrong, program in programs.items():
        refused_alike([program], f"--master-addr {wrong} is not an address of gpu1", "10.77.0.1")


@pytest.mark.sample(2, "refusals of nodes")
@fault(26)
def test_a_network_that_cannot_be_reached_is_refused_at_once(two: list[Machine], project: Path) -> None:
    program = node(two[1], 1, project, MASTER_ADDR="192.168.9.9")
    refused_alike([program], "node 1 (gpu2) has no route to node 0 at 192.168.9.9:29500", "unreachable")


@pytest.mark.sample(1, "nodes that do not meet")
@fault(26)
def test_after_the_grace_time_each_node_says_whom_it_missed(two: list[Machine], project: Path) -> None:
    variables = {"START_GRACE": "5", "NNODES": "4"}
    alone_here = node(two[1], 2, project, MASTER_PORT="29501", **variables)
    other = node(two[1], 2, project, **{**variables, "START_GRACE": "90"})
    other.until("node 2: waiting for node 0")
    nodes = [node(two[0], 0, project, **variables), other]
    assert alone_here.wait() == 3
    waiting, refused = alone_here.output().splitlines()
    assert waiting.startswith("node 2: waiting for node 0")
    assert "node 2 (gpu2) got no answer from node 0 at 10.77.0.1:29501 within 5 s (Connection refused)" in refused
    assert [program.wait() for program in nodes] == [3, 3]
    assert "node 0: waiting for nodes 1 and 3 at port 29500 (up to 5 s)" in nodes[0].output()
    last = nodes[0].output().splitlines()[-1]
    assert "only 2 of 4 nodes joined at 10.77.0.1:29500 within 5 s: node 0 (gpu1, 10.77.0.1), node 2 (gpu2" in last
    remedy = "Run launch_node.sh there with --master-addr 10.77.0.1"
    assert f"node 2 (gpu2, 10.77.0.2); missing: nodes 1 and 3. {remedy}" in last
    assert nodes[1].output().splitlines()[-1] == last


@fault(34)
def test_one_of_two_machines_never_trains_alone(two: list[Machine], project: Path) -> None:
    program = node(two[0], 0, project, START_GRACE="1")
    assert program.wait() == 3 and "only 1 of 2 nodes joined at 10.77.0.1:29500 within 1 s" in program.output()
    assert list(project.parent.glob("rounds-*")) == []


@fault(27)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "other, says",
    [
        ({"NNODES": "3"}, "--nnodes is 2 and 3"),
        ({"NPROC_PER_NODE": "2"}, "--nproc-per-node is 1 and 2"),
        ({"PYTHONPATH": "FAKE"}, "torch is "),
    ],
)
def test_nodes_that_were_started_differently_are_refused_both_by_name(
    two: list[Machine], project: Path, tmp_path: Path, other: dict[str, str], says: str
) -> None:
    fake = tmp_path / "site" / "torch-1.2.3.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    other = {name: str(fake.parent) if value == "FAKE" else value for name, value in other.items()}
    nodes = [node(two[0], 0, project), node(two[1], 1, project, **other)]
    refused_alike(nodes, says, "node 0 (gpu1, 10.77.0.1) and node 1 (gpu2, 10.77.0.2) do not agree")


@pytest.mark.sample(2, "refusals of nodes")
@fault(27)
def test_other_options_are_refused(two: list[Machine], project: Path) -> None:
    nodes = [node(two[0], 0, project, "", "--", "--lr", 0.1), node(two[1], 1, project, "", "--", "--epochs", 20)]
    line = refused_alike(nodes, "--lr is 0.1 and 0.03", "--epochs is 10 and 20")
    assert "differs" not in line


@pytest.mark.sample(2, "refusals of nodes")
@fault(27)
def test_other_code_is_refused_and_the_files_are_named(two: list[Machine], project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "another name"
    shutil.copytree(project, elsewhere)
    (elsewhere / "model.py").write_text("# changed\n")
    (elsewhere / "ddp" / "more.py").write_text("# new\n")
    (elsewhere / "tests" / "more.py").write_text("# tests may differ\n")
    nodes = [node(two[0], 0, project), node(two[1], 1, elsewhere)]
    refused_alike(nodes, "gpu1", "gpu2", "the file model.py differs; the file ddp/more.py differs.")


def late_node(machine: Machine, rank: int, project: Path, **environ: str) -> Program:
    """A node that has started, and waits for SIGCONT before it connects: its imports take time on a busy machine."""
    late = node(machine, rank, project, **environ)
    late.until("waiting")
    late.signal(signal.SIGSTOP)
    return late


@pytest.mark.sample(2, "refusals of nodes")
@fault(27)
def test_one_node_rank_on_two_machines_is_refused_on_all_even_on_one_that_comes_later(project: Path) -> None:
    several = {"NNODES": "3", "START_GRACE": "90"}
    with machines(3) as three:
        late = late_node(three[0], 2, project, **several)
        nodes = [node(machine, rank, project, **several) for machine, rank in zip(three, (0, 1, 1), strict=True)]
        for machine in three[1:]:
            machine.until_port(29500, CONNECTED)
        late.signal(signal.SIGCONT)
        line = refused_alike([*nodes, late], "the same --node-rank: give each machine its own, from 0 to 2")
        assert "node 1 (gpu2, 10.77.0.2)" in line and "node 1 (gpu3, 10.77.0.3)" in line


@pytest.mark.sample(2, "refusals of nodes")
@fault(27)
def test_a_second_node_0_is_refused_and_so_is_the_first(two: list[Machine], project: Path) -> None:
    late = late_node(two[1], 1, project, START_GRACE="90")
    first = node(two[0], 0, project)
    two[0].until_port(29500)
    second = node(two[1], 0, project)
    two[1].until_port(29500, CONNECTED)
    time.sleep(0.5)  # it has sent its rank
    late.signal(signal.SIGCONT)
    nodes = [first, second, late]
    refused_alike(nodes, "node 0 (gpu1, 10.77.0.1)", "node 0 (gpu2, 10.77.0.2)", "the same --node-rank")


@pytest.mark.sample(0)
@fault(27, 42)
def test_strangers_at_the_port_do_not_disturb(two: list[Machine], project: Path) -> None:
    first = node(two[0], 0, project, "end(6)")
    knock = "import socket, sys, time\nfor i in range(600):\n try: s = socket.create_connection(('10.77.0.1', 29500))\n"
    knock += " except OSError: time.sleep(0.1); continue\n break\n"
    # Who sends too much is sent away.
    knock += "try: s.sendall(eval(sys.argv[1]))\nexcept ConnectionError: pass\nprint('sent'); time.sleep(60)"
    for said in (
        "b''",
        "bytes(range(256)) * 50",
        "b'GET / HTTP/1.1\\r\\n\\r\\n'",
        "b'{\"node_rank\": 1}\\n'",
        "b'[[' * 2000000",
    ):
        two[1].start(sys.executable, "-c", knock, said).until("sent")
    other = node(two[1], 1, project, "end(6)")
    assert (first.wait(), other.wait()) == (6, 6), first.output() + other.output()


@pytest.mark.sample(0)
@fault(27)
def test_a_node_that_dies_while_it_waits_may_come_again(project: Path) -> None:
    with machines(3) as three:
        several = {"NNODES": "3", "START_GRACE": "150"}  # launchers start one after the other here
        first = node(three[0], 0, project, "end(6)", **several)
        for number in (signal.SIGKILL, signal.SIGTERM):
            killed = node(three[1], 1, project, **several)
            three[1].until_port(29500, CONNECTED)
            time.sleep(0.5)  # it has registered
            killed.signal(number)
            assert killed.wait() in (75, -9)
        rest = [node(three[rank], rank, project, "end(6)", **several) for rank in (1, 2)]
        assert [program.wait() for program in (first, *rest)] == [6, 6, 6], first.output()


def test_the_interface_of_an_address_is_known_without_any_tool() -> None:
    from ddp.core.host import addresses, interface_of

    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == ("lo" if sys.platform == "linux" else "lo0")
    assert interface_of("203.0.113.9") is None
    names = {name for _, name in socket.if_nameindex()}
    assert set(addresses().values()) <= names


# ---- exit codes, and starting again ---------------------------------------------------------------------------------


@pytest.mark.sample(1, "what a launcher kills")
def test_what_a_shell_has_started_before_it_became_the_launcher_is_left_alone(project: Path) -> None:
    """Such as `tensorboard & exec ./launch_node.sh` in a container."""
    command = f"sleep 77 & echo other $!; exec bash '{project}/launch_node.sh' --max-restarts 1"
    environ = {"STUB": str(project.parent), "DO": "if turn == 1: die()", "TMPDIR": str(_temporary(project))}
    launcher = Program(["bash", "-c", command], environ)
    assert launcher.wait() == 0 and "starting again" in launcher.output(), launcher.output()
    other = int(re.search(r"^other (\d+)$", launcher.output(), re.MULTILINE)[1])
    assert _runs(other)
    os.kill(other, signal.SIGKILL)
    assert_nothing_left(project)


def test_standard_streams_that_are_closed_are_open_in_the_workers(project: Path) -> None:
    """Otherwise the first file that a worker opens is its standard output."""
    do = "(started / 'streams').write_text(' '.join(os.readlink(f'/proc/self/fd/{number}') for number in range(3)))"
    variables = {"STUB": str(project.parent), "DO": do, "TMPDIR": str(_temporary(project))}
    launcher = shlex.join(["bash", str(project / "launch_node.sh")])
    assert Program(["bash", "-c", f"exec {launcher} <&- >&- 2>&-"], variables).wait() == 0
    assert (project.parent / "streams").read_text() == "/dev/null /dev/null /dev/null"


def test_what_it_has_started_is_known_where_other_processes_are_hidden(project: Path) -> None:
    """By /proc with hidepid, as on many shared machines. Without its capabilities, root is an ordinary user there."""
    need("setpriv")
    need_root("a mount of /proc")
    code = "import subprocess; from ddp.core.signals import *\n"
    code += "child = subprocess.Popen(['sh', '-c', 'sleep 600 & echo started; wait'], stdout=-1)\n"
    code += "child.stdout.readline(); pids = [each.pid for each in with_descendants(*children())]\n"
    code += "assert pids[0] == child.pid and len(pids) == 2, pids\n"
    code += "kill_children(); import psutil; assert not psutil.pid_exists(child.pid)"
    user = "setpriv --regid 54321 --clear-groups --bounding-set -all --inh-caps -all"
    hidden = f"mount -t proc -o hidepid=1 proc /proc && exec {user} {shlex.join([sys.executable, '-c', code])}"
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", f"sleep 60 & {hidden}"]
    done = subprocess.run(unshare, cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@fault(13)
def test_the_exit_code_is_that_of_the_cause(project: Path) -> None:
    do = "signal.signal(15, signal.SIG_IGN); meet(); time.sleep(rank / 5)\n"
    do += "end(6 if rank == 1 else 8, cause=rank == 1, timestamp=100 + rank)"
    launcher = alone(project, do, "--nproc-per-node", 2, "--max-restarts", 3)
    assert launcher.wait() == 6, launcher.output()
    assert len(launcher.output().splitlines()) == 2, "nothing but what the workers have said"
    assert_nothing_left(project)


@pytest.mark.sample(0)
@pytest.mark.parametrize("code", [4, 75, 1])
def test_what_will_not_get_better_is_not_tried_again(project: Path, code: int) -> None:
    launcher = alone(project, f"end({code})", "--max-restarts", 3)
    assert launcher.wait() == code and "starting again" not in launcher.output()


# What happens in each turn, and what the launcher prints then. Progress resets the number of restarts.
TURNS = {
    "signal.signal(15, signal.SIG_IGN); meet(); os._exit(1)": (
        "a process failed (exit code 1); starting again from the last checkpoint, if there is one, restart 1"
    ),
    # It is killed before training. torchrun stops rank 0, which takes that for a request to stop, and reports 75.
    f"if rank == 1: die()\n{FOR_EVER}": "a process was lost (exit code 8); starting again from step 1,150, restart 1",
    # It has noted how far the run came. On a machine without the output folder, nothing else would tell that.
    "(folder / 'saved').write_text('1160'); die()": (
        "a process was lost (exit code 8); starting again from step 1,160, restart 1"
    ),
    # It leaves no report: the step is that of the turn before.
    "die()": "a process was lost (exit code 8); starting again from step 1,160, restart 2",
    "end(8, saved=1160)": "",
}


@fault(1)
def test_a_job_that_lost_a_process_starts_again_as_long_as_it_gets_on(project: Path) -> None:
    launch_node = project / "ddp" / "launcher" / "launch_node.py"
    replace(launch_node, "RESTART_INTERVAL_S = 1, 60", "RESTART_INTERVAL_S = 0.1, 60")
    options = ["--nproc-per-node", 2, "--max-restarts", 2, "--", "--output-dir", project / "out"]
    launcher = alone(project, f"exec({[*TURNS]!r}[turn - 1])", *options, SAVED="1150")
    assert launcher.wait(300) == 8, launcher.output()
    told = [line.partition(" of 2, in 0.")[0] for line in launcher.output().splitlines() if "starting again" in line]
    assert told == [line for line in TURNS.values() if line]
    assert "rank 0 got SIGTERM" in launcher.output()
    assert_nothing_left(project)


@fault(1, 12)
def test_what_a_killed_worker_has_started_is_gone_before_the_next_round(project: Path) -> None:
    do = "import subprocess\nchild = started / 'pid-child'\n"
    do += "if turn == 1: child.write_text(str(subprocess.Popen(['sleep', '600']).pid)); die()\n"
    do += "print('gone' if not pathlib.Path('/proc', child.read_text()).exists() else 'there', flush=True)"
    launcher = alone(project, do, "--max-restarts", 1)
    assert launcher.wait() == 0 and "\ngone\n" in launcher.output(), launcher.output()
    assert_nothing_left(project)


@fault(14)
@pytest.mark.sample(0)
def test_the_ranks_of_a_node_that_leave_early_with_0_are_lost(two: list[Machine], project: Path) -> None:
    """torchrun would wait there for five minutes, and exit with 0. Real ranks of the other node notice it."""
    replace(project / "ddp" / "launcher" / "launch_node.py", "NODES_GRACE_S = 60.0", "NODES_GRACE_S = 2.0")
    do = "os._exit(0) if rank == 0 else time.sleep(1) or end(8)"
    nodes = [node(machine, rank, project, do, MAX_RESTARTS="0") for rank, machine in enumerate(two)]
    assert [program.wait() for program in nodes] == [8, 8], [program.output() for program in nodes]
    assert "the processes here have ended, and those of another node have not" in nodes[0].output()


@pytest.mark.sample(0)
@fault(9)
def test_a_run_that_is_done_stays_done_though_the_launcher_is_signalled(project: Path) -> None:
    do = "signal.signal(15, signal.SIG_IGN); (folder / 'done').write_text(''); os.kill(os.getppid(), 15); time.sleep(1)"
    assert alone(project, do).wait() == 0
    assert_nothing_left(project)


@fault(1)
def test_the_status_of_a_run_whose_rank_0_was_killed_says_so(project: Path) -> None:
    out = project / "out"
    out.mkdir()
    do = f"(pathlib.Path({str(out)!r}) / 'status.json').write_text(json.dumps(dict(state='running', step=5, "
    do += f"pid=os.getpid(), host={platform.node()!r}, message=''))); die()"
    launcher = alone(project, do, "--", "--output-dir", out)
    assert launcher.wait() == 8 and "rank 0: process " in launcher.output() and "SIGKILL" in launcher.output()
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 8, 5) and status["message"]
    assert [path.name for path in out.iterdir()] == ["status.json"]


@pytest.mark.sample(1, "nodes that do not meet")
@fault(1, 29)
def test_the_status_of_a_run_whose_nodes_do_not_meet_again_says_so(two: list[Machine], project: Path) -> None:
    """Rank 0 was killed, and node 1 comes back with other options."""
    out = project / "out"
    out.mkdir()
    do = f"""
if rank == 0:
    status = dict(state="running", step=5, pid=os.getpid(), host=os.uname().nodename, message="")
    (pathlib.Path({str(out)!r}) / "status.json").write_text(json.dumps(status))
meet()
{UNTIL_RELEASED}
die()
"""
    options = ["--", "--output-dir", out]
    nodes = [node(machine, rank, project, do, *options) for rank, machine in enumerate(two)]
    for program, rank in zip(nodes, range(2), strict=True):
        program.until(f"rank {rank} of 2")
    nodes[1].signal(signal.SIGKILL)
    (project.parent / "released").touch()
    nodes[0].until("waiting for node 1")
    nodes[1] = node(two[1], 1, project, do, *options, "--epochs", 2)
    assert [program.wait() for program in nodes] == [3, 3], [program.output() for program in nodes]
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 3, 5)
    assert "do not agree: --epochs is 10 and 2" in status["message"]


@fault(1, 29)
def test_two_machines_start_again_together_when_one_has_lost_a_process(two: list[Machine], project: Path) -> None:
    do = "signal.signal(15, signal.SIG_IGN)\nif turn == 1 and rank == 1: die()\n"
    do += "if turn == 1: meet(); time.sleep(0.5); end(8, cause=False, saved=3)"
    nodes = [node(machine, rank, project, do) for rank, machine in enumerate(two)]
    assert [program.wait() for program in nodes] == [0, 0], [program.output() for program in nodes]
    again = "node 0: a process was lost (exit code 8); starting again from step 3, restart 1 of 3, in 1 s"
    assert again in nodes[0].output()
    assert "node 1: a process was lost (exit code 8)" in nodes[1].output()
    assert_nothing_left(project)


@fault(29)
def test_a_node_that_is_done_does_not_wait_for_a_store_out_of_reach(two: list[Machine], project: Path) -> None:
    """Node 1's worker is done, and torchrun waits there for node 0; the network is gone."""
    replace(project / "ddp" / "launcher" / "launch_node.py", "NODES_GRACE_S = 60.0", "NODES_GRACE_S = 2.0")
    do = f"{FOR_EVER} if rank == 0 else time.sleep(2)"
    nodes = [node(machine, rank, project, do) for rank, machine in enumerate(two)]
    nodes[1].until("rank 1")
    two[1].link("down")
    assert nodes[1].wait() == 0, nodes[1].output()
    nodes[0].signal(signal.SIGTERM)
    assert nodes[0].wait() == 75


SILENT_NAME_SERVER = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("up", flush=True)
while server.recv(1000): print("asked", flush=True)
"""


@pytest.mark.parametrize(("do", "code"), [("die()", 8), ALL("", 0)])
def test_a_name_server_that_does_not_respond_does_not_delay_the_end(project: Path, do: str, code: int) -> None:
    """torchrun looks up the name of its own machine, once for each worker and more: usually each takes 10 s or more."""
    with machines(1) as (machine,):
        etc = Path("/etc/netns") / machine.namespace
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        server = machine.start(sys.executable, "-c", SILENT_NAME_SERVER)
        server.until("up")
        assert machine.start(sys.executable, "-c", "import socket; socket.getfqdn()").wait() == 0
        assert "asked" in server.output()
        do = f"{UNTIL_RELEASED}\n{do}"
        variables = {"STUB": str(project.parent), "DO": do, "TMPDIR": str(_temporary(project))}
        launcher = machine.start("bash", project / "launch_node.sh", "--nproc-per-node", "2", **variables)
        for rank in (0, 1):
            launcher.until(f"rank {rank} of 2")
        before = server.output().count("asked")
        (project.parent / "released").touch()
        assert launcher.wait() == code, launcher.output()
        assert server.output().count("asked") == before


# ---- stopping -------------------------------------------------------------------------------------------------------


@fault(9)
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_launcher_reaches_each_worker_once_and_they_may_take_their_time(
    project: Path, name: str
) -> None:
    launcher = alone(project, FOR_EVER, "--nproc-per-node", 2)
    launcher.until("rank 0 of")
    launcher.until("rank 1 of")
    launcher.signal(getattr(signal, name))
    time.sleep(0.2)
    launcher.signal(getattr(signal, name))  # the same request, arriving twice
    assert launcher.wait() == 75, launcher.output()
    told = "SIGTERM" if name == "SIGHUP" else name
    before, *_ = launcher.output().partition("has saved")  # torchrun then signals the rank that has not yet exited
    assert before.count("got") <= 2 <= launcher.output().count(f"got {told}"), launcher.output()
    assert_nothing_left(project)


@fault(9)
@pytest.mark.parametrize("to_all", [True, ALL(False)])
def test_a_large_model_is_saved_longer_than_torchrun_would_wait(project: Path, to_all: bool) -> None:
    """torchrun's patience is 30 s; here it is 1 s, where a torch lets it be set. Slurm signals every process."""
    launcher = alone(project, FOR_EVER, SAVING="3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1", PET_SHUTDOWN_TIMEOUT="1")
    launcher.until("rank 0 of")
    launcher.signal(signal.SIGTERM)
    if to_all:
        os.kill(int((project.parent / "pid-0-1").read_text()), signal.SIGTERM)
    assert launcher.wait() == 75 and "has saved" in launcher.output(), launcher.output()


@fault(9)
def test_ctrl_c_in_a_terminal_reaches_each_worker_once(project: Path) -> None:
    """The terminal signals the launcher's whole process group."""
    launcher = alone(project, FOR_EVER)
    launcher.until("rank 0 of")
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.wait() == 75, launcher.output()
    assert launcher.output().count("got SIGINT") == launcher.output().count("has saved") == 1, launcher.output()


@fault(10)
def test_a_second_signal_ends_everything_at_once(project: Path) -> None:
    """Also a worker that has just started, without a file `pid`, and what workers have started themselves."""
    do = "import subprocess\nif rank == 1: (folder / 'pid').unlink()\n"
    do += "(started / f'pid-{rank}-child').write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    launcher = alone(project, do + FOR_EVER, "--nproc-per-node", 2, SAVING="300")
    launcher.until("rank 0 of")
    launcher.until("rank 1 of")
    launcher.signal(signal.SIGUSR1)
    launcher.until("got SIGUSR1")
    time.sleep(1.2)
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM, launcher.output()  # long before they have saved
    assert launcher.output().splitlines()[-1].endswith("quit immediately on a second signal (SIGTERM)")
    assert "was killed" not in launcher.output(), "that was asked for"
    assert_nothing_left(project)


@fault(11)
def test_under_nohup_a_hangup_changes_nothing(project: Path) -> None:
    launcher = Program(
        ["nohup", "bash", project / "launch_node.sh"],
        {"STUB": str(project.parent), "DO": UNTIL_RELEASED, "TMPDIR": str(_temporary(project))},
    )
    launcher.until("rank 0 of")
    launcher.signal(signal.SIGHUP)
    time.sleep(0.3)
    (project.parent / "released").touch()
    assert launcher.wait() == 0, launcher.output()


@fault(9)
def test_a_signal_before_training_begins_ends_all_with_75(project: Path) -> None:
    with machines(1) as (machine,):
        waiting = node(machine, 0, project)
        machine.until_port(29500)
        waiting.signal(signal.SIGTERM)
        assert waiting.wait() == 75 and "stopped by SIGTERM before training began" in waiting.output()
    starting = alone(project, FOR_EVER)
    end = time.monotonic() + 180
    while not any(_temporary(project).iterdir()):  # the launcher imports torch
        assert time.monotonic() < end
        time.sleep(0.01)
    starting.signal(signal.SIGUSR1)
    assert starting.wait() == 75 and "before training began: nothing to save" in starting.output()
    assert_nothing_left(project)


@fault(9)
def test_a_signal_while_the_launcher_waits_to_start_again_ends_it_at_once(project: Path) -> None:
    """Here it would wait for five minutes."""
    launch_node = project / "ddp" / "launcher" / "launch_node.py"
    replace(launch_node, "RESTART_INTERVAL_S = 1, 60", "RESTART_INTERVAL_S = 300, 300")
    path = project / "out/status.json"
    path.parent.mkdir()
    do = f"pathlib.Path({str(path)!r}).write_text(json.dumps(dict(state='running', step=5, "
    do += f"pid=os.getpid(), host={platform.node()!r}, message=''))); die()"
    launcher = alone(project, do, "--max-restarts", 3, "--", "--output-dir", path.parent)
    launcher.until("starting again")
    waiting = json.loads(path.read_text())
    launcher.signal(signal.SIGINT)
    assert launcher.wait() == 75, launcher.output()
    assert "stopped by SIGINT before the restart" in launcher.output()
    status = json.loads(path.read_text())
    assert (waiting["state"], status["state"], status["exit_code"]) == ("running", "stopped", 75)
    assert status["pid"] == waiting["pid"], "that of the run, not of the launcher"


# ---- no orphans -----------------------------------------------------------------------------------------------------


@fault(12)
def test_nothing_survives_the_launcher(project: Path) -> None:
    launcher = alone(project, FOR_EVER, "--nproc-per-node", 2)
    launcher.until("rank 0 of")
    launcher.until("rank 1 of")
    launcher.signal(signal.SIGKILL)
    launcher.wait()
    end = time.monotonic() + 180
    while any(_runs(int(file.read_text())) for file in project.parent.glob("pid-*")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert all(f"rank {rank} got SIGTERM" in launcher.output() for rank in (0, 1))


@fault(32)
def test_the_folder_that_one_stands_in_and_stale_variables_change_nothing(project: Path, tmp_path: Path) -> None:
    (tmp_path / "ddp" / "launcher").mkdir(parents=True)
    for name in ("config.py", "ddp/__init__.py", "ddp/launcher/launch_node.py", "main.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong file')\n")
    variables = {"PET_NNODES": "7", "PET_MAX_RESTARTS": "5", "RANK": "3", "MASTER_PORT": "1", "WORLD_SIZE": "9"}
    variables |= {"STUB": str(tmp_path), "DO": "", "TMPDIR": str(_temporary(project))}
    program = Program(["sh", "-c", 'cd "$0" && exec bash "$1"', tmp_path, project / "launch_node.sh"], variables)
    assert program.wait() == 0 and "rank 0 of 1" in program.output(), program.output()


def test_help_names_what_decides_over_restarts() -> None:
    done = subprocess.run(["bash", TEMPLATE / "launch_node.sh", "--help"], capture_output=True, text=True)
    assert "--max-restarts" in done.stdout and "START_GRACE" in done.stdout
