"""One quantity of both runs, and how far it may differ by rounding.

The yardstick tells how far: it is run A again, with each output rounded once more. Without one, the dtype sets a limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddp_lab.parity.store import BUFFER, GRADIENT, OUTPUT, OUTPUT_GRADIENT, PARAMETER, START

EPSILON = {"float32": 2**-23, "float64": 2**-52, "bfloat16": 2**-7, "float16": 2**-10}
TIMES_YARDSTICK = 16.0
"""How many times the yardstick's difference two runs may differ, since sums over ranks round in other places."""
LEAST = {"float32": 64.0, "float64": 64.0, "bfloat16": 4.0, "float16": 8.0}
"""Units in the last place that two runs may differ in any case."""
WITHOUT_YARDSTICK = {OUTPUT: 2**10, OUTPUT_GRADIENT: 2**12, GRADIENT: 2**12, START: 1, BUFFER: 2**12, PARAMETER: 2**14}
"""Units in the last place, where there is no yardstick."""
MOST = {OUTPUT: 0.1, OUTPUT_GRADIENT: 0.3, GRADIENT: 0.3, START: 1e-3, BUFFER: 0.1, PARAMETER: 0.5}
"""No limit is wider."""
SMALL = 1e-4
"""A gradient that is this much smaller than that of the whole model is rounding."""


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
        """The number of digits to which both runs agree."""
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


# Limits ---------------------------------------------------------------------------------------------------------------


def limit_of(quantity: Quantity, rounded: Mapping[tuple[int, str, str, int], float], coarsest: str) -> float:
    """`coarsest`: the coarsest dtype to which an output is rounded. All that follows has its error."""
    dtype = "float32" if quantity.kind in (START, BUFFER) else coarsest
    unit = EPSILON.get(dtype, 2**-23) * (max(1.0, quantity.coarse) if dtype == "float32" else 1.0)
    if not rounded:
        return min(unit * WITHOUT_YARDSTICK[quantity.kind] * (1 + quantity.step), MOST[quantity.kind])
    error_here = rounded.get((quantity.step, quantity.kind, quantity.name, quantity.call), 0.0)
    if quantity.kind == START:
        return unit
    alike = [error for (step, kind, _, _), error in rounded.items() if (step, kind) == (quantity.step, quantity.kind)]
    return max(
        TIMES_YARDSTICK * error_here,
        TIMES_YARDSTICK / 2 * float(np.median(alike or [0.0])),
        LEAST.get(dtype, 64.0) * unit,
    )


def forgive_small(gradients: list[Quantity], updates: list[Quantity]) -> None:
    """A gradient that is tiny beside that of the whole model may be all rounding, such as that of a key's bias, or of a
    bias in front of a BatchNorm. Then its update is rounding too, and Adam makes it as large as any other."""
    total = np.sqrt(sum(quantity.norm**2 for quantity in gradients))
    small = {quantity.name: quantity for quantity in gradients if quantity.norm < SMALL * total}
    noise = {name for name, quantity in small.items() if quantity.differs}
    for quantity in small.values():
        quantity.is_small = True
        quantity.limit = max(quantity.limit, quantity.limit * SMALL * total / max(quantity.norm, 1e-300))
    for quantity in updates:
        if quantity.name in noise and not small[quantity.name].differs:
            quantity.limit, quantity.is_small = 4.0, True
