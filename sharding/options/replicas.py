"""HSDP: model states are sharded over some ranks, and these shards are replicated over others.

With `--mesh replicate=R,shard=S` the N = R x S ranks stand in R rows of S. A row holds one whole copy of the model
states, each of its ranks 1/S of them. The ranks of a column hold the same shard: they are replicas. A row is a node,
where links are fast; columns go from node to node, where they are slow.

What is sent, and where, of P elements in a step:
- Within a row, all that sharding over S ranks sends: parameters are all-gathered, gradients are reduce-scattered.
- Along a column, one all-reduce of this rank's shard of the gradients, P / S elements: 2(R-1)/R * P/S on the slow link.
  Sharding over all N ranks would send every all-gather and every reduce-scatter over it.

A bucket's all-reduce starts when its reduce-scatter is done, and backward goes on meanwhile. With several micro-batches
each is reduce-scattered and added up in the shard, and only the last one is followed by the all-reduce. An optimizer
that gets the same gradients computes the same, so replicas stay equal bit by bit, and nothing else is sent along
columns.

The price is memory: 1/S instead of 1/N of the model states a rank. Zhao et al., 2023, "PyTorch FSDP" (VLDB), section
3.2.2.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class SumOverReplicas:
    """Adds up one bucket's shard of the gradients over replicas.

    Args:
        group: The replicas.
        dtype: In which it is sent.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._unsent_sum: Tensor | None = None  # the sum over the ranks that shard, not yet sent to replicas
        self._in_flight: list[tuple[dist.Work, Tensor]] = []
        self._abandoned: list[tuple[dist.Work, Tensor]] = []

    def add(self, part: Tensor) -> None:
        """Take a micro-batch's sum over the ranks that shard."""
        self._unsent_sum = part if self._unsent_sum is None else self._unsent_sum.add_(part)

    def start(self, averages: bool) -> None:
        """Start the all-reduce of what has been added, if anything. `averages`: Divide it by the number of replicas."""
        if self._unsent_sum is not None:
            sent, self._unsent_sum = self._unsent_sum.to(self._dtype), None
            op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
            work = dist.all_reduce(sent, op, self._group, async_op=True)
            assert work is not None, "an asynchronous collective gives a handle"
            self._in_flight.append((work, sent))

    def finish(self) -> Iterator[Tensor]:
        """Wait for what was started: the sums over all ranks. Nearly always one."""
        while self._in_flight:
            work, total = self._in_flight.pop(0)
            work.wait()
            self._abandoned.clear()
            yield total

    def abandon(self) -> bool:
        """Begin anew. Returns whether an all-reduce may still write into what was added."""
        self._unsent_sum = None
        self._abandoned += self._in_flight
        was_in_flight, self._in_flight = bool(self._in_flight), []
        return was_in_flight

    def tensors(self) -> list[Tensor]:
        return [*(total for _, total in self._in_flight), *([] if self._unsent_sum is None else [self._unsent_sum])]
