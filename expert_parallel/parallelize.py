"""Cuts the experts of a mixture of transformers over the ranks of `ep`, and each of them over those of `tp`.

Over `tp` attention, and MLPs around experts, are cut as those of Llama, and each expert as an MLP: the outputs of its
first matrix and the inputs of its second. All ranks of `tp` have whole routers and route alike.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from context_parallel.parallelize import parallelize_for as cut_model
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import DATA, EXPERT, TENSOR, MeshGroups
from ddp_lab.runtime.settings.mesh import SIGMOID
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.model_parallel import Cut, ModelParallel
from ddp_lab.strategy.replicated import broadcast_from_rank0
from expert_parallel.balance import LoadBalance
from expert_parallel.dispatch import Compute, through_experts
from expert_parallel.experts import Experts
from expert_parallel.router import Router
from tensor_parallel.cuts import CutParameters, cut_evenly, cut_in_parts
from tensor_parallel.parallelize import parallelize as cut_layers
from tensor_parallel.plan import Column, Plan, Region, Row, Shared, Style, llama, matches, read_plan
from tensor_parallel.traffic import OperatorPlace, Precision, TensorTraffic

ROUTERS = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Of transformers, that this one stands in for."""


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """Cut `module` in place as a run's settings say: its experts over `ep`, and other layers over `tp`. Rank 0's
    parameters win. Collective.
    """
    if EXPERT not in groups.mesh.degrees:
        return cut_model(module, config, groups, device)
    assert groups.expert is not None and groups.experts is not None
    size = dist.get_world_size(groups.expert)
    mixtures = shared_mixtures(module, size)
    if (settings := getattr(module, "config", None)) is None:
        raise UnsupportedError(f"--mesh with ep: {type(module).__name__} has no config of transformers; give it one")
    sigmoid, has_bias = config.router_scores == SIGMOID, config.router_bias is not None
    coefficient = settings.router_aux_loss_coef if settings.output_router_logits and not has_bias else 0.0
    broadcast_from_rank0([*module.parameters(), *module.buffers()], groups.data)
    settings.output_router_logits = False  # the model's own term sees one rank
    balance = LoadBalance(coefficient, config.router_bias or 0.0, groups.data)
    parameters = CutParameters(dist.get_rank(groups.experts))
    parts, over_tensor, tensor = ModelParallel(groups.experts, groups.everyone, {}, groups.tensor), None, 1
    # other layers over tp
    if config.cuts_layers:
        tensor, options = groups.mesh.degree(TENSOR), config.strategy
        plan = read_plan(Path(config.plan)) if config.plan else plan_around(module, tensor)
        precision = Precision.of(options.precision, options.param_dtype)
        layers = cut_layers(module, plan, groups, device, precision=precision)
        assert isinstance(layers.traffic, TensorTraffic)
        parts, over_tensor = replace(layers, group=groups.experts), layers.traffic
    # experts and routers of each mixture
    traffic = ExpertTraffic(len(mixtures), groups, balance, over_tensor)
    for layer, (name, mixture) in enumerate(mixtures.items()):
        experts, gate = mixture.experts, mixture.gate
        for weight_name, cut in within_each(
            name, len(experts.gate_up_proj), experts.down_proj.shape[-1], size, tensor
        ).items():
            parameters.cut(experts, f"{name}.experts", weight_name, cut)
        if over_tensor is not None:
            traffic.cuts_each(name, experts.down_proj.shape[1])
        group = groups.tensor if over_tensor else None
        weights = experts.gate_up_proj, experts.down_proj, experts.act_fn
        mixture.experts = Experts(*weights, size, traffic.through, group)
        normalizes = getattr(gate, "norm_topk_prob", True)
        mixture.gate = Router(gate.weight, gate.top_k, normalizes, layer, balance, sigmoid, has_bias)
    module.register_forward_pre_hook(balance.begin, prepend=True, with_kwargs=True)
    module.register_forward_hook(balance.end)
    cuts, of_experts = {**parts.cuts, **parameters.cuts}, frozenset(parameters.cuts)
    return replace(parts, cuts=cuts, traffic=traffic, copies=groups.copies, of_experts=of_experts, balance=balance)


def plan_around(module: nn.Module, size: int) -> Plan:
    """How all but experts of Mixtral, Qwen2-MoE and Qwen3-MoE is cut over `size` ranks. Some layers have an MLP instead
    of experts, or one beside them."""
    names, settings = [name for name, _ in module.named_modules()], module.config
    plan: dict[str, Style] = {p: style for p, style in llama(settings, size).items() if ".mlp" not in p}
    plan |= {f"model.layers.*.self_attn.{kind}_norm": Shared() for kind in "qk"}  # of each head
    for name, part in module.named_modules():
        if isinstance(getattr(part, "gate_proj", None), nn.Linear):
            plan[name], plan[f"{name}.down_proj"] = Region(), Row()
            plan[f"{name}.gate_proj"] = plan[f"{name}.up_proj"] = Column()
    return {pattern: style for pattern, style in plan.items() if any(matches(name, pattern) for name in names)}


