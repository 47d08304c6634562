"""Blocks of tables and figures as an HTML file that needs no network, only Plotly's script beside it."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from ddp_lab.analysis.columns import CsvColumn
from ddp_lab.writing import write_text

SCRIPT = "plotly.min.js"
REPORT_ROOTS = ("reports", "reports_sharding", "reports_parallel")
"""Folders whose pages share one copy of the script, which is 5 MB."""
LONGEST_TEXT = 120
"""Characters of a name that a page shows; a trace may hold names of megabytes."""
UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, those that turn the direction of what follows, and halves of characters."""


@dataclass(frozen=True)
class Block:
    """A part of a page: a heading with a text, a figure and a table, each of which may be left out.

    Attributes:
        when: Whether the page has it. Text, table and figure are made only then.
        table: Makes what `table` or `titled` returns, or None.
        traces: Rank and file of traces that the reader is told how to open in Perfetto.
        folded: Shown as its heading alone, until the reader opens it.
    """

    heading: str
    text: Callable[[], str] = str
    when: bool = True
    table: Callable[[], dict[str, Any] | None] = lambda: None
    figure: Callable[[], go.Figure | None] = lambda: None
    traces: Sequence[tuple[int, str]] = ()
    folded: bool = False


def readable(text: str, most: int = LONGEST_TEXT) -> str:
    """`text` as a page may show it: cut after `most` characters, without characters that cannot be seen."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return UNREADABLE.sub("\ufffd", cut)


def cell(name: str, value: Any, column: CsvColumn) -> dict[str, Any]:
    """A cell of a table: the value as a person reads it, and behind it that of the CSV's column `name`."""
    safe = readable(value) if isinstance(value, str) else value
    return {"name": name, "value": "" if pd.isna(safe) else safe, "shown": column.show(safe)}


BLANK = {"name": "", "value": "", "shown": ""}
"""A cell where there is nothing to say."""


def table(table_id: str, frame: pd.DataFrame, columns: Mapping[str, CsvColumn]) -> dict[str, Any]:
    """What the template needs to show `frame`: its columns that `columns` knows, raw values beside shown ones."""
    names = [name for name in frame.columns if name in columns]
    rows = [[cell(name, row[name], columns[name]) for name in names] for row in frame.to_dict("records")]
    return titled(table_id, [columns[name] for name in names], rows)


def titled(table_id: str, columns: Sequence[CsvColumn], rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows of cells with the columns that they show; columns of text are aligned to the left."""
    are_text = [
        any(isinstance(row[place]["value"], str) and row[place]["value"] for row in rows)
        for place in range(len(columns))
    ]
    return {"id": table_id, "columns": list(zip(columns, are_text, strict=True)), "rows": rows}


def drawing(figure: go.Figure) -> Markup:
    """A figure as HTML, for a page that holds Plotly's script already.

    Its place is as high as the figure's layout says from the start, so that nothing moves when it is drawn. Of its
    layout's `meta`, `zooms` adds buttons that zoom along x, and `narrowest` is a width in px below which it scrolls.
    """
    parts: Any = templates().get_template("parts.html.j2").module
    meta = figure.layout.meta or {}
    return Markup(
        parts.show_figure(
            json=htmlsafe_json_dumps(figure, dumps=lambda drawn: drawn.to_json()),
            label=legend_of(figure),
            height=figure.layout.height or 450,
            entries=len({trace.name for trace in figure.data if trace.name}),
            narrowest=meta.get("narrowest", 0),
            zooms=meta.get("zooms", False),
        )
    )


def legend_of(figure: go.Figure) -> str:
    """What a figure shows, for readers who cannot see it: its traces and the titles of its axes."""
    names = list(dict.fromkeys(trace.name for trace in figure.data if trace.name))
    axes = [*figure.select_xaxes(), *figure.select_yaxes()]
    titles = list(dict.fromkeys(axis.title.text for axis in axes if axis.title.text))
    return readable(f"Chart of {', '.join(names) or 'one series'}; axes: {', '.join(titles)}", 400)


def render(
    title: str,
    lines: Sequence[str],
    blocks: Sequence[Block],
    banner: str = "",
    opening: Markup | None = None,
    verdict: Sequence[str] = (),
) -> str:
    """The page, for `write_page`. Every text is escaped; only figures, which are escaped already, go in as they are.

    Args:
        banner: What a reader must know before any figure, such as that a run is incomplete.
        opening: What comes before all sections, as HTML.
        verdict: A sentence that a reader needs first, and what to do about it.
    """
    template = templates().get_template("page.html.j2")
    parts = {"lines": lines, "banner": banner, "opening": opening, "verdict": verdict}
    shown = [block for block in blocks if block.when]
    return template.render(title=title, script=SCRIPT, blocks=shown, drawing=drawing, **parts)


def write_page(path: Path, page: str) -> None:
    """Write a page, and Plotly's script if it is not there: in the report root that `path` is in, or else beside it.

    Raises:
        UserError: a file cannot be written.
    """
    folder = path.parent.absolute()
    script = next((above for above in (folder, *folder.parents) if above.name in REPORT_ROOTS), folder) / SCRIPT
    content = get_plotlyjs()
    if not script.is_file() or script.stat().st_size != len(content.encode()):
        write_text(script, content)
    address = os.path.relpath(script, folder)
    write_text(path, page.replace(f'<script src="{SCRIPT}"', f'<script src="{address}"', 1))


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("ddp_lab.analysis.report"),
        autoescape=select_autoescape(default=True),
        finalize=lambda text: readable(text, 2000) if type(text) is str else text,
    )
