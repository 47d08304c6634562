"""Whole reports on device traces, against a plain reading of their JSON and against HTA's reading of the files.

Most traces here are made up in the form that several eras write. Those in `tests/data/traces/h200` are real: runs of
this project on one NVIDIA H200 (2026-11-26, torch 2.11, NCCL 2.28), with one rank over NCCL, which then needs no kernel
for a collective, and with two ranks over Gloo. More real ones are tried by

    DEVICE_TRACES=FOLDER pytest tests/analysis/traces/test_device_traces.py

where each folder below FOLDER has the traces of one window, a file a rank.
"""

import gzip
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.analysis.summary import WindowAnalysis, analyse_window
from ddp_lab.analysis.traces.finding import group_by_window
from tests import raw
from tests.traces import event, launched, write

Told = tuple[str, dict[str, Any], list[dict[str, Any]]]
"""The name of a kernel, its arguments, and what the host recorded around its launch."""
CALLS = {
    "all_gather": ("AllGather_RING_LL", "_allgather_base", "c10d::_allgather_base_", 21),
    "all_reduce": ("AllReduce_Sum_f32_RING_LL", "allreduce", "c10d::allreduce_", 20),
    "all_to_all": ("SendRecv", "all_to_all", "c10d::alltoall_base_", 20),
}
ELEMENTS = {"all_gather": 6000, "all_reduce": 9000, "all_to_all": 400}


def of_2022(kind: str, at: float, correlation: int) -> Told:
    span = event("user_annotation", f"nccl:{kind}", at - 1, 3)
    return f"ncclKernel_{CALLS[kind][0]}(ncclWorkElem)", {"External id": correlation}, [span]


