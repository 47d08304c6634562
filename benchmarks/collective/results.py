"""What the collective benchmark has measured so far: a table on the terminal and in a CSV file."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.collective.sizes import Measured
from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.metrics.exposure import bus_factor
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.link_model import LinkModel
from ddp_lab.runtime.link.speed import Link

COLUMNS = {
    "collective": "what was measured; `sharding.` before what the project's strategies call",
    "world_size": "processes that took part",
    "backend": "gloo, nccl or nccl-legacy",
    "device": "where the tensors were: cpu or cuda",
    "link_bits_per_s": "rate of each rank's link by `--link`",
    "size_bytes": "payload by nccl-tests' definition; of what is shared out, the whole",
    "count": "elements in nccl-tests' sense: of what is shared out, those of one rank",
    "type": "fp32, bf16 or fp16",
    "redop": "what is done to elements: sum or none",
    "iterations": "timed calls; in each, the slowest rank's time counts",
    "time_us": "mean time of a call, from a start that all ranks share",
    "algbw_gb_per_s": "size over mean time, in 10^9 bytes a second",
    "busbw_gb_per_s": "algbw times nccl-tests' factor for collective and ranks",
    "wrong": "wrong elements of one checked call, summed over ranks; none for a barrier",
    "p50_us": "median time of a call",
    "p95_us": "time that 5 % of the calls exceeded",
    "p99_us": "time that 1 % of the calls exceeded",
    "spread_pct": "between the quartiles of the calls' times, as share of the median",
}
"""Of the CSV, with their meanings."""
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
    """Grows with each size. After each, all of it is in the file. On rank 0.

    Attributes:
        skipped: What could not be measured, and why.
    """

    def __init__(self, path: Path, ranks: Ranks, link: Link | None) -> None:
        self.path, self._ranks, self._link = path, ranks, link
        self._rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def begin(self, collective: str, type_name: str) -> None:
        ranks = self._ranks
        of_type = f", {type_name}" if type_name else ""
        print(f"\n{collective}{of_type}: {ranks.world_size} ranks, {ranks.backend} on {ranks.device.type}")
        print("".join(f"{heading:>{width}}" for heading, width, _ in SHOWN.values()), flush=True)

    def add(self, measured: Measured) -> None:
        """
        Raises:
            UserError: the file cannot be written.
        """
        row = make_row(measured, self._ranks, self._link)
        self._rows.append(row)
        print("".join(cell(row[name], width, digits) for name, (_, width, digits) in SHOWN.items()), flush=True)
        self.write()

    def skip(self, message: str) -> None:
        self.skipped.append(message)
        print(f"skipped: {message}", flush=True)

    def end(self, collective: str, type_name: str) -> None:
        """After the last size: a line through the medians."""
        table = pd.DataFrame(self._rows)
        if len(table):
            table = table[(table["collective"] == collective) & (table["type"] == type_name)]
        if len(table):
            print(f"model: {model_text(LinkModel.fit(table['size_bytes'], table['p50_us'] * 1e-6))}", flush=True)

    def write(self) -> None:
        """
        Raises:
            UserError: the file cannot be written.
        """
        try:
            write_csv(self.path, pd.DataFrame(self._rows, columns=list(COLUMNS)).astype({"wrong": "Int64"}))
        except TraceError as error:
            raise UserError(f"{error}; choose another --output-dir") from None


def make_row(measured: Measured, ranks: Ranks, link: Link | None = None) -> dict[str, Any]:
    """A row of `COLUMNS`; None where a column does not apply."""
    micro = np.asarray(measured.seconds) * 1e6
    low, median, high, p95, p99 = np.percentile(micro, [25, 50, 75, 95, 99]).tolist()
    mean = float(micro.mean())
    algbw = measured.size / mean / 1000 if measured.size else None  # bytes a us are MB/s
    factor = bus_factor(measured.collective.removeprefix("sharding."), ranks.world_size)
    return {
        "collective": measured.collective,
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "link_bits_per_s": link.bits_per_s if link else None,
        "size_bytes": measured.size,
        "count": measured.count,
        "type": measured.type_name or None,
        "redop": measured.redop,
        "iterations": len(micro),
        "time_us": mean,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": None if algbw is None else algbw * factor,
        "wrong": measured.wrong,
        "p50_us": median,
        "p95_us": p95,
        "p99_us": p99,
        "spread_pct": 100 * (high - low) / median,
    }


def model_text(model: LinkModel) -> str:
    """`12 us + 0.412 ns/B`."""
    latency = f"{model.latency_s * 1e3:.2f} ms" if model.latency_s >= 1e-3 else f"{model.latency_s * 1e6:.3g} us"
    return f"{latency} + {model.seconds_per_byte * 1e9:.3g} ns/B"


def cell(value: Any, width: int, digits: int) -> str:
    if isinstance(value, str):
        return f"{value:>{width}}"
    return f"{'-':>{width}}" if value is None or pd.isna(value) else f"{value:>{width}.{digits}f}"
