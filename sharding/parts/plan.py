"""Which modules form a unit: the blocks that repeat, what is around them, and among this the embeddings."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from ddp_lab.strategy.modules import find_blocks, uses_of_parameters
from ddp_lab.strategy.replicated import bytes_of


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
        parameters = [p for p in layer.parameters() if uses[id(p)] == 1]
        if not parameters or isinstance(layer, nn.ParameterList | nn.ParameterDict):  # which nobody calls
            continue
        if plans and bytes_of(plans[-1].parameters) + bytes_of(parameters) <= cap_bytes:
            plans[-1].modules.append(layer)
            plans[-1].parameters.extend(parameters)
        else:
            plans.append(UnitPlan([layer], parameters))
    return plans if len(plans) > 1 else []


def around_units(
    module: nn.Module, plans: Iterable[UnitPlan], apart: Iterable[nn.Parameter] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The root's parameters: those registered before the first unit's, and the others (norms, heads).

    Args:
        apart: Parameters that belong to none of the two, such as embeddings in a unit of their own.
    """
    in_units, apart = {p for plan in plans for p in plan.parameters}, set(apart)
    before, after = list[nn.Parameter](), list[nn.Parameter]()
    current = before
    for parameter in module.parameters():
        if parameter in in_units:
            current = after
        elif parameter not in apart:
            current.append(parameter)
    return before, after


def find_embeddings(module: nn.Module, plans: Iterable[UnitPlan]) -> UnitPlan:
    """The embeddings outside of all other units.

    Not those that share their weight with another module, or that change it in forward (`max_norm`).
    """
    in_units, uses = {p for plan in plans for p in plan.parameters}, uses_of_parameters(module)
    embeddings: list[nn.Module] = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Embedding)
        and type(layer).forward is nn.Embedding.forward
        and layer.max_norm is None
        and layer.weight not in in_units
        and uses[id(layer.weight)] == 1
    ]
    return UnitPlan(embeddings, [p for layer in embeddings for p in layer.parameters(recurse=False)])


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
