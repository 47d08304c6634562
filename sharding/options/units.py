"""Units that models need beyond the plain ones of ZeRO-3: blocks that run in any order, and embeddings. And copies of
their weights in the precision of matrix products, which come and go with the unit.

Autocast casts the weight of each linear layer, and autograd keeps the copy until backward: 2 bytes for every parameter
of the model at once, however little ZeRO-3 holds of the parameters themselves. Here the unit makes these copies in
autocast's place, by the same cast and where autocast would. So it can free them when it is resharded, and make them
again when it is unsharded for backward. What autograd has saved are views of a copy's storage, which is freed and
allocated again, not replaced.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.communication.collectives import all_gather, free
from ddp_lab.strategy.modules import ModuleHook
from ddp_lab.strategy.replicated import references
from sharding.parts.unit import Unit, tensors_with_gradient


class LowPrecisionWeights:
    """Of linear layers with fp32 weights. Whatever else autocast casts is left to it, and so is a layer that is itself
    a block of `--activation-checkpointing`: it is computed again without its hooks, and autograd keeps no copy of it.

    Args:
        layers: Modules of the unit.
        parameters: Of the unit. A layer may use another unit's weight.
    """

    def __init__(self, layers: Iterable[nn.Module], parameters: Collection[nn.Parameter]) -> None:
        for layer in dict.fromkeys(layers):
            is_plain = type(layer) is nn.Linear and "forward" not in vars(layer)
            if is_plain and layer.weight in parameters and layer.weight.dtype == torch.float32:
                layer.register_forward_pre_hook(ModuleHook(self._use))
                layer.register_forward_hook(ModuleHook(self._stop_using), always_call=True)
        self._copies: dict[Tensor, Tensor] = {}  # by weight
        self.begin_forward()

    def begin_forward(self) -> None:
        if self._copies:
            torch.autograd.graph.increment_version(list(self._copies.values()))  # no backward pass may read them now
        self._copies = {}  # by weight
        self._references: dict[Tensor, int] = {}  # to a copy's storage, when nobody has saved it

    def _use(self, layer: nn.Module, _: Any) -> None:
        """Let `layer` compute with a copy of its weight, where autocast would. Gradients flow through the cast."""
        weight = layer._parameters["weight"]
        assert weight is not None
        if not (torch.is_autocast_enabled(weight.device.type) and torch.is_grad_enabled()):
            return
        if weight not in self._copies:
            copy = self._copies[weight] = weight.to(torch.get_autocast_dtype(weight.device.type))
            self._references[weight] = references(copy)
        layer.__dict__["weight"] = self._copies[weight]  # found before the parameter, which stays registered

    def _stop_using(self, layer: nn.Module, *_: Any) -> None:
        layer.__dict__.pop("weight", None)

    def free(self) -> None:
        """The weights are freed: free their copies, and forget those that autograd has not saved."""
        for weight, copy in list(self._copies.items()):
            if references(copy) <= self._references[weight]:
                del self._copies[weight], self._references[weight]
            free(copy)

    def restore(self) -> None:
        """The weights are whole again: make the copies that were freed."""
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        if self._copies:
            torch._foreach_copy_([copy.data for copy in self._copies.values()], [w.data for w in self._copies])


# Units ----------------------------------------------------------------------------------------------------------------


RELEASE_S = 0.1
"""Seconds within which a backend's thread drops a tensor that it has finished with."""


