"""Train with every choice, one after the other, report on each, and compare them.

run_experiment_ddp.sh and run_experiment_shard.sh start it.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported
os.environ.setdefault(
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10"
)  # a rank that does not end is killed after so many seconds
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, with a warning

from analysis.errors import TraceError
from scripts.families import FAMILIES, Family
from scripts.sweep_state import SweepState
from training.cli import OneLineParser, exit_with_error, parse_config
from training.errors import UserError

SWEEP_STEPS = 40
"""Optimizer steps a choice where the command line does not say: enough to see the loss fall and times settle."""


def main() -> int:
    usage = "%(prog)s FAMILY RANKS [--output-dir DIR] [--resume] [flags of main_ddp.py or main_shard.py]"
    parser = OneLineParser(description=__doc__, allow_abbrev=False, usage=usage)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument(
        "ranks", type=int, metavar="RANKS", help="processes on this node; one a GPU where there are GPUs"
    )
    parser.add_argument("--output-dir", type=Path, default=Path(), help="root of profile/ and of the reports")
    parser.add_argument(
        "--resume", action="store_true", help="go on with an interrupted sweep: train only what it has not finished"
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
    config = parse_config(
        "", family.registry.sentences, ("--ddp-choice",), ["--ddp-choice", family.registry.names[0], *flags]
    )
    state = SweepState(options.output_dir, options.family, {"ranks": options.ranks, "flags": flags})
    try:
        config.micro_batch_size(options.ranks)
        if options.resume:
            state.go_on()
    except UserError as error:
        exit_with_error(str(error))
    try:
        return sweep(family, options.ranks, options.output_dir, flags, state)
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


def interrupted(number: int) -> int:
    """Say how to go on; the exit code is that of a process that the signal ended."""
    print(f"error: stopped by {signal.Signals(number).name}; the same command with --resume goes on", file=sys.stderr)
    return 128 + number


def sweep(family: Family, ranks: int, output_dir: Path, flags: list[str], state: SweepState) -> int:
    """Train with all choices that `state` has not finished, and report on all; 1 if any of them failed, else 0.

    Raises:
        UserError: what is finished cannot be written down.
    """
    from analysis.choices import report_on_choices  # takes seconds, which a mistake on the command line need not wait

    started = time.monotonic()
    succeeded, failed = list(state.finished), []
    for choice in family.registry.names:
        if choice in state.finished:
            print(f"{choice}: finished before", flush=True)
            continue
        arguments = [str(ROOT / family.script), "--ddp-choice", choice, "--output-dir", str(output_dir), *flags]
        if train(choice, ranks, arguments, output_dir):
            succeeded.append(choice)
            state.add(choice)
        else:
            failed.append(choice)
    succeeded.sort(key=family.registry.names.index)
    if not failed:
        state.close()
    try:
        page = report_on_choices(output_dir, family.report_root, succeeded, failed)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"\n{len(succeeded)} of {len(family.registry.names)} choices in {time.monotonic() - started:.0f} s; open {page}"
    )
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def train(choice: str, ranks: int, arguments: list[str], output_dir: Path) -> bool:
    """Run one choice under torchrun, here in this process, and say in a line why it failed if it did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # torchrun reports a failed rank at length; the choice's own line says enough
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as log_dir:
        try:
            torchrun(
                ["--standalone", f"--nproc_per_node={ranks}", "--log-dir", log_dir, "--redirects", "2", *arguments]
            )
        except ChildFailedError:
            logs = [path.read_text(errors="replace") for path in sorted(Path(log_dir).rglob("stderr.log"))]
            print(failure_line(choice, logs, output_dir), file=sys.stderr)
            return False
    return True


def failure_line(choice: str, logs: list[str], output_dir: Path) -> str:
    """The choice's own error line; for anything unforeseen the last line of a rank, and where the rest is kept."""
    lines = [line for log in logs for line in log.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("error: ")]
    if own:
        return own[0]
    log_path = output_dir / f"{choice}.failed.log"
    try:
        log_path.write_text("\n".join(logs))
    except OSError as error:
        return f"error: {choice}: {lines[-1] if lines else 'failed'} (log not kept: {error.strerror})"
    return f"error: {choice}: {lines[-1] if lines else 'failed without a word'} (all of it: {log_path})"


if __name__ == "__main__":
    sys.exit(main())
