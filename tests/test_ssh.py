"""launch/ssh.sh against real sshd: it starts all hosts, shows what they print, stops all, leaves nothing.

Machines are network namespaces. Where launch_node.sh itself is not the matter, a few lines of shell take its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from template_copy import TEMPLATE, copy_template, shrink

from machines import Program, machines
from needs import need
from sshd import Network, reachable
from test_nodes import FOR_EVER, STUB

RUN = "echo started; while :; do sleep 0.05; done"
SLOW_TO_STOP = f"trap '' PIPE; trap 'echo told; sleep 0.3; echo saved; exit 75' TERM; {RUN}"
TOLD_TWICE = f"told=; trap 'echo told; [ -z \"$told\" ] || exit 143; told=1' TERM; {RUN}"
DEAF = f"trap '' TERM; echo >\"$0.deaf\"; {RUN}"
LATER = 4  # seconds: two signals within two count as one, and a busy machine handles the first one late


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with machines(2) as made, reachable(made, tmp_path_factory.mktemp("ssh") / "settings") as network:
        yield network


@pytest.fixture
def net(both: Network) -> Iterator[Network]:
    """gpu1 and gpu2. After the test, nothing runs there any more, and no temporary file is left."""
    yield both
    try:
        until_nothing_runs(both)
        assert list(both.temporary.glob("ddp-*")) == []
    finally:
        for process in both.processes(0) + both.processes(1):
            with suppress(ProcessLookupError):
                os.kill(int(process.split()[0]), signal.SIGKILL)
        for file in both.temporary.iterdir():
            shutil.rmtree(file)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project, at a path that needs quoting."""
    return shrink(copy_template(tmp_path / 'one\'s "own" project'), train=6_400, val=64, test=64)


def stub(project: Path, do: str, **environ: str) -> None:
    """Put a stub in the place of main.py; it runs under launch_node.sh and torchrun."""
    (project.parent / "stub").mkdir()
    variables = {"STUB": str(project.parent / "stub"), "DO": do, **environ}
    (project / "main.py").write_text(f"import os\nos.environ.update({variables!r})\n{STUB}")


def pretend(project: Path, script: str) -> None:
    """Put a few lines of shell, which may ask for $node, in the place of launch_node.sh."""
    rank = "for word; do case $word in --node-rank=*) node=${word#*=} ;; esac; done\n"
    (project / "launch_node.sh").write_text(rank + script + "\n")


def hosts(project: Path, *lines: str) -> Path:
    file = project.parent / "hosts"
    file.write_text("\n".join(lines))
    return file


def start(
    net: Network,
    project: Path,
    *arguments: Any,
    lines: tuple[str, ...] = ("gpu1", "gpu2"),
    shell: str = "bash",
    **environ: str,
) -> Program:
    """launch/ssh.sh on gpu1, for gpu1 and gpu2."""
    command = [shell, project / "launch" / "ssh.sh", hosts(project, *lines), *arguments]
    return net.start(*command, **{"PYTHON": sys.executable, "START_GRACE": "60", **environ})


def until_nothing_runs(net: Network, timeout: float = 180) -> None:
    end = time.monotonic() + timeout
    while left := net.processes(0) + net.processes(1):
        assert time.monotonic() < end, left
        time.sleep(0.1)


