"""How fast a link is, as people write it: `1gbit`, `250mbit,50us`, or `none`."""

import re
from dataclasses import dataclass
from decimal import Decimal

from ddp_lab.runtime.errors import UserError

NONE = "none"
"""The machine as it is."""
UNITS = {"tbit": 10**12, "gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
"""Decimal units, as in `tc` and for network hardware."""
SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
LINK = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?bit)(?:,([0-9]+(?:\.[0-9]+)?)(us|ms|s))?")


@dataclass(frozen=True)
class SimulatedLink:
    """The link of one rank, `bits_per_s` in each direction at once. `latency_s`: one way, of each message."""

    bits_per_s: int
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "SimulatedLink | None":
        """The link that `text` names; None for `none`."""
        if text.lower() == NONE:
            return None
        parts = LINK.fullmatch(text.lower())
        bits_per_s = int(Decimal(parts[1]) * UNITS[parts[2]]) if parts else 0
        if parts is None or not bits_per_s:
            raise UserError(
                f"link '{text}': give a rate above 0 with its unit, and after a comma a latency if it has one, such as "
                f"1gbit or 250mbit,50us; or {NONE}"
            )
        return cls(bits_per_s, float(Decimal(parts[3] or 0) * SECONDS[parts[4] or "s"]))

    def __str__(self) -> str:
        unit, scale = next((unit, scale) for unit, scale in UNITS.items() if self.bits_per_s >= scale)
        rate = f"{self.bits_per_s / scale:.12g}{unit}"
        if not self.latency_s:
            return rate
        unit = next((unit for unit in reversed(SECONDS) if self.latency_s >= SECONDS[unit]), "us")
        return f"{rate},{self.latency_s / float(SECONDS[unit]):g}{unit}"


@dataclass(frozen=True)
class Nodes:
    """Nodes of `size` neighbouring ranks, of which each has a second link, which leads to the ranks of other nodes."""

    size: int
    link: SimulatedLink

    @classmethod
    def of(cls, count: int | None, outer_link: str | None, world_size: int) -> "Nodes | None":
        """What `--nodes` and `--outer-link` say; None if they say nothing."""
        link = SimulatedLink.parse(outer_link or NONE)
        if count is None or link is None:
            return None
        if world_size % count:
            raise UserError(f"--nodes {count}: {world_size} ranks do not divide into {count} nodes")
        return cls(world_size // count, link)

    def are_between(self, sender: int, receiver: int) -> bool:
        """Whether two ranks are on different nodes."""
        return sender // self.size != receiver // self.size


def canonical(text: str) -> str:
    """The one way to write a link: `1gbit` for `1000mbit`."""
    return str(SimulatedLink.parse(text) or NONE)
