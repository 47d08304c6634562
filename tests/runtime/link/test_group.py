"""Paced collectives between real ranks."""

import datetime
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.runtime.groups import gather_objects, host_barrier
from ddp_lab.runtime.link.group import paced_groups
from ddp_lab.runtime.link.ledger import SLOTS
from ddp_lab.runtime.link.speed import SimulatedLink
from tests.parity import Case, message_of, trained
from tests.ranks import RankPool
from tests.tables import each_row

ELEMENTS = 60_000
SLOW = SimulatedLink(16 * 10**6, 1e-4)
"""120 ms for an all-reduce of so many elements between two ranks."""


CHOICES = ("simple_ddp_hook", "bucket_ddp_async", "pytorch_ddp", "zero2", "zero3", "pytorch_zero3")


def both_ways(choice: str) -> list[dict[str, Any]]:
    case = Case(choice, split="uneven", optimizer="adam")
    plain = trained(case)
    with paced_groups(SimulatedLink(10**9, 1e-5)):
        paced = trained(case)
        gc.collect()
    return [plain, paced]


@each_row("choice", CHOICES)
def test_results_are_bitwise_those_of_gloo(ranks: RankPool, choice):
    for plain, paced in ranks.run(2, both_ways, choice):
        assert plain["loss"] == paced["loss"]
        for part in ("gradients", "state"):
            assert plain[part].keys() == paced[part].keys()
            assert all(torch.equal(plain[part][name], paced[part][name]) for name in plain[part])


