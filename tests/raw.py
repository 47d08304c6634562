"""The parts of a step, from a trace's raw JSON: written without `analysis`, to hold its figures against.

Time is cut at every start and end of anything, and each piece is given to the first of compute, communication and
copies that is under way in it.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import Any

Spans = list[tuple[float, float]]
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
NO_COMPUTE = ("c10d", "_c10d", "autograd", "profiler", "record_")


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted((event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])


def span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def step_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The analysed `ProfilerStep`s: all but the last."""
    return [
        event
        for event in complete(trace)
        if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    ][:-1]


def lanes(trace: dict[str, Any]) -> dict[str, Spans]:
    """Spans of compute, communication and copies that were issued in the analysed steps."""
    events, steps = complete(trace), step_events(trace)
    begin, end = span(steps[0])[0], span(steps[-1])[1]
    found: dict[str, Spans] = {"compute": [], "communication": [], "copy": []}
    on_device = [event for event in events if event["cat"] in DEVICE]
    if on_device:
        launches = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"].startswith("cuda_")}
        for event in on_device:
            if begin <= launches[event["args"]["correlation"]] <= end:
                is_nccl = event["name"].lower().startswith("nccl")
                lane = "communication" if is_nccl else "compute" if event["cat"] == "kernel" else "copy"
                found[lane].append(span(event))
        return found
    for event in events:
        if begin <= event["ts"] <= end:
            if event["name"].startswith("gloo:"):
                found["communication"].append(span(event))
            elif event["cat"] == "cpu_op" and event["tid"] == steps[0]["tid"] and computes(event["name"]):
                found["compute"].append(span(event))
    return found


def computes(name: str) -> bool:
    """Whether an operator does more than wrap others or issue communication."""
    space, _, rest = name.partition("::")
    is_wrapper = space.startswith(NO_COMPUTE) or rest.startswith(("distributed", "autograd"))
    return bool(rest) and space.isidentifier() and not is_wrapper


def parts(spans: dict[str, Spans], begin: float, end: float) -> dict[str, float]:
    """Of the time from `begin` to `end`: us of compute, of each other lane without what stands before it, and idle."""
    starts = {lane: sorted(start for start, _ in each) for lane, each in spans.items()}
    ends = {lane: sorted(stop for _, stop in each) for lane, each in spans.items()}
    cuts = sorted({begin, end, *(min(max(t, begin), end) for each in spans.values() for pair in each for t in pair)})
    sums = dict.fromkeys([*spans, "idle"], 0.0)
    for first, last in pairwise(cuts):
        active = (lane for lane in spans if bisect_right(starts[lane], first) > bisect_right(ends[lane], first))
        sums[next(active, "idle")] += last - first
    return sums


def total(spans: Spans) -> float:
    """us that any of `spans` covers."""
    if not spans:
        return 0.0
    return parts({"it": spans}, min(s for s, _ in spans), max(e for _, e in spans))["it"]
