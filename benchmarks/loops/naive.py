"""DDP as tutorials write it, by hand: no library but torch and torchvision.

Sources:
- the loop, with loss.item() in each step: https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html
- DistributedSampler, pinned memory, non_blocking: https://github.com/pytorch/examples/blob/main/imagenet/main.py
- torchrun, saving on rank 0:
  https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu_torchrun.py
- bf16: https://pytorch.org/docs/stable/amp.html
- channels last: https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html
- compile inside DDP: https://pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from common import SGD_OPTIONS, build_dataset, build_model, loader_options, memory_format, parse_options


def main() -> None:
    options = parse_options(__doc__)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    dataset = build_dataset(options)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, **loader_options(options))

    model = build_model(options, len(dataset.classes)).to(device)
    if options.compile:
        model.compile()
    ddp_model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), **SGD_OPTIONS)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        ddp_model.train()
        running_loss = 0.0
        for step, (inputs, targets) in enumerate(loader, start=1):
            inputs = inputs.to(device, non_blocking=True, memory_format=memory_format(options))
            targets = targets.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
                loss = criterion(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            if step % 50 == 0:
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {step}: loss {running_loss / 50:.3f}")
                running_loss = 0.0

        if dist.get_rank() == 0:
            state = {"epoch": epoch, "model": ddp_model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, options.output / "naive.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
