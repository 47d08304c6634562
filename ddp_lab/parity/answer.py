"""The answer in five lines."""

from dataclasses import dataclass

from ddp_lab.parity.causes import Cause, cause_of
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import PARAMETER


@dataclass(frozen=True)
class Answer:
    """Attributes:
    lines: What was compared, the first difference, where it is, what it means, what agrees before it.
    """

    differs: bool
    lines: list[str]
    cause: Cause | None

    @classmethod
    def of(cls, made: Comparison, has_yardstick: bool, notes: list[str]) -> "Answer":
        cause, first = cause_of(made), made.first
        limits = "rounding alone, as measured" if has_yardstick else "what rounding usually does (no --yardstick)"
        compared = notes[0] if notes else f"{made.b.folder} against {made.a.folder}, {len(made.steps)} steps"
        head = f"compared: {compared}; {len(made.quantities)} quantities, within {limits}"
        if first is None and cause is None:
            worst = min(made.quantities, key=lambda one: one.digits)
            return cls(
                False,
                [
                    head,
                    "first difference: none",
                    f"least agreement: {worst.agreement}, {named(worst)}",
                    *unseen(made),
                ],
                None,
            )
        before = made.quantities[: made.quantities.index(first)] if first is not None else made.quantities
        least = min(before, key=lambda one: one.digits, default=None)
        lines = [
            head,
            f"first difference: {cause.name if cause else named(first)}",  # type: ignore[arg-type]
            f"where: {place(first)}" if first is not None else "where: in no recorded tensor",
            f"usually: {cause.usually}"
            if cause
            else "usually: no known fault looks like this one; see the page's table",
            f"before it: {len(before)} quantities agree{to_digits(least)}" if least else "before it: nothing",
        ]
        return cls(True, [*lines, *unseen(made)], cause)


def to_digits(least: Quantity) -> str:
    return f", to {least.digits:.1f} digits or more" if least.worst else " without a difference"


def named(one: Quantity) -> str:
    what = "update" if one.kind == PARAMETER else one.kind
    return f"the {what} of {one.name or 'the whole model'} in step {one.step}"


def place(one: Quantity) -> str:
    """Which step, module and ranks, and by how much."""
    worst = f"off by {one.worst:.2g} of its norm, where rounding explains {one.limit:.2g}"
    ranks = [rank for rank in one.ranks if rank >= 0]
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    factor = f"; it is run A's x {one.one_factor:.4g}" if one.one_factor is not None and one.differs else ""
    return f"{named(one)}{where}: {worst}{factor}"


def unseen(made: Comparison) -> list[str]:
    return [f"not seen in run B: outputs of {len(made.unseen)} modules (compiled, or replaced)"] if made.unseen else []
