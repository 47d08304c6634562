"""Pipelines: what each rank did of which micro-batch, for whom it waited, and its bubble.

A run leaves a range in the profile for each action of its schedule: `pipeline F2.5` is the forward pass of micro-batch
5 through stage 2, and within it `pipeline wait RA2.5` is the wait for its activations from the stage before.

On a CPU these are times of the training thread. On a device a pass lasts from its first compute kernel to its last.
Its wait is the time before it with communication and without a pass. Sends run beside compute there, and take no time.
"""

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.mesh import Mesh, coordinates
from ddp_lab.analysis.traces.intervals import Intervals, clip, union
from ddp_lab.analysis.traces.timeline import RankTimeline

PIPELINE = "pp"
"""The dimension of the mesh."""
NAME = r"^pipeline (?P<waits>wait )?(?P<kind>[A-Z]{1,2})(?P<stage>\d{1,6})\.(?P<micro_batch>\d{1,6})$"
PASSES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
PARTS = PASSES | {"wait RA": "wait_activation", "wait RG": "wait_gradient", "SA": "send", "SG": "send"}
SENDERS = {"wait_activation": -1, "wait_gradient": 1}
"""By part: the sending stage, relative to the stage that waits."""
ACTION = ["rank", "pipeline", "sender", "step", "part", "stage", "micro_batch", "start", "end"]


def actions(timeline: RankTimeline) -> pd.DataFrame:
    """What a rank did, in order: columns `ACTION` without pipeline and sender. Times are us on its own clock."""
    ranges = timeline.phases.join(timeline.phases["name"].str.extract(NAME)).dropna(subset=["kind"])
    ranges["part"] = (ranges["waits"].fillna("") + ranges["kind"]).map(PARTS)
    inside = ranges["start"].between(timeline.steps["start"].iloc[0], timeline.steps["end"].iloc[-1])
    ranges = ranges[ranges["part"].notna() & inside].reset_index(drop=True)
    ranges = ranges.astype({"stage": int, "micro_batch": int}).assign(step=timeline.step_at(ranges["start"]))
    if timeline.kind == "cuda":
        ranges = _on_device(timeline, ranges[ranges["part"].isin(PASSES.values())].reset_index(drop=True))
    else:  # a pass begins when it has waited
        has_waited = ~ranges["part"].isin(SENDERS) & ranges["part"].shift(-1).isin(SENDERS)
        ranges["start"] = ranges["start"].where(~has_waited, ranges["end"].shift(-1))
    return ranges.assign(rank=timeline.rank).reindex(columns=ACTION)


def _on_device(timeline: RankTimeline, passes: pd.DataFrame) -> pd.DataFrame:
    """The host's `passes` at the times when the device ran them, and its waits before them."""
    kernels = timeline.kernels[timeline.kernels["lane"] == "compute"].dropna(subset=["launch"])
    place = np.searchsorted(passes["start"].to_numpy(), kernels["launch"].to_numpy(), side="right") - 1
    inside = (place >= 0) & (kernels["launch"].to_numpy() <= np.append(passes["end"].to_numpy(), -np.inf)[place])
    of_pass = kernels[inside].groupby(place[inside])
    ran = passes.assign(start=of_pass["start"].min(), end=of_pass["end"].max()).dropna(subset=["start"])
    sent, free, waits = union(timeline.intervals("communication")), ran["end"].cummax().shift(), []
    for row, before in zip(ran.to_dict("records"), free.fillna(timeline.windows[0, 0]), strict=True):
        part = {"forward": "wait_activation", "backward_weight": None}.get(row["part"], "wait_gradient")
        gap = clip(sent, before, row["start"])
        if part and len(gap):
            waits.append(row | {"part": part, "start": before, "end": gap[-1, 1]})
    return pd.concat([ran, pd.DataFrame(waits, columns=ran.columns)]).sort_values("start", kind="stable")


def message_waits(timeline: RankTimeline) -> Intervals:
    """When a rank waited for messages, on its own clock."""
    table = actions(timeline)
    return union(table.loc[table["part"].isin(SENDERS), ["start", "end"]].to_numpy(float))


def pipelines(timelines: list[RankTimeline], clocks: pd.DataFrame, mesh: Mesh | None) -> pd.DataFrame:
    """The `actions` of all ranks on one clock, with the number of their pipeline, and the rank that they wait for.
    Empty if the mesh has no pipeline, or the traces do not name actions.

    Args:
        clocks: Columns rank and offset_ms.
    """
    table = pd.concat(map(actions, timelines), ignore_index=True)
    if mesh is None or mesh.get(PIPELINE, 1) == 1 or table.empty:
        return table.iloc[:0]
    places = {timeline.rank: str(coordinates(mesh, timeline.rank) | {PIPELINE: 0}) for timeline in timelines}
    table["pipeline"] = pd.factorize(table["rank"].map(places))[0]
    ahead = table["rank"].map(clocks.set_index("rank")["offset_ms"]) * 1000
    table[["start", "end"]] = table[["start", "end"]].sub(ahead, axis="index")
    home = table.drop_duplicates(["pipeline", "stage"]).set_index(["pipeline", "stage"])["rank"]
    sends = pd.MultiIndex.from_arrays([table["pipeline"], table["stage"] + table["part"].map(SENDERS)])
    table["sender"] = home.reindex(sends).to_numpy()
    return table[table["sender"].notna() | ~table["part"].isin(SENDERS)]


def pipeline_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """A row a rank and step (pipeline.csv).

    Args:
        table: From `pipelines`.
        steps: Columns rank, step, step_ms.
    """
    rows = []
    for (_, step), of_step in table.groupby(["pipeline", "step"]):
        ran = of_step[of_step["part"].isin(PASSES.values())]
        begin, end = ran["start"].min(), ran["end"].max()
        ideal, ms = 100 * ideal_bubble(of_step), (end - begin) / 1000
        for rank, acts in of_step.groupby("rank"):
            times = (acts["end"].clip(lower=begin) - acts["start"].clip(lower=begin)).groupby(acts["part"]).sum() / 1000
            row = {"rank": rank, "step": step, "pipeline_ms": ms, "ideal_bubble_pct": ideal}
            row |= {f"{part}_ms": times.get(part, 0.0) for part in PARTS.values()}
            row |= {f"{part}_from": acts.loc[acts["part"] == part, "sender"].max() for part in SENDERS}
            bubble = ms - sum(row[f"{part}_ms"] for part in PASSES.values())
            rows.append(row | {"bubble_ms": bubble, "bubble_pct": 100 * bubble / ms})
    figures = pd.DataFrame(rows, columns=[name for name in COLUMNS["pipeline"] if name != "step_ms"])
    return figures.merge(steps[["rank", "step", "step_ms"]], on=["rank", "step"])[list(COLUMNS["pipeline"])]


def ideal_bubble(of_step: pd.DataFrame) -> float:
    """The bubble's share of a pipeline's step, if all stages and products take equally long and messages take no time.
    A forward pass is one product, a backward pass two."""
    ranks, stages, micro_batches = (of_step[name].nunique() for name in ("rank", "stage", "micro_batch"))
    products = 1 if (of_step["part"] == "backward_weight").any() else 3
    bubble = products * (ranks - 1) * ranks / stages
    return float(bubble / (3 * micro_batches + bubble))
