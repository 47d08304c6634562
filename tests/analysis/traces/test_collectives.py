"""Collectives read back from traces that real ranks made: kind, number and bytes, with several under way at once."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddp_lab.analysis.traces.gloo import gloo_collectives
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traces import event, parsed

Rows = list[tuple[str, float]]


def profiled(body: Callable[[int, int], None]) -> Rows:
    """Kind and bytes of each collective that `body(rank, size)` issued, in the order in which it did."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with (
        recorded_collectives(FlightRecorder.create(rank)),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        body(rank, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        calls = gloo_collectives(read_trace(path).events, size)[0]
    assert (calls["end"] >= calls["start"]).all() and (calls["start"] >= calls["issued"]).all()
    return list(zip(calls["kind"], calls["bytes"], strict=True))


def scatters_of(rank: int, size: int, share: int, dtype: torch.dtype) -> list[Any]:
    """A reduce-scatter as Gloo does it here: a scatter from each rank, none of them awaited."""
    parts = list(torch.ones(size, share, dtype=dtype).unbind())
    return [
        dist.scatter(torch.empty(share, dtype=dtype), parts if root == rank else None, group_src=root, async_op=True)
        for root in range(size)
    ]


def scatters(rank: int, size: int):
    """Large and small, fp32 and fp64, of equal and of different lengths, all in flight together."""
    works = [
        *scatters_of(rank, size, 5000, torch.float32),
        *scatters_of(rank, size, 3, torch.float32),
        *scatters_of(rank, size, 3, torch.float64),
        *scatters_of(rank, size, 7, torch.bfloat16),
    ]
    for work in works:
        work.wait()


def reductions_and_broadcasts(rank: int, size: int):
    works = [
        dist.reduce(torch.ones(elements), dst=elements % size, async_op=True) for elements in (1000, 4, 4, 9, 1000)
    ]
    works += [dist.broadcast(torch.ones(elements), src=elements % size, async_op=True) for elements in (8, 2000, 8)]
    for work in works:
        work.wait()


def messages(rank: int, size: int):
    """To the next rank and from the one before, two of each in flight."""
    after, before = (rank + 1) % size, (rank - 1) % size
    works = []
    for elements in (77, 5):
        works.append(dist.isend(torch.ones(elements), after))
        works.append(dist.irecv(torch.empty(elements), before))
    for work in works:
        work.wait()


def coalesced_and_lists(rank: int, size: int):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(torch.empty(5 * size), torch.ones(5))
        dist.all_gather_into_tensor(torch.empty(7 * size), torch.ones(7))
    manager.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * size))
        dist.reduce_scatter_tensor(torch.empty(7), torch.ones(7 * size))
    manager.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(6))
    manager.wait()
    dist.reduce_scatter(torch.empty(5), [torch.ones(5) for _ in range(size)])
    dist.all_gather([torch.empty(4) for _ in range(size)], torch.ones(4))
    dist.gather(torch.ones(3), [torch.empty(3) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
    dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size))
    dist.barrier()


SIZE = 3
EXPECTED: dict[Callable[[int, int], None], Rows] = {
    scatters: [
        ("scatter", SIZE * share * item)  # the whole tensor, also on ranks that only receive from it
        for share, item in [(5000, 4), (3, 4), (3, 8), (7, 2)]
        for _ in range(SIZE)
    ],
    reductions_and_broadcasts: [("reduce", 4 * n) for n in (1000, 4, 4, 9, 1000)]
    + [("broadcast", 4 * n) for n in (8, 2000, 8)],
    messages: [("send_recv", 4 * elements) for elements in (77, 77, 5, 5)],
    coalesced_and_lists: [
        ("all_gather", 4 * 12 * SIZE),
        ("reduce_scatter", 4 * 12 * SIZE),
        ("all_reduce", 4 * 11),
        ("reduce_scatter", 4 * 5 * SIZE),
        ("all_gather", 4 * 4 * SIZE),
        ("gather", 4 * 3 * SIZE),
        ("reduce_scatter", 4 * 2 * SIZE),
        ("all_to_all", 4 * 2 * SIZE),
        ("barrier", 0),
    ],
}


@each_row(("body", "expected"), EXPECTED.items())
def test_what_real_ranks_issue_is_read_back(ranks: RankPool, body, expected):
    assert ranks.run(SIZE, profiled, body) == [expected] * SIZE


def test_a_span_from_before_the_window_goes_to_no_later_call():
    """An all-gather issued in the step before still runs when the window begins."""
    shape = {"Input Dims": [[5]], "Input type": ["float"]}
    events = [
        event("user_annotation", "gloo:all_gather", 0, 10, 2, **shape),
        event("cpu_op", "c10d::_allgather_base_", 20, 1, **{"Input Dims": [[10], [5], [], [], []]}),
        event("user_annotation", "gloo:all_gather", 22, 4, 2, **shape),
    ]
    calls = gloo_collectives(parsed(*events).events, world_size=2)[0]
    assert calls[["start", "end", "bytes"]].to_numpy().tolist() == [[22, 26, 40]]


def test_a_call_is_not_of_the_thread_of_another_group():
    """Both groups reduce as many elements. The thread of dp starts last, and its all-gather tells whose it is."""
    events, data, tensor = [], "in ranks 0,2, dp", "in ranks 0,1, tp"
    for start, operator, kind, group in (
        (0, "_allgather_base_", "all_gather", data),
        (10, "allreduce_", "all_reduce", data),
        (20, "allreduce_", "all_reduce", tensor),
    ):
        events.append(event("cpu_op", f"c10d::{operator}", start, 5, **{"Input Dims": [[5], [5], [], [], []]}))
        events.append(event("user_annotation", f"issued {kind} #1 of 5 float32 {group}", start + 1, 1))
    for start, kind, thread in ((6, "all_gather", 2), (30, "all_reduce", 3), (40, "all_reduce", 2)):
        shape = {"Input Dims": [[5]], "Input type": ["float"]}
        events.append(event("user_annotation", f"gloo:{kind}", start, 4, thread, **shape))
    calls = gloo_collectives(parsed(*sorted(events, key=lambda span: span["ts"])).events, world_size=4)[0]
    assert calls["start"].tolist() == [6, 40, 30]
