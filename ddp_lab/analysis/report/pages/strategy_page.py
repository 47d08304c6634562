"""What docs/how-it-works says of one real run of each strategy, and whether its pages are complete."""

import re
from collections.abc import Iterable
from pathlib import Path

from ddp_lab.analysis.columns import COMPONENTS, SHARDABLE
from ddp_lab.analysis.report.figures.step_picture import size_text
from ddp_lab.analysis.report.figures.traced_step import GLOO_NAMES, TracedStep

BEGIN, END = "<!-- run -->", "<!-- /run -->"
PICTURE = "{choice}.png"
BYTES_AN_ELEMENT = {"parameters": 4, "gradients": 4, "optimizer_state": 8}
"""In fp32, with the two moments of AdamW."""
SHORTEST, LONGEST = 40, 80
"""Lines of a page."""
PAPER = re.compile(r"^## Papers?\n[^#]*\b(19|20)\d\d\b", re.MULTILINE)


def run_block(step: TracedStep, exposed_ms: float) -> str:
    """The part of a page between its markers: the strategy's formulas with this run's numbers, and what was measured.

    Args:
        exposed_ms: How long communication was under way in the step and nothing computed.
    """
    record = step.record
    config, elements, ranks = record["config"], record["parameters"], record["world_size"]
    rows = [
        *memory_rows(step),
        *traffic_rows(step),
        ("exposed communication", "", f"{100 * exposed_ms / step.ms:.0f} % of the step's time"),
    ]
    return "\n".join(
        [
            f"The run: `--workload mlp`, {config['depth']} layers of {config['width']} x {config['width']}, "
            f"N = {ranks} ranks, K = {config['grad_accum_steps']} micro-batches a step, AdamW in fp32, "
            f"Gloo between processes of one machine. P = {elements:,} parameters, so 4P = {size_text(4 * elements)}.",
            "",
            "| of rank 0 | by the formula | measured |",
            "|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def memory_rows(step: TracedStep) -> list[tuple[str, str, str]]:
    rows, held = [], step.held
    for component in SHARDABLE:
        formula = f"{BYTES_AN_ELEMENT[component]}P" + ("/N" if component in step.record["shards"] else "")
        expected, measured = (size_text(held[f"{prefix}{component}_bytes"]) for prefix in ("expected_", ""))
        rows.append((f"{COMPONENTS[component]}, at rest", f"{formula} = {expected}", measured))
    return [*rows, ("most memory in the step", "", size_text(held["peak_bytes"]))]


def traffic_rows(step: TracedStep) -> list[tuple[str, str, str]]:
    """What a rank sends in a step for gradients and parameters: by the strategy's formula, and as traced."""
    rows, sums = [], [0.0, 0.0]
    calls = step.timeline.collectives_by_step()
    for part in step.record["expected_traffic"]:
        if part["purpose"] == "bookkeeping":
            continue
        kind = part["kind"]
        traced = calls.loc[(calls["step"] == step.number) & (calls["kind"] == kind), "bytes"]
        gloo_name = GLOO_NAMES.get((kind, part["purpose"]))
        per_collective = step.record["world_size"] if gloo_name else 1
        size = part["payload_bytes"] / (per_collective if kind == "scatter" else 1)
        wire = part["wire_bytes"], traced.sum() * part["wire_bytes"] / part["payload_bytes"]
        sums = [total + sent for total, sent in zip(sums, wire, strict=True)]
        factor = "2(N-1)/N" if kind == "all_reduce" else "(N-1)/N"
        subject = f"sent for {part['purpose']}, in {gloo_name or kind.replace('_', '-')}s"
        expected = f"{calls_text(part['count'], per_collective)}, {factor} x {size_text(size)} = {size_text(wire[0])}"
        rows.append((subject, expected, f"{calls_text(len(traced), per_collective)}, {size_text(wire[1])}"))
    whole = 4 * step.record["parameters"]
    expected, measured = (f"{size_text(total)} = {total / whole:.3g} x 4P" for total in sums)
    return [*rows, ("sent in all", expected, measured)]


def calls_text(calls: int, per_collective: int) -> str:
    collectives = calls // per_collective
    return f"{collectives} call{'s' if collectives != 1 else ''}"


def filled(page: str, block: str) -> str:
    """`page` with `block` between its markers.

    Raises:
        ValueError: The markers are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"a page needs {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def without_picture(page: Path, picture: str) -> list[str]:
    """A sentence if `page` does not show `picture`, or it is not there."""
    shown = f"]({picture})" in page.read_text() and (page.parent / picture).is_file()
    return [] if shown else [f"{page}: no picture {picture}"]


def problems(folder: Path, choices: Iterable[str]) -> list[str]:
    """What is missing in `folder` for each of `choices`, a sentence each; empty where all is there."""
    found = []
    for choice in choices:
        path, picture = folder / f"{choice}.md", PICTURE.format(choice=choice)
        if not path.is_file():
            found.append(f"{path}: no page about {choice}")
            continue
        text = path.read_text()
        found += without_picture(path, picture)
        block = text.partition(BEGIN)[2].partition(END)[0]
        if "| measured |" not in block:
            found.append(f"{path}: no figures of a run between {BEGIN} and {END}")
        lines = len(text.splitlines())
        if not SHORTEST <= lines <= LONGEST:
            found.append(f"{path}: {lines} lines; a page has {SHORTEST} to {LONGEST}")
        if not re.search(PAPER, text):
            found.append(f"{path}: no paper (a section 'Paper' with authors and year)")
    return found
