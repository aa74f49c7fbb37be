"""The same training with PyTorch-Ignite, as its CIFAR-10 example does it.

Sources:
- https://github.com/pytorch/ignite/blob/master/examples/cifar10/main.py
- https://pytorch.org/ignite/distributed.html
- the common handlers: https://docs.pytorch.org/ignite/_modules/ignite/contrib/engines/common.html
- compile: Ignite does not document it, so as PyTorch recommends:
  https://pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html
"""

from __future__ import annotations

import argparse
from typing import Any

import ignite.distributed as idist
import torch
from ignite.contrib.engines import common as handlers
from ignite.engine import Engine
from ignite.handlers import DiskSaver
from ignite.utils import setup_logger

from common import SGD_OPTIONS, build_dataset, build_model, loader_options, memory_format, parse_options


def training(local_rank: int, options: argparse.Namespace) -> None:
    dataset = build_dataset(options)
    # auto_dataloader divides both by the number of processes: in Ignite they are totals, in our options per process.
    shared = loader_options(options)
    shared["batch_size"] *= idist.get_world_size()
    shared["num_workers"] *= idist.get_nproc_per_node()
    loader = idist.auto_dataloader(dataset, shuffle=True, **shared)

    model = build_model(options, len(dataset.classes))
    if options.compile:
        model.compile()
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), **SGD_OPTIONS))

    trainer = create_trainer(model, optimizer, options)
    handlers.setup_common_training_handlers(
        trainer=trainer,
        train_sampler=loader.sampler,
        to_save={"trainer": trainer, "model": model, "optimizer": optimizer},
        save_every_iters=len(loader),
        save_handler=DiskSaver(str(options.output / "ignite"), require_empty=False),
        output_names=["batch loss"],
        with_pbars=False,
        clear_cuda_cache=False,
    )
    if idist.get_rank() == 0:
        handlers.setup_tb_logging(str(options.output / "ignite"), trainer, optimizer)
    trainer.run(loader, max_epochs=options.epochs)


def create_trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Engine:
    device = idist.device()
    criterion = torch.nn.CrossEntropyLoss().to(device)

    def train_step(engine: Engine, batch: Any) -> dict[str, float]:
        inputs = batch[0].to(device, non_blocking=True, memory_format=memory_format(options))
        targets = batch[1].to(device, non_blocking=True)
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"batch loss": loss.item()}

    trainer = Engine(train_step)
    trainer.logger = setup_logger(name="CIFAR10-Training")
    return trainer


def main() -> None:
    options = parse_options(__doc__)
    with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
        parallel.run(training, options)


if __name__ == "__main__":
    main()
