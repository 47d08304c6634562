"""The meshes of a cluster: those that a model and a batch fit, and why others are left out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.plan import Case
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR, Mesh
from expert_parallel.parallelize import shared_mixtures
from pipeline_parallel.partition import chain_of, costs_of, cut_by_cost
from tensor_parallel.plan import BY_MODEL_TYPE


def all_meshes(cluster: Cluster) -> Iterator[Mesh]:
    """Those whose `tp` stays within a node, and whose pipelines fill nodes or parts of one. Ranks that see different
    samples are `dp`; where there are several nodes also `replicate` and `shard`, so that shards stay within a node."""
    nodes, per_node = cluster.nodes, cluster.ranks_per_node
    for stages, degree in product(range(1, nodes * per_node + 1), range(1, per_node + 1)):
        inner = stages * degree
        if per_node % degree or nodes * per_node % inner or (per_node % inner and inner % per_node):
            continue
        model = {name: ranks for name, ranks in ((PIPELINE, stages), (TENSOR, degree)) if ranks > 1}
        samples, shard = nodes * per_node // inner, per_node // inner
        yield Mesh(({DATA: samples} if samples > 1 or not model else {}) | model)
        if nodes > 1 and shard > 1:
            yield Mesh({REPLICATE: nodes, SHARD: shard} | model)


def meshes_of_experts(cluster: Cluster) -> Iterator[Mesh]:
    """Those whose `ep` stays within a node; other ranks are `dp`."""
    for degree in range(2, cluster.ranks_per_node + 1):
        if cluster.ranks_per_node % degree == 0:
            others = cluster.world_size // degree
            yield Mesh(({DATA: others} if others > 1 else {}) | {EXPERT: degree})


def on_all_meshes(case: Case, settings: Mapping[str, Mapping[str, Any]]) -> tuple[list[Case], list[str]]:
    """The case on each mesh that fits, and a line for each that does not. A mixture is tried with `ep`, too.

    Args:
        settings: Those that go with a dimension of the mesh alone, by dimension.

    Raises:
        UserError: none fits.
    """
    found: list[Case] = []
    left_out: list[str] = []
    is_mixture = hasattr(case.model.configuration(), "num_experts_per_tok")
    for mesh in [*all_meshes(case.cluster), *(meshes_of_experts(case.cluster) if is_mixture else ())]:
        own = [values.items() for name, values in settings.items() if mesh.degree(name) > 1]
        try:
            config = replace(case.config, mesh=str(mesh), **{name: value for values in own for name, value in values})
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
        mesh.require_ranks(case.cluster.world_size, case.cluster.ranks_per_node)
        if case.config.cuts_layers:
            require_cuttable(case, mesh.degree(TENSOR))
        if case.config.has_experts:
            with torch.device("meta"):
                shared_mixtures(case.model.build(), mesh.degree(EXPERT))
        if case.config.has_stages:
            with torch.device("meta"):
                chain, are_blocks = chain_of(case.model.build())
            cut_by_cost(costs_of(chain), are_blocks, mesh.degree(PIPELINE) * case.config.stages_per_rank)
    assert case.micro_batch_size > 0
    return case


def require_cuttable(case: Case, size: int) -> None:
    """Check that the model's layers can be cut over `size` ranks, between heads.

    Raises:
        UserError: they cannot.
    """
    model, config = case.model, case.model.configuration()
    if model.type not in BY_MODEL_TYPE and not case.config.has_experts:
        raise UserError(f"--mesh with tp: {model.name} is a {model.type}; only {', '.join(BY_MODEL_TYPE)} can be cut")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if heads % size or (kv_heads % size and size % kv_heads):  # several ranks may hold the same keys and values
        of_keys = f" and {kv_heads} of keys and values" if kv_heads != heads else ""
        raise UserError(f"{model.name} has {heads} heads{of_keys}, which {size} ranks of tp cannot share")
