"""Real ranks for tests: a pool of processes that join a Gloo group and run one job after another in it.

Starting Python and importing torch takes seconds, so the processes live as long as the test session, and a group as
long as jobs have the same number of ranks. A job that fails or does not end in time kills the pool; the next one starts
a new one.
"""

import datetime
import itertools
import os
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

JOB_TIMEOUT_S = 120.0


class RankFailed(AssertionError):
    """A rank raised; carries its traceback, and the exception's text in `message`."""

    def __init__(self, rank: int, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.message = message


class RankPool:
    """Runs functions on several ranks at once."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one
        self._group_ids = itertools.count()
        self._group = (0, "")

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S) -> list:
        """Call `function(*args)` on each rank of a process group, and answer with what each rank returned.

        Args:
            function: A module-level function, and arguments that can be pickled.

        Raises:
            RankFailed: a rank raised; the first rank's error that is not merely another's lost connection.
            TimeoutError: a rank did not answer in time.
        """
        if self._group[0] not in (0, world_size) and find_spec("deepspeed"):
            self.close()  # it goes on to use groups and numbers of parameters that it has seen in the same process
        while len(self._workers) < world_size:
            self._workers.append(start_worker())
        chosen = self._workers[:world_size]
        if self._group[0] != world_size:
            self._group = (world_size, f"group {next(self._group_ids)}")
        for rank, (_, connection) in enumerate(chosen):
            connection.send((rank, world_size, self._store.port, self._group[1], function, args))
        answers = []
        for rank, (_, connection) in enumerate(chosen):
            if not connection.poll(timeout_s):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                self.close()
                raise RankFailed(rank, "the process died", "the process died without an exception") from None
        failures = [RankFailed(rank, *answer[1]) for rank, answer in enumerate(answers) if answer[0] == "failed"]
        if failures:
            self.close()
            raise min(failures, key=lambda failure: "onnection" in failure.message)
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()
        self._group = (0, "")


def start_worker() -> tuple[Any, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def serve(connection: Connection) -> None:
    """Body of a worker: run jobs until the other end closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    current = None
    while True:
        try:
            rank, world_size, port, group, function, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if group != current:
                join_group(group, rank, world_size, port)
                current = group
            answer = ("done", function(*args))
            dist.barrier()
        except Exception as error:  # reported to the test, whatever it is
            answer = ("failed", (str(error), traceback.format_exc()))
        connection.send(answer)


def join_group(name: str, rank: int, world_size: int, port: int) -> None:
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    timeout = datetime.timedelta(seconds=60)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
