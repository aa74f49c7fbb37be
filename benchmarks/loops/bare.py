"""The minimum that a script under torchrun can do: import torch, connect, wrap a model, take one step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
dist.destroy_process_group()
