"""Which modules form a unit (the blocks that repeat, and what is around them), and in which order units run.

The order is learned in the first forward pass, and is the same on every rank. Modules may run in another order than
they are registered, and ranks may run different ones. Rank 0's order counts. Units that rank 0 did not run are put
where another rank ran them. Until the first forward pass is over, the order is that of registration.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ddp_lab.strategy.blocks import find_blocks, uses_of_parameters
from ddp_lab.strategy.replicated import bytes_of
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.unit import Unit


@dataclass(frozen=True)
class UnitPlan:
    """Modules whose parameters are needed together, and these parameters."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]


def plan_units(module: nn.Module, cap_bytes: float) -> list[UnitPlan]:
    """One unit for each block; in a module without blocks, neighbouring layers of up to `cap_bytes` form a unit.

    A layer holds parameters itself. Modules in it belong to it: it may read their weights without calling them, as
    `nn.MultiheadAttention` does. Other parameters belong to the root: those directly in the module or in a list of
    parameters, those that several layers share, and all parameters where there would be a single unit.
    """
    blocks = find_blocks(module)
    if blocks:
        return [UnitPlan([block], list(block.parameters())) for block in blocks]
    uses = uses_of_parameters(module)
    plans: list[UnitPlan] = []
    inside: set[nn.Module] = set()
    for layer in module.modules():
        if layer is module or layer in inside or next(layer.parameters(recurse=False), None) is None:
            continue
        inside |= set(layer.modules())
        own = [p for p in layer.parameters() if uses[id(p)] == 1]
        if not own or isinstance(layer, nn.ParameterList | nn.ParameterDict):  # which nobody calls
            continue
        if plans and bytes_of(plans[-1].parameters) + bytes_of(own) <= cap_bytes:
            plans[-1].modules.append(layer)
            plans[-1].parameters.extend(own)
        else:
            plans.append(UnitPlan([layer], own))
    return plans if len(plans) > 1 else []


def around_units(
    module: nn.Module, plans: Iterable[UnitPlan], apart: Iterable[nn.Parameter] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The root's parameters: those registered before the first unit's, and the others (norms, heads).

    Args:
        apart: Parameters that belong to none of the two, such as embeddings in a unit of their own.
    """
    taken = {id(p) for plan in plans for p in plan.parameters}
    set_apart = {id(p) for p in apart}
    before: list[nn.Parameter] = []
    after: list[nn.Parameter] = []
    current = before
    for parameter in module.parameters():
        if id(parameter) in taken:
            current = after
        elif id(parameter) not in set_apart:
            current.append(parameter)
    return before, after


def segments(module: nn.Module, with_frozen: bool) -> Iterator[list[nn.Parameter]]:
    """Trainable parameters in the order in which backward makes gradients: heads, blocks, embeddings. They share no
    bucket, so that forward can begin before the parameters of later blocks have arrived.

    Args:
        with_frozen: And last the frozen ones, which are cast too; their own values are saved.
    """
    plans = plan_units(module, 0) if find_blocks(module) else []
    before, after = around_units(module, plans)
    for segment in (after, [p for plan in plans for p in plan.parameters], before):
        yield [p for p in segment if p.requires_grad and p.numel()]
    if with_frozen:
        yield [p for p in module.parameters() if not p.requires_grad and p.numel()]


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
