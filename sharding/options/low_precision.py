"""Copies of a unit's weights in the precision of its matrix products, which come and go with the unit.

Autocast casts the weight of each linear layer, and autograd keeps the copy until backward: 2 bytes for every parameter
of the model at once, however little ZeRO-3 holds of the parameters themselves. Here the unit makes these copies in
autocast's place, by the same cast and where autocast would. So it can free them when it is resharded, and make them
again when it is unsharded for backward. What autograd has saved are views of a copy's storage, which is freed and
allocated again, not replaced.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.strategy.communication.collectives import free
from ddp_lab.strategy.module_hooks import ModuleHook
from ddp_lab.strategy.replicated import references


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
