"""The collectives that can be measured: how each is called, and what its result must be.

Values are whole numbers that are small enough for sums over all ranks to be exact in every dtype, in any order of
adding. A rank's pattern repeats after a prime number of elements, so that a part in the wrong place is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.distributed import Ranks
from ddp_lab.strategy.communication.collectives import all_gather as project_all_gather
from ddp_lab.strategy.communication.collectives import reduce_scatter as project_reduce_scatter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_EXACT = 256
"""bf16 holds every whole number up to here."""
PERIOD = 65_537
ROOT = 0
Patterned = tuple[Tensor, Tensor, int]
"""A tensor, the pattern that it must hold, and the number of the tensor's first element in that pattern."""


@dataclass
class Call:
    """One collective on one rank, ready to run.

    Attributes:
        run: Issue it, and wait for it.
        inputs, expected: What tensors hold before it, and must hold after it.
        buffers: All its tensors.
    """

    run: Callable[[], object] = lambda: None
    inputs: Sequence[Patterned] = ()
    expected: Sequence[Patterned] = ()
    buffers: Sequence[Tensor] = field(default_factory=list)

    def fill(self) -> None:
        for tensor, pattern, start in self.inputs:
            for part, values in along(tensor, pattern, start):
                part.copy_(values)

    def count_wrong(self) -> int:
        """Elements of this rank that are not what they must be; nan is wrong too."""
        return sum(
            int((part != values).sum())
            for tensor, pattern, start in self.expected
            for part, values in along(tensor, pattern, start)
        )

    def clear(self) -> None:
        """Fill with zeros, which stay zeros however often a sum is repeated."""
        for tensor in self.buffers:
            tensor.zero_()


def along(tensor: Tensor, pattern: Tensor, start: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Parts of `tensor`, each with the values of the pattern that belong there."""
    parts, done = [], 0
    while done < len(tensor):
        place = (start + done) % PERIOD
        length = min(PERIOD - place, len(tensor) - done)
        parts.append((tensor[done : done + length], pattern[place : place + length]))
        done += length
    return parts


@cache
def pattern_of(rank: int, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    """Whole numbers from 0 whose sum over ranks is at most `LARGEST_EXACT`; zeros on ranks beyond that number."""
    most = LARGEST_EXACT // ranks.world_size or int(rank < LARGEST_EXACT)
    values = torch.randint(0, most + 1, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    return values.to(dtype).to(ranks.device)


@cache
def pattern_of_sum(dtype: torch.dtype, ranks: Ranks) -> Tensor:
    total = torch.zeros(PERIOD, device=ranks.device)
    for rank in range(ranks.world_size):
        total += pattern_of(rank, torch.float32, ranks)
    return total.to(dtype)


def empty(count: int, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    return torch.empty(count, dtype=dtype, device=ranks.device)


def all_reduce(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    tensor = empty(count, dtype, ranks)
    own, total = pattern_of(ranks.rank, dtype, ranks), pattern_of_sum(dtype, ranks)
    return Call(lambda: dist.all_reduce(tensor), [(tensor, own, 0)], [(tensor, total, 0)], [tensor])


def broadcast(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    tensor = empty(count, dtype, ranks)
    own, root = pattern_of(ranks.rank, dtype, ranks), pattern_of(ROOT, dtype, ranks)
    return Call(lambda: dist.broadcast(tensor, ROOT), [(tensor, own, 0)], [(tensor, root, 0)], [tensor])


def reduce(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    tensor = empty(count, dtype, ranks)
    own, total = pattern_of(ranks.rank, dtype, ranks), pattern_of_sum(dtype, ranks)
    expected = [(tensor, total, 0)] if ranks.rank == ROOT else []
    return Call(lambda: dist.reduce(tensor, ROOT), [(tensor, own, 0)], expected, [tensor])


def parts_of_ranks(full: Tensor, ranks: Ranks) -> list[Patterned]:
    """What `full` must hold once every rank's part is in its place."""
    parts = full.chunk(ranks.world_size)
    return [(part, pattern_of(rank, full.dtype, ranks), rank * len(part)) for rank, part in enumerate(parts)]


def all_gather(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    full, shard = empty(count, dtype, ranks), empty(count // ranks.world_size, dtype, ranks)
    inputs = [(shard, pattern_of(ranks.rank, dtype, ranks), ranks.rank * len(shard))]
    run = lambda: dist.all_gather_into_tensor(full, shard)  # noqa: E731
    return Call(run, inputs, parts_of_ranks(full, ranks), [full, shard])


def own_all_gather(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    full, group = empty(count, dtype, ranks), dist.group.WORLD
    expected = parts_of_ranks(full, ranks)
    return Call(lambda: project_all_gather(full, group).wait(), [expected[ranks.rank]], expected, [full])


def reduce_scatter(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    return scattered(count, dtype, ranks, dist.reduce_scatter_tensor)


def own_reduce_scatter(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    group = dist.group.WORLD
    return scattered(count, dtype, ranks, lambda shard, full: project_reduce_scatter(shard, full, group).wait())


def scattered(count: int, dtype: torch.dtype, ranks: Ranks, issue: Callable[[Tensor, Tensor], object]) -> Call:
    full, shard = empty(count, dtype, ranks), empty(count // ranks.world_size, dtype, ranks)
    inputs = [(full, pattern_of(ranks.rank, dtype, ranks), 0)]
    expected = [(shard, pattern_of_sum(dtype, ranks), ranks.rank * len(shard))]
    return Call(lambda: issue(shard, full), inputs, expected, [full, shard])


def all_to_all(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    """Part i of rank k's input becomes part k of rank i's output."""
    sent, received = empty(count, dtype, ranks), empty(count, dtype, ranks)
    parts = received.chunk(ranks.world_size)
    inputs = [(sent, pattern_of(ranks.rank, dtype, ranks), 0)]
    expected = [(part, pattern_of(rank, dtype, ranks), ranks.rank * len(part)) for rank, part in enumerate(parts)]
    return Call(lambda: dist.all_to_all_single(received, sent), inputs, expected, [sent, received])


@dataclass(frozen=True)
class Operation:
    """What is known of a collective before it runs.

    Attributes:
        make: Its call with this number of elements on this rank.
        redop: What it does to elements, as nccl-tests names it.
        is_divided: Each rank holds one of as many parts as there are ranks, so the size is a multiple of their number.
        memory: Bytes that a rank needs at most, over those of the payload, with what Gloo allocates meanwhile
            (measured: the rise of the resident set with 2 and 4 ranks, 128 MiB).
    """

    make: Callable[..., Call]
    redop: str = "none"
    is_divided: bool = False
    memory: float = 1.0


OPERATIONS = {
    "all_reduce": Operation(all_reduce, "sum", memory=1.1),
    "all_gather": Operation(all_gather, is_divided=True, memory=2.6),
    "sharding.all_gather": Operation(own_all_gather, is_divided=True),
    "reduce_scatter": Operation(reduce_scatter, "sum", is_divided=True, memory=2.6),
    "sharding.reduce_scatter": Operation(own_reduce_scatter, "sum", is_divided=True, memory=2.0),
    "broadcast": Operation(broadcast),
    "reduce": Operation(reduce, "sum", memory=1.1),
    "all_to_all": Operation(all_to_all, is_divided=True, memory=2.0),
    "barrier": Operation(lambda *_: Call(dist.barrier)),
}
"""By name, in display order. Names are torch's; `sharding.` marks what this project's strategies call."""
