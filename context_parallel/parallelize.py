"""Cuts the tokens of a model's batches over the ranks of `cp`, below whatever else cuts the model."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from context_parallel.attention import NAME, Context, attention
from context_parallel.ulysses import require_heads
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import CONTEXT, TENSOR, MeshGroups
from ddp_lab.runtime.settings.mesh import PYTORCH, ULYSSES
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.replicated import broadcast_from_rank0
from pipeline_parallel.parallelize import parallelize_for as cut_model


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """Cut `module` in place as a run's settings say: its layers over `tp`, the module itself over `pp`, its tokens over
    `cp`. Rank 0's parameters win. Collective.
    """
    if not config.cuts_tokens:
        return cut_model(module, config, groups, device)
    require_known(module, config)
    if config.cuts_layers or config.has_stages:
        parts = cut_model(module, config, groups, device)
    else:
        parts = ModelParallel(groups.model, groups.everyone, {}, groups.tensor)
    context = Context(groups.context, config.context_parallel)
    put_in(module, context)
    traffic = ContextTraffic(len(attentions(module)), context)
    broadcast_from_rank0([*module.parameters(), *module.buffers()], groups.data)
    return replace(parts, context_size=context.ring.size, context_traffic=traffic, part_of_tokens=context.part)


def require_known(module: nn.Module, config: RunConfig) -> None:
    """
    Raises:
        UnsupportedError: it is no causal language model of transformers whose attention can be replaced; or its heads
            do not go with the ranks.
    """
    name, settings = type(module).__name__, getattr(module, "config", None)
    if getattr(module, "loss_type", "") not in (None, "ForCausalLM") or not attentions(module):
        raise UnsupportedError(
            f"--mesh with cp: {name} is no causal language model of transformers, which it must be; or take dp"
        )
    text: Any = settings.get_text_config()  # type: ignore[union-attr]
    if config.context_parallel == ULYSSES:
        require_heads(text.num_attention_heads // config.degree(TENSOR), config.degree(CONTEXT))


def attentions(module: nn.Module) -> list[str]:
    """The names of its causal attentions."""
    return [name for name, part in module.named_modules() if getattr(part, "is_causal", False)]


def put_in(module: nn.Module, context: Context) -> None:
    """Let a model of transformers run on a part of the tokens."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    for name in attentions(module):
        layer: Any = module.get_submodule(name)
        layer.context, layer.config._attn_implementation = context, NAME
    module.config._attn_implementation = NAME  # type: ignore[union-attr]
    module.register_forward_pre_hook(context.cut, prepend=True, with_kwargs=True)
    module.register_forward_hook(context.join, with_kwargs=True)


@dataclass(frozen=True)
class ContextTraffic:
    """What a step sends over `cp`, in so many attentions."""

    attentions: int
    context: Context

    def __call__(self, micro_batches: int) -> list[Collective]:
        size, (nbytes, elements), queries = self.context.ring.size, self.context.keys, self.context.queries
        passes = micro_batches * self.attentions
        if self.context.way == ULYSSES:
            return [Collective("all_to_all", 4 * passes, 4 * passes * (queries + nbytes), size, "activations")]
        # keys and values go around in forward and backward, their gradients, in fp32 or wider, in backward
        turns, exact = (size - 1) * passes, elements * max(4, nbytes // elements if elements else 4)
        payload = 2 * 2 * turns * (2 * nbytes + exact)  # of keys and of values, sent and received
        at_least = self.context.way == PYTORCH  # which gathers keys and values instead, and sends as many bytes
        return [Collective("send_recv", 6 * turns, payload, size, "activations", at_least=at_least)]
