"""What limits a run's step, and what to try next: two lines from the run record, without traces.

A line says only what the ranks' clocks show. A part of a step counts if it is `WORTH_NAMING`, and more than the ranks
waited for a core, which may be what made it long.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddp_lab.runtime.records.waits import FEWEST_STEPS

Row = dict[str, Any]
WORTH_NAMING, NEAR = 0.1, 0.9
"""Of a step; of the memory that a rank may hold."""
BUSY = 0.25
"""Of a step, in which a training thread has no core: with more, communication cannot be told from the load."""


class StepLimit(NamedTuple):
    """`share`: of a step, by which findings are ordered."""

    share: float
    text: str
    advice: str


def verdict(record: Row) -> list[str]:
    """What was found, and what to try next; no line of a run that recorded no waits."""
    rows: list[Row] = record["throughput"]
    if not rows:
        return []
    findings = [*judged(record, rows), *near_limit(record["memory"])]
    # memory has no share of a step, but its advice helps
    first = next((finding for finding in findings if finding.share), findings[-1])
    return ["; ".join(finding.text for finding in findings), first.advice]


def judged(record: Row, rows: Sequence[Row]) -> list[StepLimit]:
    """What limits a step, the largest part first."""
    steps = record["step_time_s"][(record["resumed_from"] or {"step": 0})["step"] :]
    timed = sum(seconds is not None for seconds in steps[max(1, record["settling_steps"]) :])
    if timed < FEWEST_STEPS:
        text = f"unknown: {timed} of {len(steps)} steps are timed, without the first ones and those under the profiler"
        return [StepLimit(0, text, "more steps (--max-steps), or --no-profile")]
    if record["gpu_sharing"]:
        text = "withheld: ranks share a GPU, so times are not those of as many GPUs"
        return [StepLimit(0, text, "a GPU for each rank")]
    core = max(row["core_s"] / row["step_s"] for row in rows)
    report = "ddp-lab report on the traces" if not record["config"]["no_profile"] else "a run without --no-profile"
    limits = [*late(rows, report), *on_gpu(rows), *on_cpu(rows, core)]
    limits = sorted((finding for finding in limits if finding.share >= max(WORTH_NAMING, core)), reverse=True)
    if limits or core < BUSY:
        return limits or [nothing(rows, core, report)]
    text = f"withheld: a training thread could run but had no core for {core:.0%} of a step; "
    text += f"the machine is busy, or has too few cores for {len(rows)} ranks"
    return [StepLimit(0, text, "again without other programs, or with fewer ranks than cores")]


def late(rows: Sequence[Row], report: str) -> Iterator[StepLimit]:
    """The rank for which the others wait; its own lateness counts as far as no other rank comes near it."""
    timed = sorted((row for row in rows if row["late_s"] is not None), key=lambda row: row["late_s"])
    if len(timed) < 2:
        return
    worst, late_s = timed[-1], timed[-1]["late_s"]
    text = f"rank {worst['rank']} is a straggler: it comes last, by {part(late_s, worst)}"
    longer_s = worst["data_s"] - max(row["data_s"] for row in timed[:-1])
    advice = f"{report}: its page shows what rank {worst['rank']} does meanwhile"
    if longer_s >= late_s / 2:
        text += f", and loads data {1000 * longer_s:,.0f} ms longer"
        advice = f"look at the samples and the disk of rank {worst['rank']}"
    yield StepLimit((late_s - timed[-2]["late_s"]) / worst["step_s"], text, advice)


def on_cpu(rows: Sequence[Row], core: float) -> Iterator[StepLimit]:
    """On a CPU the training thread does all itself, so what it waits for is lost."""
    if rows[0]["device_s"] is not None:
        return
    yield loading(rows)
    least = min(rows, key=lambda row: share(row, "collectives_s"))
    if least["collectives_s"] is not None and core < BUSY:
        text = (
            f"exposed communication: waiting in collectives takes {part(least['collectives_s'], least)}, even on rank "
        )
        text += f"{least['rank']}, which waits least"
        advice = "a larger --global-batch-size, or another strategy (ddp-lab sweep compares them)"
        yield StepLimit(share(least, "collectives_s"), text, advice)


def on_gpu(rows: Sequence[Row]) -> Iterator[StepLimit]:
    """What the host does costs nothing while it must wait for its GPU in each step."""
    if rows[0]["device_s"] is None or min(share(row, "device_s") for row in rows) >= WORTH_NAMING:
        return
    least = min(rows, key=lambda row: share(row, "device_s"))
    if loading(rows).share >= WORTH_NAMING:
        yield loading(rows)
        return
    text = f"host-bound: rank {least['rank']} waits for its GPU only {part(least['device_s'], least)}"
    yield StepLimit(1 - share(least, "device_s"), text, "larger micro-batches (--global-batch-size), or --compile")


def loading(rows: Sequence[Row]) -> StepLimit:
    """What every rank spends on data; what one spends more makes it late."""
    least = min(rows, key=lambda row: share(row, "data_s"))
    text = f"input-bound: loading data takes {part(least['data_s'], least)}, even on rank {least['rank']}, the quickest"
    advice = "make samples ready before training, and collate cheap: both run on the training thread"
    return StepLimit(share(least, "data_s"), text, advice)


def near_limit(memory: Sequence[Row]) -> Iterator[StepLimit]:
    """The rank whose memory is nearest to the most that it may hold."""
    usage = {row["rank"]: (row["peak_reserved_bytes"] or row["peak_rss_bytes"], row["limit_bytes"]) for row in memory}
    rank = max(usage, key=lambda member: usage[member][0] / usage[member][1])
    peak, limit = usage[rank]
    if peak >= NEAR * limit:
        text = f"memory is near the limit: rank {rank} held {peak / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        advice = (
            "--activation-checkpointing block, smaller micro-batches (--grad-accum-steps), or a strategy that shards"
        )
        yield StepLimit(0, text, advice)


def nothing(rows: Sequence[Row], core: float, report: str) -> StepLimit:
    """No part but compute is worth naming, as far as is known."""
    clauses = [f"loading data takes at most {max(share(row, 'data_s') for row in rows):.0%}"]
    if all(row["late_s"] is not None for row in rows) and len(rows) > 1:
        clauses.append("no rank stands out as late")
    limit = "nothing stands out"
    if rows[0]["device_s"] is not None:
        device = min(share(row, "device_s") for row in rows)
        limit = f"GPU-bound: each host waits for its GPU for {device:.0%} of a step or more"
        clauses.append("how much of it is communication, traces tell")
    elif any(row["collectives_s"] is None for row in rows):
        clauses.append("what collectives cost, traces tell, since C++ waits for them")
    else:
        sent = min(share(row, "collectives_s") for row in rows)
        limit = "compute-bound" if core < WORTH_NAMING else limit
        clauses.append(f"waiting in collectives takes {sent:.0%} on the rank that waits least")
    if core >= WORTH_NAMING:
        clauses.append(f"a thread had no core for {core:.0%}, which may explain what is shorter")
    return StepLimit(0, "; ".join([limit, *clauses]), report)


def share(row: Row, name: str) -> float:
    return (row[name] or 0.0) / row["step_s"]


def part(seconds: float, row: Row) -> str:
    return f"{1000 * seconds:,.0f} ms, {seconds / row['step_s']:.0%} of a step"
