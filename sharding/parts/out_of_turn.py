"""Units that a forward pass needs when they are freed already, or that other ranks do not gather now.

A unit runs once more than anyone knew, or a rank has an order of its own. No rank can gather it alone. So ranks meet:
at each such unit and at the end of the forward pass, they tell each other which unit they need, and all gather it. They
do so until they have agreed on an order; later, in passes without a graph, outside of micro-batches, or behind another
one in the same micro-batch. In the usual step a meeting would cost time. There such a unit is refused.
"""

import torch.distributed as dist

from ddp_lab.runtime.errors import OneRankError
from sharding.parts.order import ExecutionOrder
from sharding.parts.schedule import Schedule
from sharding.parts.unit import Unit


class OutOfTurn:
    """Gathers units beside the `schedule`.

    Attributes:
        in_forward: A forward pass of the whole module is under way.
    """

    def __init__(self, order: ExecutionOrder, schedule: Schedule, group: dist.ProcessGroup) -> None:
        self._order, self._schedule, self._group = order, schedule, group
        self.stop()

    def stop(self) -> None:
        """No forward pass is under way."""
        self.in_forward = self._meets = False

    def begin_forward(self, meets: bool) -> None:
        self.in_forward, self._meets = True, meets

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit`, which the schedule has issued before.

        Raises:
            OneRankError: The order of a training step is not the one that was agreed on.
        """
        if not self.in_forward:  # backward runs again, or a module is called by itself; it must be on all ranks
            self._schedule.require_not_reduced(unit)
            unit.unshard()
        elif self._meets:
            self._schedule.pass_over_rest()
            self._meet(unit)
        else:
            before = self._order.latest
            raise OneRankError(
                f"rank {dist.get_rank()} runs {self._order.name(unit)}, which zero3 has freed, after "
                f"{self._order.name(before or unit)}; the ranks have agreed to go on to "
                f"{self._order.following(before or unit)}: in the first step, run modules in the order of later ones, "
                "and as often, or take zero2"
            )

    def end_forward(self) -> None:
        """Gather what other ranks need, until their forward passes are over, too."""
        while self._meets and self._meet(None):
            pass
        self.stop()

    def _meet(self, wanted: Unit | None) -> list[Unit]:
        """Gather what any rank needs now, which is nothing when all are at the end."""
        units, seen = self._schedule.units, [-1] * dist.get_world_size(self._group)
        dist.all_gather_object(seen, -1 if wanted is None else units.index(wanted), self._group)
        needed = [units[index] for index in sorted(set(seen) - {-1})]
        for unit in needed:
            if unit is wanted:
                unit.unshard()
            else:
                unit.take_part()
        return needed
