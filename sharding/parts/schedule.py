"""The order in which ZeRO-3 issues its collectives: the same on every rank.

All ranks of a process group must issue the same collectives in the same order, but the units that a rank runs may
depend on its data. So each pass has a list of actions that all ranks work through. With units 1 to n:
- forward: unshard the embeddings, the root, unit 1, unit 2, ..., unit n;
- backward: reduce the root's head; unshard n-1, reduce n; unshard n-2, reduce n-1; ...; reduce 1; reduce the embeddings
  and the rest of the root.

The head is what the root runs after unit n (last norm, head): backward makes its gradients first. The embeddings are
not in the root because they are freed between forward and backward (`sharding.options.embeddings`).

A rank that skips a unit issues the unit's actions all the same, when it comes to a later action.

Where an activation checkpoint goes around units k to m, backward runs them forwards first: unshard k, ..., m; reduce m,
..., k.
"""

from collections.abc import Sequence

import torch

from sharding.parts.calls import late_gradient
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.order import AgreedOrder
from sharding.parts.passes import Pass, Reduce, Unshard, in_backward
from sharding.parts.unit import Unit

IN_FLIGHT = 2
"""Units whose gradients may be on their way at once. With a single one, backward would wait for the link whenever a
reduction takes longer than the time until the next unit's first gradient."""


