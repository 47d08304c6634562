"""Turns a module into this rank's part of it: weights are cut as a plan says, and f and g are put in their places.

Names stay as they are, and each part is an ordinary module with ordinary parameters. So a data-parallel strategy runs
over it unchanged.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tensor_parallel.cross_entropy import VocabularyParallelCrossEntropy
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
from tensor_parallel.region import Ranks
from tensor_parallel.traffic import Sites
from training.config import RunConfig
from training.data.packing import IGNORED
from training.errors import UnsupportedError
from training.mesh import MeshGroups
from training.model_parallel import Cut, ModelParallel, Ranges


def parallelize(
    module: nn.Module, plan: Plan, groups: MeshGroups, device: torch.device, sequence_parallel: bool = False
) -> ModelParallel:
    """Cut `module` in place over the ranks of `groups.model`. Rank 0's parameters win. Collective.

    Returns:
        What a strategy over `groups.data` must know of it.

    Raises:
        UnsupportedError: a layer cannot be cut over so many ranks, or the plan does not fit the module.
    """
    return Parallelizer(module, plan, groups, device, sequence_parallel).run()


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """The same, as a run's settings say."""
    plan = read_plan(Path(config.plan)) if config.plan else plan_of(module, groups.mesh.model_size)
    return parallelize(module, plan, groups, device, config.sequence_parallel)


