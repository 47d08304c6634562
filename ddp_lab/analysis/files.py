"""Run records read, and CSV files and pages written."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.errors import TraceError
from ddp_lab.record_format import RECORD_VERSION, ranks_in
from ddp_lab.runtime.errors import UserError

REQUIRED: dict[str, type] = {
    "config": dict,
    "eval": dict,
    "expected_traffic": list,
    "memory": list,
    "step_time_s": list,
    "step_samples": list,
    "train_loss": list,
    "world_size": int,
}
"""The fields of a run record that reports read; docs/run-record.md has all fields."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet runs text that begins so as a formula (OWASP, CSV Injection)."""


def read_record(path: Path, failed_too: bool = False) -> dict[str, Any]:
    """The content of a run record.

    Args:
        failed_too: Accept the record of a run that did not complete. Its missing figures are empty or None.

    Raises:
        TraceError: the file cannot be read or is not a run record, or the run did not complete.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: cannot be read as a run record ({error})") from None
    if not isinstance(record, dict) or "run_id" not in record or "choice" not in record:
        raise TraceError(f"{path}: not a run record (run_id and choice are missing)")
    if record.get("schema_version") != RECORD_VERSION:
        raise TraceError(
            f"{path}: a run record of version {record.get('schema_version')}, but this program reads version "
            f"{RECORD_VERSION}; train again"
        )
    problem = failure_of(record)
    if problem and not failed_too:
        raise TraceError(f"{path}: {problem}, so its record is not whole; train again")
    required = {name: kind for name, kind in REQUIRED.items() if name != "eval" or not problem}
    wrong = [name for name, kind in required.items() if not isinstance(record.get(name), kind)]
    if wrong or not all(isinstance(row, dict) for row in record["memory"]):
        raise TraceError(f"{path}: a damaged run record ({', '.join(wrong) or 'memory'}); train again")
    return record


def failure_of(record: dict[str, Any]) -> str:
    """How a run ended if it did not complete, in words; else empty."""
    ended = record.get("ended")
    if not isinstance(ended, dict) or not isinstance(ended.get("how"), str):
        return "how the run ended is not in its record"
    if ended["how"] == "completed":
        return ""
    return f"this run ended early ({ended['how']}: {ended.get('message')})"


def leaves_traces(record: dict[str, Any]) -> bool:
    """Whether the run was to leave traces: not with --no-profile."""
    return not record["config"]["no_profile"]


def profiled_ranks(record: dict[str, Any]) -> list[int]:
    """The ranks of which the run was to leave traces: all of them, or those of --profile-ranks.

    Raises:
        TraceError: the record does not say.
    """
    chosen = record["config"].get("profile_ranks")
    try:
        return sorted(ranks_in(chosen, "--profile-ranks")) if chosen else list(range(record["world_size"]))
    except (UserError, TypeError):
        raise TraceError(f"a damaged run record (config.profile_ranks: {chosen}); train again") from None


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write `table` as CSV, whole or not at all. Text that a spreadsheet would run as a formula gets a `'` before it.

    Raises:
        TraceError: the file cannot be written.
    """

    def harmless(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value

    table = table.copy()
    for name in table.select_dtypes(["object", "str"]).columns:
        table[name] = pd.Series([harmless(value) for value in table[name]], table.index, dtype=object)
    write_text(path, table.to_csv(index=False))


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all.

    Raises:
        TraceError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error.strerror}") from None
