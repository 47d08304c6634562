"""`ddp-lab plan search`: the fastest micro-batch, recomputation, choice and mesh for a batch of given size."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import log2

from rich.console import Console

from ddp_lab.planner.beside import compiled, smaller, what_fits, what_is_faster
from ddp_lab.planner.choices import choices
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.plan import Case, cores, outcomes, simulating
from ddp_lab.planner.plan_command import cases_of, gist, printed, write
from ddp_lab.planner.rates import flops_of_a_sample
from ddp_lab.planner.report.command_line import runner_command
from ddp_lab.planner.report.recommendation import AS_FAST, Row, gib, is_roomy, is_tight
from ddp_lab.planner.report.table import Plan, framed, row
from ddp_lab.planner.report.wording import certainty, headline
from ddp_lab.planner.search import LEVELS, SEARCHED, Found, roots, search
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA
from ddp_lab.strategy.options import AUTO
from ddp_lab.strategy.recompute.setting import NONE

MOST_ROWS = 10
Pair = tuple[Row, Found]


def run(options: argparse.Namespace, console: Console) -> None:
    """Search, print the settings that no other beats both in speed and in memory to spare, and recommend one.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    levels = (options.activation_checkpointing,) if options.activation_checkpointing else LEVELS
    cases, left_out = cases_to_search(options)
    found = searched(cases, options, levels)
    flops = flops_of_a_sample(cases[0].model, options.sequence_length)
    pairs = [(row(each.outcome, each.case, flops), each) for each in found]
    plan = Plan([cases[0]], [])
    console.print(headline(plan, with_steps=False))
    best, front = best_and_front(pairs)
    if front:
        console.print("", printed(framed([dict(of) for of, _ in front]).drop(columns="fits")))
    lines = [f"{len(found)} settings were simulated, and {sum(each.fits() for each in found)} of them fit."]
    lines += recommendation(best, pairs) if best else what_is_missing(pairs, options.jobs)
    mesh = None if options.mesh == AUTO else cases[0].config.mesh
    lines += [against_plain(best, pairs, levels[0], mesh)] if best else []
    lines += if_compiled(best, options.jobs) if best and not options.record else []
    for line in ["", *lines, *(f"Left out: {line}" for line in left_out), *certainty(plan)]:
        console.print(line, soft_wrap=True, markup=False)
    if options.csv is not None:
        write(options.csv, "--csv", framed([dict(of) for of, _ in pairs]).to_csv(index=False))
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
        is_faster = not options.param_dtype and rates.get("bfloat16", 0.0) > rates["float32"]
        options.precision = "bf16" if is_faster else "fp32"
    options.activation_checkpointing = options.activation_checkpointing or NONE
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


def searched(cases: Sequence[Case], options: argparse.Namespace, levels: Sequence[str]) -> list[Found]:
    wanted = options.choices.split(",") if options.choices else SEARCHED
    choices(wanted if options.choices else None, [case.mesh for case in cases])  # each goes with one of them
    begin, found = list(roots(cases, wanted, levels)), []
    with long_work(f"searching settings for {cases[0].model.name}, from {len(begin)} on") as tell:
        jobs = options.jobs or cores()
        with simulating(jobs) as simulate:
            for each in search(begin, simulate, levels, not options.grad_accum_steps, jobs):
                found.append(each)
                tell(f"{described(each)}: {gist(each.outcome).partition(': ')[2]}")
    return found


def best_and_front(pairs: Sequence[Pair]) -> tuple[Pair | None, list[Pair]]:
    """The setting to take, and it with those that no other beats both in speed and in memory, the fastest first. Of
    those that leave a tenth of the memory free, or if none does, of those that fit. Of equally fast ones one without a
    mesh is taken, and then one with ample room.
    """
    fitting = [pair for pair in pairs if pair[0]["fits"] == "yes"]
    fitting = [pair for pair in fitting if not is_tight(pair[0])] or fitting
    fitting.sort(key=lambda pair: (pair[0]["step_time_ms"], -pair[0]["spare_bytes"]))
    if not fitting:
        return None, []
    limit = fitting[0][0]["step_time_ms"] * (1 + AS_FAST)
    equal = [pair for pair in fitting if pair[0]["step_time_ms"] <= limit]
    best = min(equal, key=lambda pair: ("mesh" in pair[0], not is_roomy(pair[0])))
    front, most = [best], -1
    for pair in fitting:
        if pair[0]["spare_bytes"] > most:
            most = pair[0]["spare_bytes"]
            front += [pair] * (pair is not best)
    return best, front[:MOST_ROWS]


