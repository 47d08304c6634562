"""The order in which ZeRO-3 issues its collectives: the same on every rank.

All ranks of a process group must issue the same collectives in the same order, but the units that a rank runs may
depend on its data. So each pass has a list of actions that all ranks work through. With units 1 to n:
- forward: unshard the embeddings, the root, unit 1, unit 2, ..., unit n;
- backward: reduce the root's head; unshard n-1, reduce n; unshard n-2, reduce n-1; ...; reduce 1; reduce the embeddings
  and the rest of the root.

The head is what the root runs after unit n (last norm, head): backward makes its gradients first. The embeddings are
not in the root because they are freed between forward and backward (`sharding.options.embeddings`).

A rank that skips a unit issues the unit's actions all the same, when it comes to a later action.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddp_lab.runtime.errors import OneRankError
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.plan import AgreedOrder
from sharding.parts.unit import Unit

IN_FLIGHT = 2
"""Units whose gradients may be on their way at once. With a single one, backward would wait for the link whenever a
reduction takes longer than the time until the next unit's first gradient."""


class Unshard(NamedTuple):
    """All-gather a unit's parameters."""

    unit: Unit


class Reduce(NamedTuple):
    """Reshard a unit, whose backward is over, and reduce-scatter these gradients of its parameters."""

    unit: Unit
    buckets: tuple[ShardedGradientBucket, ...]


class Pass:
    """The actions of a forward or backward pass.

    Attributes:
        place: The index of a unit's all-gather, and of a bucket's reduction.
    """

    def __init__(self, actions: Sequence[Unshard | Reduce]) -> None:
        self.actions = actions
        self.place: dict[Unit | ShardedGradientBucket, int] = {}
        for index, action in enumerate(actions):
            self.place |= dict.fromkeys([action.unit] if isinstance(action, Unshard) else action.buckets, index)


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
        self._runs = list(units)  # a unit that runs twice is there twice
        self._head: tuple[ShardedGradientBucket, ...] = ()
        self._plan()
        self.begin_forward()

    def follow(self, order: AgreedOrder) -> None:
        """Use the order in which units run, instead of the order in which they are registered."""
        self._runs, self._head = order.runs, order.head_buckets
        self.units = list(dict.fromkeys(order.runs))
        self._plan()

    @property
    def last_unit(self) -> Unit | None:
        """The unit that runs last in forward and first in backward. It stays whole between the two."""
        return self._runs[-1] if self._runs else None

    def begin_forward(self) -> None:
        self.in_flight: list[tuple[ShardedGradientBucket, ...]] = []  # all finished, or the step was abandoned
        self._pass, self._issued = self._forward, 0

    def begin_backward(self, of_several: bool = False, drops_gradients: bool = False) -> None:
        """A backward pass may follow.

        Args:
            of_several: It may be that of several forward passes. A parameter then has its gradient when all of them are
                through with it, so everything is unsharded before the first reduction.
            drops_gradients: Nobody wants them, so nothing is reduced.
        """
        self._pass, self._issued = self._backward_of_several if of_several else self._backward, 0
        self.drops_gradients = drops_gradients

    def _plan(self) -> None:
        """The actions of both passes. They stay the same until the order in which units run is known."""
        self._forward = Pass([Unshard(self.embeddings), Unshard(self.root), *map(Unshard, self.units)])
        actions = self._backward_actions()
        self._backward = Pass(actions)
        self._backward_of_several = Pass(sorted(actions, key=lambda action: isinstance(action, Reduce)))

    def _backward_actions(self) -> list[Unshard | Reduce]:
        """Unit i-1 is unsharded before unit i is reduced.

        A unit that runs several times is unsharded once and reduced after its earliest run: forward runs 1, 2, 1 give
        unshard 2, reduce 2, reduce 1.
        """
        runs = list(reversed(self._runs))
        actions: list[Unshard | Reduce] = [Reduce(self.root, self._head)] if self._head else []
        for index, unit in enumerate(runs):
            if index + 1 < len(runs) and runs[index + 1] not in runs[: index + 1]:
                actions.append(Unshard(runs[index + 1]))
            if unit not in runs[index + 1 :]:
                actions.append(Reduce(unit, tuple(unit.buckets)))
        if self.embeddings.buckets:
            actions.append(Reduce(self.embeddings, tuple(self.embeddings.buckets)))
        if rest := tuple(bucket for bucket in self.root.buckets if bucket not in self._head):
            actions.append(Reduce(self.root, rest))
        return actions

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
        raise OneRankError(
            f"a gradient of a parameter of shape {tuple(bucket.flat.parameters[0].shape)} came after its unit was "
            "reduced: modules run in another order than in the first step, or backward for inputs alone came first; "
            "use zero2 for such a model"
        )

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

    def finish_backward(self) -> None:
        """Do the rest of a backward pass, if one has begun."""
        if self._issued:
            self.issue_rest()
            self.finish_reductions()

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
