"""What a plan chooses from: axes, each of which a flag fixes or a search tries, and the cases that they make."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

import ddp
import sharding
import tensor_parallel
from ddp_lab.planner.contracts import Costs, Setting
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.hardware import outside_bytes
from ddp_lab.planner.costs.links import costs_of
from ddp_lab.planner.model import Model
from ddp_lab.planner.rates import Price
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.config import RunConfig, labelled
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import CONTEXT, DATA, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR, Mesh
from ddp_lab.runtime.settings.data import CAUSAL_LM
from expert_parallel.parallelize import shared_mixtures
from pipeline_parallel import partition
from tensor_parallel.plan import BY_MODEL_TYPE

GIB = 2**30
REGISTRIES = {
    "main_ddp.py": ddp.REGISTRY,
    "main_shard.py": sharding.REGISTRY,
    "main_parallel.py": tensor_parallel.REGISTRY,
}
WITH_DIMENSION = {
    TENSOR: ("sequence_parallel",),
    PIPELINE: ("pipeline_schedule", "stages_per_rank", "pipeline_split"),
    EXPERT: ("router_scores", "router_bias"),
    CONTEXT: ("context_parallel",),
}
"""Settings that go with one dimension of a mesh alone."""
SHARDED = ("zero1", "zero2", "zero3")
SEARCHED = ("bucket_ddp_async", "tp", *SHARDED)
"""Choices of a search that names none."""
ALONE = ("bucket_ddp_async",)
"""The choice of one device where none is named."""
LONG = 8192
"""Tokens of a sample from which on all meshes are those that cut samples, too: shorter ones fit in one piece."""
FULL = 4
"""A pipeline has up to so many micro-batches a stage by default, so that the bubble is a small part of the step."""


def entrypoints(mesh: Mesh | None) -> dict[str, str]:
    """The choices that a mesh is for, in display order, each with the script that trains with it."""
    scripts = ["main_ddp.py", "main_shard.py"]
    if mesh and (mesh.model_size > 1 or EXPERT in mesh.degrees):
        scripts = ["main_parallel.py"]
    elif mesh and SHARD in mesh.degrees:
        scripts = ["main_shard.py"]
    return {choice: script for script in scripts for choice in REGISTRIES[script].sentences}


@dataclass(frozen=True)
class Case:
    """A point of the space: what is to be trained, how, and on what.

    Attributes:
        config: Choice, mesh, batch, precision and all else that the runner takes.
        sequence_length: Tokens of a sample, padding included.
        price: None if it is not known.
        tokens: How many the whole training takes; None if that is not asked.
        contention: As in `Costs`; None: what the table assumes.
        is_fused: A compiler fuses operators, also where the runner's `--compile` does not go.
    """

    model: Model
    cluster: Cluster
    config: RunConfig
    sequence_length: int
    price: Price | None = None
    tokens: float | None = None
    contention: float | None = None
    is_fused: bool = False

    def but(self, **settings: Any) -> "Case":
        """The same with other values of these flags."""
        return replace(self, config=self.config.but(**settings))

    @cached_property
    def costs(self) -> Costs:
        is_cut, compiles = self.config.cuts_layers or self.config.has_stages, self.config.strategy.compile
        return costs_of(self.cluster, self.contention, self.is_fused or compiles, is_cut)

    @cached_property
    def mesh(self) -> Mesh | None:
        return Mesh.parse(self.config.mesh) if self.config.mesh else None

    def degree(self, dimension: str) -> int:
        return self.mesh.degree(dimension) if self.mesh else 1

    @property
    def data_ranks(self) -> int:
        return self.mesh.data_size if self.mesh else self.cluster.world_size

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self.config.micro_batch_size(self.data_ranks)

    @property
    def level(self) -> str:
        """Of recomputation."""
        return self.config.strategy.activation_checkpointing

    @cached_property
    def outside_bytes(self) -> float:
        """What a rank holds outside torch's allocator."""
        return outside_bytes(self.cluster, self.mesh)

    @property
    def usable_bytes(self) -> int:
        """What tensors of one rank may take."""
        return self.cluster.device.memory_bytes - int(self.outside_bytes)

    @property
    def name(self) -> str:
        """As folders of runs are called: `zero2@dp2-tp2`."""
        return labelled(self.config.choice, self.mesh.label if self.mesh else None)

    @property
    def entrypoint(self) -> str:
        return entrypoints(self.mesh)[self.config.choice]

    @property
    def setting(self) -> Setting:
        """What the simulator runs."""
        count, size = self.config.grad_accum_steps, self.micro_batch_size
        return Setting(
            self.config, self.model.build, lambda: self.model.micro_batches(count, size, self.sequence_length)
        )


