"""Pairs of model and data, by name. This module loads no library until a workload is built, so it imports fast."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.found import require_found
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import CAUSAL_LM, is_own
from ddp_lab.runtime.settings.field import AUTO, flag_name

if TYPE_CHECKING:
    from ddp_lab.runtime.data.workload import Workload

BUILT_IN_LANGUAGE = ("sample-lm", "sample-moe")


def resolve_workload(config: RunConfig, has_gpu: bool) -> RunConfig:
    """`config` with the workload that `auto` means, and the task that the workload has."""
    workload, task = config.workload, config.task
    if workload == AUTO and task == CAUSAL_LM:
        workload = "hub" if config.model or config.dataset else "sample-lm"
    elif workload == AUTO:
        workload = "yelp" if has_gpu or config.model or config.dataset else "sample"
    if workload in BUILT_IN_LANGUAGE:
        task = CAUSAL_LM
    if task == CAUSAL_LM and workload not in (*BUILT_IN_LANGUAGE, "hub"):
        raise UserError(f"--task causal-lm goes with --workload hub or sample-lm, not {workload}")
    for name in ("sequence_length", "streaming"):
        if getattr(config, name) and task != CAUSAL_LM:
            raise UserError(f"{flag_name(name)} goes with --task causal-lm")
    if not is_own(workload):
        _require_reads(config, workload, task)
    return replace(config, workload=workload, task=task)


def _require_reads(config: RunConfig, workload: str, task: str) -> None:
    """Check that one of the project's workloads reads the model and the data that the user names."""
    if (config.model or config.dataset) and workload not in ("yelp", "hub"):
        raise UserError(f"--model and --dataset go with --workload hub or yelp, or your own, not {workload}")
    for name, default in (("text_column", "text"), ("label_column", "label"), ("streaming", False)):
        if getattr(config, name) != default and workload not in ("yelp", "hub"):
            raise UserError(f"{flag_name(name)} goes with --dataset, not with --workload {workload}")
    if config.label_column != "label" and task == CAUSAL_LM:
        raise UserError("--label-column goes with --task classification")
    if workload == "hub" and not (config.model and config.dataset):
        raise UserError("--workload hub takes both --model and --dataset")


def build_workload(config: RunConfig) -> "Workload":
    """The workload that `config` names, the same on every rank, with adapters or in bf16 if asked. Collective."""
    from ddp_lab.runtime.groups import on_every_rank
    from ddp_lab.runtime.watch.phases import READING, between_steps
    from ddp_lab.strategy.building import bring_to

    between_steps(READING)
    on_every_rank(lambda: require_found(config))
    workload = _named(config)
    if config.lora_rank is not None:
        from ddp_lab.runtime.data.lora import with_adapters

        workload = with_adapters(workload, config)
    bring_to(workload.model, config.strategy.precision)
    return workload


def import_libraries(config: RunConfig) -> None:
    """Import what takes longest of what `build_workload` needs, so that forked ranks have it."""
    if config.workload not in ("digits", "mlp") and not is_own(config.workload):
        from ddp_lab.runtime.data.masks import read_no_masks

        read_no_masks()  # imports all of transformers that text needs


def _named(config: RunConfig) -> "Workload":
    if is_own(config.workload):
        from ddp_lab.runtime.data import own

        return own.build(config)
    if config.workload in BUILT_IN_LANGUAGE or (config.workload == "hub" and config.task == CAUSAL_LM):
        from ddp_lab.runtime.data import causal_lm

        return causal_lm.build(config)
    if config.workload in ("sample", "smollm2-360m", "yelp", "hub"):
        from ddp_lab.runtime.data import text

        return text.build(config)
    from ddp_lab.runtime.data import synthetic

    return synthetic.build(config)
