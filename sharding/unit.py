"""A unit of ZeRO-3: modules whose parameters are whole only while they are needed."""

import time
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.collectives import Pending, all_gather
from sharding.flat import FlatParameters
from sharding.partition import group_by_kind
from sharding.zero2 import FreedGradientBucket
from training.errors import UnsupportedError

LETS_GO_S = 0.1
"""Within which a backend's thread drops a tensor that it is done with."""


@cache
def _nowhere(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class ReleasedParameters(FlatParameters):
    """Flat parameters whose full tensor has no memory between `reshard` and `unshard`.

    Its storage is freed and allocated again rather than replaced, so that what autograd saved in forward is valid
    again in backward. In between, each parameter is a NaN in its own shape: a read that nobody foresaw is loud, and a
    write is refused.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        super().__init__(parameters, group)
        self.reshard()

    def place_shard(self) -> Tensor:
        return super().place_shard().clone()

    def allocate(self) -> None:
        """Make room for the full tensor.

        Raises:
            UnsupportedError: a parameter's `.data` has been replaced since it was resharded.
        """
        for parameter in self.parameters:
            if parameter.untyped_storage().nbytes() != parameter.element_size():
                raise UnsupportedError(
                    f"the data of a parameter of shape {tuple(parameter.shape)} was replaced between steps, but zero3 "
                    "keeps parameters in shards; change them through full_state_dict and load_full_state_dict"
                )
        self.full.untyped_storage().resize_(self.full_bytes)

    def unshard(self) -> Pending:
        """Start to gather. The parameters are whole when `install` is called after that."""
        self.allocate()
        self.layout.shard_of(self.full, self.rank).copy_(self.shard)
        return all_gather(self.full, self.group)

    def install(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def reshard(self) -> None:
        nowhere = _nowhere(self.full.dtype, self.full.device)
        for parameter in self.parameters:
            parameter.data = nowhere.expand(parameter.shape)
        self.full.untyped_storage().resize_(0)


class Unit:
    """Modules that are unsharded together.

    Attributes:
        buckets: The gradients of those parameters that train.
        running: How many of its modules are in their forward pass.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup
    ) -> None:
        self.modules = list(modules)
        self.flats = [
            ReleasedParameters(kind, group)
            for part in parameters
            for kind in group_by_kind(p for p in part if p.numel())
        ]
        self.buckets = [FreedGradientBucket(flat) for flat in self.flats if flat.trainable]
        self.running = 0
        self._gathers: list[Pending] | None = None
        self.is_sharded = True

    def unshard(self) -> None:
        """Start to gather the parameters, if they are not here."""
        if self.is_sharded:
            self.is_sharded = False
            self._references_at_rest = self._references()
            self._gathers = [flat.unshard() for flat in self.flats]

    def wait(self) -> None:
        """Until the parameters are whole."""
        if self._gathers is not None:
            for flat, pending in zip(self.flats, self._gathers, strict=True):
                pending.wait()
                flat.install()
            self._gathers = None

    def is_saved(self) -> bool:
        """Whether somebody else holds on to the full tensors: autograd, which has saved them for backward.

        A backend's thread may let go of them only a moment after it has gathered them, so that is waited for.
        """
        own = self._references_at_rest + sum(len(flat.parameters) for flat in self.flats)
        deadline = time.monotonic() + LETS_GO_S
        while self._references() > own:
            if time.monotonic() > deadline:
                return True
            time.sleep(LETS_GO_S / 100)
        return False

    def _references(self) -> int:
        """How many tensors share the full tensors' storages."""
        return sum(torch._C._storage_Use_Count(flat.full.untyped_storage()._cdata) for flat in self.flats)

    def reshard(self) -> None:
        if not self.is_sharded:
            self.wait()
            for flat in self.flats:
                flat.reshard()
            self.is_sharded = True
