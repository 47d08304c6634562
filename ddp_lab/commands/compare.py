"""Compare finished runs: all choices of an entrypoint (ddp-lab compare sharding), or runs of one
choice (ddp-lab compare profile/zero3: the latest two; or those of --baseline and --run).

Exit code 0: compared. 1: not comparable, or the traces of a choice cannot be read; standard error says why.
2: the command line makes no sense. 3: --fail-above was exceeded.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.analysis.comparison.fairness import FIELDS
from ddp_lab.families import FAMILIES, Family, report_root_of
from ddp_lab.runtime.cli import OneLineParser, at_least, unknown_name
from ddp_lab.runtime.config import split_label
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.mesh import LEGACY_NCCL
from ddp_lab.sweep.done import latest_sweep, unfinished
from ddp_lab.sweep.meshes import sort_key
from ddp_lab.untrusted import add_limit

WORSE_THAN_ALLOWED = 3
LABEL = re.compile(rf"[^@]+(@[a-z]+\d+(-[a-z]+\d*)*)?(@{LEGACY_NCCL})?")
"""Of `RunConfig.label`."""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    options, extra = parser.parse_known_args(arguments)
    if extra:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        usage = f"{extra[0]}: takes one folder (its latest two runs); for several strategies: ddp-lab compare sharding"
        parser.error(unknown_name("argument", extra[0], flags) if extra[0].startswith("-") else usage)
    if options.target in FAMILIES:
        for flag in ("baseline", "run", "fail_above"):
            if getattr(options, flag) is not None:
                parser.error(
                    f"--{flag.replace('_', '-')} is for two runs of one strategy; give its folder, not a family"
                )
        compare = of_family
    else:
        compare = of_choice
    try:
        return compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("ddp-lab compare", description=__doc__)
    parser.add_argument(
        "target",
        metavar="FAMILY|FOLDER",
        help="ddp, sharding or parallel: all runs of main_ddp.py, main_shard.py or main_parallel.py; or "
        "profile/<choice>: two runs in it",
    )
    parser.add_argument("--output-dir", type=Path, help="root of profile/ and of the reports (default: in place)")
    parser.add_argument(
        "--allow-different",
        action="append",
        default=[],
        choices=FIELDS,
        metavar="FIELD",
        help=f"compare runs that differ in this setting, with a warning; may be repeated; one of {', '.join(FIELDS)}",
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        metavar="RUN",
        help="the earlier: run id or .run.json; several of one command tell more (default: the last but one)",
    )
    parser.add_argument("--run", nargs="+", metavar="RUN", help="the later (default: the latest but --baseline)")
    parser.add_argument(
        "--fail-above",
        type=at_least(0, float),
        metavar="PERCENT",
        help="exit with code 3 if a figure got worse by more than this, and by more than chance explains",
    )
    add_limit(parser)
    return parser


def of_family(options: argparse.Namespace) -> int:
    """Compare the latest runs of all choices, with all passes of the latest sweep."""
    from ddp_lab.analysis.comparison.choices import report_on_choices  # takes seconds, too long for a mistake

    family = FAMILIES[options.target]
    root = options.output_dir or Path()
    trained, (sweep, finished) = trained_labels(root / "profile", family), latest_sweep(root, options.target)
    foreign = [
        label for peer in FAMILIES.values() if peer is not family for label in trained_labels(root / "profile", peer)
    ]
    if left_out := [label for label in foreign if label not in trained]:
        print(f"left out, since they are of other families than {options.target}: {', '.join(left_out)}", flush=True)
    failed: list[str] = []
    page = report_on_choices(
        root, family.report_root, trained, failed, options.allow_different, finished, unfinished(sweep, finished)
    )
    print(f"\nreport: {page}")
    return int(bool(failed))


def trained_labels(profile: Path, family: Family) -> list[str]:
    """The labels of a family's runs that have folders, in the order of `ddp_lab.sweep.meshes.sort_key`."""
    folders = [path.name for path in profile.iterdir() if path.is_dir()] if profile.is_dir() else []
    choices = list(family.registry.sentences)
    labels = [label for label in folders if LABEL.fullmatch(label) and split_label(label)[0] in choices]
    return sorted(
        (label for label in labels if report_root_of(label) == family.report_root),
        key=lambda label: sort_key(label, choices),
    )


def of_choice(options: argparse.Namespace) -> int:
    """Compare two runs of a choice; fail if the later one is worse than `--fail-above` allows."""
    trace_dir = Path(options.target)
    if not trace_dir.is_dir():
        suggestion = "profile" / trace_dir if ("profile" / trace_dir).is_dir() else "profile/<choice>"
        raise UserError(f"{trace_dir}: no such folder; give {', '.join(FAMILIES)}, or {suggestion}")
    from ddp_lab.analysis.command import report_folder  # these take seconds, too
    from ddp_lab.analysis.comparison.changes import exceeding
    from ddp_lab.analysis.comparison.two_runs import report_on_two_runs
    from ddp_lab.analysis.sentences import say

    choice = trace_dir.resolve().name
    root = report_root_of(choice)
    folder = options.output_dir / root / choice if options.output_dir else report_folder(trace_dir, root)
    table, path = report_on_two_runs(
        trace_dir, options.baseline or [], options.run or [], folder, options.allow_different
    )
    print(f"\ntable: {path}")
    if options.fail_above is None:
        return 0
    worse = exceeding(table, options.fail_above)
    for figure, change in zip(worse["figure"], worse["change_pct"], strict=True):
        line = f"error: {figure} got worse by more than {options.fail_above:g} %: {say('signed', change)}"
        print(line, file=sys.stderr)
    return WORSE_THAN_ALLOWED if len(worse) else 0
