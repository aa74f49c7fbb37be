"""Data that do not come, and files that workers share: named, ended in time, and never taken for slow data."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import pytest
import torch
from outputs import lines, status, weights_and_momentum
from template_copy import LEAN
from torch import Tensor, nn
from torch.utils.data import Dataset

import main
import model
from ddp.core.files import PROJECT_DIR
from ddp.data import samples
from ddp.data.dataset import Datasets
from ddp.data.inherited import SHARED_CONNECTION, connections, file_positions, leave_connections
from ddp.data.loader import EvalLoader
from ddp.data.workers import Workers
from ddp.training.run import Run
from faults import fault
from needs import need, need_root
from processes import Ranks, on_ranks, start, train

RUN = ("--device=cpu", "--batch-size=8", "--log-every=1", "--epochs=2", "--warn-after=2")


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layers = lambda config, train_set: nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 10))  # noqa: E731
    monkeypatch.setattr(model, "build_model", layers)


class Numbers(Dataset):
    classes = tuple(map(str, range(10)))

    def __init__(self, length: int = 96, before: Callable[[int], Any] = lambda index: None) -> None:
        self.length, self.before = length, before

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.before(index)
        return torch.randn(20, generator=torch.Generator().manual_seed(index)), index % 10


def load(monkeypatch: pytest.MonkeyPatch, *sets: Any) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(*sets))


def wait_without_end() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # a worker that was forked while another thread held a lock


def hang_at(*indices: int, once: Path, how: Callable[[], Any] = wait_without_end) -> Callable[[int], None]:
    """Hangs at these samples, as long as there is a file `once`."""

    def hang(index: int) -> None:
        if index in indices and once.exists():
            how()

    return hang


# ---- data that do not come ------------------------------------------------------------------------------------------


@fault(51)
@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_dataset_that_hangs_is_named_and_ends_the_run(
    processes: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    load(monkeypatch, Numbers(96, hang_at(*range(96), once=once)))
    given = (*RUN, "--workers", workers, "--timeout=5", "--output-dir", tmp_path / "run")

    def hang_from_now(run: Run) -> None:
        if run.state.step == 12 // processes:
            once.touch()  # all ranks, in the second epoch

    ranks = start(processes, *given, after_step=hang_from_now)
    began = time.monotonic()
    assert ranks.wait() == [8] * processes, ranks.output()
    output = ranks.output()
    assert time.monotonic() - began > 5
    where = r"a sample, which it reads at test_data_wait.py:" if workers == 0 else "DataLoader worker "
    assert f"warning: rank 0 waits for {where}" in output, output
    assert ", which is at test_data_wait.py:" in output or workers == 0
    (error,) = [line for line in output.splitlines() if "error: " in line]
    assert " has waited 5 s (--timeout) for " in error and "; nothing was read or computed meanwhile" in error
    assert status(tmp_path / "run")["exit_code"] == 8


@fault(51)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 2)])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_stop_does_not_wait_for_data_that_do_not_come(
    evaluates: bool, processes: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is saved, and the run continues from there as if nothing had happened."""
    once, ends_at = tmp_path / "once", 96 // 8 // processes
    sets = Numbers(96), Numbers(64)
    sets[evaluates].before = hang_at(*range(96), once=once)
    load(monkeypatch, *sets)
    given = (*RUN, "--workers", workers, "--timeout=60")
    train(processes, *given, "--output-dir", tmp_path / "whole")

    def hang_from_now(run: Run) -> None:
        if run.state.step == ends_at:  # the second epoch, or the first evaluation
            once.touch()

    ranks = start(processes, *given, "--output-dir", tmp_path / "run", after_step=hang_from_now)
    ranks.until(lambda: "waits for" in ranks.output())
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [75] * processes, ranks.output()  # 8 if it had waited for --timeout
    assert f"stopped on request and saved, at step {ends_at}" in ranks.output()
    once.unlink()
    train(processes, *given, "--output-dir", tmp_path / "run")
    assert weights_and_momentum(tmp_path / "whole") == weights_and_momentum(tmp_path / "run")
    assert [line["loss"] for line in lines(tmp_path / "whole", "train")] == [
        line["loss"] for line in lines(tmp_path / "run", "train")
    ]


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def read_slowly(path: Path, seconds: float) -> None:
    with path.open("rb", buffering=0) as file:
        for _ in range(int(2 * seconds)):
            time.sleep(0.5)
            assert file.read(10)
            file.seek(0)


