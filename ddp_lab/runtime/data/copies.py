"""Batches on their way to the device.

From pageable memory the host waits for each copy, and a copy on the compute stream waits for all kernels before it. So
batches are copied from pinned memory, on a stream of their own, while the step before computes.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ddp_lab.strategy.batches import StepData

Batch = dict[str, Tensor]


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def token_count(batch: Mapping[str, Tensor]) -> int:
    """Tokens in a batch on the CPU, padding left out; 0 if it has no `input_ids`."""
    if "attention_mask" in batch and batch["attention_mask"].shape == batch["input_ids"].shape:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def copied_ahead(steps: Iterable[StepData], device: torch.device) -> Iterator[StepData]:
    """`steps` with all batches on `device`. On CUDA the copy of each step begins when the one before it is asked for.

    Args:
        steps: With this rank's micro-batches on the CPU.
    """
    if device.type != "cuda":
        yield from (step._replace(micro_batches=[to_device(b, device) for b in step.micro_batches]) for step in steps)
        return
    copies, last = torch.cuda.Stream(device), None
    for step in steps:
        with torch.cuda.stream(copies):
            here = [
                {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
                for batch in step.micro_batches
            ]
            arrived = copies.record_event()
        if last is not None:
            yield received(*last)
        last = step._replace(micro_batches=here), arrived
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
