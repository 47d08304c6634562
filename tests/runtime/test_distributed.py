"""Hosts that meet without waiting for a device."""

import time
from pathlib import Path

import torch.distributed as dist

from ddp_lab.runtime.groups import host_barrier
from tests.ranks import RankPool


def meet(path: str) -> bool:
    if dist.get_rank() == 1:
        time.sleep(0.5)
        Path(path).touch()
    host_barrier()
    return Path(path).exists()


def test_nobody_leaves_before_all_have_come(ranks: RankPool, tmp_path):
    assert ranks.run(2, meet, str(tmp_path / "came")) == [True, True]
