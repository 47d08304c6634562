# mypy: disable-error-code="override"
"""A process group over Gloo on which collectives and messages take as long as they would over links.

Gloo moves the data as always, so results are bitwise Gloo's. What the caller gets, `Work` or future, is done when the
links would have delivered (`delivery`). A thread sleeps until then, so waiting costs no CPU. In a trace,
`paced::all_reduce` lasts as long as Gloo's `gloo:all_reduce` would over such links; the latter is as it was in memory.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
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
    _unregister_process_group,
)

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link import schedule
from ddp_lab.runtime.link.delivery import Delivery, as_operator
from ddp_lab.runtime.link.ledger import Ledger
from ddp_lab.runtime.link.schedule import Schedule


class PacedGroup(dist.ProcessGroup):
    """Methods are those of `torch.distributed.ProcessGroup`. What no strategy issues is not paced, and so is refused.

    Args:
        inner: A group over Gloo.
        members: Its ranks, by their numbers in the whole world.
    """

    def __init__(self, inner: dist.ProcessGroup, members: Sequence[int], ledger: Ledger) -> None:
        super().__init__(inner.rank(), inner.size())
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._register_backend(device, kind, inner._get_backend(device))  # the reducer of DDP asks for it
        self._set_default_backend(kind)
        self._inner, self._members, self._ledger = inner, tuple(members), ledger
        self._collectives = Delivery(inner.group_name, ledger, members, inner.rank())
        self._messages: dict[tuple[int, int, int], Delivery] = {}  # by sender, receiver and tag
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

    def end_delivery(self) -> None:
        """Nothing follows."""
        for delivery in (self._collectives, *self._messages.values()):
            delivery.end()

    def shutdown(self) -> None:
        self.end_delivery()
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    # Collectives ------------------------------------------------------------------------------------------------------

    def _paced(
        self,
        kind: str,
        shown: Tensor | None,
        messages: Schedule,
        issue: Callable[..., dist.Work],
        *args: Any,
        **rest: Any,
    ) -> dist.Work:
        """The collective that `issue(*args)` issues. See `Parcel` for the other arguments."""
        return self._seen(self._collectives.send(kind, shown, messages, lambda: issue(*args).get_future(), **rest))

    def _seen(self, work: dist.Work) -> dist.Work:
        for hook in self._post_hooks.values():
            hook(SimpleNamespace(work=work))
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        messages, options = schedule.all_reduce(self.size(), nbytes(tensors)), opts or AllreduceOptions()
        return self._paced("all_reduce", tensors[0], messages, self._inner.allreduce, tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        messages, options = schedule.all_reduce(self.size(), nbytes(tensors)), opts or AllreduceCoalescedOptions()
        return self._paced("all_reduce", tensors[0], messages, self._inner.allreduce_coalesced, tensors, options)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """As torch's Gloo backend makes it, an all-reduce of a copy. Torch's own has no future."""
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
            return gloo.allreduce([copy], options)

        def take_part(_: Any) -> list[Tensor]:
            output.view(-1).copy_(copy.view(self.size(), -1)[self.rank()])
            return [output]

        def shown() -> dist.Work:
            return as_operator("_reduce_scatter_base_", (output, whole), issue)

        return self._paced("all_reduce", whole, schedule.all_reduce(self.size(), whole.nbytes), shown, values=take_part)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        messages, options = schedule.all_gather(self.size(), nbytes(inputs)), opts or AllgatherOptions()
        return self._paced("all_gather", inputs[0], messages, self._inner.allgather, outputs, inputs, options)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        messages, options = schedule.all_gather(self.size(), own.nbytes), opts or AllgatherOptions()
        return self._paced("all_gather", own, messages, self._inner.all_gather_single, output, own, options)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        messages, options = schedule.all_gather(self.size(), nbytes(inputs)), opts or AllgatherOptions()
        return self._paced(
            "all_gather", inputs[0], messages, self._inner.all_gather_single_coalesced, outputs, inputs, options
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        options = opts or BroadcastOptions()
        messages = schedule.broadcast(self.size(), nbytes(tensors), options.rootRank)
        return self._paced("broadcast", tensors[0], messages, self._inner.broadcast, tensors, options)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        options = opts or ScatterOptions()
        messages = schedule.scatter(self.size(), nbytes(outputs), options.rootRank)
        sent = inputs[0][0].expand(self.size(), *inputs[0][0].shape) if inputs else None  # as large as all parts
        return self._paced("scatter", sent, messages, self._inner.scatter, outputs, inputs, options)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        options = opts or GatherOptions()
        messages = schedule.gather(self.size(), nbytes(inputs), options.rootRank)
        return self._paced("gather", inputs[0], messages, self._inner.gather, outputs, inputs, options)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        if len({*output_sizes}) > 1 or len({*input_sizes}) > 1:
            raise UserError("--link cannot pace all-to-alls of parts of different sizes yet; run with --link none")
        messages, options = schedule.all_to_all(self.size(), given.nbytes / self.size()), opts or AllToAllOptions()
        sizes, issue = (output_sizes, input_sizes), self._inner.all_to_all_single
        return self._paced("all_to_all", given, messages, issue, output, given, *sizes, options)

    def barrier(self, opts: Any = None) -> dist.Work:
        options = opts or BarrierOptions()
        return self._paced("barrier", None, schedule.barrier(self.size()), self._inner.barrier, options)

    # Messages between two ranks ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> dist.Work:
        return self._message("send", tensors, (self.rank(), receiver), tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, (sender, self.rank()), tag)

    def _message(self, kind: str, tensors: list[Tensor], ends: tuple[int, int], tag: int) -> dist.Work:
        """One end of a message. It goes on its links when both ranks have issued it."""
        own, key, issue = int(kind == "recv"), (*ends, tag), getattr(self._inner, kind)
        if key not in self._messages:
            members = [self._members[end] for end in ends]
            self._messages[key] = Delivery(f"{self.group_name} {key}", self._ledger, members, own)
        go, messages = self._messages[key].send, schedule.message(nbytes(tensors))
        return self._seen(go(kind, tensors[0], messages, lambda: issue(tensors, ends[1 - own], tag)))


# Where torch keeps its process groups ---------------------------------------------------------------------------------


def forget(group: dist.ProcessGroup) -> None:
    """Take `group` out, so that another can have its name."""
    world = c10d._world
    _unregister_process_group(group.group_name)
    for register in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        register.pop(group, None)
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)


def replace_default(old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Make `new` the default group in the place of `old`, whose name it has."""
    world = c10d._world
    (backend, store), config, ranks = world.pg_map[old], world.pg_backend_config[old], world.pg_group_ranks[old]
    forget(old)
    c10d._register_pg_in_world(new, backend, store, new.group_name, config, ranks, add_to_default_tag=True)
    c10d._update_default_pg(new)


# Helpers --------------------------------------------------------------------------------------------------------------


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def refused(name: str) -> Callable[..., Any]:
    def method(self: PacedGroup, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"--link cannot pace {name} yet; run with --link none")

    return method


for name in (
    "allgather_coalesced",
    "alltoall",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
):
    setattr(PacedGroup, name, refused(name))
