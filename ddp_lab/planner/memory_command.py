"""`ddp-lab plan memory`: ZeRO's formulas, and beside them the simulated peak of each stage by component."""

import argparse

from rich.console import Console
from rich.table import Table

from ddp_lab.planner.accounting import PRECISIONS, STAGES, formula, least_ranks, state_bytes
from ddp_lab.planner.contracts import COMPONENTS, MODEL_STATES
from ddp_lab.runtime.errors import UserError

GIB = 2**30
CAST = "16-bit copies of fp32 shards, as the runner's --param-dtype; gradients and Adam are in fp32."


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the states of one rank by formula, in a plan also all that a simulated rank holds at its peak.

    Raises:
        UserError: the command line makes no sense.
    """
    precision, casts = options.precision, bool(options.param_dtype)
    if casts and precision != "fp32":
        raise UserError(f"--param-dtype with --precision {precision}: must be one or the other")
    stages = list(STAGES)[casts:]  # a replicated strategy updates what it computes with
    if options.parameters is None:
        if options.gpus is None:
            raise UserError("plan memory: give --parameters for formulas alone, or a model and --gpus")
        elements, ranks, memory_bytes, simulated = simulated_stages(options, stages)
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
        choice, held = simulated.get(stage, ("", []))
        cells = [stage, formula(stage, precision, casts), *map(gib, [*states, sum(states)])]
        table.add_row(*cells, f"{least:,}" if least else "never", choice, *map(gib, held))
    console.print(table, "")
    if not simulated:
        console.print(
            "States alone. With a model and --gpus, activations and buffers are counted by running each stage."
        )


def simulated_stages(
    options: argparse.Namespace, stages: list[str]
) -> tuple[float, int, float, dict[str, tuple[str, list[float]]]]:
    """Parameters of a rank's part of the model, ranks that share them, bytes of a device; and by stage the choice that
    was simulated for it, with what it holds by component and in all."""
    from ddp_lab.planner.choices import choices
    from ddp_lab.planner.coarse import shares
    from ddp_lab.planner.plan import outcomes, told
    from ddp_lab.planner.plan_command import cases_of

    if options.precision not in list(PRECISIONS)[:-1]:
        raise UserError(f"--precision {options.precision}: must be with --parameters")
    (case,), _ = cases_of(options)
    existing = choices(None, [case.mesh])
    by_stage = {stage: next(c for c in (stage, "bucket_ddp_async", "tp") if c in existing) for stage in stages}
    found = told(lambda tasks: outcomes(tasks, options.jobs), [(case, c) for c in by_stage.values()], "stages")
    peaks: dict[str, tuple[str, list[float]]] = {}
    for stage, outcome in zip(stages, found, strict=True):
        if outcome.simulated is None:
            raise UserError(f"{outcome.name}: {outcome.reason}")
        memory = outcome.simulated.memory
        peaks[stage] = outcome.name, [*(memory.at_peak.get(name, 0) for name in COMPONENTS), memory.peak_bytes]
    cut, shards = shares(case)
    return case.model.elements() / cut, shards, case.usable_bytes, peaks


def gib(held: float) -> str:
    return f"{held / GIB:,.2f}"
