"""Traces of real ranks: planted faults are found, figures agree with the raw JSON, and mutated traces do no harm."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import sharding
from ddp.bucket_ddp_async import BucketDDP
from ddp.simple_ddp_ga import SimpleDDPAccumulated
from ddp_lab.analysis.metrics.audit import calls_by_step
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.analysis.traces.matching import KEY
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.run import train_and_record
from tests import raw
from tests.ranks import RankPool

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 80, "eval_samples": 8, "profile_wait": 1}


def train(folder: str, choice: str, load: Any, **changes: Any) -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    train_and_record(RunConfig.of(**(TINY | changes), choice=choice, output_dir=folder), ranks, load)  # type: ignore[arg-type]


# Faults in strategies ------------------------------------------------------------------------------------------------


class ExtraAllReduce(SimpleDDPAccumulated):
    """All-reduces once more than it says: gradients are right, the time is not."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        dist.all_reduce(torch.zeros(250), group=self.process_group)


class DoubledPayload(BucketDDP):
    """Sends every bucket with as much padding behind it."""

    def all_reduce(self, gradient: torch.Tensor, *_: object, **__: object) -> Any:
        twice = torch.cat([gradient, torch.zeros_like(gradient)])
        super().all_reduce(twice)
        gradient.copy_(twice[: gradient.numel()])
        return SimpleNamespace(wait=lambda: None)  # it is done


FAULTS = {"extra": ExtraAllReduce, "doubled": DoubledPayload}


def train_faulty(folder: str) -> None:
    for choice in FAULTS:
        train(folder, choice, FAULTS.__getitem__, profile_repeat=1)


def test_wrong_strategies_are_seen(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_faulty, str(tmp_path))
    for choice, calls, payload in (("extra", 1, 1000), ("doubled", 0, 4 * 3 * 16 * 16)):
        (window,) = find_windows(tmp_path / "profile" / choice)
        page = write_summary(analyse_window(window), choice, tmp_path / "reports").read_text()
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


def train_zero3(folder: str) -> None:
    train(folder, "zero3", sharding.load, train_samples=50, profile_wait=4, epochs=2)


