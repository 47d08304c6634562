"""The page of the collective benchmark: time and bandwidth over size with fitted models, barriers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.benchmark_columns import FIT_COLUMNS, RESULT_COLUMNS
from ddp_lab.analysis.errors import listed
from ddp_lab.analysis.files import write_text
from ddp_lab.analysis.report.figures import styled
from ddp_lab.analysis.report.page import Section, drawing, render, table

SETTING = ["backend", "device", "link_bits_per_s", "type"]
"""Each combination has its own figure, since one panel cannot tell so many lines apart."""
WORLD_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
OWN = "sharding."
PANEL_PX, GAP_PX, TOP_PX = 230, 70, 70
TICKS = {
    2.0 ** (10 * unit + power): f"{2**power} {name}"
    for unit, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
    for power in (0, 5)
}
"""Labels of an axis of sizes in bytes."""


@dataclass(frozen=True)
class Measurements:
    """What the page shows.

    Attributes:
        rows: `RESULT_COLUMNS`.
        fits: `FIT_COLUMNS`.
        curves: What the models predict: the identifying columns of a fit, `size_bytes`, `seconds` and `busbw_gb_per_s`.
        lines: Where and when this was measured.
        skipped: What could not be measured, and why.
    """

    rows: pd.DataFrame
    fits: pd.DataFrame
    curves: pd.DataFrame
    lines: Sequence[str]
    skipped: Sequence[str] = field(default_factory=list)


def write_collectives_page(measured: Measurements, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        TraceError: it cannot be written.
    """
    sections = []
    sized = measured.rows[measured.rows["size_bytes"] > 0]
    for setting, rows in sized.groupby(SETTING, dropna=False, sort=False):
        curves = measured.curves[same(measured.curves, setting)]
        sections.append(
            Section(
                f"Time and bandwidth over size: {setting_text(setting)}",
                "Points are medians over the calls of a size. A call takes as long as on its slowest rank. Lines are "
                "the fitted models. Left: flat ends at the bottom are latency. Right: busbw at the median time can be "
                "compared with the rate of the link for any collective and number of ranks. Open points and dashes: "
                "the same collective as this project's strategies call it.",
                figure=drawing(sizes_figure(rows, curves)),
            )
        )
    if len(measured.fits):
        sections.append(
            Section(
                "Fitted models",
                "Latency and time a byte (alpha and beta), by the least squares of relative errors.",
                table=table("fits", measured.fits.dropna(axis="columns", how="all"), FIT_COLUMNS),
            )
        )
    sections += barrier_section(measured.rows)
    shown = measured.rows.dropna(axis="columns", how="all")
    sections.append(Section("Measurements", "", table=table("rows", shown, RESULT_COLUMNS)))
    wrong = measured.rows[measured.rows["wrong"].fillna(0) > 0]
    banner = f"Wrong results: {listed(sorted(set(wrong['collective'])))}; see #wrong." if len(wrong) else ""
    lines = [*measured.lines, *(f"Skipped: {message}" for message in measured.skipped)]
    write_text(path, render("Collectives", lines, sections, banner))


def same(frame: pd.DataFrame, setting: Sequence[Any]) -> "pd.Series[bool]":
    """Rows with these values of `SETTING`. A missing link equals a missing link."""
    chosen = pd.Series(True, frame.index)
    for name, value in zip(SETTING, setting, strict=True):
        chosen &= frame[name].isna() if pd.isna(value) else frame[name] == value
    return chosen


def setting_text(setting: Sequence[Any]) -> str:
    backend, device, link, type_name = setting
    rate = "" if pd.isna(link) else f", link of {RESULT_COLUMNS['link_bits_per_s'].show(link)} Mbit/s"
    return f"{backend} on {device}{rate}, {type_name}"


def sizes_figure(rows: pd.DataFrame, curves: pd.DataFrame) -> go.Figure:
    """A row of two panels for each collective: time, and busbw; a line for each number of ranks."""
    names = list(dict.fromkeys(name.removeprefix(OWN) for name in rows["collective"]))
    figure = make_subplots(
        rows=len(names),
        cols=2,
        subplot_titles=[f"{name}: {what}" for name in names for what in ("time, ms", "busbw, GB/s")],
        vertical_spacing=GAP_PX / ((PANEL_PX + GAP_PX) * len(names)),
        horizontal_spacing=0.09,
    )
    colours = dict(zip(sorted(set(rows["world_size"])), WORLD_COLOURS * 9, strict=False))
    seen: set[str] = set()
    groups: Any = rows.groupby(["collective", "world_size"], sort=False)
    for (collective, ranks), group in groups:
        is_own = collective.startswith(OWN)
        place = names.index(collective.removeprefix(OWN)) + 1
        medians = group.groupby("size_bytes")[["p50_us", "p95_us", "time_us", "busbw_gb_per_s"]].median()
        busbw = medians["busbw_gb_per_s"] * medians["time_us"] / medians["p50_us"]
        predicted = curves[(curves["collective"] == collective) & (curves["world_size"] == ranks)]
        label = f"{ranks} ranks{', as the strategies call it' if is_own else ''}"
        panels = ((medians["p50_us"] / 1e3, predicted["seconds"] * 1e3), (busbw, predicted["busbw_gb_per_s"]))
        for column, (points, line) in enumerate(panels, start=1):
            panel = {"legendgroup": label, "row": place, "col": column}
            figure.add_scatter(
                x=predicted["size_bytes"].tolist(),
                y=line.tolist(),
                mode="lines",
                line={"color": colours[ranks], "width": 1.5, "dash": "dash" if is_own else "solid"},
                hoverinfo="skip",
                showlegend=False,
                **panel,
            )
            figure.add_scatter(
                x=medians.index.tolist(),
                y=points.tolist(),
                mode="markers",
                name=label,
                showlegend=label not in seen,
                marker={"color": colours[ranks], "symbol": "circle-open" if is_own else "circle", "size": 7},
                customdata=list(zip(medians["p50_us"] / 1e3, medians["p95_us"] / 1e3, busbw, strict=True)),
                hovertemplate="%{x:,} bytes: p50 %{customdata[0]:.3f} ms, p95 %{customdata[1]:.3f} ms, "
                f"busbw %{{customdata[2]:.3g}} GB/s<extra>{collective}, {ranks} ranks</extra>",
                **panel,
            )
            seen.add(label)
    figure.update_xaxes(type="log", tickvals=list(TICKS), ticktext=list(TICKS.values()))
    figure.update_xaxes(title="size", row=len(names))
    figure.update_yaxes(type="log", exponentformat="none", dtick=1)
    height = TOP_PX + (PANEL_PX + GAP_PX) * len(names)
    figure.update_layout(height=height, meta={"narrowest": 640})
    return styled(figure).update_layout(margin={"t": TOP_PX})  # for the legend, above the first panels' titles


def barrier_section(rows: pd.DataFrame) -> list[Section]:
    barriers = rows[rows["collective"] == "barrier"]
    if barriers.empty:
        return []
    names = ("world_size", "backend", "device", "link_bits_per_s", "p50_us", "p95_us", "p99_us", "iterations")
    columns = [name for name in names if barriers[name].notna().any()]
    text = "The shortest time in which every rank learns that all others have arrived."
    return [Section("Barrier latency", text, table=table("barriers", barriers[columns], RESULT_COLUMNS))]
