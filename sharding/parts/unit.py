"""A unit of ZeRO-3: modules whose parameters are whole only while they are needed.

At rest a unit holds this rank's shard of its parameters. `unshard` starts the all-gather that makes them whole,
`wait_for_unshard` waits for it, and `reshard` frees the whole parameters again. A `Schedule` does that to units in an
order that is the same on all ranks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.communication.collectives import Pending, all_gather
from ddp_lab.strategy.groups import Groups
from ddp_lab.strategy.modules import tensors_in
from sharding.options.placement import Placement
from sharding.parts.flat import FlatParameters, group_by_kind
from sharding.parts.gradient_buckets import ShardedGradientBucket

GroupsOf = Callable[[nn.Parameter], Groups]


class ShardedParameters(FlatParameters):
    """Flat parameters whose full tensor has no memory between `reshard` and `unshard`.

    The storage of the full tensor is freed and allocated again rather than replaced. So what autograd saved in forward
    is valid again in backward. In between, each parameter is a NaN in its own shape: a read by mistake gives NaN, and a
    write is refused.

    `forget` frees the unit before its shard changes.
    """

    forget: Callable[[], None]

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Groups, placement: Placement) -> None:
        super().__init__(parameters, groups, placement)
        self._resting: Tensor | None = None
        if self.is_offloaded and placement.offload and placement.offload.part == "optimizer":
            self._resting = self.shard.to(self.full.device, self.full.dtype, copy=True)
        nan = torch.full((), float("nan"), dtype=self.full.dtype, device=self.full.device)
        self._placeholders = [nan.expand(parameter.shape) for parameter in self.parameters]
        self.reshard()

    @property
    def keeps_shard_apart(self) -> bool:
        return True

    def unshard(self) -> Pending:
        """Start to gather the full tensor. `use_full` must follow when it has arrived."""
        self.require_in_place()
        self.full.untyped_storage().resize_(self.full_bytes)
        return all_gather(self.full, self.group, self.shard if self._resting is None else self._resting)

    def use_full(self) -> None:
        """Make each parameter the view of the full tensor that it was laid out for."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def reshard(self) -> None:
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder
        self._versions = [parameter._version for parameter in self.parameters]
        self.full.untyped_storage().resize_(0)

    def shard_has_changed(self) -> None:
        self.forget()  # what was gathered before is not used any more
        torch.autograd.graph.increment_version(self.parameters)  # nor by backward of a graph that has saved it
        self._versions = [parameter._version for parameter in self.parameters]
        if self._resting is not None:
            self._resting.copy_(self.shard, non_blocking=True)

    def fill_full(self, values: Tensor) -> None:
        """The full tensor is gathered when it is needed."""
        self.shard_has_changed()

    def tensors(self) -> list[Tensor]:
        return super().tensors() if self._resting is None else [self.full, self._resting]

    def require_in_place(self) -> None:
        """
        Raises:
            UnsupportedError: a parameter's `.data` has been replaced since it was resharded, or a parameter of one
                element, which torch lets one write, was changed.
        """
        address = self._placeholders[0].data_ptr()
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            if parameter.data_ptr() != address or parameter._version != version:
                raise UnsupportedError(
                    f"the data of a parameter of shape {tuple(parameter.shape)} was replaced between steps, but zero3 "
                    "keeps parameters in shards; change them through full_state_dict and load_full_state_dict"
                )


def tensors_with_gradient(tree: Any) -> list[Tensor]:
    """The tensors among a module's inputs or outputs that backward makes gradients for."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


IN_FLIGHT = 2
"""Units whose gradients may be on their way at once. With a single one, backward would wait for the link whenever a
reduction takes longer than the time until the next unit's first gradient."""


