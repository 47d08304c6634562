"""A forward pass through all stages, without a backward pass: for evaluation and generation."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.errors import UnsupportedError
from pipeline_parallel.channels import form_of
from pipeline_parallel.rank import PipelineRank
from pipeline_parallel.walk import RunModel


def answer(pipeline: PipelineRank, forward: RunModel, args: Any, kwargs: Any) -> Any:
    """What the whole model answers, on all ranks: `.loss` and `.logits`. Collective over the pipeline.

    Logits of tokens that have a loss are left out: nobody needs them, and each is as long as the vocabulary.

    Raises:
        UnsupportedError: gradients are on, so a backward pass would follow.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a pipeline trains by forward_backward: its schedule has the forward passes of all stages"
        )
    shape, batch = pipeline.shape(1), (args, kwargs)
    made: Any = None
    for stage in pipeline.stages.own:
        hidden = pipeline.post_receive(stage, batch).tensor() if stage else None
        made = pipeline.stages.run(stage, hidden, lambda: forward(*args, **kwargs))
        if stage + 1 < shape.stages:
            pipeline.send(stage + 1, batch, made)
    pipeline.finish()
    return _from_last(pipeline, made)


def _from_last(pipeline: PipelineRank, made: Any) -> SimpleNamespace:
    group, last = pipeline.group, dist.get_world_size(pipeline.group) - 1
    found: dict[str, Tensor] = {}
    if pipeline.rank == last:
        loss, logits = getattr(made, "loss", None), getattr(made, "logits", None)
        found = {} if loss is None else {"loss": loss}
        if logits is not None and (loss is None or logits.ndim < 3):
            found["logits"] = logits.contiguous()
    told: list[Any] = [{name: form_of(tensor) for name, tensor in found.items()}]
    dist.broadcast_object_list(told, group=group, group_src=last)
    for name, form in told[0].items():
        if pipeline.rank != last:
            found[name] = torch.empty(form.shape, dtype=form.dtype, device=pipeline.device)
        dist.broadcast(found[name], group=group, group_src=last)
    return SimpleNamespace(**{"loss": None, "logits": None} | found)