class Parallelizer:
    def __init__(
        self, module: nn.Module, plan: Plan, groups: MeshGroups, device: torch.device, sequence_parallel: bool
    ) -> None:
        self._module, self._groups = module, groups
        self._styles = matched(module, plan)
        self._regions = [name for name, style in self._styles.items() if isinstance(style, Region)]
        self._ranks = Ranks(groups.model, device, sequence_parallel)
        self._cuts: dict[str, Cut] = {}
        self._parts: dict[nn.Parameter, tuple[Cut, nn.Parameter]] = {}  # by whole parameter
        self._sites = Sites(self._ranks)
        if sequence_parallel and not any(isinstance(style, Split) for style in self._styles.values()):
            raise UnsupportedError("--sequence-parallel: the plan does not say where tokens are split")

    def run(self) -> ModelParallel:
        ranks = self._ranks
        for tensor in [*self._module.parameters(), *self._module.buffers()]:
            dist.broadcast(tensor.detach(), group=ranks.group, group_src=0)
        for name, style in self._styles.items():
            self._apply(name, self._module.get_submodule(name), style)
        self._require_complete()
        self._module.register_forward_pre_hook(ranks.begin_forward, prepend=True, with_kwargs=True)
        return ModelParallel(ranks.group, self._groups.everyone, self._cuts, self._sites.traffic)

    def _apply(self, name: str, layer: nn.Module, style: Style) -> None:
        ranks = self._ranks
        match style:
            case Column():
                self._cut_column(name, layer, style)
                if enclosing(name, self._regions) is None:
                    layer.register_forward_pre_hook(ranks.enter_region, with_kwargs=True)
            case Row():
                self._replace(name, self._row(name, layer, style))
            case Region():
                for attribute, value in style.attributes.items():
                    setattr(layer, attribute, value)
                layer.register_forward_pre_hook(ranks.enter_region, with_kwargs=True)
                if draws(layer):
                    layer.register_forward_pre_hook(ranks.begin_random)
                    layer.register_forward_hook(ranks.end_random, always_call=True)
            case Embedding():
                assert isinstance(layer, nn.Embedding)
                cut = self._even(name, "rows", len(layer.weight), 0)
                weight, first = self._cut(f"{name}.weight", layer.weight, cut), cut.ranges[ranks.rank][0][0]
                self._replace(name, VocabularyParallelEmbedding(layer, weight, first, ranks))
            case Head():
                self._cut_head(name, layer)
            case Shared():
                if ranks.tokens is not None or not style.of_tokens:
                    self._sum_gradients(layer)
            case Split() if ranks.tokens is not None:
                layer.register_forward_pre_hook(ranks.split, prepend=True, with_kwargs=True)
            case Merge() if ranks.tokens is not None:
                layer.register_forward_pre_hook(ranks.merge, prepend=True, with_kwargs=True)

    # Cuts ------------------------------------------------------------------------------------------------------------

    def _cut_column(self, name: str, layer: nn.Module, style: Column) -> None:
        dim = 1 if is_transposed(layer) else 0
        outputs = layer.weight.shape[dim]
        part, left = divmod(outputs, style.parts)
        if left:
            raise UnsupportedError(f"--plan: {name} has {outputs} outputs, which are not {style.parts} equal parts")
        one = self._even(name, "outputs", part, dim, style.heads, style.shares)
        ranges = tuple(
            tuple((first + part * index, end + part * index) for index in range(style.parts) for first, end in of_rank)
            for of_rank in one.ranges
        )
        cut = Cut(dim, outputs, ranges)
        self._set(layer, "weight", self._cut(f"{name}.weight", layer.weight, cut))
        if layer.bias is not None:
            self._set(layer, "bias", self._cut(f"{name}.bias", layer.bias, Cut(0, outputs, ranges)))
        if isinstance(layer, nn.Linear):
            layer.out_features = layer.weight.shape[dim]
        else:
            layer.nf = layer.weight.shape[dim]
        if len(set(ranges)) < len(ranges):
            self._sum_gradients(layer, self._sharing_group(ranges))

    def _row(self, name: str, layer: nn.Module, style: Row) -> RowParallel:
        dim = 0 if is_transposed(layer) else 1
        cut = self._even(name, "inputs", layer.weight.shape[dim], dim, style.heads)
        weight = self._cut(f"{name}.weight", layer.weight, cut)
        return RowParallel(weight, layer.bias, self._ranks, is_transposed(layer))

    def _cut_head(self, name: str, layer: nn.Module) -> None:
        cut = self._even(name, "entries", len(layer.weight), 0)
        first = cut.ranges[self._ranks.rank][0][0]
        lengths = [end - start for ((start, end),) in cut.ranges]
        self._set(layer, "weight", self._cut(f"{name}.weight", layer.weight, cut))
        if layer.bias is not None:
            self._set(layer, "bias", self._cut(f"{name}.bias", layer.bias, cut))
        ranks = self._ranks
        layer.register_forward_pre_hook(ranks.enter_head, with_kwargs=True)

        def whole_if_wanted(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
            return WholeVocabulary.apply(logits, lengths, ranks.group) if ranks.gathers_logits else logits

        layer.register_forward_hook(whole_if_wanted)

        def loss_function(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
            losses = VocabularyParallelCrossEntropy.apply(logits.flatten(0, -2), targets, first, ranks.group)
            counts = targets != IGNORED
            return losses.where(counts, 0).sum() / counts.sum()

        self._module.loss_function = loss_function  # type: ignore[assignment]

    def _even(self, name: str, what: str, length: int, dim: int, heads: int | None = None, shares: bool = False) -> Cut:
        """One range for each rank, as even as can be; along heads, if there are."""
        size = self._ranks.size
        unit, left = divmod(length, heads) if heads else (1, 0)
        if left:
            raise UnsupportedError(f"--plan: {name} has {length} {what}, which are not {heads} equal heads")
        count = heads or length
        if heads and shares and count < size and size % count == 0:
            bounds = [(rank * count // size, rank * count // size + 1) for rank in range(size)]
        elif (heads and count % size) or count < size:
            what = "heads" if heads else what
            raise UnsupportedError(f"--mesh: {name} has {count} {what}, which cannot be cut over {size} ranks of tp")
        else:
            bounds = list(pairwise(count * rank // size for rank in range(size + 1)))
        return Cut(dim, length, tuple(((first * unit, end * unit),) for first, end in bounds))

    def _cut(self, name: str, whole: nn.Parameter, cut: Cut) -> nn.Parameter:
        """This rank's part, which is the same for tied parameters."""
        self._cuts[name] = cut
        if whole in self._parts:
            before, part = self._parts[whole]
            if before != cut:
                raise UnsupportedError(f"--plan: {name} is tied to a parameter that is cut in another way")
            return part
        part = nn.Parameter(cut.part(whole.detach(), self._ranks.rank), whole.requires_grad)
        self._parts[whole] = cut, part
        return part

    def _set(self, layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
        layer._parameters[name] = parameter

    def _replace(self, name: str, layer: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        layer.train(self._module.training)
        setattr(self._module.get_submodule(parent), own, layer)

    # Parameters that all hold ----------------------------------------------------------------------------------------

    def _sum_gradients(self, layer: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Put f in front of the parameters that are directly in `layer`."""
        group = group or self._ranks.group
        plain = type(layer).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            held = {name: p for name, p in layer._parameters.items() if p is not None}
            try:
                for name, parameter in held.items():
                    layer.__dict__[name] = Copy.apply(parameter, group)  # found before the parameter
                return plain(layer, *args, **kwargs)
            finally:
                for name in held:
                    layer.__dict__.pop(name, None)

        layer.forward = forward  # type: ignore[method-assign]

    def _sharing_group(self, ranges: tuple[Ranges, ...]) -> dist.ProcessGroup:
        """The ranks that hold the same part as this one. Collective over all ranks of the mesh."""
        sharing = [rank for rank in range(self._ranks.size) if ranges[rank] == ranges[self._ranks.rank]]
        return self._groups.part_of_model(len(sharing))

    def _require_complete(self) -> None:
        """Refuse parameters in a region that the plan does not name: all ranks would hold parts of their gradients."""
        covered = [name for name, style in self._styles.items() if isinstance(style, Row | Shared)]
        for name, _ in self._module.named_parameters():
            region = enclosing(name, self._regions)
            if region and name not in self._cuts and enclosing(name, covered) is None:
                raise UnsupportedError(
                    f"--plan: {name} is in region {region}, where each rank has a part of its gradient; name its "
                    "module column, row or shared"
                )


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in GPT-2.

    Raises:
        UnsupportedError: it is no linear layer.
    """
    if type(layer) is nn.Linear:
        return False
    if type(layer).__name__ == "Conv1D":
        return True
    raise UnsupportedError(f"--plan: {type(layer).__name__} is no linear layer, and cannot be cut")


def draws(layer: nn.Module) -> bool:
    """Whether the module draws random numbers when it trains."""
    return bool(getattr(layer, "attention_dropout", 0.0)) or any(
        isinstance(part, nn.Dropout) and part.p for part in layer.modules()
    )
