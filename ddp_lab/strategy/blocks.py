"""The blocks of a model, found without naming any model: the modules that repeat."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn


def uses_of_parameters(module: nn.Module) -> Counter[int]:
    """By id of a parameter: how many modules hold it. A tied weight has more than one."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def find_blocks(module: nn.Module, may_share: bool = False) -> list[nn.Module]:
    """The outermost modules that repeat, in registration order: at least two of a class in one list or sequence, those
    that are on other ranks among them (`stands_for`).

    A module that shares a parameter with a module outside it is not a block: the parameter is needed elsewhere, too.

    Args:
        may_share: It is one if these are others of its list alone, or it stands there twice.
    """
    uses, blocks = uses_of_parameters(module), []
    for holder, block in _repeated_children(module):
        inside = uses_of_parameters(holder if may_share else block)
        if all(uses[key] == inside[key] for key in uses_of_parameters(block)):
            blocks.append(block)
    return blocks


def parts_around(module: nn.Module, blocks: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below `module` that are a block or contain no block, by each of their names."""
    first_names = dict(module.named_children())
    for name, child in module._modules.items():
        if child is not None and (child in blocks or blocks.isdisjoint(child.modules())):
            yield path + name, child
        elif child is not None and name in first_names:
            yield from parts_around(child, blocks, f"{path}{name}.")


def _repeated_children(parent: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
    kinds = {child: getattr(child, "stands_for", type(child)) for child in parent.children()}
    holders = [child for child in kinds if kinds[child] is not type(child) or any(True for _ in child.parameters())]
    members = [child for child in parent._modules.values() if child in holders]
    classes = Counter(kinds[c] for c in members) if isinstance(parent, nn.ModuleList | nn.Sequential) else Counter()
    for child in holders:
        if classes[type(child)] >= 2:
            yield parent, child
        else:
            yield from _repeated_children(child)
