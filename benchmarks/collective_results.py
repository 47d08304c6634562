"""What the collective benchmark has measured so far, on disk and on the terminal."""

import datetime
import platform
import socket
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analysis.benchmark_columns import RESULT_COLUMNS
from analysis.errors import TraceError
from analysis.files import write_csv
from benchmarks.collective_rows import error_text, fit_models, link_rate, make_row, model_text
from benchmarks.measured import Measured
from benchmarks.sizes import shown_size
from training.distributed import Ranks
from training.errors import UserError
from training.records.record import device_name, package_versions, write_json

SCHEMA_VERSION = 1
SHOWN = {
    "size_bytes": ("size B", 11, 0),
    "count": ("count", 11, 0),
    "type": ("type", 5, 0),
    "redop": ("redop", 6, 0),
    "time_us": ("time us", 11, 1),
    "algbw_gb_per_s": ("algbw GB/s", 11, 3),
    "busbw_gb_per_s": ("busbw GB/s", 11, 3),
    "wrong": ("#wrong", 7, 0),
    "p50_us": ("p50 us", 11, 1),
    "p95_us": ("p95 us", 11, 1),
    "p99_us": ("p99 us", 11, 1),
    "spread_pct": ("spread %", 9, 1),
    "iterations": ("calls", 6, 0),
}
"""Columns of the terminal: heading, width, digits."""
WIDEST_MATRIX = 8


class Results:
    """Grows by what was measured at one size; after each, all of it is in the CSV and the JSON file. On rank 0."""

    def __init__(self, path: Path, ranks: Ranks, settings: dict[str, Any]) -> None:
        """`path`: of both files, without their endings."""
        self.path, self._ranks = path, ranks
        self._rows: list[dict[str, Any]] = []
        self._skipped: list[str] = []
        self._fits: dict[tuple[str, str], dict[str, Any]] = {}
        self._about = {
            "schema_version": SCHEMA_VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "world_size": ranks.world_size,
            "backend": ranks.backend,
            "device": ranks.device.type,
            "device_name": device_name(ranks.device),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **package_versions()},
            "link_bits_per_s": link_rate(),
            "settings": settings,
        }
        self.write(complete=False)

    def begin(self, collective: str, type_name: str) -> None:
        ranks = self._ranks
        of_type = f", {type_name}" if type_name else ""
        print(f"\n{collective}{of_type}: {ranks.world_size} ranks, {ranks.backend} on {ranks.device.type}")
        print("".join(f"{heading:>{width}}" for heading, width, _ in SHOWN.values()), flush=True)

    def add(self, measured: list[Measured]) -> None:
        """One measurement, or one for each pair of ranks, of which the terminal shows the medians."""
        rows = [make_row(each, self._ranks) for each in measured]
        self._rows += rows
        frame = pd.DataFrame(rows)
        middle = {**rows[0], **frame.median(numeric_only=True).to_dict(), "wrong": frame["wrong"].sum(min_count=1)}
        print("".join(shown(middle[name], width, digits) for name, (_, width, digits) in SHOWN.items()), flush=True)
        self.write(complete=False)

    def skip(self, message: str) -> None:
        self._skipped.append(message)
        print(f"skipped: {message}", flush=True)
        self.write(complete=False)

    def end(self, collective: str, type_name: str) -> None:
        """After the last size: the model, and which pairs are slow."""
        rows = self.table()
        mine = rows[(rows["collective"] == collective) & (rows["type"] == type_name)]
        if collective == "send_recv" and len(mine) and self._ranks.world_size <= WIDEST_MATRIX:
            largest = mine[mine["size_bytes"] == mine["size_bytes"].max()]
            matrix = largest.pivot(index="from_rank", columns="to_rank", values="busbw_gb_per_s")
            print(f"GB/s of {shown_size(largest['size_bytes'].iloc[0])}, from rank (row) to rank (column)")
            print(matrix.to_string(float_format="{:.3f}".format, na_rep="-", index_names=False))
        for fit in fit_models(mine):
            self._fits[collective, type_name] = fit
            print(f"model: {model_text(fit['pieces'])}\n       {error_text(fit)}", flush=True)
        self.write(complete=False)

    def table(self) -> pd.DataFrame:
        table = pd.DataFrame(self._rows, columns=list(RESULT_COLUMNS))
        whole = ("from_rank", "to_rank", "wrong")
        return table.astype(dict.fromkeys(whole, "Int64"))

    def write(self, complete: bool) -> None:
        """Both files, each whole or not at all.

        Raises:
            UserError: they cannot be written.
        """
        try:
            write_csv(self.path.with_name(f"{self.path.name}.csv"), self.table())
        except TraceError as error:
            raise UserError(f"{error}; choose another --output-dir") from None
        content = {
            **self._about,
            "complete": complete,
            "skipped": self._skipped,
            "fits": list(self._fits.values()),
            "rows": self._rows,
        }
        write_json(self.path.with_name(f"{self.path.name}.json"), content)


def shown(value: Any, width: int, digits: int) -> str:
    if isinstance(value, str):
        return f"{value:>{width}}"
    return f"{'-':>{width}}" if value is None or pd.isna(value) else f"{value:>{width}.{digits}f}"
