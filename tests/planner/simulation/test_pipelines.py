"""Plans of pipelines: the lists of actions take what they take on paper, and ranks hold what real ones hold."""

from dataclasses import replace
from functools import cache

import pytest

from ddp_lab.collectives.kinds import MESSAGE
from ddp_lab.planner.contracts import CollectiveCost, Costs, OperatorCall, Simulated
from ddp_lab.planner.simulation.meshed import pipeline_of
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.strategy.account import storage_bytes
from pipeline_parallel.actions import Shape
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES
from tests.models import make_batch
from tests.parity import in_stages, strategy_of
from tests.pipeline_parallel.test_schedules import most_in_flight
from tests.planner.simulation.test_meshed import step_of
from tests.planner.simulation.test_simulate import COSTS, cluster, setting
from tests.ranks import RankPool
from tests.tables import each_row

MICRO_BATCHES = 4


class BlocksAlone:
    """The products of the six blocks of `deep` take one second for all six, and nothing else takes any time."""

    def seconds(self, call: OperatorCall) -> float:
        return (call.flops == 2 * 3 * 20 * 20) / 6


class Messages:
    """Messages take so long, and collectives no time."""

    def __init__(self, latency_s: float = 0.0):
        self.latency_s = latency_s

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        return CollectiveCost(self.latency_s * (kind == MESSAGE), 0.0, "link")


@cache
def planned(
    schedule: str,
    ranks: int,
    choice: str = "tp",
    per_rank: int = 1,
    latency_s: float = 0.0,
    mesh: str = "",
    samples: int = 3,
) -> Simulated:
    settings = {"mesh": f"{mesh}pp={ranks}", "pipeline_schedule": schedule, "stages_per_rank": per_rank}
    run = setting(choice, "deep", MICRO_BATCHES, **settings)
    run = replace(run, make_micro_batches=lambda: [make_batch("deep", samples, seed) for seed in range(MICRO_BATCHES)])
    return simulate(run, cluster(ranks * (2 if mesh else 1)), Costs(BlocksAlone(), Messages(latency_s)))


@each_row(
    ("schedule", "ranks", "per_rank", "choice"),
    [
        ("1f1b", 3, 1, "zero2"),
        ("zb-h1", 2, 1, "zero3"),
        ("interleaved", 2, 3, "tp"),
    ],
)
def test_equal_stages_take_what_they_take_on_paper(schedule, ranks, per_rank, choice):
    shape = Shape(ranks, MICRO_BATCHES, per_rank)
    on_paper = run_on_paper(lists_of(SCHEDULES[schedule], shape), shape)
    step = planned(schedule, ranks, choice, per_rank)
    assert step.step_time_s == pytest.approx(on_paper.length / ranks)
    assert step.exposed_s / step.step_time_s == pytest.approx(on_paper.bubble)


def test_messages_take_their_time_and_data_parallel_ranks_add_none():
    """In GPipe over two ranks, only the first message of each direction is waited for."""
    plain, slow = planned("gpipe", 2), planned("gpipe", 2, latency_s=0.05, mesh="dp=2,")
    assert slow.step_time_s == pytest.approx(plain.step_time_s + 2 * 0.05)


def test_a_model_that_no_pipeline_runs_has_no_plan():
    with pytest.raises(UserError, match=r"forward runs blocks\.2 of stage 1 before all"):
        simulate(setting("tp", "out of order", MICRO_BATCHES, mesh="pp=2"), cluster(2), COSTS)


def test_schedules_differ_in_memory_as_on_paper():
    """GPipe holds the activations of all micro-batches, 1F1B those of two. Of each, the first rank holds the inputs of
    its three blocks, and their output, which is sent and freed when its gradient has come."""
    gpipe, one_f_one_b = (planned(name, 2, samples=300) for name in ("gpipe", "1f1b"))
    most = [most_in_flight(lists_of(SCHEDULES[name], Shape(2, MICRO_BATCHES))[0]) for name in ("gpipe", "1f1b")]
    peaks = [step.memory.at_peak["activations"] for step in (gpipe, one_f_one_b)]
    assert gpipe.largest == one_f_one_b.largest == 0
    assert peaks[0] - peaks[1] == pytest.approx((most[0] - most[1]) * (3 + 1) * 300 * 20 * 4, rel=0.01)


def peak_of_a_stage(mesh: str, schedule: str, choice: str, model: str, per_rank: int) -> int:
    step = step_of(model, MICRO_BATCHES)
    with strategy_of(in_stages(choice, mesh, model, schedule, "adam")) as strategy:
        recorded = record_step_memory(strategy, step, None)
        assert recorded is not None
        return recorded["peak_bytes"] + storage_bytes(tensor for part in step.micro_batches for tensor in part.values())


@pytest.mark.slow
@each_row(
    ("mesh", "schedule", "choice", "model", "per_rank"),
    [
        ("pp=2", "interleaved", "tp", "lm, long, tied", 2),
        ("pp=2,tp=2", "zb-h1", "zero3", "lm, long", 1),
    ],
)
def test_the_peak_is_that_of_the_largest_real_rank(ranks: RankPool, mesh, schedule, choice, model, per_rank):
    """Of the ranks that are simulated: the first along `tp`, whose parts may be smaller than others'."""
    size = Mesh.parse(mesh).size
    settings = {"mesh": mesh, "pipeline_schedule": schedule, "stages_per_rank": per_rank}
    run = setting(choice, model, MICRO_BATCHES, **settings)
    step = simulate(run, cluster(size), COSTS)
    real = ranks.run(size, peak_of_a_stage, mesh, schedule, choice, model, per_rank)
    of_stages = [real[rank] for rank in pipeline_of(run.config, 0)]
    assert step.memory.peak_bytes == pytest.approx(max(of_stages), rel=0.005)
    assert step.largest == of_stages.index(max(of_stages))
