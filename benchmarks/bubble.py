"""The bubble of each schedule of a pipeline, from traces of real steps, against what its list says on paper.

    ddp-lab bench bubble --ranks 4 --link 10gbit,50us --csv FILE

Ranks that share cores would slow each other down. So a stage does not compute but pauses, as long in forward as for
gradients of inputs and for those of weights: a stand-in for a device of its own. Messages go over `--link`. With
`--pass-ms 0`, stages multiply matrices; then there must be a core for each rank.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import ddp_lab
from benchmarks.rounds import run_program, table_parser
from ddp_lab.analysis.metrics.pipeline import pipeline_steps, pipelines
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.analysis.traces.timeline import build_timeline
from ddp_lab.runtime.cli import at_least
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.groups import from_rank0, host_barrier
from pipeline_parallel.actions import Shape
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES

WIDTH, SAMPLES, STEPS = 3072, 256, 3


class Pause(torch.autograd.Function):
    """The identity, which takes `seconds` in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class TimedBlock(nn.Module):
    """A linear layer. Each of its three products takes `seconds`, or as long as it needs if that is 0."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        width = 8 if seconds else WIDTH
        self.layer, self._seconds = nn.Linear(width, width, bias=False), seconds
        self.layer.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(seconds))

    def forward(self, hidden: Tensor) -> Tensor:
        return Pause.apply(self.layer(hidden), self._seconds)


class Chain(nn.Module):
    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(TimedBlock, seconds))

    def forward(self, hidden: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(loss=hidden.mean())


def measured(folder: Path, schedule: str, micro_batches: int, pass_ms: float, slow: float = 1.0) -> dict[str, Any]:
    """A row of the table. Collective over all ranks.

    Args:
        folder: For traces, the same on all ranks.
        pass_ms: What forward of a micro-batch takes on a rank; backward takes twice as long.
        slow: The second stage takes so many times as long.
    """
    # the strategy
    ranks, rank, per_rank = dist.get_world_size(), dist.get_rank(), 2 if schedule == "interleaved" else 1
    shape = Shape(ranks, micro_batches, per_rank)
    factors = [slow if stage == 1 else 1.0 for stage in range(shape.stages)]
    module = Chain([factor * pass_ms / per_rank / 1000 for factor in factors])
    cut = ddp_lab.pipeline(module, f"pp={ranks}", schedule, per_rank, [1] * shape.stages)
    strategy = cut.strategy("tp", partial(torch.optim.SGD, lr=0.1))
    batches = [
        {"hidden": torch.ones(SAMPLES, 8 if pass_ms else WIDTH, requires_grad=True)} for _ in range(micro_batches)
    ]
    # a trace of each rank
    strategy.forward_backward(batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(STEPS):
            host_barrier()
            with record_function(f"ProfilerStep#{step}"):
                strategy.forward_backward(batches)
    profiler.export_chrome_trace(str(folder / f"{rank}.json"))
    host_barrier()  # all are written
    # traces against paper
    bubble, step_ms = from_rank0(lambda: read(folder, ranks))
    paper = run_on_paper(lists_of(SCHEDULES[schedule], shape), shape, factors=factors)
    stages = "multiply" if not pass_ms else "equal" if slow == 1 else f"second {slow:g} times as slow"
    return {
        **{"schedule": schedule, "stages": stages, "ranks": ranks, "micro_batches": micro_batches, "pass_ms": pass_ms},
        **{"paper_pct": 100 * paper.bubble, "bubble_pct": bubble, "ratio": bubble / paper.bubble / 100},
        "step_ms": step_ms,
    }


def read(folder: Path, ranks: int) -> tuple[float, float]:
    """The bubble of the quickest step, in % of it and as a mean over ranks, and its length in ms. Other processes
    disturbed this step least."""
    timelines = [build_timeline(read_trace(folder / f"{rank}.json"), rank, True) for rank in range(ranks)]
    clocks = pd.DataFrame({"rank": range(ranks), "offset_ms": 0.0})  # all are of this machine
    passes = pipelines(timelines, clocks, {"pp": ranks})
    steps = passes[["rank", "step"]].drop_duplicates().assign(step_ms=0.0)
    means = pipeline_steps(passes, steps).groupby("step")[["pipeline_ms", "bubble_pct"]].mean()
    step_ms, bubble = means.sort_values("pipeline_ms").iloc[0]
    return float(bubble), float(step_ms)


def main(arguments: Sequence[str]) -> int:
    parser = table_parser("bubble", __doc__)
    parser.add_argument("--micro-batches", type=at_least(1), default=8)
    parser.add_argument("--pass-ms", type=at_least(0, float), default=30.0, help="of forward on a rank (default: 30)")
    parser.add_argument(
        "--slow", type=at_least(1, float), default=1.0, help="how slow the second stage is (default: 1)"
    )
    add_flags(parser, ("link",))
    options = parser.parse_args(arguments)

    def measure(config: RunConfig, _: RankContext) -> pd.DataFrame:
        with tempfile.TemporaryDirectory() as folder:
            shared = Path(from_rank0(lambda: folder))
            schedules = [name for name in SCHEDULES if options.slow == 1 or name != "interleaved"]
            rows = [measured(shared, name, options.micro_batches, options.pass_ms, options.slow) for name in schedules]
        return pd.DataFrame(rows).assign(link=config.link)

    return run_program(measure, options.csv, link=options.link, device="cpu")
