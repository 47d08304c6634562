"""Figures draw what tables and CSV say, in the units that their axes name."""

from typing import Any

import pandas as pd
import pytest
from analysis.report.collective_figure import collectives_figure, kinds_seen
from analysis.report.memory_figures import memory_by_choice_figure, memory_by_component_figure
from analysis.report.memory_timeline_figure import memory_timeline_figure
from analysis.report.tradeoff_figure import tradeoff_figure

from analysis.columns import COMPONENTS, SUMMARY_COLUMNS
from analysis.comparison.compare import comparison
from analysis.metrics.memory import memory_row, memory_timeline
from analysis.traces.collectives import KINDS
from tests.traces import record

MIB = 2**20


def summary(content: dict[str, Any]) -> pd.DataFrame:
    """A row a rank, with memory from the record and made-up collectives."""
    rows = []
    for rank in (0, 1):
        row: dict[str, Any] = dict.fromkeys(SUMMARY_COLUMNS, 0.0)
        row |= {"rank": rank, "all_gather_calls_per_step": 2, "all_gather_ms_per_step": 5.0}
        row |= {"all_gather_bytes_per_step": 3 * MIB, "scatter_calls_per_step": rank, "scatter_ms_per_step": 7.0 * rank}
        rows.append(row | memory_row(content, rank))
    return pd.DataFrame(rows)


def by_name(figure: Any, axis: str = "x") -> dict[str, Any]:
    """The traces of one panel by their names."""
    return {trace.name: trace for trace in figure.data if (trace.xaxis or "x") == axis}


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_by_component(rank: int) -> None:
    table = summary(record("zero2", 0.1))
    drawn = by_name(memory_by_component_figure(table), ("x", "x2")[rank])
    row = table.to_dict("records")[rank]
    shown = ["parameters", "gradients", "optimizer_state", "buffers", "model_states"]
    assert list(drawn["at rest"].x) == [row[f"{name}_bytes"] / MIB for name in shown]
    peaks = [row[f"peak_{name}_bytes"] / MIB for name in shown]
    assert list(drawn["peak in the step"].x) == [*peaks, row["peak_bytes"] / MIB]
    formula = [row[f"expected_{name}_bytes"] / MIB for name in shown if name != "buffers"]
    assert list(drawn["formula, at rest"].x) == formula
    assert list(drawn["formula, at rest"].y) == ["parameters", "gradients", "optimizer states", "all states"]


def test_memory_over_the_step_stacks_up_to_what_was_allocated() -> None:
    content = record("zero2", 0.1)
    figure = memory_timeline_figure(content, summary(content))
    assert figure is not None
    for rank, axis in ((0, "y"), (1, "y2")):
        timeline = content["memory"][rank]["timeline"]
        lines = [trace for trace in figure.data if trace.type == "scatter" and (trace.yaxis or "y") == axis]
        areas = [trace for trace in lines if trace.stackgroup]
        assert len(areas) == 5 and all(list(area.x) == timeline["ms"] for area in areas)
        stacked = [sum(values) for values in zip(*(area.y for area in areas), strict=True)]
        assert stacked == pytest.approx([held / MIB for held in timeline["highest_bytes"]], abs=0.01)
    assert "rank 1</b>: peak 100.0 MiB in backward, at 0 ms" in figure.layout.annotations[1].text


def test_a_timeline_never_shows_less_than_model_states() -> None:
    """What components count may exceed what the allocator reports, where a storage did not come from it."""
    content = record("zero2", 0.1)
    content["memory"][0]["timeline"]["highest_bytes"] = [0, 0, 0]
    found = memory_timeline(content, 0)
    assert found is not None
    frame, _ = found
    assert (frame["total"] == frame[list(COMPONENTS)].sum(axis="columns")).all()


def test_no_record_no_timeline() -> None:
    assert memory_timeline_figure(None, summary(record("zero2", 0.1))) is None
    assert memory_row(None, 0)["peak_bytes"] != memory_row(None, 0)["peak_bytes"]  # NaN


def test_collectives_by_kind() -> None:
    table = summary(record("zero2", 0.1))
    assert kinds_seen(table) == ["all_gather", "scatter"]
    figure = collectives_figure(table)
    assert list(by_name(figure)["all-gather"].x) == [5.0, 5.0] and list(by_name(figure)["scatter"].x) == [0.0, 7.0]
    assert list(by_name(figure, "x2")["all-gather"].x) == [3.0, 3.0]
    assert set(by_name(figure)) <= set(KINDS.values())


def test_memory_against_time_and_by_choice() -> None:
    records = {name: record(name, step) for name, step in (("baseline", 0.2), ("zero1", 0.1), ("pytorch_zero1", 0.3))}
    for row in records["zero1"]["memory"]:
        row["peak_bytes"] //= 2
    table = comparison(records, {}, "baseline")
    drawn = by_name(tradeoff_figure(table, "baseline"))
    points = {
        name: (drawn[f"peak in a step, {name}"].x[0], drawn[f"peak in a step, {name}"].y[0])
        for name in ("baseline", "hand-written", "PyTorch")
    }
    assert points == {"baseline": (200.0, 200.0), "hand-written": (100.0, 100.0), "PyTorch": (300.0, 200.0)}
    labels = [annotation.text for annotation in tradeoff_figure(table, "baseline").layout.annotations]
    assert labels == list(records)
    bars = by_name(memory_by_choice_figure(table))
    assert list(bars["peak in a step"].x) == [200.0, 100.0, 200.0]
    assert [bars[label].x[0] for label in COMPONENTS.values()] == [40.0, 20.0, 80.0, 4.0]
    assert list(bars["gradients"].base) == [40.0] * 3
    assert table["peak_ratio"].tolist() == [1.0, 0.5, 1.0] and table["model_states_ratio"].tolist() == [1.0] * 3
