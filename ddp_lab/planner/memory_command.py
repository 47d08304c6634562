"""`ddp-lab plan memory`: prints the formulas of `ddp_lab.planner.accounting` with their numbers."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ddp_lab.planner.accounting import PRECISIONS, STAGES, formula, least_ranks, state_bytes
from ddp_lab.planner.decoders import CASTS, Batch, Term, total
from ddp_lab.planner.flags import chosen_model
from ddp_lab.planner.gpt2 import decoder_of
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import CAUSAL_LM

GB, GIB = 1e9, 2**30
CAST = "16-bit copies of fp32 shards, as the runner's --param-dtype; gradients and Adam are in fp32."


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the terms of a model's memory, and from how many ranks on it fits.

    Raises:
        UserError: its values make no sense.
    """
    name, parameters, activations = counted(options)
    console.print(f"{name}: Psi = {total(parameters):,.0f} parameters")
    if len(parameters) > 1:
        show_terms(console, "Parameters", parameters, 1, "elements")
    if activations:
        title = f"Held by one rank when backward begins, b = {options.micro_batch_size}, s = {options.sequence_length}"
        show_terms(console, title, activations, GB, "GB")
    show_states(console, total(parameters), activations, options)
    if not activations:
        console.print("Activations: no formula here; `ddp-lab plan` without `memory` counts them by running the model.")
    if any(term.name == CASTS for term in activations):
        console.print("zero3 frees cast weights with their blocks: its activations are without those.")
    console.print("GB: 10^9 bytes; GiB: 2^30. Buffers of collectives, temporaries and padding are left out.")


def counted(options: argparse.Namespace) -> tuple[str, Sequence[Term], Sequence[Term]]:
    """Name, parameters and activations of the model that the command line names.

    Raises:
        UserError: it names none, or two, or settings of another kind of model.
    """
    if options.param_dtype and options.precision != "fp32":
        raise UserError(f"--param-dtype with --precision {options.precision}: must be one or the other")
    if options.parameters is not None:
        if options.model is not None or options.d_model is not None:
            raise UserError("--parameters: does not go with a model; leave one of them out")
        formula = f"as given, over {options.tp} ranks of tp" if options.tp > 1 else "as given"
        return "any model", [Term("parameters", formula, options.parameters / options.tp)], []
    model, chunks = chosen_model(options), options.loss_chunks
    if chunks > 1 and options.task != CAUSAL_LM:
        raise UserError(f"--loss-chunks {chunks}: must be with --task {CAUSAL_LM}")
    decoder = decoder_of(model.configuration(), options.task)
    if decoder is None and options.tp > 1:
        raise UserError(f"--tp: no formula is known for {model.name}; plan it with --mesh")
    if decoder is None:
        return model.name, [Term("parameters", "counted on the built module", model.elements())], []
    name = f"{model.name}, the part of one of {options.tp} ranks of tp" if options.tp > 1 else model.name
    part = decoder.part(options.tp)
    sizes = options.micro_batch_size, options.sequence_length
    batch = Batch.of(*sizes, options.precision, casts=bool(options.param_dtype))
    at_peak = part.loss_term(batch, chunks)
    return name, part.parameter_terms(), [*part.activation_terms(batch, chunks), *([at_peak] if at_peak else [])]


def show_terms(console: Console, title: str, terms: Sequence[Term], scale: float, unit: str) -> None:
    digits = 0 if scale == 1 else 3
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_footer=True)
    table.add_column("term", "sum")
    table.add_column("formula")
    table.add_column(unit, f"{total(terms) / scale:,.{digits}f}", justify="right")
    for term in terms:
        table.add_row(term.name, term.formula, f"{term.amount / scale:,.{digits}f}")
    console.print("", table)


def show_states(console: Console, parameters: float, kept: Sequence[Term], options: argparse.Namespace) -> None:
    """Model states of each stage on one rank, and from how many ranks on they fit on a device."""
    ranks, precision, casts = options.ranks, options.precision, bool(options.param_dtype)
    memory = options.device_memory_gib * GIB
    title = f"One of {ranks:,} rank{'s' if ranks > 1 else ''} (N). {CAST if casts else PRECISIONS[precision][1]}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("states, bytes\na parameter")
    from_n = f"below\n{options.device_memory_gib:g} GiB from N"
    headings = ["parameters\nGB", "gradients\nGB", "Adam\nGB", "activations\nGB", "sum\nGB", "sum\nGiB"]
    headings += [f"states {from_n}", f"sum {from_n}"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in list(STAGES)[casts:]:  # a replicated strategy updates what it computes with
        activations = total([term for term in kept if stage != "zero3" or term.name != CASTS])
        states = state_bytes(parameters, ranks, stage, precision, casts)
        everything = sum(states.values()) + activations
        parts = [*states.values(), activations, everything]
        fits = [least_ranks(parameters, stage, precision, memory, held, casts) for held in (0.0, activations)]
        cells = [f"{held / GB:,.1f}" for held in parts] + [f"{everything / GIB:,.1f}"]
        table.add_row(
            stage, formula(stage, precision, casts), *cells, *(f"{least:,}" if least else "never" for least in fits)
        )
    console.print("", table, "")
