"""PyTorch's own pipelines: `torch.distributed.pipelining`, with the same cut and the same schedules.

`pipeline_parallel` cuts the model and evaluates it, so both compute the same. Training is torch's: each stage is a
`PipelineStage`, and a `Schedule...` decides what a rank does when, sends, receives, and cuts backward in two.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining as torchs

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.mesh import PIPELINE, MeshGroups
from ddp_lab.strategy.capabilities import MeshRefusal
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.modules import tensors_in
from ddp_lab.strategy.replicated import ReplicatedStrategy
from pipeline_parallel.parallelize import parallelize_for
from pipeline_parallel.runner import PipelineRunner
from pipeline_parallel.stage import Stages

SCHEDULES: dict[str, Any] = {
    "gpipe": lambda stages, *args, **kwargs: torchs.ScheduleGPipe(*stages, *args, **kwargs),
    "1f1b": lambda stages, *args, **kwargs: torchs.Schedule1F1B(*stages, *args, **kwargs),
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb-h1": torchs.ScheduleInterleavedZeroBubble,  # with one stage a rank, the same order
}
STAGES_ALONE: MeshRefusal = (
    lambda mesh: mesh is None or [name for name, degree in mesh.degrees.items() if degree > 1] != [PIPELINE],
    "pytorch_pp has stages and no other dimension; write --mesh pp=N, or take tp, or zero1 to zero3",
)


class StageModule(nn.Module):
    """What torch takes for a stage: from hidden states and the batch to hidden states, or the loss."""

    def __init__(self, stages: Stages, stage: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for _, part, of_stage in stages.parts if of_stage == stage)
        self.run_model: Any = None  # the whole model, as a strategy runs it in a step
        self._run_stage = partial(stages.run, stage)

    def forward(self, *received: Tensor, **batch: Any) -> Tensor:
        output = self._run_stage(received[0] if received else None, lambda: self.run_model(**batch))
        return output if isinstance(output, Tensor) else output.loss


class TorchPipeline:
    """Trains by torch, and evaluates by the hand-written pipeline (`ddp_lab.strategy.model_parallel.Pipeline`)."""

    def __init__(self, by_hand: PipelineRunner, schedule: str, make_stage: Any) -> None:
        self.begin, self.answer, self.agree = by_hand.begin, by_hand.answer, by_hand.agree
        self.expected_traffic = by_hand.expected_traffic  # nothing: it runs no step
        self._schedule = schedule
        self._modules = [StageModule(by_hand.stages, stage) for stage in by_hand.stages.numbers]
        self._make_stages = lambda: list(map(make_stage, self._modules, by_hand.stages.numbers))
        self._schedules: dict[Any, Any] = {}  # torch's schedules, by number and shape of micro-batches

    def step(self, batches: Any, forward: Any, loss_of: Any, backward_of: Any) -> None:
        """Forward and backward of all micro-batches. Collective over the pipeline."""
        forms = {tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(batch)) for batch in batches}
        if len(forms) > 1:
            raise UnsupportedError("pytorch_pp: torch's stages take micro-batches of one shape alone; take tp")
        key = len(batches), forms.pop()
        is_tried = key in self._schedules  # else torch runs the first micro-batch before all, for its shapes alone
        schedule = self._schedules[key] = self._schedules.get(key) or self._make(len(batches))

        def weighted(loss: Tensor, index: Tensor) -> Tensor:
            nonlocal is_tried
            was_tried, is_tried = is_tried, True
            return loss_of(int(index), SimpleNamespace(loss=loss)) if was_tried else loss

        for module in self._modules:
            module.run_model = forward
        schedule._loss_fn = weighted
        indices = torch.arange(len(batches), dtype=torch.int64, device="cpu")
        with backward_of(True):
            schedule.step(kwarg_mbs=list(batches), target_mbs=list(indices), return_outputs=False)

    def _make(self, micro_batches: int) -> Any:
        try:
            return SCHEDULES[self._schedule](self._make_stages(), micro_batches, loss_fn=len, scale_grads=False)
        except ValueError as error:
            raise UnsupportedError(f"--pipeline-schedule {self._schedule}: torch says: {error} Take tp.") from None


def cut_by_torch(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """Cut `module` as the hand-written pipeline does, and let torch run it."""
    parts, group = parallelize_for(module, config, groups, device), groups.pipeline
    assert isinstance(parts.pipeline, PipelineRunner) and group is not None, "the mesh has stages"
    for names in parts.aliases.items():
        raise UnsupportedError(f"{' and '.join(names)}: torch's stages share no parameter; untie it, or take tp")
    make = partial(torchs.PipelineStage, num_stages=group.size() * config.stages_per_rank, device=device, group=group)
    return replace(parts, pipeline=TorchPipeline(parts.pipeline, config.pipeline_schedule, make))


class PyTorchPP(ReplicatedStrategy):
    """A pipeline alone: no two ranks hold the same part of the model."""

    supports = replace(ReplicatedStrategy.supports, mesh_refusals=(STAGES_ALONE,))

    def after_backward(self) -> None:
        """Torch writes gradients itself where it cuts backward in two, and runs no hooks."""
        self.watch.note(self.trainable.values())
