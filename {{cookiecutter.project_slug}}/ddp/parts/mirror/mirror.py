"""A copy of a run at the URL of --mirror, through fsspec: a machine may vanish with its disk.

After each save, rank 0 uploads in the background, in this order: best.pt, metrics.jsonl, the checkpoint. So whatever a
checkpoint there needs is there; a download has the same order. An upload is complete or invisible. owner.json there
holds the run, its options, and the only process that may write. Once training has started, no error here ends it.
"""

import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ddp.checkpoint.storage import (
    BLOCK,
    FILES,
    NAME,
    CheckpointDirectory,
    InvalidCheckpoint,
    delete_left_over,
    step_of,
    verify,
)
from ddp.core.errors import CheckpointError, SetupError, UsageError, UserError, differences, first_few, one_line
from ddp.core.files import TMP_PATTERN, atomic_write, storage_errors
from ddp.core.options import flag_of
from ddp.core.run_config import RunConfig
from ddp.core.threads import BackgroundJob

log = logging.getLogger(__name__)
Result = TypeVar("Result")
ANSWER_TIMEOUT_S = 60.0  # for a small file at the start
RETRY_S = 10.0
STUCK_S = 600.0  # an upload that sends nothing for this time may wait indefinitely


class Mirror:
    """The copy of one run. Used on rank 0 alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.url = config, str(config.mirror)
        self.output_dir, self.directory = Path(config.output_dir), CheckpointDirectory(config)
        self.own = self.output_dir / "mirror.json"  # next to the checkpoints of this run
        self.store: Any = None  # a file system of fsspec, from open() on
        self.path, self.is_directory = "", False
        fixed = [item.name for item in fields(config) if not item.metadata["may_change"]]
        self.options = {flag_of(name): getattr(config, name) for name in fixed}
        self.process = uuid.uuid4().hex
        self.record = {"run": self.process, "process": self.process, "host": platform.node(), "options": self.options}
        self.may_write = False  # from claim() on, until another process takes over
        self.wanted: int | None = None  # the step of the newest checkpoint on disk
        self.step: int | None = None  # that of the newest one in the mirror
        self.sent: dict[str, Any] = {}  # by name: the `version` of the file that is there
        self.unusable: set[str] = set()  # the names of damaged checkpoints there
        self.uploader = BackgroundJob("mirror")
        self.progress = 0.0  # when the upload has sent something
        self.failed = 0.0  # when the last failed upload started
        self.ending = 0.0  # when the run started to wait for its last upload
        self.warned = False

    # ---- the start --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; if the mirror has a newer good checkpoint than this machine, download it with all that it needs.

        Raises UsageError for a URL that cannot be used, or that holds another run; SetupError if it cannot be read; and
        CheckpointError if no checkpoint there is good, and this machine has none.
        """
        self._reach(self._connect)
        ours = json.loads(self.own.read_text()) if self.own.exists() else {}
        if any((rows := self.directory.path / FILES).glob("*.pt")):
            remedy = f"choose another --output-dir, with --resume {next(iter(self.directory.paths()), 'PATH')}"
            raise UsageError(f"--mirror keeps no parts of files, such as {rows}: {remedy}")
        theirs, names = self._reach(self._owner), self._reach(self._names)
        if not theirs and ours.get("url") == self.url:
            remedy = f"mount that disk; or delete {self.own}, to begin a new copy"
            raise SetupError(f"--mirror {self.url} is empty, although this run has written to it: {remedy}")
        known = theirs.get("options", {}).keys() & self.options.keys()  # another version may have more options
        before, now = ({name: each[name] for name in known} for each in (theirs.get("options", {}), self.options))
        if found := differences(before, now, "{name} was {first}, is {second}"):
            raise UsageError(f"--mirror {self.url} holds another run ({first_few(found)}): choose another URL")
        local = next((step_of(path.name) for path in self.directory.paths() if self.directory.is_good(path)), None)
        if theirs and local is not None and theirs["run"] != ours.get("run"):
            raise UsageError(f"--mirror {self.url} holds another run than {self.output_dir}: choose another URL")
        if theirs and self.config.resume == "never":
            raise UsageError(f"--resume never: {self.url} holds an earlier run; choose another URL, or delete it")
        self.record["run"] = theirs.get("run") or ours.get("run") or self.process
        self._remember(ours.get("url"))
        self._reach(lambda: self._put(self.own, ".probe"))
        if newer := [name for name in names if local is None or step_of(name) > local]:
            self._download(newer, required=local is None)

    def _remember(self, url: str | None) -> None:
        """Store which run and which process this is, and the URL once owner.json is there."""
        with storage_errors(self.own), atomic_write(self.own, "w", durable=True) as file:
            file.write(json.dumps({**self.record, "url": url}))

    def _connect(self) -> None:
        import fsspec

        try:
            self.store, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:  # it names the package to install
            raise UsageError(f"--mirror {self.url}: {one_line(error)}") from error
        self.path, self.is_directory = path.rstrip("/"), "file" in self.store.protocol
        if self.is_directory and not os.path.isdir(self.path):  # it may be on a disk that is not mounted
            raise SetupError(f"--mirror {self.url}: there is no such directory; create it, or mount its disk")
        if self.is_directory and os.path.samefile(self.path, self.output_dir):
            raise UsageError(f"--mirror {self.url} is the --output-dir: choose a directory on another disk")

    def _download(self, names: list[str], *, required: bool) -> None:
        for name in names:
            try:
                self._get(f"checkpoints/{name}", before_rename=self._download_others)
            except InvalidCheckpoint as error:
                self.unusable.add(name)
                log.warning(f"warning: {name} in {self.url} cannot be used: {error.reason}; trying the one before it")
                continue
            self.step, self.sent[name] = step_of(name), version(self.directory.path / name)
            return log.info(f"downloaded {name} from {self.url}")
        if required:
            remedy = "choose another --mirror to start afresh"
            raise CheckpointError(f"no checkpoint in {self.url} can be used ({first_few(names)}): {remedy}")

    def _download_others(self) -> None:
        """What a checkpoint needs, before it gets its name: a start that is killed in between downloads all again."""
        for path in (self.directory.best_path, self.output_dir / "metrics.jsonl"):
            try:
                if self.store.exists(self._at(path.name)):
                    self._get(path.name)
            except InvalidCheckpoint as error:
                path.unlink(missing_ok=True)  # the checkpoint does not know an older one
                log.warning(f"warning: {path.name} in {self.url} cannot be used: {error.reason}; resuming without it")

    def _get(self, name: str, before_rename: Callable[[], None] = lambda: None) -> None:
        """Download a file. Raises InvalidCheckpoint if its SHA-256 is wrong or if it is gone, and SetupError."""
        path = self.output_dir / name
        with atomic_write(path, durable=True) as file:
            with self._reachable():
                try:
                    self.store.get_file(self._at(name), file.name)
                except FileNotFoundError as error:  # another process has deleted it
                    raise InvalidCheckpoint(path, "it is gone") from error
            if path.suffix == ".pt":
                verify(Path(file.name))
            before_rename()

    def claim(self) -> None:
        """This run may use its directory: from now on, this process alone writes to the mirror. Raises SetupError."""
        self._reach(lambda: self._put(self.own, "owner.json"))
        self._remember(self.url)
        if self.is_directory:
            delete_left_over(Path(self.path))
        self.may_write = True
        if self.wanted is not None:
            self.request(self.wanted)

    # ---- after each save: in the background, and never in the way of the training -----------------------------------

    def request(self, step: int) -> None:
        """The checkpoint of `step` is on disk: upload it, unless a newer one comes first."""
        self.wanted = step
        if self._is_stuck():
            self._warn(TimeoutError(f"nothing was sent for {STUCK_S:.0f} s"))
            self.uploader = BackgroundJob("mirror")  # the old one may never return
        if not self._is_there() and self.uploader.done.is_set():
            self.progress = time.monotonic()
            self.uploader.start(self._upload_newest)

    def _is_there(self) -> bool:
        """Whether nothing is left to upload."""
        if self.wanted is None or not self.may_write:
            return True
        path = self.directory.path_of(self.wanted)
        return self.sent.get(path.name) == version(path)

    def _is_stuck(self) -> bool:
        return not self.uploader.done.is_set() and time.monotonic() - self.progress > STUCK_S

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the newest checkpoint. Returns whether it is there, or cannot be now.

        It cannot be if an upload that started after the first call fails, if one is stuck, or if another run writes.
        """
        begin = time.monotonic()
        self.ending = self.ending or begin
        while not (self._is_there() and self.uploader.done.is_set()):
            if self.failed > self.ending or self._is_stuck():
                return True
            if time.monotonic() > begin + timeout:
                return False
            if self.wanted is not None:
                self.request(self.wanted)  # it may have been saved while the last upload ended
            self.uploader.done.wait(0.1)
        return True

    def warn_if_behind(self) -> None:
        """The run ends. Repeating its command uploads what is missing."""
        if not self._is_there():
            has = "no checkpoint" if self.step is None else f"step {self.step:,}"
            remedy = f"repeat the command, or copy {self.output_dir}"
            log.warning(f"warning: --mirror {self.url} has {has}, this run is at step {self.wanted:,}: {remedy}")

    def _upload_newest(self) -> None:
        uploader = self.uploader
        while not self._is_there() and uploader is self.uploader:
            begin = self.progress = time.monotonic()
            try:
                self._upload(self.wanted or 0)
                if self.warned and self.may_write:
                    log.info(f"--mirror {self.url} works again, and has step {self.step:,}")
                    self.warned = False
            except Exception as error:  # each store has errors of its own
                self._warn(error)
                self.failed = begin
                time.sleep(RETRY_S)

    def _warn(self, error: Exception) -> None:
        if not self.warned:
            effect = f"training continues; the upload is tried again every {RETRY_S:.0f} s"
            log.warning(f"warning: --mirror {self.url}: {describe(error)}; {effect}")
        self.warned = True

    def _upload(self, step: int) -> None:
        best, path = self.directory.best_path, self.directory.path_of(step)
        name, sent = path.name, version(path)
        with self._held(path) as checkpoint:
            if not self._is_owner():
                return
            if self.sent.get(best.name) != (found := version(best)):
                self._put(best, best.name)
                self.sent[best.name] = found
            self._put(self.output_dir / "metrics.jsonl", "metrics.jsonl")
            if not self._is_owner():
                return
            self._put(checkpoint, f"checkpoints/{name}")
        self.step, self.sent[name] = step, sent
        self.unusable.discard(name)
        good = [each for each in self._names() if each not in self.unusable]
        for old in (*good[self.config.keep_checkpoints :], *self.unusable):
            with suppress(FileNotFoundError):
                self.store.rm_file(self._at(f"checkpoints/{old}"))
        self.unusable.clear()

    @contextmanager
    def _held(self, path: Path) -> Iterator[Path]:
        """Another name of a file, under which it remains while newer checkpoints replace it."""
        held = path.with_name(f"{path.name}.upload{TMP_PATTERN[1:]}")
        held.unlink(missing_ok=True)
        try:
            with suppress(OSError):  # without hard links, a slow upload of a deleted file fails
                os.link(path, held)
            yield held if held.exists() else path
        finally:
            held.unlink(missing_ok=True)

    def _is_owner(self) -> bool:
        owner = self._owner()
        if not owner:
            raise FileNotFoundError("owner.json is gone")  # a disk that is no longer mounted, for example
        if owner["process"] != self.process:
            log.warning(f"warning: a run on {owner['host']} writes to {self.url} now: this one uploads no more")
            self.may_write = False
        return self.may_write

    # ---- the store --------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _names(self) -> list[str]:
        """The names of the checkpoints there, newest first."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = [os.path.basename(path) for path in self.store.ls(self._at("checkpoints"), detail=False)]
        return sorted(filter(NAME.fullmatch, found), key=step_of, reverse=True)

    def _owner(self) -> dict[str, Any]:
        """The content of owner.json; empty if there is none."""
        with suppress(FileNotFoundError):
            return json.loads(self.store.cat_file(self._at("owner.json")))
        return {}

    def _put(self, source: Path, name: str) -> None:
        """Upload a file. Object stores show it once it is complete; in a directory, it gets its name then."""
        from fsspec.callbacks import Callback

        if not self.is_directory:
            progress = Callback(hooks={"time": lambda *_, **__: setattr(self, "progress", time.monotonic())})
            self.store.put_file(str(source), self._at(name), callback=progress)
            return
        Path(self._at(name)).parent.mkdir(exist_ok=True)
        with source.open("rb") as original, atomic_write(Path(self._at(name)), durable=True) as file:
            while block := original.read(BLOCK):
                file.write(block)
                self.progress = time.monotonic()

    def _reach(self, action: Callable[[], Result]) -> Result:
        """The result of `action`, which needs the store. Raises SetupError if that fails, or takes too long."""
        results: list[Result] = []
        thread, timeout = BackgroundJob("mirror"), min(ANSWER_TIMEOUT_S, self.config.timeout / 2)
        with self._reachable():
            thread.start(lambda: results.append(action()))
            if not thread.finish(timeout):
                raise TimeoutError(f"no answer within {timeout:.0f} s")
        return results[0]

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn any error of a store in the block into a SetupError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            remedy = "check the address, the credentials and the network, or remove --mirror"
            raise SetupError(f"--mirror {self.url} cannot be used: {describe(error)}; {remedy}") from error


def version(path: Path) -> tuple[int, int] | None:
    """Differs between two files that had this name; None if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino, path.stat().st_mtime_ns
    return None


def describe(error: Exception) -> str:
    """The type of an error and its message, on one line."""
    return f"{type(error).__name__}: {one_line(error)}"
