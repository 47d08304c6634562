"""Traces of real ranks: planted faults are found, and figures agree with the raw JSON."""

import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import sharding
from ddp.bucket_ddp_async import BucketDDP
from ddp.simple_ddp_ga import SimpleDDPAccumulated
from ddp_lab.analysis.metrics.audit import calls_by_step
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.run import train_and_record
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from tests.analysis.windows import analysis_of
from tests.ranks import RankPool

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 80, "eval_samples": 8, "profile_wait": 1}


def train(folder: str, choice: str, load, **changes):
    ranks = RankContext(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    train_and_record(RunConfig.of(**(TINY | changes), choice=choice, output_dir=folder), ranks, load)  # type: ignore[arg-type]


# Faults in strategies ------------------------------------------------------------------------------------------------


class ExtraAllReduce(SimpleDDPAccumulated):
    """All-reduces once more than it says: gradients are right, the time is not."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        dist.all_reduce(torch.zeros(250), group=self.process_group)


class DoubledPayload(BucketDDP):
    """Sends every bucket with as much padding behind it."""

    def all_reduce(self, gradient: torch.Tensor, *_: object, **__: object):
        twice = torch.cat([gradient, torch.zeros_like(gradient)])
        super().all_reduce(twice)
        gradient.copy_(twice[: gradient.numel()])
        return SimpleNamespace(wait=lambda: None)  # it is done


FAULTS = {"extra": ExtraAllReduce, "doubled": DoubledPayload}


def train_faulty(folder: str):
    for choice in FAULTS:
        train(folder, choice, FAULTS.__getitem__, profile_repeat=1)


def test_wrong_strategies_are_seen(ranks: RankPool, tmp_path):
    ranks.run(2, train_faulty, str(tmp_path))
    for choice, calls, payload in (("extra", 1, 1000), ("doubled", 0, 4 * 3 * 16 * 16)):
        page = write_summary(analysis_of(tmp_path / "profile" / choice), choice, tmp_path / "reports").read_text()
        table = pd.read_csv(tmp_path / "reports" / "audit.csv").set_index(["subject", "rank"])
        for rank in (0, 1):
            assert table.loc[("all-reduce: calls", rank), "difference"] == calls
            assert table.loc[("all-reduce: payload", rank), "difference"] == payload
        wrong = set(table.index[table["result"] == "fail"])
        expected = {"all-reduce: payload", "sent in all"} | ({"all-reduce: calls"} if calls else set())
        assert wrong == {(subject, rank) for subject in expected for rank in (0, 1)}
        assert f"{len(wrong)} fail" in page and f'data-column="difference" data-value="{float(payload)}"' in page
        assert set(table["result"]) == {"fail", "pass"}


# A run of ZeRO-3 -----------------------------------------------------------------------------------------------------


def train_zero3(folder: str):
    with recorded_collectives(FlightRecorder.create(dist.get_rank())):
        train(folder, "zero3", sharding.load, train_samples=50, profile_wait=4, epochs=2)


def test_a_window_over_the_end_of_an_epoch(ranks: RankPool, tmp_path):
    """Fourteen steps, of which the seventh, `ProfilerStep#6`, is the last of an epoch: 2 samples, not 8. ZeRO-3 gathers
    and scatters once for each micro-batch, of which the short step has one instead of two."""
    ranks.run(2, train_zero3, str(tmp_path))
    analysis = analysis_of(tmp_path / "profile" / "zero3")
    assert analysis.record is not None and analysis.record["step_samples"][5:8] == [8, 2, 8]
    scatters = calls_by_step(analysis.timelines[0]).query("made_of == '2 scatters'").set_index("step")["calls"]
    assert scatters[6] == scatters[5] / 2
    assert set(analysis.audit["result"]) == {"pass"} and "sent in all" in set(analysis.audit["subject"])
    page = write_summary(analysis, "zero3", tmp_path / "page").read_text()
    assert "reduce-scatter (as 2 scatters)" in page and "all-gather (as 2 broadcasts)" in page
    assert set(analysis.exposure.collectives["group"]) == {"all ranks"} and "all ranks, root" not in page
    counted = analysis.audit[analysis.audit["unit"].isin(["calls/step", "bytes/step"])]
    assert (counted["steps"] == 1).all() and len(counted)


# A late rank ---------------------------------------------------------------------------------------------------------

ELEMENTS = (50_000, 2_000)


def reduce_late(folder: str, late: int, delay_s: float):
    """Six steps of some compute and two blocking all-reduces, before which one rank sleeps."""
    rank = dist.get_rank()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=6),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(f"{folder}/rank_{rank}.json"),
        record_shapes=True,
    ) as profiler:
        for _ in range(7):
            with record_function("backward"):
                torch.ones(200, 200) @ torch.ones(200, 200)
            if rank == late:
                time.sleep(delay_s)
            for elements in ELEMENTS:
                dist.all_reduce(torch.ones(elements))
            profiler.step()


@pytest.fixture(scope="module")
def late(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two ranks, of which rank 1 sleeps 300 ms in each step: longer than a loaded machine delays a rank."""
    folder = tmp_path_factory.mktemp("late")
    ranks.run(2, reduce_late, str(folder), 1, 0.3)
    return folder


def test_a_planted_straggler_is_named(late, tmp_path):
    page = write_summary(analysis_of(late), "late", tmp_path).read_text()
    assert "Rank 1 costs the others most: it arrives last in" in page and "heatmap" in page
    table = pd.read_csv(tmp_path / "stragglers.csv")
    assert table["step"].nunique() == 5 and table["collectives"].eq(2).all()
    of_late = table[table["rank"] == 1]
    assert of_late["last"].ge(1).all() and of_late["lateness_ms"].gt(150).all()
    costs = of_late["costs_ms"]  # the other rank waits about 300 ms, less what its own compute and start took
    assert costs.gt(150).all() and costs.mean() > 5 * table.loc[table["rank"] == 0, "costs_ms"].mean()