def receive_slowly(seconds: float) -> None:
    """From a connection, whose bytes the system does not count."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for _ in range(int(2 * seconds)):
            time.sleep(0.5)
            theirs.sendall(b"x")

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(int(2 * seconds)):
        ours.recv(1)
    thread.join()


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["compute", "sleep", "read", "receive"])
def test_slow_data_are_no_hang(how: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of the training and of an evaluation takes longer than --timeout, and so does code in between."""
    (tmp_path / "file").write_bytes(b"0123456789")
    slow = {
        "compute": partial(compute, 7),
        "sleep": lambda: [time.sleep(0.2) for _ in range(35)],
        "read": partial(read_slowly, tmp_path / "file", 7),
        "receive": partial(receive_slowly, 7),
    }[how]

    def be_slow(index: int) -> None:
        if index == 50:
            slow()

    end_epoch = Run.end_epoch
    monkeypatch.setattr(Run, "end_epoch", lambda *given: (time.sleep(4), end_epoch(*given)))
    load(monkeypatch, Numbers(56, be_slow), Numbers(56, be_slow))
    given = (*RUN, "--workers", workers, "--timeout=3", "--epochs=1", "--eval-batch-size=56")
    output = train(1, *given, "--output-dir", tmp_path / "run")
    assert "waits for" not in output and "val    loss" not in output


def test_a_worker_that_has_nothing_to_do_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once"
    once.touch()
    load(monkeypatch, Numbers(96, hang_at(50, once=once)))
    monkeypatch.setattr(samples, "RECORDED", 0)
    output = train(1, *RUN, "--workers=3", "--timeout=5", "--output-dir", tmp_path / "run", code=8)
    (warning,) = [line for line in output.splitlines() if "waits for" in line]
    assert warning.count("DataLoader worker") == 1 and "test_data_wait.py" in warning


def test_a_dataset_that_hangs_at_its_first_sample_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "once").touch()
    load(monkeypatch, Numbers(96, hang_at(0, once=tmp_path / "once")))
    output = train(2, *RUN, "--workers=0", "--timeout=5", "--output-dir", tmp_path / "run", code=8)
    assert " has waited 5 s (--timeout) for a sample, which it reads at test_data_wait.py:" in output


@fault(51)
def test_a_worker_that_waits_in_a_queue_of_its_owner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own queue is the outermost frame of one that has nothing to do."""
    queue = multiprocessing.Queue()

    def wait(index: int) -> None:
        if index == 50 and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            queue.get()

    load(monkeypatch, Numbers(96, wait))
    monkeypatch.setattr(samples, "RECORDED", 0)
    output = train(1, *RUN, "--workers=2", "--timeout=5", "--output-dir", tmp_path / "run", code=8)
    (warning,) = [line for line in output.splitlines() if "waits for" in line]
    assert warning.count("DataLoader worker") == 1 and "test_data_wait.py" in warning


def test_a_run_that_stood_still_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z, for longer than --timeout, with its workers."""
    load(monkeypatch, Numbers(48, lambda index: time.sleep(0.1)))
    trains = tmp_path / "trains"
    given = (*RUN, "--workers=1", "--timeout=6", "--output-dir", tmp_path / "run")
    ranks = start(1, *given, after_step=lambda run: trains.touch())
    while not trains.exists():
        time.sleep(0.1)
    os.killpg(ranks.pids[0], signal.SIGSTOP)
    time.sleep(9)
    os.killpg(ranks.pids[0], signal.SIGCONT)
    assert ranks.wait() == [0], ranks.output()


