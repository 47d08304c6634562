"""Tables as CSV files."""

from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.writing import write_text

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet runs text that begins so as a formula (OWASP, CSV Injection)."""


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write `table` as CSV, whole or not at all. Text that a spreadsheet would run as a formula gets a `'` before it.

    Raises:
        UserError: the file cannot be written.
    """

    def harmless(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value

    table = table.copy()
    for name in table.select_dtypes(["object", "str"]).columns:
        table[name] = pd.Series([harmless(value) for value in table[name]], table.index, dtype=object)
    write_text(path, table.to_csv(index=False))
