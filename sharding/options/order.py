"""In which order units run: learned in the first forward pass with a graph, and the same on every rank.

Modules may run in another order than they are registered, and ranks may run different ones. Rank 0's order counts.
Units that rank 0 did not run are put where another rank ran them. Until the ranks agree, the order is that of
registration.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint

from ddp_lab.strategy.modules import ModuleHook
from sharding.options.units import BlockUnit
from sharding.parts.unit import Unit, UnitAction

Run = tuple[int, int | None]
"""The index of a unit, and the number of the outermost activation checkpoint around it."""


DIFFERS = (
    "ranks run the same blocks in other orders or numbers, so zero3 holds all parameters at once: zero2 sends less"
)


class ExecutionOrder:
    """Notes which modules run.

    Args:
        module: The whole model.
        root: The root's units.
        units: In registration order, all but the root and the embeddings.

    Attributes:
        latest: The unit that has begun last in this forward pass.
        runs: Units in the order in which they run in forward. A unit that runs twice is there twice. Those that an
            activation checkpoint may compute again before any of their backward passes are in one list.
        heads: Units of the root whose gradients backward makes before those of all other units.
        differs: Ranks run the same units in different orders, or a different number of times.
    """

    def __init__(self, module: nn.Module, root: Sequence[Unit], units: Sequence[BlockUnit]) -> None:
        self._module, self._root, self._units = module, root, list(units)
        self.is_agreed = self.differs = False
        self.runs, self.heads = [[unit] for unit in units], list[Unit]()
        self._agreed: list[int] = []
        self._visits_needed: dict[BlockUnit, float] = dict.fromkeys(units, 1)
        self._checkpoint: FrameType | None = None
        self._checkpoints = 0
        self._ran: list[tuple[nn.Module, int | None]] = []
        unit_modules = {member for unit in units for member in unit.modules}
        inside = {m for member in unit_modules for m in member.modules()} - unit_modules
        note = ModuleHook(lambda m, _: self._note(m))
        self._hooks = [m.register_forward_pre_hook(note) for m in module.modules() if m not in inside]
        self.begin_forward()

    def begin_forward(self) -> None:
        self._ran.clear()
        self._visits: defaultdict[BlockUnit, int] = defaultdict(int)
        self.latest: BlockUnit | None = None

    def begin(self, unit: BlockUnit) -> None:
        """A module of `unit` runs next."""
        self._visits[unit] += unit is not self.latest
        self.latest = unit

    def is_over(self, unit: BlockUnit) -> bool:
        """Whether `unit` may be freed when a later one runs.

        Before the ranks agree, one that was passed over may still run. Afterwards, not before it has run as often as
        agreed, and never where ranks differ.
        """
        return self._visits[unit] >= self._visits_needed[unit]

    def _note(self, module: nn.Module) -> None:
        frame = outermost_checkpoint()
        self._checkpoints += frame is not self._checkpoint
        self._checkpoint = frame
        self._ran.append((module, None if frame is None else self._checkpoints))

    def agree(self, embeddings_saved: bool, group: dist.ProcessGroup) -> bool:
        """Gather every rank's first forward pass, and agree on one order. Collective, once.

        Returns:
            Whether autograd has saved an embedding's weight on any rank (on this rank: `embeddings_saved`).
        """
        for hook in self._hooks:
            hook.remove()
        self._checkpoint = None
        index_of = {member: index for index, unit in enumerate(self._units) for member in unit.modules}
        runs = [(index_of[member], number) for member, number in self._ran if member in index_of]
        forward_passes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(forward_passes, (runs, self._heads(), embeddings_saved), group)
        rank_runs: list[list[Run]] = [runs for runs, *_ in forward_passes]
        orders = [visits(index for index, _ in runs) for runs in rank_runs]
        agreed = merge_orders(orders, len(self._units))
        self.is_agreed, self._agreed = True, agreed
        self.differs = any(order != visits(index for index in agreed if index in order) for order in orders)
        times = Counter(agreed)
        for index, unit in enumerate(self._units):
            is_kept = self.differs or index == agreed[-1]
            self._visits_needed[unit] = float("inf") if is_kept else times[index] if times[index] > 1 else 0
        parts = [[index] for index in agreed] if self.differs else joined(agreed, rank_runs)
        self.runs = [[self._units[index] for index in part] for part in parts]
        self.heads = [self._root[index] for index in forward_passes[0][1]]
        return any(saved for *_, saved in forward_passes)

    def following(self, unit: BlockUnit) -> str:
        """The name of what runs after `unit` as agreed."""
        position = len(self._agreed) - self._agreed[::-1].index(self._units.index(unit))
        return self.name(self._units[self._agreed[position]]) if position < len(self._agreed) else "the end of forward"

    def name(self, unit: BlockUnit) -> str:
        return next(name for name, module in self._module.named_modules() if module in unit.modules)

    def _heads(self) -> list[int]:
        """Which units of the root belong to modules that ran after all blocks."""
        ran = [member for member, _ in self._ran]
        of_units = {member for unit in self._units for member in unit.modules}
        end = max((time for time, member in enumerate(ran) if member in of_units), default=len(ran))
        after = set(ran[end + 1 :]) - set(ran[: end + 1])
        before = (module for module in self._module.modules() if module not in after)
        early = {p for module in before for p in module.parameters(recurse=False)}  # weights tied to the head, too
        trained = ([p for bucket in unit.buckets for p in bucket.flat.parameters] for unit in self._root)
        return [index for index, parameters in enumerate(trained) if parameters and early.isdisjoint(parameters)]


def outermost_checkpoint() -> FrameType | None:
    """The outermost call of torch's `checkpoint` that is under way."""
    outermost, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == checkpoint.__file__:
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