def test_a_stop_ends_a_wait_for_training_data_after_an_evaluation_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both iterate over a loader at the same time."""
    load(monkeypatch, Numbers(96, hang_at(*range(96), once=tmp_path / "hangs")), Numbers(8))
    given = (*RUN, "--workers=0", "--timeout=60", "--output-dir", tmp_path / "run")

    def evaluate(run: Run) -> None:
        if run.state.step == 3:
            loader = EvalLoader(Numbers(8), run.config, run.ctx)
            assert len(list(loader)) == (run.ctx.rank == 0)
            (tmp_path / "hangs").touch()

    ranks = start(2, *given, after_step=evaluate)
    ranks.until(lambda: "waits for" in ranks.output())
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [75] * 2, ranks.output()
    assert "saved, at step 3" in ranks.output()


def test_a_stop_before_the_first_step_saves_no_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "once").touch()
    load(monkeypatch, Numbers(96, hang_at(*range(1, 95), once=tmp_path / "once")))
    monkeypatch.setattr(samples, "RECORDED", 0)  # the first and the last sample alone
    ranks = start(1, *RUN, "--workers=0", "--timeout=60", "--output-dir", tmp_path / "run")
    ranks.until(lambda: "waits for" in ranks.output())
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [75], ranks.output()
    assert (tmp_path / "run/checkpoints/step_00000000.pt").exists() and not (tmp_path / "run/best.pt").exists()


def test_ranks_with_directories_of_their_own_stop_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know alike which step the last checkpoint has."""
    prepare = main.prepare

    def own(config: Any, env: Any) -> Any:
        config.output_dir = str(tmp_path / f"rank {env.rank}")
        return prepare(config, env)

    monkeypatch.setattr(main, "prepare", own)
    monkeypatch.setattr(samples, "RECORDED", 0)
    load(monkeypatch, Numbers(96, hang_at(*range(1, 95), once=tmp_path / "once")))
    given = (*RUN, "--workers=0", "--timeout=60")
    train(2, *given, "--max-steps=2")
    (tmp_path / "once").touch()
    ranks = start(2, *given)
    ranks.until(lambda: "waits for" in ranks.output())
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [75] * 2, ranks.output()
    assert "saved, at step 2" in ranks.output()


# ---- files that workers share ---------------------------------------------------------------------------------------


