"""The section of the summary page on where the memory went."""

from typing import Any

import plotly.graph_objects as go

from ddp_lab.analysis.columns import COLUMNS, MIB
from ddp_lab.analysis.metrics.memory import CACHED, OUTSIDE, failed_allocation, memory_parts
from ddp_lab.analysis.report.figures import MEMORY_COLOURS, styled
from ddp_lab.analysis.report.figures.memory import bars
from ddp_lab.analysis.report.page import Section, drawing, table

COLOURS = MEMORY_COLOURS | {CACHED: "#CCBB44", OUTSIDE: "#999999"}
GIB = 1 / 2**30


def where_sections(record: dict[str, Any] | None, ranks: list[int]) -> list[Section]:
    """What memory went to, of `ranks`; and what a run asked for that ended out of memory."""
    sections, parts = [], memory_parts(record)
    parts = parts[parts["rank"].isin(ranks)]
    if failed := failed_allocation(record):
        sections.append(Section("Out of memory", out_of_memory(failed)))
    if len(parts):
        figure = go.Figure(
            [
                bars([f"rank {rank}" for rank in parts["rank"]], parts[name] * MIB, column.label, COLOURS[name])
                for name, column in COLUMNS["where"].items()
                if name in COLOURS and (parts[name] * MIB).max() >= 0.1
            ]
        )
        figure.update_layout(barmode="stack", height=140 + 34 * len(parts))
        figure.update_xaxes(title="MiB").update_yaxes(autorange="reversed")
        text = (
            "At the peak of the recorded step. The parts up to activations and temporaries are tensors, with temporary "
            "buffers of communication. With what is cached and what is outside torch, they are what nvidia-smi shows "
            "of the device, or ps of the process."
        )
        sections.append(
            Section(
                "Where the memory went",
                text,
                table=table("where", parts, COLUMNS["where"]),
                figure=drawing(styled(figure)),
            )
        )
    return sections


def out_of_memory(failed: dict[str, float]) -> str:
    """What was asked for, what was free, and who had the rest, as torch said it."""
    had = {name: f"{size * GIB:,.2f} GiB" for name, size in failed.items()}
    text = f"The rank asked for {had['asked']}"
    if {"free", "total"} <= had.keys():
        text += f" when {had['free']} of {had['total']} were free"
    if {"tensors", CACHED, "used"} <= had.keys():
        outside = (failed["used"] - failed["tensors"] - failed[CACHED]) * GIB
        text += f": tensors held {had['tensors']}, {had[CACHED]} were cached but free, {outside:,.2f} GiB outside torch"
    return f"{text}. `ddp-lab plan` with the run's flags and --gpus says which settings fit."