def recommendation(best: Pair, pairs: Sequence[Pair]) -> list[str]:
    """What to take, and the command of a run."""
    of, found = best
    tight = [of for of, _ in pairs if of["fits"] == "yes" and is_tight(of)]
    room = f"its peak of {gib(of['peak_bytes'])} leaves {gib(of['spare_bytes'])} to spare"
    lines = [
        f"Take {described(found)}: {speed(of)}; {room}.",
        f"Run it: {runner_command(found.case, found.outcome.choice)}",
    ]
    if is_tight(of):
        lines.append(
            "Nothing leaves a tenth of the memory free, and what the allocator keeps unused is not in the peak."
        )
    elif tight and (fastest := min(tight, key=lambda of: of["step_time_ms"]))["step_time_ms"] < of["step_time_ms"]:
        lines.append(
            f"{fastest['name']} reaches {speed(fastest)}, but leaves {gib(fastest['spare_bytes'])}, less than a tenth."
        )
    return lines


def against_plain(best: Pair, pairs: Sequence[Pair], level: str, mesh: str | None) -> str:
    """What `ddp-lab plan` with the same flags would miss: one micro-batch, and no recomputation."""
    of, _ = best
    plain = [pair for pair in pairs if pair[0].get("mesh") == mesh and pair[0]["grad_accum_steps"] == 1]
    plain = [pair for pair in plain if pair[0]["activation_checkpointing"] == level]
    other, _ = best_and_front(plain)
    if other is None:
        return (
            "As `ddp-lab plan` begins (one micro-batch, no mesh or recomputation but what is asked for), nothing fits."
        )
    if other is best:
        return "`ddp-lab plan` with these flags would take the same."
    slower = 100 * (1 - of["step_time_ms"] / other[0]["step_time_ms"])
    told = f"`ddp-lab plan` would take {described(other[1])}: {speed(other[0])}"
    return f"{told}, {max(slower, 0):.0f} % less, with {gib(other[0]['spare_bytes'])} unused."


def if_compiled(best: Pair, jobs: int | None) -> list[str]:
    """Whether the best would be faster with `--compile`, which is not searched over."""
    of, found = best
    tried = list(compiled(found.case, found.outcome.choice))
    return (
        what_is_faster(of, tried, list(outcomes([(each.case, each.choice) for each in tried], jobs))) if tried else []
    )


def what_is_missing(pairs: Sequence[Pair], jobs: int | None) -> list[str]:
    """How much too large the smallest setting is, and what would make it fit."""
    known = [pair for pair in pairs if pair[0]["fits"] == "no"]
    if not known:
        return ["Parameters, gradients and Adam's states alone are too large for every choice; take more devices."]
    of, found = min(known, key=lambda pair: pair[0]["peak_bytes"])
    tried = list(smaller(found.case, found.outcome.choice))
    told = f"Nothing fits. {described(found)} comes nearest, short of {gib(-of['spare_bytes'])}."
    return [told, what_fits(of, tried, list(outcomes([(each.case, each.choice) for each in tried], jobs)))]


def described(found: Found) -> str:
    """`zero2, 4 micro-batches of 2, recomputing selective`."""
    config, micro = found.case.config, found.case.micro_batch_size
    steps = f"{config.grad_accum_steps} micro-batches" if config.grad_accum_steps > 1 else "one micro-batch"
    level = config.strategy.activation_checkpointing
    return (
        f"{found.outcome.name}, {steps} of {micro}, {'no recomputation' if level == NONE else f'recomputation {level}'}"
    )


def speed(of: Row) -> str:
    if "tokens_per_second_per_device" not in of:
        return f"{of['samples_per_second']:,.1f} samples/s"
    used = f" (MFU {of['mfu_pct']:.0f} %)" if "mfu_pct" in of else ""
    return f"{of['tokens_per_second_per_device']:,.0f} tokens/s/GPU{used}"
