"""The pictures of docs/how-it-works: memory of a rank over one step, and under it what the rank computes and sends."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_lab.analysis.columns import COMPONENTS, MIB, SHARDABLE
from ddp_lab.analysis.metrics.memory import OTHER
from ddp_lab.analysis.report.figures import COLOURS
from ddp_lab.analysis.report.figures.lanes import bounds, compute_lane
from ddp_lab.analysis.report.figures.memory import MEMORY_COLOURS
from ddp_lab.analysis.report.figures.traced_step import TracedStep
from ddp_lab.analysis.traces.timeline import PHASES

MEMORY_PARTS = {
    "optimizer_state": MEMORY_COLOURS["optimizer_state"],
    "parameters": "#332288",
    "gradients": MEMORY_COLOURS["gradients"],
    OTHER: "#DDCC77",
}
"""From the bottom up: what changes least lies lowest."""
PHASE_COLOURS = {**COLOURS, "gradient_sync": "#F0E442"}
QUEUED = "#F8DFB0"
LEGEND = {
    **{name.replace("_", " "): PHASE_COLOURS[name] for name in PHASES},
    "other compute": COLOURS["other compute"],
    "exposed": COLOURS["exposed"],
    "collective runs": COLOURS["communication"],
    "queued": QUEUED,
}
LANE_HEIGHT, LANE_HEIGHTS = 1.4, {"bookkeeping": 0.6}
"""Of collectives; and of those that are small."""
SMALLEST_GAP_US = 300.0
"""Shorter gaps in compute are not drawn: nobody could see one."""
WIDTH_IN, HEIGHT_IN = 8.0, 5.7
LETTER_IN, LINE_IN = 0.065, 0.12
"""Room that text takes."""


def draw(step: TracedStep, most_mib: float, most_ms: float) -> Figure:
    """The picture of a step.

    Args:
        most_mib: Where the axis of memory ends; pictures that readers compare have the same.
        most_ms: Where the axis of time ends; the same.
    """
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
    memory, lanes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.2, 1], "hspace": 0.06})
    figure.subplots_adjust(left=0.155, right=0.985, top=0.865, bottom=0.085)
    lanes.set_xlim(0, most_ms)
    lanes.set_xlabel("time since the step began, ms", fontsize=9)
    draw_memory(memory, step, most_mib)
    draw_lanes(lanes, step)
    for axes in (memory, lanes):
        for edge in step.phases()[["start", "end"]].to_numpy().ravel():
            axes.axvline(edge, color="#999999", linewidth=0.5, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    parts, names = memory.get_legend_handles_labels()
    patches = [Patch(color=colour, label=name) for name, colour in LEGEND.items()]
    for y, handles, labels in ((1.0, parts, names), (0.955, patches, list(LEGEND))):
        row = {"ncols": len(labels), "bbox_to_anchor": (0.005, y), "columnspacing": 1.2, "handlelength": 1.2}
        figure.legend(handles, labels, loc="upper left", fontsize=8, frameon=False, **row)
    return figure


def draw_memory(axes: Axes, step: TracedStep, most_mib: float) -> None:
    """Memory by component, its peak, and what the formula says of memory at rest."""
    memory, labels = step.memory(), {**COMPONENTS, OTHER: OTHER}
    axes.stackplot(
        memory["at"],
        [memory[part] * MIB for part in MEMORY_PARTS],
        labels=[labels[part] for part in MEMORY_PARTS],
        colors=list(MEMORY_PARTS.values()),
        linewidth=0,
        step="pre",  # a sample says what was held since the one before
    )
    at_rest = sum(step.held[f"expected_{component}_bytes"] for component in SHARDABLE) * MIB
    axes.axhline(at_rest, color="black", linewidth=1, linestyle=(0, (4, 3)), label="at rest, by the formula")
    peak = memory.iloc[int(memory["total"].to_numpy().argmax())]
    axes.annotate(
        f"peak {peak['total'] * MIB:.0f} MiB",
        (peak["at"], peak["total"] * MIB),
        xytext=(0, 13),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        arrowprops={"arrowstyle": "-|>", "linewidth": 0.8},
    )
    mesh = step.record["config"].get("mesh")
    run = step.record["choice"] + (f", mesh {mesh}" if mesh else "")
    axes.set_title(f"{run}: one step of rank {step.timeline.rank}", loc="left", fontsize=9)
    axes.set_ylim(0, most_mib)
    axes.set_ylabel("memory, MiB", fontsize=9)


def draw_lanes(axes: Axes, step: TracedStep) -> None:
    """Phases, compute, and collectives by what they are for."""
    heights = {lane: LANE_HEIGHTS.get(lane, LANE_HEIGHT) for lane in step.lanes()}
    bottom = 1.7 + sum(heights.values()) + 0.3 * len(heights) - 0.2
    axes.set_ylim(bottom, -0.6)
    names = {0.0: "phase", 1.0: "compute"}
    for phase in step.phases().to_dict("records"):
        shown = phase["name"].replace("_", " ")
        draw_bar(axes, phase["start"], phase["end"], (-0.4, 0.8), PHASE_COLOURS[phase["name"]], shown, alpha=0.45)
    begin, stop = bounds(step.timeline, step.number)
    for name, spans in compute_lane(step.timeline, begin, stop, SMALLEST_GAP_US).items():
        for start, end in (spans - begin) / 1000 if name != "idle" else ():
            draw_bar(axes, start, end, (0.6, 0.8), COLOURS[name])
    calls, y = step.collectives(), 1.7
    for lane, height in heights.items():
        of_lane = calls[calls["lane"] == lane]
        rows = rows_of(of_lane)
        distance = height / max(2, 1 + max(rows, default=0))
        for row, call in zip(rows, of_lane.to_dict("records"), strict=True):
            place = y + row * distance, 0.85 * distance
            draw_bar(axes, call["issued"], call["start"], place, QUEUED)
            draw_bar(axes, call["start"], call["end"], place, COLOURS["communication"], size_text(call["bytes"]))
        names[y + height / 2] = lane_name(lane, of_lane)
        y += height + 0.3
    axes.set_yticks(list(names), list(names.values()))
    axes.tick_params(axis="y", length=0)


def draw_bar(
    axes: Axes, start: float, end: float, place: tuple[float, float], colour: str, text: str = "", alpha: float = 1
) -> None:
    """A bar between two moments, with `text` in it if there is room. `place`: where it begins in y, and its height."""
    axes.broken_barh([(start, end - start)], place, color=colour, linewidth=0, alpha=alpha)
    box, (first, last), (low, high) = axes.get_position(), axes.get_xlim(), axes.get_ylim()
    width_in = WIDTH_IN * box.width * (end - start) / (last - first)
    height_in = HEIGHT_IN * box.height * place[1] / abs(high - low)
    if width_in > LETTER_IN * len(text) and height_in > LINE_IN:
        axes.text((start + end) / 2, place[0] + place[1] / 2, text, ha="center", va="center", fontsize=7.5)


def rows_of(calls: pd.DataFrame) -> list[int]:
    """For each call the first row in which nothing is under way when it is issued."""
    ends: list[float] = []
    rows = []
    for issued, end in calls[["issued", "end"]].to_numpy(float).tolist():
        row = next((row for row, before in enumerate(ends) if before <= issued), len(ends))
        ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def lane_name(lane: str, calls: pd.DataFrame) -> str:
    if calls.empty:
        return f"{lane}:\nnothing sent"
    if lane in LANE_HEIGHTS:
        return lane
    of_step = calls[calls["is_of_step"]]
    name = calls["name"].iloc[0] + ("s" if len(of_step) != 1 else "")
    each = " to ".join(dict.fromkeys((size_text(calls["bytes"].min()), size_text(calls["bytes"].max()))))
    return f"{lane}:\n{len(of_step)} {name}\nof {each}"


def size_text(size: float) -> str:
    """Bytes as people read them: `4 MiB`, `2.5 MiB`, `64 KiB`, `304 B`."""
    if 2**13 <= size < 2**19:
        return f"{size / 2**10:.1f}".removesuffix(".0") + " KiB"
    return f"{size * MIB:.1f}".removesuffix(".0") + " MiB" if size >= 2**19 else f"{size:.0f} B"
