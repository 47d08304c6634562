"""Pretended process groups, called as `torch.distributed` calls real ones, on tensors that hold data."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.planner.contracts import CollectiveCost
from ddp_lab.planner.costs.cluster import Cluster, Device, Link
from ddp_lab.planner.simulation.clock import Clock
from ddp_lab.planner.simulation.network import Issued, Network
from ddp_lab.planner.simulation.process_group import PretendedGroup, pretended_world
from ddp_lab.planner.simulation.streams import Streams

RANKS, RANK = 8, 5
LATENCY, RATE = 1.0, 8.0


class Costs:
    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        return CollectiveCost(LATENCY, payload_bytes / RATE, "link")


class World:
    """A pretended world of 2 nodes of 4 ranks, seen from rank 5."""

    def __init__(self, backend: str) -> None:
        device, link = Device("device", "cpu", 2**30, {}, 1e9), Link("link", LATENCY, RATE)
        self.clock = Clock()
        self.issued: list[Issued] = []
        cluster, costs = Cluster(device, 2, 4, link, link, backend), {"nccl": Costs(), "gloo": Costs()}
        self.network = Network(cluster, costs, Streams(self.clock), lambda issued, _: self.issued.append(issued))

    def last(self) -> tuple[str, int, tuple[int, ...]]:
        return self.issued[-1].kind, self.issued[-1].payload_bytes, self.issued[-1].ranks


@pytest.fixture
def world() -> Iterator[World]:
    world = World("gloo")
    with pretended_world(world.network, RANK):
        yield world
    assert not dist.is_initialized()


ALL = tuple(range(RANKS))


def floats(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_a_blocking_collective_takes_its_time_and_one_in_flight_does_not(world: World) -> None:
    dist.all_reduce(floats(4))
    assert world.clock.now_s == LATENCY + 16 / RATE and world.last() == ("all_reduce", 16, ALL)
    work = dist.all_reduce(floats(4), async_op=True)
    assert world.clock.now_s == LATENCY + 16 / RATE and not work.is_completed()
    work.wait()
    assert world.clock.now_s == 2 * (LATENCY + 16 / RATE) and work.is_completed()


def test_each_kind_is_told_with_its_payload_and_ranks_hold_the_same(world: World) -> None:
    own, gathered = floats(2), torch.empty(2 * RANKS)
    dist.all_gather_into_tensor(gathered, own)
    assert world.last() == ("all_gather", 64, ALL) and gathered.view(RANKS, 2).eq(own).all()
    parts = [torch.empty(2) for _ in ALL]
    dist.all_gather(parts, own)
    assert world.last() == ("all_gather", 64, ALL) and all(part.equal(own) for part in parts)
    shard, whole = torch.empty(2), floats(16)
    dist.reduce_scatter_tensor(shard, whole)
    assert world.last() == ("reduce_scatter", 64, ALL) and shard.equal(RANKS * whole[2 * RANK : 2 * RANK + 2])
    dist.broadcast(whole, src=0)
    assert world.last() == ("broadcast", 64, ALL)
    dist.scatter(shard, list(whole.split(2)), src=RANK)
    assert world.last() == ("scatter", 64, ALL) and shard.equal(whole[2 * RANK : 2 * RANK + 2])
    dist.scatter(shard, src=0)
    assert world.last() == ("scatter", 64, ALL)
    dist.barrier()
    assert world.last() == ("barrier", 0, ALL)


def test_groups_and_meshes_are_of_their_ranks(world: World) -> None:
    pair = dist.new_group([1, RANK])
    assert isinstance(pair, PretendedGroup) and (dist.get_rank(pair), dist.get_world_size(pair)) == (1, 2)
    dist.all_reduce(floats(4), group=pair)
    assert world.last() == ("all_reduce", 16, (1, RANK))
    assert not isinstance(dist.new_group([0, 1]), dist.ProcessGroup), "this rank is no member"
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("between", "inside"))
    for name, ranks in (("between", (1, 5)), ("inside", (4, 5, 6, 7))):
        dist.all_reduce(floats(1), group=mesh.get_group(name))
        assert world.last() == ("all_reduce", 4, ranks)


def test_groups_run_beside_each_other_and_collectives_of_one_in_turn(world: World) -> None:
    """Four at once would take a latency and four transfers; Gloo has two threads a group, so it takes two latencies."""
    other = dist.new_group(list(ALL))
    works = [dist.all_reduce(floats(2), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    assert world.clock.now_s == 2 * LATENCY + 4 * 8 / RATE
    start = world.clock.now_s
    works = [dist.all_reduce(floats(2), group=group, async_op=True) for group in (None, None, other, other)]
    for work in works:
        work.wait()
    assert world.clock.now_s - start == LATENCY + 4 * 8 / RATE


def test_nccl_runs_those_of_a_group_one_after_the_other() -> None:
    world = World("nccl")
    with pretended_world(world.network, RANK):
        works = [dist.all_reduce(torch.empty(2, device="meta"), async_op=True) for _ in range(2)]
        works.append(dist.all_reduce(floats(2), async_op=True))  # what holds data travels over Gloo, beside them
        assert [issued.backend for issued in world.issued] == ["nccl", "nccl", "gloo"]
        works[2].wait()
        assert works[0].is_completed() and not works[1].is_completed()


def test_what_follows_a_future_runs_when_it_is_waited_for(world: World) -> None:
    done: list[float] = []
    future = dist.all_reduce(floats(2), async_op=True).get_future().then(lambda of: done.append(world.clock.now_s))
    assert not done
    future.wait()
    future.wait()
    assert done == [LATENCY + 1.0]
