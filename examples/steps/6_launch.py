"""Step 6: start the processes in four ways, stop them with a signal, and end when a rank is lost.

torchrun --standalone --nproc-per-node 2 examples/steps/6_launch.py
python examples/steps/6_launch.py                              starts the processes itself
python examples/steps/6_launch.py tcp://10.0.0.1:29500 0 2     rank 0 of 2, on the machine 10.0.0.1; elsewhere: 1 2
python examples/steps/6_launch.py file:///shared/new_file 0 2  the same with a file that both machines see
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SEED = 0
EPOCHS = 5
BATCH = 32  # samples of one forward and backward pass on one process: as many as fit in memory
GLOBAL_BATCH = 256  # samples of one step on all processes
LR = 0.01 * GLOBAL_BATCH / 32  # 0.01 suits a batch of 32: a larger batch takes fewer, longer steps
WARMUP_STEPS = 7  # one epoch: long steps diverge at the start
CLIP = 1.0  # the largest norm of a gradient
CHECKPOINT = Path("checkpoint.pt")  # in the current folder; delete it to start anew
SAVE_EVERY = 5  # steps
TIMEOUT = timedelta(seconds=60)  # for a rank that does not respond; more than the longest wait of a healthy run
stop_requested = False


def make_images(count: int, seed: int) -> TensorDataset:
    """Synthetic 3x32x32 images of 10 classes: a fixed pattern per class with a random brightness, and noise."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    brightness = torch.rand(count, 1, 1, 1, generator=generator)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(brightness * patterns[labels] + 2 * noise, labels)


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 8 * 8, 10)),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the loss and the accuracy over the samples of all ranks. Pass the unwrapped model. Call on every rank."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # each rank has other means and variances in BatchNorm
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of the losses, of the correct answers, of the samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        correct = (outputs.argmax(1) == labels).sum()
        sums += torch.stack([loss.double(), correct.double(), torch.tensor(len(labels), device=device).double()])
    dist.all_reduce(sums)  # add sums and counts, then divide
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def learning_rate(step: int) -> float:
    return LR * min(1.0, (step + 1) / WARMUP_STEPS)


