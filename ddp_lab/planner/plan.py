"""`ddp-lab plan` and `ddp-lab plan search`: the cases of a space, simulated, and one of them recommended.

A plan has all axes fixed but the choice; a search has those free that no flag fixes."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import log2

from rich.console import Console

from ddp_lab.analysis.files import write_csv
from ddp_lab.planner import findings, models
from ddp_lab.planner.command import AS_THE_RUNNERS, SIZES
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.model import TOKENS, Model
from ddp_lab.planner.outcome import CaseOutcome, Simulate, simulating
from ddp_lab.planner.rates import Price, listed_price
from ddp_lab.planner.search import Search
from ddp_lab.planner.space import ALONE, SEARCHED, WITH_DIMENSION, Case, Space, filled, on_all_meshes, required
from ddp_lab.planner.table import framed, printed, runner_command
from ddp_lab.progress import long_work
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA
from ddp_lab.runtime.settings.data import CAUSAL_LM, CLASSIFICATION, BatchSettings, is_own
from ddp_lab.runtime.settings.field import flag_name
from ddp_lab.strategy.options import AUTO, RECOMPUTATION

COSTS = ("cost_per_billion_tokens", "cost_per_million_samples")


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate what the space has, print the table and a recommendation."""
    if "," in options.gpus:
        compare_devices(options, console)
        return
    space = space_of(options)
    search = Search(space)
    with simulating(options.jobs) as simulate:
        outcomes, best = searched(search, space, simulate, options.jobs, console)
        beside = besides(outcomes, best, simulate, space.searches)
    shown = [outcome for outcome in outcomes if outcome.simulated or len(space.cases) == 1]
    if space.searches:
        shown = findings.front(outcomes, best) if best else []
    if shown:
        console.print("", printed(framed(shown)), "")
    if space.searches:
        fit = sum(outcome.fits() for outcome in outcomes)
        console.print(f"{len(outcomes)} settings were simulated, and {fit} of them fit.")
    left_out = [*space.left_out, *search.left_out.values()]
    lines = [*findings.notes(outcomes, left_out), *findings.reasons(outcomes, space.searches), *beside]
    if best and options.mtbf_hours:
        lines.append(findings.checkpoints(best, options.mtbf_hours, options.write_rate))
    for line in [*lines, *findings.certainty(space)]:
        console.print(line, soft_wrap=True, markup=False)
    if options.csv is not None:
        write_csv(options.csv, framed(outcomes))
        console.print(f"table: {options.csv}")


def compare_devices(options: argparse.Namespace, console: Console) -> None:
    """What is recommended on each of several clusters, in one table, and the cheapest."""
    best_on: dict[str, CaseOutcome] = {}
    for gpus in options.gpus.split(","):
        space = space_of(argparse.Namespace(**{**vars(options), "gpus": gpus}))
        with simulating(options.jobs) as simulate:
            outcomes, best = searched(Search(space), space, simulate, options.jobs, console)
        if best is None:
            console.print(f"{gpus}: {findings.reasons(outcomes, space.searches)[0]}")
        else:
            best_on[gpus] = best
    if not best_on:
        return
    frame = framed(list(best_on.values()))
    frame.insert(0, "gpus", list(best_on))
    console.print("", printed(frame), "")
    costs = next((name for name in COSTS if name in frame), None)
    if costs:
        cheapest = list(best_on)[int(frame[costs].argmin())]
        console.print(f"Cheapest that fits: {cheapest}.")
        console.print(f"Run it: {runner_command(best_on[cheapest].case)}", soft_wrap=True, markup=False)
    if options.csv is not None:
        write_csv(options.csv, frame)


def searched(
    search: Search, space: Space, simulate: Simulate, jobs: int | None, console: Console
) -> tuple[list[CaseOutcome], CaseOutcome | None]:
    """All outcomes, each with a line when it is there, and the recommended one."""
    console.print(findings.headline(space))
    total = None if space.searches or space.any_mesh else len(list(space.roots()))
    of = f"simulating {f'{total} ' if total else ''}strategies for {space.cases[0].model.name}"
    outcomes: list[CaseOutcome] = []
    with long_work(of, total) as tell:
        for outcome in search.run(simulate, jobs or 2):
            outcomes.append(outcome)
            tell(f"{findings.described(outcome) if space.searches else outcome.case.name}: {outcome.gist}")
    if space.searches:
        outcomes.sort(key=lambda outcome: outcome.step_s)
    return outcomes, findings.recommended(outcomes)


def besides(
    outcomes: Sequence[CaseOutcome], best: CaseOutcome | None, simulate: Simulate, searches: bool = False
) -> list[str]:
    """Sentences on what would make the choice fit that comes nearest, and on what the recommended one gives up: the
    same cases with one axis released, simulated."""
    too_large = [outcome for outcome in outcomes if outcome.simulated and not outcome.fits()]
    nearest = min(too_large, key=lambda outcome: outcome.peak_bytes, default=None)
    smaller = list(findings.remedies(nearest.case, best is None)) if nearest and not (searches and best) else []
    faster = list(findings.hints(best.case)) if best and not searches else []
    variants = [*smaller, *faster]
    if not variants:
        return []
    trials: list[CaseOutcome] = []
    with long_work(f"simulating {len(variants)} variant{'s' * (len(variants) > 1)}", len(variants)) as tell:
        for (words, case), outcome in zip(variants, simulate([case for _, case in variants]), strict=True):
            trials.append(outcome)
            tell(f"{case.name} with {words}: {outcome.gist}")
    tried, count = [words for words, _ in variants], len(smaller)
    sentences = [findings.what_fits(nearest.case.name, tried[:count], trials[:count])] if nearest and smaller else []
    return sentences + (findings.what_is_faster(best, tried[count:], trials[count:]) if best else [])


