"""What a profile of a pipeline shows."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_lab.analysis.metrics.pipeline import PASSES, pipeline_steps, pipelines
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.analysis.traces.timeline import build_timeline
from pipeline_parallel.actions import Shape, messages_of
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES
from tests.parity import global_batch, in_stages, strategy_of
from tests.ranks import RankPool

MODEL, MICRO_BATCHES = "lm, long", 4


def write_traces(folder: Path, schedule: str, stages_per_rank: int):
    """On every rank, a trace of two steps after the first."""
    rank, mesh = dist.get_rank(), f"pp={dist.get_world_size()}"
    with strategy_of(in_stages("tp", mesh, MODEL, schedule)) as strategy:
        batches: Any = global_batch(MODEL, [[2] * MICRO_BATCHES], 0)[0]
        strategy.forward_backward(batches)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for step in (5, 6):
                with record_function(f"ProfilerStep#{step}"):
                    strategy.zero_grad()
                    strategy.forward_backward(batches)
        profiler.export_chrome_trace(str(folder / f"rank_{rank}.json"))


def test_a_profile_names_each_action(ranks: RankPool, tmp_path):
    """The report reads from these names what each rank did."""
    ranks.run(2, write_traces, tmp_path, "zb-h1", 1)
    shape = Shape(2, MICRO_BATCHES)
    for rank, actions in enumerate(lists_of(SCHEDULES["zb-h1"], shape)):
        events = read_trace(tmp_path / f"rank_{rank}.json").events
        names = events.loc[events["name"].str.startswith("pipeline "), "name"].str.removeprefix("pipeline ").tolist()
        expected = [
            name
            for action in actions
            for received in [messages_of(action, shape)[0]]
            for name in [str(action), *([f"wait {received}"] if received else [])]
        ]
        assert names == 2 * expected
    timelines = [build_timeline(read_trace(tmp_path / f"rank_{rank}.json"), rank, True) for rank in range(2)]
    steps = pd.DataFrame({"rank": [0, 0, 1, 1], "step": [5, 6] * 2, "step_ms": 1.0})
    passes = pipelines(timelines, pd.DataFrame({"rank": [0, 1], "offset_ms": 0.0}), {"pp": 2})
    table = pipeline_steps(passes, steps).set_index(["rank", "step"])
    assert len(table) == 4 and (table.filter(regex="forward|input|weight") > 0).all(axis=None)
    inside = table[["wait_activation_ms", "wait_gradient_ms", "send_ms"]].sum(axis="columns")
    assert (table["bubble_ms"] >= inside).all() and (inside > 0).all() and (table["bubble_pct"] < 100).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_of_a_report_is_that_of_the_paper(name):
    shape = Shape(4, 8, 2 if name == "interleaved" else 1)
    paper = run_on_paper(lists_of(SCHEDULES[name], shape), shape)
    rows = [
        (rank, 0, None, 5, PASSES[action.kind.value], action.stage, action.micro_batch, start, end)
        for rank, spans in enumerate(paper.spans)
        for action, start, end in spans
    ]
    columns = ["rank", "pipeline", "sender", "step", "part", "stage", "micro_batch", "start", "end"]
    steps = pd.DataFrame({"rank": range(4), "step": 5, "step_ms": 1.0})
    table = pipeline_steps(pd.DataFrame(rows, columns=columns), steps)
    assert table["bubble_pct"].tolist() == pytest.approx([100 * paper.bubble] * 4)
    assert table["ideal_bubble_pct"].tolist() == pytest.approx([100 * paper.bubble] * 4)
