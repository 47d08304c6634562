"""Costs of collectives from times that were measured with one number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.contracts import CollectiveCost
from planner.costs.volumes import volume
from training.communication.link_model import LinkModel

ALIKE = {"scatter": "broadcast"}
"""For a kind that was not measured, the kind that resembles it most. All others are computed from all-reduces."""


@dataclass(frozen=True)
class FittedCosts:
    """Costs of groups of another size, and of kinds that were not measured, are computed from those that were: latency
    by hops, transfer by bytes (`planner/costs/volumes.py`).

    Attributes:
        models: Seconds by payload bytes, for each kind that was measured; at least one.
        world_size: Ranks that the measurement had.
        link: Its name.
    """

    models: Mapping[str, LinkModel]
    backend: str
    world_size: int
    link: str

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        wanted = volume(kind, self.backend, len(ranks))
        if not wanted.hops:
            return CollectiveCost(0.0, 0.0, self.link)
        base = next(name for name in (kind, ALIKE.get(kind, kind), "all_reduce", *self.models) if name in self.models)
        measured = volume(base, self.backend, self.world_size)
        payload = payload_bytes * wanted.busiest / measured.busiest
        latency, transfer = parts(self.models[base], payload)
        return CollectiveCost(latency * wanted.hops / measured.hops, transfer, self.link, wanted.share)


def parts(model: LinkModel, payload_bytes: float) -> tuple[float, float]:
    """Seconds in which a collective leaves its link free, and in which it does not. The latter are at least what its
    bytes take at the rate of large payloads."""
    whole = float(model.seconds(payload_bytes))
    at_rate = payload_bytes * model.pieces[-1].seconds_per_byte
    transfer = min(whole, max(whole - float(model.seconds(0)), at_rate))
    return whole - transfer, transfer
