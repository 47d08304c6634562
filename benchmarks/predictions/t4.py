"""The published table of two T4s over NCCL, predicted from its own compute time and its own all-reduces.

Of a naive step of 1406.7 ms, 498 were communication; the other 908.7 ms are taken as compute of every row. The runner's
own strategies run on tensors without data, with a T4's roofline multiplied by the one factor that makes their compute
908.7 ms, and all-reduces interpolated between the three published ones (10, 100, 1024 MB).

Assumed, since the table does not say:
- MB are 2^20 bytes.
- Below 10 MB an all-reduce goes on along the line through 10 and 100 MB, down to its latency of 0.09 ms; small messages
  may be faster (NCCL's LL protocol) or slower.
- The model: `consistent_workloads` says which of the runner's have gradients that fit the figures. Only
  `transformer-medium` (423 M parameters) does: 24 blocks of 1024/4096, 10,000 tokens. `mlp` of 40 x 4096 does not, as
  671 M parameters alone take 671 ms on this link.
- The batch: 1024 tokens, for which a T4's roofline comes within 30 % of that compute time.
- The optimizer: AdamW, fused, as the runner's. A slower one would make forward and backward shorter.

One thing cannot come from these figures: what matrix products and NCCL's kernels take from each other on a T4, where
both want the same 40 multiprocessors. So there are two tables: one without any, and one with a factor on communication
beside compute that the row `overlap` alone determines; that row counts in no figure then.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks.predictions.held import Held
from planner import costs, hardware
from planner.cluster import Cluster, Link
from planner.contracts import CollectiveCost, Contention, OperatorCosts, Setting, Simulated
from planner.plan import adamw
from planner.simulate import simulate
from training.communication.link_model import LinkModel, Piece
from training.config import AUTO, RunConfig, StrategyOptions
from training.data.synthetic import TRANSFORMER_SHAPES, VOCABULARY
from training.strategy import MicroBatch

MB = 2**20
NAIVE_MS, NAIVE_COMMUNICATION_MS = 1406.7, 498.0
COMPUTE_S = (NAIVE_MS - NAIVE_COMMUNICATION_MS) / 1e3
ALL_REDUCE_MS = {10: 2.7, 100: 26.2, 1024: 268.5}
"""By payload in MB."""
WORKLOAD = "transformer-medium"
CALIBRATES = "overlap"
SETTING = "2 x T4"


@dataclass(frozen=True)
class Row:
    """One published step. `cap_mb`: of buckets."""

    name: str
    choice: str
    measured_ms: float
    cap_mb: float | str = AUTO


ROWS = (
    Row("naive", "simple_ddp", NAIVE_MS),
    Row("flat", "flat_ddp", 1365.2),
    Row("overlap", "simple_ddp_async", 1075.7),
    Row("buckets of 1 MB", "bucket_ddp_async", 1093, 1),
    Row("buckets of 10 MB", "bucket_ddp_async", 1120, 10),
    Row("buckets of 100 MB", "bucket_ddp_async", 1213, 100),
    Row("buckets of 1000 MB", "bucket_ddp_async", 1360, 1000),
)


def all_reduce_model() -> LinkModel:
    """Lines through neighbouring published all-reduces; the first goes on below 10 MB."""
    points = [(size * MB, ms / 1e3) for size, ms in ALL_REDUCE_MS.items()]
    pieces = []
    for index, ((low, early), (high, late)) in enumerate(pairwise(points)):
        slope = (late - early) / (high - low)
        latency = early - slope * low
        pieces.append((low if index else 0.0, latency, slope))
    # A line between large sizes meets 0 bytes below 0 s, where a latency cannot be: it starts from the point before.
    return LinkModel(tuple(Piece(start, max(latency, 0.0), slope) for start, latency, slope in pieces))


@dataclass(frozen=True)
class Published:
    """Collectives that take what the table says; only all-reduces of a step matter."""

    model: LinkModel

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        latency = float(self.model.seconds(0))
        return CollectiveCost(latency, float(self.model.seconds(payload_bytes)) - latency, SETTING)


def gradient_bytes(workload: str) -> int:
    """Of one of the runner's synthetic workloads, fp32; of transformers as `Blocks` has them."""
    if workload == "mlp":
        config = RunConfig()
        return 4 * config.depth * config.width**2
    d_model, d_ff, layers, _ = TRANSFORMER_SHAPES[workload]
    block = 4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model
    return 4 * (2 * VOCABULARY * d_model + layers * block + d_model)


