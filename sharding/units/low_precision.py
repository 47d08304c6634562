"""Copies of a unit's weights in the precision of its matrix products, which come and go with the unit.

Autocast casts the weight of each linear layer, and autograd keeps the copy until backward: 2 bytes for every parameter
of the model at once, however little ZeRO-3 holds of the parameters themselves. Here the unit makes these copies, by the
same cast, in the layers' place. So it can free them when it is resharded, and make them again when it is unsharded for
backward. What autograd has saved are views of a copy's storage, which is freed and allocated again, not replaced.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn


class LowPrecisionWeights:
    """Of linear layers. Whatever else autocast casts is left to it.

    Args:
        modules: Of the unit.
        parameters: Of the unit. A layer may use another unit's weight.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Collection[nn.Parameter]) -> None:
        self._layers = {
            module: [layer for layer in module.modules() if type(layer) is nn.Linear and layer.weight in parameters]
            for module in modules
        }
        self.begin_forward()

    def begin_forward(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []  # each with its weight
        self._are_here = True
        for module in self._layers:
            self.stop_using(module)

    def use(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Until `stop_using`, `module` computes with copies of its weights. Gradients flow through the cast."""
        for layer in self._layers[module]:
            copy = layer.weight.to(dtype)
            self._copies.append((copy, layer.weight))
            layer.__dict__["weight"] = copy  # found before the parameter, which stays registered

    def stop_using(self, module: nn.Module) -> None:
        for layer in self._layers[module]:
            layer.__dict__.pop("weight", None)

    def free(self) -> None:
        """The weights are about to be freed: free their copies, too."""
        for copy, _ in self._copies:
            copy.untyped_storage().resize_(0)
        self._are_here = False

    def restore(self) -> None:
        """The weights are whole again: make the copies that were freed."""
        if self._are_here:
            return
        for copy, _ in self._copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        if self._copies:
            copies, weights = zip(*((copy.data, weight.data) for copy, weight in self._copies), strict=True)
            torch._foreach_copy_(copies, weights)
        self._are_here = True
