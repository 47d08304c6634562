"""Train with every strategy, in passes, report on each, and compare them.

`ddp-lab sweep`, run_experiment_ddp.sh, run_experiment_shard.sh and run_experiment_parallel.sh start it.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ddp_lab.families import FAMILIES, Family
from ddp_lab.record_format import SweepPass
from ddp_lab.runtime.cli import OneLineParser, at_least, exit_with_error
from ddp_lab.runtime.data.found import require_found
from ddp_lab.runtime.data.workloads import import_libraries, resolve_workload
from ddp_lab.runtime.entrypoint import BATCH, require_room
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import with_config_file
from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.process.environment import sees_gpu
from ddp_lab.runtime.process.launcher import answer_signals
from ddp_lab.runtime.process.torchrun import quiet_torchrun
from ddp_lab.runtime.settings.data import WORKLOADS
from ddp_lab.runtime.watch.phases import long_phases_said
from ddp_lab.sweep.done import how_far, kept_runs, latest_sweep
from ddp_lab.sweep.passes import planned, train
from ddp_lab.sweep.runs import Runs

SWEEP_STEPS = 40
"""Optimizer steps of a choice by default: enough to see the loss fall and step times settle."""
STEPS_OF_PASS = 20
"""The same with several passes: two passes time enough steps to compare a dozen choices."""
SWEEP_LINK = "2.5gbit"
"""Of each rank without a GPU by default: communication of workload `sample` then takes about as long as its backward
pass, as on GPUs that people rent. In a laptop's memory it would cost nothing, and all choices would look alike."""


