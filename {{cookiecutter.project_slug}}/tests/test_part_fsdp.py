"""The part fsdp: a sharded run has the figures of one with DDP, resumes on other ranks, and becomes one file."""

from pathlib import Path

import pytest
import torch
from outputs import newest, status
from processes import train

from ddp.checkpoint import storage
from ddp.core.errors import UsageError
from ddp.distributed.tensors import whole_tree
from ddp.parts.fsdp import merge

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 1, "--checkpoint-every", 2]


def test_a_sharded_run_equals_one_with_ddp_and_resumes_on_one_process(tmp_path: Path) -> None:
    train(2, *OPTIONS, "--output-dir", tmp_path / "ddp", "--max-steps", 4)
    train(2, *OPTIONS, "--output-dir", tmp_path / "run", "--max-steps", 4, "--shard")
    plain, sharded = (whole_tree(storage.read(newest(tmp_path / name)))["model"] for name in ("ddp", "run"))
    assert all(torch.allclose(plain[name], sharded[name], atol=1e-5) for name in plain)
    assert len([*(tmp_path / "run" / "checkpoints" / "rows").iterdir()]) >= 2
    merge.main([str(newest(tmp_path / "run")), str(tmp_path / "one.pt")])
    one = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
    assert all(torch.equal(one[name], sharded[name]) for name in sharded)
    train(1, *OPTIONS, "--output-dir", tmp_path / "run", "--max-steps", 6)
    assert status(tmp_path / "run")["step"] == 6


def test_a_number_of_rows_is_refused(tmp_path: Path) -> None:
    from ddp.parts.fsdp.sharding import refuse_numbers_of_rows

    refuse_numbers_of_rows()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(UsageError, match=r"write whole\(tensor\).item\(\)"):
            distribute_tensor(torch.ones(1), mesh, [Shard(0)]).item()
        assert distribute_tensor(torch.ones(1), mesh, [Replicate()]).item() == 1
    finally:
        dist.destroy_process_group()
