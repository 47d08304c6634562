"""Only the ranks that are asked for leave traces, and a report says what it cannot know then."""

from pathlib import Path

import pandas as pd
import pytest

from ddp_lab.analysis.files import profiled_ranks, read_record
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.record_format import ranks_in
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from tests.ranks import RankPool
from tests.runtime.test_run import TINY, record_of, run_here
from tests.tables import each_row


def test_lists_of_ranks() -> None:
    assert ranks_in("0,1,8", "--x") == {0, 1, 8}
    assert ranks_in("0-3, 2,9-9", "--x") == {0, 1, 2, 3, 9}


@each_row("text", ["", "1,", "a", "-1", "3-1", "1-2-3", "1;2", "0x1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--profile-ranks .*: .* is neither a rank nor a range; write it like 0,1,8"):
        RunConfig(choice="flat_ddp", profile_ranks=text)


def test_only_the_chosen_ranks_leave_traces(ranks: RankPool, tmp_path: Path) -> None:
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
    (window,) = find_windows(folder)
    analysis = analyse_window(window)
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


def test_a_chosen_rank_without_a_trace_is_missing(ranks: RankPool, tmp_path: Path) -> None:
    settings = {**TINY, "choice": "flat_ddp", "output_dir": str(tmp_path), "profile_ranks": "0,1"}
    assert ranks.run(2, run_here, settings) == [None, None]
    (window,) = find_windows(tmp_path / "profile" / "flat_ddp")
    window.files[1].unlink()
    (window,) = find_windows(tmp_path / "profile" / "flat_ddp")
    assert analyse_window(window).problems == ["no trace of rank 1; copy the missing files here, or profile again"]


def test_a_rank_that_does_not_exist_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    settings = {**TINY, "choice": "flat_ddp", "output_dir": str(tmp_path), "profile_ranks": "0-2"}
    expected = "--profile-ranks 0-2: there is no rank 2; the run has ranks 0 to 1"
    assert ranks.run(2, run_here, settings) == [expected] * 2


def test_folders_of_several_nodes_may_lie_apart(ranks: RankPool, tmp_path: Path) -> None:
    """As after copying each node's `profile/<choice>` into a folder of its own; the record is on rank 0's node."""
    settings = {**TINY, "choice": "flat_ddp", "output_dir": str(tmp_path)}
    assert ranks.run(2, run_here, settings) == [None, None]
    here, there = tmp_path / "profile" / "flat_ddp", tmp_path / "copied"
    for node, rank in (("a", 1), ("b", 0)):
        (there / node).mkdir(parents=True)
        (here / f"rank_{rank}").rename(there / node / f"rank_{rank}")
    (record,) = here.glob("*.run.json")
    record = record.rename(there / "a" / record.name)
    (window,) = find_windows(there)
    analysis = analyse_window(window)
    assert analysis.problems == [] and analysis.record == read_record(record)
    record.unlink()
    analysis = analyse_window(window)
    assert analysis.problems == [] and analysis.record is None
    text = write_summary(analysis, "flat_ddp", tmp_path / "reports").read_text()
    assert "there is no record of a completed run beside the traces" in text
