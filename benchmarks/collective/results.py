"""What the collective benchmark has measured so far, on disk and on the terminal."""

import datetime
import platform
import socket
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.collective.rows import fit_models, make_row, model_text
from benchmarks.collective.sizes import Measured
from ddp_lab.analysis.benchmark_columns import RESULT_COLUMNS
from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.files import write_csv
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import Link
from ddp_lab.runtime.records.record import device_name, package_versions, write_json

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


class Results:
    """Grows with each size. After each, all of it is in the CSV and the JSON file. On rank 0."""

    def __init__(self, path: Path, ranks: Ranks, settings: dict[str, Any]) -> None:
        """`path`: of both files, without their endings."""
        self.path, self._ranks, self._link = path, ranks, Link.parse(settings["link"])
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
            "link_bits_per_s": self._link.bits_per_s if self._link else None,
            "settings": settings,
        }
        self.write(complete=False)

    def begin(self, collective: str, type_name: str) -> None:
        ranks = self._ranks
        of_type = f", {type_name}" if type_name else ""
        print(f"\n{collective}{of_type}: {ranks.world_size} ranks, {ranks.backend} on {ranks.device.type}")
        print("".join(f"{heading:>{width}}" for heading, width, _ in SHOWN.values()), flush=True)

    def add(self, measured: Measured) -> None:
        row = make_row(measured, self._ranks, self._link)
        self._rows.append(row)
        print("".join(cell(row[name], width, digits) for name, (_, width, digits) in SHOWN.items()), flush=True)
        self.write(complete=False)

    def skip(self, message: str) -> None:
        self._skipped.append(message)
        print(f"skipped: {message}", flush=True)
        self.write(complete=False)

    def end(self, collective: str, type_name: str) -> None:
        """After the last size: fit the model."""
        rows = self.table()
        for fit in fit_models(rows[(rows["collective"] == collective) & (rows["type"] == type_name)]):
            self._fits[collective, type_name] = fit
            print(f"model: {model_text(fit)}", flush=True)
        self.write(complete=False)

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self._rows, columns=list(RESULT_COLUMNS)).astype({"wrong": "Int64"})

    def write(self, complete: bool) -> None:
        """Both files, each whole or not at all.

        Raises:
            UserError: they cannot be written.
        """
        try:
            write_csv(self.path.with_name(f"{self.path.name}.csv"), self.table())
        except TraceError as error:
            raise UserError(f"{error}; choose another --output-dir") from None
        measured = {"skipped": self._skipped, "fits": list(self._fits.values()), "rows": self._rows}
        write_json(self.path.with_name(f"{self.path.name}.json"), {**self._about, "complete": complete, **measured})


def cell(value: Any, width: int, digits: int) -> str:
    if isinstance(value, str):
        return f"{value:>{width}}"
    return f"{'-':>{width}}" if value is None or pd.isna(value) else f"{value:>{width}.{digits}f}"