def save(state: dict) -> None:
    """Replace the checkpoint. A crash at any time leaves the old one or the new one, never a part of one."""
    temporary = CHECKPOINT.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the content is on disk before the name refers to it
    os.replace(temporary, CHECKPOINT)
    folder = os.open(CHECKPOINT.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is on disk
    os.close(folder)


def request_stop(*_: Any) -> None:
    """Only note the signal: it may arrive in the middle of a collective that other ranks wait for."""
    global stop_requested
    stop_requested = True


def train(local_rank: int, init_method: str = "env://", rank: int = -1, world_size: int = -1) -> None:
    """Train as one process of `world_size`. With env://, rank and world size are in the environment."""
    signal.signal(signal.SIGTERM, request_stop)  # Slurm, Kubernetes and torchrun send it before they kill
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # it is GPU 0 until it is set, also for NCCL
    else:
        torch.set_num_threads(1)  # as with torchrun; otherwise each process would use all cores
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method, TIMEOUT, world_size, rank)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # the same on all ranks for what must be equal: weights, data, splits
    train_set, test_set = make_images(2003, seed=1), make_images(501, seed=2)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)  # the same seed on all ranks
    share = GLOBAL_BATCH // world_size  # samples of one step on this rank
    passes = share // BATCH
    assert BATCH * passes * world_size == GLOBAL_BATCH, "GLOBAL_BATCH must be a multiple of BATCH x processes"
    steps_per_epoch = len(sampler) // share
    test_part = range(rank, len(test_set), world_size)  # DistributedSampler would repeat samples to make parts equal
    test_loader = DataLoader(Subset(test_set, test_part), 250)
    model = build_model().to(device)  # evaluate and save this one
    ddp_model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)  # train this one
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    fp16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)  # GPUs before Ampere
    scaler = torch.amp.GradScaler(device.type, enabled=fp16)  # fp16 needs scaled gradients, bf16 does not
    dtype = torch.float16 if fp16 else torch.bfloat16
    step = 0
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the samples

    stateful = {"model": model, "optimizer": optimizer, "scaler": scaler}
    saved = [None]  # a list, since broadcast_object_list replaces its elements
    if rank == 0 and CHECKPOINT.exists():  # map_location: the file names the GPU that its tensors were on
        saved = [torch.load(CHECKPOINT, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(saved, src=0)  # all ranks resume from the same file, or none does
    if saved[0] is not None:
        for name, each in stateful.items():
            each.load_state_dict(saved[0][name])
        step = saved[0]["step"]
        if rank == 0:
            print(f"resumed after step {step}")
            if step % steps_per_epoch != 0:  # otherwise an epoch begins
                sums += saved[0]["sums"].to(device)  # the total of all ranks, which the next all_reduce must count once

    for epoch in range(step // steps_per_epoch, EPOCHS):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # another order in each epoch
        done = (step % steps_per_epoch) * share  # samples that this rank has had in this epoch
        train_loader = DataLoader(train_set, share, sampler=list(sampler)[done:], drop_last=True)  # any list of indices
        ddp_model.train()
        for step_images, step_labels in train_loader:
            torch.manual_seed(SEED + 1 + step * world_size + rank)  # another number for each step and rank
            parts = zip(step_images.split(BATCH), step_labels.split(BATCH), strict=True)
            for number, (images, labels) in enumerate(parts, start=1):
                images, labels = images.to(device), labels.to(device)
                with nullcontext() if number == passes else ddp_model.no_sync():
                    with torch.autocast(device.type, dtype):  # forward and loss only
                        loss = F.cross_entropy(ddp_model(images), labels)
                    scaler.scale(loss / passes).backward()  # the last pass averages the gradients over the ranks
                sums[0] += loss.detach() * len(labels)  # not loss.item(), which waits for the GPU in each step
                sums[1] += len(labels)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            scaler.unscale_(optimizer)  # clip the gradient itself, not the scaled one
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            stop = torch.tensor(float(stop_requested), device=device)
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop after the same step, also if one got the signal
            stop = stop.item() > 0  # on a GPU, this waits for the step: large runs ask every few seconds
            if step % SAVE_EVERY == 0 or step == steps_per_epoch * EPOCHS or stop:
                all_sums = sums.clone()
                dist.all_reduce(all_sums)
                if rank == 0:
                    state = {name: each.state_dict() for name, each in stateful.items()}
                    save({**state, "step": step, "sums": all_sums})
            if stop:
                print(f"rank {rank} stops after step {step}")
                dist.destroy_process_group()
                return
        dist.all_reduce(sums)
        train_loss = (sums[0] / sums[1]).item()
        sums.zero_()
        test_loss, accuracy = evaluate(model, test_loader, device)
        text = f"epoch {epoch}: train loss {train_loss:.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.4f}"
        if rank == 0:
            print(f"{text}, {time.perf_counter() - start:.1f} s, {world_size} processes")
    dist.destroy_process_group()


def spawned(local_rank: int, init_method: str, world_size: int) -> None:
    train(local_rank, init_method, local_rank, world_size)


def main() -> None:
    if "LOCAL_RANK" in os.environ:  # torchrun; it may have started processes on several machines
        train(int(os.environ["LOCAL_RANK"]))
    elif len(sys.argv) == 4:  # one process per machine, started by hand
        train(0, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        count = torch.cuda.device_count() or 2
        with tempfile.TemporaryDirectory() as folder:  # file:// needs no free port
            processes = torch.multiprocessing.spawn(spawned, (f"file://{folder}/init", count), count, join=False)
            signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes.processes])
            while not processes.join():  # it waits for one process; if one has failed, it ends the others and raises
                pass


if __name__ == "__main__":
    main()
