"""The micro-batches of each optimizer step: how many steps there are, which rank gets which samples, and how they
come to the device.

All ranks shuffle in the same way, cut the epoch into windows of one global batch, and divide each window among them. So
an optimizer step has the same samples for any number of ranks. The last window of an epoch may be short.

From pageable memory the host waits for each copy, and a copy on the compute stream waits for all kernels before it. So
batches are copied from pinned memory, on a stream of their own, while the step before computes.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.batches import StepData


def steps_in_epoch(samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one pass over `samples`. The last step may have fewer samples."""
    return -(-samples // global_batch_size)


def epoch_windows(samples: int, global_batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The sample indices of each optimizer step of an epoch, the same on every rank."""
    order = list(range(samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[start : start + global_batch_size] for start in range(0, samples, global_batch_size)]


def rank_micro_batches(window: Sequence[int], rank: int, size: int, micro_batch_size: int) -> list[list[int]]:
    """The part of `window` that data-parallel rank `rank` of `size` runs, in micro-batches. It may be empty."""
    indices = window[rank::size]
    return [list(indices[start : start + micro_batch_size]) for start in range(0, len(indices), micro_batch_size)]


def evaluation_batches(samples: int, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], int]]:
    """For each batch of this rank, its sample indices, and how many of them count.

    Over all ranks each sample counts exactly once. Every rank gets the same number of batches, because the forward
    pass of some strategies communicates. A rank without samples left gets sample 0 with a count of 0.
    """
    largest_share = -(-samples // size)
    indices = list(range(rank, samples, size))
    for start in range(0, largest_share, batch_size):
        batch = indices[start : start + batch_size]
        yield (batch, len(batch)) if batch else ([0], 0)


def planned_steps(config: RunConfig, samples: int) -> tuple[RunConfig, int, str]:
    """`config` with its epochs, the optimizer steps of the run, and what to say of the two; mostly nothing.

    They are `max_steps`. Without it, or where `epochs` are given and have fewer, they are whole epochs.
    """
    in_epoch, most = steps_in_epoch(samples, config.global_batch_size), config.max_steps or sys.maxsize
    epochs = config.epochs or -(-(config.max_steps or 1) // in_epoch)
    steps, note = min(epochs * in_epoch, most), ""
    if config.max_steps and steps < most:
        note = f"{steps} steps, not {most}: --epochs {epochs} has no more; without it the data repeat"
    elif config.epochs is None and epochs > 1:
        note = f"an epoch has {in_epoch} steps, so {steps} steps are {epochs} epochs"
    return replace(config, epochs=epochs), steps, note


def require_sample_for_each_rank(samples: int, world_size: int) -> None:
    """Refuse data that leaves a rank without a sample in the first step."""
    if samples < world_size:
        raise UserError(
            f"{samples} training samples for {world_size} ranks; each rank needs one in the first step: raise "
            "--train-samples, give more data, or use fewer ranks"
        )


def batches_of_steps(
    config: RunConfig, workload: Workload, ranks: RankContext, steps: int, first: int = 0
) -> Iterator[StepData]:
    """For each optimizer step from `first` on: this rank's micro-batches on its device, and what they amount to."""
    return copied_ahead(collated(config, workload, ranks, steps, first), ranks.device)


def collated(config: RunConfig, workload: Workload, ranks: RankContext, steps: int, first: int) -> Iterator[StepData]:
    """The same on the CPU."""
    size, steps_done = config.micro_batch_size(ranks.data_size), 0
    for epoch in count():
        for window in epoch_windows(len(workload.train), config.global_batch_size, config.seed, epoch):
            if steps_done == steps:
                return
            if steps_done < first:
                steps_done += 1
                continue
            micro_batches = rank_micro_batches(window, ranks.data_rank, ranks.data_size, size)
            batches = [workload.collate([workload.train[index] for index in indices]) for indices in micro_batches]
            yield StepData(len(window), batches, list(map(workload.count, batches)), sum(map(token_count, batches)))
            steps_done += 1


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def token_count(batch: Mapping[str, Tensor]) -> int:
    """Tokens in a batch on the CPU, padding left out; 0 if it has no `input_ids`."""
    if "attention_mask" in batch and batch["attention_mask"].shape == batch["input_ids"].shape:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def copied_ahead(steps: Iterable[StepData], device: torch.device) -> Iterator[StepData]:
    """`steps` with all batches on `device`. On CUDA a step is copied when the one before it is asked for."""
    if device.type != "cuda":
        yield from (step._replace(micro_batches=[to_device(b, device) for b in step.micro_batches]) for step in steps)
        return
    copies, last = torch.cuda.Stream(device), None
    for step in steps:
        with torch.cuda.stream(copies):
            copied = [
                {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
                for batch in step.micro_batches
            ]
            arrived = copies.record_event()
        if last is not None:
            yield received(*last)
        last = step._replace(micro_batches=copied), arrived
    if last is not None:
        yield received(*last)


def received(step: StepData, arrived: torch.cuda.Event) -> StepData:
    """Let the current stream wait for the copies. It uses their memory, so the allocator must not reuse it earlier."""
    stream = torch.cuda.current_stream()
    stream.wait_event(arrived)
    for batch in step.micro_batches:
        for tensor in batch.values():
            tensor.record_stream(stream)
    return step
