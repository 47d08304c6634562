# mypy: disable-error-code="override, assignment"
"""Process groups that only pretend: no data moves, but each collective takes its time on a clock.

Ranks are symmetric (SPMD): the one rank that runs speaks for all, so a collective is complete when it would be if all
ranks had issued it together (ranks of a pipeline are not, see `side_by_side`). Tensors without data stay so. For those
that hold data (the small exchanges by which ranks agree) each rank is taken to send what this one sends.

The default group is put in its place without a rendezvous, and `pretended_world` restores what was there before.
Kinds of collectives that no strategy issues are not implemented.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ddp_lab.collectives.kinds import MESSAGE
from ddp_lab.planner.contracts import CollectiveCost
from ddp_lab.planner.simulation.clock import Queue
from ddp_lab.planner.simulation.network import TIMEOUT, Issued, Network, PretendedWork, holds_data

Group = TypeVar("Group", bound=dist.ProcessGroup)
AT_ONCE = {"gloo": 2, "nccl": 1}
"""Collectives of one group that run at once: Gloo has two threads for each group, NCCL one stream."""
REGISTERS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
"""Where torch keeps its process groups."""


class GroupWithoutBackend(dist.ProcessGroup):
    """What torch needs to know of a group. Methods are those of `torch.distributed.ProcessGroup`; collectives are left
    to classes below.

    Args:
        ranks: Its members, by their numbers in the whole world.
        rank: This process's place among them.
        config: As `torch.distributed.get_backend_config` gives it.
    """

    def __init__(self, ranks: Sequence[int], rank: int, config: str, name: str) -> None:
        super().__init__(rank, len(ranks))
        self.ranks, self._rank, self._config, self._name = tuple(ranks), rank, config, name

    def like_this(self, ranks: Sequence[int], rank: int, config: str, name: str) -> "GroupWithoutBackend":
        """Another group of its class, which shares what is not its own."""
        raise NotImplementedError

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "undefined"

    def getBackendName(self) -> str:
        return self._config

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, backend: str, pg_options: Any, group_name: str, group_desc: Any
    ) -> "GroupWithoutBackend | None":
        """Called by `torch.distributed.new_group` on the default group."""
        if self._rank not in ranks:
            return None
        config = str(c10d.BackendConfig(c10d.Backend(backend)))
        return self.like_this(ranks, list(ranks).index(self._rank), config, group_name)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=TIMEOUT), supports_splitting=False, name=self._config)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]


class PretendedGroup(GroupWithoutBackend):
    """See the module's docstring."""

    def __init__(self, network: Network, ranks: Sequence[int], rank: int, config: str, name: str) -> None:
        super().__init__(ranks, rank, config, name)
        self._network = network
        self._queues: dict[str, Queue] = {}
        self._count = 0

    def like_this(self, ranks: Sequence[int], rank: int, config: str, name: str) -> "PretendedGroup":
        return PretendedGroup(self._network, ranks, rank, config, name)

    def _backend_of(self, tensors: Sequence[Tensor]) -> str:
        """The backend that carries `tensors`: beside NCCL, Gloo carries what lies in host memory."""
        return "gloo" if tensors and holds_data(tensors[0]) else self._network.cluster.backend

    def _issue(self, kind: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> PretendedWork:
        """`tensors`: all that it reads and writes."""
        parts = len(self.ranks) if kind in ("scatter", "reduce_scatter") else 1  # of which this rank receives one
        payload = parts * sum(output.nbytes for output in outputs)
        backend = self._backend_of(tensors)
        queue = self._queues.setdefault(backend, Queue(AT_ONCE[backend]))
        network, cost = self._network, CollectiveCost(0.0, 0.0, "")
        if len(self.ranks) > 1:
            cost = network.costs[backend].cost(kind, payload, self.ranks)
        streams, is_on_device = network.streams, backend == network.cluster.backend
        ready_s, self._count = streams.current.reached_s if is_on_device else float("inf"), self._count + 1
        flight = streams.clock.issue(cost, queue, ready_s, (self._name, self._count))
        network.on_issue(Issued(kind, payload, self.ranks, backend, flight), tensors)
        return PretendedWork(network, flight, outputs)

    def _scratch(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """A flat tensor as large as `parts` together, where Gloo makes one (torch 2.15): for what a scatter's root
        sends, and what an all-gather receives, both freed before it is done; and for a reduce-scatter, which is an
        all-reduce of a copy."""
        if not parts or self._backend_of(parts) != "gloo" or holds_data(parts[0]):
            return []
        return [torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)]

    def _reduce_here(self, tensor: Tensor, opts: Any) -> None:
        """The sum over ranks that all hold the same."""
        if holds_data(tensor) and (opts is None or opts.reduceOp == dist.ReduceOp.SUM):
            tensor.mul_(len(self.ranks))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PretendedWork:
        for tensor in tensors:
            self._reduce_here(tensor, opts)
        return self._issue("all_reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PretendedWork:
        return self._issue("broadcast", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PretendedWork:
        for received, own in zip(outputs, inputs, strict=True):
            for tensor in received:
                if holds_data(tensor) and holds_data(own):
                    tensor.copy_(own)
        flat = [tensor for received in outputs for tensor in received]
        return self._issue("all_gather", [*inputs, *flat, *self._scratch(flat)], flat)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PretendedWork:
        if holds_data(output) and holds_data(own):
            output.view(len(self.ranks), -1).copy_(own.reshape(1, -1).expand(len(self.ranks), -1))
        return self._issue("all_gather", [own, output, *self._scratch([output])], [output])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> PretendedWork:
        for output, parts in zip(outputs, inputs, strict=False):
            if holds_data(output) and parts:
                output.copy_(parts[self._rank])
        sent = [part for parts in inputs for part in parts]
        tensors = [*outputs, *sent, *self._scratch(sent)]
        return self._issue("scatter", tensors, outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> PretendedWork:
        if holds_data(output) and holds_data(whole):
            output.view(-1).copy_(whole.view(len(self.ranks), -1)[self._rank])
            self._reduce_here(output, opts)
        scratch = self._scratch([whole])
        work = self._issue("reduce_scatter", [whole, output, *scratch], [output])
        work.scratch = scratch
        return work

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_splits: list[int], splits: list[int], opts: Any = None
    ) -> PretendedWork:
        if holds_data(output) and holds_data(own):
            output.copy_(own)
        return self._issue("all_to_all", [own, output], [output])

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> PretendedWork:
        work = self._issue(MESSAGE, tensors, tensors)
        work.tells = self._backend_of(tensors) != "gloo"
        return work

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> PretendedWork:
        return self._issue(MESSAGE, tensors, tensors)

    def barrier(self, opts: Any = None) -> PretendedWork:
        return self._issue("barrier", [], [])


@contextmanager
def pretended_world(network: Network, rank: int) -> Iterator[PretendedGroup]:
    """Within this context the default process group is one that pretends, of the whole cluster, seen from `rank`."""
    cluster = network.cluster
    config = f"cpu:{cluster.backend}"  # tensors without data lie on no device, and are said to lie on the CPU

    def make(name: str) -> PretendedGroup:
        return PretendedGroup(network, range(cluster.world_size), rank, config, name)

    with default_group(make, cluster.world_size, config) as group:
        yield group


@contextmanager
def default_group(make: Callable[[str], Group], world_size: int, config: str) -> Iterator[Group]:
    """Within this context the group that `make` makes, from its name, is the default process group.

    What `torch.distributed` knew before (a real default group, perhaps) is there again afterwards.
    """
    world = c10d._world
    state, default_pg, count = world.__dict__, world.default_pg, world.group_count
    registers: dict[str, Any] = {name: {} for name in REGISTERS}
    with mock.patch.multiple(c10d, **registers):
        world.__dict__ = type(world)().__dict__
        group_name = c10d._process_group_name([], use_hashed_name=False)
        group = make(group_name)
        try:
            c10d._register_pg_in_world(
                group,
                backend_name=c10d.Backend(config),
                store=dist.HashStore(),
                group_name=group_name,
                backend_config=config,
                rank_mapping={member: member for member in range(world_size)},
                add_to_default_tag=True,
            )
            c10d._update_default_pg(group)
            yield group
        finally:
            for name in c10d._pg_names.values():
                torch._C._distributed_c10d._unregister_process_group(name)
            world.__dict__ = state
            c10d._update_default_pg(default_pg)
            world.group_count = count
