"""What compute and collectives take from each other while both are under way: kept in a file, looked up.

Every rank trains a small network for a while, then has all-reduces under way, then one after another, then steps and
all-reduces at once. On CPU, Gloo's
threads and the ranks share the cores, so both get slower: the less so the slower the link is, since threads that wait
for a link leave the cores alone, and the more so the smaller the messages are, since each has work of its own. On CUDA,
NCCL's kernels take a few of the multiprocessors and part of the memory's rate. So a file holds one measurement for each
number of ranks, rate of the link and payload; between two rates, and two payloads, it is interpolated. Beside that it
keeps how far ranks drift apart while they compute.

    torchrun --standalone --nproc_per_node=2 benchmarks/contention.py
    python scripts/link_lab.py --rate 1gbit -- benchmarks/contention.py

    contention = load("reports/collectives/contention.json", cluster)
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from planner.cluster import Cluster
from planner.contracts import Contention
from planner.hardware import calls_itself, is_of
from training.errors import UserError
from training.records.record import write_json

SCHEMA_VERSION = 5


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        device_name: Of the processor or the GPU, as it calls itself.
        link_bits_per_s: Of a shaped link; None where nothing limits it.
        payload_bytes: Of each all-reduce.
        compute: Duration of a step with all-reduces under way, over that of one alone.
        communication: Duration of one of many all-reduces under way while all ranks compute, over that without.
        together: Duration of one of many all-reduces under way, over that of one that is waited for before the next.
        step_s, all_reduce_s: A step, and one of many all-reduces under way, each without the other.
        hand_over_s: Until an asynchronous all-reduce has been handed over in backward, on average. A thread
            that begins it may take the core from the one that hands it over.
        drift: How far ranks drift apart while they compute, as in `planner.contracts.Contention`; on CUDA 0.
        rounds: Measurements of all this; the factors are their medians.
        spread_pct: Half the range of the factors over rounds, in percent of them, the larger of the two.
    """

    world_size: int
    backend: str
    device: str
    device_name: str
    link_bits_per_s: float | None
    payload_bytes: int
    compute: float
    communication: float
    together: float
    step_s: float
    all_reduce_s: float
    hand_over_s: float
    drift: float
    rounds: int
    spread_pct: float
    host: str
    date: str

    @property
    def where(self) -> tuple[object, ...]:
        """What a file holds one measurement for."""
        return self.world_size, self.backend, self.device_name, self.link_bits_per_s, self.payload_bytes

    @property
    def bytes_per_s(self) -> float:
        """What each rank sent while it did not compute: a ring's part of the payload."""
        return 2 * (self.world_size - 1) / self.world_size * self.payload_bytes / self.all_reduce_s


def keep(path: str | Path, measured: Measured) -> None:
    """Add a measurement to the file, in the place of an earlier one of the same ranks, device, link and payload.

    Raises:
        UserError: the file holds something else, or cannot be written.
    """
    path = Path(path)
    earlier = read(path) if path.exists() else []
    others = [each for each in earlier if each.where != measured.where]
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


@dataclass(frozen=True)
class ByPayload:
    """Contention beside collectives of some payloads, by the logarithm of their bytes; beyond them the nearest's."""

    payloads: tuple[int, ...]
    contention: tuple[Contention, ...]

    def beside(self, payload_bytes: float) -> Contention:
        return interpolated(payload_bytes, dict(zip(self.payloads, self.contention, strict=True)))


def load(path: str | Path, cluster: Cluster) -> ByPayload:
    """What was measured with as many ranks and the same backend: between two rates that all-reduces reached,
    interpolated by the logarithm of the rate of the cluster's link, beyond them that of the nearest. On CUDA the host
    hands over while the device computes, which takes nothing from it. Where more ranks than cores share this machine,
    `most_late_of` says how far they can drift apart.

    Raises:
        UserError: there is no such measurement, or the file is none.
    """
    asked, device = (cluster.world_size, cluster.backend), cluster.device
    fitting = [each for each in read(path) if (each.world_size, each.backend) == asked]
    mine = [each for each in fitting if is_of(device, each.device_name)]
    if fitting and not mine:
        raise UserError(f"{path}: measured on {fitting[0].device_name}, not on {calls_itself(device)}; measure there")
    if not mine:
        raise UserError(
            f"{path}: holds no measurement over {cluster.backend} with {cluster.world_size} ranks; measure it with "
            f"torchrun --standalone --nproc_per_node={cluster.world_size} benchmarks/contention.py"
        )
    link = cluster.inside if cluster.between is None else cluster.between
    is_cuda = device.kind == "cuda"
    most_late = most_late_of(cluster.world_size, os.cpu_count() or 1)
    reached = {rate: max(each.bytes_per_s for each in mine if each.link_bits_per_s == rate) for rate in rates_of(mine)}
    found = {}
    for payload, same in groupby(sorted(mine, key=lambda each: each.payload_bytes), lambda each: each.payload_bytes):
        by_rate = {
            reached[each.link_bits_per_s]: Contention(
                each.compute,
                each.communication,
                0.0 if is_cuda else each.hand_over_s,
                each.drift,
                each.together,
                most_late,
            )
            for each in same
        }
        found[payload] = interpolated(link.bytes_per_s, by_rate)
    return ByPayload(tuple(found), tuple(found.values()))


def most_late_of(ranks: int, cores: int) -> float:
    """How far behind the average rank the last is assumed to be at most, as a share of what the average one took, where
    ranks take turns on cores. If some run to their end before others begin, they end after 1, 2, ... times what one
    takes, as many of them at once as there are cores. (If all run side by side, all end together.) With a core for
    each rank: by as much again, 1.
    """
    if ranks <= cores:
        return 1.0
    ends = [1 + rank // cores for rank in range(ranks)]
    return ends[-1] / mean(ends) - 1


def rates_of(measured: Sequence[Measured]) -> set[float | None]:
    return {each.link_bits_per_s for each in measured}


def interpolated(at: float, known: Mapping[float, Contention]) -> Contention:
    """Each field by the logarithm of what it is known for."""
    points = sorted(known)
    where = np.interp(log(max(at, points[0])), [log(point) for point in points], range(len(points)))
    columns = ([getattr(known[point], field.name) for point in points] for field in fields(Contention))
    return Contention(*(float(np.interp(where, range(len(points)), column)) for column in columns))
