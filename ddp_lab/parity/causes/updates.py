"""What the optimizer makes of equal gradients."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddp_lab.parity.causes.cause import Cause, Rule, and_others, factor_name, listed, some_ranks, times
from ddp_lab.parity.causes.gradients import late
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import GRADIENT, PARAMETER


def other_settings(made: Comparison, first: Quantity) -> Cause | None:
    for rank, name, key, a, b in _settings(made, first):
        if not _equal(a, b):
            quotient = b / a if isinstance(a, float | int) and isinstance(b, float | int) and a and b else None
            named = factor_name(made, quotient) if quotient else ""
            more = f" (x {quotient:.4g}{f' = {named}' if named else ''})" if quotient else ""
            of_rank = f" on rank {rank}" if made.b.ranks > 1 and _is_alone(made, first.step, name, key, b) else ""
            return Cause(
                f"the optimizer has {key} {_short(a)} for {name} in run A, and {_short(b)}{more} in run B{of_rank}",
                "scaled twice, a scheduler that steps once a micro-batch or once a rank, or parameter groups made by "
                "other names (trap 15).",
            )
    return None


def _settings(made: Comparison, first: Quantity) -> Iterator[tuple[int, str, str, Any, Any]]:
    """(rank, parameter, setting, run A's value, run B's value), of the parameter if both runs name it."""
    of_a = made.a.facts[first.step][0].get("optimizer", {})
    for rank, facts in enumerate(made.b.facts[first.step]):
        of_b = facts.get("optimizer", {})
        pairs = [(first.name, of_a.get(first.name), of_b.get(first.name))]
        if None in pairs[0]:
            groups = [list({str(one): one for one in of.values()}.values()) for of in (of_a, of_b)]
            pairs = [("all", *of_both) for of_both in zip(*groups, strict=False)]
        for name, a, b in pairs:
            for key in b or {}:
                if a is not None and key in a:
                    yield rank, name, key, a[key], b[key]


def _is_alone(made: Comparison, step: int, name: str, key: str, value: Any) -> bool:
    values = [facts.get("optimizer", {}).get(name, {}).get(key, value) for facts in made.b.facts[step]]
    return not all(_equal(other, value) for other in values)


def _equal(a: Any, b: Any) -> bool:
    return bool(np.allclose(np.array(a, dtype=float), np.array(b, dtype=float), rtol=1e-6, atol=0))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def no_update(made: Comparison, first: Quantity) -> Cause | None:
    still = [
        one.name for one in made.of(first.step, PARAMETER) if one.norm and max(map(abs, one.factor.values())) < 1e-9
    ]
    if first.name not in still:
        return None
    return Cause(
        f"{first.name}{and_others(still)} is not updated in run B",
        "the optimizer holds other tensors than the module: it was built before the model was wrapped, moved or "
        "loaded. Or the step was skipped.",
    )


def of_some_ranks(made: Comparison, first: Quantity) -> Cause | None:
    if not (ranks := some_ranks(first)):
        return None
    holders = {rank for one in made.of(first.step, GRADIENT) if one.name == first.name for rank, _ in one.error}
    if holders and not holders & {-1, *ranks}:
        return Cause(
            f"rank {listed(ranks)} has no gradient of {first.name}, and others have one",
            "a rank that does not use a parameter must still take what the others made for it, zeros of its own added "
            "(trap 2).",
        )
    if all(abs(factor) < 1e-9 for (rank, _), factor in first.factor.items() if rank in ranks):
        return Cause(
            f"{first.name} is not updated on rank {listed(ranks)}",
            "each rank's optimizer has some parameters, and nobody sends them to the others after step().",
        )
    return Cause(
        f"the update of {first.name} differs on rank {listed(ranks)} alone, and its gradient does not",
        "optimizer states that are not the same on all ranks: one has loaded them, or has skipped or repeated a step.",
    )


def other_update(made: Comparison, first: Quantity) -> Cause | None:
    factor = first.one_factor
    if factor is not None:
        return Cause(
            f"gradients agree, and the update of {first.name} is {times(made, factor)}",
            "the learning rate is scaled where the optimizer's settings do not show it, the step is taken twice, or "
            "the optimizer counts other steps (Adam's bias correction): its states are not those of a new one.",
        )
    return Cause(
        f"gradients agree, and the update of {first.name} does not",
        "other optimizer states: another optimizer, states that were loaded or reset, or an optimizer that works on "
        "whole tensors under sharding (trap 15).",
    )


RULES: list[Rule] = [other_settings, no_update, of_some_ranks, late, other_update]
