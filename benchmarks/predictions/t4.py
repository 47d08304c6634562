"""The published table of two T4s over NCCL, predicted from its own compute time and its own all-reduces.

Of a naive step of 1406.7 ms, 498 were communication; the other 908.7 ms are taken as compute of every row. The runner's
own strategies run on tensors without data, with a T4's roofline multiplied by the one factor that makes their compute
908.7 ms, and all-reduces interpolated between the three published ones (10, 100, 1024 MB).

Assumed, since the table does not say:
- MB are 2^20 bytes. Below 10 MB, all-reduces follow the line through 10 and 100 MB.
- The model: `transformer-medium` (423 M parameters), the only workload of the runner with gradients of a size that fits
  the published times. The batch: 1024 tokens, for which a T4's roofline is within 30 % of that compute time.
- The optimizer: AdamW, fused, as the runner's.

These figures do not say how much matrix products and NCCL's kernels slow each other down on a T4, where both need the
same 40 multiprocessors. So there are two tables: one without that, and one with the factor that plans assume.
"""

import argparse

import numpy as np
import torch

from benchmarks.predictions.held import Held, finish
from ddp_lab.planner.contracts import CollectiveCost, Costs, Setting, Simulated
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Cluster, Device, Link
from ddp_lab.planner.runs import module_maker
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.config import RunConfig
from ddp_lab.strategy.options import AUTO

MB = 2**20
COMPUTE_S = (1406.7 - 498.0) / 1e3
ALL_REDUCE_MS = {10: 2.7, 100: 26.2, 1024: 268.5}  # by payload in MB
TOKENS = 1024
T4 = hardware.device("T4")
ROWS: dict[str, tuple[float, str, float | str]] = {
    "naive": (1406.7, "simple_ddp", AUTO),
    "flat": (1365.2, "flat_ddp", AUTO),
    "overlap": (1075.7, "simple_ddp_async", AUTO),
    "buckets of 1 MB": (1093, "bucket_ddp_async", 1),
    "buckets of 10 MB": (1120, "bucket_ddp_async", 10),
    "buckets of 100 MB": (1213, "bucket_ddp_async", 100),
    "buckets of 1000 MB": (1360, "bucket_ddp_async", 1000),
}
"""The published milliseconds of a step, the choice that corresponds, and its `bucket_cap_mb`."""


def run(options: argparse.Namespace) -> None:
    """Print both tables.

    Raises:
        UserError: the file cannot be written.
    """
    factor = slowness()
    print(f"compute {COMPUTE_S * 1e3:.1f} ms: the roofline of a T4 for {TOKENS} tokens, times {factor:.3f}")
    factors = (1.0, hardware.table()["contention"]["cuda"]["compute"])
    finish([held for contention in factors for held in predictions(T4.slowed(factor), contention)], options.csv)


def slowness() -> float:
    """By which a T4's roofline gives the published compute."""
    return COMPUTE_S / simulated("naive", T4).compute_s


def predictions(device: Device, contention: float) -> list[Held]:
    where = f"2 x T4, compute x {contention:.2f} beside collectives"
    steps = {name: 1e3 * simulated(name, device, contention).step_time_s for name in ROWS}
    return [(where, name, "step", "ms", step_ms, ROWS[name][0]) for name, step_ms in steps.items()]


def simulated(name: str, device: Device, contention: float = 1.0) -> Simulated:
    _, choice, cap_mb = ROWS[name]
    config = RunConfig.of(workload="transformer-medium", choice=choice, bucket_cap_mb=cap_mb)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    one = Setting(config, module_maker(config), lambda: [{"input_ids": ids, "labels": ids.clone()}])
    cluster = Cluster(device, 1, 2, Link("2 x T4", 0.0, 4e9))
    return simulate(one, cluster, Costs(device, Published(), contention))


class Published:
    """All-reduces as published: lines through neighbouring sizes. Nothing else of a step counts."""

    SIZES, SECONDS = np.array(list(ALL_REDUCE_MS)) * MB, np.array(list(ALL_REDUCE_MS.values())) / 1e3
    LATENCY_S = float(SECONDS[0] - SIZES[0] * (SECONDS[1] - SECONDS[0]) / (SIZES[1] - SIZES[0]))

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        seconds = np.interp(payload_bytes, [0, *self.SIZES], [self.LATENCY_S, *self.SECONDS])
        return CollectiveCost(self.LATENCY_S, float(seconds) - self.LATENCY_S, "2 x T4")
