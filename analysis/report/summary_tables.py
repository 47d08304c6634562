"""Tables with a row a rank and kind or component, of columns that `summary.csv` has side by side."""

from typing import Any

import pandas as pd

from analysis.columns import AUDIT_COLUMNS, COMPONENTS, KIND_COLUMNS, MEMORY_COLUMNS, Column, mib
from analysis.report.collective_figure import kinds_seen
from analysis.report.page import BLANK, cell, titled
from analysis.traces.collectives import KINDS

RANK = Column("rank", "", "rank of the process")
ROWS = {**COMPONENTS, "model_states": "all states"}
PHASE = MEMORY_COLUMNS["peak_phase"]


def collectives_table(summary: pd.DataFrame) -> dict[str, Any]:
    """Calls, payload and time by rank and kind, of the kinds that ran."""
    shown = [
        RANK,
        Column("collective", "", "kind of collective"),
        Column("calls", "calls/step", "calls in one optimizer step"),
        Column("payload", "MiB/step", "payload by nccl-tests' definition of size"),
        Column("total time", "ms/step", "sum of durations in one optimizer step, hidden or not"),
        Column("mean time", "ms/call", "total time over calls", 1, 3),
    ]
    rows = []
    for row in summary.to_dict("records"):
        for kind in kinds_seen(summary):
            names = [f"{kind}_{figure}_per_step" for figure in ("calls", "bytes", "ms")]
            calls, ms = row[names[0]], row[names[2]]
            mean = ms / calls if calls else float("nan")
            figures = [cell(name, row[name], KIND_COLUMNS[name]) for name in names]
            rows.append([cell("", row["rank"], RANK), cell("", KINDS[kind], RANK), *figures, cell("", mean, shown[-1])])
    return titled("collectives", shown, rows)


def memory_table(summary: pd.DataFrame) -> dict[str, Any]:
    """At rest, by the formula and at most, by rank and component."""
    shown = [
        RANK,
        Column("component", "", "what holds the memory"),
        mib("at rest", "after an optimizer step"),
        mib("formula", "what a rank should hold at rest, without padding"),
        mib("peak", "most at one moment of the recorded step"),
        Column("peak in", "", "in which part of the step that was"),
    ]
    rows = []
    for row in summary.to_dict("records"):

        def figure(name: str, row: dict[Any, Any] = row) -> dict[str, Any]:
            return cell(name, row[name], MEMORY_COLUMNS[name]) if name in row else BLANK

        for component, label in ROWS.items():
            names = [f"{component}_bytes", f"expected_{component}_bytes", f"peak_{component}_bytes"]
            rows.append([cell("", row["rank"], RANK), cell("", label, RANK), *map(figure, names), figure("")])
        for name, label in (("peak_bytes", "all allocated"), ("peak_rss_bytes", "resident set")):
            phase = cell("peak_phase", row["peak_phase"], PHASE) if name == "peak_bytes" else figure("")
            first = [cell("", row["rank"], RANK), cell("", label, RANK)]
            rows.append([*first, figure(""), figure(""), figure(name), phase])
    return titled("memory", shown, rows)


def audit_table(audit: pd.DataFrame) -> dict[str, Any]:
    """Every check; figures of bytes with separators, as the table mixes units."""
    rows = []
    for row in audit.to_dict("records"):
        cells = []
        for name, column in AUDIT_COLUMNS.items():
            is_figure = name in ("expected", "measured", "difference", "tolerance")
            shown = Column("", row["unit"], "", 1, 0) if is_figure else column
            cells.append(cell(name, row[name], shown))
        rows.append(cells)
    return titled("audit", list(AUDIT_COLUMNS.values()), rows)
