"""A copy of a run at the URL of --mirror, through fsspec: a machine may vanish with its disk.

After each save, rank 0 uploads in the background, in this order: best.pt, metrics.jsonl, the checkpoint. So whatever a
checkpoint there needs is there. An upload is complete or invisible. A run without checkpoints of its own downloads the
newest one whose SHA-256 is right. owner.json there names the run, and the only process that may write.
"""

import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp.checkpoint.storage import NAME, CheckpointDirectory, InvalidCheckpoint, verify
from ddp.core.background import BackgroundWriter
from ddp.core.errors import CheckpointError, SetupError, UsageError, one_line
from ddp.core.files import TMP_PATTERN, atomic_write, sync_directory, temporary
from ddp.core.run_config import RunConfig

log = logging.getLogger(__name__)
OBJECT_STORES = {"s3", "gs", "gcs", "abfs", "az"}  # show no part of a file; elsewhere, a file gets its name last
CONNECT_TIMEOUT_S = 60.0
RETRY_S = 10.0


class Mirror:
    """The copy of one run. Used on rank 0 alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.url = config, str(config.mirror)
        self.output_dir, self.directory = Path(config.output_dir), CheckpointDirectory(config)
        self.store: Any = None  # a file system of fsspec, from connect() on
        self.path, self.shows_parts = "", False
        self.owner: dict[str, str] = {}  # what owner.json holds while this process may write
        self.wanted: int | None = None  # the step of the newest checkpoint on disk
        self.step: int | None = None  # that of the newest one in the mirror
        self.best: tuple[int, int] | None = None  # which best.pt is there: its inode, and the time of its last change
        self.uploader = BackgroundWriter("mirror")
        self.failing = False

    # ---- the start --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Raises UsageError for a URL that cannot be used, and SetupError if nothing can be written there."""
        connecting = BackgroundWriter("mirror")
        connecting.start(self._connect)
        if not connecting.finish(CONNECT_TIMEOUT_S):
            raise SetupError(f"--mirror {self.url}: no answer within {CONNECT_TIMEOUT_S:.0f} s; check the address")

    def _connect(self) -> None:
        import fsspec

        try:
            self.store, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:  # it names the package to install
            raise UsageError(f"--mirror {self.url}: {one_line(error)}") from error
        self.path, protocol = path.rstrip("/"), self.store.protocol
        self.shows_parts = not OBJECT_STORES & {*([protocol] if isinstance(protocol, str) else protocol)}
        with self._reachable():
            if self.shows_parts:
                self.store.makedirs(self._at("checkpoints"), exist_ok=True)
            self.store.pipe_file(self._at(".probe"), b"")
            self.store.rm_file(self._at(".probe"))

    def restore(self) -> None:
        """Claim the mirror. If it has a newer checkpoint than this machine, download that, best.pt and metrics.jsonl.

        Raises UsageError if the mirror holds another run, SetupError if it cannot be read, and CheckpointError if no
        checkpoint there is good and this machine has none.
        """
        own = self.output_dir / "mirror.json"  # next to the checkpoints of this run
        run = json.loads(own.read_text())["run"] if own.exists() else uuid.uuid4().hex
        with self._reachable():
            names, theirs = self._names(), self._owner().get("run")
        local = [path.name for path in self.directory.paths()]
        if names and local and theirs != run:
            raise UsageError(f"--mirror {self.url} holds another run than {self.output_dir}: choose another --mirror")
        if names and self.config.resume == "never":
            reason = f"--resume never: {self.url} holds checkpoints of an earlier run"
            raise UsageError(f"{reason}; choose another --mirror, or delete them")
        if newer := [name for name in names if not local or step_of(name) > step_of(local[0])]:
            self._download(newer, required=not local)
        run = theirs if names and theirs else run
        with atomic_write(own, "w", durable=True) as file:
            file.write(json.dumps({"run": run, "url": self.url}) + "\n")
        owner = {"run": run, "process": uuid.uuid4().hex, "host": platform.node()}
        with self._reachable():
            self.store.pipe_file(self._at("owner.json"), json.dumps(owner).encode())
        self.owner = owner

    def _download(self, names: list[str], *, required: bool) -> None:
        reasons = []
        for name in names:
            try:
                self._get(f"checkpoints/{name}")
            except InvalidCheckpoint as error:
                reasons.append(f"{name}: {error.reason}")
                log.warning(f"warning: {name} in {self.url} cannot be used: {error.reason}; trying the one before it")
                continue
            self.step = step_of(name)
            for other in ("best.pt", "metrics.jsonl"):
                try:
                    self._get(other)
                except InvalidCheckpoint as error:
                    log.warning(f"warning: {other} in {self.url} cannot be used: {error.reason}; continuing without it")
            return log.info(f"downloaded {name} from {self.url}")
        if required:
            remedy = "choose another --mirror to start afresh"
            raise CheckpointError(f"no checkpoint in {self.url} can be used ({'; '.join(reasons)}): {remedy}")

    def _get(self, name: str) -> None:
        """Download a file, if it is there. Raises InvalidCheckpoint and SetupError."""
        path = self.output_dir / name
        tmp_path = path.with_name(f"{path.name}{TMP_PATTERN[1:]}")
        with temporary(tmp_path, path):
            with self._reachable():
                try:
                    self.store.get_file(self._at(name), str(tmp_path))
                except FileNotFoundError:
                    return
            if path.suffix == ".pt":
                verify(tmp_path)
            with tmp_path.open("r+b") as file:
                os.fsync(file.fileno())
            tmp_path.replace(path)
            sync_directory(path.parent)

    # ---- after each save: in the background, and never in the way of the training -----------------------------------

    def request(self, step: int) -> None:
        """The checkpoint of `step` is on disk: upload it, or a newer one."""
        self.wanted = step
        if self.owner and self.step != step and self.uploader.done.is_set():
            self.uploader.start(self._upload_newest)

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the newest checkpoint. Returns whether it is there, or cannot be now."""
        end = time.monotonic() + timeout
        while self.owner and not self.failing and time.monotonic() < end:
            if self.step == self.wanted and self.uploader.done.is_set():
                return True
            self.request(self.wanted or 0)  # it may have been saved while the last upload ended
            self.uploader.done.wait(0.1)
        return not self.owner or self.failing

    def warn_if_behind(self) -> None:
        """The run ends. Repeating its command uploads what is missing."""
        if self.step != self.wanted:
            has = "no checkpoint" if self.step is None else f"step {self.step:,}"
            remedy = f"repeat the command, or copy {self.output_dir}"
            log.warning(f"warning: --mirror {self.url} has {has}, this run is at step {self.wanted:,}: {remedy}")

    def _upload_newest(self) -> None:
        while self.owner and self.step != self.wanted:
            try:
                self._upload()
                if self.failing:
                    log.info(f"--mirror {self.url} works again, and has step {self.step:,}")
                self.failing = False
            except Exception as error:  # of the store; or the checkpoint was deleted, since there are newer ones
                if not self.failing:
                    effect = f"training goes on; the upload is tried again every {RETRY_S:.0f} s"
                    log.warning(f"warning: --mirror {self.url}: {describe(error)}; {effect}")
                self.failing = True
                time.sleep(RETRY_S)

    def _upload(self) -> None:
        if (owner := self._owner()) != self.owner:
            log.warning(f"warning: a run on {owner.get('host')} writes to {self.url} now: this one uploads no more")
            self.owner = {}
            return
        newest, best = self.directory.paths()[0], self.directory.best_path
        if best.exists() and self.best != (found := (best.stat().st_ino, best.stat().st_mtime_ns)):
            self._put(best.name)
            self.best = found
        self._put("metrics.jsonl")
        self._put(f"checkpoints/{newest.name}")
        self.step = step_of(newest.name)
        for name in self._names()[self.config.keep_checkpoints :]:
            self.store.rm_file(self._at(f"checkpoints/{name}"))

    def _put(self, name: str) -> None:
        place = self._at(name)
        first = self._at("upload.tmp") if self.shows_parts else place
        self.store.put_file(str(self.output_dir / name), first)
        if self.shows_parts:
            self.store.mv(first, place)

    # ---- the store --------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _names(self) -> list[str]:
        """The names of the checkpoints there, newest first."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = [os.path.basename(path) for path in self.store.ls(self._at("checkpoints"), detail=False)]
        return sorted(filter(NAME.fullmatch, found), key=step_of, reverse=True)

    def _owner(self) -> dict[str, str]:
        with suppress(FileNotFoundError):
            return json.loads(self.store.cat_file(self._at("owner.json")))
        return {}

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn any error of the block into a SetupError: each store has errors of its own."""
        try:
            yield
        except Exception as error:
            remedy = "check the address, the credentials and the network, or remove --mirror"
            raise SetupError(f"--mirror {self.url} cannot be used: {describe(error)}; {remedy}") from error


def step_of(name: str) -> int:
    """The step of step_NNNNNNNN.pt."""
    return int(name.removeprefix("step_").removesuffix(".pt"))


def describe(error: Exception) -> str:
    """The type of an error and its message, on one line."""
    return f"{type(error).__name__}: {one_line(error)}"
