"""The limit: the DDP step alone, again and again on one batch on the device. No loop can be faster."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from common import build_model, memory_format, model_parser


class Limit:
    """A model, its optimizer and a batch. Needs the process group."""

    def __init__(self, options: argparse.Namespace) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.bf16 = options.precision == "bf16"
        model = build_model(options, options.classes).to(self.device)
        if options.compile:
            model.compile()
        device_ids = [self.device.index] if cuda else None
        self.ddp_model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
        shape = options.batch_size, 3, options.image_size, options.image_size
        self.inputs = torch.randn(shape, device=self.device).to(memory_format=memory_format(options))
        self.targets = torch.randint(options.classes, (options.batch_size,), device=self.device)

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext():
            loss = F.cross_entropy(self.ddp_model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def parser() -> argparse.ArgumentParser:
    """The options of this script."""
    found = model_parser(__doc__)
    found.add_argument("--classes", type=int, default=10)
    return found


if __name__ == "__main__":
    options = parser().parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    limit = Limit(options)
    while True:
        limit.step()
