"""A training and an evaluation batch of a task on a GPU, with fake tensors: they have a device, but no content.

An operation that mixes devices raises, so this finds what a GPU would find first. It runs in a process of its own:
python fake_gpu.py FOLDER... -- OPTIONS -- OPTIONS...: the task's files are in the first folder that has them.
"""

# ruff: noqa: E402
import copy
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

folders, *all_options = (part.split("\n") for part in "\n".join(sys.argv[1:]).split("\n--\n"))
sys.path[:0] = folders

import data
import model as task
from config import Config
from ddp.data.dataset import hooks_of
from ddp.data.loader import EVALUATION, Movable, _move
from ddp.distributed.process_group import Work
from ddp.distributed.tensors import map_tensors
from ddp.training.meter import Meter
from ddp.training.wrapping import autocast

GPU = torch.device("cuda")


class Context:
    device = GPU
    work = Work()


def devices(tree: Any) -> set[str]:
    found: set[str] = set()
    map_tensors(tree, lambda tensor: found.add(tensor.device.type))
    return found


def read(dataset: Any) -> Any:
    """A batch in host memory, as a DataLoader hands it over."""
    indices = list(range(min(8, len(dataset))))
    batch = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
    batch = hooks_of(dataset).collate(batch) if isinstance(batch, list) else batch
    assert devices(batch) <= {"cpu"}, "the loader copies batches, without a synchronisation"
    return batch


def put_on_gpu(network: torch.nn.Module, fake: FakeTensorMode) -> None:
    """Module.to would set the storage of real weights."""
    known: dict[int, torch.nn.Parameter] = {}  # tied weights stay one tensor
    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                on_gpu = torch.nn.Parameter(fake.from_tensor(weight.detach()).to(GPU), weight.requires_grad)
                module._parameters[name] = known.setdefault(id(weight), on_gpu)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake.from_tensor(buffer).to(GPU)


def compute(config: Config, hooks: Any, batch: Any, network: torch.nn.Module, fake: FakeTensorMode, epoch: int) -> None:
    """What main.py does with a batch: move, augment, prepare, mix, forward, loss, totals. Backward needs a driver."""
    batch = _move(map_tensors(batch, fake.from_tensor), GPU, Movable)
    if epoch != EVALUATION:
        batch = hooks.augment(batch, epoch)
    inputs, targets = hooks.prepare(batch)
    if epoch != EVALUATION:
        inputs, targets = hooks.mix(inputs, targets)
    assert devices((inputs, targets)) == {"cuda"}
    network.train(epoch != EVALUATION)
    with autocast(config, Context()):
        outputs = task.forward(network, inputs, targets)
        loss = task.compute_loss(outputs, targets, config)
    assert devices(loss) == {"cuda"}
    meter = Meter(Context())
    meter.add({**task.batch_totals(loss, outputs, targets), "a total of several numbers": loss.detach().new_zeros(2)})
    meter._add_pending()


def main(options: list[str]) -> None:
    config = Config.parse([*options, "--batch-size", "8"])
    train_set, val_set, test_set = data.load_datasets(config)
    network = task.build_model(config, train_set)
    for memory in (1 << 40, 100):  # data held in memory move to the GPU, or do not fit
        torch.cuda.mem_get_info = lambda device, memory=memory: (memory, memory)
        for dataset, epoch in ((train_set, 1), (val_set or test_set, EVALUATION)):
            dataset, on_gpu = copy.deepcopy(dataset), copy.deepcopy(network)
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with fake:
                put_on_gpu(on_gpu, fake)
                hooks_of(dataset).to(GPU)
            batch = read(dataset)
            with fake:
                compute(config, hooks_of(dataset), batch, on_gpu, fake, epoch)
    print("done:", *options)


for options in all_options:
    main(options)
