"""Three steps of the project on PYTHONPATH, with options of its main.py: the memory of each rank, as one line of JSON.

`rest_mb`: bytes of the weights, the gradients and the optimizer state that this rank holds. `step_mb`: the peak of the
last step, beyond what the process used before it built the model. `build_mb`: the peak until all ranks had their model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import model as task
from config import Config
from data import load_datasets
from ddp.data.loader import TrainLoader
from ddp.distributed.process_group import init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import seed_everything
from ddp.distributed.tensors import local
from ddp.entrypoint.run_main import launch
from ddp.training.meter import Meter
from ddp.training.run import build, prepare
from ddp.training.schedule import Schedule
from ddp.training.wrapping import grad_scaler, wrap_model
from main import Training, apply_gradients, compute_gradients


def used_mb(peak: bool = False) -> float:
    """Memory of this process, in megabytes: now, or the highest since `restart_peak`."""
    field = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith(field))


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def size_mb(tensors: Iterable[Any]) -> float:
    return sum(local(each).nbytes for each in tensors if isinstance(each, torch.Tensor)) / 1e6


def measure(config: Config, env: RankEnv) -> None:
    config = prepare(config, env)
    datasets = load_datasets(config)
    seed_everything(config.seed)
    with init_distributed(config, env) as ctx:
        before = used_mb()
        restart_peak()
        model = build(task, config, datasets.train, env)
        wrapped = wrap_model(model, config, ctx, task)
        ctx.gather(None)
        built = used_mb(peak=True) - before
        optimizer = task.build_optimizer(model, config)
        loader = TrainLoader(datasets.train, config, ctx, datasets.sampler)
        schedule = Schedule(optimizer, config, loader.global_batch)
        training = Training(model, optimizer, schedule, grad_scaler(config, ctx), Meter(ctx), ema=None)
        for batches in itertools.islice(loader.steps(0), 3):
            restart_peak()
            compute_gradients(wrapped, training, batches, config, ctx)
            gradients = size_mb(weight.grad for weight in model.parameters())
            apply_gradients(training, config)
        state = [each for entries in optimizer.state.values() for each in entries.values()]
        rest = {"weights": size_mb(model.parameters()), "gradients": gradients, "optimizer": size_mb(state)}
        found = {"rest_mb": rest, "step_mb": used_mb(peak=True) - before, "build_mb": built}
        numbers = sum(weight.numel() for weight in model.parameters())
        for rank, each in enumerate(ctx.gather(found)):
            if ctx.rank == 0:
                print(json.dumps({"rank": rank, "numbers": numbers, **each}), flush=True)


if __name__ == "__main__":
    launch(measure, Config)