def visits(order: Iterable[int]) -> list[int]:
    """The order with repetitions in a row counted once."""
    return [index for index, _ in groupby(order)]


def merge_orders(orders: Sequence[Sequence[int]], count: int) -> list[int]:
    """The order in which the first rank ran `count` units, with the units that it did not run.

    Such a unit follows the unit that came before it on a rank that did run it, or else the unit that was registered
    before it.
    """
    merged = list(orders[0])
    for order in (*orders[1:], range(count)):
        position = 0
        for index in order:
            if index not in merged:
                merged.insert(position, index)
            position = merged.index(index) + 1
    return merged


def joined(merged: Sequence[int], orders: Sequence[Sequence[Run]]) -> list[list[int]]:
    """`merged`, which all ranks follow, in parts. Units that a checkpoint may compute again together are in one part.

    Ranks skip units. So where no rank shows that two neighbours are in different checkpoints, they may be in the same.
    """
    together: set[int] = set()  # positions that are in one checkpoint with the one before
    apart: set[int] = set()  # or not
    for order in orders:
        position, latest = -1, None
        for index, number in order:
            place = position if position >= 0 and merged[position] == index else merged.index(index, position + 1)
            if number is None:
                apart |= {place, place + 1}
            elif number == latest:
                together.update(range(position + 1, place + 1))
            elif place == position + 1:
                apart.add(place)
            position, latest = place, number
    has_checkpoints = any(number is not None for order in orders for _, number in order)
    parts: list[list[int]] = []
    for position, index in enumerate(merged):
        if position and has_checkpoints and (position in together or position not in apart):
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def in_backward(runs: Sequence[Sequence[Unit]]) -> list[UnitAction]:
    """The actions of backward after a forward pass in the order of `runs` (`ExecutionOrder.runs`). The last unit stays
    whole.

    Unit i-1 is unsharded before unit i is reduced. A unit that runs several times is unsharded once and reduced after
    its earliest run: forward runs 1, 2, 1 give unshard 2, reduce 2, reduce 1. Where a checkpoint goes around units k to
    m, backward runs them forwards first: unshard k, ..., m; reduce m, ..., k.
    """
    actions: list[UnitAction] = []
    latest: list[UnitAction] = []
    unsharded = {runs[-1][-1]} if runs else set()
    for index, part in reversed(list(enumerate(runs))):
        unshards = [UnitAction("unshard", unit) for unit in dict.fromkeys(part) if unit not in unsharded]
        unsharded.update(part)
        actions += [*unshards[:1], *latest, *unshards[1:]]
        earlier = {unit for earlier_part in runs[:index] for unit in earlier_part}
        finished_units = [unit for place, unit in enumerate(part) if unit not in earlier and unit not in part[:place]]
        reductions = [UnitAction("reduce", unit) for unit in reversed(finished_units)]
        actions += reductions[:-1]
        latest = reductions[-1:]
    return [*actions, *latest]
