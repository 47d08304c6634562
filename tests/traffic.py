"""Collectives counted at the process groups, what a strategy announces of them, and the bytes that really arrive."""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.distributed_c10d as c10d

from ddp_lab.collectives.kinds import ENDS, sent_share
from ddp_lab.runtime.watch.sequence import SIZED_BY_OUTPUT, described
from ddp_lab.strategy.batches import MicroBatch, StepData
from ddp_lab.strategy.strategy import Strategy

HOOK, CLIP = 41, 1.0
Totals = dict[tuple[str, int], tuple[int, int]]
"""Calls and bytes, by kind and group size."""


def add(totals: Totals, key: tuple[str, int], calls: int, nbytes: int) -> None:
    before = totals.get(key, (0, 0))
    totals[key] = before[0] + calls, before[1] + nbytes


def announced(strategy: Strategy, micro_batches: int, clips: bool = False) -> tuple[Totals, float | None]:
    """The announced collectives; and if they have no exact formula, the least bytes that a rank sends."""
    totals: Totals = {}
    traffic = strategy.expected_traffic(micro_batches, clips=clips)
    for part in (entry.issued for entry in traffic):
        add(totals, (part.kind, part.group_size), part.count, part.payload_bytes)
    return totals, sum(part.wire_bytes for part in traffic) if any(part.at_least for part in traffic) else None


def sent(issued: Totals) -> float:
    return sum(nbytes * sent_share(kind, size) for (kind, size), (_, nbytes) in issued.items())


@contextmanager
def counted() -> Iterator[Totals]:
    """Counts the collectives within this context, in all existing groups. Barriers do not count."""
    totals: Totals = {}
    groups = list({id(group): group for group in c10d._world.pg_map}.values())
    for group in groups:
        group.register_pre_hook(HOOK, partial(count, totals, group.size()))
    try:
        yield totals
    finally:
        for group in groups:
            group.unregister_pre_hook(HOOK)


def counted_step(strategy: Strategy, micro_batches: Sequence[MicroBatch]) -> Totals:
    """The collectives of an optimizer step with clipping, to the end of its communication."""
    strategy.steps.tell(StepData(0, micro_batches))
    with counted() as totals:
        strategy.zero_grad()
        strategy.forward_backward(micro_batches)
        strategy.clip_grad_norm_(CLIP)
        strategy.step()
        strategy.finish_parameter_synchronization()
    return totals


def count(totals: Totals, group_size: int, call: Any) -> None:
    tensors = call.input_tensors or call.output_tensors
    kind, _, _ = described(call.name, tensors[0].dtype if tensors else None)
    if kind and kind != "barrier":
        kind = "send_recv" if kind in ENDS else kind
        sent = call.output_tensors if kind in SIZED_BY_OUTPUT else tensors
        nbytes = sum(t.numel() * t.element_size() for t in sent) * (group_size if kind == "scatter" else 1)
        add(totals, (kind, group_size), 1, nbytes)


BYTES_RECEIVED = 128
"""Where `tcpi_bytes_received` is in Linux's `struct tcp_info` (include/uapi/linux/tcp.h), 8 bytes long."""


def received_over_tcp() -> int:
    """Bytes received over the TCP connections that this process has open, as Linux counts them."""
    nbytes = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed by now, or not of TCP
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as opened:
                    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                nbytes += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return nbytes
