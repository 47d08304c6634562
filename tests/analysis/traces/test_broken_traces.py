"""Traces and records that are broken or hostile: a message that says what is usable, never a traceback."""

import csv
import gzip
import json
import re

import pytest

from ddp_lab.analysis.command import main
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.summary import read_rank
from ddp_lab.analysis.traces.reading import LONGEST_NAME
from tests.analysis.windows import analysis_of
from tests.tables import each_row
from tests.traces import cpu_trace, cuda_trace, event, write, write_run

READS = "reading traces of x\n"
NAME = "20260101-000000-abcd.step7.pt.trace.json.gz"


def steps_at(*times):
    """Steps as (number, start, duration), each with an operator in its first microsecond."""
    return [
        part
        for number, start, duration in times
        for part in (
            event("user_annotation", f"ProfilerStep#{number}", start, duration),
            event("cpu_op", "aten::mm", start, 1),
        )
    ]


def deep(levels=100_000):
    return b'{"traceEvents": [{"ph": "X", "args": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}]}"


UNUSABLE = {
    "empty": (b"", "is empty"),
    "cut short": (gzip.compress(json.dumps(cpu_trace()).encode())[:-200], "cut short or damaged"),
    "cut short, not zipped": (json.dumps(cpu_trace()).encode()[:-200], "not valid JSON"),
    "nested deeply inside": (deep(), "nested too deeply"),
    "not a trace": (b'{"traceEvents": 3}', "no list traceEvents"),
    "no text": (b"\x00\xff\x00\xff", "not valid JSON"),
    "an endless number": (b'{"traceEvents": [{"ph": "X", "ts": ' + b"9" * 10_000 + b"}]}", "nothing to analyse|valid"),
    "no steps": ([event("cpu_op", "aten::mm", 0, 1)], "no ProfilerStep#"),
    "no durations": ([{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1}], "no event with a duration"),
    "nothing ran": ([event("user_annotation", "ProfilerStep#1", 0, 9)], "nothing ran"),
    "a device that was not profiled": (
        [*steps_at((5, 0, 9)), event("user_annotation", "nccl:all_reduce", 1, 1)],
        "not what ran there; profile the device too",
    ),
    "a clock that goes back": (steps_at((5, 2000, 900), (6, 1000, 900), (7, 3000, 900)), "its clock went back"),
    "a step of weeks": (steps_at((5, 0, 1e13), (6, 2e13, 9)), "lasts longer than a day"),
}


def content(trace):
    return trace if isinstance(trace, bytes) else json.dumps({"traceEvents": trace}).encode()


@each_row("case", UNUSABLE)
def test_what_cannot_be_used_is_said_in_one_line(tmp_path, case):
    data, message = UNUSABLE[case]
    path = tmp_path / NAME
    path.write_bytes(content(data))
    problem = read_rank(path, 0, include_last_step=False)
    assert isinstance(problem, str) and problem.startswith(str(path)) and "\n" not in problem
    assert re.search(message, problem), problem


def test_what_cannot_be_used_is_named_and_the_rest_is_used(tmp_path, capsys):
    trace_dir = write_run(tmp_path / "profile" / "x")
    broken, intact = (next(trace_dir.glob(f"rank_{rank}/*")) for rank in (0, 1))
    broken.write_bytes(b"")
    assert main("reports", ["--trace-dir", str(trace_dir)]) == 0
    reads, *warnings = capsys.readouterr().err.splitlines()
    assert reads == READS.strip() and len(warnings) == 2 and all(line.startswith("warning: ") for line in warnings)
    assert str(broken) in warnings[0] and "of rank 1 only" in warnings[1]
    page = tmp_path / "reports" / "x" / "summary.html"
    assert "Incomplete: of rank 1 only" in page.read_text()
    rows = list(csv.DictReader(page.with_suffix(".csv").open()))
    assert [row["rank"] for row in rows] == ["1"]
    before = page.read_bytes()
    intact.write_bytes(b"")
    assert main("reports", ["--trace-dir", str(trace_dir)]) == 1
    error = capsys.readouterr().err.removeprefix(READS)
    assert error.startswith("error: ") and error.count("\n") == 1 and "1 others" in error, error
    assert page.read_bytes() == before