class Unit:
    """Modules that are unsharded together: `parameters` of `modules`, in one flat tensor for each dtype and device.

    Attributes:
        buckets: The gradients of those `flats` that train.
        stays: The unit stays whole after its gradients, because another micro-batch follows.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Iterable[nn.Parameter],
        groups_of: GroupsOf,
        placement: Placement,
    ) -> None:
        self.modules = list(modules)
        kinds = group_by_kind((p for p in parameters if p.numel()), groups_of)
        self.flats = [ShardedParameters(kind, groups_of(kind[0]), placement) for kind in kinds]
        self.buckets = [ShardedGradientBucket(flat, placement.reduce_dtype) for flat in self.flats if flat.trainable]
        self.has_frozen = len(self.buckets) < len(self.flats)
        self.is_sharded = True
        self._gathers: list[Pending] | None = None
        for flat in self.flats:
            flat.forget = self.forget
        self.forget()

    def unshard(self) -> None:
        """Start to gather the parameters, unless they are here or on their way."""
        if self.is_sharded:
            self.is_sharded = False
            self._gathers = [flat.unshard() for flat in self.flats]

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are whole."""
        if self._gathers is not None:
            for flat, pending in zip(self.flats, self._gathers, strict=True):
                pending.wait()
                flat.use_full()
            self._gathers = None

    def reshard(self) -> None:
        """Free the whole parameters; this rank keeps its shard."""
        if not self.is_sharded:
            self.wait_for_unshard()
            for flat in self.flats:
                flat.reshard()
            self.is_sharded = True

    def forget(self) -> None:
        """No backward pass follows on a forward pass so far."""
        self.reshard()
        self.stays = False

    @property
    def has_all_gradients(self) -> bool:
        return not any(bucket.missing for bucket in self.buckets)

    @property
    def is_over(self) -> bool:
        """Whether backward is through with the modules."""
        return self.has_all_gradients

    @property
    def may_reshard(self) -> bool:
        """When it is over: frozen parameters have no gradient that would tell."""
        return not (self.stays or self.has_frozen)


class UnitAction(NamedTuple):
    """`unshard`: all-gather parameters. `reduce`: free them and reduce-scatter gradients. `reshard`: only free."""

    kind: Literal["unshard", "reduce", "reshard"]
    unit: Unit


class Schedule:
    """The actions of a pass that are still to come. All ranks issue the same collectives in the same order: one that
    skips a unit issues its actions when it comes to a later one.

    Attributes:
        in_flight: Units whose gradients are being reduced, oldest first.
    """

    def __init__(self) -> None:
        self.begin([])

    def begin(self, actions: Iterable[UnitAction]) -> None:
        """Begin a pass. What is in flight was abandoned."""
        self.to_come = deque(actions)
        self.in_flight: list[Unit] = []

    def issue_next(self) -> None:
        kind, unit = self.to_come.popleft()
        if kind == "unshard":
            unit.unshard()
            return
        self.make_room()
        if unit.may_reshard:
            unit.reshard()
        if kind == "reduce":
            for bucket in unit.buckets:
                bucket.start_reduction()
            self.in_flight.append(unit)

    def issue_rest(self) -> None:
        while self.to_come:
            self.issue_next()

    def unshard(self, *units: Unit) -> None:
        """Issue their all-gathers and all actions before, unless that is done. Reductions among them may miss gradients
        of parameters that this rank did not use."""
        for unit in units:
            while UnitAction("unshard", unit) in self.to_come:
                self.issue_next()

    def prefetch(self) -> None:
        """Issue the next action, if it is an all-gather."""
        if self.to_come and self.to_come[0].kind == "unshard":
            self.issue_next()

    def reduce_what_is_ready(self) -> None:
        """Issue the reductions that come next, as long as backward is through with their units."""
        while self.to_come and self.to_come[0].kind != "unshard" and self.to_come[0].unit.is_over:
            self.issue_next()

    def expects(self, unit: Unit) -> bool:
        """Whether gradients of `unit` may still come."""
        return any(action.unit is unit and action.kind != "unshard" for action in self.to_come)

    def make_room(self) -> None:
        """Wait until another unit's gradients may be made."""
        self.finish_reductions(IN_FLIGHT - 1)

    def finish_reductions(self, max_units: int = 0) -> None:
        """Wait for the oldest reduce-scatters until `max_units` units are in flight, and free their gradients."""
        while len(self.in_flight) > max_units:
            for bucket in self.in_flight.pop(0).buckets:
                bucket.finish_reduction()