class Zipped(Numbers):
    """Opens its archive at the first read, as torch advises."""

    archive: zipfile.ZipFile | None = None

    def __init__(self, path: Path, per_process: bool, mode: Literal["r", "a"]) -> None:
        super().__init__(200)
        self.path, self.per_process, self.mode, self.pid = path, per_process, mode, 0
        with zipfile.ZipFile(path, "w") as archive:
            for index in range(len(self)):
                archive.writestr(str(index), os.urandom(2000) + bytes([index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.archive is None or (self.per_process and self.pid != os.getpid()):
            self.archive, self.pid = zipfile.ZipFile(self.path, self.mode), os.getpid()
        assert self.archive.read(str(index))[-1] == index
        return super().__getitem__(index)


@fault(52)
@pytest.mark.parametrize(
    ("per_process", "workers", "code", "mode"),
    [(False, 2, 2, "r"), (True, 2, 0, "r"), (False, 0, 0, "r"), (False, 1, 2, "r"), (False, 2, 2, "a")],
)
def test_a_file_that_workers_share_ends_the_run_at_the_first_batch(
    per_process: bool, workers: int, code: int, mode: Literal["r", "a"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = Zipped(tmp_path / "numbers.zip", per_process, mode)
    load(monkeypatch, zipped)

    def build(config: Any, train_set: Any) -> nn.Module:
        return nn.Linear(len(train_set[0][0]), 10)  # this opens the archive here, before the workers are forked

    monkeypatch.setattr(model, "build_model", build)
    given = (*RUN, "--workers", workers, "--epochs=1", "--output-dir", tmp_path / "run")
    ranks: Ranks = start(2, *given)
    assert ranks.wait() == [code] * 2, ranks.output()
    if code:
        (error,) = [line for line in ranks.output().splitlines() if "error: " in line]
        assert f"error: {tmp_path}/numbers.zip (descriptor " in error
        assert "was opened before the DataLoader workers, which share it: open it in __getitem__, once per" in error


class Asking(Numbers):
    """Asks a server for each label, on a connection that is opened at once."""

    def __init__(self, address: Any, reopens: bool) -> None:
        super().__init__(200)
        self.address, self.reopens = address, reopens
        self.connect()

    def connect(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET)
        self.connection.connect(self.address)

    def ask(self, index: int) -> int:
        self.connection.sendall(index.to_bytes(1, "big"))
        return self.connection.recv(1)[0]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            answer = self.ask(index)
        except OSError:
            if not self.reopens:
                raise
            self.connect()
            answer = self.ask(index)
        assert answer == index
        return super().__getitem__(index)


@fault(52)
@pytest.mark.parametrize(
    ("kind", "reopens", "workers", "code"),
    [("TCP", False, 2, 2), ("TCP", True, 2, 0), ("TCP", False, 0, 0), ("Unix", False, 2, 2), ("Unix", True, 2, 0)],
)
def test_a_connection_that_workers_would_share_ends_the_run(
    kind: str, reopens: bool, workers: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short

    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while number := self.request.recv(1):
                self.request.sendall(number)

    over_tcp = kind == "TCP"
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
        if over_tcp
        else socketserver.ThreadingUnixStreamServer("answers", Echo)
    ) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Asking(server.server_address, reopens)))
        ranks = start(2, *RUN, "--workers", workers, "--epochs=1", "--output-dir", tmp_path / "run")
        assert ranks.wait() == [code] * 2, ranks.output()
        server.shutdown()
    errors = [line for line in ranks.output().splitlines() if "error: " in line]
    expected = "error: a connection was opened before the DataLoader workers, which cannot share it: open it in __get"
    assert len(errors) == (1 if code else 0) and all(expected in error for error in errors), ranks.output()


def test_a_connection_that_a_worker_has_left_is_no_stream_that_ends() -> None:
    """A thread of the rank may wait for it meanwhile: it stays one that blocks."""

    def uses(_: Any) -> list[bool]:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            socket.setdefaulttimeout(30)
            torch.multiprocessing.set_sharing_strategy("file_system")
            shared = torch.zeros(1).share_memory_()  # by a connection to torch's own process, which workers may use
            number, leave = client.fileno(), connections()
            assert shared.is_shared() and [*leave] == [number]
            matches = [os.get_blocking(number), socket.getdefaulttimeout() == 30]
            leave_connections(leave)
            for use in (lambda: client.recv(1), lambda: client.send(b"x"), lambda: os.read(number, 1)):
                with pytest.raises(OSError) as error:
                    use()
                matches.append(bool(SHARED_CONNECTION.search(str(error.value))))
            return matches

    assert on_ranks(1, uses) == [[True] * 5]


def test_the_standard_input_and_what_is_written_are_no_files_that_workers_share(tmp_path: Path) -> None:
    """A shell script may read it at the same time."""
    (tmp_path / "list").write_text("a b")

    def positions(_: Any) -> list[str]:
        os.dup2(os.open(tmp_path / "list", os.O_RDONLY), 0)
        for output in (open(tmp_path / "log", "a+b", 0), TemporaryFile("w+b", 0)):  # noqa: SIM115
            workers = Workers(iter(()), positions=file_positions())
            output.write(b"line")
            assert workers.shared_file() == ""
            workers.positions = file_positions()
            output.seek(0)
            assert workers.shared_file().startswith(os.readlink(f"/proc/self/fd/{output.fileno()}"))
        return [path for path in file_positions() if "list" in path]

    ((one,),) = on_ranks(1, positions)
    assert one.startswith(f"{tmp_path}/list (descriptor ") and not one.endswith("r 0)")


def test_workers_that_cannot_start_without_shared_memory_are_one_line(tmp_path: Path) -> None:
    need("unshare")
    need_root("a mount of /dev/shm")
    code = "from torch.utils.data import DataLoader; from ddp.data.workers import start_workers\n"
    code += "from ddp.entrypoint.run_main import run_and_exit\n"
    code += "run_and_exit(lambda: start_workers(DataLoader([1], num_workers=1)) and 0)"
    mount = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROJECT_DIR, env={**os.environ, **LEAN}, capture_output=True, text=True)
    says = "error: no DataLoader worker can start (Read-only file system): is /dev/shm writable?\n"
    assert (done.returncode, done.stderr) == (3, says)
