"""Starts the ranks of this node."""

import errno
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from pathlib import Path

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.flags import to_flags
from ddp_lab.runtime.process.environment import quiet_libraries, sees_gpu
from ddp_lab.runtime.process.launcher import STOPPING, Stopped, answer_signals, raise_stopped, require_not_stopped
from ddp_lab.runtime.watch.phases import during, long_phases_said, record_phases_in
from ddp_lab.strategy.registry import Registry

QUIET = quiet_libraries() | {
    "OMP_NUM_THREADS": "1",  # torchrun sets the same, with a warning of five lines
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",  # seconds until torchrun kills a rank that does not end
}
"""Read when torch is imported, here and in the ranks. What the user has set stays."""


def quiet_torchrun() -> None:
    """Set `QUIET`, and let signals raise `Stopped` while torchrun does not answer them. Call it before torch is
    imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    answer_signals(raise_stopped)


def start_ranks(config: RunConfig, ranks: int, registry: Registry) -> bool:
    """Train on `ranks` ranks, under the agent of `torchrun` in this process. Returns False if training failed, after
    printing one line with the cause. Raises `Stopped` if a signal has ended it.

    Ranks without a GPU are forked: they need not import torch, which takes most of a start. A forked process cannot use
    CUDA if its parent has, so ranks with a GPU are processes of `ddp-lab train`.
    """
    # imports, before ranks are forked
    forks, label = not sees_gpu(), config.label
    with long_phases_said(label), during("starting the ranks"):  # which say what they import
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from ddp_lab.runtime.process.loopback import LOOPBACK, stores_on_loopback

        if forks:
            import ddp_lab.runtime.run  # noqa: F401
    # the agent, and its failures in one line
    require_not_stopped()
    logging.disable(logging.ERROR)  # torchrun logs that a rank failed, but not why
    try:
        with tempfile.TemporaryDirectory(prefix="ddp-lab-") as log_dir, stores_on_loopback():
            launch = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                logs_specs=DefaultLogsSpecs(log_dir=log_dir),
                run_id=str(uuid.uuid4()),
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                start_method="fork",
                local_addr=LOOPBACK,
                signals_to_handle=",".join(number.name for number in STOPPING),
            )
            try:
                if forks:
                    elastic_launch(launch, forked_rank)(config, registry)
                else:
                    elastic_launch(launch, sys.executable)("-u", "-m", "ddp_lab", "train", *to_flags(config))
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                if isinstance(failure.message, dict):  # the rank has left an error file
                    why = failure.message["message"]
                else:
                    why = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}"
                if not is_said(log_dir):
                    print(f"error: {label}: rank {rank} failed: {why}", file=sys.stderr)
                return False
            except SignalException as error:
                raise Stopped(error.sigval, is_said(log_dir)) from None
            finally:
                answer_signals(raise_stopped)
    except OSError as error:
        advice = LACKING.get(error.errno or 0, "")
        print(f"error: {label}: cannot start {ranks} ranks: {error.strerror}{advice}", file=sys.stderr)
        return False
    return True


LACKING = {
    errno.ENOSPC: "; look at df -h /dev/shm /tmp (of a container, /dev/shm has 64 MB without --shm-size)",
    errno.EAGAIN: "; raise ulimit -u, or end other processes",
}
"""What to do where the system has too little of something for processes to begin."""


def is_said(log_dir: str) -> bool:
    """Whether a rank, perhaps another one than `torchrun` blames, has printed why the run ends (`tell_torchrun`)."""
    files = Path(log_dir).glob("*/attempt_*/*/error.json")
    return any('"message": "error: ' in file.read_text() for file in files)


def forked_rank(config: RunConfig, registry: Registry) -> None:
    """What a forked rank does. Leaves the process with an exit code unless that is 0."""
    from ddp_lab.runtime.entrypoint import train

    answer_signals(signal.SIG_DFL)  # the parent's handlers are inherited
    record_phases_in(None)
    try:
        code = train(config, registry)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.exit(code)
