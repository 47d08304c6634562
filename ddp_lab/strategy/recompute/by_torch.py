"""The same with torch's own `torch.utils.checkpoint`, and selective checkpointing by its policies.

Torch keeps the graph of the first forward pass, with empty places for what it would have saved. When backward needs the
first of them, forward runs again and fills them all.

Selective checkpointing is the middle: results that are dear to compute stay (matrix products, attention), and what is
cheap (norms, activation functions, sums, casts) is computed again. A block then costs nearly no extra time.
Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models". `op` keeps the results of
attention and of every second matrix product: torchtitan's selective checkpointing by operator.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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

from ddp_lab.strategy.recompute.checkpoint import buffers_kept
from ddp_lab.strategy.recompute.setting import OP


def operators(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


PRODUCTS = operators("mm", "addmm")
KEPT = PRODUCTS | operators(
    *("bmm", "baddbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators whose results a policy keeps; `op` those of every second of `PRODUCTS`, the first among them."""


class Policy:
    """What one run of a block keeps."""

    def __init__(self, name: str) -> None:
        self._every, self._seen = 2 if name == OP else 1, -1

    def __call__(self, _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        self._seen += operator in PRODUCTS
        is_left_out = operator in PRODUCTS and self._seen % self._every
        keeps = operator in KEPT and not is_left_out
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class TorchCheckpointedForward:
    """Stands in for the `forward` of a block.

    Args:
        policy: Keep results by this `Policy`. Default: none.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any], policy: str | None) -> None:
        self.block, self.forward, self.policy = block, forward, policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        forward = partial(self.forward, **kwargs)
        with autocast_uncached():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of the first forward pass, and of the second."""
        first, second = nullcontext(), nullcontext()
        if self.policy:
            first, second = create_selective_checkpoint_contexts(Policy(self.policy))
        return first, within(buffers_kept(self.block), second)


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


@contextmanager
def within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def keeps_outputs() -> bool:
    """Whether activation checkpointing by a policy runs, which may keep what the last operator has answered."""
    kinds = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())
