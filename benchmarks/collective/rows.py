"""One measurement as a row of the table, and the models that are fitted to many rows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.collective.sizes import Measured
from ddp_lab.analysis.metrics.exposure import bus_factor
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.link.link_model import LinkModel
from ddp_lab.runtime.link.speed import Link

OF_ONE_MODEL = ("collective", "world_size", "backend", "device", "link_bits_per_s", "type")
"""Measurements with the same values in these columns share one model."""


def make_row(measured: Measured, ranks: Ranks, link: Link | None = None) -> dict[str, Any]:
    """A row of `ddp_lab.analysis.benchmark_columns.RESULT_COLUMNS`; None where a column does not apply."""
    micro = np.asarray(measured.seconds) * 1e6
    low, median, high, p95, p99 = np.percentile(micro, [25, 50, 75, 95, 99]).tolist()
    mean = float(micro.mean())
    algbw = measured.size / mean / 1000 if measured.size else None  # bytes a us are MB/s
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
        "busbw_gb_per_s": None if algbw is None else algbw * busbw_over_algbw(measured.collective, ranks.world_size),
        "wrong": measured.wrong,
        "p50_us": median,
        "p95_us": p95,
        "p99_us": p99,
        "spread_pct": 100 * (high - low) / median,
    }


def busbw_over_algbw(collective: str, world_size: int) -> float:
    """nccl-tests' factor (doc/PERFORMANCE.md)."""
    return bus_factor(collective.removeprefix("sharding."), world_size)


def fit_models(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """A `LinkModel` of the median times of each group of rows that agree in `OF_ONE_MODEL`, barriers left out.

    Returns:
        For each group those columns, `sizes` (how many), `latency_s` and `seconds_per_byte`.
    """
    fits = []
    for key, group in rows[rows["size_bytes"] > 0].groupby(list(OF_ONE_MODEL), sort=False, dropna=False):
        of_group = {name: None if pd.isna(value) else value for name, value in zip(OF_ONE_MODEL, key, strict=True)}
        model = LinkModel.fit(group["size_bytes"], group["p50_us"] * 1e-6)
        fits.append({**of_group, "sizes": int(group["size_bytes"].nunique()), **asdict(model)})
    return fits


def model_text(fit: Mapping[str, Any]) -> str:
    """`12 us + 0.412 ns/B`."""
    latency = fit["latency_s"]
    latency_text = f"{latency * 1e3:.2f} ms" if latency >= 1e-3 else f"{latency * 1e6:.3g} us"
    return f"{latency_text} + {fit['seconds_per_byte'] * 1e9:.3g} ns/B"
