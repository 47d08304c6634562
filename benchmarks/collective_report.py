"""Results of the collective benchmark from their files: one table, one page, and the published figures beside them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.benchmark_columns import FIT_COLUMNS, RESULT_COLUMNS
from analysis.errors import TraceError
from analysis.files import write_csv
from analysis.report.pages.collectives import PUBLISHED_COLUMNS, Measurements, write_collectives_page
from benchmarks.collective_rows import OF_ONE_MODEL, busbw_over_algbw, fit_models, model_text
from benchmarks.sizes import shown_size
from training.communication.link_model import LinkModel, Piece

MIB = 2**20
PUBLISHED_MS = {
    ("gloo", 2): {1: 1.0, 10: 6.4, 100: 69.6, 1024: 657.0},
    ("gloo", 4): {1: 2.8, 10: 13.4, 100: 139.9, 1024: 1378.0},
    ("nccl", 2): {10: 2.7, 100: 26.2, 1024: 268.5},
}
"""Milliseconds of an fp32 all-reduce by MB, by backend and ranks; of NCCL on two T4. None are published for 6 ranks."""
PUBLISHED_TEXT = (
    "All-reduce of fp32, medians over calls. A published MB is taken as 2^20 bytes, since the largest, 1024 MB, is "
    "a GiB only so. The published NCCL figures are of two T4 GPUs, those of Gloo of an unnamed CPU; none are published "
    "for 6 ranks. The same order of magnitude, and the same growth with size and ranks, is all that can be expected."
)
CURVE_POINTS = 200


def report(files: Sequence[Path], folder: Path, is_published: bool = False) -> Path:
    """Write `collectives.csv` and `collectives.html` into `folder` from the JSON files of runs; the page's path.

    Raises:
        TraceError: a file cannot be read or written, or is none of the benchmark's.
    """
    runs = [read_run(path) for path in files]
    rows = pd.DataFrame([row for run in runs for row in run["rows"]], columns=list(RESULT_COLUMNS))
    rows = rows.astype(dict.fromkeys(("from_rank", "to_rank", "wrong"), "Int64"))
    if rows.empty:
        raise TraceError("nothing was measured, so there is nothing to show")
    rows = rows.sort_values("world_size", kind="stable", ignore_index=True)
    fits = fit_models(rows)
    published = beside_published(rows) if is_published else None
    measured = Measurements(
        rows,
        pd.DataFrame([{**fit, "model": model_text(fit["pieces"])} for fit in fits], columns=list(FIT_COLUMNS)),
        curves(rows, fits),
        about(runs),
        [message for run in runs for message in run["skipped"]],
        published,
        PUBLISHED_TEXT,
    )
    write_csv(folder / "collectives.csv", rows)
    page = folder / "collectives.html"
    write_collectives_page(measured, page)
    if published is not None:
        show_published(published)
    return page


def read_run(path: Path) -> dict[str, Any]:
    """The content of a run's JSON file.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise TraceError(f"{path} is no JSON; give the .json files that benchmarks/collectives.py wrote") from None
    try:
        return {**content, "complete": bool(content["complete"]), "rows": [dict(row) for row in content["rows"]]}
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{path} was not written by benchmarks/collectives.py") from None


def about(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line a run: where, when and with what."""
    lines = []
    for run in runs:
        link = "" if run["link_bits_per_s"] is None else f", link of {run['link_bits_per_s'] / 1e6:g} Mbit/s"
        ended = "" if run["complete"] else "; it was stopped before its end"
        lines.append(
            f"{run['world_size']} ranks over {run['backend']} on {run['host']} ({run['device_name']}, threads a rank: "
            f"{run['threads']}{link}), torch {run['versions']['torch']}, {run['date']}{ended}."
        )
    return lines


def curves(rows: pd.DataFrame, fits: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """What each model predicts, at sizes from the least measured to the largest, evenly spaced by ratio."""
    parts = []
    for fit in fits:
        mine = rows[np.logical_and.reduce([rows[name].eq(fit[name]) | pd.isna(fit[name]) for name in OF_ONE_MODEL])]
        sizes = np.geomspace(mine["size_bytes"].min(), mine["size_bytes"].max(), CURVE_POINTS)
        seconds = LinkModel(tuple(Piece(**piece) for piece in fit["pieces"])).seconds(sizes)
        busbw = sizes / seconds / 1e9 * busbw_over_algbw(fit["collective"], fit["world_size"])
        of_fit = {name: fit[name] for name in OF_ONE_MODEL}
        parts.append(pd.DataFrame({"size_bytes": sizes, "seconds": seconds, "busbw_gb_per_s": busbw}).assign(**of_fit))
    return pd.concat(parts) if parts else pd.DataFrame(columns=[*OF_ONE_MODEL, "size_bytes"])


def beside_published(rows: pd.DataFrame) -> pd.DataFrame:
    """`PUBLISHED_COLUMNS`, a row for each all-reduce of fp32."""
    found = []
    for row in rows[(rows["collective"] == "all_reduce") & (rows["type"] == "fp32")].to_dict("records"):
        published = PUBLISHED_MS.get((row["backend"], row["world_size"]), {}).get(row["size_bytes"] / MIB)
        measured = row["p50_us"] / 1000
        ratio = measured / published if published else None
        found.append({**row, "published_ms": published, "measured_ms": measured, "ratio": ratio})
    return pd.DataFrame(found, columns=list(PUBLISHED_COLUMNS)).astype({"published_ms": float, "ratio": float})


def show_published(published: pd.DataFrame) -> None:
    print("\nall-reduce, fp32, median of a call; a published MB is taken as 2^20 bytes")
    print(f"{'backend':>8}{'ranks':>7}{'size':>10}{'published ms':>14}{'measured ms':>13}{'ratio':>8}")
    for row in published.itertuples():
        size = shown_size(row.size_bytes)
        known = not pd.isna(row.published_ms)
        of_row = (f"{row.published_ms:.1f}", f"{row.ratio:.2f}") if known else ("-", "-")
        print(f"{row.backend:>8}{row.world_size:>7}{size:>10}{of_row[0]:>14}{row.measured_ms:>13.1f}{of_row[1]:>8}")
