"""Tables of the summary page: rows by rank and kind or component, from columns that `summary.csv` has side by side."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, Column
from ddp_lab.analysis.mesh import Mesh, in_order
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.page import BLANK, cell, titled
from ddp_lab.collectives.kinds import LABELS, label

CALLS, STATES = COLUMNS["calls"], COLUMNS["states"]


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
                row = [cell("", text, CALLS["kind"]) for text in named]
                for name, figure in zip(("calls", "bytes", "sent", "ms", "mean"), figures, strict=True):
                    row.append(cell(f"{kind}_{name}_per_step" if is_all else "", figure, CALLS[name]))
                rows.append(row)
    return titled("collectives", [CALLS[name] for name in CALLS if mesh or name != "dimension"], rows)


def memory_table(summary: pd.DataFrame) -> dict[str, Any]:
    """At rest, by the formula and at the peak, by rank and component."""
    rows = []
    for row in summary.to_dict("records"):
        figures = {name: cell(name, row[name], column) for name, column in COLUMNS["memory"].items()}
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
            first = [cell("", text, STATES["component"]) for text in (row["rank"], component)]
            rows.append(first + [figures.get(name, BLANK) for name in (*names, "")[:4]])
    return titled("memory", list(STATES.values()), rows)


def audit_table(audit: pd.DataFrame) -> dict[str, Any]:
    """Every check. The unit of the figures differs from row to row."""
    rows = []
    for row in audit.to_dict("records"):
        of_unit = Column("", row["unit"], "", 1, 0)
        is_figure = dict.fromkeys(("expected", "measured", "difference", "tolerance"), of_unit)
        rows.append([cell(name, row[name], is_figure.get(name, column)) for name, column in COLUMNS["audit"].items()])
    return titled("audit", list(COLUMNS["audit"].values()), rows)
