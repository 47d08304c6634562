"""What a profile of a pipeline shows."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_lab.analysis.traces.reading import read_trace
from pipeline_parallel.actions import Shape, messages_of
from pipeline_parallel.checks import lists_of
from pipeline_parallel.schedules import SCHEDULES
from tests.parity import global_batch
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool

MODEL, MICRO_BATCHES = "lm, long", 4


def write_traces(folder: Path, schedule: str, stages_per_rank: int) -> None:
    """On every rank, a trace of two steps after the first."""
    rank, mesh = dist.get_rank(), f"pp={dist.get_world_size()}"
    with strategy_in_pipeline(mesh, "tp", MODEL, schedule, stages_per_rank) as strategy:
        batches: Any = global_batch(MODEL, [[2] * MICRO_BATCHES], 0)[0]
        strategy.forward_backward(batches)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for step in (5, 6):
                with record_function(f"ProfilerStep#{step}"):
                    strategy.zero_grad()
                    strategy.forward_backward(batches)
        profiler.export_chrome_trace(str(folder / f"rank_{rank}.json"))


def test_a_profile_names_each_action(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, write_traces, tmp_path, "zb-h1", 1)
    shape = Shape(2, MICRO_BATCHES)
    for rank, actions in enumerate(lists_of(SCHEDULES["zb-h1"], shape)):
        events = read_trace(tmp_path / f"rank_{rank}.json").events
        names = events.loc[events["name"].str.startswith("pipeline "), "name"].str.removeprefix("pipeline ").tolist()
        wanted = [
            name
            for action in actions
            for received in [messages_of(action, shape)[0]]
            for name in [str(action), *([f"wait {received}"] if received else [])]
        ]
        assert names == 2 * wanted
