"""Train a GAN on one or many processes. Read top to bottom; the code is in execution order.

python main.py --dataset synthetic        one process; --nproc 4 starts four here; launch_node.sh for many machines
python main.py --help                     every option

Only the step, and what it needs, differs from the main.py that comes with the project.
"""

from typing import Any

import ddp.core.cpu_threads  # isort: skip  # noqa: F401  # before torch
import torch

from config import Config
from data import load_datasets
from ddp.checkpoint.initial_weights import init_weights
from ddp.checkpoint.saved_options import with_saved_options
from ddp.data.dataset import check_datasets
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext, check_backend, init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import same_on_all_ranks, seed_everything, seed_step
from ddp.entrypoint.launch import launch
from ddp.training.ema import ModelEma
from ddp.training.meter import Meter
from ddp.training.output_dir import default_output_dir
from ddp.training.run import open_run
from ddp.training.schedule import Schedule
from ddp.training.wrapping import accumulate, autocast, check_model, choose_algorithms, wrap_model
from model import (
    batch_totals,
    build_model,
    build_optimizer,
    compute_loss,
    compute_metrics,
    forward,
    metric_for_best_model,
)


def main(config: Config, rank_env: RankEnv) -> None:
    """Train, or only evaluate with --evaluate, as the process that `rank_env` describes. Every rank runs this."""
    config = with_saved_options(config, rank_env)  # for --evaluate
    # Do all local checks first, so that errors surface before any rank blocks on another.
    check_backend(config)
    choose_algorithms(config)
    datasets = check_datasets(load_datasets(config), config)
    seed_everything(config.seed)
    model = build_model(config, datasets.train)
    check_model(config, model)
    config.output_dir = config.output_dir or default_output_dir(config, model, datasets.train)

    with init_distributed(config, rank_env) as ctx, open_run(config, ctx) as run:
        train_loader = TrainLoader(datasets.train, config, ctx)
        val_loader = EvalLoader(datasets.val, config, ctx, "val")
        test_loader = EvalLoader(datasets.test, config, ctx, "test")

        # Two names for each set of weights: train ddp_generator and ddp_discriminator; evaluate and save model.
        init_weights(model.generator, config, ctx, "generator")  # --init-from, unless the run resumes
        init_weights(model.discriminator, config, ctx, "discriminator")
        model.to(ctx.device)
        ema = None if config.ema is None else ModelEma(model, config.ema)
        generator, discriminator = model.generator, model.discriminator
        ddp_generator, ddp_discriminator = (wrap_model(network, config, ctx) for network in (generator, discriminator))
        optimizer_g, optimizer_d = (build_optimizer(network, config) for network in (generator, discriminator))
        schedule, schedule_d = (
            Schedule(optimizer, config, train_loader.global_batch) for optimizer in (optimizer_g, optimizer_d)
        )
        scaler = torch.amp.GradScaler(ctx.device.type, enabled=config.precision == "fp16")
        meter = Meter(ctx)

        # Everything passed here is saved in every checkpoint. Add your own stateful objects as keyword arguments.
        state = {"generator": generator, "optimizer_g": optimizer_g, "schedule": schedule}
        state |= {"discriminator": discriminator, "optimizer_d": optimizer_d, "schedule_d": schedule_d}
        state |= {"scaler": scaler, "meter": meter}
        run.resume(train_loader, **state, ema=ema)
        run.log_summary(model, val_loader, test_loader)
        evaluated_model = model if ema is None else ema.module

        if config.evaluate:
            for loader in (val_loader, test_loader):
                run.log_eval(evaluate(evaluated_model, loader, config, ctx), loader)
            return

        while not run.finished():  # --epochs, --max-steps or --patience
            model.train()
            for batches in run.steps():
                seed_step(config.seed, run.state.step, ctx.rank)
                schedule.set(run.epoch_progress())
                schedule_d.set(run.epoch_progress())
                # New noise: a function of (seed, step, rank). The noise of the data is for evaluations.
                pairs = [(images, torch.randn_like(noise)) for images, noise in batches]

                # 1. The discriminator: a backward pass for the real images and one for the generated ones. The
                # gradients of all passes add up on each rank; DDP averages them over the ranks in the last pass.
                for number, (images, noise) in enumerate(pairs, start=1):
                    with torch.no_grad(), autocast(config, ctx):
                        generated = generator(noise)
                    for name, judged in (("real", images), ("fake", generated)):
                        last = number == config.grad_accum_steps and name == "fake"
                        with accumulate(ddp_discriminator, last=last):
                            with autocast(config, ctx):
                                outputs = {name: ddp_discriminator(judged)}
                                loss = compute_loss(outputs, noise, config)
                            scaler.scale(loss / config.grad_accum_steps).backward()
                        meter.add(batch_totals(loss, outputs, noise))
                update(discriminator, optimizer_d, scaler, config, run.state.step)

                # 2. The generator, from the same noise. The discriminator's weights are constants here, and it is not
                # wrapped: this loss leaves no gradient in it, and its DDP wrapper takes no part.
                for number, (_, noise) in enumerate(pairs, start=1):
                    with accumulate(ddp_generator, last=number == config.grad_accum_steps):
                        with autocast(config, ctx):
                            outputs = {"fooled": model.judge(ddp_generator(noise))}
                            loss = compute_loss(outputs, noise, config)
                        scaler.scale(loss / config.grad_accum_steps).backward()
                    meter.add(batch_totals(loss, outputs, noise))
                update(generator, optimizer_g, scaler, config, run.state.step)
                scaler.update()  # once per step: it looks at the gradients of both optimizers
                if ema is not None:
                    ema.update(model)

                run.advance()
                if run.should_log():
                    run.log_train(compute_metrics(meter.take()), schedule.lr)
                if run.should_save():
                    run.save()
                # To interrupt the run for a reason of your own, call run.request_stop() here.
                if run.should_stop():  # the same answer on all ranks
                    run.stop()  # saves and exits

            metrics = evaluate(evaluated_model, val_loader, config, ctx)
            train_metrics = meter.take_epoch(compute_metrics, run.completes_epoch)
            run.end_epoch(train_metrics, metrics, metric_for_best_model, val_loader)

        if test_loader.length:  # once, with the weights that the validation set has chosen
            run.load_best()
            run.log_eval(evaluate(evaluated_model, test_loader, config, ctx), test_loader)


def update(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, config: Config, step: int
) -> None:
    """An optimizer step of one of the networks."""
    if config.clip_grad is not None:
        scaler.unscale_(optimizer)  # clip the gradient itself, not the scaled one
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip_grad)
    with same_on_all_ranks(config.seed, step):  # if the optimizer draws noise
        scaler.step(optimizer)
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: torch.nn.Module, eval_loader: EvalLoader, config: Config, ctx: DistContext) -> dict[str, Any]:
    """The metrics of `model` on validation or test data, each sample counted once; empty without data. On every rank.

    Pass the model without its DDP wrapper: ranks may have different numbers of batches.
    """
    if eval_loader.length == 0:
        return {}
    ctx.broadcast_buffers(model)
    model.eval()
    meter = Meter(ctx)
    for inputs, targets in eval_loader:
        with autocast(config, ctx):
            outputs = forward(model, inputs, targets)
            loss = compute_loss(outputs, targets, config)
        meter.add(batch_totals(loss, outputs, targets))
    return compute_metrics(meter.take())


if __name__ == "__main__":
    launch(main, Config)
