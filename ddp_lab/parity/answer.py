"""The answer: five lines, and a page with a dot for each quantity."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape

from ddp_lab.parity.causes import Cause, cause_of
from ddp_lab.parity.comparison import FEWER, FILLED, INNER, UNSEEN, Comparison, Quantity
from ddp_lab.parity.store import PARAMETER
from ddp_lab.writing import write_text

NOTES = {
    UNSEEN: "not seen in run B: outputs of {} modules (compiled, or replaced)",
    FEWER: "called less often in run B: {} modules (by sample, or a call that is missing)",
    FILLED: "left out: outputs of {} modules that are longer or shorter in run B (padding by rank, other shapes)",
    INNER: "left out: outputs of {} modules that differ within one whose output agrees (another implementation)",
}
BY_SIZE = (
    "compared by size alone: {} quantities of which each rank has a part; an exchange of elements within them is "
    "not seen"
)


@dataclass(frozen=True)
class Answer:
    """Attributes:
    lines: What was compared, the first difference, where it is, what it means, what agrees before it.
    """

    differs: bool
    lines: list[str]
    cause: Cause | None

    @classmethod
    def of(cls, comparison: Comparison, has_yardstick: bool, notes: list[str]) -> "Answer":
        cause, first = cause_of(comparison), comparison.first
        limits = "rounding alone, as measured" if has_yardstick else "what rounding usually does (no --yardstick)"
        compared = (
            notes[0] if notes else f"{comparison.b.folder} against {comparison.a.folder}, {len(comparison.steps)} steps"
        )
        head = f"compared: {compared}; {len(comparison.quantities)} quantities, within {limits}"
        if first is None and cause is None:
            worst = least_agreement(comparison.quantities)
            agreement = f"{worst.agreement}, {named(worst)}" if worst else "nothing but rounding"
            lines = [head, "first difference: none", f"least agreement: {agreement}", *unseen(comparison)]
            return cls(False, lines, None)
        before = (
            comparison.quantities[: comparison.quantities.index(first)] if first is not None else comparison.quantities
        )
        least = least_agreement(before)
        lines = [
            head,
            f"first difference: {cause.says if cause else named(first)}",  # type: ignore[arg-type]
            f"where: {place(first)}" if first is not None else "where: in no recorded tensor",
            f"usually: {cause.usually}"
            if cause
            else "usually: no known fault looks like this one; see the page's table",
            f"before it: {len(before)} quantities agree{to_digits(least)}" if least else "before it: nothing",
        ]
        return cls(True, [*lines, *unseen(comparison)], cause)


def least_agreement(quantities: Sequence[Quantity]) -> Quantity | None:
    """The quantity that agrees to the fewest digits, without those that may be all rounding."""
    return min(
        (quantity for quantity in quantities if not quantity.is_small),
        key=lambda quantity: quantity.digits,
        default=None,
    )


def to_digits(least: Quantity) -> str:
    return f", to {least.digits:.1f} digits or more" if least.worst else " without a difference"


def named(quantity: Quantity) -> str:
    noun = "update" if quantity.kind == PARAMETER else quantity.kind
    return f"the {noun} of {quantity.name or 'the whole model'} in step {quantity.step}"


def place(quantity: Quantity) -> str:
    """In which step, module and ranks the difference is, and how large it is."""
    worst = f"off by {quantity.worst:.2g} of its norm, where rounding explains {quantity.limit:.2g}"
    ranks = [rank for rank in quantity.ranks if rank >= 0]
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    factor = (
        f"; it is run A's x {quantity.one_factor:.4g}" if quantity.one_factor is not None and quantity.differs else ""
    )
    return f"{named(quantity)}{where}: {worst}{factor}"


def unseen(comparison: Comparison) -> list[str]:
    """What the comparison does not cover."""
    in_parts = [quantity for quantity in comparison.quantities if quantity.way == "parts"]
    notes = [NOTES[why].format(len(names)) for why, names in comparison.left_out.items() if names]
    return [*notes, BY_SIZE.format(len(in_parts))] if in_parts else notes


def write_page(path: Path, comparison: Comparison, answer: Answer) -> None:
    environment = Environment(loader=PackageLoader("ddp_lab.parity", ""), autoescape=select_autoescape(default=True))
    groups = groupby(comparison.quantities, key=lambda quantity: (quantity.step, quantity.kind))
    page = environment.get_template("page.html.j2").render(
        title=answer.lines[0].removeprefix("compared: ").partition(";")[0],
        lines=answer.lines,
        quantities=comparison.quantities,
        groups=[list(of_kind) for _, of_kind in groups],
        named=named,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
