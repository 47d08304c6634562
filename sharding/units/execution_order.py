"""In which order the units of ZeRO-3 run: learned in the first forward pass, the same on every rank.

Modules may run in another order than they are registered, and ranks may run different ones. Rank 0's order counts.
Units that rank 0 did not run are put where another rank ran them. Until the first forward pass is over, the order is
that of registration.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from sharding.gradient_buckets import ShardedGradientBucket
from sharding.units.unit import Unit


class AgreedOrder(NamedTuple):
    """What all ranks agree on.

    Attributes:
        runs: Units in the order in which they run in forward. A unit that runs twice is there twice.
        head_buckets: Gradients of the root that backward makes before those of all other units.
        embeddings_saved: Whether autograd has saved an embedding's weight for backward on any rank.
    """

    runs: list[Unit]
    head_buckets: tuple[ShardedGradientBucket, ...]
    embeddings_saved: bool


class ExecutionOrder:
    """Notes which modules run, until the ranks have agreed.

    Args:
        module: The whole model.
        units: In registration order, all but the root and the embeddings.
    """

    def __init__(self, module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        self._module, self._root, self._units = module, root, list(units)
        self.is_agreed = False
        self._ran: list[nn.Module] = []
        own = {member for unit in units for member in unit.modules}
        inside = {m for member in own for m in member.modules()} - own
        self._hooks = [
            m.register_forward_pre_hook(lambda m, _: self._ran.append(m)) for m in module.modules() if m not in inside
        ]

    def begin_forward(self) -> None:
        self._ran.clear()

    def is_over(self, unit: Unit) -> bool:
        """Whether `unit` does not run again in this forward pass, as far as this rank can know.

        Before the ranks agree, a unit that was passed over may still run. Ranks that reshard it, and ranks that are not
        there yet, would gather it again at different places.
        """
        return self.is_agreed or any(member in self._ran for member in unit.modules)

    def agree(self, embeddings_saved: bool, group: dist.ProcessGroup) -> AgreedOrder:
        """Make this rank's first forward pass known. Collective, once.

        Args:
            embeddings_saved: Whether autograd has saved an embedding's weight on this rank.
        """
        for hook in self._hooks:
            hook.remove()
        index_of = {member: index for index, unit in enumerate(self._units) for member in unit.modules}
        runs = [index_of[member] for member in self._ran if member in index_of]
        seen: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(seen, (runs, self._head_buckets(), embeddings_saved), group)
        order = merge_orders([runs for runs, *_ in seen], len(self._units))
        self.is_agreed = True
        return AgreedOrder(
            runs=[self._units[index] for index in order],
            head_buckets=tuple(self._root.buckets[index] for index in seen[0][1]),
            embeddings_saved=any(saved for *_, saved in seen),
        )

    def _head_buckets(self) -> list[int]:
        """Which buckets of the root belong to modules that ran after all units."""
        of_units = {member for unit in self._units for member in unit.modules}
        end = max((time for time, member in enumerate(self._ran) if member in of_units), default=len(self._ran))
        after = set(self._ran[end + 1 :]) - set(self._ran[: end + 1])
        others = [module for module in self._module.modules() if module not in after]
        early = {
            p for module in others for p in module.parameters(recurse=False)
        }  # among them weights tied to the head
        return [index for index, bucket in enumerate(self._root.buckets) if early.isdisjoint(bucket.flat.parameters)]


def merge_orders(orders: Sequence[Sequence[int]], count: int) -> list[int]:
    """The order in which the first rank ran `count` units, with the units that it did not run.

    Each of those is put behind the unit that came before it on a rank that did run it, or else behind the unit that was
    registered before it.
    """
    merged = list(orders[0])
    for order in (*orders[1:], range(count)):
        position = 0
        for index in order:
            if index not in merged:
                merged.insert(position, index)
            position = merged.index(index) + 1
    return merged
