"""The search for settings: what it finds, leaves out and says, on steps that are made up and on the simulator."""

from dataclasses import replace

import pandas as pd
import pytest

from ddp_lab.planner import command as script
from ddp_lab.planner import models
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.findings import front, recommended
from ddp_lab.planner.outcome import CaseOutcome, simulate_step
from ddp_lab.planner.plan import near
from ddp_lab.planner.search import Search
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.planner.space import Case, Space
from ddp_lab.runtime.config import RunConfig
from ddp_lab.strategy.options import RECOMPUTATION
from tests.in_process import run_in_process
from tests.plans import case, simulation
from tests.tables import each_row

SLOWER = dict(zip(RECOMPUTATION, (1.0, 1.1, 1.3), strict=True))
SMALLER = dict(zip(RECOMPUTATION, (1.0, 0.6, 0.2), strict=True))


def made_up(cases):
    """Each sample of a micro-batch takes 4 GiB, less with recomputation; each micro-batch takes 5 ms besides, and less
    where it is compiled. zero1 takes 2 GiB for states and is slower by a tenth; bucket_ddp_async takes 12."""
    for point in cases:
        is_sharded, steps = point.config.choice == "zero1", point.config.grad_accum_steps
        activations = 4 * point.micro_batch_size * SMALLER[point.level]
        ms = (100 * SLOWER[point.level] + 5 * steps) * (1.1 if is_sharded else 1.0)
        ms *= 0.9 if point.config.strategy.compile else 1.0
        step = simulation(ms, 0, 1)
        at_peak = {"parameters": (2 if is_sharded else 12) << 30, "activations": int(activations * 2**30)}
        yield CaseOutcome(point, replace(step, memory=replace(step.memory, at_peak=at_peak)))


def space(**axes):
    """16 samples on 2 L4 of 21.5 GiB."""
    point = case(batch=16, grad_accum_steps=1)
    device = replace(point.cluster.device, memory_bytes=int(21.5 * 2**30 + point.outside_bytes))
    point = replace(point, cluster=replace(point.cluster, device=device))
    axes = {"choices": ("bucket_ddp_async", "zero1"), "levels": RECOMPUTATION, "compiled": [False], **axes}
    return Space([point], searches=True, **{"any_steps": True, **axes})


def found_in(grid, at_once=2):
    return list(Search(grid).run(made_up, at_once))


@each_row(("compiled", "share"), [([False], 0.7), ([True, False], 0.7)])
def test_the_best_is_found_without_trying_all(compiled, share):
    """Of 24 settings."""
    of = space(compiled=compiled)
    assert [root.config.choice for root in of.roots()] == ["bucket_ddp_async", "zero1"]
    every = [way for root in of.roots() for steps in (1, 2, 4, 8) for way in of.ways(root.but(grad_accum_steps=steps))]
    outcomes = found_in(of)
    best, chosen = (
        min(results, key=lambda result: result.step_s if result.fits(0.1) else 1e9)
        for results in (list(made_up(every)), outcomes)
    )
    assert chosen == best and len(outcomes) < share * len(every) and len(every) == 24
    assert best.case.config.strategy.compile == compiled[0]
    assert len({result.case.config for result in outcomes}) == len(outcomes), "none twice"


def test_what_is_fixed_is_not_tried():
    fixed = found_in(space(choices=("zero1",), levels=["selective"], compiled=[True, False], any_steps=False))
    assert {result.case.config.grad_accum_steps for result in fixed} == {1}
    assert {result.case.config.strategy.compile for result in fixed} == {False}, "what does not go together is skipped"


def test_what_a_sample_took_elsewhere_is_not_simulated_again():
    """32 GiB of activations in one micro-batch of 8 fit nowhere: the second choice begins with what may fit."""
    outcomes = found_in(space(levels=["none"]), at_once=1)
    sizes = [(result.case.config.choice, result.case.micro_batch_size) for result in outcomes]
    assert sizes[:2] == [("bucket_ddp_async", 8), ("zero1", 4)] and ("zero1", 8) not in sizes


def test_ways_of_a_mesh():
    """On a mesh with tp nothing is compiled; elsewhere what may be compiled is not looked for without."""
    of = space(compiled=[True, False])
    for mesh, ways in ((None, ["none*", "selective", "block*"]), ("dp=2,tp=2", ["none", "selective", "block"])):
        levels = [(way.level, way.config.strategy.compile) for way in of.ways(case("4xL4", batch=16, mesh=mesh))]
        assert [level + "*" * compiled for level, compiled in levels] == ways