@dataclass(frozen=True)
class Space:
    """The axes. Those with one value are fixed.

    Attributes:
        cases: One for each mesh, without a choice. They differ in nothing else.
        choices: Those that are wanted; empty: all that go with a mesh.
        left_out: A line for each mesh that does not fit.
        levels: Of recomputation, from the fastest and largest on.
        compiled: Whether blocks are compiled, the faster first.
        any_steps: Accumulation is free, so that a micro-batch may have any size.
        searches: What is slow is not simulated, and the table has the best alone.
        any_mesh: The mesh is free, so that what cannot fit or win is not simulated.
    """

    cases: Sequence[Case]
    choices: Sequence[str] = ()
    left_out: Sequence[str] = ()
    levels: Sequence[str] = ()
    compiled: Sequence[bool] = ()
    any_steps: bool = False
    searches: bool = False
    any_mesh: bool = False

    def __post_init__(self) -> None:
        existing = [name for registry in REGISTRIES.values() for name in registry.sentences]
        on_meshes = list(dict.fromkeys(name for case in self.cases for name in entrypoints(case.mesh)))
        for name in self.choices:
            if name not in existing:
                raise UserError(f"--choices: {unknown_name('strategy', name, existing)}")
            if name not in on_meshes and self.choices != SEARCHED:
                where = ", ".join(str(case.mesh) for case in self.cases if case.mesh) or "no mesh with tp or pp"
                raise UserError(f"--choices: {name} does not go with {where}; these do: {', '.join(on_meshes)}")

    def ways(self, case: Case) -> list[Case]:
        """The case at each level of recomputation, compiled where that is wanted and goes."""
        variants: list[Case] = []
        for level, compiled in product(self.levels or [case.level], self.compiled or [case.config.strategy.compile]):
            try:
                way = case.but(activation_checkpointing=level, compile=compiled)
            except UserError:  # it does not go with another setting
                continue
            variants += [way] * (not variants or variants[-1].level != level)
        return variants

    def roots(self) -> Iterator[Case]:
        """Each choice on each mesh with the largest micro-batch in the fastest way. Where a search is on one pipeline,
        whose bubble grows with the micro-batch, each micro-batch."""
        for case in self.cases:
            samples = case.micro_batch_size * case.config.grad_accum_steps
            steps = [case.config.grad_accum_steps]
            if self.any_steps and case.config.has_stages and not self.any_mesh:
                steps = [count for count in range(1, samples + 1) if samples % count == 0]
            for choice, count in product(entrypoints(case.mesh), steps):
                is_needless = self.searches and choice in SHARDED and case.data_ranks == 1
                if (choice in self.choices or not self.choices) and not is_needless:
                    yield from self.ways(case.but(choice=choice, grad_accum_steps=count))[:1]


# Meshes ---------------------------------------------------------------------------------------------------------------


