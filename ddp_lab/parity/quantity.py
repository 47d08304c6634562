"""What both runs have of one quantity."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Quantity:
    """One quantity in both runs.

    Attributes:
        error: Of the norm, by rank and micro-batch of run B, after the best `way`.
        factor: What run A's is to be multiplied with, by rank and micro-batch.
        remainder: What is left of the difference when that factor is taken out.
        way: `equal`, `sum` or `parts`.
        limit: What rounding may do.
        coarse: Of an update, how many times larger the parameter is.
        is_small: A gradient that may be all rounding beside that of the whole model, or the update of it.
        spread: Of what each rank has whole, how far ranks of run B are from one another, relative.
    """

    step: int
    kind: str
    name: str
    call: int
    error: dict[tuple[int, int], float]
    factor: dict[tuple[int, int], float]
    remainder: dict[tuple[int, int], float]
    way: str = "equal"
    limit: float = 0.0
    dtypes: tuple[str, str] = ("", "")
    norm: float = 0.0
    coarse: float = 0.0
    is_small: bool = False
    spread: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.error.values(), default=0.0)

    @property
    def differs(self) -> bool:
        return not self.worst <= self.limit

    @property
    def ranks(self) -> list[int]:
        """Those on which it differs."""
        return sorted({rank for (rank, _), error in self.error.items() if not error <= self.limit})

    @property
    def digits(self) -> float:
        """To how many digits it agrees."""
        return max(0.0, float(-np.log10(max(self.worst, 1e-16)))) if np.isfinite(self.worst) else 0.0

    @property
    def agreement(self) -> str:
        """`digits` with its unit."""
        return f"{self.digits:.1f} digits" if self.worst else "no difference"

    @property
    def one_factor(self) -> float | None:
        """The factor, if it is the same on all ranks and in all micro-batches, and explains the difference."""
        values = list(self.factor.values())
        is_one = bool(values) and max(values) - min(values) <= 2e-2 * abs(values[0])
        limit = max(10 * self.limit, 1e-3)
        return float(np.mean(values)) if is_one and max(self.remainder.values()) <= limit * abs(values[0]) else None