# What the command line says -------------------------------------------------------------------------------------------


def space_of(options: argparse.Namespace) -> Space:
    """The axes that the command line fixes and leaves free."""
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    device, levels, compiled = cluster.device, [options.activation_checkpointing], [options.compile]
    if options.searches:
        if (options.global_batch_size is None) == (options.tokens_per_step is None):
            raise UserError("plan search: give --global-batch-size or --tokens-per-step, one of them")
        if options.tokens_per_step:
            samples = options.tokens_per_step / options.sequence_length
            options.global_batch_size = near(samples / cluster.world_size) * cluster.world_size
        if options.precision is None:
            rates = device.flops_per_s
            is_faster = not options.param_dtype and rates.get("bfloat16", 0.0) > rates.get("float32", 0.0)
            options.precision = "bf16" if is_faster else "fp32"
        levels = levels if options.activation_checkpointing else list(RECOMPUTATION)
        compiled = compiled if options.compile is not None else [True, False] if device.kind == "cuda" else [False]
        options.activation_checkpointing, options.compile = levels[0], bool(options.compile)
    case, any_mesh = case_of(options), options.mesh == AUTO
    cases, left_out = [required(case)] if not any_mesh else [], list[str]()
    if any_mesh:
        cases, left_out = on_all_meshes(case, vars(options))
    if not options.grad_accum_steps:
        cases = [filled(mesh_case) for mesh_case in cases]
    if options.searches and any_mesh:  # all ranks see different samples without a mesh, too
        is_needless = [mesh_case.mesh is not None and list(mesh_case.mesh.degrees) == [DATA] for mesh_case in cases]
        cases = [
            mesh_case.but(mesh=None) if needless else mesh_case
            for mesh_case, needless in zip(cases, is_needless, strict=True)
        ]
    choices = tuple(options.choices.split(",")) if options.choices else SEARCHED if options.searches else ()
    if cluster.world_size == 1 and not options.choices:  # all choices do the same there
        choices = ALONE
    any_steps = options.searches and not options.grad_accum_steps
    return Space(cases, choices, left_out, levels, compiled, any_steps, options.searches, any_mesh)


def near(samples: float) -> int:
    """A number of samples within a sixteenth of `samples`, or the nearest if these are few, with many divisors."""
    unit = 2 ** max(0, int(log2(max(samples, 1))) - 3)
    return max(1, round(samples / unit)) * unit


def case_of(options: argparse.Namespace) -> Case:
    """What the command line describes, without a mesh where it asks for all."""
    later = {"mesh", *chain(*WITH_DIMENSION.values())} if options.mesh == AUTO else set()
    settings = {name: getattr(options, name) for name in {"mesh", *AS_THE_RUNNERS} - later}
    settings["grad_accum_steps"] = steps = options.grad_accum_steps or 1
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    if options.global_batch_size is None:
        settings["global_batch_size"] = BatchSettings(grad_accum_steps=steps).nearest_batch(cluster.world_size)
    config = RunConfig.of(**settings)
    model = replace(chosen_model(options), lora_rank=config.lora_rank)
    model.require_length(options.sequence_length)
    price = listed_price(cluster.device.name) if options.price is None else Price(options.price)
    return Case(model, cluster, config, options.sequence_length, price, options.tokens, options.contention)


def chosen_model(options: argparse.Namespace) -> Model:
    """The model that these flags name, for the task that they name."""
    sizes = {name: getattr(options, name) for name in SIZES}
    size_flags = [name for name in SIZES if sizes[name] is not None]
    missing = [name for name in SIZES[:3] if name not in size_flags]
    if options.workload and (options.model or size_flags):
        raise UserError("--workload: does not go with another model; leave one of them out")
    if options.workload and not (is_own(options.workload) or options.workload in BUILT_IN_LANGUAGE):
        raise UserError(f"--workload {options.workload}: give FILE.py:FUNCTION of your own, or its model by --model")
    if name := options.model or options.workload:
        if size_flags:
            raise UserError(f"{flag_name(size_flags[0])} is for a model by sizes; it does not go with --model {name}")
        model = models.find(name)
    elif len(missing) == 3:
        raise UserError("no model: give --model, --workload, or --d-model, --d-ff and --layers")
    elif missing:
        problem = f"{flag_name(missing[0])} is missing"
        raise UserError(f"{problem}; a model by sizes needs --d-model, --d-ff and --layers")
    else:
        model = models.from_sizes(**sizes)
    if options.task == CLASSIFICATION:
        return model
    if model.kind != TOKENS:
        raise UserError(f"--task {CAUSAL_LM}: {model.name} takes {model.kind}; leave the flag out")
    return models.checked(replace(model, task=CAUSAL_LM))
