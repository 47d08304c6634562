"""Lets the blocks of a model be computed again in backward. Names in the model stay as they are."""

from torch import nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.blocks import find_blocks
from ddp_lab.strategy.recompute.by_torch import TorchCheckpointedForward
from ddp_lab.strategy.recompute.checkpoint import CheckpointedForward
from ddp_lab.strategy.recompute.setting import Recomputation

FLAG = "--activation-checkpointing"


def checkpoint_activations(module: nn.Module, setting: str) -> None:
    """Replace the `forward` of blocks as `setting` says (`ddp_lab.strategy.recompute.setting`).

    The method is replaced, and no module is put around the block: so keys of the state dict stay the same, and hooks on
    the block run in the first forward pass alone. A strategy that gathers parameters in such hooks does not gather them
    again.

    Raises:
        UnsupportedError: the module has no blocks, keeps keys and values of earlier tokens, or computes blocks again
            by itself.
    """
    recomputation = Recomputation.parse(setting)
    if recomputation is None:
        return
    blocks = find_blocks(module)
    if not blocks:
        raise UnsupportedError(
            f"{FLAG} {setting}: {type(module).__name__} has no blocks, which are two or more modules of one class in a "
            "list or sequence"
        )
    if any(getattr(getattr(part, "config", None), "use_cache", False) for part in module.modules()):
        raise UnsupportedError(
            f"{FLAG} {setting}: a block that is computed again would add its keys and values to the cache twice; set "
            "config.use_cache = False"
        )
    if any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        raise UnsupportedError(
            f"{FLAG} {setting}: {type(module).__name__} computes its blocks again by itself, so they would run three "
            "times; call gradient_checkpointing_disable()"
        )
    for block in blocks[:: recomputation.every]:
        if recomputation.by_torch:
            block.forward = TorchCheckpointedForward(block, block.forward, recomputation.policy)
        else:
            block.forward = CheckpointedForward(block, block.forward)
