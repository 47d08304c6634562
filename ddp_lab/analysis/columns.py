"""The columns of CSV files and of tables on pages. `columns.toml` describes them, also for `docs/csv-columns.md`."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ddp_lab.collectives.kinds import LABELS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MIB = 1 / 2**20
COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer states",
    "buffers": "buffers",
}
"""Parts of model states: name in run records, and in words."""
SHARDABLE = ("parameters", "gradients", "optimizer_state")
KIND = "KIND"
"""Stands for each kind of collective in a column's name and label."""


@dataclass(frozen=True)
class CsvColumn:
    """How a column is shown: `scale` converts the CSV's value to `unit`; `digits` follow the decimal point.

    A column without a unit shows its value unchanged. If it has digits, its value is a probability, and one that is
    too small for them is shown as `<0.0001`.
    """

    label: str
    unit: str
    meaning: str
    scale: float = 1.0
    digits: int | None = None

    def show(self, value: object) -> str:
        """The value as a person reads it, without its unit; a dash if there is none."""
        if value is None or value is pd.NA or value != value:  # NaN
            return "–"
        if isinstance(value, str) or not (self.unit or self.digits):
            return f"{value:g}" if isinstance(value, float) else str(value)
        digits, number = 1 if self.digits is None else self.digits, float(value) * self.scale  # type: ignore[arg-type]
        if not self.unit and number < 10.0**-digits:
            return f"<{10.0**-digits:.{digits}f}"
        return f"{number:,.{digits}f}"


Columns = dict[str, CsvColumn]


def _read(tables: dict[str, Any]) -> dict[str, Columns]:
    """The columns of each table in `columns.toml`. A text in place of a column names the table that describes it."""
    read: dict[str, Columns] = {}
    for table, columns in tables.items():
        read[table] = {}
        for name, column in columns.items():
            if isinstance(column, str):
                read[table][name] = read[column][name]
            else:
                usual = {"label": name.replace("_", " "), "unit": ""}
                scale = {"scale": MIB} if column.get("unit", "").startswith("MiB") else {}
                read[table][name] = CsvColumn(**{**usual, **scale, **column})
    return read


def _of_kinds(columns: Columns) -> Columns:
    """`columns`, with a column for each kind of collective in place of one with `KIND`."""
    of_kind = {name: column for name, column in columns.items() if KIND in name}
    if not of_kind:
        return columns
    return {
        name.replace(KIND, kind): replace(column, label=column.label.replace(KIND, label))
        for kind, label in LABELS.items()
        for name, column in of_kind.items()
    }


_CONTENT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SCHEMA_VERSION: int = _CONTENT.pop("version")
"""One version for all CSV files."""
FILES: dict[str, list[str]] = _CONTENT.pop("files")
"""The tables that make up each CSV file, in the order of `docs/csv-columns.md`."""
WRITTEN = _read(_CONTENT)
"""Columns by table as `columns.toml` has them, with `KIND` for a kind of collective."""
COLUMNS = {table: _of_kinds(columns) for table, columns in WRITTEN.items()}
"""Columns by table, with a column for each kind of collective."""
CSV_COLUMNS = {
    file: {name: column for table in tables for name, column in COLUMNS[table].items()}
    for file, tables in FILES.items()
}
COMPARISON_COLUMNS = CSV_COLUMNS["compare.csv"]


def as_table(frame: pd.DataFrame, columns: Columns, texts: Collection[str]) -> "Table":
    """The columns of `frame` as the terminal shows them, each row on one line, those in `texts` to the left."""
    from rich.table import Table  # imported here, since other users of columns print nothing

    table = Table(box=None, pad_edge=False)
    for name, column in columns.items():
        heading = f"{column.label}\n{column.unit}" if any(shown.unit for shown in columns.values()) else column.label
        table.add_column(heading, justify="left" if name in texts else "right", no_wrap=True)
    for row in frame.to_dict("records"):
        table.add_row(*(column.show(row[name]) for name, column in columns.items()))
    return table


def print_table(frame: pd.DataFrame, columns: Columns, texts: Collection[str], console: "Console") -> None:
    """Print the table after an empty line. Output to a file is so wide that no row is cut."""
    if not console.is_terminal:
        console.width = 200
    console.print("", as_table(frame, columns, texts))


def kind_of(name: str) -> str:
    """The kind in the name of a column of `KIND`: `reduce_scatter` of `reduce_scatter_calls_per_step`."""
    return name.rsplit("_", 3)[0]


def kinds_run(table: pd.DataFrame) -> list[str]:
    """The kinds of collective of which a row of `summary.csv` or `compare.csv` has at least one call."""
    return [kind for kind in LABELS if (table[f"{kind}_calls_per_step"] > 0).any()]
