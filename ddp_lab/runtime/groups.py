"""Process groups: what they can carry, work that all ranks of one agree on, and their end. Imports nothing of ours but
errors."""

import atexit
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_lab.runtime.errors import UserError, words_of

Result = TypeVar("Result")


def description(group: dist.ProcessGroup) -> str:
    """What `group` is for: its dimension of a mesh, or what its maker says; empty if nobody has said it."""
    name = group.group_desc
    return "" if name in ("default_pg", "undefined") else name.removeprefix("mesh_")


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether `group` carries CPU tensors, so that an exchange of them does not wait for a device."""
    return "cpu:" in dist.get_backend_config(group)


def exchange_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where ranks of `group` exchange small numbers: the CPU, or `device` if the group cannot carry CPU tensors. An
    exchange on a GPU makes the host wait for all that is queued there."""
    return torch.device("cpu") if has_cpu_backend(group) else device


def host_barrier() -> None:
    """Return when all ranks have called this.

    `torch.distributed.barrier` goes over NCCL where the group has it (torch 2.15), and waits for all that the device
    has to do. So does this in a job that cannot carry CPU tensors.
    """
    group = dist.group.WORLD
    assert group is not None, "join the process group first"
    if not has_cpu_backend(group):
        dist.barrier(group)
        return
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def told_through(store: dist.Store, key: str, rank: int, size: int, text: str) -> list[str]:
    """What each of `size` ranks tells under `key`, before there is a process group. Collective.

    Rank 0, whose process may have the store and end next, returns when all ranks have read it.
    """
    store.set(f"{key}/{rank}", text)
    texts = [value.decode() for value in store.multi_get([f"{key}/{member}" for member in range(size)])]
    store.set(f"{key}/{rank}/read", "")
    if rank == 0:
        store.wait([f"{key}/{member}/read" for member in range(size)])
    return texts


def from_rank0(make: Callable[[], Result]) -> Result:
    """What `make` returns on rank 0, broadcast to every rank. Collective.

    If it fails there, rank 0 raises what `make` raised, and the others a UserError.
    """
    answer: list[tuple[Result | None, str | None]] = [(None, None)]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [(make(), None)]
        except Exception as error:  # whatever it is, the others must not wait for it
            failure, answer = error, [(None, words_of(error))]
    dist.broadcast_object_list(answer, src=0)
    result, problem = answer[0]
    if problem is not None:
        raise failure or UserError(problem)
    return result  # type: ignore[return-value]


def gather_objects(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """The `value` of each rank of `group`, on all of them. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def on_every_rank(make: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What `make` returns here, once it has returned on every rank of `group`. Collective.

    If it fails on any rank, all raise a UserError that names the first such rank if it is not rank 0. A rank on which
    `make` raised anything but a UserError raises that.
    """
    result, failure = None, None
    try:
        result = make()
    except Exception as error:  # whatever it is, the others must not wait for it
        failure = error
    rank_problem = None if failure is None else (words_of(failure), getattr(failure, "traceback", None))
    problems = gather_objects(rank_problem, group)
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    for rank, rank_problem in enumerate(problems):
        if rank_problem is not None:
            problem = UserError(rank_problem[0] if rank == 0 else f"rank {rank}: {rank_problem[0]}")
            problem.traceback = rank_problem[1]
            raise problem
    return result  # type: ignore[return-value]


RELEASE_S = 0.2
"""Seconds within which threads drop what they have finished with."""

_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def settle_at_exit(group: dist.ProcessGroup) -> None:
    """When the process ends, let threads of `group` and of groups made from it finish, if it still exists then.

    Gloo's threads drop their last tensors a moment after a collective is done, and need the interpreter for it. If
    Python is ending by then, the process aborts ("terminate called without an active exception"). A group that is
    destroyed joins its threads, but what a script has at module level, such as a strategy, keeps its groups until the
    very end.
    """
    if not _groups:
        atexit.register(_settle)
    _groups.add(group)


def _settle() -> None:
    gc.collect()
    if _groups:
        time.sleep(RELEASE_S)
