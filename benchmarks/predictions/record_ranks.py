"""Under torchrun: the operators of one rank's step, timed while all other ranks run the same step.

    torchrun --standalone --nproc_per_node=2 benchmarks/predictions/record_ranks.py FILE ABOUT SETTINGS

FILE is written by the rank with the longest samples, for which the others wait. SETTINGS is a JSON object of fields of
`RunConfig`. Ranks on one machine share its cores and its memory's rate: what an operator takes there is not what it
takes one process that has them alone.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch
import torch.distributed as dist

from benchmarks.runners import longest_batch_rank, one_global_batch
from planner.operator_times import OnPhase
from planner.record import TrainingStep, record, write
from training.config import RunConfig
from training.data.workloads import build_workload
from training.distributed import joined_ranks
from training.run import seed_everything, silence_libraries


def main() -> None:
    path, about, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    silence_libraries()
    config = RunConfig(**settings)
    with joined_ranks(config) as ranks:
        seed_everything(0, rank=0)
        workload = build_workload(config)
        optimizer = torch.optim.AdamW(workload.model.parameters(), lr=workload.learning_rate, fused=True)
        step = TrainingStep(workload.model, one_global_batch(config, workload, ranks), optimizer)

        def together(on_phase: OnPhase) -> None:
            dist.barrier()
            step(on_phase)

        content = record([together], ranks.device, about=about)
        if ranks.rank == longest_batch_rank(config, workload, ranks):
            write(path, content)


if __name__ == "__main__":
    main()
