"""Figures of reports, and what pages and CSV files show of them, against traces that can be worked out by hand."""

import csv
import hashlib
import html
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.analysis.columns import COLUMNS, CSV_COLUMNS, SCHEMA_VERSION
from ddp_lab.analysis.command import main
from ddp_lab.analysis.comparison.changes import Run, changes
from ddp_lab.analysis.comparison.compare import comparison
from ddp_lab.analysis.comparison.traced import keep
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.report.pages.tables import kernel_times
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces import intervals
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.runtime.errors import UserError
from scripts.print_docs import columns_page
from tests.analysis.windows import analysis_of
from tests.tables import each_row
from tests.traces import cpu_trace, cuda_trace, record, record_of_eight_steps, write, write_run

DOCS = Path(__file__).parents[2] / "docs"

# Intervals -----------------------------------------------------------------------------------------------------------

grid = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8).map(
    lambda pairs: np.array(pairs, dtype=float).reshape(-1, 2)
)


def moments(pairs):
    """The unit cells that intervals with whole ends cover."""
    return {cell for start, end in pairs for cell in range(int(start), int(end))}


@given(grid, grid)
def test_interval_sets_against_brute_force(first, second):
    merged = intervals.union(first)
    assert moments(merged) == moments(first)
    assert (merged[1:, 0] > merged[:-1, 1]).all()
    assert intervals.length(first) == len(moments(first))
    removed = intervals.union(second)
    assert moments(intervals.minus(merged, removed)) == moments(first) - moments(second)
    assert moments(intervals.clip(first, 5, 20)) == moments(first) & set(range(5, 20))


# Figures worked out by hand ------------------------------------------------------------------------------------------


KERNELS = (
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>(float**)",
    "cross_device_reduce_1stage<float>",
)


@each_row("make", [cpu_trace, cuda_trace, *(partial(cuda_trace, comm_name=name) for name in KERNELS)])
def test_figures_of_a_trace_worked_out_by_hand(tmp_path, make):
    """Docstring of `cpu_trace`: two analysed steps; between them nothing runs from t+900 to t+1100.

    HTA counts from the first kernel to the last: 100 .. 1900, so 1800 us, of which 1000 compute, 400 exposed and 400
    idle (two gaps of 100 in the steps, and 200 between them).
    """
    analysis = analysis_of(write_run(tmp_path / "profile" / "x", make))
    for row in analysis.summary.to_dict("records"):
        assert row["steps"] == 2 and row["trace_kind"] == ("cpu" if make is cpu_trace else "cuda")
        assert (row["compute_ms"], row["non_compute_ms"], row["idle_ms"]) == (0.5, 0.2, 0.2)
        assert row["compute_pct"] == pytest.approx(100 * 1000 / 1800, abs=0.01)
        assert row["overlap_pct"] == pytest.approx(33.33, abs=0.01)
        assert row["all_reduce_calls_per_step"] == 1 and row["all_reduce_ms_per_step"] == 0.3
    if make is cpu_trace:
        assert analysis.summary["all_reduce_bytes_per_step"].tolist() == [4000, 4000]
    kernels = kernel_times(analysis.timelines).set_index(["rank", "name"])
    compute = kernels.loc[(0, "aten::mm" if make is cpu_trace else "gemm")]
    assert (compute["sum"], compute["mean"], compute["max"]) == (600, 300, 300)


# Finding and reading -------------------------------------------------------------------------------------------------


def gloo_on_cuda(rank):
    """Compute on a device, communication on Gloo's CPU threads."""
    device = [e for e in cuda_trace(rank)["traceEvents"] if not e["name"].startswith("nccl")]
    gloo = [e for e in cpu_trace(rank)["traceEvents"] if "c10d" in e["name"] or "gloo" in e["name"]]
    return {**cpu_trace(rank), "traceEvents": device + gloo}


