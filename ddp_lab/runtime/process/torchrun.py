"""Starts the ranks of this node."""

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.runtime.process.environment import quiet_libraries
from ddp_lab.runtime.watch.phases import long_phases_said

QUIET = quiet_libraries() | {
    "OMP_NUM_THREADS": "1",  # torchrun sets the same, with a warning of five lines
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",  # seconds until torchrun kills a rank that does not end
}
"""Read when torch is imported, here and in the ranks. What the user has set stays."""


def quiet_torchrun() -> None:
    """Set `QUIET`. Call it before torch is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def start_ranks(label: str, ranks: int, arguments: Sequence[str]) -> bool:
    """Run a program under `torchrun`, in this process; False if it failed, after one line that says why.

    A signal that ends it raises torch's `SignalException`, whose `is_said` tells whether a rank has said so.

    Args:
        label: Of the run, for that line.
        arguments: The program, and its command line.
    """
    with long_phases_said(label):
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        from ddp_lab.runtime.process.loopback import torchrun_on_loopback

    logging.disable(logging.ERROR)  # torchrun logs that a rank failed, but not why
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as log_dir, torchrun_on_loopback() as flags:
        try:
            torchrun([*flags, f"--nproc_per_node={ranks}", "--log-dir", log_dir, *arguments])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if isinstance(failure.message, dict):  # the rank has left an error file
                why = failure.message["message"]
            else:
                why = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            if not why.startswith("error: "):  # the rank has not printed it as one line
                print(f"error: {label}: rank {rank} failed: {why}", file=sys.stderr)
            return False
        except SignalException as error:
            error.is_said = any(Path(log_dir).glob("*/attempt_*/*/error.json"))  # type: ignore[attr-defined]
            raise
    return True
