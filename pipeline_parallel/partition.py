"""Which part of a model is in which stage.

A model is a chain: modules before its blocks (embeddings), the blocks, and modules after them (last norm, head, and
with it the loss). A stage is a run of this chain that holds at least one block. A step is as fast as its slowest stage,
so the chain is cut where the slowest stage is fastest.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from torch import nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.modules import find_blocks, parts_around
from tensor_parallel.plan import matches

Chain = list[tuple[str, nn.Module]]
"""Modules in the order in which a forward pass calls them, each with its name in the model."""
Split = Sequence[int] | Sequence[Sequence[str]]
"""For each stage the number of its blocks, or the names of its modules, in which `*` is any part of a name."""


def partition(module: nn.Module, stages: int, split: Split | None = None) -> tuple[Chain, list[int]]:
    """The chain of a model, and the stage of each of its modules. Default: cut by cost."""
    if split and len(split) != stages:
        raise UnsupportedError(f"--mesh with pp: {len(split)} stages are given, but the mesh has {stages}")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"--mesh with pp: each block of {kind_of(module)}'s decoder needs what the encoder makes"
        )
    if split and not isinstance(split[0], int):
        chain, places = _listed(module, cast(Sequence[Sequence[str]], split))
    else:
        chain, are_blocks = chain_of(module)
        of_blocks = cast(Sequence[int], split) or cut_by_cost(costs_of(chain), are_blocks, stages)
        places = stages_of(are_blocks, of_blocks)
    inside = {layer for _, part in chain for layer in part.modules()}
    for path, layer in module.named_modules():
        tensor_names = [name for name in layer.state_dict() if "." not in name]
        if tensor_names and layer not in inside:
            name = f"{path}.{tensor_names[0]}".lstrip(".")
            raise UnsupportedError(f"--mesh with pp: {name} is in no module that a stage could hold; put it into one")
    return chain, places


def _listed(module: nn.Module, split: Sequence[Sequence[str]]) -> tuple[Chain, list[int]]:
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    places: dict[str, int] = {}
    for stage, patterns in enumerate(split):
        for pattern in patterns:
            matching = [
                name for name in names if matches(name, pattern) and not any(overlap(name, placed) for placed in places)
            ]
            if not matching:
                raise UnsupportedError(f'--plan: "{pattern}" of stage {stage} matches no module that is in none yet')
            places |= dict.fromkeys(matching, stage)
    return [(name, module.get_submodule(name)) for name in places], list(places.values())


def overlap(name: str, other_name: str) -> bool:
    """Whether one of two modules is the other, or holds it."""
    return f"{name}.".startswith(f"{other_name}.") or f"{other_name}.".startswith(f"{name}.")


def kind_of(module: nn.Module) -> str:
    return type(module).__name__


def chain_of(module: nn.Module) -> tuple[Chain, list[bool]]:
    """The modules that hold a model's parameters and saved buffers, in order, and for each whether it is a block: one
    of those that repeat in a list, or any part of an `nn.Sequential`.
    """
    kind, blocks = kind_of(module), set(find_blocks(module, may_share=True))
    holders = [part for part in module.modules() if not blocks.isdisjoint(part.children())]
    if len(holders) != 1 or isinstance(holders[0], nn.Sequential):
        around = [part for part in module.modules() if isinstance(part, nn.Sequential) and blocks <= {*part.modules()}]
        blocks = set((around[-1] if blocks else around[0]).children()) if around else blocks
    if not blocks:
        raise UnsupportedError(f"--mesh with pp: {kind} has no blocks, two or more modules of one class in a list")
    chain = [(name, part) for name, part in parts_around(module, blocks) if part.state_dict()]
    are_blocks = [part in blocks for _, part in chain]
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name, part in chain if part in blocks))
    first, last = are_blocks.index(True), len(are_blocks) - are_blocks[::-1].index(True)
    if len(lists) > 1 or not all(are_blocks[first:last]):
        between = f"blocks in several lists ({', '.join(lists)})" if len(lists) > 1 else "parameters between its blocks"
        raise UnsupportedError(f"--mesh with pp: {kind} has {between}; list the modules of each stage in a --plan")
    return chain, are_blocks


def costs_of(chain: Chain) -> list[int]:
    """What each module computes for a token: the elements of its matrices. Looking up an embedding costs nothing."""

    def cost(part: nn.Module) -> int:
        layers = [layer for layer in part.modules() if not isinstance(layer, nn.Embedding)]
        weights = {p for layer in layers for p in layer.parameters(recurse=False)}
        return sum(p.numel() for p in weights if p.ndim >= 2)

    return [cost(part) for _, part in chain]


def cut_by_cost(costs: Sequence[int], are_blocks: Sequence[bool], stages: int) -> list[int]:
    """How many blocks each stage has, so that the costliest stage costs least. What is before the blocks belongs to the
    first stage, what is after them to the last."""
    blocks = [cost for cost, is_block in zip(costs, are_blocks, strict=True) if is_block]
    if len(blocks) < stages:
        raise UnsupportedError(f"--mesh with pp: {len(blocks)} blocks cannot be cut into {stages} stages; take fewer")
    first = are_blocks.index(True)
    around = sum(costs[:first]), sum(costs[first + len(blocks) :])
    sums = [0, *accumulate(blocks)]
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}  # (stages, blocks) done: slowest, cuts
    for stage in range(1, stages + 1):
        extra = around[0] * (stage == 1) + around[1] * (stage == stages)
        for end in range(stage, len(blocks) - (stages - stage) + 1):
            options = [
                (max(slowest, sums[end] - sums[begin] + extra), [*cuts, end - begin])
                for begin in range(stage - 1, end)
                if (before := best.get((stage - 1, begin)))
                for slowest, cuts in [before]
            ]
            best[stage, end] = min(options)
    return best[stages, len(blocks)][1]


def stages_of(are_blocks: Sequence[bool], split: Sequence[int]) -> list[int]:
    """The stage of each module of the chain. `split`: the number of blocks in each stage."""
    count = sum(are_blocks)
    if sum(split) != count or min(split) < 1:
        numbers = ",".join(map(str, split))
        raise UnsupportedError(
            f"--pipeline-split {numbers}: {len(split)} stages of {sum(split)} blocks, but the model has {count} "
            "blocks, and each stage at least one"
        )
    first = are_blocks.index(True)
    of_blocks = [stage for stage, number in enumerate(split) for _ in range(number)]
    return [0] * first + of_blocks + [len(split) - 1] * (len(are_blocks) - first - count)
