"""Batches on their way to the device.

From pageable memory the host waits for each copy, and a copy on the compute stream waits for all kernels before it. So
batches are copied from pinned memory, on a stream of their own, while the step before computes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def copied_ahead(
    steps: Iterable[tuple[int, Sequence[Batch]]], device: torch.device
) -> Iterator[tuple[int, Sequence[Batch]]]:
    """`steps` with all batches on `device`. On CUDA the copy of each step begins when the one before it is asked for.

    Args:
        steps: The samples in the global batch, and this rank's micro-batches on the CPU.
    """
    if device.type != "cuda":
        yield from ((samples, [to_device(batch, device) for batch in batches]) for samples, batches in steps)
        return
    copies, last = torch.cuda.Stream(device), None
    for samples, batches in steps:
        with torch.cuda.stream(copies):
            here = [
                {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
                for batch in batches
            ]
            arrived = copies.record_event()
        if last is not None:
            yield received(*last)
        last = samples, here, arrived
    if last is not None:
        yield received(*last)


def received(samples: int, batches: Sequence[Batch], arrived: torch.cuda.Event) -> tuple[int, Sequence[Batch]]:
    """Let the current stream wait for the copies. It uses their memory, so the allocator must not reuse it earlier."""
    stream = torch.cuda.current_stream()
    stream.wait_event(arrived)
    for batch in batches:
        for tensor in batch.values():
            tensor.record_stream(stream)
    return samples, batches
