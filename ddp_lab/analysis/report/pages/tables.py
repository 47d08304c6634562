"""Tables of the summary page: rows by rank and kind or component, from columns that `summary.csv` has side by side."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, CsvColumn
from ddp_lab.analysis.mesh import Mesh, in_order
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.page import BLANK, cell, titled
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.collectives.kinds import LABELS, label

CALLS, STATES = COLUMNS["calls"], COLUMNS["states"]

MOST_RANKS = 16
"""Ranks that a page shows in full."""
SPREAD = {"min": "least", "median": "median", "max": "most"}


def representatives(steps: pd.DataFrame, most: int = MOST_RANKS) -> dict[int, str]:
    """The ranks to show in full, and what each stands for: all of them, or the slowest, the median and the fastest.

    Ranks wait for each other, so their steps take equally long. They are ordered by their own mean time: the step
    without exposed waiting.

    Args:
        steps: Columns rank, step_ms, exposed_wait_ms: a row a rank and step.
    """
    busy = (steps["step_ms"] - steps["exposed_wait_ms"].fillna(0)).groupby(steps["rank"]).mean()
    ranks = busy.sort_values(kind="stable").index.tolist()
    if len(ranks) <= most:
        return dict.fromkeys(sorted(ranks), "")
    chosen = {ranks[-1]: "slowest", ranks[len(ranks) // 2]: "median", ranks[0]: "fastest"}
    return dict(sorted(chosen.items()))


def abridged(table: pd.DataFrame, ranks: Iterable[int]) -> pd.DataFrame:
    """A table with a row a rank. Of many ranks, the rows of `ranks`, and the least, median and most over all."""
    if table["rank"].nunique() <= MOST_RANKS:
        return table
    numbers = table.drop(columns="rank").select_dtypes("number").astype(float)
    spread = numbers.agg(list(SPREAD)).rename(index=SPREAD).rename_axis("rank").reset_index()
    return pd.concat([table[table["rank"].isin(ranks)], spread])


def kernel_times(timelines: Sequence[RankTimeline]) -> pd.DataFrame:
    """Columns rank, lane, name, sum, mean, max (us) of the kernels that the analysed steps issued, by sum."""
    tables = []
    for timeline in timelines:
        kernels = timeline.issued_kernels()
        times = (kernels["end"] - kernels["start"]).groupby([kernels["lane"], kernels["name"]])
        tables.append(times.agg(["sum", "mean", "max"]).reset_index().assign(rank=timeline.rank))
    return pd.concat(tables)[list(COLUMNS["kernels"])].sort_values("sum", ascending=False, kind="stable")


MOST_PLACES = 32
"""Up to this many calls of a step get a row each. If there are more, calls of one kind and size share a row."""


def buckets(collectives: pd.DataFrame, steps: int) -> pd.DataFrame:
    """The table of `collectives.csv` by place in the step, or by kind and size (the columns `places`).

    Counts and sums are means over steps and participating ranks. Times of a call are medians.

    Args:
        steps: Number of analysed steps.
    """
    named = collectives.assign(
        group=collectives["dimension"].where(collectives["dimension"] != "", collectives["group"]),
        kind=[label(*call) for call in zip(collectives["kind"], collectives["made_of"], strict=True)],
    )
    places = len(named[["group", "sequence", "kind"]].drop_duplicates())
    alike = named["sequence" if places <= MOST_PLACES else "bytes"]
    calls = named.assign(alike=alike, place=named["sequence"]).groupby(["group", "kind", "alike"], dropna=False)
    medians = calls[["bytes", "after_backward_ms", "duration_ms", "busbw_gbps"]].median()
    means = calls.agg(
        calls_per_step=("rank", "size"),
        total_ms_per_step=("duration_ms", "sum"),
        exposed_ms_per_step=("exposed_ms", "sum"),
    ).div(steps * calls["rank"].nunique(), axis="index")
    table = medians.join([means, calls["place"].min()]).reset_index()
    return table.sort_values(["group", "place"], kind="stable")[list(COLUMNS["places"])].reset_index(drop=True)


def collectives_table(exposure: Exposure, mesh: Mesh | None, ranks: Iterable[int]) -> dict[str, Any]:
    """Calls, payload and time by rank, dimension of the mesh if there is one, kind, and what it is made of."""
    steps, rows = exposure.steps["step"].nunique(), []
    calls = exposure.collectives.assign(
        kind=exposure.collectives["kind"].where(exposure.collectives["kind"].isin(LABELS), "other")
    )
    for rank in ranks:
        of_rank = calls[calls["rank"] == rank]
        for dimension in in_order(mesh or {}, of_rank["dimension"].tolist()):
            along = of_rank[of_rank["dimension"] == dimension]
            for _, part in along.groupby([along["kind"].map([*LABELS].index), "made_of"]):
                kind, made_of = part[["kind", "made_of"]].iloc[0]
                named = [rank, *([dimension or "other groups"] if mesh else []), label(kind, made_of)]
                payload, sent, ms = (part[name].sum(skipna=False) for name in ("bytes", "sent_bytes", "duration_ms"))
                figures = [len(part) / steps, payload / steps, sent / steps, round(ms / steps, 3), ms / len(part)]
                is_all = len(part) == (of_rank["kind"] == kind).sum()  # then it is what summary.csv says of the kind
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
        of_unit = CsvColumn("", row["unit"], "", 1, 0)
        is_figure = dict.fromkeys(("expected", "measured", "difference", "tolerance"), of_unit)
        rows.append([cell(name, row[name], is_figure.get(name, column)) for name, column in COLUMNS["audit"].items()])
    return titled("audit", list(COLUMNS["audit"].values()), rows)
