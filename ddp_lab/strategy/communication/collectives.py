"""Reduce-scatter and all-gather that put (N-1)/N of the flat tensor on the wire, on NCCL and on Gloo.

NCCL has both collectives. Gloo's `reduce_scatter_tensor` is a whole all-reduce inside, and its `all_gather_into_tensor`
copies more than it sends. So over Gloo a reduce-scatter is one scatter from each rank and a local sum, and an
all-gather is one broadcast from each rank, in place. Both take about half the time of Gloo's own (docs/LOG.md).

Each root has a process group of its own (`ddp_lab.strategy.groups`), so that data goes one way on each connection, and
both directions run at once.

A rank adds up the others' parts in rank order, so results are bitwise repeatable.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as RecordFunction

from ddp_lab.strategy.account import Collective, parts_of
from ddp_lab.strategy.groups import groups_of_roots, is_gloo


class Pending:
    """Communication under way. Holds the tensors that it reads and writes until `wait` returns."""

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], object] = lambda: None,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        self._works, self._finish, self._tensors = works, finish, tensors

    def wait(self) -> None:
        for work in self._works:
            assert work is not None, "an asynchronous collective gives a handle"
            work.wait()
        self._finish()
        self._tensors = ()


def free(tensor: Tensor | None) -> None:
    """Free a tensor's memory at once, even while a backend's thread still holds a reference to the tensor."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


def composed(kind: str, part: str, ranks: int) -> str:
    """The event in a trace around the calls that are one collective (`ddp_lab.analysis.traces.gloo`)."""
    return f"composed {kind} of {parts_of(part, ranks)}"


def reduce_scatter(shard: Tensor, full: Tensor, group: dist.ProcessGroup, averages: bool = False) -> Pending:
    """Start to sum `full` (a multiple of the world size long) over ranks; this rank's part of the sum goes to `shard`.

    `shard` may be the part of `full` that it replaces. Neither may be touched before `wait` returns.

    Args:
        averages: Divide the sum by the number of ranks.
    """
    if not is_gloo(group, full.device):
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        return Pending([dist.reduce_scatter_tensor(shard, full, op, group, async_op=True)], tensors=(shard, full))
    rank, size = group.rank(), group.size()
    roots = groups_of_roots(group, full.device)
    parts = list(full.chunk(size))
    own_part, other_ranks = parts[rank], [root for root in range(size) if root != rank]
    received = {root: torch.empty_like(own_part) for root in other_ranks}
    in_place = shard.data_ptr() == own_part.data_ptr()
    if other_ranks and not in_place:
        received[other_ranks[0]] = shard  # where the sum will be, so that one tensor less is made and written
    with RecordFunction(composed("reduce_scatter", "scatter", size)):
        works = [
            dist.scatter(
                received.get(root, own_part),
                parts if root == rank else None,
                group=roots[root],
                group_src=root,
                async_op=True,
            )
            for root in range(size)
        ]

    def add_up() -> None:
        if not in_place:
            shard.add_(own_part) if other_ranks else shard.copy_(own_part)
        for part in received.values():
            if part is not shard:
                shard.add_(part)
                free(part)
        if averages:
            shard.div_(size)

    return Pending(works, add_up)


def all_gather(full: Tensor, group: dist.ProcessGroup, shard: Tensor | None = None) -> Pending:
    """Start to fill `full` with all ranks' shards.

    Args:
        shard: This rank's, of any dtype and device. Default: it is in its place in `full` already.
    """
    parts, over_gloo = full.chunk(group.size()), is_gloo(group, full.device)
    place = parts[group.rank()]
    if shard is not None and (over_gloo or shard.dtype != full.dtype or shard.device != full.device):
        place.copy_(shard, non_blocking=True)
        shard = None
    if not over_gloo:
        sent = place if shard is None else shard
        work = dist.all_gather_into_tensor(full, sent, group=group, async_op=True)
        return Pending([work], tensors=[full, sent])
    roots = enumerate(groups_of_roots(group, full.device))
    with RecordFunction(composed("all_gather", "broadcast", group.size())):
        return Pending(
            [dist.broadcast(parts[root], group=root_group, group_src=root, async_op=True) for root, root_group in roots]
        )


def expected_reduce_scatters(payloads: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Collective:
    """What `reduce_scatter` issues for flat tensors of `payloads` bytes."""
    made_of = "scatter" if is_gloo(group, device) else ""
    return Collective("reduce_scatter", len(payloads), sum(payloads), group.size(), "gradients", made_of=made_of)


def expected_all_gathers(payloads: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Collective:
    """What `all_gather` issues for flat tensors of `payloads` bytes."""
    made_of = "broadcast" if is_gloo(group, device) else ""
    return Collective("all_gather", len(payloads), sum(payloads), group.size(), "parameters", made_of=made_of)
