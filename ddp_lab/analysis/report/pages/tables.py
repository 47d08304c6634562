"""Tables of the summary page: rows by rank and kind or component, from columns that `summary.csv` has side by side."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import AUDIT_COLUMNS, COMPONENTS, MEMORY_COLUMNS, MIB, Column, mib
from ddp_lab.analysis.mesh import Mesh, in_order
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.page import BLANK, cell, titled
from ddp_lab.collectives.kinds import LABELS, label

RANK = Column("rank", "", "rank of the process")
COLLECTIVES = [
    RANK,
    Column("collective", "", "kind of collective"),
    Column("calls", "calls/step", "calls in one optimizer step"),
    Column("payload", "MiB/step", "payload by nccl-tests' definition of size", MIB, 3),
    Column("sent", "MiB/step", "bytes of it that a rank sends", MIB, 3),
    Column("total time", "ms/step", "sum of durations in one optimizer step, hidden or not", 1, 2),
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


def collectives_table(exposure: Exposure, mesh: Mesh | None, ranks: Iterable[int]) -> dict[str, Any]:
    """Calls, payload and time by rank, dimension of the mesh if there is one, kind, and what it is made of."""
    steps, rows = exposure.steps["step"].nunique(), []
    calls = exposure.collectives.assign(
        kind=exposure.collectives["kind"].where(exposure.collectives["kind"].isin(LABELS), "other")
    )
    for rank in ranks:
        own = calls[calls["rank"] == rank]
        for dimension in in_order(mesh or {}, own["dimension"].tolist()):
            along = own[own["dimension"] == dimension]
            for _, part in along.groupby([along["kind"].map([*LABELS].index), "made_of"]):
                kind, made_of = part[["kind", "made_of"]].iloc[0]
                named = [rank, *([dimension or "other groups"] if mesh else []), label(kind, made_of)]
                payload, sent, ms = (part[name].sum(skipna=False) for name in ("bytes", "sent_bytes", "duration_ms"))
                figures = [len(part) / steps, payload / steps, sent / steps, round(ms / steps, 3), ms / len(part)]
                is_all = len(part) == (own["kind"] == kind).sum()  # then it is what summary.csv says of the kind
                names = [f"{kind}_{name}_per_step" if is_all else "" for name in ("calls", "bytes", "sent", "ms")]
                shown = zip([*names, ""], figures, COLLECTIVES[-5:], strict=True)
                rows.append([cell("", text, RANK) for text in named] + [cell(*each) for each in shown])
    return titled("collectives", [RANK, *([DIMENSION] if mesh else []), *COLLECTIVES[1:]], rows)


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
        for component, names in lines.items():
            first = [cell("", row["rank"], RANK), cell("", component, RANK)]
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
