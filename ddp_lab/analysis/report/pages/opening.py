"""The first screen of `compare.html`: who won, one picture and one table. It needs no script."""

from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup

from ddp_lab.analysis.columns import COMPARISON_COLUMNS
from ddp_lab.analysis.comparison.outcome import PARTS, Outcome, Row, parts_of, shown
from ddp_lab.analysis.report.figures import axis_end
from ddp_lab.analysis.report.page import table, templates

NOT_TRACED = "not traced"
COLUMNS = {
    name: COMPARISON_COLUMNS[name]
    for name in (
        "choice",
        "step_time_ms_median",
        "step_time_ratio",
        "verdict",
        "peak_bytes",
        "model_states_bytes",
        "overlap_pct",
        "collective_bytes_per_step",
    )
}
"""A narrow screen shows the first five."""


def opening(
    outcomes: Sequence[Outcome],
    comparison: pd.DataFrame,
    linked: Collection[str] = (),
    docs: str = "",
) -> Markup:
    """The first screen as HTML, with the fastest choice on top.

    Args:
        outcomes: Of each group of runs that are compared.
        comparison: The table of `ddp_lab.analysis.comparison.compare.comparison`.
        linked: Choices whose name leads to their `summary.html`.
        docs: Where the page on how choices work is, from the folder of this page.
    """
    ranked = comparison.sort_values("step_time_ms_median", kind="stable")
    choices = table("choices", ranked[list(COLUMNS)], COLUMNS)
    for name, *_ in choices["rows"]:
        if name["value"] in linked:
            name["link"] = f"{quote(name['value'])}/summary.html"
    timed = ranked.dropna(subset=["step_time_ms_median"])
    end = axis_end(timed["step_time_ms_median"])
    bars = [bar(row, end) for row in timed.to_dict("records")]
    drawn = {part for drawn_bar in bars for part, _, _ in drawn_bar["parts"]}
    html = templates().get_template("opening.html.j2")
    return Markup(
        html.render(
            outcomes=outcomes,
            bars=bars,
            legend=[part for part in (*PARTS, NOT_TRACED) if part in drawn],
            table=choices,
            heading="Strategies, the fastest first",
            docs=docs,
        )
    )


def bar(row: Row, end: float) -> dict[str, Any]:
    """A choice's median step: its parts, each with its width in % of `end` (ms), and the same in words.

    The page cuts off what is beyond 100 %, and marks it.
    """
    median = row["step_time_ms_median"]
    parts: dict[str, float] = {NOT_TRACED: median} if pd.isna(row["profiled_step_ms"]) else parts_of(row)
    drawn = {part: ms for part, ms in parts.items() if ms > 0}
    return {
        "choice": row["choice"],
        "whole": shown(row, "step_time_ms_median"),
        "is_cut": median > end,
        "label": ", ".join(f"{part} {ms:,.1f} ms" for part, ms in drawn.items()),
        "parts": [(part, round(100 * ms / end, 2), f"{ms:,.{int(ms < 10)}f}") for part, ms in drawn.items()],
    }
