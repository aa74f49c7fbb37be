"""Train a model on one or many processes. Read from the top: it is told in the order in which it happens.

python main.py --dataset synthetic        one process; --nproc 4 starts four here; launch_node.sh for many machines
python main.py --help                     every option
"""

from __future__ import annotations

from typing import Any

import torch

from config import Config
from data import load_datasets
from ddp.group import Group, broadcast_buffers, check_backend, join
from ddp.launch import Placement, launch
from ddp.loader import TestLoader, TrainLoader
from ddp.metrics import Meter
from ddp.run import open_run
from ddp.schedule import Schedule
from ddp.step import accumulate, autocast, check_step, make_deterministic, seed_everything, seed_step, wrap
from model import build_model, build_optimizer, compute_loss, figure_of_merit, scores, sums


def main(config: Config, placement: Placement) -> None:
    """Train, or with --evaluate only evaluate, as the process that `placement` says. Every rank runs this."""
    # What needs no other process comes first: whatever is wrong with it shows before anyone waits for anyone.
    check_backend(config)
    if config.deterministic:
        make_deterministic()
    train_set, test_set = load_datasets(config)
    seed_everything(config.seed)
    model = build_model(config, train_set)
    check_step(config, model)

    with join(config, placement) as group, open_run(config, group) as run:
        train_loader = TrainLoader(train_set, config, group)
        test_loader = TestLoader(test_set, config, group)

        # Two names for one set of weights: ddp_model is trained, model is evaluated and saved.
        model.to(group.device)
        ddp_model = wrap(model, config, group)
        optimizer = build_optimizer(model, config)
        schedule = Schedule(optimizer, config, train_loader.global_batch)
        scaler = torch.amp.GradScaler(group.device.type, enabled=config.precision == "fp16")
        meter = Meter(group)

        # What is named here is in every checkpoint. To add something with a state_dict, name it.
        run.resume(train_loader, model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, meter=meter)
        run.introduce(model, test_loader)

        if config.evaluate:
            run.log_test(evaluate(model, test_loader, config, group), test_loader)
            return

        for _ in run.epochs():
            ddp_model.train()
            for batches in run.steps():
                seed_step(config, run.progress.step, group)
                schedule.set(run.middle_of_step())

                for number, (inputs, targets) in enumerate(batches, start=1):
                    with accumulate(ddp_model, last=number == config.grad_accum_steps):
                        with autocast(config, group):
                            outputs = ddp_model(inputs)
                            loss = compute_loss(outputs, targets, config)
                        scaler.scale(loss / config.grad_accum_steps).backward()
                    meter.add(sums(loss, outputs, targets))

                if config.clip_grad is not None:
                    scaler.unscale_(optimizer)  # else the scaled gradient would be clipped
                    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

                run.progress.advance(train_loader.global_batch)
                if run.log_due():
                    run.log_train(scores(meter.take()), schedule.lr)
                if run.save_due():
                    run.save()

            result = evaluate(model, test_loader, config, group)
            run.end_epoch(result, figure_of_merit(result), test_loader)


@torch.no_grad()
def evaluate(model: torch.nn.Module, test_loader: TestLoader, config: Config, group: Group) -> dict[str, Any]:
    """The scores of `model` on the test data, each sample counted once. Call on every rank.

    It takes the model without its DDP wrapper: ranks may have different numbers of batches.
    """
    broadcast_buffers(model, group)
    model.eval()
    meter = Meter(group)
    for inputs, targets in test_loader:
        with autocast(config, group):
            outputs = model(inputs)
            loss = compute_loss(outputs, targets, config)
        meter.add(sums(loss, outputs, targets))
    return scores(meter.take())


if __name__ == "__main__":
    launch(main)
