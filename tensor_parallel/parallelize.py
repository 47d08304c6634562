"""Turns a module into this rank's part of it: weights are cut as a plan says, and f and g are put in their places.

Names stay as they are, and each part is an ordinary module with ordinary parameters. So a data-parallel strategy runs
over it unchanged.
"""

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import TENSOR, MeshGroups
from ddp_lab.strategy.batches import IGNORED
from ddp_lab.strategy.building import require_own_memory
from ddp_lab.strategy.model_parallel import Cut, ModelParallel
from ddp_lab.strategy.modules import with_first
from tensor_parallel.cross_entropy import VocabularyParallelCrossEntropy
from tensor_parallel.cuts import CutParameters, cut_evenly, cut_in_parts, is_transposed, weight_of
from tensor_parallel.layers import RowParallel, VocabularyParallelEmbedding, WholeVocabulary
from tensor_parallel.operators import Copy
from tensor_parallel.plan import (
    Column,
    Embedding,
    Head,
    Merge,
    Plan,
    Region,
    Row,
    Shared,
    Split,
    Style,
    enclosing,
    matched,
    plan_of,
    read_plan,
)
from tensor_parallel.region import TensorRanks
from tensor_parallel.traffic import FP32, OperatorPlace, Precision, TensorTraffic


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """`parallelize`, as a run's settings say."""
    plan = read_plan(Path(config.plan)) if config.plan else plan_of(module, groups.mesh.degree(TENSOR))
    options = config.strategy
    precision = Precision.of(options.precision, options.param_dtype)
    return parallelize(module, plan, groups, device, config.sequence_parallel, precision)


def parallelize(
    module: nn.Module,
    plan: Plan,
    groups: MeshGroups,
    device: torch.device,
    sequence_parallel: bool = False,
    precision: Precision = FP32,
) -> ModelParallel:
    """Cut `module` in place over the ranks of `groups.tensor`. Rank 0's parameters win. Collective.

    Args:
        precision: Of the run, on which its traffic depends.

    Returns:
        What a strategy over `groups.data` must know of it.
    """
    require_own_memory(module)
    ranks = TensorRanks(groups.tensor, device, sequence_parallel)
    traffic = TensorTraffic(ranks, device, precision)
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=ranks.group, group_src=0)
    parallelizer = Parallelizer(module, plan, ranks, groups, traffic)
    parallelizer.run()
    cuts = parallelizer.parameters.cuts
    return ModelParallel(groups.model, groups.everyone, cuts, ranks.group, traffic=traffic)


