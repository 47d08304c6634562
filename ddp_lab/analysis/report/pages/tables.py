"""Tables of the summary page: rows by rank and kind or component, from columns that `summary.csv` has side by side."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import AUDIT_COLUMNS, COMPONENTS, KIND_COLUMNS, MEMORY_COLUMNS, Column, kinds_run, mib
from ddp_lab.analysis.mesh import Mesh, in_order
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.page import BLANK, cell, titled
from ddp_lab.analysis.traces.collectives import KINDS

RANK = Column("rank", "", "rank of the process")
COLLECTIVES = [
    RANK,
    Column("collective", "", "kind of collective"),
    Column("calls", "calls/step", "calls in one optimizer step"),
    Column("payload", "MiB/step", "payload by nccl-tests' definition of size"),
    Column("total time", "ms/step", "sum of durations in one optimizer step, hidden or not"),
    Column("mean time", "ms/call", "total time over calls", 1, 3),
]
DIMENSION = Column("dimension", "", "of the mesh, over whose ranks they are")
MEMORY = [
    RANK,
    Column("component", "", "what holds the memory"),
    mib("at rest", "after an optimizer step"),
    mib("formula", "what a rank should hold at rest, without padding"),
    mib("peak", "most at one moment of the recorded step"),
    Column("peak in", "", "part of the step in which the peak was"),
]


def collectives_table(summary: pd.DataFrame) -> dict[str, Any]:
    """Calls, payload and time by rank and kind, of the kinds that ran."""
    rows = []
    for row in summary.to_dict("records"):
        for kind in kinds_run(summary):
            names = [f"{kind}_{figure}_per_step" for figure in ("calls", "bytes", "ms")]
            calls, _, ms = (row[name] for name in names)
            figures = [cell(name, row[name], KIND_COLUMNS[name]) for name in names]
            mean = cell("", ms / calls if calls else None, COLLECTIVES[-1])
            rows.append([cell("", row["rank"], RANK), cell("", KINDS[kind], RANK), *figures, mean])
    return titled("collectives", COLLECTIVES, rows)


def dimensions_table(exposure: Exposure, mesh: Mesh, ranks: Iterable[int]) -> dict[str, Any]:
    """The same by rank, dimension of the mesh and kind."""
    steps, rows = exposure.steps["step"].nunique(), []
    calls = exposure.collectives.assign(
        kind=exposure.collectives["kind"].where(exposure.collectives["kind"].isin(KINDS), "other")
    )
    for rank in ranks:
        own = calls[calls["rank"] == rank]
        for dimension in in_order(mesh, own["dimension"].tolist()):
            for kind, label in KINDS.items():
                part = own[(own["dimension"] == dimension) & (own["kind"] == kind)]
                if len(part):
                    ms = part["duration_ms"].sum()
                    figures = (len(part) / steps, part["bytes"].sum(skipna=False) / steps, ms / steps)
                    shown = [
                        cell("", figure, KIND_COLUMNS[f"{kind}_{name}_per_step"])
                        for figure, name in zip(figures, ("calls", "bytes", "ms"), strict=True)
                    ]
                    named = [cell("", text, RANK) for text in (rank, dimension or "other groups", label)]
                    rows.append([*named, *shown, cell("", ms / len(part), COLLECTIVES[-1])])
    return titled("collectives", [COLLECTIVES[0], DIMENSION, *COLLECTIVES[1:]], rows)


def memory_table(summary: pd.DataFrame) -> dict[str, Any]:
    """At rest, by the formula and at the peak, by rank and component."""
    rows = []
    for row in summary.to_dict("records"):
        figures = {name: cell(name, row[name], column) for name, column in MEMORY_COLUMNS.items()}
        lines = {
            label: [f"{component}_bytes", f"expected_{component}_bytes", f"peak_{component}_bytes"]
            for component, label in {**COMPONENTS, "model_states": "all states"}.items()
        }
        lines |= {
            "all tensors": ["", "", "peak_bytes", "peak_phase"],
            "workspaces of operators": ["", "", "peak_workspace_bytes"],
            "resident set": ["", "", "peak_rss_bytes"],
        }
        for label, names in lines.items():
            first = [cell("", row["rank"], RANK), cell("", label, RANK)]
            rows.append(first + [figures.get(name, BLANK) for name in (*names, "")[:4]])
    return titled("memory", MEMORY, rows)


def audit_table(audit: pd.DataFrame) -> dict[str, Any]:
    """Every check. The unit of the figures differs from row to row."""
    rows = []
    for row in audit.to_dict("records"):
        of_unit = Column("", row["unit"], "", 1, 0)
        is_figure = dict.fromkeys(("expected", "measured", "difference", "tolerance"), of_unit)
        rows.append([cell(name, row[name], is_figure.get(name, column)) for name, column in AUDIT_COLUMNS.items()])
    return titled("audit", list(AUDIT_COLUMNS.values()), rows)
