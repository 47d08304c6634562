"""The micro-batches of each optimizer step, and how many steps there are."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.copies import copied_ahead, token_count
from ddp_lab.runtime.data.sampling import epoch_windows, rank_micro_batches, steps_in_epoch
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.batches import StepData


def planned_steps(config: RunConfig, samples: int) -> tuple[RunConfig, int, str]:
    """`config` with its epochs, the optimizer steps of the run, and what to say of the two; mostly nothing.

    They are `max_steps`. Without it, or where `epochs` are given and have fewer, they are whole epochs.
    """
    in_epoch, most = steps_in_epoch(samples, config.global_batch_size), config.max_steps or sys.maxsize
    epochs = config.epochs or -(-(config.max_steps or 1) // in_epoch)
    steps, said = min(epochs * in_epoch, most), ""
    if config.max_steps and steps < most:
        said = f"{steps} steps, not {most}: --epochs {epochs} has no more; without it the data repeat"
    elif config.epochs is None and epochs > 1:
        said = f"an epoch has {in_epoch} steps, so {steps} steps are {epochs} epochs"
    return replace(config, epochs=epochs), steps, said


def require_sample_for_each_rank(samples: int, world_size: int) -> None:
    """Refuse data that leaves a rank without a sample in the first step.

    Raises:
        UserError: names both numbers.
    """
    if samples < world_size:
        raise UserError(
            f"{samples} training samples for {world_size} ranks; each rank needs one in the first step: raise "
            "--train-samples, give more data, or use fewer ranks"
        )


def batches_of_steps(
    config: RunConfig, workload: Workload, ranks: Ranks, steps: int, first: int = 0
) -> Iterator[StepData]:
    """For each optimizer step from `first` on: this rank's micro-batches on its device, and what they amount to."""
    return copied_ahead(collated(config, workload, ranks, steps, first), ranks.device)


def collated(config: RunConfig, workload: Workload, ranks: Ranks, steps: int, first: int) -> Iterator[StepData]:
    """The same on the CPU."""
    size, done = config.micro_batch_size(ranks.data_size), 0
    for epoch in count():
        for window in epoch_windows(len(workload.train), config.global_batch_size, config.seed, epoch):
            if done == steps:
                return
            if done < first:
                done += 1
                continue
            mine = rank_micro_batches(window, ranks.data_rank, ranks.data_size, size)
            batches = [workload.collate([workload.train[index] for index in indices]) for indices in mine]
            yield StepData(len(window), batches, list(map(workload.count, batches)), sum(map(token_count, batches)))
            done += 1
