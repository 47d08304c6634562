"""The page on runs over links of several rates: `link_rates.html` and `link_rates.csv`."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from analysis.comparison.link_rates import CROSSING_COLUMNS, LOCAL, RATE_COLUMNS, crossings, read_rates
from analysis.report.bandwidth_figure import SYMBOLS
from analysis.report.figures import styled
from analysis.report.page import Section, drawing, render, table
from analysis.summary import write_csv, write_text
from analysis.wording import listed

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "var(--ink)")
UNSHAPED_FACTOR = 4
"""Unshaped links stand this much to the right of the fastest rate."""
SAME_BOUND = 0.005
"""Bounds that differ by no more than this share are one line."""
ROUND_MS = [digit * 10.0**power for power in range(-2, 7) for digit in (1, 2, 5)]


def write_link_page(folder: Path, rates: Mapping[str, int | None]) -> Path:
    """Write `link_rates.csv` and `link_rates.html` into `folder`, and answer with the page's path.

    Args:
        folder: Has the results of each rate, as `analysis.comparison.link_rates.read_rates` takes them.
        rates: Folder in it, and bits a second of its links; None where nothing limits them.

    Raises:
        TraceError: results cannot be read, or the page not be written.
    """
    rows = read_rates(folder, rates)
    write_csv(folder / "link_rates.csv", rows)
    page = folder / "link_rates.html"
    write_text(page, link_page(rows))
    return page


def link_page(rows: pd.DataFrame) -> str:
    """Args:
    rows: Of `analysis.comparison.link_rates.read_rates`.
    """
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
        "Between two measured rates, times are taken to be straight lines on these axes. A crossing whose margin is "
        "no larger than what two runs of one choice differ by says only that both are equally fast there. Unshaped "
        "links have no rate, so no crossing is sought beyond the fastest shaped ones."
    )
    return Section(heading, text, table=table("crossings", found, CROSSING_COLUMNS))


def rates_figure(rows: pd.DataFrame, found: pd.DataFrame) -> go.Figure:
    """A line a choice, crossings as crosses, and bounds dotted below."""
    places = dict(zip(rows["link"], rows["link_bits_per_s"] / 1e6, strict=True))
    fastest = rows["link_bits_per_s"].max() / 1e6
    places = {
        link: place if place == place else (fastest if fastest == fastest else 1.0) * UNSHAPED_FACTOR
        for link, place in places.items()
    }
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
    for names, bound in bounds(rows):
        figure.add_scatter(
            x=[places[link] for link in bound.index],
            y=bound.tolist(),
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


def bounds(rows: pd.DataFrame) -> list[tuple[list[str], "pd.Series[float]"]]:
    """Bounds by link, each with the choices whose bound it is: those that send as much have the same."""
    found: list[tuple[list[str], pd.Series[float]]] = []
    for choice, of_choice in rows[rows["choice"] != LOCAL].dropna(subset=["bound_ms"]).groupby("choice", sort=False):
        bound = of_choice.set_index("link")["bound_ms"]
        same = next((names for names, other in found if is_same(bound, other)), None)
        if same is None:
            found.append(([str(choice)], bound))
        else:
            same.append(str(choice))
    return found


def is_same(first: "pd.Series[float]", second: "pd.Series[float]") -> bool:
    return first.index.equals(second.index) and bool(((first / second - 1).abs() <= SAME_BOUND).all())
