"""`ddp-lab plan search`: the fastest micro-batch, recomputation, choice and mesh for a batch of given size."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import log2

from rich.console import Console

from ddp_lab.analysis.files import write_csv
from ddp_lab.planner.beside import smaller, what_fits
from ddp_lab.planner.choices import choices
from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.plan import Case, Outcome, cores, outcomes, simulating
from ddp_lab.planner.plan_command import cases_of, printed
from ddp_lab.planner.rates import flops_of_a_sample
from ddp_lab.planner.report.findings import (
    Pair,
    against_plain,
    best_and_front,
    described,
    level_of,
    plain,
    recommendation,
    without_compiler,
)
from ddp_lab.planner.report.recommendation import gib
from ddp_lab.planner.report.table import Plan, framed, row
from ddp_lab.planner.report.wording import certainty, headline
from ddp_lab.planner.search import SEARCHED, Search, Ways, roots
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA
from ddp_lab.strategy.options import AUTO, NO_RECOMPUTATION, RECOMPUTATION


def run(options: argparse.Namespace, console: Console) -> None:
    """Search, print the settings that no other beats both in speed and in memory to spare, and recommend one.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    levels = (options.activation_checkpointing,) if options.activation_checkpointing else RECOMPUTATION
    cases, left_out = cases_to_search(options)
    ways = Ways(levels, costs_by_compilation(cases[0], options))
    found = searched(cases, options, ways)
    flops = flops_of_a_sample(cases[0].model, options.sequence_length)
    mesh = None if options.mesh == AUTO else cases[0].config.mesh
    pairs = [(row(each, flops), each) for each in found]
    eager = [(row(each, flops), each) for each in as_eager(pairs, mesh, ways, options.jobs)]
    plan = Plan([cases[0]], [])
    console.print(headline(plan, with_steps=False))
    best, front = best_and_front(pairs)
    if front:
        console.print("", printed(framed([dict(of) for of, _ in front]).drop(columns="fits")))
    pairs_fit = sum(each.fits() for _, each in (*pairs, *eager))
    lines = [f"{len(pairs) + len(eager)} settings were simulated, and {pairs_fit} of them fit."]
    lines += recommendation(best, pairs) if best else what_is_missing(pairs, options.jobs)
    if best:
        lines += without_compiler(best, [*pairs, *eager]) if eager else []
        lines.append(against_plain(best, [*pairs, *eager], ways, mesh))
    for line in ["", *lines, *(f"Left out: {line}" for line in left_out), *certainty(plan)]:
        console.print(line, soft_wrap=True, markup=False)
    if options.csv is not None:
        write_csv(options.csv, framed([dict(of) for of, _ in (*pairs, *eager)]))
        console.print(f"table: {options.csv}")


def cases_to_search(options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """A case for each mesh, and a line for what is left out. Sets options that are chosen where they are not given.

    Raises:
        UserError: the command line makes no sense.
    """
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    if (options.global_batch_size is None) == (options.tokens_per_step is None):
        raise UserError("plan search: give --global-batch-size or --tokens-per-step, one of them")
    if options.tokens_per_step:
        samples = options.tokens_per_step / options.sequence_length
        options.global_batch_size = near(samples / cluster.world_size) * cluster.world_size
    if options.precision is None:
        rates = cluster.device.flops_per_s
        is_faster = not options.param_dtype and rates.get("bfloat16", 0.0) > rates.get("float32", 0.0)
        options.precision = "bf16" if is_faster else "fp32"
    options.activation_checkpointing = options.activation_checkpointing or NO_RECOMPUTATION
    cases, left_out = cases_of(options)
    if options.mesh == AUTO:
        with_stages = [case for case in cases if case.config.has_stages]
        cases = [without_needless_mesh(case) for case in cases if not case.config.has_stages]
        if with_stages:
            left_out.append(
                f"pipelines, each of which takes as long as all else; --mesh {with_stages[0].config.mesh} searches one"
            )
    return cases, left_out


def near(samples: float) -> int:
    """A number of samples within a sixteenth of `samples`, or the nearest if these are few, with many divisors."""
    unit = 2 ** max(0, int(log2(max(samples, 1))) - 3)
    return max(1, round(samples / unit)) * unit


def without_needless_mesh(case: Case) -> Case:
    """All ranks see different samples without a mesh too."""
    needless = case.mesh is not None and list(case.mesh.degrees) == [DATA]
    return replace(case, config=replace(case.config, mesh=None)) if needless else case


def costs_by_compilation(case: Case, options: argparse.Namespace) -> dict[bool, Costs]:
    """What operators take in compiled blocks, where that is known and not said, and as `case` has them."""
    is_said = bool(case.config.strategy.compile_backend)
    if case.cluster.device.kind != "cuda" or is_said:
        return {is_said: case.costs}
    fused = costs_of(case.cluster, options.contention, compiles=True)
    return {True: fused, False: case.costs}


def searched(cases: Sequence[Case], options: argparse.Namespace, ways: Ways) -> list[Outcome]:
    wanted = options.choices.split(",") if options.choices else SEARCHED
    choices(wanted if options.choices else None, [case.mesh for case in cases])  # each goes with one of them
    begin, found = list(roots(cases, wanted, ways)), []
    with long_work(f"searching settings for {cases[0].model.name}, from {len(begin)} on") as tell:
        jobs = options.jobs or cores()
        with simulating(jobs) as simulate:
            for each in Search(ways, not options.grad_accum_steps, cases[0].model.elements()).run(
                begin, simulate, jobs
            ):
                found.append(each)
                tell(f"{described(each)}: {each.gist}")
    return found


def as_eager(pairs: Sequence[Pair], mesh: str | None, ways: Ways, jobs: int | None) -> list[Outcome]:
    """Without a compiler: the best, and the best of what `ddp-lab plan` begins with."""
    if len(ways.costs) == 1:
        return []
    of_both = (best_and_front(pairs)[0], best_and_front(plain(pairs, ways, mesh))[0])
    compiled = {each.name: each for _, each in filter(None, of_both) if each.case.config.strategy.compile}
    cases = [each.case for each in compiled.values()]
    eager = [ways.put(case, case.config.grad_accum_steps, level_of(case), compiled=False) for case in cases]
    return list(outcomes([(case, each.choice) for case, each in zip(eager, compiled.values(), strict=True)], jobs))


def what_is_missing(pairs: Sequence[Pair], jobs: int | None) -> list[str]:
    """How much too large the smallest setting is, and what would make it fit."""
    known = [pair for pair in pairs if pair[0]["fits"] == "no"]
    if not known:
        return ["Parameters, gradients and Adam's states alone are too large for every choice; take more devices."]
    of, found = min(known, key=lambda pair: pair[0]["peak_bytes"])
    tried = list(smaller(found.case, found.choice))
    told = f"Nothing fits. {described(found)} comes nearest, short of {gib(-of['spare_bytes'])}."
    return [told, what_fits(of, tried, list(outcomes([task for _, task in tried], jobs)))]
