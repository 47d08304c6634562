"""An all-reduce between every pair of ranks, measured in processes of its own, or as a rank under torchrun.

Pairs are measured one after the other, while all other ranks wait, since pairs that share a link slow each other down.
"""

import datetime
import os
import statistics
import time
from collections.abc import Iterator
from itertools import combinations
from multiprocessing.connection import Connection, wait
from typing import Any

from ddp_lab.doctor.live.results import Pair
from ddp_lab.doctor.reading.texts import ranks_in_words

WARMUP, ITERATIONS = 2, 5
START_TIMEOUT_S = 120
"""Time in which all processes must import torch and join."""


class MeasureError(Exception):
    """The ranks could not be started at all; the message says why."""


def measure_here(ranks: int, device: str, size_bytes: int, timeout_s: float) -> list[Pair]:
    """Start `ranks` processes on this machine and measure each pair. A pair that hangs costs `timeout_s` seconds.

    Raises:
        MeasureError: the processes do not start.
    """
    from torch.multiprocessing import get_context

    from ddp_lab.runtime.process.loopback import LOOPBACK, LoopbackStore

    store = LoopbackStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    context = get_context("spawn")
    processes, ours = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, ranks, store.port, device, size_bytes, timeout_s)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ours.append(mine)
    try:
        return _collect(ours, ranks, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(connections: list[Connection], ranks: int, timeout_s: float) -> list[Pair]:
    """Each pair's time, as the lower of its ranks reports it. When no more reports come, the next pair has failed."""
    times: dict[tuple[int, int], float] = {}
    problem = "no answer within the timeout"
    open_connections = list(connections)
    here: set[int] = set()
    has_begun = False
    deadline = time.monotonic() + START_TIMEOUT_S
    while open_connections and (left := deadline - time.monotonic()) > 0:
        for connection in wait(open_connections, timeout=left):
            assert isinstance(connection, Connection)
            try:
                what, pair, value = connection.recv()
            except (EOFError, ConnectionResetError):
                open_connections.remove(connection)
                continue
            if what == "here":
                here.add(value)
                continue
            deadline = time.monotonic() + 2 * timeout_s
            has_begun |= what == "begin"
            if what == "time":
                times[pair] = value
            elif what == "failed":
                problem, deadline = value, min(deadline, time.monotonic() + 1)
    if not times and not has_begun:
        silent = set(range(ranks)) - here
        who = f"; {ranks_in_words(silent)} never answered" if silent else ""
        raise MeasureError(f"the {ranks} processes did not start: {problem}{who}")
    order = list(combinations(range(ranks), 2))
    failed = next((pair for pair in order if pair not in times), None)
    return [Pair(pair, times.get(pair), problem if pair == failed else "") for pair in order]


def _serve(
    connection: Connection, rank: int, ranks: int, port: int, device: str, size_bytes: int, timeout_s: float
) -> None:
    """Body of a process of `measure_here`."""
    import torch.distributed as dist

    from ddp_lab.runtime.groups import host_barrier

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        connection.send(("here", None, rank))
        store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=START_TIMEOUT_S))
        _join(device, store=store, rank=rank, world_size=ranks)
        for pair, seconds in _measure(rank, ranks, device, size_bytes, timeout_s, connection):
            connection.send(("time", pair, seconds * 1e3))
        host_barrier()
    except Exception as error:  # the parent must know of any error
        connection.send(("failed", None, str(error).splitlines()[0][:200]))


def measure_under_torchrun(device: str, size_bytes: int, timeout_s: float) -> list[Pair]:
    """Measure as one of the ranks that torchrun started. Every rank gets the whole list. Collective.

    Raises:
        MeasureError: a pair failed, or did not end in time.
    """
    import torch.distributed as dist

    _join(device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: dict[tuple[int, int], float] = {}
    pair: tuple[int, int] | None = None
    try:
        for pair, seconds in _measure(rank, ranks, device, size_bytes, timeout_s, None):
            own[pair] = seconds * 1e3
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, (own, os.uname().nodename))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise MeasureError(f"rank {rank}, after ranks {pair or 'none'}: {reason}") from None
    finally:
        dist.destroy_process_group()
    times = {pair: time_ms for of_rank, _ in gathered for pair, time_ms in of_rank.items()}
    hosts = [host for _, host in gathered]
    return [Pair((a, b), times[a, b], across_hosts=hosts[a] != hosts[b]) for a, b in combinations(range(ranks), 2)]


def _join(device: str, **where: Any) -> None:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=START_TIMEOUT_S), **where)


def _measure(
    rank: int, ranks: int, device: str, size_bytes: int, timeout_s: float, connection: Connection | None
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield each pair in which this rank is the lower, with the median seconds of an all-reduce. Collective."""
    import torch
    import torch.distributed as dist

    from ddp_lab.runtime.groups import host_barrier

    data = torch.ones(max(1, size_bytes // 4), device=device)
    for pair in combinations(range(ranks), 2):
        group = dist.new_group(list(pair), timeout=datetime.timedelta(seconds=timeout_s))
        if rank in pair and isinstance(group, dist.ProcessGroup):
            if connection and rank == pair[0]:
                connection.send(("begin", pair, None))
            times = []
            for _ in range(WARMUP + ITERATIONS):
                start = time.perf_counter()
                dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            if rank == pair[0]:
                yield pair, statistics.median(times[WARMUP:])
            dist.destroy_process_group(group)
        host_barrier()  # the next pair must have the links to itself
