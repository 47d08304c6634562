"""A rank of a pipeline: what it holds, and what it sends to its neighbours and receives from them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.tensors import tensors_in
from pipeline_parallel.actions import Action, Compute, Shape, with_messages
from pipeline_parallel.channels import Channels, Form, Receipt, form_of
from pipeline_parallel.stage import Stages
from pipeline_parallel.tied import Tied


class PipelineRank:
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
        stages_per_rank: int = 1,
        tied: Tied | None = None,
    ) -> None:
        self.stages, self.channels, self.tied, self._schedule = stages, channels, tied, schedule
        self.group, self.rank, self._per_rank = group, dist.get_rank(group), stages_per_rank
        self.device = next(iter(channels.values())).device
        self._forms: dict[Any, Form] = {}  # of hidden states, by stage and form of the batch

    def shape(self, micro_batches: int) -> Shape:
        return Shape(dist.get_world_size(self.group), micro_batches, self._per_rank)

    def actions(self, micro_batches: int) -> list[Action]:
        """What this rank does in a step."""
        shape = self.shape(micro_batches)
        return with_messages(self._schedule(shape, self.rank), shape)

    # Messages --------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring copies of tied weights up to date."""
        if self.tied is not None:
            self.tied.send_values()

    def finish(self) -> None:
        """Wait until nothing that this rank has sent is on its way."""
        for channel in self.channels.values():
            channel.finish()

    def knows_form(self, stage: int, batch: Any) -> bool:
        """Whether this rank knows what `stage` receives for a batch of this form."""
        return key_of(stage, batch) in self._forms

    def post_receive(self, stage: int, batch: Any) -> Receipt:
        """Receive what the stage before makes of a batch. If its form is not known, the host waits to be told."""
        key, channel = key_of(stage, batch), self.channels["activation", "in"]
        if key not in self._forms:
            self._forms[key] = channel.ask()
        return channel.receive(self._forms[key])

    def send(self, stage: int, batch: Any, hidden: Tensor) -> None:
        """Send what was made of a batch to `stage`."""
        key, channel = key_of(stage, batch), self.channels["activation", "out"]
        if key not in self._forms:
            self._forms[key] = form_of(hidden)
            channel.tell(self._forms[key])
        channel.send(hidden)


def key_of(stage: int, batch: Any) -> Any:
    """What decides the form of the hidden states in front of a stage: the same on both sides."""
    return stage, tuple(form_of(tensor) for tensor in tensors_in(batch))
