"""What it costs a step that ranks watch each other: with and without, in alternation inside one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/watching.py --choice simple_ddp --workload sample --rounds 30

A round runs five optimizer steps with collectives and phases noted and digests compared, and five without, in a random
order; the cost is the median over rounds of the ratio of their times. Beside it stands the processor time of the thread
that looks at the other ranks, as a share of the time that passed.
"""

import argparse
import random
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch.distributed as dist

import ddp
import sharding
from benchmarks.runners import Runner, largest, make_runner
from training.config import RunConfig
from training.distributed import Ranks, joined_ranks
from training.run import silence_libraries
from training.watch.phases import record_phases_in
from training.watch.sequence import follow_gradients, recorded_collectives
from training.watch.watcher import Watcher

STEPS, WARMUP_ROUNDS = 5, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choice", default="simple_ddp", choices=(*ddp.CHOICES, *sharding.REGISTRY.names))
    parser.add_argument("--workload", default="sample")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    silence_libraries()
    config = RunConfig(choice=options.choice, workload=options.workload, train_samples=8, eval_samples=1)
    with joined_ranks(config) as ranks:
        measure(config, ranks, options.rounds)
    return 0


def measure(config: RunConfig, ranks: Ranks, rounds: int) -> None:
    """Print what watching costs. Collective."""
    made: list[Any] = []

    def load(name: str) -> Any:
        real: Any = (ddp if name in ddp.CHOICES else sharding).load(name)

        class Kept(real):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                made.append(self)

        return Kept

    runner = make_runner(config, ranks, load)
    watcher = Watcher(ranks.rank, ranks.world_size, lambda *_: None, lambda *_: None)
    watcher.start()
    clock = time.pthread_getcpuclockid(watcher.thread_id)
    began, used = time.perf_counter(), time.clock_gettime(clock)
    order, ratios, plain_ms = random.Random(0), [], []
    for number in range(-WARMUP_ROUNDS, rounds):
        taken = {}
        for watches in order.sample([True, False], 2):
            record_phases_in(watcher.flight if watches else None)
            noting: AbstractContextManager[Any] = recorded_collectives(watcher.flight) if watches else nullcontext()
            with noting:
                follow_gradients(made[0].watch)
                taken[watches] = largest(seconds_of(runner), ranks.device)
        if number >= 0:
            ratios.append(taken[True] / taken[False])
            plain_ms.append(1000 * taken[False] / STEPS)
    share = (time.clock_gettime(clock) - used) / (time.perf_counter() - began)
    dist.barrier()
    watcher.close()
    if ranks.is_main:
        low, cost, high = (100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4))
        print(
            f"{config.choice}: {statistics.median(plain_ms):.1f} ms a step; noting and comparing "
            f"{cost:+.2f} % (quartiles {low:+.2f} % and {high:+.2f} %, {rounds} rounds of {STEPS} steps); "
            f"watching thread {100 * share:.2f} % of a core"
        )


def seconds_of(runner: Runner) -> float:
    dist.barrier()
    start = time.perf_counter()
    runner.steps(STEPS)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
