"""Bandwidth over message size, from the collectives of the training run itself, by nccl-tests' definitions."""

import numpy as np
import pandas as pd

from analysis.columns import BANDWIDTH_COLUMNS

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bandwidths(collectives: pd.DataFrame) -> pd.DataFrame:
    """A row for each collective of known bandwidth in the table of `collectives.csv`, which has a row for each rank."""
    known = collectives.dropna(subset=["busbw_gbps"])
    return known.drop_duplicates(["step", "group", "sequence"])


def bandwidth_by_size(known: pd.DataFrame) -> pd.DataFrame:
    """`bandwidths` by kind and class of sizes (`BANDWIDTH_COLUMNS`); a class is a power of two up to the next."""
    classes = known.assign(size_bytes=2.0 ** np.floor(np.log2(known["bytes"])))
    rows = []
    for (kind, size), calls in classes.groupby(["kind", "size_bytes"]):
        low, median, high = calls["busbw_gbps"].quantile([0.05, 0.5, 0.95])
        best = calls["busbw_gbps"].max()
        rows.append(
            {
                "kind": kind,
                "size_bytes": size,
                "collectives": len(calls),
                "bytes": calls["bytes"].median(),
                "done_after_ms": calls["done_after_ms"].median(),
                "algbw_gbps": calls["algbw_gbps"].median(),
                "busbw_gbps": median,
                "busbw_gbps_p5": low,
                "busbw_gbps_p95": high,
                "busbw_gbps_best": best,
                "of_best_pct": 100 * median / best,
            }
        )
    return pd.DataFrame(rows, columns=list(BANDWIDTH_COLUMNS))


def size_class(size: float) -> str:
    """`1 MiB to 2 MiB`, for the class that begins at 2**20 bytes."""
    return f"{binary_size(size)} to {binary_size(2 * size)}"


def binary_size(size: float) -> str:
    """A power of two as people read it: `64 KiB` for 65536."""
    unit = min(int(np.log2(size)) // 10, len(UNITS) - 1)
    return f"{size / 1024**unit:g} {UNITS[unit]}"
