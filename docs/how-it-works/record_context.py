"""Records which rank of a ring computes which block of the causal mask when, in forward, into `context_parallel.csv`:

    torchrun --standalone --nproc_per_node=4 docs/how-it-works/record_context.py

`draw.py` draws it. Four ranks have no four cores on every machine. So a rank also pauses for each block, as long as the
block is large: a stand-in for a device of its own. What is sent, waited for and computed is real.
"""

import csv
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from context_parallel import ring as rings
from context_parallel.blocks import Mask, OnCPU
from context_parallel.layout import Block
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL, ZIGZAG

HERE = Path(__file__).parent
TOKENS, WHOLE_BLOCK_MS = 64, 100.0
"""Tokens of a rank; how long it pauses where all its queries see all keys of another rank."""
WAYS = CONTEXT_PARALLEL[:2]


class Recorded(rings.Ring):
    """A ring that is its own kernel, and knows when that ran for which block."""

    def __init__(self, group: dist.ProcessGroup, way: str, pause_ms: float) -> None:
        super().__init__(group, zigzag=way == ZIGZAG)
        self.way, self.blocks, self._pause_ms = way, [], pause_ms
        self._source, self._block = self.rank, Block(0, 0)

    def visible_block(self, source: int, *args: Any) -> tuple[Block, Mask] | None:
        found = super().visible_block(source, *args)
        if found:
            self._source, self._block = source, found[0]
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        made = OnCPU().forward(q, k, v, mask, scale)
        time.sleep(self._pause_ms / 1000 * q.shape[2] * k.shape[2] / TOKENS**2 * (0.5 if mask.causal else 1))
        mine, theirs = self.layout.of(self.rank), self.layout.of(self._source)
        unit = TOKENS // len(mine)
        queries, keys = mine[self._block.first_query // unit :], theirs[: self._block.keys // unit]
        self.blocks.append(
            {
                **{"way": self.way, "rank": self.rank, "keys_of": self._source},
                **{"query_chunks": " ".join(map(str, queries)), "key_chunks": " ".join(map(str, keys))},
                **{"start_ms": 1000 * start, "end_ms": 1000 * time.perf_counter()},
            }
        )
        return made


def recorded(way: str, pause_ms: float = WHOLE_BLOCK_MS) -> list[dict[str, Any]]:
    """The blocks of all ranks, in the order of ranks and of time, from the start of the first on. Collective."""
    group = dist.group.WORLD
    assert group is not None
    ring, everyone = Recorded(group, way, pause_ms), [[]] * dist.get_world_size()
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8, device="cpu", dtype=torch.float32)
    with patch.object(rings, "kernel_for", lambda q, has_bias: ring):
        for _ in range(2):  # connections are made in the first
            ring.blocks.clear()
            dist.barrier()
            rings.RingAttention.apply(q, k, v, None, ring, 1.0)
    dist.all_gather_object(everyone, ring.blocks)
    rows = [row for blocks in everyone for row in blocks]
    first = min(row["start_ms"] for row in rows)
    return [row | {name: round(row[name] - first, 1) for name in ("start_ms", "end_ms")} for row in rows]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rows = [row for way in WAYS for row in recorded(way)]
    if dist.get_rank() == 0:
        with (HERE / "context_parallel.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()