class Schedule:
    """The actions of a pass, and how many of them this rank has issued.

    Attributes:
        units: All but the root and the embeddings, each once, in the order of their first use.
        keeps_root: The root stays whole after backward, because another micro-batch follows.
        in_flight: The gradients that are being reduced, oldest first: those of one action together.
    """

    def __init__(self, root: Unit, embeddings: Unit, units: Sequence[Unit]) -> None:
        self.root, self.embeddings, self.units = root, embeddings, list(units)
        self.keeps_root = False
        self._runs = [[unit] for unit in units]
        self._head: tuple[ShardedGradientBucket, ...] = ()
        self._plan()
        self.begin_forward()

    def follow(self, order: AgreedOrder) -> None:
        """Use the order in which units run, instead of the order in which they are registered."""
        before = self.last_unit
        self._runs, self._head = order.runs, order.head_buckets
        self.units = list(dict.fromkeys(unit for part in order.runs for unit in part))
        self._plan()
        if (last := self.last_unit) and last is not before:  # ranks may have freed it
            last.reshard()
            last.unshard()

    @property
    def last_unit(self) -> Unit | None:
        """The unit that runs last in forward and first in backward. It stays whole between the two."""
        return self._runs[-1][-1] if self._runs else None

    def begin_forward(self) -> None:
        self.in_flight: list[tuple[ShardedGradientBucket, ...]] = []  # all finished, or the step was abandoned
        self._pass, self._issued = self._forward, 0

    def begin_backward(self, of_several: bool = False, drops_gradients: bool = False) -> None:
        """A backward pass may follow.

        Args:
            of_several: It may be that of several forward passes, or in another order. A parameter then has its gradient
                when all of them are through with it, so everything is unsharded before the first reduction.
            drops_gradients: Nobody wants them, so nothing is reduced.
        """
        self._pass, self._issued = self._backward_of_several if of_several else self._backward, 0
        self.drops_gradients = drops_gradients
        self._autograd_passes: set[int] = set()

    def is_new_backward(self) -> bool:
        """Whether autograd's pass under way has not come here before."""
        number, known = torch._C._current_graph_task_id(), len(self._autograd_passes)
        self._autograd_passes.add(number)
        return len(self._autograd_passes) > known

    def _plan(self) -> None:
        """The actions of both passes. They stay the same until the order in which units run is known."""
        self._forward = Pass([Unshard(self.embeddings), Unshard(self.root), *map(Unshard, self.units)])
        rest = [bucket for bucket in self.root.buckets if bucket not in self._head]
        head = [Reduce(self.root, self._head)] if self._head else []
        embeddings = [Reduce(self.embeddings, tuple(self.embeddings.buckets))] if self.embeddings.buckets else []
        actions = [*head, *in_backward(self._runs), *embeddings, *([Reduce(self.root, tuple(rest))] if rest else [])]
        self._backward = Pass(actions)
        self._backward_of_several = Pass(sorted(actions, key=lambda action: isinstance(action, Reduce)))

    @property
    def _next(self) -> Unshard | Reduce | None:
        actions = self._pass.actions
        return actions[self._issued] if self._issued < len(actions) else None

    def reduction_of(self, bucket: ShardedGradientBucket) -> Reduce:
        """The action still to come that reduces `bucket`.

        Raises:
            OneRankError: it is issued already, so a gradient comes too late.
        """
        place = self._pass.place.get(bucket, -1)
        if place >= self._issued:
            action = self._pass.actions[place]
            assert isinstance(action, Reduce)
            return action
        raise late_gradient(bucket.flat.parameters, bucket.missing == 0, len(self._autograd_passes) > 1)

    def require_not_reduced(self, unit: Unit) -> None:
        """Raises as `reduction_of`, when backward comes to a unit that still makes gradients."""
        if torch._C._current_graph_task_id() != -1 and not self.drops_gradients:
            for bucket in unit.buckets:
                self.reduction_of(bucket)

    # Issuing actions ---------------------------------------------------------------------------------------------

    def issue_next(self) -> None:
        action = self._pass.actions[self._issued]
        self._issued += 1
        if isinstance(action, Unshard):
            action.unit.unshard()
            return
        self.make_room()
        if action.unit is not self.root or self._root_is_done():
            action.unit.reshard()
        if self.drops_gradients:
            return
        for bucket in action.buckets:
            bucket.start_reduction()
        self.in_flight.append(action.buckets)

    def unshard(self, unit: Unit) -> None:
        """Issue the all-gather of `unit` and all actions before it, unless it is issued already.

        Reductions among them may miss gradients: those of parameters that this rank did not use.
        """
        while self._pass.place.get(unit, -1) >= self._issued:
            self.issue_next()

    def prefetch_in_forward(self, index: int) -> None:
        if index < len(self.units):
            self.unshard(self.units[index])

    def go_on(self) -> None:
        """Issue what is ready in backward, and the all-gather behind it."""
        self.reduce_what_is_ready()
        self.prefetch()

    def prefetch(self) -> None:
        """Issue the next action, if it is an all-gather."""
        if isinstance(self._next, Unshard):
            self.issue_next()

    def reduce_what_is_ready(self) -> None:
        """Issue the reductions that come next, as long as backward is through with their units."""
        while isinstance(action := self._next, Reduce):
            if action.unit.awaited_inputs or any(bucket.missing for bucket in action.buckets):
                return
            self.issue_next()

    def finish_backward(self) -> bool:
        """Do the rest of a backward pass, if one has begun. Returns whether it had."""
        if not self._issued:
            return False
        self.issue_rest()
        self.finish_reductions()
        return True

    def pass_over_rest(self) -> None:
        """Issue the rest of a forward pass, and keep nothing: from here on ranks ask each other for units."""
        while isinstance(action := self._next, Unshard):
            self.issue_next()
            action.unit.reshard()

    def issue_rest(self) -> None:
        """Issue what this rank has skipped."""
        while self._next:
            self.issue_next()

    def make_room(self) -> None:
        """Wait until another unit's gradients may be made: fewer than `IN_FLIGHT` units' are on their way."""
        self.finish_reductions(IN_FLIGHT - 1)

    def finish_reductions(self, left: int = 0) -> None:
        """Wait for the oldest reduce-scatters until those of `left` actions are in flight, and free their gradients."""
        while len(self.in_flight) > left:
            for bucket in self.in_flight.pop(0):
                bucket.finish_reduction()

    def _root_is_done(self) -> bool:
        """Whether backward is through with the root: all its gradients are made.

        A frozen parameter has no gradient to tell that, so a root with frozen parameters stays whole until the end.
        """
        comes_again = any(action.unit is self.root for action in self._pass.actions[self._issued :])
        return not (self.keeps_root or comes_again) and all(flat.trainable for flat in self.root.flats)
