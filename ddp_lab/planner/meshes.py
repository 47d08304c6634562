"""The meshes of a cluster: those that a model and a batch fit, and why others are left out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ddp_lab.planner.accounting import require_heads
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.plan import Case
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA, PIPELINE, REPLICATE, SHARD, TENSOR, Mesh
from tensor_parallel.plan import BY_MODEL_TYPE


def all_meshes(cluster: Cluster) -> Iterator[Mesh]:
    """Those whose `tp` stays within a node. Ranks that see different samples are `dp`; where there are several nodes
    also `replicate` and `shard`, so that shards stay within a node."""
    nodes, per_node = cluster.nodes, cluster.ranks_per_node
    for degree in range(1, per_node + 1):
        shard, left = divmod(per_node, degree)
        if left:
            continue
        tensor = {TENSOR: degree} if degree > 1 else {}
        data = {DATA: nodes * shard} if nodes * shard > 1 or not tensor else {}
        yield Mesh(data | tensor)
        if nodes > 1 and shard > 1:
            yield Mesh({REPLICATE: nodes, SHARD: shard} | tensor)


def on_all_meshes(case: Case, with_tensor: Mapping[str, Any]) -> tuple[list[Case], list[str]]:
    """The case on each mesh that fits, and a line for each that does not.

    Args:
        with_tensor: Settings where the mesh has `tp`.

    Raises:
        UserError: none fits.
    """
    found: list[Case] = []
    left_out: list[str] = []
    for mesh in all_meshes(case.cluster):
        config = replace(case.config, mesh=str(mesh), **(with_tensor if mesh.model_size > 1 else {}))
        try:
            found.append(required(replace(case, config=config)))
        except UserError as error:
            left_out.append(f"{mesh}: {error}")
    if not found:
        raise UserError(f"--mesh auto: no mesh fits; {left_out[0]}")
    return found, left_out


def required(case: Case) -> Case:
    """The case.

    Raises:
        UserError: its mesh fits the cluster, the batch or the model not.
    """
    mesh = case.mesh
    if mesh is not None:
        if PIPELINE in mesh.degrees:
            raise UserError(f"--mesh {mesh}: a pipeline is not planned yet; leave pp out")
        mesh.require_ranks(case.cluster.world_size, case.cluster.ranks_per_node)
        if mesh.model_size > 1:
            require_cuttable(case, mesh.model_size)
    assert case.micro_batch_size > 0
    return case


def require_cuttable(case: Case, size: int) -> None:
    """Check that the model's layers can be cut over `size` ranks, between heads.

    Raises:
        UserError: they cannot.
    """
    model, config = case.model, case.model.configuration()
    if model.type not in BY_MODEL_TYPE:
        raise UserError(f"--mesh with tp: {model.name} is a {model.type}; only {', '.join(BY_MODEL_TYPE)} can be cut")
    heads = config.num_attention_heads
    require_heads(model.name, heads, getattr(config, "num_key_value_heads", heads), size)
