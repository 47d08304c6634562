"""A device that only pretends, for tests without a GPU: `Work.wait` returns at once, and collectives complete later.

It stands for one stream of a GPU: a thread that runs what it is given in order. All-reduces of fp32 tensors go there,
and run as Gloo's. All else is Gloo's own, as CPU tensors are under `cpu:gloo,cuda:nccl`. The host does not see reduced
gradients in time, so losses mean nothing.
"""

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _create_work_from_future

from ddp_lab.runtime.watch import on_device, sequence

HOOK_ID = 1_000_000_000  # after the recorder's, which keeps the Work that the caller gets
OF_GLOO = ("allgather", "all_gather_single", "barrier", "broadcast", "gather", "reduce", "scatter")


FOR_EVER = timedelta(hours=1)
LAUNCHES = 1024
"""How far the host may run ahead, as on CUDA."""


class Device:
    """A stream."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], Any]] = queue.Queue(LAUNCHES)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def put(self, work: Callable[[], Any]) -> None:
        self._queue.put(work)

    def mark(self, device: torch.device) -> Callable[[], bool]:
        reached = threading.Event()
        self.put(reached.set)
        return reached.is_set

    def hang(self) -> None:
        self.put(threading.Event().wait)


class LateBackend(Backend):
    def __init__(self, device: Device, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo_of_device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, FOR_EVER)
        self.device, self._hooks = device, {}
        self.timeout, self.has_queued = timeout, False

    def getBackendName(self) -> str:
        return "late"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        self.has_queued = tensors[0].dtype == torch.float32
        if not self.has_queued:
            return self._gloo.allreduce(tensors, opts)
        future: torch.futures.Future[None] = torch.futures.Future()
        self.device.put(lambda: (self._gloo_of_device.allreduce(tensors, opts).wait(), future.set_result(None)))
        return _create_work_from_future(future)

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._hooks.pop(hook_id)

    def abort_process(self) -> None:
        """As the watchdog of a backend does it."""
        for hook in self._hooks.values():
            hook()
        os.abort()


def of_gloo(name: str) -> Callable[..., dist.Work]:
    def call(self: LateBackend, *args: Any) -> dist.Work:
        self.has_queued = False
        return getattr(self._gloo, name)(*args)

    return call


for name in OF_GLOO:
    setattr(LateBackend, name, of_gloo(name))


def install() -> LateBackend:
    """The default process group that is made from now on has this device."""
    device, backend = Device(), LateBackend.__new__(LateBackend)
    late: WeakSet[dist.Work] = WeakSet()
    plain_init, plain_wait = dist.init_process_group, dist.Work.wait

    def make(*args: Any) -> LateBackend:
        backend.__init__(device, *args)
        return backend

    def init(name: str, **kwargs: Any) -> None:
        plain_init("cpu:late", **kwargs)
        dist.group.WORLD.register_post_hook(HOOK_ID, lambda call: backend.has_queued and late.add(call.work))

    def wait(work: dist.Work, *args: Any) -> bool:
        return work in late or plain_wait(work, *args)

    def timeout_on_device(recorder: Any, name: str, tensor: torch.Tensor) -> float | None:
        return backend.timeout.total_seconds() if tensor.dtype == torch.float32 else None

    dist.Backend.register_backend("late", make, devices=["cpu"])
    dist.init_process_group, dist.Work.wait = init, wait
    on_device.mark_stream = device.mark
    sequence.CollectiveRecorder._timeout_on_device = timeout_on_device
    return backend
