"""The same training with Lightning Fabric, as its documentation and its image example do it.

Sources:
- the loop, with the loss printed every 10 steps:
  https://github.com/Lightning-AI/pytorch-lightning/blob/master/examples/fabric/image_classifier/train_fabric.py
- https://lightning.ai/docs/fabric/stable/fundamentals/convert.html
- torchrun: https://lightning.ai/docs/fabric/stable/fundamentals/launch.html
- bf16: https://lightning.ai/docs/fabric/stable/fundamentals/precision.html
- saving: https://lightning.ai/docs/fabric/stable/guide/checkpoint/checkpoint.html
- compile: https://lightning.ai/docs/fabric/stable/advanced/compile.html
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from common import SGD_OPTIONS, build_dataset, build_model, loader_options, memory_format, parse_options

LOG_INTERVAL = 10  # the example's default


def main() -> None:
    options = parse_options(__doc__)
    processes_here = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(
        accelerator="auto",
        strategy="ddp",
        devices=processes_here,
        num_nodes=int(os.environ["WORLD_SIZE"]) // processes_here,
        precision="bf16-mixed" if options.precision == "bf16" else "32-true",
    )
    fabric.launch()

    dataset = build_dataset(options)
    loader = fabric.setup_dataloaders(DataLoader(dataset, shuffle=True, **loader_options(options)))

    model = build_model(options, len(dataset.classes))
    if options.compile:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD_OPTIONS)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(options.epochs):
        model.train()
        for step, (inputs, targets) in enumerate(loader, start=1):  # setup_dataloaders() puts them on the device
            optimizer.zero_grad()
            outputs = model(inputs.to(memory_format=memory_format(options)))
            loss = F.cross_entropy(outputs, targets)
            fabric.backward(loss)
            optimizer.step()
            if step == 1 or step % LOG_INTERVAL == 0:
                fabric.print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")

        state = {"model": model, "optimizer": optimizer, "epoch": epoch}
        fabric.save(options.output / "fabric.ckpt", state)


if __name__ == "__main__":
    main()
