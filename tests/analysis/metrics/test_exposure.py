"""Exposed communication, in traces worked out by hand.

Against an independent reading of raw traces: `test_against_hta.py` and `test_real_runs.py`.
"""

from pathlib import Path

import pandas as pd
import pytest

from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.report.figures.lanes import bounds
from ddp_lab.analysis.traces.collectives import COLUMN_TYPES, COLUMNS, EVERYBODY
from ddp_lab.analysis.traces.timeline import RankTimeline
from tests.analysis.windows import analysis_of
from tests.traces import ahead_trace, write_run

PARTS = ["compute_ms", "exposed_wait_ms", "exposed_transfer_ms", "exposed_copy_ms", "idle_ms"]


def timeline(
    rank,
    steps,
    compute,
    calls,
    copies=None,
    world_size=2,
):
    """Made of pairs of times in us; `calls` are (kind, bytes, start, end), issued in this order.

    A call may have two members more: the name of its group, and the group's size."""
    kernels = [("compute", "0", "mm", start, end, start) for start, end in compute]
    kernels += [("memory", "1", "copy", start, end, start) for start, end in copies or []]
    kernels += [("communication", "2", "x", start, end, start) for _, _, start, end, *_ in calls]
    rows = [
        (kind, start, end, size, *(group or (EVERYBODY, world_size)), "float", "2", start, "")
        for kind, size, start, end, *group in calls
    ]
    numbered = [(number, start, end) for number, (start, end) in enumerate(steps)]
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        kind="cpu",
        path=Path("trace"),
        steps=pd.DataFrame(numbered, columns=["number", "start", "end"]),
        phases=pd.DataFrame([("backward", 0.0, 50.0)], columns=["name", "start", "end"]),
        kernels=pd.DataFrame(kernels, columns=["lane", "stream", "name", "start", "end", "launch"]),
        collectives=pd.DataFrame(rows, columns=COLUMNS).astype(COLUMN_TYPES),
    )


def test_kernels_belong_to_the_step_that_launched_them(tmp_path):
    """Docstring of `ahead_trace`. At the end of the host's second step, at 200, the device has not begun the first."""
    analysis = analysis_of(write_run(tmp_path, ahead_trace))
    steps = analysis.exposure.steps
    assert steps["step"].tolist() == [5, 6] * 2 and steps["step_ms"].tolist() == pytest.approx([0.9, 1.0] * 2)
    for row in steps.to_dict("records"):
        copies, idle = (0, 0.1) if row["step"] == 5 else (0.05, 0.15)
        assert [row[part] for part in PARTS] == pytest.approx([0.6, 0, 0.2, copies, idle])
    assert analysis.summary["profiled_step_ms"].tolist() == [0.95] * 2
    assert analysis.exposure.collectives["step"].tolist() == [5, 6] * 2
    assert bounds(analysis.timelines[0], 6) == (1300, 2300)


def test_waiting_is_laid_to_the_late_rank():
    """Rank 1 arrives at 80; rank 0 is there from 20 on and computes until 40. Both end at 100.

    On rank 0, 20 us are hidden, then 40 us are waiting and 20 transfer. Rank 1 computes until 80: only transfer."""
    first = timeline(0, [(0, 120)], [(0, 40)], [("all_reduce", 2000, 20, 100)])
    second = timeline(1, [(0, 120)], [(0, 80)], [("all_reduce", 2000, 80, 100)])
    tables = exposure([first, second])
    assert tables.steps[PARTS].to_numpy().tolist() == [
        pytest.approx([0.04, 0.04, 0.02, 0, 0.02]),
        pytest.approx([0.08, 0, 0.02, 0, 0.02]),
    ]
    rows = tables.collectives.set_index("rank")
    assert rows["late_rank"].tolist() == [1, 1] and rows["lateness_ms"].tolist() == pytest.approx([0.06, 0.06])
    assert rows["wait_ms"].tolist() == pytest.approx([0.06, 0]) and rows["transfer_ms"].tolist() == [0.02, 0.02]
    assert rows["exposed_wait_ms"].tolist() == pytest.approx([0.04, 0])
    assert rows["algbw_gbps"].tolist() == pytest.approx([0.1, 0.1])


def test_clocks_of_two_hosts_are_aligned():
    """Rank 1's clock is 5 ms ahead; on one clock, it is 10 us late in each of three all-reduces, which end together."""
    calls = [("all_reduce", 8, start, start + 60) for start in (100, 200, 300)]
    ahead = [("all_reduce", 8, 5010 + start, 5060 + start) for _, _, start, _ in calls]
    tables = exposure([timeline(0, [(0, 400)], [(0, 90)], calls), timeline(1, [(5000, 5400)], [(5000, 5090)], ahead)])
    assert tables.clocks["offset_ms"].tolist() == [0, 5] and tables.clocks["residual_ms"].tolist() == [0, 0]
    assert tables.collectives["late_rank"].eq(1).all()
    assert tables.collectives.groupby("rank")["wait_ms"].max().tolist() == pytest.approx([0.01, 0])


def test_what_ranks_do_not_share_is_not_split():
    """At one place they differ in kind, and at one in size: no last arrival, so no wait is claimed."""
    first = [("all_reduce", 8, 10, 20), ("broadcast", 8, 30, 40), ("all_reduce", 8, 50, 60)]
    second = [("all_reduce", 8, 10, 20), ("all_reduce", 8, 30, 40), ("all_reduce", 16, 50, 60)]
    tables = exposure([timeline(rank, [(0, 100)], [(0, 5)], calls) for rank, calls in enumerate((first, second))])
    is_known = tables.collectives["wait_ms"].notna()
    names = ["late_rank", "lateness_ms", "transfer_ms", "exposed_wait_ms", "done_after_ms", "algbw_gbps", "busbw_gbps"]
    assert tables.collectives.loc[is_known, names].notna().all(axis=None)
    assert tables.collectives.loc[~is_known, names].isna().all(axis=None) and (~is_known).sum() == 4
    assert tables.collectives.loc[is_known, "sequence"].tolist() == [0, 0]
    assert tables.collectives["exposed_ms"].tolist() == pytest.approx([0.01] * 6)


def test_a_call_that_was_not_recorded_pairs_none_of_its_step_wrongly():
    """Rank 1's second call of step 0 is missing: nobody can tell which is whose there; step 1 is whole."""
    calls = [("all_reduce", size, start, start + 10) for size, start in ((8, 10), (8, 30), (8, 50), (8, 110), (8, 130))]
    by_rank = [calls, [call for call in calls if call[2] != 30]]
    tables = exposure([timeline(rank, [(0, 100), (100, 200)], [(0, 5)], queue) for rank, queue in enumerate(by_rank)])
    assert tables.collectives.groupby("step")["wait_ms"].apply(lambda waits: waits.notna().all()).tolist() == [
        False,
        True,
    ]
    assert tables.collectives.loc[tables.collectives["step"] == 0, "wait_ms"].isna().all()
