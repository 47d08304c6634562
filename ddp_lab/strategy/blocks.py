"""The blocks of a model, found without naming any model: the modules that repeat."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn


def uses_of_parameters(module: nn.Module) -> Counter[int]:
    """By id of a parameter: how many modules hold it. A tied weight has more than one."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that repeat, in registration order: at least two of a class in one list or sequence, those
    that are on other ranks among them (`stands_for`).

    A module that shares a parameter with a module outside it is not a block: the parameter is needed elsewhere, too.
    """
    blocks = list(_repeated_children(module))
    uses = uses_of_parameters(module)
    inside = [uses_of_parameters(block) for block in blocks]
    return [block for block, own in zip(blocks, inside, strict=True) if all(uses[key] == n for key, n in own.items())]


def parts_around(module: nn.Module, blocks: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below `module` that are a block or contain no block, with their names."""
    for name, child in module.named_children():
        if child in blocks or blocks.isdisjoint(child.modules()):
            yield path + name, child
        else:
            yield from parts_around(child, blocks, f"{path}{name}.")


def _repeated_children(parent: nn.Module) -> Iterable[nn.Module]:
    kinds = {child: getattr(child, "stands_for", type(child)) for child in parent.children()}
    holders = [child for child in kinds if kinds[child] is not type(child) or any(True for _ in child.parameters())]
    classes = Counter(kinds[c] for c in holders) if isinstance(parent, nn.ModuleList | nn.Sequential) else Counter()
    for child in holders:
        if classes[type(child)] >= 2:
            yield child
        else:
            yield from _repeated_children(child)