def main(arguments: Sequence[str]) -> int:
    quiet_torchrun()
    try:
        runs, latest, resumes = parse(arguments)
    except UserError as error:
        exit_with_error(str(error))
    try:
        return sweep(runs, latest, resumes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        return interrupted(getattr(error, "number", signal.SIGINT), runs.output_dir, latest.family)


def build_parser(family: Family | None = None) -> argparse.ArgumentParser:
    """The parser of a sweep. `family`: the one that run_experiment_*.sh names; None for `ddp-lab sweep`."""
    usage = "%(prog)s {}RANKS [--passes N] [--output-dir DIR] [--checkpoint-dir DIR] [--resume] [--config FILE]"
    usage += " [flags of {}]"
    parser = OneLineParser(
        prog=family.sweep if family else "ddp-lab sweep",
        description="Train with every strategy, in passes, report on each, and compare them.",
        usage=usage.format(*("", family.script) if family else ("FAMILY ", "the entrypoint")),
    )
    help_on_family = argparse.SUPPRESS if family else ", ".join(FAMILIES)  # run_experiment_*.sh give it
    parser.add_argument("family", choices=list(FAMILIES), metavar="FAMILY", help=help_on_family)
    about_ranks = "processes on this node; one per GPU if it has GPUs"
    parser.add_argument("ranks", type=at_least(1), metavar="RANKS", help=about_ranks)
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    parser.add_argument("--output-dir", **folder, default=Path(), help="root of profile/ and of the reports")
    parser.add_argument(
        "--checkpoint-dir", **folder, help="root of the strategies' checkpoints, with a folder for each"
    )
    parser.add_argument(
        "--passes",
        type=at_least(1),
        default=2,
        metavar="N",
        help="run every strategy so often, in a new order each time, to see whether the machine changed (default: 2)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted sweep with the runs that are not finished"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of flags, such as a run has left; its ddp-choice is ignored"
    )
    return parser


def parse(arguments: Sequence[str]) -> tuple[Runs, SweepPass, bool]:
    """The runs, their sweep, and whether an interrupted sweep continues.

    Raises:
        UserError: the settings do not fit together, or no such sweep was interrupted.
    """
    parser = build_parser(FAMILIES.get(arguments[0] if arguments else ""))
    command = shlex.join(["ddp-lab", "sweep", *(argument for argument in arguments if argument != "--resume")])
    arguments = with_config_file(arguments, ignored=["ddp-choice"])
    if checkpoint := given_to_resume(arguments):
        parser.error(
            f"--resume {checkpoint}: a sweep continues with its own strategies, so give --resume alone; one run "
            f"continues from a checkpoint with torchrun ... --ddp-choice NAME --resume {checkpoint}"
        )
    # the flags of all runs
    options, flags = parser.parse_known_args(arguments)
    family = FAMILIES[options.family]
    for flag in ("--ddp-choice", "--shard-choice"):
        if any(argument.split("=")[0] == flag for argument in flags):
            parser.error(f"{flag}: a sweep trains with every strategy; for one, use torchrun {family.script}")
    require_room(options.ranks)
    runs = Runs(family, options.ranks, options.output_dir, options.checkpoint_dir, flags)
    if not runs.gives("--max-steps", "--epochs"):
        steps = SWEEP_STEPS if options.passes == 1 else STEPS_OF_PASS
        runs = replace(runs, flags=[*runs.flags, "--max-steps", str(steps)])
    if family.workload and not runs.gives("--workload", "--task", "--model", "--dataset"):
        runs = replace(runs, flags=[*runs.flags, "--workload", family.workload])
    if not runs.gives(BATCH):  # on meshes, too: the ranks that see different samples are a divisor of all
        batch = runs.config(runs.names()[0]).nearest_batch(options.ranks)
        runs = replace(runs, flags=[*runs.flags, BATCH, str(batch)])
    # the machine, and whether the settings fit it
    config = runs.require_fit()
    on_gpu = config.device != "cpu" and sees_gpu()
    require_found(resolve_workload(config, on_gpu))
    if on_gpu:
        import torch  # takes seconds; it may have no use for the device whose driver is there, as under WSL

        on_gpu = torch.cuda.is_available()
    if not runs.gives("--link") and not on_gpu and config.fits_link:
        runs = replace(runs, flags=[*runs.flags, "--link", SWEEP_LINK])
    runs = replace(runs, on_gpu=on_gpu)
    config.require_profiled_ranks(options.ranks)
    # a new sweep, or the interrupted one
    if not options.resume:
        new = SweepPass(id=datetime.now(UTC).isoformat(), family=options.family, command=command, passes=options.passes)
        return runs, new, False
    latest, _ = latest_sweep(options.output_dir, options.family)
    if latest is None:
        raise UserError(f"--resume: no interrupted sweep has left a record in {options.output_dir}; leave out --resume")
    if latest.command != command:
        raise UserError(
            f"--resume: the interrupted sweep was another: {latest.command}; leave out --resume, or give that"
        )
    return runs, latest, True


def given_to_resume(arguments: Sequence[str]) -> str:
    """The value after `--resume`, which takes none in a sweep; empty if there is none."""
    for argument, following in pairwise([*arguments, ""]):
        if argument.startswith("--resume="):
            return argument.removeprefix("--resume=")
        if argument == "--resume" and not following.startswith("-") and not following.isdecimal():  # a number: RANKS
            return following
    return ""


def first_line(runs: Runs, choices: int, passes: int) -> str:
    """The first line of a sweep: its runs, workload and links."""
    config = resolve_workload(runs.config(runs.names()[0]), runs.on_gpu)
    length = counted(config.max_steps, "step") if config.max_steps else counted(config.epochs or 1, "epoch")
    times = (
        f"{counted(choices, 'strategy')} x {counted(passes, 'pass')} = {counted(choices * passes, 'run')} of {length}"
    )
    about = WORKLOADS.get(config.workload, "").partition(",")[0]
    about = f" ({about})" if "parameter" in about else ""
    links = f"{config.link} for each rank; --link none is the machine as it is (docs/link.md)"
    links = "as this machine is" if config.link == NONE else links
    return f"{times}, workload {config.workload}{about}, links: {links}"


def load_line(ranks: int, load: float, cores: int) -> str:
    """A warning if other programs leave too few cores for the ranks; otherwise empty.

    Args:
        load: Threads that ran or could run, on average of the last minute.
    """
    if load < cores / 2 or load + ranks <= cores:
        return ""
    return (
        f"warning: this machine is busy: {load:.1f} threads for {cores} cores in the last minute, and {ranks} ranks "
        "come; where times differ between passes, little will be known"
    )


def counted(number: int, thing: str) -> str:
    return f"{number} {thing if number == 1 else {'strategy': 'strategies', 'pass': 'passes'}.get(thing, f'{thing}s')}"


def interrupted(number: int, output_dir: Path, family: str) -> int:
    """Print how to continue. Returns the exit code of a process that the signal ended."""
    answer_signals(signal.SIG_IGN)  # a second Ctrl-C would only print a traceback
    summary = kept_runs(output_dir, family)
    line = f"error: stopped by {signal.Signals(number).name}; {summary}the same command with --resume continues"
    print(line, file=sys.stderr)
    return 128 + number


def sweep(runs: Runs, latest: SweepPass, resumes: bool) -> int:
    """Train the runs of a sweep that have no record yet, and report on all. Returns 1 if any failed, else 0.

    Args:
        resumes: A run that was interrupted continues from its newest checkpoint, if it has left one.

    Raises:
        UserError: no strategy can do what the flags ask for.
    """
    started, family = time.monotonic(), runs.family
    refusals = dict.fromkeys(runs.labels(), "")
    print(first_line(runs, len(refusals), latest.passes), flush=True)
    if not runs.on_gpu and (warning := load_line(runs.ranks, os.getloadavg()[0], os.cpu_count() or 1)):
        print(warning, flush=True)
    with long_phases_said(family.sweep):
        from ddp_lab.analysis.comparison.choices import report_on_choices  # takes seconds

        refusals = {label: runs.refusal(label) for label in refusals}
        if not runs.on_gpu:  # ranks are forked
            import_libraries(resolve_workload(runs.config(runs.names()[0]), has_gpu=False))
    labels = [label for label, refusal in refusals.items() if not refusal]
    latest = msgspec.structs.replace(latest, runs=len(labels) * latest.passes)
    completed = latest_sweep(runs.output_dir, latest.family)[1] if resumes else {}
    if resumes:
        print(f"resuming: {how_far(latest, completed)} are done", flush=True)
    for label, refusal in refusals.items():
        if refusal:
            print(f"{label}: left out: {refusal}", flush=True)
    if not labels:
        raise UserError("no strategy can do what these flags ask for")
    failed = train(runs, latest, completed, planned(labels, latest.passes, runs.config(labels[0]).seed), resumes)
    succeeded = [label for label in labels if label not in failed]
    completed = latest_sweep(runs.output_dir, latest.family)[1]
    page = report_on_choices(runs.output_dir, family.report_root, succeeded, failed, passes=completed)
    print(f"\n{len(succeeded)} of {len(labels)} strategies in {time.monotonic() - started:.0f} s; open {page}")
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