class BlockUnit(Unit):
    """A unit that may run several times, be computed again by an activation checkpoint, and hold frozen parameters.

    Attributes:
        low_precision: Copies of weights, which are here when the parameters are.
        running: How many of the modules are in their forward pass now.
        awaited_inputs: Gradients of the modules' inputs that backward has still to make, where frozen parameters are
            read for them. Until then the unit stays whole, although it has all gradients of its trainable parameters.
            -1: not known before a checkpoint computes the modules again.
        given: The inputs of the module that runs now, and their versions.
    """

    low_precision = LowPrecisionWeights((), ())
    may_reshard = True  # the gradients of inputs tell of frozen parameters

    def cast_weights(self) -> None:
        """Make autocast's copies of weights from now on."""
        layers = [layer for module in self.modules for layer in module.modules()]
        self.low_precision = LowPrecisionWeights(layers, {p for flat in self.flats for p in flat.parameters})

    def begin_forward(self) -> None:
        self.running = self.awaited_inputs = 0
        self.input_versions: list[tuple[Tensor, int]] = []
        self.low_precision.begin_forward()

    def forget(self) -> None:
        super().forget()
        self.begin_forward()

    def wait_for_unshard(self) -> None:
        is_new = self._gathers is not None
        super().wait_for_unshard()
        if is_new:
            self.low_precision.restore()

    def reshard(self) -> None:
        if not self.is_sharded:
            super().reshard()
            self.low_precision.free()

    @property
    def is_over(self) -> bool:
        return not self.awaited_inputs and super().is_over

    def before_module(self, inputs: Any, computes_again: bool, callback: Callable[[], None]) -> None:
        """If frozen parameters are read for gradients of a module's inputs, await these. `callback` runs at each."""
        leaves = tensors_with_gradient(inputs)
        self.input_versions = [(leaf, leaf._version) for leaf in leaves]
        if not self.has_frozen or (computes_again and self.awaited_inputs >= 0):  # awaited since forward
            return

        def on_gradient(_: Tensor) -> None:
            self.awaited_inputs -= 1
            callback()

        self.awaited_inputs = max(self.awaited_inputs, 0) + len(leaves)
        for leaf in leaves:
            leaf.register_hook(on_gradient)
        if not (self.awaited_inputs or torch.is_grad_enabled()):
            self.awaited_inputs = -1

    def new_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that the module made or changed. An input that it returns, such as T5's position bias, gets its
        gradient when backward is at the unit that made it, long after this one."""
        input_versions, self.input_versions = self.input_versions, []
        return [
            out
            for out in outputs
            if not any(out is leaf and out._version == version for leaf, version in input_versions)
        ]

    def take_part(self) -> None:
        """Send this rank's shard to ranks that need the unit now. The unit stays as it is on this rank."""
        if self.is_sharded:
            self.unshard()
            self.reshard()
        else:
            self.wait_for_unshard()
            for flat in self.flats:
                all_gather(flat.full, flat.group).wait()  # what arrives is here already


class Embeddings(Unit):
    """Embeddings, which are resharded after forward, because backward does not read an embedding's weight.

    The gradient of a lookup goes to the rows of the looked-up indices, whatever the weight holds. So a large vocabulary
    takes no memory in backward. Where something else reads the weight in backward, autograd has saved it, and the unit
    stays whole.

    Attributes:
        read_in_backward: Whether backward reads a weight on any rank. All ranks agree on it in the first step.
    """

    read_in_backward = False

    def unshard(self) -> None:
        if self.is_sharded:
            self._references_at_rest = self._references()
        super().unshard()

    def reshard_after_forward(self) -> None:
        """Free the weights, unless backward reads them.

        Raises:
            OneRankError: backward reads a weight in this step, and did not in the first step.
        """
        if self.read_in_backward:
            return
        if self.is_saved_for_backward():
            raise OneRankError(
                "backward reads the weight of an embedding in this step, and did not in the first, since when it "
                "is freed after forward; use zero2 for such a model"
            )
        self.reshard()

    def is_saved_for_backward(self) -> bool:
        """Whether autograd holds a reference to a full tensor.

        A backend's thread may still hold one for a moment after it has gathered the tensor, so this waits for it.
        """
        expected = self._references_at_rest + sum(len(flat.parameters) for flat in self.flats)
        deadline = time.monotonic() + RELEASE_S
        while self._references() > expected:
            if time.monotonic() > deadline:
                return True
            time.sleep(RELEASE_S / 100)
        return False

    def _references(self) -> int:
        """How many tensors share the full tensors' storages."""
        return sum(references(flat.full) for flat in self.flats)
