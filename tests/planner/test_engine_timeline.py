"""A predicted step as a trace: this project's own reader finds in it what was simulated."""

import gzip
import json
from pathlib import Path

import pytest

from analysis.traces.finding import find_windows
from analysis.traces.reading import read_trace
from analysis.traces.timeline import build_timeline
from planner.contracts import Contention, MemoryCurve, OperatorCall, Simulated, Span
from planner.simulate import Simulation
from planner.timeline import write_trace
from tests.planner.test_engine import EachCollective, EachOperator, cluster, issued_by_kind, setting
from training.errors import UserError

NAME = "20261122-000000-abcd.step0.pt.trace.json.gz"


@pytest.mark.parametrize(("choice", "kind"), [("bucket_ddp_async", "cpu"), ("zero3", "cuda")])
def test_reports_read_what_was_simulated(tmp_path: Path, choice: str, kind: str) -> None:
    simulation = Simulation(setting(choice), cluster(kind=kind), EachOperator(), EachCollective(), Contention(), rank=0)
    with simulation.running():
        step = simulation.measure(0.0)
    write_trace(step, tmp_path / "rank_0" / NAME, choice, cluster(kind=kind))
    (window,) = find_windows(tmp_path)
    timeline = build_timeline(read_trace(window.files[0]), 0, include_last_step=False)
    assert (timeline.kind, timeline.world_size, timeline.left_out) == ("cuda", 2, 0)
    assert timeline.steps["end"].iloc[0] == pytest.approx(1e6 * step.step_time_s)
    compute = timeline.kernels[timeline.kernels["lane"] == "compute"]
    assert (compute["end"] - compute["start"]).sum() == pytest.approx(1e6 * step.compute_s)
    found = timeline.collectives.groupby("kind")["bytes"].agg(["size", "sum"])
    assert {str(name): tuple(row) for name, row in found.iterrows()} == issued_by_kind(simulation)
    assert list(timeline.phases["name"])[:2] == ["forward", "backward"] and "optimizer" in set(timeline.phases["name"])


def small() -> Simulated:
    nothing = MemoryCurve({}, {}, [])
    details = {"payload_bytes": 400, "dtype": "float32", "group": "g", "group_size": 2, "backend": "gloo", "link": "l"}
    call = OperatorCall("aten::mm", ((2, 3),), ("float32",), 0, 48)
    spans = [
        Span("phase", "forward", 0.0, 2.0),
        Span("compute", "aten::mm", 0.0, 1.0, {"phase": "forward", "call": call}),
        Span("communication 1", "all_reduce", 1.5, 2.0, {**details, "issued_s": 1.0}),
    ]
    return Simulated(2.0, 1.0, 0.5, 1.0, spans, nothing, {}, 0.0)


def test_everything_says_that_it_is_predicted(tmp_path: Path) -> None:
    write_trace(small(), tmp_path / NAME, "simple_ddp", cluster())
    text = gzip.decompress((tmp_path / NAME).read_bytes()).decode()
    assert '"rank": 0' in text, "HTA looks for it like that"
    trace = json.loads(text)
    assert trace["predicted"] is True and trace["distributedInfo"]["backend"] == "gloo"
    events = trace["traceEvents"]
    shown = [event["args"]["name"] for event in events if event["ph"] == "M"]
    shown += [event["name"] for event in events if event.get("cat") == "kernel"]
    assert len(shown) == 6 and all("predicted" in name for name in shown)
    (reduced,) = (event for event in events if event["name"].startswith("nccl"))
    assert (reduced["ts"], reduced["dur"], reduced["tid"]) == (1.5e6, 0.5e6, 21)
    assert reduced["args"]["In msg nelems"] == 100 and reduced["args"]["dtype"] == "Float"
    launches = {event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") == "cuda_runtime"}
    assert launches[reduced["args"]["correlation"]] == 1e6


def test_a_trace_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/rank_0"):
        write_trace(small(), tmp_path / "file" / "rank_0" / NAME, "simple_ddp", cluster())
