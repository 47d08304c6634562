"""In which order the units of ZeRO-3 are gathered and reduced: the same on every rank.

Collectives of one process group must be issued in the same order by all ranks, but which units a rank runs may depend
on its data. So all ranks follow a script. In forward, units are gathered in order; in backward in reverse, each gather
followed by the reduction of the unit before. A rank that skips a unit gathers and reduces it all the same when it comes
to a later one. The order is the one in which modules ran in the first forward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from sharding.unit import Unit
from sharding.zero2 import FreedGradientBucket


class Act(NamedTuple):
    """An entry of the script: gather a unit's parameters, or reshard them and reduce these gradients of theirs."""

    unit: Unit
    is_gather: bool = True
    buckets: tuple[FreedGradientBucket, ...] = ()


class Schedule:
    """The script of a pass, and how far this rank has followed it.

    Attributes:
        tables: Lookups. Backward does not need them, unless `reads_tables_again`.
        units: In the order of their first use; all but the root and the tables.
        order_is_agreed: Whether that order is the one in which modules run, and not yet that of registration.
        keeps_root: Whether another micro-batch follows, for which the root stays whole.
        in_flight: The gradients that are being reduced.
    """

    def __init__(self, root: Unit, tables: Unit, units: Sequence[Unit]) -> None:
        self.root, self.tables, self.units = root, tables, list(units)
        self.order_is_agreed = False
        self.reads_tables_again = False
        self.keeps_root = False
        self._sequence = list(units)
        self._early: tuple[FreedGradientBucket, ...] = ()
        self.begin_forward()

    @property
    def last_unit(self) -> Unit | None:
        """The unit that runs last in forward: backward begins with it, so it is not resharded in between."""
        return self._sequence[-1] if self._sequence else None

    def begin_forward(self) -> None:
        self.in_flight: list[FreedGradientBucket] = []
        self._begin([Act(self.tables), Act(self.root), *map(Act, self.units)])

    def begin_backward(self) -> None:
        """Units in the reverse of the order in which they ran: each is gathered before the one that runs before it in
        backward is reduced, which is when all its uses are through backward."""
        uses = list(reversed(self._sequence))
        late = tuple(bucket for bucket in self.root.buckets if bucket not in self._early)
        script = [Act(self.root, False, self._early)] if self._early else []
        for index, unit in enumerate(uses):
            following = uses[index + 1] if index + 1 < len(uses) else unit
            if following not in uses[: index + 1]:
                script.append(Act(following))
            if unit not in uses[index + 1 :]:
                script.append(Act(unit, False, tuple(unit.buckets)))
        if self.tables.buckets:
            script.append(Act(self.tables, False, tuple(self.tables.buckets)))
        self._begin([*script, Act(self.root, False, late)] if late else script)

    def _begin(self, script: list[Act]) -> None:
        self._script, self._next = script, 0

    @property
    def next_act(self) -> Act | None:
        return self._script[self._next] if self._next < len(self._script) else None

    def reduction_of(self, bucket: FreedGradientBucket) -> Act | None:
        """The act still to come that reduces `bucket`."""
        return next((act for act in self._script[self._next :] if bucket in act.buckets), None)

    @property
    def _root_is_through(self) -> bool:
        """Whether nothing that is still to come in this step reads the root."""
        comes_again = any(act.unit is self.root for act in self._script[self._next :])
        return not (self.keeps_root or comes_again) and all(flat.trainable for flat in self.root.flats)

    # Following ---------------------------------------------------------------------------------------------------

    def do_next(self) -> None:
        act = self._script[self._next]
        self._next += 1
        if act.is_gather:
            act.unit.unshard()
            return
        self.finish_reductions()
        if act.unit is not self.root or self._root_is_through:
            act.unit.reshard()
        for bucket in act.buckets:
            bucket.start_reduction()
        self.in_flight = list(act.buckets)

    def do_gather(self) -> None:
        """The next act, if it is one that gathers."""
        if self.next_act and self.next_act.is_gather:
            self.do_next()

    def do_ready_reductions(self) -> None:
        """Reductions that come next and lack no gradient."""
        while (act := self.next_act) and not act.is_gather and not any(bucket.missing for bucket in act.buckets):
            self.do_next()

    def gather(self, unit: Unit) -> None:
        """What comes before gathering `unit`, and that; nothing if it is done already."""
        while Act(unit) in self._script[self._next :]:
            self.do_next()

    def do_rest(self) -> None:
        """What this rank has passed over."""
        while self.next_act:
            self.do_next()

    def finish_reductions(self) -> None:
        for bucket in self.in_flight:
            bucket.finish_reduction()
        self.in_flight = []

    # The order ---------------------------------------------------------------------------------------------------

    def agree(self, ran: Sequence[nn.Module], saved_tables: bool, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Once: learn in which order units run, which gradients of the root are made before those of all units, and
        whether backward reads tables.

        Args:
            ran: Modules outside units, and units' own, in the order in which this rank's first forward pass ran them.
            saved_tables: Whether autograd has saved a table on this rank.
        """
        if self.order_is_agreed:
            return
        index_of = {member: index for index, unit in enumerate(self.units) for member in unit.modules}
        runs = [index_of[member] for member in ran if member in index_of]
        end = max((time for time, member in enumerate(ran) if member in index_of), default=len(ran))
        owners = {p: m for m in module.modules() for p in m.parameters(recurse=False)}
        early = [
            index
            for index, bucket in enumerate(self.root.buckets)
            if all(owners[p] in ran and ran.index(owners[p]) > end for p in bucket.flat.parameters)
        ]
        seen: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(seen, (runs, early, saved_tables), group)
        self._sequence = [self.units[index] for index in merge_orders([order for order, *_ in seen], len(self.units))]
        self.units = list(dict.fromkeys(self._sequence))
        self._early = tuple(self.root.buckets[index] for index in seen[0][1])
        self.reads_tables_again = any(saved for *_, saved in seen)
        self.order_is_agreed = True


def merge_orders(orders: Sequence[Sequence[int]], count: int) -> list[int]:
    """The order in which the first rank ran `count` units, with those that it did not run put behind the unit that came
    before them on a rank that did, or else behind the one registered before them."""
    merged = list(orders[0])
    for order in (*orders[1:], range(count)):
        position = 0
        for index in order:
            if index not in merged:
                merged.insert(position, index)
            position = merged.index(index) + 1
    return merged
