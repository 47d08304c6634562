# mypy: disable-error-code="override"
"""A process group over Gloo on which collectives and messages take as long as they would over links.

Gloo moves the data as always, so results are bitwise Gloo's. What the caller gets, `Work` or future, is done when the
links would have delivered (`delivery`). A thread sleeps until then, so waiting costs no CPU. In a trace,
`paced::all_reduce` lasts as long as Gloo's `gloo:all_reduce` would over such links; the latter is as it was in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    ReduceScatterOptions,
    ScatterOptions,
    _unregister_process_group,
)

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.link import ledger
from ddp_lab.runtime.link.delivery import Delivery
from ddp_lab.runtime.link.ledger import Ledger
from ddp_lab.runtime.link.speed import Nodes, SimulatedLink


class PacedGroup(dist.ProcessGroup):
    """Methods are those of `torch.distributed.ProcessGroup`, over Gloo's group `inner` of these members of the world.
    What no strategy issues is not paced, and so is refused."""

    def __init__(self, inner: dist.ProcessGroup, members: Sequence[int], times: Ledger) -> None:
        super().__init__(inner.rank(), inner.size())
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._register_backend(device, kind, inner._get_backend(device))  # the reducer of DDP asks for it
        self._set_default_backend(kind)
        self._inner, self._members, self._ledger = inner, tuple(members), times
        self._collectives = Delivery(inner.group_name, times, members, inner.rank())
        self._messages: dict[tuple[int, int, int], Delivery] = {}  # by sender, receiver and tag
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
        group: Any = c10d._new_process_group_helper(
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
        forget(group)
        return PacedGroup(group, ranks, self._ledger)

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        self._inner.register_pre_hook(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
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

    # Collectives; `METHODS` has the others ----------------------------------------------------------------------------

    def _show(self, work: dist.Work) -> dist.Work:
        for hook in self._post_hooks.values():
            hook(SimpleNamespace(work=work))
        return work

    # Messages between two ranks ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> dist.Work:
        return self._message("send", tensors, (self.rank(), receiver), tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, (sender, self.rank()), tag)

    def _message(self, kind: str, tensors: list[Tensor], ends: tuple[int, int], tag: int) -> dist.Work:
        """One end of a message. It goes on its links when both ranks have issued it."""
        receives, key, issue = int(kind == "recv"), (*ends, tag), getattr(self._inner, kind)
        if key not in self._messages:
            members = [self._members[end] for end in ends]
            self._messages[key] = Delivery(f"{self.group_name} {key}", self._ledger, members, receives)
        go, messages = self._messages[key].send, (ledger.Edge(0, 1, sum(tensor.nbytes for tensor in tensors)),)
        return self._show(go(kind, tensors[0], messages, lambda: issue(tensors, ends[1 - receives], tag)))


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


# Methods of the group -------------------------------------------------------------------------------------------------

METHODS: dict[str, tuple[str, int, Any]] = {
    "allreduce": ("all_reduce", 0, AllreduceOptions),
    "allreduce_coalesced": ("all_reduce", 0, AllreduceCoalescedOptions),
    "allgather": ("all_gather", 1, AllgatherOptions),
    "all_gather_single": ("all_gather", 1, AllgatherOptions),
    "all_gather_single_coalesced": ("all_gather", 1, AllgatherOptions),
    "broadcast": ("broadcast", 0, BroadcastOptions),
    "scatter": ("scatter", 0, ScatterOptions),
    "gather": ("gather", 1, GatherOptions),
    "reduce_scatter_single": ("all_reduce", 1, ReduceScatterOptions),
    "all_to_all_single": ("all_to_all", 1, AllToAllOptions),
    "barrier": ("barrier", 0, BarrierOptions),
}
"""As what Gloo runs it, which argument is what a rank gives or gets, and options."""
WITHOUT_FUTURE = ("reduce_scatter_single",)
"""Gloo's work of it has none."""
NOT_PACED = (
    *("allgather_coalesced", "alltoall", "recv_anysource"),
    *("reduce", "reduce_scatter", "reduce_scatter_single_coalesced"),
)


def paced(name: str, kind: str, place: int, make_options: Any) -> Callable[..., dist.Work]:
    def method(self: PacedGroup, *args: Any, opts: Any = None) -> dist.Work:
        if args and isinstance(args[-1], make_options):
            *args, opts = args  # type: ignore[assignment]
        options, argument = opts or make_options(), args[place] if args else []
        tensors: list[Tensor] = [argument] if isinstance(argument, Tensor) else argument
        nbytes, shown = sum(tensor.nbytes for tensor in tensors), tensors[0] if tensors else None
        if kind == "all_to_all" and any(len({*sizes}) > 1 for sizes in args[2:4]):
            raise UserError("--link cannot pace all-to-alls of parts of different sizes yet; run with --link none")
        if kind == "scatter":  # a span shows what the root sends
            parts = args[1]
            shown = parts[0][0].expand(self.size(), *parts[0][0].shape) if parts else None
        root = [options.rootRank] if hasattr(options, "rootRank") else []
        messages, issue = getattr(ledger, kind)(self.size(), nbytes, *root), getattr(self._inner, name)

        def moved() -> Any:
            work = issue(*args, options)
            return work if name in WITHOUT_FUTURE else work.get_future()

        return self._show(self._collectives.send(kind, shown, messages, moved))

    return method


def refused(name: str) -> Callable[..., Any]:
    def method(self: PacedGroup, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"--link cannot pace {name} yet; run with --link none")

    return method


for _name, _how in METHODS.items():
    setattr(PacedGroup, _name, paced(_name, *_how))
for _name in NOT_PACED:
    setattr(PacedGroup, _name, refused(_name))


# The groups of a run --------------------------------------------------------------------------------------------------


@contextmanager
def paced_groups(link: SimulatedLink | None, nodes: Nodes | None = None) -> Iterator[None]:
    """Within this context the default process group, and all that are made of it, are paced; not if `link` is None.
    `nodes` have a link of their own for what goes between them. Collective."""
    inner = dist.group.WORLD
    if link is None or inner is None:
        yield
        return
    paced = PacedGroup(inner, range(inner.size()), shared_ledger(inner, link, nodes))
    replace_default(inner, paced)
    try:
        yield
    finally:
        paced.end_delivery()
        replace_default(paced, inner)


def shared_ledger(group: dist.ProcessGroup, link: SimulatedLink, nodes: Nodes | None) -> Ledger:
    """The ledger of the default group's ranks. Collective."""
    path = from_rank0(lambda: ledger.make_file(group.size()))
    try:
        return on_every_rank(lambda: Ledger(path, group.size(), link, nodes))
    finally:
        if group.rank() == 0:
            path.unlink()  # those who have it open keep it
