"""A whole run over a paced link: the record, the pages, and what the figures say of the link."""

from typing import Any

import pytest

from ddp_lab.analysis.command import main as analyse
from ddp_lab.runtime.link.group import paced_groups
from ddp_lab.runtime.link.speed import SimulatedLink
from tests.analysis.windows import analysis_of
from tests.ranks import RankPool
from tests.runtime.test_run import run_here

LINK, BYTES_PER_S = "40mbit,1ms", 5e6
RUN = {"workload": "mlp", "depth": 4, "width": 128, "train_samples": 96, "eval_samples": 8, "max_steps": 12}
RUN |= {"bucket_cap_mb": 0.1, "link": LINK}


def run_over_the_link(settings: dict[str, Any]):
    with paced_groups(SimulatedLink.parse(LINK)):
        assert run_here(settings) is None


@pytest.mark.parametrize("choice", ["bucket_ddp_async", pytest.param("pytorch_zero3", marks=pytest.mark.exhaustive)])
def test_a_run_is_as_slow_as_its_link(ranks: RankPool, tmp_path, choice):
    ranks.run(2, run_over_the_link, {**RUN, "choice": choice, "output_dir": str(tmp_path)})
    analysis = analysis_of(tmp_path / "profile" / choice)
    record = analysis.record
    assert record is not None and record["config"]["link"] == LINK and record["link_bits_per_s"] == 40_000_000
    sent = sum(
        call["payload_bytes"] * (1 if call["kind"] in ("all_reduce", "reduce_scatter") else 0.5)
        for call in record["expected_traffic"]
        if call["purpose"] != "bookkeeping"
    )
    timed = [seconds for seconds in record["step_time_s"] if seconds is not None]
    assert min(timed) >= sent / BYTES_PER_S > 0.01
    assert (analysis.exposure.steps["step_ms"] / 1e3 >= sent / BYTES_PER_S).all()
    spans = analysis.timelines[0].collectives.query("bytes >= 50_000")
    rates = spans["bytes"] / (spans["end"] - spans["issued"]) * 1e6  # of a busy machine, a span may begin late
    assert len(spans) and (rates <= 2 * BYTES_PER_S).all()  # an all-gather between two ranks sends half of its bytes
    assert analyse("reports", ["--trace-dir", str(tmp_path / "profile" / choice)]) == 0
    page = next(tmp_path.rglob("summary.html")).read_text()
    assert f"Every rank had a link of {LINK} (--link)" in page
