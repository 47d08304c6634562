"""What compute and collectives take from each other while both are under way: measured, kept in a file, looked up.

Every rank trains a small network for a while, then has all-reduces under way, then both at once. On CPU, Gloo's
threads and the ranks share the cores, so both get slower, and the less so the slower the link is, since threads that
wait for a link leave the cores alone. On CUDA, NCCL's kernels take a few of the multiprocessors and part of the
memory's rate. So a file holds one measurement for each rate of the link and number of ranks; between two rates it is
interpolated.

    torchrun --standalone --nproc_per_node=2 benchmarks/contention.py
    python scripts/link_lab.py --rate 1gbit -- benchmarks/contention.py

    contention = load("reports/collectives/contention.json", cluster)
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from planner.cluster import Cluster
from planner.contracts import Contention
from training.errors import UserError
from training.record import write_json
from training.stopwatch import Stopwatch
from training.synthetic import MLP

SCHEMA_VERSION = 1
PAYLOAD_BYTES = 16 * 2**20
DEPTH, WIDTH, SAMPLES = 4, 512, 64
"""Of the network: 1 M parameters; steps of a few milliseconds, and no processor's nearest caches hold them."""
FEWEST = 3
"""All-reduces under way, and steps, that a measurement has at least."""


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        link_bits_per_s: Of a shaped link; None where nothing limits it.
        compute: Duration of a step with all-reduces under way, over that of one alone.
        communication: Duration of an all-reduce while all ranks compute, over that of one alone.
        step_s, all_reduce_s: Alone.
        rounds: Measurements of all this; the factors are their medians.
        spread_pct: Half the range of the factors over rounds, in percent of them, the larger of the two.
    """

    world_size: int
    backend: str
    device: str
    link_bits_per_s: float | None
    compute: float
    communication: float
    step_s: float
    all_reduce_s: float
    rounds: int
    spread_pct: float
    host: str
    date: str

    @property
    def bytes_per_s(self) -> float:
        """What each rank sent while it did not compute: a ring's part of the payload."""
        return 2 * (self.world_size - 1) / self.world_size * PAYLOAD_BYTES / self.all_reduce_s


@dataclass(frozen=True)
class Round:
    """Seconds of a step and of an all-reduce, alone and while the other goes on."""

    step_s: float
    all_reduce_s: float
    step_beside_s: float
    all_reduce_beside_s: float

    @property
    def factors(self) -> tuple[float, float]:
        return self.step_beside_s / self.step_s, self.all_reduce_beside_s / self.all_reduce_s


