"""What a data-parallel strategy must know of a model whose parameters, or whose samples' tokens, are cut over ranks.

Ranks over which parameters are cut see the same tokens, and each holds a part of the model as a plain module. A
strategy runs over the ranks that hold the same part, as if that were the model. It asks here for what concerns the
whole model: the norm of all gradients, the count of samples, and whole state dicts.

Experts alone are cut over ranks that see different tokens. There a strategy runs over ranks that hold other experts,
too, and treats an expert's parameters over those of them that hold it (`copies`).
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lab.runtime.mesh import CONTEXT, TENSOR
from ddp_lab.strategy.account import Collective

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut over ranks: along one dimension, each rank holds some ranges of it.

    Ranges may differ in length, and ranks may hold the same ones.

    Attributes:
        length: Of the whole tensor along `dim`.
        ranges: By rank, (first, end) of each range.
        then: How the same ranks cut that further, along another dimension: experts, and each of them.
    """

    dim: int
    length: int
    ranges: tuple[Ranges, ...]
    then: "Cut | None" = None

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of `rank`, a new tensor."""
        pieces = torch.cat([whole.narrow(self.dim, first, end - first) for first, end in self.ranges[rank]], self.dim)
        return self.then.part(pieces, rank) if self.then else pieces

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        """Write the part of `rank` into its place in the whole tensor."""
        lengths = [end - first for first, end in self.ranges[rank]]
        for (first, end), piece in zip(self.ranges[rank], part.split(lengths, self.dim), strict=True):
            place = whole.narrow(self.dim, first, end - first)
            if self.then:
                self.then.put(place, piece, rank)
            else:
                place.copy_(piece)

    def whole_shape(self, part: Tensor) -> tuple[int, ...]:
        shape = list(self.then.whole_shape(part) if self.then else part.shape)
        shape[self.dim] = self.length
        return tuple(shape)

    def part_shape(self, part: Tensor, rank: int) -> tuple[int, ...]:
        """The shape of the part of `rank`. `part`: any rank's."""
        shape = list(self.then.part_shape(part, rank) if self.then else part.shape)
        shape[self.dim] = sum(end - first for first, end in self.ranges[rank])
        return tuple(shape)

    def is_owner(self, rank: int) -> bool:
        """Whether no earlier rank holds the same part."""
        return self.owner(rank) == rank

    def owner(self, rank: int) -> int:
        """The first rank that holds the same part as `rank`."""
        return next(first for first in range(rank + 1) if self.held_by(first) == self.held_by(rank))

    def held_by(self, rank: int) -> tuple[Ranges, ...]:
        """The ranges of `rank` along each dimension that is cut."""
        return (self.ranges[rank], *(self.then.held_by(rank) if self.then else ()))


