"""Train a model on one or many processes. Read top to bottom; the code is in execution order."""

import sys
from dataclasses import dataclass
from typing import Any

import torch

sys.path.insert(0, __file__.rpartition("/")[0])  # python -P and -I leave it out
import model as task
from config import Config
from data import load_datasets
from ddp.checkpoint.reuse import init_weights
from ddp.data.loader import EvalLoader, TrainLoader, watch_first_outputs
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import same_on_all_ranks, seed_everything
from ddp.entrypoint.run_main import launch
from ddp.training.ema import ModelEma
from ddp.training.loss_mean import LossMean
from ddp.training.meter import Meter
from ddp.training.run import build, open_run, prepare
from ddp.training.schedule import Schedule
from ddp.training.wrapping import accumulate, autocast, backward, grad_scaler, weights_of, wrap_model


@dataclass
class Training:
    """What training changes. A checkpoint holds exactly these fields; add your own objects that have a state_dict."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
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

        ddp_model = wrap_model(model, config, ctx, task)  # the same weights: train ddp_model; evaluate and save model
        init_weights(model, config, ctx, build=lambda: build(task, config, datasets.train, rank_env))  # --init-from
        ema = None if config.ema is None else ModelEma(model, config.ema)
        watch_first_outputs(train_loader, ddp_model, task)  # they must match the classes
        optimizer = task.build_optimizer(model, config)
        schedule = Schedule(optimizer, config, train_loader.global_batch)
        training = Training(model, optimizer, schedule, grad_scaler(config, ctx), Meter(ctx, task.compute_metrics), ema)
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
    """Forward and backward, --grad-accum-steps times. The last pass averages over the ranks. False: no gradients."""
    mean = LossMean(task, batches, config, ctx)  # over passes and ranks; model.py may define loss_terms
    for number, (inputs, targets) in enumerate(batches, start=1):
        with accumulate(ddp_model, last=number == config.grad_accum_steps):
            with autocast(config, ctx):
                outputs = task.forward(ddp_model, inputs, targets)
                loss = task.compute_loss(outputs, targets, config)
            backward(mean.weigh(loss, outputs, targets), training.scaler, config.grad_accum_steps)
        training.meter.add(task.batch_totals(loss, outputs, targets))
    return mean.finish(training.model)


def apply_gradients(training: Training, config: Config) -> None:
    """One step of the optimizer, which then clears the gradients."""
    if config.clip_grad is not None:
        training.scaler.unscale_(training.optimizer)  # clip the gradient itself, not the scaled one
        torch.nn.utils.clip_grad_norm_(weights_of(training.optimizer), config.clip_grad)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad()
    if training.ema is not None:
        training.ema.update(training.model)


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
