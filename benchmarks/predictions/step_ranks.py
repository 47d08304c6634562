"""Under torchrun: step time and peak of memory of each choice, one after the other, as JSON.

    torchrun --standalone --nproc_per_node=2 benchmarks/predictions/step_ranks.py FILE CHOICES ROUNDS SETTINGS

FILE is written by rank 0: `step_ms` (the median over rounds of three steps, of the slowest rank) and `peak_bytes` by
choice. SETTINGS is a JSON object of fields of `RunConfig`. `benchmarks/strategies.py` has all choices take turns, since
it compares them; but what ran just before leaves caches and the allocator in another state than a run by itself finds.
What a user runs, and what is predicted, is one choice by itself.
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

from benchmarks.rounds import time_rounds
from benchmarks.runners import make_runner, measure_memory
from benchmarks.strategies import load_strategy
from training.config import RunConfig
from training.distributed import Ranks, joined_ranks
from training.run import silence_libraries


def main() -> None:
    path, choices, rounds, settings = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]
    silence_libraries()
    config = RunConfig(**json.loads(settings))
    with joined_ranks(config) as ranks:
        rows = {choice: row_of(replace(config, choice=choice), rounds, ranks) for choice in choices}
        if ranks.is_main:
            path.write_text(json.dumps(rows, indent=2))


def row_of(config: RunConfig, rounds: int, ranks: Ranks) -> dict[str, Any]:
    runner = make_runner(config, ranks, load_strategy)
    peak = measure_memory(runner, ranks.device).peak
    times, _ = time_rounds({config.choice: runner}, rounds, ranks)
    del runner
    gc.collect()
    return {"step_ms": float(times[config.choice].median()), "peak_bytes": peak}


if __name__ == "__main__":
    main()
