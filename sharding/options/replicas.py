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

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.mesh import REPLICATE
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.communication.collectives import Pending
from ddp_lab.strategy.communication.groups import is_gloo


class ShardRanks:
    """Attributes:
    everyone: The ranks that see different samples.
    shard: Those among them that hold a shard each, all together one copy of the model states.
    replicate: Those that hold the same shard as this rank; None if there are no others.
    is_last: No further micro-batch follows before the optimizer step.
    """

    def __init__(
        self, everyone: dist.ProcessGroup, shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None = None
    ) -> None:
        self.everyone, self.shard, self.replicate = everyone, shard, replicate
        self.is_last = True

    def expected_all_reduces(self, payloads: Sequence[int]) -> list[Collective]:
        """What `all_reduce` issues for shards of `payloads` bytes; nothing without replicas."""
        if self.replicate is None:
            return []
        size = dist.get_world_size(self.replicate)
        return [Collective("all_reduce", len(payloads), sum(payloads), size, "gradients", REPLICATE)]


class SumOverReplicas:
    """Adds up one bucket's shard of the gradients over replicas.

    Args:
        dtype: In which it is sent.
    """

    def __init__(self, ranks: ShardRanks, dtype: torch.dtype) -> None:
        self._ranks, self._dtype = ranks, dtype
        self._own: Tensor | None = None  # the sum over `ranks.shard`, of which replicas have not been told
        self._in_flight: list[tuple[Pending, Tensor]] = []
        self._abandoned: list[tuple[Pending, Tensor]] = []

    def add(self, part: Tensor, averages: bool) -> None:
        """Take a micro-batch's sum over `ranks.shard`. After the last one, start the all-reduce.

        Args:
            averages: Divide the sum by the number of replicas.
        """
        self._own = part if self._own is None else self._own.add_(part)
        if self._ranks.is_last:
            self.start(averages)

    def start(self, averages: bool) -> None:
        """Start the all-reduce of what has been added, if anything."""
        if self._own is not None:
            sent, self._own = self._own.to(self._dtype), None
            assert self._ranks.replicate is not None
            self._in_flight.append((all_reduce(sent, self._ranks.replicate, averages), sent))

    def finish(self) -> Iterator[Tensor]:
        """Wait for what was started: the sums over all ranks. Nearly always one."""
        while self._in_flight:
            pending, total = self._in_flight.pop(0)
            pending.wait()
            self._abandoned.clear()
            yield total

    def abandon(self) -> bool:
        """Begin anew. Returns whether an all-reduce may still write into what was added."""
        self._own = None
        self._abandoned += self._in_flight
        was_in_flight, self._in_flight = bool(self._in_flight), []
        return was_in_flight

    def tensors(self) -> list[Tensor]:
        return [*(total for _, total in self._in_flight), *([] if self._own is None else [self._own])]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, averages: bool) -> Pending:
    """Start to sum `tensor` over ranks, in place, or to average it."""
    if not is_gloo(group, tensor.device):
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        return Pending([dist.all_reduce(tensor, op, group, async_op=True)])
    size = dist.get_world_size(group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending([work], lambda: tensor.div_(size) if averages else None)