def test_communication_that_the_device_does_not_show_is_unknown_not_zero(tmp_path):
    analysis = analysis_of(write_run(tmp_path, gloo_on_cuda))
    for row in analysis.summary.to_dict("records"):
        assert row["compute_ms"] == 0.5 and row["all_reduce_calls_per_step"] == 1
        assert np.isnan([row["non_compute_ms"], row["idle_pct"], row["overlap_pct"]]).all()
    assert "Gloo's CPU threads" in analysis.kind_sentence


def test_missing_and_empty_folders(tmp_path, capsys):
    with pytest.raises(UserError, match="no such folder"):
        find_windows(tmp_path / "nowhere")
    (tmp_path / "x.rank_0.flight.json").write_text("{}")  # of a run that ended before its first window
    with pytest.raises(UserError, match="no trace"):
        find_windows(tmp_path)
    assert main("reports", ["--trace-files", str(tmp_path / "nowhere.json")]) == 1
    assert "no such trace file" in capsys.readouterr().err


# Pages ---------------------------------------------------------------------------------------------------------------


def not_shown(page, table):
    """Columns of a CSV that are in no table of the page, which shows every value of the others as it is there."""
    shown = {}
    for column, value in re.findall(r'data-column="([^"]*)" data-value="([^"]*)"', page.read_text()):
        shown.setdefault(column, set()).add(html.unescape(value))
    rows = list(csv.DictReader(table.open()))
    for row in rows:
        values = {name: value for name, value in row.items() if value and name in shown}
        assert {name: value for name, value in values.items() if value not in shown[name]} == {}
    return set(rows[0]) - set(shown)


def test_pages_show_what_the_csv_says_offline_and_escaped(tmp_path):
    trace_dir = write_run(tmp_path / "profile" / "x")
    (window,) = find_windows(trace_dir)
    write(trace_dir / f"{window.run_id}.run.json", record_of_eight_steps("x", 0.2))
    analysis = analyse_window(window)
    assert analysis.summary["model_states_bytes"].tolist() == [144 * 2**20, 72 * 2**20]
    page = write_summary(analysis, "<script>alert(1)</script>", tmp_path / "reports" / "x")
    kinds_that_did_not_run = {name for name in COLUMNS["kinds"] if not name.startswith("all_reduce")}
    assert not_shown(page, page.with_suffix(".csv")) == kinds_that_did_not_run
    assert not analysis.summary[sorted(kinds_that_did_not_run)].to_numpy().any()
    assert not_shown(page, page.with_name("audit.csv")) == set()
    text = page.read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?!data:)([^\"]*)", text)
    assert [(page.parent / address).resolve() for address in loaded] == [tmp_path / "reports" / "plotly.min.js"]
    assert "<script>alert" not in text and "r<script>" not in text


def test_every_column_is_documented(tmp_path):
    text = (DOCS / "csv-columns.md").read_text()
    assert columns_page(text) == text, "python -m scripts.print_docs prints it anew"
    assert all(name in part.splitlines()[0] for name, part in zip(CSV_COLUMNS, text.split("\n## ")[1:], strict=True))
    analysis = analysis_of(write_run(tmp_path / "x"))
    write_summary(analysis, "x", tmp_path)
    run = Run(record("x", 1.0), keep(analysis))
    comparison({"x": run.record}, {"x": keep(analysis)}, "x").to_csv(tmp_path / "compare.csv", index=False)
    changes([run], [run]).to_csv(tmp_path / "changes.csv", index=False)
    for name, columns in CSV_COLUMNS.items():
        assert pd.read_csv(tmp_path / name).columns.tolist() == list(columns)


# Figures -------------------------------------------------------------------------------------------------------------


def test_columns_change_with_the_version_of_the_schema():
    """If this fails, raise `version` in columns.toml, say in docs/csv-columns.md what changed, put the hash here."""
    names = {name: list(columns) for name, columns in CSV_COLUMNS.items()}
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
    assert (SCHEMA_VERSION, digest) == (11, "0150b2fa0aba")
    text = (DOCS / "csv-columns.md").read_text()
    assert f"Schema version {SCHEMA_VERSION}." in text and f"\n| {SCHEMA_VERSION} | " in text
