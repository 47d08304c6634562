"""The unit of embeddings: it is resharded after forward, because backward does not read an embedding's weight.

The gradient of a lookup goes to the rows of the looked-up indices, whatever the weight holds. So a large vocabulary
takes no memory in backward. Where something else in the model reads the weight in backward, autograd has saved it, and
the unit stays whole.
"""

import time
from collections.abc import Iterable, Sequence

from torch import nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.blocks import uses_of_parameters
from ddp_lab.strategy.replicated import references
from sharding.options.placement import Placement
from sharding.parts.plan import UnitPlan
from sharding.parts.unit import RanksOf, Unit

RELEASE_S = 0.1
"""Seconds within which a backend's thread drops a tensor that it has finished with."""


class Embeddings(Unit):
    """Attributes:
    read_in_backward: Whether backward reads a weight on any rank. All ranks agree on it in the first step.
    """

    def __init__(self, plan: UnitPlan, ranks_of: RanksOf, placement: Placement) -> None:
        super().__init__(plan.modules, [plan.parameters], ranks_of, placement)
        self.read_in_backward = False

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
        own = self._references_at_rest + sum(len(flat.parameters) for flat in self.flats)
        deadline = time.monotonic() + RELEASE_S
        while self._references() > own:
            if time.monotonic() > deadline:
                return True
            time.sleep(RELEASE_S / 100)
        return False

    def _references(self) -> int:
        """How many tensors share the full tensors' storages."""
        return sum(references(flat.full) for flat in self.flats)


def find_embeddings(module: nn.Module, plans: Iterable[UnitPlan]) -> UnitPlan:
    """The embeddings outside of all other units.

    Not those that share their weight with another module, or that change it in forward (`max_norm`).
    """
    taken = {id(p) for plan in plans for p in plan.parameters}
    uses = uses_of_parameters(module)
    found: Sequence[nn.Embedding] = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Embedding)
        and type(layer).forward is nn.Embedding.forward
        and layer.max_norm is None
        and id(layer.weight) not in taken
        and uses[id(layer.weight)] == 1
    ]
    return UnitPlan(list(found), [p for layer in found for p in layer.parameters(recurse=False)])
