"""Rates of links as people write them: `250mbit`, `1gbit`, `2.5gbit`, or `unshaped`."""

import re
from dataclasses import dataclass
from decimal import Decimal

from ddp_lab.runtime.errors import UserError

UNITS = {"tbit": 10**12, "gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
"""Decimal units, as in `tc` and for network hardware."""
UNSHAPED = "unshaped"
NAMES_OF_UNSHAPED = (UNSHAPED, "none", "loopback")


@dataclass(frozen=True)
class Rate:
    """What a link carries in each direction, in bits per second; None if nothing limits it."""

    bits_per_s: int | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """
        Raises:
            UserError: the text is no rate.
        """
        if text.lower() in NAMES_OF_UNSHAPED:
            return cls(None)
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)", text.lower())
        bits = int(Decimal(parts[1]) * UNITS[parts[2]]) if parts else 0
        if not bits:
            raise UserError(f"rate '{text}': give a number above 0 with its unit, e.g. 250mbit or 1gbit, or {UNSHAPED}")
        return cls(bits)

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return UNSHAPED
        unit, scale = next((unit, scale) for unit, scale in UNITS.items() if self.bits_per_s >= scale)
        whole, rest = divmod(self.bits_per_s, scale)
        return f"{self.bits_per_s / scale:.12g}{unit}" if rest else f"{whole}{unit}"
