"""Step time over the rate of the link: the table, where choices cross, and the page."""

import math
from pathlib import Path

import pandas as pd
import pytest

from ddp_lab.analysis.comparison.link_rates import CROSSING_COLUMNS, RATE_COLUMNS, crossings, read_rates
from ddp_lab.analysis.report.pages.link_rates import write_link_page
from tests.traces import record, write

RATES = {"1mbit": 10**6, "100mbit": 10**8, "10gbit": 10**10, "unshaped": None}


@pytest.fixture
def two_lines(tmp_path: Path) -> Path:
    """`a` takes 100, 10 and 10 ms over links of 1, 100 and 10,000 Mbit/s; `b` 1000, 10 x sqrt(10) and 1."""
    times = {"1mbit": (100.0, 1000.0), "100mbit": (10.0, 10**1.5), "10gbit": (10.0, 1.0), "unshaped": (9.0, 1.0)}
    for link, (a, b) in times.items():
        (tmp_path / link).mkdir()
        rows = pd.DataFrame({"choice": ["a", "b"], "step_ms_median": [a, b], "bound_ms": [a / 2, a / 2]})
        rows.to_csv(tmp_path / link / "strategies.csv", index=False)
    return tmp_path


def test_crossings_lie_on_straight_lines_over_logarithms(two_lines: Path) -> None:
    """From 10^8 to 10^10 bit/s, `b` falls from sqrt(10) times `a` to a tenth of it: equal after a third of the way."""
    found = crossings(read_rates(two_lines, RATES))
    assert found.columns.tolist() == list(CROSSING_COLUMNS) and len(found) == 1
    assert found.link_bits_per_s[0] == pytest.approx(10 ** (8 + 2 / 3)) and found.step_ms[0] == pytest.approx(10.0)
    assert (found.slower_links[0], found.faster_links[0]) == ("a", "b")
    assert found.margin_pct[0] == pytest.approx(100 * (math.sqrt(10) - 1))


def test_the_page_of_rates(two_lines: Path) -> None:
    page = write_link_page(two_lines, RATES).read_text()
    table = pd.read_csv(two_lines / "link_rates.csv")
    assert table.columns.tolist() == list(RATE_COLUMNS) and table.link.tolist()[::2] == list(RATES)
    assert table.bound_ratio[table.choice == "a"].tolist() == [2.0] * 4
    assert "bound of a and others" in page and "Where one choice overtakes another" in page
    assert '"name":"crossing"' in page and ">464.2<" in page


def test_the_page_of_records(tmp_path: Path) -> None:
    """Of runs of main_ddp.py, the latest record of a choice counts; they have no bound."""
    for link, seconds in (("1gbit", 0.5), ("10gbit", 0.25)):
        for run, slower in (("20261121-093000-0001", 2), ("20261121-093000-0002", 1)):
            content = record("zero1", seconds) | {"run_id": run, "step_time_median_s": seconds * slower}
            write(tmp_path / link / "profile" / "zero1" / f"{run}.run.json", content)
    rows = read_rates(tmp_path, {"10gbit": 10**10, "1gbit": 10**9})
    assert rows.link.tolist() == ["1gbit", "10gbit"] and rows.step_ms_median.tolist() == [500.0, 250.0]
    assert rows.bound_ms.isna().all() and "bound of" not in write_link_page(tmp_path, {"1gbit": 10**9}).read_text()