def all_meshes(cluster: Cluster, also: Sequence[str] = ()) -> Iterator[Mesh]:
    """Those whose `tp`, and `ep` or `cp` if they are wanted `also`, stay within a node, and whose pipelines fill nodes
    or parts of one. Ranks that see different samples are `dp`; where there are several nodes also `replicate` and
    `shard`, so that shards stay within a node."""
    nodes, per_node, ranks = cluster.nodes, cluster.ranks_per_node, cluster.world_size
    for stages, degree in product(range(1, ranks + 1), range(1, per_node + 1)):
        inner = stages * degree
        if per_node % degree or ranks % inner or (per_node % inner and inner % per_node):
            continue
        model = {name: size for name, size in ((PIPELINE, stages), (TENSOR, degree)) if size > 1}
        samples, shard = ranks // inner, per_node // inner
        yield Mesh(({DATA: samples} if samples > 1 or not model else {}) | model)
        if nodes > 1 and shard > 1:
            yield Mesh({REPLICATE: nodes, SHARD: shard} | model)
    for name, degree in product(also, range(2, per_node + 1)):
        if per_node % degree == 0:
            yield Mesh(({DATA: ranks // degree} if ranks > degree else {}) | {name: degree})


def on_all_meshes(case: Case, settings: Mapping[str, Any]) -> tuple[list[Case], list[str]]:
    """The case on each mesh that fits, and a line for each that does not. A mixture is tried with `ep`, too, and a
    language model on long samples with `cp`. `settings`: among them those of `WITH_DIMENSION`."""
    cases: list[Case] = []
    left_out: list[str] = []
    also = [EXPERT] * hasattr(case.model.configuration(), "num_experts_per_tok")
    also += [CONTEXT] * (case.model.task == CAUSAL_LM and case.sequence_length >= LONG)
    for mesh in all_meshes(case.cluster, also):
        names = [name for dimension, names in WITH_DIMENSION.items() if mesh.degree(dimension) > 1 for name in names]
        try:
            with_mesh = replace(case.config, mesh=str(mesh), **{name: settings[name] for name in names})
            cases.append(required(replace(case, config=with_mesh)))
        except UserError as error:
            left_out.append(f"{mesh}: {error}")
    if not cases:
        raise UserError(f"--mesh auto: no mesh fits; {left_out[0]}")
    return cases, left_out


def required(case: Case) -> Case:
    """The case, if its mesh fits the cluster, the batch and the model; else a UserError says which does not."""
    mesh, config = case.mesh, case.config
    if mesh is not None:
        mesh.require_ranks(case.cluster.world_size, case.cluster.ranks_per_node)
        if config.cuts_tokens and config.has_stages:
            raise UserError("--mesh with cp and pp: no plan knows what both cost together; plan each with dp and tp")
        if config.cuts_layers:
            require_cuttable(case, mesh.degree(TENSOR))
        if config.has_experts or config.has_stages:
            with torch.device("meta"):
                module = case.model.build()
                if config.has_experts:
                    shared_mixtures(module, mesh.degree(EXPERT))
                else:
                    chain, are_blocks = partition.chain_of(module)
                    stages = mesh.degree(PIPELINE) * config.stages_per_rank
                    partition.cut_by_cost(partition.costs_of(chain), are_blocks, stages)
    assert case.micro_batch_size > 0
    return case


def require_cuttable(case: Case, size: int) -> None:
    """Check that the model's layers can be cut over `size` ranks, between heads."""
    model, config = case.model, case.model.configuration()
    if model.type not in BY_MODEL_TYPE and not case.config.has_experts:
        raise UserError(f"--mesh with tp: {model.name} is a {model.type}; only {', '.join(BY_MODEL_TYPE)} can be cut")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if heads % size or (kv_heads % size and size % kv_heads):  # several ranks may hold the same keys and values
        of_keys = f" and {kv_heads} of keys and values" if kv_heads != heads else ""
        raise UserError(f"{model.name} has {heads} heads{of_keys}, which {size} ranks of tp cannot share")


def filled(case: Case) -> Case:
    """The case with enough micro-batches for its pipeline, if it has one."""
    stages, samples = case.degree(PIPELINE), case.micro_batch_size
    if stages == 1:
        return case
    return case.but(grad_accum_steps=max(steps for steps in range(1, FULL * stages + 1) if samples % steps == 0))