def test_the_front_is_what_nothing_beats():
    """The first leaves less than a tenth; the second and third are as fast, and only the third has a mesh."""
    peaks = ((90, 21, None), (100, 10, None), (99, 8, "dp=2,tp=2"), (104, 12, None), (105, 4, None))
    outcomes = [CaseOutcome(case("4xL4", batch=16, mesh=mesh), simulation(ms, 0, gib)) for ms, gib, mesh in peaks]
    best = recommended(outcomes)
    assert best is outcomes[1] and [outcomes.index(result) for result in front(outcomes, best)] == [1, 2, 4]
    assert recommended(outcomes[:1]) is outcomes[0], "where nothing leaves a tenth"


@pytest.mark.parametrize("tokens", [1, 3, 7.9, 100, 733, 1465])
def test_a_batch_of_so_many_tokens_has_many_divisors(tokens):
    batch = near(tokens)
    assert abs(batch - tokens) <= max(tokens / 16, 0.5) and batch % 2 ** max(0, batch.bit_length() - 5) == 0


MORE = [("zero2", 4, None), ("tp", 2, "dp=2,tp=2"), ("zero1", 4, "dp=2,ep=2")]


@pytest.mark.parametrize(
    ("name", "data_ranks", "mesh"),
    [("zero3", 2, None), *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in MORE)],
)
def test_many_micro_batches_take_what_a_few_take_each(name, data_ranks, mesh):
    """To the last byte, and to the last digits of a time."""
    cluster = hardware.cluster("4xH100" if mesh else f"{data_ranks}xH100")
    config = RunConfig.of(
        choice=name, mesh=mesh, global_batch_size=6 * data_ranks, grad_accum_steps=6, precision="bf16"
    )
    model = replace(models.from_sizes(64, 96, 1, heads=2, vocab=50), task="causal-lm")
    if config.has_experts:
        model = models.find("sample-moe")
    planned = Case(model, cluster, config, 32)
    few, all_of_them = simulate_step(planned), simulate(planned.setting, cluster, planned.costs)
    assert few.memory.at_rest == all_of_them.memory.at_rest
    assert few.memory.peak_bytes == all_of_them.memory.peak_bytes
    assert few.step_time_s == pytest.approx(all_of_them.step_time_s, rel=1e-9)
    assert few.exposed_s == pytest.approx(all_of_them.exposed_s, rel=1e-9)


@each_row(("name", "gpus"), [("bucket_ddp_async", "2xL4"), ("zero3", "2xL4"), ("zero1", "8xA100")])
def test_many_layers_take_what_a_few_take_each(name, gpus):
    """But for what an allocator rounds up. On fast devices layers hide what the embedding sends: all are simulated."""
    cluster = hardware.cluster(gpus, "pcie4" if gpus == "2xL4" else None)
    config = RunConfig.of(choice=name, global_batch_size=8, grad_accum_steps=1)
    model = replace(models.from_sizes(1024, 4096, 14, 8, vocab=60_000), task="causal-lm")
    planned = Case(model, cluster, config, 256)
    few, all_of_them = simulate_step(planned), simulate(planned.setting, cluster, planned.costs)
    assert few.memory.peak_bytes == pytest.approx(all_of_them.memory.peak_bytes, rel=1e-4)
    assert few.memory.at_rest == pytest.approx(all_of_them.memory.at_rest, rel=1e-3, abs=8192)
    assert few.step_time_s == pytest.approx(all_of_them.step_time_s, rel=5e-3)


def test_search_from_beginning_to_end(tmp_path):
    """On the real simulator."""
    model = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]
    how = ["--task", "causal-lm", "--gpus", "2xL4", "--link", "pcie4", "--choices", "zero1", "--jobs", "1"]
    table = tmp_path / "found.csv"
    answer = run_in_process(script, "search", *model, *how, "--tokens-per-step", "128", "--csv", str(table))
    assert answer.returncode == 0, answer.stderr
    assert "Take zero1, one micro-batch of 4, no recomputation, compiled: " in answer.stdout
    assert " --ddp-choice zero1 " in answer.stdout and " --compile" in answer.stdout
    rows = pd.read_csv(table)
    assert rows.fits[0] == "yes" and rows.micro_batch_size.max() == 4 and set(rows["compile"]) == {"yes", "no"}
