"""launch/ssh.sh against real sshd: it starts all hosts or none, shows what they print, stops all, leaves nothing.

Machines are network namespaces. Where launch_node.sh itself is not the matter, a few lines of shell take its place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from template_copy import TEMPLATE, copy_template

from machines import Program, machines
from sshd import Network, reachable
from test_nodes import FOR_EVER, STUB

RUN = "echo started; while :; do sleep 0.05; done"
SLOW_TO_STOP = f"trap '' PIPE; trap 'echo told; sleep 0.3; echo saved; exit 75' TERM; {RUN}"
TOLD_TWICE = f"told=; trap 'echo told; [ -z \"$told\" ] || exit 143; told=1' TERM; {RUN}"
DEAF = f"trap '' TERM; {RUN}"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with machines(2) as made, reachable(made, tmp_path_factory.mktemp("ssh") / "settings") as network:
        yield network


@pytest.fixture
def net(both: Network) -> Iterator[Network]:
    """gpu1 and gpu2. After the test, nothing runs there any more, and no temporary file is left."""
    yield both
    try:
        until_nothing_runs(both, 10)
        assert list(both.temporary.glob("ddp-*")) == []
    finally:
        for process in both.processes(0) + both.processes(1):
            os.kill(int(process.split()[0]), signal.SIGKILL)
        for file in both.temporary.iterdir():
            shutil.rmtree(file)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project, at a path that needs quoting."""
    return copy_template(tmp_path / 'one\'s "own" project')


def stub(project: Path, do: str, **environ: str) -> None:
    """Put a stub in the place of main.py; it runs under launch_node.sh and torchrun."""
    (project.parent / "stub").mkdir()
    variables = {"STUB": str(project.parent / "stub"), "DO": do, **environ}
    (project / "main.py").write_text(f"import os\nos.environ.update({variables!r})\n{STUB}")


def pretend(project: Path, script: str) -> None:
    """Put a few lines of shell, which may ask for $node, in the place of launch_node.sh."""
    rank = "for word; do case $word in --node-rank=*) node=${word#*=} ;; esac; done\n"
    (project / "launch_node.sh").write_text(rank + script + "\n")


def patch(project: Path, *changes: tuple[str, str]) -> None:
    """Change constants of ssh.py."""
    file = project / "ddp" / "launcher" / "ssh.py"
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)


def hosts(project: Path, *lines: str) -> Path:
    file = project.parent / "hosts"
    file.write_text("\n".join(lines))
    return file


def start(
    net: Network, project: Path, *arguments: Any, lines: tuple[str, ...] = ("gpu1", "gpu2"), **environ: str
) -> Program:
    """launch/ssh.sh on gpu1, for gpu1 and gpu2."""
    command = ["bash", project / "launch" / "ssh.sh", hosts(project, *lines), *arguments]
    return net.start(*command, **{"PYTHON": sys.executable, "START_GRACE": "60", **environ})


