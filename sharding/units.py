"""The repeated blocks of a module, found without naming a model class: what is sharded and gathered as one unit."""

from collections import Counter
from collections.abc import Iterator

from torch import nn


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated children: two or more of one class that hold parameters, in a ModuleList or a Sequential.

    A block that shares a parameter with anything outside itself (tied weights) is left out.
    """
    uses = _parameter_uses(module)
    return [block for block in _repeated(module) if all(uses[p] == n for p, n in _parameter_uses(block).items())]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    classes: Counter[type] = Counter()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        classes.update(type(child) for child in children if _can_be_block(child))
    for child in children:
        if _can_be_block(child) and classes[type(child)] > 1:
            yield child
        else:
            yield from _repeated(child)


def _can_be_block(module: nn.Module) -> bool:
    """Whether it has parameters, and a forward pass before which they can be gathered, which mere containers lack."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.parameters())


def _parameter_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many modules hold each parameter as their own."""
    return Counter(p for part in module.modules() for p in part._parameters.values() if p is not None)
