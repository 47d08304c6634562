"""Costs of collectives from what `scripts/bench_collectives.py` measured and fitted (docs/csv-columns.md).

Between two measured sizes the time is on the straight line from one to the other: a link that is shaped, or whose
library changes algorithm, follows no single pair of latency and rate. Beyond them, the fit says how it goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from planner.cluster import Cluster, Link
from planner.contracts import CollectiveCost
from planner.hardware import calls_itself, is_of
from planner.volumes import MESSAGES, volume
from training.communication.link_model import LinkModel, Piece
from training.errors import UserError

SCHEMA_VERSION = 1
ALIKE = {
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "broadcast": ("scatter", "send_recv", "all_reduce"),
    "scatter": ("broadcast", "send_recv", "all_to_all", "all_reduce"),
    "gather": ("scatter", "broadcast", "send_recv", "all_to_all", "all_reduce"),
    "reduce": ("broadcast", "all_reduce"),
    "all_to_all": ("all_gather", "all_reduce"),
    **dict.fromkeys(MESSAGES, ("send_recv", "broadcast", "all_reduce")),
    "barrier": ("all_reduce",),
}
"""For a kind that was not measured, from which others it is reckoned, the first of them that was."""
TOGETHER = "sharding.all_gather"
"""Over Gloo: broadcasts from all ranks at once."""
ISSUED_BY_ALL = ("broadcast", "scatter")
"""Kinds of which the strategies have every rank issue one at the same time."""
SAME_RATE = 0.15
"""How far a link's rate may be from that of the measurement, headers and what a transfer gets of it included."""


class Model(Protocol):
    """Seconds of a collective by the bytes of its payload; more bytes never take less. The last of `pieces` says how
    long each byte of a large one takes."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
    def seconds(self, payload_bytes: float) -> Any: ...


def parts(model: Model, payload_bytes: float) -> tuple[float, float]:
    """Of the seconds that it takes, those in which its link is free, and those in which it is not: at least what its
    bytes take at the rate of large ones. What small ones take beyond that goes by in threads and queues, in which
    others find the link free.
    """
    whole = float(model.seconds(payload_bytes))
    at_rate = payload_bytes * model.pieces[-1].seconds_per_byte
    transfer = min(whole, max(whole - float(model.seconds(0)), at_rate))
    return whole - transfer, transfer


@dataclass(frozen=True)
class Measured:
    """Straight lines through measured times, from the fit's latency at 0 bytes; beyond them, at the fit's last rate.

    Attributes:
        sizes: Bytes, each larger than the one before.
        times: Seconds, none less than the one before.
    """

    sizes: tuple[float, ...]
    times: tuple[float, ...]
    fit: LinkModel

    @classmethod
    def of(cls, means: Mapping[float, float], fit: LinkModel) -> "Measured":
        """`means`: seconds by bytes. A larger payload that took less counts as taking as long."""
        sizes, seconds = zip(*sorted(means.items()), strict=True)
        return cls(sizes, tuple(np.maximum.accumulate(seconds).tolist()), fit)

    @property
    def pieces(self) -> Sequence[Piece]:
        return self.fit.pieces

    def seconds(self, payload_bytes: float) -> float:
        latency = min(float(self.fit.seconds(0)), self.times[0])
        inside = float(np.interp(payload_bytes, (0.0, *self.sizes), (latency, *self.times)))
        return inside + max(0.0, payload_bytes - self.sizes[-1]) * self.fit.pieces[-1].seconds_per_byte


@dataclass(frozen=True)
class FittedCosts:
    """Costs by models for one number of ranks; groups of another size, and kinds that were not measured, are reckoned
    from them by the hops and bytes of `planner/volumes.py`.

    Attributes:
        models: For each kind that was measured.
        world_size: Ranks that the measurement had.
        remarks: What a user should know of where these costs come from.
    """

    models: Mapping[str, Model]
    backend: str
    world_size: int
    link: str
    remarks: tuple[str, ...] = ()

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        asked = volume(kind, self.backend, len(ranks))
        if not asked.hops:
            return CollectiveCost(0.0, 0.0, self.link)
        base = next((other for other in (kind, *ALIKE.get(kind, ())) if other in self.models), None)
        if base is None:
            raise UserError(f"the measurement holds neither {kind} nor a collective that it could be reckoned from")
        measured, model = volume(base, self.backend, self.world_size), self.models[base]
        payload = payload_bytes * asked.busiest / measured.busiest
        latency, transfer = parts(model, payload)
        latency, share, idle = latency * asked.hops / measured.hops, asked.share, 0.0
        if base == "broadcast" and (per_byte := self._per_link_byte()) and transfer:
            share = min(1.0, payload_bytes * asked.busiest * asked.share * per_byte / transfer)
            if kind in ISSUED_BY_ALL and self.backend == "gloo" and len(ranks) == self.world_size:
                work, idle = self._beyond_bytes(payload, per_byte)
                latency += work
        return CollectiveCost(latency, transfer, self.link, share, idle)

    def _per_link_byte(self) -> float | None:
        """Seconds of a link, where nothing was faster than the large all-reduces, or broadcasts from all ranks at once,
        that were measured."""
        tree = volume("broadcast", self.backend, self.world_size)
        on_link = {
            "all_reduce": volume("all_reduce", self.backend, self.world_size).busiest,
            TOGETHER: tree.busiest * tree.share,
        }
        known = [
            self.models[kind].pieces[-1].seconds_per_byte / of for kind, of in on_link.items() if kind in self.models
        ]
        return min(known, default=None)

    def _beyond_bytes(self, payload: float, per_link_byte: float) -> tuple[float, float]:
        """What broadcasts from all ranks at once take beyond one alone, and beyond all their bytes: seconds that those
        of 0 bytes take as well, which are work of threads, and those that come with the size, in which they wait for
        each other, and links are free. The more are in flight, the less of the latter is left. A scatter's messages
        from a root to all others do as a broadcast's."""
        together, one = self.models.get(TOGETHER), self.models["broadcast"]
        if together is None:
            return 0.0, 0.0
        tree = volume("broadcast", self.backend, self.world_size)
        latency, transfer = parts(one, payload)
        bytes_s = self.world_size * payload * tree.busiest * tree.share * per_link_byte
        beyond = max(0.0, float(together.seconds(self.world_size * payload)) - latency - max(transfer, bytes_s))
        work = min(beyond, max(0.0, float(together.seconds(0) - one.seconds(0))))
        return work, beyond - work


