"""Step 2: train on several processes, one per GPU, with DistributedDataParallel.

torchrun --standalone --nproc-per-node 2 examples/steps/2_ddp.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 0
EPOCHS = 5
BATCH = 32  # per process: two processes train on 64 samples in each step
LR = 0.01


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
    """Return the loss and the accuracy."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of the losses, of the correct answers, of the samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        correct = (outputs.argmax(1) == labels).sum()
        sums += torch.stack([loss.double(), correct.double(), torch.tensor(len(labels), device=device).double()])
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])  # which process of this machine; torchrun sets it
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # it is GPU 0 until it is set, also for NCCL
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # the same on all ranks for what must be equal: weights, data, splits
    train_set, test_set = make_images(2003, seed=1), make_images(501, seed=2)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)  # the same seed on all ranks
    train_loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, 250)
    model = build_model().to(device)  # evaluate and save this one
    ddp_model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)  # train this one
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    torch.manual_seed(SEED + 1 + rank)  # another dropout mask on each rank

    for epoch in range(EPOCHS):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # another order in each epoch
        ddp_model.train()
        loss_sum = torch.zeros((), device=device)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(ddp_model(images), labels)
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()  # not loss.item(), which waits for the GPU in each step
        train_loss = loss_sum.item() / len(train_loader)
        test_loss, accuracy = evaluate(model, test_loader, device)
        text = f"epoch {epoch}: train loss {train_loss:.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.4f}"
        if rank == 0:
            print(f"{text}, {time.perf_counter() - start:.1f} s, {world_size} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
