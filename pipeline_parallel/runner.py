"""A rank of a pipeline, as a strategy calls it (`ddp_lab.strategy.model_parallel.Pipeline`)."""

from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import PIPELINE
from ddp_lab.strategy.account import Collective
from pipeline_parallel.actions import Action, Compute, Shape, arrived_by, list_of
from pipeline_parallel.channels import Channels
from pipeline_parallel.stage import Stages
from pipeline_parallel.tied import Tied
from pipeline_parallel.walk import CHANNEL_OF, BackwardOf, Batch, LossOf, RunModel, Walk, form_of


class Pipeline:
    """Args:
    group: The ranks of the pipeline, in the order of their stages.
    tied: On the first and the last rank, what these share.
    """

    def __init__(
        self,
        stages: Stages,
        channels: Channels,
        group: dist.ProcessGroup,
        schedule: Compute,
        stages_per_rank: int,
        tied: Tied | None,
    ) -> None:
        self.stages, self._channels, self._tied = stages, channels, tied
        self._group, self._schedule, self._per_rank = group, schedule, stages_per_rank
        self._latest: Hashable = None  # the form of a batch

    def shape(self, micro_batches: int) -> Shape:
        return Shape(self._group.size(), micro_batches, self._per_rank)

    def actions(self, micro_batches: int) -> list[Action]:
        """What this rank does in a step."""
        return list_of(self._schedule, self.shape(micro_batches), self._group.rank())

    def begin(self, module: nn.Module) -> None:
        """A strategy is built over `module`, and nobody else will change `forward` of its blocks."""
        self.stages.take_turns()

    def step(self, batches: Sequence[Batch], forward: RunModel, loss_of: LossOf, backward_of: BackwardOf) -> None:
        """Forward and backward of all micro-batches. Collective over the pipeline."""
        shape, tied, self._latest = self.shape(len(batches)), self._tied, form_of(batches[-1])
        walk = Walk(self.stages, self._channels, tied, shape, batches, forward, loss_of, backward_of)
        if tied is not None:
            tied.refresh()
            tied.begin()
        walk.run(self.actions(len(batches)), arrived_by(self._schedule, shape, self._group.rank()))
        if tied is not None:
            tied.end()
        self._finish()

    def expected_traffic(self, micro_batches: int) -> list[Collective]:
        """See `ddp_lab.strategy.model_parallel.Pipeline`. Empty before the first step."""
        if self._latest is None:
            return []
        messages = [action for action in self.actions(micro_batches) if not action.kind.computes]
        hidden = [self._channels[CHANNEL_OF[one.kind]].nbytes((one.stage, self._latest)) for one in messages]
        values, gradients = self._tied.sizes() if self._tied else ([], [])
        sizes = {"activations": hidden, "parameters": values, "gradients": gradients}
        return [Collective("send_recv", len(own), sum(own), 2, what, PIPELINE) for what, own in sizes.items() if own]

    def _finish(self) -> None:
        """Wait until nothing that this rank has sent is on its way."""
        for channel in self._channels.values():
            channel.finish()

    def answer(self, forward: RunModel, args: Any, kwargs: Any) -> Any:
        """What the whole model answers, on all ranks: `.loss` and `.logits`. Collective over the pipeline.

        Logits of tokens that have a loss are left out: nobody needs them, and each is as long as the vocabulary.

        Raises:
            UnsupportedError: gradients are on, so a backward pass would follow.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a pipeline trains by forward_backward: its schedule has the forward passes of all stages"
            )
        if self._tied is not None:
            self._tied.refresh()
        made: Any = None
        form = form_of((args, kwargs))
        for stage in self.stages.own:
            hidden = self._channels["activation", "in"].receive((stage, form)).tensor() if stage else None
            behind = self._channels["activation", "out"] if stage + 1 < self.shape(1).stages else None
            made = self.stages.attempt(stage, hidden, lambda: forward(*args, **kwargs), behind, (stage, form))
            if behind is not None:
                behind.send((stage, form), made)
        self._finish()
        return self._from_last(made)

    def agree(self, group: dist.ProcessGroup, told: Any = None) -> list[Any]:
        """What each rank of `group` tells the others. Collective.

        Raises:
            UnsupportedError: on every rank, a stage of one of them has refused what forward does.
        """
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, (self.stages.refusal, told), group)
        self.stages.refusal = None
        if refusals := [refusal for refusal, _ in every if refusal is not None]:
            raise UnsupportedError(next(filter(None, refusals), "a stage of the pipeline has refused this batch"))
        return [of_rank for _, of_rank in every]

    def _from_last(self, made: Any) -> SimpleNamespace:
        last = self._group.size() - 1
        found: dict[str, Tensor] = {}
        if self._group.rank() == last:
            loss, logits = getattr(made, "loss", None), getattr(made, "logits", None)
            found = {} if loss is None else {"loss": loss}
            if logits is not None and (loss is None or logits.ndim < 3):
                found["logits"] = logits.contiguous()
        told = self.agree(self._group, {name: torch.empty_like(one, device="meta") for name, one in found.items()})
        device = next(iter(self._channels.values())).device
        for name, form in told[last].items():
            if name not in found:
                found[name] = torch.empty_like(form, device=device)
            dist.broadcast(found[name], group=self._group, group_src=last)
        return SimpleNamespace(**{"loss": None, "logits": None} | found)
