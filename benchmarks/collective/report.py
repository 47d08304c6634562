"""Results of the collective benchmark from their files: one table and one page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.collective.rows import OF_ONE_MODEL, busbw_over_algbw, fit_models, model_text
from ddp_lab.analysis.benchmark_columns import FIT_COLUMNS, RESULT_COLUMNS
from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.report.pages.collectives import Measurements, write_collectives_page
from ddp_lab.runtime.link.link_model import LinkModel

CURVE_POINTS = 200


def report(files: Sequence[Path], folder: Path) -> Path:
    """Write `collectives.csv` and `collectives.html` into `folder` from the JSON files of runs; the page's path.

    Raises:
        TraceError: a file cannot be read or written, or is not one of the benchmark's.
    """
    runs = [read_run(path) for path in files]
    rows = pd.DataFrame([row for run in runs for row in run["rows"]], columns=list(RESULT_COLUMNS))
    rows = rows.astype({"wrong": "Int64"})
    if rows.empty:
        raise TraceError("nothing was measured, so there is nothing to show")
    rows = rows.sort_values("world_size", kind="stable", ignore_index=True)
    fits = fit_models(rows)
    measured = Measurements(
        rows,
        pd.DataFrame([{**fit, "model": model_text(fit)} for fit in fits], columns=list(FIT_COLUMNS)),
        curves(rows, fits),
        about(runs),
        [message for run in runs for message in run["skipped"]],
    )
    write_csv(folder / "collectives.csv", rows)
    page = folder / "collectives.html"
    write_collectives_page(measured, page)
    return page


def read_run(path: Path) -> dict[str, Any]:
    """The content of a run's JSON file.

    Raises:
        TraceError: it cannot be read, or is not one of the benchmark's.
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
    """One line for each run: where, when and with what."""
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
        seconds = LinkModel(fit["latency_s"], fit["seconds_per_byte"]).seconds(sizes)
        busbw = sizes / seconds / 1e9 * busbw_over_algbw(fit["collective"], fit["world_size"])
        of_fit = {name: fit[name] for name in OF_ONE_MODEL}
        parts.append(pd.DataFrame({"size_bytes": sizes, "seconds": seconds, "busbw_gb_per_s": busbw}).assign(**of_fit))
    return pd.concat(parts) if parts else pd.DataFrame(columns=[*OF_ONE_MODEL, "size_bytes"])