def test_an_incomplete_run_has_no_figure_that_compares_ranks(tmp_path, capsys):
    trace_dir = write_run(tmp_path / "profile" / "x")
    next(trace_dir.glob("rank_0/*")).unlink()
    assert main("reports", ["--trace-dir", str(trace_dir)]) == 0
    assert "no trace of rank 0; copy the missing files here" in capsys.readouterr().err
    tables = analysis_of(trace_dir).exposure
    assert tables.collectives[["wait_ms", "late_rank", "lateness_ms", "busbw_gbps"]].isna().to_numpy().all()
    assert tables.steps[["exposed_wait_ms", "exposed_transfer_ms"]].isna().to_numpy().all()
    assert tables.steps["exposed_ms"].tolist() == pytest.approx([0.2, 0.2])


def test_a_window_that_cannot_be_used_leaves_the_others(tmp_path, capsys):
    for run in ("20261121-090000-aaaa", "20261121-100000-bbbb"):
        trace_dir = write_run(tmp_path / "profile" / "x", run_id=run)
    for path in trace_dir.glob("rank_*/*aaaa*"):
        path.write_bytes(b"")
    assert main("reports", ["--trace-dir", str(trace_dir), "--select", "all"]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(f"({READS}){{2}}warning: a window without a report: .*\n", printed.err)
    assert printed.out == f"report: {tmp_path / 'reports' / 'x' / 'run_1_20261121-100000' / 'summary.html'}\n"


@each_row(
    ("change", "message"),
    [
        (lambda: {**cpu_trace(), "traceEvents": cpu_trace()["traceEvents"][8:]}, "not of the same run or window"),
        (lambda: cuda_trace(0), "has a device of kind cpu, but"),
        (lambda: cpu_trace(0, world_size=3), "has a world size of 2, but"),
    ],
)
def test_ranks_that_do_not_belong_together(tmp_path, capsys, change, message):
    trace_dir = write_run(tmp_path)
    write(next(trace_dir.glob("rank_0/*")), change())
    assert main("reports", ["--trace-dir", str(trace_dir), "--output-dir", str(tmp_path / "out")]) == 1
    reads, error = capsys.readouterr().err.splitlines()
    assert reads.startswith("reading ") and message in error and not (tmp_path / "out").exists()


def test_a_file_in_the_folder_of_another_rank(tmp_path):
    trace_dir = write_run(tmp_path)
    write(next(trace_dir.glob("rank_0/*")), cpu_trace(1))
    (problem,) = analysis_of(trace_dir).problems
    assert "says that it is of rank 1; its name says rank 0" in problem


# Hostile -------------------------------------------------------------------------------------------------------------

HOSTILE = ["=cmd|'/c calc'!A1", "<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "a\x00\x1b[31mb\u202e"]


@each_row("name", ["".join(HOSTILE), "x" * 2**20])
def test_hostile_names_are_text(tmp_path, name):
    """On the page, and in tables, where no field is a formula."""
    for rank in range(2):
        trace = cuda_trace(rank, **{"Process Group Name": name, "dtype": name, "Collective name": name})
        for part in trace["traceEvents"]:
            part["name"] = part["name"].replace("gemm", name)
        write(tmp_path / "traces" / f"rank_{rank}.json", trace)
    page = write_summary(analysis_of(tmp_path / "traces"), "<b>choice", tmp_path / "out")
    text = page.read_text().partition("</style>")[2]
    assert "<b>choice" not in text and (name not in text or not set("<>\x00") & set(name))
    assert len(text) < 6e6 and "x" * (LONGEST_NAME + 1) not in text
    rows = [row for path in page.parent.glob("*.csv") for row in csv.reader(path.open())]
    assert not [field for row in rows for field in row if re.match(r"[=@\t\r]|[+-](?![\d.])", field)]
