"""Rounds in which all choices of a benchmark run in turn, and the least time that a step could take on a link."""

import random
import time
from collections.abc import Sequence

import pandas as pd
import torch
import torch.distributed as dist

from benchmarks.runners import Runner, over_ranks
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.groups import host_barrier

WARMUP_ROUNDS = 2
STEPS_PER_ROUND = 3


def time_rounds(runners: dict[str, Runner], rounds: int, ranks: Ranks) -> pd.DataFrame:
    """Run all choices in turn, in a new random order each round. Collective.

    Returns:
        Milliseconds a step, of the slowest rank: one row for each round and one column for each choice.
    """
    times = pd.DataFrame(index=range(rounds), columns=list(runners), dtype=float)
    order = random.Random(0)  # the same on every rank
    for round_number in range(-WARMUP_ROUNDS, rounds):
        for name in order.sample(list(runners), len(runners)):
            slowest = over_ranks(timed(runners[name], ranks.device), ranks.device, dist.ReduceOp.MAX)
            if round_number >= 0:
                times.loc[round_number, name] = 1000 * slowest / STEPS_PER_ROUND
    return times


def timed(runner: Runner, device: torch.device) -> float:
    """Seconds from all ranks' start of a round to this rank's end of it."""
    host_barrier()
    start = time.perf_counter()
    runner.steps(STEPS_PER_ROUND)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    host_barrier()
    return seconds


def bounds_ms(phase_seconds: Sequence[Sequence[float]], table: pd.DataFrame, ranks: Ranks) -> pd.DataFrame:
    """The least milliseconds that a step could take on this link: a row for each round, a column for each choice.

    Forward, then backward or the bytes on the wire at the link's rate, whichever takes longer, then the optimizer.
    Collective.

    Args:
        phase_seconds: Of each timed step of `local`: seconds of forward, backward and optimizer.
        table: One row for each choice with its `wire_bytes` and `link_bits_per_s`.
    """
    phases = torch.tensor(phase_seconds, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(phases, dist.ReduceOp.MAX)
    forward, backward, optimizer = phases.view(-1, STEPS_PER_ROUND, 3).mean(1).cpu().numpy().T
    wire = 8 * table["wire_bytes"].astype(float) / table["link_bits_per_s"].astype(float)
    rows = [1000 * (f + wire.clip(lower=b) + o) for f, b, o in zip(forward, backward, optimizer, strict=True)]
    return pd.DataFrame(rows).reset_index(drop=True)
