"""Communication by dimension of the mesh: how often and how much, how long it ran, and how long it was exposed.

Collectives of two dimensions may run at the same time. So exposed time is told in two ways. `exposed_ms` counts each
moment once, for the dimension of the collective that was issued first; the dimensions of a step add up to its exposed
time. `exposed_while_ms` is all exposed time in which a collective of the dimension runs: a moment may count for two.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.mesh import Mesh, dimension_of, in_order
from ddp_lab.analysis.traces.collectives import ranks_of
from ddp_lab.analysis.traces.intervals import Intervals, clip, length, minus, union
from ddp_lab.analysis.traces.timeline import RankTimeline


def dimensions(groups: "pd.Series[str]", mesh: Mesh | None) -> "pd.Series[str]":
    """The dimension of each process group by its name; empty without a mesh, and for groups that are not known."""
    if mesh is None:
        return pd.Series("", groups.index, dtype=object)
    size = int(np.prod(list(mesh.values())))
    return groups.map({name: dimension_of(mesh, ranks_of(name, size)) for name in groups.unique()}).astype(object)


def dimension_steps(
    timeline: RankTimeline,
    calls: pd.DataFrame,
    compute: Intervals,
    pieces: tuple[Intervals, NDArray[np.int64], NDArray[np.bool_]],
    mesh: Mesh,
) -> pd.DataFrame:
    """A row a step and dimension of one rank (dimensions.csv).

    Args:
        calls: The rank's collectives in order of issue, with the columns dimension and step.
        compute: When it computed, disjoint and in order.
        pieces: Its exposed time in pieces. For each piece, the place in `calls` of the call that it counts for (or
            -1), and whether that call still waited for its last rank.
    """
    cells, owner, waits = pieces
    of_call = calls["dimension"].to_numpy(dtype=object)
    owners = np.append(of_call, "")[owner]
    rows = []
    for name in in_order(mesh, [*of_call, *owners]):
        along = calls[calls["dimension"] == name]
        spans = union(along[["start", "end"]].to_numpy(float))
        parts = {
            "running_ms": spans,
            "exposed_while_ms": minus(spans, compute),
            "exposed_ms": cells[owners == name],
            "exposed_wait_ms": cells[(owners == name) & waits],
        }
        for number, (start, end) in zip(timeline.steps["number"], timeline.windows, strict=True):
            issued = along[along["step"] == number]
            rows.append(
                {
                    "rank": timeline.rank,
                    "step": number,
                    "dimension": name,
                    "calls": len(issued),
                    "bytes": issued["bytes"].sum(skipna=False),
                    "total_ms": (issued["end"] - issued["start"]).sum() / 1000,
                    **{column: length(clip(part, start, end)) / 1000 for column, part in parts.items()},
                }
            )
    return pd.DataFrame(rows, columns=list(COLUMNS["dimensions"]))
