"""The collectives that sharding is made of, and what it refuses."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.communication.collectives import all_gather, reduce_scatter
from ddp_lab.strategy.communication.groups import groups_of_roots
from tests.models import Lookup, batch, build
from tests.parity import built, check_messages, load, message_of, one_step
from tests.ranks import RankPool
from tests.tables import each_row

# Collectives ---------------------------------------------------------------------------------------------------------


def sum_and_gather(elements: int) -> tuple[Tensor, Tensor, Tensor]:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    mine = torch.arange(elements * size, dtype=torch.float32) * (rank + 1)
    apart, full = torch.empty(elements), mine.clone()
    reduce_scatter(apart, full, group).wait()
    in_place = mine.clone()
    reduce_scatter(in_place.view(size, -1)[rank], in_place, group).wait()
    whole = torch.zeros(elements * size)
    whole.view(size, -1)[rank] = apart
    all_gather(whole, group).wait()
    return apart, in_place.view(size, -1)[rank].clone(), whole


@each_row("world_size", [1, 2, 3, 4])
def test_collectives(ranks: RankPool, world_size):
    for elements in (1, 5, 1000):
        expected = torch.arange(elements * world_size, dtype=torch.float32) * sum(range(1, world_size + 1))
        for rank, (apart, in_place, whole) in enumerate(ranks.run(world_size, sum_and_gather, elements)):
            assert torch.equal(apart, expected.view(world_size, -1)[rank])
            assert torch.equal(in_place, apart)
            assert torch.equal(whole, expected)


def roots() -> tuple[list[list[int]], bool, bool]:
    """The ranks in each root's group; whether these groups are made once; whether they time out as their parent."""
    parent = dist.new_group(timeout=timedelta(seconds=77))
    assert isinstance(parent, dist.ProcessGroup)
    groups = groups_of_roots(parent, torch.device("cpu"))
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    again = groups_of_roots(parent, torch.device("cpu"))
    ranks, is_same = [dist.get_process_group_ranks(group) for group in groups], again is groups
    return ranks, is_same and len(set(groups)) == len(groups), timeouts == {timedelta(seconds=77)}


def test_each_root_has_a_group_of_its_own(ranks: RankPool):
    for members, are_kept, time_out in ranks.run(3, roots):
        assert members == 3 * [[0, 1, 2]] and are_kept and time_out


def groups_after_others() -> list[int]:
    """Before `parent`, groups are made that not all ranks know of."""
    pair, cpu, me = dist.new_group([1, 2]), torch.device("cpu"), dist.get_rank()
    made = [pair, *groups_of_roots(pair, cpu)] if isinstance(pair, dist.ProcessGroup) else []
    parent = dist.new_group()  # named after a count that groups of roots must leave as it was
    if me == 2:
        made.append(dist.new_group([me], use_local_synchronization=True))
    assert isinstance(parent, dist.ProcessGroup)
    roots = groups_of_roots(parent, cpu)
    if me != 2:
        made.append(dist.new_group([me], use_local_synchronization=True))  # from here on all ranks count the same
    dist.barrier()
    for group in (*made, *roots, parent):
        dist.destroy_process_group(group)  # or later traces would list groups of different ranks
    return [group.size() for group in roots]


def test_groups_of_roots_find_each_other_after_groups_that_not_all_ranks_joined(ranks: RankPool):
    assert ranks.run(3, groups_after_others) == 3 * [[3, 3, 3]]


# What goes wrong -----------------------------------------------------------------------------------------------------


def mistakes_with_zero3() -> dict[str, str]:
    """A parameter is written to, its data is replaced, and backward reads an embedding in a later step only: what this
    rank says, by what it must say."""
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