def from_fits(path: str | Path, cluster: Cluster, scale: bool = False) -> FittedCosts:
    """Costs as measured with the cluster's backend, number of ranks and link.

    Args:
        scale: Whether a measurement with another number of ranks may be taken: latency by hops, bytes by what the
            busiest link carries. That ranks of one machine share its cores is not in that. And one of another device,
            as it is.

    Raises:
        UserError: the file cannot be read, is no such measurement, or one of something else than `cluster`.
    """
    content = read(path)
    of_messages = [fit for fit in content["fits"] if fit["collective"] in MESSAGES]
    fits = {fit["collective"]: fit for fit in (*reversed(content["fits"]), *of_messages) if is_usable(fit, content)}
    if not fits:
        raise UserError(f"{path}: no collective was measured at enough sizes to fit a cost")
    if content["backend"] != cluster.backend:
        raise UserError(f"{path}: measured over {content['backend']}, but {cluster.device.name} uses {cluster.backend}")
    link, remarks = cluster.inside if cluster.between is None else cluster.between, []
    there, here = content["device_name"], calls_itself(cluster.device)
    if not is_of(cluster.device, there):
        if not scale:
            raise UserError(
                f"{path}: measured on {there}, not on {here}; measure there, or have the measurement rescaled"
            )
        remarks.append(f"collectives were measured on {there}, not on {here}, and are taken as they are")
    require_rate(path, content.get("link_bits_per_s"), link)
    measured_ranks = content["world_size"]
    if measured_ranks < 2:
        raise UserError(f"{path}: measured with one rank, which sends nothing; measure with {cluster.world_size}")
    if measured_ranks != cluster.world_size:
        if not scale:
            raise UserError(
                f"{path}: measured with {measured_ranks} ranks, but the cluster has {cluster.world_size}; measure with "
                "as many, or have the measurement scaled by hops and bytes"
            )
        remarks.append(
            f"collectives were measured with {measured_ranks} ranks and are scaled to {cluster.world_size} by the hops "
            "and bytes of their algorithms"
        )
    models = {kind: LinkModel(tuple(Piece(**piece) for piece in fit["pieces"])) for kind, fit in fits.items()}
    times = {kind: mean_seconds(content["rows"], fit) for kind, fit in fits.items()}
    all_models = {kind: Measured.of(times[kind], model) if times[kind] else model for kind, model in models.items()}
    return FittedCosts(all_models, cluster.backend, measured_ranks, link.name, tuple(remarks))


def read(path: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"cannot read measured collectives from {path}: {reason}") from None
    needed = {"fits", "rows", "world_size", "backend", "device_name"}
    if not isinstance(content, dict) or not needed <= content.keys() or content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: not a file of scripts/bench_collectives.py of this version")
    return content


def mean_seconds(rows: Sequence[Mapping[str, Any]], fit: Mapping[str, Any]) -> dict[float, float]:
    """By payload bytes, of the rows that `fit` is of, those between single pairs of ranks left out. What many calls of
    a step take is their mean times their number, however the calls vary."""
    return {
        row["size_bytes"]: row["time_us"] * 1e-6
        for row in rows
        if (row["collective"], row["type"], row["from_rank"]) == (fit["collective"], fit["type"], None)
        and row["size_bytes"]
    }


def is_usable(fit: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether it is of float32, or of the only type that was measured."""
    types = {other["type"] for other in content["fits"] if other["collective"] == fit["collective"]}
    return fit["type"] == "fp32" or "fp32" not in types


def require_rate(path: str | Path, bits_per_s: int | None, link: Link) -> None:
    if bits_per_s is not None and not isclose(bits_per_s / 8, link.bytes_per_s, rel_tol=SAME_RATE):
        raise UserError(
            f"{path}: measured on a link of {bits_per_s / 1e9:g} Gbit/s, but {link.name} carries "
            f"{link.bytes_per_s * 8 / 1e9:g} Gbit/s; measure at that rate"
        )
