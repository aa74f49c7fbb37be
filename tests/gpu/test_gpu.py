"""The questions. A docstring's first line is the question; `answer` takes what was found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_project import DEVICE, GPUS, Project
from outputs import lines, weights_and_momentum

REPOSITORY = Path(__file__).resolve().parent.parent.parent
Answer = Callable[[str], None]
FAST = ("--batch-size", 64, "--log-every", 10)


def losses(output_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(output_dir, "train")]


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


# ---- data -----------------------------------------------------------------------------------------------------------


def test_data_in_memory(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Are the losses the same with data on the GPU, in host memory, and read by workers?"""
    project.train(*FAST, "--max-steps", 30, "--deterministic", "--output-dir", tmp_path / "device")
    project.train(*FAST, "--max-steps", 30, "--deterministic", "--output-dir", tmp_path / "worker", "--workers", 1)
    project.edit("import images\nimages.MAX_GPU_SHARE = 0")
    project.train(*FAST, "--max-steps", 30, "--deterministic", "--output-dir", tmp_path / "host")
    found = [losses(tmp_path / name) for name in ("device", "worker", "host")]
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
    answer("yes, bit for bit")


@pytest.mark.needs_gpu
def test_augmented_bytes(project: Project, answer: Answer) -> None:
    """Are augmented images the same bytes on CPU and GPU?"""
    code = """
        import torch, data
        from config import Config
        for extra in ([], ["--channels-last"]):
            train_set, *_ = data.load_datasets(Config.parse(["--dataset=synthetic", *extra]))
            found = []
            for device in ("cpu", "cuda"):
                if device == "cuda":
                    train_set.images, train_set._copies = train_set.images.cuda(), None
                batch = [part.to(device) for part in train_set.__getitems__(list(range(512)))]
                augmented = train_set.augment(batch, 3)
                found.append(augmented[2].cpu())
                inputs, _ = train_set.prepare(augmented)
                assert inputs.is_contiguous(memory_format=train_set.transforms.memory_format)
            assert torch.equal(*found)
        print("equal")
    """
    assert project.run("-c", "\n".join(line[8:] for line in code.splitlines())) == "equal\n"
    answer("yes, in both memory formats")


SYNC_CHECK = """
import torch
import ddp.training.run
_advance = ddp.training.run.Run.advance
def advance(self):
    _advance(self)
    if self.state.step == 20:
        torch.cuda.set_sync_debug_mode("error")
    if self.state.step == 40:
        torch.cuda.set_sync_debug_mode("default")
ddp.training.run.Run.advance = advance
ddp.distributed.stop_sync.StopSync.maybe_sync = lambda self: None
"""


