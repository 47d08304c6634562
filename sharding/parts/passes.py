"""The actions of a forward or backward pass of ZeRO-3, which `sharding.parts.schedule` works through."""

from collections.abc import Sequence
from typing import NamedTuple

from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.unit import Unit


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


def in_backward(runs: Sequence[Sequence[Unit]]) -> list[Unshard | Reduce]:
    """The actions of units that run so in forward (`sharding.parts.order.AgreedOrder`), whose last one is whole.

    Unit i-1 is unsharded before unit i is reduced. A unit that runs several times is unsharded once and reduced after
    its earliest run: forward runs 1, 2, 1 give unshard 2, reduce 2, reduce 1.
    """
    actions: list[Unshard | Reduce] = []
    latest: list[Reduce] = []
    whole = {runs[-1][-1]} if runs else set()
    for index, part in reversed(list(enumerate(runs))):
        unshards = [Unshard(unit) for unit in dict.fromkeys(part) if unit not in whole]
        whole.update(part)
        actions += [*unshards[:1], *latest, *unshards[1:]]
        earlier = {unit for before in runs[:index] for unit in before}
        done = [unit for place, unit in enumerate(part) if unit not in earlier and unit not in part[:place]]
        reductions = [Reduce(unit, tuple(unit.buckets)) for unit in reversed(done)]
        actions += reductions[:-1]
        latest = reductions[-1:]
    return [*actions, *latest]
