"""A unit of ZeRO-3: modules whose parameters are whole only while they are needed.

At rest a unit holds this rank's shard of its parameters. `unshard` starts the all-gather that makes them whole,
`wait_for_unshard` waits for it, and `reshard` frees the whole parameters again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.tensors import tensors_in
from ddp_lab.strategy.communication.collectives import Pending, all_gather
from sharding.options.low_precision import LowPrecisionWeights
from sharding.options.placement import Placement
from sharding.options.replicas import ShardRanks
from sharding.parts.flat import FlatParameters, group_by_kind
from sharding.parts.gradient_buckets import ShardedGradientBucket

RanksOf = Callable[[nn.Parameter], ShardRanks]


class ShardedParameters(FlatParameters):
    """Flat parameters whose full tensor has no memory between `reshard` and `unshard`.

    The storage of the full tensor is freed and allocated again rather than replaced. So what autograd saved in forward
    is valid again in backward. In between, each parameter is a NaN in its own shape: a read by mistake gives NaN, and a
    write is refused.

    Attributes:
        forget: Frees the unit before its shard changes.
    """

    forget: Callable[[], None]

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: ShardRanks, placement: Placement) -> None:
        super().__init__(parameters, ranks, placement)
        self._resting: Tensor | None = None
        if self.is_offloaded and placement.offload and placement.offload.what == "optimizer":
            self._resting = self.shard.to(self.full.device, self.full.dtype, copy=True)
        nan = torch.full((), float("nan"), dtype=self.full.dtype, device=self.full.device)
        self._placeholders = [nan.expand(parameter.shape) for parameter in self.parameters]
        self.reshard()

    @property
    def keeps_shard_apart(self) -> bool:
        return True

    def unshard(self) -> Pending:
        """Start to gather the full tensor. `use_full` must follow when it has arrived."""
        self.allocate()
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

    def storages(self) -> list[int]:
        """Of the parameters, whole or not. They stay the same."""
        return [storage_of(self.full), storage_of(self._placeholders[0])]

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

    def allocate(self) -> None:
        """Make room for the full tensor."""
        self.require_in_place()
        self.full.untyped_storage().resize_(self.full_bytes)

    def require_in_place(self) -> None:
        """Check that nobody has given the parameters other values between steps.

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


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor from others."""
    return tensor.untyped_storage()._cdata


class Unit:
    """Modules that are unsharded together.

    Args:
        parameters: Those of `modules`, in one or more parts that share no flat tensor (the root has two).
        ranks_of: Which ranks hold the shards of a parameter.
        placement: Of parameters and gradients.
        casts: The modules run under autocast.

    Attributes:
        flats: The flat parameters, one for each part, dtype and device.
        buckets: The gradients of the flat parameters that train.
        low_precision: Copies of weights, which are here when the parameters are.
        running: How many of the modules are in their forward pass now.
        awaited_inputs: Gradients of the modules' inputs that backward has still to make, where frozen parameters are
            read for them. Until then the unit stays whole, although it has all gradients of its trainable parameters.
            -1: not known before a checkpoint computes the modules again.
        given: The inputs of the module that runs now, and their versions.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[Sequence[nn.Parameter]],
        ranks_of: RanksOf,
        placement: Placement,
        casts: bool = False,
    ) -> None:
        self.modules = list(modules)
        kinds = [kind for part in parameters for kind in group_by_kind((p for p in part if p.numel()), ranks_of)]
        self.flats = [ShardedParameters(kind, ranks_of(kind[0]), placement) for kind in kinds]
        self.buckets = [ShardedGradientBucket(flat, placement.reduce_dtype) for flat in self.flats if flat.trainable]
        layers = [layer for module in modules for layer in module.modules()] if casts else []
        self.low_precision = LowPrecisionWeights(layers, {p for flat in self.flats for p in flat.parameters})
        self.has_frozen = not all(flat.trainable for flat in self.flats)
        self.is_sharded = True
        self.begin_forward()
        self._gathers: list[Pending] | None = None
        for flat in self.flats:
            flat.forget = self.forget

    def begin_forward(self) -> None:
        self.running = self.awaited_inputs = 0
        self.given: list[tuple[Tensor, int]] = []
        self.low_precision.begin_forward()

    def forget(self) -> None:
        """No backward pass follows on a forward pass so far."""
        self.reshard()
        self.begin_forward()

    def await_inputs(self, inputs: Any, computes_again: bool, then: Callable[[], None]) -> None:
        """Where frozen parameters are read for gradients of a module's inputs, await these. `then` runs behind each."""
        if not self.has_frozen or (computes_again and self.awaited_inputs >= 0):  # awaited since forward
            return

        def on_gradient(_: Tensor) -> None:
            self.awaited_inputs -= 1
            then()

        leaves = tensors_with_gradient(inputs)
        self.awaited_inputs = max(self.awaited_inputs, 0) + len(leaves)
        for leaf in leaves:
            leaf.register_hook(on_gradient)
        if not (self.awaited_inputs or torch.is_grad_enabled()):
            self.awaited_inputs = -1

    def made_of(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those that the module that has run made or changed. What it hands on, such as T5's position bias, gets its
        gradient when backward is at the unit that made it, long behind this one."""
        given, self.given = self.given, []
        return [one for one in outputs if not any(one is two and one._version == was for two, was in given)]

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
            self.low_precision.restore()

    def take_part(self) -> None:
        """Send this rank's shard to ranks that need the unit now. Here it stays as it is."""
        if self.is_sharded:
            self.unshard()
            self.reshard()
        else:
            self.wait_for_unshard()
            for flat in self.flats:
                all_gather(flat.full, flat.group).wait()  # what arrives is here already

    def reshard(self) -> None:
        """Free the whole parameters; this rank keeps its shard."""
        if not self.is_sharded:
            self.wait_for_unshard()
            self.low_precision.free()
            for flat in self.flats:
                flat.reshard()
            self.is_sharded = True
