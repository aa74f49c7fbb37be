"""The order of copies, events and waits on a GPU's streams. The streams are made up: tests/gpu has the real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ddp.data.loader import upload
from ddp.distributed.tensors import Streams, snapshot

CPU = torch.device("cpu")


class Log(list[str]):
    """What was given to which stream, in order."""

    current = "compute"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Event:
        device = 0

        def record(self, stream: Stream) -> None:
            self.name = f"event {len(log)}"
            log.append(f"{stream.name}: record {self.name}")

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            log.append(f"program: wait {self.name}")

    class Stream:
        name = "copies"

        def __init__(self, device: Any = None) -> None:
            pass

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            log.append(f"{self.name}: wait {event.name}")

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name}: wait {other.name}")

    compute = Stream()
    compute.name = "compute"

    @contextlib.contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        log.current, before = entered.name, log.current
        yield
        log.current = before

    copy = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        log.append(f"{log.current}: copy {tensor.tolist()}")
        return copy(tensor, *arguments, **named)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.Tensor, "to", to)
    used = "in use by"
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, by: log.append(f"{part.tolist()} {used} {by.name}"))
    return log


def of_gpu() -> Streams:
    """Those of a GPU, with the stream of `log`."""
    streams = Streams(CPU)
    streams.copies = torch.cuda.Stream()
    return streams


def test_the_next_batch_is_copied_while_the_device_computes_with_this_one(log: Log) -> None:
    found = []
    for batch in upload(iter([torch.tensor(0), torch.tensor(1)]), of_gpu()):
        found.append(batch.item())
        log.append(f"compute: step {batch.item()}")
    assert found == [0, 1]
    steps = [line for line in log if "copies: copy" in line or "step" in line]
    assert steps == ["copies: copy 0", "copies: copy 1", "compute: step 0", "compute: step 1"]
    for number in (0, 1):  # the stream that computes waits for the copy; the program waits for nothing
        event = log[log.index(f"copies: copy {number}") + 1].split("record ")[1]
        received = log.index(f"compute: wait {event}")
        assert received < log.index(f"{number} in use by compute") < log.index(f"compute: step {number}")
    assert not any(line.startswith("program") for line in log)


def test_an_object_that_moves_itself_moves_on_the_stream_that_computes(log: Log) -> None:
    """Nobody could tell the allocator which stream uses the tensors in it."""

    class Batch:
        def to(self, device: torch.device, non_blocking: bool) -> str:
            log.append(f"{log.current}: an object")
            return "moved"

    ((moved, _),) = upload([(Batch(), torch.tensor(1))], of_gpu())
    assert moved == "moved"
    assert "compute: an object" in log and "copies: an object" not in log


def test_a_save_copies_on_its_own_stream_and_later_steps_wait_for_it(log: Log) -> None:
    state = {"weights": torch.tensor([1.0, 2.0]), "step": 3}
    copy, copied = snapshot(state, of_gpu())
    assert copy["step"] == 3 and copy["weights"].tolist() == [1.0, 2.0]
    assert copy["weights"].data_ptr() != state["weights"].data_ptr()  # type: ignore[attr-defined]
    before, copying, record, wait = log
    assert before == "copies: wait compute" and copying == "copies: copy [1.0, 2.0]"
    assert wait == record.replace("copies: record", "compute: wait")
    copied.wait()
    assert log[-1] == record.replace("copies: record", "program: wait")


def test_a_cpu_has_reached_every_mark() -> None:
    streams = Streams(CPU)
    assert streams.mark().reached() and streams.mark().wait() is None
    batches = [{"a": torch.ones(2)}, {"a": torch.zeros(2)}]
    assert [batch["a"].tolist() for batch in upload(batches, streams)] == [[1, 1], [0, 0]]
