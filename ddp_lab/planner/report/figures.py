"""Figures of a plan: memory over the step, and the step of every choice on one axis."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.report.figures import COLOURS, LANE_HEIGHT_PX, LANE_NAMES, MEMORY_COLOURS, styled
from ddp_lab.analysis.traces.intervals import Intervals, bridge, minus, union
from ddp_lab.planner.contracts import COMPONENTS, Simulated

COMPONENT_COLOURS = {
    **MEMORY_COLOURS,
    "activations": "#DDCC77",
    "communication": COLOURS["communication"],
    "other": "var(--pale)",
}
SMALLEST_PART = 1 / 1500
"""Of the longest step. Smaller gaps between operators are closed."""
GIB, MIB = 2**30, 2**20


def lanes_figure(simulated: Mapping[str, Simulated]) -> go.Figure:
    """One step of each choice on one axis: its compute by phase, where it only waits, and its collectives below."""
    longest = max(of_choice.step_time_s for of_choice in simulated.values())
    bars: dict[str, list[tuple[str, float, float]]] = {name: [] for name in COLOURS}
    lanes: list[str] = []
    for choice, of_choice in simulated.items():
        below = f"{choice}  collectives"
        lanes += [choice, below]
        phases = compute_by_phase(of_choice)
        communication = [(s.start_s, s.end_s) for s in of_choice.spans if s.lane.startswith("communication")]
        busy = union(np.concatenate([*phases.values(), np.empty((0, 2))]))
        sent = union(np.array(communication, dtype=float).reshape(-1, 2))
        parts = {**phases, "exposed": minus(sent, busy)}
        for name, moments in parts.items():
            bars[name] += [(choice, *span) for span in bridge(moments, longest * SMALLEST_PART)]
        bars["communication"] += [(below, *span) for span in bridge(sent, longest * SMALLEST_PART)]
    figure = go.Figure()
    for name, found in bars.items():
        if found:
            lengths = [round((end - start) * 1e3, 3) for _, start, end in found]
            figure.add_bar(
                y=[lane for lane, _, _ in found],
                base=[round(start * 1e3, 3) for _, start, _ in found],
                x=lengths,
                customdata=lengths,  # x is where the bar ends
                name=LANE_NAMES.get(name, name),
                orientation="h",
                marker={"color": COLOURS[name], "line": {"width": 0}},
                hovertemplate="%{y}, %{fullData.name}: %{customdata:.2f} ms, from %{base:.2f} ms<extra></extra>",
            )
    height = 120 + LANE_HEIGHT_PX * len(lanes)
    figure.update_layout(barmode="overlay", bargap=0.25, height=height, meta={"zooms": True})
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1])
    figure.update_xaxes(title="ms since the step began", range=[0, longest * 1e3])
    return styled(figure)


def compute_by_phase(simulated: Simulated) -> dict[str, Intervals]:
    """Intervals of compute in seconds, for each phase of the step."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in simulated.spans:
        if span.lane == "compute":
            phase = span.details["phase"]
            found[phase if phase in COLOURS else "other compute"].append((span.start_s, span.end_s))
    return {phase: union(np.array(spans, dtype=float)) for phase, spans in found.items()}


def savings_figure(frame: pd.DataFrame) -> go.Figure:
    """A bar a setting: components at the peak, beside a mark for what was measured."""
    rows, figure = frame[frame["note"] == ""], go.Figure()
    for component, label in COMPONENTS.items():
        held = rows[f"peak_{component}_bytes"] / MIB
        if (held > 0).any():
            figure.add_bar(
                y=rows["setting"],
                x=held.round(3),
                name=label,
                orientation="h",
                marker={"color": COMPONENT_COLOURS[component], "line": {"width": 0}},
                hovertemplate=f"%{{y}}: {label} %{{x:.2f}} MiB<extra></extra>",
            )
    figure.add_scatter(
        x=rows["measured_bytes"] / MIB,
        y=rows["setting"],
        mode="markers",
        name="measured",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 2.5, "color": "var(--ink)"}},
        hovertemplate="%{y}: %{x:.2f} MiB measured<extra></extra>",
    )
    figure.update_layout(barmode="stack", height=140 + 34 * len(rows), meta={"narrowest": 560})
    figure.update_xaxes(title="MiB at the peak of a step")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def memory_figure(simulated: Simulated, usable_bytes: int) -> go.Figure:
    """What one choice holds over the step, component by component, and what a device has for it."""
    points, figure = simulated.memory.points, go.Figure()
    for component, label in COMPONENTS.items():
        if any(held.get(component) for _, held in points):
            figure.add_scatter(
                x=[round(moment * 1e3, 3) for moment, _ in points],
                y=[round(held.get(component, 0) / GIB, 4) for _, held in points],
                name=label,
                stackgroup="memory",
                mode="lines",
                line={"shape": "hv", "width": 0.5, "color": COMPONENT_COLOURS[component]},
                fillcolor=COMPONENT_COLOURS[component],
                hovertemplate=f"{label}: %{{y:.2f}} GiB at %{{x:.1f}} ms<extra></extra>",
            )
    if simulated.memory.peak_bytes > usable_bytes / 4:
        figure.add_hline(
            y=usable_bytes / GIB,
            line={"color": "var(--ink)", "dash": "dash", "width": 1.5},
            annotation={"text": f"a device: {usable_bytes / GIB:.1f} GiB", "font": {"size": 12}},
        )
    figure.update_xaxes(title="ms since the step began")
    figure.update_yaxes(title="GiB of one rank", rangemode="tozero")
    figure.update_layout(height=450)
    return styled(figure)
