"""A pipeline on the summary page: its lanes, its bubble, and who waits for whom."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.metrics.pipeline import PASSES, SENDERS
from ddp_lab.analysis.report.figures.lanes_figure import drawn_lanes
from ddp_lab.analysis.sentences import say
from ddp_lab.analysis.traces.intervals import minus, union

MADE = {"wait_activation": "activations", "wait_gradient": "gradients"}


def bubbles(mean: pd.DataFrame) -> str:
    """Sentences on the bubble, on the rank that computes longest, and on those that wait longest.

    Args:
        mean: Of the table of `pipeline_steps`, by rank.
    """
    waits = [
        (row[f"{part}_ms"], f"{row['rank']:.0f}", MADE[part], f"{row[f'{part}_from']:.0f}")
        for row in mean.to_dict("records")
        for part in SENDERS
        if row[f"{part}_ms"] > 0
    ]
    computed = mean[[f"{part}_ms" for part in PASSES.values()]].sum(axis="columns")
    slowest = mean["rank"].iloc[int(computed.argmax())]
    return say("bubble", mean, slowest, computed, sorted(waits, reverse=True)[:4])


def pipeline_figure(of_step: pd.DataFrame) -> go.Figure:
    """A lane a rank, each pass with its micro-batch's number. `of_step`: columns as of `pipelines`, of one step."""
    ran = of_step[of_step["part"].isin(PASSES.values())]
    begin, length = ran["start"].min(), ran["end"].max() - ran["start"].min()
    shown = of_step.assign(start=(of_step["start"] - begin).clip(lower=0), end=of_step["end"] - begin, edge="")
    shown["lane"], shown["text"] = "rank " + shown["rank"].astype(str), shown["micro_batch"].astype(str)
    shown["about"] = "stage " + shown["stage"].astype(str)
    waits = shown["part"].isin(SENDERS)
    sender = shown.loc[waits, "sender"].astype(int).astype(str)
    shown.loc[waits, "text"] = "waits for " + shown["part"].map(MADE) + " " + shown["text"] + " of rank " + sender
    shown.loc[waits, "part"] = "bubble"
    bars = [shown[shown["end"] > shown["start"]]]
    for lane, of_lane in bars[0].groupby("lane"):
        gaps = minus(np.array([[0.0, length]]), union(of_lane[["start", "end"]].to_numpy(float)))
        bubble = pd.DataFrame(gaps, columns=["start", "end"])
        bars.append(bubble.assign(lane=lane, part="bubble", text="bubble", about="", edge=""))
    lanes = {lane: lane for lane in shown.sort_values(["pipeline", "rank"])["lane"]}
    return drawn_lanes(pd.concat(bars), lanes, dict.fromkeys(lanes, length)).update_xaxes(
        title="ms since the first pass began"
    )
