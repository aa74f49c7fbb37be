"""The same training with Hugging Face Accelerate, as its documentation and its image example do it.

Sources:
- the loop, normalising on the device: https://github.com/huggingface/accelerate/blob/main/examples/cv_example.py
- the loss, added up on the device and read once per epoch, and save_state:
  https://github.com/huggingface/accelerate/blob/main/examples/complete_cv_example.py
- https://huggingface.co/docs/accelerate/basic_tutorials/migration
- compile: https://huggingface.co/docs/accelerate/usage_guides/compilation
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch.utils.data import DataLoader

from common import MEAN, SGD_OPTIONS, STD, build_dataset, build_model, loader_options, memory_format, parse_options


def main() -> None:
    options = parse_options(__doc__)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it, each process silently trains alone on a machine without a GPU
        mixed_precision="bf16" if options.precision == "bf16" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if options.compile else None,
    )

    dataset = build_dataset(options, normalize=False)
    loader = DataLoader(dataset, shuffle=True, **loader_options(options))
    mean = torch.tensor(MEAN)[None, :, None, None].to(accelerator.device)
    std = torch.tensor(STD)[None, :, None, None].to(accelerator.device)

    model = build_model(options, len(dataset.classes)).to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), **SGD_OPTIONS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        model.train()
        total_loss = torch.zeros((), device=accelerator.device)
        for images, targets in loader:  # prepare() made it put them on the device
            inputs = (images.to(memory_format=memory_format(options)) - mean) / std
            loss = F.cross_entropy(model(inputs), targets)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        accelerator.print(f"epoch {epoch}: loss {total_loss.item() / len(loader):.3f}")
        accelerator.save_state(str(options.output / "accelerate"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
