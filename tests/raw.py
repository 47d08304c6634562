"""The parts of a step, from a trace's raw JSON: written without `analysis`, to hold its figures against.

Time is cut at every start and end of anything, and each piece is given to the first of compute, communication and
copies that is under way in it.
"""

from bisect import bisect_right
from itertools import pairwise

Spans = list[tuple[float, float]]
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
NO_COMPUTE = ("c10d", "_c10d", "autograd", "profiler", "record_")


def complete(trace):
    return sorted((event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])


def span(event):
    return event["ts"], event["ts"] + event["dur"]


def step_events(trace):
    """The analysed `ProfilerStep`s: all but the last, if there are several."""
    steps = [
        event
        for event in complete(trace)
        if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    ]
    return steps[:-1] or steps


def launches(trace):
    """The host's time of each launch, by correlation. One launch of a graph has many kernels."""
    of_host = (event for event in complete(trace) if str(event.get("cat")).endswith(("_runtime", "_driver")))
    return {event["args"]["correlation"]: event["ts"] for event in of_host if "correlation" in event.get("args", {})}


def lane_of(event):
    if event["cat"] != "kernel":
        return "copy"
    return "communication" if event["name"].lower().startswith(("nccl", "rccl", "msccl")) else "compute"


def on_device(trace):
    return [event for event in complete(trace) if event.get("cat") in DEVICE]


def windows(trace):
    """Start and end of each analysed step. On a host they are the step's own; on a device, a step ends with its last
    kernel, and the next one begins there."""
    steps, launched = [span(step) for step in step_events(trace)], launches(trace)
    if not on_device(trace):
        return steps
    begin, end, kernel_ends, spans = steps[0][0], steps[-1][1], [], []
    ends = [start for start, _ in steps]
    first_on_stream = {}
    for event in on_device(trace):
        at = launched.get(event["args"]["correlation"])
        if at is not None and begin <= at <= end:
            kernel_ends.append((max(index for index, (start, _) in enumerate(steps) if start <= at), span(event)[1]))
            first_on_stream.setdefault(event["args"]["stream"], event["ts"])
    for event in on_device(trace):
        at, first = (
            launched.get(event["args"]["correlation"]),
            first_on_stream.get(event["args"]["stream"], event["ts"]),
        )
        if (at is None and event["ts"] < first) or (at is not None and at < begin):
            ends[0] = max(ends[0], span(event)[1])
    begin = ends[0]
    for index in range(len(steps)):
        spans.append((begin, max([begin, *(stop for place, stop in kernel_ends if place == index)])))
        begin = spans[-1][1]
    return spans


def lanes(trace, everything=False):
    """Spans of compute, communication and copies that were issued in the analysed steps.

    Args:
        everything: Of a device, all that is in the trace.
    """
    events, steps = complete(trace), step_events(trace)
    begin, end = span(steps[0])[0], span(steps[-1])[1]
    spans = {"compute": [], "communication": [], "copy": []}
    if device := on_device(trace):
        launched = launches(trace)
        for event in device:
            if everything or begin <= launched.get(event["args"]["correlation"], -1) <= end:
                spans[lane_of(event)].append(span(event))
        spans["communication"] += [span(e) for e in events if is_gloo(e) and begin <= e["ts"] <= end]
        return spans
    for event in events:
        if begin <= event["ts"] <= end:
            if is_gloo(event):
                spans["communication"].append(span(event))
            elif event["cat"] == "cpu_op" and event["tid"] == steps[0]["tid"] and computes(event["name"]):
                spans["compute"].append(span(event))
    return spans


def is_gloo(event):
    """Whether it is a collective on the host. Under NCCL too, hosts exchange counts that way."""
    return bool(event["name"].startswith("gloo:")) and event["cat"] == "user_annotation"


def computes(name):
    """Whether an operator does more than wrap others or issue communication."""
    space, _, operator = name.partition("::")
    is_wrapper = space.startswith(NO_COMPUTE) or operator.startswith(("distributed", "autograd"))
    return bool(operator) and space.isidentifier() and not is_wrapper


def parts(spans, begin, end):
    """us from `begin` to `end` by lane, and idle. Where lanes overlap, the first one in `spans` has the time."""
    starts = {lane: sorted(start for start, _ in lane_spans) for lane, lane_spans in spans.items()}
    ends = {lane: sorted(stop for _, stop in lane_spans) for lane, lane_spans in spans.items()}
    times = (time for lane_spans in spans.values() for span in lane_spans for time in span)
    cuts = sorted({begin, end, *(min(max(time, begin), end) for time in times)})
    sums = dict.fromkeys([*spans, "idle"], 0.0)
    for first, last in pairwise(cuts):
        active = (lane for lane in spans if bisect_right(starts[lane], first) > bisect_right(ends[lane], first))
        sums[next(active, "idle")] += last - first
    return sums


def total(spans):
    """us that any of `spans` covers."""
    if not spans:
        return 0.0
    return parts({"it": spans}, min(s for s, _ in spans), max(e for _, e in spans))["it"]
