"""Under torchrun: the rows of memory that the runner's record would have, choice by choice, as JSON.

    torchrun --standalone --nproc_per_node=2 benchmarks/predictions/memory_ranks.py FILE CHOICES SETTINGS

FILE is written by rank 0: rows of all ranks by choice. SETTINGS is a JSON object of fields of `RunConfig`.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import ddp
import sharding
from training.config import RunConfig
from training.data.workloads import build_workload
from training.distributed import Ranks, joined_ranks
from training.loop import train
from training.profiling.memory import ModelSize
from training.profiling.memory_timeline import Unwatched, record_step_memory
from training.records.record import gather_memory
from training.run import build_strategy, micro_batches, seed_everything, silence_libraries


def main() -> None:
    path, choices, settings = Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3])
    silence_libraries()
    config = RunConfig(**settings)
    rows = {}
    with joined_ranks(config) as ranks:
        for choice in choices:
            rows[choice] = rows_of(replace(config, choice=choice), ranks)
            gc.collect()
        if ranks.is_main:
            path.write_text(json.dumps(rows))


def rows_of(config: RunConfig, ranks: Ranks) -> list[dict[str, Any]]:
    """As `training.run.train_and_record` gets them, after two steps, or as many as the choice settles in."""
    seed_everything(config.seed, rank=0)
    workload = build_workload(config)
    size = ModelSize.of(workload.model)
    family = ddp if config.choice in ddp.CHOICES else sharding
    strategy = build_strategy(config, workload, ranks, family.load(config.choice))
    samples, batches = next(micro_batches(config, workload, ranks, steps=1))
    steps = [(samples, batches)] * max(2, strategy.settling_steps)
    train(strategy, steps, Unwatched(), config.clip_grad_norm, lambda result: None)
    step_memory = record_step_memory(strategy, samples, batches, config.clip_grad_norm)
    return gather_memory(strategy, size, step_memory)


if __name__ == "__main__":
    main()
