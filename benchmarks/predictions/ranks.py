"""Under torchrun: what each choice holds and how long its steps take, one choice after the other, as JSON.

    torchrun --standalone --nproc_per_node=2 benchmarks/predictions/ranks.py FILE CHOICES ROUNDS SETTINGS

SETTINGS is a JSON object of fields of `RunConfig`. Rank 0 writes FILE. Its `choices` has for each choice the `memory`
of all ranks, as run records have it. If ROUNDS is above 0, it also has `step_ms`, the median over so many rounds of
three steps of the slowest rank, and `record` has the operators of the rank with the longest samples. They are timed
while all ranks run the same step, since ranks on one machine share its cores and its memory.
"""

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch
import torch.distributed as dist

from benchmarks.predictions.machine import longest_rank
from ddp_lab.planner.costs.timing import TrainingStep, measure
from ddp_lab.planner.simulation.meshed import load
from ddp_lab.runtime.build import build_strategy, seed_everything
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.batches import batches_of_steps
from ddp_lab.runtime.data.workloads import build_workload
from ddp_lab.runtime.distributed import Ranks, joined_ranks
from ddp_lab.runtime.loop import Unwatched, train
from ddp_lab.runtime.process.environment import silence_libraries
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.runtime.records.record import gather_memory
from ddp_lab.strategy.accounting import ModelSize


def main() -> None:
    path, choices, rounds, settings = sys.argv[1:]
    silence_libraries()
    config, rows = RunConfig.of(**json.loads(settings)), {}
    with joined_ranks(config) as ranks:
        record = record_operators(config, ranks) if int(rounds) else None
        for choice in choices.split(","):
            rows[choice] = measure_choice(replace(config, choice=choice), int(rounds), ranks)
            gc.collect()
        if ranks.is_main:
            Path(path).write_text(json.dumps({"choices": rows, "record": record}))


def record_operators(config: RunConfig, ranks: Ranks) -> dict[str, Any] | None:
    """The record of the rank with the longest samples. Collective."""
    seed_everything(config.seed, rank=0)
    workload = build_workload(config)
    batches = next(batches_of_steps(config, workload, ranks, steps=1)).micro_batches
    step = TrainingStep(workload.model, batches, torch.optim.AdamW(workload.model.parameters(), fused=True))

    def together() -> None:
        dist.barrier()
        step()

    records: list[dict[str, Any] | None] = [None] * ranks.world_size
    dist.all_gather_object(records, measure([together], ranks.device))
    return records[longest_rank(config, ranks.world_size)]


def measure_choice(config: RunConfig, rounds: int, ranks: Ranks) -> dict[str, Any]:
    """After two steps, or as many as the choice settles in. Collective."""
    seed_everything(config.seed, rank=0)
    workload = build_workload(config)
    size = ModelSize.of(workload.model)
    strategy = build_strategy(config, workload, ranks, load(config))
    step = next(batches_of_steps(config, workload, ranks, steps=1))

    def run(steps: int) -> None:
        train(strategy, [step] * steps, Unwatched(), config.clip_grad_norm, lambda result: None)

    run(max(2, strategy.settling_steps))
    step_memory = record_step_memory(strategy, step, config.clip_grad_norm)
    found: dict[str, Any] = {"memory": gather_memory(strategy, size, step_memory)}
    times = torch.zeros(rounds)
    for number in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        run(3)
        strategy.finish_parameter_synchronization()
        times[number] = (time.perf_counter() - began) / 3
    if rounds:
        dist.all_reduce(times, dist.ReduceOp.MAX)
        found["step_ms"] = 1e3 * times.median().item()
    return found


if __name__ == "__main__":
    main()