def consistent_workloads() -> dict[str, tuple[int, float, bool]]:
    """Each synthetic workload with its gradients' bytes, the milliseconds of one all-reduce of them, and whether that
    fits: no longer than what `flat` takes beyond compute, and at least half of it."""
    most_ms = ROWS[1].measured_ms - COMPUTE_S * 1e3
    model, answer = all_reduce_model(), {}
    for workload in ("mlp", *TRANSFORMER_SHAPES):
        size = gradient_bytes(workload)
        ms = 1e3 * float(model.seconds(size))
        answer[workload] = (size, ms, most_ms / 2 <= ms <= most_ms)
    return answer


class Blocks(nn.Module):
    """The parameters of a Llama of this shape, in its order, each used as there. Attention itself, 1 % of the flops at
    128 tokens, is left out, and with it most operators that take no time: the simulation takes a fraction of that of
    the model itself.
    """

    def __init__(self, d_model: int, d_ff: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.layers = nn.ModuleList(Block(d_model, d_ff) for _ in range(layers))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, tokens))


class Block(nn.Module):
    """One of `Blocks`."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.before_attention, self.before_mlp = nn.RMSNorm(d_model), nn.RMSNorm(d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.before_attention(hidden)
        hidden = hidden + self.output(self.query(normed) + self.key(normed) + self.value(normed))
        normed = self.before_mlp(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def build_published() -> nn.Module:
    return Blocks(*TRANSFORMER_SHAPES[WORKLOAD][:3])


def token_batch(tokens: int = 1024) -> list[MicroBatch]:
    """One micro-batch."""
    return [{"tokens": torch.zeros(tokens, dtype=torch.long)}]


@dataclass(frozen=True)
class Reckoning:
    """What all rows have in common.

    Attributes:
        make_module, make_micro_batches: As `planner.contracts.Setting` has them.
        operators: Scaled to the published compute time.
        factor: By which the roofline was multiplied.
    """

    cluster: Cluster
    make_module: Callable[[], nn.Module]
    make_micro_batches: Callable[[], Sequence[MicroBatch]]
    operators: OperatorCosts
    factor: float

    def simulated(self, row: Row, contention: Contention) -> Simulated:
        setting = self._setting(row)
        return simulate(setting, self.cluster, self.operators, Published(all_reduce_model()), contention)

    def _setting(self, row: Row) -> Setting:
        options = StrategyOptions(bucket_cap_mb=row.cap_mb)
        return Setting(row.choice, self.make_module, self.make_micro_batches, adamw, options)


def reckoning(
    make_module: Callable[[], nn.Module] = build_published,
    make_micro_batches: Callable[[], Sequence[MicroBatch]] = token_batch,
) -> Reckoning:
    """With the one factor that makes the naive step's compute what was published."""
    cluster = Cluster(hardware.device("T4"), 1, 2, Link(SETTING, 0.0, 4e9))
    plain = Reckoning(cluster, make_module, make_micro_batches, costs.roofline(cluster.device), 1.0)
    factor = COMPUTE_S / plain.simulated(ROWS[0], Contention()).compute_s
    return replace(plain, operators=costs.Scaled(plain.operators, factor), factor=factor)


def held(reckoned: Reckoning, contention: Contention, calibrates: str = "", rows: Sequence[Row] = ROWS) -> list[Held]:
    """Every row, predicted. `calibrates`: name of the one from which `contention` was taken."""
    answer = []
    for row in rows:
        predicted = 1e3 * reckoned.simulated(row, contention).step_time_s
        answer.append(Held(SETTING, row.name, "step", "ms", predicted, row.measured_ms, row.name == calibrates))
        print(f"{row.name}: {predicted:.1f} ms, published {row.measured_ms:.1f}", file=sys.stderr, flush=True)
    return answer


def fitted_contention(reckoned: Reckoning, steps: int = 6, close: float = 2e-3) -> Contention:
    """The factor on communication beside compute with which the row `CALIBRATES` comes out as published.

    Args:
        steps: Of the secant method at most.
        close: Relative error at which it is good enough.
    """
    row = next(row for row in ROWS if row.name == CALIBRATES)

    def time_ms(factor: float) -> float:
        return reckoned.simulated(row, Contention(communication=factor)).step_time_s * 1e3

    before, factor = 1.0, 2.0
    earlier, time = time_ms(before), time_ms(factor)
    for _ in range(steps):
        if abs(time / row.measured_ms - 1) < close or time == earlier:
            break
        step = (row.measured_ms - time) * (factor - before) / (time - earlier)
        before, earlier, factor = factor, time, max(1.0, factor + step)
        time = time_ms(factor)
    return Contention(communication=factor)