class Parallelizer:
    """Applies a plan. `parameters` are cut then, and `traffic` is what it adds."""

    def __init__(
        self, module: nn.Module, plan: Plan, ranks: TensorRanks, groups: MeshGroups, traffic: TensorTraffic
    ) -> None:
        self._module, self._groups, self._ranks, self._traffic = module, groups, ranks, traffic
        self._styles = matched(module, plan)
        self._regions = [name for name, style in self._styles.items() if isinstance(style, Region)]
        self.parameters = CutParameters(ranks.rank)
        if ranks.tokens is not None and not any(isinstance(style, Split) for style in self._styles.values()):
            raise UnsupportedError("--sequence-parallel: the plan does not say where tokens are split")

    def run(self) -> None:
        for name, style in self._styles.items():
            self._apply(name, self._module.get_submodule(name), style)
        self._require_complete()
        self._module.register_forward_pre_hook(self._ranks.begin_forward, prepend=True, with_kwargs=True)
        random = self._ranks.random
        self._module.register_forward_hook(lambda *_: random.end(), always_call=True)  # a stage may end anywhere

    def _apply(self, name: str, layer: nn.Module, style: Style) -> None:
        ranks = self._ranks
        match style:
            case Column():
                if enclosing(name, self._regions) is None:
                    transposed = is_transposed(layer)
                    self._put_f(name, layer, weight_of(layer).shape[0 if transposed else 1])
                self._cut_column(name, layer, style)
            case Row():
                self._cut_row(name, layer, style)
            case Region():
                self._make_region(name, layer, style)
            case Embedding():
                self._cut_embedding(name, cast(nn.Embedding, layer))
            case Head():
                self._cut_head(name, layer)
            case Shared():
                if ranks.tokens is not None or not style.of_tokens:
                    self._sum_gradients(name, layer, ranks.group)
                if ranks.tokens is not None and style.merges:
                    self._traffic.turns.append(OperatorPlace(name, self._features()))
                    layer.register_forward_hook(ranks.merge_after)
            case Split() if ranks.tokens is not None:
                self._traffic.turns.append(OperatorPlace(name, self._features()))
                layer.register_forward_pre_hook(ranks.split, prepend=True, with_kwargs=True)
            case Merge() if ranks.tokens is not None:
                self._traffic.turns.append(OperatorPlace(name, self._features()))
                layer.register_forward_pre_hook(ranks.merge, prepend=True, with_kwargs=True)

    def _features(self) -> int:
        """Of the hidden states between regions: the outputs of any layer cut by rows."""
        name = next(name for name, style in self._styles.items() if isinstance(style, Row))
        layer = self._module.get_submodule(name)
        transposed = (isinstance(layer, RowParallel) and layer.transposed) or type(layer).__name__ == "Conv1D"
        return weight_of(layer).shape[1 if transposed else 0]

    # Layers ----------------------------------------------------------------------------------------------------------

    def _make_region(self, name: str, layer: nn.Module, style: Region) -> None:
        for attribute, value in style.attributes.items():
            setattr(layer, attribute, value)
        inside = [column for column, kind in self._styles.items() if isinstance(kind, Column) and name in column]
        first = self._module.get_submodule(inside[0]) if inside else layer
        self._put_f(name, layer, weight_of(first).shape[0 if is_transposed(first) else 1])
        if draws(layer):
            layer.register_forward_pre_hook(self._ranks.begin_random)
            layer.register_forward_hook(self._ranks.end_random, always_call=True)

    def _put_f(self, name: str, layer: nn.Module, features: int) -> None:
        """In front of `layer`."""
        place, ranks = OperatorPlace(name, features), self._ranks  # a hook that held `self` would keep whole parameters
        self._traffic.f.append(place)

        def enter(hidden: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                place.has_gradient = hidden.requires_grad
            return ranks.enter(hidden)

        layer.register_forward_pre_hook(lambda _, args, kwargs: with_first(args, kwargs, enter), with_kwargs=True)

    def _cut_column(self, name: str, layer: nn.Module, style: Column) -> None:
        dim = 1 if is_transposed(layer) else 0
        outputs = weight_of(layer).shape[dim]
        part, remainder = divmod(outputs, style.parts)
        if remainder:
            raise UnsupportedError(f"--plan: {name} has {outputs} outputs, which are not {style.parts} equal parts")
        part_cut = cut_evenly(name, "outputs", part, dim, self._ranks.size, style.heads, style.shares)
        cut = cut_in_parts(part_cut, style.parts)
        self.parameters.cut(layer, name, "weight", cut)
        self.parameters.cut(layer, name, "bias", Cut(0, cut.length, cut.ranges))
        setattr(layer, "nf" if is_transposed(layer) else "out_features", weight_of(layer).shape[dim])
        alike = cut.ranges.count(cut.ranges[self._ranks.rank])
        if alike > 1:
            self._sum_gradients(name, layer, self._groups.part_of_tensor(alike))

    def _cut_row(self, name: str, layer: nn.Module, style: Row) -> None:
        transposed = is_transposed(layer)
        dim = 0 if transposed else 1
        cut = cut_evenly(name, "inputs", weight_of(layer).shape[dim], dim, self._ranks.size, style.heads)
        self.parameters.cut(layer, name, "weight", cut)
        bias = layer._parameters["bias"]
        self._traffic.g.append(OperatorPlace(name, weight_of(layer).shape[1 - dim]))
        if bias is not None and self._ranks.tokens is not None:
            self._traffic.parameters.append((name, self._bytes_of(bias), self._ranks.size))
        self._replace(name, RowParallel(weight_of(layer), bias, self._ranks, transposed))

    def _cut_embedding(self, name: str, layer: nn.Embedding) -> None:
        cut = cut_evenly(name, "rows", len(layer.weight), 0, self._ranks.size)
        self.parameters.cut(layer, name, "weight", cut)
        self._traffic.sums.append(OperatorPlace(name, layer.embedding_dim))
        first = cut.ranges[self._ranks.rank][0][0]
        self._replace(name, VocabularyParallelEmbedding(layer, first, self._ranks))

    def _cut_head(self, name: str, layer: nn.Module) -> None:
        ranks = self._ranks
        cut = cut_evenly(name, "entries", len(weight_of(layer)), 0, ranks.size)
        merges = any(isinstance(style, Shared) and style.merges for style in self._styles.values())
        place = OperatorPlace(name, weight_of(layer).shape[1], is_whole=merges)
        self._traffic.f.append(place)
        self._traffic.losses.append(place)
        self.parameters.cut(layer, name, "weight", cut)
        self.parameters.cut(layer, name, "bias", cut)
        first, lengths = cut.ranges[ranks.rank][0][0], [end - start for ((start, end),) in cut.ranges]
        layer.register_forward_pre_hook(ranks.enter_head, with_kwargs=True)

        def whole_if_wanted(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
            return WholeVocabulary.apply(logits, lengths, ranks.group) if ranks.gathers_logits else logits

        def loss_function(
            logits: Tensor,
            labels: Tensor,
            vocab_size: int = 0,  # some models give it by position
            num_items_in_batch: Tensor | None = None,
            ignore_index: int = IGNORED,
            shift_labels: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            if shift_labels is None:
                shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            targets = shift_labels.reshape(-1)
            losses = VocabularyParallelCrossEntropy.apply(logits.flatten(0, -2), targets, first, ranks.group)
            counts = targets != IGNORED
            return losses.where(counts, 0).sum() / (counts.sum() if num_items_in_batch is None else num_items_in_batch)

        layer.register_forward_hook(whole_if_wanted)
        self._module.loss_function = loss_function  # type: ignore[assignment]

    def _replace(self, name: str, layer: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        layer.train(self._module.training)
        setattr(self._module.get_submodule(parent), child, layer)

    # Parameters that all hold ----------------------------------------------------------------------------------------

    def _sum_gradients(self, name: str, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Put f in front of the parameters that are directly in `layer`."""
        plain, size = type(layer).forward, dist.get_world_size(group)
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                self._traffic.parameters.append((name, self._bytes_of(parameter), size))

        def forward(*args: Any, **kwargs: Any) -> Any:
            parameters = {name: p for name, p in layer._parameters.items() if p is not None}
            try:
                for name, parameter in parameters.items():
                    layer.__dict__[name] = Copy.apply(parameter, group)  # found before the parameter
                return plain(layer, *args, **kwargs)
            finally:
                for name in parameters:
                    layer.__dict__.pop(name, None)

        layer.forward = forward

    def _bytes_of(self, parameter: nn.Parameter) -> int:
        return parameter.numel() * self._traffic.precision.stored

    def _require_complete(self) -> None:
        """Refuse parameters in a region that the plan does not name: all ranks would hold parts of their gradients."""
        covered = [name for name, style in self._styles.items() if isinstance(style, Row | Shared)]
        for name, _ in self._module.named_parameters():
            region = enclosing(name, self._regions)
            if region and name not in self.parameters.cuts and enclosing(name, covered) is None:
                raise UnsupportedError(
                    f"--plan: {name} is in region {region}, where each rank has a part of its gradient; name its "
                    "module column, row or shared"
                )


def draws(layer: nn.Module) -> bool:
    """Whether the module draws random numbers when it trains."""
    return bool(getattr(layer, "attention_dropout", 0.0)) or any(
        isinstance(part, nn.Dropout) and part.p for part in layer.modules()
    )
