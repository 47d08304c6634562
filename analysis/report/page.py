"""Sections of tables and figures as one HTML file that needs no network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from analysis.columns import Column


@dataclass(frozen=True)
class Section:
    """A heading with a text, a table and a figure, each of which may be left out."""

    heading: str
    text: str = ""
    table: dict[str, Any] | None = None
    figure: Markup | None = None


def table(table_id: str, frame: pd.DataFrame, columns: Mapping[str, Column]) -> dict[str, Any]:
    """What the template needs to show `frame`: its columns that `columns` knows, raw values beside shown ones."""
    names = [name for name in frame.columns if name in columns]
    rows = [
        [
            {"name": name, "value": "" if pd.isna(row[name]) else row[name], "shown": columns[name].show(row[name])}
            for name in names
        ]
        for row in frame.to_dict("records")
    ]
    return {"id": table_id, "columns": [columns[name] for name in names], "rows": rows}


def drawing(figure: go.Figure) -> Markup:
    """A figure as HTML, for a page that holds Plotly's script already."""
    return Markup(to_html(figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False}))


def render(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """The page. Every text is escaped; only figures, which Plotly has escaped, go in as they are."""
    environment = Environment(loader=PackageLoader("analysis.report"), autoescape=select_autoescape(default=True))
    template = environment.get_template("page.html.j2")
    return template.render(title=title, lines=lines, sections=sections, plotly_script=Markup(get_plotlyjs()))
