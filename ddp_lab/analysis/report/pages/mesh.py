"""The section of the summary page on the mesh: what is sent along each dimension, and who waits for whom."""

from collections.abc import Iterable

import pandas as pd

from ddp_lab.analysis.columns import DIMENSION_COLUMNS
from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.metrics.dimensions import mean_by_dimension, waits
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.figures.mesh_waits import mesh_waits_figure
from ddp_lab.analysis.report.page import Section, drawing, table


def mesh_section(exposure: Exposure, mesh: Mesh | None, ranks: Iterable[int]) -> list[Section]:
    """None without a mesh. The table has the rows of `ranks`, the figure all ranks."""
    if mesh is None or exposure.dimensions.empty:
        return []
    mean = mean_by_dimension(exposure.dimensions)
    shown = mean[mean["rank"].isin(list(ranks))]
    waited = waits(exposure.collectives, exposure.steps["step"].nunique())
    degrees = " x ".join(f"{degree} {name}" for name, degree in mesh.items())
    text = (
        f"The mesh is {degrees}. Means over the analysed steps; dimensions.csv has every step. Exposed counts each "
        "moment once, for the collective that was issued first; exposed while running counts a moment for every "
        "dimension that communicates in it."
    )
    if len(waited):
        text += (
            " Squares are ranks at their places in the mesh. Colour: how long a rank waits, from its own start of a "
            "collective until the slowest rank of the group starts it. A rank that is brighter than its neighbours "
            "waits for one of them; point at it to see for which."
        )
    return [
        Section(
            "Dimensions of the mesh",
            text,
            table=table("dimensions", shown.drop(columns="step", errors="ignore"), DIMENSION_COLUMNS),
            figure=drawing(mesh_waits_figure(waited, mesh)) if len(waited) else None,
        )
    ]


def by_dimension(calls: pd.DataFrame) -> pd.DataFrame:
    """`calls` with the dimension in the name of the group, where it is known, so that equal calls share a row."""
    which = calls["group"].str.extract(r"( \(\d+\))$", expand=False).fillna("")
    return calls.assign(group=(calls["dimension"] + which).where(calls["dimension"] != "", calls["group"]))
