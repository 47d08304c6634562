"""The collectives that sharding is made of, and what it refuses."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.communication.collectives import all_gather, reduce_scatter
from ddp_lab.strategy.groups import groups_of_roots
from tests.models import Lookup, batch, build
from tests.parity import built, check_messages, load, message_of, one_step
from tests.ranks import RankPool
from tests.tables import each_row

# Collectives ---------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def sum_and_gather(elements: int):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    numbers = torch.arange(elements * size, dtype=torch.float32)
    local, expected = numbers * (rank + 1), numbers * sum(range(1, size + 1))
    shard, gathered = torch.empty(elements), torch.zeros(elements * size)
    reduce_scatter(shard, local.clone(), group).wait()
    part, slot = (tensor.view(size, -1)[rank] for tensor in (local, gathered))
    reduce_scatter(part, local, group).wait()
    slot.copy_(shard)
    all_gather(gathered, group).wait()
    assert torch.equal(gathered, expected) and torch.equal(shard, part)
    assert torch.equal(part, expected.view(size, -1)[rank])


@each_row("world_size", [1, 2, 3, 4])
def test_collectives(ranks: RankPool, world_size):
    for elements in (1, 5, 1000):
        ranks.run(world_size, sum_and_gather, elements)


def roots():
    parent = dist.new_group(timeout=timedelta(seconds=77))
    assert isinstance(parent, dist.ProcessGroup)
    groups = groups_of_roots(parent, CPU)
    assert groups_of_roots(parent, CPU) is groups and len(set(groups)) == 3
    for group in groups:
        assert dist.get_process_group_ranks(group) == [0, 1, 2]
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=77)


def test_each_root_has_a_group_of_its_own(ranks: RankPool):
    ranks.run(3, roots)


def groups_after_others() -> list[int]:
    """Sizes of the groups of roots, made after groups that not all ranks have joined."""
    pair, rank = dist.new_group([1, 2]), dist.get_rank()
    partial_groups = [pair, *groups_of_roots(pair, CPU)] if isinstance(pair, dist.ProcessGroup) else []
    parent = dist.new_group()  # named after a count that groups of roots must leave as it was
    if rank == 2:
        partial_groups.append(dist.new_group([rank], use_local_synchronization=True))
    assert isinstance(parent, dist.ProcessGroup)
    roots = groups_of_roots(parent, CPU)
    if rank != 2:
        partial_groups.append(
            dist.new_group([rank], use_local_synchronization=True)
        )  # from here on all ranks count the same
    dist.barrier()
    for group in (*partial_groups, *roots, parent):
        dist.destroy_process_group(group)  # or later traces would list groups of different ranks
    return [group.size() for group in roots]


def test_groups_of_roots_find_each_other_after_groups_that_not_all_ranks_joined(ranks: RankPool):
    assert ranks.run(3, groups_after_others) == 3 * [[3, 3, 3]]


# What goes wrong -----------------------------------------------------------------------------------------------------


def mistakes_with_zero3() -> dict[str, str]:
    """Messages for three mistakes, by what they must contain: writing to a sharded parameter, replacing its data, and
    reading an embedding in backward for the first time in a later step."""
    module = build("plain")
    strategy, weight = built("zero3", module), module.get_parameter("net.0.weight")
    written = message_of(RuntimeError, weight.data.mul_, 2)
    assert weight.isnan().all(), "a sharded parameter reads as NaN"
    one_step(strategy, [batch(2, 0)])
    weight.data = torch.zeros(11, 6)
    lookup = Lookup()
    looking_up = built("zero3", lookup)
    one_step(looking_up, [batch(2, 0)])
    lookup.reads = "head"
    return {
        "single memory location": written,
        "(11, 6) was replaced between steps": message_of(ValueError, one_step, strategy, [batch(2, 1)]),
        "use zero2 for such a model": message_of(OneRankError, one_step, looking_up, [batch(2, 1)]),
    }


def test_mistakes_with_zero3_are_refused(ranks: RankPool):
    check_messages(ranks, 2, mistakes_with_zero3)


def unshardable(name: str) -> dict[str, str]:
    two_elements = nn.LayerNorm(1)
    return {
        "2 trainable elements cannot be sharded over 3 ranks": message_of(ValueError, built, name, two_elements),
        "Adafactor is not known to work on each element by itself": message_of(
            ValueError, load(name), build("plain"), torch.optim.Adafactor
        ),
    }


@each_row("name", ["zero1", "zero3"])
def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks: RankPool, name):
    check_messages(ranks, 3, unshardable, name)
