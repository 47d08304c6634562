"""Transformers' own expert parallelism: `DistributedConfig(fsdp_size=N, ep_size=n)`, here over the meshes of a run.

Each rank of `ep` holds whole experts, as `DTensor`s. `AllToAllEP` sends tokens to them and back, with counts before, as
the hand-written exchange does. FSDP2 is around it: over `dp` for experts, over all ranks for all else. What
`from_pretrained` does with a model while it loads one is done here to a model that is there.

A model's term for an even load is transformers' own: of each rank's micro-batch, not of the global batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed.expert_parallel import apply_expert_parallelism

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import DATA, EXPERT, TENSOR, MeshGroups
from ddp_lab.runtime.settings.mesh import SIGMOID
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.capabilities import MeshRefusal
from ddp_lab.strategy.model_parallel import ModelParallel
from expert_parallel.parallelize import mixtures_of, shared_mixtures
from reference.fsdp2_over_mesh import FSDP2OverMesh

NO_EXPERTS: MeshRefusal = (
    lambda mesh: mesh is None or EXPERT not in mesh.degrees or mesh.model_size > 1,
    "transformers_ep: must be with --mesh and ep, without tp; take zero3, or --mesh ep=N",
)
STYLES = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
"""Of the parts of a mixture: the plan that transformers has for Mixtral and others, in their order."""


def parallelize_by_transformers(
    module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device
) -> ModelParallel:
    """Only look at the model: the strategy cuts it, when rank 0's parameters have come."""
    shared_mixtures(module, groups.mesh.degree(EXPERT))
    if config.router_bias is not None or config.router_scores == SIGMOID:
        raise UnsupportedError(
            "--router-bias and --router-scores: transformers_ep routes as the model does; take zero3"
        )
    expert_group = groups.expert
    assert expert_group is not None
    rows = Collective("all_to_all", 0, 0, expert_group.size(), "activations", EXPERT, varies=True, at_least=True)
    return ModelParallel(
        groups.tensor, groups.everyone, {}, device_mesh=groups.device_mesh, traffic=lambda micro_batches: [rows]
    )


class TransformersEP(FSDP2OverMesh):
    """FSDP2 around the experts of transformers."""

    supports = replace(FSDP2OverMesh.supports, experts=True, mesh_refusals=(NO_EXPERTS,))
    frees_blocks_after_forward = True

    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.process_group, self.device.type)

    def shard_within_blocks(self, settings: dict[str, Any]) -> None:
        """Cut experts over `ep`, and shard each rank's experts over `dp`.

        The gradient of an expert comes from the tokens of all ranks, and the ranks that hold it sum theirs. FSDP2 must
        divide by all ranks, and does so itself where there is nothing to sum.
        """
        meshes, copies = self.device_mesh, self.device_mesh[DATA].size()
        mixtures = mixtures_of(self.module)
        plan = {f"{name}.{part}": style for name in mixtures for part, style in STYLES.items()}
        apply_expert_parallelism(self.module, meshes[EXPERT], meshes[TENSOR], plan, "all_to_all")
        for mixture in mixtures.values():
            experts = fully_shard(mixture.experts, **settings | {"mesh": meshes[DATA]})
            experts.set_gradient_divide_factor(float(self.group_size))
            experts.set_force_sum_reduction_for_comms(copies > 1)
