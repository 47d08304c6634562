"""What a strategy calls of a pipeline (`ddp_lab.strategy.model_parallel.Pipeline`)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline_parallel.forward_only import answer
from pipeline_parallel.rank import PipelineRank
from pipeline_parallel.walk import BackwardOf, Batch, LossOf, RunModel, Walk


class Pipeline(PipelineRank):
    """A rank of a pipeline that trains and answers."""

    def begin(self, module: nn.Module) -> None:
        """A strategy is built over `module`, and nobody else will change `forward` of its blocks."""
        self.stages.take_turns()

    def step(self, batches: Sequence[Batch], forward: RunModel, loss_of: LossOf, backward_of: BackwardOf) -> None:
        """Forward and backward of all micro-batches. Collective over the pipeline."""
        self.refresh()
        Walk(self, batches, forward, loss_of, backward_of).run()
        self.finish()

    def answer(self, forward: RunModel, args: Any, kwargs: Any) -> Any:
        """What the whole model answers, on all ranks (`forward_only`). Collective over the pipeline."""
        self.refresh()
        return answer(self, forward, args, kwargs)
