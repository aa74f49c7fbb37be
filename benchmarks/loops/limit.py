"""The limit: the DDP step alone, over and over on one batch that lies on the device. No loop can be faster."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import build_model, memory_format, model_parser
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = model_parser(__doc__)
    parser.add_argument("--classes", type=int, default=10)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model = build_model(options, options.classes).to(device)
    if options.compile:
        model.compile()
    ddp_model = DistributedDataParallel(
        model, device_ids=[device.index] if cuda else None, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4, fused=True)
    inputs = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    inputs = inputs.to(memory_format=memory_format(options))
    targets = torch.randint(options.classes, (options.batch_size,), device=device)
    while True:
        with torch.autocast(device.type, torch.bfloat16) if options.precision == "bf16" else nullcontext():
            loss = F.cross_entropy(ddp_model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
