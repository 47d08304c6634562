"""Train with every choice, one after the other, report on each, and compare them.

run_experiment_ddp.sh and run_experiment_shard.sh start it.
"""

import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported
os.environ.setdefault(
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10"
)  # a rank that does not end is killed after so many seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, with a warning

from analysis.errors import TraceError
from scripts.families import FAMILIES
from scripts.sweep_runs import Runs, train
from scripts.sweep_state import SweepState
from training.cli import OneLineParser, exit_with_error
from training.errors import UserError

SWEEP_STEPS = 40
"""Optimizer steps a choice where the command line does not say: enough to see the loss fall and times settle."""


def main() -> int:
    usage = (
        "%(prog)s FAMILY RANKS [--output-dir DIR] [--checkpoint-dir DIR] [--resume] "
        "[flags of main_ddp.py or main_shard.py]"
    )
    parser = OneLineParser(description=__doc__, allow_abbrev=False, usage=usage)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument(
        "ranks", type=int, metavar="RANKS", help="processes on this node; one a GPU where there are GPUs"
    )
    parser.add_argument("--output-dir", type=Path, default=Path(), help="root of profile/ and of the reports")
    parser.add_argument("--checkpoint-dir", type=Path, help="root of the choices' checkpoints, a folder each")
    parser.add_argument(
        "--resume", action="store_true", help="go on with an interrupted sweep: train only what it has not finished"
    )
    if checkpoint := given_to_resume(sys.argv[1:]):
        parser.error(
            f"--resume {checkpoint}: a sweep goes on with its own choices, so give --resume alone; one run goes on "
            f"from a checkpoint with torchrun ... --ddp-choice NAME --resume {checkpoint}"
        )
    options, flags = parser.parse_known_args()
    family = FAMILIES[options.family]
    for flag in ("--ddp-choice", "--shard-choice"):
        if any(given.split("=")[0] == flag for given in flags):
            parser.error(f"{flag}: a sweep trains with every choice; for one, use torchrun {family.script}")
    if options.ranks < 1:
        parser.error(f"RANKS {options.ranks}: must be at least 1")
    if not any(flag.split("=")[0] in ("--max-steps", "--epochs") for flag in flags):
        flags += ["--max-steps", str(SWEEP_STEPS)]
    runs = Runs(family, options.ranks, options.output_dir, options.checkpoint_dir, flags)
    config = runs.config(family.registry.names[0])
    checkpoint_dir = options.checkpoint_dir and str(options.checkpoint_dir)
    settings = {"ranks": options.ranks, "flags": flags, "checkpoint_dir": checkpoint_dir}
    state = SweepState(options.output_dir, options.family, settings)
    try:
        config.micro_batch_size(options.ranks)
        if options.resume:
            state.go_on()
    except UserError as error:
        exit_with_error(str(error))
    try:
        return sweep(runs, state, options.resume)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # between two runs
        return interrupted(signal.SIGINT)
    except Exception as error:
        number = getattr(error, "sigval", None)  # torchrun's SignalException, of a module that takes seconds to import
        if number is None:
            raise
        return interrupted(number)


def given_to_resume(arguments: list[str]) -> str:
    """What stands behind `--resume`, which is that of the sweep and takes nothing; empty if nothing does."""
    for one, following in pairwise([*arguments, ""]):
        if one.startswith("--resume="):
            return one.removeprefix("--resume=")
        if one == "--resume" and not following.startswith("-") and not following.isdecimal():  # a number: RANKS
            return following
    return ""


def interrupted(number: int) -> int:
    """Say how to go on; the exit code is that of a process that the signal ended."""
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, signal.SIG_IGN)  # a second Ctrl-C would only show where Python was
    print(f"error: stopped by {signal.Signals(number).name}; the same command with --resume goes on", file=sys.stderr)
    return 128 + number


def sweep(runs: Runs, state: SweepState, goes_on: bool) -> int:
    """Train with all choices that `state` has not finished, and report on all; 1 if any of them failed, else 0.

    Args:
        goes_on: An interrupted run that has left checkpoints goes on from them, as the sweep does.

    Raises:
        UserError: what is finished cannot be written down.
    """
    started = time.monotonic()
    state.begin()
    from analysis.comparison.choices import (
        report_on_choices,  # takes seconds, which a mistake on the command line need not wait
    )

    family, output_dir = runs.family, runs.output_dir
    succeeded, failed = list(state.finished), []
    for choice in family.registry.names:
        if choice in state.finished:
            print(f"{choice}: finished before", flush=True)
            continue
        arguments = [str(ROOT / family.script), *runs.arguments(choice)]
        if goes_on and runs.has_begun(choice):
            arguments.append("--resume")
        if train(choice, runs.ranks, arguments, output_dir):
            succeeded.append(choice)
            state.add(choice)
        else:
            failed.append(choice)
    succeeded.sort(key=family.registry.names.index)
    all_trained = not failed
    try:
        page = report_on_choices(output_dir, family.report_root, succeeded, failed)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if all_trained:  # a report that failed needs no training again
        state.close()
    print(
        f"\n{len(succeeded)} of {len(family.registry.names)} choices in {time.monotonic() - started:.0f} s; open {page}"
    )
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
