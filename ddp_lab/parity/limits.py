"""How far two runs may differ: as far as rounding goes.

A yardstick tells, which is run A again with each output rounded once more; or else a limit by dtype.
"""

from collections.abc import Mapping

import numpy as np

from ddp_lab.parity.quantity import Quantity
from ddp_lab.parity.store import BUFFER, GRADIENT, OUTPUT, OUTPUT_GRADIENT, PARAMETER, START

EPSILON = {"float32": 2**-23, "float64": 2**-52, "bfloat16": 2**-7, "float16": 2**-10}
TIMES_YARDSTICK = 16.0
"""How much more than the yardstick two runs may differ: sums over ranks round in other places than it does."""
LEAST = {"float32": 64.0, "float64": 64.0, "bfloat16": 4.0, "float16": 8.0}
"""Units in the last place that two runs may differ in any case."""
WITHOUT_YARDSTICK = {OUTPUT: 2**10, OUTPUT_GRADIENT: 2**12, GRADIENT: 2**12, START: 1, BUFFER: 2**12, PARAMETER: 2**14}
"""Units in the last place, where there is no yardstick."""
MOST = {OUTPUT: 0.1, OUTPUT_GRADIENT: 0.3, GRADIENT: 0.3, START: 1e-3, BUFFER: 0.1, PARAMETER: 0.5}
"""No limit is wider."""
SMALL = 1e-4
"""A gradient that is this much smaller than that of the whole model is rounding."""


def limit_of(quantity: Quantity, rounded: Mapping[tuple[int, str, str, int], float], coarsest: str) -> float:
    """`coarsest`: the dtype in which any output is rounded, and what follows from it with it."""
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
    """What is next to nothing beside the whole gradient may be all rounding, as that of a key's bias, or of a bias in
    front of a BatchNorm. Where it is, so is its update, which Adam makes as large as any other."""
    total = np.sqrt(sum(quantity.norm**2 for quantity in gradients))
    small = {quantity.name: quantity for quantity in gradients if quantity.norm < SMALL * total}
    noise = {name for name, quantity in small.items() if quantity.differs}
    for quantity in small.values():
        quantity.is_small = True
        quantity.limit = max(quantity.limit, quantity.limit * SMALL * total / max(quantity.norm, 1e-300))
    for quantity in updates:
        if quantity.name in noise and not small[quantity.name].differs:
            quantity.limit, quantity.is_small = 4.0, True
