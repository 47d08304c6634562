"""Which modules a model is made of, found without naming any model: the blocks that repeat, and what is left."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from training.replicated import bytes_of


@dataclass(frozen=True)
class UnitPlan:
    """Modules whose parameters are needed together, and these parameters."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that repeat, in registration order: at least two of a class in one list or sequence.

    A block that shares a parameter with a module outside it is none: the parameter would be needed elsewhere, too.
    """
    blocks = list(_repeated_children(module))
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    inside = [Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False)) for block in blocks]
    return [block for block, own in zip(blocks, inside, strict=True) if all(uses[key] == n for key, n in own.items())]


def _repeated_children(parent: nn.Module) -> Iterable[nn.Module]:
    holders = [child for child in parent.children() if next(child.parameters(), None) is not None]
    classes = Counter(map(type, holders)) if isinstance(parent, nn.ModuleList | nn.Sequential) else Counter()
    for child in holders:
        if classes[type(child)] >= 2:
            yield child
        else:
            yield from _repeated_children(child)


def plan_units(module: nn.Module, cap_bytes: float) -> list[UnitPlan]:
    """A unit a block; in a module without blocks, neighbouring layers of up to `cap_bytes` together.

    Parameters in no unit (directly in the module, shared by several layers, or all if one unit would hold them) are
    the root's.
    """
    blocks = find_blocks(module)
    if blocks:
        return [UnitPlan([block], list(block.parameters())) for block in blocks]
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    plans: list[UnitPlan] = []
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if uses[id(p)] == 1]
        if layer is module or not own:
            continue
        if plans and bytes_of(plans[-1].parameters) + bytes_of(own) <= cap_bytes:
            plans[-1].modules.append(layer)
            plans[-1].parameters.extend(own)
        else:
            plans.append(UnitPlan([layer], own))
    return plans if len(plans) > 1 else []


def find_tables(module: nn.Module, plans: Iterable[UnitPlan]) -> UnitPlan:
    """Embeddings outside of all units. Backward does not read them: a lookup passes its gradient on by the indices.

    Not those that share their weight with another module, or change it (`max_norm`).
    """
    taken = {id(p) for plan in plans for p in plan.parameters}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    tables = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Embedding)
        and type(layer).forward is nn.Embedding.forward
        and layer.max_norm is None
        and id(layer.weight) not in taken
        and uses[id(layer.weight)] == 1
    ]
    return UnitPlan(list(tables), [p for layer in tables for p in layer.parameters(recurse=False)])


def around_units(
    module: nn.Module, plans: Iterable[UnitPlan], apart: Iterable[nn.Parameter] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The root's parameters: those registered before the first unit's (embeddings, if they are not set `apart`), and
    the others (norms, heads)."""
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