def until_nothing_runs(net: Network, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while left := net.processes(0) + net.processes(1):
        assert time.monotonic() < end, left
        time.sleep(0.1)


# ---- what is refused at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines, arguments, says",
    [
        (["gpu1 slots=8", "gpu2 slots=4"], [], "hosts, line 2: slots=4, but slots=8 in HOSTS, line 1"),
        (["gpu1 slots=8", "", "gpu2"], [], "hosts, line 3: no slots=, but slots=8 in HOSTS, line 1"),
        (["# one", "gpu1 slots=8"], ["--nproc-per-node", 4], "hosts, line 2: slots=8, but --nproc-per-node is 4"),
        (["gpu1", "me@gpu2", "gpu2"], [], "hosts, line 3: gpu2 is already in HOSTS, line 2"),
        (["gpu1 slots=0"], [], "hosts, line 1: 'gpu1 slots=0' is neither HOST nor HOST slots=N"),
        (["gpu1 gpu2"], [], "hosts, line 1: 'gpu1 gpu2' is neither HOST nor HOST slots=N"),
        (["-oProxyCommand=reboot"], [], "is neither HOST nor HOST slots=N"),
        (["# gpu1"], [], "hosts: contains no host"),
        (["localhost", "gpu2"], [], "hosts, line 1: on the other hosts, localhost is not this host"),
        (["gpu1"], ["--nnodes", 2], "--nnodes and --node-rank follow from the lines of HOSTS"),
        (["gpu1"], ["--node_rank=0"], "--nnodes and --node-rank follow from the lines of HOSTS"),
        (["gpu1"], ["--master-port", "x"], "--master-port: 'x' must be an integer >= 1 and <= 65535"),
        (["gpu1"], ["--epochs", 3], "unrecognized arguments: --epochs 3; put options of main.py after --"),
        (["gpu1"], ["--", "--epoch", 3], "--epoch"),
        (["gpu1"], ["--", "--nproc", 3], "--nproc: the launcher starts the processes"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_any_host_is_asked(
    tmp_path: Path, lines: list[str], arguments: list[Any], says: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text("\n".join(lines))
    line = refused(file, *arguments)
    assert says.replace("HOSTS", str(file)) in line


def test_a_hostfile_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert f"{tmp_path}/binary: cannot be read (not a text file)" in refused(tmp_path / "binary")
    assert f"{tmp_path}/none: cannot be read (No such file or directory)" in refused(tmp_path / "none")
    assert "HOSTFILE" in refused()


def test_options_for_ssh_that_no_shell_would_take_are_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1")
    assert "SSH_OPTIONS: No closing quotation" in refused(tmp_path / "hosts", SSH_OPTIONS="-F 'x")


def refused(*arguments: Any, **environ: str) -> str:
    """The one line with which launch/ssh.sh ends, with 2."""
    environ = {**os.environ, "PYTHON": sys.executable, "SSH_OPTIONS": "-F none", **environ}
    command = ["bash", TEMPLATE / "launch" / "ssh.sh", *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_help_names_what_travels_and_what_it_waits_for() -> None:
    done = subprocess.run(["bash", TEMPLATE / "launch" / "ssh.sh", "hosts", "--help"], capture_output=True, text=True)
    words = ("HOSTFILE", "slots=", "--remote-dir", "NCCL_", "OMP_NUM_THREADS", "PYTHON", "SSH_OPTIONS", "75")
    assert done.returncode == 0 and all(word in done.stdout for word in words), done.stdout


# ---- all start, or none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, says",
    [
        ("closed", "closed | ssh: connect to host 10.77.0.2 port 9: Connection refused"),
        ("nobody@gpu2", "gpu2 | nobody@gpu2: Permission denied"),
        ("10.77.0.2", "10.77.0.2 | Host key verification failed."),  # not among the known hosts
    ],
)
def test_a_host_out_of_reach_is_named_and_none_is_started(net: Network, project: Path, host: str, says: str) -> None:
    pretend(project, "echo started")
    program = start(net, project, lines=("gpu1", "", host))
    assert program.wait() == 3, program.output()
    *before, last = program.output().splitlines()
    assert says in "\n".join(before) and "started" not in program.output()
    name = host.removeprefix("nobody@")
    assert last.startswith(f"error: {project.parent}/hosts, line 3: {name}: ssh cannot connect: 'ssh {host} true'")


@pytest.mark.slow
def test_each_host_without_the_project_or_the_environment_is_named(net: Network, project: Path) -> None:
    file = hosts(project, "gpu1", "gpu2")
    program = start(net, project, "--remote-dir", "/no such")
    assert program.wait() == 3
    why = "no launch_node.sh in /no such; see --remote-dir"
    assert program.output() == f"error: {file}, line 1: gpu1: {why}\nerror: {file}, line 2: gpu2: {why}\n"
    program = start(net, project, PYTHON="", VIRTUAL_ENV="/no such")
    assert program.wait() == 3
    assert program.output().count("no /no such/bin/python there; set PYTHON") == 2


@pytest.mark.slow
def test_a_signal_while_a_host_does_not_answer_ends_it_at_once(net: Network, project: Path) -> None:
    pretend(project, "echo started")
    serve = "import socket, time; s = socket.create_server(('', 2223)); print('up'); time.sleep(600)"
    server = net.start(sys.executable, "-c", serve, on=1)
    server.until("up")
    program = start(net, project, lines=("gpu1", "silent"))
    program.until("waiting for silent")
    program.signal(signal.SIGINT)
    assert program.wait(8) == 75
    assert program.output().endswith("\nstopped by SIGINT before training began: nothing to save\n")
    server.signal(signal.SIGKILL)
    server.wait()


# ---- what they are given, and what they print -----------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_are_given_their_options_and_the_variables_that_matter(net: Network, project: Path) -> None:
    show = 'printf \'%s\\n\' "$(hostname)" "$PWD" "$@" "$NCCL_DEBUG" "$GLOO_X" "$TORCH_LOGS" "$OMP_NUM_THREADS" '
    pretend(project, show + '"$PYTHON" "${OTHER-}" "$(cat)"')
    main = ["--", "--output-dir", "it's  $HOME\n*"]
    variables = {"NCCL_DEBUG": "a 'b'", "GLOO_X": '"', "TORCH_LOGS": "$(id)", "OTHER": "1", "MAX_RESTARTS": "7"}
    program = start(net, project, "--check", *main, lines=("gpu1 slots=2", "root@gpu2  slots=2"), **variables)
    assert program.wait() == 0, program.output()
    for rank, name in enumerate(("gpu1", "gpu2")):
        options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--max-restarts=7"]
        options += ["--start-grace=60", "--check"]
        said = [name, str(project), *options, f"--node-rank={rank}", *"\n".join(main).split("\n")]
        said += ["a 'b'", '"', "$(id)", "1", sys.executable, "", ""]
        lines = [line for line in program.output().splitlines() if line.startswith(name)]
        assert lines == [f"{name} | {line}" for line in said]
    program = start(net, project, "--master-addr", "10.0.0.9", "--master_port=1234", "--nproc-per-node=4")
    assert program.wait() == 0
    assert program.output().count("--nproc-per-node=4\n") == program.output().count("--master-addr=10.0.0.9\n") == 2
    assert program.output().count("--master-port=1234\n") == 2


@pytest.mark.slow
def test_each_line_shows_its_host_and_none_is_lost_or_torn(net: Network, project: Path, tmp_path: Path) -> None:
    pretend(project, "seq 20000; head -c 300000 /dev/zero | tr '\\0' x; echo; echo wrong >&2; printf 'no end'")
    command = 'exec bash "$0" "$1" 2>"$2"'
    script, file = project / "launch" / "ssh.sh", hosts(project, "gpu1", "10.77.0.1", "gpu2")
    program = net.start("sh", "-c", command, script, file, tmp_path / "stderr", PYTHON=sys.executable)
    assert program.wait() == 0, program.output()
    lines = program.output().splitlines()
    for prefix in ("gpu1      | ", "10.77.0.1 | ", "gpu2      | "):
        own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert own == [*map(str, range(1, 20001)), "x" * 300000, "no end"]
    assert len(lines) == 3 * 20002
    told = sorted((tmp_path / "stderr").read_text().splitlines())
    assert told == ["10.77.0.1 | wrong", "gpu1      | wrong", "gpu2      | wrong"]


@pytest.mark.slow
def test_two_hosts_meet_and_end_with_0(net: Network, project: Path) -> None:
    stub(project, "print(os.environ['NCCL_DEBUG'])")
    program = start(net, project, lines=("gpu1 slots=1", "root@gpu2 slots=1"), NCCL_DEBUG="WARN")
    assert program.wait() == 0, program.output()
    lines = [f"gpu{rank + 1} | rank {rank} of 2, turn 1, by eth0" for rank in (0, 1)]
    told = [line for line in program.output().splitlines() if ": waiting for node" not in line]
    connected = "gpu2 | node 1: all nodes are connected; 1 process here; node 0 prints the progress"
    assert sorted(told) == sorted([*lines, "gpu1 | WARN", "gpu2 | WARN", connected, "gpu2 | node 1: done"])


# ---- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_when_one_fails_the_others_stop_and_its_code_is_the_exit_code(net: Network, project: Path) -> None:
    stub(project, f"if rank == 1: time.sleep(1); end(6)\n{FOR_EVER}")
    program = start(net, project)
    program.until("error: gpu2: launch_node.sh exited with 6; stopping the other hosts\n")
    assert program.wait(20) == 6, program.output()  # not after SAVE_GRACE_S
    assert "gpu1 | rank 0 got SIGTERM\ngpu1 | rank 0 has saved\n" in program.output()


@pytest.mark.slow
def test_who_does_not_stop_in_time_is_ended(net: Network, project: Path) -> None:
    patch(project, ("SAVE_GRACE_S = 30.0", "SAVE_GRACE_S = 0.5"), ('(2.0, "TERM"), (10.0, "KILL")', '(0.5, "KILL")'))
    pretend(project, f"if [ $node = 0 ]; then {DEAF}; fi; sleep 0.5; exit 7")
    program = start(net, project)
    assert program.wait(20) == 7, program.output()
    assert program.output().count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_lets_all_hosts_save_and_is_passed_on_once(net: Network, project: Path, name: str) -> None:
    pretend(project, SLOW_TO_STOP)
    program = start(net, project)
    for host in ("gpu1", "gpu2"):
        program.until(f"{host} | started")
    program.signal(getattr(signal, name))
    time.sleep(0.1)
    program.signal(getattr(signal, name))  # the same request, arriving twice
    assert program.wait() == 75, program.output()
    assert program.output().count("| told") == program.output().count("| saved") == 2
    assert "error" not in program.output()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_lets_all_workers_save(net: Network, project: Path) -> None:
    """The terminal signals the whole process group."""
    stub(project, FOR_EVER)
    program = start(net, project)
    for rank in (0, 1):
        program.until(f"rank {rank} of 2")
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.wait() == 75, program.output()
    assert program.output().count("got SIGTERM") == program.output().count("has saved") == 2, program.output()


@pytest.mark.slow
def test_a_signal_in_the_first_moments_of_the_hosts_stops_them(net: Network, project: Path) -> None:
    """launch_node.sh is still a shell, which waits for a command."""
    pretend(project, "echo started; sleep 2; echo too late")
    program = start(net, project)
    program.until("gpu1 | started")
    program.until("gpu2 | started")
    program.signal(signal.SIGINT)
    assert program.wait(20) == 75 and "too late" not in program.output(), program.output()
    until_nothing_runs(net)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(net: Network, project: Path) -> None:
    pretend(project, TOLD_TWICE)
    program = start(net, project)
    for host in ("gpu1", "gpu2"):
        program.until(f"{host} | started")
    program.signal(signal.SIGTERM)
    for host in ("gpu1", "gpu2"):
        program.until(f"{host} | told")
    time.sleep(1.2)
    program.signal(signal.SIGINT)
    assert program.wait(20) == 130, program.output()
    assert program.output().endswith("quit immediately on a second signal (SIGINT)\n")


@pytest.mark.slow
def test_a_host_that_is_cut_off_does_not_hold_up_a_second_signal(net: Network, project: Path) -> None:
    patch(project, ('(2.0, "TERM"), (10.0, "KILL"), (15.0, "cut")', '(1.0, "cut")'))
    pretend(project, SLOW_TO_STOP)
    program = start(net, project)
    program.until("gpu2 | started")
    net.machines[1].link("down")
    program.signal(signal.SIGINT)
    time.sleep(1.2)
    program.signal(signal.SIGINT)
    assert program.wait(20) == 130, program.output()
    net.machines[1].link("up")
    until_nothing_runs(net)


@pytest.mark.slow
def test_a_connection_that_breaks_stops_that_host_and_the_others(net: Network, project: Path) -> None:
    pretend(project, f"echo $PPID >'{project.parent}/shell '$node; {SLOW_TO_STOP.replace('saved', 'saved >$0.$node')}")
    program = start(net, project)
    for host in ("gpu1", "gpu2"):
        program.until(f"{host} | started")
    shell = (project.parent / "shell 1").read_text().strip()
    session = Path(f"/proc/{shell}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(session), signal.SIGKILL)  # sshd's process for this connection
    assert program.wait() == 8, program.output()
    assert "error: gpu2: the connection was lost; stopping the other hosts\n" in program.output()
    until_nothing_runs(net)
    assert [(project / f"launch_node.sh.{node}").read_text() for node in (0, 1)] == ["saved\n", "saved\n"]


@pytest.mark.slow
def test_a_launcher_that_is_killed_counts_as_a_lost_process(net: Network, project: Path) -> None:
    pretend(project, f"[ $node = 0 ] || kill -9 $$; {SLOW_TO_STOP}")
    program = start(net, project)
    assert program.wait() == 8, program.output()
    assert "error: gpu2: launch_node.sh exited with 137; stopping the other hosts\n" in program.output()


# ---- with real training ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_when_ssh_sh_is_killed_the_run_saves_and_the_same_command_goes_on(net: Network, project: Path) -> None:
    out = project.parent / "out"
    options = ["--", "--dataset", "synthetic", "--device", "cpu", "--epochs", 50, "--batch-size", 16, "--log-every", 5]
    options += ["--output-dir", out, "--max-steps"]
    program = start(net, project, "--nproc-per-node=1", *options, 100000)
    program.until("gpu1 | epoch", 90)
    program.until("train", 90)
    program.signal(signal.SIGKILL)
    program.wait()
    until_nothing_runs(net)
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and status["saved"] == status["step"] > 0
    program = start(net, project, "--nproc-per-node=1", *options, status["step"] + 5)
    assert program.wait(120) == 0, program.output()
    assert f"gpu1 | resuming from {out}" in program.output() and "2 processes" in program.output()
    assert json.loads((out / "status.json").read_text())["state"] == "done"
