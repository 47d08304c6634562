"""Which rank is late, which calls are one collective, and how fast it was, worked out by hand.

Planted in real runs: `test_real_runs.py`.
"""

import pandas as pd
import pytest

from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.metrics.stragglers import stragglers
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.report.pages.tables import buckets
from ddp_lab.analysis.traces.collectives import only_group
from tests.analysis.metrics.test_exposure import timeline
from tests.analysis.windows import analysis_of
from tests.traces import cpu_trace, write

# Groups --------------------------------------------------------------------------------------------------------------

LOW, HIGH, WORLD = (("ranks 0, 1, group 1", 2), ("ranks 2, 3, group 2", 2), ("ranks 0, 1, 2, 3, group 0", 4))


def test_two_groups_in_flight_at_once():
    """Each rank issues one collective of all ranks and one of its half. In the low half the order is the other way
    round, so that places alone would match collectives of different groups.

    The world's: arrivals at 10, 12, 14, 30, so rank 3 is last, 18 later than the median (12) of the others. The low
    half's: 20 and 24, rank 1 is last by 4. The high half's: 40 and 31, rank 2 is last by 9.
    """
    world = [("all_reduce", 8, start, 60, *WORLD) for start in (10, 12, 14, 30)]
    low = [("all_reduce", 8, start, 50, *LOW) for start in (20, 24)]
    high = [("all_reduce", 8, start, 55, *HIGH) for start in (40, 31)]
    calls = [[low[0], world[0]], [low[1], world[1]], [world[2], high[0]], [world[3], high[1]]]
    tables = exposure([timeline(rank, [(0, 100)], [(0, 5)], queue, world_size=4) for rank, queue in enumerate(calls)])
    last = tables.collectives.groupby("group")[["late_rank", "lateness_ms", "done_after_ms"]].agg(["nunique", "first"])
    assert (last.xs("nunique", axis="columns", level=1) == 1).all(axis=None)
    values = last.xs("first", axis="columns", level=1).astype(float)
    assert values.loc[WORLD[0]].tolist() == pytest.approx([3, 0.018, 0.030])
    assert values.loc[LOW[0]].tolist() == pytest.approx([1, 0.004, 0.026])
    assert values.loc[HIGH[0]].tolist() == pytest.approx([2, 0.009, 0.015])
    late = stragglers(tables).set_index("rank")
    assert late["last"].tolist() == [0, 1, 1, 1] and late["collectives"].tolist() == [2, 2, 2, 2]


def test_gloo_does_not_say_which_group(tmp_path):
    """With a second group of other ranks nobody can tell; with one of the same ranks it makes no difference."""
    world, half, alone = ({"pg_name": "0", "ranks": ranks} for ranks in ([0, 1, 2], [0, 1], [0]))
    assert only_group({"pg_config": [world, dict(world, pg_name="1"), alone]}) == "all ranks" == only_group({})
    assert only_group({"pg_config": [world, half]}) == ""
    for rank in range(2):
        trace = cpu_trace(rank)
        trace["distributedInfo"]["pg_config"] = [world, half]
        write(tmp_path / "x" / f"rank_{rank}.json", trace)
    page = write_summary(analysis_of(tmp_path / "x"), "x", tmp_path).read_text()
    table = pd.read_csv(tmp_path / "collectives.csv")
    assert table[["group", "late_rank", "wait_ms", "busbw_gbps"]].isna().all(axis=None) and len(table) == 4
    assert "100 % of the calls could not be matched over ranks (the traces do not say of which process group" in page
    assert "Unknown: no collective could be matched over ranks." in page


# Bandwidth and buckets -----------------------------------------------------------------------------------------------


def test_bandwidth_is_of_the_collective():
    """A broadcast of 1000 bytes: the root runs 0 .. 40, the other 20 .. 70. From 20 to 70 are 50 us, so 0.02 GB/s on
    both ranks, although the root's own transfer took 20 us. A second one's root is done at 110, before the other
    arrives at 120: no bandwidth."""
    root = [("broadcast", 1000, 0, 40), ("broadcast", 1000, 100, 110)]
    peer = [("broadcast", 1000, 20, 70), ("broadcast", 1000, 120, 130)]
    tables = exposure([timeline(rank, [(0, 200)], [(0, 1)], calls) for rank, calls in enumerate((root, peer))])
    rates = tables.collectives.pivot(index="sequence", columns="rank", values="busbw_gbps")
    assert rates.loc[0].tolist() == pytest.approx([0.02, 0.02]) and rates.loc[1].isna().all()


def test_each_bucket_has_a_row():
    """Backward ends at 50 (`timeline`). Two buckets of one size stay apart."""
    calls = [("all_reduce", 100, 20, 30), ("all_reduce", 100, 40, 60), ("all_reduce", 20, 60, 64)]
    tables = exposure([timeline(rank, [(0, 100)], [(0, 50)], calls) for rank in range(2)])
    table = buckets(tables.collectives, tables.steps["step"].nunique())
    assert table["place"].tolist() == [0, 1, 2] and table["bytes"].tolist() == [100, 100, 20]
    assert table["after_backward_ms"].tolist() == pytest.approx([-0.03, -0.01, 0.01])
    assert table["exposed_ms_per_step"].tolist() == pytest.approx([0, 0.01, 0.004])
    assert table["duration_ms"].tolist() == pytest.approx([0.01, 0.02, 0.004])
    assert table["busbw_gbps"].tolist() == pytest.approx([0.01, 0.005, 0.005])
