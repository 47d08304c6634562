"""Exposure and collectives in real device traces, against a plain reading of their JSON.

Those in `tests/data/traces` are runs of this project on 2026-11-26:

- `h200`: one NVIDIA H200, torch 2.11, NCCL 2.28, with one rank over NCCL, which then needs no kernel for a collective,
  and with two ranks over Gloo.
- `h100_two_ranks`: two ranks that share one NVIDIA H100 by MPS, torch 2.15 (`ProcessGroupNCCL2`), NCCL 2.30.7, a Llama
  of 853 M parameters. They are cut: of the host there are launches, annotations and collectives; names of kernels other
  than NCCL's end after 40 characters. No figure of a report changed by it, to the last digit.

More are tried by

    DEVICE_TRACES=FOLDER pytest tests/analysis/traces/test_device_traces.py

where each folder below FOLDER has the traces of one window, a file a rank.
"""

import gzip
import json
import os
from functools import cache
from pathlib import Path

import pytest

from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import group_by_window
from tests import raw
from tests.tables import each_row

TRACES = Path(__file__).parents[2] / "data" / "traces"
FOLDERS = (*TRACES.iterdir(), Path(os.environ.get("DEVICE_TRACES", "/nowhere")))
REAL = sorted(path for folder in FOLDERS for path in folder.glob("*") if path.is_dir())
KINDS = {"allGatherSingleImpl": "all_gather", "reduceScatterSingleImpl": "reduce_scatter"}
"""Of names that ProcessGroupNCCL2 gives."""
ITEM_BYTES = {"BFloat16": 2, "Float": 4, "Double": 8}
CLOCKS_MS = 0.021
"""Two ranks on one host have one clock, but their profilers' differ by up to this."""


@cache
def read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, strict=False)


@cache
def analysed(folder):
    (window,) = group_by_window(sorted(path for path in folder.iterdir() if ".json" in path.name), "x")
    return analyse_window(window)


def nccl_kernels(trace):
    """NCCL's kernels that the one analysed step launched, in order of launch."""
    launched, (step,) = raw.launches(trace), raw.step_events(trace)
    begin, end = raw.span(step)
    nccl = [event for event in raw.on_device(trace) if raw.lane_of(event) == "communication"]
    of_step = [event for event in nccl if begin <= launched.get(event["args"]["correlation"], -1) <= end]
    return sorted(of_step, key=lambda event: launched[event["args"]["correlation"]])


def kind_and_bytes(args):
    name, elements = args["Collective name"], max(args["In msg nelems"], args["Out msg nelems"])
    return KINDS.get(name, name), elements * ITEM_BYTES[args["dtype"]]


@each_row("folder", REAL)
def test_times(folder):
    """Of each step of each rank: compute, exposed and hidden communication, copies, idle."""
    analysis = analysed(folder)
    steps = analysis.exposure.steps
    for timeline in analysis.timelines:
        trace = read(timeline.path)
        spans, windows = raw.lanes(trace, everything=True), raw.windows(trace)
        rows = steps[steps["rank"] == timeline.rank].to_dict("records")
        for row, (begin, end) in zip(rows, windows, strict=True):
            parts = raw.parts(spans, begin, end)
            reported = [row[name] for name in ("compute_ms", "exposed_ms", "exposed_copy_ms", "idle_ms", "step_ms")]
            expected = [parts[name] / 1000 for name in ("compute", "communication", "copy", "idle")] + [
                (end - begin) / 1000
            ]
            assert reported == pytest.approx(expected, rel=0.01, abs=1e-3)


@each_row(
    ("choice", "calls"),
    [
        ("bucket_ddp_async", {("all_reduce", 16): (83, 4 * 852_559_872)}),
        ("zero3", {("all_gather", 16): (33, 3_057_905_664), ("reduce_scatter", 16): (18, 4 * 852_559_872)}),
    ],
)
def test_collectives_of_two_ranks(choice, calls):
    """Over ProcessGroupNCCL2: by kind and stream calls and bytes; of each call what is wait and what is transfer, how
    much of either no compute hides, and how many kernels of compute began within. Stream 16 is the group's own, 7 the
    one that computes."""
    analysis = analysed(TRACES / "h100_two_ranks" / f"{choice}_nccl2")
    traces = [read(timeline.path) for timeline in analysis.timelines]
    kernels = [nccl_kernels(trace) for trace in traces]
    expected = [[(*kind_and_bytes(kernel["args"]), kernel["args"]["stream"]) for kernel in queue] for queue in kernels]
    assert expected[0] == expected[1]
    totals = {}
    for kind, size, stream in expected[0]:
        count, before = totals.get((kind, stream), (0, 0))
        totals[kind, stream] = (count + 1, before + size)
    assert totals == calls | {("broadcast", 7): (1, 256), ("all_reduce", 7): (1, 16)}
    table = analysis.exposure.collectives
    assert len(table) == 2 * (len(expected[0]) + 2)  # and two of Gloo
    arrived = [max(kernel["ts"] for kernel in call) for call in zip(*kernels, strict=True)]
    for rank, queue in enumerate(kernels):
        rows = table[(table["rank"] == rank) & (table["group"] == "all ranks, group 0")]
        cells = rows[["kind", "bytes", "stream"]].itertuples(index=False)
        assert [(kind, size, int(stream.split()[1])) for kind, size, stream in cells] == expected[rank]
        ends = [kernel["ts"] + kernel["dur"] for kernel in queue]
        turns = [min(last, end) for last, end in zip(arrived, ends, strict=True)]  # who sends may be done before
        waits = [(kernel["ts"], turn) for kernel, turn in zip(queue, turns, strict=True)]
        transfers = list(zip(turns, ends, strict=True))
        for name, spans in (("wait_ms", waits), ("transfer_ms", transfers)):
            assert rows[name].tolist() == pytest.approx([(end - start) / 1000 for start, end in spans], abs=CLOCKS_MS)
        compute = raw.lanes(traces[rank], everything=True)["compute"]
        within = [sum(kernel["ts"] < at < end for at, _ in compute) for kernel, end in zip(queue, ends, strict=True)]
        assert rows["compute_starts"].tolist() == within
        gloo = [raw.span(event) for event in raw.complete(traces[rank]) if raw.is_gloo(event)]  # issued before them
        lanes = {"compute": compute, "gloo": gloo, "wait": waits, "transfer": transfers}
        parts = raw.parts(lanes, queue[0]["ts"], max(ends))
        assert rows["exposed_ms"].sum() == pytest.approx((parts["wait"] + parts["transfer"]) / 1000, rel=0.01)
        assert rows["exposed_wait_ms"].sum() == pytest.approx(parts["wait"] / 1000, abs=CLOCKS_MS * len(queue))