class Pipeline(Protocol):
    """Runs micro-batches where ranks hold different layers, in an order of its own (`pipeline_parallel`)."""

    def begin(self, module: nn.Module) -> None:
        """Runs when a strategy is built over `module`, after all others that change `forward` of its blocks."""

    def step(
        self,
        batches: Sequence[Any],
        forward: Callable[..., Any],
        loss_of: Callable[[int, Any], Tensor],
        backward_of: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """Forward and backward of all micro-batches.

        Args:
            forward: The whole model's.
            loss_of: Of a micro-batch and what the model has answered: where backward begins.
            backward_of: The context of a backward pass. Its argument: whether this is the last one of its stage.
        """

    def agree(self, group: dist.ProcessGroup) -> Any:
        """Why a loss is NaN. Collective.

        Raises:
            UnsupportedError: on every rank, a stage of one of them has refused what forward does.
        """

    def expected_traffic(self, micro_batches: int) -> list[Collective]:
        """The messages of this rank in a step of so many micro-batches, of the shape that the latest had."""

    def answer(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the whole model answers, on all ranks, without gradients. Collective."""


class Balance(Protocol):
    """What knows how many tokens each expert gets (`expert_parallel`).

    Attributes:
        weight: By which the loss of the next forward pass is multiplied, 1 for those of the global batch together. 0:
            it is of no samples of this rank, and only takes part.
    """

    weight: float | None

    def passes_ahead(self, micro_batches: int) -> int:
        """How many forward passes of a step of so many must run, within `ahead`, before its first micro-batch."""

    def ahead(self) -> AbstractContextManager[None]:
        """Within this context forward passes only count."""

    def load(self) -> Tensor:
        """Of the step that has just run, how many tokens chose each expert, (layers, experts). Collective."""

    def end_step(self) -> None:
        """Runs when a step is through, or abandoned."""


@dataclass(frozen=True)
class ModelParallel:
    """Attributes:
    group: The ranks that see the same tokens. With `copies`, those that hold all parts of the model together.
    everyone: All ranks of the job.
    cuts: By name of a parameter. All ranks of `tensor` hold the others. A cut over fewer ranks than those of `group`
        repeats: tp is the innermost dimension.
    tensor: Those of `group` that hold parts of the same layers. Default: all.
    pipeline: Where other ranks of `group` hold other layers.
    aliases: Other names of tensors that the model knows by several, where not all of its modules are on one rank.
    device_mesh: Of torch, where it is torch's own classes that cut the model.
    traffic: What the parts of the model send to each other in a step of so many micro-batches.
    context_size: Over how many ranks tokens are cut. Each makes so many times its part of a loss: on average the loss.
    context_traffic: What these send to each other.
    part_of_tokens: What this rank has of (samples, tokens) of a whole batch, if tokens are cut. What fills up is 0.
    copies: Where parameters are cut over ranks that see different samples (`ep`): those of the ranks that share the
        work that hold the same of them as this one.
    of_experts: The names of these parameters. All else, all ranks that share the work hold.
    balance: Of the load of experts.
    """

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    cuts: Mapping[str, Cut]
    tensor: dist.ProcessGroup | None = None
    pipeline: Pipeline | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    traffic: Callable[[int], list[Collective]] = field(default=lambda micro_batches: [])
    context_size: int = 1
    context_traffic: Callable[[int], list[Collective]] = field(default=lambda micro_batches: [])
    part_of_tokens: Callable[[Tensor], Tensor] | None = None
    copies: dist.ProcessGroup | None = None
    of_experts: frozenset[str] = frozenset()
    balance: "Balance | None" = None

    def expected_traffic(self, micro_batches: int) -> list[Collective]:
        """The traffic along all these dimensions."""
        by_dimension = {TENSOR: self.traffic(micro_batches), CONTEXT: self.context_traffic(micro_batches)}
        messages = self.pipeline.expected_traffic(micro_batches) if self.pipeline else []
        return [
            replace(collective, dimension=collective.dimension or name)
            for name, all_of in by_dimension.items()
            for collective in all_of
        ] + messages

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.tensor or self.group

    @property
    def tensor_rank(self) -> int:
        """Whose part of the layers this rank holds."""
        return dist.get_rank(self.tensor_group)

    def rank_in(self, cut: Cut) -> int:
        """Whose part of a parameter this rank holds."""
        return dist.get_rank(self.group) % len(cut.ranges)

    def is_owner(self, name: str) -> bool:
        """Whether this rank speaks for what it holds of a parameter: of each element of the model, one rank of `group`
        does. With `copies`, others do too that hold the same and see other samples."""
        cut = self.cuts.get(name)
        return cut.is_owner(self.rank_in(cut)) if cut else self.tensor_rank == 0

    def owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> set[nn.Parameter]:
        """Those that this rank speaks for."""
        return {p for name, p in named if self.is_owner(name)}

    def whole_shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's tensors, by name. Collective."""
        shapes = self.of_all_stages(
            {n: self._whole_shape(n, tensor) for n, tensor in module.state_dict(keep_vars=True).items()}
        )
        return shapes | {alias: shapes[name] for alias, name in self.aliases.items()}

    def of_all_stages(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The `entries` of all stages' parameters or buffers, by name. Collective."""
        return entries if self.pipeline is None else dict(ChainMap(*reversed(self._all_gather(entries))))

    def _own_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        """Torch's own classes give the whole shape of what is cut, too."""
        cut = self.cuts.get(name)
        return cut.part_shape(part, self.rank_in(cut)) if cut else tuple(part.shape)

    def _whole_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        return self.cuts[name].whole_shape(part) if name in self.cuts else tuple(part.shape)

    def _all_gather(self, entry: Any) -> list[Any]:
        entries: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(entries, entry, self.group)
        return entries

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0 of `group`, nothing elsewhere. Collective.

        Args:
            parts: What this rank holds, on CPU, by name.
        """
        rank = dist.get_rank(self.group)
        sent = {name: part.contiguous() for name, part in parts.items() if rank and self._is_sent(name, rank)}
        forms = self._all_gather({name: (tuple(part.shape), part.dtype) for name, part in sent.items()})
        for part in sent.values():
            dist.send(part, group=self.group, group_dst=0)
        if rank != 0:
            return {}
        wholes: dict[str, Tensor] = {}
        for name, part in parts.items():
            self._put(wholes, name, part, 0)
        for sender, of_sender in enumerate(forms):
            for name, (shape, dtype) in of_sender.items():
                part = torch.empty(shape, dtype=dtype, device="cpu")
                dist.recv(part, group=self.group, group_src=sender)
                self._put(wholes, name, part, sender)
        return wholes

    def _put(self, wholes: dict[str, Tensor], name: str, part: Tensor, rank: int) -> None:
        """Add the part of `rank` of `group`."""
        if name not in self.cuts:
            wholes.setdefault(name, part)
            return
        if name not in wholes:
            wholes[name] = part.new_empty(self.cuts[name].whole_shape(part))
        self.cuts[name].put(wholes[name], part, rank % len(self.cuts[name].ranges))

    def _is_sent(self, name: str, rank: int) -> bool:
        """Whether `rank` of `group` has elements of a parameter or a buffer that no earlier rank has."""
        cut = self.cuts.get(name)
        if self.copies:
            return rank < (len(cut.ranges) if cut else 1)
        return cut is not None or self.tensor_rank == 0

    def scattered(self, wholes: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
        """This rank's parts of rank 0's `wholes`, on CPU in their dtypes. Other ranks' are not read. Collective."""
        rank = dist.get_rank(self.group)
        shapes = {name: self._own_shape(name, tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
        entries = self._all_gather((shapes, {name: whole.dtype for name, whole in wholes.items()} if rank == 0 else {}))
        parts: dict[str, Tensor] = {}
        for receiver, (of_receiver, _) in enumerate(entries) if rank == 0 else ():
            for name in of_receiver:
                cut, whole = self.cuts.get(name), wholes[name].cpu()
                part = (cut.part(whole, receiver % len(cut.ranges)) if cut else whole).contiguous()
                if receiver == 0:
                    parts[name] = part
                else:
                    dist.send(part, group=self.group, group_dst=receiver)
        if rank != 0:
            for name, shape in shapes.items():
                parts[name] = torch.empty(shape, dtype=entries[0][1][name], device="cpu")
                dist.recv(parts[name], group=self.group, group_src=0)
        return parts
