# mypy: disable-error-code="override, assignment"
"""Process groups that are only pretended.

Ranks are symmetric (SPMD): the one rank that runs speaks for all, and each is taken to hold what this one holds. So a
sum is a multiple, and a gathered tensor repeats this rank's part. When a collective is done, and what it means to wait
for it, is up to a subclass.

The default group is put in its place without a rendezvous, and `default_group` restores what was there before. Kinds of
collectives that no strategy issues are not implemented.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ddp_lab.pretended.device import Streams

TIMEOUT = timedelta(minutes=10)
REGISTERS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
"""Where torch keeps its process groups."""
Fill = Callable[[Sequence[Tensor]], object]
"""Writes the results of a collective into tensors like its outputs, with the values that they have as it begins."""


class Work(dist._Work):
    """The handle of a collective.

    Args:
        end: The point that a stream follows if it waits for the collective (`Stream.follow`).
    """

    def __init__(self, streams: Streams, end: Any, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._streams, self._end, self._outputs = streams, end, list(outputs)

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        """Make the current stream wait."""
        self._streams.current.follow(self._end)
        return True


class Group(dist.ProcessGroup):
    """See the module's docstring. Methods are those of `torch.distributed.ProcessGroup`.

    Args:
        shared: What all groups of one pretended world share.
        ranks: Its members, by their ranks in the default group.
        rank: This process's place among them.
        config: As `torch.distributed.get_backend_config` gives it.
    """

    def __init__(self, shared: Any, ranks: Sequence[int], rank: int, config: str, name: str) -> None:
        super().__init__(rank, len(ranks))
        self.shared, self.ranks, self._rank, self._config, self._name = shared, tuple(ranks), rank, config, name

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
    ) -> "Group | None":
        """Called by `torch.distributed.new_group` on the default group."""
        if self._rank not in ranks:
            return None
        config = str(c10d.BackendConfig(c10d.Backend(backend)))
        return type(self)(self.shared, ranks, list(ranks).index(self._rank), config, group_name)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=TIMEOUT), supports_splitting=False, name=self._config)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # Collectives ------------------------------------------------------------------------------------------------------

    def _issue(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], fill: Fill, opts: Any = None
    ) -> Work:
        raise NotImplementedError

    def _sum(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """Sum over ranks, which all hold the same."""
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(len(self.ranks))

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """`tensor` with a row for each rank."""
        return tensor.view(len(self.ranks), tensor.numel() // len(self.ranks))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._issue("all_reduce", tensors, tensors, lambda filled: self._sum(filled, opts), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._issue("broadcast", tensors, tensors, lambda filled: None, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        received = [tensor for parts in outputs for tensor in parts]
        return self._issue(
            "all_gather", inputs, received, lambda filled: [tensor.copy_(inputs[0]) for tensor in filled], opts
        )

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Work:
        def fill(filled: Sequence[Tensor]) -> None:
            rows = self._by_rank(filled[0])
            rows.copy_(shard.reshape(1, shard.numel()).expand(*rows.shape))

        return self._issue("all_gather", [shard], [output], fill, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        def fill(filled: Sequence[Tensor]) -> None:
            for output, parts in zip(filled, inputs, strict=False):  # only the root has parts
                output.copy_(parts[self._rank])

        return self._issue("scatter", [part for parts in inputs for part in parts], outputs, fill, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        def fill(filled: Sequence[Tensor]) -> None:
            filled[0].view(-1).copy_(self._by_rank(tensor)[self._rank])
            self._sum(filled, opts)

        return self._issue("reduce_scatter", [tensor], [output], fill, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        def fill(filled: Sequence[Tensor]) -> None:
            rows = self._by_rank(filled[0])
            rows.copy_(self._by_rank(tensor)[self._rank].expand(*rows.shape))

        return self._issue("all_to_all", [tensor], [output], fill, opts)

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._issue("send", tensors, [], lambda filled: None)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._issue("receive", [], tensors, lambda filled: None)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue("barrier", [], [], lambda filled: None, opts)


@contextmanager
def default_group(kind: type[Group], shared: Any, world_size: int, rank: int, config: str) -> Iterator[None]:
    """Within this context the default process group is a `kind` of all ranks, seen from `rank`.

    What `torch.distributed` knew before (a real default group, perhaps) is there again afterwards.
    """
    world = c10d._world
    state, default_pg, count = world.__dict__, world.default_pg, world.group_count
    registers: dict[str, Any] = {name: {} for name in REGISTERS}
    with mock.patch.multiple(c10d, **registers):
        world.__dict__ = type(world)().__dict__
        name = c10d._process_group_name([], use_hashed_name=False)
        group = kind(shared, range(world_size), rank, config, name)
        try:
            c10d._register_pg_in_world(
                group,
                backend_name=c10d.Backend(config),
                store=dist.HashStore(),
                group_name=name,
                backend_config=config,
                rank_mapping={member: member for member in range(world_size)},
                add_to_default_tag=True,
            )
            c10d._update_default_pg(group)
            yield
        finally:
            for name in c10d._pg_names.values():
                torch._C._distributed_c10d._unregister_process_group(name)
            world.__dict__ = state
            c10d._update_default_pg(default_pg)
            world.group_count = count
