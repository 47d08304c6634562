"""`ddp-lab plan memory`: ZeRO's formulas, and beside them the simulated peak of each stage by component."""

import argparse
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ddp_lab.planner.accounting import PRECISIONS, STAGES, formula, least_ranks, state_bytes
from ddp_lab.planner.contracts import COMPONENTS, MODEL_STATES
from ddp_lab.runtime.errors import UserError

GIB = 2**30
CAST = "16-bit copies of fp32 shards, as the runner's --param-dtype; gradients and Adam are in fp32."


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the states of one rank by formula, in a plan also all that a simulated rank holds at its peak."""
    precision, casts = options.precision, bool(options.param_dtype)
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: must be one of {', '.join(PRECISIONS)}")
    if casts and precision != "fp32":
        raise UserError(f"--param-dtype with --precision {precision}: must be one or the other")
    stages = list(STAGES)[casts:]  # a replicated strategy updates what it computes with
    if options.parameters is None:
        elements, ranks, memory_bytes, simulated = simulated_stages(options, stages, console)
    elif options.gpus or options.model or options.d_model:
        raise UserError("--parameters: does not go with a model; leave one of them out")
    else:
        elements, ranks, memory_bytes, simulated = (
            options.parameters,
            options.ranks,
            options.device_memory_gib * GIB,
            {},
        )
    console.print(f"Psi = {elements:,.0f} parameters on one of {ranks:,} ranks (N) that share them.")
    console.print(CAST if casts else PRECISIONS[precision][1], "")
    labels = [COMPONENTS[name] for name in MODEL_STATES]
    table = Table(box=None, pad_edge=False)
    headings = ["", "states, bytes\na parameter", *(f"{label}\nGiB" for label in [*labels, "states"])]
    headings += [f"below {memory_bytes / GIB:.4g}\nGiB from N"]
    if simulated:
        headings += ["simulated\nchoice", *(f"{label}\nGiB" for label in [*COMPONENTS.values(), "peak"])]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
    for stage in stages:
        states = [*state_bytes(elements, ranks, stage, precision, casts).values()]
        least = least_ranks(elements, stage, precision, memory_bytes, casts=casts)
        choice, peak_bytes = simulated.get(stage, ("", []))
        cells = [stage, formula(stage, precision, casts), *map(gib, [*states, sum(states)])]
        table.add_row(*cells, f"{least:,}" if least else "never", choice, *map(gib, peak_bytes))
    console.print(table, "")
    if not simulated:
        console.print(
            "States alone. With a model and --gpus, activations and buffers are counted by running each stage."
        )


def simulated_stages(
    options: argparse.Namespace, stages: list[str], console: Console
) -> tuple[float, int, float, dict[str, tuple[str, list[float]]]]:
    """Parameters of a rank's part of the model, ranks that share them, bytes of a device; and by stage the choice that
    was simulated for it, with what it holds by component and in all."""
    from ddp_lab.planner.outcome import simulating
    from ddp_lab.planner.plan import searched, space_of
    from ddp_lab.planner.search import Search, shares
    from ddp_lab.planner.space import entrypoints

    space = space_of(options)
    case, existing = space.cases[0], entrypoints(space.cases[0].mesh)
    choices = [next(c for c in (stage, "bucket_ddp_async", "tp") if c in existing) for stage in stages]
    space = replace(space, choices=choices)
    with simulating(options.jobs) as simulate:
        outcomes, _ = searched(Search(space), space, simulate, None, console)
    by_choice = {outcome.case.config.choice: outcome for outcome in outcomes}
    peaks: dict[str, tuple[str, list[float]]] = {}
    for stage, choice in zip(stages, choices, strict=True):
        outcome = by_choice[choice]
        if outcome.simulated is None:
            raise UserError(f"{outcome.case.name}: {outcome.reason}")
        at_peak = outcome.simulated.memory.at_peak
        peaks[stage] = outcome.case.name, [*(at_peak.get(name, 0) for name in COMPONENTS), outcome.peak_bytes]
    cut, shards = shares(case)
    return case.model.elements() / cut, shards, case.usable_bytes, peaks


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f}"
