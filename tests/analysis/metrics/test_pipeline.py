"""The bubble of a pipeline, and who waits for whom, worked out by hand. Real pipelines: tests/pipeline_parallel."""

import pandas as pd
import pytest

from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.metrics.pipeline import pipeline_steps, pipelines
from ddp_lab.analysis.report.pages.pipeline import pipeline_figure
from tests.traces import cpu_trace, cuda_trace, event, launched, timeline_of

FIRST = [("F0.0", 100, 100, 200), ("F0.1", 200, 200, 300), ("B0.0", 300, 400, 500), ("B0.1", 500, 600, 700)]
LAST = [("F1.0", 50, 200, 300), ("B1.0", 300, 300, 400), ("F1.1", 400, 410, 500), ("B1.1", 500, 500, 600)]
"""Two ranks: each pass with the moments at which it is reached, has what it needs, and ends."""
AHEAD = 1000.0
"""Of the last rank's clock."""
MESH = {"pp": 2}


def trace(rank, kind):
    """On a device, the host goes through a pass in 9 us, and all waiting is that of a kernel."""
    zero = AHEAD * rank
    events = [event("user_annotation", "ProfilerStep#5", zero, 900)]
    for index, (name, reached, begin, end) in enumerate((FIRST, LAST)[rank]):
        received, at = ("RA" if name[0] == "F" else "RG") + name[1:], zero + 10 * index
        if kind == "cpu":
            events.append(event("user_annotation", f"pipeline {name}", zero + reached, end - reached))
            events.append(event("cpu_op", "aten::mm", zero + begin, end - begin))
            if begin > reached:
                events.append(event("user_annotation", f"pipeline wait {received}", zero + reached, begin - reached))
        else:
            events.append(event("user_annotation", f"pipeline {name}", at, 9))
            events += launched("gemm", at + 1, zero + begin, end - begin, correlation=10 * index + 1)
            if begin > reached:
                sent = "ncclDevKernel_SendRecv"
                events += launched(sent, at, zero + reached, begin - reached, 20, correlation=10 * index + 2)
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_of_two_stages(kind):
    """From 100 to 700. Rank 0 computes 400 and waits 2 x 100 for gradients. Rank 1 computes 390; from 100 on, it waits
    100 and 10 for activations, and it is done 100 before rank 0."""
    timelines = [timeline_of(trace(rank, kind), rank) for rank in range(2)]
    clocks = pd.DataFrame({"rank": [0, 1], "offset_ms": [0, AHEAD / 1000]})
    tables = exposure(timelines, True, MESH)
    passes = pipelines(timelines, clocks, MESH)
    steps = pipeline_steps(passes, tables.steps)
    assert steps["pipeline_ms"].tolist() == pytest.approx([0.6, 0.6])
    assert steps["forward_ms"].tolist() == pytest.approx([0.2, 0.19]) and steps["backward_ms"].eq(0.2).all()
    assert steps["bubble_ms"].tolist() == pytest.approx([0.2, 0.21])
    assert steps["bubble_pct"].tolist() == pytest.approx([100 / 3, 35])
    assert steps["ideal_bubble_pct"].tolist() == pytest.approx([100 / 3, 100 / 3])
    assert steps["wait_gradient_ms"].tolist() == pytest.approx([0.2, 0])
    assert steps["wait_activation_ms"].tolist() == pytest.approx([0, 0.11])
    assert steps["wait_gradient_from"][0] == 1 and steps["wait_activation_from"][1] == 0
    if kind == "cuda":
        assert tables.steps["exposed_wait_ms"].tolist() == pytest.approx([0.2, 0.16])
    drawn = {bars.name: list(bars.text) for bars in pipeline_figure(passes).data}
    assert drawn["forward"] == drawn["backward"] == ["0", "1", "0", "1"]


@pytest.mark.parametrize("make", [cpu_trace, cuda_trace])
def test_no_pipeline(make):
    """Neither in a trace of other software, nor on a mesh without one."""
    clocks = pd.DataFrame({"rank": [0, 1], "offset_ms": 0.0})
    for trace_of, mesh in ((make, MESH), (lambda rank: trace(rank, "cpu"), {"dp": 2})):
        passes = pipelines([timeline_of(trace_of(rank), rank) for rank in range(2)], clocks, mesh)
        steps = pipeline_steps(passes, pd.DataFrame({"rank": [0, 1], "step": 5, "step_ms": 1.0}))
        assert steps.empty