def issue(kind: str, group=None) -> tuple[Any, Tensor, Tensor]:
    """Handle, result, and what the result must be."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, part = torch.full((ELEMENTS,), float(rank + 1)), ELEMENTS // size
    shard, full = torch.empty(part), torch.empty(ELEMENTS * size)
    total, by_rank = size * (size + 1) / 2, torch.arange(1.0, size + 1).repeat_interleave(ELEMENTS)
    options: dict[str, Any] = {"async_op": True, "group": group}
    if kind == "all_reduce":
        return dist.all_reduce(tensor, **options), tensor, torch.full((ELEMENTS,), total)
    if kind == "reduce_scatter":
        return dist.reduce_scatter_tensor(shard, tensor, **options), shard, torch.full_like(shard, total)
    if kind == "broadcast":
        return dist.broadcast(tensor, src=1, **options), tensor, torch.full((ELEMENTS,), 2.0)
    if kind == "scatter":
        inputs = list(torch.ones(size, part).unbind()) if rank == 0 else None
        return dist.scatter(shard, inputs, src=0, **options), shard, torch.ones_like(shard)
    if kind == "gather":
        parts = [torch.empty(ELEMENTS) for _ in range(size)] if rank == 0 else None
        work = dist.gather(tensor, parts, dst=0, **options)
        return work, parts[1] if parts else tensor, torch.full((ELEMENTS,), 2.0 if parts else rank + 1.0)
    if kind == "all_to_all":
        return dist.all_to_all_single(full, tensor.repeat(size), **options), full, by_rank
    return dist.all_gather_into_tensor(full, tensor, **options), full, by_rank


def timed(kind: str) -> tuple[float, float, bool, bool, float]:
    with paced_groups(SLOW):
        host_barrier()
        begin, cpu = time.monotonic(), time.process_time()
        work, result, expected = issue(kind)
        issued = time.monotonic() - begin
        was_done = work.is_completed()
        work.wait()
        end = time.monotonic() - begin
        return issued, end, was_done, torch.equal(result, expected), time.process_time() - cpu


BITS = 8 * 4 * ELEMENTS
LEAST_S = {  # of the rank that waits longest, with two ranks
    **dict.fromkeys(("all_reduce", "reduce_scatter"), BITS / SLOW.bits_per_s + 2e-4),
    **dict.fromkeys(("broadcast", "gather", "all_to_all"), BITS / SLOW.bits_per_s + 1e-4),
    "all_gather": 1.5 * BITS / SLOW.bits_per_s + 1e-4,
    "scatter": BITS / 2 / SLOW.bits_per_s + 1e-4,
}


@each_row("kind", LEAST_S)
def test_a_collective_takes_its_time_and_no_cpu(ranks: RankPool, kind):
    measured = ranks.run(2, timed, kind)
    assert max(end for _, end, *_ in measured) >= LEAST_S[kind]
    for issued, end, was_done, is_right, cpu in measured:
        assert is_right and not was_done
        assert issued < end / 2 and cpu < end / 2  # the caller goes on at once, and nobody spins


def many_in_flight() -> tuple[float, float]:
    """Seconds until the last of more all-reduces than a ledger has slots for, and what the link takes for all."""
    link, message = SimulatedLink(8 * 10**6), torch.ones(250)
    with paced_groups(link):
        host_barrier()
        begin = time.monotonic()
        works = [dist.all_reduce(message.clone(), async_op=True) for _ in range(SLOTS + SLOTS // 2)]
        for work in works:
            work.wait()
        return time.monotonic() - begin, len(works) * 8 * message.nbytes / link.bits_per_s


def test_a_rank_far_ahead_still_pays_for_all(ranks: RankPool):
    for took, least in ranks.run(2, many_in_flight):
        assert took >= least


def sub_groups() -> tuple[list[float], bool]:
    with paced_groups(SLOW):
        of_two = dist.new_group([0, 1] if dist.get_rank() < 2 else [2], use_local_synchronization=True)
        group = of_two if dist.get_rank() < 2 else None
        of_third = dist.new_group([2])
        times = []
        host_barrier()
        if group is not None:
            begin = time.monotonic()
            dist.all_reduce(torch.ones(ELEMENTS), group=group)
            times.append(time.monotonic() - begin)
        is_member = isinstance(of_third, dist.ProcessGroup)
        assert gather_objects(dist.get_rank()) == [0, 1, 2]
        for group in filter(lambda group: isinstance(group, dist.ProcessGroup), (of_two, of_third)):
            dist.destroy_process_group(group)  # or later traces would list groups of different ranks
    dist.barrier()  # as before
    return times, is_member


def test_groups_that_are_made_later_are_paced(ranks: RankPool):
    first, second, third = ranks.run(3, sub_groups)
    for times, is_member in (first, second):
        assert times[0] >= BITS / SLOW.bits_per_s and not is_member
    assert third == ([], True)


def missing_rank() -> list[str]:
    """What a collective says that rank 1 never issues: to who waits, to who has its future, and to DDP."""
    messages = []
    with paced_groups(SLOW):
        groups = [dist.new_group(timeout=datetime.timedelta(milliseconds=300)) for _ in range(3)]
        module = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=groups[2])
        host_barrier()
        if dist.get_rank() == 0:
            works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups[:2]]
            attempts = [works[0].wait, works[1].get_future().wait, module(torch.ones(1, 3)).sum().backward]
            messages = [message_of(RuntimeError, attempt) for attempt in attempts]
            assert works[0].is_completed() and not works[0].is_success()
            with pytest.raises(Exception, match="--link cannot pace reduce yet"):
                dist.reduce(torch.ones(1), dst=0)
        host_barrier()
        del module
        gc.collect()
    return messages


def test_what_fails_is_not_taken_for_done(ranks: RankPool):
    messages, nothing = ranks.run(2, missing_rank)
    assert len(messages) == 3 and nothing == [] and all("imed out" in message for message in messages)


def exchanged() -> tuple[bool, bool, list[float], list[tuple[float, float]]]:
    """Three messages to the other rank and three from it: whether one was there at once, whether all are right, and
    when each was; and when the sending links of both ranks worked."""
    rank, results = dist.get_rank(), [torch.empty(ELEMENTS) for _ in range(3)]
    with paced_groups(SLOW):
        host_barrier()
        begin = time.monotonic()
        received = [dist.irecv(result, 1 - rank) for result in results]
        sent = [dist.isend(torch.full((ELEMENTS,), float(10 * rank + index)), 1 - rank) for index in range(3)]
        was_there, times = any(work.is_completed() for work in received + sent), []  # type: ignore[union-attr]
        for work in received + sent:
            work.wait()  # type: ignore[union-attr]
            times.append(time.monotonic() - begin)
        host_barrier()
        ledger: Any = dist.group.WORLD._ledger  # type: ignore[union-attr]
        worked = [tuple(spans[0].tolist()) for spans in ledger._cells["links"][0, 0]]
    return was_there, all(r.eq(10 * (1 - rank) + i).all() for i, r in enumerate(results)), times[:3], worked


def test_messages_go_one_behind_the_other_and_both_ways_at_once(ranks: RankPool):
    """Gloo moves them in the background, and each waits for its turn on the links."""
    for was_there, are_right, times, ((begin, end), (others_begin, others_end)) in ranks.run(2, exchanged):
        assert are_right and not was_there
        message_s = BITS / SLOW.bits_per_s
        assert all(took >= (index + 1) * message_s + SLOW.latency_s for index, took in enumerate(times))
        assert end - begin == pytest.approx(3 * message_s, rel=1e-3), "nothing rests between messages that are ready"
        assert begin < others_end and others_begin < end, "the other way does not wait"
