"""A mixture of experts over `tp`: attention, and MLPs around experts, are cut as those of Llama, and each expert as an
MLP: the outputs of its first matrix and the inputs of its second. All ranks of `tp` have whole routers and route alike.
"""

from dataclasses import replace

from torch import nn

from ddp_lab.strategy.model_parallel import Cut
from tensor_parallel.cuts import cut_evenly, cut_in_parts
from tensor_parallel.plan import Column, Plan, Region, Row, Shared, Style, llama, matches


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

    Raises:
        UnsupportedError: there are fewer than ranks.
    """
    over_experts = cut_evenly(name, "experts", experts, 0, size)
    if tensor == 1:
        return {"gate_up_proj": over_experts, "down_proj": over_experts}
    ranges = tuple(part for part in over_experts.ranges for _ in range(tensor))
    rows, columns = (cut_evenly(name, "inner features", inner, dim, tensor) for dim in (1, 2))

    def both(cut: Cut) -> Cut:
        return replace(over_experts, ranges=ranges, then=replace(cut, ranges=cut.ranges * size))

    return {"gate_up_proj": both(cut_in_parts(rows, 2)), "down_proj": both(columns)}
