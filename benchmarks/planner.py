"""Plans steps that others have measured, and prints how far off they are: ddp-lab bench planner --table FILE."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec

from ddp_lab import planner
from ddp_lab.planner.command import build_parser
from ddp_lab.planner.outcome import outcome
from ddp_lab.planner.plan import case_of
from ddp_lab.planner.space import Case, required
from ddp_lab.runtime.cli import OneLineParser, exit_with_error, unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, settings_in

PUBLISHED = Path(planner.__path__[0]) / "published.toml"
CLOSE = 0.1


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """A row of a table of measured steps.

    Attributes:
        plan: Flags of `ddp-lab plan` that describe it; one choice.
        tokens_per_s_gpu: Tokens a second of one device, padding included.
        source: Where that is from.
        compiled: Whether a compiler fused operators, also where the runner's --compile does not go.
        differs: In what the plan differs from what was measured, or why it is off.
    """

    plan: str
    tokens_per_s_gpu: float
    source: str
    compiled: bool = False
    differs: str = ""


def read(path: Path) -> Mapping[str, Measured]:
    """The rows of a table, by name.

    Raises:
        UserError: it cannot be read, or lacks something.
    """
    content = settings_in(path, "--table")
    rows: Mapping[str, Measured] = fitted(content, dict[str, Measured], path, "table of measured steps")
    return rows


def case_in(row: Measured) -> Case:
    """The case that a row describes.

    Raises:
        UserError: it makes no sense.
    """
    options, unknown = build_parser().parse_known_args(shlex.split(row.plan))
    if unknown or not options.gpus or not options.choices or "," in options.choices:
        raise UserError(f"plan = '{row.plan}': give flags of ddp-lab plan, and one of --choices")
    return required(replace(case_of(options).but(choice=options.choices), is_fused=row.compiled))


def checked(name: str, row: Measured) -> tuple[str, float | None]:
    """A line on a row, and the error of the planned rate as a part of the measured one; None if it cannot be
    planned."""
    try:
        planned = outcome(case_in(row))
    except UserError as error:
        return f"{name}: {error}", None
    except SystemExit:  # its parser has said why
        return f"{name}: plan = '{row.plan}': no flags of ddp-lab plan", None
    if planned.simulated is None:
        return f"{name}: {planned.reason}", None
    case, step_s = planned.case, planned.simulated.step_time_s
    tokens = case.config.global_batch_size * case.sequence_length / case.cluster.world_size
    measured_s = tokens / row.tokens_per_s_gpu
    off = measured_s / step_s - 1
    cluster, model = case.cluster, case.model.name.rpartition("/")[2]
    devices = f"{cluster.nodes}x{cluster.ranks_per_node}x{cluster.device.name}".removeprefix("1x")
    rates = f"{row.tokens_per_s_gpu:10,.0f} {tokens / step_s:10,.0f} {1e3 * measured_s:10,.1f} {1e3 * step_s:10,.1f}"
    return f"{name:8} {model:20} {devices:22} {case.name:22} {rates} {off:+8.1%}", off


def main(arguments: Sequence[str]) -> int:
    parser = OneLineParser("ddp-lab bench planner", description=__doc__)
    table = "TOML file of measured steps (default: ddp_lab/planner/published.toml)"
    parser.add_argument("--table", type=Path, default=PUBLISHED, metavar="FILE", help=table)
    parser.add_argument("--rows", metavar="NAMES", help="only these rows of it, with commas between (default: all)")
    options = parser.parse_args(arguments)
    try:
        rows = read(options.table)
    except UserError as error:
        exit_with_error(str(error))
    names = options.rows.split(",") if options.rows else list(rows)
    for name in names:
        if name not in rows:
            parser.error(f"--rows: {unknown_name('row', name, rows)}")
    heads = (f"{label:>10}" for label in ("tok/s/GPU", "planned", "step, ms", "planned"))
    print(f"{'row':8} {'model':20} {'devices':22} {'choice':22}", *heads, f"{'error':>8}")
    errors: dict[str, float] = {}
    for name in names:
        line, off = checked(name, rows[name])
        print(line, flush=True)
        errors |= {} if off is None else {name: off}
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        close, why = sum(abs(off) <= CLOSE for off in errors.values()), rows[worst].differs
        mean = f"Mean error {fmean(map(abs, errors.values())):.1%}; {close} of {len(errors)}"
        print(f"\n{mean} ({close / len(errors):.0%}) within {CLOSE:.0%}.")
        print(f"Worst: {worst}, {errors[worst]:+.1%}{f': {why}' if why else ''}")
    return 0
