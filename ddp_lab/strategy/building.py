"""What happens to a module before a strategy's own hooks do."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.groups import exchange_device, settle_at_exit
from ddp_lab.strategy.communication.consistency import (
    require_castable,
    require_own_memory,
    require_same_parameters,
    require_supported_parameters,
)
from ddp_lab.strategy.communication.observer import follow_gradients
from ddp_lab.strategy.gradient_watch import GradientWatch
from ddp_lab.strategy.module_hooks import require_readable
from ddp_lab.strategy.options import FP16, NO_RECOMPUTATION, StrategyOptions
from ddp_lab.strategy.precision import bring_to

if TYPE_CHECKING:
    from ddp_lab.strategy.communication.loss_scale import LossScaler
    from ddp_lab.strategy.compilation import CompiledBlocks


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks that share the work. None: all."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("a strategy needs a process group: call torch.distributed.init_process_group first")
    settle_at_exit(group)
    return group


def prepared(
    module: nn.Module, options: StrategyOptions, group: dist.ProcessGroup, shards: bool
) -> "tuple[LossScaler | None, CompiledBlocks | None]":
    """Refuse what no strategy can train, then change the module as `options` say. Collective.

    Raises:
        UnsupportedError: says what cannot be trained, or what an option needs.
    """
    require_readable(module)
    require_supported_parameters(module)
    bring_to(module, options.precision)
    if shards:
        require_own_memory(module)
    if options.param_dtype:
        require_castable(module)
    require_same_parameters(module, group, exchange_device(group, next(module.parameters()).device))
    compiled = scaler = None
    if options.compile_backend:
        from ddp_lab.strategy.compilation import CompiledBlocks

        compiled = CompiledBlocks(module, options.compile_backend)
    if options.activation_checkpointing != NO_RECOMPUTATION:
        from ddp_lab.strategy.recompute import checkpoint_activations

        checkpoint_activations(module, options.activation_checkpointing)
    if options.loss_chunks > 1:
        from ddp_lab.strategy.chunked_loss import chunk_loss

        chunk_loss(module, options.loss_chunks)
    if FP16 in (options.precision, options.param_dtype):
        from ddp_lab.strategy.communication.loss_scale import LossScaler

        scaler = LossScaler.of(module, options)
    return scaler, compiled


def watch_over(leaves: Mapping[str, Tensor]) -> GradientWatch:
    """The watch over the gradients of `leaves`, which errors name by these names."""
    watch = GradientWatch(leaves)
    follow_gradients(watch)
    return watch