@pytest.mark.needs_gpu
@pytest.mark.parametrize("place", ["device", "host", "worker"])
def test_no_synchronisation(project: Project, tmp_path: Path, place: str, answer: Answer) -> None:
    """Does a step run without waiting for the GPU?"""
    in_host_memory = "\nimport images\nimages.MAX_GPU_SHARE = 0" if place == "host" else ""
    project.edit(SYNC_CHECK + in_host_memory)
    workers = ("--workers", 1) if place == "worker" else ()
    project.train(*FAST, *workers, "--log-every", 1000, "--max-steps", 50, "--output-dir", tmp_path / "out")
    answer(f"yes, with data from the {place}: set_sync_debug_mode('error') over 20 steps")


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_losses_of_cpu_and_gpu(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Are the losses of 50 fp32 steps those of the CPU?"""
    given = ("--batch-size", 64, "--log-every", 1, "--max-steps", 50, "--output-dir")
    project.train(*given, tmp_path / "here")
    project.train(*given, tmp_path / "cpu", "--device", "cpu")
    found = [losses(tmp_path / name) for name in ("here", "cpu")]
    assert len(found[0]) == 50
    difference = max(abs(one - other) / other for one, other in zip(*found, strict=True))
    assert difference < 0.02
    answer(f"yes, within {difference:.1e}")


@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "bf16"),
        pytest.param(("--precision", "fp16"), marks=pytest.mark.needs_gpu),
        ("--channels-last",),
        pytest.param(("--compile",), marks=pytest.mark.needs_gpu),
        pytest.param(("--precision", "bf16", "--channels-last", "--compile"), marks=pytest.mark.needs_gpu),
        ("--matmul-precision", "high"),
    ],
    ids=" ".join,
)
def test_training(project: Project, tmp_path: Path, options: tuple[str, ...], answer: Answer) -> None:
    """Does it learn with these options?"""
    project.train("--batch-size", 128, *options, "--output-dir", tmp_path / "out", timeout=240)
    accuracy = lines(tmp_path / "out", "val")[-1]["accuracy"]
    assert accuracy > 0.5  # by chance: 0.1
    answer(f"yes: {' '.join(options)}: accuracy {accuracy:.3f} after an epoch")


@pytest.mark.needs_gpu
def test_skipped_step(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does fp16 skip a step whose gradient overflows, and go on?"""
    project.edit(
        "_loss = compute_loss\n_calls = []\n"
        "def compute_loss(outputs, targets, config):\n"
        "    _calls.append(1)\n"
        "    return _loss(outputs, targets, config) * (1e30 if len(_calls) == 20 else 1)"
    )
    project.train(*FAST, "--precision", "fp16", "--max-steps", 60, "--output-dir", tmp_path / "out", "--log-every", 60)
    code = (
        "from ddp.checkpoint import storage; from pathlib import Path; import sys; "
        "print(storage.read(max(Path(sys.argv[1]).glob('*.pt')))['scaler']['scale'])"
    )
    scale = float(project.run("-c", code, tmp_path / "out/checkpoints"))
    assert scale < 65536
    answer(f"yes: the scale fell to {scale:g}")


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--precision", "bf16"), ("--nproc", 2, "--backend", "gloo")], ids=str)
def test_exact_resume(project: Project, tmp_path: Path, options: tuple[Any, ...], answer: Answer) -> None:
    """Is a run that was killed and resumed the same, bit for bit, with --deterministic?"""
    given = (*FAST, "--deterministic", *options, "--max-steps", 60, "--checkpoint-every", 10, "--output-dir")
    project.train(*given, tmp_path / "whole")
    process = project.start_training(*given, tmp_path / "killed", "--log-every", 1)
    wait_until(lambda: list((tmp_path / "killed/checkpoints").glob("step_*.pt")), process)
    for pid in (*children(process), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert "resuming from" in project.train(*given, tmp_path / "killed")
    assert weights_and_momentum(tmp_path / "killed") == weights_and_momentum(tmp_path / "whole")
    answer(f"yes: {' '.join(map(str, options)) or 'fp32'}")


@pytest.mark.needs_gpu
def test_save(project: Project, answer: Answer) -> None:
    """How long does a save stop the GPU?"""
    code = """
        import time, torch
        from ddp.distributed.tensors import snapshot
        from ddp.distributed.tensors import Streams
        device = torch.device("cuda", 0)
        streams, state = Streams(device), {"weights": [torch.randn(1 << 26, device=device) for _ in range(8)]}
        for _ in range(2):  # the first time, the pinned memory is allocated
            copy = None
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy, copied = snapshot(state, streams)
            issued = time.perf_counter() - start
            torch.cuda.current_stream().synchronize()  # later work of the GPU begins here
            stopped = time.perf_counter() - start
            copied.wait()
        assert all(torch.equal(one, other.cpu()) for one, other in zip(copy["weights"], state["weights"]))
        print(f"{2 / stopped:.1f} GB/s; the program waits {1000 * issued:.1f} ms")
    """
    found = project.run("-c", "\n".join(line[8:] for line in code.splitlines())).strip()
    answer(f"as long as the copy takes, at {found}")


# ---- processes ------------------------------------------------------------------------------------------------------


def test_two_processes_on_one_gpu(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Do two processes share a GPU with gloo?"""
    output = project.train(
        *FAST, "--nproc", 2, "--backend", "gloo", "--max-steps", 30, "--output-dir", tmp_path / "out"
    )
    assert "2 processes" in output and ", gloo, " in output
    answer("yes")


@pytest.mark.needs_gpu
def test_more_processes_than_gpus(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Is NCCL with more processes than GPUs refused?"""
    count = len(GPUS) + 1
    output = project.train("--nproc", count, "--output-dir", tmp_path / "out", code=3)
    assert f"{count} processes, {len(GPUS)} GPU" in output
    answer("yes, with one line")


@pytest.mark.needs_gpu
def test_one_process_with_nccl(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does one process train over NCCL?"""
    assert ", nccl, " in project.train(*FAST, "--max-steps", 30, "--output-dir", tmp_path / "out")
    answer("yes")


NCCL = """
import time, torch, torch.distributed as dist
from datetime import timedelta
from ddp.distributed.process_group import _set_nccl_timeout
from ddp.distributed.rank_reports import backend_of, collective_count, record_collectives, recorded_collectives
record_collectives()
device = torch.device("cuda", 0)
options = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": timedelta(seconds=SECONDS)}
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
values = torch.ones(4, device=device)
"""


@pytest.mark.needs_gpu
def test_collectives_over_nccl(project: Project, answer: Answer) -> None:
    """Are collectives over NCCL recorded and counted, for the report of a hang?"""
    code = """
before = collective_count(device)
for _ in range(3):
    dist.all_reduce(values)
torch.cuda.synchronize()
time.sleep(2)  # a thread of the recorder notes that they are done
found = [each for each in recorded_collectives() if not each.key.startswith("gloo")]
print(type(backend_of(device)).__name__, collective_count(device) - before, *(each.operation for each in found))
print([each.tensors for each in found], [each.site for each in found], [each.waited_s for each in found])
"""
    output = project.run("-c", NCCL.replace("SECONDS", "60") + code)
    name, count, *operations = output.splitlines()[-2].split()
    assert count == "3" and [each.lower().replace("_", "") for each in operations] == ["allreduce"] * 3, output
    assert output.splitlines()[-1].endswith("[0.0, 0.0, 0.0]"), output
    answer(f"yes: {name}")


@pytest.mark.needs_gpu
def test_timeout_of_nccl(project: Project, answer: Answer) -> None:
    """Does NCCL wait longer than --timeout, so that the run can say what has happened?"""
    code = """
SET
torch.cuda._sleep(int(15 * 2e9))  # at least 10 s of the GPU
dist.all_reduce(values)
torch.cuda.synchronize()
time.sleep(1)
print("done")
"""
    start = NCCL.replace("SECONDS", "4")
    longer = "_set_nccl_timeout(backend_of(device), timedelta(seconds=100))"
    assert project.run("-c", start + code.replace("SET", longer)).endswith("done\n")
    with project.start("-c", start + code.replace("SET", "")) as process:
        output, _ = process.communicate(timeout=100)
    answer("yes" + ("; by default it would end the process" if "done" not in output else ", as by default"))


@pytest.mark.needs_gpu(count=2)
def test_two_gpus_with_nccl(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Do two GPUs train over NCCL, and resume bit for bit?"""
    given = (*FAST, "--nproc", 2, "--deterministic", "--max-steps", 60, "--checkpoint-every", 10, "--output-dir")
    assert ", nccl, " in project.train(*given, tmp_path / "whole")
    project.train(*given, tmp_path / "parts", "--max-steps", 25)
    project.train(*given, tmp_path / "parts")
    assert weights_and_momentum(tmp_path / "parts") == weights_and_momentum(tmp_path / "whole")
    answer("yes")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.needs_gpu(count=2))])
def test_a_killed_rank(project: Project, tmp_path: Path, backend: str, answer: Answer) -> None:
    """Is a rank that is killed with -9 noticed within 15 s?"""
    given = ("--nproc", 2, "--backend", backend, "--epochs", 50, "--checkpoint-every", 20, "--output-dir")
    process = project.start_training(*FAST, *given, tmp_path / "out")
    wait_until(lambda: list((tmp_path / "out/checkpoints").glob("step_*.pt")), process)
    begin = time.monotonic()
    os.kill(children(process)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - begin
    assert process.returncode == 8 and "was lost" in output and seconds < 15, output
    answer(f"yes, after {seconds:.1f} s, with exit code 8 ({backend})")


def test_sigterm(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does SIGTERM save after a step and exit with 75?"""
    process = project.start_training(*FAST, "--epochs", 50, "--checkpoint-every", 20, "--output-dir", tmp_path / "out")
    wait_until(lambda: list((tmp_path / "out/checkpoints").glob("step_*.pt")), process)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "and saved, at step" in output, output
    answer(f"yes, after {time.monotonic() - begin:.1f} s")


SLOW_STEPS = """
import torch
_loss = compute_loss
def compute_loss(outputs, targets, config):
    torch.cuda._sleep(int(0.3 * 1e9))  # about 0.2 s of the GPU; the program goes on
    return _loss(outputs, targets, config)
"""


@pytest.mark.needs_gpu
def test_a_stop_with_slow_steps(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Is SIGTERM seen within seconds if the GPU is slow and the program is fast?"""
    project.edit(SLOW_STEPS)
    process = project.start_training("--epochs", 50, "--checkpoint-every", 4, "--output-dir", tmp_path / "out")
    wait_until(lambda: list((tmp_path / "out/checkpoints").glob("step_*.pt")), process)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - begin
    assert process.returncode == 75 and seconds < 8, output
    answer(f"yes, after {seconds:.1f} s with steps of about 0.2 s")


SPINNING = """
import os, torch
_loss, _calls = compute_loss, []
def compute_loss(outputs, targets, config):
    _calls.append(1)
    if len(_calls) == 20 and os.environ.get("RANK", "1") == "1":
        for _ in range(1000):
            torch.cuda._sleep(1 << 40)
        torch.cuda.synchronize()
    return _loss(outputs, targets, config)
"""


@pytest.mark.needs_gpu
def test_timeout_with_a_spinning_kernel(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does --timeout end a run in which the kernel of one rank never ends?"""
    project.edit(SPINNING)
    given = (*FAST, "--backend", "gloo", "--timeout", 10, "--output-dir", str(tmp_path / "out"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    command = (*launcher, "main.py", "--dataset", "synthetic", "--device", DEVICE, *given)
    begin = time.monotonic()
    output = project.run(*command, code=1, timeout=120)  # torchrun exits with 1 for every failure of a worker
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert status["exit_code"] == 8 and "(--timeout)" in output, output
    answer(f"yes, with exit code 8, after {time.monotonic() - begin:.0f} s with --timeout 10")


@pytest.mark.needs_gpu
def test_device_side_assert(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does a device-side assert exit with 1 and its own message?"""
    project.edit(
        "_loss = compute_loss\n"
        "def compute_loss(outputs, targets, config):\n    return _loss(outputs, targets + 100, config)"
    )
    output = project.train(*FAST, "--output-dir", tmp_path / "out", code=1)
    assert "Assertion `t >= 0 && t < n_classes` failed" in output and "in compute_gradients" in output
    answer("yes")


@pytest.mark.needs_gpu
def test_out_of_memory(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Is out of memory one line?"""
    project.edit(
        "import torch\n_loss = compute_loss\n"
        "def compute_loss(outputs, targets, config):\n    torch.empty(1 << 45, device='cuda')\n"
        "    return _loss(outputs, targets, config)"
    )
    with project.start_training(*FAST, "--output-dir", tmp_path / "out") as process:
        output, _ = process.communicate(timeout=120)
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert "memory" in line and "Traceback" not in output, output
    answer(f"yes: {line[:120]}")


# ---- what one step is watched for -----------------------------------------------------------------------------------


FLIP = """
import torch
import ddp.training.run
_advance = ddp.training.run.Run.advance
def advance(self):
    _advance(self)
    if self.ctx.rank == 1 and self.state.step == 15:
        weight = self.checkpoints.fields["model"].fc2.weight.detach()
        weight.view(torch.int32).flatten()[100] ^= 8
ddp.training.run.Run.advance = advance
"""


def test_a_flipped_bit(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Is a bit that flips in the weights of one rank found at the next save?"""
    project.edit(FLIP)
    given = (*FAST, "--nproc", 2, "--backend", "gloo", "--checkpoint-every", 10, "--max-steps", 30, "--output-dir")
    output = project.train(*given, tmp_path / "out", code=6)
    assert "differ, first in model: fc2.weight" in output and "noticed at step 20" in output, output
    answer("yes, and the run ends before it saves them")


@pytest.mark.needs_gpu
def test_bit_sums(project: Project, answer: Answer) -> None:
    """Does the GPU compute the same sums of bits as the CPU?"""
    code = """
        import torch
        from ddp.parts.monitor.replicas import bit_sum
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for count in (1, 7, 1001, 1 << 20):
                tensor = torch.randint(-100, 100, (count,)).to(dtype)
                assert bit_sum(tensor) == bit_sum(tensor.cuda()).cpu(), (dtype, count)
        print("equal")
    """
    assert project.run("-c", "\n".join(line[8:] for line in code.splitlines())) == "equal\n"
    answer("yes, for four dtypes and four sizes")


@pytest.mark.needs_gpu
def test_gradients_twice(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does --guard compute the same gradients twice?"""
    given = (*FAST, "--max-steps", 30, "--deterministic", "--precision", "bf16", "--guard", 5, "--output-dir")
    project.train(*given, tmp_path / "out")
    answer("yes: 6 of 30 steps in bf16, with --deterministic")


SLOW_RANK = """
import torch
import ddp.parts.monitor.rank_speeds
ddp.parts.monitor.rank_speeds.INTERVAL_S = 1.0
_build = build_model
def build_model(*arguments):
    model = _build(*arguments)
    model.fc1.register_forward_pre_hook(sleep)
    return model
def sleep(*_):
    if torch.distributed.get_rank() == 1:
        torch.cuda._sleep(200_000_000)  # about 0.1 s of the GPU
"""


@pytest.mark.needs_gpu
def test_a_slow_rank(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Is a rank named whose forward pass is slow on the GPU?"""
    project.edit(SLOW_RANK)
    given = (*FAST, "--nproc", 2, "--backend", "gloo", "--max-steps", 60, "--output-dir")
    output = project.train(*given, tmp_path / "out")
    found = re.findall(r"rank 1 .* x as slow as the others: in the forward pass \(.*\)", output)
    assert len(found) == 1, output
    answer(f"yes: {found[0]}")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("model", ["resnet50", "vit_b_16"])
def test_mfu(project: Project, tmp_path: Path, model: str, answer: Answer) -> None:
    """Which part of the GPU's FLOP/s does a model use?"""
    given = ("--model", model, "--image-size", 224, "--batch-size", 128, "--precision", "bf16", "--channels-last")
    project.train(*given, "--max-steps", 60, "--log-every", 20, "--output-dir", tmp_path / "out", timeout=240)
    line = lines(tmp_path / "out", "train")[-1]
    if "mfu" not in line:
        pytest.skip("the peak of this GPU is not in ddp/training/flops.py")
    assert 0.02 < line["mfu"] < 1
    answer(f"{model}, bf16, batch 128: {line['mfu']:.1%} MFU, {line['samples_per_s']:,.0f} images/s")


# ---- what is there, and how fast ------------------------------------------------------------------------------------


@pytest.mark.needs_gpu
def test_waiting_for_data(project: Project, tmp_path: Path, answer: Answer) -> None:
    """How much of a step waits for data?"""
    found = []
    for workers in ((), ("--workers", 1)):
        project.train(*FAST, *workers, "--log-every", 50, "--output-dir", tmp_path / f"out{len(found)}")
        line = lines(tmp_path / f"out{len(found)}", "train")[-1]
        found.append(f"{line['data_ms']:.2f} of {line['step_ms']:.2f} ms")
    answer(f"{found[0]} with data in memory; {found[1]} with a worker (ToyModel, batch 64)")


BUSY = """
import torch
_loss = compute_loss
def compute_loss(outputs, targets, config):
    torch.cuda._sleep(40_000_000)  # about 20 ms of the GPU
    return _loss(outputs, targets, config)
"""


@pytest.mark.needs_gpu
def test_waiting_for_the_program(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does the line of an epoch say that the GPU waits for the program, with a remedy?"""
    output = project.train(*FAST, "--output-dir", tmp_path / "out")
    found = re.findall(r"the GPU waits \d+% of the time: raise --batch-size, or use --compile$", output, re.MULTILINE)
    assert len(found) == 1, output
    gpu_ms = lines(tmp_path / "out", "train_epoch")[-1]["gpu_ms"]
    step_ms = lines(tmp_path / "out", "train")[-1]["step_ms"]
    project.edit(BUSY)
    assert "the GPU waits" not in project.train(*FAST, "--output-dir", tmp_path / "busy")
    answer(f"yes: {found[0]} (ToyModel, batch 64: {gpu_ms:.2f} of {step_ms:.2f} ms); nothing, if it does not wait")


@pytest.mark.needs_gpu
def test_data_path(project: Project, answer: Answer) -> None:
    """How long do augment and prepare take for a batch of 128 images that are on the GPU?"""
    code = """
        import time, torch, data
        from config import Config
        train_set, *_ = data.load_datasets(Config.parse(["--dataset=synthetic"]))
        train_set.images, train_set._copies = train_set.images.cuda(), None
        batch = [part.cuda() for part in train_set.__getitems__(list(range(128)))]
        found = []
        for part in (lambda: train_set.augment(batch, 3), lambda: train_set.prepare(batch)):
            part()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                part()
            issued = time.perf_counter() - start
            torch.cuda.synchronize()
            found += [10 * (time.perf_counter() - start), 10 * issued]
        print("augment {:.2f} ms, of the program {:.2f}; prepare {:.2f}, of the program {:.2f}".format(*found))
    """
    answer(project.run("-c", "\n".join(line[8:] for line in code.splitlines())).strip())


def test_benchmark(project: Project, tmp_path: Path, answer: Answer) -> None:
    """Does benchmark.py run?"""
    quick = ("--seconds", 0.3, "--repeats", 1, "--output", tmp_path / "bench")
    output = project.run("benchmark.py", "--dataset", "synthetic", "--device", DEVICE, "--nproc", 1, *quick)
    answer("yes: " + re.findall(r"^DDP.*", output, re.MULTILINE)[0] if re.search(r"^DDP", output, re.M) else "yes")


@pytest.mark.needs_gpu
def test_speed(answer: Answer, tmp_path: Path) -> None:
    """How fast is it, compared with the limit and with the naive script?"""
    words = [REPOSITORY / "benchmarks/training.py", "--repetitions", "1", "--steps", "0.3", "--output", tmp_path]
    words += ["--contestants", "naive", "this project", "limit"]
    words += ["--cases", "toy-b128", "resnet18", "resnet18bf16-channels-last"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^\*\*(.*)\*\*$|^\| this project \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", done.stdout, re.MULTILINE
    )
    titles = [row[0] for row in rows if row[0]]
    ours = [row[1:] for row in rows if not row[0]]
    for title, (speed, naive, limit) in zip(titles, ours, strict=True):
        answer(f"{title}: {speed} images/s, {naive} times the naive script, {limit} of the limit")
