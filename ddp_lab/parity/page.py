"""The page: the five lines, a dot for each quantity, and tables."""

from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape

from ddp_lab.parity.answer import Answer, named
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import PARAMETER
from ddp_lab.writing import write_text

MOST_ROWS, MOST_DIGITS = 40, 16
KINDS = {PARAMETER: "update"}
WAYS = {"equal": "each rank's with run A's", "sum": "the sum over ranks", "parts": "moments of parts, added up"}


def write_page(path: Path, made: Comparison, answer: Answer) -> Path:
    quantities = made.quantities
    template = Environment(
        loader=PackageLoader("ddp_lab.parity", ""), autoescape=select_autoescape(default=True)
    ).get_template("page.html.j2")
    dots = [
        {
            "x": round(10 + 980 * place / max(len(quantities) - 1, 1), 1),
            "y": round(210 - 12.5 * min(one.digits, MOST_DIGITS), 1),
            "name": named(one),
            "agreement": one.agreement,
            "differs": one.differs,
        }
        for place, one in enumerate(quantities)
    ]
    groups = groupby(quantities, key=lambda one: (one.step, one.kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    page = template.render(
        title=answer.lines[0].removeprefix("compared: ").partition(";")[0],
        lines=answer.lines,
        dots=dots,
        kinds=[summary(step, kind, list(of_kind)) for (step, kind), of_kind in groups],
        rows=[row(one) for one in quantities if one.differs][:MOST_ROWS],
    )
    write_text(path, page)
    return path


def summary(step: int, kind: str, quantities: list[Quantity]) -> dict[str, object]:
    least = min(quantities, key=lambda one: one.digits)
    return {
        "step": step,
        "kind": KINDS.get(kind, kind),
        "count": len(quantities),
        "agreement": least.agreement,
        "name": least.name or "the whole model",
        "differing": sum(one.differs for one in quantities),
    }


def row(one: Quantity) -> dict[str, object]:
    factors = [f"{rank}, {micro}: {factor:.4g}" for (rank, micro), factor in one.factor.items() if rank >= 0]
    return {
        "step": one.step,
        "kind": KINDS.get(one.kind, one.kind),
        "name": one.name or "the whole model",
        "error": f"{one.worst:.3g}",
        "limit": f"{one.limit:.3g}",
        "factors": "; ".join(factors[:8]),
        "way": WAYS[one.way],
    }
