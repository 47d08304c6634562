# mypy: disable-error-code="override"
"""A process group over Gloo on which each collective takes as long as it would over a link.

Gloo moves the data as always, so results are bitwise Gloo's. It runs the callbacks of a collective's future in its own
thread, before the collective counts as done. The callback sleeps there until the links would have delivered. So waiting
costs no CPU, the next collective queues behind as it would, and the profiler's span of the collective has the length
that it would have. What the caller gets, `Work` or future, is the one behind that callback.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    HookOpName,
    ScatterOptions,
    _create_work_from_future,
    _unregister_process_group,
)
from torch._C._profiler import _RecordFunctionFast

from training.errors import UserError
from training.link import schedule
from training.link.ledger import Ledger, make_file
from training.link.schedule import Schedule
from training.link.speed import Link

_abandoned: list[dist.ProcessGroup] = []
"""Groups that end in the middle of a collective. Whoever destroys one waits for its threads, and meanwhile holds the
interpreter's lock, which their callbacks need."""


class PacedGroup(dist.ProcessGroup):
    """Methods are those of `torch.distributed.ProcessGroup`. Sends and receives between two ranks are not paced yet,
    and so are refused.

    Args:
        inner: A group over Gloo. This group takes its place in `torch.distributed`.
        members: Its ranks, by their numbers in the whole world.
    """

    def __init__(self, inner: dist.ProcessGroup, members: Sequence[int], ledger: Ledger) -> None:
        super().__init__(inner.rank(), inner.size())
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._register_backend(device, kind, inner._get_backend(device))  # the reducer of DDP asks for it
        self._set_default_backend(kind)
        self._inner, self._members, self._ledger = inner, tuple(members), ledger
        self._number = ledger.group(inner.group_name)
        self._count = 0
        self._moving: list[dist.Work] = []  # what Gloo may still run
        self._pre_hooks: dict[int, Callable[[Any], None]] = {}
        self._post_hooks: dict[int, Callable[[Any], None]] = {}

    # What torch needs to know of a group ------------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        return self._inner.group_name

    @property
    def group_desc(self) -> str:
        return self._inner.group_desc

    def getBackendName(self) -> str:
        return "gloo"

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, backend: str, pg_options: Any, group_name: str, group_desc: Any
    ) -> "PacedGroup | None":
        """Called by `torch.distributed.new_group` on the default group."""
        if self.rank() not in ranks:
            return None
        made: Any = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(self.rank()),
            list(ranks),
            c10d.Backend(backend),
            c10d._get_default_store(),
            c10d.GroupName(group_name),
            backend_options=pg_options,
            timeout=timeout,
            group_desc=group_desc,
        )[0]
        forget(made)
        return PacedGroup(made, ranks, self._ledger)

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        self._pre_hooks[hook_id] = hook
        self._inner.register_pre_hook(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        del self._pre_hooks[hook_id]
        self._inner.unregister_pre_hook(hook_id)

    def register_post_hook(self, hook_id: int, hook: Any) -> None:
        """Hooks see the `Work` that the caller gets, not Gloo's."""
        self._post_hooks[hook_id] = hook

    def unregister_post_hook(self, hook_id: int) -> None:
        del self._post_hooks[hook_id]

    def finish(self) -> None:
        """Wait for what Gloo has moved."""
        for work in self._moving:
            if work.get_future().done():
                work.wait()
            else:
                _abandoned.append(self._inner)

    def shutdown(self) -> None:
        self.finish()
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    # Collectives ------------------------------------------------------------------------------------------------------

    def _paced(
        self, messages: Schedule, issue: Callable[[], dist.Work], results: Callable[[], Any] | None = None
    ) -> dist.Work:
        """The collective that `issue` issues, delivered no earlier than links would.

        Args:
            results: Makes the value of its future. Default: Gloo's own.
        """
        self._count = number = self._count + 1
        ledger, place, members = self._ledger, (self._number, number, self.rank()), self._members
        ledger.issue(*place)
        work = issue()
        self._moving = [one for one in self._moving if not one.is_completed()] + [work]
        moved = work.get_future()

        def deliver(moved: Any) -> Any:
            values = moved.value()
            if results is not None:
                values = results()
            time.sleep(max(0.0, ledger.delivery(*place, members, messages) - time.monotonic()))
            return values

        if moved.done():  # already, so a callback would run, and sleep, here
            future: Any = torch.futures.Future()
            threading.Thread(target=lambda: finish(future, lambda: deliver(moved)), daemon=True).start()
        else:
            future = moved.then(deliver)
        paced = _create_work_from_future(future)
        for hook in self._post_hooks.values():
            hook(SimpleNamespace(work=paced))
        return paced

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        messages = schedule.all_reduce(self.size(), tensors[0].nbytes)
        return self._paced(messages, lambda: self._inner.allreduce(tensors, opts or AllreduceOptions()))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """As torch's Gloo backend makes it: an all-reduce of a copy. Its own has no future."""
        gloo: Any = self._get_backend(whole.device)
        copy = whole.clone(memory_format=torch.contiguous_format)
        options = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        call = SimpleNamespace(
            name=HookOpName.REDUCE_SCATTER_BASE, input_tensors=[whole], output_tensors=[output], root=-1
        )

        def issue() -> dist.Work:
            for hook in self._pre_hooks.values():
                hook(call)
            with _RecordFunctionFast("c10d::_reduce_scatter_base_", [output, whole]):
                return gloo.allreduce([copy], options)

        def take_part() -> list[Tensor]:
            output.view(-1).copy_(copy.view(self.size(), -1)[self.rank()])
            return [output]

        return self._paced(schedule.all_reduce(self.size(), whole.nbytes), issue, take_part)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        messages = schedule.all_gather(self.size(), inputs[0].nbytes)
        return self._paced(messages, lambda: self._inner.allgather(outputs, inputs, opts or AllgatherOptions()))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        messages, options = schedule.all_gather(self.size(), own.nbytes), opts or AllgatherOptions()
        return self._paced(messages, lambda: self._inner.all_gather_single(output, own, options))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        messages = schedule.all_reduce(self.size(), sum(tensor.nbytes for tensor in tensors))
        options = opts or AllreduceCoalescedOptions()
        return self._paced(messages, lambda: self._inner.allreduce_coalesced(tensors, options))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        messages = schedule.all_gather(self.size(), sum(own.nbytes for own in inputs))
        options = opts or AllgatherOptions()
        return self._paced(messages, lambda: self._inner.all_gather_single_coalesced(outputs, inputs, options))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or BroadcastOptions()
        messages = schedule.broadcast(self.size(), tensors[0].nbytes, opts.rootRank)
        return self._paced(messages, lambda: self._inner.broadcast(tensors, opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or ScatterOptions()
        messages = schedule.scatter(self.size(), outputs[0].nbytes, opts.rootRank)
        return self._paced(messages, lambda: self._inner.scatter(outputs, inputs, opts))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or GatherOptions()
        messages = schedule.gather(self.size(), inputs[0].nbytes, opts.rootRank)
        return self._paced(messages, lambda: self._inner.gather(outputs, inputs, opts))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        messages = schedule.all_to_all(self.size(), given.nbytes / self.size())
        options = opts or AllToAllOptions()
        return self._paced(
            messages, lambda: self._inner.all_to_all_single(output, given, output_sizes, input_sizes, options)
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._paced(schedule.barrier(self.size()), lambda: self._inner.barrier(opts or BarrierOptions()))


def refused(name: str) -> Callable[..., Any]:
    def method(self: PacedGroup, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"--link cannot pace {name} yet; run with --link none")

    return method


for name in (
    "allgather_coalesced",
    "alltoall",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "send",
):
    setattr(PacedGroup, name, refused(name))


def finish(future: Any, make: Callable[[], Any]) -> None:
    """Give `future` what `make` returns or raises."""
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)


def forget(group: dist.ProcessGroup) -> None:
    """Take `group` out of torch's registers, so that another can have its name."""
    world = c10d._world
    _unregister_process_group(group.group_name)
    for register in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        register.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)


@contextmanager
def paced_groups(link: Link | None) -> Iterator[None]:
    """Within this context the default process group, and all that are made of it, are paced; not if `link` is None.

    Collective. It ends when all collectives of the default group have.
    """
    inner = dist.group.WORLD
    if link is None or inner is None:
        yield
        return
    paced = PacedGroup(inner, range(inner.size()), shared_ledger(inner, link))
    replace(inner, paced)
    try:
        yield
    finally:
        paced.finish()
        replace(paced, inner)


def shared_ledger(group: dist.ProcessGroup, link: Link) -> Ledger:
    """The ledger of the default group's ranks. Collective."""
    path = [make_file(group.size()) if group.rank() == 0 else Path()]
    dist.broadcast_object_list(path, src=0)
    ledger = Ledger(path[0], group.size(), link)
    dist.barrier()
    if group.rank() == 0:
        path[0].unlink()  # those who have it open keep it
    return ledger


def replace(old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Give `new` the place of `old` as the default group."""
    world = c10d._world
    (backend, store), config, ranks = world.pg_map[old], world.pg_backend_config[old], world.pg_group_ranks[old]
    forget(old)
    c10d._register_pg_in_world(new, backend, store, new.group_name, config, rank_mapping=ranks, add_to_default_tag=True)
    c10d._update_default_pg(new)
