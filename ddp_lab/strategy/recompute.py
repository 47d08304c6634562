"""Activation checkpointing: a block keeps its inputs for backward, and computes the rest again.

What autograd keeps. An operator's backward needs values of its forward: a matrix product its inputs, an activation
function its argument. Autograd keeps them from forward until backward, for every operator of every block at once.

A checkpointed block keeps its inputs, and the state of the random generators and of autocast. Of all that autograd
would keep, torch's `checkpoint` puts empty places into the graph. When backward needs the first of them, the block's
forward runs once more and fills them all, as far as backward reads. So the activations of a single block exist at a
time. Dropout draws the same mask as before, since the generators are set back.

It costs one more forward pass of the block: a step of 3 units of compute (forward 1, backward 2) takes 4.

With `selective`, results that are dear to compute stay: those of attention and of every second matrix product, as in
torchtitan. What is cheap (norms, activation functions, sums, casts) and the other products run again.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al., 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy.modules import find_blocks, tensors_in
from ddp_lab.strategy.options import NO_RECOMPUTATION, SELECTIVE

FLAG = "--activation-checkpointing"


def operators(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


PRODUCTS = operators("mm", "addmm")
"""With `selective`, the results of every second one stay, the first of a block among them."""
KEPT = operators(
    *("bmm", "baddbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Results of all of these stay."""


def checkpoint_activations(module: nn.Module, setting: str) -> None:
    """Replace the `forward` of blocks as `setting` says (`ddp_lab.strategy.options.RECOMPUTATION`).

    The method is replaced, and no module is put around the block: so keys of the state dict stay the same, and hooks on
    the block run in the first forward pass alone. A strategy that gathers parameters in such hooks does not gather them
    again.
    """
    if setting == NO_RECOMPUTATION:
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
    for block in blocks:
        block.forward = CheckpointedForward(block, block.forward, setting == SELECTIVE)


class CheckpointedForward:
    """Stands in for the `forward` of a block.

    Raises:
        OneRankError: the block changes an input in place.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any], is_selective: bool) -> None:
        self.block, self.forward, self.is_selective = block, forward, is_selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        versions = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        forward = partial(self.forward, **kwargs)
        with autocast_uncached():
            outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)
        if any(tensor._version != version for tensor, version in versions):
            raise OneRankError(
                f"{FLAG}: {type(self.block).__name__} changes an input in place, so it cannot be computed again: "
                f"use {FLAG} {NO_RECOMPUTATION}"
            )
        return outputs

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of the first forward pass, and of the second."""
        if not self.is_selective:
            return nullcontext(), second_pass(self.block, nullcontext())
        products = count()

        def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            keeps = next(products) % 2 == 0 if operator in PRODUCTS else operator in KEPT
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        keeping, with_kept = create_selective_checkpoint_contexts(policy)
        return keeping, second_pass(self.block, with_kept)


@contextmanager
def second_pass(block: nn.Module, with_results: AbstractContextManager[Any]) -> Iterator[None]:
    """A context in which the block may change its buffers (BatchNorm: its statistics). Afterwards they are as the first
    pass left them. `with_results`: keeps results of the first pass."""
    copies = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with with_results:
            yield
    finally:
        for buffer, before in copies:
            buffer.data.copy_(before)  # `.data`: autograd may have saved the buffer, and would refuse a changed one


@contextmanager
def autocast_uncached() -> Iterator[None]:
    """Within this context, autocast casts a weight each time. Otherwise the two passes of a block that runs twice may
    differ in which of them casts."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def keeps_outputs() -> bool:
    """Whether selective checkpointing runs, which may keep what the last operator has answered."""
    kinds = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
