"""--mirror: a copy of a run in an object store or a directory. The object store is moto's S3 server, behind a proxy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import rehearse
import s3fs  # noqa: F401  # loaded once here, and not in each rank
from outputs import checkpoints, free_port, lines, status
from test_storage import mount, mounted

import ddp.parts.mirror.mirror as mirror
from compare import differences
from config import Config
from ddp.checkpoint.storage import verify
from ddp.distributed.process_group import DistContext
from ddp.parts.mirror.callback import MirrorCallback
from faults import fault
from processes import on_ranks, start, train

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 2, "--keep-checkpoints", 2]
EVERY_2 = [*OPTIONS, "--checkpoint-every", 2, "--epochs", 1]
STEPS = 20  # of an epoch of 640 images, on 2 processes


# ---- a server that may be slow or down ------------------------------------------------------------------------------


class Proxy:
    """Passes connections on to `target`, unless it is down; not faster than `bytes_per_s` towards the server."""

    def __init__(self, target: int) -> None:
        self.target, self.port, self.bytes_per_s = target, free_port(), 0
        self.received = 0  # bytes that went to the server
        self.silent = False  # accept connections, and never answer
        self.open: list[socket.socket] = []
        self.listener: Any = None
        self.go_up()

    def go_up(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def go_down(self) -> None:
        """Refuse connections, and end those that are open."""
        for each in (self.listener, *self.open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # go_down() ends it
            while True:
                client, _ = listener.accept()
                if self.silent:
                    self.open.append(client)
                    continue
                server = socket.create_connection(("127.0.0.1", self.target))
                self.open += [client, server]
                threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(data)
                if to_server:
                    self.received += len(data)
                    time.sleep(len(data) / self.bytes_per_s if self.bytes_per_s else 0)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def mirror_of(run: Any) -> Any:
    (found,) = (each.mirror for each in run.ctx.callbacks if isinstance(each, MirrorCallback))
    return found


class At:
    """For `after_step`: on rank 0, at given steps, wait until a condition of the mirror holds, and then act.

    DOWN and UP ask the test process to take the proxy down or up again.
    """

    DOWN, UP, KILL = signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL

    def __init__(self, **steps: Any) -> None:
        self.steps = {int(name.removeprefix("step_")): action for name, action in steps.items()}

    def __call__(self, run: Any) -> None:
        if run.ctx.rank == 0 and run.state.step in self.steps:
            condition, number = self.steps[run.state.step]
            end = time.monotonic() + 180
            while not condition(mirror_of(run)):
                assert time.monotonic() < end
                time.sleep(0.01)
            os.kill(os.getppid() if number in (self.DOWN, self.UP) else os.getpid(), number)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of an S3 server in memory, which accepts one key: after two calls of IAM, it checks signatures."""
    port = free_port()
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 180
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    yield port
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def key(server: int) -> dict[str, str]:
    """The environment variables that give access."""
    iam = boto3.client(
        "iam",
        endpoint_url=f"http://127.0.0.1:{server}",
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    iam.create_user(UserName="trainer")
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=json.dumps(policy))
    made = iam.create_access_key(UserName="trainer")["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}


class Bucket:
    """An empty bucket, as the test sees it."""

    def __init__(self, name: str, server: int) -> None:
        self.name, self.url = name, f"s3://{name}/runs/one"
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server}", region_name="us-east-1")
        self.client.create_bucket(Bucket=name)

    def files(self) -> list[str]:
        """The names of all files of the run, and of uploads that are not complete."""
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return sorted(each["Key"].removeprefix("runs/one/") for each in found)

    def damage(self, name: str) -> None:
        """Flip one bit in the middle of a file."""
        place = {"Bucket": self.name, "Key": f"runs/one/{name}"}
        content = bytearray(self.client.get_object(**place)["Body"].read())
        content[len(content) // 2] ^= 1
        self.client.put_object(**place, Body=bytes(content))


@pytest.fixture
def proxy(server: int, key: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The only way from a run to the server."""
    for name, value in key.items():
        monkeypatch.setenv(name, value)
    proxy = Proxy(server)
    handlers = {At.DOWN: lambda *_: proxy.go_down(), At.UP: lambda *_: proxy.go_up()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(mirror, "RETRY_S", 0.5)
    yield proxy
    proxy.go_down()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def bucket(proxy: Proxy, server: int, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(f"bucket-{abs(hash(request.node.name))}", server)


def the_error(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    return line


# ---- a machine vanishes with its disk -------------------------------------------------------------------------------


@fault(44)
@pytest.mark.slow
def test_a_run_whose_disk_is_gone_resumes_elsewhere_and_ends_the_same(
    small: None, bucket: Bucket, tmp_path: Path
) -> None:
    train(2, *EVERY_2, "--output-dir", tmp_path / "whole")

    kill = At(step_11=(lambda mirror: mirror.step == 10, At.KILL))
    options = [*EVERY_2, "--mirror", bucket.url, "--resume"]
    assert "there is no checkpoint" in the_error(train(2, *options, "must", "--output-dir", tmp_path / "lost", code=4))
    lost = start(2, *options, "auto", "--output-dir", tmp_path / "lost", after_step=kill)
    assert lost.wait() == [-9, 8], lost.output()
    assert bucket.files()[-3:] == ["checkpoints/step_00000010.pt", "metrics.jsonl", "owner.json"]
    shutil.rmtree(tmp_path / "lost")
    output = train(2, *options, "must", "--output-dir", tmp_path / "run")
    assert f"downloaded step_00000010.pt from {bucket.url}" in output and "at step 10" in output
    assert differences(tmp_path / "whole", tmp_path / "run") == []
    assert (status(tmp_path / "run")["saved"], status(tmp_path / "run")["mirrored"]) == (STEPS, STEPS)
    kept = [name for name in bucket.files() if name.startswith("checkpoints/")]
    assert kept[-1] == f"checkpoints/step_{STEPS:08d}.pt" and len(kept) == 2, "--keep-checkpoints 2"
    # A machine with an older copy of the run takes the newer checkpoint.
    for path in (tmp_path / "run" / "checkpoints").glob(f"step_{STEPS:08d}.pt"):
        path.unlink()
    assert f"downloaded step_{STEPS:08d}.pt" in train(2, *options, "must", "--output-dir", tmp_path / "run")
    # What is complete is not trained again, and best.pt is there as well.
    again = train(2, *options, "must", "--output-dir", tmp_path / "elsewhere")
    assert "already done" in again
    for name in ("best.pt", f"checkpoints/step_{STEPS:08d}.pt"):
        assert (tmp_path / "elsewhere" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


@fault(44)
@pytest.mark.slow
def test_an_upload_that_is_killed_leaves_nothing_that_a_run_would_resume_from(
    small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    options = [*EVERY_2, "--mirror", bucket.url, "--output-dir"]
    train(2, *options, tmp_path / "lost", "--max-steps", 2)
    before = bucket.files()
    proxy.bytes_per_s, proxy.received = 100_000, 0
    ranks = start(2, *options, tmp_path / "lost", "--max-steps", 10)
    ranks.until(lambda: proxy.received > 250_000)  # of 500 kB
    ranks.kill()
    ranks.wait()
    proxy.bytes_per_s = 0
    assert bucket.files() == before
    assert "at step 2" in train(2, *options, tmp_path / "run")


@fault(44)
@pytest.mark.slow
def test_a_damaged_checkpoint_in_the_mirror_is_skipped_and_no_run_starts_afresh(
    small: None, bucket: Bucket, tmp_path: Path
) -> None:
    options = [*OPTIONS, "--mirror", bucket.url, "--checkpoint-every", 2, "--output-dir"]
    steps = {f"step_{step}": (lambda mirror, step=step: mirror.step == step - 1, 0) for step in (3, 5)}
    train(2, *options, tmp_path / "lost", "--max-steps", 6, after_step=At(**steps))
    bucket.damage("checkpoints/step_00000006.pt")
    bucket.damage("best.pt")
    output = train(2, *options, tmp_path / "run", "--max-steps", 4)
    assert "warning: step_00000006.pt in" in output and "its digest does not match" in output
    assert "warning: best.pt in" in output and "downloaded step_00000004.pt" in output
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert "checkpoints/step_00000006.pt" not in bucket.files(), "a damaged checkpoint would count as kept"
    bucket.damage("checkpoints/step_00000004.pt")
    line = the_error(train(2, *options, tmp_path / "third", code=4))
    assert "no checkpoint in" in line and "step_00000004.pt" in line


# ---- the store is slow, or away -------------------------------------------------------------------------------------


@fault(44)
@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_is_a_warning_and_training_continues(
    small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    options = [*EVERY_2, "--mirror", bucket.url, "--output-dir", tmp_path / "run"]
    steps = {
        "step_6": (lambda mirror: mirror.step is not None, At.DOWN),
        "step_16": (lambda mirror: mirror.warned, At.UP),
        "step_17": (lambda mirror: not mirror.warned, 0),
    }
    ranks = start(2, *options, after_step=At(**steps))
    assert ranks.wait() == [0, 0], ranks.output()
    output = ranks.output()
    assert output.count(f"warning: --mirror {bucket.url}: ") == 1 and "training continues" in output
    assert f"--mirror {bucket.url} works again, and has step" in output
    assert status(tmp_path / "run")["mirrored"] == STEPS
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == list(range(2, STEPS + 1, 2))


@fault(44)
@pytest.mark.slow
def test_a_store_that_is_away_at_the_end_is_a_warning_and_the_same_command_uploads_what_is_missing(
    small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    options = [*EVERY_2, "--mirror", bucket.url, "--output-dir", tmp_path / "run"]
    ranks = start(2, *options, after_step=At(step_6=(lambda mirror: mirror.step in (4, 6), At.DOWN)))
    assert ranks.wait() == [0, 0], ranks.output()
    has = status(tmp_path / "run")["mirrored"]
    assert has in (4, 6)
    assert f"has step {has}, this run is at step {STEPS}: repeat the command" in ranks.output()
    assert "cannot be used" in the_error(train(2, *options, code=3)), "at the start, it must be there"
    proxy.go_up()
    assert "already done" in train(2, *options)
    assert f"checkpoints/step_{STEPS:08d}.pt" in bucket.files() and status(tmp_path / "run")["mirrored"] == STEPS


@pytest.mark.slow
def test_a_slow_store_does_not_slow_the_training(small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    """Checkpoints are saved faster than they can be uploaded: some are left out, and the last one is there."""
    proxy.bytes_per_s = 300_000
    options = [*EVERY_2, "--mirror", bucket.url, "--output-dir", tmp_path / "run"]
    train(2, *options, after_step=At(step_19=(lambda mirror: (mirror.step or 0) < 10, 0)))
    assert status(tmp_path / "run")["mirrored"] == STEPS


@fault(44)
@pytest.mark.slow
def test_a_store_that_never_answers_is_noticed(
    small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in botocore or aiohttp ends an upload that waits for the server to continue."""
    monkeypatch.setattr(mirror, "STUCK_S", 3)
    monkeypatch.setattr(mirror, "ANSWER_TIMEOUT_S", 3)
    options = [*EVERY_2, "--mirror", bucket.url, "--output-dir", tmp_path / "run"]

    def fall_silent() -> None:
        proxy.go_down()
        proxy.silent = True
        proxy.go_up()

    signal.signal(At.DOWN, lambda *_: fall_silent())
    ranks = start(2, *options, after_step=At(step_6=(lambda mirror: mirror.step in (4, 6), At.DOWN)))
    assert ranks.wait() == [0, 0], ranks.output()
    assert f"this run is at step {STEPS}: repeat the command" in ranks.output()
    assert "no answer within 3 s" in the_error(train(2, *options, code=3))


@fault(44)
@pytest.mark.slow
def test_what_is_damaged_or_gone_on_one_side_comes_from_the_other(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "RETRY_S", 0.1)
    output, copy = tmp_path / "run", tmp_path / "mirror"
    copy.mkdir()
    options = [*EVERY_2, "--mirror", copy, "--output-dir", output, "--max-steps"]
    train(1, *options, 4)
    newest = output / "checkpoints" / "step_00000004.pt"
    os.truncate(newest, 1000)
    assert "downloaded step_00000004.pt" in train(1, *options, 4)
    verify(newest)
    shutil.rmtree(output / "checkpoints")  # as a kill in the middle of a download leaves it
    assert "downloaded step_00000004.pt" in train(1, *options, 4)

    def lose(run: Any) -> None:
        owner = copy / "owner.json"
        if run.state.step == 5:
            owner.rename(tmp_path / "kept")
        if run.state.step == 9:
            assert At(step_9=(lambda mirror: mirror.warned, 0))(run) is None
            (tmp_path / "kept").rename(owner)

    text = train(1, *options, 14, after_step=lose)
    assert "owner.json is gone; training continues" in text and "works again, and has step" in text
    assert checkpoints(copy) == checkpoints(output)[-2:]
    shutil.rmtree(copy)
    assert "there is no such directory" in the_error(train(1, *options, 14, code=3))
    copy.mkdir()
    line = the_error(train(1, *options, 14, code=3))
    assert "is empty, although this run has written to it: mount that disk; or delete" in line
    (output / "mirror.json").unlink()
    train(1, *options, 14)
    assert checkpoints(copy) == ["step_00000014.pt"], "a new copy"


def test_a_rehearsal_leaves_the_mirror_alone(tmp_path: Path) -> None:
    """Otherwise the real run would resume from the rehearsal."""

    def fake(function: Any, config: Config, nproc: int) -> int:
        assert config.mirror is None
        raise InterruptedError

    with pytest.raises(InterruptedError):
        next(rehearse.Rehearsal(Config.parse(["--mirror", "s3://bucket/run"]), 1, tmp_path, start=fake).checks())


@fault(44)
@pytest.mark.slow
def test_a_directory_that_is_full_keeps_the_complete_checkpoints(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of 1.3 MB, two checkpoints and half of the third one."""
    monkeypatch.setattr(mirror, "RETRY_S", 0.1)
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk):
        mount("-t", "tmpfs", "-o", "size=1300k", "tmpfs", disk)
        (disk / "run").mkdir()
        options = [*EVERY_2, "--mirror", disk / "run", "--keep-checkpoints", 3, "--output-dir"]
        wait = (lambda mirror: mirror.warned or mirror.step == mirror.wanted, 0)
        output = train(1, *options, tmp_path / "lost", after_step=At(**{f"step_{step}": wait for step in range(2, 40)}))
        assert output.count("No space left on device") == 1 and "; training continues" in output, output
        assert f"this run is at step {2 * STEPS}: repeat the command" in output
        kept = checkpoints(disk / "run")
        assert len(kept) == 2 and not list(disk.rglob("*.tmp"))
        for name in kept:
            verify(disk / "run" / "checkpoints" / name)
        assert f"downloaded {kept[-1]}" in train(
            1, *EVERY_2, "--mirror", disk / "run", "--output-dir", tmp_path / "new"
        )


# ---- what is refused ------------------------------------------------------------------------------------------------


@fault(44)
@pytest.mark.slow
def test_a_mirror_that_cannot_be_used_is_refused_before_training(
    small: None, bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str, code: int = 3) -> str:
        output = train(1, *OPTIONS, "--output-dir", tmp_path / "run", "--mirror", url, code=code)
        assert len(output.splitlines()) == 1
        return output

    assert "bucket does not exist" in refused("s3://missing/run")
    assert "Protocol not known: s4" in refused("s4://bucket/run", code=2)
    assert "there is no such directory" in refused(str(tmp_path / "disk that is not mounted"))
    with monkeypatch.context() as changed:
        changed.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert "PermissionError" in refused(bucket.url)
    proxy.go_down()
    assert "Could not connect" in refused(bucket.url)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_mirror_belongs_to_one_run(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory; neither another run nor an earlier process of the same one changes it."""
    monkeypatch.setattr(mirror, "RETRY_S", 0.5)
    mirrored = ["--mirror", tmp_path / "mirror", "--output-dir"]
    (tmp_path / "mirror").mkdir()
    train(1, *EVERY_2, *mirrored, tmp_path / "run", "--max-steps", 2)
    train(1, *EVERY_2, "--output-dir", tmp_path / "other", "--max-steps", 2, "--seed", 1)
    before = checkpoints(tmp_path / "mirror")
    line = the_error(train(1, *EVERY_2, *mirrored, tmp_path / "other", "--seed", 1, code=2))
    assert f"--mirror {tmp_path / 'mirror'} holds another run (--seed was 0, is 1): choose another URL" in line
    train(1, *EVERY_2, "--output-dir", tmp_path / "same", "--max-steps", 2)
    line = the_error(train(1, *EVERY_2, *mirrored, tmp_path / "same", code=2))
    assert f"holds another run than {tmp_path / 'same'}" in line
    line = the_error(train(1, *EVERY_2, *mirrored, tmp_path / "third", "--resume", "never", code=2))
    assert f"{tmp_path / 'mirror'} holds an earlier run" in line
    assert checkpoints(tmp_path / "mirror") == before == ["step_00000002.pt"]

    left_over = tmp_path / "mirror" / "checkpoints" / "step_00000001.pt.1-1.ddp.tmp"  # of an upload that was killed
    uploading = tmp_path / "mirror" / "another" / "checkpoints" / left_over.name  # by the run whose mirror that is
    notes = tmp_path / "mirror" / "notes.tmp"
    uploading.parent.mkdir(parents=True)
    for each in (left_over, uploading, notes):
        each.touch()
    # A run that is asked to stop waits for the upload of what it has saved.
    term = At(step_3=(lambda mirror: True, signal.SIGTERM))
    train(1, *EVERY_2, *mirrored, tmp_path / "run", "--max-steps", 4000, "--epochs", 100, after_step=term, code=75)
    before = checkpoints(tmp_path / "mirror")
    assert before[-1] == checkpoints(tmp_path / "run")[-1] != "step_00000002.pt"

    assert not left_over.exists() and uploading.exists() and notes.exists()

    def take_over(run: Any) -> None:
        # As a run does that was started elsewhere, because this one seemed to be lost.
        if run.state.step == mirror_of(run).step + 1:
            owner = json.loads((tmp_path / "mirror" / "owner.json").read_text())
            (tmp_path / "mirror" / "owner.json").write_text(json.dumps({**owner, "process": "new", "host": "b"}))

    last = int(before[-1][5:13]) + 6
    output = train(1, *EVERY_2, *mirrored, tmp_path / "run", "--max-steps", last, "--epochs", 100, after_step=take_over)
    assert output.count("warning: a run on b writes to") == 1
    assert checkpoints(tmp_path / "mirror") == before and checkpoints(tmp_path / "run")[-1] == f"step_{last:08d}.pt"


def test_the_last_upload_has_all_of_its_time_also_with_a_short_timeout() -> None:
    """The ranks wait for each other in between, for less than --timeout. Rank 0 decides: others stopped later."""

    def finished(ctx: DistContext) -> tuple[int, bool]:
        waits: list[float] = []
        callback = object.__new__(MirrorCallback)
        callback.config, callback.ctx = SimpleNamespace(timeout=0.4), ctx
        callback.mirror = SimpleNamespace(
            finish=lambda seconds: waits.append(seconds) or time.sleep(seconds), warn_if_behind=lambda: None
        )
        start = time.monotonic()
        callback.finish(1.0 if ctx.rank == 0 else 0.1)
        return len(waits), time.monotonic() - start >= 1.0

    (waits, late), others = on_ranks(2, finished)
    assert waits > 1 and late and others == (0, True)
