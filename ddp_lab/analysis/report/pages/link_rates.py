"""The page on runs over links of several rates: `link_rates.html` and `link_rates.csv`."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.comparison.link_rates import CROSSING_COLUMNS, LOCAL, RATE_COLUMNS, crossings, read_rates
from ddp_lab.analysis.errors import listed
from ddp_lab.analysis.files import write_csv, write_text
from ddp_lab.analysis.report.figures import styled
from ddp_lab.analysis.report.page import Section, drawing, render, table

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "var(--ink)")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x", "pentagon")
UNSHAPED_FACTOR = 4
"""Unshaped links are drawn at this multiple of the fastest rate."""
ROUND_MS = [digit * 10.0**power for power in range(-2, 7) for digit in (1, 2, 5)]


def write_link_page(folder: Path, rates: Mapping[str, int | None]) -> Path:
    """Write `link_rates.csv` and `link_rates.html` into `folder`, and return the page's path.

    Args:
        folder: Has the results of each rate, as `ddp_lab.analysis.comparison.link_rates.read_rates` reads them.
        rates: Folder in it, and bits a second of its links; None if nothing limits them.

    Raises:
        TraceError: results cannot be read, or the page cannot be written.
    """
    rows = read_rates(folder, rates)
    write_csv(folder / "link_rates.csv", rows)
    page = folder / "link_rates.html"
    write_text(page, link_page(rows))
    return page


def link_page(rows: pd.DataFrame) -> str:
    """The page, from the table of `read_rates`."""
    found = crossings(rows)
    links = list(dict.fromkeys(rows["link"]))
    lines = [f"The same command over links of {listed(links)}. Lower is faster. Both axes are logarithmic."]
    if rows["bound_ms"].notna().any():
        lines.append(
            "Bound, dotted: forward + max(backward, bytes on the wire / rate) + optimizer. No order of communication "
            "with this traffic can be faster."
        )
    if (rows["choice"] == LOCAL).any():
        lines.append(f"{LOCAL} is the same step without any communication.")
    sections = [
        Section("Step time over the link", figure=drawing(rates_figure(rows, found))),
        crossing_section(found),
        Section("Figures", table=table("rates", rows, RATE_COLUMNS)),
    ]
    return render("Step time over the rate of the link", lines, sections)


def crossing_section(found: pd.DataFrame) -> Section:
    heading = "Where one choice overtakes another"
    if found.empty:
        return Section(heading, "No choice overtakes another between two of these links.")
    text = (
        "Between two measured rates, times are assumed to be straight lines on these axes. If the margin is no larger "
        "than the difference of two runs of one choice, both are equally fast there. Unshaped links have no rate, so "
        "no crossing is searched beyond the fastest shaped one."
    )
    return Section(heading, text, table=table("crossings", found, CROSSING_COLUMNS))


def rates_figure(rows: pd.DataFrame, found: pd.DataFrame) -> go.Figure:
    """A line a choice, crossings as crosses, and bounds dotted below."""
    fastest = rows["link_bits_per_s"].max()
    unshaped = UNSHAPED_FACTOR * (1e6 if pd.isna(fastest) else fastest)
    places = dict(zip(rows["link"], rows["link_bits_per_s"].fillna(unshaped) / 1e6, strict=True))
    figure = go.Figure()
    for index, (choice, of_choice) in enumerate(rows.groupby("choice", sort=False)):
        is_local = choice == LOCAL
        colour = "var(--soft)" if is_local else COLOURS[index % len(COLOURS)]
        figure.add_scatter(
            x=of_choice["link"].map(places).tolist(),
            y=of_choice["step_ms_median"].tolist(),
            customdata=of_choice["link"].tolist(),
            name=str(choice),
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": "dash" if is_local or index >= len(COLOURS) else "solid"},
            marker={"color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8},
            hovertemplate="%{customdata}: %{y:.1f} ms<extra>%{fullData.name}</extra>",
        )
    for times, names in bounds(rows).items():
        figure.add_scatter(
            x=[places[link] for link, _ in times],
            y=[bound for _, bound in times],
            name=f"bound of {names[0]}{' and others' if len(names) > 1 else ''}",
            mode="lines",
            line={"color": "var(--ink)", "width": 1.5, "dash": "dot"},
            hovertemplate="%{y:.1f} ms<extra>bound of " + listed(names) + "</extra>",
        )
    if len(found):
        figure.add_scatter(
            x=(found["link_bits_per_s"] / 1e6).tolist(),
            y=found["step_ms"].tolist(),
            customdata=found[["slower_links", "faster_links"]].to_numpy().tolist(),
            name="crossing",
            mode="markers",
            marker={"symbol": "x-thin", "size": 12, "line": {"color": "var(--ink)", "width": 2}},
            hovertemplate="%{x:,.0f} Mbit/s: below it %{customdata[0]} is faster, above it %{customdata[1]}"
            "<extra>crossing</extra>",
        )
    figure.update_xaxes(type="log", title="rate of the link", tickvals=list(places.values()), ticktext=list(places))
    figure.update_yaxes(type="log", title="step time, ms", tickvals=ROUND_MS, ticktext=[f"{ms:,g}" for ms in ROUND_MS])
    figure.update_layout(height=520)
    return styled(figure)


def bounds(rows: pd.DataFrame) -> dict[tuple[tuple[str, float], ...], list[str]]:
    """Bounds (link and ms, rounded to three digits), each with the choices that have it since they send as much."""
    found: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for choice, of_choice in rows[rows["choice"] != LOCAL].dropna(subset=["bound_ms"]).groupby("choice", sort=False):
        bound = tuple((link, float(f"{ms:.3g}")) for link, ms in of_choice[["link", "bound_ms"]].to_numpy().tolist())
        found.setdefault(bound, []).append(str(choice))
    return found
