"""The runner's own workloads for the simulator: the same model, and the micro-batches that a rank would get."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.planner import models
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.sampling import epoch_windows, rank_micro_batches
from ddp_lab.runtime.data.workloads import WORKLOADS, build_workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.strategy.batches import MicroBatch

PAD_TOKEN = 0
"""The first token of the tokenizer that workload `sample` trains."""
FROM_HUB = ("yelp", "hub")
YELP_TOKENS = 512
"""Workload yelp cuts reviews there. Those of a plan are as long as that, since the data may not be here."""


def require_known(config: RunConfig) -> None:
    """Check that the workload can be built here.

    Raises:
        UserError: it is a user's own, or has adapters.
    """
    if config.workload not in WORKLOADS:
        raise UserError(f"workload {config.workload} cannot be simulated; only these can: {', '.join(WORKLOADS)}")
    if config.lora_rank:
        raise UserError("--lora-rank: adapters cannot be simulated")


def module_maker(config: RunConfig) -> Callable[[], nn.Module]:
    """Makes the model of a workload.

    Raises:
        UserError: the model of workload yelp or hub cannot be built without the hub, or is a language model; or the
            workload is not known here.
    """
    require_known(config)
    if config.workload in FROM_HUB:
        return _model_of(config).build
    if config.workload in ("sample", "smollm2-360m"):
        from ddp_lab.runtime.data.text import random_llama_classifier

        return lambda: random_llama_classifier(config.workload, PAD_TOKEN)
    if config.workload == "sample-lm":
        from ddp_lab.runtime.data.causal_lm import sample_model

        return lambda: sample_model(config)
    if config.workload == "digits":
        from ddp_lab.runtime.data.digits import DigitsCNN

        return DigitsCNN
    from ddp_lab.runtime.data import synthetic

    return lambda: synthetic.build(config).model


def first_micro_batches(config: RunConfig, world_size: int, rank: int = 0) -> list[MicroBatch]:
    """What a rank gets in the first optimizer step of a run, on the CPU.

    Raises:
        UserError: the global batch does not divide, or the workload is not known here.
    """
    require_known(config)
    mesh = Mesh.parse(config.mesh) if config.mesh else None
    size = config.micro_batch_size(mesh.data_size if mesh else world_size)
    if config.workload in FROM_HUB:
        model = _model_of(config)
        return list(model.micro_batches(config.grad_accum_steps, size, YELP_TOKENS))
    with torch.device("meta"), alone():  # the model has no memory
        workload = build_workload(config)
    window = epoch_windows(len(workload.train), config.global_batch_size, config.seed, 0)[0]
    place, places = (mesh.data_rank(rank), mesh.data_size) if mesh else (rank, world_size)
    indices = rank_micro_batches(window, place, places, size)
    return [workload.collate([workload.train[index] for index in mine]) for mine in indices]


def _model_of(config: RunConfig) -> models.Model:
    from ddp_lab.runtime.data import hub

    if config.task == CAUSAL_LM:
        raise UserError(
            f"a run with --task {CAUSAL_LM} on a model of yours is not simulated; ddp-lab plan --task {CAUSAL_LM} "
            "plans it"
        )
    return models.find(config.model or hub.MODEL)


@contextmanager
def alone() -> Iterator[None]:
    """Within this context there is a process group, of this process alone where there was none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
