"""Choices on a pretended mesh issue and hold what they announce and what real ranks do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from ddp_lab.planner.contracts import MODEL_STATES
from ddp_lab.planner.costs.cluster import Link
from ddp_lab.planner.costs.links import LinkCosts
from ddp_lab.planner.simulation.simulate import Simulation
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.strategy.account import storage_bytes
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.strategy import Strategy
from expert_parallel.balance import LoadBalance
from tests.models import make_batch
from tests.parity import Case, strategy_of
from tests.planner.simulation.test_simulate import COSTS, cluster, setting
from tests.ranks import RankPool
from tests.tables import by_default
from tests.traffic import CLIP, Totals, add, counted_step

CASES = [
    ("dp=2,tp=2", "tp", "lm, llama", 1, False, {"bucket_cap_mb": 25.0}),
    ("dp=2,tp=2", "simple_ddp", "lm, gpt2", 2, False, {"precision": "bf16"}),
    ("dp=2,tp=2", "zero3", "llama", 2, True, {}),
    ("tp=4", "zero1", "lm, gqa", 1, True, {"activation_checkpointing": "block"}),
    ("dp=2,tp=2", "zero2", "lm, llama", 1, False, {"activation_checkpointing": "selective"}),
    ("replicate=2,shard=2", "zero2", "plain", 2, False, {}),
    ("replicate=2,shard=2", "zero3", "llama", 1, False, {}),
    ("replicate=2,shard=2", "pytorch_zero3", "llama", 1, False, {}),
    ("dp=4", "bucket_ddp_async", "plain", 1, False, {"bucket_cap_mb": 25.0}),
    ("dp=2,cp=2", "zero1", "lm, gqa", 2, False, {"context_parallel": "zigzag"}),
    ("dp=2,cp=2", "zero3", "lm, gpt2", 1, False, {"context_parallel": "ulysses"}),
    ("cp=4", "tp", "lm, gqa", 1, False, {"context_parallel": "ring", "precision": "bf16", "bucket_cap_mb": 25.0}),
    ("dp=2,ep=2", "zero1", "lm, mixtral", 2, False, {}),
    ("dp=2,ep=2", "zero3", "lm, qwen", 1, False, {"precision": "bf16"}),
    ("dp=2,ep=2", "simple_ddp", "lm, mixtral, no term", 2, False, {}),
    ("ep=2,tp=2", "zero2", "lm, mixtral", 2, False, {}),
    ("cp=2", "tp", "lm, gpt2", 1, False, {"context_parallel": "ulysses", "bucket_cap_mb": 25.0}),
    ("ep=2", "tp", "lm, qwen", 1, False, {"precision": "bf16", "bucket_cap_mb": 25.0}),
    ("tp=2", "zero1", "llama", 1, True, {}),
    ("ep=4", "tp", "lm, qwen3", 1, False, {"activation_checkpointing": "block", "bucket_cap_mb": 25.0}),
]
TRIED = (5, 16, 17, 18)


@contextmanager
def real_strategy(
    mesh: str, choice: str, model: str, sequence_parallel: bool, options: dict[str, Any]
) -> Iterator[Strategy]:
    settings = {"sequence_parallel": True, **options} if sequence_parallel else options
    with strategy_of(Case(choice, model, mesh, settings, optimizer="adam")) as strategy:
        yield strategy


def step_of(model: str, micro_batches: int) -> StepData:
    batches = [make_batch(model, 3, index) for index in range(micro_batches)]
    return StepData(3 * micro_batches, batches)


def real_step(
    mesh: str, choice: str, model: str, micro_batches: int, sequence_parallel: bool, options: dict[str, Any]
) -> tuple[Totals, dict[str, int], int]:
    """What a rank issues in a step, by kind and group size; its model states; and the most bytes in a step."""
    step = step_of(model, micro_batches)
    with real_strategy(mesh, choice, model, sequence_parallel, options) as strategy:
        for _ in range(2):  # in the first, not all is there yet
            recorded = record_step_memory(strategy, step, CLIP)
        strategy.finish_parameter_synchronization()
        totals = counted_step(strategy, step.micro_batches)
        assert recorded is not None
        return totals, strategy.memory_breakdown(), recorded["peak_bytes"]


@pytest.mark.parametrize("case", by_default(CASES, *(CASES[index] for index in TRIED)))
def test_a_pretended_rank_does_what_a_real_one_does(ranks: RankPool, case):
    """Collectives by kind and group size; memory at rest and at the peak. Of ranks that hold experts some get more rows
    than others, so bytes of these and peaks are means."""
    mesh, choice, model, micro_batches, sequence_parallel, options = case
    more = {"mesh": mesh, "sequence_parallel": sequence_parallel, "clip_grad_norm": CLIP}
    size = Mesh.parse(mesh).size
    simulation = Simulation(setting(choice, model, micro_batches, **more, **options), cluster(size), COSTS, rank=1)
    with simulation.running():
        memory = simulation.measure().memory
        assert simulation.strategy is not None
        planned = Totals()
        for issued in simulation.observer.issued:
            add(planned, (issued.kind, len(issued.ranks)), 1, issued.payload_bytes)
        load_bytes = known_of_load(simulation.strategy)
    by_rank = ranks.run(size, real_step, *case)
    issued, at_rest, peak = by_rank[1]
    if "ep" in Mesh.parse(mesh).degrees:
        calls, _ = issued[rows := ("all_to_all", Mesh.parse(mesh).degree("ep"))]
        assert all(totals[rows][0] == calls for totals, *_ in by_rank)
        issued = issued | {rows: (calls, round(fmean(totals[rows][1] for totals, *_ in by_rank)))}
        peak = fmean(most for *_, most in by_rank)
    assert planned == issued
    assert {name: memory.at_rest[name] for name in MODEL_STATES} == {name: at_rest[name] for name in MODEL_STATES}
    assert memory.at_rest["activations"] + memory.at_rest["communication"] == load_bytes
    if "activation_checkpointing" not in options:  # which keeps states of the CPU's random generator
        # Without the batch and the verdict of the step before, which the recorder did not see made.
        assert memory.peak_bytes - memory.at_rest["other"] == pytest.approx(peak, rel=0.005)


def known_of_load(strategy: Strategy) -> int:
    """Bytes that are kept of a step about the load of experts."""
    if strategy.model_parallel is None or not isinstance(balance := strategy.model_parallel.balance, LoadBalance):
        return 0
    assert strategy.verdict.load is not None
    parts = [*vars(balance).values(), *vars(balance.round).values(), *balance.round.load.values()]
    return storage_bytes(part for part in [*parts, strategy.verdict.load.tensor()] if isinstance(part, Tensor))


def test_experts_in_one_kernel_compute_what_a_loop_does():
    """A GPU's kernel, of which torch counts no FLOPs, and products of a CPU, one for each expert. The host waits once
    for each layer."""
    flops, kernels = [], []
    for kind in ("cpu", "cuda"):
        run = setting("simple_ddp", "lm, mixtral", mesh="dp=2,ep=2")
        simulation = Simulation(run, cluster(4, kind), COSTS)
        with mock.patch.object(simulation.clock, "read_by_host") as waits, simulation.running():
            simulation.measure()
            assert waits.call_count == 2 * 2  # layers, steps until it has settled and the one that counts
            calls = [call for call, *_ in simulation.observer.computed]
        flops.append(sum(call.flops for call in calls))
        kernels.append(sum("grouped" in call.name for call in calls))
    assert flops[0] == flops[1] and kernels == [0, 2 * 2 * 3]  # layers, products, with two gradients


def test_groups_of_strided_ranks_use_the_link_between_nodes():
    """On 2 nodes of 2 ranks, dp=2,tp=2: the ranks of tp are neighbours in a node, those of dp are in two nodes, whose
    link two such groups share."""
    link, slow = Link("fast", 0.0, 1e9), Link("slow", 0.0, 1e6)
    two_nodes = replace(cluster(4), nodes=2, ranks_per_node=2, inside=link, between=slow)
    costs = replace(COSTS, collectives=LinkCosts(two_nodes))
    simulation = Simulation(setting("simple_ddp", "llama", mesh="dp=2,tp=2"), two_nodes, costs, rank=1)
    with simulation.running():
        simulation.measure()
        groups = {issued.ranks for issued in simulation.observer.issued}
    assert groups == {(0, 1), (1, 3), (0, 1, 2, 3)}
    within, across = (costs.collectives.cost("all_reduce", 1000, ranks) for ranks in ((0, 1), (1, 3)))
    assert within.link == "inside a node: fast" and within.transfer_s == pytest.approx(1000 / 1e9)
    assert across.link == "between nodes: slow" and across.transfer_s == pytest.approx(2 * 1000 / 1e6)
