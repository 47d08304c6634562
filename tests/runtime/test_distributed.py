"""Hosts that meet without waiting for a device."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime.groups import host_barrier
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]


def meet(path: str) -> bool:
    if dist.get_rank() == 1:
        time.sleep(0.5)
        Path(path).touch()
    host_barrier()
    return Path(path).exists()


def test_nobody_leaves_before_all_have_come(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, meet, str(tmp_path / "came")) == [True, True]


BOUND = """
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from ddp_lab.runtime.groups import host_barrier

dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
group.bound_device_id = torch.device("cuda", 0)  # as the constructor of NCCL's group does (torch 2.15)
devices = set()
group.register_pre_hook(1, lambda call: devices.update(t.device.type for t in call.input_tensors))
host_barrier()
dist.all_gather_object([None], "of the host")
print(devices)
dist.barrier()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="dist.barrier finds a GPU here")
def test_a_group_with_a_device_meets_on_the_host() -> None:
    """`dist.barrier` would need the device of the group."""
    done = subprocess.run([sys.executable, "-c", BOUND], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'cpu'}\n" and "NVIDIA driver" in done.stderr.splitlines()[-1]
