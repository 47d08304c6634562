"""Our figures, HTA's and those of an independent reading of the raw JSON, over made-up traces: they must agree.

HTA counts from the start of the first kernel that the analysed steps issued to the end of the last. Ours go over whole
steps. On a CPU, HTA's compute and exposed time are ours plus what lies outside the steps (after the last one's end, or
between two). On a device, steps follow each other without gaps, and what the left-out step did meanwhile counts too.
"""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hta.trace_analysis import TraceAnalysis
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.metrics.holistic import holistic_figures
from tests import raw
from tests.traces import event, timeline_of, write

NCCL = ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)")
LANES = ("compute", "communication", "copy")
KERNELS = {"compute": ("gemm", "add"), "communication": NCCL, "copy": ("Memcpy HtoD", "Memcpy DtoD")}
CATEGORIES = {"compute": "kernel", "communication": "kernel", "copy": "gpu_memcpy"}

offsets = st.tuples(st.integers(0, 990), st.integers(0, 400), st.integers(1, 300))
"""When a kernel is launched after its step's start, how long it is queued, and how long it runs, in us."""
kernel = st.tuples(st.sampled_from(LANES), st.integers(0, 1), offsets)
device_steps = st.lists(st.lists(kernel, max_size=7), min_size=3, max_size=4)


def device_trace(steps, rank=0):
    """Steps of 1000 us with a gap of 5 us after each; their work may run past their end. Each starts with a gemm."""
    events, correlation = [], 0
    for number, kernels in enumerate(steps):
        t = 1005.0 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", t, 1000))
        always = [("compute", 0, (1, 3, 20)), ("communication", 0, (2, 7, 30))]
        for lane, index, (launched, queued, ran) in [*always, *kernels]:
            correlation += 1
            stream, name = 7 + LANES.index(lane), KERNELS[lane][index]
            more = {"stream": stream, "correlation": correlation}
            events.append(event("cuda_runtime", "cudaLaunchKernel", t + launched, 2, correlation=correlation))
            events.append(event(CATEGORIES[lane], name, t + launched + queued, ran, tid=stream, **more))
    return {"distributedInfo": {"rank": rank, "world_size": 1, "backend": "nccl"}, "traceEvents": events}


operators = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 90)), min_size=1, max_size=9)
gloo_spans = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 500), st.integers(2, 3)), min_size=1, max_size=5)
cpu_steps = st.lists(st.tuples(operators, gloo_spans), min_size=3, max_size=4)


def threads_trace(steps):
    """Operators one after the other (gap, duration), with another one inside, and Gloo spans on two threads."""
    events = []
    for number, (ops, spans) in enumerate(steps):
        t = now = 1005.0 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", t, 1000))
        for gap, ran in ops:
            events.append(event("cpu_op", "aten::mm", now + gap, ran))
            events.append(event("cpu_op", "aten::empty", now + gap, ran / 2))
            now += gap + ran
        for start, ran, thread in spans:
            events.append(event("user_annotation", "gloo:all_reduce", t + start, ran, tid=thread))
    return {"distributedInfo": {"rank": 0, "world_size": 1, "backend": "gloo"}, "traceEvents": events}


def figures_of(trace):
    """Ours, and those of HTA through `analysis`. Of a device trace, HTA must say the same when it reads the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rank_0.json", trace)
        timeline = dataclasses.replace(timeline_of(trace), path=path)
        hta = holistic_figures([timeline]).iloc[0]
        if timeline.kind == "cuda":
            alone = TraceAnalysis(trace_files={0: str(path)}, trace_dir=folder)
            breakdown = alone.get_temporal_breakdown(visualize=False).iloc[0]
            for part in ("compute", "non_compute", "idle"):
                assert hta[f"{part}_us"] == pytest.approx(breakdown[f"{part}_time(us)"])
            overlap = alone.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0]
            assert hta["overlap_pct"] == pytest.approx(overlap, nan_ok=True)
        return timeline, hta


def require_agreement(trace):
    timeline, hta = figures_of(trace)
    spans = raw.lanes(trace)
    everything = [pair for pairs in spans.values() for pair in pairs]
    first, last = min(start for start, _ in everything), max(end for _, end in everything)
    total = raw.parts(spans, first, last)
    expected = [last - first, total["compute"], total["communication"] + total["copy"], total["idle"]]
    figures = [hta[f"{part}_us"] for part in ("total", "compute", "non_compute", "idle")]
    assert figures == pytest.approx(expected, abs=1e-6)

    steps, bounds = exposure([timeline]).steps, raw.windows(trace)
    running = raw.lanes(trace, everything=timeline.kind == "cuda")
    for step, window in zip(steps.to_dict("records"), bounds, strict=True):
        inside = raw.parts(running, *window)
        exposed = step["exposed_wait_ms"] + step["exposed_transfer_ms"]
        step_parts = [step["compute_ms"], exposed, step["exposed_copy_ms"], step["idle_ms"]]
        assert [1000 * ms for ms in step_parts] == pytest.approx([inside[part] for part in (*LANES, "idle")], abs=1e-6)
        assert sum(step_parts) == pytest.approx(step["step_ms"]) == pytest.approx((window[1] - window[0]) / 1000)

    if timeline.kind == "cpu":
        within = [raw.parts(spans, *window) for window in bounds]
        outside = {lane: total[lane] - sum(part[lane] for part in within) for lane in LANES}
        assert hta["compute_us"] == pytest.approx(1000 * steps["compute_ms"].sum() + outside["compute"])
        parts = steps[["exposed_wait_ms", "exposed_transfer_ms", "exposed_copy_ms"]].to_numpy().sum()
        assert hta["non_compute_us"] == pytest.approx(1000 * parts + outside["communication"] + outside["copy"])

    communication = raw.total(spans["communication"])
    hidden = communication + raw.total(spans["compute"]) - raw.total(spans["communication"] + spans["compute"])
    assert hta["overlap_pct"] == pytest.approx(100 * hidden / communication, abs=0.005 + 1e-9)


@settings(max_examples=8)
@given(device_steps)
def test_device_kernels(steps):
    require_agreement(device_trace(steps))


@settings(max_examples=8)
@given(cpu_steps)
def test_lowered_traces(steps):
    require_agreement(threads_trace(steps))
