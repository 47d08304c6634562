"""What launchers tell a process: which rank it is, where `srun`, `mpirun` or `deepspeed` has started it in place of
`torchrun`; and by SIGUSR1 that it is to save a checkpoint after a step, and end (`docs/slurm.md`). And how it answers
the signals that end it at once.

The variables that `torchrun` sets are made from those of SLURM's steps or of Open MPI. Where a launcher has set RANK,
WORLD_SIZE or LOCAL_RANK itself, as `torchrun` and `deepspeed` do, these stay: so `torchrun` may run inside a task.
Imports nothing heavy.
"""

import os
import re
import select
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ddp_lab.runtime.errors import UserError

OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
FIRST_PORT, PORTS = 15000, 16000
"""Below the ports that Linux gives to connections by itself (ip(7), `ip_local_port_range`)."""
LOOKED_FOR = (
    "RANK, ... of torchrun or deepspeed; SLURM_STEP_ID, SLURM_PROCID, ... of srun; OMPI_COMM_WORLD_RANK of mpirun"
)
REFUSED = "rank {rank}: SIGUSR1 is ignored: without --checkpoint-every there would be nothing to resume from\n"

Environment = MutableMapping[str, str]


def adopt_launcher(environ: Environment) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as `torchrun` would, if another
    launcher tells them. MASTER_ADDR and MASTER_PORT that the user has set stay.

    What `mpirun` starts in an allocation of SLURM also has the variables of the step that started `mpirun`'s daemon.
    """
    if not any(name in environ for name in OWN):
        variables = of_open_mpi(environ) or of_slurm(environ)
    else:  # `deepspeed` says LOCAL_SIZE
        variables = {"LOCAL_WORLD_SIZE": environ["LOCAL_SIZE"]} if "LOCAL_SIZE" in environ else {}
    for name, value in variables.items():
        environ.setdefault(name, value)


def require_launcher(environ: Mapping[str, str]) -> None:
    """Refuse a process that no launcher has started."""
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ
    ]
    if missing == ["MASTER_ADDR"]:
        raise UserError(
            "MASTER_ADDR not set, and mpirun with several hosts does not tell where rank 0 runs; run: "
            "mpirun -x MASTER_ADDR=HOST ... with the first host"
        )
    if missing:
        script = Path(sys.argv[0]).name
        raise UserError(
            f"{', '.join(missing)} not set, so no launcher started this (looked for {LOOKED_FOR}); run: "
            f"torchrun --standalone --nproc_per_node=2 {script} {' '.join(sys.argv[1:])}".rstrip()
        )


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """Without what `deepspeed` puts in front of them; it sets LOCAL_RANK too."""
    return [argument for argument in arguments if not argument.startswith("--local_rank=")]


def of_slurm(environ: Environment) -> dict[str, str]:
    """What the task of a SLURM step is; empty outside of one.

    A batch script has SLURM_PROCID too, but no step. An interactive shell (`srun --pty`, `salloc`) is the only task of
    its step, but none of a training. What `srun` starts from it has inherited SLURM_PTY_PORT.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not step or int(step) >= 2**32 - 16:  # the last numbers are special steps
        return {}
    if "SLURM_PTY_PORT" in environ and environ["SLURM_STEP_NUM_TASKS"] == "1":
        return {}
    node = int(environ["SLURM_NODEID"])
    job = f"{environ['SLURM_JOB_ID']}.{step}"
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_by_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(port_of(job)),
    }


def of_open_mpi(environ: Environment) -> dict[str, str]:
    """What the process of an `mpirun` job is; empty outside of one.

    Open MPI does not tell on which host rank 0 runs. So MASTER_ADDR is known only if all ranks are on one.
    """
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return {}
    size, local_size = environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
    return {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_PORT": str(port_of(environ.get("PMIX_NAMESPACE", ""))),
        **({"MASTER_ADDR": "127.0.0.1"} if size == local_size else {}),
    }


def first_host(hosts: str) -> str:
    """The first of SLURM's host list: `gpu-01` of `gpu-[01-03,07],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None, "the expression matches the empty string too"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def tasks_by_node(counts: str) -> list[int]:
    """Tasks of each node: `2(x2),1` is 2, 2 and 1."""
    counts_by_run = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in counts_by_run for _ in range(int(nodes or 1))]


def port_of(job: str) -> int:
    """A port for the ranks to meet at: the same on all ranks of a job, and most likely another for another job."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


@contextmanager
def stop_requests(saves: bool) -> Iterator[Callable[[], bool]]:
    """Within this context SIGUSR1 does not end the process. Yields what says whether this rank has been asked to stop.

    The ranks agree on a step elsewhere (`Strategy.wants_to_stop`). A run that does not save goes on, and each rank
    answers the signal with one line.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not saves and not arrived:
            line = REFUSED.format(rank=os.environ.get("RANK"))
            os.write(2, line.encode())  # the signal may interrupt a `print`, within which there can be no other
        arrived.append(number)

    before = signal.signal(signal.SIGUSR1, note)
    try:
        yield lambda: saves and bool(arrived)
    finally:
        signal.signal(signal.SIGUSR1, before)


# Signals that end a process -------------------------------------------------------------------------------------------

STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR2]
"""Signals that end a process without a word, unless it answers them; SIGHUP too, but not under nohup."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOPPING.append(signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has ended what this process did. `is_said`: a line says so already."""

    def __init__(self, number: int, is_said: bool = False) -> None:
        self.number, self.is_said = number, is_said


_arrived: list[int] = []


def raise_stopped(number: int, frame: object) -> NoReturn:
    """A handler of signals. A library whose import it interrupts may take its error for one of the import."""
    _arrived.append(number)
    raise Stopped(number)


def require_not_stopped() -> None:
    """Raise `Stopped` if a signal has arrived, and the error was lost."""
    if _arrived:
        raise Stopped(_arrived[0])


def answer_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in STOPPING:
        signal.signal(number, handler)


class SignalReceiver:
    """Collects the signals that are `STOPPING`. Another thread can then react to them while the training thread is
    blocked."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        answer_signals(lambda *_: None)

    def stop(self) -> None:
        signal.set_wakeup_fd(-1)
        answer_signals(signal.SIG_DFL)

    def arrived(self, timeout_s: float) -> signal.Signals | None:
        """The signal that has arrived, or None after `timeout_s` seconds."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return None
        return next((signal.Signals(number) for number in os.read(self._read, 64) if number in STOPPING), None)
