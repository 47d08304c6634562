"""The section of the summary page on the mesh: what is sent along each dimension."""

from collections.abc import Iterable

from ddp_lab.analysis.columns import DIMENSION_COLUMNS
from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.metrics.dimensions import mean_by_dimension
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.report.page import Section, table


def mesh_section(exposure: Exposure, mesh: Mesh | None, ranks: Iterable[int]) -> list[Section]:
    """None without a mesh. The table has the rows of `ranks`."""
    if mesh is None or exposure.dimensions.empty:
        return []
    mean = mean_by_dimension(exposure.dimensions)
    shown = mean[mean["rank"].isin(list(ranks))]
    degrees = " x ".join(f"{degree} {name}" for name, degree in mesh.items())
    text = (
        f"The mesh is {degrees}. Means over the analysed steps; dimensions.csv has every step. Exposed counts each "
        "moment once, for the collective that was issued first, or the message for which a pipeline waits; exposed "
        "while running counts a moment for every dimension that communicates in it."
    )
    return [
        Section(
            "Dimensions of the mesh",
            text,
            table=table("dimensions", shown.drop(columns="step", errors="ignore"), DIMENSION_COLUMNS),
        )
    ]