@pytest.fixture(scope="module")
def zero3(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen steps, of which the seventh, `ProfilerStep#6`, is the last of an epoch: 2 samples, not 8."""
    folder = tmp_path_factory.mktemp("zero3")
    ranks.run(2, train_zero3, str(folder))
    return folder / "profile" / "zero3"


def test_a_window_over_the_end_of_an_epoch(zero3: Path) -> None:
    """ZeRO-3 gathers and scatters once for each micro-batch, of which the short step has one instead of two."""
    (window,) = find_windows(zero3)
    analysis = analyse_window(window)
    assert analysis.record is not None and analysis.record["step_samples"][5:8] == [8, 2, 8]
    scatters = calls_by_step(analysis.timelines[0]).query("made_of == '2 scatters'").set_index("step")["calls"]
    assert scatters[6] == scatters[5] / 2
    assert set(analysis.audit["result"]) == {"pass"} and "sent in all" in set(analysis.audit["subject"])
    page = write_summary(analysis, "zero3", zero3.parent / "page").read_text()
    assert "reduce-scatter (as 2 scatters)" in page and "all-gather (as 2 broadcasts)" in page
    assert set(analysis.exposure.collectives["group"]) == {"all ranks"} and "all ranks, root" not in page
    counted = analysis.audit[analysis.audit["unit"].isin(["calls/step", "bytes/step"])]
    assert (counted["steps"] == 1).all() and len(counted)


NONSENSE = [None, -1e18, 1e300, -5, 0, "x", "12", [], {}, True, 10**400, "ProfilerStep#6", "<script>alert(1)</script>"]


def mutated(data: st.DataObject, content: bytes) -> bytes:
    """Bytes lost or changed; or events lost, doubled, moved in time, or with a field replaced by nonsense."""
    how = data.draw(st.sampled_from(["cut", "flip", "fields", "lose", "shift", "double"]))
    if how == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    if how == "flip":
        places = data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=20))
        changed = bytearray(content)
        for place, value in places:
            changed[place] = value
        return bytes(changed)
    trace = json.loads(content)
    events = trace["traceEvents"]
    chosen = data.draw(st.lists(st.integers(0, len(events) - 1), min_size=1, max_size=60))
    if how == "fields":
        marks = [i for i, e in enumerate(events) if str(e.get("name")).startswith(("ProfilerStep", "gloo:", "c10d"))]
        for index in [*chosen, *data.draw(st.lists(st.sampled_from(marks), max_size=4))]:
            field = data.draw(st.sampled_from(["ts", "dur", "name", "cat", "args", "ph", "tid", "pid"]))
            events[index] = {**events[index], field: data.draw(st.sampled_from(NONSENSE))}
    if how == "lose":
        first = min(chosen)
        del events[first : first + data.draw(st.integers(1, len(events)))]
    if how == "double":
        events += [events[index] for index in chosen]
    if how == "shift":
        by = data.draw(st.sampled_from([-1e12, -5e5, 1e3, 1e12]))
        for index in chosen:
            if "ts" in events[index]:
                events[index] = {**events[index], "ts": events[index]["ts"] + by}
    return json.dumps(trace).encode()


@settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_mutated_real_traces(data: st.DataObject, zero3: Path, tmp_path_factory: Any) -> None:
    """Either possible figures, or one line that names a file."""
    folder = tmp_path_factory.mktemp("mutated")
    for rank, source in find_windows(zero3)[0].files.items():
        content, path = gzip.decompress(source.read_bytes()), folder / f"rank_{rank}" / source.name
        path.parent.mkdir()
        path.write_bytes(mutated(data, content) if rank else content)
    try:
        analysis = analyse_window(find_windows(folder)[0])
    except UserError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
        return
    assert all(str(folder) in problem and "\n" not in problem for problem in analysis.problems)
    steps = analysis.exposure.steps
    parts = steps[["compute_ms", "exposed_ms", "exposed_copy_ms", "idle_ms"]]
    assert (parts >= -1e-6).to_numpy().all()
    assert parts.sum(axis="columns").tolist() == pytest.approx(steps["step_ms"].tolist(), rel=5e-3)
    shares = analysis.summary[["compute_pct", "non_compute_pct", "idle_pct", "overlap_pct"]].to_numpy(float)
    assert ((shares >= -0.01) & (shares <= 100.01) | np.isnan(shares)).all()


# A late rank ---------------------------------------------------------------------------------------------------------

ELEMENTS = (50_000, 2_000)


def reduce_late(folder: str, late: int, delay_s: float) -> None:
    """Six steps of some compute and two blocking all-reduces, before which one rank sleeps."""
    rank = dist.get_rank()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=6),
        on_trace_ready=lambda it: it.export_chrome_trace(f"{folder}/rank_{rank}.json"),
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


def test_a_planted_straggler_is_named(late: Path, tmp_path: Path) -> None:
    page = write_summary(analyse_window(find_windows(late)[0]), "late", tmp_path).read_text()
    assert "Rank 1 costs the others most: it arrives last in" in page and "heatmap" in page
    table = pd.read_csv(tmp_path / "stragglers.csv")
    assert table["step"].nunique() == 5 and table["collectives"].eq(2).all()
    of_late = table[table["rank"] == 1]
    assert of_late["last"].ge(1).all() and of_late["lateness_ms"].gt(150).all()
    costs = of_late["costs_ms"]  # the other rank waits about 300 ms, less what its own compute and start took
    assert costs.gt(150).all() and costs.mean() > 5 * table.loc[table["rank"] == 0, "costs_ms"].mean()


def test_a_real_run_against_its_raw_traces(late: Path) -> None:
    """Blocking collectives follow each other, so the n-th span of a step on each rank is the n-th collective."""
    (window,) = find_windows(late)
    found = analyse_window(window).exposure
    traces = {rank: json.loads(path.read_text()) for rank, path in window.files.items()}
    ahead = (1000 * found.clocks.set_index("rank")["offset_ms"]).to_dict()
    for rank, trace in traces.items():
        for bounds in raw.step_events(trace):
            step = found.steps.query(f"rank == {rank} and step == {int(bounds['name'].split('#')[1])}").iloc[0]
            parts = raw.parts(raw.lanes(trace), *raw.span(bounds))
            ours = [1000 * step[name] for name in ("compute_ms", "exposed_ms", "idle_ms")]
            assert ours == pytest.approx([parts[name] for name in ("compute", "communication", "idle")], abs=0.01)

    spans = {
        rank: [
            tuple(t - ahead[rank] for t in raw.span(each))
            for each in raw.complete(trace)
            if each["name"] == "gloo:all_reduce" and each["ts"] < raw.span(raw.step_events(trace)[-1])[1]
        ]
        for rank, trace in traces.items()
    }
    together = list(zip(*spans.values(), strict=True))
    assert len(together) == 5 * len(ELEMENTS)
    for (_, calls), members in zip(found.collectives.groupby(KEY, sort=True), together, strict=True):
        starts, ends = np.array(members).T
        size = 4 * ELEMENTS[int(calls["sequence"].iloc[0])]
        assert calls["bytes"].eq(size).all() and calls["late_rank"].eq(starts.argmax()).all()
        assert 1000 * calls["wait_ms"].to_numpy() == pytest.approx(np.minimum(starts.max(), ends) - starts, abs=0.01)
        lateness = starts.max() - np.median(np.delete(starts, starts.argmax()))
        assert 1000 * calls["lateness_ms"].to_numpy() == pytest.approx(lateness, abs=0.01)
        if ends.min() > starts.max():
            busbw = size / (ends.max() - starts.max()) / 1000  # nccl-tests' factor is 1 for two ranks
            assert calls["busbw_gbps"].to_numpy() == pytest.approx(busbw, rel=1e-3)
