"""The search for settings: what it finds, leaves out and says, on steps that are made up and on the simulator."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest

from ddp_lab.planner import command as script
from ddp_lab.planner import models
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.plan import Case, Outcome, Task, simulate_step
from ddp_lab.planner.report.findings import best_and_front
from ddp_lab.planner.report.table import row
from ddp_lab.planner.search import Search, Ways, roots
from ddp_lab.planner.search_command import near
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.options import RECOMPUTATION
from tests.in_process import run_in_process
from tests.plans import COSTS, case, simulation
from tests.tables import each_row

SLOWER = dict(zip(RECOMPUTATION, (1.0, 1.1, 1.3), strict=True))
SMALLER = dict(zip(RECOMPUTATION, (1.0, 0.6, 0.2), strict=True))


def made_up(tasks):
    """Each sample of a micro-batch takes 4 GiB, less with recomputation; each micro-batch takes 5 ms besides, and less
    where it is compiled. zero1 takes 2 GiB for states and is slower by a tenth; bucket_ddp_async takes 12."""
    found = []
    for each, choice in tasks:
        level = each.config.strategy.activation_checkpointing
        steps, micro = each.config.grad_accum_steps, each.micro_batch_size
        activations = 4 * micro * SMALLER[level]
        ms = (100 * SLOWER[level] + 5 * steps) * (1.1 if choice == "zero1" else 1.0)
        ms *= 0.9 if each.config.strategy.compile else 1.0
        whole = simulation(ms, 0, 1)
        held = {"parameters": (2 if choice == "zero1" else 12) << 30, "activations": int(activations * 2**30)}
        found.append(Outcome(each, choice, replace(whole, memory=replace(whole.memory, at_peak=held))))
    return found


def every(begin, ways):
    """The whole grid, one by one."""
    tasks = list[Task]()
    for (each, choice), steps, level, compiled in product(begin, (1, 2, 4, 8), RECOMPUTATION, ways.costs):
        with suppress(UserError):
            tasks.append((ways.put(each, steps, level, compiled), choice))
    return made_up(tasks)


@each_row(("costs", "share"), [({False: COSTS}, 0.7), ({True: COSTS, False: COSTS}, 0.45)])
def test_the_best_is_found_without_trying_all(costs, share):
    """16 samples on 2 L4 of 21.5 GiB: of 24 settings, and of 40 where blocks may be compiled."""
    batch = replace(case(batch=16), config=RunConfig(global_batch_size=16, grad_accum_steps=1))
    ways = Ways(RECOMPUTATION, costs)
    begin = list(roots([batch], ("bucket_ddp_async", "zero1"), ways))
    assert [choice for _, choice in begin] == ["bucket_ddp_async", "zero1"]
    found = list(Search(ways, True, 135_000_000).run(begin, made_up, at_once=2))
    best = max((each for each in every(begin, ways) if each.fits(0.1)), key=lambda each: each.samples_per_second)
    mine = max((each for each in found if each.fits(0.1)), key=lambda each: each.samples_per_second)
    assert mine == best and len(found) < share * len(every(begin, ways))
    assert best.case.config.strategy.compile == (True in costs)
    assert len({(each.choice, str(each.case.config)) for each in found}) == len(found), "none twice"
    ways = Ways(("selective",), costs)
    fixed = list(Search(ways, False, 0).run(list(roots([batch], ("zero1",), ways)), made_up, at_once=2))
    assert {each.case.config.grad_accum_steps for each in fixed} == {1}
    assert {each.case.config.strategy.compile for each in fixed} == {False}, "what does not go together is skipped"


def test_what_a_sample_took_elsewhere_is_not_simulated_again():
    """32 GiB of activations in one micro-batch of 8 fit nowhere: the second choice begins with what may fit."""
    batch = replace(case(batch=16), config=RunConfig(global_batch_size=16, grad_accum_steps=1))
    ways = Ways(("none",), {False: COSTS})
    found = Search(ways, True, 135_000_000).run(
        list(roots([batch], ("bucket_ddp_async", "zero1"), ways)), made_up, at_once=1
    )
    sizes = [(each.choice, each.case.micro_batch_size) for each in found]
    assert sizes[:2] == [("bucket_ddp_async", 8), ("zero1", 4)] and ("zero1", 8) not in sizes


def test_ways_of_a_mesh():
    """On a mesh with tp nothing is compiled; elsewhere what may be compiled is not looked for without."""
    ways, plain = Ways(RECOMPUTATION, {True: COSTS, False: COSTS}), case("4xL4", batch=16)
    on_tp = replace(plain, config=plain.config.but(mesh="dp=2,tp=2"))

    def told(chains):
        of = [[each.config.strategy for each in chain] for chain in chains]
        return [[each.activation_checkpointing + "*" * each.compile for each in chain] for chain in of]

    assert told(ways.of(plain, 2)) == [["none*", "block*"], ["selective"]]
    assert told(ways.of(on_tp, 2)) == [["none", "selective", "block"]]


def test_the_front_is_what_nothing_beats():
    """The first leaves less than a tenth; the second and third are as fast, and only the third has a mesh."""
    peaks = ((90, 21), (100, 10), (99, 8), (104, 12), (105, 4))
    pairs = []
    for place, (ms, gib) in enumerate(peaks):
        where = case("4xL4", batch=16)
        if place == 2:
            where = replace(where, config=where.config.but(mesh="dp=2,tp=2"))
        outcome = Outcome(where, "zero1", simulation(ms, 0, gib))
        pairs.append((row(outcome), outcome))
    best, front = best_and_front(pairs)
    assert best is pairs[1] and [pairs.index(pair) for pair in front] == [1, 2, 4]
    assert best_and_front(pairs[:1])[0] is pairs[0], "where nothing leaves a tenth"


@pytest.mark.parametrize("wanted", [1, 3, 7.9, 100, 733, 1465])
def test_a_batch_of_so_many_tokens_has_many_divisors(wanted):
    found = near(wanted)
    assert abs(found - wanted) <= max(wanted / 16, 0.5) and found % 2 ** max(0, found.bit_length() - 5) == 0


MORE = [("zero2", 4, None), ("tp", 2, "dp=2,tp=2"), ("zero1", 4, "dp=2,ep=2")]


@pytest.mark.parametrize(
    ("name", "data_ranks", "mesh"),
    [("zero3", 2, None), *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in MORE)],
)
def test_many_micro_batches_take_what_a_few_take_each(name, data_ranks, mesh):
    """To the last byte, and to the last digits of a time."""
    cluster = hardware.cluster("4xH100" if mesh else f"{data_ranks}xH100")
    config = RunConfig.of(mesh=mesh, global_batch_size=6 * data_ranks, grad_accum_steps=6, precision="bf16")
    model = replace(models.from_sizes(64, 96, 1, heads=2, vocab=50), task="causal-lm")
    if config.has_experts:
        model = models.find("sample-moe")
    planned = Case(model, cluster, config, 32, costs_of(cluster))
    few, all_of_them = (by(planned.setting(name), cluster, planned.costs) for by in (simulate_step, simulate))
    assert few.memory.at_rest == all_of_them.memory.at_rest
    assert few.memory.peak_bytes == all_of_them.memory.peak_bytes
    assert few.step_time_s == pytest.approx(all_of_them.step_time_s, rel=1e-9)
    assert few.exposed_s == pytest.approx(all_of_them.exposed_s, rel=1e-9)


def test_search_from_beginning_to_end(tmp_path):
    """On the real simulator."""
    model = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]
    how = ["--task", "causal-lm", "--gpus", "2xL4", "--link", "pcie4", "--choices", "zero1", "--jobs", "1"]
    table = tmp_path / "found.csv"
    answer = run_in_process(script, "search", *model, *how, "--tokens-per-step", "128", "--csv", str(table))
    assert answer.returncode == 0, answer.stderr
    assert "Take zero1, one micro-batch of 4, no recomputation, compiled: " in answer.stdout
    assert " --ddp-choice zero1 " in answer.stdout and " --compile" in answer.stdout
    found = pd.read_csv(table)
    assert found.fits[0] == "yes" and found.micro_batch_size.max() == 4 and set(found["compile"]) == {"yes", "no"}