def of_2023(kind: str, at: float, correlation: int) -> Told:
    dims = [[[ELEMENTS[kind]]]] if kind == "all_reduce" else [[ELEMENTS[kind]], [ELEMENTS[kind] // 2]]
    types = ["TensorList"] if kind == "all_reduce" else ["float", "float"]
    call = event("cpu_op", CALLS[kind][2], at - 1, 3, **{"Input Dims": dims, "Input type": types})
    return f"ncclKernel_{CALLS[kind][0]}(ncclDevComm*)", {"External id": correlation}, [call]


def sizes(kind: str, name: str, operator: int) -> dict[str, Any]:
    elements = {"In msg nelems": ELEMENTS[kind] // (2 if kind == "all_gather" else 1), "Out msg nelems": ELEMENTS[kind]}
    group = {"Group size": 2, "Process Group Name": str(CALLS[kind][3] - 20), "Process Group Ranks": "[0, 1]"}
    return {"Collective name": name, "dtype": "Float", "External id": operator, **elements, **group}


def of_2024(kind: str, at: float, correlation: int) -> Told:
    args = sizes(kind, CALLS[kind][1], 7000 + correlation)
    record = event("cpu_op", "record_param_comms", at - 1, 3, **args)
    return f"ncclDevKernel_{CALLS[kind][0]}(ncclDevKernelArgsStorage<4096ul>)", args, [record]


def of_rocm(kind: str, at: float, correlation: int) -> Told:
    _, args, record = of_2024(kind, at, correlation)
    return "ncclDevKernel_Generic(ncclDevComm*)", {"External id": args["External id"]}, record


def of_nccl2(kind: str, at: float, correlation: int) -> Told:
    names = {"all_gather": "allGatherSingleImpl", "all_reduce": "all_reduce", "all_to_all": "allToAllSingleImpl"}
    args = {**sizes(kind, names[kind], 7000 + correlation), "Process Group Ranks": "[]"}
    return f"ncclDevKernel_{CALLS[kind][0]}", args, [event("cpu_op", "record_param_comms", at - 1, 3, **args)]


ERAS: dict[str, Callable[[str, float, int], Told]] = {
    "2022": of_2022,
    "2023": of_2023,
    "2024": of_2024,
    "rocm": of_rocm,
    "nccl2": of_nccl2,
    "graph": of_2024,
}


def made(era: str, rank: int) -> dict[str, Any]:
    """The host goes through a step in 100 us, the device in about 1000; rank 1 reaches each collective 9 us later.

    In `graph`, one launch has both gemms of a step."""
    events = [event("kernel", "gemm", 0, 300, tid=7, stream=7, correlation=9000)]
    for number in range(4):
        host, t, late = 100.0 * number, 300 + 1000.0 * number, 9 * rank
        events.append(event("user_annotation", f"ProfilerStep#{number}", host, 99))
        for index, (name, start, duration, stream) in enumerate(
            [
                ("gemm", t, 300, 7),
                ("all_gather", t + 100 + late, 150 - late, 0),
                ("gemm", t + 350, 250, 7),
                ("all_reduce", t + 500 + late, 300 - late, 0),
                ("Memcpy DtoH (Device -> Pinned)", t + 820, 30, 8),
                ("all_to_all", t + 860 + late, 60 - late, 0),
            ]
        ):
            correlation, at, args = 10 * number + index + 1, host + 10 + 5 * index, {}
            if name in CALLS:
                stream = CALLS[name][3] if era not in ("2022", "2023") else 20
                name, args, around = ERAS[era](name, at, correlation)
                events += around
            if era == "graph" and name == "gemm":
                correlation = 10 * number + 1
            events += launched(name, at, start, duration, stream, **{**args, "correlation": correlation})
    launches = (part for part in events if era == "rocm" and part["name"] == "cudaLaunchKernel")
    for part in launches:
        part["name"] = "hipExtModuleLaunchKernel"
    groups = [{"pg_name": str(name), "ranks": [0, 1]} for name in (0, 1)]
    info = {"rank": rank, "world_size": 2, "backend": "nccl"}
    return {
        "distributedInfo": info | ({"pg_config": groups} if era not in ("2022", "2023") else {}),
        "traceEvents": events,
    }


H200 = Path(__file__).parents[2] / "data" / "traces" / "h200"
FOLDERS = (H200, Path(os.environ.get("DEVICE_TRACES", "/nowhere")))
REAL = sorted(path for folder in FOLDERS for path in folder.glob("*") if path.is_dir())


@pytest.fixture(params=[*ERAS, *REAL], ids=lambda era: getattr(era, "name", era))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if isinstance(request.param, Path):
        return request.param
    for rank in range(2):
        write(tmp_path / f"rank_{rank}.json", made(request.param, rank))
    return tmp_path


@pytest.fixture
def analysis(folder: Path) -> WindowAnalysis:
    (window,) = group_by_window(sorted(path for path in folder.iterdir() if ".json" in path.name), "x")
    return analyse_window(window)


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, strict=False)
    return found


def test_times(analysis: WindowAnalysis) -> None:
    """Of each step of each rank: compute, exposed and hidden communication, copies, idle."""
    steps = analysis.exposure.steps
    for timeline in analysis.timelines:
        trace = read(timeline.path)
        spans, windows = raw.lanes(trace, everything=True), raw.windows(trace)
        rows = steps[steps["rank"] == timeline.rank].to_dict("records")
        for row, (begin, end) in zip(rows, windows, strict=True):
            parts = raw.parts(spans, begin, end)
            ours = [row[name] for name in ("compute_ms", "exposed_ms", "exposed_copy_ms", "idle_ms", "step_ms")]
            hand = [parts[name] / 1000 for name in ("compute", "communication", "copy", "idle")] + [
                (end - begin) / 1000
            ]
            assert ours == pytest.approx(hand, rel=0.01, abs=1e-3)


def test_payloads_and_bandwidths(analysis: WindowAnalysis) -> None:
    by_rank = {timeline.rank: calls_in(read(timeline.path)) for timeline in analysis.timelines}
    for timeline in analysis.timelines:
        hand = by_rank[timeline.rank]
        mine = timeline.collectives_by_step().sort_values("start", kind="stable")
        mine = mine[~mine["stream"].astype(str).str.startswith("gloo")]  # `hand` is what the device shows
        assert mine["kind"].tolist() == [call["kind"] for call in hand]
        assert mine["bytes"].tolist() == pytest.approx([call["bytes"] for call in hand], rel=0.01, nan_ok=True)
        assert (mine["step"] - mine["step"].min()).tolist() == [call["step"] for call in hand]
    found, ahead = analysis.exposure.collectives, analysis.exposure.clocks.set_index("rank")["offset_ms"] * 1000
    rates = found.sort_values(["rank", "step"], kind="stable").groupby(["kind", "rank"])["busbw_gbps"].apply(list)
    for kind in {call["kind"] for call in by_rank[min(by_rank)]}:
        alike = [[call for call in calls if call["kind"] == kind] for calls in by_rank.values()]
        for index, together in enumerate(zip(*alike, strict=True)):
            arrived = max(call["start"] - ahead[rank] for rank, call in zip(by_rank, together, strict=True))
            done = max(call["end"] - ahead[rank] for rank, call in zip(by_rank, together, strict=True))
            ranks = len(by_rank)
            factor = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
            for rank, call in zip(by_rank, together, strict=True):
                if rates[kind, rank][index] == rates[kind, rank][index]:  # the ranks' calls were matched
                    hand_rate = call["bytes"] / (done - arrived) / 1000 * factor
                    assert rates[kind, rank][index] == pytest.approx(hand_rate, rel=0.01)


WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
BYTES = {"float": 4, "int": 4, "long": 8, "longint": 8, "bfloat16": 2, "unsignedchar": 1, "signedchar": 1}


def calls_in(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The collectives that the analysed steps issued: kind, start, end, bytes, step (its place). By start."""
    events, steps = raw.complete(trace), [raw.span(step) for step in raw.step_events(trace)]
    launches = {
        e["args"]["correlation"]: e for e in events if "correlation" in e.get("args", {}) and "Launch" in e["name"]
    }
    records = {e["args"].get("External id"): e["args"] for e in events if e["name"] == "record_param_comms"}
    found = []
    for kernel in raw.on_device(trace):
        launch = launches.get(kernel["args"]["correlation"])
        if raw.lane_of(kernel) != "communication" or not launch:
            continue
        if not steps[0][0] <= launch["ts"] <= steps[-1][1]:
            continue
        args = {**records.get(kernel["args"].get("External id"), {}), **kernel["args"]}
        name, size = args.get("Collective name", ""), float("nan")
        if name:
            dtype = BYTES[args["dtype"].lower().replace(" ", "")]
            size = max(args["In msg nelems"], args["Out msg nelems"]) * dtype
        else:
            around = [e for e in events if e["ts"] <= launch["ts"] <= raw.span(e)[1] and e["tid"] == launch["tid"]]
            operators = [e for e in around if e["name"].startswith("c10d::")]
            name = (operators or [e for e in around if e["name"].startswith("nccl:")])[0]["name"]
            types = operators[0]["args"].get("Input type", [""]) if operators else [""]
            if dtype := BYTES.get(types[0].replace(" ", "")):
                size = dtype * max(math.prod(shape) for shape in operators[0]["args"]["Input Dims"][:2])
        plain = name.lower().replace("_", "")
        kind = next(kind for word, kind in WORDS.items() if word in plain)
        step = max(place for place, (start, _) in enumerate(steps) if start <= launch["ts"])
        start, end = raw.span(kernel)
        found.append({"kind": kind, "start": start, "end": end, "bytes": size, "step": step})
    return found
