"""Only the ranks that are asked for leave traces, and a report says what it cannot know then."""

import pandas as pd

from ddp_lab.analysis.record import profiled_ranks
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.collectives.ranks import Ranks
from tests.analysis.windows import analysis_of
from tests.ranks import RankPool
from tests.runtime.test_run import TINY, record_of, run_here


def test_lists_of_ranks():
    assert Ranks.parse("0,1,8") == (0, 1, 8)
    assert Ranks.parse("0-3, 2,9-9") == (0, 1, 2, 3, 2, 9)


def test_only_the_chosen_ranks_leave_traces(ranks: RankPool, tmp_path):
    settings = {
        **TINY,
        "choice": "flat_ddp",
        "output_dir": str(tmp_path),
        "profile_ranks": "1-2",
        "global_batch_size": 6,
    }
    assert ranks.run(3, run_here, settings | {"grad_accum_steps": 1}) == [None] * 3
    folder, record = tmp_path / "profile" / "flat_ddp", record_of(tmp_path, "flat_ddp")
    assert sorted(path.parent.name for path in folder.rglob("*.gz")) == ["rank_1", "rank_2"]
    assert not (folder / "rank_0").exists()
    slowed = [seconds is None for seconds in record["step_time_s"]]
    assert slowed[:5] == [False, True, True, True, True], "rank 0 waits for ranks that the profiler slows down"
    analysis = analysis_of(folder)
    assert analysis.problems == [] and analysis.summary["rank"].tolist() == [1, 2]
    assert profiled_ranks(record) == [1, 2] and analysis.record == record
    checks = analysis.audit
    assert set(checks.loc[checks["unit"] == "calls/step", "rank"]) == {1, 2} and set(checks["result"]) == {"pass"}
    assert analysis.exposure.steps["exposed_wait_ms"].isna().all(), "rank 0 may have been the last"
    assert analysis.exposure.collectives["busbw_gbps"].isna().all()
    page = write_summary(analysis, "flat_ddp", tmp_path / "reports")
    text = page.read_text()
    assert "Profiled ranks: 1-2, of 3 in all" in text and "Incomplete: of rank" not in text
    assert len(pd.read_csv(page.with_suffix(".csv"))) == 2