def measure_rounds(device: torch.device, seconds: float = 1.0, rounds: int = 5) -> list[Round]:
    """Measure on all ranks of the default group; the mean over ranks. Collective.

    Args:
        seconds: How long each of the three parts of a round takes, about.
    """
    step = training_step(device)
    tensor = torch.ones(PAYLOAD_BYTES // 4, device=device)
    for _ in range(FEWEST):
        step()
        dist.all_reduce(tensor)
    counts = torch.tensor([seconds / timed(step, 1, device), seconds / timed_all_reduces(tensor, FEWEST, device)])
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    steps, calls = (max(FEWEST, int(count)) for count in counts)
    answer = []
    for _ in range(rounds):
        step_s = timed(step, steps, device)
        all_reduce_s = timed_all_reduces(tensor, calls, device)
        step_beside_s, all_reduce_beside_s = timed_together(step, tensor, calls, device)
        mine = torch.tensor([step_s, all_reduce_s, step_beside_s, all_reduce_beside_s], dtype=torch.float64)
        dist.all_reduce(mine)
        answer.append(Round(*(mine / dist.get_world_size()).tolist()))
    return answer


def training_step(device: torch.device) -> Callable[[], None]:
    """Forward, backward and optimizer of a small network, without communication."""
    model = MLP(DEPTH, WIDTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.ones(SAMPLES, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch, batch).loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of one of `count` steps that all ranks begin together."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    for _ in range(count):
        step()
    return stopwatch.seconds_since_first([begin, stopwatch.mark()])[1] / count


def timed_all_reduces(tensor: torch.Tensor, count: int, device: torch.device) -> float:
    """Seconds of one of `count` all-reduces that are all under way."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    for work in [dist.all_reduce(tensor, async_op=True) for _ in range(count)]:
        assert work is not None
        work.wait()
    tensor.fill_(1.0)
    return stopwatch.seconds_since_first([begin, stopwatch.mark()])[1] / count


def timed_together(
    step: Callable[[], None], tensor: torch.Tensor, calls: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a step, and of an all-reduce, while as many all-reduces are under way and steps follow one another."""
    dist.barrier()
    stopwatch = Stopwatch(device)
    begin = stopwatch.mark()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(calls)]
    steps, elapsed_s = 0, 0.0
    while not all(work is not None and work.is_completed() for work in works):
        step()
        elapsed_s = stopwatch.seconds_since_first([begin, stopwatch.mark()])[1]
        steps += 1
    for work in works:
        assert work is not None
        work.wait()
    tensor.fill_(1.0)
    return elapsed_s / max(steps, 1), elapsed_s / calls


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians, and the spread of the factors, as in `Measured`."""
    compute, communication = zip(*(each.factors for each in rounds), strict=True)
    spreads = [50 * (max(values) - min(values)) / median(values) for values in (compute, communication)]
    return {
        "compute": max(1.0, median(compute)),
        "communication": max(1.0, median(communication)),
        "step_s": median(each.step_s for each in rounds),
        "all_reduce_s": median(each.all_reduce_s for each in rounds),
        "rounds": len(rounds),
        "spread_pct": max(spreads),
    }


def keep(path: str | Path, measured: Measured) -> None:
    """Add a measurement to the file, in the place of an earlier one of the same ranks, device and link.

    Raises:
        UserError: the file holds something else, or cannot be written.
    """
    path = Path(path)
    earlier = read(path) if path.exists() else []
    same = (measured.world_size, measured.backend, measured.device, measured.link_bits_per_s)
    others = [each for each in earlier if (each.world_size, each.backend, each.device, each.link_bits_per_s) != same]
    content = {"schema_version": SCHEMA_VERSION, "what": "contention"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    write_json(path, {**content, "measured": [asdict(each) for each in (*others, measured)]})


def read(path: str | Path) -> list[Measured]:
    """Raises:
    UserError: the file cannot be read, or is none of contention.
    """
    try:
        content: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"cannot read measured contention from {path}: {reason}") from None
    try:
        if content["what"] != "contention" or content["schema_version"] != SCHEMA_VERSION:
            raise KeyError
        return [Measured(**each) for each in content["measured"]]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not a file of benchmarks/contention.py of this version") from None


def load(path: str | Path, cluster: Cluster) -> Contention:
    """The factors measured with as many ranks and the same backend: between two rates that all-reduces reached,
    interpolated by the logarithm of the rate of the cluster's link, beyond them those of the nearest.

    Raises:
        UserError: there is no such measurement, or the file is none.
    """
    mine = [each for each in read(path) if (each.world_size, each.backend) == (cluster.world_size, cluster.backend)]
    if not mine:
        raise UserError(
            f"{path}: holds no measurement over {cluster.backend} with {cluster.world_size} ranks; measure it with "
            f"torchrun --standalone --nproc_per_node={cluster.world_size} benchmarks/contention.py"
        )
    link = cluster.inside if cluster.between is None else cluster.between
    mine.sort(key=lambda each: each.bytes_per_s)
    asked, rates = log(link.bytes_per_s), [log(each.bytes_per_s) for each in mine]
    compute, communication = ([getattr(each, name) for each in mine] for name in ("compute", "communication"))
    return Contention(float(np.interp(asked, rates, compute)), float(np.interp(asked, rates, communication)))
