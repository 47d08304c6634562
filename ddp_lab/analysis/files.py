"""CSV files and pages, written whole or not at all."""

import contextlib
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.runtime.errors import UserError

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


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all. What is no file, such as `/dev/stdout`, gets it as it is.

    Raises:
        UserError: the file cannot be written.
    """
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None
