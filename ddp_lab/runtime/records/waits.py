"""What each rank's host waited for in a step, and which rank was late: without traces, from the ranks' own clocks."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ddp_lab.collectives.calls import Call
from ddp_lab.collectives.kinds import ENDS
from ddp_lab.runtime.loop import TrainingResult

AWAITED = 0.9
"""Of the collectives that a rank issues, the share for which Python must wait: C++ waits for those of PyTorch DDP."""
FEWEST_STEPS = 3
Place = tuple[int, str, int]
"""Step, process group, and number of the collective in it."""


def waits(result: TrainingResult, steps: Sequence[int], on_gpu: bool) -> dict[str, float | None]:
    """The times of this rank in `throughput` of the run record, but for `late_s`: means over `steps`, in seconds. None
    is what is not known."""
    host = [times for step in steps if (times := result.host[step]) is not None]
    if not host:
        return dict.fromkeys(("step_s", "data_s", "collectives_s", "device_s", "core_s"))
    sums = {name: sum(times.get(name, 0.0) for times in host) for name in {name for times in host for name in times}}
    means = defaultdict(float, {name: total / len(host) for name, total in sums.items()})
    is_seen = means["awaited"] >= AWAITED * means["issued"]
    return {
        "step_s": statistics.fmean(result.step_time_s[step] or 0.0 for step in steps),
        "data_s": means["data"],
        "collectives_s": means["collectives"] if is_seen else None,
        "device_s": means["device"] if on_gpu else None,
        "core_s": means["core"],
    }


def arrivals(result: TrainingResult, steps: Sequence[int], calls: Sequence[Call]) -> dict[Place, float]:
    """When this rank issued each collective of `steps`, in seconds since the epoch, as far as its recorder holds them.
    Steps whose beginning it has overwritten are left out."""
    arrival_s: dict[Place, float] = {}
    times = [call.time_s for call in calls]
    for step in steps:
        host, length_s = result.host[step], result.step_time_s[step]
        if host is None or length_s is None or not times or host["began"] < times[0]:
            continue
        for call in calls:
            if call.kind not in ENDS and 0 <= call.time_s - host["began"] <= length_s:
                arrival_s[step, call.group, call.seq] = call.time_s
    return arrival_s


def lateness(ranks: Sequence[Mapping[Place, float]], hosts: Sequence[str]) -> list[float | None]:
    """For each rank, the longest time in a step by which it came last to a collective, after the middle one of the
    other ranks: median over steps, in seconds. A step ends with a collective of all, so a delay counts in its own step
    alone.

    Clocks of several hosts cannot be compared; then all is None, as with fewer than `FEWEST_STEPS`.
    """
    latest: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(ranks))
    for call in {call for calls in ranks for call in calls}:
        times = sorted((calls[call], rank) for rank, calls in enumerate(ranks) if call in calls)
        if len(times) > 1:
            (last_s, rank), earlier_s = times[-1], [time_s for time_s, _ in times[:-1]]
            by_rank = latest[call[0]]
            by_rank[rank] = max(by_rank[rank], last_s - statistics.median_high(earlier_s))
    if len(set(hosts)) > 1 or len(latest) < FEWEST_STEPS:
        return [None] * len(ranks)
    return [statistics.median(of_rank) for of_rank in zip(*latest.values(), strict=True)]
