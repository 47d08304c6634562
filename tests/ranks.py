"""Real ranks for tests: processes that join a Gloo group and run one job after another in it.

Importing torch and transformers takes seconds, so a server process imports them once and every rank is forked from it.
For each number of ranks there is one group of processes that lives as long as the test session. A job that fails or
does not end in time kills its group; the next one starts a new one.
"""

import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import _forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed import TCPStore

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.process.environment import schedule_as_batch
from ddp_lab.strategy import groups

JOB_TIMEOUT_S = 120.0
CAUSE_S = 10.0  # after a lost connection, for the rank that caused it to say why
FORK_SERVER = get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "tests.parity",
        "tests.traces",
        "ddp_lab.runtime.run",
        "peft",
        "pipeline_parallel.parallelize",
        "sharding.options.any_order",
        "tensor_parallel.parallelize",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ]
)


def by_value(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor goes through a pipe. Torch's own way takes a file in shared memory and a connection for each."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tensor_of, (data, tensor.dtype, tensor.shape)


def tensor_of(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


ForkingPickler.register(torch.Tensor, by_value)


class RankFailed(AssertionError):
    """A rank raised; carries its traceback, and the exception's text in `message`."""

    def __init__(self, rank: int, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.message = message


class RankPool:
    """Runs functions on several ranks at once.

    Args:
        device, backend, share_gpu: As of a run. Small models, and their batches, are made on a rank's device.
    """

    def __init__(self, device: str = "cpu", backend: str = "auto", share_gpu: bool = False) -> None:
        self.config = RunConfig(device=device, backend=backend, share_gpu=share_gpu, timeout_minutes=1.0)
        self._groups: dict[int, list[tuple[Any, Connection]]] = {}
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one
        self._group_ids = itertools.count()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S) -> list:
        """Call `function(*args)` on each rank of a process group, and answer with what each rank returned.

        Args:
            function: A module-level function, and arguments that can be pickled.

        Raises:
            RankFailed: a rank raised; the first error, but a lost connection only if nothing else follows.
            TimeoutError: a rank did not answer in time.
        """
        if world_size not in self._groups:
            self._groups[world_size] = self._start(world_size)
        group = self._groups[world_size]
        for _, connection in group:
            connection.send((function, args))
        ranks: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(group)}
        answers: dict[int, Any] = {}
        lost: RankFailed | None = None
        deadline = time.monotonic() + timeout_s
        while ranks:
            ready: list[Any] = wait(list(ranks), max(deadline - time.monotonic(), 0))
            if not ready:
                self._stop(world_size)
                raise lost or TimeoutError(f"ranks {sorted(ranks.values())} did not answer within {timeout_s} s")
            for end in sorted(ready, key=ranks.__getitem__):
                rank = ranks.pop(end)
                try:
                    is_done, answer = end.recv()
                except EOFError:
                    is_done, answer = False, ("the process died", "the process died without an exception")
                if is_done:
                    answers[rank] = answer
                    continue
                failure = RankFailed(rank, *answer)
                if "onnection" not in failure.message:
                    self._stop(world_size)  # others may wait for it until their group's timeout
                    raise failure
                lost = lost or failure
                deadline = min(deadline, time.monotonic() + CAUSE_S)
        if lost:
            self._stop(world_size)
            raise lost
        return [answers[rank] for rank in range(world_size)]

    def close(self, *sizes: int) -> None:
        """End the groups of these sizes; without sizes, all groups."""
        for world_size in set(sizes or self._groups) & self._groups.keys():
            self._stop(world_size)

    def end(self) -> None:
        """End all groups, and wait for the server of which they were forked: it would outlive this process by a second.
        Python has no public call for that."""
        self.close()
        _forkserver._stop()  # type: ignore[attr-defined]

    def _start(self, world_size: int) -> list[tuple[Any, Connection]]:
        attempt, workers = next(self._group_ids), []
        for rank in range(world_size):
            parent_end, child_end = FORK_SERVER.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
            place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt}  # the pool's store
            process = FORK_SERVER.Process(target=serve, args=(child_end, self.config, place), daemon=True)
            process.start()
            child_end.close()
            workers.append((process, parent_end))
        return workers

    def _stop(self, world_size: int) -> None:
        for process, connection in self._groups.pop(world_size):
            connection.close()
            process.kill()
            process.join()


def reused_groups() -> set[Any]:
    """Groups that later jobs use again."""
    import torch.distributed as dist

    world = dist.group.WORLD
    of_deepspeed = getattr(sys.modules.get("deepspeed.utils.groups"), "_WORLD_GROUP", None)  # made once a process
    return {*groups._groups_of_roots.get(world, ()), groups._side_groups.get(world), of_deepspeed}


def serve(connection: Connection, config: RunConfig, place: dict[str, Any]) -> None:
    """Body of a worker: run jobs until the other end closes.

    Args:
        place: What `torchrun` would have set.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    from ddp_lab.runtime.distributed import joined
    from ddp_lab.runtime.groups import host_barrier
    from tests import models

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")  # images may set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    schedule_as_batch()
    os.environ.update({name: str(value) for name, value in place.items()})
    models.DEVICE = joined(config).device
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        del os.environ[name]  # jobs are no restarts
    gc.freeze()  # later collections skip what is imported by now
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        groups = {*c10d._world.pg_map}
        try:
            answer = (True, function(*args))
            if job_groups := {*c10d._world.pg_map} - groups - reused_groups():
                for group in job_groups:
                    dist.destroy_process_group(group)
                gc.collect()  # strategies, and with them their groups, whose threads wake a hundred times a second
            host_barrier()
        except Exception as error:  # reported to the test, whatever it is
            answer = (False, (str(error), traceback.format_exc()))
        connection.send(answer)
