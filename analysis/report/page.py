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


def cell(name: str, value: Any, column: Column) -> dict[str, Any]:
    """A cell of a table: the value as a person reads it, and behind it that of the CSV's column `name`."""
    return {"name": name, "value": "" if pd.isna(value) else value, "shown": column.show(value)}


BLANK = {"name": "", "value": "", "shown": ""}
"""A cell where there is nothing to say."""


def table(table_id: str, frame: pd.DataFrame, columns: Mapping[str, Column]) -> dict[str, Any]:
    """What the template needs to show `frame`: its columns that `columns` knows, raw values beside shown ones."""
    names = [name for name in frame.columns if name in columns]
    rows = [[cell(name, row[name], columns[name]) for name in names] for row in frame.to_dict("records")]
    return titled(table_id, [columns[name] for name in names], rows)


def titled(table_id: str, columns: Sequence[Column], rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows of cells with the columns that they show; columns of text are aligned to the left."""
    are_text = [
        any(isinstance(row[place]["value"], str) and row[place]["value"] for row in rows)
        for place in range(len(columns))
    ]
    return {"id": table_id, "columns": list(zip(columns, are_text, strict=True)), "rows": rows}


def drawing(figure: go.Figure) -> Markup:
    """A figure as HTML, for a page that holds Plotly's script already."""
    return Markup(to_html(figure, include_plotlyjs=False, full_html=False, config={"displayModeBar": False}))


def render(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """The page. Every text is escaped; only figures, which Plotly has escaped, go in as they are."""
    environment = Environment(loader=PackageLoader("analysis.report"), autoescape=select_autoescape(default=True))
    template = environment.get_template("page.html.j2")
    return template.render(title=title, lines=lines, sections=sections, plotly_script=Markup(get_plotlyjs()))
