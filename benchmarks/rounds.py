"""Rounds in which all choices of a benchmark run in turn."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import pandas as pd
import torch
import torch.distributed as dist

from benchmarks.runners import over_ranks
from ddp_lab.progress import long_work
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.groups import host_barrier

WARMUP_ROUNDS = 2
STEPS_PER_ROUND = 3


class Runs(Protocol):
    """What is timed: runs so many steps, to the end of all their communication."""

    @property
    def steps(self) -> Callable[[int], None]: ...


def time_rounds(
    runners: Mapping[str, Runs], rounds: int, ranks: Ranks, clock: Callable[[], float] = time.perf_counter
) -> pd.DataFrame:
    """Run all choices in turn, in a new random order each round. Collective.

    Args:
        clock: Tells seconds.

    Returns:
        Milliseconds a step, of the slowest rank: one row for each round and one column for each choice.
    """
    times = pd.DataFrame(index=range(rounds), columns=list(runners), dtype=float)
    order = random.Random(0)  # the same on every rank
    with long_work(f"timing {len(runners)} choices in turn", WARMUP_ROUNDS + rounds, ranks.is_main) as tell:
        for round_number in range(-WARMUP_ROUNDS, rounds):
            for name in order.sample(list(runners), len(runners)):
                slowest = over_ranks(timed(runners[name], ranks.device, clock), ranks.device, dist.ReduceOp.MAX)
                if round_number >= 0:
                    times.loc[round_number, name] = 1000 * slowest / STEPS_PER_ROUND
            tell("warmed up" if round_number < 0 else f"round {round_number + 1}")
    return times


def timed(runner: Runs, device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds from all ranks' start of a round to this rank's end of it."""
    host_barrier()
    start = clock()
    runner.steps(STEPS_PER_ROUND)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = clock() - start
    host_barrier()
    return seconds
