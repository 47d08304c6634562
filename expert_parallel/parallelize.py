"""Turns mixtures of experts of transformers into ones whose experts are cut over the ranks of `ep`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from context_parallel.parallelize import parallelize_for as cut_model
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import EXPERT, MeshGroups
from ddp_lab.runtime.settings.mesh import SIGMOID
from ddp_lab.strategy.accounting import EVERYONE, Collective
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.replicated import broadcast_from_rank0
from expert_parallel.balance import Balance
from expert_parallel.dispatch import Compute, through_experts
from expert_parallel.experts import Experts
from expert_parallel.router import Router, Way
from tensor_parallel.cuts import CutParameters, cut_evenly
from tensor_parallel.plan import enclosing
from tensor_parallel.traffic import Recomputed

ROUTERS = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Of transformers, that this one stands in for."""
PARAMETERS = ("down_proj", "gate_up_proj")
"""Of the experts of a layer in their models."""


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """Cut `module` in place as a run's settings say: its experts over `ep`, or what else there is. Rank 0's parameters
    win. Collective.

    Raises:
        UnsupportedError: it cannot be cut so.
    """
    if EXPERT not in groups.mesh.degrees:
        return cut_model(module, config, groups, device)
    assert groups.expert is not None
    mixtures, settings = mixtures_of(module), getattr(module, "config", None)
    if not mixtures or settings is None:
        raise UnsupportedError(
            f"--mesh with ep: {type(module).__name__} has no experts that are known here; take Mixtral, Qwen2-MoE or "
            "Qwen3-MoE, --workload sample-moe, or dp"
        )
    way = Way(config.router_scores == SIGMOID, config.router_bias is not None, config.capacity_factor)
    coefficient = settings.router_aux_loss_coef if settings.output_router_logits and not way.has_bias else 0.0
    size = dist.get_world_size(groups.expert)
    broadcast_from_rank0([*module.parameters(), *module.buffers()], groups.data)
    settings.output_router_logits = False  # its own term is that of one rank
    balance = Balance(coefficient, config.router_bias or 0.0, groups.data)
    parameters = CutParameters(dist.get_rank(groups.expert))
    recomputed = Recomputed.of(module, config.strategy.activation_checkpointing)
    traffic = Traffic(mixtures, groups, balance, recomputed)
    for layer, (name, mixture) in enumerate(mixtures.items()):
        experts, gate = mixture.experts, mixture.gate
        count = len(experts.gate_up_proj)
        if count % size:
            raise UnsupportedError(f"--mesh with ep={size}: {name} has {count} experts; take an ep that divides them")
        cut = cut_evenly(name, "experts", count, 0, size)
        for one in PARAMETERS:
            parameters.cut(experts, f"{name}.experts", one, cut)
        mixture.experts = Experts(experts.gate_up_proj, experts.down_proj, experts.act_fn, size, traffic.through)
        normalizes = getattr(gate, "norm_topk_prob", True)
        mixture.gate = Router(gate.weight, gate.top_k, normalizes, layer, balance, way)
    module.register_forward_pre_hook(balance.begin, prepend=True, with_kwargs=True)
    module.register_forward_hook(balance.end)
    parts = ModelParallel(groups.expert, groups.everyone, parameters.cuts, groups.tensor, traffic=traffic)
    return replace(parts, copies=groups.copies, balance=balance)


class Traffic:
    """What a step sends over `ep`.

    Args:
        names: Of the mixtures.
        recomputed: Which blocks run again in backward.
    """

    def __init__(self, names: Iterable[str], groups: MeshGroups, balance: Balance, recomputed: Recomputed) -> None:
        assert groups.expert is not None
        self._names, self._group, self._balance, self._recomputed = list(names), groups.expert, balance, recomputed
        self._everyone = dist.get_world_size(groups.data)
        self._experts = self._row_bytes = 0  # of the latest forward pass

    def through(self, hidden: Tensor, chosen: Tensor, weights: Tensor, compute: Compute, experts: int) -> Tensor:
        """See `through_experts`."""
        summed, nbytes = through_experts(hidden, chosen, weights, experts, compute, self._group)
        self._experts, self._row_bytes = experts, nbytes
        return summed

    def __call__(self, micro_batches: int) -> list[Collective]:
        """Rows go there and back in forward and in backward; a rank sends those of its own tokens, and as many as it
        gets, which on average over ranks are as many."""
        layers = len(self._names)
        again = sum(enclosing(name, self._recomputed.again) is not None for name in self._names)
        ahead, backward = layers * self._balance.passes_ahead(micro_batches), layers * micro_batches
        forward = ahead + backward + again * micro_batches
        size, counts = dist.get_world_size(self._group), 8 * self._experts * forward
        rows = self._row_bytes * (forward + backward)
        sent = [
            Collective("all_to_all", forward, counts, size, "bookkeeping", EXPERT),
            Collective("all_to_all", 2 * (forward + backward), rows, size, "activations", EXPERT, varies=True),
        ]
        load = 8 * (layers * (self._experts + 1) + 1)
        return [*sent, Collective("all_reduce", 1, load, self._everyone, "bookkeeping", EVERYONE)]


def mixtures_of(module: nn.Module) -> dict[str, Any]:
    """By name, the parts of a model that have one of `ROUTERS`."""
    return {name: one for name, one in module.named_modules() if type(getattr(one, "gate", None)).__name__ in ROUTERS}
