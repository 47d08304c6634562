"""An all-reduce between every pair of the ranks that torchrun started.

Pairs are measured one after the other, while all other ranks wait, since pairs that share a link slow each other down.
"""

import datetime
import os
import statistics
import time
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.doctor.live.results import SIZE_BYTES, Pair
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import host_barrier

WARMUP, ITERATIONS = 2, 5
JOIN_TIMEOUT_S = 120


def measure_pairs(device: str, timeout_s: float) -> list[Pair]:
    """The times of all pairs, on every rank. Collective.

    Raises:
        UserError: the ranks could not join, or this rank got no answer within `timeout_s`; says in which pair.
    """
    times: dict[tuple[int, int], float] = {}
    where = "joins the others"
    try:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=JOIN_TIMEOUT_S))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        data = torch.ones(SIZE_BYTES // 4, device=device)
        for pair in combinations(range(ranks), 2):
            where = f"measures ranks {pair[0]} and {pair[1]}" if rank in pair else f"waits for ranks {pair}"
            group = dist.new_group(list(pair), timeout=datetime.timedelta(seconds=timeout_s))
            if rank in pair and isinstance(group, dist.ProcessGroup):
                times[pair] = milliseconds(data, group)
                dist.destroy_process_group(group)
            host_barrier()  # the next pair must have the links to itself
        where, gathered = "collects the times", list[Any]([None] * ranks)
        dist.all_gather_object(gathered, (times, os.uname().nodename))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"rank {os.environ['RANK']} {where}: {reason}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    hosts = [host for _, host in gathered]
    return [Pair((a, b), gathered[a][0][a, b], hosts[a] != hosts[b]) for a, b in combinations(range(ranks), 2)]


def milliseconds(data: torch.Tensor, group: dist.ProcessGroup) -> float:
    """The median of an all-reduce between the two ranks of `group`."""
    times = []
    for _ in range(WARMUP + ITERATIONS):
        start = time.perf_counter()
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
        if data.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[WARMUP:])