def within_each(name: str, experts: int, inner: int, size: int, tensor: int) -> dict[str, Cut]:
    """How the parameters of a layer's experts are cut over the ranks of `ep` and `tp`, in their order.

    Args:
        name: Of the mixture, for errors.
        inner: Outputs of an expert's first matrix, gates aside.
        size, tensor: The degrees of `ep` and of `tp`.
    """
    over_experts = cut_evenly(name, "experts", experts, 0, size)
    if tensor == 1:
        return {"gate_up_proj": over_experts, "down_proj": over_experts}
    ranges = tuple(part for part in over_experts.ranges for _ in range(tensor))
    rows, columns = (cut_evenly(name, "inner features", inner, dim, tensor) for dim in (1, 2))

    def over_both(cut: Cut) -> Cut:
        return replace(over_experts, ranges=ranges, then=replace(cut, ranges=cut.ranges * size))

    return {"gate_up_proj": over_both(cut_in_parts(rows, 2)), "down_proj": over_both(columns)}


class ExpertTraffic:
    """What a step sends over `ep`, and over `tp`.

    Args:
        layers: How many have experts.
        balance: Of the load of experts, which ranks tell each other.
        over_tensor: What the layers send over `tp`; None: nothing. The mixtures' f and g are put to it here.
    """

    def __init__(
        self,
        layers: int,
        groups: MeshGroups,
        balance: LoadBalance,
        over_tensor: TensorTraffic | None = None,
    ) -> None:
        assert groups.expert is not None
        self._layers, self._group, self._balance = layers, groups.expert, balance
        self._everyone = dist.get_world_size(groups.data)
        self._experts = self._row_bytes = self._weight_bytes = 0  # of the latest forward pass
        self._over_tensor = over_tensor

    def through(self, hidden: Tensor, chosen: Tensor, weights: Tensor, compute: Compute, experts: int) -> Tensor:
        """See `through_experts`."""
        self._experts, self._weight_bytes = experts, weights.nbytes
        summed, self._row_bytes = through_experts(hidden, chosen, weights, experts, compute, self._group)
        return summed

    def cuts_each(self, name: str, features: int) -> None:
        """The experts of a mixture are cut over `tp`, too: hidden states of so many features come and go."""
        assert self._over_tensor is not None
        for places in (self._over_tensor.f, self._over_tensor.g):
            places.append(OperatorPlace(f"{name}.experts", features))

    def __call__(self, micro_batches: int) -> list[Collective]:
        """Rows go there and back in forward and in backward; a rank sends those of its own tokens, and as many as it
        gets, which on average over ranks are as many."""
        passes_ahead = self._balance.passes_ahead(micro_batches)
        backward, forward = self._layers * micro_batches, self._layers * (passes_ahead + micro_batches)
        load = 8 * (self._layers * self._experts + 1)
        size, counts = dist.get_world_size(self._group), 8 * self._experts * forward
        over = EXPERT if 1 < size == self._everyone else DATA  # all that see different samples
        rows = self._row_bytes * (forward + backward)
        sent = [
            Collective("all_to_all", forward, counts, size, "bookkeeping", EXPERT),
            Collective("all_to_all", 2 * (forward + backward), rows, size, "activations", EXPERT, varies=True),
            Collective("all_reduce", 1, load, self._everyone, "bookkeeping", over),
        ]
        if self._over_tensor is not None:
            weights = self._weight_bytes * backward
            sent.append(Collective("all_reduce", backward, weights, self._over_tensor.ranks.size, "activations"))
            sent += self._over_tensor.of_forward(passes_ahead)
            sent += self._over_tensor(micro_batches)
        return [collective for collective in sent if collective.count]


def mixtures_of(module: nn.Module) -> dict[str, Any]:
    """By name, the parts of a model that have one of `ROUTERS`."""
    return {
        name: part for name, part in module.named_modules() if type(getattr(part, "gate", None)).__name__ in ROUTERS
    }


def shared_mixtures(module: nn.Module, size: int) -> dict[str, Any]:
    """The same, whose experts `size` ranks share."""
    mixtures = mixtures_of(module)
    if not mixtures:
        raise UnsupportedError(
            f"--mesh with ep: {type(module).__name__} has no experts that are known here; take Mixtral, Qwen2-MoE or "
            "Qwen3-MoE, --workload sample-moe, or dp"
        )
    for name, mixture in mixtures.items():
        if (count := len(mixture.experts.gate_up_proj)) % size:
            raise UnsupportedError(f"--mesh with ep={size}: {name} has {count} experts; take an ep that divides them")
    return mixtures
