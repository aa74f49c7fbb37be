"""Train a GAN on one or many processes. Read top to bottom; the code is in execution order.

Only Training, how it is built, and the step differ from the main.py that comes with the project.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P and -I leave it out
import model as task
from config import Config
from data import load_datasets
from ddp.checkpoint.reuse import init_weights
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import same_on_all_ranks, seed_everything
from ddp.entrypoint.run_main import launch
from ddp.training.ema import ModelEma
from ddp.training.meter import Meter
from ddp.training.run import build, open_run, prepare
from ddp.training.schedule import Schedule
from ddp.training.wrapping import accumulate, autocast, backward, grad_scaler, weights_of, wrap_model


@dataclass
class Training:
    """What training changes. A checkpoint holds exactly these fields; add your own objects that have a state_dict."""

    generator: torch.nn.Module
    optimizer_g: torch.optim.Optimizer
    schedule: Schedule
    discriminator: torch.nn.Module
    optimizer_d: torch.optim.Optimizer
    schedule_d: Schedule
    scaler: torch.amp.GradScaler
    meter: Meter
    ema: ModelEma | None


def main(config: Config, rank_env: RankEnv) -> None:
    """Train, or only evaluate with --evaluate, as the process that `rank_env` describes. Every rank runs this."""
    config = prepare(config, rank_env)  # all local checks come first: no rank waits for one that fails here
    datasets = check_datasets(load_datasets(config), config)
    seed_everything(config.seed)
    model = build(task, config, datasets.train, rank_env)

    with init_distributed(config, rank_env) as ctx, open_run(config, ctx, task.metric_for_best_model, datasets) as run:
        train_loader = TrainLoader(datasets.train, config, ctx, datasets.sampler)
        val_loader, test_loader = EvalLoader(datasets.val, config, ctx), EvalLoader(datasets.test, config, ctx, "test")

        networks = {"generator": model.generator, "discriminator": model.discriminator}
        # The same weights: train ddp_model; evaluate and save model.
        wrapped = {name: wrap_model(network, config, ctx, task) for name, network in networks.items()}
        ddp_model = torch.nn.ModuleDict(wrapped)
        for name, network in networks.items():
            another = lambda name=name: getattr(build(task, config, datasets.train, rank_env), name)  # noqa: E731
            init_weights(network, config, ctx, name, another)  # --init-from
        ema = None if config.ema is None else ModelEma(model, config.ema)
        optimizers = [task.build_optimizer(network, config) for network in networks.values()]
        schedules = [Schedule(optimizer, config, train_loader.global_batch) for optimizer in optimizers]
        scaler = grad_scaler(config, ctx)
        training = Training(
            *(model.generator, optimizers[0], schedules[0]),
            *(model.discriminator, optimizers[1], schedules[1]),
            *(scaler, Meter(ctx, task.compute_metrics), ema),
        )
        run.resume(train_loader, training)
        run.log_summary(model, val_loader, test_loader)
        evaluated_model = model if ema is None else ema.module

        while not run.finished():  # --epochs, --max-steps or --patience; at once with --evaluate
            ddp_model.train()
            for batches in run.steps():  # seeds the step, and sets the learning rate
                if run.checked(compute_gradients)(ddp_model, training, batches, config, ctx):  # False: no gradients
                    with same_on_all_ranks(config.seed, run.state.step):  # if the optimizer draws noise
                        apply_gradients(training, config)
                run.advance()  # counts the step; logs and saves when due
                if run.should_stop():  # the same answer on all ranks; run.request_stop("reason") asks for it
                    run.stop()
            run.end_epoch(evaluate(evaluated_model, val_loader, config, ctx), val_loader)
        for loader in run.last_evaluations(val_loader, test_loader):  # the test set, by the weights of best.pt
            run.log_eval(evaluate(evaluated_model, loader, config, ctx), loader)


def compute_gradients(ddp_model: Any, training: Training, batches: Any, config: Config, ctx: DistContext) -> bool:
    """A step of the discriminator, then the gradients of the generator. The last pass averages over the ranks."""
    passes, judged = config.grad_accum_steps, ddp_model["discriminator"]
    # New noise: a function of (seed, step, rank). The noise of the data is for evaluations.
    pairs = [(images, torch.randn_like(noise)) for images, noise in batches]
    # The discriminator has a backward pass for the real images and one for the generated ones.
    for number, (images, noise) in enumerate(pairs, start=1):
        with torch.no_grad(), autocast(config, ctx):
            generated = training.generator(noise)
        for name, inputs in (("real", images), ("fake", generated)):
            with accumulate(judged, last=number == passes and name == "fake"):
                with autocast(config, ctx):
                    outputs = {name: judged(inputs)}
                    loss = task.compute_loss(outputs, noise, config)
                backward(loss, training.scaler, passes)
            training.meter.add(task.batch_totals(loss, outputs, noise))
    update(training.discriminator, training.optimizer_d, training.scaler, config)
    # The generator learns from the same noise. The discriminator's weights are constants here, and it is not wrapped:
    # this loss leaves no gradient in it, and its DDP wrapper takes no part.
    for number, (_, noise) in enumerate(pairs, start=1):
        with accumulate(ddp_model["generator"], last=number == passes):
            with autocast(config, ctx):
                outputs = {"fooled": task.judge(training.discriminator, ddp_model["generator"](noise))}
                loss = task.compute_loss(outputs, noise, config)
            backward(loss, training.scaler, passes)
        training.meter.add(task.batch_totals(loss, outputs, noise))
    return True


def apply_gradients(training: Training, config: Config) -> None:
    """A step of the generator."""
    update(training.generator, training.optimizer_g, training.scaler, config)
    training.scaler.update()  # once per step: it looks at the gradients of both optimizers
    if training.ema is not None:
        networks = {"generator": training.generator, "discriminator": training.discriminator}
        training.ema.update(torch.nn.ModuleDict(networks))


def update(network: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, config: Config) -> None:
    """An optimizer step of one of the networks, which then clears its gradients."""
    if config.clip_grad is not None:
        scaler.unscale_(optimizer)  # clip the gradient itself, not the scaled one
        torch.nn.utils.clip_grad_norm_(weights_of(optimizer), config.clip_grad)
    scaler.step(optimizer)
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Any, eval_loader: EvalLoader, config: Config, ctx: DistContext) -> dict[str, float]:
    """The metrics of `model`, which is not wrapped, over data of which each sample counts once. Call on every rank."""
    meter = Meter(ctx, task.compute_metrics)
    with ctx.evaluating(model):
        for inputs, targets in eval_loader:
            with autocast(config, ctx):
                outputs = task.forward(model, inputs, targets)
                loss = task.compute_loss(outputs, targets, config)
            meter.add(task.batch_totals(loss, outputs, targets))
    return meter.take()


if __name__ == "__main__":
    launch(main, Config)