# ---- what is refused at once ----------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "lines, arguments, says",
    [
        (["gpu1 slots=8", "gpu2 slots=4"], [], "HOSTS: all hosts need the same slots=N: gpu2 slots=4"),
        (["gpu1 slots=8", "", "gpu2"], [], "HOSTS: all hosts need the same slots=N: gpu2"),
        (["gpu1 # slots=8", "gpu2 slots=8\r"], [], "HOSTS: all hosts need the same slots=N: gpu2 slots=8"),
        (["gpu1 slots=0"], [], "HOSTS: not HOST or HOST slots=N: gpu1 slots=0"),
        (["gpu1 gpu2"], [], "HOSTS: not HOST or HOST slots=N: gpu1 gpu2"),
        (["gpu1 slots=2 gpu2"], [], "HOSTS: not HOST or HOST slots=N: gpu1 slots=2"),
        (["-oProxyCommand=reboot"], [], "HOSTS: not HOST or HOST slots=N: -oProxyCommand=reboot"),
        (["-v"], [], "HOSTS: not HOST or HOST slots=N: -v"),
        (["# gpu1", " "], [], "HOSTS: no such file, or no host in it"),
        (["localhost", "gpu2"], [], "HOSTS: other hosts cannot reach localhost"),
        (["127.0.1.1", "gpu2"], [], "HOSTS: other hosts cannot reach 127.0.1.1"),
        (["gpu1"], ["--nnodes", 2], "--nnodes and --node-rank follow from the lines of HOSTS"),
        (["gpu1"], ["--check", "--node_rank=0", "--", "x"], "--nnodes and --node-rank follow from the lines of HOSTS"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_any_host_is_asked(
    tmp_path: Path, lines: list[str], arguments: list[Any], says: str
) -> None:
    if "cannot reach" in says:
        need("ssh")  # which says what its configuration makes of a name
    file = tmp_path / "hosts"
    file.write_text("\n".join(lines))
    line = refused(file, *arguments)
    assert says.replace("HOSTS", str(file)) in line


def test_a_hostfile_that_is_none_is_named(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none"):
        assert f"{file}: no such file, or no host in it" in refused(file)
    assert "HOSTFILE: no such file" in refused()
    (tmp_path / "binary").write_bytes(bytes(range(1, 256)))
    assert f"{tmp_path}/binary: not HOST or HOST slots=N" in refused(tmp_path / "binary")


def refused(*arguments: Any, **environ: str) -> str:
    """The one line with which launch/ssh.sh ends, with 2."""
    environ = {**os.environ, "PYTHON": sys.executable, "SSH_OPTIONS": "-F /dev/null", **environ}
    command = ["bash", TEMPLATE / "launch" / "ssh.sh", *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True)
    line = done.stderr.decode(errors="replace")
    assert done.returncode == 2 and done.stdout == b"" and done.stderr.count(b"\n") == 1, done
    assert line.startswith("error: ")
    return line


def test_help_names_what_travels_and_what_it_waits_for() -> None:
    words = ("HOSTFILE", "slots=", "REMOTE_DIR", "NCCL_", "OMP_NUM_THREADS", "PYTHON", "SSH_OPTIONS", "75")
    for shell, *arguments in (["bash", "hosts", "--help"], ["sh", "--help"], ["dash", "-h"]):
        command = [shell, TEMPLATE / "launch" / "ssh.sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and all(word in done.stdout for word in words), done.stdout
        assert done.stdout.startswith("usage: launch/ssh.sh HOSTFILE") and "#" not in done.stdout


def test_the_script_is_one_page_of_clean_shell() -> None:
    script = TEMPLATE / "launch" / "ssh.sh"
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    lines = script.read_text().splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 120


# ---- what cannot start ----------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "host, says",
    [
        ("closed", "closed | ssh: connect to host 10.77.0.2 port 9: Connection refused"),
        ("nobody@gpu2", "gpu2 | nobody@gpu2: Permission denied"),
        ("10.77.0.2", "10.77.0.2 | Host key verification failed."),  # not among the known hosts
    ],
)
def test_a_host_out_of_reach_ends_all_with_3(net: Network, project: Path, host: str, says: str) -> None:
    pretend(project, SLOW_TO_STOP)
    program = start(net, project, lines=("gpu1", "", host))
    assert program.wait() == 3, program.output()
    assert says in program.output() and "started" not in program.output().replace("gpu1 | started", "")
    assert f"error: {host}: exit code 3; all hosts stop\n" in program.output()
    assert program.output().count("error: ") == 1


@pytest.mark.slow
def test_each_host_without_the_project_or_the_environment_says_so(net: Network, project: Path) -> None:
    for options in ({"REMOTE_DIR": "/no such"}, {"REMOTE_DIR": "/tmp"}):
        program = start(net, project, **options)
        assert program.wait() == 3
        for name in ("gpu1", "gpu2"):
            assert f"{name} | error: no launch_node.sh in {options['REMOTE_DIR']}: set REMOTE_DIR\n" in program.output()
    program = start(net, project, PYTHON="", VIRTUAL_ENV="/no such")
    assert program.wait() == 3
    assert re.search(r"gpu[12] \| launch_node.sh: .*/no such/bin/python: No such file", program.output())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--master-port", "x"], "--master-port: 'x' must be an integer >= 1 and <= 65535"),
        (["--epochs", 3], "unrecognized arguments: --epochs 3; put options of main.py after --"),
        (["--", "--epoch", 3], "unrecognized arguments: --epoch 3 (did you mean --epochs?)"),
        (["--", "--nproc", 3], "--nproc: the launcher starts the processes"),
    ],
)
def test_a_wrong_option_is_refused_by_the_hosts(net: Network, project: Path, arguments: list[Any], says: str) -> None:
    program = start(net, project, *arguments)
    assert program.wait() == 2
    assert re.search(rf"gpu[12] \| error: {re.escape(says)}", program.output()), program.output()
    assert "Traceback" not in program.output()


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_signal_while_a_host_does_not_answer_ends_all(net: Network, project: Path) -> None:
    pretend(project, SLOW_TO_STOP)
    serve = "import socket, time; s = socket.create_server(('', 2223)); print('up'); time.sleep(600)"
    server = net.start(sys.executable, "-c", serve, on=1)
    server.until("up")
    program = start(net, project, lines=("gpu1", "silent"))
    program.until("gpu1 | started")
    program.signal(signal.SIGINT)
    assert program.wait() == 3  # after ConnectTimeout
    assert "gpu1 | told\ngpu1 | saved\n" in program.output() and "error: " not in program.output()
    server.signal(signal.SIGKILL)
    server.wait()


# ---- what they are given, and what they print -----------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_are_given_their_options_and_the_variables_that_matter(net: Network, project: Path) -> None:
    show = 'printf \'%s\\n\' "$(hostname)" "$PWD" "$@" "$MASTER_ADDR" "$MAX_RESTARTS" "$START_GRACE" '
    show += '"$NCCL_DEBUG" "$GLOO_X" "$TORCH_LOGS" "$OMP_NUM_THREADS" '
    pretend(project, show + '"$PYTHON" "${OTHER-}" "$(cat)"')
    main = ["--", "--output-dir", "it's  $HOME\n*"]
    variables = {"NCCL_DEBUG": "a 'b'", "GLOO_X": '"', "TORCH_LOGS": "$(id)", "OTHER": "1", "MAX_RESTARTS": "7"}
    variables |= {"slots": "slots=9", "hosts": "x", "inputs": "1"}  # names that the script uses itself
    program = start(net, project, "--check", *main, lines=("gpu1 slots=2", "root@gpu2  slots=2"), **variables)
    assert program.wait() == 0, program.output()
    for rank, name in enumerate(("gpu1", "gpu2")):
        options = ["--nnodes=2", f"--node-rank={rank}", "--nproc=2", "--check"]
        said = [name, str(project), *options, *"\n".join(main).split("\n"), "10.77.0.1", "7", "60"]
        said += ["a 'b'", '"', "$(id)", "1", sys.executable, "", ""]
        lines = [line for line in program.output().splitlines() if line.startswith(name)]
        assert lines == [f"{name} | {line}" for line in said]
    variables = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234", "NPROC_PER_NODE": "4"}
    pretend(project, 'echo "$MASTER_ADDR $MASTER_PORT $NPROC_PER_NODE"')
    program = start(net, project, **variables)
    assert program.wait() == 0
    assert sorted(program.output().splitlines()) == ["gpu1 | 10.0.0.9 1234 4", "gpu2 | 10.0.0.9 1234 4"]


@pytest.mark.slow
def test_each_line_shows_its_host_and_none_is_lost_or_torn(net: Network, project: Path, tmp_path: Path) -> None:
    pretend(project, "seq 20000; head -c 300000 /dev/zero | tr '\\0' x; echo; echo wrong >&2; printf 'no end'")
    command = 'exec bash "$0" "$1" 2>"$2"'
    script, file = project / "launch" / "ssh.sh", hosts(project, "gpu1", "10.77.0.1", "gpu2")
    program = net.start("sh", "-c", command, script, file, tmp_path / "stderr", PYTHON=sys.executable)
    assert program.wait() == 0, program.output()
    lines = program.output().splitlines()
    for prefix in ("gpu1 | ", "10.77.0.1 | ", "gpu2 | "):
        own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert own == [*map(str, range(1, 20001)), "x" * 300000, "no end"]
    assert len(lines) == 3 * 20002
    told = sorted((tmp_path / "stderr").read_text().splitlines())
    assert told == ["10.77.0.1 | wrong", "gpu1 | wrong", "gpu2 | wrong"]


@pytest.mark.slow
def test_the_run_continues_if_nobody_reads_its_output(net: Network, project: Path) -> None:
    pretend(project, 'echo first; sleep 0.5; seq 20000; seq 20000 >&2; echo done >"$0.$node"')
    script, file = project / "launch" / "ssh.sh", hosts(project, "gpu1", "gpu2")
    program = net.start("bash", "-c", 'bash "$0" "$1" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}', script, file)
    assert program.wait() == 0, program.output()
    assert [(project / f"launch_node.sh.{node}").read_text() for node in (0, 1)] == ["done\n", "done\n"]


# ---- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(0)
def test_two_hosts_meet_and_end_with_0(net: Network, project: Path) -> None:
    stub(project, "print(os.environ['NCCL_DEBUG'])")
    program = start(net, project, lines=("gpu1 slots=1", "root@gpu2 slots=1"), NCCL_DEBUG="WARN")
    assert program.wait() == 0, program.output()
    lines = [f"gpu{rank + 1} | rank {rank} of 2, turn 1" for rank in (0, 1)]
    told = [line for line in program.output().splitlines() if ": waiting for node" not in line]
    connected = "gpu2 | node 1: all nodes are connected; 1 process here; node 0 prints the progress"
    assert sorted(told) == sorted([*lines, "gpu1 | WARN", "gpu2 | WARN", connected, "gpu2 | node 1: done"])


@pytest.mark.slow
def test_when_one_fails_the_others_stop_and_its_code_is_the_exit_code(net: Network, project: Path) -> None:
    pretend(project, f"if [ $node = 1 ]; then sleep 1; exit 6; fi; {SLOW_TO_STOP}")
    program = start(net, project, shell="sh")
    program.until("error: gpu2: exit code 6; all hosts stop\n")
    assert program.wait() == 6, program.output()
    assert "gpu1 | told\ngpu1 | saved\n" in program.output()


@pytest.mark.slow
def test_who_does_not_stop_is_killed_by_a_second_signal(net: Network, project: Path) -> None:
    wait = 'until [ -e "$0.deaf" ]; do sleep 0.05; done'  # otherwise the first signal may come before its trap
    pretend(project, f"if [ $node = 0 ]; then {DEAF}; fi; {wait}; exit 7")
    program = start(net, project)
    program.until("error: gpu2: exit code 7; all hosts stop\n")
    time.sleep(LATER)
    program.signal(signal.SIGTERM)
    assert program.wait() == 143, program.output()
    assert program.output().count("error: ") == 1


def test_what_a_signal_runs_has_no_command_substitution() -> None:
    """`read -t`, in which it runs, ends one that lasts until its timeout, and all that follows it in the trap."""
    script = (TEMPLATE / "launch" / "ssh.sh").read_text()
    body = re.sub(" # .*", "", script.partition("stop_hosts() {")[2].partition("\n}")[0])
    assert "deadline=" in body and "$(" not in body.replace("$((", "") and "`" not in body


@pytest.mark.slow
@pytest.mark.sample(1)
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
    assert program.wait() == 75 and "too late" not in program.output(), program.output()
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
    time.sleep(LATER)
    program.signal(signal.SIGINT)
    assert program.wait() == 130, program.output()
    assert program.output().count("| told") == 4 and "error" not in program.output()


@pytest.mark.slow
def test_a_host_that_is_cut_off_does_not_hold_up_a_second_signal(net: Network, project: Path) -> None:
    pretend(project, SLOW_TO_STOP)
    program = start(net, project)
    program.until("gpu2 | started")
    net.machines[1].link("down")
    program.signal(signal.SIGINT)
    time.sleep(LATER)
    program.signal(signal.SIGINT)
    assert program.wait() == 130, program.output()
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
    assert "error: gpu2: exit code 8; all hosts stop\n" in program.output()
    until_nothing_runs(net)
    assert [(project / f"launch_node.sh.{node}").read_text() for node in (0, 1)] == ["saved\n", "saved\n"]


@pytest.mark.slow
def test_a_launcher_that_is_killed_counts_as_a_lost_process(net: Network, project: Path) -> None:
    pretend(project, f"[ $node = 0 ] || kill -9 $$; {SLOW_TO_STOP}")
    program = start(net, project)
    assert program.wait() == 8, program.output()
    assert "error: gpu2: exit code 8; all hosts stop\n" in program.output()


# ---- with real training ---------------------------------------------------------------------------------------------


@pytest.mark.sample(1, "launchers that are lost")
@pytest.mark.slow
def test_when_ssh_sh_is_killed_the_run_saves_and_the_same_command_goes_on(net: Network, project: Path) -> None:
    out = project.parent / "out"
    options = ["--", "--dataset", "synthetic", "--device", "cpu", "--epochs", 50, "--batch-size", 16, "--log-every", 5]
    options += ["--output-dir", out, "--max-steps"]
    program = start(net, project, "--nproc-per-node=1", *options, 100000)
    program.until("gpu1 | epoch")
    program.until("train")
    program.signal(signal.SIGKILL)
    program.wait()
    until_nothing_runs(net)
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and status["saved"] == status["step"] > 0
    program = start(net, project, "--nproc-per-node=1", *options, status["step"] + 5)
    assert program.wait(120) == 0, program.output()
    assert f"gpu1 | resuming from {out}" in program.output() and "2 processes" in program.output()
    assert json.loads((out / "status.json").read_text())["state"] == "done"
