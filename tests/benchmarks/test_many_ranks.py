"""A report over many ranks keeps little of each, and takes no longer for a rank than one over few."""

from pathlib import Path

import pytest

from benchmarks.many_ranks import main, report, write_ranks
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows

LARGEST_PAGE_BYTES = 6_000_000


@pytest.mark.parametrize(
    ("few", "many", "megabytes"),
    [pytest.param(4, 32, 8, marks=pytest.mark.slow), pytest.param(8, 128, 20, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_memory_and_time_of_many_ranks(tmp_path: Path, few: int, many: int, megabytes: float) -> None:
    """Of each more rank, the report keeps less than a quarter of its trace."""
    measured = {}
    for ranks in (few, many):
        folder = tmp_path / f"profile_{ranks}" / "bucket_ddp_async"
        write_ranks(folder, ranks, megabytes)
        found = report(folder, processes=False)
        page = tmp_path / "reports" / folder.name / "summary.html"
        assert found.exit_code == 0 and page.stat().st_size < LARGEST_PAGE_BYTES
        measured[ranks] = found.peak_bytes, found.cpu_s / ranks
    kept = (measured[many][0] - measured[few][0]) / (many - few)
    assert kept < megabytes * 1e6 / 4, f"{kept / 1e6:.2f} MB of each rank"
    assert measured[many][1] < measured[few][1], "CPU seconds a rank"


def test_the_traces_are_as_they_say(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=5, megabytes=0.5, calls=6)
    (window,) = find_windows(tmp_path)
    analysis = analyse_window(window)
    assert analysis.problems == [] and analysis.summary["rank"].tolist() == [0, 1, 2, 3, 4]
    assert analysis.summary["all_reduce_calls_per_step"].tolist() == [6] * 5
    late = analysis.exposure.collectives["late_rank"]
    assert set(late) == {3} and analysis.exposure.collectives["busbw_gbps"].notna().all()


def test_the_command(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["many_ranks.py", "--ranks", "2", "--megabytes", "0.2", "--folder", str(tmp_path)])
    assert main() == 0
    assert "2 ranks of 0.2 MB: " in capfd.readouterr().out
